"""The DeepSpeed engine in one process: norm before step, clipping, skipping, fp16's scale, state before the first step, noise."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from drumline.models.attention import use_document_attention
from drumline.models.build import lay_out
from drumline.models.freeze import freeze
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.shards import Values
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.plan.strategy_engine import engine_spec
from tests.harness import ENV
from tests.tiny import tiny_architecture_dir, tiny_model_dir
from tests.unit.test_native import batches
from tests.unit.test_recurrent import pack

pytestmark = pytest.mark.slow

deepspeed = pytest.importorskip("deepspeed", reason="needs the package deepspeed")
OBJECTIVE = NextToken(16, False).objective
ZERO = ["zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("deepspeed") / "model")


def plan(
    model_dir: Path,
    strategy: Any,
    precision: str = "fp32",
    **sections: Any,
) -> Plan:
    config = Config.model_validate(
        {
            "data": {"train": [{"kind": "file", "path": "x"}]},
            "batch": {"global_samples": 2, "micro_batch": 1},
            "model": {"id": str(model_dir)},
            "strategy": strategy,
            "precision": "fp32",
            **sections,
        }
    )
    machine = Machine(
        device="cpu",
        devices=[],
        cores=1,
        memory_bytes=2**30,
        bf16=False,
    )
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

    fp16 = {"enabled": True, "hysteresis": 1}
    update = {"precision": "fp16", "deepspeed": {**made.deepspeed, "fp16": fp16}}
    return made.model_copy(update=update)


def laid_out(model_dir: Path) -> tuple[Any, Values]:
    """Return the model without its values, and the values."""
    model, source = lay_out(str(model_dir), ModelConfig(id=str(model_dir)), seed=0)
    return model, Values(source, "cpu", 0)


def engine_for(made: Plan, model_dir: Path) -> Any:
    model, values = laid_out(model_dir)
    if made.engine == "native":
        return native(made, model, values, NativeEngine)
    from drumline.engine.strategies.zero.engine import prepare

    return prepare(made, model, values)


def engine(
    model_dir: Path,
    strategy: Any,
    precision: str = "fp32",
    **sections: Any,
) -> Any:
    return engine_for(plan(model_dir, strategy, precision, **sections), model_dir)


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


def assert_holds(made: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Assert that an engine's tensors are these, to the last bit."""
    for name, tensor in whole(made).items():
        assert torch.equal(tensor, wanted[name]), name


def backward(made: Any, objective: Any = OBJECTIVE) -> Any:
    return made.forward_backward(batches(), objective, 46.0)


def skip(made: Any) -> float:
    """Skip the step after a backward. Returns the norm of its gradient."""
    norm = made.grad_norm()
    made.step(3e-3, norm, torch.tensor(False))
    return float(norm)


def steps(made: Any, number: int) -> list[tuple[float, float]]:
    figures = []
    for _ in range(number):
        sums = backward(made)
        norm = made.grad_norm()
        made.step(3e-3, norm, torch.isfinite(norm))
        figures.append((float(sums["loss"]), float(norm)))

    return figures


def assert_same_figures(
    ours: Any,
    reference: Any,
    number: int,
    tolerance: float,
) -> None:
    """Assert that two engines have the same losses and norms in this number of steps."""
    pairs = zip(steps(ours, number), steps(reference, number), strict=True)
    for got, wanted in pairs:
        assert got == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("kind", ZERO)
@pytest.mark.parametrize("optimizer_kind", ["adamw", "sgd"])
def test_as_the_native_engine(
    model_dir: Path,
    kind: str,
    optimizer_kind: str,
) -> None:
    optimizer = {"kind": optimizer_kind, "weight_decay": 0.1}
    ours = engine(model_dir, kind, optimizer=optimizer)
    reference = engine(model_dir, "single", optimizer=optimizer)
    before = whole(reference)

    assert whole(ours).keys() == before.keys()
    assert_holds(ours, before)
    assert_same_figures(ours, reference, 3, tolerance=1e-5)

    evaluated = ours.evaluate(batches(), OBJECTIVE)
    expected = reference.evaluate(batches(), OBJECTIVE)
    assert evaluated == pytest.approx(expected, rel=1e-5)

    after = whole(ours)
    for name, tensor in whole(reference).items():
        # Moments hold the roundings of three steps' gradients.
        tolerance = 3e-5 if name.startswith("optim.") else 1e-5
        distance = float((after[name] - tensor).norm())
        assert distance <= tolerance * float(tensor.norm()), name


