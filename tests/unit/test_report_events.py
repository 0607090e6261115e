"""What events.jsonl may hold: known kinds, whole events, JSON's own values, and no secrets."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from drumline.doctor.command import as_text
from drumline.doctor.diagnose import diagnose
from drumline.launch import runs
from drumline.report import page
from drumline.report.compare import compare
from drumline.report.facts import RunFacts
from drumline.report.progress import Progress
from drumline.system.redact import redact, redacted_json, redacted_streams
from drumline.telemetry import watched  # its kinds are among KINDS
from drumline.telemetry.damage import MOST
from drumline.telemetry.events import (
    KINDS,
    Eval,
    Event,
    EventLog,
    Preempt,
    Step,
    Unknown,
    read,
    series,
)
from drumline.train.run import Run
from tests.unit.report_runs import HOSTILE, story, write_run

PACKAGE = Path(__file__).parents[2] / "drumline"


@pytest.mark.slow
def test_every_kind_is_made_somewhere() -> None:
    """What is not made with all its fields and no other mypy finds."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("plugins/*/src/**/*.py")]
    made = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for path in sorted(files)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {each.__name__ for kind, each in KINDS.items() if kind} <= made


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    log, made = EventLog(tmp_path / "e.jsonl"), {}
    for kind, each in KINDS.items():
        if kind:
            numbers: dict[str, Any] = {name: number for number, name in enumerate(each.names(), 1)}
            made[kind] = log.emit(each(metrics={"own": [1.5]}, **numbers))
    assert {event.kind: event for event in read(tmp_path / "e.jsonl")} == made and len(made) == 28
    assert KINDS["hang"] is watched.Hang
    line = json.loads((tmp_path / "e.jsonl").read_text().splitlines()[list(made).index("replan")])
    own = {"from": 1, "to": 2, "why": 3, "predicted_bytes": 4, "plan": 5, "step": 6, "own": [1.5]}
    assert line | {"t": 0} == {"t": 0, "kind": "replan", **own}


def test_other_versions_are_read(tmp_path: Path) -> None:
    """What is unknown is kept; what is missing is None."""
    path = tmp_path / "e.jsonl"
    path.write_text(
        '{"t": 1, "kind": "moved", "to": "there"}\n{"t": 2, "kind": "step", "step": 3, "loss": 1.0, "newer": 4}\n'
    )
    moved, step = read(path)
    assert moved == Unknown(t=1, kind="moved", metrics={"to": "there"}) and moved.values() == {
        "t": 1,
        "kind": "moved",
        "to": "there",
    }
    assert isinstance(step, Step) and (step.step, step.loss, step.sent_bytes, step.metrics) == (
        3,
        1.0,
        None,
        {"newer": 4},
    )


def test_numbers_of_numpy_and_torch_stay_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl")
    odd: dict[str, Any] = {"step": np.int64(3), "samples": np.float32("nan"), "seconds": Path("x")}
    log.emit(Eval(**odd, metrics={"loss": torch.tensor(0.5)}))
    (event,) = read(tmp_path / "e.jsonl")
    assert isinstance(event, Eval)
    assert (event.step, event.metrics["loss"], event.samples, event.seconds) == (3, 0.5, None, None)


def test_lines_are_json_whatever_the_values(tmp_path: Path) -> None:
    odd: Any = {
        "a\nb": "line\u2028break\n",
        "tuple": (1, {2, 3}),
        "inf": [float("-inf")],
        "bytes": b"\xff",
        "path": "\udcff",
        5: None,
    }
    EventLog(tmp_path / "e.jsonl").emit(Preempt(step=1, signal=odd))
    (line,) = (tmp_path / "e.jsonl").read_bytes().splitlines()
    value = json.loads(line)["signal"]
    assert (
        value["inf"] == ["-inf"]
        and value["tuple"] == [1, [2, 3]]
        and value["path"] == "\udcff"
        and value["a\nb"] == "line\u2028break\n"
    )
    assert len(read(tmp_path / "e.jsonl")) == 1


def test_the_last_word_on_a_step_counts() -> None:
    steps = [
        {"kind": "step", "step": s, "loss": loss}
        for s, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 2.5), (3, 1.0))
    ]
    events = [
        Event.from_values(values) for values in (*steps, {"kind": "eval", "step": 3, "loss": 0.0})
    ]
    assert series(events, "loss") == {1: 3.0, 2: 2.5, 3: 1.0}
    assert series(events, "loss", Eval) == {3: 0.0} and series(events, "unheard of") == {}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgres://me:hunter2@db:5432/x", "hunter2"),
        ("redis://:hunter2@db", "hunter2"),
        ("https://me:p@ss@host/a", "p@ss"),
        ("git clone https://ghp_0123456789abcdefghij@host/x", "ghp_"),
        ("AWS_ACCESS_KEY_ID=AKIA123 failed", "AKIA123"),
        ("DATABASE_URL=postgres:x", "postgres:x"),
        ('{"clientSecret": "abc", "apiKey": "def"}', "abc"),
        ("Authorization: Bearer abcdefghijkl", "abcdefghijkl"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("password='correct horse battery'", "horse"),
        ('{"text": "password=\\"correct horse\\""}', "horse"),
        ('"password": "a,b;c d", "n": 1', "c d"),
        ('--api-key "one two"', "two"),
        ("BlobEndpoint=x;AccountKey=Zm9v==;Suffix=y", "Zm9v"),
        ("MYSQL_PWD=hunter22", "hunter22"),
        ("https://x.blob.core.windows.net/z?sp=r&sig=abc%2Fdef", "abc%2Fdef"),
    ],
)
def test_patterns_of_secrets(text: str, secret: str) -> None:
    assert secret not in redact(text) and "[redacted]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "ssh://git@host/x",
        "PWD=/home/me",
        "Basic ideas of",
        "signature: f(x)",
        "password: ''",
        "http://127.0.0.1:8000/v1",
        "eos_token=</s>",
        "12 tokens: 3",
        "the key: it",
        "monkey = 3",
        "a@b.c",
        "x:y@z",
    ],
)
def test_what_is_no_secret(text: str) -> None:
    assert redact(text) == text


