"""Makes gkd_trl.json: losses and gradients of TRL's GKDTrainer for given logits. Needs trl (made with
1.16.0).

    python tests/reference/gkd_trl.py

The losses are those of TRL's own methods; only the two models are replaced, by logits that are given.
CI reads the file, and has no trl.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.experimental.gkd import GKDTrainer

VOCABULARY = 7
LONGEST = 8
# Each row is a prompt, a completion and padding. In GKD's episodes an environment may have written
# some of a completion's tokens, which are masked as prompts are.
PROMPTS = [2, 1, 4]
COMPLETIONS = [[True, True, True], [True, False, False, True, True, True, True], [True]]
BETAS = (0.0, 0.1, 0.5, 1.0)
TEMPERATURES = (1.0, 2.0)
# What TRL divides by if a step has more batches than this one: their tokens.
TOKENS_OF_A_STEP = 20
MASKED = -100


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (len(PROMPTS), LONGEST, VOCABULARY)
    student_BTV = 2 * torch.randn(shape, generator=draw)
    teacher_BTV = 2 * torch.randn(shape, generator=draw)
    tokens_BT = torch.randint(1, VOCABULARY, shape[:2], generator=draw)
    labels_BT = learned_labels(tokens_BT)
    content: dict[str, Any] = {
        "trl": trl.__version__,
        "prompts": PROMPTS,
        "completions": COMPLETIONS,
        "tokens_of_a_step": TOKENS_OF_A_STEP,
        "student_BTV": student_BTV.tolist(),
        "teacher_BTV": teacher_BTV.tolist(),
        "tokens_BT": tokens_BT.tolist(),
        "losses": [],
        "trainer": [],
    }
    for beta in BETAS:
        for temperature in TEMPERATURES:
            leaf = student_BTV.clone().requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(
                leaf[:, :-1],
                teacher_BTV[:, :-1],
                labels=labels_BT[:, 1:],
                beta=beta,
                temperature=temperature,
            )
            content["losses"].append(case(beta, temperature, leaf, loss))

            for tokens in (None, TOKENS_OF_A_STEP):
                leaf = student_BTV.clone().requires_grad_()
                loss = trainer_loss(beta, temperature, leaf, teacher_BTV, labels_BT, tokens)
                found = case(beta, temperature, leaf, loss)
                del found["gradient_BTV"]
                content["trainer"].append({**found, "num_items_in_batch": tokens})
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


def learned_labels(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the tokens that are learned, and MASKED for all others."""
    labels_BT = torch.full_like(tokens_BT, MASKED)
    for row, (prompt, flags) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        for place, is_learned in enumerate(flags, start=prompt):
            if is_learned:
                labels_BT[row, place] = tokens_BT[row, place]
    return labels_BT


def case(beta: float, temperature: float, leaf: torch.Tensor, loss: torch.Tensor) -> dict[str, Any]:
    loss.backward()
    assert leaf.grad is not None
    return {
        "beta": beta,
        "temperature": temperature,
        "loss": loss.item(),
        "gradient_BTV": leaf.grad.tolist(),
    }


def trainer_loss(
    beta: float,
    temperature: float,
    student_BTV: torch.Tensor,
    teacher_BTV: torch.Tensor,
    labels_BT: torch.Tensor,
    tokens: int | None,
) -> torch.Tensor:
    """Return the loss that GKDTrainer differentiates.

    `tokens`: what transformers' Trainer counted in the batches of a step; None: it did not.
    """
    trainer: Any = GKDTrainer.__new__(GKDTrainer)
    trainer.beta = beta
    trainer.temperature = temperature
    trainer.teacher_model = Fixed(teacher_BTV)
    inputs = {
        "input_ids": labels_BT.clamp(min=0),
        "attention_mask": torch.ones_like(labels_BT),
        "labels": labels_BT,
    }
    student = Fixed(student_BTV)
    loss: torch.Tensor = trainer.compute_loss(student, inputs, num_items_in_batch=tokens)
    return loss


class Fixed(torch.nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits_BTV: torch.Tensor) -> None:
        super().__init__()
        self.logits_BTV = logits_BTV

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits_BTV)


if __name__ == "__main__":
    main()
