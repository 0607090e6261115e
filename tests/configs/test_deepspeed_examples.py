"""Every DeepSpeed JSON under examples/deepspeed is read whole, filled in, and dry-run; DeepSpeed
itself takes what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.config.load import load
from drumline.plan.explain import explain
from drumline.train.setup import Request, make_plan
from tests.harness import ENV, ROOT, write_config
from tests.tiny import tiny_model_dir

FILES = sorted((ROOT / "examples" / "deepspeed").glob("*.json"))


def test_there_is_one_for_each_stage_and_offload() -> None:
    assert {path.stem for path in FILES} >= {
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_offload",
        "zero3_nvme",
    }


def test_dry_run(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    made = {}
    for path in FILES:
        folder = tmp_path / path.stem
        folder.mkdir()
        strategy = {"kind": path.stem[:5], "config": str(path)}
        loaded = load(write_config(folder, model, strategy=strategy), [])
        request = Request(loaded, world_size=1)
        plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
        (line,) = [line for line in explain(plan).splitlines() if line.startswith("DeepSpeed ")]
        values = json.loads(line.partition(" ")[2])
        made[path.stem] = values
        assert "auto" not in line
        assert values["train_batch_size"] == 4
        zero = values["zero_optimization"]
        assert zero["stage"] == int(path.stem[4])
        assert zero["reduce_bucket_size"] == 32 * 32
        wanted = {"offload": "cpu", "nvme": "nvme"}.get(path.stem[6:], "none")
        offload = zero.get("offload_optimizer", {"device": "none"})
        assert offload["device"] == wanted
    pytest.importorskip("deepspeed", reason="needs the package deepspeed")
    (tmp_path / "made.json").write_text(json.dumps(made))
    code = (
        "import json, sys, drumline; from deepspeed.runtime.config import DeepSpeedConfig\n"
        "for name, made in json.load(open(sys.argv[1])).items():\n"
        "    made['zero_optimization'].get('offload_optimizer', {}).pop('nvme_path', None)\n"
        "    print(name, DeepSpeedConfig(made).zero_config.stage)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "made.json")]
    told = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=200)
    assert told.returncode == 0, told.stderr
    assert len(told.stdout.splitlines()) == len(FILES)
