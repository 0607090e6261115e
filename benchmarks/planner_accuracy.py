"""The planner held against what was measured: by others on GPUs (`published`), and here on CPUs under each strategy (`cpu`).

    python benchmarks/planner_accuracy.py [published] [fit] [seconds] [cpu] [--runs WORD] [--kept FOLDER] [--out F.json] [--figure F.png]

published: the rows of benchmarks/planner_published.py that there is a prediction for, and why there is none for the others.
fit: the constants of drumline/planner/cost/fitted.py fitted anew, and what is left of the rows; then each source scored by constants that
have not seen it, the figure that counts. Some minutes.
seconds: of a step of some of these runs, launched as a user launches them and measured in turn, against the plan's by this machine's
calibration (`drumline calibrate` before); within 20% is the aim, on a machine that is idle.
cpu: real runs at 1, 2 and 4 processes over gloo. Parameters, gradients, optimizer (bytes held by the engine) and traffic (bytes counted
at the collectives) should be as predicted to the byte, the peak (of live tensors, by a tracker in one step) within 10%. Seconds are shown:
this machine's rates are taken from its calibration where there is one, and its cores may be busy with other things.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.planner_published import (
    ROWS,
    foundry_run,
    foundry_subset,
    foundry_table,
    predicted,
)
from benchmarks.planner_runs import RUNS, TIMED, measure, timed

EXACT = ("parameters", "gradients", "optimizer", "traffic")
NEAR = 0.10  # of the peak
MILLIONTH = 1e-6
SHOWN = (*EXACT, "peak", "seconds")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="both where none is named")
    parser.add_argument("--runs", default="", help="cpu: only runs with this in their names")
    parser.add_argument("--rounds", type=int, default=2, help="seconds: of all runs")
    parser.add_argument(
        "--kept",
        type=Path,
        help="cpu: keep what runs measured here; those that are here already are only predicted anew",
    )
    parser.add_argument("--figure", type=Path, help="draw predicted against measured as PNG")
    options = common.parse(parser, runs="single, SGD", rounds=1)
    parts = options.parts or ["published", "cpu"]
    if unknown := set(parts) - {"published", "fit", "cpu", "seconds"}:
        parser.error(f"no part {', '.join(unknown)}: there are published, fit, cpu and seconds")
    report: dict[str, Any] = {}
    if "published" in parts:
        report["published"] = [published(row) for row in ROWS]
    if "fit" in parts:
        report |= fitted_anew()
    if "seconds" in parts:
        report["seconds"] = []
        for run in timed(options.rounds, TIMED[:1] if options.smoke else TIMED):
            report["seconds"].append(run)
            off = run["predicted"] / median(run["measured"]) - 1
            each = ", ".join(f"{value:.3f}" for value in run["measured"])
            print(
                f"{run['name']:34} predicted {run['predicted']:.3f} s, measured {each}: {off:+.1%}"
            )
    if "cpu" in parts:
        chosen = [run for run in RUNS if options.runs in run.name]
        if options.kept:
            report["kept"] = (
                "what was measured may be of earlier calls with the same folder, on a machine busy with other work; predictions are of now"
            )
        report["cpu"] = []
        print("  ".join(["run".ljust(34), *(name.rjust(12) for name in SHOWN)]))
        with tempfile.TemporaryDirectory() as folder:
            for figures in measure(chosen, options.kept or Path(folder)):
                report["cpu"].append(figures)
                print(line(figures), flush=True)
        report["summary"] = summary(report["cpu"])
        print(json.dumps(report["summary"], indent=1))
    common.write(report, options.out)
    if options.figure:
        draw(report.get("cpu", []), options.figure)


def fitted_anew() -> dict[str, Any]:
    """The constants of a fit to all rows, the summary of what it leaves, and that of sources left out one at a time; with each row's."""
    from benchmarks import planner_fit as fit

    rows = [row for row in ROWS if not row.without]
    constants = fit.fit(fit.usable(rows))
    print("constants: " + ", ".join(f"{name} {value:.4g}" for name, value in constants.items()))
    fit.set_constants(constants)
    without: dict[str, dict[str, float]] = {}
    report: dict[str, Any] = {"constants": constants, "constants without": without}
    left_out = list(fit.left_out(rows, without))
    for name, found in (("fitted", fit.seen(rows)), ("left out", left_out)):
        report[name] = fit.summary(found)
        report[name]["rows"] = {
            row.name: {kind: math.exp(-value) - 1 for kind, value in errors.items()}
            for row, errors, _ in found
        }
        print(f"\n{name}:", *fit.lines(report[name]), sep="\n")
    report["ranges"] = fit.ranges(report["left out"])
    report["coverage"] = fit.coverage(left_out)
    for group, kinds in report["coverage"].items():
        said = [f"{kind} {inside} of {number}" for kind, (inside, number) in kinds.items()]
        print(f"within the ranges of the other sources: {group}: {', '.join(said)}")
    report["rest of llm-foundry"] = rest_of_llm_foundry(without["llm-foundry"])
    return report


