"""events.jsonl: one JSON object a line, appended and flushed at once. It is the truth of a run; displays and trackers only repeat it.

Each kind of event is a class. On disk its fields are beside `t` (unix seconds), `kind`, and what it has besides (`metrics`).
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, dataclass_transform

from drumline.core.files import following
from drumline.core.redact import plain
from drumline.errors import EnvironmentFault
from drumline.foreign import open_plain, read_bytes
from drumline.telemetry.damage import fits, parse, types_of
from drumline.telemetry.truth import Measurement

MOVE = "move it away: a run writes its events there"
MOST_EVENTS = 2**33  # bytes: some ten million steps
LAST_BYTES = 2**18
MOST_TIME = 2**40  # unix seconds: what lies above is no time
KINDS: dict[str, type[Event]] = {}
# JSON has no NaN, which is null here, and no infinity, which is a string.
Number = float | str | None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run. A field is None where an older version of Drumline did not write it."""

    kind: ClassVar[str]
    types: ClassVar[dict[str, tuple[str, frozenset[type], Any]]]  # as `types_of` has them
    on_disk: ClassVar[set[str]]
    t: float = field(default_factory=time.time)  # unix seconds
    # What this one has besides the fields of its kind.
    metrics: dict[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        KINDS[kind] = dataclass(frozen=True, kw_only=True)(cls)
        cls.types = types_of(cls, cls.names())
        cls.on_disk = {"t", "kind", *(there for there, _, _ in cls.types.values())}

    @classmethod
    def names(cls) -> list[str]:
        """The fields of the kind. On disk `from_` is called `from`."""
        return [each.name for each in fields(cls) if each.name not in ("t", "metrics")]

    def values(self) -> dict[str, Any]:
        """The event as it is on disk. A metric that is called like a field is left out."""
        own = {
            "t": self.t,
            "kind": self.kind,
            **{name.removesuffix("_"): getattr(self, name) for name in self.names()},
        }
        return {**own, **{key: value for key, value in self.metrics.items() if key not in own}}

    @staticmethod
    def of(values: dict[str, Any]) -> Event:
        """The event that is `values` on disk; `Unknown` for a kind that this version does not know. What is of another type than the kind
        declares is None."""
        cls = KINDS.get(values["kind"], Unknown)
        known = dict[str, Any]()
        for name, (there, plain_types, kind) in cls.types.items():
            value = values.get(there)
            known[name] = value if type(value) in plain_types or fits(value, kind) else None
        return cls(
            t=values.get("t", 0.0),
            metrics={key: value for key, value in values.items() if key not in cls.on_disk},
            **known,
        )

    @property
    def whole(self) -> bool:
        """Whether each field that was there from the beginning has a value: one of another version, or a damaged one, may lack some."""
        needed = (
            each.name
            for each in fields(self)
            if each.default is MISSING and each.default_factory is MISSING
        )
        return all(
            getattr(self, name) is not None or NoneType in self.types[name][1] for name in needed
        )


class Unknown(Event, kind=""):
    """Of a newer version."""

    kind: str  # type: ignore[misc]


class RunStart(Event, kind="run_start"):
    world_size: int  # processes
    steps: int | None  # optimizer steps of the whole run
    parameters: int | None  # of the model; null where unknown
    strategy: str  # how the model is spread
    device: str  # cpu or cuda
    run_dir: str
    resumed_from: str | None  # the argument of --resume; null for a fresh start
    plan_line: str  # the plan in words
    left_out: list[str]  # how many rows of the data were cut, dropped or skipped
    writes: bool = False  # the model writes text: `drumline chat RUN` talks to it
    # Large weights that `all-linear` does not adapt or QLoRA does not pack, in words.
    unadapted: list[str] = field(default_factory=list)
    # Rank 0's host, system and devices, and the versions of what trains.
    environment: dict[str, str] = field(default_factory=dict)


class Planned(Event, kind="planned"):
    """What was predicted."""

    # Bytes by category, on the fullest rank, as core.estimate.Memory has them; `phase`: where its peak lies.
    memory: dict[str, Any]
    host: dict[str, int]  # bytes of one host, all its ranks: {load, train, save}
    seconds: dict[str, float]  # of a step, by category, and their `total`
    # Bytes that a rank sends in a step, by kind of collective, and their `total`.
    traffic: dict[str, float]
    verdict: str  # fits, tight or no
    limit: int | None  # bytes of a device's memory
    calibrated: bool  # seconds are by rates that were measured here


class Measured(Event, kind="measured"):
    """`metrics`: those of a Measurement."""

    # Category → measured / predicted − 1, of memory, `host PHASE`, traffic, seconds; empty without a prediction.
    off: dict[str, float]
    # Categories that are off by more than 15%, of those that count (notes say which do not).
    warned: list[str]
    warnings: list[str]  # a line for each of them: predicted, measured, by how much
    notes: list[str]  # what could not be measured or compared, and why

    def measurement(self) -> Measurement:
        """Raises ValueError for an event of another version."""
        return Measurement.model_validate(
            {name: self.metrics[name] for name in Measurement.model_fields if name in self.metrics}
        )


class Step(Event, kind="step"):
    """`metrics`: an algorithm's own; of a mixture of experts whose router loss is trained `router_loss` (a part of `loss`, without its
    coefficient) and `expert_load`: each expert's share of all choices."""

    step: int  # optimizer steps done, from 1; one that is done again after a restart has a second event, and the last one counts
    loss: Number  # mean over the tokens of the global batch that carry loss
    lr: float  # learning rate of this step
    grad_norm: Number  # global L2 norm before clipping
    tokens: int  # real tokens of the global batch, padding not counted
    samples: int  # samples (packs, where packing is on) of the global batch
    tokens_per_s: float  # over all ranks
    samples_per_s: float  # over all ranks
    mfu: float | None  # model FLOPs a second over the devices' peak; null where the peak is unknown
    seconds: float  # of the step, waiting for data included
    data_s: float  # seconds waiting for data, mean over ranks
    compute_s: float  # what is left of the seconds, mean over ranks
    # Seconds waiting for other ranks, mean over ranks; null where that is not measured and counts as computing.
    comm_s: float | None
    # That a rank sends to others in such a step, mean over ranks: counted at the collectives of one step of each kind, by the ring
    # algorithm's shares (all-reduce of S bytes over n ranks: 2 (n - 1) / n × S); null until one was counted.
    sent_bytes: int | None
    # Of each rank: the allocator's peak on a GPU, the resident set on a CPU.
    memory_bytes: list[int]
    epoch: float  # passes over the training samples so far


class Eval(Event, kind="eval"):
    """`metrics`: those of the held-out data."""

    step: int  # steps done before it
    samples: int  # held-out samples, or prompts
    seconds: float  # it took
    reward_failures: Mapping[str, Mapping[str, int]] | None = (
        None  # reward → reason → held-out answers that it cost; null: none
    )


def has_tokens(tokens: float | None, samples: float | None) -> bool:
    """Whether a step's samples have several tokens: of a module of the user's own a sample may be all there is to count."""
    if tokens is None:  # an event of another version
        return True
    return tokens != samples


def has_groups(prompts: float | None, episodes: float | None) -> bool:
    """Whether a rollout has several completions of a prompt, whose rewards are compared."""
    return (episodes or 0) > (prompts or 0)


class Rollout(Event, kind="rollout"):
    """`metrics`: reward/DOMAIN, and those of the KL penalty."""

    step: int  # steps done after those that learn from it
    prompts: int
    drawn: int  # prompts that were rolled out for it; more than `prompts` where dynamic sampling passed over some
    episodes: int
    reward: Number  # mean over its episodes; null if none has one
    reward_std: Number  # standard deviation over its episodes; null if none has a reward
    groups_differ: Number  # part of the groups whose rewards are not all alike; null if no episode has a reward
    left_out: int = 0  # episodes to which no reward applies
    # Reward → mean of its values, without its weight, as last sampled.
    rewards: Mapping[str, Number]
    shares: dict[str, float]  # domain → part of the episodes
    # Reward → reason → episodes that it cost, as last sampled.
    failures: Mapping[str, Mapping[str, int]]
    length: float  # mean tokens of a completion
    length_max: float  # tokens of the longest
    ended: (
        float  # part of the completions that came to their end, and were not cut at max_new_tokens
    )
    generate_s: float  # seconds that sampling took on rank 0, waiting for others included
    reward_s: float  # seconds of scoring
    infer_s: float  # seconds for log-probs, values and the reference's
    train_s: float  # seconds of the steps that learned from it
    # Mean difference of log-probs (nats) between what sampled it and the policy, on a probe after the hand-over of weights; null where
    # the policy itself samples, or a server keeps its own weights.
    sampler_gap: float | None = None
    trained: bool = (
        True  # whether steps learned from it; where its rewards end the run, `step` is not reached
    )


class Save(Event, kind="save"):
    step: int  # of the state saved
    path: str | None  # the checkpoint; null where it failed
    seconds: float  # until it was whole on disk
    bytes: int  # written by all ranks
    blocked_seconds: float  # that training stood still for it
    error: str | None  # why it failed, or what was lost besides


class Reference(Event, kind="reference"):
    """The reference model's log-probabilities of the pairs' answers are known now."""

    data: str  # train or eval
    pairs: int
    found: bool  # they were computed before, and read
    path: str  # the table of them
    seconds: float  # it took


class Started(Event, kind="started"):
    """After the first step of a process."""

    # By part: imports and plan (a rank is there before it), processes (joining), model, data, first step.
    seconds: dict[str, float]


class Restore(Event, kind="restore"):
    step: int  # that the run goes on after
    path: str | None  # the checkpoint; null where there was none yet
    seconds: float  # it took
    skipped: list[dict[str, str]]  # damaged checkpoints passed over: [{path, reason}]


class Nonfinite(Event, kind="nonfinite"):
    step: int  # whose update was not made
    policy: str  # stop, skip or rescale (fp16)
    loss: Number
    grad_norm: Number
    sample_ids: list[int]  # of its global batch


class Fault(Event, kind="fault"):
    attempt: int  # count of starts before this one
    rank: int  # that failed first
    host: str | None = None  # of that rank, where there are several
    signal: str | None  # that killed it
    exitcode: int | None  # of that rank
    error: str  # in one line
    log: str  # file with what the rank printed
    step: int  # the last one done
    action: str  # restart, replan, or stop and why
    cause: str | None = None  # the likely cause and its fix, if the doctor knows such an error


class Replan(Event, kind="replan"):
    from_: str  # what is left behind, as keys of the YAML
    to: str  # what the run goes on with, as keys of the YAML
    why: str  # which memory ran out, and what was wrong of the plan
    predicted_bytes: dict[str, int]  # of a device: {from, to}, peak of tensors
    plan: str  # file of the plan that was left; plan.json is the new one
    step: int  # the last one done


class Takeover(Event, kind="takeover"):
    """The launcher has gone, and another host's goes on with the run."""

    host: str  # whose launcher goes on
    from_: str  # the host of the one that has gone
    why: str  # by what right: the lease of the run folder, or votes
    step: int  # the last one done, as far as this host knows


class Preempt(Event, kind="preempt"):
    step: int  # saved
    signal: str  # that requested it


class Exporting(Event, kind="exporting"):
    step: int  # the last one: the run is finished and its weights are saved, so what fails from here on is the export alone


class Export(Event, kind="export"):
    path: str | None  # the Hugging Face folder; null where the export failed
    seconds: float  # it took
    max_logit_difference: (
        Number  # between the trained model and the folder read back; null where the export failed
    )
    error: str | None = None  # why it failed, and what to do; the run is finished nevertheless


class Profiled(Event, kind="profile"):
    rank: int
    step: int  # the first one of those
    steps: int
    trace: str  # the file
    snapshot: str  # the file of the memory's history, or why there is none
    operators: list[dict[str, Any]]  # the dearest, see telemetry.profile


class RunEnd(Event, kind="run_end"):
    status: str  # finished, preempted, stopped or failed
    exit_code: int  # see errors.py
    step: int  # the last one done
    why: str | None = (
        None  # why it finished before its last step, or the error that ended it, in one line
    )
    kwh: Number = (
        None  # that the devices took, of this process's start on; null where no counter can be read
    )
    # Seconds of this process by purpose: {elapsed, productive, startup, save, restore, recompute, eval, other}.
    goodput: dict[str, float]


COUNTED = tuple(each.kind for each in (Step, Eval, Save, Restore, Rollout, Preempt, RunEnd))
Emit = Callable[[Event], object]


def last_measurement(events: list[Event]) -> Measurement | None:
    """The newest one with memory; None where the run was too short. Raises ValueError for a run of another version."""
    found = [
        event for event in events if isinstance(event, Measured) and event.metrics.get("memory")
    ]
    return found[-1].measurement() if found else None


class EventLog:
    """Appends events to a file. A run that was killed in the middle of a line goes on after it on a new one.

    A full disk costs no event and stops no run: what could not be written waits in memory for the next one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            torn = size > 0 and file.read(1) != b"\n"
        self._file = path.open("ab", buffering=0)
        self._waiting = b"\n" if torn else b""

    def emit(self, event: Event) -> Event:
        """Write one event and return it as it was written: redacted, with NaN as null and inf as a string."""
        values: dict[str, Any] = plain(event.values())
        self._waiting += (
            json.dumps(values, allow_nan=False, ensure_ascii=False).encode(
                errors="backslashreplace"
            )
            + b"\n"
        )
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return Event.of(values)


def read(path: Path) -> list[Event]:
    """All whole events of a file, in order; a line torn by a kill is passed over. None where there is no file."""
    return [event for _, event, _ in examined(path) if event is not None]


def examined(path: Path) -> list[tuple[int, Event | None, bool]]:
    """Of each line its number, from 1, its event (None where it is torn by a kill, or damaged), and whether all of that is sound."""
    lines = enumerate(_bytes(path).decode("utf-8", errors="replace").split("\n"), 1)
    return [(number, *_parsed(line)) for number, line in lines if line.strip()]


def _bytes(path: Path) -> bytes:
    """Of a file of events; none where there is no file. Raises EnvironmentFault."""
    return read_bytes(path, EnvironmentFault, MOVE, MOST_EVENTS) if os.path.lexists(path) else b""


def _parsed(line: str) -> tuple[Event | None, bool]:
    """The event of a line, and whether all of it is what it should be; None where the line is torn or lacks what readers need: a kind, a
    time and, for most kinds, a step."""
    values = parse(line)
    if values is None or not isinstance(values.get("kind"), str):
        return None, False
    if type(at := values.get("t", 0)) not in (int, float) or not 0 <= at < MOST_TIME:
        return None, False
    counted = values["kind"] in COUNTED
    if type(step := values.get("step", None if counted else 0)) is not int or step < (
        0 if counted else -1
    ):  # -1: before the first
        return None, False
    event = Event.of(values)
    return event, all(
        getattr(event, name) is not None or values.get(there) is None
        for name, (there, *_) in event.types.items()
    )


def last(path: Path, bytes_: int = LAST_BYTES) -> list[Event]:
    """The newest whole events of a file, as many as lie in its last bytes; none where there is no file."""
    try:
        with open_plain(path, EnvironmentFault) as file:
            file.seek(max(0, file.seek(0, 2) - bytes_))
            lines = file.read(bytes_).decode(errors="replace").split("\n")
    except (OSError, EnvironmentFault):
        return []
    return [event for line in lines if (event := _parsed(line)[0]) is not None]


def last_start(path: Path) -> int:
    """Where in a file of events the newest start of its run begins, in bytes; 0 where there is none. Raises EnvironmentFault."""
    text = _bytes(path)
    return text.rfind(b"\n", 0, max(0, text.rfind(b'"kind": "run_start"'))) + 1


def series(events: list[Event], name: str, kind: type[Event] = Step) -> dict[int, Any]:
    """Step → value, the last word on each step: one that was done again after a restart counts once."""
    found = [event.values() for event in events if isinstance(event, kind)]
    return {values["step"]: values[name] for values in found if name in values}


@contextmanager
def tail(path: Path, on_event: Emit, offset: int | None = None) -> Iterator[None]:
    """Within, each whole line that another process appends to a file of events goes to `on_event`; from `offset` on (bytes), or its end."""
    rest = b""

    def parse(piece: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            if (
                event := _parsed(line.decode(errors="replace"))[0]
            ) is not None:  # torn by a kill: the next line is whole again
                on_event(event)

    with following(path, parse, offset):
        yield
