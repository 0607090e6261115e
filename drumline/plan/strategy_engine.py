"""The part of a strategy that makes its engine, and says what it cannot be combined with.

The plan asks it before any process starts, so this module and the modules of its subclasses
(`engine.strategies.NAME.spec`) import torch only within `prepare` and `spread`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from drumline.config.config import Config
from drumline.config.refusal import Refusal
from drumline.config.registry import part_class
from drumline.config.strategy import Precision, StrategyConfig
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import BatchPlan, Plan
from drumline.plan.rule import Case

S = TypeVar("S", bound=StrategyConfig)


class EngineSpec(Generic[S]):
    """How the engine of a strategy is made, and what the strategy cannot be combined with.

    The defaults are those of a strategy with copies of the model on all ranks.

    `strategy`: the section of the YAML.
    """

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield refusals of this strategy, besides those of all strategies (plan.rules)."""
        yield from ()

    def adopted(self, config: Config) -> Config:
        """Return the config completed by what only a file of this strategy's sets."""
        return config

    def engine_options(
        self,
        config: Config,
        batch: BatchPlan,
        precision: Precision,
        steps: int | None,
        run_dir: str,
        facts: ModelFacts | None,
    ) -> dict[str, Any] | None:
        """Return what another package's engine is given; None for Drumline's own engine."""
        return None

    def require(self, plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
        """Raise EnvironmentFault if the machine lacks what the strategy needs.

        It is called before any process starts.

        `on_progress`: takes a message, the number of things done, and their total.
        """

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine of a model that is laid out without weights.

        None: it is the engine that the plan names.

        `values`: the `models.shards.Values` that fill the weights. `options`: of any
        module, see `engine.native.prepare` (plain, overlaps) and its engine (make_optimizer).
        """
        return None

    def spread(
        self, plan: Plan, world_mesh: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        """Return the `DataParallelWrapper` of a model, whose weights `values` fills.

        None: each rank has a copy.

        `world_mesh`: the device mesh of all ranks. `roots`: pairs (module that runs, the part of
        the model within it), one for each stage of a pipeline, otherwise a single one.
        """
        return None


def engine_spec(strategy: StrategyConfig) -> EngineSpec[Any]:
    """Return the part of a strategy that makes its engine.

    Raises ConfigError if that of a plug-in cannot be imported.
    """
    spec: EngineSpec[Any] = part_class(strategy.engine_class)(strategy)
    return spec
