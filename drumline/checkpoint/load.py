"""Loads checkpoints: one must be whole, unchanged and of the run's shapes before anything of it is read
into a run.

`check`, `newest` and `load` are collective if torch.distributed is initialised: the ranks divide
the hashing and get the same answer. With `alone=True` this process acts by itself nevertheless (an
export on rank 0).
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
from drumline.checkpoint.remote import choose_or_none, state_at
from drumline.checkpoint.storage import Reader, dtype_name, read_index
from drumline.config.mesh import share
from drumline.config.resume import CHECKPOINTS, Resume, is_run_folder
from drumline.config.urls import is_url
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HASHING_THREADS = 8
# Older checkpoints call compensation.<name> so.
BEFORE = re.compile(r"^optim\.(.+)\.compensation$")
WEIGHTS_ONLY = "weights_only"  # a key of the state: only the weights were saved
SAME = "load it with the model and optimizer it was saved with"


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint (None if there is none), and the newer ones that were skipped, each with the reason."""

    path: Path | None
    skipped: list[tuple[Path, str]]


def newest(root: Path, verify: bool, alone: bool = False, to_train: bool = False) -> Found:
    """Return the newest checkpoint under `root` that passes `check`.

    With `to_train` it has more than the weights. Collective unless `alone`. Raises CheckpointError
    for a `root` that may not be read.
    """
    ranks = Ranks.all(alone, CheckpointError)
    candidates, skipped = ranks.first(lambda: _by_age(root))
    for path in candidates:
        try:
            check(path, verify, alone)
            if to_train:
                ranks.first(partial(_require_state, path))
        except CheckpointError as error:
            skipped.append((path, error.line()))
        else:
            return Found(path, skipped)
    return Found(None, skipped)


def newest_state(root: Path, url: str | None) -> tuple[str, dict[str, Any]] | None:
    """Return (the place, the run's state) of the newest checkpoint on this disk or at a URL.

    The disk may hold only a part of it. None if there is no checkpoint. Only a look: nothing is
    verified but the state itself. Raises CheckpointError for a URL that does not answer.
    """
    here = _newest_here(root)
    if url is not None:
        chosen = choose_or_none(url)
        if chosen is not None:
            store, folder, manifest = chosen
            is_newer = here is None or read_part(here)[0].serial < manifest.serial
            if is_newer:
                return state_at(f"{store.url}/{folder}")
    if here is None:
        return None
    return str(here), read_state(here)


def state_to_resume(
    resume: Resume, root: Path, url: str | None
) -> tuple[str, dict[str, Any]] | None:
    """Return the place of the checkpoint that a run resumes from, and its state; None if it has saved none yet.

    `root`: the run's own checkpoints, and `url` the place of their copies. Only a look, as
    `newest_state`. Raises CheckpointError.
    """
    if resume.place is None:
        return newest_state(root, url)
    return named(resume.place)


def _newest_here(root: Path) -> Path | None:
    """Return the newest checkpoint that this disk has, whole or in part; None if there is none."""
    whole = newest(root, verify=False, alone=True, to_train=True).path
    parts = [path for path in _by_age(root)[0] if (path / PART).exists()]
    candidates = parts[:1]
    if whole is not None:
        candidates.insert(0, whole)
    return max(candidates, key=lambda path: read_part(path)[0].serial, default=None)


def named(place: str) -> tuple[str, dict[str, Any]]:
    """Return the folder or URL of a checkpoint, or of the newest one of a run, and its state.

    Only a look, as `newest_state`. Raises CheckpointError for any other place.
    """
    if is_url(place):
        return state_at(place)
    with disk_errors("cannot be read", place, CheckpointError):
        path = Path(place)
        checkpoint: Path | None = None
        if is_run_folder(place):
            root = path / CHECKPOINTS
            checkpoint = newest(root, verify=False, alone=True, to_train=True).path
        if checkpoint is None:
            check(path, verify=False, alone=True)
            _require_state(path)
            checkpoint = path
        return str(checkpoint), read_state(checkpoint)


