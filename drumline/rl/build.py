"""Builds the generator of completions that a config names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.config import rollouts as configs
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import Endings, Generator, HFGenerator, InferenceCopy, Sampler, Weights
from drumline.rl.vllm import VLLMEngine, VLLMServer, WeightFolder

Refresh = Callable[[Weights], None]


@dataclass(frozen=True)
class RolloutFiles:
    """What vLLM reads from disk."""

    # The folder or hub id that its engine starts from.
    model_path: str | None = None
    # Its server reads new weights in a folder inside of this one.
    run_dir: Path = Path()
    # Rows of an embedding that is larger than the one in the model's files.
    rows: int | None = None


NO_FILES = RolloutFiles()


def generator(
    config: configs.Generator,
    tokenizer: Any,
    seed: int,
    unsharded: Any | None,
    build: Callable[[], Any],
    autocast: torch.dtype | None = None,
    files: RolloutFiles = NO_FILES,
) -> tuple[Generator, Refresh | None]:
    """Return a generator, and a function that hands it the trained weights before each rollout.

    The function takes `Engine.whole_weights`. It is None if the generator samples from the trained
    model itself, or if a server is to keep its own weights.

    Args:
        config: The section `algorithm.generator`.
        tokenizer: Of the policy.
        seed: Of the run.
        unsharded: The trainable model, if it is whole on this rank's device (one process, DDP).
            None: the generator samples from a copy.
        build: Makes that copy, in the type that it computes in.
        autocast: The type that the trainable model computes in, if that is not the type of its
            weights; else None. Continuous batching cannot autocast, so it then samples from a
            copy.
        files: What vLLM reads. Other generators read no files.
    """
    if isinstance(config, configs.VLLMGenerator):
        dtype = autocast or torch.float32
        if config.url is not None:
            return _vllm_server(config, tokenizer, seed, dtype, files.run_dir)
        assert files.model_path is not None, "a rule refuses it"
        dtype_name = str(dtype).removeprefix("torch.")
        engine = VLLMEngine(config, tokenizer, seed, files.model_path, dtype_name, files.rows)
        return engine, engine.refresh
    if isinstance(config, configs.ContinuousGenerator):
        generator_type: type[HFGenerator] = ContinuousGenerator
        can_autocast = False
    else:
        generator_type = HFGenerator
        can_autocast = True
    if unsharded is not None and (can_autocast or autocast is None):
        return generator_type(config, unsharded, tokenizer, seed, autocast), None
    whole = InferenceCopy(build)
    return generator_type(config, whole.model, tokenizer, seed), whole.refresh


def _vllm_server(
    config: configs.VLLMGenerator, tokenizer: Any, seed: int, dtype: torch.dtype, run_dir: Path
) -> tuple[Generator, Refresh | None]:
    """Return a client of vLLM's server, and a function that hands the server new weights.

    The function is None if the config says that the server's weights stay as they are.
    """
    server = VLLMServer(config, tokenizer, seed)
    if config.weights == "none":
        return server, None
    folder = run_dir / "rollout-weights"
    if config.folder is not None:
        folder = Path(config.folder)
    return server, WeightFolder(server.server, folder.absolute(), dtype).refresh


def greedy_generator(sampling: Any) -> Generator:
    """Return a copy of a generator, of the same model, that takes the likeliest token each time."""
    return _with_options(sampling, top_k=1)


def probe_generator(sampling: Any, new_tokens: int) -> Generator:
    """Return a copy of a generator, of the same model, that samples from the whole distribution.

    The temperature is the run's. Neither top-k, top-p nor a stop text applies.
    `new_tokens`: the most tokens of a completion.
    """
    return _with_options(sampling, top_k=0, top_p=1.0, stop=(), max_new_tokens=new_tokens)


def _with_options(sampling: Any, **options: Any) -> Any:
    """Return a copy of a generator, of the same model, with other options of its config."""
    copied = copy.copy(sampling)
    config = sampling.config.model_copy(update=options)
    copied.config = config
    if isinstance(sampling, HFGenerator):
        endings = sampling.endings
        copied.sampler = Sampler(config.temperature, config.top_k, config.top_p)
        copied.endings = Endings(endings.token_ids, config.stop, endings.tokenizer)
    return copied
