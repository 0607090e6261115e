"""Chat templates by name (`chat/NAME.jinja`, written for Drumline) or of a Jinja file, and the tokens that end an answer. A file may name
the special tokens that it is written with, in a comment `{#- special tokens: <|im_start|> <|im_end|> #}` at its start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from drumline.core.model import TEMPLATES
from drumline.core.registry import nearest
from drumline.errors import ConfigError, ModelError
from drumline.foreign import read_text
from drumline.models.rendering import MOST_SOURCE

FOLDER = Path(__file__).with_name("chat")
_NEEDS = re.compile(r"\{#-?[^#]*?special tokens:([^#]*?)-?#\}")


def read_template(name: str) -> str:
    """The text of a template by its name, or of a Jinja file. Raises ConfigError for one that is not there, ModelError for no text."""
    path = FOLDER / f"{name}.jinja" if name in TEMPLATES else Path(name)
    if not path.is_file():
        fix = f"{', '.join(TEMPLATES)}, or the path of a Jinja file, relative to the folder of the YAML"
        guess = nearest(path.name, TEMPLATES)
        raise ConfigError(
            f"no such file: {path}",
            where="model.chat_template",
            fix=f"did you mean {guess}? {fix}" if guess else fix,
        )
    return read_text(path, ModelError, most=MOST_SOURCE)


def set_template(tokenizer: Any, name: str) -> None:
    """Give the tokenizer another chat template. Raises ModelError where it lacks tokens that the template is written with."""
    text = read_template(name)
    needs = _needs(text)
    if lacks := [token for token in needs if not _has(tokenizer, token)]:
        fitting = [
            each
            for each in TEMPLATES
            if all(_has(tokenizer, token) for token in _needs(read_template(each)))
        ]
        what = (
            f"the template {name} is written with {' and '.join(lacks)}, which this tokenizer lacks"
        )
        raise ModelError(
            what,
            where="model.chat_template",
            fix=f"take {' or '.join(fitting)}, or a file of your own",
        )
    if "eos_token" in text and tokenizer.eos_token is None:
        what = f"the template {name} ends answers by the end-of-sequence token, and this tokenizer has none"
        raise ModelError(
            what, where="model.chat_template", fix="set model.tokenizer to one that has"
        )
    tokenizer.chat_template = text


def _needs(text: str) -> list[str]:
    found = _NEEDS.match(text)
    return found[1].split() if found else []


def _has(tokenizer: Any, token: str) -> bool:
    number = tokenizer.convert_tokens_to_ids(token)
    return number is not None and tokenizer.convert_ids_to_tokens(number) == token


def turn_tail(tokenizer: Any) -> list[int]:
    """The tokens that the chat template writes from the end of the last answer on: a special token, and what comes behind it (a line break
    in ChatML). Empty if there is no template or no such token."""
    if not tokenizer.chat_template:
        return []
    content = "answer"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}],
            tokenize=False,
        )
    except Exception:  # noqa: BLE001 - a template for other conversations; rows show its error
        return []
    after = tokenizer(text[text.rfind(content) + len(content) :], add_special_tokens=False)[
        "input_ids"
    ]
    return next(
        (after[at:] for at, token in enumerate(after) if token in special_ids(tokenizer)), []
    )


def turn_end(tokenizer: Any) -> int | None:
    """The special token that the chat template puts behind an answer; None if there is no template or no such token. It may differ from the
    end-of-sequence token: base models often have the template of a chat model."""
    return next(iter(turn_tail(tokenizer)), None)


def end_ids(tokenizer: Any) -> set[int]:
    """The tokens that end a text or an answer: the tokenizer's and the chat template's."""
    return {
        int(token) for token in (tokenizer.eos_token_id, turn_end(tokenizer)) if token is not None
    }


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the special tokens."""
    return {
        *tokenizer.all_special_ids,
        *(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special),
    }
