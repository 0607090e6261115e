"""Saves checkpoints: every file is written, hashed and on the device before the folder gets its name.

A save has five steps. Each step succeeds on all ranks or fails on all of them (see ranks.py):

1. Prepare: decide which rank stores which tensor, check the free space, and copy the tensors if
   the save is asynchronous. Training waits up to here.
2. Folder: rank 0 makes `.tmp-step-00000020-<nonce>`.
3. Shards: torch.distributed.checkpoint writes; each rank hashes its files while it writes them.
4. Commit: rank 0 writes state.json and manifest.json, and renames the folder.
5. Tidy up: rank 0 updates the pointers `latest` and `best`, then removes old checkpoints.

A kill at any moment leaves the named folders whole, and at most one unfinished folder besides. If
it comes while the checkpoint of a step is being replaced, the next start gives the old or the new
folder its name back (`retention.recover`).

If hosts share no disk (disks.py), one rank of each disk does rank 0's part there, and each file is
copied to `replicas` further disks before the commit. With a URL (remote.py) each rank then uploads
its files; the manifest goes last.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from drumline.checkpoint.disks import Disks, Gatherer, transfer_files
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
    write_manifest_or_part,
)
from drumline.checkpoint.ranks import RankGroup, RanksError, describe_error, is_permanent
from drumline.checkpoint.remote import RemoteCheckpoints
from drumline.checkpoint.retention import LocalCheckpoints, best_checkpoint
from drumline.checkpoint.staging import Staging
from drumline.checkpoint.storage import Writer, read_tensor_records
from drumline.errors import CheckpointError, EnvironmentFault
from drumline.system.heartbeat import TIMES, alive
from drumline.system.threads import bind_to_gpu
from drumline.version import __version__

# Free space that a save requires, as a multiple of its estimated bytes.
HEADROOM = 1.2
# Bytes of a stored tensor besides its numbers (zip headers, alignment, its entry in the index);
# measured 1.6 KB.
OVERHEAD_BYTES = 2048
# A rank that waits for a save in the background counts as hung after TIMES the seconds of the
# longest save so far (system/heartbeat.py), but not before it has waited so long.
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SaveResult:
    """How a save ended.

    It is the same on every rank, apart from the seconds, and from the path if hosts have folders of
    their own.

    `step`: the training step of the checkpoint.
    `path`: the checkpoint; None if it was not committed, or did not reach its URL.
    `seconds`: from the call of `save` until the save had succeeded or failed.
    `bytes`: of all files of the checkpoint, from all ranks; 0 without a `path`.
    `error`: why the save failed. With a `path` the checkpoint is whole, and tidying up failed.
    `blocked_seconds`: for how long training waited: all `seconds` unless the save is asynchronous.
    `begun`: False if the disk had too little space, so nothing was written.
    `is_permanent`: a second attempt would fail for the same reason.
    """

    step: int
    path: Path | None
    seconds: float
    bytes: int
    error: str | None
    blocked_seconds: float
    begun: bool = True
    is_permanent: bool = False


T = TypeVar("T")


class _NotUploaded(Exception):
    """A checkpoint on disk did not reach the URL. `cause`: what failed, on which ranks."""

    def __init__(self, cause: RanksError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass
class _Job:
    """A save, from its preparation on.

    `begun` of its result is False if it lacks space already before anything is written.
    """

    step: int
    state: bytes
    metric: float | None
    started: float  # time.monotonic()
    tensors: dict[str, Tensor] = field(default_factory=dict)  # this rank's share
    estimate: int = 0  # bytes, of all ranks together
    # Seconds that training waited for an asynchronous save; None: training waits to the end.
    blocked_seconds: float | None = None


class _Written(NamedTuple):
    """What a rank has written: a record of each shard, by file name.

    `serial`: the next serial by what this rank's disk and the URL hold. The largest one of all
    ranks becomes the serial of the save.
    """

    records: dict[str, FileRecord]
    serial: int


class _Committed(NamedTuple):
    """A checkpoint that has its name. `written`: the files that this rank wrote."""

    path: Path
    manifest: Manifest
    written: dict[str, FileRecord]


class Checkpointer:
    """Saves a run's tensors and state under `root`, one save at a time.

    All ranks build it together, after the process group, and call `save` together. `save` does not
    raise for a full disk or a failed rank: `poll` and `wait` return the results. Call `wait` before
    the process group is destroyed. A process that ends finishes the save in flight first.
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
        """Open the folder and the URL.

        All but `asynchronous`, `url` and `replicas` is described at `Retention`. `asynchronous`:
        training goes on while a thread writes. `url`: a place for copies (`RemoteCheckpoints`).
        `replicas`: to how many further disks each file is copied. With a `url` or `replicas` each
        host may have a `root` of its own. Collective; raises EnvironmentFault if `root` or the URL
        cannot be used.
        """
        self.root = Path(root)
        self.asynchronous = asynchronous
        self.replicas = replicas
        self.ranks = RankGroup.create_separate()
        self.retention = LocalCheckpoints(self.root, keep, keep_best, mode, serial)
        self.remote: RemoteCheckpoints | None = None
        if url:
            self.remote = RemoteCheckpoints(url, keep, keep_best, mode)
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._longest_seconds = 0.0  # of any save so far
        # The result of the save in flight, once it has ended; `_join` moves it to `_results`.
        self._ended: SaveResult | None = None
        # Results that `poll` has not returned yet.
        self._results: list[SaveResult] = []
        try:
            if url or replicas:
                self.disks = Disks.find(self.root, self.ranks)
            else:
                self.disks = Disks.one_shared(self.ranks)
            self._run_on_each_disk(self.retention.open)
            if self.remote is not None:
                self.ranks.run_on_rank_0(self.remote.open)
        except RanksError as failure:
            raise EnvironmentFault(
                f"checkpoints cannot be kept here: {failure}", where=str(self.root)
            ) from failure

    def _run_on_each_disk(self, action: Callable[[], T]) -> list[T | None]:
        """Run `action` on one rank of each disk, its leader.

        Returns the results by rank; None for ranks that lead no disk. Collective; raises
        RanksError.
        """

        def run_if_leader() -> T | None:
            if self.disks.is_leader:
                return action()
            return None

        return self.ranks.run_on_all(run_if_leader)

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], metric: float | None
    ) -> None:
        """Save a checkpoint of a training step, in the background if `asynchronous`. Collective.

        Waits first for a save in flight. Training may change the tensors once this returns.

        `tensors`: by canonical name, plain tensors or DTensors. A plain tensor must be equal on all
        ranks that name it. `state`: of the run, what JSON can hold; rank 0's is saved. `metric`: of
        these weights; None, or a number that is not finite, if it is not known.
        """
        if metric is not None:
            metric = float(metric)
            if not math.isfinite(metric):
                metric = None
        job = _Job(step, json.dumps(state).encode(), metric, started=time.monotonic())
        self._join()
        try:
            space_error = self._prepare(job, tensors)
        except Exception as failure:  # noqa: BLE001 - a failed save is a result
            self._ended = _make_failure(job, failure)
            return
        if space_error is not None:
            self._ended = replace(_result(job, None, 0, space_error), begun=False)
            return
        if not self.asynchronous:
            self._run(job)
            return
        job.blocked_seconds = time.monotonic() - job.started
        self._thread = threading.Thread(
            target=bind_to_gpu(self._run), args=(job,), name=f"save-step-{step}"
        )
        self._thread.start()

    def _prepare(self, job: _Job, tensors: dict[str, Tensor]) -> str | None:
        """Decide what this rank stores, and copy it for the background.

        Returns the error if a disk lacks space; None if none does. Collective; raises RanksError.
        """
        job.tensors, job.estimate = assign_tensors(tensors, self.ranks)
        for space_error in self.ranks.run_on_all(lambda: self._space_error(job)):
            if space_error is not None:
                return space_error
        if self.asynchronous:
            copies: dict[str, Tensor] = {}
            # On all ranks together: if one lacks memory for its copies, the save fails on all, and
            # none waits for another.
            self.ranks.run_on_all(lambda: copies.update(self.staging.copy(job.tensors)))
            job.tensors = copies
        return None

    def write_metric(self, step: int, metric: float) -> str | None:
        """Write the metric of a checkpoint's weights into its manifests, on each disk and at the URL.

        Then the best checkpoint is chosen anew, and old ones are removed. No tensor is written.
        Each manifest is replaced by a whole new one, so a kill leaves the checkpoint readable, with
        its metric or without. Waits for a save in flight first. Collective.

        Returns the error; None if the metric was written, or is not finite and counts as none.
        """
        self._join()
        if not math.isfinite(metric):
            return None
        try:
            manifest = self._run_on_each_disk(lambda: self.retention.write_metric(step, metric))[0]
            assert manifest is not None, "rank 0 leads its disk"
            remote = self.remote
            if remote is not None:
                self.ranks.run_on_rank_0(lambda: remote.replace_manifest(manifest))
            # Nothing is removed before all have the metric.
            self._run_on_each_disk(self.retention.tidy_up)
            if remote is not None:
                self.ranks.run_on_rank_0(remote.tidy_up)
        # The checkpoint itself is whole; the caller may save it anew.
        except Exception as failure:  # noqa: BLE001
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
        """Save to another `folder`, after saves under `root` have failed. Collective.

        If the whole checkpoint cannot be saved there, only its weights are saved. Returns (result,
        whether the whole checkpoint was saved). Nothing was saved if the result has no path.
        """
        try:
            rescuer = Checkpointer(
                folder,
                keep=sys.maxsize,
                keep_best=False,
                mode=self.retention.mode,
                asynchronous=False,
                serial=self.retention.next_serial(),
            )
        except EnvironmentFault as failure:
            return SaveResult(step, None, 0.0, 0, failure.line(), 0.0, begun=False), False
        rescuer.save(step, tensors, state, metric)
        (result,) = rescuer.wait()
        if result.path is not None:
            return result, True
        weights = {}
        for name, tensor in tensors.items():
            # The section of an auxiliary model is ROLE/model.
            section = name.partition(".")[0]
            if section.endswith("model"):
                weights[name] = tensor
        rescuer.save(step, weights, {**state, WEIGHTS_ONLY: True}, metric)
        (result,) = rescuer.wait()
        return result, False

    def gather(self) -> None:
        """Make the newest checkpoint and the best one whole on rank 0's disk.

        No save may be in flight (`wait`), because its thread uses the same process group.
        Collective; raises CheckpointError.
        """
        copies = self.replicas + 1
        every_disk_has_all_files = len(self.disks.groups) <= copies
        if every_disk_has_all_files:
            return
        disks = Disks(RankGroup(self.ranks.group, CheckpointError), self.disks.groups)
        store = None
        if self.remote is not None:
            store = self.remote.store
        gatherer = Gatherer(self.root, False, store, disks, only_first_disk=True)
        gatherer.newest(lambda known: best_checkpoint(known, self.retention.mode))

    def poll(self) -> list[SaveResult]:
        """Return the results of the saves that ended since the last call, oldest first.

        It does not wait and is not collective: ranks may get a result at different steps.
        """
        if self._thread is None or not self._thread.is_alive():
            self._join()
        results = self._results
        self._results = []
        return results

    def wait(self) -> list[SaveResult]:
        """Return the same as `poll`, after the save in flight has ended."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        """Wait for the save in flight, and keep its result."""
        if self._thread:
            # The limit of the first save is that of `health`.
            patience = math.inf
            if self._longest_seconds:
                patience = max(PATIENCE_SECONDS, TIMES * self._longest_seconds)
            alive(patience)
            self._thread.join()
            self._thread = None
            alive()
        if self._ended:
            self._longest_seconds = max(self._longest_seconds, self._ended.seconds)
            self._results.append(self._ended)
            self._ended = None

    def _run(self, job: _Job) -> None:
        """Do all of a save that follows its preparation, and store its result in `_ended`.

        It runs in a thread if the save is asynchronous.
        """
        folder: Path | None = None
        try:
            folder = self._make_folder(job)
            committed = self._commit(job, folder)
        # CheckpointException is no Exception: torch derives it from BaseException.
        except (Exception, CheckpointException) as failure:  # noqa: BLE001 - a failed save is a result
            if folder and self.disks.is_leader:
                # The rest is removed at the next start; the result reports the failure itself.
                shutil.rmtree(folder, ignore_errors=True)
            self._ended = _make_failure(job, failure)
            return
        manifest = committed.manifest
        errors = []
        try:
            self._run_on_each_disk(self.retention.tidy_up)
        except Exception as failure:  # noqa: BLE001 - the save itself has succeeded
            errors.append(describe_error(failure))
        try:
            if self.remote is not None:
                self._upload(self.remote, committed)
        except _NotUploaded as failure:
            errors.insert(
                0, f"it is whole in {committed.path}, and did not reach its URL: {failure}"
            )
            result = _result(job, None, 0, "; ".join(errors))
            self._ended = replace(result, is_permanent=is_permanent(failure.cause))
            return
        except Exception as failure:  # noqa: BLE001 - the save itself has succeeded
            errors.append(describe_error(failure))
        tidying_error: str | None = None
        if errors:
            reasons = "; ".join(errors)
            tidying_error = f"the checkpoint is whole, but tidying up after it failed: {reasons}"
        self._ended = _result(job, committed.path, manifest.bytes, tidying_error)

    def _space_error(self, job: _Job) -> str | None:
        """Return the error if this disk lacks space for a save; None if it does not. Raises OSError."""
        # Somebody may have removed the folder since the last save.
        self.root.mkdir(parents=True, exist_ok=True)
        share = self.disks.share_of_files(self.replicas)
        needed = int(HEADROOM * (share * job.estimate + len(job.state)))
        free = free_bytes(self.root)
        if free < needed:
            return f"no space: {needed:,} bytes needed, {free:,} free in {self.root}"
        return None

    def _make_folder(self, job: _Job) -> Path:
        """Make an unfinished folder of one name on each disk. Collective."""

        def make_name() -> str:
            return f"{UNFINISHED}{folder_name(job.step)}-{secrets.token_hex(4)}"

        folder = self.root / self.ranks.run_on_rank_0(make_name)
        self._run_on_each_disk(folder.mkdir)
        return folder

    def _commit(self, job: _Job, folder: Path) -> _Committed:
        """Write all files of a save and give it its name.

        Collective; raises RanksError, or RuntimeError if a rank died.
        """
        parts = self.ranks.run_on_all(
            lambda: _Written(self._write_shards(job, folder), self._next_serial())
        )
        written = [part.records for part in parts]
        serial = max(part.serial for part in parts)
        copies = self.disks.copies(written, self.replicas)
        transfer_files(copies, folder, folder, self.ranks)
        index, state = self._index_and_state(job, folder)

        def finish() -> Manifest:
            if self.ranks.rank != 0:
                write_durable(folder / INDEX, index)
            files = {}
            for records in written:
                files.update(records)
            files[STATE] = write_durable(folder / STATE, state)
            manifest = self._manifest(job, serial, files, folder)
            group = self.disks.my_group
            present = {INDEX, STATE}
            for rank in group:
                present.update(written[rank])
            for copy in copies:
                if copy.target in group:
                    present.add(copy.name)
            write_manifest_or_part(folder, manifest, present)
            self.retention.commit(folder, manifest)
            return manifest

        manifest = self._run_on_each_disk(finish)[0]
        assert manifest is not None, "rank 0 leads its disk"
        path = self.root / folder_name(job.step)
        return _Committed(path, manifest, written[self.ranks.rank])

    def _index_and_state(self, job: _Job, folder: Path) -> tuple[bytes, bytes]:
        """Return (index, state of the run) for the leader of each disk to write. Collective.

        Both are rank 0's: torch.distributed.checkpoint has written the index (.metadata) only to
        its disk. If all ranks share that disk, the index is b"", because it need not be written.
        """
        if len(self.disks.groups) == 1:
            return b"", job.state
        return self.ranks.run_on_rank_0(lambda: ((folder / INDEX).read_bytes(), job.state))

    def _manifest(
        self, job: _Job, serial: int, files: dict[str, FileRecord], folder: Path
    ) -> Manifest:
        """Return the manifest of a save."""
        rated: str | None = None
        if job.metric is not None:
            rated = self.retention.mode
        return Manifest(
            step=job.step,
            serial=serial,
            metric=job.metric,
            rated=rated,
            drumline=__version__,
            torch=torch.__version__,
            world_size=self.ranks.size,
            files=files,
            tensors=read_tensor_records(folder),
        )

    def _next_serial(self) -> int:
        """Return the serial of the next save: larger than any on this disk and at the URL."""
        serial = self.retention.next_serial()
        if self.remote is not None:
            serial = max(serial, self.remote.next_serial())
        return serial

    def _upload(self, remote: RemoteCheckpoints, committed: _Committed) -> None:
        """Copy a committed checkpoint to the URL, and tidy up there.

        Collective; raises _NotUploaded, then RanksError.
        """
        folder = committed.path
        manifest = committed.manifest
        names = committed.written.keys() - {INDEX, STATE}
        try:
            self.ranks.run_on_rank_0(lambda: remote.make_room(manifest.step))
            self.ranks.run_on_all(lambda: remote.send(folder, names))
            self.ranks.run_on_rank_0(lambda: remote.finish(folder, manifest))
        except RanksError as failure:
            raise _NotUploaded(failure) from failure
        self.ranks.run_on_rank_0(remote.tidy_up)

    def is_kept(self, path: Path) -> bool:
        """Return whether a checkpoint lies under `root`, and at the URL if there is one.

        No save may be in flight (`wait`). Collective.
        """

        def is_known() -> bool:
            step = step_of(path.name)
            if step is None or path.parent.absolute() != self.root.absolute():
                return False
            manifest = self.retention.known.get(step)
            if manifest is None:
                return False
            return self.remote is None or self.remote.known.get(step) == manifest

        return self.ranks.run_on_rank_0(is_known)

    def _write_shards(self, job: _Job, folder: Path) -> dict[str, FileRecord]:
        """Write this rank's shards, and return the record of each file. Raises this rank's error.

        If dcp.save fails on one rank, it raises CheckpointException on all. The ranks that did not
        fail return {}, so that only the failed rank reports its error.
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


