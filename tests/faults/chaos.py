"""As many random kills as asked for, then the truth: losses, samples and weights as in a run that was left alone.

    python -m tests.faults.chaos --kills 20 --seed 0
    python -m tests.faults.chaos --hosts 3 --kills 50 --seed 0 --out benchmarks/results/chaos_hosts-cpu.json

On one machine SIGKILL hits a rank, all ranks at once, a rank in the middle of a save, or the launcher (the run is then resumed by hand).
Several hosts (plugins/hosts/tests/chaos.py) also lose an agent, their network or their power. After each kill all
checkpoints that there are must be whole, and nothing may be left of what had to end. One line a kill; exit 1 if anything
differs; then what the seconds were spent on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from drumline.checkpoint.load import check
from drumline.errors import CheckpointError
from tests.faults.live import gone, kill, ranks_of
from tests.faults.test_train_faults import figures, same
from tests.harness import ROOT, drumline, same_weights, start_interpreter, write_config
from tests.tiny import tiny_model_dir

WALK = (3, 9)  # steps between what follows from a kill and the next one
NOTICE_SECONDS, BACK_SECONDS, ORPHAN_SECONDS, END_SECONDS = 60.0, 240.0, 30.0, 600.0


class Log:
    """The events of a run, read as they come; a line that a kill tore is passed over."""

    def __init__(self, path: Path) -> None:
        self.path, self.events, self._offset = path, list[dict[str, Any]](), 0

    def read(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                *whole, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
            for line in whole:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    continue
        return self.events

    def of(self, kind: str, after: float = 0.0) -> list[dict[str, Any]]:
        return [event for event in self.read() if event["kind"] == kind and event["t"] >= after]


@dataclass(frozen=True)
class World:
    """Where a run goes on, and what of it is hurt. `start`: begins `drumline` with these arguments; `launcher`: the process id of what it
    has become; `hosts`: those that can be cut off or crash; `elastic`: the run goes on without one, the launcher's too. `pace`: seconds
    that a step takes at least while the run is hurt; `steps`: for each kill, more than the run takes until the next."""

    launch: Mapping[str, Any]
    ranks: int
    targets: Sequence[str]
    start: Callable[..., subprocess.Popen[str]]
    launcher: Callable[[subprocess.Popen[str]], int] = lambda process: process.pid
    hosts: Mapping[str, Any] = field(default_factory=dict)
    elastic: bool = False
    pace: float = 0.05
    steps: int = 16


def configure(folder: Path, world: World, kills: int, layers: int = 2, **sections: Any) -> Path:
    """A run that has not ended before the kills have."""
    # Random numbers belong to a data rank; on hosts that come and go their number changes.
    dropout = {} if world.elastic else {"config": {"attention_dropout": 0.1}}
    return write_config(
        folder,
        tiny_model_dir(folder / "model", layers=layers),
        rows=90,
        **{
            "model": dropout,
            "data": {"packing": False, "eval": []},
            "launch": dict(world.launch),
            "optimizer": {"lr": 1e-4 if world.elastic else 1e-3},
            "run": {
                "steps": world.steps * (kills + 1),
                "callbacks": [f"{ROOT}/tests/hosts/pace.py:Pace"],
            },
            "checkpoint": {"every": 5, "keep": 2},
            **sections,
        },
    )


class Chaos:
    """One run that is hurt. `kills`: what was done to it, and what followed."""

    def __init__(self, world: World, config: Path, seed: int) -> None:
        self.world, self.config, self.run = world, config, config.parent / "hurt"
        self.draw, self.log, self.kills = (
            random.Random(seed),
            Log(self.run / "events.jsonl"),
            list[dict[str, Any]](),
        )
        self.slow = config.with_name("slow")  # tests/hosts/pace.py
        self.slow.write_text(str(world.pace))
        self.since = time.time()  # the last fault, or what followed of it
        self.launches, self.ended = [self.since], 0.0
        self.taken = False  # by another host, whose launcher is no child of this process
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[str]:
        return self.world.start("train", self.config, f"run.dir={self.run}", *more)

    def hurt(self, kills: int) -> None:
        """Kill so many times, and let the run come to its end."""
        try:
            for number in range(1, kills + 1):
                self._walk(self.draw.randint(*WALK))
                self._hurt_once(number, kills)
            self.slow.unlink()
            # A host that joins stops the ranks once more, which is no end.
            self._await(
                lambda: any(e["status"] != "preempted" for e in self.log.of("run_end", self.since)),
                "the end",
                END_SECONDS,
                ends=True,
            )
            assert self.taken or self.process.wait(NOTICE_SECONDS) == 0, self._said()
            assert self.log.of("run_end")[-1]["status"] == "finished", self._said()
        finally:
            if self.process.poll() is None:
                kill(self.world.launcher(self.process))
        self.ended = time.time()
        assert gone(str(self.run), ORPHAN_SECONDS), "processes outlived the run"
        assert not any(event["skipped"] for event in self.log.of("restore")), (
            "a torn checkpoint was met"
        )
        self._require_whole()

    def _hurt_once(self, number: int, kills: int) -> None:
        target, step = self.draw.choice(self.world.targets), self.log.of("step")[-1]["step"]
        time.sleep(self.draw.random() * 0.05)
        what = {
            "rank": self._rank,
            "all ranks": self._all_ranks,
            "save": self._save,
            "agent": self._agent,
            "launcher": self._launcher,
            "link": self._link,
            "host": self._host,
        }[target]()
        self.since = time.time()
        self.kills.append({"target": target, "what": what, "step": step, "began": self.began})
        print(f"kill {number}/{kills}: {what} at step {step}", flush=True)

    # ------------------------------------------------------------------------------------------------------------ faults

    def _rank(self) -> str:
        rank, pid = self._one()
        self._kill(pid)
        self._noticed()
        return f"rank {rank}"

    def _all_ranks(self) -> str:
        self._kill(*ranks_of(self.run).values())
        self._noticed()
        return "all ranks"

    def _save(self) -> str:
        """A rank, as soon as a folder of a checkpoint is there that has not its name yet."""
        folder, (rank, pid) = self.run / "checkpoints", self._one()
        there = set(folder.glob(".tmp-*"))
        self._await(lambda: not set(folder.glob(".tmp-*")) <= there, "save", period=0.0005)
        time.sleep(self.draw.random() * 0.01)
        self._kill(pid)
        self._noticed()
        return f"rank {rank} in a save"

    def _agent(self) -> str:
        rank, pid = self._one()
        agent, ranks = psutil.Process(pid).ppid(), ranks_of(self.run).values()
        ranks = [each for each in ranks if psutil.Process(each).ppid() == agent]
        self._kill(agent)
        self._ended(ranks, "ranks outlived their agent")
        self._noticed()
        return f"agent of rank {rank}"

    def _launcher(self) -> str:
        ranks = ranks_of(self.run).values()
        agents = [psutil.Process(pid).ppid() for pid in ranks]
        self._kill(self.world.launcher(self.process))
        self._follow_launcher([*ranks, *([] if self.world.elastic else agents)])
        return "launcher"

    def _link(self) -> str:
        """For less than a host may be silent, or for longer."""
        name, seconds = self.draw.choice(list(self.world.hosts)), self.draw.choice([2.0, 12.0])
        with self._without(name, seconds > 2.0, self.world.hosts[name].link):
            time.sleep(max(0.0, self.began + seconds - time.time()))
        return f"link of {name} for {seconds:g} s"

    def _host(self) -> str:
        name = self.draw.choice(list(self.world.hosts))
        host = self.world.hosts[name]
        if not host.has(self.world.launcher(self.process)):
            with self._without(name, True, lambda on: host.boot() if on else host.die()):
                time.sleep(self.draw.random() * 5.0)
            return f"host {name}"
        ranks = list(ranks_of(self.run).values())
        self.began = time.time()
        host.die()
        if not self.world.elastic:
            self._ended(ranks, "ranks outlived their launcher")
            host.boot()
        self._follow_launcher(ranks)
        if self.world.elastic:
            taken = time.time()
            self._await(
                lambda: bool(self.log.of("step", taken)),
                "a step of the hosts that are left",
                BACK_SECONDS,
            )
            host.boot()
        return f"host {name}, with the launcher"

    def _follow_launcher(self, pids: Sequence[int]) -> None:
        """The launcher has died, and with it shall `pids`. Another host takes over, or the user starts the command again."""
        self._ended(pids, "ranks or agents outlived their launcher")
        if not self.taken:
            self.process.wait(NOTICE_SECONDS)
        self._require_whole()
        if self.world.elastic:
            self.taken = True
            self._await(lambda: bool(self.log.of("takeover", self.began)), "a takeover")
            return
        assert gone(str(self.run), ORPHAN_SECONDS), "processes outlived their launcher"
        self.launches.append(time.time())
        self.process = self._start("--resume")

    def _one(self) -> tuple[int, int]:
        """Some rank and its process id."""
        return self.draw.choice(sorted(ranks_of(self.run).items()))

    def _kill(self, *pids: int) -> None:
        self.began = time.time()
        for pid in pids:
            kill(pid)

    # ----------------------------------------------------------------------------------------------------- what follows

    @contextmanager
    def _without(self, name: str, lost: bool, switch: Callable[[bool], None]) -> Iterator[None]:
        """Within, a host is switched off. If it is `lost` that is noticed, its ranks end, and a run that can go on without it does."""
        ranks = [pid for pid in ranks_of(self.run).values() if self.world.hosts[name].has(pid)]
        self.began = time.time()
        switch(False)
        try:
            if lost:
                noticed = self._noticed()
                self._ended(ranks, f"ranks of {name} outlived its loss")
                if self.world.elastic:
                    self._await(
                        lambda: bool(self.log.of("step", noticed)),
                        "a step of the hosts that are left",
                        BACK_SECONDS,
                    )
            yield
        finally:
            switch(True)

    def _noticed(self) -> float:
        """When the launcher has reported the fault, or, where it was below an agent that was killed, another one has taken over."""

        def seen() -> list[dict[str, Any]]:
            return [*self.log.of("fault", self.began), *self.log.of("takeover", self.began)]

        self._await(lambda: bool(seen()), "a fault")
        self._require_whole()
        return float(seen()[0]["t"])

    def _walk(self, steps: int) -> None:
        """Until the run is on all of its hosts and has logged so many steps there. Now and then one that lacks a host is hurt, too. It
        has come past the last fault: two kills of one rank after the same step are a crash loop, which ends a run."""
        whole = not self.world.elastic or self.draw.random() < 0.7
        before = faults[-1]["step"] if (faults := self.log.of("fault")) else -1

        def there() -> bool:
            starts = self.log.of("run_start", self.launches[-1])[-1:]
            fits = [
                start for start in starts if not whole or start["world_size"] == self.world.ranks
            ]
            done = self.log.of("step", max(fits[0]["t"], self.since)) if fits else []
            return len(done) >= steps and done[-1]["step"] > before

        self._await(there, f"{steps} steps", BACK_SECONDS)

    def _await(
        self,
        true: Callable[[], bool],
        what: str,
        timeout: float = NOTICE_SECONDS,
        period: float = 0.02,
        ends: bool = False,
    ) -> None:
        until = time.monotonic() + timeout
        while not true():
            assert ends or self.taken or self.process.poll() is None, (
                f"ended with {self.process.returncode} before: {what}\n{self._said()}"
            )
            assert time.monotonic() < until, f"not within {timeout:g} s: {what}\n{self._said()}"
            time.sleep(period)

    def _ended(self, pids: Sequence[int], otherwise: str) -> None:
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
        logs = sorted((self.run / "logs").glob("attempt-*/rank-*.log"), key=os.path.getmtime)[-3:]
        said = self.config.with_name("said")
        texts = (
            [said.read_text()]
            if said.exists()
            else list(self.process.communicate())
            if self.process.poll() is not None
            else []
        )
        return "\n".join(
            [*texts, *(f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs)]
        )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def one_machine(start: Callable[..., subprocess.Popen[str]] = start_interpreter) -> World:
    return World({"nproc": 2}, 2, ("rank", "all ranks", "save", "launcher"), start)


def chaos(folder: Path, world: World, kills: int, seed: int, **sections: Any) -> Chaos:
    """Run twice, first on this machine and left alone, then in `world` and hurt. Raises AssertionError on any difference."""
    reference = folder / "reference"
    alone = configure(folder, replace(world, launch={"nproc": world.ranks}), kills, **sections)
    done = drumline("train", alone, f"run.dir={reference}", timeout=600)
    assert done.code == 0, done.err
    hurt = Chaos(world, configure(folder, world, kills, **sections), seed)
    hurt.hurt(kills)
    (near if world.elastic else same)(hurt.run, reference)
    return hurt


def near(run: Path, reference: Path) -> None:
    """The same samples in each step, and losses, weights and moments to 1e-5: sums over another number of ranks round otherwise."""
    got, expected = figures(run), figures(reference)
    assert got.keys() == expected.keys()
    for step, (loss, _, *counted) in expected.items():
        assert list(got[step][2:]) == counted and abs(got[step][0] - loss) <= 1e-5 * abs(loss), (
            step,
            got[step],
            expected[step],
        )
    same_weights(run, reference, 1e-5)


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
    with tempfile.TemporaryDirectory() as folder:
        if options.hosts > 1:
            from plugins.hosts.tests.chaos import campaign

            campaign(
                Path(folder),
                options.hosts,
                options.kills,
                options.seed,
                options.out,
                list(filter(None, options.runs.split(","))),
            )
            return
        steps = [
            event["step"]
            for event in chaos(Path(folder), one_machine(), options.kills, options.seed).log.of(
                "step"
            )
        ]
    print(
        f"{options.kills} kills: losses, samples and weights equal bit for bit; {len(steps) - max(steps)} steps done again"
    )


if __name__ == "__main__":
    main()
