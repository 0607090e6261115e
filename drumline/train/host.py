"""The largest resident set of this process, phase by phase."""

from __future__ import annotations

from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): "reset the peak resident set size to the process's current resident set size value"


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
    """Bytes: the peak since the last call where Linux lets it be set back; else the peak so far, or what is resident now."""
    try:
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return _bytes(fields["VmRSS"])  # the peak would be that of all phases
    return _bytes(fields["VmHWM"])


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024
