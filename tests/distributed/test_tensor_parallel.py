"""Tensor parallelism on kinds of models: loss and every gradient as in one process, whatever the
model's own plan says.

Two real processes take all models in turn; the reference is the same model, whole, in the same
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import CompileConfig, LoRAConfig
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.engine.tensor_parallel import apply_tp
from drumline.engine.transforms import apply_activation_checkpointing, apply_compile
from drumline.models.adapters import inject
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective, require_next_token
from drumline.plan.stream import PROVEN
from tests.checkpoint_ranks import run
from tests.distributed.setups import cases, chosen_params
from tests.harness import Sections

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Kind:
    """A model: its type and what differs from SIZES."""

    model_type: str
    config: Sections = field(default_factory=dict)
    adapter: LoRAConfig | None = None
    checkpointing: bool = False
    compiled: bool = False
    one_graph: bool = (
        False  # compiled by a backend that counts the graphs and takes any break for an error
    )
    chunk: int = 8
    stream: bool = False
    length: int = 24
    packed: bool = True
    without: tuple[str, ...] = ()  # of SIZES, what its config does not have


PRODUCTS = 7  # of a Llama's block
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
KINDS = {
    "llama tied": Kind("llama", {"tie_word_embeddings": True}),
    "llama untied, plain cross-entropy": Kind("llama", {"tie_word_embeddings": False}, chunk=0),
    "odd widths": Kind(
        "llama", {"vocab_size": 97, "intermediate_size": 45, "tie_word_embeddings": True}
    ),
    "odd widths untied, padding on the last rank": Kind(
        "llama", {"vocab_size": 97, "pad_token_id": 90, "tie_word_embeddings": False}
    ),
    "all biases": Kind("llama", {"attention_bias": True, "mlp_bias": True}),
    "norms between": Kind("qwen3", {"head_dim": 8}),
    "norms between, checkpointed": Kind("qwen3", {"head_dim": 8}, checkpointing=True),
    "norms between, compiled": Kind(
        "qwen3", {"head_dim": 8, "num_hidden_layers": 1}, compiled=True
    ),
    "bias of queries": Kind("qwen2"),
    "whole heads": Kind("olmo2", {"vocab_size": 97}),
    "fused projections": Kind(
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
    "capped logits": Kind("gemma2", {"head_dim": 8, "vocab_size": 97}),
    "scaled embedding": Kind("gemma3_text", {"head_dim": 8}),
    "lora": Kind("qwen2", adapter=LoRAConfig(kind="lora", r=3)),
    "lora, fused projections": Kind("phi3", adapter=LoRAConfig(kind="lora", r=3)),
    "experts": Kind("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "shared experts": Kind(
        "qwen2_moe", {**MIXTURE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    ),
    "queries, keys and values in one": Kind("gpt2", GPT2),
    "activation with weights": Kind("apertus"),
    "stream": Kind(
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        stream=True,
    ),
    "stream, checkpointed": Kind("qwen3", {"head_dim": 8}, checkpointing=True, stream=True),
    "stream, compiled": Kind("llama", {"num_hidden_layers": 1}, compiled=True, stream=True),
    "one graph": Kind("llama", one_graph=True),
    "one graph, checkpointed": Kind("llama", one_graph=True, checkpointing=True),
    "stream, one graph": Kind("llama", one_graph=True, stream=True),
    "stream, one graph, checkpointed": Kind(
        "llama", one_graph=True, checkpointing=True, stream=True
    ),
    "stream, whole heads": Kind("olmo2", stream=True),
    "stream, lora": Kind("qwen2", adapter=LoRAConfig(kind="lora", r=3), stream=True),
    "stream, capped logits": Kind("gemma2", {"head_dim": 8, "vocab_size": 97}, stream=True),
    "stream, experts": Kind(
        "qwen3_moe", {**MIXTURE, "head_dim": 8, "moe_intermediate_size": 24}, stream=True
    ),
    "stream, queries, keys and values in one": Kind("gpt2", GPT2, stream=True),
}

# What types of models need besides SIZES to be built.
SMALL_EXPERTS = {**MIXTURE, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
PARTS = {
    "cohere2_moe": {**MIXTURE, "head_dim": 8},
    "dots1": {**ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "flex_olmo": MIXTURE,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "helium": {"head_dim": 8},
    "hy_v3": {**SMALL_EXPERTS, "head_dim": 8},
    "kolibri1": {**SMALL_EXPERTS, "head_dim": 8},
    "laguna": {**SMALL_EXPERTS, "head_dim": 8},
    "mellum": {**SMALL_EXPERTS, "head_dim": 8},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "mixtral": LOCAL,
    "olmoe": MIXTURE,
    "phi3": KINDS["fused projections"].config,
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**SMALL_EXPERTS, "head_dim": 8},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "vaultgemma": {"head_dim": 8},
    # Their streams stay whole.
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone_moe": SMALL_EXPERTS,
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 8},
    "phimoe": {**LOCAL, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "solar_open": {**ROUTED, "head_dim": 8},
    "youtu": LATENT,
    # And their documents are not kept apart.
    "afmoe": {**SMALL_EXPERTS, "head_dim": 8, "num_dense_layers": 1},
    "jamba": {**MIXTURE, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {
        **SMALL_EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "minimax": {**LOCAL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **SMALL_EXPERTS, "shared_expert_intermediate_size": 24},
}
WHOLE_STREAM = {
    *("deepseek_v3", "ernie4_5_moe", "exaone_moe", "flint", "granitemoe", "granitemoeshared"),
    *("hunyuan_v1_moe", "phimoe", "solar_open", "youtu"),
}
NOT_PACKED = {
    *("afmoe", "jamba", "lfm2_moe", "minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
}
LACK = {
    "gpt_neox": ("num_key_value_heads",),
    "kolibri1": ("intermediate_size",),
    "solar_open": ("intermediate_size",),
}


def of_type(name: str, stream: bool) -> Kind:
    lacks = LACK.get(name, ())
    config: Sections = {"num_key_value_heads": 4, **PARTS.get(name, {})}
    if name == "gpt2":
        config = GPT2
    config = leave_out(config, lacks)
    # Two ranks of a stream have other numbers of tokens.
    length = 23 if stream else 24
    packed = name not in NOT_PACKED
    return Kind(name, config, stream=stream, length=length, packed=packed, without=lacks)


def leave_out(config: Sections, keys: tuple[str, ...]) -> Sections:
    return {key: value for key, value in config.items() if key not in keys}


# BERT is no causal model: test_classify has it.
CAUSAL = sorted(PROVEN - {"bert"})
WITHOUT_STREAM = sorted({*CAUSAL} | WHOLE_STREAM | NOT_PACKED)
OF_TYPES = {f"stream of {name}": of_type(name, True) for name in CAUSAL}
OF_TYPES |= {f"parts of {name}": of_type(name, False) for name in WITHOUT_STREAM}
KINDS |= OF_TYPES

# What two others show together, or what takes a compiler half a minute: with --full alone.
AGAIN = (
    "llama untied, plain cross-entropy",
    "stream, compiled",
    "one graph",
    "stream, one graph",
    "one graph, checkpointed",
    "stream",
    "stream, capped logits",
    "shared experts",
    "norms between, compiled",
    "norms between, checkpointed",
    "whole heads",
    "lora, fused projections",
    "odd widths",
    "all biases",
    "odd widths untied, padding on the last rank",
    "fused projections",
    "capped logits",
    "bias of queries",
    "stream, lora",
    "stream, experts",
    "scaled embedding",
    "lora",
    "stream, whole heads",
    "stream, queries, keys and values in one",
    "queries, keys and values in one",
    "activation with weights",
    "stream, one graph, checkpointed",
    *OF_TYPES,
)


def batch(vocabulary: int, length: int, packed: bool = True) -> TokenBatch:
    """Two rows of one document, or packs of two documents each, every other target learned."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (2, length), generator=generator)
    ids[:, 3] = 0
    ids[:, 5] = vocabulary - 7
    targets = ids.roll(-1, 1).masked_fill(torch.arange(length) % 2 == 0, -100)
    positions = torch.arange(length).repeat(2, 1)
    if packed:
        positions[:, 10:] -= 10
    return TokenBatch(input_ids_BT=ids, targets_BT=targets, position_ids_BT=positions, weight=24)


