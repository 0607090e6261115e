"""The load, temperature and energy of each rank's device: of a GPU by NVML (nvidia-ml-py), of a host's CPUs by RAPL.

What no counter gives is not known, and nothing is estimated. NVML is experimental: this has run on no GPU yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.system.output import say
from drumline.telemetry.events import Number
from drumline.telemetry.watched import Devices

# What a rank reads, in the order in which it is gathered. See `watched.Devices`.
NAMES = ("utilisation", "celsius", "watts", "sm_mhz", "memory_mhz", "joules", "cpu_joules")
# Seconds between two readings.
PERIOD = 10.0
JOULES_PER_KWH = 3.6e6
POWERCAP = Path("/sys/class/powercap")


class Gpu:
    """A GPU by its UUID, so that CUDA_VISIBLE_DEVICES does not matter. Raises whatever NVML does if it is not available."""

    def __init__(self, uuid: str) -> None:
        self.nvml: Any = importlib.import_module("pynvml")
        self.nvml.nvmlInit()
        full_uuid = f"GPU-{uuid.removeprefix('GPU-')}"
        self.handle = self.nvml.nvmlDeviceGetHandleByUUID(full_uuid.encode())
        self.first_millijoules = self._millijoules()

    def read(self, what: Callable[[Any, Any], float]) -> float:
        """Return what a function of (NVML, the GPU's handle) returns; NaN for what this GPU does not have."""
        try:
            return float(what(self.nvml, self.handle))
        except self.nvml.NVMLError:
            return math.nan

    def _millijoules(self) -> float:
        """Return the energy since the driver began."""
        return self.read(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))

    def values(self) -> list[float]:
        """Return the values of NAMES without the CPUs'."""
        utilisation = self.read(lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        celsius = self.read(
            lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        )
        milliwatts = self.read(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu))
        sm_mhz = self.read(lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
        memory_mhz = self.read(
            lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)
        )
        millijoules = self._millijoules() - self.first_millijoules
        return [
            utilisation,
            celsius,
            milliwatts / 1000,
            sm_mhz,
            memory_mhz,
            millijoules / 1000,
        ]


class Packages:
    """The energy of all CPU packages of this host, by the kernel's powercap folders.

    The counters wrap around: they are read often enough.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        # Folder of a package → its counter at the last reading, in microjoules.
        self.zones: dict[Path, float] = {}
        for zone in sorted(root.glob("intel-rapl:*")):
            # intel-rapl:0 is a package (of AMD's too), intel-rapl:0:0 a part of it; `psys` has the packages in it.
            is_package = zone.name.count(":") == 1
            if is_package and self._text(zone / "name") != "psys":
                self.zones[zone] = self._number(zone / "energy_uj")
        self.microjoules = 0.0

    def joules(self) -> float:
        """Return the energy since the beginning; NaN if any counter cannot be read, since a part would be taken for all."""
        if not self.zones:
            return math.nan
        for zone, before in self.zones.items():
            now = self._number(zone / "energy_uj")
            used = now - before
            if now < before:
                used += self._number(zone / "max_energy_range_uj")
            self.microjoules += used
            self.zones[zone] = now
        return self.microjoules / 1e6

    def _number(self, path: Path) -> float:
        """Return the number in a file; NaN without one."""
        text = self._text(path)
        return float(text) if text.isdecimal() else math.nan

    def _text(self, path: Path) -> str:
        """Return the text of a file; empty if it cannot be read: on most systems only root may."""
        try:
            return path.read_text().strip()
        except OSError:
            return ""


class Meter:
    """Reads one rank's device.

    `uuid`: of its GPU, None on a CPU. `counts`: no other rank has the same GPU. `first_of_host`: this
    rank reads the CPUs' energy, too.
    """

    def __init__(self, uuid: str | None, counts: bool, first_of_host: bool) -> None:
        self.gpu: Gpu | None = None
        self.counts = counts
        # Seconds of the last reading, and of the last event.
        self.read_at = -math.inf
        self.shown_at = -math.inf
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
        """Return the values of NAMES, NaN if not known. They are read again after PERIOD seconds, or `now`."""
        if now or time.monotonic() - self.read_at >= PERIOD:
            self.read_at = time.monotonic()
            self.last = self._read()
        return self.last

    def _read(self) -> list[float]:
        values = [math.nan] * len(NAMES)
        if self.gpu is not None:
            values[:-1] = self.gpu.values()
        if not self.counts:
            # Another rank reports the energy of the same GPU.
            values[NAMES.index("joules")] = math.nan
        if self.packages is not None:
            values[-1] = self.packages.joules()
        return values

    def event(self, step: int, values: list[list[float]], now: bool = False) -> Devices | None:
        """Return the event of what the ranks read; None if that is nothing, or if the last event is not PERIOD seconds ago.

        `values`: for each of NAMES the values by rank. `now`: whenever the last event was.
        """
        if not now and time.monotonic() - self.shown_at < PERIOD:
            return None
        if all(math.isnan(value) for of_name in values for value in of_name):
            return None
        self.shown_at = time.monotonic()
        # The last two names are the energies of GPUs and CPUs.
        of_gpus, of_cpus = values[-2:]
        joules = [value for value in (*of_gpus, *of_cpus) if not math.isnan(value)]
        ranks = []
        for of_rank in zip(*values, strict=True):
            ranks.append(dict[str, Number](zip(NAMES, of_rank, strict=True)))
        kwh = sum(joules) / JOULES_PER_KWH if joules else None
        return Devices(step=step, ranks=ranks, kwh=kwh)
