"""Each row of the table over the stand-in: losses as on the CPU, and what a step asks of the device.

A step that is not logged launches what `counts.json` says, and waits for the device where that file
says, nowhere else. `--write-counts` writes the file anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import engine_of
from tests.fake_gpu.environment import PYTHON
from tests.fake_gpu.ledger_file import LedgerFile
from tests.fake_gpu.running import machine, run_ranks
from tests.fake_gpu.table import (
    PAGEABLE,
    QUIET_STEP,
    ROWS,
    SAVED_STEP,
    SCORED,
    STEPS,
    Row,
)
from tests.harness import events, losses, write_config
from tests.tiny import tiny_architecture_dir, tiny_model_dir, tiny_reward_model_dir

BY_NAME = {row.name: row for row in ROWS}
# A row that goes on from a checkpoint has the steps of the row without a stop.
COUNTED = [row for row in ROWS if not row.continues]
COUNTS = Path(__file__).parent / "counts.json"
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3000),  # the first row of a group waits for the others
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the CUDA build of torch: make fake-gpu"),
]
BASE: dict[str, Any] = {
    "precision": "fp32",
    "batch": {"global_samples": 8, "micro_batch": 2},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
    "run": {"steps": STEPS, "log_every": STEPS},
    "eval": {"at_start": False},
}
SECONDS_TO_START = 240
SECONDS_A_ROW = 60
AT_ONCE = 16  # rows that ranks train before they are new ones


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Lay sections over sections, key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, values in layer.items():
            if isinstance(values, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **values}
            else:
                merged[name] = values
    return merged


class Runs:
    """The rows' run folders. What one process group can train is trained when the first row asks."""

    def __init__(self, root: Path, rows: list[Row]) -> None:
        self.root = root
        self.rows = rows
        self.failures: dict[str, str] = {}
        self.references: dict[str, Path] = {}
        self.models: dict[str, Path] = {}
        self.trained: set[str] = set()

    def folder(self, row: Row) -> Path:
        """Return the run folder of a row, which its ranks have trained."""
        if row.name not in self.trained:
            self._train_with(row)
        assert row.name not in self.failures, self.failures[row.name]
        return self.root / _slug(row.name) / "run"

    def reference(self, row: Row) -> Path:
        """Return the run folder of the same numbers on the CPU."""
        if not self.references:
            self._train_references()
        return self.references[_numbers(row)]

    def _train_references(self) -> None:
        plans: dict[int, list[Path]] = {}
        for row in self.rows:
            numbers = _numbers(row)
            if numbers in self.references:
                continue
            folder = self.root / f"cpu-{len(self.references)}"
            sections = merge(row.numbers, _spread_of_reference(row))
            world_size = row.world_size if row.is_held_against_ranks else 1
            plan = self._plan(folder, row, sections, world_size, "cpu")
            self.references[numbers] = plan.parent
            plans.setdefault(world_size, []).append(plan)
        for world_size, of_size in plans.items():
            run_plans(of_size, world_size)

    def _train_with(self, row: Row) -> None:
        """Train a row, and with it others of its group, in one process group."""
        group = [each for each in self.rows if _group(each) == _group(row) and each is not row]
        others = [each for each in group if each.name not in self.trained]
        rows = [row, *others[: AT_ONCE - 1]]
        self.trained |= {each.name for each in rows}
        for each in rows:
            if each.continues and each.continues not in self.trained:
                self._train_with(BY_NAME[each.continues])
        plans = {}
        for each in rows:
            sections = merge(each.numbers, each.sections)
            folder = self.root / _slug(each.name)
            plans[each] = self._plan(folder, each, sections, each.world_size, "cuda")
            if each.continues:
                self._copy_checkpoint(each.continues, plans[each].parent)
        world_size = rows[0].world_size
        # Where a rank fails, the rows after it are trained by new ranks.
        while rows:
            arguments: list[object] = [plans[each] for each in rows]
            timeout = SECONDS_TO_START + SECONDS_A_ROW * len(rows)
            failed = run_ranks("tests.fake_gpu.ranks", arguments, world_size, timeout)
            rest = [each for each in rows if not _is_done(plans[each], world_size)]
            if rest:
                said = "\n".join(f"rank {rank} {text}" for rank, text in failed.items())
                self.failures[rest[0].name] = said
            rows = rest[1:]

    def _copy_checkpoint(self, before: str, run: Path) -> None:
        """Let `run` go on from the checkpoint in the middle of the row `before`."""
        name = f"step-{SAVED_STEP:08d}"
        saved = self.root / _slug(before) / "run" / "checkpoints" / name
        shutil.copytree(saved, run / "checkpoints" / name)

    def _plan(
        self, folder: Path, row: Row, sections: dict[str, Any], world_size: int, device: str
    ) -> Path:
        """Write the plan of a run in `folder`."""
        folder.mkdir()
        place = {"run": {"device": device}}
        path = write_config(folder, self._model(row), **merge(BASE, sections, place))
        loaded = load(path, [f"data.cache_dir={self.root / 'cache'}"])
        host = machine(world_size) if device == "cuda" else None
        request = Request(loaded, world_size=world_size, machine=host)
        plan, _ = claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
        return plan

    def _model(self, row: Row) -> Path:
        name = f"{row.architecture}-{row.layers}"
        if name not in self.models:
            folder = self.root / name
            if row.architecture == "llama":
                tiny_model_dir(folder, layers=row.layers)
            elif row.architecture == SCORED:
                tiny_reward_model_dir(folder, layers=row.layers)
            else:
                tiny_architecture_dir(folder, row.architecture, row.layers)
            self.models[name] = folder
        return self.models[name]


