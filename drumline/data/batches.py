"""Token batches: rows of segments, padded to one width; texts with a class; episodes of a rollout, and their micro-batches.

B rows, T tokens. For preference pairs: P pairs, B = 2P rows, first those of the chosen answers, then those of the rejected ones. For
rollouts: N episodes, M tokens of the longest completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from drumline.core.plan import Plan
from drumline.data.cache import Segment, TokenCache

Tokens = npt.NDArray[np.int64]
Parts = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # tokens of a prompt, and of what follows it
IGNORE = -100  # a target that carries no loss, as torch's cross_entropy has it
FILLER_WIDTH = 2


@dataclass(frozen=True)
class First:
    """The numbers of `Algorithm.first_pass` for all N samples of a global batch (held out: of the whole set), fp64[N, K], in its order."""

    numbers_NK: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """The base of micro-batches. Each has a `weight`: its part of the denominator of the loss. For an objective with a first pass: `first`,
    and `places_P` int64, the rows of this batch's samples in it, -1 for fillers."""

    first: First | None = field(default=None, kw_only=True)
    places_P: torch.Tensor | None = field(default=None, kw_only=True)

    @staticmethod
    def weigh(cache: TokenCache, samples: npt.NDArray[np.int64]) -> float:
        """The weight of a batch of these samples of a cache, without collating it."""
        return float(len(samples))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The batch with every tensor changed."""
        changed: dict[str, Any] = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        changed |= {
            name: value.each(change)
            for name, value in vars(self).items()
            if isinstance(value, Batch)
        }
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        """The batch on `device`; copies to a GPU do not block the host."""
        on_gpu = torch.device(device).type == "cuda"
        return self.each(
            lambda tensor: (pinned(tensor) if on_gpu else tensor).to(device, non_blocking=on_gpu)
        )


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host in page-locked memory, from which a copy to a GPU does not block the host."""
    return tensor if tensor.is_cuda else tensor.pin_memory()


@dataclass(frozen=True)
class SharedPrompts(Batch):
    """The tokens of a batch whose rows have prompts in common, each prompt once: R rows of W tokens, a prompt and behind it its
    completions, each of which sees itself and the prompt. So fewer tokens give the same numbers. `places_BT` int64: where each token of
    the batch stands in all R × W; for padding anywhere."""

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    documents: tuple[tuple[int, ...], ...]
    bounds_N: torch.Tensor
    places_BT: torch.Tensor
    branches: ClassVar[bool] = True

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT}


def shared_prompts(rows: Sequence[Parts | None], pad_id: int, width: int) -> SharedPrompts | None:
    """Of rows of a prompt and a completion, `width` tokens wide (None: a filler). None where no two have the same prompt."""
    groups: dict[bytes, list[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]] = {}
    for row, parts in enumerate(rows):
        if parts is not None:
            groups.setdefault(parts[0].tobytes(), []).append((row, *parts))
    if all(len(group) == 1 for group in groups.values()):
        return None
    lines = [
        [group[0][1], *(completion for _, _, completion in group)] for group in groups.values()
    ]
    wide = max(sum(map(len, line)) for line in lines)
    ids, positions = (
        np.full((len(lines), wide), pad_id, np.int64),
        np.zeros((len(lines), wide), np.int64),
    )
    places = np.zeros((len(rows), width), np.int64)
    for index, (line, group) in enumerate(zip(lines, groups.values(), strict=True)):
        start = prompt = len(line[0])
        ids[index, : sum(map(len, line))] = np.concatenate(line)
        positions[index, :prompt] = np.arange(prompt)
        for row, _, completion in group:
            stop, length = start + len(completion), prompt + len(completion)
            positions[index, start:stop] = np.arange(prompt, length)
            places[row, :length] = index * wide + np.concatenate(
                (np.arange(prompt), np.arange(start, stop))
            )
            start = stop
    documents = tuple(tuple(len(part) for part in line if len(part)) for line in lines)
    ids_BT, positions_BT, places_BT = map(torch.from_numpy, (ids, positions, places))
    return SharedPrompts(ids_BT, positions_BT, documents, bounds(documents, wide), places_BT)


