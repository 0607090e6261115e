"""`strategy: auto` of a run that starts here: what the plan then says, and what it was planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config.config import Config
from drumline.config.load import load
from drumline.errors import EnvironmentFault, PlanError
from drumline.hardware.detect import Device, Machine
from drumline.plan.explain import strategy_name
from drumline.plan.plan import Plan
from drumline.planner.cluster import cluster_here
from drumline.train import setup
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.harness import write_config
from tests.tiny import tiny_model_dir

GPUS = Machine([Device("NVIDIA GeForce RTX 4090", 24 * 2**30)] * 4, 16, 2**37, "cuda", True)
CPU = Machine([], 2, 2**34, "cpu", False)
DATA: dict[str, Any] = {"data": {"train": [{"kind": "file", "path": "x"}]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def planned(
    path: Path, *overrides: str, world: int | None = None, resume: str | None = None
) -> tuple[Plan, Request]:
    request = Request(load(path, list(overrides)), world_size=world, resume=resume)
    return make_plan(request, on_progress=lambda *_: None), request


def test_the_plan_knows_no_auto(model: Path, tmp_path: Path) -> None:
    """One process is single; two are what is predicted fastest, and the run folder says which."""
    path = write_config(tmp_path, model, batch={"micro_batch": None})
    one, _ = planned(path)
    two, request = planned(path, world=2)
    assert (one.config.strategy.kind, strategy_name(one), one.mesh.world_size) == (
        "single",
        "single",
        1,
    )
    assert (
        two.config.strategy.kind == "ddp"
        and two.mesh.world_size == 2
        and two.batch.global_samples == 4
    )
    for plan in (one, two):
        (why,) = [line for line in plan.why if line.startswith("strategy auto: ")]
        assert (
            f"strategy auto: {strategy_name(plan)}, micro-batch {plan.batch.micro_batch} × accumulation"
            in why
            and "tokens/s at" in why
        )
    assert "; second " in next(line for line in two.why if line.startswith("strategy auto"))
    saved, _ = claim_run_dir(two, request)
    assert Plan.load(saved).config.strategy.kind == "ddp"
    assert load(tmp_path / "run" / "config.yaml", []).config.strategy.kind == "ddp"


def test_a_run_that_saves_nothing_asks_for_no_space(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, request = planned(write_config(tmp_path, model))
    monkeypatch.setattr(setup, "free_bytes", lambda folder: 1000)
    with pytest.raises(EnvironmentFault, match="one checkpoint needs about"):
        claim_run_dir(plan, request)
    saved, _ = claim_run_dir(plan.model_copy(update={"saves": False}), request)
    assert not Plan.load(saved).saves


def test_by_rules(model: Path, tmp_path: Path) -> None:
    plan, _ = planned(
        write_config(tmp_path, model, strategy={"kind": "auto", "by": "rules", "guide": "devices"}),
        world=2,
    )
    assert plan.config.strategy.kind == "ddp" and any(
        "by the heuristic `devices`" in line for line in plan.why
    )


def test_nothing_fits_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started: what is nearest, and what would help."""
    monkeypatch.setattr(setup, "detect", lambda: Machine([], 2, 10**6, "cpu", False))
    with pytest.raises(PlanError) as error:
        planned(write_config(tmp_path, model))
    line = error.value.line()
    assert line.startswith("strategy: nothing fits; nearest is single: ") and "> 1.0 MB" in line


def test_a_plan_for_gpus_tries_no_kernel_of_theirs_on_the_host(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials before the launch run on the CPU, and a line about it would say nothing of the run."""
    monkeypatch.setattr(setup, "detect", lambda: GPUS)
    path = write_config(tmp_path, model, precision="bf16", data={"packing": True})
    plan, _ = planned(path, "strategy=single", "run.device=cuda", world=1)
    assert plan.device == "cuda"
    assert "does not work here" not in caplog.text


# (what the YAML says, machine, device, processes) → (devices of a host, hosts, kind), whether a line says that another was planned for
HERE: list[tuple[dict[str, Any] | str | None, Machine, Any, int, tuple[int, int, str], bool]] = [
    (None, GPUS, "cuda", 4, (4, 1, "cuda"), False),
    (None, GPUS, "cuda", 2, (2, 1, "cuda"), False),
    (None, GPUS, "cuda", 8, (4, 2, "cuda"), False),
    (None, GPUS, "cpu", 2, (2, 1, "cpu"), False),
    (None, CPU, "cpu", 3, (3, 1, "cpu"), False),
    (
        {"device": "4090", "per_node": 4, "nodes": 2, "inter": "400Gb"},
        GPUS,
        "cuda",
        8,
        (4, 2, "cuda"),
        False,
    ),
    ("8xh100-80g", GPUS, "cuda", 4, (4, 1, "cuda"), True),
    ("8xh100-80g", CPU, "cpu", 1, (1, 1, "cpu"), True),
]


@pytest.mark.parametrize(("said", "machine", "device", "world", "expected", "is_other"), HERE)
def test_it_is_planned_for_what_is_here(
    said: Any,
    machine: Machine,
    device: Any,
    world: int,
    expected: tuple[int, int, str],
    is_other: bool,
) -> None:
    cluster, why = cluster_here(
        Config.model_validate({**DATA, "cluster": said}), machine, device, world
    )
    assert (cluster.per_node, cluster.nodes, cluster.device.kind) == expected
    assert any("is not the one here" in line for line in why) is is_other
    assert any("cluster.inter is not set" in line for line in why) is (
        cluster.nodes > 1 and said is None
    )
    assert said is None or is_other or cluster.inter.bandwidth == pytest.approx(50e9)
