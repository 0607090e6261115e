"""The native engine on one process: precision, checkpointing, compile, skipping, and what it hands to a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoModelForImageTextToText

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import OptimizerConfig
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.engine import data_parallel, norms
from drumline.engine.native import NativeEngine, prepare
from drumline.engine.norms import GROWTH_INTERVAL, LossScale
from drumline.engine.optimizer import build_optimizer_with_state, handles_found_inf
from drumline.engine.transforms import (
    COMPILED_MATMULS,
    apply_activation_checkpointing,
    blocks,
    selective_contexts,
)
from drumline.errors import PlanError
from drumline.models.blocks import text_blocks
from drumline.models.build import lay_out
from drumline.models.shards import Values
from drumline.vendor.torch import TorchDispatchMode
from tests.plans import small_config, small_plan
from tests.tiny import tiny_architecture_dir, tiny_model_dir, tiny_vision_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("native") / "model")


def engine(
    model_dir: Path,
    precision: str = "fp32",
    /,
    **sections: Any,
) -> NativeEngine:
    config = small_config(**sections)
    plan = small_plan(
        config,
        accumulation=2,
        precision=precision,
        activation_checkpointing=config.memory.activation_checkpointing,
        model_path=str(model_dir),
        data_parallel=config.strategy.data_parallel(Mesh()),
    )
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    return prepare(plan, model, Values(source, "cpu", 0), NativeEngine)


def batches(rows: int = 2, length: int = 24) -> list[TokenBatch]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(rows):
        ids = torch.randint(3, 300, (1, length), generator=draw)
        nothing = torch.full((1, 1), -100)
        targets = torch.cat([ids[:, 1:], nothing], 1)
        places = torch.arange(length)[None]
        made.append(TokenBatch(ids, targets, places, length - 1))

    return made


OBJECTIVE = NextToken(16, False).objective
WEIGHT = 46.0


def backward(made: NativeEngine) -> Any:
    """Return the sums of a forward and backward of the two batches."""
    return made.forward_backward(batches(), OBJECTIVE, WEIGHT)


def train(made: NativeEngine, steps: int = 3) -> list[tuple[float, float]]:
    figures = []
    for _ in range(steps):
        sums = backward(made)
        norm = made.grad_norm()
        made.step(1e-2, norm, torch.isfinite(norm))
        figures.append((float(sums["loss"]) / WEIGHT, float(norm)))

    return figures


def copy_tensors(made: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


def assert_unchanged(made: NativeEngine, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in made.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[tuple[float, float]]:
    figures = train(engine(model_dir))
    assert figures[-1][0] < figures[0][0] - 0.1
    return figures


class Mode(NamedTuple):
    """How an engine computes, and how far its figures may be from those of plain fp32."""

    sections: dict[str, Any]
    precision: str
    tolerance: float


SELECTIVE = {"activation_checkpointing": "selective"}
COMPILED = {"enabled": True}
MODES = {
    "activation checkpointing": Mode({"memory": {"activation_checkpointing": "full"}}, "fp32", 0.0),
    "selective checkpointing": Mode({"memory": SELECTIVE}, "fp32", 0.0),
    "all logits": Mode({"algorithm": {"kind": "sft", "loss_chunk": 0}}, "fp32", 1e-6),
    "eager attention": Mode({"model": {"attention": "eager"}}, "fp32", 1e-5),
    "unfused": Mode({"optimizer": {"fused": False}}, "fp32", 1e-5),
    "compiled": Mode({"compile": COMPILED}, "fp32", 1e-4),
    "compiled selective": Mode({"compile": COMPILED, "memory": SELECTIVE}, "fp32", 1e-4),
    "bf16 selective": Mode({"memory": SELECTIVE}, "bf16", 2e-2),
    "bf16": Mode({}, "bf16", 2e-2),
    # The third norm: 3.8e-2 apart on some CPUs, 2e-2 on others.
    "fp16": Mode({}, "fp16", 5e-2),
}


def modes() -> list[Any]:
    found = []
    for name, mode in MODES.items():
        marks = pytest.mark.full if "compile" in mode.sections else ()
        found.append(pytest.param(mode, id=name, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes())
def test_same_losses_in_every_mode(
    model_dir: Path,
    plain: list[tuple[float, float]],
    mode: Mode,
) -> None:
    made = engine(model_dir, mode.precision, **mode.sections)
    for got, expected in zip(train(made), plain, strict=True):
        assert got == pytest.approx(expected, rel=mode.tolerance)
    for name, tensor in made.tensors().items():
        if name.startswith("model."):
            assert tensor.dtype == torch.float32, f"the master weights of {name} stay fp32"


class _GroupedProducts(TorchDispatchMode):
    """Records the dtypes of all factors of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes |= {factor.dtype for factor in args[:2]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_multiply_in_the_precision_of_the_run(tmp_path: Path, precision: str) -> None:
    """Autocast alone leaves torch's grouped products in fp32: slow, and a wait for the host."""
    made = engine(tiny_architecture_dir(tmp_path / "model", "mixtral"), precision)
    with _GroupedProducts() as products:
        backward(made)
    experts = made.model.get_submodule("model.layers.0.mlp.experts")
    gradients = {parameter.grad.dtype for parameter in experts.parameters()}
    assert products.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert gradients == {torch.float32}


def test_clipping_scales_the_gradient(model_dir: Path) -> None:
    options = {
        "kind": "sgd",
        "momentum": 0.0,
        "max_grad_norm": 0.1,
    }
    made = engine(model_dir, optimizer=options)
    before = copy_tensors(made)
    backward(made)
    norm = made.grad_norm()

    assert norm > 0.1

    made.step(1.0, norm, torch.isfinite(norm))
    squares = 0.0
    for name, tensor in made.tensors().items():
        if name.startswith("model."):
            squares += float((tensor - before[name]).pow(2).sum())

    assert math.sqrt(squares) == pytest.approx(0.1, rel=1e-3)


NOT_FINITE = [
    {"kind": "adamw", "fused": True},
    {"kind": "adamw", "fused": False},
    {"kind": "sgd", "fused": True},
    {"kind": "sgd", "fused": False},
    {"kind": "muon"},
    {"offload": True},
]


@pytest.mark.parametrize("optimizer", NOT_FINITE, ids=str)
def test_a_step_that_is_not_finite_leaves_everything(
    model_dir: Path, optimizer: dict[str, Any]
) -> None:
    made = engine(model_dir, optimizer=optimizer)
    train(made, 1)
    before = copy_tensors(made)
    backward(made)
    norm = made.grad_norm() * math.nan
    made.step(1.0, norm, torch.isfinite(norm))

    assert_unchanged(made, before)

    backward(made)
    made.step(1.0, made.grad_norm(), torch.tensor(True))
    for name, tensor in made.tensors().items():
        if name.endswith(".step"):
            assert not torch.equal(tensor, before[name]), f"{name} goes on"


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def assert_own_scales(made: NativeEngine) -> None:
    """Assert that each weight which is gathered in fp8 has the scale of its own largest number."""
    found = []
    wanted = []
    named: dict[str, Any] = {**made.named}
    for name, parameter in named.items():
        if "_proj" in name:
            weight = parameter._local_tensor  # to_local gives one without its scale
            found.append(float(weight._precomputed_scale))
            wanted.append(FP8_MAX / float(weight.detach().abs().max()))

    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon", "schedule_free"])
def test_weights_are_gathered_in_fp8_with_scales_of_their_own(model_dir: Path, kind: str) -> None:
    """Whatever has set them: a step, a mean that is evaluated, a checkpoint."""
    pytest.importorskip("torchao")
    options = {
        "precision": {
            "kind": "fp8",
            "scaling": "tensorwise",
            "gather": "fp8",
        },
        "strategy": "fsdp2",
        "optimizer": {"kind": kind},
    }
    made = engine(model_dir, "bf16", **options)
    try:
        saved = copy_tensors(made)
        state = made.state() | {"step": 0}
        train(made, 2)
        assert_own_scales(made)
        made.evaluate(batches(), OBJECTIVE)
        assert_own_scales(made)
        backward(made)
        assert_own_scales(made)
        tensors = made.tensors()
        for name, tensor in saved.items():
            tensors[name].copy_(tensor)
        made.load_state(state, tensors)
        assert_own_scales(made)
    finally:
        dist.destroy_process_group()


def test_an_overflow_forgets_the_gradient_and_lowers_the_fp16_scale(model_dir: Path) -> None:
    made = engine(model_dir, "fp16", precision={"kind": "fp16", "initial_scale": 2.0**40})
    backward(made)
    norm = made.grad_norm()

    assert not math.isfinite(norm)
    assert made.uses_loss_scale()

    before = copy_tensors(made)
    made.step(1e-2, norm, torch.isfinite(norm))
    assert_unchanged(made, before)
    assert made.state()["scaler"]["scale"] == 2.0**39

    for name, parameter in made.named.items():
        assert parameter.grad is None, name


def test_the_loss_scale_grows_and_shrinks_without_the_host() -> None:
    yes = torch.tensor(True)
    no = torch.tensor(False)
    scale = LossScale(8.0, enabled=True, device="cpu")
    scale.load_state({"scale": 8.0, "good_steps": GROWTH_INTERVAL - 1})
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
    weights = []
    for size in (3, 2):
        weight = nn.Parameter(torch.ones(size, device="meta"))
        weight.grad = torch.ones_like(weight)
        weights.append(weight)

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
    before = copy_tensors(made)
    backward(made)
    norm = made.grad_norm()

    assert math.isfinite(norm)

    made.step(1e-2, norm, torch.tensor(False))
    assert_unchanged(made, before)
    assert made.state()["scaler"] == {"scale": 64.0, "good_steps": 1}


@pytest.mark.slow
def test_checkpoint_tensors_are_canonical_and_live(model_dir: Path) -> None:
    made = engine(model_dir, compile={"enabled": True})
    tensors = made.tensors()
    for name, _ in made.model.named_parameters():
        assert f"model.{name}" in tensors
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert f"optim.{name}.{slot}" in tensors

    assert "model.lm_head.weight" not in tensors, "tied: stored once, under the embedding"

    for name, tensor in tensors.items():
        assert "module" not in name
        assert "_orig_mod" not in name
        if name.endswith(".step"):
            assert float(tensor) == 0, "there before the first step, says that none was taken"


def test_decay_spares_biases_and_norms(model_dir: Path) -> None:
    made = engine(model_dir, optimizer={"weight_decay": 0.1})
    by_decay = {}
    for group in made.optimizer.param_groups:
        by_decay[group["weight_decay"]] = {each.ndim for each in group["params"]}

    assert by_decay == {0.1: {2}, 0.0: {1}}

    without = engine(model_dir).optimizer.param_groups
    assert len(without) == 1, "without decay nothing tells them apart"


def test_blocks_are_the_models_own(model_dir: Path) -> None:
    made = engine(model_dir)
    names = [type(block).__name__ for block in blocks(made.model)]
    assert names == ["LlamaDecoderLayer", "LlamaDecoderLayer"]


def test_selective_keeps_more_than_full_and_less_than_all(model_dir: Path) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    kept = {}
    for kind in ("none", "selective", "full"):
        made = engine(model_dir, memory={"activation_checkpointing": kind})
        (batch,) = batches(1, 96)
        with MemTracker() as memory:
            loss, _ = made.wrapper.train_module(batch, OBJECTIVE)
            snapshot = memory.get_tracker_snapshot("current")
            kept[kind] = snapshot[torch.device("cpu")]["Total"]
        loss.backward()

    assert kept["none"] > 1.3 * kept["selective"], kept
    assert kept["selective"] > 1.3 * kept["full"], kept


class Written(TorchDispatchMode):
    """Counts the products that are computed."""

    products = 0
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        self.products += func in COMPILED_MATMULS
        return func(*args, **(kwargs or {}))


def products_and_gradients(
    layers: nn.Module,
    inputs: torch.Tensor,
    around: Any,
) -> Any:
    """Return how many products a compiled forward and backward compute, and the gradients."""
    run = torch.compile(layers)
    with Written() as written:
        if around is None:
            out = run(inputs)
        else:
            out = checkpoint(
                run,
                inputs,
                use_reentrant=False,
                context_fn=around,
            )
        loss = out.square().sum()
        gradients = torch.autograd.grad(loss, list(layers.parameters()))

    return written.products, gradients


@pytest.mark.full
def test_a_region_of_compiled_code_keeps_every_second_product() -> None:
    """As transformers 5.17 has it, where recomputation lies around what is compiled."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(16, 16), nn.Tanh()]

    layers = nn.Sequential(*parts)
    inputs = torch.randn(8, 16)
    none, wanted = products_and_gradients(layers, inputs, None)
    full, gradients_of_full = products_and_gradients(layers, inputs, noop_context_fn)
    selective, gradients = products_and_gradients(layers, inputs, selective_contexts)

    assert full - none == 4
    assert selective - none == 2
    torch.testing.assert_close(gradients_of_full, wanted)
    torch.testing.assert_close(gradients, wanted)


def test_of_a_vision_language_model_the_first_text_blocks_are_computed_again(
    tmp_path: Path,
) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(tiny_vision_dir(tmp_path, layers=3))
    model.train()
    ids = torch.arange(24).reshape(2, 12)
    runs: list[str] = []
    for number, block in enumerate(text_blocks(model)):
        first_layer = block.input_layernorm
        first_layer.register_forward_hook(lambda *_, number=number: runs.append(f"text {number}"))

    def losses_and_gradients() -> list[torch.Tensor]:
        runs.clear()
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return [loss.detach(), *(gradient.clone() for gradient in gradients)]

    expected = losses_and_gradients()
    assert runs == ["text 0", "text 1", "text 2"]
    apply_activation_checkpointing(model, "full", 2)
    torch.testing.assert_close(losses_and_gradients(), expected)
    assert runs == ["text 0", "text 1", "text 2", "text 1", "text 0"]
    for block in blocks(model.model.visual):
        assert block.gradient_checkpointing


def test_a_model_without_checkpointing_is_refused() -> None:
    with pytest.raises(PlanError, match="Linear has no activation checkpointing"):
        apply_activation_checkpointing(torch.nn.Linear(1, 1), "full")


def test_a_norm_over_stages_is_summed_on_the_device_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the rank that has no gradients: a tensor in host memory would meet the others' on NCCL."""
    summed: list[str] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        summed.append(tensor.device.type)

    monkeypatch.setattr(norms.dist, "all_reduce", all_reduce)
    for gradients in ([], [torch.ones(3)]):
        norms.global_norm(gradients, "meta", group=object())  # type: ignore[arg-type]

    assert summed == ["meta", "meta"]
    assert norms.global_norm([], "cpu") == 0.0


def optimizer_of(is_learned: bool = True, **options: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(2), requires_grad=is_learned)
    return build_optimizer_with_state({"weight": weight}, OptimizerConfig(**options))


def test_the_host_decides_for_a_fused_step_on_another_device() -> None:
    """A flag on a GPU has not come to the host when a fused step there reads it."""
    fused = optimizer_of()
    unfused = optimizer_of(fused=False)
    assert handles_found_inf(fused, "cpu")
    assert not handles_found_inf(fused, "cuda")
    assert not handles_found_inf(unfused, "cpu")


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizer_with_nothing_to_learn_takes_its_steps(kind: str) -> None:
    optimizer = optimizer_of(is_learned=False, kind=kind)
    optimizer.step()
    assert not optimizer.state
