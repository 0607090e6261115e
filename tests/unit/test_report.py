"""events.jsonl, what follows it, and what the user sees of it."""

from __future__ import annotations

import errno
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumline.report.bars import bars
from drumline.report.progress import Progress, duration, size, spark
from drumline.telemetry.events import Eval, Event, EventLog, Nonfinite, Preempt, read, series, tail

STEP = {
    "lr": 1e-4, "grad_norm": 1.5, "tokens": 100, "samples": 4, "tokens_per_s": 1234.5, "samples_per_s": 2.0, "mfu": None, "seconds": 0.5,
    "data_s": 0.01, "compute_s": 0.4, "comm_s": 0.09, "memory_bytes": [3 * 2**30, 2**30], "epoch": 0.5,
}  # fmt: skip


def step(number: int, loss: float) -> dict[str, Any]:
    return {"t": time.time(), "kind": "step", "step": number, "loss": loss, **STEP}


def test_values_that_json_lacks_and_secrets(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl")
    log.emit(Nonfinite(step=1, policy="skip", loss=math.nan, grad_norm=math.inf, sample_ids=[1]))
    secrets = {"loss": 1.0, "WANDB_API_KEY": "abc", "nested": {"hf_token": "def", "tokens": 5}}
    log.emit(Eval(step=1, samples=1, seconds=0.1, metrics=secrets))
    first, second = (event.values() for event in read(tmp_path / "e.jsonl"))
    assert (first["loss"], first["grad_norm"]) == (None, "inf")
    assert second["WANDB_API_KEY"] == "[redacted]" and second["nested"] == {
        "hf_token": "[redacted]",
        "tokens": 5,
    }
    text = (tmp_path / "e.jsonl").read_text()
    assert (
        "abc" not in text
        and "def" not in text
        and all(json.loads(line) for line in text.splitlines())
    )


def test_a_torn_line_is_passed_over_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    EventLog(path).emit(Preempt(step=1, signal="SIGTERM"))
    with path.open("a") as file:
        file.write('{"kind": "st')
    EventLog(path).emit(Preempt(step=2, signal="SIGTERM"))
    assert [e.values()["step"] for e in read(path)] == [1, 2]


def test_a_full_disk_costs_no_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl")
    real, full = log._file, True

    class Disk:
        def write(self, data: bytes) -> int:
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data)

    log._file = Disk()  # type: ignore[assignment]
    log.emit(Preempt(step=1, signal="SIGTERM"))
    assert read(tmp_path / "e.jsonl") == []
    full = False
    log.emit(Preempt(step=2, signal="SIGTERM"))
    assert [e.values()["step"] for e in read(tmp_path / "e.jsonl")] == [1, 2]


def test_a_step_done_again_counts_once() -> None:
    assert series(
        [Event.from_values(step(*each)) for each in ((1, 5.0), (2, 4.0), (2, 3.0))], "loss"
    ) == {
        1: 5.0,
        2: 3.0,
    }


def test_tail_hands_over_what_is_new(tmp_path: Path) -> None:
    path, got = tmp_path / "e.jsonl", []
    EventLog(path).emit(Preempt(step=0, signal="old"))
    with tail(path, got.append):
        log = EventLog(path)
        for number in range(1, 4):
            log.emit(Preempt(step=number, signal="new"))
    assert [e.values()["step"] for e in got] == [1, 2, 3]


RUN_START = {
    "t": 0.0, "kind": "run_start", "world_size": 2, "steps": 40, "parameters": 10, "strategy": "ddp", "device": "cpu", "run_dir": "runs/x",
    "resumed_from": None, "plan_line": "tiny 10 · sft ddp", "left_out": [],
}  # fmt: skip


def story() -> list[dict[str, Any]]:
    held_out = {"kind": "eval", "t": 0.0, "samples": 8, "seconds": 1.0}
    return [
        RUN_START,
        held_out | {"step": 0, "loss": 5.0, "exact_match": 0.0},
        *[step(s, 5 - s / 10) for s in range(1, 41)],
        {
            "t": 0.0,
            "kind": "save",
            "step": 20,
            "path": "p",
            "seconds": 1.0,
            "bytes": 2**30,
            "blocked_seconds": 0.1,
            "error": None,
        },
        {
            "t": 0.0,
            "kind": "save",
            "step": 30,
            "path": None,
            "seconds": 1.0,
            "bytes": 0,
            "blocked_seconds": 0.1,
            "error": "no space: 5 needed",
        },
        {
            "t": 0.0,
            "kind": "nonfinite",
            "step": 31,
            "policy": "skip",
            "loss": None,
            "grad_norm": "inf",
            "sample_ids": [4, 7],
        },
        held_out | {"step": 40, "loss": 1.0, "exact_match": 0.75},
        {
            "t": 0.0,
            "kind": "export",
            "path": "runs/x/export",
            "seconds": 1.0,
            "max_logit_difference": 0.0,
        },
        {
            "t": 0.0,
            "kind": "run_end",
            "status": "finished",
            "exit_code": 0,
            "step": 40,
            "goodput": {"elapsed": 75.0},
        },
    ]


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=200)) as progress:
        for event in story():
            progress.on_event(Event.from_values(event))
    text = out.getvalue()
    for part in (
        "plan: tiny 10 · sft ddp", "Held out at step 0: loss 5 · exact_match 0 (8 samples)", "step 40/40  loss 1.0000 (mean 1.250)",
        "1,234 tokens/s", "3.00 GiB · 1.00 GiB a rank", "no space: 5 needed — the run goes on", "samples 4, 7", "Finished 40 steps in 1:15",
        "exact_match     0.0000 → 0.7500", "runs/x/export", "drumline train examples/own_data.yaml",
    ):  # fmt: skip
        assert part in text, part
    assert text.count("\nstep ") <= 22, "a long run does not print every step"


@pytest.mark.parametrize("width", [60, 140])
def test_live_display_on_a_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    with Progress(console) as progress:
        for event in story()[:-1]:
            progress.on_event(Event.from_values(event))
        console.print(progress.render())
    text = out.getvalue()
    assert (
        "step 40/40" in text and "tokens/s" in text and "exact_match 0.75" in text and "█" in text
    )


def test_bars_speak_once_a_phase_without_a_terminal() -> None:
    out = io.StringIO()
    with bars(Console(file=out)) as on_progress:
        for done in range(5):
            on_progress("tokenise", done, 5)
        on_progress("pack", 0, None)
    assert out.getvalue().splitlines() == ["Tokenising 5 rows", "Packing the rows"]


def test_words_for_numbers() -> None:
    assert (duration(75), duration(3675), size(2**30 * 1.5), size(2**20)) == (
        "1:15",
        "1:01:15",
        "1.50 GiB",
        "1.0 MiB",
    )
    assert spark([3.0, 2.0, 1.0]) == "█▄▁" and spark([1.0, 1.0]) == "▁▁"
