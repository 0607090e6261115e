"""The section `optimizer`, and the memory and traffic of each kind of optimizer.

This module does not import torch; `engine.optimizer` makes the optimizers. A new kind is a value of
`OptimizerConfig.kind`, a row of KINDS, and a function in `engine.optimizer`. What it keeps is
counted in `planner.cost.optimizers`, what it is not combined with is in `plan.optimizer_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from drumline.config.section import Count, Ranks, Section, Weight
from drumline.errors import PlanError
from drumline.foreign import require_package

Beta = Annotated[float, Field(ge=0, lt=1)]
# Kinds whose states are quantised → bits of a value, and number of values that share an fp32 scale.
QUANTISED_STATES = {
    "adamw_8bit": (8, 256),
    "adamw_4bit": (4, 128),
}


@dataclass(frozen=True)
class OptimizerTraits:
    """The memory and traffic of a kind of optimizer. A parameter is one number of a weight here.

    Attributes:
        states_per_parameter: Number of state tensors with the shape of the weight, of any type.
            It is the largest number of any weight: Adafactor and Muon keep less for some.
        moved: Bytes that a step reads and writes for each parameter, fused and not fused.
        copies: Number of fp32 copies of the largest tensor that a step makes.
        package: Package that it needs besides torch; empty for none.
        allows_local_steps: Whether ranks may each step an optimizer of their own and exchange
            weights only now and then, as in Local SGD and DiLoCo.
        needs_full_matrix: Whether a step of a sharded weight communicates, because it needs more of
            the weight than a rank's own shard.
    """

    states_per_parameter: int
    moved: tuple[int, int]
    copies: int
    package: str = ""
    allows_local_steps: bool = False
    needs_full_matrix: bool = False


# Bytes that one fused kernel moves: AdamW reads weight, gradient and both moments and writes three; SGD
# with momentum reads three and writes two. Not fused, as counted in torch's _multi_tensor_adamw (18
# passes), in Lion's and in torchao's step run without compiling.
KINDS = {
    "adamw": OptimizerTraits(2, (28, 72), 3, allows_local_steps=True),
    "sgd": OptimizerTraits(1, (20, 32), 3, allows_local_steps=True),
    "lion": OptimizerTraits(1, (32, 32), 1, allows_local_steps=True),
    "adamw_8bit": OptimizerTraits(2, (16, 60), 6, "torchao"),
    "adamw_4bit": OptimizerTraits(2, (14, 60), 6, "torchao"),
    "adafactor": OptimizerTraits(1, (40, 40), 3, needs_full_matrix=True),
    "muon": OptimizerTraits(2, (40, 40), 3, needs_full_matrix=True),
    "schedule_free": OptimizerTraits(2, (60, 60), 2, "schedulefree"),
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
    def traits(self) -> OptimizerTraits:
        """The row of KINDS for this kind."""
        return KINDS[self.kind]

    @property
    def states_per_parameter(self) -> int:
        """Number of state tensors with the shape of a weight, which a checkpoint has, too."""
        if self.kind == "sgd" and not self.momentum:
            return 0
        return self.traits.states_per_parameter

    def group_of(self, name: str) -> OptimizerGroup | None:
        """Return the group of a parameter; None if it has none."""
        for group in self.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                return group
        return None

    def require_groups(self, names: Sequence[str]) -> None:
        """Check that each pattern of a group matches one of `names`, the parameters that learn.

        Raises:
            PlanError: A pattern matches none.
        """
        patterns = [pattern for group in self.groups for pattern in group.match]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                fix = f"parameters have names such as {', '.join(sorted({names[0], names[-1]}))}"
                raise PlanError(
                    f"{pattern!r} matches no parameter that learns",
                    where="optimizer.groups",
                    fix=fix,
                )

    def require(self) -> None:
        """Raise EnvironmentFault if the package of the optimizer is missing. It is not imported."""
        if self.traits.package:
            require_package(self.traits.package, "optimizer.kind")
