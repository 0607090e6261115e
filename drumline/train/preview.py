"""`drumline preview`: rows as the model gets them, in the terminal or as one HTML file. Colours say what is in the loss, and marks where
there are none."""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from drumline.core.load import load
from drumline.data.cache import TokenCache
from drumline.data.prepare import prepare
from drumline.data.preview import Piece, Reader, Seen, visible
from drumline.data.samples import read_samples
from drumline.data.workers import digest
from drumline.dist.seeds import Draws
from drumline.errors import DataError, UserError
from drumline.foreign import disk_errors, judged
from drumline.models.files import resolve
from drumline.models.load import load_config
from drumline.models.vision import vision_of
from drumline.report.bars import OnProgress, bars

# Of a token and the next one, and of a special token. What is not in the loss has one style: in two it looked like two kinds of text.
STYLES = {
    "learned": ("black on green", "black on bright_green", "bold underline black on green"),
    "context": ("", "", "bold underline"),
    "cut": ("strike red", "strike bright_red", "strike bold underline red"),
}
MARKS = {"learned": ("⟦", "⟧"), "context": ("", ""), "cut": ("⟪", "⟫")}
SPECIAL = ("⟨", "⟩")
BRACKETS = "<|｜>"  # of special tokens: without colours the marks take their place
BREAK = "⏎"
RESERVED = BREAK + "".join(chain(*MARKS.values(), SPECIAL))  # escaped where a row holds one
FATES = {
    "dropped": ", left out: too long",
    "unlearned": ", left out: nothing to learn",
    "refused": ", cannot be used",
    "cut": "",
    "whole": "",
}
BARS, BAR_WIDTH = 8, 40
NAMED = 5  # rows that a line names
MOST_VALUE = 300  # characters of a column
SHOWN_TOKENS = 1000  # of a segment, at most: more would fill many screens
PAGE_WIDTH = 120
PAGE = """<!DOCTYPE html>
<html><head><meta charset="UTF-8"><title>drumline preview</title>
<style>{stylesheet}
body {{ color: {foreground}; background: {background}; }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}</style></head>
<body><pre><code style="font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace">{code}</code></pre></body></html>
"""


@dataclass(frozen=True)
class Options:
    """`row`: draw this one alone, counted from 1. `first`: rows of each source that are read. `samples`: how many are drawn; None: 3, or 20
    in a page. `html`: the page to write. `everything`: segments of more than SHOWN_TOKENS are drawn whole."""

    row: int | None = None
    first: int = 500
    samples: int | None = None
    html: Path | None = None
    everything: bool = False

    @property
    def most(self) -> int:
        return self.samples if self.samples is not None else 3 if self.html is None else 20


def preview(config_path: Path, overrides: list[str], options: Options) -> None:
    """Draw rows of a config. Raises UserError; for a row that cannot be used, after all else is drawn."""
    if options.html is not None and options.html.suffix not in (".html", ".htm"):
        raise UserError(
            "is no page", where=f"--html {options.html}", fix="name a file such as rows.html"
        )
    loaded = load(config_path, overrides)
    config = loaded.config
    if options.html is not None:
        wide: dict[str, Any] = {
            "force_terminal": True,
            "color_system": "truecolor",
            "no_color": False,
            "width": PAGE_WIDTH,
        }
        console = Console(record=True, file=io.StringIO(), **wide)
    else:
        console = Console()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # terminals that know ASCII alone
    view = View(console, options)
    mistake: UserError | None = None
    if config.plain:
        view.shapes(read_samples(config.data.train, loaded.base_dir.absolute(), Draws(0).used))
    else:
        with bars(Console(stderr=True)) as on_progress:
            model_path = resolve(config.model, on_progress)
            vision = vision_of(config, model_path, load_config(model_path, config.model))
            most = {} if options.everything else {"most": SHOWN_TOKENS}
            reader = Reader(
                config, config.model.tokenizer or model_path or "", loaded.base_dir, vision, **most
            )
            found = [reader.seen(*numbered) for numbered in reader.rows(options.row, options.first)]
            mistake, packs = (
                next((seen.error for seen in found if seen.error is not None), None),
                None,
            )
            if mistake is None and options.row is None and config.packs:
                try:
                    packs = packed(reader, options, on_progress)
                except DataError as error:
                    mistake = error
        view.all(reader, found, packs)
    if options.html is not None:
        _write(console, options.html)
    if mistake is not None:
        raise mistake


