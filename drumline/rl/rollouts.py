"""Rollouts: a run samples completions of its prompts, and trains on them.

prompts → completions → rewards → advantages → batches of optimizer steps.

This module is the entry of the package. `train.build_rollouts` makes a `Rollouts`, and the training
loop iterates `Rollouts.stream` and calls `report`, `evaluate` and `close`. `build` makes the generator
that samples, `rewards` scores, and `reading` runs the policy, the reference and reward models over the
episodes.

Terms: a *sample* is a completion of a prompt with its reward; a *group* the samples of one draw of a
prompt; an *episode* a sample as a row of `Episodes`, the tensors that the objective reads. With an
environment (`conversations`) a completion is all that follows the prompt: the turns of the model, which
are learned, and those of the environment between them.

Every rank knows the whole rollout, which is small. So advantages are computed over the global
rollout, and it does not matter which rank trains on which episode. A rollout depends only on the
weights, on (seed, step, position of the prompt) and on the stream's state, so a resumed run samples
the same rollout again. Rollouts may be sampled ahead of the steps, with older weights; the module
`ahead` has the schedule, and `partial` that of completions which are sampled in segments.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from drumline.algorithms.credit import have_nonzero_advantages
from drumline.algorithms.policy import KLController, divergence
from drumline.config.algorithm import SamplingSpec
from drumline.config.rollouts import ServerGenerator
from drumline.data.batches import Episodes, EpisodeTurn
from drumline.data.cache import TokenCache
from drumline.data.encode import OWN_COLUMNS, ROW_PROMPT
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import gather_from_ranks
from drumline.dist.seeds import derive
from drumline.errors import ConfigError, TrainingStopped
from drumline.plan.plan import Plan
from drumline.rl.ahead import ScheduledSampling
from drumline.rl.conversations import Conversation, Conversations, Start, row_for_environment
from drumline.rl.curriculum import Curriculum
from drumline.rl.generate import Completion, Request, StopRules, rank_and_world_size
from drumline.rl.partial import (
    PartialCompletion,
    PartialRollout,
    SegmentCall,
    VersionedTokens,
    load_rollout,
    tokens_due,
)
from drumline.rl.pending import PendingRollout
from drumline.rl.reading import (
    EpisodeReader,
    ModelReaders,
    TeacherComparison,
    add_sums,
    rows_of_samples,
)
from drumline.rl.rewards import ENVIRONMENT, EpisodeScore, EpisodeText, Rewards, count_reasons
from drumline.rl.sampler_check import SamplerCheck
from drumline.rl.transcript import MOST_TEXT, shorten_messages
from drumline.system.heartbeat import beat
from drumline.telemetry.events import Emit, Rollout
from drumline.telemetry.watched import Completions

# The most reasons of failed rewards that the message of a stopped run names.
MOST_REASONS = 3
# After so many rollouts in a row without a token to learn, a run without rewards is stopped.
MOST_EMPTY = 3
# The most samples of a rollout that its event shows.
MOST_SHOWN = 8
# `dist.seeds.derive` returns a number from 0 to this one, which it never reaches.
SEED_RANGE = 2**63


@dataclass(frozen=True)
class RowCompletion(Completion):
    """A completion that is in a row of the data, and was not sampled."""

    # Whether each token is learned from.
    learned: list[bool]


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt with its reward.

    The reward is NaN if it could not be computed, if no reward applies to the sample, or if the config
    lists none.
    """

    # The prompt's number in the cache.
    prompt_id: int
    prompt_tokens: list[int]
    completion: Completion
    domain: str
    reward: float
    # Whether any reward applies to this sample.
    applies: bool = True
    # With an environment the turns, each with its part of the reward.
    turns: Sequence[EpisodeTurn] = ()
    # The versions of the weights that sampled it, from its first token to its last one; empty for the
    # completion of a row.
    versions: tuple[VersionedTokens, ...] = ()

    @property
    def is_failed(self) -> bool:
        """Whether a reward applies and could not be computed."""
        return self.applies and math.isnan(self.reward)


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a rollout, or of an evaluation set, with their rewards.

    The samples of a rollout are stored group after group, `group_size` samples each. Dynamic sampling
    draws prompts several times: `parts` and `failures` are then those of the last draw alone, while
    `samples` are of all draws. The documentation of the event `rollout` says so.
    """

    samples: list[Sample]
    # Reward → mean of its values; NaN for a reward that gave none.
    parts: dict[str, float]
    # Reward → reason of a failure → number of episodes.
    failures: dict[str, Counter[str]]
    # The gap between sampler and policy, see SamplerCheck.gap; None if there is none.
    sampler_gap: float | None = None
    # Completions of rows that are learned from, too, see `SamplingSpec.sampled_share`.
    row_samples: tuple[Sample, ...] = ()

    @property
    def learned(self) -> list[Sample]:
        """All samples that are learned from: those of the policy, then the completions of rows."""
        return [*self.samples, *self.row_samples]

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

    def rewards_differ(self, group_size: int, credits_turns: bool = False) -> list[bool]:
        """Return for each group whether its rewards differ; only such a group teaches anything.

        `credits_turns`: whether advantages are computed by turn. It is then enough that the sums of
        rewards from some turn on differ.
        """
        rewards_N = torch.tensor(self.rewards, dtype=torch.float32)
        turns: list[Sequence[EpisodeTurn]] = []
        if credits_turns:
            turns = [sample.turns for sample in self.samples]
        return have_nonzero_advantages(rewards_N, group_size, turns)


class RolloutEvaluation(NamedTuple):
    """The result of an evaluation on held-out prompts."""

    # Those of `_evaluation_metrics` over all sets, and as SET/metric for each set that has a name.
    metrics: dict[str, float]
    # Number of prompts.
    samples: int
    # Reward → reason of a failure → number of samples.
    failures: dict[str, Counter[str]]


def load_pending(
    states: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    steps_done: int,
    steps_per_rollout: int,
    samples_segments: bool = False,
) -> deque[PendingRollout]:
    """Return the pending rollouts of a checkpoint, in the order in which they are learned from.

    Args:
        states: What `PendingRollout.state` returned for each. In older checkpoints the only one that
            there could be, without its version.
        steps_done: Optimizer steps of the run so far.
        steps_per_rollout: Optimizer steps that learn from a rollout.
        samples_segments: Whether the run samples completions in segments (`rl.partial`).

    Raises ConfigError if there are partial completions and the run would not continue them.
    """
    if isinstance(states, Mapping):
        states = [states]
    # Older checkpoints sampled one rollout ahead.
    version = max(0, steps_done - steps_per_rollout)
    return deque(load_rollout(state, version, samples_segments) for state in states)


def require_same_groups(state: Mapping[str, Any], group_size: int) -> None:
    """Check that the pending rollouts of a checkpoint have groups of the size that the run learns from.

    Raises ConfigError if they do not.

    Args:
        state: `GlobalBatch.state`. Older checkpoints do not tell the size of their groups.
        group_size: Completions of each prompt in this run.
    """
    saved_size = state.get("group_size", group_size)
    if saved_size != group_size:
        raise ConfigError(
            f"the checkpoint has rollouts that were sampled ahead, {saved_size} completions of each prompt",
            where="algorithm.group_size",
            fix=f"set it to {saved_size}",
        )


class DrawnPrompts(NamedTuple):
    """Prompts that are drawn for a rollout."""

    # The prompts' numbers in the cache, each as often as it is completed.
    prompt_ids: list[int]
    # Of the random numbers of each completion, see `Request.key`.
    keys: list[tuple[int, ...]]
    # Numbers of prompts that are learned with the completion in their row.
    row_ids: list[int]


@dataclass
class Rollouts:
    """All rollouts of a run, as one rank sees them.

    Everything here is collective: each rank calls the same public methods in the same order, and takes
    the batches of `stream` in step with the others.
    """

    plan: Plan
    algorithm: SamplingSpec
    prompts: TokenCache
    held_out: Mapping[str, TokenCache]  # name of the evaluation set → its prompts
    curriculum: Curriculum
    kl: KLController
    # Samples completions of one turn. Arguments: requests, step, whether greedily. Collective.
    sample: Callable[[list[Request], int, bool], list[Completion]]
    # Samples completions by the present weights while training goes on, once those asked for before are
    # sampled. Arguments: requests, step. Collective.
    sample_ahead: Callable[[list[Request], int], ScheduledSampling]
    # Begins with the next rollout of `sample_ahead` as far as that needs no waiting. Collective.
    start_next_if_free: Callable[[], None]
    # Waits until servers have the weights of `sample_ahead`, and compares them with the policy. Collective.
    finish_comparison: Callable[[], None]
    # Compares the sampler with the policy when `sample` and `sample_ahead` give it new weights.
    sampler_check: SamplerCheck
    # Returns the url of each server that was lost and is not back → why.
    lost_servers: Callable[[], dict[str, str]]
    rewards: Rewards
    reading: EpisodeReader
    readers: ModelReaders
    decode: Callable[[list[int]], str]
    emit: Emit
    # Plays episodes with environments; None: an episode is one completion.
    conversations: Conversations | None = None
    # Compares the model with its teacher at held-out completions; None if there is no teacher.
    comparison: TeacherComparison | None = None
    # Asks a teacher on servers about all episodes of a rollout; None without one. Collective.
    ask_teacher: Callable[[Episodes], None] | None = None
    # Find stop texts that begin in one segment of a completion and end in the next one. None: completions
    # are not sampled in segments.
    segment_rules: StopRules | None = None

    def __post_init__(self) -> None:
        # Activity (generate, reward, infer or train) → seconds that the rollout spent on it so far.
        self.seconds: dict[str, float] = {}
        # How many rollouts in a row had too many failed rewards (`algorithm.reward_failure`). It is
        # not in checkpoints: a run that is resumed, perhaps with corrected rewards, counts anew.
        self.failures_in_a_row = 0
        # Whether any episode of the run has had a reward; with a teacher, a token to learn.
        self.has_rewards = False
        # The report of the rollout that is being trained on; `report` calls it after the last step.
        self._report_pending: Callable[[], None] | None = None

    def stream(
        self, steps_done: int, position: int, state: Mapping[str, Any]
    ) -> Iterator[GlobalBatch]:
        """Yield the batches of all optimizer steps that are left in the run.

        Args:
            steps_done: Optimizer steps of the run so far.
            position: Prompts drawn so far.
            state: `GlobalBatch.state` of the last batch before; empty for a new run.
        """
        assert self.plan.steps is not None
        self._load_state(state)
        require_same_groups(state, self.algorithm.group_size)
        pending = load_pending(
            state.get("ahead", []),
            steps_done,
            self.algorithm.steps_per_rollout,
            self.segment_rules is not None,
        )
        while steps_done < self.plan.steps:
            self.seconds = {}
            first_position = position
            # The last of the steps that learn from this rollout.
            last_step = steps_done + self.algorithm.steps_per_rollout
            drawn = pending.popleft() if pending else None
            sampled, position = self._sample_groups(steps_done, position, drawn)
            prompts_drawn = position - first_position
            self._check_rewards(steps_done, sampled, prompts_drawn)
            if self.algorithm.lookahead:
                with self._add_seconds("generate"):
                    self._draw_ahead(pending, steps_done, position)
                    self._sample_segments(pending, steps_done)
            learned = self._learned_samples(sampled)
            with self._add_seconds("infer"):
                episodes, metrics = self._make_episodes(learned)
                if self.ask_teacher is not None:
                    self.ask_teacher(episodes)
            with self._add_seconds("generate"):
                # The first step changes the policy, with which servers are compared.
                self.finish_comparison()
            self._report_pending = partial(
                self._report_trained, time.time(), last_step, sampled, prompts_drawn, metrics
            )
            yield from self._batches(episodes, learned, steps_done, position, list(pending))
            self.report()
            steps_done = last_step

    def _draw_ahead(self, pending: deque[PendingRollout], steps_done: int, position: int) -> None:
        """Have rollouts sampled by the present weights until as many are pending as the config says.

        Usually that is one. At the beginning of a run it is all of them.

        Args:
            pending: The rollouts that are drawn and not learned from; new ones are added at the end.
            steps_done: Optimizer steps before the rollout that is learned from next.
            position: Prompts drawn so far, up to that rollout.
        """
        algorithm = self.algorithm
        prompts = self._episodes_wanted // algorithm.group_size
        while len(pending) < algorithm.lookahead:
            rollouts_before = len(pending)
            first_step = steps_done + (1 + rollouts_before) * algorithm.steps_per_rollout
            if first_step >= (self.plan.steps or 0):
                return
            first_position = position + rollouts_before * prompts
            rollout: PendingRollout
            if self.segment_rules is None:
                rollout = self._draw(prompts, first_step, first_position, version=steps_done)
            else:
                drawn = self._draw_prompts(prompts, first_position)
                rollout = PartialRollout(drawn.prompt_ids, drawn.keys, row_ids=drawn.row_ids)
            pending.append(rollout)

    def _sample_segments(self, pending: Sequence[PendingRollout], steps_done: int) -> None:
        """Have the segments sampled that are due for the present weights, as one call.

        Nothing is sampled if all completions have ended. Collective.

        Args:
            pending: The rollouts that are drawn and not learned from, in their order.
            steps_done: Optimizer steps of the run so far. Random numbers depend on it.
        """
        if self.segment_rules is None:
            return
        max_new_tokens = self.algorithm.generator.max_new_tokens
        requests: list[Request] = []
        targets: list[tuple[PartialRollout, int]] = []
        for rollouts_before, rollout in enumerate(pending, start=1):
            # A checkpoint of a run that did not sample in segments has whole completions.
            if not isinstance(rollout, PartialRollout):
                continue
            # If all completions of the rollout before ended early, nothing has waited for the last call.
            rollout.finish_call()
            due = tokens_due(max_new_tokens, self.algorithm.segments, rollouts_before)
            prompts = self._requests(self.prompts, rollout.prompt_ids, rollout.keys)
            for index in rollout.unfinished(due):
                prompt = prompts[index]
                so_far = rollout.tokens_so_far(index)
                request = replace(
                    prompt,
                    tokens=[*prompt.tokens, *so_far],
                    max_new_tokens=due - len(so_far),
                )
                requests.append(request)
                targets.append((rollout, index))
        if not requests:
            return
        scheduled = self.sample_ahead(requests, steps_done)
        version = self._exported_version(steps_done)
        call = SegmentCall(scheduled, targets, version, self.segment_rules)
        for rollout, _ in targets:
            rollout.await_call(call)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint; a new run has an empty one."""
        if not state:
            return
        self.curriculum.load_state(state["curriculum"])
        # Older checkpoints lack this key.
        self.has_rewards = state.get("has_rewards", True)
        # A fixed coefficient comes from the config.
        is_steered = self.kl.target is not None and self.kl.coefficient
        if is_steered and state["kl"]:
            self.kl.coefficient = state["kl"]

    def report(self) -> None:
        """Report the rollout whose last step is done, if it has not been reported yet.

        `stream` calls this before the next rollout, and the training loop when it ends.
        """
        report = self._report_pending
        self._report_pending = None
        if report is not None:
            report()

    def _report_trained(
        self,
        began: float,
        last_step: int,
        sampled: ScoredSamples,
        drawn: int,
        metrics: dict[str, float],
    ) -> None:
        """Report a rollout that was trained on from `began`, in seconds of the clock, until now."""
        self.seconds["train"] = time.time() - began
        self._report(last_step, sampled, drawn, metrics)

    @property
    def _episodes_wanted(self) -> int:
        """The number of episodes of a rollout.

        It is a multiple of the group's size; the plan is refused otherwise (`samples_in_turn`).
        """
        return self.algorithm.episodes_of_rollout(self.plan.batch.global_samples)

    def _draw(self, prompts: int, first_step: int, position: int, version: int) -> PendingRollout:
        """Draw prompts and have a group of completions sampled for each by the present weights.

        With lookahead, sampling begins as soon as the sampler is free. Otherwise it happens when the
        completions are first read.

        Args:
            prompts: Number of prompts to draw.
            first_step: Optimizer steps before the rollout is trained on; random numbers depend on it.
            position: Prompts drawn before this rollout.
            version: Optimizer steps of the run so far, which the weights have learned from.
        """
        prompt_ids, keys, row_ids = self._draw_prompts(prompts, position)
        sampled_version = self._exported_version(version)
        if not self.algorithm.lookahead:
            sample = partial(self._sample, self.prompts, prompt_ids, keys, first_step, False)
            return PendingRollout(prompt_ids, sample, None, row_ids, sampled_version)
        requests = self._requests(self.prompts, prompt_ids, keys)
        if self.conversations is not None:
            requests = list(self._starts(self.prompts, prompt_ids, requests))
        scheduled = self.sample_ahead(requests, first_step)
        return PendingRollout(
            prompt_ids,
            scheduled.finish,
            row_ids=row_ids,
            version=sampled_version,
            scheduled=scheduled,
        )

    def _draw_prompts(self, prompts: int, position: int) -> DrawnPrompts:
        """Draw the prompts of a rollout.

        Args:
            prompts: Number of prompts to draw.
            position: Prompts drawn before this rollout.
        """
        prompt_ids: list[int] = []
        keys: list[tuple[int, ...]] = []
        row_ids: list[int] = []
        for offset, prompt_id in enumerate(self.curriculum.draw(prompts)):
            if not self._is_sampled(position + offset):
                row_ids.append(prompt_id)
                continue
            for index in range(self.algorithm.group_size):
                prompt_ids.append(prompt_id)
                # The key has the position and not the prompt, so that a prompt which comes again gets
                # other completions.
                keys.append((position + offset, index))
        return DrawnPrompts(prompt_ids, keys, row_ids)

    def _exported_version(self, steps_done: int) -> int | None:
        """Return the version of the present weights, or None if servers sample by their own."""
        if self._server_keeps_weights:
            return None
        return steps_done

    @property
    def _server_keeps_weights(self) -> bool:
        """Whether servers sample with their own weights, whose version is not known."""
        generator = self.algorithm.generator
        return isinstance(generator, ServerGenerator) and generator.weights == "none"

    def _is_sampled(self, position: int) -> bool:
        """Return whether the policy completes the prompt at a position; if not, its row does.

        It depends on the seed and the position alone, so it is the same on any number of ranks.
        """
        share = self.algorithm.sampled_share
        return derive(self.plan.config.run.seed, "sampled", position) < share * SEED_RANGE

    def _learned_samples(self, sampled: ScoredSamples) -> list[Sample]:
        """Return the episodes of a rollout that are learned from, in the order of `Episodes`."""
        candidates = sampled.learned
        rewards_N = torch.tensor([sample.reward for sample in candidates], dtype=torch.float32)
        tokens_N = torch.tensor([sample.completion.length for sample in candidates])
        picks = self.algorithm.learned_episodes(rewards_N, tokens_N)
        return [candidates[pick] for pick in picks]

    def _batches(
        self,
        episodes: Episodes,
        learned: Sequence[Sample],
        steps_done: int,
        position: int,
        pending: list[PendingRollout],
    ) -> Iterator[GlobalBatch]:
        """Yield the batches of a rollout's optimizer steps.

        They are `epochs` passes over all its samples, each in a new random order. A sample is an episode,
        or several that the loss compares (`rows_of_samples`).

        Args:
            episodes: The rollout, with all tensors that the objective reads.
            learned: The same episodes, which know their prompts.
            steps_done: Optimizer steps before the rollout.
            position: Prompts drawn so far, this rollout included.
            pending: The next rollouts if they are sampled ahead; checkpoints hold them.
        """
        algorithm = self.algorithm
        batch = self.plan.batch
        size = batch.global_samples
        seed = self.plan.config.run.seed
        rows_SR = rows_of_samples(episodes, batch.rows_per_sample)
        prompts_S = np.asarray([learned[row].prompt_id for row in rows_SR[:, 0].tolist()], np.int64)
        state = self._state(pending)
        for epoch in range(algorithm.epochs):
            is_last_epoch = epoch == algorithm.epochs - 1
            generator = np.random.default_rng(derive(seed, "episodes", steps_done, epoch))
            order = generator.permutation(algorithm.minibatches * size)
            # Fillers take the places of groups that teach nothing.
            order[order >= len(rows_SR)] = -1
            for number in range(algorithm.minibatches):
                # A checkpoint does not contain the rollout, so none is saved before its last step.
                is_last_step = is_last_epoch and number == algorithm.minibatches - 1
                picks = order[number * size : (number + 1) * size]
                is_real = picks >= 0
                rows = rows_SR[picks[is_real]].flatten()
                sample_ids = np.where(is_real, prompts_S[np.maximum(picks, 0)], -1)
                micro_batches, tokens = self.reading.micro_batches(
                    episodes, picks.tolist(), batch.accumulation, batch.micro_batch
                )
                self.start_next_if_free()
                # These totals are over all ranks without a collective: each knows the whole rollout.
                weight = float(episodes.weight_N[rows].double().sum())
                global_tokens = int(episodes.lengths[rows].sum())
                yield GlobalBatch(
                    list(micro_batches),
                    sample_ids,
                    position,
                    tokens,
                    checkpointable=is_last_step,
                    state=state,
                    totals=(weight, global_tokens),
                )

    def _state(self, pending: list[PendingRollout]) -> dict[str, Any]:
        """Return what a checkpoint needs besides the weights, to continue with the next rollout."""
        state = {
            "curriculum": self.curriculum.state(),
            "kl": self.kl.coefficient,
            "has_rewards": self.has_rewards,
            "sampler": self.sampler_check.state(),
        }
        if pending:
            # A function, which is called only if a checkpoint is written, as it waits for completions.
            state["ahead"] = partial(_states, pending)
            state["group_size"] = self.algorithm.group_size
        return state

    def _check_rewards(self, steps_done: int, sampled: ScoredSamples, drawn: int) -> None:
        """Raise TrainingStopped if the run learns nothing because of its rewards.

        There are two cases: too many rollouts in a row in which rewards failed or applied to no
        episode, and a run whose last rollout is reached without any reward so far. All ranks know
        the same rewards, so all raise.

        Args:
            steps_done: Optimizer steps before the rollout.
            sampled: The rollout.
            drawn: Number of prompts that were drawn for it.
        """
        limit = self.algorithm.failure_limit
        if limit is None:
            self._check_tokens(steps_done, sampled, drawn)
            return
        failed_share = sampled.failed_share
        has_reward = not all(math.isnan(reward) for reward in sampled.rewards)
        self.has_rewards = self.has_rewards or has_reward
        if failed_share >= limit.share:
            self.failures_in_a_row += 1
        else:
            self.failures_in_a_row = 0
        last_step = steps_done + self.algorithm.steps_per_rollout
        is_last = last_step >= (self.plan.steps or 0)
        has_learned_nothing = is_last and not self.has_rewards
        has_failed_too_often = self.failures_in_a_row >= limit.rollouts and limit.action == "stop"
        if not has_learned_nothing and not has_failed_too_often:
            return
        # The event shows the user the completions that got no reward.
        self._report(last_step, sampled, drawn, {}, trained=False)
        often = _most_common_reasons(sampled)
        if has_learned_nothing:
            what = f"no episode of this run got a reward, so nothing was learned: {often}"
            fix = "correct the rewards, so that one applies to each row"
        else:
            counted = "episodes"
            if 0 < sampled.left_out < len(sampled.samples):
                counted = "episodes that a reward applies to"
            in_a_row = ""
            if self.failures_in_a_row > 1:
                in_a_row = f" ({self.failures_in_a_row} such rollouts in a row)"
            what = f"{failed_share:.0%} of the {counted} got no reward{in_a_row}: {often}"
            fix = "correct the reward, or train without these episodes: algorithm.reward_failure.action=continue"
        raise TrainingStopped(what, where="algorithm.rewards", fix=fix)

    def _check_tokens(self, steps_done: int, sampled: ScoredSamples, drawn: int) -> None:
        """Raise TrainingStopped if a run that learns without rewards has no tokens to learn from.

        Then its environment has failed at the beginning of all episodes: in MOST_EMPTY rollouts in a
        row, or in all rollouts of the run. All ranks know the same tokens, so all raise.

        The arguments are those of `_check_rewards`.
        """
        has_tokens = any(sample.completion.length for sample in sampled.learned)
        if has_tokens:
            self.has_rewards = True
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        last_step = steps_done + self.algorithm.steps_per_rollout
        is_last = last_step >= (self.plan.steps or 0)
        has_learned_nothing = is_last and not self.has_rewards
        if self.failures_in_a_row < MOST_EMPTY and not has_learned_nothing:
            return
        self._report(last_step, sampled, drawn, {}, trained=False)
        raise TrainingStopped(
            f"no episode has a token to learn from: {_most_common_reasons(sampled)}",
            where="algorithm.environment",
            fix="correct the environment, then --resume",
        )

    def _sample_groups(
        self, steps_done: int, position: int, drawn: PendingRollout | None
    ) -> tuple[ScoredSamples, int]:
        """Return the groups of a rollout, and the position after their prompts.

        With dynamic sampling (Yu et al. 2025, DAPO), groups whose rewards are all alike are
        replaced, until enough differ or the allowed rounds are used up. Such a group teaches nothing.

        Args:
            steps_done: Optimizer steps before the rollout.
            position: Prompts drawn so far.
            drawn: The rollout if it is being sampled already; else None.
        """
        size = self.algorithm.group_size
        wanted = self._episodes_wanted
        # Without dynamic sampling there is one round, and it keeps all groups.
        uses_dynamic_sampling = self.algorithm.rounds > 1
        kept: list[Sample] = []
        spare: list[Sample] = []
        row_samples: list[Sample] = []
        for _ in range(self.algorithm.rounds):
            with self._add_seconds("generate"):
                if drawn is None:
                    missing = wanted - len(kept)
                    drawn = self._draw(missing // size, steps_done, position, version=steps_done)
                prompt_ids = drawn.prompt_ids
                row_ids = drawn.row_ids
                completions = drawn.completions
                # The sampler is free now. It goes on while the rewards of this rollout are computed.
                self.start_next_if_free()
                sampler_gap = drawn.sampler_gap
                if not self.algorithm.lookahead:
                    sampler_gap = self.sampler_check.gap
                version = drawn.version
            drawn = None
            with self._add_seconds("reward"):
                scored = self._score(self.prompts, prompt_ids, completions, version, size)
            self._learn_domains(scored.samples)
            row_samples += [_row_sample(self.prompts, row_id) for row_id in row_ids]
            position += len(prompt_ids) // size + len(row_ids)
            differ = scored.rewards_differ(size, self.algorithm.credits_turns)
            for group, rewards_differ in enumerate(differ):
                first = group * size
                samples = scored.samples[first : first + size]
                if rewards_differ or not uses_dynamic_sampling:
                    kept += samples
                else:
                    spare += samples
            if len(kept) == wanted:
                break
        # If the rounds were not enough, groups whose rewards are all alike fill the rollout up.
        chosen = [*kept, *spare][:wanted]
        sampled = replace(
            scored, samples=chosen, sampler_gap=sampler_gap, row_samples=tuple(row_samples)
        )
        return sampled, position

    def _learn_domains(self, samples: list[Sample]) -> None:
        """Update the curriculum with the rewards of each domain, without those that failed."""
        by_domain: dict[str, list[float]] = {}
        for sample in samples:
            if not math.isnan(sample.reward):
                by_domain.setdefault(sample.domain, []).append(sample.reward)
        self.curriculum.learn(by_domain)

    def _requests(
        self, cache: TokenCache, prompt_ids: list[int], keys: Sequence[tuple[int, ...]]
    ) -> list[Request]:
        """Return requests for some prompts of `cache`, each with its key for random numbers."""
        requests = []
        for prompt_id, key in zip(prompt_ids, keys, strict=True):
            tokens = _prompt_tokens(cache, prompt_id)
            requests.append(Request(tokens, key, cache.meta(prompt_id)))
        return requests

    def _sample(
        self,
        cache: TokenCache,
        prompt_ids: list[int],
        keys: Sequence[tuple[int, ...]],
        step: int,
        greedily: bool,
    ) -> list[Completion]:
        """Return an episode for each of some prompts of `cache`. Collective.

        Args:
            cache: The prompts.
            prompt_ids: Their numbers in the cache, each as often as it is completed.
            keys: Of the random numbers of each.
            step: The optimizer step; random numbers depend on it.
            greedily: Whether the model decodes greedily.
        """
        requests = self._requests(cache, prompt_ids, keys)
        if self.conversations is None:
            return self.sample(requests, step, greedily)
        return self.conversations.play(self._starts(cache, prompt_ids, requests), step, greedily)

    def _starts(
        self, cache: TokenCache, prompt_ids: list[int], requests: list[Request]
    ) -> list[Start]:
        """Return the beginnings of episodes with environments, for some prompts and their requests."""
        starts = []
        for prompt_id, request in zip(prompt_ids, requests, strict=True):
            row = row_for_environment(cache.meta(prompt_id))
            starts.append(Start(request.tokens, request.key, request.images, row=row))
        return starts

    def _score(
        self,
        cache: TokenCache,
        prompt_ids: list[int],
        completions: list[Completion],
        version: int | None,
        group_size: int,
    ) -> ScoredSamples:
        """Return the completions of some prompts of `cache` with their rewards. Collective.

        Args:
            cache: The prompts.
            prompt_ids: Their numbers in the cache, each as often as it is completed.
            completions: The completions.
            version: Of the weights that sampled them; a PartialCompletion has its own.
            group_size: Number of completions of each prompt, which follow each other.
        """
        if not prompt_ids:
            return ScoredSamples([], {}, {})
        prompts = []
        for prompt_id, completion in zip(prompt_ids, completions, strict=True):
            if isinstance(completion, Conversation):
                prompts.append(completion.prompt)
            else:
                prompts.append(_prompt_tokens(cache, prompt_id))
        metas = [cache.meta(prompt_id) for prompt_id in prompt_ids]
        scores = self._compute_rewards(prompts, completions, metas, group_size)
        samples = []
        for index, score in enumerate(scores):
            completion = completions[index]
            penalty = 0.0
            if not completion.ended:
                penalty = self.algorithm.missing_stop_penalty
            reward = math.nan
            if score.applies:
                reward = score.value - penalty
            sample = Sample(
                prompt_id=prompt_ids[index],
                prompt_tokens=prompts[index],
                completion=completion,
                domain=metas[index]["domain"],
                reward=reward,
                applies=score.applies,
                turns=self._rewarded_turns(completion, score.outcome - penalty),
                versions=_versions(completion, version),
            )
            samples.append(sample)
        parts = {}
        for name in self.rewards.names:
            parts[name] = _mean([score.parts[name] for score in scores])
        return ScoredSamples(samples, parts, self._count_failures(scores))

    def _rewarded_turns(self, completion: Completion, outcome: float) -> list[EpisodeTurn]:
        """Return the turns of an episode, each with its part of the reward; none without environment.

        `outcome`: all of the reward that the environment did not give. It is added to the last turn.
        """
        if not isinstance(completion, Conversation) or not completion.turns:
            return []
        weight = self.rewards.environment_weight
        turns = []
        for turn in completion.turns:
            reward = 0.0
            if turn.reward is not None:
                reward = weight * turn.reward
            turns.append(EpisodeTurn(turn.tokens, reward))
        last = turns[-1]
        turns[-1] = EpisodeTurn(last.tokens, last.reward + outcome)
        return turns

    def _count_failures(self, scores: list[EpisodeScore]) -> dict[str, Counter[str]]:
        """Return reward → reason of a failure → number of episodes."""
        failures = {}
        for name in dict.fromkeys([*self.rewards.names, ENVIRONMENT]):
            reasons = []
            for score in scores:
                if name in score.failures:
                    reasons.append(score.failures[name])
            if reasons:
                failures[name] = count_reasons(reasons)
        return failures

    def _compute_rewards(
        self,
        prompts: list[list[int]],
        completions: list[Completion],
        metas: list[dict[str, Any]],
        group_size: int,
    ) -> list[EpisodeScore]:
        """Return the score of each completion, the same on all ranks. Collective.

        Functions run on one rank for each completion: for completion 0 on rank 0, for 1 on rank 1,
        and so on in turn. If a reward sees whole groups, these are dealt in the same way.

        Args:
            prompts: The tokens of each completion's prompt.
            completions: The completions, group after group.
            metas: The metadata of each completion's prompt.
            group_size: Number of completions of each prompt.
        """
        texts = []
        for completion, meta in zip(completions, metas, strict=True):
            # The user's columns `prompt` and `domain` replace ours of the same names.
            columns = dict(meta)
            columns |= columns.pop(OWN_COLUMNS, {})
            texts.append(self._episode_text(completion, meta["prompt"], columns))
        dealt_together = group_size if self.rewards.group_indices else 1
        rank, ranks = rank_and_world_size()
        owners = [index // dealt_together % ranks for index in range(len(texts))]
        own = [index for index, owner in enumerate(owners) if owner == rank]
        episodes = _to_episodes(prompts, completions, metas)
        own_model_scores = {}
        for name, read in self.readers.rewards.items():
            # All ranks run the model together, over all episodes.
            model_scores = read(episodes).tolist()
            own_model_scores[name] = [model_scores[index] for index in own]
        own_texts = [texts[index] for index in own]
        own_scores = self.rewards.score(own_texts, own_model_scores, dealt_together)
        scores_of_ranks = [iter(scores) for scores in gather_from_ranks(own_scores)]
        return [next(scores_of_ranks[owner]) for owner in owners]

    def _episode_text(
        self, completion: Completion, prompt: str, columns: dict[str, Any]
    ) -> EpisodeText:
        """Return an episode as rewards read it.

        Of a conversation the completion is the model's last turn, and `messages` has all turns.

        Args:
            completion: The episode.
            prompt: The text of the row's prompt.
            columns: The columns of its row.
        """
        if not isinstance(completion, Conversation):
            text = self.decode(completion.tokens)
            return EpisodeText(prompt, text, len(completion.tokens), columns)
        columns.pop(ROW_PROMPT)
        reward = math.nan
        if completion.reward is not None:
            reward = completion.reward
        return EpisodeText(
            prompt,
            completion.answer,
            completion.length,
            columns,
            reward,
            completion.failure,
            completion.messages,
        )

    def _make_episodes(self, samples: Sequence[Sample]) -> tuple[Episodes, dict[str, float]]:
        """Return samples as episodes with all tensors that the objective reads, and metrics.

        If the policy has read the episodes, the metrics are those of `_sampler_metrics`. If a reference
        has read them, too, they also have `kl`, the mean divergence from it in nats per token, and
        `kl_coefficient`. Otherwise the divergence counts as 0.
        """
        episodes = self._add_model_outputs(_samples_to_episodes(self.prompts, samples))
        episodes = replace(episodes, turns=[sample.turns for sample in samples])
        metrics = {}
        if self.readers.policy is not None:
            metrics = _sampler_metrics(episodes)
        kl_NM = torch.zeros_like(episodes.log_probs_NM)
        measures_kl = self.readers.policy is not None and self.readers.reference is not None
        if measures_kl:
            kl_NM = divergence(
                episodes.log_probs_NM,
                episodes.reference_log_probs_NM,
                self.kl.estimator,
            )
            kl_NM = kl_NM * episodes.mask_NM
            tokens = episodes.mask_NM.sum().clamp(min=1)
            metrics["kl"] = float(kl_NM.sum() / tokens)
            metrics["kl_coefficient"] = self.kl.coefficient
        rewards = [sample.reward for sample in samples]
        rewards_N = torch.tensor(rewards, dtype=torch.float32)
        penalty_NM = kl_NM * self.kl.coefficient
        episodes = self.algorithm.assign_credit(episodes, rewards_N, penalty_NM)
        # After `metrics`, so that the event reports the coefficient that this rollout was penalised by.
        if measures_kl:
            self.kl.update(metrics["kl"], len(episodes))
        return episodes, metrics

    def _add_model_outputs(self, episodes: Episodes) -> Episodes:
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

    def evaluate(self, step: int) -> RolloutEvaluation:
        """Complete all held-out prompts greedily after optimizer step `step`, and score them."""
        samples: list[Sample] = []
        sums: dict[str, float] = {}
        by_set: dict[str, float] = {}
        failures: dict[str, Counter[str]] = {}
        for name, cache in self.held_out.items():
            prompt_ids = list(range(len(cache)))
            keys = [(prompt_id, 0) for prompt_id in prompt_ids]
            completions = self._sample(cache, prompt_ids, keys, step, True)
            version = self._exported_version(step)
            sampled = self._score(cache, prompt_ids, completions, version, group_size=1)
            samples += sampled.samples
            set_sums: dict[str, float] = {}
            if self.comparison is not None:
                set_sums = self.comparison.sums(_samples_to_episodes(cache, sampled.samples))
                sums = add_sums(sums, set_sums)
            # A single evaluation set has no name.
            if name:
                for key, value in self._evaluation_metrics(sampled.samples, set_sums).items():
                    by_set[f"{name}/{key}"] = value
            for reward, reasons in sampled.failures.items():
                failures.setdefault(reward, Counter()).update(reasons)
        metrics = {}
        if samples:
            metrics = self._evaluation_metrics(samples, sums) | by_set
        return RolloutEvaluation(metrics, len(samples), failures)

    def _evaluation_metrics(
        self, samples: list[Sample], sums: dict[str, float]
    ) -> dict[str, float]:
        """Return the metrics of evaluated samples.

        - With a teacher, those that the algorithm computes from `sums`, see `TeacherComparison`.
        - With rewards, those of `_reward_metrics`.
        - `length`, `length_max` and `ended`, see `_length_metrics`.
        - With an environment those of `_conversation_metrics`.
        """
        metrics: dict[str, float] = {}
        if self.comparison is not None:
            metrics |= self.comparison.algorithm.metrics(sums)
        if self.algorithm.rewards:
            metrics |= _reward_metrics(samples)
        return metrics | _length_metrics(samples) | _conversation_metrics(samples)

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self.rewards.close()
        if self.conversations is not None:
            self.conversations.close()

    @contextmanager
    def _add_seconds(self, kind: str) -> Iterator[None]:
        """Add the seconds that the block takes to `seconds[kind]`."""
        began = time.time()
        beat("rollout")
        yield
        earlier = self.seconds.get(kind, 0.0)
        self.seconds[kind] = earlier + time.time() - began

    def _report(
        self,
        last_step: int,
        sampled: ScoredSamples,
        drawn: int,
        metrics: dict[str, float],
        trained: bool = True,
    ) -> None:
        """Emit the events of a rollout.

        Args:
            last_step: The last optimizer step that is trained on the rollout.
            sampled: The rollout.
            drawn: Number of prompts that were drawn for it.
            metrics: What `_make_episodes` returned.
            trained: Whether optimizer steps learned from it.
        """
        # Empty if all completions are from rows.
        samples = sampled.samples
        known = [reward for reward in sampled.rewards if not math.isnan(reward)]
        algorithm = self.algorithm
        differ = sampled.rewards_differ(algorithm.group_size, algorithm.credits_turns)
        reward_std: float | None = None
        groups_differ: float | None = None
        if known:
            reward_std = statistics.pstdev(known)
            groups_differ = sum(differ) / len(differ)
        left_out = 0
        domain_rewards: dict[str, float] = {}
        if self.algorithm.rewards:
            left_out = sampled.left_out
            domain_rewards = _domain_rewards(samples)
        counts = Counter(sample.domain for sample in samples)
        shares = {}
        for domain, count in sorted(counts.items()):
            shares[domain] = count / len(samples)
        rollout = Rollout(
            step=last_step,
            prompts=len(differ),
            drawn=drawn,
            episodes=len(samples),
            reward=_mean(known),
            reward_std=reward_std,
            groups_differ=groups_differ,
            left_out=left_out,
            from_rows=len(sampled.row_samples),
            rewards=sampled.parts,
            shares=shares,
            failures=sampled.failures,
            sampler_gap=sampled.sampler_gap,
            staleness=self._staleness(last_step, samples),
            lost_servers=self.lost_servers(),
            trained=trained,
            **_length_metrics(samples),
            generate_s=self.seconds.get("generate", 0.0),
            reward_s=self.seconds.get("reward", 0.0),
            infer_s=self.seconds.get("infer", 0.0),
            train_s=self.seconds.get("train", 0.0),
            metrics=domain_rewards | _conversation_metrics(samples) | metrics,
        )
        self.emit(rollout)
        if not samples:
            return
        shown = [self._describe_sample(sample) for sample in samples[:MOST_SHOWN]]
        self.emit(Completions(step=last_step, completions=shown, trained=trained))

    def _staleness(self, last_step: int, samples: list[Sample]) -> float | None:
        """Return the steps between the weights that sampled a rollout and its first step.

        It is the mean over all sampled tokens. None if nothing is sampled ahead, if the version of the
        weights is not known, or if nothing was sampled.

        Args:
            last_step: The last optimizer step that is trained on the rollout.
            samples: The samples of the rollout.
        """
        first_step = last_step - self.algorithm.steps_per_rollout
        steps = 0
        tokens = 0
        for sample in samples:
            for part in sample.versions:
                if part.version is None:
                    return None
                steps += (first_step - part.version) * part.tokens
                tokens += part.tokens
        if not tokens or not self.algorithm.lookahead:
            return None
        return steps / tokens

    def _describe_sample(self, sample: Sample) -> dict[str, Any]:
        """Return a sample as the event of completions shows it."""
        completion = sample.completion
        versions = [part._asdict() for part in sample.versions]
        description = {
            "prompt": self.prompts.meta(sample.prompt_id)["prompt"],
            "text": self.decode(completion.tokens)[:MOST_TEXT],
            "reward": sample.reward,
            "domain": sample.domain,
            "ended": completion.ended,
            "tokens": completion.length,
            "version": versions[0]["version"] if versions else None,
            "versions": versions,
        }
        if isinstance(completion, Conversation):
            description["messages"] = shorten_messages(completion)
            description["failure"] = completion.failure
        return description


def _states(pending: list[PendingRollout]) -> list[dict[str, Any]]:
    """Wait for the completions of all pending rollouts, and return them as a checkpoint holds them."""
    return [rollout.state() for rollout in pending]


def _versions(completion: Completion, version: int | None) -> tuple[VersionedTokens, ...]:
    """Return the versions of the weights that sampled a completion.

    `version`: of all of its tokens, unless it is a PartialCompletion.
    """
    if isinstance(completion, PartialCompletion):
        return completion.versions
    return (VersionedTokens(version, completion.length),)


def _prompt_tokens(cache: TokenCache, prompt_id: int) -> list[int]:
    """Return the token ids of a prompt of the cache."""
    tokens, _ = cache.segments(prompt_id)[0]
    return tokens.tolist()


def _row_sample(cache: TokenCache, prompt_id: int) -> Sample:
    """Return a prompt of the cache with the completion in its row, and without a reward.

    The completion begins at the first token of the row that is learned, and ends at the last one.
    """
    tokens, learn = cache.segments(prompt_id)[1]
    (targets,) = np.nonzero(learn)
    # The first token of a row has none before it that could predict it.
    start = max(1, int(targets[0]))
    stop = int(targets[-1]) + 1
    completion = RowCompletion(
        tokens=tokens[start:stop].tolist(),
        # Nobody has sampled them.
        log_probs=[math.nan] * (stop - start),
        ended=True,
        learned=[bool(flag) for flag in learn[start:stop]],
    )
    domain = cache.meta(prompt_id)["domain"]
    prompt_tokens = tokens[:start].tolist()
    return Sample(prompt_id, prompt_tokens, completion, domain, math.nan, applies=False)


def _samples_to_episodes(cache: TokenCache, samples: Sequence[Sample]) -> Episodes:
    """Return samples for prompts of `cache` as `Episodes`, see `_to_episodes`."""
    prompts = [sample.prompt_tokens for sample in samples]
    completions = [sample.completion for sample in samples]
    metas = [cache.meta(sample.prompt_id) for sample in samples]
    return _to_episodes(prompts, completions, metas)


def _to_episodes(
    prompts: list[list[int]], completions: list[Completion], metas: list[dict[str, Any]]
) -> Episodes:
    """Return completions as `Episodes` with the sampler's log-probs.

    `prompts`: the tokens of each prompt. `metas`: the metadata of each prompt, which may have images.
    """
    prompt_tokens = [np.asarray(prompt, np.int64) for prompt in prompts]
    tokens = []
    have_ended = []
    sampled = []
    for completion in completions:
        tokens.append(np.asarray(completion.tokens, np.int64))
        have_ended.append(completion.ended)
        if isinstance(completion, Conversation):
            sampled.append(completion.sampled)
        elif isinstance(completion, RowCompletion):
            sampled.append(completion.learned)
        else:
            sampled.append([True] * len(completion.tokens))
    episodes = Episodes.start(prompt_tokens, tokens, have_ended, metas, sampled)
    sampler_NM = torch.zeros_like(episodes.log_probs_NM)
    for row, completion in enumerate(completions):
        sampler_NM[row, : len(completion.tokens)] = torch.tensor(completion.log_probs)
    return replace(episodes, sampler_log_probs_NM=sampler_NM)


def _sampler_metrics(episodes: Episodes) -> dict[str, float]:
    """Return how far the sampler is from the policy at the sampled tokens, in nats.

    `sampler_log_ratio` is the mean of log π/π_sampler, and `sampler_log_ratio_max` its largest absolute
    value. π is the policy before it learns from these episodes.
    """
    log_ratio_NM = episodes.log_probs_NM - episodes.sampler_log_probs_NM
    log_ratio_NM = torch.where(episodes.mask_NM, log_ratio_NM, 0.0)
    tokens = max(1, int(episodes.mask_NM.sum()))
    return {
        "sampler_log_ratio": float(log_ratio_NM.sum() / tokens),
        "sampler_log_ratio_max": float(log_ratio_NM.abs().max()),
    }


def _most_common_reasons(sampled: ScoredSamples) -> str:
    """Return the most frequent reasons for which samples have no reward, each with its number."""
    reasons: Counter[str] = Counter()
    for name, counts in sampled.failures.items():
        for reason, count in counts.items():
            reasons[f"{name} {reason}"] += count
    if sampled.left_out:
        reasons["no reward applies"] = sampled.left_out
    parts = [f"{reason} ({count}×)" for reason, count in reasons.most_common(MOST_REASONS)]
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


def _reward_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the metrics of the rewards of evaluated samples.

    - `reward`: the mean over samples that have one, also of each domain (`_domain_rewards`).
    - `reward_failed`: the share of samples whose reward failed.
    - `reward_left_out`: the share of samples to which no reward applies; absent if it is 0.
    """
    rewards = [sample.reward for sample in samples]
    failed = sum(sample.is_failed for sample in samples)
    metrics = {"reward": _mean(rewards), **_domain_rewards(samples)}
    metrics["reward_failed"] = failed / len(samples)
    left_out = _count_left_out(samples)
    if left_out:
        metrics["reward_left_out"] = left_out / len(samples)
    return metrics


def _conversation_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the mean number of turns, calls of tools and failed calls; empty without environment."""
    conversations = []
    for sample in samples:
        if isinstance(sample.completion, Conversation):
            conversations.append(sample.completion)
    if not conversations:
        return {}
    number = len(conversations)
    return {
        "turns": sum(len(conversation.turns) for conversation in conversations) / number,
        "tool_calls": sum(conversation.tool_calls for conversation in conversations) / number,
        "tool_errors": sum(conversation.tool_errors for conversation in conversations) / number,
    }


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
    """Return mean and largest number of sampled tokens, and the share of completions that ended.

    They are NaN without samples.
    """
    if not samples:
        return {"length": math.nan, "length_max": math.nan, "ended": math.nan}
    lengths = [sample.completion.length for sample in samples]
    ended = sum(sample.completion.ended for sample in samples)
    return {
        "length": sum(lengths) / len(lengths),
        "length_max": float(max(lengths)),
        "ended": ended / len(lengths),
    }
