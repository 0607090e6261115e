"""What the weights of a run write while it goes on: completions of rollouts and of held-out prompts, by the trained model itself where it
is unsharded on this rank, else by a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.core import rollouts as c
from drumline.core.plan import Plan
from drumline.core.run import MOST_NEW
from drumline.data.answers import last_answer
from drumline.data.cache import TokenCache
from drumline.dist.seeds import derive
from drumline.errors import DataError
from drumline.models import adapters
from drumline.models.build import lay_out
from drumline.models.containers import LOW_PRECISION
from drumline.models.load import load_config, load_grown
from drumline.models.scores import language_weights
from drumline.models.shards import Values
from drumline.models.tokenizer import load_tokenizer
from drumline.parallel.engine import Engine
from drumline.rl.build import generator, greedy
from drumline.rl.generate import Completion, Generator, Request, Together, generate_together
from drumline.rl.sampler_check import SamplerCheck
from drumline.telemetry.events import Emit
from drumline.telemetry.watched import Samples

LOOKED_AT = 10_000  # held-out samples, for prompts that leave room


@dataclass
class Sampling:
    """Completions by the weights as they are now."""

    plan: Plan
    config: c.Generator
    engine: Engine
    tokenizer: Any
    device: str
    ahead: bool = False  # what samples beside training has weights of its own
    check: SamplerCheck | None = None  # of what samples rollouts
    _generator: Generator | None = None
    _aside: Together | None = None
    _refresh: Callable[[Any], None] | None = None

    def __call__(self, requests: list[Request], step: int, greedily: bool) -> list[Completion]:
        """A completion of each request, in their order, the same on every rank. Collective."""
        made = self._fresh()
        return generate_together(greedy(made) if greedily else made, requests, step)

    def begin(self, requests: list[Request], step: int) -> Together:
        """The same in a thread, by the weights as they are now, while training goes on. Collective."""
        self._aside = Together(self._fresh(), requests, step, aside=True)
        return self._aside

    def model(self) -> Any:
        """The whole model on this rank, not one of vLLM. Put back what is changed on it. Collective."""
        return getattr(self._fresh(), "model")  # noqa: B009 - generators in process have one

    def _fresh(self) -> Generator:
        """What samples, with the weights as they are now. Raises TrainingStopped where they did not arrive."""
        if self._aside is not None:
            self._aside.wait()  # it samples by the weights that are to change
        unsharded = None if self.ahead else self.engine.unsharded_model()
        if self._generator is None:
            low, seed, folder = (
                LOW_PRECISION.get(self.plan.precision),
                self.plan.config.run.seed,
                Path(self.plan.run_dir),
            )
            made = generator(
                self.config,
                self.tokenizer,
                seed,
                unsharded,
                self._copy,
                low,
                self.plan.model_path,
                folder,
                self._grown_rows(),
            )
            self._generator, self._refresh = made
        if self._refresh is not None:
            self._refresh(language_weights(self.engine.whole_weights()))
            if self.check is not None:
                self.check.compare(self._generator)
        return self._generator

    def _grown_rows(self) -> int | None:
        """Return the rows of an embedding that is larger than in the model's files, or None."""
        growth = load_grown(self.plan.model_path, self.plan.config.model)[1]
        return growth.rows if growth is not None and growth.added else None

    def _copy(self) -> Any:
        """The whole model on this rank, in the type that it computes in."""
        config = self.plan.config
        seed, dtype = derive(config.run.seed, "weights"), LOW_PRECISION.get(self.plan.precision)
        model, source = lay_out(
            self.plan.model_path,
            config.model,
            seed,
            self.device,
            dtype,
            draw_device=self.plan.device,
        )
        if config.adapter.kind == "lora":
            adapters.inject(model, config.adapter, config.run.seed)
        Values(source, self.device, config.run.seed).fill(model)
        return model


def tokenizer_of(plan: Plan) -> Any:
    return load_tokenizer(plan.config.model.tokenizer or plan.model_path or "", plan.config.model)


@dataclass(frozen=True)
class Prompt:
    """A held-out row, cut before its answer."""

    set: str
    tokens: list[int]
    answer: list[int]


def prompts(plan: Plan) -> list[Prompt]:
    """The first `eval.samples` of each evaluation set that leave room for an answer. Raises DataError for a set that has none."""
    assert plan.data is not None, "the data is prepared"
    config = plan.config
    model = load_config(plan.model_path, config.model).get_text_config()
    room = getattr(model, "max_position_embeddings", None) or config.data.max_length + most_new(
        plan
    )
    found = []
    for name, folder in plan.data.eval_caches.items():
        fitting = (
            prompt
            for prompt in _cut(plan, TokenCache.open(folder), name)
            if len(prompt.tokens) + most_new(plan) <= room
        )
        chosen = [*islice(fitting, config.eval.samples)]
        if not chosen:
            what = (
                f"no prompt leaves room for {most_new(plan)} tokens in the model's {room} positions"
            )
            raise DataError(
                what,
                where=f"data.eval.{name}".rstrip("."),
                fix="lower eval.max_new_tokens, or take eval.samples out",
            )
        found += chosen
    return found


def most_new(plan: Plan) -> int:
    """Tokens of a sample at most."""
    rollout = plan.config.algorithm.rollout
    return (
        rollout.generator.max_new_tokens
        if rollout is not None
        else plan.config.eval.max_new_tokens or MOST_NEW
    )


def of_evaluation(plan: Plan, engine: Engine, tokenizer: Any, device: str) -> Sampling:
    """What samples where there are no rollouts."""
    return Sampling(plan, c.HFGenerator(max_new_tokens=most_new(plan)), engine, tokenizer, device)


def _cut(plan: Plan, cache: TokenCache, name: str) -> Iterator[Prompt]:
    """The rows of a cache in order. Of a pair its first side; prompts alone have no answer."""
    algorithm = plan.config.algorithm
    for sample in range(min(len(cache), LOOKED_AT)):
        segments = cache.segments(sample)
        for tokens, learn in segments[:1] if algorithm.rows_per_sample > 1 else segments:
            start, stop = (
                last_answer(learn) if algorithm.rollout is None else (len(tokens), len(tokens))
            )
            start = start or stop // 2  # all of it is learned: the second half is the answer
            if start:
                yield Prompt(name, tokens[:start].tolist(), tokens[start:stop].tolist())


@dataclass(frozen=True)
class Answers:
    """What the run writes on its prompts, into events."""

    # (requests, step, greedy), collective.
    sample: Callable[[list[Request], int, bool], list[Completion]]
    prompts: list[Prompt]
    tokenizer: Any
    emit: Emit

    def write(self, step: int, when: str) -> None:
        """Answer all prompts greedily. Collective."""
        began, decode = time.time(), partial(self.tokenizer.decode, skip_special_tokens=True)
        done = self.sample(
            [Request(prompt.tokens, (number,)) for number, prompt in enumerate(self.prompts)],
            step,
            True,
        )
        shown = [
            {
                "set": prompt.set,
                "prompt": decode(prompt.tokens),
                "text": decode(completion.tokens),
                "answer": decode(prompt.answer) if prompt.answer else None,
                "ended": completion.ended,
                "tokens": len(completion.tokens),
            }
            for prompt, completion in zip(self.prompts, done, strict=True)
        ]
        self.emit(Samples(step=step, when=when, samples=shown, seconds=time.time() - began))
