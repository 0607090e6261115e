"""Attention by documents: the numbers of the mask, without a mask, and without a stop of the host."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import lookup_backend

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import CompileConfig, Config
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.data.batches import (
    Episodes,
    LabelledBatch,
    TokenBatch,
    collate,
    collate_episodes,
    learned_segment,
)
from drumline.engine.transforms import apply_activation_checkpointing
from drumline.errors import PlanError
from drumline.models import attention
from drumline.models.attention import (
    KERNELS,
    Documents,
    _works,
    attend_by_documents,
    attend_each_document,
)
from drumline.models.build import build_model
from drumline.models.head import (
    ForwardWithObjective,
    can_split,
    compute_outputs,
    require_next_token,
    shares_prompts,
    trunk_and_head,
)
from drumline.models.load import facts, load_config
from drumline.plan.attention import PACKAGES, as_before, by_documents, choice_of, choose
from drumline.plan.plan import BatchPlan, Layout
from drumline.planner.cost.activations import formula
from drumline.vendor.torch import TorchDispatchMode
from tests.unit.test_models_head import KINDS, LLAMA

WINDOW = {"sliding_window": 4}
PACK = {
    **{
        kind: {"model_type": kind, **KINDS[kind]}
        for kind in ("llama", "gpt2", "qwen2", "mixtral", "gemma2", "granite", "cohere")
    },
    "mistral with a window": {"model_type": "mistral", **LLAMA, **WINDOW, "head_dim": 8},
    "gemma2 with a window": {"model_type": "gemma2", **LLAMA, **WINDOW, "head_dim": 8},
    "gemma3": {
        "model_type": "gemma3_text",
        **LLAMA,
        **WINDOW,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 8},
}
GPT_OSS = {
    "model_type": "gpt_oss",
    **LLAMA,
    **WINDOW,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


def layout(
    device: Any = "cpu", precision: Any = "fp32", devices: int = 1, packs: bool = True, **model: Any
) -> Layout:
    model = {"id": None, "config": {"model_type": "llama"}, **model}
    data = {"train": [{"kind": "file", "path": "x"}], "packing": packs}
    config = Config.model_validate({"model": model, "algorithm": "pretrain", "data": data})
    batch = BatchPlan(global_samples=1, micro_batch=1, accumulation=1, eval_micro_batch=1)
    return Layout(
        config=config,
        mesh=Mesh(),
        engine="native",
        devices_per_rank=devices,
        device=device,
        precision=precision,
        batch=batch,
    )


def build(kind: str) -> Any:
    return build_model(
        None, ModelConfig(id=None, config=(PACK | {"gpt_oss": GPT_OSS})[kind]), seed=0
    ).eval()


def batch_of(*rows: tuple[int, ...], width: int = 16) -> TokenBatch:
    """Rows of documents of these lengths, of different tokens."""
    made = collate([[learned_segment(size) for size in row] for row in rows], 0, width)
    torch.manual_seed(1)
    return replace(made, input_ids_BT=torch.randint(1, 64, made.input_ids_BT.shape))


def loss_and_gradients(
    model: Any, batch: TokenBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss_sum, _ = ForwardWithObjective(model)(batch, NextToken(chunk=0, answers=True).objective)
    loss_sum.backward()
    return loss_sum.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


FEW = ("llama", "gpt2", "mistral with a window", "gpt_oss")
BATCHES = {
    "packed": [(3, 7, 5), (16,)],
    "filler": [(1, 6, 9), ()],
    "padded": [(9,), (14,)],
    "full": [(16,), (16,)],
}
KINDS_AND_ROWS = [
    pytest.param(
        kind,
        rows,
        marks=[] if rows == "packed" or kind == "mistral with a window" else pytest.mark.full,
    )
    for kind in PACK
    for rows in BATCHES
]


@pytest.mark.claim("attention by documents has the losses and gradients of the mask")
@pytest.mark.parametrize(("kind", "rows"), KINDS_AND_ROWS)
def test_losses_and_gradients_of_the_mask(kind: str, rows: str) -> None:
    model, batch = build(kind), batch_of(*BATCHES[rows])
    masked, masked_gradients = loss_and_gradients(model, batch)
    attend_by_documents(model, layout())
    assert by_documents(model)
    loss, gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, masked, rtol=1e-5, atol=0)
    assert gradients.keys() == masked_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, masked_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def rollout(lengths: list[tuple[int, int]]) -> Episodes:
    """Completions of these lengths behind prompts of these, of other tokens; the same prompt where its length is the same."""
    generator = np.random.default_rng(0)
    prompts = {size: generator.integers(1, 64, size) for size, _ in lengths}
    made = Episodes.start(
        [prompts[size] for size, _ in lengths],
        [generator.integers(1, 64, size) for _, size in lengths],
    )
    return replace(
        made,
        weights_NM=torch.tensor(generator.random(made.mask_NM.shape)).float() * made.mask_NM,
        weight_N=torch.ones(len(made)),
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in FEW else pytest.mark.full)
        for kind in [*PACK, "gpt_oss"]
    ],
)
def test_completions_behind_one_prompt_have_the_numbers_of_rows_of_their_own(kind: str) -> None:
    """Of groups in any order, a prompt with one completion, a completion without tokens, a filler."""
    episodes = rollout([(5, 4), (9, 1), (5, 7), (9, 6), (5, 0), (2, 3)])
    batch, model = collate_episodes(episodes, [0, 1, -1, 2, 3, 4, 5], 0, None), build(kind)
    assert batch.shared is not None and batch.shared.documents == ((5, 4, 7), (9, 1, 6), (2, 3))
    attend_by_documents(model, layout())
    assert shares_prompts(model, "cpu")

    def answers(shares: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model._drumline_shares = shares
        model.zero_grad()
        made = compute_outputs(model, batch, trunk_and_head(model) if can_split(model) else None)
        log_probs_BT, _ = made.log_probs(batch.targets_BT, 0)
        (log_probs_BT * batch.weights_BT).sum().backward()
        return log_probs_BT.detach(), {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }

    (alone, gradients_alone), (shared, gradients) = answers(False), answers(True)
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == gradients_alone.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, gradients_alone[name], rtol=1e-4, atol=1e-5, msg=name)


def test_no_prompt_is_shared_by_a_model_that_would_give_other_numbers() -> None:
    masked, counting = build("llama"), build("mixtral")
    counting.config.output_router_logits = True
    attend_by_documents(counting, layout())
    assert not shares_prompts(masked, "cpu") and not shares_prompts(counting, "cpu")
    model = build("llama")
    attend_by_documents(model, layout())
    assert shares_prompts(model, "cpu")
    one_kernel = type(model.model.layers[0].self_attn).forward
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a class that sees the order of tokens and not their positions

        def shifted(self: Any, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
            return one_kernel(self, hidden_states + hidden_states.roll(1, 1), *given, **more)

        patch.setattr(type(model.model.layers[0].self_attn), "forward", shifted)
        assert not shares_prompts(model, "cpu")


def test_fillers_alone_give_each_parameter_a_gradient() -> None:
    """Of zero: DDP reduces in a step what each rank has a gradient of."""
    model = build("llama")
    attend_by_documents(model, layout())
    _, gradients = loss_and_gradients(model, batch_of((), ()))
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_each_document_is_as_if_alone(kind: str) -> None:
    model, sizes = build(kind), (3, 7, 5)
    attend_by_documents(model, layout())
    batch, alone = batch_of(sizes), 0.0
    for size, ids_BT in zip(sizes, batch.input_ids_BT[:, :15].split(sizes, 1), strict=True):
        document = replace(batch_of((size,), width=size), input_ids_BT=ids_BT)
        alone += float(loss_and_gradients(model, document)[0])
    assert float(loss_and_gradients(model, batch)[0]) == pytest.approx(alone, rel=1e-6)


def test_a_pack_of_gpt_oss_is_taken_by_documents_or_refused() -> None:
    """transformers' own mask does not keep its documents apart: its class hands no positions on to the mask."""
    model = build("gpt_oss")
    attend_by_documents(model, layout(attention="eager"))
    with pytest.raises(
        PlanError,
        match=r"data.packing.*GptOssForCausalLM does not keep the documents of a pack apart",
    ):
        require_next_token(model, "cpu", packed=True)
    attend_by_documents(model, layout())
    require_next_token(model, "cpu", packed=True)


