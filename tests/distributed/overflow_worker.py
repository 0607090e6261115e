"""One rank of test_overflow: `python -m tests.distributed.overflow_worker MODEL FOLDER` writes RANK.json."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import share_groups

WAYS: dict[str, Any] = {"ddp": "ddp", "fsdp2": "fsdp2", "tp": "tp"}
SCALE = 1024.0


def judge(
    how: str, engine: Any, before: dict[str, torch.Tensor], log: list[dict[str, Any]]
) -> None:
    """Take the step as the loop does it, and write down what came of it. `before`: this rank's parts of the state."""
    from drumline.engine.norms import local

    norm = engine.grad_norm()
    finite = math.isfinite(norm)
    engine.step(1e-2, norm, torch.isfinite(norm))
    still = all(torch.equal(local(t), before[n]) for n, t in engine.tensors().items())
    log.append(
        {"how": how, "finite": finite, "scale": engine.state()["scaler"]["scale"], "still": still}
    )


def main(model_dir: Path, folder: Path) -> None:
    from torch.distributed.tensor import DTensor

    from drumline.algorithms.tokens.objective import NextToken
    from drumline.config.config import Config
    from drumline.data.batches import TokenBatch
    from drumline.dist.start import start, stop
    from drumline.engine.build import build_engine
    from drumline.engine.norms import local
    from drumline.plan.plan import BatchPlan, Plan, Predicted

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch(
        ids, torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1), torch.arange(24)[None], 23
    )
    objective = NextToken(16, False).objective

    def overflowing(outputs: Any, batch: Any) -> Any:
        """A loss too large for fp16's gradients."""
        out = objective(outputs, batch)
        return type(out)(out.loss_sum * 1e6, out.sums)

    found: dict[str, Any] = {}
    for name, strategy in WAYS.items():
        values = {
            "data": {"train": [{"kind": "file", "path": "x"}], "packing": False},
            "strategy": strategy,
        }
        config = Config.model_validate(
            values | {"precision": {"kind": "fp16", "initial_scale": SCALE}}
        )
        mesh = config.strategy.mesh(ranks.world_size)
        plan = Plan(
            config=config, run_dir="r", mesh=mesh, engine="native", device="cpu", backend="gloo", precision="fp16",
            data_parallel={"ddp": "ddp", "fsdp2": "fsdp2"}.get(name, "none"),
            batch=BatchPlan(global_samples=4, micro_batch=1, accumulation=2, eval_micro_batch=1), lr=1e-2, steps=3,
            data=None, model_path=str(model_dir), predicted=Predicted(),
        )  # fmt: skip
        engine: Any = build_engine(plan, "cpu")
        before = {n: local(t).clone() for n, t in engine.tensors().items()}
        log: list[dict[str, Any]] = []

        # Tensor-parallel peers have the same samples, and so the same losses.
        engine.forward_backward(
            [batch, batch], overflowing if ranks.rank == 1 or name == "tp" else objective, 46.0
        )
        judge("a loss", engine, before, log)
        if name != "ddp":
            engine.forward_backward([batch, batch], objective, 46.0)
            if ranks.rank == 1:
                cut = next(
                    p.grad
                    for p in engine.named.values()
                    if isinstance(p, DTensor) and any(s.is_shard() for s in p.placements)
                )
                local(cut).view(-1)[0] = float("inf")
            judge("an entry of one shard", engine, before, log)
        engine.forward_backward([batch, batch], objective, 46.0)
        judge("none", engine, before, log)
        found[name] = log
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
