"""Build the generator of completions that a config names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.config import rollouts as configs
from drumline.rl.ahead import HandOverWeights, WeightTransfer
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import (
    Generator,
    HFGenerator,
    InferenceCopy,
    Sampler,
    StopRules,
    VisionPrompts,
    Weights,
)
from drumline.rl.hand_over import AdapterFiles, HandOver
from drumline.rl.restarts import restore_none
from drumline.rl.servers import ServedGenerator, Server
from drumline.rl.sglang import RemoteSGLang
from drumline.rl.vllm import InProcessVLLM, RemoteVLLM
from drumline.rl.weight_folder import WeightFolder
from drumline.rl.weight_network import WeightNetwork


@dataclass(frozen=True)
class Refresh:
    """Hands a generator the weights that the policy has now: at once, or later.

    Calling it hands them over at once. Collective, as the iterator of the weights is.
    """

    hand_over: Callable[[Weights], None]
    # Sets the weights aside, and returns the function that begins to hand them over. The function may be
    # collective, too.
    hold: Callable[[Weights], HandOverWeights]
    # Copies the weights and begins to hand them over. Collective. None: `hand_over` alone is possible.
    begin: Callable[[Weights], WeightTransfer] | None = None
    # Hands the weights over again to servers that do not have them, and returns their urls. Collective,
    # see `HandOver.restore_weights`.
    restore: Callable[[], list[str]] = restore_none

    def __call__(self, weights: Weights) -> None:
        """Hand over the weights."""
        self.hand_over(weights)


@dataclass(frozen=True)
class RolloutFiles:
    """What vLLM reads from disk, and the size of the policy's vocabulary."""

    # The folder or hub id that the engine in this process starts from.
    model_path: str | None = None
    # A server reads new weights in a folder inside of this one.
    run_dir: Path = Path()
    # Rows of the embedding if it is larger than the one in the model's files; else None.
    rows: int | None = None
    # How the adapter is written if servers get it alone; else None.
    adapter: AdapterFiles | None = None
    # Rows of the policy's embedding, which no token id of a server may exceed; None: not known.
    vocabulary: int | None = None


NO_FILES = RolloutFiles()


def build_generator(
    config: configs.Generator,
    tokenizer: Any,
    seed: int,
    unsharded: Any | None,
    build: Callable[[], Any],
    low_precision: torch.dtype | None = None,
    files: RolloutFiles = NO_FILES,
    vision: VisionPrompts | None = None,
) -> tuple[Generator, Refresh | None]:
    """Return a generator, and a function that hands it the trained weights before each rollout.

    The function takes `Engine.whole_weights`, and of an adapter that servers get alone (`files`) only
    its weights. It is None if the generator samples from the trained
    model itself, or if a server is to keep its own weights.

    Args:
        config: The section `algorithm.generator`.
        tokenizer: The tokenizer of the policy.
        seed: The seed of the run.
        unsharded: The trainable model, if it is whole on this rank's device (one process, DDP).
            None: the generator samples from a copy.
        build: Returns that copy, with weights in the type that the policy computes in.
        low_precision: bf16 or fp16, if the policy computes in it; None: it computes in fp32. A
            trainable model with fp32 weights then needs autocast. Continuous batching cannot
            autocast, so it samples from a copy instead.
        files: What vLLM reads. Other generators read no files.
        vision: See `HFGenerator`.
    """
    if isinstance(config, configs.ServerGenerator):
        dtype = low_precision or torch.float32
        if config.url is not None:
            return _servers(config, tokenizer, seed, dtype, files)
        assert isinstance(config, configs.VLLMGenerator), "others require a url"
        assert files.model_path is not None, "a rule refuses it"
        dtype_name = str(dtype).removeprefix("torch.")
        engine = InProcessVLLM(config, tokenizer, seed, files.model_path, dtype_name, files.rows)
        return engine, Refresh(engine.refresh, engine.hold)
    if isinstance(config, configs.ContinuousGenerator):
        generator_type: type[HFGenerator] = ContinuousGenerator
        can_autocast = False
    else:
        generator_type = HFGenerator
        can_autocast = True
    if unsharded is not None:
        autocast = low_precision
        if low_precision is not None and _has_all_weights_in(unsharded, low_precision):
            autocast = None
        if can_autocast or autocast is None:
            generator = generator_type(config, unsharded, tokenizer, seed, autocast, vision)
            return generator, None
    whole = InferenceCopy(build)
    generator = generator_type(config, whole.model, tokenizer, seed, vision=vision)
    return generator, Refresh(whole.refresh, whole.hold)


