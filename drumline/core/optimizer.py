"""The section `optimizer`, and what each kind of optimizer keeps and is not combined with. No torch here; `parallel.optimizer` makes them.
A new kind is a row of KINDS and a function there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from drumline.core.rule import Case, Refusal
from drumline.core.section import Count, Ranks, Section, Weight
from drumline.errors import EnvironmentFault

if TYPE_CHECKING:
    from drumline.core import facts

Beta = Annotated[float, Field(ge=0, lt=1)]
FULL = 4  # bytes of an fp32
SMALL = 4096  # a part of fewer entries keeps its moments in fp32, as torchao has it
FORMATS = {"adamw_8bit": (8, 256), "adamw_4bit": (4, 128)}  # bits of an entry of a moment, entries that share an fp32 scale


@dataclass(frozen=True)
class Kind:
    """`slots`: fp32 numbers that it keeps of an entry, at most. `moved`: bytes of an entry that a step reads and writes, fused and not;
    `copies`: of the largest tensor, fp32 copies that a step makes. `package`: that it needs besides torch. `drifts`: copies of the model
    that exchange weights now and then may each have one of their own."""

    slots: int
    moved: tuple[int, int]
    copies: int
    package: str = ""
    drifts: bool = False


# Bytes moved by one kernel: AdamW reads weight, gradient and both moments and writes three; SGD with momentum reads three and writes two.
# Not fused, as counted in torch's _multi_tensor_adamw (18 passes), in Lion's and in torchao's step run without compiling.
KINDS = {
    "adamw": Kind(2, (28, 72), 3, drifts=True),
    "sgd": Kind(1, (20, 32), 3, drifts=True),
    "lion": Kind(1, (32, 32), 1, drifts=True),
    "adamw_8bit": Kind(2, (16, 60), 6, "torchao"),
    "adamw_4bit": Kind(2, (14, 60), 6, "torchao"),
}


class OptimizerGroup(Section):
    """Parameters with a rate or weight decay of their own."""

    match: tuple[str, ...] = Field(min_length=1, description="Patterns of parameter names: *.lora_B.*, model.embed_tokens.*")
    lr_ratio: Weight = Field(1.0, description="Their learning rate as a multiple of optimizer.lr; LoRA+: 16 for *.lora_B.*.")
    weight_decay: float | None = Field(None, ge=0, le=1000, description="Their weight decay; null: as for the rest.")


class OptimizerConfig(Section):
    kind: Literal["adamw", "sgd", "lion", "adamw_8bit", "adamw_4bit"] = Field(
        "adamw",
        description="AdamW (Loshchilov & Hutter 2019), SGD with momentum, Lion (Chen et al. 2023), or AdamW with moments in 8 or 4 bits"
        " (Dettmers et al. 2022, Li et al. 2023; by torchao).",
    )
    lr: float = Field(2e-5, gt=0, le=1000, description="Peak learning rate, before lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="linear: lr × ratio; sqrt: lr × √ratio; lr_base_devices or lr_base_samples gives the ratio."
    )
    lr_base_devices: Ranks = Field(1, description="lr was chosen for this many data-parallel devices: ratio = devices / this.")
    lr_base_samples: Count | None = Field(
        None, description="lr was chosen for a global batch of this many samples: ratio = global samples / this. Overrides lr_base_devices."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's and Lion's decay rates of moments. Lion's authors: 0.9, 0.99.")
    eps: float = Field(1e-8, gt=0, le=1, description="AdamW's epsilon.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(0.0, ge=0, le=1000, description="Applies to matrices only, not to biases and norms.")
    max_grad_norm: float | None = Field(1.0, gt=0, le=10**12, description="Clip gradients to this global L2 norm; null: never.")
    fused: bool = Field(True, description="Use torch's fused optimizer kernel where there is one.")
    groups: tuple[OptimizerGroup, ...] = Field((), description="Parameters with a rate of their own; the first that matches has it.")

    @property
    def does(self) -> Kind:
        return KINDS[self.kind]

    @property
    def slots(self) -> int:
        """fp32 numbers that it keeps of an entry, and writes into a checkpoint."""
        return self.does.slots if self.kind != "sgd" or self.momentum else 0

    def group_of(self, name: str) -> OptimizerGroup | None:
        """The group of a parameter; None: it has none."""
        return next((group for group in self.groups if any(fnmatchcase(name, pattern) for pattern in group.match)), None)

    def bytes_of(self, weight: facts.Weight, here: int) -> int:
        """Bytes of its states of a weight of which a rank has `here` entries; a count of steps (4 bytes) is left out. Quantised ones have
        codes, scales, and a table of the codes' values in fp32."""
        bits, block = FORMATS.get(self.kind, (0, 1))
        if not bits or here < SMALL or here % block:
            return FULL * self.slots * here
        return self.slots * (here * bits // 8 + FULL * (here // block) + FULL * 2**bits)

    def require(self) -> None:
        """Raises EnvironmentFault for a missing package, without importing it."""
        if self.does.package and importlib.util.find_spec(self.does.package) is None:
            what = f"the package {self.does.package} is missing"
            raise EnvironmentFault(what, where="optimizer.kind", fix=f"pip install {self.does.package}")


def refusals(case: Case) -> Iterator[Refusal]:
    """What optimizers cannot be combined with."""
    options, where = case.config.optimizer, "optimizer.kind"
    torch_own = options.kind in ("adamw", "sgd")
    if case.strategy.engine(case.mesh) == "deepspeed" and not torch_own:
        reason = "DeepSpeed keeps weights and moments in flat buffers, which take Adam's and SGD's alone"
        yield Refusal(f"{options.kind} × ZeRO", reason, "use strategy=fsdp2, or optimizer.kind=adamw", where)
    if case.strategy.engine(case.mesh) == "deepspeed" and options.groups:
        reason = "DeepSpeed makes one flat buffer of each group, and its memory is planned for two"
        yield Refusal("optimizer.groups × ZeRO", reason, "use strategy=fsdp2, or take the groups out", "optimizer.groups")
    if case.strategy.exchange is not None and not options.does.drifts:
        reason = "a checkpoint has the mean of the copies' moments, which is taken of fp32 moments with one step in common"
        yield Refusal(f"{options.kind} × copies that drift apart", reason, "use strategy=ddp, or optimizer.kind=adamw", where)


def lacking(options: OptimizerConfig, names: list[str]) -> str | None:
    """A pattern of `groups` that no parameter matches; None: each has some."""
    patterns = [pattern for group in options.groups for pattern in group.match]
    return next((pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)), None)
