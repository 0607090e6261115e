"""A generator that uses transformers' continuous batching.

A finished sequence makes room for the next, and equal prompts share their cache.

transformers' own processors sample from one generator for all requests, in the order in which they
happen to run. `RequestNoise` replaces their list (`ContinuousBatchingManager.logit_processor`, before
the manager starts). It gets the requests of each step before the step, and adds the noise of each.
It is Python that runs at every step, so CUDA graphs and concurrent batches are switched off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList

from drumline.dist.copies import copy_to_device
from drumline.errors import DrumlineError
from drumline.plan.attention import original_attention
from drumline.rl.generate import (
    WHERE,
    Completion,
    HFGenerator,
    Request,
    Sampler,
    generation_mode,
    max_positions,
    request_seed,
    require_room,
)
from drumline.vendor.transformers import ContinuousBatchingLogitsProcessorList

# Number of tokens of a page of the KV cache. Short completions would leave most of a page of
# transformers' 256 tokens empty.
PAGE = 32
# The most prompt tokens that a step prefills.
PREFILL = 1024


class Row(NamedTuple):
    """A row of a step's scores, from which a token of a request is sampled."""

    request: str
    # Index of the token in the request's completion.
    token_index: int


class RequestTokens(NamedTuple):
    """The tokens that were sampled for a request."""

    tokens: list[int]
    # Whether an end token or a stop text ended them.
    ended: bool


class RequestNoise(ContinuousBatchingLogitsProcessorList):
    """Applies a Sampler in continuous batching, to the rows of a step, each with its request's noise.

    Attributes:
        log_probs: request → log-prob of each token so far.
    """

    def __init__(
        self, sampler: Sampler, seeds: dict[str, int], prompt_lengths: dict[str, int]
    ) -> None:
        """Set up for some requests.

        Args:
            sampler: Chooses the tokens.
            seeds: Request → what `request_seed` returns for it.
            prompt_lengths: Request → number of tokens of its prompt.
        """
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.sampler = sampler
        self.seeds = seeds
        self.prompt_lengths = prompt_lengths
        self.log_probs: dict[str, list[torch.Tensor]] = {name: [] for name in seeds}
        self.rows: list[Row] = []

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note the requests of the next step, in the order of its rows.

        A request that was preempted, because the cache was full, is prefilled again later. The manager
        then counts the tokens that were sampled before among the request's `initial_tokens`.
        """
        self.rows = []
        for request in requests_in_batch:
            if not request.has_new_token:
                continue
            state = request.state
            tokens = len(state.initial_tokens) + len(state.generated_tokens)
            token_index = tokens - self.prompt_lengths[state.request_id]
            self.rows.append(Row(state.request_id, token_index))
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores of a step with the noise of each request.

        Rows after those of `self.rows` belong to prompts that are not prefilled to their end yet.
        """
        rows = len(self.rows)
        if not rows:
            return scores
        seeds = []
        token_indices = []
        for row in self.rows:
            seeds.append(self.seeds[row.request])
            token_indices.append(row.token_index)
        seeds_B = copy_to_device(scores.device, torch.tensor(seeds))
        indices_B = copy_to_device(scores.device, torch.tensor(token_indices))
        noisy_BV, log_probs_B = self.sampler.choose(scores[:rows], seeds_B, indices_B)
        for row, log_prob in zip(self.rows, log_probs_B, strict=True):
            log_probs = self.log_probs[row.request]
            assert len(log_probs) == row.token_index, "each token is sampled once"
            log_probs.append(log_prob)
        return torch.cat([noisy_BV, scores[rows:]])


