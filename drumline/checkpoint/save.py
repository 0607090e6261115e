"""Saving: every file of a checkpoint is written, hashed and on the device before the folder gets its name.

A save has five steps, each with one outcome on all ranks (see ranks.py):

    share out   decide who stores what; each rank checks the free space; copy for the background (an asynchronous save blocks up to here)
    folder      rank 0 makes `.tmp-step-00000020-<nonce>`
    shards      torch.distributed.checkpoint writes; each rank hashes its files while it writes them
    commit      rank 0 writes state.json and manifest.json, and renames the folder
    settle      rank 0 moves `latest` and `best`, then prunes

A kill at any moment leaves the named folders whole, and at most one folder more; where it came while a step that is there already was
saved again, the next start gives one of the two its name (`retention.recover`). Where hosts share no disk (disks.py), one rank of each
disk does rank 0's part there, and each file goes to `replicas` further disks before the commit. With a URL (remote.py) each rank then
copies its files there; the manifest goes last.
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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from drumline import __version__
from drumline.checkpoint.disks import Disks, Gatherer, carry
from drumline.checkpoint.load import WEIGHTS_ONLY
from drumline.checkpoint.manifest import (
    INDEX,
    STATE,
    UNFINISHED,
    FileRecord,
    Manifest,
    folder_name,
    step_of,
    write_durable,
    write_part,
)
from drumline.checkpoint.ranks import Ranks, RanksError, describe_error, is_lasting
from drumline.checkpoint.remote import Remote
from drumline.checkpoint.retention import Retention, best_of
from drumline.checkpoint.staging import Staging
from drumline.checkpoint.storage import Writer, records_of
from drumline.core.heartbeat import TIMES, alive
from drumline.core.threads import on_this_gpu
from drumline.errors import CheckpointError, EnvironmentFault

# Free space that a save requires, as a multiple of its estimated bytes.
HEADROOM = 1.2
# Bytes of a stored tensor besides its numbers (zip headers, alignment, its entry in the index); measured 1.6 KB.
OVERHEAD_BYTES = 2048
PATIENCE_SECONDS = 60.0  # for the save in flight, at least


@dataclass(frozen=True)
class SaveResult:
    """How a save ended: the same on every rank, apart from the seconds, and from the path where hosts have folders of their own.

    `path` is None if nothing was committed. `error` beside a path: the checkpoint is whole, but a pointer or the pruning failed.
    `begun`: false if the disk lacked room, and nothing was written. `lasting`: another try would fail alike.
    """

    step: int
    path: Path | None
    seconds: float
    bytes: int
    error: str | None
    blocked_seconds: float
    begun: bool = True
    lasting: bool = False


class _NotUploaded(Exception):
    """A checkpoint on disk did not reach the URL."""


@dataclass
class _Job:
    step: int
    state: bytes
    metric: float | None
    started: float  # time.monotonic()
    tensors: dict[str, Tensor] = field(default_factory=dict)  # this rank's share
    estimate: int = 0  # bytes, of all ranks together
    blocked_seconds: float | None = None  # None: until the end


class Checkpointer:
    """Saves a run's tensors and state under `root`, one save at a time.

    All ranks build it together, after the process group, and call `save` together. `save` does not raise for a full disk or a failed
    rank: `poll` and `wait` return the results. Call `wait` before the process group is destroyed. A process that ends finishes the save
    in flight first.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        keep_best: bool,
        mode: str,
        asynchronous: bool,
        serial: int = 1,
        url: str | None = None,
        replicas: int = 0,
    ) -> None:
        """`serial`: the smallest serial of a save (Manifest). With a `url` or `replicas` hosts may have a `root` of their own each. Raises
        EnvironmentFault if `root` or the URL cannot be used."""
        self.root = Path(root)
        self.asynchronous = asynchronous
        self.replicas = replicas
        self.ranks = Ranks.all_apart()
        self.retention = Retention(self.root, keep, keep_best, mode, serial)
        self.remote = Remote(url, keep, keep_best, mode) if url else None
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._longest = 0.0  # seconds of a save that was written in the background
        self._ended: SaveResult | None = None
        self._results: list[SaveResult] = []
        try:
            self.disks = (
                Disks.find(self.root, self.ranks) if url or replicas else Disks.shared(self.ranks)
            )
            self.ranks.each(lambda: self.retention.open() if self.disks.leads else None)
            if self.remote is not None:
                self.ranks.first(self.remote.open)
        except RanksError as failure:
            raise EnvironmentFault(
                f"checkpoints cannot be kept here: {failure}", where=str(self.root)
            ) from failure

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], metric: float | None
    ) -> None:
        """Begin to store `tensors` (by canonical name; plain tensors or DTensors) and `state` (JSON; rank 0's is kept). Collective.

        A plain tensor must be equal on all ranks that name it. Waits for a save in flight first. Afterwards training may change the
        tensors. A `metric` that is not finite counts as none.
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
                # As a common step: a rank without memory for its copies must not leave the others waiting.
                self.ranks.each(lambda: staged.update(self.staging.copy(job.tensors)))
                job.tensors = staged
        except Exception as failure:  # noqa: BLE001 - a failed save is a result
            self._ended = _failed(job, failure)
            return
        if self.asynchronous:
            job.blocked_seconds = time.monotonic() - job.started
            self._thread = threading.Thread(
                target=on_this_gpu(self._run), args=(job,), name=f"save-step-{step}"
            )
            self._thread.start()
        else:
            self._run(job)

    def write_metric(self, step: int, metric: float) -> str | None:
        """Write the metric of a checkpoint's weights beside it, on each disk and at the URL, and keep checkpoints accordingly.

        No tensor is written. Each manifest is replaced by a whole new one, so a kill leaves the checkpoint readable, with its metric or
        without. Waits for a save in flight first. Collective. Returns why it could not be done; None where it was, or where the metric
        is not finite and counts as none.
        """
        self._join()
        if not math.isfinite(metric):
            return None
        try:
            written = self.ranks.each(
                lambda: self.retention.write_metric(step, metric) if self.disks.leads else None
            )
            manifest = written[0]
            assert manifest is not None, "rank 0 leads its disk"
            if self.remote is not None:
                remote = self.remote
                self.ranks.first(lambda: remote.replace_manifest(manifest))
            # Nothing is removed before all have the metric.
            self.ranks.each(lambda: self.retention.settle(manifest) if self.disks.leads else None)
            if self.remote is not None:
                self.ranks.first(lambda: remote.settle(manifest))
        except Exception as failure:  # noqa: BLE001 - the checkpoint itself is whole; the caller may save it anew
            return describe_error(failure)
        return None

    def rescue(
        self,
        folder: Path,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        metric: float | None,
    ) -> tuple[SaveResult, bool]:
        """Store a checkpoint in `folder` instead. True: the whole of it; False: only the weights, since more did not fit. Collective."""
        try:
            there = Checkpointer(
                folder,
                sys.maxsize,
                False,
                self.retention.mode,
                False,
                serial=self.retention.next_serial(),
            )
        except EnvironmentFault as failure:
            return SaveResult(step, None, 0.0, 0, failure.line(), 0.0, begun=False), False
        weights = {
            name: tensor
            for name, tensor in tensors.items()
            if name.partition(".")[0].endswith("model")
        }
        for part in (tensors, weights):
            there.save(
                step, part, state if part is tensors else {**state, WEIGHTS_ONLY: True}, metric
            )
            (result,) = there.wait()
            if result.path is not None:
                break
        return result, part is tensors

    def gather(self) -> None:
        """Have the newest checkpoint and the best one whole on rank 0's disk, where hosts have parts of them. Collective; raises
        CheckpointError."""
        if len(self.disks.groups) > self.replicas + 1:
            disks = Disks(Ranks(self.ranks.group, CheckpointError), self.disks.groups)
            store = self.remote.store if self.remote else None
            Gatherer(self.root, False, store, disks, first_alone=True).newest(
                lambda known: best_of(known, self.retention.mode)
            )

    def poll(self) -> list[SaveResult]:
        """The results of the saves that ended since the last call, oldest first. Does not wait."""
        if self._thread is None or not self._thread.is_alive():
            self._join()
        done, self._results = self._results, []
        return done

    def wait(self) -> list[SaveResult]:
        """The same, after the save in flight has ended."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread:
            # A disk may be slower than it was, but not without end.
            alive(max(PATIENCE_SECONDS, TIMES * self._longest) if self._longest else math.inf)
            self._thread.join()
            self._thread = None
            alive()
        if self._ended:
            self._longest = max(self._longest, self._ended.seconds)
            self._results.append(self._ended)
            self._ended = None

    def _run(self, job: _Job) -> None:
        """All steps after the first; in a thread if asynchronous."""
        folder: Path | None = None
        try:
            folder = self._make_folder(job)
            path, manifest, written = self._commit(job, folder)
        except (Exception, CheckpointException) as failure:  # noqa: BLE001 - a failed save is a result
            if folder and self.disks.leads:
                # The rest is removed at the next start; the result reports the failure itself.
                shutil.rmtree(folder, ignore_errors=True)
            self._ended = _failed(job, failure)
            return
        errors = []
        try:
            self.ranks.each(lambda: self.retention.settle(manifest) if self.disks.leads else None)
        except Exception as failure:  # noqa: BLE001 - the save itself has succeeded
            errors.append(describe_error(failure))
        try:
            if self.remote is not None:
                self._upload(self.remote, path, manifest, written)
        except _NotUploaded as failure:
            self._ended = _result(
                job, None, 0, f"it is whole in {path}, and did not reach its URL: {failure}"
            )
            return
        except Exception as failure:  # noqa: BLE001 - the same
            errors.append(describe_error(failure))
        error = (
            f"the checkpoint is whole, but tidying up after it failed: {'; '.join(errors)}"
            if errors
            else None
        )
        self._ended = _result(job, path, manifest.bytes, error)

    def _lacking(self, job: _Job) -> str | None:
        """The error if the disk lacks space for this save, else None. Makes a removed root again. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        share = min(1.0, (1 + self.replicas) / len(self.disks.groups))
        needed, free = (
            int(HEADROOM * (share * job.estimate + len(job.state))),
            free_bytes(self.root),
        )
        return (
            f"no space: {needed:,} bytes needed, {free:,} free in {self.root}"
            if free < needed
            else None
        )

    def _make_folder(self, job: _Job) -> Path:
        """An unfinished folder of one name on each disk. Collective."""

        def make_name() -> str:
            return f"{UNFINISHED}{folder_name(job.step)}-{secrets.token_hex(4)}"

        folder = self.root / self.ranks.first(make_name)
        self.ranks.each(lambda: folder.mkdir() if self.disks.leads else None)
        return folder

    def _commit(self, job: _Job, folder: Path) -> tuple[Path, Manifest, dict[str, FileRecord]]:
        """Write all files of a save and name it; the last: those that this rank wrote. Collective; raises RanksError, or RuntimeError if a
        rank died."""
        parts = self.ranks.each(lambda: (self._write_shards(job, folder), self._next_serial()))
        written, serial = [records for records, _ in parts], max(number for _, number in parts)
        copies = self.disks.copies(written, self.replicas)
        carry(copies, folder, folder, self.ranks)
        # Rank 0 alone has the index and the state of the run.
        apart = len(self.disks.groups) > 1
        index, state = (
            self.ranks.first(lambda: ((folder / INDEX).read_bytes(), job.state))
            if apart
            else (b"", job.state)
        )

        def manifest_of(files: dict[str, FileRecord]) -> Manifest:
            return Manifest(
                step=job.step,
                serial=serial,
                metric=job.metric,
                rated=None if job.metric is None else self.retention.mode,
                drumline=__version__,
                torch=torch.__version__,
                world_size=self.ranks.size,
                files=files,
                tensors=records_of(folder),
            )

        def finish() -> Manifest | None:
            if not self.disks.leads:
                return None
            if self.ranks.rank != 0:
                write_durable(folder / INDEX, index)
            files = {name: record for records in written for name, record in records.items()}
            # User options are in it.
            files[STATE] = write_durable(folder / STATE, state, private=True)
            manifest = manifest_of(files)
            arrived = {
                copy.name for copy in copies if copy.target in self.disks.groups[self.disks.mine]
            }
            own = {name for rank in self.disks.groups[self.disks.mine] for name in written[rank]}
            write_part(folder, manifest, {*own, *arrived, INDEX, STATE})
            self.retention.commit(folder, manifest)
            return manifest

        manifest = self.ranks.each(finish)[0]
        assert manifest is not None, "rank 0 leads its disk"
        return self.root / folder_name(job.step), manifest, written[self.ranks.rank]

    def _next_serial(self) -> int:
        return max(self.retention.next_serial(), self.remote.next_serial() if self.remote else 0)

    def _upload(
        self, remote: Remote, folder: Path, manifest: Manifest, written: dict[str, FileRecord]
    ) -> None:
        """Bring a committed checkpoint to the URL, and tidy up there. Collective; raises _NotUploaded, then RanksError."""
        try:
            self.ranks.first(lambda: remote.begin(manifest.step))
            self.ranks.each(lambda: remote.send(folder, written.keys() - {INDEX, STATE}))
            self.ranks.first(lambda: remote.finish(folder, manifest))
        except RanksError as failure:
            raise _NotUploaded(failure) from failure
        self.ranks.first(lambda: remote.settle(manifest))

    def is_kept(self, path: Path) -> bool:
        """Whether a checkpoint lies under this root, and at the URL if there is one. Collective."""

        def known() -> bool:
            step = step_of(path.name)
            if step is None or path.parent.absolute() != self.root.absolute():
                return False
            return self.remote is None or self.remote.known.get(step) == self.retention.known.get(
                step
            )

        return self.ranks.first(known)

    def _write_shards(self, job: _Job, folder: Path) -> dict[str, FileRecord]:
        """Store this rank's share; returns the files that it wrote. Raises the error of this rank.

        If dcp.save fails on one rank, all get a CheckpointException: the others return nothing, so that only the failed rank reports.
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
            if writer.files.failures:
                raise writer.files.failures[0] from failure
            if self.ranks.rank in failure.failures:
                raise failure.failures[self.ranks.rank][0] from failure
            return {}
        return writer.files.records


