"""Checkpoints of several ranks: written once, read by any other number of ranks, and one outcome for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.checkpoint.load import check, load, newest
from drumline.checkpoint.manifest import read_manifest
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.checkpoint.storage import read_index
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing, run

ALONE, TWO, THREE = 0, 2, 3
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WIDTHS = (7, 5, 3)  # odd and small: uneven shards, and ranks without a row


def plain(fill: bool) -> dict[str, torch.Tensor]:
    return content(1) if fill else blank(content(1))


def sharded(fill: bool) -> dict[str, torch.Tensor]:
    """A model of fully_shard, and its AdamW after (`fill`) or before one step; the same numbers on any number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(i, o) for i, o in zip(WIDTHS, (*WIDTHS[1:], 1), strict=True)])
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, WIDTHS[0])).sum().backward()
    optimizer.step()
    tensors: dict[str, torch.Tensor] = {
        f"model.{name}": p.data for name, p in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        tensors |= {
            f"optim.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()
        }
    if not fill:
        for tensor in tensors.values():
            tensor.fill_(-1)
    return tensors


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()
    }


def saved(
    root: Path, make: Callable[[bool], dict[str, torch.Tensor]], asynchronous: bool
) -> SaveResult:
    tensors = make(True)
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    checkpointer.save(5, tensors, {"step": 5}, None)
    if asynchronous:
        for tensor in tensors.values():
            tensor.fill_(-3)
    (result,) = checkpointer.wait()
    return result


def loaded(root: Path, make: Callable[[bool], dict[str, torch.Tensor]]) -> dict[str, Any]:
    found = newest(root, verify=True)
    assert found.path, found.skipped
    tensors = make(False)
    load(found.path, tensors)
    return {name: tensor.tolist() for name, tensor in whole(tensors).items()}


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@BOTH
@pytest.mark.parametrize(
    "make, writers, readers",
    [
        (plain, TWO, ALONE),
        (plain, ALONE, TWO),
        (sharded, TWO, ALONE),
        (sharded, ALONE, TWO),
        (sharded, THREE, TWO),
    ],
)
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path: Path,
    make: Callable[[bool], dict[str, torch.Tensor]],
    writers: int,
    readers: int,
    asynchronous: bool,
) -> None:
    results = run(writers, saved, tmp_path / "root", make, asynchronous)
    assert [result.error for result in results] == [None] * max(writers, 1)
    assert {(result.path, result.bytes) for result in results} == {
        (tmp_path / "root" / "step-00000005", results[0].bytes)
    }
    expected = {name: tensor.tolist() for name, tensor in make(True).items()}
    for got in run(readers, loaded, tmp_path / "root", make):
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(
                torch.tensor(got[name]),
                torch.tensor(expected[name]),
                rtol=1e-6,
                atol=1e-7,
                msg=name,
            )


def test_replicas_are_written_once_and_spread(tmp_path: Path) -> None:
    (result, _) = run(TWO, saved, tmp_path / "root", plain, True)
    manifest = check(result.path, verify=True)
    index = read_index(result.path, manifest)
    assert len(index.storage_data) == len(manifest.tensors) == len(content(1))
    first, second = (manifest.files[f"__{rank}_0.distcp"].bytes for rank in range(2))
    assert abs(first - second) < 0.1 * (first + second), (first, second)
    assert first + second < 1.3 * sum(
        t.numel() * t.element_size() for t in content(1).values()
    ) + 2048 * len(content(1))


def stages(root: Path) -> dict[str, int]:
    checkpointer = Checkpointer(root, 2, True, "min", True)
    buffers: list[dict[str, int]] = []
    for step in (1, 2):
        checkpointer.save(step, content(step), {}, None)
        buffers.append(
            {name: buffer.data_ptr() for name, buffer in checkpointer.staging.buffers.items()}
        )
    assert all(result.error is None for result in checkpointer.wait())
    assert buffers[0] == buffers[1], "the second save uses the first one's memory again"
    return {name: buffer.nbytes for name, buffer in checkpointer.staging.buffers.items()}


