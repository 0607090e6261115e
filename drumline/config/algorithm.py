"""What one algorithm answers to the rest of the house: the base of all specs. No torch here.

A spec is the section `algorithm` of the YAML itself. Its fields are the keys that a user may set; its methods and class variables are what
data, planner, training and export read. Whatever needs torch or the tokenizer is imported inside the method that needs it.
`drumline.algorithms.specs` has bases for text, pairs and prompts: an algorithm of one's own overrides only what differs.

Terms: a *pair* is a chosen and a rejected answer; an *episode* one sampled completion of a prompt with its reward; a *group* the
episodes of one prompt. `batch.global_samples` counts what an optimizer step learns from: sequences, pairs, rows or episodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from drumline.config.data import TEXT_FORMS, DataConfig, Forms
from drumline.config.model import Head, ModelConfig
from drumline.config.registry import Registered, Spec
from drumline.config.section import Amount

if TYPE_CHECKING:
    from drumline.config.config import Config
    from drumline.config.rollouts import RolloutSpec
    from drumline.plan.plan import Plan

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


class AlgorithmSpec(Spec):
    """The answers of an algorithm that learns from rows of text by their tokens, and needs no other model."""

    group: ClassVar[str] = "algorithms"
    modules: ClassVar[str] = "drumline.algorithms.{}.spec"
    thing: ClassVar[str] = "algorithm"

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

        The samples are those of the global batch, or of the whole evaluation set, around the end. The
        meta of a cached sample says in `prompt` which prompt it has.
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

    def collator(self, plan: Plan, width: int | None) -> Callable[[Any], Callable[..., Any]]:
        """Token cache → sample ids (-1: a filler) → micro-batch, a `data.batches.Batch`. `width`: tokens of all rows; None: as many as
        the longest has. Where `pairs_with_previous`, the ids of the samples before these come second, -1 where
        all samples have the same prompt."""
        raise NotImplementedError

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any] | None:
        """A row of at least `length` tokens, for `plan --probe`; `random_text(n)` gives n words. None where random words will not do."""
        return None

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        """A micro-batch in which every row has the full length and every token has a loss. `channels`: of images."""
        raise NotImplementedError

    # ---- models and the objective
    def reference_of(self, config: Config) -> ReferenceKind:
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

    def auxiliary_models(self, config: Config) -> dict[str, AuxiliaryModel]:
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

    def reference_of(self, config: Config) -> ReferenceKind:
        if self.reference != "auto":
            return self.reference
        return (
            "adapter" if config.adapter.switches and self.reference_model is None else "precomputed"
        )

    def auxiliary_models(self, config: Config) -> dict[str, AuxiliaryModel]:
        if self.reference_of(config) == "adapter":
            return {}
        return {
            "reference": AuxiliaryModel(
                self.reference_model or config.model, "algorithm.reference_model"
            )
        }


Algorithm = Annotated[AlgorithmSpec, Registered(AlgorithmSpec)]
