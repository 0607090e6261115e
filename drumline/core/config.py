"""What a human may say: the typed Config, its defaults and their meaning. No torch here.

Every class refuses unknown keys. Where a thing comes in kinds (strategy, algorithm, data source) the union is told apart
by `kind`, and a bare string is short for `{kind: string}`. Descriptions feed `drumline schema` and so the user's editor.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from drumline.core.algorithms import ROLLOUT, Algorithm, ClassifyConfig, PPOConfig, SFTConfig
from drumline.core.cluster import CLUSTER_ALONE, ClusterConfig
from drumline.core.data import DataConfig
from drumline.core.model import Head, ModelConfig
from drumline.core.registry import make
from drumline.core.section import KIND_ALONE, MOST_SAMPLES, MOST_SEED, MOST_STEPS, Count, PathText, Ranks, Rate, Seconds, Section, Steps
from drumline.core.strategy import Strategy, StrategySpec

# -------------------------------------------------------------------------------------------------------------- adapter


class NoAdapter(Section):
    kind: Literal["none"] = "none"


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al. 2021), by PEFT; the model's own weights stay as they are."""

    kind: Literal["lora"] = "lora"
    r: int = Field(16, gt=0, le=10**5, description="Rank of the two factors.")
    alpha: Rate = Field(32.0, description="The product is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the first factor.")
    targets: Literal["attention", "all-linear"] | list[str] = Field(
        "all-linear",
        description="Linear layers that get an adapter: all in the blocks, those of attention, or names as they end. A vision tower gets"
        " some only where they are named.",
    )
    quantize: Literal["none", "4bit", "8bit"] = Field(
        "none", description="QLoRA (Dettmers et al. 2023): the frozen weights in 4 or 8 bits, by bitsandbytes on GPUs."
    )


Adapter = Annotated[NoAdapter | LoRAConfig, Field(discriminator="kind"), KIND_ALONE]


# ---------------------------------------------------------------------------------------------------- batch, optimizer, …


class BatchConfig(Section):
    """global_samples = micro_batch × accumulation × data ranks. Say the left side, or the right one; all must agree."""

    global_samples: Count | None = Field(None, description="Samples of one optimizer step over all devices.")
    global_tokens: int | None = Field(None, gt=0, le=10**4 * MOST_SAMPLES, description="The same in tokens: a multiple of data.max_length.")
    micro_batch: Count | None = Field(None, description="Samples a device takes at once.")
    accumulation: Count | None = Field(None, description="Micro-batches a device takes before one optimizer step.")

    @model_validator(mode="after")
    def _one_global(self) -> BatchConfig:
        if self.global_samples is not None and self.global_tokens is not None:
            raise ValueError("give global_samples or global_tokens, not both")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    kind: Literal["adamw", "sgd"] = Field("adamw", description="AdamW (Loshchilov & Hutter 2019) or SGD with momentum.")
    lr: float = Field(2e-5, gt=0, le=1000, description="Peak learning rate, before lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="linear: lr × ratio; sqrt: lr × √ratio; lr_base_devices or lr_base_samples gives the ratio."
    )
    lr_base_devices: Ranks = Field(1, description="lr was chosen for this many data-parallel devices: ratio = devices / this.")
    lr_base_samples: Count | None = Field(
        None, description="lr was chosen for a global batch of this many samples: ratio = global samples / this. Overrides lr_base_devices."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, le=1, description="AdamW's epsilon.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(0.0, ge=0, le=1000, description="Applies to matrices only, not to biases and norms.")
    max_grad_norm: float | None = Field(1.0, gt=0, le=10**12, description="Clip gradients to this global L2 norm; null: never.")
    fused: bool = Field(True, description="One kernel for the whole update where torch has one.")


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Course of the rate after warm-up; wsd: flat, then linear down."
    )
    warmup_steps: int | None = Field(None, ge=0, le=MOST_STEPS, description="Steps of linear warm-up.")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="Linear warm-up as a part of all steps; warmup_steps overrides it.")
    warmup_from_zero: bool = Field(False, description="The first of W warm-up steps has rate 0 (as transformers' has it), not 1 / (W + 1).")
    min_ratio: float = Field(0.0, ge=0, le=1, description="The last rate as a part of the peak.")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="wsd: the part of all steps that goes down.")


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Compute type; master weights stay fp32. auto: bf16 on GPUs that have it, fp32 elsewhere."
    )
    initial_scale: float = Field(65536.0, gt=0, le=2.0**64, description="fp16: first loss scale.")
    tf32: bool = Field(True, description="Let fp32 matrix products use TF32 on GPUs.")


class MemoryConfig(Section):
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="full: keep each block's input only and compute the block again in backward. selective: keep the results of attention"
        " and of every other matrix product as well.",
    )
    on_oom: Literal["stop", "replan"] = Field(
        "stop",
        description="Out of memory: stop and name the nearest plan that fits; or replan: go on with it from the newest checkpoint, the"
        " global batch unchanged (smaller micro-batch, checkpointing, sharding, offload). Where our own launcher started the ranks.",
    )


class CompileConfig(Section):
    enabled: bool = Field(False, description="torch.compile each block.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, description="torch.compile's mode; null: its default."
    )


# ------------------------------------------------------------------------------------------- checkpoints, watch, the run


