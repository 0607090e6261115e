"""Devices and links by name, as their makers' datasheets have them: dense matrix products, no sparsity, FLOP/s; one direction of a link.

The fp32 rate is that of TF32 where the device has it, since that is how fp32 matrix products run by default here (`precision.tf32`).
Memory is what torch reports as the device's total (it stands in its out-of-memory errors: "total capacity of 79.14 GiB"), the least that
was seen for that kind of device in public issues: error correction and the driver keep a part of what is on the box.
"""

from __future__ import annotations

import difflib
import math
import re

from drumline.hardware.cluster import DeviceSpec, Link

TERA, GIGA, GIB = 1e12, 1e9, 2**30

# What large products reach of the datasheet (bf16; S. Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS", 2025). The
# 4090's 158.6 of 165.2 TFLOP/s are of fp16 (github.com/mli/transformers-benchmarks, issue 4); other GeForce cards are taken for like it.
REACHED_A100, REACHED_H100, REACHED_MI300X, REACHED_4090 = 0.869, 0.803, 0.514, 0.96
# Of the datasheet, what FlashAttention 2 reaches, which torch's attention is: on an A100 50 to 73% (Dao 2023), on an H100 35% (Shah et al.
# 2024); devices since Hopper are taken for like it.
ATTENTION, ATTENTION_HOPPER = 0.60, 0.35
HOPPER = ("h100", "h200", "b200", "gb200", "mi300x")
# Among the devices of a host, and to it.
PCIE4, PCIE5, C2C = (
    ("pcie4", "pcie4"),
    ("pcie5", "pcie5"),
    ("nvlink5", "nvlink-c2c"),
)


def _gpu(
    name: str,
    gib: float,
    gb_s: float,
    half: float,
    full: float,
    links: tuple[str, str],
    source: str,
    reached: float = REACHED_H100,
) -> DeviceSpec:
    """`half` and `full` in TFLOP/s: bf16 and fp16, fp32."""
    flops = {"bf16": half * TERA, "fp16": half * TERA, "fp32": full * TERA}
    if name.startswith(("h", "b200", "gb200", "l40s", "4090", "5090", "6000-ada", "mi300x")):
        flops["fp8"] = 2 * half * TERA  # of each of these, as its datasheet has it
    if name in ("t4", "v100-16g", "v100-32g"):  # neither bf16 nor TF32
        del flops["bf16"]
    attention = ATTENTION_HOPPER if name.startswith(HOPPER) else ATTENTION
    return DeviceSpec(
        name, "cuda", int(gib * GIB), gb_s * GIGA, flops, source, reached, attention, *links
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _gpu(
            "a100-40g",
            39.38,
            1555,
            312,
            156,
            ("nvlink3", "pcie4"),
            "NVIDIA A100 datasheet (2021), SXM",
            REACHED_A100,
        ),
        _gpu(
            "a100-80g",
            79.14,
            2039,
            312,
            156,
            ("nvlink3", "pcie4"),
            "NVIDIA A100 datasheet (2021), SXM",
            REACHED_A100,
        ),
        _gpu(
            "h100-80g",
            79.14,
            3350,
            989.4,
            494.7,
            ("nvlink4", "pcie5"),
            "NVIDIA H100 datasheet (2023), SXM; halved for sparsity",
        ),
        _gpu(
            "h100-pcie",
            79.14,
            2000,
            756,
            378,
            PCIE5,
            "NVIDIA H100 PCIe product brief (2022); halved for sparsity",
        ),
        _gpu(
            "h100-nvl",
            93.0,
            3900,
            835.5,
            417.5,
            PCIE5,
            "NVIDIA H100 datasheet (2024), NVL; halved for sparsity",
        ),
        _gpu(
            "h200",
            139.72,
            4800,
            989.4,
            494.7,
            ("nvlink4", "pcie5"),
            "NVIDIA H200 datasheet (2024), SXM; halved for sparsity",
        ),
        _gpu(
            "h200-nvl",
            139.72,
            4800,
            835.5,
            417.5,
            PCIE5,
            "NVIDIA H200 datasheet (2024), NVL; halved for sparsity",
        ),
        _gpu(
            "b200",
            178.35,
            8000,
            2250,
            1125,
            ("nvlink5", "pcie5"),
            "NVIDIA DGX B200 datasheet (2025), an eighth; halved for sparsity",
        ),
        _gpu(
            "l40s", 44.34, 864, 362, 183, PCIE4, "NVIDIA L40S datasheet (2023); halved for sparsity"
        ),
        _gpu("a10", 22.03, 600, 125, 62.5, PCIE4, "NVIDIA A10 datasheet (2021)"),
        _gpu("t4", 14.56, 300, 65, 8.1, ("pcie3", "pcie3"), "NVIDIA T4 datasheet (2019)"),
        _gpu(
            "3090",
            23.52,
            936,
            71,
            35.6,
            PCIE4,
            "NVIDIA GA102 whitepaper (2020), RTX 3090, fp32 accumulation",
            REACHED_4090,
        ),
        _gpu(
            "4090",
            23.52,
            1008,
            165.2,
            82.6,
            PCIE4,
            "NVIDIA Ada whitepaper (2022), RTX 4090, fp32 accumulation",
            REACHED_4090,
        ),
        _gpu(
            "5090",
            31.36,
            1792,
            209.5,
            104.8,
            PCIE5,
            "NVIDIA RTX Blackwell whitepaper (2025), RTX 5090, fp32 accumulation",
            REACHED_4090,
        ),
        # As A100 and H100, with slower links or products for export.
        _gpu(
            "a800-80g",
            79.14,
            2039,
            312,
            156,
            ("nvlink3-a800", "pcie4"),
            "NVIDIA A800 datasheet (2022), SXM",
            REACHED_A100,
        ),
        _gpu(
            "h20",
            95.0,
            4000,
            148,
            74,
            ("nvlink4", "pcie5"),
            "NVIDIA H20 datasheet (2023), SXM, dense",
        ),
        _gpu(
            "gb200",
            184.0,
            8000,
            2500,
            1250,
            C2C,
            "NVIDIA GB200 NVL72 datasheet (2024), a 72nd; halved for sparsity",
        ),
        _gpu(
            "v100-16g",
            15.77,
            900,
            125,
            15.7,
            ("nvlink2", "pcie3"),
            "NVIDIA V100 datasheet (2020), SXM2",
        ),
        _gpu(
            "v100-32g",
            31.74,
            900,
            125,
            15.7,
            ("nvlink2", "pcie3"),
            "NVIDIA V100 datasheet (2020), SXM2",
        ),
        _gpu(
            "a6000",
            44.43,
            768,
            154.8,
            77.4,
            PCIE4,
            "NVIDIA RTX A6000 datasheet (2021); halved for sparsity",
        ),
        _gpu(
            "6000-ada",
            44.43,
            960,
            364.2,
            182.1,
            PCIE4,
            "NVIDIA RTX 6000 Ada datasheet (2023), a quarter of sparse FP8",
        ),
        _gpu(
            "mi300x",
            191.69,
            5300,
            1307.4,
            653.7,
            ("infinity-fabric", "pcie5"),
            "AMD Instinct MI300X data sheet (2023)",
            REACHED_MI300X,
        ),
    )
}
CPU = "cpu"  # its rates depend on the machine: see planner.cluster

