"""Saving: every file of a checkpoint is written, hashed and on the device before the folder gets its name.

A save is five common steps, each of which all ranks leave with the same outcome (see ranks.py):

    share out   who stores what; every rank finds enough free space; the copies for the background (training stands still up to here
                when asynchronous)
    folder      rank 0 makes `.tmp-step-00000020-<nonce>`
    shards      torch.distributed.checkpoint writes; each rank hashes its files while it writes them
    commit      rank 0 writes state.json and manifest.json, and renames the folder
    settle      rank 0 moves `latest` and `best`, then prunes

A kill at any moment leaves the folders that had a name whole, and at most one more.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from drumline import __version__
from drumline.checkpoint.files import FileRecord, write_durable
from drumline.checkpoint.manifest import STATE, UNFINISHED, Manifest, folder_name, write_manifest
from drumline.checkpoint.ranks import Ranks, RanksError, describe_error
from drumline.checkpoint.retention import Retention
from drumline.checkpoint.staging import Staging, share_out
from drumline.checkpoint.storage import Writer, written_tensors
from drumline.errors import EnvironmentFault

# Free space asked for before a save, as a multiple of its estimated bytes.
HEADROOM = 1.2


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, the same on every rank but for the seconds.

    `path` is None when nothing was committed. `error` next to a path: the checkpoint is whole, but a pointer or the pruning failed.
    `begun`: false where the disk lacked room, and nothing was written.
    """

    step: int
    path: Path | None
    seconds: float
    bytes: int
    error: str | None
    blocked_seconds: float
    begun: bool = True


@dataclass
class _Job:
    """One save on its way."""

    step: int
    state: bytes
    metric: float | None
    started: float  # time.monotonic()
    tensors: dict[str, Tensor] = field(default_factory=dict)  # this rank's share
    estimate: int = 0  # bytes, of all ranks together
    blocked_seconds: float | None = None  # None: until the end