@dataclass(frozen=True)
class TokenBatch(Batch):
    """One micro-batch; all tensors int64 [B, T].

    `targets_BT` is shifted: the token that follows, or IGNORE for a token without loss, at the end of a segment and in padding.
    `position_ids_BT` restarts at 0 in each segment, and attention must not cross a restart. There is no attention mask: padding is on the
    right, where causal attention hides it from real tokens. Its positions continue those of the last segment, so that rows of a batch
    without packing are 0, 1, 2, … `weight`: the number of targets. `lengths_B`: int64, tokens of each row without padding.

    What the host would have to wait for a device to count, it counts here: `documents`, the lengths of each row's segments; `bounds_N`
    int32, where they begin in all rows end to end, padding as a segment of its own, B × T last; `learned_M` int64, the places of targets
    in them. None: not known. `learned_on_host_M`: the same numbers, on the host wherever the batch is, for who cuts the batch.
    `shared`: the same tokens, where rows have prompts in common.
    """

    input_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    weight: float
    lengths_B: Any = field(default=None, kw_only=True)
    documents: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    bounds_N: torch.Tensor | None = field(default=None, kw_only=True)
    learned_M: torch.Tensor | None = field(default=None, kw_only=True)
    learned_on_host_M: Tokens | None = field(default=None, kw_only=True)
    shared: SharedPrompts | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.lengths_B is None:  # nothing is padding
            object.__setattr__(
                self,
                "lengths_B",
                torch.full_like(self.input_ids_BT[:, 0], self.input_ids_BT.shape[1]),
            )

    @staticmethod
    def weigh(cache: TokenCache, samples: npt.NDArray[np.int64]) -> float:
        return float(cache.learned[samples].sum())

    @property
    def last_B(self) -> torch.Tensor:  # noqa: N802 - as the fields of batches are called
        """int64: place of each row's last token."""
        return self.lengths_B - 1

    def token_weights(self) -> torch.Tensor:
        """[B, T]: the weight of each token in the loss."""
        return self.targets_BT != IGNORE

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a model."""
        return {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT}


def collate(rows: Sequence[Sequence[Segment] | None], pad_id: int, width: int | None) -> TokenBatch:
    """A batch of rows of segments, padded with `pad_id` to `width` tokens; None: to the longest row. A row that is None is a filler, all
    padding without a target: it takes a place of the last batch that no sample is left for."""
    assert rows, "a batch has rows"
    lengths = [
        FILLER_WIDTH if row is None else sum(len(tokens) for tokens, _ in row) for row in rows
    ]
    width = max(lengths) if width is None else width
    assert max(lengths) <= width, (
        f"a row of {max(lengths)} tokens does not fit a batch of width {width}"
    )
    ids = np.full((len(rows), width), pad_id, np.int64)
    targets = np.full((len(rows), width), IGNORE, np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
    for index, row in enumerate(rows):
        start = 0
        for tokens, learn in row or ():
            stop = start + len(tokens)
            ids[index, start:stop] = tokens
            targets[index, start : stop - 1] = np.where(
                learn[1:] != 0, tokens[1:].astype(np.int64), IGNORE
            )
            positions[index, start:] = np.arange(width - start)
            start = stop
    real = torch.tensor(
        [0 if row is None else length for row, length in zip(rows, lengths, strict=True)]
    )
    learned = np.flatnonzero(targets != IGNORE)
    documents = tuple(tuple(len(tokens) for tokens, _ in row or () if len(tokens)) for row in rows)
    known: dict[str, Any] = {
        "lengths_B": real,
        "documents": documents,
        "bounds_N": bounds(documents, width),
        "learned_M": torch.from_numpy(learned),
        "learned_on_host_M": learned,
    }
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        len(learned),
        **known,
    )


def bounds(documents: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """`TokenBatch.bounds_N` of rows of `width` tokens."""
    sizes = [size for row in documents for size in (*row, width - sum(row)) if size]
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def learned_segment(tokens: int) -> Segment:
    """A document of so many tokens, all of them targets."""
    return np.ones(tokens, np.uint32), np.ones(tokens, np.uint8)


@dataclass(frozen=True)
class PairBatch(TokenBatch):
    """A TokenBatch whose row p is the chosen side of a pair and row P + p its rejected one. Targets are the answers' tokens. `real_P`:
    fp32, 1 for a pair, 0 for a filler, which weighs nothing. `margin_P`: fp32, NaN without a margin in the data. `reference_B`: fp64,
    log-probability of each answer under the reference model; None until it is known. `samples_P`: int64, numbers of the pairs in their
    cache, −1 for fillers. `weight`: the number of real pairs."""

    real_P: torch.Tensor
    samples_P: torch.Tensor
    margin_P: torch.Tensor
    reference_B: torch.Tensor | None = None

    weigh = staticmethod(Batch.weigh)

    def token_weights(self) -> torch.Tensor:
        """[B, T]: they add up to a half for each answer, and to 1 for a pair."""
        last_BT = self.position_ids_BT == self.last_B[:, None]
        return last_BT * self.real_P.repeat(2)[:, None] / 2


def collate_pairs(
    cache: TokenCache, samples: Sequence[int], pad_id: int, width: int | None
) -> PairBatch:
    """The pairs of `samples` in a cache (−1: a filler), padded to `width` tokens a side; None: to the longest side."""
    pairs = [cache.segments(sample) if sample >= 0 else None for sample in samples]
    metas = [cache.meta(sample) if sample >= 0 else {} for sample in samples]
    return pair_batch(pairs, samples, metas, pad_id, width)


def pair_batch(
    pairs: Sequence[Sequence[Segment] | None],
    samples: Sequence[int],
    metas: Sequence[dict[str, Any]],
    pad_id: int,
    width: int | None,
) -> PairBatch:
    """A batch of the chosen and the rejected segment of each pair; None for a filler."""
    rows = [None if pair is None else pair[side : side + 1] for side in (0, 1) for pair in pairs]
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    if width is None:
        parted = [None if row is None else _parted(*row[0]) for row in rows]
        fields["shared"] = shared_prompts(parted, pad_id, fields["input_ids_BT"].shape[1])
    fields["lengths_B"] = torch.tensor(
        [FILLER_WIDTH if row is None else len(row[0][0]) for row in rows]
    )
    fields["real_P"] = torch.tensor([float(pair is not None) for pair in pairs])
    fields["samples_P"] = torch.tensor(samples, dtype=torch.int64)
    fields["weight"] = sum(pair is not None for pair in pairs)
    fields["margin_P"] = torch.tensor(
        [meta.get("margin", math.nan) for meta in metas], dtype=torch.float32
    )
    return PairBatch(**fields)


def _parted(tokens: npt.NDArray[Any], learn: npt.NDArray[Any]) -> Parts:
    """What stands before the first target, and the rest."""
    first = max(1, int(np.argmax(learn)))
    return tokens[:first], tokens[first:]


def learned_pairs(rows: int, length: int) -> PairBatch:
    """Pairs of rows with `length` tokens, all targets; the log-probabilities of the reference are 0."""
    segment, pairs = learned_segment(length), rows // 2
    batch = pair_batch([[segment, segment]] * pairs, range(pairs), [{}] * pairs, 0, length)
    return replace(batch, reference_B=torch.zeros(rows, dtype=torch.float64))


@dataclass(frozen=True)
class LabelledBatch(TokenBatch):
    """A TokenBatch of texts, without targets. `labels_B` int64, IGNORE for a filler, which counts as one token. `attention_mask_BT` int64
    is for bidirectional models; it has a filler's first token, since attention to no token is NaN. Other models get positions instead.
    `position_ids_BT` count from the model's first position on, padding included. `weight`: rows with a class."""

    labels_B: torch.Tensor
    attention_mask_BT: torch.Tensor | None

    weigh = staticmethod(Batch.weigh)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a model. A bidirectional one counts positions by itself (RoBERTa does not start at 0)."""
        if self.attention_mask_BT is None:
            return super().inputs()
        return {"input_ids": self.input_ids_BT, "attention_mask": self.attention_mask_BT}


def collate_texts(
    plan: Plan, cache: TokenCache, ids: Sequence[int], pad_id: int, width: int | None
) -> LabelledBatch:
    """The texts of sample ids (-1: a filler), padded to `width` tokens; None: to the longest text."""
    rows = [cache.segments(sample) if sample >= 0 else None for sample in ids]
    return _texts(plan, rows, labels_of(cache, ids, plan.labels), pad_id, width)


def labels_of(cache: TokenCache, ids: Sequence[int], labels: tuple[str, ...]) -> list[int]:
    """The number of each sample's class, IGNORE for a filler."""
    return [labels.index(cache.meta(sample)["label"]) if sample >= 0 else IGNORE for sample in ids]


