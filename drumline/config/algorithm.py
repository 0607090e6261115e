"""What one algorithm answers to the rest of the house: the base of all specs. No torch here.

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
# By an objective, of the logits of a language model.
HeadOutput = Literal["cross_entropy", "log_probs", "entropy"]


@dataclass(frozen=True)
class AuxiliaryModel:
    """A model besides the policy. `where`: the key of the YAML that it comes from."""

    model: ModelConfig
    where: str
    head: Literal["lm", "score"] = "lm"
    trainable: bool = False
    lr_ratio: float = 1.0


class Switchable(Protocol):
    """An adapter, or none. `switches`: the model without it can be asked, too."""

    @property
    def switches(self) -> bool: ...


class Trained(Protocol):
    """What an algorithm reads of a Config to say which other models it needs."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def adapter(self) -> Switchable: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...


class AlgorithmSpec(Spec):
    """The answers of an algorithm that learns from rows of text by their tokens, and needs no other model."""

    group: ClassVar[str] = "algorithms"
    modules: ClassVar[str] = "drumline.algorithms.{}.spec"
    thing: ClassVar[str] = "algorithm"
    yaml_key: ClassVar[str] = "algorithm"

    # ---- what `init` and the YAML need to know
    columns: ClassVar[str] = (
        "`messages`, or `prompt` and `completion`, or `text`"  # of a row, for people
    )
    rate: ClassVar[float] = 2e-5  # a usual peak learning rate to begin with
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # what the eval event has, for `eval.metric`
    best_by: ClassVar[
        dict[str, str]
    ] = {}  # default of `eval.metric`, where it is not loss, and its `eval.mode`

    # ---- rows and samples
    plain: ClassVar[bool] = False  # learns from any samples by any module, model.kind python
    packs: ClassVar[bool] = False  # rows may share a sequence
    shares_prompts: ClassVar[bool] = False  # a sample has rows with a prompt in common
    cuts: ClassVar[bool] = (
        False  # packs are cut from a stream of tokens, so that a row may go on in the next
    )
    rows_per_sample: ClassVar[int] = (
        1  # sequences of up to data.max_length tokens that a sample is made of
    )
    sees_images: ClassVar[bool] = False  # rows may have images beside text
    has_answers: ClassVar[bool] = (
        False  # a row is a prompt and the answer to it, which a generated one can be compared with
    )
    writes: ClassVar[bool] = True  # the trained model writes text; otherwise it gives numbers
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"cross_entropy"})
    objective: ClassVar[str] = ""  # module:name of what makes the objective of a spec, for `build`

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
        """Whether `collator` also gets, for each sample, the nearest sample before it with another prompt.

        The samples are those of the global batch, or of the whole evaluation set, around the end.
        The meta of a cached sample says in `prompt` which prompt it has.
        """
        return False

    @property
    def samples_in_turn(self) -> int:
        """What a global batch has to be a multiple of."""
        return 1

    @property
    def steps_in_turn(self) -> int:
        """Optimizer steps on the same samples, between which a run cannot stop."""
        return 1

    @property
    def new_tokens(self) -> int:
        """Tokens of data.max_length that a row may not take: the completion of a prompt needs them."""
        return 0

    @property
    def rollout(self) -> RolloutSpec | None:
        """The algorithm itself where it learns from completions that it samples."""
        return None

    def cache_parts(self) -> dict[str, Any]:
        """What the token cache depends on besides the kind, the sources and the settings of `data`."""
        return {}

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> Any:
        """A `data.encode.RowEncoder`. `vision`: of a vision-language model. Raises DataError where the tokenizer lacks what the algorithm
        needs, ConfigError for settings that mean nothing to it."""
        raise NotImplementedError

    def check_rows(self, train: Any) -> None:
        """Raises DataError if the algorithm cannot learn from the rows of a token cache. Streams are not checked: nobody knows all rows."""

    def classes(self, train: Any, held_out: list[Any]) -> tuple[str, ...]:
        """The classes of the samples in the token caches, in order; none where they have no class. `held_out`: of each evaluation set."""
        return ()

    def measures(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `metrics` that an evaluation has where these are the classes."""
        return self.metrics

    def collator(self, plan: Any, width: int | None) -> Callable[[Any], Callable[..., Any]]:
        """Token cache → sample ids (-1: a filler) → micro-batch, a `data.batches.Batch`. `width`: tokens of all rows; None: as many as
        the longest has. Where `pairs_with_previous`, the ids of the samples before these come
        second, -1 where all samples have the same prompt.
        """
        raise NotImplementedError

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any] | None:
        """A row of at least `length` tokens, for `plan --probe`; `random_text(n)` gives n words. None where random words will not do."""
        return None

    def traced_batch(self, plan: Any, rows: int, length: int, channels: int) -> Any:
        """A micro-batch in which every row has the full length and every token has a loss. `channels`: of images."""
        raise NotImplementedError

    # ---- models and the objective
    def reference_of(self, config: Trained) -> ReferenceKind:
        """Where a batch has the log-probabilities of a reference model from."""
        return "none"

    @property
    def extra_forwards(self) -> int:
        """Forward passes of the policy in a step before that of the loss, such as `Algorithm.first_pass`."""
        return 0

    @property
    def reference_forwards(self) -> int:
        """Forward passes of the reference over a batch in a step: 2 if `Algorithm.first_pass` is about other rows than the loss."""
        return 1

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Name → model besides the policy: `reference`, `value`, and `reward`, `reward2`, … in the order of the config."""
        return {}

    def build_in(self, base_dir: Path) -> Any:
        """`build`; files that the config names are relative to `base_dir`."""
        return self.build()

    def build(self) -> Any:
        """The objective: an `algorithms.base.Algorithm`."""
        module, _, name = self.objective.partition(":")
        return getattr(importlib.import_module(module), name)(self)


class ChunkedSpec(AlgorithmSpec):
    """The loss needs logits, of some tokens at a time."""

    loss_chunk: Amount = Field(
        1024, description="Tokens whose logits exist at once in the loss; 0: all of them."
    )


class ReferencedSpec(AlgorithmSpec):
    """The policy is compared with a reference model. The subclass declares both fields."""

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
    """The policy learns from completions that it samples. The subclass declares `group_size`, completions of each prompt."""

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
        """Rollouts under way while another one is learned from."""
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
        """So that a rollout has whole groups."""
        return self.group_size // math.gcd(self.group_size, self.minibatches)

    @property
    def steps_in_turn(self) -> int:
        return self.epochs * self.minibatches

    @property
    def on_policy(self) -> bool:
        """No step lies between a rollout and the loss, so the rollout's log-probabilities are those of the step's own forward."""
        return self.steps_in_turn == 1

    @property
    def rounds(self) -> int:
        """How often a rollout may sample, until it has as many groups to learn from as it wants."""
        return 1

    def credited(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """`data.batches.Episodes` with advantages (and returns, where a value is learned) and the weights of tokens. `rewards_N`: fp32,
        NaN for an episode without one, from which nothing is learned. `cost_NM`: fp32, of each
        token the divergence times its weight.
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
