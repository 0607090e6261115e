"""What `drumline init` finds in the data: how many rows there are, and how long. From that: lengths, a holdout, when it is saved."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.data import DigitsSource, FileSource, SavedSource, Source, TasksSource
from drumline.planner.question import Found
from drumline.planner.search.advice import STEP
from drumline.report.bars import OnProgress

LOOKED = 2000  # rows; more are not waited for
PACK = 1024  # tokens of a pack, where there are enough of them
FEW = 20  # rows; of fewer none is held out
MOST_HELD, SHARE = 500, 0.05  # rows held out: a share of all, at most so many
CHARACTERS = 3  # of a token, where there is no tokenizer yet: fewer than of English, so that rows are rather taken to be longer


@dataclass(frozen=True)
class Looked:
    """`lengths` in tokens of the rows looked at, none for images; `rows`: how many there are, `more`: and further ones."""

    rows: int
    more: bool
    lengths: list[int]

    def describe(self) -> str:
        rows = f"{self.rows:,}{' and more' * self.more} rows"
        return (
            rows if not self.lengths else f"{rows}, {sum(self.lengths) / self.rows:,.0f} tokens on average, {max(self.lengths):,} at most"
        )


def look(config: Config, model: Found, base: Path, on_progress: OnProgress) -> Looked | None:
    """The first rows of `data.train`; None where they are not here yet. Raises DataError for rows that the algorithm does not take."""
    from drumline.data.sources import read_rows

    (source,) = config.data.train
    if not _is_here(source, base):
        return None
    size, number, lengths = _sizes(config, model), 0, list[int]()
    for row in islice(read_rows(source, base, config.algorithm.forms), LOOKED + 1):
        number += 1
        if number <= LOOKED and size is not None:
            lengths.append(size(row))
            on_progress("looking at the data", number, None)
    return Looked(min(number, LOOKED), number > LOOKED, lengths)


def fitted(config: Config, looked: Looked | None, positions: int | None) -> Config:
    """With a length that the rows fit in, where none was given, rows held out, and intervals at which is saved and evaluated."""
    data: dict[str, Any] = {} if config.data.eval else {"holdout": FEW}
    every = {"every": MOST_HELD}
    if looked is not None:
        if not config.data.eval:
            held = MOST_HELD if looked.more else min(MOST_HELD, max(1, int(SHARE * looked.rows)))
            data["holdout"] = held if looked.rows >= FEW else 0
        if looked.lengths and "max_length" not in config.data.model_fields_set:
            data["max_length"] = _length(config, looked, positions)
        if not looked.more:
            length = data.get("max_length", config.data.max_length)
            samples = sum(looked.lengths) / length if config.packs and looked.lengths else looked.rows
            every = {"every": max(1, min(MOST_HELD, int(samples / (config.batch.global_samples or 32) / 4)))}
    if isinstance(config.data.train[0], DigitsSource):
        data = {"eval": [DigitsSource(split="test")]}
    held_out = data.get("holdout") or data.get("eval")
    sections = {"data": config.data.model_copy(update=data), "checkpoint": config.checkpoint.model_copy(update=every)}
    if held_out:
        sections["eval"] = config.eval.model_copy(update={**every, **config.algorithm.best_by})
    return config.model_copy(update=sections)


def lacking(config: Config) -> list[str]:
    """Packages that a run of this config imports and that are not installed."""
    adapter, kinds = config.adapter, {reward.kind for reward in getattr(config.algorithm, "rewards", ())}
    wanted = {
        "peft": adapter.kind == "lora",
        "bitsandbytes": getattr(adapter, "quantize", "none") != "none",
        **({config.strategy.package: True} if config.strategy.package else {}),
        "reasoning-gym": isinstance(config.data.train[0], TasksSource),
        "scikit-learn": isinstance(config.data.train[0], DigitsSource),
        "pillow": config.images_alone,
        "math-verify": "math" in kinds,
    }
    modules = {"reasoning-gym": "reasoning_gym", "scikit-learn": "sklearn", "pillow": "PIL", "math-verify": "math_verify"}
    return [name for name, is_wanted in wanted.items() if is_wanted and importlib.util.find_spec(modules.get(name, name)) is None]


def _is_here(source: Source, base: Path) -> bool:
    if isinstance(source, FileSource | SavedSource):
        path = Path(source.path).expanduser()
        return (base / path).exists() or (not path.is_absolute() and any(base.glob(source.path)))
    if isinstance(source, TasksSource):
        return importlib.util.find_spec("reasoning_gym") is not None
    return isinstance(source, DigitsSource) and importlib.util.find_spec("sklearn") is not None


def _sizes(config: Config, model: Found) -> Any:
    """Row → tokens of its longest sequence; by characters where no tokenizer is here. None for images."""
    from drumline.data.sources import holds_images
    from drumline.models.load import load_tokenizer

    if config.images_alone:
        return None
    answer = config.algorithm.new_tokens
    tokenizer = model.path or config.model.tokenizer
    endless = config.data.model_copy(update={"max_length": 1 << 20})
    encoder = config.algorithm.encoder(load_tokenizer(model.path, config.model), endless) if tokenizer else None

    def size(row: Any) -> int:
        encoded = encoder.encode(row) if encoder is not None and not holds_images(row) else None
        if encoded is None:
            return len(json.dumps(row.values, default=str, ensure_ascii=False)) // CHARACTERS + answer
        return max(len(segment.tokens) for segment in encoded.segments) + answer

    return size


def _length(config: Config, looked: Looked, positions: int | None) -> int:
    """The longest row, up to a multiple of STEP, and that of a usual pack where this gives packs enough; as long as the model goes."""
    length = STEP * -(-max(looked.lengths) // STEP)
    packs = sum(looked.lengths) * (2 if looked.more else 1) / PACK
    if config.packs and packs >= 4 * (config.batch.global_samples or 32):
        length = max(length, PACK)
    return min(length, positions or length)
