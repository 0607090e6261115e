"""The loss and the optimizer's step, compiled: the numbers of the same steps that are not, and a folder that keeps what was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.engine.build import build_engine
from drumline.errors import PlanError
from drumline.models import losses
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.train.setup import Request, make_plan
from tests.harness import write_config
from tests.tiny import tiny_model_dir
from tests.unit.test_plan_memory import FACTS, layout


def numbers(folder: Path, model: Path, **compiled: bool) -> list[float]:
    """Loss sums and gradient norms of three steps."""
    sections: dict[str, Any] = {
        "compile": compiled,
        "optimizer": {"fused": False, "lr": 3e-3},
        "batch": {"global_samples": 2},
    }
    folder.mkdir()
    path = write_config(folder, model, data={"packing": False, "max_length": 32}, **sections)
    plan = make_plan(
        Request(load(path, ["batch.micro_batch=2"]), world_size=1), on_progress=lambda *_: None
    )
    engine, algorithm = build_engine(plan, "cpu"), plan.config.algorithm
    found = []
    for step in range(3):
        batch = algorithm.traced_batch(plan, 2, 32, 3)
        loss = engine.forward_backward([batch], algorithm.build().objective, 64.0)["loss"]
        norm = engine.grad_norm()
        engine.step(3e-3 / (step + 1), norm, torch.tensor(True))
        found += [float(loss), float(norm)]
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_dir(tmp_path / "model")
    monkeypatch.setattr(losses, "_softmax_sums", losses._softmax_sums)  # set back behind the test
    plain = numbers(tmp_path / "plain", model)
    assert numbers(tmp_path / "compiled", model, loss=True, optimizer=True) == pytest.approx(
        plain, rel=1e-5
    )


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"compile": {"optimizer": True}}, "compile.optimizer"),
        ({"compile": {"loss": True}, "strategy": "tp"}, "compile.loss × tp"),
        ({"model": {"kernels": "liger"}}, "kernels=liger × cpu"),
        (
            {"precision": {"kind": "fp8"}, "adapter": {"kind": "lora"}},
            "precision fp8 × tp, cp, pp, ep, zero, frozen weights",
        ),
        (
            {"precision": {"kind": "fp8", "gather": "fp8"}},
            "gather=fp8 × the precision or the strategy",
        ),
    ],
)
def test_refused_in_one_line(sections: dict[str, Any], name: str) -> None:
    rest = {key: value for key, value in sections.items() if key != "strategy"}
    kind = sections.get("strategy", "single")
    made = layout({"kind": kind}, 2 if kind == "tp" else 1, **rest)
    with pytest.raises(PlanError) as error:
        check_rules(Case(made.config, made.mesh, "cpu", "bf16", FACTS))
    assert name in str(error.value) and "\n" not in str(error.value)
