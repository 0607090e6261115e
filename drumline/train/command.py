"""What the commands of the CLI do, in order. Each step lives elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from drumline.core.explain import default_run_dir, explain, plan_line
from drumline.core.load import Request, changed_values, load, reader, to_yaml
from drumline.core.plan import Plan
from drumline.core.process import uncollected
from drumline.core.resolve import default_processes
from drumline.core.yaml_lines import write_yaml
from drumline.errors import UserError
from drumline.hardware.detect import cache_dir, likely_gpus
from drumline.launchers.environment import die_with_launchers, first_rank, launched_by
from drumline.launchers.lease import Lease
from drumline.launchers.local import newest_or
from drumline.launchers.stages import stages
from drumline.launchers.tasks import (
    become,
    requeued,
    require_rendezvous,
    step_of_allocation,
    torchrun_of_node,
)
from drumline.report.bars import aside, bars, notes
from drumline.report.page import at_end
from drumline.report.progress import Progress
from drumline.report.waiting import Waits
from drumline.telemetry.events import read

if TYPE_CHECKING:
    from drumline.compat.sheet import Sheet


def train(
    config_path: Path,
    overrides: list[str],
    *,
    resume: str | None,
    allow: tuple[str, ...],
    dry_run: bool,
    accelerate_config: Path | None = None,
    watch: bool = False,
    everything: bool = False,
) -> int:
    """`drumline train`: plan, launch, watch. `everything`: a dry run also prints the keys at their defaults. Returns the exit code."""
    myself = ["drumline", *sys.argv[1:]]
    if (srun := step_of_allocation()) and _trains_in_tasks(
        config_path, overrides, resume, accelerate_config
    ):
        become([*srun, sys.executable, "-m", *myself])
    die_with_launchers()
    request = requested(config_path, overrides, resume, allow, accelerate_config)
    if torchrun := torchrun_of_node(lambda: _ranks_of_node(request)):
        become([*torchrun, *myself])
    if launched_by() is None:
        made = request()
        code = made.loaded.config.launch.submit(made, dry_run)
        if code is not None:
            if dry_run and everything:
                _print_all_keys(made)
            return code
        return (
            _dry_run(made, everything)
            if dry_run
            else launch_ranks(made, display=True, watch=watch)[1]
        )
    if watch:
        fix = "run `drumline watch RUN` in another terminal"
        raise UserError(f"{launched_by()} has started the ranks", where="--watch", fix=fix)
    if dry_run:
        return _dry_run(request(int(os.environ["WORLD_SIZE"])), everything) if first_rank() else 0
    from drumline.train.launched import train as train_launched

    return train_launched(request)


def _trains_in_tasks(
    config_path: Path, overrides: list[str], resume: str | None, accelerate_config: Path | None
) -> bool:
    """Whether the tasks of srun are the ranks of a config; else its launcher starts them where it says. A mistake is reported by task 0."""
    try:
        loaded = reader(config_path)(
            overrides, _laid_over(accelerate_config), trusted=resume is None
        )
    except UserError:
        return True
    return loaded.config.launch.kind in ("local", "slurm")


def _ranks_of_node(request: Callable[..., Request]) -> int:
    """How many ranks our own launcher would start here; 1 for a config with a mistake, which rank 0 reports."""
    try:
        config = request().loaded.config
    except UserError:
        return 1
    return default_processes(config, 0 if config.run.device == "cpu" else likely_gpus())


def _laid_over(accelerate_config: Path | None) -> Sheet | None:
    """The strategy of another launcher, from its file or from what it has set. Only there are its keys imported."""
    if accelerate_config is None and not any(name.startswith("ACCELERATE_") for name in os.environ):
        return None
    from drumline.compat.overlay import from_environment, from_file

    return from_file(accelerate_config) if accelerate_config else from_environment(os.environ)


def requested(
    config: str | Path | Mapping[str, Any],
    overrides: list[str],
    resume: str | None,
    allow: tuple[str, ...],
    accelerate_config: Path | None = None,
) -> Callable[..., Request]:
    """What makes the Request, once it is known how many processes there are. `config`: a file, or its keys."""

    def request(world_size: int | None = None) -> Request:
        over = _laid_over(accelerate_config)
        read = reader(config)
        loaded = read(overrides, over)
        start = resume or loaded.resume
        if start is not None:
            loaded = read(overrides, over, trusted=False)
        if requeued():
            made = loaded.config
            start = newest_or(
                start, Path(made.run.dir or default_run_dir(loaded.path)), made.checkpoint.apart
            )
        notes(loaded.notes)
        return Request(loaded, world_size or loaded.config.launch.processes(), start, allow)

    return request if launched_by() else _joined(request())


def _joined(request: Request) -> Callable[..., Request]:
    """The same, where a launcher of the user's own may have started this process as one rank. Raises EnvironmentFault where it is one of
    several that do not know of each other."""
    os.environ.update(request.loaded.config.launch.rank_variables(os.environ))
    require_rendezvous()
    return lambda world_size=None: replace(request, world_size=world_size or request.world_size)


def _placed(request: Request) -> Request:
    """The same, planned for the hosts that the launcher starts ranks on. Those of somebody else's launcher plan where they are."""
    config = request.loaded.config
    return request if launched_by() else replace(request, machine=config.launch.machine(config))


