"""The encoders of the algorithms: from a row to the segments and the meta of a sample.

There is one for texts, prompts of rollouts, preference pairs, judged answers, and texts and images
with a class. Those of queries are in `data.retrieval`. `data.targets` tokenises what they put together.

The label of a class is its name, or its index in `algorithm.labels`. A sample keeps the name,
because the order of the classes is only known once all rows are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from drumline.config.data import DataConfig
from drumline.data.cache import TokenCache, cache_root
from drumline.data.files import json_round_trip
from drumline.data.formats import LABELS
from drumline.data.image_files import resolve_image_path
from drumline.data.pairs import SAME_ANSWER, SIDES, TextOrMessages, pair_parts
from drumline.data.sources import VIDEO_MARK, Row, has_marked_videos, holds_images
from drumline.data.targets import EncodedSample, Encoder, TokenSegment, TruncationPolicy, truncate
from drumline.data.turns import Messages, as_messages
from drumline.errors import ConfigError, DataError
from drumline.foreign import expand_home, finite_number
from drumline.models.classes import IMAGE_READING_TYPES

DIGEST_DIGITS = 16  # hex digits of sha256 over a prompt
MOST_DIGITS = 600  # digits of a class that is a number; Python parses at least 640
MOST_NAMES = 10  # classes that a message lists
# The meta of a prompt uses the keys `prompt` and `domain` itself. If the row has columns with these
# names, the meta has them under this key.
OWN_COLUMNS = "own columns"
# The key under which the meta of a prompt has the prompt as the row has it, for environments.
ROW_PROMPT = "row prompt"


class RowEncoder(Protocol):
    """Encodes the rows of an algorithm."""

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a row as tokens, cut to data.max_length; None if it is dropped.

        Raises DataError that names the row.
        """


class TextRowEncoder:
    """Encodes conversations, completions and documents.

    Rows of a packed pretraining run are not cut here: `packing.cut` does that.

    Args:
        tokenizer: a tokenizer of transformers.
        learn_all: every token is a target, as in pretraining.
        data: the settings of `data`.
    """

    def __init__(self, tokenizer: Any, learn_all: bool, data: DataConfig) -> None:
        self.encoder = Encoder(tokenizer, learn_all, data)
        self.data = data
        self.keeps_whole = learn_all and data.packing

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a row as one segment, see `RowEncoder.encode`."""
        refuse_images(row)
        full = self.encoder.encode(row)
        segment: TokenSegment | None = full
        if not self.keeps_whole:
            segment = truncate(full, self.data.max_length, self.data.truncation, row.origin)
        if segment is None:
            return None
        # None, so that the row counts as too long: a greater data.max_length would keep it.
        has_lost_answer = full.target_count and not segment.target_count
        if has_lost_answer:
            return None
        is_cut = len(segment.tokens) < len(full.tokens)
        return EncodedSample([segment], truncated=is_cut, hides_reasoning=full.hides_reasoning)


def refuse_images(row: Row) -> None:
    """Raise DataError for a row with images or videos, where a model reads text alone."""
    if holds_images(row):
        what = "this row holds images, and text alone is read here"
        fix = (
            f"name a model whose images are read ({', '.join(sorted(IMAGE_READING_TYPES))}), or train on"
            " the text: read none of a column with `columns: {images: ''}`"
        )
        raise DataError(what, where=row.origin, fix=fix)
    if has_marked_videos(row):
        what = f"this row has videos at {VIDEO_MARK}, and text alone is read here"
        fix = "name a vision-language model, or take the videos out of the row"
        raise DataError(what, where=row.origin, fix=fix)


class PromptRowEncoder:
    """Encodes prompts of rollouts.

    A sample is one segment, the tokens before the completion. Its meta is what rewards read:
    `prompt` (the text), `domain` (of the source), and the row's other columns under their names;
    columns of these two names are under `OWN_COLUMNS`.

    A prompt leaves room for max_new_tokens within data.max_length. data.truncation decides whether a
    longer one is dropped or cut at its start. It is never cut at its end, which has the question and
    the header of the answer.
    """

    def __init__(
        self, tokenizer: Any, new_tokens: int, data: DataConfig, keeps_row: bool = False
    ) -> None:
        """Store the settings.

        Args:
            tokenizer: A tokenizer of transformers.
            new_tokens: The most tokens that are written behind a prompt.
            data: The settings of `data`.
            keeps_row: Whether the meta also has the prompt as the row has it, under `ROW_PROMPT`.
        """
        self.encoder = Encoder(tokenizer, everything=False, data=data)
        self.truncation = data.truncation
        self.new_tokens = new_tokens
        self.room = data.max_length - new_tokens
        self.keeps_row = keeps_row

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a prompt, see `RowEncoder.encode`."""
        refuse_images(row)
        text, ids = self.encoder.prompt(row)
        tokens = self.cut(ids, row)
        if tokens is None:
            return None
        meta = prompt_meta(row, text, {})
        if self.keeps_row:
            content = row.values.get("prompt", row.values.get("messages"))
            meta[ROW_PROMPT] = json_round_trip(content)
        return EncodedSample([without_targets(tokens)], meta, truncated=len(tokens) < len(ids))

    def cut(self, ids: list[int], row: Row) -> list[int] | None:
        """Return the tokens of a prompt that leave room for a completion; None if it is dropped.

        Raises DataError for an empty prompt, and for one that is too long and may not be cut.
        """
        if not ids:
            raise DataError(
                "the prompt is empty",
                where=row.origin,
                fix="a completion goes on from one token at least",
            )
        size = len(ids)
        is_too_long = size > self.room
        if is_too_long and self.truncation == "drop":
            return None
        if is_too_long and self.truncation != "left":
            raise DataError(
                f"the prompt has {size} tokens, and data.max_length less max_new_tokens "
                f"{self.new_tokens} leaves {self.room}",
                where=row.origin,
                fix="raise data.max_length, or set data.truncation to drop or left",
            )
        return ids[-self.room :]


