"""The token cache: prepared samples on disk, read through memory maps.

A cache is a folder that appears whole, under the hash of everything that it was made from:

    tokens.bin    uint16 or uint32, all tokens of all rows in a line
    learn.bin     uint8, 1 for a token that is a target
    segments.npy  int64[S, 2], token ranges [start, stop): a row, or the piece of one that a pack holds
    samples.npy   int64[N + 1], sample i is segments samples[i]..samples[i + 1]
    lengths.npy   int32[N], tokens of each sample
    learned.npy   int64[N], targets of each sample after the shift by one inside each segment
    meta.bin      only if samples have further values: JSON of all samples, end to end
    meta.npy      int64[N + 1], bytes of meta.bin: sample i's are meta[i]..meta[i + 1]
    rows.npy      uint64[R], a hash of each row of the samples, in the order of the source
    info.json     counts, settings, the sizes and checksums of the files above and its own checksum: written last
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.config.data import DataConfig
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import disk_errors, expand_home
from drumline.hardware.detect import cache_dir
from drumline.system import files

VERSION = 6  # raise it when the same input gives other files
CHECKSUM_BYTES = 1 << 26  # bytes that one checksum covers, so that ranks can divide a large file
READ_BYTES = 1 << 20  # bytes read at once
HEADER_TRIES = 10  # how often a header is read that another thread may disturb
# A segment of a cached sample: its tokens, and for each of them 1 if it is a loss target, else 0.
Segment = tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]]


class TokenCache:
    """A prepared dataset, read through memory maps.

    Opening a cache reads a few kilobytes, whatever its size. Any number of processes share its pages.

    Attributes:
        folder: the folder of the cache.
        info: the content of info.json.
        lengths: int32[N], tokens of each sample.
        target_counts: int64[N], the number of loss targets of each sample.
    """

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.folder = folder
        self.info = info
        self._tokens = np.memmap(folder / "tokens.bin", info["dtype"], "r")
        self._learn = np.memmap(folder / "learn.bin", np.uint8, "r")
        self._segments = _map_array(folder, "segments")
        self._samples = _map_array(folder, "samples")
        self.lengths: npt.NDArray[np.int32] = _map_array(folder, "lengths")
        self.target_counts: npt.NDArray[np.int64] = _map_array(folder, "learned")
        self._meta: Any = None
        self._meta_bounds: Any = None
        if "meta.bin" in info["files"]:
            self._meta = np.memmap(folder / "meta.bin", np.uint8, "r")
            self._meta_bounds = _map_array(folder, "meta")

    @classmethod
    def open(cls, folder: Path | str) -> TokenCache:
        """Open a finished cache. Raises DataError if there is none, or if files lack bytes."""
        path = Path(folder)
        info = read_info(path)
        if info is None:
            raise DataError(
                "not a prepared dataset, or files of it are missing or cut short",
                where=str(folder),
                fix="run `drumline prepare` again",
            )
        return cls(path, info)

    def __len__(self) -> int:
        return len(self._samples) - 1

    def segments(self, sample: int) -> list[Segment]:
        """Return the tokens and learn flags of each segment of a sample.

        The arrays are views of the files. Attention and positions restart at each segment.
        """
        first, last = self._samples[sample : sample + 2].tolist()
        ranges = self._segments[first:last].tolist()
        segments = []
        for start, stop in ranges:
            tokens = self._tokens[start:stop]
            learn = self._learn[start:stop]
            segments.append((tokens, learn))
        return segments

    def meta(self, sample: int) -> dict[str, Any]:
        """Return what the encoder stored with a sample besides its tokens; empty without any."""
        if self._meta is None:
            return {}
        start, stop = self._meta_bounds[sample : sample + 2].tolist()
        if start == stop:
            return {}
        text = bytes(self._meta[start:stop])
        return json.loads(text)


def cache_root(data: DataConfig) -> Path:
    """Return the folder of the token caches."""
    if data.cache_dir is None:
        return cache_dir() / "data"
    return expand_home(data.cache_dir).absolute()


def _map_array(folder: Path, name: str) -> Any:
    """Return the memory map of the array `name`.npy."""
    path = folder / f"{name}.npy"
    for _ in range(HEADER_TRIES - 1):
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except SystemError:
            # numpy parses a header with `ast`, which fails at times while another thread uses it
            # (python/cpython#106905).
            continue
    # The last try raises what it raises.
    return np.load(path, mmap_mode="r", allow_pickle=False)


def read_info(folder: Path) -> dict[str, Any] | None:
    """Return `info.json` of a finished cache.

    None if there is none, if it was changed, or if a file has another size.
    """
    # Anything may have become of the file: it may be no JSON, no object, or lack a key.
    try:
        text = (folder / "info.json").read_text()
        info = json.loads(text)
        checksum = info.pop("checksum")
        if checksum != files.json_digest(info):
            return None
        sizes = _sizes_of(folder, info["files"])
        is_whole = sizes == info["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not is_whole:
        return None
    return info


def _sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return file name → bytes of some files in a folder. Raises OSError."""
    return {name: (folder / name).stat().st_size for name in names}


