"""What processes of rewards and environments take of a host, held against what the planner says."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from drumline.config.rollouts import Environment, IsolatedReward
from drumline.planner.cost.rollouts import FORK_BYTES, GUARD_BYTES, PACKAGE_BYTES, WORKER_BYTES
from drumline.rl.environments import Environments
from drumline.rl.rewards import EpisodeText, RewardProcess

TOOLS = Path(__file__).parents[2] / "examples" / "tools" / "tools.py"
ENVIRONMENT = {
    "kind": "tools",
    "functions": [f"{TOOLS}:calculate"],
    "turns": 2,
    "max_tokens": 256,
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's share of pages")
@pytest.mark.parametrize("kind", ["regex", "math", "task"])
def test_a_process_of_rewards_takes_what_is_planned(kind: str, tmp_path: Path) -> None:
    pytest.importorskip({"regex": "re", "math": "math_verify", "task": "reasoning_gym"}[kind])
    section = {"kind": "regex", "pattern": "a"} if kind == "regex" else {"kind": kind}
    adapter: TypeAdapter[IsolatedReward] = TypeAdapter(IsolatedReward)
    reward = adapter.validate_python(section)
    entry = {"answer": "2", "metadata": {"source_dataset": "basic_arithmetic"}}
    meta = {"answer": "2", "task": "basic_arithmetic", "entry": entry}
    process = RewardProcess({0: reward}, tmp_path)
    try:
        process.wait_until_ready()
        process.score(0, EpisodeText("1 + 1 =", "\\boxed{2}", 4, meta), 300.0)
        shares = [each.memory_full_info().pss for each in family(process.process.pid)]
    finally:
        process.kill()
    assert len(shares) == 2
    planned = GUARD_BYTES + WORKER_BYTES + PACKAGE_BYTES.get(kind, 0)
    # Processes that run elsewhere change how pages are shared, and packages change with their versions.
    assert 0.5 * planned < sum(shares) < 1.25 * planned


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's share of pages")
def test_an_environment_takes_what_is_planned(tmp_path: Path) -> None:
    adapter: TypeAdapter[Environment] = TypeAdapter(Environment)
    environments = Environments(adapter.validate_python(ENVIRONMENT), tmp_path)
    numbers = range(12)
    try:
        environments.tools()
        environments.reset(
            {number: {"messages": [], "row": {}} for number in numbers},
            {number: number for number in numbers},
        )
        shares = [each.memory_full_info().pss for each in family(environments._server.process.pid)]
    finally:
        environments.close()
    assert len(shares) == 2 + len(numbers)
    planned = GUARD_BYTES + WORKER_BYTES + len(numbers) * FORK_BYTES
    assert 0.5 * planned < sum(shares) < 1.25 * planned


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
