"""Load checkpoints, each only after checks that it is whole, unchanged and of the run's shapes.

`check`, `newest` and `load` are collective if torch.distributed is initialised: the ranks share the
hashing and get the same answer. With `collective=False` one process can call them by itself, as an
export on rank 0 does.
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
    hash_file,
    open_regular,
    read_manifest,
    read_manifest_or_part,
    step_of,
)
from drumline.checkpoint.ranks import RankGroup, describe_error
from drumline.checkpoint.remote import find_newest_or_none, read_remote_state
from drumline.checkpoint.storage import Reader, dtype_name, read_index
from drumline.config.mesh import share
from drumline.config.resume import CHECKPOINTS, Resume, is_run_folder
from drumline.config.urls import is_url
from drumline.errors import CheckpointError
from drumline.foreign import disk_errors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HASHING_THREADS = 8
# What Drumline named compensation.<name> in older checkpoints.
OLD_COMPENSATION = re.compile(r"^optim\.(.+)\.compensation$")
WEIGHTS_ONLY = "weights_only"  # a key of the state: only the weights were saved
FIX_MISFIT = "load it with the model and optimizer it was saved with"


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest whole checkpoint, and the newer ones that were skipped."""

    # None if no checkpoint is whole.
    path: Path | None
    # Damaged checkpoints, each with the reason.
    skipped: list[tuple[Path, str]]


def newest(
    root: Path, verify: bool, collective: bool = True, skip_weights_only: bool = False
) -> FoundCheckpoint:
    """Return the newest checkpoint under `root` that passes `check`.

    `verify`: see `check`. `collective`: all ranks call this; otherwise this process acts by itself.
    `skip_weights_only`: a checkpoint without the state of the optimizer does not count, because no
    run can resume from it. Raises CheckpointError for a `root` that may not be read.
    """
    ranks = RankGroup.all(collective, CheckpointError)
    candidates, skipped = ranks.run_on_rank_0(lambda: _list_newest_first(root))
    for path in candidates:
        try:
            check(path, verify, collective)
            if skip_weights_only:
                ranks.run_on_rank_0(partial(_require_state, path))
        except CheckpointError as error:
            skipped.append((path, error.line()))
        else:
            return FoundCheckpoint(path, skipped)
    return FoundCheckpoint(None, skipped)


def newest_state(root: Path, url: str | None) -> tuple[str, dict[str, Any]] | None:
    """Return (folder or URL, the run's state) of the newest checkpoint on this disk or at a URL.

    None if there is no checkpoint. The disk may hold only a part of it: nothing is verified but the
    state itself. Raises CheckpointError for a URL that does not answer.
    """
    here = _newest_here(root)
    if url is not None:
        chosen = find_newest_or_none(url)
        if chosen is not None:
            store, folder, manifest = chosen
            is_newer = here is None or read_manifest_or_part(here)[0].serial < manifest.serial
            if is_newer:
                return read_remote_state(f"{store.url}/{folder}")
    if here is None:
        return None
    return str(here), read_state(here)


def state_to_resume(
    resume: Resume, root: Path, url: str | None
) -> tuple[str, dict[str, Any]] | None:
    """Return (folder or URL, the run's state) of the checkpoint that a run resumes from.

    None if the run has saved none yet. Only the state is verified, as by `newest_state`.
    `root`: the folder of the run's own checkpoints. `url`: of their copies. Raises CheckpointError.
    """
    if resume.place is None:
        return newest_state(root, url)
    return named_state(resume.place)


def _newest_here(root: Path) -> Path | None:
    """Return the newest checkpoint on this disk, whole or in part; None if there is none."""
    whole = newest(root, verify=False, collective=False, skip_weights_only=True).path
    parts = [path for path in _list_newest_first(root)[0] if (path / PART).exists()]
    candidates = parts[:1]
    if whole is not None:
        candidates.insert(0, whole)
    return max(candidates, key=lambda path: read_manifest_or_part(path)[0].serial, default=None)


