"""How a model runs under nn.DataParallel, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.config.refusal import Refusal
from drumline.config.strategies.dp import DPStrategy
from drumline.plan.plan import Plan
from drumline.plan.rule import Case, is_vision_language
from drumline.plan.strategy_engine import EngineSpec


class DPSpec(EngineSpec[DPStrategy]):
    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield what a batch that is cut into runs of rows cannot do."""
        algorithm = case.config.algorithm
        if is_vision_language(case):
            yield Refusal(
                "images × dp",
                "nn.DataParallel cuts every tensor of a batch into equal runs, and rows have uneven numbers of patches",
                "use strategy=ddp",
            )
        if algorithm.head == "seq2seq":
            yield Refusal(
                "dp × an encoder and a decoder",
                "nn.DataParallel cuts a batch into runs of rows, which is tested with one row a sample",
                "use strategy=ddp",
            )
        if case.device == "cuda" and algorithm.rows_per_sample > 1:
            yield Refusal(
                "dp × pairs",
                "nn.DataParallel cuts a batch into runs of rows, and the two answers of a pair would land on two GPUs",
                "use strategy=ddp",
            )
        if case.device == "cuda" and algorithm.needs_mismatched_pairs:
            yield Refusal(
                "dp × a mean over the global batch",
                "nn.DataParallel cuts a batch into runs of rows, and the loss of each takes a mean over the whole global batch",
                "use strategy=ddp",
            )
        if case.device == "cuda" and algorithm.teaching is not None:
            yield Refusal(
                "dp × distillation",
                "nn.DataParallel cuts a batch into runs of rows, and the teacher's numbers are those of all its tokens, end to end",
                "use strategy=ddp",
            )
        if case.config.compile.enabled:
            yield Refusal(
                "dp × compile",
                "nn.DataParallel copies modules at each step, and a compiled block goes on with the weights it was compiled for",
                "use strategy=ddp, or compile.enabled=false",
                "compile.enabled",
            )

    def spread(
        self, plan: Plan, world_mesh: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        from drumline.engine.strategies.dp.transform import spread

        return spread(plan, model, roots[0][0], values)
