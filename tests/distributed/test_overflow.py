"""fp16: an overflow that one rank makes, or that lies in one rank's shard alone, is one to all: none steps, all scales fall alike."""

from __future__ import annotations

import json

import pytest

from tests.distributed.overflow_worker import SCALE, WAYS
from tests.distributed.ranks import run_module
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, object]]]]:
    folder = tmp_path_factory.mktemp("overflow")
    run_module("tests.distributed.overflow_worker", [tiny_model_dir(folder / "model"), folder], 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_agree(ranks: list[dict[str, list[dict[str, object]]]], way: str) -> None:
    first, second = (rank[way] for rank in ranks)
    assert first == second
    *overflows, good = first
    assert [o["how"] for o in overflows] == ["a loss"] + ["an entry of one shard"] * (way != "ddp")
    for count, overflow in enumerate(overflows, start=1):
        assert (
            not overflow["finite"] and overflow["still"] and overflow["scale"] == SCALE / 2**count
        )
    assert good["finite"] and not good["still"]
