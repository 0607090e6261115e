"""Rows of sources that need no files: the tasks of reasoning-gym, and scikit-learn's handwritten digits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from drumline.core.data import PAIR_FORMS, PROMPT_FORMS, DigitsSource, Forms, TasksSource
from drumline.core.files import whole_file
from drumline.data.files import Raw
from drumline.errors import DataError, EnvironmentFault
from drumline.hardware.detect import cache_dir

TEST_DIGITS = 360  # the last ones
_ROWS_TRIED = 16  # other rows, whose answers are tried first
_EDITS_TRIED = 64


def read_tasks(source: TasksSource, forms: Forms) -> Iterator[Raw]:
    """`size` rows of the tasks in turn: the question as `prompt` and the name as `task`, with the answer as `completion`; for pairs the
    answer as `chosen` and a wrong one as `rejected`; for prompts what the verifier needs: `answer`, `options` and `entry`."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise no_reasoning_gym() from error
    sets = []
    for index, (name, options) in enumerate(source.tasks.items()):
        share = source.size // len(source.tasks) + (index < source.size % len(source.tasks))
        where = f"tasks/{name}"
        if {"size", "seed"} & options.keys():
            raise DataError("size and seed are keys of the source, not of a task", where=where)
        try:
            sets.append((name, share, reasoning_gym.create_dataset(name, size=max(share, 1), seed=source.seed, **options)))
        except (ValueError, TypeError, AssertionError) as error:  # its configs refuse unknown tasks, unknown options and bad values
            fix = "see its gallery for names and options"
            raise DataError(f"reasoning-gym refuses this task: {error}", where=where, fix=fix) from error
        if forms is PROMPT_FORMS:
            dataset, item = sets[-1][2], sets[-1][2][0]
            own = item["answer"]
            if isinstance(own, str) and dataset.score_answer(own, as_json(item)) != dataset.score_answer(own, item):
                raise DataError("this task's verifier needs entries that JSON cannot hold", where=where, fix="leave it out")
    for number in range(max(share for _, share, _ in sets)):
        for name, share, dataset in sets:
            if number >= share:
                continue
            item = dataset[number]
            where = f"tasks/{name}:{number + 1}"
            columns: dict[str, Any] = {"prompt": source.question.replace("{question}", item["question"]), "task": name}
            if forms is PROMPT_FORMS:
                columns |= {"answer": item["answer"], "options": source.tasks[name], "entry": as_json(item)}
            elif not isinstance(item["answer"], str):
                raise DataError("this task has no written answer to learn", where=where, fix="leave it out")
            elif forms is PAIR_FORMS:
                rejected = wrong_answer(dataset, number, share, f"{source.seed}/{name}", where)
                columns |= {"chosen": item["answer"], "rejected": rejected}
            else:
                columns["completion"] = item["answer"]
            yield where, columns


def as_json(value: Any) -> Any:
    """`value` after a round trip through JSON; other types become text."""
    return json.loads(json.dumps(value, default=str))


def no_reasoning_gym() -> EnvironmentFault:
    return EnvironmentFault("reasoning-gym is not installed", where="data source of kind tasks", fix="pip install reasoning-gym")


def wrong_answer(dataset: Any, number: int, rows: int, seed: str, where: str) -> str:
    """An answer that the verifier of `dataset` scores below that of row `number`: of another of the first `rows` rows, or if those are
    right too, the right answer with a letter or digit changed. Depends on `seed` alone. Raises DataError if it finds none.
    """
    item = dataset[number]
    own = item["answer"]
    best = dataset.score_answer(own, item)
    draw = random.Random(f"{seed}/{number}")
    for answer in _candidates(dataset, number, rows, own, draw):
        if answer.strip() and answer.strip() != own.strip() and dataset.score_answer(answer, item) < best:
            return answer
    raise DataError("found no wrong answer to this question to make a pair with", where=where, fix="leave this task out")


def _candidates(dataset: Any, number: int, rows: int, own: str, draw: random.Random) -> Iterator[str]:
    """Answers of other rows, then `own` with one letter or digit replaced by another of its kind; without any, with a digit at its end."""
    for other in draw.sample(range(rows), min(rows, _ROWS_TRIED)):
        answer = dataset[other]["answer"]
        if other != number and isinstance(answer, str):
            yield answer
    places = [index for index, char in enumerate(own) if char.isalnum()]
    for _ in range(_EDITS_TRIED):
        if not places:
            yield own + draw.choice("0123456789")
            continue
        at = draw.choice(places)
        kind = "0123456789" if own[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
        new = draw.choice([other for other in kind if other != own[at].lower()])
        yield own[:at] + (new.upper() if own[at].isupper() else new) + own[at + 1 :]


def read_digits(source: DigitsSource) -> Iterator[Raw]:
    """Rows of a split: real images of 8 × 8 pixels that come with a package, written once to the cache folder as PNG files. Raises
    EnvironmentFault if scikit-learn or Pillow is missing, or the folder cannot be written."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentFault(f"{error}", where="data source of kind digits", fix="pip install pillow scikit-learn") from error
    digits = load_digits()
    count = len(digits.target)
    numbers = {"train": range(count - TEST_DIGITS), "test": range(count - TEST_DIGITS, count), "all": range(count)}[source.split]
    folder = cache_dir() / "digits"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            path = folder / f"{number:04}.png"
            if not path.exists():
                grey = (digits.images[number] * (255 / 16)).astype("uint8")
                with whole_file(path, shared=True) as file:
                    Image.fromarray(grey).save(file, format="png")
            yield f"digits/{source.split}:{number}", {"image": str(path), "label": int(digits.target[number])}
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error.strerror}", where=str(folder), fix="set XDG_CACHE_HOME") from error
