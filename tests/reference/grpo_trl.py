"""Makes grpo_trl.json: a fixed batch, and the losses and gradients that TRL's GRPOTrainer gives for it. Needs trl (made with 1.16.0).

    python tests/reference/grpo_trl.py

The losses are those of TRL's own `_compute_loss`; only the model is replaced, by logits that are given. CI reads the file, and has no trl.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

EPISODES, LONGEST, VOCABULARY, MAX_COMPLETION = 6, 5, 7, 8
LENGTHS = [5, 3, 1, 4, 2, 5]
BETA, CAP = 0.1, 1.5
# TRL's loss_type, our normalize; KL weight; upper clip; level of the generator's correction
CASES = {
    "grpo": ("grpo", "sequence", 0.0, 0.2, "none"),
    "grpo_kl": ("grpo", "sequence", BETA, 0.2, "none"),
    "dr_grpo": ("dr_grpo", "constant", 0.0, 0.2, "none"),
    "dapo": ("dapo", "token", 0.0, 0.28, "none"),
    "dapo_kl": ("dapo", "token", BETA, 0.28, "none"),
    "grpo_importance_token": ("grpo", "sequence", BETA, 0.2, "token"),
    "dapo_importance_sequence": ("dapo", "token", 0.0, 0.28, "sequence"),
}


def main() -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    logits_BMV = normal(EPISODES, LONGEST, VOCABULARY)
    completions_BM = torch.randint(VOCABULARY, (EPISODES, LONGEST), generator=draw)
    mask_BM = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
    now_BM = log_probs(logits_BMV, completions_BM)
    # Far enough from the present policy that some tokens are clipped on each side.
    old_BM, reference_BM = now_BM + 0.3 * normal(EPISODES, LONGEST), now_BM + 0.5 * normal(EPISODES, LONGEST)
    sampler_BM = old_BM + 0.4 * normal(EPISODES, LONGEST)
    advantages_B = normal(EPISODES)
    inputs = {
        "logits_BMV": logits_BMV,
        "completions_BM": completions_BM,
        "old_log_probs_BM": old_BM,
        "reference_log_probs_BM": reference_BM,
        "sampler_log_probs_BM": sampler_BM,
        "advantages_B": advantages_B,
    }
    cases = {}
    for name, (loss_type, normalize, beta, clip_high, importance) in CASES.items():
        leaf = logits_BMV.clone().requires_grad_()
        batch: dict[str, Any] = {
            "prompt_ids": torch.zeros(EPISODES, 1, dtype=torch.long),
            "prompt_mask": torch.ones(EPISODES, 1, dtype=torch.long),
            "completion_ids": completions_BM,
            "completion_mask": mask_BM,
            "advantages": advantages_B,
            "old_per_token_logps": old_BM,
            "ref_per_token_logps": reference_BM,
            "num_items_in_batch": mask_BM.sum(),
        }
        if importance != "none":
            # As _generate_and_score_completions does it for token_truncate and sequence_truncate.
            difference = (old_BM - sampler_BM) * mask_BM
            difference = difference.sum(-1, keepdim=True) if importance == "sequence" else difference
            batch["importance_sampling_ratio"] = difference.exp().clamp(max=CAP)
        loss = GRPOTrainer._compute_loss(trainer(leaf, loss_type, beta, clip_high, importance != "none"), None, batch)
        loss.backward()
        cases[name] = {
            "normalize": normalize,
            "beta": beta,
            "clip_high": clip_high,
            "importance": importance,
            "loss": loss.item(),
            "gradient_BMV": leaf.grad.tolist(),
        }
    said = {"trl": __import__("trl").__version__, "lengths": LENGTHS, "max_completion": MAX_COMPLETION, "cap": CAP}
    content = {**said, **{name: tensor.tolist() for name, tensor in inputs.items()}, "cases": cases}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


def log_probs(logits_BMV: torch.Tensor, tokens_BM: torch.Tensor) -> torch.Tensor:
    return logits_BMV.log_softmax(-1).gather(-1, tokens_BM[..., None]).squeeze(-1)


def trainer(logits_BMV: torch.Tensor, loss_type: str, beta: float, clip_high: float, importance: bool) -> Any:
    """What `_compute_loss` reads of a trainer."""

    def answers(_model: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        probs = logits_BMV.softmax(-1)
        entropy = -(probs * probs.log()).sum(-1)
        return log_probs(logits_BMV, input_ids[:, 1:]), entropy.detach(), None

    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=answers,
        accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=clip_high,
        use_vllm=importance,
        vllm_importance_sampling_correction=importance,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_COMPLETION,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


if __name__ == "__main__":
    main()
