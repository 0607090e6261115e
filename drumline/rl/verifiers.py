"""Environments of the package verifiers, as episodes. It imports that package, and no torch.

An environment of verifiers plays a rollout itself and asks a client for each turn of the model.
`RankClient` is that client. `RolloutEpisode` runs the rollout's event loop until the client is asked,
returns the new messages to the rank, and continues with the model's answer. So stop conditions, tools and
rubric are verifiers' own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.config.registry import run_user_code
from drumline.config.rollouts import VerifiersEnvironment
from drumline.errors import ConfigError, EnvironmentFault
from drumline.foreign import import_quietly, require_package
from drumline.rl.environments import PACKAGES
from drumline.rl.episodes import WHERE, BadReply, LoadedEnvironment

_PACKAGE, _FIX = PACKAGES["verifiers"]
require_package(_PACKAGE, WHERE, _FIX)
vf: Any = import_quietly(_PACKAGE)
if not hasattr(vf, "MultiTurnEnv"):
    raise EnvironmentFault(
        f"verifiers {vf.__version__} has no MultiTurnEnv any more", where=WHERE, fix=_FIX
    )
types: Any = import_quietly("verifiers.types")
_Client: Any = vf.Client


class RankClient(_Client):
    """The client of one rollout. A request waits until the rank has sampled the model's turn."""

    def __init__(self) -> None:
        super().__init__(None)
        # The messages of a request, and the tools that it names.
        self.requests: asyncio.Queue[tuple[list[Any], list[str]]] = asyncio.Queue()
        # The model's message; None: the rank has ended the episode.
        self.answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def setup_client(self, config: Any) -> None:
        """Refuse a configuration: there is no server to connect to."""
        raise TypeError("the client of a rollout has no configuration")

    async def to_native_tool(self, tool: Any) -> Any:
        """Return the tool as it is."""
        return tool

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the messages as they are."""
        return messages, {}

    async def get_native_response(
        self,
        prompt: list[Any],
        model: str,
        sampling_args: Any,
        tools: list[Any] | None = None,
        **extra: Any,
    ) -> dict[str, Any] | None:
        """Hand over a request, and return the model's message."""
        await self.requests.put((prompt, [tool.name for tool in tools or []]))
        return await self.answers.get()

    async def raise_from_native_response(self, response: dict[str, Any] | None) -> None:
        """Raise the error by which verifiers ends and scores a rollout that has no room left."""
        if response is None:
            raise vf.OverlongPromptError("the episode was cut")

    async def from_native_response(self, response: dict[str, Any]) -> Any:
        """Return the model's message as a response of verifiers."""
        calls = []
        for call in response.get("tool_calls", []):
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append(types.ToolCall(id=call["id"], name=function["name"], arguments=arguments))
        for number, error in enumerate(response.get("unread_calls", [])):
            # Its arguments are no JSON, so that the environment answers by an error.
            calls.append(types.ToolCall(id=f"unread{number}", name="unknown", arguments=error))
        message = types.ResponseMessage(
            content=response["content"],
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="", created=0, model="policy", message=message)

    async def close(self) -> None:
        """Nothing to close: there is no connection."""


