"""The display in the cases that a smooth run does not have: faults, restarts, NaN, odd terminals."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumline.report.progress import Progress, trend
from drumline.report.waiting import PhaseDurations
from drumline.system.output import Verbosity
from drumline.telemetry.events import Event

FIGURES: dict[str, Any] = {
    "t": 0.0, "lr": 1e-4, "grad_norm": 1.5, "tokens": 100, "samples": 4, "tokens_per_s": 1234.5, "samples_per_s": 2.0, "mfu": 0.4321,
    "seconds": 2.0, "data_s": 0.01, "compute_s": 0.4, "comm_s": 0.09, "memory_bytes": [2**30] * 8, "epoch": 0.5,
}  # fmt: skip
START: dict[str, Any] = {
    "t": time.time(),
    "kind": "run_start",
    "world_size": 2,
    "steps": 40,
    "parameters": None,
    "strategy": "ddp",
    "device": "cpu",
    "resumed_from": None,
    "run_dir": "runs/my run",
    "plan_line": "tiny · ddp on 2 × cpu · fp32",
    "left_out": [],
}
FAULT: dict[str, Any] = {
    "kind": "fault", "attempt": 0, "rank": 1, "signal": "SIGKILL", "exitcode": -9, "error": "killed by SIGKILL", "log": "x", "step": 3,
    "action": "restart",
}  # fmt: skip
RESTORE: dict[str, Any] = {
    "kind": "restore",
    "step": 2,
    "path": "runs/x/step-2",
    "seconds": 1.0,
    "skipped": [{"path": "p", "reason": "sha256 differs"}],
}
SAVE: dict[str, Any] = {
    "t": 0.0,
    "kind": "save",
    "step": 2,
    "path": "p",
    "seconds": 1.0,
    "bytes": 5,
    "blocked_seconds": 0.1,
    "error": None,
}
END: dict[str, Any] = {
    "kind": "run_end",
    "status": "finished",
    "exit_code": 0,
    "step": 40,
    "goodput": {"elapsed": 10.0, "productive": 9.0},
}


def step(number: int, loss: float | str | None = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, **FIGURES}


def picture(progress: Progress, width: int = 120) -> str:
    """What the live display shows now, as text."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    progress.console = console
    console.print(progress.render())
    return out.getvalue()


def see(progress: Progress, values: dict[str, Any]) -> None:
    progress.on_event(Event.from_values(values))


def told(*events: dict[str, Any], width: int = 200) -> tuple[Progress, str]:
    """A display without a terminal that has seen these events, and what it printed."""
    out = io.StringIO()
    with Progress(Console(file=out, width=width)) as progress:
        for event in events:
            see(progress, event)
    return progress, out.getvalue()


def test_the_display_says_what_the_run_waits_for() -> None:
    assert "Starting the ranks" in picture(told()[0])
    assert "Loading the model" in picture(told(START)[0])
    assert "Loading the model" not in picture(told(START, END)[0])  # a finished run that resumes
    assert "evaluation, checkpoint and export" in picture(told(START, step(40))[0])
    assert "step 2/40" in picture(told(START, RESTORE)[0])


def test_a_fault_is_shown_until_steps_come_again() -> None:
    now = {**START, "t": time.time()}
    progress, _ = told(now, step(1, 5.0), step(2, 4.0), step(3, 3.0), FAULT)
    assert "rank 1: killed by SIGKILL after step 3 — starting again" in picture(progress)
    for event in ({**START, "t": time.time() + 500}, RESTORE):
        see(progress, event)
    assert " 0:0" in picture(progress), "the clock goes on over restarts"
    assert progress.losses == {1: 5.0, 2: 4.0}, "what is done again counts once"
    see(progress, step(3, 2.5))
    assert "SIGKILL" not in picture(progress)
    see(progress, END)
    assert (
        "Finished 40 steps after 1 restart; since the last one 0:10, 90% of it in training steps."
        in progress.summary()
    )


def test_plan_restore_and_damage_are_told_once() -> None:
    _, text = told(START, step(1), FAULT, START, RESTORE, SAVE, step(3))
    assert text.count("plan: tiny") == 1
    assert "Passed over a damaged checkpoint: sha256 differs" in text
    assert "Resuming after step 2 from runs/x/step-2" in text
    assert "checkpoint of step 2: 0.0 MiB in 1.0 s" in text


def test_losses_that_are_no_numbers_break_nothing() -> None:
    progress, text = told(START, step(1, None), step(2, "inf"))
    assert "loss NaN" in text and "loss inf" in text
    assert "tokens/s" in picture(progress)
    see(progress, step(3, 2.0))
    assert "2.0000" in picture(progress)
    held_out = {"kind": "eval", "step": 0, "loss": None, "samples": 1, "seconds": 1.0}
    see(progress, held_out)
    see(progress, {**held_out, "step": 40, "loss": 1.0})
    see(progress, END)
    assert "  held-out loss            NaN → 1.0000" in progress.summary()


def test_commands_to_try_can_be_pasted() -> None:
    progress, text = told(START, step(40), END)
    assert "  drumline export 'runs/my run' --to my-model --dtype bf16" in progress.summary()
    assert "Next:" in text and "drumline chat" not in text
    export = {
        "kind": "export",
        "path": "runs/x/export",
        "seconds": 1.0,
        "max_logit_difference": 0.0,
    }
    _, text = told({**START, "writes": True}, step(40), export, END)
    assert "  drumline chat 'runs/my run'" in text and "drumline export" not in text
    assert "Next:" not in told(START, step(40), {**END, "status": "failed"})[1]


