"""The Plan: what will happen, every number resolved. Ranks read `plan.json` and nothing else. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError

from drumline.core.config import Config, MemoryConfig, NoAdapter
from drumline.core.estimate import Estimate, Frozen
from drumline.core.facts import ModelFacts
from drumline.core.files import write_whole
from drumline.core.mesh import Mesh
from drumline.core.mistakes import first_mistake
from drumline.core.model import Head, ModelConfig
from drumline.core.strategy import DataParallel, Engine, Precision, Schedule, StrategySpec
from drumline.errors import CheckpointError
from drumline.foreign import read_object


class BatchPlan(Frozen):
    """global_samples = micro_batch × accumulation × data_ranks, all in samples (packs, where packing is on; pairs)."""

    global_samples: int
    micro_batch: int
    accumulation: int
    eval_micro_batch: int
    rows_per_sample: int = Field(
        1, description="Sequences that a sample puts into a micro-batch: a pair has two."
    )

    def rule(self, data_ranks: int) -> str:
        """The product rule with its numbers, for the plan line."""
        ranks = f"{data_ranks} data rank{'s' * (data_ranks > 1)}"
        return f"{self.global_samples} samples = {self.micro_batch} micro-batch × {self.accumulation} accumulation × {ranks}"


class DataIdentity(Frozen):
    """Identifies the data of a run, for a resume: a position counts samples of these rows, in their order."""

    cache: str = Field(
        description="Folder of the token cache, whose name is a hash of all that it was made from."
    )
    content: str = Field(description="sha256 of its tokens and of how samples are laid out.")
    rows: int
    row_set: int = Field(description="Sum of the rows' hashes: the same in any order.")
    code: str | None = Field(
        None, description="sha256 of the functions that give the rows, where such do."
    )


def _by_name(value: Any) -> Any:
    """Older plans have one evaluation set, or null."""
    return {"": value} if isinstance(value, str) else {} if value is None else value


# Outcomes of a row that is not trained on: keys of `SourcePlan`, and of what a preparation counts.
LEFT_OUT = ("filtered", "ties", "duplicates", "contaminated", "too_long", "unlearned")


class SourcePlan(Frozen):
    """What became of the rows of a source."""

    name: str
    read: int = Field(0, description="Rows read.")
    filtered: int = Field(0, description="Of these, left out by a condition.")
    ties: int = Field(0, description="Left out: answers of which none is the better.")
    contaminated: int = Field(0, description="Left out: they hold evaluation rows.")
    too_long: int = 0
    unlearned: int = Field(0, description="Skipped: nothing to learn.")
    duplicates: int = Field(0, description="Left out: alike an earlier row.")
    truncated: int = Field(0, description="Cut, and kept.")
    rows: int = Field(0, description="In the samples; the rest of those read are held out.")
    tokens: int = Field(0, description="Of these rows.")
    samples: int | None = Field(None, description="null: packs hold rows of several sources.")
    per_epoch: int = Field(
        0,
        description="Samples of it in an epoch: fewer or more than it has, where data.train is mixed.",
    )


class DataPlan(Frozen):
    """The prepared data: folders of the token cache (see data.prepare) and what they hold."""

    train_cache: str
    eval_caches: Annotated[dict[str, str], BeforeValidator(_by_name)] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("eval_caches", "eval_cache"),
        description="By name of the set, or empty.",
    )
    train_samples: int = 0
    train_tokens: int = 0
    train_learned: int | None = Field(
        None, description="Of these, the tokens in the loss; null in a plan of an older version."
    )
    eval_samples: int = 0
    images: int = Field(0, description="In the training samples.")
    image_tokens: int = Field(0, description="Of the training tokens, those that stand for images.")
    samples_with_images: int = 0
    labels: tuple[str, ...] = Field((), description="The classes in order, where rows have one.")
    identity: DataIdentity | None = Field(None, description="Of the training data.")
    formats: tuple[str, ...] = Field(
        (), description="Sources whose rows were read from a format of another tool, in words."
    )
    left_out: tuple[str, ...] = Field(
        (), description="How many rows were cut, dropped or skipped, in words."
    )
    sources: tuple[SourcePlan, ...] = Field((), description="Of the training rows.")
    eval_sources: tuple[SourcePlan, ...] = ()
    stream: bool = Field(
        False,
        description="Rows are tokenised while training reads them: counts are of the first block.",
    )
    epoch_samples: int = Field(
        0, description="Samples of an epoch where sources are mixed; 0: train_samples."
    )

    @property
    def epoch(self) -> int:
        """Samples of an epoch; 0 in a stream, which has none."""
        return 0 if self.stream else self.epoch_samples or self.train_samples

    @property
    def tokens_per_sample(self) -> float:
        """Mean over an epoch."""
        if not self.epoch_samples:
            return self.train_tokens / self.train_samples
        return (
            sum(
                each.per_epoch * each.tokens / each.samples for each in self.sources if each.samples
            )
            / self.epoch
        )

    @property
    def mixture(self) -> tuple[str, ...]:
        """A line for each source that an epoch does not have once."""
        return tuple(
            f"data.train: an epoch has {each.per_epoch:,} samples of {each.name}, × {each.per_epoch / max(1, each.samples):.3g} of its"
            f" {each.samples:,} ({each.per_epoch / self.epoch:.1%} of it)"
            for each in (self.sources if self.epoch_samples else ())
            if each.samples is not None
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user is to know of the rows."""
        return self.formats + self.left_out + self.mixture


