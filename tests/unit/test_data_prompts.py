"""Prompts of rollouts: rendered for an answer, cut or refused for their length, with all that a
reward may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.algorithms.gkd.spec import GKDConfig
from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.config.data import PROMPT_FORMS, DataConfig, FileSource, TasksSource
from drumline.config.load import load
from drumline.config.rollouts import HFGenerator
from drumline.data.encode import OWN_COLUMNS, PromptRowEncoder
from drumline.data.sources import Row, domains, read_rows
from drumline.errors import ConfigError, DataError, PlanError
from tests.harness import write_config, write_rows
from tests.plans import resolve_plan
from tests.tiny import CHATML, tiny_tokenizer

HALF_SAMPLED = {"kind": "gkd", "teacher": {"id": "x"}, "on_policy_share": 0.5}
SOURCE = {"kind": "file", "path": "x.jsonl"}
PROMPT = "<|im_start|>user\ntwo plus three<|im_end|>\n<|im_start|>assistant\n"


def encoder(chat_template: str | None = CHATML, **data: Any) -> PromptRowEncoder:
    tokenizer = tiny_tokenizer(chat_template=chat_template)
    algorithm = GRPOConfig(generator=HFGenerator(max_new_tokens=8))
    made = algorithm.encoder(tokenizer, DataConfig.model_validate({"train": [SOURCE], **data}))

    assert isinstance(made, PromptRowEncoder)

    return made


def encode(row: Row, **options: Any) -> Any:
    """Return the sample of a row, which is not left out."""
    made = encoder(**options).encode(row)

    assert made is not None

    return made


def row(prompt: Any, part: str = "prompt", **extra: Any) -> Row:
    return Row("x.jsonl:1", {part: prompt}, extra, domain="sums")


def text_of(segment: Any) -> str:
    return str(tiny_tokenizer().decode(segment.tokens))


def test_a_prompt_ends_where_the_answer_starts() -> None:
    """An answer that is there is left out."""
    made = encode(row("two plus three", answer=5, level={"hard": False}))

    assert made.meta == {
        "prompt": PROMPT,
        "domain": "sums",
        "answer": 5,
        "level": {"hard": False},
    }

    (segment,) = made.segments

    assert text_of(segment) == PROMPT
    assert not segment.learn.any()

    turns = [
        {"role": "user", "content": "two plus three"},
        {"role": "assistant", "content": "five"},
    ]
    answered = row(turns, "messages")
    again = encode(answered).segments[0]

    assert again.tokens.tolist() == segment.tokens.tolist()

    plain = encode(row("two plus three"), chat_template=None)

    assert text_of(plain.segments[0]) == "two plus three"

    with pytest.raises(DataError, match="no chat template"):
        encode(answered, chat_template=None)


def test_a_column_of_a_name_that_is_ours_is_not_lost() -> None:
    meta = encode(row("two", domain="maths", completion="2", level=1)).meta

    assert meta["domain"] == "sums"
    assert meta["completion"] == "2"
    assert meta["level"] == 1
    assert meta[OWN_COLUMNS] == {"domain": "maths"}

    padded = encode(row("two", domain=None))

    assert OWN_COLUMNS not in (padded.meta or {})


@pytest.mark.parametrize("policy", ["error", "right"])
def test_a_long_prompt_is_one_clear_line(policy: str) -> None:
    long = row("drum " * 30)
    with pytest.raises(DataError, match="less max_new_tokens 8 leaves 16") as raised:
        encode(long, max_length=24, truncation=policy)

    assert "drop or left" in str(raised.value)
    assert "x.jsonl:1" in str(raised.value)
    assert encoder(max_length=24, truncation="drop").encode(long) is None

    cut = encode(long, max_length=24, truncation="left")
    (segment,) = cut.segments

    assert cut.truncated
    assert len(segment.tokens) == 16
    assert text_of(segment).endswith("<|im_start|>assistant\n")


def test_what_verifiers_ask_for_comes_along() -> None:
    pytest.importorskip("reasoning_gym")
    source = TasksSource(
        kind="tasks",
        tasks={"chain_sum": {"max_terms": 2}, "spell_backward": {}},
        size=4,
        question="{question} Now.",
    )
    rows = list(read_rows(source, Path(), PROMPT_FORMS))

    assert [row.domain for row in rows] == ["chain_sum", "spell_backward"] * 2

    extra = rows[0].extra

    assert extra["task"] == "chain_sum"
    assert extra["options"] == {"max_terms": 2}
    assert extra["answer"] == extra["entry"]["answer"]
    assert rows[0].values["prompt"] == extra["entry"]["question"] + " Now."

    text = next(read_rows(source, Path()))

    assert text.values["completion"] == extra["answer"]
    assert "entry" not in text.extra

    # On-policy distillation learns some completions of rows, and scores those that it samples.
    both = next(read_rows(source, Path(), GKDConfig.model_validate(HALF_SAMPLED).forms))

    assert both.values["completion"] == extra["answer"]
    assert both.extra["entry"] == extra["entry"]

    grids = TasksSource(kind="tasks", tasks={"arc_agi": {}}, size=2)
    with pytest.raises(DataError, match="JSON cannot hold"):
        next(read_rows(grids, Path(), PROMPT_FORMS))


def test_domains_are_named_by_source_or_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", [{"prompt": "one"}])
    for given, name in (("maths", "maths"), (None, "sums")):
        source = FileSource(kind="file", path="sums.jsonl", domain=given)
        (found,) = read_rows(source, tmp_path, PROMPT_FORMS)
        assert found.domain == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("math/*.jsonl", "math"),
        ("math/train-*.jsonl", "train"),
        ("*.jsonl", "*"),
        ("a.b.jsonl", "a.b"),
    ],
)
def test_a_domain_has_a_name_where_its_files_have_a_pattern(path: str, name: str) -> None:
    assert domains(FileSource(kind="file", path=path)) == {name}


GRPO = {"kind": "grpo", "generator": {"kind": "hf", "max_new_tokens": 8}}


def test_mistakes_are_one_line(tmp_path: Path, model: Path) -> None:
    algorithm = {**GRPO, "rewards": [{"kind": "regex", "pattern": "a"}]}
    config = write_config(tmp_path, model, algorithm=algorithm)
    with pytest.raises(ConfigError, match="only episode of a prompt is its group's mean"):
        load(config, ["algorithm.group_size=1"])

    with pytest.raises(ConfigError, match="needs prompts of reasoning-gym tasks"):
        resolve_plan(config, "algorithm.rewards=[task]")

    with pytest.raises(PlanError, match="does not divide into groups of 3"):
        resolve_plan(config, "algorithm.group_size=3")

    with pytest.raises(PlanError, match="4 steps end within a rollout"):
        resolve_plan(config, "algorithm.group_size=2", "algorithm.epochs=3")

    plan = resolve_plan(config, "algorithm.group_size=2", "run.steps=null", "run.epochs=2")

    assert plan.steps == 40
    assert plan.config.eval.metric == "reward"
    assert plan.config.eval.mode == "max"


REWARDS = {
    "function": {"kind": "function", "path": "mine.py:score"},
    "regex": {"kind": "regex", "pattern": "a"},
}


@pytest.mark.slow
def test_a_column_that_no_function_can_get_is_noted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, **columns):\n    return 1.0\n")
    rows = [{"prompt": f"{number}?", "completion": "yes"} for number in range(40)]
    for kind, reward in REWARDS.items():
        algorithm = {**GRPO, "group_size": 2, "rewards": [reward]}
        config = write_config(tmp_path, model, algorithm=algorithm)
        write_rows(tmp_path / "train.jsonl", rows)
        write_rows(tmp_path / "eval.jsonl", rows)
        resolve_plan(config)
        noted = "column `completion` is not given to reward functions" in capsys.readouterr().err

        assert noted == (kind == "function")
