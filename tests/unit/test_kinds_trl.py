"""DPO's kinds, ORPO and SimPO for given logits: losses, gradients and figures equal TRL's to 1e-5, however the batch is cut.

The numbers are those of `tests/reference/kinds_trl.json`; TRL's own trainers made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from drumline.algorithms.dpo.objective import DPO
from drumline.algorithms.dpo.spec import DPOConfig, Loss
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.algorithms.pair_losses import LOSSES
from drumline.algorithms.reference_free.objective import odds_ratio
from drumline.algorithms.reference_free.spec import ORPOConfig, SimPOConfig
from drumline.data.batches import Episodes, FirstPassNumbers, PairBatch, pair_batch
from drumline.models.head import Outputs
from tests.reference.pairs import FIGURES

pytestmark = [pytest.mark.claim("new losses of pairs, KTO and GRPO's kinds are TRL's")]

TRL_FILE = Path(__file__).parents[1] / "reference" / "kinds_trl.json"
TRL: dict[str, Any] = json.loads(TRL_FILE.read_text())
PAIRS = len(TRL["lengths"]) // 2
LOGITS_BTV = torch.tensor(TRL["logits_BTV"])
REFERENCE_B = torch.tensor(TRL["reference_B"]).double()

# How a batch of TRL's pairs is cut into micro-batches. -1 is a filler.
Cuts = list[list[int]]
CUTS = {
    "whole": [[0, 1, 2, 3]],
    "halves": [[2, 0], [3, -1, 1]],
    "pairs": [[3], [1], [0], [2, -1]],
}
over_cuts = pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)


def segment(row: int) -> tuple[Any, Any]:
    """Return a row's tokens, and that all but the first are learned."""
    size = TRL["lengths"][row]
    tokens = np.array(TRL["tokens_BT"][row][: size + 1])
    learn = np.ones_like(tokens)
    learn[0] = 0
    return tokens, learn


def batch(picks: list[int]) -> PairBatch:
    """Return a batch of TRL's pairs; -1 is a filler."""
    pairs: list[Any] = []
    for pick in picks:
        pairs.append((segment(pick), segment(PAIRS + pick)) if pick >= 0 else None)

    return pair_batch(pairs, picks, [{}] * len(picks), pad_id=0, width=6)


def rows_of(picks: list[int]) -> list[int]:
    """Return the rows of TRL's batch for these pairs: the chosen ones, then the rejected ones."""
    chosen = np.array(picks)
    rows = np.concatenate([chosen, chosen + PAIRS])
    is_filler = np.concatenate([chosen, chosen]) < 0
    rows[is_filler] = 0
    return rows.tolist()


def add_first_pass(algorithm: DPO, pairs: PairBatch, picks: list[int]) -> PairBatch:
    """Add the reference's log-probs, and numbers of the whole batch if the algorithm needs them."""
    pairs = replace(pairs, reference_B=REFERENCE_B[rows_of(picks)])
    if algorithm.first_pass is None:
        return pairs

    whole = replace(batch(list(range(PAIRS))), reference_B=REFERENCE_B)
    numbers_N4 = algorithm.first_pass(Outputs(logits_BTV=LOGITS_BTV), whole)
    return replace(pairs, first=FirstPassNumbers(numbers_N4), places_P=torch.tensor(picks))


def check(algorithm: Any, case: dict[str, Any], cuts: Cuts) -> None:
    """Compare loss, figures and gradient of a batch with TRL's."""
    leaf = LOGITS_BTV.clone().requires_grad_()
    sums: dict[str, float] = {}
    for picks in cuts:
        pairs = batch(picks)
        if isinstance(algorithm, DPO):
            pairs = add_first_pass(algorithm, pairs, picks)

        out = algorithm.objective(Outputs(logits_BTV=leaf[rows_of(picks)]), pairs)
        (out.loss_sum / PAIRS).backward()

        figures_of_cut = {"loss": out.loss_sum.detach(), **out.sums}
        for key, value in figures_of_cut.items():
            sums[key] = sums.get(key, 0.0) + float(value)

    figures = algorithm.metrics(sums)
    assert figures["loss"] == pytest.approx(case["loss"], rel=1e-5)

    for mine, name in FIGURES.items():
        if name in case["metrics"]:
            expected = pytest.approx(case["metrics"][name], rel=1e-5)
            assert figures[mine] == expected, mine

    assert leaf.grad is not None

    gradient_BTV = torch.tensor(case["gradient_BTV"])
    torch.testing.assert_close(leaf.grad, gradient_BTV, rtol=1e-5, atol=1e-6)


