"""What prepared data holds, as a plan says it."""

from __future__ import annotations

from drumline.core.config import Config
from drumline.core.plan import DataPlan
from drumline.data.cache import TokenCache, left_out
from drumline.data.identity import identify
from drumline.data.prepare import Prepared
from drumline.models.vision import Vision


def describe(prepared: Prepared, config: Config, vision: Vision | None = None) -> DataPlan:
    """What the token caches hold."""
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
    """What every prompt brings along for the rewards."""
    caches = [TokenCache.open(folder) for folder in (prepared.train, prepared.eval) if folder is not None]
    return set.intersection(*(set(cache.meta(sample)) for cache in caches for sample in range(len(cache))))
