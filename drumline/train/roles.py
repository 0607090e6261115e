"""The models of a run besides the one that learns: found and held against it before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.facts import ModelFacts
from drumline.core.model import ModelConfig
from drumline.core.plan import RolePlan
from drumline.errors import ModelError
from drumline.models import load as models
from drumline.models.build import lay_out
from drumline.models.classes import with_classes
from drumline.models.package import resolve as resolve_model
from drumline.report.bars import OnProgress


def find_roles(config: Config, model_path: str | None, on_progress: OnProgress) -> tuple[dict[str, RolePlan], dict[str, ModelFacts]]:
    """By name what each role is and where it lies, and its sizes. Raises ModelError for one that reads other tokens than the policy
    writes, and for one without a trained head that will not learn."""
    roles, sizes = dict[str, RolePlan](), dict[str, ModelFacts]()
    for name, wanted in config.algorithm.auxiliary_models(config).items():
        model, same = wanted.model, wanted.model == config.model
        path = model_path if same else resolve_model(model, on_progress)
        hf_config = with_classes(models.load_config(path, model), wanted.head, ())
        if not same:
            tokenizer = models.load_tokenizer(model_path, config.model)
            require_same_tokens(model, path, tokenizer, wanted.where)
            models.check_fits(hf_config, tokenizer, config.data.max_length, wanted.where)
        roles[name] = RolePlan(model=model, model_path=path, head=wanted.head, learns=wanted.learns, lr_ratio=wanted.lr_ratio)
        if not wanted.learns:
            lay_out(path, model, 0, head=wanted.head, draws=False)
        sizes[name] = models.facts(hf_config, config.data.max_length, head=wanted.head)
    return roles, sizes


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
