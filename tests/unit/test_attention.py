"""Attention by documents: the numbers of the mask, without a mask, and without a stop of the host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
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
    attend_each_document,
    use_document_attention,
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
from drumline.plan.attention import (
    PACKAGES,
    choose,
    choose_by_facts,
    has_drumline_attention,
    original_attention,
)
from drumline.plan.plan import BatchPlan, Layout
from drumline.planner.cost.activations import formula
from drumline.vendor.torch import TorchDispatchMode
from tests.unit.test_models_head import KINDS, LLAMA

WINDOWED = {
    **LLAMA,
    "sliding_window": 4,
    "head_dim": 8,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
PACK: dict[str, dict[str, Any]] = {}
for kind_of_pack in ("llama", "gpt2", "qwen2", "mixtral", "gemma2", "granite", "cohere"):
    PACK[kind_of_pack] = {"model_type": kind_of_pack, **KINDS[kind_of_pack]}
PACK["mistral with a window"] = {"model_type": "mistral", **WINDOWED}
PACK["gemma2 with a window"] = {"model_type": "gemma2", **WINDOWED}
PACK["gemma3"] = {
    "model_type": "gemma3_text",
    **WINDOWED,
    "layer_types": LAYER_TYPES,
}
PACK["qwen3"] = {
    "model_type": "qwen3",
    **LLAMA,
    "head_dim": 8,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = PACK | {
    "gpt_oss": {
        "model_type": "gpt_oss",
        **WINDOWED,
        **EXPERTS,
    }
}
Gradients = dict[str, torch.Tensor]


def params(values: Iterable[str], often: Container[str]) -> list[Any]:
    """Return the parameters of a test. Those not in `often` run in the full suite only."""
    chosen = []
    for value in values:
        marks = () if value in often else pytest.mark.full
        chosen.append(pytest.param(value, marks=marks))
    return chosen


def layout(
    device: Any = "cpu",
    precision: Any = "fp32",
    devices: int = 1,
    packs: bool = True,
    **model: Any,
) -> Layout:
    model = {
        "id": None,
        "config": {"model_type": "llama"},
        **model,
    }
    data = {"train": [{"kind": "file", "path": "x"}], "packing": packs}
    config = Config.model_validate(
        {
            "model": model,
            "algorithm": "pretrain",
            "data": data,
        }
    )
    batch = BatchPlan(
        global_samples=1,
        micro_batch=1,
        accumulation=1,
        eval_micro_batch=1,
    )
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
    source = ModelConfig(id=None, config=MODELS[kind])
    return build_model(None, source, seed=0).eval()


def build_by_documents(kind: str, **options: Any) -> Any:
    """Return a model of this kind that attends by documents, with these options of its layout."""
    model = build(kind)
    use_document_attention(model, layout(**options))
    return model


def batch_of(*rows: tuple[int, ...], width: int = 16) -> TokenBatch:
    """Rows of documents of these lengths, of different tokens."""
    segments = []
    for row in rows:
        segments.append([learned_segment(size) for size in row])

    made = collate(segments, 0, width)
    torch.manual_seed(1)
    ids_BT = torch.randint(1, 64, made.input_ids_BT.shape)
    return replace(made, input_ids_BT=ids_BT)


def gradients_of(model: Any) -> Gradients:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def loss_and_gradients(model: Any, batch: TokenBatch) -> tuple[torch.Tensor, Gradients]:
    model.zero_grad()
    objective = NextToken(chunk=0, has_answers=True).objective
    loss_sum, _ = ForwardWithObjective(model)(batch, objective)
    loss_sum.backward()
    return loss_sum.detach(), gradients_of(model)


def assert_same_gradients(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient,
            wanted[name],
            rtol=1e-4,
            atol=1e-5,
            msg=name,
        )


BATCHES = {
    "packed": [(3, 7, 5), (16,)],
    "filler": [(1, 6, 9), ()],
    "padded": [(9,), (14,)],
    "full": [(16,), (16,)],
}


def kinds_and_rows() -> list[Any]:
    """Return each kind of model with each batch; most of them run in the full suite only."""
    pairs = []
    for kind in PACK:
        for rows in BATCHES:
            is_plain = rows == "packed" or kind == "mistral with a window"
            marks = () if is_plain else pytest.mark.full
            pairs.append(pytest.param(kind, rows, marks=marks))

    return pairs


@pytest.mark.slow
@pytest.mark.claim("attention by documents has the losses and gradients of the mask")
@pytest.mark.parametrize(("kind", "rows"), kinds_and_rows())
def test_losses_and_gradients_of_the_mask(kind: str, rows: str) -> None:
    model = build(kind)
    batch = batch_of(*BATCHES[rows])
    masked, masked_gradients = loss_and_gradients(model, batch)
    use_document_attention(model, layout())

    assert has_drumline_attention(model)

    loss, gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, masked, rtol=1e-5, atol=0)
    assert_same_gradients(gradients, masked_gradients)


def rollout(lengths: list[tuple[int, int]]) -> Episodes:
    """Return completions behind prompts of these lengths; prompts of one length are the same."""
    generator = np.random.default_rng(0)
    prompt_of_size = {}
    for size, _ in lengths:
        prompt_of_size[size] = generator.integers(1, 64, size)

    completions = []
    for _, size in lengths:
        completions.append(generator.integers(1, 64, size))

    prompts = [prompt_of_size[size] for size, _ in lengths]
    made = Episodes.start(prompts, completions)
    weights_NM = torch.tensor(generator.random(made.mask_NM.shape)).float()
    return replace(made, weights_NM=weights_NM * made.mask_NM, weight_N=torch.ones(len(made)))


def answers(
    model: Any,
    batch: Any,
    shares: bool,
) -> tuple[torch.Tensor, Gradients]:
    """Return log-probabilities and gradients, with prompts shared or each in a row of its own."""
    model._drumline_shares = shares
    model.zero_grad()
    split = trunk_and_head(model) if can_split(model) else None
    outputs = compute_outputs(model, batch, split)
    log_probs_BT, _ = outputs.log_probs(batch.targets_BT, 0)
    (log_probs_BT * batch.weights_BT).sum().backward()
    return log_probs_BT.detach(), gradients_of(model)


FEW = ("llama", "gpt2", "mistral with a window", "gpt_oss")


@pytest.mark.parametrize("kind", params(MODELS, often=FEW))
def test_completions_behind_one_prompt_have_the_numbers_of_rows_of_their_own(kind: str) -> None:
    """Of groups in any order, a prompt with one completion, a completion without tokens, a filler."""
    episodes = rollout([(5, 4), (9, 1), (5, 7), (9, 6), (5, 0), (2, 3)])
    batch = collate_episodes(episodes, [0, 1, -1, 2, 3, 4, 5], 0, None)
    model = build(kind)

    assert batch.shared is not None
    assert batch.shared.document_lengths == ((5, 4, 7), (9, 1, 6), (2, 3))

    use_document_attention(model, layout())
    assert shares_prompts(model, "cpu")

    alone, gradients_alone = answers(model, batch, shares=False)
    shared, gradients = answers(model, batch, shares=True)
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients, gradients_alone)


def test_no_prompt_is_shared_by_a_model_that_would_give_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masked = build("llama")
    assert not shares_prompts(masked, "cpu")

    counting = build("mixtral")
    counting.config.output_router_logits = True
    use_document_attention(counting, layout())
    assert not shares_prompts(counting, "cpu")

    model = build_by_documents("llama")
    assert shares_prompts(model, "cpu")

    attention_class = type(model.model.layers[0].self_attn)
    one_kernel = attention_class.forward

    # A class that sees the order of tokens and not their positions.
    def shifted(
        self: Any,
        hidden_states: torch.Tensor,
        *given: Any,
        **more: Any,
    ) -> Any:
        joined = hidden_states + hidden_states.roll(1, 1)
        return one_kernel(self, joined, *given, **more)

    monkeypatch.setattr(attention_class, "forward", shifted)

    assert not shares_prompts(model, "cpu")


def test_fillers_alone_give_each_parameter_a_gradient() -> None:
    """Of zero: DDP reduces in a step what each rank has a gradient of."""
    model = build_by_documents("llama")
    _, gradients = loss_and_gradients(model, batch_of((), ()))
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert not gradient.any(), name


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_each_document_is_as_if_alone(kind: str) -> None:
    model = build_by_documents(kind)
    sizes = (3, 7, 5)
    batch = batch_of(sizes)
    documents = batch.input_ids_BT[:, :15].split(sizes, 1)
    alone = 0.0
    for size, ids_BT in zip(sizes, documents, strict=True):
        document = replace(batch_of((size,), width=size), input_ids_BT=ids_BT)
        loss, _ = loss_and_gradients(model, document)
        alone += float(loss)

    together, _ = loss_and_gradients(model, batch)

    assert float(together) == pytest.approx(alone, rel=1e-6)


def test_a_pack_of_gpt_oss_is_taken_by_documents_or_refused() -> None:
    """transformers' own mask does not keep its documents apart: its class hands no positions on to the mask."""
    model = build_by_documents("gpt_oss", attention="eager")
    refusal = r"data.packing.*GptOssForCausalLM does not keep the documents of a pack apart"
    with pytest.raises(PlanError, match=refusal):
        require_next_token(model, "cpu", packed=True)

    use_document_attention(model, layout())
    require_next_token(model, "cpu", packed=True)


BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def test_texts_of_a_bidirectional_classifier() -> None:
    source = ModelConfig(id=None, config=BERT)
    model = build_model(
        None,
        source,
        seed=0,
        head="text",
        labels=("a", "b"),
    ).eval()
    made = batch_of((9,), (16,), ())
    lengths_B1 = torch.tensor([[9], [16], [1]])
    batch = LabelledBatch(
        **vars(made),
        labels_B=torch.zeros(3, dtype=torch.int64),
        attention_mask_BT=(torch.arange(16) < lengths_B1).long(),
    )
    masked = compute_outputs(model, batch, None).class_logits()
    use_document_attention(model, layout())
    with Seen() as seen:
        by_length = compute_outputs(model, batch, None).class_logits()

    torch.testing.assert_close(by_length[:2], masked[:2])

    assert by_length.isfinite().all()
    assert not seen.pairs(16)
    assert not seen.stops


STOPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_pin_memory")


def has_word(name: str, words: Iterable[str]) -> bool:
    return any(word in name for word in words)


def waits_for_device(operation: Any, arguments: Any) -> bool:
    """Return whether a host would have to wait for a device at this operation."""
    if operation is torch.ops.aten.index.Tensor:
        for index in arguments[1]:
            if index is not None and index.dtype == torch.bool:
                return True
    return has_word(str(operation), STOPS)


