"""New tokens in a plan: the size of the embedding, the adapter that trains its new rows, notes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from drumline.config.config import Config, LoRAConfig
from drumline.config.model import ModelConfig
from drumline.config.rollouts import ServerGenerator, SGLangGenerator
from drumline.errors import ModelError
from drumline.models import shapes
from drumline.planner.sizes import FoundModel


def model_from_known_shape(known: shapes.Known, model: ModelConfig) -> ModelConfig:
    """Return a model's section filled from a known shape, with embedding rows for its new tokens.

    A known shape is the config of a published architecture, in a table of `models.shapes`. Only a
    tokenizer tells which rows of the embedding no token uses. If it is not here, each new token
    gets a row of its own.
    """
    found = shapes.with_config(known, model)
    if not model.may_grow:
        return found
    from drumline.models.load import stored_config
    from drumline.models.vocabulary import growth_of, stored_rows

    # The values of a known shape leave out what transformers has as a default.
    config = stored_config(None, found)
    stored = stored_rows(config)
    if stored is None:
        return found
    rows = model.rows_for(stored + len(model.new_tokens), stored)
    if model.tokenizer is not None:
        # A tokenizer that cannot be read leaves the estimate above.
        with suppress(ModelError):
            growth = growth_of(config, None, model)
            if growth is None:
                rows = stored
            else:
                rows = growth.rows
    # The rows are in the config now, so they are not to be added once more.
    values = _with_rows(found.config, rows)
    return found.model_copy(update={"config": values, "new_tokens": (), "tokenizer": None})


def _with_rows(values: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a config's values with another size of the vocabulary, as `set_rows` sets it.

    A model of several parts has the size in its `text_config`, and may have it beside that, too.
    """
    changed = dict(values)
    if "text_config" in values:
        changed["text_config"] = {**values["text_config"], "vocab_size": rows}
    if "text_config" not in values or "vocab_size" in values:
        changed["vocab_size"] = rows
    return changed


def with_trainable_token_embeddings(config: Config, policy: FoundModel) -> Config:
    """Return the config with an adapter that also trains the embedding rows of `model.new_tokens`.

    An adapter that trains embedding and head in another way stays as it is. Raises ModelError.
    """
    adapter = config.adapter
    if not isinstance(adapter, LoRAConfig) or not config.model.new_tokens:
        return config
    adapters = (adapter, *adapter.more.values())
    names_modules = any(isinstance(each.targets, list) for each in adapters)
    if adapter.modules_to_save or names_modules:
        # Only the model's modules tell whether these names include embedding or head.
        from drumline.models.adapters import trains_rows
        from drumline.models.load import build_without_memory

        if trains_rows(build_without_memory(policy.hf_config, config.head), adapter):
            return config
    if policy.model.new_tokens:
        from drumline.models.tokenizer import add_new_tokens, read_tokenizer

        tokenizer = read_tokenizer(policy.path, policy.model)
        ids_by_token = add_new_tokens(tokenizer, policy.model)
        ids = list(ids_by_token.values())
    else:
        # A known shape, of which only the number of rows counts.
        ids = list(range(len(config.model.new_tokens)))
    trained = list(adapter.trainable_tokens)
    for number in ids:
        if number not in adapter.trainable_tokens:
            trained.append(number)
    adapter = adapter.model_copy(update={"trainable_tokens": tuple(trained)})
    return config.model_copy(update={"adapter": adapter})


def vocabulary_notes(config: Config, policy: FoundModel) -> list[str]:
    """Return notes for the user on how new tokens change the vocabulary. Raises ModelError."""
    growth = policy.growth
    if growth is None:
        return []
    lines = []
    if growth.reused_rows:
        lines.append(
            f"new tokens: {growth.reused_rows:,} of them take rows of the embedding that no token used"
        )
    if growth.added_rows:
        lines.append(
            f"new tokens: the embedding grows by {growth.added_rows:,} rows to {growth.rows:,}"
        )
    if growth.already_known:
        names = ", ".join(repr(token) for token in growth.already_known)
        its_row_stays = "its row begins as it is"
        if len(growth.already_known) > 1:
            its_row_stays = "their rows begin as they are"
        lines.append(f"new tokens: the tokenizer has {names} already, and {its_row_stays}")
    generator = _server_that_gets_weights(config)
    if growth.added_rows and generator is not None:
        size: dict[str, Any] = {"vocab_size": growth.rows}
        is_nested = policy.hf_config.get_text_config() is not policy.hf_config
        if is_nested:
            size = {"text_config": size}
        name = "vLLM"
        override = "--hf-overrides"
        if isinstance(generator, SGLangGenerator):
            name = "SGLang"
            override = "--json-model-override-args"
        # The server makes an embedding of this many rows without reading the stored one.
        options = f"--load-format dummy {override} '{json.dumps(size)}'"
        lines.append(f"{name}: start its server with {options}: this run gives it all weights")
    return lines


def _server_that_gets_weights(config: Config) -> ServerGenerator | None:
    """Return the generator of rollouts if it is a server that this run sends all weights to."""
    rollout = config.algorithm.rollout
    if rollout is None or not isinstance(rollout.generator, ServerGenerator):
        return None
    generator = rollout.generator
    if generator.url is None or generator.weights != "folder":
        return None
    return generator
