"""Weights, gradients and moments sharded over ranks (ZeRO-3, Rajbhandari et al. 2020), by torch's fully_shard."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drumline.config.mesh import Mesh, divide
from drumline.config.refusal import no_option
from drumline.config.section import Ranks
from drumline.config.strategy import OFFLOADED, DataParallel, Degrees, Precision


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
    cost_class: ClassVar[str | type] = "drumline.planner.strategies.fsdp2:FSDP2Cost"
    engine_class: ClassVar[str | type] = "drumline.engine.strategies.fsdp2.spec:FSDP2Spec"
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

    def mesh(self, world: int) -> Mesh:
        remaining, degrees = self.remaining_ranks_and_degrees(world)
        copies = f"{self.replicate} copies"
        shard = divide(remaining, self.replicate, copies, "strategy.replicate", "data rank")
        return Mesh(replicate=self.replicate, shard=shard, **degrees)

    def gathers_ends_apart(self, mesh: Mesh, is_own_module: bool) -> bool:
        """Return whether the embedding and the head are FSDP units of their own.

        Such a unit is gathered only while it computes. Otherwise they are gathered with the root,
        until the end of a micro-batch.

        Args:
            mesh: The mesh.
            is_own_module: Whether the model is a torch module of the user's own, which may use the
                head's weight outside of the head's forward.
        """
        return self.reshards and mesh.pp == 1 and not is_own_module

    @property
    def reshards(self) -> bool:
        """Whether the whole weights of a block are freed after its forward."""
        if self.reshard_after_forward is None:
            return self.pp == 1
        return self.reshard_after_forward

    def data_parallel(self, mesh: Mesh) -> DataParallel:
        return "fsdp2"

    def offloads(self) -> tuple[str, str]:
        return self.offload, self.offload

    def gathered_in(self, precision: Precision, images: bool) -> Precision | None:
        """Return the type that weights are gathered in; None if they are gathered in fp32.

        A model of images gets its pixels in fp32, so its weights stay fp32 and autocast casts each
        operation.
        """
        if self.param_dtype != "auto":
            dtype: Precision = self.param_dtype
        elif images:
            return None
        else:
            dtype = precision
        if dtype == "fp32":
            return None
        return dtype

    def notes(self, plan_world: int, devices: int, micro_batch: int) -> list[str]:
        if self.pp == 1:
            return []
        return ["fsdp2 in a pipeline reduces gradients once a step, after the last micro-batch"]

    def describe(self, mixed: bool, data: int) -> tuple[str, str]:
        """Return the strategy's words in a table, as `Degrees.describe` does."""
        word: str = self.kind
        if not self.reshards:
            word += " grad-op"
        if self.replicate > 1:
            word += " hybrid"
        if self.offload != "none":
            word += " offload"
        name = word
        if self.replicate > 1:
            name += f" {self.replicate}"
        if mixed:
            return self.kind, name
        return word, name

    def complexity(self) -> int:
        # A hybrid and an unusual schedule count once; offloading counts for more.
        complexity = int(self.replicate > 1 or super().complexity() > 0)
        if self.offload != "none":
            complexity += OFFLOADED
        return complexity

    def shards(self, mesh: Mesh) -> int:
        """Context and expert parallel ranks shard with the data ranks, copies do not."""
        return mesh.shard * mesh.ep * mesh.cp

    @property
    def prefetch_in_backward(self) -> int:
        """The number of blocks that are gathered ahead in backward."""
        if self.backward_prefetch is None:
            return self.prefetch
        return self.backward_prefetch