def describe_left_out(name: str, info: dict[str, Any]) -> list[str]:
    """Return a line that says how many rows were cut or left out, and why; [] if none were.

    Args:
        name: the rows' key below `data`, such as train, with which the line begins.
        info: the info of a cache of these rows.
    """
    reasons = {
        "filtered": "left out by `where`",
        "ties": "left out: none of their answers is the better",
        "contaminated": "left out: they contain rows of data.eval",
        "duplicates": "left out: alike an earlier row",
        "truncated": f"cut at {info['limit']:,} tokens",
        "dropped_too_long": f"dropped: longer than {info['limit']:,} tokens",
        "dropped_unlearned": "skipped: nothing to learn",
        "hides_reasoning": "without the reasoning of some turns, which the chat template leaves out",
    }
    parts = []
    for key, reason in reasons.items():
        # Caches of older versions lack some of these counts.
        count = info.get(key, 0)
        if count:
            parts.append(f"{count:,} of {info['rows_read']:,} rows {reason}")
    if not parts:
        return []
    return [f"data.{name}: {'; '.join(parts)}"]


class Column:
    """A .npy file that grows at its end.

    numpy leaves room in the header for any number of rows, so that the count can be written last.

    Args:
        path: the file.
        dtype: the type of its numbers.
        row_shape: the shape of one row; nothing if a row is one number.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *row_shape: int) -> None:
        self.dtype = dtype
        self.row_shape = row_shape
        self.count = 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        """Write the header of an array with the rows so far."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.count, *self.row_shape),
        }
        np.lib.format.write_array_header_1_0(self.file, header)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Append rows."""
        rows = np.ascontiguousarray(values, self.dtype)
        self.file.write(rows.tobytes())
        self.count += len(values)

    def close(self) -> None:
        """Write the number of rows into the header, and close the file."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


