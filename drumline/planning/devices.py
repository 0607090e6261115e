"""The catalog of devices and links as tables, for `drumline plan --devices`."""

from __future__ import annotations

from rich.console import Console

from drumline.cluster.catalog import DEVICES, GIGA, LINKS, TERA
from drumline.planning.table import plain_table


def show_devices(console: Console) -> None:
    """Datasheet rates with their sources, and how to say what is not there."""
    devices = []
    for spec in DEVICES.values():
        half = f"{spec.flops['bf16'] / TERA:g}" if "bf16" in spec.flops else "–"
        full = f"{spec.flops['fp32'] / TERA:g}"
        row = [spec.name, f"{spec.memory_bytes / GIGA:.1f}", f"{spec.bandwidth / GIGA:,.0f}", half, full, spec.intra, spec.host_link]
        devices.append(row)
    links = [[link.name, f"{link.bandwidth / GIGA:g}", f"{link.efficiency:.0%}", f"{link.latency * 1e6:g}"] for link in LINKS.values()]
    console.print(plain_table(console, ("device", "GB", "GB/s", "bf16 TFLOP/s", "fp32", "usual link", "to host"), devices, left=(0, 5, 6)))
    console.print()
    console.print(plain_table(console, ("link", "GB/s one way", "reached", "latency µs"), links))
    console.print("\nBetween hosts, by rate: 100Gb, 400Gb, 8x400Gb (cards of one host). cpu: this machine's own rates.\n", markup=False)
    console.print("Sources", style="bold")
    for name, source in [(s.name, s.source) for s in DEVICES.values()] + [(link.name, link.source) for link in LINKS.values()]:
        console.print(f"  {name:<16} {source}", markup=False, soft_wrap=True)
    console.print(
        "\nWhat is not here is described in the YAML: cluster: {devices: {NAME: {memory_gb: …, bandwidth_gb_s: …, bf16_tflops: …,"
        " fp32_tflops: …}}, device: NAME, per_node: 8}",
        markup=False,
    )
