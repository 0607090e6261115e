"""Micro-batches of tokens: texts, preference pairs, texts with a class, and episodes of a rollout.

Names of tensors end in the letters of their dimensions. B rows of the batch, T tokens of each. For
preference pairs: P pairs, B = 2P rows, first those of the chosen answers, then those of the
rejected ones. For rollouts: N episodes, M tokens of the longest completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from drumline.data.cache import Segment, TokenCache
from drumline.plan.plan import Plan

TokenIds = npt.NDArray[np.int64]
# The images of a prompt: `images` has their paths, `grid` a grid for each; empty without any.
PromptImageMeta = Mapping[str, Any]
IGNORE = -100  # a target without a loss; torch's cross_entropy ignores the same number
# The width of a filler, a row without a sample.
FILLER_WIDTH = 2
# Field of an `EpisodeBatch` → the field of `Episodes` that its numbers are taken from. They have a
# number for each token.
_EPISODE_FIELDS = {
    "old_log_probs_BT": "log_probs_NM",
    "sampler_log_probs_BT": "sampler_log_probs_NM",
    "reference_log_probs_BT": "reference_log_probs_NM",
    "old_values_BT": "values_NM",
    "advantages_BT": "advantages_NM",
    "returns_BT": "returns_NM",
    "weights_BT": "weights_NM",
}


class Parts(NamedTuple):
    """The tokens of a prompt, and those that follow it; one array of whole numbers each."""

    prompt: npt.NDArray[Any]
    completion: npt.NDArray[Any]


@dataclass(frozen=True)
class FirstPassNumbers:
    """The statistics that `Algorithm.first_pass` computes for each sample of a global batch.

    Attributes:
        numbers_NK: fp64, K statistics of each of the N samples of the global batch, in its order.
            The algorithm defines them, such as (score, 1) for KTO, and may combine them
            (`Algorithm.combine_first`). In an evaluation N is all samples of the set.
    """

    numbers_NK: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The base of micro-batches. Each has a `weight`: its part of the denominator of the loss.

    Attributes:
        first: the statistics of the first pass; None if the algorithm has no `first_pass`.
        places_P: int64, the row index of each of this batch's samples in `first.numbers_NK`, -1 for
            a filler.
    """

    first: FirstPassNumbers | None = field(default=None, kw_only=True)
    places_P: torch.Tensor | None = field(default=None, kw_only=True)

    @staticmethod
    def weigh(cache: TokenCache, samples: npt.NDArray[np.int64]) -> float:
        """Return the weight that a batch of these samples of a cache would have.

        Nothing is collated, so each rank computes the denominator of a step's loss by itself,
        without a collective.
        """
        return float(len(samples))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the batch with `change` applied to every tensor."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                changed[name] = change(value)
            elif isinstance(value, Batch):
                changed[name] = value.each(change)
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on `device`. Copies to a GPU do not block the host."""
        on_gpu = torch.device(device).type == "cuda"

        def copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
            if on_gpu:
                # From pageable memory the copy would wait, whatever `non_blocking` says.
                tensor = pin_memory(tensor)
            return tensor.to(device, non_blocking=on_gpu)

        return self.each(copy_to_device)


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor in page-locked memory, from which copies to a GPU do not block the host."""
    if tensor.is_cuda:
        return tensor
    return tensor.pin_memory()


@dataclass(frozen=True)
class SharedPrompts(Batch):
    """The tokens of a batch with each prompt once, for rows that have prompts in common.

    A shared row is a prompt and all its completions, one behind the other. Each completion attends
    to the prompt and to itself. So the model computes the same numbers from fewer tokens.

    Attributes:
        input_ids_BT: int64, the tokens of the shared rows.
        position_ids_BT: int64, positions. Each completion goes on from the prompt's last one.
        document_lengths: for each shared row the token counts of its prompt and its completions.
        cu_seqlens_N: int32, see `TokenBatch`.
        token_indices_BT: int64, with B and T of the batch itself: the index of each of its tokens
            in the shared rows end to end; for padding any index.
        has_shared_prefix: tells a model's attention that each segment of a row attends to the row's
            first segment, the prompt.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    document_lengths: tuple[tuple[int, ...], ...]
    cu_seqlens_N: torch.Tensor
    token_indices_BT: torch.Tensor
    has_shared_prefix: ClassVar[bool] = True

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model."""
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT}


