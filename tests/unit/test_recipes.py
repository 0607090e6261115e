"""Recipes: each is planned as it stands, its head says what the planner predicts, and a copy is a run of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.config.data import FileSource
from drumline.config.load import load
from drumline.models.shapes import find
from drumline.planner.question import find_model
from drumline.planner.recipes import all_recipes, predict, with_prediction
from drumline.planner.sizes import sizes_of
from tests.unit.conftest import Run

RECIPES = {recipe.name: recipe for recipe in all_recipes()}
TASKS = {"sft-full", "sft-lora", "sft-qlora", "dpo-full", "dpo-lora", "grpo-full", "grpo-lora"}
TASKS |= {"embed-full"}
SFT = "qwen3-8b_sft-qlora_1x24gb"


def test_there_are_thirty_or_more_for_all_tasks_and_machines() -> None:
    assert len(RECIPES) >= 30
    assert {recipe.task for recipe in RECIPES.values()} >= TASKS
    machines = {recipe.machine for recipe in RECIPES.values()}
    assert machines == {"1x24gb", "1x80gb", "8x80gb", "2x8x80gb"}
    assert {recipe.family for recipe in RECIPES.values()} >= {"qwen3", "qwen3-vl", "llama-3.1"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_is_what_the_planner_predicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = RECIPES[name].path
    lines = predict(path)
    assert with_prediction(path.read_text(), lines) == path.read_text(), (
        "python -m scripts.recipes plans anew"
    )
    assert lines[1].endswith(": fits")


@pytest.mark.parametrize("name", RECIPES)
def test_the_name_of_a_recipe_says_what_is_in_it(name: str) -> None:
    recipe = RECIPES[name]
    config = load(recipe.path, []).config
    algorithm, _, weights = recipe.task.partition("-")
    assert config.algorithm.kind == algorithm
    assert config.adapter.kind == ("none" if weights == "full" else "lora")
    assert (getattr(config.adapter, "quantize", None) == "4bit") == (weights == "qlora")
    assert config.model.id is not None and find(config.model.id) is not None
    assert recipe.model.split("-")[0] in config.model.id.lower()
    assert config.cluster is not None
    devices = f"{config.cluster.per_node}x"
    if config.cluster.nodes > 1:
        devices = f"{config.cluster.nodes}x{devices}"
    assert recipe.machine.startswith(devices)
    assert f"--recipe {name} " in recipe.path.read_text()


def test_one_card_trains_adapters_of_experts() -> None:
    """`targets: all-linear` includes the experts, which are most of a mixture."""
    config = load(RECIPES["qwen3-30b-a3b_sft-qlora_1x80gb"].path, []).config
    assert config.cluster is not None
    assert config.cluster.per_node == 1
    found = find_model(config.model, lambda *_: None)
    sizes = sizes_of(found, config.data.max_length, config.head, adapter=config.adapter)
    factors = 0
    for weight in sizes.block_weights[0]:
        if ".experts." in weight.name and weight.trainable:
            factors += weight.numel
    # Of each expert: r numbers for each input and output of gate and up together, and of down.
    hidden, inner, r = 2048, 768, 16
    assert factors == 128 * r * ((hidden + 2 * inner) + (inner + hidden))


def test_a_copy_has_the_users_data_and_model(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "my rows, #1.jsonl"
    rows.write_text(json.dumps({"question": "Two pears?", "answer": "pear | 2"}) + "\n")
    path = tmp_path / "mine.yaml"
    code, out, _ = run("init", path, "--recipe", SFT, "--data", rows)
    assert code == 0 and f"drumline train {path}" in out and "1 rows" in out
    copied, own = load(path, []).config, load(RECIPES[SFT].path, []).config
    (source,) = copied.data.train
    assert isinstance(source, FileSource) and source.path == str(rows)
    assert (copied.data.holdout, own.data.holdout) == (1, 200), "fewer where there are few rows"
    same = copied.model_copy(update={"data": own.data, "run": own.run})
    assert same == own
    assert "#   memory" in path.read_text()
    code, _, err = run("init", path, "--recipe", SFT)
    assert code == 2 and "not overwritten" in err


def test_a_copy_for_another_model_claims_no_plan(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    code, out, _ = run("init", path, "--recipe", SFT, "--model", "Qwen/Qwen3-4B")
    assert code == 0 and "not here yet" in out
    text = path.read_text()
    assert load(path, []).config.model.id == "Qwen/Qwen3-4B"
    assert "#   memory" not in text and f"drumline plan {path}" in text and "# Measured:" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "qwen3-8b_sft-qlora_1x24g"], f"did you mean {SFT}?"),
        (["--recipe", SFT, "--length", "96"], "--length: a recipe has its own"),
    ],
)
def test_what_is_no_recipe_is_refused(
    words: list[str], said: str, run: Run, tmp_path: Path
) -> None:
    code, _, err = run("init", tmp_path / "mine.yaml", *words)
    assert code == 2 and said in err
    assert not (tmp_path / "mine.yaml").exists()


def test_rows_that_the_task_does_not_take_are_refused(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Two pears?", "answer": "pear | 2"}) + "\n")
    recipe = "qwen3-4b_dpo-lora_1x24gb"
    code, _, err = run("init", tmp_path / "mine.yaml", "--recipe", recipe, "--data", rows)
    assert code == 2 and "rows.jsonl:1" in err
    assert not (tmp_path / "mine.yaml").exists()


def test_recipes_are_listed_by_family_task_and_machine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run("recipes", "--family", "qwen3", "--task", "sft", "--machine", "1x24gb")
    assert code == 0
    listed = [word for word in out.split() if word in RECIPES]
    assert SFT in listed
    for name in listed:
        recipe = RECIPES[name]
        assert recipe.family in ("qwen3", "qwen3-vl") and recipe.task.startswith("sft-")
        assert recipe.machine == "1x24gb"
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("recipes")
    for name in RECIPES:
        (line,) = [line for line in out.splitlines() if name in line]
        numbers = [float(word.replace(",", "_")) for word in line.split()[1:]]
        assert len(numbers) == 4 and min(numbers) > 0, line


@pytest.mark.parametrize(
    ("size", "models"),
    [
        ("8b", {"qwen3-8b", "llama-3.1-8b", "qwen3-vl-8b"}),
        ("30B", {"qwen3-30b-a3b"}),
        ("30b-a3b", {"qwen3-30b-a3b"}),
        ("14", {"qwen3-14b", "phi-4"}),
    ],
)
def test_recipes_are_listed_by_size(size: str, models: set[str], run: Run) -> None:
    code, out, _ = run("recipes", "--size", size)
    assert code == 0
    listed = [word for word in out.split() if word in RECIPES]
    assert {RECIPES[name].model for name in listed} == models
    code, out, _ = run("recipes", "--size", size, "--task", "sft")
    assert code == 0
    assert all(RECIPES[word].task.startswith("sft-") for word in out.split() if word in RECIPES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--family", "bert"], "no recipe has family 'bert'"),
        (["--size", "9b"], "no recipe has size '9b'"),
        (["--size", "70b", "--machine", "1x24gb"], "no recipe is of all of these"),
        (["--machine", "1x24gb", "--task", "dpo-full"], "no recipe is of all of these"),
    ],
)
def test_a_list_of_nothing_says_so(words: list[str], said: str, run: Run) -> None:
    code, _, err = run("recipes", *words)
    assert code == 2 and said in err
