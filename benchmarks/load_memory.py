"""Host memory of each rank while a model is loaded, against the model's own bytes.

    python benchmarks/load_memory.py [--parameters 2e8] [--ranks 2] [--dtype bf16] [--smoke] [--out FILE]

A random Llama is saved as safetensors and loaded to train in fp32. `whole, …`: each rank loads all of it with from_pretrained (what
Drumline did before, and does for a model that cannot be laid out without weights), then shards it. The others: laid out on the meta
device, spread, filled. Bytes above what was in use when imports were done. From fp32 files from_pretrained only maps the pages; in
`--dtype bf16`, as most models are stored, it has to make fp32 copies. host_memory.py says what `anonymous` and `resident` mean.
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

CASES = (
    "whole, then fsdp2",
    "fsdp2",
    "whole, a copy a rank",
    "a copy a rank",
    "fsdp2, random weights",
)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=2e8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options = common.parse(parser, parameters=0, cases=("whole, then fsdp2", "fsdp2"))
    with tempfile.TemporaryDirectory() as folder:
        size = save_random_model(
            Path(folder), options.parameters, {"fp32": "float32", "bf16": "bfloat16"}[options.dtype]
        )
        cases: dict[str, Any] = {}
        for case in options.cases:
            ranks = on_ranks(__file__, options.ranks, case, folder)
            cases[case] = {
                "ranks": ranks,
                "anonymous peak / model": max(rank["anonymous"] for rank in ranks) / size,
                "held / model": max(rank["held"] for rank in ranks) / size,
            }
            print(case, cases[case], file=sys.stderr)
    setting = {"parameters": options.parameters, "ranks": options.ranks, "dtype": options.dtype}
    report(setting, {"model_bytes": size, "cases": cases}, options.out)


def load(case: str, folder: str) -> dict[str, int]:
    """One case on this rank: bytes at the peak, and bytes of the parameters held afterwards."""
    import torch
    from transformers import AutoModelForCausalLM

    from drumline.config.mesh import Mesh
    from drumline.config.model import ModelConfig
    from drumline.config.strategies.fsdp2 import FSDP2Strategy
    from drumline.dist.mesh import data_mesh, device_mesh
    from drumline.dist.start import start, stop
    from drumline.engine.norms import local
    from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
    from drumline.models.build import lay_out
    from drumline.models.head import ForwardWithObjective
    from drumline.models.shards import Values

    ranks = start("cpu", "gloo", 600)
    init: Any = "random" if "random" in case else "pretrained"
    config = ModelConfig(id=folder, init=init)
    sharded = "fsdp2" in case
    mesh = device_mesh(
        Mesh(shard=ranks.world_size) if sharded else Mesh(replicate=ranks.world_size), "cpu"
    )
    # What is imported and tried once is no part of the load.
    ForwardWithObjective(lay_out(folder, config, 0)[0])
    with watched() as peak:
        if case.startswith("whole"):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            values = None
        else:
            model, source = lay_out(folder, config, 0)
            values = Values(source, "cpu", 0)
        if sharded:
            apply_fsdp2(ForwardWithObjective(model), model, FSDP2Strategy(), data_mesh(mesh), None)
        if values is not None:
            values.fill(model)
    held = sum(local(p.data).numel() * p.element_size() for p in model.parameters())
    stop()
    return {"anonymous": peak.anonymous, "resident": peak.resident, "held": held}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-work"]:
        print(json.dumps(load(*sys.argv[2:])))
    else:
        main()
