"""`Plan`: what a run will do, with every number resolved. No torch here.

`plan.resolve` makes it. It is saved as `plan.json`, which is all that the ranks read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError

from drumline.config.config import Config, MemoryConfig, NoAdapter
from drumline.config.mesh import Mesh
from drumline.config.mistakes import first_mistake
from drumline.config.model import Head, ModelConfig
from drumline.config.section import Frozen
from drumline.config.strategy import DataParallel, Engine, Precision, Schedule, StrategyConfig
from drumline.errors import CheckpointError
from drumline.foreign import read_object
from drumline.plan.estimate import Estimate
from drumline.plan.facts import ModelFacts
from drumline.system.files import write_whole

# Of a trainable weight: itself and AdamW's two moments, in fp32.
CHECKPOINT_BYTES_PER_WEIGHT = 3 * 4


class BatchPlan(Frozen):
    """The sizes of batches: global_samples = micro_batch × accumulation × data_ranks.

    Batches count samples. A sample is a pack if packing is on, a pair for preferences, otherwise a
    row.
    """

    global_samples: int
    micro_batch: int
    accumulation: int
    eval_micro_batch: int
    rows_per_sample: int = Field(
        1, description="Sequences that a sample puts into a micro-batch: a pair has two."
    )

    def describe_product(self, data_ranks: int) -> str:
        """Return the product above with its numbers, for a line of the plan."""
        ranks = "data ranks" if data_ranks > 1 else "data rank"
        return (
            f"{self.global_samples} samples = {self.micro_batch} micro-batch"
            f" × {self.accumulation} accumulation × {data_ranks} {ranks}"
        )


class DataIdentity(Frozen):
    """Identifies the training data of a run. A run that resumes compares it.

    Positions in the data count the samples of these rows in their order.
    """

    cache: str = Field(
        description="Folder of the token cache. Its name is a hash of all that it was made from."
    )
    content: str = Field(description="sha256 of its tokens and of how samples are laid out.")
    rows: int
    row_set: int = Field(description="Sum of the rows' hashes: the same in any order.")
    code: str | None = Field(
        None, description="sha256 of the functions that yield the rows; null if none do."
    )


def _key_by_name(value: Any) -> Any:
    """Return evaluation sets by name. Older plans have one set, or null."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"": value}
    return value


# The reasons why a row is not trained on: fields of `SourcePlan`, and names of what `data.prepare`
# counts.
LEFT_OUT = ("filtered", "ties", "duplicates", "contaminated", "too_long", "unlearned")


class SourcePlan(Frozen):
    """Numbers of rows of one source: how many were read, left out, and put into samples."""

    name: str
    read: int = Field(0, description="Rows read.")
    filtered: int = Field(0, description="Rows left out by a condition.")
    ties: int = Field(0, description="Pairs left out, since neither answer is better.")
    contaminated: int = Field(0, description="Rows left out, since they contain evaluation rows.")
    too_long: int = Field(0, description="Rows left out, since they are longer than a sample.")
    unlearned: int = Field(0, description="Rows left out, since no token of them is in the loss.")
    duplicates: int = Field(0, description="Rows left out, since they are like an earlier row.")
    truncated: int = Field(0, description="Rows that were cut to the length of a sample, and kept.")
    rows: int = Field(
        0, description="Rows in the samples: those read, less the left out and the held out."
    )
    tokens: int = Field(0, description="Tokens of the rows in the samples.")
    samples: int | None = Field(
        None, description="Samples with its rows; null if packs hold rows of several sources."
    )
    per_epoch: int = Field(
        0,
        description="Its samples in an epoch, which are fewer or more than it has if data.train is mixed.",
    )


