"""The native engine on one process: precision, checkpointing, compile, skipping, and what it hands to a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import Config, OptimizerConfig
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.engine import data_parallel, norms
from drumline.engine.native import NativeEngine, prepare
from drumline.engine.norms import GROWTH_INTERVAL, LossScale
from drumline.engine.optimizer import build_optimizer, handles_found_inf
from drumline.engine.transforms import (
    COMPILED_PRODUCTS,
    apply_activation_checkpointing,
    blocks,
    selective_contexts,
)
from drumline.errors import PlanError
from drumline.models.build import lay_out
from drumline.models.shards import Values
from drumline.plan.plan import BatchPlan, Plan, Predicted
from drumline.vendor.torch import TorchDispatchMode
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("native") / "model")


def engine(model_dir: Path, precision: str = "fp32", /, **sections: Any) -> NativeEngine:
    config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}, **sections})
    plan = Plan(
        config=config, run_dir="r", mesh=Mesh(), engine="native", device="cpu", backend="gloo", precision=precision,
        activation_checkpointing=config.memory.activation_checkpointing,
        batch=BatchPlan(global_samples=2, micro_batch=1, accumulation=2, eval_micro_batch=1), lr=1e-2, steps=3,
        data=None, model_path=str(model_dir), predicted=Predicted(), data_parallel=config.strategy.data_parallel(Mesh()),
    )  # fmt: skip
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    return prepare(plan, model, Values(source, "cpu", 0), NativeEngine)


def batches(rows: int = 2, length: int = 24) -> list[TokenBatch]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(rows):
        ids = torch.randint(3, 300, (1, length), generator=draw)
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
        made.append(TokenBatch(ids, targets, torch.arange(length)[None], length - 1))
    return made


def train(made: NativeEngine, steps: int = 3) -> list[tuple[float, float]]:
    figures = []
    for _ in range(steps):
        sums = made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
        norm = made.grad_norm()
        made.step(1e-2, norm, torch.isfinite(norm))
        figures.append((float(sums["loss"]) / 46.0, float(norm)))
    return figures


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[tuple[float, float]]:
    figures = train(engine(model_dir))
    assert figures[-1][0] < figures[0][0] - 0.1
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "precision", "tolerance"),
    [
        pytest.param(
            {"memory": {"activation_checkpointing": "full"}},
            "fp32",
            0.0,
            id="activation checkpointing",
        ),
        pytest.param(
            {"memory": {"activation_checkpointing": "selective"}},
            "fp32",
            0.0,
            id="selective checkpointing",
        ),
        pytest.param(
            {"algorithm": {"kind": "sft", "loss_chunk": 0}}, "fp32", 1e-6, id="all logits"
        ),
        pytest.param({"model": {"attention": "eager"}}, "fp32", 1e-5, id="eager attention"),
        pytest.param({"optimizer": {"fused": False}}, "fp32", 1e-5, id="unfused"),
        pytest.param(
            {"compile": {"enabled": True}}, "fp32", 1e-4, id="compiled", marks=pytest.mark.full
        ),
        pytest.param(
            {"compile": {"enabled": True}, "memory": {"activation_checkpointing": "selective"}},
            "fp32",
            1e-4,
            id="compiled selective",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"memory": {"activation_checkpointing": "selective"}}, "bf16", 2e-2, id="bf16 selective"
        ),
        pytest.param({}, "bf16", 2e-2, id="bf16"),
        # The third norm: 3.8e-2 apart on some CPUs, 2e-2 on others.
        pytest.param({}, "fp16", 5e-2, id="fp16"),
    ],
)
def test_same_losses_in_every_mode(
    model_dir: Path,
    plain: list[tuple[float, float]],
    sections: dict[str, Any],
    precision: str,
    tolerance: float,
) -> None:
    made = engine(model_dir, precision, **sections)
    for got, expected in zip(train(made), plain, strict=True):
        assert got == pytest.approx(expected, rel=tolerance)
    assert all(
        t.dtype == torch.float32 for n, t in made.tensors().items() if n.startswith("model.")
    ), "master weights stay fp32"


def test_clipping_scales_the_gradient(model_dir: Path) -> None:
    made = engine(model_dir, optimizer={"kind": "sgd", "momentum": 0.0, "max_grad_norm": 0.1})
    before = {n: t.clone() for n, t in made.tensors().items() if n.startswith("model.")}
    made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
    norm = made.grad_norm()
    assert norm > 0.1
    made.step(1.0, norm, torch.isfinite(norm))
    after = made.tensors()
    moved = math.sqrt(sum(float((after[n] - t).pow(2).sum()) for n, t in before.items()))
    assert moved == pytest.approx(0.1, rel=1e-3)


NOT_FINITE = [
    {"kind": kind, "fused": fused} for kind in ("adamw", "sgd") for fused in (True, False)
]
NOT_FINITE += [{"kind": "muon"}, {"offload": True}]


@pytest.mark.parametrize("optimizer", NOT_FINITE, ids=lambda o: f"{o}")
def test_a_step_that_is_not_finite_leaves_everything(
    model_dir: Path, optimizer: dict[str, Any]
) -> None:
    made = engine(model_dir, optimizer=optimizer)
    train(made, 1)
    before = {n: t.clone() for n, t in made.tensors().items()}
    made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
    norm = made.grad_norm() * math.nan
    made.step(1.0, norm, torch.isfinite(norm))
    assert all(torch.equal(t, before[n]) for n, t in made.tensors().items())
    made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
    made.step(1.0, made.grad_norm(), torch.tensor(True))
    assert all(
        not torch.equal(t, before[n]) for n, t in made.tensors().items() if n.endswith(".step")
    ), "it goes on"


@pytest.mark.parametrize("kind", ["adamw", "muon", "schedule_free"])
def test_weights_are_gathered_in_fp8_with_scales_of_their_own(model_dir: Path, kind: str) -> None:
    """Whatever has set them: a step, a mean that is evaluated, a checkpoint."""
    pytest.importorskip("torchao")
    options = {
        "precision": {"kind": "fp8", "scaling": "tensorwise", "gather": "fp8"},
        "strategy": "fsdp2",
        "optimizer": {"kind": kind},
    }
    made = engine(model_dir, "bf16", **options)
    try:

        def require_own_scales() -> None:
            named: dict[str, Any] = {**made.named}
            # to_local gives one without its scale
            weights = [p._local_tensor for name, p in named.items() if "_proj" in name]
            scales = [
                torch.finfo(torch.float8_e4m3fn).max / float(weight.detach().abs().max())
                for weight in weights
            ]
            assert [float(weight._precomputed_scale) for weight in weights] == pytest.approx(
                scales, rel=1e-5
            )

        saved = {name: tensor.clone() for name, tensor in made.tensors().items()}
        state = made.state() | {"step": 0}
        train(made, 2)
        require_own_scales()
        made.evaluate(batches(), NextToken(16, False).objective)
        require_own_scales()
        made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
        require_own_scales()
        tensors = made.tensors()
        for name, tensor in saved.items():
            tensors[name].copy_(tensor)
        made.load_state(state, tensors)
        require_own_scales()
    finally:
        dist.destroy_process_group()


def test_an_overflow_forgets_the_gradient_and_lowers_the_fp16_scale(model_dir: Path) -> None:
    made = engine(model_dir, "fp16", precision={"kind": "fp16", "initial_scale": 2.0**40})
    made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
    norm = made.grad_norm()
    assert not math.isfinite(norm) and made.rescales()
    before = {n: t.clone() for n, t in made.tensors().items()}
    made.step(1e-2, norm, torch.isfinite(norm))
    assert all(torch.equal(t, before[n]) for n, t in made.tensors().items())
    assert made.state()["scaler"]["scale"] == 2.0**39
    assert all(p.grad is None for p in made.named.values())


def test_the_loss_scale_grows_and_shrinks_without_the_host() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    scale = LossScale(8.0, enabled=True, device="cpu")
    scale.load({"scale": 8.0, "good_steps": GROWTH_INTERVAL - 1})
    scale.update(is_stepped=no, is_overflow=no)
    assert scale.state() == {"scale": 8.0, "good_steps": GROWTH_INTERVAL - 1}
    scale.update(is_stepped=yes, is_overflow=no)
    assert scale.state() == {"scale": 16.0, "good_steps": GROWTH_INTERVAL}
    scale.update(is_stepped=no, is_overflow=yes)
    assert scale.state() == {"scale": 8.0, "good_steps": 0}
    # Tensors without numbers raise where the host reads one.
    nowhere = LossScale(8.0, enabled=True, device="meta")
    nowhere.unscale([torch.ones(3, device="meta")])
    nowhere.update(is_stepped=yes.to("meta"), is_overflow=no.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        nowhere.state()


def test_a_bucket_of_gradients_moves_nothing_to_the_device_or_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [
        nn.Parameter(torch.ones(3, device="meta")),
        nn.Parameter(torch.ones(2, device="meta")),
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    sent = []

    def all_reduce(tensor: torch.Tensor, **_: Any) -> Any:
        sent.append(tensor.shape)
        return SimpleNamespace(wait=lambda: None)

    def copy_to_the_device(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor is made of numbers of the host")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch, "tensor", copy_to_the_device)
    group: Any = None
    bucket = data_parallel._Bucket(weights, group)
    bucket.unpack(2)
    assert sent == [(3 + 2 + 2,)]


def test_an_fp16_step_is_decided_on_the_device(model_dir: Path) -> None:
    assert engine(model_dir, "fp16").handles_found_inf


def test_a_loss_that_jumps_is_no_overflow(model_dir: Path) -> None:
    made = engine(model_dir, "fp16", precision={"kind": "fp16", "initial_scale": 64.0})
    train(made, 1)
    before = {n: t.clone() for n, t in made.tensors().items()}
    made.forward_backward(batches(), NextToken(16, False).objective, 46.0)
    norm = made.grad_norm()
    assert math.isfinite(norm)
    made.step(1e-2, norm, torch.tensor(False))
    assert all(torch.equal(t, before[n]) for n, t in made.tensors().items())
    assert made.state()["scaler"] == {"scale": 64.0, "good_steps": 1}


@pytest.mark.slow
def test_checkpoint_tensors_are_canonical_and_live(model_dir: Path) -> None:
    made = engine(model_dir, compile={"enabled": True})
    names = set(made.tensors())
    parameters = {n for n, _ in made.model.named_parameters()}
    assert {f"model.{n}" for n in parameters} <= names
    assert {
        f"optim.{n}.{slot}" for n in parameters for slot in ("exp_avg", "exp_avg_sq", "step")
    } <= names
    assert not any("module" in n or "_orig_mod" in n for n in names)
    assert "model.lm_head.weight" not in names, "tied: stored once, under the embedding"
    steps = [t for n, t in made.tensors().items() if n.endswith(".step")]
    assert all(float(t) == 0 for t in steps), (
        "state is there before the first step, and says that none was taken"
    )


def test_decay_spares_biases_and_norms(model_dir: Path) -> None:
    made = engine(model_dir, optimizer={"weight_decay": 0.1})
    by_decay = {
        g["weight_decay"]: {p.ndim for p in g["params"]} for g in made.optimizer.param_groups
    }
    assert by_decay == {0.1: {2}, 0.0: {1}}
    assert len(engine(model_dir).optimizer.param_groups) == 1, (
        "without decay nothing tells them apart"
    )


def test_blocks_are_the_models_own(model_dir: Path) -> None:
    made = engine(model_dir)
    assert [type(b).__name__ for b in blocks(made.model)] == ["LlamaDecoderLayer"] * 2


def test_selective_keeps_more_than_full_and_less_than_all(model_dir: Path) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    kept = {}
    for kind in ("none", "selective", "full"):
        made = engine(model_dir, memory={"activation_checkpointing": kind})
        with MemTracker() as memory:
            loss, _ = made.spread.module(batches(1, 96)[0], NextToken(16, False).objective)
            kept[kind] = memory.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
        loss.backward()
    assert kept["none"] > 1.3 * kept["selective"] > 1.3 * 1.3 * kept["full"], kept


@pytest.mark.full
def test_a_region_of_compiled_code_keeps_every_second_product() -> None:
    """As transformers 5.17 has it, where recomputation lies around what is compiled."""

    class Written(TorchDispatchMode):
        products, supports_higher_order_operators = 0, True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.products += func in COMPILED_PRODUCTS
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    layers, inputs = (
        nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh()))),
        torch.randn(8, 16),
    )
    found = {}
    for name, around in {
        "none": None,
        "full": noop_context_fn,
        "selective": selective_contexts,
    }.items():
        run = torch.compile(layers)
        with Written() as written:
            out = (
                run(inputs)
                if around is None
                else checkpoint(run, inputs, use_reentrant=False, context_fn=around)
            )
            gradients = torch.autograd.grad(out.square().sum(), list(layers.parameters()))
        found[name] = written.products, gradients
    products = [of for of, _ in found.values()]
    assert products[1] - products[0] == 4 and products[2] - products[0] == 2, products
    for _, gradients in found.values():
        torch.testing.assert_close(gradients, found["none"][1])


def test_a_model_without_checkpointing_is_refused() -> None:
    with pytest.raises(PlanError, match="Linear has no activation checkpointing"):
        apply_activation_checkpointing(torch.nn.Linear(1, 1), "full")


def test_a_norm_over_stages_is_summed_on_the_device_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the rank that has no gradients: a tensor in host memory would meet the others' on NCCL."""
    summed: list[str] = []
    monkeypatch.setattr(
        norms.dist, "all_reduce", lambda tensor, group: summed.append(tensor.device.type)
    )
    for gradients in ([], [torch.ones(3)]):
        norms.global_norm(gradients, "meta", group=object())  # type: ignore[arg-type]
    assert summed == ["meta", "meta"]
    assert norms.global_norm([], "cpu") == 0.0


def test_the_host_decides_for_a_fused_step_on_another_device() -> None:
    """A flag on a GPU has not come to the host when a fused step there reads it."""
    parameter, plain = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    fused = build_optimizer({"weight": parameter}, OptimizerConfig())
    assert handles_found_inf(fused, "cpu") and not handles_found_inf(fused, "cuda")
    assert not handles_found_inf(
        build_optimizer({"weight": plain}, OptimizerConfig(fused=False)), "cpu"
    )


def test_an_optimizer_with_nothing_to_learn_takes_its_steps() -> None:
    for kind in ("adamw", "sgd"):
        optimizer = build_optimizer(
            {"frozen": nn.Parameter(torch.ones(2), requires_grad=False)}, OptimizerConfig(kind=kind)
        )
        optimizer.step()
        assert not optimizer.state
