"""From a row to tokens, and which of them are targets.

Chats go through the model's chat template. The targets of an assistant turn are the tokens from the first of its content to its
end-of-turn token; its header and all other turns are context. Templates give such a mask only if they mark it with `{% generation %}`.
Otherwise it is found in the rendered text: the turn starts at the end of the conversation before it, rendered with the generation prompt,
and stops at the end of the conversation up to and with it. Both renderings must be prefixes of the whole. If a template renders a turn
differently once others follow (it drops the reasoning of old turns), the turn's content is searched behind its header instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from drumline.core.data import DataConfig
from drumline.data.sources import Row
from drumline.data.thoughts import REASONING, mask_thoughts, thoughts_of, without_thoughts
from drumline.data.tokens import Tokens
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError
from drumline.foreign import judged
from drumline.models.templates import end_ids as end_ids
from drumline.models.templates import special_ids

CALL = "a call of "
FITTING = "take such rows out, or set another model.chat_template"

_MARKED = {
    "tokenize": True,
    "return_dict": True,
    "return_assistant_tokens_mask": True,
    "tokenizer_kwargs": {"verbose": False},
}


@dataclass(frozen=True)
class Example:
    """`tokens` int32[n]; `learn` uint8[n]: 1 for a target. The first token never counts: nothing predicts it. `hides_reasoning`: the chat
    template leaves out the reasoning of a turn, which the row has."""

    tokens: npt.NDArray[np.int32]
    learn: npt.NDArray[np.uint8]
    hides_reasoning: bool = False

    @property
    def learned(self) -> int:
        """Targets after the shift by one."""
        return int(self.learn[1:].sum())


@dataclass(frozen=True)
class Encoded:
    """A row as tokens. `segments` become rows of a batch (a pair has two), or pieces of a pack. `meta`: further values of the sample, as
    JSON; a sample with a meta is kept even without a target. `truncated`: something was cut off. `hides_reasoning`: as of an `Example`."""

    segments: list[Example]
    meta: dict[str, Any] | None = None
    truncated: bool = False
    hides_reasoning: bool = False


Policy = Literal["error", "right", "left", "drop"]


def truncate(
    example: Example, max_length: int, policy: Policy, origin: str, unit: str = "tokens"
) -> Example | None:
    """`example` cut to `max_length` tokens at its end (right) or start (left); None if it is dropped. Raises DataError under `error`."""
    size = len(example.tokens)
    if size <= max_length:
        return example
    if policy == "drop":
        return None
    if policy == "error":
        fix = "raise data.max_length, or set data.truncation to right, left or drop"
        raise DataError(
            f"{size} {unit}, longer than data.max_length {max_length}", where=origin, fix=fix
        )
    keep = slice(max_length) if policy == "right" else slice(size - max_length, size)
    return Example(example.tokens[keep], example.learn[keep])


class Encoder:
    """Encodes rows with one tokenizer. With `everything`, and for `learn_on: all`, every token is a target."""

    def __init__(self, tokenizer: Any, everything: bool, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.learn_all = everything or data.learn_on == "all"
        self.has_template = bool(tokenizer.chat_template)
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else " ".join((template or {}).values())
        self.shows_tools = "tools" in text
        self.marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        self.special = special_ids(tokenizer)
        self.reasoning = data.reasoning
        self.knows_developers = "developer" in text
        self.reasoning_keys = [key for key in REASONING if re.search(rf"[.'\"]{key}\b", text)]

    def encode(self, row: Row) -> Example:
        """The row as tokens, not yet truncated. Raises DataError that names the row."""
        values = row.values
        if "text" in values:
            return self.plain("", values["text"], row.origin, answer=False)
        self._require_shown(row)
        if "messages" in values:
            fix = "set model.chat_template to a Jinja file, or map prompt and completion, or text"
            self.require_template("`messages` need a chat template", row, fix)
            return self._chat(values["messages"], 0, row)
        prompt, completion = values["prompt"], values["completion"]
        if self.has_template:
            before = as_messages(prompt, "user")
            return self._chat(before + as_messages(completion, "assistant"), len(before), row)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            self.require_template("`prompt` and `completion` hold messages", row)
        return self.plain(prompt, completion, row.origin)

    def prompt(self, row: Row) -> tuple[str, list[int]]:
        """A row's prompt as text and as tokens: a conversation, without a last answer, with the template's generation prompt; without a
        template plain text, with the tokenizer's first special tokens but not its last. Raises DataError."""
        content = row.values["prompt"] if "prompt" in row.values else row.values["messages"]
        self._require_shown(row)
        if not self.has_template and isinstance(content, str):
            return content, self._with_bos(content)
        self.require_template("the prompt holds messages", row)
        messages = as_messages(content, "user")
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise DataError(
                "there is nothing before the assistant's answer to take as a prompt",
                where=row.origin,
            )
        messages = [self._reasoned(message, index, row) for index, message in enumerate(messages)]
        text = self._shown(messages, row, add_generation_prompt=True)[1]
        return text, Tokens(self.tokenizer, text).ids

    def require_template(
        self, what: str, row: Row, fix: str = "set model.chat_template to a Jinja file"
    ) -> None:
        """Raises DataError for a row that needs a chat template if the tokenizer has none."""
        if not self.has_template:
            raise DataError(
                f"{what} and this tokenizer has no chat template", where=row.origin, fix=fix
            )

    def _require_shown(self, row: Row) -> None:
        """Raises DataError if the template would leave a row's tools out silently."""
        if row.values.get("tools") and not self.shows_tools:
            fix = "set model.chat_template to one that does, or leave them out with `columns: {tools: ''}`"
            raise DataError(
                "this row has tools, and the chat template does not show any",
                where=row.origin,
                fix=fix,
            )

    def plain(self, prompt: str, text: str, origin: str, answer: bool = True) -> Example:
        """`prompt`, `text` and the end-of-sequence token, behind the tokenizer's BOS if it adds one; all but the prompt are targets. The
        two are tokenised apart, since at inference the prompt is tokenised alone. `answer`: the text may begin with reasoning."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            fix = "set model.tokenizer to one that has"
            raise DataError(
                "this tokenizer has no end-of-sequence token to close a text with",
                where=origin,
                fix=fix,
            )
        if answer and self.reasoning == "drop":
            text = without_thoughts(text, "the answer", origin)
        before = self._with_bos(prompt) if prompt else []
        after = self._ids(text, special=not prompt)
        if not after or after[-1] != eos:
            after.append(eos)
        learn = np.ones(len(before) + len(after), np.uint8)
        if not self.learn_all:
            learn[: len(before)] = 0
        if answer and self.reasoning == "mask" and "think>" in text:
            tokens = Tokens(self.tokenizer, text)
            at = next(
                (k for k in range(len(after)) if after[k : k + len(tokens.ids)] == tokens.ids), 0
            )
            part = np.ones(len(tokens.ids), np.uint8)
            mask_thoughts(tokens, part, origin)
            learn[len(before) + at : len(before) + at + len(part)] &= part
        return Example(np.asarray(before + after, np.int32), learn)

    def _with_bos(self, prompt: str) -> list[int]:
        """`prompt` with the special tokens that the tokenizer puts before a text, and without those behind."""
        ids = self._ids(prompt, special=True)
        while len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(
            self.tokenizer(
                text, add_special_tokens=special, return_attention_mask=False, verbose=False
            )["input_ids"]
        )

    def _chat(self, messages: Messages, first: int, row: Row) -> Example:
        """The rendered conversation; the targets are in the assistant turns from message `first` on, or all, less turns of `weight` 0."""
        weights = [_weight(message, row) for message in messages]
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in messages
        ]
        messages = [self._reasoned(message, index, row) for index, message in enumerate(messages)]
        messages, text = self._shown(messages, row)
        thoughts = thoughts_of(messages) if self.reasoning != "drop" else []
        hides_reasoning = any(thought not in text for thought in thoughts)
        all_turns = (
            self.marks_turns
            and not self.learn_all
            and all(weights[index] and index >= first for index in answers)
        )
        marked = self._render(messages, row, **_MARKED) if all_turns else None
        if marked is not None and self.reasoning != "mask":
            return Example(
                np.asarray(marked["input_ids"], np.int32),
                np.asarray(marked["assistant_masks"], np.uint8),
                hides_reasoning,
            )
        tokens = Tokens(self.tokenizer, text)
        ids = np.asarray(tokens.ids, np.int32)
        learn = (
            np.full(len(ids), int(self.learn_all), np.uint8)
            if marked is None
            else np.asarray(marked["assistant_masks"], np.uint8)
        )
        own = [index for index in answers if weights[index] and index >= first and not all_turns]
        for index in (
            [index for index, weight in enumerate(weights) if not weight] if self.learn_all else own
        ):
            start, stop = self._span(messages, index, text, row)
            learn[
                slice(
                    *self._close(tokens, tokens.at(start, row.origin), tokens.at(stop, row.origin))
                )
            ] = not self.learn_all
        if self.reasoning == "mask":
            thoughts = [
                message[key].strip()
                for message in messages
                for key in self.reasoning_keys
                if isinstance(message.get(key), str)
            ]
            mask_thoughts(
                tokens,
                learn,
                row.origin,
                not self.learn_all,
                [thought for thought in thoughts if thought],
            )
        return Example(ids, learn, hides_reasoning)

    def _reasoned(self, message: dict[str, Any], index: int, row: Row) -> dict[str, Any]:
        """The message with its reasoning as `data.reasoning` and the template want it: left out, or in its content unless the template
        renders its key. OpenAI's developer is a system where the template does not know that role."""
        if message["role"] != "assistant":
            return (
                {**message, "role": "system"}
                if message["role"] == "developer" and not self.knows_developers
                else message
            )
        content = message.get("content")
        keys = [key for key in REASONING if isinstance(message.get(key), str)]
        if self.reasoning == "drop":
            where = f"messages[{index}]"
            message = {key: value for key, value in message.items() if key not in keys}
            if isinstance(content, str):
                message["content"] = without_thoughts(content, where, row.origin)
            elif isinstance(content, list):
                message["content"] = [
                    {**part, "text": without_thoughts(part["text"], where, row.origin)}
                    if "text" in part
                    else part
                    for part in content
                ]
            return message
        thought = next(
            (
                message[key].strip()
                for key in keys
                if key not in self.reasoning_keys and message[key].strip()
            ),
            None,
        )
        if thought is None or set(keys) & set(self.reasoning_keys):
            return message
        written = f"<think>\n{thought}\n</think>\n\n"
        whole = (
            [{"type": "text", "text": written}, *content]
            if isinstance(content, list)
            else written + (content or "")
        )
        return {
            **{key: value for key, value in message.items() if key not in keys},
            "content": whole,
        }

    def _shown(self, messages: Messages, row: Row, **options: Any) -> tuple[Messages, str]:
        """The conversation as the template shows all of it, and rendered. Beside calls some templates need an empty content, and others
        none. Raises DataError."""
        try:
            return messages, self._whole(messages, row, **options)
        except DataError:
            bare = [turn.get("tool_calls") and not turn.get("content") for turn in messages]
            if any(bare):
                other = [
                    turn | {"content": None if "content" in turn else ""} if its else turn
                    for turn, its in zip(messages, bare, strict=True)
                ]
                with suppress(DataError):
                    return other, self._whole(other, row, **options)
            raise

    def _whole(self, messages: Messages, row: Row, **options: Any) -> str:
        """The rendered conversation. Raises DataError for a turn, or a part of one, that the template leaves out silently."""
        text: str = self._render(messages, row, **options)
        parts = [
            (index, *part) for index, turn in enumerate(messages) for part in _parts(turn, text)
        ]
        marked = ""
        with suppress(DataError):  # one rendering in the place of one for each call
            renamed = [_renamed(turn, f"call-{index}-") for index, turn in enumerate(messages)]
            marked = self._render(renamed, row, **options) if renamed != messages else ""
        for index, part, instead in parts:
            if part == CALL and f"call-{index}-" in marked:
                continue
            try:
                without = self._render(
                    [*messages[:index], *instead, *messages[index + 1 :]], row, **options
                )
            except DataError:
                continue
            if without == text:
                what = f"the chat template leaves out {part}messages[{index}], of the role {messages[index]['role']!r}"
                raise DataError(what, where=row.origin, fix=FITTING)
        return text

    def _span(self, messages: Messages, index: int, text: str, row: Row) -> tuple[int, int]:
        """The characters [start, stop) of turn `index` in `text`: an answer, or another whose `weight` is 0."""
        if (
            index == len(messages) - 1
            and (usual := self._usual_end(messages[index], text)) is not None
        ):
            return usual, len(text)

        def before() -> str:
            return self._render(messages[:index], row) if index else ""

        through = text if index == len(messages) - 1 else self._render(messages[: index + 1], row)
        prompted = {"add_generation_prompt": True} if messages[index]["role"] == "assistant" else {}
        head = (
            self._render(messages[:index], row, **prompted)
            if index
            else self._first_head(text, row)
            if prompted
            else ""
        )
        whole, headed = text.startswith(through), text.startswith(head)
        content = messages[index].get("content") or ""
        content = (
            "".join(part.get("text", "") for part in content)
            if isinstance(content, list)
            else str(content)
        ).strip()
        # Templates may leave the reasoning out, so that only the answer behind it is in the text.
        wordings = [
            wording for wording in (content, content.rpartition("</think>")[2].strip()) if wording
        ]
        there = (
            whole
            and headed
            and (not content or any(wording in through[len(head) :] for wording in wordings))
        )
        # The header tells as much as a third rendering, which would take a seventh of all time.
        header = self._usual_header.strip()
        if there and ((header and head.rstrip().endswith(header)) or head != before()):
            return len(head), len(through)
        # The template lacks a generation prompt, or renders this turn differently here: search the content.
        if messages[index].get("tool_calls") and through.startswith(head):
            # The template writes calls in its own format.
            wordings = [through[len(head) :].rpartition("</think>")[2].strip()]
        floor = _shared(text, head)
        places = [
            (text.rfind(each, floor, len(through)) if whole else text.find(each, floor), len(each))
            for each in wordings
        ]
        # The first: a later turn may have the same content.
        at, size = min((place for place in places if place[0] >= 0), default=(-1, 0))
        if at >= 0 and (headed or text.startswith(before())):
            stop = at + size
            while (
                at > floor and text[at - 1] == " "
            ):  # a leading blank belongs to the first word's token
                at -= 1
            return at, stop
        what = f"the chat template does not render what messages[{index}] says in its place"
        marks = "mark the assistant's turns with {% generation %} in an own model.chat_template, or set data.learn_on: all"
        raise DataError(what, where=row.origin, fix=FITTING if self.learn_all else marks)

    def _first_head(self, text: str, row: Row) -> str:
        """The text before the content of an assistant turn that opens the conversation: there is no earlier turn to render."""
        header = self._header(row)
        at = text.find(header)
        return text[: at + len(header)] if header and at >= 0 else ""

    def _header(self, row: Row) -> str:
        """The generation prompt, as the template writes it behind a question."""
        opening = [{"role": "user", "content": "?"}]
        bare, prompted = (
            self._render(opening, row),
            self._render(opening, row, add_generation_prompt=True),
        )
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    @cached_property
    def _usual_header(self) -> str:
        """The same of a row without tools; empty where the template refuses a question alone."""
        try:
            return self._header(Row("", {}))
        except DataError:
            return ""

    @cached_property
    def _usual_tail(self) -> str | None:
        """What the template writes behind the last answer; None where it does not put an answer right behind its header."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        try:
            head, text = (
                self._render([question], Row("", {}), add_generation_prompt=True),
                self._render([question, answer], Row("", {})),
            )
        except DataError:
            return None
        return text.removeprefix(f"{head}!") if text.startswith(f"{head}!") else None

    def _usual_end(self, message: dict[str, Any], text: str) -> int | None:
        """Where the last answer starts in `text`, if that ends as is usual: header, answer, tail. It spares a rendering of the turns before
        it, which takes a third of all time."""
        content, header, tail = message.get("content"), self._usual_header, self._usual_tail
        if (
            tail is None
            or not header.strip()
            or not isinstance(content, str)
            or not content.strip()
            or len(message) > 2
        ):
            return None
        sizes = (
            len(answer)
            for answer in (content, content.strip())
            if text.endswith(f"{header}{answer}{tail}")
        )
        return next((len(text) - len(tail) - size for size in sizes), None)

    def _close(self, tokens: Tokens, start: int, stop: int) -> tuple[int, int]:
        """Tokens [start, stop) of a turn, ended by its end-of-turn token: without the line break that templates put behind it; a turn
        without such a token gets the special token that comes next."""
        last = next(
            (k for k in range(stop - 1, start - 1, -1) if tokens.ids[k] in self.special), None
        )
        if last is not None and not self.tokenizer.decode(tokens.ids[last + 1 : stop]).strip():
            return start, last + 1
        return start, stop + (stop < len(tokens.ids) and tokens.ids[stop] in self.special)

    def _render(self, messages: Messages, row: Row, **options: Any) -> Any:
        """The result of `apply_chat_template`, by default as text. Raises DataError if the template refuses the conversation."""
        with judged("the chat template refuses this conversation", row.origin, DataError, FITTING):
            return self.tokenizer.apply_chat_template(
                messages, **{"tools": row.values.get("tools"), "tokenize": False, **options}
            )


def _weight(message: dict[str, Any], row: Row) -> bool:
    """Whether a message is learned, by its `weight` as of OpenAI's files. Raises DataError unless that is 0 or 1."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(
            f"the `weight` of a message is {weight!r}",
            where=row.origin,
            fix="give 0 or 1: it is learned or not",
        )
    return bool(weight)


