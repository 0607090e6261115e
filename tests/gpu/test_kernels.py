"""fp8 products, Liger's kernels, and compiled steps on a GPU: near a plain run in bf16, and values that Triton's interpreter lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.stand_in import COMPILED_CODE, IS_STAND_IN
from tests.harness import PATIENCE, drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)
PLAIN: dict[str, Any] = {"precision": "bf16"}
FP8: dict[str, Any] = {"kind": "fp8"}
# (sections, package, relative distance of the losses of six steps)
KINDS: dict[str, tuple[dict[str, Any], str, float]] = {
    "fp8, rowwise": ({"precision": FP8}, "torchao", 3e-2),
    "fp8, tensorwise": ({"precision": {**FP8, "scaling": "tensorwise"}}, "torchao", 3e-2),
    "fp8, compiled": ({"precision": FP8, "compile": {"enabled": True}}, "torchao", 3e-2),
    "fp8, gathered by FSDP2": (
        {"precision": {**FP8, "scaling": "tensorwise", "gather": "fp8"}, "strategy": "fsdp2"}, "torchao", 3e-2,
    ),
    "liger": ({**PLAIN, "model": {"kernels": "liger"}}, "liger_kernel", 1e-2),
    "liger, fsdp2": ({**PLAIN, "model": {"kernels": "liger"}, "strategy": "fsdp2"}, "liger_kernel", 1e-2),
    "compiled loss": ({**PLAIN, "compile": {"loss": True}}, "torch", 1e-2),
    "compiled step": ({**PLAIN, "compile": {"optimizer": True}, "optimizer": {"fused": False}}, "torch", 1e-2),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels")
    tiny_model_dir(made / "model", hidden=64)
    assert train(made, "plain", **PLAIN) == 0
    return made


def train(folder: Path, name: str, **sections: Any) -> int:
    place = folder / f"{name}-config"
    place.mkdir()
    run = {"device": "cuda", "steps": 6, "dir": str(folder / name)}
    return drumline(
        "train",
        write_config(place, folder / "model", **{"strategy": "single", "run": run, **sections}),
        timeout=400,
    ).code


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.timeout(450 * PATIENCE)
def test_near_a_plain_run(folder: Path, name: str) -> None:
    sections, package, within = KINDS[name]
    if IS_STAND_IN and "compile" in sections:
        pytest.skip(f"needs {COMPILED_CODE}")
    pytest.importorskip(package)
    assert train(folder, name, **sections) == 0
    assert losses(folder / name) == pytest.approx(losses(folder / "plain"), rel=within)


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
