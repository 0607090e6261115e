"""A model laid out without weights and filled is the one that transformers loads, bit for bit;
where that cannot be, it is built whole and the log says why. What is tried on a small copy is tried
on every kind of layer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.build import build_model, lay_out
from drumline.models.freeze import trainable_names
from drumline.models.load import facts, load_config
from drumline.models.shards import (
    DrawnWeights,
    FromFiles,
    NothingToFill,
    Stored,
    Values,
    _require_equal_values,
)
from drumline.models.small import small_copy
from tests.harness import read_json, same_tensors
from tests.tiny import read_model, tiny_architecture_dir, tiny_model_dir
from tests.unit.test_models_head import KINDS, LLAMA, build

NEOX = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "word_embed_proj_dim": 32,
}
# The last layer has heads of another size.
GEMMA4 = {
    **LLAMA,
    "head_dim": 8,
    "per_layer_config": {"1": {"head_dim": 16}},
    "vocab_size_per_layer_input": 64,
}
MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": NEOX,
    "opt": OPT,
    "gemma3_text": {**LLAMA, "head_dim": 8},
    "gemma4_text": GEMMA4,
    "diffllama": LLAMA,  # some weights are drawn by a function that takes no notice of the device
}
NORM = "model.norm.weight"


def shape_of(kind: str, values: dict[str, Any]) -> ModelConfig:
    """Return the options of a model that is written down, not read."""
    return ModelConfig(id=None, config={"model_type": kind, **values})


def read(folder: Path, **options: Any) -> Any:
    return build_model(str(folder), ModelConfig(id=str(folder), **options), seed=0)


def lay_out_folder(folder: Path, **options: Any) -> Any:
    return lay_out(str(folder), ModelConfig(id=str(folder)), 0, **options)


def fill(model: Any, source: Any, **options: Any) -> None:
    Values(source, "cpu", 0, **options).fill(model)


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def learned(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_model_of_the_cpu_is_drawn_on_the_cpu_though_a_gpu_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another part of the process may have used the GPU before: the weights are the same."""

    def drawn_weights() -> dict[str, torch.Tensor]:
        model, source = lay_out(None, shape_of("llama", KINDS["llama"]), seed=3)
        fill(model, source)
        return learned(model)

    before = drawn_weights()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    after = drawn_weights()

    assert before.keys() == after.keys()

    same_tensors(after, before)


def assert_meta(model: Any) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.is_meta, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "bloom", *MORE])
def test_filled_as_transformers_loads_it(tmp_path: Path, kind: str) -> None:
    """Old names in the files (gpt_neox), tied weights, several files, buffers that no file holds.
    Its sizes are known, too."""
    config = shape_of(kind, (KINDS | MORE)[kind])

    assert facts(load_config(None, config), 8).head_dim in (8, 16)

    drawn, source = lay_out(None, config, seed=3)

    assert isinstance(source, DrawnWeights)

    assert_meta(drawn)

    fill(drawn, source)
    drawn.save_pretrained(tmp_path, max_shard_size="20KB")
    model, source = lay_out_folder(tmp_path)

    assert isinstance(source, FromFiles)

    assert_meta(model)

    fill(model, source)
    expected = read_model(tmp_path)
    tensors = dict(expected.named_parameters(remove_duplicate=False))
    tensors.update(expected.named_buffers())
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter_or_buffer(name), tensor), name

    # Tied weights stay one.
    assert len(list(model.parameters())) == len(list(expected.parameters()))


def test_a_draw_hangs_on_seed_and_name_alone() -> None:
    def draw(seed: int, **options: Any) -> dict[str, torch.Tensor]:
        return learned(build_model(None, shape_of("llama", {**LLAMA, **options}), seed))

    first = draw(1)
    same_tensors(draw(1), first)
    same_tensors(draw(1, num_hidden_layers=3), first)

    assert not torch.equal(first["lm_head.weight"], draw(2)["lm_head.weight"])

    up = first["model.layers.0.mlp.up_proj.weight"]

    assert float(up.std()) == pytest.approx(0.02, rel=0.1), "the model's own rule"
    assert not torch.equal(up, first["model.layers.1.mlp.up_proj.weight"])


def test_a_converted_checkpoint_is_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build("mixtral").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model, source = lay_out_folder(tmp_path)

    assert isinstance(source, NothingToFill)
    assert not next(model.parameters()).is_meta

    (record,) = caplog.records
    why = "the whole model is built on each rank: transformers converts model.layers.0"

    assert record.message.startswith(why)