@pytest.mark.parametrize("width", [40, 60, 80, 300])
def test_the_display_keeps_to_the_width(width: int) -> None:
    """Two columns are left for the ^C that a terminal echoes, which must not break the line."""
    progress, _ = told(START, *[step(s, 40.0 - s) for s in range(1, 40)], SAVE)
    lines = picture(progress, width).splitlines()
    assert max(map(len, lines)) <= min(width - 2, 100)
    assert "MFU" in picture(progress, width).replace("\n", "") and "step 39/40" in lines[1]


def lines_at(verbosity: Verbosity) -> list[str]:
    """Return what a run of some steps prints into a file."""
    out = io.StringIO()
    console = Console(file=out, width=80)
    opening = ["  model      tiny"]
    with Progress(console, verbosity=verbosity, start_banner=opening) as progress:
        see(progress, START)
        see(progress, step(1, 6.23))
        see(progress, step(20, 12.5))
        see(progress, SAVE)
        see(progress, step(40))
        see(progress, END)
        progress.page = Path("runs/my run/report.html")
    return out.getvalue().splitlines()


def test_a_run_prints_a_block_then_aligned_steps_then_a_block() -> None:
    lines = lines_at(Verbosity.NORMAL)
    assert lines[0] == "  model      tiny"
    assert lines[1] == ""

    first, middle, last = lines[2:5]
    for column in ("loss", "norm", "lr", "tok/s", "left"):
        place = first.index(column)
        assert middle.index(column) == place
        assert last.index(column) == place
    assert max(map(len, lines)) <= 80

    # The checkpoint has no line of its own.
    assert lines[5] == ""
    assert "  page    runs/my run/report.html" in lines
    assert "Next:" in lines


def test_verbose_prints_details() -> None:
    text = "\n".join(lines_at(Verbosity.VERBOSE))
    assert "plan: tiny" in text
    assert "checkpoint of step 2" in text
    text = "\n".join(lines_at(Verbosity.NORMAL))
    assert "plan: tiny" not in text
    assert "checkpoint of step 2" not in text


def test_quiet_prints_the_last_line_alone() -> None:
    lines = lines_at(Verbosity.QUIET)
    assert len(lines) == 1
    assert lines[0].startswith("Finished 40 steps")
    assert lines[0].endswith("It is in runs/my run.")


def test_many_ranks_have_one_line_of_memory() -> None:
    assert "1.00 GiB to 1.00 GiB on 8 ranks" in picture(told(START, step(1))[0])


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = io.StringIO()
    with Progress(
        Console(file=out, force_terminal=True, width=200, _environ={"TERM": "dumb"})
    ) as progress:
        see(progress, START)
        see(progress, step(1))
    assert "step 1/40  loss 1.0000" in out.getvalue()


@pytest.mark.slow
def test_events_come_from_another_thread() -> None:
    progress, _ = told(START, step(1))
    done = threading.Event()

    def feed() -> None:
        for number in range(2, 3000):
            see(progress, step(number, 1.0 + number % 7))
            if number % 100 == 0:
                see(progress, {**RESTORE, "step": number - 10, "skipped": []})
        done.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    deadline = time.monotonic() + 60
    while not done.is_set() and time.monotonic() < deadline:
        progress.render()
    feeder.join()
    assert done.is_set() and progress.step and progress.step.step == 2999


def test_the_arrow_follows_the_mean() -> None:
    assert trend([1.0, 2.0]) == ""
    assert (
        trend([5.0, 5.0, 4.0, 4.0]) == "↓"
        and trend([4.0, 4.0, 5.0, 5.0]) == "↑"
        and trend([1.0, 1.0, 1.001, 1.0]) == "→"
    )


def test_between_steps_it_says_what_ranks_do_and_how_long_that_took_the_last_time(
    tmp_path: Path,
) -> None:
    ranks = [
        {"rank": 0, "phase": "startup", "seconds": 4.0},
        {"rank": 1, "phase": "forward", "seconds": 9.0},
    ]
    start = {**START, "parameters": 3, "strategy": "ddp", "world_size": 2, "device": "cpu"}
    memory = tmp_path / "cache" / "stages.json"
    for left in ("no ETA", "ETA 0:06, as last time"):
        with Progress(
            Console(file=io.StringIO(), width=80),
            phase_durations=PhaseDurations(lambda: ranks, memory),
        ) as progress:
            see(progress, start)
            assert f"loading the model · 0:04 · {left}" in picture(progress, 80)
            see(
                progress,
                {
                    "kind": "started",
                    "seconds": {
                        "imports and plan": 3.0,
                        "processes": 1.0,
                        "model": 9.0,
                        "first step": 2.0,
                    },
                },
            )
    ranks[0]["seconds"] = 11.0
    assert "loading the model · 0:11 · the last one took 0:10" in picture(progress, 80)
    memory.write_text('{"torn": ')
    assert (
        PhaseDurations(lambda: [], memory).line() is None
        and PhaseDurations(lambda: ranks, memory).line()
        == "loading the model · 0:11 · no ETA: it is the first of its kind"
    )
