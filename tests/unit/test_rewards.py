"""Rewards in real processes: what a reward that misbehaves costs, that nothing is left behind, and what is refused before training."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.config.rollouts import LengthReward, Reward
from drumline.errors import ConfigError, EnvironmentFault
from drumline.rl.rewards import (
    START_SECONDS,
    EpisodeText,
    RewardProcess,
    Rewards,
    check_importable,
    count_reasons,
    length_penalty,
    reward_names,
)
from tests.harness import ENV, drumline, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow

FUNCTIONS = r"""
import os, subprocess, sys, time

def length(prompt, completion):
    return len(completion)

def right(prompt, completion, answer, scale=1.0):
    return scale * (completion == answer)

def everything(prompt, completion, **columns):
    return len(columns)

def naughty(prompt, completion):
    if completion == "raise": raise ValueError("not today")
    if completion == "hang": time.sleep(60)
    if completion == "exit": os._exit(3)
    if completion == "leave": sys.exit(4)
    if completion == "crash": os.kill(os.getpid(), 11)
    if completion == "nan": return float("nan")
    if completion == "text": return "1.0"
    if completion == "none": return None
    if completion == "print": print("x" * 2_000_000)
    if completion == "child":
        child = subprocess.Popen(["sleep", "60"])
        open("child.pid", "w").write(str(child.pid))
        time.sleep(60)
    return 1.0

def huge(prompt, completion):
    return float(completion)

def scribbles(prompt, completion):
    # On every descriptor but the usual three.
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and completion == "close": os.close(fd)
            elif fd > 2 and completion.startswith("write "): os.write(fd, eval(completion[6:]))
        except OSError:
            pass
    return 1.0

def daemon(prompt, completion):
    # Leaves a process behind that has another parent and a session of its own.
    code = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n" \
        "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    subprocess.run([sys.executable, "-c", code, completion])
    while not os.path.exists(completion) or not open(completion).read(): time.sleep(0.01)
    if completion.endswith("crash"): os.kill(os.getpid(), 9)
    return float(open(completion).read())

def wants(prompt, completion, solution):
    return 1.0

def pid(prompt, completion):
    return os.getpid()

async def later(prompt, completion):
    return 1.0

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def reward(**values: Any) -> Reward:
    return TypeAdapter(Reward).validate_python(values)


def mine(function: str, **values: Any) -> Reward:
    return reward(kind="function", path=f"mine.py:{function}", **values)


def items(*completions: str, **meta: Any) -> list[EpisodeText]:
    return [EpisodeText("what?", completion, len(completion), meta) for completion in completions]


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_failures_are_grouped_by_type_and_place() -> None:
    reasons = [
        "raised KeyError in mine.py:3: <object at 0x7f01>",
        "raised KeyError in mine.py:3: <object at 0x7f02>",
        "raised KeyError in mine.py:9: <object at 0x7f02>",
        "returned nan",
        "returned inf",
    ]
    counts = count_reasons(reasons)
    assert counts == {reasons[0]: 2, reasons[2]: 1, "returned nan": 1, "returned inf": 1}


@pytest.mark.full
def test_misbehaviour_costs_its_sample_and_is_named(folder: Path) -> None:
    completions = [
        "ok",
        "raise",
        "hang",
        "exit",
        "leave",
        "crash",
        "nan",
        "text",
        "none",
        "print",
        "fine",
    ]
    with Rewards(
        [mine("naughty", timeout_seconds=9.0), mine("length", weight=0.5)], folder, workers=2
    ) as rewards:
        scored = rewards.score(items(*completions))
        again = rewards.score(items("ok"))
    failures = dict(zip(completions, (s.failures.get("naughty") for s in scored), strict=True))
    assert failures == {
        "ok": None,
        "raise": "raised ValueError in mine.py:14: not today",
        "hang": "timed out after 9 s",
        "exit": "ended its process (exit code 3)",
        "leave": "raised SystemExit in mine.py:17: 4",
        "crash": "crashed its process (SIGSEGV)",
        "nan": "returned nan",
        "text": "returned a str, not a number",
        "none": None,
        "print": None,
        "fine": None,
    }
    for completion, one in zip(completions, scored, strict=True):
        assert one.parts["length"] == len(completion), (
            "order is kept, and the other reward is not hurt"
        )
        has_value = "naughty" not in one.failures and completion != "none"
        assert math.isnan(one.parts["naughty"]) == (not has_value)
        if "naughty" in one.failures:
            assert math.isnan(one.value), "the sum is unknown"
        else:
            assert one.value == 0.5 * len(completion) + has_value
    assert again[0].value == 2.0