# All weights are cut; by default ZeRO 3 keeps those of a tiny model whole.
CUT = {"kind": "zero3", "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}


def hybrid_engine(folder: Path, strategy: Any, frozen: list[str]) -> Any:
    """Return an engine over a model whose recurrent layers run by documents."""
    made = plan(folder, strategy)
    model, values = laid_out(folder)
    use_document_attention(model, made)
    separate_recurrent_layers(model, "cpu")
    freeze(model, frozen)
    if made.engine == "native":
        return native(made, model, values, NativeEngine)
    from drumline.engine.strategies.zero.engine import prepare

    return prepare(made, model, values)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_5_text"])
@pytest.mark.parametrize("frozen", [[], ["model.embed_tokens"]], ids=["all", "frozen embedding"])
def test_stage_3_gathers_recurrent_layers_whole(
    tmp_path: Path, kind: str, frozen: list[str]
) -> None:
    """Behind a frozen embedding the first layer's input takes no gradient."""
    folder = tiny_architecture_dir(tmp_path / kind, kind)
    ours = hybrid_engine(folder, CUT, frozen)
    reference = hybrid_engine(folder, "single", frozen)

    # Each step runs the layers another number of times.
    for rows in [(11, 1, 35), (48,), (2, 30, 5, 11)]:
        some = [pack(rows, width=48), pack((20, 28), width=48)]
        figures = []
        for made in (ours, reference):
            sums = made.forward_backward(some, OBJECTIVE, 90.0)
            norm = made.grad_norm()
            made.step(3e-3, norm, torch.isfinite(norm))
            evaluated = made.evaluate(some, OBJECTIVE)
            figures.append((float(sums["loss"]), float(norm), float(evaluated["loss"])))
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)

    after = whole(ours)
    for name, tensor in whole(reference).items():
        if name.startswith("model."):
            distance = float((after[name] - tensor).norm())
            assert distance <= 1e-5 * float(tensor.norm()), name


def nan_loss(out: Any, batch: Any) -> Any:
    loss_sum = OBJECTIVE(out, batch).loss_sum * math.nan
    return SimpleNamespace(loss_sum=loss_sum, sums={})


@pytest.mark.parametrize("kind", ZERO)
def test_skip_leaves_everything(model_dir: Path, kind: str) -> None:
    made = engine(model_dir, kind)
    steps(made, 1)
    before = whole(made)
    backward(made)

    assert math.isfinite(skip(made))
    assert_holds(made, before)

    backward(made, nan_loss)
    assert not math.isfinite(skip(made))
    assert_holds(made, before)

    first, second = steps(made, 2)
    assert second[0] < first[0], "it goes on"


CPU = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"


