"""Runs that sample on a real vLLM 0.32 on the CPU: of a model whose head is a weight of its own, in
turns with an environment, ahead of what is learned, killed and resumed, and with servers that hang or
die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.live import gone, kill, wait_for
from tests.harness import (
    LETTERS,
    PATIENCE,
    column,
    drumline,
    events,
    start_drumline,
    weights_at,
)
from tests.loopback import until
from tests.servers.sampling import (
    FSDP2,
    NETWORK,
    REQUESTS,
    ROUNDING,
    SECONDS_OF_A_RUN,
    TENSOR_PARALLEL,
    TOKENS_OF_A_PROBE,
    client,
    mean_gap,
    train_two_rollouts,
    write_grpo,
)
from tests.servers.server import NEEDS_VLLM, RealServer
from tests.tiny import read_model, tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(2400), NEEDS_VLLM]
SECONDS = SECONDS_OF_A_RUN * PATIENCE
# The most time of a request in runs with a server that hangs. A request to one that works takes less.
TIMEOUT = 60 * PATIENCE
# The most that rounding explains at a single token, in nats: ROUNDING is of a mean.
LARGEST_ROUNDING = 10 * ROUNDING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64, and a head of the vocabulary that is not its embedding."""
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "llama", hidden=256, tied=False)


