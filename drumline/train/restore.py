"""`ResumePoint`: the checkpoint that a run resumes from, on disk, at a URL or in memory.

It finds the checkpoint, and loads it into the engine.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.disks import Disks, Gatherer, fetch
from drumline.checkpoint.load import (
    FoundCheckpoint,
    check,
    load_tensors,
    missing_compensations,
    newest,
    read_state,
)
from drumline.checkpoint.manifest import make_newest, read_manifest, step_of
from drumline.checkpoint.memory import Memory
from drumline.checkpoint.ranks import RankGroup
from drumline.checkpoint.remote import Store
from drumline.checkpoint.retention import best_checkpoint, recover
from drumline.checkpoint.save import Checkpointer
from drumline.config.load import refused_changes, saved_config
from drumline.config.resume import CHECKPOINTS, Resume
from drumline.config.run import EvalConfig
from drumline.config.urls import FETCHED, is_url
from drumline.engine.engine import OPTIONAL_SECTIONS, Engine
from drumline.errors import CheckpointError
from drumline.plan.plan import Plan
from drumline.system.files import is_own_checkpoint
from drumline.telemetry.events import Emit, Restore
from drumline.train.state import TrainState, rate_evaluation

# Matches the section of weights in a tensor's name, of the policy (model.…) or of another role
# (ROLE/model.…).
MODEL = re.compile(r"(^|(?<=/))model\.")


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from: an intact checkpoint, or step 0 (`path` None)."""

    path: Path | None
    # Damaged checkpoints that were passed over: path and reason of each.
    skipped: list[dict[str, str]]
    # Names of the models' tensors in the checkpoint, without their section.
    checkpoint_keys: frozenset[str]
    # The section `eval` of the plan, whose metric and mode rate checkpoints.
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    @classmethod
    def resolve(
        cls, plan: Plan, resume: Resume, memory_checkpoints: Memory | None = None
    ) -> ResumePoint:
        """Return the checkpoint that a run resumes from. Collective.

        The user may name a checkpoint, a run folder, or a URL. Otherwise it is the newest intact
        checkpoint of the run itself; `path` is None if that has saved none yet. Raises
        CheckpointError if there are checkpoints, but all are damaged.
        """
        ranks = RankGroup.all(error_type=CheckpointError)
        ranks.run_on_all(partial(recover, Path(plan.run_dir) / CHECKPOINTS))
        if resume.place is None:
            found = _newest_of_run(plan, memory_checkpoints)
            if found.path is None and found.skipped:
                raise _all_damaged_error(found, plan.run_dir)
        elif ranks.run_on_rank_0(lambda: resume.is_run_folder):
            verify = plan.config.checkpoint.verify
            found = newest(Path(resume.place) / CHECKPOINTS, verify, skip_weights_only=True)
            if found.path is None:
                raise _all_damaged_error(found, resume.place)
        elif is_url(resume.place):
            found = FoundCheckpoint(fetch(resume.place, Path(plan.run_dir) / FETCHED), [])
        else:
            found = FoundCheckpoint(_check_named(plan, Path(resume.place)), [])
        skipped = []
        for path, reason in found.skipped:
            skipped.append({"path": str(path), "reason": reason})
        return cls(found.path, skipped, _weights_in(found.path), plan.config.eval)

    def keys_of(self, name: str) -> frozenset[str]:
        """Return `checkpoint_keys` of one of the models that a session has; "" for the only one."""
        prefix = ""
        if name:
            prefix = f"{name}/"
        keys = set()
        for key in self.checkpoint_keys:
            if key.startswith(prefix):
                keys.add(key.removeprefix(prefix))
        return frozenset(keys)

    def restore(self, engine: Engine, emit: Emit, began: float) -> TrainState:
        """Fill the engine, and return the state of the run. Collective.

        `began`: unix time, from which the seconds of the event count.
        """
        state = TrainState()
        path: str | None = None
        if self.path is not None:
            state = self._restore_from(self.path, engine)
            path = str(self.path)
        seconds = time.time() - began
        emit(Restore(step=state.step, path=path, seconds=seconds, skipped=self.skipped))
        return state

    def _restore_from(self, path: Path, engine: Engine) -> TrainState:
        """Fill the engine from a checkpoint, and return the state that is in it. Collective.

        Raises CheckpointError for a state that no run can have saved.
        """
        tensors = engine.tensors()
        saved = read_state(path)
        _load_tensors(path, tensors)
        state = TrainState(**saved["trainer"])
        self._rate_again(path, saved["config"].get("eval", {}), state)
        engine.load_state({**saved["engine"], "step": state.step}, tensors)
        if state.step < 0 or state.position < 0:
            raise CheckpointError(
                f"state.json says step {state.step}, position {state.position}", where=str(path)
            )
        if path.parent.name == FETCHED:
            # It was fetched from a URL. It goes once all ranks have read it.
            RankGroup.all().run_on_all(lambda: None)
            shutil.rmtree(path.parent, ignore_errors=True)
        return state

    def _rate_again(self, path: Path, saved_eval: dict[str, Any], state: TrainState) -> None:
        """Bring the metrics in `state` up to date: forget those of another metric, and add a later one.

        `saved_eval`: the section eval of the checkpoint's config.
        """
        metric = self.evaluation.metric
        mode = self.evaluation.mode
        if saved_eval.get("metric", metric) != metric or saved_eval.get("mode", mode) != mode:
            # They were measured by another metric.
            state.best = None
            state.mark = None
            state.stale = 0
        manifest = read_manifest(path)
        # An evaluation may have come after the save; its metric was then written into the manifest
        # (`Checkpointer.write_metric`), but `state` does not have it. If steps were skipped, the
        # same weights were evaluated before the save, and `state` has that.
        was_rated_later = 0 <= state.evaluated < state.step and not state.skips
        if was_rated_later and manifest.metric is not None and manifest.rated == f"{mode} {metric}":
            rate_evaluation({metric: manifest.metric}, self.evaluation, state)
            state.evaluated = state.step


