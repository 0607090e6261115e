"""Episodes in which the model and an environment take turns.

All ranks know all conversations. In each turn the requests are divided over all ranks, as those of a
rollout without an environment are. The environment of episode i lives on rank i modulo the number of
ranks, and its replies are gathered.

The random numbers of the model and of the environment depend on (seed, step, key of the episode,
turn). Those of `reset` are the same for all episodes of a group. So the episodes are the same on
any number of ranks, and a run that is killed inside of a rollout makes the same one again.

Episodes that are sampled ahead are played in a thread of each rank while the ranks learn (`OwnEpisodes`).
No rank waits for another one's turns there. The episodes are those that all ranks would play together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.data.encode import OWN_COLUMNS, ROW_PROMPT
from drumline.data.turns import as_messages
from drumline.dist.reduce import gather_from_ranks
from drumline.dist.seeds import derive
from drumline.errors import DataError
from drumline.rl.environments import Environments, Reply
from drumline.rl.generate import Completion, Generator, Request, rank_and_world_size
from drumline.rl.turns import ChatTurns

# The most environments of a rank at the same time. Each is a process with a socket.
MOST_OF_RANK = 256


@dataclass
class Turn:
    """A turn of the model, and the environment's verdict on it."""

    # The number of tokens that the model sampled.
    tokens: int
    # The index of the model's message among those of the episode.
    message_index: int
    # The environment's reward for it; None: it gave none.
    reward: float | None = None
    # Number of calls of tools, and how many of them failed.
    tool_calls: int = 0
    tool_errors: int = 0


@dataclass(frozen=True)
class Conversation(Completion):
    """An episode of several turns. Its tokens are all those behind the prompt.

    Log-probs of the environment's tokens are 0. While the episode is played, its lists are extended in
    place.
    """

    # The tokens before the model's first turn.
    prompt: list[int] = field(default_factory=list)
    # Whether the model has sampled each token. The others are the environment's.
    sampled: list[bool] = field(default_factory=list)
    # All messages, those of `reset` included.
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # What the model's last turn says besides calls of tools.
    answer: str = ""
    # Why the environment failed; None if it did not.
    failure: str | None = None

    @property
    def length(self) -> int:
        return sum(self.sampled)

    @property
    def reward(self) -> float | None:
        """The sum of the environment's rewards; None if it gave none."""
        known = [turn.reward for turn in self.turns if turn.reward is not None]
        if not known:
            return None
        return sum(known)

    @property
    def tool_calls(self) -> int:
        """The number of calls of tools in all turns, those that could not be read included."""
        return sum(turn.tool_calls for turn in self.turns)

    @property
    def tool_errors(self) -> int:
        """The number of calls of tools that failed."""
        return sum(turn.tool_errors for turn in self.turns)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Conversation:
        """Return the conversation of which `dataclasses.asdict` made this."""
        turns = [Turn(**turn) for turn in state["turns"]]
        return cls(**{**state, "turns": turns})


@dataclass(frozen=True)
class Start(Request):
    """The beginning of an episode: the row's prompt, and what the environment's `reset` gets."""

    row: dict[str, Any] = field(default_factory=dict)


class _Episode:
    """An episode that is being played."""

    def __init__(self, start: Start) -> None:
        self.start = start
        # The episode so far. Its prompt is the row's until `reset` has returned another one.
        self.conversation = Conversation([], [], ended=False, prompt=start.tokens)
        self.is_over = False

    def change(self, **fields: Any) -> None:
        """Replace fields of the frozen `conversation`."""
        self.conversation = replace(self.conversation, **fields)

    def end(self, ended: bool, failure: str | None = None) -> None:
        """Note that no turn follows. `ended`: False if the episode was cut, or failed."""
        self.is_over = True
        self.change(ended=ended, failure=failure)

    def append(self, tokens: list[int], log_probs: list[float], sampled: bool) -> None:
        """Append tokens. `sampled`: by the model."""
        self.conversation.tokens.extend(tokens)
        self.conversation.log_probs.extend(log_probs)
        self.conversation.sampled.extend([sampled] * len(tokens))


