"""Text that the model generates during training: completions of rollouts and of held-out prompts.

If this rank has the unsharded model that is trained, it generates with that; otherwise with a copy.
In this module "to sample" means to draw tokens from the model, not to choose training samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.config import rollouts as c
from drumline.config.config import LoRAConfig
from drumline.config.run import MOST_NEW
from drumline.data.answers import last_answer
from drumline.data.batches import PromptImageMeta
from drumline.data.cache import TokenCache
from drumline.data.collators import find_vision
from drumline.data.images import image_arguments, images_of_segments
from drumline.dist.seeds import derive
from drumline.engine.engine import Engine
from drumline.errors import DataError
from drumline.models import adapters
from drumline.models.build import lay_out
from drumline.models.containers import LOW_PRECISION
from drumline.models.image_tokens import Vision
from drumline.models.load import load_config, load_grown
from drumline.models.scores import language_weights
from drumline.models.shards import Values
from drumline.models.tokenizer import load_tokenizer
from drumline.plan.plan import Plan
from drumline.rl.ahead import BackgroundSampling, ScheduledSampling, WeightTransfer
from drumline.rl.build import (
    Refresh,
    RolloutFiles,
    build_generator,
    greedy_generator,
    lost_servers,
)
from drumline.rl.conversations import OwnEpisodes
from drumline.rl.generate import (
    Completion,
    Generator,
    HFGenerator,
    Request,
    VisionPrompts,
)
from drumline.rl.hand_over import AdapterFiles
from drumline.rl.restarts import CheckedSampling
from drumline.rl.sampler_check import SamplerCheck
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Samples

# The most held-out rows that are searched for prompts that leave room for an answer.
MOST_LOOKED_AT = 10_000


@dataclass
class TextGeneration:
    """Generates completions with the current weights."""

    plan: Plan
    config: c.Generator
    engine: Engine
    tokenizer: Any
    device: str
    # Whether completions are generated while training goes on, so that they need a copy of the
    # weights.
    samples_ahead: bool = False
    # Compares the sampler of rollouts with the policy.
    check: SamplerCheck | None = None
    # Returns what plays a rank's episodes with environments by a generator, for `sample_ahead`; None
    # without environments.
    play_own: Callable[[Generator], OwnEpisodes] | None = None
    # How the model reads the images of prompts; None if it reads text alone.
    vision: Vision | None = None
    # Made by the first call that needs it.
    _generator: Generator | None = field(default=None, init=False)
    # The rollouts that `sample_ahead` has started or will start.
    _background: BackgroundSampling = field(default_factory=BackgroundSampling, init=False)
    # Copies new weights into the generator; None if that uses the engine's own.
    _refresh: Refresh | None = field(default=None, init=False)

    def __call__(self, requests: list[Request], step: int, greedily: bool) -> list[Completion]:
        """Return a completion of each request, in their order, the same on every rank.

        Collective.
        """
        current = self._current_generator()
        if greedily:
            current = greedy_generator(current)
        return self._start_sampling(current, requests, step).finish()

    def sample_again(self, requests: list[Request], step: int, greedily: bool) -> list[Completion]:
        """Return a completion of each request by the weights of the last call.

        They have not changed since, so nothing is handed over, unless a server was restarted. Collective.
        """
        assert self._generator is not None, "the first turn was sampled by `__call__`"
        current = self._generator
        # An environment may have taken long. A server that was restarted since does not know an adapter.
        self._restore_weights()
        if greedily:
            current = greedy_generator(current)
        return self._start_sampling(current, requests, step).finish()

    def sample_ahead(self, requests: list[Request], step: int) -> ScheduledSampling:
        """Generate completions in a thread, with the current weights, while training goes on.

        With environments, the thread plays the episodes of this rank: `requests` are then their Starts.

        The weights are copied before this returns, and servers load the copy in the background. When they
        have it, they are compared with the policy, at the latest in `finish_comparison`.

        If an earlier rollout is still being sampled, the weights are set aside until this rollout's turn
        (see `rl.ahead`). That hand-over is not checked, as the policy has changed by then. Collective.
        """
        if self._background.is_free():
            generator = self._require_generator()
            start = partial(self._start_in_background, generator, requests, step)
            compare = None
            if self._refresh is not None and self.check is not None:
                compare = partial(self._compare, self.check, generator)
            scheduled = self._background.add(start, self._begin_hand_over, compare)
            self._background.begin_next()
            return scheduled
        assert self._generator is not None, "it has sampled the rollout before"
        start = partial(self._start_in_background, self._generator, requests, step)
        if self._refresh is None:
            return self._background.add(start)
        return self._background.add(start, self._refresh.hold(self._weights_to_hand_over()))

    @property
    def is_loading(self) -> bool:
        """Whether weights for `sample_ahead` are on their way to servers. It is the same on all ranks."""
        return self._background.is_loading

    def finish_comparison(self) -> None:
        """Wait until servers have the weights that the policy has now, if they are on their way. Collective.

        It must be called before the policy learns, as the servers are then compared with it. Raises
        TrainingStopped if the weights did not arrive.
        """
        self._background.finish_comparison()

    def finish_background(self) -> None:
        """Wait until the rollout that `sample_ahead` has begun last is sampled. Collective."""
        self._background.finish()

    def start_next_if_free(self) -> None:
        """Begin with the next rollout of `sample_ahead` as far as that needs no waiting. Collective.

        See `BackgroundSampling.start_next_if_free`.
        """
        self._background.start_next_if_free()

    def lost_servers(self) -> dict[str, str]:
        """Return the url of each server that is lost → why, as this rank knows it."""
        return lost_servers(self._generator)

    def model(self) -> Any:
        """Return the unsharded model with the current weights. Not for generation by vLLM.

        Collective. A caller that changes something on it must put it back.
        """
        generator = self._current_generator()
        assert isinstance(generator, HFGenerator), "vLLM and servers do not hand out their model"
        return generator.model

    def _start_sampling(
        self, generator: Generator, requests: list[Request], step: int, in_background: bool = False
    ) -> CheckedSampling:
        """Start to generate completions with the generator's weights. Collective."""
        return CheckedSampling(generator, requests, step, in_background, self._restore_weights)

    def _start_in_background(
        self, generator: Generator, requests: list[Request], step: int
    ) -> CheckedSampling:
        """Start to generate completions or episodes in a thread. Collective."""
        sampler: Generator = generator
        if self.play_own is not None:
            sampler = self.play_own(generator)
        return self._start_sampling(sampler, requests, step, in_background=True)

    def _begin_hand_over(self) -> WeightTransfer | None:
        """Begin to hand over the current weights; None if they have arrived. Collective."""
        refresh = self._refresh
        if refresh is None:
            return None
        if refresh.begin is None:
            refresh(self._weights_to_hand_over())
            return None
        return refresh.begin(self._weights_to_hand_over())

    def _compare(self, check: SamplerCheck, generator: Generator) -> float | None:
        """Compare the generator with the policy, and return the gap. Collective."""
        check.compare(generator)
        return check.gap

    def _restore_weights(self) -> list[str]:
        """Hand the present weights over again to servers that were restarted, and return their urls.

        Collective.
        """
        if self._refresh is None:
            return []
        return self._refresh.restore()

    def _current_generator(self) -> Generator:
        """Return the generator with the current weights. Collective.

        Raises TrainingStopped if they did not arrive.
        """
        # A thread may still generate with the weights that are about to be replaced, and servers can only be
        # checked for these weights as long as they have them.
        self._background.finish()
        generator = self._require_generator()
        if self._refresh is not None:
            self._refresh(self._weights_to_hand_over())
            if self.check is not None:
                self.check.compare(generator)
        return generator

    def _require_generator(self) -> Generator:
        """Return the generator, which may have other weights than the current ones. Collective.

        The first call makes it.
        """
        unsharded: Any = None
        if not self.samples_ahead:
            unsharded = self.engine.unsharded_model()
        if self._generator is None:
            self._generator, self._refresh = self._build_generator(unsharded)
        return self._generator

    def _build_generator(self, unsharded: Any | None) -> tuple[Generator, Refresh | None]:
        """Return the generator, and what hands it new weights, see `build_generator`."""
        prompts_with_images = None
        if self.vision is not None:
            arguments = partial(image_arguments, vision=self.vision)
            prompts_with_images = VisionPrompts(arguments, self.vision.token_id)
        return build_generator(
            self.config,
            self.tokenizer,
            self.plan.config.run.seed,
            unsharded,
            self._build_copy,
            LOW_PRECISION.get(self.plan.precision),
            self._files(),
            prompts_with_images,
        )

    def _files(self) -> RolloutFiles:
        """Return what vLLM reads from disk."""
        adapter = None
        if self._hands_over_adapter():
            adapter = AdapterFiles(self._peft_config().save_pretrained, adapters.name_in_files)
        config, growth = load_grown(self.plan.model_path, self.plan.config.model)
        grown_rows = None
        if growth is not None and growth.added_rows:
            grown_rows = growth.rows
        return RolloutFiles(
            self.plan.model_path,
            Path(self.plan.run_dir),
            grown_rows,
            adapter,
            vocabulary=getattr(config.get_text_config(), "vocab_size", None),
        )

    def _hands_over_adapter(self) -> bool:
        """Return whether servers have the base model and get the adapter alone."""
        return isinstance(self.config, c.ServerGenerator) and self.config.weights == "adapter"

    def _weights_to_hand_over(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return what the generator is handed: all weights, or the adapter's alone. Collective."""
        if self._hands_over_adapter():
            return self.engine.whole_weights(adapters.is_adapter)
        return language_weights(self.engine.whole_weights())

    def _peft_config(self) -> Any:
        """Return PEFT's config of the adapter, made on a model without memory."""
        adapter = self.plan.config.adapter
        assert isinstance(adapter, LoRAConfig), "a rule refuses others"
        model, _ = self._lay_out()
        adapters.inject(model, adapter, self.plan.config.run.seed)
        peft_config = model.peft_config[adapters.NAME]
        peft_config.base_model_name_or_path = self.plan.model_path
        peft_config.inference_mode = True
        return peft_config

    def _lay_out(self) -> tuple[Any, Any]:
        """Return the policy's model without its adapter and weights, and the source of its weights."""
        return lay_out(
            self.plan.model_path,
            self.plan.config.model,
            derive(self.plan.config.run.seed, "weights"),
            self.device,
            LOW_PRECISION.get(self.plan.precision),
            draw_device=self.plan.draw_device,
        )

    def _build_copy(self) -> Any:
        """Return a copy of the model on this rank, in the type that it computes in.

        Its weights are those before training, until `_refresh` is called.
        """
        config = self.plan.config
        model, source = self._lay_out()
        if config.adapter.kind == "lora":
            adapters.inject(model, config.adapter, config.run.seed)
        Values(source, self.device, config.run.seed).fill(model)
        return model


def tokenizer_of(plan: Plan) -> Any:
    """Return the tokenizer of a run's policy."""
    return load_tokenizer(plan.config.model.tokenizer or plan.model_path or "", plan.config.model)


@dataclass(frozen=True)
class Prompt:
    """A held-out row, cut before its answer."""

    evaluation_set: str
    tokens: list[int]
    answer: list[int]
    # The images of the prompt; empty without any.
    images: PromptImageMeta = field(default_factory=dict)


def prompts(plan: Plan) -> list[Prompt]:
    """Return the first `eval.samples` prompts of each evaluation set that leave room for an answer.

    Raises DataError for a set that has none.
    """
    assert plan.data is not None, "the data is prepared"
    config = plan.config
    most_new_tokens = limit_of_new_tokens(plan)
    model = load_config(plan.model_path, config.model).get_text_config()
    room = getattr(model, "max_position_embeddings", None)
    if not room:
        room = config.data.max_length + most_new_tokens
    chosen: list[Prompt] = []
    for name, folder in plan.data.eval_caches.items():
        prompts_of_set = _prompts_that_fit(plan, folder, name, room - most_new_tokens)
        if not prompts_of_set:
            raise DataError(
                f"no prompt leaves room for {most_new_tokens} tokens in the model's {room} positions",
                where=f"data.eval.{name}".rstrip("."),
                fix="lower eval.max_new_tokens, or take eval.samples out",
            )
        chosen += prompts_of_set
    return chosen


def _prompts_that_fit(plan: Plan, folder: str, name: str, most_tokens: int) -> list[Prompt]:
    """Return the first `eval.samples` prompts of an evaluation set that have at most so many tokens."""
    fitting: list[Prompt] = []
    for prompt in _read_prompts(plan, TokenCache.open(folder), name):
        if len(fitting) == plan.config.eval.samples:
            break
        if len(prompt.tokens) <= most_tokens:
            fitting.append(prompt)
    return fitting


def limit_of_new_tokens(plan: Plan) -> int:
    """Return the most tokens that are generated for a prompt."""
    rollout = plan.config.algorithm.rollout
    if rollout is not None:
        return rollout.generator.max_new_tokens
    return plan.config.eval.max_new_tokens or MOST_NEW


def generation_for_evaluation(
    plan: Plan, engine: Engine, tokenizer: Any, device: str
) -> TextGeneration:
    """Return what generates text at the evaluations of a run without rollouts."""
    config = c.HFGenerator(max_new_tokens=limit_of_new_tokens(plan))
    return TextGeneration(plan, config, engine, tokenizer, device, vision=find_vision(plan))


def _read_prompts(plan: Plan, cache: TokenCache, name: str) -> Iterator[Prompt]:
    """Yield the rows of a cache in order, cut before their answer.

    Only the first answer of a pair is used. A row that is a prompt alone has no answer.
    """
    algorithm = plan.config.algorithm
    vision = find_vision(plan)
    for sample in range(min(len(cache), MOST_LOOKED_AT)):
        segments = cache.segments(sample)
        if algorithm.rows_per_sample > 1 or algorithm.rollout is not None:
            segments = segments[:1]
        images: list[dict[str, Any]] = [{} for _ in segments]
        if vision is not None:
            tokens_of_segments = [tokens for tokens, _ in segments]
            images = images_of_segments(tokens_of_segments, cache.meta(sample), vision)
        for (tokens, learn), own_images in zip(segments, images, strict=True):
            if algorithm.rollout is None:
                start, stop = last_answer(learn)
            else:
                start = stop = len(tokens)
            if not start:
                # All of it is learned: the second half is the answer.
                start = stop // 2
            if start:
                shown = own_images
                if vision is not None:
                    # An answer, or what follows it, may have images, too.
                    (shown,) = images_of_segments([tokens[:start]], own_images, vision)
                prompt = tokens[:start].tolist()
                yield Prompt(name, prompt, tokens[start:stop].tolist(), shown)


@dataclass(frozen=True)
class Answers:
    """Answers held-out prompts with the current weights, and emits the answers as an event."""

    # Called as generate(requests, step, greedily); collective.
    generate: Callable[[list[Request], int, bool], list[Completion]]
    prompts: list[Prompt]
    tokenizer: Any
    emit: Emit

    def write(self, step: int, when: str) -> None:
        """Answer all prompts greedily. `when`: before, during or after training. Collective."""
        began = time.time()
        requests = []
        for number, prompt in enumerate(self.prompts):
            requests.append(Request(prompt.tokens, (number,), prompt.images))
        completions = self.generate(requests, step, True)
        answers = []
        for prompt, completion in zip(self.prompts, completions, strict=True):
            answer = {
                "set": prompt.evaluation_set,
                "prompt": self._decode(prompt.tokens),
                "text": self._decode(completion.tokens),
                "answer": self._decode(prompt.answer) if prompt.answer else None,
                "ended": completion.ended,
                "tokens": len(completion.tokens),
            }
            answers.append(answer)
        self.emit(Samples(step=step, when=when, samples=answers, seconds=time.time() - began))

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
