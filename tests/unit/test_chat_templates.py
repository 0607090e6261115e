"""Named chat templates: what each writes, and that the loss falls on answers alone, token by token; tools, reasoning, unfit roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.config.algorithm import AlgorithmSpec
from drumline.config.data import DataConfig, FileSource
from drumline.config.load import load, load_text
from drumline.config.model import TEMPLATES, ModelConfig
from drumline.config.registry import make
from drumline.data.cache import describe_left_out
from drumline.data.fingerprint import cache_key
from drumline.data.sources import Row
from drumline.data.targets import Encoder
from drumline.data.workers import ChunkEncoder
from drumline.errors import ConfigError, DataError, ModelError
from drumline.models.templates import FOLDER, end_ids, set_template
from drumline.models.tokenizer import load_tokenizer
from tests.chat import TALK, WRITTEN, im, require
from tests.harness import write_config
from tests.tiny import CHATML, tiny_model_dir, tiny_tokenizer

TOKENS = [
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
    ),
    *("<|end|>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
USES = [
    {"role": "user", "content": "one and one?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
]
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"


def tokenizer(name: str | None = None, template: str | None = CHATML) -> Any:
    made = tiny_tokenizer(chat_template=template)
    made.add_special_tokens({"additional_special_tokens": TOKENS})
    if name is not None:
        set_template(made, name)
    return made


def encoder(of: Any, **data: Any) -> Encoder:
    return Encoder(of, False, DataConfig(train=["-"], **data))


def complaint(of: Encoder, values: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        of.encode(Row("rows.jsonl:3", values))
    line = caught.value.line()
    assert line.startswith("rows.jsonl:3: ") and "\n" not in line
    return line


@pytest.mark.claim("so with each named chat template, and reasoning is kept, dropped or masked")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_loss_falls_on_answers_alone(name: str) -> None:
    of = tokenizer(name)
    require(of, encoder(of).encode(Row("r:1", {"messages": TALK})), WRITTEN[name])
    pair = Row("r:1", {"prompt": TALK[:4], "completion": "Three."})
    whole = WRITTEN[name]
    require(of, encoder(of).encode(pair), ["".join(whole[:3]), *whole[3:]])
    asked, ids = encoder(of).prompt(Row("r:1", {"prompt": TALK[:4]}))
    assert (
        "".join(whole).startswith(asked)
        and asked == "".join(whole[:3])
        and of(asked, add_special_tokens=False)["input_ids"] == ids
    )
    assert end_ids(of) >= {of(whole[1], add_special_tokens=False)["input_ids"][-1]}, (
        "generation stops where an answer ends"
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("qwen", im("system", QWEN)),
        ("alpaca", ALPACA),
        ("gemma", "<start_of_turn>user"),
        ("chatml", "<|im_start|>user"),
    ],
)
def test_without_words_of_the_system(name: str, start: str) -> None:
    of = tokenizer(name)
    assert of.decode(
        encoder(of).encode(Row("r:1", {"messages": TALK[1:]})).tokens.tolist()
    ).startswith(start)


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>Two.<|im_end|>'
# What a template shows of tools and of their results, and what of the calls is learned.
OF_TOOLS = {
    "chatml": (["<tools>\n" + json.dumps(TOOL), "<tool_response>\n2\n</tool_response>"], HERMES),
    "qwen": ([QWEN + "\n\n# Tools", "<tools>\n" + json.dumps(TOOL)], HERMES),
    "llama-3": (
        [json.dumps(TOOL, indent=4), "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"],
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>Two.<|eot_id|>',
    ),
    "mistral": (
        [
            "[AVAILABLE_TOOLS] " + json.dumps([TOOL]),
            '[TOOL_RESULTS] {"content": "2"}[/TOOL_RESULTS]',
        ],
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]<|im_end|> Two.<|im_end|>',
    ),
}


@pytest.mark.parametrize("name", OF_TOOLS)
def test_tools_are_shown_and_calls_learned(name: str) -> None:
    of, (shown, learned) = tokenizer(name), OF_TOOLS[name]
    example = encoder(of).encode(Row("r:1", {"messages": USES, "tools": [TOOL]}))
    text = of.decode(example.tokens.tolist())
    assert all(each in text for each in shown)
    assert of.decode(example.tokens[example.learn == 1].tolist()) == learned


@pytest.mark.parametrize("name", OF_TOOLS)
def test_what_is_said_beside_a_call_is_learned(name: str) -> None:
    of, talk = tokenizer(name), [USES[0], {**USES[1], "content": "I add."}, *USES[2:]]
    example = encoder(of).encode(Row("r:1", {"messages": talk}))
    learned = of.decode(example.tokens[example.learn == 1].tolist())
    assert (
        learned.lstrip().startswith("I add.")
        and learned.partition("I add.")[2].lstrip() == OF_TOOLS[name][1]
    )


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in OF_TOOLS])
def test_what_has_no_place_is_one_line(name: str) -> None:
    of = encoder(tokenizer(name))
    assert "this row has tools, and the chat template does not show any" in complaint(
        of, {"messages": USES, "tools": [TOOL]}
    )
    assert (
        f"the template {name} has no place for a function call — take such rows out"
        in complaint(of, {"messages": USES})
    )
    assert f"the template {name} has no place for the role 'tool'" in complaint(
        of, {"messages": [USES[0], USES[2], USES[3]]}
    )
    assert f"the template {name} has no place for the role 'critic'" in complaint(
        of, {"messages": [*TALK, {"role": "critic", "content": "x"}]}
    )


def test_a_turn_that_a_template_drops_silently_is_refused() -> None:
    drops = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    of = encoder(tokenizer(template=drops))
    assert "the chat template leaves out messages[0], of the role 'system'" in complaint(
        of, {"messages": TALK}
    )
    with pytest.raises(DataError, match="leaves out"):
        of.prompt(Row("r:1", {"prompt": TALK[:2]}))
    json_of_tools = CHATML.replace(
        "message['content'] +",
        "(message['content'] | tojson if message.role == 'tool' else message['content']) +",
    )
    quoted = [USES[0], {"role": "tool", "content": 'say "2"'}, USES[3]]
    assert (
        encoder(tokenizer(template=json_of_tools))
        .encode(Row("r:1", {"messages": quoted}))
        .target_count
    )


# ------------------------------------------------------------------------------------------------------------- reasoning

ASK = {"role": "user", "content": "two?"}
HEAD = im("user", "two?") + "<|im_start|>assistant\n"


@pytest.mark.claim("so with each named chat template, and reasoning is kept, dropped or masked")
@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>\nso so\n</think>\n\nTwo."},
        {"role": "assistant", "content": "Two.", "reasoning_content": "so so"},
        {"role": "assistant", "content": "Two.", "thinking": " so so\n"},
    ],
)
@pytest.mark.parametrize("name", ["chatml", None])  # by marks of the template, and by the text
def test_reasoning_is_kept_dropped_or_masked(name: str | None, answer: dict[str, Any]) -> None:
    of, row = tokenizer(name), Row("r:1", {"messages": [ASK, answer]})
    require(of, encoder(of).encode(row), [HEAD, "<think>\nso so\n</think>\n\nTwo.<|im_end|>", "\n"])
    require(of, encoder(of, reasoning="drop").encode(row), [HEAD, "Two.<|im_end|>", "\n"])
    require(
        of,
        encoder(of, reasoning="mask").encode(row),
        [HEAD + "<think>\nso so\n</think>\n\n", "Two.<|im_end|>", "\n"],
    )


def test_reasoning_of_several_turns_and_texts() -> None:
    of = tokenizer("chatml")
    twice = [
        ASK,
        {"role": "assistant", "content": "<think>a</think>One"},
        ASK,
        {"role": "assistant", "content": "b</think>Two"},
    ]
    pieces = [
        HEAD + "<think>a</think>",
        "One<|im_end|>",
        "\n" + HEAD + "b</think>",
        "Two<|im_end|>",
        "\n",
    ]
    require(of, encoder(of, reasoning="mask").encode(Row("r:1", {"messages": twice})), pieces)
    assert "think>" not in of.decode(
        encoder(of, reasoning="drop").encode(Row("r:1", {"messages": twice})).tokens.tolist()
    )
    everything = encoder(of, reasoning="mask", learn_on="all").encode(
        Row("r:1", {"messages": twice[:2]})
    )
    require(of, everything, ["", HEAD, "<think>a</think>", "One<|im_end|>\n"])
    plain = tokenizer(template=None)
    row = Row("r:1", {"prompt": "two?", "completion": "<think>so</think> Two."})
    require(
        plain,
        encoder(plain, reasoning="mask").encode(row),
        ["two?<think>so</think> ", "Two.<|im_end|>"],
    )
    require(plain, encoder(plain, reasoning="drop").encode(row), ["two?", "Two.<|im_end|>"])
    document = Row("r:1", {"text": "<think>so</think> Two."})
    assert encoder(plain, reasoning="mask").encode(document).learn.all(), "a document is no answer"


def test_reasoning_that_the_template_leaves_out_is_counted() -> None:
    """As Qwen3's, this template shows the reasoning of the last answer alone."""
    last_alone = CHATML.replace(
        "message['content'] +",
        "(message['content'] if loop.last else message['content'].split('</think>')[-1].lstrip()) +",
    )
    of = tokenizer(template=last_alone)
    answers = [
        {"role": "assistant", "content": f"<think>{why}</think>Yes."} for why in ("first", "second")
    ]
    rows = [{"messages": [ASK, answers[0], ASK, answers[1]]}, {"messages": [ASK, answers[1]]}]
    encoder_of_chunks = ChunkEncoder(
        "",
        ModelConfig(),
        make(AlgorithmSpec, "sft"),
        DataConfig(train=[FileSource(path="x")], max_length=512),
    )
    encoder_of_chunks.__dict__["tokenizer"] = of
    counts = encoder_of_chunks.encode(
        [Row(f"r:{number}", row) for number, row in enumerate(rows)]
    ).counts
    assert counts[0, "hides_reasoning"] == 1 and counts[0, "read"] == 2
    info = {"rows_read": 2, "limit": 512, "hides_reasoning": 1}
    (line,) = describe_left_out("train", info)
    assert line.endswith(
        "1 of 2 rows without the reasoning of some turns, which the chat template leaves out"
    )


