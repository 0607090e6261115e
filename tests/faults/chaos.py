"""As many random kills as asked for, then the truth: losses, samples and weights as in a run that
was left alone.

    python -m tests.faults.chaos --kills 20 --seed 0
    python -m tests.faults.chaos --hosts 3 --kills 50 --seed 0 --out REPORT.json

On one machine SIGKILL hits a rank, all ranks at once, a rank in the middle of a save, or the
launcher (the run is then resumed by hand). Several hosts (plugins/hosts/tests/chaos.py) also lose
an agent, their network or their power. After each kill all checkpoints that there are must be
whole, and nothing may be left of what had to end. One line a kill; exit 1 if anything differs; then
what the seconds were spent on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from drumline.checkpoint.load import check
from drumline.errors import CheckpointError
from tests.faults.live import gone, kill, ranks_of
from tests.faults.test_train_faults import near, same
from tests.harness import ROOT, run_drumline, same_weights, start_interpreter, write_config
from tests.tiny import tiny_model_dir

WALK = (3, 9)  # steps between what follows from a kill and the next one
NOTICE_SECONDS = 60.0
BACK_SECONDS = 240.0
ORPHAN_SECONDS = 30.0
END_SECONDS = 600.0
# For how long a link is cut: less than a host may be silent, or longer.
CUT_SECONDS = 2.0
LOST_SECONDS = 12.0


class Log:
    """The events of a run, read as they come; a line that a kill tore is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        for line in self._read_new_lines():
            try:
                self.events.append(json.loads(line))
            except ValueError:
                continue
        return self.events

    def _read_new_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []

        with self.path.open("rb") as file:
            file.seek(self._offset)
            *whole, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        return whole

    def of(self, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
        """Return the events of a kind, from a time on."""
        found = []
        for event in self.read():
            if event["kind"] == kind and event["t"] >= after:
                found.append(event)
        return found


@dataclass(frozen=True)
class World:
    """Where a run goes on, and what of it is hurt."""

    launch: Mapping[str, Any]
    ranks: int
    targets: Sequence[str]
    # Begins `drumline` with these arguments.
    start: Callable[..., subprocess.Popen[str]]
    # The process id of what that has become.
    launcher: Callable[[subprocess.Popen[str]], int] = lambda process: process.pid
    # Those that can be cut off or crash.
    hosts: Mapping[str, Any] = field(default_factory=dict)
    # The run goes on without one of them, the launcher's too.
    elastic: bool = False
    # The seconds that a step takes at least while the run is hurt.
    pace: float = 0.05
    # For each kill, more than the run takes until the next.
    steps: int = 16


def configure(folder: Path, world: World, kills: int, layers: int = 2, **sections: Any) -> Path:
    """A run that has not ended before the kills have."""
    # Random numbers belong to a data rank; on hosts that come and go their number changes.
    model = {"config": {"attention_dropout": 0.1}}
    optimizer = {"lr": 1e-3}
    if world.elastic:
        model = {}
        optimizer = {"lr": 1e-4}

    own = {
        "model": model,
        "data": {"packing": False, "eval": []},
        "launch": dict(world.launch),
        "optimizer": optimizer,
        "run": {
            "steps": world.steps * (kills + 1),
            "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"],
        },
        "checkpoint": {"every": 5, "keep": 2},
    }

    path = tiny_model_dir(folder / "model", layers=layers)
    return write_config(folder, path, rows=90, **{**own, **sections})


