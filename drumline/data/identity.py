"""Whether two preparations gave the same samples in the same order, and what changed where they did not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from drumline.core.plan import DataIdentity
from drumline.data.cache import TokenCache, read_info
from drumline.data.checksums import digest_of


def identify(cache: TokenCache) -> DataIdentity:
    """The identity of a token cache."""
    # Where rows differ and tokens do not, nothing was changed that is learned from.
    files = {name: digests for name, digests in cache.info["sha256"].items() if name != "rows.npy"}
    return DataIdentity(cache=str(cache.folder), content=digest_of(files), rows=cache.info["rows"], row_set=cache.info["row_set"])


def what_changed(old: DataIdentity, new: DataIdentity) -> str | None:
    """In words; None where nothing did. Rows are counted one by one while the old cache is still there."""
    if old.content == new.content:
        return None
    before, after = _rows(old), _rows(new)
    if before is not None and after is not None:
        return _difference(before, after)
    if old.row_set == new.row_set:
        return f"the same {new.rows:,} rows, in another order or with other tokens"
    return f"{old.rows:,} rows before, {new.rows:,} now, and not the same ones"


def _rows(identity: DataIdentity) -> npt.NDArray[np.uint64] | None:
    """The hashes of the rows, in order; None where that cache is gone."""
    folder = Path(identity.cache)
    info = read_info(folder)
    if info is None or info["row_set"] != identity.row_set:
        return None
    try:
        hashes: npt.NDArray[np.uint64] = np.load(folder / "rows.npy", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return hashes


def _difference(before: npt.NDArray[np.uint64], after: npt.NDArray[np.uint64]) -> str:
    kinds, which = np.unique(np.concatenate((before, after)), return_inverse=True)
    old, new = which[: len(before)], which[len(before) :]
    change = np.bincount(new, minlength=len(kinds)) - np.bincount(old, minlength=len(kinds))
    added, removed = int(change[change > 0].sum()), int(-change[change < 0].sum())
    changes = [f"{count:,} rows {what}" for count, what in ((added, "added"), (removed, "removed")) if count]
    if not np.array_equal(old[change[old] == 0], new[change[new] == 0]):
        changes.append("the others in another order" if changes else f"the same {len(after):,} rows in another order")
    return ", ".join(changes) or "the same rows in the same order, but their tokens or other columns differ (tokenizer, chat template)"
