"""`drumline verify`: train a few steps on one process and under each strategy, and compare the numbers.

Losses, gradient norms and every tensor of the last checkpoints are compared.
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

# Combinations that are compared by default with four processes or more, besides the strategies
# whose StrategySpec has `compared`.
MIXES = ("ddp tp=2", "fsdp2 tp=2", "ddp pp=2", "fsdp2 cp=2")
REFERENCE = "one process"
# A function that loads the user's config with the overrides that it is given.
Read = Callable[[list[str]], Loaded]
# Names of a model's options for dropout end with one of these.
DROPOUT = ("dropout", "pdrop", "dropout_prob", "_drop")
# The most entries of tensors that are read from a checkpoint at once.
PORTION = 64 * 2**20
# Relative differences are divided by at least these: a tensor may be all zeros, and so may a
# gradient.
SMALLEST_NORM = 1e-12
SMALLEST_GRAD_NORM = 1e-30
# Differences of losses are divided by at least this. The loss of a policy is a mean of advantages,
# which cancel at the first step, so that only rounding is left.
SMALLEST_LOSS = 0.1
# A weight whose gradient has at most this share of the gradient's norm is taken to have a true
# gradient of 0. Should it be a small gradient after all, no harm is done: its difference is
# weighted by the share, and to first order that is what it can change of the loss.
ROUNDING = 1e-5
# The ending of the names of Adam's second moments.
SECOND = ".exp_avg_sq"
# The largest relative difference that counts as the same by default; runs are fp32.
TOLERANCE = 1e-5
# A strategy may differ by this many times the difference between two micro-batches on one process.
# Another micro-batch changes the order of sums in one place; a strategy changes it in a few
# (between ranks, in collectives, within a product that is split).
ROUNDING_FACTOR = 4
# The largest difference that may count as rounding, as a share of what one sample does to the
# gradient. Beyond it a sample that is lost or counted twice could not be told from rounding.
LARGEST_ROUNDING = 0.1


@dataclass(frozen=True)
class Outcome:
    """The comparison of one strategy with one process, or why there is none."""

    # The strategy, as `fsdp2 tp=2`.
    name: str
    # The number of its ranks; None if it was refused before it started.
    ranks: int | None
    # Its difference from one process; None if it was refused or failed.
    apart: Difference | None
    # Why there is no difference: it begins with `refused` or `failed`.
    note: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed after the start, or the last checkpoint cannot be compared."""
        return self.apart is None and self.ranks is not None

    def is_within(self, tolerance: float) -> bool:
        """Return whether nothing speaks against the strategy.

        It trained the numbers of one process up to `tolerance` (the largest relative difference),
        or it was refused before it started.
        """
        if self.apart is None:
            return not self.has_failed
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

    The exit code is 0 if every strategy that runs stays within `tolerance`, and 1 if one differs by
    more, or fails. All runs are in fp32 without TF32, have the same global batch, and have no
    dropout, for which each rank would draw other random numbers.

    Args:
        config_path: The user's config.
        overrides: `key=value`, as on the command line.
        wanted: Strategies, as `fsdp2 tp=2`; empty for all usual ones.
        steps: Optimizer steps of each run.
        nproc: Ranks of each strategy.
        tolerance: The largest relative difference that counts as the same; None for that of
        `compare`.
        keep: A new folder for the runs; None for a temporary one.

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
    """The results of `drumline verify`: an outcome for each strategy."""

    outcomes: tuple[Outcome, ...]
    # The largest relative difference that counts as the same.
    tolerance: float
    # The relative difference between two runs on one process with different micro-batches; None if
    # it was not measured: no strategy was beyond TOLERANCE, or the caller gave a tolerance.
    rounding: float | None = None

    @property
    def same(self) -> bool:
        """Whether at least one strategy ran, and all that ran stay within the tolerance."""
        if not any(outcome.apart for outcome in self.outcomes):
            return False
        return all(outcome.is_within(self.tolerance) for outcome in self.outcomes)


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
    """Train under each strategy and on one process, and return how much the numbers differ.

    The default of `tolerance` is 1e-5. If a strategy differs by more, one process trains once more
    with another micro-batch, since training itself may magnify rounding. Then the tolerance is four
    times the difference of these two runs, but at most a tenth of one sample's share of the batch.

    Args:
        config: A path or the keys themselves.
        overrides: Dotted key → value, or `key=value` as on the command line.
        strategies: As `fsdp2` or `ddp tp=2`; all usual ones by default.
        steps: Optimizer steps of each run.
        nproc: Ranks of each strategy.
        tolerance: The largest relative difference that counts as the same.
        keep: A new folder for the runs; None for a temporary one.
        display: Show progress.
    """
    read = reader(config)
    changes = overrides_of(overrides)
    wanted = list(strategies) or _usual_strategies(nproc)
    # A name that is no strategy fails before the first run.
    override_by_name = {name: strategy_override(name) for name in wanted}
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
            outcome = _compare_strategy(
                read, common, name, override_by_name[name], nproc, root, on_progress
            )
            found.append(outcome)
        outcomes = tuple(found)
        if tolerance is not None:
            return Comparison(outcomes, tolerance)
        is_beyond = False
        for outcome in outcomes:
            if outcome.apart is not None and outcome.apart.largest > TOLERANCE:
                is_beyond = True
        other_micro_batch = _other_micro_batch(plan)
        if not is_beyond or other_micro_batch is None:
            return Comparison(outcomes, TOLERANCE)
        changed = [f"batch.micro_batch={other_micro_batch}", *_one_process(root / "rounding")]
        rounding = _measure_rounding(read([*common, *changed]), root, on_progress)
        if rounding is None:
            return Comparison(outcomes, TOLERANCE)
        share_of_sample = LARGEST_ROUNDING / plan.batch.global_samples
        allowed = min(ROUNDING_FACTOR * rounding, share_of_sample)
        return Comparison(outcomes, max(TOLERANCE, allowed), rounding)


