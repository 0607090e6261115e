"""DPO, the reward model and SFT on four fixed pairs equal TRL's to 1e-5.

That is, their tokens, losses, log-probs, figures and gradients. The numbers are those of
`tests/reference/pairs_trl.json`; TRL's own tokeniser calls, collators and models made them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.algorithms.base import LossOut
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

NUMBERS = Path(__file__).parents[1] / "reference" / "pairs_trl.json"
TRL: dict[str, Any] = json.loads(NUMBERS.read_text())
SIGMOID = TRL["dpo"]["sigmoid"]
POLICY = 1
REFERENCE = 2
ALL = [0, 1, 2, 3]
CLOSE = {"rel": 1e-5, "abs": 1e-6}


def segments() -> list[Any]:
    source = {"kind": "file", "path": "unused"}
    data = DataConfig.model_validate({"train": [source], "max_length": 128})
    encoder = PairRowEncoder(tokenizer(), data)
    found = []
    for index, row in enumerate(rows()):
        pair = encoder.encode(Row(f"row {index}", row))
        if pair is not None:
            sides = [(side.tokens, side.learn) for side in pair.segments]
            found.append(sides)

    return found


def batch(picks: list[int], margins: bool = False) -> PairBatch:
    pairs = segments()
    picked = []
    metas: list[dict[str, Any]] = []
    for pick in picks:
        picked.append(pairs[pick])
        if margins:
            metas.append({"margin": MARGINS[pick]})
        else:
            metas.append({})

    return pair_batch(picked, picks, metas, pad_id=0, width=None)


def close(
    mine: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    """Norms of all gradients, and every entry of the stored ones, to 1e-5 of the largest."""
    assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    for name, entries in theirs["entries"].items():
        largest = max(map(abs, entries))
        expected = pytest.approx(entries, rel=1e-5, abs=1e-5 * largest)
        assert mine["entries"][name] == expected, name


def language_model(seed: int) -> Any:
    from transformers import LlamaForCausalLM

    return model(LlamaForCausalLM, seed)


def dpo(options: dict[str, Any]) -> DPO:
    kind, *more = options["loss_type"]
    if kind == "aot":
        kind = "sigmoid"

    sft_weight = 0.0
    if more == ["sft"]:
        sft_weight = options["loss_weights"][1]

    config = DPOConfig(
        beta=options["beta"],
        loss=kind,
        label_smoothing=options.get("label_smoothing", 0.0),
        sft_weight=sft_weight,
        loss_chunk=16,
    )
    return config.build()


def test_the_rows_are_trls_rows() -> None:
    theirs = SIGMOID["batch"]
    mine = batch(ALL)
    assert mine.input_ids_BT.tolist() == theirs["input_ids"]

    lengths = [sum(mask) for mask in theirs["attention_mask"]]
    assert (mine.last_B + 1).tolist() == lengths

    # A token is learned at the place before it.
    learned = (mine.targets_BT[:, :-1] != -100).long()
    assert learned.tolist() == [mask[1:] for mask in theirs["completion_mask"]]


def reference_log_probs(pairs: PairBatch) -> torch.Tensor:
    """Return the log-probs of each row's answer under the reference."""
    algorithm = dpo(SIGMOID["options"])
    told: list[torch.Tensor] = []

    def note(outputs: Any, batch: PairBatch) -> LossOut:
        log_probs_B = algorithm.score(outputs, batch)
        told.append(log_probs_B)
        return LossOut(log_probs_B.sum())

    module = ForwardWithObjective(language_model(REFERENCE))
    with torch.no_grad():
        module(pairs, note)

    return told[0]


def test_log_probs_are_trls() -> None:
    log_probs_B = reference_log_probs(batch(ALL))
    assert log_probs_B.tolist() == pytest.approx(SIGMOID["reference"], **CLOSE)


def train(
    learner: Any,
    algorithm: Any,
    batches: list[PairBatch],
) -> dict[str, float]:
    """Return the sums over all batches; the learner's parameters get their gradients."""
    module = ForwardWithObjective(learner)
    sums: dict[str, float] = defaultdict(float)
    for pairs in batches:
        loss_sum, told = module(pairs, algorithm.objective)
        (loss_sum / len(ALL)).backward()
        sums["loss"] += float(loss_sum.detach())
        for key, value in told.items():
            sums[key] += float(value)

    return dict(sums)


@pytest.mark.parametrize(
    "cuts",
    [[ALL], [[2, 0], [3, 1]], [[3], [1], [0], [2]]],
    ids=["whole", "halves", "pairs"],
)
@pytest.mark.parametrize("name", TRL["dpo"])
def test_dpo_is_trls(name: str, cuts: list[list[int]]) -> None:
    case = TRL["dpo"][name]
    algorithm = dpo(case["options"])
    policy = language_model(POLICY)
    batches = []
    for picks in cuts:
        pairs = batch(picks)
        reference_B = reference_log_probs(pairs)
        batches.append(replace(pairs, reference_B=reference_B))

    sums = train(policy, algorithm, batches)

    figures = algorithm.metrics(sums)
    assert figures.pop("loss") == pytest.approx(case["loss"], **CLOSE)
    if "figures" in case:
        # Rewards are differences of log-probs near −60, which a padding of another width
        # rounds differently.
        assert figures == pytest.approx(case["figures"], rel=1e-5, abs=1e-5)
    close(gradients(policy), case["gradients"])


REWARD = {
    "plain": RewardModelConfig(margin=0.0, center=0.0),
    "margins": RewardModelConfig(margin=7.0, center=0.0),
    "centred": RewardModelConfig(margin=0.0, center=0.05),
}


@pytest.mark.parametrize("cuts", [[ALL], [[3], [1, 0, 2]]], ids=["whole", "cut"])
@pytest.mark.parametrize("name", REWARD)
def test_the_reward_model_is_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForSequenceClassification

    case = TRL["reward"][name]
    algorithm = RewardModel(REWARD[name])
    learner = model(LlamaForSequenceClassification, POLICY)
    has_margins = name == "margins"
    batches = [batch(picks, has_margins) for picks in cuts]

    sums = train(learner, algorithm, batches)

    assert sums["loss"] / len(ALL) == pytest.approx(case["loss"], **CLOSE)
    figures = algorithm.step_metrics(sums)
    for key, expected in case["figures"].items():
        assert figures[key] == pytest.approx(expected, **CLOSE), key
    close(gradients(learner), case["gradients"])


def test_sft_is_trls() -> None:
    learner = language_model(POLICY)
    module = ForwardWithObjective(learner)
    documents = [pair[:1] for pair in segments()]
    chosen = collate(documents, pad_id=0, width=None)
    objective = NextToken(16, has_answers=True).objective

    loss_sum, _ = module(chosen, objective)
    loss = loss_sum / chosen.weight
    loss.backward()

    expected = TRL["sft"]
    assert float(loss.detach()) == pytest.approx(expected["loss"], **CLOSE)
    close(gradients(learner), expected["gradients"])
