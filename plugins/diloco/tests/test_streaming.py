"""DiLoCo in fragments, in 8 bits and beside the steps is its formulas, which are written down here once more, plainly."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from drumline.errors import ConfigError
from drumline_diloco.section import StreamingDiLoCoStrategy
from drumline_diloco.streaming import StreamingEngine, cut
from plugins.diloco.tests.streaming_worker import OPTIONS, STEPS, build
from tests.distributed import session_loop
from tests.distributed.ranks import run_module

RANKS = 2
LR = 0.7
MOMENTUM = 0.9
BLOCK = 256
WORKER = "plugins.diloco.tests.streaming_worker"


@dataclass
class Trained:
    """What a rank of the worker has written."""

    first: list[torch.Tensor]
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    last: list[torch.Tensor]


@dataclass
class Copy:
    """A copy of the model that is trained here."""

    model: nn.Module
    optimizer: Any
    batches: list[tuple[torch.Tensor, torch.Tensor]]

    def weights(self) -> torch.Tensor:
        """Return a copy of the weights, end to end."""
        vector = parameters_to_vector(self.model.parameters())
        return vector.detach().clone()

    def train(self, step: int, samples: int) -> None:
        """Take an inner step. `samples`: of all ranks."""
        inputs, labels = self.batches[step - 1]
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
        scaled = loss * RANKS / samples
        scaled.backward()
        clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()

    def take(self, part: slice, outer: torch.Tensor, keep: float) -> None:
        """Mix the outer weights of a part into it. `keep`: the share of its own weights."""
        vector = self.weights()
        vector[part] = keep * vector[part] + (1 - keep) * outer[part]
        vector_to_parameters(vector, self.model.parameters())


class Due(NamedTuple):
    """An outer step that is due: the part of the weights, and the mean of its outer gradients."""

    part: slice
    delta: torch.Tensor


def trained(folder: Path, name: str, rank: int) -> Trained:
    path = folder / f"{name}-{rank}.pt"
    return Trained(*torch.load(path, weights_only=True))


def end_to_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector."""
    flat = []
    for tensor in tensors:
        flat.append(tensor.flatten())
    return torch.cat(flat)


def coded(flat: torch.Tensor) -> torch.Tensor:
    """Return a vector after 8 bits and back: each 256 entries have a scale of their own."""
    out = flat.clone()
    for block in out.split(BLOCK):
        largest = float(block.abs().max())
        scale = largest / 127
        if scale:
            code = (block / scale).round()
            block.copy_(code * torch.tensor(scale))
    return out


