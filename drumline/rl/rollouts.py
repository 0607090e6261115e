"""Rollouts: a run samples completions of its prompts, and trains on them.

prompts → completions → rewards → advantages → batches of optimizer steps.

Every rank knows the whole rollout, which is small. So advantages are computed over the global
rollout, and it does not matter which rank trains on which episode. A rollout depends only on the
weights, on (seed, step, position of the prompt) and on the stream's state, so a resumed run samples
the same rollout again.
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

from drumline.algorithms.credit import have_different_rewards
from drumline.algorithms.policy import KLController, divergence
from drumline.config.algorithm import RolloutSpec
from drumline.data.batches import Episodes
from drumline.data.cache import TokenCache
from drumline.data.encode import OWN_COLUMNS
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import from_all
from drumline.dist.seeds import derive
from drumline.errors import TrainingStopped
from drumline.plan.plan import Plan
from drumline.rl.curriculum import Curriculum
from drumline.rl.generate import Completion, Request, SharedSampling, rank_and_world_size
from drumline.rl.reading import EpisodeReader, ModelReaders
from drumline.rl.rewards import Item, Rewards, Scored, count_reasons
from drumline.rl.sampler_check import SamplerCheck
from drumline.system.heartbeat import beat
from drumline.telemetry.events import Emit, Rollout
from drumline.telemetry.watched import Completions

# Reasons of failed rewards that the message of a stopped run names.
MOST_REASONS = 3
# Episodes of a rollout that its event shows, and characters of each completion.
MOST_SHOWN = 8
MOST_TEXT = 4000


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt with its reward, which is NaN if a reward failed or none applies."""

    # The prompt's number in the cache.
    prompt: int
    # The tokens of the prompt, and the completion.
    episode: tuple[list[int], Completion]
    domain: str
    reward: float
    # Whether any reward applies to this sample.
    applies: bool = True

    @property
    def completion(self) -> Completion:
        """What was sampled for the prompt."""
        return self.episode[1]

    @property
    def is_failed(self) -> bool:
        """Whether a reward applies and could not be computed."""
        return self.applies and math.isnan(self.reward)


@dataclass(frozen=True)
class SampleGroups:
    """The samples of a rollout. Those of one prompt are a group; the groups follow each other.

    Dynamic sampling draws prompts several times. `parts`, `failures` and `sampler_gap` are those of
    the last draw.
    """

    samples: list[Sample]
    # Reward → mean of its values; NaN for a reward that gave none.
    parts: dict[str, float]
    # Reward → reason of a failure → number of episodes.
    failures: dict[str, Counter[str]]
    # How far the sampler was from the policy; see SamplerCheck.
    sampler_gap: float | None = None

    @property
    def rewards(self) -> list[float]:
        """The reward of each sample; NaN if it failed or none applies."""
        return [sample.reward for sample in self.samples]

    @property
    def left_out(self) -> int:
        """The number of samples to which no reward applies."""
        return _count_left_out(self.samples)

    @property
    def failed_share(self) -> float:
        """The share of failed samples among those that a reward applies to; 1 if none applies."""
        applies = len(self.samples) - self.left_out
        if applies == 0:
            return 1.0
        failed = sum(sample.is_failed for sample in self.samples)
        return failed / applies

    def rewards_differ(self, size: int) -> list[bool]:
        """Return for each group of `size` whether its rewards differ; only such a group teaches."""
        rewards_PG = torch.tensor(self.rewards, dtype=torch.float32).reshape(-1, size)
        return have_different_rewards(rewards_PG).tolist()