class AnsweredPromptEncoder(PromptRowEncoder):
    """Encodes prompts of rollouts together with the completions of their rows.

    A sample has a second segment, which is that of `TextRowEncoder`: the whole row, with the
    tokens of its answers as targets.
    """

    def __init__(
        self, tokenizer: Any, new_tokens: int, data: DataConfig, keeps_row: bool = False
    ) -> None:
        super().__init__(tokenizer, new_tokens, data, keeps_row)
        self.text_encoder = TextRowEncoder(tokenizer, learn_all=False, data=data)

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a prompt and its row, see `RowEncoder.encode`."""
        prompt = super().encode(row)
        answered = self.text_encoder.encode(row)
        if prompt is None or answered is None:
            return None
        if not any(segment.target_count for segment in answered.segments):
            raise DataError(
                "the row has no completion to learn from",
                where=row.origin,
                fix="give it one, take the row out, or set algorithm.on_policy_share to 1",
            )
        return replace(
            prompt,
            segments=[*prompt.segments, *answered.segments],
            truncated=prompt.truncated or answered.truncated,
            hides_reasoning=answered.hides_reasoning,
        )


def prompt_meta(row: Row, text: str, images: dict[str, Any]) -> dict[str, Any]:
    """Return what rewards read of a prompt, see `PromptRowEncoder`.

    `images`: the paths and grids of its images; empty for a model of text.
    """
    # Now as they will come back from the cache, which stores JSON.
    columns = json_round_trip(row.extra)
    own = {"prompt": text, "domain": row.domain, **images}
    meta = {**columns, **own}
    clashing = {}
    for name in own:
        if columns.get(name) is not None:
            clashing[name] = columns[name]
    if clashing:
        meta[OWN_COLUMNS] = clashing
    return meta


class PromptImages(Protocol):
    """The images in the prompt of a row with answers."""

    prompt: TextOrMessages
    paths: list[str]

    def expand(self, segment: TokenSegment, origin: str) -> TokenSegment:
        """Return the tokens of prompt and answer with those of the images."""

    def are_whole(self, before: TokenSegment, after: TokenSegment) -> bool:
        """Return whether a cut has left all image tokens of a segment."""

    def meta(self) -> dict[str, Any]:
        """Return the values of the sample's meta; empty without images."""


