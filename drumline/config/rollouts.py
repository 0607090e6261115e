"""What algorithms that learn from sampled completions share: rewards, generators, the divergence, the curriculum. No torch here."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from drumline.config.algorithm import AuxiliaryModel, ChunkedSpec, HeadOutput
from drumline.config.data import PROMPT_FORMS, Forms
from drumline.config.model import Model
from drumline.config.section import (
    KIND_ALONE,
    MOST_SAMPLES,
    MOST_WEIGHT,
    Above0,
    Amount,
    Count,
    PathText,
    RefusesNull,
    Seconds,
    Section,
    Steps,
    Weight,
)
from drumline.errors import DataError

if TYPE_CHECKING:
    from drumline.config.config import Config


def _compiles(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return pattern


def _has_group(pattern: str | None) -> str | None:
    if pattern is not None and not re.compile(pattern).groups:
        raise ValueError("has no group: put the answer's part in parentheses")
    return pattern


class _Reward(Section):
    name: str | None = Field(
        None, description="What it is called in events; null: its function's name, or its kind."
    )
    weight: float = Field(
        1.0, ge=-MOST_WEIGHT, le=MOST_WEIGHT, description="Rewards are summed with their weights."
    )
    timeout_seconds: Seconds = Field(
        10.0,
        description="An answer that takes longer costs its sample: it gets no reward, and is counted.",
    )


class FunctionReward(_Reward):
    kind: Literal["function"] = "function"
    path: PathText = Field(
        description="`module:function`, `file.py:function` (relative to the YAML), or an entry point of group drumline.rewards. Called as"
        " f(prompt: str, completion: str, **columns of the row, **options) -> float | None, with those columns that it takes."
        " None: it does not apply to the row, and the other rewards decide."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")


class TaskReward(_Reward):
    kind: Literal["task"] = (
        "task"  # the verifier of the reasoning-gym task that the prompt comes from
    )
    pattern: Annotated[str | None, AfterValidator(_compiles), AfterValidator(_has_group)] = Field(
        None,
        description="Regular expression whose first group is the answer in the completion, where it matches last; null: all of it.",
    )


class MathReward(_Reward):
    kind: Literal["math"] = "math"  # math-verify against the row's `answer`
    column: str = Field("answer", description="Column of the row that holds the right answer.")


class RegexReward(_Reward):
    kind: Literal["regex"] = "regex"  # 1 where the completion matches
    pattern: Annotated[str, AfterValidator(_compiles)] = Field(
        description="Python regular expression."
    )
    full: bool = Field(True, description="The whole completion must match, or any part of it.")


class LengthReward(_Reward):
    kind: Literal["length"] = "length"  # 0 up to `free` tokens, falling to −1 at `limit`
    free: Amount = Field(description="Tokens that cost nothing.")
    limit: Count = Field(
        description="Tokens at which the reward is −1 (the soft over-long punishment of DAPO, Yu et al. 2025)."
    )

    @model_validator(mode="after")
    def _ordered(self) -> LengthReward:
        if self.limit <= self.free:
            raise ValueError("limit must be above free")
        return self


class ModelReward(_Reward):
    kind: Literal["model"] = "model"  # a reward model, as `algorithm: reward` trains them
    model: Model = Field(
        description="A model with a score head: RUN/export of a reward run, or any Hugging Face one."
    )


Reward = Annotated[
    FunctionReward | TaskReward | MathReward | RegexReward | LengthReward | ModelReward,
    Field(discriminator="kind"),
    KIND_ALONE,
]


class _Generator(Section):
    temperature: float = Field(1.0, gt=0, le=1000, description="Temperature of sampling.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that hold this much probability.",
    )
    top_k: Amount = Field(
        0, description="Sample from this many likeliest tokens; 0: all, 1: the likeliest (greedy)."
    )
    max_new_tokens: int = Field(
        64, gt=0, le=10**7, description="A completion is cut after this many tokens."
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Texts that end a completion, besides the end-of-sequence token."
    )


class HFGenerator(_Generator):
    """transformers' generate with its KV cache, prompts of like length together."""

    kind: Literal["hf"] = "hf"
    batch: int = Field(
        32, gt=0, le=10**6, description="Sequences generated side by side on a device."
    )


class ContinuousGenerator(_Generator):
    """transformers' continuous batching: a finished sequence makes room for the next."""

    kind: Literal["continuous"] = "continuous"
    batch: int = Field(
        32, gt=0, le=10**6, description="Sequences generated side by side on a device."
    )