def named_state(place: str) -> tuple[str, dict[str, Any]]:
    """Return (folder or URL, the run's state) of the checkpoint at a place that the user names.

    `place`: folder or URL of a checkpoint, or of a run, whose newest one is taken. Only the state
    is verified, as by `newest_state`. Raises CheckpointError for any other place.
    """
    if is_url(place):
        return read_remote_state(place)
    with disk_errors("cannot be read", place, CheckpointError):
        path = Path(place)
        checkpoint: Path | None = None
        if is_run_folder(place):
            root = path / CHECKPOINTS
            checkpoint = newest(root, verify=False, collective=False, skip_weights_only=True).path
        if checkpoint is None:
            check(path, verify=False, collective=False)
            _require_state(path)
            checkpoint = path
        return str(checkpoint), read_state(checkpoint)


def read_pointer(root: Path, pointer: Literal["latest", "best"]) -> Path | None:
    """Return the checkpoint that the pointer `latest` or `best` names; None if there is none."""
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
    return read_pointer(root, "best") or read_pointer(root, "latest")


def check(path: Path, verify: bool, collective: bool = True) -> Manifest:
    """Check that a checkpoint is whole, and return its manifest.

    All its files must be there and be plain files of the right size, and there must be no other
    shard. The state and the index are always hashed. `verify`: the shards are hashed, too.
    `collective`: see `newest`. Raises CheckpointError that names the file and the reason.
    """
    ranks = RankGroup.all(collective, CheckpointError)
    manifest = ranks.run_on_rank_0(lambda: _check_files(path))
    if verify:
        sizes = {name: record.bytes for name, record in manifest.files.items()}
        owners = share(sizes, ranks.size)
        mine = [name for name, rank in owners.items() if rank == ranks.rank]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:

            def hash_mine() -> None:
                # `list` waits for all files and raises the first error.
                list(pool.map(lambda name: _require_file(path, name, manifest), mine))

            ranks.run_on_all(hash_mine)
    return manifest


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the run that was saved with a checkpoint.

    The folder `path` may lack other files. Not collective. Raises CheckpointError.
    """
    manifest, _ = read_manifest_or_part(path)
    _require_file(path, STATE, manifest)
    with open_regular(path / STATE) as file:
        state = json.load(file)
    assert isinstance(state, dict)
    return state


def load_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    collective: bool = True,
    allow_partial: bool = False,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Fill `tensors` (plain or DTensors, by canonical name) in place from a checkpoint.

    The checkpoint may be of any number of ranks. Shapes and dtypes must be the stored ones.

    `collective`: see `newest`.
    `allow_partial`: the ranks may name only some tensors of a section of names (`model.`,
    `optim.`), as readers do that do not train. Otherwise the ranks together must name all of them.
    `optional`: sections that the checkpoint need not have. Their tensors then stay as they are. So
    do the moments of a weight that had made no step yet when the checkpoint was saved.

    Raises CheckpointError on every rank: before it reads anything if names, shapes or dtypes
    differ. If it is raised later, `tensors` must not be used.
    """
    ranks = RankGroup.all(collective, CheckpointError)
    wanted: dict[str, Tensor] = {}

    def match() -> list[str]:
        manifest = _check_files(path)
        wanted.update(_match_names(manifest, tensors, optional))
        misfit = _misfit(manifest, wanted)
        if misfit:
            raise CheckpointError(misfit, where=str(path), fix=FIX_MISFIT)
        return list(wanted)

    def read() -> None:
        reader = Reader(path, read_index(path, read_manifest(path)))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            # Without dcp's own collectives: `ranks.run_on_all` makes the ranks agree on the
            # outcome.
            dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as failure:
            raise CheckpointError(
                f"cannot be read: {describe_error(failure)}", where=str(path)
            ) from failure

    names = set()
    for names_of_rank in ranks.run_on_all(match):
        names.update(names_of_rank)
    if not allow_partial:
        ranks.run_on_rank_0(lambda: _require_whole_sections(path, names))
    ranks.run_on_all(read)


