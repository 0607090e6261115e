"""One rank of test_heads: `python -m tests.distributed.heads_worker PLAN...` takes two steps of each plan and writes RANK.pt beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from tests.distributed.ranks import share_groups

RATE = 1e-2


def objective(outputs: Any, batch: Any) -> LossOut:
    """Whatever the model's heads answer, weighted unevenly by what the tokens are: a wrong place or a part counted twice shows."""
    targets_BT = batch.targets_BT
    uneven_BT = torch.sin(batch.input_ids_BT.double()).float() * (targets_BT != -100)
    loss_sum, sums = torch.zeros((), device=targets_BT.device), {}
    if outputs.weight_VD is not None or outputs.logits_BTV is not None:
        chosen_BT, entropy_BT = outputs.log_probs(targets_BT, 16, 0.8, entropy=True)
        # Another gradient for each token, of either sign, that hangs on what it is.
        loss_sum = (
            loss_sum
            - (uneven_BT * (chosen_BT / 4).exp()).sum()
            - 0.1 * (entropy_BT * uneven_BT).sum()
        )
        sums |= {"chosen": chosen_BT.detach().sum(), "entropy": entropy_BT.detach().sum()}
    if outputs.score is not None:
        values_BT = outputs.values()
        loss_sum = loss_sum + ((values_BT - uneven_BT).square() * (targets_BT != -100)).sum()
        sums |= {"values": (values_BT.detach() * uneven_BT).sum()}
    return LossOut(loss_sum, sums)


def read(outputs: Any, batch: Any) -> torch.Tensor:
    """Of each row, what the heads say of its tokens."""
    said = []
    if outputs.score is not None:
        said.append(outputs.values())
    if outputs.weight_VD is not None or outputs.logits_BTV is not None:
        said.append(outputs.log_probs(batch.targets_BT, 16)[0])
    return (torch.stack(said) * (batch.targets_BT != -100)).sum(2).T


def look(plan: Any, rank: int) -> dict[str, Any]:
    from drumline.config.algorithm import AlgorithmSpec
    from drumline.config.registry import make
    from drumline.dist.reduce import Gather, sum_over_ranks
    from drumline.engine.build import build_engine
    from drumline.train.build import build_streams

    text = plan.model_copy(
        update={"config": plan.config.model_copy(update={"algorithm": make(AlgorithmSpec, "sft")})}
    )
    streams = build_streams(text, plan.mesh.data_rank(rank), 0, "cpu")
    engine = build_engine(plan, "cpu")
    told: dict[str, Any] = {
        "first": {name: t.detach().clone() for name, t in engine.whole_weights()},
        "steps": [],
    }
    shared = plan.mesh.world_size / plan.mesh.data_ranks  # so many ranks have each sample
    batches: list[Any] = []
    for step, batch in enumerate(streams.training):
        if step == 2:
            break
        batches = batch.micro_batches
        (weight,) = sum_over_ranks([float(sum(b.weight for b in batches))], "cpu")
        sums = engine.forward_backward(batches, objective, weight / shared)
        norm = engine.grad_norm()
        engine.step(RATE, norm, torch.isfinite(norm))
        whole, _ = (
            Gather(rank, plan.mesh.world_size, "cpu", plan.mesh.counts(rank)).start(sums).read()
        )
        told["steps"].append({**whole, "norm": float(norm)})
    told["weights"] = {name: t.detach().clone() for name, t in engine.whole_weights()}
    told["read"] = {}
    for said, batch in zip(engine.infer(batches, read), batches, strict=True):
        for row, ids in zip(said.tolist(), batch.input_ids_BT.tolist(), strict=True):
            told["read"][" ".join(map(str, ids)).rstrip(" 0")] = row
    return told


def main(paths: list[str]) -> None:
    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    for path in map(Path, paths):
        torch.save(look(Plan.load(path), ranks.rank), path.parent / f"{ranks.rank}.pt")
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])