def mean(deltas: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Return the mean. In 8 bits each rank has a part of whole blocks, and codes the mean of all ranks' codes again."""
    if bits == 32:
        return torch.stack(deltas).mean(0)

    size = deltas[0].numel()
    blocks = math.ceil(size / (RANKS * BLOCK))
    part_size = blocks * BLOCK
    padding = torch.zeros(RANKS * part_size - size)
    by_rank = []
    for delta in deltas:
        padded = torch.cat([delta, padding])
        by_rank.append(padded.split(part_size))

    parts = []
    for sent in zip(*by_rank, strict=True):
        received = torch.stack([coded(part) for part in sent])
        parts.append(coded(received.mean(0)))
    return torch.cat(parts)[:size]


def fragments_sent(step: int, period: int, number: int) -> list[int]:
    """Return the fragments that are sent after `step` steps."""
    sent = []
    for fragment in range(number):
        end = period * (fragment + 1) // number
        if step >= end and (step - end) % period == 0:
            sent.append(fragment)
    return sent


def copies_of(ranks: list[Trained]) -> list[Copy]:
    """Return a copy for each rank, with the first weights of the rank."""
    copies = []
    for rank in ranks:
        model = build()
        vector_to_parameters(end_to_end(rank.first), model.parameters())
        optimizer = session_loop.make_optimizer(model)
        copies.append(Copy(model, optimizer, rank.batches))
    return copies


def reference(folder: Path, name: str) -> list[torch.Tensor]:
    """Return the weights of each rank after all steps, by one process."""
    strategy = StreamingDiLoCoStrategy(**OPTIONS[name])
    number = strategy.fragments
    keep = 0.0
    if strategy.delay:
        keep = strategy.keep
    copies = copies_of([trained(folder, name, rank) for rank in range(RANKS)])
    outer = copies[0].weights()
    momentum = torch.zeros_like(outer)
    size = outer.numel()
    due: dict[int, list[Due]] = defaultdict(list)

    for step in range(1, STEPS + 1):
        samples = sum(len(copy.batches[step - 1][1]) for copy in copies)
        for copy in copies:
            copy.train(step, samples)

        for fragment in fragments_sent(step, strategy.period, number):
            begin = size * fragment // number
            end = size * (fragment + 1) // number
            part = slice(begin, end)
            deltas = []
            for copy in copies:
                deltas.append(outer[part] - copy.weights()[part])
            used_at = step + strategy.delay
            due[used_at].append(Due(part, mean(deltas, strategy.bits)))

        for part, delta in due[step]:
            momentum[part] = MOMENTUM * momentum[part] + delta
            outer[part] -= LR * (delta + MOMENTUM * momentum[part])
            for copy in copies:
                copy.take(part, outer, keep)
    return [copy.weights() for copy in copies]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the worker has written each of OPTIONS into."""
    folder = tmp_path_factory.mktemp("streaming")
    run_module(WORKER, [folder, *OPTIONS], RANKS)
    return folder


@pytest.mark.claim(
    "DiLoCo in fragments, in 8 bits and beside the steps is its formulas, and goes on to the bit"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_follows_its_formulas(runs: Path, name: str) -> None:
    expected = reference(runs, name)
    first = end_to_end(trained(runs, name, 0).first)
    for rank in range(RANKS):
        last = end_to_end(trained(runs, name, rank).last)
        assert (first - last).norm() > 0.1
        torch.testing.assert_close(last, expected[rank], rtol=1e-4, atol=1e-5)
    ranks_differ = not torch.equal(expected[0], expected[1])
    assert ranks_differ or OPTIONS[name].get("keep") == 0


@pytest.mark.claim(
    "a host of DiLoCo that is left out of a round loses nothing"
    " (coming and going: `plugins/diloco/tests/test_peers.py`, in test-full)"
)
def test_a_host_that_is_left_out_keeps_its_outer_gradient() -> None:
    engine = object.__new__(StreamingEngine)
    engine.outer = StreamingDiLoCoStrategy(delay=1)
    weights, anchors, moments, mean_delta = torch.randn(4, 9).unbind()
    engine.fragments = [([weights], [anchors], [moments])]
    own = anchors - weights
    before = anchors.clone()

    engine._outer_step(0, mean_delta, is_in=False)
    assert not torch.equal(anchors, before)
    torch.testing.assert_close(anchors - weights, own)


def sizes(fragments: list[list[torch.Tensor]]) -> list[int]:
    """Return the number of entries of each fragment."""
    found = []
    for parts in fragments:
        found.append(sum(part.numel() for part in parts))
    return found


def test_fragments_are_views_of_weights_in_any_layout() -> None:
    """What is written to a fragment stands in the weights, and each entry is in one fragment."""
    transposed = torch.zeros(3, 4).t()
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weights = [transposed, channels_last, torch.zeros(()), torch.zeros(1, 7)]

    fragments = cut(weights, 3)
    assert set(sizes(fragments)) == {46, 47}

    for number, parts in enumerate(fragments, 1):
        for part in parts:
            part.add_(number)
    entries = end_to_end(weights)
    assert set(entries.tolist()) == {1.0, 2.0, 3.0}


def test_no_fragment_is_empty() -> None:
    assert sizes(cut([torch.zeros(10)], 7)) == [1, 1, 2, 1, 2, 1, 2]
    message = r"strategy\.fragments: 11 fragments of 10 trained weights"
    with pytest.raises(ConfigError, match=message):
        cut([torch.zeros(10)], 11)
