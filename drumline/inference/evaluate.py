"""`drumline eval`: score a checkpoint on held-out rows, on held-out prompts, or in lm-eval's tasks.

`evaluate` computes the metrics that training computes, by the same loop and under the same
strategy. `answer_held_out_prompts` generates answers to held-out prompts in this process.
`score_with_lm_eval` lets lm-eval score a model. Each writes a section of RUN/eval.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from drumline.checkpoint.load import check, newest, read_pointer
from drumline.checkpoint.manifest import step_of
from drumline.checkpoint.remote import find_newest_or_none, local_copy
from drumline.config.data import PROMPT_FORMS, TasksSource
from drumline.config.load import Loaded, load, override
from drumline.config.rollouts import HFGenerator, TaskReward
from drumline.data.answers import last_answer
from drumline.data.cache import TokenCache
from drumline.data.sources import read_rows
from drumline.data.targets import Encoder
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
from drumline.launch.early import EarlyRanks
from drumline.launch.environment import launched_by
from drumline.launch.local import LocalRanks, launch
from drumline.models.build import ModelHead, lay_out
from drumline.models.classes import WRITING, require_classes
from drumline.models.export import plan_of
from drumline.models.load import load_config
from drumline.plan.explain import default_run_dir, strategy_name
from drumline.plan.plan import Plan
from drumline.report.bars import bars
from drumline.report.progress import lines_of_failed_rewards
from drumline.rl.generate import Completion, max_positions
from drumline.rl.rewards import EpisodeText, Rewards
from drumline.system.files import write_whole
from drumline.telemetry.events import Eval, Event
from drumline.train.setup import EVAL_RESULTS, Request, make_plan
from drumline.train.tasks import harness_errors, metrics_of
from drumline.version import __version__

# Overrides of an evaluation, which leaves nothing but its result: it is not restarted, reports to no
# tracker, and copies no checkpoint to a URL, to other hosts or to memory.
EVALUATION_OVERRIDES = [
    "launch.max_restarts=0",
    "run.report_to=[]",
    "checkpoint.url=null",
    "checkpoint.replicas=0",
    "checkpoint.in_memory_every=null",
]
# Prompts that are answered together.
ANSWER_BATCH = 16
# The most answers that eval.json keeps.
SHOWN = 20
# Requests that lm-eval computes together.
LM_EVAL_BATCH = 8
YAML = (".yaml", ".yml")
TRUSTED = "model.trust_remote_code=true"


def evaluate(
    config_path: Path, overrides: list[str], place: Path | None, early: EarlyRanks | None = None
) -> int:
    """Score weights on the held-out set under the config's strategy, and return the exit code.

    It prints a table and writes the section `held_out` of RUN/eval.json.

    Args:
        config_path: A config, or the folder of a run.
        overrides: As on the command line.
        place: The weights; see `find_weights`.
        early: Ranks that were started ahead and wait for a plan.

    Raises UserError under torchrun and the like, whose ranks would each start ranks of their own.
    """
    launcher = launched_by()
    if launcher is not None:
        what = "drumline eval starts its own processes"
        raise UserError(what, where=str(launcher), fix="call it by itself")
    plan, weights, run_dir = plan_evaluation(config_path, overrides, place)
    began = time.time()
    checkpoint = None
    if weights.checkpoint is not None:
        checkpoint = str(weights.checkpoint)
    # The ranks write here, and leave the run folder alone.
    scratch = Path(tempfile.mkdtemp(prefix="drumline-eval-"))
    try:
        exit_code, events = _run_ranks(plan, scratch, checkpoint, early)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    # If the ranks failed, or measured nothing, their logs in the folder say why, so it is kept.
    if exit_code != 0:
        return exit_code
    evals = [event for event in events if isinstance(event, Eval)]
    if not evals:
        raise DrumlineError("the ranks ended without a metric", where=str(scratch))
    shutil.rmtree(scratch, ignore_errors=True)
    found = evals[-1]
    result = {
        "weights": weights.origin,
        "checkpoint": checkpoint,
        "strategy": strategy_name(plan),
        "world_size": plan.mesh.world_size,
        "precision": plan.precision,
        "seconds": time.time() - began,
        "step": found.step if checkpoint else None,
        "samples": found.samples,
        "metrics": found.metrics,
        "reward_failures": found.reward_failures,
    }
    show(f"{weights.origin} on {found.samples} held-out samples", found.metrics)
    for line in lines_of_failed_rewards(found.reward_failures or {}):
        Console(stderr=True).print(
            line, style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    write_section(run_dir, "held_out", result)
    return 0


def _run_ranks(
    plan: Plan, scratch: Path, checkpoint: str | None, early: EarlyRanks | None
) -> tuple[int, list[Event]]:
    """Evaluate on the plan's ranks, which write to `scratch`. Return their exit code and events."""
    (scratch / "checkpoints").mkdir()
    scratch_plan = plan.model_copy(update={"run_dir": str(scratch)})
    plan_file = scratch / "plan.json"
    scratch_plan.save(plan_file)
    events: list[Event] = []
    exit_code = launch(
        scratch_plan,
        plan_file,
        checkpoint,
        events.append,
        "drumline.inference.rank",
        trial=True,
        ranks=LocalRanks.from_plan(scratch_plan, early),
    )
    return exit_code, events


