"""What a loop of the user's own may do wrong, and what `drumline.session` says then; nothing is
lost or counted twice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.errors import DataError, EnvironmentFault, UserError
from tests.harness import events
from tests.unit.test_session import (
    ROWS,
    build,
    collate,
    loss_of,
    prepared_session,
    session,
    sgd,
    stepped,
)


class Unending(torch.utils.data.IterableDataset[int]):
    """It has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def send_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def steps_of(folder: Path, **options: Any) -> int:
    """Return the number of steps with which a session begins."""
    with session(folder, **options) as s:
        s.prepare(build, sgd)
        return int(s.steps)


@pytest.mark.slow
def test_loops_that_would_count_twice(tmp_path: Path) -> None:
    with prepared_session(tmp_path, micro_batch=2) as (s, model):
        with pytest.raises(UserError, match="two loops take batches at once"):
            list(zip(s.batches(ROWS, collate), s.batches(ROWS, collate), strict=True))

        for batch in s.batches(ROWS, collate):
            s.backward(*loss_of(model, batch))
            break  # between the two micro-batches

        with pytest.raises(UserError, match="left in the middle of a global batch"):
            next(s.batches(ROWS, collate))


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (
            torch.utils.data.DataLoader(ROWS, batch_size=4),
            "a DataLoader makes batches, .* give its dataset, and its collate_fn as collate",
        ),
        (
            {"train": ROWS, "test": ROWS},
            "dict is no dataset — its keys are 'train', 'test': give one of its values",
        ),
        (None, "NoneType is no dataset — give a list"),
        ("rows.jsonl", "str is no dataset — give a list"),
    ],
    ids=["loader", "dictionary", "nothing", "path"],
)
@pytest.mark.slow
def test_what_is_no_dataset(tmp_path: Path, dataset: Any, what: str) -> None:
    """A dictionary with the numbers of its rows is read by them."""
    with prepared_session(tmp_path) as (s, model):
        with pytest.raises(DataError, match=f"batches: {what}"):
            next(s.batches(dataset))

        with pytest.raises(DataError, match=f"evaluate: {what}"):
            s.evaluate(dataset, collate, lambda batch: loss_of(model, batch))

        numbered = dict(enumerate(ROWS))

        assert len(list(s.batches(numbered, collate, steps=1))) == 1


