"""Strategies that send less: as many bytes as they say, near plain DDP's course, equal to it where they must be, and resumed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import events, same_weights, weights, write_config
from tests.tiny import tiny_model_dir

STEPS = 30


def ddp(kind: str = "none", /, **options: Any) -> dict[str, Any]:
    compression = {
        name: options.pop(name) for name in ("rank", "ratio", "start_step") if name in options
    }
    return {
        "kind": "ddp",
        "broadcast_buffers": False,
        "compression": {"kind": kind, **compression},
        **options,
    }


@dataclass(frozen=True)
class Run:
    """A run of two ranks. `distance`: how far its last held-out loss may lie over plain DDP's; `ratio`: bytes sent, as a part of DDP's."""

    strategy: Any
    distance: float = 0.0
    ratio: tuple[float, float] | None = None
    sections: dict[str, Any] = field(default_factory=dict)


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
)
NEAR = [name for name, run in RUNS.items() if run.distance]
# The first stops after two steps, the second goes on from there.
RESUMED = [("local_sgd of four", "local_sgd of four"), ("diloco of four", "diloco of four"), ("ddp of four", "diloco of four"),
           ("diloco of four", "ddp of four"), ("ddp of four", "topk of four")]  # fmt: skip


def plan(root: Path, name: str, world_size: int, run: Run) -> Path:
    folder = root / name.replace(" ", "_")
    folder.mkdir()
    sections: dict[str, Any] = {
        "optimizer": {"lr": 5e-3},
        "batch": {"global_samples": 8, "micro_batch": 2},
        "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
        "run": {"steps": STEPS},
    }
    for key, value in run.sections.items():
        sections[key] = {**sections.get(key, {}), **value} if isinstance(value, dict) else value
    path = write_config(
        folder, root / "model", rows=60, data={"packing": False}, strategy=run.strategy, **sections
    )
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=world_size)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compression")
    tiny_model_dir(root / "model")
    left_out = () if request.config.getoption("--full") else AGAIN
    run_plans(
        [plan(root, name, 2, run) for name, run in RUNS.items() if name not in left_out],
        2,
        counted=True,
    )
    again = []
    for first, second in RESUMED:
        again.append(plan(root, f"{first} then {second}", 2, RUNS[second]))
        stopped = of(root, first) / "checkpoints" / "step-00000002"
        shutil.copytree(stopped, again[-1].parent / "checkpoints" / stopped.name)
    run_plans(again, 2, counted=True)
    by_kind = [
        plan(root, f"{kind} on 4", 4, Run(ddp(kind, bucket_cap_mb=0.02), sections=FOUR))
        for kind in ("none", "int8")
    ]
    run_plans(by_kind, 4, counted=True)
    return root


def of(root: Path, name: str) -> Path:
    return root / name.replace(" ", "_") / "run"


def figures(root: Path, name: str, field: str, kind: str = "step") -> list[float]:
    return [e[field] for e in events(of(root, name), kind)]


def parameters(root: Path) -> int:
    return sum(
        t.numel() for name, t in weights(of(root, "ddp")).items() if name.startswith("model.")
    )


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full if name in AGAIN else [])


@pytest.mark.claim("compressed gradients and local steps end near DDP, and send what they say")
@pytest.mark.parametrize("name", list(map(marked, NEAR)))
def test_ends_near_ddp(runs: Path, name: str) -> None:
    mine, plain = figures(runs, name, "loss", "eval"), figures(runs, "ddp", "loss", "eval")
    assert plain[-1] < plain[0] - 1.5, "the task is learned"
    assert mine[-1] - plain[-1] <= RUNS[name].distance
    assert figures(runs, name, "loss")[5:] != figures(runs, "ddp", "loss")[5:], "it is another way"


def test_ddp_sends_four_bytes_a_parameter(runs: Path) -> None:
    """By the ring 2 (n − 1) / n × 4 bytes: exactly 4 on two ranks, 6 on four."""
    assert figures(runs, "ddp", "sent_bytes") == [None, None, *[4 * parameters(runs)] * (STEPS - 2)]
    assert figures(runs, "none on 4", "sent_bytes")[2:] == [6 * parameters(runs)] * 2


def test_other_strategies_send_what_theory_says(runs: Path) -> None:
    """A shard gathered and a gradient scattered are each half of an all-reduce (ZeRO, Rajbhandari et al. 2020, section 7); gathering the
    blocks again for backward is another; all that for each of two micro-batches. Tensor parallelism sends activations."""
    whole = 2 * 4 * parameters(runs)
    assert figures(runs, "fsdp2 grad-op", "sent_bytes")[-1] == pytest.approx(whole, rel=0.01)
    assert 1.2 * whole < figures(runs, "fsdp2", "sent_bytes")[-1] <= 1.5 * whole
    assert figures(runs, "tp", "sent_bytes")[-1] > 0


@pytest.mark.claim("compressed gradients and local steps end near DDP, and send what they say")
@pytest.mark.parametrize("name", [marked(name) for name in NEAR if RUNS[name].ratio])
def test_sends_the_part_it_says(runs: Path, name: str) -> None:
    low, high = RUNS[name].ratio or (0, 0)
    sent = [b for b in figures(runs, name, "sent_bytes")[4:] if b is not None]
    assert low <= sum(sent) / len(sent) / (4 * parameters(runs)) <= high


def test_bytes_follow_the_kind_of_step(runs: Path) -> None:
    """Local SGD sends weights at every fourth step, and its norm at each; PowerSGD begins after three whole ones."""
    sent = figures(runs, "local_sgd", "sent_bytes")
    assert (
        sent[:2] == [None] * 2
        and sent[2] == 8
        and sent[3] == 8 + 4 * parameters(runs)
        and sent[3::4] == [sent[3]] * 7
    )
    later = figures(runs, "powersgd, static graph", "sent_bytes")
    assert later[2] == 4 * parameters(runs) > 2 * later[3] > 0


@pytest.mark.parametrize("name", ["local_sgd of period 1, sgd", "local_sgd from step 6 on, sgd"])
def test_averaging_each_step_is_ddp(runs: Path, name: str) -> None:
    """With SGD the mean of the ranks' steps is the step of their mean gradient, momentum included."""
    assert figures(runs, name, "loss") == pytest.approx(figures(runs, "ddp, sgd", "loss"), rel=1e-5)
    same_weights(of(runs, name), of(runs, "ddp, sgd"), 1e-5)


