"""Distillation for given logits: losses and gradients equal those of TRL's GKDTrainer to 1e-5.

The numbers are those of `tests/reference/gkd_trl.json`; TRL's own methods made them. How the two relate:

- TRL's `beta` weights the teacher, as ours does. At 0 it is `forward_kl`, and at 1 `reverse_kl`.
- TRL divides by the learned tokens of the batch, or of the whole step with gradient accumulation. We
  always divide by those of the step.
- Neither multiplies by the square of the temperature.
- TRL's trainer keeps its `temperature` for sampling: its loss is at temperature 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.distill.objective import Distillation
from drumline.algorithms.distill.spec import DistillConfig
from drumline.algorithms.gkd.objective import OnPolicyDistillation
from drumline.algorithms.gkd.spec import GKDConfig
from drumline.data.batches import IGNORE, Episodes, Segment, collate
from drumline.data.taught import TaughtBatch, collate_taught_episodes
from drumline.models.head import Outputs
from drumline.models.losses import LinearHead
from drumline.models.teaching import TeacherStates

TRL_FILE = Path(__file__).parents[1] / "reference" / "gkd_trl.json"
TRL: dict[str, Any] = json.loads(TRL_FILE.read_text())
STUDENT_BTV = torch.tensor(TRL["student_BTV"])
TEACHER_BTV = torch.tensor(TRL["teacher_BTV"])
ROWS, WIDTH, VOCABULARY = STUDENT_BTV.shape
TOKENS = 9
PAD = 0

# How TRL's batch is cut into micro-batches. -1 is a filler.
Cuts = list[list[int]]
CUTS = {"whole": [[0, 1, 2]], "parts": [[2, -1], [1, 0]]}


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return our keys for a beta and a temperature of TRL's loss."""
    options: dict[str, Any] = {"temperature": case["temperature"], "top_k": 0, "loss_chunk": 3}
    if case["beta"] == 0:
        return {**options, "divergence": "forward_kl"}
    if case["beta"] == 1:
        return {**options, "divergence": "reverse_kl"}
    return {**options, "divergence": "jsd", "beta": case["beta"]}


def algorithm_of(kind: str, options: dict[str, Any]) -> Any:
    """Return the algorithm `distill` or `gkd` with these keys."""
    teacher = {"id": "some/model"}
    if kind == "gkd":
        return OnPolicyDistillation(GKDConfig.model_validate({"teacher": teacher, **options}))
    live = {"teacher": teacher, "log_probs": "live", **options}
    return Distillation(DistillConfig.model_validate(live))


def tokens_of(row: int) -> tuple[Any, Any]:
    """Return the tokens of the prompt and of the completion of one of TRL's rows."""
    start = TRL["prompts"][row]
    stop = start + len(TRL["completions"][row])
    tokens = np.array(TRL["tokens_BT"][row])
    return tokens[:start], tokens[start:stop]


def episode_batch(picks: list[int]) -> TaughtBatch:
    """Return a batch of `gkd`, whose masked tokens of completions are an environment's."""
    prompts = []
    completions = []
    for row in range(ROWS):
        prompt, completion = tokens_of(row)
        prompts.append(prompt)
        completions.append(completion)
    started = Episodes.start(prompts, completions, sampled=TRL["completions"])
    spec = GKDConfig.model_validate({"teacher": {"id": "some/model"}})
    episodes = spec.assign_credit(started, torch.zeros(ROWS), None)
    return collate_taught_episodes(episodes, picks, PAD, WIDTH)


def text_batch(picks: list[int]) -> TaughtBatch:
    """Return a batch of `distill`, whose prompts and masked tokens are not learned."""
    rows: list[list[Segment] | None] = []
    for pick in picks:
        if pick < 0:
            rows.append(None)
            continue
        prompt, completion = tokens_of(pick)
        learn = np.concatenate([np.zeros(len(prompt)), TRL["completions"][pick]])
        rows.append([(np.concatenate([prompt, completion]), learn)])
    return TaughtBatch(**vars(collate(rows, PAD, WIDTH)))


BATCHES = {"gkd": episode_batch, "distill": text_batch}


def outputs_of(logits_BTV: torch.Tensor, has_head: bool) -> Outputs:
    """Return outputs with these logits, as they are or by a head that changes nothing."""
    if has_head:
        return Outputs(hidden_BTD=logits_BTV, weight_VD=torch.eye(VOCABULARY))
    return Outputs(logits_BTV=logits_BTV)


def summed_losses(
    kind: str, algorithm: Any, cuts: Cuts, has_head: bool = False
) -> tuple[float, torch.Tensor]:
    """Return the loss summed over the tokens of all micro-batches, and its gradient, [B, T, V]."""
    leaf = STUDENT_BTV.clone().requires_grad_()
    total = 0.0
    tokens = 0.0
    for picks in cuts:
        batch = BATCHES[kind](picks)
        tokens += batch.weight
        # A filler has no target, so any logits will do for it.
        rows = [max(0, pick) for pick in picks]
        taught = TEACHER_BTV[rows][batch.targets_BT != IGNORE]
        teacher = TeacherStates(taught, LinearHead(torch.eye(VOCABULARY)))
        outputs = outputs_of(leaf[rows], has_head)
        out = algorithm.objective(outputs, replace(batch, teacher=teacher))
        out.loss_sum.backward()
        total += out.loss_sum.item()
    assert tokens == TOKENS
    assert leaf.grad is not None
    return total, leaf.grad


def name_of(case: dict[str, Any]) -> str:
    return f"beta {case['beta']} at {case['temperature']}"


@pytest.mark.claim("distillation's losses are those of TRL's GKD")
@pytest.mark.parametrize("has_head", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("case", TRL["losses"], ids=name_of)
def test_losses_and_gradients_are_trl_s(
    case: dict[str, Any], kind: str, cuts: Cuts, has_head: bool
) -> None:
    algorithm = algorithm_of(kind, options_of(case))

    loss_sum, gradient_BTV = summed_losses(kind, algorithm, cuts, has_head)

    assert loss_sum / TOKENS == pytest.approx(case["loss"], rel=1e-5)
    expected_BTV = torch.tensor(case["gradient_BTV"])
    torch.testing.assert_close(gradient_BTV / TOKENS, expected_BTV, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", TRL["trainer"], ids=name_of)
def test_trl_s_trainer_divides_by_tokens_and_has_temperature_1(case: dict[str, Any]) -> None:
    algorithm = algorithm_of("gkd", options_of({**case, "temperature": 1.0}))

    loss_sum, _ = summed_losses("gkd", algorithm, CUTS["whole"])

    divisor = TOKENS if case["num_items_in_batch"] is None else TRL["tokens_of_a_step"]
    assert loss_sum / divisor == pytest.approx(case["loss"], rel=1e-5)
