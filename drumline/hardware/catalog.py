"""Devices and links by name, with the rates of their makers' datasheets.

A device's rates are those of dense matrix products, without sparsity, in FLOP/s. A link's rate is
that of one direction, in bytes/s. The fp32 rate is that of TF32 if the device has it, since that is
how fp32 matrix products run by default here (`precision.tf32`).

Memory is what torch reports as the device's total, which is less than its box says: error
correction and the driver keep a part. It is the least that was seen for that kind of device in
public issues (torch's out-of-memory errors have it: "total capacity of 79.14 GiB").
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import replace

from drumline.hardware.cluster import DeviceSpec, Link

TERA = 1e12
GIGA = 1e9
GIB = 2**30

# The share of the datasheet's rate that large products reach (bf16; S. Bekman, Machine Learning
# Engineering, "Maximum Achievable Matmul FLOPS", 2025). That of the 4090, 158.6 of 165.2 TFLOP/s,
# was measured in fp16 (github.com/mli/transformers-benchmarks, issue 4), and stands for all GeForce
# cards.
REACHED_A100 = 0.869
REACHED_H100 = 0.803
REACHED_MI300X = 0.514
REACHED_4090 = 0.96
# The share of the rate that FlashAttention 2 reaches, which torch's attention uses: 50 to 73% on an
# A100 (Dao 2023), and 35% on an H100 (Shah et al. 2024). It does not use the H100's new
# instructions for products.
ATTENTION_REACHED = 0.60
ATTENTION_REACHED_SLOW = 0.35
# Prefixes of the names of devices that are taken to reach the share of the H100: those that are as
# fast as it. The H20 and the 5090 are as new, but slower than an A100, and are taken to reach its
# share.
SLOW_ATTENTION = ("h100", "h200", "b200", "gb200", "mi300x")
# Prefixes of the names of devices whose clock falls under load: matrix products alone reach the limit
# of their power. Runs on H100 have shown it (cost.fitted.POWER_LIMITED); the others are taken to be
# like it.
POWER_LIMITED = ("h100", "h200", "b200", "gb200")
# Prefixes of the names of devices that multiply in fp8.
FP8 = ("h", "b200", "gb200", "l40s", "4090", "5090", "6000-ada", "mi300x")
# Devices that have neither bf16 nor TF32.
WITHOUT_BF16 = ("t4", "v100-16g", "v100-32g")
# Links among the devices of a host, and to it.
PCIE4 = ("pcie4", "pcie4")
PCIE5 = ("pcie5", "pcie5")
C2C = ("nvlink5", "nvlink-c2c")


def _gpu(
    name: str,
    memory_gib: float,
    bandwidth_gb_s: float,
    half_tflops: float,
    full_tflops: float,
    links: tuple[str, str],
    source: str,
    reached: float = REACHED_H100,
) -> DeviceSpec:
    """Return a GPU of the catalog.

    `memory_gib`: as torch reports it.
    `half_tflops`: of bf16 and fp16; `full_tflops`: of fp32.
    `links`: among the devices of a host, and to it.
    `reached`: the share of the rates that large matrix products reach.
    """
    half = half_tflops * TERA
    flops = {"bf16": half, "fp16": half, "fp32": full_tflops * TERA}
    if name.startswith(FP8):
        # Twice as much as in 16 bits, as the datasheet of each of these has it.
        flops["fp8"] = 2 * half_tflops * TERA
    if name in WITHOUT_BF16:
        del flops["bf16"]
    attention = ATTENTION_REACHED
    if name.startswith(SLOW_ATTENTION):
        attention = ATTENTION_REACHED_SLOW
    intra, host_link = links
    return DeviceSpec(
        name=name,
        kind="cuda",
        memory_bytes=int(memory_gib * GIB),
        bandwidth=bandwidth_gb_s * GIGA,
        flops=flops,
        source=source,
        efficiency=reached,
        attention=attention,
        is_power_limited=name.startswith(POWER_LIMITED),
        intra=intra,
        host_link=host_link,
    )


# A new device also needs its words in DRIVERS, and an entry in each of SLOW_ATTENTION,
# POWER_LIMITED, FP8, WITHOUT_BF16, HOST_MEMORY, _WITH_MEMORY, _SAME and AMBIGUOUS that applies to it.
DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _gpu(
            "a100-40g",
            memory_gib=39.38,
            bandwidth_gb_s=1555,
            half_tflops=312,
            full_tflops=156,
            links=("nvlink3", "pcie4"),
            source="NVIDIA A100 datasheet (2021), SXM",
            reached=REACHED_A100,
        ),
        _gpu(
            "a100-80g",
            memory_gib=79.14,
            bandwidth_gb_s=2039,
            half_tflops=312,
            full_tflops=156,
            links=("nvlink3", "pcie4"),
            source="NVIDIA A100 datasheet (2021), SXM",
            reached=REACHED_A100,
        ),
        _gpu(
            "h100-80g",
            memory_gib=79.14,
            bandwidth_gb_s=3350,
            half_tflops=989.4,
            full_tflops=494.7,
            links=("nvlink4", "pcie5"),
            source="NVIDIA H100 datasheet (2023), SXM; halved for sparsity",
        ),
        _gpu(
            "h100-pcie",
            memory_gib=79.14,
            bandwidth_gb_s=2000,
            half_tflops=756,
            full_tflops=378,
            links=PCIE5,
            source="NVIDIA H100 PCIe product brief (2022); halved for sparsity",
        ),
        _gpu(
            "h100-nvl",
            memory_gib=93.0,
            bandwidth_gb_s=3900,
            half_tflops=835.5,
            full_tflops=417.5,
            links=PCIE5,
            source="NVIDIA H100 datasheet (2024), NVL; halved for sparsity",
        ),
        _gpu(
            "h200",
            memory_gib=139.72,
            bandwidth_gb_s=4800,
            half_tflops=989.4,
            full_tflops=494.7,
            links=("nvlink4", "pcie5"),
            source="NVIDIA H200 datasheet (2024), SXM; halved for sparsity",
        ),
        _gpu(
            "h200-nvl",
            memory_gib=139.72,
            bandwidth_gb_s=4800,
            half_tflops=835.5,
            full_tflops=417.5,
            links=PCIE5,
            source="NVIDIA H200 datasheet (2024), NVL; halved for sparsity",
        ),
        _gpu(
            "b200",
            memory_gib=178.35,
            bandwidth_gb_s=8000,
            half_tflops=2250,
            full_tflops=1125,
            links=("nvlink5", "pcie5"),
            source="NVIDIA DGX B200 datasheet (2025), an eighth; halved for sparsity",
        ),
        _gpu(
            "l40s",
            memory_gib=44.34,
            bandwidth_gb_s=864,
            half_tflops=362,
            full_tflops=183,
            links=PCIE4,
            source="NVIDIA L40S datasheet (2023); halved for sparsity",
        ),
        _gpu(
            "a10",
            memory_gib=22.03,
            bandwidth_gb_s=600,
            half_tflops=125,
            full_tflops=62.5,
            links=PCIE4,
            source="NVIDIA A10 datasheet (2021)",
        ),
        _gpu(
            "t4",
            memory_gib=14.56,
            bandwidth_gb_s=300,
            half_tflops=65,
            full_tflops=8.1,
            links=("pcie3", "pcie3"),
            source="NVIDIA T4 datasheet (2019)",
        ),
        _gpu(
            "3090",
            memory_gib=23.52,
            bandwidth_gb_s=936,
            half_tflops=71,
            full_tflops=35.6,
            links=PCIE4,
            source="NVIDIA GA102 whitepaper (2020), RTX 3090, fp32 accumulation",
            reached=REACHED_4090,
        ),
        _gpu(
            "4090",
            memory_gib=23.52,
            bandwidth_gb_s=1008,
            half_tflops=165.2,
            full_tflops=82.6,
            links=PCIE4,
            source="NVIDIA Ada whitepaper (2022), RTX 4090, fp32 accumulation",
            reached=REACHED_4090,
        ),
        _gpu(
            "5090",
            memory_gib=31.36,
            bandwidth_gb_s=1792,
            half_tflops=209.5,
            full_tflops=104.8,
            links=PCIE5,
            source="NVIDIA RTX Blackwell whitepaper (2025), RTX 5090, fp32 accumulation",
            reached=REACHED_4090,
        ),
        # As A100 and H100, with slower links or products for export.
        _gpu(
            "a800-80g",
            memory_gib=79.14,
            bandwidth_gb_s=2039,
            half_tflops=312,
            full_tflops=156,
            links=("nvlink3-a800", "pcie4"),
            source="NVIDIA A800 datasheet (2022), SXM",
            reached=REACHED_A100,
        ),
        _gpu(
            "h20",
            memory_gib=95.0,
            bandwidth_gb_s=4000,
            half_tflops=148,
            full_tflops=74,
            links=("nvlink4", "pcie5"),
            source="NVIDIA H20 datasheet (2023), SXM, dense",
        ),
        _gpu(
            "gb200",
            memory_gib=184.0,
            bandwidth_gb_s=8000,
            half_tflops=2500,
            full_tflops=1250,
            links=C2C,
            source="NVIDIA GB200 NVL72 datasheet (2024), a 72nd; halved for sparsity",
        ),
        _gpu(
            "v100-16g",
            memory_gib=15.77,
            bandwidth_gb_s=900,
            half_tflops=125,
            full_tflops=15.7,
            links=("nvlink2", "pcie3"),
            source="NVIDIA V100 datasheet (2020), SXM2",
        ),
        _gpu(
            "v100-32g",
            memory_gib=31.74,
            bandwidth_gb_s=900,
            half_tflops=125,
            full_tflops=15.7,
            links=("nvlink2", "pcie3"),
            source="NVIDIA V100 datasheet (2020), SXM2",
        ),
        _gpu(
            "a6000",
            memory_gib=44.43,
            bandwidth_gb_s=768,
            half_tflops=154.8,
            full_tflops=77.4,
            links=PCIE4,
            source="NVIDIA RTX A6000 datasheet (2021); halved for sparsity",
        ),
        _gpu(
            "6000-ada",
            memory_gib=44.43,
            bandwidth_gb_s=960,
            half_tflops=364.2,
            full_tflops=182.1,
            links=PCIE4,
            source="NVIDIA RTX 6000 Ada datasheet (2023), a quarter of sparse FP8",
        ),
        _gpu(
            "mi300x",
            memory_gib=191.69,
            bandwidth_gb_s=5300,
            half_tflops=1307.4,
            full_tflops=653.7,
            links=("infinity-fabric", "pcie5"),
            source="AMD Instinct MI300X data sheet (2023)",
            reached=REACHED_MI300X,
        ),
    )
}
# The name of a CPU. It is not in the catalog, because its rates depend on the machine; see
# `planner.cluster.processor`.
CPU = "cpu"

# Device → (GiB of host memory for each, source), for plans that do not know the host. It is what
# one cloud rents with the device, and no more than the median of several clouds.
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
# Other devices are in machines that people build themselves. The usual advice is twice the memory
# of the devices, and memory is sold in modules. So a card of 24 or 32 GB comes with 64 GiB.
HOST_TIMES = 2
HOST_MODULE_GIB = 32

# A host with so many GPUs on one board has a network card for each of them.
GPUS_PER_BOARD = 8
# Link of its GPUs → (network between such hosts if nobody has set it, source).
HOST_NETWORK: dict[str, tuple[str, str]] = {
    "nvlink3": ("8x200Gb", "NVIDIA DGX A100 datasheet: 8 × 200 Gb/s"),
    "nvlink3-a800": ("8x200Gb", "as NVIDIA DGX A100"),
    "nvlink4": ("8x400Gb", "NVIDIA DGX H100 and H200 datasheets: 8 × 400 Gb/s"),
    "nvlink5": ("8x400Gb", "NVIDIA DGX B200 datasheet: 8 × 400 Gb/s"),
    "infinity-fabric": ("8x400Gb", "Azure ND96isr MI300X v5: 8 × 400 Gb/s"),
}
OTHER_NETWORK = "100Gb"

# Seconds of one step of a ring: NCCL's constants (src/graph/tuning.cc, hwLat, Simple).
NVLINK_LATENCY = 3.4e-6
PCI_LATENCY = 5.7e-6
NETWORK_LATENCY = 14e-6
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        # NVLink 3 reaches 235 of 300 GB/s in an all-reduce (Bekman, Networking), NVLink 4 370 of
        # 450 (NCCL's maintainer, nccl-tests issue 212). NVLink 5 is taken to reach the share of
        # NVLink 4.
        Link(
            "nvlink3",
            bandwidth=300 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.78,
            source="NVIDIA A100 datasheet: 600 GB/s both ways",
        ),
        Link(
            "nvlink4",
            bandwidth=450 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.82,
            source="NVIDIA H100 datasheet: 900 GB/s both ways",
        ),
        Link(
            "nvlink5",
            bandwidth=900 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.82,
            source="NVIDIA B200 datasheet: 1.8 TB/s both ways",
        ),
        # NVLink 2, and NVLink 3 with two thirds of its lanes, are taken to reach the share of
        # NVLink 3.
        Link(
            "nvlink2",
            bandwidth=150 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.78,
            source="NVIDIA V100 datasheet: 300 GB/s both ways",
        ),
        Link(
            "nvlink3-a800",
            bandwidth=200 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.78,
            source="NVIDIA A800 datasheet: 400 GB/s both ways",
        ),
        Link(
            "nvlink-c2c",
            bandwidth=225 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.82,
            source="NVIDIA GB200 datasheet: 900 GB/s both ways for the two GPUs of a Grace",
        ),
        # PCIe with sixteen lanes. Between devices everything passes through the host: RTX 5090
        # reach 28 of 63 GB/s (8 devices) to 35 (4 devices; NCCL issue 1639).
        Link(
            "pcie3",
            bandwidth=15.75 * GIGA,
            latency=PCI_LATENCY,
            efficiency=0.5,
            source="PCI-SIG: 8 GT/s a lane, 128b/130b",
        ),
        Link(
            "pcie4",
            bandwidth=31.5 * GIGA,
            latency=PCI_LATENCY,
            efficiency=0.5,
            source="PCI-SIG: 16 GT/s a lane, 128b/130b",
        ),
        Link(
            "pcie5",
            bandwidth=63.0 * GIGA,
            latency=PCI_LATENCY,
            efficiency=0.5,
            source="PCI-SIG: 32 GT/s a lane, 128b/130b",
        ),
        # 47.7 of 64 GB/s between 2, 312.9 of 448 among 8 (Bekman, Networking).
        Link(
            "infinity-fabric",
            bandwidth=448 * GIGA,
            latency=NVLINK_LATENCY,
            efficiency=0.70,
            per_peer=64 * GIGA,
            source="AMD MI300X platform data sheet: 7 × 128 GB/s both ways",
        ),
        # Two processes on 2 cores of an EPYC at 2.6 GHz, torch 2.13: 67 MB all-reduced in 58 ms, 1
        # kB in 0.46 ms.
        Link(
            "loopback",
            bandwidth=1.15 * GIGA,
            latency=230e-6,
            source="measured: gloo over 127.0.0.1; `drumline calibrate` measures yours",
        ),
    )
}
# A network by its rate, such as 100Gb, 8x400Gb, 200GbE or 400Gbps: the number of a host's cards, and
# gigabits a second of each. It is matched in lower case, so 100GB also means bits, as people use it
# for networks.
NETWORK = re.compile(r"^(?:(\d+)x)?(\d+(?:\.\d+)?)gb(?:e|ps|it)?$")
# All-reduce tests reach 340 of 400 Gb/s (AWS EFA v1; Bekman, Networking).
NETWORK_EFFICIENCY = 0.85

# A pattern of words that `normalise_name` removes from a device's name.
_VENDORS = r"nvidia|geforce|rtx|tesla|amd|instinct|radeon|sxm\d?|hbm\d?e?|gpu"
# Names of devices of one size, with the memory that their box says.
_WITH_MEMORY = (
    "a6000-48g",
    "6000-ada-48g",
    "h20-96g",
    "gb200-186g",
    "gb200-192g",
    "h200-141g",
    "h200-144g",
    "b200-180g",
    "b200-192g",
    "l40s-48g",
    "a10-24g",
    "t4-16g",
    "3090-24g",
    "4090-24g",
    "5090-32g",
    "mi300x-192g",
)
# What people call a device → its name in the catalog.
_SAME = {name: name.rpartition("-")[0] for name in _WITH_MEMORY}
_SAME |= {
    "a100": "a100-80g",
    "a800": "a800-80g",
    "v100": "v100-32g",
    "h100": "h100-80g",
    "h100-94g": "h100-nvl",
    "6000-ada-generation": "6000-ada",
}
# What people call a link → its name in the catalog.
_SAME_LINKS = {
    "xgmi": "infinity-fabric",
    "gloo": "loopback",
    "lo": "loopback",
    "pcie": "pcie4",
}
# Names that several devices share → how messages name the one that was chosen.
AMBIGUOUS = {
    "a100": "a100-80g (there is a100-40g, too)",
    "v100": "v100-32g (there is v100-16g, too)",
    "h100": "h100-80g (there are h100-pcie and h100-nvl, too)",
}


def normalise_name(name: str) -> str:
    """Return a device's name as the catalog writes it, without its maker's name.

    `NVIDIA RTX-4090` becomes 4090, and `A100-SXM4-80GB` becomes a100-80g.
    """
    dashed = re.sub(r"[\s_]+", "-", name.strip().lower())
    without_vendors = re.sub(rf"\b(?:{_VENDORS})(?=-|\d|\b)", "", dashed)
    short_memory = re.sub(r"(\d+)gi?b\b", r"\1g", without_vendors)
    # What was left out leaves dashes behind.
    return re.sub(r"-+", "-", short_memory).strip("-")


def find_device(name: str) -> DeviceSpec | None:
    """Return a device of the catalog by what people call it; None if it is not there.

    A CPU is not there, because its rates depend on the machine.
    """
    known = normalise_name(name)
    return DEVICES.get(_SAME.get(known, known))


def usual_host_memory(spec: DeviceSpec) -> tuple[int, str]:
    """Return the bytes of host memory for each device of this kind, and their source as text.

    A plan assumes them if nobody has set the host's memory.
    """
    if spec.name in HOST_MEMORY:
        gib, source = HOST_MEMORY[spec.name]
        return int(gib * GIB), source
    module_bytes = HOST_MODULE_GIB * GIB
    modules = math.ceil(HOST_TIMES * spec.memory_bytes / module_bytes)
    source = f"{HOST_TIMES} × the device's memory, in modules of {HOST_MODULE_GIB} GiB"
    return modules * module_bytes, source


def usual_network(intra: str, per_node: int) -> tuple[str, str]:
    """Return the network that a plan assumes between hosts if nobody has set it, and its source.

    `intra`: the link between the devices of a host, by its catalog name.
    `per_node`: devices of a host. Only boards of eight have a usual network.
    """
    if per_node == GPUS_PER_BOARD and intra in HOST_NETWORK:
        return HOST_NETWORK[intra]
    return OTHER_NETWORK, "a choice: one card of a usual server"


def find_link(name: str) -> Link | None:
    """Return a link of the catalog by its name, or a network by its rate; None for any other name.

    A rate is 100Gb, 8x400Gb (cards of one host) or 200GbE; InfiniBand is written like Ethernet.
    """
    known = name.strip().lower().replace(" ", "").replace("_", "-")
    found = LINKS.get(_SAME_LINKS.get(known, known))
    if found is not None:
        return found
    network = NETWORK.match(known)
    if network is None:
        return None
    cards = int(network[1] or 1)
    # Of one card, per second.
    gigabits = float(network[2])
    if cards <= 0 or gigabits <= 0:
        return None
    return Link(
        name.strip(),
        bandwidth=cards * gigabits / 8 * GIGA,
        latency=NETWORK_LATENCY,
        efficiency=NETWORK_EFFICIENCY,
        source="its rate by name",
    )


def similar_names(name: str, known: list[str]) -> list[str]:
    """Return the known names that are most like an unknown one, the likeliest first."""
    wanted = normalise_name(name)
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    if close:
        return close
    # For h150, all that begin with h1.
    return [other for other in known if other[:2] == wanted[:2]]


# The words by which the catalog's devices are found in the names that their drivers give.
DRIVERS = (
    "B200",
    "H200",
    "H200 NVL",
    "H100",
    "H100 NVL",
    "H100 PCIe",
    "A100",
    "A800",
    "H20",
    "GB200",
    "V100 SXM2",
    "V100 SXM3",
    "L40S",
    "RTX A6000",
    "RTX 6000 Ada",
    "A10",
    "T4",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "MI300X",
)
# Words in the driver's name of a slice of a device (MIG), or of another chip with a similar name.
NOT_DEVICES = {"MIG", "Laptop", "Ti", "D", "Max"}


def find_by_driver_name(device_name: str, memory_bytes: int | None = None) -> DeviceSpec | None:
    """Return the catalog's device for the name that its driver gives; None for an unknown one.

    If the catalog has several sizes of it, the one nearest in memory is returned; without
    `memory_bytes`, the smallest. A card in a PCIe slot, whose driver's name says so, has no NVLink:
    its link to other devices is that to the host.
    """
    parts = device_name.replace("-", " ").split()
    text = f" {' '.join(parts)} "
    # Whole words that stand next to each other, so that A10 is not found in A100.
    found = [driver for driver in DRIVERS if f" {driver} " in text]
    if not found or NOT_DEVICES & set(parts):
        return None
    # The longest name is the most exact: H100 NVL goes before H100.
    known = normalise_name(max(found, key=len))
    specs = [spec for name, spec in DEVICES.items() if re.sub(r"-\d+g$", "", name) == known]
    memory = memory_bytes or 0
    nearest_spec = min(specs, key=lambda spec: abs(spec.memory_bytes - memory))
    # Drivers write both: A100-PCIE-40GB, H100 PCIe.
    if "PCIE" in device_name.upper():
        return replace(nearest_spec, intra=nearest_spec.host_link)
    return nearest_spec


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the datasheet's FLOP/s of a device at a precision; None if they are not known.

    `device_name`: as the driver gives it, or as the catalog has it.
    """
    spec = find_by_driver_name(device_name) or DEVICES.get(device_name)
    if spec is None:
        return None
    return spec.flops.get(precision)
