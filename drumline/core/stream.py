"""Sequence parallelism beside tensor parallelism: its key, and why a model's residual stream cannot be cut by tokens. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from drumline.core.mesh import Mesh
from drumline.core.rule import Refusal
from drumline.core.section import Section

if TYPE_CHECKING:
    from drumline.core.config import Config
    from drumline.core.facts import ModelFacts


class SequenceParallel(Section):
    """Part of a strategy that may cut matrices over tp ranks."""

    sequence_parallel: bool = Field(
        False,
        description="With tp > 1, norms and the residual stream are cut by tokens over the tp ranks, too (Korthikanti et al. 2022).",
    )

    def stream_parts(self, mesh: Mesh) -> int:
        return mesh.tp if self.sequence_parallel else 1


def whole_stream(config: Config, facts: ModelFacts) -> Iterator[Refusal]:
    """Why the residual stream cannot be cut over tp ranks."""
    where, instead = "strategy.sequence_parallel", "use tp without it"
    reason = "images are added to the stream between blocks" if facts.vision_language else facts.whole_stream
    if reason:
        yield Refusal("sequence_parallel × the model", reason, instead, where)
    if facts.trains_router:
        reason = "the loss needs all tokens of a document on one rank"
        yield Refusal("sequence_parallel × the router loss of a mixture of experts", reason, instead, where)
    if facts.drops_stream:
        reason = "tp ranks draw alike, so their parts of a sequence would drop the same places"
        yield Refusal("sequence_parallel × dropout over the stream", reason, "set the model's dropout to 0, or use tp without it", where)
    if config.adapter.kind == "lora" and facts.tp_styles & {"rowwise_split_input", "rowwise_rep"}:
        reason = "the adapter of a layer whose inputs are whole would give all tokens, and the layer gives a part"
        yield Refusal("sequence_parallel × LoRA × layers with whole inputs", reason, instead, where)
