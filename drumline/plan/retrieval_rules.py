"""Rules for embeddings and rerankers: what they cannot be combined with. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.refusal import Refusal
from drumline.plan.rule import Case


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield the refusals for a case with embeddings or a reranker; none for other algorithms."""
    if case.config.head == "embedding":
        yield from _embedding_refusals(case)
    elif case.config.algorithm.kind == "rerank":
        yield from _reranker_refusals(case)


def _reranker_refusals(case: Case) -> Iterator[Refusal]:
    """Yield the refusals for models that read a query and a text in one row."""
    for dimension, ranks in (("pp", case.mesh.pp), ("cp", case.mesh.cp)):
        if ranks > 1:
            yield Refusal(
                f"{dimension} × rerank",
                "a reranker also gets which tokens are the query's, but a part of a model or of a row gets only ids and positions",
                "use strategy=ddp or fsdp2",
            )


def _embedding_refusals(case: Case) -> Iterator[Refusal]:
    """Yield the refusals for embeddings, whose loss compares the texts of all ranks."""
    config = case.config
    if case.mesh.pp > 1:
        yield Refusal(
            "pp × embeddings",
            "the last stage computes a head from the last block's output, and an encoder has no head",
            "use strategy=fsdp2 or ddp",
        )
    if case.strategy.exchange is not None:
        yield Refusal(
            "embeddings × ranks that train apart",
            "a query is compared with documents of all ranks, and each rank would embed them by weights of its own",
            "use strategy=ddp or fsdp2",
        )
    reads_first_token = getattr(config.algorithm, "pooling", None) == "cls"
    if case.facts is not None and reads_first_token and not case.facts.bidirectional:
        yield Refusal(
            "pooling=cls × a causal model",
            "its first token sees none of the text behind it, so all texts would have one embedding",
            "use algorithm.pooling=last or mean",
            "algorithm.pooling",
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
            f"its embeddings have {case.facts.hidden} numbers, and the loss with all of them is always computed",
            "name smaller sizes",
            "algorithm.matryoshka",
        )
