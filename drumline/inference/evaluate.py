"""`drumline eval`: a checkpoint's metrics on the held-out set, its answers to held-out prompts, and its score in lm-eval's tasks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from drumline import __version__
from drumline.checkpoint.load import check, newest, pointed
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.remote import at_hand, choose_or_none
from drumline.core.data import PROMPT_FORMS, TasksSource
from drumline.core.explain import default_run_dir, strategy_name
from drumline.core.files import write_whole
from drumline.core.load import Loaded, load, override
from drumline.core.plan import Plan
from drumline.core.rollouts import HFGenerator, TaskReward
from drumline.data.answers import last_answer
from drumline.data.cache import TokenCache
from drumline.data.sources import read_rows
from drumline.data.templates import Encoder
from drumline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DrumlineError,
    EnvironmentFault,
    UserError,
)
from drumline.foreign import disk_errors, read_object, require_package
from drumline.inference.model import Model, exported_folder, open_model, open_plan
from drumline.launchers.early import EarlyRanks
from drumline.launchers.environment import launched_by
from drumline.launchers.local import launch
from drumline.models.build import lay_out
from drumline.models.classes import LM, require_classes
from drumline.models.export import plan_of
from drumline.models.load import load_config
from drumline.report.bars import bars
from drumline.report.progress import failed
from drumline.rl.generate import Completion, positions
from drumline.rl.rewards import Item, Rewards
from drumline.telemetry.events import Eval, Event
from drumline.train.setup import EVAL_RESULTS, Request, make_plan
from drumline.train.tasks import harness_errors, metrics_of

# An evaluation is over or not: nothing is started again, and only the caller gets the result.
ALONE = [
    "launch.max_restarts=0",
    "run.report_to=[]",
    "checkpoint.url=null",
    "checkpoint.replicas=0",
    "checkpoint.in_memory_every=null",
]
TOGETHER = 16  # sequences generated side by side
SHOWN = 20  # answers that eval.json keeps
YAML = (".yaml", ".yml")
TRUSTED = "model.trust_remote_code=true"


def evaluate(
    config_path: Path, overrides: list[str], place: Path | None, early: EarlyRanks | None = None
) -> int:
    """Score the weights at `place` (find_weights) under the config's strategy, print a table, and write RUN/eval.json.

    `early`: ranks that wait already.
    """
    if launched_by() is not None:
        raise UserError(
            "drumline eval starts its own processes",
            where=str(launched_by()),
            fix="call it by itself",
        )
    plan, weights, run_dir = planned(config_path, overrides, place)
    began = time.time()
    # Ranks leave the run folder alone; this one is kept if they fail.
    scratch = Path(tempfile.mkdtemp(prefix="drumline-eval-"))
    events: list[Event] = []
    (scratch / "checkpoints").mkdir()
    there = plan.model_copy(update={"run_dir": str(scratch)})
    there.save(scratch / "plan.json")
    start = str(weights.checkpoint) if weights.checkpoint else None
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        if code := launch(
            there,
            scratch / "plan.json",
            start,
            events.append,
            "drumline.inference.rank",
            trial=True,
            early=early,
        ):
            at_end.pop_all()
            return code
    found = [event for event in events if isinstance(event, Eval)]
    if not found:
        raise DrumlineError("the ranks ended without a metric", where=str(scratch))
    result = {
        "weights": weights.origin,
        "checkpoint": start,
        "strategy": strategy_name(plan),
        "world_size": plan.mesh.world_size,
        "precision": plan.precision,
        "seconds": time.time() - began,
        "step": found[-1].step if start else None,
        "samples": found[-1].samples,
        "metrics": found[-1].metrics,
        "reward_failures": found[-1].reward_failures,
    }
    show(f"{weights.origin} on {found[-1].samples} held-out samples", found[-1].metrics)
    for line in failed(found[-1].reward_failures or {}):
        Console(stderr=True).print(
            line, style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    write(run_dir, "held_out", result)
    return 0


@contextmanager
def placed(
    checkpoint: str | None, config_path: Path, overrides: list[str]
) -> Iterator[Path | None]:
    """The folder of what is evaluated, of a URL a copy; None: what the run folder has. Where it has nothing, checkpoint.url is tried."""
    if checkpoint is None and config_path.suffix in YAML:
        url = load(config_path, overrides, trusted=False).config.checkpoint.url
        if (
            url is not None
            and of_run(run_folder(config_path, overrides)) is None
            and choose_or_none(url) is not None
        ):
            checkpoint = url
    if checkpoint is None:
        yield None
        return
    with at_hand(checkpoint) as folder:
        yield folder


def planned(
    config_path: Path, overrides: list[str], place: Path | None
) -> tuple[Plan, Weights, Path]:
    """The plan with its held-out set prepared, what is evaluated, and the run folder. Raises ConfigError without a held-out set."""
    run_dir = run_folder(config_path, overrides)
    weights = find_weights(config_path, [*overrides, *ALONE], place, run_dir)
    with bars(Console(stderr=True)) as on_progress:
        config = weights.loaded.config
        config = config.model_copy(update={"eval": config.eval.of_metrics()})
        plan = make_plan(Request(replace(weights.loaded, config=config)), on_progress=on_progress)
    if plan.data is None or not plan.data.eval_caches:
        raise ConfigError(
            "there is no held-out set",
            where="data",
            fix="set data.eval, or data.holdout: a number of rows",
        )
    if plan.config.head not in LM and place is not None and weights.checkpoint is None:
        if plan.labels:
            require_classes(
                load_config(plan.model_path, plan.config.model), plan.labels, str(place)
            )
        lay_out(
            plan.model_path,
            plan.config.model,
            seed=0,
            head=plan.config.head,
            labels=plan.labels,
            draws=False,
        )
    return plan, weights, run_dir


def run_folder(config_path: Path, overrides: list[str]) -> Path:
    """The run folder that `drumline train` has with the same config and overrides."""
    loaded = load(config_path, overrides)
    return Path(loaded.config.run.dir or default_run_dir(loaded.path))


@dataclass(frozen=True)
class Weights:
    """What is evaluated: `checkpoint` laid over the model of the config, or, where it is None, the model of `loaded` as it is published."""

    loaded: Loaded
    checkpoint: Path | None
    origin: str


def find_weights(
    config_path: Path, overrides: list[str], place: Path | None, run_dir: Path
) -> Weights:
    """`place`: a checkpoint, a run folder or a Hugging Face folder; None: `run_dir`, and before it has a checkpoint the model that training
    starts from. Raises CheckpointError for a place that is none of them."""
    loaded = load(config_path, overrides, trusted=False)
    if place is None or (place / "plan.json").exists():
        found = of_run(place or run_dir)
        if found is None and place is not None:
            raise CheckpointError(
                "this run has no whole checkpoint",
                where=str(place),
                fix="train first, or set checkpoint.every",
            )
        return Weights(
            loaded,
            found,
            str(found) if found else f"{loaded.config.model.id or 'the model'}, not trained",
        )
    if (place / "config.json").exists():
        own = [
            "model.revision=null",
            "model.init=pretrained",
            "model.config={}",
            "model.shape=null",
            "adapter=none",
        ]
        if (place / "tokenizer_config.json").exists():
            own += ["model.tokenizer=null", "model.new_tokens=[]"]
        return Weights(
            load(
                config_path,
                [*overrides, override("model.id", place.absolute()), *own],
                trusted=False,
            ),
            None,
            str(place),
        )
    check(place, verify=False, alone=True)
    return Weights(loaded, place, str(place))


def of_run(run_dir: Path) -> Path | None:
    """The best checkpoint by eval.metric, else the newest whole one; None where there is none."""
    root = run_dir / "checkpoints"
    return pointed(root, "best") or newest(root, verify=False, alone=True).path


def show(title: str, metrics: dict[str, Any]) -> None:
    """A table of metrics under a title, on standard output."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if value is None:  # a mean over nothing, or no finite number
            shown = "no number"
        elif isinstance(value, float):
            shown = f"{value:.4f}"
        else:
            shown = str(value)
        table.add_row(name, shown)
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)