class IndexWriter:
    """Writes the index files of a cache (all but tokens.bin, learn.bin and rows.npy)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        types = {"samples": np.int64, "lengths": np.int32, "learned": np.int64, "meta": np.int64}
        self.columns: dict[str, Column] = {}
        for name, type_ in types.items():
            self.columns[name] = Column(folder / f"{name}.npy", np.dtype(type_))
        self.columns["segments"] = Column(folder / "segments.npy", np.dtype(np.int64), 2)
        self.metas = (folder / "meta.bin").open("wb")
        self.tokens = 0
        self.target_count = 0
        self.longest = 0
        # The bounds of ranges begin with 0. Each sample adds the end of its range.
        for name in ("samples", "meta"):
            self.columns[name].add(np.zeros(1, np.int64))

    @property
    def samples(self) -> int:
        """The number of samples so far."""
        return self.columns["lengths"].count

    def add(
        self,
        segments: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        targets_of_segments: npt.NDArray[np.int64],
        metas: Sequence[bytes] = (),
    ) -> Sequence[bytes]:
        """Add samples, and return the metas of those that were added.

        A sample with neither a target nor a meta is left out.

        Args:
            segments: int64[S, 2], token ranges [start, stop).
            offsets: int64[N + 1], sample i is segments offsets[i]..offsets[i + 1], at least one.
            targets_of_segments: int64[S], the number of targets of each segment.
            metas: the JSON of each sample, or none.
        """
        sizes = segments[:, 1] - segments[:, 0]
        first_segments = offsets[:-1]
        lengths = np.add.reduceat(sizes, first_segments)
        target_counts = np.add.reduceat(targets_of_segments, first_segments)
        keep = target_counts > 0
        if metas:
            keep |= np.asarray([bool(meta) for meta in metas])
            metas = list(compress(metas, keep))
        if not keep.all():
            segment_counts = np.diff(offsets)
            is_kept_segment = np.repeat(keep, segment_counts)
            segments = segments[is_kept_segment]
            offsets = bounds(segment_counts[keep])
            lengths = lengths[keep]
            target_counts = target_counts[keep]
        # Before the segments are added: their number so far is where these begin.
        self.columns["samples"].add(offsets[1:] + self.columns["segments"].count)
        self._add_metas(metas, len(lengths))
        self.columns["segments"].add(segments)
        self.columns["lengths"].add(lengths)
        self.columns["learned"].add(target_counts)
        self.tokens += int(lengths.sum())
        self.target_count += int(target_counts.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        return metas

    def _add_metas(self, metas: Sequence[bytes], count: int) -> None:
        """Write the metas of `count` samples, and where each stops. Without any, each is empty."""
        if metas:
            sizes = np.asarray([len(meta) for meta in metas], np.int64)
        else:
            sizes = np.zeros(count, np.int64)
        stops = self.metas.tell() + np.cumsum(sizes)
        self.columns["meta"].add(stops)
        self.metas.write(b"".join(metas))

    def close(self) -> dict[str, int]:
        """Close the files and return the counts for info.json."""
        for column in self.columns.values():
            column.close()
        self.metas.close()
        meta_file = self.folder / "meta.bin"
        # Without any meta a cache has neither file.
        if meta_file.stat().st_size == 0:
            meta_file.unlink()
            (self.folder / "meta.npy").unlink()
        return {
            "samples": self.samples,
            "segments": self.columns["segments"].count,
            "tokens": self.tokens,
            "learned": self.target_count,
            "longest": self.longest,
        }


def bounds(sizes: Any) -> npt.NDArray[np.int64]:
    """Return int64[N + 1]: where N ranges of these sizes, end to end, begin, and the end of all."""
    stops = np.cumsum(sizes)
    return np.concatenate(([0], stops)).astype(np.int64)


def commit(temporary: Path, folder: Path, info: dict[str, Any]) -> None:
    """Write info.json, and rename `temporary` to `folder` once all bytes are on the disk.

    If another process was faster its cache stays, since both were made from the same input. A
    damaged cache is replaced.

    Args:
        temporary: the folder with the files of the cache.
        folder: the folder that it becomes.
        info: what info.json has besides the sizes and checksums of the files.
    """
    names = sorted(path.name for path in temporary.iterdir())
    sizes = _sizes_of(temporary, names)
    checksums = {}
    for name, size in sizes.items():
        chunks = math.ceil(size / CHECKSUM_BYTES)
        checksums[name] = [_digest(temporary / name, chunk) for chunk in range(chunks)]
    info = {**info, "files": sizes, "sha256": checksums}
    with_checksum = {**info, "checksum": files.json_digest(info)}
    text = json.dumps(with_checksum, indent=2)
    (temporary / "info.json").write_text(text + "\n")
    # The bytes first, then the name: a power cut leaves no cache that looks finished and is not.
    for name in (*names, "info.json"):
        files.sync(temporary / name)
    files.sync(temporary)
    files.rename_unless_there(temporary, folder, lambda: read_info(folder) is not None)
    files.sync(folder.parent)


@contextmanager
def temporary_folder(root: Path) -> Iterator[Path]:
    """Yield a folder under `root` that is removed at the end, see `system.files.temporary_folder`.

    Raises EnvironmentFault if `root` cannot be written or the disk is full.
    """
    is_made = False
    try:
        with files.temporary_folder(root) as folder:
            is_made = True
            yield folder
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        # An error of the caller's own, such as a source that cannot be read.
        if is_made and not is_full:
            raise
        fix = "set data.cache_dir to another folder"
        if is_full:
            fix = "free some space there, or set data.cache_dir"
        raise EnvironmentFault(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(root),
            fix=fix,
        ) from error


def verify(folder: Path, sha256: dict[str, list[str]], rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of a cache's files with their checksums.

    Args:
        folder: the cache.
        sha256: the checksums of the chunks of each file.
        rank: this rank.
        ranks: the number of ranks that divide the chunks among them.

    Raises DataError that names a damaged file.
    """
    # Sorted, so that all ranks divide the same list, and each chunk is verified by one rank.
    chunks = []
    for name, digests in sorted(sha256.items()):
        for chunk in range(len(digests)):
            chunks.append((name, chunk))
    for name, chunk in chunks[rank::ranks]:
        path = folder / name
        with disk_errors("cannot be read", str(path), DataError):
            digest = _digest(path, chunk)
        if digest != sha256[name][chunk]:
            first_byte = chunk * CHECKSUM_BYTES
            raise DataError(
                f"damaged: bytes from {first_byte:,} on are not what was written (sha256 differs)",
                where=str(path),
                fix="make it again: drumline prepare CONFIG.yaml",
            )


def verify_in_background(
    caches: list[tuple[Path, dict[str, list[str]]]], rank: int, ranks: int
) -> Future[None]:
    """Run `verify` on some caches in a thread and return its outcome.

    Hashing releases Python's lock, so other things load meanwhile.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            for folder, sha256 in caches:
                verify(folder, sha256, rank, ranks)
            outcome.set_result(None)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name="verify-data", daemon=True).start()
    return outcome


def _digest(path: Path, chunk: int) -> str:
    """Return the sha256, in hex, of chunk number `chunk` of a file. Raises OSError."""
    digest = hashlib.sha256()
    left = CHECKSUM_BYTES
    # Pieces are large already: a buffer would only copy them.
    with path.open("rb", buffering=0) as file:
        file.seek(chunk * CHECKSUM_BYTES)
        while left > 0:
            piece = file.read(min(READ_BYTES, left))
            if not piece:
                break
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()
