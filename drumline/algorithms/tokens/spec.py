"""Next-token learning: `pretrain` (documents) and `sft` (conversations and answers). No torch at the top."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drumline.algorithms.specs import TextSpec
from drumline.config.algorithm import AlgorithmSpec
from drumline.config.data import DataConfig

if TYPE_CHECKING:
    from drumline.data.encode import RowEncoder

NEXT_TOKEN = "drumline.algorithms.tokens.objective:build"


class PretrainConfig(TextSpec):
    position: ClassVar[int] = 0
    columns: ClassVar[str] = "`text`"
    rate: ClassVar[float] = 3e-4
    metrics: ClassVar[tuple[str, ...]] = ("loss", "token_accuracy")
    cuts: ClassVar[bool] = True
    objective: ClassVar[str] = NEXT_TOKEN
    kind: Literal["pretrain"] = "pretrain"

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return {"text": random_text(length)}


class SFTConfig(TextSpec):
    position: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = ("loss", "token_accuracy", "exact_match")
    has_answers: ClassVar[bool] = True
    objective: ClassVar[str] = NEXT_TOKEN
    kind: Literal["sft"] = "sft"

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        if vision is None:
            return super().encoder(tokenizer, data)
        from drumline.data.image_rows import VisionRowEncoder

        return VisionRowEncoder(tokenizer, data, vision)

    def spec_for_encoder_decoder(self, decoder_start: int) -> AlgorithmSpec | None:
        from drumline.algorithms.seq2seq.spec import Seq2SeqConfig

        if self.objective != NEXT_TOKEN:
            # Somebody's own objective.
            return None
        # The kind is set, so that a plan writes it into the YAML.
        return Seq2SeqConfig(
            kind="seq2seq", decoder_start=decoder_start, loss_chunk=self.loss_chunk
        )

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return {"prompt": random_text(1), "completion": random_text(length)}
