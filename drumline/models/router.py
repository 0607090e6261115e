"""The loss that balances a mixture's experts, as a sum over documents.

It is that of Fedus et al. 2022, equations 4 to 6. A step's loss is a sum over micro-batches, so the
router's has to be one too. E experts, N = B × T tokens of a micro-batch, D documents, k experts
that take a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from drumline.errors import ModelError
from drumline.models.classes import ends_in_classes
from drumline.models.small import is_close, try_small

# Config keys for the number of experts that take a token, and for the coefficient of the loss.
CHOSEN = ("num_experts_per_tok", "moe_k", "top_k")
COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")
# Each layer's router logits, and the batch → the loss, and sums for metrics.
RouterLoss = Callable[[Sequence[torch.Tensor], Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def router_loss(
    chosen: int, coefficient: float, logits: Sequence[torch.Tensor], batch: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return coefficient × Σ over documents of weight × E Σ_e f_e P_e, and sums for metrics.

    f_e is the share of the document's tokens that expert e takes, P_e its mean probability, both
    over all layers together, as in transformers. `weight` is the sum of the document's
    `batch.token_weights()`. transformers takes f_e and P_e over all rows of a batch. A product of
    means is no sum, so its value depends on how a batch is cut. The value of one document does not,
    and equals transformers' for a batch of one row. Padding (from `batch.lengths_B` on) is left
    out.

    `chosen`: experts that take a token. `coefficient`: set by the model's config. `logits`: of each
    layer, [N, E] or [B, T, E].
    The only sum is `router_loss`, without the coefficient.
    """
    experts = logits[0].shape[-1]
    device = logits[0].device
    places_T = torch.arange(batch.position_ids_BT.shape[1], device=device)
    is_real_BT = places_T < batch.lengths_B[:, None]
    real_N1 = is_real_BT.reshape(-1, 1).float()
    # A document begins at each position 0.
    starts_document_N = (batch.position_ids_BT == 0).reshape(-1)
    document_N = starts_document_N.cumsum(0) - 1
    token_weights_N = batch.token_weights().reshape(-1).float()
    # Sums by document have as many places as tokens: to count the documents, the host would have to
    # wait for the device.
    weight_D = torch.zeros_like(real_N1[:, 0])
    weight_D.index_add_(0, document_N, token_weights_N)
    tokens = len(document_N)
    taken_NE = torch.zeros(tokens, experts, device=device)
    likely_NE = torch.zeros(tokens, experts, device=device)
    for layer in logits:
        layer_NE = layer.reshape(-1, layer.shape[-1])
        probability_NE = layer_NE.float().softmax(-1)
        # A choice has no gradient: the loss moves the router by its probabilities alone.
        chosen_Nk = probability_NE.detach().topk(chosen, -1).indices
        real_Nk = real_N1.expand(-1, chosen)
        choice_NE = torch.zeros_like(probability_NE)
        choice_NE.scatter_(1, chosen_Nk, real_Nk)
        taken_NE = taken_NE + choice_NE
        likely_NE = likely_NE + probability_NE * real_N1
    zeros_DE = torch.zeros_like(taken_NE)
    f_DE = zeros_DE.index_add(0, document_N, taken_NE)
    p_DE = zeros_DE.index_add(0, document_N, likely_NE)
    real_tokens_D = torch.zeros_like(weight_D)
    real_tokens_D.index_add_(0, document_N, real_N1[:, 0])
    # f and p are sums over tokens and layers so far: each is divided by their number once, which is
    # at least 1 for the places without a document.
    layers = len(logits)
    rows_D = real_tokens_D.clamp(min=1) * layers
    product_D = (f_DE * p_DE).sum(1)
    balance_D = weight_D * product_D / rows_D.square()
    balance = balance_D.sum() * experts
    return coefficient * balance, {"router_loss": balance.detach()}