def test_texts_of_a_bidirectional_classifier() -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    source = ModelConfig(id=None, config=config | {"vocab_size": 64})
    model = build_model(None, source, seed=0, head="text", labels=("a", "b")).eval()
    made = batch_of((9,), (16,), ())
    mask_BT = (torch.arange(16) < torch.tensor([9, 16, 1])[:, None]).long()
    batch = LabelledBatch(
        **vars(made), labels_B=torch.zeros(3, dtype=torch.int64), attention_mask_BT=mask_BT
    )
    masked = compute_outputs(model, batch, None).class_logits()
    attend_by_documents(model, layout())
    with Seen() as seen:
        by_length = compute_outputs(model, batch, None).class_logits()
    torch.testing.assert_close(by_length[:2], masked[:2])
    assert by_length.isfinite().all() and not seen.pairs(16) and not seen.stops


class Seen(TorchDispatchMode):
    """What a forward and backward do: operations for which a host would wait for a device, and shapes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        by_condition = func is torch.ops.aten.index.Tensor and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if by_condition or any(
            word in str(func)
            for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_pin_memory")
        ):
            self.stops.append(str(func))
        self.shapes |= {
            tuple(t.shape)
            for t in (made if isinstance(made, tuple | list) else [made])
            if isinstance(t, torch.Tensor)
        }
        return made

    def pairs(self, width: int) -> set[tuple[int, ...]]:
        """Shapes of all pairs of tokens of a row."""
        return {shape for shape in self.shapes if shape[-2:] == (width, width)}


@pytest.mark.parametrize("rows", ["packed", pytest.param("padded", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.full)])
def test_a_micro_batch_has_no_stop_and_no_mask(
    kind: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.item()` and conditions reach the dispatcher; `.tolist()` and `.cpu()` of a CPU tensor do not."""
    model = build(kind)
    attend_by_documents(model, layout())
    batch = batch_of((3, 7, 9), (11, 8), width=19 + (rows == "padded"))
    module, seen = ForwardWithObjective(model), Seen()
    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: seen.stops.append(name))
    with seen:
        loss_sum, _ = module(batch.to("cpu"), NextToken(chunk=8, answers=False).objective)
        (loss_sum / batch.weight).backward()
        log_probs_BT, _ = compute_outputs(model, batch, trunk_and_head(model)).log_probs(
            batch.targets_BT, 8
        )
        log_probs_BT.sum().backward()
    # Transformers' own dealing of tokens to experts.
    experts = {"nonzero", "_local_scalar_dense"} if kind == "mixtral" else set()
    assert not [stop for stop in seen.stops if not any(word in stop for word in experts)]
    assert not seen.pairs(batch.input_ids_BT.shape[1])


