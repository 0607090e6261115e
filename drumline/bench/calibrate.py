"""`drumline calibrate`: measure this machine once, by real ranks, and store the rates for the planner.

Each rank is `python -m drumline.bench.calibrate TASK.json`; rank 0 writes what all of them measured. Every rank runs the same in the same
order and at the same time: processes share caches, memory and power. The disk is rank 0's alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from drumline.bench.block import besides_products
from drumline.core.files import write_whole
from drumline.core.process import tied
from drumline.core.signals import LauncherSignals
from drumline.dist.reduce import from_all
from drumline.dist.start import Ranks, start, stop
from drumline.errors import EnvironmentFault, Preempted, UserError, WorkerFailed
from drumline.foreign import disk_errors
from drumline.hardware.cluster import (
    Calibration,
    Measured,
    Product,
    calibration_path,
    hardware,
    line_through,
    read_calibration,
    software,
)
from drumline.hardware.detect import Machine, cache_dir, detect, free_bytes
from drumline.launchers.agent import Agent
from drumline.launchers.environment import listen
from drumline.launchers.postmortem import root_cause
from drumline.telemetry.traffic import CommunicatedBytes
from drumline.train.failure import note, recording

MIB = 2**20
MOST_CPU_RANKS = 8  # unless --nproc says more, and there are as many cores
DISK_BYTES = 2**29  # what the largest file of the measurement needs, and then some
Products = dict[str, tuple[Product, ...]]  # by precision
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Seconds that one collective, and the whole of a rank, may take.
TIMEOUT, LIMIT = (
    60.0,
    {False: 900.0, True: 600.0},
)
# In a hurry or not: seconds of samples, at least and at most (few samples are enough to pass the least), and seconds that a product may be
# expected to take: larger ones of that precision are left out.
SAMPLES = 15
ENOUGH, MOST = {False: 0.2, True: 0.05}, {False: 4.0, True: 0.5}
TOO_SLOW = {False: 2.0, True: 0.3}


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
            ("cpu", False): ((64, 256, 512, 2048), (64, 256, 576, 1024, 2048)),
            ("cuda", True): ((2048, 8192), (2048, 4096)),
            ("cuda", False): ((512, 2048, 8192, 32768), (1024, 2048, 4096, 8192)),
        }[self.device, self.quick]
        return sorted(
            ((r, w) for r in rows for w in widths), key=lambda shape: shape[0] * shape[1] ** 2
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of tensors that are sent or copied, from small to large."""
        most = (4 if self.quick else 64) if self.device == "cpu" else (64 if self.quick else 256)
        return [64 * 1024, MIB, most * MIB]


def group_sizes(world: int) -> list[int]:
    """2, 4, 8, … and all."""
    return sorted(
        {2**i for i in range(1, world.bit_length()) if 2**i <= world}
        | ({world} if world > 1 else set())
    )


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
        raise UserError(
            "is a folder, a file is wanted",
            where=f"--out {out}",
            fix=f"--out {out / 'measured.json'}",
        )
    target = out or calibration_path(machine)
    folder = cache_dir()
    _require_space(folder, DISK_BYTES, "set XDG_CACHE_HOME to a folder of another disk")
    _require_space(target.absolute().parent, MIB, "choose another place")
    console = Console()
    sizes = ", ".join(map(str, group_sizes(ranks))) or "none: one rank alone"
    console.print(
        f"measuring {hardware(machine)} ({software(machine)}); groups of {sizes}",
        highlight=False,
        soft_wrap=True,
    )
    measured = replace(
        _measured_by_ranks(machine, ranks, quick, folder),
        hardware=hardware(machine),
        software=software(machine),
    )
    write(
        measured,
        target,
        measured=datetime.now().astimezone().isoformat(timespec="seconds"),
        quick=quick,
    )
    for table in tables(measured):
        console.print(table)
    console.print(f"stored in {target}", highlight=False, soft_wrap=True)
    return 0


