"""The seam of rollouts: one verb, `generate`. Here transformers' own `generate` is behind it; `continuous` and `vllm` are others.
Requests are dealt over all ranks, and their completions come back to all ranks.

Random numbers are a function of what is sampled, not of when or where: (seed, step, key, position of the token). A token is the argmax of
its logits plus Gumbel noise, which is an exact sample of softmax(logits) (Gumbel 1954; Maddison, Tarlow & Minka 2014). The noise of a
vocabulary entry is SplitMix64 (Steele, Lea & Flood 2014) counted from a seed of its own, so it depends on no batch, no order, no world size
and no library's generator. What is left is rounding: a model's logits may differ in their last bits with the batch they are computed in,
and a near tie may then fall the other way. Measured on a tiny model, batches of 64 and of 7: in none of 23 thousand tokens in fp32, in one
of 450 in bf16 (the completion goes another way from there on, just as likely).
"""

from __future__ import annotations

import contextlib
import heapq
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
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

from drumline.core import rollouts as c
from drumline.core.attention import known_padding
from drumline.core.heartbeat import alive
from drumline.core.threads import on_this_gpu
from drumline.data.templates import end_ids
from drumline.dist.copies import LateCopy, copied_to
from drumline.dist.reduce import from_all
from drumline.dist.seeds import derive
from drumline.errors import DataError, ModelError, PlanError
from drumline.vendor.transformers import DynamicLayer, DynamicSlidingWindowLayer, ask_the_host

WHERE = "algorithm.generator"
Weights = Iterator[tuple[str, torch.Tensor]]
# Torch has no arithmetic on uint64; int64 wraps to the same bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 52  # of a uniform number: with a half added it is exact in fp64, and neither 0 nor 1


@dataclass(frozen=True)
class Request:
    """A prompt to complete. `tokens`: its ids. `key`: what fixes its random numbers, beside seed and step: (prompt id, sample index)."""

    tokens: list[int]
    key: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """What was sampled. `tokens`: ids, with the one that ended it. `log_probs`: of each, log softmax(logits / temperature) in fp32, before
    top-k and top-p. `ended`: by an end token or a stop text; False: cut at max_new_tokens."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool


def request_seed(seed: int, step: int, key: tuple[int, ...]) -> int:
    """The 63-bit word that a request's random numbers are made of."""
    return derive(seed, "rollout", step, *key)


