"""Packing: every row once, none too many, and no document sees another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from drumline.data.batches import IGNORE, collate
from drumline.data.packing import cut, pack

Segments = list[tuple[Any, Any]]


def test_pack_groups_every_row_once_within_the_capacity() -> None:
    lengths = np.random.default_rng(0).integers(1, 101, 3000)
    groups = pack(lengths, 100)
    assert sorted(row for group in groups for row in group) == list(range(3000))
    assert max(sum(lengths[group]) for group in groups) <= 100
    assert len(groups) <= lengths.sum() / 100 * 1.03, "nearly as few sequences as can be"
    assert groups == pack(lengths.tolist(), 100), "the same lengths give the same groups"
    assert groups == sorted(groups) and all(group == sorted(group) for group in groups), (
        "in row order"
    )


def test_pack_takes_the_tightest_room() -> None:
    # Longest down: 7 → A(3 left), 6 → B(4 left), 4 → B(0), 3 → A(0): first fit would have put nothing else, worst fit 3 into a new one.
    assert pack([3, 4, 6, 7], 10) == [[0, 3], [1, 2]]
    assert pack([5, 5, 5], 5) == [[0], [1], [2]]
    assert pack([], 10) == []
    with pytest.raises(AssertionError, match="truncate first"):
        pack([11], 10)


def test_cut_keeps_the_stream_and_remembers_where_documents_end() -> None:
    sizes = np.random.default_rng(1).integers(1, 40, 50)
    starts = np.cumsum(sizes + 3) - sizes  # ranges with gaps between them: rows held out leave such
    segments, offsets = cut(starts, starts + sizes, 16)
    stream = np.concatenate([np.arange(start, stop) for start, stop in segments])
    assert (
        stream.tolist()
        == np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        ).tolist()
    )
    packs = [segments[first:last] for first, last in pairwise(offsets)]
    totals = [int((each[:, 1] - each[:, 0]).sum()) for each in packs]
    assert totals[:-1] == [16] * (len(packs) - 1) and 0 < totals[-1] <= 16
    owner = np.searchsorted(starts, segments[:, 0], side="right")
    assert (owner == np.searchsorted(starts, segments[:, 1] - 1, side="right")).all(), (
        "no segment spans two documents"
    )


def test_cut_of_exact_and_empty_streams() -> None:
    segments, offsets = cut(np.array([0, 4]), np.array([4, 8]), 4)
    assert segments.tolist() == [[0, 4], [4, 8]] and offsets.tolist() == [0, 1, 2]
    segments, offsets = cut(np.zeros(0, np.int64), np.zeros(0, np.int64), 4)
    assert len(segments) == 0 and offsets.tolist() == [0]


# -------------------------------------------------------------------------------------------------------------- collate


def segment(tokens: list[int], learn: list[int] | None = None) -> tuple[Any, Any]:
    return np.asarray(tokens, np.uint16), np.asarray(learn or [1] * len(tokens), np.uint8)


def test_collate_shifts_within_segments_and_restarts_positions() -> None:
    batch = collate(
        [[segment([5, 6, 7], [0, 0, 1]), segment([8, 9])], [segment([1, 2])]], pad_id=0, width=None
    )
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [
        [IGNORE, 7, IGNORE, 9, IGNORE],
        [2, IGNORE, IGNORE, IGNORE, IGNORE],
    ]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.weight == 3
    assert {
        tensor.dtype for tensor in (batch.input_ids_BT, batch.targets_BT, batch.position_ids_BT)
    } == {torch.int64}
    assert batch.to("cpu").weight == 3


def test_collate_pads_to_a_width_and_makes_fillers() -> None:
    batch = collate([None, None], pad_id=7, width=None)
    assert (
        batch.input_ids_BT.tolist() == [[7, 7], [7, 7]]
        and batch.weight == 0
        and (batch.targets_BT == IGNORE).all()
    )
    wide = collate([[segment([1, 2, 3])], None], pad_id=0, width=6)
    assert wide.input_ids_BT.shape == (2, 6) and wide.weight == 2
    with pytest.raises(AssertionError, match="does not fit"):
        collate([[segment([1, 2, 3])]], pad_id=0, width=2)


# --------------------------------------------------------------------------------------------------- no leak, the proof


def tiny_llama(attention: str) -> Any:
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).float().eval()


def loss_and_gradients(model: Any, batches: list[Any]) -> tuple[float, list[torch.Tensor]]:
    """Sum of cross-entropy over the batches, in fp32, with position_ids and no attention mask; and the gradient of every parameter."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        logits = model(
            input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.claim("nothing leaks between packed documents")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_unpacked_losses_and_gradients_agree(attention: str) -> None:
    draw = np.random.default_rng(2)
    rows = [
        segment(draw.integers(1, 97, n).tolist(), draw.integers(0, 2, n).tolist())
        for n in draw.integers(2, 30, 24)
    ]
    groups = pack([len(tokens) for tokens, _ in rows], 40)
    packed: list[Segments] = [[rows[row] for row in group] for group in groups]
    assert max(map(len, packed)) >= 3, "some sequence holds three documents"
    model = tiny_llama(attention)
    alone, alone_grads = loss_and_gradients(model, [collate([[row]], 0, None) for row in rows])
    ragged, ragged_grads = loss_and_gradients(model, [collate([[row] for row in rows], 0, None)])
    joined, joined_grads = loss_and_gradients(model, [collate(packed, 0, None)])
    padded, padded_grads = loss_and_gradients(
        model, [collate(packed[:3], 0, 64), collate([*packed[3:], None], 0, 64)]
    )
    for other, grads in ((ragged, ragged_grads), (joined, joined_grads), (padded, padded_grads)):
        assert other == pytest.approx(alone, rel=1e-5)
        for one, two in zip(alone_grads, grads, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.claim("nothing leaks between packed documents")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_does_not_see_the_one_before_it(attention: str) -> None:
    """Changing the first document leaves every logit of the second bit for bit as it was; and with plain positions it would not."""
    model = tiny_llama(attention)
    second = segment([11, 12, 13, 14, 15])
    batches = [
        collate([[segment(first), second]], 0, None) for first in ([1, 2, 3, 4], [50, 60, 70, 80])
    ]
    with torch.no_grad():
        one, two = (
            model(
                input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False
            ).logits
            for batch in batches
        )
        leaky_one, leaky_two = (
            model(input_ids=batch.input_ids_BT, use_cache=False).logits for batch in batches
        )
    assert torch.equal(one[:, 4:], two[:, 4:])
    assert not torch.allclose(leaky_one[:, 4:], leaky_two[:, 4:], atol=1e-4), "the test can tell"
