"""Packing: every row once, none too many, and no document sees another."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from drumline.data.batches import IGNORE, collate
from drumline.data.packing import cut, pack


def test_pack_groups_every_row_once_within_the_capacity() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 101, 3000)
    groups = pack(lengths, 100)

    assert groups == sorted(groups)
    assert sorted(chain(*groups)) == list(range(3000))

    for group in groups:
        assert sum(lengths[group]) <= 100
        assert group == sorted(group)

    # Nearly as few sequences as can be.
    fewest = lengths.sum() / 100
    assert len(groups) <= fewest * 1.03

    again = pack(lengths.tolist(), 100)
    assert groups == again, "the same lengths give the same groups"


def test_pack_takes_the_tightest_room() -> None:
    # Longest down: 7 → A(3 left), 6 → B(4 left), 4 → B(0), 3 → A(0).
    # First fit would have put nothing else, worst fit 3 into a new one.
    assert pack([3, 4, 6, 7], 10) == [[0, 3], [1, 2]]

    assert pack([5, 5, 5], 5) == [[0], [1], [2]]
    assert pack([], 10) == []

    with pytest.raises(AssertionError, match="truncate first"):
        pack([11], 10)


def test_cut_keeps_the_stream_and_remembers_where_documents_end() -> None:
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 40, 50)
    # Ranges with gaps between them: rows held out leave such.
    starts = np.cumsum(sizes + 3) - sizes
    stops = starts + sizes
    segments, offsets = cut(starts, stops, 16)
    segment_starts, segment_stops = segments.T

    rows = rows_of_ranges(segment_starts, segment_stops)
    assert rows == rows_of_ranges(starts, stops)

    lengths = segment_stops - segment_starts
    totals = []
    for first, last in pairwise(offsets):
        total = lengths[first:last].sum()
        totals.append(int(total))

    *whole, rest = totals
    assert set(whole) == {16}
    assert 0 < rest <= 16

    document_of_start = np.searchsorted(starts, segment_starts, side="right")
    document_of_end = np.searchsorted(starts, segment_stops - 1, side="right")
    is_same = document_of_start == document_of_end
    assert is_same.all(), "no segment spans two documents"


def rows_of_ranges(starts: Any, stops: Any) -> list[int]:
    """Return the rows of ranges [start, stop), in their order."""
    rows: list[int] = []
    for start, stop in zip(starts, stops, strict=True):
        rows.extend(range(start, stop))

    return rows


def test_cut_of_exact_and_empty_streams() -> None:
    starts = np.array([0, 4])
    segments, offsets = cut(starts, starts + 4, 4)
    assert segments.tolist() == [[0, 4], [4, 8]]
    assert offsets.tolist() == [0, 1, 2]

    nothing = np.zeros(0, np.int64)
    segments, offsets = cut(nothing, nothing, 4)
    assert len(segments) == 0
    assert offsets.tolist() == [0]


# -------------------------------------------------------------------------------------------------------------- collate


def segment(tokens: list[int], learn: list[int] | None = None) -> tuple[Any, Any]:
    """Return a document as `collate` takes it; all of its tokens are learned by default."""
    if learn is None:
        learn = [1] * len(tokens)

    return np.asarray(tokens, np.uint16), np.asarray(learn, np.uint8)


def test_collate_shifts_within_segments_and_restarts_positions() -> None:
    first = [segment([5, 6, 7], [0, 0, 1]), segment([8, 9])]
    second = [segment([1, 2])]
    batch = collate([first, second], pad_id=0, width=None)

    assert batch.input_ids_BT.tolist() == [
        [5, 6, 7, 8, 9],
        [1, 2, 0, 0, 0],
    ]
    assert batch.targets_BT.tolist() == [
        [IGNORE, 7, IGNORE, 9, IGNORE],
        [2, IGNORE, IGNORE, IGNORE, IGNORE],
    ]
    assert batch.position_ids_BT.tolist() == [
        [0, 1, 2, 0, 1],
        [0, 1, 2, 3, 4],
    ]

    assert batch.input_ids_BT.dtype == torch.int64
    assert batch.targets_BT.dtype == torch.int64
    assert batch.position_ids_BT.dtype == torch.int64

    assert batch.weight == 3
    assert batch.to("cpu").weight == 3


def test_collate_pads_to_a_width_and_makes_fillers() -> None:
    fillers = collate([None, None], pad_id=7, width=None)
    assert fillers.input_ids_BT.tolist() == [[7, 7], [7, 7]]
    assert (fillers.targets_BT == IGNORE).all()
    assert fillers.weight == 0

    row = [segment([1, 2, 3])]
    wide = collate([row, None], pad_id=0, width=6)
    assert wide.input_ids_BT.shape == (2, 6)
    assert wide.weight == 2

    with pytest.raises(AssertionError, match="does not fit"):
        collate([row], pad_id=0, width=2)


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


def logits_of(model: Any, batch: Any, **options: Any) -> torch.Tensor:
    """Return the logits of a forward without an attention mask."""
    output = model(input_ids=batch.input_ids_BT, use_cache=False, **options)
    return output.logits


def loss_and_gradients(model: Any, *batches: Any) -> tuple[float, list[torch.Tensor]]:
    """Return the sum of the cross-entropy over batches, in fp32, and the gradient of every parameter."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        logits = logits_of(model, batch, position_ids=batch.position_ids_BT)
        loss = cross_entropy(
            logits.flatten(0, 1),
            batch.targets_BT.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
        )
        loss.backward()
        total += loss.item()

    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return total, gradients


