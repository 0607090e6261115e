"""The config of algorithms that learn from sampled completions: rewards, generators, curriculum.

This module does not import torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from drumline.config.model import Model
from drumline.config.section import (
    KIND_ALONE,
    MOST_SAMPLES,
    MOST_WEIGHT,
    Above0,
    Amount,
    Count,
    PathText,
    Seconds,
    Section,
    Steps,
    Weight,
)
from drumline.errors import DataError

# The default limit of a reward that runs in a process of its own, in seconds.
REWARD_SECONDS = 10.0


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


class _TimedReward(_Reward):
    """The base of rewards that run in processes of their own, which may hang."""

    timeout_seconds: Seconds = Field(
        REWARD_SECONDS,
        description="An answer that takes longer costs its sample: it gets no reward, and is counted.",
    )


class _UntimedReward(_Reward):
    """The base of rewards that the rank itself computes, which need no limit of time."""

    @model_validator(mode="before")
    @classmethod
    def _drop_old_timeout(cls, values: Any) -> Any:
        """Drop the default of the old key `timeout_seconds`, and refuse other values of it.

        All kinds of rewards had the key until 0.6, but it never had an effect on these.
        """
        if not isinstance(values, dict) or "timeout_seconds" not in values:
            return values
        rest = dict(values)
        if rest.pop("timeout_seconds") not in (None, REWARD_SECONDS):
            raise ValueError(
                f"timeout_seconds has no effect on a reward of kind {rest.get('kind')}: take it out"
            )
        return rest


class FunctionReward(_TimedReward):
    kind: Literal["function"] = "function"
    path: PathText = Field(
        description="`module:function`, `file.py:function` (relative to the YAML), or an entry point of group drumline.rewards. Called as"
        " f(prompt: str, completion: str, **columns of the row, **options) -> float | None, with those columns that it takes."
        " None: it does not apply to the row, and the other rewards decide."
    )
    of: Literal["completion", "group"] = Field(
        "completion",
        description="What the function sees. completion: one completion. group: all completions of a prompt, as"
        " f(prompt: str, completions: list[str], **columns of the row, **options) -> list[float | None], one value for each completion."
        " If it fails, takes longer than timeout_seconds or returns another number of values, the whole group gets no reward."
        " An evaluation completes each prompt once.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")


class TaskReward(_TimedReward):
    kind: Literal["task"] = (
        "task"  # the verifier of the reasoning-gym task that the prompt comes from
    )
    pattern: Annotated[str | None, AfterValidator(_compiles), AfterValidator(_has_group)] = Field(
        None,
        description="Regular expression whose first group is the answer in the completion, where it matches last; null: all of it.",
    )


class MathReward(_TimedReward):
    kind: Literal["math"] = "math"  # math-verify against the row's `answer`
    column: str = Field("answer", description="Column of the row that holds the right answer.")


class RegexReward(_TimedReward):
    kind: Literal["regex"] = "regex"  # 1 where the completion matches
    pattern: Annotated[str, AfterValidator(_compiles)] = Field(
        description="Python regular expression."
    )
    full: bool = Field(True, description="The whole completion must match, or any part of it.")


class LengthReward(_UntimedReward):
    kind: Literal["length"] = "length"  # 0 up to `free` tokens, falling to −1 at `limit`
    free: Amount = Field(description="Tokens that cost nothing.")
    limit: Count = Field(
        description="Tokens at which the reward is −1 (the soft over-long punishment of DAPO, Yu et al. 2025)."
    )

    @model_validator(mode="after")
    def _check_order(self) -> LengthReward:
        if self.limit <= self.free:
            raise ValueError("limit must be above free")
        return self


class ModelReward(_UntimedReward):
    kind: Literal["model"] = "model"  # a reward model, as `algorithm: reward` trains them
    model: Model = Field(
        description="A model with a score head: RUN/export of a reward run, or any Hugging Face one."
    )


class EnvironmentReward(_UntimedReward):
    """The sum of the rewards that `algorithm.environment` gave during the episode."""

    kind: Literal["environment"] = "environment"


# Rewards that are computed in processes of their own, within a limit of time.
IsolatedReward = FunctionReward | TaskReward | MathReward | RegexReward
Reward = Annotated[
    IsolatedReward | LengthReward | ModelReward | EnvironmentReward,
    Field(discriminator="kind"),
    KIND_ALONE,
]


def sees_groups(reward: Reward) -> bool:
    """Return whether a reward gets all completions of a prompt together."""
    return isinstance(reward, FunctionReward) and reward.of == "group"


def text_argument(reward: FunctionReward) -> str:
    """Return the name of the argument with the completion, or the completions of a group."""
    if sees_groups(reward):
        return "completions"
    return "completion"


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
        (),
        description="Texts that end a completion, besides the end-of-sequence token. A vLLM server takes four of them: it samples on"
        " after further ones, and what is behind them is dropped.",
    )

    @model_validator(mode="after")
    def _refuse_top_p_of_greedy_choices(self) -> _Generator:
        if self.top_k == 1 and self.top_p < 1:
            raise ValueError(
                "top_k 1 takes the likeliest token whatever top_p is: take one of them out"
            )
        return self


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


Urls = PathText | Annotated[tuple[PathText, ...], Field(min_length=1)]
_SERVERS = (
    "http://HOST:PORT of the server, or a list of them. A request goes to the server with the fewest requests under way. If a server"
    " is lost, its requests go to the others. Once it is back, it gets the present weights, and then requests again."
)


def list_urls(url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the addresses of a key `url` as a tuple; empty without any."""
    if url is None:
        return ()
    if isinstance(url, str):
        return (url,)
    return url


