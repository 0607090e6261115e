"""`drumline.session` in one process: data, evaluation, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline
from drumline.data.samples import evaluation_batches, global_batches
from drumline.dist import reduce
from drumline.dist.reduce import PendingSums, SumReducer
from drumline.errors import (
    CheckpointError,
    DataError,
    EnvironmentFault,
    ModelError,
    PlanError,
    TrainingStopped,
    UserError,
)
from drumline.plan.plan import BatchPlan
from tests.harness import events


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Streamed(torch.utils.data.IterableDataset[int]):
    """It has a length, and inherits a `__getitem__` that raises."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


BATCH = BatchPlan(global_samples=4, micro_batch=1, accumulation=2, eval_micro_batch=1)


def pass_over(
    dataset: Any, position: int = 0, stop: int | None = 1, seed: int | None = None
) -> list[list[int]]:
    """Return all samples of each global batch, of both ranks; a function is called for each rank's
    dataset."""
    ranks = []

    for rank in range(2):
        samples = dataset() if callable(dataset) else dataset
        ranks.append(list(global_batches(samples, BATCH, rank, position, stop, seed)))

    return [sorted(chain(*mine, *others)) for mine, others in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    "dataset", [list(range(10)), Endless(), Streamed()], ids=["map", "iterable", "torch's iterable"]
)
def test_the_last_batch_is_filled_from_the_next_pass_and_a_position_is_enough(dataset: Any) -> None:
    assert pass_over(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert pass_over(dataset, position=4) == [[4, 5, 6, 7], [0, 1, 8, 9]]
    assert pass_over(dataset, position=12) == []
    assert len(pass_over(dataset, stop=2)) == 5


def test_a_shuffled_pass_has_each_sample_once() -> None:
    samples = list(range(12))
    first = pass_over(samples, seed=1)

    assert sorted(chain(*first)) == samples
    assert first != pass_over(samples, seed=2)
    assert first[1:] == pass_over(samples, position=4, seed=1)


def test_a_dataset_that_can_be_read_once_says_so() -> None:
    for stop in (None, 2):
        with pytest.raises(DataError, match="gives nothing in pass 2"):
            list(global_batches(iter(range(10)), BATCH, 0, 0, stop, None))

    with pytest.raises(DataError, match="no samples"):
        list(global_batches([], BATCH, 0, 0, 1, None))


def test_what_can_be_read_once_is_one_pass() -> None:
    """The last case has fewer samples than a global batch."""

    def pass_over_iterator(length: int, position: int = 0) -> list[list[int]]:
        return pass_over(lambda: iter(range(length)), position)

    assert pass_over_iterator(10) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert pass_over_iterator(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pass_over_iterator(10, position=8) == [[0, 1, 8, 9]]
    assert pass_over_iterator(10, position=12) == []
    assert pass_over_iterator(1) == [[0, 0, 0, 0]]


def test_held_out_samples_count_once_and_ranks_do_the_same_work() -> None:
    first, second = (list(evaluation_batches(Endless(), 3, rank, 2)) for rank in range(2))

    assert len(first) == len(second)

    counted = [samples for samples, counts in first + second if counts]

    assert sorted(chain(*counted)) == list(range(10))


def build() -> nn.Module:
    return nn.Linear(2, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


ROWS = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i % 3)])) for i in range(8)]


def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def session(folder: Path, strategy: Any = "single", **options: Any) -> Any:
    options = {"global_samples": 4, **options}
    return drumline.session(strategy, "fp32", run_dir=folder / "run", device="cpu", **options)


def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(), len(inputs)


def train(s: Any, model: Any, **options: Any) -> None:
    """Train a session's model on ROWS."""
    for batch in s.batches(ROWS, collate, **options):
        s.backward(*loss_of(model, batch))
        s.step()


