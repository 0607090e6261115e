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


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.slow
def test_rates_go_on_as_they_were(tmp_path: Path, tensor: bool) -> None:
    def train(folder: Path, steps: int, **options: Any) -> list[float]:
        made, rates = list[Any](), []

        def make(model: nn.Module) -> torch.optim.Optimizer:
            made.append(
                torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0) if tensor else 1.0)
            )  # type: ignore[arg-type]
            made.append(None if tensor else halved(made[0]))
            return made[0]  # type: ignore[no-any-return]

        with session(folder, **options) as s:
            (model, optimizer), scheduler = s.prepare(build, make), made[1]
            if "scheduler" in s.state:
                scheduler.load_state_dict(s.state["scheduler"])
            for batch in s.batches(ROWS, collate, steps=steps, epochs=None):
                rates.append(float(optimizer.param_groups[0]["lr"]))
                s.backward(*loss_of(model, batch))
                s.step()
                if tensor:
                    optimizer.param_groups[0]["lr"].mul_(0.5)
                else:
                    scheduler.step()
                    s.state["scheduler"] = scheduler.state_dict()
            assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
        return rates

    parts = train(tmp_path / "parts", 2) + train(tmp_path / "parts", 5, resume=True)
    assert (
        parts
        == train(tmp_path / "whole", 5)
        == ([1.0, 0.5, 0.25, 0.125, 0.0625] if tensor else [1.0, 0.5, 0.5, 0.25, 0.25])
    )


@pytest.mark.parametrize(
    "state",
    [{1: "a", "1": {2: [{3: None}]}}, {"a": {}, "b": [1, "c"], PAIRS: 2}, {None: 1.5, 0.5: True}],
)
def test_keys_that_are_numbers_stay_numbers(state: dict[Any, Any]) -> None:
    saved = json.loads(json.dumps(TrainState(stream=state).dump()))
    assert TrainState(**saved).stream == state
    with pytest.raises(TypeError):
        json.dumps(encode_keys({(1, 2): 3}))


@dataclass(frozen=True)
class Out:
    logits: torch.Tensor
    note: str = "mine"


class Row(dict[str, Any]):
    """A mapping that torch does not know."""


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (Row(x=[torch.ones(2)], n=1), lambda made: made["x"][0]),
        (UserDict(x=torch.ones(2), n=1), lambda made: made["x"]),
        (Out(torch.ones(2)), lambda made: made.logits),
        ({"a": (Row(x=Out(torch.ones(2))), None)}, lambda made: made["a"][0]["x"].logits),
    ],
    ids=["dictionary", "mapping", "dataclass", "nested"],
)
def test_tensors_are_found_in_whatever_holds_them(
    given: Any, read: Callable[[Any], torch.Tensor]
) -> None:
    made = map_tensors(lambda tensor: tensor.to("meta"), given)
    assert type(made) is type(given) and read(made).is_meta and not read(given).is_meta
    same = Out("no tensor")  # type: ignore[arg-type]
    assert map_tensors(torch.neg, [same])[0] is same


def test_what_a_model_returns_is_precise_in_a_dataclass_too(tmp_path: Path) -> None:
    class Returns(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return Out(super().forward(inputs))

    with drumline.session(
        "single", "bf16", run_dir=tmp_path / "run", device="cpu", global_samples=4
    ) as s:
        model, _ = s.prepare(lambda: Returns(2, 1), sgd)
        out = model(torch.ones(3, 2))
        assert out.logits.dtype == torch.float32 and out.note == "mine"