class DataPlan(Frozen):
    """The prepared data: folders of the token cache (see data.prepare) and what they hold."""

    train_cache: str
    eval_caches: Annotated[dict[str, str], BeforeValidator(_key_by_name)] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("eval_caches", "eval_cache"),
        description="Folder of each evaluation set, by the name of the set; the name is empty if there is one without a name.",
    )
    train_samples: int = 0
    train_tokens: int = 0
    train_learned: int | None = Field(
        None, description="Training tokens in the loss; null in a plan of an older version."
    )
    eval_samples: int = 0
    images: int = Field(0, description="Images in the training samples.")
    image_tokens: int = Field(0, description="Training tokens that stand for images.")
    samples_with_images: int = 0
    labels: tuple[str, ...] = Field((), description="The classes in order, if rows have one.")
    identity: DataIdentity | None = None
    formats: tuple[str, ...] = Field(
        (), description="A line for each source in a format of another tool."
    )
    left_out: tuple[str, ...] = Field(
        (), description="Lines with the numbers of rows that were cut or left out, and why."
    )
    sources: tuple[SourcePlan, ...] = Field((), description="Sources of the training rows.")
    eval_sources: tuple[SourcePlan, ...] = ()
    stream: bool = Field(
        False,
        description="Rows are tokenised while training reads them. Numbers are those of the first block.",
    )
    epoch_samples: int = Field(
        0, description="Samples of an epoch if sources are mixed; 0: train_samples."
    )

    @property
    def epoch(self) -> int:
        """Samples of an epoch; 0 in a stream.

        A stream has no epochs: its config needs run.steps, and `every` in steps.
        """
        if self.stream:
            return 0
        return self.epoch_samples or self.train_samples

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens of a sample over an epoch."""
        if not self.epoch_samples:
            return self.train_tokens / self.train_samples
        tokens: float = 0
        # In a mixture every sample is of one source, so `samples` is known.
        for source in self.sources:
            if source.samples:
                tokens += source.per_epoch * source.tokens / source.samples
        return tokens / self.epoch

    @property
    def mixture(self) -> tuple[str, ...]:
        """A line for each source of a mixture, with its share of an epoch."""
        if not self.epoch_samples:
            return ()
        lines = []
        for source in self.sources:
            if source.samples is None:
                continue
            times = source.per_epoch / max(1, source.samples)
            share = source.per_epoch / self.epoch
            lines.append(
                f"data.train: an epoch has {source.per_epoch:,} samples of {source.name},"
                f" × {times:.3g} of its {source.samples:,} ({share:.1%} of the epoch)"
            )
        return tuple(lines)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the data that the user should read."""
        return self.formats + self.left_out + self.mixture


class PipelinePlan(Frozen):
    """The schedule and the stages of a pipeline.

    The schedule `model_parallel` passes one micro-batch at a time through all stages in turn.
    """

    schedule: Schedule
    stages_per_rank: int = 1
    layers: tuple[tuple[int, int], ...] = Field(
        (),
        description="Blocks [first, stop) of each stage; stage s is on rank s mod pp. Empty as long as the model is not known.",
    )


class RolePlan(Frozen):
    """A model besides the policy: an algorithm's reference, value or reward model.

    It is spread like the policy.
    """

    model: ModelConfig
    model_path: str | None
    head: Literal["lm", "score"] = Field(
        description="score: one number a token, by a linear head on the last hidden states."
    )
    trainable: bool = Field(False, validation_alias=AliasChoices("trainable", "learns"))
    lr_ratio: float = Field(
        1.0, description="Learning rate of a trainable role as a multiple of the policy's."
    )
    layers: tuple[tuple[int, int], ...] = Field(
        (), description="Blocks [first, stop) of each stage of a pipeline (see PipelinePlan)."
    )


def _explicit_stream_parts(values: dict[str, Any]) -> int:
    """Return the default of `Layout.stream_parts`, for plans of versions that did not write it.

    In these, sequence parallelism was on only if the user set it.
    """
    if "config" not in values or "mesh" not in values:
        return 1
    is_cut = getattr(values["config"].strategy, "sequence_parallel", False)
    return values["mesh"].tp if is_cut else 1


