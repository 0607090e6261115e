"""What tests of vision-language models share: their images, token caches, losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import Config
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.data.cache import TokenCache
from drumline.data.images import collate_vision
from drumline.data.prepare import prepare
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective
from drumline.models.image_tokens import Vision
from drumline.models.load import load_config
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.vision import vision_of as vision_of_run

LOSS = NextToken(0, has_answers=True)
ROWS = {"kind": "file", "path": "rows.jsonl"}


def find_vision(model: ModelConfig, **data: Any) -> Vision | None:
    values = {"model": {"id": model.id}, "data": {"train": [ROWS], "packing": False, **data}}
    return vision_of_run(Config.model_validate(values), model.id, load_config(model.id, model))


def vision_of(path: Path) -> Vision:
    found = find_vision(ModelConfig(id=str(path)))
    assert found is not None

    return found


def cache_of(folder: Path, vision: Vision, **data: Any) -> TokenCache:
    values = {
        "train": [ROWS],
        "workers": 1,
        "max_length": 256,
        "cache_dir": str(folder / "cache"),
        **data,
    }
    config = Config.model_validate({"model": {"id": vision.path}, "data": values})
    prepared = prepare(config, vision.path, folder, vision=vision)
    return TokenCache.open(prepared.train_cache)


def built(vision: Vision) -> Any:
    model = build_model(vision.path, vision.model, seed=0).train()
    # As the engine does with packed rows.
    separate_recurrent_layers(model, "cpu")
    return model


def collate_alone(cache: TokenCache, samples: list[int], vision: Vision) -> TokenBatch:
    """Return a batch without a fixed width; the padding is token 0."""
    return collate_vision(cache, samples, 0, None, vision)


class Learned(NamedTuple):
    """The loss sum of a batch, and the gradients."""

    loss: float
    gradients: dict[str, torch.Tensor]


def learned_by(model: Any, batch: TokenBatch) -> Learned:
    model.zero_grad()
    loss, _ = ForwardWithObjective(model)(batch, LOSS.objective)
    loss.backward()
    gradients = {}

    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()

    return Learned(float(loss.detach()), gradients)


def assert_close(got: Any, wanted: Any, name: str, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, msg=name)
