"""`drumline verify`: a few steps of the user's own work on one process and under each strategy.

It shows how far the numbers lie apart: losses, gradient norms, and every tensor of the last checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from drumline.bench.file_names import name_of_strategy_folder
from drumline.config.config import Config
from drumline.config.load import Loaded, Overrides, override, overrides_of, reader
from drumline.config.registry import kinds
from drumline.config.strategy import StrategyConfig
from drumline.errors import (
    CheckpointError,
    DrumlineError,
    EnvironmentFault,
    UserError,
    WorkerFailed,
)
from drumline.plan.batch import resolve_batch
from drumline.plan.out_of_memory import memory_errors
from drumline.plan.plan import Plan
from drumline.report.bars import OnProgress, stderr_bars
from drumline.telemetry import events

# Strategies that are compared by default with four processes or more, besides those whose section has
# `compared`.
MIXES = ("ddp tp=2", "fsdp2 tp=2", "ddp pp=2", "fsdp2 cp=2")
REFERENCE = "one process"
# Loads the user's config, with overrides over it.
Read = Callable[[list[str]], Loaded]
# Endings of the names of a model's options for dropout.
DROPOUT = ("dropout", "pdrop", "dropout_prob", "_drop")
# The most entries of tensors that are read at once.
PORTION = 64 * 2**20
# A relative difference is to a norm of at least this, since a tensor may be all zeros.
SMALLEST_NORM = 1e-12
SMALLEST_GRAD_NORM = 1e-30
# A relative difference of losses is to a loss of at least this. The loss of a policy is a mean of
# advantages, which cancel at the first step, so that only rounding is left.
SMALLEST_LOSS = 0.1
# A weight whose gradient has at most this share of the norm has nothing but rounding for a gradient.
ROUNDING = 1e-5
# The ending of the names of second moments.
SECOND = ".exp_avg_sq"
# The largest relative difference that counts as the same by default; runs are fp32.
TOLERANCE = 1e-5
# A strategy may be apart by so many times what another cut of the batch does. Such a cut changes the
# order of sums in one place; a strategy changes it in a few (its ranks, its collectives, its parts of
# a product).
ROUNDING_FACTOR = 4
# The largest difference that may count as rounding, as a share of what one sample does to the gradient.
# Beyond it a sample that is lost or counted twice could not be told from rounding.
LARGEST_ROUNDING = 0.1


@dataclass(frozen=True)
class Outcome:
    """The comparison of one strategy with one process, or why there is none."""

    name: str
    # None if it was refused before it started.
    ranks: int | None
    # Its difference from one process; None if it was refused or failed, as `note` says.
    apart: Difference | None
    note: str = ""

    def within(self, tolerance: float) -> bool:
        """Return whether it trains what one process trains, or was refused before it started."""
        if self.apart is None:
            return not self.note.startswith("failed")
        return self.apart.largest <= tolerance


def verify(
    config_path: Path,
    overrides: list[str],
    wanted: list[str],
    steps: int,
    nproc: int,
    tolerance: float | None,
    keep: Path | None,
) -> int:
    """Compare strategies with one process, print a table, and return the exit code.

    It is 0 if every strategy that runs stays within `tolerance`, and 1 if one does not, or fails. All
    runs are in fp32 without TF32, have the same global batch, and have no dropout, which each rank
    would draw by itself.

    Args:
        config_path: The user's config.
        overrides: As on the command line.
        wanted: Strategies, as `fsdp2 tp=2`; empty: all usual ones.
        steps: Of each run.
        nproc: Ranks of each strategy.
        tolerance: The largest relative difference; None: see `compare`.
        keep: A new folder for the runs; None: a temporary one.

    Raises ConfigError and its variants if the config itself cannot be trained on one process.
    """
    comparison = compare(
        config_path,
        overrides,
        strategies=wanted,
        steps=steps,
        nproc=nproc,
        tolerance=tolerance,
        keep=keep,
        display=True,
    )
    return _print(Console(), comparison, steps)


@dataclass(frozen=True)
class Comparison:
    """Each strategy against one process. A strategy that was refused says why in its `note`."""

    outcomes: tuple[Outcome, ...]
    # The largest relative difference that counts as the same.
    tolerance: float
    # How far one process lies from itself with the batch cut in another way; None if no strategy was
    # beyond TOLERANCE, or a tolerance was given.
    rounding: float | None = None

    @property
    def same(self) -> bool:
        """Whether some strategy ran, and all that ran stay within the tolerance."""
        if not any(outcome.apart for outcome in self.outcomes):
            return False
        return all(outcome.within(self.tolerance) for outcome in self.outcomes)


@memory_errors()
def compare(
    config: str | Path | Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    strategies: Sequence[str] = (),
    steps: int = 3,
    nproc: int = 2,
    tolerance: float | None = None,
    keep: str | Path | None = None,
    display: bool = False,
) -> Comparison:
    """Train under each strategy and on one process, and return how far the numbers lie apart.

    Without a `tolerance` it is 1e-5, or four times the distance between two runs of one process that
    cut the same batch in two ways, if that is more: training itself may magnify rounding. Such a
    distance counts up to a tenth of a sample's share of the batch. The second run is made only if a
    strategy lies beyond 1e-5.

    Args:
        config: A path or the keys themselves.
        overrides: Dotted key → value, or `key=value` as on the command line.
        strategies: As `fsdp2` or `ddp tp=2`; all usual ones by default.
        steps: Of each run.
        nproc: Ranks of each strategy.
        tolerance: The largest relative difference that counts as the same.
        keep: A new folder for the runs; None: a temporary one.
        display: Show progress.
    """
    read = reader(config)
    changes = overrides_of(overrides)
    wanted = list(strategies) or _usual_strategies(nproc)
    # A name that is no strategy fails before the first run.
    spelled = {name: spell(name) for name in wanted}
    folder = None
    if keep is not None:
        folder = Path(keep)
    with stderr_bars(display) as on_progress, _open_folder(folder) as place:
        root = Path(place)
        common = [*changes, *_shared_overrides(read(changes).config, nproc, steps, on_progress)]
        reference = read([*common, *_one_process(root / "reference")])
        plan = _train(reference, REFERENCE, on_progress)
        found = []
        for name in wanted:
            outcome = _compare_strategy(read, common, name, spelled[name], nproc, root, on_progress)
            found.append(outcome)
        outcomes = tuple(found)
        if tolerance is not None:
            return Comparison(outcomes, tolerance)
        is_beyond = False
        for outcome in outcomes:
            if outcome.apart is not None and outcome.apart.largest > TOLERANCE:
                is_beyond = True
        other_cut = _other_micro_batch(plan)
        if not is_beyond or other_cut is None:
            return Comparison(outcomes, TOLERANCE)
        again = [f"batch.micro_batch={other_cut}", *_one_process(root / "rounding")]
        rounding = _measure_rounding(read([*common, *again]), root, on_progress)
        if rounding is None:
            return Comparison(outcomes, TOLERANCE)
        share_of_sample = LARGEST_ROUNDING / plan.batch.global_samples
        allowed = min(ROUNDING_FACTOR * rounding, share_of_sample)
        return Comparison(outcomes, max(TOLERANCE, allowed), rounding)


def _usual_strategies(nproc: int) -> list[str]:
    """Return the strategies that are compared by default."""
    strategies = [kind for kind, spec in kinds(StrategyConfig).items() if spec.compared]
    if nproc >= 4:
        strategies += MIXES
    return strategies


def _one_process(run_dir: Path) -> list[str]:
    """Return the overrides of a run on one process."""
    return ["strategy=single", "launch.nproc=1", override("run.dir", run_dir)]


def _measure_rounding(again: Loaded, root: Path, on_progress: OnProgress) -> float | None:
    """Return how far one process lies from itself with its batch cut in another way.

    None if that is not rounding: the first losses already differ, as with batch norm, whose
    statistics are of one micro-batch; or if it does not run.

    Args:
        again: The work of the reference with another micro-batch.
        root: The folder of all runs.
        on_progress: Is called while it runs.
    """
    run_dir = root / "rounding"
    reference = root / "reference"
    try:
        _train(again, f"{REFERENCE}, cut in another way", on_progress)
    except (DrumlineError, WorkerFailed):
        return None
    first_losses = []
    for folder in (run_dir, reference):
        losses = events.series(events.read(folder / "events.jsonl"), "loss")
        # Before the first update: later losses also differ by what rounding did to the weights.
        first_losses.append({step: losses[step] for step in sorted(losses)[:1]})
    if _largest_difference(first_losses[0], first_losses[1], SMALLEST_LOSS) > TOLERANCE:
        return None
    return difference(run_dir, reference).largest


def _other_micro_batch(plan: Plan) -> int | None:
    """Return another micro-batch that the global batch can be cut into; None if there is none.

    It is the next smaller one, which needs less memory, else the next larger one.
    """
    samples = plan.batch.global_samples
    micro_batch = plan.batch.micro_batch
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    smaller = [size for size in sizes if size < micro_batch]
    if smaller:
        return smaller[-1]
    larger = [size for size in sizes if size > micro_batch]
    if larger:
        return larger[0]
    return None


def _print(console: Console, comparison: Comparison, steps: int) -> int:
    """Print the table and what lies beyond the tolerance. Returns the exit code.

    Raises UserError if no strategy could be compared.
    """
    outcomes = comparison.outcomes
    console.print(_table(comparison, steps))
    for outcome in outcomes:
        if outcome.note:
            console.print(f"  {outcome.name} {outcome.note}", highlight=False, soft_wrap=True)
    _print_noise(console, outcomes)
    if comparison.rounding is not None:
        _print_rounding(console, comparison.rounding, comparison.tolerance)
    compared = [outcome for outcome in outcomes if outcome.apart is not None]
    if not compared:
        raise UserError(
            "no strategy could be compared", where="--strategies", fix="see the reasons above"
        )
    beyond = []
    for outcome in compared:
        if outcome.apart and not outcome.within(comparison.tolerance):
            beyond.append(f"{outcome.name} (most in {outcome.apart.worst})")
    if beyond:
        line = f"not what one process trains: {', '.join(beyond)}"
    else:
        line = f"{len(compared)} of {len(outcomes)} strategies train what one process trains"
    console.print(line, highlight=False)
    return int(not comparison.same)


def _table(comparison: Comparison, steps: int) -> Table:
    """Return a row for each strategy."""
    tolerance = comparison.tolerance
    title = (
        f"{steps} steps against one process: largest relative difference, at most {tolerance:.2g}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy", justify="left")
    for column in ("ranks", "loss", "grad norm", "weights", "moments"):
        table.add_column(column, justify="right")
    table.add_column("", justify="left")
    for outcome in comparison.outcomes:
        apart = outcome.apart
        if apart is None:
            # The first word of the note: refused or failed.
            verdict = outcome.note.partition(":")[0].split()[0]
            table.add_row(outcome.name, str(outcome.ranks or ""), "", "", "", "", verdict)
            continue
        moments = ""
        if apart.moments is not None:
            moments = f"{apart.moments:.1e}"
        verdict = "differs"
        if outcome.within(tolerance):
            verdict = "same"
        table.add_row(
            outcome.name,
            str(outcome.ranks),
            f"{apart.loss:.1e}",
            f"{apart.grad_norm:.1e}",
            f"{apart.weights:.1e}",
            moments,
            verdict,
        )
    return table


def _print_noise(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print which weights have nothing but rounding for a gradient, if there are any."""
    names: set[str] = set()
    for outcome in outcomes:
        if outcome.apart is not None:
            names.update(outcome.apart.noise)
    if not names:
        return
    what = min(names)
    if len(names) > 1:
        what += f" and {len(names) - 1} more"
    console.print(
        f"{what}: their gradient is rounding alone (they cancel in"
        " softmax), and Adam makes steps of it; they are compared by their effect on the loss",
        highlight=False,
    )