class Seen(TorchDispatchMode):
    """What a forward and backward do: operations for which a host would wait for a device, and shapes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[str] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if waits_for_device(func, args):
            self.stops.append(str(func))

        results = made if isinstance(made, tuple | list) else [made]
        for result in results:
            if isinstance(result, torch.Tensor):
                self.shapes.add(tuple(result.shape))

        return made

    def pairs(self, width: int) -> set[tuple[int, ...]]:
        """Shapes of all pairs of tokens of a row."""
        return {shape for shape in self.shapes if shape[-2:] == (width, width)}


@pytest.mark.parametrize("rows", params(["packed", "padded"], often=["packed"]))
@pytest.mark.parametrize("kind", params(["llama", "mixtral"], often=["llama"]))
def test_a_micro_batch_has_no_stop_and_no_mask(
    kind: str,
    rows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`.item()` and conditions reach the dispatcher; `.tolist()` and `.cpu()` of a CPU tensor do not."""
    model = build_by_documents(kind)
    width = 20 if rows == "padded" else 19
    batch = batch_of((3, 7, 9), (11, 8), width=width)
    module = ForwardWithObjective(model)
    objective = NextToken(chunk=8, has_answers=False).objective
    seen = Seen()
    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: seen.stops.append(name))

    with seen:
        loss_sum, _ = module(batch.to("cpu"), objective)
        (loss_sum / batch.weight).backward()
        outputs = compute_outputs(model, batch, trunk_and_head(model))
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, 8)
        log_probs_BT.sum().backward()

    # Transformers' own dealing of tokens to experts.
    experts = ("nonzero", "_local_scalar_dense") if kind == "mixtral" else ()
    stops = [stop for stop in seen.stops if not has_word(stop, experts)]

    assert not stops
    assert not seen.pairs(batch.input_ids_BT.shape[1])


