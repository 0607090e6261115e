"""The rules of models that embed texts, whose loss compares texts of all ranks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.refusal import Refusal
from drumline.plan.rule import Case


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield refusals of embeddings; none for models with another output."""
    config = case.config
    if config.head != "embedding":
        return
    if case.mesh.pp > 1:
        yield Refusal(
            "pp × embeddings",
            "the last stage computes a head from the last block's output, and an encoder has none",
            "use strategy=fsdp2 or ddp",
        )
    if case.strategy.exchange is not None:
        yield Refusal(
            "embeddings × ranks that train apart",
            "a query is compared with documents of all ranks, and each rank would embed them by weights of its own",
            "use strategy=ddp or fsdp2",
        )
    if config.adapter.kind == "lora" and config.adapter.dropout > 0:
        yield Refusal(
            "embeddings × adapter.dropout",
            "each text is embedded twice, and dropout would make two embeddings of it",
            "use adapter.dropout=0",
            "adapter.dropout",
        )
    largest = max(getattr(config.algorithm, "matryoshka", ()), default=0)
    if case.facts is not None and largest >= case.facts.hidden:
        yield Refusal(
            "matryoshka × the width of the model",
            f"its embeddings have {case.facts.hidden} numbers, and the loss of all of them is counted anyway",
            "name smaller sizes",
            "algorithm.matryoshka",
        )
