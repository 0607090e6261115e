"""The DeepSpeed engine in one process: norm before step, clipping, skipping, fp16's scale, state before the first step, noise."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import Config
from drumline.config.model import ModelConfig
from drumline.engine.native import NativeEngine
from drumline.engine.native import prepare as native
from drumline.engine.strategies.zero import machine as helpers
from drumline.engine.strategies.zero.fill import fill_parameters, shard_of_rank
from drumline.errors import EnvironmentFault
from drumline.hardware.detect import Machine
from drumline.models.build import lay_out
from drumline.models.shards import Values
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.plan.strategy_engine import engine_of
from tests.harness import ENV
from tests.tiny import tiny_model_dir
from tests.unit.test_native import batches

pytestmark = pytest.mark.slow

deepspeed = pytest.importorskip("deepspeed", reason="needs the package deepspeed")
OBJECTIVE = NextToken(16, False).objective
ZERO = ["zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("deepspeed") / "model")


def plan(model_dir: Path, strategy: Any, precision: str = "fp32", **sections: Any) -> Plan:
    common = {
        "data": {"train": [{"kind": "file", "path": "x"}]},
        "batch": {"global_samples": 2, "micro_batch": 1},
    }
    config = Config.model_validate(
        {
            **common,
            "model": {"id": str(model_dir)},
            "strategy": strategy,
            "precision": "fp32",
            **sections,
        }
    )
    machine = Machine(device="cpu", devices=[], cores=1, memory_bytes=2**30, bf16=False)
    made = resolve(
        config,
        run_dir="r",
        machine=machine,
        world_size=1,
        model=KnownModel(path=str(model_dir)),
        data=None,
    )
    if precision != "fp16":
        return made
    assert made.deepspeed is not None
    return made.model_copy(
        update={
            "precision": "fp16",
            "deepspeed": made.deepspeed | {"fp16": {"enabled": True, "hysteresis": 1}},
        }
    )


def engine(model_dir: Path, strategy: Any, precision: str = "fp32", **sections: Any) -> Any:
    made = plan(model_dir, strategy, precision, **sections)
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    values = Values(source, "cpu", 0)
    if made.engine == "native":
        return native(made, model, values, NativeEngine)
    from drumline.engine.strategies.zero.engine import prepare

    return prepare(made, model, values)


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


def steps(made: Any, number: int) -> list[tuple[float, float]]:
    figures = []
    for _ in range(number):
        sums = made.forward_backward(batches(), OBJECTIVE, 46.0)
        norm = made.grad_norm()
        made.step(3e-3, norm, torch.isfinite(norm))
        figures.append((float(sums["loss"]), float(norm)))
    return figures


@pytest.mark.parametrize("kind", ZERO)
@pytest.mark.parametrize(
    "optimizer",
    [{"kind": "adamw", "weight_decay": 0.1}, {"kind": "sgd", "weight_decay": 0.1}],
    ids=["adamw", "sgd"],
)
def test_as_the_native_engine(model_dir: Path, kind: str, optimizer: dict[str, Any]) -> None:
    ours, reference = (
        engine(model_dir, kind, optimizer=optimizer),
        engine(model_dir, "single", optimizer=optimizer),
    )
    before, expected = whole(ours), whole(reference)
    assert before.keys() == expected.keys() and all(
        torch.equal(before[name], expected[name]) for name in before
    ), "before the first step"
    for got, wanted in zip(steps(ours, 3), steps(reference, 3), strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert ours.evaluate(batches(), OBJECTIVE) == pytest.approx(
        reference.evaluate(batches(), OBJECTIVE), rel=1e-5
    )
    after = whole(ours)
    for name, tensor in whole(reference).items():
        # Moments hold the roundings of three steps' gradients.
        tolerance = 3e-5 if name.startswith("optim.") else 1e-5
        assert float((after[name] - tensor).norm()) <= tolerance * float(tensor.norm()), name


@pytest.mark.parametrize("kind", ZERO)
def test_skip_leaves_everything(model_dir: Path, kind: str) -> None:
    made = engine(model_dir, kind)
    steps(made, 1)
    before = whole(made)
    made.forward_backward(batches(), OBJECTIVE, 46.0)
    norm = made.grad_norm()
    assert math.isfinite(norm)
    made.step(3e-3, norm, torch.tensor(False))
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(made).items())
    made.forward_backward(
        batches(),
        lambda out, batch: SimpleNamespace(
            loss_sum=OBJECTIVE(out, batch).loss_sum * math.nan, sums={}
        ),
        46.0,
    )
    norm = made.grad_norm()
    assert not math.isfinite(norm)
    made.step(3e-3, norm, torch.tensor(False))
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(made).items())
    first, second = steps(made, 2)
    assert second[0] < first[0], "it goes on"


@pytest.mark.parametrize("kind", ZERO)
def test_fp16_scales_its_loss(model_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only, says DeepSpeed; the arithmetic is the same here."""
    monkeypatch.setattr(
        "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda _: True
    )
    made = engine(model_dir, kind, "fp16")
    reference = engine(model_dir, "single")
    for got, wanted in zip(steps(made, 2), steps(reference, 2), strict=True):
        assert got == pytest.approx(wanted, rel=3e-2)
    assert made.rescales() and made.state()["scaler"] == {"scale": 65536.0, "good_steps": 2}
    assert all(
        t.dtype == torch.float32 for n, t in made.tensors().items() if n.startswith("model.")
    ), "fp32 masters"
    made.forward_backward(batches(), OBJECTIVE, 46.0)
    made.step(3e-3, made.grad_norm(), torch.tensor(False))
    assert made.state()["scaler"] == {"scale": 65536.0, "good_steps": 2}, (
        "a loss that jumps is no overflow"
    )
    made.load_state({"scaler": {"scale": 2.0**40, "good_steps": 5}}, made.tensors())
    before = whole(made)
    made.forward_backward(batches(), OBJECTIVE, 46.0)
    norm = made.grad_norm()
    assert not math.isfinite(norm)
    made.step(3e-3, norm, torch.tensor(False))
    assert made.state()["scaler"] == {"scale": 2.0**39, "good_steps": 0}
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(made).items())


