"""What a run folder tells: its plan, events and checkpoints, as plain values. Files may be damaged, of another version, or a
stranger's: what is not what it should be is left out, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from drumline.core.files import numbered
from drumline.core.load import flat
from drumline.core.redact import plain
from drumline.errors import DrumlineError, UserError
from drumline.foreign import read_object
from drumline.telemetry import events
from drumline.telemetry.damage import MOST
from drumline.telemetry.truth import Comparison

# Of a step, in the order of the page; what an algorithm has besides comes after the losses.
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
ROLLOUT = {
    "reward": "reward",
    "length": "tokens of a completion",
    "ended": "part of completions that ended",
    "sampler_gap": "sampler gap",
}
GROUPS_ALIKE = "share of groups whose rewards do not differ"
# The order of curves; "" stands for what an algorithm has besides.
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
Points = list[tuple[int, float]]
Trace = list[tuple[int, float | None]]  # None: no finite number


def number(value: Any) -> float | None:
    """A finite number, else None."""
    # No NaN passes, either.
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
    return float(value) if fits else None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a dictionary."""
    return {
        str(key): found
        for key, each in mapping(value).items()
        if (found := number(each)) is not None
    }


def named(event: dict[str, Any]) -> dict[str, float | None]:
    """What an event adds to curves, by the name that users read; None: no finite number, which events have as null or a text."""
    found = {key: number(value) for key, value in event.items() if key not in ("t", "step")}
    found = {
        key: value
        for key, value in found.items()
        if value is not None or event[key] in (None, "inf", "-inf")
    }
    if event["kind"] == "step":
        return _step_curves(found)
    if event["kind"] == "eval":
        return {f"held out: {key}": value for key, value in found.items() if key not in NOT_SCORES}
    if event["kind"] == "rollout":
        if event.get("sampler_gap") is None:  # the policy itself sampled: there is no curve
            found.pop("sampler_gap", None)
        return _rollout_curves(found)
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


def _rollout_curves(values: dict[str, float | None]) -> dict[str, float | None]:
    """Return a rollout's numbers by the names of their curves."""
    curves = {}
    for key, value in values.items():
        if key in ROLLOUT or key.startswith("reward/"):
            curves[ROLLOUT.get(key, key.replace("/", ": "))] = value
    differ = values.get("groups_differ")
    has_reward = values.get("reward") is not None
    if (
        differ is not None
        and has_reward
        and events.has_groups(values.get("prompts"), values.get("episodes"))
    ):
        curves[GROUPS_ALIKE] = 1 - differ
    return curves


def place_of(name: str) -> int:
    """Of a curve on the page."""
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
        times = [event["t"] for event in (self.start, *self.events)]
        return max(times) - min(times)

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["kind"] == "step"]

    @property
    def outcome(self) -> str:
        if self.fault is not None:
            where = f" on {self.fault['host']}" if self.fault.get("host") else ""
            return f"rank {self.fault.get('rank')}{where}: {self.fault.get('error')} → {self.fault.get('action')}"
        if self.end is not None:
            return str(self.end.get("status"))
        return "no end was written: still running, or killed"


