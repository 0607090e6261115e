"""The loss that balances a mixture's experts (Fedus et al. 2022, equations 4 to 6), as a sum over documents. E experts, N = B × T tokens of
a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from drumline.errors import ModelError
from drumline.models.classes import ends_in_classes
from drumline.models.small import close, try_small

# Config keys for the number of experts that take a token, and for the coefficient of the loss.
CHOSEN = ("num_experts_per_tok", "moe_k", "top_k")
COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")
RouterLoss = Callable[[Sequence[torch.Tensor], Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
LOAD = "expert_load/"  # sums of a micro-batch: tokens that an expert took, over all layers


def router_loss(
    chosen: int, coefficient: float, logits: Sequence[torch.Tensor], batch: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """coefficient × Σ over documents of weight × E Σ_e f_e P_e, and sums: `router_loss` (without the coefficient), the experts' loads.

    f_e is the share of the document's tokens that expert e takes, P_e its mean probability, both over all layers together, as in
    transformers; `weight` is the sum of the document's `batch.token_weights()`. transformers takes f_e and P_e over all rows of a
    batch, and a product of means is no sum: it depends on how a batch is cut. That of one document does not, and equals transformers'
    for a batch of one row. Padding (from `batch.lengths_B` on) is left out. `chosen`: experts that take a token; `coefficient`: by the
    config; `logits`: of each layer, [N, E] or [B, T, E].
    """
    places_T = torch.arange(batch.position_ids_BT.shape[1], device=logits[0].device)
    real_N1 = (places_T < batch.lengths_B[:, None]).reshape(-1, 1).float()
    document_N = (batch.position_ids_BT == 0).reshape(-1).cumsum(0) - 1
    weight_N = torch.zeros_like(real_N1[:, 0]).index_add_(
        0, document_N, batch.token_weights().reshape(-1).float()
    )
    taken_NE, likely_NE = (
        torch.zeros(len(document_N), logits[0].shape[-1], device=places_T.device) for _ in range(2)
    )
    for layer in logits:
        probability_NE = layer.reshape(-1, layer.shape[-1]).float().softmax(-1)
        chosen_Nk = probability_NE.detach().topk(chosen, -1).indices
        taken_NE = taken_NE + torch.zeros_like(probability_NE).scatter_(
            1, chosen_Nk, real_N1.expand(-1, chosen)
        )
        likely_NE = likely_NE + probability_NE * real_N1
    # Sums by document, with as many places as tokens: to count the documents, the host would have to wait for the device.
    f_DE, p_DE = (
        torch.zeros_like(taken_NE).index_add(0, document_N, per_token)
        for per_token in (taken_NE, likely_NE)
    )
    rows_D = torch.zeros_like(weight_N).index_add_(0, document_N, real_N1[:, 0]).clamp(min=1) * len(
        logits
    )
    balance = (weight_N * (f_DE * p_DE).sum(1) / rows_D.square()).sum() * taken_NE.shape[1]
    loads = {f"{LOAD}{expert}": load for expert, load in enumerate(taken_NE.sum(0))}
    return coefficient * balance, {"router_loss": balance.detach(), **loads}


def trains_router(model: Any) -> bool:
    """Whether the config of a language model turns the loss on, by `output_router_logits: true`."""
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    enabled = bool(getattr(text, "output_router_logits", False))
    return enabled and model.get_output_embeddings() is not None and not ends_in_classes(model)


def router_of(model: Any) -> RouterLoss | None:
    """(each layer's router logits, batch) → `router_loss` as the model's config sets it; None where it is off. Tried on a small copy: one
    row must give transformers' `aux_loss`, with transformers' coefficient. Raises ModelError if it does not: the run would train another
    loss than the model's, or none."""
    if not trains_router(model):
        return None
    text = model.config.get_text_config()
    set_values = (
        [value for name in names if (value := getattr(text, name, None)) is not None]
        for names in (CHOSEN, COEFFICIENT)
    )

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        theirs = small(input_ids=ids_BT, labels=ids_BT, use_cache=False, output_router_logits=True)
        without = small(
            input_ids=ids_BT, labels=ids_BT, use_cache=False, output_router_logits=False
        ).loss
        length = ids_BT.shape[1]
        document = SimpleNamespace(
            position_ids_BT=torch.arange(length)[None], lengths_B=torch.tensor([length])
        )
        document.token_weights = lambda: torch.full((1, length), 1 / length)  # 1 together
        ours, _ = loss(theirs.router_logits, document)
        # Two sums of losses in fp32 and their difference, each rounded once, of losses that are means of few numbers.
        rounding = 8 * torch.finfo(torch.float32).eps * float(theirs.loss)
        added = abs(float(theirs.loss - without - ours)) <= rounding
        return added and close(ours, coefficient * theirs.aux_loss)

    try:
        chosen, coefficient = (values[0] for values in set_values)
        loss = partial(router_loss, int(chosen), float(coefficient))
        as_theirs = try_small(model, "cpu", trial)
    except (AttributeError, IndexError, ModelError, RuntimeError, TypeError, ValueError):
        as_theirs = False
    if not as_theirs:
        what = f"the router loss of {type(model).__name__} is not the one that is known here, and would not be trained"
        where = "model.config.output_router_logits"
        raise ModelError(
            what,
            where=where,
            fix="set model.config.output_router_logits: false to train without it",
        )
    return loss


def loads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The experts' loads in the last forward, padding among them, over the layers whose experts are cut over ranks (parallel.experts)."""
    found: list[Any] = [module.load_E for module in model.modules() if hasattr(module, "load_E")]
    return (
        {f"{LOAD}{expert}": load for expert, load in enumerate(torch.stack(found).sum(0).double())}
        if found
        else {}
    )


def router_metrics(sums: dict[str, float], denominator: float) -> dict[str, Any]:
    """The metrics of a step: `router_loss`, a mean like the loss (at best 1), and `expert_load`: the share of each expert in all choices
    (1 / E if they are even). Empty for a model without experts."""
    loads = [load for name, load in sums.items() if name.startswith(LOAD)]
    loss = {"router_loss": sums["router_loss"] / denominator} if "router_loss" in sums else {}
    return loss | (
        {"expert_load": [load / max(1.0, sum(loads)) for load in loads]} if loads else {}
    )
