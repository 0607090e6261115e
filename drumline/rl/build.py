"""From a config to what samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drumline.core import rollouts as c
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import Endings, Generator, HFGenerator, InferenceCopy, Sampler, Weights
from drumline.rl.vllm import VLLMEngine, VLLMServer, WeightFolder


def generator(
    config: c.Generator,
    tokenizer: Any,
    seed: int,
    unsharded: Any | None,
    build: Callable[[], Any],
    autocast: torch.dtype | None = None,
    model_path: str | None = None,
    run_dir: Path = Path(),
    rows: int | None = None,
) -> tuple[Generator, Callable[[Weights], None] | None]:
    """What samples, and what hands it the trained weights (`Engine.whole_weights`, before each rollout); None: it has them already.

    `unsharded`: the trainable model, if this rank's device has all of it (one process, DDP); None: it is sharded, and a copy
    made by `build`, in the type that it shall compute in, is sampled from. `autocast`: the type that the trainable model computes in, where
    that is not its weights'; continuous batching, whose thread has no autocast, then takes a copy too. vLLM starts from the folder or
    hub id `model_path`, and reads new weights in a folder of `run_dir`. `rows`: of an embedding that is
    larger than that in its files.
    """
    if isinstance(config, c.VLLMGenerator):
        dtype = autocast or torch.float32
        if config.url is None:
            assert model_path is not None, "a rule refuses it"
            name = str(dtype).removeprefix("torch.")
            engine = VLLMEngine(config, tokenizer, seed, model_path, name, rows)
            return engine, engine.refresh
        server = VLLMServer(config, tokenizer, seed)
        folder = Path(config.folder) if config.folder is not None else run_dir / "rollout-weights"
        return server, None if config.weights == "none" else WeightFolder(
            server.server, folder.absolute(), dtype
        ).refresh
    of_kind = ContinuousGenerator if isinstance(config, c.ContinuousGenerator) else HFGenerator
    if unsharded is not None and (of_kind is HFGenerator or autocast is None):
        return of_kind(config, unsharded, tokenizer, seed, autocast), None
    whole = InferenceCopy(build)
    return of_kind(config, whole.model, tokenizer, seed), whole.refresh


def greedy(sampling: Any) -> Generator:
    """A generator of the same model (engine, server) that takes the likeliest token each time."""
    return _with_options(sampling, top_k=1)


def probing(sampling: Any, new_tokens: int) -> Generator:
    """A generator of the same model that samples at most `new_tokens` from the whole distribution, at the run's temperature."""
    return _with_options(sampling, top_k=0, top_p=1.0, stop=(), max_new_tokens=new_tokens)


def _with_options(sampling: Any, **options: Any) -> Any:
    """A copy of a generator, of the same model, with other options of its config."""
    made = copy.copy(sampling)
    made.config = sampling.config.model_copy(update=options)
    if isinstance(sampling, HFGenerator):
        made.sampler = Sampler(made.config.temperature, made.config.top_k, made.config.top_p)
        made.endings = Endings(
            sampling.endings.token_ids, made.config.stop, sampling.endings.tokenizer
        )
    return made
