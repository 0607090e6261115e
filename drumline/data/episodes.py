"""Episodes of a rollout, and their micro-batches. N episodes, M tokens of the longest completion; B rows, T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from drumline.data.batches import FILLER_WIDTH, TokenBatch, collate

Tokens = npt.NDArray[np.int64]


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
    def start(cls, prompts: Sequence[Tokens], completions: Sequence[Tokens], ended: Sequence[bool] | None = None) -> Episodes:
        """Episodes with tokens alone; numbers are 0. `ended` None: all. A prompt has at least one token, a completion may have none."""
        assert len(prompts) == len(completions) and all(len(prompt) for prompt in prompts)
        lengths_N = torch.tensor([len(tokens) for tokens in completions])
        mask_NM = torch.arange(max(1, int(lengths_N.max()))) < lengths_N[:, None]
        zeros = {name: torch.zeros(mask_NM.shape) for name in _NUMBERS.values()}
        ended_N = torch.tensor([True] * len(completions) if ended is None else list(ended))
        return cls(list(prompts), list(completions), mask_NM, weight_N=torch.zeros(len(completions)), ended_N=ended_N, **zeros)

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and completion together, int64[N]."""
        return np.asarray([len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)], np.int64)

    def weighted(self, normalize: Literal["sequence", "token", "constant"], constant: int, counts_N: torch.Tensor) -> Episodes:
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
        divisor_N1 = lengths_N.clamp(min=1)[:, None] if normalize == "sequence" else torch.tensor(float(constant))
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


def collate_episodes(episodes: Episodes, picks: Sequence[int], pad_id: int, width: int | None) -> EpisodeBatch:
    """A batch of the episodes with indices `picks` (-1: a filler of weight 0), padded to `width` tokens; None: to the longest."""
    lengths = [FILLER_WIDTH if pick < 0 else len(episodes.prompts[pick]) + len(episodes.completions[pick]) for pick in picks]
    width = max(FILLER_WIDTH, *lengths) if width is None else width
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
    fields: dict[str, Any] = vars(collate(rows, pad_id, width)) | {"lengths_B": torch.tensor(lengths)}
    fields["weight"] = sum((float(episodes.weight_N[pick]) for pick in picks if pick >= 0), 0.0)
    return EpisodeBatch(**fields, **spread)


def learned_episodes(rows: int, length: int) -> EpisodeBatch:
    """A batch of completions of length - 1 tokens, each behind a prompt of one."""
    episodes = Episodes.start([np.ones(1, np.int64)] * rows, [np.ones(length - 1, np.int64)] * rows)
    return collate_episodes(episodes, range(rows), 0, length)


# Field of a batch → field of the episodes.
_NUMBERS = {name: name.removeprefix("old_").replace("_BT", "_NM") for name in EpisodeBatch.__annotations__}
