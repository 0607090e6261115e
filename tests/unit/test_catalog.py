"""Devices, links and clusters by name; the seconds of a collective."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.bench.calibrate import write
from drumline.config.load import load_text, schema
from drumline.errors import ConfigError
from drumline.hardware import catalog
from drumline.hardware.cluster import Calibration, Cluster, Collective, CostLine, Product
from drumline.hardware.detect import Device, Machine
from drumline.planner.cluster import cluster_of, cluster_of_machine, with_nodes
from tests.harness import ROOT

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\n"
LAPTOP = Machine([], 4, 16 * 2**30, "cpu", False)
GIB = 2**30


def said(
    cluster: str,
    machine: Machine = LAPTOP,
    processes: int = 1,
    calibration: Calibration | None = None,
) -> Cluster:
    return cluster_of(
        load_text(f"{DATA}cluster: {cluster}\n", [], "c.yaml").cluster,
        machine,
        processes,
        calibration,
    )


# what is said → (device, hosts, devices of each, link between them)
SAID = {
    "4x4090": ("4090", 1, 4, "pcie4"),
    "4090": ("4090", 1, 1, "pcie4"),
    "1x rtx-4090": ("4090", 1, 1, "pcie4"),
    "NVIDIA GeForce RTX 4090": ("4090", 1, 1, "pcie4"),
    "2x8xh100-80g": ("h100-80g", 2, 8, "nvlink4"),
    "8×H100": ("h100-80g", 1, 8, "nvlink4"),
    "8xa100": ("a100-80g", 1, 8, "nvlink3"),
    "8xA100-SXM4-40GB": ("a100-40g", 1, 8, "nvlink3"),
    "4xh100-pcie": ("h100-pcie", 1, 4, "pcie5"),
    "32x8xb200": ("b200", 32, 8, "nvlink5"),
    "8xh200-141gb": ("h200", 1, 8, "nvlink4"),
    "8xmi300x": ("mi300x", 1, 8, "infinity-fabric"),
    "2xl40s": ("l40s", 1, 2, "pcie4"),
    "a10": ("a10", 1, 1, "pcie4"),
    "2xTesla T4": ("t4", 1, 2, "pcie3"),
    "2x3090": ("3090", 1, 2, "pcie4"),
    "5090-32g": ("5090", 1, 1, "pcie5"),
    "8xV100": ("v100-32g", 1, 8, "nvlink2"),
    "8xa800": ("a800-80g", 1, 8, "nvlink3-a800"),
    "2xNVIDIA RTX A6000": ("a6000", 1, 2, "pcie4"),
    "4xRTX 6000 Ada Generation": ("6000-ada", 1, 4, "pcie4"),
    "18x4xgb200": ("gb200", 18, 4, "nvlink5"),
    "8xh20-96gb": ("h20", 1, 8, "nvlink4"),
    "4xcpu": ("cpu", 1, 4, "loopback"),
    "{device: 4090}": ("4090", 1, 1, "pcie4"),
    "{device: h100-80g, per_node: 8, nodes: 4, intra: nvlink4, inter: 400Gb}": (
        "h100-80g",
        4,
        8,
        "nvlink4",
    ),
    "{device: h100-80g, per_node: 8, intra: PCIe5}": ("h100-80g", 1, 8, "pcie5"),
    "{device: x1, per_node: 2, devices: {x1: {memory_gb: 9, bandwidth_gb_s: 1, fp32_tflops: 2}}}": (
        "x1",
        1,
        2,
        "pcie4",
    ),
    "{device: a10, per_node: 2, intra: wire, links: {wire: {gb_s: 3}}}": ("a10", 1, 2, "wire"),
}


@pytest.mark.parametrize("text", SAID)
def test_a_cluster_that_is_said(text: str) -> None:
    cluster = said(text)
    assert (cluster.device.name, cluster.nodes, cluster.per_node, cluster.intra.name) == SAID[text]
    assert (
        cluster.world_size == cluster.nodes * cluster.per_node and cluster.device.memory_bytes > GIB
    )
    assert not cluster.is_this_machine or cluster.device.kind == "cpu"


def test_a_name_that_several_devices_share_is_told() -> None:
    assert "a100-80g" in said("8xa100").notes[0] and "a100-40g" in said("8xa100").notes[0]
    assert said("8xa100-40g").notes == ()


# what is said → parts of the line
WRONG = {
    "4x4080": ["c.yaml:2: cluster.device", "no device '4080' in the catalog", "did you mean 4090"],
    "8xh1000-80g": ["did you mean h100-80g"],
    "zzzz": ["no device 'zzzz'", "there are a100-40g, a100-80g", "cluster.devices"],
    "4x": ["no device '4x'"],
    "{device: 4090, per_node: 0}": [
        "cluster.per_node",
        "0 given, a number greater than 0 is wanted",
    ],
    "0x8xh100": ["cluster.nodes"],
    "[4090]": ["c.yaml:2: cluster", "a list of 1 given"],
    "4": ["no device '4'"],
    "8x4090+8xh100": ["'4090+8xh100' is of several kinds: a cluster has one kind of device"],
    "true": ["true given", "keys and values"],
    "{device: 4090, per_node: 4, intra: nvlink4}": [
        "4090 has no nvlink4",
        "its usual link is pcie4",
    ],
    "{device: h100, per_node: 8, intra: infinity-fabric}": ["h100-80g has no infinity-fabric"],
    "{device: cpu, per_node: 2, intra: nvlink4}": [
        "cpu has no nvlink4",
        "its usual link is loopback",
    ],
    "1000xh100": ["no host holds 1000 GPUs", "nodes: 125 and per_node: 8"],
    "{device: h100, intra: nvlink9}": ["cluster.intra", "no link 'nvlink9'", "did you mean nvlink"],
    "{device: h100, nodes: 2, inter: fast}": ["cluster.inter", "no link 'fast'", "100Gb, 8x400Gb"],
    "{device: h100, nodes: 2, inter: 0Gb}": ["no link '0Gb'"],
    "{device: h100, nodez: 2}": ["unknown key 'nodez'", "did you mean 'nodes'?"],
    "{device: x, devices: {x: {memory_gb: 9}}}": [
        "cluster.devices.x",
        "'bandwidth_gb_s' is missing",
    ],
    "{device: x, devices: {x: {memory_gb: 9, bandwidth_gb_s: 1, fp32_tflops: 2, host_link: pci}}}": [
        "cluster.devices",
        "x: host_link",
        "pcie",
    ],
    "{links: {wire: {gb_s: -1}}}": ["cluster.links.wire.gb_s", "-1 given"],
}


@pytest.mark.parametrize("text", WRONG)
def test_an_impossible_cluster_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        said(text)
    line = error.value.line()
    assert "\n" not in line and all(part in line for part in WRONG[text]), line


def test_every_device_of_the_catalog_is_whole() -> None:
    for name, spec in catalog.DEVICES.items():
        assert catalog.find_device(name) is spec and spec.source and spec.name == name
        assert (
            spec.flops["fp16"] > spec.flops["fp32"] > 1e12
            and spec.bandwidth > 1e11
            and spec.memory_bytes > 8 * GIB
        )
        assert {spec.intra, spec.host_link} <= set(catalog.LINKS) and 0.5 < spec.efficiency < 1
    assert all(
        link.source and link.latency > 0 and 0 < link.efficiency <= 1
        for link in catalog.LINKS.values()
    )


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("100Gb", 12.5),
        ("8x400Gb", 400),
        ("8x400gb", 400),
        ("200GbE", 25),
        ("2.5Gbps", 0.3125),
        ("nvlink5", 900),
        ("xgmi", 448),
    ],
)
def test_links_by_name(name: str, gb_s: float) -> None:
    link = catalog.find_link(name)
    assert link is not None and link.bandwidth == pytest.approx(gb_s * 1e9)


def test_what_is_here_fills_up_what_is_not_said() -> None:
    a100 = Machine(
        [Device("NVIDIA A100-SXM4-80GB", 85_000_000_000)] * 4, 32, 500 * GIB, "cuda", True
    )
    here = cluster_of(None, a100, 4)
    assert (here.device.name, here.per_node, here.is_this_machine, here.device.memory_bytes) == (
        "a100-80g",
        4,
        True,
        85_000_000_000,
    )
    assert [
        (c.nodes, c.per_node) for c in (cluster_of_machine(a100, 2), cluster_of_machine(a100, 8))
    ] == [(1, 2), (2, 4)]
    several = said("{nodes: 3, inter: 8x200Gb}", a100, 4)
    assert (
        several.device.name,
        several.world_size,
        several.is_this_machine,
        several.host_memory_bytes,
    ) == (
        "a100-80g",
        12,
        False,
        500 * GIB,
    )
    assert with_nodes(several, 5).world_size == 20
    unknown = cluster_of(
        None, Machine([Device("NVIDIA A10G", 24 * 10**9)], 8, 64 * GIB, "cuda", True), 1
    )
    assert unknown.device.name == "NVIDIA A10G" and "not in the catalog" in unknown.notes[0]
    assert said("2xcpu", a100).device.memory_bytes == 250 * GIB
    for name in (
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
    ):  # as drivers of several years write it
        assert (
            cluster_of_machine(
                Machine([Device(name, 42 * 10**9)] * 4, 32, 500 * GIB, "cuda", True), 4
            ).intra.name
            == "pcie4"
        )


UNLIKE = [
    Device("NVIDIA H100 80GB HBM3", 85 * 10**9),
    Device("NVIDIA GeForce RTX 4090", 25 * 10**9),
    Device("NVIDIA T4", 15 * 10**9),
]


def test_of_unlike_gpus_the_one_with_the_least_memory_is_planned_for() -> None:
    host, measured = Machine(UNLIKE, 8, 64 * GIB, "cuda", True), Calibration(matmul={"bf16": 5e14})
    two, one = cluster_of_machine(host, 2, measured), cluster_of_machine(host, 1, measured)
    assert (two.device.name, two.device.memory_bytes, two.per_node) == ("4090", 25 * 10**9, 2), (
        "the third is not used"
    )
    assert (
        "NVIDIA H100 80GB HBM3, NVIDIA GeForce RTX 4090" in two.notes[0]
        and two.calibration == Calibration()
    )
    assert (one.device.name, one.notes, one.calibration) == ("h100-80g", (), measured)


def test_a_device_of_one_s_own_by_the_name_of_what_is_here() -> None:
    host = Machine([UNLIKE[1]] * 4, 8, 64 * GIB, "cuda", True)
    own = "devices: {'4090': {memory_gb: 48, bandwidth_gb_s: 900, bf16_tflops: 165, fp32_tflops: 82, host_link: pcie3}}"
    here = said(f"{{{own}, device: 4090, per_node: 4}}", host, 4)
    assert (
        here.device.memory_bytes,
        here.device.bandwidth,
        here.intra.name,
        here.host_link.name,
    ) == (48e9, 900e9, "pcie3", "pcie3")
    assert here.is_this_machine and here.host_memory_bytes == 64 * GIB


@pytest.mark.parametrize(
    ("hardware", "cluster", "used", "note"),
    [
        ("NVIDIA H100 80GB HBM3", "device: h100-80g", True, ""),
        ("NVIDIA A100-SXM4-80GB", "device: h100-80g", True, "and used for h100-80g"),
        (
            "NVIDIA X",
            "devices: {mine: {memory_gb: 9, bandwidth_gb_s: 1, fp32_tflops: 2}}, device: mine",
            True,
            "",
        ),
        (
            "Some CPU, 64 cores",
            "device: h100-80g",
            False,
            "which is no GPU: it is not used for h100-80g",
        ),
        ("Some CPU, 64 cores", "device: cpu, per_node: 2", True, ""),
        ("Some CPU, 64 cores", "nodes: 1", True, "and used for this machine"),
        ("NVIDIA T4", "nodes: 1", False, "which is no CPU: it is not used for cpu"),
    ],
)
def test_whose_calibration_a_file_is(
    tmp_path: Path, hardware: str, cluster: str, used: bool, note: str
) -> None:
    write(
        Calibration(hardware, "torch", {"fp32": 3e12}),
        path := tmp_path / "measured.json",
        measured_at="today",
        quick=True,
    )
    here = said(f"{{{cluster}, calibration: {path}}}")
    assert bool(here.calibration.matmul) == used
    assert [each for each in here.notes if "calibration" in each] == (
        [f"cluster.calibration is of {hardware}, {note}"] if note else []
    )


# (kind, bytes that a rank sends, ranks of the group, of these on one host) on 2 hosts of 8 H100, 8x400Gb → milliseconds by hand
SECONDS: list[tuple[Collective, float, int, int | None, float]] = [
    ("all_reduce", 0, 8, None, 0),
    ("all_reduce", 1e9, 1, None, 0),
    ("all_reduce", 1e9, 8, None, 1e9 / (0.82 * 450e9) * 1e3 + 8.4e-3 + 14 * 3.4e-3),
    ("all_gather", 1e9, 8, 8, 1e9 / (0.82 * 450e9) * 1e3 + 8.4e-3 + 7 * 3.4e-3),
    # a ring over both hosts leaves each once; the network's 340 GB/s are less than NVLink's 369
    ("reduce_scatter", 1e9, 16, None, 1e9 / (0.85 * 400e9) * 1e3 + 8.4e-3 + 14e-3 + 14 * 3.4e-3),
    # eight pairs across at the same time share the network
    ("all_reduce", 1e9, 2, 1, 8 * 1e9 / (0.85 * 400e9) * 1e3 + 8.4e-3 + 2 * 14e-3),
    ("p2p", 1e6, 2, 1, 8 * 1e6 / (0.85 * 400e9) * 1e3 + 8.4e-3 + 14e-3),
    ("all_to_all", 15e6, 16, None, 8 * 8e6 / (0.85 * 400e9) * 1e3 + 8.4e-3 + 14e-3 + 14 * 3.4e-3),
]


@pytest.mark.parametrize(("kind", "sent", "ranks", "per_node", "milliseconds"), SECONDS)
def test_seconds_of_a_collective(
    kind: Collective, sent: float, ranks: int, per_node: int | None, milliseconds: float
) -> None:
    cluster = said("{device: h100, per_node: 8, nodes: 2, inter: 8x400Gb}")
    assert cluster.collective_seconds(kind, sent, ranks, per_node) * 1e3 == pytest.approx(
        milliseconds
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "per_node", "per_pod", "slower"),
    [
        ("all_reduce", 32, 8, 32, 1),  # within a pod
        # A ring leaves each host once, and each pod, whose links carry what 4/7 hosts send.
        (
            "all_reduce",
            64,
            8,
            None,
            7 / 4,
        ),
        ("all_reduce", 8, 1, 4, 7 / 4),  # eight rings, each with a rank on each host
        ("all_reduce", 2, 1, 1, 7),  # each rank's other is in the other pod
        ("all_to_all", 64, 8, 32, 7 * 32 / 56),
    ],
)
def test_pods_share_their_links_to_others(
    kind: Collective, ranks: int, per_node: int, per_pod: int | None, slower: float
) -> None:
    """Two pods of 4 hosts, as Llama 3's (Grattafiori et al. 2024, section 3.3.1) in small: an eighth of the hosts, the same 7."""
    pods = said(
        "{device: h100, per_node: 8, nodes: 8, inter: 8x400Gb, pod: 4, oversubscription: 7}"
    )
    one = replace(pods, pod=None)
    alone, seconds = (
        each.collective_seconds(kind, 1e12, ranks, per_node, per_pod) for each in (one, pods)
    )
    assert seconds / alone == pytest.approx(slower, rel=1e-3)


