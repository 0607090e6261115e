"""What a run folder holds, as plain values: its plan, events and checkpoints.

The files may be damaged, of another version, or written by a stranger. Values of a wrong type are
left out, and damaged lines are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import add, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from drumline.config.load import flat
from drumline.errors import DrumlineError, UserError
from drumline.foreign import read_object
from drumline.system.files import numbered_entries
from drumline.system.redact import redacted_json
from drumline.telemetry import events
from drumline.telemetry.damage import MOST
from drumline.telemetry.plan_accuracy import Comparison

# Prefix of the names of evaluations' curves.
HELD_OUT = "held out: "
# Fields of a step event and the names of their curves, in the order of the page. What an algorithm
# measures besides comes after the losses.
RATES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "mfu": "model FLOPs utilisation",
}
SAMPLES_PER_S = "samples/s"
# Fields that every step event has. Those of RATES have a curve by the name that is there, the rest
# have none. All other numbers of a step are metrics of an algorithm; each has a curve of its own
# name.
STANDARD_STEP_FIELDS = {
    "tokens",
    "samples",
    "samples_per_s",
    "seconds",
    "data_s",
    "compute_s",
    "comm_s",
    "sent_bytes",
    "epoch",
    *RATES,
}
# Numbers of an evaluation's event that are no scores.
NOT_SCORES = {"t", "step", "samples", "seconds"}
# Fields of a rollout event and the names of their curves.
ROLLOUT = {
    "reward": "reward",
    "length": "tokens of a completion",
    "ended": "part of completions that ended",
    # In nats: difference of log-probs between the generator and the policy.
    "sampler_gap": "sampler gap",
    # Mean optimizer steps between the weights that sampled a token and the first step that learns from it.
    "staleness": "staleness",
}
# A group is all completions of one prompt.
GROUPS_ALIKE = "share of groups whose rewards do not differ"
# The order of curves; "" stands for what an algorithm measures besides.
ORDER = (
    "loss",
    "held out",
    "reward",
    *ROLLOUT.values(),
    GROUPS_ALIKE,
    "",
    *RATES.values(),
    SAMPLES_PER_S,
)
# Keys of folders, which change no number of a run.
FOLDER_KEYS = ("run.dir", "data.cache_dir")
# Runs that differ in these keys alone are repetitions of one config.
KEYS_IGNORED_IN_GROUPS = ("run.seed", *FOLDER_KEYS)
# What a page shows of a fault that ended a run: label and field of the event.
FAILURE = {
    "reason": "error",
    "rank": "rank",
    "host": "host",
    "after step": "step",
    "likely cause and fix": "cause",
    "then": "action",
    "log": "log",
}
# Actions of a fault after which the launcher starts the run again.
RESTARTS = ("restart", "replan")
# Each is (step, value).
Points = list[tuple[int, float]]
# Each is (step, value). None: the value was NaN or infinite.
RawPoints = list[tuple[int, float | None]]


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else.

    Numbers beyond `damage.MOST` count as damaged: sums and products of two others stay finite.
    """
    # Python's True is an int, but JSON's true is no number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The comparison is false for NaN, too.
    if abs(value) < MOST:
        return float(value)
    return None


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a dictionary as it is, and an empty one for anything else."""
    if isinstance(value, dict):
        return value
    return {}


def as_numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a dictionary; empty for anything else."""
    numbers = {}
    for key, each in as_mapping(value).items():
        number = as_number(each)
        if number is not None:
            numbers[str(key)] = number
    return numbers


def curve_values(event: dict[str, Any]) -> dict[str, float | None]:
    """Return the points that an event adds to curves, as name of the curve → value.

    A value is None if it is no finite number, which events write as null (NaN) or as a text (inf).
    Events that are neither steps nor evaluations nor rollouts have no curves.
    """
    values: dict[str, float | None] = {}
    for key, value in event.items():
        if key in ("t", "step"):
            continue
        number = as_number(value)
        if number is not None or value in (None, "inf", "-inf"):
            values[key] = number
    if event["kind"] == "step":
        return _step_curves(values)
    if event["kind"] == "eval":
        return _evaluation_curves(values)
    if event["kind"] == "rollout":
        absent = _absent_of_rollout(event)
        return _rollout_curves({key: each for key, each in values.items() if key not in absent})
    return {}


