"""`drumline preview`: draw rows as the model gets them, in the terminal or as one HTML file.

Colours show which tokens are in the loss. A terminal without colours shows marks instead.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from rich.text import Text

from drumline.config.load import Loaded, load
from drumline.config.rollouts import Reward, sees_groups
from drumline.data.cache import TokenCache
from drumline.data.image_files import VIDEO_FILES
from drumline.data.prepare import prepare
from drumline.data.preview import NO_LIMIT, Piece, PreviewedRow, Reader, escape
from drumline.data.samples import read_samples
from drumline.data.workers import digest
from drumline.dist.seeds import Draws
from drumline.errors import DataError, UserError
from drumline.foreign import disk_errors, translate_exceptions
from drumline.models.files import resolve
from drumline.models.load import load_config
from drumline.models.vision import vision_of
from drumline.planner.seq2seq import resolve_seq2seq
from drumline.report.bars import OnProgress, bars, notes
from drumline.system.output import plural


class Style(NamedTuple):
    """The styles of tokens in one state.

    Neighbours alternate between the first two, so that their border shows.
    """

    even: str
    odd: str
    special: str


class Marks(NamedTuple):
    """What a terminal without colours shows around tokens in one state."""

    opening: str
    closing: str


# Text that is not in the loss has a single style: with two it would look like two kinds of text.
STYLES = {
    "learned": Style("black on green", "black on bright_green", "bold underline black on green"),
    "context": Style("", "", "bold underline"),
    "cut": Style("strike red", "strike bright_red", "strike bold underline red"),
}
MARKS = {"learned": Marks("⟦", "⟧"), "context": Marks("", ""), "cut": Marks("⟪", "⟫")}
SPECIAL = Marks("⟨", "⟩")
BRACKETS = "<|｜>"  # around special tokens; without colours SPECIAL takes their place
BREAK = "⏎"
RESERVED = BREAK + "".join(chain(*MARKS.values(), SPECIAL))  # escaped where a row holds one
FATES = {
    "dropped": ", left out: too long",
    "unlearned": ", left out: nothing to learn",
    "refused": ", cannot be used",
    "cut": "",
    "whole": "",
}
# Columns of a sample's meta that are no columns of the user's row.
INNER_COLUMNS = ("images", "grid", VIDEO_FILES, "origin")
# Ranges of a histogram, and the characters of its longest bar.
BARS = 8
BAR_WIDTH = 40
NAMED = 5  # rows that a line names
MOST_VALUE = 300  # characters of a column
MOST_ITEMS = 8  # of a list or tuple in a sample of any module
MOST_REPR = 60  # characters of a number or string in it
SHOWN_TOKENS = 1000  # of a segment, at most: more would fill many screens
SAMPLES_ON_SCREEN = 3
SAMPLES_ON_PAGE = 20
PAGE_WIDTH = 120
GREEN = 2  # its index in a terminal's palette
PAGE = """<!DOCTYPE html>
<html><head><meta charset="UTF-8"><title>drumline preview</title>
<style>{stylesheet}
body {{ color: {foreground}; background: {background}; }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}</style></head>
<body><pre><code style="font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace">{code}</code></pre></body></html>
"""


def _page_theme() -> TerminalTheme:
    """Return the terminal's colours with two pale greens: black text on the usual ones is hard to read."""
    colors: list[tuple[int, int, int]] = []
    for number in range(16):
        red, green, blue = DEFAULT_TERMINAL_THEME.ansi_colors[number]
        colors.append((red, green, blue))
    normal, bright = colors[:8], colors[8:]
    normal[GREEN] = (172, 228, 172)
    bright[GREEN] = (208, 242, 208)
    return TerminalTheme((255, 255, 255), (0, 0, 0), normal, bright)


@dataclass(frozen=True)
class Options:
    """The options of `drumline preview`."""

    row: int | None = None  # draw this row alone, counted from 1
    first: int = 500  # rows of each source that are read
    samples: int | None = None  # how many are drawn; None: a number that suits the output
    html: Path | None = None  # the page to write
    everything: bool = False  # draw segments of more than SHOWN_TOKENS whole

    @property
    def most(self) -> int:
        """How many samples are drawn at most."""
        if self.samples is not None:
            return self.samples
        if self.html is None:
            return SAMPLES_ON_SCREEN
        return SAMPLES_ON_PAGE