def _write(console: Console, path: Path) -> None:
    with disk_errors("cannot be written", str(path), UserError, "choose another place"):
        path.write_text(
            console.export_html(code_format=PAGE), encoding="utf-8", errors="backslashreplace"
        )
    print(f"wrote {path}")


@dataclass(frozen=True)
class Packs:
    """What `prepare` makes of the first rows: its counts, what it says of them, and segments (tokens, learn) and meta of the samples that
    are drawn."""

    info: dict[str, Any]
    notes: list[str]
    samples: list[tuple[list[tuple[Any, Any]], dict[str, Any]]]


def packed(reader: Reader, options: Options, on_progress: OnProgress) -> Packs:
    """Raises DataError as `prepare` does."""
    data, first = reader.config.data, options.first
    sources = [
        source.model_copy(update={"limit": min(first, source.limit or first)})
        for source in data.train
    ]
    with TemporaryDirectory(prefix="drumline-preview-") as folder:
        update = {
            "train": sources,
            "eval": [],
            "holdout": 0,
            "cache_dir": folder,
            "workers": 1,
            "stream": None,
            "decontaminate": None,
        }
        config = reader.config.model_copy(update={"data": data.model_copy(update=update)})
        made = prepare(
            config, reader.job.tokenizer_path, reader.base_dir, on_progress, reader.vision
        )
        cache = TokenCache.open(made.train_cache)
        wanted = range(min(len(cache), options.most))
        notes = [note for note in made.notes if note not in made.formats]
        return Packs(
            cache.info,
            notes,
            [
                ([(t.copy(), learn.copy()) for t, learn in cache.segments(i)], cache.meta(i))
                for i in wanted
            ],
        )


