"""Makes pairs_trl.json: what TRL's DPOTrainer, RewardTrainer and SFTTrainer make of four pairs.
Needs trl (made with 1.16.0).

    PYTHONPATH=. python tests/reference/pairs_trl.py

TRL does all of it: it tokenises the rows, collates them, runs the model, and gives the loss that is
differentiated. CI reads the file, and has no trl.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from tests.reference.pairs import FIGURES, MARGINS, gradients, model, rows, tokenizer

POLICY = 1
REFERENCE = 2
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": ["sigmoid"], "beta": 0.1},
    "sigmoid_beta_2": {"loss_type": ["sigmoid"], "beta": 2.0},
    "ipo": {"loss_type": ["ipo"], "beta": 0.3},
    "hinge": {"loss_type": ["hinge"], "beta": 0.05},
}
# Named otherwise in TRL 1.16, and equal there for batches of one pair: `aot` without a second pair
# to sort, and `sft` added to DPO.
ALONE: dict[str, dict[str, Any]] = {
    "smoothed": {"loss_type": ["aot"], "beta": 0.4, "label_smoothing": 0.2},
    "with_sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.1},
}


def common(size: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": size,
        "dataloader_drop_last": False,
        "max_length": 128,
        "seed": 0,
        "disable_tqdm": True,
    }


def batches(trainer: Any) -> list[Any]:
    """TRL's own batches of its own dataset, in the order of the rows."""
    size = trainer.args.per_device_train_batch_size
    dataset = trainer.train_dataset
    found = []
    for start in range(0, len(dataset), size):
        stop = min(start + size, len(dataset))
        some = [dataset[index] for index in range(start, stop)]
        found.append(trainer.data_collator(some))
    return found


def learn(trainer: Any) -> dict[str, Any]:
    """Mean loss over the batches, and its gradient."""
    trainer.model.zero_grad()
    trainer.model.train()  # no dropout in it; some figures of TRL's are kept by mode
    cut = batches(trainer)
    losses = []
    for batch in cut:
        loss = trainer.compute_loss(trainer.model, batch)
        (loss / len(cut)).backward()
        losses.append(float(loss))
    mean = sum(losses) / len(losses)
    return {"loss": mean, "gradients": gradients(trainer.model)}


def dpo(options: dict[str, Any], size: int) -> dict[str, Any]:
    policy = model(LlamaForCausalLM, POLICY)
    reference = model(LlamaForCausalLM, REFERENCE)
    settings = DPOConfig(**common(size), **options)
    trainer = DPOTrainer(
        policy,
        ref_model=reference,
        args=settings,
        train_dataset=Dataset.from_list(rows()),
        processing_class=tokenizer(),
    )
    case = learn(trainer)
    if size == len(rows()):
        metrics = trainer._metrics["train"]
        case["figures"] = {ours: metrics[theirs][-1] for ours, theirs in FIGURES.items()}
        (batch,) = batches(trainer)
        case["batch"] = {}
        for name in ("input_ids", "attention_mask", "completion_mask"):
            case["batch"][name] = batch[name].tolist()
        chosen, rejected = trainer.compute_ref_log_probs(reference, batch)
        case["reference"] = [*chosen.tolist(), *rejected.tolist()]
    return case


def reward(options: dict[str, Any], margins: bool) -> dict[str, Any]:
    data = rows()
    if margins:
        for row, margin in zip(data, MARGINS, strict=True):
            row["margin"] = margin
    settings = RewardConfig(**common(len(data)), **options)
    learner = model(LlamaForSequenceClassification, POLICY)
    trainer = RewardTrainer(
        learner, args=settings, train_dataset=Dataset.from_list(data), processing_class=tokenizer()
    )
    case = learn(trainer)
    metrics = trainer._metrics["train"]
    figures = {name: metrics[name][-1] for name in ("accuracy", "margin")}
    return {**case, "figures": figures}


def sft() -> dict[str, Any]:
    data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows()]
    settings = SFTConfig(**common(len(data)), completion_only_loss=True)
    learner = model(LlamaForCausalLM, POLICY)
    trainer = SFTTrainer(
        learner, args=settings, train_dataset=Dataset.from_list(data), processing_class=tokenizer()
    )
    return learn(trainer)


def main() -> None:
    torch.set_num_threads(1)
    size = len(rows())
    cases: dict[str, Any] = {}
    for name, options in DPO.items():
        cases[name] = {"options": options, **dpo(options, size)}
    for name, options in ALONE.items():
        cases[name] = {"options": options, **dpo(options, 1)}
    content = {
        "trl": trl.__version__,
        "dpo": cases,
        "reward": {
            "plain": reward({}, False),
            "margins": reward({}, True),
            "centred": reward({"center_rewards_coefficient": 0.05}, False),
        },
        "sft": sft(),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
