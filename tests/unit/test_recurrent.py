"""Recurrent layers by documents: a document's results and gradients are those that it has alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.model import ModelConfig
from drumline.config.registry import make
from drumline.config.strategy import StrategyConfig
from drumline.data.batches import TokenBatch
from drumline.engine.strategies.fsdp2.transform import _find_units
from drumline.engine.transforms import apply_activation_checkpointing
from drumline.errors import PlanError
from drumline.models import recurrent
from drumline.models.attention import model_inputs, use_document_attention
from drumline.models.blocks import SCAN_FLOPS, blocks, scan_flops
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective, require_next_token, shares_prompts
from drumline.models.load import facts, load_config
from drumline.models.recurrent import (
    BORDERS,
    Borders,
    borders_of,
    describe_layers,
    modules_in_separated_layers,
    run_each_document,
    separated_layers,
)
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.small import small_copy
from drumline.plan.facts import ModelFacts
from drumline.planner.cost.activations import block_of
from drumline.train.setup import _refuse_copies_of_layers
from tests.tiny import let_states_last
from tests.unit.test_attention import batch_of, layout
from tests.unit.test_models_head import LLAMA

HYBRID = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 64}
DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**HYBRID, **DELTA},
    "qwen3_next": {**HYBRID, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {
        **HYBRID,
        "layer_types": ["linear_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "lfm2": {**HYBRID, "layer_types": ["conv", "full_attention"]},
    # As many layers as it has multipliers of its feed-forward parts.
    "falcon_h1": {**HYBRID, **MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **HYBRID,
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "bamba": {**HYBRID, **MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        **HYBRID,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 8,
        "head_dim": 8,
    },
    # Its second block has a block like the others in it.
    "zamba2": {
        **HYBRID,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    # Its layers are given no borders by the model.
    "jamba": {
        **HYBRID,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}
# Types of MODELS that have experts beside their recurrent layers in other sizes. Granite-4 has them
# in each block, behind either kind of layer; in Nemotron-H they are blocks of their own.
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
}
HYBRID_MIXTURES: dict[str, dict[str, Any]] = {
    "granitemoehybrid, experts": {
        **MODELS["granitemoehybrid"],
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "nemotron_h, experts": {**MODELS["nemotron_h"], **ROUTED},
    # Its experts read and write a narrower stream.
    "nemotron_h, latent experts": {**MODELS["nemotron_h"], **ROUTED, "moe_latent_size": 16},
}
PACKED = [*(name for name in MODELS if name != "jamba"), *HYBRID_MIXTURES]


def build(kind: str) -> Any:
    model_type, _, _ = kind.partition(",")
    values = {**MODELS, **HYBRID_MIXTURES}[kind]
    source = ModelConfig(id=None, config={"model_type": model_type, **values})
    model = build_model(None, source, seed=0)
    if kind in ("qwen3_5_text", "qwen3_next"):
        let_states_last(model)
    return model


def build_separated(kind: str) -> Any:
    model = build(kind)
    use_document_attention(model, layout())
    separate_recurrent_layers(model, "cpu")
    return model


def loss_and_gradients(model: Any, batch: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    objective = NextToken(chunk=0, has_answers=False).objective
    loss_sum, _ = ForwardWithObjective(model)(batch, objective)
    loss_sum.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return float(loss_sum.detach()), gradients


def sum_of_documents(model: Any, batch: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of each document in a batch of its own, added up."""
    assert batch.document_lengths is not None
    total = 0.0
    summed: dict[str, Tensor] = {}
    for lengths, ids_T in zip(batch.document_lengths, batch.input_ids_BT, strict=True):
        for ids in ids_T[: sum(lengths)].split(list(lengths)):
            alone = replace(batch_of((len(ids),), width=len(ids)), input_ids_BT=ids[None])
            alone = replace(alone, targets_BT=targets_of(ids))
            loss, gradients = loss_and_gradients(model, alone)
            total += loss
            for name, gradient in gradients.items():
                summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    return total, summed


def targets_of(ids_T: Tensor) -> Tensor:
    ignored = torch.full_like(ids_T[:1], -100)
    return torch.cat([ids_T[1:], ignored])[None]


def pack(*rows: tuple[int, ...], width: int) -> TokenBatch:
    """Return rows of documents whose targets are their next tokens."""
    batch = batch_of(*rows, width=width)
    targets_BT = torch.full_like(batch.input_ids_BT, -100)
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            ids = batch.input_ids_BT[row, start : start + length]
            targets_BT[row, start : start + length] = targets_of(ids)
            start += length
    return replace(batch, targets_BT=targets_BT, learned_M=None, learned_on_host_M=None)


# Longer than a chunk of each layer's scan, of one token, and with padding; and a row of one document.
ROWS = ((11, 1, 35), (48,), (5, 6))