def write(run_dir: Path, section: str, result: dict[str, Any]) -> None:
    """Lay a section over RUN/eval.json; the others stay. Raises EnvironmentFault."""
    path = run_dir / EVAL_RESULTS
    with disk_errors(
        "cannot be written", str(path), EnvironmentFault, "move it away, or mend the folder"
    ):
        known = read_object(path, EnvironmentFault, "move it away") if path.exists() else {}
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(
            path,
            json.dumps(
                {**known, section: {"time": time.time(), "drumline": __version__, **result}},
                indent=2,
            )
            + "\n",
        )
    Console(stderr=True).print(f"written to {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Question:
    """A prompt as tokens, and what would be right; `meta`: what the verifier of a task needs."""

    tokens: list[int]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


def answers(config_path: Path, overrides: list[str], place: Path | None, number: int) -> int:
    """Answer `number` held-out prompts greedily; report how many answers are the row's word for word, and, where the prompts are tasks of
    reasoning-gym, what their verifiers give. Writes RUN/eval.json."""
    plan, weights, run_dir = planned(config_path, overrides, place)
    if not plan.config.algorithm.has_answers:
        fix = "leave it out: held-out prompts of ppo and grpo are answered anyway"
        raise UserError(
            f"it is for algorithm sft, and this is {plan.config.algorithm.kind}",
            where="--generate",
            fix=fix,
        )
    if any(cache.info.get("images") for cache in held_out(plan)):
        raise UserError(
            "prompts with images are not answered here",
            where="--generate",
            fix="leave it out, or hold out rows of text alone",
        )
    began = time.time()
    model, base_dir = open_plan(plan, weights.checkpoint), Path(plan.base_dir)
    questions = with_room(
        islice(_questions(plan, model, base_dir), number), plan.config.data.max_length
    )
    texts, done = zip(
        *completed(model, [question.tokens for question in questions], plan.config.data.max_length),
        strict=True,
    )
    both = [*zip(texts, questions, strict=True)]
    metrics = {
        "exact": sum(text.strip() == question.answer.strip() for text, question in both)
        / len(both),
        "ended": sum(completion.ended for completion in done) / len(both),
        "tokens": sum(len(completion.tokens) for completion in done) / len(both),
    }
    if all(question.meta for question in questions):
        with Rewards([TaskReward()], base_dir) as rewards:
            scored = rewards.score([Item("", text, 0, question.meta) for text, question in both])
        known = [s.value for s in scored if s.applies and not s.failures]
        metrics |= {"verified": sum(known) / len(known)} if known else {}
        metrics["reward_failed"] = 1 - len(known) / len(scored)
    show(f"{weights.origin} on {len(both)} held-out prompts, answered greedily", metrics)
    shown = [{"answer": text, "right": question.answer} for text, question in both[:SHOWN]]
    write(
        run_dir,
        "generated",
        {
            "weights": weights.origin,
            "seconds": time.time() - began,
            "metrics": metrics,
            "answers": shown,
        },
    )
    return 0


def with_room(found: Iterable[Question], max_length: int) -> list[Question]:
    """Those that leave room for an answer; how many do not is noted. Raises DataError where none does."""
    questions = list(found)
    if not questions:
        raise DataError(
            "no held-out row has a prompt before its answer",
            where="data.eval",
            fix="leave --generate out",
        )
    kept = [question for question in questions if len(question.tokens) < max_length]
    lost = f"{len(questions) - len(kept)} of {len(questions)} held-out prompts"
    what = f"{lost} leave no room for an answer within data.max_length {max_length}"
    if not kept:
        raise DataError(what, where="data.eval", fix="raise data.max_length")
    if len(kept) < len(questions):
        Console(stderr=True).print(
            f"note: {what}: they are passed over", highlight=False, soft_wrap=True
        )
    return kept


def completed(
    model: Model, prompts: list[list[int]], max_length: int
) -> list[tuple[str, Completion]]:
    """The greedy answer to each prompt, in order, at most as long as `max_length` leaves room for. One that is cut there has not ended.

    Prompts with like rooms are answered together, by the largest of these: no row may pass the model's positions."""
    rooms = [max_length - len(prompt) for prompt in prompts]
    spare = max(0, (positions(model.module) or 2 * max_length) - max_length)
    groups, done = list[list[int]](), dict[int, tuple[str, Completion]]()
    for index in sorted(range(len(prompts)), key=rooms.__getitem__):
        least = rooms[groups[-1][0]] if groups else 0
        if rooms[index] > min(2 * least, least + spare):
            groups.append([])
        groups[-1].append(index)
    for group in groups:
        greedy = HFGenerator(top_k=1, max_new_tokens=rooms[group[-1]], batch=TOGETHER)
        for index, (text, answer) in zip(
            group, model.complete((prompts[index] for index in group), greedy, 0), strict=True
        ):
            if len(answer.tokens) > rooms[index]:
                answer = Completion(
                    answer.tokens[: rooms[index]], answer.log_probs[: rooms[index]], False
                )
                text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            done[index] = text, answer
    return [done[index] for index in range(len(prompts))]


def _questions(plan: Plan, model: Model, base_dir: Path) -> Iterator[Question]:
    """Tasks with what their verifiers need, where all of data.eval is tasks; else the last answer of each held-out row."""
    config = plan.config
    if config.data.eval and all(isinstance(source, TasksSource) for source in config.data.eval):
        encoder = Encoder(model.tokenizer, everything=False, data=config.data)
        for source in config.data.eval:
            for row in read_rows(source, base_dir, PROMPT_FORMS):
                yield Question(encoder.prompt(row)[1], str(row.extra["answer"]), row.extra)
        return
    for tokens, learn in (
        segment
        for cache in held_out(plan)
        for sample in range(len(cache))
        for segment in cache.segments(sample)
    ):
        start, stop = last_answer(learn)
        if start:
            answer = model.tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=True)
            yield Question(tokens[:start].tolist(), answer)


