"""Questions to the planner that people put in another way than most: flags beside sections, other numbers of ranks, groups, images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from drumline.config.cluster import ClusterConfig
from drumline.config.load import load
from drumline.errors import PlanError
from drumline.hardware.cluster import calibration_for
from drumline.hardware.detect import Machine
from drumline.planner.cluster import cluster_of
from drumline.planner.cost.times import _devices_per_link
from drumline.planner.question import Flags, build_request, load_with_flags
from drumline.planner.report.output import full_config, overrides
from drumline.planner.search.advice import max_batch, max_length, smallest_changes, with_row_length
from drumline.planner.search.search import search
from tests.harness import write_config
from tests.tiny import tiny_model_dir
from tests.unit.conftest import Run
from tests.unit.shapes import question

GRPO = {
    "kind": "grpo",
    "rewards": [{"kind": "regex", "pattern": "x"}],
    "generator": {"kind": "hf", "max_new_tokens": 1024},
}


def test_fp8_is_for_devices_that_have_it() -> None:
    with pytest.raises(PlanError, match="precision fp8 but a100-80g has no fp8"):
        search(question("1b", "8xa100-80g", precision="fp8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "cluster", "said"),
    [(8, "4xa100-80g", 4), (2, "2xa100-80g", None), (8, "2x4xa100-80g", 4)],
)
def test_the_command_starts_the_ranks_that_were_planned(
    nproc: int, cluster: str, said: int | None
) -> None:
    asked = question("0.1b", cluster, launch={"nproc": nproc})
    best = search(asked).ranked[0]
    assert (f"launch.nproc={said}" in overrides(asked.config, best)) == (said is not None)
    assert full_config(asked.config, best).get("launch", {}).get("nproc") == (said or nproc)


def test_ranks_that_a_yaml_asks_for_here_are_planned(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), strategy="auto", launch={"nproc": 2}
    )
    answer = search(build_request(load(path, ["run.device=cpu"]), lambda *_: None).question)
    assert answer.ranked and all(each.layout.mesh.world_size == 2 for each in answer.ranked)


def test_the_largest_micro_batch_of_groups() -> None:
    found = max_batch(question("0.1b", "4xa100-80g", algorithm=GRPO))
    assert found and all(most.candidate.layout.batch.global_samples % 8 == 0 for most in found)


def test_flags_hold_beside_an_override_of_their_section() -> None:
    config = load_with_flags(
        None, ["cluster=16x8xh100-80g"], Flags(model="gpt2", mtbf_hours=5000, price=2.5)
    ).config
    assert config.cluster is not None and (config.cluster.nodes, config.cluster.mtbf_hours) == (
        16,
        5000,
    )
    assert config.cluster.price_per_device_hour == 2.5
    config = load_with_flags(
        None,
        ["data=rows.jsonl", "data.max_length=32"],
        Flags(model="gpt2", cluster="1x4090", length=64),
    ).config
    assert config.data.max_length == 32, "an override of the key itself"
    config = load_with_flags(
        None,
        ["data=rows.jsonl", "cluster=2x4090"],
        Flags(model="gpt2", cluster="1x4090", length=64),
    ).config
    assert (
        config.data.max_length == 64 and config.cluster is not None and config.cluster.per_node == 2
    )


@pytest.mark.slow
def test_the_command_of_a_plan_keeps_its_flags(run: Run, tmp_path: Path) -> None:
    """Also where an override sets the section whole that a flag sets a key in."""
    path = tmp_path / "c.yaml"
    path.write_text("model: {id: llama-3.1-8b}\ndata: rows.jsonl\ncluster: 4x4090\nadapter: lora\n")
    sections = (
        "batch={micro_batch: 2}",
        "data={train: rows.jsonl, packing: false}",
        "cluster=8xh100-80g",
    )
    code, out, err = run(
        "plan", path, "--batch", 64, "--length", 2048, "--price", 3, *sections, columns=300
    )
    assert code == 0, err
    said = shlex.split(next(line for line in out.splitlines() if "drumline train" in line))
    config = load(path, said[3:]).config
    assert (config.batch.global_samples, config.batch.micro_batch, config.data.max_length) == (
        64,
        2,
        2048,
    )
    assert config.cluster is not None and (
        config.cluster.price_per_device_hour,
        config.cluster.per_node,
    ) == (3, 8)


def test_files_beside_no_yaml_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    config = load_with_flags(
        None, ["strategy={kind: zero3, config: ds.json}"], Flags(model="gpt2", cluster="2x4090")
    ).config
    assert config.strategy.config == {"zero_optimization": {"stage": 3}}  # type: ignore[attr-defined]


def test_lengths_that_a_run_can_have() -> None:
    longest = max_length(question("0.1b", "1xa100-80g", algorithm=GRPO))
    assert longest and all(most.number > 1024 for most in longest)
    images = question(
        "0.1b",
        "1x4090",
        algorithm={"kind": "classify", "modality": "image"},
        data={"train": [{"kind": "digits"}]},
    )
    with pytest.raises(PlanError, match="--max-seq: rows of images have no length"):
        max_length(images)


def test_an_advised_length_brings_its_batch() -> None:
    asked = question(
        "1b", "1x4090", batch={"global_tokens": 65536}, memory={"activation_checkpointing": "none"}
    )
    lines = [
        change.what
        for change in smallest_changes(search(asked))
        if change.what.startswith("data.max_length=")
    ]
    assert lines and all(
        "global_samples: 16" in line and "global_tokens" not in line for line in lines
    )
    assert with_row_length(asked, 64).config.batch.global_samples == 16


@pytest.mark.parametrize(("gb", "each"), [(512, 128), (8, 2)])
def test_the_memory_of_a_host_of_processors_is_said(gb: int, each: int) -> None:
    machine = Machine(devices=[], cores=8, memory_bytes=2**34, device="cpu", bf16=False)
    said: Any = ClusterConfig.model_validate(
        {"device": "cpu", "per_node": 4, "nodes": 2, "host_memory_gb": gb}
    )
    assert (
        cluster_of(said, machine, 4, calibration_for(machine)).device.memory_bytes == each * 10**9
    )


@pytest.mark.slow
def test_copies_to_the_host_share_its_links() -> None:
    for devices, times in ((4, 1), (8, 2)):
        asked = question("0.1b", f"{devices}xh100-80g")
        assert _devices_per_link(search(asked).ranked[0].layout, asked.cluster) == times
