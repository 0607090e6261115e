"""Conversations grow by the tokens that were sampled, and by those that the template writes for the
environment; only the former are learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drumline.algorithms.credit import gae, place_at_last_token
from drumline.config import rollouts as configs
from drumline.config.data import DataConfig
from drumline.config.load import load_values
from drumline.data.batches import IGNORE, Episodes, collate_episodes
from drumline.data.encode import ROW_PROMPT
from drumline.errors import ConfigError
from drumline.models.templates import read_template
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.conversations import (
    Conversation,
    Conversations,
    Start,
    Turn,
    row_for_environment,
)
from drumline.rl.environments import Reply
from drumline.rl.generate import Completion, HFGenerator, Request
from drumline.rl.transcript import MOST_TEXT, shorten_messages
from drumline.rl.turns import ChatTurns
from drumline.rl.vllm import RemoteVLLM
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.vllm_stub import StubServer

DATA = DataConfig.model_validate({"train": [{"kind": "digits"}]})
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
MORE_SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *HARMONY, "<|return|>"]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = [{"role": "user", "content": "And?"}]
TOOL_RESULT = [{"role": "tool", "name": "add", "content": "3"}]
TWO_RESULTS = [*TOOL_RESULT, {"role": "tool", "name": "add", "content": "4"}]
# Leaves out old reasoning, and writes an empty one before a call that is the last turn, as Qwen 3 does.
THINKING = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ (call.function.arguments | tojson) ~ '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if tools %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# In the format of gpt-oss. As in its own template a turn has one call, a result has the name of the
# last call, and the answer that ends a conversation ends by another token than earlier ones.
GPT_OSS = """
{%- if tools -%}
<|start|>developer<|message|># Tools
{%- for tool in tools %} {{ tool.function.name }}{% endfor -%}
<|end|>
{%- endif -%}
{%- set called = namespace(name="") -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- elif message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{%- set called.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" -%}
{%- set is_last = loop.last and not add_generation_prompt -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- "<|return|>" if is_last else "<|end|>" }}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def chat_turns(template: str, reads_calls: bool = True) -> ChatTurns:
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": MORE_SPECIAL})
    tools = [TOOL] if reads_calls else []
    return ChatTurns(tokenizer, DATA, tools, reads_calls)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (read_template("chatml"), USER, "\n<|im_start|>user\nAnd?<|im_end|>\n"),
        (
            read_template("chatml"),
            TWO_RESULTS,
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n"
            "</tool_response><|im_end|>\n",
        ),
        (THINKING, USER, "\n<|im_start|>user\nAnd?<|im_end|>\n"),
        (THINKING, TOOL_RESULT, "\n<|im_start|>tool\n3<|im_end|>\n"),
    ],
    ids=["user", "tools", "thinking, user", "thinking, tool"],
)
def test_a_reply_is_what_the_template_writes_between_two_turns(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    chat = chat_turns(template)
    tokenizer = chat.tokenizer
    expected += "<|im_start|>assistant\n"
    assert tokenizer.decode(chat.reply(messages, tokenizer.eos_token_id)) == expected
    # A turn that a stop text ended gets the template's end first.
    last = tokenizer.encode("Rome")[-1]
    assert tokenizer.decode(chat.reply(messages, last)) == f"<|im_end|>{expected}"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_reply_may_have_the_words_by_which_it_is_found(role: str) -> None:
    chat = chat_turns(THINKING)
    messages = [{"role": role, "content": "I say drumline-answer here", "name": "add"}]
    tokens = chat.reply(messages, chat.tokenizer.eos_token_id)
    expected = (
        f"\n<|im_start|>{role}\nI say drumline-answer here<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.tokenizer.decode(tokens) == expected


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama-3", "mistral"])
def test_with_the_prompt_they_are_the_template_s_whole_conversation(name: str) -> None:
    chat = chat_turns(read_template(name))
    tokenizer = chat.tokenizer
    end = "<|eot_id|>" if name == "llama-3" else "<|im_end|>"
    question = {"role": "user", "content": "What is two plus three?"}
    answer = {"role": "assistant", "content": "five"}
    tokens = list(chat.prompt([question]))
    tokens += tokenizer.encode(" five" if name == "mistral" else "five")
    tokens.append(tokenizer.convert_tokens_to_ids(end))
    tokens += chat.reply(USER, tokens[-1])
    text = tokenizer.apply_chat_template(
        [question, answer, *USER], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    ("written", "end", "messages", "rendered"),
    [
        (
            "<|channel|>final<|message|>five",
            "<|return|>",
            USER,
            "<|start|>user<|message|>And?<|end|>",
        ),
        (
            " to=functions.add<|channel|>commentary json<|message|>{}",
            "<|call|>",
            TOOL_RESULT,
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>',
        ),
    ],
    ids=["answer", "call"],
)
def test_turns_of_gpt_oss_go_on_behind_the_token_that_ended_them(
    written: str, end: str, messages: list[dict[str, Any]], rendered: str
) -> None:
    """The model ends an answer by <|return|> and a call by <|call|>, each of which stays as it was."""
    chat = chat_turns(GPT_OSS)
    tokenizer = chat.tokenizer
    turn = tokenizer.encode(f"{written}{end}")
    assert tokenizer.decode(turn) == f"{written}{end}"

    reply = chat.reply(messages, turn[-1])

    assert tokenizer.decode(reply) == f"{rendered}<|start|>assistant"


def test_a_conversation_with_calls_of_gpt_oss_is_the_template_s() -> None:
    chat = chat_turns(GPT_OSS)
    tokenizer = chat.tokenizer
    question = {"role": "user", "content": "What is two plus three?"}
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'
    tokens = list(chat.prompt([question]))
    turn = tokenizer.encode(call)
    tokens += turn
    tokens += chat.reply(TOOL_RESULT, turn[-1])

    message = chat.read(turn).message

    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    text = tokenizer.apply_chat_template(
        [question, message, *TOOL_RESULT],
        tools=[TOOL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert "# Tools add<|end|>" in text
    assert tokenizer.decode(tokens) == text


def test_what_the_model_wrote_is_read() -> None:
    chat = chat_turns(read_template("chatml"))
    tokens = chat.tokenizer.encode(f"I add. {CALL}<|im_end|>")
    turn = chat.read(tokens)
    assert turn.content == "I add."
    (call,) = turn.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    wrong = chat.read(chat.tokenizer.encode("<tool_call>3</tool_call>"))
    assert len(wrong.message["unread_calls"]) == 1
    plain = chat_turns(read_template("chatml"), reads_calls=False)
    assert plain.read(tokens).message == {"role": "assistant", "content": f"I add. {CALL}"}


def test_a_template_that_does_not_fit_is_refused() -> None:
    for template, line in {
        "": "this tokenizer has none",
        "{{ messages }}": "shows no tools",
        "{{ tools }}": "in a format that cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=line):
            chat_turns(template)


class Scripted:
    """Environments that give the same replies to every episode."""

    def __init__(self, replies: list[Reply], begin: Reply | None = None) -> None:
        self.replies = replies
        self.begin = begin or Reply(USER)
        self.seeds: list[dict[int, int]] = []
        self.steps: dict[int, int] = {}
        self.heard: dict[int, list[dict[str, Any]]] = {}

    def reset(self, rows: dict[int, Any], seeds: dict[int, int]) -> dict[int, Reply]:
        self.seeds.append(seeds)
        self.steps = dict.fromkeys(rows, 0)
        self.heard = {number: [] for number in rows}
        return dict.fromkeys(rows, self.begin)

    def step(self, messages: dict[int, Any], seeds: dict[int, int]) -> dict[int, Reply]:
        self.seeds.append(seeds)
        replies = {}
        for number, message in messages.items():
            self.heard[number].append(message)
            replies[number] = self.replies[self.steps[number]]
            self.steps[number] += 1
        return replies

    def end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.steps.pop(number, None)


class Answers:
    """Samples these texts, one a turn, and notes what it was asked."""

    def __init__(self, texts: list[str], ended: bool = True) -> None:
        self.texts = texts
        self.ended = ended
        self.asked: list[list[Request]] = []
        self.tokenizer: Any = None

    def __call__(self, requests: list[Request], step: int, greedily: bool) -> list[Completion]:
        text = self.texts[len(self.asked)]
        self.asked.append(requests)
        tokens = self.tokenizer.encode(text)
        log_probs = [-0.5] * len(tokens)
        return [Completion(list(tokens), list(log_probs), self.ended) for _ in requests]


def play(
    answers: Answers, environments: Any, number: int = 1, **options: Any
) -> list[Conversation]:
    chat = chat_turns(read_template("chatml"), options.pop("reads_calls", False))
    answers.tokenizer = chat.tokenizer
    limits: dict[str, Any] = {
        "turns": 3,
        "max_new_tokens": 16,
        "max_tokens": 256,
        "max_length": 4096,
        **options,
    }
    conversations = Conversations(answers, answers, environments, chat, seed=5, **limits)
    starts = []
    for index in range(number):
        # Two episodes a group.
        starts.append(Start([7], (index // 2, index % 2)))
    played: Any = conversations.play(starts, step=4, greedily=False)
    assert not environments.steps, "all are ended"
    return list(played)


GO_ON = Reply([{"role": "user", "content": "More."}], 0.5)
DONE = Reply([{"role": "user", "content": "Well done."}], 1.0, done=True)


def test_only_the_model_s_tokens_are_sampled_and_stay_as_they_were() -> None:
    answers = Answers(["one<|im_end|>", "two<|im_end|>"])
    (episode,) = play(answers, Scripted([GO_ON, DONE]))
    tokenizer = answers.tokenizer
    reply = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
    prompt = "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(episode.prompt) == prompt
    assert tokenizer.decode(episode.tokens) == f"one<|im_end|>{reply}two<|im_end|>"
    sampled = [token for token, own in zip(episode.tokens, episode.sampled, strict=True) if own]
    assert tokenizer.decode(sampled) == "one<|im_end|>two<|im_end|>"
    for log_prob, own in zip(episode.log_probs, episode.sampled, strict=True):
        assert log_prob == (-0.5 if own else 0.0)
    # The second turn goes on from the very tokens of the first.
    (first,), (second,) = answers.asked
    assert first.tokens == episode.prompt
    assert second.tokens == (episode.prompt + episode.tokens)[: len(second.tokens)]
    assert (first.key, second.key) == ((0, 0, 0), (0, 0, 1))
    assert [message["content"] for message in episode.messages] == [
        "And?", "one", "More.", "two", "Well done.",
    ]  # fmt: skip
    assert (episode.reward, len(episode.turns), episode.ended) == (1.5, 2, True)
    assert episode.turns == [
        Turn(len(tokenizer.encode("one<|im_end|>")), message_index=1, reward=0.5),
        Turn(len(tokenizer.encode("two<|im_end|>")), message_index=3, reward=1.0),
    ]
    assert (episode.answer, episode.length) == ("two", len(sampled))


@pytest.mark.parametrize(
    ("replies", "ended", "options", "turns", "reward"),
    [
        # The turns are used up, a turn was cut, or another does not fit: the environment judges it.
        ([GO_ON, GO_ON, GO_ON], True, {}, 3, 1.5),
        ([GO_ON], False, {}, 1, 0.5),
        ([GO_ON], True, {"max_tokens": 20}, 1, 0.5),
    ],
    ids=["turns", "cut", "room"],
)
def test_an_episode_is_cut(
    replies: list[Reply], ended: bool, options: dict[str, Any], turns: int, reward: float
) -> None:
    answers = Answers(["one<|im_end|>"] * 3, ended)
    (episode,) = play(answers, Scripted(replies), **options)
    assert not episode.ended
    assert (len(episode.turns), episode.reward, episode.failure) == (turns, reward, None)
    assert episode.sampled[-1], "nothing of the environment stands at the end"


class Scoring(Scripted):
    """Gives its reward only at the end: environments of verifiers."""

    score = Reply(reward=0.25, done=True)

    def finish(self, seeds: dict[int, int]) -> dict[int, Reply]:
        assert seeds == self.seeds[-1], "those of the last step"
        return dict.fromkeys(seeds, self.score)


MORE = Reply(GO_ON.messages)


@pytest.mark.parametrize(
    ("ended", "options", "turns"),
    [(True, {}, 3), (False, {}, 1), (True, {"max_tokens": 20}, 1)],
    ids=["turns", "cut", "room"],
)
def test_a_cut_episode_is_scored_at_its_end(
    ended: bool, options: dict[str, Any], turns: int
) -> None:
    environments = Scoring([MORE] * 3)
    answers = Answers(["one<|im_end|>"] * 3, ended)
    first, second = play(answers, environments, 2, scores_at_end=True, **options)
    for episode in (first, second):
        assert not episode.ended
        assert (len(episode.turns), episode.reward, episode.failure) == (turns, 0.25, None)
    environments = Scoring([MORE] * 3)
    environments.score = Reply(failure="raised ValueError")
    (failed,) = play(
        Answers(["one<|im_end|>"] * 3, ended), environments, scores_at_end=True, **options
    )
    assert (failed.failure, failed.reward) == ("raised ValueError", None)


def test_an_episode_that_the_environment_ends_is_scored_once() -> None:
    done = Reply(reward=1.0, done=True)
    (episode,) = play(Answers(["one<|im_end|>"]), Scripted([done]), scores_at_end=True)
    assert (episode.ended, episode.reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("environments", "failure"),
    [
        (Scripted([], Reply(failure="crashed")), "crashed"),
        (Scripted([Reply(failure="timed out")]), "timed out"),
        (Scripted([Reply()]), "returned no message"),
        (Scripted([], Reply([{"role": "clown", "content": "x"}])), "refuses"),
        (Scripted([Reply([{"role": "clown", "content": "x"}])]), "refuses"),
    ],
)
def test_what_fails_ends_its_episode(environments: Any, failure: str) -> None:
    (episode,) = play(Answers(["one<|im_end|>"] * 3), environments)
    assert not episode.ended
    assert failure in (episode.failure or "")
    assert len(episode.prompt) > 0
    assert len(episode.tokens) == len(episode.log_probs) == len(episode.sampled)


def test_a_prompt_that_leaves_no_room_fails() -> None:
    (episode,) = play(Answers([]), Scripted([]), max_length=257)
    assert "data.max_length leaves 1 before max_tokens" in (episode.failure or "")
    assert episode.prompt == [7]


def test_a_group_begins_alike_and_goes_on_by_itself() -> None:
    environments = Scripted([DONE])
    play(Answers(["one<|im_end|>"]), environments, number=4)
    begun, stepped = environments.seeds
    assert begun[0] == begun[1] != begun[2] == begun[3]
    assert len(set(stepped.values())) == 4


def test_many_episodes_are_played_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.rl.conversations.MOST_OF_RANK", 2)
    environments = Scripted([DONE])
    answers = Answers(["one<|im_end|>"] * 2)
    episodes = play(answers, environments, number=3)
    assert [len(requests) for requests in answers.asked] == [2, 1]
    assert [episode.reward for episode in episodes] == [1.0] * 3


def test_calls_reach_the_environment() -> None:
    environments = Scripted([Reply(TOOL_RESULT, tool_calls=2, tool_errors=1), Reply(done=True)])
    answers = Answers([f"{CALL}<|im_end|>", "3<|im_end|>"])
    (episode,) = play(answers, environments, reads_calls=True, max_new_tokens=64)
    (heard, _) = environments.heard[0]
    assert heard["tool_calls"][0]["function"]["name"] == "add"
    assert (episode.tool_calls, episode.tool_errors, episode.reward) == (2, 1, None)
    assert episode.answer == "3"


def test_a_transcript_has_no_long_texts() -> None:
    short = {"id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}
    long = {"function": {"name": "add", "arguments": {"text": "x" * 10_000}}}
    messages = [
        {"role": "user", "content": "?", "image": "y" * 10_000},
        {"role": "assistant", "content": "I add.", "tool_calls": [short, long, "nonsense"]},
        {"role": "tool", "name": "add", "content": "3", "tool_calls": None},
        {"role": "assistant", "content": "", "unread_calls": ["z" * 10_000]},
    ]
    shown = shorten_messages(Conversation([], [], False, messages=messages))
    first, second, third, fourth = shown
    assert first == {"role": "user", "content": "?"}
    kept, cut = second["tool_calls"]
    assert kept["function"] == short["function"]
    assert cut["function"]["arguments"].startswith('{"text": "xxx')
    assert (third["role"], third["name"], third["content"]) == ("tool", "add", "")
    assert fourth == {"role": "assistant", "content": "", "unread_calls": [""]}
    assert len(json.dumps(shown)) < MOST_TEXT + 500


@pytest.mark.slow
@pytest.mark.claim("all generators play episodes of several turns, by token ids")
def test_all_generators_play_the_same_episodes(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Untied, as the server's own model is.
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = chat_turns(read_template("chatml"), reads_calls=False)
    options = {"max_new_tokens": 8, "stop": tuple("aeiou")}
    played: list[list[Completion]] = []
    with StubServer(served) as server:
        url = {"url": server.url, "weights": "none"}
        generators: list[Any] = [
            HFGenerator(configs.HFGenerator(**options), model, tiny_tokenizer(), 5),
            ContinuousGenerator(configs.ContinuousGenerator(**options), model, tiny_tokenizer(), 5),
            RemoteVLLM(configs.VLLMGenerator(**url, **options), tiny_tokenizer(), 5),
        ]
        for generator in generators:
            sample = partial(sample_by, generator)
            environments: Any = Scripted([GO_ON, GO_ON, GO_ON])
            conversations = Conversations(
                sample, sample, environments, chat, 5, 3, 8, max_tokens=256, max_length=512
            )
            starts = [Start([7], (index, 0)) for index in range(12)]
            played.append(conversations.play(starts, step=1, greedily=False))
    expected = played[0]
    turns = {len(episode.turns) for episode in expected if isinstance(episode, Conversation)}
    assert {1, 3} <= turns
    for others in played[1:]:
        for mine, theirs in zip(others, expected, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def sample_by(
    generator: Any, requests: list[Request], step: int, greedily: bool
) -> list[Completion]:
    completions: list[Completion] = generator.generate(requests, step)
    return completions


class ByKeys:
    """A generator whose completions depend on the key of their request alone."""

    def __init__(self, chat: ChatTurns) -> None:
        self.chat = chat

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        completions = []
        for request in requests:
            tokens = self.chat.tokenizer.encode(f"{request.key} {step}<|im_end|>")
            completions.append(Completion(tokens, [-0.5] * len(tokens), True))
        return completions


def test_a_rank_plays_its_episodes_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_turns(read_template("chatml"), reads_calls=False)
    generator = ByKeys(chat)
    waits: list[str] = []
    conversations = Conversations(
        sample=partial(sample_by, generator),
        sample_again=partial(sample_by, generator),
        environments=Scripted([GO_ON, DONE]),  # type: ignore[arg-type]
        chat=chat,
        seed=5,
        turns=3,
        max_new_tokens=16,
        max_tokens=256,
        max_length=512,
        finish_background=lambda: waits.append("for episodes in the background"),
    )
    starts = [Start([7], (index // 2, index % 2)) for index in range(4)]
    together = conversations.play(starts, 3, greedily=False)
    assert waits == ["for episodes in the background"], "their environments are the same"

    # As if this were one of several ranks.
    def refuse(_: Any) -> None:
        raise AssertionError("other ranks are not asked")

    monkeypatch.setattr("drumline.rl.conversations.gather_from_ranks", refuse)
    monkeypatch.setattr("drumline.rl.conversations.rank_and_world_size", lambda: (1, 2))
    own = conversations.play_own(generator).generate([starts[1], starts[3]], 3)
    assert own == [together[1], together[3]]
    assert len(waits) == 1, "it is the background itself"


def test_targets_are_the_sampled_tokens() -> None:
    prompts = [np.asarray([5, 6]), np.asarray([5])]
    completions = [np.asarray([1, 2, 3, 4]), np.asarray([8])]
    sampled = [[True, False, False, True], [True]]
    episodes = Episodes.start(prompts, completions, sampled=sampled)
    assert episodes.mask_NM.tolist() == [[True, False, False, True], [True, False, False, False]]
    batch = collate_episodes(episodes, [0, 1], 0, None)
    assert batch.targets_BT[0].tolist() == [IGNORE, 1, IGNORE, IGNORE, 4, IGNORE]
    trained_N = torch.ones(2, dtype=torch.bool)
    by_sequence = episodes.add_loss_weights("sequence", 1, trained_N)
    assert by_sequence.weights_NM[0].tolist() == [0.5, 0, 0, 0.5]
    assert episodes.add_loss_weights("token", 1, trained_N).weight_N.tolist() == [2, 1]


def test_advantages_pass_over_the_environment_s_tokens() -> None:
    mask_NM = torch.tensor([[True, True, False, False, True], [True, False, True, False, False]])
    draw = torch.Generator().manual_seed(0)
    values_NM = torch.randn(2, 5, generator=draw)
    rewards_NM = torch.randn(2, 5, generator=draw) * mask_NM
    advantages_NM, returns_NM = gae(rewards_NM, values_NM, mask_NM, 0.9, 0.8)
    for row in range(2):
        own = mask_NM[row]
        whole = torch.ones(1, int(own.sum()), dtype=torch.bool)
        expected, expected_returns = gae(
            rewards_NM[row, own][None], values_NM[row, own][None], whole, 0.9, 0.8
        )
        assert torch.equal(advantages_NM[row, own], expected[0])
        assert torch.equal(returns_NM[row, own], expected_returns[0])
        assert not advantages_NM[row, ~own].any()
        assert not returns_NM[row, ~own].any()
    placed_NM = place_at_last_token(torch.tensor([2.0, 3.0]), mask_NM)
    assert placed_NM.tolist() == [[0, 0, 0, 0, 2], [0, 0, 3, 0, 0]]


def test_reset_gets_the_row() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    meta = {"prompt": "rendered", "domain": "d", "answer": "3", ROW_PROMPT: messages}
    row = row_for_environment({**meta, "own columns": {"domain": "mine"}})
    assert row == {
        "prompt": messages, "messages": messages[:1], "domain": "mine", "answer": "3",
    }  # fmt: skip
    assert row_for_environment({**meta, ROW_PROMPT: "x"})["messages"] == [
        {"role": "user", "content": "x"}
    ]


def algorithm(**options: Any) -> Any:
    values = {
        "data": {"train": [{"kind": "digits"}]},
        "model": "gpt2",
        "algorithm": {"kind": "grpo", **options},
    }
    return load_values(values, []).config.algorithm


def test_keys_of_an_environment() -> None:
    environment = {"kind": "class", "path": "a.py:A", "max_tokens": 100, "turns": 3}
    made = algorithm(environment=environment)
    assert [reward.kind for reward in made.rewards] == ["environment"]
    for packaged in (
        {"kind": "verifiers", "id": "guess"},
        {"kind": "openenv", "url": "http://a:1", "action": "text", "observation": "text"},
    ):
        rewarded = algorithm(environment={**packaged, "max_tokens": 100})
        assert [reward.kind for reward in rewarded.rewards] == ["environment"]
    assert (made.new_tokens, made.turns, algorithm().turns) == (100, 3, 1)
    tools = {"kind": "tools", "functions": ["a.py:f"], "max_tokens": 100}
    assert [reward.kind for reward in algorithm(environment=tools).rewards] == ["task"]
    for options, line in (
        ({"environment": {**environment, "max_tokens": 8}}, "has no room for a turn of"),
        ({"environment": tools, "rewards": [{"kind": "environment"}]}, "kind: class"),
        ({"environment": {**packaged, "max_tokens": 100, "url": "a:1"}}, "begins with http"),
        (
            {"environment": {**packaged, "max_tokens": 100, "columns": ["seed"]}},
            "a seed of its own",
        ),
        ({"environment": environment, "ahead": 2, "partial": True}, "an environment has several"),
    ):
        with pytest.raises(ConfigError, match=line):
            algorithm(**options)