def preview(config_path: Path, overrides: list[str], options: Options) -> None:
    """Draw rows of a config in the terminal, or as a page.

    `overrides`: `key=value` over the config. Raises UserError. The error of a row that cannot be
    used is raised after all else is drawn, so that the user sees it among the rows that can.
    """
    if options.html is not None and options.html.suffix not in (".html", ".htm"):
        raise UserError(
            "is no page", where=f"--html {options.html}", fix="name a file such as rows.html"
        )
    loaded = load(config_path, overrides)
    console = _make_console(options)
    view = View(console, options)
    error: UserError | None = None
    if loaded.config.has_own_module:
        folder = loaded.base_dir.absolute()
        view.show_samples(read_samples(loaded.config.data.train, folder, Draws(0).use))
    else:
        error = _preview_rows(loaded, view, options)
    if options.html is not None:
        _write(console, options.html)
    if error is not None:
        raise error


def _make_console(options: Options) -> Console:
    """Return the console to draw on: the terminal, or one that records a page."""
    if options.html is not None:
        # The page has colours also if the command runs without a terminal, or with NO_COLOR.
        return Console(
            record=True,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
            no_color=False,
            width=PAGE_WIDTH,
        )
    console = Console()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Some terminals know ASCII alone.
        sys.stdout.reconfigure(errors="backslashreplace")
    return console


def _preview_rows(loaded: Loaded, view: View, options: Options) -> UserError | None:
    """Draw rows of text, and return the first error of a row or of packing."""
    config = loaded.config
    error: UserError | None = None
    packs: Packs | None = None
    with bars(Console(stderr=True)) as on_progress:
        model_path = resolve(config.model, on_progress)
        hf_config = load_config(model_path, config.model)
        config = resolve_seq2seq(config, hf_config, notes)
        vision = vision_of(config, model_path, hf_config)
        tokenizer_path = config.model.tokenizer or model_path or ""
        most_tokens = SHOWN_TOKENS
        if options.everything:
            most_tokens = NO_LIMIT
        reader = Reader(config, tokenizer_path, loaded.base_dir, vision, most_tokens)
        rows = []
        for number, row in reader.rows(options.row, options.first):
            seen = reader.encode(number, row)
            if error is None:
                error = seen.error
            rows.append(seen)
        # With a row that cannot be used, packing would end in an error too.
        if error is None and options.row is None and config.packs:
            try:
                packs = pack_first_rows(reader, options, on_progress)
            except DataError as failure:
                error = failure
    view.show(reader, rows, packs)
    return error


def _write(console: Console, path: Path) -> None:
    """Write what was drawn as a page."""
    page = console.export_html(theme=_page_theme(), code_format=PAGE)
    with disk_errors("cannot be written", str(path), UserError, "choose another place"):
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    print(f"wrote {path}")


class Segment(NamedTuple):
    """A row in a pack.

    `tokens`, `learn`: arrays [T]; learn is above 0 where a token is in the loss.
    """

    tokens: Any
    learn: Any

    @property
    def learned(self) -> int:
        """Tokens in the loss. Nothing predicts the first token."""
        return int(self.learn[1:].sum())


@dataclass(frozen=True)
class Pack:
    """A sample of the token cache: rows that are trained as one sequence."""

    segments: list[Segment]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Packs:
    """The packs that `prepare` makes of the first rows."""

    info: dict[str, Any]  # counts of the token cache
    notes: list[str]  # lines about the data
    samples: list[Pack]  # those that are drawn


