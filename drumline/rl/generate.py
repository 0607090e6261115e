"""Sample completions of prompts: what all generators share, and the one that uses transformers' `generate`.

The modules `continuous`, `vllm` and `sglang` hold the other generators. The requests of a rollout are divided
over all ranks, and all ranks get all completions back (`DistributedSampling`).

Random numbers are a function of what is sampled, not of when or where: of (seed, step, key, position
of the token). A token is the argmax of its logits plus Gumbel noise, which is an exact sample of
softmax(logits) (Gumbel 1954; Maddison, Tarlow & Minka 2014). The noise of a vocabulary entry is
SplitMix64 (Steele, Lea & Flood 2014), counted from a seed of its own. So it depends on no batch, no
order, no world size and no library's generator.

Rounding remains. The last bits of a model's logits may depend on the batch they are computed in, and
a near tie may then fall the other way; the completion differs from there on, and is just as likely.
Measured on a tiny model with batches of 64 and of 7: in none of 23 thousand tokens in fp32, in one of
450 in bf16.
"""

from __future__ import annotations

import contextlib
import heapq
import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drumline.config import rollouts as configs
from drumline.data.batches import PromptImageMeta
from drumline.data.targets import end_ids
from drumline.dist.copies import AsyncHostCopy, copy_to_device
from drumline.dist.reduce import gather_from_ranks
from drumline.dist.seeds import derive
from drumline.errors import DataError, DrumlineError, ModelError, PlanError
from drumline.plan.attention import known_padding
from drumline.system.heartbeat import alive
from drumline.system.threads import bind_to_gpu
from drumline.vendor.transformers import DynamicLayer, DynamicSlidingWindowLayer, ask_the_host

WHERE = "algorithm.generator"


class LostWeights(DrumlineError):
    """A generator does not have the weights any more that it was handed. They can be handed over again."""


Weights = Iterator[tuple[str, torch.Tensor]]
# SplitMix64's constants. Torch has no arithmetic on uint64; int64 wraps to the same bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
# Bits of a uniform number. With a half added it is exact in fp64, and neither 0 nor 1.
_BITS = 52
# Tokens that are decoded before those that a stop text may span, for two reasons: a text that is
# decoded from the middle may begin with a part of a letter, and some decoders drop a leading space.
SPARE_TAIL_TOKENS = 8


@dataclass(frozen=True)
class Request:
    """A prompt to complete."""

    # The ids of the prompt's tokens.
    tokens: list[int]
    # Its random numbers depend on the seed of the run, the step and this key. In rollouts it is
    # (position of the prompt in the run, index of the sample in its group).
    key: tuple[int, ...]
    # The images of the prompt; empty without any.
    images: PromptImageMeta = field(default_factory=dict)
    # The most tokens to sample if that is less than the generator's `max_new_tokens`; None: no limit of
    # its own.
    max_new_tokens: int | None = None

    def limit(self, max_new_tokens: int) -> int:
        """Return the most tokens to sample, where `max_new_tokens` is the generator's own limit."""
        if self.max_new_tokens is None:
            return max_new_tokens
        return min(max_new_tokens, self.max_new_tokens)


@dataclass(frozen=True)
class VisionPrompts:
    """What generation needs to know of a vision-language model."""

    # Returns the arguments of `generate` for the images of some prompts; none if no prompt has any.
    # Arguments: the images of each prompt, and the tokens, int64[B, T].
    arguments: Callable[[list[PromptImageMeta], torch.Tensor], dict[str, torch.Tensor]]
    # The token that a feature of an image replaces. It is never sampled: it would have no feature.
    token_id: int


@dataclass(frozen=True)
class Completion:
    """What was sampled for a request."""

    # The ids of its tokens, including the token that ended it.
    tokens: list[int]
    # The log-prob of each token: log softmax(logits / temperature) in fp32, before top-k and top-p.
    log_probs: list[float]
    # Whether it ends with an end token or a stop text; False if it was cut at the request's limit.
    ended: bool

    @property
    def length(self) -> int:
        """The number of tokens that were sampled."""
        return len(self.tokens)