class PendingRollout:
    """The prompts of a rollout whose completions may not be sampled yet."""

    def __init__(
        self,
        ids: list[int],
        complete: Callable[[], list[Completion]],
        sampler_gap: float | None = None,
    ) -> None:
        """Set the prompts, and how their completions are made.

        Args:
            ids: The prompts' numbers in the cache, each as often as it is completed.
            complete: Waits for the completions and returns them; called once, on the first access.
            sampler_gap: How far the sampler was from the policy when sampling ahead began; None if
                nothing is sampled ahead.
        """
        self.ids = ids
        self._complete = complete
        self.sampler_gap = sampler_gap

    @cached_property
    def completions(self) -> list[Completion]:
        """The completions, one for each of `ids`. The first access is collective."""
        return self._complete()

    def state(self) -> dict[str, Any]:
        """Return the prompts and completions as a checkpoint holds them.

        Waits for the completions.
        """
        completions = []
        for completion in self.completions:
            completions.append([completion.tokens, completion.log_probs, completion.ended])
        return {"ids": self.ids, "completions": completions, "sampler_gap": self.sampler_gap}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> PendingRollout:
        """Return what `state` was called on."""

        def complete() -> list[Completion]:
            return [Completion(*fields) for fields in state["completions"]]

        return cls(state["ids"], complete, state.get("sampler_gap"))


