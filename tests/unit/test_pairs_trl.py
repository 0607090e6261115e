"""DPO, the reward model and SFT on four fixed pairs: tokens, losses, log-probs, figures and gradients equal TRL's to 1e-5.

The numbers are those of `tests/reference/pairs_trl.json`; TRL's own tokeniser calls, collators and models made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.algorithms.dpo.objective import DPO
from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.reward.objective import RewardModel
from drumline.algorithms.reward.spec import RewardModelConfig
from drumline.algorithms.tokens.objective import NextToken
from drumline.config.data import DataConfig
from drumline.data.batches import PairBatch, collate, pair_batch
from drumline.data.encode import PairRowEncoder
from drumline.data.sources import Row
from drumline.models.head import ForwardWithObjective
from tests.reference.pairs import MARGINS, gradients, model, rows, tokenizer

pytestmark = pytest.mark.slow

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "pairs_trl.json").read_text()
)
POLICY, REFERENCE = 1, 2
CLOSE = {"rel": 1e-5, "abs": 1e-6}


def segments() -> list[Any]:
    data = DataConfig.model_validate(
        {"train": [{"kind": "file", "path": "unused"}], "max_length": 128}
    )
    encoded = [
        PairRowEncoder(tokenizer(), data).encode(Row(f"row {index}", row))
        for index, row in enumerate(rows())
    ]
    return [
        [(side.tokens, side.learn) for side in pair.segments]
        for pair in encoded
        if pair is not None
    ]


def batch(picks: list[int], margins: bool = False) -> PairBatch:
    pairs = segments()
    metas = [{"margin": MARGINS[pick]} if margins else {} for pick in picks]
    return pair_batch([pairs[pick] for pick in picks], picks, metas, pad_id=0, width=None)


def close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Norms of all gradients, and every entry of the stored ones, to 1e-5 of the largest."""
    assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    for name, entries in theirs["entries"].items():
        largest = max(map(abs, entries))
        assert mine["entries"][name] == pytest.approx(entries, rel=1e-5, abs=1e-5 * largest), name


def dpo(options: dict[str, Any]) -> DPO:
    (kind, *more), weights = options["loss_type"], options.get("loss_weights", [1.0])
    return DPOConfig(
        beta=options["beta"],
        loss={"aot": "sigmoid"}.get(kind, kind),
        label_smoothing=options.get("label_smoothing", 0.0),
        sft_weight=weights[1] if more == ["sft"] else 0.0,
        loss_chunk=16,
    ).build()


def test_the_rows_are_trls_rows() -> None:
    theirs, mine = TRL["dpo"]["sigmoid"]["batch"], batch([0, 1, 2, 3])
    assert mine.input_ids_BT.tolist() == theirs["input_ids"]
    assert mine.last_B.tolist() == [sum(mask) - 1 for mask in theirs["attention_mask"]]
    learned = (mine.targets_BT[:, :-1] != -100).long().tolist()
    assert learned == [mask[1:] for mask in theirs["completion_mask"]]


def log_probs(seed: int, of: PairBatch) -> torch.Tensor:
    """Of each row's answer under the model of this seed."""
    from transformers import LlamaForCausalLM

    told: list[torch.Tensor] = []
    algorithm = dpo(TRL["dpo"]["sigmoid"]["options"])
    with torch.no_grad():
        ForwardWithObjective(model(LlamaForCausalLM, seed))(
            of, lambda outputs, b: _noted(told, algorithm.score(outputs, b))
        )
    return told[0]


def _noted(told: list[torch.Tensor], value: torch.Tensor) -> Any:
    from drumline.algorithms.base import LossOut

    told.append(value)
    return LossOut(value.sum())


def test_log_probs_are_trls() -> None:
    case = TRL["dpo"]["sigmoid"]
    assert log_probs(REFERENCE, batch([0, 1, 2, 3])).tolist() == pytest.approx(
        case["reference"], **CLOSE
    )


@pytest.mark.parametrize(
    "cuts",
    [[[0, 1, 2, 3]], [[2, 0], [3, 1]], [[3], [1], [0], [2]]],
    ids=["whole", "halves", "pairs"],
)
@pytest.mark.parametrize("name", TRL["dpo"])
def test_dpo_is_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForCausalLM

    case = TRL["dpo"][name]
    algorithm, policy = dpo(case["options"]), model(LlamaForCausalLM, POLICY)
    module = ForwardWithObjective(policy)
    sums: dict[str, float] = {}
    for picks in cuts:
        pairs = batch(picks)
        loss_sum, told = module(
            replace(pairs, reference_B=log_probs(REFERENCE, pairs)), algorithm.objective
        )
        (loss_sum / 4).backward()
        for key, value in {"loss": loss_sum.detach(), **told}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    figures = algorithm.metrics(sums)
    assert figures.pop("loss") == pytest.approx(case["loss"], **CLOSE)
    if "figures" in case:
        # Rewards are differences of log-probs near −60, and a padding of another width rounds these differently.
        assert figures == pytest.approx(case["figures"], rel=1e-5, abs=1e-5)
    close(gradients(policy), case["gradients"])


REWARD = {
    name: RewardModel(RewardModelConfig(margin=margin, center=center))
    for name, margin, center in (("plain", 0.0, 0.0), ("margins", 7.0, 0.0), ("centred", 0.0, 0.05))
}


@pytest.mark.parametrize("cuts", [[[0, 1, 2, 3]], [[3], [1, 0, 2]]], ids=["whole", "cut"])
@pytest.mark.parametrize("name", REWARD)
def test_the_reward_model_is_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForSequenceClassification

    case, learner, algorithm = (
        TRL["reward"][name],
        model(LlamaForSequenceClassification, POLICY),
        REWARD[name],
    )
    module = ForwardWithObjective(learner)
    sums: dict[str, float] = {}
    for picks in cuts:
        pairs = batch(picks, margins=name == "margins")
        loss_sum, told = module(pairs, algorithm.objective)
        (loss_sum / 4).backward()
        for key, value in {"loss": loss_sum.detach(), **told}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    assert sums["loss"] / 4 == pytest.approx(case["loss"], **CLOSE)
    figures = algorithm.step_metrics(sums)
    assert {key: figures[key] for key in case["figures"]} == pytest.approx(case["figures"], **CLOSE)
    close(gradients(learner), case["gradients"])


def test_sft_is_trls() -> None:
    from transformers import LlamaForCausalLM

    learner = model(LlamaForCausalLM, POLICY)
    chosen = collate([pair[:1] for pair in segments()], pad_id=0, width=None)
    loss_sum, _ = ForwardWithObjective(learner)(chosen, NextToken(16, answers=True).objective)
    loss = loss_sum / chosen.weight
    loss.backward()
    assert float(loss.detach()) == pytest.approx(TRL["sft"]["loss"], **CLOSE)
    close(gradients(learner), TRL["sft"]["gradients"])
