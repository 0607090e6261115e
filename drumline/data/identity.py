"""What prepared data holds, and how two preparations of it differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from drumline.core.config import Config
from drumline.core.plan import DataIdentity, DataPlan
from drumline.data.cache import TokenCache, digest_of, left_out, read_info
from drumline.data.prepare import Prepared
from drumline.models.vision import Vision


def identify(cache: TokenCache) -> DataIdentity:
    """The identity of a token cache."""
    # Rows that differ with equal tokens change nothing that is trained on.
    files = {name: digests for name, digests in cache.info["sha256"].items() if name != "rows.npy"}
    return DataIdentity(cache=str(cache.folder), content=digest_of(files), rows=cache.info["rows"], row_set=cache.info["row_set"])


def what_changed(old: DataIdentity, new: DataIdentity) -> str | None:
    """What changed, for a message; None if nothing did. Counts added and removed rows if the old cache is still there."""
    if old.content == new.content:
        return None if old.code == new.code else "the function that gives the rows has changed, and the rows that are compared have not"
    before, after = _rows(old), _rows(new)
    if before is not None and after is not None:
        return _difference(before, after)
    if old.row_set == new.row_set:
        return f"the same {new.rows:,} rows, in another order or with other tokens"
    return f"{old.rows:,} rows before, {new.rows:,} now, and not the same ones"


def _rows(identity: DataIdentity) -> npt.NDArray[np.uint64] | None:
    """The hashes of the rows, in order; None if that cache is gone."""
    info = read_info(Path(identity.cache))
    if info is None or info["row_set"] != identity.row_set:
        return None
    try:
        return np.asarray(np.load(Path(identity.cache) / "rows.npy", allow_pickle=False))
    except (OSError, ValueError):
        return None


def _difference(before: npt.NDArray[np.uint64], after: npt.NDArray[np.uint64]) -> str:
    kinds, which = np.unique(np.concatenate((before, after)), return_inverse=True)
    old, new = which[: len(before)], which[len(before) :]
    change = np.bincount(new, minlength=len(kinds)) - np.bincount(old, minlength=len(kinds))
    added, removed = int(change[change > 0].sum()), int(-change[change < 0].sum())
    changes = [f"{count:,} rows {what}" for count, what in ((added, "added"), (removed, "removed")) if count]
    if not np.array_equal(old[change[old] == 0], new[change[new] == 0]):
        changes.append("the others in another order" if changes else f"the same {len(after):,} rows in another order")
    return ", ".join(changes) or "the same rows in the same order, but their tokens or other columns differ (tokenizer, chat template)"


def describe(prepared: Prepared, config: Config, vision: Vision | None = None) -> DataPlan:
    """What the token caches hold, for a plan."""
    train = TokenCache.open(prepared.train)
    held_out = TokenCache.open(prepared.eval) if prepared.eval else None
    return DataPlan(
        train_cache=str(prepared.train),
        eval_cache=str(prepared.eval) if prepared.eval else None,
        train_samples=len(train),
        train_tokens=int(train.lengths.sum()),
        eval_samples=len(held_out) if held_out else 0,
        images=train.info.get("images", 0),
        image_tokens=train.info.get("patches", 0) // vision.merge**2 if vision else 0,
        samples_with_images=train.info.get("samples_with_images", 0),
        labels=config.algorithm.classes(train, held_out),
        identity=identify(train),
        left_out=tuple(left_out("train", train.info)) + tuple(left_out("eval", held_out.info) if config.data.eval and held_out else ()),
    )


def prompt_columns(prepared: Prepared) -> set[str]:
    """The columns that every prompt has for the rewards."""
    caches = [TokenCache.open(folder) for folder in (prepared.train, prepared.eval) if folder is not None]
    return set.intersection(*(set(cache.meta(sample)) for cache in caches for sample in range(len(cache))))
