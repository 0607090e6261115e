"""Numbers that models give for episodes: log-probabilities, values and scores of their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drumline.data.batches import EpisodeBatch, Episodes, TokenIds, collate_episodes
from drumline.data.order import assign_samples
from drumline.dist.copies import copy_to_device
from drumline.dist.reduce import add_up
from drumline.engine.engine import Engine
from drumline.plan.plan import Plan

# Reads numbers of all episodes of a rollout from one model.
ReadEpisodes = Callable[[Episodes], torch.Tensor]
# Reads numbers, fp32[K, B, T], from a model's outputs and the micro-batch that they are of.
ReadOutputs = Callable[[Any, EpisodeBatch], torch.Tensor]


@dataclass(frozen=True)
class EpisodeReader:
    """Runs models over the episodes of a rollout, and cuts episodes into micro-batches of this rank."""

    plan: Plan
    data_rank: int
    # Whether this rank's values count. Of the ranks that have the same samples exactly one counts.
    counts: bool
    device: str
    # The id of the padding token.
    pad: int
    # Tokens of every row; None: those of the longest row.
    width: int | None

    def micro_batches(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[EpisodeBatch], int]:
        """Return this rank's micro-batches of some episodes, and the number of their tokens.

        Args:
            episodes: All episodes of the rollout.
            picks: Which of them form the global batch; -1: a filler.
            accumulation: Micro-batches of a rank.
            micro_batch: Episodes of a micro-batch.
        """
        dealt, tokens = self._deal(episodes, picks, accumulation, micro_batch)
        return [self._collate(episodes, rows) for rows in dealt], tokens

    def _deal(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[list[int]], int]:
        """Return the episodes of each of this rank's micro-batches, and the number of their tokens.

        Every rank computes the same assignment. Episodes of one prompt stay together, so that the
        prompt is computed once (`SharedPrompts`), in parts of which whole micro-batches can be made.
        """
        by_prompt: dict[bytes, list[int]] = {}
        for pick in picks:
            prompt = b""
            if pick >= 0:
                prompt = episodes.prompts[pick].tobytes()
            by_prompt.setdefault(prompt, []).append(pick)
        # The largest part that both the groups and the micro-batches are whole multiples of. If it
        # is 1, every episode goes by itself.
        size = math.gcd(micro_batch, *map(len, by_prompt.values()))
        parts = []
        for picks_of_prompt in by_prompt.values():
            parts.append(np.asarray(picks_of_prompt).reshape(-1, size))
        parts_PG = np.concatenate(parts)
        # A filler has no tokens. Its index is replaced, since -1 would read the last episode.
        is_filler_PG = parts_PG < 0
        lengths_PG = np.where(is_filler_PG, 0, episodes.lengths[np.maximum(parts_PG, 0)])
        lengths_P = lengths_PG.sum(1)
        parts_of_micro_batch = micro_batch // size
        data_ranks = self.plan.mesh.data_ranks
        assigned = assign_samples(lengths_P, data_ranks, accumulation, parts_of_micro_batch)
        own = assigned[self.data_rank]
        micro_batches = parts_PG[own].reshape(accumulation, micro_batch)
        return micro_batches.tolist(), int(lengths_P[own].sum())

    def _collate(self, episodes: Episodes, rows: list[int]) -> EpisodeBatch:
        """Return a micro-batch of the episodes `rows`, on this rank's device."""
        batch = collate_episodes(episodes, rows, self.pad, self.width)
        return batch.to(self.device)

    def read(
        self, engine: Engine, episodes: Episodes, read: ReadOutputs, adapter: bool = True
    ) -> torch.Tensor:
        """Return K numbers for each token of each completion: fp32[K, N, M] on the host. Collective.

        N are the episodes and M the tokens of the longest completion; entries without a token are 0.

        Args:
            engine: Of the model.
            episodes: All episodes of the rollout.
            read: Returns fp32[K, B, T] of the model's outputs and a batch.
            adapter: Whether the model's adapter is on.
        """
        micro_batch = self.plan.batch.eval_micro_batch
        stages = self.plan.mesh.pp
        # The stages of a pipeline work on several micro-batches at the same time. All ranks bring as many.
        round_size = self.plan.mesh.data_ranks * micro_batch * stages
        number = len(episodes)
        rounds = math.ceil(number / round_size)
        fillers = rounds * round_size - number
        picks = [*range(number), *[-1] * fillers]
        dealt, _ = self._deal(episodes, picks, rounds * stages, micro_batch)
        batches = (self._collate(episodes, rows) for rows in dealt)
        read_values = engine.infer(batches, read, adapter)
        kinds = read_values[0].shape[0]
        values_KNM = torch.zeros(kinds, *episodes.mask_NM.shape)
        if self.counts:
            for rows, on_device_KBT in zip(dealt, read_values, strict=True):
                values_KBT = on_device_KBT.float().cpu()
                _copy_completions(values_KNM, episodes, rows, values_KBT)
        # Each episode has its values on one rank and zeros on all others, so the sum is exact.
        return add_up(copy_to_device(self.device, values_KNM)).cpu()


