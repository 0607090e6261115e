"""The stream of a run that trains on what it samples: prompts → completions → rewards → advantages → optimizer steps' batches.

Every rank knows the whole of a rollout (it is small), so advantages are those of the global rollout, and what is dealt to whom changes
nothing. A rollout depends on the weights, on (seed, step, place of the prompt) and on `state` alone: a resumed run makes it again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from drumline.algorithms.policy import KLController, differs, divergence
from drumline.core.heartbeat import beat
from drumline.core.plan import Plan
from drumline.core.rollouts import RolloutSpec
from drumline.data.batches import Episodes
from drumline.data.cache import TokenCache
from drumline.data.encode import OWN
from drumline.data.stream import GlobalBatch
from drumline.dist.reduce import from_all
from drumline.dist.seeds import derive
from drumline.errors import TrainingStopped
from drumline.rl.curriculum import Curriculum
from drumline.rl.generate import Completion, Request, Together, place
from drumline.rl.reading import Readers, Reading
from drumline.rl.rewards import Item, Rewards, count_reasons
from drumline.rl.sampler_check import SamplerCheck
from drumline.telemetry.events import Emit, Rollout
from drumline.telemetry.watched import Completions

MOST_REASONS = 3  # of failed rewards, in the line that stops a run
SHOWN, MOST_TEXT = 8, 4000  # episodes of a rollout in an event, and characters of each


@dataclass(frozen=True)
class Sample:
    """An answer to a prompt, and what it is worth: NaN if a reward failed or none applies."""

    prompt: int  # its number in the cache
    episode: tuple[list[int], Completion]  # tokens of the prompt, and the completion
    domain: str
    reward: float
    applies: bool = True  # whether any reward applies to it

    @property
    def is_failed(self) -> bool:
        return self.applies and math.isnan(self.reward)


@dataclass(frozen=True)
class Sampled:
    """Groups of samples, prompt by prompt."""

    samples: list[Sample]
    # Mean of each reward's values in the last draw, NaN where there was none.
    parts: dict[str, float]
    failures: dict[str, Counter[str]]  # in the last draw: reward → reason → episodes
    sampler_gap: float | None = None  # of the sampler that drew the last of them, see SamplerCheck

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples]

    @property
    def left_out(self) -> int:
        """The number of samples to which no reward applies."""
        return sum(not sample.applies for sample in self.samples)

    @property
    def failed_share(self) -> float:
        """The share of failed samples among those that a reward applies to; 1 if none applies."""
        applies = len(self.samples) - self.left_out
        if applies == 0:
            return 1.0
        return sum(sample.is_failed for sample in self.samples) / applies

    def differ(self, size: int) -> list[bool]:
        """Of each group of `size` whether it has something to learn from."""
        return differs(torch.tensor(self.rewards, dtype=torch.float32).reshape(-1, size)).tolist()


class Drawn:
    """The prompts of a rollout, and their completions, when these are asked for. `sampler_gap`: of the sampler of those that are sampled
    ahead, as it was when they were begun."""

    def __init__(
        self,
        ids: list[int],
        complete: Callable[[], list[Completion]],
        sampler_gap: float | None = None,
    ) -> None:
        self.ids, self._complete, self.sampler_gap = ids, complete, sampler_gap

    @cached_property
    def completions(self) -> list[Completion]:
        """Collective at the first time."""
        return self._complete()

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        completions = [[c.tokens, c.log_probs, c.ended] for c in self.completions]
        return {"ids": self.ids, "completions": completions, "sampler_gap": self.sampler_gap}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Drawn:
        return cls(
            state["ids"],
            lambda: [Completion(*each) for each in state["completions"]],
            state.get("sampler_gap"),
        )


@dataclass
class Rollouts:
    """One rank's view of all rollouts of a run. All methods are collective."""

    plan: Plan
    algorithm: RolloutSpec
    prompts: TokenCache
    held_out: Mapping[str, TokenCache]  # by name of the evaluation set
    curriculum: Curriculum
    kl: KLController
    # (requests, step, greedy), collective.
    sample: Callable[[list[Request], int, bool], list[Completion]]
    # (requests, step), collective: the same while training goes on.
    begin: Callable[[list[Request], int], Together]
    check: SamplerCheck  # which `sample` and `begin` make of the sampler
    rewards: Rewards
    reading: Reading
    readers: Readers
    decode: Callable[[list[int]], str]
    emit: Emit

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of the rollout so far, by what they were spent on
        self.failed = 0  # rollouts in a row, by `reward_failure`
        self.has_rewards = False  # whether any episode of the run had a reward
        self._trained: Callable[[], None] | None = None

    def stream(self, step: int, position: int, state: Mapping[str, Any]) -> Iterator[GlobalBatch]:
        """Batches of the steps after `step`, to the end of the run. `position`: prompts drawn so far; `state`: a checkpointable batch's."""
        if state:
            self.curriculum.load(state["curriculum"])
            self.has_rewards = state.get("has_rewards", True)  # older checkpoints do not say
            if (
                self.kl.target is not None and self.kl.coefficient and state["kl"]
            ):  # what is fixed is the config's
                self.kl.coefficient = state["kl"]
        assert self.plan.steps is not None
        drawn = Drawn.load(state["ahead"]) if state.get("ahead") else None
        while step < self.plan.steps:
            self.seconds = {}
            begins, following = position, step + self.algorithm.steps_in_turn
            sampled, position = self._sample_groups(step, position, drawn)
            self._check_rewards(step, sampled, position - begins)
            drawn = None
            if self.algorithm.lookahead and following < self.plan.steps:
                with self._spend("generate"):
                    drawn = self._draw(
                        self._wanted // self.algorithm.group_size, following, position
                    )
            with self._spend("infer"):
                episodes, metrics = self._learnable(sampled)
            began = time.time()
            self._trained = partial(
                self._report_trained, began, following, sampled, position - begins, metrics
            )
            yield from self._batches(episodes, sampled, step, position, drawn)
            self.report()
            step = following

    def report(self) -> None:
        """Report the rollout whose last step is done, once: here, or where the loop leaves. Collective."""
        trained, self._trained = self._trained, None
        if trained is not None:
            trained()

    def _report_trained(
        self, began: float, step: int, sampled: Sampled, drawn: int, metrics: dict[str, float]
    ) -> None:
        self.seconds["train"] = time.time() - began
        self._report(step, sampled, drawn, metrics)

    @property
    def _wanted(self) -> int:
        """Episodes of a rollout: whole groups, the rules refuse others."""
        return self.algorithm.minibatches * self.plan.batch.global_samples

    def _draw(self, prompts: int, step: int, position: int) -> Drawn:
        """Prompts after `position`; their completions are those of the weights as they are now where rollouts go ahead."""
        size = self.algorithm.group_size
        ids = self.curriculum.draw(prompts)
        keys = [(position + place, index) for place in range(len(ids)) for index in range(size)]
        repeated = np.repeat(ids, size).tolist()
        requests = self._requests(self.prompts, repeated, keys)
        if self.algorithm.lookahead:
            begun = self.begin(requests, step)
            return Drawn(repeated, lambda: begun.result, self.check.gap)
        return Drawn(repeated, partial(self.sample, requests, step, False))

    def _batches(
        self, episodes: Episodes, sampled: Sampled, step: int, position: int, ahead: Drawn | None
    ) -> Iterator[GlobalBatch]:
        """The optimizer steps of a rollout: passes over all its episodes, shuffled anew. `ahead`: the next rollout."""
        algorithm, batch = self.algorithm, self.plan.batch
        size = batch.global_samples
        ids = np.asarray([sample.prompt for sample in sampled.samples], np.int64)
        state = {
            "curriculum": self.curriculum.state(),
            "kl": self.kl.coefficient,
            "has_rewards": self.has_rewards,
            "sampler": self.check.state(),
        }
        if ahead is not None:
            state["ahead"] = ahead.state
        for epoch in range(algorithm.epochs):
            order = np.random.default_rng(
                derive(self.plan.config.run.seed, "episodes", step, epoch)
            ).permutation(len(episodes))
            for number in range(algorithm.minibatches):
                picks = order[number * size : (number + 1) * size]
                micro_batches, tokens = self.reading.micro_batches(
                    episodes, picks.tolist(), batch.accumulation, batch.micro_batch
                )
                last = epoch == algorithm.epochs - 1 and number == algorithm.minibatches - 1
                of_all = (
                    float(episodes.weight_N[picks].double().sum()),
                    int(episodes.lengths[picks].sum()),
                )
                yield GlobalBatch(
                    list(micro_batches),
                    ids[picks],
                    position,
                    tokens,
                    checkpointable=last,
                    state=state,
                    of_all=of_all,
                )

    def _check_rewards(self, step: int, sampled: Sampled, drawn: int) -> None:
        """Raise TrainingStopped if the run learns nothing because of its rewards.

        That is after too many rollouts in a row in which rewards failed, or applied to no episode,
        and at the last rollout of a run without any reward. All ranks know the same rewards.
        """
        limit = self.algorithm.reward_failure
        failed_share = sampled.failed_share
        has_reward = not all(math.isnan(reward) for reward in sampled.rewards)
        self.has_rewards = self.has_rewards or has_reward
        if failed_share >= limit.share:
            self.failed += 1
        else:
            self.failed = 0
        is_last = step + self.algorithm.steps_in_turn >= (self.plan.steps or 0)
        has_learned_nothing = is_last and not self.has_rewards
        has_failed_too_often = self.failed >= limit.rollouts and limit.action == "stop"
        if not has_learned_nothing and not has_failed_too_often:
            return
        self._report(step + self.algorithm.steps_in_turn, sampled, drawn, {}, trained=False)
        reasons: Counter[str] = Counter()
        for name, found in sampled.failures.items():
            for why, count in found.items():
                reasons[f"{name} {why}"] += count
        if sampled.left_out:
            reasons["no reward applies"] = sampled.left_out
        often = "; ".join(f"{why} ({count}×)" for why, count in reasons.most_common(MOST_REASONS))
        if has_learned_nothing:
            what = f"no episode of this run got a reward, so nothing was learned: {often}"
            fix = "correct the rewards, so that one applies to each row"
        else:
            counted = "episodes"
            if 0 < sampled.left_out < len(sampled.samples):
                counted = "episodes that a reward applies to"
            what = f"{failed_share:.0%} of the {counted} got no reward, in rollout {self.failed} of such in a row: {often}"
            fix = "correct the reward, or go on without them: algorithm.reward_failure.action=continue"
        raise TrainingStopped(what, where="algorithm.rewards", fix=fix)

    def _sample_groups(self, step: int, position: int, drawn: Drawn | None) -> tuple[Sampled, int]:
        """The groups of a rollout, and the position after them. `drawn`: it is under way. With dynamic sampling, groups whose rewards are
        alike are replaced, as long as it may roll out again."""
        algorithm, size, wanted = self.algorithm, self.algorithm.group_size, self._wanted
        kept, spare = list[Sample](), list[Sample]()
        for _ in range(algorithm.rounds):
            with self._spend("generate"):
                drawn = drawn or self._draw((wanted - len(kept)) // size, step, position)
                ids, completions = drawn.ids, drawn.completions
                sampler_gap = self.check.gap if drawn.sampler_gap is None else drawn.sampler_gap
            with self._spend("reward"):
                fresh = self._score(self.prompts, ids, completions)
            by_domain: dict[str, list[float]] = {}
            for sample in fresh.samples:
                by_domain.setdefault(sample.domain, []).extend(
                    [] if math.isnan(sample.reward) else [sample.reward]
                )
            self.curriculum.learn(by_domain)
            position, drawn = position + len(ids) // size, None
            for group, different in enumerate(fresh.differ(size)):
                (kept if different or algorithm.rounds == 1 else spare).extend(
                    fresh.samples[group * size : (group + 1) * size]
                )
            if len(kept) == wanted:
                break
        return replace(fresh, samples=[*kept, *spare][:wanted], sampler_gap=sampler_gap), position

    def _requests(
        self, cache: TokenCache, ids: list[int], keys: list[tuple[int, int]]
    ) -> list[Request]:
        return [
            Request(cache.segments(prompt)[0][0].tolist(), key)
            for prompt, key in zip(ids, keys, strict=True)
        ]

    def _score(self, cache: TokenCache, ids: list[int], completions: list[Completion]) -> Sampled:
        episodes = [
            (cache.segments(prompt)[0][0].tolist(), each)
            for prompt, each in zip(ids, completions, strict=True)
        ]
        metas = [cache.meta(prompt) for prompt in ids]
        columns = [{**meta, **meta.get(OWN, {})} for meta in metas]
        items = [
            Item(meta["prompt"], self.decode(c.tokens), len(c.tokens), of_row)
            for meta, of_row, (_, c) in zip(metas, columns, episodes, strict=True)
        ]
        batch = _episodes(episodes)
        given = {name: read(batch).tolist() for name, read in self.readers.rewards.items()}
        rank, ranks = place()  # each episode is scored once in the world
        shares = from_all(
            self.rewards.score(
                items[rank::ranks], {name: values[rank::ranks] for name, values in given.items()}
            )
        )
        scored = [shares[index % ranks][index // ranks] for index in range(len(items))]
        penalty = self.algorithm.missing_stop_penalty
        samples = []
        for prompt, episode, meta, one in zip(ids, episodes, metas, scored, strict=True):
            reward = math.nan
            if one.applies and not one.failures:
                reward = one.value - (0.0 if episode[1].ended else penalty)
            samples.append(Sample(prompt, episode, meta["domain"], reward, one.applies))
        parts = {name: _mean([one.parts[name] for one in scored]) for name in self.rewards.names}
        reasons = {}
        for name in self.rewards.names:
            reasons[name] = count_reasons(
                one.failures[name] for one in scored if name in one.failures
            )
        return Sampled(samples, parts, {name: found for name, found in reasons.items() if found})

    def _learnable(self, sampled: Sampled) -> tuple[Episodes, dict[str, float]]:
        """Episodes with all that the objective needs, and metrics."""
        episodes, metrics = _episodes([sample.episode for sample in sampled.samples]), {}
        if self.readers.policy is not None:
            policy = self.readers.policy(episodes)
            episodes = replace(
                episodes,
                log_probs_NM=policy[0],
                values_NM=policy[1] if len(policy) > 1 else episodes.values_NM,
            )
        if self.readers.value is not None:
            episodes = replace(episodes, values_NM=self.readers.value(episodes)[0])
        kl_NM = torch.zeros_like(episodes.log_probs_NM)
        if self.readers.reference is not None:
            episodes = replace(episodes, reference_log_probs_NM=self.readers.reference(episodes)[0])
            kl_NM = (
                divergence(
                    episodes.log_probs_NM,
                    episodes.reference_log_probs_NM,
                    self.algorithm.kl.estimator,
                )
                * episodes.mask_NM
            )
            metrics = {
                "kl": float(kl_NM.sum() / episodes.mask_NM.sum().clamp(min=1)),
                "kl_coefficient": self.kl.coefficient,
            }
        rewards_N = torch.tensor(sampled.rewards, dtype=torch.float32)
        episodes = self.algorithm.credited(episodes, rewards_N, kl_NM * self.kl.coefficient)
        if metrics:
            self.kl.update(metrics["kl"], len(episodes))
        return episodes, metrics

    def evaluate(self, step: int) -> tuple[dict[str, float], int, dict[str, Counter[str]]]:
        """Greedy completions of all held-out prompts: mean reward, of each domain and evaluation set too; how many prompts; and as of
        Sampled the failures of rewards, over which no mean goes."""
        samples, by_set, failures = list[Sample](), dict[str, float](), dict[str, Counter[str]]()
        for name, cache in self.held_out.items():
            ids = list(range(len(cache)))
            completions = self.sample(
                self._requests(cache, ids, [(prompt, 0) for prompt in ids]), step, True
            )
            sampled = self._score(cache, ids, completions)
            samples += sampled.samples
            by_set |= (
                {f"{name}/{key}": value for key, value in _answered(sampled.samples).items()}
                if name
                else {}
            )
            for reward, reasons in sampled.failures.items():
                failures.setdefault(reward, Counter()).update(reasons)
        return (_answered(samples) | by_set if samples else {}), len(samples), failures

    def close(self) -> None:
        """End the processes that compute rewards."""
        self.rewards.close()

    @contextmanager
    def _spend(self, kind: str) -> Iterator[None]:
        began = time.time()
        beat("rollout")
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.time() - began

    def _report(
        self,
        step: int,
        sampled: Sampled,
        drawn: int,
        metrics: dict[str, float],
        trained: bool = True,
    ) -> None:
        """Emit what a rollout was. `trained`: whether steps learned from it."""
        known = [reward for reward in sampled.rewards if not math.isnan(reward)]
        drawn_of = Counter(sample.domain for sample in sampled.samples)
        differ = sampled.differ(self.algorithm.group_size)
        reward_std: float | None = None
        groups_differ: float | None = None
        if known:
            reward_std = statistics.pstdev(known)
            groups_differ = sum(differ) / len(differ)
        made = Rollout(
            step=step,
            prompts=len(differ),
            drawn=drawn,
            episodes=len(sampled.samples),
            reward=_mean(known),
            reward_std=reward_std,
            groups_differ=groups_differ,
            left_out=sampled.left_out,
            rewards=sampled.parts,
            shares={
                domain: count / len(sampled.samples) for domain, count in sorted(drawn_of.items())
            },
            failures=sampled.failures,
            sampler_gap=sampled.sampler_gap,
            trained=trained,
            **_lengths(sampled.samples),
            **{
                f"{kind}_s": self.seconds.get(kind, 0.0)
                for kind in ("generate", "reward", "infer", "train")
            },
            metrics=_means(sampled.samples) | metrics,
        )
        self.emit(made)
        shown = [self._shown(sample) for sample in sampled.samples[:SHOWN]]
        self.emit(Completions(step=step, completions=shown, trained=trained))

    def _shown(self, sample: Sample) -> dict[str, Any]:
        completion = sample.episode[1]
        return {
            "prompt": self.prompts.meta(sample.prompt)["prompt"],
            "text": self.decode(completion.tokens)[:MOST_TEXT],
            "reward": sample.reward,
            "domain": sample.domain,
            "ended": completion.ended,
            "tokens": len(completion.tokens),
        }


def _episodes(made: list[tuple[list[int], Completion]]) -> Episodes:
    prompts, completions = (
        [np.asarray(p, np.int64) for p, _ in made],
        [np.asarray(c.tokens, np.int64) for _, c in made],
    )
    episodes = Episodes.start(prompts, completions, [completion.ended for _, completion in made])
    sampler_NM = torch.zeros_like(episodes.log_probs_NM)
    for row, (_, completion) in enumerate(made):
        sampler_NM[row, : len(completion.tokens)] = torch.tensor(completion.log_probs)
    return replace(episodes, sampler_log_probs_NM=sampler_NM)


def _mean(values: list[float]) -> float:
    """The mean of the values that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _answered(samples: list[Sample]) -> dict[str, float]:
    """Return the mean `reward` of the answers that have one, and the shares of the others.

    `reward_failed`: answers whose reward failed. `reward_left_out`: those to which none applies;
    not there if every answer has one that does.
    """
    metrics = {"reward": _mean([sample.reward for sample in samples]), **_means(samples)}
    metrics["reward_failed"] = sum(sample.is_failed for sample in samples) / len(samples)
    left_out = sum(not sample.applies for sample in samples)
    if left_out:
        metrics["reward_left_out"] = left_out / len(samples)
    return metrics | _lengths(samples)


def _means(samples: list[Sample]) -> dict[str, float]:
    """reward/DOMAIN → mean reward."""
    domains = sorted({sample.domain for sample in samples})
    return {
        f"reward/{domain}": _mean([s.reward for s in samples if s.domain == domain])
        for domain in domains
    }


def _lengths(samples: list[Sample]) -> dict[str, float]:
    completions = [sample.episode[1] for sample in samples]
    sizes = [len(completion.tokens) for completion in completions]
    return {
        "length": sum(sizes) / len(sizes),
        "length_max": float(max(sizes)),
        "ended": sum(completion.ended for completion in completions) / len(sizes),
    }
