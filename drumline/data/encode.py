"""From rows to samples: encoders of conversations and documents, of prompts, of preference pairs, and of texts and images with a class. A
label is the name of a class, or a number: the name of a class, else an index of `algorithm.labels`. A sample of the token cache keeps the
name: the order of the classes follows from all rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from drumline.core.data import DataConfig
from drumline.data.cache import TokenCache
from drumline.data.files import as_json, image_path, root_of
from drumline.data.formats import LABELS
from drumline.data.pairs import SAME_ANSWER, SIDES, Text, pair_parts
from drumline.data.sources import Row, holds_images
from drumline.data.templates import Encoded, Encoder, Example, Policy, truncate
from drumline.data.turns import as_messages
from drumline.errors import ConfigError, DataError
from drumline.foreign import expanded

DIGEST_DIGITS = 16  # of sha256 over a prompt
MOST_DIGITS = 600  # of a number; Python reads 640 at least
OWN = "own columns"  # of a prompt's row, under names that its meta has for something else


class RowEncoder(Protocol):
    def encode(self, row: Row) -> Encoded | None:
        """A row as tokens, cut to data.max_length; None if it is dropped. Raises DataError that names the row."""


class TextRows:
    """Encodes conversations, completions and documents. Rows of a packed pretraining run are not cut: `prepare.cut` does that."""

    def __init__(self, tokenizer: Any, documents: bool, data: DataConfig) -> None:
        self.encoder, self.data = Encoder(tokenizer, documents, data), data
        self.whole = documents and data.packing

    def encode(self, row: Row) -> Encoded | None:
        if holds_images(row):
            fix = "name a vision-language model, with algorithm sft, or read none of a column with `columns: {images: ''}`"
            raise DataError(
                "this row holds images, and text alone is read here", where=row.origin, fix=fix
            )
        full = self.encoder.encode(row)
        example = (
            full
            if self.whole
            else truncate(full, self.data.max_length, self.data.truncation, row.origin)
        )
        if example is None or (full.learned and not example.learned):  # none of its answer is left
            return None
        is_cut = len(example.tokens) < len(full.tokens)
        return Encoded([example], truncated=is_cut, hides_reasoning=full.hides_reasoning)


class PromptRows:
    """Encodes prompts of rollouts. A sample is one segment, the tokens before the completion. Its meta, for rewards: `prompt` (the text),
    `domain` (of the source), and the row's other columns under their names, those of these two names under OWN. A prompt leaves room for
    max_new_tokens within data.max_length. A longer one is dropped or cut at its start, by data.truncation, but never at its end, which has
    the question and the header of the answer."""

    def __init__(self, tokenizer: Any, new: int, data: DataConfig) -> None:
        self.encoder, self.policy, self.new = (
            Encoder(tokenizer, everything=False, data=data),
            data.truncation,
            new,
        )
        self.room = data.max_length - self.new

    def encode(self, row: Row) -> Encoded | None:
        text, ids = self.encoder.prompt(row)
        if not ids:
            raise DataError(
                "the prompt is empty",
                where=row.origin,
                fix="a completion goes on from one token at least",
            )
        size = len(ids)
        if size > self.room and self.policy == "drop":
            return None
        if size > self.room and self.policy != "left":
            what = f"the prompt has {size} tokens, and data.max_length less max_new_tokens {self.new} leaves {self.room}"
            raise DataError(
                what,
                where=row.origin,
                fix="raise data.max_length, or set data.truncation to drop or left",
            )
        columns, ours = as_json(row.extra), {"prompt": text, "domain": row.domain}
        own = {name: columns[name] for name in ours if columns.get(name) is not None}
        meta = {**columns, **ours, **({OWN: own} if own else {})}
        return Encoded([_unlearned(ids[-self.room :])], meta, truncated=size > self.room)


class AnswerRows:
    """The base of encoders whose targets are the tokens of answers."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        if data.learn_on != "assistant":
            raise ConfigError(
                "answers are compared by their own tokens alone",
                where="data.learn_on",
                fix="leave it out",
            )
        self.encoder, self.data = Encoder(tokenizer, False, data), data

    def example(self, prompt: Text, answer: Text, name: str, row: Row, is_plain: bool) -> Example:
        """A prompt and an answer, not yet truncated. `name`: the answer's column. `is_plain`: texts are taken as they are. Raises
        DataError for an answer without a token."""
        turns = as_messages(answer, "assistant")
        if not any(turn.get("tool_calls") or turn["content"].strip() for turn in turns):
            raise DataError(
                f"`{name}` is empty: it has no answer", where=row.origin, fix="take the row out"
            )
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            self.encoder.require_template("the row holds messages", row)
        elif is_plain:
            return self.encoder.plain(prompt, answer, row.origin)
        example = self.encoder.encode(
            Row(
                row.origin,
                {"prompt": prompt, "completion": answer, "tools": row.values.get("tools")},
            )
        )
        if not example.learned:
            raise DataError(
                f"`{name}` has no turn of the assistant behind the prompt", where=row.origin
            )
        return example