class RunFacts:
    """Of one run. Raises UserError where there is no run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        if not (folder / "events.jsonl").is_file() and not (folder / "plan.json").is_file():
            fix = "name the folder of a run; `drumline ps` lists them"
            raise UserError(
                "is no run folder: there is neither events.jsonl nor plan.json",
                where=str(folder),
                fix=fix,
            )
        self.problems: list[str] = []
        self.plan = self._object("plan.json")
        self.config = flat(mapping(self.plan.get("config")))
        lines = events.examined(folder / "events.jsonl")
        self.events: list[dict[str, Any]] = [
            event.values() for _, event, _ in lines if event and event.t
        ]
        if damaged := sum(not (sound and event and event.t) for _, event, sound in lines):
            self.problems.append(
                f"{damaged:,} of {len(lines):,} lines of events.jsonl could not be read, or not whole; that is left out"
            )
        if not (folder / "events.jsonl").is_file():
            self.problems.append(
                "there is no events.jsonl: the run never started, or the file was removed"
            )
        elif not self.of("step"):
            self.problems.append("the run never finished a step")

    def _object(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = plain(read_object(self.folder / name, UserError, numbers=False))
        except DrumlineError as error:
            self.problems.append(f"{name} is left out: {error.what}")
            return {}
        return value

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any]:
        """The newest event of a kind; empty where there is none."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), {})

    def points(self, kind: str, name: str) -> Points:
        """(step, value), the last word on each step, in order; values that are no finite numbers are left out."""
        found = {event["step"]: number(event.get(name)) for event in self.of(kind)}
        return [(step, value) for step, value in sorted(found.items()) if value is not None]

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Name → what was measured, in order, the last word on each step, in the order of the page."""
        made: dict[str, dict[int, float | None]] = {}
        for event in self.events:
            for name, value in named(event).items():
                made.setdefault(name, {})[event["step"]] = value
        return {name: sorted(made[name].items()) for name in sorted(made, key=place_of)}

    @cached_property
    def curves(self) -> dict[str, Points]:
        """The traces that have numbers, and these alone."""
        found = {
            name: [(step, value) for step, value in trace if value is not None]
            for name, trace in self.traces.items()
        }
        return {name: points for name, points in found.items() if points}

    @property
    def reached(self) -> int:
        """The last step that was done, whatever it measured."""
        return max((event["step"] for event in self.of("step")), default=0)

    @cached_property
    def attempts(self) -> list[Attempt]:
        found: list[Attempt] = []
        for event in self.events:
            if event["kind"] == "run_start":
                found.append(Attempt(event))
            elif found:
                found[-1].events.append(event)
                found[-1].end = event if event["kind"] == "run_end" else found[-1].end
                found[-1].fault = event if event["kind"] == "fault" else found[-1].fault
        return found

    @property
    def status(self) -> str:
        """finished, preempted, stopped, failed, or started; planned where it never was."""
        ends = [
            event
            for event in self.events
            if event["kind"] in ("run_end", "fault", "step", "run_start")
        ]
        if not ends:
            return "planned"
        return (
            str(ends[-1].get("status"))
            if ends[-1]["kind"] == "run_end"
            else "failed"
            if ends[-1]["kind"] == "fault"
            else "started"
        )

    @cached_property
    def group(self) -> str:
        """What runs have in common that differ in their seed alone; each without a plan is by itself."""
        rest = {key: value for key, value in self.config.items() if key not in APART}
        return (
            repr(sorted(rest.items(), key=lambda item: item[0]))
            if self.config
            else str(self.folder)
        )

    @property
    def before(self) -> int:
        """Steps that were done in another folder, which this run goes on from."""
        first = next(
            (event for event in self.events if event["kind"] in ("restore", "step")),
            {"kind": "none"},
        )
        return int(first["step"]) if first["kind"] == "restore" else 0

    @property
    def goodput(self) -> float | None:
        """The part of `seconds` that went into steps, each step counted once.

        The mean time of a step times the number of steps done here, over `seconds`.
        """
        step_seconds = self.points("step", "seconds")
        if self.seconds <= 0:
            return None
        productive = 0.0
        if step_seconds:
            last_step = step_seconds[-1][0]
            productive = fmean(value for _, value in step_seconds) * (last_step - self.before)
        return min(1.0, productive / self.seconds)

    @property
    def phases(self) -> dict[str, list[float]]:
        """Phase → seconds of each rank: the newest measurement of each attempt, added up where they had as many ranks as the last."""
        found = [
            [
                mapping(event.get("phases"))
                for event in attempt.events
                if event["kind"] == "measured"
            ]
            for attempt in self.attempts
        ]
        newest = [each[-1] for each in found if each and each[-1]]
        made: dict[str, list[float]] = {}
        for phases in newest:
            for phase, ranks in phases.items():
                seconds = [number(each) or 0.0 for each in ranks] if isinstance(ranks, list) else []
                before = made.get(phase, [])
                made[phase] = (
                    [a + b for a, b in zip(before, seconds, strict=True)]
                    if len(before) == len(seconds)
                    else seconds
                )
        return made

    @property
    def comparisons(self) -> list[Comparison]:
        """Predicted against measured, by category; what only was predicted is not in it."""
        from drumline.core.estimate import Estimate
        from drumline.telemetry.truth import Measurement, compare

        measured = [event for event in self.of("measured") if event.get("memory")]
        try:
            estimate = Estimate.model_validate(mapping(self.plan.get("predicted")).get("estimate"))
            names = Measurement.model_fields.keys() & measured[-1].keys()
            return compare(
                estimate, Measurement.model_validate({name: measured[-1][name] for name in names})
            )
        except (
            ValueError,
            LookupError,
        ):  # pydantic's; nothing was measured; a category of another version
            return []

    @cached_property
    def checkpoints(self) -> list[dict[str, Any]]:
        """A row for each that was saved: of its event, its manifest, and whether it is there."""
        there: dict[int, dict[str, Any]] = {}
        for step, folder in numbered(self.folder / "checkpoints", "step-").items():
            try:
                there[step] = mapping(
                    read_object(folder / "manifest.json", UserError, numbers=False).get("manifest")
                )
            except DrumlineError:
                there[step] = {}
        saves = {event["step"]: event for event in self.of("save")}
        rows = []
        for at in sorted(saves.keys() | there.keys()):
            metric = number(there.get(at, {}).get("metric"))
            rows.append(
                {
                    **saves.get(at, {}),
                    "step": at,
                    "metric": metric,
                    "there": at in there,
                    "whole": bool(there.get(at)),
                }
            )
        return rows

    @property
    def restarts(self) -> int:
        return sum(event.get("action") in ("restart", "replan") for event in self.of("fault"))

    @cached_property
    def seconds(self) -> float:
        """The time that the run was running: its attempts, and what lay between a fault and the
        restart that the launcher made. The time until somebody resumed the run does not count.
        """
        total = sum(attempt.seconds for attempt in self.attempts)
        for before, after in pairwise(self.attempts):
            action = (before.fault or {}).get("action")
            if action in ("restart", "replan"):
                total += max(0.0, after.start["t"] - before.start["t"] - before.seconds)
        return total

    @property
    def failure(self) -> dict[str, str]:
        """What ended the run badly, by label: reason, rank, likely cause and log; empty otherwise."""
        if self.status not in ("failed", "stopped") or not self.attempts:
            return {}
        last = self.attempts[-1]
        if last.fault is None:
            why = (last.end or {}).get("why")
            return {"reason": str(why)} if why else {}
        fault = last.fault
        found = {
            "reason": fault.get("error"),
            "rank": fault.get("rank"),
            "host": fault.get("host"),
            "after step": fault.get("step"),
            "likely cause and fix": fault.get("cause"),
            "then": fault.get("action"),
            "log": fault.get("log"),
        }
        texts = {label: str(value) for label, value in found.items() if value is not None}
        if "then" in texts:
            texts["then"] = texts["then"].removeprefix("stop: ")
        return texts


def differences(runs: list[RunFacts]) -> list[str]:
    """Keys of the config whose values are not alike in all runs; places that hold no values are left out."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [
        key
        for key in keys
        if key not in APART[1:]
        and len({repr(run.config.get(key)) for run in runs if run.config}) > 1
    ]


def short_names(runs: list[RunFacts]) -> list[str]:
    """A name for each run, its folder's where that is enough; never two alike."""
    for parts in range(1, 9):
        names = ["/".join(run.folder.resolve().parts[-parts:]) for run in runs]
        if len({*names}) == len(runs):
            return names
    return [str(run.folder.resolve()) for run in runs]