@pytest.fixture(scope="module")
def second_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Another server of the same model."""
    server = RealServer(model, tmp_path_factory.mktemp("second") / "log.txt")
    yield server
    server.stop()


@pytest.fixture
def second_server(second_process: RealServer) -> Iterator[RealServer]:
    """The other server of this file, with the weights that it was first started with."""
    if not second_process.start():
        second_process.restore()
    yield second_process
    second_process.wake()


def train(config: Path, *overrides: object) -> None:
    """Train to the end of the run."""
    finished = drumline("train", config, *overrides, timeout=SECONDS_OF_A_RUN)
    assert finished.code == 0, finished.out + finished.err


def policy_after(run: Path, step: int, model: Path, *kept: str) -> Any:
    """Return the policy of a run after a step; the weights `kept` are those of the first policy."""
    saved = weights_at(run / "checkpoints" / f"step-{step:08}")
    policy = read_model(model)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name not in kept:
                parameter.copy_(saved[f"model.{name}"])
    return policy


@pytest.mark.parametrize(
    ("transport", "sections"),
    [({}, {}), ({}, TENSOR_PARALLEL), (NETWORK, {}), (NETWORK, FSDP2)],
    ids=["alone", "tp", "network", "network-fsdp2"],
)
def test_a_server_gets_a_head_of_its_own(
    server: RealServer, tmp_path: Path, transport: dict[str, Any], sections: dict[str, Any]
) -> None:
    every_step = {"every": 1, "export": "none"}
    config = write_grpo(tmp_path, server, transport, checkpoint=every_step, **sections)
    train_two_rollouts(config)

    assert server.weight_version().endswith("-1"), "of the second hand-over"

    completions = client(server, weights="none").generate(REQUESTS, 5)
    run = tmp_path / "run"
    learned = policy_after(run, 1, server.model)
    with_old_head = policy_after(run, 1, server.model, "lm_head.weight")

    assert mean_gap(learned, completions) < ROUNDING
    assert mean_gap(with_old_head, completions) > 2 * ROUNDING


IN_TURNS: dict[str, Any] = {
    "environment": {
        "kind": "class",
        "path": "tests.episodes:Vowels",
        "turns": 4,
        "max_tokens": 128,
        "timeout_seconds": 60,
    },
    "rewards": [{"kind": "environment"}],
}


@pytest.mark.parametrize(
    ("transport", "sections"), [({}, {}), (NETWORK, FSDP2)], ids=["alone", "network-fsdp2"]
)
def test_an_episode_of_several_turns_is_sampled_on_a_server(
    server: RealServer, tmp_path: Path, transport: dict[str, Any], sections: dict[str, Any]
) -> None:
    # Some turns end, at a vowel, and the others are cut.
    generator = {"stop": list("aeiou"), **transport}
    config = write_grpo(tmp_path, server, generator, IN_TURNS, **sections)
    train_two_rollouts(config)

    run = tmp_path / "run"

    assert min(column(run, "turns", "rollout")) > 1
    assert min(column(run, "ended", "rollout")) > 0
    assert column(run, "failures", "rollout") == [{}, {}]
    # The server has read the turns as the tokens that the policy learns from, behind all before them.
    assert max(column(run, "sampler_log_ratio_max")) < LARGEST_ROUNDING
    assert min(column(run, "grad_norm")) > 0

    longest = max(shown_messages(run), key=len)

    assert [message["role"] for message in longest[:4]] == ["user", "assistant"] * 2


def shown_messages(run: Path) -> list[Any]:
    """Return the conversations of the shown episodes of a run."""
    found = []
    for event in events(run, "completions"):
        for episode in event["completions"]:
            found.append(episode["messages"])
    return found


STEPS_AHEAD = 8
STALENESS = [0, 1, *[2] * 6]


def write_ahead(folder: Path, server: RealServer, generator: dict[str, Any]) -> Path:
    """Write the config of eight rollouts, each of a step, of which two are sampled ahead."""
    return write_grpo(
        folder,
        server,
        {"max_new_tokens": 48, **generator},
        # Long completions have all letters, so how many of them there are is what differs.
        {"ahead": 2, "rewards": [LETTERS]},
        run={"steps": STEPS_AHEAD},
        checkpoint={"every": 2, "export": "none"},
    )


def require_scheduled(run: Path) -> None:
    """Assert that rollouts were sampled by the weights of their steps, and differ from later weights."""
    assert column(run, "staleness", "rollout") == STALENESS

    versions = []
    for event in events(run, "completions"):
        versions.append({each["version"] for each in event["completions"]})

    assert versions == [{step - old} for step, old in enumerate(STALENESS)]

    first, *later = column(run, "sampler_log_ratio_max")

    assert first < LARGEST_ROUNDING
    assert min(later) > LARGEST_ROUNDING
    assert column(run, "sampler_gap", "rollout")[0] < ROUNDING


def last_figures(run: Path, kind: str, *keys: str) -> dict[int, list[Any]]:
    """Return step → figures of the last event of a kind at that step."""
    found = {}
    for event in events(run, kind):
        found[event["step"]] = [event[key] for key in keys]
    return found


def require_same_episodes(run: Path, alone: Path) -> None:
    """Assert that two runs learned from the same episodes, as far as rounding lets a server repeat them."""
    episodes = last_figures(alone, "rollout", "reward", "length", "length_max", "drawn", "episodes")

    assert last_figures(run, "rollout", "reward", "length", "length_max", "drawn", "episodes") == (
        episodes
    )

    steps = last_figures(alone, "step", "loss", "grad_norm", "tokens")
    found = last_figures(run, "step", "loss", "grad_norm", "tokens")

    assert found.keys() == steps.keys()

    for step, figures in steps.items():
        assert found[step] == pytest.approx(figures, rel=1e-3, abs=1e-4), step


def test_rollouts_are_sampled_ahead_on_a_server(server: RealServer, tmp_path: Path) -> None:
    train(write_ahead(tmp_path, server, NETWORK))
    require_scheduled(tmp_path / "run")

    assert not (tmp_path / "run" / "rollout-weights").exists()


def test_episodes_of_turns_are_sampled_ahead_on_a_server(
    server: RealServer, tmp_path: Path
) -> None:
    generator = {"stop": list("aeiou"), **NETWORK}
    train(write_grpo(tmp_path, server, generator, {**IN_TURNS, "ahead": 1}, run={"steps": 4}))
    run = tmp_path / "run"

    assert column(run, "staleness", "rollout") == [0, 1, 1, 1]
    assert column(run, "failures", "rollout") == [{}] * 4
    assert min(column(run, "turns", "rollout")) > 1

    first, *later = column(run, "sampler_log_ratio_max")

    assert first < LARGEST_ROUNDING
    assert min(later) > LARGEST_ROUNDING


def test_a_run_ahead_that_is_killed_goes_on_with_the_same_episodes(
    server: RealServer, tmp_path: Path
) -> None:
    config = write_ahead(tmp_path, server, {})
    alone = tmp_path / "alone"
    run = tmp_path / "run"
    train(config, f"run.dir={alone}")
    require_scheduled(alone)

    server.restore()
    process = start_drumline("train", config, f"run.dir={run}")
    wait_for(run, "save", 2, process, timeout=SECONDS)
    wait_for(run, "step", 3, process, timeout=SECONDS)
    kill(process.pid)
    process.communicate(timeout=SECONDS)

    assert gone(run, 30.0), "ranks outlived their launcher"
    assert max(column(run, "step")) < STEPS_AHEAD
    assert not events(run, "run_end")

    # The server has the weights of the killed run, and may still answer its requests.
    train(config, f"run.dir={run}", "--resume")

    assert column(run, "step", "restore")[-1] in (2, 4)
    require_same_episodes(run, alone)


# A reward that is not given while there is a file `hold` beside its own, and leaves a file `held`.
HOLDING = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent

def share_of_vowel(prompt, completion, **_):
    while (FOLDER / "hold").exists():
        (FOLDER / "held").touch()
        time.sleep(0.1)
    return completion.count("e") / max(1, len(completion))
"""