def test_a_replica_stages_its_share_alone(tmp_path: Path) -> None:
    shares = run(TWO, stages, tmp_path)
    assert not set(shares[0]) & set(shares[1])
    assert set(shares[0]) | set(shares[1]) == set(content(1))


def half_each(root: Path) -> str | None:
    """As a pipeline does: each rank names its own tensors, and some that both hold."""
    mine = {
        name: tensor
        for at, (name, tensor) in enumerate(content(1).items())
        if at < 6 or at % 2 == dist.get_rank()
    }
    checkpointer = Checkpointer(root, 2, True, "min", False)
    checkpointer.save(1, mine, {}, None)
    (result,) = checkpointer.wait()
    fresh = blank(mine)
    load(root / "step-00000001", fresh)
    assert differing(fresh, mine) == []
    return result.error


def test_ranks_may_hold_different_tensors(tmp_path: Path) -> None:
    assert run(TWO, half_each, tmp_path) == [None, None]
    fresh = blank(content(1))
    load(tmp_path / "step-00000001", fresh)
    assert differing(fresh, content(1)) == []


def in_the_way(root: Path, asynchronous: bool) -> list[SaveResult]:
    """Rank 1 cannot write its shard in the first save: another file has its name."""
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    make = checkpointer._make_folder

    def make_with_obstacle(job: Any) -> Path:
        folder = make(job)
        (folder / "__1_0.distcp").mkdir(exist_ok=True)
        return folder

    checkpointer._make_folder = make_with_obstacle  # type: ignore[method-assign]
    checkpointer.save(1, content(1), {}, None)
    first = checkpointer.wait()
    checkpointer._make_folder = make  # type: ignore[method-assign]
    checkpointer.save(2, content(2), {}, None)
    return first + checkpointer.wait()


@BOTH
def test_one_ranks_failure_is_everyones_and_the_next_save_goes(
    tmp_path: Path, asynchronous: bool
) -> None:
    results = run(TWO, in_the_way, tmp_path, asynchronous)
    for failed, good in results:
        assert failed.path is None and failed.bytes == 0
        assert (
            failed.error.startswith("rank 1: ")
            and "__1_0.distcp" in failed.error
            and "\n" not in failed.error
        ), failed.error
        assert good.error is None and good.path == tmp_path / "step-00000002"
    assert results[0][0].error == results[1][0].error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def verdicts(root: Path) -> tuple[list[str], str]:
    found = newest(root, verify=True)
    try:
        load(root / "step-00000005", {"model.3": torch.zeros(104, 300 + dist.get_rank())})
    except CheckpointError as error:
        return [reason for _, reason in found.skipped], str(error)
    return [], "loaded"


def test_what_one_rank_finds_all_ranks_know(tmp_path: Path) -> None:
    (result, _) = run(TWO, saved, tmp_path / "root", plain, False)
    for name in read_manifest(result.path).files:
        path = result.path / name
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        one, other = run(TWO, verdicts, tmp_path / "root")
        assert one[0] == other[0] and str(path) in one[0][0], one
        path.write_bytes(raw)
    one, other = run(TWO, verdicts, tmp_path / "root")
    assert one == other and one[0] == []
    assert "model.3 has shape [104, 300] in the checkpoint, [104, 301] in this run" in one[
        1
    ] and one[1].startswith("rank 1: ")


def leaves_early(root: Path) -> None:
    Checkpointer(root, 2, True, "min", True).save(1, {"model.w": torch.ones(4_000_000)}, {}, None)


def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path) -> None:
    run(ALONE, leaves_early, tmp_path)
    fresh = {"model.w": torch.zeros(4_000_000)}
    load(tmp_path / "step-00000001", fresh)
    assert fresh["model.w"].min() == 1


def alone(root: Path) -> int:
    """Rank 0 acts by itself while the group is up (an export)."""
    if dist.get_rank() == 1:
        return 5
    path = newest(root, verify=True, alone=True).path
    assert path
    fresh = blank(content(1))
    load(path, fresh, alone=True)
    return check(path, verify=True, alone=True).step


def test_one_rank_may_read_by_itself(tmp_path: Path) -> None:
    run(TWO, saved, tmp_path / "root", plain, False)
    assert run(TWO, alone, tmp_path / "root") == [5, 5]
