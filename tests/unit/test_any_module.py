"""Any nn.Module: laid out without memory, its first values played from what its constructor did, and trained by the engines."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.init import trunc_normal_
from transformers.initialization import meta_device_safe_creation_ops

from drumline.config.mesh import Mesh
from drumline.engine.build import ModuleParts, build_module
from drumline.engine.engine import CustomLoopEngine
from drumline.engine.module_pipeline import assign_stages, trace
from drumline.errors import ModelError, PlanError
from drumline.models.own import require_trainable
from drumline.models.shards import NothingToFill, Values
from drumline.models.tape import ReplayedValues, lay_out_module
from drumline.plan.plan import Plan
from drumline.vendor.torch import device_constructors
from tests.distributed.staged import Staged, sequence
from tests.harness import ENV
from tests.plans import small_config, small_plan


class Many(nn.Module):
    """Weights by all the rules that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 8, 16) * 0.02)
        self.token = nn.Parameter(torch.zeros(16))
        self.first = nn.Linear(16, 16)
        self.copy = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.orthogonal = nn.Linear(16, 16)
        self.register_buffer(
            "mask",
            torch.tril(torch.ones(8, 8)),
            persistent=False,
        )
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.rule)
        nn.init.orthogonal_(self.orthogonal.weight)
        trunc_normal_(
            self.first.weight,
            std=0.5,
            a=-0.6,
            b=0.6,
        )
        self.copy.load_state_dict(self.first.state_dict())

    def rule(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def filled(seed: int = 0) -> Many:
    model, source = lay_out_module(Many, seed, "cpu")
    assert isinstance(source, ReplayedValues)

    for parameter in model.parameters():
        assert parameter.is_meta

    Values(source, "cpu", seed).fill(model)
    assert isinstance(model, Many)

    return model


def test_first_values_follow_the_modules_own_rules() -> None:
    model = filled()
    first = model.first.weight
    # trunc_normal_, which does nothing without memory.
    assert first.abs().max() <= 0.6
    assert 0.2 < first.std() < 0.5
    assert torch.equal(model.copy.weight, first)
    assert torch.equal(model.copy.bias, model.first.bias)

    weight = model.orthogonal.weight
    assert torch.allclose(weight @ weight.T, torch.eye(16), atol=1e-5)

    head = model.head.weight
    assert head is model.embed.weight
    assert 0.015 < head.std() < 0.025
    assert 0.01 < model.position.std() < 0.03
    assert not model.token.any()
    assert model.norm.weight.eq(1).all()

    batch_norm: Any = model.batch_norm
    assert batch_norm.running_var.eq(1).all()
    assert batch_norm.num_batches_tracked == 0
    assert torch.equal(model.mask, torch.tril(torch.ones(8, 8)))  # type: ignore[arg-type]


def test_a_seed_gives_the_same_weights_whatever_part_is_asked_for() -> None:
    whole = filled().orthogonal.weight
    other = filled(seed=1).orthogonal.weight
    model, source = lay_out_module(Many, 0, "cpu")
    part = torch.empty(16, 16)
    source.put({"orthogonal.weight": part}, model)
    assert torch.equal(part, whole)
    assert not torch.equal(other, whole)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([1.0, 2.0]))


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(1))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rates = [torch.linspace(0, 1, 3)]


class Rows(nn.Module):
    """It copies from one tensor of the host again and again, and has names that PEFT's layers have."""

    def __init__(self, width: int = 3, own: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, width), 2.0))
        self.base_layer = nn.Embedding(4, width)
        self.lora_A = nn.ModuleDict(
            {
                "default": nn.Linear(
                    2,
                    2,
                    bias=False,
                )
            }
        )
        nn.init.constant_(self.lora_A["default"].weight, 5.0)
        if own:
            buffer = torch.empty(width, device="cpu")
        else:
            buffer = torch.from_numpy(np.zeros(width, np.float32))

        with torch.no_grad():
            for index in range(4):
                if own:
                    buffer[:] = index
                else:
                    buffer.numpy()[:] = index
                self.base_layer.weight[index].copy_(buffer)


@pytest.mark.parametrize(
    ("width", "own"), [(3, False), (3, True), (2**19, True)], ids=["numpy", "torch", "large"]
)
def test_values_are_those_that_the_host_had_then_whatever_weights_are_called(
    width: int, own: bool
) -> None:
    model, source = lay_out_module(lambda: Rows(width, own), 0, "cpu")
    assert isinstance(source, ReplayedValues) == (width == 3)

    Values(source, "cpu", 0).fill(model)
    values = dict(model.named_parameters())
    assert values["base_layer.weight"][:, -1].tolist() == [0, 1, 2, 3]
    assert values["weight"].eq(2).all()
    assert values["lora_A.default.weight"].eq(5).all()