def test_many_hosts_without_pods_have_a_note() -> None:
    assert any("cluster.pod" in note for note in said("64x8xh100").notes)
    assert not any(
        "cluster.pod" in note
        for name in ("63x8xh100", "{nodes: 64, per_node: 8, device: h100, pod: 16}")
        for note in said(name).notes
    )


# Published all-reduces of 8×H200, torch 2.9, NCCL 2.27 (Bekman, Machine Learning Engineering): MiB → GB/s of the tensor. Larger ones are
# faster than any ring (the switch adds up), and smaller ones than a ring of large messages.
PUBLISHED = {4: 61.23, 8: 88.87, 16: 125.65, 32: 157.62, 64: 198.01}


@pytest.mark.parametrize("mib", PUBLISHED)
def test_an_all_reduce_takes_as_long_as_published(mib: int) -> None:
    size = mib * 2**20
    seconds = said("8xh200").collective_seconds("all_reduce", 2 * 7 / 8 * size, 8)
    assert size / seconds == pytest.approx(PUBLISHED[mib] * 1e9, rel=0.2)


def test_copies_to_the_host_and_the_disk() -> None:
    gpu = said("h100")
    assert (
        gpu.host_seconds("to_host", 63e9) == pytest.approx(1 / 0.8, rel=1e-3)
        and gpu.host_seconds("to_device", 0) == 0
    )
    assert gpu.host_seconds("to_host", 63e9, devices=2) == pytest.approx(2 / 0.8, rel=1e-3)
    assert gpu.host_seconds("to_host", 9.6e9, is_pinned=False) == pytest.approx(1)
    assert gpu.disk_seconds("write", 3.5e9) == 1 and said("2xcpu").host_seconds("to_host", 1e9) == 0
    measured = Calibration(host={"to_host": CostLine(0.5, 1e9)}, disk={"read": CostLine(0.25, 1e9)})
    known = replace(gpu, calibration=measured)
    assert (known.host_seconds("to_host", 1e9), known.disk_seconds("read", 1e9)) == (1.5, 1.25)


