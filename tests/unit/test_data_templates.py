"""Which tokens are learned, for the ways in which chat templates are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drumline.config.data import DataConfig
from drumline.data.sources import Row
from drumline.data.targets import Encoder, TokenSegment, truncate
from drumline.errors import DataError
from tests.tiny import CHATML, tiny_tokenizer

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
NO_GENERATION_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt")]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
# No header for the assistant at all, a blank before its words, end of sequence after them (as Llama 2 and Mistral do).
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[USER] {{ m['content'] }} [/USER]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Words as header, no special token anywhere.
WORDS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# Reasoning is written out in the last turn only (as Qwen3 does), so a turn changes once others follow.
THINKS_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The generation prompt opens a thought that no finished turn has (as DeepSeek-R1 does).
PROMPTS_THOUGHT = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
# A finished conversation is closed once more (as Phi 3 does), so no part of it is a prefix of the whole without a generation prompt.
CLOSES_ALL = CHATML.replace(
    "assistant\n' }}{% endif", "assistant\n' }}{% else %}{{ eos_token }}{% endif"
)
# Nothing closes a turn but the header of the next (as GLM 4 does).
OPENS_ONLY = CHATML.replace("'<|im_end|>' + '\n'", "'\n'")
# What was said is taken from parts, of which text has none (as templates of models that see do).
PARTS = CHATML.replace(
    "message['content'] +", "(message['content'] | selectattr('text', 'defined') | join) +"
)
# Old turns are shown without their reasoning.
FORGETS = CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last else message['content'].split('</think>') | last | trim) +",
)
STRIPS = CHATML.replace("message['content'] +", "(message['content'] | trim) +")

TURNS = [
    {"role": "user", "content": "What is two plus three?"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "It is five."},
]


def encoder(template: str | None, kind: Any = "sft", **data: Any) -> Encoder:
    settings = {"train": [{"kind": "file", "path": "unused"}], **data}
    return Encoder(
        tiny_tokenizer(chat_template=template),
        kind == "pretrain",
        DataConfig.model_validate(settings),
    )


def learned(using: Encoder, **values: Any) -> list[str]:
    """Decoded runs of learned tokens, after a check that the tokens are the whole rendered text."""
    example = using.encode(Row("here:1", values))
    if "messages" in values:
        assert using.tokenizer.decode(example.tokens) == using.tokenizer.apply_chat_template(
            values["messages"], tokenize=False
        )
    edges = np.flatnonzero(np.diff(example.learn, prepend=0, append=0))
    return [
        using.tokenizer.decode(example.tokens[start:stop]) for start, stop in edges.reshape(-1, 2)
    ]


@pytest.mark.claim("only what the assistant says is learned")
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (DEFAULT_SYSTEM, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (NO_GENERATION_PROMPT, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (MARKED, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (BRACKETS, [" a<|im_end|>", " It is five.<|im_end|>"]),
        (WORDS, [" a\n", " It is five.\n"]),
        (THINKS_LAST, ["a<|im_end|>", "<think>\n\n</think>\n\nIt is five.<|im_end|>"]),
        (PROMPTS_THOUGHT, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (STRIPS, ["a<|im_end|>", "It is five.<|im_end|>"]),
        (CLOSES_ALL, ["a<|im_end|>", "It is five.<|im_end|>\n<|im_end|>"]),
        (OPENS_ONLY, ["a\n<|im_start|>", "It is five.\n"]),
    ],
    ids=[
        "chatml",
        "default-system",
        "no-prompt",
        "marked",
        "brackets",
        "words",
        "thinks",
        "prompts-thought",
        "strips",
        "closes",
        "opens",
    ],
)
def test_only_what_the_assistant_says_is_learned(template: str, expected: list[str]) -> None:
    assert learned(encoder(template), messages=TURNS) == expected


@pytest.mark.parametrize(
    "template", [CHATML, DEFAULT_SYSTEM, NO_GENERATION_PROMPT, MARKED, BRACKETS, PROMPTS_THOUGHT]
)
def test_a_conversation_that_the_assistant_opens(template: str) -> None:
    turns = [{"role": "assistant", "content": "Hello!"}, *TURNS[:2]]
    assert [text.strip() for text in learned(encoder(template), messages=turns)] == [
        "Hello!<|im_end|>",
        "a<|im_end|>",
    ]


def test_reasoning_that_later_turns_hide() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "<think>\n2 + 3\n</think>\n\nFive."}]
    assert learned(encoder(FORGETS), messages=turns) == [
        "<think>\n2 + 3\n</think>\n\nFive.<|im_end|>"
    ]
    assert learned(encoder(FORGETS), messages=turns + turns)[0] == "Five.<|im_end|>"


def test_blanks_and_line_breaks_around_the_content() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "\n five \n"}]
    assert learned(encoder(CHATML), messages=turns) == ["\n five \n<|im_end|>"]
    assert learned(encoder(STRIPS), messages=turns) == ["five<|im_end|>"]


def test_characters_of_several_tokens_at_the_edges() -> None:
    turns = [{"role": "user", "content": "é中"}, {"role": "assistant", "content": "中 🥁"}]
    assert learned(encoder(CHATML), messages=turns) == ["中 🥁<|im_end|>"]


@pytest.mark.parametrize("trim", [True, False])
def test_a_token_that_joins_the_header_to_the_content(trim: bool) -> None:
    """A header that ends in a blank, which the first word's token takes: the token is learned. Some tokenizers trim their offsets."""
    from tokenizers import processors

    using = encoder(WORDS.replace("assistant:'", "assistant: '"))
    using.tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    assert (
        using.tokenizer("b a", return_offsets_mapping=True)["offset_mapping"][-1] == (2, 3)
    ) == trim
    assert learned(using, messages=TURNS) == [" a\n", "It is five.\n"], (
        "' a' is one token, ' I' is two"
    )