@contextmanager
def prepared_session(folder: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a session and its model, which is linear and learns by SGD."""
    with session(folder, **options) as s:
        model, _ = s.prepare(build, sgd)
        yield s, model


def stepped(s: Any) -> Any:
    """The model of a session that has done one step with it."""
    model, _ = s.prepare(build, sgd)
    train(s, model, steps=1)
    return model


@pytest.mark.slow
def test_the_last_step_is_read_as_numbers(tmp_path: Path) -> None:
    with prepared_session(tmp_path) as (s, model):
        with pytest.raises(UserError, match="no step was done yet"):
            s.loss  # noqa: B018

        train(s, model, steps=1)

        assert s.losses == {"": s.loss}
        assert s.grad_norms == {"": s.grad_norm}
        assert s.loss > 0
        assert s.grad_norm > 0

    with session(tmp_path / "two") as s:
        s.prepare({"first": (build, sgd), "second": (build, sgd)})
        message = r"several models — read s\.grad_norms\[NAME\], of 'first', 'second'"

        with pytest.raises(UserError, match=message):
            s.grad_norm  # noqa: B018


def test_one_denominator(tmp_path: Path) -> None:
    """Weights that differ by micro-batch: the step is that of Σ loss / Σ weight."""
    with prepared_session(tmp_path, micro_batch=2) as (s, model):
        expected = build()
        expected.load_state_dict(model.module.state_dict())
        batches = s.batches(ROWS, collate, steps=1, shuffle=False)
        losses = []

        for batch, weight in zip(batches, (torch.tensor(3.0), 0.5), strict=True):
            loss, _ = loss_of(model, batch)
            s.backward(loss, weight)
            losses.append(loss_of(expected, batch)[0])

            assert s.step() == (len(losses) == 2)

        assert (s.steps, s.position) == (1, 4)

    loss = (losses[0] + losses[1]) / 3.5

    assert s.losses[""] == pytest.approx(float(loss))

    loss.backward()
    sgd(expected).step()

    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(parameter, other, rtol=1e-6)


def test_evaluate_is_a_mean_over_all_and_chooses_the_best(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model = stepped(s)

        def measure(batch: Any) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
            loss, samples = loss_of(model, batch)
            return loss, samples, {"ones": torch.tensor(float(samples))}

        found = s.evaluate(ROWS[:7], collate, measure)

        with torch.no_grad():
            total, samples = loss_of(model.module, collate(ROWS[:7]))

        assert found["loss"] == pytest.approx(float(total) / samples)
        assert found["ones"] == 1.0
        assert model.training

        s.save()

    best = tmp_path / "run" / "checkpoints" / "best"
    assert best.read_text().strip() == "step-00000001"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no option 'sede'.*one of"):
        session(tmp_path, sede=1)

    with pytest.raises(PlanError, match="does not divide"):
        session(tmp_path, micro_batch=3)

    with session(tmp_path) as s, pytest.raises(UserError, match="no model yet"):
        s.backward(torch.zeros(()), 1)

    with pytest.raises(EnvironmentFault, match="not empty"), session(tmp_path):
        raise AssertionError


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("made", "make", "what"),
    [
        (build(), sgd, "build is a Linear that is made already"),
        (build, sgd(build()), "make_optimizer is a SGD that is made already"),
        (build, lambda model: None, "returns NoneType, an optimizer of torch is wanted"),
        (build, lbfgs, "LBFGS computes the loss itself"),
    ],
    ids=["module", "optimizer", "nothing", "closure"],
)
def test_what_prepare_cannot_take(tmp_path: Path, made: Any, make: Any, what: str) -> None:
    with pytest.raises(UserError, match=what), session(tmp_path) as s:
        s.prepare(made, make)


@pytest.mark.slow
def test_a_second_loop_over_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with prepared_session(tmp_path) as (s, model):
        for batch in s.batches(ROWS, epochs=1):
            s.backward(*loss_of(model, batch))
            s.step()

        with pytest.raises(UserError, match="epochs and steps count the whole run"):
            list(s.batches(ROWS, collate, epochs=1))

    # A run that was gone on with at its end has nothing to do.
    with session(tmp_path, resume=True) as s:
        s.prepare(build, sgd)
        assert not list(s.batches(ROWS, collate, epochs=1))


def test_an_optimizer_steps_in_the_session_s_step_alone(tmp_path: Path) -> None:
    message = r"optimizer\.step\(\) is called by s\.step\(\)"
    with pytest.raises(UserError, match=message), session(tmp_path) as s:
        model, optimizer = s.prepare(build, sgd)
        for batch in s.batches(ROWS, collate, steps=1):
            s.backward(*loss_of(model, batch))
            optimizer.step()


def test_what_measure_returns(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        s.prepare(build, sgd)
        for given in (3.0, {"loss": 1.0}, (1.0,), (1.0, 2, 3)):
            with pytest.raises(UserError, match="measure returns"):
                s.evaluate(ROWS, collate, lambda batch, given=given: given)


def test_what_backward_and_log_cannot_take(tmp_path: Path) -> None:
    with prepared_session(tmp_path) as (s, model):
        for batch in s.batches(ROWS, collate, steps=1):
            loss, weight = loss_of(model, batch)
            wrong = {
                r"of shape \[2\], a tensor of one number": (loss.expand(2), weight),
                "the loss is a float": (3.0, weight),
                "has no gradients": (loss.detach(), weight),
                "weight is -1": (loss, -1),
                "weight is 'four'": (loss, "four"),
            }

            for message, given in wrong.items():
                with pytest.raises(UserError, match=message):
                    s.backward(*given)

            s.backward(loss, weight)

            assert s.step()

            with pytest.raises(UserError, match="note is a str, a number is wanted"):
                s.log(note="good")


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("zero2", "ZeRO takes one model"),
        ({"kind": "fsdp2", "sync_each_micro_batch": False}, "reduce after each micro-batch"),
    ],
    ids=["zero2", "fsdp2"],
)
def test_several_models_where_they_do_not_go(tmp_path: Path, strategy: Any, what: str) -> None:
    with pytest.raises(UserError, match=what), session(tmp_path, strategy) as s:
        s.prepare({"g": (build, sgd), "d": (build, sgd)})


def test_a_global_batch_whose_gradients_are_left(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"call s\.step"), prepared_session(tmp_path) as (s, model):
        for batch in s.batches(ROWS, collate, steps=2):
            s.backward(*loss_of(model, batch))


def test_names_of_an_evaluation_are_compared_also_if_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepared_session(tmp_path) as (s, model):

        def measure(batch: Any) -> Any:
            return loss_of(model, batch)

        s.evaluate(ROWS, collate, measure)
        monkeypatch.setattr(
            reduce, "gather_from_ranks", lambda names: [names, (*names, "accuracy")]
        )
        with pytest.raises(UserError, match="rank 1 loss, weight, accuracy"):
            s.evaluate(ROWS, collate, measure)


def test_a_step_is_read_when_the_next_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for its own numbers if they are not asked for; what is logged is."""
    order: list[str] = []
    start = SumReducer.start
    read = PendingSums.read

    def start_and_note(self: SumReducer, sums: Any, *more: float) -> PendingSums:
        order.append("start")
        number = order.count("start")
        found = start(self, sums, *more)

        def read_and_note() -> Any:
            order.append(f"read {number}")
            return read(found)

        monkeypatch.setattr(found, "read", read_and_note)
        return found

    monkeypatch.setattr(SumReducer, "start", start_and_note)

    with prepared_session(tmp_path) as (s, model):
        order.clear()

        for batch in s.batches(ROWS, collate, steps=4):
            s.backward(*loss_of(model, batch))
            if s.step() and s.steps == 3:
                s.log()

        assert order == ["start", "start", "read 1", "start", "read 2", "read 3", "start", "read 4"]
        assert s.losses[""] > 0


@pytest.mark.slow
def test_the_last_save_waits_for_room(tmp_path: Path) -> None:
    with session(tmp_path, asynchronous=False) as s:
        stepped(s)
        lacks = iter(["no space"])
        s.saver.checkpointer._space_error = lambda _: next(lacks, None)

    saves = events(tmp_path / "run", "save")
    assert [save["error"] is None for save in saves] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_that_is_not_finite_leaves_the_weights(tmp_path: Path, on_nan: str) -> None:
    def train_on_nan() -> None:
        with prepared_session(tmp_path, on_nan=on_nan) as (s, model):
            before = model.weight.detach().clone()

            for batch in s.batches(ROWS, collate, steps=1):
                loss, _ = loss_of(model, batch)
                s.backward(loss * float("nan"), 4)
                s.step()

            assert torch.equal(before, model.weight)

    if on_nan == "stop":
        with pytest.raises(TrainingStopped, match="loss nan"):
            train_on_nan()
    else:
        train_on_nan()

    found = events(tmp_path / "run", "nonfinite")

    assert [event["policy"] for event in found] == [on_nan]


@pytest.mark.slow
def test_going_on_with_other_data_order_needs_a_word(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        stepped(s)

    with pytest.raises(EnvironmentFault, match=r"run\.seed|differs"):
        with session(tmp_path, resume=True, seed=1) as s:
            stepped(s)

    with session(tmp_path, resume=True, seed=1, allow=("run.seed",)) as s:
        stepped(s)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.1)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters())


