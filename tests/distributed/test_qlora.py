"""QLoRA: packed weights stay as they are, the adapter learns, and two ranks learn what one does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import drumline, events, losses, same_weights, write_config
from tests.tiny import tiny_model_dir


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes (it has a CPU build); it is not installed")
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_two_ranks_as_one(tmp_path: Path, bits: str) -> None:
    for world in (1, 2):
        (tmp_path / str(world)).mkdir()
        path = write_config(
            tmp_path / str(world), tiny_model_dir(tmp_path / "model", hidden=64), adapter={"kind": "lora", "r": 4, "quantize": bits}
        )
        ended = drumline("train", path, "--nproc", world)
        assert ended.code == 0, ended.err
    one, two = (tmp_path / str(world) / "run" for world in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert losses(one)[4] < losses(one)[1] - 0.05
    # bitsandbytes' products round by the number of rows at once, LLM.int8()'s in fp16.
    same_weights(two, one, 1e-4 if bits == "4bit" else 1e-2)
    ended = drumline("export", one, "--to", tmp_path / "adapter", "--adapter")
    assert ended.code == 0 and (tmp_path / "adapter" / "adapter_model.safetensors").exists(), ended.err
    assert "of them learn" in events(one, "run_start")[0]["plan_line"]


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_package_is_told_before_anything_starts(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), adapter={"kind": "lora", "quantize": "4bit"})
    ended = drumline("train", path)
    assert ended.code == 2 and not (tmp_path / "run").exists()
    assert ended.error_lines == ["error: adapter: the package bitsandbytes is missing — pip install bitsandbytes"]
