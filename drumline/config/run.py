"""Keys of the YAML about a run itself: evaluation, health, trackers, profile. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from drumline.config.registry import Named
from drumline.config.section import (
    MOST_RANKS,
    MOST_SEED,
    MOST_WEIGHT,
    Count,
    Epochs,
    PathText,
    Rate,
    RefusesNull,
    Seconds,
    Section,
    Steps,
)
from drumline.config.urls import LocalPath
from drumline.system.heartbeat import LIMITS

# Tokens of a sample, unless eval.max_new_tokens is set.
MOST_NEW = 64
# Words in the name of a metric that say that higher is better. A word of LOWER overrules them.
HIGHER = {
    "accuracy",
    "acc",
    "exact",
    "em",
    "f1",
    "reward",
    "chosen",
    "margin",
    "ended",
    "length",
    "bleu",
    "mcc",
    "pass",
    "pass@1",
}
HIGHER |= {"rouge1", "rouge2", "rougeL", "rougeLsum"}
LOWER = {"loss", "perplexity", "kl", "error", "failed", "rejected", "std", "stderr"}


def direction(metric: str) -> Literal["min", "max"]:
    """Return whether a lower (min) or a higher (max) value of a metric is better, by its name.

    A name that tells nothing means lower. Names that users give do not count: that of a set or task
    before the metric, and that of a domain after `reward/`. A metric of lm-eval is called NAME or
    `NAME FILTER`, not NAME,FILTER as there (see `train.tasks.metrics_of`).
    """
    *before, last = metric.split("/")
    name_parts = set(re.split("[_ ]", last))
    if "reward" in before and before[0] != "tasks":
        name_parts = {"reward"}
    if name_parts & HIGHER and not name_parts & LOWER:
        return "max"
    return "min"


class EvalConfig(Section):
    every: Steps | Epochs | None = Field(
        None,
        description="Evaluate every N steps, or `N epochs`; null: only before the first and after the last.",
    )
    at_start: bool = Field(True, description="Evaluate before the first step, for comparison.")
    micro_batch: Count | None = Field(
        None, description="Samples per forward pass on each device; null: as in training."
    )
    metric: str = Field(
        "loss",
        description="The metric that decides which checkpoint is best. Default of ppo, grpo and online_dpo: reward.",
    )
    mode: Literal["min", "max"] = Field(
        default_factory=lambda known: direction(known["metric"]),
        description="Whether a lower or a higher metric is better. Default: max for accuracies, exact matches, F1, margins and rewards by"
        " their names, else min.",
    )
    samples: int = Field(
        0,
        ge=0,
        le=1000,
        description="At each evaluation answer so many prompts greedily, the same ones each time: the first of each evaluation set, cut"
        " before the answer. Where a strategy cuts the model, each rank keeps a whole copy of it for that.",
    )
    max_new_tokens: Count | None = Field(
        None, description="samples: an answer is cut after this many tokens; null: 64."
    )
    patience: Count | None = Field(
        None,
        description="End the run after this many evaluations in a row without a better metric.",
    )
    min_delta: float = Field(
        0.0, ge=0, le=MOST_WEIGHT, description="patience: a metric is better by more than this."
    )
    tasks: tuple[PathText, ...] = Field(
        (),
        description="Tasks of lm-eval, by name or path of a YAML; their metrics are tasks/NAME/METRIC. Memory as for samples.",
    )
    tasks_every: Steps | None = Field(
        None,
        description="Score the tasks every N steps (a multiple of `every`), before the first and after the last; null: always.",
    )
    tasks_limit: Count | None = Field(None, description="Questions of each task; null: all.")

    @model_validator(mode="after")
    def _require_evaluations(self) -> EvalConfig:
        if self.patience is not None and self.every is None:
            raise ValueError("patience counts evaluations: set every")
        if self.patience is None and self.min_delta:
            raise ValueError("min_delta is for patience: set both")
        if self.max_new_tokens is not None and not self.samples:
            raise ValueError("max_new_tokens is for samples: set both")
        if not self.tasks and (self.tasks_every or self.tasks_limit):
            raise ValueError("tasks_every and tasks_limit are for tasks: name some")
        if self.tasks_every and (not isinstance(self.every, int) or self.tasks_every % self.every):
            raise ValueError(
                "tasks are scored at evaluations: tasks_every must be a multiple of every, in steps"
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """Number of steps between two evaluations; None if `every` is not set.

        It is None also before planning if `every` is in epochs. A plan has resolved them to steps.
        """
        if isinstance(self.every, int):
            return self.every
        return None

    def keep_metrics_only(self) -> EvalConfig:
        """Return this section without samples and tasks, so that only metrics are computed."""
        return self.model_copy(
            update={
                "samples": 0,
                "max_new_tokens": None,
                "tasks": (),
                "tasks_every": None,
                "tasks_limit": None,
            }
        )

    @property
    def generates(self) -> bool:
        """Whether evaluation needs a model that is whole on each rank."""
        return self.samples > 0 or bool(self.tasks)


class HealthConfig(Section):
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do when the loss or gradient norm is NaN or inf: stop, or skip the step and report it.",
    )
    max_skips: Count = Field(
        10, description="With skip: stop after this many skipped steps in a row."
    )
    on_spike: Literal["none", "note", "skip", "rollback"] = Field(
        "none",
        description="What to do when the loss jumps: note its samples in an event; skip the step; or go back to the newest checkpoint and"
        " pass over the batch. max_skips counts these as well.",
    )
    spike_zscore: Rate = Field(
        6.0,
        description="A loss jumps when it lies this many standard deviations above the mean of spike_window.",
    )
    spike_window: int = Field(
        100, ge=20, le=10**6, description="Steps whose losses are compared with."
    )
    straggler_ratio: float = Field(
        1.3,
        gt=1,
        le=10**6,
        description="Name a rank that takes this many times the median rank's seconds, over 20 steps.",
    )
    check_weights_every: Steps | None = Field(
        None,
        description="Every N steps, and before each checkpoint, compare a checksum of the weights that several ranks hold. Where they"
        " differ, name the ranks and restart from the newest checkpoint.",
    )
    check_collectives: bool = Field(
        False,
        description="For debugging: after each step compare the collectives that the ranks have begun, and stop where they differ.",
    )
    on_hang: Literal["restart", "stop"] = Field(
        "restart",
        description="When ranks hang, name the culprit, end them, and restart from the newest checkpoint, or stop.",
    )
    hang_seconds: Seconds = Field(
        5.0,
        description="A phase of a step (data, forward, backward, collective, optimizer) hangs when it takes three times the longest so far,"
        " and at least this long.",
    )
    startup_seconds: Seconds = Field(
        1800.0,
        description="Longest time without a sign of life before the first steps, or in compilation.",
    )
    save_seconds: Seconds = Field(
        1800.0,
        description="Longest time for a checkpoint, until the first ones show how long they take.",
    )
    eval_seconds: Seconds = Field(1800.0, description="The same for a batch of evaluation.")
    rollout_seconds: Seconds = Field(
        1800.0, description="The same for sampling or scoring a batch of a rollout."
    )

    def limits(self) -> dict[str, float]:
        """Return the limit in seconds of each phase, by its name in `system.heartbeat.LIMITS`."""
        return {name: getattr(self, f"{name}_seconds") for name in LIMITS}


# Of packages: functions `telemetry.trackers.Run` → `telemetry.trackers.Tracker`.
Reporter = Annotated[
    PathText, Named("trackers", ("tensorboard", "wandb", "mlflow", "trackio", "swanlab"))
]
# What all trackers take: a name is a folder or a part of an address somewhere.
TrackerName = Annotated[str, Field(pattern=r"^[^/\\#?%:\x00-\x1f]+$", min_length=1, max_length=128)]


class TrackerConfig(Section):
    """How a run is named in the trackers of run.report_to.

    Their access keys come from the environment alone.
    """

    project: TrackerName | None = Field(
        None,
        description="Project (MLflow: experiment); null: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or SWANLAB_PROJ_NAME, else drumline."
        " TensorBoard has none.",
    )
    name: TrackerName | None = Field(
        None, description="Name of the run; null: that of the run folder."
    )
    group: TrackerName | None = Field(
        None,
        description="Group of runs that belong together. MLflow: a tag, TensorBoard: in a text.",
    )
    tags: tuple[TrackerName, ...] = Field(
        (), description="Tags. trackio: in its config, TensorBoard: in a text."
    )
    notes: str | None = Field(None, max_length=10_000, description="What the run is for.")


class ProfileConfig(Section):
    """A trace of torch.profiler and, on a GPU, a snapshot of memory, written to RUN/profile."""

    at: Steps = Field(
        10,
        description="The first step of the trace. The first few are also those that a run measures itself in.",
    )
    steps: int = Field(
        3, gt=0, le=1000, description="Steps in the trace, whose size grows with them."
    )
    ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] = Field(
        (0,), min_length=1, description="Ranks that write one."
    )


class ReportConfig(Section):
    html: bool = Field(
        True,
        description="Write RUN/report.html at the end of the run: one page of some 5 MB that needs no network.",
    )


class RunConfig(Section):
    dir: LocalPath | None = Field(None, description="Run folder; null: runs/<name of the YAML>.")
    steps: Steps | None = Field(None, description="Optimizer steps; overrides epochs.")
    epochs: Rate = Field(1.0, description="Passes over the training samples.")
    seed: int = Field(
        0,
        ge=0,
        le=MOST_SEED,
        description="Determines the order of samples, dropout and random weights.",
    )
    deterministic: bool = Field(
        False, description="Deterministic kernels only (cuDNN and algorithms); slower on GPUs."
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto",
        description="auto: NVIDIA's or AMD's GPUs if there are any, else the CPU. mps: Apple's GPU, one process (experimental).",
    )
    log_every: Steps = Field(1, description="Write a step event every N steps.")
    collect_every: int = Field(
        50,
        ge=0,
        le=10**6,
        description="Steps between two runs of Python's garbage collector, on all ranks after the same step: a rank that collects at a"
        " moment of its own keeps all others waiting. 0: Python decides.",
    )
    profile: ProfileConfig | None = Field(
        None, description="Trace a few steps; null: none. Changes no number."
    )
    callbacks: tuple[PathText, ...] = Field(
        (), description="Your classes called after each step, save and evaluation: file.py:Name."
    )
    report_to: Annotated[
        tuple[Reporter, ...], RefusesNull("[] for no tracker, or leave it out for tensorboard")
    ] = Field(("tensorboard",), description="Where metrics are written besides events.jsonl.")
    tracker: TrackerConfig = Field(
        default_factory=TrackerConfig, description="Project, name, group, tags and notes in these."
    )

    @model_validator(mode="after")
    def _project_of_swanlab(self) -> RunConfig:
        if (
            "swanlab" in self.report_to
            and self.tracker.project
            and not re.fullmatch(r"[0-9A-Za-z_.+-]+", self.tracker.project)
        ):
            raise ValueError(
                "tracker.project: SwanLab's projects have ASCII letters, digits, and _ - + . alone"
            )
        return self
