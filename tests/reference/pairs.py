"""The fixed pairs and weights, and names of metrics, that pairs_trl.py and tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.tiny import CHATML, SPECIAL, tiny_tokenizer

# Without the line break behind a turn: TRL counts it among the answer's tokens, Drumline does not.
TEMPLATE = CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")
PAIRS = [
    ("What is two plus three?", "Two plus three is five.", "It is six."),
    ("Name the capital of Italy.", "Rome.", "The capital of Italy is Paris, I think."),
    ("one, two, three,", "four", "five, six"),
    (
        "Does every rank keep in step?",
        "Yes: a gradient is summed over the ranks before the optimizer takes a step.",
        "No.",
    ),
]
MARGINS = [0.5, 0.0, 1.5, 0.25]
# Our metrics of pairs, as TRL calls them.
FIGURES = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "log_prob_chosen": "logps/chosen",
    "log_prob_rejected": "logps/rejected",
}
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


def tokenizer() -> Any:
    made = tiny_tokenizer(chat_template=TEMPLATE)
    assert made.convert_tokens_to_ids(SPECIAL) == [0, 1, 2]
    return made


def model(kind: Any, seed: int) -> Any:
    """A Llama of the given class. Weights from numpy's legacy generator, which no version of torch
    or transformers changes."""
    from transformers import AutoConfig

    text = tokenizer()
    config = AutoConfig.for_model(
        "llama",
        **SIZES,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        num_labels=1,
    )
    made = kind(config).float()
    draw = np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            values = draw.standard_normal(tuple(parameter.shape))
            drawn = torch.from_numpy(values).float()
            if "norm" in name:
                parameter.copy_(1 + 0.1 * drawn)
            else:
                parameter.copy_(0.2 * drawn)
    return made.eval()


def messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows() -> list[dict[str, Any]]:
    found = []
    for prompt, chosen, rejected in PAIRS:
        row = {
            "prompt": messages("user", prompt),
            "chosen": messages("assistant", chosen),
            "rejected": messages("assistant", rejected),
        }
        found.append(row)
    return found


def unpaired() -> list[dict[str, Any]]:
    """The answers one by one, each with what is thought of it: all that were chosen, then all that
    were rejected."""
    found = []
    for side in ("chosen", "rejected"):
        for row in rows():
            answer = {"completion": row[side], "label": side == "chosen"}
            found.append({"prompt": row["prompt"], **answer})
    return found


def gradients(learner: Any) -> dict[str, Any]:
    """Of each parameter the norm of its gradient; of the small ones every entry."""
    norms = {}
    entries = {}
    for name, parameter in learner.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        norms[name] = float(gradient.norm())
        if "norm" in name or "score" in name:
            entries[name] = gradient.flatten().tolist()
    return {"norms": norms, "entries": entries}