@pytest.mark.parametrize("kind", PACKED)
def test_a_document_has_the_numbers_that_it_has_alone(kind: str) -> None:
    model = build_separated(kind)
    require_next_token(model, "cpu", packed=True)
    batch = pack(*ROWS, width=48)

    loss, gradients = loss_and_gradients(model, batch)
    expected_loss, expected = sum_of_documents(model, batch)

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        largest = max(float(expected[name].abs().max()), 1e-3)
        assert float((gradient - expected[name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_no_gradient_reaches_a_neighbour(kind: str) -> None:
    model = build_separated(kind)
    batch = pack((11, 30), width=48)
    embedded_BTD = model.get_input_embeddings()(batch.input_ids_BT).detach().requires_grad_()
    with model_inputs(model, batch) as inputs:
        del inputs["input_ids"]
        out_BTD = model.get_decoder()(inputs_embeds=embedded_BTD, use_cache=False, **inputs)[0]

    (gradient_BTD,) = torch.autograd.grad(out_BTD[:, 11:41].square().sum(), embedded_BTD)

    assert gradient_BTD[:, 11:41].abs().max() > 0
    assert gradient_BTD[:, :11].abs().max() == 0


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_a_recomputation_has_the_same_borders(kind: str) -> None:
    """Backward runs blocks again, out of the context of the forward."""
    model = build_separated(kind)
    batch = pack(*ROWS, width=48)
    loss, gradients = loss_and_gradients(model, batch)
    apply_activation_checkpointing(model, "full")
    model.train()

    again, recomputed = loss_and_gradients(model, batch)

    assert again == loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-6)


def test_compiled_blocks_have_the_same_numbers() -> None:
    model = build_separated("lfm2")
    batches = [pack(*ROWS, width=48), pack((20, 28), (9,), (48,), width=48)]
    expected = [loss_and_gradients(model, batch) for batch in batches]
    for block in blocks(model):
        block.compile(backend="eager")

    for batch, (loss, gradients) in zip(batches, expected, strict=True):
        compiled_loss, compiled = loss_and_gradients(model, batch)
        assert compiled_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(compiled[name], gradient, rtol=1e-5, atol=1e-6)


def test_no_weights_are_gathered_within_a_separated_layer() -> None:
    """Ranks would wait for each other, each a different number of times."""
    model = build_separated("lfm2")
    within = modules_in_separated_layers(model)
    layer = model.model.layers[0].conv
    assert within == {layer.conv, layer.in_proj, layer.out_proj}
    assert modules_in_separated_layers(build("lfm2")) == set()

    options = make(StrategyConfig, "fsdp2").model_copy(update={"wrap": ["Linear"]})
    units = _find_units(model, model, options, separate_embedding_and_head=False)
    assert units.blocks
    assert within.isdisjoint(units.blocks)


def test_rows_of_another_width_are_refused() -> None:
    model = build_separated("lfm2")
    borders = borders_of(model, pack((11, 30), width=48))
    with pytest.raises(ValueError, match="no argument has 1 rows of 48 tokens"):
        model.model.layers[0].conv(torch.zeros(1, 24, 32), **{BORDERS: borders})


def test_rows_of_one_document_run_as_they_are() -> None:
    model = build_separated("lfm2")
    assert borders_of(model, pack((48,), (20,), width=48)) is None
    assert borders_of(build("lfm2"), pack((11, 30), width=48)) is None
    borders = borders_of(model, pack((11, 30), (), width=48))
    assert borders is not None
    assert borders.lengths == (11, 37, 48)


def test_documents_of_similar_lengths_run_together() -> None:
    borders = Borders((40, 3, 60, 30, 33), 2, 83, by_kernels=False, device=torch.device("cpu"))
    assert borders.groups() == {64: [0, 2, 4], 32: [1, 3]}
    assert borders.bounds_N.tolist() == [0, 40, 43, 103, 133, 166]
    assert borders.document_1T[0, [0, 39, 40, 43, 165]].tolist() == [0, 0, 1, 2, 4]


@pytest.mark.parametrize(("kind", "device"), [("dp", "cuda"), ("dp", "cpu"), ("ddp", "cuda")])
def test_dp_does_not_copy_separated_layers(kind: str, device: str) -> None:
    config = SimpleNamespace(strategy=make(StrategyConfig, kind))
    plan: Any = SimpleNamespace(config=config, device=device)
    _refuse_copies_of_layers(plan, build("lfm2"))
    if (kind, device) != ("dp", "cuda"):
        _refuse_copies_of_layers(plan, build_separated("lfm2"))
        return
    with pytest.raises(PlanError, match="dp copies each layer to all GPUs"):
        _refuse_copies_of_layers(plan, build_separated("lfm2"))


def test_arguments_of_a_whole_row_are_refused() -> None:
    """Each document would get the first places of the row."""
    borders = borders_of(build_separated("lfm2"), pack((11, 30), width=48))
    assert borders is not None
    hidden_BTD = torch.zeros(1, 48, 32)
    for whole in (torch.arange(48), torch.zeros(1, 1, 48, 48)):
        with pytest.raises(ValueError, match="is of a whole row's tokens"):
            run_each_document(lambda *args: args[0], borders, (hidden_BTD, whole), {})


def test_a_block_within_a_block_is_no_layer() -> None:
    """Zamba2's second block has a block of the first's class. Only the layers within run by documents."""
    layers = separated_layers(build_separated("zamba2"))
    assert [type(layer).__name__ for layer in layers] == ["Zamba2MambaMixer"] * 3
    assert len(set(layers)) == 3


def test_layers_that_cannot_run_by_documents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(recurrent, "run_each_document", fail)
    model = build_separated("lfm2")
    assert separated_layers(model) == []
    with pytest.raises(PlanError, match=r"Lfm2ForCausalLM does not keep the documents of a pack"):
        require_next_token(model, "cpu", packed=True)


def test_a_small_copy_keeps_lists_that_are_not_by_layer() -> None:
    model = build("falcon_h1")
    assert len(model.config.mlp_multipliers) == model.config.num_hidden_layers == 2
    small = small_copy(model, "cpu")
    assert small.config.num_hidden_layers == 1
    assert small.config.mlp_multipliers == model.config.mlp_multipliers


def test_a_model_whose_layers_get_no_borders_is_refused() -> None:
    model = build_separated("jamba")
    with pytest.raises(PlanError, match=r"JambaForCausalLM does not keep the documents of a pack"):
        require_next_token(model, "cpu", packed=True)


def test_a_model_without_recurrent_layers_stays_as_it_is() -> None:
    source = ModelConfig(id=None, config={"model_type": "llama", **LLAMA})
    model = build_model(None, source, seed=0)
    assert separate_recurrent_layers(model, "cpu") == ""
    assert describe_layers(model) == []
    assert borders_of(model, pack((11, 30), width=48)) is None


def test_prompts_are_not_shared() -> None:
    """A completion continues the state of its prompt, which only one of several could have."""
    assert not shares_prompts(build_separated("lfm2"), "cpu")


def test_the_user_learns_which_code_runs() -> None:
    (line,) = describe_layers(build_separated("qwen3_5_text"))
    assert line == (
        "recurrent layers run transformers' own torch code; install causal-conv1d and"
        " flash-linear-attention for faster kernels on a GPU;"
        " Qwen3_5GatedDeltaNet runs on each document of a pack by itself"
    )


def kernels(module: Any) -> dict[str, Any]:
    """Return functions that take borders, as those of causal-conv1d and flash-linear-attention do."""
    convolve = module.causal_conv1d_fn.__wrapped__
    scan = module.torch_chunk_gated_delta_rule.__wrapped__

    def causal_conv1d_fn(
        hidden: Tensor, *args: Any, seq_idx: Tensor | None = None, **options: Any
    ) -> Tensor:
        if seq_idx is None:
            return convolve(hidden, *args, **options)  # type: ignore[no-any-return]
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = [convolve(part, *args, **options) for part in hidden.split(sizes, -1)]
        return torch.cat(parts, -1)

    def chunk_gated_delta_rule(
        *args: Tensor, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Any:
        if cu_seqlens is None:
            return scan(*args, **options)
        sizes = cu_seqlens.diff().tolist()
        by_token = {name: options.pop(name).split(sizes, 1) for name in ("g", "beta")}
        outs = []
        for number, part in enumerate(zip(*[arg.split(sizes, 1) for arg in args], strict=True)):
            own = {name: parts[number] for name, parts in by_token.items()}
            outs.append(scan(*part, **own, **options)[0])
        return torch.cat(outs, 1), None

    return {
        "causal_conv1d_fn": causal_conv1d_fn,
        "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    }


def test_kernels_that_take_borders_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_separated("qwen3_5_text")
    batch = pack(*ROWS, width=48)
    loss, gradients = loss_and_gradients(model, batch)
    by_kernels = build("qwen3_5_text")
    module = sys.modules[type(model).__module__]
    for name, function in kernels(module).items():
        monkeypatch.setattr(module, name, function)

    assert separate_recurrent_layers(by_kernels, "cpu") == ""
    monkeypatch.setattr(recurrent, "run_each_document", None)
    again, others = loss_and_gradients(by_kernels, batch)

    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-6)


def test_kernels_that_leak_do_not_get_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads borders in its forward alone, and one that does not read them."""
    module = sys.modules[type(build("qwen3_5_text")).__module__]
    convolve = module.causal_conv1d_fn.__wrapped__
    for name, function in kernels(module).items():
        monkeypatch.setattr(module, name, function)

    def leaky(hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        options.pop("seq_idx", None)
        result: Tensor = convolve(hidden, *args, **options)
        return result

    monkeypatch.setattr(module, "causal_conv1d_fn", leaky)
    model = build("qwen3_5_text")
    reason = separate_recurrent_layers(model, "cpu")
    assert reason == "borders do not keep documents apart in its code"


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return what gated DeltaNet reads for each token of one head, [T, D], a token at a time.

    The state fades by exp(g). Then beta of what it holds at the key is replaced by the value.
    """
    state = torch.zeros(key.shape[1], value.shape[1], dtype=value.dtype)
    reads = []
    for token in range(len(key)):
        state = state * g[token].exp()
        missing = value[token] - key[token] @ state
        state = state + torch.outer(key[token], beta[token] * missing)
        reads.append(query[token] @ state * key.shape[1] ** -0.5)
    return torch.stack(reads)


@pytest.mark.parametrize("decay", [-0.2, -17.0])
def test_the_gradient_of_a_fast_decay_is_rounding(decay: float) -> None:
    """Why moments of `A_log` may be 1e-4 apart between strategies, and all else 1e-6.

    With w_ij the weight of token j in what token i reads, and M_ij = w_ij ∂L/∂w_ij, transformers'
    code takes the gradient of the decay at t as the sum over the tokens from t to the end of its
    chunk of Σ_j M_ij − Σ_j M_ji. All pairs within that stretch cancel, M_ii too; only pairs across
    t are left, which have exp(g) as a factor. Σ_j M_ij is ⟨query, its gradient⟩. So fp32 leaves at
    most one rounding of 2^-24 for each of the 64 sums of these numbers.
    """
    module = sys.modules[type(build("qwen3_5_text")).__module__]
    generator = torch.Generator().manual_seed(0)
    query, key = functional.normalize(torch.randn(2, 64, 8, generator=generator), dim=-1)
    value = torch.randn(64, 8, generator=generator)
    wanted = torch.randn(64, 8, generator=generator)
    inputs = [query, key, value, torch.full((64,), decay), torch.full((64,), 0.5)]

    low = [tensor.clone().requires_grad_() for tensor in inputs]
    # One row of one head.
    batched = [tensor[None, :, None] for tensor in low]
    out = module.torch_chunk_gated_delta_rule(*batched[:3], g=batched[3], beta=batched[4])[0]
    found = torch.autograd.grad((out[0, :, 0] * wanted).sum(), low)
    high = [tensor.double().requires_grad_() for tensor in inputs]
    exact = torch.autograd.grad((delta_rule(*high) * wanted).sum(), high)

    reads = (query * found[0]).sum(-1).abs()
    rounding = 64 * 2**-24 * float(reads.sum())
    error = (found[3] - exact[3]).abs()
    assert float(error.max()) < rounding
    relative = float(error.norm() / exact[3].norm())
    if decay == -0.2:
        assert relative < 1e-5
    else:
        assert float(exact[3].abs().max()) < rounding
        assert relative > 1e-4
    for gradient, expected in zip(found[:3], exact[:3], strict=True):
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def hybrid_facts(kind: str) -> ModelFacts:
    source = ModelConfig(id=None, config={"model_type": kind, **MODELS[kind]})
    return facts(load_config(None, source), 16)


def test_the_planner_counts_scans_and_attention_where_they_are() -> None:
    delta = hybrid_facts("qwen3_5_text")
    # One of two layers has attention, of four heads of 8.
    assert delta.attention_flops == 12 * 32 * 16 / 2
    # The other has a state of 8 × 8 for each of four heads.
    assert scan_flops(build("qwen3_5_text")) == SCAN_FLOPS * 4 * 8 * 8
    # Its embedding is a look-up.
    products = 6 * (delta.parameters - 64 * 32)
    assert delta.flops_per_token == products + SCAN_FLOPS * 4 * 8 * 8 + 2 * delta.attention_flops

    # Two layers, each with attention and a state of 64 × 8.
    both = hybrid_facts("falcon_h1")
    assert both.attention_flops == 12 * 32 * 16
    assert scan_flops(build("falcon_h1")) == SCAN_FLOPS * 2 * 64 * 8


@pytest.mark.parametrize(
    ("kind", "query_width", "feed_width"),
    # LFM2 rounds the inner width up to a multiple of 256.
    [("qwen3_5_text", 32, 64), ("lfm2", 32, 256), ("bamba", 64, 64)],
)
def test_the_planner_does_not_take_recurrent_layers_for_experts(
    kind: str, query_width: int, feed_width: int
) -> None:
    block = block_of(hybrid_facts(kind))
    assert block.experts_per_token == 0
    assert block.query_width == query_width
    assert block.feed_width == feed_width
