"""The losses of DPO and its variants, as pure functions of P pairs. Tensors are fp64[P].

    w, l  the chosen and the rejected answer, as indices
    s     the score of an answer: log π(answer | prompt) − log π_ref(answer | prompt)
    f     what `transform` returns: f(s) = s for the reverse KL, the default
    Δ     f(s_w) − f(s_l)
    Δ̄     the same difference, with each of the two divided by the answer's number of tokens
    l     the logit βΔ, if it is no index
    ε     the label smoothing
    ρ     log π(w) − log π(l), and ρ_ref the same of the reference

    sigmoid       −(1 − ε) log σ(l) − ε log σ(−l)                  Rafailov et al. 2023;
                                                                   ε: conservative DPO, Mitchell 2023
    hinge         max(0, 1 − l)                                    SLiC, Zhao et al. 2023
    ipo           (Δ̄ − 1 / 2β)²                                    Azar et al. 2023, equation 17
    sigmoid_norm  −log σ(βΔ̄)                                       sigmoid, length-normalised
    robust        (−(1 − ε) log σ(l) + ε log σ(−l)) / (1 − 2ε)     Chowdhury et al. 2024
    exo_pair      KL((σ(l), σ(−l)) ‖ (1 − ε, ε))                   Ji et al. 2024, equation 16
    nca_pair      −log σ(βs_w) − ½ log σ(−βs_w) − ½ log σ(−βs_l)   Chen et al. 2024
    bco_pair      −log σ(βs_w) − log σ(−βs_l)                      Jung et al. 2024
    sppo_hard     (s_w − 1 / 2β)² + (s_l + 1 / 2β)²                Wu et al. 2024, equation 4.7 with
                                                                   hard probabilities
    apo_zero      σ(−βs_w) + σ(βs_l)                               D'Oosterlinck et al. 2024, eq. 7
    apo_down      σ(βs_w) + σ(−β(s_w − s_l))                       the same, equation 8
    discopop      −log σ(l) (1 − m) + e^(−l) m, m = σ(l / τ)       Lu et al. 2024, equation 5
    aot           as sigmoid, with Δ = ρ_(i) − ρ_ref(i)            Melnyk et al. 2024; (i): the i-th
                                                                   smallest of the global batch
    aot_unpaired  as sigmoid, with Δ = s_w(i) − s_l(i)             the same

The numbers are those of TRL 1.16. `bco_pair` lacks the paper's shift δ, a running mean.

A new loss is a function here with an entry in `LOSSES`, a name in `dpo.spec.Loss`, and a name in those
of SMOOTHED, SORTED and OF_DIFFERENCES there that apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

# e^80 is still a number of fp32.
LARGEST_EXPONENT = 80.0
# α − 1 of an alpha divergence below which it is the reverse KL.
LEAST_POWER = 1e-6


@dataclass(frozen=True)
class PairScores:
    """The scores of P pairs, and the settings of the losses."""

    # s_w and s_l, the scores of the chosen and the rejected answers.
    chosen_P: Tensor
    rejected_P: Tensor
    # Δ and Δ̄.
    delta_P: Tensor
    mean_delta_P: Tensor
    beta: float
    # ε.
    smoothing: float = 0.0
    # The temperature τ of discopop.
    tau: float = 0.05
    # The rows of these pairs in what `match` returns for the global batch; None if no loss sorts.
    matched_P3: Tensor | None = None

    @property
    def logit_P(self) -> Tensor:  # noqa: N802 - as the tensors are called
        """The logit l = βΔ of each pair."""
        return self.beta * self.delta_P


def transform(score: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return f(s) of scores s, which is the divergence's f' at π / π_ref (f-DPO, Wang et al. 2024).

    It is given up to a constant, which cancels in Δ:

        reverse_kl        s
        forward_kl        1 − e^(−s)
        js_divergence     log(2π / (π + π_ref))
        alpha_divergence  (e^((α − 1)s) − 1) / (α − 1); α = 1 and α = 0 are the first two
    """
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(score)
    if divergence == "reverse_kl":
        alpha = 1.0
    elif divergence == "forward_kl":
        alpha = 0.0
    power = alpha - 1
    if abs(power) < LEAST_POWER:
        return score
    exponent = (power * score).clamp(max=LARGEST_EXPONENT)
    return torch.expm1(exponent) / power


def cross_entropy(logit_P: Tensor, smoothing: float) -> Tensor:
    """Return −(1 − ε) log σ(l) − ε log σ(−l) with ε = `smoothing`."""
    kept_P = -(1 - smoothing) * logsigmoid(logit_P)
    swapped_P = smoothing * logsigmoid(-logit_P)
    return kept_P - swapped_P


def hinge(logit_P: Tensor) -> Tensor:
    """Return max(0, 1 − l)."""
    return relu(1 - logit_P)


def squared_distance(difference_P: Tensor, beta: float) -> Tensor:
    """Return (d − 1 / 2β)² of differences d of two scores."""
    target = 1 / (2 * beta)
    return (difference_P - target) ** 2


def _sigmoid(pairs: PairScores) -> Tensor:
    return cross_entropy(pairs.logit_P, pairs.smoothing)


def _hinge(pairs: PairScores) -> Tensor:
    return hinge(pairs.logit_P)


def _ipo(pairs: PairScores) -> Tensor:
    return squared_distance(pairs.mean_delta_P, pairs.beta)


def _sigmoid_norm(pairs: PairScores) -> Tensor:
    return -logsigmoid(pairs.beta * pairs.mean_delta_P)


