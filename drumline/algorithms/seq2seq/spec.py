"""Answers of encoder-decoder models, such as T5 and BART. No torch at the top."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from drumline.config.algorithm import ChunkedSpec
from drumline.config.data import DataConfig
from drumline.config.model import Head
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.collators import CollatorFactory
    from drumline.data.encode import RowEncoder


class Seq2SeqConfig(ChunkedSpec):
    """Completions of a model with an encoder and a decoder: the encoder reads the prompt, the decoder learns.

    `sft` becomes this algorithm if its model has an encoder.
    """

    position: ClassVar[int] = 7
    columns: ClassVar[str] = "`prompt` and `completion`, or `messages`"
    metrics: ClassVar[tuple[str, ...]] = ("loss", "token_accuracy", "exact_match")
    has_answers: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    objective: ClassVar[str] = "drumline.algorithms.tokens.objective:build"
    kind: Literal["seq2seq"] = "seq2seq"
    decoder_start: int | None = Field(
        None,
        ge=0,
        le=10**9,
        description="Id of the token that the decoder begins with. Default: decoder_start_token_id of the model's config.",
    )

    @property
    def rows_per_sample(self) -> int:
        """A sample has one row for the encoder and one for the decoder."""
        return 2

    @property
    def head(self) -> Head:
        return "seq2seq"

    def segment_names(self, segments: int) -> list[str]:
        """Return which half of the model reads each segment."""
        return ["encoder", "decoder"][:segments]

    def spec_for_encoder_decoder(self, decoder_start: int) -> Seq2SeqConfig:
        return self.model_copy(update={"decoder_start": decoder_start})

    def cache_parts(self) -> dict[str, Any]:
        """Return the decoder's first token, for the token cache's key.

        Each cached completion begins with it.
        """
        return {"decoder_start": self.decoder_start}

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.seq2seq import Seq2SeqRowEncoder

        assert self.decoder_start is not None, "`planner.seq2seq.resolve_seq2seq` fills it in"
        return Seq2SeqRowEncoder(tokenizer, self.decoder_start, data)

    def collator(self, plan: Plan, width: int | None) -> CollatorFactory:
        from drumline.data.collators import seq2seq_collator

        return seq2seq_collator(plan, width)

    def random_row(self, random_text: Callable[[int], str], length: int) -> dict[str, Any]:
        return {"prompt": random_text(length), "completion": random_text(length)}

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.seq2seq import placeholder_seq2seq

        return placeholder_seq2seq(rows, length)