def _match_names(
    manifest: Manifest, tensors: dict[str, Tensor], optional: frozenset[str]
) -> dict[str, Tensor]:
    """Return the tensors to fill, by their names in the checkpoint.

    Tensors that stay as they are (see `load`) are left out. A tensor that the checkpoint lacks has
    its own name, so that the caller notices.
    """
    stored_names = {_current_name(name): name for name in manifest.tensors}
    absent_sections = optional - {_section(name) for name in stored_names}
    weights_with_moments = {_weight(name) for name in stored_names if _is_moment(name)}
    wanted = {}
    for name, tensor in tensors.items():
        if _section(name) in absent_sections:
            continue
        # Without any moments the checkpoint is of another optimizer, which is an error.
        if _is_moment(name) and weights_with_moments:
            weight = _weight(name)
            had_made_no_step = weight in stored_names and weight not in weights_with_moments
            if had_made_no_step:
                continue
        wanted[stored_names.get(name, name)] = tensor
    return wanted


def _list_newest_first(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the committed checkpoints under `root`, newest first, and those that cannot be read.

    A checkpoint whose manifest cannot be read comes with the reason.
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
            manifest, _ = read_manifest_or_part(path)
        except CheckpointError as error:
            unreadable.append((path, error.line()))
        else:
            readable.append((manifest.serial, path))
    paths = [path for _, path in sorted(readable, reverse=True)]
    return paths, unreadable


def _check_files(path: Path) -> Manifest:
    """Return the manifest after all checks but hashing the shards. Raises CheckpointError."""
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

    The error names a whole checkpoint in this folder, below it or beside it.
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
        manifest, present = read_manifest_or_part(path)
        raise CheckpointError(
            f"holds {len(present)} of the {len(manifest.files)} files of a checkpoint that lies on the "
            "disks of several hosts",
            where=str(path),
            fix="train with --resume on all hosts: they put it together",
        )
    for root in (path, path / "checkpoints", path.parent):
        nearest = newest(root, verify=False, collective=False).path
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
        record = hash_file(path / name)
    if record != manifest.files[name]:
        raise CheckpointError(
            "damaged: its content is not what was written (sha256 differs)", where=place
        )


def _misfit(manifest: Manifest, tensors: dict[str, Tensor]) -> str | None:
    """Return why this rank's tensors cannot be filled from a checkpoint; None if they can."""
    missing = [name for name in tensors if name not in manifest.tensors]
    if missing:
        return f"holds no {first_and_count(missing)}"
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

    Otherwise trained tensors would be lost silently. One case is allowed: older checkpoints hold
    moments of frozen weights, without the weights themselves. These moments are zeros.
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
            f"holds {first_and_count(left)}, which this run has no place for",
            where=str(path),
            fix=FIX_MISFIT,
        )


def missing_compensations(path: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Return buffers for the stored Kahan compensations that `tensors` do not include.

    A compensation is what rounding to bfloat16 took from a weight. The result maps its name to
    (name of the weight in `tensors`, zeros like that weight).
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
    """Return whether a tensor is an optimizer's state: of the section `optim` or `ROLE/optim`."""
    return _section(name).rpartition("/")[2] == "optim"


def _weight(moment: str) -> str:
    """Return the name of a moment's weight: model.<name> of optim.<name>.<slot>."""
    return moment.rpartition(".")[0].replace("optim.", "model.", 1)


def _current_name(name: str) -> str:
    """Return the name that a tensor of a checkpoint has in this version of Drumline."""
    return OLD_COMPENSATION.sub(r"compensation.\1", name)


def _section(name: str) -> str:
    """Return the section of a tensor's name, such as `model` or `optim`."""
    return _current_name(name).partition(".")[0]


def first_and_count(names: list[str]) -> str:
    """Return the first of some names, and how many more there are, as in "NAME and 3 more"."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"