class _PromptGroup(NamedTuple):
    """Rows of a batch with the same prompt, and their completions, in the order of the rows.

    Attributes:
        prompt: the tokens of the prompt.
        rows: the indices of the rows in the batch.
        completions: the tokens behind the prompt in each of these rows.
    """

    prompt: npt.NDArray[Any]
    rows: list[int]
    completions: list[npt.NDArray[Any]]

    def segments(self) -> list[npt.NDArray[Any]]:
        """Return the prompt and all completions, end to end as in a shared row."""
        return [self.prompt, *self.completions]


def shared_prompts(rows: Sequence[Parts | None], pad_id: int, width: int) -> SharedPrompts | None:
    """Return a batch's rows with each prompt once; None if no two rows have the same prompt.

    Args:
        rows: prompt and completion of each row; None for a filler.
        pad_id: the padding token.
        width: tokens of each row of the batch, padding included.
    """
    groups = _group_by_prompt(rows)
    if all(len(group.rows) == 1 for group in groups):
        return None
    sizes = []
    for group in groups:
        sizes.append(sum(map(len, group.segments())))
    shared_width = max(sizes)
    ids = np.full((len(groups), shared_width), pad_id, np.int64)
    positions = np.zeros((len(groups), shared_width), np.int64)
    token_indices = np.zeros((len(rows), width), np.int64)
    for index, group in enumerate(groups):
        ids[index, : sizes[index]] = np.concatenate(group.segments())
        prompt_size = len(group.prompt)
        prompt_columns = np.arange(prompt_size)
        positions[index, :prompt_size] = prompt_columns
        # The index of this shared row's first token in all shared rows end to end.
        first_index = index * shared_width
        start = prompt_size
        for row, completion in zip(group.rows, group.completions, strict=True):
            stop = start + len(completion)
            row_size = prompt_size + len(completion)
            # Positions of each completion continue the prompt's.
            positions[index, start:stop] = np.arange(prompt_size, row_size)
            columns = np.concatenate((prompt_columns, np.arange(start, stop)))
            token_indices[row, :row_size] = first_index + columns
            start = stop
    document_lengths = tuple(_nonzero_lengths(group.segments()) for group in groups)
    return SharedPrompts(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        document_lengths,
        cumulative_lengths(document_lengths, shared_width),
        torch.from_numpy(token_indices),
    )


def _group_by_prompt(rows: Sequence[Parts | None]) -> list[_PromptGroup]:
    """Return a group for each distinct prompt, in the order of the prompts' first rows."""
    groups: dict[bytes, _PromptGroup] = {}
    for row, parts in enumerate(rows):
        if parts is None:
            continue
        prompt, completion = parts
        key = prompt.tobytes()
        if key not in groups:
            groups[key] = _PromptGroup(prompt, [], [])
        groups[key].rows.append(row)
        groups[key].completions.append(completion)
    return list(groups.values())


def _nonzero_lengths(segments: Iterable[npt.NDArray[Any]]) -> tuple[int, ...]:
    """Return the lengths of some segments of a row, without those that are empty."""
    return tuple(len(tokens) for tokens in segments if len(tokens))


