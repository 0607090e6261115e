"""Layers whose weight the module around them reads itself get no adapter, and are not packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.config import LoRAConfig, ModelConfig
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.direct_weights import children_with_directly_read_weight
from drumline.models.load import facts
from drumline.models.pack import pack
from drumline.plan.facts import names_attention
from drumline.plan.unadapted import describe_unadapted, find_unadapted
from drumline.planner.derived import with_lora
from tests.unit.test_adapted_experts import config_of as config_of_mixture
from tests.unit.test_adapted_experts import mixture
from tests.unit.test_recurrent import MODELS, build

LORA = LoRAConfig(r=4)
# The fused kernel of Mamba-2 takes the weight of `out_proj`, Jamba multiplies by that of `dt_proj`.
READ_DIRECTLY = {
    "falcon_h1": "out_proj",
    "granitemoehybrid": "out_proj",
    "bamba": "out_proj",
    "nemotron_h": "out_proj",
    "zamba2": "out_proj",
    "jamba": "dt_proj",
}
# Without experts or with one in every layer, so that each adapter sees tokens.
LEARNING = [kind for kind in MODELS if kind not in ("qwen3_next", "jamba")]

# The planner builds the others to count them: Jamba and Qwen3-Next with experts, Zamba2 with shared blocks.
DERIVED = [kind for kind in MODELS if kind not in ("jamba", "qwen3_next", "zamba2")]


def adapted_names(model: nn.Module) -> set[str]:
    """Return the last parts of the names of adapted layers."""
    names = set()
    for name, _ in model.named_parameters():
        if name.endswith(adapters.A):
            names.add(name.removesuffix(adapters.A).rpartition(".")[2])
    return names


@pytest.mark.parametrize("kind", MODELS)
def test_all_linear_leaves_them_out(kind: str) -> None:
    model = build(kind)
    adapters.inject(model, LORA, 0)
    names = adapted_names(model)

    assert READ_DIRECTLY.get(kind) not in names
    assert {"q_proj", "o_proj"} <= names or {"q_proj", "out_proj"} <= names


@pytest.mark.parametrize("kind", LEARNING)
def test_every_adapter_learns(kind: str) -> None:
    model = build(kind).train()
    adapters.inject(model, LORA, 0)
    ids = torch.arange(64).view(2, 32) * 7 % 60
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    for name, parameter in model.named_parameters():
        if name.endswith(adapters.B):
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize(("kind", "layer"), READ_DIRECTLY.items())
def test_they_are_refused_by_name(kind: str, layer: str) -> None:
    options = LoRAConfig(r=4, targets=["q_proj", layer])

    with pytest.raises(ModelError, match=f"reads the weight of {layer} itself, past an adapter"):
        adapters.inject(build(kind), options, 0)


def test_a_router_is_refused_by_name_with_what_trains_it() -> None:
    options = LoRAConfig(r=4, targets=["q_proj", "mlp.gate"])

    with pytest.raises(ModelError, match=r"mlp\.gate is a router of experts") as caught:
        adapters.inject(mixture("qwen3_moe"), options, 0)

    assert "adapter.modules_to_save" in str(caught.value.fix)
    facts(config_of_mixture("qwen3_moe"), 64, LoRAConfig(r=4, modules_to_save=["mlp.gate"]))


def test_they_are_not_packed() -> None:
    # The shapes of all linear layers can be packed: their inputs are multiples of 64.
    wide = {"hidden_size": 64, "intermediate_size": 64, "mamba_n_heads": 8}
    source = ModelConfig(id=None, config={"model_type": "bamba", **MODELS["bamba"], **wide})
    model: Any = build_model(None, source, seed=0)
    config = model.config
    model.requires_grad_(False)
    pack(model, "8bit", torch.float32)
    unpacked = set()
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            unpacked.add(name.rpartition(".")[2])

    assert unpacked == {"out_proj"}

    adapter = LoRAConfig(r=4, quantize="8bit")
    lines = describe_unadapted(find_unadapted(facts(config, 64, adapter), adapter))

    assert any("the linear layers (mamba.out_proj), and QLoRA does not" in line for line in lines)


@pytest.mark.parametrize("kind", DERIVED)
def test_the_planner_counts_the_same_adapters(kind: str) -> None:
    config: Any = build(kind).config
    made = with_lora(facts(config, 64), LORA)
    counted = facts(config, 64, LORA)

    assert made is not None
    assert made.trainable == counted.trainable
    assert made.block_weights == counted.block_weights


class TimesItself(nn.Module):
    """Multiplies by a weight, and looks at the type of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 4)
        self.called = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(self.called.weight, nn.Parameter):
            hidden = hidden.to(self.called.weight.dtype)
        return self.called(hidden @ self.read.weight)


class Inherits(TimesItself):
    """Has the forward of its parent."""


class Overrides(TimesItself):
    """Calls both layers."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.called(self.read(hidden))


def test_what_counts_as_reading() -> None:
    assert children_with_directly_read_weight(TimesItself) == {"read"}
    assert children_with_directly_read_weight(Inherits) == {"read"}
    assert children_with_directly_read_weight(Overrides) == frozenset()
    assert children_with_directly_read_weight(nn.MultiheadAttention) == frozenset()


def test_a_layer_that_has_an_attention_is_no_attention() -> None:
    """Else `targets: attention` would adapt its feed-forward part, and OLMo Hybrid's recurrent layers."""
    assert names_attention("LlamaAttention")
    assert names_attention("T5LayerSelfAttention")
    assert not names_attention("Zamba2AttentionDecoderLayer")
    assert not names_attention("OlmoHybridLinearAttentionDecoderLayer")
    assert not names_attention("LlamaMLP")
