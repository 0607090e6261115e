"""How episodes are dealt to ranks and micro-batches."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from drumline.data.batches import Episodes, TokenIds
from drumline.rl.reading import EpisodeReader, last_scores, rows_of_samples


def ones(length: int) -> TokenIds:
    return np.ones(length, np.int64)


def without_fillers(picks: list[int]) -> list[int]:
    return [pick for pick in picks if pick >= 0]


def assign(
    sizes: list[int],
    picks: list[int],
    ranks: int,
    micro_batch: int,
) -> list[list[int]]:
    """Return the micro-batches of all ranks.

    Args:
        sizes: Of the groups of episodes. Each group has a prompt of its own.
        picks: The episodes of the global batch; -1 is a filler.
        ranks: That the episodes are dealt to.
        micro_batch: Episodes of a micro-batch.
    """
    prompts: list[TokenIds] = []
    for group, size in enumerate(sizes):
        prompts += [ones(3 + group)] * size

    completions = [ones(1 + index % 5) for index in range(len(prompts))]
    episodes = Episodes.start(prompts, completions)
    mesh = SimpleNamespace(data_ranks=ranks)
    plan: Any = SimpleNamespace(mesh=mesh, batch=SimpleNamespace(rows_per_sample=1))
    accumulation = len(picks) // ranks // micro_batch
    assigned: list[list[int]] = []
    total = 0
    for rank in range(ranks):
        reader = EpisodeReader(plan, rank, True, "cpu", 0, None)
        cut = (episodes, picks, accumulation, micro_batch)
        _, tokens = reader.micro_batches(*cut)
        total += tokens
        own, _ = reader._assign(episodes, rows_of_samples(episodes, 1), *cut[1:])
        assigned += own

    assert total == episodes.lengths[without_fillers(picks)].sum()
    return assigned


@pytest.mark.parametrize(
    ("sizes", "fillers", "ranks", "micro_batch", "together"),
    [
        ([4] * 8, 0, 2, 8, 4),
        ([4] * 8, 0, 2, 4, 4),
        # A group over micro-batches: as many of it together as one takes.
        ([4] * 8, 0, 4, 2, 2),
        # A prompt that was drawn twice.
        ([8, 4, 4], 0, 1, 8, 4),
        ([4] * 3, 4, 2, 8, 4),
        # Micro-batches of no whole parts: by length alone.
        ([3] * 5, 1, 2, 8, 1),
    ],
)
def test_episodes_of_a_prompt_go_together(
    sizes: list[int],
    fillers: int,
    ranks: int,
    micro_batch: int,
    together: int,
) -> None:
    draw = np.random.default_rng(0)
    picks = draw.permutation(sum(sizes)).tolist()
    picks += [-1] * fillers

    micro_batches = assign(sizes, picks, ranks, micro_batch)

    assert sorted(chain(*micro_batches)) == sorted(picks), "each once"

    group_of_episode = np.repeat(np.arange(len(sizes)), sizes)
    for micro in micro_batches:
        assert len(micro) == micro_batch
        groups = group_of_episode[without_fillers(micro)]
        assert not (np.bincount(groups) % together).any()


def completion_lengths(episodes: Episodes) -> list[int]:
    return list(map(len, episodes.completions))


def test_a_reward_model_reads_the_whole_conversation() -> None:
    """It was trained on what the template writes behind an answer, too.

    Here that is 9 and a line break, 5.
    """
    asked: list[Episodes] = []

    def scores(episodes: Episodes) -> torch.Tensor:
        """Return the number of each token."""
        asked.append(episodes)
        rows = []
        for completion in episodes.completions:
            rows.append(torch.tensor(completion, dtype=torch.float32))
        return pad_sequence(rows, batch_first=True)[None]

    completions = [
        np.array([1, 9]),
        np.array([1, 2, 3]),
        np.array([4, 4, 9]),
        np.array([], np.int64),
    ]
    ended = [True, False, True, False]
    images = [{"images": [f"{number}.png"]} for number in range(4)]
    episodes = Episodes.start([ones(2)] * 4, completions, ended, images)

    *read, of_nothing = last_scores(scores, [9, 5], None, episodes).tolist()

    assert read == [5, 3, 5]
    assert np.isnan(of_nothing)
    assert completion_lengths(asked[0]) == [3, 3, 4, 0]
    assert asked[0].images == images
    assert completion_lengths(episodes) == [2, 3, 3, 0], "training sees what was sampled"

    narrow = last_scores(scores, [9, 5], 5, episodes).tolist()
    assert narrow[:3] == [5, 3, 9], "no room in a fixed width of 5 for the third"

    without_template = last_scores(scores, [], None, episodes).tolist()
    assert without_template[:3] == [9, 3, 9]
