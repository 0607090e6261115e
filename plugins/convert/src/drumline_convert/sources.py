"""A dataset as `datasets.load_dataset` takes it → sources of data.

It is the name of a dataset of the hub, a folder, a file, or a loader such as `json`, perhaps with
`data_files` or `data_dir`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.compat.deepspeed import locate_file, new_path
from drumline.compat.rules import read_names
from drumline.compat.sheet import OldKey, Sheet, translation_error
from drumline.config.data import KINDS_OF_FILES, SAVED, kind_of_file

# Names that load_dataset takes for kinds of files.
LOADERS = ("json", "csv", "parquet", "text", "arrow")


@dataclass(frozen=True)
class Dataset:
    """A dataset as an old file gives it.

    Args:
        path: the key with the name, folder, file or loader.
        subset: the key with the configuration of a hub's dataset.
        split: the key with the split.
        revision: the key with the branch, tag or commit.
        folder: the key data_dir.
        files: the key data_files: a name, a list, or names by split.
    """

    path: OldKey
    subset: OldKey | None = None
    split: OldKey | None = None
    revision: OldKey | None = None
    folder: OldKey | None = None
    files: OldKey | None = None


def sources_of(sheet: Sheet, dataset: Dataset) -> list[dict[str, Any]]:
    """Return the sources of a dataset. Raises ConfigError for files by split without this one."""
    name = str(dataset.path.value)
    if dataset.files is not None and dataset.files.value:
        return _files(sheet, dataset, name, dataset.files)
    if dataset.folder is not None and dataset.folder.value:
        place = _place(sheet, dataset, name)
        return _local(sheet, {"kind": "file", "path": place}, dataset.split)
    if is_local(sheet, name):
        source = local_source(sheet, locate_file(sheet.base, name))
        return _local(sheet, source, dataset.split)
    if "://" in name:
        return _local(sheet, {"kind": "file", "path": name}, dataset.split)
    source = {"kind": "hub", "id": name}
    given = {"name": dataset.subset, "split": dataset.split, "revision": dataset.revision}
    for key, old in given.items():
        if old is not None and old.value:
            source[key] = str(old.value)
    return [source]


def is_local(sheet: Sheet, name: str) -> bool:
    """Return True if a name is that of a file or folder here, and not of a dataset of the hub."""
    if "://" in name:
        return False
    if locate_file(sheet.base, name).exists():
        return True
    return kind_of_file(name) in KINDS_OF_FILES or name.startswith((".", "/", "~"))


def local_source(sheet: Sheet, path: Path) -> dict[str, Any]:
    """Return the source for a file, a folder of files, or a folder of save_to_disk."""
    is_saved = any((path / name).is_file() for name in SAVED)
    kind = "saved" if is_saved else "file"
    return {"kind": kind, "path": new_path(sheet, path)}


def _local(sheet: Sheet, source: dict[str, Any], split: OldKey | None) -> list[dict[str, Any]]:
    """Return a source of files with its split. A split that a file does not have gives no source."""
    if split is None or not split.value or str(split.value) == "train":
        return [source]
    name, is_cut, _ = str(split.value).partition("[")
    has_splits = source["kind"] == "saved" or kind_of_file(source["path"]) not in KINDS_OF_FILES
    if has_splits and not is_cut:
        return [{**source, "split": name}]
    sheet.report_unsupported(
        split,
        "files are one split, and are read whole",
        "name the files of each: data.train, data.eval, or set data.holdout",
    )
    if has_splits:
        return [{**source, "split": name}]
    return [source] if name == "train" else []


def _files(sheet: Sheet, dataset: Dataset, name: str, files: OldKey) -> list[dict[str, Any]]:
    """Return a source for each file of data_files, which are the dataset's own or lie here."""
    names = _names_of_split(sheet, dataset.split, files)
    sources: list[dict[str, Any]] = []
    for each in names:
        path = each
        if "://" not in each:
            path = _place(sheet, dataset, name, each)
        sources.append({"kind": "file", "path": path})
    return sources


def _names_of_split(sheet: Sheet, split: OldKey | None, files: OldKey) -> list[str]:
    """Return the names in data_files of a split, by default of `train`.

    Raises ConfigError if they are sorted by splits and have not this one.
    """
    wanted = "train"
    if split is not None and split.value:
        wanted = str(split.value)
    plain, is_cut, _ = wanted.partition("[")
    has_splits = isinstance(files.value, dict)
    is_missing = plain != "train" and not has_splits
    if split is not None and (is_cut or is_missing):
        sheet.report_unsupported(
            split, "data_files are one split, and are read whole", "name the files of each split"
        )
    if is_missing:
        return []
    if not has_splits:
        return read_names(files)
    by_split = files.by_key()
    if plain not in by_split:
        raise translation_error(
            files, f"has no files of the split {plain!r}", f"there are {', '.join(by_split)}"
        )
    return read_names(by_split[plain])


def _place(sheet: Sheet, dataset: Dataset, name: str, file: str = "") -> str:
    """Return the path or URL of a file of a dataset, or of its data_dir."""
    folder = ""
    if dataset.folder is not None and dataset.folder.value:
        folder = str(dataset.folder.value)
    if name in LOADERS:
        return new_path(sheet, locate_file(sheet.base, str(Path(folder, file))))
    if is_local(sheet, name):
        return new_path(sheet, locate_file(sheet.base, name) / folder / file)
    place = name if "://" in name else f"hf://datasets/{name}"
    if dataset.revision is not None and dataset.revision.value:
        place += f"@{dataset.revision.value}"
    parts = [place, *(part.strip("/") for part in (folder, file) if part)]
    return "/".join(parts)
