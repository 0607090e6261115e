"""On-policy distillation: a model learns a teacher's distribution at each token of its own completions.

No torch at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from drumline.config.algorithm import (
    MOST_AHEAD,
    AuxiliaryModel,
    DivergenceKind,
    HeadOutput,
    SamplingSpec,
    TeachingSpec,
    Trained,
)
from drumline.config.data import ANSWERED_PROMPT_FORMS, PROMPT_FORMS, DataConfig, Forms
from drumline.config.rollouts import Reward
from drumline.config.section import RefusesNull
from drumline.plan.plan import Plan

if TYPE_CHECKING:
    from drumline.data.encode import RowEncoder


class GKDConfig(SamplingSpec, TeachingSpec):
    """On-policy distillation (GKD, Agarwal et al. 2024): the model samples completions, and learns the teacher's distribution at each
    of their tokens."""

    position: ClassVar[int] = 2
    columns: ClassVar[str] = (
        "`prompt`, or `messages`; in data.train with on_policy_share below 1 `prompt` and `completion`, or `messages`"
    )
    rate: ClassVar[float] = 1e-5
    metrics: ClassVar[tuple[str, ...]] = ("loss", "kl", *SamplingSpec.metrics)
    best_by: ClassVar[dict[str, str]] = {}
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs"})
    objective: ClassVar[str] = "drumline.algorithms.gkd.objective:OnPolicyDistillation"
    kind: Literal["gkd"] = "gkd"
    divergence: DivergenceKind = Field(
        "reverse_kl",
        description="The loss of a token. reverse_kl: KL(model ‖ teacher), so the model says only what the teacher finds likely."
        " forward_kl: KL(teacher ‖ model), so the model covers all that the teacher may say. jsd: between the two, by beta (generalised"
        " Jensen-Shannon divergence).",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=4096,
        description="Number of the teacher's likeliest next tokens that the two models are compared at; all others count as one token. 0:"
        " the whole vocabulary.",
    )
    on_policy_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the prompts that the model completes itself (λ of GKD). For the others it learns from the completion in the"
        " row. run.seed and the prompt's place in the order of the run decide which prompts these are.",
    )
    ahead: int = Field(
        0,
        ge=0,
        le=MOST_AHEAD,
        description="How many rollouts are sampled ahead, while an earlier one is learned from. The weights that sample a completion are"
        " then older by as many rollouts. The divergence at a token is of the present model, whoever sampled the tokens before it, so"
        " nothing corrects for that; as with completions of rows, the model then learns at places that it would reach less often now."
        " 0: nothing is sampled ahead.",
    )
    rewards: Annotated[list[Reward], RefusesNull("leave it out for none")] = Field(
        default_factory=list,
        description="Computed for the model's completions and reported; nothing is learned from them. Default: none, or environment if"
        " there is an environment of another kind than tools.",
    )

    @model_validator(mode="after")
    def _refuse_keys_without_rewards(self) -> GKDConfig:
        """Refuse keys that have an effect only if there are rewards."""
        if self.rewards:
            return self
        if self.curriculum.kind == "success":
            raise ValueError("curriculum: success follows rewards: list some, or use another kind")
        if self.missing_stop_penalty:
            raise ValueError(
                "missing_stop_penalty is taken off rewards: list some, or leave it out"
            )
        if self.reward_workers is not None:
            raise ValueError("reward_workers compute rewards: list some, or leave it out")
        return self

    @property
    def lookahead(self) -> int:
        """The number of rollouts that may be pending while another one is learned from: the key `ahead`."""
        return self.ahead

    @property
    def group_size(self) -> int:
        """Each prompt is completed once."""
        return 1

    @property
    def forms(self) -> Forms:
        """The forms of a row: a prompt, and its completion if `on_policy_share` is below 1."""
        if self.sampled_share < 1:
            return ANSWERED_PROMPT_FORMS
        return PROMPT_FORMS

    @property
    def evaluation_spec(self) -> GKDConfig:
        """The algorithm without completions of rows: the model completes all held-out prompts."""
        return self.model_copy(update={"on_policy_share": 1.0})

    @property
    def needs_old_log_probs(self) -> bool:
        """False: the loss compares the model with the teacher, and not with its own past."""
        return False

    @property
    def sampled_share(self) -> float:
        """The share of the prompts that the model completes: the key `on_policy_share`."""
        return self.on_policy_share

    def cache_parts(self) -> dict[str, Any]:
        """Return what the token cache depends on, here also whether samples keep their completion."""
        parts = super().cache_parts()
        if self.sampled_share < 1:
            parts["keeps"] = ["completion", "what verifiers need"]
        return parts

    def segment_names(self, segments: int) -> list[str]:
        """Return the names of a row's segments; a single segment needs no name."""
        if segments == 1:
            return [""]
        return ["prompt", "with the completion of the row"]

    def encoder(self, tokenizer: Any, data: DataConfig, vision: Any = None) -> RowEncoder:
        from drumline.data.encode import AnsweredPromptEncoder, PromptRowEncoder

        keeps_row = self.environment is not None
        if self.sampled_share < 1:
            return AnsweredPromptEncoder(tokenizer, self.new_tokens, data, keeps_row)
        return PromptRowEncoder(tokenizer, self.new_tokens, data, keeps_row)

    def traced_batch(self, plan: Plan, rows: int, length: int, channels: int) -> Any:
        from drumline.data.batches import placeholder_episodes
        from drumline.data.taught import TaughtEpisodeBatch, placeholder_teacher

        batch = placeholder_episodes(rows, length)
        return TaughtEpisodeBatch(**vars(batch), teacher=placeholder_teacher(batch, plan))

    def assign_credit(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """Return the episodes with the weight 1 for each token. Rewards and costs are not used."""
        import torch

        is_learned_N = torch.ones(len(episodes), dtype=torch.bool)
        return episodes.add_loss_weights("token", self.new_tokens, is_learned_N)

    def auxiliary_models(self, config: Trained) -> dict[str, AuxiliaryModel]:
        """Return role → model: the teacher, and the models of rewards of kind model."""
        teacher = TeachingSpec.auxiliary_models(self, config)
        return teacher | SamplingSpec.auxiliary_models(self, config)
