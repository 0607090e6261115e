"""Run models over the episodes of a rollout, for log-probabilities, values and scores of their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from drumline.algorithms.base import Algorithm
from drumline.data.batches import EpisodeBatch, Episodes, TokenIds, collate_episodes
from drumline.data.order import assign_samples
from drumline.dist.copies import copy_to_device
from drumline.dist.reduce import SumReducer, add_up
from drumline.engine.engine import Engine
from drumline.plan.plan import Plan

Ints = npt.NDArray[np.int64]
# Runs one model over all episodes of a rollout and returns numbers of their tokens, fp32[K, N, M], or of
# the episodes themselves, fp32[N].
ReadEpisodes = Callable[[Episodes], torch.Tensor]
# Returns a batch. Arguments: all episodes, the indices of those of the batch, the padding token, and
# tokens of a row or None, see `collate_episodes`.
CollateEpisodes = Callable[[Episodes, list[int], int, int | None], EpisodeBatch]
# Returns K numbers of each token, fp32[K, B, T]. Arguments: a model's outputs, and the micro-batch that
# it computed them for.
ReadOutputs = Callable[[Any, EpisodeBatch], torch.Tensor]


class Background(Protocol):
    """What goes on while models read, and is attended to between their micro-batches."""

    @property
    def is_loading(self) -> bool:
        """Whether weights are on their way to servers. It is the same on all ranks."""
        ...

    def start_next_if_free(self) -> None:
        """Start to sample if the weights have arrived. Collective; it does not wait."""
        ...


@dataclass(frozen=True)
class EpisodeReader:
    """Divides the episodes of a rollout into micro-batches of this rank, and runs models over them."""

    plan: Plan
    data_rank: int
    # Whether this rank's values count. Of the ranks that have the same samples, exactly one counts.
    counts: bool
    device: str
    # The id of the padding token.
    pad: int
    # Number of tokens of every row, padding included; None: that of the longest row of a batch.
    width: int | None
    # Makes a batch of some episodes; for a vision-language model it has their images.
    collate: CollateEpisodes = collate_episodes
    # Attended to by `read`; None: nothing goes on.
    background: Background | None = None

    def micro_batches(
        self, episodes: Episodes, picks: list[int], accumulation: int, micro_batch: int
    ) -> tuple[list[EpisodeBatch], int]:
        """Return this rank's micro-batches of some samples, and the number of their tokens.

        Args:
            episodes: All episodes of the rollout.
            picks: The indices of the samples that form the global batch; -1: a filler.
            accumulation: Number of micro-batches of a rank.
            micro_batch: Number of samples of a micro-batch.
        """
        rows_SR = rows_of_samples(episodes, self.plan.batch.rows_per_sample)
        assigned, tokens = self._assign(episodes, rows_SR, picks, accumulation, micro_batch)
        return [self._collate(episodes, rows) for rows in assigned], tokens

    def _assign(
        self,
        episodes: Episodes,
        rows_SR: Ints,
        picks: list[int],
        accumulation: int,
        micro_batch: int,
    ) -> tuple[list[list[int]], int]:
        """Return the episodes of each of this rank's micro-batches, and the number of their tokens.

        Every rank computes the same assignment. Samples of one prompt are assigned in parts of equal
        size, of which a micro-batch has a whole number. A part stays together, so that its prompt is
        computed once (`SharedPrompts`). A micro-batch has first the first rows of all its samples, then
        the second ones.

        `rows_SR`: see `rows_of_samples`. The other arguments are those of `micro_batches`.
        """
        by_prompt: dict[bytes, list[int]] = {}
        for pick in picks:
            prompt_bytes = b""
            if pick >= 0:
                prompt_bytes = episodes.prompts[rows_SR[pick, 0]].tobytes()
            by_prompt.setdefault(prompt_bytes, []).append(pick)
        # The largest size that divides all groups and the micro-batch. If it is 1, every sample is
        # assigned by itself.
        size = math.gcd(micro_batch, *map(len, by_prompt.values()))
        parts = []
        for picks_of_prompt in by_prompt.values():
            parts.append(np.asarray(picks_of_prompt).reshape(-1, size))
        parts_PG = np.concatenate(parts)
        # A filler has no tokens. Its index -1 is replaced before it would read the last sample.
        is_filler_PG = parts_PG < 0
        lengths_S = episodes.lengths[rows_SR].sum(1)
        lengths_PG = np.where(is_filler_PG, 0, lengths_S[np.maximum(parts_PG, 0)])
        lengths_P = lengths_PG.sum(1)
        parts_of_micro_batch = micro_batch // size
        data_ranks = self.plan.mesh.data_ranks
        parts_of_ranks = assign_samples(lengths_P, data_ranks, accumulation, parts_of_micro_batch)
        own = parts_of_ranks[self.data_rank]
        samples_AM = parts_PG[own].reshape(accumulation, micro_batch)
        # The rows of a filler are fillers.
        is_filler_AM1 = samples_AM[:, :, None] < 0
        rows_AMR = np.where(is_filler_AM1, -1, rows_SR[np.maximum(samples_AM, 0)])
        rows_of_micro_batches = rows_AMR.swapaxes(1, 2).reshape(accumulation, -1)
        return rows_of_micro_batches.tolist(), int(lengths_P[own].sum())

    def _assign_all(self, episodes: Episodes) -> list[list[int]]:
        """Return the episodes of each micro-batch with which this rank reads all of them; -1: a filler.

        Each stage of a pipeline works on a micro-batch of its own at the same time, so the number of
        micro-batches of a rank is a multiple of the number of stages, the same on all ranks.
        """
        micro_batch = self.plan.batch.eval_micro_batch
        stages = self.plan.mesh.pp
        round_size = self.plan.mesh.data_ranks * micro_batch * stages
        number = len(episodes)
        rounds = math.ceil(number / round_size)
        fillers = rounds * round_size - number
        picks = [*range(number), *[-1] * fillers]
        # Models read each episode by itself.
        rows_N1 = rows_of_samples(episodes, 1)
        assigned, _ = self._assign(episodes, rows_N1, picks, rounds * stages, micro_batch)
        return assigned

    def rounds(self, episodes: Episodes) -> Iterator[list[EpisodeBatch]]:
        """Yield this rank's micro-batches of all episodes, one at a time for each pipeline stage.

        All ranks have equally many rounds.
        """
        assigned = self._assign_all(episodes)
        stages = self.plan.mesh.pp
        for first in range(0, len(assigned), stages):
            yield [self._collate(episodes, rows) for rows in assigned[first : first + stages]]

    def _collate(self, episodes: Episodes, rows: list[int]) -> EpisodeBatch:
        """Return a micro-batch of the episodes `rows`, on this rank's device."""
        batch = self.collate(episodes, rows, self.pad, self.width)
        return batch.to(self.device)

    def read(
        self, engine: Engine, episodes: Episodes, read: ReadOutputs, adapter: bool = True
    ) -> torch.Tensor:
        """Return K numbers for each token of each completion: fp32[K, N, M] on the host. Collective.

        N is the number of episodes and M that of tokens of the longest completion. Entries without a
        token are 0.

        Args:
            engine: The engine of the model.
            episodes: All episodes of the rollout.
            read: Returns the K numbers of a micro-batch, fp32[K, B, T].
            adapter: Whether the model's adapter is switched on.
        """
        assigned = self._assign_all(episodes)
        values_of_batches: list[torch.Tensor] = []
        while len(values_of_batches) < len(assigned):
            left = assigned[len(values_of_batches) :]
            part = left[: self._micro_batches_at_once(left)]
            batches = (self._collate(episodes, rows) for rows in part)
            values_of_batches += engine.infer(batches, read, adapter)
            if self.background is not None:
                self.background.start_next_if_free()
        kinds = values_of_batches[0].shape[0]
        values_KNM = torch.zeros(kinds, *episodes.mask_NM.shape)
        if self.counts:
            for rows, on_device_KBT in zip(assigned, values_of_batches, strict=True):
                values_KBT = on_device_KBT.float().cpu()
                _copy_completions(values_KNM, episodes, rows, values_KBT)
        # Each episode has its values on one rank and zeros on all others, so the sum is exact.
        return add_up(copy_to_device(self.device, values_KNM)).cpu()

    def _micro_batches_at_once(self, left: list[list[int]]) -> int:
        """Return how many of the micro-batches that are left are read before the background is attended to.

        While servers load weights it is one for each stage of a pipeline, so that sampling starts soon after
        the weights have arrived. Else it is all of them.
        """
        if self.background is not None and self.background.is_loading:
            return self.plan.mesh.pp
        return len(left)