def _texts(
    plan: Plan,
    rows: Sequence[Sequence[Segment] | None],
    labels: list[int],
    pad_id: int,
    width: int | None,
) -> LabelledBatch:
    fields: dict[str, Any] = vars(collate(rows, pad_id, width))
    lengths_B, places_BT = fields["lengths_B"].clamp(min=1), fields["position_ids_BT"]
    mask_BT = (places_BT < lengths_B[:, None]).long() if plan.bidirectional else None
    fields |= {"lengths_B": lengths_B, "position_ids_BT": places_BT + plan.first_position}
    fields["weight"] = sum(label != IGNORE for label in labels)
    return LabelledBatch(**fields, labels_B=torch.tensor(labels), attention_mask_BT=mask_BT)


def labelled_texts(plan: Plan, rows: int, length: int) -> LabelledBatch:
    """Texts of `length` tokens, all of the first class."""
    return _texts(plan, [[learned_segment(length)]] * rows, [0] * rows, 0, length)


@dataclass(frozen=True)
class Episodes:
    """All episodes of a rollout, the same on every rank. `mask_NM` bool: the tokens of the completions. The other tensors are fp32 on the
    host, and 0 outside of the mask: `log_probs` (of the policy that sampled, by the engine) and `sampler_log_probs` (by the generator),
    `reference`, `values`, `advantages`, `returns`; `weights_NM`: of a token in the loss; `weight_N`: of an episode in the denominator of
    the loss. `ended_N` bool: the completion was not cut before its end."""

    prompts: list[Tokens]
    completions: list[Tokens]
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

    @classmethod
    def start(
        cls,
        prompts: Sequence[Tokens],
        completions: Sequence[Tokens],
        ended: Sequence[bool] | None = None,
    ) -> Episodes:
        """Episodes with tokens alone; numbers are 0. `ended` None: all. A prompt has at least one token, a completion may have none."""
        assert len(prompts) == len(completions) and all(len(prompt) for prompt in prompts)
        lengths_N = torch.tensor([len(tokens) for tokens in completions])
        mask_NM = torch.arange(max(1, int(lengths_N.max()))) < lengths_N[:, None]
        zeros = {name: torch.zeros(mask_NM.shape) for name in _NUMBERS.values()}
        ended_N = torch.tensor([True] * len(completions) if ended is None else list(ended))
        return cls(
            list(prompts),
            list(completions),
            mask_NM,
            weight_N=torch.zeros(len(completions)),
            ended_N=ended_N,
            **zeros,
        )

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and completion together, int64[N]."""
        return np.asarray(
            [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)], np.int64
        )

    def weighted(
        self,
        normalize: Literal["sequence", "token", "constant"],
        constant: int,
        counts_N: torch.Tensor,
    ) -> Episodes:
        """The episodes with weights such that Σ weight · loss / Σ weight_N, for any micro-batches, is

        sequence: the mean over episodes of the mean over their tokens (GRPO, Shao et al. 2024);
        token: the mean over all tokens (DAPO, Yu et al. 2025);
        constant: Σ over tokens / (episodes × `constant`) (Dr. GRPO, Liu et al. 2025, where it is the maximum length of a completion).

        `counts_N` bool: the episodes that are trained on; the others weigh nothing. One without tokens counts as an episode of loss 0.
        """
        mask_NM = (self.mask_NM & counts_N[:, None]).float()
        lengths_N = mask_NM.sum(1)
        if normalize == "token":
            return replace(self, weights_NM=mask_NM, weight_N=lengths_N)
        divisor_N1 = (
            lengths_N.clamp(min=1)[:, None]
            if normalize == "sequence"
            else torch.tensor(float(constant))
        )
        return replace(self, weights_NM=mask_NM / divisor_N1, weight_N=counts_N.float())


@dataclass(frozen=True)
class EpisodeBatch(TokenBatch):
    """A TokenBatch whose rows are a prompt and its completion, padded on the right. The numbers are fp32[B, T]. A number of a token has the
    place where it is predicted, that of the token before it, as in `targets_BT`. For tokens outside of completions the target is IGNORE and
    the numbers are 0. `weights_BT`: of a token in the loss."""

    old_log_probs_BT: torch.Tensor
    sampler_log_probs_BT: torch.Tensor
    reference_log_probs_BT: torch.Tensor
    old_values_BT: torch.Tensor
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor
    weights_BT: torch.Tensor

    def token_weights(self) -> torch.Tensor:
        return self.weights_BT


def collate_episodes(
    episodes: Episodes, picks: Sequence[int], pad_id: int, width: int | None
) -> EpisodeBatch:
    """A batch of the episodes with indices `picks` (-1: a filler of weight 0), padded to `width` tokens; None: to the longest."""
    lengths = [
        FILLER_WIDTH if pick < 0 else len(episodes.prompts[pick]) + len(episodes.completions[pick])
        for pick in picks
    ]
    own_width, width = width is None, max(FILLER_WIDTH, *lengths) if width is None else width
    rows: list[Any] = [None] * len(picks)
    spread: dict[str, Any] = {name: torch.zeros(len(picks), width) for name in _NUMBERS}
    for row, pick in enumerate(picks):
        if pick < 0:
            continue
        prompt, completion = episodes.prompts[pick], episodes.completions[pick]
        start, size = len(prompt), len(completion)
        rows[row] = [(np.concatenate((prompt, completion)), np.arange(start + size) >= start)]
        for name, into in spread.items():
            into[row, start - 1 : start - 1 + size] = getattr(episodes, _NUMBERS[name])[pick, :size]
    fields: dict[str, Any] = vars(collate(rows, pad_id, width)) | {
        "lengths_B": torch.tensor(lengths)
    }
    fields["weight"] = sum((float(episodes.weight_N[pick]) for pick in picks if pick >= 0), 0.0)
    if own_width:
        pairs = [
            (episodes.prompts[pick], episodes.completions[pick]) if pick >= 0 else None
            for pick in picks
        ]
        fields["shared"] = shared_prompts(pairs, pad_id, width)
    return EpisodeBatch(**fields, **spread)


def learned_episodes(rows: int, length: int) -> EpisodeBatch:
    """A batch of completions of length - 1 tokens, each behind a prompt of one."""
    episodes = Episodes.start([np.ones(1, np.int64)] * rows, [np.ones(length - 1, np.int64)] * rows)
    return collate_episodes(episodes, range(rows), 0, length)


# Field of a batch → field of the episodes.
_NUMBERS = {
    name: name.removeprefix("old_").replace("_BT", "_NM") for name in EpisodeBatch.__annotations__
}
