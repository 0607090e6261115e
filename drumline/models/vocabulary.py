"""New tokens: how many rows embedding and head need for them, and what these rows begin as.

The rows of a model's files stay as they are. Rows that are added begin at a mean of rows in the
files. So do rows of `model.new_tokens` that were in the files, but that no token used. Each rank
computes the mean from the files, so every rank and strategy has the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from drumline.core.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.tokenizer import add_new_tokens, read_tokenizer

BLOCK = 4096  # rows that are read at once for a mean
WHERE = "model.new_tokens"


@dataclass(frozen=True)
class Growth:
    """The rows of a model's embedding and head beside those of its files.

    `stored`: rows in the files.
    `rows`: rows of the model, `stored` or more.
    `known`: the first rows in the files, those of tokens; rows behind them are padding.
    `starts`: id of a new token → ids of the tokens of its text, whose mean its row begins at; no ids
    for the mean of all known rows.
    `had`: those of `model.new_tokens` that the tokenizer had already.
    """

    stored: int
    rows: int
    known: int
    starts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    had: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        return self.rows - self.stored

    @property
    def reused(self) -> int:
        """New tokens that take rows of the files."""
        return sum(number < self.stored for number in self.starts)

    @property
    def changes_rows(self) -> bool:
        """Whether the model's rows are other ones than those of its files."""
        return self.added > 0 or bool(self.starts)


def growth_of(config: Any, path: str | None, model: ModelConfig) -> Growth | None:
    """Return the rows that the model at `path` gets for `model.new_tokens` and `model.tokenizer`.

    None where it asks for neither. `config`: as the model's files and `model.config` have it.
    Raises ModelError for new tokens of a model without a vocabulary, and for a text without known
    tokens.
    """
    if not model.new_tokens and model.tokenizer is None:
        return None
    stored = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(stored, int):
        if model.new_tokens:
            raise ModelError("this model has no vocabulary", where=WHERE, fix="take it out")
        return None
    tokenizer = read_tokenizer(path, model)
    known = min(stored, len(tokenizer))
    before = tokenizer.get_vocab()
    texts = {new.token: _ids_of(tokenizer, new.text, known) for new in model.new_tokens}
    ids = add_new_tokens(tokenizer, model)
    starts = {ids[token]: text for token, text in texts.items() if token not in before}
    had = tuple(token for token in texts if token in before)
    needed = max([len(tokenizer), *(number + 1 for number in ids.values())])
    return Growth(stored, model.rows_for(needed, stored), known, starts, had)


def set_rows(config: Any, rows: int) -> None:
    """Set the size of the vocabulary, also where a config with a part for text has it twice."""
    text = config.get_text_config()
    outer = getattr(config, "vocab_size", None)
    if text is not config and outer == text.vocab_size:
        config.vocab_size = rows
    text.vocab_size = rows


def _ids_of(tokenizer: Any, text: str, known: int) -> tuple[int, ...]:
    """The ids of the text that a new token's row begins with; none for an empty one."""
    if not text:
        return ()
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids or max(ids) >= known:
        raise ModelError(
            f"the text {text!r} has no tokens that the model knows",
            where=WHERE,
            fix="describe the token in other words",
        )
    return ids


class GrownRows:
    """A stored weight [V, D] or bias [V] with the rows of `growth`, read a part at a time."""

    def __init__(self, stored: Any, growth: Growth) -> None:
        """`stored`: a tensor, or a slice object of safetensors, with `growth.stored` rows."""
        self.stored, self.growth = stored, growth

    def copy_to(self, part: torch.Tensor, place: tuple[slice, ...]) -> None:
        """Fill `part`, the whole tensor's part at `place`; each slice has a start and a stop."""
        rows, *columns = place
        stop = max(rows.start, min(rows.stop, self.growth.stored))
        kept = stop - rows.start
        if kept:
            part[:kept].copy_(self._read(rows.start, stop, columns))
        if stop < rows.stop:
            part[kept:].copy_(self._mean[tuple(columns)].expand_as(part[kept:]))
        for row in self.growth.starts:
            if rows.start <= row < rows.stop:
                part[row - rows.start].copy_(self._first(row)[tuple(columns)])

    def _first(self, row: int) -> torch.Tensor:
        """What a new row begins as, fp32[D] (of a bias fp32[])."""
        ids = self.growth.starts.get(row, ())
        if not ids:
            return self._mean
        found = [self._read(number, number + 1) for number in ids]
        return torch.cat(found).double().mean(0).float()

    @cached_property
    def _mean(self) -> torch.Tensor:
        """The mean of all known rows, summed in fp64 in the same order on every rank."""
        known = self.growth.known
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, known, BLOCK):
            total = total + self._read(start, min(start + BLOCK, known)).double().sum(0)
        return (total / known).float()

    def _read(self, start: int, stop: int, columns: Any = ()) -> torch.Tensor:
        part: torch.Tensor = self.stored[(slice(start, stop), *columns)]
        return part


def by_token(model: Any) -> set[int]:
    """Return Python's ids of the parameters with a row for each token: of embedding and head."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = [parameter for layer in layers if layer is not None for parameter in layer.parameters()]
    return {id(parameter) for parameter in found}


def grow_whole(model: Any, growth: Growth) -> None:
    """Give a whole model in memory, which has the rows of its files, those of `growth`."""
    stored = {name: model.get_parameter(name).detach().clone() for name in _names_by_token(model)}
    if growth.added:
        model.resize_token_embeddings(growth.rows, mean_resizing=False)
    with torch.no_grad():
        for name, before in stored.items():
            after = model.get_parameter(name)
            GrownRows(before, growth).copy_to(after, tuple(slice(0, size) for size in after.shape))


def _names_by_token(model: Any) -> list[str]:
    ids = by_token(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) in ids]
