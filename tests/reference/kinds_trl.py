"""Makes kinds_trl.json: losses and gradients of TRL's DPOTrainer, ORPOTrainer and CPOTrainer
(SimPO) for given models. Needs trl (1.16.0).

    python tests/reference/kinds_trl.py

The losses are those of TRL's own trainers; only the models are replaced, by logits that are given.
CI reads the file, and has no trl.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

PAIRS = 4
VOCABULARY = 7
LONGEST = 6  # a prompt of one token, and at most 5 of an answer
LENGTHS = [5, 3, 1, 4, 2, 5, 4, 3]  # of the answers: the chosen ones, then the rejected ones
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": {"sigmoid": 1.0}, "beta": 0.3},
    "hinge": {"loss": {"hinge": 1.0}, "beta": 0.3},
    "ipo": {"loss": {"ipo": 1.0}, "beta": 0.3},
    "sigmoid_norm": {"loss": {"sigmoid_norm": 1.0}, "beta": 2.0},
    "robust": {"loss": {"robust": 1.0}, "beta": 0.3, "label_smoothing": 0.1},
    "exo_pair": {"loss": {"exo_pair": 1.0}, "beta": 0.3, "label_smoothing": 1e-3},
    "nca_pair": {"loss": {"nca_pair": 1.0}, "beta": 0.3},
    "bco_pair": {"loss": {"bco_pair": 1.0}, "beta": 0.3},
    "sppo_hard": {"loss": {"sppo_hard": 1.0}, "beta": 0.3},
    "apo_zero": {"loss": {"apo_zero": 1.0}, "beta": 0.3},
    "apo_down": {"loss": {"apo_down": 1.0}, "beta": 0.3},
    "discopop": {"loss": {"discopop": 1.0}, "beta": 0.3, "discopop_tau": 0.05},
    "aot": {"loss": {"aot": 1.0}, "beta": 0.3},
    "aot, smoothed": {"loss": {"aot": 1.0}, "beta": 0.3, "label_smoothing": 0.2},
    "aot_unpaired": {"loss": {"aot_unpaired": 1.0}, "beta": 0.3, "label_smoothing": 0.1},
    "a weighted sum": {"loss": {"sigmoid": 0.8, "bco_pair": 0.2, "aot_unpaired": 0.5}, "beta": 0.3},
    "forward_kl": {"loss": {"sigmoid": 1.0}, "beta": 0.3, "f_divergence": "forward_kl"},
    "js_divergence": {"loss": {"hinge": 1.0}, "beta": 0.3, "f_divergence": "js_divergence"},
    "alpha_divergence": {
        "loss": {"ipo": 1.0},
        "beta": 0.3,
        "f_divergence": "alpha_divergence",
        "f_alpha": 0.3,
    },
}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
ORPO = {"beta 0.1": {"beta": 0.1}, "beta 1": {"beta": 1.0}}
SIMPO: dict[str, dict[str, Any]] = {
    "plain": {"beta": 2.0, "gamma": 1.0},
    "smoothed": {"beta": 2.5, "gamma": 0.3, "label_smoothing": 0.1},
    "with sft": {"beta": 2.0, "gamma": 0.5, "sft_weight": 0.7},
}


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (2 * PAIRS, LONGEST, VOCABULARY)
    logits_BTV = torch.randn(shape, generator=draw)
    reference_BTV = torch.randn(shape, generator=draw)
    tokens_BT = torch.randint(VOCABULARY, (2 * PAIRS, LONGEST), generator=draw)
    places_T = torch.arange(LONGEST)
    lengths_B1 = torch.tensor(LENGTHS)[:, None]
    answers_BT = (places_T > 0) & (places_T <= lengths_B1)
    reference_B = (log_probs(reference_BTV, tokens_BT) * answers_BT[:, 1:]).sum(1)
    content: dict[str, Any] = {
        "trl": trl.__version__,
        "lengths": LENGTHS,
        "logits_BTV": logits_BTV.tolist(),
        "tokens_BT": tokens_BT.tolist(),
        "reference_B": reference_B.tolist(),
        "dpo": {},
        "orpo": {},
        "simpo": {},
    }
    for name, o in DPO.items():
        leaf = logits_BTV.clone().requires_grad_()
        loss, metrics = dpo(o, leaf, reference_B, tokens_BT, answers_BT)
        content["dpo"][name] = case(o, leaf, loss, metrics)
    for kind, trainer_of, cases in (("orpo", orpo, ORPO), ("simpo", simpo, SIMPO)):
        for name, o in cases.items():
            leaf = logits_BTV.clone().requires_grad_()
            loss, metrics = alone(trainer_of(o), leaf, tokens_BT, answers_BT)
            content[kind][name] = case(o, leaf, loss, metrics)
    Path(__file__).with_suffix(".json").write_text(json.dumps(content) + "\n")


def case(
    options: dict[str, Any], leaf: torch.Tensor, loss: torch.Tensor, metrics: dict[str, float]
) -> dict[str, Any]:
    loss.backward()
    assert leaf.grad is not None
    return {
        "options": options,
        "loss": loss.item(),
        "metrics": metrics,
        "gradient_BTV": leaf.grad.tolist(),
    }


def log_probs(logits_BTV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Of each token behind the first."""
    all_BTV = logits_BTV[:, :-1].log_softmax(-1)
    return all_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)


