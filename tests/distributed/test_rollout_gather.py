"""Rollouts over 1, 2 and 3 real ranks give what one process gives: no request lost or done twice, every rank with all completions.

And two ranks hand their weights to one server: rank 0 writes them, neither goes on before the server has them, both hear of a failure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.rl.generate import Request, assign_requests
from tests.distributed.ranks import run_module
from tests.tiny import tiny_model_dir
from tests.vllm_stub import StubServer


def requests(lengths: list[int]) -> list[Request]:
    return [Request([5] * length, (index, 0)) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_each_request_is_dealt_once_and_evenly(ranks: int) -> None:
    lengths = [(7 * i) % 40 + 1 for i in range(37)]
    shares = assign_requests(requests(lengths), ranks)
    assert sorted(index for share in shares for index in share) == list(range(37))
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
    expected = json.loads((tmp_path / "1-0.json").read_text())
    assert len(expected["many"]) == 7 and expected["none"] == []
    for world in (2, 3):
        for rank in range(world):
            found = json.loads((tmp_path / f"{world}-{rank}.json").read_text())
            for name, completions in expected.items():
                assert len(found[name]) == len(completions), (world, rank, name)
                for (tokens, log_probs, ended), (tokens_1, log_probs_1, ended_1) in zip(
                    found[name], completions, strict=True
                ):
                    assert (tokens, ended) == (tokens_1, ended_1)
                    assert log_probs == pytest.approx(log_probs_1, abs=1e-5)
    assert {ended for _, _, ended in expected["many"]} == {True, False}, (
        "both kinds of ends went round"
    )


def test_two_ranks_hand_one_server_their_weights(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_dir(tmp_path / "model")
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with StubServer(served) as server:
        run_module("tests.distributed.rollout_worker", [folder, tmp_path / "out", server.url], 2)
        loads = [path for path, _ in server.asked if path != "/v1/completions"]
        assert loads == ["/collective_rpc", "/reset_prefix_cache"], "once, by rank 0"
    found = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["expected"] == found[0]["made"] == found[1]["made"], "by the new weights"
    assert (
        "weights cannot be written" in found[0]["failure"]
        and "rank 0 could not" in found[1]["failure"]
    )