@pytest.mark.slow
def test_optimizers_whose_state_does_not_begin_at_zero(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="NAdam does not begin at zero"), session(tmp_path) as s:
        s.prepare(build, nadam)

    for make in (adamw, rmsprop):
        with session(tmp_path / make.__name__) as s:
            _, optimizer = s.prepare(build, make)
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert len(optimizer.state) == 2


def two_layers(first_learns: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(first_learns)
    return model


def add_moments(model: Any, optimizer: Any) -> None:
    """Give the first layer the state that older versions kept for what is frozen."""
    for parameter in model[0].parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros(parameter.shape),
            "exp_avg_sq": torch.zeros(parameter.shape),
        }


def leave(model: Any, optimizer: Any) -> None:
    """Change nothing at the end of a run."""


def unfreeze(model: Any, optimizer: Any) -> None:
    model.requires_grad_(True)


@pytest.mark.slow
def test_what_is_frozen_has_no_moments_until_it_learns(tmp_path: Path) -> None:
    """Also if a checkpoint holds them, as older ones do, and if it begins to learn just before
    one."""

    def train_to(steps: int, learns: bool, at_end: Any = leave, **options: Any) -> Any:
        """Return the step counts in the optimizer's state at the start, and how many it has at the
        end."""
        with session(tmp_path, **options) as s:
            model, optimizer = s.prepare(lambda: two_layers(learns), adamw)
            counts = []

            for parameter in model.parameters():
                if parameter in optimizer.state:
                    counts.append(float(optimizer.state[parameter]["step"]))

            for batch in s.batches(ROWS, collate, steps=steps, epochs=None):
                s.backward(*loss_of(model, batch))
                if s.step() and s.steps == steps:
                    at_end(model, optimizer)

        return counts, len(optimizer.state)

    assert train_to(1, False) == ([0.0, 0.0], 2)
    assert train_to(2, False, add_moments, resume=True) == ([1.0, 1.0], 4)
    assert train_to(3, False, unfreeze, resume=True) == ([2.0, 2.0], 2)
    assert train_to(4, True, resume=True) == ([0.0, 0.0, 3.0, 3.0], 4)
    assert train_to(5, True, resume=True) == ([1.0, 1.0, 4.0, 4.0], 4)