@over_cuts
@pytest.mark.parametrize("name", TRL["dpo"])
def test_dpo(name: str, cuts: Cuts) -> None:
    case = TRL["dpo"][name]
    options = dict(case["options"])
    weights = options.pop("loss")
    section = {"kind": "dpo", "loss_chunk": 4, "loss_weights": weights, **options}
    check(DPOConfig.model_validate(section).build(), case, cuts)


@over_cuts
@pytest.mark.parametrize("name", TRL["orpo"])
def test_orpo(name: str, cuts: Cuts) -> None:
    case = TRL["orpo"][name]
    check(ORPOConfig(**case["options"]).build(), case, cuts)


@over_cuts
@pytest.mark.parametrize("name", TRL["simpo"])
def test_simpo(name: str, cuts: Cuts) -> None:
    case = TRL["simpo"][name]
    check(SimPOConfig(**case["options"]).build(), case, cuts)


def test_the_yaml_knows_every_loss() -> None:
    assert get_args(Loss) == tuple(LOSSES)


def test_what_is_certain_has_finite_odds_and_gradients() -> None:
    chosen_P = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rejected_P = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    loss_P = odds_ratio(chosen_P, rejected_P, beta=0.1)
    loss_P.sum().backward()

    assert loss_P.isfinite().all()
    assert chosen_P.grad is not None
    assert chosen_P.grad.isfinite().all()


class Mistake(NamedTuple):
    spec: type[DPOConfig | GRPOConfig]
    # A section of a configuration.
    keys: dict[str, Any]
    # What the error says.
    words: str


MISTAKES = [
    Mistake(
        DPOConfig,
        {"loss": "hinge", "label_smoothing": 0.1},
        "label_smoothing requires loss: sigmoid or robust",
    ),
    Mistake(
        DPOConfig,
        {"loss": "exo_pair"},
        "exo_pair requires label_smoothing above 0",
    ),
    Mistake(
        DPOConfig,
        {"loss": "aot", "f_divergence": "forward_kl"},
        "f_divergence requires loss: sigmoid",
    ),
    Mistake(
        DPOConfig,
        {"loss": "ipo", "loss_weights": {"hinge": 1.0}},
        "leave out loss",
    ),
    Mistake(
        GRPOConfig,
        {"delta": 1.1},
        "above 1 \\+ clip_high",
    ),
    Mistake(
        GRPOConfig,
        {"delta": 3.0, "surrogate": "cispo"},
        "requires surrogate: clip",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_go_together(mistake: Mistake) -> None:
    with pytest.raises(ValidationError, match=mistake.words):
        mistake.spec.model_validate(mistake.keys)


def test_rloo_has_other_defaults_and_says_all_of_them() -> None:
    rloo = GRPOConfig.model_validate({"estimator": "rloo"})
    assert rloo.scale == "none"
    assert rloo.ratio == "product"
    assert rloo.normalize == "sequence"
    assert GRPOConfig.model_validate(rloo.model_dump()) == rloo

    other = GRPOConfig.model_validate({"estimator": "rloo", "scale": "batch"})
    assert other.scale == "batch"


@pytest.mark.parametrize("masked", [True, False])
def test_a_truncated_completion_counts_in_no_mean(masked: bool) -> None:
    keys = {"group_size": 2, "mask_truncated": masked, "normalize": "sequence"}
    grpo = GRPOConfig.model_validate(keys)
    tokens = [np.ones(2, np.int64)] * 2
    episodes = Episodes.start(tokens, tokens, ended=[True, False])

    made = grpo.assign_credit(episodes, torch.tensor([1.0, 0.0]), torch.zeros(2, 2))

    assert made.weight_N.tolist() == [1.0, float(not masked)]
    assert bool(made.weights_NM[1].any()) is not masked
    # Its reward is its group's all the same.
    assert made.advantages_NM[0, 0] > 0 > made.advantages_NM[1, 0]