def random_rows() -> list[tuple[Any, Any]]:
    """Return 24 documents of 2 to 29 tokens, of which about half are learned."""
    draw = np.random.default_rng(2)
    rows = []
    for length in draw.integers(2, 30, 24):
        tokens = draw.integers(1, 97, length).tolist()
        learn = draw.integers(0, 2, length).tolist()
        rows.append(segment(tokens, learn))

    return rows


@pytest.mark.claim("nothing leaks between packed documents")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_unpacked_losses_and_gradients_agree(attention: str) -> None:
    """Rows in one batch, packs, and packs in two batches with padding are all as each row alone."""
    rows = random_rows()
    lengths = [len(tokens) for tokens, _ in rows]
    packed = []
    for group in pack(lengths, 40):
        packed.append([rows[row] for row in group])

    most_documents = max(map(len, packed))
    assert most_documents >= 3

    model = tiny_llama(attention)
    single_rows = [[row] for row in rows]
    single_batches = [collate([row], 0, None) for row in single_rows]
    expected_loss, expected_gradients = loss_and_gradients(model, *single_batches)

    together = [
        [collate(single_rows, 0, None)],
        [collate(packed, 0, None)],
        [collate(packed[:3], 0, 64), collate([*packed[3:], None], 0, 64)],
    ]
    for batches in together:
        loss, gradients = loss_and_gradients(model, *batches)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.claim("nothing leaks between packed documents")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_does_not_see_the_one_before_it(attention: str) -> None:
    """Changing the first document leaves every logit of the second bit for bit as it was; and with plain positions it would not."""
    model = tiny_llama(attention)
    second = segment([11, 12, 13, 14, 15])
    one = collate([[segment([1, 2, 3, 4]), second]], 0, None)
    other = collate([[segment([50, 60, 70, 80]), second]], 0, None)
    assert torch.equal(one.position_ids_BT, other.position_ids_BT)

    def logits_of_second(batch: Any, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = logits_of(model, batch, **options)
        return logits[:, 4:]

    positions = {"position_ids": one.position_ids_BT}
    logits = logits_of_second(one, **positions)
    changed = logits_of_second(other, **positions)
    assert torch.equal(logits, changed)

    plain = logits_of_second(one)
    plain_changed = logits_of_second(other)
    assert not torch.allclose(plain, plain_changed, atol=1e-4)