@pytest.mark.parametrize("build", [Looks, Listed, Drawn, Held])
def test_what_the_tape_does_not_have_is_built_whole(build: type[nn.Module]) -> None:
    device_constructors.cache_clear()
    with meta_device_safe_creation_ops(), torch.device("meta"):
        torch.empty(1)  # a model of transformers was made before

    first, source = lay_out_module(build, 3, "cpu")
    again, _ = lay_out_module(build, 3, "cpu")
    assert isinstance(source, NothingToFill)

    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert not a.is_meta
        assert torch.equal(a, b)


class FrozenProjection(nn.Module):
    """A random projection that is not trained, before a layer that is."""

    def __init__(self, is_frozen: bool = True) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4, bias=False).requires_grad_(not is_frozen)
        self.layer = nn.Linear(4, 4)


def test_values_that_no_checkpoint_has_are_drawn_on_the_cpu() -> None:
    """An export draws them again, maybe on a machine without this GPU."""
    _, frozen = lay_out_module(FrozenProjection, 0, "cpu", draw_device="cuda")
    _, trained = lay_out_module(lambda: FrozenProjection(False), 0, "cpu", draw_device="cuda")
    assert isinstance(frozen, ReplayedValues) and frozen.draw_device == "cpu"
    assert isinstance(trained, ReplayedValues) and trained.draw_device == "cuda"


def test_a_run_on_the_cpu_draws_there_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    model, source = lay_out_module(Many, 0, "cpu")
    part = torch.empty(16, 16)
    source.put({"orthogonal.weight": part}, model)
    assert part.any()


def test_build_must_give_a_module() -> None:
    with pytest.raises(ModelError, match="build gave dict"):
        lay_out_module(dict, 0, "cpu")  # type: ignore[arg-type]


def test_what_python_and_numpy_draw_comes_from_the_seed() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, random.random() + np.random.rand())
        return layer

    def drawn(seed: int) -> float:
        before = random.getstate()
        model, source = lay_out_module(build, seed, "cpu")
        assert before == random.getstate()

        Values(source, "cpu", 0).fill(model)
        return model.weight.sum().item()  # type: ignore[operator, union-attr]

    first = drawn(3)
    assert drawn(3) == first
    assert drawn(4) != first


def with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: gradient)
    return module


def sparse() -> nn.Module:
    return nn.Embedding(4, 2, sparse=True)


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def complex_weight() -> nn.Module:
    return with_weight(torch.zeros(2, dtype=torch.cfloat))


def normed() -> nn.Module:
    return nn.Embedding(4, 2, max_norm=1.0)