def speed_unit(step: Mapping[str, Any]) -> str:
    """Return what a step's speed is counted in, which is also the name of its curve.

    `step`: the fields of a step event.
    """
    has_tokens = events.has_tokens(step.get("tokens"), step.get("samples"))
    if has_tokens:
        return RATES["tokens_per_s"]
    return SAMPLES_PER_S


def _step_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return a step's numbers by the names of their curves."""
    # Samples without tokens are counted as one token each, so tokens_per_s then means samples/s.
    names = {**RATES, "tokens_per_s": speed_unit(values)}
    curves = {}
    for key, value in values.items():
        if key in names or key not in STANDARD_STEP_FIELDS:
            curves[names.get(key, key)] = value
    return curves


def _evaluation_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return an evaluation's scores by the names of their curves."""
    curves = {}
    for key, value in values.items():
        if key not in NOT_SCORES:
            curves[f"{HELD_OUT}{key}"] = value
    return curves


def _absent_of_rollout(event: dict[str, Any]) -> set[str]:
    """Return the numbers that a rollout cannot have, whose nulls are no NaN."""
    absent = set()
    # None: the policy itself sampled, so there is no gap in log-probs to another generator.
    if event.get("sampler_gap") is None:
        absent.add("sampler_gap")
    # None: nothing is sampled ahead.
    if event.get("staleness") is None:
        absent.add("staleness")
    # A run of gkd may have no rewards at all.
    if event.get("rewards") == {}:
        absent.add("reward")
    # gkd learned the completions of rows alone, so no completion has a length.
    if event.get("episodes") == 0:
        absent |= {"length", "length_max", "ended"}
    return absent


def _rollout_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return a rollout's numbers by the names of their curves."""
    curves = {}
    for key, value in values.items():
        if key in ROLLOUT:
            curves[ROLLOUT[key]] = value
        elif key.startswith("reward/"):
            # The mean reward of a domain.
            name = key.replace("/", ": ")
            curves[name] = value
    has_reward = values.get("reward") is not None
    has_groups = events.has_groups(values.get("prompts"), values.get("episodes"))
    differ = values.get("groups_differ")
    # Older versions write a share of 0 for a rollout without a reward.
    if has_reward and has_groups and differ is not None:
        curves[GROUPS_ALIKE] = 1 - differ
    return curves


def curve_order(name: str) -> int:
    """Return the sort key of a curve's name: its place on the page."""
    # Of "held out: SCORE" and "reward: DOMAIN" only the part before the colon counts.
    start, _, _ = name.partition(":")
    if start not in ORDER:
        start = ""
    return ORDER.index(start)


@dataclass
class Attempt:
    """One start of the ranks, by its events. Times are in unix seconds."""

    # Its run_start event.
    start_event: dict[str, Any]
    # The events after the run_start, its end and its fault included.
    events: list[dict[str, Any]] = field(default_factory=list)
    # Its run_end event, which rank 0 writes; None if it was killed, or is still running.
    end: dict[str, Any] | None = None
    # Its fault event, which the launcher writes.
    fault: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds between the first and the last event."""
        times = [event["t"] for event in (self.start_event, *self.events)]
        return max(times) - min(times)

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the steps that were done, in order."""
        return [event["step"] for event in self.events if event["kind"] == "step"]

    @property
    def seconds_by_purpose(self) -> dict[str, float]:
        """Return purpose (productive, save, …) → seconds, as rank 0 wrote them at its end.

        Empty if it wrote none.
        """
        if self.end is None:
            return {}
        return as_numbers(self.end.get("goodput"))

    @property
    def outcome(self) -> str:
        """Return in words how the attempt ended."""
        # The fault first: it says which rank failed, and what the launcher did then.
        if self.fault is not None:
            return _fault_text(self.fault)
        if self.end is not None:
            return str(self.end.get("status"))
        return "no end was written: still running, or killed"


