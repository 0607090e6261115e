"""Recipes: YAMLs to copy, for a model, a task and a machine, with what the planner predicts of each.

A recipe is a file `MODEL_TASK_MACHINE.yaml` in the folder `recipes` of the package. The comment at its
head has the predictions; `python -m scripts.recipes` writes them, and a test compares them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from drumline.config.load import load_text
from drumline.config.registry import nearest
from drumline.errors import EnvironmentFault, PlanError, UserError
from drumline.foreign import disk_errors
from drumline.models.shapes import hub_id
from drumline.planner.init import (
    FirstRows,
    check_new_file,
    missing_packages,
    read_first_rows,
    rows_to_hold_out,
    source_of,
)
from drumline.planner.question import Flags, build_request, find_model, load_with_flags
from drumline.planner.report.output import GB
from drumline.planner.search.answer import Candidate, number
from drumline.planner.search.search import search

FOLDER = Path(__file__).parents[1] / "recipes"
# Tokens of the run whose hours and price each recipe states.
TOKENS = 100e6
# A size in a model's name: of all parameters, and of those that a token meets.
SIZE = re.compile(r"-(\d+(?:\.\d+)?b(?:-a\d+b)?)(?=-|$)")
# Sizes of models whose names have none, as their cards say.
SIZES_ON_CARDS = {"phi-4": "14b"}
# The lines of a recipe that `write_copy` replaces.
MODEL_LINE = re.compile(r"^model: \{id: ([^,}\s]+)", re.MULTILINE)
DATA_LINE = re.compile(r"^  train: \S+", re.MULTILINE)
HOLDOUT_LINE = re.compile(r"^  holdout: (\d+)", re.MULTILINE)
# What is measured of a recipe stands below what is planned.
PLANNED = "# Planned by `drumline plan`; time and price are of 100 million tokens:"
MEASURED = "# Measured:"
# A line of what is planned: its name, and its text.
PLANNED_LINE = re.compile(r"^#   (memory|speed|time|price) +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A recipe of the package.

    `name`: of its file, without the ending. `model`: a short name such as qwen3-8b. `task`: the
    algorithm and how it trains, such as sft-lora. `machine`: devices and their memory, such as
    8x80gb, or 2x8x80gb for two hosts.
    """

    name: str
    model: str
    task: str
    machine: str

    @property
    def path(self) -> Path:
        """The file of the recipe."""
        return FOLDER / f"{self.name}.yaml"

    @property
    def family(self) -> str:
        """The model's name without its size: `qwen3` of qwen3-30b-a3b."""
        return SIZE.split(self.model)[0]

    @property
    def size(self) -> str:
        """The model's size, such as 8b, or 30b-a3b for a mixture of which a token meets 3 billion."""
        in_name = SIZE.search(self.model)
        if in_name is None:
            return SIZES_ON_CARDS[self.model]
        return in_name[1]

    def describe_prediction(self) -> dict[str, str]:
        """Return what the head of the file says: memory, speed, time and price as texts."""
        return dict(PLANNED_LINE.findall(self.path.read_text()))


def all_recipes() -> list[Recipe]:
    """Return all recipes of the package, those for small machines first."""
    recipes = []
    for path in FOLDER.glob("*.yaml"):
        model, task, machine = path.stem.split("_")
        recipes.append(Recipe(path.stem, model, task, machine))
    return sorted(recipes, key=_order)


def _order(recipe: Recipe) -> tuple[int, int, str]:
    """Return what recipes are sorted by: devices, memory of one, and name."""
    *counts, memory = recipe.machine.removesuffix("gb").split("x")
    devices = 1
    for count in counts:
        devices *= int(count)
    return devices, int(memory), recipe.name


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name. Raises UserError, with a similar name, if there is none."""
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    found = recipes.get(name.removesuffix(".yaml"))
    if found is None:
        guess = nearest(name, list(recipes))
        fix = "`drumline recipes` lists all"
        if guess:
            fix = f"did you mean {guess}? {fix}"
        raise UserError(f"no recipe {name!r}", where="--recipe", fix=fix)
    return found


def choose(
    family: str | None, size: str | None, task: str | None, machine: str | None
) -> list[Recipe]:
    """Return the recipes of a family, a size, a task and a machine; None takes all.

    Each may be the beginning of a name: `sft` takes sft-full and sft-lora, and `30b` takes 30b-a3b.
    A size may be written without its b. Raises UserError if there is no such family, size, task or
    machine, or no recipe of all of these.
    """
    if size is not None and size[-1:].isdigit():
        size = f"{size}b"
    wanted = {"family": family, "size": size, "task": task, "machine": machine}
    chosen = all_recipes()
    for field, value in wanted.items():
        if value is None:
            continue
        known = sorted({getattr(recipe, field) for recipe in all_recipes()}, key=_number_first)
        matching = [each for each in known if _begins_with(each, value.lower())]
        if not matching:
            raise UserError(
                f"no recipe has {field} {value!r}", where=f"--{field}", fix=", ".join(known)
            )
        chosen = [recipe for recipe in chosen if getattr(recipe, field) in matching]
    if not chosen:
        given = " ".join(f"--{field} {value}" for field, value in wanted.items() if value)
        fix = "leave one out, or `drumline init` plans for any model and machine"
        raise UserError("no recipe is of all of these", where=given, fix=fix)
    return chosen


def _number_first(name: str) -> tuple[float, str]:
    """Return what names are sorted by: the number that they begin with, if any, and the name."""
    number_in_name = re.match(r"\d+(?:\.\d+)?", name)
    if number_in_name is None:
        return 0.0, name
    return float(number_in_name[0]), name


def _begins_with(name: str, beginning: str) -> bool:
    """Return whether a name is this beginning, or goes on after it with a hyphen or a dot."""
    rest = name.removeprefix(beginning)
    return not rest or (rest != name and rest[0] in "-.")


def show_recipes(
    family: str | None, size: str | None, task: str | None, machine: str | None
) -> None:
    """Print the recipes of a family, a size, a task and a machine with what is planned of each."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("recipe", "GB a device", "tokens/s", "hours", "price"):
        justify: JustifyMethod = "left" if title == "recipe" else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="fold")
    for recipe in choose(family, size, task, machine):
        planned = recipe.describe_prediction()
        first_words = [planned[key].split()[0] for key in ("memory", "speed", "time", "price")]
        table.add_row(recipe.name, *first_words)
    console = Console(highlight=False)
    console.print(table)
    print("Hours and price are of 100 million tokens. Copy one:")
    print("  drumline init --recipe NAME --data rows.jsonl")


