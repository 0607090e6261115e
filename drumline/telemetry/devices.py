"""The load, temperature and energy of each rank's device.

Those of a GPU come from NVML (nvidia-ml-py), and the energy of a host's CPUs from RAPL. What no
counter gives is not known, and nothing is estimated. NVML is experimental: this has run on no GPU
yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from itertools import chain
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
    """A GPU as NVML sees it."""

    def __init__(self, uuid: str) -> None:
        """Find a GPU by its UUID, so that CUDA_VISIBLE_DEVICES does not matter.

        Raises whatever NVML does if it is not available.
        """
        self.nvml: Any = importlib.import_module("pynvml")
        self.nvml.nvmlInit()
        # NVML needs the prefix, whether the caller has it or not.
        bare_uuid = uuid.removeprefix("GPU-")
        full_uuid = f"GPU-{bare_uuid}"
        self.handle = self.nvml.nvmlDeviceGetHandleByUUID(full_uuid.encode())
        self.first_millijoules = self._millijoules()

    def read(self, what: Callable[[Any, Any], float]) -> float:
        """Return what a function of (NVML, the GPU's handle) returns.

        NaN for what this GPU does not have.
        """
        try:
            return float(what(self.nvml, self.handle))
        except self.nvml.NVMLError:
            return math.nan

    def _millijoules(self) -> float:
        """Return the energy since the driver began, in millijoules."""
        return self.read(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))

    def values(self) -> list[float]:
        """Return the values of NAMES but for the CPUs', in their order; NaN if not known."""
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


class CpuEnergy:
    """The energy of all CPU sockets of this host, by RAPL (the kernel's powercap folders).

    The counters wrap around: they are read often enough.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        # Powercap folder of a socket → its counter at the last reading, in microjoules.
        self.zones: dict[Path, float] = {}
        for zone in sorted(root.glob("intel-rapl:*")):
            # intel-rapl:0 is a socket (of AMD's too), intel-rapl:0:0 a part of it; `psys` includes
            # the sockets.
            is_socket = zone.name.count(":") == 1
            if is_socket and self._text(zone / "name") != "psys":
                self.zones[zone] = self._number(zone / "energy_uj")
        self.microjoules = 0.0

    def joules(self) -> float:
        """Return the joules since this object was made.

        NaN if any counter cannot be read, since a part would be taken for all. The next reading
        then has what was used meanwhile.
        """
        readings = {zone: self._number(zone / "energy_uj") for zone in self.zones}
        if not readings or any(math.isnan(reading) for reading in readings.values()):
            return math.nan
        for zone, now in readings.items():
            before = self.zones[zone]
            used = now - before
            if now < before:
                # The counter has begun anew.
                used += self._number(zone / "max_energy_range_uj")
            self.microjoules += used
            self.zones[zone] = now
        return self.microjoules / 1e6

    def _number(self, path: Path) -> float:
        """Return the number in a file; NaN without one."""
        text = self._text(path)
        if text.isdecimal():
            return float(text)
        return math.nan

    def _text(self, path: Path) -> str:
        """Return the text of a file; empty if it cannot be read: on most systems only root may."""
        try:
            return path.read_text().strip()
        except OSError:
            return ""


class Meter:
    """Reads one rank's device.

    Without the library or the driver of GPUs it reads nothing of them, and says so once.
    """

    def __init__(self, uuid: str | None, reports_energy: bool, first_of_host: bool) -> None:
        """Find the counters of a rank.

        Args:
            uuid: Of the rank's GPU, None on a CPU.
            reports_energy: Whether this rank reports the energy of its GPU. Of ranks that share a
                GPU only one does.
            first_of_host: This rank reads the CPUs' energy, too.
        """
        self.gpu: Gpu | None = None
        self.reports_energy = reports_energy
        # Seconds of the monotonic clock at the last reading, and at the last event.
        self.read_at = -math.inf
        self.shown_at = -math.inf
        self.cpu_energy = CpuEnergy() if first_of_host else None
        # The values of the last reading.
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
        """Return the values of NAMES, NaN if not known.

        They are read again after PERIOD seconds, or at once with `now`.
        """
        is_due = time.monotonic() - self.read_at >= PERIOD
        if now or is_due:
            self.read_at = time.monotonic()
            self.last = self._read()
        return self.last

    def _read(self) -> list[float]:
        """Return the values of NAMES, as the counters have them now."""
        values = [math.nan] * len(NAMES)
        if self.gpu is not None:
            values[:-1] = self.gpu.values()
        if not self.reports_energy:
            # Another rank reports the energy of the same GPU.
            values[NAMES.index("joules")] = math.nan
        if self.cpu_energy is not None:
            values[-1] = self.cpu_energy.joules()
        return values

    def event(self, step: int, values: list[list[float]], now: bool = False) -> Devices | None:
        """Return the event of what the ranks read.

        None if they read nothing, or if the last event is less than PERIOD seconds ago.

        Args:
            step: Steps done.
            values: For each of NAMES the values by rank.
            now: Return an event whenever the last one was.
        """
        is_due = time.monotonic() - self.shown_at >= PERIOD
        if not now and not is_due:
            return None
        all_values = chain.from_iterable(values)
        if all(map(math.isnan, all_values)):
            return None
        self.shown_at = time.monotonic()
        # The last two names are the energies of GPUs and CPUs.
        of_gpus, of_cpus = values[-2:]
        joules = [value for value in (*of_gpus, *of_cpus) if not math.isnan(value)]
        kwh = None
        if joules:
            kwh = sum(joules) / JOULES_PER_KWH
        ranks = []
        for of_rank in zip(*values, strict=True):
            named_values = zip(NAMES, of_rank, strict=True)
            ranks.append(dict[str, Number](named_values))
        return Devices(step=step, ranks=ranks, kwh=kwh)
