"""What a run may go on with: a global batch of the same size, and keys that change no number."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.dist.start import RankInfo
from drumline.engine.build import build_engine
from drumline.errors import CheckpointError, ModelError
from drumline.models.export import export
from drumline.plan.plan import Plan
from drumline.system.signals import StopFlag
from drumline.telemetry.events import Event, Step
from drumline.train import references, teachers
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

Keys = tuple[str, ...]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path / "model")


def request_of(
    config: Path, *overrides: str, ranks: int = 1, resume: Resume | None = None, allow: Keys = ()
) -> Request:
    return Request(load(config, list(overrides)), ranks, resume, allow)


def plan_of(request: Request) -> Plan:
    return make_plan(request, on_progress=lambda *_: None)


def build_loop(
    config: Path, resume: Resume | None, *overrides: str, emit: Callable[[Event], None]
) -> Loop:
    plan = plan_of(request_of(config, *overrides))
    return build(plan, RankInfo(), resume, emit, StopFlag(), [], Goodput(0.0))


def train(config: Path, resume: Resume | None, *overrides: str) -> tuple[Loop, list[Step]]:
    """A run on one rank, to its end."""
    emitted: list[Event] = []
    built = build_loop(config, resume, *overrides, emit=emitted.append)
    built.run()
    return built, [event for event in emitted if isinstance(event, Step)]


def test_a_run_goes_on_with_batches_of_the_same_size(tmp_path: Path, model: Path) -> None:
    """However it is cut up or written; on more ranks a micro-batch and an accumulation make another one."""
    batch = {"global_samples": None, "micro_batch": 2, "accumulation": 4}
    config = write_config(tmp_path, model, batch=batch, strategy="ddp")

    def plan(ranks: int, *overrides: str) -> Plan:
        return plan_of(request_of(config, *overrides, ranks=ranks))

    one = plan(1)
    two = plan(2)
    assert one.batch.global_samples == 8
    assert two.batch.global_samples == 16
    assert two.data is not None
    assert two.data.identity is not None

    state = {
        "config": two.config.model_dump(mode="json"),
        "global_samples": 16,
        "data": two.data.identity.model_dump(),
    }
    says = r"a step took 16 samples, and takes 8 now .* batch.global_samples=16 batch.accumulation=null"
    with pytest.raises(CheckpointError, match=says):
        _check_same_run("c", state, one, ())

    _check_same_run("c", state, one, ("batch.global_samples",))

    same_size = plan(1, "batch.global_samples=16", "batch.accumulation=null")
    _check_same_run("c", state, same_size, ())

    # Of an older version, which does not say.
    _check_same_run("c", {**state, "global_samples": None}, one, ())

    smaller = plan(1, "batch.micro_batch=1")
    with pytest.raises(CheckpointError, match=r"batch\.micro_batch 2 → 1"):
        _check_same_run("c", state, smaller, ())

    for override in ("report.html=false", "run.profile={at: 3}"):
        _check_same_run("c", state, plan(2, override), ())


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
    tmp_path: Path, model: Path, length: dict[str, Any], size: int, steps: int
) -> None:
    """After `--allow batch.global_samples`: steps are steps in all, epochs the same samples, and the schedule ends with the run."""
    config = write_config(
        tmp_path,
        model,
        strategy="single",
        data={"packing": False},
        checkpoint={"every": 2, "keep": 9, "asynchronous": False},
        schedule={"kind": "cosine", "warmup_steps": None, "warmup_ratio": 0.5},
        run={**length, "log_every": 1},
        eval={"every": None},
    )
    train(config, None)

    second = Resume(str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    built, made = train(config, second, f"batch.global_samples={size}", "batch.micro_batch=2")
    assert [event.step for event in made] == list(range(3, steps + 1))

    schedule = built.plan.config.schedule
    warmup = math.ceil(0.5 * steps)
    rates = [0.01 * schedule.rate(step, steps, warmup) for step in range(2, steps)]
    assert [event.lr for event in made] == pytest.approx(rates)

    assert built.state.position == 8 + size * (steps - 2)
    assert made[-1].samples == size


@pytest.mark.slow
def test_the_learning_rate_stays_on_more_devices(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which it is scaled by: the batch is the same, and nobody has changed the optimizer."""
    config = write_config(
        tmp_path,
        model,
        strategy="single",
        run={"steps": 2},
        optimizer={"lr_scaling": "linear"},
    )
    train(config, None)

    def rate(*overrides: str, **options: Any) -> float:
        request = request_of(config, "strategy=ddp", *overrides, ranks=2, **options)
        return keep_learning_rate(plan_of(request), request).lr

    assert rate() == pytest.approx(0.02)
    assert not capsys.readouterr().err

    for checkpoint in ("newest", str(tmp_path / "run")):
        assert rate(resume=Resume.parse(checkpoint)) == pytest.approx(0.01)

        printed = capsys.readouterr().err
        assert "learning rate 0.01, as in" in printed
        assert "on 2 data ranks it would be 0.02" in printed

    assert rate(resume=Resume(), allow=("optimizer.lr",)) == pytest.approx(0.02)
    assert rate("batch.global_samples=8", resume=Resume(), allow=("batch",)) == pytest.approx(0.02)
    assert not capsys.readouterr().err


