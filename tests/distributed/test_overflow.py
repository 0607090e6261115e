"""fp16: an overflow that one rank makes, or that lies in one rank's shard alone, is one to all:
none steps, all scales fall alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.overflow_worker import SCALE, WAYS
from tests.distributed.ranks import run_module
from tests.harness import read_json
from tests.tiny import tiny_model_dir

Said = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    folder = tmp_path_factory.mktemp("overflow")
    run_module("tests.distributed.overflow_worker", [tiny_model_dir(folder / "model"), folder], 2)
    return [read_json(folder / f"{rank}.json") for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_agree(ranks: list[Said], way: str) -> None:
    first, second = (rank[way] for rank in ranks)
    assert first == second
    *overflows, good = first
    expected = ["a loss"]
    if way != "ddp":
        expected.append("an entry of one shard")
    assert [overflow["how"] for overflow in overflows] == expected
    for count, overflow in enumerate(overflows, start=1):
        assert not overflow["finite"]
        assert overflow["still"]
        assert overflow["scale"] == SCALE / 2**count
    assert good["finite"]
    assert not good["still"]
