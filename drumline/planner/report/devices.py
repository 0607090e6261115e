"""The report of `drumline plan --devices`: the catalog of devices and links, with their sources."""

from __future__ import annotations

from rich.console import Console

from drumline.hardware.catalog import (
    DEVICES,
    GIGA,
    HOST_NETWORK,
    LINKS,
    OTHER_NETWORK,
    TERA,
    usual_host_memory,
)
from drumline.hardware.cluster import DeviceSpec
from drumline.planner.report.table import UNKNOWN, plain_table

MICROSECONDS = 1e6  # of a second


def show_devices(console: Console) -> None:
    """Print the datasheet rates of devices and links, their sources, and how to describe another device."""
    _show_rates(console)
    _show_sources(console)
    console.print(
        "\nWhat is not here is described in the YAML: cluster: {devices: {NAME: {memory_gb: …, bandwidth_gb_s: …, bf16_tflops: …,"
        " fp32_tflops: …}}, device: NAME, per_node: 8}",
        markup=False,
    )


def _show_rates(console: Console) -> None:
    device_heads = ("device", "GB", "GB/s", "bf16 TFLOP/s", "fp32", "usual link", "to host")
    devices = [_device_row(spec) for spec in DEVICES.values()]
    console.print(plain_table(console, device_heads, devices))
    console.print()
    links = []
    for link in LINKS.values():
        rate = f"{link.bandwidth / GIGA:g}"
        latency = f"{link.latency * MICROSECONDS:g}"
        links.append((link.name, rate, f"{link.efficiency:.0%}", latency))
    link_heads = ("link", "GB/s one way", "reached", "latency µs")
    console.print(plain_table(console, link_heads, links))
    console.print(
        "\nBetween hosts, by rate: 100Gb, 400Gb, 8x400Gb (cards of one host). cpu: this machine's own rates.\n",
        markup=False,
    )


def _device_row(spec: DeviceSpec) -> tuple[str, ...]:
    memory = f"{spec.memory_bytes / GIGA:.1f}"
    bandwidth = f"{spec.bandwidth / GIGA:,.0f}"
    half = _describe_rate(spec, "bf16")
    full = _describe_rate(spec, "fp32")
    return (spec.name, memory, bandwidth, half, full, spec.intra, spec.host_link)


def _describe_rate(spec: DeviceSpec, precision: str) -> str:
    """Return the TFLOP/s of a precision as text, and a dash if the device lacks it."""
    if precision not in spec.flops:
        return UNKNOWN
    return f"{spec.flops[precision] / TERA:g}"


def _show_sources(console: Console) -> None:
    """Print where rates, host memory and networks come from."""
    console.print("Sources", style="bold")
    for spec in DEVICES.values():
        _show_source(spec.name, spec.source, console)
    for link in LINKS.values():
        _show_source(link.name, link.source, console)
    console.print(
        "\nHost memory assumed for each device where cluster.host_memory_gb is not set, GB",
        style="bold",
    )
    for spec in DEVICES.values():
        host_bytes, source = usual_host_memory(spec)
        _show_source(spec.name, f"{host_bytes / GIGA:.0f}, {source}", console)
    console.print(
        "\nNetwork assumed between hosts of eight where cluster.inter is not set, by the link of their devices",
        style="bold",
    )
    for intra, (network, source) in HOST_NETWORK.items():
        _show_source(intra, f"{network}, {source}", console)
    _show_source("other hosts", OTHER_NETWORK, console)


def _show_source(name: str, source: str, console: Console) -> None:
    console.print(f"  {name:<16} {source}", markup=False, soft_wrap=True)
