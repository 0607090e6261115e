"""Who is blamed for a hang, from what the launcher sees of the ranks; and the board that it sees it on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.launch.hangs import Seen, find_culprits, main_lines
from drumline.launch.watch import Watch, state_of
from drumline.system import heartbeat
from drumline.system.heartbeat import LIMITS, Board, Heart
from drumline.telemetry.flight import blame, describe, first_difference
from tests.harness import ENV, ROOT


def entry(
    number: int,
    op: str = "all_reduce",
    size: int = 3,
    dtype: str = "Float",
    line: str = "a.py:1 in f",
    waits: bool = False,
) -> Any:
    sizes, dtypes = [[size]], [dtype]
    return {
        "id": number,
        "group": "0 default_pg",
        "number": number,
        "op": op,
        "sizes": sizes,
        "dtypes": dtypes,
        "line": line,
        "waits": waits,
    }


def seen(rank: int, *collectives: Any, **more: Any) -> Seen:
    return Seen(rank, "backward", 7, 6.0, 5.0, collectives=list(collectives), **more)


def test_who_has_not_come_is_to_blame_and_who_waits_is_named() -> None:
    hang = find_culprits(
        [
            seen(0, entry(1), entry(2, waits=True)),
            seen(1, entry(1)),
            seen(2, entry(1), entry(2, waits=True)),
        ],
        has_other_hosts=False,
    )
    assert (hang.culprit, hang.ranks) == (1, (1,))
    assert (
        hang.message
        == "hangs in backward at step 8, for 6 s (limit 5 s): it has not come to the all_reduce that the others wait in"
    )
    waits = "waits in all_reduce Float [3] (number 2 of group 0 default_pg) at a.py:1 in f"
    assert hang.waiting_lines() == [f"rank 0 {waits}", f"rank 2 {waits}"]


@pytest.mark.parametrize(
    ("culprit", "why"),
    [
        ({"state": "T"}, "it is suspended (SIGSTOP)"),
        (
            {"state": "D", "sleeps_in": "percpu_rwsem_wait"},
            "it sleeps in the kernel (percpu_rwsem_wait), state D: it waits for a disk",
        ),
        ({"has_started": False}, "it has not come to its first line"),
    ],
)
def test_what_the_kernel_says_of_a_rank_comes_first(culprit: dict[str, Any], why: str) -> None:
    hang = find_culprits(
        [seen(0, entry(2, waits=True)), Seen(1, "data", 7, 6.0, 5.0, **culprit)],
        has_other_hosts=False,
    )
    assert hang.culprit == 1 and hang.why.startswith(why)


def test_a_rank_that_does_not_answer_holds_pythons_lock() -> None:
    hang = find_culprits(
        [seen(0, entry(2, waits=True)), Seen(1, "forward", 7, 6.0, 5.0)], has_other_hosts=False
    )
    assert hang.culprit == 1 and "does not answer" in hang.why


@pytest.mark.parametrize("other", [entry(2, "broadcast"), entry(2, size=4), entry(2, dtype="Int")])
def test_another_operation_shape_or_type_is_found_and_the_minority_blamed(other: Any) -> None:
    alike = [entry(1), entry(2)]
    ranks = {0: alike, 1: [entry(1), other], 2: alike}
    found = first_difference(ranks)
    assert found and {rank: each["number"] for rank, each in found.items()} == {0: 2, 1: 2, 2: 2}
    blamed, what = blame(found, ranks)
    assert blamed == [1] and what.startswith(
        "the ranks begin different collectives: rank 0: all_reduce Float [3]"
    )
    assert first_difference({0: alike, 1: alike}) is None


def test_one_that_was_left_out_is_found_by_its_lines() -> None:
    lines = [
        entry(1, line="a.py:1 in f"),
        entry(2, line="a.py:2 in f"),
        entry(3, line="a.py:3 in f"),
    ]
    skips = [entry(1, line="a.py:1 in f"), entry(2, line="a.py:3 in f")]
    assert first_difference({0: lines, 1: skips}) is None
    hang = find_culprits([seen(0, *lines), seen(1, *skips)], has_other_hosts=False)
    assert hang.culprit == 1 and hang.why.startswith("rank 1 has left one out; ")
    assert describe(lines[1]) in hang.why and describe(skips[1]) in hang.why


def test_uneven_collectives_may_differ_in_size() -> None:
    assert (
        first_difference({0: [entry(1, "all_to_all", 3)], 1: [entry(1, "all_to_all", 5)]}) is None
    )
    assert (
        first_difference(
            {0: [entry(1, "scatter")], 1: [{**entry(1, "scatter"), "sizes": [], "dtypes": []}]}
        )
        is None
    )
    assert (
        first_difference({0: [entry(1, "all_gather", 3)], 1: [entry(1, "all_gather", 5)]})
        is not None
    )


def test_where_all_of_a_host_wait_another_one_is_to_blame() -> None:
    waiting = [seen(0, entry(2, waits=True)), seen(1, entry(2, waits=True))]
    hang = find_culprits(waiting, has_other_hosts=True)
    assert hang.culprit is None and hang.message.startswith(
        "Timed out waiting in backward for ranks of other hosts"
    )
    assert find_culprits(waiting, has_other_hosts=False).culprit == 0


def test_without_an_answer_another_host_may_be_to_blame() -> None:
    silent = Seen(0, "backward", 7, 6.0, 5.0)
    assert (
        find_culprits([silent], has_other_hosts=False).sure
        and not find_culprits([silent], has_other_hosts=True).sure
    )
    assert (
        find_culprits([seen(0, entry(1))], has_other_hosts=True).sure
        and find_culprits([Seen(0, "data", 7, 6.0, 5.0, state="T")], has_other_hosts=True).sure
    )


def test_a_rank_that_waits_is_not_to_blame_where_what_it_waits_for_is_not_known() -> None:
    """Without a recorder there are no entries."""
    assert not find_culprits([seen(0)], has_other_hosts=True).sure


def test_the_stack_shows_the_main_thread_and_those_at_work() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/x/system/heartbeat.py", line 1 in _answer\n\n'
        'Thread 0x2 (most recent call first):\n  File "mine.py", line 5 in endless\n\n'
        'Current thread 0x3 (most recent call first):\n  File "base.py", line 9 in result\n  File "loop.py", line 2 in run\n'
    )
    assert main_lines(stacks) == [
        'File "base.py", line 9 in result',
        'File "loop.py", line 2 in run',
        "",
        'File "mine.py", line 5 in endless',
        "",
    ]


# --------------------------------------------------------------------------------------------------------------- the board


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch(2)
    yield made
    made.close()


def hearts(watch: Watch, **limits: float) -> list[Heart]:
    """Two ranks in this process."""
    made = []
    for place in range(2):
        folder, _, number = watch.variable(place)[heartbeat.VARIABLE].rpartition(":")
        made.append(
            Heart(
                Board(Path(folder), 0),
                int(number),
                {**dict.fromkeys(LIMITS, 100.0), "hang": 5.0, **limits},
            )
        )
    return made


def late(watch: Watch, seconds: float) -> Any:
    """What the watcher finds when it has looked in vain for so long."""
    running = {0: os.getpid(), 1: os.getpid()}
    assert watch.look(running) is None
    for pulse in watch.pulses.values():
        pulse.waited += seconds
    return watch.look(running)


def test_limits_are_learned_and_first_steps_are_not(watch: Watch) -> None:
    one, two = hearts(watch)
    assert late(watch, 0.0) is None
    for step in range(4):
        for heart in (one, two):
            heart.step(step, 2 * step, untimed=False)
            heart.beat("forward")
            heart.floats[heart.at + heartbeat.SINCE] -= (1000.0, 1000.0, 3.0, 0.0)[step]
            heart.beat("backward")
    one.beat("forward")
    two.beat("forward")
    assert watch._limit(0) == pytest.approx(9.0, abs=0.1) == watch._limit(1), (
        "three times the longest, on all ranks"
    )
    one.beat("optimizer")
    one.beat("data")
    assert watch._limit(0) == 100.0, "that of start-up, before one was seen"
    one.beat("optimizer")
    assert watch._limit(0) == 5.0
    one.note_compilation(True)
    assert watch._limit(0) == 100.0
    one.note_compilation(False)
    one.beat("save")
    assert watch._limit(0) == 100.0


@pytest.mark.parametrize("phase", heartbeat.LEARNING)
def test_what_comes_between_steps_has_the_limit_of_health_until_it_was_over_once(
    watch: Watch, phase: str
) -> None:
    one, two = hearts(watch)
    assert late(watch, 0.0) is None
    for step in range(3):
        for heart in (one, two):
            heart.step(step, 2 * step, untimed=False)

    def part(seconds: float, granted: float = 0.0) -> None:
        one.floats[one.at + heartbeat.SINCE] -= seconds
        one.alive(granted)

    one.beat(phase)
    part(1.0)
    part(9.0)
    assert watch._limit(0) == 100.0, "its first parts say little of the others"
    one.note_compilation(True)
    one.note_compilation(False)
    assert watch._limit(0) == 100.0, "a compilation does not end it"
    one.beat("report")
    for heart in (one, two):
        heart.beat(phase)
        assert watch._limit(heart.place) == pytest.approx(27.0, abs=0.1), (
            "three times the longest, on all ranks"
        )
    part(0.1, granted=60.0)
    assert watch._limit(0) == 60.0
    part(50.0, granted=1000.0)
    assert watch._limit(0) == 100.0, "at most what health says"
    part(50.0)
    assert watch._limit(0) == pytest.approx(27.0, abs=0.1), (
        "of parts with a limit of their own nothing is learned"
    )
    one.beat("report")
    assert watch._limit(0) == 100.0


def test_seconds_in_a_collective_belong_to_no_other_phase(watch: Watch) -> None:
    one, _ = hearts(watch)
    one.beat("backward")
    one.floats[one.at + heartbeat.SINCE] -= 3.0
    one.began -= 3.0
    one.note_collective(1.0)
    one.beat("optimizer")
    assert one.seconds["collective"] == 1.0
    assert one.seconds["backward"] == pytest.approx(2.0, abs=0.5)


def after_steps(watch: Watch, *phases: str) -> heartbeat.Heart:
    """The heart of a rank that has gone through the phases in four steps."""
    one, _ = hearts(watch)
    assert late(watch, 0.0) is None
    for step in range(4):
        one.step(step, 2 * step, untimed=False)
        for phase in phases:
            one.beat(phase)
    return one


def test_a_wait_for_rows_has_a_limit_of_its_own_where_a_rank_does_nothing_else(
    watch: Watch,
) -> None:
    one = after_steps(watch, "data", "forward")
    before = one.ints[one.at + heartbeat.COUNT]
    one.note_wait(True, 60.0)
    assert watch._limit(0) == 5.0 and one.ints[one.at + heartbeat.COUNT] == before, (
        "a thread that fetches batches is not the rank"
    )
    one.beat("data")
    one.note_wait(False, 60.0)
    assert watch._limit(0) == 60.0 and one.ints[one.at + heartbeat.COUNT] == before + 1, (
        "nothing came"
    )
    one.note_wait(True, float("inf"))
    assert watch._limit(0) == one.floats[one.at + heartbeat.FIRST_LIMIT + LIMITS.index("startup")]
    assert one.ints[one.at + heartbeat.COUNT] == before + 2
    one.floats[one.at + heartbeat.SINCE] -= 50.0
    one.beat("forward")
    one.beat("data")
    assert watch._limit(0) == 5.0, "nothing is learned from it"


def test_short_parts_of_an_evaluation_give_a_limit_that_is_not_short(watch: Watch) -> None:
    one = after_steps(watch, "eval", "report")
    one.beat("eval")
    assert watch._limit(0) == heartbeat.FLOOR * 5.0


def test_a_rank_that_waits_does_not_hang_while_another_is_at_work(watch: Watch) -> None:
    one, two = hearts(watch, save=1000.0)
    one.beat("startup")
    two.beat("save")
    assert late(watch, 500.0) is None, "one waits for the other's checkpoint"
    two.step(1, 0, untimed=False)
    assert watch.look({0: os.getpid(), 1: os.getpid()}) is not None, (
        "but it does not wait for one that is ahead of it"
    )


def test_a_suspended_rank_hangs_whatever_it_was_at(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a phase that may take long, such as the report of a step, and while the other is in one."""
    one, two = hearts(watch, save=1000.0)
    one.beat("save")
    two.beat("report")
    assert late(watch, 500.0) is None
    monkeypatch.setattr("drumline.launch.watch._state", lambda folder: "T")
    hang = watch.look({0: os.getpid(), 1: os.getpid()})
    assert hang is not None and hang.why == "it is suspended (SIGSTOP)"