def pack_first_rows(reader: Reader, options: Options, on_progress: OnProgress) -> Packs:
    """Prepare the first rows of each source in a temporary folder, and return their packs.

    These are the packs that `drumline train` would make of these rows alone. Raises DataError as
    `prepare` does.
    """
    data = reader.config.data
    sources = []
    for source in data.train:
        limit = min(options.first, source.limit or options.first)
        sources.append(source.model_copy(update={"limit": limit}))
    with TemporaryDirectory(prefix="drumline-preview-") as folder:
        # What takes long, or needs more than the first rows, is left out.
        changes = {
            "train": sources,
            "eval": [],
            "holdout": 0,
            "cache_dir": folder,
            "workers": 1,
            "stream": None,
            "decontaminate": None,
        }
        changed_data = data.model_copy(update=changes)
        config = reader.config.model_copy(update={"data": changed_data})
        prepared = prepare(
            config, reader.chunk_encoder.tokenizer_path, reader.base_dir, on_progress, reader.vision
        )
        cache = TokenCache.open(prepared.train_cache)
        samples = []
        for number in range(min(len(cache), options.most)):
            segments = []
            for tokens, learn in cache.segments(number):
                # Copies: the folder with the arrays is about to go.
                segments.append(Segment(tokens.copy(), learn.copy()))
            samples.append(Pack(segments, cache.meta(number)))
        notes = [note for note in prepared.notes if note not in prepared.formats]
        return Packs(cache.info, notes, samples)


