"""Any module, objective and samples by path: the models of examples/python train the same however they are spread."""

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
from drumline.train.setup import Request, claim_run_dir, make_plan, resume_from
from tests.distributed.ranks import run_plans
from tests.harness import drumline as drumline_command
from tests.harness import events, losses, same_weights

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
SMALL: dict[str, dict[str, Any]] = {
    "vit": {"width": 16, "depth": 2, "heads": 2},
    "resnet": {"width": 4, "depth": 1},
    "gpt": {"length": 24, "vocabulary": 256, "width": 16, "depth": 2, "heads": 2},
}
NAMES = {"vit": "ViT", "resnet": "ResNet", "gpt": "GPT"}
SPREAD = ("ddp", "fsdp2", "zero2", "zero3")
KEPT = ("zero3",)  # test_session_parity has the same models under all four; with --full all
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
IN_FOUR = [
    ("Staged", "four", "pp"),
    ("Staged", "ddp pp", {"kind": "ddp", "pp": 2}),
    ("Staged", "pp tp", {"kind": "ddp", "pp": 2, "tp": 2}),
]


def config(name: str, run_dir: Path, **sections: Any) -> dict[str, Any]:
    file = EXAMPLES / ("train_gpt.py" if name == "gpt" else "train_vit.py")
    digits = {"kind": "python", "path": f"{EXAMPLES / 'vit.py'}:digits", "limit": 20}
    text = {
        "kind": "python",
        "path": f"{file}:Bytes",
        "options": {"modules": ["linear"], "length": 24},
        "limit": 20,
    }
    algorithm = {"kind": "python", "path": f"{file}:objective"} | (
        {"weight": f"{file}:tokens"} if name == "gpt" else {}
    )
    # Softmax is blind to biases of keys: of rounding alone AdamW would make steps. The GPT has no biases.
    optimizer = {"lr": 1e-3} if name == "gpt" else {"kind": "sgd", "lr": 0.05}
    values: dict[str, Any] = {
        "model": {
            "kind": "python",
            "path": f"{EXAMPLES / f'{name}.py'}:{NAMES[name]}",
            "options": SMALL[name],
            "sync_batchnorm": name == "resnet",
        },
        "algorithm": algorithm,
        "data": {"train": [text if name == "gpt" else digits]},
        "batch": {"global_samples": 8}
        | ({"accumulation": 1} if name == "resnet" else {"micro_batch": 2}),
        "optimizer": optimizer,
        "run": {"steps": 3, "dir": str(run_dir), "report_to": [], "device": "cpu"},
        "checkpoint": {"export": "none"},
    }
    return {**values, **sections}


def staged(run_dir: Path, build: str, strategy: Any, **sections: Any) -> dict[str, Any]:
    data = {"kind": "python", "path": f"{STAGED}:rows"}
    values: dict[str, Any] = {
        "model": {
            "kind": "python",
            "path": f"{STAGED}:{build}",
            "tp_plan": TP_PLAN if build == "Staged" else {},
        },
        "algorithm": {"kind": "python", "path": f"{STAGED}:objective"},
        "data": {"train": [data], "eval": [{**data, "limit": 5}]},
        "batch": {"global_samples": 8, "micro_batch": 1},
        "optimizer": {"kind": "sgd", "lr": 0.05},
    }
    return {**config("vit", run_dir, strategy=strategy), **values, **sections}