def test_a_recomputed_block_attends_to_its_own_batch() -> None:
    """Of two micro-batches in flight, as a pipeline has them, the first one's backward comes last."""
    model = build("llama")
    attend_by_documents(model, layout())
    first, second = batch_of((3, 7, 5)), batch_of((8, 8))
    _, wanted = loss_and_gradients(model, first)
    model.train()
    apply_activation_checkpointing(model, "full")
    model.zero_grad()
    module, objective = ForwardWithObjective(model), NextToken(chunk=0, answers=True).objective
    loss_sum, _ = module(first, objective)
    module(second, objective)
    loss_sum.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


CHECKPOINTING = [
    pytest.param(kind, marks=() if kind == "none" else pytest.mark.full)
    for kind in ("none", "full", "selective")
]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.slow
def test_a_compiled_block_is_one_graph(checkpointing: Any) -> None:
    """The same numbers, and after a second batch no other lengths are compiled anew."""
    batches = [batch_of((3, 7, 5), (9, 2)), batch_of((3, 7), (9, 2)), batch_of((16,), (1, 2, 3, 3))]
    plain, model = build("llama"), build("llama").train()
    for each in (plain, model):
        attend_by_documents(each, layout())
    apply_activation_checkpointing(model, checkpointing)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    for batch in batches:
        loss, gradients = loss_and_gradients(model, batch)
        wanted, wanted_gradients = loss_and_gradients(plain, batch)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(gradients, wanted_gradients)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    "kernel",
    ["varlen", pytest.param("flash_attention_2", marks=pytest.mark.full), "flex_attention"],
)
@pytest.mark.slow
def test_a_kernel_is_a_part_of_the_graph(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced for a CPU, for which varlen has no form, and of flash_attn there is a stand-in."""
    model = build("llama")
    monkeypatch.setattr(attention, "_works", lambda *_: True)
    stand_in = SimpleNamespace(flash_attn_varlen_func=lambda query, *_, **__: query.sinh())
    monkeypatch.setitem(attention._packages, "flash_attn", stand_in)
    attend_by_documents(model, layout(attention=kernel))
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return lambda hidden_BTD, *_: (hidden_BTD,)

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    with torch.no_grad():
        compute_outputs(model, batch_of((3, 7, 5), (9, 2)), trunk_and_head(model))
    word = {"varlen": "torch_attn._varlen_attn", "flash_attention_2": "sinh"}.get(kernel, kernel)
    assert len(graphs) == 1 and word in graphs[0]


def test_generation_is_that_of_the_model() -> None:
    ids_BT = torch.arange(6)[None] + 3
    for kind in ("llama", "gemma2"):
        model = build(kind)
        plain = model.generate(input_ids=ids_BT, max_new_tokens=4, do_sample=False)
        attend_by_documents(model, layout())
        assert torch.equal(
            model.generate(input_ids=ids_BT, max_new_tokens=4, do_sample=False), plain
        )
        with as_before(model):
            assert not by_documents(model)
        assert by_documents(model)


@pytest.mark.full
def test_the_planner_charges_no_mask_where_none_is_made() -> None:
    sizes = facts(load_config(None, ModelConfig(id=None, config=PACK["llama"])), 64)
    masked, by_document = (
        formula(layout(**of), sizes).saved_block for of in ({"attention": "sdpa"}, {})
    )
    queries, keys, repeated, joined = 32, 16, 2 * (32 - 16), 32
    assert sizes.heads * sizes.head_dim == queries and sizes.kv_heads * sizes.head_dim == keys
    assert masked - by_document == 4 * (layout().length + repeated - joined)
    assert choice_of(layout(), sizes).kernel == "documents"


# ------------------------------------------------------------------------------------------------------- kernels for variable lengths


def reference(
    q: Any,
    k: Any,
    v: Any,
    bounds_q: Any,
    bounds_k: Any,
    longest_q: int,
    longest_k: int,
    **options: Any,
) -> torch.Tensor:
    """What kernels for variable lengths document: tokens of all documents end to end, [N, H, D], and where documents begin."""
    left, right = options["window_size"]
    scale, cap = options.get("scale", options.get("softmax_scale")), options.get("softcap", 0.0)
    assert (
        bounds_q.dtype == torch.int32
        and torch.equal(bounds_q, bounds_k)
        and longest_q == longest_k == int(bounds_q.diff().max())
    )
    made = []
    for start, stop in zip(bounds_q.tolist(), bounds_q.tolist()[1:], strict=False):
        places = torch.arange(stop - start)
        ahead = places[None] - places[:, None]
        seen = (ahead <= right if right >= 0 else ahead < len(ahead)) & (
            -ahead <= left if left >= 0 else ahead < len(ahead)
        )
        keys, values = (
            t[start:stop].repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys) * (scale or q.shape[-1] ** -0.5)
        scores = cap * (scores / cap).tanh() if cap else scores
        made.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        )
    return torch.cat(made)


def eager(
    module: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    softcap: float | None = None,
    scaling: float = 1.0,
    **_: Any,
) -> tuple[Any]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return (((scores if mask is None else scores + mask).softmax(-1) @ v).transpose(1, 2),)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_given_what_they_document(
    kernel: Any, cap: Any, causal: bool, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flex_attention itself, as it is; the rest against what they document, since they have no form for a CPU."""
    if (kernel == "varlen" and cap) or (window and not causal):
        return
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", reference)
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_varlen_func=reference))
    documents = Documents(batch_of((3, 7, 5), (9,)), causal, window)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    made = KERNELS[kernel](query, key, value, documents, 0.3, cap)
    wanted = attend_each_document(
        partial(eager, None), documents, True, query, key, value, softcap=cap, scaling=0.3
    )
    torch.testing.assert_close(made[0, :15], wanted[0, :15])
    torch.testing.assert_close(made[1, :9], wanted[1, :9])


