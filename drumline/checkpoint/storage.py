"""The file layer of torch.distributed.checkpoint, made safe.

Written files get checksums, and errors keep their errno. Reading an index cannot run code, and the
file names in it cannot leave the checkpoint's folder.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from drumline.checkpoint.manifest import (
    INDEX,
    SHARD_NAME,
    FileRecord,
    HashingFile,
    Manifest,
    TensorRecord,
    open_regular,
)
from drumline.errors import CheckpointError
from drumline.vendor.torch import MEM_FORMAT_ENCODING, StorageInfo, get_layout

# One process without a process group is a case like any other, not worth a warning at each save.
warnings.filterwarnings(
    "ignore",
    message="torch.distributed is disabled, unavailable or uninitialized",
    category=UserWarning,
)
# dcp logs two debug records for each tensor of each save.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


class Files(FileSystem):
    """A file system for torch that follows no links, and hashes and flushes what is written.

    `records`: size and checksum of each written file, by its name. `failures`: every OSError.
    """

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.failures: list[OSError] = []

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        path = Path(path)
        if mode == "rb":
            with open_regular(path) as stream:
                yield cast(io.IOBase, stream)
            return
        assert mode == "wb", mode
        with HashingFile(path, self.failures) as file:
            yield file
        self.records[path.name] = file.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        # Rank 0 made the folder. A rank that does not see it would write to another disk.
        if not Path(path).is_dir():
            what = (
                "not visible from this host: share the run folder between all hosts, or set "
                "checkpoint.replicas or checkpoint.url"
            )
            raise FileNotFoundError(errno.ENOENT, what, str(path))


class Writer(FileSystemWriter):
    """Writes this rank's part of a save into an existing folder; `files` records what was written."""

    def __init__(self, folder: Path) -> None:
        # Files flushes each file itself, as it closes.
        super().__init__(folder, sync_files=False)
        self.files = Files()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta | None:
        # torch's would hold the path of the temporary folder, which is about to be renamed.
        return None


class Reader(FileSystemReader):
    """Reads tensors of a folder by an `index` that `read_index` has checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.fs = Files()
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


METADATA_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "StorageMeta",
)
CLASSES = [
    *(getattr(metadata, name) for name in METADATA_CLASSES),
    MEM_FORMAT_ENCODING,
    StorageInfo,
]
# All that a pickled index may name, by (module, name), besides torch's dtypes.
ALLOWED = {(kind.__module__, kind.__name__): kind for kind in CLASSES}
ALLOWED |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): get_layout}


def _memory_format(kind: Any, name: str) -> Any:
    """Return `MEM_FORMAT_ENCODING[name]`, which Python 3.11.0 to 3.11.3 pickle as a `getattr`.

    Raises UnpicklingError for a `getattr` of anything else.
    """
    if kind is not MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            "getattr has no place in a checkpoint index but for a memory format"
        )
    return kind[name]


ALLOWED["builtins", "getattr"] = _memory_format


class _IndexUnpickler(pickle.Unpickler):
    """Refuses a pickle that names anything but the classes of an index, before that is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint index")


def read_index(folder: Path, manifest: Manifest) -> Metadata:
    """Return the index in .metadata, read without running any code in it.

    Raises CheckpointError, with the file and the reason, unless it describes exactly the manifest's
    tensors, within the manifest's files.
    """
    place = str(folder / INDEX)
    try:
        with open_regular(folder / INDEX) as file:
            index = _IndexUnpickler(file).load()
        reason = _reason_to_refuse(index, manifest)
    except Exception as error:  # a hostile pickle may raise anything
        raise CheckpointError(f"refused: {error}", where=place) from error
    if reason:
        raise CheckpointError(f"refused: {reason}", where=place)
    return cast(Metadata, index)


def read_tensor_records(folder: Path) -> dict[str, TensorRecord]:
    """Return the global shape and dtype of each tensor that dcp.save has just written to a folder."""
    with open_regular(folder / INDEX) as file:
        index = _IndexUnpickler(file).load()
    return tensor_records(index)


def tensor_records(index: Metadata) -> dict[str, TensorRecord]:
    """Return the global shape and dtype of each tensor in an index, by name.

    Raises TypeError if the index names anything but tensors.
    """
    records = {}
    for name, entry in index.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise TypeError(f"{name} is not a tensor")
        dtype = dtype_name(entry.properties.dtype)
        records[name] = TensorRecord(shape=list(entry.size), dtype=dtype)
    return records


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as torch spells it, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def _reason_to_refuse(index: Any, manifest: Manifest) -> str | None:
    """Return the reason to refuse an index; None if there is none."""
    if type(index) is not Metadata:
        return "not an index"
    if tensor_records(index) != manifest.tensors:
        return "its tensors are not those of the manifest"
    for key, info in index.storage_data.items():
        if type(key) is not MetadataIndex or type(info) is not StorageInfo:
            return "not an index"
        reason = _reason_to_refuse_entry(key.fqn, info, manifest)
        if reason is not None:
            return reason
    return None


def _reason_to_refuse_entry(name: str, info: StorageInfo, manifest: Manifest) -> str | None:
    """Return the reason to refuse an entry of the index, the place of a part of a tensor.

    None if there is no reason.
    """
    path = info.relative_path
    if type(path) is not str or not SHARD_NAME.fullmatch(path) or path not in manifest.files:
        return f"{name} lies in {path!r}, which is no file of this checkpoint"
    if type(info.offset) is not int or type(info.length) is not int:
        return f"{name} has no place in its file"
    file_bytes = manifest.files[path].bytes
    if min(info.offset, info.length) < 0 or info.offset + info.length > file_bytes:
        return f"{name} lies beyond the end of {path}"
    if info.transform_descriptors is not None:
        return f"{name} requires a transform"
    return None