@contextmanager
def fetch_checkpoint(
    checkpoint: str | None, config_path: Path, overrides: list[str]
) -> Iterator[Path | None]:
    """Yield the folder of the checkpoint to evaluate; None: take what the run folder has.

    A checkpoint at a URL is copied to this machine for the time of the context. The config's
    checkpoint.url is used if `checkpoint` is None and the run folder has no checkpoint.
    """
    if checkpoint is None and config_path.suffix in YAML:
        checkpoint = _url_of_run(config_path, overrides)
    if checkpoint is None:
        yield None
        return
    with local_copy(checkpoint) as folder:
        yield folder


def _url_of_run(config_path: Path, overrides: list[str]) -> str | None:
    """Return the config's checkpoint.url if it has a checkpoint and the run folder has none.

    Else return None.
    """
    config = _load_untrusted(config_path, overrides).config
    url = config.checkpoint.url
    # The run folder is asked first: the URL costs a request.
    if url is None or best_or_newest(run_folder(config_path, overrides)) is not None:
        return None
    if find_newest_or_none(url) is None:
        return None
    return url


def plan_evaluation(
    config_path: Path, overrides: list[str], place: Path | None
) -> tuple[Plan, EvaluatedWeights, Path]:
    """Return the plan with its held-out set prepared, the weights to evaluate, and the run folder.

    Raises ConfigError if there is no held-out set.
    """
    run_dir = run_folder(config_path, overrides)
    weights = find_weights(config_path, [*overrides, *EVALUATION_OVERRIDES], place, run_dir)
    config = weights.loaded.config
    config = config.model_copy(update={"eval": config.eval.keep_metrics_only()})
    request = Request(replace(weights.loaded, config=config))
    with bars(Console(stderr=True)) as on_progress:
        plan = make_plan(request, on_progress=on_progress)
    if plan.data is None or not plan.data.eval_caches:
        fix = "set data.eval, or data.holdout: a number of rows"
        raise ConfigError("there is no held-out set", where="data", fix=fix)
    # A head that is missing would be drawn at random, and its metrics would be noise.
    is_folder_of_model = place is not None and weights.checkpoint is None
    if is_folder_of_model and plan.config.head not in WRITING:
        _require_head(plan, str(place))
    return plan, weights, run_dir


def _require_head(plan: Plan, where: str) -> None:
    """Raise ModelError for a model without a trained head, or with other classes than the data's."""
    model = plan.config.model
    if plan.labels:
        require_classes(load_config(plan.model_path, model), plan.labels, where)
    lay_out(
        plan.model_path,
        model,
        seed=0,
        head=ModelHead(plan.config.head, plan.labels, may_be_drawn=False),
    )


def run_folder(config_path: Path, overrides: list[str]) -> Path:
    """Return the run folder of `drumline train` with the same config and overrides."""
    loaded = _load_untrusted(config_path, overrides)
    return Path(loaded.config.run.dir or default_run_dir(loaded.path))


