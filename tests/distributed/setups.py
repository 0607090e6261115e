"""What the files of this folder set up alike: cases, plans of runs, their training, and figures
held against a reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from drumline.config.load import load
from drumline.plan.plan import Plan
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import Sections, column, write_config

Value = TypeVar("Value")
UNSAVED: Sections = {"every": None, "asynchronous": False, "export": "none"}
SAVED_TWICE: Sections = {**UNSAVED, "every": 2}
EIGHT_BY_TWO = {"global_samples": 8, "micro_batch": 2}
EIGHT_BY_FOUR = {"global_samples": 8, "micro_batch": 4}
# A short run of rows as they are, which another may go on from.
SHORT: Sections = {
    "rows": 60,
    "data": {"packing": False},
    "batch": EIGHT_BY_TWO,
    "checkpoint": SAVED_TWICE,
    "eval": {"at_start": False},
}
# Five steps of packed rows, without a checkpoint.
FIVE_STEPS: Sections = {
    "rows": 60,
    "data": {"packing": True, "max_length": 96},
    "batch": {"global_samples": 4, "micro_batch": 2},
    "optimizer": {"lr": 3e-3},
    "checkpoint": UNSAVED,
    "run": {"steps": 5},
}


def case(*values: Any, full: bool, id: str | None = None) -> Any:
    """Return a case of a parametrised test; with `full` one that runs with --full alone."""
    marks = [pytest.mark.full] if full else []
    return pytest.param(*values, id=id, marks=marks)


def cases(names: Iterable[str], again: Container[str]) -> list[Any]:
    """Return a case for each name. Those in `again` run with --full alone."""
    return [case(name, full=name in again) for name in names]


def asked_for(
    request: pytest.FixtureRequest, rows: dict[str, Value], again: Container[str]
) -> dict[str, Value]:
    """Return the rows that this session trains: without --full those that are not in `again`."""
    if request.config.getoption("--full"):
        return rows
    return {name: row for name, row in rows.items() if name not in again}


def chosen_params(session: pytest.Session, file: str) -> list[Sections]:
    """Return the parameters of each chosen test of a file that has some."""
    found = []
    for item in session.items:
        if item.path == Path(file) and hasattr(item, "callspec"):
            found.append(item.callspec.params)
    return found


def slug(*names: str) -> str:
    """Return a name of a folder for one run, or for one that goes on from another."""
    return "-to-".join(names).replace(" ", "_").replace(",", "")


def merge(*layers: Sections) -> Sections:
    """Lay sections of a config over each other, key by key."""
    merged: Sections = {}
    for layer in layers:
        for key, value in layer.items():
            before = merged.get(key)
            if isinstance(value, dict) and isinstance(before, dict):
                merged[key] = {**before, **value}
            else:
                merged[key] = value
    return merged


def claim(request: Request) -> Path:
    """Plan a run and write the plan into its run folder. Returns the plan's file."""
    plan = make_plan(request, on_progress=lambda *_: None)
    return claim_run_dir(plan, request)[0]


def plan_run(config: Path, world_size: int, cache: Path | None = None) -> Path:
    """Plan the run of a config file. Returns the plan's file."""
    overrides = []
    if cache is not None:
        overrides.append(f"data.cache_dir={cache}")
    return claim(Request(load(config, overrides), world_size=world_size))


def plan_in(root: Path, name: str, world_size: int, model: Path, /, **sections: Any) -> Path:
    """Plan a run in the new folder `root`/`name`; runs below `root` share their tokens. `sections`:
    as of `write_config`."""
    folder = root / name
    folder.mkdir()
    config = write_config(folder, model, **sections)
    return plan_run(config, world_size, root / "cache")


def by_engine(plans: Iterable[Path]) -> list[tuple[int, list[Path]]]:
    """Return world sizes with the plans that one process group may train in turn."""
    groups: dict[tuple[int, str], list[Path]] = {}
    for path in plans:
        plan = Plan.load(path)
        key = (plan.mesh.world_size, plan.engine)
        groups.setdefault(key, []).append(path)
    return [(world_size, paths) for (world_size, _), paths in groups.items()]


def train(plans: Iterable[Path], *, counted: bool = False) -> None:
    """Train each plan. `counted`: see `run_plans`."""
    for world_size, paths in by_engine(plans):
        run_plans(paths, world_size, counted=counted)


def copy_checkpoint(run: Path, plan: Path, step: int = 2) -> None:
    """Let the run of a plan go on from a checkpoint of another run."""
    name = f"step-{step:08}"
    shutil.copytree(run / "checkpoints" / name, plan.parent / "checkpoints" / name)


def train_kinds(
    root: Path, params: list[Sections], plan: Callable[[Path, str, str, str], Path]
) -> None:
    """Train what tests look at: each `kind` spread as `name` or `a`, and in one process; then what
    goes on from `a` under `b`.

    `plan` of the root, a folder, a kind and a spread makes a plan with a checkpoint after two
    steps.
    """
    whole: dict[str, Path] = {}
    for asked in params:
        kind = asked["kind"]
        for spread in (asked.get("name", asked.get("a")), "single"):
            folder = slug(kind, spread)
            if folder not in whole:
                whole[folder] = plan(root, folder, kind, spread)
    train(whole.values(), counted=True)
    moved = []
    for asked in params:
        if "a" in asked:
            kind, a, b = asked["kind"], asked["a"], asked["b"]
            path = plan(root, slug(kind, a, b), kind, b)
            copy_checkpoint(whole[slug(kind, a)].parent, path)
            moved.append(path)
    train(moved)


def train_table(root: Path, rows: dict[str, Sections]) -> dict[str, Path]:
    """Train FIVE_STEPS of the model `root`/model for each row of sections, and count bytes. Returns
    the run folders.

    `ranks` of a row is its world size, and no section.
    """
    plans = []
    for name, row in rows.items():
        sections = {**FIVE_STEPS, **row}
        ranks = sections.pop("ranks")
        plans.append(plan_in(root, slug(name), ranks, root / "model", **sections))
    train(plans, counted=True)
    return {name: path.parent for name, path in zip(rows, plans, strict=True)}


def run_of(root: Path, *names: str) -> Path:
    """Return the run folder that `train_kinds` has made for a kind and a spread, or two."""
    return root / slug(*names) / "run"


def same_steps(run: Path, reference: Path, within: float, skip: int = 0) -> None:
    """The losses and gradient norms of a run are those of the reference after its first `skip`
    steps, relative to `within`."""
    for key in ("loss", "grad_norm"):
        expected = column(reference, key)[skip:]
        assert column(run, key) == pytest.approx(expected, rel=within), key


def same_evaluations(run: Path, reference: Path, within: float, key: str = "loss") -> None:
    """A figure of the evaluations of a run is that of the reference, relative to `within`."""
    expected = column(reference, key, "eval")
    assert column(run, key, "eval") == pytest.approx(expected, rel=within), key


def goes_on_from(root: Path, kind: str, a: str, b: str, within: float) -> None:
    """The third step under `b`, after two under `a`, is that of one process."""
    run = run_of(root, kind, a, b)
    assert column(run, "step") == [3]
    same_steps(run, run_of(root, kind, "single"), within, skip=2)
