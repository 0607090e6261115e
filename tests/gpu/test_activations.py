"""Activation offload on a GPU: pinned copies on a stream of their own, the numbers of a run without it, and the memory that it spares."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.telemetry.events import newest_measurement, read
from tests.gpu.runs import same_losses
from tests.gpu.stand_in import NEEDS_CUDA, size
from tests.harness import Sections, run_drumline, write_config
from tests.tiny import tiny_model_dir

pytestmark = NEEDS_CUDA
FULL = {"activation_checkpointing": "full"}
OFFLOAD = {"activation_offload": True}
SPARING: dict[str, Sections] = {
    "offload": OFFLOAD,
    "full": FULL,
    "offload, full": {**OFFLOAD, **FULL},
    "chunks": {"mlp_chunk": size(1024, 512)},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of a model whose activations are most of its memory, by name; `plain` spares none."""
    root = tmp_path_factory.mktemp("activations")
    model = tiny_model_dir(root / "model", hidden=size(256, 64), layers=12)
    found = {}
    for name, memory in {"plain": {}, **SPARING}.items():
        folder = root / name
        folder.mkdir()
        path = write_config(
            folder,
            model,
            rows=400,
            strategy="single",
            precision={"kind": "fp32", "tf32": False},
            memory=memory,
            run={"device": "cuda"},
            data={"packing": True, "max_length": size(512, 256)},
            batch={"global_samples": 16, "micro_batch": 16},
            eval={"at_start": False},
        )
        run_drumline("train", path)
        found[name] = folder / "run"
    return found


@pytest.mark.parametrize("name", SPARING)
def test_same_losses(runs: dict[str, Path], name: str) -> None:
    same_losses(runs[name], runs["plain"], 1e-5)


def test_less_memory(runs: dict[str, Path]) -> None:
    peaks = {}
    for name, run in runs.items():
        measured = newest_measurement(read(run / "events.jsonl"))
        assert measured is not None
        peaks[name] = measured.memory["peak"]
    print(peaks)
    assert peaks["offload"] < 0.6 * peaks["plain"]
    assert peaks["offload, full"] < peaks["full"]
    assert peaks["chunks"] < peaks["plain"]
