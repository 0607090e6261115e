"""A teacher on servers: it is asked once about a token cache, or about the episodes of each rollout.

The texts are divided over all ranks, whatever the strategy, and every rank gets all answers. Ranks that
share samples therefore have identical numbers, even if a server rounds differently each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drumline.config.teachers import ServedTeacher
from drumline.data.batches import Episodes
from drumline.data.cache import TokenCache, bounds
from drumline.dist.copies import copy_to_device
from drumline.dist.reduce import rows_of_all
from drumline.models.teaching import Teacher
from drumline.plan.plan import Plan
from drumline.rl.generate import rank_and_world_size
from drumline.rl.teacher_servers import TaughtText, TeacherServers
from drumline.train.sampling import tokenizer_of
from drumline.train.teacher_table import Answer, ChoiceTable, answers_of_all
from drumline.train.vocabulary import vocabulary_entries

# Samples of a cache that each rank asks about before the ranks exchange their answers.
SAMPLES_OF_ROUND = 64


def connect(plan: Plan, served: ServedTeacher) -> TeacherServers:
    """Return a connection to the servers of a plan's teacher.

    Raises EnvironmentFault if one of them is not there or does not serve the teacher.
    """
    teaching = plan.config.algorithm.teaching
    assert teaching is not None, "the algorithm has a teacher"
    return TeacherServers(served, teaching.top_k, tokenizer_of(plan), vocabulary_entries(plan))


def answers_of_cache(
    servers: TeacherServers, cache: TokenCache, device: str, raise_if_stopping: Callable[[], None]
) -> Iterator[Answer]:
    """Yield the packed choices of each sample of a cache, on every rank. Collective.

    Args:
        servers: The teacher's servers.
        cache: The samples.
        device: The device of tensors that ranks exchange.
        raise_if_stopping: Raises on all ranks if the run is to stop. Collective.
    """
    rank, world_size = rank_and_world_size()
    samples_at_once = world_size * SAMPLES_OF_ROUND
    for first in range(0, len(cache), samples_at_once):
        raise_if_stopping()
        stop = min(first + samples_at_once, len(cache))
        own_samples = list(range(first + rank, stop, world_size))
        texts = []
        for sample in own_samples:
            texts += _texts_of_sample(cache, sample)
        rows_RJ = copy_to_device(device, torch.from_numpy(servers.ask(texts)))
        yield from answers_of_all(own_samples, rows_RJ, cache)


def _texts_of_sample(cache: TokenCache, sample: int) -> list[TaughtText]:
    """Return the texts of a sample that have learned tokens. A packed sample has several texts."""
    texts = []
    for tokens, learn in cache.segments(sample):
        # Nothing predicts the first token.
        positions = np.flatnonzero(learn[1:]) + 1
        if len(positions):
            texts.append(TaughtText(tokens.tolist(), positions.tolist()))
    return texts


@dataclass
class RolloutTeacher:
    """Asks the teacher's servers about whole rollouts, and adds their answers to micro-batches."""

    servers: TeacherServers
    device: str
    # The answers for the episodes of the present rollout.
    table: ChoiceTable | None = field(default=None, init=False)

    def ask_about(self, episodes: Episodes) -> None:
        """Ask about all episodes of a rollout; their answers replace those for the one before.

        Collective. Raises ServerError if the last server fails.
        """
        texts = []
        for row, (prompt, completion) in enumerate(
            zip(episodes.prompts, episodes.completions, strict=True)
        ):
            learned = np.flatnonzero(episodes.mask_NM[row, : len(completion)].numpy())
            positions = learned + len(prompt)
            tokens = [*prompt.tolist(), *completion.tolist()]
            texts.append(TaughtText(tokens, positions.tolist()))
        first_tokens = bounds(np.asarray([len(text.positions) for text in texts], np.int64))
        packed = self._answers_in_order(texts)
        choices = self.servers.choices
        self.table = ChoiceTable(
            packed[:, :choices].astype(np.int32), packed[:, choices:], first_tokens
        )

    def _answers_in_order(self, texts: list[TaughtText]) -> Any:
        """Return the packed choices of all texts, end to end, fp32[T, J]. Collective."""
        rank, world_size = rank_and_world_size()
        own = [text for text in texts[rank::world_size] if text.positions]
        rows_RJ = copy_to_device(self.device, torch.from_numpy(self.servers.ask(own)))
        rows_of_ranks = [part.cpu().numpy() for part in rows_of_all(rows_RJ)]
        lengths = [len(text.positions) for text in texts]
        parts: list[Any] = [None] * len(texts)
        for rank_of_texts, rows in enumerate(rows_of_ranks):
            # The texts were divided over the ranks in turn. The last part is empty.
            stops = np.cumsum(lengths[rank_of_texts::world_size], dtype=np.int64)
            parts[rank_of_texts::world_size] = np.split(rows, stops)[:-1]
        no_rows = rows_of_ranks[0][:0]
        return np.concatenate([no_rows, *parts])

    def ask(self, micro_batches: list[Any]) -> list[Teacher]:
        """Return the stored answers for the episodes of each micro-batch; `ask_about` has fetched them."""
        assert self.table is not None, "the rollout was asked about before its batches"
        return [self.table.choices_of(batch.samples, self.device) for batch in micro_batches]
