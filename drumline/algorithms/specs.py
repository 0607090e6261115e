"""Specs to derive from, for algorithms that learn from text, pairs, labelled answers or prompts.

`config.algorithm.AlgorithmSpec` documents all methods and class variables that are set here. torch is
imported inside methods, so that commands which only read a config need not import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from drumline.config.algorithm import (
    AlgorithmSpec,
    ChunkedSpec,
    HeadOutput,
    RolloutSpec,
    SamplingSpec,
)
from drumline.config.data import JUDGED_FORMS, PAIR_FORMS, RETRIEVAL_FORMS, DataConfig, Forms
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory
    from drumline.data.encode import RowEncoder


class TextSpec(ChunkedSpec):
    """The base of algorithms that learn tokens of conversations, completions and documents."""

    packs: ClassVar[bool] = True
    sees_images: ClassVar[bool] = True

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.encode import TextRowEncoder

        if vision is None:
            return TextRowEncoder(tokenizer, self.cuts, data)
        from drumline.data.image_rows import VisionDocumentEncoder

        return VisionDocumentEncoder(tokenizer, self.cuts, data, vision)

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import text_collator

        return text_collator(plan, width)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.batches import collate, learned_segment

        row = [learned_segment(length)]
        if plan.config.packs:
            # Two documents in a row, so that attention is traced with a mask.
            half = length // 2
            row = [learned_segment(length - half), learned_segment(half)]
        return collate([row] * rows, 0, length)


def random_pair(random_text: Callable[[int], str], length: int) -> dict[str, Any]:
    """Return a row with two answers of `length` random words; see `AlgorithmSpec.random_row`."""
    return {
        "prompt": random_text(1),
        "chosen": random_text(length),
        "rejected": random_text(length),
    }


class PairSpec(AlgorithmSpec):
    """The base of algorithms that learn from pairs of a chosen and a rejected answer."""

    shares_prompts: ClassVar[bool] = True
    columns: ClassVar[str] = "`prompt`, `chosen` and `rejected`"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")

    @property
    def rows_per_sample(self) -> int:
        """The two answers are two rows of a batch."""
        return 2

    @property
    def forms(self) -> Forms:
        return PAIR_FORMS

    def segment_names(self, segments: int) -> list[str]:
        return ["chosen", "rejected"][:segments]

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.encode import PairRowEncoder

        if vision is None:
            return PairRowEncoder(tokenizer, data)
        from drumline.data.image_rows import VisionPairEncoder

        return VisionPairEncoder(tokenizer, data, vision)

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import pair_collator

        return pair_collator(plan, width)

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return random_pair(random_text, length)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.batches import placeholder_pairs

        return placeholder_pairs(rows, length)


class AnswerPairSpec(PairSpec, ChunkedSpec):
    """The base of algorithms that compare the log-probabilities of the answers of a pair."""

    sees_images: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (
        *PairSpec.metrics,
        "reward_chosen",
        "reward_rejected",
        "log_prob_chosen",
        "log_prob_rejected",
    )
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs"})


class JudgedSpec(ChunkedSpec):
    """The base of algorithms that learn from single answers with a label, good or bad.

    The rejected and the chosen answer of a pair are read as two such answers.
    """

    sees_images: ClassVar[bool] = True
    columns: ClassVar[str] = (
        "`prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`"
    )
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs"})

    @property
    def forms(self) -> Forms:
        return JUDGED_FORMS

    def cache_parts(self) -> dict[str, Any]:
        """Return the names of the metadata that samples have, as a part of the token cache's key.

        So caches of older versions, whose samples have no `prompt`, are not read.
        """
        return {"meta": ["good", "prompt"]}

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.encode import JudgedRowEncoder

        if vision is None:
            return JudgedRowEncoder(tokenizer, data)
        from drumline.data.image_rows import VisionJudgedEncoder

        return VisionJudgedEncoder(tokenizer, data, vision)

    def check_rows(self, train: Any) -> None:
        """Raise DataError if all answers have the same label."""
        from drumline.data.judged import require_both_labels

        require_both_labels(train)

    def collator(self, plan: Plan, width: int | None) -> Callable[[Any], Callable[..., Any]]:
        from drumline.data.collators import judged_collator

        return judged_collator(plan, width, has_mismatched=self.needs_mismatched_pairs)

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return random_pair(random_text, length)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.judged import placeholder_judged

        return placeholder_judged(rows, length)


class RetrievalSpec(AlgorithmSpec):
    """The base of algorithms that learn which texts answer a query."""

    columns: ClassVar[str] = "`query`, `positive` and maybe `negative` (a text or a list)"
    best_by: ClassVar[dict[str, str]] = {"metric": "ndcg@10", "mode": "max"}
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset()
    library: ClassVar[str] = "sentence-transformers"
    writes: ClassVar[bool] = False
    negatives: int = Field(
        0,
        ge=0,
        le=1000,
        description="At most this many negatives of a row are used, the first ones. With 0, a row that has any is refused.",
    )

    @property
    def forms(self) -> Forms:
        return RETRIEVAL_FORMS

    def fitted_to(self, values: dict[str, Any]) -> AlgorithmSpec:
        """Return this section with as many negatives as the first row has, if none were asked for."""
        negatives = len(values.get("negative", ()))
        if not negatives or "negatives" in self.model_fields_set:
            return self
        return self.model_copy(update={"negatives": negatives})

    def segment_names(self, segments: int) -> list[str]:
        negatives = [f"negative {number}" for number in range(1, segments - 1)]
        return ["query", "positive", *negatives][:segments]

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        query_words = length
        if self.joins_texts:
            query_words = 1
        negatives = [random_text(length) for _ in range(self.negatives)]
        return {
            "query": random_text(query_words),
            "positive": random_text(length),
            "negative": negatives,
        }


class PromptRowSpec(SamplingSpec):
    """The base of algorithms whose rows are prompts alone, which the policy completes."""

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.encode import PromptRowEncoder

        if vision is None:
            keeps_row = self.environment is not None
            return PromptRowEncoder(tokenizer, self.new_tokens, data, keeps_row)
        from drumline.data.image_rows import VisionPromptEncoder

        return VisionPromptEncoder(tokenizer, self.new_tokens, data, vision)


class PromptSpec(PromptRowSpec, RolloutSpec):
    """The base of algorithms that learn from advantages of completions which the policy samples."""

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.batches import placeholder_episodes

        return placeholder_episodes(rows, length)