@dataclass
class Conversations:
    """Plays episodes with environments.

    Collective: each rank calls the same methods in the same order.
    """

    # Samples by the current weights, which are handed over once, and again by the same weights.
    # Arguments: requests, step, whether greedily. Collective.
    sample: Callable[[list[Request], int, bool], list[Completion]]
    sample_again: Callable[[list[Request], int, bool], list[Completion]]
    environments: Environments
    chat: ChatTurns
    seed: int
    # The most turns of an episode, tokens of a turn, and tokens of an episode behind its prompt.
    turns: int
    max_new_tokens: int
    max_tokens: int
    # The most tokens of an episode with its prompt.
    max_length: int
    # Whether the environments give rewards only at the end, also where an episode is cut.
    scores_at_end: bool = False
    # Waits until no episode is played in the background, whose environments are the same. Collective.
    finish_background: Callable[[], None] = lambda: None
    # Whether this rank plays its episodes without the other ranks, so that nothing here is collective.
    plays_alone: bool = False
    # Whether `sample` was called since `play` began.
    _has_current_weights: bool = field(default=False, init=False)

    def play(self, starts: Sequence[Start], step: int, greedily: bool) -> list[Completion]:
        """Return an episode for each start, in their order, the same on every rank. Collective.

        Args:
            starts: The beginnings, the same on every rank.
            step: The optimizer step of the run; random numbers depend on it.
            greedily: Whether the model decodes greedily. Environments then have the same random
                numbers at each step.
        """
        self.finish_background()
        self._has_current_weights = False
        _, ranks = self._rank_and_ranks()
        size = MOST_OF_RANK * ranks
        played: list[Completion] = []
        for first in range(0, len(starts), size):
            played += self._play_together(starts[first : first + size], step, greedily)
        self.chat.forget_prompts()
        return played

    def _play_together(
        self, starts: Sequence[Start], step: int, greedily: bool
    ) -> list[Conversation]:
        """Return an episode for each start, all of which go on at the same time. Collective."""
        environment_step = step
        if greedily:
            environment_step = 0
        episodes = [_Episode(start) for start in starts]
        try:
            self._reset(episodes, environment_step)
            for turn in range(self.turns):
                active = [number for number, each in enumerate(episodes) if not each.is_over]
                if not active:
                    break
                self._take_turn(episodes, active, step, turn, greedily)
                self._step(episodes, active, environment_step, turn)
        finally:
            self.environments.end(range(len(episodes)))
        return [episode.conversation for episode in episodes]

    def play_own(self, generator: Generator) -> OwnEpisodes:
        """Return what plays this rank's episodes with a generator's weights, without the other ranks."""
        return OwnEpisodes(self, generator)

    def close(self) -> None:
        """End the environments' processes."""
        self.environments.close()

    def _rank_and_ranks(self) -> tuple[int, int]:
        """Return this rank's number and the number of ranks among those that play together."""
        if self.plays_alone:
            return 0, 1
        return rank_and_world_size()

    def _gather(self, own: dict[int, Reply]) -> dict[int, Reply]:
        """Return the replies of all ranks that play together. Collective, unless this rank plays alone."""
        if self.plays_alone:
            return own
        replies: dict[int, Reply] = {}
        for replies_of_rank in gather_from_ranks(own):
            replies |= replies_of_rank
        return replies

    def _reset(self, episodes: list[_Episode], step: int) -> None:
        """Begin all episodes. Collective."""
        rank, ranks = self._rank_and_ranks()
        rows = {}
        seeds = {}
        for number in range(rank, len(episodes), ranks):
            start = episodes[number].start
            rows[number] = start.row
            # The last part of the key tells the episodes of a group apart.
            group = start.key[:-1]
            seeds[number] = derive(self.seed, "environment", step, *group, "reset")
        replies = self._gather(self.environments.reset(rows, seeds))
        for number, episode in enumerate(episodes):
            reply = replies[number]
            if reply.failure is not None:
                episode.end(ended=False, failure=reply.failure)
                continue
            episode.conversation.messages.extend(reply.messages)
            self._set_prompt(episode)

    def _set_prompt(self, episode: _Episode) -> None:
        """Render the messages before the model's first turn."""
        try:
            prompt = self.chat.prompt(episode.conversation.messages)
        except DataError as error:
            episode.end(ended=False, failure=error.what)
            return
        room = self.max_length - self.max_tokens
        if len(prompt) > room:
            failure = (
                f"began with {len(prompt)} tokens; data.max_length leaves {room} before max_tokens"
            )
            episode.end(ended=False, failure=failure)
            return
        episode.change(prompt=prompt)

    def _take_turn(
        self, episodes: list[_Episode], active: list[int], step: int, turn: int, greedily: bool
    ) -> None:
        """Have the model take its turn in the episodes `active`. Collective."""
        requests = []
        for number in active:
            conversation = episodes[number].conversation
            key = (*episodes[number].start.key, turn)
            requests.append(Request(conversation.prompt + conversation.tokens, key))
        if self._has_current_weights:
            completions = self.sample_again(requests, step, greedily)
        else:
            completions = self.sample(requests, step, greedily)
            self._has_current_weights = True
        for number, completion in zip(active, completions, strict=True):
            episode = episodes[number]
            episode.append(completion.tokens, completion.log_probs, sampled=True)
            read = self.chat.read(completion.tokens)
            conversation = episode.conversation
            taken = Turn(len(completion.tokens), message_index=len(conversation.messages))
            conversation.turns.append(taken)
            conversation.messages.append(read.message)
            episode.change(answer=read.content)
            # A turn that was cut is the last one; the environment still judges it.
            if not completion.ended:
                episode.is_over = True

    def _step(self, episodes: list[_Episode], active: list[int], step: int, turn: int) -> None:
        """Have the environments answer the last turn of the episodes `active`. Collective."""
        rank, ranks = self._rank_and_ranks()
        messages = {}
        seeds = {}
        for number in active:
            if number % ranks != rank:
                continue
            episode = episodes[number]
            messages[number] = episode.conversation.messages[-1]
            key = episode.start.key
            seeds[number] = derive(self.seed, "environment", step, *key, turn)
        replies = self._gather(self.environments.step(messages, seeds))
        for number in active:
            self._take_reply(episodes[number], replies[number], is_last=turn + 1 == self.turns)
        over = [number for number in active if episodes[number].is_over]
        if self.scores_at_end:
            self._finish(episodes, over, seeds)
        self.environments.end(over)

    def _finish(self, episodes: list[_Episode], over: list[int], seeds: dict[int, int]) -> None:
        """Have the environments score the episodes among `over` that were cut. Collective.

        `seeds`: number of an episode of this rank → seed of its last step.
        """
        cut = []
        for number in over:
            conversation = episodes[number].conversation
            if not conversation.ended and conversation.failure is None:
                cut.append(number)
        if not cut:
            return
        own = {number: seeds[number] for number in cut if number in seeds}
        replies = self._gather(self.environments.finish(own))
        for number in cut:
            reply = replies[number]
            episodes[number].change(failure=reply.failure)
            episodes[number].conversation.turns[-1].reward = reply.reward

    def _take_reply(self, episode: _Episode, reply: Reply, is_last: bool) -> None:
        """Add an environment's reply to its episode. `is_last`: no turn of the model may follow."""
        if reply.failure is not None:
            episode.end(ended=False, failure=reply.failure)
            return
        conversation = episode.conversation
        conversation.messages.extend(reply.messages)
        turn = conversation.turns[-1]
        turn.reward = reply.reward
        turn.tool_calls = reply.tool_calls
        turn.tool_errors = reply.tool_errors
        was_cut = episode.is_over
        if was_cut:
            return
        if reply.done:
            episode.end(ended=True)
        elif is_last:
            episode.end(ended=False)
        else:
            self._append_reply(episode, reply)

    def _append_reply(self, episode: _Episode, reply: Reply) -> None:
        """Append the environment's messages as tokens, if another turn then fits."""
        if not reply.messages:
            failure = "returned no message, and the episode is not done"
            episode.end(ended=False, failure=failure)
            return
        earlier = episode.conversation.tokens
        try:
            tokens = self.chat.reply(reply.messages, earlier[-1])
        except DataError as error:
            episode.end(ended=False, failure=error.what)
            return
        if len(earlier) + len(tokens) + self.max_new_tokens > self.max_tokens:
            episode.end(ended=False)
            return
        episode.append(tokens, [0.0] * len(tokens), sampled=False)


