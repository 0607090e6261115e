"""Each row of the table over the stand-in: losses as on the CPU, and what a step asks of the device.

A step that is not logged launches what `counts.json` says, and waits for the device where that file
says, nowhere else. `--write-counts` writes the file anew.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_plans
from tests.distributed.rows import engine_of
from tests.distributed.setups import merge
from tests.distributed.test_distill import teacher_dir
from tests.distributed.test_family_lives import write_model
from tests.fake_gpu.ledger_file import LedgerFile, ledger_path
from tests.fake_gpu.running import NEEDS_STAND_IN, claim_plan, machine, run_ranks
from tests.fake_gpu.table import (
    BY_NAME,
    COUNTED,
    EIGHT_EXPERTS,
    EIGHT_SMALL_EXPERTS,
    FOUR_HEADS,
    PAGEABLE,
    READ_IMAGES,
    ROWS,
    SAVED_STEP,
    SCORED,
    STEPS,
    VISION,
    VISION_SCORED,
    Row,
)
from tests.harness import (
    Sections,
    column,
    events,
    losses,
    read_json,
    vision_pair_rows,
    vision_rows,
    write_config,
    write_rows,
)
from tests.tiny import (
    ARCHITECTURES,
    tiny_architecture_dir,
    tiny_model_dir,
    tiny_reward_model_dir,
    tiny_vision_dir,
)
from tests.tiny_vision import tiny_vision_judge_dir

COUNTS = Path(__file__).parent / "counts.json"
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3000),  # the first row of a group waits for the others
    NEEDS_STAND_IN,
]
BASE: Sections = {
    "precision": "fp32",
    "batch": {"global_samples": 8, "micro_batch": 2},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"every": None, "asynchronous": False, "export": "none"},
    "run": {"steps": STEPS, "log_every": STEPS},
    "eval": {"at_start": False},
}
SECONDS_TO_START = 240
SECONDS_A_ROW = 60
# Makes the model of a name that is no type of transformers.
MODELS: dict[str, Callable[..., Path]] = {
    "llama": tiny_model_dir,
    FOUR_HEADS: partial(tiny_model_dir, kv_heads=4),
    EIGHT_EXPERTS: partial(tiny_architecture_dir, kind="mixtral", num_local_experts=8),
    EIGHT_SMALL_EXPERTS: partial(tiny_architecture_dir, kind="qwen3_moe", num_experts=8),
    VISION: tiny_vision_dir,
    VISION_SCORED: tiny_vision_judge_dir,
    SCORED: tiny_reward_model_dir,
}
AT_ONCE = 16  # rows that ranks train before they are new ones


def name_of(row: Row) -> str:
    return row.name


class Runs:
    """The rows' run folders. What one process group can train is trained when the first row asks."""

    def __init__(self, root: Path, rows: list[Row]) -> None:
        self.root = root
        self.rows = rows
        self.failures: dict[str, str] = {}
        self.references: dict[str, Path] = {}
        self.trained: set[str] = set()

    def folder(self, row: Row) -> Path:
        """Return the run folder of a row, which its ranks have trained."""
        if row.name not in self.trained:
            self._train_with(row)
        assert row.name not in self.failures, self.failures[row.name]
        return self._run(row.name)

    def reference(self, row: Row) -> Path:
        """Return the run folder of the same numbers on the CPU."""
        if not self.references:
            self._train_references()
        return self.references[_numbers(row)]

    def _run(self, name: str) -> Path:
        folder = name.replace(" ", "_").replace(",", "")
        return self.root / folder / "run"

    def _train_references(self) -> None:
        plans: dict[int, list[Path]] = defaultdict(list)
        for row in self.rows:
            numbers = _numbers(row)
            if numbers in self.references:
                continue
            folder = self.root / f"cpu-{len(self.references)}"
            path = self._config(folder, row, "cpu", row.reference_sections)
            plan = claim_plan(path, row.reference_world_size, None)
            self.references[numbers] = plan.parent
            plans[row.reference_world_size].append(plan)

        for world_size, of_size in plans.items():
            run_plans(of_size, world_size)

    def _rows_beside(self, row: Row) -> list[Row]:
        """Return rows that one process group can train: this one, and others that are still new."""
        rows = [row]
        for each in self.rows:
            is_new = each.name not in self.trained and each is not row
            if is_new and _group(each) == _group(row):
                rows.append(each)
        return rows[:AT_ONCE]

    def _train_with(self, row: Row) -> None:
        """Train a row, and with it others of its group, in one process group."""
        rows = self._rows_beside(row)
        self.trained.update(map(name_of, rows))
        for each in rows:
            if each.continues and each.continues not in self.trained:
                self._train_with(BY_NAME[each.continues])

        host = machine(row.devices)
        for each in rows:
            folder = self._run(each.name).parent
            path = self._config(folder, each, "cuda", each.numbers, each.sections)
            claim_plan(path, row.world_size, host)
            if each.continues:
                self._copy_checkpoint(each.continues, each.name)

        # Where a rank fails, the rows after it are trained by new ranks.
        while rows:
            rows = self._train_until_failure(rows)

    def _train_until_failure(self, rows: list[Row]) -> list[Row]:
        """Train rows in one process group. Return those after the one whose ranks failed."""
        world_size = rows[0].world_size
        devices_of_rank = rows[0].devices_of_rank
        plans = [self._run(row.name) / "plan.json" for row in rows]
        timeout = SECONDS_TO_START + SECONDS_A_ROW * len(rows)
        failed = run_ranks("tests.fake_gpu.ranks", plans, world_size, timeout, devices_of_rank)

        for number, row in enumerate(rows):
            if not self._is_done(row):
                said = [f"rank {rank} {text}" for rank, text in failed.items()]
                self.failures[row.name] = "\n".join(said)
                return rows[number + 1 :]
        return []

    def _is_done(self, row: Row) -> bool:
        """Return whether each rank has left the ledger that it writes after the row."""
        run = self._run(row.name)
        return all(ledger_path(run, rank).exists() for rank in range(row.world_size))

    def _copy_checkpoint(self, before: str, after: str) -> None:
        """Let a row go on from the checkpoint in the middle of the row `before`."""
        checkpoint = f"checkpoints/step-{SAVED_STEP:08d}"
        shutil.copytree(self._run(before) / checkpoint, self._run(after) / checkpoint)

    def _config(self, folder: Path, row: Row, device: str, *sections: Sections) -> Path:
        """Write the config of a run in `folder`."""
        folder.mkdir()
        places: Sections = {
            "run": {"device": device},
            "data": {"cache_dir": str(self.root / "cache")},
        }
        if row.has_teacher:
            # Each run asks the teacher itself, whose numbers are kept beside the tokens.
            places["data"]["cache_dir"] = str(folder / "cache")
            places["algorithm"] = {"teacher": {"id": str(self._teacher())}}
        config = merge(BASE, *sections, places)
        path = write_config(folder, self._model(row), **config)
        if row.architecture in READ_IMAGES:
            write_rows_with_images(folder, config)
        return path

    def _teacher(self) -> Path:
        folder = self.root / "teacher"
        if folder.exists():
            return folder
        return teacher_dir(self.root)

    def _model(self, row: Row) -> Path:
        folder = self.root / f"{row.architecture}-{row.layers}"
        if folder.exists():
            return folder
        make = MODELS.get(row.architecture)
        if make is not None:
            return make(folder, layers=row.layers)
        if row.architecture in ARCHITECTURES:
            return tiny_architecture_dir(folder, row.architecture, row.layers)
        return write_model(folder, row.architecture)