@dataclass
class Rollouts:
    """All rollouts of a run, as one rank sees them. All methods are collective."""

    plan: Plan
    algorithm: RolloutSpec
    prompts: TokenCache
    held_out: Mapping[str, TokenCache]  # name of the evaluation set → its prompts
    curriculum: Curriculum
    kl: KLController
    # Samples completions. Arguments: requests, step, whether greedily. Collective.
    sample: Callable[[list[Request], int, bool], list[Completion]]
    # Begins to sample completions while training goes on. Arguments: requests, step. Collective.
    sample_ahead: Callable[[list[Request], int], SharedSampling]
    # Compares the sampler with the policy when `sample` and `sample_ahead` give it new weights.
    sampler_check: SamplerCheck
    rewards: Rewards
    reading: EpisodeReader
    readers: ModelReaders
    decode: Callable[[list[int]], str]
    emit: Emit

    def __post_init__(self) -> None:
        # Seconds of the rollout so far, by what they were spent on.
        self.seconds: dict[str, float] = {}
        # How many rollouts in a row had too many failed rewards (`algorithm.reward_failure`).
        self.failures_in_a_row = 0
        # Whether any episode of the run has had a reward.
        self.has_rewards = False
        # The report of the rollout that is being trained on; `report` calls it after the last step.
        self._report_pending: Callable[[], None] | None = None

    def stream(self, step: int, position: int, state: Mapping[str, Any]) -> Iterator[GlobalBatch]:
        """Yield the batches of the steps after `step`, up to the last step of the run.

        Args:
            step: The last step that was done.
            position: Prompts drawn so far.
            state: `GlobalBatch.state` of the last batch before; empty for a new run.
        """
        assert self.plan.steps is not None
        self._load_state(state)
        drawn = None
        if state.get("ahead"):
            drawn = PendingRollout.load(state["ahead"])
        while step < self.plan.steps:
            self.seconds = {}
            first_position = position
            next_step = step + self.algorithm.steps_in_turn
            sampled, position = self._sample_groups(step, position, drawn)
            prompts_drawn = position - first_position
            self._check_rewards(step, sampled, prompts_drawn)
            drawn = None
            # The next rollout is sampled by the weights of now, while this one is trained on.
            if self.algorithm.lookahead and next_step < self.plan.steps:
                with self._add_seconds("generate"):
                    prompts = self._episodes_wanted // self.algorithm.group_size
                    drawn = self._draw(prompts, next_step, position)
            with self._add_seconds("infer"):
                episodes, metrics = self._make_episodes(sampled)
            self._report_pending = partial(
                self._report_trained, time.time(), next_step, sampled, prompts_drawn, metrics
            )
            yield from self._batches(episodes, sampled, step, position, drawn)
            self.report()
            step = next_step

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state of the stream. Nothing to do if it is empty."""
        if not state:
            return
        self.curriculum.load(state["curriculum"])
        # Older checkpoints lack this key.
        self.has_rewards = state.get("has_rewards", True)
        # A coefficient that is fixed comes from the config.
        is_steered = self.kl.target is not None and self.kl.coefficient
        if is_steered and state["kl"]:
            self.kl.coefficient = state["kl"]

    def report(self) -> None:
        """Report the rollout whose last step is done, if it has not been reported yet. Collective.

        The stream calls this before the next rollout, and the loop when it ends.
        """
        report = self._report_pending
        self._report_pending = None
        if report is not None:
            report()

    def _report_trained(
        self, began: float, step: int, sampled: SampleGroups, drawn: int, metrics: dict[str, float]
    ) -> None:
        """Report a rollout that optimizer steps learned from, from unix second `began` until now."""
        self.seconds["train"] = time.time() - began
        self._report(step, sampled, drawn, metrics)

    @property
    def _episodes_wanted(self) -> int:
        """The number of episodes of a rollout: a multiple of the group's size, by a rule."""
        return self.algorithm.minibatches * self.plan.batch.global_samples

    def _draw(self, prompts: int, step: int, position: int) -> PendingRollout:
        """Draw prompts and have a group of completions sampled for each.

        With lookahead, sampling begins now with the present weights. Otherwise it happens when the
        completions are first read.

        Args:
            prompts: How many are drawn.
            step: After which the rollout is trained on; it fixes the random numbers.
            position: Prompts drawn before.
        """
        size = self.algorithm.group_size
        ids: list[int] = []
        keys: list[tuple[int, int]] = []
        for offset, prompt in enumerate(self.curriculum.draw(prompts)):
            for index in range(size):
                ids.append(prompt)
                # The key has the position, not the prompt: a prompt that comes again gets other
                # samples.
                keys.append((position + offset, index))
        requests = self._requests(self.prompts, ids, keys)
        if not self.algorithm.lookahead:
            return PendingRollout(ids, partial(self.sample, requests, step, False))
        sampling = self.sample_ahead(requests, step)

        def complete() -> list[Completion]:
            return sampling.result

        return PendingRollout(ids, complete, self.sampler_check.gap)

    def _batches(
        self,
        episodes: Episodes,
        sampled: SampleGroups,
        step: int,
        position: int,
        ahead: PendingRollout | None,
    ) -> Iterator[GlobalBatch]:
        """Yield the batches of a rollout's optimizer steps.

        They are `epochs` passes over all its episodes, each in a new random order.

        Args:
            episodes: With all that the objective reads.
            sampled: The same episodes, with their prompts.
            step: The last step before the rollout.
            position: Prompts drawn so far, this rollout included.
            ahead: The next rollout, if it is being sampled already; checkpoints hold it.
        """
        algorithm = self.algorithm
        batch = self.plan.batch
        size = batch.global_samples
        seed = self.plan.config.run.seed
        prompts_N = np.asarray([sample.prompt for sample in sampled.samples], np.int64)
        state = self._state(ahead)
        for epoch in range(algorithm.epochs):
            is_last_epoch = epoch == algorithm.epochs - 1
            generator = np.random.default_rng(derive(seed, "episodes", step, epoch))
            order_N = generator.permutation(len(episodes))
            for number in range(algorithm.minibatches):
                # A checkpoint does not hold the rollout, so none is saved before its last step.
                is_last_step = is_last_epoch and number == algorithm.minibatches - 1
                picks = order_N[number * size : (number + 1) * size]
                micro_batches, tokens = self.reading.micro_batches(
                    episodes, picks.tolist(), batch.accumulation, batch.micro_batch
                )
                # Over all ranks: each knows the whole rollout, so nothing is added up.
                weight = float(episodes.weight_N[picks].double().sum())
                global_tokens = int(episodes.lengths[picks].sum())
                yield GlobalBatch(
                    list(micro_batches),
                    prompts_N[picks],
                    position,
                    tokens,
                    checkpointable=is_last_step,
                    state=state,
                    totals=(weight, global_tokens),
                )

    def _state(self, ahead: PendingRollout | None) -> dict[str, Any]:
        """Return what a checkpoint needs to go on with the next rollout, besides the weights."""
        state = {
            "curriculum": self.curriculum.state(),
            "kl": self.kl.coefficient,
            "has_rewards": self.has_rewards,
            "sampler": self.sampler_check.state(),
        }
        if ahead is not None:
            # A function: a checkpoint that is written calls it, and waits for the completions.
            state["ahead"] = ahead.state
        return state

    def _check_rewards(self, step: int, sampled: SampleGroups, drawn: int) -> None:
        """Raise TrainingStopped if the run learns nothing because of its rewards.

        There are two cases: too many rollouts in a row in which rewards failed or applied to no
        episode, and a run whose last rollout is reached without any reward so far. All ranks know
        the same rewards, so all raise.

        Args:
            step: The last step before the rollout.
            sampled: The rollout.
            drawn: Prompts that were drawn for it.
        """
        limit = self.algorithm.reward_failure
        failed_share = sampled.failed_share
        has_reward = not all(math.isnan(reward) for reward in sampled.rewards)
        self.has_rewards = self.has_rewards or has_reward
        if failed_share >= limit.share:
            self.failures_in_a_row += 1
        else:
            self.failures_in_a_row = 0
        next_step = step + self.algorithm.steps_in_turn
        is_last = next_step >= (self.plan.steps or 0)
        has_learned_nothing = is_last and not self.has_rewards
        has_failed_too_often = self.failures_in_a_row >= limit.rollouts and limit.action == "stop"
        if not has_learned_nothing and not has_failed_too_often:
            return
        # The event shows the user the completions that got no reward.
        self._report(next_step, sampled, drawn, {}, trained=False)
        often = _most_common_reasons(sampled)
        if has_learned_nothing:
            what = f"no episode of this run got a reward, so nothing was learned: {often}"
            fix = "correct the rewards, so that one applies to each row"
        else:
            counted = "episodes"
            if 0 < sampled.left_out < len(sampled.samples):
                counted = "episodes that a reward applies to"
            what = f"{failed_share:.0%} of the {counted} got no reward, in rollout {self.failures_in_a_row} of such in a row: {often}"
            fix = "correct the reward, or go on without them: algorithm.reward_failure.action=continue"
        raise TrainingStopped(what, where="algorithm.rewards", fix=fix)

    def _sample_groups(
        self, step: int, position: int, drawn: PendingRollout | None
    ) -> tuple[SampleGroups, int]:
        """Return the groups of a rollout, and the position after their prompts.

        With dynamic sampling (Yu et al. 2025, DAPO), groups whose rewards are all alike are
        replaced, until enough differ or the allowed rounds are used up. Such a group teaches nothing.

        Args:
            step: The last step before the rollout.
            position: Prompts drawn so far.
            drawn: A rollout that is being sampled already.
        """
        size = self.algorithm.group_size
        wanted = self._episodes_wanted
        takes_all = self.algorithm.rounds == 1
        kept: list[Sample] = []
        spare: list[Sample] = []
        for _ in range(self.algorithm.rounds):
            with self._add_seconds("generate"):
                if drawn is None:
                    missing = wanted - len(kept)
                    drawn = self._draw(missing // size, step, position)
                ids = drawn.ids
                completions = drawn.completions
                sampler_gap = drawn.sampler_gap
                if sampler_gap is None:
                    sampler_gap = self.sampler_check.gap
            drawn = None
            with self._add_seconds("reward"):
                scored = self._score(self.prompts, ids, completions)
            self._learn_domains(scored.samples)
            position += len(ids) // size
            for group, rewards_differ in enumerate(scored.rewards_differ(size)):
                first = group * size
                samples = scored.samples[first : first + size]
                if rewards_differ or takes_all:
                    kept += samples
                else:
                    spare += samples
            if len(kept) == wanted:
                break
        # If the rounds were not enough, groups whose rewards are all alike fill the rollout.
        chosen = [*kept, *spare][:wanted]
        return replace(scored, samples=chosen, sampler_gap=sampler_gap), position

    def _learn_domains(self, samples: list[Sample]) -> None:
        """Tell the curriculum the rewards of each domain, without those that failed."""
        by_domain: dict[str, list[float]] = {}
        for sample in samples:
            if not math.isnan(sample.reward):
                by_domain.setdefault(sample.domain, []).append(sample.reward)
        self.curriculum.learn(by_domain)

    def _requests(
        self, cache: TokenCache, ids: list[int], keys: list[tuple[int, int]]
    ) -> list[Request]:
        """Return requests for the prompts `ids` of `cache`, each with its key for randomness."""
        requests = []
        for prompt, key in zip(ids, keys, strict=True):
            requests.append(Request(_prompt_tokens(cache, prompt), key))
        return requests

    def _score(
        self, cache: TokenCache, ids: list[int], completions: list[Completion]
    ) -> SampleGroups:
        """Return the completions of the prompts `ids` of `cache` with their rewards. Collective."""
        episodes = []
        metas = []
        for prompt, completion in zip(ids, completions, strict=True):
            episodes.append((_prompt_tokens(cache, prompt), completion))
            metas.append(cache.meta(prompt))
        scores = self._compute_rewards(episodes, metas)
        samples = []
        for prompt, episode, meta, score in zip(ids, episodes, metas, scores, strict=True):
            reward = math.nan
            if score.applies:
                reward = score.value
                _, completion = episode
                if not completion.ended:
                    reward -= self.algorithm.missing_stop_penalty
            samples.append(Sample(prompt, episode, meta["domain"], reward, score.applies))
        parts = {}
        failures = {}
        for name in self.rewards.names:
            parts[name] = _mean([score.parts[name] for score in scores])
            reasons = []
            for score in scores:
                if name in score.failures:
                    reasons.append(score.failures[name])
            if reasons:
                failures[name] = count_reasons(reasons)
        return SampleGroups(samples, parts, failures)

    def _compute_rewards(
        self, episodes: list[tuple[list[int], Completion]], metas: list[dict[str, Any]]
    ) -> list[Scored]:
        """Return what each episode is worth, the same on all ranks. Collective.

        Each episode is scored by one rank of the world: episode 0 by rank 0, 1 by rank 1, and so on
        in turn.

        Args:
            episodes: Tokens of the prompt, and the completion, of each.
            metas: The metadata of the prompt of each.
        """
        items = []
        for (_, completion), meta in zip(episodes, metas, strict=True):
            text = self.decode(completion.tokens)
            # The user's columns `prompt` and `domain` replace ours of the same names.
            columns = dict(meta)
            columns |= columns.pop(OWN_COLUMNS, {})
            items.append(Item(meta["prompt"], text, len(completion.tokens), columns))
        rank, ranks = rank_and_world_size()
        batch = _to_episodes(episodes)
        own_model_rewards = {}
        for name, read in self.readers.rewards.items():
            # All ranks run the model together, over all episodes.
            model_scores = read(batch).tolist()
            own_model_rewards[name] = model_scores[rank::ranks]
        own_scores = self.rewards.score(items[rank::ranks], own_model_rewards)
        scores_of_ranks = from_all(own_scores)
        scores = []
        for index in range(len(items)):
            scores_of_rank = scores_of_ranks[index % ranks]
            scores.append(scores_of_rank[index // ranks])
        return scores

    def _make_episodes(self, sampled: SampleGroups) -> tuple[Episodes, dict[str, float]]:
        """Return the samples as episodes with all that the objective reads, and some metrics.

        The metrics are the divergence from the reference model and its coefficient. Without a
        reference the divergence counts as 0, and there are no metrics.
        """
        pairs = [sample.episode for sample in sampled.samples]
        episodes = self._with_model_outputs(_to_episodes(pairs))
        metrics = {}
        kl_NM = torch.zeros_like(episodes.log_probs_NM)
        if self.readers.reference is not None:
            kl_NM = divergence(
                episodes.log_probs_NM,
                episodes.reference_log_probs_NM,
                self.algorithm.kl.estimator,
            )
            kl_NM = kl_NM * episodes.mask_NM
            tokens = episodes.mask_NM.sum().clamp(min=1)
            metrics = {
                "kl": float(kl_NM.sum() / tokens),
                "kl_coefficient": self.kl.coefficient,
            }
        rewards_N = torch.tensor(sampled.rewards, dtype=torch.float32)
        penalty_NM = kl_NM * self.kl.coefficient
        episodes = self.algorithm.credited(episodes, rewards_N, penalty_NM)
        # Only now: this rollout is penalised by the coefficient that its event reports.
        if metrics:
            self.kl.update(metrics["kl"], len(episodes))
        return episodes, metrics

    def _with_model_outputs(self, episodes: Episodes) -> Episodes:
        """Return the episodes with log-probs and values of the models that the objective reads."""
        readers = self.readers
        if readers.policy is not None:
            outputs = readers.policy(episodes)
            episodes = replace(episodes, log_probs_NM=outputs[0])
            if len(outputs) > 1:
                episodes = replace(episodes, values_NM=outputs[1])
        if readers.value is not None:
            episodes = replace(episodes, values_NM=readers.value(episodes)[0])
        if readers.reference is not None:
            reference_NM = readers.reference(episodes)[0]
            episodes = replace(episodes, reference_log_probs_NM=reference_NM)
        return episodes

    def evaluate(self, step: int) -> tuple[dict[str, float], int, dict[str, Counter[str]]]:
        """Complete all held-out prompts greedily and score the completions.

        Returns the metrics (the mean reward, also of each domain and each evaluation set), the number
        of prompts, and the failures of rewards as `SampleGroups` has them; no mean counts a failed one.
        """
        samples: list[Sample] = []
        by_set: dict[str, float] = {}
        failures: dict[str, Counter[str]] = {}
        for name, cache in self.held_out.items():
            ids = list(range(len(cache)))
            keys = [(prompt, 0) for prompt in ids]
            requests = self._requests(cache, ids, keys)
            completions = self.sample(requests, step, True)
            sampled = self._score(cache, ids, completions)
            samples += sampled.samples
            # The only evaluation set has no name.
            if name:
                for key, value in _answer_metrics(sampled.samples).items():
                    by_set[f"{name}/{key}"] = value
            for reward, reasons in sampled.failures.items():
                failures.setdefault(reward, Counter()).update(reasons)
        metrics = {}
        if samples:
            metrics = _answer_metrics(samples) | by_set
        return metrics, len(samples), failures

    def close(self) -> None:
        """End the processes that compute rewards."""
        self.rewards.close()

    @contextmanager
    def _add_seconds(self, kind: str) -> Iterator[None]:
        """Add the seconds that the `with` block takes to those spent on `kind`."""
        began = time.time()
        beat("rollout")
        yield
        earlier = self.seconds.get(kind, 0.0)
        self.seconds[kind] = earlier + time.time() - began

    def _report(
        self,
        step: int,
        sampled: SampleGroups,
        drawn: int,
        metrics: dict[str, float],
        trained: bool = True,
    ) -> None:
        """Emit the events of a rollout.

        Args:
            step: The last step that is trained on the rollout.
            sampled: The rollout.
            drawn: Prompts that were drawn for it.
            metrics: Of the divergence.
            trained: Whether optimizer steps learned from it.
        """
        samples = sampled.samples
        known = [reward for reward in sampled.rewards if not math.isnan(reward)]
        differ = sampled.rewards_differ(self.algorithm.group_size)
        reward_std: float | None = None
        groups_differ: float | None = None
        if known:
            reward_std = statistics.pstdev(known)
            groups_differ = sum(differ) / len(differ)
        counts = Counter(sample.domain for sample in samples)
        shares = {}
        for domain, count in sorted(counts.items()):
            shares[domain] = count / len(samples)
        rollout = Rollout(
            step=step,
            prompts=len(differ),
            drawn=drawn,
            episodes=len(samples),
            reward=_mean(known),
            reward_std=reward_std,
            groups_differ=groups_differ,
            left_out=sampled.left_out,
            rewards=sampled.parts,
            shares=shares,
            failures=sampled.failures,
            sampler_gap=sampled.sampler_gap,
            trained=trained,
            **_length_metrics(samples),
            generate_s=self.seconds.get("generate", 0.0),
            reward_s=self.seconds.get("reward", 0.0),
            infer_s=self.seconds.get("infer", 0.0),
            train_s=self.seconds.get("train", 0.0),
            metrics=_domain_rewards(samples) | metrics,
        )
        self.emit(rollout)
        shown = [self._describe_sample(sample) for sample in samples[:MOST_SHOWN]]
        self.emit(Completions(step=step, completions=shown, trained=trained))

    def _describe_sample(self, sample: Sample) -> dict[str, Any]:
        """Return a sample as the event of completions shows it."""
        completion = sample.completion
        return {
            "prompt": self.prompts.meta(sample.prompt)["prompt"],
            "text": self.decode(completion.tokens)[:MOST_TEXT],
            "reward": sample.reward,
            "domain": sample.domain,
            "ended": completion.ended,
            "tokens": len(completion.tokens),
        }


def _prompt_tokens(cache: TokenCache, prompt: int) -> list[int]:
    """Return the token ids of a prompt of the cache."""
    tokens, _ = cache.segments(prompt)[0]
    return tokens.tolist()


def _to_episodes(pairs: list[tuple[list[int], Completion]]) -> Episodes:
    """Return (tokens of the prompt, completion) pairs as `Episodes` with the sampler's log-probs."""
    prompts = []
    completions = []
    have_ended = []
    for prompt, completion in pairs:
        prompts.append(np.asarray(prompt, np.int64))
        completions.append(np.asarray(completion.tokens, np.int64))
        have_ended.append(completion.ended)
    episodes = Episodes.start(prompts, completions, have_ended)
    sampler_NM = torch.zeros_like(episodes.log_probs_NM)
    for row, (_, completion) in enumerate(pairs):
        sampler_NM[row, : len(completion.tokens)] = torch.tensor(completion.log_probs)
    return replace(episodes, sampler_log_probs_NM=sampler_NM)


def _most_common_reasons(sampled: SampleGroups) -> str:
    """Return the most frequent reasons for which samples have no reward, each with its number."""
    reasons: Counter[str] = Counter()
    for name, found in sampled.failures.items():
        for why, count in found.items():
            reasons[f"{name} {why}"] += count
    if sampled.left_out:
        reasons["no reward applies"] = sampled.left_out
    parts = [f"{why} ({count}×)" for why, count in reasons.most_common(MOST_REASONS)]
    return "; ".join(parts)


def _mean(values: list[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return sum(known) / len(known)


def _count_left_out(samples: list[Sample]) -> int:
    """Return the number of samples to which no reward applies."""
    return sum(not sample.applies for sample in samples)


def _answer_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the metrics of evaluated completions.

    - `reward`: mean over those that have one, also of each domain (`_domain_rewards`).
    - `reward_failed`: share of those whose reward failed.
    - `reward_left_out`: share of those to which no reward applies; absent if there are none.
    - The lengths of `_length_metrics`.
    """
    rewards = [sample.reward for sample in samples]
    failed = sum(sample.is_failed for sample in samples)
    metrics = {"reward": _mean(rewards), **_domain_rewards(samples)}
    metrics["reward_failed"] = failed / len(samples)
    left_out = _count_left_out(samples)
    if left_out:
        metrics["reward_left_out"] = left_out / len(samples)
    return metrics | _length_metrics(samples)


def _domain_rewards(samples: list[Sample]) -> dict[str, float]:
    """Return reward/DOMAIN → mean reward of the domain."""
    by_domain: dict[str, list[float]] = {}
    for sample in samples:
        by_domain.setdefault(sample.domain, []).append(sample.reward)
    metrics = {}
    for domain, rewards in sorted(by_domain.items()):
        metrics[f"reward/{domain}"] = _mean(rewards)
    return metrics


def _length_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return mean and largest length of the completions in tokens, and the share that has ended."""
    lengths = [len(sample.completion.tokens) for sample in samples]
    ended = sum(sample.completion.ended for sample in samples)
    return {
        "length": sum(lengths) / len(lengths),
        "length_max": float(max(lengths)),
        "ended": ended / len(lengths),
    }