class _Size(NamedTuple):
    """The bytes of a tensor on all ranks, and whether it is a DTensor."""

    bytes: int
    is_sharded: bool


def assign_tensors(tensors: dict[str, Tensor], ranks: RankGroup) -> tuple[dict[str, Tensor], int]:
    """Return the tensors that this rank stores, and the bytes that all ranks store together.

    The bytes are an upper estimate. A plain tensor is whole on every rank that names it, so one of
    these ranks stores it. The largest tensor is assigned first, each to the rank with the fewest
    bytes so far; all ranks compute the same answer. A DTensor stays with every rank: each has its
    shard, and the planner of torch.distributed.checkpoint leaves replicas of a shard out.

    Tensors are assigned before they are copied for the background, so that eight data-parallel
    ranks of a host keep one copy of the model together. Collective; raises RanksError.
    """
    mine = {}
    for name, tensor in tensors.items():
        mine[name] = _Size(tensor.numel() * tensor.element_size(), isinstance(tensor, DTensor))
    everyone = ranks.run_on_all(lambda: mine)
    sizes: dict[str, int] = {}
    for sizes_of_rank in everyone:
        for name, size in sizes_of_rank.items():
            sizes[name] = size.bytes
    shares: dict[str, Tensor] = {
        name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)
    }
    owners = _owners(sizes, everyone)
    for name, owner in owners.items():
        if owner == ranks.rank:
            shares[name] = tensors[name]
    return shares, sum(sizes.values()) + OVERHEAD_BYTES * len(sizes)


def _owners(sizes: dict[str, int], everyone: list[dict[str, _Size]]) -> dict[str, int]:
    """Return the rank that stores each plain tensor. `everyone`: by rank, what that rank names."""
    owners = {}
    bytes_of_rank = [0] * len(everyone)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = []
        for rank, named in enumerate(everyone):
            if name in named and not named[name].is_sharded:
                holders.append(rank)
        if holders:
            owner = min(holders, key=lambda rank: bytes_of_rank[rank])
            bytes_of_rank[owner] += sizes[name] + OVERHEAD_BYTES
            owners[name] = owner
    return owners


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's disk."""
    return shutil.disk_usage(folder).free


def _make_failure(job: _Job, failure: BaseException) -> SaveResult:
    """Return the result of a save that failed."""
    result = _result(job, None, 0, describe_error(failure))
    return replace(result, is_permanent=is_permanent(failure))


def _result(job: _Job, path: Path | None, nbytes: int, error: str | None) -> SaveResult:
    """Return the result of a save that ends now."""
    seconds = time.monotonic() - job.started
    blocked = job.blocked_seconds
    if blocked is None:
        blocked = seconds
    return SaveResult(job.step, path, seconds, nbytes, error, blocked)