# GiB of host memory for each device where a plan does not know its host: what one cloud rents with it, no more than the middle of what
# several do. Device → (GiB, source).
HOST_MEMORY: dict[str, tuple[float, str]] = {
    "a100-40g": (112.5, "Azure ND96asr A100 v4: 900 GiB with 8"),
    "a100-80g": (220, "Azure NC24ads A100 v4: 220 GiB with 1"),
    "h100-80g": (234, "Google a3-highgpu-8g: 1,872 GiB with 8"),
    "h100-nvl": (320, "Azure NC40ads H100 v5: 320 GiB with 1"),
    "h200": (231, "Azure ND96isr H200 v5: 1,850 GiB with 8"),
    "b200": (256, "AWS p6-b200.48xlarge: 2,048 GiB with 8"),
    "gb200": (223.5, "NVIDIA GB200: 480 GB of LPDDR5X for the two GPUs of a Grace"),
    "l40s": (96, "AWS g6e.12xlarge: 384 GiB with 4"),
    "a10": (48, "AWS g5.12xlarge: 192 GiB with 4"),
    "t4": (48, "AWS g4dn.12xlarge: 192 GiB with 4"),
    "v100-16g": (61, "AWS p3.16xlarge: 488 GiB with 8"),
    "v100-32g": (96, "AWS p3dn.24xlarge: 768 GiB with 8"),
    "mi300x": (231, "Azure ND96isr MI300X v5: 1,850 GiB with 8"),
}
# Other devices stand in machines that people put together themselves. The usual advice is twice the memory of the devices, and memory is
# sold in modules: 64 GiB for a card of 24 or 32 GB.
HOST_TIMES, HOST_MODULE_GIB = 2, 32

