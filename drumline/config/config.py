"""The typed Config: the keys of the YAML, their defaults and their meaning. No torch here.

Every class refuses unknown keys. A union (strategy, algorithm, data source) is discriminated by
`kind`, and a bare string is short for `{kind: string}`. Descriptions go into `drumline schema`, and
from there into the user's editor.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from drumline.config.algorithm import AlgorithmField, AlgorithmSpec
from drumline.config.cluster import CLUSTER_ALONE, ClusterConfig
from drumline.config.data import DATA_ALONE, DataConfig, Source
from drumline.config.launcher import Launcher, LauncherSpec
from drumline.config.model import Head, Model, ModelConfig
from drumline.config.optimizer import OptimizerConfig
from drumline.config.registry import find, make
from drumline.config.run import EvalConfig, HealthConfig, ReportConfig, RunConfig
from drumline.config.section import (
    KIND_ALONE,
    MOST_SAMPLES,
    MOST_STEPS,
    Count,
    Epochs,
    Rate,
    RefusesNull,
    Section,
    Short,
    Steps,
    passes,
)
from drumline.config.strategy import Strategy, StrategyConfig
from drumline.config.urls import UrlText


class NoAdapter(Section):
    kind: Literal["none"] = "none"

    @property
    def is_reference_if_disabled(self) -> bool:
        """Whether disabling the adapter gives the model that training starts from, as in TRL.

        The reference model is then this model with its adapter disabled, and takes no memory of its
        own. Without an adapter nothing can be disabled.
        """
        return False


class LoRAFactors(Section):
    """One set of low-rank factors."""

    r: int = Field(16, gt=0, le=10**5, description="Rank of the two factors.")
    alpha: Rate = Field(32.0, description="The product is scaled by alpha / r.")
    rslora: bool = Field(
        False, description="Scale by alpha / √r in place of alpha / r (Kalajdzievski 2023)."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the first factor.")
    targets: Literal["attention", "all-linear"] | list[str] = Field(
        "all-linear",
        description="What gets an adapter. all-linear: the linear layers of the blocks and the experts of a mixture. attention: the linear"
        " layers of attention. A list names layers by the ends of their names, or parts of a vision-language model: vision, projector,"
        " language. Embedding, head and vision tower get an adapter only by a list; routers get none.",
    )


class LoRAConfig(LoRAFactors):
    """Low-rank adapters (Hu et al. 2021), by PEFT; the model's own weights are frozen."""

    kind: Literal["lora"] = "lora"
    dora: bool = Field(
        False,
        description="Also train the length of each row of an adapted weight (DoRA, Liu et al. 2024).",
    )
    init: Literal["zero", "pissa", "pissa_fast"] = Field(
        "zero",
        description="zero: the product starts at zero. pissa: at the largest singular values of the weight, which loses them (Meng et al."
        " 2024); pissa_fast: those are found by 16 rounds of subspace iteration.",
    )
    quantize: Literal["none", "4bit", "8bit"] = Field(
        "none",
        description="Pack the frozen linear layers of the blocks and a mixture's experts in 4 or 8 bits (QLoRA, Dettmers et al. 2023).",
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="Modules that are trained whole, by the ends of their names: lm_head."
    )
    trainable_tokens: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = Field(
        (),
        description="Ids of tokens whose rows of the embedding and the head are trained. Those of"
        " model.new_tokens are added, unless modules_to_save or targets have embedding and head.",
    )
    more: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], LoRAFactors] = Field(
        default_factory=dict,
        description="Further adapters by name, trained at once: their products add up. Each is exported by itself.",
    )

    @model_validator(mode="after")
    def _together(self) -> LoRAConfig:
        if self.dora and self.more:
            raise ValueError(
                "dora sets the length of a whole row, to which the products of `more` would be added: take one of them out"
            )
        if len(set(self.trainable_tokens)) < len(self.trainable_tokens):
            raise ValueError("a token stands twice in trainable_tokens")
        if {"default", "weight"} & self.more.keys():
            raise ValueError(
                "no adapter of `more` is called default or weight: PEFT means something else by that"
            )
        return self

    @property
    def is_reference_if_disabled(self) -> bool:
        return self.init == "zero" and not self.modules_to_save


Adapter = Annotated[NoAdapter | LoRAConfig, Field(discriminator="kind"), KIND_ALONE]


