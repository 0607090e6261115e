"""Datasheet rates of devices: dense matrix products, no sparsity, in FLOP/s.

Sources: NVIDIA's datasheets of A100 (2021), H100 SXM, PCIe and NVL (2023), H200 SXM and NVL (2024), HGX B200 (2025), L40S (2023),
A10 (2021) and T4 (2019), each halved where it is given with 2:4 sparsity; the GA102, AD102 and Blackwell GeForce whitepapers for
RTX 3090, 4090 and 5090 (tensor rates with fp32 accumulation); AMD's MI300X data sheet (2023). The fp32 rate is that of TF32 where
the device has it, since that is how fp32 matrix products run by default here (`precision.tf32`). CPUs are left out: their rate
depends on the clock that they happen to hold.
"""

from __future__ import annotations

TERA = 1e12
HALF = ("bf16", "fp16")

# Words that stand next to each other in the driver's name → (bf16 and fp16, fp32).
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250 * TERA, 1125 * TERA),
    "H200": (989.4 * TERA, 494.7 * TERA),
    "H200 NVL": (835.5 * TERA, 417.5 * TERA),
    "H100": (989.4 * TERA, 494.7 * TERA),
    "H100 NVL": (835.5 * TERA, 417.5 * TERA),
    "H100 PCIe": (756 * TERA, 378 * TERA),
    "A100": (312 * TERA, 156 * TERA),
    "L40S": (362 * TERA, 183 * TERA),
    "A10": (125 * TERA, 62.5 * TERA),
    "T4": (65 * TERA, 8.1 * TERA),  # fp16 on tensor cores; neither bf16 nor TF32
    "RTX 3090": (71 * TERA, 35.6 * TERA),
    "RTX 4090": (165.2 * TERA, 82.6 * TERA),
    "RTX 5090": (209.5 * TERA, 104.8 * TERA),
    "MI300X": (1307.4 * TERA, 653.7 * TERA),
}
# A slice of a device, or another chip that carries the name of a known one.
OTHERS = {"MIG", "Laptop", "Ti", "D", "Max"}
WITHOUT_BF16 = {"T4"}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device at fp32, bf16 or fp16, by the name its driver gives; None where it is not known."""
    words = device_name.replace("-", " ").split()
    found = [key for key in PEAKS if _within(key.split(), words)]
    if not found or OTHERS & set(words):
        return None
    key = max(found, key=len)
    if precision == "bf16" and key in WITHOUT_BF16:
        return None
    half, full = PEAKS[key]
    return {**dict.fromkeys(HALF, half), "fp32": full}.get(precision)


def _within(key: list[str], words: list[str]) -> bool:
    """Whether the words of a key stand next to each other among a name's (so that A10 is not found in A100)."""
    return any(words[i : i + len(key)] == key for i in range(len(words) - len(key) + 1))
