"""events.jsonl: one JSON object a line, appended and flushed at once.

It is the source of truth of a run; displays and trackers only repeat it. Each kind of event is a
class. On disk its fields are beside `t` (unix seconds), `kind`, and what it has besides
(`metrics`).

The reference of events is made from the classes: a class's docstring describes the kind, and a
comment beside or above a field the field.
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

from drumline.errors import EnvironmentFault
from drumline.foreign import open_plain, read_bytes
from drumline.system.files import follow_file
from drumline.system.redact import redacted_json
from drumline.telemetry.damage import fits, parse, types_of
from drumline.telemetry.plan_accuracy import Measurement

MOVE = "move it away: a run writes its events there"
# Bytes of a file of events: about ten million steps.
MOST_EVENTS = 2**33
# Bytes of a file's end that `read_tail` reads.
LAST_BYTES = 2**18
# Unix seconds: a larger number is no time.
MOST_TIME = 2**40
# Name on disk → class, in the order in which the classes are declared. The kinds of
# `telemetry.watched` are among them as soon as that module is imported.
KINDS: dict[str, type[Event]] = {}
# JSON has no NaN, which is null here, and no infinity, which is a string.
Number = float | str | None


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    A field is None if an older version of Drumline did not write it.
    """

    # The name of the kind on disk.
    kind: ClassVar[str]
    # The fields of the kind, as `types_of` has them, and all their keys on disk.
    types: ClassVar[dict[str, tuple[str, frozenset[type], Any]]]
    on_disk: ClassVar[set[str]]
    # Unix seconds.
    t: float = field(default_factory=time.time)
    # What this one has besides the fields of its kind.
    metrics: dict[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls, kind: str) -> None:
        """Make a dataclass of each kind, and note it in KINDS."""
        cls.kind = kind
        KINDS[kind] = dataclass(frozen=True, kw_only=True)(cls)
        # Once for each kind, since they are needed for every line that is read.
        cls.types = types_of(cls, cls.names())
        keys = {key for key, _, _ in cls.types.values()}
        cls.on_disk = {"t", "kind", *keys}

    @classmethod
    def names(cls) -> list[str]:
        """Return the fields of this kind of event. On disk `from_` is called `from`."""
        names = [each.name for each in fields(cls)]
        return [name for name in names if name not in ("t", "metrics")]

    def values(self) -> dict[str, Any]:
        """Return the event as it is on disk. A metric with the name of a field is left out."""
        own: dict[str, Any] = {"t": self.t, "kind": self.kind}
        for name in self.names():
            own[name.removesuffix("_")] = getattr(self, name)
        # The fields keep their places and their values.
        return {**own, **self.metrics, **own}

    @staticmethod
    def from_values(values: dict[str, Any]) -> Event:
        """Return the event with these values on disk; `Unknown` for a kind that is not known here.

        A field whose value is of another type than the kind declares is None.
        """
        cls = KINDS.get(values["kind"], Unknown)
        known = dict[str, Any]()
        for name, (key, plain_types, declared) in cls.types.items():
            value = values.get(key)
            # Most values are plain ones, for which this is quick.
            is_right = type(value) in plain_types or fits(value, declared)
            known[name] = value if is_right else None
        metrics = {key: value for key, value in values.items() if key not in cls.on_disk}
        return cls(t=values.get("t", 0.0), metrics=metrics, **known)

    @property
    def is_complete(self) -> bool:
        """Return whether each field without a default has a value.

        An event of another version, or a damaged one, may lack some.
        """
        for each in fields(self):
            has_default = each.default is not MISSING or each.default_factory is not MISSING
            if has_default or getattr(self, each.name) is not None:
                continue
            _, plain_types, _ = self.types[each.name]
            if NoneType not in plain_types:
                return False
        return True


class Unknown(Event, kind=""):
    """An event of a newer version of Drumline."""

    kind: str  # type: ignore[misc]


class RunStart(Event, kind="run_start"):
    """The ranks begin. Each start of a run has such an event."""

    world_size: int  # processes
    steps: int | None  # optimizer steps of the whole run
    parameters: int | None  # number of the model's parameters; null if not known
    strategy: str  # how the model is spread
    device: str  # cpu or cuda
    run_dir: str
    resumed_from: str | None  # the argument of --resume; null for a fresh start
    plan_line: str  # the plan in words
    left_out: list[str]  # a line each on rows of the data that were cut, dropped or skipped
    # Whether the model can generate text, so that `drumline chat RUN` can talk to it.
    writes: bool = False
    # Large weights that `all-linear` does not adapt or QLoRA does not pack, in words.
    unadapted: list[str] = field(default_factory=list)
    # Rank 0's host, system and devices, and the versions of what trains.
    environment: dict[str, str] = field(default_factory=dict)