class VLLMGenerator(_Generator):
    """vLLM, as a server (`vllm serve`) or an engine in each rank; it gets the new weights before each rollout."""

    kind: Literal["vllm"] = "vllm"
    url: PathText | None = Field(
        None,
        description="http://HOST:PORT of the server; null: an engine in each rank, beside what it trains.",
    )
    batch: int = Field(64, gt=0, le=10**6, description="Sequences under way at once, of each rank.")
    timeout_seconds: Seconds = Field(
        600.0, description="url: limit of one request, and of loading weights."
    )
    weights: Literal["none", "folder"] = Field(
        "folder",
        description="url: folder: write the weights to a folder that the server reads too, and ask it to load them (it must run with"
        " VLLM_SERVER_DEV_MODE=1); none: it keeps its own.",
    )
    folder: PathText | None = Field(
        None, description="weights=folder: the folder; null: RUN/rollout-weights."
    )
    memory: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Without url: the part of the GPU's memory that the engine takes.",
    )

    @model_validator(mode="after")
    def _can_be_asked(self) -> VLLMGenerator:
        if self.url is not None and not self.url.startswith(("http://", "https://", "${env:")):
            raise ValueError("url begins with http:// or https://")
        if self.url is None and (self.weights == "none" or self.folder is not None):
            raise ValueError("weights and folder are of a server: set url")
        if self.weights == "none" and self.folder is not None:
            raise ValueError("folder is of weights: folder")
        if self.temperature != 1 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                "vLLM tells log-probs before the temperature, or after top_p and top_k too: leave temperature at 1, or top_p and top_k off"
            )
        return self


Generator = Annotated[
    HFGenerator | ContinuousGenerator | VLLMGenerator, Field(discriminator="kind"), KIND_ALONE
]


class KLConfig(Section):
    """How the policy is kept near the reference."""

    coefficient: Weight = Field(
        0.0, description="Weight of the divergence; 0: no reference model is loaded at all."
    )
    target: Above0 | None = Field(
        None,
        description="Steer the coefficient to this divergence a token (Ziegler et al. 2019); null: fixed.",
    )
    horizon: Steps = Field(10000, description="target: episodes over which an error is corrected.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="k1: log π/π_ref; k2: half its square; k3: π_ref/π − 1 − log π_ref/π (Schulman 2020), unbiased and never negative.",
    )
    reference_model: Model | None = Field(
        None, description="Another reference than the model that training starts from."
    )

    @model_validator(mode="after")
    def _steers_something(self) -> KLConfig:
        if self.target is not None and not self.coefficient:
            raise ValueError(
                "target steers the coefficient, which 0 leaves at 0: set coefficient, such as 0.05"
            )
        if self.reference_model is not None and not self.coefficient:
            raise ValueError(
                "no reference_model is asked where coefficient is 0: set coefficient, such as 0.05, or take the model out"
            )
        return self


class CurriculumConfig(Section):
    """How many prompts of a rollout each domain gives (`domain` of a data source)."""

    kind: Literal["data", "weights", "success"] = Field(
        "data",
        description="data: as they come in the shuffled data. weights: by the shares below. success: a domain's share follows how"
        " uncertain its outcome is, p(1 − p) of its success rate p, so that what is learned already and what is out of reach give way.",
    )
    weights: dict[str, Annotated[float, Field(ge=0, le=MOST_SAMPLES)]] = Field(
        {}, description="weights: domain → its share, in any unit."
    )
    floor: float = Field(
        0.1,
        ge=0,
        le=1,
        description="success: the least part of the even share that a domain keeps.",
    )
    memory: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="success: weight of the old success rate when a rollout updates it.",
    )
    solved: float = Field(
        0.5,
        ge=-MOST_SAMPLES,
        le=MOST_SAMPLES,
        description="success: an episode with this reward or more is solved.",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_weights(cls, values: Any) -> Any:
        return (
            {"kind": "weights", **values}
            if isinstance(values, dict) and values.get("weights")
            else values
        )

    @model_validator(mode="after")
    def _reads_its_keys(self) -> CurriculumConfig:
        of_kind = {
            "weights": "weights",
            "floor": "success",
            "memory": "success",
            "solved": "success",
        }
        for name, kind in of_kind.items():
            if self.kind != kind and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is of kind {kind}, and kind is {self.kind}: take one of them out"
                )
        if self.weights and not any(self.weights.values()):
            raise ValueError("weights are all 0: give one domain a share")
        return self


class RewardFailureConfig(Section):
    """What is done about rewards that fail over and over: such a run trains nothing, and looks well."""

    share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="A rollout fails if the rewards failed for at least this share of the episodes that a reward applies to,"
        " or if no reward applies to any.",
    )
    rollouts: int = Field(
        3,
        gt=0,
        le=10_000,
        description="The action is taken after this many failed rollouts in a row.",
    )
    action: Literal["stop", "continue"] = Field(
        "stop",
        description="stop: end the run (exit code 3) with the reasons; continue: go on. A run in which no episode got a reward ends with"
        " exit code 3 at its last rollout in either case.",
    )


