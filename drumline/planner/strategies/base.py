"""The interface of a strategy's cost: what the planner asks each strategy.

It asks which variants to search, how many bytes a rank holds, and what a step sends and copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from drumline.config.mesh import divisors
from drumline.config.registry import part_class
from drumline.config.strategy import PipelineConfig, StrategyConfig
from drumline.plan.estimate import Activations
from drumline.plan.facts import ModelFacts, Part
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import (
    Buffers,
    Copied,
    Host,
    State,
    Volume,
    copies_buffers,
    native_state,
    send_gradients,
    send_norm,
)

S = TypeVar("S", bound=StrategyConfig)
# Pipeline schedules that the search tries.
SCHEDULES = ("1f1b", "interleaved", "gpipe")


class Space(NamedTuple):
    """The devices and the model for which the search looks for strategies.

    `nodes`: hosts. `per_node`: devices of each. `layers`: of the model. `nvme`: a folder on a disk to
    which strategies may offload; None without one. `experts`: of a layer of a mixture; 0 without one.
    """

    nodes: int
    per_node: int
    layers: int
    nvme: str | None
    experts: int = 0

    @property
    def world(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.per_node


class StrategyCost(Generic[S]):
    """The base of all strategies' costs. Its defaults are those of a copy of the model on each rank.

    All methods are pure. `strategy`: the section of the YAML.
    """

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    @classmethod
    def candidates(cls, kind: type[S], space: Space) -> Iterator[StrategyConfig]:
        """Yield the strategies of this kind to try if the user has left the strategy open.

        `kind`: the class of the strategy's section.
        """
        yield from ()

    def variants(self) -> Iterator[StrategyConfig]:
        """Yield the strategies to try if the user has named this one: itself, and others like it.

        The others differ in keys that the user has left open.
        """
        yield self.strategy

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategyConfig]]:
        """Return strategies that take the same steps with less memory, each with its number of changes.

        A run that ran out of memory goes on with the one of the fewest changes that fits.
        `is_shared`: the samples are divided over more than one rank. `device`: cpu or cuda.
        """
        return []

    def kept_bytes(self, world: int) -> int:
        """Return the bytes, for each trainable parameter, of buffers that save traffic and outlast a step."""
        return 0

    def outer_bytes(self) -> int:
        """Return the bytes, for each trainable parameter, of a second optimizer, such as DiLoCo's outer one."""
        return 0

    def state(self, layout: Layout, facts: ModelFacts, mine: Part) -> State:
        """Return what a rank with the part `mine` of the model holds between steps."""
        return native_state(layout, facts, mine, self.outer_bytes())

    def buffers(
        self, layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
    ) -> Buffers:
        """Return what a rank holds besides `state` and activations.

        `kept`: a trace, which knows autocast's copies: they depend on the model's own code.
        """
        kept_between_steps = self.kept_bytes(layout.mesh.world_size)
        return copies_buffers(layout, facts, mine, state, kept, kept_between_steps)

    def host(self, layout: Layout, facts: ModelFacts, between: int) -> Host:
        """Return what a rank holds in host memory.

        Native engines read each rank's part onto the device, and copy a checkpoint that is written in
        the background. `between`: bytes of its states in host memory.
        """
        return Host(between, between, 0, int(layout.config.checkpoint.asynchronous))

    def overlap(self) -> float:
        """Return the share of a long run's steps during which flows with beside="steps" are sent."""
        return 0.0

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Add to `volume` what weights and gradients send in a step.

        `has`: entries on a rank (`plan.facts.cut_weights`). `step`: the number of steps before this
        one; None: the mean step of a long run.
        """
        send_gradients(volume, layout, facts, has, step)

    def send_norm(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str]
    ) -> None:
        """Add to `volume` what the gradient norm sends. `has`: entries on a rank."""
        send_norm(volume, layout, has)

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """Return what offloading copies in a step. `trainable`: parameters that a rank updates."""
        return Copied(0.0, 0.0)


def cost_of(strategy: StrategyConfig) -> StrategyCost[Any]:
    """Return the cost part of a strategy. Raises ConfigError if a plug-in's cannot be imported."""
    cost: StrategyCost[Any] = part_class(strategy.cost_class)(strategy)
    return cost


def mixes(space: Space) -> Iterator[dict[str, Any]]:
    """Yield combinations of tp, cp, pp and ep that divide the devices, as fields of a strategy.

    Tensor and expert parallelism stay within a host, a stage has at least one layer, and context
    parallelism is not combined with a pipeline.
    """
    world = space.world
    within_a_host = divisors(space.per_node)
    of_all = divisors(world)
    degrees = list(product(within_a_host, of_all, of_all, (1,)))
    for pp, ep in product(of_all, within_a_host):
        if space.experts and ep > 1 and space.experts % ep == 0:
            degrees.append((1, 1, pp, ep))
    for tp, cp, pp, ep in degrees:
        is_plain = tp == cp == pp == ep == 1
        has_empty_stages = pp > max(1, space.layers)
        cuts_sequences_in_a_pipeline = cp > 1 and pp > 1
        does_not_divide = world % (tp * cp * pp * ep) > 0
        if is_plain or does_not_divide or has_empty_stages or cuts_sequences_in_a_pipeline:
            continue
        schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
        for schedule in schedules:
            pipeline = PipelineConfig(schedule=schedule)
            yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "pipeline": pipeline}
