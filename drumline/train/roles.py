"""The models of a run besides the one that learns: found and held against it before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drumline.config.model import ModelConfig
from drumline.config.schema import Config
from drumline.errors import ModelError
from drumline.models import load as models
from drumline.models.package import resolve as resolve_model
from drumline.plan.plan import RolePlan
from drumline.plan.roles import reference_model

OnProgress = Callable[[str, int, int | None], None]


def find_roles(config: Config, model_path: str | None, tokenizer: Any, on_progress: OnProgress) -> dict[str, RolePlan]:
    """Name → what it is and where it lies. Raises ModelError for one that reads other tokens than the policy writes."""
    model = reference_model(config)
    if model is None:
        return {}
    path = model_path if model == config.model else resolve_model(model, on_progress)
    if model != config.model:
        require_same_tokens(model, path, tokenizer, config.data.max_length, "algorithm.reference_model")
    return {"reference": RolePlan(model=model, model_path=path, head="lm")}


def require_same_tokens(model: ModelConfig, path: str | None, tokenizer: Any, max_length: int, where: str) -> None:
    """Raises ModelError where a model's tokenizer has other tokens than `tokenizer`, or its embedding has no row for one of them."""
    theirs = models.load_tokenizer(path, model).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        token = next((t for t, number in ours.items() if theirs.get(t) != number), None) or next(t for t in theirs if t not in ours)
        numbers = [("none" if v.get(token) is None else f"number {v[token]}") for v in (ours, theirs)]
        raise ModelError(
            f"its tokenizer is not the policy's: token {token!r} has {numbers[0]} in the policy's and {numbers[1]} in this one",
            where=where,
            fix="name a model with the same tokenizer",
        )
    models.check_fits(models.load_config(path, model), tokenizer, max_length)
