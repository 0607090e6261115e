"""Classification of texts and images. No torch at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from drumline.config.algorithm import AlgorithmSpec, HeadOutput
from drumline.config.data import DataConfig, Forms
from drumline.config.model import Head
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory
    from drumline.data.encode import RowEncoder

# k of top-k accuracy, which is informative only with at least twice as many classes.
TOP = 5


class ClassifyConfig(AlgorithmSpec):
    """A class for each row: of a text (`text` and `label` columns) or an image (`image` and `label`)."""

    position: ClassVar[int] = 6
    columns: ClassVar[str] = "`text` (or `image`) and `label`"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "macro_f1", f"top{TOP}_accuracy")
    writes: ClassVar[bool] = False
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset()
    objective: ClassVar[str] = "drumline.algorithms.classify.objective:Classify"
    kind: Literal["classify"] = "classify"
    modality: Literal["text", "image"] = Field("text", description="What is classified.")
    labels: list[str] | None = Field(
        None,
        description="The classes in order; null: those of the training data, sorted. A classifier that was trained on just these keeps its"
        " own order.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Part of the target that is spread over all classes."
    )
    image_size: int | None = Field(
        None,
        gt=0,
        le=10**5,
        description="image: side of the square it is scaled to; null: the processor's.",
    )

    @field_validator("labels")
    @classmethod
    def _labels_are_distinct(cls, labels: list[str] | None) -> list[str] | None:
        """Refuse fewer than two classes, blank names, and a name that occurs twice."""
        if labels is None:
            return None
        has_duplicates = len(set(labels)) < len(labels)
        has_blank = not all(label.strip() for label in labels)
        if len(labels) < 2 or has_duplicates or has_blank:
            raise ValueError("name two classes or more, each once")
        return labels

    @property
    def forms(self) -> Forms:
        return ((self.modality, "label"),)

    @property
    def head(self) -> Head:
        return self.modality

    def cache_parts(self) -> dict[str, Any]:
        """Return the classes, as a part of the token cache's key: its samples hold their indices."""
        return {"labels": self.labels}

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        """Return the encoder of rows: to token ids and a label, or to an image's path and a label."""
        from drumline.data.encode import LabelledImageEncoder, LabelledTextEncoder

        if self.modality == "text":
            return LabelledTextEncoder(tokenizer, self.labels, data)
        return LabelledImageEncoder(self.labels, data)

    def classes(self, train: Any, held_out: list[Any]) -> tuple[str, ...]:
        """Return the classes of the config, or else those of the training data."""
        from drumline.data.encode import classes

        return classes(train, held_out, self.labels)

    def measures(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the held-out metrics for these classes."""
        if len(labels) >= 2 * TOP:
            return self.metrics
        # The last one is the accuracy of the first five.
        return self.metrics[:-1]

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import labelled_collator

        return labelled_collator(plan, width, self.image_size)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        """Return a batch for the planner's trace. `length`: tokens, or pixels of an image's side."""
        from drumline.data.batches import placeholder_labelled_texts
        from drumline.data.images import placeholder_labelled_images

        if self.modality == "text":
            return placeholder_labelled_texts(plan, rows, length)
        return placeholder_labelled_images(rows, length, channels)