def test_what_decides_nothing_does_not_apply_for_the_others(folder: Path) -> None:
    """A penalty for length and a reward of weight 0 say nothing of an answer that no other reward judges."""
    length = LengthReward(free=1, limit=2)
    with Rewards([mine("naughty"), length, mine("length", weight=0)], folder, workers=1) as rewards:
        unjudged, judged = rewards.score(items("none", "fine"))
    assert not unjudged.applies and judged.applies
    with Rewards([length], folder, workers=1) as rewards:
        assert rewards.score(items("none"))[0].applies, "by itself it decides"


def test_only_its_own_process_is_lost(folder: Path) -> None:
    with Rewards([mine("pid"), mine("naughty", timeout_seconds=0.5)], folder, workers=1) as rewards:
        pids = [
            int(one.parts["pid"]) for one in rewards.score(items("ok", "ok", "hang", "ok", "ok"))
        ]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] and os.getpid() not in pids
    assert all(gone(pid) for pid in pids)


def test_what_a_reward_started_dies_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with Rewards([mine("naughty", timeout_seconds=2.0)], folder, workers=1) as rewards:
        assert rewards.score(items("child"))[0].failures
    assert gone(int((folder / "child.pid").read_text()))


def test_what_is_written_on_the_socket_costs_its_sample(folder: Path) -> None:
    junk = [
        'b"junk"',
        'b"junk\\n"',
        'b"\\xff" * 2_000_000',
        'b"[" * 90_000 + b"\\n"',
        'b"[]\\n"',
        """b'{"value": 5}\\n'""",
    ]
    with Rewards([mine("scribbles", timeout_seconds=10.0)], folder, workers=1) as rewards:
        before, *hurt, after = rewards.score(items("ok", *(f"write {text}" for text in junk), "ok"))
    assert before.value == after.value == 1.0
    assert [one.failures for one in hurt] == [
        {"scribbles": "wrote on a file descriptor that is not its own, or closed it"}
    ] * len(junk)


def test_a_closed_socket_costs_its_sample(folder: Path) -> None:
    with Rewards([mine("scribbles", timeout_seconds=10.0)], folder, workers=1) as rewards:
        hurt, after = rewards.score(items("close", "ok"))
    assert "scribbles" in hurt.failures and after.value == 1.0


def test_a_module_that_writes_on_the_socket_is_refused_before_training(folder: Path) -> None:
    loud = "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b'junk' + bytes([10]))\n    except OSError: pass\n"
    (folder / "loud.py").write_text(loud)
    with pytest.raises(EnvironmentFault, match="wrote on a file descriptor that is not its own"):
        RewardProcess({0: reward(kind="function", path="loud.py:f")}, folder).wait_until_ready()


def test_numbers_beyond_what_can_be_reckoned_with_cost_their_sample(folder: Path) -> None:
    with Rewards([mine("huge", weight=10.0)], folder, workers=1) as rewards:
        scored = rewards.score(items("1e308", "-1e16", "9e14", "1e13", "inf"))
    assert [s.failures.get("huge") for s in scored] == [
        "returned 1e+308, beyond ±1e+15",
        "returned -1e+16, beyond ±1e+15",
        "with its weight it is 9e+15, beyond ±1e+15",
        None,
        "returned inf",
    ]
    assert [s.value for s in scored] == pytest.approx(
        [math.nan, math.nan, math.nan, 1e14, math.nan], nan_ok=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("name", ["stays", "crash"])
def test_a_daemon_dies_with_the_rewards(folder: Path, name: str) -> None:
    left = folder / name
    with Rewards([mine("daemon")], folder, workers=1) as rewards:
        rewards.score(items(str(left)))
        pid = int(left.read_text())
        assert name == "crash" or psutil.pid_exists(pid)
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon_dies_with_a_killed_rank(folder: Path) -> None:
    code = f"""
from pathlib import Path
from pydantic import TypeAdapter
from drumline.config.rollouts import Reward
from drumline.rl.rewards import EpisodeText, Rewards
reward = TypeAdapter(Reward).validate_python(dict(kind="function", path="mine.py:daemon"))
Rewards([reward], Path({str(folder)!r}), workers=1).score([EpisodeText("", {str(folder / "left")!r}, 1)])
print(flush=True)
input()
"""
    rank = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
        start_new_session=True,
    )
    assert rank.stdout is not None and rank.stdin is not None
    try:
        rank.stdout.readline()
        pid = int((folder / "left").read_text())
        assert psutil.pid_exists(pid)
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        rank.stdout.close()
        rank.stdin.close()
    assert gone(pid)


def test_options_are_on_no_command_line(folder: Path) -> None:
    with Rewards(
        [mine("right", options={"scale": 2.0, "answer": "hunter2hunter2"})], folder, workers=1
    ) as rewards:
        rewards.score(items("x"))
        (worker,) = rewards._workers
        family = [
            psutil.Process(worker.process.pid),
            *psutil.Process(worker.process.pid).children(recursive=True),
        ]
        assert len(family) == 2 and not any(
            "hunter2hunter2" in " ".join(process.cmdline()) for process in family
        )


