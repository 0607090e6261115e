"""The losses of DPO and its variants, as pure functions of P pairs. Tensors are fp64[P].

A score s is log π(answer | prompt) − log π_ref(answer | prompt), summed over the answer's tokens; Δ = f(s_w) − f(s_l) with w the chosen
answer, l the rejected one and f the identity, or another divergence's (`transform`). l = βΔ; ε is the label smoothing.

    sigmoid       −(1 − ε) log σ(l) − ε log σ(−l)                       Rafailov et al. 2023; ε: conservative DPO, Mitchell 2023
    hinge         max(0, 1 − l)                                         SLiC, Zhao et al. 2023
    ipo           (Δ̄ − 1 / 2β)²                                         Azar et al. 2023, equation 17
    sigmoid_norm  −log σ(βΔ̄)                                            Δ̄: of scores divided by their answers' tokens
    robust        (−(1 − ε) log σ(l) + ε log σ(−l)) / (1 − 2ε)          Chowdhury et al. 2024
    exo_pair      KL((σ(l), σ(−l)) ‖ (1 − ε, ε))                        Ji et al. 2024, equation 16
    nca_pair      −log σ(βs_w) − ½ log σ(−βs_w) − ½ log σ(−βs_l)        Chen et al. 2024
    bco_pair      −log σ(βs_w) − log σ(−βs_l)                           Jung et al. 2024
    sppo_hard     (s_w − 1 / 2β)² + (s_l + 1 / 2β)²                     Wu et al. 2024, equation 4.7 with hard probabilities
    apo_zero      σ(−βs_w) + σ(βs_l)                                    D'Oosterlinck et al. 2024, equation 7
    apo_down      σ(βs_w) + σ(−β(s_w − s_l))                            the same, equation 8
    discopop      −log σ(l) (1 − m) + e^(−l) m, m = σ(l / τ)            Lu et al. 2024, equation 5
    aot           sigmoid of (ρ_(i) − ρ_ref(i)), ρ = log π_w / π_l      Melnyk et al. 2024; (i): the i-th smallest of the batch
    aot_unpaired  sigmoid of (s_w(i) − s_l(i))                          the same

As TRL 1.16 has them. `bco_pair` is without the paper's shift δ, a running mean. The ranks of `aot` are those of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

LARGEST_EXPONENT = 80.0  # e^80 is still a number of fp32


@dataclass(frozen=True)
class Pairs:
    """What the losses read of pairs. `delta_P` is Δ, `mean_delta_P` is Δ̄. `matched_P3`: of `match`; None where no loss sorts."""

    chosen_P: Tensor
    rejected_P: Tensor
    delta_P: Tensor
    mean_delta_P: Tensor
    beta: float
    smoothing: float = 0.0
    tau: float = 0.05
    matched_P3: Tensor | None = None

    @property
    def logit_P(self) -> Tensor:  # noqa: N802 - as the tensors are called
        return self.beta * self.delta_P


def transform(score: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(π / π_ref) of a score, up to a constant (f-DPO, Wang et al. 2024): reverse_kl s, forward_kl 1 − e^(−s), js_divergence
    log(2π / (π + π_ref)), alpha_divergence (e^((α − 1)s) − 1) / (α − 1), of which α = 1 and 0 are the first two."""
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(score)
    power = {"reverse_kl": 1.0, "forward_kl": 0.0}.get(divergence, alpha) - 1
    return (
        score
        if abs(power) < 1e-6
        else torch.expm1((power * score).clamp(max=LARGEST_EXPONENT)) / power
    )


def cross_entropy(logit_P: Tensor, smoothing: float) -> Tensor:
    """−(1 − ε) log σ(l) − ε log σ(−l)."""
    return -(1 - smoothing) * logsigmoid(logit_P) - smoothing * logsigmoid(-logit_P)


def _robust(pairs: Pairs) -> Tensor:
    kept, swapped = (
        (1 - pairs.smoothing) * logsigmoid(pairs.logit_P),
        pairs.smoothing * logsigmoid(-pairs.logit_P),
    )
    return (swapped - kept) / (1 - 2 * pairs.smoothing)


