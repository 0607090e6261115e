"""One way of spreading a run, as the planner's arithmetic sees it: a candidate of the search, or a Plan that was made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from drumline.core.algorithms import ROLLOUT
from drumline.core.config import Config
from drumline.core.facts import ModelFacts
from drumline.core.mesh import Mesh
from drumline.core.plan import BatchPlan, DataPlan, PipelinePlan, Plan, RolePlan
from drumline.core.strategies import AnyStrategy


@dataclass(frozen=True)
class Layout:
    """`config.strategy` is what is meant (never auto); whatever the user left open in `config` is resolved in the other fields.
    `length`: tokens that a row of a micro-batch is wide; `tokens_per_row`: of these, real ones on average (packing: nearly all)."""

    config: Config
    mesh: Mesh
    batch: BatchPlan
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["cpu", "cuda"]
    engine: Literal["native", "pipeline", "deepspeed"]
    data_parallel: Literal["none", "dp", "ddp", "fsdp2", "zero", "local_sgd", "diloco"]
    activation_checkpointing: Literal["none", "selective", "full"]
    length: int
    tokens_per_row: float
    pipeline: PipelinePlan | None = None
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    role_facts: Mapping[str, ModelFacts] = field(default_factory=dict)
    steps: int | None = None
    devices_per_rank: int = 1

    @property
    def strategy(self) -> AnyStrategy:
        return self.config.strategy

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one data rank."""
        return self.batch.micro_batch * self.batch.rows_per_sample

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

    @classmethod
    def of(cls, plan: Plan, role_facts: Mapping[str, ModelFacts] | None = None) -> Layout:
        length, tokens_per_row = plan.config.data.max_length, tokens_of_a_row(plan.config, plan.data)
        same = {name: value for name, value in plan if name in cls.__dataclass_fields__}
        return cls(**same, length=length, tokens_per_row=tokens_per_row, role_facts=role_facts or {})


def tokens_of_a_row(config: Config, data: DataPlan | None) -> float:
    """Real tokens of a row, mean over the data; all that fit where it is not known. A prompt is taken to be answered at full length, an
    image counts as one."""
    if config.images_alone:
        return 1.0
    length = float(config.data.max_length)
    if data is None or not data.train_samples:
        return length
    answer = config.algorithm.generator.max_new_tokens if isinstance(config.algorithm, ROLLOUT) else 0
    return min(length, data.train_tokens / (data.train_samples * config.rows_per_sample) + answer)