def require_room(new: int, max_length: int) -> None:
    """Raises DataError where completions of `new` tokens leave none of a row for its prompt."""
    if new >= max_length:
        what = (
            f"data.max_length {max_length} leaves no room for a prompt before max_new_tokens {new}"
        )
        raise DataError(
            what,
            where="data.max_length",
            fix="raise it, or lower algorithm.generator.max_new_tokens",
        )


class RolloutSpec(ChunkedSpec):
    """The policy learns from completions that it samples. The subclass declares `group_size`, completions of each prompt."""

    if TYPE_CHECKING:
        group_size: int

    columns: ClassVar[str] = "`prompt`, and what the rewards ask for"
    rate: ClassVar[float] = 1e-6
    # And reward/DOMAIN.
    metrics: ClassVar[tuple[str, ...]] = (
        "reward",
        "reward_failed",
        "length",
        "length_max",
        "ended",
    )
    best_by: ClassVar[dict[str, str]] = {"metric": "reward", "mode": "max"}
    head_outputs: ClassVar[frozenset[HeadOutput]] = frozenset({"log_probs", "entropy"})

    @property
    def lookahead(self) -> int:
        """Rollouts under way while another one is learned from."""
        return 0

    rewards: Annotated[
        list[Reward], RefusesNull("list the rewards, or leave it out for that of tasks")
    ] = Field(
        default_factory=lambda: list[Reward]([TaskReward()]),
        min_length=1,
        description="What an episode is worth: a weighted sum.",
    )
    reward_workers: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="Processes of each rank that compute rewards; null: one per core, shared by the ranks, at most 4.",
    )
    reward_failure: RewardFailureConfig = Field(
        default_factory=RewardFailureConfig, description="What is done when rewards keep failing."
    )
    generator: Generator = Field(
        default_factory=HFGenerator, description="What samples the completions."
    )
    epochs: int = Field(1, gt=0, le=10**4, description="Passes over the episodes of a rollout.")
    minibatches: int = Field(
        1,
        gt=0,
        le=10**6,
        description="Optimizer steps a pass: a rollout has this × batch.global_samples episodes.",
    )
    clip: Above0 = Field(
        0.2,
        description="The probability ratio counts within 1 ± clip only (PPO, Schulman et al. 2017).",
    )
    kl: KLConfig = Field(
        default_factory=KLConfig, description="Divergence from a reference model, as a cost."
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig, description="How many prompts each domain gives."
    )
    missing_stop_penalty: Weight = Field(
        0.0, description="Taken off the reward of a completion that was cut before its end."
    )

    @property
    def forms(self) -> Forms:
        return PROMPT_FORMS

    @property
    def rollout(self) -> RolloutSpec:
        return self

    @property
    def new_tokens(self) -> int:
        return self.generator.max_new_tokens

    @property
    def samples_in_turn(self) -> int:
        """So that a rollout has whole groups."""
        return self.group_size // math.gcd(self.group_size, self.minibatches)

    @property
    def steps_in_turn(self) -> int:
        return self.epochs * self.minibatches

    @property
    def on_policy(self) -> bool:
        """No step lies between a rollout and the loss, so the rollout's log-probabilities are those of the step's own forward."""
        return self.steps_in_turn == 1

    @property
    def rounds(self) -> int:
        """How often a rollout may sample, until it has as many groups to learn from as it wants."""
        return 1

    def credited(self, episodes: Any, rewards_N: Any, cost_NM: Any) -> Any:
        """`data.batches.Episodes` with advantages (and returns, where a value is learned) and the weights of tokens. `rewards_N`: fp32,
        NaN for an episode without one, from which nothing is learned. `cost_NM`: fp32, of each token the divergence times its weight."""
        raise NotImplementedError

    def auxiliary_models(self, config: Config) -> dict[str, AuxiliaryModel]:
        found, other = dict[str, AuxiliaryModel](), self.kl.reference_model
        if self.kl.coefficient > 0 and (other is not None or not config.adapter.switches):
            found["reference"] = AuxiliaryModel(
                other or config.model, "algorithm.kl.reference_model"
            )
        judges = [
            (index, reward.model)
            for index, reward in enumerate(self.rewards)
            if isinstance(reward, ModelReward)
        ]
        for number, (index, model) in enumerate(judges, start=1):
            name = "reward" if number == 1 else f"reward{number}"
            found[name] = AuxiliaryModel(model, f"algorithm.rewards.{index}.model", "score")
        return found
