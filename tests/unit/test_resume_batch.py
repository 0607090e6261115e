"""What a run may go on with: a global batch of the same size, and keys that change no number."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.dist.start import Ranks
from drumline.errors import CheckpointError, ModelError
from drumline.models.export import export
from drumline.plan.plan import Plan
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Event, Step
from drumline.train.build import build
from drumline.train.loop import Loop
from drumline.train.setup import (
    Request,
    _check_same_run,
    claim_run_dir,
    keep_learning_rate,
    make_plan,
)
from drumline.train.state import Goodput
from tests.harness import write_config
from tests.tiny import tiny_model_dir


def test_a_run_goes_on_with_batches_of_the_same_size(tmp_path: Path) -> None:
    """However it is cut up or written; on more ranks a micro-batch and an accumulation make another one."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        batch={"global_samples": None, "micro_batch": 2, "accumulation": 4},
        strategy="ddp",
    )

    def plan(ranks: int, *overrides: str) -> Plan:
        return make_plan(Request(load(path, list(overrides)), ranks), on_progress=lambda *_: None)

    two, one = plan(2), plan(1)
    assert (
        (two.batch.global_samples, one.batch.global_samples) == (16, 8)
        and two.data is not None
        and two.data.identity is not None
    )
    state = {
        "config": two.config.model_dump(mode="json"),
        "global_samples": 16,
        "data": two.data.identity.model_dump(),
    }
    with pytest.raises(
        CheckpointError,
        match=r"a step took 16 samples, and takes 8 now .* batch.global_samples=16 batch.accumulation=null",
    ):
        _check_same_run("c", state, one, ())
    _check_same_run("c", state, one, ("batch.global_samples",))
    _check_same_run("c", state, plan(1, "batch.global_samples=16", "batch.accumulation=null"), ())
    # Of an older version, which does not say.
    _check_same_run("c", {**state, "global_samples": None}, one, ())
    with pytest.raises(CheckpointError, match=r"batch\.micro_batch 2 → 1"):
        _check_same_run("c", state, plan(1, "batch.micro_batch=1"), ())
    for key in ("report.html=false", "run.profile={at: 3}"):
        _check_same_run("c", state, plan(2, key), ())


def train(path: Path, resume: Resume | None, *overrides: str) -> tuple[Loop, list[Step]]:
    """A run on one rank, to its end."""
    said: list[Event] = []
    plan = make_plan(Request(load(path, list(overrides)), 1), on_progress=lambda *_: None)
    built = build(plan, Ranks(), resume, said.append, StopFlag(), [], Goodput(0.0))
    built.run()
    return built, [event for event in said if isinstance(event, Step)]


