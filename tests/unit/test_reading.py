"""How episodes are dealt to ranks and micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.data.batches import Episodes
from drumline.rl.reading import EpisodeReader, last_scores


def dealt(
    sizes: list[int], picks: list[int], ranks: int, micro_batch: int
) -> list[list[list[int]]]:
    """Of each rank its micro-batches. `sizes`: of the groups, whose prompts have other lengths."""
    prompts = [
        np.ones(3 + group, np.int64) for group, size in enumerate(sizes) for _ in range(size)
    ]
    episodes = Episodes.start(
        prompts, [np.ones(1 + index % 5, np.int64) for index in range(len(prompts))]
    )
    plan: Any = SimpleNamespace(mesh=SimpleNamespace(data_ranks=ranks))
    accumulation = len(picks) // ranks // micro_batch
    readings = [EpisodeReader(plan, rank, True, "cpu", 0, None) for rank in range(ranks)]
    batches = [
        reading.micro_batches(episodes, picks, accumulation, micro_batch) for reading in readings
    ]
    assert (
        sum(tokens for _, tokens in batches)
        == episodes.lengths[[pick for pick in picks if pick >= 0]].sum()
    )
    return [reading._deal(episodes, picks, accumulation, micro_batch)[0] for reading in readings]


@pytest.mark.parametrize(
    ("sizes", "fillers", "ranks", "micro_batch", "together"),
    [
        ([4] * 8, 0, 2, 8, 4),
        ([4] * 8, 0, 2, 4, 4),
        ([4] * 8, 0, 4, 2, 2),  # a group over micro-batches: as many of it together as one takes
        ([8, 4, 4], 0, 1, 8, 4),  # a prompt that was drawn twice
        ([4] * 3, 4, 2, 8, 4),
        ([3] * 5, 1, 2, 8, 1),  # micro-batches of no whole parts: by length alone
    ],
)
def test_episodes_of_a_prompt_go_together(
    sizes: list[int], fillers: int, ranks: int, micro_batch: int, together: int
) -> None:
    total = sum(sizes)
    picks = [*np.random.default_rng(0).permutation(total).tolist(), *[-1] * fillers]
    of_ranks = dealt(sizes, picks, ranks, micro_batch)
    assert sorted(pick for rank in of_ranks for micro in rank for pick in micro) == sorted(picks), (
        "each once"
    )
    assert {len(micro) for rank in of_ranks for micro in rank} == {micro_batch}
    group = np.repeat(np.arange(len(sizes)), sizes)
    for micro in (micro for rank in of_ranks for micro in rank):
        counts = [
            sum(pick >= 0 and group[pick] == each for pick in micro) for each in range(len(sizes))
        ]
        assert all(count % together == 0 for count in counts)


def test_a_reward_model_reads_the_whole_conversation() -> None:
    """It was trained on what the template writes behind an answer, too: here 9 and a line break, 5."""
    asked: list[Episodes] = []

    def scores(episodes: Episodes) -> torch.Tensor:
        """The number of each token."""
        asked.append(episodes)
        rows = [torch.tensor([*map(float, each)]) for each in episodes.completions]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)[None]

    given = [np.asarray(each, np.int64) for each in ([1, 9], [1, 2, 3], [4, 4, 9], [])]
    episodes = Episodes.start([np.ones(2, np.int64)] * 4, given, [True, False, True, False])
    read = last_scores(scores, [9, 5], None, episodes).tolist()
    assert (
        read[:3] == [5, 3, 5]
        and np.isnan(read[3])
        and [len(each) for each in asked[0].completions] == [3, 3, 4, 0]
    )
    assert [len(each) for each in episodes.completions] == [2, 3, 3, 0], (
        "training sees what was sampled"
    )
    assert last_scores(scores, [9, 5], 5, episodes).tolist()[:3] == [5, 3, 9], (
        "no room in a fixed width of 5 for the third"
    )
    assert last_scores(scores, [], None, episodes).tolist()[:3] == [9, 3, 9], "no template"
