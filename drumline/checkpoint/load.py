"""Loading: a checkpoint must be whole, unchanged and of the run's shapes before anything of it is read into a run.

`check`, `newest` and `load` are collective if torch.distributed is initialised: the ranks divide the hashing and get the same answer.
`alone=True`: this process acts by itself all the same (an export on rank 0).
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from drumline.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PART,
    SHARD_NAME,
    STATE,
    TEMP,
    Manifest,
    open_regular,
    read_manifest,
    read_part,
    record_of,
    step_of,
)
from drumline.checkpoint.ranks import Ranks, describe_error
from drumline.checkpoint.remote import CHECKPOINTS, choose_or_none, state_at
from drumline.checkpoint.storage import Reader, dtype_name, read_index
from drumline.core.mesh import share
from drumline.core.urls import is_url
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HASHING_THREADS = 8
# What older checkpoints call compensation.<name>.
BEFORE = re.compile(r"^optim\.(.+)\.compensation$")
WEIGHTS_ONLY = "weights_only"  # in the state of what was saved without the rest
SAME = "load it with the model and optimizer it was saved with"


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint (None if there is none), and the newer ones that were skipped, each with the reason."""

    path: Path | None
    skipped: list[tuple[Path, str]]


def newest(root: Path, verify: bool, alone: bool = False, to_train: bool = False) -> Found:
    """The newest checkpoint under `root` that passes `check`; `to_train`: and has more than weights. Collective unless `alone`. Raises
    CheckpointError for a `root` that may not be read."""
    ranks = Ranks.all(alone, CheckpointError)
    candidates, skipped = ranks.first(lambda: _by_age(root))
    for path in candidates:
        try:
            check(path, verify, alone)
            if to_train:
                ranks.first(lambda place=path: _require_state(place))  # type: ignore[misc]
        except CheckpointError as error:
            skipped.append((path, error.line()))
        else:
            return Found(path, skipped)
    return Found(None, skipped)


def newest_state(root: Path, url: str | None) -> tuple[str, dict[str, Any]] | None:
    """(the place, the run's state) of the newest checkpoint that this disk, whole or in part, or a URL has; None where there is none.

    Only a look: nothing is verified but the state itself. Raises CheckpointError for a URL that does not answer.
    """
    whole, parts = (
        newest(root, verify=False, alone=True, to_train=True).path,
        [path for path in _by_age(root)[0] if (path / PART).exists()],
    )
    here = max(
        filter(None, (whole, *parts[:1])), key=lambda path: read_part(path)[0].serial, default=None
    )
    if url is not None and (there := choose_or_none(url)) is not None:
        store, folder, manifest = there
        if here is None or read_part(here)[0].serial < manifest.serial:
            return state_at(f"{store.url}/{folder}")
    return None if here is None else (str(here), read_state(here))


def of_run(place: str) -> bool:
    """Whether a place is the folder of a run, whose newest checkpoint is meant."""
    return not is_url(place) and (Path(place) / CHECKPOINTS).is_dir()


def named(place: str) -> tuple[str, dict[str, Any]]:
    """A checkpoint, or the newest one of a run, by its folder or URL; and its state. Only a look, as `newest_state`. Raises CheckpointError
    for anything else."""
    if is_url(place):
        return state_at(place)
    with disk_errors("cannot be read", place, CheckpointError):
        path = Path(place)
        found = (
            newest(path / CHECKPOINTS, verify=False, alone=True, to_train=True).path
            if of_run(place)
            else None
        )
        if found is None:
            check(path, verify=False, alone=True)
            _require_state(path)
            found = path
        return str(found), read_state(found)


