"""The models of a run besides the one that learns: found and held against it before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.model import ModelConfig
from drumline.core.plan import RolePlan
from drumline.errors import ModelError
from drumline.models import load as models
from drumline.models.build import lay_out
from drumline.planner.question import Found, find_model, roles_of
from drumline.report.bars import OnProgress


def find_roles(config: Config, policy: Found, on_progress: OnProgress) -> dict[str, RolePlan]:
    """By name what each role is and where it lies. Raises ModelError for one that reads other tokens than the policy writes, and for one
    without a trained head that will not learn."""
    roles = roles_of(config, policy, lambda model: find_model(model, on_progress, weights=True))
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        model, path = roles[name].model, roles[name].model_path
        if model != config.model:
            tokenizer = models.load_tokenizer(policy.path, config.model)
            require_same_tokens(model, path, tokenizer, wanted.where)
            models.check_fits(models.load_config(path, model), tokenizer, config.data.max_length, wanted.where)
        if not wanted.trainable:
            lay_out(path, model, 0, head=wanted.head, draws=False)
    return roles


def require_same_tokens(model: ModelConfig, path: str | None, tokenizer: Any, where: str) -> None:
    """Raises ModelError where a model comes with a tokenizer that has other tokens than `tokenizer`."""
    if model.tokenizer is None and path is not None and Path(path).is_dir() and not any(Path(path).glob("*token*")):
        return
    theirs = models.load_tokenizer(path, model).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        token = next((t for t, number in ours.items() if theirs.get(t) != number), None) or next(t for t in theirs if t not in ours)
        numbers = [("none" if v.get(token) is None else f"number {v[token]}") for v in (ours, theirs)]
        what = f"its tokenizer is not the policy's: token {token!r} has {numbers[0]} in the policy's and {numbers[1]} in this one"
        raise ModelError(what, where=where, fix="name a model with the same tokenizer")