def _usual_strategies(nproc: int) -> list[str]:
    """Return the strategies that are compared by default on `nproc` ranks."""
    strategies = [kind for kind, spec in kinds(StrategyConfig).items() if spec.compared]
    if nproc >= 4:
        strategies += MIXES
    return strategies


def _one_process(run_dir: Path) -> list[str]:
    """Return the overrides of a run on one process."""
    return ["strategy=single", "launch.nproc=1", override("run.dir", run_dir)]


def _measure_rounding(changed: Loaded, root: Path, on_progress: OnProgress) -> float | None:
    """Return the relative difference between two runs on one process with different micro-batches.

    None if the second run fails, or if the difference is not rounding: the losses of the first step
    already differ. Batch norm is an example, since its statistics are of one micro-batch.

    Args:
        changed: The config of the reference with another micro-batch.
        root: The folder of all runs.
        on_progress: Is called while it runs.
    """
    run_dir = root / "rounding"
    reference = root / "reference"
    try:
        _train(changed, f"{REFERENCE}, cut in another way", on_progress)
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
    """Return another micro-batch that divides the global batch; None if there is none.

    It is the next smaller size, which needs less memory, or else the next larger one.
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
    """Print the table and which strategies differ by more than the tolerance. Return the exit code.

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
        if outcome.apart and not outcome.is_within(comparison.tolerance):
            beyond.append(f"{outcome.name} (most in {outcome.apart.worst})")
    if beyond:
        line = f"not what one process trains: {', '.join(beyond)}"
    else:
        line = f"{len(compared)} of {len(outcomes)} strategies train what one process trains"
    console.print(line, highlight=False)
    return int(not comparison.same)