def sgd_of_weight(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([model.weight], lr=0.1)


@pytest.mark.slow
def test_parameters_that_come_after_prepare(tmp_path: Path) -> None:
    message = r"add_param_group\(\) comes after prepare — give make_optimizer all of them"
    with session(tmp_path) as s:
        model, optimizer = s.prepare(build, sgd_of_weight)
        with pytest.raises(UserError, match=message):
            optimizer.add_param_group({"params": [model.bias]})


@pytest.mark.slow
def test_one_number_is_a_number_whatever_holds_it(tmp_path: Path) -> None:
    def learn(folder: Path, shape: tuple[int, ...], weight: Any) -> tuple[float, float]:
        """Return the losses of a step and of an evaluation."""
        with prepared_session(folder) as (s, model):

            def measure(batch: Any) -> tuple[Any, int]:
                return loss_of(model, batch)[0].reshape(shape), len(batch[0])

            for batch in s.batches(ROWS, collate, steps=1):
                s.backward(measure(batch)[0], weight)
                s.step()

            measured = s.evaluate(ROWS, collate, measure)
            return s.losses[""], measured["loss"]

    plain = learn(tmp_path / "0", (), 4)

    assert learn(tmp_path / "1", (1,), np.int64(4)) == plain
    assert learn(tmp_path / "2", (1, 1), torch.full((1,), 4)) == plain


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers send a signal that the terminal has sent, too, so a launched rank waits."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KeyboardInterrupt), session(tmp_path) as s:
        stepped(s)
        send_ctrl_c()

        assert s.stop_flag.requested == signal.SIGINT

        send_ctrl_c()

    monkeypatch.setenv("RANK", "0")
    with session(tmp_path / "launched"):
        send_ctrl_c()
        send_ctrl_c()


def test_the_user_s_own_hook_and_an_open_prompt_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    session(tmp_path)
    session(tmp_path)
    error = ValueError()
    sys.excepthook(ValueError, error, None)

    assert seen == [error]

    with pytest.raises(SystemExit) as left:
        sys.excepthook(UserError, UserError("mine"), None)

    assert left.value.code == 2

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(UserError, UserError("mine, too"), None)

    assert seen == [error]


@pytest.mark.slow
def test_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as s:
        for name in ("steps", "position", "state"):
            with pytest.raises(UserError, match="no model yet"):
                getattr(s, name)

        with pytest.raises(UserError, match="no model yet"):
            s.log(a=1)

        with pytest.raises(UserError, match="no model yet"):
            s.save()

        s.prepare(build, sgd)
        s.log(accuracy=0.25)

    assert "step 0  accuracy 0.25" in capsys.readouterr().out
    assert not events(tmp_path / "run", "step")


@pytest.mark.slow
def test_a_name_of_the_user_s_takes_no_field_s_place(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        stepped(s)
        s.log(kind=1, step=77, margin=0.5)

    (step,) = events(tmp_path / "run", "step")

    assert step["step"] == 1
    assert step["margin"] == 0.5
    assert step["tokens"] == 4


@pytest.mark.slow
def test_what_gives_no_samples(tmp_path: Path) -> None:
    with prepared_session(tmp_path) as (s, model):

        def evaluate(dataset: Any) -> Any:
            return s.evaluate(dataset, collate, lambda batch: loss_of(model, batch))

        once = iter(ROWS)

        assert evaluate(once)["loss"] > 0

        for nothing in ([], once):
            with pytest.raises(DataError, match=r"session\.evaluate: the dataset gives no samples"):
                evaluate(nothing)

        # It has a len() that raises.
        chained = torch.utils.data.ChainDataset([Unending(), Unending()])

        assert len(list(s.batches(chained, torch.tensor, shuffle=False))) == 5


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.slow
def test_a_state_that_json_does_not_have(
    tmp_path: Path, at_the_end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(tmp_path) as s:
        stepped(s)
        s.state.update(best=torch.ones(()), seen=3)
        if not at_the_end:
            with pytest.raises(UserError, match=r"s\.state\['best'\] is a Tensor"):
                s.save()

    what = "s.state['best'] is a Tensor, which JSON does not have: it is not saved"

    assert what in capsys.readouterr().err

    with session(tmp_path, resume=True) as s:
        s.prepare(build, sgd)
        assert s.steps == 1
        assert s.state == {"seen": 3}


@pytest.mark.parametrize("mark", [".tmp-", ".trash-"])
@pytest.mark.slow
def test_a_checkpoint_without_its_name_is_gone_on_from(tmp_path: Path, mark: str) -> None:
    """A kill came while it took the name of one of the same step."""
    with session(tmp_path) as s:
        stepped(s)

    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000001").rename(root / f"{mark}step-00000001-0123abcd")

    assert steps_of(tmp_path, resume=True) == 1


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_its_folder(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        stepped(s)

    run = tmp_path / "run"
    other = tmp_path / "other"

    assert steps_of(other, resume=run) == 1
    assert steps_of(other, resume=str(run / "checkpoints" / "step-00000001")) == 1

    with (
        pytest.raises(EnvironmentFault, match="there is no such file or folder"),
        session(other, resume=tmp_path / "no"),
    ):
        raise AssertionError


@pytest.mark.parametrize("every", [0, -1, 0.5])
@pytest.mark.slow
def test_a_number_of_steps_that_is_none(tmp_path: Path, every: Any) -> None:
    with session(tmp_path) as s:
        stepped(s)
        with pytest.raises(UserError, match=f"every is {every}, a number of steps from 1 on"):
            s.save(every=every)


def test_each_session_of_a_process_says_its_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        with pytest.raises(UserError), session(tmp_path / name) as s:
            s.prepare(build(), sgd)

    assert capsys.readouterr().err.count("build is a Linear that is made already") == 2


@pytest.mark.slow
def test_a_restart_goes_on_from_what_was_saved_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the checkpoint that the first start was given."""

    def train_to(steps: int, **options: object) -> int:
        """Train up to a step, and return the step that it began at."""
        with prepared_session(tmp_path, **options) as (s, model):
            began = int(s.steps)
            for batch in s.batches(ROWS, collate, steps=steps):
                s.backward(*loss_of(model, batch))
                s.step()
                s.save(every=1)

        return began

    named = tmp_path / "run" / "checkpoints" / "step-00000001"

    assert train_to(1) == 0
    assert train_to(2, resume=named) == 1

    monkeypatch.setenv("DRUMLINE_ATTEMPT", "1")

    assert train_to(3, resume=named) == 2