def write_rows_with_images(folder: Path, config: Sections) -> None:
    """Write conversations with images, or pairs of answers to them, over the data of a config."""
    kind = config.get("algorithm", {}).get("kind", "sft")
    make = vision_rows
    if kind in ("dpo", "kto", "reward"):
        make = vision_pair_rows
    write_rows(folder / "train.jsonl", make(folder, config["rows"]))
    write_rows(folder / "eval.jsonl", make(folder, 6, seed=1))


def _numbers(row: Row) -> str:
    """Return the same for rows that one run on the CPU is the reference of."""
    values = [row.architecture, row.layers, row.reference_sections, row.reference_world_size]
    return json.dumps(values, sort_keys=True)


def _group(row: Row) -> str:
    """Return the name of the process group that trains a row."""
    engines = "zero" if engine_of(row) == "zero" else "native"
    order = "resumed" if row.continues else "new"
    return f"{row.world_size} of {row.devices_of_rank} {engines} {order}"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of the rows that were asked for, and of those whose checkpoints they go on from."""
    names = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == Path(__file__):
            row: Any = item.callspec.params["row"]
            names.append(row.name)

    for name in list(names):
        if BY_NAME[name].continues:
            names.append(BY_NAME[name].continues)

    rows = [BY_NAME[name] for name in dict.fromkeys(names)]
    return Runs(tmp_path_factory.mktemp("fake-gpu"), rows)


def rows_with_defects() -> list[Any]:
    """Return the counted rows as parameters; those that copy from pageable memory are to fail."""
    chosen = []
    for row in COUNTED:
        marks = []
        if row.name in PAGEABLE:
            marks.append(pytest.mark.xfail(strict=True, reason=PAGEABLE[row.name]))
        chosen.append(pytest.param(row, id=row.name, marks=marks))
    return chosen


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_losses_are_those_of_the_cpu(runs: Runs, row: Row) -> None:
    run = runs.folder(row)
    reference = runs.reference(row)
    expected = losses(reference)
    if row.continues:
        for step in range(SAVED_STEP + 1):
            expected.pop(step, None)
    assert losses(run) == pytest.approx(expected, rel=row.tolerance)

    figure = "reward" if events(run, "rollout") else "loss"
    held_out = column(run, figure, "eval")[-1]
    expected_held_out = column(reference, figure, "eval")[-1]
    assert held_out == pytest.approx(expected_held_out, rel=row.tolerance)


@pytest.mark.parametrize("row", COUNTED, ids=name_of)
def test_a_step_launches_and_waits_as_committed(
    runs: Runs, row: Row, request: pytest.FixtureRequest
) -> None:
    found = _counts(runs, row)
    if request.config.getoption("--write-counts"):
        _write_counts(row.name, found)
    committed = _committed()
    assert row.name in committed, "no counts are committed of it: --write-counts"
    assert found == committed[row.name]


@pytest.mark.parametrize("row", rows_with_defects())
def test_a_step_copies_nothing_from_pageable_memory(runs: Runs, row: Row) -> None:
    found = _counts(runs, row)
    waits = list(found["waits"])
    for rank in row.counted_ranks:
        waits += found[rank]["waits"]
    for wait in waits:
        assert not wait.startswith("copy from pageable memory")


def _counts(runs: Runs, row: Row) -> Sections:
    """Return what is committed of a row: the counts of rank 0, and those of other ranks by name."""
    run = runs.folder(row)
    found: Sections = {**LedgerFile(run).counts(row.counted_step)}
    for name, rank in row.counted_ranks.items():
        found[name] = LedgerFile(run, rank).counts(row.counted_step)
    return found


def _committed() -> Sections:
    """Return what is committed of each row."""
    if not COUNTS.exists():
        return {}
    rows: Sections = read_json(COUNTS)["rows"]
    return rows


def _write_counts(name: str, found: Sections) -> None:
    rows = {**_committed(), name: found}
    names = [row.name for row in COUNTED if row.name in rows]
    ordered = {each: rows[each] for each in names}
    COUNTS.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")
