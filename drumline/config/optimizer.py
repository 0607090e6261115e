"""The section `optimizer`, and what each kind of optimizer keeps and is not combined with. No torch here; `engine.optimizer` makes them.
A new kind is a row of KINDS and a function there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from drumline.config.section import Count, Ranks, Section, Weight
from drumline.errors import PlanError
from drumline.foreign import require_package
from drumline.hardware.cluster import Collective
from drumline.plan.rule import Case, Refusal, plain, sees

if TYPE_CHECKING:
    from drumline.plan import facts

Beta = Annotated[float, Field(ge=0, lt=1)]
FULL = 4  # bytes of an fp32
SMALL = 4096  # a part of fewer entries keeps its moments in fp32, as torchao has it
# Bits of an entry of a moment, entries that share an fp32 scale.
FORMATS = {
    "adamw_8bit": (8, 256),
    "adamw_4bit": (4, 128),
}


@dataclass(frozen=True)
class Kind:
    """`slots`: fp32 numbers that it keeps of an entry, at most. `moved`: bytes of an entry that a step reads and writes, fused and not;
    `copies`: of the largest tensor, fp32 copies that a step makes. `package`: that it needs besides torch. `drifts`: copies of the model
    that exchange weights now and then may each have one of their own. `sends`: a step needs more of a weight than a rank may have."""

    slots: int
    moved: tuple[int, int]
    copies: int
    package: str = ""
    drifts: bool = False
    sends: bool = False


# Bytes moved by one kernel: AdamW reads weight, gradient and both moments and writes three; SGD with momentum reads three and writes two.
# Not fused, as counted in torch's _multi_tensor_adamw (18 passes), in Lion's and in torchao's step run without compiling.
KINDS = {
    "adamw": Kind(2, (28, 72), 3, drifts=True),
    "sgd": Kind(1, (20, 32), 3, drifts=True),
    "lion": Kind(1, (32, 32), 1, drifts=True),
    "adamw_8bit": Kind(2, (16, 60), 6, "torchao"),
    "adamw_4bit": Kind(2, (14, 60), 6, "torchao"),
    "adafactor": Kind(1, (40, 40), 3, sends=True),
    "muon": Kind(2, (40, 40), 3, sends=True),
    "schedule_free": Kind(2, (60, 60), 2, "schedulefree"),
}


class OptimizerGroup(Section):
    """Parameters with a rate or weight decay of their own."""

    match: tuple[str, ...] = Field(
        min_length=1, description="Patterns of parameter names: *.lora_B.*, model.embed_tokens.*"
    )
    lr_ratio: Weight = Field(
        1.0,
        description="Their learning rate as a multiple of optimizer.lr; LoRA+: 16 for *.lora_B.*.",
    )
    weight_decay: float | None = Field(
        None, ge=0, le=1000, description="Weight decay of all of them; null: as for the rest."
    )


class OptimizerConfig(Section):
    kind: Literal[
        "adamw", "sgd", "lion", "adamw_8bit", "adamw_4bit", "adafactor", "muon", "schedule_free"
    ] = Field(
        "adamw",
        description="AdamW (Loshchilov & Hutter 2019), SGD with momentum, Lion (Chen et al. 2023), AdamW with moments in 8 or 4 bits"
        " (Dettmers et al. 2022, Li et al. 2023; by torchao), Adafactor (Shazeer & Stern 2018), Muon (Jordan et al. 2024) for the"
        " matrices of the blocks and AdamW for the rest, or schedule-free AdamW (Defazio et al. 2024).",
    )
    lr: float = Field(2e-5, gt=0, le=1000, description="Peak learning rate, before lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="linear: lr × ratio; sqrt: lr × √ratio; lr_base_devices or lr_base_samples gives the ratio.",
    )
    lr_base_devices: Ranks = Field(
        1, description="lr was chosen for this many data-parallel devices: ratio = devices / this."
    )
    lr_base_samples: Count | None = Field(
        None,
        description="lr was chosen for a global batch of this many samples: ratio = global samples / this. Overrides lr_base_devices.",
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999),
        description="AdamW's and Lion's decay rates of moments. Lion's authors: 0.9, 0.99.",
    )
    eps: float = Field(1e-8, gt=0, le=1, description="AdamW's epsilon.")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="SGD's and Muon's momentum; Muon's authors: 0.95."
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1000, description="Applies to matrices only, not to biases and norms."
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, le=10**12, description="Clip gradients to this global L2 norm; null: never."
    )
    fused: bool = Field(True, description="Use torch's fused optimizer kernel where there is one.")
    in_backward: bool = Field(
        False,
        description="Update each parameter as soon as its gradient is there, which is then gone: no clipping, no accumulation.",
    )
    offload: bool = Field(
        False,
        description="Keep moments and a copy of the trainable weights in host memory, and step there; weights stay on the device.",
    )
    groups: tuple[OptimizerGroup, ...] = Field(
        (), description="Parameters with a rate of their own, by the first group that matches."
    )

    @property
    def does(self) -> Kind:
        return KINDS[self.kind]

    @property
    def slots(self) -> int:
        """fp32 numbers that it keeps of an entry, and writes into a checkpoint."""
        return self.does.slots if self.kind != "sgd" or self.momentum else 0

    def group_of(self, name: str) -> OptimizerGroup | None:
        """The group of a parameter; None: it has none."""
        return next(
            (
                group
                for group in self.groups
                if any(fnmatchcase(name, pattern) for pattern in group.match)
            ),
            None,
        )

    def require_groups(self, names: Sequence[str]) -> None:
        """Raises PlanError for a pattern that none of `names`, the parameters that learn, has."""
        for pattern in (pattern for group in self.groups for pattern in group.match):
            if not any(fnmatchcase(name, pattern) for name in names):
                fix = f"parameters have names such as {', '.join(sorted({names[0], names[-1]}))}"
                raise PlanError(
                    f"{pattern!r} matches no parameter that learns",
                    where="optimizer.groups",
                    fix=fix,
                )

    def bytes_of(self, weight: facts.Weight, here: int, low: int = 0) -> int:
        """Bytes of its states of a weight of which a rank has `here` entries; a count of steps (4 bytes) is left out. Quantised ones have
        codes, scales, and a table of the codes' values in fp32. `low`: of an entry, where they lie in bf16."""
        if low:
            return low * here
        if self.kind == "muon":
            return FULL * here * (1 if _is_matrix(weight) else 2)
        if self.kind == "adafactor" and len(weight.shape) > 1:
            *ahead, rows, columns = weight.shape
            return FULL * math.prod(ahead) * (rows + columns)
        bits, block = FORMATS.get(self.kind, (0, 1))
        if not bits or here < SMALL or here % block:
            return FULL * self.slots * here
        return self.slots * (here * bits // 8 + FULL * (here // block) + FULL * 2**bits)

    def sends(self, weight: facts.Weight, here: int, axes: int) -> tuple[Collective, int]:
        """What a step sends of a weight that is cut along so many axes of the mesh, and of which a rank has `here` entries. Muon: parts in
        bf16 to an owner and back, or to all; Adafactor: sums over rows and columns, and two norms."""
        if self.kind == "muon" and _is_matrix(weight):
            return ("all_to_all", 2 * 2 * here) if axes == 1 else ("all_gather", 2 * here)
        if self.kind == "adafactor":
            return "all_reduce", 2 * FULL + (
                self.bytes_of(weight, here) if len(weight.shape) > 1 else 0
            )
        return "all_reduce", 0

    def require(self) -> None:
        """Raises EnvironmentFault for a missing package, without importing it."""
        if self.does.package:
            require_package(self.does.package, "optimizer.kind")


def _is_matrix(weight: facts.Weight) -> bool:
    """Whether Muon takes it."""
    return weight.place == "block" and len(weight.shape) == 2


def refusals(case: Case) -> Iterator[Refusal]:
    """What optimizers cannot be combined with."""
    options, where = case.config.optimizer, "optimizer.kind"
    torch_own = options.kind in ("adamw", "sgd")
    if case.strategy.engine(case.mesh) == "deepspeed" and not torch_own:
        reason = (
            "DeepSpeed keeps weights and moments in flat buffers, which take Adam's and SGD's alone"
        )
        yield Refusal(
            f"{options.kind} × ZeRO", reason, "use strategy=fsdp2, or optimizer.kind=adamw", where
        )
    if case.strategy.engine(case.mesh) == "deepspeed" and options.groups:
        reason = "DeepSpeed makes one flat buffer of each group, and its memory is planned for two"
        yield Refusal(
            "optimizer.groups × ZeRO",
            reason,
            "use strategy=fsdp2, or take the groups out",
            "optimizer.groups",
        )
    if case.strategy.exchange is not None and not options.does.drifts:
        reason = "a checkpoint has the mean of the copies' moments, which is taken of fp32 moments with one step in common"
        yield Refusal(
            f"{options.kind} × copies that drift apart",
            reason,
            "use strategy=ddp, or optimizer.kind=adamw",
            where,
        )
    if options.in_backward or options.offload:
        yield from _in_turn(case)
    if options.kind == "schedule_free":
        yield from _schedule_free(case, where)
    if case.config.precision.master == "bf16":
        yield from _pure(case, "precision.master")


ACCUMULATES = Refusal(
    "in_backward × accumulation", "a gradient is used and gone before the next micro-batch adds to it", "use accumulation 1: a larger"
    " micro_batch, or more ranks", "optimizer.in_backward",
)  # fmt: skip


def _in_turn(case: Case) -> Iterator[Refusal]:
    """Of optimizers that go parameter by parameter."""
    config, options, mesh, strategy = case.config, case.config.optimizer, case.mesh, case.strategy
    name = "in_backward" if options.in_backward else "offload"
    where = f"optimizer.{name}"
    if options.in_backward and options.offload:
        yield Refusal(
            "in_backward × offload",
            "a step on the host waits for all gradients",
            "take one of the two out",
            where,
        )
    each = ("adamw", "sgd", "lion", *(FORMATS if options.in_backward else ()))
    if options.kind not in each:
        yield Refusal(
            f"{name} × {options.kind}",
            "it goes parameter by parameter, on any rank alike",
            f"use {', '.join(each)}",
            where,
        )
    if strategy.engine(mesh) != "native" or strategy.exchange is not None or config.plain:
        reason = "it is proven for Drumline's own engine, where ranks are in step"
        yield Refusal(
            f"{name} × the strategy",
            reason,
            "use strategy=ddp or fsdp2; ZeRO has offload_optimizer",
            where,
        )
    if config.precision.master == "bf16":
        yield Refusal(
            f"{name} × master=bf16",
            "its steps round by the number of a parameter among all",
            "use precision.master=fp32",
            where,
        )
    if options.offload and strategy.offloads()[0] != "none":
        yield Refusal(
            "offload × a strategy that offloads",
            "its optimizer is on the host already",
            f"take {where} out",
            where,
        )
    if not options.in_backward:
        return
    if options.max_grad_norm is not None:
        reason = (
            "the norm is known when the last gradient is there, and the others are used by then"
        )
        yield Refusal("in_backward × clipping", reason, "set optimizer.max_grad_norm=null", where)
    if strategy.data_parallel(mesh) not in ("none", "fsdp2"):
        reason = "gradients of copies are averaged in buckets, after they have come"
        yield Refusal("in_backward × copies of the model", reason, "use strategy=fsdp2", where)
    if (
        case.precision == "fp16"
        or config.health.on_nan == "skip"
        or config.health.on_spike in ("skip", "rollback")
    ):
        reason = "a step that is not finite, or jumps, is taken by the time that it is seen"
        yield Refusal(
            "in_backward × steps that may be skipped",
            reason,
            "use precision=bf16, on_nan=stop and on_spike=note",
            where,
        )


def _pure(case: Case, where: str) -> Iterator[Refusal]:
    config, mesh = case.config, case.mesh
    if case.precision != "bf16":
        yield Refusal(
            f"master=bf16 × {case.precision}",
            "weights lie in the type that they compute in",
            "use precision.kind=bf16",
            where,
        )
    if config.optimizer.kind != "adamw":
        reason = "AdamW alone has steps that round stochastically or keep what was lost"
        yield Refusal(
            f"master=bf16 × {config.optimizer.kind}",
            reason,
            "use optimizer.kind=adamw, or master=fp32",
            where,
        )
    whole = plain(mesh) and case.strategy.data_parallel(mesh) in ("none", "ddp", "fsdp2")
    if not whole or case.strategy.engine(mesh) != "native" or case.strategy.exchange is not None:
        reason = "it is proven where each rank has weights whole, or sharded by FSDP2 alone; DeepSpeed keeps fp32 weights for its step"
        yield Refusal("master=bf16 × the strategy", reason, "use strategy=ddp or fsdp2", where)
    if case.strategy.copies().compression.kind != "none":
        reason = "gradients travel in bf16 already"
        yield Refusal("master=bf16 × compression", reason, "take strategy.compression out", where)
    if config.algorithm.rollout is not None or config.images_alone or config.plain or sees(case):
        reason = "it is proven for texts that are given"
        yield Refusal(
            "master=bf16 × the model or the algorithm", reason, "use precision.master=fp32", where
        )


def _schedule_free(case: Case, where: str) -> Iterator[Refusal]:
    if case.config.schedule.kind != "constant":
        reason = "it averages weights in place of a falling rate; a warm-up goes with it"
        yield Refusal(
            "schedule_free × a schedule", reason, "use schedule=constant", "schedule.kind"
        )
    if case.config.optimizer.groups:
        reason = "its average weighs steps by one rate"
        yield Refusal(
            "schedule_free × optimizer.groups", reason, "take the groups out", "optimizer.groups"
        )
    algorithm = case.config.algorithm
    if algorithm.rollout is not None or algorithm.extra_forwards:
        reason = "it learns at other weights than it answers with, and this algorithm compares the two within a step"
        yield Refusal(
            "schedule_free × a pass without gradients in a step",
            reason,
            "use optimizer.kind=adamw",
            where,
        )
