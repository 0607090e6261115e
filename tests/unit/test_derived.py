"""Sizes that follow from known ones are those that are counted, to the last weight; what may differ in more is counted."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drumline.config.config import LoRAConfig
from drumline.config.model import ModelConfig
from drumline.models.load import facts, load_config
from drumline.models.shapes import KNOWN, with_config
from drumline.plan.facts import ModelFacts
from drumline.planner.derived import FAMILIES, with_lora
from drumline.planner.sizes import FoundModel, sizes_of
from tests.distributed.setups import cases
from tests.tiny import ARCHITECTURES, tiny_model_dir

SIZES = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
         "vocab_size": 320, "max_position_embeddings": 512}  # fmt: skip
EXPERTS = {
    "num_local_experts": 6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
ROTARY = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
          "rope_theta": 5e5}  # fmt: skip


def sized(kind: str, **more: Any) -> dict[str, Any]:
    known = next(known.values for known in KNOWN.values() if known.values["model_type"] == kind)
    own = {"head_dim": 32} if "head_dim" in known else {}
    return {
        **known,
        **SIZES,
        **{key: value for key, value in EXPERTS.items() if key in known},
        **own,
        **more,
    }


def differences(made: ModelFacts, counted: ModelFacts) -> dict[str, tuple[Any, Any]]:
    each = {
        field.name: (getattr(made, field.name), getattr(counted, field.name))
        for field in fields(ModelFacts)
    }
    return {
        name: (mine, theirs)
        for name, (mine, theirs) in each.items()
        if mine != theirs or type(mine) is not type(theirs)
    }


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


FILE = {
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 5e5,
    "rope_scaling": None,
    "pretraining_tp": 1,
}
LIKE_KNOWN = {
    **{kind: sized(kind) for kind in FAMILIES},
    "llama, long": sized("llama", pad_token_id=0, head_dim=48),
    "llama, tied": sized("llama", tie_word_embeddings=True, mlp_bias=False, attention_bias=False),
    "qwen2, tied": sized(
        "qwen2", tie_word_embeddings=True, use_sliding_window=False, sliding_window=64
    ),
    "qwen3, kinds of layers": sized(
        "qwen3", layer_types=["full_attention"] * 3, rope_parameters=ROTARY
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKE_KNOWN)
@pytest.mark.parametrize(
    "adapter",
    [
        None,
        {"r": 4},
        {"r": 3, "targets": "attention", "dropout": 0.1},
        {"targets": ["q_proj", "k_proj"]},
    ],
)
def test_sizes_of_a_family_are_those_that_are_counted(
    name: str, adapter: dict[str, Any] | None, kept: Path
) -> None:
    model, lora = ModelConfig(id=None, config=LIKE_KNOWN[name]), adapter and LoRAConfig(**adapter)
    made = sizes_of(FoundModel(model, None), 3000, "lm", adapter=lora)
    assert not kept.exists(), "it was counted"
    assert not differences(made, facts(load_config(None, model), 3000, lora))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    cases(
        (
            "phi-2",
            "gpt-oss-20b",
            "gemma-2-2b",
            "olmo-2-7b",
            "qwen3-vl-2b",
            "gemma-3-4b",
            "qwen3-vl-30b-a3b",
            "gemma-4-26b-a4b",
            "minimax-m2.5",
            "llama-4-scout",
            "deepseek-v3.2",
        ),
        ("phi-2", "olmo-2-7b", "qwen3-vl-2b"),
    ),
)
def test_adapters_of_any_known_shape(name: str) -> None:
    config = load_config(None, with_config(KNOWN[name], ModelConfig(id=name)))
    assert (made := with_lora(facts(config, 1024), adapter := LoRAConfig(r=8))) is not None
    assert not differences(made, facts(config, 1024, adapter))


def test_targets_by_name_may_be_in_a_tower() -> None:
    config = load_config(None, with_config(KNOWN["qwen3-vl-2b"], ModelConfig(id="qwen3-vl-2b")))
    assert with_lora(facts(config, 1024), LoRAConfig(targets=["q_proj"])) is None


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("falcon-h1-0.5b", {"num_hidden_layers": 2}),
        ("qwen3-next-80b-a3b", {"num_hidden_layers": 4}),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "ME*"}),
    ],
)
def test_adapters_of_recurrent_layers(name: str, fewer: dict[str, Any]) -> None:
    """The FLOPs of their scans are the same whether weights are frozen or not."""
    config = load_config(None, with_config(KNOWN[name], ModelConfig(id=name, config=fewer)))
    adapter = LoRAConfig(r=8, targets="attention")
    made = with_lora(facts(config, 64), adapter)
    assert made is not None
    assert not differences(made, facts(config, 64, adapter))


def test_adapters_over_unknown_experts_are_counted() -> None:
    """Granite's class of experts has no row in `derived.EXPERTS`."""
    architecture = {**ARCHITECTURES["granitemoe"], "num_hidden_layers": 2}
    config = AutoConfig.for_model("granitemoe", **architecture)
    assert with_lora(facts(config, 64), LoRAConfig()) is None
    adapter = LoRAConfig(targets="attention")
    made = with_lora(facts(config, 64), adapter)
    assert made is not None and not differences(made, facts(config, 64, adapter))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.5},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_what_may_be_more_than_sizes_is_counted(
    more: dict[str, Any], kept: Path, tmp_path: Path
) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    found = FoundModel(ModelConfig(id=str(folder)), str(folder))
    (folder / "config.json").write_text(json.dumps({**config, **FILE}))
    assert not differences(
        sizes_of(found, 64, "lm"), facts(load_config(str(folder), found.model), 64)
    )
    assert not kept.exists(), "a folder like a known shape is not counted"
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    assert (
        sizes_of(found, 64, "lm") == facts(load_config(str(folder), found.model), 64)
        and kept.exists()
    )
