"""The base classes of algorithm specs, which tell the rest of the code all about an algorithm.

This module does not import torch.

A spec is the section `algorithm` of the YAML itself. Its fields are the keys that a user may set;
its methods and class variables are what data, planner, training and export read. Whatever needs
torch or the tokenizer is imported inside the method that needs it. `drumline.algorithms.specs` has
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

from pydantic import Field

from drumline.config.data import PROMPT_FORMS, TEXT_FORMS, DataConfig, Forms
from drumline.config.model import Head, ModelConfig
from drumline.config.optimizer import OptimizerConfig
from drumline.config.registry import Registered, Spec
from drumline.config.rollouts import (
    CurriculumConfig,
    Generator,
    HFGenerator,
    KLConfig,
    ModelReward,
    Reward,
    RewardFailureConfig,
    TaskReward,
)
from drumline.config.section import Above0, Amount, RefusesNull, Weight

ReferenceKind = Literal["none", "precomputed", "live", "adapter"]
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


class Switchable(Protocol):
    """The section of an adapter. `switches` says whether the model can also run without it."""

    @property
    def switches(self) -> bool: ...


class Trained(Protocol):
    """The part of a Config from which an algorithm tells which other models it needs."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def adapter(self) -> Switchable: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...


class AlgorithmSpec(Spec):
    """The base of all algorithms.

    Its defaults are those of an algorithm that learns from the tokens of rows of text and needs no
    other model.
    """

    group: ClassVar[str] = "algorithms"
    modules: ClassVar[str] = "drumline.algorithms.{}.spec"
    thing: ClassVar[str] = "algorithm"
    yaml_key: ClassVar[str] = "algorithm"

    # ---- what `init` and the YAML need to know
    # The columns of a row, as text for people.
    columns: ClassVar[str] = "`messages`, or `prompt` and `completion`, or `text`"
    rate: ClassVar[float] = 2e-5  # a usual peak learning rate to begin with
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # of the eval event, for `eval.metric`
    # Defaults of `eval.metric` and `eval.mode`, if the metric is not the loss.
    best_by: ClassVar[dict[str, str]] = {}

    # ---- rows and samples
    # Whether it learns from any samples by any module (model.kind python).
    plain: ClassVar[bool] = False
    # Whether rows may share a sequence.
    packs: ClassVar[bool] = False
    # Whether the rows of a sample have a prompt in common.
    shares_prompts: ClassVar[bool] = False
    # Whether packs are cut from a stream of tokens, so that a row may continue in the next pack.
    cuts: ClassVar[bool] = False
    # Number of sequences, each of up to data.max_length tokens, that make a sample.
    rows_per_sample: ClassVar[int] = 1
    # Whether rows may have images beside text.
    sees_images: ClassVar[bool] = False
    # Whether a row is a prompt with its answer, which a generated answer can be compared with.
    has_answers: ClassVar[bool] = False
    # Whether the trained model writes text; otherwise it gives numbers.
    writes: ClassVar[bool] = True
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"cross_entropy"})
    # The class or function, as module:name, that `build` calls with the spec.
    objective: ClassVar[str] = ""

    @property
    def forms(self) -> Forms:
        """The columns that a row may have, see data.sources."""
        return TEXT_FORMS

    @property
    def head(self) -> Head:
        """The head of the trainable model."""
        return "lm"

    @property
    def pairs_with_previous(self) -> bool:
        """Whether `collator` also gets, for each sample, the previous sample with another prompt.

        It is the nearest earlier one of the global batch, or of the whole evaluation set; before
        the first sample comes the last one. The meta of a cached sample has its prompt in `prompt`.
        """
        return False

    @property
    def samples_in_turn(self) -> int:
        """Number of samples that a global batch has to be a multiple of."""
        return 1

    @property
    def steps_in_turn(self) -> int:
        """Number of optimizer steps on the same samples, between which a run cannot stop."""
        return 1

    @property
    def new_tokens(self) -> int:
        """Number of tokens of data.max_length that are kept free for the completion of a prompt."""
        return 0

    @property
    def rollout(self) -> RolloutSpec | None:
        """The algorithm itself if it learns from completions that it samples; None otherwise."""
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
        """Return those of `metrics` that an evaluation has if these are the classes."""
        return self.metrics

    def collator(self, plan: Any, width: int | None) -> Callable[[Any], Callable[..., Any]]:
        """Return a function that makes the collator of a token cache.

        A collator takes sample ids (-1 for a filler) and returns a `data.batches.Batch`. If
        `pairs_with_previous`, its second argument has the ids of the previous samples, -1 if all
        samples have the same prompt.

        Args:
            plan: The plan.
            width: Number of tokens that all rows are padded to; None for those of the longest row.
        """
        raise NotImplementedError

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any] | None:
        """Return a row of at least `length` tokens for `plan --probe`; None if words do not suffice.

        `random_text(n)` returns n random words.
        """
        return None

    def traced_batch(self, plan: Any, rows: int, length: int, channels: int) -> Any:
        """Return a micro-batch whose rows have the full length and a loss at every token.

        `channels` is the number of channels of images.
        """
        raise NotImplementedError

    # ---- models and the objective
    def reference_of(self, config: Trained) -> ReferenceKind:
        """Return the source of a reference model's log-probabilities."""
        return "none"

    @property
    def extra_forwards(self) -> int:
        """Number of the policy's forward passes before that of the loss (`Algorithm.first_pass`)."""
        return 0

    @property
    def reference_forwards(self) -> int:
        """Number of forward passes of the reference over a batch in a step.

        It is 2 if `Algorithm.first_pass` needs other rows than the loss.
        """
        return 1

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Return the models besides the policy by name: `reference`, `value`, `reward`, `reward2`…"""
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
        return (
            "adapter" if config.adapter.switches and self.reference_model is None else "precomputed"
        )

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        if self.reference_of(config) == "adapter":
            return {}
        return {
            "reference": AuxiliaryModel(
                self.reference_model or config.model, "algorithm.reference_model"
            )
        }


class RolloutSpec(ChunkedSpec):
    """The base of algorithms whose policy learns from completions that it samples.

    The subclass declares `group_size`, the number of completions of each prompt.
    """

    if TYPE_CHECKING:
        group_size: int

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
        """Number of rollouts that are sampled while another one is learned from."""
        return 0

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
    reward_failure: RewardFailureConfig = Field(
        default_factory=RewardFailureConfig, description="What is done when rewards keep failing."
    )
    generator: Generator = Field(
        default_factory=HFGenerator, description="What samples the completions."
    )
    epochs: int = Field(1, gt=0, le=10**4, description="Passes over the episodes of a rollout.")
    minibatches: int = Field(
        1,
        gt=0,
        le=10**6,
        description="Optimizer steps a pass: a rollout has this × batch.global_samples episodes.",
    )
    clip: Above0 = Field(
        0.2,
        description="The probability ratio counts within 1 ± clip only (PPO, Schulman et al. 2017).",
    )
    kl: KLConfig = Field(
        default_factory=KLConfig, description="Divergence from a reference model, as a cost."
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig, description="How many prompts each domain gives."
    )
    missing_stop_penalty: Weight = Field(
        0.0, description="Taken off the reward of a completion that was cut before its end."
    )

    @property
    def forms(self) -> Forms:
        return PROMPT_FORMS

    @property
    def rollout(self) -> RolloutSpec:
        return self

    @property
    def new_tokens(self) -> int:
        return self.generator.max_new_tokens

    @property
    def samples_in_turn(self) -> int:
        """Number of samples that a global batch is a multiple of, for whole groups in a rollout."""
        return self.group_size // math.gcd(self.group_size, self.minibatches)

    @property
    def steps_in_turn(self) -> int:
        return self.epochs * self.minibatches

    @property
    def on_policy(self) -> bool:
        """Whether the weights are the same in a rollout and in the step that learns from it.

        Then the rollout's log-probabilities are those of the step's own forward pass.
        """
        return self.steps_in_turn == 1 and self.lookahead == 0

    @property
    def rounds(self) -> int:
        """How often a rollout may sample, until it has as many groups to learn from as it wants."""
        return 1

    def credited(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return `data.batches.Episodes` with advantages and the weights of tokens.

        They also have returns if a value model is trained.

        Args:
            episodes: The episodes.
            rewards_N: fp32, NaN for an episode without a reward, from which nothing is learned.
            cost_NM: fp32, the divergence of each token times its weight.
        """
        raise NotImplementedError

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        found, other = dict[str, AuxiliaryModel](), self.kl.reference_model
        if self.kl.coefficient > 0 and (other is not None or not config.adapter.switches):
            found["reference"] = AuxiliaryModel(
                other or config.model, "algorithm.kl.reference_model"
            )
        judges = [
            (index, reward.model)
            for index, reward in enumerate(self.rewards)
            if isinstance(reward, ModelReward)
        ]
        for number, (index, model) in enumerate(judges, start=1):
            name = "reward" if number == 1 else f"reward{number}"
            found[name] = AuxiliaryModel(model, f"algorithm.rewards.{index}.model", "score")
        return found


Algorithm = Annotated[AlgorithmSpec, Registered(AlgorithmSpec)]
