"""What models give for episodes: log-probabilities, values and scores, at the tokens of their completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drumline.core.plan import Plan
from drumline.data.batches import EpisodeBatch, Episodes, Tokens, collate_episodes
from drumline.data.stream import assign
from drumline.dist.copies import copied_to
from drumline.dist.reduce import add_up
from drumline.parallel.engine import Engine

Score = Callable[[Episodes], torch.Tensor]
Read = Callable[[Any, EpisodeBatch], torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How episodes are cut into micro-batches on this rank. `width`: tokens of all rows; None: as many as the longest row has.
    `counts`: of the ranks that share samples, this is the one whose values are added up."""

    plan: Plan
    data_rank: int
    counts: bool
    device: str
    pad: int
    width: int | None

    def micro_batches(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[EpisodeBatch], int]:
        """This rank's part of the episodes `picks` (-1: fillers), and its tokens. The same dealing on every rank."""
        dealt, lengths = self._deal(episodes, picks, accumulation, micro_batch)
        return [self._collate(episodes, rows) for rows in dealt], int(lengths)

    def _deal(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[list[int]], int]:
        """Episodes of one prompt go together, as far as whole micro-batches are made of such parts: they run it once (`SharedPrompts`)."""
        of_prompt: dict[bytes, list[int]] = {}
        for pick in picks:
            of_prompt.setdefault(episodes.prompts[pick].tobytes() if pick >= 0 else b"", []).append(
                pick
            )
        size = math.gcd(micro_batch, *map(len, of_prompt.values()))
        chosen = np.concatenate([np.asarray(each).reshape(-1, size) for each in of_prompt.values()])
        lengths = np.where(chosen >= 0, episodes.lengths[np.maximum(chosen, 0)], 0).sum(1)
        mine = assign(lengths, self.plan.mesh.data_ranks, accumulation, micro_batch // size)[
            self.data_rank
        ]
        return chosen[mine].reshape(accumulation, micro_batch).tolist(), int(lengths[mine].sum())

    def _collate(self, episodes: Episodes, rows: list[int]) -> EpisodeBatch:
        return collate_episodes(episodes, rows, self.pad, self.width).to(self.device)

    def read(
        self, engine: Engine, episodes: Episodes, read: Read, adapter: bool = True
    ) -> torch.Tensor:
        """`read(outputs, batch)`, fp32[K, B, T], of all episodes at the tokens of their completions: fp32[K, N, M] on the host, 0
        elsewhere. Collective."""
        micro = self.plan.batch.eval_micro_batch
        # Stages of a pipeline work side by side on several micro-batches; all ranks come with as many.
        at_once = self.plan.mesh.data_ranks * micro * self.plan.mesh.pp
        rounds = -(-len(episodes) // at_once)
        picks = [*range(len(episodes)), *[-1] * (rounds * at_once - len(episodes))]
        dealt, _ = self._deal(episodes, picks, rounds * self.plan.mesh.pp, micro)
        found = engine.infer((self._collate(episodes, rows) for rows in dealt), read, adapter)
        whole = torch.zeros(found[0].shape[0], *episodes.mask_NM.shape)
        if self.counts:
            for rows, on_device_KBT in zip(dealt, found, strict=True):
                values_KBT = on_device_KBT.float().cpu()
                for row, pick in enumerate(rows):
                    if pick >= 0:
                        start = len(episodes.prompts[pick]) - 1
                        size = len(episodes.completions[pick])
                        whole[:, pick, :size] = values_KBT[:, row, start : start + size]
        return add_up(copied_to(self.device, whole)).cpu()


def log_probs_of(chunk: int, temperature: float, values: bool = False) -> Read:
    """Reads log-probs, [1, B, T], and after them the values of a head on the same model, [2, B, T]."""

    def read(outputs: Any, batch: EpisodeBatch) -> torch.Tensor:
        read_values = [outputs.log_probs(batch.targets_BT, chunk, temperature)[0]]
        return torch.stack([*read_values, outputs.values()] if values else read_values)

    return read


def values_of(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Reads the values of a model with a score head, [1, B, T]."""
    return outputs.values()[None]


def scores_after(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Reads the scores of a reward model after each token, at the place where the token is predicted, [1, B, T]."""
    return outputs.values().roll(-1, dims=1)[None]


def last_scores(
    scores: Callable[[Episodes], torch.Tensor],
    tail: Sequence[int],
    width: int | None,
    episodes: Episodes,
) -> torch.Tensor:
    """fp32[N]: the score after the last token of each episode; NaN for one without tokens. `tail`: what the chat template writes from the
    end of an answer on. A reward model is trained on whole conversations, so an episode that ended gets the rest of it, where `width`
    has room."""
    episodes = Episodes.start(
        episodes.prompts, [*_closed(episodes, tail, width)], episodes.ended_N.tolist()
    )
    lengths_N = episodes.mask_NM.sum(1)
    scores_N = scores(episodes)[0].gather(1, (lengths_N - 1).clamp(min=0)[:, None]).squeeze(1)
    return torch.where(lengths_N > 0, scores_N, torch.nan)


def _closed(episodes: Episodes, tail: Sequence[int], width: int | None) -> Iterator[Tokens]:
    for prompt, completion in zip(episodes.prompts, episodes.completions, strict=True):
        room = width is None or len(prompt) + len(completion) + len(tail) - 1 <= width
        ended = room and len(completion) and [*completion[-1:]] == [*tail[:1]]
        yield (
            np.concatenate([completion, np.asarray(tail[1:], completion.dtype)])
            if ended
            else completion
        )


@dataclass(frozen=True)
class Readers:
    """What models give for episodes, [N, M] of their tokens. `policy` (log-probs, and values where they are the policy's own:
    [1 or 2, N, M]); `reference` log-probs; `value` of a model of its own; `rewards`: name → fp32[N]. None: nothing needs it."""

    policy: Score | None
    reference: Score | None = None
    value: Score | None = None
    rewards: Mapping[str, Score] = field(default_factory=dict)