def request_seed(seed: int, step: int, key: tuple[int, ...]) -> int:
    """Return the seed of a request's random numbers, an integer of 63 bits."""
    return derive(seed, "rollout", step, *key)


def gumbel(seeds_B: torch.Tensor, positions_B: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return standard Gumbel noise fp32[B, vocab] for one token of each of B requests.

    It is computed in integers and fp64, and rounded at the end. CPU and GPU agree but for about one
    number in 10⁸, whose logarithms are rounded differently.

    Args:
        seeds_B: int64, what `request_seed` returns for each request.
        positions_B: int64, the index of the token in each request's completion.
        vocab: Number of entries of the vocabulary.
    """
    # SplitMix64 makes a word for each token and, counted on from that, one for each vocabulary entry.
    starts_B = _mix(seeds_B + (positions_B + 1) * _GOLDEN)
    counts_V = torch.arange(1, vocab + 1, device=seeds_B.device) * _GOLDEN
    words_BV = _mix(starts_B[:, None] + counts_V)
    uniform_BV = _shift(words_BV, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS)
    # −log(−log(u)) of a uniform number is Gumbel. In place, because it has the size of the logits.
    return uniform_BV.log_().neg_().log_().neg_().float()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of int64 `bits`, which are overwritten."""
    bits = bits.bitwise_xor_(_shift(bits, 30)).mul_(_FIRST)
    bits = bits.bitwise_xor_(_shift(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(_shift(bits, 31))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 `bits` shifted right, filled with zeros; int64's own shift copies the sign."""
    kept_bits = 2 ** (64 - by) - 1
    return (bits >> by).bitwise_and_(kept_bits)


class Sampler:
    """Chooses tokens from logits: temperature, then top-k, then top-p, then Gumbel noise.

    The order is that of transformers and vLLM. With `top_k` 1 it decodes greedily and without noise,
    so it takes the first of equal logits. Tokens of `banned` are never chosen.
    """

    def __init__(
        self, temperature: float, top_k: int = 0, top_p: float = 1.0, banned: tuple[int, ...] = ()
    ) -> None:
        self.temperature = temperature
        self.banned = banned
        self.greedy = top_k == 1
        self.warpers: list[Any] = []
        if top_k:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def choose(
        self, logits_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores whose argmax is the next token of each of B requests, and its log-probs.

        Returns (scores fp32[B, V], log-probs fp32[B]). The log-probs are those before top-k and
        top-p, as training computes them.
        """
        # Each token shows the watcher that this rank does not hang.
        alive()
        scores_BV = logits_BV.float() / self.temperature
        allowed_BV = scores_BV
        if self.banned:
            allowed_BV = scores_BV.clone()
            for token in self.banned:
                # A list of indices would be copied to the device for each token that is sampled.
                allowed_BV[:, token].fill_(-torch.inf)
        kept_BV = allowed_BV
        for warper in self.warpers:
            kept_BV = warper(None, kept_BV)
        if self.greedy:
            noisy_BV = allowed_BV
        else:
            noisy_BV = kept_BV + gumbel(seeds_B, positions_B, scores_BV.shape[1])
        chosen_B1 = noisy_BV.argmax(-1, keepdim=True)
        log_probs_B1 = scores_BV.gather(1, chosen_B1) - scores_BV.logsumexp(-1, keepdim=True)
        return noisy_BV, log_probs_B1.squeeze(1)


class NoisyLogits(LogitsProcessor):
    """Applies a Sampler in one call of `generate`, which takes the argmax of what this returns.

    Attributes:
        log_probs: fp32[B] for each token so far.
    """

    supports_continuous_batching = False

    def __init__(self, sampler: Sampler, seeds_B: torch.Tensor, prompt_width: int) -> None:
        self.sampler = sampler
        self.seeds_B = seeds_B
        self.prompt_width = prompt_width
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self.prompt_width
        positions_B = torch.full_like(self.seeds_B, position)
        noisy_BV, log_probs_B = self.sampler.choose(scores, self.seeds_B, positions_B)
        self.log_probs.append(log_probs_B)
        return noisy_BV


class StopRules:
    """Decides when a completion ends: with a token of `token_ids`, or once it contains a text of `stop`.

    A stop text may begin and end within a token.
    """

    def __init__(self, token_ids: frozenset[int], stop: tuple[str, ...], tokenizer: Any) -> None:
        self.token_ids = token_ids
        self.stop = stop
        self.tokenizer = tokenizer
        # A stop text spans at most as many tokens as it has bytes: each token has one of them or more.
        longest_stop = max((len(text.encode()) for text in stop), default=0)
        # The number of last tokens that have to be decoded to find a stop text.
        self.tail = longest_stop + SPARE_TAIL_TOKENS

    def is_met(self, tokens: list[int]) -> bool:
        """Return whether a completion ends after `tokens`, the last `tail` or more of its tokens."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(
            tokens[-self.tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self.stop)

    def find_end(self, tokens: list[int]) -> int | None:
        """Return how many tokens a completion has up to its end, or None if it has not ended."""
        for length in range(1, len(tokens) + 1):
            if self.is_met(tokens[max(0, length - self.tail) : length]):
                return length
        return None


class StopCriteria(StoppingCriteria):
    """Applies StopRules in one call of `generate`.

    With `is_late` the host reads each token one step late. Meanwhile the GPU computes the next token,
    which is dropped if the row had ended. `generate` asks `should_continue`, in place of the tensor
    that `__call__` returns, since reading a tensor would wait for the GPU.

    Attributes:
        lengths: The number of tokens of each row's completion; None while the row goes on.
        are_complete: Whether each row was ended by `rules`; False if it was cut at its limit.
        generated: The number of tokens of each row that the device has been asked for.
        read_back: The number of tokens of each row that the host has read, at most `generated`.
        ended_B: bool, whether each row has ended, on the host.
    """

    def __init__(
        self, rules: StopRules, limits: list[int], prompt_width: int, is_late: bool
    ) -> None:
        """Set up for one batch.

        Args:
            rules: Decide when a completion ends.
            limits: The most tokens of the completion of each row of the batch.
            prompt_width: Number of tokens of each row before its completion, padding included.
            is_late: Whether tokens are read one step late.
        """
        rows = len(limits)
        self.rules = rules
        self.limits = limits
        self.prompt_width = prompt_width
        self.is_late = is_late
        self.lengths: list[int | None] = [None] * rows
        self.are_complete = [False] * rows
        self.generated = 0
        self.read_back = 0
        self.ended_B = torch.zeros(
            rows, dtype=torch.bool, pin_memory=is_late and torch.cuda.is_available()
        )
        # Copies of tokens to the host that are not read yet, the oldest first.
        self._pending_copies: list[AsyncHostCopy] = []
        # The last tokens of each row, as many as `rules` read.
        self._tails: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.generated = input_ids.shape[1] - self.prompt_width
        self._pending_copies.append(AsyncHostCopy(input_ids[:, -1]))
        while len(self._pending_copies) > int(self.is_late):
            self._read()
        return self.ended_B.to(input_ids.device, non_blocking=True)

    def should_continue(self, *_: Any, **__: Any) -> bool:
        """Return whether another token is needed, without waiting for the device."""
        return self.generated < max(self.limits) and None in self.lengths

    def read_all(self) -> None:
        """Read the tokens whose copies to the host are still under way."""
        while self._pending_copies:
            self._read()

    def _read(self) -> None:
        """Read the oldest pending token of each row, and note which rows it ends."""
        tokens_B = self._pending_copies.pop(0).read()
        self.read_back += 1
        for row, token in enumerate(tokens_B.tolist()):
            if self.lengths[row] is not None:
                continue
            # Only the end of the text can have become a stop text.
            tail = [*self._tails[row], token][-self.rules.tail :]
            self._tails[row] = tail
            self.are_complete[row] = self.rules.is_met(tail)
            if self.are_complete[row] or self.read_back == self.limits[row]:
                self.lengths[row] = self.read_back
                self.ended_B[row] = True


class Generator(Protocol):
    """Samples completions.

    A completion depends on (seed of the run, `step`, request) alone: not on the other requests, and
    not on the ranks.

    A new generator needs this class, a config class in `config.rollouts`, a branch in
    `build.build_generator`, and `build._change_options` and `SamplerCheck._fix` must know it.
    """

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return one completion for each request, in their order.

        Not collective: ranks may have any number of requests.
        """


class HFGenerator:
    """transformers' `generate` with a KV cache.

    It takes `config.batch` prompts of similar length at once, padded on the left. A prompt that is
    completed several times is computed once.
    """

    def __init__(
        self,
        config: configs.HFGenerator | configs.ContinuousGenerator,
        model: Any,
        tokenizer: Any,
        seed: int,
        autocast: torch.dtype | None = None,
        vision: VisionPrompts | None = None,
    ) -> None:
        """Store the settings.

        Args:
            config: The section `algorithm.generator`.
            model: A causal LM that is whole on one device: the trainable model or a copy. It is in
                eval mode while it generates, and restored afterwards.
            tokenizer: The tokenizer of the policy.
            seed: The seed of the run.
            autocast: The type that matrix products are cast to, for a trainable model that computes
                in bf16 or fp16; None: the model computes in the type of its weights.
            vision: Of a vision-language model; None for a model of text.
        """
        self.config = config
        self.model = model
        self.seed = seed
        self.autocast = autocast
        self.vision = vision
        self.stop_rules = StopRules(end_tokens(model, tokenizer), config.stop, tokenizer)
        banned = (vision.token_id,) if vision else ()
        self.sampler = Sampler(config.temperature, config.top_k, config.top_p, banned)
        self.pad = tokenizer.pad_token_id
        if self.pad is None:
            self.pad = tokenizer.eos_token_id or 0

    @torch.no_grad()
    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request.

        Raises DataError for an empty prompt, PlanError for one that leaves too few positions.
        """
        require_room(requests, self.config.max_new_tokens, max_positions(self.model))
        # The longest come first, so that a batch which does not fit in memory fails at once.
        longest_first = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
        completions: dict[int, Completion] = {}
        with generation_mode(self.model):
            for start in range(0, len(requests), self.config.batch):
                indices = longest_first[start : start + self.config.batch]
                batch = [requests[index] for index in indices]
                sampled = self._generate_batch(batch, step)
                completions |= zip(indices, sampled, strict=True)
        return [completions[index] for index in range(len(requests))]

    def _generate_batch(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each of the requests, which are computed as one batch."""
        device = self.model.device
        width = max(len(request.tokens) for request in requests)
        is_padded = any(len(request.tokens) < width for request in requests)
        ids = []
        mask = []
        for request in requests:
            length = len(request.tokens)
            # Padding is on the left, so that the next token of every row has the same column.
            padding = width - length
            ids.append([self.pad] * padding + request.tokens)
            mask.append([0] * padding + [1] * length)
        seeds = [request_seed(self.seed, step, request.key) for request in requests]
        host_ids_BT = torch.tensor(ids)
        ids_BT = copy_to_device(device, host_ids_BT)
        mask_BT = copy_to_device(device, torch.tensor(mask))
        seeds_B = copy_to_device(device, torch.tensor(seeds))
        noise = NoisyLogits(self.sampler, seeds_B, width)
        limits = [request.limit(self.config.max_new_tokens) for request in requests]
        is_late = device.type == "cuda"
        criteria = StopCriteria(self.stop_rules, limits, width, is_late)
        generation_config = GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=False,
            use_cache=True,
            pad_token_id=self.pad,
        )
        with (
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
            ask_the_host(self.model, criteria.should_continue),
            known_padding(is_padded),
        ):
            out_BT = self.model.generate(
                ids_BT,
                attention_mask=mask_BT,
                **self._prompt_arguments(requests, host_ids_BT, ids_BT, mask_BT),
                generation_config=generation_config,
                logits_processor=[noise],
                stopping_criteria=[criteria],
                synced_gpus=False,  # each rank has a whole model and its own number of tokens
            )
        criteria.read_all()
        log_probs = torch.stack(noise.log_probs, 1).tolist()
        tokens = out_BT[:, width:].tolist()
        completions = []
        for row in range(len(requests)):
            # A row that has ended is filled until the last row ends.
            kept = criteria.lengths[row]
            assert kept is not None, "each row is cut at its limit at the latest"
            has_ended = criteria.are_complete[row]
            completion = Completion(tokens[row][:kept], log_probs[row][:kept], has_ended)
            completions.append(completion)
        return completions

    def _prompt_arguments(
        self,
        requests: list[Request],
        host_ids_BT: torch.Tensor,
        ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
    ) -> dict[str, Any]:
        """Return the arguments of `generate` for images, or for prompts that are repeated.

        See `_prefill_shared_prompts` for the arguments. A vision-language model computes each prompt
        anew: its decoder by itself knows nothing of images.
        """
        if self.vision is None:
            return self._prefill_shared_prompts(requests, ids_BT, mask_BT)
        images = [request.images for request in requests]
        arguments = self.vision.arguments(images, host_ids_BT)
        on_device: dict[str, Any] = {}
        for name, tensor in arguments.items():
            on_device[name] = copy_to_device(ids_BT.device, tensor)
        return on_device

    def _prefill_shared_prompts(
        self, requests: list[Request], ids_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> dict[str, Any]:
        """Return the argument `past_key_values` of `generate`, if prompts are repeated in a batch.

        Each distinct prompt is computed once, all but its last token, and its KV cache is repeated for
        its requests. Returns no argument if no prompt is repeated, or if a layer's cache has anything
        but keys and values.

        Args:
            requests: The requests of one batch.
            ids_BT: int64, the tokens of their prompts, padded on the left.
            mask_BT: int64, 1 for a token and 0 for padding.
        """
        # Distinct prompts are numbered in the order of their first rows.
        numbers: dict[tuple[int, ...], int] = {}
        first_rows: list[int] = []
        prompt_B: list[int] = []
        for row, request in enumerate(requests):
            tokens = tuple(request.tokens)
            if tokens not in numbers:
                numbers[tokens] = len(numbers)
                first_rows.append(row)
            prompt_B.append(numbers[tokens])
        is_repeated = len(numbers) < len(requests)
        if not is_repeated or ids_BT.shape[1] == 1:
            return {}
        cache = DynamicCache(config=self.model.config)
        layer_types = {type(layer) for layer in cache.layers}
        if layer_types - {DynamicLayer, DynamicSlidingWindowLayer}:
            return {}
        decoder = self.model.get_decoder()
        first_U = copy_to_device(ids_BT.device, torch.tensor(first_rows))
        mask_UT = mask_BT[first_U, :-1]
        inputs = {
            "input_ids": ids_BT[first_U, :-1],
            "attention_mask": mask_UT,
            "past_key_values": cache,
            "use_cache": True,
        }
        # Not all decoders take positions. Padding on the left must not shift the tokens' positions.
        if "position_ids" in inspect.signature(decoder.forward).parameters:
            inputs["position_ids"] = (mask_UT.cumsum(1) - 1).clamp(min=0)
        decoder(**inputs)
        cache.batch_select_indices(copy_to_device(ids_BT.device, torch.tensor(prompt_B)))
        return {"past_key_values": cache}


def assign_requests(requests: list[Request], ranks: int) -> list[list[int]]:
    """Return for each rank the indices of the requests that it takes. Each request goes to one rank.

    Every rank computes the same assignment. All requests of a prompt stay together if the number of
    distinct prompts is a multiple of `ranks`, so that each prompt is computed once. The longest prompts
    are assigned first, each to the rank with the fewest prompt tokens so far (longest processing time
    first, Graham 1969: within 4/3 of the best balance). Among ranks with equal tokens, the rank with
    the fewest requests is next, so prompts of equal length are spread evenly.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(tuple(request.tokens), []).append(index)
    if len(by_prompt) % ranks == 0:
        parts = list(by_prompt.values())
    else:
        parts = [[index] for index in range(len(requests))]

    def prompt_length(part: list[int]) -> int:
        # All requests of a part have the same prompt.
        return len(requests[part[0]].tokens)

    parts.sort(key=lambda part: -prompt_length(part))
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    # A heap of (tokens, requests, rank): its first entry is the rank that is next.
    loads = [(0, 0, rank) for rank in range(ranks)]
    for part in parts:
        tokens, count, rank = loads[0]
        assigned[rank] += part
        tokens += len(part) * prompt_length(part)
        count += len(part)
        heapq.heapreplace(loads, (tokens, count, rank))
    return assigned


def generate_together(generator: Generator, requests: list[Request], step: int) -> list[Completion]:
    """Return the completions of all requests, in their order, on every rank.

    Collective; see DistributedSampling.
    """
    return DistributedSampling(generator, requests, step).result


class DistributedSampling:
    """Samples a list of requests on all ranks of a run, each request on one rank.

    Every rank passes the same `requests` and samples those that are assigned to it, at once or in a
    thread. `result` has the completions of all ranks.
    """

    def __init__(
        self, generator: Generator, requests: list[Request], step: int, in_background: bool = False
    ) -> None:
        """Begin to sample.

        Args:
            generator: The generator of this rank.
            requests: The requests of all ranks; the same list on every rank.
            step: The optimizer step of the run; random numbers depend on it.
            in_background: Sample in a thread, and return at once.
        """
        rank, ranks = rank_and_world_size()
        # For each rank the indices of its requests.
        self.assigned = assign_requests(requests, ranks)
        self._own_completions: Future[list[Completion]] = Future()
        own_requests = [requests[index] for index in self.assigned[rank]]
        if not in_background:
            self._sample(generator, own_requests, step)
            return
        # A daemon: a run that fails does not wait for completions.
        thread = Thread(
            target=bind_to_gpu(self._sample),
            args=(generator, own_requests, step),
            daemon=True,
            name="drumline-rollout",
        )
        thread.start()

    def _sample(self, generator: Generator, requests: list[Request], step: int) -> None:
        """Sample this rank's requests; `result` raises an error again."""
        try:
            self._own_completions.set_result(generator.generate(requests, step))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._own_completions.set_exception(error)

    @property
    def is_finished(self) -> bool:
        """Whether this rank's requests are sampled, or sampling has failed."""
        return self._own_completions.done()

    @cached_property
    def result(self) -> list[Completion]:
        """All completions, in the order of the requests, on every rank. Collective.

        If sampling failed on this rank, its error is raised here. The other ranks then wait until the
        launcher ends them because this rank has ended, as for any error of one rank. LostWeights alone
        is raised on all ranks if it is on one.
        """
        own: list[Completion] | None = None
        loss = LostWeights("another rank's generator has lost its weights", where=WHERE)
        try:
            own = self._own_completions.result()
        except LostWeights as error:
            loss = error
        completions: dict[int, Completion] = {}
        for indices, sampled in zip(self.assigned, gather_from_ranks(own), strict=True):
            if sampled is None:
                raise loss
            completions |= zip(indices, sampled, strict=True)
        return [completions[index] for index in range(len(completions))]


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def copy_to_host(
    weights: Weights, dtypes: Mapping[str, torch.dtype]
) -> list[tuple[str, torch.Tensor]]:
    """Return copies of all weights in host memory. Collective if the iterator is.

    `dtypes`: name of a weight → the type of its copy; others keep their own.
    """
    copies = []
    for name, tensor in weights:
        dtype = dtypes.get(name, tensor.dtype)
        copies.append((name, tensor.detach().to("cpu", dtype, copy=True)))
    return copies


class InferenceCopy:
    """A whole model to sample from, beside a trainable one that is sharded over ranks.

    It is a plain Hugging Face model in the compute type. Before each rollout the new weights are copied
    into it, one parameter after the other.

    It costs one copy of all weights in the compute type, and stays allocated between rollouts. Freeing
    it would help only the optimizer's step, which has its memory already, and would cost an allocation
    for each rollout.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """Build the model.

        `build`: returns the whole model on this rank's device; with an adapter it has PEFT's layers
        and names.
        """
        self.model = build()
        self.model.requires_grad_(False)
        self.model.eval()
        self.tensors: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)

    def hold(self, weights: Weights) -> Callable[[], None]:
        """Keep all weights in host memory, and return the function that copies them into the model.

        They are kept in the model's types. Collective, as the iterator is; the function is not.
        """
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        held = copy_to_host(weights, dtypes)
        return lambda: self.refresh(iter(held))

    @torch.no_grad()
    def refresh(self, weights: Weights) -> None:
        """Copy all weights, which `Engine.whole_weights` yields. Collective, as that is.

        Tied weights may be yielded once. Raises ModelError, after the last weight, for a name or shape
        that the copy does not have, and for a weight that is missing.
        """
        misfits: list[str] = []
        arrived: set[int] = set()
        # All weights are taken even if one does not fit: the iterator is collective, and the other
        # ranks go on.
        for name, tensor in weights:
            own = self.tensors.get(name)
            if own is None:
                misfits.append(f"the copy has no {name} {tuple(tensor.shape)}")
                continue
            if own.shape != tensor.shape:
                misfits.append(
                    f"{name} is {tuple(tensor.shape)}, and {tuple(own.shape)} in the copy"
                )
                continue
            own.copy_(tensor)
            arrived.add(own.data_ptr())
        for name, own in self.tensors.items():
            if own.numel() and own.data_ptr() not in arrived:
                misfits.append(f"{name} is missing")
        if misfits:
            what = f"the weights do not fit the copy that rollouts are sampled from: {misfits[0]} ({len(misfits)} such)"
            raise ModelError(what, where="model")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return all token ids that end a text.

    They come from the tokenizer, its chat template and the model's generation config; chat models have
    several.
    """
    ids = set(end_ids(tokenizer))
    of_model = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(of_model, list):
        ids.update(int(token) for token in of_model if token is not None)
    elif of_model is not None:
        ids.add(int(of_model))
    return frozenset(ids)


def max_positions(model: Any) -> int | None:
    """Return the most tokens that a sequence of the model may have; None if there is no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def require_room(requests: list[Request], new_tokens: int, positions: int | None) -> None:
    """Check that every prompt can be completed by `new_tokens` tokens, or those of its own limit.

    Raises DataError for an empty prompt, PlanError if a prompt and its completion may have more tokens
    than the model's `positions` (None: no limit).
    """
    for request in requests:
        length = len(request.tokens)
        if not length:
            raise DataError(
                f"prompt {request.key} has no tokens",
                where="data",
                fix="a completion goes on from one token at least",
            )
        if positions is None:
            continue
        room = positions - length
        limit = request.limit(new_tokens)
        if room < limit:
            what = f"a prompt of {length} tokens and max_new_tokens {limit} are more than the model's {positions} positions"
            fix = f"at most {room}, or shorter prompts" if room > 0 else "shorter prompts"
            raise PlanError(what, where=f"{WHERE}.max_new_tokens", fix=fix)


@contextlib.contextmanager
def generation_mode(model: Any) -> Iterator[None]:
    """Prepare the model to generate inside the block, and restore it afterwards.

    Inside the block it is in eval mode, uses a KV cache, and has an empty generation config. Its own
    would add what ours leaves open, for example a repetition penalty, which the log-probs of training
    do not have. A mixture computes no loss of its routers: transformers fails at that with a cache and
    padding, and nothing is learned here.
    """
    if not hasattr(model, "generate"):
        raise ModelError(
            f"{type(model).__name__} does not generate",
            where="model",
            fix="rollouts need a causal language model",
        )
    training = [module for module in model.modules() if module.training]
    own_config = model.generation_config
    own_use_cache = model.config.use_cache
    model.eval()
    model.generation_config = GenerationConfig()
    model.config.use_cache = True
    text_config = model.config.get_text_config()
    computes_router_loss = getattr(text_config, "output_router_logits", False)
    if computes_router_loss:
        text_config.output_router_logits = False
    try:
        yield
    finally:
        if computes_router_loss:
            text_config.output_router_logits = True
        model.generation_config = own_config
        model.config.use_cache = own_use_cache
        for module in training:
            module.training = True