class PairRows(AnswerRows):
    """Encodes pairs as two segments, chosen first: the prompt and an answer, whose tokens are the targets. With a chat template a text is a
    turn of the user or the assistant; without one, and for two texts without a prompt, it is taken as it is and closed by the
    end-of-sequence token. Without a `prompt` column the prompt is the common start of both sides; with one, messages may repeat it. A
    margin goes into the sample's meta."""

    def encode(self, row: Row) -> Encoded | None:
        is_plain = not {"prompt", "tools"} & row.values.keys()
        prompt, *answers = pair_parts(row.values, row.origin)
        full = [
            self.example(prompt, answer, name, row, is_plain)
            for answer, name in zip(answers, SIDES, strict=True)
        ]
        if np.array_equal(full[0].tokens, full[1].tokens):
            raise DataError(SAME_ANSWER, where=row.origin, fix="take the row out")
        pair = cut_pair(full[0], full[1], self.data.max_length, self.data.truncation, row.origin)
        if pair is None:
            return None
        cut = any(
            len(short.tokens) < len(long.tokens) for short, long in zip(pair, full, strict=True)
        )
        hides_reasoning = any(example.hides_reasoning for example in full)
        return Encoded(list(pair), _meta(row), truncated=cut, hides_reasoning=hides_reasoning)


class JudgedRows(AnswerRows):
    """Encodes an answer that is labelled good or bad as one segment: the prompt, and the answer's tokens, which are the targets.

    The sample's meta has the label as `good`, and in `prompt` a digest of the whole prompt: it is the
    same for all answers to a prompt, though truncation may cut each of them in another place.
    """

    def encode(self, row: Row) -> Encoded | None:
        is_good = judgement(row.values["label"], row.origin)
        full = self.example(
            row.values["prompt"], row.values["completion"], "completion", row, row.plain
        )
        example = truncate(full, self.data.max_length, self.data.truncation, row.origin)
        if example is None or not example.learned:
            return None
        is_truncated = len(example.tokens) < len(full.tokens)
        prompt_tokens = full.tokens[: int(np.argmax(full.learn))]
        meta = {
            "good": is_good,
            "prompt": sha256(prompt_tokens.tobytes()).hexdigest()[:DIGEST_DIGITS],
        }
        return Encoded(
            [example], meta, truncated=is_truncated, hides_reasoning=full.hides_reasoning
        )


def judgement(label: Any, origin: str) -> bool:
    """Whether a label says that an answer is good: true or false, 1 or 0, or one of `formats.LABELS`. Raises DataError."""
    is_good = LABELS.get(str(label).strip().lower())
    if is_good is None:
        fix = "write true for a good answer, false for a bad one"
        raise DataError(f"`label` is {label!r}, true or false is wanted", where=origin, fix=fix)
    return is_good


def _meta(row: Row) -> dict[str, Any] | None:
    margin = row.values.get("margin")
    if margin is None:
        return None
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"`margin` is {margin!r:.60}, not a number",
            where=row.origin,
            fix="take the column's mapping or the row out",
        )
    return {"margin": number}