def test_a_template_that_renders_reasoning_does_it_itself() -> None:
    own = CHATML.replace(
        "message['content'] +",
        "('(' + message.reasoning_content + ')' if message.reasoning_content else '') + message['content'] +",
    )
    of = tokenizer(template=own)
    row = Row(
        "r:1",
        {"messages": [ASK, {"role": "assistant", "content": "Two.", "reasoning_content": "so"}]},
    )
    assert "(so)Two." in of.decode(encoder(of).encode(row).tokens.tolist())
    assert "so" not in of.decode(encoder(of, reasoning="drop").encode(row).tokens.tolist())
    pieces = [HEAD, "(", "so", ")Two.<|im_end|>", "\n"]
    require(of, encoder(of, reasoning="mask").encode(row), pieces)


@pytest.mark.parametrize("reasoning", ["drop", "mask"])
def test_reasoning_without_an_end_is_refused(reasoning: str) -> None:
    row = {"messages": [ASK, {"role": "assistant", "content": "<think>so and so"}]}
    assert "does not end: no </think> — take the row out, or set data.reasoning: keep" in complaint(
        encoder(tokenizer("chatml"), reasoning=reasoning), row
    )


# ---------------------------------------------------------------------------------------------------------------- config


def test_a_template_whose_tokens_are_not_there() -> None:
    with pytest.raises(ModelError) as caught:
        set_template(tiny_tokenizer(), "llama-3")
    assert caught.value.line() == (
        "model.chat_template: the template llama-3 is written with <|start_header_id|> and <|end_header_id|> and <|eot_id|>, which this"
        " tokenizer lacks — take chatml or mistral or qwen or zephyr or alpaca, or a file of your own"
    )
    bare = tiny_tokenizer()
    bare.eos_token = None
    with pytest.raises(
        ModelError, match="ends answers by the end-of-sequence token, and this tokenizer has none"
    ):
        set_template(bare, "zephyr")


