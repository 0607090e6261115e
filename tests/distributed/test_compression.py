"""Strategies that send less: as many bytes as they say, near plain DDP's course, equal to it where
they must be, and resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_plans
from tests.distributed.setups import (
    EIGHT_BY_TWO,
    UNSAVED,
    asked_for,
    case,
    cases,
    copy_checkpoint,
    merge,
    plan_in,
    same_steps,
)
from tests.harness import Sections, column, same_weights, weights, weights_at
from tests.tiny import tiny_model_dir

STEPS = 30


COMPRESSION = ("rank", "ratio", "start_step")


def ddp(kind: str = "none", /, **options: Any) -> Sections:
    compression: Sections = {"kind": kind}
    strategy: Sections = {"kind": "ddp", "broadcast_buffers": False}
    for name, value in options.items():
        if name in COMPRESSION:
            compression[name] = value
        else:
            strategy[name] = value
    return {**strategy, "compression": compression}


@dataclass(frozen=True)
class Run:
    """A run of two ranks. `distance`: how far its last held-out loss may lie over plain DDP's;
    `ratio`: bytes sent, as a part of DDP's."""

    strategy: Any
    distance: float = 0.0
    ratio: tuple[float, float] | None = None
    sections: Sections = field(default_factory=dict)


SGD = {"optimizer": {"kind": "sgd", "lr": 0.05, "max_grad_norm": None}, "run": {"steps": 6}}
FOUR = {"checkpoint": {"every": 2, "keep_best": False}, "run": {"steps": 4}}
RUNS = {
    "ddp": Run(ddp()),
    "bf16": Run(ddp("bf16"), 0.01, (0.5, 0.5)),
    "fp16": Run(ddp("fp16"), 0.01, (0.5, 0.5)),
    "fp16 precision": Run(ddp("fp16"), 0.02, (0.5, 0.5), {"precision": "fp16"}),
    "int8": Run(ddp("int8", bucket_cap_mb=0.05), 0.02, (0.25, 0.27)),
    "topk": Run(ddp("topk", ratio=0.1), 0.7, (0.199, 0.201)),
    "topk, buckets": Run(
        ddp("topk", ratio=0.1, bucket_cap_mb=0.02, gradient_as_bucket_view=False),
        0.7,
        (0.199, 0.201),
    ),
    "powersgd": Run(ddp("powersgd", rank=4, bucket_cap_mb=0.02), 0.1, (0.1, 0.35)),
    "powersgd, static graph": Run(
        ddp("powersgd", rank=4, start_step=3, static_graph=True),
        0.1,
        (0.1, 0.35),
        {"batch": {"micro_batch": 1}},
    ),
    "local_sgd": Run({"kind": "local_sgd", "period": 4}, 0.1, (0.0, 1.0)),
    "diloco": Run({"kind": "diloco", "period": 5}, 0.25, (0.0, 1.0)),
    "ddp, sgd": Run(ddp(), sections=SGD),
    "local_sgd of period 1, sgd": Run({"kind": "local_sgd", "period": 1}, sections=SGD),
    "local_sgd from step 6 on, sgd": Run(
        {"kind": "local_sgd", "period": 100, "start_step": 6}, sections=SGD
    ),
    "fsdp2": Run({"kind": "fsdp2"}, sections=FOUR),
    "fsdp2 grad-op": Run({"kind": "fsdp2", "reshard_after_forward": False}, sections=FOUR),
    "tp": Run({"kind": "tp"}, sections=FOUR),
    "ddp of four": Run(ddp(), sections=FOUR),
    "topk of four": Run(ddp("topk", ratio=0.05), sections=FOUR),
    "local_sgd of four": Run({"kind": "local_sgd", "period": 3}, sections=FOUR),
    "diloco of four": Run({"kind": "diloco", "period": 3}, sections=FOUR),
}
# With --full alone.
AGAIN = (
    "bf16",
    "topk",
    "fp16",
    "fp16 precision",
    "topk, buckets",
    "powersgd",
    "local_sgd from step 6 on, sgd",
    "topk of four",
)
NEAR = [name for name, run in RUNS.items() if run.distance]
SENT = [name for name in NEAR if RUNS[name].ratio]
# The first stops after two steps, the second goes on from there.
RESUMED = [
    ("local_sgd of four", "local_sgd of four"),
    ("diloco of four", "diloco of four"),
    ("ddp of four", "diloco of four"),
    ("diloco of four", "ddp of four"),
    ("ddp of four", "topk of four"),
]
RESUMED_AGAIN = [("diloco of four", "diloco of four"), ("ddp of four", "topk of four")]