@pytest.mark.parametrize("learns", [True, False], ids=["freezes", "unfreezes"])
@pytest.mark.slow
def test_a_run_goes_on_with_what_its_loop_freezes_or_unfreezes(
    tmp_path: Path, learns: bool
) -> None:
    def train_to(steps: int, folder: str, learns: bool = learns, **options: Any) -> list[float]:
        """Train a model whose first layer changes after two steps, and return its weights."""
        with session(tmp_path / folder, **options) as s:
            model, _ = s.prepare(lambda: two_layers(learns), adamw)

            for batch in s.batches(ROWS, collate, steps=steps):
                if s.steps == 2 or (learns and s.steps > 2):
                    model[0].requires_grad_(not learns)

                s.backward(*loss_of(model, batch))
                s.step()

            return nn.utils.parameters_to_vector(model.parameters()).tolist()

    whole = train_to(6, "whole")
    train_to(3, "parts")
    train_to(4, "parts", resume=True)

    assert train_to(6, "parts", resume=True) == whole

    if learns:
        message = r"0\.weight and \d more, which this run has no place for"
        with pytest.raises(CheckpointError, match=message):
            train_to(7, "parts", learns=False, resume=True)


@pytest.mark.parametrize("strategy", ["local_sgd", pytest.param("zero1", marks=pytest.mark.slow)])
def test_where_nothing_is_unfrozen_once_the_model_is_spread(tmp_path: Path, strategy: str) -> None:
    def built() -> nn.Module:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        return model

    message = "bias was frozen when the strategy wrapped the model"

    with pytest.raises(ModelError, match=message), session(tmp_path, strategy) as s:
        model, _ = s.prepare(built, sgd)
        for batch in s.batches(ROWS, collate):
            model.requires_grad_(True)
            s.backward(*loss_of(model, batch))
            s.step()


def test_batch_norm_under_accumulation_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(tmp_path, micro_batch=2) as s:
        s.prepare(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), sgd)
    assert "accumulation is not quite the larger batch" in capsys.readouterr().err