class Chaos:
    """One run that is hurt. `kills`: what was done to it, and what followed."""

    def __init__(self, world: World, config: Path, seed: int) -> None:
        self.world = world
        self.config = config
        self.run = config.parent / "hurt"
        self.draw = random.Random(seed)

        self.log = Log(self.run / "events.jsonl")
        self.kills: list[dict[str, Any]] = []
        self.slow = config.with_name("slow")  # tests/hosts/pace.py
        self.slow.write_text(str(world.pace))

        self.began = 0.0  # the last fault
        self.since = time.time()  # the last fault, or what followed of it
        self.launches = [self.since]
        self.ended = 0.0

        self.taken = False  # by another host, whose launcher is no child of this process
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[str]:
        """Start the command, with these arguments besides its own."""
        return self.world.start("train", self.config, f"run.dir={self.run}", *more)

    def hurt(self, kills: int) -> None:
        """Kill so many times, and let the run come to its end."""
        try:
            for number in range(1, kills + 1):
                self._walk(self.draw.randint(*WALK))
                what = self._hurt_once()
                print(f"kill {number}/{kills}: {what}", flush=True)

            self.slow.unlink()
            self._await(self._has_ended, "the end", END_SECONDS, ends=True)
            if not self.taken:
                code = self.process.wait(NOTICE_SECONDS)
                assert code == 0, self._said()
            assert self.log.of("run_end")[-1]["status"] == "finished", self._said()
        finally:
            if self.process.poll() is None:
                kill(self._launcher_pid())

        self.ended = time.time()
        assert gone(self.run, ORPHAN_SECONDS), "processes outlived the run"
        for event in self.log.of("restore"):
            assert not event["skipped"], "a torn checkpoint was met"
        self._require_whole()

    def _has_ended(self) -> bool:
        """A host that joins stops the ranks once more, which is no end."""
        ends = self.log.of("run_end", self.since)
        return any(event["status"] != "preempted" for event in ends)

    def _hurt_once(self) -> str:
        """Draw a fault, cause it and wait for what follows; return what was done."""
        target = self.draw.choice(self.world.targets)
        step = self.log.of("step")[-1]["step"]
        time.sleep(self.draw.random() * 0.05)

        faults = {
            "rank": self._rank,
            "all ranks": self._all_ranks,
            "save": self._save,
            "agent": self._agent,
            "launcher": self._launcher,
            "link": self._link,
            "host": self._host,
        }
        what = faults[target]()

        self.since = time.time()
        self.kills.append({"target": target, "what": what, "step": step, "began": self.began})
        return f"{what} at step {step}"

    # Faults. Each returns what was done.

    def _rank(self) -> str:
        rank, pid = self._one()
        self._kill(pid)
        self._noticed()
        return f"rank {rank}"

    def _all_ranks(self) -> str:
        self._kill(*self._ranks())
        self._noticed()
        return "all ranks"

    def _save(self) -> str:
        """A rank, as soon as a folder of a checkpoint is there that has not its name yet."""
        rank, pid = self._one()
        before = self._half_checkpoints()
        self._await(lambda: self._half_checkpoints() - before, "save", period=0.0005)

        time.sleep(self.draw.random() * 0.01)
        self._kill(pid)
        self._noticed()
        return f"rank {rank} in a save"

    def _agent(self) -> str:
        rank, pid = self._one()
        agent = psutil.Process(pid).ppid()
        ranks = [each for each in self._ranks() if psutil.Process(each).ppid() == agent]

        self._kill(agent)
        self._ended(ranks, "ranks outlived their agent")
        self._noticed()
        return f"agent of rank {rank}"

    def _launcher(self) -> str:
        followers = self._ranks()
        agents = [psutil.Process(pid).ppid() for pid in followers]
        if not self.world.elastic:
            followers += agents

        self._kill(self._launcher_pid())
        self._follow_launcher(followers)
        return "launcher"

    def _link(self) -> str:
        name = self._one_host()
        seconds = self.draw.choice([CUT_SECONDS, LOST_SECONDS])
        is_lost = seconds == LOST_SECONDS
        host = self.world.hosts[name]

        with self._without(name, is_lost, host.link):
            left = self.began + seconds - time.time()
            time.sleep(max(0.0, left))

        return f"link of {name} for {seconds:g} s"

    def _host(self) -> str:
        name = self._one_host()
        host = self.world.hosts[name]
        if host.has(self._launcher_pid()):
            self._crash_with_launcher(host)
            return f"host {name}, with the launcher"

        def switch(on: bool) -> None:
            if on:
                host.boot()
            else:
                host.die()

        with self._without(name, True, switch):
            time.sleep(self.draw.random() * 5.0)
        return f"host {name}"

    def _crash_with_launcher(self, host: Any) -> None:
        """Let the launcher's host lose its power."""
        ranks = self._ranks()
        self.began = time.time()
        host.die()

        if self.world.elastic:
            self._follow_launcher(ranks)
            self._await_step_without(time.time())
            host.boot()
        else:
            self._ended(ranks, "ranks outlived their launcher")
            host.boot()
            self._follow_launcher(ranks)

    def _follow_launcher(self, pids: Sequence[int]) -> None:
        """The launcher has died, and with it shall `pids`. Another host takes over, or the user
        starts the command again."""
        self._ended(pids, "ranks or agents outlived their launcher")
        if not self.taken:
            self.process.wait(NOTICE_SECONDS)
        self._require_whole()
        if self.world.elastic:
            self.taken = True
            self._await(lambda: self.log.of("takeover", self.began), "a takeover")
            return

        assert gone(self.run, ORPHAN_SECONDS), "processes outlived their launcher"
        self.launches.append(time.time())
        self.process = self._start("--resume")

    def _launcher_pid(self) -> int:
        """The process id of the launcher, on whichever host it is."""
        return self.world.launcher(self.process)

    def _ranks(self) -> list[int]:
        """The process ids of all ranks."""
        return list(ranks_of(self.run).values())

    def _one(self) -> tuple[int, int]:
        """Some rank and its process id."""
        ranks = sorted(ranks_of(self.run).items())
        return self.draw.choice(ranks)

    def _one_host(self) -> str:
        """The name of some host."""
        return self.draw.choice(list(self.world.hosts))

    def _half_checkpoints(self) -> set[Path]:
        """The folders of checkpoints that are being written, or that a kill has left."""
        return set((self.run / "checkpoints").glob(".tmp-*"))

    def _kill(self, *pids: int) -> None:
        self.began = time.time()
        for pid in pids:
            kill(pid)

    # What follows.

    @contextmanager
    def _without(self, name: str, is_lost: bool, switch: Callable[[bool], None]) -> Iterator[None]:
        """Within, a host is switched off. If it is lost that is noticed, its ranks end, and a run
        that can go on without it does."""
        host = self.world.hosts[name]
        ranks = [pid for pid in self._ranks() if host.has(pid)]

        self.began = time.time()
        switch(False)
        try:
            if is_lost:
                noticed = self._noticed()
                self._ended(ranks, f"ranks of {name} outlived its loss")
                if self.world.elastic:
                    self._await_step_without(noticed)
            yield
        finally:
            switch(True)

    def _await_step_without(self, after: float) -> None:
        """Wait for a step that a run without one of its hosts does later than `after`."""
        what = "a step of the hosts that are left"
        self._await(lambda: self.log.of("step", after), what, BACK_SECONDS)

    def _noticed(self) -> float:
        """When the launcher has reported the fault, or, if it was below an agent that was killed,
        another one has taken over."""

        def seen() -> list[dict[str, Any]]:
            faults = self.log.of("fault", self.began)
            return faults + self.log.of("takeover", self.began)

        self._await(seen, "a fault")
        self._require_whole()

        first = seen()[0]
        return float(first["t"])

    def _walk(self, steps: int) -> None:
        """Until the run is on all of its hosts and has logged so many steps there. Now and then one
        that lacks a host is hurt, too. It has come past the last fault: two kills of one rank after
        the same step are a crash loop, which ends a run."""
        needs_all = not self.world.elastic or self.draw.random() < 0.7
        before = -1
        faults = self.log.of("fault")
        if faults:
            before = faults[-1]["step"]

        def has_walked() -> bool:
            starts = self.log.of("run_start", self.launches[-1])
            if not starts:
                return False

            start = starts[-1]
            if needs_all and start["world_size"] != self.world.ranks:
                return False

            since = max(start["t"], self.since)
            done = self.log.of("step", since)
            return len(done) >= steps and done[-1]["step"] > before

        self._await(has_walked, f"{steps} steps", BACK_SECONDS)

    def _await(
        self,
        came: Callable[[], object],
        what: str,
        timeout: float = NOTICE_SECONDS,
        period: float = 0.02,
        ends: bool = False,
    ) -> None:
        """Wait until `came()` is true. Raises AssertionError when the time is up, or when the
        command ends unless it may (`ends`)."""
        until = time.monotonic() + timeout
        may_end = ends or self.taken

        while not came():
            if not may_end and self.process.poll() is not None:
                code = self.process.returncode
                raise AssertionError(f"ended with {code} before: {what}\n{self._said()}")
            is_in_time = time.monotonic() < until
            assert is_in_time, f"not within {timeout:g} s: {what}\n{self._said()}"
            time.sleep(period)

    def _ended(self, pids: Iterable[int], otherwise: str) -> None:
        """Wait until these processes are gone, also those that nobody has asked for their end."""
        until = time.monotonic() + ORPHAN_SECONDS
        while any(map(alive, pids)):
            assert time.monotonic() < until, otherwise
            time.sleep(0.05)

    def _require_whole(self) -> None:
        """Every checkpoint that has its name is whole; one may be pruned meanwhile."""
        for path in (self.run / "checkpoints").glob("step-*"):
            try:
                check(path, verify=True)
            except CheckpointError as error:
                assert not path.exists(), f"torn: {error}"

    def _said(self) -> str:
        """What the command has said, and the ends of the newest logs."""
        texts = []
        said = self.config.with_name("said")
        if said.exists():
            texts.append(said.read_text())
        elif self.process.poll() is not None:
            texts += self.process.communicate()

        logs = (self.run / "logs").glob("attempt-*/rank-*.log")
        for path in sorted(logs, key=os.path.getmtime)[-3:]:
            end = path.read_text(errors="replace")[-2000:]
            texts.append(f"{path}:\n{end}")
        return "\n".join(texts)


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def one_machine(start: Callable[..., subprocess.Popen[str]] = start_interpreter) -> World:
    """Two ranks here; the user starts the command again if its launcher dies."""
    return World(
        launch={"nproc": 2},
        ranks=2,
        targets=("rank", "all ranks", "save", "launcher"),
        start=start,
    )


