"""`drumline calibrate`: two real ranks over gloo, what is stored is read back, and a damaged file
is one line."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from drumline.bench.calibrate import group_sizes, rate_of_large, write
from drumline.config.load import load
from drumline.errors import EnvironmentFault
from drumline.hardware.cluster import (
    Calibration,
    CostLine,
    Product,
    calibration_for,
    calibration_path,
    hardware_name,
    line_through,
    read_calibration,
    software_name,
)
from drumline.hardware.detect import Device, Machine, detect
from drumline.planner.cluster import cluster_of
from tests.faults.live import gone, kill
from tests.harness import ENV, Finished, drumline, read_json, start_drumline, survivors

MEASURED = Calibration(
    hardware="a box",
    software="torch 9",
    matmul={"fp32": 2e9},
    memory=1e9,
    collectives={
        ("all_reduce", 2): CostLine(1e-3, 1e9),
        ("all_reduce", 4): CostLine(2e-3, 5e8),
        ("p2p", 2): CostLine(0.0, 1e8),
    },
    host={"to_device": CostLine(1e-5, 2e10)},
    disk={"write": CostLine(1e-3, 1e8)},
    products={"fp32": (Product(8, 16, 16, 1e9), Product(64, 64, 64, 2e9))},
)
CPU = Machine([], 2, 2**33, "cpu", False)
GPU = Machine([Device("NVIDIA X", 10**10)], 2, 2**33, "cuda", True)


def store(calibration: Calibration, path: Path) -> None:
    write(calibration, path, measured_at="today", quick=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drumline"


# A processor that emulates 16-bit products takes minutes; what ranks do in it is tried below.
@pytest.mark.full
def test_two_ranks_measure_and_planning_reads_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU machine measures its processor here, too
    monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
    done = drumline("calibrate", "--quick", "--nproc", 2, timeout=570)

    assert done.code == 0, done.err

    for word in ("fp32", "all-reduce", "reduce-scatter", "p2p", "disk write"):
        assert word in done.out

    assert f"stored in {cache}" in done.out

    machine = detect()
    measured = calibration_for(machine)

    assert measured is not None
    assert measured.hardware == hardware_name(machine)
    assert measured.software == software_name(machine)

    kinds = {kind for kind, _ in measured.collectives}

    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"}

    for line in measured.collectives.values():
        assert line.bandwidth > 1e6
        assert 0 <= line.latency < 10

    assert measured.memory
    assert 1e8 < measured.memory < 1e13
    assert set(measured.matmul) == {"fp32", "bf16", "fp16"}
    assert measured.matmul["fp32"] == rate_of_large(measured.products["fp32"]) > 1e7
    assert set(measured.disk) == {"write", "read"}

    cluster = cluster_of(None, machine, 2, measured)

    assert cluster.rate("fp32") == measured.matmul["fp32"] / 2

    line = measured.collectives["all_gather", 2]
    seconds = line.latency + 1e6 / line.bandwidth

    assert cluster.collective_seconds("all_gather", 1e6, 2) == seconds

    files = [path for path in cache.rglob("*") if path.is_file()]

    assert files == [calibration_path(machine)]
    assert not survivors(str(cache))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_command(
    number: signal.Signals, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It names the ranks' task, so they can be found.
    folder = str(tmp_path)
    monkeypatch.setitem(ENV, "TMPDIR", folder)
    process = start_drumline("calibrate", "--nproc", 2)
    try:
        deadline = time.time() + 60
        while len(survivors(folder)) < 2 and time.time() < deadline:
            time.sleep(0.05)

        assert len(survivors(folder)) == 2

        process.send_signal(number)
        _, err = process.communicate(timeout=30)

        assert gone(folder, 10)
    finally:
        for left in (process.pid, *survivors(folder)):
            kill(left)

    assert not list(cache.rglob("*.json"))

    if number == signal.SIGTERM:
        assert process.returncode == 75
        assert "nothing was stored" in err, err


def test_what_is_written_is_read_back(tmp_path: Path, cache: Path) -> None:
    store(MEASURED, tmp_path / "a" / "box.json")

    assert read_calibration(tmp_path / "a" / "box.json") == MEASURED

    config = tmp_path / "c.yaml"
    config.write_text(
        "data: {train: [{kind: file, path: x}]}\n"
        "cluster: {device: h100, per_node: 2, calibration: a/box.json}\n"
    )
    cluster = cluster_of(load(config, []).config.cluster, CPU, 1)

    assert cluster.calibration == MEASURED
    assert cluster.rate("fp32") == 2e9


def test_a_calibration_is_of_the_machine_and_the_torch_it_was_measured_with(cache: Path) -> None:
    assert calibration_for(GPU) is None
    assert hardware_name(GPU) == "NVIDIA X"
    assert "nccl" in software_name(GPU)

    of_gpu = replace(MEASURED, hardware="NVIDIA X", software=software_name(GPU))
    write(of_gpu, calibration_path(GPU), measured_at="today", quick=False)

    assert calibration_for(GPU) == of_gpu

    store(replace(MEASURED, hardware="NVIDIA X"), calibration_path(GPU))

    assert calibration_for(GPU) is None


class Damage(NamedTuple):
    change: Callable[[str], str]
    message: str


def substitute(before: str, after: str) -> Callable[[str], str]:
    return lambda text: text.replace(before, after)


DAMAGE = {
    "cut off": Damage(lambda text: text[: len(text) // 2], "is no calibration: invalid JSON"),
    "empty": Damage(lambda text: "", "is no calibration"),
    "negative": Damage(substitute("1000000000.0", "-1.0"), "greater than 0"),
    "a field gone": Damage(substitute('"disk"', '"disc"'), "disk: field required"),
    "newer": Damage(
        substitute('"version": 1', '"version": 2'),
        "version: input should be less than or equal to 1",
    ),
    "a list": Damage(lambda text: "[]", "is no calibration"),
    "not finite": Damage(substitute("1000000000.0", "NaN"), "finite number"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(name: str, cache: Path) -> None:
    path = calibration_path(GPU)
    store(MEASURED, path)
    damage = DAMAGE[name]
    path.write_text(damage.change(path.read_text()))
    with pytest.raises(EnvironmentFault) as error:
        calibration_for(GPU)

    line = error.value.line()

    assert "\n" not in line

    for word in (str(path), damage.message, "drumline calibrate"):
        assert word in line, line


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    message = r"no such file.*give the path of a file that `drumline calibrate` wrote"
    with pytest.raises(EnvironmentFault, match=message):
        read_calibration(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1e3, 2e-3), (1e6, 3e-3), (1e7, 12e-3)], CostLine(0.002, 1e9)),
        ([(1e6, 1e-3), (1e8, 0.1)], CostLine(0.0, 1e9)),
        ([(1e6, 1e-3)], CostLine(0.0, 1e9)),
        ([(1e6, 2e-3), (2e6, 1e-3)], None),
        ([(1e6, 1e-3), (1e7, 2e-2)], None),
    ],
)
def test_a_line_through_timings(points: list[tuple[float, float]], line: CostLine | None) -> None:
    """Where no line with a latency fits, for noise, there is a rate between those seen."""
    found = line_through(points)

    assert found.latency >= 0
    assert found.bandwidth > 0

    if line is None:
        rates = [size / seconds for size, seconds in points]
        assert found.latency == 0
        assert min(rates) <= found.bandwidth <= max(rates)
    else:
        assert found.latency == pytest.approx(line.latency, rel=0.01, abs=1e-5)
        assert found.bandwidth == pytest.approx(line.bandwidth, rel=0.01, abs=1e-5)


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])]
)
def test_groups_that_are_measured(world: int, sizes: list[int]) -> None:
    assert group_sizes(world) == sizes


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2

    for word in words:
        assert word in done.err


@pytest.mark.slow
def test_bad_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "file"))
    done = drumline("calibrate", "--quick", "--nproc", 2, timeout=570)
    assert_refused(done, "cannot be written to", "XDG_CACHE_HOME")

    assert len(done.err.splitlines()) == 1

    assert_refused(drumline("calibrate", "--nproc", 0))

    done = drumline("calibrate", "--nproc", 9999)
    assert_refused(done, "--nproc: 9999 ranks on", "at most")

    assert done.out == ""

    done = drumline("calibrate", "--quick", "--out", tmp_path)
    assert_refused(done, "is a folder")

    assert done.out == ""

    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = drumline("calibrate", "--quick", "--nproc", 2, "--out", tmp_path / "file" / "x.json")
    assert_refused(done, "cannot be written to", "choose another place")

    assert done.out == ""


def test_the_file_says_when_and_how(tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    store(MEASURED, file)
    said = read_json(file)

    assert said["measured"] == "today"
    assert said["quick"] is True
    assert said["collectives"]["all_reduce"]["4"]["latency"] == 2e-3

    with pytest.raises(EnvironmentFault, match="cannot be written"):
        store(MEASURED, file / "x.json")
