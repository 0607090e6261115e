"""The engine: local SGD's, with a ring in the place of the mean over all ranks. Evaluation and checkpoints see that mean, as there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drumline.engine.native import prepare as prepare_native
from drumline.engine.strategies.local_sgd.engine import LocalEngine, in_pieces
from drumline.models.shards import Values
from drumline.plan.plan import Plan


def prepare(plan: Plan, model: nn.Module, values: Values, **options: Any) -> GossipEngine:
    return prepare_native(plan, model, values, GossipEngine, **options)


class GossipEngine(LocalEngine):
    def exchange(self) -> None:
        """x of rank r becomes the mean of its own and that of rank r + 1; the mean over all ranks stays what it is. Collective."""
        if self.ranks > 1:
            in_pieces(list(self.diverging_tensors.values()), self._with_neighbour)

    def _with_neighbour(self, mine: torch.Tensor) -> None:
        rank, theirs = dist.get_rank(), torch.empty_like(mine)
        before, behind = (rank - 1) % self.ranks, (rank + 1) % self.ranks
        sends = [dist.P2POp(dist.isend, mine, before), dist.P2POp(dist.irecv, theirs, behind)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        mine.add_(theirs).div_(2)
