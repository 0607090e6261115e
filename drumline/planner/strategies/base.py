"""The interface of a strategy's cost: what the planner asks each strategy.

It asks which variants to search, how many bytes a rank holds, and what a step sends and copies.

A new strategy has a subclass of `StrategyCost` in a file of its own. Its section of the config names
this class in `cost_class`, as "module:Class". The search finds it through the registry of sections.
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
from drumline.plan.facts import ModelFacts, PipelinePart
from drumline.plan.plan import Layout
from drumline.planner.cost.terms import (
    Buffers,
    CommunicationVolume,
    Copied,
    Host,
    State,
    native_state,
    replica_buffers,
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
    """The base of all strategies' costs. The defaults are those of a model replica on each rank.

    The defaults read these answers of the section: `shards`, `optimizer_shards`, `copies`,
    `offloads`, `keeps_low`, `gathered_in` and `exchange` (config.strategy.StrategyConfig).

    All methods are pure. `strategy`: the section of the YAML.
    """

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    @classmethod
    def candidates(cls, strategy_class: type[S], space: Space) -> Iterator[StrategyConfig]:
        """Yield the strategies of this kind to try if the user has left the strategy open.

        `strategy_class`: the class of the strategy's section, whose objects are yielded.
        """
        yield from ()

    def variants(self) -> Iterator[StrategyConfig]:
        """Yield the strategies to try if the user has named this one: itself, and others like it.

        The others differ in keys that the user has left open.
        """
        yield self.strategy

    def with_pageable_memory(self) -> StrategyConfig | None:
        """Return the strategy to try if page-locked memory on the host may be too much; None: none."""
        return None

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategyConfig]]:
        """Return strategies that take the same steps with less memory, each with its number of changes.

        A run that ran out of memory goes on with the one of the fewest changes that fits.
        `is_shared`: the samples are divided over more than one rank. `device`: cpu or cuda.
        """
        return []

    def kept_bytes(self, world: int) -> int:
        """Return the bytes of communication state between steps, for each trainable parameter.

        It is what compression has not sent yet (error feedback), or fragments of weights under way.
        `world`: the number of ranks.
        """
        return 0

    def outer_bytes(self) -> int:
        """Return the bytes, for each trainable parameter, of a second optimizer, such as DiLoCo's outer one."""
        return 0

    def state(self, layout: Layout, facts: ModelFacts, model_part: PipelinePart) -> State:
        """Return the bytes that a rank with this part of the model holds between steps."""
        return native_state(layout, facts, model_part, self.outer_bytes())

    def buffers(
        self,
        layout: Layout,
        facts: ModelFacts,
        model_part: PipelinePart,
        state: State,
        activations: Activations | None,
    ) -> Buffers:
        """Return the bytes of buffers that a rank holds besides `state` and activations.

        `activations`: traced or by formula. Only traced ones have the bytes of autocast's casts of
        weights (`copies`), which depend on the model's own code.
        """
        communication_state_bytes = self.kept_bytes(layout.mesh.world_size)
        return replica_buffers(
            layout, facts, model_part, state, activations, communication_state_bytes
        )

    def host(self, layout: Layout, facts: ModelFacts, between: int) -> Host:
        """Return the bytes that a rank holds in host memory, by phase of the run.

        Native engines read each rank's part onto the device, and copy a checkpoint that is written in
        the background. `between`: bytes of its states in host memory.
        """
        return Host(between, between, 0, int(layout.config.checkpoint.asynchronous))

    def overlap(self) -> float:
        """Return the share of a long run's steps during which flows with beside="steps" are sent."""
        return 0.0

    def send(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
        step: int | None,
    ) -> None:
        """Add to `volume` what weights and gradients send in a step.

        `rank_entries`: entries of weights on a rank, by the keys of `plan.facts.sharded_sizes`: `units`
        are sharded with their block, `root` with the rest of the model, `experts` over some data
        ranks only. With `_trainable` they are of trainable weights, with `_low` of frozen ones in
        low precision. `tensors` is the number of trainable weights.
        `step`: the number of steps before this one; None: the mean step of a long run.
        """
        send_gradients(volume, layout, facts, rank_entries, step)

    def send_norm(
        self,
        volume: CommunicationVolume,
        layout: Layout,
        facts: ModelFacts,
        rank_entries: Counter[str],
    ) -> None:
        """Add to `volume` what the gradient norm sends. `rank_entries`: as of `send`."""
        send_norm(volume, layout, rank_entries)

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        """Return the bytes that offloading transfers in a step.

        `trainable`: parameters that a rank updates.
        """
        return Copied(0.0, 0.0)


def cost_of(strategy: StrategyConfig) -> StrategyCost[Any]:
    """Return the cost part of a strategy. Raises ConfigError if a plug-in's cannot be imported."""
    cost: StrategyCost[Any] = part_class(strategy.cost_class)(strategy)
    return cost


def parallelism_combinations(space: Space) -> Iterator[dict[str, Any]]:
    """Yield the combinations of tp, cp, pp and ep that divide the devices, as fields of a strategy.

    Tensor and expert parallelism stay within a host, with the ranks of a sequence between them. A
    stage has at least one layer, and context parallelism is not combined with a pipeline.
    """
    world = space.world
    within_a_host = divisors(space.per_node)
    of_all = divisors(world)
    degrees = list(product(within_a_host, of_all, of_all, (1,)))
    for tp, cp, pp, ep in product(within_a_host, within_a_host, of_all, within_a_host):
        is_within_a_host = space.per_node % (tp * cp * ep) == 0
        divides_experts = space.experts > 0 and space.experts % (tp * ep) == 0
        if ep > 1 and is_within_a_host and divides_experts:
            degrees.append((tp, cp, pp, ep))
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


# Plug-ins import this function by its name of earlier versions.
mixes = parallelism_combinations
