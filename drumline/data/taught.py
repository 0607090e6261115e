"""Micro-batches of text beside which stand a teacher's distributions at the learned tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from drumline.data.batches import (
    EpisodeBatch,
    Episodes,
    TokenBatch,
    collate,
    collate_episodes,
    read_segments,
)
from drumline.data.cache import TokenCache
from drumline.models.choices import Choices
from drumline.models.load import load_config
from drumline.models.losses import LinearHead
from drumline.models.teaching import Teacher, TeacherStates
from drumline.plan.plan import Plan


@dataclass(frozen=True)
class TaughtBatch(TokenBatch):
    """A TokenBatch with what a teacher says of its targets.

    Attributes:
        samples: the number of each row's sample in its cache, or of its episode in the rollout; -1
            for a filler.
        teacher: the teacher's distributions at the batch's M targets, in their order; None until
            they are known.
    """

    samples: tuple[int, ...] = field(default=(), kw_only=True)
    teacher: Teacher | None = field(default=None, kw_only=True)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed = super().each(change)
        if self.teacher is None:
            return changed
        return replace(changed, teacher=self.teacher.each(change))


@dataclass(frozen=True)
class TaughtEpisodeBatch(EpisodeBatch, TaughtBatch):
    """An EpisodeBatch with what a teacher says of the tokens of its completions."""


def collate_taught_episodes(
    episodes: Episodes, picks: Sequence[int], pad_id: int, width: int | None
) -> TaughtEpisodeBatch:
    """Return a batch of some episodes; arguments as those of `collate_episodes`."""
    batch = collate_episodes(episodes, picks, pad_id, width)
    return TaughtEpisodeBatch(**vars(batch), samples=tuple(int(pick) for pick in picks))


def collate_taught(
    cache: TokenCache, samples: Sequence[int], pad_id: int, width: int | None
) -> TaughtBatch:
    """Return the texts of `samples` in a cache (-1: a filler); arguments as those of `collate`."""
    batch = collate(read_segments(cache, samples), pad_id, width)
    return TaughtBatch(**vars(batch), samples=tuple(int(sample) for sample in samples))


def placeholder_teacher(batch: TokenBatch, plan: Plan) -> Teacher:
    """Return a teacher's numbers of the right sizes for a batch, to measure memory with.

    They are 0. `plan`: whose algorithm has a teacher.
    """
    teaching = plan.config.algorithm.teaching
    assert teaching is not None, "only algorithms with a teacher have taught batches"
    assert batch.learned_on_host_M is not None, "the host has counted the targets"
    tokens = len(batch.learned_on_host_M)
    if teaching.top_k:
        ids_MK = torch.arange(teaching.top_k).expand(tokens, -1)
        return Choices(ids_MK, torch.zeros(tokens, teaching.top_k + 1))
    model_path = plan.model_path
    model = plan.config.model
    if not teaching.is_own_teacher:
        role = plan.roles["teacher"]
        model_path = role.model_path
        model = role.model
    config = load_config(model_path, model).get_text_config()
    head = LinearHead(torch.zeros(config.vocab_size, config.hidden_size))
    return TeacherStates(torch.zeros(tokens, config.hidden_size), head)
