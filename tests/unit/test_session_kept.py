"""`drumline.session`: rates and states that a checkpoint keeps, and tensors in whatever holds them."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline
from drumline.models.containers import map_tensors
from drumline.train.state import PAIRS, TrainState, encode_keys
from tests.unit.test_session import ROWS, build, collate, loss_of, session, sgd


@pytest.mark.full
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.slow
def test_rates_go_on_as_they_were(tmp_path: Path, tensor: bool) -> None:
    """A scheduler is kept in the session's state, and a rate that is a tensor in the optimizer's."""
    scheduler: Any = None

    def make(model: nn.Module) -> torch.optim.Optimizer:
        nonlocal scheduler
        if tensor:
            return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))

        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
        return optimizer

    def train(folder: str, steps: int, **options: Any) -> list[float]:
        rates = []
        with session(tmp_path / folder, **options) as s:
            model, optimizer = s.prepare(build, make)
            if "scheduler" in s.state:
                scheduler.load_state_dict(s.state["scheduler"])

            for batch in s.batches(ROWS, collate, steps=steps, epochs=None):
                rate = optimizer.param_groups[0]["lr"]
                rates.append(float(rate))
                s.backward(*loss_of(model, batch))
                s.step()
                if tensor:
                    rate.mul_(0.5)
                else:
                    scheduler.step()
                    s.state["scheduler"] = scheduler.state_dict()

            rate = optimizer.param_groups[0]["lr"]
            assert isinstance(rate, torch.Tensor) == tensor

        return rates

    expected = [1.0, 0.5, 0.5, 0.25, 0.25]
    if tensor:
        expected = [1.0, 0.5, 0.25, 0.125, 0.0625]

    assert train("whole", 5) == expected

    first = train("parts", 2)
    assert first + train("parts", 5, resume=True) == expected


@pytest.mark.parametrize(
    "state",
    [{1: "a", "1": {2: [{3: None}]}}, {"a": {}, "b": [1, "c"], PAIRS: 2}, {None: 1.5, 0.5: True}],
)
def test_keys_that_are_numbers_stay_numbers(state: dict[Any, Any]) -> None:
    text = json.dumps(TrainState(stream=state).dump())
    saved = json.loads(text)
    assert TrainState(**saved).stream == state

    with pytest.raises(TypeError):
        json.dumps(encode_keys({(1, 2): 3}))


@dataclass(frozen=True)
class Out:
    logits: torch.Tensor
    note: str = "mine"


class Row(dict[str, Any]):
    """A mapping that torch does not know."""


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (Row(x=[ONES], n=1), lambda made: made["x"][0]),
        (UserDict(x=ONES, n=1), lambda made: made["x"]),
        (Out(ONES), lambda made: made.logits),
        ({"a": (Row(x=Out(ONES)), None)}, lambda made: made["a"][0]["x"].logits),
    ],
    ids=["dictionary", "mapping", "dataclass", "nested"],
)
def test_tensors_are_found_in_whatever_holds_them(
    given: Any, read: Callable[[Any], torch.Tensor]
) -> None:
    made = map_tensors(lambda tensor: tensor.to("meta"), given)
    assert type(made) is type(given)
    assert read(made).is_meta
    assert not read(given).is_meta


def test_what_holds_no_tensor_stays_the_same_object() -> None:
    flat = Out("no tensor")  # type: ignore[arg-type]
    nested = Out(["no", {"tensor": 1}])  # type: ignore[arg-type]
    made = map_tensors(torch.neg, [flat, nested])
    assert made[0] is flat
    assert made[1] is nested


class Returns(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        logits = super().forward(inputs)
        return Out(logits)


@pytest.mark.slow
def test_what_a_model_returns_is_precise_in_a_dataclass_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with drumline.session("single", "bf16", run_dir=run, device="cpu", global_samples=4) as s:
        model, _ = s.prepare(lambda: Returns(2, 1), sgd)
        out = model(torch.ones(3, 2))

    assert out.logits.dtype == torch.float32
    assert out.note == "mine"