def rows_of_samples(episodes: Episodes, rows_per_sample: int) -> Ints:
    """Return the episodes of each sample of a rollout, int64[S, R].

    A sample is one episode, or R that the loss compares. Of S samples the sample s has the episodes s,
    S + s, 2S + s and so on, as `SamplingSpec.learned_episodes` orders them.
    """
    rows_RS = np.arange(len(episodes), dtype=np.int64).reshape(rows_per_sample, -1)
    return rows_RS.T


def _copy_completions(
    values_KNM: torch.Tensor, episodes: Episodes, rows: list[int], values_KBT: torch.Tensor
) -> None:
    """Copy the values of a micro-batch's completions to their episodes.

    Args:
        values_KNM: fp32, the values of all completions; they are written here.
        episodes: All episodes of the rollout.
        rows: The index of each row's episode, -1 for a filler.
        values_KBT: fp32, the values of the micro-batch, whose rows are prompt and completion.
    """
    for row, pick in enumerate(rows):
        if pick < 0:
            continue
        # A token's value is at the position before the token, whose output predicts it.
        start = len(episodes.prompts[pick]) - 1
        length = len(episodes.completions[pick])
        values_KNM[:, pick, :length] = values_KBT[:, row, start : start + length]


def log_prob_reader(chunk: int, temperature: float, values: bool = False) -> ReadOutputs:
    """Return a function that reads the log-probs of tokens, fp32[1, B, T].

    Args:
        chunk: Number of tokens whose logits exist at the same time, which limits memory.
        temperature: The logits are divided by it.
        values: Whether the function also reads the values of a head on the same model, as a second
            entry: fp32[2, B, T].
    """

    def read(outputs: Any, batch: EpisodeBatch) -> torch.Tensor:
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, chunk, temperature)
        numbers = [log_probs_BT]
        if values:
            numbers.append(outputs.values())
        return torch.stack(numbers)

    return read


