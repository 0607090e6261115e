"""What events.jsonl may hold: known kinds, whole events, JSON's own values, and no secrets."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.core.redact import plain, redact, redacted_streams
from drumline.telemetry.events import KINDS, EventLog, read, series

PACKAGE = Path(__file__).parents[2] / "drumline"


def emitted() -> list[tuple[str, str, set[str], bool]]:
    """(file:line, kind, fields written out, whether there are more that only show at run time) of each emit("kind", …) in the package."""
    found: list[tuple[str, str, set[str], bool]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "emit":
                fields = {word.arg for word in node.keywords if word.arg}
                found.append((f"{path.name}:{node.lineno}", str(node.args[0].value), fields, len(fields) < len(node.keywords)))
    return found


def test_every_kind_is_emitted_with_its_fields_and_no_other() -> None:
    calls = emitted()
    assert {kind for _, kind, _, _ in calls} == set(KINDS)
    for place, kind, fields, more in calls:
        assert fields <= set(KINDS[kind]), f"{place}: {kind} has undocumented fields {fields - set(KINDS[kind])}"
        assert more or fields == set(KINDS[kind]), f"{place}: {kind} lacks {set(KINDS[kind]) - fields}"


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown"):
        EventLog(tmp_path / "e.jsonl").emit("stepp", step=1)


def test_numbers_of_numpy_and_torch_stay_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl")
    log.emit("eval", step=np.int64(3), loss=torch.tensor(0.5), samples=np.float32("nan"), seconds=Path("x"))
    (event,) = read(tmp_path / "e.jsonl")
    assert (event["step"], event["loss"], event["samples"], event["seconds"]) == (3, 0.5, None, "x")


def test_lines_are_json_whatever_the_values(tmp_path: Path) -> None:
    odd = {"a\nb": "line\u2028break\n", "tuple": (1, {2, 3}), "inf": [float("-inf")], "bytes": b"\xff", "path": "\udcff", 5: None}
    EventLog(tmp_path / "e.jsonl").emit("preempt", step=1, signal=odd)
    (line,) = (tmp_path / "e.jsonl").read_bytes().splitlines()
    value = json.loads(line)["signal"]
    assert value["inf"] == ["-inf"] and value["tuple"] == [1, [2, 3]] and value["path"] == "\udcff" and value["a\nb"] == "line\u2028break\n"
    assert len(read(tmp_path / "e.jsonl")) == 1


def test_the_last_word_on_a_step_counts() -> None:
    events = [{"kind": "step", "step": s, "loss": loss} for s, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 2.5), (3, 1.0))]
    assert series([*events, {"kind": "eval", "step": 3, "loss": 0.0}], "loss") == {1: 3.0, 2: 2.5, 3: 1.0}
    assert series(events, "grad_norm") == {}


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
    ],
)
def test_patterns_of_secrets(text: str, secret: str) -> None:
    assert secret not in redact(text) and "[redacted]" in redact(text)


@pytest.mark.parametrize(
    "text",
    ["ssh://git@host/x", "http://127.0.0.1:8000/v1", "eos_token=</s>", "12 tokens: 3", "the key: it", "monkey = 3", "a@b.c", "x:y@z"],
)
def test_what_is_no_secret(text: str) -> None:
    assert redact(text) == text


def test_keys_are_redacted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA0123456789")
    monkeypatch.setenv("DATABASE_URL", "postgres://db/sales")
    failures = {"raised E: AKIA0123456789": 2, "raised E: [redacted]": 3, "raised F: postgres://db/sales": 1}
    assert plain({"failures": {"mine": failures}}) == {"failures": {"mine": {"raised E: [redacted]": 5, "raised F: [redacted]": 1}}}
    nested = {"api_keys": ["a", {"name": "b", "n": 3}], "pad_token": "<pad>"}
    assert plain(nested) == {"api_keys": ["[redacted]", {"name": "[redacted]", "n": 3}], "pad_token": "<pad>"}


@pytest.mark.parametrize("text", ["x" * 10**6, "-" * 10**6, "a_" * 10**6, "a:" * 10**6, "http://" * 10**5, "a-key" * 10**5])
def test_long_texts_take_no_time(text: str) -> None:
    assert redact(text) == text  # within the suite's time limit: squared, it would take hours


def test_what_is_printed_is_redacted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    with redacted_streams():
        print("with", "hunter2hunter2")
        sys.stderr.writelines(["with ", "hunter2hunter2\n"])
        assert sys.stderr.writable()
    said = capsys.readouterr()
    assert said.out == said.err == "with [redacted]\n"


def test_read_passes_over_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"kind": "preempt", "step": 1}\n[1]\n"x"\n\xff\xfe\n\n{"step": 2}\n{"kind": "preempt", "st')
    assert read(path) == [{"kind": "preempt", "step": 1}]


def test_secrets_are_nowhere_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    monkeypatch.setenv("SHORT_KEY", "true")
    text = 'GET https://hf.co?x=hf_abcdefghijk true WANDB_API_KEY=0123 --api-key 4567 "password": "8910", pad_token_id=3'
    told = redact(text)
    assert not any(secret in told for secret in ("hf_abcdefghijk", "0123", "4567", "8910"))
    assert "true" in told and "pad_token_id=3" in told
    assert plain({"error": [f"bad {'hf_abcdefghijk'}"], "AWS_SECRET": "x", "loss_per_token": 1.5}) == {
        "error": ["bad [redacted]"],
        "AWS_SECRET": "[redacted]",
        "loss_per_token": 1.5,
    }
