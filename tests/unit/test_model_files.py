"""A model folder of wrong values: one line that names the file, and the key where a size is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models import load as models
from drumline.models.files import check_counts
from drumline.models.tokenizer import load_tokenizer
from tests.tiny import tiny_model_dir

SIZES = [
    "num_key_value_heads",
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "vocab_size",
    "num_labels",
]
WRONG_CONFIG: list[tuple[str, Any]] = [
    *((key, value) for key in SIZES for value in (-1, 0, 2.5, True, "two")),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 10**30),
    ("max_position_embeddings", -1),
    ("text_config", {"num_hidden_layers": 10**9}),
]
WRONG_SENSE: list[tuple[str, Any]] = [
    ("num_attention_heads", 3),
    ("hidden_act", "no such"),
    ("hidden_act", 5),
    ("model_type", "no such"),
    ("model_type", []),
    ("rope_parameters", {"rope_type": "no such"}),
    ("rms_norm_eps", "x"),
    ("pad_token_id", 10**6),
    ("vocab_size", []),
]
WRONG_TOKENIZER: list[tuple[str, Any]] = [
    ("chat_template", 5),
    ("chat_template", True),
    ("tokenizer_class", 5),
    ("eos_token", 5),
    ("pad_token", []),
    ("added_tokens_decoder", []),
    ("added_tokens_decoder", {"x": {}}),
    ("padding_side", "no such"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def with_key(good: Path, folder: Path, file: str, key: str, value: Any) -> str:
    shutil.copytree(good, folder, dirs_exist_ok=True)
    (folder / file).write_text(json.dumps({**json.loads((good / file).read_text()), key: value}))
    return str(folder)


@pytest.mark.parametrize(("key", "value"), WRONG_CONFIG)
def test_a_size_that_is_none_is_named_with_its_file(
    good: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = with_key(good, tmp_path, "config.json", key, value)
    with pytest.raises(ModelError) as error:
        models.load_config(folder, ModelConfig(id=folder))
    line = error.value.line()
    assert line.startswith(f"{tmp_path}/config.json: ") and (
        (next(iter(value)) if isinstance(value, dict) else key) in line or value == 10**30
    )


@pytest.mark.parametrize(("key", "value"), WRONG_SENSE)
def test_a_config_that_makes_no_sense_is_named(
    good: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = with_key(good, tmp_path, "config.json", key, value)
    with pytest.raises(ModelError, match=r"config\.json"):
        models.facts(models.load_config(folder, ModelConfig(id=folder)), 64)


@pytest.mark.parametrize(("key", "value"), WRONG_TOKENIZER)
def test_a_tokenizers_wrong_value_is_named_with_its_file(
    good: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = with_key(good, tmp_path, "tokenizer_config.json", key, value)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder, ModelConfig(id=folder))


@pytest.mark.parametrize(
    "files",
    [["a.safetensors"], {"x": 5}, {"x": ["a.safetensors"]}, {"x": "../a.safetensors"}, None],
)
def test_an_index_that_names_no_files_is_named(good: Path, tmp_path: Path, files: Any) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors\.index\.json: weight_map is no object of tensor → file",
    ):
        models.load_config(str(tmp_path), ModelConfig(id=str(tmp_path)))


def test_sizes_of_models_that_there_are() -> None:
    check_counts(
        {
            "head_dim": 0,
            "qk_rope_head_dim": 64,
            "vocab_size_per_layer_input": 262144,
            "layer_rope_theta": 500000,
        },
        "x",
    )
    check_counts(
        {
            "num_experts": 16384,
            "id2label": {},
            "head_dim": None,
            "max_position_embeddings": 1200.0,
            "num_experts_per_tok": 0,
        },
        "x",
    )


def test_a_config_of_the_hub_is_checked_before_anything_is_built_of_it(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache as a download leaves it: no network."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    with_key(good, snapshot, "config.json", "num_hidden_layers", 10**9)
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    for place in (
        "huggingface_hub.constants.HF_HUB_CACHE",
        "transformers.utils.hub.constants.HF_HUB_CACHE",
    ):
        monkeypatch.setattr(place, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"a/b: config\.json: num_hidden_layers is 1e\+09"):
        models.load_config("a/b", ModelConfig(id="a/b"))