class AnswerRowEncoder:
    """The base of encoders whose targets are the tokens of answers."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        if data.learn_on != "assistant":
            raise ConfigError(
                "answers are compared by their own tokens alone",
                where="data.learn_on",
                fix="leave it out",
            )
        self.encoder = Encoder(tokenizer, False, data)
        self.data = data

    def images_of(self, row: Row, prompt: TextOrMessages) -> PromptImages | None:
        """Return the images of a row's prompt; None for a model of text alone.

        Raises DataError for images that the model does not read.
        """
        refuse_images(row)
        return None

    def encode_answer(
        self,
        prompt: TextOrMessages,
        answer: TextOrMessages,
        name: str,
        row: Row,
        skip_template: bool,
        images: PromptImages | None,
    ) -> TokenSegment:
        """Return a prompt and an answer as tokens, not yet truncated.

        Args:
            prompt: a text or messages.
            answer: a text or messages.
            name: the answer's column, for messages.
            row: the row of both, for the tools and the name.
            skip_template: do not apply the chat template if prompt and answer are texts.
            images: those of the prompt; None for a model of text alone.

        Raises DataError for an answer without a token, and for one with images.
        """
        if images is not None:
            prompt = images.prompt
        _require_answer(as_messages(answer, "assistant"), name, row.origin)
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            self.encoder.require_template("the row holds messages", row)
        elif skip_template:
            plain = self.encoder.encode_without_template(prompt, answer, row.origin)
            if images is not None:
                plain = images.expand(plain, row.origin)
            return plain
        values = {"prompt": prompt, "completion": answer, "tools": row.values.get("tools")}
        segment = self.encoder.encode(Row(row.origin, values))
        if images is not None:
            segment = images.expand(segment, row.origin)
        if not segment.target_count:
            raise DataError(
                f"`{name}` has no turn of the assistant behind the prompt", where=row.origin
            )
        return segment


def _require_answer(turns: Messages, name: str, origin: str) -> None:
    """Raise DataError for an answer that says nothing, or that holds images.

    Args:
        turns: the messages of the answer.
        name: its column.
        origin: the row's name in an error.
    """
    has_answer = False
    for turn in turns:
        content = turn.get("content") or ""
        if not isinstance(content, str):
            # A content in parts of text alone has become a text.
            what = f"`{name}` holds images, and here only a prompt may have some"
            raise DataError(what, where=origin, fix="put them into `prompt`, or take the row out")
        if turn.get("tool_calls") or content.strip():
            has_answer = True
    if not has_answer:
        what = f"`{name}` is empty: it has no answer"
        raise DataError(what, where=origin, fix="take the row out")


class PairRowEncoder(AnswerRowEncoder):
    """Encodes pairs as two segments, chosen first.

    A segment is the prompt and an answer, whose tokens are the targets. With a chat template a text
    is a turn of the user or the assistant. Without a template, and for two texts without a prompt, the
    text is taken as it is and closed by the end-of-sequence token. Without a `prompt` column the prompt
    is the common start of both sides; with one, messages may repeat it. A margin goes into the
    sample's meta.
    """

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a pair as two segments, see `RowEncoder.encode`."""
        skip_template = not {"prompt", "tools"} & row.values.keys()
        prompt, *answers = pair_parts(row.values, row.origin)
        images = self.images_of(row, prompt)
        full = []
        for answer, name in zip(answers, SIDES, strict=True):
            full.append(self.encode_answer(prompt, answer, name, row, skip_template, images))
        chosen, rejected = full
        # Texts that differ may still be rendered alike, so the tokens are compared.
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise DataError(SAME_ANSWER, where=row.origin, fix="take the row out")
        pair = cut_pair(chosen, rejected, self.data.max_length, self.data.truncation, row.origin)
        if pair is None:
            return None
        meta = _pair_meta(row)
        if images is not None:
            if not images.are_whole(chosen, pair[0]):
                return None
            meta |= images.meta()
        is_cut = False
        for short, long in zip(pair, full, strict=True):
            if len(short.tokens) < len(long.tokens):
                is_cut = True
        hides_reasoning = any(segment.hides_reasoning for segment in full)
        return EncodedSample(
            list(pair), meta or None, truncated=is_cut, hides_reasoning=hides_reasoning
        )