@pytest.mark.parametrize(
    ("device", "ranks", "gb_s"),
    [("mi300x", 2, 47.671), ("mi300x", 8, 312.912), ("5090", 4, 35), ("5090", 8, 28)],
)
def test_what_a_rank_sends_in_a_second_is_near_to_what_was_published(
    device: str, ranks: int, gb_s: float
) -> None:
    """MI300X are joined in pairs (Bekman, Networking), GeForce cards through the host (NCCL's issue 1639)."""
    assert 4 / said(f"8x{device}").collective_seconds("all_reduce", 4e9, ranks) == pytest.approx(
        gb_s, rel=0.13
    )


def test_what_was_measured_goes_before_the_datasheet() -> None:
    measured = Calibration(
        matmul={"fp32": 7e10},
        products={"fp32": (Product(16, 64, 64, 1e10), Product(4096, 1024, 1024, 7e10))},
        collectives={
            ("all_reduce", 2): CostLine(1e-3, 1e9),
            ("all_reduce", 8): CostLine(2e-3, 0.5e9),
            ("all_gather", 2): CostLine(0, 1e8),
        },
    )
    cluster = cluster_of_machine(LAPTOP, 8, measured)
    # a processor was measured whole, and eight ranks share it
    assert [
        cluster.rate("fp32"),
        cluster.rate("fp32", 20, 100),
        cluster.rate("fp32", 3000, 2048),
    ] == [7e10 / 8, 1e10 / 8, 7e10 / 8]
    assert cluster.rate("bf16") == pytest.approx(0.8 * 32 * 2.5e9 / 2) and cluster.rate("fp8") == 0
    assert cluster.collective_seconds("all_reduce", 1e9, 2) == pytest.approx(1.001)
    assert cluster.collective_seconds("all_reduce", 1e9, 6) == pytest.approx(2.002)
    # Slower than the network.
    assert replace(cluster, nodes=2).collective_seconds("all_reduce", 1e9, 16) == pytest.approx(
        2.0, rel=0.02
    )
    assert cluster.collective_seconds("broadcast", 1e8, 2) == pytest.approx(1.0)
    assert said("4xh100", LAPTOP, 1, measured).calibration == Calibration()
    assert said(
        "{device: cpu, per_node: 2, nodes: 2}", LAPTOP, 1, measured
    ).calibration == measured.share_among(2)
    assert said(
        "{device: cpu, per_node: 2, intra: 10Gb}", LAPTOP, 1, measured
    ).calibration == replace(measured.share_among(2), collectives={})