class View:
    """Draws on a console. `plain`: it has no colours, so that marks stand in their place."""

    def __init__(self, console: Console, options: Options) -> None:
        self.console, self.options = console, options
        self.plain = console.no_color or console.color_system is None

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(visible(text), style=style, overflow="fold"))

    def all(self, reader: Reader, found: list[Seen], packs: Packs | None) -> None:
        """Counts, what colours or marks mean, and the first samples."""
        if self.options.row is None:
            self.counts(reader, found, packs)
        if reader.job.tokenizer is not None:
            between = Piece(" · ", "context")
            pieces = [
                Piece("in the loss", "learned"),
                between,
                Piece("not in the loss", "context"),
                between,
                Piece("cut off", "cut"),
                between,
                Piece("special token", "context", special=True),
            ]
            self.line()
            self.console.print(self.text(pieces))
        if packs is None:
            for seen in found[: self.options.most]:
                self.row(reader, seen)
            return
        known: dict[bytes, list[Seen]] = {}
        for seen in found:
            for segment in seen.kept.segments if seen.kept else ():
                known.setdefault(segment.tokens.tobytes(), []).append(seen)
        for number, (segments, meta) in enumerate(packs.samples, start=1):
            self.line()
            size, learned = (
                sum(part)
                for part in zip(*((len(t), learn[1:].sum()) for t, learn in segments), strict=True)
            )
            rows = f"{len(segments)} row" + "s" * (len(segments) > 1)
            self.line(
                f"━━ pack {number}: {rows}, {size:,} tokens, {learned:,} in the loss", "bold cyan"
            )
            for (tokens, learn), pieces in zip(
                segments, reader.sample(segments, meta), strict=True
            ):
                if same := known.get(tokens.astype("int32").tobytes()):
                    self.row(reader, same.pop(0) if len(same) > 1 else same[0], "── ")
                else:  # of a stream that is cut into sequences
                    self.line(f"── {len(tokens):,} tokens, {learn[1:].sum():,} in the loss", "cyan")
                    self.console.print(self.text(pieces))

    def counts(self, reader: Reader, found: list[Seen], packs: Packs | None) -> None:
        """How many rows there are, how long they are, and which were cut, left out, repeated or empty."""
        config, usable = reader.config, [seen for seen in found if seen.error is None]
        limit = config.data.max_length - config.algorithm.new_tokens
        first: dict[bytes, str] = {}
        keys = [(seen, digest(seen.row, config.algorithm.rollout is not None)) for seen in usable]
        repeated = [
            (seen, first[key])
            for seen, key in keys
            if first.setdefault(key, seen.row.origin) != seen.row.origin
        ]
        formats = Counter(seen.row.format for seen in usable if seen.row.format)
        rows = sum(bool(seen.row.values) for seen in found)  # not why a source cannot be read on
        begin = (
            f", of each source the first {self.options.first:,}"
            if rows >= self.options.first
            else ""
        )
        read_as = "".join(f"; {count:,} read as {name}" for name, count in formats.items())
        self.line(f"{rows:,} row{'s' * (rows != 1)}{begin}{read_as}", "bold")
        if packs is None and (filtered := reader.outcomes.total("filtered")):
            self.line(f"{filtered:,} more were left out by `where`")
        segments = [
            segment
            for seen in usable
            if seen.kept and seen.fate != "unlearned"
            for segment in seen.kept.segments
        ]
        tokens, learned = (
            sum(len(segment.tokens) for segment in segments),
            sum(segment.learned for segment in segments),
        )
        if packs is not None:
            tokens, learned, info = packs.info["tokens"], packs.info["learned"], packs.info
            self.line(
                f"{info['samples']:,} packs of at most {config.data.max_length:,} tokens, {info['efficiency']:.1%} full"
            )
            for note in packs.notes:
                self.line(note)
        if reader.job.tokenizer is not None:
            self.line(
                f"{learned:,} of {tokens:,} tokens are in the loss ({learned / tokens:.1%})"
                if learned
                else f"{tokens:,} tokens"
            )
        named = {
            f"cut at {limit:,} tokens": [
                f"{seen.row.origin} ({seen.tokens:,})" for seen in found if seen.fate == "cut"
            ],
            f"left out, longer than {limit:,} tokens": [
                f"{s.row.origin} ({s.tokens:,})" for s in found if s.fate == "dropped"
            ],
            "left out, nothing to learn": [
                seen.row.origin for seen in found if seen.fate == "unlearned"
            ],
            "repeated": [f"{seen.row.origin} (as {earlier})" for seen, earlier in repeated],
            "with an empty answer": [seen.row.origin for seen in usable if reader.empty(seen)],
            "that cannot be used": [seen.row.origin for seen in found if seen.error is not None],
        }
        for what, names in named.items():
            more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            if names:
                self.line(f"{len(names):,} {what}: {', '.join(names[:NAMED])}{more}")
            if what == "that cannot be used":
                for reason, count in reasons_of(found).items():
                    self.line(f"  {count:,} × {reason}", "red")
        if sizes := [seen.tokens for seen in usable if reader.job.tokenizer is not None]:
            self.line("\ntokens of a row, before it is cut", "bold")
            for line in histogram(sizes, limit):
                self.line(line)

    def row(self, reader: Reader, seen: Seen, border: str = "━━ ") -> None:
        """One row: both sides of a pair, what was cut, and what rewards get."""
        kept = seen.kept.segments if seen.kept else []
        what = f"row {seen.number}, {seen.row.origin}" + (
            f", read as {seen.row.format}" if seen.row.format else ""
        )
        if seen.full is not None and reader.job.tokenizer is not None:
            over = (
                seen.tokens - max((len(segment.tokens) for segment in kept), default=0)
                if kept
                else 0
            )
            what += f": {seen.tokens:,} tokens" + (f", {over:,} of them cut off" if over else "")
            learned = sum(segment.learned for segment in kept)
            what += f", {learned:,} in the loss" if learned or seen.fate == "unlearned" else ""
        if border == "━━ ":
            self.line()
        self.line(
            f"{border}{what}{FATES.get(seen.fate, '')}", "bold cyan" if border == "━━ " else "cyan"
        )
        if (
            seen.error is not None and self.options.row is not None
        ):  # else the counts have its reason
            self.line(seen.error.line(), "red")
        sides = reader.segments(seen)
        for name, pieces in zip(
            ("chosen", "rejected") if len(sides) == 2 else ("",), sides, strict=False
        ):
            if name:
                self.line(name, "bold")
            if pieces:
                self.console.print(self.text(pieces))
        meta = (seen.kept.meta if seen.kept else None) or {}
        columns = {
            name: repr(value)
            for name, value in meta.items()
            if name not in ("images", "grid", "origin")
        }
        if columns:
            rollout = reader.config.algorithm.rollout
            names = (
                ", ".join(getattr(reward, "path", reward.kind) for reward in rollout.rewards)
                if rollout
                else ""
            )
            self.line(
                f"rewards ({names}) get the completion and" if rollout else "beside the tokens",
                "bold",
            )
        for name, value in columns.items():
            self.line(f"  {name} = {value[:MOST_VALUE]}" + ("…" if len(value) > MOST_VALUE else ""))

    def text(self, pieces: list[Piece]) -> Text:
        """Tokens one behind the other; in colours neighbours in the loss differ in their shade."""
        text, state = Text(overflow="fold"), "context"
        for place, piece in enumerate(pieces):
            shown = visible(piece.text, RESERVED).replace("\n", f"{BREAK}\n")
            if self.plain:
                text.append(MARKS[state][1] + MARKS[piece.state][0] if piece.state != state else "")
                text.append(
                    f"{SPECIAL[0]}{shown.strip(BRACKETS) or shown}{SPECIAL[1]}"
                    if piece.special
                    else shown
                )
                state = piece.state
            else:
                text.append(shown, STYLES[piece.state][2 if piece.special else place % 2])
        text.append(MARKS[state][1])
        if text.plain.endswith("\n"):
            text.right_crop()
        return text

    def shapes(self, samples: Any) -> None:
        """The first samples of a module of the user's own."""
        self.line(
            f"{len(samples):,} samples as your own module gets them; they have no tokens, so this is what they hold",
            "bold",
        )
        for number in range(min(self.options.most, len(samples))):
            with judged("cannot be read", f"sample {number + 1}", DataError):
                self.line(f"sample {number + 1}: {shape_of(samples[number])}")


