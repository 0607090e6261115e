"""`drumline.session` in one process: data, evaluation, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline
from drumline.data.samples import evaluation_batches, global_batches
from drumline.dist.reduce import Gather, Gathered
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


def taken(
    dataset: Any, position: int = 0, stop: int | None = 1, seed: int | None = None
) -> list[list[int]]:
    """All samples of each global batch, of both ranks."""
    ranks = [list(global_batches(dataset, BATCH, rank, position, stop, seed)) for rank in range(2)]
    return [
        sorted(sample for rows in (*mine, *others) for sample in rows)
        for mine, others in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(
    "dataset", [list(range(10)), Endless(), Streamed()], ids=["map", "iterable", "torch's iterable"]
)
def test_the_last_batch_is_filled_from_the_next_pass_and_a_position_is_enough(dataset: Any) -> None:
    assert taken(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert taken(dataset, position=4) == taken(dataset)[1:] and taken(dataset, position=12) == []
    assert len(taken(dataset, stop=2)) == 5


def test_a_shuffled_pass_has_each_sample_once() -> None:
    first = taken(list(range(12)), seed=1)
    assert sorted(chain(*first)) == list(range(12)) and first != taken(list(range(12)), seed=2)
    assert taken(list(range(12)), position=4, seed=1) == first[1:]


def test_a_dataset_that_can_be_read_once_says_so() -> None:
    for stop in (None, 2):
        with pytest.raises(DataError, match="gives nothing in pass 2"):
            list(global_batches(iter(range(10)), BATCH, 0, 0, stop, None))
    with pytest.raises(DataError, match="no samples"):
        list(global_batches([], BATCH, 0, 0, 1, None))


def test_what_can_be_read_once_is_one_pass() -> None:
    assert taken_of(range(10)) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]] and taken_of(
        range(8)
    ) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (
        taken_of(range(10), position=8) == [[0, 1, 8, 9]] and taken_of(range(10), position=12) == []
    )
    assert taken_of(range(1)) == [[0, 0, 0, 0]], "fewer samples than a global batch"


def taken_of(rows: range, position: int = 0) -> list[list[int]]:
    """Of a generator over the rows, as `taken` has them."""
    ranks = [
        list(global_batches((row for row in rows), BATCH, rank, position, 1, None))
        for rank in range(2)
    ]
    return [sorted(chain(*mine, *others)) for mine, others in zip(*ranks, strict=True)]


def test_held_out_samples_count_once_and_ranks_do_the_same_work() -> None:
    found = [list(evaluation_batches(Endless(), 3, rank, 2)) for rank in range(2)]
    assert len(found[0]) == len(found[1])
    assert sorted(s for rank in found for rows, counts in rank if counts for s in rows) == list(
        range(10)
    )


def build() -> nn.Module:
    return nn.Linear(2, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


ROWS = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i % 3)])) for i in range(8)]


def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def session(folder: Path, strategy: Any = "single", **options: Any) -> Any:
    return drumline.session(
        strategy, "fp32", run_dir=folder / "run", device="cpu", **{"global_samples": 4, **options}
    )


def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(), len(inputs)


def stepped(s: Any) -> Any:
    """The model of a session that has done one step with it."""
    model, _ = s.prepare(build, sgd)
    for batch in s.batches(ROWS, collate, steps=1):
        s.backward(*loss_of(model, batch))
        s.step()
    return model


def test_the_last_step_is_read_as_numbers(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        with pytest.raises(UserError, match="no step was done yet"):
            s.loss  # noqa: B018
        for batch in s.batches(ROWS, collate, steps=1):
            s.backward(*loss_of(model, batch))
            s.step()
        assert s.losses == {"": s.loss} and s.grad_norms == {"": s.grad_norm}
        assert s.loss > 0 and s.grad_norm > 0
    with session(tmp_path / "two") as s:
        s.prepare({"first": (build, sgd), "second": (build, sgd)})
        with pytest.raises(
            UserError, match=r"several models — read s\.grad_norms\[NAME\], of 'first', 'second'"
        ):
            s.grad_norm  # noqa: B018


def test_one_denominator(tmp_path: Path) -> None:
    """Weights that differ by micro-batch: the step is that of Σ loss / Σ weight."""
    weights = [torch.tensor(3.0), 0.5]
    with session(tmp_path, micro_batch=2) as s:
        model, _ = s.prepare(build, sgd)
        before = model.weight.detach().clone(), model.bias.detach().clone()
        batches = []
        for batch in s.batches(ROWS, collate, steps=1, shuffle=False):
            s.backward(loss_of(model, batch)[0], weights[len(batches)])
            batches.append(batch)
            assert s.step() == (len(batches) == 2)
        assert (s.steps, s.position) == (1, 4)
    expected = nn.Linear(2, 1)
    with torch.no_grad():
        expected.weight.copy_(before[0])
        expected.bias.copy_(before[1])
    loss = sum(loss_of(expected, batch)[0] for batch in batches) / 3.5
    assert isinstance(loss, torch.Tensor) and s.losses[""] == pytest.approx(float(loss))
    loss.backward()
    sgd(expected).step()
    assert torch.allclose(model.weight, expected.weight, rtol=1e-6) and torch.allclose(
        model.bias, expected.bias, rtol=1e-6
    )


def test_evaluate_is_a_mean_over_all_and_chooses_the_best(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model = stepped(s)
        found = s.evaluate(
            ROWS[:7],
            collate,
            lambda batch: (*loss_of(model, batch), {"ones": torch.ones(len(batch[0])).sum()}),
        )
        with torch.no_grad():
            total, samples = loss_of(model.module, collate(ROWS[:7]))
        assert found["loss"] == pytest.approx(float(total) / samples) and found["ones"] == 1.0
        assert model.training
        s.save()
    assert (tmp_path / "run" / "checkpoints" / "best").read_text().strip() == "step-00000001"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no option 'sede'.*one of"):
        session(tmp_path, sede=1)
    with pytest.raises(PlanError, match="does not divide"):
        session(tmp_path, micro_batch=3)
    with session(tmp_path) as s, pytest.raises(UserError, match="no model yet"):
        s.backward(torch.zeros(()), 1)
    with pytest.raises(EnvironmentFault, match="not empty"), session(tmp_path):
        raise AssertionError


@pytest.mark.parametrize(
    ("made", "make", "what"),
    [
        (build(), sgd, "build is a Linear that is made already"),
        (build, sgd(build()), "make_optimizer is a SGD that is made already"),
        (build, lambda model: None, "returns NoneType, an optimizer of torch is wanted"),
        (
            build,
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS computes the loss itself",
        ),
    ],
    ids=["module", "optimizer", "nothing", "closure"],
)
def test_what_prepare_cannot_take(tmp_path: Path, made: Any, make: Any, what: str) -> None:
    with pytest.raises(UserError, match=what), session(tmp_path) as s:
        s.prepare(made, make)


def test_a_second_loop_over_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        for batch in s.batches(ROWS, epochs=1):
            s.backward(*loss_of(model, batch))
            s.step()
        with pytest.raises(UserError, match="epochs and steps count the whole run"):
            list(s.batches(ROWS, collate, epochs=1))
    with drumline.session(
        "single", "fp32", run_dir=tmp_path / "run", device="cpu", global_samples=4, resume=True
    ) as s:
        s.prepare(build, sgd)
        assert not list(s.batches(ROWS, collate, epochs=1)), (
            "a run that was gone on with at its end has nothing to do"
        )


def test_an_optimizer_steps_in_the_session_s_step_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"optimizer\.step\(\) is called by s\.step\(\)"),
        session(tmp_path) as s,
    ):
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
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        for batch in s.batches(ROWS, collate, steps=1):
            loss, weight = loss_of(model, batch)
            for given, what in (
                ((loss.expand(2), weight), r"of shape \[2\], a tensor of one number"),
                ((3.0, weight), "the loss is a float"),
                ((loss.detach(), weight), "has no gradients"),
                ((loss, -1), "weight is -1"),
                ((loss, "four"), "weight is 'four'"),
            ):
                with pytest.raises(UserError, match=what):
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
    with pytest.raises(UserError, match=r"call s\.step"), session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        for batch in s.batches(ROWS, collate, steps=2):
            s.backward(*loss_of(model, batch))


def test_a_step_is_read_when_the_next_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for its own numbers where they are not asked for; what is logged is."""
    order: list[str] = []
    start, read = Gather.start, Gathered.read

    def started(self: Gather, sums: Any, *more: float) -> Gathered:
        order.append("start")
        found, number = start(self, sums, *more), order.count("start")

        def noted() -> Any:
            order.append(f"read {number}")
            return read(found)

        monkeypatch.setattr(found, "read", noted)
        return found

    monkeypatch.setattr(Gather, "start", started)
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        order.clear()
        for batch in s.batches(ROWS, collate, steps=4):
            s.backward(*loss_of(model, batch))
            if s.step() and s.steps == 3:
                s.log()
        assert order == ["start", "start", "read 1", "start", "read 2", "read 3", "start", "read 4"]
        assert s.losses[""] > 0


