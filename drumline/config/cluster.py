"""What a human may say about the devices to plan for; left out, those that are found here. No torch here."""

from __future__ import annotations

from pydantic import Field

from drumline.config.section import Section


class DeviceConfig(Section):
    """A device that the catalog lacks. Rates are of dense matrix products, as its datasheet has them."""

    memory_gb: float = Field(gt=0, description="Memory, in 10^9 bytes.")
    bandwidth_gb_s: float = Field(gt=0, description="Of its memory, 10^9 bytes a second.")
    bf16_tflops: float | None = Field(None, gt=0, description="bf16, 10^12 FLOP/s; null: it has no bf16.")
    fp16_tflops: float | None = Field(None, gt=0, description="fp16; null: as bf16.")
    fp32_tflops: float = Field(gt=0, description="fp32 as it runs by default: TF32 where the device has it.")
    host_link: str = Field("pcie4", description="Between device and host: a link of the catalog or of `links`.")


class LinkConfig(Section):
    """A link that the catalog lacks."""

    gb_s: float = Field(gt=0, description="10^9 bytes a second that one device sends (or one host, of links between hosts).")
    latency_us: float = Field(10.0, ge=0, description="Microseconds before the first byte is there.")


class ClusterConfig(Section):
    """The cluster to plan for: nodes × per_node devices. A string such as `8xh100-80g` or `4x8xa100-80g` is short for it."""

    device: str | None = Field(None, description="Of the catalog (`drumline plan --devices`) or of `devices`; null: what is found here.")
    per_node: int | None = Field(None, gt=0, description="Devices of a host; null: what is found here.")
    nodes: int = Field(1, gt=0, description="Hosts.")
    intra: str | None = Field(None, description="Link between the devices of a host: nvlink4, pcie4, …; null: the device's usual one.")
    inter: str = Field("100Gb", description="Link between hosts, for each host: 400Gb, 8x400Gb, …")
    host_memory_gb: float | None = Field(None, gt=0, description="Memory of a host, 10^9 bytes; null: what is found here, or not limited.")
    price_per_device_hour: float | None = Field(None, ge=0, description="For the cost of a run, in any currency.")
    devices: dict[str, DeviceConfig] = Field(default_factory=dict, description="Further devices by name.")
    links: dict[str, LinkConfig] = Field(default_factory=dict, description="Further links by name.")