def test_a_kernel_that_does_not_work_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = build("llama"), batch_of((3, 7, 5))
    attend_by_documents(model, layout())
    wanted, _ = loss_and_gradients(model, batch)
    model = build("llama")
    attend_by_documents(model, layout(attention="varlen"))
    torch.testing.assert_close(loss_and_gradients(model, batch)[0], wanted)
    assert (
        "attention by varlen does not work here" in caplog.text
        and "each document by itself instead" in caplog.text
    )


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_kernel_is_tried_within_a_block_that_is_computed_again(
    checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in, since none has a form for a CPU. What a forward is in, hooks and autocast, is not there in the trial."""
    model, batch, lengths, low, dtypes = build("llama"), batch_of((3, 7, 5), (9,)), [], [], set()
    attend_by_documents(model, layout())
    _, wanted = loss_and_gradients(model, batch)

    def kernel(q: Any, k: Any, v: Any, documents: Documents, scale: Any, cap: Any) -> torch.Tensor:
        lengths.append(q.shape[2])
        low.append(torch.is_autocast_enabled("cpu"))
        dtypes.update(tensor.dtype for tensor in (q, k, v))
        return attend_each_document(
            partial(eager, None), documents, True, q, k, v, scaling=q.shape[-1] ** -0.5
        )

    monkeypatch.setitem(KERNELS, "varlen", kernel)
    monkeypatch.setattr(attention, "_works", functools.lru_cache(_works.__wrapped__))
    model = build("llama").train()
    attend_by_documents(model, layout("cuda", "bf16", attention="varlen"))
    apply_activation_checkpointing(model, checkpointing)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = [loss_and_gradients(model, batch)[1] for _ in range(2)]
    assert lengths == [24] + [16] * 2 * 2 * model.config.num_hidden_layers and low == [
        False,
        *[True] * (len(lengths) - 1),
    ]
    assert dtypes == {torch.bfloat16}  # rotary positions leave q and k in fp32 under autocast
    for made in gradients:
        assert made.keys() == wanted.keys()
        torch.testing.assert_close(made, wanted, rtol=0.1, atol=0.1)


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        size: int = 64, caps: bool = False, own: bool = False, needs_mask: str = "", **of: Any
    ) -> str:
        return choose(layout(**of), size, caps, own, needs_mask).kernel

    gpu = {"device": "cuda", "precision": "bf16"}
    monkeypatch.setattr("drumline.plan.attention.installed", lambda name: False)
    assert kernel() == kernel(device="cuda") == kernel(own=True, **gpu) == "documents"
    assert (
        kernel(**gpu) == "varlen"
        and kernel(caps=True, **gpu) == kernel(size=512, **gpu) == "flex_attention"
    )
    assert kernel(packs=False, **gpu) == kernel(attention="documents", **gpu) == "documents"
    assert (
        kernel(needs_mask="why", **gpu)
        == kernel(attention="sdpa")
        == kernel(attention="eager")
        == kernel(devices=2, **gpu)
        == "masked"
    )
    monkeypatch.setattr("drumline.plan.attention.installed", lambda name: name == "flash_attn")
    assert (
        kernel(**gpu) == kernel(caps=True, **gpu) == "flash_attention_2"
        and kernel(attention="varlen", **gpu) == "varlen"
    )
    again, compiled = layout(), CompileConfig(enabled=True)
    again = again.model_copy(
        update={
            "activation_checkpointing": "full",
            "config": again.config.model_copy(update={"compile": compiled}),
        }
    )
    assert choose(again, 64, False, False, "").kernel == "documents"
    lines = [choose(each, 64, False, False, "").line for each in (layout(**gpu), layout())]
    assert "(experimental)" in lines[0] and lines[1].startswith("documents: ")
