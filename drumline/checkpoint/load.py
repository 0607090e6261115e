"""Loading: nothing is read into a run before it is known to be whole, unchanged and of the run's own shapes.

`check`, `newest` and `load` are collective when torch.distributed is initialised: the ranks share the hashing out and come to
the same answer. `alone=True` is for one process that acts by itself all the same (an export on rank 0).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from drumline.checkpoint.files import open_regular, record_of
from drumline.checkpoint.manifest import INDEX, MANIFEST, SHARD_NAME, STATE, TRASH, UNFINISHED, Manifest, read_manifest, step_of
from drumline.checkpoint.ranks import Ranks, RanksError, describe_error
from drumline.checkpoint.storage import Reader, dtype_name, read_index
from drumline.errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HASHING_THREADS = 8


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint (None when there is none), and those passed over for it, each with the reason."""

    path: Path | None
    skipped: list[tuple[Path, str]]


def newest(root: Path, verify: bool, alone: bool = False) -> Found:
    """The newest checkpoint under `root` that `check` finds nothing against. Collective unless `alone`."""
    candidates, skipped = Ranks.all(alone).first(lambda: _by_age(root))
    for path in candidates:
        try:
            check(path, verify, alone)
        except CheckpointError as error:
            skipped.append((path, error.line()))
        else:
            return Found(path, skipped)
    return Found(None, skipped)