def planned(name: str, run_dir: Path, world: int, strategy: Any) -> Path:
    values = (
        config(name, run_dir, strategy=strategy)
        if name in SMALL
        else staged(run_dir, name, strategy)
    )
    request = Request(load_values(values, []), world)
    return claim_run_dir(make_plan(request, on_progress=lambda phase, done, total: None), request)[
        0
    ]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all rows, in two process groups."""
    chosen = SPREAD if request.config.getoption("--full") else KEPT
    root = tmp_path_factory.mktemp("own")
    alone = [planned(name, root / name / "alone", 1, "single") for name in SMALL]
    run_plans([*alone, *(planned(name, root / name / "dp", 1, "dp") for name in DP)], 1)
    run_plans(
        [
            planned(name, root / name / strategy, 2, strategy)
            for name in SMALL
            for strategy in chosen
        ],
        2,
    )
    return root


@pytest.mark.parametrize("name", DP)
def test_dp_on_a_cpu_is_one_process(runs: Path, name: str) -> None:
    assert losses(runs / name / "dp") == pytest.approx(losses(runs / name / "alone"), rel=1e-6)


@pytest.mark.claim(
    "any module trains the same however it is spread, by a config and in a loop of one's own"
)
@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=[] if s in KEPT else pytest.mark.full) for s in SPREAD]
)
@pytest.mark.parametrize("name", SMALL)
def test_same_numbers_as_one_process(runs: Path, name: str, strategy: str) -> None:
    alone = losses(runs / name / "alone")
    assert len(alone) == 3 and losses(runs / name / strategy) == pytest.approx(alone, rel=1e-5)
    same_weights(runs / name / strategy, runs / name / "alone", 1e-5)


@pytest.fixture(scope="module")
def cut_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    run_plans(
        [planned(build, root / build / "alone", 1, "single") for build in ("Staged", "sequence")], 1
    )
    run_plans(
        [planned(build, root / build / name, 2, strategy) for build, name, strategy in CUT], 2
    )
    return root


@pytest.fixture(scope="module")
def cut_in_four(cut_runs: Path) -> Path:
    """Two ranks stand between the first stage and the last, or there are copies of a pipeline."""
    run_plans(
        [planned(build, cut_runs / build / name, 4, strategy) for build, name, strategy in IN_FOUR],
        4,
    )
    return cut_runs


@pytest.mark.claim("any module cut by a plan or by its stages trains the same")
@pytest.mark.parametrize(("build", "name"), [row[:2] for row in CUT], ids=str)
def test_cut_by_a_plan_or_by_stages_the_same_numbers(cut_runs: Path, build: str, name: str) -> None:
    same(cut_runs / build, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for _, name, _ in IN_FOUR])
def test_cut_over_four_the_same_numbers(cut_in_four: Path, name: str) -> None:
    same(cut_in_four / "Staged", name)


def same(runs: Path, name: str) -> None:
    mine, alone = runs / name, runs / "alone"
    assert len(losses(alone)) == 3 and losses(mine) == pytest.approx(losses(alone), rel=1e-5)
    for kind, keys in (("step", ("right", "max_right", "grad_norm")), ("eval", ("loss", "right"))):
        found, expected = (
            [[event[key] for key in keys] for event in events(run, kind)] for run in (mine, alone)
        )
        assert expected and found == [pytest.approx(values, rel=1e-5) for values in expected]
    same_weights(mine, alone, 1e-5)


def test_the_loss_is_the_one_of_plain_torch(runs: Path) -> None:
    """The first step's, of the weights that the run began with: the sum over the batch by its weight."""
    from drumline.data.order import GlobalOrder
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
    batch = torch.stack(
        [texts[int(index)] for index in GlobalOrder(20, derive(0, "order"), True).ids(0, 8)]
    )
    loss, sums = example.objective(model, batch)
    assert losses(runs / "gpt" / "alone")[1] == pytest.approx(
        loss.item() / example.tokens(batch), rel=1e-5
    )
    assert "z_loss" in sums


