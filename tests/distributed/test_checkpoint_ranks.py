"""Checkpoints of several ranks: written once, read by any other number of ranks, and one outcome
for all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.checkpoint.load import check, load_tensors, newest
from drumline.checkpoint.manifest import read_manifest
from drumline.checkpoint.save import Checkpointer, SaveResult
from drumline.checkpoint.storage import read_index
from drumline.errors import CheckpointError
from tests.checkpoint_ranks import blank, content, differing, run
from tests.distributed.setups import case

Tensors = dict[str, torch.Tensor]
Make = Callable[[bool], Tensors]
ALONE = 0
TWO = 2
THREE = 3
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WIDTHS = (7, 5, 3, 1)  # odd and small: uneven shards, and ranks without a row


def plain(fill: bool) -> Tensors:
    tensors = content(1)
    if fill:
        return tensors
    return blank(tensors)


def sharded(fill: bool) -> Tensors:
    """A model of fully_shard, and its AdamW after (`fill`) or before one step; the same numbers on
    any number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, other) for width, other in pairwise(WIDTHS)])
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, WIDTHS[0])).sum().backward()
    optimizer.step()
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.data
        for slot, value in optimizer.state[parameter].items():
            tensors[f"optim.{name}.{slot}"] = value
    if not fill:
        for tensor in tensors.values():
            tensor.fill_(-1)
    return tensors


def whole(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        found[name] = tensor
    return found


def saved(root: Path, make: Make, asynchronous: bool) -> SaveResult:
    tensors = make(True)
    checkpointer = Checkpointer(root, 2, True, "min", asynchronous)
    checkpointer.save(5, tensors, {"step": 5}, None)
    if asynchronous:
        for tensor in tensors.values():
            tensor.fill_(-3)
    (result,) = checkpointer.wait()
    return result


def loaded(root: Path, make: Make) -> dict[str, Any]:
    found = newest(root, verify=True)
    assert found.path, found.skipped
    tensors = make(False)
    load_tensors(found.path, tensors)
    return as_lists(whole(tensors))


def as_lists(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@BOTH
@pytest.mark.parametrize(
    "make, writers, readers",
    [
        case(plain, TWO, ALONE, full=True),
        case(plain, ALONE, TWO, full=True),
        case(sharded, TWO, ALONE, full=False),
        case(sharded, ALONE, TWO, full=True),
        case(sharded, THREE, TWO, full=True),
    ],
)
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path: Path,
    make: Make,
    writers: int,
    readers: int,
    asynchronous: bool,
) -> None:
    results = run(writers, saved, tmp_path / "root", make, asynchronous)
    assert len(results) == max(writers, 1)
    for result in results:
        assert result.error is None
        assert result.path == tmp_path / "root" / "step-00000005"
        assert result.bytes == results[0].bytes
    expected = as_lists(make(True))
    for got in run(readers, loaded, tmp_path / "root", make):
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(got[name]), torch.tensor(values), rtol=1e-6, atol=1e-7, msg=name
            )


def test_replicas_are_written_once_and_spread(tmp_path: Path) -> None:
    (result, _) = run(TWO, saved, tmp_path / "root", plain, True)
    manifest = check(result.path, verify=True)
    index = read_index(result.path, manifest)
    tensors = content(1)
    assert len(index.storage_data) == len(tensors)
    assert len(manifest.tensors) == len(tensors)
    first, second = (manifest.files[f"__{rank}_0.distcp"].bytes for rank in range(2))
    total = first + second
    assert abs(first - second) < 0.1 * total, (first, second)
    least = sum(tensor.nbytes for tensor in tensors.values())
    assert total < 1.3 * least + 2048 * len(tensors)


def stages(root: Path) -> dict[str, int]:
    checkpointer = Checkpointer(root, 2, True, "min", True)
    places: list[dict[str, int]] = []
    for step in (1, 2):
        checkpointer.save(step, content(step), {}, None)
        buffers = checkpointer.staging.buffers
        places.append({name: buffer.data_ptr() for name, buffer in buffers.items()})
    for result in checkpointer.wait():
        assert result.error is None
    assert places[0] == places[1], "the second save uses the first one's memory again"
    return {name: buffer.nbytes for name, buffer in buffers.items()}


