"""The seam between a model and a loss: hidden states and the head's weight where the model allows it, logits where not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Outputs:
    """What an objective gets. Either `logits_BTV`, or `hidden_BTD` with the head: logits = hidden @ weight_VDᵀ + bias_V."""

    hidden_BTD: torch.Tensor | None = None
    weight_VD: torch.Tensor | None = None
    bias_V: torch.Tensor | None = None
    logits_BTV: torch.Tensor | None = None


def split(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """(trunk, head) of a causal LM as the class lays them out; None where it does not have both."""
    trunk, head = getattr(model, "base_model", None), model.get_output_embeddings()
    if trunk is None or trunk is model or head is None or getattr(head, "weight", None) is None:
        return None
    return trunk, head


@torch.no_grad()
def can_split(model: Any) -> bool:
    """Whether the model's logits are its head over its trunk and nothing else (no soft-capping, no scaling).

    Found out by trying eight tokens, not by a list of classes. Random state and training mode are left as they were.
    """
    parts = split(model)
    if parts is None:
        return False
    trunk, head = parts
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device)[None] % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    try:
        expected = model(input_ids=ids, use_cache=False).logits
        got = head(trunk(input_ids=ids, use_cache=False).last_hidden_state)
        return expected.shape == got.shape and torch.allclose(expected.float(), got.float(), rtol=1e-5, atol=1e-6)
    finally:
        model.train(training)


def outputs(model: Any, batch: Any, parts: tuple[nn.Module, nn.Module] | None) -> Outputs:
    """Run a model on a batch (`input_ids_BT`, `position_ids_BT`). Documents of a pack are told apart by positions that start
    again; no attention mask is given, and transformers makes the block-diagonal one from the positions."""
    inputs = {"input_ids": batch.input_ids_BT, "position_ids": batch.position_ids_BT, "use_cache": False}
    if parts is None:
        return Outputs(logits_BTV=model(**inputs).logits)
    trunk, head = parts
    return Outputs(hidden_BTD=trunk(**inputs).last_hidden_state, weight_VD=head.weight, bias_V=getattr(head, "bias", None))


class ForwardWithObjective(nn.Module):
    """Model and objective in one forward, so that a data-parallel wrapper around it sees all uses of every weight."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.splits = can_split(model)

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss sum, other sums). A plain tuple: DDP's static graph finds tensors in those, and not in a dataclass."""
        parts = split(self.model) if self.splits else None
        out = objective(outputs(self.model, batch, parts), batch)
        return out.loss_sum, out.sums