@pytest.mark.parametrize(("first", "second"), RESUMED)
def test_goes_on(runs: Path, first: str, second: str) -> None:
    resumed = f"{first} then {second}"
    assert figures(runs, resumed, "step") == [3, 4]
    # What the first had reached is where the second begins: the same batch, the same weights, the same loss.
    assert figures(runs, resumed, "loss")[0] == pytest.approx(
        figures(runs, first, "loss")[2], rel=1e-5
    )
    if first == second:
        assert figures(runs, resumed, "loss") == pytest.approx(
            figures(runs, first, "loss")[2:], rel=1e-6
        )
        assert figures(runs, resumed, "grad_norm") == pytest.approx(
            figures(runs, first, "grad_norm")[2:], rel=1e-6
        )
        same_weights(of(runs, resumed), of(runs, first), 1e-6)


def test_diloco_keeps_its_outer_state_apart(runs: Path) -> None:
    """Other strategies leave it out; one that comes from them starts with no momentum and has some after an outer step."""
    names = set(weights(of(runs, "diloco of four")))
    assert {n.split(".")[0] for n in names} == {"model", "optim", "outer"}
    assert {n for n in names if n.startswith("outer.")} == {
        f"outer.{n.removeprefix('model.')}.{slot}"
        for n in names
        if n.startswith("model.")
        for slot in ("weight", "momentum")
    }
    assert not any(
        n.startswith("outer.") for n in weights(of(runs, "diloco of four then ddp of four"))
    )
    begun = weights(of(runs, "ddp of four then diloco of four"))
    assert any(bool(t.any()) for n, t in begun.items() if n.endswith(".momentum"))


def test_the_outer_step_is_nesterov(runs: Path) -> None:
    """From the checkpoints alone: θ' = θ − 0.7 (1 + 0.9) Δ and m = Δ in the first outer step, where m was zero."""
    folder = of(runs, "ddp of four then diloco of four")
    after, before = weights(folder), weights_at(folder, 2)
    for name in [n for n in before if n.startswith("model.")]:
        fqn = name.removeprefix("model.")
        moved, momentum = (
            before[name] - after[f"outer.{fqn}.weight"],
            after[f"outer.{fqn}.momentum"],
        )
        torch.testing.assert_close(moved, 0.7 * 1.9 * momentum, rtol=1e-3, atol=1e-6)


def weights_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    from drumline.checkpoint.load import check
    from drumline.checkpoint.load import load as load_tensors

    path = run / "checkpoints" / f"step-{step:08}"
    tensors = {
        name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype))
        for name, t in check(path, verify=False).tensors.items()
    }
    load_tensors(path, tensors)
    return tensors


def test_int8_on_four_ranks(runs: Path) -> None:
    assert figures(runs, "int8 on 4", "loss") == pytest.approx(
        figures(runs, "none on 4", "loss"), rel=2e-3
    )
    sent, plain = (
        figures(runs, "int8 on 4", "sent_bytes")[-1],
        figures(runs, "none on 4", "sent_bytes")[-1],
    )
    assert 0.25 <= sent / plain <= 0.3, "blocks of small buckets are not all full"
