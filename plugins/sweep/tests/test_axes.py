"""The arguments `key=a,b,c`: values, ranges, points and names of folders."""

from __future__ import annotations

import math
import re

import pytest

from drumline_sweep.axes import axes_of, folder_name, points, short_names, split


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,3e-5", ["1e-5", "3e-5"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{kind: lora, r: 4}, none", ["{kind: lora, r: 4}", "none"]),
        ("\"a,b\",'c,d'", ['"a,b"', "'c,d'"]),
        ("it's,that's", ["it's", "that's"]),
        ("[a, {b: [1,2]}],x", ["[a, {b: [1,2]}]", "x"]),
        ("", [""]),
        (",", ["", ""]),
    ],
)
def test_commas_within_brackets_and_quotes_do_not_separate(
    text: str,
    values: list[str],
) -> None:
    assert split(text) == values


def test_a_grid_is_all_combinations() -> None:
    axes = axes_of(["optimizer.lr=1e-5,3e-5", "data.max_length=64,128,256"])
    assert len(list(points(axes, None, 0))) == 6
    drawn = list(points(axes, 100, 0))
    assert len(drawn) == 6, "there are no more"


def test_draws_are_the_first_of_more() -> None:
    axes = axes_of(
        [
            "optimizer.lr=log:1e-6..1e-3",
            "batch.micro_batch=1..4",
            "schedule=cosine,linear",
        ]
    )
    five = list(points(axes, 5, 7))
    three = list(points(axes, 3, 7))
    other_seed = list(points(axes, 5, 8))
    assert five[:3] == three
    assert len(set(five)) == 5
    assert five != other_seed


def test_draws_are_even_over_the_logarithm_and_over_whole_numbers() -> None:
    axes = axes_of(["optimizer.lr=log:1e-6..1e-3", "batch.micro_batch=1..4"])
    small = 0
    sizes = set()
    for drawn in points(axes, 400, 0):
        point = dict(drawn)
        sizes.add(point["batch.micro_batch"])
        rate = float(point["optimizer.lr"])
        assert 1e-6 <= rate <= 1e-3
        if math.log10(rate) < -4.5:
            small += 1
    assert 160 < small < 240, "half of them are below the middle of the logarithm"
    assert sizes == {"1", "2", "3", "4"}


@pytest.mark.parametrize(
    "ends",
    [
        "0.999..0.99999",
        "100000.5..100001.5",
        "-3e-7..2.5e-7",
        "log:0.999..0.99999",
        "0..0.12345678",
    ],
)
def test_draws_lie_in_the_range_and_differ(ends: str) -> None:
    low, high = map(float, ends.removeprefix("log:").split(".."))
    axes = axes_of([f"optimizer.beta2={ends}"])
    drawn = set()
    for point in points(axes, 200, 0):
        value = float(dict(point)["optimizer.beta2"])
        assert low <= value <= high
        drawn.add(value)
    assert len(drawn) == 200


def test_names_of_folders_are_names() -> None:
    axes = axes_of(
        [
            "optimizer.lr=1e-5,3e-5",
            "schedule={kind: cosine, warmup_steps: 1},../../etc",
            "model.id=a/b,ü,<script>",
        ]
    )
    short = short_names(axes)
    names = set()
    for point in points(axes, None, 0):
        name = folder_name(point, short)
        assert re.fullmatch(r"[\w.=+,-]{1,119}", name, re.ASCII)
        names.add(name)
    assert len(names) == 12
    assert folder_name((("run.seed", "1"),), {"run.seed": "seed"}) == "seed=1"
