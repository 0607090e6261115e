"""What a run folder holds, as plain values: its plan, events and checkpoints.

The files may be damaged, of another version, or written by a stranger. Values of a wrong type are
left out, and damaged lines are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

from drumline.config.load import flat
from drumline.errors import DrumlineError, UserError
from drumline.foreign import read_object
from drumline.system.files import numbered
from drumline.system.redact import plain
from drumline.telemetry import events
from drumline.telemetry.damage import MOST
from drumline.telemetry.truth import Comparison

HELD_OUT = "held out: "  # the names of curves of evaluations begin with it
# Fields of a step event and the names of their curves, in the order of the page. What an algorithm
# measures besides comes after the losses.
RATES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "mfu": "model FLOPs utilisation",
}
SAMPLES_PER_S = "samples/s"
NOT_CURVES = {
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
NOT_SCORES = {"samples", "seconds"}
# Fields of a rollout event and the names of their curves.
ROLLOUT = {
    "reward": "reward",
    "length": "tokens of a completion",
    "ended": "part of completions that ended",
    "sampler_gap": "sampler gap",
}
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
APART = ("run.seed", "run.dir", "data.cache_dir")  # runs that differ in these alone are repetitions
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
RESTARTS = ("restart", "replan")  # actions of a fault after which the launcher starts the run again
Points = list[tuple[int, float]]  # (step, value)
Trace = list[tuple[int, float | None]]  # (step, value); None: no finite number


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The comparison is false for NaN, too.
    if abs(value) < MOST:
        return float(value)
    return None


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a dictionary as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a dictionary; empty for anything else."""
    numbers = {}
    for key, each in as_mapping(value).items():
        number = as_number(each)
        if number is not None:
            numbers[str(key)] = number
    return numbers


def named(event: dict[str, Any]) -> dict[str, float | None]:
    """Return the points that an event adds to curves: name of the curve → value.

    None: a value that is no finite number, which events write as null or as a text.
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
        # The policy itself sampled if there is no gap, so there is no curve of it.
        if event.get("sampler_gap") is None:
            values.pop("sampler_gap", None)
        return _rollout_curves(values)
    return {}


def speed_unit(step: Mapping[str, Any]) -> str:
    """Return what a step's speed is counted in."""
    has_tokens = events.has_tokens(step.get("tokens"), step.get("samples"))
    return RATES["tokens_per_s"] if has_tokens else SAMPLES_PER_S


def _step_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return a step's numbers by the names of their curves."""
    names = {**RATES, "tokens_per_s": speed_unit(values)}
    curves = {}
    for key, value in values.items():
        if key in names or key not in NOT_CURVES:
            curves[names.get(key, key)] = value
    return curves


def _evaluation_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return an evaluation's scores by the names of their curves."""
    curves = {}
    for key, value in values.items():
        if key not in NOT_SCORES:
            curves[f"{HELD_OUT}{key}"] = value
    return curves


def _rollout_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return a rollout's numbers by the names of their curves."""
    curves = {}
    for key, value in values.items():
        if key in ROLLOUT:
            curves[ROLLOUT[key]] = value
        elif key.startswith("reward/"):
            name = key.replace("/", ": ")
            curves[name] = value
    has_reward = values.get("reward") is not None
    has_groups = events.has_groups(values.get("prompts"), values.get("episodes"))
    differ = values.get("groups_differ")
    if has_reward and has_groups and differ is not None:
        curves[GROUPS_ALIKE] = 1 - differ
    return curves


def curve_order(name: str) -> int:
    """Return the sort key of a curve's name: its place on the page."""
    start = name.partition(":")[0]
    return ORDER.index(start if start in ORDER else "")


