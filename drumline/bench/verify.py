"""`drumline verify`: a few steps of the user's own work on one process and under each strategy, and how far the numbers lie apart: losses,
gradient norms, and every tensor of the last checkpoints."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from drumline.core.batch import resolve_batch
from drumline.core.config import Config
from drumline.core.load import Loaded, Overrides, override, overrides_of, reader
from drumline.core.out_of_memory import memory_errors
from drumline.core.plan import Plan
from drumline.core.registry import kinds
from drumline.core.strategy import StrategySpec
from drumline.errors import (
    CheckpointError,
    DrumlineError,
    EnvironmentFault,
    UserError,
    WorkerFailed,
)
from drumline.report.bars import OnProgress, aside
from drumline.telemetry import events

# Besides the strategies with `compared`: what is run by default with four processes or more.
MIXES = ("ddp tp=2", "fsdp2 tp=2", "ddp pp=2", "fsdp2 cp=2")
REFERENCE = "one process"
Read = Callable[[list[str]], Loaded]  # the user's config, with overrides over it
DROPOUT = ("dropout", "pdrop", "dropout_prob", "_drop")  # ends of a model's own options
PORTION = 64 * 2**20  # entries read at once
SMALLEST_NORM = 1e-12  # a tensor of zeros has no relative difference
# The loss of a policy is a mean of advantages, which cancel to nothing at the first step: what is left is rounding.
SMALLEST_LOSS = 0.1
# A tensor with so small a share of the gradient's norm has nothing but rounding for a gradient.
ROUNDING = 1e-5
SECOND = ".exp_avg_sq"
TOLERANCE = 1e-5  # relative, in fp32
# Another cut of the batch changes the order of the same sums, as a strategy does. A strategy has a
# few such changes at once (its ranks, its collectives, its parts of a product), so it may be apart
# by a few times what one of them does.
ROUNDING_FACTOR = 4
# A sample that is lost or counted twice moves the gradient by about its share of the global batch.
# Rounding may be allowed a tenth of that: beyond it, a mistake could not be told from rounding.
LARGEST_ROUNDING = 0.1  # samples


@dataclass(frozen=True)
class Outcome:
    """One strategy's row. `apart` None: it was refused before it started, or failed, as `note` says."""

    name: str
    ranks: int | None
    apart: Difference | None
    note: str = ""

    def within(self, tolerance: float) -> bool:
        """Whether it is what one process trains, or was refused before it started."""
        return self.apart.largest <= tolerance if self.apart else not self.note.startswith("failed")


def verify(
    config_path: Path,
    overrides: list[str],
    wanted: list[str],
    steps: int,
    nproc: int,
    tolerance: float | None,
    keep: Path | None,
) -> int:
    """Print the table; 0 where every strategy that runs stays within `tolerance` (relative; None: see `compare`), 1 where one does not or
    fails.

    All runs are fp32 without TF32, with dropout off (each rank draws its own), and have the same global batch. `keep`: a new folder
    for the runs; None: a temporary one. Raises ConfigError and its variants where the config itself cannot be trained on one process.
    """
    found = compare(
        config_path,
        overrides,
        strategies=wanted,
        steps=steps,
        nproc=nproc,
        tolerance=tolerance,
        keep=keep,
        display=True,
    )
    return _print(Console(), found, steps)