def pointed(root: Path, pointer: Literal["latest", "best"]) -> Path | None:
    """The folder that a pointer file names; None if there is no such pointer or folder."""
    try:
        name = (root / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = root / name
    return path if step_of(name) is not None and path.is_dir() else None


def best_or_latest(root: Path) -> Path | None:
    """The best checkpoint of a run, else the newest one; None where nothing was saved."""
    return pointed(root, "best") or pointed(root, "latest")


def check(path: Path, verify: bool, alone: bool = False) -> Manifest:
    """The manifest of a checkpoint whose files are all there, plain and of the right size, without any shard more.

    Always hashes the state and the index; with `verify` the shards too. Collective unless `alone`. Raises CheckpointError that names the
    file and the reason.
    """
    ranks = Ranks.all(alone, CheckpointError)
    manifest = ranks.first(lambda: _structure(path))
    if verify:
        owners = share({name: record.bytes for name, record in manifest.files.items()}, ranks.size)
        mine = [name for name, rank in owners.items() if rank == ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            ranks.each(
                lambda: list(pool.map(lambda name: _require_file(path, name, manifest), mine))
            )
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """The run's state, as `save` got it, also of a part of a checkpoint. Not collective. Raises CheckpointError."""
    _require_file(path, STATE, read_part(path)[0])
    with open_regular(path / STATE) as file:
        state = json.load(file)
    assert isinstance(state, dict)
    return state


def load(
    path: Path,
    tensors: dict[str, Tensor],
    alone: bool = False,
    partly: bool = False,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Fill `tensors` (plain or DTensors, by canonical name) in place from a checkpoint of any number of ranks.

    A section of names (`model.`, `optim.`) is loaded whole or not at all: the ranks together must name all tensors of a section, unless
    `partly`, for readers that do not train. Shapes and dtypes must be the stored ones. If the checkpoint lacks an `optional` section, its
    tensors stay as they are, and so do moments of a weight that learned but had not been stepped. Collective unless `alone`. Raises
    CheckpointError on every rank: before it reads anything if names, shapes or dtypes differ; if it is raised later, `tensors` must not be
    used.
    """
    ranks = Ranks.all(alone, CheckpointError)
    wanted: dict[str, Tensor] = {}

    def fit() -> list[str]:
        manifest = _structure(path)
        stored = {_today(name): name for name in manifest.tensors}
        absent = optional - {_section(name) for name in stored}
        stepped = {_weight(name) for name in stored if _is_moment(name)}
        for name, tensor in tensors.items():
            begins = (
                _is_moment(name)
                and stepped
                and _weight(name) not in stepped
                and _weight(name) in stored
            )
            if _section(name) not in absent and not begins:
                wanted[stored.get(name, name)] = tensor
        if misfit := _misfit(manifest, wanted):
            raise CheckpointError(misfit, where=str(path), fix=SAME)
        return list(wanted)

    def read() -> None:
        reader = Reader(path, read_index(path, read_manifest(path)))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            # `ranks` makes the ranks agree on the outcome.
            dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as failure:
            raise CheckpointError(
                f"cannot be read: {describe_error(failure)}", where=str(path)
            ) from failure

    named = {name for names in ranks.each(fit) for name in names}
    if not partly:
        ranks.first(lambda: _require_whole_sections(path, named))
    ranks.each(read)


def _by_age(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The committed checkpoints under `root`, newest first; and those with an unreadable manifest, each with the reason."""
    aged: list[tuple[int, Path]] = []
    unreadable: list[tuple[Path, str]] = []
    with disk_errors("cannot be read", str(root), CheckpointError):
        entries = sorted(root.iterdir(), reverse=True) if root.is_dir() else []
    for path in entries:
        if step_of(path.name) is not None:
            try:
                aged.append((read_part(path)[0].serial, path))
            except CheckpointError as error:
                unreadable.append((path, error.line()))
    return [path for _, path in sorted(aged, reverse=True)], unreadable


def _structure(path: Path) -> Manifest:
    """The manifest, after all checks but those of the shards' content. Raises CheckpointError."""
    with disk_errors("cannot be read", str(path), CheckpointError):
        _require_committed(path)
        manifest = read_manifest(path)
        present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    # Files of desktops and network disks (.DS_Store, .nfs…) are never read; a shard too many means that two saves were mixed.
    for name in sorted(filter(SHARD_NAME.fullmatch, present - set(manifest.files))):
        raise CheckpointError("does not belong to this checkpoint", where=str(path / name))
    for name, record in manifest.files.items():
        if name not in present:
            raise CheckpointError("is missing", where=str(path / name))
        with disk_errors("cannot be read", str(path / name), CheckpointError):
            with open_regular(path / name) as file:
                size = file.seek(0, 2)
        if size != record.bytes:
            raise CheckpointError(
                f"has {size:,} bytes, {record.bytes:,} were written", where=str(path / name)
            )
    for name in (STATE, INDEX):
        _require_file(path, name, manifest)
    read_index(path, manifest)
    return manifest


def _require_committed(path: Path) -> None:
    """Raises CheckpointError, with the nearest whole checkpoint, unless `path` is a folder that a save has finished."""
    if path.is_dir() and (path / MANIFEST).exists() and not path.name.startswith(TEMP):
        return
    if any(entry.suffix in PICKLES for entry in ([path] if path.is_file() else path.glob("*"))):
        raise CheckpointError(
            "a pickle checkpoint",
            where=str(path),
            fix="convert it first: a pickle can run code when it is read",
        )
    if (path / PART).exists() and step_of(path.name) is not None:
        manifest, present = read_part(path)
        what = f"holds {len(present)} of the {len(manifest.files)} files of a checkpoint that lies on the disks of several hosts"
        raise CheckpointError(
            what, where=str(path), fix="train with --resume on all hosts: they put it together"
        )
    for root in (path, path / "checkpoints", path.parent):
        if found := newest(root, verify=False, alone=True).path:
            raise CheckpointError(
                f"not a committed checkpoint; newest valid: {found}", where=str(path)
            )
    what = (
        "not a committed checkpoint, and there is none near it"
        if path.exists()
        else "there is no such file or folder"
    )
    raise CheckpointError(what, where=str(path))


def _require_state(path: Path) -> None:
    """Raises CheckpointError for the weights alone."""
    if read_state(path).get(WEIGHTS_ONLY):
        fix = "export them, or go on from a checkpoint before"
        raise CheckpointError(
            "holds the weights alone: there was no room for more", where=str(path), fix=fix
        )


def _require_file(path: Path, name: str, manifest: Manifest) -> None:
    """Raises CheckpointError unless a file has its written content."""
    place = str(path / name)
    if name not in manifest.files:
        raise CheckpointError(f"the manifest has no {name}", where=str(path / MANIFEST))
    with disk_errors("cannot be read", place, CheckpointError):
        found = record_of(path / name)
    if found != manifest.files[name]:
        raise CheckpointError(
            "damaged: its content is not what was written (sha256 differs)", where=place
        )


def _misfit(manifest: Manifest, tensors: dict[str, Tensor]) -> str | None:
    """Why this rank's tensors cannot be filled; None if they can."""
    if missing := [name for name in tensors if name not in manifest.tensors]:
        return f"holds no {_some(missing)}"
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        if stored.shape != list(tensor.shape):
            return f"{name} has shape {stored.shape} in the checkpoint, {list(tensor.shape)} in this run"
        if stored.dtype != dtype_name(tensor.dtype):
            return f"{name} is {stored.dtype} in the checkpoint, {dtype_name(tensor.dtype)} in this run"
    return None


def _require_whole_sections(path: Path, named: set[str]) -> None:
    """Raises CheckpointError if `named` has only a part of a section: trained tensors would be lost silently. Moments of a weight that was
    frozen, and so is not in the checkpoint, are zeros, which older ones hold."""
    sections, stored = {_section(name) for name in named}, read_manifest(path).tensors
    frozen = {name for name in stored if _is_moment(name) and _weight(name) not in stored}
    if left := [
        name
        for name in stored
        if name not in named and name not in frozen and _section(name) in sections
    ]:
        raise CheckpointError(
            f"holds {_some(left)}, which this run has no place for", where=str(path), fix=SAME
        )


def compensations(path: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """name → (name of the weight, zeros like it) for what Kahan sums lost of those of `tensors`, which have no place for it."""
    names = {
        _today(name).removeprefix("compensation.")
        for name in read_manifest(path).tensors
        if _section(name) == "compensation"
    }
    absent = [
        name
        for name in names
        if f"compensation.{name}" not in tensors and f"model.{name}" in tensors
    ]
    return {
        f"compensation.{name}": (f"model.{name}", torch.zeros_like(tensors[f"model.{name}"]))
        for name in absent
    }


def _is_moment(name: str) -> bool:
    return _section(name).rpartition("/")[2] == "optim"


def _weight(moment: str) -> str:
    """The name of the weight: model.<name> of optim.<name>.<slot>."""
    return moment.rpartition(".")[0].replace("optim.", "model.", 1)


def _today(name: str) -> str:
    return BEFORE.sub(r"compensation.\1", name)


def _section(name: str) -> str:
    return _today(name).partition(".")[0]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
