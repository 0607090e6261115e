"""Makes rows of reasoning-gym's tasks: questions with answers that a program can verify."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from drumline.config.data import (
    ANSWERED_PROMPT_FORMS,
    PAIR_FORMS,
    PROMPT_FORMS,
    Forms,
    TasksSource,
)
from drumline.data.files import Raw, json_round_trip
from drumline.errors import DataError, EnvironmentFault
from drumline.foreign import import_quietly

_ROWS_TRIED = 16  # other rows, whose answers are tried first
_EDITS_TRIED = 64  # changes of one letter or digit, which are tried next
_DIGITS = "0123456789"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


# Forms of rows whose completions the task's verifier may score.
VERIFIED_FORMS = (PROMPT_FORMS, ANSWERED_PROMPT_FORMS)


class TaskSet(NamedTuple):
    """A task of reasoning-gym: its name, its number of rows, and its dataset."""

    name: str
    rows: int
    dataset: Any


def read_tasks(source: TasksSource, forms: Forms) -> Iterator[Raw]:
    """Yield `source.size` rows, one of each task in turn.

    A row has the question as `prompt` and the task's name as `task`. Besides these it has the
    answer as `completion`; for pairs the answer as `chosen` and a wrong one as `rejected`; for
    prompts what the verifier needs: `answer`, `options` and `entry`.

    Raises DataError for a task that cannot be used, and EnvironmentFault without reasoning-gym.
    """
    sets = _open_tasks(source, forms)
    largest_size = max(task.rows for task in sets)
    for number in range(largest_size):
        for task in sets:
            if number >= task.rows:
                continue
            where = f"tasks/{task.name}:{number + 1}"
            yield where, _task_row(source, forms, task, number, where)


def _open_tasks(source: TasksSource, forms: Forms) -> list[TaskSet]:
    """Return the tasks of a source. Raises DataError and EnvironmentFault."""
    try:
        reasoning_gym = import_quietly("reasoning_gym")
    except ImportError as error:
        raise no_reasoning_gym() from error
    # The first `more` tasks have `least` + 1 rows, the others `least`.
    least, more = divmod(source.size, len(source.tasks))
    sets = []
    for index, (name, options) in enumerate(source.tasks.items()):
        rows = least
        if index < more:
            rows += 1
        where = f"tasks/{name}"
        if {"size", "seed"} & options.keys():
            raise DataError("size and seed are keys of the source, not of a task", where=where)
        size = max(rows, 1)
        try:
            dataset = reasoning_gym.create_dataset(name, size=size, seed=source.seed, **options)
        # Its configs refuse unknown tasks, unknown options and bad values by these errors.
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(
                f"reasoning-gym refuses this task: {error}",
                where=where,
                fix="see its gallery for names and options",
            ) from error
        if forms in VERIFIED_FORMS:
            _require_json_entries(dataset, where)
        sets.append(TaskSet(name, rows, dataset))
    return sets


def _require_json_entries(dataset: Any, where: str) -> None:
    """Raise DataError for a task whose verifier gives another score after a round trip by JSON."""
    item = dataset[0]
    answer = item["answer"]
    if not isinstance(answer, str):
        return
    score_of_json = dataset.score_answer(answer, json_round_trip(item))
    if score_of_json != dataset.score_answer(answer, item):
        raise DataError(
            "this task's verifier needs entries that JSON cannot hold",
            where=where,
            fix="leave it out",
        )


def _task_row(
    source: TasksSource, forms: Forms, task: TaskSet, number: int, where: str
) -> dict[str, Any]:
    """Return the columns of row `number` of a task, see `read_tasks`. Raises DataError."""
    item = task.dataset[number]
    answer = item["answer"]
    prompt = source.question.replace("{question}", item["question"])
    columns: dict[str, Any] = {"prompt": prompt, "task": task.name}
    if forms in VERIFIED_FORMS:
        columns["answer"] = answer
        columns["options"] = source.tasks[task.name]
        columns["entry"] = json_round_trip(item)
    if forms == PROMPT_FORMS:
        return columns
    if not isinstance(answer, str):
        raise DataError("this task has no written answer to learn", where=where, fix="leave it out")
    if forms == PAIR_FORMS:
        seed = f"{source.seed}/{task.name}"
        rejected = wrong_answer(task.dataset, number, task.rows, seed, where)
        columns["chosen"] = answer
        columns["rejected"] = rejected
    else:
        columns["completion"] = answer
    return columns


def no_reasoning_gym() -> EnvironmentFault:
    """Return the error for a missing reasoning-gym."""
    return EnvironmentFault(
        "reasoning-gym is not installed",
        where="data source of kind tasks",
        fix="pip install reasoning-gym",
    )


def wrong_answer(dataset: Any, number: int, rows: int, seed: str, where: str) -> str:
    """Return an answer that a task's verifier scores below the right one.

    It is the answer of another row; if those are right too, the right answer with a letter or digit
    changed.

    Args:
        dataset: a task of reasoning-gym.
        number: the row of the question.
        rows: how many rows of the task are read. Answers of other rows are not tried.
        seed: decides, with the row, which answers are tried.
        where: the row's name in an error.

    Raises DataError if no wrong answer is found.
    """
    item = dataset[number]
    right_answer = item["answer"]
    best = dataset.score_answer(right_answer, item)
    draw = random.Random(f"{seed}/{number}")
    for answer in _candidates(dataset, number, rows, right_answer, draw):
        text = answer.strip()
        is_other = text and text != right_answer.strip()
        if is_other and dataset.score_answer(answer, item) < best:
            return answer
    raise DataError(
        "found no wrong answer to this question to make a pair with",
        where=where,
        fix="leave this task out",
    )


def _candidates(
    dataset: Any, number: int, rows: int, right_answer: str, draw: random.Random
) -> Iterator[str]:
    """Yield answers of other rows, then variants of `right_answer` with one character changed."""
    for other in draw.sample(range(rows), min(rows, _ROWS_TRIED)):
        answer = dataset[other]["answer"]
        if other != number and isinstance(answer, str):
            yield answer
    for _ in range(_EDITS_TRIED):
        yield _change_one_character(right_answer, draw)


def _change_one_character(answer: str, draw: random.Random) -> str:
    """Return an answer with a letter or digit replaced by another of its kind.

    An answer without any gets a digit at its end.
    """
    indices = [index for index, character in enumerate(answer) if character.isalnum()]
    if not indices:
        return answer + draw.choice(_DIGITS)
    index = draw.choice(indices)
    old = answer[index]
    alphabet = _LETTERS
    if old.isdigit():
        alphabet = _DIGITS
    new = draw.choice([character for character in alphabet if character != old.lower()])
    if old.isupper():
        new = new.upper()
    return answer[:index] + new + answer[index + 1 :]
