"""A model laid out without weights and filled is the one that transformers loads, bit for bit; where that cannot be, it is built whole and
the log says why. What is tried on a small copy is tried on every kind of layer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.build import build_model, lay_out
from drumline.models.freeze import trainable_names
from drumline.models.load import facts, load_config
from drumline.models.shards import DrawnWeights, FromFiles, NothingToFill, Values
from drumline.models.small import small_copy
from tests.tiny import tiny_architecture_dir, tiny_model_dir
from tests.unit.test_models_head import KINDS, LLAMA, build

MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    },
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "word_embed_proj_dim": 32,
    },
    "gemma3_text": LLAMA | {"head_dim": 8},
    # The last layer has heads of another size.
    "gemma4_text": LLAMA
    | {
        "head_dim": 8,
        "per_layer_config": {"1": {"head_dim": 16}},
        "vocab_size_per_layer_input": 64,
    },
    "diffllama": LLAMA,  # some weights are drawn by a function that takes no notice of the device
}


def test_a_model_of_the_cpu_is_drawn_on_the_cpu_though_a_gpu_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another part of the process may have used the GPU before: the weights are the same."""

    def drawn_weights() -> dict[str, torch.Tensor]:
        model, source = lay_out(
            None, ModelConfig(id=None, config={"model_type": "llama", **KINDS["llama"]}), seed=3
        )
        Values(source, "cpu", 0).fill(model)
        return dict(model.named_parameters())

    before = drawn_weights()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    after = drawn_weights()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "bloom", *MORE])
def test_filled_as_transformers_loads_it(tmp_path: Path, kind: str) -> None:
    """Old names in the files (gpt_neox), tied weights, several files, buffers that no file holds. Its sizes are known, too."""
    from transformers import AutoModelForCausalLM

    config = {"model_type": kind, **(KINDS | MORE)[kind]}
    assert facts(load_config(None, ModelConfig(id=None, config=config)), 8).head_dim in (8, 16)
    drawn, source = lay_out(None, ModelConfig(id=None, config=config), seed=3)
    assert isinstance(source, DrawnWeights) and all(p.is_meta for p in drawn.parameters())
    Values(source, "cpu", 0).fill(drawn)
    drawn.save_pretrained(tmp_path, max_shard_size="20KB")
    model, source = lay_out(str(tmp_path), ModelConfig(id=str(tmp_path)), seed=0)
    assert isinstance(source, FromFiles) and all(p.is_meta for p in model.parameters())
    Values(source, "cpu", 0).fill(model)
    expected = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    for name, tensor in [
        *expected.named_parameters(remove_duplicate=False),
        *expected.named_buffers(),
    ]:
        assert torch.equal(model.get_parameter_or_buffer(name), tensor), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), (
        "tied weights stay one"
    )


def test_a_draw_hangs_on_seed_and_name_alone() -> None:
    config = ModelConfig(id=None, config={"model_type": "llama", **LLAMA})
    first, again, other = (
        dict(build_model(None, config, seed).named_parameters()) for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    longer = ModelConfig(id=None, config={"model_type": "llama", **LLAMA, "num_hidden_layers": 3})
    assert all(
        torch.equal(tensor, first[name])
        for name, tensor in build_model(None, longer, 1).named_parameters()
        if name in first
    )
    assert float(first["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(
        0.02, rel=0.1
    ), "the model's own rule"
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"]
    )


def test_a_converted_checkpoint_is_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build("mixtral").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model, source = lay_out(str(tmp_path), ModelConfig(id=str(tmp_path)), seed=0)
    assert isinstance(source, NothingToFill) and not next(model.parameters()).is_meta
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        "the whole model is built on each rank: transformers converts model.layers.0"
    )


@pytest.mark.parametrize("converted", [False, True])
def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path, converted: bool) -> None:
    """Whether the files are read in parts or by transformers: it would not tie them, and train another model than the config says."""
    folder = tmp_path / "model"
    tiny_architecture_dir(folder, "mixtral", layers=1) if converted else tiny_model_dir(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        file,
        metadata={"format": "pt"},
    )
    model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "alike they are one"
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ModelError, match=r"lm_head.weight one weight, and its files hold two that differ"
    ):
        build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    both = build_model(
        str(folder), ModelConfig(id=str(folder), config={"tie_word_embeddings": False}), seed=0
    )
    assert torch.equal(both.lm_head.weight, both.model.embed_tokens.weight + 1)


def test_what_its_class_freezes_stays_frozen_in_a_model_that_is_read_whole(tmp_path: Path) -> None:
    tiny_architecture_dir(tmp_path, "ernie4_5_moe", layers=2)
    given = ModelConfig(id=str(tmp_path))
    drawn, read = (
        build_model(str(tmp_path), given.model_copy(update={"init": "random"}), 0),
        build_model(str(tmp_path), given, 0),
    )
    assert trainable_names(read) == trainable_names(drawn) and len(trainable_names(read)) < len(
        list(read.parameters())
    )


def test_packed_weights_of_fp8_are_unpacked_and_no_longer_called_packed(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.01)
        tensors[name] = (tensors[name] / 0.01).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    packed = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    name = "model.layers.0.self_attn.q_proj.weight"
    for init in ("pretrained", "random"):
        model = build_model(str(folder), ModelConfig(id=str(folder), init=init), seed=0)
        assert not hasattr(model.config, "quantization_config") and {
            p.dtype for p in model.parameters()
        } == {torch.float32}, init
        same = torch.allclose(model.get_parameter(name), tensors[name].float() * 0.01)
        assert same is (init == "pretrained")


def test_what_a_checkpoint_holds_is_not_read(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    options = ModelConfig(id=str(folder))
    names = frozenset(name for name, _ in build_model(str(folder), options, 0).named_parameters())
    model, source = lay_out(str(folder), options, 0)
    Values(source, "cpu", 0, checkpoint_keys=names - {"model.norm.weight"}).fill(model)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    (folder / "model.safetensors").unlink()
    model, source = lay_out(str(folder), options, 0, checkpoint_keys=names)
    Values(source, "cpu", 0, checkpoint_keys=names).fill(model)
    assert (
        model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    )


def test_a_folder_that_was_saved_to_twice_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """One file, and an index of shards: the file counts."""
    folder = tiny_model_dir(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()},
        folder / "part.safetensors",
        {"format": "pt"},
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")})
    )
    model, source = lay_out(str(folder), ModelConfig(id=str(folder)), seed=0)
    Values(source, "cpu", 0).fill(model)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(folder).model.norm.weight, tensors["model.norm.weight"]
    )


def test_a_small_copy_has_no_more_layers_than_the_model() -> None:
    """ModernBERT names its embeddings among its blocks."""
    options = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    options |= {"vocab_size": 64, "pad_token_id": 0}
    model = AutoModel.from_config(AutoConfig.for_model("modernbert", **options))
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
    model = build_model(
        None, ModelConfig(id=None, config={"model_type": "gemma3_text", **options}), seed=0
    )
    small = small_copy(model, "cpu")
    assert small.config.layer_types == kinds and len(small.model.layers) == 4
    assert (
        sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters()) / 4
    )
    assert type(small) is type(model) and small.config.hidden_size == model.config.hidden_size
