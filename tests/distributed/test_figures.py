"""What a step says of itself where ranks share samples: tokens and losses counted once, rates over
the whole world."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint_ranks import run
from tests.distributed.setups import case

RATE, PEAK = 10.0, 1e6  # FLOPs of a token, and a device's FLOP/s


def last_step(degrees: dict[str, int], devices: int) -> dict[str, float]:
    """The last step event of a run with the fake engine, on this rank. Each data rank has two
    tokens a step."""
    from drumline.config.mesh import Mesh
    from drumline.dist.reduce import SumReducer
    from drumline.plan.plan import Predicted
    from tests.unit.test_loop import loop

    mesh = Mesh(**degrees)
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        built, said = loop(Path(folder), held_out=False, checkpoint={"every": None})
        predicted = Predicted(flops_per_token=RATE, peak_flops_per_device=PEAK)
        changes = {"mesh": mesh, "predicted": predicted, "devices_per_rank": devices}
        built.plan = built.plan.model_copy(update=changes)
        built.reducer = SumReducer(
            rank, dist.get_world_size(), "cpu", contributes=mesh.is_counted(rank)
        )
        built.save = lambda: None  # type: ignore[method-assign]
        built._save_last = lambda *_: None  # type: ignore[method-assign]
        built.run()
    steps = [event for event in said if event["kind"] == "step"]
    return steps[-1]


@pytest.mark.parametrize(
    ("degrees", "data_ranks", "devices"),
    [
        case({"cp": 2}, 1, 1, id="cp", full=False),
        case({"tp": 2}, 1, 1, id="tp", full=True),
        case({"pp": 2}, 1, 1, id="pp", full=True),
        case({"replicate": 2}, 2, 1, id="ddp", full=True),
        case({"replicate": 2}, 2, 4, id="four devices a process", full=True),
    ],
)
def test_tokens_are_counted_once_and_mfu_over_all_devices(
    degrees: dict[str, int], data_ranks: int, devices: int
) -> None:
    events = run(2, last_step, degrees, devices)
    losses = {round(event["loss"], 9) for event in events}
    assert len(losses) == 1
    for event in events:
        tokens = event["tokens"]
        rate = event["tokens_per_s"]
        assert tokens == 2 * data_ranks
        assert rate == pytest.approx(tokens / event["seconds"])
        assert event["mfu"] == pytest.approx(rate * RATE / (PEAK * 2 * devices))
