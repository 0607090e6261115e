"""One rank of test_roles: `python -m tests.distributed.roles_worker PLAN...` writes RANK.pt into
each plan's run folder."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from tests.distributed.heads_worker import by_tokens
from tests.distributed.heads_worker import copies as weights
from tests.distributed.ranks import each_plan

RATE = 0.5


def each_row(outputs: Any, batch: Any) -> torch.Tensor:
    """−log p of each row's targets, fp32[B]."""
    sums = []
    for row in range(len(batch.targets_BT)):
        one = torch.full_like(batch.targets_BT, -100)
        one[row] = batch.targets_BT[row]
        sums.append(outputs.cross_entropy(one, 0)[0])
    return torch.stack(sums).float()


def answers(engine: Any, batches: list[Any], **options: Any) -> dict[str, float]:
    """What `infer` says, by the tokens of each row."""
    kept = engine.infer(batches, each_row, **options)
    assert list(map(len, kept)) == [len(batch.input_ids_BT) for batch in batches]
    return by_tokens(kept, batches)


def copies(engine: Any) -> dict[str, torch.Tensor]:
    """What this rank holds at the moment, tied weights under all their names."""
    parameters = engine.model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in parameters}


def train(engine: Any, plan: Any, batches: list[Any], objective: Any) -> float:
    """One step; its gradient norm."""
    from drumline.dist.reduce import sum_over_ranks

    (weight,) = sum_over_ranks([float(sum(b.weight for b in batches))], "cpu")
    shared = plan.mesh.world_size / plan.mesh.data_ranks  # so many ranks have each sample
    engine.forward_backward(batches, objective, weight / shared)
    norm = engine.grad_norm()
    engine.step(RATE, norm, torch.isfinite(norm))
    return float(norm)


def look(plan: Any, rank: int) -> dict[str, Any]:
    """A policy and a value that take a step together, and a reference that does not."""
    from drumline.algorithms.tokens.objective import NextToken
    from drumline.engine.build import build_engine
    from drumline.engine.norms import local
    from drumline.train.data_loaders import build_data_loaders
    from drumline.train.restore import MODEL

    data_loaders = build_data_loaders(plan, plan.mesh.data_rank(rank), 0, "cpu")
    batches = next(iter(data_loaders.training)).micro_batches
    objective = NextToken(32, True).objective
    both: Any = build_engine(plan, "cpu")
    policy = both.engines["policy"]
    value = both.engines["value"]
    reference = build_engine(plan, "cpu", role="reference")
    told: dict[str, Any] = {
        "first weights": weights(both),
        "before": answers(both, batches),
        "reference": answers(reference, batches),
    }
    told["norm"] = train(both, plan, batches, dict.fromkeys(both.engines, objective))
    if plan.data_parallel in ("local_sgd", "diloco"):
        told["copy"] = copies(policy)
    told["after"] = answers(both, batches)
    told["without"] = answers(both, batches, adapter=False)
    told["value"] = answers(value, batches)
    told["modes"] = [engine.model.training for engine in (policy, value, reference)]
    told["weights"] = weights(both)
    told["value weights"] = weights(value)
    told["reference weights"] = weights(reference)
    told["live"] = [engine.unsharded_model() is not None for engine in (both, value, reference)]
    if "copy" in told:
        policy.forward_backward(batches, objective, 1.0)
        told["copy again"] = copies(policy)
    told["kept"] = {}
    for name, tensor in both.tensors().items():
        if re.search(MODEL, name):
            told["kept"][re.sub(MODEL, "", name)] = local(tensor).clone()
    return told


def main(paths: list[str]) -> None:
    for plan, rank, folder in each_plan(paths):
        torch.save(look(plan, rank), folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
