"""LoRA over the experts of mixtures: held against PEFT, merged, exported, counted and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drumline.config.config import LoRAConfig
from drumline.engine.experts import cast_experts_under_autocast
from drumline.errors import DrumlineError, ModelError
from drumline.models import adapters
from drumline.models.adapted_experts import layers_over_experts, split_by_expert
from drumline.models.blocks import expert_modules, find_base_layer
from drumline.models.load import facts
from drumline.models.pack import pack
from drumline.models.packed import Bits, PackedLinear, packings_of
from drumline.planner.adapter_size import adapter_size, describe_adapter
from drumline.planner.derived import with_lora
from tests.plans import small_config
from tests.tiny import ARCHITECTURES
from tests.unit.test_derived import differences

LORA = LoRAConfig(r=4, alpha=16, rslora=True)
NARROW = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
MIXTURES: dict[str, dict[str, Any]] = {
    **{kind: ARCHITECTURES[kind] for kind in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")},
    "glm4_moe": {
        **NARROW,
        "intermediate_size": 64,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    # The rows of its experts come in equal numbers, and inputs are first in its tensors.
    "llama4_text": {
        **NARROW,
        "intermediate_size": 16,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "qwen3_5_moe_text": {
        **NARROW,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
KINDS = [
    pytest.param(kind, marks=[] if kind in ("qwen3_moe", "gpt_oss") else pytest.mark.slow)
    for kind in MIXTURES
]
IDS = torch.arange(24)[None] * 7 % 300


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(
        kind, **{**MIXTURES[kind], "vocab_size": 300, "num_hidden_layers": 2}
    )


def mixture(kind: str) -> Any:
    """Return a small mixture whose experts differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).float().eval()
    for parameter in model.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def adapted(kind: str, options: LoRAConfig = LORA) -> tuple[Any, Any]:
    """Return a mixture, and a copy with adapters that have learned something."""
    base = mixture(kind)
    model = copy.deepcopy(base)
    adapters.inject(model, options, 0)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return base, model.eval()


def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=IDS).logits
    return result


def expert_factors(model: Any) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if adapters.is_adapter(name) and "experts" in name.split(".")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    """PEFT adds the product of the factors to all experts, and loads what is saved here."""
    base, model = adapted(kind)
    expected = logits(model)
    expected.square().mean().backward()
    tmp_path.joinpath("apart").mkdir()
    adapters.save_adapter(model, tmp_path / "apart", "base", None)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "apart"), is_trainable=True)
    got = logits(theirs.eval())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.square().mean().backward()
    modules = dict(theirs.base_model.model.named_modules())
    compared = 0
    for path, layer in adapters._layers_of_experts(model):
        ours = list(layers_over_experts(layer))
        for depth, one in enumerate(ours):
            other = modules[path + ".base_layer" * depth]
            a_of_peft = other.lora_A["default"].weight.grad
            b_of_peft = other.lora_B["default"].weight.grad
            gradients = split_by_expert(one, a_of_peft, b_of_peft)
            factors = (one.lora_A["default"], one.lora_B["default"])
            for factor, gradient in zip(factors, gradients, strict=True):
                torch.testing.assert_close(factor.weight.grad, gradient, rtol=1e-4, atol=1e-7)
                compared += 1
    assert compared == len(expert_factors(model)) > 0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_fresh_adapter_changes_nothing_and_a_merged_one_stays(kind: str) -> None:
    base = mixture(kind)
    before = logits(base)
    model = copy.deepcopy(base)
    adapters.inject(model, LORA, 0)
    assert torch.equal(logits(model), before), "these are transformers' products in their order"
    _, model = adapted(kind)
    learned = logits(model)
    assert not torch.allclose(learned, before, atol=1e-2)
    with adapters.switch_adapters(model, on=False):
        assert torch.equal(logits(model), before)
    adapters.merge(model)
    assert dict(model.named_parameters()).keys() == dict(base.named_parameters()).keys()
    torch.testing.assert_close(logits(model), learned, rtol=1e-4, atol=1e-4)


def test_nothing_as_large_as_the_experts_is_kept_for_backward() -> None:
    _, model = adapted("qwen3_moe")
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    largest_of_block = 4 * 32 * 32
    kept = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept.append(tensor.numel())
        return tensor

    block = model.model.layers[0].mlp
    hidden = torch.randn(1, 8, 32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(hidden)
    assert 0 < max(kept) < largest_of_block


def test_targets_name_layers_before_experts() -> None:
    """As before experts had adapters, `down_proj` is that of dense layers if there are any."""
    model = mixture("deepseek_v3")

    def names(targets: Any) -> set[str]:
        chosen = adapters.target_names(model, LoRAConfig(targets=targets))
        return {name.partition("layers.")[2] for name in chosen}

    experts = {"1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"}
    assert experts < names("all-linear")
    assert not experts & names("attention")
    assert names(["down_proj"]) == {"0.mlp.down_proj", "1.mlp.shared_experts.down_proj"}
    assert names(["experts.down_proj"]) == {"1.mlp.experts.down_proj"}
    assert names(["gate_up_proj", "experts.down_proj"]) == experts
    # A linear layer, but a router.
    routers = [
        name for name in adapters.target_names(mixture("llama4_text"), LORA) if "router" in name
    ]
    assert routers == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dora": True}, "PEFT has no DoRA over the experts"),
        ({"init": "pissa"}, "PEFT has no PiSSA over the experts"),
        (
            {"more": {"x": {"targets": ["experts.down_proj"]}}},
            "all adapters over experts to be over the same",
        ),
    ],
)
def test_what_peft_does_not_have_is_refused(options: dict[str, Any], line: str) -> None:
    model = mixture("qwen3_moe")
    with pytest.raises(ModelError, match=line):
        adapters.inject(model, LoRAConfig(r=4, **options), 0)
    adapters.inject(model, LoRAConfig(r=4, targets="attention", dora=True), 0)


