"""Prepared tokens on disk, read through memory maps.

A cache is a folder that appears whole, under the hash of everything that it was made from:

    tokens.bin    uint16 or uint32, all tokens of all rows in a line
    learn.bin     uint8, 1 where the token is a target
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
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core import files
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import disk_errors

VERSION = 6  # raise it when the same input gives other files
BLOCK = 1 << 26  # bytes that a checksum covers, so that ranks can divide one large file
PIECE = 1 << 20  # bytes read at once
Segment = tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]]


class TokenCache:
    """A prepared dataset. Opening it reads a few kilobytes, whatever its size; any number of processes share its pages."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        def array(name: str, again: int = 9) -> Any:
            try:
                return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            except SystemError:  # numpy reads a header by `ast`, of which another thread disturbs it (python/cpython#106905)
                if not again:
                    raise
                return array(name, again - 1)

        self.folder, self.info = folder, info
        self._tokens = np.memmap(folder / "tokens.bin", info["dtype"], "r")
        self._learn = np.memmap(folder / "learn.bin", np.uint8, "r")
        self._segments, self._samples = array("segments"), array("samples")
        self.lengths: npt.NDArray[np.int32] = array("lengths")
        self.learned: npt.NDArray[np.int64] = array("learned")
        self._meta = (
            np.memmap(folder / "meta.bin", np.uint8, "r") if "meta.bin" in info["files"] else None
        )
        self._meta_at = None if self._meta is None else array("meta")

    @classmethod
    def open(cls, folder: Path | str) -> TokenCache:
        """A finished cache. Raises DataError if there is none, or files lack bytes."""
        if (info := read_info(Path(folder))) is None:
            fix = "run `drumline prepare` again"
            raise DataError(
                "not a prepared dataset, or files of it are missing or cut short",
                where=str(folder),
                fix=fix,
            )
        return cls(Path(folder), info)

    def __len__(self) -> int:
        return len(self._samples) - 1

    def segments(self, sample: int) -> list[Segment]:
        """The segments of a sample: tokens and learn flags, views of the files. Attention and positions restart at each."""
        first, last = self._samples[sample : sample + 2].tolist()
        return [
            (self._tokens[start:stop], self._learn[start:stop])
            for start, stop in self._segments[first:last].tolist()
        ]

    def meta(self, sample: int) -> dict[str, Any]:
        """The further values that the encoder gave the sample; empty without any."""
        if self._meta is None or self._meta_at is None:
            return {}
        start, stop = self._meta_at[sample : sample + 2].tolist()
        return json.loads(bytes(self._meta[start:stop])) if stop > start else {}