def test_a_recomputed_block_attends_to_its_own_batch() -> None:
    """Of two micro-batches in flight, as a pipeline has them, the first one's backward comes last."""
    model = build_by_documents("llama")
    first = batch_of((3, 7, 5))
    second = batch_of((8, 8))
    _, wanted = loss_and_gradients(model, first)
    model.train()
    apply_activation_checkpointing(model, "full")
    model.zero_grad()
    module = ForwardWithObjective(model)
    objective = NextToken(chunk=0, has_answers=True).objective
    loss_sum, _ = module(first, objective)
    module(second, objective)
    loss_sum.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def compile_layers(model: Any, backend: Callable[[Any, Any], Any]) -> None:
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)


@pytest.mark.parametrize("checkpointing", params(["none", "full", "selective"], often=["none"]))
@pytest.mark.slow
def test_a_compiled_block_is_one_graph(checkpointing: Any) -> None:
    """The same numbers, and after a second batch no other lengths are compiled anew."""
    batches = [
        batch_of((3, 7, 5), (9, 2)),
        batch_of((3, 7), (9, 2)),
        batch_of((16,), (1, 2, 3, 3)),
    ]
    plain = build_by_documents("llama")
    model = build_by_documents("llama").train()
    apply_activation_checkpointing(model, checkpointing)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compile_layers(model, backend)
    for batch in batches:
        loss, gradients = loss_and_gradients(model, batch)
        wanted, wanted_gradients = loss_and_gradients(plain, batch)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(gradients, wanted_gradients)

    assert len(graphs) == 2


WORD_OF_KERNEL = {
    "varlen": "torch_attn._varlen_attn",
    "flash_attention_2": "sinh",
    "flex_attention": "flex_attention",
}