def test_a_name_or_a_file(tmp_path: Path) -> None:
    """Each is another cache; a file's tokens are looked for, too."""
    folder = tiny_model_dir(tmp_path / "tiny")
    path, keys = write_config(tmp_path, folder), set()
    (tmp_path / "mine.jinja").write_text("{#- special tokens: <|im_start|> #}\n" + CHATML)
    for name in (None, "chatml", "zephyr", "mine.jinja"):
        config = load(path, [] if name is None else [f"model.chat_template={name}"]).config
        assert (config.model.chat_template == name) is (name != "mine.jinja")
        keys.add(cache_key(config, config.data.train, "train", str(folder), tmp_path))
        assert bool(load_tokenizer(str(folder), config.model).chat_template)
    assert len(keys) == 4
    for wrong, says in (
        ("chatmll", "did you mean chatml? chatml, llama-3"),
        ("gone.jinja", "or the path of a Jinja file"),
    ):
        with pytest.raises(ConfigError, match=r"model\.chat_template: no such file: ") as caught:
            load_tokenizer(str(folder), load(path, [f"model.chat_template={wrong}"]).config.model)
        assert says in caught.value.line()
    (tmp_path / "mine.jinja").write_text("{#- special tokens: <|gone|> #}\n" + CHATML)
    with pytest.raises(ModelError, match=r"is written with <\|gone\|>, which this tokenizer lacks"):
        load_tokenizer(str(folder), load(path, ["model.chat_template=mine.jinja"]).config.model)


def test_every_name_is_a_file() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TEMPLATES)
    assert load_text("data: x.jsonl\nmodel: {chat_template: zephyr}", []).model == ModelConfig(
        chat_template="zephyr"
    )