def test_two_adapters_and_dropout(tmp_path: Path) -> None:
    options = LoRAConfig(r=4, dropout=0.5, more={"x": {"r": 2}})
    base, model = adapted("mixtral", options)
    expected = logits(model)
    assert not torch.allclose(logits(model.train()), expected, atol=1e-3)
    folder = tmp_path / "apart"
    folder.mkdir()
    adapters.save_adapter(model.eval(), folder, "base", None)
    loaded = adapters.load_adapters(base, folder)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_dropout"] == 0.0


def test_only_the_first_of_two_adapters_is_over_experts(tmp_path: Path) -> None:
    options = LoRAConfig(r=4, more={"x": {"r": 2, "targets": "attention"}})
    base, model = adapted("mixtral", options)
    expected = logits(model)
    adapters.save_adapter(model, tmp_path, "base", None)
    loaded = adapters.load_adapters(base, tmp_path)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    loaded.base_model.set_adapter("x")
    before = logits(loaded)
    loaded.base_model.set_adapter(["default", "x"])
    assert not torch.allclose(logits(loaded), before, atol=1e-2)


def test_an_adapted_mixture_compiles_to_one_graph_and_computes_in_autocast() -> None:
    _, model = adapted("qwen3_moe")
    block = model.model.layers[0].mlp
    hidden_BTD = torch.randn(1, 8, 32)
    expected = block(hidden_BTD)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden_BTD), expected)
    cast_experts_under_autocast(model)
    with torch.autocast("cpu", torch.bfloat16):
        low = block.experts(*_choices(hidden_BTD[0]))
    assert low.dtype == torch.float32, "that of the tokens"
    precise = block.experts(*_choices(hidden_BTD[0]))
    assert 1e-5 < (low - precise).abs().max() < 0.1


def _choices(hidden_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of a layer of experts: each token chooses two of four."""
    tokens = len(hidden_ND)
    chosen_Nk = torch.tensor([[0, 2], [1, 3]]).repeat(tokens // 2, 1)
    return hidden_ND, chosen_Nk, torch.full((tokens, 2), 0.5)


def test_a_wrong_merge_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.models import adapted_experts

    _, model = adapted("qwen3_moe")
    merge = adapted_experts.merge_expert
    monkeypatch.setattr(
        adapted_experts, "merge_expert", lambda layer, expert: merge(layer, expert) * 1.01
    )
    with pytest.raises(DrumlineError, match="of expert 0 is not the trained one"):
        adapters.merge(model)


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_packed_experts_compute_with_what_they_unpack_to(
    kind: str, bits: Bits, targets: Any
) -> None:
    options = LoRAConfig(r=4, targets=targets)
    _, model = adapted(kind, options)
    quantized = copy.deepcopy(model)
    compared = 0
    pack(quantized, bits, torch.float32)
    for path, module in quantized.named_modules():
        if isinstance(module, PackedLinear):
            model.get_submodule(path).weight.data.copy_(module.weight)
    for path in expert_modules(model):
        base = find_base_layer(model.get_submodule(path))
        packed = find_base_layer(quantized.get_submodule(path))
        for name, packing in packings_of(packed).items():
            codes = getattr(packed, packing.parameter_name)
            getattr(base, name).data.copy_(packing.unpack(torch.float32, codes))
            compared += 1
    assert compared > 0
    expected = logits(model)
    got = logits(quantized)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    expected.square().mean().backward()
    got.square().mean().backward()
    for name, parameter in quantized.named_parameters():
        if parameter.requires_grad:
            gradient = model.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_sizes_are_derived_as_they_are_counted(kind: str) -> None:
    config = config_of(kind)
    plain = facts(config, 64)
    targets = ["all-linear", "attention", ["down_proj"], ["experts.gate_up_proj", "o_proj"]]
    for target in targets:
        adapter = LoRAConfig(r=4, targets=target)
        made = with_lora(plain, adapter)
        assert made is not None and not differences(made, facts(config, 64, adapter))


def test_the_size_of_an_adapter() -> None:
    """Two layers of 4 experts, factors of 4 × (32 + 32) and 4 × (16 + 32), and four of attention."""
    config = small_config(
        model={"config": {"model_type": "qwen3_moe"}}, adapter={"kind": "lora", "r": 4}
    )
    counted = facts(config_of("qwen3_moe"), 64, config.adapter)
    size = adapter_size(counted, config)
    assert size is not None
    in_experts = 2 * 4 * 4 * (32 + 32 + 16 + 32)
    in_attention = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16))
    assert size.in_experts == in_experts
    assert size.parameters == in_experts + in_attention == counted.trainable
    assert size.weight_bytes == 4 * size.parameters
    assert size.optimizer_bytes == 8 * size.parameters
    (line,) = describe_adapter(counted, config)
    assert "5.376K parameters" in line and "3.584K of them over experts" in line