@dataclass(frozen=True)
class ImageInputs(Batch):
    """The images of a batch of a vision-language model.

    Attributes:
        arguments: tensors by the name of the model's argument, such as pixel_values. Images are in
            the order of the batch's rows.
        rope_3BT: int64, position in time, height and width of each token, as the model's
            get_rope_index counts them, restarted in each segment; None: they are 0, 1, 2, …
    """

    arguments: dict[str, torch.Tensor]
    rope_3BT: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed = super().each(change)
        arguments = {name: change(tensor) for name, tensor in self.arguments.items()}
        return replace(changed, arguments=arguments)

    def inputs(self, position_ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return arguments of a model, in addition to the tokens.

        Of four positions the first separates documents, the others are for the rotary embedding.
        """
        if self.rope_3BT is None:
            return self.arguments
        positions_4BT = torch.cat((position_ids_BT[None], self.rope_3BT))
        return {**self.arguments, "position_ids": positions_4BT}


@dataclass(frozen=True)
class TokenBatch(Batch):
    """One micro-batch of text. All tensors are int64 [B, T] unless stated.

    There is no attention mask: padding is on the right, where causal attention hides it from real
    tokens. Positions of padding continue those of the last segment, so the positions of a row that
    is not packed are 0, 1, 2, …

    `document_lengths`, `cu_seqlens_N` and `learned_M` are computed on the host, since the host
    would have to wait for a device. They are None if nobody has computed them.

    Attributes:
        input_ids_BT: the tokens, padding included.
        targets_BT: the next token; IGNORE if it is no target, at the end of a segment and in
            padding.
        position_ids_BT: restarts at 0 in each segment, and attention must not cross a restart.
        weight: the number of targets.
        lengths_B: int64, tokens of each row without padding.
        document_lengths: for each row the token counts of its segments, without padding.
        cu_seqlens_N: int32, the cumulative lengths that variable-length attention takes: where each
            segment begins in all rows end to end, and B × T at the end. Padding at the end of a row
            counts as a segment.
        learned_M: int64, the indices of the M targets in `targets_BT`, flattened.
        learned_on_host_M: `learned_M` in host memory, also if the batch is on a device. Code that
            cuts the batch reads it.
        shared: the same tokens with each prompt once, if rows have prompts in common.
        images: the images of the rows; None for a model of text.
    """

    input_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    weight: float
    lengths_B: Any = field(default=None, kw_only=True)
    document_lengths: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    cu_seqlens_N: torch.Tensor | None = field(default=None, kw_only=True)
    learned_M: torch.Tensor | None = field(default=None, kw_only=True)
    learned_on_host_M: TokenIds | None = field(default=None, kw_only=True)
    shared: SharedPrompts | None = field(default=None, kw_only=True)
    images: ImageInputs | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.lengths_B is None:
            # Nothing is padding. A frozen dataclass has no plain assignment.
            width = self.input_ids_BT.shape[1]
            lengths_B = torch.full_like(self.input_ids_BT[:, 0], width)
            object.__setattr__(self, "lengths_B", lengths_B)

    @staticmethod
    def weigh(cache: TokenCache, samples: npt.NDArray[np.int64]) -> float:
        """Return the number of targets of these samples of a cache."""
        return float(cache.target_counts[samples].sum())

    @property
    def last_B(self) -> torch.Tensor:  # noqa: N802 - as the fields of batches are called
        """int64: the column of each row's last token."""
        return self.lengths_B - 1

    def token_weights(self) -> torch.Tensor:
        """Return bool[B, T]: whether each token is a target. `models.router` weights by it."""
        return self.targets_BT != IGNORE

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model."""
        inputs = {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT}
        if self.images is not None:
            inputs.update(self.images.inputs(self.position_ids_BT))
        return inputs


def read_segments(cache: TokenCache, samples: Sequence[int]) -> list[Sequence[Segment] | None]:
    """Return the segments of samples of a cache; None for a filler (-1)."""
    rows: list[Sequence[Segment] | None] = []
    for sample in samples:
        if sample >= 0:
            rows.append(cache.segments(sample))
        else:
            rows.append(None)
    return rows


def read_metas(cache: TokenCache, samples: Sequence[int]) -> list[dict[str, Any]]:
    """Return the meta of samples of a cache, see `TokenCache.meta`; {} for a filler (-1)."""
    metas: list[dict[str, Any]] = []
    for sample in samples:
        if sample >= 0:
            metas.append(cache.meta(sample))
        else:
            metas.append({})
    return metas


def read_labels(cache: TokenCache, samples: Sequence[int], labels: tuple[str, ...]) -> list[int]:
    """Return the number of each sample's class, IGNORE for a filler (-1)."""
    numbers = []
    for sample in samples:
        if sample >= 0:
            numbers.append(labels.index(cache.meta(sample)["label"]))
        else:
            numbers.append(IGNORE)
    return numbers


def row_width(row: Sequence[Segment] | None) -> int:
    """Return the tokens that a row takes in a batch; `row` is None for a filler."""
    if row is None:
        return FILLER_WIDTH
    return sum(len(tokens) for tokens, _ in row)


def collate(rows: Sequence[Sequence[Segment] | None], pad_id: int, width: int | None) -> TokenBatch:
    """Return a batch of rows of segments, padded to one width.

    Args:
        rows: the segments of each row. None is a filler: a row of padding without a target, which
            completes the last batch if too few samples are left.
        pad_id: the padding token.
        width: tokens of each row of the batch; None: those of the longest row.
    """
    assert rows, "a batch has rows"
    widths = [row_width(row) for row in rows]
    longest = max(widths)
    if width is None:
        width = longest
    assert longest <= width, f"a row of {longest} tokens does not fit a batch of width {width}"
    ids = np.full((len(rows), width), pad_id, np.int64)
    targets = np.full((len(rows), width), IGNORE, np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
    lengths = np.zeros(len(rows), np.int64)
    document_lengths = []
    for index, row in enumerate(rows):
        segments = row or ()
        start = 0
        for tokens, learn in segments:
            stop = start + len(tokens)
            ids[index, start:stop] = tokens
            # The last token of a segment has no target: what follows is another document.
            next_tokens = tokens[1:].astype(np.int64)
            targets[index, start : stop - 1] = np.where(learn[1:] != 0, next_tokens, IGNORE)
            # Up to the end of the row: padding continues the positions of the last segment.
            positions[index, start:] = np.arange(width - start)
            start = stop
        lengths[index] = start
        document_lengths.append(_nonzero_lengths(tokens for tokens, _ in segments))
    target_indices = np.flatnonzero(targets != IGNORE)
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        len(target_indices),
        lengths_B=torch.from_numpy(lengths),
        document_lengths=tuple(document_lengths),
        cu_seqlens_N=cumulative_lengths(document_lengths, width),
        learned_M=torch.from_numpy(target_indices),
        learned_on_host_M=target_indices,
    )


def cumulative_lengths(document_lengths: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return `TokenBatch.cu_seqlens_N` of rows of `width` tokens.

    `document_lengths`: see `TokenBatch`.
    """
    sizes = [0]
    for row in document_lengths:
        padding = width - sum(row)
        # A row without padding has no empty segment at its end.
        sizes += [size for size in (*row, padding) if size]
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def learned_segment(tokens: int) -> Segment:
    """Return a segment of placeholder tokens, all of them targets."""
    return np.ones(tokens, np.uint32), np.ones(tokens, np.uint8)


@dataclass(frozen=True)
class PairBatch(TokenBatch):
    """A TokenBatch whose row p is the chosen side of a pair and row P + p its rejected one.

    Targets are the answers' tokens.

    Attributes:
        real_P: fp32, 1 for a pair, 0 for a filler, which weighs nothing.
        samples_P: int64, numbers of the pairs in their cache, -1 for fillers.
        margin_P: fp32, NaN without a margin in the data.
        reference_B: fp64, log-probability of each answer under the reference model; None until it
            is known.
        weight: the number of real pairs.
    """

    real_P: torch.Tensor
    samples_P: torch.Tensor
    margin_P: torch.Tensor
    reference_B: torch.Tensor | None = None

    weigh = staticmethod(Batch.weigh)

    def token_weights(self) -> torch.Tensor:
        """Return fp32[B, T]: a half at the last token of each answer, and 0 elsewhere.

        So the weights of a pair add up to 1, and those of a filler to 0. Only the load-balancing
        loss of a mixture (`models.router`) reads them. The objective reads all targets of an
        answer.
        """
        last_BT = self.position_ids_BT == self.last_B[:, None]
        real_B1 = self.real_P.repeat(2)[:, None]
        return last_BT * real_B1 / 2


def collate_pairs(
    cache: TokenCache, samples: Sequence[int], pad_id: int, width: int | None
) -> PairBatch:
    """Return the pairs of `samples` in a cache (-1: a filler), padded to `width` tokens a side.

    Without a `width` they are padded to the longest side.
    """
    pairs = read_segments(cache, samples)
    metas = read_metas(cache, samples)
    return pair_batch(pairs, samples, metas, pad_id, width)


def pair_batch(
    pairs: Sequence[Sequence[Segment] | None],
    samples: Sequence[int],
    metas: Sequence[dict[str, Any]],
    pad_id: int,
    width: int | None,
) -> PairBatch:
    """Return a batch of preference pairs.

    Args:
        pairs: the chosen and the rejected segment of each pair; None for a filler.
        samples: the number of each pair in its cache, -1 for a filler.
        metas: the further values of each pair, which may have a margin.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest side.
    """
    rows = pair_rows(pairs)
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    # With a fixed width prompts are not shared: compiled blocks and pipeline stages need one shape.
    if width is None:
        parts: list[Parts | None] = []
        for row in rows:
            if row is None:
                parts.append(None)
            else:
                parts.append(_split_at_answer(row[0]))
        own_width = fields["input_ids_BT"].shape[1]
        fields["shared"] = shared_prompts(parts, pad_id, own_width)
    is_real = [pair is not None for pair in pairs]
    margins = [meta.get("margin", math.nan) for meta in metas]
    fields["lengths_B"] = torch.tensor([row_width(row) for row in rows])
    fields["real_P"] = torch.tensor(is_real, dtype=torch.float32)
    fields["samples_P"] = torch.tensor(samples, dtype=torch.int64)
    fields["weight"] = sum(is_real)
    fields["margin_P"] = torch.tensor(margins, dtype=torch.float32)
    return PairBatch(**fields)


def pair_rows(pairs: Sequence[Sequence[Segment] | None]) -> list[Sequence[Segment] | None]:
    """Return the rows of a batch of pairs: the chosen sides, then the rejected ones.

    `pairs`: the two segments of each pair; None for a filler, which has two rows, too.
    """
    chosen, rejected = split_sides(pairs)
    return chosen + rejected


def split_sides(
    samples: Sequence[Sequence[Segment] | None],
) -> tuple[list[Sequence[Segment] | None], list[Sequence[Segment] | None]]:
    """Return the first and the second segments of samples of two, each as a row of its own.

    `samples`: None for a filler, which is None in both.
    """
    first: list[Sequence[Segment] | None] = []
    second: list[Sequence[Segment] | None] = []
    for sample in samples:
        if sample is None:
            first.append(None)
            second.append(None)
        else:
            first.append(sample[:1])
            second.append(sample[1:2])
    return first, second


def _split_at_answer(segment: Segment) -> Parts:
    """Return a segment's tokens before its first target, at least one, and those from it on."""
    tokens, learn = segment
    first_target = max(1, int(np.argmax(learn)))
    return Parts(tokens[:first_target], tokens[first_target:])


def placeholder_pairs(rows: int, length: int) -> PairBatch:
    """Return a placeholder batch of pairs, which measurements of memory and speed run on.

    Each of the `rows` sides has `length` tokens, all of them targets. The log-probabilities of the
    reference are 0.
    """
    segment = learned_segment(length)
    count = rows // 2
    pairs = [[segment, segment]] * count
    metas: list[dict[str, Any]] = [{}] * count
    batch = pair_batch(pairs, range(count), metas, 0, length)
    return replace(batch, reference_B=torch.zeros(rows, dtype=torch.float64))


@dataclass(frozen=True)
class WholeTextBatch(TokenBatch):
    """A TokenBatch of texts that are read as a whole, without targets. A filler counts as one token.

    Attributes:
        attention_mask_BT: int64, for bidirectional models; None for others, which get positions.
            The first token of a filler is in the mask, since attention to no token is NaN.
        position_ids_BT: they count from the model's first position on, in padding too.
    """

    attention_mask_BT: torch.Tensor | None

    weigh = staticmethod(Batch.weigh)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model.

        A bidirectional model counts positions by itself (RoBERTa does not start at 0).
        """
        if self.attention_mask_BT is None:
            return super().inputs()
        return {"input_ids": self.input_ids_BT, "attention_mask": self.attention_mask_BT}


def collate_whole_texts(
    plan: Plan, rows: Sequence[Sequence[Segment] | None], pad_id: int, width: int | None
) -> dict[str, Any]:
    """Return the fields of a `WholeTextBatch` by name. Its weight is still that of targets, 0.

    Arguments as those of `collate`.
    """
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    lengths_B = fields["lengths_B"].clamp(min=1)
    # A text is one segment, so its positions are its columns.
    columns_BT = fields["position_ids_BT"]
    fields["attention_mask_BT"] = None
    if plan.bidirectional:
        fields["attention_mask_BT"] = (columns_BT < lengths_B[:, None]).long()
    fields["lengths_B"] = lengths_B
    fields["position_ids_BT"] = columns_BT + plan.first_position
    return fields


@dataclass(frozen=True)
class LabelledBatch(WholeTextBatch):
    """A batch of texts with a class each.

    Attributes:
        labels_B: int64, IGNORE for a filler.
        weight: rows with a class.
    """

    labels_B: torch.Tensor


def collate_labelled_texts(
    plan: Plan, cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None
) -> LabelledBatch:
    """Return the texts of sample ids (-1: a filler), padded to `width` tokens.

    Without a `width` they are padded to the longest text.
    """
    rows = read_segments(cache, ids)
    labels = read_labels(cache, ids, plan.labels)
    return _labelled_batch(plan, rows, labels, pad_id, width)


def _labelled_batch(
    plan: Plan,
    rows: Sequence[Sequence[Segment] | None],
    labels: list[int],
    pad_id: int,
    width: int | None,
) -> LabelledBatch:
    """Return the batch of texts whose classes have the numbers `labels`."""
    fields = collate_whole_texts(plan, rows, pad_id, width)
    fields["weight"] = sum(label != IGNORE for label in labels)
    return LabelledBatch(**fields, labels_B=torch.tensor(labels))


def placeholder_labelled_texts(plan: Plan, rows: int, length: int) -> LabelledBatch:
    """Return a placeholder batch of `rows` texts with `length` tokens, all of the first class."""
    texts = [[learned_segment(length)]] * rows
    return _labelled_batch(plan, texts, [0] * rows, 0, length)


class EpisodeTurn(NamedTuple):
    """A turn of the policy in an episode with an environment.

    Attributes:
        tokens: number of tokens that the policy sampled.
        reward: what the turn adds to the reward of the episode. For the last turn that includes all
            rewards that are of the whole episode.
    """

    tokens: int
    reward: float


@dataclass(frozen=True)
class Episodes:
    """All episodes of a rollout, the same on every rank.

    The tensors are on the host. Those with a number for each token of a completion are fp32, and 0
    outside of the mask.

    Attributes:
        prompts: the tokens of each prompt.
        completions: the tokens of each completion.
        mask_NM: bool, true for the tokens of the completions that the policy has sampled. Between
            them may be those of an environment. Of a row's own completion: its targets.
        log_probs_NM: log-probabilities of the tokens under the policy that sampled them, computed
            by the engine.
        sampler_log_probs_NM: the same log-probabilities, computed by the generator; NaN for a row's own
            completion.
        reference_log_probs_NM: log-probabilities under the reference model.
        values_NM: predictions of the value model.
        advantages_NM: advantages.
        returns_NM: returns, which a value model learns to predict.
        weights_NM: weights of the tokens in the loss.
        weight_N: weights of the episodes in the denominator of the loss.
        ended_N: bool, true if the completion was not cut before its end.
        images: the paths and grids of each prompt's images, see `data.image_rows`.
        sampled: `mask_NM` without its padding, by episode; None: all tokens were sampled.
        turns: the turns of each episode with an environment; empty if nobody has set them.
    """

    prompts: list[TokenIds]
    completions: list[TokenIds]
    mask_NM: torch.Tensor
    log_probs_NM: torch.Tensor
    sampler_log_probs_NM: torch.Tensor
    reference_log_probs_NM: torch.Tensor
    values_NM: torch.Tensor
    advantages_NM: torch.Tensor
    returns_NM: torch.Tensor
    weights_NM: torch.Tensor
    weight_N: torch.Tensor
    ended_N: torch.Tensor
    images: Sequence[PromptImageMeta]
    sampled: Sequence[Sequence[bool]] | None
    turns: Sequence[Sequence[EpisodeTurn]] = ()

    @classmethod
    def start(
        cls,
        prompts: Sequence[TokenIds],
        completions: Sequence[TokenIds],
        ended: Sequence[bool] | None = None,
        images: Sequence[PromptImageMeta] | None = None,
        sampled: Sequence[Sequence[bool]] | None = None,
    ) -> Episodes:
        """Return episodes of which only the tokens are known; their numbers are 0.

        Args:
            prompts: tokens, at least one of each prompt.
            completions: tokens, perhaps none.
            ended: whether each completion was not cut before its end; None: all were not.
            images: the images of each prompt; None: no prompt has any.
            sampled: whether the policy has sampled each token of each completion; None: all.
        """
        assert len(prompts) == len(completions) and all(len(prompt) for prompt in prompts)
        count = len(completions)
        if ended is None:
            ended = [True] * count
        lengths_N = torch.tensor([len(tokens) for tokens in completions])
        # At least one column, also if all completions are empty.
        longest = max(1, int(lengths_N.max()))
        columns_M = torch.arange(longest)
        mask_NM = columns_M < lengths_N[:, None]
        for row, flags in enumerate(sampled or []):
            mask_NM[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool)
        zeros: dict[str, Any] = {}
        for name in _EPISODE_FIELDS.values():
            zeros[name] = torch.zeros(mask_NM.shape)
        return cls(
            list(prompts),
            list(completions),
            mask_NM,
            weight_N=torch.zeros(count),
            ended_N=torch.tensor(list(ended)),
            images=images or [{}] * count,
            sampled=sampled,
            **zeros,
        )

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and completion together, int64[N]."""
        lengths = []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            lengths.append(len(prompt) + len(completion))
        return np.asarray(lengths, np.int64)

    def add_loss_weights(
        self,
        normalize: Literal["sequence", "token", "constant"],
        constant: int,
        is_trained_N: torch.Tensor,
    ) -> Episodes:
        """Return the episodes with the weights of one way to normalise the loss.

        The loss is Σ weight · token loss / Σ weight_N, however a batch is cut into micro-batches.
        An episode without tokens counts as an episode of loss 0.

        Args:
            normalize: sequence: the mean over episodes of the mean over their tokens (GRPO, Shao et
                al. 2024). token: the mean over all tokens (DAPO, Yu et al. 2025). constant: the sum
                over tokens / (episodes × `constant`) (Dr. GRPO, Liu et al. 2025).
            constant: for the last of these, such as the maximum length of a completion.
            is_trained_N: bool, true for the episodes that are trained on; the others have weight 0.
        """
        mask_NM = (self.mask_NM & is_trained_N[:, None]).float()
        lengths_N = mask_NM.sum(1)
        if normalize == "token":
            return replace(self, weights_NM=mask_NM, weight_N=lengths_N)
        if normalize == "sequence":
            # At least 1: an episode without tokens has only weights of 0, which stay 0.
            divisor_N1 = lengths_N.clamp(min=1)[:, None]
        else:
            divisor_N1 = torch.tensor(float(constant))
        return replace(self, weights_NM=mask_NM / divisor_N1, weight_N=is_trained_N.float())


@dataclass(frozen=True)
class EpisodeBatch(TokenBatch):
    """A TokenBatch whose rows are a prompt and its completion, padded on the right.

    The further fields are fp32[B, T], the numbers of `Episodes`. As in `targets_BT`, the number of
    a token stands one column to the left, where the token is predicted. Outside of completions
    targets are IGNORE and numbers are 0.
    """

    old_log_probs_BT: torch.Tensor
    sampler_log_probs_BT: torch.Tensor
    reference_log_probs_BT: torch.Tensor
    old_values_BT: torch.Tensor
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor
    weights_BT: torch.Tensor

    def token_weights(self) -> torch.Tensor:
        """Return [B, T]: the weight of each token in the loss."""
        return self.weights_BT


def collate_episodes(
    episodes: Episodes, picks: Sequence[int], pad_id: int, width: int | None
) -> EpisodeBatch:
    """Return a batch of some episodes, padded to one width.

    Args:
        episodes: all episodes of a rollout.
        picks: the indices of those of the batch; -1 is a filler of weight 0.
        pad_id: the padding token.
        width: tokens of each row; None: those of the longest episode.
    """
    parts: list[Parts | None] = []
    lengths: list[int] = []
    weight = 0.0
    for pick in picks:
        if pick < 0:
            parts.append(None)
            lengths.append(FILLER_WIDTH)
        else:
            prompt = episodes.prompts[pick]
            completion = episodes.completions[pick]
            parts.append(Parts(prompt, completion))
            lengths.append(len(prompt) + len(completion))
            weight += float(episodes.weight_N[pick])
    rows = episode_rows(episodes, picks)
    shares_prompts = width is None
    if width is None:
        width = max(FILLER_WIDTH, *lengths)
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    fields["lengths_B"] = torch.tensor(lengths)
    fields["weight"] = weight
    if shares_prompts:
        fields["shared"] = shared_prompts(parts, pad_id, width)
    for name in _EPISODE_FIELDS:
        fields[name] = torch.zeros(len(picks), width)
    for row, (pick, each) in enumerate(zip(picks, parts, strict=True)):
        if each is not None:
            size = len(each.completion)
            # A number stands where its token is predicted, one place before the token.
            start = len(each.prompt) - 1
            for name, of_episodes in _EPISODE_FIELDS.items():
                numbers_M = getattr(episodes, of_episodes)[pick, :size]
                fields[name][row, start : start + size] = numbers_M
    return EpisodeBatch(**fields)


def episode_rows(episodes: Episodes, picks: Sequence[int]) -> list[Sequence[Segment] | None]:
    """Return the rows of some episodes, one segment each; None for a filler (-1)."""
    rows: list[Sequence[Segment] | None] = []
    for pick in picks:
        if pick < 0:
            rows.append(None)
        else:
            prompt = episodes.prompts[pick]
            completion = episodes.completions[pick]
            # The targets are the tokens that the policy has sampled.
            learn = np.zeros(len(prompt) + len(completion), np.uint8)
            if episodes.sampled is None:
                learn[len(prompt) :] = 1
            else:
                learn[len(prompt) :] = episodes.sampled[pick]
            rows.append([(np.concatenate([prompt, completion]), learn)])
    return rows


def placeholder_episodes(rows: int, length: int) -> EpisodeBatch:
    """Return a placeholder batch of episodes: prompts of one token, completions of `length` - 1."""
    prompts = [np.ones(1, np.int64)] * rows
    completions = [np.ones(length - 1, np.int64)] * rows
    episodes = Episodes.start(prompts, completions)
    return collate_episodes(episodes, range(rows), 0, length)