def test_a_catastrophic_pattern_is_stopped() -> None:
    rewards = [
        reward(kind="regex", pattern="(a+)+$", timeout_seconds=0.5),
        reward(kind="regex", pattern="b", full=False),
    ]
    with Rewards(rewards, Path(), workers=1) as made:
        slow, quick = made.score(items("a" * 50 + "b", "aaa"))
    assert slow.failures == {"regex": "timed out after 0.5 s"} and slow.parts["regex.2"] == 1.0
    assert quick.parts == {"regex": 1.0, "regex.2": 0.0}


def test_columns_options_and_names(folder: Path) -> None:
    configs = [
        mine("right", options={"scale": 3.0}, weight=2.0),
        mine("everything"),
        mine("length", name="len"),
        mine("length", name="len"),
    ]
    assert reward_names(configs) == ["right", "everything", "len", "len.2"]
    with Rewards(configs, folder, workers=1) as rewards:
        one, other = rewards.score([*items("yes", answer="yes", b=1), *items("no", answer="yes")])
        missing = rewards.score(items("yes"))[0]
    assert (
        one.parts == {"right": 3.0, "everything": 2.0, "len": 3.0, "len.2": 3.0}
        and one.value == 2 * 3 + 2 + 3 + 3
    )
    assert other.parts["right"] == 0.0
    assert missing.failures["right"].startswith(
        "raised TypeError: right() missing 1 required positional argument: 'answer'"
    )


def test_length_and_model_rewards_need_no_process() -> None:
    assert [length_penalty(n, 10, 20) for n in (0, 10, 15, 20, 99)] == [0, 0, -0.5, -1, -1]
    configs = [
        reward(kind="length", free=1, limit=3),
        reward(kind="model", model={"id": "m"}, weight=2.0),
    ]
    with Rewards(configs, Path()) as rewards:
        scored = rewards.score(items("a", "bb", "ccc"), {"model": [1.0, float("nan"), 0.5]})
        assert not rewards._workers
    values = [score.value for score in scored]
    assert values == pytest.approx([2.0, math.nan, 0.0], nan_ok=True)
    assert scored[1].failures == {"model": "returned nan"}


def test_math() -> None:
    cases = [
        ("\\frac{1}{2}", "so it is $0.5$"),
        ("4", "It is 5."),
        ("x^2", "$x^2$"),
        ("12", "\\boxed{12}"),
        (3, "3"),
    ]
    cases += [
        ("2\\sqrt{3}", "\\boxed{2\\sqrt{3}}"),
        ("2\\sqrt{3}", "\\boxed{2}"),
        ("5!", "$120$"),
        ("1, 2, 3", "$1, 2, 3$"),
    ]
    cases += [("", "3"), (None, "3")]
    with Rewards([reward(kind="math")], Path(), workers=1) as rewards:
        scored = rewards.score(
            [EpisodeText("p", completion, 1, {"answer": answer}) for answer, completion in cases]
        )
    values = [score.value for score in scored]
    assert values[:-2] == [1, 0, 1, 1, 1, 1, 0, 1, 1]
    # Without an answer the reward fails, so the worth of the episode is unknown.
    assert all(math.isnan(value) for value in values[-2:])
    assert all(
        s.failures["math"].startswith("raised ValueError: column 'answer'") for s in scored[-2:]
    )


def verdict(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """Some verifiers raise at an answer that they cannot read."""
    try:
        return dataset.score_answer(answer, entry)
    except ValueError:
        return 0.0


PARTS = 8


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, PARTS))]
)
def test_every_task_is_verified_as_by_its_generator(part: int) -> None:
    """What JSON does to an entry changes no verdict, over all tasks of reasoning-gym that have a written answer: each eighth at once."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    asked, expected = [], []
    for name in sorted(set(DATASETS) - {"composite"})[part::PARTS]:
        dataset = reasoning_gym.create_dataset(name, size=1, seed=1)
        entry = dataset[0]
        for answer in (entry["answer"], "nonsense") if isinstance(entry["answer"], str) else ():
            expected.append((name, verdict(dataset, answer.strip(), entry)))
            asked.append(
                EpisodeText(
                    "",
                    f"I think.\n<a>no</a><a> {answer} </a>",
                    1,
                    {"task": name, "entry": json.loads(json.dumps(entry))},
                )
            )
    with Rewards([reward(kind="task", pattern="(?s)<a>(.*?)</a>")], Path(), workers=1) as rewards:
        scored = rewards.score([*asked, EpisodeText("", "no tags", 1, asked[0].meta)])
    assert len(asked) > 15
    assert {
        name: (s.value, s.failures)
        for s, (name, want) in zip(scored, expected, strict=False)
        if s.value != want
    } == {}
    assert scored[-1].value == 0.0 and not scored[-1].failures


def test_no_process_outlives_a_killed_parent(folder: Path) -> None:
    code = f"""
