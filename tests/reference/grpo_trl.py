"""Makes grpo_trl.json: a fixed batch, and the losses and gradients of TRL's GRPOTrainer and
RLOOTrainer for it. Needs trl (1.16.0).

    python tests/reference/grpo_trl.py

The losses are those of TRL's own `_compute_loss`; only the model is replaced, by logits that are
given. CI reads the file, and has no trl.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOTrainer, RLOOTrainer

EPISODES = 6
LONGEST = 5
VOCABULARY = 7
MAX_COMPLETION = 8
LENGTHS = [5, 3, 1, 4, 2, 5]
BETA = 0.1
CAP = 1.5
# TRL's loss_type, and what differs from its defaults. `importance`: level of the generator's
# correction.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": BETA},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "clip_high": 0.28},
    "dapo_kl": {"loss_type": "dapo", "beta": BETA, "clip_high": 0.28},
    "grpo_importance_token": {"loss_type": "grpo", "beta": BETA, "importance": "token"},
    "dapo_importance_sequence": {"loss_type": "dapo", "clip_high": 0.28, "importance": "sequence"},
    "grpo_masked_token": {"loss_type": "grpo", "importance": "token", "importance_bound": "mask"},
    "dapo_masked_sequence": {
        "loss_type": "dapo",
        "beta": BETA,
        "importance": "sequence",
        "importance_bound": "mask",
    },
    "gspo": {"loss_type": "grpo", "ratio": "sequence", "clip_high": 0.05},
    "gspo_tight": {"loss_type": "dapo", "beta": BETA, "ratio": "sequence", "clip_high": 0.02},
    "cispo": {"loss_type": "cispo", "clip_high": 0.1},
    "cispo_sequence": {"loss_type": "cispo", "ratio": "sequence", "beta": BETA, "clip_high": 0.05},
    "two_sided": {"loss_type": "grpo", "delta": 1.3},
    "entropy": {"loss_type": "dapo", "entropy_weight": 0.3},
    "rloo": {"loss_type": "rloo", "ratio": "product"},
}
DEFAULTS = {"beta": 0.0, "clip_high": 0.2, "importance": "none"}
NORMALIZE = {
    "grpo": "sequence",
    "rloo": "sequence",
    "dr_grpo": "constant",
    "dapo": "token",
    "cispo": "token",
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
    old_BM = now_BM + 0.3 * normal(EPISODES, LONGEST)
    reference_BM = now_BM + 0.5 * normal(EPISODES, LONGEST)
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
    for name, options in CASES.items():
        leaf = logits_BMV.clone().requires_grad_()
        importance = options.get("importance", "none")
        batch: dict[str, Any] = {
            "prompt_ids": torch.zeros(EPISODES, 1, dtype=torch.long),
            "prompt_mask": torch.ones(EPISODES, 1, dtype=torch.long),
            "completion_ids": completions_BM,
            "completion_mask": mask_BM,
            "advantages": advantages_B,
            "old_per_token_logps": old_BM,
            "old_logps": (old_BM * mask_BM).sum(1),
            "ref_per_token_logps": reference_BM,
            "num_items_in_batch": mask_BM.sum(),
        }
        if importance != "none":
            # As _generate_and_score_completions does it for token_truncate, sequence_truncate,
            # token_mask and sequence_mask.
            difference = (old_BM - sampler_BM) * mask_BM
            if importance == "sequence":
                difference = difference.sum(-1, keepdim=True)
            ratio = difference.exp()
            if options.get("importance_bound") == "mask":
                batch["importance_sampling_ratio"] = ratio.masked_fill(ratio > CAP, 0.0)
            else:
                batch["importance_sampling_ratio"] = ratio.clamp(max=CAP)
        loss_type = options["loss_type"]
        kind = RLOOTrainer if loss_type == "rloo" else GRPOTrainer
        loss = kind._compute_loss(trainer(leaf, options), None, batch)
        loss.backward()
        differs = {key: value for key, value in options.items() if key != "loss_type"}
        cases[name] = {
            "normalize": NORMALIZE[loss_type],
            "surrogate": "cispo" if loss_type == "cispo" else "clip",
            **DEFAULTS,
            **differs,
            "loss": loss.item(),
            "gradient_BMV": leaf.grad.tolist(),
        }
    content = {
        "trl": trl.__version__,
        "lengths": LENGTHS,
        "max_completion": MAX_COMPLETION,
        "cap": CAP,
    }
    for name, tensor in inputs.items():
        content[name] = tensor.tolist()
    content["cases"] = cases
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


def log_probs(logits_BMV: torch.Tensor, tokens_BM: torch.Tensor) -> torch.Tensor:
    all_BMV = logits_BMV.log_softmax(-1)
    return all_BMV.gather(-1, tokens_BM[..., None]).squeeze(-1)


def trainer(logits_BMV: torch.Tensor, options: dict[str, Any]) -> Any:
    """What `_compute_loss` reads of a trainer."""

    def answers(
        _model: Any, input_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        probs = logits_BMV.softmax(-1)
        entropy = -(probs * probs.log()).sum(-1)
        return log_probs(logits_BMV, input_ids[:, 1:]), entropy, None

    corrects = options.get("importance", "none") != "none"
    cispo = options["loss_type"] == "cispo"  # TRL's epsilon_high is the bound itself there
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x.detach()
    )
    args = SimpleNamespace(
        delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=answers,
        accelerator=accelerator,
        args=args,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("ratio", "token"),
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=0.2,
        epsilon_high=options.get("clip_high", 0.2) + cispo,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        model=SimpleNamespace(training=False),
        max_completion_length=MAX_COMPLETION,
        _entropy_bonus_enabled="entropy_weight" in options,
        use_adaptive_entropy=False,
        entropy_coef=options.get("entropy_weight", 0.0),
        _metrics={"eval": defaultdict(list)},
    )


if __name__ == "__main__":
    main()