def predict(path: Path) -> list[str]:
    """Return what the planner predicts of the YAML at `path`, as lines of a recipe's head.

    Raises PlanError if it does not fit.
    """
    loaded = load_with_flags(path, [], Flags())
    question = build_request(loaded, lambda *_: None).question
    answer = search(question)
    if not answer.ranked:
        reasons = dict.fromkeys(refused.reason for refused in answer.refused)
        what = f"no plan fits: {'; '.join(reasons)}"
        raise PlanError(what, where=path.name, fix="change the recipe")
    return _describe(answer.ranked[0], question.cluster.price_per_device_hour)


def _describe(candidate: Candidate, price: float | None) -> list[str]:
    """Return the planned memory, speed, time and price as lines; `price`: of a device and hour."""
    estimate = candidate.estimate
    low, high = estimate.needs
    fastest, slowest = estimate.seconds_range
    speed = estimate.tokens_per_s
    hours = candidate.hours(TOKENS) or 0.0
    needed = f"{estimate.memory.reserved / GB:.1f} GB of {estimate.limit / GB:.1f} a device"
    lines = [
        PLANNED,
        f"#   memory  {needed} ({low / GB:.1f} to {high / GB:.1f}): {estimate.verdict}",
        f"#   speed   {speed:,.0f} tokens/s ({speed / slowest:,.0f} to {speed / fastest:,.0f})",
        f"#   time    {number(hours)} hours ({number(hours * fastest)} to {number(hours * slowest)})",
    ]
    if price is not None:
        cost = number(candidate.cost(price, TOKENS) or 0.0)
        lines.append(f"#   price   {cost} (a device costs {price} an hour)")
    return lines


def with_prediction(text: str, lines: list[str]) -> str:
    """Return the text of a recipe with these lines as what is planned of it."""
    before, _, rest = text.partition(PLANNED)
    _, _, after = rest.partition(MEASURED)
    return before + "\n".join(lines) + "\n" + MEASURED + after


def _with_model(text: str, model: str, path: Path) -> str:
    """Return the text of a recipe with another model, for which nothing is planned.

    `path`: of the copy.
    """
    before, _, rest = text.partition(PLANNED)
    _, _, after = rest.partition(MEASURED)
    text = f"{before}# Not planned for this model yet: drumline plan {path}\n{MEASURED}{after}"
    line = f"model: {{id: {json.dumps(hub_id(model))}"
    return MODEL_LINE.sub(lambda _: line, text, count=1)


def _with_data(text: str, data: str, path: Path) -> str:
    """Return the text of a recipe with the user's data; `path`: of the copy."""
    line = f"  train: {json.dumps(source_of(data, path))}"
    return DATA_LINE.sub(lambda _: line, text, count=1)


def _with_holdout(text: str, first_rows: FirstRows) -> str:
    """Return the text of a recipe that holds out no more rows than so many rows can spare."""
    spare = max(1, rows_to_hold_out(first_rows))

    def lower(line: re.Match[str]) -> str:
        return f"  holdout: {min(spare, int(line[1]))}"

    return HOLDOUT_LINE.sub(lower, text, count=1)


def write_copy(name: str, path: Path, data: str | None, model: str | None) -> int:
    """Write a copy of a recipe at `path`, and return the exit code of `drumline init --recipe`.

    `data`: a source in short, see SourceSpec.long; None: the recipe's `data.jsonl`.
    `model`: a name or a folder; None: the recipe's own model.

    Raises UserError for an unknown recipe, EnvironmentFault for a file that is there already, and
    DataError for rows that the recipe's algorithm does not take.
    """
    recipe = find_recipe(name)
    check_new_file(path)
    text = recipe.path.read_text()
    if model is not None:
        text = _with_model(text, model, path)
    if data is not None:
        text = _with_data(text, data, path)
    config = load_text(text, [], str(path))
    base = path.absolute().parent
    found = find_model(config.model, lambda *_: None)
    first_rows = read_first_rows(config, found, base, lambda *_: None)
    if first_rows is not None:
        text = _with_holdout(text, first_rows)
    with disk_errors("cannot be written", str(path), EnvironmentFault, "choose another place"):
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
    print(f"wrote {path}, a copy of {recipe.name}")
    if first_rows is None:
        print(f"data: {config.data.train[0].label} is not here yet; write it, or change data.train")
    else:
        print(f"data: {first_rows.describe()}")
    missing = missing_packages(config)
    if missing:
        print(f"to install: pip install {' '.join(missing)}")
    print(f"to plan:   drumline plan {path} --tokens {TOKENS:g}")
    print(f"to train:  drumline train {path}")
    return 0
