"""What a human may say about spreading a model: one class a strategy, and the degrees that they have in common. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.core.section import KIND_ALONE, MOST_STEPS, PathText, Ranks, Section, Steps
from drumline.core.strategy import StrategySpec

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "model_parallel"]


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b",
        description="Order of forward and backward. gpipe: all forwards first; 1f1b: in turn, less memory; interleaved: several stages a"
        " rank, smaller bubble; zero_bubble: as interleaved, with the weights' gradients put into the bubble.",
    )
    stages_per_rank: int | None = Field(None, gt=0, le=1000, description="interleaved and zero_bubble: stages a rank holds; null: 2.")


class _Degrees(StrategySpec):
    """The mesh is pp × replicate × shard × cp × tp; what these leave of the processes is data parallel."""

    tp: Ranks = Field(1, description="Tensor parallel: each matrix is cut over this many ranks.")
    cp: Ranks = Field(1, description="Context parallel: each sequence is cut over this many ranks.")
    pp: Ranks = Field(1, description="Pipeline parallel: the layers are cut into stages over this many ranks.")
    cp_method: Literal["ulysses", "ring"] = Field(
        "ulysses", description="How attention sees the whole sequence: all-to-all over heads, or a ring of keys and values (GPUs)."
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="The schedule, where pp > 1.")


class AutoStrategy(StrategySpec):
    """The planner chooses: strategy, and of micro-batch and activation checkpointing what is not said."""

    position: ClassVar[int] = 0
    kind: Literal["auto"] = "auto"
    by: Literal["search", "rules"] = Field(
        "search", description="search: the fastest that is predicted to fit. rules: what a guide says, by counts of parameters and devices."
    )
    guide: Literal["parameters", "devices", "tree"] = Field(
        "parameters",
        description="by rules: parameters: below 1B ddp, 1-7B zero2, above zero3. devices: up to 4 and 8B ddp, else fsdp2. tree: the first"
        " of ddp, fsdp2 and fsdp2 with offload that is predicted to fit.",
    )
    nvme: PathText | None = Field(None, description="by search: a folder on an NVMe disk; ZeRO-3 that offloads to it is tried, too.")


class SingleStrategy(StrategySpec):
    position: ClassVar[int] = 1
    kind: Literal["single"] = "single"


class DPStrategy(StrategySpec):
    """nn.DataParallel: one process, a thread a device."""

    position: ClassVar[int] = 2
    kind: Literal["dp"] = "dp"


WITH_MEMORY = ("powersgd", "topk")  # compressions that keep on each rank what they have not sent


class Compression(Section):
    """What DDP sends instead of fp32 gradients."""

    kind: Literal["none", "bf16", "fp16", "powersgd", "topk", "int8"] = Field(
        "none",
        description="bf16, fp16: half the bytes. powersgd: low-rank factors (Vogels et al. 2019). topk: the largest entries, the rest kept"
        " for later (Stich et al. 2018). int8: 8-bit quantised, a quarter of the bytes.",
    )
    rank: int = Field(4, gt=0, le=10**6, description="powersgd: the rank of the factors.")
    start_step: int = Field(0, ge=0, le=MOST_STEPS, description="powersgd, topk: gradients are sent whole before this step.")
    ratio: float = Field(0.01, gt=0, le=1, description="topk: the part of the entries that is sent.")


class DDPStrategy(_Degrees):
    position: ClassVar[int] = 3
    kind: Literal["ddp"] = "ddp"
    bucket_cap_mb: float = Field(25.0, gt=0, le=10**6, description="MiB of gradients reduced together.")
    gradient_as_bucket_view: bool = Field(True, description="Gradients are views of the buckets: saves one copy of them.")
    static_graph: bool = Field(False, description="The set of used parameters never changes: lets DDP skip work.")
    find_unused_parameters: bool = Field(False, description="Some parameters may get no gradient in a step.")
    broadcast_buffers: bool = Field(True, description="Copy rank 0's buffers to all before each forward.")
    compression: Annotated[Compression, KIND_ALONE] = Field(
        default_factory=Compression, description="What is sent instead of fp32 gradients."
    )


class LocalSGDStrategy(StrategySpec):
    """Each rank trains by itself; every `period` steps the weights are averaged (Stich 2019)."""

    position: ClassVar[int] = 4
    kind: Literal["local_sgd"] = "local_sgd"
    period: Steps = Field(8, description="Steps between two averagings.")
    start_step: int = Field(0, ge=0, le=MOST_STEPS, description="Average at each step before this one.")


class DiLoCoStrategy(StrategySpec):
    """Each rank trains by itself; every `period` steps an outer Nesterov step is taken (Douillard et al. 2023)."""

    position: ClassVar[int] = 5
    kind: Literal["diloco"] = "diloco"
    period: Steps = Field(50, description="Inner steps between two outer ones.")
    outer_lr: float = Field(0.7, gt=0, le=1000, description="Rate of the outer step.")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step.")


class FSDP2Strategy(_Degrees):
    position: ClassVar[int] = 6
    kind: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = Field(
        True, description="true: full shard, weights are gathered again for backward. false: only gradients and moments stay sharded."
    )
    replicate: Ranks = Field(1, description="Hybrid: this many copies, each sharded over the other ranks. 1: one copy over all ranks.")
    sync_each_micro_batch: bool = Field(True, description="Reduce gradients after each micro-batch; false: keep them whole until the step.")
    prefetch: int = Field(1, ge=0, le=1000, description="Blocks gathered ahead of the one that computes in forward. 0: as torch orders it.")
    backward_prefetch: int | None = Field(None, ge=0, le=1000, description="The same in backward; null: as in forward.")
    offload: Literal["none", "cpu"] = Field("none", description="cpu: weights, gradients and moments stay, and the step runs, on the host.")
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Type weights are gathered in; auto: the precision's. fp32: gathered whole, cast op by op to the precision.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Type gradients are reduced in.")
    wrap: list[str] | None = Field(None, description="Class names of the blocks that are gathered by themselves; null: the model's own.")


class Offload(Section):
    kind: Literal["none", "cpu", "nvme"] = Field("none", description="Where it lives while it is not used.")
    path: PathText | None = Field(None, description="nvme: a folder on the disk.")
    pin_memory: bool = Field(False, description="Page-locked host memory: faster copies.")

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Offload:
        if self.kind == "nvme" and self.path is None:
            raise ValueError("nvme needs `path`: a folder on the disk")
        return self


OffloadField = Annotated[Offload, KIND_ALONE]


class ZeroPlusPlus(Section):
    """ZeRO++ (Wang et al. 2023)."""

    quantized_weights: bool = Field(False, description="Gather weights as 8-bit blocks.")
    quantized_gradients: bool = Field(False, description="Reduce gradients as 4-bit blocks.")
    hierarchical_partition: Ranks = Field(1, description="Ranks of a second copy of the weights' partition; 1: none.")


class _Zero(StrategySpec):
    config: PathText | dict[str, Any] | None = Field(
        None, description="A DeepSpeed config of your own: a JSON, relative to the YAML, or its keys. `auto` values are filled in."
    )
    offload_optimizer: OffloadField = Field(default_factory=Offload, description="Where moments and fp32 weights live, and the step runs.")
    options: dict[str, Any] = Field(default_factory=dict, description="Any other keys of a DeepSpeed config, passed through.")
    flops_profiler: bool = Field(False, description="DeepSpeed's profile of one step, into RUN/flops_profile.txt.")


class Zero1Strategy(_Zero):
    position: ClassVar[int] = 7
    kind: Literal["zero1"] = "zero1"


class Zero2Strategy(_Zero):
    position: ClassVar[int] = 8
    kind: Literal["zero2"] = "zero2"


class Zero3Strategy(_Zero):
    position: ClassVar[int] = 9
    kind: Literal["zero3"] = "zero3"
    offload_parameters: OffloadField = Field(default_factory=Offload, description="Where weights live while they are not used.")
    zeropp: ZeroPlusPlus = Field(default_factory=ZeroPlusPlus, description="ZeRO++ switches.")


class _Alone(StrategySpec):
    """One degree given by the name of the strategy; the other processes hold copies (DDP)."""

    degree: Ranks | None = Field(None, description="Ranks that share one copy of the model; null: all.")


class TPStrategy(_Alone):
    position: ClassVar[int] = 10
    kind: Literal["tp"] = "tp"


class CPStrategy(_Alone):
    position: ClassVar[int] = 11
    kind: Literal["cp"] = "cp"
    method: Literal["ulysses", "ring"] = Field("ulysses", description="As cp_method of the other strategies.")


class PPStrategy(_Alone, PipelineConfig):
    position: ClassVar[int] = 12
    kind: Literal["pp"] = "pp"


class ModelParallelStrategy(_Alone):
    """The naive one: layers on devices in turn, one micro-batch at a time."""

    position: ClassVar[int] = 13
    kind: Literal["model_parallel"] = "model_parallel"


ZeroStrategy = Zero1Strategy | Zero2Strategy | Zero3Strategy
AnyStrategy = StrategySpec