# The network of a host of eight of these where nobody has set it: each GPU's board has a card. Link of its GPUs → (network, source).
BOARD = 8
HOST_NETWORK: dict[str, tuple[str, str]] = {
    "nvlink3": ("8x200Gb", "NVIDIA DGX A100 datasheet: 8 × 200 Gb/s"),
    "nvlink3-a800": ("8x200Gb", "as NVIDIA DGX A100"),
    "nvlink4": ("8x400Gb", "NVIDIA DGX H100 and H200 datasheets: 8 × 400 Gb/s"),
    "nvlink5": ("8x400Gb", "NVIDIA DGX B200 datasheet: 8 × 400 Gb/s"),
    "infinity-fabric": ("8x400Gb", "Azure ND96isr MI300X v5: 8 × 400 Gb/s"),
}
OTHER_NETWORK = "100Gb"

# Step latencies are NCCL's own for a ring (src/graph/tuning.cc, hwLat, Simple): NVLink 3.4 µs, PCI 5.7, network 14.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        # 235 of 300 GB/s in an all-reduce (Bekman, Networking); 370 of 450 (NCCL's maintainer, nccl-tests issue 212); NVLink 5 as NVLink 4.
        Link(
            "nvlink3", 300 * GIGA, 3.4e-6, 0.78, source="NVIDIA A100 datasheet: 600 GB/s both ways"
        ),
        Link(
            "nvlink4", 450 * GIGA, 3.4e-6, 0.82, source="NVIDIA H100 datasheet: 900 GB/s both ways"
        ),
        Link(
            "nvlink5", 900 * GIGA, 3.4e-6, 0.82, source="NVIDIA B200 datasheet: 1.8 TB/s both ways"
        ),
        # NVLink 2, and NVLink 3 with two thirds of its lanes, as NVLink 3.
        Link(
            "nvlink2", 150 * GIGA, 3.4e-6, 0.78, source="NVIDIA V100 datasheet: 300 GB/s both ways"
        ),
        Link(
            "nvlink3-a800",
            200 * GIGA,
            3.4e-6,
            0.78,
            source="NVIDIA A800 datasheet: 400 GB/s both ways",
        ),
        Link(
            "nvlink-c2c",
            225 * GIGA,
            3.4e-6,
            0.82,
            source="NVIDIA GB200 datasheet: 900 GB/s both ways for the two GPUs of a Grace",
        ),
        # Sixteen lanes. Between devices: 28 (of 8) to 35 (of 4) of 63 GB/s on RTX 5090 (NCCL issue 1639); all pass through the host.
        Link("pcie3", 15.75 * GIGA, 5.7e-6, 0.5, source="PCI-SIG: 8 GT/s a lane, 128b/130b"),
        Link("pcie4", 31.5 * GIGA, 5.7e-6, 0.5, source="PCI-SIG: 16 GT/s a lane, 128b/130b"),
        Link("pcie5", 63.0 * GIGA, 5.7e-6, 0.5, source="PCI-SIG: 32 GT/s a lane, 128b/130b"),
        # 47.7 of 64 GB/s between 2, 312.9 of 448 among 8 (Bekman, Networking).
        Link(
            "infinity-fabric",
            448 * GIGA,
            3.4e-6,
            0.70,
            64 * GIGA,
            source="AMD MI300X platform data sheet: 7 × 128 GB/s both ways",
        ),
        # Two processes on 2 cores of an EPYC at 2.6 GHz, torch 2.13: 67 MB all-reduced in 58 ms, 1 kB in 0.46 ms.
        Link(
            "loopback",
            1.15 * GIGA,
            230e-6,
            source="measured: gloo over 127.0.0.1; `drumline calibrate` measures yours",
        ),
    )
}
NETWORK = re.compile(r"^(?:(\d+)x)?(\d+(?:\.\d+)?)gb(?:e|ps|it)?$")
# Of 400 Gb/s, 340 are reached in all-reduce tests (AWS EFA v1; Bekman, Networking).
NETWORK_EFFICIENCY, NETWORK_LATENCY = 0.85, 14e-6

# What people call a device → its name in the catalog. Memory as the box has it tells nothing where the catalog has one size alone.
_VENDORS = r"nvidia|geforce|rtx|tesla|amd|instinct|radeon|sxm\d?|hbm\d?e?|gpu"
_BOXES = "a6000-48g 6000-ada-48g h20-96g gb200-186g gb200-192g h200-141g h200-144g b200-180g b200-192g l40s-48g a10-24g t4-16g 3090-24g"
_SAME = {
    name: name.rpartition("-")[0] for name in f"{_BOXES} 4090-24g 5090-32g mi300x-192g".split()
}
_SAME |= {
    "a100": "a100-80g",
    "a800": "a800-80g",
    "v100": "v100-32g",
    "h100": "h100-80g",
    "h100-94g": "h100-nvl",
}
_SAME["6000-ada-generation"] = "6000-ada"
_SAME_LINKS = {"xgmi": "infinity-fabric", "gloo": "loopback", "lo": "loopback", "pcie": "pcie4"}
# Names that several devices share: the user reads which one was taken.
AMBIGUOUS = {
    "a100": "a100-80g (there is a100-40g, too)",
    "v100": "v100-32g (there is v100-16g, too)",
    "h100": "h100-80g (there are h100-pcie and h100-nvl, too)",
}