@dataclass(frozen=True)
class Comparison:
    """Each strategy against one process. `same`: all that ran stay within the tolerance; what was refused says why in its `note`.

    `rounding`: how far one process lies from itself with the batch cut in another way; None if no
    strategy was beyond TOLERANCE, or a tolerance was given.
    """

    outcomes: tuple[Outcome, ...]
    tolerance: float
    rounding: float | None = None

    @property
    def same(self) -> bool:
        return any(o.apart for o in self.outcomes) and all(
            o.within(self.tolerance) for o in self.outcomes
        )


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
    """The same from Python: `config` is a path or the keys themselves, `strategies` as `fsdp2` or `ddp tp=2`, all usual ones by default.

    `tolerance` None: TOLERANCE, or ROUNDING_FACTOR times the distance between two runs of one
    process that cut the same batch in two ways, if that is more (up to LARGEST_ROUNDING): training
    itself may magnify rounding. The second run is made only if a strategy lies beyond TOLERANCE.
    """
    read, changes = reader(config), overrides_of(overrides)
    wanted = strategies or [
        *(kind for kind, spec in kinds(StrategySpec).items() if spec.compared),
        *(MIXES if nproc >= 4 else ()),
    ]
    spelled = {name: spell(name) for name in wanted}
    with aside(display) as on_progress, _folder(None if keep is None else Path(keep)) as place:
        root = Path(place)
        common = [*changes, *_common(read(changes).config, nproc, steps, on_progress)]
        alone = read(
            [*common, "strategy=single", "launch.nproc=1", override("run.dir", root / "reference")]
        )
        plan = _run(alone, REFERENCE, on_progress)
        outcomes = []
        for name in wanted:
            outcomes.append(_outcome(read, common, name, spelled[name], nproc, root, on_progress))
        if tolerance is not None:
            return Comparison(tuple(outcomes), tolerance)
        is_beyond = any(outcome.apart and outcome.apart.largest > TOLERANCE for outcome in outcomes)
        other_cut = _other_micro_batch(plan)
        if not is_beyond or other_cut is None:
            return Comparison(tuple(outcomes), TOLERANCE)
        again = [
            f"batch.micro_batch={other_cut}",
            "strategy=single",
            "launch.nproc=1",
            override("run.dir", root / "rounding"),
        ]
        rounding = _measure_rounding(read([*common, *again]), root, on_progress)
        if rounding is None:
            return Comparison(tuple(outcomes), TOLERANCE)
        allowed = min(ROUNDING_FACTOR * rounding, LARGEST_ROUNDING / plan.batch.global_samples)
        return Comparison(tuple(outcomes), max(TOLERANCE, allowed), rounding)


def _measure_rounding(again: Loaded, root: Path, on_progress: OnProgress) -> float | None:
    """Return how far one process lies from itself with its batch cut in another way.

    `again`: the work of the reference with another micro-batch. None if that is not rounding: the
    first losses already differ, as with batch norm, whose statistics are of one micro-batch; or if
    it does not run.
    """
    run_dir, reference = root / "rounding", root / "reference"
    try:
        _run(again, f"{REFERENCE}, cut in another way", on_progress)
    except (DrumlineError, WorkerFailed):
        return None
    first_losses = []
    for folder in (run_dir, reference):
        losses = events.series(events.read(folder / "events.jsonl"), "loss")
        first_losses.append({step: losses[step] for step in sorted(losses)[:1]})
    if _largest_difference(first_losses[0], first_losses[1], SMALLEST_LOSS) > TOLERANCE:
        return None
    return difference(run_dir, reference).largest


def _other_micro_batch(plan: Plan) -> int | None:
    """Return another micro-batch that the global batch can be cut into; None if there is none."""
    samples, micro_batch = plan.batch.global_samples, plan.batch.micro_batch
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    smaller = [size for size in sizes if size < micro_batch]
    larger = [size for size in sizes if size > micro_batch]
    if smaller:
        return smaller[-1]
    return larger[0] if larger else None


