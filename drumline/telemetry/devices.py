"""What each rank's device is doing, and the energy that it takes: of a GPU by NVML (nvidia-ml-py), of a host's CPUs by RAPL. What no
counter gives is not known, and nothing is estimated. NVML is experimental: this has run on no GPU yet."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.core.output import say
from drumline.telemetry.events import Number
from drumline.telemetry.watched import Devices

# What a rank reads, in the order in which it is gathered. See `watched.Devices`.
NAMES = ("utilisation", "celsius", "watts", "sm_mhz", "memory_mhz", "joules", "cpu_joules")
PERIOD = 10.0  # seconds between two readings
JOULES_PER_KWH = 3.6e6
POWERCAP = Path("/sys/class/powercap")


class Gpu:
    """A GPU by its UUID, so that CUDA_VISIBLE_DEVICES does not matter. Raises whatever NVML does where it cannot be had."""

    def __init__(self, uuid: str) -> None:
        self.nvml: Any = importlib.import_module("pynvml")
        self.nvml.nvmlInit()
        self.handle = self.nvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid.removeprefix('GPU-')}".encode()
        )
        # Millijoules since the driver began.
        self.first = self.read(
            lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        )

    def read(self, what: Callable[[Any, Any], float]) -> float:
        """NaN for what this GPU does not have."""
        try:
            return float(what(self.nvml, self.handle))
        except self.nvml.NVMLError:
            return math.nan

    def values(self) -> list[float]:
        """NAMES, but for the CPU's."""
        return [
            self.read(lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            self.read(
                lambda nvml, handle: nvml.nvmlDeviceGetTemperature(
                    handle, nvml.NVML_TEMPERATURE_GPU
                )
            ),
            self.read(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            self.read(lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            self.read(
                lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
            (
                self.read(lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
                - self.first
            )
            / 1000,
        ]


class Packages:
    """The energy of all CPU packages of this host, by the kernel's powercap folders. Counters wrap round: they are read often enough."""

    def __init__(self, root: Path = POWERCAP) -> None:
        # intel-rapl:0 is a package (of AMD's too), intel-rapl:0:0 a part of it; `psys` has the packages in it.
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self.zones = {
            zone: self._read(zone / "energy_uj")
            for zone in zones
            if self._text(zone / "name") != "psys"
        }
        self.microjoules = 0.0

    def joules(self) -> float:
        """Since the begin; NaN where any counter cannot be read: a part would be taken for all."""
        for zone, before in self.zones.items():
            now = self._read(zone / "energy_uj")
            self.microjoules += (
                now - before + (self._read(zone / "max_energy_range_uj") if now < before else 0.0)
            )
            self.zones[zone] = now
        return self.microjoules / 1e6 if self.zones else math.nan

    def _read(self, path: Path) -> float:
        text = self._text(path)
        return float(text) if text.isdecimal() else math.nan

    def _text(self, path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:  # on most systems only root may
            return ""


class Meter:
    """One rank's device. `uuid`: of its GPU, None on a CPU; `counts`: no other rank has the same GPU; `first_of_host`: this rank reads the
    CPUs' energy, too."""

    def __init__(self, uuid: str | None, counts: bool, first_of_host: bool) -> None:
        self.gpu, self.counts, self.read_at, self.shown_at = None, counts, -math.inf, -math.inf
        self.packages = Packages() if first_of_host else None
        self.last = [math.nan] * len(NAMES)
        if uuid is None:
            return
        if importlib.util.find_spec("pynvml") is None:
            if first_of_host:
                say(
                    "note: no temperature, power and energy of GPUs in events: pip install nvidia-ml-py"
                )
            return
        try:
            self.gpu = Gpu(uuid)
        except Exception as error:  # noqa: BLE001 - NVML's own errors, of a driver, a container or a part of a GPU; the run goes on
            say(f"note: NVML gives nothing for GPU {uuid}: {type(error).__name__}: {error}")

    def values(self, now: bool = False) -> list[float]:
        """NAMES, NaN where not known; read anew where the last time is PERIOD seconds ago, or `now`."""
        if now or time.monotonic() - self.read_at >= PERIOD:
            self.read_at = time.monotonic()
            of_gpu = self.gpu.values() if self.gpu is not None else [math.nan] * (len(NAMES) - 1)
            of_gpu[-1] = of_gpu[-1] if self.counts else math.nan
            self.last = [*of_gpu, self.packages.joules() if self.packages is not None else math.nan]
        return self.last

    def event(self, step: int, values: list[list[float]], now: bool = False) -> Devices | None:
        """The event of what the ranks read (each of NAMES, by rank); None where that is nothing, or the last one is not PERIOD seconds
        ago."""
        if (not now and time.monotonic() - self.shown_at < PERIOD) or all(
            math.isnan(value) for of_name in values for value in of_name
        ):
            return None
        self.shown_at = time.monotonic()
        joules = [value for of_name in values[-2:] for value in of_name if not math.isnan(value)]
        ranks = [
            dict[str, Number](zip(NAMES, each, strict=True)) for each in zip(*values, strict=True)
        ]
        return Devices(step=step, ranks=ranks, kwh=sum(joules) / JOULES_PER_KWH if joules else None)