def count_choices(chosen_Nk: torch.Tensor, experts: int) -> torch.Tensor:
    """Return how many choices fall on each expert, int64[E]."""
    chosen_S = chosen_Nk.flatten()
    load_E = torch.zeros(experts, dtype=chosen_S.dtype, device=chosen_S.device)
    return load_E.index_add_(0, chosen_S, torch.ones_like(chosen_S))


def trains_router(model: Any) -> bool:
    """Return whether a language model's config turns the router loss on.

    The key is transformers' `output_router_logits`. A classifier or a model without a head has no
    such loss.
    """
    if not hasattr(model.config, "get_text_config"):
        return False
    text_config = model.config.get_text_config()
    if not getattr(text_config, "output_router_logits", False):
        return False
    return model.get_output_embeddings() is not None and not ends_in_classes(model)


def router_of(model: Any) -> RouterLoss | None:
    """Return the router loss that a model's config sets.

    It is called with the router logits of each layer, and the batch. None if the config turns it
    off. It is tried on a small copy: one row must give transformers' `aux_loss` with transformers'
    coefficient. Raises ModelError if it does not: the run would train another loss than the
    model's, or none.
    """
    if not trains_router(model):
        return None
    text_config = model.config.get_text_config()
    try:
        chosen = int(_first_value(text_config, CHOSEN))
        coefficient = float(_first_value(text_config, COEFFICIENT))
        loss = partial(router_loss, chosen, coefficient)
        trial = partial(_is_loss_of_transformers, loss, coefficient)
        is_known = try_small(model, "cpu", trial)
    except (AttributeError, IndexError, ModelError, RuntimeError, TypeError, ValueError):
        is_known = False
    if not is_known:
        what = (
            f"the router loss of {type(model).__name__} is not the one that is known here,"
            " and would not be trained"
        )
        where = "model.config.output_router_logits"
        fix = "set model.config.output_router_logits: false to train without it"
        raise ModelError(what, where=where, fix=fix)
    return loss


def _first_value(config: Any, names: Sequence[str]) -> Any:
    """Return a config's value under the first of `names` that it sets.

    Raises AttributeError if it sets none.
    """
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise AttributeError(f"the config has none of {', '.join(names)}")


def _is_loss_of_transformers(
    loss: RouterLoss, coefficient: float, small: Any, ids_BT: torch.Tensor
) -> bool:
    """Return whether a router loss is what transformers adds to the loss of a small model.

    `coefficient`: the model's own. `ids_BT`: one row of tokens, which is one document.
    """
    inputs = {"input_ids": ids_BT, "labels": ids_BT, "use_cache": False}
    theirs = small(**inputs, output_router_logits=True)
    without_router = small(**inputs, output_router_logits=False)
    length = ids_BT.shape[1]
    # The weights of one document's tokens add up to 1.
    weights_BT = torch.full((1, length), 1 / length)
    positions_T = torch.arange(length)
    document = SimpleNamespace(
        position_ids_BT=positions_T[None],
        lengths_B=torch.tensor([length]),
        token_weights=lambda: weights_BT,
    )
    ours, _ = loss(theirs.router_logits, document)
    # Two sums of losses in fp32 and their difference, each rounded once, of losses that are means
    # of few numbers.
    rounding = 8 * torch.finfo(torch.float32).eps * float(theirs.loss)
    added_by_transformers = theirs.loss - without_router.loss
    difference = abs(float(added_by_transformers - ours))
    is_added = difference <= rounding
    return is_added and is_close(ours, coefficient * theirs.aux_loss)


def router_metrics(sums: dict[str, float], denominator: float) -> dict[str, float]:
    """Return the router's metrics of a step; {} for a model whose router loss is not trained.

    `router_loss` is a mean like the loss, without the coefficient: k if the loads of the experts
    are even, and more if not.
    """
    if "router_loss" not in sums:
        return {}
    return {"router_loss": sums["router_loss"] / denominator}
