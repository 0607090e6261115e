"""Makes kto_trl.json: what TRL's KTOTrainer makes of eight answers in one batch. Needs trl (made
with 1.16.0).

    PYTHONPATH=. python tests/reference/kto_trl.py

TRL does all of it: it tokenises the rows, pairs prompts with other answers for the KL, runs both
models, and gives the loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import KTOConfig, KTOTrainer

from tests.reference.pairs import gradients, model, tokenizer, unpaired
from tests.reference.pairs_trl import POLICY, REFERENCE, batches, common

CASES: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.1},
    "weighted": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "apo_zero": {"beta": 0.2, "loss_type": "apo_zero_unpaired", "undesirable_weight": 2.0},
    # The models change sides: a KL that is below 0 is clipped in one of the two.
    "other_way": {"beta": 0.1, "seeds": [REFERENCE, POLICY]},
}
FIGURES = {
    "kl": "kl",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "margin": "rewards/margins",
    "log_prob_chosen": "logps/chosen",
    "log_prob_rejected": "logps/rejected",
}


def kto(options: dict[str, Any]) -> dict[str, Any]:
    policy_seed, reference_seed = options.pop("seeds", (POLICY, REFERENCE))
    rows = unpaired()
    policy = model(LlamaForCausalLM, policy_seed)
    reference = model(LlamaForCausalLM, reference_seed)
    settings = KTOConfig(**common(len(rows)), **options)
    trainer = KTOTrainer(
        policy,
        ref_model=reference,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    policy.zero_grad()
    policy.train()
    (batch,) = batches(trainer)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = trainer._metrics["train"]
    figures = {mine: metrics[theirs][-1] for mine, theirs in FIGURES.items()}
    return {
        "seeds": [policy_seed, reference_seed],
        "loss": float(loss.detach()),
        "figures": figures,
        "gradients": gradients(policy),
    }


def main() -> None:
    cases = {}
    for name, case in CASES.items():
        options = {key: value for key, value in case.items() if key != "seeds"}
        cases[name] = {"options": options, **kto(dict(case))}
    content = {"trl": trl.__version__, "cases": cases}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