def _dry_run(request: Request, everything: bool) -> int:
    """Print the plan as comments, and the config below it: the keys that differ from their defaults, or `everything`."""
    from drumline.train.setup import as_before, make_plan, resume_from

    request = _placed(request)
    with bars(Console(stderr=True)) as on_progress:
        plan = make_plan(request, on_progress=on_progress, dry_run=True)
    notes(plan.data.notes if plan.data else ())
    start, plan = resume_from(Path(plan.run_dir), request, plan), as_before(plan, request)
    print(
        f"# {plan_line(plan)}\n" + "\n".join(f"#   {line}" for line in explain(plan).splitlines())
    )
    if everything:
        print(f"\n{to_yaml(plan.config)}", end="")
    else:
        print("\n# What differs from the defaults; --all prints every key.")
        print(write_yaml(changed_values(plan.config)), end="")
    if launched_by() is None and (
        submission := plan.config.launch.submission(plan, Path(plan.run_dir) / "plan.json", start)
    ):
        print(f"\n{submission}", end="")
    return 0


def _print_all_keys(request: Request) -> None:
    """Print every key of the config as comments, behind what a launcher would submit."""
    print("# Every key of the config:")
    for line in to_yaml(request.loaded.config).splitlines():
        print(f"# {line}")


def launch_ranks(
    request: Request,
    display: bool,
    watch: bool = False,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[Path, int]:
    """By our own launcher. `watch`: serve the page of `drumline watch` meanwhile. `change`: of the plan, before anything is written.
    Returns the run folder and the exit code."""
    request, config = _placed(request), request.loaded.config
    with ExitStack() as stack:
        run_dir = Path(config.run.dir or default_run_dir(request.loaded.path))
        config.launch.require()  # before the data is prepared, which may take hours
        early = stack.enter_context(config.launch.early(config, run_dir / "plan.json"))
        with uncollected():
            from drumline.train.replan import Replanner
            from drumline.train.setup import as_before, claim_run_dir, make_plan

        with aside(display) as on_progress:
            plan = change(make_plan(request, on_progress=on_progress))
        notes(plan.data.notes if plan.data else ())
        launcher = plan.config.launch
        if watch:
            from drumline.report.watch import beside

            print(f"watch: {stack.enter_context(beside(run_dir, stages))}", flush=True)
        with ExitStack() as claim:
            (claim if launcher.elsewhere else stack).enter_context(Lease(run_dir))
            plan = as_before(plan, request)
            launcher.compare(plan, early)
            plan_path, start = claim_run_dir(plan, request)
        past = read(run_dir / "events.jsonl") if display else []
        on_event = (
            stack.enter_context(Progress(Console(), past, waits(run_dir))).on_event
            if display
            else lambda event: None
        )
        code = launcher.start(plan, plan_path, start, on_event, Replanner(plan, plan_path), early)
    if not launcher.elsewhere and (made := at_end(plan)) is not None and display:
        print(f"page: {made}")
    return run_dir, code


def waits(run_dir: Path) -> Waits:
    """What the display knows between steps of a run on this machine."""
    return Waits(partial(stages, run_dir), cache_dir() / "stages.json")


def convert(old: Path | list[str], output: Path | None) -> None:
    """`drumline convert`: the new YAML on stdout or into a file, notes on stderr. They stand in the YAML, too: a terminal that shows it
    needs them once."""
    from drumline.compat.convert import convert as to_drumline

    text, messages = to_drumline(old, output)
    text_is_shown = output is None and sys.stdout.isatty()
    if not text_is_shown:
        notes(messages)
    if output is None:
        print(text, end="")
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            "is there already", where=str(output), fix="choose another name, or remove it"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(output), fix="choose another place"
        ) from None


def prepare(config_path: Path, overrides: list[str]) -> None:
    """`drumline prepare`: tokenise and pack, outside of any launch."""
    from drumline.data.cache import TokenCache
    from drumline.data.prepare import prepare as prepare_data
    from drumline.models.files import resolve
    from drumline.models.vision import vision_of
    from drumline.planner.question import Found, require_adapter

    loaded = load(config_path, overrides)
    config = loaded.config
    if config.plain:
        what = "a module of your own takes samples as they are: there is nothing to prepare"
        raise UserError(what, where="model.kind", fix="`drumline preview` shows the samples")
    with bars(Console(stderr=True)) as on_progress:
        model_path = resolve(config.model, on_progress)
        policy = Found(config.model, model_path)
        require_adapter(config, policy)
        vision = vision_of(config, model_path, policy.hf_config)
        data = prepare_data(
            config,
            config.model.tokenizer or model_path or "",
            loaded.base_dir,
            on_progress,
            vision,
            check=True,
        )
    more = (f", {data.images} images" if data.images else "") + " in the first block" * data.stream
    print(
        f"train  {data.train_samples} samples, {data.train_tokens} tokens{more}  {data.train_cache}"
    )
    for name, folder in data.eval_caches.items():
        print(
            f"eval   {name + '  ' if name else ''}{len(TokenCache.open(Path(folder)))} samples  {folder}"
        )
    notes(data.notes)


def export(run: str, to: Path, which: str, dtype: str, adapter: bool, trust: bool = False) -> None:
    """`drumline export`: a Hugging Face folder, reloaded and compared."""
    from drumline.checkpoint.remote import at_hand
    from drumline.models.export import Which
    from drumline.models.export import export as write

    if which not in ("last", "best") and not which.isdecimal():
        raise UserError(
            f"no checkpoint {which!r}", where="--which", fix="last, best, or the number of a step"
        )
    choice = cast(Which, int(which) if which.isdecimal() else which)
    with at_hand(run, choice) as run_dir, bars(Console(stderr=True)) as on_progress:
        result = write(run_dir, to, choice, on_progress, dtype=dtype, adapter=adapter, trust=trust)
    rounded = f"; rounding changed them by {result.rounding:.2%}" if result.rounding else ""
    print(f"wrote {result.path} ({result.dtype}) in {result.seconds:.1f} s")
    print(f"reloaded, largest difference of logits {result.max_logit_difference:g}{rounded}")