class RolloutEpisode:
    """An episode that an environment of verifiers plays.

    Attributes:
        tool_calls: Number of calls of the last turn, those that could not be read included.
        tool_errors: Number of them that could not be read.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.client = RankClient()
        self.rollout: asyncio.Task[float] | None = None
        # (role, content) of all messages so far.
        self.seen_messages: list[tuple[str, str]] = []
        self.tool_calls = 0
        self.tool_errors = 0

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the rollout, and return the messages of its first request."""
        self.rollout = self.loop.create_task(self._play(self._rollout_input(row)))
        messages = self._next_messages()
        if messages is None:
            raise BadReply("ended before the model's first turn")
        return messages

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """Pass the model's turn to the rollout.

        Return its reply, None and False; or no messages, the reward and True if it has ended.
        """
        self.seen_messages.append(("assistant", message["content"]))
        self.tool_errors = len(message.get("unread_calls", []))
        self.tool_calls = len(message.get("tool_calls", [])) + self.tool_errors
        self.client.answers.put_nowait(message)
        messages = self._next_messages()
        if messages is not None:
            return messages, None, False
        return [], self._reward(), True

    def finish(self) -> tuple[list[dict[str, Any]], float, bool]:
        """End the rollout as one that has no room left, and return its reward."""
        self.client.answers.put_nowait(None)
        if self._next_messages() is not None:
            raise BadReply("went on after its episode was cut")
        return [], self._reward(), True

    def _rollout_input(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as verifiers takes it.

        A prompt that is a text gets the environment's system prompt. Rows of `load_rows` have it.
        """
        prompt = row["messages"]
        if isinstance(row["prompt"], str) and self.environment.system_prompt:
            prompt = [{"role": "system", "content": self.environment.system_prompt}, *prompt]
        # verifiers calls the messages `prompt`.
        values = {name: value for name, value in row.items() if name != "messages"}
        return {"example_id": 0, **values, "prompt": prompt}

    async def _play(self, values: dict[str, Any]) -> float:
        """Play the rollout, and return its reward. Raises what the rollout ended by."""
        state = await self.environment.rollout(values, self.client, "policy", {})
        error = state.get("error")
        if error is not None:
            raise error.__cause__ or error
        rubric = self.environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        return float(state["reward"])

    def _reward(self) -> float:
        """Return the reward of the rollout, which has ended. Raises its error."""
        assert self.rollout is not None, "reset has begun it"
        return self.rollout.result()

    def _next_messages(self) -> list[dict[str, Any]] | None:
        """Run the rollout up to its next request, and return the messages that are new in it.

        None: the rollout has ended. Raises BadReply for a request that does not go on from the last.
        """
        assert self.rollout is not None, "reset has begun it"
        next_request = self.loop.create_task(self.client.requests.get())
        either_is_done = asyncio.wait(
            {self.rollout, next_request}, return_when=asyncio.FIRST_COMPLETED
        )
        self.loop.run_until_complete(either_is_done)
        if not next_request.done():
            next_request.cancel()
            return None
        prompt, tools = next_request.result()
        if tools != [schema["function"]["name"] for schema in tool_schemas(self.environment)]:
            raise BadReply("has other tools in this row than in others")
        messages = as_dictionaries(prompt)
        turns = [(message["role"], message["content"]) for message in messages]
        size = len(self.seen_messages)
        if turns[:size] != self.seen_messages:
            raise BadReply("changed earlier messages; an episode can only grow")
        self.seen_messages = turns
        return messages[size:]


def as_dictionaries(prompt: list[Any]) -> list[dict[str, Any]]:
    """Return messages of verifiers as chat templates take them. Raises BadReply for images."""
    messages = []
    # id of a call → the name of its tool.
    names: dict[str, str] = {}
    for each in prompt:
        message: dict[str, Any] = {"role": each["role"], "content": _as_text(each["content"])}
        calls = []
        for call in each.get("tool_calls") or []:
            names[call.id] = call.name
            function = {"name": call.name, "arguments": _as_arguments(call.arguments)}
            calls.append({"id": call.id, "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool":
            message["tool_call_id"] = each["tool_call_id"]
            message["name"] = names.get(each["tool_call_id"], "unknown")
        messages.append(message)
    return messages


def _as_text(content: Any) -> str:
    """Return the content of a message as text. Raises BadReply for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] != "text":
            raise BadReply(f"returned a message with a part of type {part['type']}, not text")
        texts.append(part["text"])
    return "".join(texts)


def _as_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; those that cannot be read under the name `unread`."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return {"unread": text}
    if not isinstance(arguments, dict):
        return {"unread": text}
    return arguments


def tool_schemas(environment: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's tools; empty without any."""
    schemas = []
    for tool in environment.tool_defs or []:
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        schemas.append({"type": "function", "function": function})
    return schemas


def import_environment(id: str, options: dict[str, Any], where: str) -> Any:
    """Return what `verifiers.load_environment` loads. Raises ConfigError for whatever it raises."""
    load: Callable[[], Any] = partial(vf.load_environment, id, **options)
    environment = run_user_code(load, id, where, doing="loading")
    if not isinstance(environment, vf.MultiTurnEnv):
        what = f"{id} is a {type(environment).__name__}, not a MultiTurnEnv"
        raise ConfigError(what, where=where)
    return environment


def load_environment(config: VerifiersEnvironment, base_dir: Path) -> LoadedEnvironment:
    """Return the environment that a config names.

    `base_dir`: the folder of the YAML. Raises ConfigError.
    """
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))  # at the end: it shadows nothing
    where = f"{WHERE}.id"
    environment = import_environment(config.id, config.options, where)
    if environment.requires_group_rollouts:
        what = f"{config.id} compares the episodes of a group, and here each is scored alone"
        raise ConfigError(what, where=where, fix="take rewards of one episode")
    start_episode = partial(RolloutEpisode, environment)
    return LoadedEnvironment(start_episode, tool_schemas(environment))


def load_rows(
    id: str,
    options: dict[str, Any] | None = None,
    split: str = "train",
    size: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield rows of an environment's dataset, for a data source of kind python.

    Args:
        id: As in `algorithm.environment.id`.
        options: As in `algorithm.environment.options`.
        split: `train` or `eval`, the environment's two datasets.
        size: The most rows; None: all of them.

    Raises ConfigError for an environment that cannot be loaded, and for another split.
    """
    where = "data"
    if split not in ("train", "eval"):
        raise ConfigError(f"there is no split {split!r}", where=where, fix="train or eval")
    environment = import_environment(id, options or {}, where)
    if split == "train":
        dataset = environment.get_dataset()
    else:
        dataset = environment.get_eval_dataset()
    for row in islice(dataset, size):
        prompt = []
        for message in row["prompt"]:
            # `datasets` gives every message the keys of all, with None where a message has none.
            own_keys = {name: value for name, value in message.items() if value is not None}
            prompt.append(own_keys)
        yield {**row, "prompt": prompt}
