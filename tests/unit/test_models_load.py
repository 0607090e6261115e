"""Configs, tokenizers and models: what is laid over, drawn, counted and refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.model import ModelConfig
from drumline.errors import ConfigError, ModelError
from drumline.models.build import build_model
from drumline.models.files import call_loader
from drumline.models.load import check_fits, facts, load_config
from drumline.models.tokenizer import load_tokenizer, pad_token_id
from tests.tiny import tiny_model_dir, tiny_tokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8}


def model_of(**values: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": None, **values})


def line(error: pytest.ExceptionInfo[ModelError]) -> str:
    assert "\n" not in error.value.line()
    return error.value.line()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny"))


# ---------------------------------------------------------------------------------------------------------------- config


def test_config_is_laid_over_the_models_own(folder: str) -> None:
    config = load_config(
        folder, model_of(id=folder, config={"hidden_size": 64, "rms_norm_eps": 1e-4})
    )
    assert (config.hidden_size, config.rms_norm_eps, config.num_hidden_layers) == (64, 1e-4, 2)
    assert config.head_dim == 16, "followed from width and heads before, and does again"
    assert (
        load_config(folder, model_of(id=folder, config={"hidden_size": 64, "head_dim": 8})).head_dim
        == 8
    )
    assert (
        load_config(folder, model_of(id=folder, config={"model_type": "llama"})).hidden_size == 32
    )


def test_kinds_of_layers_follow_their_number(tmp_path: Path) -> None:
    build_model(None, model_of(config=QWEN3), seed=0).save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["layer_types"] == ["full_attention"] * 2
    )
    for layers, init in ((1, "pretrained"), (5, "random")):
        model = model_of(id=str(tmp_path), init=init, config={"num_hidden_layers": layers})
        built = build_model(str(tmp_path), model, seed=0)
        assert len(built.model.layers) == len(built.config.layer_types) == layers
        # Transformers checks a config again when it is written.
        built.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "model_type"),
        ({"model_type": "lama"}, "no model_type 'lama'"),
        (LLAMA | {"hiden_size": 64}, "did you mean hidden_size?"),
        (
            LLAMA | {"hidden_size": "wide"},
            "hidden_size is wide, a whole number from 1 on is wanted",
        ),
        (LLAMA | {"hidden_size": 33}, "not a multiple"),
        (LLAMA | {"attention_dropout": -1}, "attention_dropout is -1, a number from 0 to 1"),
        (LLAMA | {"hidden_act": "geluu"}, "model.config.hidden_act: transformers has no 'geluu'"),
        ({"model_type": "vit"}, "no causal language model: transformers has none for ViTConfig"),
    ],
)
@pytest.mark.slow
def test_configs_that_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as error:
        build_model(None, model_of(config=config), seed=0)
    assert says in line(error)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hiden_size": 8}, "did you mean hidden_size?"),
        ({"hidden_size": 33}, "not a multiple"),
        ({"model_type": "doge"}, "the model's files are of type llama, not doge"),
    ],
)
def test_values_laid_over_are_checked_too(folder: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as error:
        load_config(folder, model_of(id=folder, config=values))
    assert says in line(error)


# ------------------------------------------------------------------------------------------------------------- tokenizer


def test_the_chat_template_may_be_another(folder: str, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    tokenizer = load_tokenizer(folder, model_of(id=folder, chat_template=str(template)))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<x>"
    )
    with pytest.raises(ConfigError) as error:
        load_tokenizer(folder, model_of(id=folder, chat_template=str(tmp_path / "none.jinja")))
    assert "no such file" in line(error) and "none.jinja" in line(error)


def test_another_tokenizer_than_the_models(folder: str, tmp_path: Path) -> None:
    tiny_tokenizer(300).save_pretrained(tmp_path)
    assert len(load_tokenizer(folder, model_of(id=folder, tokenizer=str(tmp_path)))) == 300
    with pytest.raises(ModelError) as error:
        load_tokenizer(None, model_of(config=LLAMA))
    assert "model.tokenizer" in line(error)


def test_padding_falls_back_to_the_end_token_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    with caplog.at_level(logging.WARNING):
        assert pad_token_id(tokenizer) == 0 and not caplog.records
        tokenizer.pad_token = None
        assert pad_token_id(tokenizer) == tokenizer.eos_token_id == 2
        tokenizer.eos_token = None
        assert pad_token_id(tokenizer) == 0
    assert ["<|im_end|>" in caplog.messages[0], "<|endoftext|>" in caplog.messages[1]] == [
        True,
        True,
    ]
    assert len(tokenizer) == size, "no token is added"


# ----------------------------------------------------------------------------------------------------------------- model


def test_weights_come_in_fp32_whatever_they_were_stored_in(tmp_path: Path, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path)
    built = build_model(str(tmp_path), model_of(id=str(tmp_path)), seed=0)
    assert {p.dtype for p in built.parameters()} == {torch.float32}
    assert all(
        torch.equal(value, stored.state_dict()[name].float())
        for name, value in built.state_dict().items()
    )
    assert (
        built.config.use_cache is False and built.lm_head.weight is built.model.embed_tokens.weight
    )


@pytest.mark.slow
def test_random_weights_follow_the_seed_alone(folder: str) -> None:
    model = model_of(id=folder, init="random")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = build_model(folder, model, seed=1)
    assert torch.equal(torch.get_rng_state(), before), (
        "the run's own random numbers are as they were"
    )
    torch.manual_seed(8)
    again, other = build_model(folder, model, seed=1), build_model(folder, model, seed=2)
    pairs = list(zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_attention_auto_is_sdpa_or_what_the_class_has(folder: str) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    assert build_model(folder, model_of(id=folder), seed=0).config._attn_implementation == "sdpa"
    assert build_model(None, model_of(config=bloom), seed=0).config._attn_implementation == "eager"
    assert (
        build_model(
            folder, model_of(id=folder, attention="eager"), seed=0
        ).config._attn_implementation
        == "eager"
    )


def test_attention_that_is_not_to_be_had(folder: str) -> None:
    for model in (
        model_of(id=folder, attention="flash_attention_2"),
        model_of(config=LLAMA, attention="flash_attention_2"),
    ):
        with pytest.raises(ModelError) as error:
            build_model(model.id, model, seed=0)
        assert "model.attention flash_attention_2" in line(error) and "attention: auto" in line(
            error
        )


def test_weights_that_are_not_there_are_not_made_up(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        build_model(folder, model_of(id=folder, config={"num_hidden_layers": 3}), seed=0)
    assert "no weights for model.layers.2." in line(error) and "model.config" in line(error)
    with pytest.raises(ModelError) as error:
        build_model(folder, model_of(id=folder, config={"intermediate_size": 128}), seed=0)
    assert "cannot be loaded" in line(error)
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ModelError) as error:
        build_model(str(tmp_path / "bare"), model_of(id="x"), seed=0)
    assert "model.safetensors" in line(error)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


def test_a_pickle_is_refused_without_torch_s_advice(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(
        {"model.norm.weight": torch.ones(2), "more": Runs()},
        tmp_path / "pickled" / "pytorch_model.bin",
    )
    with pytest.raises(ModelError) as error:
        build_model(str(tmp_path / "pickled"), model_of(id="x"), seed=0)
    assert "a pickle with more than tensors" in line(error) and "safetensors" in line(error)
    assert "weights_only" not in line(error) and "trust the source" not in line(error)


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    folder = tiny_model_dir(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(proof)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ModelError) as error:
        load_config(str(folder), model_of(id=str(folder)))
    assert "trust_remote_code is off" in line(error) and not proof.exists()

    trusted = model_of(id=str(folder), trust_remote_code=True)
    built = build_model(str(folder), trusted, seed=0)
    assert type(built).__name__ == "OwnModel" and proof.exists()
    assert facts(load_config(str(folder), trusted), 64).parameters == sum(
        p.numel() for p in built.parameters()
    )


# ----------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("tied", [True, False])
def test_facts_count_what_is_there(tied: bool) -> None:
    model = model_of(config=LLAMA | {"tie_word_embeddings": tied, "max_position_embeddings": 256})
    built = build_model(None, model, seed=0)
    found = facts(load_config(None, model), 128)
    assert found.parameters == sum(p.numel() for p in built.parameters())
    assert (found.vocab_size, found.max_positions, found.layers, found.hidden) == (64, 256, 2, 32)
    embedding, layers, width = 64 * 32, 2, 32
    multiplied = found.parameters - (0 if tied else embedding)
    assert found.flops_per_token == 6 * multiplied + 12 * layers * width * 128


def test_flops_are_those_that_torch_counts() -> None:
    """Against torch's own counter on a forward and backward, attention computed in full; norms and biases are not products."""
    from torch.utils.flop_counter import FlopCounterMode

    config = LLAMA | {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "tie_word_embeddings": False,
    }
    model, length = model_of(config=config, attention="eager"), 64
    built = build_model(None, model, seed=0)
    with FlopCounterMode(display=False) as counter:
        built(input_ids=torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    norms = sum(p.numel() for name, p in built.named_parameters() if p.ndim == 1)
    predicted = facts(load_config(None, model), length).flops_per_token - 6 * norms
    assert counter.get_total_flops() / length == pytest.approx(predicted, rel=0.01)


def test_what_does_not_fit(folder: str) -> None:
    config, tokenizer = (
        load_config(folder, model_of(id=folder)),
        load_tokenizer(folder, model_of(id=folder)),
    )
    check_fits(config, tokenizer, 512)
    with pytest.raises(ModelError) as error:
        check_fits(config, tokenizer, 513)
    assert "513" in line(error) and "512" in line(error) and "data.max_length" in line(error)
    config.vocab_size = 300
    with pytest.raises(ModelError) as error:
        check_fits(config, tokenizer, 512)
    assert str(len(tokenizer)) in line(error) and "300" in line(error)


def test_frozen_parameters_are_counted_and_unknown_shapes_refused() -> None:
    from transformers import LlamaConfig, MambaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    assert facts(config, 16).frozen == 0
    assert facts(config, 16, frozen_names=["model.embed_tokens"]).frozen == 64 * 32
    with pytest.raises(ModelError, match="no num_attention_heads"):
        facts(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1), 16)


@pytest.mark.parametrize(
    ("keys", "text", "where"),
    [
        (
            {"attention": "sdpa"},
            "X does not support an attention implementation",
            "model.attention",
        ),
        ({"attention": "sdpa"}, "hidden_size must be divisible by num_attention_heads", "folder"),
        ({"trust_remote_code": True}, "its class ignores trust_remote_code", "folder"),
    ],
)
def test_a_failed_loader_is_blamed_on_the_key_that_caused_it(
    keys: dict[str, Any], text: str, where: str
) -> None:
    def fail() -> None:
        raise ValueError(text)

    with pytest.raises(ModelError) as error:
        call_loader("folder", model_of(id="folder", **keys), fail)
    assert (error.value.where or "").startswith(where)
    assert text in line(error)
