"""`strategy: auto` of a run that starts here: what the plan then says, and what it was planned
for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.config.load import load
from drumline.errors import EnvironmentFault, PlanError
from drumline.hardware.detect import Device, Machine
from drumline.plan.explain import strategy_name
from drumline.plan.plan import Plan
from drumline.planner.cluster import cluster_here
from drumline.train import setup
from drumline.train.setup import Request, claim_run_dir
from tests.harness import write_config
from tests.plans import resolve_plan, small_config

GPUS = Machine([Device("NVIDIA GeForce RTX 4090", 24 * 2**30)] * 4, 16, 2**37, "cuda", True)
CPU = Machine([], 2, 2**34, "cpu", False)


def auto_line(plan: Plan) -> str:
    (line,) = [line for line in plan.why if line.startswith("strategy auto: ")]
    return line


def test_the_plan_knows_no_auto(model: Path, tmp_path: Path) -> None:
    """One process is single; two are what is predicted fastest, and the run folder says which."""
    path = write_config(tmp_path, model, batch={"micro_batch": None})
    one = resolve_plan(path)

    assert one.config.strategy.kind == "single"
    assert strategy_name(one) == "single"
    assert one.mesh.world_size == 1

    two = resolve_plan(path, world_size=2)

    assert two.config.strategy.kind == "ddp"
    assert two.mesh.world_size == 2
    assert two.batch.global_samples == 4

    for plan in (one, two):
        chosen = f"{strategy_name(plan)}, micro-batch {plan.batch.micro_batch} × accumulation"
        assert f"strategy auto: {chosen}" in auto_line(plan)
        assert "tokens/s at" in auto_line(plan)

    assert "; second " in auto_line(two)

    saved, _ = claim_run_dir(two, Request(load(path, []), world_size=2))

    assert Plan.load(saved).config.strategy.kind == "ddp"

    written = load(tmp_path / "run" / "config.yaml", [])

    assert written.config.strategy.kind == "ddp"


def test_a_run_that_saves_nothing_asks_for_no_space(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, model)
    plan = resolve_plan(path)
    request = Request(load(path, []))
    monkeypatch.setattr(setup, "free_bytes", lambda folder: 1000)
    with pytest.raises(EnvironmentFault, match="one checkpoint needs about"):
        claim_run_dir(plan, request)

    saved, _ = claim_run_dir(plan.model_copy(update={"saves": False}), request)

    assert not Plan.load(saved).saves


def test_by_rules(model: Path, tmp_path: Path) -> None:
    strategy = {"kind": "auto", "by": "rules", "guide": "devices"}
    plan = resolve_plan(write_config(tmp_path, model, strategy=strategy), world_size=2)

    assert plan.config.strategy.kind == "ddp"
    assert "by the heuristic `devices`" in "\n".join(plan.why)


@pytest.mark.slow
def test_nothing_fits_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started: what is nearest, and what would help."""
    monkeypatch.setattr(setup, "detect", lambda: Machine([], 2, 10**6, "cpu", False))
    with pytest.raises(PlanError) as error:
        resolve_plan(write_config(tmp_path, model))

    line = error.value.line()

    assert line.startswith("strategy: nothing fits; nearest is single: ")
    assert "> 1.0 MB" in line


def test_a_plan_for_gpus_tries_no_kernel_of_theirs_on_the_host(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials before the launch run on the CPU, and a line about it would say nothing of the run."""
    monkeypatch.setattr(setup, "detect", lambda: GPUS)
    path = write_config(tmp_path, model, precision="bf16", data={"packing": True})
    plan = resolve_plan(path, "strategy=single", "run.device=cuda", world_size=1)

    assert plan.device == "cuda"
    assert "does not work here" not in caplog.text


class Here(NamedTuple):
    """What the YAML says of the cluster, and the machine and processes that a run then has.

    `expected` are devices of a host, hosts, and their kind; `is_other`: a line says that another
    cluster was planned for.
    """

    said: dict[str, Any] | str | None
    machine: Machine
    device: Any
    world: int
    expected: tuple[int, int, str]
    is_other: bool = False


PAIR = {"device": "4090", "per_node": 4, "nodes": 2, "inter": "400Gb"}
HERE = [
    Here(None, GPUS, "cuda", 4, (4, 1, "cuda")),
    Here(None, GPUS, "cuda", 2, (2, 1, "cuda")),
    Here(None, GPUS, "cuda", 8, (4, 2, "cuda")),
    Here(None, GPUS, "cpu", 2, (2, 1, "cpu")),
    Here(None, CPU, "cpu", 3, (3, 1, "cpu")),
    Here(PAIR, GPUS, "cuda", 8, (4, 2, "cuda")),
    Here("8xh100-80g", GPUS, "cuda", 4, (4, 1, "cuda"), is_other=True),
    Here("8xh100-80g", CPU, "cpu", 1, (1, 1, "cpu"), is_other=True),
]


@pytest.mark.parametrize(Here._fields, HERE)
def test_it_is_planned_for_what_is_here(
    said: Any,
    machine: Machine,
    device: Any,
    world: int,
    expected: tuple[int, int, str],
    is_other: bool,
) -> None:
    config = small_config(cluster=said)
    cluster, why = cluster_here(config, machine, device, world)

    assert (cluster.per_node, cluster.nodes, cluster.device.kind) == expected

    lines = "\n".join(why)

    assert ("is not the one here" in lines) is is_other

    is_link_unknown = cluster.nodes > 1 and said is None

    assert ("cluster.inter is not set" in lines) is is_link_unknown

    if said == PAIR:
        assert cluster.inter.bandwidth == pytest.approx(50e9)
