"""`drumline eval --generate`: what a model answers to held-out prompts when it is left to itself, on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from drumline.core.data import PROMPT_FORMS, TasksSource
from drumline.core.plan import Plan
from drumline.core.rollouts import HFGenerator as HFConfig
from drumline.core.rollouts import TaskReward
from drumline.data.cache import TokenCache
from drumline.data.sources import read_rows
from drumline.data.templates import Encoder
from drumline.errors import DataError, UserError
from drumline.inference.evaluate import planned, show, write
from drumline.inference.open import LoadedModel, open_plan
from drumline.rl.generate import HFGenerator
from drumline.rl.rewards import Item, Rewards
from drumline.rl.sampling import Request

TOGETHER = 16  # sequences generated side by side
SHOWN = 20  # answers that eval.json keeps


@dataclass(frozen=True)
class Question:
    """A prompt as tokens, and what would be right; `meta`: what the verifier of a task needs."""

    tokens: list[int]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


def answers(config_path: Path, overrides: list[str], place: Path | None, number: int) -> int:
    """Answer `number` held-out prompts greedily; report how many answers are the row's word for word, and, where the prompts are tasks of
    reasoning-gym, what their verifiers give. Writes RUN/eval.json."""
    plan, weights, run_dir = planned(config_path, overrides, place)
    if not plan.config.algorithm.has_answers:
        fix = "leave it out: held-out prompts of ppo and grpo are answered anyway"
        raise UserError(f"it is for algorithm sft, and this is {plan.config.algorithm.kind}", where="--generate", fix=fix)
    began = time.time()
    loaded, base_dir = open_plan(plan, weights.checkpoint), Path(plan.base_dir)
    questions = list(islice(_questions(plan, loaded, base_dir), number))
    if not questions:
        raise DataError("no held-out row has a prompt before its answer", where="data.eval", fix="leave --generate out")
    answers, metrics = _answer(plan, loaded, questions)
    if all(question.meta for question in questions):
        items = [Item("", text, 0, question.meta) for text, question in zip(answers, questions, strict=True)]
        with Rewards([TaskReward()], base_dir) as rewards:
            scored = rewards.score(items)
        metrics["verified"] = sum(s.value for s in scored) / len(scored)
    show(f"{weights.origin} on {len(questions)} held-out prompts, answered greedily", metrics)
    shown = [{"answer": text, "right": question.answer} for text, question in zip(answers, questions, strict=True)][:SHOWN]
    write(run_dir, "generated", {"weights": weights.origin, "seconds": time.time() - began, "metrics": metrics, "answers": shown})
    return 0


def _questions(plan: Plan, loaded: LoadedModel, base_dir: Path) -> Iterator[Question]:
    """Tasks with what their verifiers need, where all of data.eval is tasks; else the last answer of each held-out row."""
    config, data = plan.config, plan.data
    assert data is not None and data.eval_cache is not None, "`planned` requires a held-out set"
    if config.data.eval and all(isinstance(source, TasksSource) for source in config.data.eval):
        encoder = Encoder(loaded.tokenizer, everything=False, data=config.data)
        for source in config.data.eval:
            for row in read_rows(source, base_dir, PROMPT_FORMS):
                yield Question(encoder.prompt(row)[1], str(row.extra["answer"]), row.extra)
        return
    cache = TokenCache.open(data.eval_cache)
    for sample in range(len(cache)):
        for tokens, learn in cache.segments(sample):
            stop = int(np.flatnonzero(learn)[-1]) + 1 if learn.any() else 0
            silent = np.flatnonzero(learn[:stop] == 0)
            start = int(silent[-1]) + 1 if len(silent) else 0
            if start:
                answer = loaded.tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=True)
                yield Question(tokens[:start].tolist(), answer)


def _answer(plan: Plan, loaded: LoadedModel, questions: list[Question]) -> tuple[list[str], dict[str, Any]]:
    """Answers in order, each at most as long as data.max_length leaves room for."""
    room = max(1, plan.config.data.max_length - max(len(question.tokens) for question in questions))
    config = HFConfig(top_k=1, max_new_tokens=room, batch=TOGETHER)
    requests = [Request(question.tokens, (number,)) for number, question in enumerate(questions)]
    done = HFGenerator(config, loaded.model, loaded.tokenizer, plan.config.run.seed).generate(requests, 0)
    answers = [loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True) for completion in done]
    right = sum(text.strip() == question.answer.strip() for text, question in zip(answers, questions, strict=True))
    metrics: dict[str, Any] = {
        "exact": right / len(questions),
        "ended": sum(completion.ended for completion in done) / len(done),
        "tokens": sum(len(completion.tokens) for completion in done) / len(done),
    }
    return answers, metrics