@pytest.mark.parametrize(
    ("length", "size", "steps"),
    [
        ({"steps": 6}, 8, 6),
        pytest.param({"steps": 6}, 2, 6, marks=pytest.mark.full),
        pytest.param({"steps": None, "epochs": 0.6}, 8, 4, marks=pytest.mark.full),
        ({"steps": None, "epochs": 0.6}, 2, 10),
    ],
)
@pytest.mark.slow
def test_a_run_ends_as_it_was_to_with_batches_of_another_size(
    tmp_path: Path, length: dict[str, Any], size: int, steps: int
) -> None:
    """After `--allow batch.global_samples`: steps are steps in all, epochs the same samples, and the schedule ends with the run."""
    path = write_config(
        tmp_path, tiny_model_dir(tmp_path / "model"), strategy="single", data={"packing": False},
        checkpoint={"every": 2, "keep": 9, "asynchronous": False},
        schedule={"kind": "cosine", "warmup_steps": None, "warmup_ratio": 0.5}, run={**length, "log_every": 1}, eval={"every": None},
    )  # fmt: skip

    train(path, None)
    second = Resume(str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    built, made = train(path, second, f"batch.global_samples={size}", "batch.micro_batch=2")
    assert [event.step for event in made] == list(range(3, steps + 1))
    schedule, warmup = built.plan.config.schedule, math.ceil(0.5 * steps)
    assert [event.lr for event in made] == pytest.approx(
        [0.01 * schedule.rate(step, steps, warmup) for step in range(2, steps)]
    )
    assert built.state.position == 8 + size * (steps - 2) and made[-1].samples == size


@pytest.mark.slow
def test_the_learning_rate_stays_on_more_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which it is scaled by: the batch is the same, and nobody has changed the optimizer."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        strategy="single",
        run={"steps": 2},
        optimizer={"lr_scaling": "linear"},
    )
    train(path, None)

    def rate(*overrides: str, **asked: Any) -> float:
        request = Request(load(path, ["strategy=ddp", *overrides]), 2, **asked)
        return keep_learning_rate(make_plan(request, on_progress=lambda *_: None), request).lr

    assert rate() == pytest.approx(0.02) and not capsys.readouterr().err
    for named in ("newest", str(tmp_path / "run")):
        assert rate(resume=Resume.parse(named)) == pytest.approx(0.01)
        assert (
            "learning rate 0.01, as in" in (said := capsys.readouterr().err)
            and "on 2 data ranks it would be 0.02" in said
        )
    assert rate(resume=Resume(), allow=("optimizer.lr",)) == pytest.approx(0.02)
    assert rate("batch.global_samples=8", resume=Resume(), allow=("batch",)) == pytest.approx(0.02)
    assert not capsys.readouterr().err


FREEZE = {"model": {"freeze": ["model.embed_tokens"]}}


@pytest.mark.parametrize(
    "sections", [{"adapter": "lora"}, FREEZE, {}], ids=["lora", "freeze", "all"]
)
@pytest.mark.slow
def test_what_stays_frozen_is_what_it_was_trained_on_top_of(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        strategy="single",
        run={"steps": 2},
        **sections,
    )

    def going_on(*allow: str, resume: Resume | None = Resume()) -> Plan:
        request = Request(load(path, []), 1, resume, allow)
        return Plan.load(claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0])

    first = going_on(resume=None)
    train(path, None)
    assert going_on().base == first.base
    tiny_model_dir(tmp_path / "model", seed=1)
    if not sections:
        assert first.base is None and going_on().base is None, "a checkpoint has all of it"
        return
    with pytest.raises(ModelError, match="not those that the run was trained on top of"):
        export(tmp_path / "run", tmp_path / "out", "last")
    with pytest.raises(
        CheckpointError,
        match=r"not those that this checkpoint was trained on top of .*--allow model",
    ):
        going_on("optimizer", "model.id")
    assert first.base != going_on("model").base is not None


def test_there_has_to_be_a_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    """Or step 0 would begin with weights that were trained."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        strategy="single",
        health={"on_spike": "rollback"},
    )
    plan = make_plan(Request(load(path, []), 1), on_progress=lambda *_: None)
    built = build(plan, Ranks(), None, lambda event: None, StopFlag(), [], Goodput(0.0))
    assert built.rewind is not None
    with pytest.raises(CheckpointError, match="no checkpoint to go back to"):
        built.rewind()


@pytest.mark.slow
def test_a_run_that_is_named_is_gone_on_with_from_its_newest_whole_checkpoint(
    tmp_path: Path,
) -> None:
    model = tiny_model_dir(tmp_path / "model")
    path = write_config(
        tmp_path, model, strategy="single", checkpoint={"every": 2, "keep": 9}, run={"log_every": 1}
    )
    train(path, None)
    run, other = tmp_path / "run", f"run.dir={tmp_path / 'other'}"
    shard = next((run / "checkpoints" / "step-00000004").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    request = Request(load(path, [other]), 1, Resume(str(run)))
    _, start = claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
    built, made = train(path, start, other)
    assert [event.step for event in made] == [3, 4] and built.state.step == 4
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*step-00000004"):
        train(path, start, other)
