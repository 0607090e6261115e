"""One rank of test_session_parity: the examples' own loops, tiny, in one process group, or a number
of other sessions.

`python -m tests.distributed.session_worker FOLDER NAME:STRATEGY…` trains each into
FOLDER/NAME-STRATEGY.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import drumline
from tests.distributed import session_loop

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
STEPS = 4
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "device": "cpu",
    "asynchronous": False,
    "steps": STEPS,
    "global_samples": 8,
}


def loops() -> dict[str, Callable[..., object]]:
    sys.path.insert(0, str(EXAMPLES))
    import gpt
    import loop_gan
    import loop_gpt
    import loop_resnet
    import loop_vit
    import resnet
    import vit

    # Adam takes full steps of the rounding in small gradients; a larger epsilon does not.
    loop_vit.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    four = {**OPTIONS, "micro_batch": 4}  # one process accumulates
    return {
        "vit": functools.partial(loop_vit.main, build=functools.partial(vit.ViT, 16, 2, 2), **four),
        # Of a batch norm the micro-batch is what it sees: all of the global batch at once.
        "resnet": functools.partial(
            loop_resnet.main, build=functools.partial(resnet.ResNet, 4, 1), **OPTIONS
        ),
        "gpt": functools.partial(loop_gpt.main, build=functools.partial(gpt.GPT, 16, 2, 2), **four),
        "gan": functools.partial(loop_gan.main, **OPTIONS),
        "mlp": mlp,
    }


def mlp(strategy: str, run_dir: str) -> None:
    """By stages or by a plan; what it evaluates is real on the last stage alone."""
    options = {**OPTIONS, "micro_batch": 2}
    steps = options.pop("steps")
    rows = session_loop.dataset()
    plan = {"0": "colwise", "3": "rowwise"}
    with drumline.session(strategy, run_dir=run_dir, tp_plan=plan, **options) as s:  # type: ignore[arg-type]
        model, _ = s.prepare(
            functools.partial(session_loop.build, 0.0), session_loop.make_optimizer
        )

        def measure(batch: Any) -> tuple[torch.Tensor, int]:
            inputs, labels = batch
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            return loss, len(labels)

        for batch in s.batches(rows, session_loop.collate, steps=steps):
            s.backward(*measure(batch))
            if s.step(max_grad_norm=0.1):
                s.log()
        s.evaluate(rows[:7], session_loop.collate, measure)


def main(folder: Path, *wanted: str) -> None:
    from drumline.dist.start import start, stop

    start("cpu", "gloo", 60.0)
    known = loops()
    for each in wanted:
        name, strategy = each.split(":")
        known[name](strategy, str(folder / f"{name}-{strategy}"))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
