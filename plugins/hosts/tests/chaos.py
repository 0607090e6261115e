"""The kills of `tests.faults.chaos` on several hosts.

DDP, FSDP2, ZeRO-2 and a pipeline train on hosts that stay, and on hosts that come and go.
"""

from __future__ import annotations

import json
import statistics
import string
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import common
from tests.faults.chaos import Chaos, Log, World, chaos
from tests.harness import ENV
from tests.hosts.namespaces import Host, hosts

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "zero2": "zero2",
    "pp": {"kind": "pp"},
}


class Leg(NamedTuple):
    """One run of the campaign."""

    strategy: str
    # Whether hosts come and go.
    elastic: bool

    @property
    def name(self) -> str:
        kind = "elastic" if self.elastic else "fixed"
        return f"{self.strategy}-{kind}"


LEGS = (
    Leg("ddp", elastic=False),
    Leg("fsdp2", elastic=True),
    Leg("zero2", elastic=False),
    Leg("pp", elastic=True),
    Leg("ddp", elastic=True),
    Leg("fsdp2", elastic=False),
    Leg("zero2", elastic=True),
    Leg("pp", elastic=False),
)
TARGETS = ("rank", "agent", "launcher", "save", "link", "host")
PACE_SECONDS = 1.0
# Steps for each kill.
FIXED_STEPS = 16
ELASTIC_STEPS = 80
SPENT_ON = ("productive", "startup", "save", "restore", "recompute", "hang", "other")
STOPS = ("fault", "takeover", "dead", "preempt")


def campaign(
    folder: Path, count: int, kills: int, seed: int, out: Path | None, only: Sequence[str] = ()
) -> None:
    """Print what was killed and what it cost.

    Args:
        folder: A folder for all runs.
        count: Number of hosts.
        kills: Number of kills, in all runs together.
        seed: Seed of the random kills.
        out: A file for the report as JSON.
        only: The names of runs to make again; `out` keeps its other runs.

    Raises:
        AssertionError: A run differed. It is raised after the last run.
    """
    command = "python -m tests.faults.chaos"
    head = {
        "command": f"{command} --hosts {count} --kills {kills} --seed {seed} --out {out}",
        "setting": {"hosts": count, "kills": kills, "seed": seed, "pace_seconds": PACE_SECONDS},
    }

    found = read_other_runs(out, only)
    wrong = []

    for number, share in enumerate(share_kills(kills)):
        leg = LEGS[number]
        is_left_out = only and leg.name not in only
        if share == 0 or is_left_out:
            continue

        print(f"{leg.name}: {share} kills", flush=True)
        try:
            hurt = run_leg(folder / leg.name, leg, count, share, seed + number)
            found.append(describe_run(leg.name, hurt))
        except AssertionError:
            traceback.print_exc()
            wrong.append(leg.name)

        if found and out is not None:
            # A campaign that is killed leaves the runs that it has made.
            common.write(head | summarize(found), out)

    assert not wrong, wrong
    print_summary(summarize(found))


