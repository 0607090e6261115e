"""What the plan knows of strategies that send less: at which steps they send what, what is refused, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.errors import PlanError
from drumline.planner.strategies.base import cost_of
from tests import strategies as s
from tests.unit.test_plan import plan


def ddp(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": "ddp", "compression": {"kind": kind, **options}}


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
    assert [step for step in range(9) if strategy.step_kind(step) == "together"] == together


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"fragments": 1, "bits": 8}, {4: 0, 9: 0}),
        ({"fragments": 2}, {1: 0, 4: 1, 6: 0, 9: 1}),
        ({"fragments": 5}, dict(enumerate([0, 1, 2, 3, 4] * 2))),
    ],
)
def test_when_fragments_are_sent(options: dict[str, int], sent: dict[int, int]) -> None:
    strategy = s.DiLoCoStrategy(period=5, **options)  # type: ignore[arg-type]
    assert {
        step: number for step in range(10) if (number := strategy.sends(step)) is not None
    } == sent


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("fragments", [1, 3, 4, 8])
@pytest.mark.parametrize("bits", [8, 32])
def test_kinds_of_steps_add_up_to_a_period(fragments: int, delay: int, bits: Any) -> None:
    strategy = s.DiLoCoStrategy(period=8, fragments=fragments, delay=delay, bits=bits)
    kinds = [strategy.step_kind(step) for step in range(16, 24)]
    assert strategy.step_shares() == {kind: kinds.count(kind) / 8 for kind in kinds}
    if fragments > 1 or bits == 8 or delay:
        assert sum(kind[-2] == "1" for kind in kinds if kind != "apart") == fragments


@pytest.mark.parametrize(
    ("kind", "first"), [("none", 9), ("bf16", 0), ("int8", 0), ("topk", 3), ("powersgd", 3)]
)
def test_when_gradients_are_compressed(kind: Any, first: int) -> None:
    strategy = s.DDPStrategy(compression=s.Compression(kind=kind, start_step=3))
    assert [step for step in range(9) if strategy.step_kind(step) == "compressed"] == list(
        range(first, 9)
    )


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"strategy": ddp("int8") | {"tp": 2}}, "compression × tp"),
        ({"strategy": ddp("bf16") | {"pp": 2}}, "compression × pp"),
        ({"strategy": ddp("topk"), "precision": "fp16"}, "units of a loss scale"),
        ({"strategy": ddp("powersgd"), "precision": "fp16"}, "units of a loss scale"),
        (
            {"strategy": {"kind": "diloco", "period": 4, "fragments": 5}},
            "strategy.fragments: fragments × period",
        ),
        (
            {"strategy": {"kind": "diloco", "period": 4, "delay": 4}},
            "arrived before it is sent again — use delay=3 or less",
        ),
        (
            {"strategy": {"kind": "diloco", "delay": 4}, "precision": "fp16"},
            "loss scales of their own",
        ),
        (
            {"strategy": {"kind": "diloco", "delay": 4}, "health": {"on_spike": "skip"}},
            "before it knows the loss of the others",
        ),
    ],
)
def test_what_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(world_size=4, batch={"global_samples": 8}, **sections)
    assert says in error.value.line() and (
        "strategy." in error.value.line() or "health." in error.value.line()
    )


PEERS: dict[str, Any] = {
    "kind": "diloco",
    "delay": 2,
    "peers": ["a:29600", "b:29600"],
    "secret": "${env:NAME}",
}


@pytest.mark.parametrize(
    ("options", "world_size", "says"),
    [
        ({}, 2, "use launch.nproc=1, or leave peers out"),
        ({"delay": 0}, 1, "no host waits for another — use delay=5"),
        ({"secret": None}, 1, "anybody could send weights"),
        ({"peers": ["a"]}, 1, "'a' is no host with a port"),
        ({"peers": ["a:1", "a:1"]}, 1, "or there twice"),
    ],
)
def test_what_peers_cannot_be(options: dict[str, Any], world_size: int, says: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(world_size=world_size, batch={"global_samples": 8}, strategy={**PEERS, **options})
    assert says in error.value.line()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_what_keeps_nothing_goes_with_a_loss_scale(kind: str) -> None:
    assert plan(world_size=4, strategy=ddp(kind), precision="fp16").precision == "fp16"


@pytest.mark.parametrize(
    ("strategy", "world_size", "says"),
    [
        (ddp("topk"), 2, "is not saved"),
        (ddp("powersgd"), 2, "is not saved"),
        (ddp("bf16"), 1, "one process sends nothing"),
        ("local_sgd", 2, "clips by its own gradient norm"),
        ("diloco", 2, "mean of the ranks' weights"),
        ("diloco", 1, "one process"),
        ({"kind": "diloco", "delay": 3}, 2, "used 3 steps after it was sent"),
        (PEERS, 1, "2 hosts that come and go"),
    ],
)
def test_the_plan_says_why(strategy: Any, world_size: int, says: str) -> None:
    assert any(says in line for line in plan(world_size=world_size, strategy=strategy).why)


def test_what_is_kept_between_steps_is_counted() -> None:
    keeps = {
        kind: cost_of(s.DDPStrategy(compression=s.Compression(kind=kind))).kept_bytes(2)
        for kind in ("none", "int8", "topk", "powersgd")
    }
    assert keeps == {"none": 0, "int8": 0, "topk": 4, "powersgd": 4}
    assert (
        cost_of(s.DiLoCoStrategy()).outer_bytes(),
        cost_of(s.LocalSGDStrategy()).outer_bytes(),
    ) == (8, 0)