def _exo(pairs: Pairs) -> Tensor:
    won_P, lost_P = logsigmoid(pairs.logit_P), logsigmoid(-pairs.logit_P)
    return won_P.exp() * (won_P - math.log1p(-pairs.smoothing)) + lost_P.exp() * (
        lost_P - math.log(pairs.smoothing)
    )


def _nca(pairs: Pairs) -> Tensor:
    won_P, lost_P = pairs.beta * pairs.chosen_P, pairs.beta * pairs.rejected_P
    return -logsigmoid(won_P) - (logsigmoid(-won_P) + logsigmoid(-lost_P)) / 2


def _discopop(pairs: Pairs) -> Tensor:
    mixed_P = torch.sigmoid(pairs.logit_P / pairs.tau)
    return (
        -logsigmoid(pairs.logit_P) * (1 - mixed_P)
        + (-pairs.logit_P).clamp(max=LARGEST_EXPONENT).exp() * mixed_P
    )


def _aot(pairs: Pairs) -> Tensor:
    assert pairs.matched_P3 is not None, "the first pass sorts"
    return cross_entropy(
        pairs.beta * (pairs.chosen_P - pairs.rejected_P - pairs.matched_P3[:, 0]), pairs.smoothing
    )


def _aot_unpaired(pairs: Pairs) -> Tensor:
    """Each side against its partner of the same rank, taken as a number: together these have the gradient of the sum over ranks."""
    assert pairs.matched_P3 is not None, "the first pass sorts"
    _, rejected_P, chosen_P = pairs.matched_P3.unbind(1)
    of_chosen_P = cross_entropy(pairs.beta * (pairs.chosen_P - rejected_P), pairs.smoothing)
    of_rejected_P = cross_entropy(pairs.beta * (chosen_P - pairs.rejected_P), pairs.smoothing)
    return of_chosen_P + of_rejected_P - of_rejected_P.detach()


LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: cross_entropy(p.logit_P, p.smoothing),
    "hinge": lambda p: relu(1 - p.logit_P),
    "ipo": lambda p: (p.mean_delta_P - 1 / (2 * p.beta)) ** 2,
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.mean_delta_P),
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.chosen_P) - logsigmoid(-p.beta * p.rejected_P),
    "sppo_hard": lambda p: (p.chosen_P - 0.5 / p.beta) ** 2 + (p.rejected_P + 0.5 / p.beta) ** 2,
    "apo_zero": lambda p: (
        torch.sigmoid(-p.beta * p.chosen_P) + torch.sigmoid(p.beta * p.rejected_P)
    ),
    "apo_down": lambda p: (
        torch.sigmoid(p.beta * p.chosen_P) + torch.sigmoid(-p.beta * (p.chosen_P - p.rejected_P))
    ),
    "discopop": _discopop,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}


def match(numbers_N4: Tensor) -> Tensor:
    """fp64[N, 3], what the losses that sort need of each pair of a global batch: by how much the reference's log π_w / π_l of the same rank
    lies above the pair's own; the score of the rejected answer of the same rank as the chosen one; and that of the chosen answer of the
    same rank as the rejected one.

    `numbers_N4`: log-probabilities of the chosen and the rejected answers under the policy, then under the reference. Equal numbers keep
    their order.
    """
    chosen_N, rejected_N, reference_chosen_N, reference_rejected_N = numbers_N4.unbind(1)
    won_N, lost_N, reference_N = (
        chosen_N - reference_chosen_N,
        rejected_N - reference_rejected_N,
        reference_chosen_N - reference_rejected_N,
    )
    matched_3N = torch.stack(
        [
            _of_same_rank(*each)
            for each in ((chosen_N - rejected_N, reference_N), (won_N, lost_N), (lost_N, won_N))
        ]
    )
    matched_3N[0] -= reference_N
    return matched_3N.T


def _of_same_rank(values_N: Tensor, ranked_N: Tensor) -> Tensor:
    """For each of `values_N` the one of `ranked_N` that has its rank."""
    return torch.empty_like(ranked_N).scatter_(
        0, values_N.argsort(stable=True), ranked_N.sort(stable=True).values
    )