def plain(name: str) -> str:
    """A device's name without its maker's: `NVIDIA RTX-4090` is 4090, `A100-SXM4-80GB` a100-80g."""
    parts = re.sub(r"[\s_]+", "-", name.strip().lower())
    parts = re.sub(r"(\d+)gi?b\b", r"\1g", re.sub(rf"\b(?:{_VENDORS})(?=-|\d|\b)", "", parts))
    return re.sub(r"-+", "-", parts).strip("-")


def device(name: str) -> DeviceSpec | None:
    """A device of the catalog by what people call it; None where it is not there (a CPU is not: its rates depend on the machine)."""
    known = plain(name)
    return DEVICES.get(_SAME.get(known, known))


def usual_host_memory(spec: DeviceSpec) -> tuple[int, str]:
    """(Bytes of host memory for each device of this kind that a plan assumes where nobody has set it, and where they come from)."""
    if spec.name in HOST_MEMORY:
        gib, source = HOST_MEMORY[spec.name]
        return int(gib * GIB), source
    modules = math.ceil(HOST_TIMES * spec.memory_bytes / (HOST_MODULE_GIB * GIB))
    return (
        modules * HOST_MODULE_GIB * GIB,
        f"{HOST_TIMES} × the device's memory, in modules of {HOST_MODULE_GIB} GiB",
    )


def usual_network(intra: str, per_node: int) -> tuple[str, str]:
    """Return the network that a plan assumes between hosts where nobody has set it, and its source.

    `intra`: the link between the devices of a host, by its catalog name; `per_node`: devices of a host.
    """
    if per_node == BOARD and intra in HOST_NETWORK:
        return HOST_NETWORK[intra]
    return OTHER_NETWORK, "a choice: one card of a usual server"


def link(name: str) -> Link | None:
    """A link by its name, or a network by its rate: 100Gb, 8x400Gb (cards of one host), 200GbE, 400Gb of InfiniBand alike."""
    known = name.strip().lower().replace(" ", "").replace("_", "-")
    if found := LINKS.get(_SAME_LINKS.get(known, known)):
        return found
    if (network := NETWORK.match(known)) and float(network[2]) > 0 and int(network[1] or 1) > 0:
        bandwidth = int(network[1] or 1) * float(network[2]) / 8 * GIGA
        return Link(
            name.strip(), bandwidth, NETWORK_LATENCY, NETWORK_EFFICIENCY, source="its rate by name"
        )
    return None


def nearest(name: str, known: list[str]) -> list[str]:
    """The names that look most like one that is not there, the likeliest first."""
    close = difflib.get_close_matches(plain(name), known, n=3, cutoff=0.6)
    return close or [other for other in known if plain(name)[:2] == other[:2]]


# Words in the driver's name of a device of the catalog.
DRIVERS = ("B200", "H200", "H200 NVL", "H100", "H100 NVL", "H100 PCIe", "A100", "A800", "H20", "GB200", "V100 SXM2", "V100 SXM3", "L40S",
           "RTX A6000", "RTX 6000 Ada", "A10", "T4", "RTX 3090", "RTX 4090", "RTX 5090", "MI300X")  # fmt: skip
# A slice of a device, or another chip that carries the name of a known one.
NOT_DEVICES = {"MIG", "Laptop", "Ti", "D", "Max"}


def by_driver(device_name: str, memory_bytes: int | None = None) -> DeviceSpec | None:
    """The device by the name that its driver gives, of several sizes the one nearest in memory; None where the catalog lacks it."""
    parts = device_name.replace("-", " ").split()
    # Whole words that stand next to each other, so that A10 is not found in A100.
    found = [key for key in DRIVERS if f" {key} " in f" {' '.join(parts)} "]
    if not found or NOT_DEVICES & set(parts):
        return None
    known = plain(max(found, key=len))
    specs = [spec for name, spec in DEVICES.items() if re.sub(r"-\d+g$", "", name) == known]
    return min(specs, key=lambda spec: abs(spec.memory_bytes - (memory_bytes or 0)))


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device at fp32, bf16 or fp16, by the name its driver gives; None where it is not known."""
    spec = by_driver(device_name) or DEVICES.get(device_name)
    return spec.flops.get(precision) if spec else None
