"""Embedding models (bi-encoders) from queries and the texts that answer them. No torch at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from drumline.algorithms.specs import RetrievalSpec
from drumline.config.data import DataConfig
from drumline.config.model import Head
from drumline.config.section import Above0
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory
    from drumline.data.encode import RowEncoder

Pooling = Literal["auto", "mean", "last", "cls"]
# Statistics of a sample besides the gradient of its embeddings: `objective.Embed.combine_first`.
STATISTIC_COUNT = 3


class EmbedConfig(RetrievalSpec):
    """An embedding of each text, by InfoNCE (van den Oord et al. 2018) over all texts of a global batch."""

    position: ClassVar[int] = 7
    metrics: ClassVar[tuple[str, ...]] = (
        "loss",
        "accuracy",
        "similarity",
        "recall@1",
        "recall@10",
        "ndcg@10",
    )
    task: ClassVar[str | None] = "sentence-similarity"
    objective: ClassVar[str] = "drumline.algorithms.embed.objective:Embed"
    kind: Literal["embed"] = "embed"
    pooling: Pooling = Field(
        "auto",
        description="Which hidden states become the embedding: the mean over all tokens, that of the last token, or of the first (cls)."
        " auto: what the model's files for sentence-transformers say; without these mean for an encoder, last for a causal model.",
    )
    normalize: bool = Field(
        True, description="Compare texts by cosine similarity; false: by the dot product."
    )
    temperature: Above0 = Field(
        0.05, description="Divides each similarity. 0.05 is scale=20 in sentence-transformers."
    )
    matryoshka: list[Annotated[int, Field(le=10**6)]] = Field(
        default_factory=list,
        max_length=32,
        description="Sizes N: the loss is also computed of the first N numbers of each embedding (Matryoshka, Kusupati et al. 2022).",
    )
    query_prompt: str = Field("", max_length=10**4, description="Text before each query.")
    document_prompt: str = Field(
        "", max_length=10**4, description="Text before each positive and negative."
    )

    @field_validator("matryoshka")
    @classmethod
    def _sizes_are_distinct(cls, sizes: list[int]) -> list[int]:
        """Refuse a size below 1, and one that occurs twice."""
        if len(set(sizes)) < len(sizes) or min(sizes, default=1) < 1:
            raise ValueError("name sizes from 1 on, each once")
        return sizes

    @property
    def rows_per_sample(self) -> int:
        """The query, the positive and each negative are a row of a batch each."""
        return 2 + self.negatives

    @property
    def head(self) -> Head:
        return "embedding"

    @property
    def extra_forwards(self) -> int:
        """All texts of a global batch are embedded before the loss of any (GradCache)."""
        return 1

    def cache_parts(self) -> dict[str, Any]:
        """Return the settings on which the texts of a sample depend, for the token cache's key."""
        prompts = [self.query_prompt, self.document_prompt]
        return {"negatives": self.negatives, "prompts": prompts}

    def pooling_of(self, bidirectional: bool) -> str:
        """Return mean, last or cls for a model. `bidirectional`: whether it reads both ways."""
        if self.pooling != "auto":
            return self.pooling
        if bidirectional:
            return "mean"
        return "last"

    def first_numbers(self, hidden: int) -> int:
        """Return how many numbers `batch.first` has of each sample in training.

        They are the gradient of each embedding, and STATISTIC_COUNT statistics.
        """
        return self.rows_per_sample * hidden + STATISTIC_COUNT

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.retrieval import RetrievalRowEncoder

        return RetrievalRowEncoder(
            tokenizer, data, self.negatives, self.query_prompt, self.document_prompt
        )

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import retrieval_collator

        return retrieval_collator(plan, width, self.rows_per_sample)

    def export_files(self, plan: Plan, hidden: int) -> dict[str, Any]:
        """Return the files by which sentence-transformers loads the export."""
        from drumline.algorithms.embed.folder import sentence_transformers_files

        pooling = self.pooling_of(plan.bidirectional)
        prompts = {"query": self.query_prompt, "document": self.document_prompt}
        max_length = plan.config.data.max_length
        return sentence_transformers_files(pooling, self.normalize, prompts, hidden, max_length)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.retrieval import placeholder_retrieval

        return placeholder_retrieval(plan, rows, length, self.rows_per_sample, self.first_numbers)