def read_info(folder: Path) -> dict[str, Any] | None:
    """`info.json` of a finished cache; None if there is none, if it was changed, or if a file has another size."""
    try:
        info = json.loads((folder / "info.json").read_text())
        if info.pop("checksum") != digest_of(info):
            return None
        sizes = {name: (folder / name).stat().st_size for name in info["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return info if sizes == info["files"] else None


def left_out(name: str, info: dict[str, Any]) -> list[str]:
    """A line with the numbers of rows of data.`name` that were cut or left out, or none. `info`: of a cache of it."""
    reasons = {
        "filtered": "left out by `where`",
        "ties": "left out: none of their answers is the better",
        "contaminated": "left out: they hold rows of data.eval",
        "duplicates": "left out: alike an earlier row",
        "truncated": f"cut at {info['limit']:,} tokens",
        "dropped_too_long": f"dropped: longer than {info['limit']:,} tokens",
        "dropped_unlearned": "skipped: nothing to learn",
        "hides_reasoning": "without the reasoning of some turns, which the chat template leaves out",
    }
    # Caches of older versions have not all of them.
    counts = {key: info.get(key, 0) for key in reasons}
    parts = [
        f"{counts[key]:,} of {info['rows_read']:,} rows {what}"
        for key, what in reasons.items()
        if counts[key]
    ]
    return [f"data.{name}: {'; '.join(parts)}"] if parts else []


class Column:
    """A .npy file that grows at its end: its header leaves room for any number of rows, as numpy writes it."""

    def __init__(self, path: Path, dtype: np.dtype[Any], *width: int) -> None:
        self.dtype, self.width, self.count = dtype, width, 0
        self.file = path.open("wb")
        self._head()

    def _head(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.count, *self.width),
        }
        np.lib.format.write_array_header_1_0(self.file, header)

    def add(self, values: npt.NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self.count += len(values)

    def close(self) -> None:
        self.file.seek(0)
        self._head()
        self.file.close()


class Layout:
    """Writes the index files of a cache, some samples at a time."""

    def __init__(self, folder: Path) -> None:
        types = {"samples": np.int64, "lengths": np.int32, "learned": np.int64, "meta": np.int64}
        self.columns = {
            name: Column(folder / f"{name}.npy", np.dtype(of)) for name, of in types.items()
        }
        self.columns["segments"] = Column(folder / "segments.npy", np.dtype(np.int64), 2)
        self.folder, self.metas = folder, (folder / "meta.bin").open("wb")
        self.tokens = self.learned = self.longest = 0
        for name in ("samples", "meta"):
            self.columns[name].add(np.zeros(1, np.int64))

    @property
    def samples(self) -> int:
        return self.columns["lengths"].count

    def add(
        self,
        segments: npt.NDArray[np.int64],
        samples: npt.NDArray[np.int64],
        learned_of_segment: npt.NDArray[np.int64],
        metas: Sequence[bytes] = (),
    ) -> Sequence[bytes]:
        """Add samples, in these arrays as the files have them; those with neither a target nor a meta are left out (`metas`: of all, or
        none). Returns the metas of the others."""
        lengths = np.add.reduceat(segments[:, 1] - segments[:, 0], samples[:-1])
        learned = np.add.reduceat(learned_of_segment, samples[:-1])
        keep = learned > 0
        if metas:
            keep |= np.asarray([bool(meta) for meta in metas])
            metas = list(compress(metas, keep))
        if not keep.all():
            per_sample = np.diff(samples)
            segments, samples = segments[np.repeat(keep, per_sample)], bounds(per_sample[keep])
            lengths, learned = lengths[keep], learned[keep]
        sizes = np.asarray([len(meta) for meta in metas] or np.zeros(len(lengths)), np.int64)
        self.columns["samples"].add(samples[1:] + self.columns["segments"].count)
        self.columns["meta"].add(self.metas.tell() + np.cumsum(sizes))
        self.metas.write(b"".join(metas))
        for name, values in (("segments", segments), ("lengths", lengths), ("learned", learned)):
            self.columns[name].add(values)
        self.tokens += int(lengths.sum())
        self.learned += int(learned.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        return metas

    def close(self) -> dict[str, int]:
        """Counts for info.json."""
        for column in self.columns.values():
            column.close()
        self.metas.close()
        if not (self.folder / "meta.bin").stat().st_size:
            (self.folder / "meta.bin").unlink()
            (self.folder / "meta.npy").unlink()
        numbers = {"samples": self.samples, "segments": self.columns["segments"].count}
        return {**numbers, "tokens": self.tokens, "learned": self.learned, "longest": self.longest}


def bounds(sizes: Any) -> npt.NDArray[np.int64]:
    """int64[N + 1]: where ranges of these sizes begin, end to end, and where the last one stops."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def commit(temporary: Path, folder: Path, info: dict[str, Any]) -> None:
    """Give the cache in `temporary` its name, after info.json and the files are on disk. If another process was faster, its cache stays:
    both were made from the same input. A damaged one is replaced."""
    names = sorted(path.name for path in temporary.iterdir())
    info = {**info, "files": {name: (temporary / name).stat().st_size for name in names}}
    blocks = {name: range(-(-size // BLOCK)) for name, size in info["files"].items()}
    info["sha256"] = {
        name: [_digest(temporary / name, block) for block in numbers]
        for name, numbers in blocks.items()
    }
    (temporary / "info.json").write_text(
        json.dumps({**info, "checksum": digest_of(info)}, indent=2) + "\n"
    )
    for path in (*(temporary / name for name in names), temporary / "info.json", temporary):
        files.sync(path)
    files.give_name(temporary, folder, lambda: read_info(folder) is not None)
    files.sync(folder.parent)


@contextmanager
def temporary_folder(root: Path) -> Iterator[Path]:
    """`core.files.temporary_folder`. Raises EnvironmentFault if `root` cannot be written or the disk is full."""
    entered = False
    try:
        with files.temporary_folder(root) as folder:
            entered = True
            yield folder
    except OSError as error:
        if entered and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "free some space there, or set data.cache_dir"
        raise EnvironmentFault(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(root),
            fix=fix,
        ) from error


def digest_of(value: Any) -> str:
    """sha256 in hex of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def verify(folder: Path, sha256: dict[str, list[str]], rank: int = 0, ranks: int = 1) -> None:
    """Verify this rank's share of the blocks of a cache. Raises DataError that names the file with a wrong checksum."""
    blocks = [
        (name, block) for name, digests in sorted(sha256.items()) for block in range(len(digests))
    ]
    for name, block in blocks[rank::ranks]:
        with disk_errors("cannot be read", str(folder / name), DataError):
            same = _digest(folder / name, block) == sha256[name][block]
        if not same:
            what = f"damaged: bytes from {block * BLOCK:,} on are not what was written (sha256 differs)"
            raise DataError(
                what, where=str(folder / name), fix="make it again: drumline prepare CONFIG.yaml"
            )


def verify_in_background(
    caches: list[tuple[Path, dict[str, list[str]]]], rank: int, ranks: int
) -> Future[None]:
    """The outcome of `verify` on some caches, in a thread: hashing releases Python's lock while other things load."""
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


def _digest(path: Path, block: int) -> str:
    """sha256 of a block of a file, in hex. Raises OSError."""
    found, left = hashlib.sha256(), BLOCK
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK)
        while left and (piece := file.read(min(PIECE, left))):
            found.update(piece)
            left -= len(piece)
    return found.hexdigest()