def _print_rounding(console: Console, rounding: float, tolerance: float) -> None:
    """Print what rounding alone does to one process."""
    line = (
        f"rounding alone moves one process by {rounding:.1e} when its batch is cut in another"
        f" way; up to {tolerance:.1e} is the same"
    )
    if rounding > tolerance:
        line += " — this training magnifies rounding: take fewer --steps, or a lower optimizer.lr"
    console.print(line, highlight=False, soft_wrap=True)


def spell(name: str) -> str:
    """Return the override of a strategy: `fsdp2 tp=2` → `strategy={kind: fsdp2, tp: 2}`.

    Raises UserError if an option has no =.
    """
    kind, *options = name.split()
    parts = [f"kind: {kind}"]
    for option in options:
        if "=" not in option:
            raise UserError(
                f"{name!r} is no strategy",
                where="--strategies",
                fix="write it as `fsdp2` or `fsdp2 tp=2`, several with commas",
            )
        parts.append(option.replace("=", ": ", 1))
    return f"strategy={{{', '.join(parts)}}}"


def _shared_overrides(config: Config, nproc: int, steps: int, on_progress: OnProgress) -> list[str]:
    """Return the overrides of all runs.

    They set the batch of the user's own run, a few steps and exact arithmetic, and turn off what is
    drawn at random.

    Args:
        config: The user's config.
        nproc: Ranks of each strategy.
        steps: Of each run.
        on_progress: Is called while the model's config is downloaded.
    """
    samples = resolve_batch(config, nproc).global_samples
    micro_batch = _common_micro_batch(config, max(1, samples // nproc))
    overrides = [
        f"batch={{global_samples: {samples}, micro_batch: {micro_batch}}}",
        f"run.steps={steps}",
        "run.log_every=1",
        "run.report_to=[]",
        "precision={kind: fp32, tf32: false}",
        "checkpoint={asynchronous: false, export: none, keep: 1, keep_best: false}",
        f"eval={{at_start: false, micro_batch: {config.eval.micro_batch or 'null'}}}",
        "launch.max_restarts=0",
    ]
    for key in _dropouts(config, on_progress):
        overrides.append(f"model.{key}=0.0")
    if config.adapter.kind == "lora":
        overrides.append("adapter.dropout=0.0")
    return overrides


def _common_micro_batch(config: Config, per_rank: int) -> int:
    """Return a micro-batch that every strategy can have. `per_rank`: samples of a rank in a step.

    It is at most the user's own, and small enough for a pipeline to have work for all stages.
    """
    most = min(config.batch.micro_batch or per_rank, per_rank)
    divisors = [size for size in range(1, most + 1) if per_rank % size == 0]
    return max(divisors)


def _dropouts(config: Config, on_progress: OnProgress) -> list[str]:
    """Return the keys below `model` that set a dropout.

    Of a module of the user's own they are the arguments that are named like one.
    """
    if config.plain:
        section = "options"
        values = config.model.options
    else:
        # Slow imports, which a module of the user's own does not need.
        from drumline.models.files import resolve
        from drumline.models.load import load_config

        section = "config"
        path = resolve(config.model, on_progress)
        values = load_config(path, config.model).to_dict()
    keys = []
    for key, value in values.items():
        if key.endswith(DROPOUT) and isinstance(value, float) and value > 0:
            keys.append(f"{section}.{key}")
    return keys


def _compare_strategy(
    read: Read,
    common: list[str],
    name: str,
    spelled: str,
    nproc: int,
    root: Path,
    on_progress: OnProgress,
) -> Outcome:
    """Train under one strategy and compare it with one process.

    Args:
        read: Loads the user's config, with overrides over it.
        common: The overrides of all runs.
        name: The strategy, as `fsdp2 tp=2`.
        spelled: The override that chooses it.
        nproc: Its ranks.
        root: The folder of all runs.
        on_progress: Is called while it runs.
    """
    run_dir = root / name_of_strategy_folder(name)
    own = [spelled, f"launch.nproc={nproc}", override("run.dir", run_dir)]
    try:
        plan = _train(read([*common, *own]), name, on_progress)
        apart = difference(run_dir, root / "reference")
    except WorkerFailed as failure:
        return Outcome(name, nproc, None, f"failed: {failure.what}")
    except DrumlineError as refusal:
        return Outcome(name, None, None, f"refused: {refusal.line()}")
    return Outcome(name, plan.mesh.world_size, apart)


def _train(loaded: Loaded, name: str, on_progress: OnProgress) -> Plan:
    """Train to the end, and return the plan.

    Raises WorkerFailed if a rank of a strategy failed, DrumlineError for one of the reference: then
    there is nothing to compare with.
    """
    from drumline.launch.local import launch_trial
    from drumline.train.setup import Request, claim_run_dir, make_plan

    request = Request(loaded)
    plan = make_plan(request, on_progress=on_progress)
    plan_path, _ = claim_run_dir(plan, request)
    code = launch_trial(plan, plan_path, name, on_progress)
    if not code:
        return plan
    if name == REFERENCE:
        raise DrumlineError(
            "the work does not run on one process; nothing can be compared with it",
            where=plan.run_dir,
        )
    raise WorkerFailed(f"with exit code {code}, as reported above; --keep FOLDER keeps its logs")


def _open_folder(keep: Path | None) -> contextlib.AbstractContextManager[str]:
    """Return a context with the folder of the runs: `keep`, or a temporary one.

    Raises EnvironmentFault if `keep` is not empty.
    """
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="drumline-verify-")
    if keep.exists() and any(keep.iterdir()):
        raise EnvironmentFault(
            "the folder is not empty", where=str(keep), fix="choose another with --keep"
        )
    keep.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(str(keep))


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of two runs.

    Of metrics: |a − b| / |b| of a step. Of tensors: ‖a − b‖ / ‖b‖ (L2 norms, in fp64) of one tensor.
    `moments` None: the optimizer has none. `worst`: the name of the tensor with the largest distance.

    `noise`: weights whose true gradient is 0, such as the biases of attention's keys, which cancel in
    softmax. Adam makes full steps of their rounding, which differ with the strategy and change no output.
    So the distance of such weights is multiplied by their share of the gradient, and that of their moments
    is relative to the norm of all moments. Such entries of a vector (GPT-2 has one bias of queries, keys
    and values) are left out.
    """

    loss: float
    grad_norm: float
    weights: float
    moments: float | None
    worst: str
    noise: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The number that a tolerance is compared with.

        Moments count half: among them are averages of squares, and if a gradient differs by 1e-5 of itself,
        its square does by 2e-5.
        """
        return max(self.loss, self.grad_norm, self.weights, (self.moments or 0.0) / 2)


class TensorDifference(NamedTuple):
    """A tensor of two checkpoints: `apart` ‖a − b‖, `norm` ‖b‖, `total` Σ|b|."""

    name: str
    apart: float
    norm: float
    total: float


def difference(run: Path, reference: Path) -> Difference:
    """Return the difference of two finished runs of the same work.

    It reads checkpoints in portions: two models need not fit into memory.

    Raises CheckpointError if one has no whole checkpoint, or another set of tensors.
    """
    own_events = events.read(run / "events.jsonl")
    expected_events = events.read(reference / "events.jsonl")
    loss = _largest_difference(
        events.series(own_events, "loss"),
        events.series(expected_events, "loss"),
        SMALLEST_LOSS,
    )
    grad_norm = _largest_difference(
        events.series(own_events, "grad_norm"),
        events.series(expected_events, "grad_norm"),
        SMALLEST_GRAD_NORM,
    )
    partly: list[str] = []
    tensors = list(_tensors(run, reference, partly))
    by_tensor, noise = _distances(tensors)
    weights = []
    moments = []
    for name, distance in by_tensor.items():
        if _is_in(name, "model."):
            weights.append(distance)
        elif _is_in(name, "optim."):
            moments.append(distance)
    largest_of_moments = None
    if moments:
        largest_of_moments = max(moments)
    return Difference(
        loss=loss,
        grad_norm=grad_norm,
        weights=max(weights),
        moments=largest_of_moments,
        worst=max(by_tensor, key=lambda name: by_tensor[name]),
        noise=tuple(sorted({*noise, *partly})),
    )


def _is_in(name: str, section: str) -> bool:
    """Return whether the name of a tensor is in a section of a checkpoint: `model.` or `optim.`.

    The names of a trained model beside the policy begin with its role: `value/model.…`.
    """
    return name.rpartition("/")[2].startswith(section)


def _distances(
    tensors: list[TensorDifference],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the relative difference of each tensor, and the weights whose gradient is noise.

    `Difference.noise` says what that is, and how the distance of such tensors is measured.
    """
    noise = _find_noise(tensors)
    # Of all tensors of one moment together: the slot is the end of a tensor's name, as `exp_avg`.
    norm_of_slot: dict[str, float] = {}
    for tensor in tensors:
        slot = tensor.name.rpartition(".")[2]
        norm_of_slot[slot] = math.hypot(norm_of_slot.get(slot, 0.0), tensor.norm)
    distances = {}
    for name, apart, norm, _ in tensors:
        # A moment is named after its weight: optim.WEIGHT.SLOT and model.WEIGHT.
        weight, _, slot = name.replace("optim.", "model.", 1).rpartition(".")
        if name in noise:
            distance = apart * noise[name]
        elif _is_in(name, "optim.") and weight in noise:
            distance = apart / max(norm_of_slot[slot], SMALLEST_NORM)
        else:
            distance = apart / max(norm, SMALLEST_NORM)
        distances[name] = _nan_to_inf(distance)
    return distances, tuple(sorted(noise))


def _find_noise(tensors: list[TensorDifference]) -> dict[str, float]:
    """Return the weights whose gradient is rounding alone, each with its share of the gradient's norm.

    The share is known by Adam's second moments, which are averages of the gradient's squares. Under
    an optimizer without them the result is empty.
    """
    squares = {}
    for tensor in tensors:
        if tensor.name.endswith(SECOND):
            squares[tensor.name.removesuffix(SECOND)] = tensor.total
    whole = sum(squares.values())
    if not whole:
        return {}
    noise = {}
    for name, square in squares.items():
        share = math.sqrt(square / whole)
        if share <= ROUNDING:
            noise[name.replace("optim.", "model.", 1)] = share
    return noise


def _nan_to_inf(value: float) -> float:
    """Return infinity for NaN, which `max` would pass over, and any other value as it is."""
    if math.isnan(value):
        return float("inf")
    return value


def _largest_difference(mine: dict[int, float], reference: dict[int, float], floor: float) -> float:
    """Return the largest relative difference of a step.

    It is infinite if a step is missing on one side, or a number is not finite.

    Args:
        mine: Step → value.
        reference: Step → value, which the difference is relative to.
        floor: A smaller reference counts as this one.
    """
    if mine.keys() != reference.keys() or not mine:
        return float("inf")
    # NaN is null on disk, and infinity a text.
    for value in (*mine.values(), *reference.values()):
        if not isinstance(value, float | int):
            return float("inf")
    differences = []
    for step, value in reference.items():
        scale = max(abs(value), floor)
        apart = abs(mine[step] - value) / scale
        differences.append(_nan_to_inf(apart))
    return max(differences)


def _tensors(run: Path, reference: Path, partly: list[str]) -> Iterator[TensorDifference]:
    """Yield the difference of each tensor of the newest checkpoints.

    Args:
        run: The run folder of a strategy.
        reference: The run folder of one process.
        partly: Gets the names of vectors with entries whose gradient is rounding; these entries
            count as 0.

    Raises CheckpointError if one of the checkpoints lacks a tensor.
    """
    from drumline.checkpoint.load import check

    own_path = _newest_checkpoint(run)
    expected_path = _newest_checkpoint(reference)
    own_tensors = check(own_path, verify=False, alone=True).tensors
    expected_tensors = check(expected_path, verify=False, alone=True).tensors
    own_names = _names_of_weights_and_moments(own_tensors)
    expected_names = _names_of_weights_and_moments(expected_tensors)
    if own_names != expected_names:
        apart = sorted(own_names ^ expected_names)
        raise CheckpointError(
            f"one of the checkpoints lacks {apart[0]} ({len(apart)} such)", where=str(run)
        )
    shapes = {name: expected_tensors[name].shape for name in sorted(own_names)}
    for names in _portions(shapes):
        own = _read_tensors(own_path, own_tensors, names)
        expected = _read_tensors(expected_path, expected_tensors, names)
        # The reference alone decides: both sides must leave out the same entries.
        masks = _masks_of_rounding(expected)
        for weight, mask in masks.items():
            if mask.any():
                partly.append(weight)
        for name in names:
            mask = masks.get(_weight(name))
            yield _compare_tensors(name, own[name], expected[name], mask)


def _names_of_weights_and_moments(names: Iterable[str]) -> set[str]:
    """Return those names of a checkpoint's tensors that are of weights or of an optimizer's moments.

    What a strategy keeps for itself, such as DiLoCo's outer momentum, has no match in one process.
    """
    return {name for name in names if _is_in(name, "model.") or _is_in(name, "optim.")}


def _newest_checkpoint(run: Path) -> Path:
    """Return the newest whole checkpoint of a run. Raises CheckpointError if there is none."""
    from drumline.checkpoint.load import newest

    path = newest(run / "checkpoints", verify=True, alone=True).path
    if path is None:
        raise CheckpointError("the run left no whole checkpoint", where=str(run))
    return path


def _read_tensors(path: Path, entries: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return some tensors of a checkpoint. `entries`: the shapes and types of all."""
    import torch

    from drumline.checkpoint.load import load

    tensors = {}
    for name in names:
        entry = entries[name]
        tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    load(path, tensors, alone=True, partly=True)
    return tensors


def _masks_of_rounding(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return for each vector with second moments which of its entries are rounding (`_rounded`)."""
    masks = {}
    for name, tensor in tensors.items():
        if name.endswith(SECOND) and tensor.ndim == 1:
            masks[_weight(name)] = _rounded(tensor)
    return masks


def _compare_tensors(name: str, own: Any, expected: Any, mask: Any) -> TensorDifference:
    """Return the difference of two tensors, computed in fp64.

    Args:
        name: Of the tensor.
        own: A strategy's tensor.
        expected: That of one process.
        mask: Of entries that count as 0; None: there are none.
    """
    import torch

    own = own.double()
    expected = expected.double()
    if mask is not None and mask.shape == own.shape:
        own = own.masked_fill(mask, 0.0)
        expected = expected.masked_fill(mask, 0.0)
    apart = torch.linalg.vector_norm(own - expected)
    norm = torch.linalg.vector_norm(expected)
    total = expected.abs().sum()
    return TensorDifference(name, float(apart), float(norm), float(total))


def _weight(name: str) -> str:
    """Return the weight that a tensor is, or is a moment of."""
    if "optim." not in name:
        return name
    return name.replace("optim.", "model.", 1).rpartition(".")[0]


def _rounded(second: Any) -> Any:
    """Return which entries of second moments are of rounding beside the largest of their tensor, as bool.

    One bias of queries, keys and values has such entries.
    """
    # Squared, since second moments are squares of gradients.
    threshold = ROUNDING**2 * second.max()
    # An entry of 0 has had no gradient at all, so Adam made no steps of it.
    return (second > 0) & (second <= threshold)


def _portions(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    """Yield names in portions of at most PORTION entries. A weight and its moments are in one portion."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(_weight(name), []).append(name)
    portion: list[str] = []
    entries = 0
    for names in groups.values():
        size = sum(math.prod(shapes[name]) for name in names)
        if portion and entries + size > PORTION:
            yield portion
            portion = []
            entries = 0
        portion += names
        entries += size
    yield portion
