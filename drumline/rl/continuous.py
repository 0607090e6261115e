"""transformers' continuous batching behind the seam: a finished sequence makes room for the next, and equal prompts share their cache.

Its own processors sample from one generator for all requests, in the order that they happen to run. Ours takes the place of their list
(`ContinuousBatchingManager.logit_processor`, before the manager starts), gets the requests of each step before it, and adds the noise
of each. It is Python that runs at every step, so CUDA graphs and batches in flight side by side are switched off.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList

from drumline.core.attention import as_before
from drumline.dist.copies import copied_to
from drumline.errors import DrumlineError
from drumline.rl.generate import (
    WHERE,
    Completion,
    HFGenerator,
    Request,
    Sampler,
    generating,
    positions,
    request_seed,
    require_room,
)
from drumline.vendor.transformers import ContinuousBatchingLogitsProcessorList

PAGE = 32  # tokens of a piece of the cache: short completions would leave most of transformers' 256 empty
PREFILL = 1024  # prompt tokens of one step at most


class RequestNoise(ContinuousBatchingLogitsProcessorList):
    """Scores for continuous batching: a Sampler that knows each row's request. `log_probs`: by request, of each token so far."""

    def __init__(
        self, sampler: Sampler, seeds: dict[str, int], prompt_lengths: dict[str, int]
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.sampler, self.seeds, self.prompt_lengths = sampler, seeds, prompt_lengths
        self.log_probs: dict[str, list[torch.Tensor]] = {name: [] for name in seeds}
        self.rows: list[tuple[str, int]] = []

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Before a step: its requests, in the order of the rows. One that lost its cache comes again with its tokens as a prompt."""
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self.rows = [
            (
                s.request_id,
                len(s.initial_tokens) + len(s.generated_tokens) - self.prompt_lengths[s.request_id],
            )
            for s in states
        ]
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        rows = len(self.rows)  # further rows belong to prompts that are not read to their end yet
        if not rows:
            return scores
        seeds_B = copied_to(
            scores.device, torch.tensor([self.seeds[name] for name, _ in self.rows])
        )
        positions = torch.tensor([position for _, position in self.rows])
        positions_B = copied_to(scores.device, positions)
        noisy_BV, log_probs_B = self.sampler.choose(scores[:rows], seeds_B, positions_B)
        for (name, position), log_prob in zip(self.rows, log_probs_B, strict=True):
            assert len(self.log_probs[name]) == position, "each token is sampled once"
            self.log_probs[name].append(log_prob)
        return torch.cat([noisy_BV, scores[rows:]])


class ContinuousGenerator(HFGenerator):
    """`generate` by continuous batching, at most `config.batch` sequences in a step. `model`: in the type that it computes in (its thread
    knows no autocast)."""

    @torch.no_grad()
    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Raises DataError for an empty prompt, PlanError for one that leaves too few positions, DrumlineError where generation fails."""
        require_room(requests, self.config.max_new_tokens, positions(self.model))
        if not requests:
            return []
        names = [f"{index}" for index in range(len(requests))]
        noise = RequestNoise(
            self.sampler,
            {
                name: request_seed(self.seed, step, r.key)
                for name, r in zip(names, requests, strict=True)
            },
            {name: len(r.tokens) for name, r in zip(names, requests, strict=True)},
        )
        with (
            generating(self.model),
            as_before(self.model),
            self._manager(requests, noise) as manager,
        ):
            for name, request in sorted(
                zip(names, requests, strict=True), key=lambda pair: -len(pair[1].tokens)
            ):
                manager.add_request(
                    request.tokens, request_id=name, streaming=bool(self.config.stop)
                )
            done = self._collect(manager, set(names))
        completions = []
        for name in names:
            tokens, ended = done[name]
            completions.append(
                Completion(
                    tokens, torch.stack(noise.log_probs[name])[: len(tokens)].tolist(), ended
                )
            )
        return completions

    def _collect(self, manager: Any, open_: set[str]) -> dict[str, tuple[list[int], bool]]:
        """(tokens, ended) of each request. A stop text is looked for token by token, and its request taken back."""
        done: dict[str, tuple[list[int], bool]] = {}
        while open_:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise DrumlineError(
                        "continuous batching has stopped without a reason",
                        where=WHERE,
                        fix="use kind: hf",
                    )
                continue
            if result.request_id not in open_:
                continue
            if result.error is not None:
                raise DrumlineError(
                    f"continuous batching failed: {result.error}", where=WHERE, fix="use kind: hf"
                )
            tokens = list(result.generated_tokens)
            ended = self.endings.after(tokens)
            if ended or result.is_finished():
                done[result.request_id] = tokens, ended
                open_.discard(result.request_id)
                if not result.is_finished():
                    manager.cancel_request(result.request_id)
        return done

    @contextlib.contextmanager
    def _manager(self, requests: list[Request], noise: RequestNoise) -> Iterator[Any]:
        new, longest = self.config.max_new_tokens, max(len(r.tokens) for r in requests)
        pages = self.config.batch * (-(-(longest + new) // PAGE) + 1)
        options: dict[str, Any] = {
            "num_blocks": pages + pages // 4,  # it starts no request when less than 15% are free
            "max_batch_tokens": max(
                self.config.batch, min(PREFILL, sum(len(r.tokens) for r in requests))
            ),
            "max_requests_per_batch": self.config.batch,
            "max_blocks_per_request": 0,  # the kernel that this would choose requires other pages
            "use_async_batching": False,
            "use_cuda_graph": False,
            "auto_switch_to_flash": False,  # `model.attention` decides what attends
            "page_size": PAGE,
            "block_size": PAGE,  # its name before transformers 5.18
        }
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        if "page_size" in known:
            known -= {"block_size"}
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=sorted(self.endings.token_ids) or -1,
                num_return_sequences=1,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **{key: value for key, value in options.items() if key in known}
            ),
        )
        manager.logit_processor = noise
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
