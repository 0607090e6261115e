"""Rerankers (cross-encoders), which read a query and a text together. No torch at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from drumline.algorithms.specs import RetrievalSpec
from drumline.config.data import DataConfig
from drumline.config.model import Head
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory
    from drumline.data.encode import RowEncoder

# The one class of a reranker, whose logit is how well a text answers.
RELEVANCE = "relevance"


class RerankConfig(RetrievalSpec):
    """A score of a query with each of its texts: the positive is to be above the negatives."""

    position: ClassVar[int] = 8
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "mrr@10", "ndcg@10")
    task: ClassVar[str | None] = "text-ranking"
    joins_texts: ClassVar[bool] = True
    objective: ClassVar[str] = "drumline.algorithms.rerank.objective:Rerank"
    kind: Literal["rerank"] = "rerank"
    negatives: int = Field(
        1,
        ge=1,
        le=1000,
        description="At most this many negatives of a row are used, the first ones.",
    )
    loss: Literal["pointwise", "listwise"] = Field(
        "pointwise",
        description="pointwise: binary cross-entropy of each text, whether it answers the query."
        " listwise: cross-entropy over the texts of a row, which of them answers.",
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the model's logits, of which it has one."""
        return (RELEVANCE,)

    @property
    def rows_per_sample(self) -> int:
        """The query with the positive is one row of a batch, with each negative another one."""
        return 1 + self.negatives

    @property
    def head(self) -> Head:
        return "text"

    def cache_parts(self) -> dict[str, Any]:
        """Return the settings on which the texts of a sample depend, for the token cache's key."""
        return {"negatives": self.negatives}

    def segment_names(self, segments: int) -> list[str]:
        # Each segment is a pair of the query and a text, and has the name of the text.
        names = super().segment_names(segments + 1)
        return names[1:]

    def classes(self, train: Any, held_out: list[Any]) -> tuple[str, ...]:
        """Return the one label. Raises DataError if a held-out set has no negative."""
        from drumline.data.retrieval import require_negatives

        for cache in held_out:
            require_negatives(cache, "held-out")
        return self.labels

    def check_rows(self, train: Any) -> None:
        """Raise DataError if no row has a negative."""
        from drumline.data.retrieval import require_negatives

        require_negatives(train, "training")

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.retrieval import CandidateRowEncoder

        return CandidateRowEncoder(tokenizer, data, self.negatives)

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import candidate_collator

        return candidate_collator(plan, width, self.rows_per_sample)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.retrieval import placeholder_candidates

        return placeholder_candidates(plan, rows, length, self.rows_per_sample)