@pytest.mark.parametrize("kernel", params(WORD_OF_KERNEL, often=["varlen", "flex_attention"]))
@pytest.mark.slow
def test_a_kernel_is_a_part_of_the_graph(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced for a CPU, for which varlen has no form, and of flash_attn there is a stand-in."""
    monkeypatch.setattr(attention, "_works", lambda *_: True)
    stand_in = SimpleNamespace(flash_attn_varlen_func=lambda query, *_, **__: query.sinh())
    monkeypatch.setitem(attention._packages, "flash_attn", stand_in)
    model = build_by_documents("llama", attention=kernel)
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return lambda hidden_BTD, *_: (hidden_BTD,)

    compile_layers(model, backend)
    with torch.no_grad():
        compute_outputs(model, batch_of((3, 7, 5), (9, 2)), trunk_and_head(model))

    assert len(graphs) == 1
    assert WORD_OF_KERNEL[kernel] in graphs[0]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_generation_is_that_of_the_model(kind: str) -> None:
    options = {
        "input_ids": torch.arange(6)[None] + 3,
        "max_new_tokens": 4,
        "do_sample": False,
    }
    model = build(kind)
    plain = model.generate(**options)
    use_document_attention(model, layout())

    assert torch.equal(model.generate(**options), plain)

    with original_attention(model):
        assert not has_drumline_attention(model)

    assert has_drumline_attention(model)


@pytest.mark.full
def test_the_planner_charges_no_mask_where_none_is_made() -> None:
    sizes = facts(load_config(None, ModelConfig(id=None, config=PACK["llama"])), 64)
    masked = formula(layout(attention="sdpa"), sizes).saved_block
    by_document = formula(layout(), sizes).saved_block
    queries = 32
    keys = 16
    repeated = 2 * (queries - keys)
    joined = 32

    assert sizes.heads * sizes.head_dim == queries
    assert sizes.kv_heads * sizes.head_dim == keys
    assert masked - by_document == 4 * (layout().max_length + repeated - joined)
    assert choose_by_facts(layout(), sizes).kernel == "documents"


# ------------------------------------------------------------------------------------------------------- kernels for variable lengths


def repeat_heads(states: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values so that each head of the queries has its own."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], 1)


def cap_scores(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    if cap:
        return cap * (scores / cap).tanh()
    return scores


def visible(
    size: int,
    left: int,
    right: int,
) -> torch.Tensor:
    """Return which keys the queries of one document see; a side below zero has no limit."""
    places = torch.arange(size)
    ahead = places[None] - places[:, None]
    seen = torch.ones(size, size, dtype=torch.bool)
    if right >= 0:
        seen &= ahead <= right

    if left >= 0:
        seen &= -ahead <= left

    return seen


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
    scale = options.get("scale", options.get("softmax_scale"))
    scale = scale or q.shape[-1] ** -0.5

    assert bounds_q.dtype == torch.int32
    assert torch.equal(bounds_q, bounds_k)
    assert longest_q == longest_k == int(bounds_q.diff().max())

    sizes = bounds_q.diff().tolist()
    keys = repeat_heads(k, q).split(sizes)
    values = repeat_heads(v, q).split(sizes)
    made = []
    for queries, key, value in zip(q.split(sizes), keys, values, strict=True):
        scores = torch.einsum("qhd,khd->hqk", queries, key) * scale
        scores = cap_scores(scores, options.get("softcap"))
        hidden = ~visible(len(queries), left, right)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        made.append(torch.einsum("hqk,khd->qhd", weights, value))

    return torch.cat(made)


def eager(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    softcap: float | None = None,
    scaling: float = 1.0,
    **_: Any,
) -> tuple[Any]:
    keys = repeat_heads(k, q)
    values = repeat_heads(v, q)
    scores = q @ keys.transpose(2, 3) * scaling
    scores = cap_scores(scores, softcap)
    if mask is not None:
        scores = scores + mask

    attended = scores.softmax(-1) @ values
    return (attended.transpose(1, 2),)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_given_what_they_document(
    kernel: Any,
    cap: Any,
    causal: bool,
    window: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flex_attention itself, as it is; the rest against what they document, since they have no form for a CPU."""
    if kernel == "varlen" and cap:
        return

    if window and not causal:
        return

    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", reference)
    stand_in = SimpleNamespace(flash_attn_varlen_func=reference)
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, stand_in)

    documents = Documents(batch_of((3, 7, 5), (9,)), causal, window)
    torch.manual_seed(0)
    query = torch.randn(2, 4, 16, 8)
    key = torch.randn(2, 2, 16, 8)
    value = torch.randn(2, 2, 16, 8)
    made = KERNELS[kernel](
        query,
        key,
        value,
        documents,
        0.3,
        cap,
    )
    wanted = attend_each_document(
        eager,
        documents,
        True,
        query,
        key,
        value,
        softcap=cap,
        scaling=0.3,
    )
    torch.testing.assert_close(made[0, :15], wanted[0, :15])
    torch.testing.assert_close(made[1, :9], wanted[1, :9])


def test_a_kernel_that_does_not_work_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_of((3, 7, 5))
    wanted, _ = loss_and_gradients(build_by_documents("llama"), batch)
    model = build_by_documents("llama", attention="varlen")
    loss, _ = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, wanted)

    assert "attention by varlen does not work here" in caplog.text
    assert "each document by itself instead" in caplog.text


