"""One rank of test_overflow: `python -m tests.distributed.overflow_worker MODEL FOLDER` writes
RANK.json."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import share_groups

WAYS = ("ddp", "fsdp2", "tp")
SCALE = 1024.0


class Judge:
    """Takes steps as the loop does, and writes down what came of each."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.before = {name: tensor.clone() for name, tensor in self.local_tensors().items()}
        self.log: list[dict[str, Any]] = []

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the state."""
        from drumline.engine.norms import local

        return {name: local(tensor) for name, tensor in self.engine.tensors().items()}

    def step(self, how: str) -> None:
        norm = self.engine.grad_norm()
        self.engine.step(1e-2, norm, torch.isfinite(norm))
        found = {
            "how": how,
            "finite": math.isfinite(norm),
            "scale": self.engine.state()["scaler"]["scale"],
            "still": True,
        }
        for name, tensor in self.local_tensors().items():
            if not torch.equal(tensor, self.before[name]):
                found["still"] = False
        self.log.append(found)


def plan_of(kind: str, model_dir: Path, ranks: int) -> Any:
    from drumline.config.config import Config
    from drumline.plan.plan import BatchPlan
    from tests.plans import small_plan

    values = {
        "data": {"train": [{"kind": "file", "path": "x"}], "packing": False},
        "strategy": kind,
        "precision": {"kind": "fp16", "initial_scale": SCALE},
    }
    config = Config.model_validate(values)
    data_parallel: Any = "none" if kind == "tp" else kind
    return small_plan(
        config,
        mesh=config.strategy.mesh(ranks),
        precision="fp16",
        data_parallel=data_parallel,
        batch=BatchPlan(global_samples=4, micro_batch=1, accumulation=2, eval_micro_batch=1),
        model_path=str(model_dir),
    )


def spoil_a_shard(engine: Any) -> None:
    """Make one entry of a gradient infinite that no other rank has."""
    from torch.distributed.tensor import DTensor

    from drumline.engine.norms import local

    for parameter in engine.named.values():
        if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
            local(parameter.grad).view(-1)[0] = float("inf")
            return


def main(model_dir: Path, folder: Path) -> None:
    from drumline.algorithms.tokens.objective import NextToken
    from drumline.data.batches import TokenBatch
    from drumline.dist.start import start, stop
    from drumline.engine.build import build_engine

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    batches = [TokenBatch(ids, targets, torch.arange(24)[None], 23)] * 2
    objective = NextToken(16, False).objective

    def overflowing(outputs: Any, batch: Any) -> Any:
        """A loss too large for fp16's gradients."""
        out = objective(outputs, batch)
        return type(out)(out.loss_sum * 1e6, out.sums)

    found: dict[str, Any] = {}
    for name in WAYS:
        engine: Any = build_engine(plan_of(name, model_dir, ranks.world_size), "cpu")
        judge = Judge(engine)
        first = objective
        # Tensor-parallel peers have the same samples, and so the same losses.
        if ranks.rank == 1 or name == "tp":
            first = overflowing
        engine.forward_backward(batches, first, 46.0)
        judge.step("a loss")
        if name != "ddp":
            engine.forward_backward(batches, objective, 46.0)
            if ranks.rank == 1:
                spoil_a_shard(engine)
            judge.step("an entry of one shard")
        engine.forward_backward(batches, objective, 46.0)
        judge.step("none")
        found[name] = judge.log
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
