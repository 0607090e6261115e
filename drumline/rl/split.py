"""Requests and episodes of a rollout, dealt over all ranks; their completions and scores come back to all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from drumline.dist.reduce import from_all
from drumline.rl.generate import Generator
from drumline.rl.rewards import Item, Rewards, Scored
from drumline.rl.sampling import Completion, Request


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


def generate_together(generator: Generator, requests: list[Request], step: int) -> list[Completion]:
    """Completions of all requests, in their order, on every rank: each rank samples its share. Collective over all ranks of the run, those
    that share samples too. `requests` are the same on all ranks."""
    rank, ranks = _place()
    shares = deal(requests, ranks)
    found: dict[int, Completion] = {}
    for share, made in zip(shares, from_all(generator.generate([requests[i] for i in shares[rank]], step)), strict=True):
        found |= zip(share, made, strict=True)
    return [found[index] for index in range(len(requests))]


def score_together(rewards: Rewards, items: Sequence[Item], given: Mapping[str, Sequence[float]]) -> list[Scored]:
    """What each item is worth, in their order, on every rank: each is scored once in the world. Collective as `generate_together` is.
    `items` and `given` (see Rewards.score) are the same on all ranks."""
    rank, ranks = _place()
    of_ranks = from_all(rewards.score(items[rank::ranks], {name: values[rank::ranks] for name, values in given.items()}))
    return [of_ranks[index % ranks][index // ranks] for index in range(len(items))]


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