def test_a_small_copy_in_fp32_tries_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Most kernels take 16 bits alone, and a warning about the copy would be taken for the run's."""
    model = build_by_documents("llama", attention="varlen")
    require_next_token(model, "cpu", packed=True)

    assert "does not work here" not in caplog.text


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_kernel_is_tried_within_a_block_that_is_computed_again(
    checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in, since none has a form for a CPU. What a forward is in, hooks and autocast, is not there in the trial."""
    batch = batch_of((3, 7, 5), (9,))
    lengths: list[int] = []
    is_autocast: list[bool] = []
    dtypes: set[torch.dtype] = set()
    _, wanted = loss_and_gradients(build_by_documents("llama"), batch)

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        documents: Documents,
        scale: Any,
        cap: Any,
    ) -> torch.Tensor:
        lengths.append(q.shape[2])
        is_autocast.append(torch.is_autocast_enabled("cpu"))
        dtypes.update((q.dtype, k.dtype, v.dtype))
        scaling = q.shape[-1] ** -0.5
        return attend_each_document(
            eager,
            documents,
            True,
            q,
            k,
            v,
            scaling=scaling,
        )

    monkeypatch.setitem(KERNELS, "varlen", kernel)
    monkeypatch.setattr(attention, "_works", functools.lru_cache(_works.__wrapped__))
    model = build("llama").train()
    use_document_attention(model, layout("cuda", "bf16", attention="varlen"))
    apply_activation_checkpointing(model, checkpointing)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            _, gradients = loss_and_gradients(model, batch)
            found.append(gradients)

    calls = 2 * 2 * model.config.num_hidden_layers  # forward and recomputation, twice

    assert lengths == [24] + [16] * calls
    assert is_autocast == [False] + [True] * calls
    assert dtypes == {torch.bfloat16}  # rotary positions leave q and k in fp32 under autocast

    for gradients in found:
        assert gradients.keys() == wanted.keys()
        torch.testing.assert_close(gradients, wanted, rtol=0.1, atol=0.1)


GPU = {"device": "cuda", "precision": "bf16"}
# The kernel that is chosen, and options that lead to it.
WITHOUT_PACKAGES: dict[str, list[dict[str, Any]]] = {
    "documents": [
        {},
        {"device": "cuda"},
        {"own": True, **GPU},
        {"packs": False, **GPU},
        {"attention": "documents", **GPU},
    ],
    "varlen": [GPU],
    "flex_attention": [{"caps": True, **GPU}, {"size": 512, **GPU}],
    "masked": [
        {"needs_mask": "why", **GPU},
        {"attention": "sdpa"},
        {"attention": "eager"},
        {"devices": 2, **GPU},
    ],
}
WITH_FLASH_ATTN: dict[str, list[dict[str, Any]]] = {
    "flash_attention_2": [GPU, {"caps": True, **GPU}],
    "varlen": [{"attention": "varlen", **GPU}],
}


def assert_chosen(
    kernel: str,
    size: int = 64,
    caps: bool = False,
    own: bool = False,
    needs_mask: str = "",
    **options: Any,
) -> None:
    choice = choose(
        layout(**options),
        size,
        caps,
        own,
        needs_mask,
    )
    assert choice.kernel == kernel


def line_of(chosen: Layout) -> str:
    return choose(
        chosen,
        64,
        False,
        False,
        "",
    ).line


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.plan.attention.is_installed", lambda name: False)
    for kernel, cases in WITHOUT_PACKAGES.items():
        for options in cases:
            assert_chosen(kernel, **options)

    monkeypatch.setattr("drumline.plan.attention.is_installed", lambda name: name == "flash_attn")
    for kernel, cases in WITH_FLASH_ATTN.items():
        for options in cases:
            assert_chosen(kernel, **options)

    plain = layout()
    compiled = plain.config.model_copy(update={"compile": CompileConfig(enabled=True)})
    update = {"activation_checkpointing": "full", "config": compiled}
    again = plain.model_copy(update=update)

    assert (
        choose(
            again,
            64,
            False,
            False,
            "",
        ).kernel
        == "documents"
    )
    assert "(experimental)" in line_of(layout(**GPU))
    assert line_of(plain).startswith("documents: ")


class PassingMode(TorchDispatchMode):
    """A dispatch mode that runs each operator as it is, such as the memory tracker."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_gradients_by_documents_are_the_same_in_a_dispatch_mode() -> None:
    """A compiled backward calls the operator in the mode, which is below autograd."""
    query, key, value = (torch.randn(1, 4, 8, 8) for _ in range(3))
    grad = torch.randn(1, 8, 4, 8)
    lengths = torch.tensor([[5, 3]])
    arguments = (grad, query, key, value, lengths, True, None, False, 0.35)
    expected = torch.ops.drumline.attend_backward(*arguments)
    with torch.no_grad(), PassingMode():
        found = torch.ops.drumline.attend_backward(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