class PipelinePlan(Frozen):
    """How a pipeline runs; `model_parallel` is one micro-batch at a time through stages in turn."""

    schedule: Schedule
    stages_per_rank: int = 1
    layers: tuple[tuple[int, int], ...] = Field(
        (),
        description="Blocks [first, stop) of each stage; stage s lies on rank s mod pp. Empty while the model is not known.",
    )


class RolePlan(Frozen):
    """A model besides the policy: the reference, the value or the reward model of an algorithm, spread like it."""

    model: ModelConfig
    model_path: str | None
    head: Literal["lm", "score"] = Field(
        description="score: one number a token, by a linear head on the last hidden states."
    )
    trainable: bool = Field(False, validation_alias=AliasChoices("trainable", "learns"))
    lr_ratio: float = Field(
        1.0, description="trainable: its learning rate as a part of the policy's."
    )
    layers: tuple[tuple[int, int], ...] = Field(
        (), description="Blocks of each stage of a pipeline, as PipelinePlan has them."
    )


def _explicit_stream_parts(values: dict[str, Any]) -> int:
    """Return the parts of the stream of a plan that does not have them: an older version's, where nothing was left open."""
    is_cut = "config" in values and getattr(values["config"].strategy, "sequence_parallel", False)
    return values["mesh"].tp if is_cut and "mesh" in values else 1


