"""Chat templates, and the tokens that end an answer.

A template has a name (`chat/NAME.jinja`, written for Drumline) or is a Jinja file. A file may name
the special tokens that it is written with, in a comment `{#- special tokens: <|im_start|>
<|im_end|> #}` at its start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from drumline.config.model import TEMPLATES
from drumline.config.registry import nearest
from drumline.errors import ConfigError, ModelError
from drumline.foreign import read_text
from drumline.models.rendering import MOST_SOURCE

# The templates that were written for Drumline. `TEMPLATES` of config.model has their names.
FOLDER = Path(__file__).with_name("chat")
# The special tokens that a template names at its start, separated by spaces.
_NEEDS = re.compile(r"\{#-?[^#]*?special tokens:([^#]*?)-?#\}")


def read_template(name: str) -> str:
    """Return the text of a template of ours, by its name, or of a Jinja file.

    Raises ConfigError for a file that does not exist, and ModelError for one that is no text.
    """
    path = Path(name)
    if name in TEMPLATES:
        path = FOLDER / f"{name}.jinja"
    if not path.is_file():
        names = ", ".join(TEMPLATES)
        fix = f"{names}, or the path of a Jinja file, relative to the folder of the YAML"
        guess = nearest(path.name, TEMPLATES)
        if guess:
            fix = f"did you mean {guess}? {fix}"
        raise ConfigError(f"no such file: {path}", where="model.chat_template", fix=fix)
    return read_text(path, ModelError, most=MOST_SOURCE)


def set_template(tokenizer: Any, name: str) -> None:
    """Give the tokenizer another chat template.

    Raises ModelError if it lacks tokens that the template is written with.
    """
    text = read_template(name)
    lacking = _lacking_tokens(tokenizer, text)
    if lacking:
        fitting = []
        for other in TEMPLATES:
            if not _lacking_tokens(tokenizer, read_template(other)):
                fitting.append(other)
        tokens = " and ".join(lacking)
        what = f"the template {name} is written with {tokens}, which this tokenizer lacks"
        fix = f"take {' or '.join(fitting)}, or a file of your own"
        raise ModelError(what, where="model.chat_template", fix=fix)
    if "eos_token" in text and tokenizer.eos_token is None:
        what = (
            f"the template {name} ends answers by the end-of-sequence token,"
            " and this tokenizer has none"
        )
        fix = "set model.tokenizer to one that has"
        raise ModelError(what, where="model.chat_template", fix=fix)
    tokenizer.chat_template = text


def _lacking_tokens(tokenizer: Any, template: str) -> list[str]:
    """Return the special tokens that a template names in its comment and a tokenizer lacks."""
    found = _NEEDS.match(template)
    if found is None:
        return []
    tokens = found[1].split()
    return [token for token in tokens if not _has_token(tokenizer, token)]


def _has_token(tokenizer: Any, token: str) -> bool:
    """Return whether a tokenizer has a token of its own for this text."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None:
        return False
    # Many tokenizers give the id of the unknown token for a text that is none of their tokens.
    return tokenizer.convert_ids_to_tokens(token_id) == token


def turn_tail(tokenizer: Any) -> list[int]:
    """Return the ids that the chat template writes from the end of the last answer on.

    These are a special token, and what follows it (a line break in ChatML). Empty if there is no
    template or no such token.
    """
    if not tokenizer.chat_template:
        return []
    answer = "answer"
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except Exception:  # noqa: BLE001 - a template for other conversations; rows show its error
        return []
    # The last one, since a template may have the word in a text of its own.
    behind_answer = text[text.rfind(answer) + len(answer) :]
    ids: list[int] = tokenizer(behind_answer, add_special_tokens=False)["input_ids"]
    special = special_ids(tokenizer)
    # What stands between the answer and the token that ends it, such as a space, is left out.
    for place, token_id in enumerate(ids):
        if token_id in special:
            return ids[place:]
    return []


def turn_end(tokenizer: Any) -> int | None:
    """Return the id of the special token that the chat template writes behind an answer.

    None if there is no template or no such token. It may differ from the end-of-sequence token:
    base models often have the template of a chat model.
    """
    tail = turn_tail(tokenizer)
    if not tail:
        return None
    return tail[0]


def end_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that end a text or an answer.

    They are those of the tokenizer and of the chat template.
    """
    ends = (tokenizer.eos_token_id, turn_end(tokenizer))
    return {int(token_id) for token_id in ends if token_id is not None}


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens."""
    # Tokens with a role, such as the end of a sequence, and others that are marked as special.
    ids = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids.add(token_id)
    return ids