def _copy_completions(
    values_KNM: torch.Tensor, episodes: Episodes, rows: list[int], values_KBT: torch.Tensor
) -> None:
    """Copy the values of a micro-batch's completions to their episodes.

    Args:
        values_KNM: Is written to.
        episodes: All episodes of the rollout.
        rows: The episode of each row, -1 for a filler.
        values_KBT: Of the micro-batch. The prompts stand before the completions.
    """
    for row, pick in enumerate(rows):
        if pick < 0:
            continue
        # A token's value stands at the token before it, whose output predicts it.
        start = len(episodes.prompts[pick]) - 1
        length = len(episodes.completions[pick])
        values_KNM[:, pick, :length] = values_KBT[:, row, start : start + length]


def log_probs_of(chunk: int, temperature: float, values: bool = False) -> ReadOutputs:
    """Return a function that reads the log-probs of tokens, fp32[1, B, T].

    Args:
        chunk: Tokens whose logits exist at once, to limit memory.
        temperature: That the logits are divided by.
        values: Whether it also reads the values of a head on the same model, fp32[2, B, T].
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
    scores: ReadEpisodes,
    tail: Sequence[int],
    width: int | None,
    episodes: Episodes,
) -> torch.Tensor:
    """Return the score after the last token of each episode, fp32[N]; NaN for one without tokens.

    A reward model is trained on whole conversations, so a completion that ended gets the rest of
    `tail`. It is left out if the row would be longer than `width`.

    Args:
        scores: Returns the score after each token, fp32[1, N, M].
        tail: The tokens that the chat template writes from the end of an answer on.
        width: The most tokens of a row; None: no limit.
        episodes: All episodes of the rollout.
    """
    completions = []
    for prompt, completion in zip(episodes.prompts, episodes.completions, strict=True):
        completions.append(_with_tail(prompt, completion, tail, width))
    episodes = Episodes.start(episodes.prompts, completions, episodes.ended_N.tolist())
    lengths_N = episodes.mask_NM.sum(1)
    # An empty completion reads any place; its score is replaced below.
    last_N1 = (lengths_N - 1).clamp(min=0)[:, None]
    scores_NM = scores(episodes)[0]
    scores_N = scores_NM.gather(1, last_N1).squeeze(1)
    return torch.where(lengths_N > 0, scores_N, torch.nan)


def _with_tail(
    prompt: TokenIds, completion: TokenIds, tail: Sequence[int], width: int | None
) -> TokenIds:
    """Return the completion, followed by the rest of `tail` if it ends with `tail`'s first token."""
    # The last token of a row is only predicted, so it takes no place.
    row_length = len(prompt) + len(completion) + len(tail) - 1
    has_room = width is None or row_length <= width
    if not has_room or not len(completion) or not len(tail):
        return completion
    # One that was cut goes on in the middle of a sentence, and no tail may follow.
    has_ended = completion[-1] == tail[0]
    if not has_ended:
        return completion
    rest = np.asarray(tail[1:], completion.dtype)
    return np.concatenate([completion, rest])


@dataclass(frozen=True)
class ModelReaders:
    """Functions that read numbers of a rollout's episodes from each model; None if none is needed."""

    # Log-probs, and values if the policy has a value head: fp32[1 or 2, N, M].
    policy: ReadEpisodes | None
    # Log-probs fp32[1, N, M].
    reference: ReadEpisodes | None = None
    # Values of a separate value model, fp32[1, N, M].
    value: ReadEpisodes | None = None
    # Name of a reward → scores fp32[N].
    rewards: Mapping[str, ReadEpisodes] = field(default_factory=dict)