class View:
    """Draws on a console. Without colours (`lacks_colors`) marks stand in their place."""

    def __init__(self, console: Console, options: Options) -> None:
        self.console = console
        self.options = options
        self.lacks_colors = console.no_color or console.color_system is None

    def line(self, text: str = "", style: str = "") -> None:
        """Draw a line of text, with control characters escaped: rows hold whatever they like."""
        self.console.print(Text(escape(text), style=style, overflow="fold"))

    def show(self, reader: Reader, rows: list[PreviewedRow], packs: Packs | None) -> None:
        """Draw the counts, what colours or marks mean, and the first samples."""
        if self.options.row is None:
            self.show_counts(reader, rows, packs)
        if reader.chunk_encoder.tokenizer is not None:
            self._show_legend()
        if packs is None:
            for seen in rows[: self.options.most]:
                self.show_row(reader, seen)
        else:
            self._show_packs(reader, rows, packs)

    def _show_legend(self) -> None:
        """Draw what each colour or mark means."""
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

    def _show_packs(self, reader: Reader, rows: list[PreviewedRow], packs: Packs) -> None:
        """Draw packs, and in each one its rows as they stand in the files.

        A pack holds tokens alone, so a row of the files is found by them.
        """
        rows_by_tokens: dict[bytes, list[PreviewedRow]] = {}
        for seen in rows:
            if seen.kept is not None:
                for example in seen.kept.segments:
                    rows_by_tokens.setdefault(example.tokens.tobytes(), []).append(seen)
        for number, pack in enumerate(packs.samples, start=1):
            size = sum(len(segment.tokens) for segment in pack.segments)
            learned = sum(segment.learned for segment in pack.segments)
            count = plural(len(pack.segments), "row")
            self.line()
            self.line(
                f"━━ pack {number}: {count}, {size:,} tokens, {learned:,} in the loss", "bold cyan"
            )
            pieces_of_segments = reader.sample(list(pack.segments), pack.meta)
            for segment, pieces in zip(pack.segments, pieces_of_segments, strict=True):
                # The cache may keep tokens in fewer bytes than a row that was just encoded.
                tokens_of_row = segment.tokens.astype("int32").tobytes()
                same = rows_by_tokens.get(tokens_of_row)
                if same:
                    # Equal rows are named in turn; the last one for all the rest.
                    seen = same[0]
                    if len(same) > 1:
                        same.pop(0)
                    self.show_row(reader, seen, is_in_pack=True)
                else:
                    # A part of a stream of tokens that is cut into sequences is no row.
                    self.line(
                        f"── {len(segment.tokens):,} tokens, {segment.learned:,} in the loss",
                        "cyan",
                    )
                    self.console.print(self.text(pieces))

    def show_counts(self, reader: Reader, rows: list[PreviewedRow], packs: Packs | None) -> None:
        """Draw how many rows there are, how long they are, and which are conspicuous."""
        usable = [seen for seen in rows if seen.error is None]
        # A prompt leaves room for the tokens that are generated after it.
        limit = reader.config.data.max_length - reader.config.algorithm.new_tokens
        self._show_number_of_rows(rows, usable)
        filtered = reader.counts.total("filtered")
        if packs is None and filtered:
            self.line(f"{filtered:,} more were left out by `where`")
        self._show_number_of_tokens(reader, usable, packs)
        self._show_conspicuous_rows(reader, rows, usable, limit)
        if usable and reader.chunk_encoder.tokenizer is not None:
            self.line("\ntokens of a row, before it is cut", "bold")
            for line in histogram([seen.tokens for seen in usable], limit):
                self.line(line)

    def _show_number_of_rows(self, rows: list[PreviewedRow], usable: list[PreviewedRow]) -> None:
        """Draw how many rows were read, and in which formats."""
        # An entry without values says why a source cannot be read on, and is no row.
        count = sum(bool(seen.row.values) for seen in rows)
        line = plural(count, "row")
        if count >= self.options.first:
            line += f", of each source the first {self.options.first:,}"
        formats = Counter(seen.row.format for seen in usable if seen.row.format)
        for name, times in formats.items():
            line += f"; {times:,} read as {name}"
        self.line(line, "bold")

    def _show_number_of_tokens(
        self, reader: Reader, usable: list[PreviewedRow], packs: Packs | None
    ) -> None:
        """Draw how many tokens there are, and how many of them are in the loss."""
        if packs is not None:
            tokens = packs.info["tokens"]
            learned = packs.info["learned"]
            count = packs.info["samples"]
            max_length = reader.config.data.max_length
            efficiency = packs.info["efficiency"]
            self.line(f"{count:,} packs of at most {max_length:,} tokens, {efficiency:.1%} full")
            for note in packs.notes:
                self.line(note)
        else:
            tokens = 0
            learned = 0
            for seen in usable:
                if seen.kept is None or seen.fate == "unlearned":
                    continue
                for segment in seen.kept.segments:
                    tokens += len(segment.tokens)
                    learned += segment.target_count
        if reader.chunk_encoder.tokenizer is None:
            return
        if learned:
            self.line(f"{learned:,} of {tokens:,} tokens are in the loss ({learned / tokens:.1%})")
        else:
            self.line(f"{tokens:,} tokens")

    def _show_conspicuous_rows(
        self, reader: Reader, rows: list[PreviewedRow], usable: list[PreviewedRow], limit: int
    ) -> None:
        """Name the first rows that were cut, left out, repeated, empty or refused.

        Rows that were too long are named with their tokens. `limit`: the most tokens of a row.
        """
        origins_by_fate: dict[str, list[str]] = {}
        sized_origins_by_fate: dict[str, list[str]] = {}
        for seen in rows:
            origin = seen.row.origin
            origins_by_fate.setdefault(seen.fate, []).append(origin)
            sized_origins_by_fate.setdefault(seen.fate, []).append(f"{origin} ({seen.tokens:,})")
        self._name_rows(f"cut at {limit:,} tokens", sized_origins_by_fate.get("cut", []))
        too_long = sized_origins_by_fate.get("dropped", [])
        self._name_rows(f"left out, longer than {limit:,} tokens", too_long)
        self._name_rows("left out, nothing to learn", origins_by_fate.get("unlearned", []))
        self._name_rows("repeated", _repeated_rows(reader, usable))
        empty = [seen.row.origin for seen in usable if reader.has_empty_answer(seen)]
        self._name_rows("with an empty answer", empty)
        self._name_rows("that cannot be used", origins_by_fate.get("refused", []))
        for reason, count in count_reasons(rows).items():
            self.line(f"  {count:,} × {reason}", "red")

    def _name_rows(self, what: str, names: list[str]) -> None:
        """Draw how many rows are `what`, with the first few names; nothing if there are none."""
        if not names:
            return
        first_names = ", ".join(names[:NAMED])
        line = f"{len(names):,} {what}: {first_names}"
        if len(names) > NAMED:
            line += f" and {len(names) - NAMED:,} more"
        self.line(line)

    def show_row(self, reader: Reader, seen: PreviewedRow, is_in_pack: bool = False) -> None:
        """Draw one row: each text of it by its name, what was cut, and what rewards get."""
        title = _title_of_row(reader, seen)
        if is_in_pack:
            self.line(f"── {title}", "cyan")
        else:
            self.line()
            self.line(f"━━ {title}", "bold cyan")
        if seen.error is not None and self.options.row is not None:
            # If several rows are drawn, the counts have its reason.
            self.line(seen.error.line(), "red")
        segments = reader.segments(seen)
        names = reader.config.algorithm.segment_names(len(segments))
        for name, pieces in zip(names, segments, strict=True):
            if name:
                self.line(name, "bold")
            if pieces:
                self.console.print(self.text(pieces))
        self._show_columns(reader, seen)

    def _show_columns(self, reader: Reader, seen: PreviewedRow) -> None:
        """Draw what a row has besides its tokens, such as columns that rewards get."""
        columns = {}
        if seen.kept is not None and seen.kept.meta:
            for name, value in seen.kept.meta.items():
                if name not in INNER_COLUMNS:
                    columns[name] = repr(value)
        if not columns:
            return
        rollout = reader.config.algorithm.rollout
        if rollout and rollout.rewards:
            rewards = ", ".join(getattr(reward, "path", reward.kind) for reward in rollout.rewards)
            self.line(f"rewards ({rewards}) get {what_rewards_get(rollout.rewards)} and", "bold")
        else:
            self.line("beside the tokens", "bold")
        for name, value in columns.items():
            shown = value
            if len(value) > MOST_VALUE:
                shown = value[:MOST_VALUE] + "…"
            self.line(f"  {name} = {shown}")

    def text(self, pieces: list[Piece]) -> Text:
        """Return tokens as one text, in colours, or with marks on a plain console."""
        if self.lacks_colors:
            text = _mark_tokens(pieces)
        else:
            text = _colour_tokens(pieces)
        if text.plain.endswith("\n"):
            # The console ends the line itself.
            text.right_crop()
        return text

    def show_samples(self, samples: Any) -> None:
        """Draw the first samples of a module of the user's own."""
        self.line(
            f"{len(samples):,} samples as your own module gets them; they have no tokens, so this is what they hold",
            "bold",
        )
        for number in range(min(self.options.most, len(samples))):
            with translate_exceptions("cannot be read", f"sample {number + 1}", DataError):
                self.line(f"sample {number + 1}: {shape_of(samples[number])}")