class Layout(Frozen):
    """How a run is spread over its devices: what the planner's arithmetic is a function of. A search makes thousands; a Plan is one of
    them. `config.strategy` is what runs (auto in none that is estimated); what the user left open in `config` is resolved in the other
    fields. `data` None: rows are taken to be as long as they may be."""

    config: Config
    mesh: Mesh
    engine: Engine
    data_parallel: DataParallel = Field(
        "none", description="How ranks that see different samples share the work."
    )
    pipeline: PipelinePlan | None = None
    devices_per_rank: int = Field(
        1, description="More than one under dp alone, where one process drives all GPUs."
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
        None, description="Optimizer steps in all; null in a dry run before the data is prepared."
    )
    data: DataPlan | None = None
    roles: dict[str, RolePlan] = Field(
        default_factory=dict, description="reference, value, reward: models besides the policy."
    )

    @property
    def strategy(self) -> StrategySpec:
        return self.config.strategy

    @property
    def place(self) -> str:
        """torch's name for the kind of device that ranks compute on."""
        return "mps" if self.config.run.device == "mps" else self.device

    @property
    def pure(self) -> bool:
        """Whether trainable weights, gradients and moments lie in bf16."""
        return self.precision == "bf16" and self.config.precision.master == "bf16"

    @property
    def fp8(self) -> bool:
        """Whether linear layers of blocks multiply in fp8; `precision` is then that of all else."""
        return self.config.precision.kind == "fp8"

    @property
    def length(self) -> int:
        """Tokens that a row of a micro-batch is wide."""
        return self.config.data.max_length

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one data rank."""
        return self.batch.micro_batch * self.batch.rows_per_sample

    @property
    def tokens_per_row(self) -> float:
        """Real tokens of a row, mean over the data, else all that fit. A prompt has an answer of full length, an image counts as one."""
        config, data = self.config, self.data
        if config.images_alone:
            return 1.0
        if data is None or not data.train_samples:
            return float(self.length)
        mean = data.tokens_per_sample / config.algorithm.rows_per_sample
        return min(float(self.length), mean + config.algorithm.new_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a global batch."""
        return self.batch.global_samples * self.batch.rows_per_sample * self.tokens_per_row

    @property
    def positions(self) -> float:
        """Tokens of a row that are computed: all of its width where that is fixed; elsewhere rows of like length share a batch, and what
        little padding that takes is left out. An image counts as one."""
        if self.config.images_alone:
            return 1.0
        fixed = self.config.compile.enabled or self.config.packs or self.mesh.pp * self.mesh.cp > 1
        return float(self.length) if fixed else self.tokens_per_row

    def trainable(self, facts: ModelFacts) -> list[tuple[Head, ModelFacts]]:
        """Head and sizes of each model that is trained, the policy (`facts`) first."""
        roles = [
            (role.head, facts.roles[name])
            for name, role in self.roles.items()
            if role.trainable and name in facts.roles
        ]
        return [(self.config.head, facts), *roles]

    def of_role(self, name: str) -> Self:
        """The layout of one of `roles` by itself: spread like the policy, without adapter. A frozen one under DeepSpeed runs on the native
        engine, whole, or under ZeRO 3 by FSDP2: nothing is to be reduced or stepped."""
        role, config, strategy = self.roles[name], self.config, self.strategy
        update: dict[str, Any] = {"model": role.model, "adapter": NoAdapter()}
        values: dict[str, Any] = {
            "roles": {},
            "pipeline": self.pipeline and self.pipeline.model_copy(update={"layers": role.layers}),
        }
        if not role.trainable:
            update["memory"] = MemoryConfig()
            frozen, how = strategy.frozen(), self.data_parallel
            if frozen is not strategy:
                update["strategy"], values["engine"], how = (
                    frozen,
                    "native",
                    frozen.data_parallel(Mesh()),
                )
            values |= {
                "activation_checkpointing": "none",
                "data_parallel": how if how in ("dp", "fsdp2") else "none",
            }
        return self.model_copy(update={**values, "config": config.model_copy(update=update)})


class Predicted(Frozen):
    """What the planner expects; null where it does not know yet."""

    parameters: int | None = None
    trainable: int | None = Field(
        None,
        validation_alias=AliasChoices("trainable", "learned"),
        description="Of these, those that are trained; the others are frozen under an adapter.",
    )
    unadapted: tuple[str, ...] = Field(
        (), description="Large weights that `all-linear` does not adapt or QLoRA does not pack."
    )
    flops_per_token: float | None = Field(None, description="Forward and backward, model FLOPs.")
    peak_flops_per_device: float | None = Field(
        None, description="Datasheet rate of the compute type, FLOP/s; null where unknown."
    )
    estimate: Estimate | None = Field(
        None,
        description="Memory, seconds and traffic by category; null where the model is not known.",
    )

    def mfu(self, tokens_per_s: float, devices: int = 1) -> float | None:
        """Return the share of the devices' datasheet rate that model FLOPs take; None where either is unknown.

        `tokens_per_s`: of all `devices` together.
        """
        if not self.flops_per_token or not self.peak_flops_per_device:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops_per_device * devices)