def pointed(root: Path, pointer: Literal["latest", "best"]) -> Path | None:
    """Return the folder that a pointer file names; None if there is no such pointer or folder."""
    try:
        name = (root / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = root / name
    if step_of(name) is None or not path.is_dir():
        return None
    return path


def best_or_latest(root: Path) -> Path | None:
    """Return the best checkpoint of a run, else the newest one; None if nothing was saved."""
    return pointed(root, "best") or pointed(root, "latest")


def check(path: Path, verify: bool, alone: bool = False) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, plain and of the right size.

    Always hashes the state and the index; with `verify` the shards too. Collective unless `alone`.
    Raises CheckpointError that names the file and the reason, also for a shard that does not belong
    to it.
    """
    ranks = Ranks.all(alone, CheckpointError)
    manifest = ranks.first(lambda: _structure(path))
    if verify:
        sizes = {name: record.bytes for name, record in manifest.files.items()}
        owners = share(sizes, ranks.size)
        mine = [name for name, rank in owners.items() if rank == ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:

            def hash_mine() -> None:
                # `list` waits for all files and raises the first error.
                list(pool.map(lambda name: _require_file(path, name, manifest), mine))

            ranks.each(hash_mine)
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """Return the run's state, as `save` got it, also of a part of a checkpoint.

    Not collective. Raises CheckpointError.
    """
    manifest, _ = read_part(path)
    _require_file(path, STATE, manifest)
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
    """Fill `tensors` (plain or DTensors, by canonical name) in place from a checkpoint.

    The checkpoint may be of any number of ranks. Shapes and dtypes must be the stored ones.

    A section of names (`model.`, `optim.`) is loaded whole or not at all: the ranks together must
    name all tensors of a section, unless `partly`, for readers that do not train. If the checkpoint
    lacks an `optional` section, its tensors stay as they are, and so do moments of a weight that
    learned but had not been stepped.

    Collective unless `alone`. Raises CheckpointError on every rank: before it reads anything if
    names, shapes or dtypes differ; if it is raised later, `tensors` must not be used.
    """
    ranks = Ranks.all(alone, CheckpointError)
    wanted: dict[str, Tensor] = {}

    def match() -> list[str]:
        manifest = _structure(path)
        wanted.update(_match_names(manifest, tensors, optional))
        misfit = _misfit(manifest, wanted)
        if misfit:
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

    names = set()
    for names_of_rank in ranks.each(match):
        names.update(names_of_rank)
    if not partly:
        ranks.first(lambda: _require_whole_sections(path, names))
    ranks.each(read)


def _match_names(
    manifest: Manifest, tensors: dict[str, Tensor], optional: frozenset[str]
) -> dict[str, Tensor]:
    """Return the tensors to fill, by their names in the checkpoint. See `load`."""
    stored = {_current_name(name): name for name in manifest.tensors}
    absent = optional - {_section(name) for name in stored}
    stepped = {_weight(name) for name in stored if _is_moment(name)}
    wanted = {}
    for name, tensor in tensors.items():
        if _section(name) in absent:
            continue
        if _is_moment(name) and stepped:
            weight = _weight(name)
            is_before_first_step = weight in stored and weight not in stepped
            if is_before_first_step:
                continue
        wanted[stored.get(name, name)] = tensor
    return wanted


def _by_age(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the committed checkpoints under `root`, newest first, and those with an unreadable manifest.

    Each of the latter comes with the reason.
    """
    readable: list[tuple[int, Path]] = []
    unreadable: list[tuple[Path, str]] = []
    entries = []
    with disk_errors("cannot be read", str(root), CheckpointError):
        if root.is_dir():
            entries = sorted(root.iterdir(), reverse=True)
    for path in entries:
        if step_of(path.name) is None:
            continue
        try:
            manifest, _ = read_part(path)
        except CheckpointError as error:
            unreadable.append((path, error.line()))
        else:
            readable.append((manifest.serial, path))
    paths = [path for _, path in sorted(readable, reverse=True)]
    return paths, unreadable


def _structure(path: Path) -> Manifest:
    """Return the manifest, after all checks but those of the shards' content. Raises CheckpointError."""
    with disk_errors("cannot be read", str(path), CheckpointError):
        _require_committed(path)
        manifest = read_manifest(path)
        present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    # A shard too many means that two saves were mixed. Files of desktops and network disks
    # (.DS_Store, .nfs…) are never read.
    for name in sorted(present - set(manifest.files)):
        if SHARD_NAME.fullmatch(name):
            raise CheckpointError("does not belong to this checkpoint", where=str(path / name))
    for name, record in manifest.files.items():
        place = str(path / name)
        if name not in present:
            raise CheckpointError("is missing", where=place)
        with disk_errors("cannot be read", place, CheckpointError):
            with open_regular(path / name) as file:
                size = file.seek(0, 2)
        if size != record.bytes:
            raise CheckpointError(f"has {size:,} bytes, {record.bytes:,} were written", where=place)
    for name in (STATE, INDEX):
        _require_file(path, name, manifest)
    read_index(path, manifest)
    return manifest


def _require_committed(path: Path) -> None:
    """Raise CheckpointError unless `path` is a folder that a save has finished.

    The error names the nearest whole checkpoint.
    """
    is_named = not path.name.startswith(TEMP)
    if is_named and path.is_dir() and (path / MANIFEST).exists():
        return
    if _has_pickles(path):
        raise CheckpointError(
            "a pickle checkpoint",
            where=str(path),
            fix="convert it first: a pickle can run code when it is read",
        )
    if (path / PART).exists() and step_of(path.name) is not None:
        manifest, present = read_part(path)
        raise CheckpointError(
            f"holds {len(present)} of the {len(manifest.files)} files of a checkpoint that lies on the "
            "disks of several hosts",
            where=str(path),
            fix="train with --resume on all hosts: they put it together",
        )
    for root in (path, path / "checkpoints", path.parent):
        nearest = newest(root, verify=False, alone=True).path
        if nearest:
            raise CheckpointError(
                f"not a committed checkpoint; newest valid: {nearest}", where=str(path)
            )
    if path.exists():
        what = "not a committed checkpoint, and there is none near it"
    else:
        what = "there is no such file or folder"
    raise CheckpointError(what, where=str(path))


def _has_pickles(path: Path) -> bool:
    """Return whether a path is a pickle, or a folder with pickles in it."""
    if path.is_file():
        return path.suffix in PICKLES
    return any(entry.suffix in PICKLES for entry in path.glob("*"))


def _require_state(path: Path) -> None:
    """Raise CheckpointError for a checkpoint of the weights alone."""
    if read_state(path).get(WEIGHTS_ONLY):
        raise CheckpointError(
            "holds the weights alone: there was no room for more",
            where=str(path),
            fix="export them, or go on from a checkpoint before",
        )


def _require_file(path: Path, name: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless a file has its written content."""
    place = str(path / name)
    if name not in manifest.files:
        raise CheckpointError(f"the manifest has no {name}", where=str(path / MANIFEST))
    with disk_errors("cannot be read", place, CheckpointError):
        record = record_of(path / name)
    if record != manifest.files[name]:
        raise CheckpointError(
            "damaged: its content is not what was written (sha256 differs)", where=place
        )


def _misfit(manifest: Manifest, tensors: dict[str, Tensor]) -> str | None:
    """Return why this rank's tensors cannot be filled; None if they can."""
    missing = [name for name in tensors if name not in manifest.tensors]
    if missing:
        return f"holds no {_some(missing)}"
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        shape = list(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        if stored.shape != shape:
            return f"{name} has shape {stored.shape} in the checkpoint, {shape} in this run"
        if stored.dtype != dtype:
            return f"{name} is {stored.dtype} in the checkpoint, {dtype} in this run"
    return None


def _require_whole_sections(path: Path, names: set[str]) -> None:
    """Raise CheckpointError if `names` has only a part of a section.

    Trained tensors would be lost silently. Older checkpoints hold moments of weights that were
    frozen, and so are not in the checkpoint: these moments are zeros and may be left out.
    """
    sections = {_section(name) for name in names}
    stored = read_manifest(path).tensors
    left = []
    for name in stored:
        is_of_frozen_weight = _is_moment(name) and _weight(name) not in stored
        if name not in names and _section(name) in sections and not is_of_frozen_weight:
            left.append(name)
    if left:
        raise CheckpointError(
            f"holds {_some(left)}, which this run has no place for", where=str(path), fix=SAME
        )


def compensations(path: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Return places for stored compensations of Kahan sums that `tensors` have no place for.

    The result maps their names to (name of the weight, zeros like it).
    """
    names = set()
    for name in read_manifest(path).tensors:
        if _section(name) == "compensation":
            names.add(_current_name(name).removeprefix("compensation."))
    places = {}
    for name in names:
        compensation = f"compensation.{name}"
        weight = f"model.{name}"
        if compensation not in tensors and weight in tensors:
            places[compensation] = (weight, torch.zeros_like(tensors[weight]))
    return places


def _is_moment(name: str) -> bool:
    """Return whether a tensor is a moment of an optimizer, also of an auxiliary model's."""
    return _section(name).rpartition("/")[2] == "optim"


def _weight(moment: str) -> str:
    """Return the name of a moment's weight: model.<name> of optim.<name>.<slot>."""
    return moment.rpartition(".")[0].replace("optim.", "model.", 1)


def _current_name(name: str) -> str:
    """Return the name that a tensor has today, of its name in a checkpoint."""
    return BEFORE.sub(r"compensation.\1", name)


def _section(name: str) -> str:
    """Return the section of a tensor's name, such as `model` or `optim`."""
    return _current_name(name).partition(".")[0]


def _some(names: list[str]) -> str:
    """Return the first name, and how many there are besides."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"