@dataclass
class Attempt:
    """One start of the ranks. Times in unix seconds."""

    start: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None  # its run_end
    fault: dict[str, Any] | None = None  # as its launcher saw it

    @property
    def seconds(self) -> float:
        """Return the seconds between the first and the last event."""
        times = [event["t"] for event in (self.start, *self.events)]
        return max(times) - min(times)

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the steps that were done, in order."""
        return [event["step"] for event in self.events if event["kind"] == "step"]

    @property
    def goodput(self) -> dict[str, float]:
        """Return the seconds by purpose that rank 0 wrote at its end; empty if it wrote none."""
        if self.end is None:
            return {}
        return as_numbers(self.end.get("goodput"))

    @property
    def outcome(self) -> str:
        """Return in words how the attempt ended."""
        if self.fault is not None:
            return _fault_text(self.fault)
        if self.end is not None:
            return str(self.end.get("status"))
        return "no end was written: still running, or killed"


class RunFacts:
    """The facts of one run folder. Raises UserError if the folder is not one of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        has_events = (folder / "events.jsonl").is_file()
        if not has_events and not (folder / "plan.json").is_file():
            raise UserError(
                "is no run folder: there is neither events.jsonl nor plan.json",
                where=str(folder),
                fix="name the folder of a run; `drumline ps` lists them",
            )
        self.problems: list[str] = []  # a line each, for the user
        self.plan = self._read_object("plan.json")
        self.config = flat(as_mapping(self.plan.get("config")))
        self.events: list[dict[str, Any]] = []
        self._read_events()
        if not has_events:
            self.problems.append(
                "there is no events.jsonl: the run never started, or the file was removed"
            )
        elif not self.of("step"):
            self.problems.append("the run never finished a step")

    def _read_object(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty, and a problem more, if it cannot be read."""
        try:
            value: dict[str, Any] = plain(read_object(self.folder / name, UserError, numbers=False))
        except DrumlineError as error:
            self.problems.append(f"{name} is left out: {error.what}")
            return {}
        return value

    def _read_events(self) -> None:
        """Read the events that have a time, and count the damaged lines."""
        lines = events.examined(self.folder / "events.jsonl")
        damaged = 0
        for _, event, is_sound in lines:
            if event is None or not event.t:
                damaged += 1
                continue
            self.events.append(event.values())
            if not is_sound:
                damaged += 1
        if damaged:
            self.problems.append(
                f"{damaged:,} of {len(lines):,} lines of events.jsonl could not be read, or not whole; that is left out"
            )

    def of(self, kind: str) -> list[dict[str, Any]]:
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

        The last event of a step counts; values that are no finite numbers are left out.
        """
        values: dict[int, float | None] = {}
        for event in self.of(kind):
            step = event["step"]
            values[step] = as_number(event.get(name))
        points: Points = []
        for step, value in sorted(values.items()):
            if value is not None:
                points.append((step, value))
        return points

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Return every curve by its name, in the order of the page; the last event of a step counts."""
        values_by_name: dict[str, dict[int, float | None]] = {}
        for event in self.events:
            for name, value in named(event).items():
                values = values_by_name.setdefault(name, {})
                values[event["step"]] = value
        traces = {}
        for name in sorted(values_by_name, key=curve_order):
            values = values_by_name[name]
            traces[name] = sorted(values.items())
        return traces

    @cached_property
    def curves(self) -> dict[str, Points]:
        """Return the points of each trace that are numbers; traces without any are left out."""
        curves = {}
        for name, trace in self.traces.items():
            points = [(step, value) for step, value in trace if value is not None]
            if points:
                curves[name] = points
        return curves

    @property
    def reached(self) -> int:
        """Return the last step that was done, whatever it measured; 0 if there was none."""
        return max((event["step"] for event in self.of("step")), default=0)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Return the starts of the ranks, in order."""
        attempts: list[Attempt] = []
        for event in self.events:
            if event["kind"] == "run_start":
                attempts.append(Attempt(event))
                continue
            if not attempts:
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
        """Return finished, preempted, stopped, failed, started, or planned if it was never started."""
        for event in reversed(self.events):
            if event["kind"] == "run_end":
                return str(event.get("status"))
            if event["kind"] == "fault":
                return "failed"
            if event["kind"] in ("step", "run_start"):
                return "started"
        return "planned"

    @cached_property
    def group(self) -> str:
        """Return a text that is equal for runs that differ in their seed and folders alone.

        A run without a plan has one of its own.
        """
        if not self.config:
            return str(self.folder)
        values = [(key, value) for key, value in self.config.items() if key not in APART]
        return repr(sorted(values, key=lambda item: item[0]))

    @property
    def before(self) -> int:
        """Return how many steps were done in another folder, which this run continues."""
        for event in self.events:
            if event["kind"] == "restore":
                return int(event["step"])
            if event["kind"] == "step":
                return 0
        return 0

    @property
    def goodput(self) -> float | None:
        """The part of `seconds` that went into steps, each step counted once.

        The mean time of a step times the number of steps done here, over `seconds`.
        """
        seconds = self.seconds
        if seconds <= 0:
            return None
        step_seconds = self.points("step", "seconds")
        if not step_seconds:
            return 0.0
        last_step, _ = step_seconds[-1]
        mean = fmean(value for _, value in step_seconds)
        productive = mean * (last_step - self.before)
        return min(1.0, productive / seconds)

    @property
    def phases(self) -> dict[str, list[float]]:
        """Return the seconds of each rank by phase.

        The newest measurement of each attempt counts. Attempts are added up as long as they have
        the same number of ranks; with another number the sum begins anew.
        """
        totals: dict[str, list[float]] = {}
        for attempt in self.attempts:
            for phase, ranks in _newest_phases(attempt).items():
                seconds = []
                if isinstance(ranks, list):
                    seconds = [as_number(value) or 0.0 for value in ranks]
                total = totals.get(phase, [])
                if len(total) == len(seconds):
                    seconds = list(map(add, total, seconds))
                totals[phase] = seconds
        return totals

    @property
    def comparisons(self) -> list[Comparison]:
        """Return predicted against measured values by category; without those only predicted.

        Empty if nothing was measured, or if the estimate is of another version.
        """
        from drumline.plan.estimate import Estimate
        from drumline.telemetry.truth import Measurement, compare

        measured = [event for event in self.of("measured") if event.get("memory")]
        if not measured:
            return []
        newest = measured[-1]
        names = Measurement.model_fields.keys() & newest.keys()
        predicted = as_mapping(self.plan.get("predicted"))
        # pydantic raises ValueError; a category of another version is a LookupError.
        try:
            estimate = Estimate.model_validate(predicted.get("estimate"))
            measurement = Measurement.model_validate({name: newest[name] for name in names})
            return compare(estimate, measurement)
        except (ValueError, LookupError):
            return []

    @cached_property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Return a row for each checkpoint that was saved, in order of their steps.

        It has the fields of its save event, `step`, `metric` (of its manifest; None if it has
        none), `there` (its folder exists) and `whole` (its manifest can be read).
        """
        manifests = {}
        for step, folder in numbered(self.folder / "checkpoints", "step-").items():
            manifests[step] = _manifest(folder)
        saves = {event["step"]: event for event in self.of("save")}
        rows = []
        for step in sorted(saves.keys() | manifests.keys()):
            manifest = manifests.get(step, {})
            row = dict(saves.get(step, {}))
            row["step"] = step
            row["metric"] = as_number(manifest.get("metric"))
            row["there"] = step in manifests
            row["whole"] = bool(manifest)
            rows.append(row)
        return rows

    @property
    def restarts(self) -> int:
        """Return how often the launcher started the run again after a fault."""
        return sum(event.get("action") in RESTARTS for event in self.of("fault"))

    @cached_property
    def seconds(self) -> float:
        """The time that the run was running: its attempts, and what lay between a fault and the
        restart that the launcher made. The time until somebody resumed the run does not count.
        """
        total = sum(attempt.seconds for attempt in self.attempts)
        for before, after in pairwise(self.attempts):
            action = (before.fault or {}).get("action")
            if action in RESTARTS:
                total += max(0.0, after.start["t"] - before.start["t"] - before.seconds)
        return total

    @property
    def failure(self) -> dict[str, str]:
        """What ended the run badly, by label: reason, rank, likely cause and log; empty otherwise."""
        if self.status not in ("failed", "stopped") or not self.attempts:
            return {}
        last = self.attempts[-1]
        if last.fault is None:
            why = last.end.get("why") if last.end else None
            return {"reason": str(why)} if why else {}
        texts = {}
        for label, name in FAILURE.items():
            value = last.fault.get(name)
            if value is not None:
                texts[label] = str(value)
        if "then" in texts:
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
    """Return the manifest of a checkpoint; empty if it cannot be read."""
    try:
        content = read_object(folder / "manifest.json", UserError, numbers=False)
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
        values = {repr(run.config.get(key)) for run in runs if run.config}
        if key not in APART[1:] and len(values) > 1:
            differing.append(key)
    return differing


def short_names(runs: list[RunFacts]) -> list[str]:
    """Return a different name for each run: its folder's, with as many parents as needed, at most 7."""
    for parts in range(1, 9):
        names = ["/".join(run.folder.resolve().parts[-parts:]) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return [str(run.folder.resolve()) for run in runs]
