"""The other commands, on a run that two real ranks trained: prepare, export, schema, --version, --help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import drumline, events, losses, weights, write_config
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
    finished = drumline("train", config)
    assert finished.code == 0, finished.err
    return config.parent / "run"


def test_prepare_makes_what_train_finds(tmp_path: Path) -> None:
    path = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    first, second = drumline("prepare", path), drumline("prepare", path)
    assert first.code == second.code == 0, first.err
    assert first.out == second.out and "train " in first.out and "eval " in first.out
    assert "Tokenising" in first.err and "Tokenising" not in second.err, (
        "the second call finds the cache"
    )
    finished = drumline("train", path)
    assert finished.code == 0 and "Tokenising" not in finished.err
    data = json.loads((tmp_path / "run" / "plan.json").read_text())["data"]
    assert f"{data['train_samples']} samples, {data['train_tokens']} tokens" in first.out


@pytest.mark.claim("what is exported, transformers loads")
def test_training_ends_with_a_folder_that_transformers_loads(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (exported,) = events(run, "export")
    assert exported["path"] == str(run / "export") and exported["max_logit_difference"] <= 1e-5
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(run / "export"),
        AutoTokenizer.from_pretrained(run / "export"),
    )
    best = (run / "checkpoints" / "best").read_text().strip()
    assert json.loads((run / "export" / "drumline.json").read_text())["checkpoint"] == best
    ids: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one two?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert (
        model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1]
        > ids["input_ids"].shape[1]
    )
    stored = weights(run)
    got = dict(model.named_parameters())
    assert best == "step-00000004", (
        "the newest is the best here, so its weights are the ones to compare"
    )
    assert all(torch.equal(stored[f"model.{name}"], tensor) for name, tensor in got.items())


@pytest.mark.parametrize(("which", "dtype"), [("2", "bf16"), ("last", "fp32")])
def test_export_on_demand(run: Path, tmp_path: Path, which: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    finished = drumline("export", run, "--to", tmp_path / "out", "--which", which, "--dtype", dtype)
    assert finished.code == 0, finished.err
    assert "largest difference of logits" in finished.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert json.loads((tmp_path / "out" / "drumline.json").read_text())["step"] == (
        2 if which == "2" else 4
    )


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
    assert finished.code == 2 and len(finished.error_lines) == 1 and says in finished.err, (
        finished.err
    )
    assert not (tmp_path / "out").exists()


def test_export_leaves_other_folders_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    finished = drumline("export", run, "--to", tmp_path)
    assert finished.code == 2 and (tmp_path / "mine.txt").read_text() == "mine"


def test_schema_validates_the_examples_shape() -> None:
    made = json.loads(drumline("schema").out)
    assert made["required"] == ["data"] and {"model", "strategy", "run"} <= set(made["properties"])


def test_help_and_version() -> None:
    assert "train" in drumline("--help").out and drumline("--version").out.strip()


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


def test_weights_that_no_gradient_reaches(tmp_path: Path) -> None:
    """A model whose own code has a layer in no loss. DDP says so before a step is taken, or finds it."""
    model = tiny_model_dir(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "spare.SpareConfig", "AutoModelForCausalLM": "spare.SpareModel"}
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "spare", "auto_map": own})
    )
    (model / "spare.py").write_text(SPARE)
    again = {"init": "random", "trust_remote_code": True}  # weights that no file has are drawn
    trust = "model.trust_remote_code=true"
    refused = drumline(
        "train",
        write_config(tmp_path, model, launch={"nproc": 2}, run={"steps": 2}, model=again),
        trust,
    )
    (line,) = refused.error_lines
    assert refused.code == 2 and "no gradient reaches spare.weight" in line
    assert "set strategy.find_unused_parameters: true, or leave them out with model.freeze" in line
    found: dict[str, float] = {}
    for name, sections in (
        ("unused", {"strategy": {"kind": "ddp", "find_unused_parameters": True}}),
        ("frozen", {"model": {"freeze": ["spare"]}}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        given = {**sections, "model": {**again, **sections.get("model", {})}}
        trained = drumline(
            "train",
            write_config(folder, model, launch={"nproc": 2}, run={"steps": 2}, **given),
            trust,
        )
        assert trained.code == 0, trained.err
        found[name] = losses(folder / "run")[2]
    assert found["unused"] == found["frozen"]


@pytest.mark.parametrize(
    ("kind", "strategy"), [("apertus", {"kind": "fsdp2"}), ("granitemoe", {"kind": "ddp", "tp": 2})]
)
def test_architectures_of_others(tmp_path: Path, kind: str, strategy: dict[str, Any]) -> None:
    model, told = tiny_architecture_dir(tmp_path / "model", kind), []
    for name, sections in (("one", {}), ("two", {"strategy": strategy, "launch": {"nproc": 2}})):
        (tmp_path / name).mkdir()
        trained = drumline(
            "train", write_config(tmp_path / name, model, run={"steps": 2}, **sections)
        )
        assert trained.code == 0, trained.err
        told.append(losses(tmp_path / name / "run"))
    assert told[1] == pytest.approx(told[0], rel=1e-5)
