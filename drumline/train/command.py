"""The commands train, prepare and export: the order of their steps, which other modules take."""

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

from drumline.config.load import Request, changed_values, load, reader, to_yaml
from drumline.config.resume import Resume, resume_option
from drumline.errors import UserError
from drumline.hardware.detect import cache_dir, likely_gpus
from drumline.launch.environment import die_with_launchers, is_first_rank, launched_by
from drumline.launch.lease import Lease
from drumline.launch.local import resume_of_restart
from drumline.launch.rank_phases import rank_phases
from drumline.launch.tasks import (
    become,
    is_requeued,
    require_rendezvous,
    srun_of_allocation,
    torchrun_of_node,
)
from drumline.plan.explain import default_run_dir, explain, plan_line
from drumline.plan.plan import Plan
from drumline.plan.resolve import default_processes
from drumline.report.bars import bars, notes, stderr_bars
from drumline.report.page import write_final_page
from drumline.report.progress import Progress
from drumline.report.start_banner import banner_lines
from drumline.report.waiting import PhaseDurations
from drumline.system.output import verbosity
from drumline.system.process import pause_garbage_collection
from drumline.system.yaml_lines import write_yaml
from drumline.telemetry.events import Event, read

if TYPE_CHECKING:
    from drumline.compat.sheet import Sheet


def train(
    config_path: Path,
    overrides: list[str],
    *,
    resume: Resume | None,
    allow: tuple[str, ...],
    dry_run: bool,
    accelerate_config: Path | None = None,
    watch: bool = False,
    everything: bool = False,
) -> int:
    """Run `drumline train`: plan, launch and follow the ranks. Returns the exit code.

    `everything`: a dry run also prints the keys that have their defaults.
    """
    own_command = ["drumline", *sys.argv[1:]]
    srun = srun_of_allocation()
    if srun and _trains_in_tasks(config_path, overrides, resume, accelerate_config):
        become([*srun, sys.executable, "-m", *own_command])
    die_with_launchers()
    make_request = request_maker(config_path, overrides, resume, allow, accelerate_config)
    torchrun = torchrun_of_node(lambda: _ranks_of_node(make_request))
    if torchrun:
        become([*torchrun, *own_command])
    if launched_by() is None:
        return _train_by_own_launcher(make_request(), dry_run, watch, everything)
    if watch:
        fix = "run `drumline watch RUN` in another terminal"
        raise UserError(f"{launched_by()} has started the ranks", where="--watch", fix=fix)
    if dry_run:
        if not is_first_rank():
            return 0
        return _dry_run(make_request(int(os.environ["WORLD_SIZE"])), everything)
    from drumline.train.launched import train as train_launched

    return train_launched(make_request)


def _train_by_own_launcher(request: Request, dry_run: bool, watch: bool, everything: bool) -> int:
    """Train, submit a job that will, or show what would be done. Returns the exit code."""
    code = request.loaded.config.launch.submit(request, dry_run)
    if code is not None:
        if dry_run and everything:
            _print_all_keys(request)
        return code
    if dry_run:
        return _dry_run(request, everything)
    _, code = launch_ranks(request, display=True, watch=watch)
    return code


def _trains_in_tasks(
    config_path: Path, overrides: list[str], resume: Resume | None, accelerate_config: Path | None
) -> bool:
    """Whether srun starts the ranks, instead of the launcher in the config.

    True also for a config with a mistake, which task 0 then reports.
    """
    read_config = reader(config_path)
    try:
        loaded = read_config(
            overrides, _strategy_of_launcher(accelerate_config), trusted=resume is None
        )
    except UserError:
        return True
    return loaded.config.launch.kind in ("local", "slurm")


def _ranks_of_node(make_request: Callable[..., Request]) -> int:
    """Return how many ranks our own launcher would start on this host.

    It is 1 for a config with a mistake, which rank 0 then reports.
    """
    try:
        config = make_request().loaded.config
    except UserError:
        return 1
    gpus = 0 if config.run.device == "cpu" else likely_gpus()
    return default_processes(config, gpus)


def _strategy_of_launcher(accelerate_config: Path | None) -> Sheet | None:
    """Return the strategy that accelerate's config file or its variables set; None without either.

    `drumline.compat` is imported only if there is one.
    """
    is_accelerate = any(name.startswith("ACCELERATE_") for name in os.environ)
    if accelerate_config is None and not is_accelerate:
        return None
    from drumline.compat.overlay import from_environment, from_file

    if accelerate_config:
        return from_file(accelerate_config)
    return from_environment(os.environ)


