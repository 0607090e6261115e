"""Tasks of lm-eval, scored during a run with the current weights.

Each rank answers its share of the questions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drumline.config.run import EvalConfig
from drumline.dist.reduce import gather_from_ranks
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.foreign import expand_home, first_line, require_package
from drumline.models.containers import LOW_PRECISION
from drumline.plan.plan import Plan
from drumline.rl.generate import generation_mode, rank_and_world_size
from drumline.system.heartbeat import alive
from drumline.train.state import is_due

# Questions that the model answers side by side.
QUESTIONS_AT_ONCE = 8
WHERE = "eval.tasks"
# Characters of the harness's error in ours.
MOST_ERROR = 300


def metrics_of(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return task → metric → value of the harness's results.

    A metric is called NAME, or `NAME FILTER` if the answers were filtered. Its standard error, if it
    was computed, is called NAME_stderr.
    """
    metrics: dict[str, dict[str, float]] = {}
    for task, values in results.items():
        metrics[task] = {}
        for name, value in values.items():
            # The harness writes NAME,FILTER; what has no comma is no metric.
            if "," in name and isinstance(value, float | int):
                short_name = name.replace(",none", "").replace(",", " ")
                metrics[task][short_name] = float(value)
    return metrics


def manager_of(options: EvalConfig, base_dir: Path) -> tuple[Any, list[str]]:
    """Return lm-eval's task manager, and what it is to load: names, and paths of YAMLs.

    Raises EnvironmentFault without the package, and ConfigError for a path without a file or an
    unknown name.
    """
    require_package("lm_eval", WHERE, "pip install lm-eval, or leave the tasks out")
    import datasets
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    names = []
    files = []
    for task in options.tasks:
        if task.endswith((".yaml", ".yml")):
            files.append((base_dir / expand_home(task)).absolute())
        else:
            names.append(task)
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"there is no file {file}",
                where=WHERE,
                fix="paths of tasks are relative to the folder of the YAML",
            )
    # The defaults are found by a search through thousands of YAMLs.
    manager = TaskManager(include_defaults=bool(names))
    for name in names:
        if not manager.match_tasks([name]):
            fix = "`lm-eval ls tasks` lists them; one of your own is a path.yaml"
            raise ConfigError(f"lm-eval has no task {name!r}", where=WHERE, fix=fix)
    return manager, [*names, *(str(file) for file in files)]


def require(options: EvalConfig, base_dir: Path) -> None:
    """Load the tasks and their data, before a rank is started.

    Raises EnvironmentFault, and ConfigError also for an eval.metric that none of the tasks has.
    """
    manager, to_load = manager_of(options, base_dir)
    with harness_errors():
        loaded = manager.load(to_load)
    if options.metric.startswith("tasks/"):
        _require_metric(options.metric, loaded)


def _require_metric(metric: str, loaded: dict[str, Any]) -> None:
    """Raise ConfigError if loaded tasks do not have a metric. `metric`: tasks/NAME/METRIC."""
    # A metric that is not given is "".
    _, name, kind = (*metric.split("/", 2), "")[:3]
    if name in loaded.get("groups", {}):
        # What a group measures is known only when it is scored.
        return
    known = []
    for task, content in loaded["tasks"].items():
        known += [f"tasks/{task}/{each}" for each in content.aggregation()]
    without_filter = kind.split(" ")[0]
    if f"tasks/{name}/{without_filter}" not in known:
        raise ConfigError(
            f"no task has {metric!r}", where="eval.metric", fix=f"one of {', '.join(known)}"
        )


class Tasks:
    """The tasks of a run on one rank."""

    def __init__(self, plan: Plan, model: Callable[[], Any], tokenizer: Any) -> None:
        """`model`: returns the unsharded model with the current weights; collective."""
        self.plan = plan
        self.options = plan.config.eval
        self.model = model
        self.tokenizer = tokenizer
        self.manager, self.to_load = manager_of(self.options, Path(plan.base_dir))

    def is_due(self, before: int, step: int) -> bool:
        """Whether an evaluation after `step` steps scores the tasks.

        `before`: the steps of the last evaluation. The steps of a rollout may pass over a multiple.
        """
        every = self.options.tasks_every
        if every is None or step in (0, self.plan.steps):
            return True
        return is_due(every, before, step)

    def score(self) -> dict[str, float]:
        """Return tasks/NAME/METRIC of the current weights, the same on all ranks.

        Collective. Raises EnvironmentFault.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        class Shared(HFLM):
            """lm-eval's model on this rank. The ranks share the questions of a task."""

            def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
                """Return the numbers of all ranks, by rank."""
                return torch.tensor(gather_from_ranks(tensor.tolist()))

            def gather_object(self, obj: Any, dst: int = 0) -> Any:
                """Return the objects of all ranks, by rank, on each of them."""
                return gather_from_ranks(obj)

            def barrier(self) -> None:
                """Nothing to wait for: what follows is gathered."""

            def _model_call(self, *arguments: Any, **options: Any) -> Any:
                """Run a forward, which may take as long as it likes."""
                alive(math.inf)
                return super()._model_call(*arguments, **options)

            def _model_generate(self, *arguments: Any, **options: Any) -> Any:
                """Generate, which may take as long as it likes."""
                alive(math.inf)
                return super()._model_generate(*arguments, **options)

        # What the harness does between its calls of the model may also take long.
        alive(math.inf)
        module = self.model()
        with generation_mode(module):
            lm = Shared(
                pretrained=module,
                tokenizer=self.tokenizer,
                batch_size=QUESTIONS_AT_ONCE,
                mixed_precision_dtype=LOW_PRECISION.get(self.plan.precision),
            )
            lm._rank, lm._world_size = rank_and_world_size()
            with harness_errors():
                found = lm_eval.simple_evaluate(
                    model=lm,
                    tasks=self.to_load,
                    task_manager=self.manager,
                    limit=self.options.tasks_limit,
                    bootstrap_iters=0,
                    log_samples=False,
                )
        # Only the first rank gets results.
        own_metrics: dict[str, dict[str, float]] | None = None
        if found:
            own_metrics = metrics_of(found["results"])
        metrics_by_rank = gather_from_ranks(own_metrics)
        metrics_by_task = next(metrics for metrics in metrics_by_rank if metrics is not None)
        scores = {}
        for task, metrics in metrics_by_task.items():
            for name, value in metrics.items():
                scores[f"tasks/{task}/{name}"] = value
        return scores


@contextmanager
def harness_errors(where: str = WHERE) -> Iterator[None]:
    """Raise whatever the harness raises as EnvironmentFault.

    Tasks are code and data of strangers, mostly fetched over a network.
    """
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        reason = first_line(error)[:MOST_ERROR]
        raise EnvironmentFault(
            f"lm-eval failed: {type(error).__name__}: {reason}", where=where
        ) from error
