"""The JSON schema accepts what `train` accepts: each short form that there is, by a JSON-schema validator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from drumline.config.config import Config
from drumline.config.load import load_text, schema
from drumline.config.mistakes import kind_of, kinds_at, models_at, null_means_default_at
from drumline.config.registry import Registered
from drumline.config.section import Short
from drumline.errors import ConfigError

DATA = {"train": [{"kind": "file", "path": "x.jsonl"}]}
VALIDATOR = jsonschema.Draft202012Validator(schema())


def short_places(
    model: type[BaseModel] = Config, place: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Where a section may be written short, found in the classes themselves. A list's item counts as `0`."""
    for name, field in model.model_fields.items():
        parts = [
            *field.metadata,
            *(
                extra
                for inner in get_args(field.annotation)
                for extra in getattr(inner, "__metadata__", ())
            ),
        ]
        here = (*place, name)
        if any(
            isinstance(part, Short)
            or (isinstance(part, Registered) and part.base.allows_kind_alone)
            for part in parts
        ):
            yield (
                (*here, "0")
                if get_args(field.annotation) and str(field.annotation).startswith("list")
                else here
            )
        for inside in models_at(here):
            if len(here) < 4 and inside is not model:
                yield from short_places(inside, here)


def at(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A config with a value at a place; the sections on the way are of a kind that has the next key."""
    made: Any = value
    for depth in range(len(place) - 1, -1, -1):
        key = place[depth]
        if key == "0":
            made = [made]
            continue
        made = {key: made}
        kinds = (
            [
                kind
                for model in models_at(place[:depth])
                for kind in _kind(model)
                if key in model.model_fields
            ]
            if depth
            else []
        )
        if kinds:
            made["kind"] = kinds[-1]
    return {"data": DATA, **made}


def _kind(model: type[BaseModel]) -> list[str]:
    field = model.model_fields.get("kind")
    return list(get_args(field.annotation))[:1] if field is not None else []


def accepted(values: dict[str, Any]) -> bool:
    try:
        TypeAdapter(Config).validate_python(values)
    except ValidationError:
        return False
    return True


MODELS = [("model",), ("algorithm", "value_model")]
PLACES = sorted(
    {
        place
        for place in short_places()
        if place[0] != "data" and not place[-1].endswith(("model", "new_tokens", "teacher"))
    }
)


def test_all_kinds_of_short_forms_are_found() -> None:
    dotted = {".".join(place) for place in PLACES}
    assert {
        "strategy",
        "algorithm",
        "adapter",
        "precision",
        "schedule",
        "cluster",
        "cluster.device",
    } <= dotted
    assert {
        "strategy.compression",
        "strategy.offload_optimizer",
        "strategy.offload_parameters",
        "algorithm.rewards.0",
    } <= dotted
    assert "algorithm.generator" in dotted


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_short_form_that_train_accepts_is_valid(place: tuple[str, ...]) -> None:
    words: list[Any] = kinds_at(place)
    if place[0] == "cluster":
        words = ["4x4090", "h100", 4090]
    if place[0] == "compile":
        words = ["auto", True, False]
    taken = [word for word in words if accepted(at(place, word))]
    assert taken
    for word in taken:
        VALIDATOR.validate(at(place, word))
    assert not VALIDATOR.is_valid(at(place, [])) and (
        place[0] == "cluster" or not VALIDATOR.is_valid(at(place, "nope"))
    )


@pytest.mark.parametrize("place", MODELS, ids=".".join)
def test_a_model_may_be_its_id(place: tuple[str, ...]) -> None:
    VALIDATOR.validate(at(place, "some/model"))
    assert not VALIDATOR.is_valid(at(place, 3))
    config: Any = TypeAdapter(Config).validate_python({"data": DATA, "model": "some/model"})
    assert config.model.id == "some/model"


def test_new_tokens_may_be_a_list_or_a_mapping() -> None:
    for short in (
        ["<a>", "<b>"],
        {"<a>": "some text", "<b>": ""},
        [{"token": "<a>", "text": "some text"}],
    ):
        assert accepted(at(("model", "new_tokens"), short))
        VALIDATOR.validate(at(("model", "new_tokens"), short))
    for wrong in ("<a>", [3], {"<a>": 3}, [{"text": "a text"}]):
        assert not accepted(at(("model", "new_tokens"), wrong))
        assert not VALIDATOR.is_valid(at(("model", "new_tokens"), wrong))


def test_a_source_may_be_any_text() -> None:
    fine = [
        "x.jsonl",
        ["x.jsonl", {"path": "y"}],
        {"train": "x"},
        {"train": {"path": "x"}, "eval": ["hub:y", {"id": "o/n"}]},
        DATA,
    ]
    sources, mixing = (
        {("data",), ("data", "train", "0"), ("data", "eval", "0")},
        {"duplicates", "decontaminate", "curriculum", "stream"},
    )
    assert {place for place in short_places() if place[0] == "data"} == sources | {
        ("data", key) for key in mixing
    }
    for data in fine:
        assert accepted({"data": data})
        VALIDATOR.validate({"data": data})
    for data in (3, {"train": 3}, {"train": [3]}, {"train": [[]]}, [3]):
        assert not accepted({"data": data}) and not VALIDATOR.is_valid({"data": data}), data


@pytest.mark.parametrize(
    ("key", "fine", "not_fine"),
    [
        ("duplicates", ["exact", "near", None], [True, "nope", 3]),
        ("decontaminate", [True, None], ["nope", 3]),
        ("curriculum", ["length", "score", None], [True, 3]),
        ("stream", [True, None], ["nope", 3]),
    ],
)
def test_short_forms_of_mixing(key: str, fine: list[Any], not_fine: list[Any]) -> None:
    def with_value(value: Any) -> dict[str, Any]:
        return {"data": {**DATA, "eval": DATA["train"], key: value}, "run": {"steps": 2}}

    for value in fine:
        assert accepted(with_value(value))
        VALIDATOR.validate(with_value(value))
    for value in not_fine:
        assert not accepted(with_value(value)), value
        assert not VALIDATOR.is_valid(with_value(value)), value


def test_evaluation_sets_by_name() -> None:
    (source,) = DATA["train"]
    by_name = {"data": {**DATA, "eval": {"easy": [source], "hard": [source, source]}}}
    VALIDATOR.validate(by_name)
    config = TypeAdapter(Config).validate_python(by_name)
    assert {name: len(sources) for name, sources in config.data.eval_sets.items()} == {
        "easy": 1,
        "hard": 2,
    }
    assert TypeAdapter(Config).validate_python(config.model_dump(mode="json")) == config
    short = TypeAdapter(Config).validate_python(
        {"data": {**DATA, "eval": {"easy": "x.jsonl", "hard": ["x.jsonl", source]}}}
    )
    assert short == config
    for wrong in (
        {"easy": 3},
        {"easy": []},
        {"tasks": [source]},
        {"reward": "x.jsonl"},
        {"a/b": [source]},
        {"": [source]},
        {1: [source]},
    ):
        assert not accepted({"data": {**DATA, "eval": wrong}}), wrong
    assert not accepted({"data": {**DATA, "train": [{**source, "set": "a"}]}})


def test_every_example_is_valid() -> None:
    for path in (Path(__file__).parents[2] / "examples").glob("*.yaml"):
        values = json.loads(json.dumps(yaml.safe_load(path.read_text())))
        # 1e-5 is text to PyYAML.
        wrong = [
            error.message
            for error in VALIDATOR.iter_errors(values)
            if not isinstance(error.instance, str)
        ]
        assert not wrong, (path.name, wrong)


# Keys with a default at which null is refused, apart from a `kind` that selects a section.
NULL_IS_REFUSED = {
    "algorithm.kl": "of PPO: null may mean no KL penalty, which is not the default",
    "algorithm.rewards": "null may mean no reward, which is not the default",
    "checkpoint.keep": "null may mean all checkpoints, and the default deletes some",
    "run.report_to": "null may mean no tracker, which is not the default",
}


def keys_with_default() -> dict[tuple[type[BaseModel], str], tuple[str, ...]]:
    """(section, key) → a place of the key, of all keys that have a default."""
    found: dict[tuple[type[BaseModel], str], tuple[str, ...]] = {}

    def walk(model: type[BaseModel], place: tuple[str, ...]) -> None:
        for name, field in model.model_fields.items():
            if (model, name) in found:
                continue
            if not field.is_required():
                found[model, name] = (*place, name)
            for inside in models_at((*place, name)):
                walk(inside, (*place, name))

    walk(Config, ())
    return found


def test_null_is_accepted_wherever_there_is_a_default() -> None:
    """Either the type has a null, or null means the default; other keys are listed, each with its reason."""
    sections = VALIDATOR.schema["$defs"]
    refused: set[str] = set()
    found = keys_with_default()
    assert len(found) > 400
    for (model, name), place in found.items():
        if name == "kind" and len(models_at(place[:-1])) > 1:  # it selects the section
            continue
        field = model.model_fields[name]
        accepts = type(None) in get_args(field.annotation) or null_means_default_at(
            place, kind_of(model)
        )
        if not accepts:
            refused.add(".".join(place))
        elif model is not Config:
            key = sections[model.__name__]["properties"][name]
            assert '{"type": "null"}' in json.dumps(key), place
    assert refused == NULL_IS_REFUSED.keys()


@pytest.mark.parametrize(
    "key",
    [
        "data.holdout",
        "data.max_length",
        "eval.mode",
        "eval.metric",
        "optimizer.betas",
        "model.kind",
        "precision.kind",
    ],
)
def test_null_is_the_default(key: str) -> None:
    assert load_text("data: x.jsonl", [f"{key}=null"]) == load_text("data: x.jsonl", [])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["adapter.kind=null"],
            "`kind` is null, and must be one of none, lora — choose one of them",
        ),
        (
            ["checkpoint.keep=null"],
            "null has no clear meaning here — set a number of checkpoints, or leave it out for 2",
        ),
        (
            ["algorithm=ppo", "algorithm.kl=null"],
            "null has no clear meaning here — {coefficient: 0} for none",
        ),
    ],
)
def test_where_null_is_refused_the_line_gives_the_choice(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("data: x.jsonl", overrides)
    assert line in caught.value.line()