class Planned(Event, kind="planned"):
    """The plan's prediction of a rank's memory, seconds and traffic."""

    # Bytes by category, on the fullest rank, as in plan.estimate.Memory; `phase` is that of the
    # peak.
    memory: dict[str, Any]
    # Peak bytes of host memory, all ranks of one host together: {load, train, save}.
    host: dict[str, int]
    seconds: dict[str, float]  # of a step, by category, and their `total`
    # Bytes that a rank sends in a step, by kind of collective, and their `total`.
    traffic: dict[str, float]
    verdict: str  # fits, tight or no
    limit: int | None  # bytes of a device's memory
    calibrated: bool  # whether the seconds come from rates that were measured on this machine


class Measured(Event, kind="measured"):
    """Measurements of a run, compared with its plan. `metrics` are those of a Measurement."""

    # Category → measured / predicted − 1, of memory, `host PHASE`, traffic, seconds, and their parts;
    # empty without a prediction, and without categories of which 0 was predicted.
    off: dict[str, float]
    # Categories that are off by more than 15%, of those that count (notes say which do not).
    warned: list[str]
    warnings: list[str]  # a line for each of `warned`: predicted, measured, difference
    notes: list[str]  # what could not be measured or compared, and why

    def measurement(self) -> Measurement:
        """Return what was measured. Raises ValueError for an event of another version."""
        values = {}
        for name in Measurement.model_fields:
            if name in self.metrics:
                values[name] = self.metrics[name]
        return Measurement.model_validate(values)


class Step(Event, kind="step"):
    """An optimizer step was done.

    `metrics` are those of the algorithm. A mixture of experts also has `expert_load` (each expert's
    share of all choices), `expert_load_max_by_layer` (the tokens of each layer's fullest expert
    over the mean of its experts) and `expert_load_max` (of the worst layer). If its router loss is
    trained, it has `router_loss`, a part of `loss`, without its coefficient.
    """

    # Number of the step, from 1. A step that is done again after a restart has a second event, and
    # the last one counts.
    step: int
    loss: Number  # mean over the tokens of the global batch that carry loss
    lr: float  # learning rate of this step
    grad_norm: Number  # global L2 norm before clipping
    tokens: int  # real tokens of the global batch, padding not counted
    samples: int  # samples (packs, where packing is on) of the global batch
    tokens_per_s: float  # over all ranks
    samples_per_s: float  # over all ranks
    mfu: float | None  # model FLOPs a second over the devices' peak; null if the peak is not known
    seconds: float  # of the step, waiting for data included
    data_s: float  # seconds waiting for data, mean over ranks
    compute_s: float  # what is left of the seconds, mean over ranks
    # Seconds that a rank waits for other ranks, by the host's clock, mean over ranks; null if they
    # are not measured and so are a part of `compute_s`.
    comm_s: float | None
    # Bytes that a rank sends to others in such a step, mean over ranks; null until they are
    # counted. The collectives of one step of each kind are counted with the ring algorithm's
    # shares: an all-reduce of S bytes over n ranks sends 2 (n - 1) / n × S.
    sent_bytes: int | None
    # For each rank, the allocator's peak on a GPU, or the resident set on a CPU.
    memory_bytes: list[int]
    epoch: float  # passes over the training samples so far


class Eval(Event, kind="eval"):
    """An evaluation on the held-out data. `metrics` are its scores."""

    step: int  # number of steps before it
    samples: int  # held-out samples, or prompts
    seconds: float  # that the evaluation took
    # Number of held-out answers without a reward, by reward and reason; null for none.
    reward_failures: Mapping[str, Mapping[str, int]] | None = None


def has_tokens(tokens: float | None, samples: float | None) -> bool:
    """Return whether a step's samples have several tokens.

    Samples of a user's own module may have none, and then only samples are counted.
    """
    if tokens is None:
        # An event of another version.
        return True
    return tokens != samples


def has_groups(prompts: float | None, episodes: float | None) -> bool:
    """Return whether a rollout has several completions of a prompt, whose rewards are compared."""
    return (episodes or 0) > (prompts or 0)