def request_maker(
    config: str | Path | Mapping[str, Any],
    overrides: list[str],
    resume: Resume | None,
    allow: tuple[str, ...],
    accelerate_config: Path | None = None,
) -> Callable[..., Request]:
    """Return a factory of the request, called with the number of processes or nothing.

    If another launcher has started the ranks, the config is read when the factory is called, with
    the number of processes that is known then. Otherwise it is read now, and its mistakes are
    raised now.

    Args:
        config: A file, or its keys.
        resume: What the run resumes from; None: what the config says.
        allow: Keys that may differ on a resume.
    """

    def make_request(world_size: int | None = None) -> Request:
        strategy = _strategy_of_launcher(accelerate_config)
        read_config = reader(config)
        loaded = read_config(overrides, strategy)
        chosen_resume = resume or loaded.resume
        if chosen_resume is not None:
            # The run may be somebody else's, so its code is not trusted.
            loaded = read_config(overrides, strategy, trusted=False)
        if is_requeued():
            run_dir = Path(loaded.config.run.dir or default_run_dir(loaded.path))
            chosen_resume = resume_of_restart(
                chosen_resume, run_dir, loaded.config.checkpoint.allows_separate_folders
            )
        notes(loaded.notes)
        processes = world_size or loaded.config.launch.processes()
        return Request(loaded, processes, chosen_resume, allow)

    if launched_by():
        return make_request
    return _adopt_launcher_variables(make_request())


def _adopt_launcher_variables(request: Request) -> Callable[..., Request]:
    """Set torchrun's variables from those of the config's launcher, and return a factory.

    The factory returns `request`, with another number of processes if one is given. In the process
    that launches the ranks there are no variables of a launcher, and nothing is set.

    Raises EnvironmentFault if this is one of several processes that do not know of each other.
    """
    os.environ.update(request.loaded.config.launch.rank_variables(os.environ))
    require_rendezvous()

    def make_request(world_size: int | None = None) -> Request:
        return replace(request, world_size=world_size or request.world_size)

    return make_request


def _with_machine(request: Request) -> Request:
    """Return the request with the machine that the launcher will start ranks on.

    If another program has started the ranks, the request is returned as it is: the plan is then for
    the machine that they are on.
    """
    if launched_by():
        return request
    config = request.loaded.config
    return replace(request, machine=config.launch.machine(config))


def _dry_run(request: Request, everything: bool) -> int:
    """Print the plan as comments, and the config below it; return the exit code.

    Keys with their default values are printed only with `everything`.
    """
    from drumline.train.setup import keep_learning_rate, make_plan, resume_from

    request = _with_machine(request)
    with bars(Console(stderr=True)) as on_progress:
        plan = make_plan(request, on_progress=on_progress, dry_run=True)
    notes(plan.data.notes if plan.data else ())
    resume = resume_from(request, plan)
    plan = keep_learning_rate(plan, request)
    lines = [f"# {plan_line(plan)}"]
    for line in explain(plan).splitlines():
        lines.append(f"#   {line}")
    print("\n".join(lines))
    if everything:
        print(f"\n{to_yaml(plan.config)}", end="")
    else:
        print("\n# What differs from the defaults; --all prints every key.")
        print(write_yaml(changed_values(plan.config)), end="")
    if launched_by() is None:
        plan_path = Path(plan.run_dir) / "plan.json"
        submission = plan.config.launch.submission(plan, plan_path, resume_option(resume))
        if submission:
            print(f"\n{submission}", end="")
    return 0


def _print_all_keys(request: Request) -> None:
    """Print every key of the config as comments, behind what a launcher would submit."""
    print("# Every key of the config:")
    for line in to_yaml(request.loaded.config).splitlines():
        print(f"# {line}")


def _keep_plan(plan: Plan) -> Plan:
    return plan