class ContinuousGenerator(HFGenerator):
    """`generate` by continuous batching, with at most `config.batch` sequences in a step.

    The weights of `model` are in the type that it computes in, because autocast does not reach the
    thread of the manager.
    """

    @torch.no_grad()
    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request.

        Raises DataError for an empty prompt, PlanError for one that leaves too few positions, and
        DrumlineError if generation fails.
        """
        require_room(requests, self.config.max_new_tokens, max_positions(self.model))
        if not requests:
            return []
        # The manager names requests by text.
        by_name = {f"{index}": request for index, request in enumerate(requests)}
        seeds = {}
        prompt_lengths = {}
        for name, request in by_name.items():
            seeds[name] = request_seed(self.seed, step, request.key)
            prompt_lengths[name] = len(request.tokens)
        noise = RequestNoise(self.sampler, seeds, prompt_lengths)
        longest_first = sorted(by_name, key=lambda name: -prompt_lengths[name])
        has_stop_texts = bool(self.config.stop)
        with (
            generation_mode(self.model),
            original_attention(self.model),
            self._manager(requests, noise) as manager,
        ):
            for name in longest_first:
                request = by_name[name]
                manager.add_request(
                    request.tokens,
                    request_id=name,
                    max_new_tokens=request.limit(self.config.max_new_tokens),
                    streaming=has_stop_texts,
                )
            sampled = self._collect(manager, set(by_name))
        completions = []
        for name in by_name:
            tokens, ended = sampled[name]
            # For a request that was cancelled, more tokens may have been sampled than are kept.
            log_probs_T = torch.stack(noise.log_probs[name])[: len(tokens)]
            completions.append(Completion(tokens, log_probs_T.tolist(), ended))
        return completions

    def _collect(self, manager: Any, pending: set[str]) -> dict[str, RequestTokens]:
        """Wait for all `pending` requests and return what was sampled for each.

        Stop texts are searched for after each token, and a request that has reached one is cancelled.
        """
        done: dict[str, RequestTokens] = {}
        while pending:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise DrumlineError(
                        "continuous batching has stopped without a reason",
                        where=WHERE,
                        fix="use kind: hf",
                    )
                continue
            name = result.request_id
            if name not in pending:
                continue
            if result.error is not None:
                raise DrumlineError(
                    f"continuous batching failed: {result.error}", where=WHERE, fix="use kind: hf"
                )
            tokens = list(result.generated_tokens)
            ended = self.stop_rules.is_met(tokens)
            is_finished = result.is_finished()
            if not ended and not is_finished:
                continue
            done[name] = RequestTokens(tokens, ended)
            pending.discard(name)
            if not is_finished:
                manager.cancel_request(name)
        return done

    @contextlib.contextmanager
    def _manager(self, requests: list[Request], noise: RequestNoise) -> Iterator[Any]:
        """Run transformers' manager of continuous batching inside the block."""
        generation_config = GenerationConfig(
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(self.stop_rules.token_ids) or -1,
            num_return_sequences=1,
        )
        manager = self.model.init_continuous_batching(
            generation_config=generation_config,
            continuous_batching_config=self._batching_config(requests),
        )
        manager.logit_processor = noise
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()

    def _batching_config(self, requests: list[Request]) -> ContinuousBatchingConfig:
        """Return transformers' options, with a cache for `config.batch` of the longest sequences."""
        batch = self.config.batch
        prompt_lengths = [len(request.tokens) for request in requests]
        most_new = self.config.max_new_tokens
        lengths = [len(request.tokens) + request.limit(most_new) for request in requests]
        longest_sequence = max(lengths)
        pages = batch * (math.ceil(longest_sequence / PAGE) + 1)
        options: dict[str, Any] = {
            "num_blocks": pages + pages // 4,  # it starts no request when less than 15% are free
            "max_batch_tokens": max(batch, min(PREFILL, sum(prompt_lengths))),
            "max_requests_per_batch": batch,
            "max_blocks_per_request": 0,  # the kernel that this would choose requires other pages
            "use_async_batching": False,
            "use_cuda_graph": False,
            "auto_switch_to_flash": False,  # `model.attention` decides what attends
        }
        # The name of an option depends on transformers' version, and older ones lack some of them.
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        if "page_size" in known:
            options["page_size"] = PAGE
        else:
            options["block_size"] = PAGE  # before transformers 5.18
        supported = {key: value for key, value in options.items() if key in known}
        return ContinuousBatchingConfig(**supported)
