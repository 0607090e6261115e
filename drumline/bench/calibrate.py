"""`drumline calibrate`: measure this machine once, by real ranks, and store the rates.

The planner uses them in place of the catalog's rates. Each rank is a process of its own, `python -m
drumline.bench.calibrate TASK.json`. All ranks take the same measurements in the same order and at
the same time, because processes share caches, memory and power; rank 0 writes the result. The disk
is measured by rank 0 alone.

A new measurement needs a field of `Calibration` and of the model of its file (both in
`hardware.cluster`), a function `measure_…` here, and a row in `_bytes_table`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from drumline.bench.block import besides_products
from drumline.dist.reduce import gather_from_ranks
from drumline.dist.start import RankInfo, start, stop
from drumline.errors import EnvironmentFault, Preempted, UserError, WorkerFailed
from drumline.foreign import disk_errors
from drumline.hardware.cluster import (
    Calibration,
    CostLine,
    Product,
    calibration_path,
    hardware_name,
    line_through,
    read_calibration,
    software_name,
)
from drumline.hardware.detect import Machine, cache_dir, detect, free_bytes
from drumline.launch.agent import Agent
from drumline.launch.environment import listen
from drumline.launch.postmortem import root_cause
from drumline.system.files import write_whole
from drumline.system.process import tied_arguments
from drumline.system.signals import LauncherSignals
from drumline.telemetry.traffic import CommunicatedBytes
from drumline.train.failure import exit_on_error, record_failure

MIB = 2**20
# The most ranks on a CPU by default. --nproc may ask for up to this many ranks on any host, and for
# more if there are as many cores.
MOST_CPU_RANKS = 8
# Free bytes that the measurement of the disk requires: twice its largest file.
DISK_BYTES = 512 * MIB
FP32_BYTES = 4
# Precision → the matrix products that were measured in it.
Products = dict[str, tuple[Product, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# The most seconds that one collective may take.
TIMEOUT = 60.0


class Limits(NamedTuple):
    """Limits of a measurement."""

    # The most seconds that a rank may take for all measurements.
    rank_seconds: float
    # A call is sampled until there are SAMPLES samples that took this many seconds together …
    least_seconds: float
    # … or until the samples, however few, took this many seconds.
    most_seconds: float
    # The most seconds that a matrix product is expected to take. Larger products are left out.
    product_seconds: float
    # How many calls of a collective are timed.
    collective_calls: int


THOROUGH = Limits(
    rank_seconds=900.0,
    least_seconds=0.2,
    most_seconds=4.0,
    product_seconds=2.0,
    collective_calls=15,
)
QUICK = Limits(
    rank_seconds=600.0,
    least_seconds=0.05,
    most_seconds=0.5,
    product_seconds=0.3,
    collective_calls=5,
)
# The fewest samples of a call, unless they take more than `Limits.most_seconds`.
SAMPLES = 15
# On a GPU a sample is a batch of calls that takes about this many seconds, since waiting for the
# end of each call would add to its time.
SAMPLE_SECONDS = 0.01
# (device, quick) → (numbers of rows, widths) of the products (rows × width) · (width × width).
SHAPES: dict[tuple[str, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("cpu", True): ((64, 512), (256, 1024)),
    ("cpu", False): ((64, 256, 512, 2048), (64, 256, 576, 1024, 2048)),
    ("cuda", True): ((2048, 8192), (2048, 4096)),
    ("cuda", False): ((512, 2048, 8192, 32768), (1024, 2048, 4096, 8192)),
}
# (device, quick) → bytes of the largest tensor that is sent or copied.
LARGEST_SENT = {
    ("cpu", True): 4 * MIB,
    ("cpu", False): 64 * MIB,
    ("cuda", True): 64 * MIB,
    ("cuda", False): 256 * MIB,
}
# Bytes of the tensor whose copy measures a device's memory: more than its caches hold.
COPIED = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
# quick → bytes of the largest file that is written.
LARGEST_FILE = {True: 32 * MIB, False: 256 * MIB}


@dataclass(frozen=True)
class Task:
    """What the ranks measure. It is handed to them as JSON."""

    # cpu or cuda.
    device: str
    # Whether the GPUs compute in bf16.
    bf16: bool
    # Whether to measure fewer and smaller things.
    quick: bool
    # A folder on the disk to measure.
    folder: str
    # The file that rank 0 writes.
    out: str

    @property
    def limits(self) -> Limits:
        """The limits of this measurement."""
        if self.quick:
            return QUICK
        return THOROUGH

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, width) of the products (rows × width) · (width × width), fewest FLOPs first."""
        all_rows, widths = SHAPES[self.device, self.quick]
        shapes = []
        for rows in all_rows:
            for width in widths:
                shapes.append((rows, width))

        def flops(shape: tuple[int, int]) -> int:
            rows, width = shape
            return rows * width**2

        return sorted(shapes, key=flops)

    @property
    def sizes(self) -> list[int]:
        """Bytes of tensors that are sent or copied, from small to large."""
        return [64 * 1024, MIB, LARGEST_SENT[self.device, self.quick]]


