"""Any module, objective and samples by path: the models of examples/python train the same however
they are spread."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import drumline
from drumline.config.load import load_values
from drumline.config.resume import Resume
from drumline.data.fingerprint import what_changed
from drumline.data.samples import identify_samples, read_samples
from drumline.errors import DrumlineError
from drumline.models.own import export_weights
from drumline.plan.plan import DataIdentity, Plan
from drumline.train.setup import Request, make_plan, resume_from
from tests.distributed.ranks import run_plans
from tests.distributed.setups import asked_for, case, cases, claim
from tests.harness import Sections, column, losses, run_drumline, same_tensors, same_weights

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
SMALL: dict[str, Sections] = {
    "vit": {"width": 16, "depth": 2, "heads": 2},
    "resnet": {"width": 4, "depth": 1},
    "gpt": {"length": 24, "vocabulary": 256, "width": 16, "depth": 2, "heads": 2},
}
NAMES = {"vit": "ViT", "resnet": "ResNet", "gpt": "GPT"}
SPREAD = ("ddp", "fsdp2", "zero2", "zero3")
# test_session_parity has the same models under all four; with --full all.
AGAIN = ("ddp", "fsdp2", "zero2")
DP = ("vit", "gpt")
STAGED = Path(__file__).with_name("staged.py")
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
# What is built, a name, and the strategy.
CUT: list[tuple[str, str, Any]] = [
    ("Staged", "tp", "tp"),
    ("Staged", "1f1b", "pp"),
    ("Staged", "gpipe", {"kind": "pp", "schedule": "gpipe"}),
    ("Staged", "in turn", "model_parallel"),
    ("Staged", "fsdp2 pp", {"kind": "fsdp2", "pp": 2}),
    ("sequence", "pp", "pp"),
]
# With --full alone: parity has their schedules and meshes.
CUT_AGAIN = ("gpipe", "in turn", "fsdp2 pp")
IN_FOUR = [
    ("Staged", "four", "pp"),
    ("Staged", "ddp pp", {"kind": "ddp", "pp": 2}),
    ("Staged", "pp tp", {"kind": "ddp", "pp": 2, "tp": 2}),
]


def config(name: str, run_dir: Path, **sections: Any) -> Sections:
    """The values of a run of one of the examples, small."""
    values: Sections = {
        "model": {
            "kind": "python",
            "path": f"{EXAMPLES / name}.py:{NAMES[name]}",
            "options": SMALL[name],
            "sync_batchnorm": name == "resnet",
        },
        "batch": {"global_samples": 8, "micro_batch": 2},
        "run": {"steps": 3, "dir": str(run_dir), "report_to": [], "device": "cpu"},
        "checkpoint": {"export": "none"},
    }
    if name == "resnet":
        values["batch"] = {"global_samples": 8, "accumulation": 1}
    if name == "gpt":
        values |= learn_text(EXAMPLES / "train_gpt.py")
    else:
        values |= learn_digits(EXAMPLES / "train_vit.py")
    return {**values, **sections}


def learn_text(file: Path) -> Sections:
    rows = {
        "kind": "python",
        "path": f"{file}:Bytes",
        "options": {"modules": ["linear"], "length": 24},
        "limit": 20,
    }
    return {
        "algorithm": {"kind": "python", "path": f"{file}:objective", "weight": f"{file}:tokens"},
        "data": {"train": [rows]},
        "optimizer": {"lr": 1e-3},
    }


def learn_digits(file: Path) -> Sections:
    rows = {"kind": "python", "path": f"{EXAMPLES / 'vit.py'}:digits", "limit": 20}
    return {
        "algorithm": {"kind": "python", "path": f"{file}:objective"},
        "data": {"train": [rows]},
        # Softmax is blind to biases of keys: of rounding alone AdamW would make steps. The GPT has
        # no biases.
        "optimizer": {"kind": "sgd", "lr": 0.05},
    }


def staged(run_dir: Path, build: str, strategy: Any, **sections: Any) -> Sections:
    data = {"kind": "python", "path": f"{STAGED}:rows"}
    model: Sections = {"kind": "python", "path": f"{STAGED}:{build}"}
    if build == "Staged":
        model["tp_plan"] = TP_PLAN
    values: Sections = {
        "model": model,
        "algorithm": {"kind": "python", "path": f"{STAGED}:objective"},
        "data": {"train": [data], "eval": [{**data, "limit": 5}]},
        "batch": {"global_samples": 8, "micro_batch": 1},
        "optimizer": {"kind": "sgd", "lr": 0.05},
    }
    return {**config("vit", run_dir, strategy=strategy), **values, **sections}


def planned(name: str, run_dir: Path, world: int, strategy: Any) -> Path:
    if name in SMALL:
        values = config(name, run_dir, strategy=strategy)
    else:
        values = staged(run_dir, name, strategy)
    return claim(Request(load_values(values, []), world))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all rows, in two process groups."""
    root = tmp_path_factory.mktemp("own")
    alone = [planned(name, root / name / "alone", 1, "single") for name in SMALL]
    for name in DP:
        alone.append(planned(name, root / name / "dp", 1, "dp"))
    run_plans(alone, 1)
    spread = []
    for name in SMALL:
        for strategy in asked_for(request, dict.fromkeys(SPREAD), AGAIN):
            spread.append(planned(name, root / name / strategy, 2, strategy))
    run_plans(spread, 2)
    return root


