"""Figures of devices: NVML through a stand-in for pynvml (no GPU here), RAPL through files as the kernel has them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from drumline.telemetry import devices
from drumline.telemetry.devices import NAMES, CpuEnergy, Meter
from drumline.telemetry.events import EventLog, read
from drumline.telemetry.trackers import metrics
from drumline.telemetry.watched import Devices


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with pynvml's functions, whose GPU has used 5 kJ so far, and takes 100 J more at each look; it has no memory clock."""
    fake: Any = ModuleType("pynvml")
    fake.joules = 5000

    class NVMLError(Exception):
        pass

    def energy(handle: str) -> int:
        fake.joules += 100
        return fake.joules * 1000

    def clock(handle: str, kind: int) -> int:
        if kind == 2:
            raise NVMLError("Not Supported")
        return 1980

    def by_uuid(uuid: bytes) -> str:
        if uuid != b"GPU-0a-1":
            raise NVMLError("Not Found")
        return "handle"

    fake.NVMLError, fake.NVML_TEMPERATURE_GPU, fake.NVML_CLOCK_SM, fake.NVML_CLOCK_MEM = (
        NVMLError,
        0,
        1,
        2,
    )
    fake.nvmlInit, fake.nvmlDeviceGetHandleByUUID = lambda: None, by_uuid
    fake.nvmlDeviceGetTotalEnergyConsumption, fake.nvmlDeviceGetClockInfo = energy, clock
    fake.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=87, memory=40)
    fake.nvmlDeviceGetTemperature, fake.nvmlDeviceGetPowerUsage = (
        lambda handle, kind: 61,
        lambda handle: 412_500,
    )
    fake.__spec__ = SimpleNamespace(name="pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_gpu(nvml: Any, tmp_path: Path) -> None:
    meter = Meter("0a-1", reports_energy=True, first_of_host=False)
    values = dict(zip(NAMES, meter.values(), strict=True))
    assert values.pop("memory_mhz") != values.pop("cpu_joules")  # both are NaN
    assert values == {
        "utilisation": 87,
        "celsius": 61,
        "watts": 412.5,
        "sm_mhz": 1980,
        "joules": 100,
    }
    assert meter.values() is meter.last and nvml.joules == 5200, "it is not read again at once"
    assert meter.values(now=True)[5] == 200
    other = Meter("0a-1", reports_energy=False, first_of_host=False).values()
    event = meter.event(3, [[a, b] for a, b in zip(meter.last, other, strict=True)])
    assert (
        event is not None
        and event.kwh == 200 / 3.6e6
        and math.isnan(float(event.ranks[1]["joules"] or 0))
    )
    assert meter.event(4, [[0.0]] * 7) is None, "the last one was just now"
    EventLog(tmp_path / "e.jsonl").emit(event)
    (written,) = read(tmp_path / "e.jsonl")
    assert (
        isinstance(written, Devices)
        and written.ranks[0]["celsius"] == 61
        and written.ranks[0]["memory_mhz"] is None
    )
    numbers = metrics(written)
    assert (
        numbers["watts/rank_1"] == 412.5
        and "memory_mhz/rank_0" not in numbers
        and numbers["kwh"] == event.kwh
    )


def test_a_gpu_that_nvml_does_not_know(nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    meter = Meter("other", reports_energy=True, first_of_host=False)
    assert (
        all(map(math.isnan, meter.values()))
        and meter.event(1, [[value] for value in meter.values()]) is None
    )
    assert "note: NVML gives nothing for GPU other: NVMLError: Not Found" in capsys.readouterr().err


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert all(
        map(math.isnan, Meter("0a-1", reports_energy=True, first_of_host=True).values()[:-1])
    )
    assert "pip install nvidia-ml-py" in capsys.readouterr().err


def zone(root: Path, name: str, kind: str, microjoules: int) -> Path:
    folder = root / name
    folder.mkdir()
    for file, value in (
        ("name", kind),
        ("energy_uj", microjoules),
        ("max_energy_range_uj", 10_000_000),
    ):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 0),
    )
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 5)
    packages = CpuEnergy(tmp_path)
    first.write_text("1000000"), second.write_text("500000"), whole.write_text("9000000")
    assert packages.joules() == 2.5, "the first counter began again"
    second.write_text("1500000")
    assert packages.joules() == 3.5
    monkeypatch.setattr(devices, "POWERCAP", tmp_path)
    second.unlink()
    assert math.isnan(packages.joules()) and math.isnan(CpuEnergy(tmp_path / "none").joules())
    second.write_text("1700000")
    assert packages.joules() == 3.7, "one unreadable moment loses nothing"
