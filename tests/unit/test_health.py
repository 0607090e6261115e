"""Losses that jump, weights that differ, and collectives that do not belong together."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from drumline.config.mesh import Mesh
from drumline.config.registry import make
from drumline.config.resume import Resume
from drumline.config.run import HealthConfig
from drumline.config.strategy import StrategyConfig
from drumline.data.batches import TokenBatch
from drumline.data.order import GlobalBatch
from drumline.errors import PlanError, TrainingStopped
from drumline.plan.copies import same_weights
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.report.progress import Progress
from drumline.telemetry.watched import Spike, Straggler, WeightsDiffer
from drumline.train.health import Spikes, checksum, outvoted_ranks
from drumline.train.loop import Loop
from drumline.train.restore import ResumePoint
from tests.fake_engine import FakeEngine
from tests.plans import small_config
from tests.unit.test_loop import batch, loop, of, steps_of

pytestmark = pytest.mark.slow

POISON = 30
STEPS = 40  # batches
GRPO = {"kind": "grpo", "rewards": [{"kind": "length", "free": 4, "limit": 8}]}


def poisoned(step: int) -> GlobalBatch:
    """As the loop's tests have them, but one whose targets are far from all others."""
    usual = batch(step)
    if step != POISON:
        return usual

    targets = torch.tensor([[40, -100]])
    rows = TokenBatch(torch.zeros_like(targets), targets, torch.arange(2)[None], 1)
    return replace(usual, micro_batches=[rows, rows])


def quiet_loop(folder: Path, engine: FakeEngine, **sections: Any) -> Any:
    """Return a loop without evaluations, whose learning rate stays, and its events."""
    return loop(folder, engine, range(0), held_out=False, **{"schedule": "constant", **sections})


class Ran(NamedTuple):
    loop: Loop
    engine: FakeEngine
    said: list[dict[str, Any]]