def chaos(folder: Path, world: World, kills: int, seed: int, **sections: Any) -> Chaos:
    """Run twice, first on this machine and left alone, then in `world` and hurt. Raises
    AssertionError on any difference."""
    reference = folder / "reference"
    alone = replace(world, launch={"nproc": world.ranks})
    config = configure(folder, alone, kills, **sections)
    run_drumline("train", config, f"run.dir={reference}", timeout=600)

    config = configure(folder, world, kills, **sections)
    hurt = Chaos(world, config, seed)
    hurt.hurt(kills)
    if world.elastic:
        # Sums over another number of ranks round otherwise.
        near(hurt.run, reference)
        same_weights(hurt.run, reference, 1e-5)
    else:
        same(hurt.run, reference)
    return hurt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report of several hosts as JSON")
    parser.add_argument(
        "--runs", default="", help="of several hosts only these again, such as ddp-fixed,pp-elastic"
    )
    options = parser.parse_args()
    kills = options.kills
    seed = options.seed

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.hosts > 1:
            from plugins.hosts.tests.chaos import campaign

            only = list(filter(None, options.runs.split(",")))
            campaign(folder, options.hosts, kills, seed, options.out, only)
            return
        hurt = chaos(folder, one_machine(), kills, seed)
        steps = [event["step"] for event in hurt.log.of("step")]
    again = len(steps) - max(steps)
    equal = "losses, samples and weights equal bit for bit"
    print(f"{kills} kills: {equal}; {again} steps done again")


if __name__ == "__main__":
    main()
