"""Adds rows to embedding and head for new tokens, and gives these rows their first values.

Rows of tokens that the model's files know are not changed. A row that is added begins as a mean of
rows in the files, and so does a row of the files that no token has used before. Each rank computes
the mean from the files, so every rank and strategy has the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.tokenizer import add_new_tokens, read_tokenizer

# Rows that are read at once for a mean.
ROWS_AT_ONCE = 4096
WHERE = "model.new_tokens"


@dataclass(frozen=True)
class Growth:
    """The rows of a model's embedding and head beside those of its files.

    `stored`: rows in the files. `rows`: rows of the model, `stored` or more. `trained_rows`: the
    first rows in the files, those of tokens; rows behind them are padding. `initial_tokens`: id of
    a new token → ids of the tokens of its text. Its row begins as the mean of their rows, or
    without ids as the mean of all trained rows. `already_known`: those of `model.new_tokens` that
    have a row in the files.
    """

    stored: int
    rows: int
    trained_rows: int
    initial_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    already_known: tuple[str, ...] = ()

    @property
    def added_rows(self) -> int:
        """How many rows the model has behind those of the files."""
        return self.rows - self.stored

    @property
    def reused_rows(self) -> int:
        """How many new tokens take rows of the files."""
        reused = [token_id for token_id in self.initial_tokens if token_id < self.stored]
        return len(reused)

    @property
    def changes_rows(self) -> bool:
        """Whether the model's rows differ from those of its files."""
        return self.added_rows > 0 or bool(self.initial_tokens)


def growth_of(config: Any, path: str | None, model: ModelConfig) -> Growth | None:
    """Return the rows that the model at `path` gets for `model.new_tokens` and `model.tokenizer`.

    None if it names neither. `config`: as the model's files and `model.config` have it.
    Raises ModelError for new tokens of a model without a vocabulary, and for a text that has no
    tokens, or a token without a row.
    """
    if not model.may_grow:
        return None
    stored = stored_rows(config)
    if stored is None:
        if model.new_tokens:
            raise ModelError("this model has no vocabulary", where=WHERE, fix="take it out")
        return None
    tokenizer = read_tokenizer(path, model)
    trained_rows = min(stored, len(tokenizer))
    before = tokenizer.get_vocab()
    # Before the new tokens are added: the texts must be split into tokens that have rows.
    text_ids = {}
    for new in model.new_tokens:
        text_ids[new.token] = _ids_of(tokenizer, new.text, trained_rows)
    ids = add_new_tokens(tokenizer, model)
    initial_tokens = {}
    already_known = []
    for token, ids_of_text in text_ids.items():
        token_id = ids[token]
        # A tokenizer may have a token already that the files have no row for.
        if token in before and token_id < stored:
            already_known.append(token)
        else:
            initial_tokens[token_id] = ids_of_text
    # A tokenizer's ids may have gaps: then its largest id is more than its length tells.
    needed = len(tokenizer)
    for token_id in ids.values():
        needed = max(needed, token_id + 1)
    rows = model.rows_for(needed, stored)
    return Growth(stored, rows, trained_rows, initial_tokens, tuple(already_known))


def stored_rows(config: Any) -> int | None:
    """Return the rows of the embedding that a config describes; None without a vocabulary."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    # A foreign file may have anything there.
    if not isinstance(size, int):
        return None
    return size


def set_rows(config: Any, rows: int) -> None:
    """Set the size of the vocabulary in a config, in place.

    A config with a part for text may have the size twice.
    """
    text_config = config.get_text_config()
    outer_size = getattr(config, "vocab_size", None)
    if text_config is not config and outer_size == text_config.vocab_size:
        config.vocab_size = rows
    text_config.vocab_size = rows


def _ids_of(tokenizer: Any, text: str, trained_rows: int) -> tuple[int, ...]:
    """Return the ids of the text that a new token's row begins with; none for an empty one.

    `trained_rows`: rows in the files, which the ids must have. Raises ModelError.
    """
    if not text:
        return ()
    fix = "describe the token in other words"
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ModelError(f"the text {text!r} has no tokens", where=WHERE, fix=fix)
    if max(ids) >= trained_rows:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        what = f"the text {text!r} has the token {token!r}, which the model has no row for"
        raise ModelError(what, where=WHERE, fix=fix)
    return ids


class GrownRows:
    """A stored weight [V, D] or bias [V] with the rows of `growth`, read a part at a time."""

    def __init__(self, stored: Any, growth: Growth) -> None:
        """`stored`: a tensor, or a slice object of safetensors, with `growth.stored` rows."""
        self.stored = stored
        self.growth = growth

    def copy_to(self, part: torch.Tensor, place: tuple[slice, ...]) -> None:
        """Fill `part`, the whole tensor's part at `place`.

        Each slice of `place` has a start and a stop: first of the rows, then for a weight of the
        columns.
        """
        rows, *columns = place
        # The end of the part's rows that are in the files.
        stop = max(rows.start, min(rows.stop, self.growth.stored))
        kept = stop - rows.start
        if kept:
            part[:kept].copy_(self._read(rows.start, stop, columns))
        if stop < rows.stop:
            added_part = part[kept:]
            mean = self._mean[tuple(columns)]
            added_part.copy_(mean.expand_as(added_part))
        # Last, since a new token may take a row of the files.
        for row in self.growth.initial_tokens:
            if rows.start <= row < rows.stop:
                initial_row = self._initial_row(row)
                part[row - rows.start].copy_(initial_row[tuple(columns)])

    def _initial_row(self, row: int) -> torch.Tensor:
        """Return the first values of a new row, fp32[D] (of a bias fp32[])."""
        ids = self.growth.initial_tokens.get(row, ())
        if not ids:
            return self._mean
        rows_of_text = [self._read(token_id, token_id + 1) for token_id in ids]
        joined = torch.cat(rows_of_text).double()
        return joined.mean(0).float()

    @cached_property
    def _mean(self) -> torch.Tensor:
        """The mean of all trained rows, summed in fp64 in the same order on every rank."""
        trained_rows = self.growth.trained_rows
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, trained_rows, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, trained_rows)
            block = self._read(start, stop).double()
            total = total + block.sum(0)
        return (total / trained_rows).float()

    def _read(self, start: int, stop: int, columns: Any = ()) -> torch.Tensor:
        """Return stored rows `start` to `stop`, or only the slices `columns` of them."""
        part: torch.Tensor = self.stored[(slice(start, stop), *columns)]
        return part


def vocabulary_parameter_ids(model: Any) -> set[int]:
    """Return Python's ids of the parameters with a row for each token: of embedding and head."""
    ids: set[int] = set()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None:
            ids |= {id(parameter) for parameter in layer.parameters()}
    return ids


def grow_whole(model: Any, growth: Growth) -> None:
    """Give a whole model in memory the rows of `growth`. It has the rows of its files so far."""
    stored = {}
    for name in _vocabulary_parameter_names(model):
        stored[name] = model.get_parameter(name).detach().clone()
    if growth.added_rows:
        # Not transformers' own mean, which it draws around: `GrownRows` fills these rows.
        model.resize_token_embeddings(growth.rows, mean_resizing=False)
    with torch.no_grad():
        for name, before in stored.items():
            after = model.get_parameter(name)
            everywhere = tuple(slice(0, size) for size in after.shape)
            GrownRows(before, growth).copy_to(after, everywhere)


def _vocabulary_parameter_names(model: Any) -> list[str]:
    """Return the names of the parameters of embedding and head; of tied ones the first name."""
    ids = vocabulary_parameter_ids(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) in ids]
