"""The boundary where files of others are read, and the one where values are bounded."""

from __future__ import annotations

import json
import os
import tracemalloc
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from drumline import cli, foreign
from drumline.config.algorithm import AlgorithmSpec, SamplingSpec
from drumline.config.config import Config
from drumline.config.load import load_text
from drumline.config.registry import Spec, find_object, kinds
from drumline.data.fingerprint import hash_file
from drumline.errors import ConfigError, DataError, EnvironmentFault
from drumline.telemetry.events import EventLog, Preempt, read

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\n"


def test_an_error_of_the_users_code_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\ndef f():\n    return json.loads('{')\n")
    f = find_object("mine.py:f", tmp_path, "here", "function")
    with pytest.raises(json.JSONDecodeError) as raised:
        f()
    assert (
        foreign.class_and_line(raised.value.with_traceback(raised.tb.tb_next))
        == "JSONDecodeError in mine.py:3"
    )
    with pytest.raises(DataError) as ours:
        foreign.read_object(tmp_path / "none.json", DataError)
    assert foreign.class_and_line(ours.value.with_traceback(ours.tb.tb_next)) == "DataError", (
        "no line of the user's"
    )


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """What stands where a file should, by what it is."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "latin").write_bytes(b"{}\n\xe9")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    return {
        "nothing": tmp_path / "none",
        "a folder": tmp_path,
        "a pipe": tmp_path / "pipe",
        "a device": Path("/dev/zero"),
        "a terabyte": tmp_path / "sparse",
        "not UTF-8": tmp_path / "latin",
        "a link to itself": loop,
        "a long name": tmp_path / ("n" * 5000),
        "a file that cannot be read at its start": Path("/proc/self/mem"),
        "a NUL": Path("a\0b"),
        "a lone surrogate": Path("\ud800"),
    }


@pytest.mark.timeout(60)
def test_only_plain_files_of_bounded_size_are_read(odd: dict[str, Path]) -> None:
    for name, path in odd.items():
        with pytest.raises(DataError) as error:
            foreign.read_object(path, DataError)
        line = error.value.line()
        assert line.isprintable() and len(line) < 1000, (name, line)


@pytest.mark.timeout(60)
def test_a_file_that_would_be_hashed_for_hours_is_refused(odd: dict[str, Path]) -> None:
    for name, said in (
        ("a terabyte", "more than 256 GiB — part it"),
        ("a pipe", "it is a device, pipe"),
        ("a link to itself", "symbolic links"),
        ("a file that cannot be read at its start", "cannot be read: Input/output error"),
    ):
        with pytest.raises(DataError, match=said):
            hash_file(odd[name])


DEEP = 5000
TEXTS = {
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep keys": '{"a":' * DEEP + "1" + "}" * DEEP,
    "rather deep": "[" * 101 + "]" * 101,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "65 bits": '{"a": 18446744073709551616}',
    "a surrogate": r'{"a": "\ud800"}',
    "a surrogate as a key": r'{"\udc00": 1}',
    "cut off": '{"a": ',
    "nothing": "",
}


@pytest.mark.parametrize("name", TEXTS)
def test_json_has_limits(name: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(TEXTS[name])
    with pytest.raises(DataError, match=r"f\.json"):
        foreign.read_object(tmp_path / "f.json", DataError)


def test_json_within_the_limits_is_read() -> None:
    said = {"a": [1, 2.5, "é", None, True], "b": {"c": 2**63 - 1}, "smile": "😀"}
    assert foreign.parse_json(json.dumps(said), "x", DataError, numbers=True) == said
    assert foreign.parse_json('{"a": 99999999999999999999}', "x", DataError) == {
        "a": 99999999999999999999
    }


def test_what_a_library_raises_is_one_line() -> None:
    for raised, words in (
        (KeyError("a"), "KeyError"),
        (ValueError("first:\nsecond"), "first: second"),
        (RecursionError(), "RecursionError"),
    ):
        with (
            pytest.raises(DataError, match=f"odd: {words}"),
            foreign.translate_exceptions("odd", "here", DataError),
        ):
            raise raised
    with pytest.raises(KeyboardInterrupt), foreign.translate_exceptions("odd", "here", DataError):
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------------- values


def numbers(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, str]]:
    """(place, limits) of every number that a section takes, and of those below it."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        for kind, limits in _leaves(field.annotation, list(field.metadata)):
            if kind in (int, float):
                yield f"{model.__name__}.{name}", " ".join(map(str, limits))
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                for section in kinds(kind).values() if issubclass(kind, Spec) else [kind]:
                    yield from numbers(section, seen)


