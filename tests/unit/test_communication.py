"""What the plan knows of strategies that send less: at which steps they send what, what is refused, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.errors import PlanError
from drumline.planner.strategies.base import cost_of
from tests import strategies as s
from tests.unit.test_plan import plan


def ddp(kind: str) -> dict[str, Any]:
    return {"kind": "ddp", "compression": {"kind": kind}}


def steps_of_kind(strategy: s.StrategyConfig, kind: str) -> list[int]:
    """Return which of the first nine steps are of a kind."""
    return [step for step in range(9) if strategy.step_kind(step) == kind]


@pytest.mark.parametrize(
    ("strategy", "together"),
    [
        (s.LocalSGDStrategy(period=4), [3, 7]),
        (s.LocalSGDStrategy(period=4, start_step=2), [0, 1, 3, 7]),
        (s.LocalSGDStrategy(period=1), list(range(9))),
        (s.DiLoCoStrategy(period=5), [4]),
    ],
)
def test_when_copies_come_together(strategy: s.StrategyConfig, together: list[int]) -> None:
    assert steps_of_kind(strategy, "together") == together


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("none", 9),
        ("bf16", 0),
        ("int8", 0),
        ("topk", 3),
        ("powersgd", 3),
    ],
)
def test_when_gradients_are_compressed(kind: Any, first: int) -> None:
    compression = s.Compression(kind=kind, start_step=3)
    strategy = s.DDPStrategy(compression=compression)
    assert steps_of_kind(strategy, "compressed") == list(range(first, 9))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"strategy": ddp("int8") | {"tp": 2}}, "compression × tp"),
        ({"strategy": ddp("bf16") | {"pp": 2}}, "compression × pp"),
        ({"strategy": ddp("topk"), "precision": "fp16"}, "units of a loss scale"),
        ({"strategy": ddp("powersgd"), "precision": "fp16"}, "units of a loss scale"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(world_size=4, batch={"global_samples": 8}, **sections)

    line = error.value.line()
    assert says in line
    assert "strategy." in line


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_what_keeps_nothing_goes_with_a_loss_scale(kind: str) -> None:
    resolved = plan(world_size=4, strategy=ddp(kind), precision="fp16")
    assert resolved.precision == "fp16"


@pytest.mark.parametrize(
    ("strategy", "world_size", "says"),
    [
        (ddp("topk"), 2, "is not saved"),
        (ddp("powersgd"), 2, "is not saved"),
        (ddp("bf16"), 1, "one process sends nothing"),
        ("local_sgd", 2, "clips by its own gradient norm"),
        ("diloco", 2, "mean of the ranks' weights"),
        ("diloco", 1, "one process"),
    ],
)
def test_the_plan_says_why(strategy: Any, world_size: int, says: str) -> None:
    resolved = plan(world_size=world_size, strategy=strategy)
    assert any(says in line for line in resolved.why)


def test_what_is_kept_between_steps_is_counted() -> None:
    kept_bytes: dict[Any, int] = {"none": 0, "int8": 0, "topk": 4, "powersgd": 4}
    for kind, expected in kept_bytes.items():
        strategy = s.DDPStrategy(compression=s.Compression(kind=kind))
        assert cost_of(strategy).kept_bytes(2) == expected

    assert cost_of(s.DiLoCoStrategy()).outer_bytes() == 8
    assert cost_of(s.LocalSGDStrategy()).outer_bytes() == 0
