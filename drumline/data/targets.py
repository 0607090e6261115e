"""From a row to tokens, and which of them are targets.

Conversations are rendered by the model's chat template. The targets of an assistant turn are its
content and its end-of-turn token; its header and all other turns are context. A template tells
which tokens these are only if it encloses them in `{% generation %}` tags.

Otherwise the turn is found in the rendered text, by two other renderings of the conversation's
start. `prefix_with_header` has the turns before this one, and the generation prompt: the content
starts at its end. `prefix_with_turn` has this turn too, but none of the later turns: the turn stops
at its end. For example, for the answer "A" of a conversation Q, A, R:

    whole text            <user>Q</user><assistant>A</assistant><user>R</user>
    prefix_with_header    <user>Q</user><assistant>
    prefix_with_turn      <user>Q</user><assistant>A</assistant>

Both must be prefixes of the whole text. A template may render a turn differently if other turns
follow it, such as without its reasoning: then the turn's content is searched behind the header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.config.data import DataConfig
from drumline.data.sources import Row
from drumline.data.thoughts import REASONING, mask_thoughts, thoughts_of, without_thoughts
from drumline.data.tokens import Tokens
from drumline.data.turns import Messages, as_messages
from drumline.errors import DataError
from drumline.foreign import translate_exceptions
from drumline.models.templates import end_ids as end_ids  # for rl, which knows no models
from drumline.models.templates import special_ids

# How errors name a call, and what they advise for a row that the template cannot render.
CALL = "a call of "
FITTING = "take such rows out, or set another model.chat_template"
# Options of `apply_chat_template` by which it returns tokens and the template's own mask of
# targets.
_MASK_OPTIONS = {
    "tokenize": True,
    "return_dict": True,
    "return_assistant_tokens_mask": True,
    "tokenizer_kwargs": {"verbose": False},
}
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A turn that trial renderings begin with.
_QUESTION = {"role": "user", "content": "?"}
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class TokenSegment:
    """The tokens of one segment of a sample, each with a flag whether it is a loss target.

    Attributes:
        tokens: int32[n].
        learn: uint8[n], 1 for a target. The first token never counts: nothing predicts it.
        hides_reasoning: the row has the reasoning of a turn, and the chat template leaves it out.
    """

    tokens: npt.NDArray[np.int32]
    learn: npt.NDArray[np.uint8]
    hides_reasoning: bool = False

    @property
    def target_count(self) -> int:
        """The number of loss targets, after the shift by one token."""
        return int(self.learn[1:].sum())


@dataclass(frozen=True)
class EncodedSample:
    """The sample of a dataset row, cut to data.max_length.

    Attributes:
        segments: each becomes a row of the batch (a pair has two), or a part of a packed one.
        meta: further values of the sample, which the cache stores as JSON. A sample with a meta is
            kept even without a target.
        truncated: whether something was cut off.
        hides_reasoning: see `TokenSegment`.
    """

    segments: list[TokenSegment]
    meta: dict[str, Any] | None = None
    truncated: bool = False
    hides_reasoning: bool = False


TruncationPolicy = Literal["error", "right", "left", "drop"]


def truncate(
    segment: TokenSegment,
    max_length: int,
    policy: TruncationPolicy,
    origin: str,
    unit: str = "tokens",
) -> TokenSegment | None:
    """Return a segment cut to `max_length` tokens at its end (right) or start (left).

    Args:
        segment: the segment.
        max_length: the most tokens that are kept.
        policy: what is done with a longer segment.
        origin: the row's name in an error.
        unit: what is counted, for the message.

    Returns None if `policy` drops it. Raises DataError if it is too long under `error`.
    """
    size = len(segment.tokens)
    if size <= max_length:
        return segment
    if policy == "drop":
        return None
    if policy == "error":
        what = f"{size} {unit}, longer than data.max_length {max_length}"
        fix = "raise data.max_length, or set data.truncation to right, left or drop"
        raise DataError(what, where=origin, fix=fix)
    start = 0
    if policy == "left":
        start = size - max_length
    stop = start + max_length
    return TokenSegment(segment.tokens[start:stop], segment.learn[start:stop])


class Encoder:
    """Encodes rows with one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        everything: every token is a target, as with `data.learn_on: all`.
        data: the settings of `data`.
        replaced: text that a chat template writes → the text that takes its place.
    """

    def __init__(
        self,
        tokenizer: Any,
        everything: bool,
        data: DataConfig,
        replaced: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.replaced = replaced or {}
        self.learn_all = everything or data.learn_on == "all"
        self.has_template = bool(tokenizer.chat_template)
        # What the template knows is read from its text.
        text = _text_of_template(tokenizer.chat_template)
        self.shows_tools = "tools" in text
        # Their mask is of the template's own text.
        self.has_generation_tags = bool(_GENERATION_TAG.search(text)) and not self.replaced
        self.special = special_ids(tokenizer)
        self.reasoning = data.reasoning
        self.knows_developers = "developer" in text
        # Keys that the template reads: message.reasoning or message['reasoning'].
        self.reasoning_keys = [key for key in REASONING if re.search(rf"[.'\"]{key}\b", text)]

    def encode(self, row: Row) -> TokenSegment:
        """Return the row as tokens, not yet truncated. Raises DataError that names the row."""
        values = row.values
        if "text" in values:
            return self.encode_without_template("", values["text"], row.origin, answer=False)
        self._require_shown(row)
        if "messages" in values:
            fix = "set model.chat_template to a Jinja file, or map prompt and completion, or text"
            self.require_template("`messages` need a chat template", row, fix)
            return self._encode_chat(values["messages"], 0, row)
        prompt = values["prompt"]
        completion = values["completion"]
        if self.has_template:
            before = as_messages(prompt, "user")
            answer = as_messages(completion, "assistant")
            return self._encode_chat(before + answer, len(before), row)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            self.require_template("`prompt` and `completion` hold messages", row)
        return self.encode_without_template(prompt, completion, row.origin)

    def prompt(self, row: Row) -> tuple[str, list[int]]:
        """Return a row's prompt as text and as tokens. Raises DataError.

        The prompt of a conversation is all before its last answer, with the template's generation
        prompt. Plain text without a template gets the special tokens before a text, but not those
        behind it.
        """
        if "prompt" in row.values:
            content = row.values["prompt"]
        else:
            content = row.values["messages"]
        self._require_shown(row)
        if not self.has_template and isinstance(content, str):
            return content, self._with_bos(content)
        self.require_template("the prompt holds messages", row)
        messages = as_messages(content, "user")
        if messages[-1]["role"] == "assistant":
            # The answer is that of the data: the model shall write its own.
            messages = messages[:-1]
        if not messages:
            what = "there is nothing before the assistant's answer to take as a prompt"
            raise DataError(what, where=row.origin)
        messages = self._adapt_all(messages, row)
        _, text = self._render_whole(messages, row, add_generation_prompt=True)
        return text, Tokens(self.tokenizer, text).ids

    def render(self, messages: Messages, tools: list[dict[str, Any]], origin: str) -> str:
        """Return a conversation as the template's text, without the header of an answer.

        Args:
            messages: the messages.
            tools: JSON schemas of the tools that the template shows; perhaps none.
            origin: the conversation's name in an error.

        Raises DataError if the template refuses the conversation.
        """
        text: str = self._render(messages, Row(origin, {"tools": tools or None}))
        return text

    def render_to_answer(self, messages: Messages, tools: list[dict[str, Any]], origin: str) -> str:
        """Return a conversation as `render` does, with the header of the next answer at its end."""
        row = Row(origin, {"tools": tools or None})
        text: str = self._render(messages, row, add_generation_prompt=True)
        return text

    def require_template(
        self, what: str, row: Row, fix: str = "set model.chat_template to a Jinja file"
    ) -> None:
        """Raise DataError for a row that needs a chat template if the tokenizer has none.

        `what`: what of the row needs one, for the message.
        """
        if not self.has_template:
            message = f"{what} and this tokenizer has no chat template"
            raise DataError(message, where=row.origin, fix=fix)

    def _require_shown(self, row: Row) -> None:
        """Raise DataError if the template would leave a row's tools out silently."""
        if row.values.get("tools") and not self.shows_tools:
            what = "this row has tools, and the chat template does not show any"
            fix = (
                "set model.chat_template to one that does, or leave them out with "
                "`columns: {tools: ''}`"
            )
            raise DataError(what, where=row.origin, fix=fix)

    def encode_without_template(
        self, prompt: str, text: str, origin: str, answer: bool = True
    ) -> TokenSegment:
        """Return a prompt, a text and the end-of-sequence token as tokens, without a template.

        All but the prompt are targets. The tokenizer's BOS comes first if it adds one. Prompt and
        text are tokenised separately, since at inference the prompt is tokenised alone.

        Args:
            prompt: what is before the text, perhaps nothing.
            text: a document, or an answer to the prompt.
            origin: the row's name in an error.
            answer: whether the text is an answer, which may have reasoning.

        Raises DataError for reasoning that does not end, and without an end-of-sequence token.
        """
        eos = self.tokenizer.eos_token_id
        if eos is None:
            what = "this tokenizer has no end-of-sequence token to close a text with"
            raise DataError(what, where=origin, fix="set model.tokenizer to one that has")
        if answer and self.reasoning == "drop":
            text = without_thoughts(text, "the answer", origin)
        before = []
        if prompt:
            before = self._with_bos(prompt)
        # Behind a prompt no second BOS.
        after = self._ids(text, special=not prompt)
        # Some tokenizers add one by themselves.
        if not after or after[-1] != eos:
            after.append(eos)
        learn = np.ones(len(before) + len(after), np.uint8)
        if not self.learn_all:
            learn[: len(before)] = 0
        if answer and self.reasoning == "mask" and "think>" in text:
            self._mask_plain_thoughts(text, after, learn[len(before) :], origin)
        return TokenSegment(np.asarray(before + after, np.int32), learn)

    def _mask_plain_thoughts(
        self, text: str, ids: list[int], learn: npt.NDArray[np.uint8], origin: str
    ) -> None:
        """Take the reasoning in a text out of the targets.

        Args:
            text: the text, without special tokens.
            ids: its tokens, which special tokens may surround.
            learn: uint8, 1 for a target, for each of `ids`; changed in place.
            origin: the row's name in an error.
        """
        tokens = Tokens(self.tokenizer, text)
        size = len(tokens.ids)
        learn_text = np.ones(size, np.uint8)
        mask_thoughts(tokens, learn_text, origin)
        # How many special tokens stand before the text.
        first = 0
        for start in range(len(ids)):
            if ids[start : start + size] == tokens.ids:
                first = start
                break
        learn[first : first + size] &= learn_text

    def _with_bos(self, prompt: str) -> list[int]:
        """Return a prompt's tokens, with the special ones that the tokenizer puts before a text.

        Those behind it are left out: the text goes on.
        """
        ids = self._ids(prompt, special=True)
        while len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text. `special`: with the tokenizer's special tokens around it."""
        encoded = self.tokenizer(
            text, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return list(encoded["input_ids"])

    def _encode_chat(self, messages: Messages, first: int, row: Row) -> TokenSegment:
        """Return a conversation as tokens.

        Targets are the assistant turns from message `first` on; with `learn_all` everything. Turns
        of `weight` 0 are no targets. Raises DataError for a turn that is not found in the rendered
        text.
        """
        is_weighted = [_is_weighted(message, row) for message in messages]
        answers = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                answers.append(index)
        target_turns = [index for index in answers if is_weighted[index] and index >= first]
        messages = [_without_keys(message, ["weight"]) for message in messages]
        messages = self._adapt_all(messages, row)
        messages, text = self._render_whole(messages, row)
        hides_reasoning = self._hides_reasoning(messages, text)
        # The generation tags enclose all answers, so they only help if all answers are targets.
        can_use_tags = self.has_generation_tags and not self.learn_all and target_turns == answers
        if can_use_tags:
            marked = self._render(messages, row, **_MASK_OPTIONS)
            learn = np.asarray(marked["assistant_masks"], np.uint8)
            if self.reasoning != "mask":
                ids = np.asarray(marked["input_ids"], np.int32)
                return TokenSegment(ids, learn, hides_reasoning)
            tokens = Tokens(self.tokenizer, text)
        else:
            tokens = Tokens(self.tokenizer, text)
            if self.learn_all:
                # Everything but the turns of weight 0, headers included.
                context = [index for index, weighted in enumerate(is_weighted) if not weighted]
                learn = np.ones(len(tokens.ids), np.uint8)
                self._set_turns(learn, 0, context, messages, tokens, row)
            else:
                learn = np.zeros(len(tokens.ids), np.uint8)
                self._set_turns(learn, 1, target_turns, messages, tokens, row)
        if self.reasoning == "mask":
            thoughts = self._thoughts_by_key(messages)
            mask_thoughts(tokens, learn, row.origin, not self.learn_all, thoughts)
        return TokenSegment(np.asarray(tokens.ids, np.int32), learn, hides_reasoning)

    def _set_turns(
        self,
        learn: npt.NDArray[np.uint8],
        value: int,
        turns: list[int],
        messages: Messages,
        tokens: Tokens,
        row: Row,
    ) -> None:
        """Set `learn` to `value` for the tokens of some turns of a conversation.

        Args:
            learn: uint8, 1 for a target, for each of `tokens`; changed in place.
            value: 0 or 1.
            turns: indices of messages.
            messages: the conversation.
            tokens: the conversation as it is rendered.
            row: its row, for the tools and the name.
        """
        for index in turns:
            start, stop = self._span(messages, index, tokens.text, row)
            first_token = tokens.token_at(start, row.origin)
            stop_token = tokens.token_at(stop, row.origin)
            stop_token = self._end_of_turn(tokens, first_token, stop_token)
            learn[first_token:stop_token] = value

    def _hides_reasoning(self, messages: Messages, text: str) -> bool:
        """Return whether a rendered conversation lacks some reasoning that is to be kept."""
        if self.reasoning == "drop":
            return False
        return any(thought not in text for thought in thoughts_of(messages))

    def _thoughts_by_key(self, messages: Messages) -> list[str]:
        """Return the reasoning under keys that the template reads and may write without tags."""
        thoughts = []
        for message in messages:
            for key in self.reasoning_keys:
                thought = message.get(key)
                if isinstance(thought, str) and thought.strip():
                    thoughts.append(thought.strip())
        return thoughts

    def _adapt_all(self, messages: Messages, row: Row) -> Messages:
        """Return messages in the form that the template knows.

        Reasoning is dropped or kept as data.reasoning sets. OpenAI's role `developer` becomes
        `system` if the template does not know it.
        """
        adapted = []
        for index, message in enumerate(messages):
            role = message["role"]
            if role == "developer" and not self.knows_developers:
                message = {**message, "role": "system"}
            elif role == "assistant" and self.reasoning == "drop":
                message = _without_reasoning(message, index, row)
            elif role == "assistant":
                message = self._with_shown_reasoning(message)
            adapted.append(message)
        return adapted

    def _with_shown_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an answer whose reasoning is in its content, unless the template reads its key."""
        keys = _reasoning_keys_of(message)
        if any(key in self.reasoning_keys for key in keys):
            return message
        thoughts = [message[key].strip() for key in keys if message[key].strip()]
        if not thoughts:
            return message
        # A turn has one reasoning, under any of the keys. `data.thoughts` finds it by these tags.
        tagged = f"<think>\n{thoughts[0]}\n</think>\n\n"
        content = message.get("content")
        whole: str | list[dict[str, Any]]
        if isinstance(content, list):
            whole = [{"type": "text", "text": tagged}, *content]
        else:
            whole = tagged + (content or "")
        return {**_without_keys(message, keys), "content": whole}

    def _render_whole(self, messages: Messages, row: Row, **options: Any) -> tuple[Messages, str]:
        """Return the conversation in a form that the template renders whole, and its text.

        A turn of calls without words may have an empty content or none; some templates only render
        one of these forms. Raises DataError if the template renders neither form whole.
        """
        try:
            return messages, self._render_checked(messages, row, **options)
        except DataError:
            if any(_is_bare_call(turn) for turn in messages):
                other = [_with_other_emptiness(turn) for turn in messages]
                with suppress(DataError):
                    return other, self._render_checked(other, row, **options)
            # The error is that of the form that the row has.
            raise

    def _render_checked(self, messages: Messages, row: Row, **options: Any) -> str:
        """Return the rendered conversation.

        Raises DataError for a turn, or a part of one, that the template leaves out silently.
        """
        text: str = self._render(messages, row, **options)
        parts: list[_Part] = []
        for index, turn in enumerate(messages):
            parts += _omissible_parts(turn, index, text)
        marked = self._render_with_probe_names(messages, row, **options)
        for part in parts:
            if part.name == CALL and _probe_name(part.turn) in marked:
                continue
            rest = [*messages[: part.turn], *part.remainder, *messages[part.turn + 1 :]]
            try:
                without = self._render(rest, row, **options)
            except DataError:
                # The template refuses the conversation without the part, so it does read the part.
                continue
            # The template writes the same with and without the part.
            if without == text:
                role = messages[part.turn]["role"]
                what = (
                    f"the chat template leaves out {part.name}messages[{part.turn}], of the role "
                    f"{role!r}"
                )
                raise DataError(what, where=row.origin, fix=FITTING)
        return text

    def _render_with_probe_names(self, messages: Messages, row: Row, **options: Any) -> str:
        """Return the rendered conversation with `_probe_name` as the name of each turn's last call.

        So one rendering tells for all turns whether the template shows their calls. The text is
        empty if there are no calls, or if the template refuses it.
        """
        marked = [_with_probe_name(turn, index) for index, turn in enumerate(messages)]
        if marked == messages:
            return ""
        try:
            text: str = self._render(marked, row, **options)
        except DataError:
            return ""
        return text

    def _span(self, messages: Messages, index: int, text: str, row: Row) -> tuple[int, int]:
        """Return the characters [start, stop) of a turn in the rendered conversation.

        The turn is an answer, or another whose `weight` is 0. Raises DataError if it is not found.
        """
        turn = messages[index]
        # The conversation from its start up to and including this turn, rendered without the later
        # turns.
        is_last = index == len(messages) - 1
        if is_last:
            start = self._usual_start(turn, text)
            if start is not None:
                return start, len(text)
            prefix_with_turn = text
        else:
            prefix_with_turn = self._render(messages[: index + 1], row)
        prefix_with_header = self._render_prefix_with_header(messages, index, text, row)
        wordings = _wordings(turn)
        if self._is_between_prefixes(
            messages, index, text, prefix_with_header, prefix_with_turn, row
        ):
            return len(prefix_with_header), len(prefix_with_turn)
        # The template lacks a generation prompt, or renders this turn differently here: search the
        # content.
        if turn.get("tool_calls") and prefix_with_turn.startswith(prefix_with_header):
            # The template writes calls in its own format.
            wordings = [_answer_alone(prefix_with_turn[len(prefix_with_header) :])]
        span = _find_wording(wordings, text, prefix_with_header, prefix_with_turn)
        if span is not None:
            # If not, the same words may have been found in another turn.
            has_turns_before = text.startswith(prefix_with_header) or text.startswith(
                self._render_prefix(messages, index, row)
            )
            if has_turns_before:
                return span
        what = f"the chat template does not render what messages[{index}] says in its place"
        if self.learn_all:
            fix = FITTING
        else:
            fix = (
                "mark the assistant's turns with {% generation %} in an own model.chat_template, or "
                "set data.learn_on: all"
            )
        raise DataError(what, where=row.origin, fix=fix)

    def _is_between_prefixes(
        self,
        messages: Messages,
        index: int,
        text: str,
        prefix_with_header: str,
        prefix_with_turn: str,
        row: Row,
    ) -> bool:
        """Return whether the turn is the part of `text` between the ends of the two prefixes.

        Args:
            messages: the conversation.
            index: the turn.
            text: the conversation as it is rendered.
            prefix_with_header: what should be before the turn's content, see
                `_render_prefix_with_header`.
            prefix_with_turn: the turns up to and including this one, rendered without later turns.
            row: its row.
        """
        if not (text.startswith(prefix_with_turn) and text.startswith(prefix_with_header)):
            return False
        wordings = _wordings(messages[index])
        turn_text = prefix_with_turn[len(prefix_with_header) :]
        if wordings and not any(wording in turn_text for wording in wordings):
            return False
        # The usual header decides without another rendering, which would take a seventh of all
        # time.
        header = self._usual_header.strip()
        if header and prefix_with_header.rstrip().endswith(header):
            return True
        # If the prefix has no more than the turns before, the template has written no header, and
        # the turn's header would count as its content.
        return prefix_with_header != self._render_prefix(messages, index, row)

    def _render_prefix(self, messages: Messages, index: int, row: Row) -> str:
        """Return the rendered turns before `index`, without a generation prompt; may be empty."""
        if not index:
            return ""
        text: str = self._render(messages[:index], row)
        return text

    def _render_prefix_with_header(
        self, messages: Messages, index: int, text: str, row: Row
    ) -> str:
        """Return the rendered turns before `index`, and the header of the turn if it is an answer."""
        is_answer = messages[index]["role"] == "assistant"
        if not is_answer:
            return self._render_prefix(messages, index, row)
        if not index:
            return self._find_prefix_with_first_header(text, row)
        prefix_with_header: str = self._render(messages[:index], row, add_generation_prompt=True)
        return prefix_with_header

    def _find_prefix_with_first_header(self, text: str, row: Row) -> str:
        """Return the text before the content of an answer that is the first turn.

        There is no earlier turn to render, so the header is searched in `text`; empty if not found.
        """
        header = self._header(row)
        start = text.find(header)
        if header and start >= 0:
            return text[: start + len(header)]
        return ""

    def _header(self, row: Row) -> str:
        """Return the generation prompt, as the template writes it behind a question."""
        bare = self._render([_QUESTION], row)
        prompted = self._render([_QUESTION], row, add_generation_prompt=True)
        if prompted.startswith(bare):
            return str(prompted[len(bare) :])
        return ""

    @cached_property
    def _usual_header(self) -> str:
        """The header of an answer in a row without tools.

        Empty if the template refuses a question alone.
        """
        try:
            return self._header(Row("", {}))
        except DataError:
            return ""

    @cached_property
    def _usual_tail(self) -> str | None:
        """What the template writes behind the last answer.

        None if it does not put an answer right behind its header.
        """
        row = Row("", {})
        answer = {"role": "assistant", "content": "!"}
        try:
            prompt = self._render([_QUESTION], row, add_generation_prompt=True)
            text: str = self._render([_QUESTION, answer], row)
        except DataError:
            return None
        answered = f"{prompt}!"
        if text.startswith(answered):
            return text.removeprefix(answered)
        return None

    def _usual_start(self, message: dict[str, Any], text: str) -> int | None:
        """Return where the last answer starts, if `text` ends in header, answer and tail.

        None otherwise. Most texts do, and need no rendering of the turns before it, which would
        take a third of all time.
        """
        content = message.get("content")
        header = self._usual_header
        tail = self._usual_tail
        if tail is None or not header.strip():
            return None
        if not isinstance(content, str) or not content.strip():
            return None
        # Other keys, such as calls or reasoning, may be rendered before or behind the content.
        has_more_keys = len(message) > 2
        if has_more_keys:
            return None
        # Many templates strip the blanks around a content.
        for answer in (content, content.strip()):
            if text.endswith(f"{header}{answer}{tail}"):
                return len(text) - len(tail) - len(answer)
        return None

    def _end_of_turn(self, tokens: Tokens, start: int, stop: int) -> int:
        """Return where the tokens [start, stop) of a turn end with its end-of-turn token.

        The line break that templates put behind that token is left out. A turn without such a token
        gets the special token that comes next.
        """
        last = None
        for index in range(stop - 1, start - 1, -1):
            if tokens.ids[index] in self.special:
                last = index
                break
        if last is not None:
            rest = self.tokenizer.decode(tokens.ids[last + 1 : stop])
            if not rest.strip():
                return last + 1
        is_special_next = stop < len(tokens.ids) and tokens.ids[stop] in self.special
        if is_special_next:
            return stop + 1
        return stop

    def _render(self, messages: Messages, row: Row, **options: Any) -> Any:
        """Return the result of `apply_chat_template`, by default as text.

        Raises DataError if the template refuses the conversation.
        """
        arguments = {"tools": row.values.get("tools"), "tokenize": False, **options}
        with translate_exceptions(
            "the chat template refuses this conversation", row.origin, DataError, FITTING
        ):
            rendered = self.tokenizer.apply_chat_template(messages, **arguments)
        for text, replacement in self.replaced.items():
            rendered = rendered.replace(text, replacement)
        return rendered


def _text_of_template(template: str | dict[str, str] | None) -> str:
    """Return the text of a tokenizer's chat template, or of all of its templates."""
    if isinstance(template, str):
        return template
    return " ".join((template or {}).values())


def _is_weighted(message: dict[str, Any], row: Row) -> bool:
    """Return whether a message is a target, by its `weight` as in OpenAI's files.

    Raises DataError unless that is 0 or 1.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        what = f"the `weight` of a message is {weight!r}"
        raise DataError(what, where=row.origin, fix="give 0 or 1: it is learned or not")
    return bool(weight)


def _without_keys(message: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a message without some of its keys."""
    return {key: value for key, value in message.items() if key not in keys}


def _reasoning_keys_of(message: dict[str, Any]) -> list[str]:
    """Return the keys of a message that hold reasoning."""
    return [key for key in REASONING if isinstance(message.get(key), str)]


def _without_reasoning(message: dict[str, Any], index: int, row: Row) -> dict[str, Any]:
    """Return an answer, which is messages[index] of a row, without its reasoning."""
    name = f"messages[{index}]"
    content = message.get("content")
    message = _without_keys(message, _reasoning_keys_of(message))
    if isinstance(content, str):
        message["content"] = without_thoughts(content, name, row.origin)
    elif isinstance(content, list):
        parts = []
        for part in content:
            if "text" in part:
                text = without_thoughts(part["text"], name, row.origin)
                part = {**part, "text": text}
            parts.append(part)
        message["content"] = parts
    return message


def _is_bare_call(turn: dict[str, Any]) -> bool:
    """Return whether a turn makes calls and says nothing."""
    return bool(turn.get("tool_calls") and not turn.get("content"))


def _with_other_emptiness(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn of calls without words, its missing content made empty, or the reverse."""
    if not _is_bare_call(turn):
        return turn
    if "content" in turn:
        return {**turn, "content": None}
    return {**turn, "content": ""}


def _text_of_content(turn: dict[str, Any]) -> str:
    """Return the text of a turn's content, whether it is in parts or not."""
    content = turn.get("content") or ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content)


def _answer_alone(text: str) -> str:
    """Return what stands behind the reasoning."""
    return text.rpartition(_END_OF_THOUGHT)[2].strip()


def _wordings(turn: dict[str, Any]) -> list[str]:
    """Return what a template may render of a turn's content.

    Templates may leave the reasoning out, so that only the answer behind it is in the text.
    """
    content = _text_of_content(turn).strip()
    return [wording for wording in (content, _answer_alone(content)) if wording]


class _Part(NamedTuple):
    """A part of a turn that a template may leave out.

    Attributes:
        turn: the index of the turn.
        name: what the part is, for the message; empty for the whole turn.
        remainder: what stands in place of the turn without this part.
    """

    turn: int
    name: str
    remainder: Messages


def _omissible_parts(turn: dict[str, Any], index: int, text: str) -> Iterator[_Part]:
    """Yield the parts of a turn that a template may have left out of the rendered conversation.

    Of an assistant's turn these are the last of its calls, and what it says beside them. Reasoning
    is not among them, since templates leave that of old turns out on purpose.

    Args:
        turn: messages[index].
        index: its index.
        text: the rendered conversation.
    """
    content = turn.get("content")
    calls = turn.get("tool_calls")
    spoken = _text_of_content(turn)
    if turn["role"] != "assistant":
        if isinstance(content, str) and spoken.strip() not in text:
            yield _Part(index, "", [])
    elif calls:
        without_call = _without_keys(turn, ["tool_calls"])
        if isinstance(calls, list) and len(calls) > 1:
            without_call["tool_calls"] = calls[:-1]
        yield _Part(index, CALL, [without_call])
        if _answer_alone(spoken) not in text:
            without_speech = {**turn, "content": ""}
            yield _Part(index, "what is said beside the calls of ", [without_speech])


def _probe_name(index: int) -> str:
    """Return the function name that a trial rendering gives to a call of messages[index]."""
    return f"call-{index}-"


def _with_probe_name(turn: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the turn with `_probe_name` as the function name of its last call."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return turn
    call = calls[-1]
    if not isinstance(call, dict):
        return turn
    function = call.get("function")
    probe = {"name": _probe_name(index)}
    if isinstance(function, dict):
        marked = {**call, "function": {**function, **probe}}
    else:
        marked = {**call, **probe}
    return {**turn, "tool_calls": [*calls[:-1], marked]}


def _find_wording(
    wordings: list[str], text: str, prefix_with_header: str, prefix_with_turn: str
) -> tuple[int, int] | None:
    """Return the characters [start, stop) of the first of some wordings in a text.

    Args:
        wordings: what may be in the text.
        text: the whole conversation.
        prefix_with_header: the turns before this one and its header, rendered without later turns.
        prefix_with_turn: the turns up to and including this one, rendered without later turns.
    """
    # In the whole text the turns before this one may be rendered differently. The search begins at
    # the first character that differs from `prefix_with_header`.
    floor = _common_prefix(text, prefix_with_header)
    found = []
    for wording in wordings:
        if text.startswith(prefix_with_turn):
            # The last one: the turn is at the end, and turns before it may say the same.
            start = text.rfind(wording, floor, len(prefix_with_turn))
        else:
            # The first one: a later turn may have the same content.
            start = text.find(wording, floor)
        if start >= 0:
            found.append((start, start + len(wording)))
    if not found:
        return None
    start, stop = min(found)
    # A leading blank belongs to the first word's token.
    while start > floor and text[start - 1] == " ":
        start -= 1
    return start, stop


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
