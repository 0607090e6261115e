"""Sampling whose random numbers are a function of what is sampled, not of when or where: (seed, step, key, position of the token).

A token is the argmax of its logits plus Gumbel noise, which is an exact sample of softmax(logits) (Gumbel 1954; Maddison, Tarlow & Minka
2014). The noise of a vocabulary entry is SplitMix64 (Steele, Lea & Flood 2014) counted from a seed of its own, so it depends on no batch,
no order, no world size and no library's generator. What is left is rounding: a model's logits may differ in their last bits with the
batch they are computed in, and a near tie may then fall the other way. Measured on a tiny model, batches of 64 and of 7: in none of
23 thousand tokens in fp32, in one of 450 in bf16 (the completion goes another way from there on, just as likely).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from drumline.dist.seeds import derive

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # torch has no arithmetic on uint64; int64 wraps to the same bits
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 52  # of a uniform number: with a half added it is exact in fp64, and neither 0 nor 1


@dataclass(frozen=True)
class Request:
    """A prompt to complete. `tokens`: its ids. `key`: what fixes its random numbers, beside seed and step: (prompt id, sample index)."""

    tokens: list[int]
    key: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What was sampled. `tokens`: ids, with the one that ended it. `log_probs`: of each, log softmax(logits / temperature) in fp32, before
    top-k and top-p. `ended`: by an end token or a stop text; False: cut at max_new_tokens."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool


def request_seed(seed: int, step: int, key: tuple[int, ...]) -> int:
    """The 63-bit word that a request's random numbers are made of."""
    return derive(seed, "rollout", step, *key)


def gumbel(seeds_B: torch.Tensor, positions_B: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise fp32[B, vocab] for the tokens at `positions_B` of the requests with words `seeds_B` (both int64[B]).

    Integers and fp64, rounded at the end: the same on CPU and GPU, but for about one number in 10⁸ whose logarithms round apart.
    """
    starts_B = _mix(seeds_B + (positions_B + 1) * _GOLDEN)
    counts_V = torch.arange(1, vocab + 1, device=seeds_B.device) * _GOLDEN
    words_BV = _mix(starts_B[:, None] + counts_V)
    uniform_BV = _shift(words_BV, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS)
    return uniform_BV.log_().neg_().log_().neg_().float()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, in place on int64."""
    bits = bits.bitwise_xor_(_shift(bits, 30)).mul_(_FIRST)
    bits = bits.bitwise_xor_(_shift(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(_shift(bits, 31))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: int64's own shift copies the sign."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


class Sampler:
    """Temperature, then top-k, then top-p (as transformers and vLLM order them), then the noise. `top_k` 1 is greedy decoding."""

    def __init__(self, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self.temperature = temperature
        self.warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k else []
        self.warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def choose(self, logits_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores fp32[B, V] whose argmax is the sample, log-probs fp32[B] of those samples)."""
        scores_BV = logits_BV.float() / self.temperature
        kept_BV = scores_BV
        for warper in self.warpers:
            kept_BV = warper(None, kept_BV)
        noisy_BV = kept_BV + gumbel(seeds_B, positions_B, scores_BV.shape[1])
        chosen_B1 = noisy_BV.argmax(-1, keepdim=True)
        log_probs_B = (scores_BV.gather(1, chosen_B1) - scores_BV.logsumexp(-1, keepdim=True)).squeeze(1)
        return noisy_BV, log_probs_B


class NoisyLogits(LogitsProcessor):
    """A Sampler for one call of `generate`, which decodes greedily what this returns. `log_probs`: fp32[B] of each step so far."""

    supports_continuous_batching = False

    def __init__(self, sampler: Sampler, seeds_B: torch.Tensor, prompt_width: int) -> None:
        self.sampler, self.seeds_B, self.prompt_width = sampler, seeds_B, prompt_width
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self.prompt_width
        noisy_BV, log_probs_B = self.sampler.choose(scores, self.seeds_B, torch.full_like(self.seeds_B, position))
        self.log_probs.append(log_probs_B)
        return noisy_BV


class Endings:
    """What ends a completion: any of `token_ids`, or a text of `stop` in what was generated (it may begin and end within a token)."""

    def __init__(self, token_ids: frozenset[int], stop: tuple[str, ...], tokenizer: Any) -> None:
        self.token_ids, self.stop, self.tokenizer = token_ids, stop, tokenizer
        # A token holds a byte at least; the rest covers one cut letter at the start, and decoders that drop a leading space.
        self.tail = max((len(text.encode()) for text in stop), default=0) + 8

    def after(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens`, what was generated so far, is the end."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(tokens[-self.tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self.stop)


class AtEndings(StoppingCriteria):
    """Endings for one call of `generate`. `lengths`: tokens of each row's completion, None while it goes on."""

    def __init__(self, endings: Endings, rows: int, prompt_width: int) -> None:
        self.endings, self.prompt_width = endings, prompt_width
        self.lengths: list[int | None] = [None] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids[:, self.prompt_width :]
        for row, tail in enumerate(new[:, -self.endings.tail :].tolist()):
            if self.lengths[row] is None and self.endings.after(tail):
                self.lengths[row] = new.shape[1]
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)