def test_the_last_save_waits_for_room(tmp_path: Path) -> None:
    with session(tmp_path, asynchronous=False) as s:
        stepped(s)
        lacks = iter(["no space"])
        s.saver.checkpointer._space_error = lambda _: next(lacks, None)
    saves = events(tmp_path / "run", "save")
    assert [save["error"] is None for save in saves] == [False, True]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_that_is_not_finite_leaves_the_weights(tmp_path: Path, on_nan: str) -> None:
    def train() -> Any:
        with session(tmp_path, on_nan=on_nan) as s:
            model, _ = s.prepare(build, sgd)
            before = model.weight.detach().clone()
            for batch in s.batches(ROWS, collate, steps=1):
                s.backward(loss_of(model, batch)[0] * float("nan"), 4)
                s.step()
            assert torch.equal(before, model.weight)

    if on_nan == "stop":
        with pytest.raises(TrainingStopped, match="loss nan"):
            train()
    else:
        train()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy"] for line in lines if '"nonfinite"' in line] == [on_nan]


def test_going_on_with_other_data_order_needs_a_word(tmp_path: Path) -> None:
    def train(**options: Any) -> None:
        with session(tmp_path, **options) as s:
            model, _ = s.prepare(build, sgd)
            for batch in s.batches(ROWS, collate, steps=1):
                s.backward(*loss_of(model, batch))
                s.step()

    train()
    with pytest.raises(EnvironmentFault, match=r"run\.seed|differs"):
        train(resume=True, seed=1)
    train(resume=True, seed=1, allow=("run.seed",))