@pytest.mark.parametrize("kind", ZERO)
def test_bf16_keeps_the_masters_it_was_given(model_dir: Path, kind: str) -> None:
    made, reference = engine(model_dir, kind, precision="bf16"), engine(model_dir, "single")
    mine = whole(made)
    assert all(torch.equal(mine[name], tensor) for name, tensor in whole(reference).items()), (
        "not rounded to bf16"
    )
    steps(made, 2)
    saved = whole(made)
    other = engine(model_dir, kind, precision="bf16")
    tensors = other.tensors()
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    other.load_state({}, tensors)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole(other).items())
    assert steps(other, 1)[0] == pytest.approx(steps(made, 1)[0], rel=1e-6)


@pytest.mark.full
def test_compiled_blocks(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=1)
    made, reference = engine(model, "zero2", compile={"enabled": True}), engine(model, "single")
    for got, wanted in zip(steps(made, 2), steps(reference, 2), strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)


def test_the_flops_profile(model_dir: Path, tmp_path: Path) -> None:
    made = plan(model_dir, {"kind": "zero2", "flops_profiler": True})
    assert (
        made.deepspeed is not None
        and made.deepspeed["flops_profiler"]["output_file"] == "r/flops_profile.txt"
    )
    profile = tmp_path / "profile.txt"
    made.deepspeed["flops_profiler"]["output_file"] = str(profile)
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    from drumline.engine.strategies.zero.engine import prepare

    steps(prepare(made, model, Values(source, "cpu", 0)), 2)
    assert "LlamaForCausalLM" in profile.read_text()


def test_nothing_is_printed_for_being_installed() -> None:
    code = "import drumline, accelerate, transformers, deepspeed; from accelerate.utils import DeepSpeedPlugin"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=200,
        check=True,
    )
    assert "accelerator" not in told.stdout + told.stderr


def test_weights_come_a_block_at_a_time_and_leave_a_part_in_fp32(model_dir: Path) -> None:
    made = plan(model_dir, "zero3").model_copy(update={"precision": "bf16"})
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    original, _ = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    Values(source, "cpu", 0).fill(original)
    expected, masters = dict(original.named_parameters()), dict[str, torch.Tensor]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = []
    for parameter in fill_parameters(
        made, model, Values(source, "cpu", 0), masters, lambda full: shard_of_rank(full, 1, 3)
    ):
        seen.append(names[id(parameter)])
        assert parameter.dtype == torch.bfloat16 and torch.equal(
            parameter, expected[seen[-1]].bfloat16()
        )
        real = {
            ".".join(name.split(".")[:3])
            for name, other in model.named_parameters()
            if not other.is_meta and name not in seen
        }
        assert (
            len(real - {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}) <= 1
        ), "of other blocks nothing"
        parameter.data = torch.empty(0)  # as it is cut
    assert set(seen) == set(names.values()) == set(masters) and len(seen) == len(names)
    flat = expected["model.norm.weight"].flatten()
    size = -(-flat.numel() // 3)
    assert torch.equal(masters["model.norm.weight"], flat[size : 2 * size])


def test_a_helper_that_torch_came_after_is_made_again(tmp_path: Path) -> None:
    built, marker = tmp_path / "async_io" / "async_io.so", tmp_path / helpers.MARKER
    built.parent.mkdir()
    built.touch()
    assert not helpers._is_newest(tmp_path), "nobody saw it finished"
    marker.write_text(helpers._origins())
    assert helpers._is_newest(tmp_path)
    os.utime(marker, (1, 1))
    assert not helpers._is_newest(tmp_path)
    marker.write_text("/another/torch")
    assert not helpers._is_newest(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "breaks", "said"),
    [
        (
            "zero2",
            ("importlib.util.find_spec", lambda name: None),
            "the package deepspeed is missing",
        ),
        (
            {"kind": "zero3", "offload_optimizer": {"kind": "nvme", "path": "."}},
            ("shutil.which", lambda name: None),
            "ninja is missing",
        ),
        (
            {"kind": "zero3", "offload_optimizer": {"kind": "nvme", "path": "/nowhere"}},
            None,
            "/nowhere is no folder",
        ),
        (
            {"kind": "zero3", "offload_optimizer": {"kind": "nvme", "path": "."}},
            ("ctypes.util.find_library", lambda name: None),
            "apt-get install libaio-dev",
        ),
    ],
    ids=["no deepspeed", "no ninja", "no folder", "no libaio"],
)
def test_what_is_missing_is_told_before_launch(
    model_dir: Path, strategy: Any, breaks: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(model_dir, strategy)
    # This machine may lack libaio.
    monkeypatch.setattr(helpers.ctypes.util, "find_library", lambda name: f"lib{name}.so")
    if breaks:
        monkeypatch.setattr(f"drumline.engine.strategies.zero.machine.{breaks[0]}", breaks[1])
        monkeypatch.setattr("pathlib.Path.exists", lambda _: False)
    with pytest.raises(EnvironmentFault, match=said):
        engine_of(made.config.strategy).require(made, lambda *_: None)