def _mark_tokens(pieces: list[Piece]) -> Text:
    """Return tokens as a text with marks.

    They surround what is in the loss, what was cut, and special tokens.
    """
    text = Text(overflow="fold")
    state = "context"
    for piece in pieces:
        if piece.state != state:
            text.append(MARKS[state].closing + MARKS[piece.state].opening)
            state = piece.state
        shown = _shown(piece)
        if piece.special:
            name = shown.strip(BRACKETS) or shown
            shown = f"{SPECIAL.opening}{name}{SPECIAL.closing}"
        text.append(shown)
    text.append(MARKS[state].closing)
    return text


def _colour_tokens(pieces: list[Piece]) -> Text:
    """Return tokens as a text in which neighbours in the loss differ in their shade."""
    text = Text(overflow="fold")
    for place, piece in enumerate(pieces):
        styles = STYLES[piece.state]
        if piece.special:
            style = styles.special
        elif place % 2 == 0:
            style = styles.even
        else:
            style = styles.odd
        text.append(_shown(piece), style)
    return text


def _shown(piece: Piece) -> str:
    """Return a token's text, with a sign at each line break."""
    return escape(piece.text, RESERVED).replace("\n", f"{BREAK}\n")


def what_rewards_get(rewards: Sequence[Reward]) -> str:
    """Return what rewards see of the completions of a prompt, as a line of the preview says it."""
    see_groups = [sees_groups(reward) for reward in rewards]
    if all(see_groups):
        return "all completions of the prompt"
    if any(see_groups):
        return "the completion, or with `of: group` all of the prompt,"
    return "the completion"


