"""Ids of ModelScope, by a stand-in for its package, whose two functions have the names and arguments of modelscope 1.40."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from drumline.config.data import HubSource
from drumline.config.model import ModelConfig
from drumline.data.sources import call_hub
from drumline.errors import DataError, ModelError
from drumline.models.files import resolve, tokenizer_folder


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that has one/model, and the data set one/rows."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rows.jsonl").write_text('{"text": "left"}\n')

    def snapshot_download(model_id: str | None = None, revision: str | None = None) -> str:
        if model_id != "one/model" or revision not in (None, "v1"):
            raise ValueError(f"no repository {model_id}\nand a traceback")
        return str(tmp_path / "one")

    def dataset_snapshot_download(
        dataset_id: str | None = None, revision: str | None = None
    ) -> str:
        assert dataset_id == "one/rows"
        return str(tmp_path / "one")

    made = ModuleType("modelscope.hub.snapshot_download")
    vars(made).update(
        snapshot_download=snapshot_download, dataset_snapshot_download=dataset_snapshot_download
    )
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return tmp_path / "one"


def test_a_model_and_a_tokenizer(modelscope: Path) -> None:
    assert resolve(ModelConfig(id="modelscope:one/model"), lambda *_: None) == str(modelscope)
    assert resolve(ModelConfig(id="modelscope:one/model", revision="v1"), lambda *_: None) == str(
        modelscope
    )
    assert tokenizer_folder("modelscope:one/model") == str(modelscope)
    with pytest.raises(
        ModelError, match="ModelScope gives no such model: no repository one/other"
    ) as failure:
        resolve(ModelConfig(id="modelscope:one/other"), lambda *_: None)
    assert "\n" not in failure.value.line()


def test_a_data_set(modelscope: Path) -> None:
    source = HubSource(kind="hub", id="modelscope:one/rows")
    assert call_hub(source, "load_dataset", split="train")["text"] == ["left"]


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelError, match=r"modelscope is not installed .* pip install modelscope"):
        resolve(ModelConfig(id="modelscope:one/model"), lambda *_: None)
    with pytest.raises(DataError, match="modelscope is not installed"):
        call_hub(HubSource(kind="hub", id="modelscope:one/rows"), "load_dataset")
