"""`drumline chat`: talk to a model in the terminal. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from drumline.core.signals import CtrlC
from drumline.errors import DataError, UserError
from drumline.foreign import judged
from drumline.inference.open import LoadedModel, open_model
from drumline.report.bars import bars
from drumline.rl.generate import end_tokens

COMMANDS = "/exit or Ctrl-D leaves, /clear forgets what was said, Ctrl-C stops an answer"
Message = dict[str, str]


def chat(place: str, max_new_tokens: int, temperature: float, system: str | None, trust: bool = False) -> None:
    """Read lines from standard input until it ends, and answer each. Piped input works the same, without a prompt sign."""
    with bars(Console(stderr=True)) as on_progress:
        loaded = open_model(place, on_progress, trust)
    talk = Conversation(loaded, max_new_tokens, temperature, system)
    _tell(f"{loaded.origin} — {COMMANDS}")
    if not talk.has_template:
        _tell("it has no chat template: each line is continued by itself")
    with CtrlC():
        while (line := _read()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                talk.turns.clear()
            elif line.startswith("/") and line[1:].isalpha():
                _tell(f"no command {line}: {COMMANDS}")
            elif line:
                talk.answer(line)


@dataclass
class Conversation:
    """The conversation so far, and the model that goes on with it. `temperature` 0 is the likeliest token each time. `show`: print answers
    as they come."""

    loaded: LoadedModel
    max_new_tokens: int
    temperature: float
    system: str | None
    turns: list[Message] = field(default_factory=list)
    show: bool = True

    def __post_init__(self) -> None:
        tokenizer = self.loaded.tokenizer
        self.has_template = bool(tokenizer.chat_template)
        if self.system is not None and not self.has_template:
            raise UserError("this model has no chat template, and so no place for it", where="--system", fix="leave it out")
        text = self.loaded.model.config.get_text_config()
        self.positions: int = getattr(text, "max_position_embeddings", None) or sys.maxsize
        self.ends = sorted(end_tokens(self.loaded.model, tokenizer))

    def answer(self, line: str) -> str:
        """The answer; both are kept. Ctrl-C ends it early: the text until then is kept."""
        import torch

        question = {"role": "user", "content": line}
        if (size := len(self._tokens([question]))) >= self.positions:
            _tell(f"that is {size} tokens, and the model has {self.positions} positions: nothing is answered")
            return ""
        self.turns.append(question)
        ids = self._prompt()
        room = min(self.max_new_tokens, self.positions - len(ids))
        out = printer(self.loaded.tokenizer, self.show)
        ids_BT = torch.tensor([ids], device=self.loaded.model.device)
        sampled = {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {"do_sample": False, **NO_SAMPLING}
        try:
            with torch.no_grad():
                self.loaded.model.generate(
                    ids_BT,
                    attention_mask=torch.ones_like(ids_BT),
                    streamer=out,
                    max_new_tokens=room,
                    eos_token_id=self.ends or None,
                    pad_token_id=self.loaded.tokenizer.pad_token_id or (self.ends or [0])[0],
                    **sampled,
                )
        except KeyboardInterrupt:
            out.on_finalized_text(" …", stream_end=True)
        answer = "".join(out.answer)
        self.turns.append({"role": "assistant", "content": answer})
        return answer

    def _prompt(self) -> list[int]:
        """The conversation as tokens; its oldest turns give way where it leaves too few positions for an answer."""
        if not self.has_template:
            del self.turns[:-1]
        while len(ids := self._tokens(self.turns)) + self.max_new_tokens > self.positions and len(self.turns) > 1:
            del self.turns[:2]
            _tell("the model's positions are used up: the oldest turn is forgotten")
        return ids

    def _tokens(self, turns: list[Message]) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if not self.has_template:
            return list(tokenizer(turns[0]["content"])["input_ids"])
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        with judged("the chat template refuses this conversation", self.loaded.origin, DataError):
            text = tokenizer.apply_chat_template([*system, *turns], tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# What a model's own generation config may set for sampling, and greedy decoding would warn of.
NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None}
# A model may write what a terminal takes for a command; line breaks and tabs are text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printer(tokenizer: Any, show: bool = True) -> Any:
    """A streamer that keeps what comes in `answer`, and prints it word by word."""
    from transformers import TextStreamer

    class Printer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.answer: list[str] = []

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.answer.append(text)
            if show:
                print(CONTROLS.sub("�", text), end="\n" if stream_end else "", flush=True)

    return Printer()


def _read() -> str | None:
    """The next line; None at the end. Ctrl-C with nothing to stop only shows how to leave."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 — gives `input` its arrow keys
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        _tell(f"\n{COMMANDS}")
        return ""


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