@pytest.mark.parametrize("converted", [False, True])
def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path, converted: bool) -> None:
    """Whether the files are read in parts or by transformers: it would not tie them, and train
    another model than the config says."""
    folder = tmp_path / "model"
    if converted:
        tiny_architecture_dir(folder, "mixtral", layers=1)
    else:
        tiny_model_dir(folder)

    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save({**tensors, "lm_head.weight": embedding.clone()}, file)
    model = read(folder)

    assert model.lm_head.weight is model.model.embed_tokens.weight, "alike they are one"

    save({**tensors, "lm_head.weight": embedding + 1}, file)
    message = r"lm_head.weight one weight, and its files hold two that differ"
    with pytest.raises(ModelError, match=message):
        read(folder)

    both = read(folder, config={"tie_word_embeddings": False})

    assert torch.equal(both.lm_head.weight, both.model.embed_tokens.weight + 1)


def test_the_tied_weight_that_differs_is_named(tmp_path: Path) -> None:
    ones = torch.ones(2, 2)
    file = tmp_path / "model.safetensors"
    save({"first": ones, "same": ones.clone(), "other": ones + 1}, file)
    tied = [Stored(file, name, (2, 2)) for name in ("first", "same", "other")]
    with pytest.raises(ModelError, match="makes first and other one weight"):
        _require_equal_values(tied, "model")


def test_what_its_class_freezes_stays_frozen_in_a_model_that_is_read_whole(tmp_path: Path) -> None:
    tiny_architecture_dir(tmp_path, "ernie4_5_moe", layers=2)
    model = read(tmp_path)
    names = trainable_names(model)

    assert names == trainable_names(read(tmp_path, init="random"))
    assert len(names) < len(list(model.parameters()))


def test_packed_weights_of_fp8_are_unpacked_and_no_longer_called_packed(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        if "proj" in name:
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.01)
            tensors[name] = (tensors[name] / 0.01).to(torch.float8_e4m3fn)

    save(tensors, file)
    config = read_json(folder / "config.json")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.q_proj.weight"
    unpacked = tensors[name].float() * 0.01
    for init in ("pretrained", "random"):
        model = read(folder, init=init)

        assert not hasattr(model.config, "quantization_config"), init

        for parameter in model.parameters():
            assert parameter.dtype == torch.float32, init

        same = torch.allclose(model.get_parameter(name), unpacked)

        assert same is (init == "pretrained")


def test_what_a_checkpoint_holds_is_not_read(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    names = frozenset(learned(read(folder)))
    model, source = lay_out_folder(folder)
    fill(model, source, checkpoint_keys=names - {NORM})

    assert torch.equal(model.model.norm.weight, torch.ones(32))

    (folder / "model.safetensors").unlink()
    model, source = lay_out_folder(folder, checkpoint_keys=names)
    fill(model, source, checkpoint_keys=names)

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def test_a_folder_that_was_saved_to_twice_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """One file, and an index of shards: the file counts."""
    folder = tiny_model_dir(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    sevens = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    save(sevens, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model, source = lay_out_folder(folder)
    fill(model, source)

    assert torch.equal(model.model.norm.weight, tensors[NORM])
    assert torch.equal(read_model(folder).model.norm.weight, tensors[NORM])


def test_a_small_copy_has_no_more_layers_than_the_model() -> None:
    """ModernBERT names its embeddings among its blocks."""
    config = AutoConfig.for_model(
        "modernbert",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=64,
        pad_token_id=0,
    )
    model = AutoModel.from_config(config)

    assert small_copy(model, "cpu").config.num_hidden_layers == 2


def test_a_small_copy_has_every_kind_of_layer() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    options = {
        **LLAMA,
        "vocab_size": 4096,
        "num_hidden_layers": 8,
        "head_dim": 8,
        "layer_types": kinds * 2,
        "intermediate_size": 256,
    }
    model = build_model(None, shape_of("gemma3_text", options), seed=0)
    small = small_copy(model, "cpu")

    assert small.config.layer_types == kinds
    assert len(small.model.layers) == 4
    assert size_of(small) < size_of(model) / 4
    assert type(small) is type(model)
    assert small.config.hidden_size == model.config.hidden_size