@pytest.mark.parametrize("kind", ZERO)
def test_fp16_scales_its_loss(
    model_dir: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU only, says DeepSpeed; the arithmetic is the same here."""
    monkeypatch.setattr(f"{CPU}.is_fp16_supported", lambda _: True)
    made = engine(model_dir, kind, "fp16")
    reference = engine(model_dir, "single")

    assert_same_figures(made, reference, 2, tolerance=3e-2)

    good = {"scale": 65536.0, "good_steps": 2}
    assert made.uses_loss_scale()
    assert made.state()["scaler"] == good

    for name, tensor in made.tensors().items():
        if name.startswith("model."):
            assert tensor.dtype == torch.float32, f"the master of {name}"

    backward(made)
    skip(made)

    assert made.state()["scaler"] == good, "a loss that jumps is no overflow"

    state = {"scaler": {"scale": 2.0**40, "good_steps": 5}}
    made.load_state(state, made.tensors())
    before = whole(made)
    backward(made)

    assert not math.isfinite(skip(made))
    assert made.state()["scaler"] == {"scale": 2.0**39, "good_steps": 0}
    assert_holds(made, before)


@pytest.mark.parametrize("kind", ZERO)
def test_bf16_keeps_the_masters_it_was_given(model_dir: Path, kind: str) -> None:
    """They are not rounded to bf16, nor by a checkpoint."""
    made = engine(model_dir, kind, precision="bf16")
    reference = engine(model_dir, "single")

    assert_holds(reference, whole(made))

    steps(made, 2)
    saved = whole(made)
    other = engine(model_dir, kind, precision="bf16")
    tensors = other.tensors()
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])

    other.load_state({}, tensors)

    assert_holds(other, saved)
    assert_same_figures(other, made, 1, tolerance=1e-6)


@pytest.mark.full
def test_compiled_blocks(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=1)
    made = engine(model, "zero2", compile={"enabled": True})
    reference = engine(model, "single")
    assert_same_figures(made, reference, 2, tolerance=1e-4)


def test_the_flops_profile(model_dir: Path, tmp_path: Path) -> None:
    made = plan(model_dir, {"kind": "zero2", "flops_profiler": True})
    assert made.deepspeed is not None

    options = made.deepspeed["flops_profiler"]
    assert options["output_file"] == "r/flops_profile.txt"

    profile = tmp_path / "profile.txt"
    options["output_file"] = str(profile)
    steps(engine_for(made, model_dir), 2)

    assert "LlamaForCausalLM" in profile.read_text()


@pytest.mark.full
def test_nothing_is_printed_for_being_installed() -> None:
    code = (
        "import drumline, accelerate, transformers, deepspeed;"
        " from accelerate.utils import DeepSpeedPlugin"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=200,
        check=True,
    )
    assert "accelerator" not in told.stdout
    assert "accelerator" not in told.stderr


ENDS = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


def blocks_held(model: Any, seen: list[str]) -> set[str]:
    """Return the blocks that have values of parameters which were not seen yet."""
    held = set()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and name not in seen:
            block = name.split(".")[:3]
            held.add(".".join(block))

    return held - ENDS


def test_weights_come_a_block_at_a_time_and_leave_a_part_in_fp32(model_dir: Path) -> None:
    made = plan(model_dir, "zero3").model_copy(update={"precision": "bf16"})
    original, original_values = laid_out(model_dir)
    original_values.fill(original)
    expected = dict(original.named_parameters())
    model, values = laid_out(model_dir)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters: dict[str, torch.Tensor] = {}
    seen: list[str] = []

    def shard(full: torch.Tensor) -> torch.Tensor:
        return shard_of_rank(full, 1, 3)

    for parameter in fill_parameters(
        made,
        model,
        values,
        masters,
        shard,
    ):
        name = names[id(parameter)]
        seen.append(name)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name].bfloat16())
        assert len(blocks_held(model, seen)) <= 1, "of other blocks nothing"
        parameter.data = torch.empty(0)  # as it is cut

    assert sorted(seen) == sorted(names.values())
    assert masters.keys() == set(seen)

    flat = expected["model.norm.weight"].flatten()
    size = -(-flat.numel() // 3)
    assert torch.equal(masters["model.norm.weight"], flat[size : 2 * size])


def test_a_helper_that_torch_came_after_is_made_again(tmp_path: Path) -> None:
    built = tmp_path / "async_io" / "async_io.so"
    marker = tmp_path / helpers.MARKER
    built.parent.mkdir()
    built.touch()

    assert not helpers._is_newest(tmp_path), "nobody saw it finished"

    marker.write_text(helpers._origins())
    assert helpers._is_newest(tmp_path)

    os.utime(marker, (1, 1))
    assert not helpers._is_newest(tmp_path)

    marker.write_text("/another/torch")
    assert not helpers._is_newest(tmp_path)


class Missing(NamedTuple):
    """What a machine lacks: the function that does not find it, and what is said of it."""

    strategy: Any
    function: str | None
    said: str


def nvme(folder: str) -> dict[str, Any]:
    return {"kind": "zero3", "offload_optimizer": {"kind": "nvme", "path": folder}}


MISSING = {
    "no deepspeed": Missing(
        "zero2", "importlib.util.find_spec", "the package deepspeed is missing"
    ),
    "no ninja": Missing(nvme("."), "shutil.which", "ninja is missing"),
    "no folder": Missing(nvme("/nowhere"), None, "/nowhere is no folder"),
    "no libaio": Missing(nvme("."), "ctypes.util.find_library", "apt-get install libaio-dev"),
}


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_what_is_missing_is_told_before_launch(
    model_dir: Path,
    missing: Missing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = plan(model_dir, missing.strategy)
    # This machine may lack libaio.
    monkeypatch.setattr(helpers.ctypes.util, "find_library", lambda name: f"lib{name}.so")
    if missing.function:
        module = "drumline.engine.strategies.zero.machine"
        monkeypatch.setattr(f"{module}.{missing.function}", lambda name: None)
        monkeypatch.setattr("pathlib.Path.exists", lambda _: False)

    with pytest.raises(EnvironmentFault, match=missing.said):
        engine_spec(made.config.strategy).require(made, lambda *_: None)