def test_a_replica_stages_its_share_alone(tmp_path: Path) -> None:
    shares = run(TWO, stages, tmp_path)
    first, second = map(set, shares)
    assert first.isdisjoint(second)
    assert first | second == set(content(1))


def half_each(root: Path) -> str | None:
    """As a pipeline does: each rank names its own tensors, and some that both hold."""
    mine = {}
    for index, (name, tensor) in enumerate(content(1).items()):
        if index < 6 or index % 2 == dist.get_rank():
            mine[name] = tensor
    checkpointer = Checkpointer(root, 2, True, "min", False)
    checkpointer.save(1, mine, {}, None)
    (result,) = checkpointer.wait()
    fresh = blank(mine)
    load_tensors(root / "step-00000001", fresh)
    assert differing(fresh, mine) == []
    return result.error


def test_ranks_may_hold_different_tensors(tmp_path: Path) -> None:
    assert run(TWO, half_each, tmp_path) == [None, None]
    fresh = blank(content(1))
    load_tensors(tmp_path / "step-00000001", fresh)
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
        assert failed.path is None
        assert failed.bytes == 0
        error = failed.error
        assert error.startswith("rank 1: "), error
        assert "__1_0.distcp" in error
        assert "\n" not in error
        assert error == results[0][0].error
        assert good.error is None
        assert good.path == tmp_path / "step-00000002"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def verdicts(root: Path) -> tuple[list[str], str]:
    found = newest(root, verify=True)
    reasons = [reason for _, reason in found.skipped]
    width = 300 + dist.get_rank()
    try:
        load_tensors(root / "step-00000005", {"model.3": torch.zeros(104, width)})
    except CheckpointError as error:
        return reasons, str(error)
    return [], "loaded"


def verdicts_on_damage(root: Path, paths: list[Path]) -> list[tuple[list[str], str]]:
    """Return what this rank finds while the last byte of each file in turn is another one, and at
    the end."""
    found = []
    for path in paths:
        raw = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        dist.barrier()
        found.append(verdicts(root))
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(raw)
    dist.barrier()
    found.append(verdicts(root))
    return found


def test_what_one_rank_finds_all_ranks_know(tmp_path: Path) -> None:
    (result, _) = run(TWO, saved, tmp_path / "root", plain, False)
    paths = [result.path / name for name in read_manifest(result.path).files]
    first, second = run(TWO, verdicts_on_damage, tmp_path / "root", paths)
    *damaged, (reasons, error) = first
    for path, (one, _), (other, _) in zip(paths, damaged, second[:-1], strict=True):
        assert one == other
        assert str(path) in one[0]
    assert second[-1] == (reasons, error)
    assert reasons == []
    assert error.startswith("rank 1: ")
    assert "model.3 has shape [104, 300] in the checkpoint, [104, 301] in this run" in error


def leaves_early(root: Path) -> None:
    checkpointer = Checkpointer(root, 2, True, "min", True)
    checkpointer.save(1, {"model.w": torch.ones(4_000_000)}, {}, None)


def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path) -> None:
    run(ALONE, leaves_early, tmp_path)
    fresh = {"model.w": torch.zeros(4_000_000)}
    load_tensors(tmp_path / "step-00000001", fresh)
    assert fresh["model.w"].min() == 1


def alone(root: Path) -> int:
    """Rank 0 acts by itself while the group is up (an export)."""
    if dist.get_rank() == 1:
        return 5
    path = newest(root, verify=True, collective=False).path
    assert path
    load_tensors(path, blank(content(1)), collective=False)
    return check(path, verify=True, collective=False).step


def test_one_rank_may_read_by_itself(tmp_path: Path) -> None:
    run(TWO, saved, tmp_path / "root", plain, False)
    assert run(TWO, alone, tmp_path / "root") == [5, 5]
