"""How a rank ends when something is raised: it reports the error once, and exits with its code.

The error is also written for the launcher. If memory has run out, it is measured at once, and
`train.replan` finds out what to change.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from drumline.dist.start import leave_process
from drumline.engine.engine import Engine
from drumline.errors import DrumlineError, Preempted
from drumline.foreign import class_and_line
from drumline.hardware.detect import detect
from drumline.plan.out_of_memory import Exhausted, is_out_of_memory
from drumline.plan.plan import Plan
from drumline.system.files import write_whole
from drumline.system.output import say
from drumline.system.redact import redact, redacted_streams
from drumline.telemetry import flight
from drumline.telemetry.measure import process_bytes

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
# Numbers in the message of CUDA's caching allocator.
CUDA_NUMBERS = {
    "requested": rf"Tried to allocate {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed;",
    "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
    "idle": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
NO_LIMIT = 2**62  # bytes
# Name of a function → what a message says was going on. Of the functions on a stack the innermost
# one of these counts.
ACTIVITIES = {
    "build": "loading",
    "restore": "loading",
    "forward_backward": "forward",
    "cross_entropy": "the loss",
    "log_probs": "the loss",
    "_engine_run_backward": "backward",
    "grad_norm": "clipping",
    "step": "the optimizer's step",
    "save": "saving",
    "evaluate": "evaluation",
    "generate": "the rollout",
}


class OutOfMemory(DrumlineError):
    """A rank ran out of memory. `exhausted` holds what was known at that moment."""

    def __init__(self, exhausted: Exhausted, original_message: str) -> None:
        """`original_message`: first line of the cause; shown as advice if no bytes were measured."""
        fix: str | None = None
        if exhausted.allocated is None:
            fix = original_message
        super().__init__(f"rank {exhausted.rank} {exhausted.describe()}", fix=fix)
        self.exhausted = exhausted


class MemoryWatch:
    """Measures a rank's memory when it has run out.

    For that it has to know the engine, and what the process holds besides the model.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.engine: Engine | None = None
        # Bytes that the process holds without the states of the model, by the kernel's counts
        # (VmRSS, VmData, VmSize).
        self.bytes_without_model = process_bytes()

    def set_engine(self, engine: Engine) -> None:
        """Take the engine that was built, and count what the process holds besides the model.

        It is counted only now, because building an engine imports a lot.
        """
        self.engine = engine
        states = sum(engine.memory_stats())
        self.bytes_without_model = {
            name: bytes_ - states for name, bytes_ in process_bytes().items()
        }

    def measure(self, error: BaseException) -> Exhausted:
        """Return the bytes at the moment of `error`, as far as they are known."""
        stats: dict[str, int] = {}
        if self.engine is not None:
            stats = self.engine.memory_stats()._asdict()
        if self.plan.device == "cuda":
            known = parse_cuda_message(str(error))
        else:
            known = self._measure_host(str(error))
        during = describe_stack(error.__traceback__)
        return Exhausted(rank=self.rank, during=during, memory_stats=stats, **known)

    def _measure_host(self, message: str) -> dict[str, int]:
        """Return allocated, available (`room`) and requested bytes, as the kernel counts them.

        What was allocated is the largest resident set minus that without the model. `message`: of
        the error.
        """
        now = process_bytes()
        ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.plan.mesh.world_size))
        bytes_without_model = self.bytes_without_model
        memory_per_rank = detect().memory_bytes // ranks_of_host
        # What each limit leaves for the model.
        available_bytes = [memory_per_rank - bytes_without_model["VmRSS"]]
        for limit, count in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                available_bytes.append(soft - bytes_without_model[count])
        known = {
            "allocated": max(0, now["VmHWM"] - bytes_without_model["VmRSS"]),
            "room": max(0, min(available_bytes)),
        }
        requested = re.search(r"allocate (\d+) bytes", message)
        if requested is not None:
            known["requested"] = int(requested[1])
        return known