class Rollout(Event, kind="rollout"):
    """Episodes were sampled, for steps to train on.

    `metrics` are reward/DOMAIN, and those of the KL penalty. With an environment also the means of
    `turns`, `tool_calls` and `tool_errors` over the episodes. If the policy's log-probs were computed
    before the first step, also `sampler_log_ratio`, the mean of log π/π_sampler over all sampled tokens
    in nats, and `sampler_log_ratio_max`, its largest absolute value. The events of the steps of grpo and
    ppo always have both. Those of gkd and online_dpo have them with `ahead` and if anything but hf
    samples; π is then the policy at that step.
    """

    step: int  # number of optimizer steps once all that train on this rollout are done
    prompts: int  # prompts that are trained on
    # Prompts that were sampled; more than `prompts` if dynamic sampling dropped some.
    # With gkd the rows of `from_rows` are counted, too.
    drawn: int
    episodes: int  # 0 if gkd learns the completions of rows alone
    reward: Number  # mean over its episodes; null if none has one
    reward_std: Number  # standard deviation over its episodes; null if none has a reward
    groups_differ: Number  # part of the groups whose rewards are not all alike; null if no episode has a reward
    left_out: int = 0  # number of episodes to which no reward applies
    # gkd: number of rows whose own completion is learned, besides the episodes.
    from_rows: int = 0
    # Name of a reward → its mean over the episodes, not multiplied by its weight. With dynamic
    # sampling, of the last draw of prompts alone.
    rewards: Mapping[str, Number]
    shares: dict[str, float]  # share of the episodes by domain
    # Name of a reward, or `environment` → reason → number of episodes for which it failed, of the
    # same draw.
    failures: Mapping[str, Mapping[str, int]]
    # Mean tokens of a completion, those of an environment not counted; null without episodes.
    length: Number
    length_max: Number  # tokens of the longest completion; null without episodes
    # Share of the completions that were not cut at their limits; null without episodes.
    ended: Number
    generate_s: float  # seconds that sampling took on rank 0, waiting for others included
    reward_s: float  # seconds of scoring
    infer_s: float  # seconds for log-probs, values and the reference's log-probs
    train_s: float  # seconds of the steps that trained on it
    # Mean difference of log-probs (nats) between the generator and the policy, on a probe after the
    # weights were sent; null if the policy itself samples, if a server keeps its own weights, or if
    # the weights were sent later (`ahead` above 1).
    sampler_gap: float | None = None
    # Optimizer steps between the weights that sampled it and the first step that trains on it, as a mean
    # over its sampled tokens; null if nothing is sampled ahead, or a server keeps its own weights.
    staleness: float | None = None
    # Address of a server that was lost and is not back yet → why.
    lost_servers: Mapping[str, str] | None = None
    # Whether steps trained on it. If its rewards end the run, none does and `step` is not reached.
    trained: bool = True


class Save(Event, kind="save"):
    """A checkpoint was saved, or failed to be."""

    step: int  # number of steps that the saved state has done
    path: str | None  # the checkpoint; null if it failed
    seconds: float  # until it was whole on disk
    bytes: int  # that all ranks wrote
    blocked_seconds: float  # for which training stood still
    error: str | None  # why it failed, or a warning about a checkpoint that was saved


class Reference(Event, kind="reference"):
    """The reference model's log-probabilities of all pairs are computed or read."""

    data: str  # train or eval
    pairs: int
    found: bool  # whether they were read from a file of an earlier run, and not computed
    path: str  # file with the log-probabilities
    seconds: float  # that this took


class Teacher(Event, kind="teacher"):
    """A teacher's log-probabilities of all learned tokens are computed or read."""

    data: str  # train or eval
    tokens: int  # tokens that are learned from
    found: bool  # whether they were read from a folder of an earlier run, and not computed
    path: str  # folder with the log-probabilities
    seconds: float  # that this took


class Started(Event, kind="started"):
    """The first step of a process is done."""

    # Seconds of each part of the start: imports and plan, processes (until all have joined), model,
    # data, first step.
    seconds: dict[str, float]


class Restore(Event, kind="restore"):
    """A run goes on from a checkpoint."""

    step: int  # the last step of the checkpoint
    path: str | None  # the checkpoint; null if there was none yet
    seconds: float  # that loading took
    skipped: list[dict[str, str]]  # damaged checkpoints that were skipped: [{path, reason}]


class Nonfinite(Event, kind="nonfinite"):
    """The loss or the gradient of a step was not finite."""

    step: int  # the step, whose update was left out
    policy: str  # stop, skip or rescale (fp16)
    loss: Number
    grad_norm: Number
    sample_ids: list[int]  # of its global batch


