"""Any module, objective and samples by path: the models of examples/python train the same however they are spread."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import drumline
from drumline.core.load import load_values
from drumline.errors import DrumlineError
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import losses, same_weights

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
SMALL: dict[str, dict[str, Any]] = {
    "vit": {"width": 16, "depth": 2, "heads": 2},
    "resnet": {"width": 4, "depth": 1},
    "gpt": {"length": 24, "width": 16, "depth": 2, "heads": 2},
}
NAMES = {"vit": "ViT", "resnet": "ResNet", "gpt": "GPT"}
SPREAD = ("ddp", "fsdp2", "zero2", "zero3")


def config(name: str, run_dir: Path, **sections: Any) -> dict[str, Any]:
    file = EXAMPLES / f"train_{name}.py"
    digits = {"kind": "python", "path": f"{file}:digits", "options": {"first": 0, "last": 20}}
    text = {"kind": "python", "path": f"{file}:Bytes", "options": {"modules": ["linear"], "length": 24}, "limit": 20}
    algorithm = {"kind": "python", "path": f"{file}:objective"} | ({"weight": f"{file}:tokens"} if name == "gpt" else {})
    # Softmax is blind to biases of keys: of rounding alone AdamW would make steps. The GPT has no biases.
    optimizer = {"lr": 1e-3} if name == "gpt" else {"kind": "sgd", "lr": 0.05}
    values: dict[str, Any] = {
        "model": {"kind": "python", "path": f"{file}:{NAMES[name]}", "options": SMALL[name], "sync_batchnorm": name == "resnet"},
        "algorithm": algorithm,
        "data": {"train": [text if name == "gpt" else digits]},
        "batch": {"global_samples": 8} | ({"accumulation": 1} if name == "resnet" else {"micro_batch": 2}),
        "optimizer": optimizer,
        "run": {"steps": 3, "dir": str(run_dir), "report_to": [], "device": "cpu"},
        "checkpoint": {"export": "none"},
    }
    return {**values, **sections}


def planned(name: str, run_dir: Path, world: int, strategy: str) -> Path:
    request = Request(load_values(config(name, run_dir, strategy=strategy), []), world)
    return claim_run_dir(make_plan(request, on_progress=lambda phase, done, total: None), request)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all rows, in two process groups."""
    root = tmp_path_factory.mktemp("own")
    run_plans([planned(name, root / name / "alone", 1, "single") for name in SMALL], 1)
    run_plans([planned(name, root / name / strategy, 2, strategy) for name in SMALL for strategy in SPREAD], 2)
    return root


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize("name", SMALL)
def test_same_numbers_as_one_process(runs: Path, name: str, strategy: str) -> None:
    alone = losses(runs / name / "alone")
    assert len(alone) == 3 and losses(runs / name / strategy) == pytest.approx(alone, rel=1e-5)
    same_weights(runs / name / strategy, runs / name / "alone", 1e-5)


def test_the_loss_is_the_one_of_plain_torch(runs: Path) -> None:
    """The first step's, of the weights that the run began with: the sum over the batch by its weight."""
    from drumline.core.plan import Plan
    from drumline.data.stream import GlobalOrder
    from drumline.dist.seeds import derive
    from drumline.models.own import own_build
    from drumline.models.shards import Values
    from drumline.models.tape import lay_out_module

    plan = Plan.load(runs / "gpt" / "alone" / "plan.json")
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, source = lay_out_module(own_build(plan), derive(0, "weights"), "cpu")
    Values(source, "cpu", 0, frozenset()).fill(model)
    texts = example.Bytes(["linear"], 24)
    batch = torch.stack([texts[int(index)] for index in GlobalOrder(20, derive(0, "order"), True).ids(0, 8)])
    loss, sums = example.objective(model, batch)
    assert losses(runs / "gpt" / "alone")[1] == pytest.approx(loss.item() / example.tokens(batch), rel=1e-5)
    assert "z_loss" in sums


def test_goes_on_and_is_exported(runs: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from drumline.core.plan import Plan
    from drumline.models.own import export_weights

    done = Plan.load(runs / "vit" / "alone" / "plan.json")
    written = load_file(export_weights(done, "last") / "model.safetensors")
    found = drumline.load(runs / "vit" / "alone", trust_remote_code=True)
    assert found.module.state_dict().keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in found.module.state_dict().items())
    with pytest.raises(DrumlineError, match="trust_remote_code"):
        drumline.load(runs / "vit" / "alone")
    with pytest.raises(DrumlineError, match="numbers, not text"):
        found.chat("one?")
    from drumline.models.export import export

    with pytest.raises(DrumlineError, match="no Hugging Face model"):
        export(runs / "vit" / "alone", tmp_path / "out", "last")


def test_there_is_nothing_to_plan(tmp_path: Path) -> None:
    with pytest.raises(DrumlineError, match="name a strategy and train"):
        drumline.plan(config("vit", tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"strategy": "tp"}, "tensor parallelism requires a plan"),
        ({"strategy": "pp"}, "pipeline"),
        ({"algorithm": "sft"}, "algorithm.kind is not"),
        ({"adapter": "lora"}, "no adapter"),
        ({"model": {"kind": "python"}}, "`path` belong together"),
        ({"model": {"kind": "python", "path": "nothing.py:build"}}, "there is no file"),
    ],
)
def test_what_is_not_possible_is_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(DrumlineError) as refused:
        request = Request(load_values(config("vit", tmp_path / "run", **changes), []), 2)
        make_plan(request, on_progress=lambda phase, done, total: None)
    assert line in refused.value.line()
    assert not (tmp_path / "run").exists()