def test_optimizers_whose_state_does_not_begin_at_zero(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="NAdam does not begin at zero"), session(tmp_path) as s:
        s.prepare(build, lambda model: torch.optim.NAdam(model.parameters()))
    for number, kind in enumerate((torch.optim.AdamW, torch.optim.RMSprop)):
        with session(tmp_path / str(number)) as s:
            _, optimizer = s.prepare(
                build, lambda model, kind=kind: kind(model.parameters(), lr=0.1)
            )  # type: ignore[misc]
            assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.state) == 2


@pytest.mark.slow
def test_what_is_frozen_has_no_moments_until_it_learns(tmp_path: Path) -> None:
    """Also where a checkpoint holds them, as older ones do, and where it begins to learn just before one."""

    def train(steps: int, learns: bool, then: Any = lambda *_: None, **options: Any) -> Any:
        def built() -> nn.Module:
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            model[0].requires_grad_(learns)
            return model

        with session(tmp_path, **options) as s:
            model, optimizer = s.prepare(
                built, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)
            )
            began = [
                float(optimizer.state[p]["step"])
                for p in model.parameters()
                if p in optimizer.state
            ]
            for batch in s.batches(ROWS, collate, steps=steps, epochs=None):
                s.backward(*loss_of(model, batch))
                if s.step() and s.steps == steps:
                    then(model, optimizer)
        return began, len(optimizer.state)

    def older(model: Any, optimizer: Any) -> None:
        for parameter in [*model.parameters()][:2]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                **{s: torch.zeros(parameter.shape) for s in ("exp_avg", "exp_avg_sq")},
            }

    assert train(1, False) == ([0.0, 0.0], 2)
    assert train(2, False, older, resume=True) == ([1.0, 1.0], 4)
    assert train(3, False, lambda model, _: model.requires_grad_(True), resume=True) == (
        [2.0, 2.0],
        2,
    )
    assert train(4, True, resume=True) == ([0.0, 0.0, 3.0, 3.0], 4)
    assert train(5, True, resume=True) == ([1.0, 1.0, 4.0, 4.0], 4)


@pytest.mark.parametrize("learns", [True, False], ids=["freezes", "unfreezes"])
@pytest.mark.slow
def test_a_run_goes_on_with_what_its_loop_freezes_or_unfreezes(
    tmp_path: Path, learns: bool
) -> None:
    def built(learns: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].requires_grad_(learns)
        return model

    def train(folder: Path, steps: int, learns: bool = learns, **options: Any) -> list[float]:
        with session(folder, **options) as s:
            model, _ = s.prepare(
                lambda: built(learns), lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)
            )
            for batch in s.batches(ROWS, collate, steps=steps):
                if s.steps == 2 or (learns and s.steps > 2):
                    model[0].requires_grad_(not learns)
                s.backward(*loss_of(model, batch))
                s.step()
            return torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    train(tmp_path / "parts", 4, resume=True)
    assert train(tmp_path / "parts", 6, resume=True) == whole
    if learns:
        with pytest.raises(
            CheckpointError, match=r"0\.weight and \d more, which this run has no place for"
        ):
            train(tmp_path / "parts", 7, learns=False, resume=True)


@pytest.mark.parametrize("strategy", ["local_sgd", pytest.param("zero1", marks=pytest.mark.slow)])
def test_where_nothing_is_unfrozen_once_the_model_is_spread(tmp_path: Path, strategy: str) -> None:
    def built() -> nn.Module:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        return model

    with (
        pytest.raises(ModelError, match="bias was frozen when the model was spread"),
        session(tmp_path, strategy) as s,
    ):
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