def share_out(tensors: dict[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], int]:
    """The tensors that this rank stores, and the bytes that all ranks store together (an upper estimate).

    Every rank that names a plain tensor has all of it, so one of them stores it: the largest first, each to the rank with the fewest
    bytes. All ranks compute the same answer. DTensors stay with every rank: each has its shard, and the planner of
    torch.distributed.checkpoint leaves replicas of a shard out. Since this comes before staging, eight replicas on a host need the memory
    of one. Collective; raises RanksError.
    """
    mine = {
        name: (tensor.numel() * tensor.element_size(), isinstance(tensor, DTensor))
        for name, tensor in tensors.items()
    }
    everyone = ranks.each(lambda: mine)
    sizes = {name: nbytes for named in everyone for name, (nbytes, _) in named.items()}
    load = [0] * ranks.size
    kept: dict[str, Tensor] = {
        name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)
    }
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = [
            rank for rank, named in enumerate(everyone) if name in named and not named[name][1]
        ]
        if holders:
            owner = min(holders, key=lambda rank: load[rank])
            load[owner] += sizes[name] + OVERHEAD_BYTES
            if owner == ranks.rank:
                kept[name] = tensors[name]
    return kept, sum(sizes.values()) + OVERHEAD_BYTES * len(sizes)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _failed(job: _Job, failure: BaseException) -> SaveResult:
    return replace(_result(job, None, 0, describe_error(failure)), lasting=is_lasting(failure))


def _result(job: _Job, path: Path | None, nbytes: int, error: str | None) -> SaveResult:
    seconds = time.monotonic() - job.started
    blocked = seconds if job.blocked_seconds is None else job.blocked_seconds
    return SaveResult(job.step, path, seconds, nbytes, error, blocked)