class JudgedRowEncoder(AnswerRowEncoder):
    """Encodes an answer that is labelled good or bad as one segment.

    The segment is the prompt and the answer, whose tokens are the targets. The sample's meta has the
    label as `good`, and in `prompt` a digest of the whole prompt: it is the same for all answers to a
    prompt, though truncation may cut each of them in another place.
    """

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a judged answer as one segment, see `RowEncoder.encode`."""
        is_good = judgement(row.values["label"], row.origin)
        prompt = row.values["prompt"]
        images = self.images_of(row, prompt)
        full = self.encode_answer(
            prompt, row.values["completion"], "completion", row, row.skip_template, images
        )
        segment = truncate(full, self.data.max_length, self.data.truncation, row.origin)
        if segment is None or not segment.target_count:
            return None
        is_cut = len(segment.tokens) < len(full.tokens)
        # The first target is the first token of the answer.
        prompt_size = int(np.argmax(full.learn))
        prompt_tokens = full.tokens[:prompt_size]
        digest = sha256(prompt_tokens.tobytes())
        meta: dict[str, Any] = {}
        if images is not None:
            if not images.are_whole(full, segment):
                return None
            # Prompts with other images may have the same tokens.
            digest.update(json.dumps(images.paths).encode() if images.paths else b"")
            meta = images.meta()
        meta |= {"good": is_good, "prompt": digest.hexdigest()[:DIGEST_DIGITS]}
        return EncodedSample(
            [segment], meta, truncated=is_cut, hides_reasoning=full.hides_reasoning
        )


def judgement(label: Any, origin: str) -> bool:
    """Return whether a label says that an answer is good.

    A label is true or false, 1 or 0, or one of `formats.LABELS`. Raises DataError for anything else.
    """
    is_good = LABELS.get(str(label).strip().lower())
    if is_good is None:
        raise DataError(
            f"`label` is {label!r}, true or false is wanted",
            where=origin,
            fix="write true for a good answer, false for a bad one",
        )
    return is_good


def _pair_meta(row: Row) -> dict[str, Any]:
    """Return the meta of a pair: its margin, if the row has one. Raises DataError."""
    margin = row.values.get("margin")
    if margin is None:
        return {}
    number = finite_number(margin)
    if number is None:
        raise DataError(
            f"`margin` is {margin!r:.60}, not a number",
            where=row.origin,
            fix="take the column's mapping or the row out",
        )
    return {"margin": number}


def cut_pair(
    chosen: TokenSegment,
    rejected: TokenSegment,
    max_length: int,
    policy: TruncationPolicy,
    origin: str,
) -> tuple[TokenSegment, TokenSegment] | None:
    """Return both sides of a pair cut to a length; None if the pair is dropped.

    Under `left` both sides lose from the start of the prompt as many tokens as the longer side must
    lose, so that answers stay whole. Under `right` the sides lose their ends, and prompts stay whole.
    A pair that would lose its prompt or an answer, or keep two equal ones, is dropped.

    Args:
        chosen: the prompt and the better answer.
        rejected: the prompt and the worse answer.
        max_length: tokens that a side may have.
        policy: what is done with a longer side.
        origin: the row's name in an error.

    Raises DataError under the policy `error`.
    """
    longest = max(chosen, rejected, key=lambda side: len(side.tokens))
    excess = len(longest.tokens) - max_length
    if excess <= 0:
        return chosen, rejected
    # Only for `error` and `drop`. Its result is not used: cut by themselves, the two sides would
    # have different prompts.
    if truncate(longest, max_length, policy, origin, "tokens on a side") is None:
        return None
    # The first target is the first token of the answer.
    prompt_size = min(int(np.argmax(side.learn)) for side in (chosen, rejected))
    if policy == "left" and excess >= prompt_size:
        return None
    keep = slice(excess, None)
    if policy == "right":
        keep = slice(max_length)
    short_chosen = TokenSegment(chosen.tokens[keep], chosen.learn[keep])
    short_rejected = TokenSegment(rejected.tokens[keep], rejected.learn[keep])
    if not short_chosen.target_count or not short_rejected.target_count:
        return None
    if np.array_equal(short_chosen.tokens, short_rejected.tokens):
        return None
    return short_chosen, short_rejected


def label_of(row: Row, labels: list[str] | None) -> str:
    """Return the name of the row's class. A number may be text, as a CSV has it.

    `labels`: the names of the classes; None: those that the rows have. Raises DataError for a label
    that is not among them, and for an empty one.
    """
    label = row.values["label"]
    # A bool is a number for Python.
    if isinstance(label, bool):
        raise DataError("the label is bool, not the name or number of a class", where=row.origin)
    name = str(label)
    if not name.strip():
        raise DataError("the label is empty", where=row.origin, fix="take the row out")
    if labels is None or name in labels:
        return name
    # The index of a class, without a sign and leading zeros.
    if re.fullmatch("0|[1-9][0-9]{,8}", name):
        index = int(name)
        if index < len(labels):
            return labels[index]
    raise DataError(
        f"label {name!r} is none of algorithm.labels: {_few(labels)}",
        where=row.origin,
        fix="add it there, or leave labels out",
    )


def classes(
    train: TokenCache, held_out: Sequence[TokenCache], labels: list[str] | None
) -> tuple[str, ...]:
    """Return the names of the classes in the order of their numbers.

    Args:
        train: the training samples.
        held_out: the caches of held-out samples.
        labels: `algorithm.labels`; None: the classes of the training samples by `_sort_key`.

    Raises DataError if there is only one class, or if a held-out sample has a class that no training
    sample has.
    """
    if labels:
        known = set(labels)
    else:
        known = {train.meta(sample)["label"] for sample in range(len(train))}
    if len(known) < 2:
        raise DataError(
            f"all {len(train)} training rows have one class, {min(known)!r}: there is nothing to "
            "tell apart",
            where="data.train",
        )
    for cache in held_out:
        _require_known_classes(cache, known)
    if labels:
        return tuple(labels)
    return tuple(sorted(known, key=_sort_key))


def _require_known_classes(cache: TokenCache, known: set[str]) -> None:
    """Raise DataError if a held-out sample has a class that is not among `known` ones."""
    for sample in range(len(cache)):
        meta = cache.meta(sample)
        if meta["label"] in known:
            continue
        names = _few(sorted(known))
        raise DataError(
            f"label {meta['label']!r} is on no training row; those have {names}",
            where=meta["origin"],
            fix="add training rows of it, or take the row out",
        )


def _sort_key(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts classes: whole numbers by their value, then names by the alphabet."""
    is_number = name.removeprefix("-").isdecimal() and len(name) < MOST_DIGITS
    if is_number:
        return False, int(name), name
    return True, 0, name