def test_prompt_and_completion_through_the_template() -> None:
    chat = encoder(CHATML)
    assert learned(chat, prompt="What?", completion="This.") == ["This.<|im_end|>"]
    whole = chat.encode(Row("here:1", {"prompt": "What?", "completion": "This."}))
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
    assert whole.tokens.tolist() == chat.encode(Row("here:1", {"messages": turns})).tokens.tolist()
    assert whole.tokens.dtype == np.int32 and whole.learn.dtype == np.uint8


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_completion_is_learned_when_the_prompt_is_a_conversation(template: str) -> None:
    assert learned(encoder(template), prompt=TURNS[:3], completion="It is five.") == [
        "It is five.<|im_end|>"
    ]
    assert learned(encoder(template), prompt=TURNS[:3], completion=TURNS[3:]) == [
        "It is five.<|im_end|>"
    ]


def test_prompt_and_completion_as_plain_text() -> None:
    plain = encoder(None)
    assert learned(plain, prompt="2 + 3 = ", completion="5") == ["5<|im_end|>"]
    assert (
        plain.tokenizer.decode(
            plain.encode(Row("", {"prompt": "2 + 3 = ", "completion": "5"})).tokens
        )
        == "2 + 3 = 5<|im_end|>"
    )
    with pytest.raises(DataError, match="hold messages and this tokenizer has no chat template"):
        plain.encode(Row("a:1", {"prompt": TURNS, "completion": "5"}))


def test_text_is_learned_whole_and_closed_once() -> None:
    assert learned(encoder(CHATML), text="Rome.") == ["Rome.<|im_end|>"]
    assert learned(encoder(CHATML), text="Rome.<|im_end|>") == ["Rome.<|im_end|>"]
    assert learned(encoder(CHATML), text="") == ["<|im_end|>"]


def test_text_opens_with_bos_where_the_tokenizer_does_so() -> None:
    from tokenizers import processors

    opens = encoder(None)
    opens.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    decode = opens.tokenizer.decode
    assert decode(opens.encode(Row("", {"text": "Rome"})).tokens) == "<|im_start|>Rome<|im_end|>"
    assert (
        decode(opens.encode(Row("", {"prompt": "R", "completion": "ome"})).tokens).count(
            "<|im_end|>"
        )
        == 1
    )
    assert (
        decode(opens.encode(Row("", {"prompt": "R", "completion": "ome"})).tokens).count(
            "<|im_start|>"
        )
        == 1
    )


def test_learn_on_all_and_pretraining_learn_every_token() -> None:
    for using in (
        encoder(CHATML, learn_on="all"),
        encoder(CHATML, kind="pretrain"),
        encoder(MARKED, kind="pretrain"),
    ):
        assert using.encode(Row("", {"messages": TURNS})).learn.all()
    assert (
        encoder(None, learn_on="all")
        .encode(Row("", {"prompt": "a", "completion": "b"}))
        .learn.all()
    )


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, DEFAULT_SYSTEM, NO_GENERATION_PROMPT, BRACKETS]
)
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_what_has_no_weight_is_not_learned_beside_all_else(template: str, kind: str) -> None:
    using = encoder(template, kind, learn_on="all")
    said = [
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
        ("assistant", "four"),
        ("user", "five"),
    ]
    talk = [{"role": role, "content": content} for role, content in said]
    for index, (_, content) in enumerate(said):
        messages = [{**turn, "weight": int(at != index)} for at, turn in enumerate(talk)]
        found = using.encode(Row("rows.jsonl:1", {"messages": messages}))
        (start, stop), *more = (
            np.flatnonzero(np.diff(found.learn, prepend=1, append=1)).reshape(-1, 2).tolist()
        )
        assert not more and using.tokenizer.decode(found.tokens[start:stop]).strip().startswith(
            content
        )
    whole = using.encode(Row("rows.jsonl:1", {"messages": talk}))
    assert whole.learn.all()


