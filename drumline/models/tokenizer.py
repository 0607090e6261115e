"""A model's tokenizer. No torch: processes that tokenise do without its import."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from drumline.core.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.files import (
    check_folder,
    from_hub,
    hub_options,
    tokenizer_folder,
    tokenizer_revision,
)
from drumline.models.rendering import limit
from drumline.models.templates import set_template

logger = logging.getLogger(__name__)


def load_tokenizer(path: str | None, model: ModelConfig) -> Any:
    """Return the tokenizer of the model, or of `model.tokenizer`, with `model.new_tokens`.

    `model.chat_template` takes the place of its own.
    """
    tokenizer = read_tokenizer(path, model)
    add_new_tokens(tokenizer, model)
    if model.chat_template is not None:
        set_template(tokenizer, model.chat_template)
    return tokenizer


def read_tokenizer(path: str | None, model: ModelConfig) -> Any:
    """The tokenizer as its files have it, without `model.new_tokens`."""
    from transformers import AutoTokenizer

    source, revision = model.tokenizer or path, tokenizer_revision(model)
    if source is None:
        what = "a model written out by its config has no tokenizer"
        raise ModelError(what, where="model.tokenizer", fix="name a folder or hub id that has one")
    source = tokenizer_folder(source)
    check_folder(Path(source))
    limit()
    apart = model.model_copy(update={"revision": revision})
    files = "its tokenizer_config.json or tokenizer.json"
    return from_hub(
        source,
        apart,
        lambda: _checked(AutoTokenizer.from_pretrained(source, **hub_options(source, apart))),
        files,
    )


def add_new_tokens(tokenizer: Any, model: ModelConfig) -> dict[str, int]:
    """Add `model.new_tokens` to the tokenizer, and return the id of each, also of those it had.

    They are plain tokens, not special ones. Decoding keeps them where it leaves special tokens out,
    so a chat shows them, and a reward function reads them.
    Raises ModelError for a token that the tokenizer does not take.
    """
    tokens = [new.token for new in model.new_tokens]
    if not tokens:
        return {}
    tokenizer.add_tokens(tokens)
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            what, fix = f"the tokenizer does not take {token!r}", "write it in another way"
            raise ModelError(what, where="model.new_tokens", fix=fix)
    return {token: int(vocabulary[token]) for token in tokens}


def _checked(tokenizer: Any) -> Any:
    """The tokenizer, after a trial of the methods that are used later, which finds wrong values in its files. Raises any exception."""
    ids = tokenizer("a b", add_special_tokens=True)["input_ids"]
    tokenizer.decode(ids)
    tokenizer.convert_ids_to_tokens(
        [*ids, *(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None)]
    )
    template = tokenizer.chat_template
    texts = (
        []
        if template is None
        else list(template.values())
        if isinstance(template, dict)
        else [template]
    )
    if not len(tokenizer) or not all(isinstance(text, str) for text in texts):
        raise ValueError("chat_template is no text" if len(tokenizer) else "it has no tokens")
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills short rows, which nothing attends to; without one the end-of-text token or id 0, which is logged."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    instead = int(tokenizer.eos_token_id or 0)
    logger.warning(
        "the tokenizer has no padding token: rows are filled with %r (id %d)",
        tokenizer.convert_ids_to_tokens(instead),
        instead,
    )
    return instead
