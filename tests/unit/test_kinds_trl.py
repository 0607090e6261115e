"""DPO's kinds, ORPO and SimPO for given logits: losses, gradients and figures equal TRL's to 1e-5, however the batch is cut.

The numbers are those of `tests/reference/kinds_trl.json`; TRL's own trainers made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

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

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "kinds_trl.json").read_text()
)
PAIRS = len(TRL["lengths"]) // 2
CUTS = [[[0, 1, 2, 3]], [[2, 0], [3, -1, 1]], [[3], [1], [0], [2, -1]]]


def batch(picks: list[int]) -> PairBatch:
    """TRL's pairs; -1: a filler."""
    rows = [
        torch.tensor(TRL["tokens_BT"][row][: size + 1]).numpy()
        for row, size in enumerate(TRL["lengths"])
    ]
    segments = [(tokens, torch.tensor([0] + [1] * (len(tokens) - 1)).numpy()) for tokens in rows]
    pairs = [(segments[pick], segments[PAIRS + pick]) if pick >= 0 else None for pick in picks]
    return pair_batch(pairs, picks, [{}] * len(picks), pad_id=0, width=6)


def rows_of(picks: list[int]) -> list[int]:
    return [pick + side * PAIRS if pick >= 0 else 0 for side in (0, 1) for pick in picks]


def first_pass(algorithm: DPO, pairs: PairBatch, picks: list[int]) -> PairBatch:
    """With what the reference gives, and the numbers of the whole batch where the algorithm asks for them."""
    reference_2N, logits_BTV = (
        torch.tensor(TRL["reference_B"]).double(),
        torch.tensor(TRL["logits_BTV"]),
    )
    pairs = replace(pairs, reference_B=reference_2N[rows_of(picks)])
    if algorithm.first_pass is None:
        return pairs
    whole = replace(batch(list(range(PAIRS))), reference_B=reference_2N)
    numbers_N4 = algorithm.first_pass(Outputs(logits_BTV=logits_BTV), whole)
    return replace(pairs, first=FirstPassNumbers(numbers_N4), places_P=torch.tensor(picks))


def check(algorithm: Any, case: dict[str, Any], cuts: list[list[int]]) -> None:
    leaf = torch.tensor(TRL["logits_BTV"], requires_grad=True)
    sums: dict[str, float] = {}
    for picks in cuts:
        pairs = batch(picks)
        pairs = first_pass(algorithm, pairs, picks) if isinstance(algorithm, DPO) else pairs
        out = algorithm.objective(Outputs(logits_BTV=leaf[rows_of(picks)]), pairs)
        (out.loss_sum / PAIRS).backward()
        for key, value in {"loss": out.loss_sum.detach(), **out.sums}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    figures = algorithm.metrics(sums)
    assert figures["loss"] == pytest.approx(case["loss"], rel=1e-5)
    theirs = {
        mine: case["metrics"][name] for mine, name in FIGURES.items() if name in case["metrics"]
    }
    assert {name: figures[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.tensor(case["gradient_BTV"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "halves", "pairs"])
@pytest.mark.parametrize("name", TRL["dpo"])
def test_dpo(name: str, cuts: list[list[int]]) -> None:
    case = TRL["dpo"][name]
    options = dict(case["options"])
    weights = options.pop("loss")
    section = {"kind": "dpo", "loss_chunk": 4, "loss_weights": weights, **options}
    check(DPOConfig.model_validate(section).build(), case, cuts)


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "halves", "pairs"])
@pytest.mark.parametrize("name", TRL["orpo"])
def test_orpo(name: str, cuts: list[list[int]]) -> None:
    case = TRL["orpo"][name]
    check(ORPOConfig(**case["options"]).build(), case, cuts)


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "halves", "pairs"])
@pytest.mark.parametrize("name", TRL["simpo"])
def test_simpo(name: str, cuts: list[list[int]]) -> None:
    case = TRL["simpo"][name]
    check(SimPOConfig(**case["options"]).build(), case, cuts)


def test_the_yaml_knows_every_loss() -> None:
    assert get_args(Loss) == tuple(LOSSES)


def test_what_is_certain_has_finite_odds_and_gradients() -> None:
    chosen_P, rejected_P = (
        torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    loss_P = odds_ratio(chosen_P, rejected_P, beta=0.1)
    loss_P.sum().backward()
    assert loss_P.isfinite().all() and chosen_P.grad is not None and chosen_P.grad.isfinite().all()


MISTAKES: list[tuple[type[DPOConfig | GRPOConfig], dict[str, Any], str]] = [
    (
        DPOConfig,
        {"loss": "hinge", "label_smoothing": 0.1},
        "label_smoothing requires loss: sigmoid or robust",
    ),
    (DPOConfig, {"loss": "exo_pair"}, "exo_pair requires label_smoothing above 0"),
    (
        DPOConfig,
        {"loss": "aot", "f_divergence": "forward_kl"},
        "f_divergence requires loss: sigmoid",
    ),
    (DPOConfig, {"loss": "ipo", "loss_weights": {"hinge": 1.0}}, "leave out loss"),
    (GRPOConfig, {"delta": 1.1}, "above 1 \\+ clip_high"),
    (GRPOConfig, {"delta": 3.0, "surrogate": "cispo"}, "requires surrogate: clip"),
]


@pytest.mark.parametrize(("spec", "keys", "words"), MISTAKES)
def test_what_does_not_go_together(spec: type[Any], keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec.model_validate(keys)


def test_rloo_has_other_defaults_and_says_all_of_them() -> None:
    rloo = GRPOConfig.model_validate({"estimator": "rloo"})
    assert (rloo.scale, rloo.ratio, rloo.normalize) == ("none", "product", "sequence")
    assert GRPOConfig.model_validate({"estimator": "rloo", "scale": "batch"}).scale == "batch"
    assert GRPOConfig.model_validate(rloo.model_dump()) == rloo


@pytest.mark.parametrize("masked", [True, False])
def test_a_truncated_completion_counts_in_no_mean(masked: bool) -> None:
    grpo = GRPOConfig.model_validate(
        {"group_size": 2, "mask_truncated": masked, "normalize": "sequence"}
    )
    tokens = [np.ones(2, np.int64)] * 2
    episodes = Episodes.start(tokens, tokens, ended=[True, False])
    made = grpo.credited(episodes, torch.tensor([1.0, 0.0]), torch.zeros(2, 2))
    assert (
        made.weight_N.tolist() == [1.0, float(not masked)]
        and bool(made.weights_NM[1].any()) is not masked
    )
    # Its reward is its group's all the same.
    assert made.advantages_NM[0, 0] > 0 > made.advantages_NM[1, 0]
