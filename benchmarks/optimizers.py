"""How far from AdamW over fp32 weights do pure bf16 and other optimizers end? An example on SmolLM2-135M, from several seeds.

    python benchmarks/optimizers.py [--steps 12] [--seeds 0 1 2] [--forms adamw stochastic kahan] [--smoke] [--out FILE.json] [key=value …]

The figure is the held-out loss after the last step: for each form the mean over seeds of its relative distance from AdamW over fp32
weights with the same seed, beside the spread of that over seeds (its largest loss by its smallest). Bytes are those that the runs measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.learning import small, train

CONFIG = "examples/sft_two_tasks.yaml"
PURE = ["precision.kind=bf16", "precision.master=bf16"]
FORMS: dict[str, list[str]] = {
    "adamw": ["precision.kind=bf16"],
    "stochastic": PURE,
    "kahan": [*PURE, "precision.rounding=kahan"],
    "nearest": [*PURE, "precision.rounding=nearest"],
    "adamw_8bit": ["precision.kind=bf16", "optimizer.kind=adamw_8bit"],
    "adamw_4bit": ["precision.kind=bf16", "optimizer.kind=adamw_4bit"],
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="laid over the example's config"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["adamw", "stochastic", "kahan"]
    )
    options = common.parse(parser, steps=2, seeds=[0], forms=["adamw", "stochastic"])
    with tempfile.TemporaryDirectory() as folder:
        sizes = small(Path(folder)) if options.smoke else []
        sizes += [
            f"run.steps={options.steps}",
            f"eval.every={options.steps}",
            "eval.metric=loss",
            "eval.mode=min",
            *options.overrides,
        ]
        figures = compare(options.forms, options.seeds, sizes, Path(folder))
    for form, found in figures["forms"].items():
        print(
            f"{form}: held-out loss {found['loss']}, {found['distance']:+.2%} of AdamW's, {found['bytes']} bytes of states"
        )
    common.write({"config": CONFIG, "steps": options.steps, **figures}, options.out)


def compare(
    forms: list[str], seeds: list[int], overrides: list[str], folder: Path
) -> dict[str, Any]:
    """Forms in turn for each seed."""
    from drumline.telemetry.events import newest_measurement, read

    losses: dict[str, list[float]] = {form: [] for form in forms}
    taken: dict[str, int] = {}
    for seed in seeds:
        for form in forms:
            (folder / form).mkdir(exist_ok=True)
            run = train(CONFIG, seed, folder / form, [*FORMS[form], *overrides])
            events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            losses[form].append([event["loss"] for event in events if event["kind"] == "eval"][-1])
            measured = newest_measurement(read(run / "events.jsonl"))
            taken[form] = (
                0
                if measured is None
                else sum(measured.memory[part] for part in ("parameters", "gradients", "optimizer"))
            )
    base = losses[forms[0]]
    return {
        "spread_of_seeds": max(base) / min(base) - 1,
        "forms": {
            form: {
                "loss": [round(loss, 4) for loss in found],
                "distance": statistics.mean(
                    loss / other - 1 for loss, other in zip(found, base, strict=True)
                ),
                "bytes": taken[form],
            }
            for form, found in losses.items()
        },
    }


if __name__ == "__main__":
    main()
