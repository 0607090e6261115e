"""What a loop of the user's own may do wrong, and what `drumline.session` says then; nothing is lost or counted twice."""

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
from tests.unit.test_session import ROWS, build, collate, loss_of, session, sgd, stepped


class Unending(torch.utils.data.IterableDataset[int]):
    """It has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.slow
def test_loops_that_would_count_twice(tmp_path: Path) -> None:
    with session(tmp_path, micro_batch=2) as s:
        model, _ = s.prepare(build, sgd)
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
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        with pytest.raises(DataError, match=f"batches: {what}"):
            next(s.batches(dataset))
        with pytest.raises(DataError, match=f"evaluate: {what}"):
            s.evaluate(dataset, collate, lambda batch: loss_of(model, batch))
        assert len(list(s.batches(dict(enumerate(ROWS)), collate, steps=1))) == 1, (
            "one with the numbers of its rows is read by them"
        )


@pytest.mark.slow
def test_parameters_that_come_after_prepare(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, optimizer = s.prepare(build, lambda model: torch.optim.SGD([model.weight], lr=0.1))
        with pytest.raises(
            UserError,
            match=r"add_param_group\(\) comes after prepare — give make_optimizer all of them",
        ):
            optimizer.add_param_group({"params": [model.bias]})


@pytest.mark.slow
def test_one_number_is_a_number_whatever_holds_it(tmp_path: Path) -> None:
    found = []
    for shape, weight in (((), 4), ((1,), np.int64(4)), ((1, 1), torch.full((1,), 4))):
        with session(tmp_path / str(len(found))) as s:
            model, _ = s.prepare(build, sgd)
            for batch in s.batches(ROWS, collate, steps=1):
                s.backward(loss_of(model, batch)[0].reshape(shape), weight)
                s.step()

            def measure(batch: Any, model: Any = model, shape: Any = shape) -> tuple[Any, int]:
                return loss_of(model, batch)[0].reshape(shape), len(batch[0])

            measured = s.evaluate(ROWS, collate, measure)
            found.append((s.losses[""], measured["loss"]))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KeyboardInterrupt), session(tmp_path) as s:
        stepped(s)
        os.kill(os.getpid(), signal.SIGINT)
        assert s.stop_flag.requested == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setenv("RANK", "0")
    with session(
        tmp_path / "launched"
    ) as s:  # launchers send a signal that the terminal has sent, too
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_the_user_s_own_hook_and_an_open_prompt_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    session(tmp_path)
    session(tmp_path)
    error, mine = ValueError(), UserError("mine")
    sys.excepthook(ValueError, error, None)
    assert seen == [error]
    with pytest.raises(SystemExit) as left:
        sys.excepthook(UserError, mine, None)
    assert left.value.code == 2
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(UserError, UserError("mine, too"), None)
    assert seen == [error]


@pytest.mark.slow
def test_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as s:
        for call in (
            lambda: s.steps,
            lambda: s.position,
            lambda: s.state,
            lambda: s.log(a=1),
            lambda: s.save(),
        ):
            with pytest.raises(UserError, match="no model yet"):
                call()
        s.prepare(build, sgd)
        s.log(accuracy=0.25)
    assert "step 0  accuracy 0.25" in capsys.readouterr().out and not events(
        tmp_path / "run", "step"
    )


@pytest.mark.slow
def test_a_name_of_the_user_s_takes_no_field_s_place(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        stepped(s)
        s.log(kind=1, step=77, margin=0.5)
    (step,) = events(tmp_path / "run", "step")
    assert (step["step"], step["margin"], step["tokens"]) == (1, 0.5, 4)


@pytest.mark.slow
def test_what_gives_no_samples(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)
        once = iter(ROWS)
        assert s.evaluate(once, collate, lambda batch: loss_of(model, batch))["loss"] > 0
        for nothing in ([], once):
            with pytest.raises(DataError, match=r"session\.evaluate: the dataset gives no samples"):
                s.evaluate(nothing, collate, lambda batch: loss_of(model, batch))
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
    assert (
        "s.state['best'] is a Tensor, which JSON does not have: it is not saved"
        in capsys.readouterr().err
    )
    with session(tmp_path, resume=True) as s:
        s.prepare(build, sgd)
        assert s.steps == 1 and s.state == {"seen": 3}


@pytest.mark.parametrize("mark", [".tmp-", ".trash-"])
@pytest.mark.slow
def test_a_checkpoint_without_its_name_is_gone_on_from(tmp_path: Path, mark: str) -> None:
    """A kill came while it took the name of one of the same step."""
    with session(tmp_path) as s:
        stepped(s)
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000001").rename(root / f"{mark}step-00000001-0123abcd")
    with session(tmp_path, resume=True) as s:
        s.prepare(build, sgd)
        assert s.steps == 1


@pytest.mark.slow
def test_a_run_is_gone_on_with_by_its_folder(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        stepped(s)
    for place in (tmp_path / "run", str(tmp_path / "run" / "checkpoints" / "step-00000001")):
        with session(tmp_path / "other", resume=place) as s:
            s.prepare(build, sgd)
            assert s.steps == 1
    with (
        pytest.raises(EnvironmentFault, match="there is no such file or folder"),
        session(tmp_path / "other", resume=tmp_path / "no"),
    ):
        pass


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

    def to(steps: int, **options: object) -> int:
        with session(tmp_path, **options) as s:
            model, _ = s.prepare(build, sgd)
            began = int(s.steps)
            for batch in s.batches(ROWS, collate, steps=steps):
                s.backward(*loss_of(model, batch))
                s.step()
                s.save(every=1)
        return began

    named = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert to(1) == 0 and to(2, resume=named) == 1
    monkeypatch.setenv("DRUMLINE_ATTEMPT", "1")
    assert to(3, resume=named) == 2