def rest_of_llm_foundry(without: dict[str, float]) -> dict[str, Any]:
    """The median errors of speed of the rows of its table that no fit has: under the constants of now, and under those without its rows."""
    from benchmarks import planner_fit as fit

    table = foundry_table()
    rest = [foundry_run(row) for row in table if row not in foundry_subset(table)]
    kept = {name: getattr(fit.fitted, name) for name in without}
    made: dict[str, Any] = {"rows": len(rest)}
    for name, constants in (("fitted", kept), ("left out", without)):
        fit.set_constants(constants)
        made[name] = median(abs(math.exp(-fit.residuals(row)["speed"]) - 1) for row in rest)
    fit.set_constants(kept)
    print(f"rows of llm-foundry that no fit has: {made}")
    return made


def published(row: Any) -> dict[str, Any]:
    """One row in full, printed as lines."""
    found = predicted(row)
    print(f"{row.name}" + (f": no prediction, {row.without}" if row.without else ""))
    for way in found:
        said = [
            f"{name} {shown(name, way['predicted'][name])} against {shown(name, row.measured[name])} ({way['error'][name]:+.1%})"
            for name in way["error"]
        ]
        print(
            "    "
            + "; ".join(said)
            + "".join(f", {key} {value}" for key, value in way["open"].items())
        )
    return {
        "name": row.name,
        "measured": row.measured,
        "without": row.without,
        "predictions": found,
    }


def shown(name: str, value: float) -> str:
    return (
        f"{value / 2**30:.2f} GiB"
        if name in ("active", "reserved")
        else f"{value:.3g}"
        if value < 100
        else f"{value:,.0f}"
    )


def line(figures: dict[str, Any]) -> str:
    """`exact`, or how far the measured value is from the predicted one."""
    if "error" in figures:
        return f"{figures['name']:34}  failed: {figures['error'].strip().splitlines()[-1][:90]}"
    words = []
    for name in SHOWN:
        category = figures["categories"].get(name)
        words.append("" if category is None else _off(name, **category))
    return "  ".join([f"{figures['name']:34}", *(word.rjust(12) for word in words)])


def _off(name: str, predicted: float, measured: float) -> str:
    if name in EXACT and same(predicted, measured):
        return "exact"
    return f"{predicted / measured - 1:+.1%}" if measured else f"{predicted:.0f} of 0"


def same(predicted: float, measured: float) -> bool:
    """To the byte, or to a millionth: under tensor parallelism 20 bytes are sent for each token that carries a loss, and a batch may have
    one more or less of these than the mean that is planned with."""
    return abs(predicted - measured) <= max(1, MILLIONTH * measured)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs that came out as they should, by category, and the largest relative error (predicted / measured - 1) of each."""
    made: dict[str, Any] = {"failed": [f["name"] for f in found if "error" in f]}
    for name in SHOWN:
        rows = {f["name"]: f["categories"][name] for f in found if name in f.get("categories", {})}
        errors = {
            run: r["predicted"] / r["measured"] - 1 for run, r in rows.items() if r["measured"]
        }
        made[name] = {
            "runs": len(rows),
            "worst": max(errors.items(), key=lambda e: abs(e[1]), default=None),
        }
        if name in EXACT:
            made[name]["exact"] = sum(same(**r) for r in rows.values())
        if name == "peak":
            made[name][f"within {NEAR:.0%}"] = sum(abs(error) <= NEAR for error in errors.values())
    return made


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """A point for each run and category, on logarithmic axes; on the line it is as predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bytes_, seconds) = pyplot.subplots(1, 2, figsize=(11, 5))
    for axes, names, unit, scale in (
        (bytes_, (*EXACT, "peak"), "MiB", 2**20),
        (seconds, ("seconds",), "seconds a step", 1),
    ):
        drawn = []
        for name in names:
            points = [f["categories"][name] for f in found if name in f.get("categories", {})]
            points = [p for p in points if p["predicted"] > 0 and p["measured"] > 0]
            axes.scatter(
                [p["measured"] / scale for p in points],
                [p["predicted"] / scale for p in points],
                s=18,
                alpha=0.7,
                label=name,
            )
            drawn += [p["measured"] / scale for p in points]
        if drawn:
            ends = [min(drawn) / 1.5, max(drawn) * 1.5]
            axes.plot(ends, ends, color="gray", linewidth=0.8)
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        axes.legend()
    figure.suptitle(f"{len(found)} runs on CPUs, 1 to 4 processes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
