"""The base classes of algorithm specs, which tell the rest of the code all about an algorithm.

This module does not import torch.

A spec is the section `algorithm` of the YAML itself. Its fields are the keys that a user may set;
its methods and class variables are what data, planner, training and export read. Whatever needs
torch or the tokenizer is imported inside the method that needs it. The loss itself is another
class, an `algorithms.base.Algorithm`, which `build` makes. `drumline.algorithms.specs` has
bases for text, pairs and prompts: an algorithm of one's own overrides only what differs.

Terms: a *pair* is a chosen and a rejected answer; an *episode* one sampled completion of a prompt
with its reward; a *group* the episodes of one prompt. `batch.global_samples` counts what an
optimizer step learns from: sequences, pairs, rows or episodes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from drumline.config.data import PROMPT_FORMS, TEXT_FORMS, DataConfig, Forms
from drumline.config.model import Head, ModelConfig
from drumline.config.optimizer import OptimizerConfig
from drumline.config.registry import Registered, Spec
from drumline.config.rollouts import (
    REWARDING_ENVIRONMENTS,
    CurriculumConfig,
    Environment,
    Generator,
    HFGenerator,
    KLConfig,
    ModelReward,
    Reward,
    RewardFailureConfig,
    TaskReward,
    sees_groups,
)
from drumline.config.section import Above0, Amount, RefusesNull, Weight
from drumline.config.teachers import BaseTeacher, ServedTeacher, Teacher

ReferenceKind = Literal["none", "precomputed", "live", "adapter"]
# The most rollouts that are sampled ahead of the one that is learned from.
MOST_AHEAD = 8
# How a distilled model's distributions are compared with its teacher's.
DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
# What an objective may ask of the logits of a language model.
HeadOutput = Literal["cross_entropy", "log_probs", "entropy"]


@dataclass(frozen=True)
class AuxiliaryModel:
    """A model that an algorithm uses besides the policy.

    Attributes:
        where: Key of the YAML that it comes from.
    """

    model: ModelConfig
    where: str
    head: Literal["lm", "score"] = "lm"
    trainable: bool = False
    lr_ratio: float = 1.0


class AdapterSection(Protocol):
    """The section `adapter`, of which an algorithm reads this property alone."""

    @property
    def is_reference_if_disabled(self) -> bool: ...


class Trained(Protocol):
    """The part of a Config from which an algorithm tells which other models it needs."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def adapter(self) -> AdapterSection: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...


