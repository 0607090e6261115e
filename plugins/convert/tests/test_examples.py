"""Configs in the words of other tools: each is converted, read back and dry-run, and two ranks take two steps with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.compat.overlay import from_file
from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from drumline_convert.convert import convert
from tests.distributed.ranks import run_plans
from tests.harness import ROOT, drumline, events, losses, write_config
from tests.tiny import tiny_model_dir

EXAMPLES = sorted((ROOT / "examples" / "compat").iterdir())
STRATEGIES = {
    "accelerate_ddp": "ddp",
    "accelerate_fsdp": "fsdp2",
    "accelerate_fsdp2": "fsdp2",
    "accelerate_zero1": "zero1",
    "accelerate_zero2": "zero2",
    "accelerate_zero3": "zero3",
    "ds_zero2": "zero2",
    "hf_deepspeed": "zero2",
    "hf_flat": "ddp",
    "hf_fsdp": "fsdp2",
    "hf_nested": "ddp",
}
# An accelerate file and a DeepSpeed JSON say nothing of data: they are laid over a config that does.
OVER = sorted([*ROOT.glob("examples/compat/accelerate*"), *ROOT.glob("examples/compat/ds*")])
ROWS = "data.train=[{kind: file, path: rows.jsonl}]"


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES} == STRATEGIES.keys()


@pytest.mark.claim(
    "converted files of other tools give the same config, and none of their keys is dropped silently"
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_converted_it_is_the_same_config(path: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    text, messages = convert(path, new)
    assert messages or path.suffix == ".json"
    new.write_text(text)
    data = [ROWS] if path in OVER else []
    mine, theirs = load(new, data), load(path, data)
    assert mine.config.model_copy(update={"data": None}) == theirs.config.model_copy(
        update={"data": None}
    )
    for one, other in zip(mine.config.data.train, theirs.config.data.train, strict=True):
        paths = [
            (base / source.model_dump()["path"]).resolve()
            for base, source in ((mine.base_dir, one), (theirs.base_dir, other))
        ]
        assert paths[0] == paths[1] or data
    assert mine.config.strategy.kind == STRATEGIES[path.stem]


def planned(path: Path, folder: Path, model: Path) -> Path:
    """A plan of two steps on the tiny model, everything else as the example says."""
    folder.mkdir()
    tiny = [
        f"model.id={model}",
        "run.steps=2",
        f"run.dir={folder / 'run'}",
        f"data.cache_dir={folder / 'cache'}",
        "run.report_to=[]",
        "data.workers=1",
        "data.max_length=96",
        "checkpoint.export=none",
        "checkpoint.every=null",
        "run.device=cpu",
    ]
    if path in OVER:
        own = write_config(
            folder,
            model,
            held_out=0,
            data={"eval": [], "packing": False},
            batch={"global_samples": 4, "micro_batch": 1},
        )
        loaded = load(own, tiny, from_file(path))
    else:
        loaded = load(path, tiny)
    asked = Request(loaded, world_size=2)
    plan = make_plan(asked, on_progress=lambda *_: None)
    return claim_run_dir(plan, asked)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, trained by two ranks, all of one engine in one process group."""
    root = tmp_path_factory.mktemp("compat")
    model = tiny_model_dir(root / "model")
    zero = [path for path in EXAMPLES if "zero" in STRATEGIES[path.stem]]
    run_plans([planned(path, root / path.stem, model) for path in EXAMPLES if path not in zero], 2)
    # DeepSpeed wants its own.
    run_plans([planned(path, root / path.stem, model) for path in zero], 2)
    return root


@pytest.mark.full  # they are the same configs, whose strategies parity trains
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_two_ranks_take_two_steps(runs: Path, path: Path) -> None:
    run = runs / path.stem / "run"
    assert sorted(losses(run)) == [1, 2]
    (start,) = events(run, "run_start")
    assert (start["world_size"], start["strategy"]) == (2, STRATEGIES[path.stem])


def test_the_old_file_by_the_command_line(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    path = ROOT / "examples" / "compat" / "hf_nested.yaml"
    dry = drumline(
        "train",
        path,
        f"model.id={model}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "--dry-run",
        "--nproc",
        "2",
    )
    assert dry.code == 0, dry.err
    assert "kind: ddp" in dry.out and "learning rate 1e-05 × 2 = 2e-05" in dry.out
    assert dry.err.count("note: ") == dry.err.count("\nnote: ") + dry.err.startswith("note: ") > 3
    done = drumline("convert", path, "-o", tmp_path / "new.yaml")
    assert done.code == 0 and load(tmp_path / "new.yaml", []).config.strategy.kind == "ddp"
    again = drumline("convert", path, "-o", tmp_path / "new.yaml")
    assert again.code == 2 and len(again.error_lines) == 1


@pytest.mark.parametrize("path", OVER, ids=lambda p: p.stem)
def test_dry_run_over_a_config(path: Path, tmp_path: Path) -> None:
    own = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), batch={"global_samples": 8, "micro_batch": 2}
    )
    asked = Request(load(own, [], from_file(path)), world_size=2)
    plan = make_plan(asked, on_progress=lambda *_: None, dry_run=True)
    assert plan.config.strategy.kind == STRATEGIES[path.stem]
