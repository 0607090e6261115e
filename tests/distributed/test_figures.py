"""What a step says of itself where ranks share samples: tokens and losses counted once, rates over the whole world."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint_ranks import run

RATE, PEAK = 10.0, 1e6  # FLOPs of a token, and a device's FLOP/s


def last_step(degrees: dict[str, int], devices: int) -> dict[str, float]:
    """The last step event of a run with the fake engine, on this rank. Each data rank has two tokens a step."""
    from drumline.config.mesh import Mesh
    from drumline.dist.reduce import Gather
    from drumline.plan.plan import Predicted
    from tests.unit.test_loop import loop

    mesh, rank = Mesh(**degrees), dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        built, said = loop(Path(folder), held_out=False, checkpoint={"every": None})
        predicted = Predicted(flops_per_token=RATE, peak_flops_per_device=PEAK)
        built.plan = built.plan.model_copy(
            update={"mesh": mesh, "predicted": predicted, "devices_per_rank": devices}
        )
        built.gather = Gather(rank, dist.get_world_size(), "cpu", counts=mesh.counts(rank))
        built.save = lambda: None  # type: ignore[method-assign]
        built._save_last = lambda *_: None  # type: ignore[method-assign]
        built.run()
    return [event for event in said if event["kind"] == "step"][-1]


@pytest.mark.parametrize(
    ("degrees", "data_ranks", "devices"),
    [
        pytest.param({"cp": 2}, 1, 1, id="cp"),
        pytest.param({"tp": 2}, 1, 1, id="tp", marks=pytest.mark.full),
        pytest.param({"pp": 2}, 1, 1, id="pp", marks=pytest.mark.full),
        pytest.param({"replicate": 2}, 2, 1, id="ddp", marks=pytest.mark.full),
        pytest.param({"replicate": 2}, 2, 4, id="four devices a process"),
    ],
)
def test_tokens_are_counted_once_and_mfu_over_all_devices(
    degrees: dict[str, int], data_ranks: int, devices: int
) -> None:
    events = run(2, last_step, degrees, devices)
    losses = {round(event["loss"], 9) for event in events}
    assert len(losses) == 1
    for event in events:
        assert event["tokens"] == 2 * data_ranks
        assert event["tokens_per_s"] == pytest.approx(event["tokens"] / event["seconds"])
        assert event["mfu"] == pytest.approx(event["tokens_per_s"] * RATE / (PEAK * 2 * devices))
