"""`EngineSpec`: the part of a strategy that makes its engine, and refuses what it cannot do.

The plan uses it before any process starts, so this module and the modules of its subclasses
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

    A strategy or a plug-in overrides what differs from the defaults here: Drumline's own engine, with a
    copy of the model on each rank.

    `strategy`: the section of the YAML.
    """

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    def refusals(self, case: Case) -> Iterator[Refusal]:
        """Yield refusals of this strategy, besides those of all strategies (plan.rules)."""
        yield from ()

    def adopted(self, config: Config) -> Config:
        """Return the config with the values that the strategy's own config file sets.

        Such a file is DeepSpeed's JSON (strategy.config), which may set the batch or the precision.
        """
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
        """Return the options for another package's engine; None for Drumline's own engine.

        For ZeRO they are DeepSpeed's config, and become `Plan.deepspeed`.
        """
        return None

    def require(self, plan: Plan, on_progress: Callable[[str, int, int | None], None]) -> None:
        """Raise EnvironmentFault if the machine lacks something that the strategy needs.

        It is called before any process starts.

        `on_progress`: called with a message, the number of things done, and their total, which is None
        if it is not known.
        """

    def prepare(self, plan: Plan, model: Any, values: Any, **options: Any) -> Any:
        """Return the engine of a model, or None for the engine that the plan names (`Plan.engine`).

        `model`: the torch module, whose weights are not filled yet. `values`: the
        `models.shards.Values` that fill them. `options`: keyword arguments of
        `engine.native.prepare`, which are only passed for a module of the user's own.
        """
        return None

    def spread(
        self, plan: Plan, world_mesh: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        """Return the `DataParallelWrapper` of a model, or None if each rank keeps a copy of it.

        `world_mesh`: the device mesh of all ranks. `roots`: pairs (module that runs, the part of
        the model within it), one for each stage of a pipeline, otherwise a single one. `values`: the
        `models.shards.Values` that fill the weights.
        """
        return None


def engine_spec(strategy: StrategyConfig) -> EngineSpec[Any]:
    """Return the `EngineSpec` of a strategy.

    Raises ConfigError if it belongs to a plug-in and cannot be imported.
    """
    spec: EngineSpec[Any] = part_class(strategy.engine_class)(strategy)
    return spec
