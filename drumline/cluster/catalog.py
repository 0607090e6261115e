"""Datasheet rates of devices: dense matrix products, no sparsity, in FLOP/s.

Sources: NVIDIA's datasheets of A100 (2021), H100 (2023), H200 (2024), B200 (HGX, 2025), L40S (2023), A10 (2021), T4 (2019), the Ada and
Blackwell GeForce whitepapers for RTX 3090/4090/5090 (tensor rates with fp32 accumulation), AMD's MI300X data sheet (2023).
A name is matched by the longest key that it contains. CPUs are left out: their rate depends on the clock that they happen to hold.
"""

from __future__ import annotations

TERA = 1e12

# key: (bf16 and fp16, fp32 through TF32 or, where there is none, plain)
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250 * TERA, 1125 * TERA),
    "H200": (989.4 * TERA, 494.7 * TERA),
    "H100": (989.4 * TERA, 494.7 * TERA),
    "H100 PCIe": (756 * TERA, 378 * TERA),
    "A100": (312 * TERA, 156 * TERA),
    "L40S": (362 * TERA, 183 * TERA),
    "A10": (125 * TERA, 62.5 * TERA),
    "T4": (65 * TERA, 8.1 * TERA),
    "RTX 3090": (71 * TERA, 35.6 * TERA),
    "RTX 4090": (165.2 * TERA, 82.6 * TERA),
    "RTX 5090": (209.5 * TERA, 104.8 * TERA),
    "MI300X": (1307.4 * TERA, 653.7 * TERA),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device, by the name its driver gives; None where it is not known."""
    words = device_name.replace("-", " ").split()
    found = [key for key in PEAKS if _within(key.split(), words)]
    if not found:
        return None
    half, full = PEAKS[max(found, key=len)]
    return full if precision == "fp32" else half


def _within(key: list[str], words: list[str]) -> bool:
    """Whether the words of a key stand next to each other among a name's (so that A10 is not found in A100)."""
    return any(words[i : i + len(key)] == key for i in range(len(words) - len(key) + 1))
