"""A model's tokenizer. No torch: processes that tokenise do without its import."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.files import (
    call_loader,
    check_folder,
    hub_options,
    tokenizer_folder,
    tokenizer_revision,
)
from drumline.models.rendering import limit_templates
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
    """Return the tokenizer as its files have it, without `model.new_tokens`."""
    from transformers import AutoTokenizer

    source = model.tokenizer or path
    revision = tokenizer_revision(model)
    if source is None:
        what = "a model written out by its config has no tokenizer"
        raise ModelError(what, where="model.tokenizer", fix="name a folder or hub id that has one")
    folder = tokenizer_folder(source)
    # Before transformers reads the files, which a pipe or a device among them would make hang.
    check_folder(Path(folder))
    # The tokenizer's chat template is a program of a stranger.
    limit_templates()
    # A tokenizer of another repository has revisions of its own.
    own_model = model.model_copy(update={"revision": revision})

    def read() -> Any:
        options = hub_options(folder, own_model)
        return _try_methods(AutoTokenizer.from_pretrained(folder, **options))

    return call_loader(folder, own_model, read, "its tokenizer_config.json or tokenizer.json")


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
    # `add_tokens` leaves out without a word what it does not take.
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            what = f"the tokenizer does not take {token!r}"
            raise ModelError(what, where="model.new_tokens", fix="write it in another way")
    return {token: int(vocabulary[token]) for token in tokens}


def _try_methods(tokenizer: Any) -> Any:
    """Return the tokenizer after a trial of the methods that are used later.

    The trial finds wrong values in its files, and raises any exception.
    """
    ids = list(tokenizer("a b", add_special_tokens=True)["input_ids"])
    tokenizer.decode(ids)
    # Ids that no text has, but that rows are filled with or ended by.
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            ids.append(token_id)
    tokenizer.convert_ids_to_tokens(ids)
    if len(tokenizer) == 0:
        raise ValueError("it has no tokens")
    template = tokenizer.chat_template
    # transformers allows several templates by their names.
    if template is None:
        texts = []
    elif isinstance(template, dict):
        texts = list(template.values())
    else:
        texts = [template]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("chat_template is no text")
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """Return the id that fills short rows, to which nothing attends.

    Without a padding token it is the end-of-text token or id 0, which is logged.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    instead = int(tokenizer.eos_token_id or 0)
    logger.warning(
        "the tokenizer has no padding token: rows are filled with %r (id %d)",
        tokenizer.convert_ids_to_tokens(instead),
        instead,
    )
    return instead
