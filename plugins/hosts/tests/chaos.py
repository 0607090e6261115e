"""The kills of `tests.faults.chaos` on several hosts: DDP, FSDP2, ZeRO-2 and a pipeline, each on hosts that stay and where they come and
go."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from tests.faults.chaos import Chaos, World, chaos
from tests.harness import ENV
from tests.hosts.namespaces import Host, hosts

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "zero2": "zero2",
    "pp": {"kind": "pp"},
}
LEGS = [
    (name, (number + turn) % 2 == 1) for turn in range(2) for number, name in enumerate(STRATEGIES)
]
TARGETS = ("rank", "agent", "launcher", "save", "link", "host")
PACE_SECONDS = 1.0
STEPS = 16, 80  # a kill, on hosts that stay and where they come and go


def campaign(
    folder: Path, count: int, kills: int, seed: int, out: Path | None, only: Sequence[str] = ()
) -> None:
    """Print what was killed and what it cost; with `out` also as JSON. `only`: the names of runs to make again, those that `out` has of the
    others stay. Raises AssertionError after the last run if one differed."""
    command = (
        f"python -m tests.faults.chaos --hosts {count} --kills {kills} --seed {seed} --out {out}"
    )
    head = {
        "command": command,
        "setting": {"hosts": count, "kills": kills, "seed": seed, "pace_seconds": PACE_SECONDS},
    }
    found, wrong = list[dict[str, Any]](), list[str]()
    if only and out is not None and out.exists():
        found = [leg for leg in json.loads(out.read_text())["runs"] if leg["run"] not in only]
    # A kill on hosts that stay takes half as long.
    turns = [
        *range(len(LEGS)),
        *(number for number, (_, elastic) in enumerate(LEGS) if not elastic),
    ]
    shares = [
        sum(turns[kill % len(turns)] == number for kill in range(kills))
        for number in range(len(LEGS))
    ]
    for number, (strategy, elastic) in enumerate(LEGS):
        here = folder / f"{strategy}-{'elastic' if elastic else 'fixed'}"
        if not shares[number] or (only and here.name not in only):
            continue
        here.mkdir()
        print(f"{here.name}: {shares[number]} kills", flush=True)
        sections = {
            "strategy": STRATEGIES[strategy],
            "batch": {"global_samples": 6, "micro_batch": 1 if strategy == "pp" else 2},
            "layers": 4 if strategy == "pp" else 2,
        }
        try:
            with hosts(here / "net", [chr(ord("a") + host) for host in range(count)]) as made:
                found.append(
                    told(
                        here.name,
                        chaos(
                            here,
                            world(here, made, elastic),
                            shares[number],
                            seed + number,
                            **sections,
                        ),
                    )
                )
        except AssertionError:
            traceback.print_exc()
            wrong.append(here.name)
        if found and out is not None:
            # What was found, also where this process does not come to its end.
            common.write(head | summed(found), out)
    assert not wrong, wrong
    whole = summed(found)
    seconds = whole["seconds"]
    print(
        f"{whole['kills']} kills in {len(found)} runs: no checkpoint torn, nothing left behind, every sample once"
    )
    print(
        "weights and moments equal bit for bit on hosts that stay, to 1e-5 where they come and go"
    )
    print(
        f"goodput {whole['goodput']:.0%}: "
        + ", ".join(f"{name} {value} s" for name, value in seconds.items())
    )
    for target, cost in whole["by_target"].items():
        print(f"{target:10}" + "  ".join(f"{name} {value}" for name, value in cost.items()))


def world(folder: Path, made: Mapping[str, Host], elastic: bool) -> World:
    """The command runs on the first host; what it says goes to `said`."""
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

    def launcher(process: subprocess.Popen[str]) -> int:
        """On whichever host it is."""
        marks = (f"drumline\0train\0{folder}", "drumline_hosts.successor")
        for each in psutil.process_iter(["cmdline"]):
            line = "\0".join(each.info["cmdline"] or ())
            if (
                line.startswith(sys.executable)
                and any(mark in line for mark in marks)
                and any(host.has(each.pid) for host in made.values())
            ):
                return int(each.pid)
        raise AssertionError("no host has a launcher")

    return World(
        launch={
            "kind": "ssh",
            "hosts": [f"{name}:1" for name in made],
            "options": ["-F", str(home.ssh_config)],
            "preflight": False,
            **({"nodes": {"min": 1}} if elastic else {}),
        },
        ranks=len(made),
        targets=TARGETS,
        start=start,
        launcher=launcher,
        hosts=made,
        elastic=elastic,
        pace=PACE_SECONDS,
        steps=STEPS[elastic],
    )


def told(name: str, hurt: Chaos) -> dict[str, Any]:
    """What a run went through, kill by kill, and what its seconds were spent on."""
    kills = []
    for number, each in enumerate(hurt.kills):
        began, until = (
            each["began"],
            hurt.kills[number + 1]["began"] if number + 1 < len(hurt.kills) else float("inf"),
        )
        seen = [*hurt.log.of("fault", began), *hurt.log.of("takeover", began)]
        faults = sorted(event["t"] for event in seen if event["t"] < until)
        reached = max(event["step"] for event in hurt.log.of("step") if event["t"] < began)
        beyond = [event["t"] for event in hurt.log.of("step", began) if event["step"] > reached]
        # A cable that was pulled for a moment is no fault, and costs what a step takes longer.
        noticed = round(faults[0] - began, 2) if faults else None
        restarted = [event["step"] for event in hurt.log.of("restore", began) if event["t"] < until]
        again = reached - restarted[0] if restarted else 0
        kills.append({"what": each["what"], "target": each["target"], "step": each["step"], "noticed_s": noticed, "steps_again": again,
                      "back_s": round(beyond[0] - began, 2)})  # fmt: skip
    return {"run": name, "commit": common.commit(), "kills": kills, "seconds": spent(hurt)}


def spent(hurt: Chaos) -> dict[str, float]:
    """Where the seconds went, from the first launch to the end: they add up. A step counts from the one before it, and is productive once;
    `hang` is the time between the last step and the fault's report, whatever was hurt."""
    seconds = dict.fromkeys(
        ("productive", "startup", "save", "restore", "recompute", "hang", "other"), 0.0
    )
    dead = [{"kind": "dead", "t": launched} for launched in hurt.launches[1:]]
    mark, stepping, reached = hurt.launches[0], False, 0
    for event in sorted([*hurt.log.read(), *dead], key=lambda event: event["t"]):
        kind, passed = event["kind"], event["t"] - mark
        if kind == "restore":
            seconds["restore"] += min(event["seconds"], passed)
            seconds["startup"] += passed - min(event["seconds"], passed)
        elif kind == "step":
            own = passed if stepping else min(event["seconds"], passed)
            seconds["productive" if event["step"] > reached else "recompute"] += own
            seconds["startup"] += passed - own
            stepping, reached = True, max(reached, event["step"])
        elif kind == "save" and stepping:
            seconds["save"] += min(event["blocked_seconds"], passed)
            seconds["productive"] += passed - min(event["blocked_seconds"], passed)
        elif kind in ("fault", "takeover", "dead", "preempt"):
            seconds["save" if kind == "preempt" else "hang" if stepping else "startup"] += passed
            stepping = False
        else:
            continue
        mark = event["t"]
    seconds["other"] = hurt.ended - mark
    return {name: round(value, 2) for name, value in seconds.items()}


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs together."""
    seconds = {
        name: round(sum(leg["seconds"][name] for leg in found), 1) for name in found[0]["seconds"]
    }
    kills = sum(len(leg["kills"]) for leg in found)
    goodput = round(seconds["productive"] / sum(seconds.values()), 3)
    return {
        "kills": kills,
        "goodput": goodput,
        "seconds": seconds,
        "by_target": costs(found),
        "runs": found,
    }


def costs(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By what was hurt: how often, and medians."""
    table = {}
    for target in TARGETS:
        kills = [each for leg in found for each in leg["kills"] if each["target"] == target]
        noticed = [each["noticed_s"] for each in kills if each["noticed_s"] is not None]
        if kills:
            table[target] = {
                "kills": len(kills),
                "noticed_s": round(statistics.median(noticed), 2) if noticed else None,
                "back_s": round(statistics.median(each["back_s"] for each in kills), 2),
                "steps_again": statistics.median(each["steps_again"] for each in kills),
            }
    return table
