"""What goes with what: every cell has an answer, and the table, the schema and the error line give the same one."""

from __future__ import annotations

import pytest

from drumline.config.load import load_text
from drumline.config.registry import kinds
from drumline.config.strategy import StrategyConfig
from drumline.errors import ConfigError, UserError
from drumline.planner.matrix import FEATURES, as_markdown, as_text, as_text_of, matrix, strategies

DATA = "data: {train: [{kind: file, path: rows.jsonl}]}\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cell_has_an_answer(device: str) -> None:
    table = matrix(device)
    assert list(table) == list(FEATURES)

    for row in table.values():
        assert list(row) == list(strategies())
        for reason, instead in row.values():
            assert bool(reason) == bool(instead)

    for kind in ("ddp", "fsdp2", "zero3"):
        reason, _ = table["LoRA"][kind]
        assert not reason


def test_every_strategy_has_a_row() -> None:
    assert {*kinds(StrategyConfig)} - {"auto"} == set(strategies())


def test_the_config_refuses_with_the_words_of_the_table() -> None:
    (refusal,) = (refusal for refusal in strategies()["zero3"].lacks if refusal.name == "tp")
    with pytest.raises(ConfigError) as error:
        load_text(DATA + "strategy: {kind: zero3, tp: 2}\n", [], "c.yaml")

    line = error.value.line()
    assert line.startswith("c.yaml:2: strategy.tp")
    assert refusal.reason in line
    assert refusal.instead in line


def assert_narrow(text: str) -> None:
    """Check that a text fits a terminal of 80 columns."""
    for line in text.splitlines():
        assert len(line) <= 80


def test_the_table_is_printed_whole() -> None:
    text = as_text("cpu")
    markdown = as_markdown("cpu")
    for name in (*strategies(), *FEATURES):
        assert name in text
        assert name in markdown

    assert_narrow(text)


def test_one_strategy_has_each_option_with_its_reason() -> None:
    text = as_text_of("zero3", "cuda")
    words = " ".join(text.split())
    for option, row in matrix("cuda").items():
        reason, instead = row["zero3"]
        assert option in text
        assert reason in words
        assert instead in words

    assert_narrow(text)

    with pytest.raises(UserError, match="did you mean 'zero3'"):
        as_text_of("zero33", "cuda")
