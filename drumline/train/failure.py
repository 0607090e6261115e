"""How a rank ends when something is raised: reported once, noted for the launcher, then the exit code that errors.py gives it. Memory that
runs out is recognised and measured at once; the advice is `train.replan`'s."""

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

from drumline.core.files import write_whole
from drumline.core.out_of_memory import Exhausted, is_out_of_memory
from drumline.core.output import say
from drumline.core.plan import Plan
from drumline.core.redact import redact, redacted_streams
from drumline.dist.start import leave_process
from drumline.errors import DrumlineError, Preempted
from drumline.foreign import class_and_line
from drumline.hardware.detect import detect
from drumline.parallel.engine import Engine
from drumline.telemetry import flight
from drumline.telemetry.measure import process_bytes

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
# Function → what it is about; of the stack's functions the innermost that stands here counts.
DOING = {
    "build": "loading", "restore": "loading", "forward_backward": "forward", "cross_entropy": "the loss", "log_probs": "the loss",
    "_engine_run_backward": "backward", "grad_norm": "clipping", "step": "the optimizer's step", "save": "saving",
    "evaluate": "evaluation", "generate": "the rollout",
}  # fmt: skip


class OutOfMemory(DrumlineError):
    """A rank ran out of memory; `exhausted` has what was known then."""

    def __init__(self, exhausted: Exhausted, advice: str) -> None:
        super().__init__(
            f"rank {exhausted.rank} {exhausted.describe()}",
            fix=None if exhausted.allocated is not None else advice,
        )
        self.exhausted = exhausted


class Watched:
    """What is looked at when memory runs out: the engine, once there is one, and what the process had before the model came."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.engine: Engine | None = None
        self.before = process_bytes()

    def built(self, engine: Engine) -> None:
        """The model is there. What the process has besides it is counted from here: building it has imported a lot."""
        self.engine = engine
        states = sum(engine.memory_stats())
        self.before = {name: bytes_ - states for name, bytes_ in process_bytes().items()}

    def measured(self, error: BaseException) -> Exhausted:
        """Bytes at the moment of `error`, as far as they are known."""
        stats = {} if self.engine is None else self.engine.memory_stats()._asdict()
        during = doing(error.__traceback__)
        known = (
            reported_by_cuda(str(error)) if self.plan.device == "cuda" else self._on_cpu(str(error))
        )
        return Exhausted(rank=self.rank, during=during, memory_stats=stats, **known)

    def _on_cpu(self, message: str) -> dict[str, int]:
        """By the kernel's counts of this process: tensors took the difference between its largest resident set and its first."""
        now = process_bytes()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.plan.mesh.world_size))  # of this host
        rooms = [detect().memory_bytes // ranks - self.before["VmRSS"]]
        for limit, count in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                rooms.append(soft - self.before[count])
        known = {
            "allocated": max(0, now["VmHWM"] - self.before["VmRSS"]),
            "room": max(0, min(rooms)),
        }
        if requested := re.search(r"allocate (\d+) bytes", message):
            known["requested"] = int(requested[1])
        return known


@contextmanager
def watched(plan: Plan, rank: int) -> Iterator[Watched]:
    """Around a rank's work: memory that runs out is raised as OutOfMemory, measured before anything is taken down."""
    watch = Watched(plan, rank)
    try:
        yield watch
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            watch.measured(error), f"{type(error).__name__}: {error}".splitlines()[0]
        ) from error


def let_go(error: BaseException | None) -> None:
    """Free what the frames of an error, and of those it came from, hold: the model, its gradients, a batch's activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()  # engines and loops know each other


def doing(stack: TracebackType | None) -> str:
    """What the code at the end of a stack was about."""
    message = "loading"
    while stack is not None:
        name = stack.tb_frame.f_code.co_name
        message = DOING.get(name, message)
        stack = stack.tb_next
    return message


def reported_by_cuda(message: str) -> dict[str, int]:
    """The numbers in the message of CUDA's caching allocator, in bytes, as far as it has them."""
    found = {
        "requested": rf"Tried to allocate {_SIZE}",
        "free": rf"of which {_SIZE} is free",
        "allowed": rf"{_SIZE} allowed;",
        "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        "idle": rf"{_SIZE} is reserved by PyTorch but unallocated",
    }
    values = {
        name: round(float(m[1]) * UNITS[m[2]])
        for name, pattern in found.items()
        if (m := re.search(pattern, message))
    }
    known: dict[str, int] = {
        name: values[name] for name in ("requested", "allocated") if name in values
    }
    if "allocated" in values and "idle" in values:
        known["reserved"] = values["allocated"] + values["idle"]
        known["room"] = min(known["reserved"] + values.get("free", 0), values.get("allowed", 2**62))
    return known


_noted = False


def fresh() -> None:
    """A session begins in this process: `note` has its first error still to come."""
    global _noted
    _noted = False


def note(error: BaseException) -> None:
    """Print an exception to the rank's log and write it to the file that the elastic agent reads; the first one of a process only.

    What comes after the first is a consequence of it. A DrumlineError is its line and its exit code; anything else comes with its
    traceback, and so does an OutOfMemory: in the log, besides its line.
    """
    global _noted
    if _noted:
        return
    _noted = True
    more: dict[str, object] = {}
    if isinstance(error, OutOfMemory):
        more = {"exhausted": error.exhausted.model_dump()}
        say("".join(traceback.format_exception(error.__cause__)))
    if isinstance(error, DrumlineError):
        message, text, code = error.line(), "", error.rank_code or error.exit_code
        say(f"{'stopped' if isinstance(error, Preempted) else 'error'}: {message}")
    else:
        message, text, code = (
            f"{class_and_line(error)}: {error}",
            "".join(traceback.format_exception(error)),
            1,
        )
        say(text)
        if dist.is_initialized() and (begun := flight.recent(most=1)):
            more = {"collective": flight.describe(begun[0])}
    if named := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _write(
            Path(named),
            {
                "message": redact(message),
                "traceback": redact(text),
                "time": time.time(),
                "exit_code": code,
                **more,
            },
        )


def _write(path: Path, noted: dict[str, object]) -> None:
    # The agent reads `message.message` and the call stack; the launcher reads our own part.
    stack = {
        "py_callstack": noted["traceback"] or noted["message"],
        "timestamp": str(int(time.time())),
    }
    try:  # the agent gives up on a file that is half written
        write_whole(
            path,
            json.dumps(
                {"message": {"message": noted["message"], "extraInfo": stack, "drumline": noted}}
            ),
        )
    except OSError as full:
        say(f"could not note the failure in {path}: {full}")


@contextmanager
def recording() -> Iterator[None]:
    """Around a rank's whole work: whatever is raised is noted and becomes the process's exit code."""
    try:
        with redacted_streams():
            yield
    except Exception as error:  # noqa: BLE001 - the outermost frame of a rank: reported in full, and the exit code is that of a failure
        note(error)
        leave_process(
            (error.rank_code or error.exit_code) if isinstance(error, DrumlineError) else 1
        )