def _measured_by_ranks(machine: Machine, ranks: int, quick: bool, folder: Path) -> Calibration:
    """Start the ranks, which die with this process, and read what rank 0 wrote."""
    with (
        tempfile.TemporaryDirectory(prefix="drumline-calibrate-") as work,
        LauncherSignals() as signals,
    ):
        task = Task(machine.device, machine.bf16, quick, str(folder), out=f"{work}/measured.json")
        task_file = Path(work, "task.json")
        task_file.write_text(json.dumps(asdict(task)))
        # All cores, whatever the shell says.
        os.environ["OMP_NUM_THREADS"] = str(max(1, machine.cores // ranks))
        command = tied("drumline.bench.calibrate", str(task_file))
        ends = Agent(command, ranks, listen(None), Path(work, "logs"), signals, grace=5.0).attempt()
        if signals.number:
            raise Preempted("stopped by a signal: nothing was stored")
        if any(end.exitcode for end in ends):
            cause = root_cause(ends)
            tail = (
                cause.log.read_text(errors="replace").strip().splitlines()[-1:]
                if cause.log.exists()
                else []
            )
            last_line = "" if cause.error else "".join(tail)
            what = f"rank {cause.rank} {cause.message} {last_line}".rstrip()
            raise WorkerFailed(what, where="calibrate", fix="fewer ranks with --nproc, or --quick")
        return read_calibration(Path(task.out))


def write(calibration: Calibration, path: Path, *, measured: str, quick: bool) -> None:
    """Write a calibration, whole or not at all. Raises EnvironmentFault where that fails."""
    collectives: dict[str, dict[str, Any]] = {}
    for (kind, ranks), line in sorted(calibration.collectives.items()):
        collectives.setdefault(kind, {})[str(ranks)] = vars(line)
    values = {
        "version": 1,
        "measured": measured,
        "quick": quick,
        **asdict(calibration),
        "collectives": collectives,
    }
    with disk_errors("cannot be written", str(path), EnvironmentFault, "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(values, indent=1) + "\n", shared=True)


def _require_space(folder: Path, bytes_: int, fix: str) -> None:
    """Raises EnvironmentFault where a folder cannot be made or written to, or has too little space."""
    with disk_errors("cannot be written to", str(folder), EnvironmentFault, fix):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    if free_bytes(folder) < bytes_:
        raise EnvironmentFault(
            f"less than {bytes_ / 2**20:.0f} MiB are free",
            where=str(folder),
            fix=f"free space, or {fix}",
        )


def tables(measured: Calibration) -> list[Table]:
    """The tables of a calibration: products, then what moves bytes."""
    by_ranks = sorted(((ranks, kind), line) for (kind, ranks), line in measured.collectives.items())
    products = Table(
        "rows", "width", *measured.products, title="matrix products, GFLOP/s", box=box.SIMPLE
    )
    shapes = sorted(
        {(p.rows, p.inner) for products in measured.products.values() for p in products}
    )
    for rows, width in shapes:
        rates = [
            next((p.rate for p in products if (p.rows, p.inner) == (rows, width)), None)
            for products in measured.products.values()
        ]
        products.add_row(
            str(rows),
            str(width),
            *("–" if rate is None else f"{rate / 1e9:,.1f}" for rate in rates),
        )
    moves = Table("what", "ranks", "latency, µs", "GB/s", title="bytes", box=box.SIMPLE)
    if measured.memory:
        moves.add_row("memory, copied", "", "", f"{measured.memory / 1e9:,.2f}")
    lines = [(kind.replace("_", "-"), str(ranks), line) for (ranks, kind), line in by_ranks]
    lines += [(name.replace("_", " "), "", line) for name, line in measured.host.items()]
    for precision, sides in measured.operators.items():
        lines += [
            (f"block {side}, {precision}", "", line)
            for side, line in zip(("forward", "backward"), sides, strict=True)
        ]
    lines += [(f"disk {direction}", "", line) for direction, line in measured.disk.items()]
    for name, group, line in lines:
        moves.add_row(name, group, f"{line.latency * 1e6:,.0f}", f"{line.bandwidth / 1e9:,.2f}")
    return [products, moves]


def main() -> None:
    with recording():
        task = Task(**json.loads(Path(sys.argv[1]).read_text()))
        # A rank that hangs in a call of C ends here, whatever the other ranks do.
        faulthandler.dump_traceback_later(LIMIT[task.quick], exit=True)
        ranks = start(task.device, "nccl" if task.device == "cuda" else "gloo", TIMEOUT)
        try:
            measured = measure(task, ranks)
        except BaseException as error:
            note(error)
            raise
        finally:
            stop()
        if ranks.rank == 0:
            write(measured, Path(task.out), measured="now", quick=task.quick)


def measure(task: Task, ranks: Ranks) -> Calibration:
    """All rates, measured on every rank; only rank 0's are complete."""
    torch.backends.cuda.matmul.allow_tf32 = True  # precision.tf32's default
    if dist.is_initialized():
        dist.barrier()
    products, memory = multiply(task), copy_rate(task)
    blocks = besides_products(
        task.device,
        products,
        {name: DTYPES[name] for name in products},
        lambda call: _seconds(call, task),
    )
    host = to_and_from_host(task) if task.device == "cuda" else {}
    disk = write_and_read(task) if ranks.rank == 0 else {}
    # The rates of all ranks together, which measured at the same time: of GPUs the least, since the slowest sets the pace of a step, and of
    # a processor the sum.
    how: Callable[[list[float]], float] = min if task.device == "cuda" else sum
    of_ranks = from_all((products, memory, blocks))
    same = {
        precision: zip(*(theirs[precision] for theirs, *_ in of_ranks), strict=False)
        for precision in products
    }
    products = {
        name: tuple(replace(p[0], rate=how([each.rate for each in p])) for p in shapes)
        for name, shapes in same.items()
    }
    memory = how([rate for _, rate, _ in of_ranks])
    slowest = {
        kind: max((theirs[kind] for *_, theirs in of_ranks), key=lambda lines: lines[1].latency)
        for kind in blocks
    }
    matmul = {precision: rate_of_large(measured) for precision, measured in products.items()}
    sent = collectives(task, ranks)
    return Calibration(
        "", "", matmul, memory, sent, host, slowest, disk, ranks=ranks.world_size, products=products
    )


def multiply(task: Task) -> Products:
    """FLOP/s of (rows × width) · (width × width), in each precision that the device has."""
    found = {}
    for precision, dtype in DTYPES.items():
        if precision == "bf16" and task.device == "cuda" and not task.bf16:
            continue
        measured: list[Product] = []
        for rows, width in task.shapes:
            flop = 2.0 * rows * width * width
            if measured and flop / measured[-1].rate > TOO_SLOW[task.quick]:
                break
            a = torch.randn(rows, width, device=task.device).to(dtype)
            b = torch.randn(width, width, device=task.device).to(dtype)
            seconds = _seconds(partial(torch.matmul, a, b), task)
            measured.append(Product(rows, width, width, flop / seconds))
        found[precision] = tuple(measured)
    return found


def rate_of_large(measured: Sequence[Product]) -> float:
    """The best FLOP/s among products of at least a quarter of the largest one's FLOPs."""
    flops = [p.rows * p.inner * p.columns for p in measured]
    return max(p.rate for p, flop in zip(measured, flops, strict=True) if 4 * flop >= max(flops))


def copy_rate(task: Task) -> float:
    """Bytes/s of a copy within the device's memory, read and write counted; the tensor is larger than caches are."""
    size = (64 if task.device == "cpu" else 1024) * MIB
    a, b = (torch.ones(size // 4, device=task.device) for _ in range(2))
    return 2 * size / _seconds(lambda: b.copy_(a), task)


def to_and_from_host(task: Task) -> dict[str, Measured]:
    """Lines of copies between pinned memory and the device."""
    points: dict[str, list[tuple[float, float]]] = {"to_device": [], "to_host": []}
    for size in task.sizes:
        here = torch.ones(size // 4).pin_memory()
        there = torch.ones(size // 4, device=task.device)
        to_device = partial(there.copy_, here, non_blocking=True)
        to_host = partial(here.copy_, there, non_blocking=True)
        points["to_device"].append((size, _seconds(to_device, task)))
        points["to_host"].append((size, _seconds(to_host, task)))
    return {direction: line_through(found) for direction, found in points.items()}


def write_and_read(task: Task) -> dict[str, Measured]:
    """Lines of a file written until it is on the disk, and read again after the kernel has dropped it from its cache."""
    points: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
    for size in (MIB, 16 * MIB, (32 if task.quick else 256) * MIB):
        data = os.urandom(MIB) * (size // MIB)
        with tempfile.NamedTemporaryFile(dir=task.folder, prefix="calibrate-") as file:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            points["write"].append((size, time.perf_counter() - began))
            if hasattr(
                os, "posix_fadvise"
            ):  # macOS has none: there it is read from the kernel's cache
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(4 * MIB):
                pass
            points["read"].append((size, time.perf_counter() - began))
    return {direction: line_through(found) for direction, found in points.items()}


def collectives(task: Task, ranks: Ranks) -> dict[tuple[str, int], Measured]:
    """Lines for each kind among the first 2, 4, … ranks and among all; bytes are counted as a run counts them."""
    found = {}
    for size in group_sizes(ranks.world_size):
        group = dist.new_group(range(size))
        if ranks.rank < size:
            for kind in KINDS:
                points = [
                    _measured(_collective(kind, bytes_, size, group, task.device), group, task)
                    for bytes_ in task.sizes
                ]
                found[kind, size] = line_through(points)
        dist.barrier()
    if ranks.world_size > 1:
        found["p2p", 2] = line_through(
            [_back_and_forth(bytes_, ranks.rank, task) for bytes_ in task.sizes]
        )
    return found


def _collective(kind: str, bytes_: int, size: int, group: Any, device: str) -> Callable[[], Any]:
    """A collective on tensors of `bytes_` bytes on the larger side."""
    whole = torch.zeros(bytes_ // 4 // size * size, device=device)
    part, other = torch.zeros(len(whole) // size, device=device), torch.zeros_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[kind]


def _measured(call: Callable[[], Any], group: Any, task: Task) -> tuple[float, float]:
    """(bytes that a rank sends, least seconds of a call when all start together)."""
    with CommunicatedBytes() as sent:
        call()
    times = []
    for _ in range(task.repeats):
        dist.barrier(group)
        _wait(task.device)
        began = time.perf_counter()
        call()
        _wait(task.device)
        times.append(time.perf_counter() - began)
    return sent.total, min(times)


def _back_and_forth(bytes_: int, rank: int, task: Task) -> tuple[float, float]:
    """(bytes, seconds of one way between ranks 0 and 1); all other ranks wait at the barrier."""
    tensor, times = torch.zeros(bytes_ // 4, device=task.device), [1.0]
    if rank < 2:
        times = []
        for _ in range(task.repeats + 1):
            began = time.perf_counter()
            for sender in (0, 1):
                dist.send(tensor, 1 - rank) if rank == sender else dist.recv(tensor, 1 - rank)
            _wait(task.device)
            times.append((time.perf_counter() - began) / 2)
    dist.barrier()
    return bytes_, min(times)


def _seconds(call: Callable[[], Any], task: Task) -> float:
    """Seconds of a call, the least of several samples: what else runs here only adds to it. On a GPU, where waiting for the end costs
    time itself, a sample is many calls (10 ms)."""
    _timed(call, 1, task.device)  # kernels are loaded, threads started
    calls = max(1, int(0.01 / _timed(call, 1, task.device))) if task.device == "cuda" else 1
    times, spent = list[float](), 0.0
    while (len(times) < SAMPLES or spent < ENOUGH[task.quick]) and spent < MOST[task.quick]:
        times.append(_timed(call, calls, task.device))
        spent += calls * times[-1]
    return min(times)


def _timed(call: Callable[[], Any], calls: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return (time.perf_counter() - began) / calls


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
