"""Activation offload on a GPU: pinned copies on a stream of their own, the numbers of a run without it, and the memory that it spares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.telemetry.events import last_measurement, read
from tests.gpu.stand_in import size
from tests.harness import drumline, losses, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)
MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"activation_offload": True},
    "full": {"activation_checkpointing": "full"},
    "offload, full": {"activation_offload": True, "activation_checkpointing": "full"},
    "chunks": {"mlp_chunk": size(1024, 512)},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of a model whose activations are most of its memory."""
    root = tmp_path_factory.mktemp("activations")
    tiny_model_dir(root / "model", hidden=size(256, 64), layers=12)
    found = {}
    for number, (name, memory) in enumerate(MEMORY.items()):
        folder = root / str(number)
        folder.mkdir()
        run = {"device": "cuda", "steps": 4, "dir": str(folder / "run")}
        path = write_config(
            folder,
            root / "model",
            rows=400,
            strategy="single",
            memory=memory,
            run=run,
            data={"packing": True, "max_length": size(512, 256)},
            batch={"global_samples": 16, "micro_batch": 16},
            eval={"at_start": False},
        )
        assert drumline("train", path, "precision=fp32", "precision.tf32=false").code == 0
        found[name] = folder / "run"
    return found


@pytest.mark.parametrize("name", [name for name in MEMORY if name != "plain"])
def test_same_losses(runs: dict[str, Path], name: str) -> None:
    assert losses(runs[name]) == pytest.approx(losses(runs["plain"]), rel=1e-5)


def test_less_memory(runs: dict[str, Path]) -> None:
    peaks = {}
    for name, run in runs.items():
        measured = last_measurement(read(run / "events.jsonl"))
        assert measured is not None
        peaks[name] = measured.memory["peak"]
    print(peaks)
    assert (
        peaks["offload"] < 0.6 * peaks["plain"]
        and peaks["offload, full"] < peaks["full"]
        and peaks["chunks"] < peaks["plain"]
    )