def write_held(folder: Path, server: RealServer, urls: list[str]) -> Path:
    """Write the config of three rollouts whose rewards wait while there is a file `hold`."""
    folder.mkdir()
    (folder / "holding.py").write_text(HOLDING)
    reward = {
        "kind": "function",
        "path": "holding.py:share_of_vowel",
        # As long as a server needs to start.
        "timeout_seconds": 1500,
    }
    generator = {"url": urls, "max_new_tokens": 256, "timeout_seconds": TIMEOUT}
    return write_grpo(folder, server, generator, {"rewards": [reward]}, run={"steps": 3})


@pytest.mark.parametrize(
    ("hurt", "heal", "reason"),
    [
        (methodcaller("kill"), methodcaller("start"), "/v1/completions: "),
        (
            methodcaller("hang"),
            methodcaller("wake"),
            f"/v1/completions took longer than {TIMEOUT:g} s",
        ),
    ],
    ids=["killed", "hangs"],
)
def test_a_server_that_is_lost_in_a_rollout_comes_back(
    server: RealServer,
    second_server: RealServer,
    tmp_path: Path,
    hurt: Callable[[RealServer], Any],
    heal: Callable[[RealServer], Any],
    reason: str,
) -> None:
    alone = write_held(tmp_path / "alone", server, [server.url])
    train(alone)
    server.restore()

    both = write_held(tmp_path / "both", server, [server.url, second_server.url])
    hold = both.parent / "hold"
    hold.touch()
    before = second_server.generated_tokens()
    run = start_drumline("train", both)

    def is_in_the_rollout() -> bool:
        more = second_server.generated_tokens() - before
        return more > TOKENS_OF_A_PROBE + 16 or run.poll() is not None

    until(is_in_the_rollout, SECONDS)
    hurt(second_server)
    until(lambda: (both.parent / "held").exists() or run.poll() is not None, SECONDS + TIMEOUT)
    heal(second_server)
    tokens_then = second_server.generated_tokens()
    hold.unlink()
    out, err = run.communicate(timeout=SECONDS)

    assert run.returncode == 0, out + err

    first, *later = column(both.parent / "run", "lost_servers", "rollout")
    (why,) = first.values()

    assert list(first) == [second_server.url]
    assert reason in why
    assert later == [{}, {}]
    assert second_server.generated_tokens() > tokens_then + 2 * TOKENS_OF_A_PROBE
    assert f"lost: {second_server.url}" in out
    assert max(column(both.parent / "run", "sampler_gap", "rollout")) < ROUNDING
    require_same_episodes(both.parent / "run", alone.parent / "run")


def test_a_run_whose_only_server_hangs_ends_in_one_line(server: RealServer, tmp_path: Path) -> None:
    before = server.generated_tokens()
    generator = {"max_new_tokens": 384, "timeout_seconds": TIMEOUT}
    config = write_grpo(tmp_path, server, generator, launch={"max_restarts": 0})
    run = start_drumline("train", config)

    def is_in_the_rollout() -> bool:
        more = server.generated_tokens() - before
        return more > TOKENS_OF_A_PROBE + 32 or run.poll() is not None

    until(is_in_the_rollout, SECONDS)
    server.hang()
    try:
        _, err = run.communicate(timeout=SECONDS + TIMEOUT)
    finally:
        server.wake()

    (line,) = [line for line in err.splitlines() if line.startswith("error:")]

    assert run.returncode != 0
    assert f"POST {server.url}/v1/completions took longer than {TIMEOUT:g} s" in line
    assert "raise timeout_seconds" in line
    assert "Traceback" not in err

    # It goes on when it is woken.
    assert client(server, weights="none").generate(REQUESTS, 5)
