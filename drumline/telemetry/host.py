"""Host memory of this process: the kernel's counts, and the largest resident set phase by phase."""

from __future__ import annotations

from pathlib import Path

import psutil

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): "reset the peak resident set size to the process's current resident set size value"
COUNTS = ("VmSize", "VmData", "VmRSS", "VmHWM")


def process_bytes() -> dict[str, int]:
    """VmSize, VmData, VmRSS and VmHWM (the largest VmRSS so far), in bytes. Where there is no /proc, what psutil knows instead."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        now = psutil.Process().memory_info()
        return {"VmSize": now.vms, "VmData": now.vms, "VmRSS": now.rss, "VmHWM": now.rss}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in COUNTS}


class HostPeak:
    """Bytes of host memory at their largest while weights are loaded, in training, and from the first checkpoint on."""

    def __init__(self) -> None:
        """What was before counts as loading."""
        self.bytes_ = dict.fromkeys(("load", "train", "save"), 0)
        self.end("load")

    def end(self, phase: str) -> None:
        """What was since the last call was `phase`."""
        self.bytes_[phase] = max(self.bytes_[phase], _take_peak())


def _take_peak() -> int:
    """Bytes: the peak since the last call where Linux lets it be set back; else what is resident now."""
    counts = process_bytes()
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return counts["VmRSS"]  # the peak would be that of all phases
    return counts["VmHWM"]