from pathlib import Path
from pydantic import TypeAdapter
from drumline.config.rollouts import Reward
from drumline.rl.rewards import EpisodeText, Rewards
make = TypeAdapter(Reward).validate_python
rewards = Rewards([make(dict(kind="function", path="mine.py:" + name)) for name in ("pid", "naughty")], Path({str(folder)!r}), workers=2)
print(*(int(s.parts["pid"]) for s in rewards.score([EpisodeText("", "ok", 1)] * 20)), flush=True)
rewards.score([EpisodeText("", "hang", 1)])
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert parent.stdout is not None
    try:
        pids = {int(word) for word in parent.stdout.readline().split()}
        assert pids and all(psutil.pid_exists(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("mine.py:lenght", "mine.py has no function 'lenght'; did you mean 'length'?"),
        ("min.py:length", "there is no file {folder}/min.py; did you mean 'mine.py'?"),
        ("mime:length", "there is no module 'mime'; did you mean 'mine'?"),
        ("mine:number", "mine:number is a int, not a function"),
        ("mine:later", "is async"),
        ("broken.py:f", "raised ZeroDivisionError in broken.py:1: division by zero"),
        ("deadly:f", "a process for rewards ended its process (exit code 9) while it started"),
        ("nobody", "no installed package offers a reward 'nobody'"),
        (
            "mine:takes_text",
            "cannot be called with prompt, completion: got an unexpected keyword argument 'prompt'",
        ),
    ],
)
def test_functions_are_checked_before_training(folder: Path, path: str, line: str) -> None:
    (folder / "mine.py").write_text(FUNCTIONS + "\ndef takes_text(text): return 1.0\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "deadly.py").write_text("import os; os._exit(9)\n")
    with pytest.raises((ConfigError, EnvironmentFault)) as caught:
        check_importable(
            [reward(kind="length", free=1, limit=2), reward(kind="function", path=path)], folder
        )
    assert line.format(folder=folder) in caught.value.line() and caught.value.line().startswith(
        "algorithm.rewards"
    )


def test_an_import_that_hangs_is_told(folder: Path) -> None:
    (folder / "slow.py").write_text("import time; time.sleep(60)\n")
    with pytest.raises(EnvironmentFault, match=r"importing slow.py:f takes more than 1 s"):
        RewardProcess({0: reward(kind="function", path="slow.py:f")}, folder).wait_until_ready(1.0)


def test_closing_does_not_wait_for_an_import(folder: Path) -> None:
    begun = folder / "begun"
    code = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    (folder / "slow.py").write_text(code)
    with Rewards([reward(kind="function", path="slow.py:f")], folder, workers=1):
        until = time.monotonic() + START_SECONDS
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert begun.exists()
        closed_at = time.monotonic()
    assert time.monotonic() - closed_at < START_SECONDS / 2


def test_columns_are_checked_where_they_are_known(folder: Path) -> None:
    check_importable(
        [mine("length"), reward(kind="math", column="solution"), reward(kind="task")],
        folder,
        {"solution", "task", "entry"},
    )
    with pytest.raises(ConfigError, match=r"no row has a column 'answer'; there are: solution"):
        check_importable([reward(kind="math")], folder, {"solution"})
    with pytest.raises(
        ConfigError, match=r"columns \(solution\): missing a required argument: 'answer'"
    ):
        check_importable([mine("right")], folder, {"solution"})
    with pytest.raises(ConfigError, match="needs prompts of reasoning-gym tasks"):
        check_importable([reward(kind="task")], folder, {"solution"})


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"kind": "regex", "pattern": "("}, "is no regular expression: missing )"),
        ({"kind": "task", "pattern": "answer"}, "has no group"),
        ({"kind": "length", "free": 3, "limit": 3}, "limit must be above free"),
    ],
)
def test_config(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        GRPOConfig.model_validate({"kind": "grpo", "rewards": [values]})


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """A function that asks for a column that no prepared row has; no run folder is made."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data={
            "train": [{"kind": "tasks", "tasks": {"gcd": {}}, "size": 8}],
            "eval": [],
            "max_length": 200,
        },
        algorithm={
            "kind": "grpo",
            "group_size": 2,
            "generator": {"kind": "hf", "max_new_tokens": 8},
        },
    )
    finished = drumline(
        "train", path, "algorithm.rewards=[{kind: function, path: 'mine.py:wants'}]"
    )
    assert (
        finished.code == 2
        and "missing a required argument: 'solution'" in finished.err
        and len(finished.error_lines) == 1
    ), finished.err
    assert not (tmp_path / "run").exists()