def gumbel(seeds_B: torch.Tensor, positions_B: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise fp32[B, vocab] for the tokens at `positions_B` of the requests with words `seeds_B` (both int64[B]).

    Integers and fp64, rounded at the end: the same on CPU and GPU, but for about one number in 10⁸ whose logarithms round apart.
    """
    starts_B = _mix(seeds_B + (positions_B + 1) * _GOLDEN)
    counts_V = torch.arange(1, vocab + 1, device=seeds_B.device) * _GOLDEN
    words_BV = _mix(starts_B[:, None] + counts_V)
    uniform_BV = _shift(words_BV, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS)
    return uniform_BV.log_().neg_().log_().neg_().float()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, in place on int64."""
    bits = bits.bitwise_xor_(_shift(bits, 30)).mul_(_FIRST)
    bits = bits.bitwise_xor_(_shift(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(_shift(bits, 31))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: int64's own shift copies the sign."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


class Sampler:
    """Temperature, then top-k, then top-p (as transformers and vLLM order them), then the noise. `top_k` 1 is greedy decoding: without
    noise, so of equal logits the first is taken."""

    def __init__(self, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self.temperature = temperature
        self.greedy = top_k == 1
        self.warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k else []
        self.warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def choose(
        self, logits_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores fp32[B, V] whose argmax is the sample, log-probs fp32[B] of those samples)."""
        alive()  # a token is a sign of life
        scores_BV = logits_BV.float() / self.temperature
        kept_BV = scores_BV
        for warper in self.warpers:
            kept_BV = warper(None, kept_BV)
        noisy_BV = (
            scores_BV if self.greedy else kept_BV + gumbel(seeds_B, positions_B, scores_BV.shape[1])
        )
        chosen_B1 = noisy_BV.argmax(-1, keepdim=True)
        log_probs_B = (
            scores_BV.gather(1, chosen_B1) - scores_BV.logsumexp(-1, keepdim=True)
        ).squeeze(1)
        return noisy_BV, log_probs_B


class NoisyLogits(LogitsProcessor):
    """A Sampler for one call of `generate`, which decodes greedily what this returns. `log_probs`: fp32[B] of each step so far."""

    supports_continuous_batching = False

    def __init__(self, sampler: Sampler, seeds_B: torch.Tensor, prompt_width: int) -> None:
        self.sampler, self.seeds_B, self.prompt_width = sampler, seeds_B, prompt_width
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self.prompt_width
        noisy_BV, log_probs_B = self.sampler.choose(
            scores, self.seeds_B, torch.full_like(self.seeds_B, position)
        )
        self.log_probs.append(log_probs_B)
        return noisy_BV


class Endings:
    """What ends a completion: any of `token_ids`, or a text of `stop` in what was generated (it may begin and end within a token)."""

    def __init__(self, token_ids: frozenset[int], stop: tuple[str, ...], tokenizer: Any) -> None:
        self.token_ids = token_ids
        self.stop = stop
        self.tokenizer = tokenizer
        # A token holds a byte at least; the rest covers one cut letter at the start, and decoders that drop a leading space.
        self.tail = max((len(text.encode()) for text in stop), default=0) + 8

    def after(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens`, what was generated so far, is the end."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(
            tokens[-self.tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self.stop)


class AtEndings(StoppingCriteria):
    """Endings for one call of `generate`. `lengths`: tokens of each row's completion, None while it goes on.

    `is_late`: tokens are read one late: while the host looks at a token a GPU computes the next, which is dropped where the token was
    the end of the last row. `generate` asks the host (`goes_on`) and not the tensor that this returns, for which it would wait.
    """

    def __init__(
        self, endings: Endings, rows: int, prompt_width: int, most: int, is_late: bool
    ) -> None:
        """`most`: tokens that a completion may have."""
        self.endings = endings
        self.prompt_width = prompt_width
        self.most = most
        self.is_late = is_late
        self.lengths: list[int | None] = [None] * rows
        self.made = 0
        self.seen = 0
        self.have_ended = torch.zeros(
            rows, dtype=torch.bool, pin_memory=is_late and torch.cuda.is_available()
        )
        self.on_their_way: list[LateCopy] = []
        self.tails: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.made = input_ids.shape[1] - self.prompt_width
        self.on_their_way.append(LateCopy(input_ids[:, -1]))
        while len(self.on_their_way) > int(self.is_late):
            self._read()
        return self.have_ended.to(input_ids.device, non_blocking=True)

    def goes_on(self, *_: Any, **__: Any) -> bool:
        """Whether another token is needed; in the place of transformers' own question to the device."""
        return self.made < self.most and None in self.lengths

    def read_all(self) -> None:
        """Read the tokens that are still on their way."""
        while self.on_their_way:
            self._read()

    def _read(self) -> None:
        tokens = self.on_their_way.pop(0).read().tolist()
        self.seen += 1
        for row, token in enumerate(tokens):
            if self.lengths[row] is not None:
                continue
            self.tails[row] = [*self.tails[row], token][-self.endings.tail :]
            if self.endings.after(self.tails[row]):
                self.lengths[row] = self.seen
                self.have_ended[row] = True


class Generator(Protocol):
    """Samples completions. What is sampled depends on (run seed, `step`, request) alone: not on the other requests, nor on the ranks."""

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """One completion a request, in the order of the requests. No collective: ranks may have any number of requests."""


class HFGenerator:
    """transformers' `generate` with a KV cache, `config.batch` prompts of like length at once, padded on the left. A prompt that is
    completed several times is read once.

    `model`: a causal LM that lies whole on one device: the trainable one, or a copy. It is put into eval mode while it
    generates, and left as it was. `autocast`: the type that it computes in, where that is not its weights' (a trainable model under bf16).
    """

    def __init__(
        self,
        config: c.HFGenerator | c.ContinuousGenerator,
        model: Any,
        tokenizer: Any,
        seed: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.config, self.model, self.seed, self.autocast = config, model, seed, autocast
        self.endings = Endings(end_tokens(model, tokenizer), config.stop, tokenizer)
        self.sampler = Sampler(config.temperature, config.top_k, config.top_p)
        self.pad = (
            tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id or 0
        )

    @torch.no_grad()
    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Raises DataError for an empty prompt, PlanError for one that leaves too few positions."""
        require_room(requests, self.config.max_new_tokens, positions(self.model))
        # What does not fit in memory fails at once.
        longest_first = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
        done: dict[int, Completion] = {}
        with generating(self.model):
            for start in range(0, len(requests), self.config.batch):
                chosen = longest_first[start : start + self.config.batch]
                done |= zip(chosen, self._batch([requests[i] for i in chosen], step), strict=True)
        return [done[i] for i in range(len(requests))]

    def _batch(self, requests: list[Request], step: int) -> list[Completion]:
        device = self.model.device
        width = max(len(request.tokens) for request in requests)
        ids = [[self.pad] * (width - len(r.tokens)) + r.tokens for r in requests]
        mask = [[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in requests]
        seeds = [request_seed(self.seed, step, r.key) for r in requests]
        ids_BT = copied_to(device, torch.tensor(ids))
        mask_BT = copied_to(device, torch.tensor(mask))
        seeds_B = copied_to(device, torch.tensor(seeds))
        noise = NoisyLogits(self.sampler, seeds_B, width)
        most = self.config.max_new_tokens
        is_late = device.type == "cuda"
        ends = AtEndings(self.endings, len(requests), width, most, is_late)
        is_padded = any(len(request.tokens) < width for request in requests)
        with (
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
            ask_the_host(self.model, ends.goes_on),
            known_padding(is_padded),
        ):
            out_BT = self.model.generate(
                ids_BT,
                attention_mask=mask_BT,
                **self._prefix(requests, ids_BT, mask_BT),
                generation_config=GenerationConfig(
                    max_new_tokens=self.config.max_new_tokens,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=self.pad,
                ),
                logits_processor=[noise],
                stopping_criteria=[ends],
                synced_gpus=False,  # each rank has a whole model and its own number of tokens
            )
        ends.read_all()
        log_probs = torch.stack(noise.log_probs, 1).tolist()
        lengths = [length or out_BT.shape[1] - width for length in ends.lengths]
        return [
            Completion(tokens[:length], row[:length], ended is not None)
            for tokens, row, length, ended in zip(
                out_BT[:, width:].tolist(), log_probs, lengths, ends.lengths, strict=True
            )
        ]

    def _prefix(
        self, requests: list[Request], ids_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> dict[str, Any]:
        """What `generate` need not compute: keys and values of the prompts but for their last tokens, once for all requests of a prompt.
        Nothing, where none is there twice, or a layer keeps anything else."""
        rows: dict[tuple[int, ...], int] = {}
        place_B = [rows.setdefault(tuple(request.tokens), len(rows)) for request in requests]
        cache = DynamicCache(config=self.model.config)
        if (
            len(rows) == len(requests)
            or ids_BT.shape[1] == 1
            or {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
        ):
            return {}
        decoder = self.model.get_decoder()
        first_U = torch.tensor([place_B.index(row) for row in range(len(rows))])
        first_U = copied_to(ids_BT.device, first_U)
        mask_UT = mask_BT[first_U, :-1]
        inputs = {
            "input_ids": ids_BT[first_U, :-1],
            "attention_mask": mask_UT,
            "past_key_values": cache,
            "use_cache": True,
        }
        if "position_ids" in inspect.signature(decoder.forward).parameters:
            inputs["position_ids"] = (mask_UT.cumsum(1) - 1).clamp(min=0)
        decoder(**inputs)
        cache.batch_select_indices(copied_to(ids_BT.device, torch.tensor(place_B)))
        return {"past_key_values": cache}


def deal(requests: list[Request], ranks: int) -> list[list[int]]:
    """Which requests each rank takes: indices, each in exactly one list; the same on every rank that computes it.

    All requests of a prompt go together where prompts divide by ranks, so that each prompt is read once. From the longest prompt down, they
    go to the rank with the fewest prompt tokens so far (longest processing first, Graham 1969: within 4/3 of the best balance), and of such
    ranks to the one with the fewest requests: equal prompts are dealt round.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        together.setdefault(tuple(request.tokens), []).append(index)
    parts = (
        list(together.values())
        if len(together) % ranks == 0
        else [[index] for index in range(len(requests))]
    )
    shares: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0, 0, rank) for rank in range(ranks)]
    for part in sorted(parts, key=lambda part: -len(requests[part[0]].tokens)):
        tokens, count, rank = lightest[0]
        shares[rank] += part
        heapq.heapreplace(
            lightest, (tokens + len(part) * len(requests[part[0]].tokens), count + len(part), rank)
        )
    return shares


def generate_together(generator: Generator, requests: list[Request], step: int) -> list[Completion]:
    """Completions of all requests, in their order, on every rank. Collective; see Together."""
    return Together(generator, requests, step).result


class Together:
    """Completions of `requests`, which are the same on all ranks of the run, those that share samples too: each rank samples its share,
    with `aside` in a thread. `result` is collective."""

    def __init__(
        self, generator: Generator, requests: list[Request], step: int, aside: bool = False
    ) -> None:
        rank, ranks = place()
        self.shares = deal(requests, ranks)
        self._made: Future[list[Completion]] = Future()
        arguments = generator, [requests[i] for i in self.shares[rank]], step
        if aside:
            # A daemon: a run that fails does not wait for completions.
            Thread(
                target=on_this_gpu(self._sample),
                args=arguments,
                daemon=True,
                name="drumline-rollout",
            ).start()
        else:
            self._sample(*arguments)

    def _sample(self, generator: Generator, requests: list[Request], step: int) -> None:
        try:
            self._made.set_result(generator.generate(requests, step))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._made.set_exception(error)

    def wait(self) -> None:
        """Until this rank's share is there, whatever came of it."""
        wait([self._made])

    @cached_property
    def result(self) -> list[Completion]:
        """All completions, in the order of the requests, on every rank. Raises what sampling raised."""
        found: dict[int, Completion] = {}
        for share, made in zip(self.shares, from_all(self._made.result()), strict=True):
            found |= zip(share, made, strict=True)
        return [found[index] for index in range(len(found))]


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class InferenceCopy:
    """A whole model to sample from, beside one that is spread over ranks: a plain Hugging Face one in the compute type, filled anew before
    each rollout, one parameter after the other.

    It stays allocated between rollouts: to free it would give its memory (a weight in the compute type for each of the model's) to
    the optimizer's step, which has its own already, and cost an allocation a rollout.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """`build`: makes the model whole on this rank's device; with an adapter, PEFT's layers are in it and it has PEFT's names."""
        self.model = build()
        self.model.requires_grad_(False)
        self.model.eval()
        self.tensors: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)

    @torch.no_grad()
    def refresh(self, weights: Weights) -> None:
        """Take over all weights (`Engine.whole_weights`). Collective where that is. Weights that the model ties may come once.

        Raises ModelError, after the last of them, for a name or shape that is not the copy's, and for a weight that did not come.
        """
        misfits, came = [], set()
        for (
            name,
            tensor,
        ) in weights:  # to the end also where one does not fit: the other ranks go on
            mine = self.tensors.get(name)
            if mine is None or mine.shape != tensor.shape:
                misfits.append(
                    f"{name} {tuple(tensor.shape)} against {'nothing' if mine is None else tuple(mine.shape)}"
                )
                continue
            mine.copy_(tensor)
            came.add(mine.data_ptr() if mine.numel() else id(mine))
        misfits += [
            f"{name} did not come"
            for name, t in self.tensors.items()
            if t.numel() and t.data_ptr() not in came
        ]
        if misfits:
            what = f"the weights do not fit the copy that rollouts are sampled from: {misfits[0]} ({len(misfits)} such)"
            raise ModelError(what, where="model")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: of the tokenizer, its chat template and the model's generation config (chat models have several)."""
    of_model = getattr(model.generation_config, "eos_token_id", None)
    ids = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(end_ids(tokenizer) | {int(i) for i in ids if i is not None})


def positions(model: Any) -> int | None:
    """How many tokens a sequence may have; None: any number."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def require_room(requests: list[Request], new: int, positions: int | None) -> None:
    """Raises DataError for an empty prompt, PlanError where a prompt and `new` tokens are more than the model's positions."""
    for request in requests:
        if not request.tokens:
            raise DataError(
                f"prompt {request.key} has no tokens",
                where="data",
                fix="a completion goes on from one token at least",
            )
        if positions is not None and (room := positions - len(request.tokens)) < new:
            what = f"a prompt of {len(request.tokens)} tokens and max_new_tokens {new} are more than the model's {positions} positions"
            fix = f"at most {room}, or shorter prompts" if room > 0 else "shorter prompts"
            raise PlanError(what, where=f"{WHERE}.max_new_tokens", fix=fix)


@contextlib.contextmanager
def generating(model: Any) -> Iterator[None]:
    """Eval mode, a KV cache, and no generation config of the model's own, which would fill in what ours leaves open (a repetition
    penalty, for example, which the log-probs of training do not have). All as it was afterwards."""
    if not hasattr(model, "generate"):
        raise ModelError(
            f"{type(model).__name__} does not generate",
            where="model",
            fix="rollouts need a causal language model",
        )
    training = [module for module in model.modules() if module.training]
    own, use_cache = model.generation_config, model.config.use_cache
    model.eval()
    model.generation_config, model.config.use_cache = GenerationConfig(), True
    try:
        yield
    finally:
        model.generation_config, model.config.use_cache = own, use_cache
        for module in training:
            module.training = True