class BatchConfig(Section):
    """The sizes of a batch.

    global_samples = micro_batch × accumulation × data ranks, and global_tokens = global_samples ×
    data.max_length. Set the global batch, or the keys of each rank, or both. `plan.batch` fills in
    the others, and refuses keys that do not agree.
    """

    global_samples: Count | None = Field(
        None, description="Samples of one optimizer step over all devices."
    )
    global_tokens: int | None = Field(
        None,
        gt=0,
        le=10**4 * MOST_SAMPLES,
        description="Tokens of one optimizer step: a multiple of data.max_length.",
    )
    micro_batch: Count | None = Field(None, description="Samples per forward pass on each device.")
    accumulation: Count | None = Field(
        None, description="Micro-batches per device and optimizer step."
    )

    @model_validator(mode="after")
    def _one_global(self) -> BatchConfig:
        if self.global_samples is not None and self.global_tokens is not None:
            raise ValueError("give global_samples or global_tokens, not both")
        return self


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="How the learning rate changes after warm-up; wsd: constant, then linear decay.",
    )
    warmup_steps: int | None = Field(
        None, ge=0, le=MOST_STEPS, description="Steps of linear warm-up."
    )
    warmup_ratio: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Linear warm-up as a fraction of all steps; warmup_steps overrides it.",
    )
    warmup_from_zero: bool = Field(
        False,
        description="The first of W warm-up steps has rate 0, as in transformers, not 1 / (W + 1).",
    )
    min_ratio: float = Field(
        0.0, ge=0, le=1, description="The last learning rate as a fraction of the peak."
    )
    decay_ratio: float = Field(
        0.2, gt=0, le=1, description="wsd: the fraction of all steps that decays."
    )

    def rate(self, step: int, steps: int, warmup: int) -> float:
        """Return the learning rate of step `step` (from 0) of `steps`, as a fraction of the peak.

        Warm-up rises linearly, from 0 or from one step above it, and reaches the peak at step
        `warmup`. Then the rate is constant; or falls linearly to `min_ratio`; or as a cosine to
        `min_ratio` (Loshchilov & Hutter 2017, one half period); or is constant and falls linearly
        to `min_ratio` over the last `decay_ratio` of all steps (wsd, Hu et al. 2024). The schedule
        would reach `min_ratio` one step after the last, so the last step still trains.
        """
        if step < warmup:
            if self.warmup_from_zero:
                return step / warmup
            return (step + 1) / (warmup + 1)
        if self.kind == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - warmup)
        left = 1.0 - done
        if self.kind == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        elif self.kind == "wsd":
            decay_steps = max(1.0, self.decay_ratio * steps)
            left = min(1.0, (steps - step) / decay_steps)
        return self.min_ratio + (1.0 - self.min_ratio) * max(0.0, left)


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="Compute type; master weights stay fp32, unless set. auto: bf16 on GPUs that have it, fp32 elsewhere."
        " fp8 (experimental): bf16, and products of the blocks' linear layers in fp8, by torchao; on a CPU emulated.",
    )
    scaling: Literal["rowwise", "tensorwise"] = Field(
        "rowwise",
        description="fp8: a scale for each row, which is more exact, or for a whole tensor, which is faster.",
    )
    gather: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="fp8 under FSDP2, tensorwise: the type that those weights are gathered in.",
    )
    master: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="bf16: weights, gradients and AdamW's moments lie in bf16, and nothing in fp32 between steps.",
    )
    rounding: Literal["stochastic", "nearest", "kahan"] = Field(
        "stochastic",
        description="master=bf16: how a step rounds. stochastic: right in the mean; kahan: what is lost is kept in a third bf16;"
        " nearest: small updates are lost.",
    )
    initial_scale: float = Field(65536.0, gt=0, le=2.0**64, description="fp16: initial loss scale.")
    tf32: bool = Field(True, description="Use TF32 for fp32 matrix products on GPUs.")


class MemoryConfig(Section):
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="full: store only each block's input and recompute the block in backward. selective: also store the results of"
        " attention and of every second matrix product.",
    )
    checkpointed_blocks: Count | None = Field(
        None,
        description="Checkpoint the first N blocks, the others keep everything; null: all blocks.",
    )
    budget_gb: Rate | None = Field(
        None,
        description="Device memory of a training step in 10^9 bytes, as the planner counts it: of both kinds of checkpointing it takes the"
        " faster one, over as few blocks as that allows.",
    )
    activation_offload: bool = Field(
        False,
        description="Move what blocks keep for backward to host memory, and back one block ahead, while others compute.",
    )
    mlp_chunk: Count | None = Field(
        None,
        description="Tokens of a micro-batch that go through a block's feed-forward part at once, and again in backward; null: all.",
    )
    on_oom: Literal["stop", "replan"] = Field(
        "stop",
        description="When memory runs out, stop: report the nearest plan that fits. replan: resume with that plan from the newest"
        " checkpoint, with the same global batch (smaller micro-batch, checkpointing, sharding, offload). Requires our launcher.",
    )


def _none_for_auto(enabled: Any) -> Any:
    """Return None for `auto`, so that the planner decides. Another value is returned as it is."""
    if enabled == "auto":
        return None
    return enabled


