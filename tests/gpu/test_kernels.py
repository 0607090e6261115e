"""fp8 products, Liger's kernels, and compiled steps on a GPU: near a plain run in bf16, and values that Triton's interpreter lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.runs import same_losses
from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN, NEEDS_CUDA
from tests.harness import PATIENCE, Sections, run_drumline, write_config
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA
FP8 = {"kind": "fp8"}
TENSORWISE = {"kind": "fp8", "scaling": "tensorwise"}
LIGER = {"model": {"kernels": "liger"}}


class Kind(NamedTuple):
    """What is laid over a plain run in bf16, and how near its losses stay over six steps."""

    sections: Sections
    package: str
    tolerance: float


def fp8(precision: Sections, **sections: Any) -> Kind:
    return Kind({"precision": precision, **sections}, "torchao", 3e-2)


KINDS = {
    "fp8, rowwise": fp8(FP8),
    "fp8, tensorwise": fp8(TENSORWISE),
    "fp8, compiled": fp8(FP8, compile={"enabled": True}),
    "fp8, gathered by FSDP2": fp8({**TENSORWISE, "gather": "fp8"}, strategy="fsdp2"),
    "liger": Kind(LIGER, "liger_kernel", 1e-2),
    "liger, fsdp2": Kind({**LIGER, "strategy": "fsdp2"}, "liger_kernel", 1e-2),
    "compiled loss": Kind({"compile": {"loss": True}}, "torch", 1e-2),
    "compiled step": Kind(
        {"compile": {"optimizer": True}, "optimizer": {"fused": False}}, "torch", 1e-2
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with the run `plain` of it."""
    made = tmp_path_factory.mktemp("kernels")
    tiny_model_dir(made / "model", hidden=64)
    train(made, "plain", {})
    return made


def train(folder: Path, name: str, sections: Sections) -> None:
    """Train the folder's model in bf16, unless `sections` say otherwise, into the folder `name`."""
    place = folder / f"{name}-config"
    place.mkdir()
    run = {"device": "cuda", "steps": 6, "dir": str(folder / name)}
    usual = {"strategy": "single", "precision": "bf16", "run": run}
    path = write_config(place, folder / "model", **{**usual, **sections})
    run_drumline("train", path, timeout=400)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.timeout(450 * PATIENCE)
def test_near_a_plain_run(folder: Path, name: str) -> None:
    kind = KINDS[name]
    if IS_STAND_IN and "compile" in kind.sections:
        pytest.skip(f"needs {COMPILED_CODE}")
    pytest.importorskip(kind.package)
    train(folder, name, kind.sections)
    same_losses(folder / name, folder / "plain", kind.tolerance)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_norms_and_gated_parts_of_liger_are_those_of_torch(kind: str) -> None:
    pytest.importorskip("liger_kernel")
    from transformers import AutoConfig, AutoModelForCausalLM

    from drumline.models.kernels import apply_liger

    config = AutoConfig.for_model(
        kind,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).cuda()
    fused = AutoModelForCausalLM.from_config(config).cuda()
    fused.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 320, (2, 32), device="cuda")

    plain_logits = plain(ids).logits
    plain_logits.square().mean().backward()
    apply_liger(fused)
    logits = fused(ids).logits
    logits.square().mean().backward()

    torch.testing.assert_close(logits, plain_logits, rtol=1e-3, atol=1e-4)
    for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)