def test_no_chat_template() -> None:
    with pytest.raises(DataError) as caught:
        encoder(None).encode(Row("chat.jsonl:3", {"messages": TURNS}))
    assert caught.value.line().startswith(
        "chat.jsonl:3: `messages` need a chat template and this tokenizer has no chat template"
    )
    assert "model.chat_template" in caught.value.line()


def test_no_end_of_sequence_token() -> None:
    plain = encoder(None)
    plain.tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        plain.encode(Row("a:1", {"text": "x"}))


def test_a_template_that_hides_what_was_said() -> None:
    with pytest.raises(DataError, match=r"does not render what messages\[1\] says in its place"):
        encoder(PARTS).encode(Row("chat.jsonl:9", {"messages": TURNS}))
    shouts = encoder(
        THINKS_LAST.replace("m['content'] +", "(m['content'] if loop.last else 'left out') +")
    )
    with pytest.raises(DataError) as caught:
        shouts.encode(Row("chat.jsonl:9", {"messages": TURNS}))
    assert caught.value.line().startswith(
        "chat.jsonl:9: the chat template does not render what messages[1] says in its place"
    )


def test_a_template_that_refuses() -> None:
    strict = encoder("{{ raise_exception('roles must take turns') }}")
    with pytest.raises(
        DataError,
        match=r"chat.jsonl:2: the chat template refuses this conversation: roles must take turns",
    ):
        strict.encode(Row("chat.jsonl:2", {"messages": TURNS}))


class SlowTokenizer:
    """A character tokenizer in Python, as transformers' slow ones: no offsets. `join`: one token for a pair of characters."""

    is_fast = False
    eos_token_id, all_special_ids = 0, [0]
    added_tokens_decoder: dict[int, Any] = {}
    chat_template = WORDS

    def __init__(self, join: str = "") -> None:
        self.join = join

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        joined = text.replace(self.join, "\x01") if self.join else text
        return {"input_ids": [ord(char) for char in joined]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids)).replace("\x01", self.join)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tiny_tokenizer(chat_template=WORDS).apply_chat_template(messages, **options))


def test_tokenizers_without_offsets() -> None:
    data = DataConfig.model_validate({"train": [{"kind": "file", "path": "unused"}]})
    assert learned(Encoder(SlowTokenizer(), False, data), messages=TURNS) == [
        " a\n",
        " It is five.\n",
    ]
    with pytest.raises(
        DataError, match="joins a turn's header to its content, and gives no offsets"
    ):
        Encoder(SlowTokenizer(join=": a"), False, data).encode(Row("a:1", {"messages": TURNS}))


SHAPES = {
    "chatml": CHATML, "default system": DEFAULT_SYSTEM, "no generation prompt": NO_GENERATION_PROMPT, "brackets": BRACKETS, "words": WORDS,
    "thinks last": THINKS_LAST, "prompts a thought": PROMPTS_THOUGHT, "closes all": CLOSES_ALL, "opens only": OPENS_ONLY, "parts": PARTS,
    "forgets": FORGETS, "strips": STRIPS,
}  # fmt: skip
LAST = [
    "It is five.",
    " five\n",
    "a",
    "assistant\nfive",
    "<think>two</think>five",
    "<|im_end|>",
    "five\n<|im_start|>assistant\nfive",
]


@pytest.mark.parametrize("template", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("answer", LAST)
def test_a_usual_end_is_where_renderings_find_it(
    template: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result() -> Any:
        try:
            return (
                encoder(template)
                .encode(
                    Row("a:1", {"messages": [*TURNS[:3], {"role": "assistant", "content": answer}]})
                )
                .learn.tolist()
            )
        except DataError as error:
            return str(error)

    quick = result()
    monkeypatch.setattr(Encoder, "_usual_start", lambda *_: None)
    assert quick == result()


def test_a_usual_answer_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    using, seen, whole = encoder(CHATML), list[dict[str, Any]](), Encoder._render

    def render(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return whole(*given, **options)

    using.encode(Row("a:1", {"messages": TURNS[:2]}))
    monkeypatch.setattr(Encoder, "_render", render)
    using.encode(Row("a:2", {"messages": TURNS[:2]}))
    assert seen == [{}]


# ----------------------------------------------------------------------------------------------------------- truncation


def test_truncation() -> None:
    example = TokenSegment(np.arange(6, dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], np.uint8))
    right, left = truncate(example, 4, "right", "a:1"), truncate(example, 4, "left", "a:1")
    assert right is not None and right.tokens.tolist() == [0, 1, 2, 3] and right.target_count == 1
    assert left is not None and left.tokens.tolist() == [2, 3, 4, 5] and left.target_count == 3
    assert truncate(example, 4, "drop", "a:1") is None
    assert truncate(example, 6, "error", "a:1") is example
    with pytest.raises(
        DataError, match=r"a:1: 6 tokens, longer than data.max_length 4 — raise data.max_length"
    ):
        truncate(example, 4, "error", "a:1")
    assert TokenSegment(example.tokens[3:], example.learn[3:]).target_count == 2, (
        "nothing predicts the first token"
    )