class Fault(Event, kind="fault"):
    """A rank failed. The launcher writes this event."""

    attempt: int  # number of starts before this one
    rank: int  # the rank that failed first
    host: str | None = None  # host of that rank, if the run has several
    signal: str | None  # signal that killed the rank
    exitcode: int | None  # exit code of the rank
    error: str  # in one line
    log: str  # file with the output of the rank
    step: int  # the last finished step
    action: str  # restart, replan, or stop and why
    cause: str | None = None  # the likely cause and its fix, if the doctor knows such an error


class Replan(Event, kind="replan"):
    """The run goes on with another plan, since memory ran out, or hosts came or went."""

    from_: str  # the old plan: keys of the YAML, or ranks and strategy
    to: str  # the new plan, in the same form
    # That hosts came or went, or which memory ran out and what the old plan had predicted wrongly.
    why: str
    predicted_bytes: dict[str, int]  # peak of tensors on a device: {from, to}
    plan: str  # file of the old plan; plan.json is the new one
    step: int  # the last finished step


class Takeover(Event, kind="takeover"):
    """The launcher was lost, and the launcher of another host goes on with the run."""

    host: str  # host of the new launcher
    from_: str  # host of the lost launcher
    why: str  # what decided: the lease of the run folder, or votes
    step: int  # the last finished step that the new host knows


class Preempt(Event, kind="preempt"):
    """A signal requested the end of the run, and its state was saved."""

    step: int  # step of the saved state
    signal: str  # the signal


class Exporting(Event, kind="exporting"):
    """The export of the trained model begins."""

    # The last step. The run is finished and its weights are saved, so only the export can still
    # fail.
    step: int


class Export(Event, kind="export"):
    """The trained model was exported, or failed to be."""

    path: str | None  # the Hugging Face folder; null if the export failed
    seconds: float  # that the export took
    # Between the trained model and the folder that is read back; null if the export failed.
    max_logit_difference: Number
    error: str | None = None  # why it failed, and what to do; the run is finished nevertheless


class Profiled(Event, kind="profile"):
    """Steps of a rank were profiled (`run.profile`)."""

    rank: int
    step: int  # the first of these steps
    steps: int  # number of these steps
    trace: str  # file of the trace
    snapshot: str  # file of the memory's history, or why there is none
    operators: list[dict[str, Any]]  # the most expensive ones, see telemetry.profile


class RunEnd(Event, kind="run_end"):
    """The ranks have ended. Ranks that are killed write no such event."""

    status: str  # finished, preempted, stopped or failed
    exit_code: int  # see errors.py
    step: int  # the last finished step
    # In one line, the error that ended the run, or why it finished before its last step.
    why: str | None = None
    # Energy that the devices took since this process began; null if no counter can be read.
    kwh: Number = None
    # Seconds of this process by purpose: {elapsed, productive, startup, save, restore, recompute,
    # eval, other}.
    goodput: dict[str, float]


# Events of these kinds must have a step from 0 on.
KINDS_WITH_STEP = tuple(each.kind for each in (Step, Eval, Save, Restore, Rollout, Preempt, RunEnd))
Emit = Callable[[Event], object]


def newest_measurement(events: list[Event]) -> Measurement | None:
    """Return the newest measurement that has memory; None if the run was too short.

    Raises ValueError for a run of another version.
    """
    for event in reversed(events):
        if isinstance(event, Measured) and event.metrics.get("memory"):
            return event.measurement()
    return None


