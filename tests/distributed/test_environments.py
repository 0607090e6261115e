"""Episodes of several turns are the same however the model is spread: the same turns, rewards and
losses as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rows import TOOLS
from tests.distributed.setups import (
    EIGHT_BY_TWO,
    UNSAVED,
    asked_for,
    cases,
    plan_in,
    same_evaluations,
    train,
)
from tests.episodes import SPELLED
from tests.harness import LETTERS, column, events
from tests.tiny import tiny_calling_dir, tiny_model_dir

pytestmark = pytest.mark.timeout(600)
ENVIRONMENT = {
    "kind": "class",
    "path": "tests.episodes:Vowels",
    "turns": 4,
    "max_tokens": 64,
    # On a machine that is busy with other tests.
    "timeout_seconds": 60,
}
COMMON: dict[str, Any] = {
    "group_size": 4,
    "loss_chunk": 32,
    "environment": ENVIRONMENT,
    # Some turns end, at a vowel, and the others are cut.
    "generator": {"kind": "hf", "max_new_tokens": 6, "stop": list("aeiou")},
}
REWARDS = [{"kind": "environment"}, {"kind": "length", "free": 2, "limit": 20, "weight": 0.5}]
GRPO = {"kind": "grpo", "importance": "token", "rewards": REWARDS, **COMMON}
PPO = {"kind": "ppo", "epochs": 2, **COMMON}
BY_TURN = {"credit": "turn"}
WITH_TOOLS = {
    **GRPO,
    "environment": TOOLS,
    # The second one is of whole episodes, which are longer with calls.
    "rewards": [LETTERS, {"kind": "length", "free": 2, "limit": 20}],
}
FSDP2_BY_TP = {"kind": "fsdp2", "tp": 2}
# name → processes, strategy, algorithm
ROWS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "grpo single": (1, "single", GRPO),
    "grpo ddp": (2, "ddp", GRPO),
    "grpo fsdp2": (2, "fsdp2", GRPO),
    "ppo single": (1, "single", PPO),
    "ppo ddp": (2, "ddp", PPO),
    "grpo-by-turn single": (1, "single", GRPO | BY_TURN),
    "grpo-by-turn ddp": (2, "ddp", GRPO | BY_TURN),
    "ppo-by-turn single": (1, "single", PPO | BY_TURN),
    "ppo-by-turn ddp": (2, "ddp", PPO | BY_TURN),
    "tools single": (1, "single", WITH_TOOLS),
    "tools ddp": (2, "ddp", WITH_TOOLS),
    "tools fsdp2": (2, "fsdp2", WITH_TOOLS),
    "grpo ddp-4": (4, "ddp", GRPO),
    "grpo fsdp2-x-tp": (4, FSDP2_BY_TP, GRPO),
    "ppo ddp-4": (4, "ddp", PPO),
    "grpo-by-turn ddp-4": (4, "ddp", GRPO | BY_TURN),
    "tools ddp-4": (4, "ddp", WITH_TOOLS),
    "tools fsdp2-x-tp": (4, FSDP2_BY_TP, WITH_TOOLS),
}
SPREAD = [name for name, (world_size, _, _) in ROWS.items() if world_size > 1]
# With --full.
AGAIN = ("tools fsdp2", *(name for name, (world_size, _, _) in ROWS.items() if world_size == 4))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("environments")
    model = tiny_model_dir(root / "model", layers=2)
    calling = tiny_calling_dir(root / "calling")
    plans = []
    for name, (world_size, strategy, algorithm) in asked_for(request, ROWS, AGAIN).items():
        has_tools = algorithm is WITH_TOOLS
        path = plan_in(
            root,
            name,
            world_size,
            calling if has_tools else model,
            algorithm=algorithm,
            strategy=strategy,
            data={"max_length": 256 if has_tools else 128},
            batch=EIGHT_BY_TWO,
            optimizer={"lr": 3e-3},
            run={"steps": 4},
            checkpoint=UNSAVED,
        )
        plans.append(path)
    train(plans)
    return root


@pytest.mark.claim("episodes with environments are the same on any number of processes")
@pytest.mark.parametrize("name", cases(SPREAD, AGAIN))
def test_same_episodes_and_losses_as_one_process(runs: Path, name: str) -> None:
    kind, _ = name.split()
    mine = runs / name / "run"
    alone = runs / f"{kind} single" / "run"
    for key in ("reward", "reward_std", "length", "ended", "groups_differ", "turns"):
        expected = column(alone, key, "rollout")
        assert column(mine, key, "rollout") == pytest.approx(expected, abs=1e-6), key
    for key in ("prompts", "episodes", "failures", "tool_calls", "tool_errors"):
        assert column(mine, key, "rollout") == column(alone, key, "rollout"), key
    shown = []
    for run in (mine, alone):
        for event in events(run, "completions"):
            for episode in event["completions"]:
                shown.append(episode["messages"])
    half = len(shown) // 2
    assert shown[:half] == shown[half:]
    assert column(mine, "loss") == pytest.approx(column(alone, "loss"), abs=1e-5)
    expected = column(alone, "grad_norm")
    assert column(mine, "grad_norm") == pytest.approx(expected, rel=1e-4)
    assert column(mine, "tokens") == column(alone, "tokens")
    same_evaluations(mine, alone, 1e-6, "reward")


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_credit_by_turn_is_other_learning_from_the_same_episodes(runs: Path, kind: str) -> None:
    by_episode = runs / f"{kind} single" / "run"
    by_turn = runs / f"{kind}-by-turn single" / "run"
    # The first rollout is of the same policy.
    assert column(by_turn, "reward", "rollout")[0] == column(by_episode, "reward", "rollout")[0]
    norm = column(by_episode, "grad_norm")[0]
    # Equal learning would agree within this, as it does on other numbers of processes.
    assert column(by_turn, "grad_norm")[0] != pytest.approx(norm, rel=1e-4)


def test_episodes_have_several_turns(runs: Path) -> None:
    run = runs / "grpo single" / "run"
    assert max(column(run, "turns", "rollout")) > 1.1
    assert 0 < min(column(run, "ended", "rollout")) < 1
    roles = []
    for event in events(run, "completions"):
        for episode in event["completions"]:
            roles.append([message["role"] for message in episode["messages"]])
    assert max(map(len, roles)) > 3
    for of_episode in roles:
        assert of_episode[:2] == ["user", "assistant"]


def test_episodes_have_calls_and_their_results(runs: Path) -> None:
    run = runs / "tools single" / "run"
    assert max(column(run, "tool_calls", "rollout")) > 0.1
    assert max(column(run, "tool_errors", "rollout")) > 0
    results = []
    for event in events(run, "completions"):
        for episode in event["completions"]:
            letters = []
            for message in episode["messages"]:
                for call in message.get("tool_calls", ()):
                    letters.append(call["function"]["arguments"]["letter"])
                if message["role"] == "tool":
                    results.append((letters.pop(0), message["content"]))
    assert results
    for letter, content in results:
        assert content == SPELLED.get(letter) or (letter == "u" and "KeyError" in content)