def read_values(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Return the values of a model with a score head, fp32[1, B, T]."""
    return outputs.values()[None]


def read_scores(outputs: Any, _batch: EpisodeBatch) -> torch.Tensor:
    """Return a reward model's score after each token, fp32[1, B, T].

    It is shifted to the position before the token, as a log-prob is, since `_copy_completions` reads
    there. Rows have all tokens of a completion, its last one too, so no score is shifted round.
    """
    return outputs.values().roll(-1, dims=1)[None]


def last_scores(
    scores: ReadEpisodes,
    tail: Sequence[int],
    width: int | None,
    episodes: Episodes,
) -> torch.Tensor:
    """Return the score after the last token of each episode, fp32[N]; NaN for one without tokens.

    A reward model is trained on whole conversations, so the rest of `tail` is added to a completion that
    ended, unless the row would then be longer than `width`.

    Args:
        scores: Returns the score after each token, fp32[1, N, M].
        tail: The token that ends an answer in the chat template, and all tokens that the template
            writes after it.
        width: The most tokens of a row; None: no limit.
        episodes: All episodes of the rollout.
    """
    completions = []
    for prompt, completion in zip(episodes.prompts, episodes.completions, strict=True):
        completions.append(_append_tail(prompt, completion, tail, width))
    has_ended = episodes.ended_N.tolist()
    episodes = Episodes.start(episodes.prompts, completions, has_ended, episodes.images)
    lengths_N = episodes.mask_NM.sum(1)
    # An empty completion reads index 0; its score is replaced below.
    last_N1 = (lengths_N - 1).clamp(min=0)[:, None]
    scores_NM = scores(episodes)[0]
    scores_N = scores_NM.gather(1, last_N1).squeeze(1)
    return torch.where(lengths_N > 0, scores_N, torch.nan)


def _append_tail(
    prompt: TokenIds, completion: TokenIds, tail: Sequence[int], width: int | None
) -> TokenIds:
    """Return the completion, followed by the rest of `tail` if it ends with `tail`'s first token."""
    # The completion has the first token of `tail` already.
    row_length = len(prompt) + len(completion) + len(tail) - 1
    has_room = width is None or row_length <= width
    if not has_room or not len(completion) or not len(tail):
        return completion
    # A completion that was cut ends in the middle of a sentence, and no tail may follow.
    has_ended = completion[-1] == tail[0]
    if not has_ended:
        return completion
    rest = np.asarray(tail[1:], completion.dtype)
    return np.concatenate([completion, rest])


@dataclass(frozen=True)
class ModelReaders:
    """The function that runs each model over the episodes of a rollout; None if that is not needed.

    With both a policy and a reference the rollout measures the divergence of their log-probs.
    """

    # Log-probs, and values if the policy has a value head: fp32[1 or 2, N, M].
    policy: ReadEpisodes | None
    # Log-probs, fp32[1, N, M].
    reference: ReadEpisodes | None = None
    # Values of a separate value model, fp32[1, N, M].
    value: ReadEpisodes | None = None
    # Name of a reward by a model → its function, which returns scores fp32[N].
    rewards: Mapping[str, ReadEpisodes] = field(default_factory=dict)


@dataclass(frozen=True)
class TeacherComparison:
    """Compares the policy with a teacher at the tokens of held-out completions."""

    algorithm: Algorithm
    engine: Engine
    reader: EpisodeReader
    # Returns micro-batches with what the teacher says of their tokens. Collective.
    add_teacher: Callable[[list[EpisodeBatch]], list[Any]]
    reducer: SumReducer
    # Asks the teacher about all episodes first, if it is on servers; else None. Collective.
    ask_about: Callable[[Episodes], None] | None = None

    def sums(self, episodes: Episodes) -> dict[str, float]:
        """Return the sums of the held-out objective over all episodes and ranks. Collective."""
        if self.ask_about is not None:
            self.ask_about(episodes)
        own_sums: dict[str, float] = {}
        for micro_batches in self.reader.rounds(episodes):
            taught = self.add_teacher(micro_batches)
            sums = self.engine.evaluate(taught, self.algorithm.eval_objective)
            own_sums = add_sums(own_sums, sums)
        all_sums, _ = self.reducer(own_sums)
        return all_sums


def add_sums(sums: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return `sums` with those of the same name in `more` added."""
    added = dict(sums)
    for name, value in more.items():
        added[name] = added.get(name, 0.0) + value
    return added
