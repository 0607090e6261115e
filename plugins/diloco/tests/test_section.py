"""What the plan knows of fragments, delays and peers: the steps that send, what is refused, and what the user is told."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from drumline.errors import PlanError
from drumline_diloco.section import StreamingDiLoCoStrategy
from tests.unit.test_plan import plan

PEERS: dict[str, Any] = {
    "kind": "diloco",
    "delay": 2,
    "peers": ["a:29600", "b:29600"],
    "secret": "${env:NAME}",
}


def streaming(**options: Any) -> dict[str, Any]:
    return {"kind": "diloco", **options}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fragments": 1, "bits": 8}, {4: 0, 9: 0}),
        ({"fragments": 2}, {1: 0, 4: 1, 6: 0, 9: 1}),
        ({"fragments": 5}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 0, 6: 1, 7: 2, 8: 3, 9: 4}),
    ],
)
def test_when_fragments_are_sent(options: dict[str, Any], expected: dict[int, int]) -> None:
    strategy = StreamingDiLoCoStrategy(period=5, **options)
    sent = {}
    for step in range(10):
        fragment = strategy.fragment_to_send(step)
        if fragment is not None:
            sent[step] = fragment

    assert sent == expected


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("fragments", [1, 3, 4, 8])
@pytest.mark.parametrize("bits", [8, 32])
def test_kinds_of_steps_add_up_to_a_period(
    fragments: int, delay: int, bits: Literal[8, 32]
) -> None:
    strategy = StreamingDiLoCoStrategy(period=8, fragments=fragments, delay=delay, bits=bits)
    kinds = [strategy.step_kind(step) for step in range(16, 24)]
    assert strategy.step_shares() == {kind: kinds.count(kind) / 8 for kind in kinds}
    if strategy.streams:
        sending = [kind for kind in kinds if kind.startswith("piece 1")]
        assert len(sending) == fragments


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"strategy": streaming(period=4, fragments=5)},
            "strategy.fragments: fragments × period",
        ),
        (
            {"strategy": streaming(period=4, delay=4)},
            "arrived before it is sent again — use delay=3 or less",
        ),
        ({"strategy": streaming(delay=4), "precision": "fp16"}, "loss scales of their own"),
        (
            {"strategy": streaming(delay=4), "health": {"on_spike": "skip"}},
            "before it knows the loss of the others",
        ),
    ],
)
def test_what_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(world_size=4, batch={"global_samples": 8}, **sections)

    line = error.value.line()
    assert message in line
    assert "strategy." in line or "health." in line


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ({}, 2, "use launch.nproc=1, or leave peers out"),
        ({"delay": 0}, 1, "no host waits for another — use delay=5"),
        ({"secret": None}, 1, "anybody could send weights"),
        ({"peers": ["a"]}, 1, "'a' is no host with a port"),
        ({"peers": ["a:1", "a:1"]}, 1, "or there twice"),
    ],
)
def test_what_peers_cannot_be(options: dict[str, Any], world_size: int, message: str) -> None:
    strategy = {**PEERS, **options}
    with pytest.raises(PlanError) as error:
        plan(world_size=world_size, batch={"global_samples": 8}, strategy=strategy)
    assert message in error.value.line()


@pytest.mark.parametrize(
    ("strategy", "world_size", "message"),
    [
        (streaming(delay=3), 2, "used 3 steps after it was sent"),
        (PEERS, 1, "2 hosts that come and go"),
    ],
)
def test_the_plan_says_why(strategy: Any, world_size: int, message: str) -> None:
    reasons = plan(world_size=world_size, strategy=strategy).why
    assert message in "\n".join(reasons)