def _print(console: Console, found: Comparison, steps: int) -> int:
    """Print the table and what lies beyond the tolerance; the exit code."""
    outcomes, tolerance = found.outcomes, found.tolerance
    title = (
        f"{steps} steps against one process: largest relative difference, at most {tolerance:.2g}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("strategy", "ranks", "loss", "grad norm", "weights", "moments", ""):
        table.add_column(column, justify="left" if column in ("strategy", "") else "right")
    for o in outcomes:
        if o.apart is None:
            table.add_row(
                o.name, str(o.ranks or ""), "", "", "", "", o.note.partition(":")[0].split()[0]
            )
            continue
        a = o.apart
        moments = "" if a.moments is None else f"{a.moments:.1e}"
        verdict = "same" if o.within(tolerance) else "differs"
        table.add_row(
            o.name,
            str(o.ranks),
            f"{a.loss:.1e}",
            f"{a.grad_norm:.1e}",
            f"{a.weights:.1e}",
            moments,
            verdict,
        )
    console.print(table)
    for o in outcomes:
        if o.note:
            console.print(f"  {o.name} {o.note}", highlight=False, soft_wrap=True)
    compared = [o for o in outcomes if o.apart is not None]
    noise = sorted({name for o in compared if o.apart for name in o.apart.noise})
    if noise:
        what = f"{noise[0]}{f' and {len(noise) - 1} more' if noise[1:] else ''}: their gradient is rounding alone (they cancel in"
        console.print(
            f"{what} softmax), and Adam makes steps of it; they are compared by their effect on the loss",
            highlight=False,
        )
    if found.rounding is not None:
        line = (
            f"rounding alone moves one process by {found.rounding:.1e} when its batch is cut in another"
            f" way; up to {tolerance:.1e} is the same"
        )
        if found.rounding > tolerance:
            line += (
                " — this training magnifies rounding: take fewer --steps, or a lower optimizer.lr"
            )
        console.print(line, highlight=False, soft_wrap=True)
    if not compared:
        raise UserError(
            "no strategy could be compared", where="--strategies", fix="see the reasons above"
        )
    beyond = [
        f"{o.name} (most in {o.apart.worst})"
        for o in compared
        if o.apart and not o.within(tolerance)
    ]
    if beyond:
        console.print(f"not what one process trains: {', '.join(beyond)}", highlight=False)
    else:
        console.print(
            f"{len(compared)} of {len(outcomes)} strategies train what one process trains",
            highlight=False,
        )
    return int(not found.same)


def spell(name: str) -> str:
    """`fsdp2 tp=2` → the override `strategy={kind: fsdp2, tp: 2}`."""
    kind, *options = name.split()
    if any("=" not in option for option in options):
        raise UserError(
            f"{name!r} is no strategy",
            where="--strategies",
            fix="write it as `fsdp2` or `fsdp2 tp=2`, several with commas",
        )
    return (
        "strategy={"
        + ", ".join([f"kind: {kind}", *(option.replace("=", ": ", 1) for option in options)])
        + "}"
    )


def _common(config: Config, nproc: int, steps: int, on_progress: OnProgress) -> list[str]:
    """Overrides that hold for all runs: the batch of the user's own run, a few steps, exact arithmetic, nothing drawn at random."""
    samples = resolve_batch(config, nproc).global_samples
    # A micro-batch that every strategy can have: at most the user's own, and small enough for a pipeline to have work for all stages.
    per_rank = max(1, samples // nproc)
    micro_batch = max(
        m
        for m in range(1, min(config.batch.micro_batch or per_rank, per_rank) + 1)
        if per_rank % m == 0
    )
    lora = ["adapter.dropout=0.0"] if config.adapter.kind == "lora" else []
    return [
        f"batch={{global_samples: {samples}, micro_batch: {micro_batch}}}",
        f"run.steps={steps}",
        "run.log_every=1",
        "run.report_to=[]",
        "precision={kind: fp32, tf32: false}",
        "checkpoint={asynchronous: false, export: none, keep: 1, keep_best: false}",
        f"eval={{at_start: false, micro_batch: {config.eval.micro_batch or 'null'}}}",
        "launch.max_restarts=0",
        *(f"model.{key}=0.0" for key in _dropouts(config, on_progress)),
        *lora,
    ]


def _dropouts(config: Config, on_progress: OnProgress) -> list[str]:
    """Keys below `model` that set a dropout; of a module of the user's own the arguments that are named like one."""
    if config.plain:
        values, section = config.model.options, "options"
    else:
        from drumline.models.files import resolve
        from drumline.models.load import load_config

        values, section = (
            load_config(resolve(config.model, on_progress), config.model).to_dict(),
            "config",
        )
    return [
        f"{section}.{key}"
        for key, value in values.items()
        if key.endswith(DROPOUT) and isinstance(value, float) and value > 0
    ]


def _outcome(
    read: Read,
    common: list[str],
    name: str,
    spelled: str,
    nproc: int,
    root: Path,
    on_progress: OnProgress,
) -> Outcome:
    run_dir = root / name.replace(" ", "-").replace("=", "")
    try:
        plan = _run(
            read([*common, spelled, f"launch.nproc={nproc}", override("run.dir", run_dir)]),
            name,
            on_progress,
        )
        return Outcome(name, plan.mesh.world_size, difference(run_dir, root / "reference"))
    except WorkerFailed as failure:
        return Outcome(name, nproc, None, f"failed: {failure.what}")
    except DrumlineError as refusal:
        return Outcome(name, None, None, f"refused: {refusal.line()}")


def _run(loaded: Loaded, name: str, on_progress: OnProgress) -> Plan:
    """Train to the end. Raises WorkerFailed where a rank failed."""
    from drumline.launchers.local import launch_trial
    from drumline.train.setup import Request, claim_run_dir, make_plan

    request = Request(loaded)
    plan = make_plan(request, on_progress=on_progress)
    plan_path, _ = claim_run_dir(plan, request)
    if code := launch_trial(plan, plan_path, name, on_progress):
        if name == REFERENCE:
            raise DrumlineError(
                "the work does not run on one process; nothing can be compared with it",
                where=plan.run_dir,
            )
        raise WorkerFailed(
            f"with exit code {code}, as reported above; --keep FOLDER keeps its logs"
        )
    return plan


def _folder(keep: Path | None) -> contextlib.AbstractContextManager[str]:
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
    """Largest relative differences. Of metrics: |a − b| / |b| of a step. Of tensors: ‖a − b‖ / ‖b‖ (L2 norms, in fp64) of one tensor.

    `moments` None: the optimizer has none. `worst`: the name of the tensor with the largest distance. `noise`: weights whose true gradient
    is 0, such as the biases of attention's keys, which cancel in softmax. Adam makes full steps of their rounding, which differ with the
    strategy and change no output; so the distance of such weights is multiplied by their share of the gradient, that of their moments is
    relative to the norm of all moments. Such entries of a vector (GPT-2 has one bias of queries, keys and values) are left out.
    """

    loss: float
    grad_norm: float
    weights: float
    moments: float | None
    worst: str
    noise: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """What a tolerance is held against. Moments count half: among them are averages of squares, and where a gradient differs by 1e-5 of
        itself, its square does by 2e-5."""
        return max(self.loss, self.grad_norm, self.weights, (self.moments or 0.0) / 2)


def difference(run: Path, reference: Path) -> Difference:
    """The difference of two finished runs of the same work. It reads checkpoints in portions: two models need not fit into memory.
    Raises CheckpointError where one has no whole checkpoint, or another set of tensors."""
    past, expected = events.read(run / "events.jsonl"), events.read(reference / "events.jsonl")
    partly: list[str] = []
    by_tensor, noise = _distances(list(_tensors(run, reference, partly)))
    # Of the policy, and of another trainable model (value/model.…).
    weights = {
        name: d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("model.")
    }
    moments = [d for name, d in by_tensor.items() if name.rpartition("/")[2].startswith("optim.")]
    return Difference(
        loss=_largest_difference(
            events.series(past, "loss"), events.series(expected, "loss"), SMALLEST_LOSS
        ),
        grad_norm=_largest_difference(
            events.series(past, "grad_norm"), events.series(expected, "grad_norm"), 1e-30
        ),
        weights=max(weights.values()),
        moments=max(moments) if moments else None,
        worst=max(by_tensor, key=lambda name: by_tensor[name]),
        noise=tuple(sorted({*noise, *partly})),
    )


def _distances(
    tensors: list[tuple[str, float, float, float]],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """(name, ‖a − b‖, ‖b‖, Σ|b|) of all tensors → the relative difference of each, and those weights whose gradient is `noise`."""
    squares = {
        name.removesuffix(SECOND): total for name, _, _, total in tensors if name.endswith(SECOND)
    }
    whole = sum(squares.values())
    shares = {
        name.replace("optim.", "model.", 1): math.sqrt(square / whole)
        for name, square in squares.items()
        if whole
    }
    noise = {name: share for name, share in shares.items() if share <= ROUNDING}
    all_of_slot: dict[str, float] = {}
    for name, _, norm, _ in tensors:
        slot = name.rpartition(".")[2]
        all_of_slot[slot] = math.hypot(all_of_slot.get(slot, 0.0), norm)
    distances = {}
    for name, apart, norm, _ in tensors:
        weight, _, slot = name.replace("optim.", "model.", 1).rpartition(".")
        if name in noise:
            distances[name] = apart * noise[name]
        elif name.rpartition("/")[2].startswith("optim.") and weight in noise:
            distances[name] = apart / max(all_of_slot[slot], SMALLEST_NORM)
        else:
            distances[name] = apart / max(norm, SMALLEST_NORM)
    return {name: d if d == d else float("inf") for name, d in distances.items()}, tuple(
        sorted(noise)
    )


def _largest_difference(mine: dict[int, float], reference: dict[int, float], floor: float) -> float:
    """Relative to the reference, or to `floor` where that is larger. Infinite where a step is missing on one side, or a number is not
    finite."""
    if mine.keys() != reference.keys() or not mine:
        return float("inf")
    if not all(
        isinstance(value, float | int) for value in (*mine.values(), *reference.values())
    ):  # NaN is null on disk, and inf a text
        return float("inf")
    apart = [abs(mine[step] - value) / max(abs(value), floor) for step, value in reference.items()]
    return max((d if d == d else float("inf")) for d in apart)


def _tensors(
    run: Path, reference: Path, partly: list[str]
) -> Iterator[tuple[str, float, float, float]]:
    """(name, ‖a − b‖, ‖b‖, Σ|b|); entries of vectors whose gradient is rounding count as 0, and `partly` names these vectors."""
    import torch

    from drumline.checkpoint.load import check, load, newest

    folders = []
    for folder in (run, reference):
        path = newest(folder / "checkpoints", verify=True, alone=True).path
        if path is None:
            raise CheckpointError("the run left no whole checkpoint", where=str(folder))
        folders.append(path)
    named = [check(path, verify=False, alone=True).tensors for path in folders]
    # What a strategy keeps for itself (DiLoCo's outer momentum) has no match in one process.
    names = [{n for n in tensors if n.startswith(("model.", "optim."))} for tensors in named]
    if names[0] != names[1]:
        apart = sorted(names[0] ^ names[1])
        raise CheckpointError(
            f"one of the checkpoints lacks {apart[0]} ({len(apart)} such)", where=str(run)
        )
    for together in _portions({name: named[1][name].shape for name in sorted(names[0])}):
        pair = []
        for path, tensors in zip(folders, named, strict=True):
            read = {
                n: torch.empty(tensors[n].shape, dtype=getattr(torch, tensors[n].dtype))
                for n in together
            }
            load(path, read, alone=True, partly=True)
            pair.append(read)
        rounded = {
            n.removesuffix(SECOND): _rounded(pair[1][n])
            for n in together
            if n.endswith(SECOND) and pair[1][n].ndim == 1
        }
        partly += [_weight(f"{n}{SECOND}") for n, mask in rounded.items() if mask.any()]
        for name in together:
            mine, expected = (side[name].double() for side in pair)
            mask = rounded.get(_weight(name).replace("model.", "optim.", 1))
            if mask is not None and mask.shape == mine.shape:
                mine, expected = mine.masked_fill(mask, 0.0), expected.masked_fill(mask, 0.0)
            norm = float(torch.linalg.vector_norm(expected))
            yield (
                name,
                float(torch.linalg.vector_norm(mine - expected)),
                norm,
                float(expected.abs().sum()),
            )


def _weight(name: str) -> str:
    """The weight that a tensor is, or is a moment of."""
    return name if "optim." not in name else name.replace("optim.", "model.", 1).rpartition(".")[0]


def _rounded(second: Any) -> Any:
    """bool: entries whose gradient is rounding beside the largest of their tensor, as in one bias of queries, keys and values."""
    return (second > 0) & (second <= ROUNDING**2 * second.max())


def _portions(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    """Names in portions of at most PORTION entries, a weight with its moments at least."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(_weight(name), []).append(name)
    portion, entries = list[str](), 0
    for names in groups.values():
        size = sum(math.prod(shapes[name]) for name in names)
        if portion and entries + size > PORTION:
            yield portion
            portion, entries = [], 0
        portion += names
        entries += size
    yield portion
