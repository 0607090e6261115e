"""The turns of a conversation as tokens, by the model's chat template. No torch.

A conversation grows by appending: the model's tokens stay as they were sampled, and are never made
from text again. What an environment says is appended as the tokens that the template writes between
the end of a model's turn and the beginning of its next one, headers included.

They are found in a rendering of their own, of a question, an answer and the environment's messages. It
does not have the conversation so far, because templates render that differently later (Qwen 3 leaves
out old reasoning, gpt-oss ends old answers by another token). So the tokens that a model reads may
differ from the template's rendering of the whole conversation in such places; they never differ from
those that it was sampled with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from drumline.config.data import DataConfig
from drumline.data.sources import Row
from drumline.data.targets import Encoder
from drumline.data.turns import Messages
from drumline.errors import ConfigError, DataError
from drumline.rl.tool_calls import Call, find_format, parse_turn

# What a conversation is called in errors of its template.
ORIGIN = "the environment's messages"
# A conversation in which an answer is searched for. The answer is no word of a template, nor of the
# environment's messages (`_answer_beside`).
_QUESTION = {"role": "user", "content": "?"}
_ANSWER = "drumline-answer"
# Mistral's templates require ids of nine letters and digits.
_CALL_ID = "call{:05d}"


class ModelTurn(NamedTuple):
    """A turn of the model as text."""

    # As an environment gets it, and as a transcript shows it.
    message: dict[str, Any]
    # What it says besides calls of tools.
    content: str


class ChatTurns:
    """Renders prompts and replies of an environment, and reads the model's turns."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        tools: list[dict[str, Any]],
        reads_calls: bool,
    ) -> None:
        """Set up for the conversations of a run.

        Args:
            tokenizer: The tokenizer of the policy.
            data: The settings of `data`.
            tools: The JSON schemas of the tools; empty without any.
            reads_calls: Whether the model's turns may call tools.

        Raises ConfigError if the tokenizer's chat template does not fit.
        """
        require_template(tokenizer, reads_calls)
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, everything=False, data=data)
        self.tools = tools
        self.special = self.encoder.special
        self.call_format: str | None = None
        if reads_calls:
            self.call_format = find_format(_template_text(tokenizer))
        # The episodes of a group have the same prompt.
        self._prompts: dict[str, list[int]] = {}

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens before the model's first turn, which all episodes of a group share.

        Raises DataError if the template refuses the messages.
        """
        key = json.dumps(messages)
        tokens = self._prompts.get(key)
        if tokens is None:
            values = {"prompt": messages, "tools": self.tools or None}
            _, tokens = self.encoder.prompt(Row(ORIGIN, values))
            self._prompts[key] = tokens
        return tokens

    def forget_prompts(self) -> None:
        """Forget what `prompt` has rendered, since the next rollout has other prompts."""
        self._prompts.clear()

    def read(self, tokens: Sequence[int]) -> ModelTurn:
        """Return the model's turn of these tokens, the one that ended it included."""
        if self.call_format is None:
            content = self._plain(tokens)
            return ModelTurn({"role": "assistant", "content": content}, content)
        if tokens and tokens[-1] in self.special:
            tokens = tokens[:-1]
        raw = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        turn = parse_turn(raw, self.call_format)
        content = turn.content
        for token in self.tokenizer.all_special_tokens:
            content = content.replace(token, "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if turn.calls:
            message["tool_calls"] = _call_entries(turn.calls)
        if turn.errors:
            message["unread_calls"] = turn.errors
        return ModelTurn(message, content)

    def _plain(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def reply(self, messages: Messages, last_token: int) -> list[int]:
        """Return the tokens of an environment's messages, up to the beginning of the model's next turn.

        Args:
            messages: The messages, at least one.
            last_token: The last token of the model's turn, which has ended. If it is a special one, it
                is the end of the turn, and stands for the token by which the template ends one.
                Otherwise a stop text ended the turn, and the template's token comes first.

        Raises DataError if the template refuses the messages, or does not render them behind an
        answer.
        """
        has_results = any(message["role"] == "tool" for message in messages)
        if has_results:
            text = self._after_calls(messages)
        else:
            text = self._after_answer(messages)
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if last_token in self.special and ids and ids[0] in self.special:
            return ids[1:]
        return ids

    def _after_answer(self, messages: Messages) -> str:
        """Return what the template writes behind the text of an answer."""
        content = _answer_beside(messages)
        answer = {"role": "assistant", "content": content}
        text = self._render([_QUESTION, answer, *messages], to_answer=True)
        before, found, after = text.rpartition(content)
        if not found or not before:
            raise _unfit("the template does not show the answer before them")
        return after

    def _after_calls(self, messages: Messages) -> str:
        """Return what the template writes from the token on that ends an answer of calls.

        The answer has a call for each result among the messages.
        """
        content = _answer_beside(messages)
        calls: list[Call] = []
        labelled = []
        for message in messages:
            if message["role"] == "tool":
                identifier = message.get("tool_call_id", _CALL_ID.format(len(calls)))
                name = message.get("name", "tool")
                calls.append(Call(name, {"argument": content}, identifier))
                message = {**message, "tool_call_id": identifier}
            labelled.append(message)
        entries = _call_entries(calls)
        answer = {"role": "assistant", "content": "", "tool_calls": entries}
        head = self._render([_QUESTION, answer], to_answer=False)
        text = self._render([_QUESTION, answer, *labelled], to_answer=True)
        # Only what stands behind the call's last argument is compared: before a call that is the last
        # turn, some templates write reasoning.
        _, found, end_of_head = head.rpartition(content)
        _, _, after = text.rpartition(content)
        if not found or not after.startswith(end_of_head):
            raise _unfit("the template renders the calls before them differently")
        return after[self._turn_end(end_of_head) :]

    def _turn_end(self, text: str) -> int:
        """Return where the special token begins that ends a turn; `text` is the turn's end.

        Characters may stand behind it (a line break). Without such a token it is the end of the text.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        for place in reversed(range(len(ids))):
            tail = self.tokenizer.decode(ids[place + 1 :], skip_special_tokens=False)
            if tail.strip():
                break
            if ids[place] in self.special:
                return text.rfind(self.tokenizer.convert_ids_to_tokens(ids[place]))
        return len(text)

    def _render(self, messages: Messages, to_answer: bool) -> str:
        """Return a conversation as text. `to_answer`: up to the beginning of the next answer."""
        if to_answer:
            return self.encoder.render_to_answer(messages, self.tools, ORIGIN)
        return self.encoder.render(messages, self.tools, ORIGIN)


def require_template(tokenizer: Any, reads_calls: bool) -> None:
    """Check that a tokenizer has a chat template for conversations.

    `reads_calls`: whether the template must also show tools, in a format whose calls can be read.
    Raises ConfigError.
    """
    template = _template_text(tokenizer)
    where = "model.chat_template"
    if not template:
        what = "an environment needs a chat template, and this tokenizer has none"
        raise ConfigError(what, where=where, fix="set it to the model's, or to chatml")
    if not reads_calls:
        return
    if "tools" not in template:
        what = "the chat template shows no tools, and algorithm.environment has some"
        raise ConfigError(what, where=where, fix="set it to one that does: chatml, qwen, llama-3")
    if find_format(template) is None:
        what = "the chat template has calls of tools in a format that cannot be read"
        fix = "take one of the format of Hermes, Llama 3, Mistral or gpt-oss, such as chatml"
        raise ConfigError(what, where=where, fix=fix)


def _template_text(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template; empty without one."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return " ".join(template.values())
    return template or ""


def _answer_beside(messages: Messages) -> str:
    """Return the text of an answer that none of the messages contains."""
    text = json.dumps(messages)
    answer = _ANSWER
    while answer in text:
        answer += "+"
    return answer


def _call_entries(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls as `tool_calls` of a message."""
    entries = []
    for number, call in enumerate(calls):
        entry = {
            "id": call.identifier or _CALL_ID.format(number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        entries.append(entry)
    return entries


def _unfit(what: str) -> DataError:
    """Return the error for messages that cannot be appended."""
    return DataError(what, where=ORIGIN, fix="set another model.chat_template")
