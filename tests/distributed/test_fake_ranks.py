"""Three ways of spreading at once need eight processes. Here they are built, rank by rank, over torch's fake process group, which
sends nothing: between them the ranks hold each entry of each weight as often as the mesh says, and no rank holds more than its part."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.plan.plan import Plan
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.harness import write_config
from tests.tiny import tiny_model_dir

RANKS = 8
THREE: dict[str, tuple[dict[str, Any], int]] = {
    # strategy, and how many ranks hold each entry
    "ddp 2 x tp 2 x pp 2": ({"kind": "ddp", "tp": 2, "pp": 2}, 2),
    "fsdp2 2 x tp 2 x pp 2, interleaved": (
        {"kind": "fsdp2", "tp": 2, "pp": 2, "pipeline": {"schedule": "interleaved"}},
        1,
    ),
}


def build(plans: list[str], results: Any) -> None:
    """For each plan and rank: name → (shape, entries held here)."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drumline.engine.build import build_engine

    for path in plans:
        for rank in range(RANKS):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
            tensors = build_engine(Plan.load(Path(path)), "cpu").tensors()
            local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
            results.append(
                (
                    path,
                    rank,
                    {name: (tuple(t.shape), local[name].numel()) for name, t in tensors.items()},
                )
            )
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def held(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, tuple[tuple[int, ...], int]]]]:
    root = tmp_path_factory.mktemp("fake")
    model = tiny_model_dir(root / "model", layers=4)
    paths = {}
    for number, (name, (strategy, _)) in enumerate(THREE.items()):
        folder = root / str(number)
        folder.mkdir()
        path = write_config(
            folder, model, strategy=strategy, batch={"global_samples": 8, "micro_batch": 1}
        )
        request = Request(load(path, []), world_size=RANKS)
        paths[name] = str(
            claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]
        )
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.list()
        child = context.Process(target=build, args=(list(paths.values()), results))
        child.start()
        child.join(120)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
        by_plan = [(path, rank, tensors) for path, rank, tensors in results]
    return {
        name: [tensors for path, _, tensors in by_plan if path == mine]
        for name, mine in paths.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("name", THREE)
def test_eight_ranks_hold_the_model_between_them(held: dict[str, Any], name: str) -> None:
    ranks, copies = held[name], THREE[name][1]
    assert len(ranks) == RANKS
    entries: Counter[str] = Counter()
    for tensors in ranks:
        entries.update({tensor: numel for tensor, (_, numel) in tensors.items()})
    shapes = {tensor: shape for tensors in ranks for tensor, (shape, _) in tensors.items()}
    assert {n.split(".")[3] for n in shapes if ".layers." in n and n.startswith("model.")} == set(
        "0123"
    )
    for tensor, shape in shapes.items():
        if len(shape) == 2:
            # The tied embedding is on both ends of the pipeline; matrices are cut, norms are whole on tensor-parallel ranks.
            assert entries[tensor] == prod(shape) * copies * (
                2 if "embed_tokens" in tensor else 1
            ), tensor
    layers = [
        {n.split(".")[3] for n in tensors if n.startswith("model.") and ".layers." in n}
        for tensors in ranks
    ]
    assert all(len(mine) == 2 for mine in layers) and layers[0] | layers[7] == set("0123")