FREEZE = {"model": {"freeze": ["model.embed_tokens"]}}


@pytest.mark.parametrize(
    "sections", [{"adapter": "lora"}, FREEZE, {}], ids=["lora", "freeze", "all"]
)
@pytest.mark.slow
def test_what_stays_frozen_is_what_it_was_trained_on_top_of(
    tmp_path: Path, model: Path, sections: dict[str, Any]
) -> None:
    config = write_config(tmp_path, model, strategy="single", run={"steps": 2}, **sections)

    def base_of_claim(*allow: str, resume: Resume | None = Resume()) -> str | None:
        """Claim the run's folder, and return what its plan says of the weights it is based on."""
        request = request_of(config, resume=resume, allow=allow)
        path, _ = claim_run_dir(plan_of(request), request)
        return Plan.load(path).base

    first = base_of_claim(resume=None)
    train(config, None)
    assert base_of_claim() == first

    tiny_model_dir(tmp_path / "model", seed=1)
    if not sections:
        assert first is None
        assert base_of_claim() is None, "a checkpoint has all of it"
        return

    with pytest.raises(ModelError, match="not those that the run was trained on top of"):
        export(tmp_path / "run", tmp_path / "out", "last")

    says = r"not those that this checkpoint was trained on top of .*--allow model"
    with pytest.raises(CheckpointError, match=says):
        base_of_claim("optimizer", "model.id")

    changed = base_of_claim("model")
    assert changed is not None
    assert changed != first


def test_there_has_to_be_a_checkpoint_to_go_back_to(tmp_path: Path, model: Path) -> None:
    """Or step 0 would begin with weights that were trained."""
    config = write_config(tmp_path, model, strategy="single", health={"on_spike": "rollback"})
    built = build_loop(config, None, emit=lambda event: None)
    assert built.rewind is not None

    with pytest.raises(CheckpointError, match="no checkpoint to go back to"):
        built.rewind()


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_model_that_answers_in_every_step_is_built_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The evaluation sets keep it, so a second one after a rollback would be held beside it."""
    algorithms = {
        "reference": {"kind": "dpo", "reference": "live"},
        "teacher": {"kind": "distill", "log_probs": "live", "teacher": {"id": str(model)}},
    }
    roles: list[str | None] = []

    def count(plan: Plan, device: str, role: str | None = None) -> Any:
        roles.append(role)
        return build_engine(plan, device, role=role)

    for module in (references, teachers):
        monkeypatch.setattr(module, "build_engine", count)
    config = write_config(
        tmp_path,
        model,
        strategy="single",
        algorithm=algorithms[role],
        health={"on_spike": "rollback"},
    )
    built, _ = train(config, None)
    assert built.rewind is not None
    built.rewind()
    assert roles == [role]


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_is_named_is_gone_on_with_from_its_newest_whole_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    checkpoint = {"every": 2, "keep": 9}
    config = write_config(
        tmp_path, model, strategy="single", checkpoint=checkpoint, run={"log_every": 1}
    )
    train(config, None)

    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    shard = next((checkpoints / "step-00000004").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    other = f"run.dir={tmp_path / 'other'}"
    request = request_of(config, other, resume=Resume(str(run)))
    _, start = claim_run_dir(plan_of(request), request)
    built, made = train(config, start, other)
    assert [event.step for event in made] == [3, 4]
    assert built.state.step == 4

    shutil.rmtree(checkpoints / "step-00000002")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*step-00000004"):
        train(config, start, other)