def cut_pair(
    chosen: Example, rejected: Example, max_length: int, policy: Policy, origin: str
) -> tuple[Example, Example] | None:
    """Both sides within `max_length` tokens, with the same prompt and some of their answers; None if the pair is dropped. left: both sides
    lose as much from the start of the prompt as the longer one needs, and answers stay whole; right: sides lose their ends, and prompts
    stay whole. A pair that would lose its prompt or an answer, or keep two equal ones, is dropped. Raises DataError under `error`."""
    longest = max(chosen, rejected, key=lambda side: len(side.tokens))
    over = len(longest.tokens) - max_length
    if over <= 0:
        return chosen, rejected
    # Tokens before the first target.
    prompt = min(int(np.argmax(side.learn)) for side in (chosen, rejected))
    if truncate(longest, max_length, policy, origin, "tokens on a side") is None or (
        policy == "left" and over >= prompt
    ):
        return None
    keep = slice(max_length) if policy == "right" else slice(over, None)
    one, other = (Example(side.tokens[keep], side.learn[keep]) for side in (chosen, rejected))
    distinct = one.learned and other.learned and not np.array_equal(one.tokens, other.tokens)
    return (one, other) if distinct else None


def label_of(row: Row, labels: list[str] | None) -> str:
    """The name of the row's class; a number may be text, as a CSV has it. Raises DataError for one that is not among `labels`, and for an
    empty one."""
    given = row.values["label"]
    if isinstance(given, bool):
        raise DataError("the label is bool, not the name or number of a class", where=row.origin)
    name = str(given)
    if not name.strip():
        raise DataError("the label is empty", where=row.origin, fix="take the row out")
    if labels is None or name in labels:
        return name
    if re.fullmatch("0|[1-9][0-9]{,8}", name) and int(name) < len(labels):
        return labels[int(name)]
    what = f"label {name!r} is none of algorithm.labels: {_few(labels)}"
    raise DataError(what, where=row.origin, fix="add it there, or leave labels out")


def classes(
    train: TokenCache, held_out: Sequence[TokenCache], labels: list[str] | None
) -> tuple[str, ...]:
    """The classes in order: `labels`, or those of the training samples, numbers by value and then names by the alphabet. Raises DataError
    if there is only one class, or a held-out sample has a class that no training sample has."""
    found = set(labels or (train.meta(sample)["label"] for sample in range(len(train))))
    if len(found) < 2:
        what = f"all {len(train)} training rows have one class, {min(found)!r}: there is nothing to tell apart"
        raise DataError(what, where="data.train")
    for meta in (cache.meta(sample) for cache in held_out for sample in range(len(cache))):
        if meta["label"] not in found:
            what = (
                f"label {meta['label']!r} is on no training row; those have {_few(sorted(found))}"
            )
            raise DataError(
                what, where=meta["origin"], fix="add training rows of it, or take the row out"
            )
    if labels:
        return tuple(labels)
    return tuple(sorted(found, key=_place))


def _place(name: str) -> tuple[bool, int, str]:
    number = name.removeprefix("-").isdecimal() and len(name) < MOST_DIGITS
    return not number, int(name) if number else 0, name


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


class LabelledTexts:
    """Encodes texts, with the tokenizer's special tokens around each (BERT's [CLS] and [SEP]), which truncation keeps."""

    def __init__(self, tokenizer: Any, labels: list[str] | None, data: DataConfig) -> None:
        self.tokenizer, self.labels, self.data = tokenizer, labels, data

    def encode(self, row: Row) -> Encoded | None:
        label = label_of(row, self.labels)
        tokens = self.tokenizer(row.values["text"], verbose=False)["input_ids"]
        if not tokens:
            raise DataError("the text is empty", where=row.origin, fix="take the row out")
        limit, policy = self.data.max_length, self.data.truncation
        if truncate(_unlearned(tokens), limit, policy, row.origin) is None:
            return None
        if cut := len(tokens) > limit:
            self.tokenizer.truncation_side = policy
            tokens = self.tokenizer(row.values["text"], truncation=True, max_length=limit)[
                "input_ids"
            ]
        return Encoded([_unlearned(tokens)], {"label": label, "origin": row.origin}, cut)


class LabelledImages:
    """Encodes images by path, as one token each. Reads each image once, to find damaged ones; its pixels are read again for a batch."""

    def __init__(self, labels: list[str] | None, data: DataConfig) -> None:
        self.labels, self.root = labels, root_of(data)

    def encode(self, row: Row) -> Encoded | None:
        from drumline.models.vision import read_image  # with torch

        path = str(
            (
                row.folder / expanded(image_path(row.values["image"], row.origin, self.root))
            ).absolute()
        )
        read_image(path, row.origin)
        return Encoded(
            [_unlearned([0])],
            {"label": label_of(row, self.labels), "origin": row.origin, "path": path},
        )


def _unlearned(tokens: list[int]) -> Example:
    return Example(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.uint8))