class Layout(Frozen):
    """How a run is spread over its devices. The planner computes costs from it.

    A search makes thousands of layouts, and a `Plan` adds to one of them all that its ranks need.
    `config.strategy` is the strategy that runs; `auto` has been resolved before a layout is
    estimated. The other fields resolve what the user left open in `config`. If `data` is None, all
    rows count as `max_length` tokens.
    """

    config: Config
    mesh: Mesh
    engine: Engine
    data_parallel: DataParallel = Field(
        "none", description="How ranks that see different samples synchronise."
    )
    pipeline: PipelinePlan | None = None
    devices_per_rank: int = Field(
        1, description="More than 1 under dp alone: one process drives all GPUs."
    )
    device: Literal["cpu", "cuda"]
    precision: Precision
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    batch: BatchPlan
    stream_parts: int = Field(
        default_factory=_explicit_stream_parts,
        description="Parts that the residual stream is cut into by tokens between the layers that tensor parallelism cuts: tp, or 1.",
    )
    steps: int | None = Field(
        None,
        description="Optimizer steps of the run; null in a dry run before the data is prepared.",
    )
    data: DataPlan | None = None
    roles: dict[str, RolePlan] = Field(
        default_factory=dict, description="reference, value, reward: models besides the policy."
    )

    @property
    def strategy(self) -> StrategyConfig:
        return self.config.strategy

    @property
    def device_type(self) -> str:
        """torch's type of the device that ranks compute on: cpu, cuda or mps.

        `device` is cpu under mps, since the run is planned as one on a CPU.
        """
        if self.config.run.device == "mps":
            return "mps"
        return self.device

    @property
    def draw_device(self) -> str:
        """The kind of device whose generator draws random weights, cpu or cuda.

        Frozen weights are in no checkpoint. A resume or an export draws them again, maybe on
        another machine. A GPU's numbers differ from a CPU's, and by type of GPU. So a run with
        frozen weights draws all of its weights on a CPU.
        """
        has_frozen_weights = self.config.adapter.kind == "lora" or bool(self.config.model.freeze)
        if has_frozen_weights:
            return "cpu"
        return self.device

    @property
    def is_pure_bf16(self) -> bool:
        """Whether trainable weights, gradients and moments are all in bf16, without fp32 copies."""
        return self.precision == "bf16" and self.config.precision.master == "bf16"

    @property
    def frozen_precision(self) -> str:
        """The precision that the numbers of frozen models follow from: in pure bf16, all is bf16."""
        if self.is_pure_bf16:
            return "pure bf16"
        return self.precision

    @property
    def uses_fp8(self) -> bool:
        """Whether linear layers of blocks multiply in fp8; all else computes in `precision`."""
        return self.config.precision.kind == "fp8"

    @property
    def max_length(self) -> int:
        """The most tokens of a row (data.max_length)."""
        return self.config.data.max_length

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one data rank."""
        return self.batch.micro_batch * self.batch.rows_per_sample

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a row without its padding; `max_length` if no data is prepared.

        A prompt counts with an answer of full length. An image counts as one token.
        """
        config, data = self.config, self.data
        if config.images_alone:
            return 1.0
        if data is None or not data.train_samples:
            return float(self.max_length)
        mean = data.tokens_per_sample
        if config.algorithm.rollout is None:
            mean /= config.algorithm.rows_per_sample
        return min(float(self.max_length), mean + config.algorithm.new_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a global batch without its padding."""
        return self.batch.global_samples * self.batch.rows_per_sample * self.tokens_per_row

    @property
    def fixed_width(self) -> int | None:
        """Tokens to which all rows are padded; None if each micro-batch is as wide as its longest row.

        Compiled blocks and the stages of a pipeline need one shape. Products in fp8 sum over
        multiples of 16 tokens, which the full width of packs is: these are nearly full anyway.
        """
        config = self.config
        needs_one_shape = config.compile.enabled or self.mesh.pp * self.mesh.cp > 1
        if needs_one_shape or (self.uses_fp8 and config.packs):
            return self.max_length
        return None

    @property
    def padded_tokens_per_row(self) -> float:
        """Tokens that the model computes for a row, its padding included.

        These are `max_length` tokens if rows have a fixed width. Otherwise rows of similar length share
        a batch, and the little padding between them is neglected. An image counts as one token.
        """
        if self.config.images_alone:
            return 1.0
        has_full_width = self.fixed_width is not None or self.config.packs
        return float(self.max_length) if has_full_width else self.tokens_per_row

    def trainable_models(self, facts: ModelFacts) -> list[tuple[Head, ModelFacts]]:
        """Return the head and the facts of each trained model, the policy (`facts`) first."""
        models: list[tuple[Head, ModelFacts]] = [(self.config.head, facts)]
        for name, role in self.roles.items():
            if role.trainable and name in facts.roles:
                models.append((role.head, facts.roles[name]))
        return models

    def single_role(self, name: str) -> Self:
        """Return the layout of one of `roles` by itself.

        It is spread like the policy, without an adapter. A frozen model beside a policy under DeepSpeed
        runs on the native engine, because nothing is reduced or stepped. It is whole on each rank, or
        under ZeRO 3 sharded by FSDP2.
        """
        role = self.roles[name]
        sections: dict[str, Any] = {"model": role.model, "adapter": NoAdapter()}
        fields: dict[str, Any] = {"roles": {}, "pipeline": None}
        if self.pipeline is not None:
            fields["pipeline"] = self.pipeline.model_copy(update={"layers": role.layers})
        if not role.trainable:
            sections["memory"] = MemoryConfig()
            frozen = self.strategy.frozen()
            data_parallel = self.data_parallel
            if frozen is not self.strategy:
                sections["strategy"] = frozen
                fields["engine"] = "native"
                data_parallel = frozen.data_parallel(Mesh())
            if data_parallel not in ("dp", "fsdp2"):
                data_parallel = "none"
            fields["data_parallel"] = data_parallel
            fields["activation_checkpointing"] = "none"
        fields["config"] = self.config.model_copy(update=sections)
        return self.model_copy(update=fields)


class Predicted(Frozen):
    """What the planner expects of a run; fields are null as long as they are not known."""

    parameters: int | None = None
    trainable: int | None = Field(
        None,
        validation_alias=AliasChoices("trainable", "learned"),
        description="Parameters that are trained; the others are frozen, as under an adapter.",
    )
    unadapted: tuple[str, ...] = Field(
        (), description="Large weights that `all-linear` does not adapt or QLoRA does not pack."
    )
    flops_per_token: float | None = Field(None, description="Forward and backward, model FLOPs.")
    peak_flops_per_device: float | None = Field(
        None, description="Datasheet rate of the compute type, FLOP/s; null if unknown."
    )
    estimate: Estimate | None = Field(
        None,
        description="Memory, seconds and traffic by category, which the planner adds to a resolved plan; null if the model is not known.",
    )

    def mfu(self, tokens_per_s: float, devices: int = 1) -> float | None:
        """Return the share of the devices' rate that model FLOPs take; None if either is unknown.

        `tokens_per_s`: of all `devices` together.
        """
        if not self.flops_per_token or not self.peak_flops_per_device:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops_per_device * devices)


class Plan(Layout):
    """One run with every number resolved.

    `config` is the user's, with defaults filled in. Its strategy, compiling, and `every` of
    checkpoints and evaluations are resolved, too.
    """

    version: Literal[1] = 1
    run_dir: str
    base_dir: str = Field(
        ".", description="Folder of the YAML: where files named by reward functions are looked for."
    )
    cp_method: Literal["ulysses", "ring"] = "ulysses"
    backend: Literal["gloo", "nccl"]
    offload: Literal["none", "cpu", "nvme"] = Field(
        "none", description="The slowest place to which the strategy offloads states or weights."
    )
    deepspeed: dict[str, Any] | None = Field(
        None, description="DeepSpeed's own config; null under another engine."
    )
    lr: float = Field(description="Peak rate after lr_scaling.")
    warmup_steps: int = 0
    model_path: str | None = Field(
        description="Local folder or hub id that ranks load from; null: built from config."
    )
    base: str | None = Field(
        None,
        description="Digest of the model's files of weights, if some stay frozen; null: none, or not known yet.",
    )
    bidirectional: bool = Field(
        False,
        validation_alias=AliasChoices("bidirectional", "looks_ahead"),
        description="Text classifiers: tokens attend to later ones, too, so batches carry an attention mask.",
    )
    first_position: int = Field(
        0, description="Text classifiers: the id of the first token's position."
    )
    predicted: Predicted
    saves: bool = Field(
        True, description="False: a few steps are only measured, and no weights are kept."
    )
    why: list[str] = Field(
        default_factory=list, description="One line for each choice made on the user's behalf."
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes in order, if rows have one."""
        if self.data is None:
            return ()
        return self.data.labels

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate bytes of a checkpoint; 0 if the model is not known.

        It has the trainable weights and AdamW's two moments, all in fp32.
        """
        trainable = self.predicted.trainable or 0
        return CHECKPOINT_BYTES_PER_WEIGHT * trainable

    def measurement_plan(self) -> Self:
        """Return the plan of a short measurement run, which saves and evaluates nothing."""
        data = self.data
        if data is not None:
            data = data.model_copy(update={"eval_caches": {}, "eval_samples": 0})
        return self.model_copy(update={"saves": False, "data": data})

    def save(self, path: Path) -> None:
        """Write the plan. The file is private, because user options are in it."""
        write_whole(path, self.model_dump_json(indent=2) + "\n", private=True)

    def single_role(self, name: str) -> Self:
        """Return the plan of one of `roles` by itself, as `engine.build` builds its engine.

        Its model, path, strategy, offloading and DeepSpeed's config are those of the role. All else is
        the policy's: the learning rate is not multiplied by `lr_ratio` (CompositeEngine does so), and
        `predicted` describes the policy.
        """
        role = self.roles[name]
        layout = super().single_role(name)
        deepspeed = None
        if role.trainable and self.deepspeed is not None:
            deepspeed = _with_own_nvme_folders(self.deepspeed, name)
        return layout.model_copy(
            update={
                "offload": slowest_offload(layout.strategy),
                "deepspeed": deepspeed,
                "model_path": role.model_path,
            }
        )

    @classmethod
    def load(cls, path: Path, trusted: bool = True) -> Plan:
        """Return the plan in the file at `path`.

        Raises CheckpointError if there is no such file, or this version cannot read it, and
        ConfigError if the plan names a strategy of the user's own and is not `trusted`.
        """
        try:
            return cls.from_values(read_object(path, CheckpointError, "name a run folder"), trusted)
        except ValidationError as error:
            first = first_mistake(error)
            raise CheckpointError(
                f"{path.name} is not one of this version: {first.where}: {first.what}",
                where=str(path.parent),
                fix="use the version that wrote it, or train again",
            ) from None

    @classmethod
    def from_values(cls, values: Any, trusted: bool = True) -> Plan:
        """Return the plan with `values`, which were read from JSON.

        Strategies and other kinds of the user's own are searched from the folder of the YAML
        (`base_dir`), in whatever folder this process runs.
        """
        base_dir = values.get("base_dir") if isinstance(values, dict) else None
        folder = Path(base_dir) if isinstance(base_dir, str) else None
        return cls.model_validate(values, context={"trusted": trusted, "base_dir": folder})


def slowest_offload(strategy: StrategyConfig) -> Literal["none", "cpu", "nvme"]:
    """Return the slowest place to which a strategy offloads optimizer states or weights."""
    places = strategy.offloads()
    if "nvme" in places:
        return "nvme"
    if "cpu" in places:
        return "cpu"
    return "none"


def _with_own_nvme_folders(deepspeed: dict[str, Any], name: str) -> dict[str, Any]:
    """Return DeepSpeed's config with separate folders on NVMe: engines must not share files."""
    zero = dict(deepspeed["zero_optimization"])
    for part in ("offload_param", "offload_optimizer"):
        folder = zero.get(part, {}).get("nvme_path")
        if folder:
            zero[part] = {**zero[part], "nvme_path": str(Path(folder) / name)}
    return {**deepspeed, "zero_optimization": zero}