def check_urls(urls: tuple[str, ...]) -> None:
    """Raise ValueError for addresses of servers that are no URLs or given twice."""
    for url in urls:
        if not url.startswith(("http://", "https://", "${env:")):
            raise ValueError("url begins with http:// or https://")
    if len(set(urls)) < len(urls):
        raise ValueError("a server stands twice in url")


class ServerGenerator(_Generator):
    """The base of generators that sample on servers, which get new weights before each rollout."""

    url: Urls | None = Field(None, description=_SERVERS)
    batch: int = Field(
        64,
        gt=0,
        le=10**6,
        description="Sequences that each rank has under way at the same time; with several servers, on each of them.",
    )
    timeout_seconds: Seconds = Field(
        600.0, description="url: the most time for one request, or for loading weights."
    )
    weights: Literal["none", "folder", "adapter"] = Field(
        "folder",
        description="Which new weights the servers get. folder: all of them. none: servers keep their own weights.",
    )
    folder: PathText | None = Field(
        None,
        description="With transport: folder, the folder that weights are written to, which the servers see under the same path; null:"
        " RUN/rollout-weights.",
    )
    transport: Literal["folder", "network"] = Field(
        "folder",
        description="How weights get to the servers. folder: as files in `folder`. network: rank 0 keeps them in host memory, and each"
        " server reads them over HTTP (vLLM only; tested with vLLM 0.32 on a CPU). `pip install drumline-vllm` where vLLM runs, and"
        ' start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "drumline"}\'.',
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers; empty without any."""
        return list_urls(self.url)

    @model_validator(mode="after")
    def _check_servers(self) -> ServerGenerator:
        """Refuse addresses that are no URLs or given twice, and keys that nobody would read."""
        check_urls(self.urls)
        if self.weights == "none" and self.folder is not None:
            raise ValueError("folder is where weights are written: take it out, or set weights")
        if self.transport == "folder":
            return self
        if self.weights == "none":
            raise ValueError(
                "transport is how weights get to the servers, and these keep their own: take it out, or set weights"
            )
        if self.folder is not None:
            raise ValueError("transport: network writes no files: take folder or transport out")
        return self


class VLLMGenerator(ServerGenerator):
    """vLLM, as servers or as an engine in each rank; it gets new weights before each rollout."""

    kind: Literal["vllm"] = "vllm"
    url: Urls | None = Field(
        None,
        description=f"{_SERVERS} null: an engine in each rank, beside what it trains.",
    )
    weights: Literal["none", "folder", "adapter"] = Field(
        "folder",
        description="url: which new weights the servers get, by `transport`. folder: all of them (start the servers with"
        " VLLM_SERVER_DEV_MODE=1). adapter: the LoRA adapter alone (start them with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1,"
        " --enable-lora and --max-lora-rank; tested with vLLM 0.32 on a CPU). none: servers keep their own weights.",
    )
    memory: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Without url: the part of the GPU's memory that the engine takes.",
    )

    @model_validator(mode="after")
    def _reads_its_keys(self) -> VLLMGenerator:
        """Refuse keys of servers for an engine in each rank, and keys of that engine for servers."""
        if self.url is None:
            unread = ["timeout_seconds", "weights", "folder", "transport"]
            fix = "is of servers: set url, or take it out"
        else:
            unread = ["memory"]
            fix = "is of an engine in each rank, and url names servers: take one of them out"
        for name in unread:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} {fix}")
        return self

    @model_validator(mode="after")
    def _can_be_asked(self) -> VLLMGenerator:
        if self.temperature != 1 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                "vLLM tells log-probs before the temperature, or after top_p and top_k too: leave temperature at 1, or top_p and top_k off"
            )
        return self


class SGLangGenerator(ServerGenerator):
    """SGLang's servers (experimental: tested against a stand-in, never against SGLang itself)."""

    kind: Literal["sglang"] = "sglang"
    url: Urls = Field(
        description=f"{_SERVERS} Experimental: tested against a stand-in for SGLang. Start it with --enable-deterministic-inference,"
        " without which it ignores the seeds of requests.",
    )
    weights: Literal["none", "folder"] = Field(
        "folder",
        description="How the servers get new weights. folder: all weights are written to `folder`, and the servers load them. none:"
        " servers keep their own weights.",
    )

    @model_validator(mode="after")
    def _has_no_plug_in(self) -> SGLangGenerator:
        """Refuse a transport that needs a plug-in of the server."""
        if self.transport == "network":
            raise ValueError(
                "transport: network needs a plug-in that only vLLM has: take it out, so that weights go through a folder"
            )
        return self

    @model_validator(mode="after")
    def _refuse_untested_sampling(self) -> SGLangGenerator:
        """Refuse options with which SGLang's log-probs are not known."""
        if self.top_p < 1 or self.top_k > 1:
            raise ValueError(
                "it is not tested which log-probs SGLang returns with top_p or top_k: leave them off"
            )
        return self


Generator = Annotated[
    HFGenerator | ContinuousGenerator | VLLMGenerator | SGLangGenerator,
    Field(discriminator="kind"),
    KIND_ALONE,
]


class _Environment(Section):
    # Whether it gives rewards.
    gives_rewards: ClassVar[bool] = True
    # Whether it gives its only reward at the end of an episode, so that it must hear of an end that it
    # did not choose.
    scores_at_end: ClassVar[bool] = False

    turns: int = Field(8, gt=0, le=10**4, description="Most turns of the model in an episode.")
    max_tokens: Count = Field(
        description="Most tokens of an episode behind its prompt, those of the model and of the environment together. The model gets"
        " another turn only if generator.max_new_tokens still fit.",
    )
    timeout_seconds: Seconds = Field(
        10.0,
        description="A call of the environment that takes longer costs its episode: it gets no reward, and is counted.",
    )


class ClassEnvironment(_Environment):
    """A class of your own that answers the model's turns."""

    kind: Literal["class"] = "class"
    path: PathText = Field(
        description="`module:Class`, `file.py:Class` (relative to the YAML), or an entry point of group drumline.environments. An object"
        " of it is one episode: `reset(row)` returns the messages before the model's first turn, `step(message)` returns (messages, reward"
        " or None, done)."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the class."
    )

    @property
    def code(self) -> tuple[str, ...]:
        """What a process of the environment imports."""
        return (self.path,)


class ToolsEnvironment(_Environment):
    """Python functions that the model may call; an episode ends with a turn without a call."""

    gives_rewards: ClassVar[bool] = False

    kind: Literal["tools"] = "tools"
    functions: tuple[PathText, ...] = Field(
        min_length=1,
        description="Each `module:function` or `file.py:function` (relative to the YAML). The types of its parameters and its docstring"
        " become the JSON schema that the chat template shows the model.",
    )

    @property
    def code(self) -> tuple[str, ...]:
        """What a process of the environment imports."""
        return self.functions


class VerifiersEnvironment(_Environment):
    """An environment of the package verifiers, whose rubric scores whole episodes."""

    scores_at_end: ClassVar[bool] = True

    kind: Literal["verifiers"] = "verifiers"
    id: PathText = Field(
        description="What `verifiers.load_environment` loads: the name of an installed environment, or of a file beside the YAML"
        " (without .py) that has a function load_environment. It needs version 0.3 of the package verifiers."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of load_environment."
    )

    @property
    def code(self) -> tuple[str, ...]:
        """What a process of the environment imports."""
        return (self.id,)


class OpenEnvEnvironment(_Environment):
    """A server of the package openenv, on which each episode has a session of its own."""

    kind: Literal["openenv"] = "openenv"
    url: PathText = Field(description="http://HOST:PORT of the server.")
    action: PathText = Field(
        description="The field of an action that gets the text of the model's turn. Or `module:function` or `file.py:function` (relative"
        " to the YAML), which gets the model's message {role, content} and returns an action as a dictionary."
    )
    observation: PathText = Field(
        description="The field of an observation that the model reads. Or a function, which gets an observation as a dictionary and"
        " returns a text. That of `reset` stands behind the row's prompt."
    )
    columns: tuple[str, ...] = Field(
        (),
        description="Columns of the row that the server's `reset` gets by their names, besides `seed`.",
    )

    @model_validator(mode="after")
    def _check_url(self) -> OpenEnvEnvironment:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("url begins with http:// or https://")
        if "seed" in self.columns:
            raise ValueError("the server's reset gets a seed of its own: take seed out of columns")
        return self

    @property
    def code(self) -> tuple[str, ...]:
        """What a process of the environment imports."""
        functions = [path for path in (self.action, self.observation) if ":" in path]
        return ("openenv", *functions)


Environment = Annotated[
    ClassEnvironment | ToolsEnvironment | VerifiersEnvironment | OpenEnvEnvironment,
    Field(discriminator="kind"),
]
# Kinds whose rewards are the default of `rewards`.
REWARDING_ENVIRONMENTS = ("class", "verifiers", "openenv")


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
    def _set_kind_by_weights(cls, values: Any) -> Any:
        """Set the kind to weights if there are weights and no kind."""
        if isinstance(values, dict) and values.get("weights"):
            return {"kind": "weights", **values}
        return values

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
    """When to end a run whose rewards keep failing: it would learn nothing and look healthy."""

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
    """Raise DataError if completions of `new` tokens leave no room in a row for a prompt."""
    if new >= max_length:
        what = f"data.max_length {max_length} leaves no room for a prompt before {new} new tokens"
        raise DataError(
            what,
            where="data.max_length",
            fix="raise it, or lower algorithm.generator.max_new_tokens (with an environment: its max_tokens)",
        )