class EventLog:
    """Appends events to a file.

    If a run was killed in the middle of a line, the next event begins a new line. A full disk stops
    no run: the bytes wait in memory and are written with the next event. They are lost only if the
    process ends while the disk is still full.
    """

    def __init__(self, path: Path) -> None:
        """Open a file of events, with the folders around it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            is_torn = size > 0 and file.read(1) != b"\n"
        self._file = path.open("ab", buffering=0)
        self._waiting = b"\n" if is_torn else b""

    def emit(self, event: Event) -> Event:
        """Write one event and return it as it was written.

        It is redacted, NaN is null, and inf is a string. Raises OSError if the file cannot be
        written for another reason than a full disk.
        """
        values: dict[str, Any] = redacted_json(event.values())
        text = json.dumps(values, allow_nan=False, ensure_ascii=False)
        self._waiting += text.encode(errors="backslashreplace") + b"\n"
        try:
            while self._waiting:
                # Without a buffer a write may take only a part of the bytes.
                written = self._file.write(self._waiting) or 0
                self._waiting = self._waiting[written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return Event.from_values(values)


def read(path: Path) -> list[Event]:
    """Return the events of all lines that can be parsed, in order; none if there is no file.

    A line torn by a kill is left out. An event may still lack fields, see `Event.is_complete`.
    """
    return [event for _, event, _ in examine(path) if event is not None]


def examine(path: Path) -> list[tuple[int, Event | None, bool]]:
    """Return (number from 1, event, whether all fields are valid) of each line of a file of events.

    The event is None for a line that is torn by a kill, or damaged. Fields are not all valid,
    either, if one of them was dropped since its type is not the one that the kind declares.
    """
    text = _bytes(path).decode("utf-8", errors="replace")
    lines = []
    # Not `splitlines`, which also splits at letters that a text in an event may have.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            event, are_fields_valid = _parse_line(line)
            lines.append((number, event, are_fields_valid))
    return lines


def _bytes(path: Path) -> bytes:
    """Return the bytes of a file of events; none if there is no file. Raises EnvironmentFault."""
    if not os.path.lexists(path):
        return b""
    return read_bytes(path, EnvironmentFault, MOVE, MOST_EVENTS)


def _parse_line(line: str) -> tuple[Event | None, bool]:
    """Return the event of a line, and whether every field of the line is of its declared type.

    None for a line that is torn or lacks what readers need: a kind, a time and, for most kinds, a
    step.
    """
    values = parse(line)
    if values is None or not isinstance(values.get("kind"), str):
        return None, False
    written_at = values.get("t", 0)
    if type(written_at) not in (int, float) or not 0 <= written_at < MOST_TIME:
        return None, False
    if not _has_valid_step(values):
        return None, False
    event = Event.from_values(values)
    for name, (key, *_) in event.types.items():
        is_dropped = getattr(event, name) is None and values.get(key) is not None
        if is_dropped:
            return event, False
    return event, True


def _has_valid_step(values: dict[str, Any]) -> bool:
    """Return whether an event has a step that is a whole number from 0 on, if its kind needs one.

    Events of kinds that need none may have -1, which is before the first step.
    """
    if values["kind"] in KINDS_WITH_STEP:
        step = values.get("step")
        least = 0
    else:
        step = values.get("step", 0)
        least = -1
    return type(step) is int and step >= least


def read_tail(path: Path, bytes_: int = LAST_BYTES) -> list[Event]:
    """Return the newest events of a file, as many as lie in its last `bytes_` bytes.

    The list is empty if there is no file, or it cannot be read.
    """
    try:
        with open_plain(path, EnvironmentFault) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - bytes_))
            text = file.read(bytes_).decode(errors="replace")
    except (OSError, EnvironmentFault):
        return []
    # The first line may be only the end of one, which counts as torn.
    lines = text.split("\n")
    events = []
    for line in lines:
        event, _ = _parse_line(line)
        if event is not None:
            events.append(event)
    return events


def last_start_offset(path: Path) -> int:
    """Return the offset in bytes of the newest run_start in a file of events; 0 if it has none.

    Raises EnvironmentFault if the file cannot be read.
    """
    content = _bytes(path)
    kind_at = content.rfind(b'"kind": "run_start"')
    return content.rfind(b"\n", 0, max(0, kind_at)) + 1


def series(events: list[Event], name: str, kind: type[Event] = Step) -> dict[int, Any]:
    """Return the values of a field or metric by step, from the events of a kind that have it.

    A step that was done again after a restart has its newest value.
    """
    values_by_step = {}
    for event in events:
        if isinstance(event, kind):
            values = event.values()
            if name in values:
                values_by_step[values["step"]] = values[name]
    return values_by_step


@contextmanager
def tail(path: Path, on_event: Emit, offset: int | None = None) -> Iterator[None]:
    """Call `on_event` with each event that another process appends to a file.

    It does so as long as the context is open. `offset`: the place in the file to begin at, in
    bytes; None: at its end.
    """
    rest = b""

    def parse_piece(piece: bytes) -> None:
        """Parse the lines that are whole with this piece, and keep the start of the next one."""
        nonlocal rest
        *whole_lines, rest = (rest + piece).split(b"\n")
        for line in whole_lines:
            event, _ = _parse_line(line.decode(errors="replace"))
            # None: torn by a kill. The next line is whole again.
            if event is not None:
                on_event(event)

    with follow_file(path, parse_piece, offset):
        yield
