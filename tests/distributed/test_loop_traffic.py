"""What a step of the loop costs between host, device and ranks besides its own arithmetic, counted
at the operators that run.

On a CPU nothing is far away, so what is counted is what would make the host wait for a GPU. Three
kinds of steps read and sum more: those that are logged (evaluated, saved), the one whose traffic is
counted, and the one after which `measured` is written. DeepSpeed, fp16, an optimizer without a
fused kernel and gradients in host memory read at once whether the step is finite
(drumline/engine/engine.py). Rows are packs, which transformers would look for in their positions.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint_ranks import run
from tests.distributed.setups import case
from tests.tiny import tiny_model_dir

pytestmark = [
    pytest.mark.claim(
        "a step makes one small collective, and the host waits for none where nothing is logged"
    )
]

STEPS = 12
QUIET = range(8, 11)  # none of these is counted, says what was measured, or is logged
READS = ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__")
SIZED = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}


class Ledger(TorchDispatchMode):
    """Counts by step what the loop does (`sum`: a collective; `read`) and what the engine does
    (`engine read`)."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.inside = False
        self.apart = False
        self.counts: Counter[tuple[int, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not self.inside:
            self.counts[self.step, "sum"] += 1
        if func in SIZED and not self.apart:  # the host waits for the size of the result
            self.counts[self.step, "engine read"] += 1
        return func(*args, **(kwargs or {}))

    def read(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.apart:
                reader = "engine read" if self.inside else "read"
                self.counts[self.step, reader] += 1
            return method(*args, **kwargs)

        return counted

    def engine(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            self.inside = True
            try:
                return method(*args)
            finally:
                self.inside = False

        return within


def spread_loop(built: Any, model: str, strategy: str, degrees: dict[str, int]) -> None:
    """Have a loop of tests.unit.test_loop train a model by a strategy, and save nothing."""
    import torch.distributed as dist

    from drumline.config.config import Config
    from drumline.config.mesh import Mesh
    from drumline.data.batches import collate, learned_segment
    from drumline.dist.reduce import SumReducer
    from drumline.engine.build import build_engine

    values = {
        "data": {"train": [{"kind": "file", "path": "x"}]},
        "run": {"log_every": 100},
        "checkpoint": {"every": None},
        "strategy": strategy,
        "model": {"id": model},
    }
    how = {
        "config": Config.model_validate(values),
        "mesh": Mesh(**degrees),
        "data_parallel": strategy,
        "steps": STEPS,
        "model_path": model,
    }
    built.plan = built.plan.model_copy(update=how)
    built.engine = build_engine(built.plan, "cpu")
    reducer = SumReducer(dist.get_rank(), dist.get_world_size(), "cpu")
    built.reducer = built.measure.reducer = reducer
    built.save = built._save_last = lambda *_: None
    pack = collate([[learned_segment(10), learned_segment(14)]], 0, 24)
    changes: dict[str, Any] = {"micro_batches": [pack] * 2, "totals": (88.0, 96)}
    built.batches = [replace(batch, **changes) for batch in built.batches]


def counts(model: str, strategy: str, degrees: dict[str, int]) -> Counter[tuple[int, str]]:
    """The ledger of this rank over a run."""
    from drumline.dist.reduce import PendingSums
    from tests.unit.test_loop import loop

    ledger = Ledger()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        built, said = loop(Path(folder), steps=range(STEPS), held_out=False)
        spread_loop(built, model, strategy, degrees)
        for name in ("forward_backward", "grad_norm", "step"):
            method = getattr(built.engine, name)
            patch.setattr(built.engine, name, ledger.engine(method))
        for name in READS:
            method = getattr(torch.Tensor, name)
            patch.setattr(torch.Tensor, name, ledger.read(method))
        fetch = PendingSums.fetch
        read = PendingSums.read
        step = built._train_step

        def sent_off(self: PendingSums, *more: torch.Tensor) -> None:
            vars(self).setdefault("sent_off", ledger.step)
            fetch(self, *more)

        def arrives(self: PendingSums) -> Any:
            sent_at = vars(self).get("sent_off", ledger.step)
            if sent_at == ledger.step:  # else it is there
                ledger.counts[ledger.step, "read"] += 1
            ledger.apart = True
            try:
                return read(self)
            finally:
                ledger.apart = False

        def stepped(*arguments: Any) -> None:
            ledger.step += 1
            step(*arguments)

        patch.setattr(PendingSums, "fetch", sent_off)
        patch.setattr(PendingSums, "read", arrives)
        built._train_step = stepped  # type: ignore[method-assign]
        with ledger:
            built.run()
    steps = [event["step"] for event in said if event["kind"] == "step"]
    assert steps == [STEPS]
    return ledger.counts


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        case("ddp", {"replicate": 2}, id="ddp", full=False),
        case("fsdp2", {"shard": 2}, id="fsdp2", full=True),
        case("local_sgd", {"replicate": 2}, id="local_sgd", full=True),
    ],
)
def test_a_step_is_one_collective_and_nothing_is_waited_for(
    tmp_path: Path, strategy: str, degrees: dict[str, int]
) -> None:
    model = str(tiny_model_dir(tmp_path / "model"))
    for found in run(2, counts, model, strategy, degrees):
        for step in QUIET:
            assert found[step, "sum"] == 1
            assert found[step, "read"] == 0
            assert found[step, "engine read"] == 0
        # The ledger sees what a logged step and the end do.
        assert found[STEPS, "read"] > 0
        assert found[STEPS, "sum"] > 1