class AlgorithmSpec(Spec):
    """The base of all algorithms.

    Its defaults are those of an algorithm that learns from the tokens of rows of text and needs no
    other model.
    """

    group: ClassVar[str] = "algorithms"
    module_pattern: ClassVar[str] = "drumline.algorithms.{}.spec"
    noun: ClassVar[str] = "algorithm"
    yaml_key: ClassVar[str] = "algorithm"

    # ---- what `init` and the YAML need to know
    # The columns of a row, as text for people.
    columns: ClassVar[str] = "`messages`, or `prompt` and `completion`, or `text`"
    # A usual peak learning rate to begin with.
    rate: ClassVar[float] = 2e-5
    # The metrics of an evaluation, which `eval.metric` may name.
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    # Defaults of `eval.metric` and `eval.mode`, if the metric is not the loss.
    best_by: ClassVar[dict[str, str]] = {}

    # ---- rows and samples
    # Whether it trains torch modules of the user's own, and no Hugging Face models. Then samples
    # may be of any type.
    is_for_own_modules: ClassVar[bool] = False
    # Whether several short rows may be packed into one sequence.
    packs: ClassVar[bool] = False
    # Whether the rows of a sample have a prompt in common.
    shares_prompts: ClassVar[bool] = False
    # Whether all rows are joined to a stream of tokens, which is cut into packs of data.max_length.
    # A row may then continue in the next pack.
    cuts: ClassVar[bool] = False
    # Whether rows may have images beside text.
    sees_images: ClassVar[bool] = False
    # Whether a row is a prompt with its answer, which a generated answer can be compared with.
    has_answers: ClassVar[bool] = False
    # Whether the trained model writes on behind a prompt. Otherwise it gives scores or classes, or
    # reads the prompt by an encoder.
    writes: ClassVar[bool] = True
    # Whether a query and a text stand in one row, into which both must fit.
    joins_texts: ClassVar[bool] = False
    # The library that loads an export, and what it does, as a model's card on the hub names both.
    library: ClassVar[str] = "transformers"
    task: ClassVar[str | None] = None
    # What the objective reads of the logits. Memory and communication of the head follow from it.
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"cross_entropy"})
    # The class or function, as module:name, that `build` calls with the spec.
    objective: ClassVar[str] = ""

    # The auxiliary model that `reference_of` is about.
    reference_role: ClassVar[str] = "reference"

    @property
    def forms(self) -> Forms:
        """The forms that a row may have, each a tuple of columns; `data.sources` reads them."""
        return TEXT_FORMS

    @property
    def evaluation_spec(self) -> AlgorithmSpec:
        """The algorithm that reads the rows of `data.eval`, which may need fewer columns."""
        return self

    @property
    def head(self) -> Head:
        """The head of the trainable model."""
        return "lm"

    @property
    def rows_per_sample(self) -> int:
        """Number of sequences, each of up to data.max_length tokens, that make a sample."""
        return 1

    @property
    def needs_mismatched_pairs(self) -> bool:
        """Whether the loss needs prompts with answers to other prompts, as KTO's KL estimate does.

        The collator then also gets, for each sample, the id of the nearest earlier sample with
        another prompt. In training it is looked for in the global batch, in an evaluation in the
        whole set, and the last sample counts as earlier than the first. Prompts are compared by the
        key `prompt` in the metadata of cached samples.
        """
        return False

    @property
    def batch_multiple(self) -> int:
        """The number of samples of a global batch must be a multiple of this number."""
        return 1

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps that learn from one rollout; 1 without rollouts.

        A run saves and stops only between rollouts.
        """
        return 1

    @property
    def new_tokens(self) -> int:
        """Number of tokens of data.max_length that are kept free for the completion of a prompt."""
        return 0

    @property
    def rollout(self) -> SamplingSpec | None:
        """The algorithm itself if it learns from completions that it samples; None otherwise."""
        return None

    @property
    def teaching(self) -> TeachingSpec | None:
        """The algorithm itself if it learns from a teacher's distributions; None otherwise."""
        return None

    def spec_for_encoder_decoder(self, decoder_start: int) -> AlgorithmSpec | None:
        """Return the algorithm in place of this one for a model with an encoder and a decoder.

        None if this one does not train such models. `decoder_start`: the id of the decoder's first
        token.
        """
        return None

    def cache_parts(self) -> dict[str, Any]:
        """Return what else the token cache depends on: besides the kind, the sources and `data`."""
        return {}

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> Any:
        """Return a `data.encode.RowEncoder`.

        Args:
            tokenizer: The tokenizer of the model.
            data: The section `data`.
            vision: The image part of a vision-language model; None for other models.

        Raises:
            DataError: The tokenizer lacks what the algorithm needs.
            ConfigError: A setting has no meaning for the algorithm.
        """
        raise NotImplementedError

    def fitted_to(self, values: dict[str, Any]) -> AlgorithmSpec:
        """Return this section with what `drumline init` reads from the first row of the data.

        `values`: the row's columns under our names.
        """
        return self

    def segment_names(self, segments: int) -> list[str]:
        """Return the names of a row's segments, as `drumline preview` shows them; empty for none.

        `segments`: how many the row has.
        """
        return [""] * segments

    def check_rows(self, train: Any) -> None:
        """Check that the algorithm can learn from the rows of a token cache.

        Streams are not checked, since nobody knows all their rows.

        Raises:
            DataError: It cannot.
        """

    def classes(self, train: Any, held_out: list[Any]) -> tuple[str, ...]:
        """Return the classes of the samples in order; empty if samples have no class.

        Args:
            train: Token cache of the training set.
            held_out: Token cache of each evaluation set.
        """
        return ()

    def measures(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the `metrics` that an evaluation computes if samples have the classes `labels`."""
        return self.metrics

    def collator(self, plan: Any, width: int | None) -> Callable[[Any], Callable[..., Any]]:
        """Return a function that takes a token cache and returns a collator for its samples.

        A collator takes a list of sample ids, -1 for a filler, and returns a `data.batches.Batch`.
        If `needs_mismatched_pairs`, it also takes a list with the id of the previous sample of
        another prompt for each of them, -1 if all samples have the same prompt.

        Args:
            plan: The plan.
            width: Number of tokens that all rows are padded to; None: the longest row of the batch
                decides.
        """
        raise NotImplementedError

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any] | None:
        """Return a row of at least `length` tokens for `plan --probe`; None if words do not suffice.

        `random_text(n)` returns n random words.
        """
        return None

    def traced_batch(self, plan: Any, rows: int, length: int, channels: int) -> Any:
        """Return the micro-batch with which `planner.trace` traces a step, to count its memory.

        It is the largest there may be: its rows have the full length, and a loss at every token.

        Args:
            plan: The plan.
            rows: Number of rows.
            length: Tokens of each row.
            channels: Channels of an image.
        """
        raise NotImplementedError

    # ---- models and the objective
    def reference_of(self, config: Trained) -> ReferenceKind:
        """Return the source of a reference model's log-probabilities."""
        return "none"

    @property
    def extra_forwards(self) -> int:
        """Number of forward passes of the policy over a batch before the one of the loss.

        It is 1 if the objective has a `first_pass` (see `algorithms.base.Algorithm`).
        """
        return 0

    def first_numbers(self, hidden: int) -> int:
        """Return how many numbers of each sample are kept from the first pass until the step ends.

        Every rank keeps those of the whole global batch. A few count as none. `hidden`: width of the
        model's hidden states.
        """
        return 0

    @property
    def reference_forwards(self) -> int:
        """Number of forward passes of the reference over a batch in a step.

        It is 2 if the objective's `first_pass` (see `algorithms.base.Algorithm`) needs other rows
        than the loss.
        """
        return 1

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Return the models besides the policy by name: `reference`, `teacher`, `value`, `reward`…"""
        return {}

    def export_files(self, plan: Any, hidden: int) -> dict[str, Any]:
        """Return JSON files that an export has beside the model, as path in its folder → content.

        `hidden`: width of the model's hidden states.
        """
        return {}

    def build_in(self, base_dir: Path) -> Any:
        """Return what `build` returns. Files that the config names are relative to `base_dir`."""
        return self.build()

    def build(self) -> Any:
        """Return the objective, an `algorithms.base.Algorithm`."""
        module, _, name = self.objective.partition(":")
        return getattr(importlib.import_module(module), name)(self)


class ChunkedSpec(AlgorithmSpec):
    """The base of algorithms whose loss needs logits, computed for some tokens at a time."""

    loss_chunk: Amount = Field(
        1024, description="Tokens whose logits exist at once in the loss; 0: all of them."
    )


class ReferencedSpec(AlgorithmSpec):
    """The base of algorithms that compare the policy with a reference model.

    The subclass declares the fields `reference` and `reference_model`.
    """

    if TYPE_CHECKING:
        reference: Literal["auto", "precomputed", "live", "adapter"]
        reference_model: ModelConfig | None

    def reference_of(self, config: Trained) -> ReferenceKind:
        if self.reference != "auto":
            return self.reference
        if config.adapter.is_reference_if_disabled and self.reference_model is None:
            return "adapter"
        return "precomputed"

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        if self.reference_of(config) == "adapter":
            return {}
        return {
            "reference": AuxiliaryModel(
                self.reference_model or config.model, "algorithm.reference_model"
            )
        }


class TeachingSpec(ChunkedSpec):
    """The base of algorithms whose model learns from the distributions of a teacher.

    At each token that is learned from, the teacher gives a distribution of the next token.
    """

    reference_role: ClassVar[str] = "teacher"
    teacher: Teacher = Field(
        description="The model to learn from, with the tokenizer of the trained one: an id, a section as that of `model`, or a section of"
        " kind server. base (distill with cross_entropy_weight): the trained model with its adapter switched off (self-distillation).",
    )
    divergence: DivergenceKind = Field(
        "forward_kl",
        description="The loss of a token. forward_kl: KL(teacher ‖ model), so the model covers all that the teacher may say. reverse_kl:"
        " KL(model ‖ teacher), so the model says only what the teacher finds likely. jsd: between the two, by beta (generalised"
        " Jensen-Shannon divergence).",
    )
    beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="divergence: jsd: the teacher's share in the mixture that both models are compared with.",
    )
    top_k: int = Field(
        32,
        ge=0,
        le=4096,
        description="Number of likeliest next tokens that the two models are compared at; all others count as one token. 0: the whole"
        " vocabulary.",
    )
    temperature: Above0 = Field(
        1.0, description="The logits of both models are divided by it in the divergence."
    )

    @model_validator(mode="after")
    def _beta_is_read(self) -> TeachingSpec:
        """Refuse beta if it would have no effect."""
        if self.beta != 0.5 and self.divergence != "jsd":
            raise ValueError("beta requires divergence: jsd")
        return self

    @model_validator(mode="after")
    def _refuse_what_servers_lack(self) -> TeachingSpec:
        """Refuse what a server does not give: the whole vocabulary, and another temperature."""
        if self.served_teacher is None:
            return self
        if self.top_k == 0:
            raise ValueError(
                "top_k: 0 is the whole vocabulary, and a server gives the likeliest tokens: set top_k, such as 20"
            )
        if self.temperature != 1:
            raise ValueError("a server gives log-probs at temperature 1: leave temperature out")
        return self

    @property
    def served_teacher(self) -> ServedTeacher | None:
        """The teacher if it is on servers; None otherwise."""
        if isinstance(self.teacher, ServedTeacher):
            return self.teacher
        return None

    @property
    def is_own_teacher(self) -> bool:
        """Whether the teacher is the trained model with its adapter switched off."""
        return isinstance(self.teacher, BaseTeacher)

    @property
    def has_second_loss(self) -> bool:
        """Whether the loss has another part than the divergence from the teacher.

        Without one, a model whose teacher is its own base learns nothing.
        """
        return False

    @property
    def asks_teacher_live(self) -> bool:
        """Whether the teacher is asked during the run. If not, it is asked before the first step."""
        return True

    @property
    def teaching(self) -> TeachingSpec:
        return self

    def reference_of(self, config: Trained) -> ReferenceKind:
        if not self.asks_teacher_live:
            return "precomputed"
        if self.served_teacher is not None:
            # No model here computes anything for it.
            return "none"
        if self.is_own_teacher:
            return "adapter"
        return "live"

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        if not isinstance(self.teacher, ModelConfig):
            return {}
        return {"teacher": AuxiliaryModel(self.teacher, "algorithm.teacher")}


class SamplingSpec(ChunkedSpec):
    """The base of algorithms whose policy learns from completions that it samples.

    The subclass declares `group_size`, the number of completions of each prompt.

    A sample of batch.global_samples is one episode. If the loss compares several episodes of a group,
    they are one sample: the subclass then overrides `rows_per_sample`, `samples_of_group` and
    `learned_episodes`.
    """

    if TYPE_CHECKING:

        @property
        def group_size(self) -> int: ...

    columns: ClassVar[str] = "`prompt`, and what the rewards ask for"
    rate: ClassVar[float] = 1e-6
    # And reward/DOMAIN.
    metrics: ClassVar[tuple[str, ...]] = (
        "reward",
        "reward_failed",
        "length",
        "length_max",
        "ended",
    )
    best_by: ClassVar[dict[str, str]] = {"metric": "reward", "mode": "max"}
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs", "entropy"})

    @property
    def lookahead(self) -> int:
        """The number of rollouts that may be pending while another one is learned from."""
        return 0

    @property
    def segments(self) -> int:
        """The most segments of a completion, each of which is sampled by other weights (`rl.partial`)."""
        return 1

    @property
    def credits_turns(self) -> bool:
        """Whether each turn of an episode has advantages by its own rewards and later ones."""
        return False

    rewards: Annotated[
        list[Reward], RefusesNull("list the rewards, or leave it out for that of tasks")
    ] = Field(
        default_factory=lambda: list[Reward]([TaskReward()]),
        min_length=1,
        description="What an episode is worth: a weighted sum.",
    )
    reward_workers: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="Processes of each rank that compute rewards; null: one per core, shared by the ranks, at most 4.",
    )
    generator: Generator = Field(
        default_factory=HFGenerator, description="What samples the completions."
    )
    environment: Environment | None = Field(
        None,
        description="What answers the model's turns, in processes of its own; null: an episode is one completion. With any kind"
        " but tools the default of rewards is environment.",
    )
    epochs: int = Field(1, gt=0, le=10**4, description="Passes over the episodes of a rollout.")
    minibatches: int = Field(
        1,
        gt=0,
        le=10**6,
        description="Optimizer steps a pass: a rollout has this × batch.global_samples episodes (online_dpo: pairs).",
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig, description="How many prompts each domain gives."
    )
    missing_stop_penalty: Weight = Field(
        0.0, description="Taken off the reward of a completion that was cut before its end."
    )

    @model_validator(mode="before")
    @classmethod
    def _rewarded_by_environment(cls, values: Any) -> Any:
        """Take the environment's rewards, if it gives some and no others are given."""
        if not isinstance(values, dict) or "rewards" in values:
            return values
        environment = values.get("environment")
        if isinstance(environment, dict) and environment.get("kind") in REWARDING_ENVIRONMENTS:
            return {**values, "rewards": [{"kind": "environment"}]}
        return values

    @model_validator(mode="after")
    def _fits_environment(self) -> SamplingSpec:
        """Refuse a turn that no episode has room for, and rewards that no environment gives."""
        environment = self.environment
        if environment is not None and environment.max_tokens < self.generator.max_new_tokens:
            raise ValueError(
                f"environment.max_tokens {environment.max_tokens} has no room for a turn of"
                f" generator.max_new_tokens {self.generator.max_new_tokens}"
            )
        if environment is not None and self.segments > 1:
            raise ValueError(
                "partial continues completions of one turn, and an environment has several: take one of them out"
            )
        gives_rewards = environment is not None and environment.gives_rewards
        asks_for_rewards = any(reward.kind == "environment" for reward in self.rewards)
        if asks_for_rewards and not gives_rewards:
            raise ValueError(
                "a reward of kind environment needs an environment that gives rewards, such as"
                " `environment: {kind: class}`"
            )
        return self

    @model_validator(mode="after")
    def _refuse_rewards_of_single_completions(self) -> SamplingSpec:
        """Refuse a reward that compares the completions of a prompt if there is only one."""
        compares = any(sees_groups(reward) for reward in self.rewards)
        if compares and self.group_size == 1:
            raise ValueError(
                "a reward with `of: group` compares the completions of a prompt, and each prompt is completed once: set group_size to 2"
                " or more if the algorithm has that key, or take the reward out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_credit_without_turn_rewards(self) -> SamplingSpec:
        """Refuse credit by turn if no reward belongs to a turn."""
        has_turn_rewards = any(
            reward.kind == "environment" and reward.weight for reward in self.rewards
        )
        if self.credits_turns and not has_turn_rewards:
            raise ValueError(
                "credit: turn requires a reward of kind environment, since no other is of a turn: add one, or take credit out"
            )
        return self

    @property
    def forms(self) -> Forms:
        return PROMPT_FORMS

    @property
    def rollout(self) -> SamplingSpec:
        return self

    @property
    def new_tokens(self) -> int:
        if self.environment is not None:
            return self.environment.max_tokens
        return self.generator.max_new_tokens

    @property
    def turns(self) -> int:
        """The most turns of the model in an episode."""
        if self.environment is not None:
            return self.environment.turns
        return 1

    def cache_parts(self) -> dict[str, Any]:
        if self.environment is not None:
            # Only then a prompt is cached as the row has it, too.
            return {"keeps_row": True}
        return {}

    @property
    def batch_multiple(self) -> int:
        """The number of samples of a global batch must be a multiple of this number.

        A rollout, which has `minibatches` global batches, then holds whole groups.
        """
        return self.samples_of_group // math.gcd(self.samples_of_group, self.minibatches)

    @property
    def samples_of_group(self) -> int:
        """The number of samples that a group is in a global batch: one for each of its episodes."""
        return self.group_size

    def episodes_of_rollout(self, global_samples: int) -> int:
        """Return the number of episodes that are sampled for a rollout.

        `global_samples`: the samples of a global batch.
        """
        samples = self.minibatches * global_samples
        return samples * self.group_size // self.samples_of_group

    def learned_episodes(self, rewards_N: Any, tokens_N: Any) -> list[int]:
        """Return the indices of the episodes of a rollout that are learned from, at least one sample's.

        With several rows a sample, first come the first rows of all samples, then the second ones. If
        there are fewer samples than the steps of the rollout take, fillers complete their batches.

        Args:
            rewards_N: fp32, the reward of each episode, group after group; NaN if it has none.
            tokens_N: int64, the number of tokens that the policy sampled in each episode.
        """
        return list(range(len(rewards_N)))

    @property
    def steps_per_rollout(self) -> int:
        return self.epochs * self.minibatches

    @property
    def on_policy(self) -> bool:
        """Whether the weights that sample a rollout are those of the step that learns from it.

        Then the rollout's log-probabilities are those of the step's own forward pass. They are not
        if several steps learn from a rollout, or if it was sampled ahead.
        """
        return self.steps_per_rollout == 1 and self.lookahead == 0

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the loss reads the log-probabilities that the policy had when a rollout was sampled."""
        return not self.on_policy

    @property
    def failure_limit(self) -> RewardFailureConfig | None:
        """When to end a run whose rewards keep failing; None: never, as the loss reads no rewards."""
        return None

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with a reference model, at the tokens of its rollouts."""
        return False

    @property
    def measures_divergence(self) -> bool:
        """Whether each rollout measures the policy's divergence from the reference before its steps."""
        return self.has_reference

    @property
    def loss_temperature(self) -> float:
        """The temperature of the log-probabilities that the loss reads: that of the sampling."""
        return self.generator.temperature

    @property
    def sampled_share(self) -> float:
        """The share of the prompts that the policy completes itself.

        For the others the completion in their row is learned, the second segment of their sample.
        """
        return 1.0

    @property
    def rounds(self) -> int:
        """Most times that a rollout samples, until it has enough groups to learn from."""
        return 1

    def assign_credit(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return the episodes with advantages and with the weight of each token in the loss.

        They also get returns if a value model is trained. N is the number of episodes, and M the
        number of tokens of the longest completion.

        Args:
            episodes: The `data.batches.Episodes` of a rollout.
            rewards_N: fp32, NaN for an episode without a reward, from which nothing is learned.
            cost_NM: fp32, the cost of the divergence from the reference at each token: the KL
                estimate times the coefficient.
        """
        return self.credited(episodes, rewards_N, cost_NM)

    def credited(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """The name that `assign_credit` had until 0.6. Plug-ins may still define it in its place."""
        raise NotImplementedError

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        models: dict[str, AuxiliaryModel] = {}
        number = 0
        for index, reward in enumerate(self.rewards):
            if not isinstance(reward, ModelReward):
                continue
            number += 1
            name = "reward"
            if number > 1:
                name = f"reward{number}"
            where = f"algorithm.rewards.{index}.model"
            models[name] = AuxiliaryModel(reward.model, where, "score")
        return models


class RewardedSpec(SamplingSpec):
    """The base of algorithms whose policy learns from the rewards of its completions."""

    reward_failure: RewardFailureConfig = Field(
        default_factory=RewardFailureConfig, description="What is done when rewards keep failing."
    )

    @property
    def failure_limit(self) -> RewardFailureConfig:
        return self.reward_failure


class RolloutSpec(RewardedSpec):
    """The base of algorithms that learn from advantages of completions.

    They limit how far the policy moves, and may keep it near a reference model.
    """

    clip: Above0 = Field(
        0.2,
        description="The probability ratio counts within 1 ± clip only (PPO, Schulman et al. 2017).",
    )
    kl: KLConfig = Field(
        default_factory=KLConfig, description="Divergence from a reference model, as a cost."
    )

    @property
    def has_reference(self) -> bool:
        return self.kl.coefficient > 0

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        models: dict[str, AuxiliaryModel] = {}
        if self.has_reference:
            other = self.kl.reference_model
            models = frozen_reference(config, other, "algorithm.kl.reference_model")
        return models | super().auxiliary_models(config)


def frozen_reference(
    config: Trained, other: ModelConfig | None, where: str
) -> dict[str, AuxiliaryModel]:
    """Return the role of a frozen reference model, which is loaded beside the policy.

    It is empty if the policy without its adapter is the reference.

    Args:
        config: The config of the run.
        other: Another reference than the model that training starts from; None: there is none.
        where: The key of the YAML that sets `other`.
    """
    if other is None and config.adapter.is_reference_if_disabled:
        return {}
    return {"reference": AuxiliaryModel(other or config.model, where)}


AlgorithmField = Annotated[AlgorithmSpec, Registered(AlgorithmSpec)]
