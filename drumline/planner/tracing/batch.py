"""A micro-batch of the kind that an algorithm learns from: every row is as long as may be, every token is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from drumline.algorithms.build import build_algorithm, build_objective
from drumline.algorithms.policy import KLController
from drumline.core.algorithms import ROLLOUT, ClassifyConfig
from drumline.core.config import Config
from drumline.core.plan import Plan
from drumline.data.batches import collate, pair_batch
from drumline.data.cache import Segment
from drumline.data.episodes import Episodes, collate_episodes
from drumline.data.labelled import ImageBatch, LabelledBatch


def objective_of(config: Config) -> Any:
    """What the policy learns by."""
    algorithm = config.algorithm
    if not isinstance(algorithm, ROLLOUT):
        return build_algorithm(config).objective
    kl = KLController(algorithm.kl.coefficient, algorithm.kl.target, algorithm.kl.horizon)
    objective = build_objective(algorithm, kl).objective
    return objective["policy"] if isinstance(objective, dict) else objective


def batch_of(plan: Plan, rows: int, length: int, channels: int = 3) -> Any:
    """`rows` sequences of `length` tokens; for a model of images alone, square images of `length` pixels a side."""
    config, algorithm = plan.config, plan.config.algorithm
    if isinstance(algorithm, ClassifyConfig):
        labels_B = torch.zeros(rows, dtype=torch.int64)
        if config.images_alone:
            return ImageBatch(torch.zeros(rows, channels, length, length), labels_B, rows)
        first = plan.first_position
        ids_BT = torch.zeros(rows, length, dtype=torch.int64)
        positions_BT = torch.arange(first, first + length).repeat(rows, 1)
        mask_BT = torch.ones_like(ids_BT) if plan.looks_ahead else None
        return LabelledBatch(ids_BT, positions_BT, mask_BT, torch.full((rows,), length - 1), labels_B, rows)
    tokens = np.ones(length, np.uint32)
    segment: Segment = (tokens, np.ones(length, np.uint8))
    if config.rows_per_sample == 2:
        pairs = rows // 2
        batch = pair_batch([[segment, segment]] * pairs, range(pairs), [{}] * pairs, 0, length)
        return replace(batch, reference_B=torch.zeros(rows, dtype=torch.float64))
    if isinstance(algorithm, ROLLOUT):
        prompt = tokens[:1].astype(np.int64)
        episodes = Episodes.start([prompt] * rows, [tokens[1:].astype(np.int64)] * rows)
        return collate_episodes(episodes, range(rows), 0, length)
    if config.packs:  # two documents: attention is given a mask
        cut = [(part, np.ones(len(part), np.uint8)) for part in np.array_split(tokens, 2)]
        return collate([cut] * rows, 0, length)
    return collate([[segment]] * rows, 0, length)
