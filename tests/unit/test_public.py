"""`import drumline`: its names, what importing it costs, and the verbs that launch nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import drumline
from drumline.config.load import load_text
from tests.tiny import tiny_model_dir


def test_the_names() -> None:
    assert drumline.__all__ == ("Run", "errors", "load", "plan", "session", "train", "verify")
    assert set(drumline.__all__) <= set(dir(drumline))
    assert all(callable(getattr(drumline, name)) for name in drumline.__all__ if name != "errors")
    assert Path(drumline.__file__).with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        drumline.trian  # noqa: B018


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, drumline; drumline.train, drumline.errors; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_plan() -> None:
    found = drumline.plan(model="llama-3.1-8b", cluster="2x4090", length=512, adapter="lora")
    best = found.best
    assert (
        best is found.ranked[0]
        and best.verdict == "fits"
        and best.memory_bytes < 24e9
        and best.tokens_per_s > 0
    )
    config = load_text(best.yaml(), [])
    assert (
        config.strategy.kind == best.candidate.config.strategy.kind
        and config.adapter.kind == "lora"
    )
    assert config.cluster is not None and yaml.safe_load(best.yaml()) == best.config
    assert {refused.name for refused in found.refused} and best.name in best.explain()
    data = {"data": {"train": [{"kind": "file", "path": "x.jsonl"}]}}
    nothing = drumline.plan(
        data, {"data.max_length": 4096}, model="llama-3.1-405b", cluster="1x4090"
    )
    assert not nothing.ranked and nothing.refused
    with pytest.raises(drumline.errors.PlanError):
        nothing.best  # noqa: B018
    with pytest.raises(drumline.errors.UserError, match="no adapter 'lura'"):
        drumline.plan(model="llama-3.1-8b", adapter="lura")


def test_a_config_of_python_objects_is_refused_in_one_line() -> None:
    with pytest.raises(
        drumline.errors.ConfigError, match=r"cannot be written as YAML: .* path\.py:name"
    ):
        drumline.plan({"model": {"id": object()}})
    with pytest.raises(drumline.errors.ConfigError, match=r"override model\.id: cannot be written"):
        drumline.plan("a.yaml", {"model.id": print})


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("drumline.planner.public.load_with_flags", lambda: drumline.plan(model="gpt2")),
        ("drumline.train.command.launch_ranks", lambda: drumline.train({"data": "x.jsonl"})),
        ("drumline.bench.verify.reader", lambda: drumline.verify("x.yaml")),
        ("drumline.inference.model.resolve", lambda: drumline.load("some/model")),
    ],
    ids=["plan", "train", "verify", "load"],
)
def test_memory_that_runs_out_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, place: str, call: Callable[[], object]
) -> None:
    def large(*_: object, **__: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 19660800000000 bytes"
        )

    monkeypatch.setattr(place, large)
    with pytest.raises(
        drumline.errors.EnvironmentFault,
        match="this machine has too little memory: DefaultCPUAllocator",
    ):
        call()


def test_load_talks_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = drumline.load(tiny_model_dir(tmp_path / "model"))
    said = model.chat("one?", max_new_tokens=4, temperature=0)
    assert [turn["content"] for turn in model.turns] == ["one?", said]
    both = model.generate(["one two", "three"], max_new_tokens=4)
    assert both == [model.generate(text, max_new_tokens=4)[0] for text in ("one two", "three")]
    drawn = [
        model.generate("one two", max_new_tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert capsys.readouterr().out == ""
    with pytest.raises(drumline.errors.UserError):
        drumline.load(tmp_path / "nothing")


def test_callbacks_are_classes_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Deaf: pass\n")
    config = {"data": {"train": [{"kind": "file", "path": "x.jsonl"}]}}
    with pytest.raises(drumline.errors.ConfigError, match="ranks are other processes"):
        drumline.train(config, callbacks=[print])  # type: ignore[list-item]
    with pytest.raises(
        drumline.errors.ConfigError, match="is no callback — write a class with one of on_start"
    ):
        drumline.train(config, callbacks=[f"{tmp_path}/mine.py:Deaf"])
