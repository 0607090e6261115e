"""`drumline calibrate`: measure this machine once, by real ranks, and store the rates for the planner."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from drumline.core.files import write_whole
from drumline.core.process import tied
from drumline.core.signals import LauncherSignals
from drumline.errors import EnvironmentFault, Preempted, UserError, WorkerFailed
from drumline.hardware.calibration import Calibration, hardware, place, read, software
from drumline.hardware.detect import Machine, cache_dir, detect, free_bytes
from drumline.launchers.environment import listen
from drumline.launchers.postmortem import root_cause

MIB = 2**20
MOST_CPU_RANKS = 8  # unless --nproc says more, and there are as many cores
DISK_BYTES = 2**29  # what the largest file of the measurement needs, and then some


@dataclass(frozen=True)
class Task:
    """The task of the ranks. `folder`: on the disk to measure; `out`: the file that rank 0 writes."""

    device: str
    bf16: bool
    quick: bool
    folder: str
    out: str

    @property
    def repeats(self) -> int:
        return 5 if self.quick else 15

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, width) of products (rows × width) · (width × width), from small to large."""
        rows, widths = {
            ("cpu", True): ((64, 512), (256, 1024)),
            ("cpu", False): ((64, 512, 2048), (256, 576, 1024, 2048)),
            ("cuda", True): ((2048, 8192), (2048, 4096)),
            ("cuda", False): ((512, 2048, 8192, 32768), (1024, 2048, 4096, 8192)),
        }[self.device, self.quick]
        return sorted(((r, w) for r in rows for w in widths), key=lambda shape: shape[0] * shape[1] ** 2)

    @property
    def sizes(self) -> list[int]:
        """Bytes of tensors that are sent or copied, from small to large."""
        most = (4 if self.quick else 64) if self.device == "cpu" else (64 if self.quick else 256)
        return [64 * 1024, MIB, most * MIB]


def group_sizes(world: int) -> list[int]:
    """2, 4, 8, … and all."""
    return sorted({2**i for i in range(1, world.bit_length()) if 2**i <= world} | ({world} if world > 1 else set()))


def calibrate(quick: bool, nproc: int | None, out: Path | None) -> int:
    """Measure, print, store. `nproc`: ranks, by default one for each GPU, else one for each core, at least two and at most eight. Raises
    UserError for more ranks than GPUs or cores or a folder as `out`, EnvironmentFault where files cannot be written, WorkerFailed where a
    rank fails."""
    machine = detect()
    ranks = nproc or len(machine.devices) or max(2, min(machine.cores, MOST_CPU_RANKS))
    most = len(machine.devices) or max(machine.cores, MOST_CPU_RANKS)
    if ranks > most:  # on a CPU they would share cores, and measure the scheduler
        where = f"{len(machine.devices)} GPUs" if machine.devices else f"{machine.cores} cores"
        raise UserError(f"{ranks} ranks on {where}", where="--nproc", fix=f"at most {most}")
    if out is not None and out.is_dir():
        raise UserError("is a folder, a file is wanted", where=f"--out {out}", fix=f"--out {out / 'measured.json'}")
    target = out or place(machine)
    folder = cache_dir()
    _require_space(folder, DISK_BYTES, "set XDG_CACHE_HOME to a folder of another disk")
    _require_space(target.absolute().parent, MIB, "choose another place")
    console = Console()
    sizes = ", ".join(map(str, group_sizes(ranks))) or "none: one rank alone"
    console.print(f"measuring {hardware(machine)} ({software(machine)}); groups of {sizes}", highlight=False, soft_wrap=True)
    measured = replace(_measure(machine, ranks, quick, folder), hardware=hardware(machine), software=software(machine))
    write(measured, target, measured=datetime.now().astimezone().isoformat(timespec="seconds"), quick=quick)
    for table in tables(measured):
        console.print(table)
    console.print(f"stored in {target}", highlight=False, soft_wrap=True)
    return 0


def _measure(machine: Machine, ranks: int, quick: bool, folder: Path) -> Calibration:
    """Start the ranks, which die with this process, and read what rank 0 wrote."""
    from drumline.launchers.agent import Agent

    with tempfile.TemporaryDirectory(prefix="drumline-calibrate-") as work, LauncherSignals() as signals:
        task = Task(machine.device, machine.bf16, quick, str(folder), out=f"{work}/measured.json")
        task_file = Path(work, "task.json")
        task_file.write_text(json.dumps(asdict(task)))
        os.environ["OMP_NUM_THREADS"] = str(max(1, machine.cores // ranks))  # all cores, whatever the shell says
        command = tied("drumline.bench.calibrate_rank", str(task_file))
        ends = Agent(command, ranks, listen(None), Path(work, "logs"), signals, grace=5.0).attempt()
        if signals.number:
            raise Preempted("stopped by a signal: nothing was stored")
        if any(end.exitcode for end in ends):
            cause = root_cause(ends)
            tail = cause.log.read_text(errors="replace").strip().splitlines()[-1:] if cause.log.exists() else []
            last_line = "" if cause.error else "".join(tail)
            what = f"rank {cause.rank} {cause.message} {last_line}".rstrip()
            raise WorkerFailed(what, where="calibrate", fix="fewer ranks with --nproc, or --quick")
        return read(Path(task.out))


def write(calibration: Calibration, path: Path, *, measured: str, quick: bool) -> None:
    """Write a calibration, whole or not at all. Raises EnvironmentFault where that fails."""
    collectives: dict[str, dict[str, Any]] = {}
    for (kind, ranks), line in sorted(calibration.collectives.items()):
        collectives.setdefault(kind, {})[str(ranks)] = vars(line)
    values = {"version": 1, "measured": measured, "quick": quick, **asdict(calibration), "collectives": collectives}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(values, indent=1) + "\n", shared=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(path), fix="choose another place") from None


def _require_space(folder: Path, bytes_: int, fix: str) -> None:
    """Raises EnvironmentFault where a folder cannot be made or written to, or has too little space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EnvironmentFault(f"cannot be written to: {error.strerror}", where=str(folder), fix=fix) from None
    if free_bytes(folder) < bytes_:
        raise EnvironmentFault(f"less than {bytes_ / 2**20:.0f} MiB are free", where=str(folder), fix=f"free space, or {fix}")


def tables(measured: Calibration) -> list[Table]:
    """The tables of a calibration: products, then what moves bytes."""
    by_ranks = sorted(((ranks, kind), line) for (kind, ranks), line in measured.collectives.items())
    products = Table("rows", "width", *measured.products, title="matrix products, GFLOP/s", box=box.SIMPLE)
    shapes = sorted({(p.rows, p.inner) for products in measured.products.values() for p in products})
    for rows, width in shapes:
        rates = [next((p.rate for p in products if (p.rows, p.inner) == (rows, width)), None) for products in measured.products.values()]
        products.add_row(str(rows), str(width), *("–" if rate is None else f"{rate / 1e9:,.1f}" for rate in rates))
    moves = Table("what", "ranks", "latency, µs", "GB/s", title="bytes", box=box.SIMPLE)
    if measured.memory:
        moves.add_row("memory, copied", "", "", f"{measured.memory / 1e9:,.2f}")
    lines = [(kind.replace("_", "-"), str(ranks), line) for (ranks, kind), line in by_ranks]
    lines += [(name.replace("_", " "), "", line) for name, line in measured.host.items()]
    lines += [(f"disk {direction}", "", line) for direction, line in measured.disk.items()]
    for name, group, line in lines:
        moves.add_row(name, group, f"{line.latency * 1e6:,.0f}", f"{line.bandwidth / 1e9:,.2f}")
    return [products, moves]