def held_out(plan: Plan) -> list[TokenCache]:
    assert plan.data is not None, "`planned` requires a held-out set"
    return [TokenCache.open(folder) for folder in plan.data.eval_caches.values()]


def harness(
    config_path: Path,
    overrides: list[str],
    place: Path | None,
    tasks: Sequence[str],
    limit: int | None,
    include_path: Path | None,
) -> int:
    """Score `place`, else the run of a config or the folder itself (see `model_of`), and write RUN/eval.json where there is a run.

    `limit`: questions of each task. `include_path`: a folder of further task YAMLs. Raises EnvironmentFault without the package, and
    for whatever the harness fails on: a task that it does not know, data that cannot be had.
    """
    require_package("lm_eval", "--lm-eval")
    source = place or (
        run_folder(config_path, overrides) if config_path.suffix in YAML else config_path
    )
    if not source.exists():
        raise CheckpointError(
            "no such run or folder",
            where=str(source),
            fix="train first, or name one with --checkpoint",
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.time()
    results = _evaluate(model_of(source, TRUSTED in overrides), list(tasks), limit, include_path)
    metrics = {
        f"{task} {name}": value for task, found in results.items() for name, value in found.items()
    }
    show(f"{source} by lm-eval", metrics)
    to = run_folder(config_path, overrides) if config_path.suffix in YAML else source
    if to != source or (source / "plan.json").exists():
        write(to, "lm_eval", {"seconds": time.time() - began, "limit": limit, "tasks": results})
    return 0


def model_of(source: Path, trust: bool = False) -> dict[str, Any]:
    """lm-eval's arguments for the model: the folder of an export, which it loads itself, or what a checkpoint holds, in memory: `source`,
    or that of a run."""
    folder = exported_folder(source) if (source / "plan.json").exists() else source
    if folder is not None and (folder / "config.json").exists():
        return {
            "pretrained": str(folder),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "trust_remote_code": trust,
        }
    if step_of(source.name) is not None:
        model = open_plan(plan_of(source.parent.parent, trust), source)
    else:
        with bars(Console(stderr=True)) as on_progress:
            model = open_model(str(source), on_progress, trust)
    return {"pretrained": model.module, "tokenizer": model.tokenizer}


def _evaluate(
    model: dict[str, Any], tasks: list[str], limit: int | None, include_path: Path | None
) -> dict[str, dict[str, float]]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with harness_errors("--lm-eval " + ",".join(tasks)):
        manager = TaskManager(include_path=str(include_path) if include_path else None)
        loaded = "hf" if isinstance(model["pretrained"], str) else HFLM(**model, batch_size=8)
        arguments = {"model_args": model, "batch_size": 8} if loaded == "hf" else {}
        found = lm_eval.simple_evaluate(
            model=loaded, tasks=tasks, limit=limit, task_manager=manager, **arguments
        )
    assert found is not None, "this process is the first rank"
    return metrics_of(found["results"])