@pytest.mark.slow
@pytest.mark.parametrize("gone", [False, "DistNetworkError: the store has gone"])
def test_a_host_that_waits_does_not_hang_while_another_one_is_at_work(
    gone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.launch.watch.OTHER_HOST_SECONDS", 0.2)
    watch, mine = Watch(1, 0, 2), {0: os.getpid()}
    try:
        folder, _, _ = watch.variable(0)[heartbeat.VARIABLE].rpartition(":")
        heart = Heart(Board(Path(folder), 0), 0, {**dict.fromkeys(LIMITS, 1.0)})
        answers = {
            "collectives": [entry(number, waits=number == 2) for number in range(3)],
            "elsewhere": True,
        }
        heart.answers = {name: lambda name=name: answers[name] for name in answers}  # type: ignore[misc]
        assert watch.look(mine) is None
        watch.pulses[0].waited += 60.0
        for _ in range(3):
            assert watch.look(mine) is None
            watch.look_again = 0.0
            answers["collectives"] = [entry(2, waits=True)]  # a shorter answer than before
        answers["elsewhere"] = gone
        time.sleep(0.3)
        hang = watch.look(mine)
        assert hang is not None and hang.culprit is None, "nobody is at work any more"
    finally:
        watch.close()


def test_a_rank_that_has_done_its_part_is_not_waited_for(watch: Watch) -> None:
    one, two = hearts(watch)
    two.beat("done")
    hang = late(watch, 500.0)
    assert hang is not None and hang.subject.rank == 0
    one.beat("done")
    assert late(watch, 500.0) is None


def test_ranks_go_on_while_they_are_looked_at(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = hearts(watch)
    read = watch._int

    def step_and_read(place: int, word: int) -> int:
        for rank in ranks:
            rank.ints[rank.at + heartbeat.STEP] += 1
        return read(place, word)

    monkeypatch.setattr(watch, "_int", step_and_read)
    assert late(watch, 0.0) is None


def test_a_rank_that_answers_is_sent_no_signal(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C its frames would be read while another thread of it changes them: one in a thousand such reads is a crash."""
    signalled: list[int] = []
    monkeypatch.setattr("drumline.launch.watch._request_stacks_by_signal", signalled.append)
    hearts(watch)
    hang = late(watch, 500.0)
    assert hang is not None and not signalled
    assert any("in late" in line for line in main_lines(hang.subject.stacks)), hang.subject.stacks


def test_a_sign_of_life_is_enough(watch: Watch) -> None:
    one, two = hearts(watch)
    assert late(watch, 90.0) is None
    one.alive()
    two.alive()
    assert late(watch, 90.0) is None


def test_limits_are_learned_from_the_longest_part(watch: Watch) -> None:
    one, _ = hearts(watch)
    assert late(watch, 0.0) is None
    for step in range(3):
        one.step(step, 2 * step, untimed=False)
        one.beat("forward")
        one.floats[one.at + heartbeat.SINCE] -= 4.0
        one.alive()
        one.beat("backward")
    one.beat("forward")
    assert watch._limit(0) == pytest.approx(12.0, abs=0.1), (
        "three times the part before the sign of life"
    )


def test_time_in_which_any_thread_of_a_rank_had_no_core_does_not_count(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    hearts(watch)
    waited = {1: 0.0, 2: 7.0}
    monkeypatch.setattr("drumline.launch.watch.core_waits", lambda pid: {**waited})
    assert late(watch, 50.0) is None
    waited[2] += 60.0  # a thread of OpenMP; the main thread waits for it
    assert late(watch, 100.0) is None
    assert late(watch, 100.0) is not None


def test_time_in_which_the_watcher_did_not_run_does_not_count(watch: Watch) -> None:
    hearts(watch)
    assert late(watch, 0.0) is None
    watch.looked -= 10_000.0  # a laptop that slept, a machine that swaps
    assert watch.look({0: os.getpid(), 1: os.getpid()}) is None


def test_nothing_is_left_in_memory(watch: Watch) -> None:
    assert watch.board and watch.board.folder.is_dir()
    hearts(watch)
    assert late(watch, 0.0) is None
    assert not watch.board.folder.exists(), "all ranks have it open"


def test_states_of_processes() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        env=ENV,
        cwd=ROOT,
    )
    try:
        assert child.stdout and child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while state_of(child.pid)[0] != "T" and time.monotonic() < until:
            time.sleep(0.01)
        assert state_of(child.pid) == ("T", "")
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) == ("", "")


def test_a_run_without_a_watcher_beats_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    assert heartbeat.register({}) is None and heartbeat.position() == 0
    heartbeat.beat("data")
    heartbeat.alive()
    heartbeat.step(1, 2)
    heartbeat.note_compilation(True)
    heartbeat.register_answer("samples", list)