def group_sizes(world: int) -> list[int]:
    """Return the sizes of the groups of ranks that are measured: 2, 4, 8, … and all `world` ranks."""
    sizes = []
    size = 2
    while size <= world:
        sizes.append(size)
        size *= 2
    if world > 1 and world not in sizes:
        sizes.append(world)
    return sizes


def calibrate(quick: bool, nproc: int | None, out: Path | None) -> int:
    """Measure, print and store the rates of this machine. Returns the exit code 0.

    Args:
        quick: Measure fewer and smaller things.
        nproc: The number of ranks; None for one for each GPU, or without GPUs one for each core, at
            least two and at most MOST_CPU_RANKS.
        out: The file to write; None for a file in the cache folder.

    Raises UserError for too many ranks (see MOST_CPU_RANKS) and for a folder as `out`,
    EnvironmentFault if files cannot be written, WorkerFailed if a rank fails.
    """
    machine = detect()
    ranks = _number_of_ranks(machine, nproc)
    if out is not None and out.is_dir():
        raise UserError(
            "is a folder, a file is wanted",
            where=f"--out {out}",
            fix=f"--out {out / 'measured.json'}",
        )
    target = out or calibration_path(machine)
    folder = cache_dir()
    # Before the measurement, which takes minutes.
    _require_space(folder, DISK_BYTES, "set XDG_CACHE_HOME to a folder of another disk")
    _require_space(target.absolute().parent, MIB, "choose another place")
    console = Console()
    sizes = ", ".join(str(size) for size in group_sizes(ranks)) or "none: one rank alone"
    console.print(
        f"measuring {hardware_name(machine)} ({software_name(machine)}); groups of {sizes}",
        highlight=False,
        soft_wrap=True,
    )
    calibration = _measure_by_ranks(machine, ranks, quick, folder)
    calibration = replace(
        calibration, hardware=hardware_name(machine), software=software_name(machine)
    )
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    write(calibration, target, measured_at=now, quick=quick)
    for table in tables(calibration):
        console.print(table)
    console.print(f"stored in {target}", highlight=False, soft_wrap=True)
    return 0


def _number_of_ranks(machine: Machine, nproc: int | None) -> int:
    """Return the number of ranks that measure. Raises UserError if `nproc` is too large.

    Far more ranks than cores would measure the scheduler of the kernel.
    """
    gpus = len(machine.devices)
    # At least two, since one rank alone measures no collective.
    cpu_ranks = max(2, min(machine.cores, MOST_CPU_RANKS))
    ranks = nproc or gpus or cpu_ranks
    most = gpus or max(machine.cores, MOST_CPU_RANKS)
    if ranks > most:
        where = f"{machine.cores} cores"
        if gpus:
            where = f"{gpus} GPUs"
        raise UserError(f"{ranks} ranks on {where}", where="--nproc", fix=f"at most {most}")
    return ranks