def pointed(root: Path, pointer: Literal["latest", "best"]) -> Path | None:
    """The folder that a pointer file names; None when there is no such pointer or folder."""
    try:
        name = (root / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = root / name
    return path if step_of(name) is not None and path.is_dir() else None


def check(path: Path, verify: bool, alone: bool = False) -> Manifest:
    """What is in a checkpoint, once nothing speaks against it: all its files are there, plain, of the right size, and no shards besides.

    The state and the index are always hashed; `verify` hashes the shards too. Collective unless `alone`. Raises CheckpointError
    naming the file and the reason.
    """
    ranks = Ranks.all(alone)
    try:
        manifest = ranks.first(lambda: _structure(path))
        if verify:
            shares = _share(manifest, ranks.size)
            ranks.each(lambda: _require_files(path, shares[ranks.rank], manifest))
    except RanksError as failure:
        raise CheckpointError(str(failure)) from failure
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """The run's own state, as it was given to `save`. Not collective. Raises CheckpointError."""
    _require_file(path, STATE, read_manifest(path))
    with open_regular(path / STATE) as file:
        state = json.load(file)
    assert isinstance(state, dict)
    return state


def load(path: Path, tensors: dict[str, Tensor], alone: bool = False, partly: bool = False, optional: frozenset[str] = frozenset()) -> None:
    """Fill `tensors` (plain or DTensors, by canonical name) in place from a checkpoint saved by any number of ranks.

    A section of names (`model.`, `optim.`) is loaded whole or not at all: between them the ranks must name all the tensors of
    each section they name any of, unless `partly` is said by somebody who only looks. Shapes and dtypes must be the stored ones.
    Tensors of an `optional` section that the checkpoint does not have are left as they are. Collective unless `alone`. Raises
    CheckpointError on every rank: before anything is read when names, shapes or dtypes differ; after that, `tensors` is not to be used.
    """
    ranks = Ranks.all(alone)
    wanted: dict[str, Tensor] = {}

    def fit() -> list[str]:
        manifest = _structure(path)
        absent = optional - {_section(name) for name in manifest.tensors}
        wanted.update((name, tensor) for name, tensor in tensors.items() if _section(name) not in absent)
        misfit = _misfit(manifest, wanted)
        if misfit:
            raise CheckpointError(misfit, where=str(path), fix="load it with the model and optimizer it was saved with")
        return list(wanted)

    def read() -> None:
        reader = Reader(path, read_index(path, read_manifest(path)))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Each rank reads what it needs; the agreement on the outcome is ours.
        try:
            dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as failure:
            raise CheckpointError(f"cannot be read: {describe_error(failure)}", where=str(path)) from failure

    try:
        named = {name for names in ranks.each(fit) for name in names}
        if not partly:
            ranks.first(lambda: _require_whole_sections(path, named))
        ranks.each(read)
    except RanksError as failure:
        raise CheckpointError(str(failure)) from failure


def _by_age(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Committed checkpoints under `root`, newest first; and those whose manifest cannot be read, with the reason."""
    aged: list[tuple[int, Path]] = []
    unreadable: list[tuple[Path, str]] = []
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else []:
        if step_of(path.name) is not None:
            try:
                aged.append((read_manifest(path).serial, path))
            except CheckpointError as error:
                unreadable.append((path, error.line()))
    return [path for _, path in sorted(aged, reverse=True)], unreadable


def _structure(path: Path) -> Manifest:
    """Everything about a checkpoint but the contents of its shards. Raises CheckpointError."""
    _require_committed(path)
    manifest = read_manifest(path)
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    # What desktops and network disks leave (.DS_Store, .nfs…) is never read; a shard too many says that two saves were mixed.
    for name in sorted(filter(SHARD_NAME.fullmatch, present - set(manifest.files))):
        raise CheckpointError("does not belong to this checkpoint", where=str(path / name))
    for name, record in manifest.files.items():
        if name not in present:
            raise CheckpointError("is missing", where=str(path / name))
        try:
            with open_regular(path / name) as file:
                size = file.seek(0, 2)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path / name)) from error
        if size != record.bytes:
            raise CheckpointError(f"has {size:,} bytes, {record.bytes:,} were written", where=str(path / name))
    for name in (STATE, INDEX):
        _require_file(path, name, manifest)
    read_index(path, manifest)
    return manifest


def _require_committed(path: Path) -> None:
    """Raises CheckpointError, with the nearest thing that can be loaded, unless `path` is a folder that a save has finished."""
    committed = path.is_dir() and (path / MANIFEST).exists() and not path.name.startswith((UNFINISHED, TRASH))
    if committed:
        return
    if any(entry.suffix in PICKLES for entry in ([path] if path.is_file() else path.glob("*"))):
        raise CheckpointError("a pickle checkpoint", where=str(path), fix="convert it first: a pickle can run code when it is read")
    for root in (path, path / "checkpoints", path.parent):
        found = newest(root, verify=False, alone=True).path
        if found:
            raise CheckpointError(f"not a committed checkpoint; newest valid: {found}", where=str(path))
    raise CheckpointError("not a committed checkpoint, and there is none near it", where=str(path))


def _share(manifest: Manifest, ranks: int) -> list[list[str]]:
    """File names for each rank to hash: the largest first, to the least loaded."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        rank = load.index(min(load))
        shares[rank].append(name)
        load[rank] += record.bytes
    return shares


def _require_files(path: Path, names: list[str], manifest: Manifest) -> None:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for _ in pool.map(lambda name: _require_file(path, name, manifest), names):
            continue


def _require_file(path: Path, name: str, manifest: Manifest) -> None:
    """Raises CheckpointError unless a file has the content that was written."""
    place = str(path / name)
    if name not in manifest.files:
        raise CheckpointError(f"the manifest knows no {name}", where=str(path / MANIFEST))
    try:
        found = record_of(path / name)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=place) from error
    if found != manifest.files[name]:
        raise CheckpointError("damaged: its content is not what was written (sha256 differs)", where=place)


def _misfit(manifest: Manifest, tensors: dict[str, Tensor]) -> str | None:
    """What keeps this rank's tensors from being filled; None when nothing does."""
    missing = [name for name in tensors if name not in manifest.tensors]
    if missing:
        return f"holds no {_some(missing)}"
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        if stored.shape != list(tensor.shape):
            return f"{name} has shape {stored.shape} in the checkpoint, {list(tensor.shape)} in this run"
        if stored.dtype != dtype_name(tensor.dtype):
            return f"{name} is {stored.dtype} in the checkpoint, {dtype_name(tensor.dtype)} in this run"
    return None


def _require_whole_sections(path: Path, named: set[str]) -> None:
    """Raises CheckpointError when a section is asked for in part: something that was trained would be lost without a word."""
    sections = {_section(name) for name in named}
    left = [name for name in read_manifest(path).tensors if name not in named and _section(name) in sections]
    if left:
        raise CheckpointError(
            f"holds {_some(left)}, which this run has no place for",
            where=str(path),
            fix="load it with the model and optimizer it was saved with",
        )


def _section(name: str) -> str:
    return name.partition(".")[0]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