def _robust(pairs: PairScores) -> Tensor:
    kept_P = (1 - pairs.smoothing) * logsigmoid(pairs.logit_P)
    swapped_P = pairs.smoothing * logsigmoid(-pairs.logit_P)
    return (swapped_P - kept_P) / (1 - 2 * pairs.smoothing)


def _exo_pair(pairs: PairScores) -> Tensor:
    # The logs of the policy's distribution over the two answers, (σ(l), σ(−l)).
    won_P = logsigmoid(pairs.logit_P)
    lost_P = logsigmoid(-pairs.logit_P)
    # The data's distribution over them, (1 − ε, ε). The config requires ε above 0.
    log_kept = math.log1p(-pairs.smoothing)
    log_swapped = math.log(pairs.smoothing)
    won_term_P = won_P.exp() * (won_P - log_kept)
    lost_term_P = lost_P.exp() * (lost_P - log_swapped)
    return won_term_P + lost_term_P


def _nca_pair(pairs: PairScores) -> Tensor:
    won_P = pairs.beta * pairs.chosen_P
    lost_P = pairs.beta * pairs.rejected_P
    return -logsigmoid(won_P) - (logsigmoid(-won_P) + logsigmoid(-lost_P)) / 2


def _bco_pair(pairs: PairScores) -> Tensor:
    won_P = pairs.beta * pairs.chosen_P
    return -logsigmoid(won_P) - logsigmoid(-pairs.beta * pairs.rejected_P)


def _sppo_hard(pairs: PairScores) -> Tensor:
    target = 0.5 / pairs.beta
    return (pairs.chosen_P - target) ** 2 + (pairs.rejected_P + target) ** 2


def _apo_zero(pairs: PairScores) -> Tensor:
    falls_P = torch.sigmoid(-pairs.beta * pairs.chosen_P)
    rises_P = torch.sigmoid(pairs.beta * pairs.rejected_P)
    return falls_P + rises_P


def _apo_down(pairs: PairScores) -> Tensor:
    difference_P = pairs.chosen_P - pairs.rejected_P
    rises_P = torch.sigmoid(pairs.beta * pairs.chosen_P)
    misses_P = torch.sigmoid(-pairs.beta * difference_P)
    return rises_P + misses_P


def _discopop(pairs: PairScores) -> Tensor:
    mixed_P = torch.sigmoid(pairs.logit_P / pairs.tau)
    logistic_P = -logsigmoid(pairs.logit_P)
    exponent_P = (-pairs.logit_P).clamp(max=LARGEST_EXPONENT)
    exponential_P = exponent_P.exp()
    return logistic_P * (1 - mixed_P) + exponential_P * mixed_P


def _aot(pairs: PairScores) -> Tensor:
    """Compare each pair's log π_w / π_l with the reference's of the same rank."""
    assert pairs.matched_P3 is not None, "the first pass sorts"
    shift_P = pairs.matched_P3[:, 0]
    delta_P = pairs.chosen_P - pairs.rejected_P - shift_P
    return cross_entropy(pairs.beta * delta_P, pairs.smoothing)


def _aot_unpaired(pairs: PairScores) -> Tensor:
    """Compare each answer with its partner, the other side's answer of the same rank.

    The partner is a number without a gradient. So each difference is computed twice, once with the
    gradient of the chosen answer and once with that of the rejected one.
    """
    assert pairs.matched_P3 is not None, "the first pass sorts"
    _, rejected_partner_P, chosen_partner_P = pairs.matched_P3.unbind(1)
    delta_of_chosen_P = pairs.chosen_P - rejected_partner_P
    delta_of_rejected_P = chosen_partner_P - pairs.rejected_P
    of_chosen_P = cross_entropy(pairs.beta * delta_of_chosen_P, pairs.smoothing)
    of_rejected_P = cross_entropy(pairs.beta * delta_of_rejected_P, pairs.smoothing)
    # The second term adds only its gradient, since over the global batch both have the same value.
    return of_chosen_P + of_rejected_P - of_rejected_P.detach()


LOSSES: dict[str, Callable[[PairScores], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}


def match(numbers_N4: Tensor) -> Tensor:
    """Return for each pair of a global batch the numbers that losses which sort need, fp64[N, 3].

    The rank of a number is its index when the numbers of the global batch are sorted; equal numbers
    keep their order. The columns are

    0. ρ_ref of the rank that the pair's ρ has, less the pair's own ρ_ref;
    1. the score s_l of the rank that the pair's s_w has;
    2. the score s_w of the rank that the pair's s_l has.

    `numbers_N4`: fp64, the log-probabilities of the chosen and the rejected answers under the policy,
    then of both under the reference.
    """
    chosen_N, rejected_N, reference_chosen_N, reference_rejected_N = numbers_N4.unbind(1)
    policy_ratio_N = chosen_N - rejected_N
    reference_ratio_N = reference_chosen_N - reference_rejected_N
    chosen_score_N = chosen_N - reference_chosen_N
    rejected_score_N = rejected_N - reference_rejected_N
    shift_N = _same_rank(policy_ratio_N, reference_ratio_N) - reference_ratio_N
    rejected_partner_N = _same_rank(chosen_score_N, rejected_score_N)
    chosen_partner_N = _same_rank(rejected_score_N, chosen_score_N)
    return torch.stack([shift_N, rejected_partner_N, chosen_partner_N], 1)


def _same_rank(values_N: Tensor, ranked_N: Tensor) -> Tensor:
    """Return for each of `values_N` the number of `ranked_N` that has the same rank."""
    sorted_N = ranked_N.sort(stable=True).values
    # The index of the smallest value, of the next one, and so on.
    places_N = values_N.argsort(stable=True)
    partners_N = torch.empty_like(ranked_N)
    return partners_N.scatter_(0, places_N, sorted_N)