def read_other_runs(out: Path | None, only: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs of an earlier report that are not to be made again."""
    if not only or out is None or not out.exists():
        return []

    report = json.loads(out.read_text())
    return [run for run in report["runs"] if run["run"] not in only]


def share_kills(kills: int) -> list[int]:
    """Return the number of kills of each leg.

    Hosts that stay get twice as many, because a kill there takes half as long.
    """
    turns = list(range(len(LEGS)))
    for number, leg in enumerate(LEGS):
        if not leg.elastic:
            turns.append(number)

    shares = [0] * len(LEGS)
    for kill in range(kills):
        number = turns[kill % len(turns)]
        shares[number] += 1
    return shares


def run_leg(folder: Path, leg: Leg, count: int, kills: int, seed: int) -> Chaos:
    """Train on new hosts a, b, c … and hurt the run."""
    folder.mkdir()
    micro_batch = 2
    layers = 2
    if leg.strategy == "pp":
        micro_batch = 1
        layers = 4

    sections = {
        "strategy": STRATEGIES[leg.strategy],
        "batch": {"global_samples": 6, "micro_batch": micro_batch},
        "layers": layers,
    }
    names = string.ascii_lowercase[:count]

    with hosts(folder / "net", names) as made:
        world = make_world(folder, made, leg.elastic)
        return chaos(folder, world, kills, seed, **sections)


def make_world(folder: Path, made: Mapping[str, Host], elastic: bool) -> World:
    """Return a world whose command runs on the first host and prints to the file `said`."""
    home = next(iter(made.values()))

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = home.command(sys.executable, "-m", "drumline", *arguments)
        with (folder / "said").open("a") as said:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
                env=ENV,
                start_new_session=True,
            )

    def find_launcher(process: subprocess.Popen[str]) -> int:
        """Return the process id of the launcher, on whichever host it is."""
        marks = (f"drumline\0train\0{folder}", "drumline_hosts.successor")
        for each in psutil.process_iter(["cmdline"]):
            line = "\0".join(each.info["cmdline"] or ())
            is_python = line.startswith(sys.executable)
            is_launcher = is_python and any(mark in line for mark in marks)
            if is_launcher and any(host.has(each.pid) for host in made.values()):
                return int(each.pid)
        raise AssertionError("no host has a launcher")

    launch: dict[str, Any] = {
        "kind": "ssh",
        "hosts": [f"{name}:1" for name in made],
        "options": ["-F", str(home.ssh_config)],
        "preflight": False,
    }
    steps = FIXED_STEPS
    if elastic:
        launch["nodes"] = {"min": 1}
        steps = ELASTIC_STEPS

    return World(
        launch=launch,
        ranks=len(made),
        targets=TARGETS,
        start=start,
        launcher=find_launcher,
        hosts=made,
        elastic=elastic,
        pace=PACE_SECONDS,
        steps=steps,
    )


def describe_run(name: str, hurt: Chaos) -> dict[str, Any]:
    """Return what followed from each kill of a run, and what its seconds were spent on."""
    return {
        "run": name,
        "commit": common.commit(),
        "kills": [describe_kill(hurt, number) for number in range(len(hurt.kills))],
        "seconds": split_seconds(hurt),
    }


def describe_kill(hurt: Chaos, number: int) -> dict[str, Any]:
    """Return when a kill was noticed, and what it cost until the run was past its last step."""
    log = hurt.log
    kill = hurt.kills[number]
    began = kill["began"]
    until = float("inf")
    if number + 1 < len(hurt.kills):
        until = hurt.kills[number + 1]["began"]

    # A cable that was pulled for a moment is no fault, and only makes a step longer.
    noticed = None
    faults = events_between(log, "fault", began, until)
    faults += events_between(log, "takeover", began, until)
    if faults:
        first = min(faults, key=itemgetter("t"))
        noticed = round(first["t"] - began, 2)

    # Steps that were lost are taken again.
    before = events_between(log, "step", 0.0, began)
    last = max(before, key=itemgetter("step"))
    reached = last["step"]
    again = 0
    restores = events_between(log, "restore", began, until)
    if restores:
        again = reached - restores[0]["step"]
    back = next(event["t"] for event in log.of("step", began) if event["step"] > reached)

    return {
        "what": kill["what"],
        "target": kill["target"],
        "step": kill["step"],
        "noticed_s": noticed,
        "steps_again": again,
        "back_s": round(back - began, 2),
    }


def events_between(log: Log, kind: str, began: float, until: float) -> list[dict[str, Any]]:
    """Return the events of a kind from one time to another, in unix seconds."""
    return [event for event in log.of(kind, began) if event["t"] < until]


def split_seconds(hurt: Chaos) -> dict[str, float]:
    """Return what the seconds from the first launch to the end were spent on.

    They add up. A step counts from the one before it, and is productive once. `hang` is the time
    between the last step and the fault's report, whatever was hurt.
    """
    seconds = dict.fromkeys(SPENT_ON, 0.0)
    mark, *launches = hurt.launches
    events = list(hurt.log.read())
    for launched in launches:
        events.append({"kind": "dead", "t": launched})
    events.sort(key=itemgetter("t"))

    is_stepping = False
    reached = 0
    for event in events:
        step = event.get("step", 0)
        spent = split_passed(event, event["t"] - mark, is_stepping, step > reached)
        if not spent:
            continue
        for name, value in spent.items():
            seconds[name] += value

        mark = event["t"]
        if event["kind"] == "step":
            is_stepping = True
            reached = max(reached, step)
        elif event["kind"] in STOPS:
            is_stepping = False

    seconds["other"] = hurt.ended - mark
    return {name: round(value, 2) for name, value in seconds.items()}


def split_passed(
    event: Mapping[str, Any], passed: float, is_stepping: bool, is_new: bool
) -> dict[str, float]:
    """Return what the seconds before an event were spent on; nothing for one that ends nothing.

    Args:
        event: The event.
        passed: Seconds since the event before it.
        is_stepping: Whether ranks have taken a step since they started.
        is_new: Whether its step was never taken before.
    """
    kind = event["kind"]
    if kind == "restore":
        own = min(event["seconds"], passed)
        return {"restore": own, "startup": passed - own}
    if kind == "step":
        own = passed
        if not is_stepping:
            own = min(event["seconds"], passed)
        name = "productive" if is_new else "recompute"
        return {name: own, "startup": passed - own}
    if kind == "save" and is_stepping:
        own = min(event["blocked_seconds"], passed)
        return {"save": own, "productive": passed - own}
    if kind == "preempt":
        return {"save": passed}
    if kind in STOPS:
        name = "hang" if is_stepping else "startup"
        return {name: passed}
    return {}


def summarize(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all runs together."""
    kills = 0
    total = dict.fromkeys(SPENT_ON, 0.0)
    for run in found:
        kills += len(run["kills"])
        for name, value in run["seconds"].items():
            total[name] += value

    seconds = {name: round(value, 1) for name, value in total.items()}
    goodput = seconds["productive"] / sum(seconds.values())
    return {
        "kills": kills,
        "goodput": round(goodput, 3),
        "seconds": seconds,
        "by_target": cost_by_target(found),
        "runs": found,
    }


def cost_by_target(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return how often each kind of target was hurt, and the medians of what that cost."""
    by_target: dict[str, list[dict[str, Any]]] = {}
    for run in found:
        for kill in run["kills"]:
            kills = by_target.setdefault(kill["target"], [])
            kills.append(kill)

    table: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        kills = by_target.get(target, [])
        if not kills:
            continue
        table[target] = {"kills": len(kills)}
        for name in ("noticed_s", "back_s", "steps_again"):
            table[target][name] = median(kills, name)
    return table


def median(kills: list[dict[str, Any]], name: str) -> float | None:
    """Return the median of a figure; None if no kill has it."""
    values = [kill[name] for kill in kills if kill[name] is not None]
    if not values:
        return None
    return round(statistics.median(values), 2)


def print_summary(whole: Mapping[str, Any]) -> None:
    runs = len(whole["runs"])
    seconds = [f"{name} {value} s" for name, value in whole["seconds"].items()]
    promise = "no checkpoint torn, nothing left behind, every sample once"
    print(f"{whole['kills']} kills in {runs} runs: {promise}")
    print(
        "weights and moments equal bit for bit on hosts that stay, to 1e-5 where they come and go"
    )
    print(f"goodput {whole['goodput']:.0%}: " + ", ".join(seconds))

    for target, cost in whole["by_target"].items():
        figures = [f"{name} {value}" for name, value in cost.items()]
        print(f"{target:10}" + "  ".join(figures))