class CheckpointConfig(Section):
    every: Steps | None = Field(None, description="Save each N steps; null: only at the end and when asked to stop.")
    keep: int = Field(2, gt=0, le=10**6, description="Keep the newest N.")
    keep_best: bool = Field(True, description="Keep the best by eval.metric as well.")
    asynchronous: bool = Field(True, description="Write in the background while training goes on.")
    verify: bool = Field(True, description="Check every shard's checksum before loading.")
    wait_seconds: float = Field(
        600.0,
        ge=0,
        le=86400,
        description="How long the last checkpoint is tried again when the disk refuses it; when the run is asked to stop, at most half of"
        " launch.grace_seconds.",
    )
    fallback_dir: str | None = Field(
        None, description="Folder on another disk, which takes the last checkpoint or its weights when the run's disk is full."
    )
    export: Literal["none", "last", "best"] = Field(
        "best", description="Checkpoint that is written as a Hugging Face folder, RUN/export; without a best one, the last."
    )
    export_adapter: bool = Field(False, description="With an adapter: export PEFT's files of the adapter alone, not the merged model.")


class EvalConfig(Section):
    every: Steps | None = Field(None, description="Evaluate each N steps; null: only before the first and after the last.")
    at_start: bool = Field(True, description="Evaluate before the first step, so that the gain can be seen.")
    micro_batch: Count | None = Field(None, description="Samples a device takes at once; null: as in training.")
    metric: str = Field("loss", description="What `best` means: a metric of the eval event. ppo and grpo: reward.")
    mode: Literal["min", "max"] = Field("min", description="Whether the metric should fall or rise. ppo and grpo: max.")


class HealthConfig(Section):
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="NaN or inf in loss or gradient norm: stop, or skip the step. Never silent."
    )
    max_skips: Count = Field(10, description="skip: stop after this many skipped steps in a row.")


class LaunchConfig(Section):
    nproc: int | None = Field(None, gt=0, le=4096, description="Processes on this machine; null: one per GPU, or 1 without GPUs.")
    max_restarts: int = Field(3, ge=0, le=10**6, description="Restarts after a dead rank, counted anew after each progress.")
    port: int | None = Field(None, gt=0, lt=65536, description="Rendezvous port on loopback; null: any free one.")
    grace_seconds: Seconds = Field(60.0, description="After SIGTERM the ranks have this long to save before they are killed.")
    timeout_seconds: Seconds = Field(600.0, description="A collective that waits longer than this fails.")


class RunConfig(Section):
    dir: PathText | None = Field(None, description="Run folder; null: runs/<name of the YAML>.")
    steps: Steps | None = Field(None, description="Optimizer steps; overrides epochs.")
    epochs: Rate = Field(1.0, description="Passes over the training samples.")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="Fixes order, dropout and random weights.")
    deterministic: bool = Field(False, description="Deterministic kernels only (cuDNN and algorithms); slower on GPUs.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs where there are any.")
    log_every: Steps = Field(1, description="A step event each N steps.")
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        ("tensorboard",), description="Where figures go besides events.jsonl."
    )


class Config(Section):
    """The whole YAML."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    algorithm: Algorithm = Field(default_factory=SFTConfig)
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: Annotated[ScheduleConfig, KIND_ALONE] = Field(default_factory=ScheduleConfig)
    strategy: Strategy = Field(default_factory=lambda: make(StrategySpec, "auto"))
    adapter: Adapter = Field(default_factory=NoAdapter)
    precision: Annotated[PrecisionConfig, KIND_ALONE] = Field(default_factory=PrecisionConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    cluster: Annotated[ClusterConfig | None, CLUSTER_ALONE] = Field(
        None, description="The devices to plan for, also as `2x8xh100-80g`; null: those that are found here."
    )

    @model_validator(mode="before")
    @classmethod
    def _measured_by_reward(cls, values: Any) -> Any:
        """Algorithms with rollouts select by reward unless the config names another metric."""
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        kind = algorithm.get("kind") if isinstance(algorithm, dict) else algorithm
        if kind not in ("ppo", "grpo") or not isinstance(values.get("eval", {}), dict):
            return values
        return {**values, "eval": {"metric": "reward", "mode": "max", **values.get("eval", {})}}

    @property
    def packs(self) -> bool:
        """Whether rows share sequences. Pairs, prompts and rows with a class keep to themselves."""
        return self.data.packing and self.algorithm.kind in ("pretrain", "sft")

    @property
    def head(self) -> Head:
        """What the model that learns ends in."""
        if isinstance(self.algorithm, ClassifyConfig):
            return self.algorithm.modality
        if isinstance(self.algorithm, PPOConfig) and self.algorithm.value == "head":
            return "valued"
        return "score" if self.algorithm.kind == "reward" else "lm"

    @property
    def images_alone(self) -> bool:
        """Whether rows are images without a word: no tokenizer, no length."""
        return self.head == "image"

    @property
    def rows_per_sample(self) -> int:
        """Sequences of up to data.max_length tokens that a sample is made of."""
        return 2 if self.algorithm.kind in ("reward", "dpo") else 1

    @property
    def samples_in_turn(self) -> int:
        """What a global batch has to be a multiple of, for a rollout to have whole groups."""
        algorithm = self.algorithm
        return algorithm.group_size // math.gcd(algorithm.group_size, algorithm.minibatches) if isinstance(algorithm, ROLLOUT) else 1