def test_goes_on_and_is_exported(runs: Path, tmp_path: Path) -> None:

    from drumline.plan.plan import Plan

    done = Plan.load(runs / "vit" / "alone" / "plan.json")
    written = load_file(export_weights(done, "last") / "model.safetensors")
    found = drumline.load(runs / "vit" / "alone", trust_remote_code=True)
    assert found.module.state_dict().keys() == written.keys()
    assert all(
        torch.equal(tensor, written[name]) for name, tensor in found.module.state_dict().items()
    )
    with pytest.raises(DrumlineError, match="trust_remote_code"):
        drumline.load(runs / "vit" / "alone")
    with pytest.raises(DrumlineError, match="numbers, not text"):
        found.chat("one?")
    from drumline.models.export import export

    with pytest.raises(DrumlineError, match="no Hugging Face model"):
        export(runs / "vit" / "alone", tmp_path / "out", "last")
    copied = shutil.copytree(runs / "vit" / "alone", tmp_path / "copied")
    plan = Plan.load(copied / "plan.json")
    half = plan.config.model_copy(
        update={"checkpoint": plan.config.checkpoint.model_copy(update={"export_dtype": "bf16"})}
    )
    kept = load_file(
        export_weights(plan.model_copy(update={"config": half, "run_dir": str(copied)}), "last")
        / "model.safetensors"
    )
    assert {value.dtype for value in kept.values() if value.is_floating_point()} == {torch.bfloat16}


def test_verified(tmp_path: Path) -> None:
    """By stages, too; its dropout is an argument, and is switched off."""
    values = staged(tmp_path / "run", "sequence", "pp")
    values["model"]["options"] = {"dropout": 0.5}
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    done = drumline_command(
        "verify", tmp_path / "mine.yaml", "--strategies", "pp,ddp cp=2", "--steps", 2
    )
    assert done.code == 0, done.out + done.err
    assert (
        "1 of 2 strategies train what one process trains" in done.out
        and "ddp cp=2 refused" in done.out
    )


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
        (tmp_path / name).write_text(text.replace("SHIFT", "0.0").replace("NOISE", "0"))
        sources = load_values(
            config("vit", tmp_path, data={"train": [{"kind": "python", "path": f"{name}:Rows"}]}),
            [],
        ).config.data.train
        return identify_samples(sources, tmp_path, read_samples(sources, tmp_path))

    text = ROWS
    for old, new in changes.items():
        text = text.replace(old, new)
    found = what_changed(identity("one.py", ROWS), identity("other.py", text))
    assert found is None if says is None else found is not None and says in found
    drawn = [identity(f"drawn{i}.py", ROWS.replace("NOISE", "1")) for i in range(2)]
    assert what_changed(*drawn) is None, "rows drawn at random are not compared"
    later = identity("later.py", ROWS.replace("float(i)", "i"))
    assert "what gives the rows (a function or a file) has changed" in (
        what_changed(identity("one.py", ROWS), later) or ""
    )


def test_a_run_does_not_go_on_with_other_rows(runs: Path) -> None:
    again = config("vit", runs / "vit" / "alone", strategy="single")
    plan = make_plan(
        Request(load_values(again, []), 1), on_progress=lambda phase, done, total: None
    )
    assert plan.data is not None and plan.data.identity is not None
    other = plan.data.model_copy(
        update={"identity": plan.data.identity.model_copy(update={"content": "other"})}
    )
    changed = plan.model_copy(update={"data": other})
    assert resume_from(Request(load_values(again, []), 1, Resume()), plan) == Resume()
    with pytest.raises(
        DrumlineError, match=r"the training data changed since this checkpoint.*--allow data"
    ):
        resume_from(Request(load_values(again, []), 1, Resume()), changed)
    assert resume_from(Request(load_values(again, []), 1, Resume(), ("data",)), changed) == Resume()


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
        ({"algorithm": "sft"}, "algorithm.kind is not"),
        ({"adapter": "lora"}, "no adapter"),
        ({"model": {"kind": "python"}}, "`path` belong together"),
        ({"model": {"kind": "python", "path": "nothing.py:build"}}, "there is no file"),
    ],
)
def test_what_is_not_possible_is_one_line(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(DrumlineError) as refused:
        request = Request(load_values(config("vit", tmp_path / "run", **changes), []), 2)
        make_plan(request, on_progress=lambda phase, done, total: None)
    assert line in refused.value.line()
    assert not (tmp_path / "run").exists()
