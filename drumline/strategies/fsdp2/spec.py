"""Weights, gradients and moments sharded over ranks (ZeRO-3, Rajbhandari et al. 2020), by torch's fully_shard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.core.cost import (
    FULL,
    LOW,
    WIDTH,
    Beside,
    Buffers,
    Copied,
    State,
    Volume,
    kind_of,
    stepping,
)
from drumline.core.estimate import Activations
from drumline.core.facts import (
    ModelFacts,
    Part,
    ends,
    ends_by_unit,
    largest_block,
    rank_params,
    takes_fp8,
)
from drumline.core.mesh import Mesh, divide
from drumline.core.plan import Layout, Plan
from drumline.core.rule import Case, Refusal, no_option
from drumline.core.section import Ranks
from drumline.core.strategy import (
    OFFLOADED,
    DataParallel,
    Degrees,
    Precision,
    Space,
    StrategySpec,
    mixes,
)

MOST_COPIES = 4  # sizes of a hybrid's shard groups that are tried: a host, two, four, eight


class FSDP2Strategy(Degrees):
    position: ClassVar[int] = 6
    simplicity: ClassVar[int] = 3
    compared: ClassVar[bool] = True
    in_step: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = True
    whole_weights: ClassVar[bool] = False
    lacks = (
        *no_option(
            "offload_nvme",
            "torch offloads to host memory only",
            "fsdp2 with offload=cpu, or zero3 with offload_parameters",
        ),
        *no_option(
            "compression",
            "shards are reduced by reduce-scatter, which has no hooks",
            "reduce_dtype=bf16",
        ),
    )
    kind: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool | None = Field(
        None,
        description="true: full shard, weights are gathered again for backward. false: only gradients and moments stay sharded. null: true,"
        " and false in a pipeline, where each micro-batch would gather all weights of its stage again.",
    )
    replicate: Ranks = Field(
        1,
        description="Hybrid: this many copies, each sharded over the other ranks. 1: one copy over all ranks.",
    )
    sync_each_micro_batch: bool = Field(
        True,
        description="Reduce gradients after each micro-batch; false: keep them whole until the step.",
    )
    prefetch: int = Field(
        1,
        ge=0,
        le=1000,
        description="Blocks gathered ahead of the one that computes in forward. 0: as torch orders it.",
    )
    backward_prefetch: int | None = Field(
        None, ge=0, le=1000, description="Blocks gathered ahead in backward; null: as in forward."
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="cpu: weights, gradients and moments stay, and the step runs, on the host.",
    )
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Type weights are gathered in; auto: the precision's. fp32: gathered whole, cast op by op to the precision.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type gradients are reduced in."
    )
    wrap: list[str] | None = Field(
        None,
        description="Class names of the blocks that are gathered by themselves; null: the model's own.",
    )

    def refusals(self, case: Case) -> Iterator[Refusal]:
        types = self.param_dtype, self.reduce_dtype
        if case.facts is not None and (
            missing := sorted(set(self.wrap or ()) - case.facts.classes)
        ):
            reason, there = (
                f"the model has no module of class {', '.join(missing)}",
                f"there are {', '.join(sorted(case.facts.classes))}",
            )
            yield Refusal("wrap × the model", reason, there, "strategy.wrap")
        if case.precision != "fp16" and "fp16" in types:
            reason = "gradients in fp16 fall to zero without the loss scale of precision=fp16"
            yield Refusal(
                "fp16 weights or gradients × no loss scale",
                reason,
                "use precision=fp16, or bf16 for the two types",
            )
        if (case.config.images_alone or case.config.plain) and self.param_dtype in ("bf16", "fp16"):
            reason = "inputs and the statistics of batch norms are fp32, and layers take one type"
            instead = "leave strategy.param_dtype out: autocast computes in low precision, op by op"
            yield Refusal(
                "low-precision weights of images or of a module of your own",
                reason,
                instead,
                "strategy.param_dtype",
            )
        if case.mesh.pp > 1 and self.pipeline_schedule()[0] == "zero_bubble":
            reason = "the split backward does not see through FSDP2's hooks: measured, weights of later stages silently get no gradient"
            yield Refusal("zero_bubble × fsdp2", reason, "use schedule: interleaved")

    def mesh(self, world: int) -> Mesh:
        rest, degrees = self.rest(world)
        shard = divide(rest, self.replicate, f"{self.replicate} copies", "strategy.replicate")
        return Mesh(replicate=self.replicate, shard=shard, **degrees)

    def gathers_ends_apart(self, mesh: Mesh, is_own_module: bool) -> bool:
        """Return whether the embedding and the head are units of their own, which are gathered while they compute.

        Otherwise they are gathered with the root, and stay until the end of a micro-batch. `is_own_module`: any torch
        module, which may use the head's weight outside of its forward.
        """
        return self.reshards and mesh.pp == 1 and not is_own_module

    @property
    def reshards(self) -> bool:
        """Whether a block's weights are given back after its forward."""
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "fsdp2"

    def offloads(self) -> tuple[str, str]:
        return self.offload, self.offload

    def gathered_in(self, precision: Precision, images: bool) -> Precision | None:
        """A model of images gets its pixels in fp32, so its weights stay fp32 and autocast goes op by op."""
        if images and self.param_dtype == "auto":
            return None
        dtype: Precision = precision if self.param_dtype == "auto" else self.param_dtype
        return None if dtype == "fp32" else dtype

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        return (
            ["fsdp2 in a pipeline reduces gradients once a step, after the last micro-batch"]
            if self.pp > 1
            else []
        )

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        hybrid, offload = self.replicate > 1, self.offload != "none"
        word = (
            self.kind + " grad-op" * (not self.reshards) + " hybrid" * hybrid + " offload" * offload
        )
        return (self.kind if mixed else word), word + f" {self.replicate}" * hybrid

    def unusual(self) -> int:
        return int(self.replicate > 1 or super().unusual() > 0) + OFFLOADED * (
            self.offload != "none"
        )

    @classmethod
    def candidates(cls, space: Space) -> Iterator[StrategySpec]:
        if space.world > 1:
            yield from cls.shardings(space, {}, 1)
        yield cls(offload="cpu")
        for degrees in mixes(space):
            model = degrees["tp"] * degrees["cp"] * degrees["pp"]
            if space.world // model * degrees["cp"] > 1:
                yield from cls.shardings(space, degrees, model)

    @classmethod
    def shardings(cls, space: Space, degrees: dict[str, Any], model: int) -> Iterator[StrategySpec]:
        """Full, of gradients alone, and hybrids whose shards stay within a host, two, four or eight. `model`: ranks that share samples."""
        if degrees.get("pp", 1) > 1:  # there null is `false`
            degrees = {**degrees, "reshard_after_forward": True}
        yield cls(**degrees)
        yield cls(**{**degrees, "reshard_after_forward": False})
        data = space.world // model
        for hosts in (2**i for i in range(MOST_COPIES)):
            shard, rest = divmod(space.per_node * hosts, model)
            # Shard is 0 with a rest alone.
            divides = not (rest or data % shard or shard % degrees.get("ep", 1))
            if hosts < space.nodes and divides and 1 < shard < data:
                yield cls(**degrees, replicate=data // shard)

    def fallbacks(self, is_shared: bool, device: str) -> list[tuple[int, StrategySpec]]:
        lean = self.model_copy(
            update={
                "reshard_after_forward": True,
                "replicate": 1,
                "sync_each_micro_batch": True,
                "prefetch": 0,
            }
        )
        return [*([] if lean == self else [(2, lean)]), *lean.offloaded(device)]

    def offloaded(self, device: str) -> list[tuple[int, StrategySpec]]:
        """States on the host: of use where that is another memory."""
        return (
            [(3, self.model_copy(update={"offload": "cpu"}))]
            if device == "cuda" and self.offload != "cpu"
            else []
        )

    def shards(self, mesh: Mesh) -> int:
        """Context and expert parallel ranks shard with the data ranks, copies do not."""
        return mesh.shard * mesh.ep * mesh.cp

    def buffers(
        self, layout: Layout, facts: ModelFacts, mine: Part, state: State, kept: Activations | None
    ) -> Buffers:
        """The root's weights stay gathered from forward on, the head's from the loss on, and those of the running block and of the
        prefetched ones while they run (torch's fully_shard)."""
        tp, shards, piped = layout.mesh.tp, self.shards(layout.mesh), layout.mesh.pp > 1
        width, reduced = (LOW if kind_of(layout) == "low" else FULL), WIDTH[self.reduce_dtype]
        root, block, whole = (
            ends(facts, mine, tp),
            largest_block(facts, mine, tp),
            rank_params(facts, mine, tp),
        )
        frozen = min(width, WIDTH[layout.precision])  # of a frozen entry
        gathered, one, every = (
            width * (has.entries - has.low) + frozen * has.low for has in (root, block, whole)
        )
        behind = self.prefetch if self.backward_prefetch is None else self.backward_prefetch
        # While a block's weights are copied out of what was gathered for it, both are there.
        running, begun, returning = one * (1 + (self.prefetch or 1)), one, one * (behind or 1)
        if not self.reshards:
            gathered, running, begun, returning = every, one, 0, one
        waits = (not self.sync_each_micro_batch and layout.batch.accumulation > 1) or piped
        unreduced = reduced * whole.trainable if waits else 0
        of_head = 0.0
        if self.gathers_ends_apart(layout.mesh, layout.config.plain):
            _, head, rest = ends_by_unit(facts, mine, tp)
            # The embedding is gone when the first block runs, and backward does not read it.
            of_head, gathered = (
                width * (has.entries - has.low) + frozen * has.low for has in (head, rest)
            )
        # Unsharded gradients; the buffer in which those of the block before are being reduced, and the result.
        result = FULL * math.ceil(block.trainable / shards)
        reduction, second = width * block.trainable, reduced * block.trainable + result
        if unreduced:
            reduction, second = (width + 2 * reduced + width) * block.trainable + result, 0
        offloaded = self.offload == "cpu" and layout.device == "cuda"
        copies = FULL * (root.entries + block.entries) / shards if offloaded else 0
        # The head's gradient is reduced as soon as it is there; of the root's the rest waits for the end.
        of_ends = root.trainable
        at_head = 0.0
        if of_head:
            of_ends -= head.trainable
            at_head = reduced * head.trainable + FULL * head.trainable / shards
        return Buffers(
            through=gathered + unreduced + copies,
            head=of_head,
            first=at_head,
            block=running,
            begun=begun,
            backward=returning + reduction,
            second=second,
            last=(width + reduced) * of_ends,
            step=0.0 if offloaded else stepping(layout, rank_params(facts, mine, tp, shards), True),
        )

    def send(
        self, volume: Volume, layout: Layout, facts: ModelFacts, has: Counter[str], step: int | None
    ) -> None:
        """Each block is gathered for forward and, unless it stays whole, for backward; embedding, last norm and head once. All that
        for each micro-batch. A stage of a pipeline keeps in backward what it has gathered, so it gathers once more than there are
        micro-batches, whatever the schedule. Shards are filled up to equal size; gradients are reduced in `reduce_dtype`."""
        shards, rounds, piped = (
            self.shards(layout.mesh),
            layout.batch.accumulation,
            layout.mesh.pp > 1,
        )
        width = WIDTH[self.gathered_in(layout.precision, layout.config.images_alone) or "fp32"]
        spared = width - min(width, WIDTH[layout.precision])  # bytes of a frozen entry
        units, root = (
            width * has[name] - spared * has[f"{name}_low"] for name in ("units", "root")
        )
        if (
            layout.config.precision.gather == "fp8"
        ):  # the scale of each is the largest entry's, over all shards
            cast = [
                weight.numel
                for block in facts.block_weights
                for weight in block
                if takes_fp8(weight)
            ]
            units -= (width - 1) * sum(cast) // shards
            volume.add("all_reduce", FULL * len(cast), shards, "shard")
        forward = 1 if piped and not self.reshards else rounds
        backward = 0 if not self.reshards else 1 if piped else rounds
        # Of a rank, mean over the stages.
        blocks = max(1, len(facts.block_weights)) / layout.mesh.pp
        rooted = 1 if piped else rounds
        reductions = rounds if self.sync_each_micro_batch and not piped else 1
        beside: Beside = "backward" if reductions == rounds else "last"
        volume.add("all_gather", rooted * root, shards, "shard", rooted)
        ranks = shards // layout.mesh.ep  # of experts that lie on some data ranks
        for entries, over in (
            (units, shards),
            (width * has["experts"] - spared * has["experts_low"], ranks),
        ):
            volume.add("all_gather", forward * entries, over, "shard", forward * blocks, "forward")
            volume.add(
                "all_gather", backward * entries, over, "shard", backward * blocks, "backward"
            )
        for entries, over in (
            (has["units_trainable"] + has["root_trainable"], shards),
            (has["experts_trainable"], ranks),
        ):
            reduced = reductions * WIDTH[self.reduce_dtype] * entries
            volume.add(
                "reduce_scatter", reduced * over, over, "shard", reductions * (blocks + 1), beside
            )
            volume.add(
                "all_reduce",
                reduced,
                self.replicate,
                "replicate",
                reductions * (blocks + 1),
                beside,
            )

    def copied(self, layout: Layout, facts: ModelFacts, trainable: float) -> Copied:
        rounds, mesh = layout.batch.accumulation, layout.mesh
        up = (
            (4 * facts.trainable + WIDTH[layout.precision] * facts.frozen)
            / (mesh.tp * mesh.pp * self.shards(mesh))
            * rounds
            * (2 if self.reshards else 1)
        )
        return Copied(
            up, 4 * trainable * (rounds if self.sync_each_micro_batch else 1), hidden=True
        )

    def spread(
        self, plan: Plan, whole: Any, model: Any, roots: list[tuple[Any, Any]], values: Any
    ) -> Any:
        from drumline.strategies.fsdp2.transform import spread

        return spread(self, plan, whole, model, roots, values)