def test_the_page_s_examples_are_clusters() -> None:
    page = (ROOT / "docs" / "reference" / "clusters.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)]
    found = [
        load_text(f"{DATA}{block[block.index('cluster:') :]}", [], "page").cluster
        for block in blocks
    ]
    assert [c.nodes * (c.per_node or 0) for c in found if c is not None] == [16, 32, 8, 32]


def test_editors_know_the_short_form() -> None:
    forms = schema()["properties"]["cluster"]["anyOf"]
    assert (
        "string" in forms[0]["type"]
        and "h100-80g" in schema()["$defs"]["ClusterConfig"]["properties"]["device"]["examples"]
    )


OWN = "{device: own, per_node: 2, devices: {own: {memory_gb: 100, bandwidth_gb_s: 1, fp32_tflops: 1}}}"


@pytest.mark.parametrize(
    ("text", "gib", "is_assumed"),
    [
        ("4x4090", 4 * 64, True),
        ("2x8xh100-80g", 8 * 234, True),
        (OWN, 2 * 192, True),
        ("{device: 4090, per_node: 4, host_memory_gb: 128}", 128e9 / GIB, False),
    ],
)
def test_a_host_whose_memory_nobody_has_set_has_what_such_machines_have(
    text: str, gib: float, is_assumed: bool
) -> None:
    cluster = said(text)
    assert (
        cluster.host_memory_bytes == pytest.approx(gib * GIB)
        and cluster.host_memory_assumed is is_assumed
    )


def test_every_host_memory_is_of_a_device_and_has_a_source() -> None:
    assert catalog.HOST_MEMORY.keys() <= catalog.DEVICES.keys()
    assert all(gib > 0 and source for gib, source in catalog.HOST_MEMORY.values())