def scalar() -> nn.Module:
    return with_weight(torch.zeros(()))


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    ("build", "cut", "says"),
    [
        (sparse, False, "sparse gradients"),
        (lazy, False, "weight has no shape yet"),
        (complex_weight, False, "weight is complex"),
        (normed, True, "max_norm of it changes a weight in forward"),
        (scalar, True, "weight has no dimension"),
        (mixed, True, r"weights of several types \(float32, float64\)"),
        (hooked, True, "weight has a hook"),
    ],
)
def test_what_no_engine_or_no_cut_one_trains(
    build: Callable[[], nn.Module], cut: bool, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        require_trainable(build(), cut=cut, deepspeed=cut)
    if cut:
        require_trainable(build(), cut=False, deepspeed=False)
    else:
        with pytest.raises(ModelError, match=says):
            build_module(plan(), build, "cpu")


# ------------------------------------------------------------------------------------------------------------- engines


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def plan(mesh: Mesh | None = None, **sections: Any) -> Plan:
    config = small_config(**{"strategy": "single", **sections})
    return small_plan(config, micro_batch=4, accumulation=2, mesh=mesh or Mesh())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(2):
        inputs = torch.randn(4, 4, generator=draw)
        targets = torch.randint(
            2,
            (4,),
            generator=draw,
        )
        drawn.append((inputs, targets))
    return drawn


def loss_sum(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def objective(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    return SimpleNamespace(loss_sum=loss_sum(model(inputs), targets), sums={})


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def by_objective(engine: CustomLoopEngine) -> float:
    engine.forward_backward(batches(), objective, 8.0)
    norm = engine.grad_norm()
    engine.step(0.01, norm, norm.isfinite())
    return float(norm)


def by_hand(engine: CustomLoopEngine) -> float:
    """As a session does it: divided by something else first, and once by the weight."""
    for index, (inputs, targets) in enumerate(batches()):
        with engine.micro_batch(last=index == 1):
            loss = loss_sum(engine.call(inputs), targets)
            engine.backward(loss, 2.0)

    engine.divide(torch.tensor(4.0))
    norm = engine.grad_norm()
    engine.step(None, norm, norm.isfinite())
    return float(norm)


def test_one_engine_for_an_objective_and_for_a_loop_of_ones_own() -> None:
    one = build_module(
        plan(),
        mlp,
        "cpu",
        make_optimizer=make_optimizer,
    )
    other = build_module(
        plan(),
        mlp,
        "cpu",
        make_optimizer=make_optimizer,
    )
    for _ in range(3):
        assert by_objective(one) == pytest.approx(by_hand(other), rel=1e-6)

    mine = one.tensors()
    others = other.tensors()
    assert mine.keys() == others.keys()

    for name in ("model.0.weight", "optim.0.weight.exp_avg", "optim.0.weight.step"):
        assert name in mine

    for name, tensor in mine.items():
        assert torch.allclose(tensor, others[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("mesh", "what"), [(Mesh(tp=2), "requires a plan"), (Mesh(cp=2), "supports only the attention")]
)
def test_a_strategy_that_lacks_something_says_what(mesh: Mesh, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        build_module(plan(mesh), mlp, "cpu")


def test_modules_that_a_plan_names_must_be_there() -> None:
    parts = ModuleParts(tp_plan={"up": "colwise"})
    with pytest.raises(PlanError, match="no module up"):
        build_module(plan(), mlp, "cpu", parts=parts)


class Running(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.norm = nn.BatchNorm1d(2).double()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("fixed", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layer(x.double()))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden


def test_buffers_that_forward_changes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    # In fp64, too.
    engine = build_module(
        plan(),
        Running,
        "cpu",
        make_optimizer=make_optimizer,
    )
    assert math.isfinite(by_hand(engine))
    (message,) = [message for message in caplog.messages if "changes" in message]
    assert message.startswith("forward changes mean once per micro-batch")


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer)


class Outside(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)


class Crossing(Staged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x, x.new_ones(()))
        return self.last(x + first)


class Leaving(Staged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x, x.new_ones(()))
        return self.last(x) + first.mean()


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Many(), "requires the stages of Many"),
        (shared(), "not submodules, each once"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "batch norms agree"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            "1 stages with weights cannot be cut over 2 ranks",
        ),
        (Outside(), r"more\.weight is in none of the stages"),
    ],
)
def test_stages_that_cannot_be_cut(module: nn.Module, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        assign_stages(module, 2)


def test_stages_are_cut_where_they_hold_as_much() -> None:
    # Flatten, 40 weights, Tanh | 144, Tanh, 34.
    assert assign_stages(nn.Sequential(*sequence()), 2) == [(0, 3), (3, 6)]


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Crossing(), "stage 5 of Crossing is not called once, with what the stage before it"),
        (Leaving(), "last stage alone"),
    ],
)
def test_stages_that_are_no_chain(module: nn.Module, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        trace(module.to("meta"), (torch.ones(3, 4),), {})


def test_a_class_that_is_not_there() -> None:
    parts = ModuleParts(units=["Block"])
    with pytest.raises(PlanError, match="no module of class Block"):
        build_module(plan(), mlp, "cpu", parts=parts)


def test_blocks_are_computed_again_where_checkpointing_is_on() -> None:
    calls: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x + self.layer(x).tanh()

    def build() -> nn.Module:
        return nn.Sequential(Block(), Block())

    def norm(kind: str) -> float:
        calls.clear()
        checkpointed = plan().model_copy(update={"activation_checkpointing": kind})
        parts = ModuleParts(units=["Block"])
        return by_hand_norm(build_module(checkpointed, build, "cpu", parts=parts))

    once = norm("none")
    assert len(calls) == 4

    again = norm("full")
    assert len(calls) == 8
    assert once == again
    assert math.isfinite(once)


def by_hand_norm(engine: CustomLoopEngine) -> float:
    for index, (inputs, _) in enumerate(batches()):
        with engine.micro_batch(last=index == 1):
            loss = engine.call(inputs).square().sum()
            engine.backward(loss, 8.0)
    return float(engine.grad_norm())


@pytest.mark.slow
def test_no_transformers_on_the_way() -> None:
    code = "import sys; import drumline.engine.build, drumline.engine.native; print([n for n in sys.modules if n == 'transformers'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=ENV,
    )
    assert done.stdout.strip() == "[]"
