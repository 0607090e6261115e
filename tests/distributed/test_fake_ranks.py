"""Three ways of spreading at once need eight processes. Here they are built, rank by rank, over
torch's fake process group, which sends nothing: between them the ranks hold each entry of each
weight as often as the mesh says, and no rank holds more than its part."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from drumline.plan.plan import Plan
from tests.distributed.setups import plan_in, slug
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


Held = dict[str, tuple[tuple[int, ...], int]]


def build(paths: list[Path], results: Any) -> None:
    """For each plan a list of what its ranks hold: name → (shape, entries held here)."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drumline.engine.build import build_engine

    for path in paths:
        ranks = []
        for rank in range(RANKS):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
            held: Held = {}
            for name, tensor in build_engine(Plan.load(path), "cpu").tensors().items():
                local = tensor
                if isinstance(tensor, DTensor):
                    local = tensor.to_local()
                held[name] = (tuple(tensor.shape), local.numel())
            ranks.append(held)
            dist.destroy_process_group()
        results.append(ranks)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Held]]:
    root = tmp_path_factory.mktemp("fake")
    model = tiny_model_dir(root / "model", layers=4)
    batch = {"global_samples": 8, "micro_batch": 1}
    paths = []
    for name, (strategy, _) in THREE.items():
        paths.append(plan_in(root, slug(name), RANKS, model, strategy=strategy, batch=batch))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.list()
        child = context.Process(target=build, args=(paths, results))
        child.start()
        child.join(120)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
        return dict(zip(THREE, results, strict=True))


def layers_of(names: Iterable[str]) -> set[str]:
    """The numbers of the layers that have one of these weights."""
    found = set()
    for name in names:
        if name.startswith("model.") and ".layers." in name:
            found.add(name.split(".")[3])
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", THREE)
def test_eight_ranks_hold_the_model_between_them(held: dict[str, Any], name: str) -> None:
    ranks = held[name]
    _, copies = THREE[name]
    assert len(ranks) == RANKS
    entries: Counter[str] = Counter()
    shapes: dict[str, tuple[int, ...]] = {}
    for tensors in ranks:
        for tensor, (shape, number) in tensors.items():
            entries[tensor] += number
            shapes[tensor] = shape
    assert layers_of(shapes) == set("0123")
    for tensor, shape in shapes.items():
        # Matrices are cut; norms are whole on tensor-parallel ranks.
        if len(shape) == 2:
            expected = prod(shape) * copies
            if "embed_tokens" in tensor:  # tied, on both ends of the pipeline
                expected *= 2
            assert entries[tensor] == expected, tensor
    layers = list(map(layers_of, ranks))
    assert [len(mine) for mine in layers] == [2] * RANKS
    assert layers[0] | layers[7] == set("0123")