def reasons_of(found: list[Seen]) -> dict[str, int]:
    """Return {why rows cannot be used: how many}. Reasons that differ in their numbers alone count as one, in the words of the first."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for seen in found:
        if seen.error is None:
            continue
        reason = seen.error.what if not seen.error.fix else f"{seen.error.what} — {seen.error.fix}"
        wording = first.setdefault(re.sub(r"\d+", "#", reason), reason)
        counts[wording] = counts.get(wording, 0) + 1
    return counts


def histogram(sizes: list[int], limit: int) -> list[str]:
    """A line for each range of lengths, and one for rows longer than `limit`."""
    inside = [size for size in sizes if size <= limit]
    low, high = min(inside, default=1), max(inside, default=0)
    step = math.ceil((high - low + 1) / BARS) or 1
    named = {
        first: f"{first:,} to {min(first + step - 1, high):,}"
        for first in range(low, high + 1, step)
    }
    counts = Counter(low + (size - low) // step * step for size in inside)
    if over := len(sizes) - len(inside):
        named[0], counts[0] = f"over {limit:,}", over
    most, width = max(counts.values()), max(map(len, named.values()))
    return [
        f"{name:>{width}} {'█' * math.ceil(BAR_WIDTH * counts[first] / most)} {counts[first]:,}"
        for first, name in named.items()
    ]


def shape_of(value: Any) -> str:
    """What a sample holds: types and shapes of its tensors and arrays, at any depth."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shape_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        shown = ", ".join(shape_of(inner) for inner in value[:8]) + (
            ", …" if len(value) > 8 else ""
        )
        return f"[{shown}]" if isinstance(value, list) else f"({shown})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:60] if isinstance(value, bool | int | float | str) else type(value).__name__
