"""Translate a dataset as `datasets.load_dataset` takes it into sources of data.

It is the name of a dataset of the hub, a folder, a file, or a loader such as `json`, optionally
with `data_files` or `data_dir`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.compat.deepspeed import locate_file, new_path
from drumline.compat.rules import read_names
from drumline.compat.sheet import OldKey, Sheet, translation_error
from drumline.config.data import KINDS_OF_FILES, SAVED, kind_of_file

# Names that load_dataset takes for kinds of files.
LOADERS = ("json", "csv", "parquet", "text", "arrow")
ONE_SPLIT = "files are one split, and are read whole"
READ_AS_FILES = "without effect: the files are read by their names"
FIX = "name the files of each: data.train, data.eval, or set data.holdout"


@dataclass(frozen=True)
class Dataset:
    """The keys of an old file that describe a dataset.

    Attributes:
        path: Key of the name, folder, file or loader.
        subset: Key of the configuration of a hub's dataset.
        split: Key of the split.
        revision: Key of the branch, tag or commit.
        folder: The key data_dir.
        files: The key data_files: a name, a list, or names by split.
    """

    path: OldKey
    subset: OldKey | None = None
    split: OldKey | None = None
    revision: OldKey | None = None
    folder: OldKey | None = None
    files: OldKey | None = None

    @property
    def name(self) -> str:
        """The name, folder, file or loader."""
        return str(self.path.value)


def _text(old: OldKey | None) -> str:
    """Return the value of a key as text; an empty text without a key or value."""
    if old is None or not old.value:
        return ""
    return str(old.value)


def sources_of(sheet: Sheet, dataset: Dataset) -> list[dict[str, Any]]:
    """Return the sources of a dataset; none for a split that its files do not have."""
    sources = _sources(sheet, dataset)
    for old in _find_unused_keys(dataset, sources):
        sheet.note(old, READ_AS_FILES)
    return sources


def put_sources(sheet: Sheet, part: str, sources: list[dict[str, Any]], old: OldKey) -> None:
    """Set data.train or data.eval (`part`) to the sources that a key names.

    Nothing is set if there are none. A note about the reason was written before.
    """
    if sources:
        sheet.put(f"data.{part}", sources, old)


def _find_unused_keys(dataset: Dataset, sources: list[dict[str, Any]]) -> Iterator[OldKey]:
    """Yield the keys of a hub's dataset that have no effect, since its files are read directly."""
    paths = [source["path"] for source in sources if source["kind"] != "hub"]
    if not paths:
        return
    if dataset.subset is not None and _text(dataset.subset):
        yield dataset.subset
    revision = _text(dataset.revision)
    is_in_paths = all(f"@{revision}" in path for path in paths)
    if dataset.revision is not None and revision and not is_in_paths:
        yield dataset.revision


def _sources(sheet: Sheet, dataset: Dataset) -> list[dict[str, Any]]:
    name = dataset.name
    if dataset.files is not None and dataset.files.value:
        return _files(sheet, dataset, dataset.files)
    if _text(dataset.folder):
        place = _place(sheet, dataset, "")
        return _with_split(sheet, {"kind": "file", "path": place}, dataset.split)
    if "://" in name:
        return _with_split(sheet, {"kind": "file", "path": name}, dataset.split)
    if _is_local(sheet, name):
        source = local_source(sheet, locate_file(sheet.base, name))
        return _with_split(sheet, source, dataset.split)
    source = {"kind": "hub", "id": name}
    given = {"name": dataset.subset, "split": dataset.split, "revision": dataset.revision}
    for key, old in given.items():
        if _text(old):
            source[key] = _text(old)
    return [source]


def _is_local(sheet: Sheet, name: str) -> bool:
    """Return True if a name is that of a file or folder here, and not of a dataset of the hub."""
    if locate_file(sheet.base, name).exists():
        return True
    return kind_of_file(name) in KINDS_OF_FILES or name.startswith((".", "/", "~"))


def local_source(sheet: Sheet, path: Path) -> dict[str, Any]:
    """Return the source for a file, a folder of files, or a folder of save_to_disk."""
    is_saved = any((path / name).is_file() for name in SAVED)
    kind = "saved" if is_saved else "file"
    return {"kind": kind, "path": new_path(sheet, path)}


def _with_split(sheet: Sheet, source: dict[str, Any], split: OldKey | None) -> list[dict[str, Any]]:
    """Return a source of files with its split; none if a single file does not have the split."""
    name, is_cut, _ = _text(split).partition("[")
    is_folder = source["kind"] == "saved" or kind_of_file(source["path"]) not in KINDS_OF_FILES
    is_default = name in ("", "train")
    if split is not None and (is_cut or not (is_default or is_folder)):
        sheet.report_unsupported(split, ONE_SPLIT, FIX)
    if is_default:
        return [source]
    if is_folder:
        return [{**source, "split": name}]
    return []


def _files(sheet: Sheet, dataset: Dataset, files: OldKey) -> list[dict[str, Any]]:
    """Return a source for each file of data_files, which are the dataset's own or lie here."""
    sources: list[dict[str, Any]] = []
    for name in _names_of_split(sheet, dataset.split, files):
        path = name
        if "://" not in name:
            path = _place(sheet, dataset, name)
        sources.append({"kind": "file", "path": path})
    return sources


def _names_of_split(sheet: Sheet, split: OldKey | None, files: OldKey) -> list[str]:
    """Return the names in data_files of a split, by default of `train`.

    Raises ConfigError if they are sorted by splits and have not this one.
    """
    name, is_cut, _ = _text(split).partition("[")
    name = name or "train"
    by_split = {name: files}
    if isinstance(files.value, dict):
        by_split = files.children_by_key()
        is_missing = False
    else:
        is_missing = name != "train"
    if split is not None and (is_cut or is_missing):
        sheet.report_unsupported(split, ONE_SPLIT, FIX)
    if is_missing:
        return []
    if name not in by_split:
        raise translation_error(
            files, f"has no files of the split {name!r}", f"there are {', '.join(by_split)}"
        )
    return read_names(by_split[name])


def _place(sheet: Sheet, dataset: Dataset, file: str) -> str:
    """Return the path or URL of a file of a dataset; without a file, of its data_dir."""
    name = dataset.name
    folder = _text(dataset.folder)
    if name in LOADERS:
        inner = str(Path(folder, file))
        return new_path(sheet, locate_file(sheet.base, inner))
    if "://" not in name and _is_local(sheet, name):
        path = locate_file(sheet.base, name)
        return new_path(sheet, path / folder / file)
    place = name
    if "://" not in name:
        place = f"hf://datasets/{name}"
    revision = _text(dataset.revision)
    if revision:
        place += f"@{revision}"
    for part in (folder, file):
        if part:
            place += f"/{part.strip('/')}"
    return place
