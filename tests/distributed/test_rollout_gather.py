"""Rollouts over 1, 2 and 3 real ranks give what one process gives: no request lost or done twice,
every rank with all completions.

And two ranks hand their weights to one server: rank 0 writes them, neither goes on before the
server has them, both hear of a failure.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from drumline.rl.generate import Request, assign_requests
from tests.distributed.ranks import run_module
from tests.harness import read_json
from tests.tiny import read_model, tiny_model_dir
from tests.vllm_stub import HAND_OVER, StubServer


def requests(lengths: list[int]) -> list[Request]:
    return [Request([5] * length, (index, 0)) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_each_request_is_dealt_once_and_evenly(ranks: int) -> None:
    lengths = [(7 * i) % 40 + 1 for i in range(37)]
    shares = assign_requests(requests(lengths), ranks)
    assert sorted(chain(*shares)) == list(range(37))
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_equal_prompts_are_dealt_round_and_idle_ranks_get_none() -> None:
    assert [len(share) for share in assign_requests(requests([4] * 8), 3)] == [3, 3, 2]
    assert assign_requests(requests([4]), 3) == [[0], [], []]
    assert assign_requests([], 2) == [[], []]


def test_any_number_of_ranks_gives_the_completions_of_one(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    for world in (1, 2, 3):
        run_module("tests.distributed.rollout_worker", [model, tmp_path / f"{world}"], world)
    expected = read_json(tmp_path / "1-0.json")
    assert len(expected["many"]) == 7
    assert expected["none"] == []
    for world in (2, 3):
        for rank in range(world):
            found = read_json(tmp_path / f"{world}-{rank}.json")
            for name, completions in expected.items():
                same_completions(found[name], completions)
    # Both kinds of ends went round.
    assert {ended for _, _, ended in expected["many"]} == {True, False}


def same_completions(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Tokens and ends are equal, log-probs near."""
    for (tokens, log_probs, ended), other in zip(found, expected, strict=True):
        assert [tokens, ended] == [other[0], other[2]]
        assert log_probs == pytest.approx(other[1], abs=1e-5)


def test_two_ranks_hand_one_server_their_weights(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_dir(tmp_path / "model")
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with StubServer(served) as server:
        run_module("tests.distributed.rollout_worker", [folder, tmp_path / "out", server.url], 2)
        loads = [path for path, _ in server.asked if path != "/v1/completions"]
        assert loads == HAND_OVER * 2, "each time by rank 0 alone"
    first, second = (read_json(tmp_path / f"out-{rank}.json") for rank in range(2))
    assert first["made"] == first["expected"], "by the new weights"
    assert second["made"] == first["made"]
    assert "weights cannot be written" in first["failure"]
    assert "rank 0 could not" in second["failure"]


@pytest.mark.slow
def test_two_ranks_share_what_they_know_of_two_servers(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    with StubServer(read_model(folder)) as server, StubServer(read_model(folder)) as other:
        other.dies_after = 1
        urls = [server.url, other.url]
        run_module("tests.distributed.rollout_worker", [folder, tmp_path / "out", *urls], 2)
    first, second = (read_json(tmp_path / f"out-{rank}.json") for rank in range(2))
    assert first["made"] == first["expected"]
    assert second["made"] == first["made"]
    assert first["lost"] == second["lost"] == [other.url]


@pytest.mark.slow
def test_two_ranks_sample_again_what_a_restarted_server_sampled(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    with StubServer(read_model(folder)) as server:
        server.restarts_after = {2}
        run_module("tests.distributed.rollout_worker", [folder, tmp_path / "out", server.url], 2)
        # Handed over at the beginning, after the restart, and before the end.
        assert len(server.bodies("/collective_rpc")) == 3
    first, second = (read_json(tmp_path / f"out-{rank}.json") for rank in range(2))
    assert first["made"] == first["expected"]
    assert second["made"] == first["made"]