class OwnEpisodes:
    """Plays the episodes of one rank without the other ranks, in place of a generator that completes prompts."""

    def __init__(self, conversations: Conversations, generator: Generator) -> None:
        """Set up.

        Args:
            conversations: The episodes of the run. Nothing else may play them meanwhile.
            generator: Samples the model's turns. It has the weights.
        """

        def sample(requests: list[Request], step: int, _greedily: bool) -> list[Completion]:
            return generator.generate(requests, step)

        self._conversations = replace(
            conversations,
            sample=sample,
            sample_again=sample,
            finish_background=lambda: None,
            plays_alone=True,
        )

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return an episode for each request, in their order. Not collective. `requests`: Starts."""
        starts = [request for request in requests if isinstance(request, Start)]
        assert len(starts) == len(requests), "`Rollouts` makes a Start for each episode"
        return self._conversations.play(starts, step, greedily=False)


def row_for_environment(meta: dict[str, Any]) -> dict[str, Any]:
    """Return what `reset` gets of a prompt's row.

    These are all columns under their names, `domain`, `prompt` as the row has it, and `messages`: the
    prompt as messages, without an answer at its end.

    `meta`: of the prompt in the cache, see `PromptRowEncoder`.
    """
    row = dict(meta)
    row |= row.pop(OWN_COLUMNS, {})
    prompt = row.pop(ROW_PROMPT)
    messages = as_messages(prompt, "user")
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    row["prompt"] = prompt
    row["messages"] = messages
    return row