@pytest.mark.parametrize("name", DP)
def test_dp_on_a_cpu_is_one_process(runs: Path, name: str) -> None:
    expected = losses(runs / name / "alone")
    assert losses(runs / name / "dp") == pytest.approx(expected, rel=1e-6)


@pytest.mark.claim(
    "any module trains the same however it is spread, by a config and in a loop of one's own"
)
@pytest.mark.parametrize("strategy", cases(SPREAD, AGAIN))
@pytest.mark.parametrize("name", SMALL)
def test_same_numbers_as_one_process(runs: Path, name: str, strategy: str) -> None:
    alone = runs / name / "alone"
    mine = runs / name / strategy
    same_losses(mine, alone)
    same_weights(mine, alone, 1e-5)


def same_losses(mine: Path, alone: Path) -> None:
    expected = losses(alone)
    assert len(expected) == 3
    assert losses(mine) == pytest.approx(expected, rel=1e-5)


def train_cut(root: Path, rows: list[tuple[str, str, Any]], world: int) -> None:
    plans = []
    for build, name, strategy in rows:
        plans.append(planned(build, root / build / name, world, strategy))
    run_plans(plans, world)


@pytest.fixture(scope="module")
def cut_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    train_cut(root, [("Staged", "alone", "single"), ("sequence", "alone", "single")], 1)
    rows = {row[1]: row for row in CUT}
    train_cut(root, list(asked_for(request, rows, CUT_AGAIN).values()), 2)
    return root


@pytest.fixture(scope="module")
def cut_in_four(cut_runs: Path) -> Path:
    """Two ranks stand between the first stage and the last, or there are copies of a pipeline."""
    train_cut(cut_runs, IN_FOUR, 4)
    return cut_runs


@pytest.mark.claim("any module cut by a plan or by its stages trains the same")
@pytest.mark.parametrize(
    ("build", "name"),
    [
        case(build, name, id=f"{build}-{name}", full=name in CUT_AGAIN)
        for build, name, strategy in CUT
    ],
)
def test_cut_by_a_plan_or_by_stages_the_same_numbers(cut_runs: Path, build: str, name: str) -> None:
    same(cut_runs / build, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for _, name, _ in IN_FOUR])
def test_cut_over_four_the_same_numbers(cut_in_four: Path, name: str) -> None:
    same(cut_in_four / "Staged", name)


COMPARED = {"step": ("right", "max_right", "grad_norm"), "eval": ("loss", "right")}


def same(runs: Path, name: str) -> None:
    mine = runs / name
    alone = runs / "alone"
    same_losses(mine, alone)
    for kind, keys in COMPARED.items():
        for key in keys:
            expected = column(alone, key, kind)
            assert expected
            assert column(mine, key, kind) == pytest.approx(expected, rel=1e-5), key
    same_weights(mine, alone, 1e-5)


def test_the_loss_is_the_one_of_plain_torch(runs: Path) -> None:
    """The first step's, of the weights that the run began with: the sum over the batch by its
    weight."""
    from drumline.data.order import GlobalOrder
    from drumline.dist.seeds import derive
    from drumline.models.own import own_build
    from drumline.models.shards import Values
    from drumline.models.tape import lay_out_module

    plan = Plan.load(runs / "gpt" / "alone" / "plan.json")
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, source = lay_out_module(own_build(plan), derive(0, "weights"), "cpu")
    Values(source, "cpu", 0, frozenset()).fill(model)
    texts = example.Bytes(["linear"], 24)
    order = GlobalOrder(20, derive(0, "order"), True)
    batch = torch.stack([texts[int(index)] for index in order.ids(0, 8)])
    loss, sums = example.objective(model, batch)
    expected = loss.item() / example.tokens(batch)
    found = losses(runs / "gpt" / "alone")
    assert found[1] == pytest.approx(expected, rel=1e-5)
    assert "z_loss" in sums


def test_goes_on_and_is_exported(runs: Path, tmp_path: Path) -> None:
    from drumline.models.export import export

    run = runs / "vit" / "alone"
    done = Plan.load(run / "plan.json")
    written = load_file(export_weights(done, "last") / "model.safetensors")
    found = drumline.load(run, trust_remote_code=True)
    held = found.module.state_dict()
    assert held.keys() == written.keys()
    same_tensors(written, held)
    with pytest.raises(DrumlineError, match="trust_remote_code"):
        drumline.load(run)
    with pytest.raises(DrumlineError, match="numbers, not text"):
        found.chat("one?")
    with pytest.raises(DrumlineError, match="no Hugging Face model"):
        export(run, tmp_path / "out", "last")