def _numbers(row: Row) -> str:
    """Return the same for rows that one run on the CPU is the reference of."""
    values = [row.architecture, row.layers, row.numbers, _spread_of_reference(row)]
    return json.dumps(values, sort_keys=True)


def _spread_of_reference(row: Row) -> dict[str, Any]:
    return {"strategy": row.sections["strategy"]} if row.is_held_against_ranks else {}


def _slug(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def _group(row: Row) -> str:
    """Return the name of the process group that trains a row."""
    engines = "zero" if engine_of(row) == "zero" else "native"
    order = "resumed" if row.continues else "new"
    return f"{row.world_size} {engines} {order}"


def _is_done(plan: Path, devices: int) -> bool:
    return all((plan.parent / f"ledger-{rank}.json").exists() for rank in range(devices))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen: list[Row] = [t.callspec.params["row"] for t in tests if t.path == Path(__file__)]
    before = [BY_NAME[row.continues] for row in chosen if row.continues]
    rows = list(dict.fromkeys([*chosen, *before]))
    return Runs(tmp_path_factory.mktemp("fake-gpu"), rows)


def name_of(row: Row) -> str:
    return row.name


def rows_with_defects() -> list[Any]:
    """Return the counted rows as parameters; those that copy from pageable memory are to fail."""
    chosen = []
    for row in COUNTED:
        known = PAGEABLE.get(row.name)
        marks = [] if known is None else [pytest.mark.xfail(strict=True, reason=known)]
        chosen.append(pytest.param(row, id=row.name, marks=marks))
    return chosen


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_losses_are_those_of_the_cpu(runs: Runs, row: Row) -> None:
    run = runs.folder(row)
    reference = runs.reference(row)
    expected = losses(reference)
    if row.continues:
        expected = {step: loss for step, loss in expected.items() if step > SAVED_STEP}
    assert losses(run).keys() == expected.keys()
    assert losses(run) == pytest.approx(expected, rel=row.tolerance)
    figure = "reward" if events(run, "rollout") else "loss"
    held_out = [events(folder, "eval")[-1][figure] for folder in (run, reference)]
    assert held_out[0] == pytest.approx(held_out[1], rel=row.tolerance)


@pytest.mark.parametrize("row", COUNTED, ids=name_of)
def test_a_step_launches_and_waits_as_committed(
    runs: Runs, row: Row, request: pytest.FixtureRequest
) -> None:
    found = _counts(runs, row)
    if request.config.getoption("--write-counts"):
        _write_counts(row.name, found)
    committed = json.loads(COUNTS.read_text())["rows"]
    assert row.name in committed, "no counts are committed of it: --write-counts"
    assert found == committed[row.name]


@pytest.mark.parametrize("row", rows_with_defects())
def test_a_step_copies_nothing_from_pageable_memory(runs: Runs, row: Row) -> None:
    waits = _counts(runs, row)["waits"]
    assert not [wait for wait in waits if wait.startswith("copy from pageable memory")]


def _counts(runs: Runs, row: Row) -> dict[str, Any]:
    return LedgerFile.read(runs.folder(row) / "ledger-0.json").counts(QUIET_STEP)


def _write_counts(name: str, found: dict[str, Any]) -> None:
    committed = json.loads(COUNTS.read_text()) if COUNTS.exists() else {"rows": {}}
    committed["rows"][name] = found
    known = [row.name for row in COUNTED if row.name in committed["rows"]]
    committed["rows"] = {each: committed["rows"][each] for each in known}
    COUNTS.write_text(json.dumps(committed, indent=1) + "\n")