def _load_untrusted(config_path: Path, overrides: list[str]) -> Loaded:
    """Return a config, which only an override can allow to run code of its own.

    It may be that of a run folder that somebody else made.
    """
    return load(config_path, overrides, trusted=False)


@dataclass(frozen=True)
class EvaluatedWeights:
    """The weights to evaluate."""

    # The config that they are evaluated under.
    loaded: Loaded
    # Laid over the model of the config. None: the model of `loaded` as it is published.
    checkpoint: Path | None
    # For readers: a path, or "MODEL, not trained".
    origin: str


def find_weights(
    config_path: Path, overrides: list[str], place: Path | None, run_dir: Path
) -> EvaluatedWeights:
    """Return the weights at a place, with the config that they are evaluated under.

    Args:
        config_path: A config, or the folder of a run.
        overrides: As on the command line.
        place: A checkpoint, a run folder or a Hugging Face folder. None: `run_dir`, and before it
            has a checkpoint the model that training starts from.
        run_dir: The run folder of the config.

    Raises CheckpointError for a place that is none of them.
    """
    loaded = _load_untrusted(config_path, overrides)
    if place is None or (place / "plan.json").exists():
        return _weights_of_run(loaded, place, run_dir)
    if (place / "config.json").exists():
        # The folder has a whole model. Nothing of the config's own model may change it.
        own = [
            override("model.id", place.absolute()),
            "model.revision=null",
            "model.init=pretrained",
            "model.config={}",
            "model.shape=null",
            "adapter=none",
        ]
        if (place / "tokenizer_config.json").exists():
            own += ["model.tokenizer=null", "model.new_tokens=[]"]
        own_loaded = _load_untrusted(config_path, [*overrides, *own])
        return EvaluatedWeights(own_loaded, None, str(place))
    check(place, verify=False, collective=False)
    return EvaluatedWeights(loaded, place, str(place))


def _weights_of_run(loaded: Loaded, place: Path | None, run_dir: Path) -> EvaluatedWeights:
    """Return the weights of the run at `place`, which must have a checkpoint.

    Without `place` they are those of `run_dir`, which may have none.
    """
    checkpoint = best_or_newest(place or run_dir)
    if checkpoint is not None:
        return EvaluatedWeights(loaded, checkpoint, str(checkpoint))
    if place is not None:
        what = "this run has no whole checkpoint"
        fix = "train first, or set checkpoint.every"
        raise CheckpointError(what, where=str(place), fix=fix)
    name = loaded.config.model.id or "the model"
    return EvaluatedWeights(loaded, None, f"{name}, not trained")


def best_or_newest(run_dir: Path) -> Path | None:
    """Return a run's best checkpoint by eval.metric, else its newest whole one.

    None if there is none.
    """
    root = run_dir / "checkpoints"
    best = read_pointer(root, "best")
    if best is not None:
        return best
    return newest(root, verify=False, collective=False).path