def _has_all_weights_in(model: Any, dtype: torch.dtype) -> bool:
    """Return whether a model computes in `dtype` without autocast, as in pure bf16."""
    dtypes: set[torch.dtype] = set()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtypes.add(parameter.dtype)
    return dtypes == {dtype}


def _servers(
    config: configs.ServerGenerator,
    tokenizer: Any,
    seed: int,
    dtype: torch.dtype,
    files: RolloutFiles,
) -> tuple[Generator, Refresh | None]:
    """Return a client of servers, and a function that hands the servers new weights.

    The function is None if the config says that the servers keep their own weights.
    """
    generator_type: type[ServedGenerator] = RemoteVLLM
    if isinstance(config, configs.SGLangGenerator):
        generator_type = RemoteSGLang
    remote = generator_type(config, tokenizer, seed, files.vocabulary)
    if config.weights == "none":
        return remote, None
    hand_over: HandOver[Any]
    if config.transport == "network":
        assert isinstance(remote, RemoteVLLM), "the config refuses others"
        hand_over = WeightNetwork(remote, dtype, files.adapter)
    else:
        folder = files.run_dir / "rollout-weights"
        if config.folder is not None:
            folder = Path(config.folder)
        hand_over = WeightFolder(remote, folder.absolute(), dtype, files.adapter)
    refresh = Refresh(hand_over.refresh, hand_over.hold, hand_over.begin, hand_over.restore_weights)
    return remote, refresh


def greedy_generator(generator: Any) -> Generator:
    """Return a generator that uses the same model and decodes greedily."""
    return _change_options(generator, top_k=1)


def probe_generators(generator: Any, new_tokens: int) -> dict[str, Generator]:
    """Return generators that use the same model and sample from the whole distribution.

    They keep the temperature, and have no top-k, no top-p and no stop text. With several servers there
    is one generator for each server that is not lost, in the order of the config. It asks another
    server only if its own gets lost. The keys are the names that messages use. Just after a hand-over
    all ranks know of the same lost servers, so they get the same number of generators.

    `new_tokens`: the most tokens of a completion.
    """
    probe = _change_options(generator, top_k=0, top_p=1.0, stop=(), max_new_tokens=new_tokens)
    servers: list[Server] = []
    if isinstance(generator, ServedGenerator):
        servers = generator.pool.servers
    if len(servers) <= 1:
        return {"what samples": probe}
    probes: dict[str, Generator] = {}
    for server in servers:
        if server.is_lost:
            continue
        probe_of_server = copy.copy(probe)
        probe_of_server.preferred_server = server
        probes[f"what samples at {server.url}"] = probe_of_server
    return probes


def lost_servers(generator: Any) -> dict[str, str]:
    """Return the url of each server that is lost → why; empty for a generator without servers."""
    if isinstance(generator, ServedGenerator):
        return dict(generator.pool.lost)
    return {}


def _change_options(generator: Any, **options: Any) -> Any:
    """Return a generator that uses the same model, with other options of its config."""
    copied = copy.copy(generator)
    config = generator.config.model_copy(update=options)
    copied.config = config
    if isinstance(generator, HFGenerator):
        rules = generator.stop_rules
        banned = generator.sampler.banned
        copied.sampler = Sampler(config.temperature, config.top_k, config.top_p, banned)
        copied.stop_rules = StopRules(rules.token_ids, config.stop, rules.tokenizer)
    return copied
