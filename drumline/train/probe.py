"""`drumline plan --probe`: run a few steps of the best candidates, each in a temporary folder."""

from __future__ import annotations

import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.config.config import CheckpointConfig, Config
from drumline.config.data import DataConfig, FileSource
from drumline.config.load import Loaded
from drumline.config.run import EvalConfig
from drumline.errors import EnvironmentFault
from drumline.planner.search.answer import Answer, Candidate, correct_answer, require_here
from drumline.planner.search.correction import Probe
from drumline.report.bars import OnProgress
from drumline.telemetry.events import newest_measurement, read

# Two steps to settle, one that is counted, two that are timed.
STEPS = 5
# Keys of `data` that do not choose the rows.
KEPT_DATA_KEYS = ("max_length", "packing", "workers", "prefetch", "verify")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LETTERS_OF_WORD = 4


def probe(answer: Answer, loaded: Loaded, on_progress: OnProgress) -> Answer:
    """Run a few steps of `candidates_to_try`, and return the answer with corrected estimates.

    They train on the run's data if these are prepared, and otherwise on random words. Nothing is
    evaluated, saved or left on disk.

    Raises EnvironmentFault if the devices of the question are not those here, or there are no rows,
    and whatever `drumline train` would raise before it starts.
    """
    require_here(answer.question.cluster)
    # A reference that is precomputed would be a pass over all pairs.
    has_pass_over_data = loaded.config.algorithm.reference_of(loaded.config) == "precomputed"
    uses_own_data = answer.question.data is not None and not has_pass_over_data
    with tempfile.TemporaryDirectory(prefix="drumline-probe-") as folder:
        root = Path(folder)
        rows: Path | None = None
        if answer.ranked and not uses_own_data:
            rows = random_rows(loaded.config, answer.ranked[0], root / "rows.jsonl")
        probes = []
        for number, candidate in enumerate(candidates_to_try(answer)):
            probes.append(_run_candidate(candidate, loaded, root / str(number), rows, on_progress))
    return correct_answer(answer, tuple(probes))


def candidates_to_try(answer: Answer) -> list[Candidate]:
    """Return the first candidate, and the next one of another family if there is one.

    Two candidates of a family are too alike to choose between.
    """
    first = answer.ranked[:1]
    rest = answer.ranked[1:]
    second = [candidate for candidate in rest if candidate.family != first[0].family]
    if not second:
        second = list(rest)
    return [*first, *second[:1]]


def random_rows(config: Config, candidate: Candidate, path: Path) -> Path:
    """Write rows of random words to `path`, enough for all steps, and return the path.

    Each row is as long as the config allows. Raises EnvironmentFault if the algorithm cannot train
    on random words.
    """
    draw = random.Random(config.run.seed)

    def random_text(number: int) -> str:
        drawn = []
        for _ in range(max(1, number)):
            drawn.append("".join(draw.choices(LETTERS, k=LETTERS_OF_WORD)))
        return " ".join(drawn)

    rows = []
    for _ in range(STEPS * candidate.layout.batch.global_samples):
        rows.append(config.algorithm.random_row(random_text, config.data.max_length))
    if None in rows:
        raise EnvironmentFault(
            f"{config.algorithm.kind} cannot be tried on random words, and its data are not prepared",
            where="--probe",
            fix="prepare them first: drumline prepare CONFIG.yaml",
        )
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def _run_candidate(
    candidate: Candidate, loaded: Loaded, run_dir: Path, rows: Path | None, on_progress: OnProgress
) -> Probe:
    """Run a few steps of a candidate, and return what they took.

    `rows`: data to train on, in place of the run's.
    """
    from drumline.launch.local import launch_trial
    from drumline.train.setup import Request, make_plan

    name = candidate.name
    predicted = candidate.estimate
    config = short_config(candidate, run_dir, rows)
    plan = make_plan(Request(replace(loaded, config=config)), on_progress=on_progress)
    run_dir.mkdir(parents=True, exist_ok=True)
    plan.measurement_plan().save(run_dir / "plan.json")
    code = launch_trial(plan, run_dir / "plan.json", f"probe {name}", on_progress)
    measured = newest_measurement(read(run_dir / "events.jsonl"))
    if code or measured is None:
        return Probe(
            name=name,
            predicted=predicted,
            failed=f"its first steps failed with exit code {code}, as told above",
        )
    return Probe.from_measurement(name, predicted, measured)


def short_config(candidate: Candidate, run_dir: Path, rows: Path | None) -> Config:
    """Return the candidate's config for a few steps that leave nothing behind."""
    config = candidate.config
    # Steps that share a rollout are taken together.
    steps_of_rollout = config.algorithm.steps_per_rollout
    steps = steps_of_rollout * math.ceil(STEPS / steps_of_rollout)
    run = {
        "dir": str(run_dir),
        "steps": steps,
        "log_every": 1,
        "report_to": (),
        "callbacks": (),
        "profile": None,
    }
    launch = {"nproc": candidate.layout.mesh.world_size, "max_restarts": 0}
    sections: dict[str, Any] = {
        "run": config.run.model_copy(update=run),
        "launch": config.launch.model_copy(update=launch),
        "checkpoint": CheckpointConfig(export="none", asynchronous=False),
        "eval": EvalConfig(
            at_start=False,
            micro_batch=config.eval.micro_batch,
            metric=config.eval.metric,
            mode=config.eval.mode,
        ),
    }
    if rows is not None:
        same = {name: getattr(config.data, name) for name in KEPT_DATA_KEYS}
        sections["data"] = DataConfig(
            train=[FileSource(path=str(rows))], cache_dir=str(run_dir / "cache"), **same
        )
    return config.model_copy(update=sections)