def _table(comparison: Comparison, steps: int) -> Table:
    """Return the table that `drumline verify` prints, with a row for each strategy."""
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
        result = outcome.apart
        if result is None:
            verdict = "failed" if outcome.has_failed else "refused"
            table.add_row(outcome.name, str(outcome.ranks or ""), "", "", "", "", verdict)
            continue
        moments = ""
        if result.moments is not None:
            moments = f"{result.moments:.1e}"
        verdict = "differs"
        if outcome.is_within(tolerance):
            verdict = "same"
        table.add_row(
            outcome.name,
            str(outcome.ranks),
            f"{result.loss:.1e}",
            f"{result.grad_norm:.1e}",
            f"{result.weights:.1e}",
            moments,
            verdict,
        )
    return table


def _print_noise(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print which weights have a true gradient of 0 (see `Difference.noise`), if there are any."""
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
    """Print the relative difference that rounding alone makes on one process."""
    line = (
        f"rounding alone moves one process by {rounding:.1e} when its batch is cut in another"
        f" way; up to {tolerance:.1e} is the same"
    )
    if rounding > tolerance:
        line += " — this training magnifies rounding: take fewer --steps, or a lower optimizer.lr"
    console.print(line, highlight=False, soft_wrap=True)


def strategy_override(name: str) -> str:
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
        steps: Optimizer steps of each run.
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
    """Return the largest micro-batch that divides `per_rank`, the samples of a rank in a step.

    It is at most the user's own micro-batch.
    """
    most = min(config.batch.micro_batch or per_rank, per_rank)
    divisors = [size for size in range(1, most + 1) if per_rank % size == 0]
    return max(divisors)


def _dropouts(config: Config, on_progress: OnProgress) -> list[str]:
    """Return the dotted keys below `model` that set a dropout above 0, such as `config.attn_pdrop`.

    A module of the user's own has its arguments in `model.options`, and those whose names end like
    one of DROPOUT count.
    """
    if config.has_own_module:
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
    override_of_strategy: str,
    nproc: int,
    root: Path,
    on_progress: OnProgress,
) -> Outcome:
    """Train under one strategy and compare it with one process.

    Args:
        read: Loads the user's config, with overrides over it.
        common: The overrides of all runs.
        name: The strategy, as `fsdp2 tp=2`.
        override_of_strategy: The override that chooses it.
        nproc: Its ranks.
        root: The folder of all runs.
        on_progress: Is called while it runs.
    """
    run_dir = root / name_of_strategy_folder(name)
    own = [override_of_strategy, f"launch.nproc={nproc}", override("run.dir", run_dir)]
    try:
        plan = _train(read([*common, *own]), name, on_progress)
    except WorkerFailed as failure:
        return Outcome(name, nproc, None, f"failed: {failure.what}")
    except DrumlineError as refusal:
        return Outcome(name, None, None, f"refused: {refusal.line()}")
    ranks = plan.mesh.world_size
    try:
        found = difference(run_dir, root / "reference")
    except CheckpointError as error:
        return Outcome(name, ranks, None, f"failed: {error.line()}")
    return Outcome(name, ranks, found)


def _train(loaded: Loaded, name: str, on_progress: OnProgress) -> Plan:
    """Train a run to its end, and return its plan.

    Raises WorkerFailed if a rank of a strategy failed, and DrumlineError if the reference failed:
    then there is nothing to compare with.
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
    """The largest relative differences between two runs, `a` and its reference `b`.

    That of a metric is the largest |a − b| / |b| of a step. That of tensors is the largest ‖a − b‖
    / ‖b‖ (L2 norms, in fp64) of a tensor.

    Some weights have a true gradient of 0, such as the biases of attention's keys, which cancel in
    softmax. Their computed gradient is rounding. Adam makes full steps of it, which differ with the
    strategy and change no output. `noise` names these weights, and they are compared in other ways:

    - If a whole tensor is such a weight, its difference is multiplied by its share of the
    gradient's
      norm, and the difference of its moments is divided by the norm of all moments (`_distances`).
    - If only some entries of a vector are (GPT-2 has one bias for queries, keys and values), these
      entries are left out of the weight and of its moments (`_mask_of_rounding`).
    """

    loss: float
    grad_norm: float
    weights: float
    # None if the optimizer has no moments.
    moments: float | None
    # The name of the tensor with the largest difference.
    worst: str
    # Names of the weights that have a true gradient of 0, as a whole or in some entries.
    noise: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The number that is compared with a tolerance.

        The difference of moments is halved: among them are averages of squares, and if a gradient
        differs by a share of 1e-5, its square differs by 2e-5.
        """
        return max(self.loss, self.grad_norm, self.weights, (self.moments or 0.0) / 2)


class TensorDifference(NamedTuple):
    """The difference of a tensor `a` of one checkpoint from `b` of the reference, by its name."""

    name: str
    # ‖a − b‖
    distance: float
    # ‖b‖
    norm: float
    # Σ|b|
    total: float


def difference(run: Path, reference: Path) -> Difference:
    """Return the difference between two finished runs of the same config.

    Checkpoints are read in portions, since two models need not fit into memory.

    Args:
        run: The run folder of a strategy.
        reference: The run folder of one process.

    Raises CheckpointError if a run has no whole checkpoint, or if one has other tensors.
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
    masked_vectors: list[str] = []
    tensors = list(_tensors(run, reference, masked_vectors))
    by_tensor, noise = _distances(tensors)
    weights = []
    moments = []
    for name, relative_difference in by_tensor.items():
        if _is_in(name, "model."):
            weights.append(relative_difference)
        elif _is_in(name, "optim."):
            moments.append(relative_difference)
    largest_of_moments = None
    if moments:
        largest_of_moments = max(moments)
    return Difference(
        loss=loss,
        grad_norm=grad_norm,
        weights=max(weights),
        moments=largest_of_moments,
        worst=max(by_tensor, key=lambda name: by_tensor[name]),
        noise=tuple(sorted({*noise, *masked_vectors})),
    )


def _is_in(name: str, section: str) -> bool:
    """Return whether the name of a tensor is in a section of a checkpoint: `model.` or `optim.`.

    The names of a trained model beside the policy begin with its role: `value/model.…`.
    """
    return name.rpartition("/")[2].startswith(section)


def _distances(
    tensors: list[TensorDifference],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the relative difference of each tensor, and the weights whose gradient is rounding.

    `Difference` says how such weights and their moments are compared.
    """
    noise = _find_noise(tensors)
    # The norm of all tensors of one moment together. The slot ends a tensor's name, such as
    # `exp_avg`.
    norm_of_slot: dict[str, float] = {}
    for tensor in tensors:
        slot = tensor.name.rpartition(".")[2]
        norm_of_slot[slot] = math.hypot(norm_of_slot.get(slot, 0.0), tensor.norm)
    relative_differences = {}
    for name, distance, norm, _ in tensors:
        # A moment is named after its weight: optim.WEIGHT.SLOT and model.WEIGHT.
        weight, _, slot = name.replace("optim.", "model.", 1).rpartition(".")
        if name in noise:
            relative_difference = distance * noise[name]
        elif _is_in(name, "optim.") and weight in noise:
            relative_difference = distance / max(norm_of_slot[slot], SMALLEST_NORM)
        else:
            relative_difference = distance / max(norm, SMALLEST_NORM)
        relative_differences[name] = _nan_to_inf(relative_difference)
    return relative_differences, tuple(sorted(noise))


def _find_noise(tensors: list[TensorDifference]) -> dict[str, float]:
    """Return weight → its share of the gradient's norm, for the weights whose gradient is rounding.

    The share is the root of the weight's share of all second moments of Adam, which are averages of
    the gradient's squares. Under an optimizer without second moments the result is empty.
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
    """Return infinity for NaN, which `max` would ignore, and any other value as it is."""
    if math.isnan(value):
        return float("inf")
    return value


def _largest_difference(mine: dict[int, float], reference: dict[int, float], floor: float) -> float:
    """Return the largest relative difference of a metric over all steps.

    It is infinite if a step is missing on one side, or if a number is not finite.

    Args:
        mine: Step → value.
        reference: Step → value of one process. The difference is divided by it.
        floor: The least number to divide by.
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
        relative_difference = abs(mine[step] - value) / scale
        differences.append(_nan_to_inf(relative_difference))
    return max(differences)


def _tensors(run: Path, reference: Path, masked_vectors: list[str]) -> Iterator[TensorDifference]:
    """Yield the difference of each tensor of the newest checkpoints.

    Args:
        run: The run folder of a strategy.
        reference: The run folder of one process.
        masked_vectors: The names of vectors with entries whose gradient is rounding are appended.
            These entries count as 0.

    Raises CheckpointError if one of the checkpoints lacks a tensor.
    """
    from drumline.checkpoint.load import check

    own_path = _newest_checkpoint(run)
    expected_path = _newest_checkpoint(reference)
    own_tensors = check(own_path, verify=False, collective=False).tensors
    expected_tensors = check(expected_path, verify=False, collective=False).tensors
    own_names = _names_of_weights_and_moments(own_tensors)
    expected_names = _names_of_weights_and_moments(expected_tensors)
    if own_names != expected_names:
        missing = sorted(own_names ^ expected_names)
        raise CheckpointError(
            f"one of the checkpoints lacks {missing[0]} ({len(missing)} such)", where=str(run)
        )
    shapes = {name: expected_tensors[name].shape for name in sorted(own_names)}
    for names in _portions(shapes):
        own = _read_tensors(own_path, own_tensors, names)
        expected = _read_tensors(expected_path, expected_tensors, names)
        # The reference alone decides: both sides must leave out the same entries.
        masks = _masks_of_rounding(expected)
        for weight, mask in masks.items():
            if mask.any():
                masked_vectors.append(weight)
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

    path = newest(run / "checkpoints", verify=True, collective=False).path
    if path is None:
        raise CheckpointError("the run left no whole checkpoint", where=str(run))
    return path


def _read_tensors(path: Path, entries: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the tensors of a checkpoint with these names. `entries`: shapes and types by name."""
    import torch

    from drumline.checkpoint.load import load_tensors

    tensors = {}
    for name in names:
        entry = entries[name]
        tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    load_tensors(path, tensors, collective=False, allow_partial=True)
    return tensors


def _masks_of_rounding(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return weight → mask, for each vector with second moments (see `_mask_of_rounding`)."""
    masks = {}
    for name, tensor in tensors.items():
        if name.endswith(SECOND) and tensor.ndim == 1:
            masks[_weight(name)] = _mask_of_rounding(tensor)
    return masks


def _compare_tensors(name: str, own: Any, expected: Any, mask: Any) -> TensorDifference:
    """Return the difference of two tensors, computed in fp64.

    Args:
        name: The tensor's name.
        own: A strategy's tensor.
        expected: The tensor of one process, of the same shape.
        mask: True for entries that count as 0; None for no such entries.
    """
    import torch

    own = own.double()
    expected = expected.double()
    if mask is not None and mask.shape == own.shape:
        own = own.masked_fill(mask, 0.0)
        expected = expected.masked_fill(mask, 0.0)
    distance = torch.linalg.vector_norm(own - expected)
    norm = torch.linalg.vector_norm(expected)
    total = expected.abs().sum()
    return TensorDifference(name, float(distance), float(norm), float(total))


def _weight(name: str) -> str:
    """Return the name of the weight that a tensor belongs to: itself, or the weight of its moment."""
    if "optim." not in name:
        return name
    return name.replace("optim.", "model.", 1).rpartition(".")[0]


def _mask_of_rounding(second: Any) -> Any:
    """Return a mask of the entries of a vector whose gradient is rounding beside the largest entry's.

    Args:
        second: The second moments of the vector, of the same shape.
    """
    # Squared, since second moments are averages of squares of gradients.
    threshold = ROUNDING**2 * second.max()
    # An entry of 0 never had a gradient, so Adam made no steps of it.
    return (second > 0) & (second <= threshold)


def _portions(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    """Yield the names of tensors in portions of at most PORTION entries together.

    A weight and its moments are in one portion, which may be larger if they are.
    """
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
