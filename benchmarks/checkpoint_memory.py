"""Host memory of each rank while a checkpoint is saved and loaded under FSDP2, against the rank's share of it.

    python benchmarks/checkpoint_memory.py [--parameters 2e8] [--ranks 2] [--smoke] [--out FILE]

Weights and AdamW's moments of a random Llama in fp32, sharded. Bytes above what was in use before: nothing is gathered if they stay under
one share (asynchronous saves copy a rank's share once, so that training can go on). See host_memory.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.host_memory import on_ranks, report, save_random_model, watched

CASES = ("save", "load", "save asynchronously")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=2e8)
    parser.add_argument("--ranks", type=int, default=2)
    options = common.parse(parser, parameters=0)
    with tempfile.TemporaryDirectory() as folder:
        size = save_random_model(Path(folder) / "model", options.parameters, "float32")
        ranks = on_ranks(__file__, options.ranks, folder)
    cases = {
        case: {
            "ranks": [rank[case] for rank in ranks],
            "anonymous peak / share": max(
                rank[case]["anonymous"] / rank["share"] for rank in ranks
            ),
        }
        for case in CASES
    }
    figures = {
        "model_bytes": size,
        "share_bytes": [rank["share"] for rank in ranks],
        "cases": cases,
    }
    report({"parameters": options.parameters, "ranks": options.ranks}, figures, options.out)


def work(folder: str) -> dict[str, Any]:
    from drumline.checkpoint.load import load_tensors
    from drumline.checkpoint.save import Checkpointer
    from drumline.config.config import OptimizerConfig
    from drumline.config.mesh import Mesh
    from drumline.config.model import ModelConfig
    from drumline.config.strategies.fsdp2 import FSDP2Strategy
    from drumline.dist.mesh import data_mesh, device_mesh
    from drumline.dist.start import start, stop
    from drumline.engine.norms import local
    from drumline.engine.optimizer import build_optimizer_with_state, optimizer_tensors
    from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
    from drumline.models.build import lay_out
    from drumline.models.head import ForwardWithObjective
    from drumline.models.shards import Values, canonical_tensors

    ranks = start("cpu", "gloo", 600)
    path = str(Path(folder) / "model")
    model, source = lay_out(path, ModelConfig(id=path), 0)
    mesh = data_mesh(device_mesh(Mesh(shard=ranks.world_size), "cpu"))
    apply_fsdp2(ForwardWithObjective(model), model, FSDP2Strategy(), mesh, None)
    Values(source, "cpu", 0).fill(model)
    named = dict(model.named_parameters())
    tensors = canonical_tensors(model) | optimizer_tensors(
        build_optimizer_with_state(named, OptimizerConfig()), named
    )
    peaks: dict[str, Any] = {
        "share": sum(local(t).numel() * t.element_size() for t in tensors.values())
    }
    root = Path(folder) / "checkpoints"

    def save(step: int, asynchronous: bool) -> Path:
        checkpointer = Checkpointer(root, 2, False, "min", asynchronous)
        with watched() as peak:
            checkpointer.save(step, tensors, {}, None)
            (result,) = checkpointer.wait()
        assert result.error is None and result.path is not None, result
        peaks[CASES[2 * asynchronous]] = vars(peak)
        return result.path

    first = save(0, False)
    # Before anything large was freed, which would serve a load without a trace.
    with watched() as peak:
        load_tensors(first, tensors)
    peaks["load"] = vars(peak)
    save(1, True)
    stop()
    return peaks


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-work"]:
        print(json.dumps(work(*sys.argv[2:])))
    else:
        main()