class Plan(Layout):
    """One run, resolved. `config` is what the user wrote, with every default filled in."""

    version: Literal[1] = 1
    run_dir: str
    base_dir: str = Field(
        ".", description="Folder of the YAML: where files named by reward functions are looked for."
    )
    cp_method: Literal["ulysses", "ring"] = "ulysses"
    backend: Literal["gloo", "nccl"]
    offload: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where training state is kept besides the devices."
    )
    deepspeed: dict[str, Any] | None = Field(
        None, description="What DeepSpeed is given, where it is the engine."
    )
    lr: float = Field(description="Peak rate after lr_scaling.")
    warmup_steps: int = 0
    model_path: str | None = Field(
        description="Local folder or hub id that ranks load from; null: built from config."
    )
    base: str | None = Field(
        None,
        description="Digest of the model's files of weights, where some stay frozen; null: not known, or none.",
    )
    bidirectional: bool = Field(
        False,
        validation_alias=AliasChoices("bidirectional", "looks_ahead"),
        description="Text classifiers: tokens see those behind them, so batches carry an attention mask.",
    )
    first_position: int = Field(
        0, description="Of those texts: the id of the first token's position."
    )
    predicted: Predicted
    saves: bool = Field(
        True, description="False: a few steps to be measured, whose weights nobody wants."
    )
    why: list[str] = Field(
        default_factory=list, description="One line for each choice made on the user's behalf."
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes in order, where rows have one."""
        return self.data.labels if self.data else ()

    @property
    def checkpoint_bytes(self) -> int:
        """About what a checkpoint takes: in fp32 a trainable weight, and AdamW's two moments of it; 0 where the model is not known."""
        return 12 * (self.predicted.trainable or 0)

    def measured_only(self) -> Self:
        """The plan of a few steps that nothing is saved of, so that no space is required, and nothing is evaluated in."""
        data = (
            None
            if self.data is None
            else self.data.model_copy(update={"eval_caches": {}, "eval_samples": 0})
        )
        return self.model_copy(update={"saves": False, "data": data})

    def save(self, path: Path) -> None:
        # User options are in it.
        write_whole(path, self.model_dump_json(indent=2) + "\n", private=True)

    def of_role(self, name: str) -> Self:
        """The plan of one of `roles` by itself."""
        role, own = self.roles[name], super().of_role(name)
        offload = getattr(own.strategy, "offload", self.offload)
        deepspeed = self.deepspeed if role.trainable else None
        if deepspeed is not None:
            zero = dict(deepspeed["zero_optimization"])
            for part in (
                "offload_param",
                "offload_optimizer",
            ):  # two engines would write the same files on NVMe
                if folder := zero.get(part, {}).get("nvme_path"):
                    zero[part] = {**zero[part], "nvme_path": str(Path(folder) / name)}
            deepspeed = {**deepspeed, "zero_optimization": zero}
        return own.model_copy(
            update={"offload": offload, "deepspeed": deepspeed, "model_path": role.model_path}
        )

    @classmethod
    def load(cls, path: Path, trusted: bool = True) -> Plan:
        """Not `trusted`: one that names a strategy of the user's own is refused (ConfigError).

        Raises CheckpointError for a file that is not there, and for what this version cannot read."""
        try:
            return cls.of(read_object(path, CheckpointError, "name a run folder"), trusted)
        except ValidationError as error:
            first, fix = first_mistake(error), "use the version that wrote it, or train again"
            what = f"{path.name} is not one of this version: {first.where}: {first.what}"
            raise CheckpointError(what, where=str(path.parent), fix=fix) from None

    @classmethod
    def of(cls, values: Any, trusted: bool = True) -> Plan:
        """The plan that is `values` as JSON. Own kinds are found from the folder of the YAML, wherever this process is."""
        base_dir = values.get("base_dir") if isinstance(values, dict) else None
        folder = Path(base_dir) if isinstance(base_dir, str) else None
        return cls.model_validate(values, context={"trusted": trusted, "base_dir": folder})