class CompileConfig(Section):
    enabled: Annotated[bool | None, Short(_none_for_auto, {"const": "auto"})] = Field(
        None,
        description="torch.compile each block. auto, the same as null: on GPUs where the planner expects the run to save more seconds than"
        " compiling takes; not on a CPU.",
    )
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = Field(None, description="torch.compile's mode; null: its default.")
    loss: bool = Field(
        False,
        description="Also compile what the chunked cross-entropy does with the logits of a chunk.",
    )
    optimizer: bool = Field(
        False,
        description="Also compile the optimizer's step, of AdamW and SGD in the place of torch's fused kernels.",
    )


def _compile_section(value: Any) -> Any:
    """Return the section that `compile: auto`, `compile: true` or `compile: false` is short for."""
    if value == "auto" or isinstance(value, bool):
        return {"enabled": value}
    return value


COMPILE_ALONE = Short(_compile_section, {"enum": ["auto", True, False]})


class CheckpointConfig(Section):
    every: Steps | Literal["auto"] | Epochs | None = Field(
        None,
        description="Save every N steps, or `N epochs`; auto: as often as faults make it worth (`drumline plan --mtbf-hours`); null: only"
        " at the end and when the run is stopped.",
    )
    keep: Annotated[int, RefusesNull("set a number of checkpoints, or leave it out for 2")] = Field(
        2, gt=0, le=10**6, description="Keep the newest N checkpoints."
    )
    keep_best: bool = Field(True, description="Also keep the best checkpoint by eval.metric.")
    asynchronous: bool = Field(True, description="Write in the background while training goes on.")
    verify: bool = Field(True, description="Check every shard's checksum before loading.")
    wait_seconds: float = Field(
        600.0,
        ge=0,
        le=86400,
        description="How long to retry the last checkpoint when the disk is full. When the run is stopped by a signal, at most half of"
        " launch.grace_seconds.",
    )
    fallback_dir: str | None = Field(
        None,
        description="Folder on another disk for the last checkpoint, or its weights, if RUN's is full.",
    )
    url: UrlText | None = Field(
        None,
        description="Also keep the checkpoints of the run, its plan and its events at a URL: s3://bucket/path, gs://, file:// or another of"
        " fsspec. A run goes on from there where its folder is lost.",
    )
    in_memory_every: Steps | None = Field(
        None,
        description="Also keep the state in the memory of hosts (/dev/shm) every N steps, in twice its size: a run whose rank died goes on"
        " from there where that is newer than the disk. Linux.",
    )
    replicas: int = Field(
        0,
        ge=0,
        le=64,
        description="Where hosts share no disk: copy each host's part of a checkpoint to the disks of this many further hosts.",
    )
    export: Literal["none", "last", "best"] = Field(
        "best",
        description="Which checkpoint is exported to RUN/export as a Hugging Face folder; the last one if there is no best one.",
    )
    export_adapter: bool = Field(
        False,
        description="With an adapter: export only the adapter, as PEFT's files, not the merged model.",
    )
    export_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Type of the exported weights. auto: that of the files the model was loaded from; of an adapter fp32.",
    )

    @property
    def memory_copies(self) -> int:
        """Number of checkpoints in host memory at a time: the newest, and the one being written."""
        if self.in_memory_every is None:
            return 0
        return 2

    @property
    def every_steps(self) -> int | None:
        """Number of steps between two checkpoints; None if `every` is not set.

        It is None also before planning if `every` is auto or in epochs. A plan has resolved both to
        steps.
        """
        if isinstance(self.every, int):
            return self.every
        return None

    @property
    def allows_separate_folders(self) -> bool:
        """Whether each host may have a run folder of its own, and no disk is shared.

        It may if checkpoints are copied to a URL or to the disks of other hosts.
        """
        return self.url is not None or self.replicas > 0


