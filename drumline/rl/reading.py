"""Numbers that models give for episodes: log-probabilities, values and scores of completions' tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drumline.data.batches import EpisodeBatch, Episodes, Tokens, collate_episodes
from drumline.data.stream import assign
from drumline.dist.copies import copied_to
from drumline.dist.reduce import add_up
from drumline.engine.engine import Engine
from drumline.plan.plan import Plan

Score = Callable[[Episodes], torch.Tensor]
Read = Callable[[Any, EpisodeBatch], torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """Runs models over the episodes of a rollout, and cuts episodes into micro-batches of this rank.

    `counts`: whether this rank's values are added up; exactly one of the ranks that share samples is.
    `pad`: the id of the padding token. `width`: tokens of every row; None: those of the longest row.
    """

    plan: Plan
    data_rank: int
    counts: bool
    device: str
    pad: int
    width: int | None

    def micro_batches(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[EpisodeBatch], int]:
        """Return this rank's micro-batches of the episodes `picks` (-1: a filler), and its tokens."""
        dealt, tokens = self._deal(episodes, picks, accumulation, micro_batch)
        return [self._collate(episodes, rows) for rows in dealt], tokens

    def _deal(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[list[int]], int]:
        """Return the episodes of each of this rank's micro-batches, and the number of their tokens.

        Every rank computes the same assignment. Episodes of one prompt stay together as far as whole
        micro-batches can be made of such parts, because they compute the prompt once (`SharedPrompts`).
        """
        by_prompt: dict[bytes, list[int]] = {}
        for pick in picks:
            prompt = episodes.prompts[pick].tobytes() if pick >= 0 else b""
            by_prompt.setdefault(prompt, []).append(pick)
        size = math.gcd(micro_batch, *map(len, by_prompt.values()))
        parts_PG = np.concatenate([np.asarray(p).reshape(-1, size) for p in by_prompt.values()])
        is_filler_PG = parts_PG < 0
        lengths_PG = np.where(is_filler_PG, 0, episodes.lengths[np.maximum(parts_PG, 0)])
        lengths_P = lengths_PG.sum(1)
        assigned = assign(lengths_P, self.plan.mesh.data_ranks, accumulation, micro_batch // size)
        own = assigned[self.data_rank]
        micro_batches = parts_PG[own].reshape(accumulation, micro_batch)
        return micro_batches.tolist(), int(lengths_P[own].sum())

    def _collate(self, episodes: Episodes, rows: list[int]) -> EpisodeBatch:
        return collate_episodes(episodes, rows, self.pad, self.width).to(self.device)

    def read(
        self, engine: Engine, episodes: Episodes, read: Read, adapter: bool = True
    ) -> torch.Tensor:
        """Return K numbers for each token of each completion: fp32[K, N, M] on the host. Collective.

        `read` gives fp32[K, B, T] of the model's outputs and a batch. The result is 0 where an episode
        has no token. `adapter`: whether the model's adapter is on.
        """
        micro_batch = self.plan.batch.eval_micro_batch
        stages = self.plan.mesh.pp
        # The stages of a pipeline work on several micro-batches at the same time. All ranks bring as many.
        round_size = self.plan.mesh.data_ranks * micro_batch * stages
        rounds = math.ceil(len(episodes) / round_size)
        fillers = rounds * round_size - len(episodes)
        picks = [*range(len(episodes)), *[-1] * fillers]
        dealt, _ = self._deal(episodes, picks, rounds * stages, micro_batch)
        batches = (self._collate(episodes, rows) for rows in dealt)
        read_values = engine.infer(batches, read, adapter)
        values_KNM = torch.zeros(read_values[0].shape[0], *episodes.mask_NM.shape)
        if self.counts:
            for rows, on_device_KBT in zip(dealt, read_values, strict=True):
                _copy_completions(values_KNM, episodes, rows, on_device_KBT.float().cpu())
        return add_up(copied_to(self.device, values_KNM)).cpu()


def _copy_completions(
    values_KNM: torch.Tensor, episodes: Episodes, rows: list[int], values_KBT: torch.Tensor
) -> None:
    """Copy the values of a micro-batch's completions to their episodes in `values_KNM`.

    `rows`: the episode of each row, -1 for a filler. A token's value stands where the token is
    predicted, one place before it.
    """
    for row, pick in enumerate(rows):
        if pick < 0:
            continue
        start = len(episodes.prompts[pick]) - 1
        length = len(episodes.completions[pick])
        values_KNM[:, pick, :length] = values_KBT[:, row, start : start + length]


def log_probs_of(chunk: int, temperature: float, values: bool = False) -> Read:
    """Return what reads the log-probs of tokens, [1, B, T].

    With `values` it also reads the values of a head on the same model, [2, B, T].
    `chunk`: tokens whose logits exist at once.
    """

    def read(outputs: Any, batch: EpisodeBatch) -> torch.Tensor:
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, chunk, temperature)
        read_values = [log_probs_BT]
        if values:
            read_values.append(outputs.values())
        return torch.stack(read_values)

    return read


def values_of(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Return the values of a model with a score head, [1, B, T]."""
    return outputs.values()[None]


def scores_after(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Return a reward model's score after each token, where the token is predicted, [1, B, T]."""
    return outputs.values().roll(-1, dims=1)[None]


def last_scores(
    scores: Score,
    tail: Sequence[int],
    width: int | None,
    episodes: Episodes,
) -> torch.Tensor:
    """Return the score after the last token of each episode, fp32[N]; NaN for one without tokens.

    A reward model is trained on whole conversations, so a completion that ended gets the rest of
    `tail`, the tokens that the chat template writes from the end of an answer on. It is left out if the
    row would be longer than `width`.
    """
    completions = []
    for prompt, completion in zip(episodes.prompts, episodes.completions, strict=True):
        completions.append(_with_tail(prompt, completion, tail, width))
    episodes = Episodes.start(episodes.prompts, completions, episodes.ended_N.tolist())
    lengths_N = episodes.mask_NM.sum(1)
    last_N1 = (lengths_N - 1).clamp(min=0)[:, None]
    scores_N = scores(episodes)[0].gather(1, last_N1).squeeze(1)
    return torch.where(lengths_N > 0, scores_N, torch.nan)


def _with_tail(
    prompt: Tokens, completion: Tokens, tail: Sequence[int], width: int | None
) -> Tokens:
    """Return the completion, followed by the rest of `tail` if it ends with `tail`'s first token."""
    # The last token of a row is only predicted, so it takes no place.
    row_length = len(prompt) + len(completion) + len(tail) - 1
    has_room = width is None or row_length <= width
    if not has_room or not len(completion) or not len(tail) or completion[-1] != tail[0]:
        return completion
    rest = np.asarray(tail[1:], completion.dtype)
    return np.concatenate([completion, rest])


@dataclass(frozen=True)
class Readers:
    """What reads numbers of a rollout's episodes from each model; None if nothing needs them.

    `policy` gives log-probs, and values if the policy has a value head: [1 or 2, N, M].
    `reference` gives log-probs [1, N, M]; `value` those of a separate value model [1, N, M].
    `rewards`: name of a reward → scores fp32[N].
    """

    policy: Score | None
    reference: Score | None = None
    value: Score | None = None
    rewards: Mapping[str, Score] = field(default_factory=dict)
