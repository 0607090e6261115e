"""`drumline calibrate`: two real ranks over gloo, what is stored is read back, and a damaged file is one line."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.bench.calibrate import group_sizes, rate_of_large, write
from drumline.config.load import load
from drumline.errors import EnvironmentFault
from drumline.hardware.cluster import (
    Calibration,
    Measured,
    Product,
    calibration_for,
    calibration_path,
    hardware,
    line_through,
    read_calibration,
    software,
)
from drumline.hardware.detect import Device, Machine, detect
from drumline.planner.cluster import cluster_of
from tests.faults.live import gone, kill
from tests.harness import ENV, drumline, start_drumline, survivors

MEASURED = Calibration(
    hardware="a box",
    software="torch 9",
    matmul={"fp32": 2e9},
    memory=1e9,
    collectives={
        ("all_reduce", 2): Measured(1e-3, 1e9),
        ("all_reduce", 4): Measured(2e-3, 5e8),
        ("p2p", 2): Measured(0.0, 1e8),
    },
    host={"to_device": Measured(1e-5, 2e10)},
    disk={"write": Measured(1e-3, 1e8)},
    products={"fp32": (Product(8, 16, 16, 1e9), Product(64, 64, 64, 2e9))},
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drumline"


@pytest.mark.full  # a processor that emulates 16-bit products takes minutes; what ranks do in it is tried below
def test_two_ranks_measure_and_planning_reads_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU machine measures its processor here, too
    monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
    done = drumline("calibrate", "--quick", "--nproc", 2, timeout=570)
    assert done.code == 0, done.err
    assert all(
        word in done.out
        for word in (
            "fp32",
            "all-reduce",
            "reduce-scatter",
            "p2p",
            "disk write",
            f"stored in {cache}",
        )
    )
    machine = detect()
    measured = calibration_for(machine)
    assert measured is not None and (measured.hardware, measured.software) == (
        hardware(machine),
        software(machine),
    )
    assert {kind for kind, _ in measured.collectives} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "p2p",
    }
    assert all(
        line.bandwidth > 1e6 and 0 <= line.latency < 10 for line in measured.collectives.values()
    )
    assert (
        measured.memory
        and 1e8 < measured.memory < 1e13
        and set(measured.matmul) == {"fp32", "bf16", "fp16"}
    )
    assert measured.matmul["fp32"] == rate_of_large(measured.products["fp32"]) > 1e7 and set(
        measured.disk
    ) == {"write", "read"}
    cluster = cluster_of(None, machine, 2, measured)
    assert cluster.rate("fp32") == measured.matmul["fp32"] / 2
    line = measured.collectives["all_gather", 2]
    assert cluster.collective_seconds("all_gather", 1e6, 2) == line.latency + 1e6 / line.bandwidth
    assert not [
        path for path in cache.rglob("*") if path.is_file() and path != calibration_path(machine)
    ] and not survivors(str(cache))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_command(
    number: signal.Signals, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It names the ranks' task, so they can be found.
    monkeypatch.setitem(ENV, "TMPDIR", str(tmp_path))
    process = start_drumline("calibrate", "--nproc", 2)
    try:
        deadline = time.time() + 60
        while len(survivors(str(tmp_path))) < 2 and time.time() < deadline:
            time.sleep(0.05)
        assert len(survivors(str(tmp_path))) == 2
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert gone(str(tmp_path), 10)
    finally:
        for left in (process.pid, *survivors(str(tmp_path))):
            kill(left)
    assert not cache.exists() or not list(cache.rglob("*.json"))
    if number == signal.SIGTERM:
        assert process.returncode == 75 and "nothing was stored" in err, err


def test_what_is_written_is_read_back(tmp_path: Path, cache: Path) -> None:
    write(MEASURED, tmp_path / "a" / "box.json", measured="today", quick=True)
    assert read_calibration(tmp_path / "a" / "box.json") == MEASURED
    config = tmp_path / "c.yaml"
    config.write_text(
        "data: {train: [{kind: file, path: x}]}\ncluster: {device: h100, per_node: 2, calibration: a/box.json}\n"
    )
    cluster = cluster_of(load(config, []).config.cluster, Machine([], 2, 2**33, "cpu", False), 1)
    assert cluster.calibration == MEASURED and cluster.rate("fp32") == 2e9
    gpu = Machine([Device("NVIDIA X", 10**10)], 2, 2**33, "cuda", True)
    assert calibration_for(gpu) is None and hardware(gpu) == "NVIDIA X" and "nccl" in software(gpu)
    write(
        replace(MEASURED, hardware="NVIDIA X", software=software(gpu)),
        calibration_path(gpu),
        measured="today",
        quick=False,
    )
    assert calibration_for(gpu) == replace(MEASURED, hardware="NVIDIA X", software=software(gpu))
    # measured with another torch: not this one's
    write(
        replace(MEASURED, hardware="NVIDIA X"), calibration_path(gpu), measured="today", quick=False
    )
    assert calibration_for(gpu) is None


DAMAGE = {
    "cut off": (lambda text: text[: len(text) // 2], "is no calibration: invalid JSON"),
    "empty": (lambda text: "", "is no calibration"),
    "negative": (lambda text: text.replace("1000000000.0", "-1.0"), "greater than 0"),
    "a field gone": (lambda text: text.replace('"disk"', '"disc"'), "disk: field required"),
    "newer": (
        lambda text: text.replace('"version": 1', '"version": 2'),
        "version: input should be less than or equal to 1",
    ),
    "a list": (lambda text: "[]", "is no calibration"),
    "not finite": (lambda text: text.replace("1000000000.0", "NaN"), "finite number"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(name: str, cache: Path) -> None:
    machine = Machine([Device("NVIDIA X", 10**10)], 2, 2**33, "cuda", True)
    write(MEASURED, calibration_path(machine), measured="today", quick=False)
    damage, says = DAMAGE[name]
    calibration_path(machine).write_text(damage(calibration_path(machine).read_text()))
    with pytest.raises(EnvironmentFault) as error:
        calibration_for(machine)
    line = error.value.line()
    assert (
        "\n" not in line
        and str(calibration_path(machine)) in line
        and says in line
        and "drumline calibrate" in line
    ), line


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"no such file.*give the path of a file that `drumline calibrate` wrote",
    ):
        read_calibration(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1e3, 2e-3), (1e6, 3e-3), (1e7, 12e-3)], Measured(0.002, 1e9)),
        ([(1e6, 1e-3), (1e8, 0.1)], Measured(0.0, 1e9)),
        ([(1e6, 1e-3)], Measured(0.0, 1e9)),
        ([(1e6, 2e-3), (2e6, 1e-3)], None),
        ([(1e6, 1e-3), (1e7, 2e-2)], None),
    ],
)
def test_a_line_through_timings(points: list[tuple[float, float]], line: Measured | None) -> None:
    found = line_through(points)
    assert found.latency >= 0 and found.bandwidth > 0
    if line is None:  # noise: no line with a latency fits, so a rate between those seen
        assert found.latency == 0 and min(s / t for s, t in points) <= found.bandwidth <= max(
            s / t for s, t in points
        )
    else:
        assert (found.latency, found.bandwidth) == pytest.approx(
            (line.latency, line.bandwidth), rel=0.01, abs=1e-5
        )


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])]
)
def test_groups_that_are_measured(world: int, sizes: list[int]) -> None:
    assert group_sizes(world) == sizes


@pytest.mark.slow
def test_bad_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "file"))
    done = drumline("calibrate", "--quick", "--nproc", 2, timeout=570)
    assert (
        done.code == 2
        and "cannot be written to" in done.err
        and "XDG_CACHE_HOME" in done.err
        and len(done.err.splitlines()) == 1
    )
    assert drumline("calibrate", "--nproc", 0).code == 2
    done = drumline("calibrate", "--nproc", 9999)
    assert (
        done.code == 2
        and "--nproc: 9999 ranks on" in done.err
        and "at most" in done.err
        and done.out == ""
    )
    done = drumline("calibrate", "--quick", "--out", tmp_path)
    assert done.code == 2 and "is a folder" in done.err and done.out == ""
    monkeypatch.setitem(ENV, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = drumline("calibrate", "--quick", "--nproc", 2, "--out", tmp_path / "file" / "x.json")
    assert (
        done.code == 2
        and "cannot be written to" in done.err
        and "choose another place" in done.err
        and done.out == ""
    )


def test_the_file_says_when_and_how(tmp_path: Path) -> None:
    write(MEASURED, tmp_path / "box.json", measured="today", quick=True)
    said = json.loads((tmp_path / "box.json").read_text())
    assert (said["measured"], said["quick"], said["collectives"]["all_reduce"]["4"]["latency"]) == (
        "today",
        True,
        2e-3,
    )
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        write(MEASURED, tmp_path / "box.json" / "x.json", measured="today", quick=True)