def _few(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    text = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    if more > 0:
        text += f" and {more} more"
    return text


class WholeText(NamedTuple):
    """The tokens of a text, none of them a target, and whether something was cut off."""

    segment: TokenSegment
    truncated: bool


def encode_whole_text(tokenizer: Any, text: str, data: DataConfig, origin: str) -> WholeText | None:
    """Return a text between the tokenizer's special tokens, cut to a length; None if it is dropped.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text.
        data: the settings of `data`, which have the length and what is done with a longer text.
        origin: the row's name in an error.

    Raises DataError for a text without tokens, and for one that is too long under `error`.
    """
    tokens = tokenizer(text, verbose=False)["input_ids"]
    if not tokens:
        raise DataError("the text is empty", where=origin, fix="take the row out")
    limit = data.max_length
    # Only for `error` and `drop`. The text is cut by the tokenizer below, which keeps the special
    # tokens of both ends.
    if truncate(without_targets(tokens), limit, data.truncation, origin) is None:
        return None
    is_cut = len(tokens) > limit
    if is_cut:
        tokens = cut_text(tokenizer, text, data)
    return WholeText(without_targets(tokens), is_cut)


def cut_text(tokenizer: Any, text: str, data: DataConfig) -> list[int]:
    """Return the data.max_length tokens to which the tokenizer cuts a longer text.

    The special tokens at its ends stay.
    """
    tokenizer.truncation_side = data.truncation
    encoded = tokenizer(text, truncation=True, max_length=data.max_length)
    return list(encoded["input_ids"])


class LabelledTextEncoder:
    """Encodes texts with a class.

    The tokenizer's special tokens are around each text (BERT's [CLS] and [SEP]); truncation keeps them.
    """

    def __init__(self, tokenizer: Any, labels: list[str] | None, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.labels = labels
        self.data = data

    def encode(self, row: Row) -> EncodedSample | None:
        """Return a text with its class as one segment, see `RowEncoder.encode`."""
        label = label_of(row, self.labels)
        text = encode_whole_text(self.tokenizer, row.values["text"], self.data, row.origin)
        if text is None:
            return None
        meta = {"label": label, "origin": row.origin}
        return EncodedSample([text.segment], meta, text.truncated)


class LabelledImageEncoder:
    """Encodes images with a class. A sample is one placeholder token, and the path in its meta.

    Each image is read once to find damaged ones. Its pixels are read again for each batch.
    """

    def __init__(self, labels: list[str] | None, data: DataConfig) -> None:
        self.labels = labels
        self.root = cache_root(data)

    def encode(self, row: Row) -> EncodedSample | None:
        """Return an image with its class, see `RowEncoder.encode`."""
        from drumline.models.pictures import read_image  # with torch

        name = resolve_image_path(row.values["image"], row.origin, self.root)
        path = str((row.folder / expand_home(name)).absolute())
        read_image(path, row.origin)
        label = label_of(row, self.labels)
        meta = {"label": label, "origin": row.origin, "path": path}
        return EncodedSample([without_targets([0])], meta)


def without_targets(tokens: Sequence[int] | npt.NDArray[Any]) -> TokenSegment:
    """Return tokens of which none is a target."""
    return TokenSegment(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.uint8))