def dpo(
    o: dict[str, Any],
    leaf: torch.Tensor,
    reference_B: torch.Tensor,
    tokens_BT: torch.Tensor,
    answers_BT: torch.Tensor,
) -> Any:
    zeros_BT = torch.zeros(tokens_BT[:, 1:].shape)

    def said(**_: Any) -> Any:
        said_BT = log_probs(leaf, tokens_BT) * answers_BT[:, 1:]
        return SimpleNamespace(
            log_probs=said_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool()
        )

    model: Any = said
    model.training = False
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=model,
        accelerator=accelerator,
        args=SimpleNamespace(discopop_tau=o.get("discopop_tau", 0.05)),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=o.get("f_divergence", "reverse_kl"),
        f_alpha_divergence_coef=o.get("f_alpha", 0.5),
        loss_types=list(o["loss"]),
        loss_weights=list(o["loss"].values()),
        beta=o["beta"],
        label_smoothing=o.get("label_smoothing", 0.0),
        use_weighting=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    # `completion_mask[..., 1:]` marks targets; lengths are counted over the mask, whose first
    # column is a prompt's token.
    inputs = {"input_ids": tokens_BT, "completion_mask": answers_BT.long()}
    chosen, rejected = reference_B.chunk(2)
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    found = trainer._metrics["eval"]
    return loss, {name: found[name][-1] for name in REWARDS}


def alone(
    trainer: Any, leaf: torch.Tensor, tokens_BT: torch.Tensor, answers_BT: torch.Tensor
) -> Any:
    """Mean over batches of one pair: TRL's likelihood term is a mean over all tokens of a batch,
    which hangs on how it is cut."""
    total = torch.zeros(())
    metrics = defaultdict[str, float](float)
    for pair in range(PAIRS):
        rows = [pair, PAIRS + pair]
        ids = tokens_BT[rows]
        labels = ids.where(answers_BT[rows], -100)
        real = answers_BT[rows] | (torch.arange(LONGEST) == 0)
        batch = {}
        for row, side in enumerate(("chosen", "rejected")):
            this = slice(row, row + 1)
            batch[f"{side}_input_ids"] = ids[this]
            batch[f"{side}_labels"] = labels[this]
            batch[f"{side}_attention_mask"] = real[this].long()
        said = SimpleNamespace(logits=leaf[rows])
        loss, found = type(trainer).get_batch_loss_metrics(
            trainer, lambda *_, said=said, **__: said, batch
        )
        total = total + loss / PAIRS
        for name in (*REWARDS, "logps/chosen", "logps/rejected"):
            metrics[name] += float(found[name]) / PAIRS
    return total, dict(metrics)


def bare(kind: Any, **values: Any) -> Any:
    """A trainer that has nothing but what its loss reads."""
    made = kind.__new__(kind)
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
    shared = {
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "padding_value": 0,
        "pad_token_id": 0,
    }
    for name, value in (shared | values).items():
        setattr(made, name, value)
    return made


def orpo(options: dict[str, Any]) -> Any:
    return bare(ORPOTrainer, beta=options["beta"])


def simpo(o: dict[str, Any]) -> Any:
    return bare(
        CPOTrainer,
        loss_type="simpo",
        alpha=0.0,
        beta=o["beta"],
        simpo_gamma=o["gamma"],
        label_smoothing=o.get("label_smoothing", 0.0),
        cpo_alpha=o.get("sft_weight", 0.0),
    )


if __name__ == "__main__":
    main()