def _load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors from a checkpoint. Sections that only some runs have may be missing there."""
    # If this run keeps no Kahan compensations, the stored ones are added to the weights.
    lost = missing_compensations(path, tensors)
    wanted = dict(tensors)
    for name, (_, value) in lost.items():
        wanted[name] = value
    optional = set()
    for name in tensors:
        section = name.partition(".")[0]
        kind = section.rpartition("/")[2]
        if kind in OPTIONAL_SECTIONS:
            optional.add(section)
    load_tensors(path, wanted, optional=frozenset(optional))
    for weight, value in lost.values():
        tensors[weight].add_(value)


def _weights_in(path: Path | None) -> frozenset[str]:
    """Return the names of the models' tensors in a checkpoint, without their section."""
    if path is None:
        return frozenset()
    weights: set[str] = set()
    for name in read_manifest(path).tensors:
        if MODEL.search(name):
            weights.add(MODEL.sub("", name))
    return frozenset(weights)


def _all_damaged_error(found: FoundCheckpoint, where: str) -> CheckpointError:
    """Return the error that all checkpoints of a folder are damaged, with the reason of each."""
    reasons = "; ".join(reason for _, reason in found.skipped)
    return CheckpointError(
        f"no checkpoint is whole: {reasons}",
        where=where,
        fix="start again in another folder with run.dir=…",
    )


def _newest_of_run(plan: Plan, memory_checkpoints: Memory | None) -> FoundCheckpoint:
    """Return a run's newest intact checkpoint, on disk, at its URL or in memory. Collective."""
    found = _newest_on_disk(plan)
    if memory_checkpoints is None:
        return found
    step_on_disk = 0
    if found.path is not None:
        step_on_disk = step_of(found.path.name) or 0
    # Only a state in memory that is newer than the one on disk counts.
    in_memory = memory_checkpoints.newest(step_on_disk, lambda state: _misfit(plan, state))
    return FoundCheckpoint(in_memory.path or found.path, [*in_memory.skipped, *found.skipped])


def _newest_on_disk(plan: Plan) -> FoundCheckpoint:
    """Return the newest intact checkpoint on disk. Collective.

    If its files may lie on several disks or at a URL, they are put together on each disk.
    """
    options = plan.config.checkpoint
    root = Path(plan.run_dir) / CHECKPOINTS
    is_on_shared_folder = not options.allows_separate_folders
    if is_on_shared_folder:
        return newest(root, options.verify, skip_weights_only=True)
    ranks = RankGroup.all(error_type=CheckpointError)
    store: Store | None = None
    if options.url:
        store = Store(options.url)
    gatherer = Gatherer(root, options.verify, store, Disks.find(root, ranks))
    order = metric_order(plan)
    return gatherer.newest(
        lambda known: best_checkpoint(known, order) if options.keep_best else None
    )


def _check_named(plan: Plan, path: Path) -> Path:
    """Check a checkpoint that the user has named, and return its path. Collective.

    If it is one of the run's own, it is made the newest, so that a restart or a rollback goes back
    to it, and not to a checkpoint of the branch that the run leaves here.
    """
    check(path, plan.config.checkpoint.verify)
    is_on_shared_folder = not plan.config.checkpoint.allows_separate_folders
    if plan.saves and is_on_shared_folder and is_own_checkpoint(path, Path(plan.run_dir)):
        RankGroup.all(error_type=CheckpointError).run_on_rank_0(partial(make_newest, path))
    return path


def _misfit(plan: Plan, state: dict[str, Any]) -> str | None:
    """Return why a run cannot go on from a state in memory; None if it can.

    The launcher has compared checkpoints on disk with the plan, but not the states in memory.
    """
    saved = saved_config(state["config"], plan.config, (), "memory")
    changes = refused_changes(saved, plan.config, ())
    if changes.keys:
        return f"made with another config: {changes.description}"
    identity: dict[str, Any] | None = None
    if plan.data and plan.data.identity:
        identity = plan.data.identity.model_dump()
    if state["data"] != identity:
        return "made with other data"
    return None


def metric_order(plan: Plan) -> str:
    """Return which metric orders the checkpoints of a run, and how, as a text: "min loss"."""
    return f"{plan.config.eval.mode} {plan.config.eval.metric}"


def checkpointer_of(plan: Plan, metric_order: str) -> Checkpointer:
    """Return the Checkpointer of a run.

    `metric_order`: min or max, or what the function `metric_order` returns. Collective.
    """
    options = plan.config.checkpoint
    return Checkpointer(
        Path(plan.run_dir) / CHECKPOINTS,
        options.keep,
        options.keep_best,
        metric_order,
        options.asynchronous,
        url=options.url,
        replicas=options.replicas,
    )


def memory_checkpoints_of(plan: Plan, resumes_newest: bool) -> Memory | None:
    """Return the checkpoints that hosts keep in memory; None if the plan keeps none there.

    `resumes_newest`: as for `Memory`. Collective.
    """
    if not plan.config.checkpoint.in_memory_every:
        return None
    return Memory(Path(plan.run_dir), resumes_newest)