def test_a_secret_that_begins_another_leaves_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PASSWORD", "hunter2hunter2")
    monkeypatch.setenv("B_PASSWORD", "hunter2hunter2-of-me")
    assert redact("it was hunter2hunter2-of-me") == "it was [redacted]"


def test_keys_are_redacted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA0123456789")
    monkeypatch.setenv("DATABASE_URL", "postgres://db/sales")
    failures = {
        "raised E: AKIA0123456789": 2,
        "raised E: [redacted]": 3,
        "raised F: postgres://db/sales": 1,
    }
    assert redacted_json({"failures": {"mine": failures}}) == {
        "failures": {"mine": {"raised E: [redacted]": 5, "raised F: [redacted]": 1}}
    }
    nested = {"api_keys": ["a", {"name": "b", "n": 3}], "pad_token": "<pad>"}
    assert redacted_json(nested) == {
        "api_keys": ["[redacted]", {"name": "[redacted]", "n": 3}],
        "pad_token": "<pad>",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["x" * 10**6, "-" * 10**6, "a_" * 10**6, "a:" * 10**6, "http://" * 10**5, "a-key" * 10**5],
)
def test_long_texts_take_no_time(text: str) -> None:
    assert redact(text) == text  # within the suite's time limit: squared, it would take hours


def test_what_is_printed_is_redacted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    with redacted_streams():
        print("with", "hunter2hunter2")
        sys.stderr.writelines(["with ", "hunter2hunter2\n"])
        assert sys.stderr.writable()
    said = capsys.readouterr()
    assert said.out == said.err == "with [redacted]\n"


def test_a_name_and_its_value_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with redacted_streams():
        print("HF_TOKEN:", "hf_of_nobody_else")
        print("a bar", end="", flush=True)
        assert capsys.readouterr().out == "HF_TOKEN: [redacted]\na bar"
        print("one\nAPI_KEY =", "two", end="")
        print(3, end="")
    assert capsys.readouterr().out == "one\nAPI_KEY = [redacted]"


def test_read_passes_over_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(
        b'{"kind": "preempt", "step": 1}\n[1]\n"x"\n\xff\xfe\n\n{"step": 2}\n{"kind": "preempt", "st'
    )
    assert [(event.kind, event.values()["step"]) for event in read(path)] == [("preempt", 1)]


@pytest.mark.claim("secrets are written nowhere")
def test_secrets_are_nowhere_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    monkeypatch.setenv("SHORT_KEY", "true")
    text = 'GET https://hf.co?x=hf_abcdefghijk true WANDB_API_KEY=0123 --api-key 4567 "password": "8910", pad_token_id=3'
    told = redact(text)
    assert not any(secret in told for secret in ("hf_abcdefghijk", "0123", "4567", "8910"))
    assert "true" in told and "pad_token_id=3" in told
    assert redacted_json(
        {"error": [f"bad {'hf_abcdefghijk'}"], "AWS_SECRET": "x", "loss_per_token": 1.5}
    ) == {
        "error": ["bad [redacted]"],
        "AWS_SECRET": "[redacted]",
        "loss_per_token": 1.5,
    }


HURTING = "\x1b]0;me\x07[/x]\ud800 a_key=hunter2hunter2"
ODD = (
    None,
    True,
    -1,
    2**70,
    1e200,
    float("nan"),
    float("inf"),
    "x",
    HOSTILE,
    [],
    {},
    [None],
    {"a": {}},
    [{}],
    HURTING,
)


@pytest.mark.slow
def test_any_value_in_a_record_is_read_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All readers: the folder is a stranger's."""
    run = write_run(tmp_path / "[r]\x1b", events=[])
    made = {event.kind: event.values() for event in story(8)}
    lines = [
        json.dumps(values | {key: odd})
        for values in made.values()
        for key in (*values, "own")
        for odd in ODD
    ]
    (run / "events.jsonl").write_text(
        "\ufeff"
        + "\r\n".join([*lines, "{", "\0", "[" * 9999, f'{{"kind": "eval", "step": {"9" * 5000}}}'])
    )
    seen = Run(run)
    json.dumps(seen.events, allow_nan=False).encode()
    assert all(abs(value) < MOST for value in seen.metrics.values())
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        for place, event in enumerate(read(run / "events.jsonl")):
            progress.on_event(event)
            if place % 8 == 0:
                Console(file=out).print(progress.render())
    page.page([RunFacts(run)]).encode()
    print(out.getvalue(), runs.table(runs.states(tmp_path)), as_text(diagnose(str(run))))
    compare([run, write_run(tmp_path / "other")])
    said = "".join(capsys.readouterr())
    assert (
        not any(each in said for each in ("\x1b", "\x07", "hunter2"))
        and "damaged or of another version" in said
    )
    said.encode()