class Config(Section):
    """The whole YAML."""

    model: Model = Field(default_factory=ModelConfig)
    algorithm: AlgorithmField = Field(default_factory=lambda: make(AlgorithmSpec, "sft"))
    data: Annotated[DataConfig, DATA_ALONE]
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: Annotated[ScheduleConfig, KIND_ALONE] = Field(default_factory=ScheduleConfig)
    strategy: Strategy = Field(default_factory=lambda: make(StrategyConfig, "auto"))
    adapter: Adapter = Field(default_factory=NoAdapter)
    precision: Annotated[PrecisionConfig, KIND_ALONE] = Field(default_factory=PrecisionConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    compile: Annotated[CompileConfig, COMPILE_ALONE] = Field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    launch: Launcher = Field(default_factory=lambda: make(LauncherSpec, "local"))
    run: RunConfig = Field(default_factory=RunConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    cluster: Annotated[ClusterConfig | None, CLUSTER_ALONE] = Field(
        None,
        description="The devices to plan for, also as `2x8xh100-80g`; null: the devices of this machine.",
    )

    @model_validator(mode="before")
    @classmethod
    def _best_by(cls, values: Any, info: ValidationInfo) -> Any:
        """Fill in the algorithm's metric for the best checkpoint, unless the config names one."""
        if not isinstance(values, dict):
            return values
        kind = values.get("algorithm")
        if isinstance(kind, dict):
            kind = kind.get("kind")
        if not isinstance(kind, str):
            return values
        spec = find(AlgorithmSpec, kind, **(info.context or {}))
        given = values.get("eval", {})
        if spec is None or not spec.best_by or not isinstance(given, dict):
            return values
        own_metric = spec.best_by.get("metric")
        if given.get("metric", own_metric) != own_metric:
            return values
        return {**values, "eval": {**spec.best_by, **given}}

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """Raise ValueError for sections that contradict each other."""
        self._check_own_module()
        ordering_key = self.data.first_ordering_key
        if self.algorithm.rollout is not None and ordering_key:
            fix = "use its weights"
            if ordering_key == "stream":
                fix = "leave it out"
            raise ValueError(
                f"data.{ordering_key} orders samples, and prompts are dealt by algorithm.curriculum: {fix}"
            )
        if self.data.stream:
            self._check_stream()
        return self

    def _check_own_module(self) -> None:
        """Raise ValueError for what does not go with a module of the user's own."""
        if self.algorithm.is_for_own_modules != self.has_own_module:
            model = f"model.kind {self.model.kind}"
            algorithm = f"algorithm.kind {self.algorithm.kind}"
            if self.has_own_module:
                what = f"{model} makes a module of your own, and {algorithm} is for Hugging Face models"
            else:
                what = (
                    f"{algorithm} is for modules of your own, and {model} is a Hugging Face model"
                )
            raise ValueError(
                f"{what}: a module of your own needs an objective of your own, and the other way round. For a Hugging Face model derive"
                " the objective from drumline.config.algorithm.AlgorithmSpec: algorithm mine.py:Name"
            )
        if not self.has_own_module:
            return
        if self.data.holdout:
            raise ValueError(f"model.kind {self.model.kind} has no data.holdout: give data.eval")
        if self.adapter.kind != "none":
            raise ValueError(f"model.kind {self.model.kind} has no adapter")
        key = self.data.first_filter_key or self.data.first_ordering_key
        if key:
            raise ValueError(
                f"data.{key} is of rows with columns, and model.kind {self.model.kind} takes samples as they are: leave it out"
            )
        self._require_unmapped("train", self.data.train)
        self._require_unmapped("eval", self.data.eval)

    def _check_stream(self) -> None:
        """Raise ValueError for what needs all rows, or their number, in a stream."""
        for key, every in (("checkpoint", self.checkpoint.every), ("eval", self.eval.every)):
            if passes(every):
                raise ValueError(f"data.stream has no epochs: give {key}.every in steps")
        if self.run.steps is None:
            raise ValueError(
                "data.stream reads rows as it goes, and does not know where they end: set run.steps"
            )
        needs_all = None
        if self.head == "embedding":
            needs_all = "the numbers by which equal texts are known"
        elif self.algorithm.kind == "rerank":
            needs_all = "checks for negatives"
        elif self.head not in ("lm", "score", "seq2seq"):
            needs_all = "its labels"
        elif self.algorithm.teaching is not None and not self.algorithm.teaching.asks_teacher_live:
            needs_all = "algorithm.log_probs: precomputed (live does not)"
        elif self.algorithm.reference_of(self) == "precomputed":
            needs_all = "algorithm.reference: precomputed (live or adapter does not)"
        if needs_all is not None:
            raise ValueError(
                f"data.stream has a block of rows at a time, and {needs_all} need all of them"
            )

    def _require_unmapped(self, role: str, sources: list[Source]) -> None:
        """Raise ValueError for a source that renames columns, which a user's own module ignores."""
        for index, source in enumerate(sources):
            for key in ("columns", "format"):
                field = type(source).model_fields[key]
                if getattr(source, key) != field.get_default(call_default_factory=True):
                    raise ValueError(
                        f"data.{role}[{index}].{key} is for models of text, and model.kind {self.model.kind} takes rows as they are:"
                        " leave it out"
                    )

    @property
    def has_own_module(self) -> bool:
        """Whether a torch module of the user's own is trained, and no Hugging Face model.

        Its samples are used as they are: there is no tokenizer, and there are no model files.
        """
        return self.model.builder is not None

    @property
    def packs(self) -> bool:
        """Whether rows are packed into sequences.

        Pairs, prompts and rows with a class never are.
        """
        return self.data.packing and self.algorithm.packs

    @property
    def head(self) -> Head:
        """The head of the trainable model."""
        return self.algorithm.head

    @property
    def images_alone(self) -> bool:
        """Whether rows are images without text, which have no tokenizer and no length."""
        return self.head == "image"
