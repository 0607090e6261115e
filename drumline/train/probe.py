"""`--probe`: a few steps of the best candidates for real, each launched like any run in a temporary folder that goes away with it."""

from __future__ import annotations

import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.core.config import CheckpointConfig, Config
from drumline.core.data import DataConfig, FileSource
from drumline.core.load import Loaded
from drumline.core.run import EvalConfig
from drumline.errors import EnvironmentFault
from drumline.planner.search.answer import Answer, Candidate, Probe, corrected_answer, require_here
from drumline.report.bars import OnProgress
from drumline.telemetry.events import last_measurement, read

STEPS = 5  # two to settle, one that is counted, two that are timed
# Keys of `data` that say nothing of which rows there are.
SAME = (
    "max_length",
    "packing",
    "workers",
    "prefetch",
    "verify",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def probe(answer: Answer, loaded: Loaded, on_progress: OnProgress) -> Answer:
    """The answer, its estimates corrected by what the two `best` candidates take. They train on the run's data where these are prepared,
    else on random words; nothing is evaluated, saved or left on disk.

    Raises EnvironmentFault where the devices of the question are not those here, or there are no rows to be had, and whatever `drumline
    train` would raise before it starts.
    """
    require_here(answer.question.cluster)
    # That would be a pass over all pairs.
    real = (
        answer.question.data is not None
        and loaded.config.algorithm.reference_of(loaded.config) != "precomputed"
    )
    with tempfile.TemporaryDirectory(prefix="drumline-probe-") as folder:
        root = Path(folder)
        rows = (
            None
            if real
            else random_rows(loaded.config, answer.ranked[0], root / "rows.jsonl")
            if answer.ranked
            else None
        )
        probes = [
            _try(c, loaded, root / str(number), rows, on_progress)
            for number, c in enumerate(best(answer))
        ]
    return corrected_answer(answer, tuple(probes))


def best(answer: Answer) -> list[Candidate]:
    """The first, and the next one of another family where there is one: two of a family are too alike to choose between."""
    first, rest = answer.ranked[:1], answer.ranked[1:]
    second = [c for c in rest if c.family != first[0].family] or rest
    return [*first, *second[:1]]


def random_rows(config: Config, candidate: Candidate, path: Path) -> Path:
    """Enough rows of random words for all steps, each as long as the longest. Raises EnvironmentFault where words will not do."""
    length, draw = config.data.max_length, random.Random(config.run.seed)

    def random_text(number: int) -> str:
        return " ".join("".join(draw.choices(LETTERS, k=4)) for _ in range(max(1, number)))

    rows = [
        config.algorithm.random_row(random_text, length)
        for _ in range(STEPS * candidate.layout.batch.global_samples)
    ]
    if None in rows:
        what = f"{config.algorithm.kind} cannot be tried on random words, and its data are not prepared"
        raise EnvironmentFault(
            what, where="--probe", fix="prepare them first: drumline prepare CONFIG.yaml"
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _try(
    candidate: Candidate, loaded: Loaded, run_dir: Path, rows: Path | None, on_progress: OnProgress
) -> Probe:
    from drumline.launchers.local import launch_trial
    from drumline.train.setup import Request, make_plan

    name, predicted = candidate.name, candidate.estimate
    config = short(candidate, run_dir, rows)
    plan = make_plan(Request(replace(loaded, config=config)), on_progress=on_progress)
    run_dir.mkdir(parents=True, exist_ok=True)
    plan.measured_only().save(run_dir / "plan.json")
    code = launch_trial(plan, run_dir / "plan.json", f"probe {name}", on_progress)
    measured = last_measurement(read(run_dir / "events.jsonl"))
    if code or measured is None:
        return Probe(
            name=name,
            predicted=predicted,
            failed=f"its first steps failed with exit code {code}, as told above",
        )
    return Probe.of(name, predicted, measured)


def short(candidate: Candidate, run_dir: Path, rows: Path | None) -> Config:
    """The candidate's config for a few steps that leave nothing behind."""
    config = candidate.config
    each = config.algorithm.steps_in_turn
    steps = each * math.ceil(STEPS / each)
    nothing = {"report_to": (), "callbacks": (), "profile": None}
    sections: dict[str, Any] = {
        "run": config.run.model_copy(
            update={"dir": str(run_dir), "steps": steps, "log_every": 1, **nothing}
        ),
        "launch": config.launch.model_copy(
            update={"nproc": candidate.layout.mesh.world_size, "max_restarts": 0}
        ),
        "checkpoint": CheckpointConfig(export="none", asynchronous=False),
        "eval": EvalConfig(
            at_start=False,
            micro_batch=config.eval.micro_batch,
            metric=config.eval.metric,
            mode=config.eval.mode,
        ),
    }
    if rows is not None:
        same = {name: getattr(config.data, name) for name in SAME}
        sections["data"] = DataConfig(
            train=[FileSource(path=str(rows))], cache_dir=str(run_dir / "cache"), **same
        )
    return config.model_copy(update=sections)