def launch_ranks(
    request: Request,
    display: bool,
    watch: bool = False,
    change: Callable[[Plan], Plan] = _keep_plan,
) -> tuple[Path, int]:
    """Train by our own launcher. Returns the run folder and the exit code.

    Args:
        display: Show progress in the terminal.
        watch: Serve the page of `drumline watch` meanwhile.
        change: Is applied to the plan before anything is written.
    """
    request = _with_machine(request)
    config = request.loaded.config
    run_dir = Path(config.run.dir or default_run_dir(request.loaded.path))
    with ExitStack() as stack:
        # Before the data are prepared, which may take hours.
        config.launch.require()
        # Processes that become ranks start now, and import while the plan is made.
        early_ranks = stack.enter_context(config.launch.early(config, run_dir / "plan.json"))
        with pause_garbage_collection():
            from drumline.train.replan import Replanner
            from drumline.train.setup import claim_run_dir, keep_learning_rate, make_plan

        with stderr_bars(display) as on_progress:
            plan = make_plan(request, on_progress=on_progress)
            plan = change(plan)
        notes(plan.data.notes if plan.data else ())
        launcher = plan.config.launch
        if watch:
            from drumline.report.watch import serve_new_run

            address = stack.enter_context(serve_new_run(run_dir, rank_phases))
            print(f"watch: {address}", flush=True)
        with ExitStack() as claim:
            # A job elsewhere takes the lease itself, so this process releases it before.
            holder = claim if launcher.is_lease_remote else stack
            holder.enter_context(Lease(run_dir))
            plan = keep_learning_rate(plan, request)
            # Raises EnvironmentFault if hosts differ in what the plan needs.
            launcher.check_hosts(plan, early_ranks)
            plan_path, resume = claim_run_dir(plan, request)
        on_event: Callable[[Event], None] = _ignore
        progress: Progress | None = None
        if display:
            past = read(run_dir / "events.jsonl")
            progress = stack.enter_context(
                Progress(
                    Console(),
                    past,
                    phase_durations(run_dir),
                    verbosity=verbosity(),
                    start_banner=banner_lines(plan),
                )
            )
            on_event = progress.on_event
        replanner = Replanner(plan, plan_path)
        code = launcher.start(
            plan, plan_path, resume_option(resume), on_event, replanner, early_ranks
        )
        if not launcher.is_lease_remote:
            page = write_final_page(plan)
            if progress is not None:
                progress.page = page
    return run_dir, code


def _ignore(event: Event) -> None:
    """Do nothing with an event: there is no display."""


def phase_durations(run_dir: Path) -> PhaseDurations:
    """Return what the display shows between the steps of a run on this machine."""
    return PhaseDurations(partial(rank_phases, run_dir), cache_dir() / "stages.json")


def prepare(config_path: Path, overrides: list[str]) -> None:
    """Run `drumline prepare`: tokenise and pack the data, outside of any launch."""
    from drumline.data.cache import TokenCache
    from drumline.data.prepare import prepare as prepare_data
    from drumline.models.files import resolve
    from drumline.models.vision import vision_of
    from drumline.planner.question import FoundModel, require_adapter
    from drumline.planner.seq2seq import resolve_seq2seq

    loaded = load(config_path, overrides)
    config = loaded.config
    if config.has_own_module:
        what = "a module of your own takes samples as they are: there is nothing to prepare"
        raise UserError(what, where="model.kind", fix="`drumline preview` shows the samples")
    with bars(Console(stderr=True)) as on_progress:
        model_path = resolve(config.model, on_progress)
        policy = FoundModel(config.model, model_path)
        config = resolve_seq2seq(config, policy.hf_config, notes)
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
    more = ""
    if data.images:
        more += f", {data.images} images"
    if data.stream:
        more += " in the first block"
    print(
        f"train  {data.train_samples} samples, {data.train_tokens} tokens{more}  {data.train_cache}"
    )
    for name, folder in data.eval_caches.items():
        title = f"{name}  " if name else ""
        samples = len(TokenCache.open(Path(folder)))
        print(f"eval   {title}{samples} samples  {folder}")
    notes(data.notes)


def export(run: str, to: Path, which: str, dtype: str, adapter: bool, trust: bool = False) -> None:
    """Run `drumline export`: write a Hugging Face folder, load it again and compare it.

    `which`: last, best, or the number of a step. `dtype`: of the weights.
    """
    from drumline.checkpoint.remote import local_copy
    from drumline.models.export import Which
    from drumline.models.export import export as write

    choice: str | int = which
    if which.isdecimal():
        choice = int(which)
    elif which not in ("last", "best"):
        raise UserError(
            f"no checkpoint {which!r}", where="--which", fix="last, best, or the number of a step"
        )
    checkpoint = cast(Which, choice)
    with local_copy(run, checkpoint) as run_dir, bars(Console(stderr=True)) as on_progress:
        result = write(
            run_dir,
            to,
            checkpoint,
            on_progress,
            dtype=dtype,
            adapter=adapter,
            trust_remote_code=trust,
        )
    rounded = ""
    if result.rounding:
        rounded = f"; rounding changed them by {result.rounding:.2%}"
    print(f"wrote {result.path} ({result.dtype}) in {result.seconds:.1f} s")
    print(f"reloaded, largest difference of logits {result.max_logit_difference:g}{rounded}")