def built(kind: Kind) -> Any:
    config = {"model_type": kind.model_type, **kind.config}
    if kind.model_type != "gpt2":
        config = leave_out(SIZES, kind.without) | config
    model = build_model(None, ModelConfig(config=config), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh biases are zero and fresh norms one: nothing would tell a wrong one.
            if parameter.ndim == 1:
                parameter.add_(noise(parameter, generator))
        if kind.adapter is not None:
            inject(model, kind.adapter, seed=5)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(noise(parameter, generator))
    return model


def noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator) / 4


def trained(model: Any, kind: Kind) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The sums and all gradients, whole, of two micro-batches."""
    module = ForwardWithObjective(model)
    objective = NextToken(kind.chunk, True).eval_objective
    micro_batch = batch(model.config.vocab_size, kind.length, kind.packed)
    sums: dict[str, float] = {}
    for _ in range(2):
        loss, others = module(micro_batch, objective)
        (loss / 40).backward()
        sums["loss"] = float(loss.detach())
        for name, value in others.items():
            sums[name] = float(value)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            assert gradient is not None, name
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            gradients[name] = gradient
    return sums, gradients


@contextlib.contextmanager
def compiled_into(graphs: list[torch.fx.GraphModule]) -> Iterator[None]:
    """What is given to torch.compile here is one graph or an error. Notes the graphs that are made
    of it later."""
    compile_by = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def into_one_graph(function: Any, mode: str | None = None) -> Any:
        return compile_by(function, backend=backend, fullgraph=True)

    torch.compiler.reset()
    with mock.patch("torch.compile", into_one_graph):
        yield


def count_products(graph: torch.fx.GraphModule) -> int:
    """Return the number of linear layers in a graph."""
    return sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes)


Wrong = dict[str, Any]


def compare(kind: Kind) -> Wrong:
    """What differs: {} where all is as in one process."""
    expected, whole = trained(built(kind), kind)
    model = built(kind)
    require_next_token(model, "cpu", packed=kind.packed)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tp(model, mesh, kind.stream, not kind.checkpointing)
    apply_activation_checkpointing(model, "full" if kind.checkpointing else "none")
    graphs: list[torch.fx.GraphModule] = []
    if kind.one_graph:
        with compiled_into(graphs):
            apply_compile(model, CompileConfig(enabled=True))
    else:
        apply_compile(model, CompileConfig(enabled=kind.compiled))
    sums, gradients = trained(model, kind)
    assert gradients.keys() == whole.keys()
    wrong: Wrong = {}
    # Every block runs one and the same graph; what cuts and gathers the stream around them has
    # others.
    products = [number for number in map(count_products, graphs) if number]
    if kind.one_graph and products != [PRODUCTS]:
        wrong["products of each graph"] = products
    for name, value in expected.items():
        if sums[name] != pytest.approx(value, rel=1e-5):
            wrong[name] = (sums[name], value)
    # A wrong sum would be off by the half. What is next to nothing beside the others (queries of a
    # fresh model) is made of rounding.
    least = 1e-2 * max(gradient.norm() for gradient in whole.values())
    for name, gradient in whole.items():
        size = torch.maximum(gradient.norm(), least)
        difference = (gradients[name] - gradient).norm() / size
        if not difference <= 5e-5:
            wrong[name] = float(difference)
    return wrong


def compare_all(names: list[str]) -> dict[str, Wrong]:
    """Return what differs on this rank, by kind."""
    return {name: compare(KINDS[name]) for name in names}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Wrong]]:
    """Of each rank, for the kinds that the chosen tests look at."""
    params = chosen_params(request.session, __file__)
    names = [asked["name"] for asked in params]
    return run(2, compare_all, names, timeout=600)


@pytest.mark.claim("tensor and context parallelism train each kind of model")
@pytest.mark.claim(
    "sequence parallelism, models like BERT, GPT-2 and experts under tensor parallelism have the gradients of one process"
)
@pytest.mark.parametrize("name", cases(KINDS, AGAIN))
def test_same_gradients_as_in_one_process(results: list[dict[str, Wrong]], name: str) -> None:
    assert [found[name] for found in results] == [{}, {}]
