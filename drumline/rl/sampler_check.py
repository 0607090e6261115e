"""Check that the generator has the policy's weights: both must give the same tokens the same log-probs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from drumline.config import rollouts as configs
from drumline.data.batches import Episodes
from drumline.dist.reduce import gather_from_ranks
from drumline.errors import TrainingStopped
from drumline.rl.build import probe_generators
from drumline.rl.generate import WHERE, Completion, Generator, Request, generate_together

# The number of prompts of a probe. With more ranks than this, each rank has one.
PROMPTS = 8
# The most tokens of a prompt, and of its completion.
PROMPT_TOKENS = 8
NEW_TOKENS = 4
# The first part of the key of a probe's request. The keys of a run's prompts begin with 0 or more.
PROBE = -1
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The largest logit that is expected, in nats.
LARGEST_LOGIT = 32.0
# The error of a matrix product's sum, in units of one rounding: √n for n = 4096 terms.
SUMMED_ROUNDINGS = 64.0
# The factor by which a gap may exceed the baseline; `gap_limit` has the reason.
MARGIN = 4.0


def expected_rounding_gap(precision: str) -> float:
    """Return the mean gap, in nats, that rounding alone may cause between two log-probs of a token.

    A log-prob is a difference of logits, which are about LARGEST_LOGIT at most. u is the unit
    roundoff. In bf16 and fp16 sums are made in fp32, and only the stored result x is rounded, by up to
    u·x: 32 × 2⁻⁸ = 0.125 in bf16, 32 × 2⁻¹¹ = 0.016 in fp16. In fp32 the sums themselves are rounded:
    n terms in another order differ by about √n u (Higham 2002, section 4.2), so 32 × 64 × 2⁻²⁴ =
    1.2e-4 for n = 4096.

    Measured with SmolLM2 and vLLM 0.32 on a CPU: 1.0e-5 to 1.5e-5 in fp32, 0.07 to 0.10 in bf16.

    `precision`: fp32, fp16 or bf16; fp16 also for TF32, which has as many bits.
    """
    unit_roundoff = torch.finfo(DTYPES[precision]).eps / 2
    stored = LARGEST_LOGIT * unit_roundoff
    if precision == "fp32":
        return stored * SUMMED_ROUNDINGS
    return stored


def gap_limit(baseline: float | None, precision: str) -> float:
    """Return the largest gap, in nats, that is accepted in a run that goes on.

    It is MARGIN times the baseline, and at least `expected_rounding_gap`, since a small baseline
    may have been luck. MARGIN covers two things: as a mean over 32 tokens a gap varies by 0.76 /
    √32 = 13% (for normal differences); and a policy that grows more certain has larger logits,
    which round more.

    Args:
        baseline: The gap before the first update, when both had the same weights. It includes the
            rounding of the sampler's own kernels and type: a server may compute in bf16 for a policy
            in fp32. None: it is not known, as after a resume from an older version; the limit is
            then LIMIT_WITHOUT_BASELINE.
        precision: As in `expected_rounding_gap`.
    """
    if baseline is None:
        return LIMIT_WITHOUT_BASELINE
    return max(MARGIN * baseline, expected_rounding_gap(precision))


# The largest accepted gap, in nats, while there is no baseline: for the first gap of a run, and after a
# resume without one. A server may compute in bf16 for a policy of any type, and a policy that computes
# in bf16 may be sampled in 8 bits. Below `expected_rounding_gap`, which it is made with.
LIMIT_WITHOUT_BASELINE = MARGIN * expected_rounding_gap("bf16")


class SamplerCheck:
    """Compares the sampler with the policy each time that the sampler has been given new weights.

    The sampler completes fixed prompts, and the policy then reads the same tokens. `gap` is the mean
    of |log p_sampler − log p_policy| over the completions, in nats, of the last comparison, and of
    several servers the largest; None before the first. The prompts are random tokens: no policy is sure how they go on, and a log-prob
    near 0 would hardly change with the weights.

    A new run takes its first gap as the baseline for all later ones. Even then a server may hold
    weights of an earlier run that a hand-over fails to replace, so the first gap may be at most
    LIMIT_WITHOUT_BASELINE. A resumed run measures no baseline. It has that of its checkpoint, so
    weights that the server kept from before are not taken for rounding.
    """

    def __init__(
        self,
        config: configs.Generator,
        read: Callable[[Episodes], torch.Tensor],
        prompts: list[list[int]],
        precision: str,
        is_new: bool,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare to compare; nothing is measured yet.

        Args:
            config: The section `algorithm.generator`.
            read: Returns the policy's log-probs of the completions, fp32[1, N, M]; collective.
            prompts: What `probe_prompts` returned.
            precision: The policy's precision, as in `expected_rounding_gap`.
            is_new: Whether the run is new, so that the policy has learned nothing yet.
            state: What the method `state` returned when the checkpoint was saved; None without a
                checkpoint.
        """
        self.config = config
        self.read = read
        self.prompts = prompts
        self.precision = precision
        # A baseline of another sampler or precision says nothing about this one.
        sampler: str = config.kind
        if isinstance(config, configs.ServerGenerator) and config.url is not None:
            # A server may compute in another type than vLLM's engine in this process does.
            sampler = f"{config.kind} server"
        self.setting = f"{sampler} {precision}"
        self.gap: float | None = None
        self.baseline: float | None = None
        self.needs_baseline = is_new
        if state and state["setting"] == self.setting:
            self.baseline = state["baseline"]

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps: the baseline and its setting; None without a baseline."""
        if self.baseline is None:
            return None
        return {"baseline": self.baseline, "setting": self.setting}

    def compare(self, generator: Generator) -> None:
        """Measure the gap; the sampler has just been handed the policy's weights. Collective.

        Raises TrainingStopped on all ranks if the gap is larger than accepted.
        """
        requests = []
        for number, tokens in enumerate(self.prompts):
            requests.append(Request(tokens, (PROBE, number)))
        new_tokens = min(NEW_TOKENS, self.config.max_new_tokens)
        probes = probe_generators(generator, new_tokens)
        gaps = []
        for probe in probes.values():
            completions = generate_together(probe, requests, step=0)
            gaps.append(self._mean_difference(completions))
        # One rank's numbers decide, since a sum over ranks may differ in its last bit.
        gaps = gather_from_ranks(gaps)[0]
        worst = _place_of_largest(gaps)
        gap = gaps[worst]
        if self.needs_baseline:
            limit = LIMIT_WITHOUT_BASELINE
        else:
            limit = gap_limit(self.baseline, self.precision)
        is_policy = gap <= limit  # False for NaN
        if not is_policy:
            reason = self._reason(list(probes)[worst], gap, limit)
            raise TrainingStopped(reason, where=WHERE, fix=self._fix())
        if self.needs_baseline:
            self.baseline = gap
            self.needs_baseline = False
        self.gap = gap

    def _mean_difference(self, completions: list[Completion]) -> float:
        """Return the mean of |log p_sampler − log p_policy| over all sampled tokens. Collective."""
        prompts = [np.asarray(tokens, np.int64) for tokens in self.prompts]
        tokens = [np.asarray(each.tokens, np.int64) for each in completions]
        episodes = Episodes.start(prompts, tokens)
        policy_NM = self.read(episodes)[0]
        differences = []
        for row, completion in enumerate(completions):
            sampler_M = torch.tensor(completion.log_probs)
            policy_M = policy_NM[row, : len(sampler_M)]
            differences.append((sampler_M - policy_M).abs())
        return float(torch.cat(differences).mean())

    def _reason(self, sampler: str, gap: float, limit: float) -> str:
        """Return why the run is stopped. `sampler`: a key of `probe_generators`."""
        what = (
            f"{sampler} is not the policy: after it was handed the weights,"
            f" its log-probs differ by {gap:.3g} nats on average"
        )
        if self.needs_baseline:
            return f"{what} before any update; at most {limit:g} is accepted"
        what = f"{what}; at most {limit:.3g} is accepted"
        if self.baseline is None:
            return what
        return f"{what} (before the first update it was {self.baseline:.3g})"

    def _fix(self) -> str:
        """Return what the user can do, which depends on the kind of the generator."""
        if not isinstance(self.config, configs.ServerGenerator):
            return "use strategy=ddp, whose ranks sample from the policy itself"
        if self.config.url is None:
            return "update vLLM, or use algorithm.generator=hf"
        return (
            "restart the servers, with the run's precision and for this run alone, then --resume;"
            " or use algorithm.generator=hf"
        )


def _place_of_largest(gaps: list[float]) -> int:
    """Return the place of the largest gap; NaN counts as larger than any number."""
    sizes = []
    for gap in gaps:
        sizes.append(math.inf if math.isnan(gap) else gap)
    return sizes.index(max(sizes))


def probe_prompts(
    tokenizer: Any, special: set[int], ranks: int, max_length: int, config: configs.Generator
) -> list[list[int]]:
    """Return the prompts of a probe: token ids, the same on every rank and at each start of a run.

    A prompt is the token that begins a text, if the tokenizer has one, and random tokens that are not
    in `special`. There are at least as many prompts as `ranks`, so each rank samples one. A prompt and
    its completion have at most `max_length` tokens.
    """
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    new_tokens = min(NEW_TOKENS, config.max_new_tokens)
    length = min(PROMPT_TOKENS, max_length - new_tokens)
    begin = []
    if tokenizer.bos_token_id is not None:
        begin.append(tokenizer.bos_token_id)
    # A fixed seed, so that every rank and every start of a run draws the same prompts.
    draw = random.Random(0)
    prompts = []
    for _ in range(max(PROMPTS, ranks)):
        prompt = begin + draw.choices(ordinary, k=length)
        prompts.append(prompt[:length])
    return prompts