def _parts(turn: dict[str, Any], text: str) -> Iterator[tuple[str, Messages]]:
    """What of a turn may not be in `text`: its name, and what stands in its place without it. Of an assistant's turn these are the last of
    its calls, and what it says beside them; templates leave old reasoning out."""
    content, calls = turn.get("content"), turn.get("tool_calls")
    spoken = (
        "".join(part.get("text", "") for part in content)
        if isinstance(content, list)
        else content or ""
    )
    if turn["role"] != "assistant":
        if isinstance(content, str) and spoken.strip() not in text:
            yield "", []
    elif calls:
        rest = {"tool_calls": calls[:-1]} if isinstance(calls, list) and len(calls) > 1 else {}
        yield CALL, [{key: value for key, value in turn.items() if key != "tool_calls"} | rest]
        if spoken.rpartition("</think>")[2].strip() not in text:
            yield "what is said beside the calls of ", [{**turn, "content": ""}]


def _renamed(turn: dict[str, Any], name: str) -> dict[str, Any]:
    """The turn, the last of its calls under another name."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list) or not calls or not isinstance(last := calls[-1], dict):
        return turn
    function = last.get("function")
    call = (
        {**last, "function": {**function, "name": name}}
        if isinstance(function, dict)
        else {**last, "name": name}
    )
    return {**turn, "tool_calls": [*calls[:-1], call]}


def _shared(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
