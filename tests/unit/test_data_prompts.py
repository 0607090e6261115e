"""Prompts of rollouts: rendered for an answer, cut or refused for their length, with all that a reward may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.algorithms.grpo.spec import GRPOConfig
from drumline.config.data import PROMPT_FORMS, DataConfig, FileSource, TasksSource
from drumline.config.rollouts import HFGenerator
from drumline.data.encode import OWN_COLUMNS, PromptRowEncoder
from drumline.data.sources import Row, domains, read_rows
from drumline.errors import ConfigError, DataError
from tests.harness import write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_tokenizer

SOURCE = {"kind": "file", "path": "x.jsonl"}


def encoder(chat_template: Any = "default", new: int = 8, **data: Any) -> PromptRowEncoder:
    tokenizer = (
        tiny_tokenizer()
        if chat_template == "default"
        else tiny_tokenizer(chat_template=chat_template)
    )
    algorithm = GRPOConfig(generator=HFGenerator(max_new_tokens=new))
    made = algorithm.encoder(tokenizer, DataConfig.model_validate({"train": [SOURCE], **data}))
    assert isinstance(made, PromptRowEncoder)
    return made


def row(prompt: Any, part: str = "prompt", **extra: Any) -> Row:
    return Row("x.jsonl:1", {part: prompt}, extra, domain="sums")


def test_a_prompt_ends_where_the_answer_starts() -> None:
    made = encoder().encode(row("two plus three", answer=5, level={"hard": False}))
    assert made is not None and made.meta == {
        "prompt": "<|im_start|>user\ntwo plus three<|im_end|>\n<|im_start|>assistant\n",
        "domain": "sums",
        "answer": 5,
        "level": {"hard": False},
    }
    (segment,) = made.segments
    assert (
        tiny_tokenizer().decode(segment.tokens) == made.meta["prompt"] and not segment.learn.any()
    )
    turns = [
        {"role": "user", "content": "two plus three"},
        {"role": "assistant", "content": "five"},
    ]
    again = encoder().encode(row(turns, "messages"))
    # An answer that is there is left out.
    assert again is not None and again.segments[0].tokens.tolist() == segment.tokens.tolist()
    plain = encoder(None).encode(row("two plus three"))
    assert (
        plain is not None and tiny_tokenizer().decode(plain.segments[0].tokens) == "two plus three"
    )
    with pytest.raises(DataError, match="no chat template"):
        encoder(None).encode(row(turns, "messages"))


def test_a_column_of_a_name_that_is_ours_is_not_lost() -> None:
    made = encoder().encode(row("two", "prompt", domain="maths", completion="2", level=1))
    assert made is not None and made.meta is not None
    assert (made.meta["domain"], made.meta["completion"], made.meta["level"]) == ("sums", "2", 1)
    assert made.meta[OWN_COLUMNS] == {"domain": "maths"}
    padded = encoder().encode(row("two", domain=None))
    assert padded is not None and OWN_COLUMNS not in (padded.meta or {})


@pytest.mark.parametrize("policy", ["error", "right"])
def test_a_long_prompt_is_one_clear_line(policy: str) -> None:
    with pytest.raises(DataError, match="less max_new_tokens 8 leaves 16") as raised:
        encoder(max_length=24, truncation=policy).encode(row("drum " * 30))
    assert "drop or left" in str(raised.value) and "x.jsonl:1" in str(raised.value)
    assert encoder(max_length=24, truncation="drop").encode(row("drum " * 30)) is None
    cut = encoder(max_length=24, truncation="left").encode(row("drum " * 30))
    assert cut is not None and cut.truncated and len(cut.segments[0].tokens) == 16
    assert tiny_tokenizer().decode(cut.segments[0].tokens).endswith("<|im_start|>assistant\n")


def test_what_verifiers_ask_for_comes_along() -> None:
    pytest.importorskip("reasoning_gym")
    source = TasksSource(
        kind="tasks",
        tasks={"chain_sum": {"max_terms": 2}, "spell_backward": {}},
        size=4,
        question="{question} Now.",
    )
    rows = list(read_rows(source, Path(), PROMPT_FORMS))
    assert [r.domain for r in rows] == ["chain_sum", "spell_backward"] * 2
    extra = rows[0].extra
    assert (
        extra["task"] == "chain_sum"
        and extra["options"] == {"max_terms": 2}
        and extra["answer"] == extra["entry"]["answer"]
    )
    assert rows[0].values["prompt"] == extra["entry"]["question"] + " Now."
    text = next(read_rows(source, Path()))
    assert text.values["completion"] == extra["answer"] and "entry" not in text.extra
    with pytest.raises(DataError, match="JSON cannot hold"):
        next(
            read_rows(
                TasksSource(kind="tasks", tasks={"arc_agi": {}}, size=2), Path(), PROMPT_FORMS
            )
        )


def test_domains_are_named_by_source_or_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", [{"prompt": "one"}])
    named, unnamed = (
        FileSource(kind="file", path="sums.jsonl", domain=domain) for domain in ("maths", None)
    )
    assert [
        next(read_rows(source, tmp_path, PROMPT_FORMS)).domain for source in (named, unnamed)
    ] == ["maths", "sums"]


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


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    from drumline.config.load import load
    from drumline.errors import PlanError
    from drumline.train.setup import Request, make_plan

    model = tiny_model_dir(tmp_path / "model")
    grpo = {
        "kind": "grpo",
        "generator": {"kind": "hf", "max_new_tokens": 8},
        "rewards": [{"kind": "regex", "pattern": "a"}],
    }
    config = write_config(tmp_path, model, algorithm=grpo)
    with pytest.raises(ConfigError, match="only episode of a prompt is its group's mean"):
        load(config, ["algorithm.group_size=1"])
    with pytest.raises(ConfigError, match="needs prompts of reasoning-gym tasks"):
        make_plan(Request(load(config, ["algorithm.rewards=[task]"])), on_progress=lambda *_: None)
    for more, said in (
        (["algorithm.group_size=3"], "does not divide into groups of 3"),
        (["algorithm.group_size=2", "algorithm.epochs=3"], "4 steps end within a rollout"),
    ):
        with pytest.raises(PlanError, match=said):
            make_plan(Request(load(config, more)), on_progress=lambda *_: None)
    plan = make_plan(
        Request(load(config, ["algorithm.group_size=2", "run.steps=null", "run.epochs=2"])),
        on_progress=lambda *_: None,
    )
    assert plan.steps == 40 and (plan.config.eval.metric, plan.config.eval.mode) == (
        "reward",
        "max",
    )


@pytest.mark.slow
def test_a_column_that_no_function_can_get_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from drumline.config.load import load
    from drumline.train.setup import Request, make_plan

    (tmp_path / "mine.py").write_text("def score(prompt, completion, **columns):\n    return 1.0\n")
    grpo = {"kind": "grpo", "group_size": 2, "generator": {"kind": "hf", "max_new_tokens": 8}}
    rewards = {"function": {"path": "mine.py:score"}, "regex": {"pattern": "a"}}
    algorithms = {
        kind: grpo | {"rewards": [{"kind": kind, **reward}]} for kind, reward in rewards.items()
    }
    model = tiny_model_dir(tmp_path / "model")
    for kind, algorithm in algorithms.items():
        config = write_config(tmp_path, model, algorithm=algorithm)
        for name in ("train.jsonl", "eval.jsonl"):
            write_rows(
                tmp_path / name,
                [{"prompt": f"{number}?", "completion": "yes"} for number in range(40)],
            )
        make_plan(Request(load(config, [])), on_progress=lambda *_: None)
        assert (
            "column `completion` is not given to reward functions" in capsys.readouterr().err
        ) == (kind == "function")
