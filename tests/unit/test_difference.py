"""What `verify` takes for a difference: not the steps that Adam makes of rounding, and everything else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drumline.bench import verify
from drumline.bench.verify import (
    TensorDifference,
    _compare_strategy,
    _distances,
    _largest_difference,
    _mask_of_rounding,
    _names_of_weights_and_moments,
    _portions,
)
from drumline.config.load import Loaded
from drumline.errors import CheckpointError, UserError


def run_of(key_share: float) -> list[TensorDifference]:
    """(name, distance, norm, sum): a matrix, and a bias with a share of the gradient, both 1% apart."""
    square = key_share**2
    return [
        TensorDifference("model.w", 1e-2, 1.0, 5.0),
        TensorDifference("model.k.bias", 1e-2, 1.0, 5.0),
        TensorDifference("optim.w.exp_avg_sq", 1e-9, 1e-3, 1.0),
        TensorDifference("optim.k.bias.exp_avg_sq", square, square, square),
        TensorDifference("optim.k.bias.step", 0.0, 4.0, 4.0),
    ]


def test_steps_of_rounding_are_not_felt() -> None:
    distances, noise = _distances(run_of(1e-8))
    assert noise == ("model.k.bias",)
    assert (
        distances["model.k.bias"] <= 1e-9
        and distances["optim.k.bias.exp_avg_sq"] <= 1e-9
        and distances["optim.k.bias.step"] == 0
    )
    assert distances["model.w"] == pytest.approx(1e-2), (
        "what has a gradient is compared by its own norm"
    )


def test_a_small_gradient_is_felt() -> None:
    distances, noise = _distances(run_of(1e-3))
    assert (
        not noise
        and distances["model.k.bias"] == pytest.approx(1e-2)
        and distances["optim.k.bias.exp_avg_sq"] == pytest.approx(1.0)
    )


def test_the_keys_part_of_one_bias_is_found_by_its_entries() -> None:
    assert _mask_of_rounding(torch.tensor([1.0, 1e-4, 1e-14, 0.0])).tolist() == [
        False,
        False,
        True,
        False,
    ], "0 is no gradient at all"


def test_a_weight_is_read_with_its_moments() -> None:
    shapes = {
        "model.a": [2**26],
        "model.b": [1],
        "optim.a.exp_avg_sq": [2**26],
        "optim.b.exp_avg_sq": [1],
    }
    assert list(_portions(shapes)) == [
        ["model.a", "optim.a.exp_avg_sq"],
        ["model.b", "optim.b.exp_avg_sq"],
    ]


def test_a_value_model_is_compared_too() -> None:
    names = {"model.w", "optim.w.exp_avg", "value/model.w", "value/optim.w.exp_avg"}
    assert _names_of_weights_and_moments({*names, "outer.model.w.momentum"}) == names


def test_what_is_not_finite_is_infinitely_apart() -> None:
    """On disk a NaN is null, and infinity a text."""
    nan = float("nan")
    tensors = [
        TensorDifference("model.b", nan, nan, nan),
        TensorDifference("model.a", 0.0, 1.0, 1.0),
    ]
    distances, _ = _distances(tensors)
    assert max(distances.values()) == float("inf")
    for value in (None, "inf", nan):
        assert _largest_difference({1: value}, {1: 2.0}, 1e-6) == float("inf")  # type: ignore[dict-item]
    assert _largest_difference({1: 2.0}, {1: 2.0}, 1e-6) == 0.0


def test_the_run_of_a_strategy_of_a_file_stays_in_the_folder_of_all_runs(tmp_path: Path) -> None:
    folders = []

    def read(overrides: list[str]) -> Loaded:
        run_dir = overrides[-1].removeprefix("run.dir=").strip("\"'")
        folders.append(Path(run_dir))
        raise UserError("this test needs no run")

    for name in ("/home/me/own.py:Mine", "../own.py:Mine tp=2"):
        _compare_strategy(read, [], name, "", 2, tmp_path, lambda *_: None)
    assert [folder.parent for folder in folders] == [tmp_path, tmp_path]


def test_a_checkpoint_that_lacks_a_tensor_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SimpleNamespace(mesh=SimpleNamespace(world_size=2))

    def fail(*_: Path) -> None:
        raise CheckpointError("one of the checkpoints lacks model.w")

    monkeypatch.setattr(verify, "_train", lambda *_: plan)
    monkeypatch.setattr(verify, "difference", fail)
    outcome = _compare_strategy(lambda _: None, [], "ddp", "", 2, tmp_path, lambda *_: None)  # type: ignore[arg-type,return-value]
    assert outcome.has_failed and not outcome.is_within(1.0)
    assert outcome.note == "failed: one of the checkpoints lacks model.w"