def _title_of_row(reader: Reader, seen: PreviewedRow) -> str:
    """Return a line on a row: number and file, format, tokens, and what became of it."""
    title = f"row {seen.number}, {seen.row.origin}"
    if seen.row.format:
        title += f", read as {seen.row.format}"
    if seen.full is not None and reader.chunk_encoder.tokenizer is not None:
        title += f": {seen.tokens:,} tokens"
        kept: list[Any] = []
        if seen.kept is not None:
            kept = seen.kept.segments
        if kept:
            # The longer side of a pair counts, as in `PreviewedRow.tokens`.
            longest = max(len(segment.tokens) for segment in kept)
            cut_off = seen.tokens - longest
            if cut_off:
                title += f", {cut_off:,} of them cut off"
        learned = sum(segment.target_count for segment in kept)
        if learned or seen.fate == "unlearned":
            title += f", {learned:,} in the loss"
    return title + FATES.get(seen.fate, "")


def _repeated_rows(reader: Reader, usable: list[PreviewedRow]) -> list[str]:
    """Return a text for each row that repeats an earlier one."""
    is_rollout = reader.config.algorithm.rollout is not None
    first_origins: dict[bytes, str] = {}
    repeated = []
    for seen in usable:
        key = digest(seen.row, is_rollout)
        first_origin = first_origins.setdefault(key, seen.row.origin)
        if first_origin != seen.row.origin:
            repeated.append(f"{seen.row.origin} (as {first_origin})")
    return repeated


def count_reasons(rows: list[PreviewedRow]) -> dict[str, int]:
    """Return how many rows cannot be used, by the reason.

    Reasons that differ in their numbers alone ("row 3", "row 4") count as one, in the words of the
    first.
    """
    counts: dict[str, int] = {}
    first_wordings: dict[str, str] = {}
    for seen in rows:
        if seen.error is None:
            continue
        reason = seen.error.what
        if seen.error.fix:
            reason += f" — {seen.error.fix}"
        without_numbers = re.sub(r"\d+", "#", reason)
        wording = first_wordings.setdefault(without_numbers, reason)
        counts[wording] = counts.get(wording, 0) + 1
    return counts


def histogram(sizes: list[int], limit: int) -> list[str]:
    """Return a line for each range of lengths, with a bar, and one for rows longer than `limit`.

    `sizes`: tokens of each row. Lines come in the order of their ranges.
    """
    within_limit = [size for size in sizes if size <= limit]
    low = min(within_limit, default=1)
    high = max(within_limit, default=0)
    # Sizes of a range; at least 1 where no row is within the limit.
    step = math.ceil((high - low + 1) / BARS) or 1
    # The label of each range, by its first length.
    labels = {}
    for first in range(low, high + 1, step):
        last = min(first + step - 1, high)
        labels[first] = f"{first:,} to {last:,}"
    counts = Counter[int]()
    for size in within_limit:
        steps_up = (size - low) // step
        counts[low + steps_up * step] += 1
    too_long = len(sizes) - len(within_limit)
    if too_long:
        # No range begins at 0.
        labels[0] = f"over {limit:,}"
        counts[0] = too_long
    highest_count = max(counts.values())
    label_width = max(len(label) for label in labels.values())
    lines = []
    for first, label in labels.items():
        bar = "█" * math.ceil(BAR_WIDTH * counts[first] / highest_count)
        lines.append(f"{label:>{label_width}} {bar} {counts[first]:,}")
    return lines


def shape_of(value: Any) -> str:
    """Return what a sample holds: types and shapes of its tensors and arrays, at any depth."""
    if isinstance(value, dict):
        entries = [f"{key}: {shape_of(inner)}" for key, inner in value.items()]
        shown = ", ".join(entries)
        return f"{{{shown}}}"
    if isinstance(value, list | tuple):
        items = [shape_of(inner) for inner in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS:
            items.append("…")
        shown = ", ".join(items)
        if isinstance(value, list):
            return f"[{shown}]"
        return f"({shown})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, bool | int | float | str):
        return repr(value)[:MOST_REPR]
    return type(value).__name__