class RunFacts:
    """The facts of one run folder, read once when it is made.

    What cannot be read is left out and named in `problems`, so that a page of a damaged run shows
    the rest of it.
    """

    def __init__(self, folder: Path) -> None:
        """Read the plan and the events. Raises UserError if the folder has neither."""
        self.folder = folder
        self.name = folder.resolve().name
        has_events = (folder / "events.jsonl").is_file()
        if not has_events and not (folder / "plan.json").is_file():
            raise UserError(
                "is no run folder: there is neither events.jsonl nor plan.json",
                where=str(folder),
                fix="name the folder of a run; `drumline ps` lists them",
            )
        # A line each, for the user.
        self.problems: list[str] = []
        self.plan = self._read_object("plan.json")
        # Values by dotted key, such as `data.max_length`.
        self.config = flat(as_mapping(self.plan.get("config")))
        self.events: list[dict[str, Any]] = []
        self._read_events()
        if not has_events:
            self.problems.append(
                "there is no events.jsonl: the run never started, or the file was removed"
            )
        elif not self.events_of_kind("step"):
            self.problems.append("the run never finished a step")

    def _read_object(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file of the folder.

        If it cannot be read, the object is empty, and `problems` has a line more.
        """
        try:
            content = read_object(self.folder / name, UserError, numbers=False)
            value: dict[str, Any] = redacted_json(content)
        except DrumlineError as error:
            self.problems.append(f"{name} is left out: {error.what}")
            return {}
        return value

    def _read_events(self) -> None:
        """Read the events that have a time, and count the damaged lines."""
        lines = events.examine(self.folder / "events.jsonl")
        damaged = 0
        for _, event, are_fields_valid in lines:
            if event is None or not event.t:
                damaged += 1
                continue
            self.events.append(event.values())
            # Some fields are damaged; the others are kept.
            if not are_fields_valid:
                damaged += 1
        if damaged:
            share = f"{damaged:,} of {len(lines):,} lines of events.jsonl"
            problem = f"{share} could not be read, or not whole; that is left out"
            self.problems.append(problem)

    def events_of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any]:
        """Return the newest event of a kind; empty if there is none."""
        for event in reversed(self.events):
            if event["kind"] == kind:
                return event
        return {}

    def points(self, kind: str, name: str) -> Points:
        """Return (step, value) of a field of events, in order.

        The last event of a step counts; values that are no finite numbers are left out. `kind`: of
        events that have a step.
        """
        # None, too: a step that is done again replaces the number that it had before.
        values: dict[int, float | None] = {}
        for event in self.events_of_kind(kind):
            step = event["step"]
            values[step] = as_number(event.get(name))
        points: Points = []
        for step, value in sorted(values.items()):
            if value is not None:
                points.append((step, value))
        return points

    @cached_property
    def raw_curves(self) -> dict[str, RawPoints]:
        """Return name of a curve → its points, in the order of the page.

        There is one value a step, from the step's last event; None if it was NaN or infinite.
        """
        values_by_name: dict[str, dict[int, float | None]] = {}
        for event in self.events:
            points = curve_values(event)
            for name, value in points.items():
                values = values_by_name.setdefault(name, {})
                values[event["step"]] = value
        raw_curves = {}
        for name in sorted(values_by_name, key=curve_order):
            values = values_by_name[name]
            raw_curves[name] = sorted(values.items())
        return raw_curves

    @cached_property
    def curves(self) -> dict[str, Points]:
        """Return `raw_curves` without None; a curve that has no number at all is left out."""
        curves = {}
        for name, raw_points in self.raw_curves.items():
            points = [(step, value) for step, value in raw_points if value is not None]
            if points:
                curves[name] = points
        return curves

    @property
    def last_step(self) -> int:
        """Return the number of the last step that was done; 0 if there was none."""
        steps = [event["step"] for event in self.events_of_kind("step")]
        return max(steps, default=0)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Return the starts of the ranks, in order."""
        attempts: list[Attempt] = []
        for event in self.events:
            if event["kind"] == "run_start":
                attempts.append(Attempt(event))
                continue
            if not attempts:
                # An event before the first start belongs to no attempt.
                continue
            current = attempts[-1]
            current.events.append(event)
            if event["kind"] == "run_end":
                current.end = event
            elif event["kind"] == "fault":
                current.fault = event
        return attempts

    @property
    def status(self) -> str:
        """Return finished, preempted, stopped, failed, started, or planned if it was never started.

        The newest event that tells anything decides, since a run may go on after any end.
        """
        for event in reversed(self.events):
            if event["kind"] == "run_end":
                return str(event.get("status"))
            if event["kind"] == "fault":
                return "failed"
            if event["kind"] in ("step", "run_start"):
                return "started"
        return "planned"

    @cached_property
    def config_identity(self) -> str:
        """Return a text that is equal for runs that differ in their seed and folders alone.

        A run without a plan has one of its own.
        """
        if not self.config:
            return str(self.folder)
        values = [
            (key, value) for key, value in self.config.items() if key not in KEYS_IGNORED_IN_GROUPS
        ]
        # By key alone: values of different types cannot be compared.
        values.sort(key=itemgetter(0))
        return repr(values)

    @property
    def initial_step(self) -> int:
        """Return the step of the checkpoint that the run was started from; 0 for a fresh run.

        These steps were done in another folder.
        """
        for event in self.events:
            if event["kind"] == "restore":
                return int(event["step"])
            if event["kind"] == "step":
                return 0
        return 0

    @property
    def goodput(self) -> float | None:
        """Return the fraction (0–1) of `seconds` that went into steps, each step counted once.

        It is the mean time of a step times the number of steps done here, over `seconds`: what a
        fault made the run do again is not productive. None if the run took no time.
        """
        seconds = self.seconds
        if seconds <= 0:
            return None
        step_seconds = self.points("step", "seconds")
        if not step_seconds:
            return 0.0
        last_step, _ = step_seconds[-1]
        mean = fmean(value for _, value in step_seconds)
        # Not the sum of the seconds: a run may log only some of its steps.
        productive = mean * (last_step - self.initial_step)
        return min(1.0, productive / seconds)

    @property
    def phases(self) -> dict[str, list[float]]:
        """Return the seconds of each rank by phase.

        The newest measurement of each attempt counts. Attempts are added up as long as they have
        the same number of ranks; with another number the sum begins anew.
        """
        totals: dict[str, list[float]] = {}
        for attempt in self.attempts:
            for phase, of_ranks in _newest_phases(attempt).items():
                seconds = []
                if isinstance(of_ranks, list):
                    seconds = [as_number(value) or 0.0 for value in of_ranks]
                total = totals.get(phase, [])
                has_same_ranks = len(total) == len(seconds)
                if has_same_ranks:
                    seconds = list(map(add, total, seconds))
                totals[phase] = seconds
        return totals

    @property
    def comparisons(self) -> list[Comparison]:
        """Return predicted against measured values by category; without those only predicted.

        Empty if nothing was measured, or if the estimate is of another version.
        """
        from drumline.plan.estimate import Estimate
        from drumline.telemetry.plan_accuracy import Measurement, compare

        measured = [event for event in self.events_of_kind("measured") if event.get("memory")]
        if not measured:
            return []
        newest = measured[-1]
        names = Measurement.model_fields.keys() & newest.keys()
        values = {name: newest[name] for name in names}
        predicted = as_mapping(self.plan.get("predicted"))
        # pydantic raises ValueError; a category of another version is a LookupError.
        try:
            estimate = Estimate.model_validate(predicted.get("estimate"))
            measurement = Measurement.model_validate(values)
            return compare(estimate, measurement)
        except (ValueError, LookupError):
            return []

    @cached_property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Return a row for each checkpoint that was saved, in order of their steps.

        It has the fields of its save event, `step`, `metric` (of its manifest; None if it has
        none), `exists` (its folder does) and `is_readable` (its manifest).
        """
        manifests = {}
        folders = numbered_entries(self.folder / "checkpoints", "step-")
        for step, folder in folders.items():
            manifests[step] = _manifest(folder)
        # A checkpoint may have an event alone, since it was removed, or a folder alone, if the
        # events were.
        saves = {event["step"]: event for event in self.events_of_kind("save")}
        rows = []
        for step in sorted(saves.keys() | manifests.keys()):
            manifest = manifests.get(step, {})
            row = dict(saves.get(step, {}))
            row["step"] = step
            row["metric"] = as_number(manifest.get("metric"))
            row["exists"] = step in manifests
            row["is_readable"] = bool(manifest)
            rows.append(row)
        return rows

    @property
    def restarts(self) -> int:
        """Return how often the launcher started the run again after a fault."""
        actions = [event.get("action") for event in self.events_of_kind("fault")]
        return sum(action in RESTARTS for action in actions)

    @cached_property
    def seconds(self) -> float:
        """Return the seconds that the run was running.

        These are its attempts, and the downtime before restarts that the launcher made. The
        downtime before somebody resumed the run does not count.
        """
        total = sum(attempt.seconds for attempt in self.attempts)
        for before, after in pairwise(self.attempts):
            if before.fault is None:
                continue
            if before.fault.get("action") in RESTARTS:
                began_after = after.start_event["t"] - before.start_event["t"]
                restart_downtime = began_after - before.seconds
                # Not below zero, if the clocks of two hosts disagree.
                total += max(0.0, restart_downtime)
        return total

    @property
    def failure(self) -> dict[str, str]:
        """Return what ended the run badly, as label → text; empty if it did not fail.

        The labels are those of FAILURE. Without a fault, `reason` is what the run itself wrote.
        """
        if self.status not in ("failed", "stopped") or not self.attempts:
            return {}
        last = self.attempts[-1]
        if last.fault is not None:
            return _failure_of_fault(last.fault)
        if last.end is None:
            return {}
        why = last.end.get("why")
        if not why:
            return {}
        return {"reason": str(why)}


def _failure_of_fault(fault: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a fault that a page shows, as label → text."""
    texts = {}
    for label, name in FAILURE.items():
        value = fault.get(name)
        if value is not None:
            texts[label] = str(value)
    if "then" in texts:
        # Behind "stop: " is why. That the run stopped is clear from its status.
        texts["then"] = texts["then"].removeprefix("stop: ")
    return texts


def _fault_text(fault: dict[str, Any]) -> str:
    """Return which rank failed, why, and what the launcher did then."""
    rank = f"rank {fault.get('rank')}"
    host = fault.get("host")
    if host:
        rank += f" on {host}"
    error = fault.get("error")
    action = fault.get("action")
    return f"{rank}: {error} → {action}"


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint's folder; empty if it cannot be read."""
    path = folder / "manifest.json"
    try:
        content = read_object(path, UserError, numbers=False)
    except DrumlineError:
        return {}
    return as_mapping(content.get("manifest"))


def _newest_phases(attempt: Attempt) -> dict[str, Any]:
    """Return phase → seconds of each rank as an attempt measured them last; empty if it did not."""
    for event in reversed(attempt.events):
        if event["kind"] == "measured":
            return as_mapping(event.get("phases"))
    return {}


def differences(runs: list[RunFacts]) -> list[str]:
    """Return the keys of the config whose values are not the same in all runs.

    Keys of folders, which hold no values of the training, and runs without a config are left out.
    """
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.config))
    differing = []
    for key in keys:
        if key in FOLDER_KEYS:
            continue
        # By their text: lists cannot be in a set.
        values = {repr(run.config.get(key)) for run in runs if run.config}
        if len(values) > 1:
            differing.append(key)
    return differing


def short_names(runs: list[RunFacts]) -> list[str]:
    """Return a different name for each run.

    It is the folder's, with as many parents as needed to tell the runs apart, at most 7. If that is
    not enough, the names are the whole paths.
    """
    folders = [run.folder.resolve() for run in runs]
    for length in range(1, 9):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        are_different = len(set(names)) == len(names)
        if are_different:
            return names
    return [str(folder) for folder in folders]