def _measure_by_ranks(machine: Machine, ranks: int, quick: bool, folder: Path) -> Calibration:
    """Start the ranks, which die with this process, and return what rank 0 wrote.

    Raises Preempted after a signal, WorkerFailed if a rank fails.
    """
    with (
        tempfile.TemporaryDirectory(prefix="drumline-calibrate-") as work,
        LauncherSignals() as signals,
    ):
        task = Task(machine.device, machine.bf16, quick, str(folder), out=f"{work}/measured.json")
        task_file = Path(work, "task.json")
        task_file.write_text(json.dumps(asdict(task)))
        # The ranks share all cores, whatever the shell says.
        os.environ["OMP_NUM_THREADS"] = str(max(1, machine.cores // ranks))
        command = tied_arguments("drumline.bench.calibrate", str(task_file))
        agent = Agent(command, ranks, listen(None), Path(work, "logs"), signals, grace=5.0)
        ends = agent.attempt()
        if signals.number:
            raise Preempted("stopped by a signal: nothing was stored")
        if any(end.exitcode for end in ends):
            cause = root_cause(ends)
            last_line = ""
            # A rank that a signal killed has noted no error; its log may say more.
            if not cause.error and cause.log.exists():
                log = cause.log.read_text(errors="replace")
                lines = log.strip().splitlines()
                if lines:
                    last_line = lines[-1]
            what = f"rank {cause.rank} {cause.message} {last_line}".rstrip()
            raise WorkerFailed(what, where="calibrate", fix="fewer ranks with --nproc, or --quick")
        return read_calibration(Path(task.out))


def write(calibration: Calibration, path: Path, *, measured_at: str, quick: bool) -> None:
    """Write a calibration to a file, whole or not at all. Raises EnvironmentFault if that fails.

    Args:
        calibration: The measured rates.
        path: The file to write.
        measured_at: The time of the measurement in ISO format.
        quick: Whether fewer and smaller things were measured.
    """
    # JSON has no pairs as keys, so the file has kind → number of ranks → latency and bandwidth.
    collectives: dict[str, dict[str, Any]] = {}
    for (kind, ranks), line in sorted(calibration.collectives.items()):
        by_ranks = collectives.setdefault(kind, {})
        by_ranks[str(ranks)] = vars(line)
    values = {
        "version": 1,
        "measured": measured_at,
        "quick": quick,
        **asdict(calibration),
        "collectives": collectives,
    }
    with disk_errors("cannot be written", str(path), EnvironmentFault, "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(values, indent=1) + "\n", shared=True)


def _require_space(folder: Path, bytes_: int, fix: str) -> None:
    """Raise EnvironmentFault if a folder cannot be made or written to, or has too little space.

    Args:
        folder: The folder. It is made if it does not exist.
        bytes_: The free space that it must have.
        fix: What the user can do instead of freeing space.
    """
    with disk_errors("cannot be written to", str(folder), EnvironmentFault, fix):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    if free_bytes(folder) < bytes_:
        raise EnvironmentFault(
            f"less than {bytes_ / MIB:.0f} MiB are free",
            where=str(folder),
            fix=f"free space, or {fix}",
        )


def tables(calibration: Calibration) -> list[Table]:
    """Return the tables of a calibration: one of matrix products, one of all that moves bytes."""
    return [_products_table(calibration.products), _bytes_table(calibration)]


def _products_table(products: Mapping[str, tuple[Product, ...]]) -> Table:
    """Return a table of GFLOP/s by shape and precision."""
    table = Table("rows", "width", *products, title="matrix products, GFLOP/s", box=box.SIMPLE)
    # (rows, width) → precision → FLOP/s. A precision may lack the largest shapes.
    rates: dict[tuple[int, int], dict[str, float]] = {}
    for precision, of_precision in products.items():
        for product in of_precision:
            shape = (product.rows, product.inner)
            of_shape = rates.setdefault(shape, {})
            of_shape.setdefault(precision, product.rate)
    for (rows, width), of_shape in sorted(rates.items()):
        cells = []
        for precision in products:
            if precision in of_shape:
                cells.append(f"{of_shape[precision] / 1e9:,.1f}")
            else:
                cells.append("–")
        table.add_row(str(rows), str(width), *cells)
    return table


def _bytes_table(calibration: Calibration) -> Table:
    """Return a table of the latency and the bandwidth of all that moves bytes."""
    table = Table("what", "ranks", "latency, µs", "GB/s", title="bytes", box=box.SIMPLE)
    if calibration.memory:
        table.add_row("memory, copied", "", "", f"{calibration.memory / 1e9:,.2f}")

    def add(name: str, group: str, line: CostLine) -> None:
        microseconds = line.latency * 1e6
        gb_per_s = line.bandwidth / 1e9
        table.add_row(name, group, f"{microseconds:,.0f}", f"{gb_per_s:,.2f}")

    by_ranks = sorted((ranks, kind) for kind, ranks in calibration.collectives)
    for ranks, kind in by_ranks:
        add(kind.replace("_", "-"), str(ranks), calibration.collectives[kind, ranks])
    for name, line in calibration.host.items():
        add(name.replace("_", " "), "", line)
    for precision, (forward, backward) in calibration.operators.items():
        add(f"block forward, {precision}", "", forward)
        add(f"block backward, {precision}", "", backward)
    for direction, line in calibration.disk.items():
        add(f"disk {direction}", "", line)
    return table


def main() -> None:
    """Measure as one rank, by the task in the file that the first argument names."""
    with exit_on_error():
        task = Task(**json.loads(Path(sys.argv[1]).read_text()))
        # A rank that hangs in a call of C ends here, whatever the other ranks do.
        faulthandler.dump_traceback_later(task.limits.rank_seconds, exit=True)
        backend = "gloo"
        if task.device == "cuda":
            backend = "nccl"
        ranks = start(task.device, backend, TIMEOUT)
        try:
            calibration = measure(task, ranks)
        except BaseException as error:
            record_failure(error)
            raise
        finally:
            stop()
        if ranks.rank == 0:
            # The launcher writes the time, together with the names of the hardware.
            write(calibration, Path(task.out), measured_at="now", quick=task.quick)


def measure(task: Task, ranks: RankInfo) -> Calibration:
    """Measure on every rank, and return one calibration for all ranks. Collective.

    Only rank 0's result is complete, since it alone measures the disk.
    """
    # The default of precision.tf32.
    torch.backends.cuda.matmul.allow_tf32 = True
    # All ranks compute at the same time, as in training.
    if dist.is_initialized():
        dist.barrier()

    def seconds_of(call: Callable[[], Any]) -> float:
        return _time_call(call, task)

    own_products = measure_products(task)
    own_memory = measure_memory(task)
    dtypes = {precision: DTYPES[precision] for precision in own_products}
    own_blocks = besides_products(task.device, own_products, dtypes, seconds_of)
    host: dict[str, CostLine] = {}
    if task.device == "cuda":
        host = measure_host_copies(task)
    disk: dict[str, CostLine] = {}
    if ranks.rank == 0:
        disk = measure_disk(task)
    # All ranks measured at the same time. Ranks on a CPU share it, so their rates are added. Of
    # several GPUs the slowest counts, since the others wait for it in each step.
    combine: Callable[[list[float]], float] = sum
    if task.device == "cuda":
        combine = min
    products_of_ranks = []
    memory_of_ranks = []
    blocks_of_ranks = []
    for rank_products, rank_memory, rank_blocks in gather_from_ranks(
        (own_products, own_memory, own_blocks)
    ):
        products_of_ranks.append(rank_products)
        memory_of_ranks.append(rank_memory)
        blocks_of_ranks.append(rank_blocks)
    products = {}
    matmul = {}
    for precision in own_products:
        products[precision] = _combine_products(products_of_ranks, precision, combine)
        matmul[precision] = rate_of_large(products[precision])
    # The latency and the bandwidth of a block's operators belong together, so both are taken from
    # the slowest rank.
    operators = {}
    for precision in own_blocks:
        lines = [blocks[precision] for blocks in blocks_of_ranks]
        operators[precision] = max(lines, key=_latency_of_backward)
    memory = combine(memory_of_ranks)
    return Calibration(
        matmul=matmul,
        memory=memory,
        collectives=measure_collectives(task, ranks),
        host=host,
        operators=operators,
        disk=disk,
        ranks=ranks.world_size,
        products=products,
    )


def _latency_of_backward(lines: tuple[CostLine, CostLine]) -> float:
    """Return the latency of backward. `lines`: (forward, backward)."""
    _, backward = lines
    return backward.latency


def _combine_products(
    products_of_ranks: list[Products], precision: str, combine: Callable[[list[float]], float]
) -> tuple[Product, ...]:
    """Return the matrix products that every rank has measured, each with one rate for all ranks.

    Args:
        products_of_ranks: What each rank measured.
        precision: A key of DTYPES.
        combine: Returns one rate for the rates of all ranks.
    """
    of_ranks = [products[precision] for products in products_of_ranks]
    combined = []
    # A rank on which products are too slow has measured fewer.
    for same_shape in zip(*of_ranks, strict=False):
        rate = combine([product.rate for product in same_shape])
        combined.append(replace(same_shape[0], rate=rate))
    return tuple(combined)


def measure_products(task: Task) -> Products:
    """Return the FLOP/s of products (rows × width) · (width × width) in the device's precisions."""
    products = {}
    for precision, dtype in DTYPES.items():
        # A GPU without bf16 emulates it, far slower than training would ever run.
        if precision == "bf16" and task.device == "cuda" and not task.bf16:
            continue
        measured: list[Product] = []
        for rows, width in task.shapes:
            flop = 2.0 * rows * width * width
            # Shapes come from small to large, so all that follow would take longer still.
            if measured and flop / measured[-1].rate > task.limits.product_seconds:
                break
            a = torch.randn(rows, width, device=task.device).to(dtype)
            b = torch.randn(width, width, device=task.device).to(dtype)
            seconds = _time_call(partial(torch.matmul, a, b), task)
            measured.append(Product(rows, width, width, flop / seconds))
        products[precision] = tuple(measured)
    return products


def rate_of_large(measured: Sequence[Product]) -> float:
    """Return the best FLOP/s among products of at least a quarter of the largest one's FLOPs."""
    flops = []
    for product in measured:
        flops.append(product.rows * product.inner * product.columns)
    largest = max(flops)
    rates = []
    for product, flop in zip(measured, flops, strict=True):
        if 4 * flop >= largest:
            rates.append(product.rate)
    return max(rates)


def measure_memory(task: Task) -> float:
    """Return the bytes/s of a copy within the device's memory. Bytes read and written both count."""
    bytes_ = COPIED[task.device]
    source = torch.ones(bytes_ // FP32_BYTES, device=task.device)
    target = torch.ones(bytes_ // FP32_BYTES, device=task.device)
    seconds = _time_call(partial(target.copy_, source), task)
    return 2 * bytes_ / seconds


def measure_host_copies(task: Task) -> dict[str, CostLine]:
    """Return latency and bandwidth of copies between pinned memory and the device."""
    to_device = []
    to_host = []
    for bytes_ in task.sizes:
        here = torch.ones(bytes_ // FP32_BYTES).pin_memory()
        there = torch.ones(bytes_ // FP32_BYTES, device=task.device)
        seconds = _time_call(partial(there.copy_, here, non_blocking=True), task)
        to_device.append((bytes_, seconds))
        seconds = _time_call(partial(here.copy_, there, non_blocking=True), task)
        to_host.append((bytes_, seconds))
    return {"to_device": line_through(to_device), "to_host": line_through(to_host)}


def measure_disk(task: Task) -> dict[str, CostLine]:
    """Return latency and bandwidth of writing and reading a file.

    The time of writing ends when the file is on the disk. Before it is read, the kernel is asked to
    drop it from its cache.
    """
    written = []
    read = []
    for bytes_ in (MIB, 16 * MIB, LARGEST_FILE[task.quick]):
        # Random, so that no file system can compress it much.
        data = os.urandom(MIB) * (bytes_ // MIB)
        with tempfile.NamedTemporaryFile(dir=task.folder, prefix="calibrate-") as file:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            written.append((bytes_, seconds))
            # macOS lacks this call, so there the file is read from the kernel's cache.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, bytes_, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(4 * MIB):
                pass
            seconds = time.perf_counter() - began
            read.append((bytes_, seconds))
    return {"write": line_through(written), "read": line_through(read)}


def measure_collectives(task: Task, ranks: RankInfo) -> dict[tuple[str, int], CostLine]:
    """Return (kind, number of ranks) → latency and bandwidth of each kind of collective. Collective.

    The groups are the first 2, 4, … ranks and all ranks; ranks outside of a group wait for it.
    Bytes are counted as telemetry counts those of a run (`CommunicatedBytes`).
    """
    lines = {}
    for group_size in group_sizes(ranks.world_size):
        # Every rank must call new_group, also if it is not in the group.
        group = dist.new_group(range(group_size))
        if ranks.rank < group_size:
            for kind in KINDS:
                lines[kind, group_size] = _measure_collective(kind, group_size, group, task)
        dist.barrier()
    if ranks.world_size > 1:
        points = []
        for bytes_ in task.sizes:
            points.append(_time_p2p(bytes_, ranks.rank, task))
        lines["p2p", 2] = line_through(points)
    return lines


def _measure_collective(kind: str, group_size: int, group: Any, task: Task) -> CostLine:
    """Return latency and bandwidth of a collective, for the bytes that one rank sends."""
    points = []
    for bytes_ in task.sizes:
        call = _make_collective(kind, bytes_, group_size, group, task.device)
        points.append(_time_collective(call, group, task))
    return line_through(points)


def _make_collective(
    kind: str, bytes_: int, group_size: int, group: Any, device: str
) -> Callable[[], Any]:
    """Return a function that calls a collective on tensors in fp32.

    Args:
        kind: One of KINDS.
        bytes_: Bytes of the larger of input and output, rounded down to whole entries of each rank.
        group_size: Number of ranks in the group.
        group: The process group.
        device: The device of the tensors.
    """
    entries_of_rank = bytes_ // FP32_BYTES // group_size
    whole = torch.zeros(entries_of_rank * group_size, device=device)
    part = torch.zeros(entries_of_rank, device=device)
    other = torch.zeros_like(whole)
    calls = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, other, whole, group=group),
    }
    return calls[kind]


def _time_collective(call: Callable[[], Any], group: Any, task: Task) -> tuple[float, float]:
    """Return (bytes that a rank sends, seconds of the fastest of several calls).

    All ranks of the group start each call together.
    """
    # The first call also opens connections, so it is not timed.
    with CommunicatedBytes() as sent:
        call()
    times = []
    for _ in range(task.limits.collective_calls):
        dist.barrier(group)
        _synchronize(task.device)
        began = time.perf_counter()
        call()
        _synchronize(task.device)
        seconds = time.perf_counter() - began
        times.append(seconds)
    return sent.total, min(times)


def _time_p2p(bytes_: int, rank: int, task: Task) -> tuple[float, float]:
    """Return (bytes, seconds to send them from rank 0 to rank 1 or back). Collective.

    All other ranks wait at the barrier, and nothing reads their result.
    """
    tensor = torch.zeros(bytes_ // FP32_BYTES, device=task.device)
    seconds = 1.0
    if rank < 2:
        times = []
        # One more than is needed, since the first opens the connection.
        for _ in range(task.limits.collective_calls + 1):
            began = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    dist.send(tensor, 1 - rank)
                else:
                    dist.recv(tensor, 1 - rank)
            _synchronize(task.device)
            times.append((time.perf_counter() - began) / 2)
        seconds = min(times)
    dist.barrier()
    return bytes_, seconds


def _time_call(call: Callable[[], Any], task: Task) -> float:
    """Return the seconds of a call: those of the fastest sample, since other work only adds time.

    On a CPU a sample is one call, on a GPU a batch of them (see SAMPLE_SECONDS).
    """
    # The first call loads kernels and starts threads.
    _mean_seconds(call, 1, task.device)
    calls = 1
    if task.device == "cuda":
        seconds_of_one = _mean_seconds(call, 1, task.device)
        calls = max(1, int(SAMPLE_SECONDS / seconds_of_one))
    limits = task.limits
    times: list[float] = []
    spent = 0.0
    while spent < limits.most_seconds and (len(times) < SAMPLES or spent < limits.least_seconds):
        seconds = _mean_seconds(call, calls, task.device)
        times.append(seconds)
        spent += calls * seconds
    return min(times)


def _mean_seconds(call: Callable[[], Any], calls: int, device: str) -> float:
    """Return the mean seconds of `calls` calls in a row."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - began) / calls


def _synchronize(device: str) -> None:
    """Wait until the device has finished all work that was started on it."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