def _leaves(annotation: Any, limits: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    if hasattr(annotation, "__metadata__"):
        yield from _leaves(annotation.__origin__, [*limits, *annotation.__metadata__])
    elif typing.get_origin(annotation) is not typing.Literal:
        parts = typing.get_args(annotation)
        yield from (
            ((annotation, limits),)
            if not parts
            else (leaf for part in parts for leaf in _leaves(part, limits))
        )


def test_every_number_of_the_schema_has_an_upper_bound() -> None:
    found = dict(numbers(Config, set()))
    assert len(found) > 100 and "OptimizerConfig.betas" in found
    assert not [
        place
        for place, limits in found.items()
        if "Le(" not in limits and "Lt(" not in limits and "le=" not in limits
    ]


OUT_OF_RANGE = {
    "optimizer.betas": "[0.9, 1.0]",
    "optimizer.momentum": "1.5",
    "optimizer.eps": "2",
    "optimizer.weight_decay": "1e9",
    "optimizer.lr": "1e300",
    "adapter": "{kind: lora, dropout: 1.0}",
    "launch.timeout_seconds": "1e300",
    "launch.nproc": "1000000000",
    "compile.mode": "nope",
    "run.dir": r'"\0"',
    "run.steps": "9" * 5000,
    "run.seed": "0x" + "f" * 5000,
    "run.epochs": "1e300",
    "model.id": "x" * 5000,
    "model.shape": "{layers: 1000000000, hidden: 64, heads: 4, vocabulary: 100}",
    "data.train.0.path": "x/" * 5000,
    "data.workers": "1000000000",
    "eval.metric": "nope",
    "data.cache_dir": r'"\ud800"',
    "precision": "!!int nope",
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_is_one_line(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(DATA, [f"{key}={OUT_OF_RANGE[key]}"], "c.yaml")
    line = error.value.line()
    assert key.split(".")[0] in line and line.isprintable() and len(line) < 1500, line


def test_metrics_are_those_that_the_algorithms_measure() -> None:
    class Sums(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return 1.0

    for kind, spec in kinds(AlgorithmSpec).items():
        known = spec.metrics
        if issubclass(spec, SamplingSpec) or kind == "python":
            continue  # measured by completions (rl.rollouts), or by the user's own objective
        algorithm = kind
        if kind == "distill":
            algorithm = "{kind: distill, teacher: some/model}"
        config = load_text(DATA, [f"algorithm={algorithm}"])
        measured = config.algorithm.build().metrics(Sums({"top": 1.0, "tp.0": 1.0}))
        assert set(measured) == set(known), kind
        named = load_text(DATA, [f"algorithm={algorithm}", f"eval.metric={known[0]}"])
        assert named.eval.metric == known[0]
    assert (
        load_text(DATA, ["algorithm=grpo", "eval.metric=reward/sums"]).eval.metric == "reward/sums"
    )


# -------------------------------------------------------------------------------------------------- events, the last net


def test_events_in_a_folder_are_one_line_and_odd_ones_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(EnvironmentFault, match="folder"):
        read(tmp_path / "folder")
    path = tmp_path / "events.jsonl"
    EventLog(path).emit(Preempt(step=3, signal="SIGTERM"))
    odd = [
        '{"kind": 5}',
        '{"kind": "step"}',
        '{"kind": "step", "step": "x"}',
        '{"kind": "step", "step": 1, "t": []}',
        "9" * 5000,
        "[" * DEEP,
    ]
    path.write_text("\n".join([*odd, path.read_text()]))
    assert [(event.kind, event.values()["step"]) for event in read(path)] == [("preempt", 3)]


def test_memory_that_runs_out_in_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def large(*_: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 19660800000000 bytes"
        )

    monkeypatch.setattr("drumline.train.command.prepare", large)
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "x.yaml"])
    line = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and line.startswith("error: this machine has too little memory: ")
        and line.count("\n") == 1
    )


def test_what_nobody_foresaw_is_one_line_and_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def odd(*_: object) -> None:
        raise ZeroDivisionError("by hf_abcdefghijklmnopqrstuvwxyz0123456789")

    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123456789")
    monkeypatch.setattr("drumline.train.command.prepare", odd)
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "x.yaml"])
    line = capsys.readouterr().err
    assert (
        ended.value.code == 1
        and line.startswith("error: unexpected error: ZeroDivisionError")
        and line.count("\n") == 1
    )
    kept = Path(line.rpartition(" with ")[2].strip())
    text = kept.read_text()
    kept.unlink()
    assert "Traceback" in text and "hf_abc" not in text + line


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """However large it may be: the launcher reads its events while its ranks have all the memory."""
    (tmp_path / "events.jsonl").write_text('{"kind": "step"}\n' * 10)
    tracemalloc.start()
    try:
        assert (
            len(foreign.read_bytes(tmp_path / "events.jsonl", EnvironmentFault, most=2**30)) == 170
        )
        assert tracemalloc.get_traced_memory()[1] < 4 * foreign.MIB
    finally:
        tracemalloc.stop()


def test_a_package_s_syntax_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first import compiles: what Python says of it meets users where the package was installed without."""
    (tmp_path / "loosely_written.py").write_text('KIND = "a"\nSAME = KIND is "a"\n')
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert foreign.import_quietly("loosely_written").KIND == "a"