class Checkpointer:
    """Saves a run's tensors and state under `root`, one save in flight at most.

    All ranks build one together, after the process group, and call `save` together. `save` does not raise for a full disk or
    a failed rank: `poll` and `wait` hand out what became of it. Call `wait` before the process group is destroyed. A
    process that ends while a save is in flight finishes the save first.
    """

    def __init__(self, root: Path, keep: int, keep_best: bool, mode: Literal["min", "max"], asynchronous: bool, serial: int = 1) -> None:
        """`serial`: the least that a save gets (Manifest). Raises EnvironmentFault when `root` cannot be used."""
        self.root = Path(root)
        self.asynchronous = asynchronous
        self.ranks = Ranks.all_apart()
        self.retention = Retention(self.root, keep, keep_best, mode, serial)
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._ended: SaveResult | None = None
        self._results: list[SaveResult] = []
        try:
            self.ranks.first(self.retention.open)
        except RanksError as failure:
            raise EnvironmentFault(f"checkpoints cannot be kept here: {failure}", where=str(self.root)) from failure

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], metric: float | None) -> None:
        """Begin to store `tensors` (by canonical name; plain tensors or DTensors) and `state` (JSON; rank 0's is kept). Collective.

        A plain tensor named by several ranks must be equal there. A save still in flight is waited for first. When this returns,
        training may change the tensors. A `metric` that is not finite counts as none.
        """
        metric = float(metric) if metric is not None and math.isfinite(metric) else None
        job = _Job(step, json.dumps(state).encode(), metric, started=time.monotonic())
        self._join()
        try:
            job.tensors, job.estimate = share_out(tensors, self.ranks)
            lacking = next(filter(None, self.ranks.each(lambda: self._lacking(job))), None)
            if lacking is not None:
                self._ended = replace(_result(job, None, 0, lacking), begun=False)
                return
            if self.asynchronous:
                staged: dict[str, Tensor] = {}
                # Together, so that a rank without memory for its copies does not leave the others waiting.
                self.ranks.each(lambda: staged.update(self.staging.copy(job.tensors)))
                job.tensors = staged
        except Exception as failure:  # noqa: BLE001 - a failed save is a result
            self._ended = _result(job, None, 0, describe_error(failure))
            return
        if self.asynchronous:
            job.blocked_seconds = time.monotonic() - job.started
            self._thread = threading.Thread(target=self._run, args=(job,), name=f"save-step-{step}")
            self._thread.start()
        else:
            self._run(job)

    def rescue(
        self, folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], metric: float | None
    ) -> tuple[SaveResult, bool]:
        """Store a checkpoint in `folder` instead. True: whole; False: the weights alone, since more did not fit. Collective."""
        try:
            there = Checkpointer(folder, sys.maxsize, False, self.retention.mode, False, serial=self.retention.next_serial())
        except EnvironmentFault as failure:
            return SaveResult(step, None, 0.0, 0, failure.line(), 0.0, begun=False), False
        weights = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0].endswith("model")}
        for part in (tensors, weights):
            there.save(step, part, state, metric)
            (result,) = there.wait()
            if result.path is not None:
                break
        return result, part is tensors

    def poll(self) -> list[SaveResult]:
        """The saves that ended since the last call, oldest first. Does not wait."""
        if self._thread is None or not self._thread.is_alive():
            self._join()
        done, self._results = self._results, []
        return done

    def wait(self) -> list[SaveResult]:
        """Like `poll`, once the save in flight has ended."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._ended:
            self._results.append(self._ended)
            self._ended = None

    def _run(self, job: _Job) -> None:
        """Everything after the sharing out; in the background when asynchronous."""
        folder: Path | None = None
        try:
            folder = self.ranks.first(lambda: self._make_folder(job))
            path, manifest = self._commit(job, folder)
        except (Exception, CheckpointException) as failure:  # noqa: BLE001 - a failed save is a result
            if folder and self.ranks.rank == 0:
                # What cannot be removed now is removed at the next start; the failure itself is what must be told.
                shutil.rmtree(folder, ignore_errors=True)
            self._ended = _result(job, None, 0, describe_error(failure))
            return
        error = None
        try:
            self.ranks.first(lambda: self.retention.settle(manifest))
        except Exception as failure:  # noqa: BLE001 - the save itself has succeeded
            error = f"the checkpoint is whole, but tidying up after it failed: {describe_error(failure)}"
        self._ended = _result(job, path, manifest.bytes, error)

    def _lacking(self, job: _Job) -> str | None:
        """What keeps the disk from taking this save; None where nothing does. A folder that was removed is made again. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        needed, free = int(HEADROOM * (job.estimate + len(job.state))), free_bytes(self.root)
        return f"no space: {needed:,} bytes needed, {free:,} free in {self.root}" if free < needed else None

    def _make_folder(self, job: _Job) -> Path:
        folder = self.root / f"{UNFINISHED}{folder_name(job.step)}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def _commit(self, job: _Job, folder: Path) -> tuple[Path, Manifest]:
        """Write all files of a save and name it. Collective; raises RanksError, or RuntimeError when a rank died."""
        files: dict[str, FileRecord] = {}
        for records in self.ranks.each(lambda: self._write_shards(job, folder)):
            files |= records

        def finish() -> tuple[Path, Manifest]:
            files[STATE] = write_durable(folder / STATE, job.state, private=True)  # user options are in it
            manifest = Manifest(
                step=job.step,
                serial=self.retention.next_serial(),
                metric=job.metric,
                drumline=__version__,
                torch=torch.__version__,
                world_size=self.ranks.size,
                files=files,
                tensors=written_tensors(folder),
            )
            write_manifest(folder, manifest)
            return self.retention.commit(folder, manifest), manifest

        return self.ranks.first(finish)

    def _write_shards(self, job: _Job, folder: Path) -> dict[str, FileRecord]:
        """Store this rank's share; the files it wrote. Raises what went wrong on this rank.

        The ranks' parts in dcp.save end together: if one fails, all get a CheckpointException. Those which did nothing wrong
        return nothing, and leave the telling to those which did.
        """
        writer = Writer(folder)
        try:
            dcp.save(
                dict(job.tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self.ranks.group,
                no_dist=self.ranks.group is None,
            )
        except CheckpointException as failure:
            if writer.files.failure:
                raise writer.files.failure from failure
            if self.ranks.rank in failure.failures:
                raise failure.failures[self.ranks.rank][0] from failure
            return {}
        return writer.files.records


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _result(job: _Job, path: Path | None, nbytes: int, error: str | None) -> SaveResult:
    seconds = time.monotonic() - job.started
    blocked = seconds if job.blocked_seconds is None else job.blocked_seconds
    return SaveResult(job.step, path, seconds, nbytes, error, blocked)
