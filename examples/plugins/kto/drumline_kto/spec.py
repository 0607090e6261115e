"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): from answers that are good or bad, one by one. No torch at the top."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.algorithm import ChunkedSpec, ReferencedSpec
from drumline.core.model import ModelConfig
from drumline.core.section import Above0


class KTOConfig(ReferencedSpec, ChunkedSpec):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024)."""

    kind: Literal["kto"] = "kto"
    columns: ClassVar[str] = "`prompt`, `completion` and `label`"
    rate: ClassVar[float] = 5e-7
    metrics: ClassVar[tuple[str, ...]] = ("loss", "kl", "margin", "reward_chosen", "reward_rejected")
    head_outputs: ClassVar[frozenset[Any]] = frozenset({"log_probs"})
    pairs_with_previous: ClassVar[bool] = True
    extra_forwards: ClassVar[int] = 1  # of the KL
    beta: Above0 = Field(0.1, description="How closely the policy is held to the reference.")
    desirable_weight: Above0 = Field(1.0, description="Weight of the losses of good answers.")
    undesirable_weight: Above0 = Field(1.0, description="Weight of the losses of bad answers.")
    reference_model: ModelConfig | None = Field(None, description="Another reference than the model that training starts from.")

    @property
    def forms(self) -> Any:
        return (("prompt", "completion", "label"),)

    def reference_of(self, config: Any) -> Any:
        """Nothing is precomputed: which prompts and answers go together is known when a batch is made."""
        return "adapter" if config.adapter.kind == "lora" and self.reference_model is None else "live"

    def encoder(self, tokenizer: Any, data: Any, vision: Any = None) -> Any:
        from drumline_kto.objective import Answers

        return Answers(tokenizer, False, data)

    def collator(self, plan: Any, width: int | None) -> Any:
        from drumline_kto.objective import collate_answers

        from drumline.data.collators import padding

        pad, longest = padding(plan), plan.config.data.max_length
        return lambda cache: lambda ids, before: collate_answers(cache, ids, before, pad, width, longest)

    def traced_batch(self, plan: Any, rows: int, length: int, channels: int) -> Any:
        from drumline_kto.objective import answer_batch, torch

        from drumline.data.batches import First, learned_segment

        numbers, batch = torch.zeros(rows, dtype=torch.float64), answer_batch([learned_segment(length)] * rows, [True] * rows, 0, length)
        return replace(batch, reference_B=numbers, first=First(numbers[:, None]))

    def build(self) -> Any:
        from drumline_kto.objective import KTO

        return KTO(chunk=self.loss_chunk, **self.model_dump(include={"beta", "desirable_weight", "undesirable_weight"}))