@contextmanager
def convert_out_of_memory(plan: Plan, rank: int) -> Iterator[MemoryWatch]:
    """Return a context that raises OutOfMemory in place of the error of memory that has run out.

    Memory is measured first, while the model is still there.
    """
    memory_watch = MemoryWatch(plan, rank)
    try:
        yield memory_watch
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OutOfMemory(memory_watch.measure(error), first_line) from error


def release_frames(error: BaseException | None) -> None:
    """Free what the stack frames of an error and of its causes hold.

    That is the model, its gradients, and the activations of a batch.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    # Engines and loops refer to each other.
    gc.collect()


def describe_stack(stack: TracebackType | None) -> str:
    """Return what was going on at the end of a stack, one of `ACTIVITIES`."""
    message = "loading"
    while stack is not None:
        name = stack.tb_frame.f_code.co_name
        message = ACTIVITIES.get(name, message)
        stack = stack.tb_next
    return message


def parse_cuda_message(message: str) -> dict[str, int]:
    """Return the bytes in the message of CUDA's caching allocator, as far as it has them."""
    values: dict[str, int] = {}
    for name, pattern in CUDA_NUMBERS.items():
        match = re.search(pattern, message)
        if match is not None:
            values[name] = round(float(match[1]) * UNITS[match[2]])
    known: dict[str, int] = {}
    for name in ("requested", "allocated"):
        if name in values:
            known[name] = values[name]
    if "allocated" in values and "idle" in values:
        reserved = values["allocated"] + values["idle"]
        known["reserved"] = reserved
        known["room"] = min(reserved + values.get("free", 0), values.get("allowed", NO_LIMIT))
    return known


# Whether `record_failure` was called in this process, or since its session began.
_has_recorded_failure = False


def forget_first_error() -> None:
    """Let `record_failure` record again. Called when a session begins in this process."""
    global _has_recorded_failure
    _has_recorded_failure = False


def record_failure(error: BaseException) -> None:
    """Print an exception to the rank's log, and write it to the file that the elastic agent reads.

    Only the first exception of a process counts: what comes after it is a consequence. Of a
    DrumlineError its line is printed, and of anything else the traceback; of an OutOfMemory both.
    """
    global _has_recorded_failure
    if _has_recorded_failure:
        return
    _has_recorded_failure = True
    more: dict[str, object] = {}
    trace = ""
    if isinstance(error, OutOfMemory):
        more["exhausted"] = error.exhausted.model_dump()
        say("".join(traceback.format_exception(error.__cause__)))
    if isinstance(error, DrumlineError):
        message = error.line()
        kind = "stopped" if isinstance(error, Preempted) else "error"
        say(f"{kind}: {message}")
    else:
        message = f"{class_and_line(error)}: {error}"
        trace = "".join(traceback.format_exception(error))
        say(trace)
        newest = flight.recent(most=1) if dist.is_initialized() else []
        if newest:
            more["collective"] = flight.describe(newest[0])
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        facts = {
            "message": redact(message),
            "traceback": redact(trace),
            "time": time.time(),
            "exit_code": _exit_code(error),
            **more,
        }
        _write(Path(path), facts)


def _exit_code(error: BaseException) -> int:
    """Return the code with which a rank exits after an error."""
    if isinstance(error, DrumlineError):
        return error.rank_code or error.exit_code
    return 1


def _write(path: Path, facts: dict[str, object]) -> None:
    """Write a failure to the file that torch's elastic agent reads.

    The agent reads `message.message` and the call stack. Our launcher reads `message.drumline`.
    """
    extra = {
        "py_callstack": facts["traceback"] or facts["message"],
        "timestamp": str(int(time.time())),
    }
    content = {"message": {"message": facts["message"], "extraInfo": extra, "drumline": facts}}
    try:
        # The agent gives up on a file that is half written.
        write_whole(path, json.dumps(content))
    except OSError as full:
        say(f"could not note the failure in {path}: {full}")


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Return a context that records an error, and ends the process with its exit code."""
    try:
        with redacted_streams():
            yield
    except Exception as error:  # noqa: BLE001 - the outermost frame of a rank: reported in full, and the exit code is that of a failure
        record_failure(error)
        leave_process(_exit_code(error))