def test_weights_are_exported_in_a_low_type(runs: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(runs / "vit" / "alone", tmp_path / "copied")
    plan = Plan.load(copied / "plan.json")
    checkpoint = plan.config.checkpoint.model_copy(update={"export_dtype": "bf16"})
    half = plan.config.model_copy(update={"checkpoint": checkpoint})
    low = plan.model_copy(update={"config": half, "run_dir": str(copied)})
    kept = load_file(export_weights(low, "last") / "model.safetensors")
    types = {value.dtype for value in kept.values() if value.is_floating_point()}
    assert types == {torch.bfloat16}


def test_verified(tmp_path: Path) -> None:
    """By stages, too; its dropout is an argument, and is switched off."""
    values = staged(tmp_path / "run", "sequence", "pp")
    values["model"]["options"] = {"dropout": 0.5}
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(values))
    done = run_drumline("verify", path, "--strategies", "pp,ddp cp=2", "--steps", 2)
    assert "1 of 2 strategies train what one process trains" in done.out
    assert "ddp cp=2 refused" in done.out


ROWS = """
import random
import torch

class Rows:
    def __init__(self, shift=0.0, number=8):
        self.rows = [(torch.full((4,), float(i)) + SHIFT, i % 2) for i in range(number)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row, label = self.rows[index]
        return row + NOISE * random.random(), label
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"SHIFT": "1.0"}, "8 rows before, 8 now, and not the same ones"),
        ({"number=8": "number=9"}, "8 rows before, 9 now, and not the same ones"),
        ({"i % 2": "(i + 1) % 2"}, "8 rows before, 8 now"),
        ({"import random\n": "import random\n\n"}, None),
    ],
)
def test_other_rows_are_noticed(tmp_path: Path, changes: dict[str, str], says: str | None) -> None:
    def identity(name: str, text: str) -> DataIdentity:
        text = text.replace("SHIFT", "0.0").replace("NOISE", "0")
        (tmp_path / name).write_text(text)
        data = {"train": [{"kind": "python", "path": f"{name}:Rows"}]}
        loaded = load_values(config("vit", tmp_path, data=data), [])
        sources = loaded.config.data.train
        return identify_samples(sources, tmp_path, read_samples(sources, tmp_path))

    text = ROWS
    for old, new in changes.items():
        text = text.replace(old, new)
    one = identity("one.py", ROWS)
    found = what_changed(one, identity("other.py", text))
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert says in found
    drawn = [identity(f"drawn{i}.py", ROWS.replace("NOISE", "1")) for i in range(2)]
    assert what_changed(*drawn) is None, "rows drawn at random are not compared"
    later = identity("later.py", ROWS.replace("float(i)", "i"))
    found = what_changed(one, later)
    assert found is not None
    assert "what gives the rows (a function or a file) has changed" in found


def test_a_run_does_not_go_on_with_other_rows(runs: Path) -> None:
    run = runs / "vit" / "alone"
    loaded = load_values(config("vit", run, strategy="single"), [])
    plan = make_plan(Request(loaded, 1), on_progress=lambda *_: None)
    assert plan.data is not None
    assert plan.data.identity is not None
    identity = plan.data.identity.model_copy(update={"content": "other"})
    data = plan.data.model_copy(update={"identity": identity})
    changed = plan.model_copy(update={"data": data})
    again = Request(loaded, 1, Resume())
    assert resume_from(again, plan) == Resume()
    refusal = r"the training data changed since this checkpoint.*--allow data"
    with pytest.raises(DrumlineError, match=refusal):
        resume_from(again, changed)
    allowing = Request(loaded, 1, Resume(), ("data",))
    assert resume_from(allowing, changed) == Resume()


def test_there_is_nothing_to_plan(tmp_path: Path) -> None:
    with pytest.raises(DrumlineError, match="name a strategy and train"):
        drumline.plan(config("vit", tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"strategy": "tp"}, "tensor parallelism requires a plan"),
        ({"strategy": "pp"}, "a pipeline requires the stages of ViT — return an nn.Sequential"),
        (
            {"strategy": {"kind": "pp", "schedule": "zero_bubble"}},
            "schedule zero_bubble requires a Hugging Face model",
        ),
        ({"algorithm": "sft"}, "algorithm.kind sft is for Hugging Face models"),
        ({"adapter": "lora"}, "no adapter"),
        ({"model": {"kind": "python"}}, "`path` belong together"),
        ({"model": {"kind": "python", "path": "nothing.py:build"}}, "there is no file"),
    ],
)
def test_what_is_not_possible_is_one_line(tmp_path: Path, changes: Sections, line: str) -> None:
    values = config("vit", tmp_path / "run", **changes)
    with pytest.raises(DrumlineError) as refused:
        make_plan(Request(load_values(values, []), 2), on_progress=lambda *_: None)
    assert line in refused.value.line()
    assert not (tmp_path / "run").exists()