def folder_of(name: str) -> str:
    return name.replace(" ", "_")


def plan(root: Path, name: str, world_size: int, run: Run) -> Path:
    base: Sections = {
        "optimizer": {"lr": 5e-3},
        "batch": EIGHT_BY_TWO,
        "checkpoint": UNSAVED,
        "run": {"steps": STEPS},
        "data": {"packing": False},
        "strategy": run.strategy,
    }
    sections = merge(base, run.sections)
    return plan_in(root, folder_of(name), world_size, root / "model", rows=60, **sections)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_full = request.config.getoption("--full")
    root = tmp_path_factory.mktemp("compression")
    tiny_model_dir(root / "model")
    whole = [plan(root, name, 2, run) for name, run in asked_for(request, RUNS, AGAIN).items()]
    run_plans(whole, 2, counted=True)
    again = []
    for first, second in RESUMED:
        if (first, second) in RESUMED_AGAIN and not is_full:
            continue
        path = plan(root, f"{first} then {second}", 2, RUNS[second])
        copy_checkpoint(of(root, first), path)
        again.append(path)
    run_plans(again, 2, counted=True)
    if not is_full:
        return root
    on_four = []
    for kind in ("none", "int8"):
        run = Run(ddp(kind, bucket_cap_mb=0.02), sections=FOUR)
        on_four.append(plan(root, f"{kind} on 4", 4, run))
    run_plans(on_four, 4, counted=True)
    return root


def of(root: Path, name: str) -> Path:
    return root / folder_of(name) / "run"


def figures(root: Path, name: str, field: str, kind: str = "step") -> list[float]:
    return column(of(root, name), field, kind)


def parameters(root: Path) -> int:
    return sum(tensor.numel() for tensor in model_weights(of(root, "ddp")).values())


def model_weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the model in the newest checkpoint, by their names in it."""
    prefix = "model."
    found = {}
    for name, tensor in weights(run).items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = tensor
    return found


@pytest.mark.claim("compressed gradients and local steps end near DDP, and send what they say")
@pytest.mark.parametrize("name", cases(NEAR, AGAIN))
def test_ends_near_ddp(runs: Path, name: str) -> None:
    mine = figures(runs, name, "loss", "eval")
    plain = figures(runs, "ddp", "loss", "eval")
    assert plain[-1] < plain[0] - 1.5, "the task is learned"
    assert mine[-1] - plain[-1] <= RUNS[name].distance
    course = figures(runs, name, "loss")
    course_of_ddp = figures(runs, "ddp", "loss")
    assert course[5:] != course_of_ddp[5:], "it is another way"


def test_ddp_sends_four_bytes_a_parameter(runs: Path) -> None:
    """By the ring 2 (n − 1) / n × 4 bytes: exactly 4 on two ranks."""
    number = parameters(runs)
    sent = figures(runs, "ddp", "sent_bytes")
    assert sent[:2] == [None, None]
    assert sent[2:] == [4 * number] * (STEPS - 2)


@pytest.mark.full
def test_ddp_sends_six_bytes_a_parameter_on_four_ranks(runs: Path) -> None:
    on_four = figures(runs, "none on 4", "sent_bytes")
    assert on_four[2:] == [6 * parameters(runs)] * 2


def test_other_strategies_send_what_theory_says(runs: Path) -> None:
    """A shard gathered and a gradient scattered are each half of an all-reduce (ZeRO, Rajbhandari
    et al. 2020, section 7); gathering the blocks again for backward is another; all that for
    each of two micro-batches. Tensor parallelism sends activations."""
    whole = 2 * 4 * parameters(runs)
    last = {}
    for name in ("fsdp2 grad-op", "fsdp2", "tp"):
        last[name] = figures(runs, name, "sent_bytes")[-1]
    assert last["fsdp2 grad-op"] == pytest.approx(whole, rel=0.01)
    assert 1.2 * whole < last["fsdp2"] <= 1.5 * whole
    assert last["tp"] > 0


@pytest.mark.claim("compressed gradients and local steps end near DDP, and send what they say")
@pytest.mark.parametrize("name", cases(SENT, AGAIN))
def test_sends_the_part_it_says(runs: Path, name: str) -> None:
    low, high = RUNS[name].ratio or (0, 0)
    later = figures(runs, name, "sent_bytes")[4:]
    sent = [number for number in later if number is not None]
    mean = sum(sent) / len(sent)
    ratio = mean / (4 * parameters(runs))
    assert low <= ratio <= high


def test_bytes_follow_the_kind_of_step(runs: Path) -> None:
    """Local SGD sends weights at every fourth step, and its norm at each; PowerSGD begins after
    three whole ones."""
    sent = figures(runs, "local_sgd", "sent_bytes")
    whole = 4 * parameters(runs)
    assert sent[:2] == [None] * 2
    assert sent[2] == 8
    assert sent[3::4] == [8 + whole] * 7
    later = figures(runs, "powersgd, static graph", "sent_bytes")
    assert later[2] == whole
    assert whole > 2 * later[3] > 0


@pytest.mark.parametrize(
    "name", cases(("local_sgd of period 1, sgd", "local_sgd from step 6 on, sgd"), AGAIN)
)
def test_averaging_each_step_is_ddp(runs: Path, name: str) -> None:
    """With SGD the mean of the ranks' steps is the step of their mean gradient, momentum included."""
    expected = figures(runs, "ddp, sgd", "loss")
    assert figures(runs, name, "loss") == pytest.approx(expected, rel=1e-5)
    same_weights(of(runs, name), of(runs, "ddp, sgd"), 1e-5)


