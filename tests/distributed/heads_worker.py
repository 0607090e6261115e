"""One rank of test_heads: `python -m tests.distributed.heads_worker PLAN...` takes two steps of
each plan and writes RANK.pt beside it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from drumline.algorithms.base import LossOut
from tests.distributed.ranks import each_plan

RATE = 1e-2


def objective(outputs: Any, batch: Any) -> LossOut:
    """Whatever the model's heads answer, weighted unevenly by what the tokens are: a wrong place or
    a part counted twice shows."""
    targets_BT = batch.targets_BT
    uneven_BT = torch.sin(batch.input_ids_BT.double()).float() * (targets_BT != -100)
    is_learned_BT = targets_BT != -100
    loss_sum = torch.zeros((), device=targets_BT.device)
    sums: dict[str, torch.Tensor] = {}
    if has_logits(outputs):
        chosen_BT, entropy_BT = outputs.log_probs(targets_BT, 16, 0.8, entropy=True)
        # Another gradient for each token, of either sign, that hangs on what it is.
        gain = (uneven_BT * (chosen_BT / 4).exp()).sum()
        bonus = (entropy_BT * uneven_BT).sum()
        loss_sum = loss_sum - gain - 0.1 * bonus
        sums["chosen"] = chosen_BT.detach().sum()
        sums["entropy"] = entropy_BT.detach().sum()
    if outputs.score is not None:
        values_BT = outputs.values()
        squares_BT = (values_BT - uneven_BT).square()
        loss_sum = loss_sum + (squares_BT * is_learned_BT).sum()
        sums["values"] = (values_BT.detach() * uneven_BT).sum()
    return LossOut(loss_sum, sums)


def has_logits(outputs: Any) -> bool:
    return outputs.weight_VD is not None or outputs.logits_BTV is not None


def read(outputs: Any, batch: Any) -> torch.Tensor:
    """Of each row, what the heads say of its tokens."""
    said = []
    if outputs.score is not None:
        said.append(outputs.values())
    if has_logits(outputs):
        chosen_BT, _ = outputs.log_probs(batch.targets_BT, 16)
        said.append(chosen_BT)
    is_learned_BT = batch.targets_BT != -100
    return (torch.stack(said) * is_learned_BT).sum(2).T


def look(plan: Any, rank: int) -> dict[str, Any]:
    from drumline.config.algorithm import AlgorithmSpec
    from drumline.config.registry import make
    from drumline.dist.reduce import SumReducer, sum_over_ranks
    from drumline.engine.build import build_engine
    from drumline.train.build import build_data_loaders

    sft = plan.config.model_copy(update={"algorithm": make(AlgorithmSpec, "sft")})
    text = plan.model_copy(update={"config": sft})
    data_loaders = build_data_loaders(text, plan.mesh.data_rank(rank), 0, "cpu")
    engine = build_engine(plan, "cpu")
    told: dict[str, Any] = {"first": copies(engine), "steps": []}
    shared = plan.mesh.world_size / plan.mesh.data_ranks  # so many ranks have each sample
    batches: list[Any] = []
    for step, batch in enumerate(data_loaders.training):
        if step == 2:
            break
        batches = batch.micro_batches
        (weight,) = sum_over_ranks([float(sum(b.weight for b in batches))], "cpu")
        sums = engine.forward_backward(batches, objective, weight / shared)
        norm = engine.grad_norm()
        engine.step(RATE, norm, torch.isfinite(norm))
        reducer = SumReducer(rank, plan.mesh.world_size, "cpu", plan.mesh.is_counted(rank))
        whole, _ = reducer.start(sums).read()
        told["steps"].append({**whole, "norm": float(norm)})
    told["weights"] = copies(engine)
    told["read"] = by_tokens(engine.infer(batches, read), batches)
    return told


def copies(engine: Any) -> dict[str, torch.Tensor]:
    """Every weight, whole."""
    return {name: tensor.detach().clone() for name, tensor in engine.whole_weights()}


def by_tokens(said: list[torch.Tensor], batches: list[Any]) -> dict[str, Any]:
    """What a model said of each row, by the row's tokens."""
    found = {}
    for values, batch in zip(said, batches, strict=True):
        rows = zip(values.tolist(), batch.input_ids_BT.tolist(), strict=True)
        for value, ids in rows:
            tokens = " ".join(map(str, ids))
            found[tokens.rstrip(" 0")] = value
    return found


def main(paths: list[str]) -> None:
    for plan, rank, folder in each_plan(paths):
        torch.save(look(plan, rank), folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