def show(title: str, metrics: dict[str, Any]) -> None:
    """Print a table of metrics under a title."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if value is None:
            # A mean over nothing, or no finite number.
            shown = "no number"
        elif isinstance(value, float):
            shown = f"{value:.4f}"
        else:
            shown = str(value)
        table.add_row(name, shown)
    console = Console()
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)


def write_section(run_dir: Path, section: str, result: dict[str, Any]) -> None:
    """Write a section of RUN/eval.json; the other sections stay. Raises EnvironmentFault."""
    path = run_dir / EVAL_RESULTS
    fix = "move it away, or fix the folder"
    with disk_errors("cannot be written", str(path), EnvironmentFault, fix):
        sections = {}
        if path.exists():
            sections = read_object(path, EnvironmentFault, "move it away")
        sections[section] = {"time": time.time(), "drumline": __version__, **result}
        run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sections, indent=2) + "\n")
    Console(stderr=True).print(f"written to {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class HeldOutPrompt:
    """A held-out prompt as tokens, and its right answer."""

    tokens: list[int]
    answer: str
    # The columns that the verifier of a task reads; empty for a row of data.
    meta: dict[str, Any] = field(default_factory=dict)


def answer_held_out_prompts(
    config_path: Path, overrides: list[str], place: Path | None, number: int
) -> int:
    """Answer held-out prompts greedily in this process, and return the exit code.

    It prints metrics and writes the section `generated` of RUN/eval.json. The metrics have how many
    answers are the row's word for word. If the prompts are tasks of reasoning-gym, they also have
    what the tasks' verifiers give.

    Args:
        config_path: A config, or the folder of a run.
        overrides: As on the command line.
        place: The weights; see `find_weights`.
        number: How many prompts are answered, from the first on.
    """
    plan, weights, run_dir = plan_evaluation(config_path, overrides, place)
    _require_answers(plan)
    began = time.time()
    model = open_plan(plan, weights.checkpoint)
    base_dir = Path(plan.base_dir)
    max_length = plan.config.data.max_length
    first_prompts = islice(_read_prompts(plan, model, base_dir), number)
    prompts = drop_too_long_prompts(first_prompts, max_length)
    texts = []
    completions = []
    for text, completion in complete_prompts(
        model, [prompt.tokens for prompt in prompts], max_length
    ):
        texts.append(text)
        completions.append(completion)
    metrics = _answer_metrics(prompts, texts, completions)
    if all(prompt.meta for prompt in prompts):
        metrics |= _verifier_metrics(prompts, texts, base_dir)
    show(f"{weights.origin} on {len(prompts)} held-out prompts, answered greedily", metrics)
    shown = []
    for text, prompt in zip(texts[:SHOWN], prompts[:SHOWN], strict=True):
        shown.append({"answer": text, "right": prompt.answer})
    result = {
        "weights": weights.origin,
        "seconds": time.time() - began,
        "metrics": metrics,
        "answers": shown,
    }
    write_section(run_dir, "generated", result)
    return 0


def _require_answers(plan: Plan) -> None:
    """Raise UserError for a plan whose held-out prompts are not answered here."""
    algorithm = plan.config.algorithm
    if not algorithm.has_answers:
        what = f"it is for algorithm sft, and this is {algorithm.kind}"
        fix = "leave it out: held-out prompts of ppo, grpo, online_dpo and gkd are answered anyway"
        raise UserError(what, where="--generate", fix=fix)
    if any(cache.info.get("images") for cache in open_held_out(plan)):
        what = "prompts with images are not answered here"
        fix = "leave it out, or hold out rows of text alone"
        raise UserError(what, where="--generate", fix=fix)


def _answer_metrics(
    prompts: list[HeldOutPrompt], texts: list[str], completions: list[Completion]
) -> dict[str, float]:
    """Return the metrics of answers.

    `exact`: the share of answers that are the right one word for word. `ended`: the share that
    ended by itself. `tokens`: the mean length in tokens.
    """
    number = len(prompts)
    exact = 0
    for text, prompt in zip(texts, prompts, strict=True):
        if text.strip() == prompt.answer.strip():
            exact += 1
    ended = sum(completion.ended for completion in completions)
    tokens = sum(len(completion.tokens) for completion in completions)
    return {"exact": exact / number, "ended": ended / number, "tokens": tokens / number}


def _verifier_metrics(
    prompts: list[HeldOutPrompt], texts: list[str], base_dir: Path
) -> dict[str, float]:
    """Return the metrics of answers to tasks, all of which have a verifier.

    `verified`: the mean reward of the verifiers. `reward_failed`: the share of answers that they
    fail on, which are not in the mean.
    """
    items = []
    for text, prompt in zip(texts, prompts, strict=True):
        # A verifier reads neither the prompt nor the number of tokens.
        items.append(EpisodeText("", text, 0, prompt.meta))
    with Rewards([TaskReward()], base_dir) as rewards:
        scores = rewards.score(items)
    known = [score.value for score in scores if score.applies and not score.failures]
    metrics = {}
    if known:
        metrics["verified"] = sum(known) / len(known)
    metrics["reward_failed"] = 1 - len(known) / len(scores)
    return metrics


def drop_too_long_prompts(found: Iterable[HeldOutPrompt], max_length: int) -> list[HeldOutPrompt]:
    """Return the prompts that leave room for an answer. Prints how many do not.

    `max_length`: the most tokens of a prompt and its answer. Raises DataError if no prompt is left.
    """
    prompts = list(found)
    if not prompts:
        what = "no held-out row has a prompt before its answer"
        raise DataError(what, where="data.eval", fix="leave --generate out")
    kept = [prompt for prompt in prompts if len(prompt.tokens) < max_length]
    lost = len(prompts) - len(kept)
    what = f"{lost} of {len(prompts)} held-out prompts leave no room for an answer within data.max_length {max_length}"
    if not kept:
        raise DataError(what, where="data.eval", fix="raise data.max_length")
    if lost > 0:
        Console(stderr=True).print(
            f"note: {what}: they are passed over", highlight=False, soft_wrap=True
        )
    return kept


def complete_prompts(
    model: Model, prompts: list[list[int]], max_length: int
) -> list[tuple[str, Completion]]:
    """Return text and tokens of the greedy answer to each prompt, in the prompts' order.

    `prompts`: the tokens of each. `max_length`: the most tokens of a prompt and its answer; an
    answer that is cut there has not ended.

    Prompts whose answers may have about the same length are answered together, up to the longest of
    these. No sequence may pass the model's positions.
    """
    # The most tokens of each answer.
    limits = [max_length - len(prompt) for prompt in prompts]
    # A model that names no number of positions has no limit.
    model_positions = max_positions(model.module) or 2 * max_length
    spare_positions = max(0, model_positions - max_length)
    done: dict[int, tuple[str, Completion]] = {}
    for group in _group_by_limit(limits, spare_positions):
        largest_limit = limits[group[-1]]
        greedy = HFGenerator(top_k=1, max_new_tokens=largest_limit, batch=ANSWER_BATCH)
        prompts_of_group = [prompts[index] for index in group]
        answers = model.complete(prompts_of_group, greedy, 0)
        for index, (text, answer) in zip(group, answers, strict=True):
            limit = limits[index]
            # The generator knows only the largest limit.
            if len(answer.tokens) > limit:
                answer = Completion(answer.tokens[:limit], answer.log_probs[:limit], False)
                text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            done[index] = (text, answer)
    return [done[index] for index in range(len(prompts))]


def _group_by_limit(limits: list[int], spare_positions: int) -> list[list[int]]:
    """Return the indices of prompts in groups with similar limits, the smallest limit first.

    The largest limit of a group is at most twice its smallest, so that little is generated in vain,
    and at most `spare_positions` more, so that the longest prompt of the group has positions for
    it.

    `limits`: the most tokens of each answer. `spare_positions`: the model's positions beyond the
    most tokens of a prompt and its answer.
    """
    groups: list[list[int]] = []
    smallest = 0
    for index in sorted(range(len(limits)), key=limits.__getitem__):
        limit = limits[index]
        # The first prompt opens a group, since every answer may have a token.
        if limit > min(2 * smallest, smallest + spare_positions):
            groups.append([])
            smallest = limit
        groups[-1].append(index)
    return groups


def _read_prompts(plan: Plan, model: Model, base_dir: Path) -> Iterator[HeldOutPrompt]:
    """Yield the held-out prompts.

    If all of data.eval is tasks, they have what the tasks' verifiers need. Otherwise the prompt of
    a held-out row is all that stands before its last answer.
    """
    data = plan.config.data
    if data.eval and all(isinstance(source, TasksSource) for source in data.eval):
        encoder = Encoder(model.tokenizer, everything=False, data=data)
        for source in data.eval:
            for row in read_rows(source, base_dir, PROMPT_FORMS):
                _, prompt_ids = encoder.prompt(row)
                answer = str(row.extra["answer"])
                yield HeldOutPrompt(prompt_ids, answer, row.extra)
        return
    for cache in open_held_out(plan):
        for sample in range(len(cache)):
            # A packed sample has several rows.
            for tokens, learn in cache.segments(sample):
                start, stop = last_answer(learn)
                # An answer at the very start has no prompt.
                if start:
                    answer_ids = tokens[start:stop].tolist()
                    answer = model.tokenizer.decode(answer_ids, skip_special_tokens=True)
                    yield HeldOutPrompt(tokens[:start].tolist(), answer)


def open_held_out(plan: Plan) -> list[TokenCache]:
    """Return the tokens of the held-out sets."""
    assert plan.data is not None, "`plan_evaluation` requires a held-out set"
    return [TokenCache.open(folder) for folder in plan.data.eval_caches.values()]


def score_with_lm_eval(
    config_path: Path,
    overrides: list[str],
    place: Path | None,
    tasks: Sequence[str],
    limit: int | None,
    include_path: Path | None,
) -> int:
    """Score a model in lm-eval's tasks, and return the exit code.

    It prints a table, and writes the section `lm_eval` of RUN/eval.json if `config_path` is a config
    or a run, whichever weights are scored.

    Args:
        config_path: A config, the folder of a run, or any folder that `lm_eval_model` takes.
        overrides: As on the command line.
        place: The weights; None: those of the config's run, or of the folder itself.
        tasks: By lm-eval's names.
        limit: Questions of each task; None: all.
        include_path: A folder of more task YAMLs.

    Raises EnvironmentFault without the package, and for whatever lm-eval fails on: a task that
    it does not know, data that cannot be had.
    """
    require_package("lm_eval", "--lm-eval")
    is_config = config_path.suffix in YAML
    own_folder = config_path
    if is_config:
        own_folder = run_folder(config_path, overrides)
    source = place or own_folder
    if not source.exists():
        what = "no such run or folder"
        fix = "train first, or name one with --checkpoint"
        raise CheckpointError(what, where=str(source), fix=fix)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.time()
    model = lm_eval_model(source, TRUSTED in overrides)
    results = _run_lm_eval(model, list(tasks), limit, include_path)
    metrics = {}
    for task, values in results.items():
        for name, value in values.items():
            metrics[f"{task} {name}"] = value
    show(f"{source} by lm-eval", metrics)
    # A folder that is no run gets no eval.json.
    if is_config or (own_folder / "plan.json").exists():
        result = {"seconds": time.time() - began, "limit": limit, "tasks": results}
        write_section(own_folder, "lm_eval", result)
    return 0


def lm_eval_model(source: Path, trust: bool = False) -> dict[str, Any]:
    """Return keyword arguments of lm-eval's class HFLM that name a model.

    For an export, `pretrained` is the name of its folder, which lm-eval loads itself. For a
    checkpoint, or a run that has no export, it is the module in memory.

    Args:
        source: A run folder, a checkpoint, or a Hugging Face folder.
        trust: Run code that comes with the model.
    """
    is_run = (source / "plan.json").exists()
    folder: Path | None = source
    if is_run:
        folder = exported_folder(source)
    if folder is not None and (folder / "config.json").exists():
        return {
            "pretrained": str(folder),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "trust_remote_code": trust,
        }
    if step_of(source.name) is not None:
        # RUN/checkpoints/step-N
        run_dir = source.parent.parent
        model = open_plan(plan_of(run_dir, trust), source)
    else:
        with bars(Console(stderr=True)) as on_progress:
            model = open_model(str(source), on_progress, trust)
    return {"pretrained": model.module, "tokenizer": model.tokenizer}


def _run_lm_eval(
    model: dict[str, Any], tasks: list[str], limit: int | None, include_path: Path | None
) -> dict[str, dict[str, float]]:
    """Return task → metric → value, by lm-eval.

    `model`: as `lm_eval_model` returns it. lm-eval makes its own object from the name of a folder,
    and takes a module in an object made here.
    """
    # An optional package.
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with harness_errors("--lm-eval " + ",".join(tasks)):
        manager = TaskManager(include_path=str(include_path) if include_path else None)
        arguments: dict[str, Any]
        if isinstance(model["pretrained"], str):
            arguments = {"model": "hf", "model_args": model, "batch_size": LM_EVAL_BATCH}
        else:
            arguments = {"model": HFLM(**model, batch_size=LM_EVAL_BATCH)}
        evaluation = lm_eval.simple_evaluate(
            tasks=tasks, limit=limit, task_manager=manager, **arguments
        )
    assert evaluation is not None, "this process is the first rank"
    return metrics_of(evaluation["results"])
