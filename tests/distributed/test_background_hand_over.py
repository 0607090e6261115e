"""Servers that load weights slowly, in the background of a run: it learns what it does without them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ahead_runs import (
    ROLLOUT,
    STEP,
    STEPS_PER_ROLLOUT,
    figures,
    grpo,
    plan_ahead,
    require_equal,
    train_alone,
)
from tests.distributed.ranks import run_plans
from tests.distributed.setups import SAVED_TWICE, UNSAVED, copy_checkpoint
from tests.harness import column, weights
from tests.tiny import read_model, tiny_model_dir
from tests.vllm_stub import StubServer

pytestmark = pytest.mark.timeout(900)
MAX_NEW_TOKENS = 6
# A reference is read, too, while servers load.
GRPO = grpo(MAX_NEW_TOKENS, ahead=1, kl={"coefficient": 0.05})


class SlowLoader(StubServer):
    """A server that needs a while to load weights, and answers nothing meanwhile."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.is_loading = False

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        assert self.at_once == 0, "no request is under way when weights change"
        self.is_loading = True
        time.sleep(0.5)
        super().load_state(state)
        self.is_loading = False

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.is_loading, "nothing is asked before it has the weights"
        return super().complete(body)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("background")
    tiny_model_dir(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    """The run of one process that samples by itself, with a checkpoint after each rollout."""
    return train_alone(root, GRPO)


def sampler(server: StubServer, transport: str) -> dict[str, Any]:
    options = {"url": server.url, "max_new_tokens": MAX_NEW_TOKENS, "transport": transport}
    return {**GRPO, "generator": {"kind": "vllm", **options}}


@pytest.mark.parametrize(("transport", "world_size"), [("folder", 1), ("network", 2)])
def test_slow_hand_overs_change_nothing(
    root: Path, alone: Path, transport: str, world_size: int
) -> None:
    with SlowLoader(read_model(root / "model")) as server:
        path = plan_ahead(root, transport, world_size, sampler(server, transport), UNSAVED)
        run_plans([path], world_size)
        assert server.loads == 5, "one hand-over a rollout"
    require_equal(path.parent, alone, 1e-4)
    # Each was compared with the policy, which had not changed by then.
    gaps = column(path.parent, "sampler_gap", "rollout")
    assert max(gaps) < 1e-4


def test_a_resumed_run_hands_over_what_the_first_would_have(root: Path, alone: Path) -> None:
    with SlowLoader(read_model(root / "model")) as server:
        path = plan_ahead(root, "resumed", 1, sampler(server, "folder"), SAVED_TWICE)
        copy_checkpoint(alone, path, 4)
        run_plans([path], 1)
    done = 4 // STEPS_PER_ROLLOUT
    for kind, keys, first in (("step", STEP, 4), ("rollout", ROLLOUT, done)):
        found = figures(path.parent, kind, keys)
        expected = figures(alone, kind, keys)[first:]
        assert len(found) == len(expected)
        for values, wanted in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    learned = weights(path.parent)
    for name, tensor in weights(alone).items():
        assert torch.allclose(learned[name], tensor, rtol=1e-4, atol=1e-5), name