def run(
    folder: Path,
    policy: str,
    steps: int = STEPS,
    health: dict[str, Any] | None = None,
    **sections: Any,
) -> Ran:
    engine = FakeEngine()
    watched = {"on_spike": policy, "spike_window": 20, **(health or {})}
    built, said = quiet_loop(folder, engine, health=watched, **sections)
    built.batches = map(poisoned, range(steps))

    def rewind() -> Any:
        state = ResumePoint.resolve(built.plan, Resume()).restore(engine, built.emit, 0.0)
        vars(built.state).update(vars(state))
        return map(poisoned, range(built.state.position // 2, steps))

    built.rewind = rewind
    built.run()
    return Ran(built, engine, said)


def policies(said: list[dict[str, Any]]) -> list[str]:
    return [event["policy"] for event in of(said, "spike")]


def losses(said: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in of(said, "step")]


def trained(steps: int) -> float:
    """The weight after so many steps on what is not poisoned."""
    return 2 - 2 * 0.9**steps


def assert_passed_over(engine: FakeEngine) -> None:
    """The weight is that of a run without the poisoned batch."""
    assert float(engine.weight) == pytest.approx(trained(STEPS - 1))


@pytest.mark.claim("watching changes no number")
@pytest.mark.parametrize("policy", ["none", "note"])
def test_watching_changes_no_number(tmp_path: Path, policy: str) -> None:
    """Also under the policy that only notes."""
    _, engine, said = run(tmp_path, policy)
    plain = FakeEngine()
    built, expected = quiet_loop(tmp_path / "plain", plain)
    built.batches = map(poisoned, range(STEPS))
    built.run()

    assert float(engine.weight) == float(plain.weight)
    assert losses(said) == losses(expected)
    assert len(of(said, "spike")) == (policy == "note")


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_spike_is_skipped_and_its_samples_are_named(tmp_path: Path, log_every: int) -> None:
    built, engine, said = run(tmp_path, "skip", run={"log_every": log_every})
    (spike,) = of(said, "spike")

    assert spike["step"] == POISON + 1
    assert spike["policy"] == "skip"
    assert spike["sample_ids"] == [2 * POISON, 2 * POISON + 1]
    assert spike["loss"] > spike["limit"] > spike["mean"]

    assert_passed_over(engine)

    assert engine.skipped == 1
    assert built.state.step == STEPS
    assert built.state.skips == 0


@pytest.mark.claim("a spike goes back and passes over its batch")
@pytest.mark.parametrize("log_every", [1, 100])
def test_a_spike_goes_back_to_the_checkpoint_and_passes_over_the_batch(
    tmp_path: Path, log_every: int
) -> None:
    logging = {"log_every": log_every}
    built, engine, said = run(tmp_path, "rollback", checkpoint={"every": 8}, run=logging)

    assert policies(said) == ["rollback"]
    assert steps_of(said, "restore") == [24]

    assert_passed_over(engine)

    assert built.state.step == STEPS
    assert built.state.position == 2 * STEPS

    if log_every == 1:
        assert steps_of(said, "step") == [*range(1, POISON + 2), *range(25, STEPS + 1)]

    assert built.goodput.seconds["recompute"] > 0


class Part(NamedTuple):
    """A run that stops and is resumed: from which checkpoint, and which spikes are left to it."""

    stops: int
    resume: str
    first_batch: int
    rollbacks: int
    spikes: list[str]


PARTS = {
    "skip": Part(POISON, "", POISON, 0, ["skip"]),
    "rollback": Part(36, "checkpoints/step-00000032", 0, 1, []),
}


@pytest.mark.parametrize("policy", PARTS)
def test_a_resumed_run_knows_what_is_a_spike_and_what_was_passed_over(
    tmp_path: Path, policy: str
) -> None:
    """It stopped after 36 steps, or, with `skip`, before the spike."""
    part = PARTS[policy]
    first = run(tmp_path, policy, part.stops, checkpoint={"every": 8, "keep": 9}).loop
    resume = Resume(str(tmp_path / part.resume)) if part.resume else Resume()
    engine = FakeEngine()
    state = ResumePoint.resolve(first.plan, resume).restore(engine, first.emit, 0.0)
    health = {"on_spike": policy, "spike_window": 20}
    again, said = quiet_loop(tmp_path, engine, health=health, state=state)

    assert again.spikes.losses
    assert again.spikes.rollbacks == part.rollbacks
    assert len(again.spikes.passed_over) == part.rollbacks

    again.batches = map(poisoned, range(part.first_batch, STEPS))
    again.run()

    assert policies(said) == part.spikes


def test_weights_that_are_made_again_are_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def checksum(engine: FakeEngine) -> torch.Tensor:
        compared.append(engine.calls)
        return torch.zeros((), dtype=torch.int64)

    monkeypatch.setattr("drumline.train.health.checksum", checksum)
    health = {"check_weights_every": 6}
    run(tmp_path, "rollback", health=health, checkpoint={"every": 8}, run={"log_every": 1})

    assert compared.count(30) == 2, "the spike at 31 had the run go back to 24"


def test_without_a_checkpoint_the_spike_is_skipped(tmp_path: Path) -> None:
    _, engine, said = run(tmp_path, "rollback")
    assert policies(said) == ["skip"]

    assert_passed_over(engine)


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    health = {"on_spike": "skip", "spike_window": 20, "max_skips": 3}
    built, said = loop(tmp_path, FakeEngine(), range(0), held_out=False, health=health)
    batches = list(map(batch, range(25)))
    for step in range(25, 35):
        ids = np.array([step])
        batches.append(replace(poisoned(POISON), position=2 * (step + 1), sample_ids=ids))

    built.batches = iter(batches)
    with pytest.raises(TrainingStopped, match="4 spikes"):
        built.run()

    assert len(of(said, "spike")) == 4


def ignore(event: Any) -> None:
    """Emit nothing."""


def test_a_window_that_is_too_short_says_nothing() -> None:
    spikes = Spikes(HealthConfig(on_spike="note"), ignore)
    spikes.losses.extend([1.0] * 19)

    assert spikes.limit() is None

    spikes.losses.append(1.0)

    # A loss that does not move has a deviation of one percent.
    assert spikes.limit() == pytest.approx(1.06)
    assert Spikes(HealthConfig(), ignore).limit() is None


# Weights.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    engine: Any = FakeEngine()
    engine.model = torch.nn.Linear(5, 3).to(dtype)
    before = checksum(engine)
    weight = engine.model.weight.detach()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = weight.view(integers[weight.itemsize])
    for bit in range(8 * weight.itemsize - 1):
        bits[1, 2] ^= 1 << bit
        assert checksum(engine) != before

        bits[1, 2] ^= 1 << bit

    assert checksum(engine) == before


@pytest.mark.parametrize(
    ("sums", "ranks"),
    [({0: 1, 1: 1, 2: 5}, [2]), ({0: 1, 1: 5}, [0, 1]), ({0: 1, 1: 1}, []), ({3: 9}, [])],
)
def test_the_majority_is_right(sums: dict[int, int], ranks: list[int]) -> None:
    assert outvoted_ranks(sums) == ranks


@pytest.mark.parametrize(
    ("kind", "mesh", "sets"),
    [
        ("ddp", Mesh(replicate=3), [[0, 1, 2]]),
        ("ddp", Mesh(replicate=2, tp=2), [[0, 2], [1, 3]]),
        ("fsdp2", Mesh(shard=2), [[0], [1]]),
        ("fsdp2", Mesh(replicate=2, shard=2), [[0, 2], [1, 3]]),
        ("zero2", Mesh(shard=2), [[0, 1]]),
        ("zero3", Mesh(shard=2), [[0], [1]]),
        ("local_sgd", Mesh(replicate=2), [[0], [1]]),
    ],
)
def test_which_ranks_hold_the_same_weights(kind: str, mesh: Mesh, sets: list[list[int]]) -> None:
    assert same_weights(make(StrategyConfig, kind), mesh) == sets


CHECKED = {"check_weights_every": 5}


@pytest.mark.parametrize(
    ("sections", "mesh", "words"),
    [
        (
            {"strategy": "fsdp2", "health": CHECKED},
            Mesh(shard=2),
            "no two ranks hold the same weights",
        ),
        (
            {"strategy": "local_sgd", "health": CHECKED},
            Mesh(replicate=2),
            "weights of its own between two exchanges",
        ),
        (
            {"algorithm": GRPO, "health": {"on_spike": "rollback"}},
            Mesh(),
            "a rollout depends on the weights",
        ),
        (
            {"strategy": "ddp", "health": {**CHECKED, "on_spike": "rollback"}},
            Mesh(replicate=2),
            None,
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(
    sections: dict[str, Any], mesh: Mesh, words: str | None
) -> None:
    config = small_config(**{"strategy": "single", **sections})
    case = Case(config, mesh, "cpu", "fp32", None)
    if words is None:
        check_rules(case)
    else:
        with pytest.raises(PlanError, match=words):
            check_rules(case)


SPIKE = Spike(
    step=3, policy="skip", loss=9.0, mean=1.0, deviation=0.1, limit=1.6, sample_ids=[7, 8]
)
STRAGGLER = Straggler(
    step=20,
    rank=5,
    host="b",
    device="cpu",
    seconds=1.21,
    median=0.83,
    lost_tokens_per_s=31204.0,
)


def test_what_is_found_is_one_line_of_the_display() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    for event in (SPIKE, WeightsDiffer(step=8, ranks=[1], agreed=6), STRAGGLER):
        progress.on_event(event)

    assert out.getvalue().splitlines() == [
        "step 3: loss 9 jumps above 1.6 (mean before 1) — skip (samples 7, 8)",
        "step 8: the weights of rank 1 differ; they agreed after step 6",
        "rank 5 (cpu of b) holds up the others: 1.21 s a step of its own, the median rank 0.83 s; "
        "that costs 31,204 tokens/s",
    ]