@pytest.mark.parametrize(
    ("first", "second"), [case(*pair, full=pair in RESUMED_AGAIN) for pair in RESUMED]
)
def test_goes_on(runs: Path, first: str, second: str) -> None:
    whole = of(runs, first)
    resumed = of(runs, f"{first} then {second}")
    assert column(resumed, "step") == [3, 4]
    losses = column(resumed, "loss")
    # What the first had reached is where the second begins: the same batch, the same weights, the
    # same loss.
    reached = column(whole, "loss")[2]
    assert losses[0] == pytest.approx(reached, rel=1e-5)
    if first == second:
        same_steps(resumed, whole, 1e-6, skip=2)
        same_weights(resumed, whole, 1e-6)


def test_diloco_keeps_its_outer_state_apart(runs: Path) -> None:
    """Other strategies leave it out; one that comes from them starts with no momentum and has some
    after an outer step."""
    names = set(weights(of(runs, "diloco of four")))
    assert {name.split(".")[0] for name in names} == {"model", "optim", "outer"}
    outer = set()
    for name in model_weights(of(runs, "diloco of four")):
        outer |= {f"outer.{name}.weight", f"outer.{name}.momentum"}
    assert {name for name in names if name.startswith("outer.")} == outer
    for name in weights(of(runs, "diloco of four then ddp of four")):
        assert not name.startswith("outer.")
    moments = []
    for name, tensor in weights(of(runs, "ddp of four then diloco of four")).items():
        if name.endswith(".momentum"):
            moments.append(tensor)
    assert any(bool(moment.any()) for moment in moments)


def test_the_outer_step_is_nesterov(runs: Path) -> None:
    """From the checkpoints alone: θ' = θ − 0.7 (1 + 0.9) Δ and m = Δ in the first outer step, where
    m was zero."""
    run = of(runs, "ddp of four then diloco of four")
    after = weights(run)
    before = weights_at(run / "checkpoints" / "step-00000002")
    for name in model_weights(run):
        moved = before[f"model.{name}"] - after[f"outer.{name}.weight"]
        momentum = after[f"outer.{name}.momentum"]
        torch.testing.assert_close(moved, 0.7 * 1.9 * momentum, rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_int8_on_four_ranks(runs: Path) -> None:
    expected = figures(runs, "none on 4", "loss")
    assert figures(runs, "int8 on 4", "loss") == pytest.approx(expected, rel=2e-3)
    sent = figures(runs, "int8 on 4", "sent_bytes")[-1]
    plain = figures(runs, "none on 4", "sent_bytes")[-1]
    assert 0.25 <= sent / plain <= 0.3, "blocks of small buckets are not all full"
