"""The other commands, on a run that two real ranks trained: prepare, export, schema, --version,
--help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import (
    Finished,
    drumline,
    events,
    losses,
    read_json,
    run_drumline,
    weights,
    write_config,
)
from tests.tiny import tiny_architecture_dir, tiny_model_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    return write_config(
        folder,
        tiny_model_dir(folder / "model"),
        launch={"nproc": 2},
        eval={"every": 2},
        checkpoint={"every": 2, "export": "best"},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    run_drumline("train", config)
    return config.parent / "run"


def test_prepare_makes_what_train_finds(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    first = run_drumline("prepare", path)
    second = run_drumline("prepare", path)
    assert first.out == second.out
    assert "train " in first.out
    assert "eval " in first.out
    assert "Tokenising" in first.err
    assert "Tokenising" not in second.err, "the second call finds the cache"
    trained = run_drumline("train", path)
    assert "Tokenising" not in trained.err
    data = read_json(tmp_path / "run" / "plan.json")["data"]
    assert f"{data['train_samples']} samples, {data['train_tokens']} tokens" in first.out


@pytest.mark.claim("what is exported, transformers loads")
def test_training_ends_with_a_folder_that_transformers_loads(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = run / "export"
    (exported,) = events(run, "export")
    assert exported["path"] == str(export)
    assert exported["max_logit_difference"] <= 1e-5
    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    best = (run / "checkpoints" / "best").read_text().strip()
    assert read_json(export / "drumline.json")["checkpoint"] == best
    ids: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one two?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert said.shape[1] > ids["input_ids"].shape[1]
    assert best == "step-00000004", "the newest is the best: its weights are compared"
    stored = weights(run)
    for name, tensor in model.named_parameters():
        assert torch.equal(stored[f"model.{name}"], tensor), name


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("which", "dtype", "step"),
    [("2", "bf16", 2), ("last", "fp32", 4)],
    ids=["2-bf16", "last-fp32"],
)
def test_export_on_demand(run: Path, tmp_path: Path, which: str, dtype: str, step: int) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    finished = run_drumline("export", run, "--to", out, "--which", which, "--dtype", dtype)
    assert "largest difference of logits" in finished.out
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == DTYPES[dtype]
    assert read_json(out / "drumline.json")["step"] == step


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--which", "worst"], "last, best, or the number"),
        (["--which", "77"], "not a committed checkpoint"),
        (["--dtype", "fp8"], "auto, fp32, bf16, fp16"),
    ],
)
def test_export_refuses_in_one_line(
    run: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    finished = drumline("export", run, "--to", tmp_path / "out", *arguments)
    assert finished.code == 2
    assert len(finished.error_lines) == 1
    assert says in finished.err
    assert not (tmp_path / "out").exists()


def test_export_leaves_other_folders_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    finished = drumline("export", run, "--to", tmp_path)
    assert finished.code == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_schema_validates_the_examples_shape() -> None:
    made = json.loads(drumline("schema").out)
    assert made["required"] == ["data"]
    assert {"model", "strategy", "run"} <= set(made["properties"])


def test_help_and_version() -> None:
    assert "train" in drumline("--help").out
    assert drumline("--version").out.strip()


SPARE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class SpareConfig(LlamaConfig):
    model_type = "spare"

class SpareModel(LlamaForCausalLM):
    config_class = SpareConfig

    def __init__(self, config):
        super().__init__(config)
        self.spare = torch.nn.Linear(4, 4)
"""


def train_spare(folder: Path, model_dir: Path, **sections: Any) -> Finished:
    """Train a model of the user's own code on two ranks. Weights that no file has are drawn."""
    folder.mkdir(exist_ok=True)
    own = {"init": "random", "trust_remote_code": True, **sections.pop("model", {})}
    config = write_config(
        folder, model_dir, launch={"nproc": 2}, run={"steps": 2}, model=own, **sections
    )
    return drumline("train", config, "model.trust_remote_code=true")


def test_weights_that_no_gradient_reaches(tmp_path: Path) -> None:
    """A model whose own code has a layer in no loss. DDP says so before a step is taken, or finds
    it."""
    model = tiny_model_dir(tmp_path / "model")
    own = {"AutoConfig": "spare.SpareConfig", "AutoModelForCausalLM": "spare.SpareModel"}
    config = read_json(model / "config.json") | {"model_type": "spare", "auto_map": own}
    (model / "config.json").write_text(json.dumps(config))
    (model / "spare.py").write_text(SPARE)
    refused = train_spare(tmp_path, model)
    (line,) = refused.error_lines
    assert refused.code == 2
    assert "no gradient reaches spare.weight" in line
    assert "set strategy.find_unused_parameters: true, or leave them out with model.freeze" in line
    finds = {"kind": "ddp", "find_unused_parameters": True}
    unused = train_spare(tmp_path / "unused", model, strategy=finds)
    assert unused.code == 0, unused.err
    frozen = train_spare(tmp_path / "frozen", model, model={"freeze": ["spare"]})
    assert frozen.code == 0, frozen.err
    found = losses(tmp_path / "unused" / "run")
    assert found[2] == losses(tmp_path / "frozen" / "run")[2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("apertus", {"kind": "fsdp2"}, id="apertus"),
        pytest.param("granitemoe", {"kind": "ddp", "tp": 2}, id="granitemoe"),
    ],
)
def test_architectures_of_others(tmp_path: Path, kind: str, strategy: dict[str, Any]) -> None:
    model = tiny_architecture_dir(tmp_path / "model", kind)
    found = []
    for name, sections in (("one", {}), ("two", {"strategy": strategy, "launch": {"nproc": 2}})):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, model, run={"steps": 2}, **sections)
        run_drumline("train", config)
        found.append(losses(folder / "run"))
    one, two = found
    assert two == pytest.approx(one, rel=1e-5)
