"""Sampling a rollout on all ranks: each takes a share of the requests, and all get every completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drumline.data.stream import assign
from drumline.dist.reduce import union
from drumline.rollout.generate import Generator
from drumline.rollout.sampling import Completion, Request


@dataclass(frozen=True)
class Sampling:
    """`generators`: makes what samples, greedily or not, with the weights as they are now. Collective."""

    generators: Callable[[bool], Generator]
    rank: int
    world_size: int
    device: str
    longest: int  # max_new_tokens

    def sample(self, requests: list[Request], step: int, greedy: bool = False) -> list[Completion]:
        """A completion of each request, in their order, the same on every rank. Collective."""
        generator = self.generators(greedy)
        mine = self._share(requests)
        said = generator.generate([requests[index] for index in mine], step)
        tokens = torch.zeros(len(requests), self.longest + 2, dtype=torch.int64)
        log_probs = torch.zeros(len(requests), self.longest)
        for index, completion in zip(mine, said, strict=True):
            size = len(completion.tokens)
            tokens[index, : size + 2] = torch.tensor([size, int(completion.ended), *completion.tokens])
            log_probs[index, :size] = torch.tensor(completion.log_probs)
        tokens, log_probs = union(tokens, self.device), union(log_probs, self.device)
        return [
            Completion(row[2 : 2 + row[0]], numbers[: row[0]], bool(row[1]))
            for row, numbers in zip(tokens.tolist(), log_probs.tolist(), strict=True)
        ]

    def _share(self, requests: list[Request]) -> list[int]:
        """Numbers of this rank's requests: as many tokens of prompts for each rank as can be."""
        places = -(-len(requests) // self.world_size)
        lengths = np.zeros(places * self.world_size, np.int64)
        lengths[: len(requests)] = [len(request.tokens) for request in requests]
        mine = assign(lengths, self.world_size, 1, places)[self.rank, 0]
        return [index for index in mine.tolist() if index < len(requests)]


def as_array(tokens: list[int]) -> Any:
    return np.asarray(tokens, np.int64)
