"""Who samples what: the requests of a rollout over all ranks, and their completions back on all of them."""

from __future__ import annotations

import heapq
from typing import Any

import torch
import torch.distributed as dist

from drumline.rollout.generate import Generator
from drumline.rollout.sampling import Completion, Request


def deal(requests: list[Request], ranks: int) -> list[list[int]]:
    """Which requests each rank takes: indices, each in exactly one list; the same on every rank that computes it.

    From the longest prompt down, a request goes to the rank with the fewest prompt tokens so far (longest processing first, Graham 1969:
    within 4/3 of the best balance), and of such ranks to the one with the fewest requests: equal prompts are dealt round.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens)):
        tokens, count, rank = lightest[0]
        shares[rank].append(index)
        heapq.heapreplace(lightest, (tokens + len(requests[index].tokens), count + 1, rank))
    return shares


def generate_together(generator: Generator, requests: list[Request], step: int, device: str = "cpu") -> list[Completion]:
    """Completions of all requests, in their order, on every rank: each rank samples its share. Collective over all ranks of the run, those
    that share samples too. `requests` are the same on all ranks. `device`: of the tensors that are gathered."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return generator.generate(requests, step)
    shares = deal(requests, dist.get_world_size())
    mine = generator.generate([requests[i] for i in shares[dist.get_rank()]], step)
    return gather(mine, shares, device)


def gather(mine: list[Completion], shares: list[list[int]], device: str = "cpu", group: Any = None) -> list[Completion]:
    """All ranks' completions in the order of the requests; `mine` are those of `shares[rank]`. Collective over `group`.

    Three tensors go round: the lengths, the tokens in one row, their log-probs in one; each padded to the longest rank's. An ended
    completion has its length as a negative number.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    assert len(shares) == world and len(mine) == len(shares[rank]), "each rank brings what it was dealt"
    assert all(c.tokens and len(c.tokens) == len(c.log_probs) for c in mine), "a completion has a token at least"
    signed = torch.tensor([-len(c.tokens) if c.ended else len(c.tokens) for c in mine], dtype=torch.int64)
    lengths_RN = _all_gather(signed, max(len(share) for share in shares), device, group)
    width = int(lengths_RN.abs().sum(1).max())
    tokens_RT = _all_gather(torch.tensor([t for c in mine for t in c.tokens], dtype=torch.int64), width, device, group)
    log_probs_RT = _all_gather(torch.tensor([p for c in mine for p in c.log_probs], dtype=torch.float32), width, device, group)
    found: dict[int, Completion] = {}
    for share, signs, tokens, log_probs in zip(shares, lengths_RN.tolist(), tokens_RT.tolist(), log_probs_RT.tolist(), strict=True):
        start = 0
        for index, sign in zip(share, signs, strict=False):  # the rest is padding
            stop = start + abs(sign)
            found[index] = Completion(tokens[start:stop], log_probs[start:stop], ended=sign < 0)
            start = stop
    return [found[index] for index in range(len(found))]


def _all_gather(row: torch.Tensor, width: int, device: str, group: Any) -> torch.Tensor:
    """[ranks, width] of one padded row a rank, on the host."""
    padded = torch.zeros(width, dtype=row.dtype)
    padded[: len(row)] = row
    world = dist.get_world_size(group)
    whole = torch.empty(world * width, dtype=row.dtype, device=device)
    dist.all_gather_into_tensor(whole, padded.to(device), group=group)
    return whole.view(world, width).cpu()
