"""Tasks of lm-eval, scored while a run goes on: each rank answers its share of the questions with the weights as they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drumline.core.heartbeat import alive
from drumline.core.plan import Plan
from drumline.core.run import EvalConfig
from drumline.dist.reduce import from_all
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault
from drumline.foreign import expanded, first_line, require_package
from drumline.models.containers import LOW_PRECISION
from drumline.rl.generate import generating, place
from drumline.train.state import is_due

TOGETHER = 8  # questions side by side
WHERE = "eval.tasks"


def metrics_of(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Task → metric → value, as the harness aggregates them; `metric_stderr` beside each, where it was computed. A metric is `NAME`, or
    `NAME FILTER` where the answers were filtered."""
    return {
        task: {
            name.replace(",none", "").replace(",", " "): float(value)
            for name, value in found.items()
            if "," in name and isinstance(value, float | int)
        }
        for task, found in results.items()
    }


def manager_of(options: EvalConfig, base_dir: Path) -> tuple[Any, list[str]]:
    """lm-eval's manager and what it is to load: names, and paths of YAMLs. Raises EnvironmentFault without the package, ConfigError for a
    path without a file, and for a name that it does not know."""
    require_package("lm_eval", WHERE, "pip install lm-eval, or leave the tasks out")
    import datasets
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    named = [task for task in options.tasks if not task.endswith((".yaml", ".yml"))]
    files = [(base_dir / expanded(task)).absolute() for task in options.tasks if task not in named]
    if lost := [file for file in files if not file.is_file()]:
        raise ConfigError(
            f"there is no file {lost[0]}",
            where=WHERE,
            fix="paths of tasks are relative to the folder of the YAML",
        )
    manager = TaskManager(include_defaults=bool(named))  # a search through thousands of YAMLs
    if unknown := [task for task in named if not manager.match_tasks([task])]:
        fix = "`lm-eval ls tasks` lists them; one of your own is a path.yaml"
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}", where=WHERE, fix=fix)
    return manager, [*named, *map(str, files)]


def require(options: EvalConfig, base_dir: Path) -> None:
    """Load the tasks and their data, before a rank is started. Raises EnvironmentFault, and ConfigError also for an eval.metric that none
    of the tasks has."""
    manager, wanted = manager_of(options, base_dir)
    with harness_errors():
        found = manager.load(wanted)
    if options.metric.startswith("tasks/"):
        _, name, metric = (*options.metric.split("/", 2), "")[:3]
        known = [
            f"tasks/{task}/{each}"
            for task, loaded in found["tasks"].items()
            for each in loaded.aggregation()
        ]
        if (
            name not in found.get("groups", {})
            and f"tasks/{name}/{metric.split(' ')[0]}" not in known
        ):
            raise ConfigError(
                f"no task has {options.metric!r}",
                where="eval.metric",
                fix=f"one of {', '.join(known)}",
            )


class Tasks:
    """The tasks of a run on one rank. `model`: the whole model with the weights as they are, collective."""

    def __init__(self, plan: Plan, model: Callable[[], Any], tokenizer: Any) -> None:
        self.plan, self.options, self.model, self.tokenizer = (
            plan,
            plan.config.eval,
            model,
            tokenizer,
        )
        self.manager, self.wanted = manager_of(self.options, Path(plan.base_dir))

    def is_due(self, before: int, step: int) -> bool:
        """At an evaluation after `step` steps, where the last one was after `before`: the steps of a rollout may pass over a multiple."""
        every = self.options.tasks_every
        return every is None or step in (0, self.plan.steps) or is_due(every, before, step)

    def score(self) -> dict[str, float]:
        """tasks/NAME/METRIC of the weights as they are, the same on all ranks. Collective. Raises EnvironmentFault."""
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        class Shared(HFLM):
            """lm-eval deals the questions of a task to ranks, and gathers what they found."""

            def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.tensor(from_all(tensor.tolist()))

            def gather_object(self, obj: Any, dst: int = 0) -> Any:
                return from_all(obj)

            def barrier(self) -> None:
                """What follows is gathered."""

            def _model_call(self, *arguments: Any, **options: Any) -> Any:
                alive(math.inf)
                return super()._model_call(*arguments, **options)

            def _model_generate(self, *arguments: Any, **options: Any) -> Any:
                alive(math.inf)
                return super()._model_generate(*arguments, **options)

        # What the harness does before, between and after its calls takes as long as tasks and their rows want.
        alive(math.inf)
        module = self.model()
        low = LOW_PRECISION.get(self.plan.precision)
        with generating(module):
            lm = Shared(
                pretrained=module,
                tokenizer=self.tokenizer,
                batch_size=TOGETHER,
                mixed_precision_dtype=low,
            )
            lm._rank, lm._world_size = place()
            wanted = {
                "tasks": self.wanted,
                "task_manager": self.manager,
                "limit": self.options.tasks_limit,
            }
            with harness_errors():
                found = lm_eval.simple_evaluate(
                    model=lm, bootstrap_iters=0, log_samples=False, **wanted
                )
        results = next(
            each for each in from_all(found and metrics_of(found["results"])) if each is not None
        )
        return {
            f"tasks/{task}/{name}": value
            for task, metrics in results.items()
            for name, value in metrics.items()
        }


@contextmanager
def harness_errors(where: str = WHERE) -> Iterator[None]:
    """Raises EnvironmentFault for whatever the harness raises: tasks are code and data of strangers, mostly fetched over a network."""
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        raise EnvironmentFault(
            f"lm-eval failed: {type(error).__name__}: {first_line(error)[:300]}", where=where
        ) from error
