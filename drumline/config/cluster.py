"""The section `cluster`: the devices to plan for, if they are not those of this machine.

This module does not import torch.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from drumline.config.section import MOST_SAMPLES, PathText, Rate, Seconds, Section, Short
from drumline.hardware import catalog
from drumline.hardware.cluster import DeviceSpec, Link

# `4x4090`: devices of one host; `2x8xh100-80g`: hosts, devices of each; `h100`: one.
SHORT = re.compile(r"^(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(\S.*)$", re.IGNORECASE)
# The largest clusters that exist have some 25,000 hosts.
MOST_NODES = 2**15
# Most devices of a host, if they are in the catalog: DGX-2, and two boards of eight.
MOST_GPUS = 16
# Most devices of a host, if they are in `devices`: NVIDIA's GB200 NVL72.
MOST_OWN = 72
# Number of devices of a usual host, which a refusal proposes.
USUAL_GPUS = 8


class DeviceConfig(Section):
    """A device that is not in the catalog, with the rates of dense products from its datasheet."""

    memory_gb: float = Field(
        gt=0, le=10**6, allow_inf_nan=False, description="Memory, in 10^9 bytes."
    )
    bandwidth_gb_s: Rate = Field(description="Memory bandwidth, in 10^9 bytes per second.")
    bf16_tflops: Rate | None = Field(
        None, description="Rate in bf16, in 10^12 FLOP/s; null: the device has no bf16."
    )
    fp16_tflops: Rate | None = Field(None, description="Rate in fp16; null: as bf16.")
    fp32_tflops: Rate = Field(
        description="Rate in fp32; of TF32 if the device has it, since that is the default."
    )
    host_link: str = Field(
        "pcie4", description="Link between device and host: a name of the catalog or of `links`."
    )

    def spec(self, name: str) -> DeviceSpec:
        """Return the device for the planner.

        Its default link to other devices is the one to its host.
        """
        tflops = {
            "bf16": self.bf16_tflops,
            "fp16": self.fp16_tflops or self.bf16_tflops,
            "fp32": self.fp32_tflops,
        }
        flops = {precision: rate * catalog.TERA for precision, rate in tflops.items() if rate}
        return DeviceSpec(
            name,
            "cuda",
            int(self.memory_gb * catalog.GIGA),
            self.bandwidth_gb_s * catalog.GIGA,
            flops,
            source="cluster.devices",
            intra=self.host_link,
            host_link=self.host_link,
        )


class LinkConfig(Section):
    """A link that is not in the catalog."""

    gb_s: Rate = Field(
        description="Send bandwidth of one device, or of one host for links between hosts, in 10^9 bytes per second."
    )
    latency_us: float = Field(
        10.0, ge=0, le=MOST_SAMPLES, description="Microseconds until the first byte arrives."
    )

    def link(self, name: str) -> Link:
        """Return the link for the planner, with full efficiency."""
        return Link(name, self.gb_s * catalog.GIGA, self.latency_us * 1e-6, source="cluster.links")


def _as_text(value: Any) -> Any:
    """Return a device's name as text. YAML reads `device: 4090` as a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


NUMBER = Short(_as_text, {"type": "integer", "examples": [4090]})


class ClusterConfig(Section):
    """The cluster to plan for, of nodes × per_node devices; `4x8xa100-80g` is short for one."""

    links: dict[str, LinkConfig] = Field(default_factory=dict, description="More links, by name.")
    devices: dict[str, DeviceConfig] = Field(
        default_factory=dict, description="More devices, by name."
    )
    device: Annotated[str | None, NUMBER] = Field(
        None,
        description="A device of the catalog (`drumline plan --devices`) or of `devices`, or cpu; null: the device of this machine.",
        json_schema_extra={"examples": [*catalog.DEVICES, catalog.CPU]},
    )
    per_node: int | None = Field(
        None,
        gt=0,
        le=10**6,
        description="Devices per host; null: as on this machine, or 1 if `device` is set.",
    )
    nodes: int = Field(1, gt=0, le=MOST_NODES, description="Number of hosts.")
    intra: str | None = Field(
        None,
        description="Link between the devices of a host: nvlink4, pcie4, …; null: the device's usual one.",
        json_schema_extra={"examples": list(catalog.LINKS)},
    )
    inter: str | None = Field(
        None,
        description="Network of each host: 400Gb, 8x400Gb, …; null: what such hosts usually have (`drumline plan --devices`), 100Gb for"
        " most.",
    )
    pod: int | None = Field(
        None,
        gt=0,
        le=MOST_NODES,
        description="Hosts that all reach each other at the rate of `inter`; null: all of them.",
    )
    oversubscription: float = Field(
        1.0,
        ge=1,
        le=10**3,
        description="How many times more the hosts of a pod can send than its links to other pods carry (Llama 3: 7).",
    )
    host_memory_gb: Rate | None = Field(
        None,
        description="Memory per host, in 10^9 bytes; null: as on this machine, or what such machines usually have (`drumline plan"
        " --devices`).",
    )
    calibration: PathText | None = Field(
        None,
        description="A file of `drumline calibrate --out` from such a machine; null: this machine's, if it is such a machine.",
    )
    price_per_device_hour: float | None = Field(
        None, ge=0, le=MOST_SAMPLES, description="Price of one device per hour, in any currency."
    )
    mtbf_hours: Rate | None = Field(
        None,
        description="Hours between two faults of a device; null: 50,677, from 419 interruptions in 54 days on 16,384 GPUs (Llama 3).",
    )
    restart_seconds: Seconds | None = Field(
        None,
        description="From a noticed fault to the next step, without reading the checkpoint; null: 24 (1 to 75), measured with tiny models.",
    )
    repair_hours: Rate = Field(
        24.0,
        description="Hours until a host that is lost comes back; the default is an assumption.",
    )

    @field_validator("devices")
    @classmethod
    def _host_links(
        cls, devices: dict[str, DeviceConfig], info: ValidationInfo
    ) -> dict[str, DeviceConfig]:
        own = info.data.get("links", {})
        for name, device in devices.items():
            if device.host_link not in own and catalog.find_link(device.host_link) is None:
                raise ValueError(f"{name}: host_link {_no_link(device.host_link, list(own))}")
        return devices

    @field_validator("device")
    @classmethod
    def _known(cls, device: str | None, info: ValidationInfo) -> str | None:
        """Refuse a device that is neither in the catalog nor in `devices`."""
        own = info.data.get("devices", {})
        if device is None or device in own or catalog.normalise_name(device) == catalog.CPU:
            return device
        if catalog.find_device(device) is not None:
            return device
        if re.search(r"[+,;]", device):
            raise ValueError(
                f"{device!r} is of several kinds: a cluster has one kind of device — take the one with the least memory for all"
            )
        raise ValueError(_unknown("device", device, [*own, *catalog.DEVICES, catalog.CPU]))

    @field_validator("intra", "inter")
    @classmethod
    def _parse_link(cls, link: str | None, info: ValidationInfo) -> str | None:
        own = info.data.get("links", {})
        if link is None or link in own or catalog.find_link(link) is not None:
            return link
        raise ValueError(_no_link(link, list(own)))

    @model_validator(mode="after")
    def _possible(self) -> ClusterConfig:
        """Refuse more devices than a host holds, pods without a size, and a link of other devices."""
        if self.oversubscription > 1 and self.pod is None:
            raise ValueError("oversubscription counts between pods — set pod, the hosts of one")
        spec = self.spec()
        most = MOST_OWN if self.device in self.devices else MOST_GPUS
        if spec is not None and self.per_node is not None and self.per_node > most:
            nodes = math.ceil(self.per_node * self.nodes / USUAL_GPUS)
            raise ValueError(
                f"no host holds {self.per_node} GPUs — for as many, nodes: {nodes} and per_node: {USUAL_GPUS}"
            )
        is_in_catalog = self.device is not None and self.device not in self.devices
        if is_in_catalog and self.intra is not None and self.intra not in self.links:
            self._check_intra(catalog.find_link(self.intra), spec)
        return self

    def _check_intra(self, link: Link | None, spec: DeviceSpec | None) -> None:
        """Raise ValueError for a link that only hosts of other devices have.

        `spec` is None for a CPU.
        """
        name = catalog.CPU
        usual = "loopback"
        if spec is not None:
            name = spec.name
            usual = spec.intra
        if link is None or link.name == usual:
            return
        if link.name.startswith("nvlink") or link.name == "infinity-fabric":
            raise ValueError(
                f"{name} has no {link.name} — its usual link is {usual}; leave intra out, or describe one under links"
            )

    def spec(self) -> DeviceSpec | None:
        """Return the device that is set.

        None if none is set, and for a CPU, whose rates depend on the machine.
        """
        if self.device is None:
            return None
        own = self.devices.get(self.device)
        if own is not None:
            return own.spec(self.device)
        return catalog.find_device(self.device)

    def link(self, name: str) -> Link:
        """Return a link of `links` or of the catalog.

        Names were checked when the config was read.
        """
        own = self.links.get(name)
        if own is not None:
            return own.link(name)
        link = catalog.find_link(name)
        assert link is not None
        return link


def cluster_from_string(value: Any) -> Any:
    """Return the section that a text is short for; another value is returned as it is.

    `cluster: 2x8xh100-80g` is short for `cluster: {nodes: 2, per_node: 8, device: h100-80g}`.
    """
    text = _as_text(value)
    if not isinstance(text, str):
        return value
    parts = SHORT.match(text.strip())
    if parts is None:
        return value
    first, second, device = parts.groups()
    if first is None:
        return {"device": device}
    if second is None:
        return {"per_node": int(first), "device": device}
    return {"nodes": int(first), "per_node": int(second), "device": device}


CLUSTER_ALONE = Short(
    cluster_from_string, {"type": ["string", "integer"], "examples": ["4x4090", "2x8xh100-80g"]}
)


def _no_link(name: str, own: list[str]) -> str:
    """Return the message for an unknown link."""
    networks = ", and networks by their rate: 100Gb, 8x400Gb"
    return _unknown("link", name, [*own, *catalog.LINKS], networks)


def _unknown(what: str, name: str, known: list[str], besides: str = "") -> str:
    """Return the message for a name that is neither in the catalog nor in the section."""
    similar = catalog.similar_names(name, known)
    if similar:
        fix = f"did you mean {' or '.join(similar)}?"
    else:
        fix = f"there are {', '.join(known)}{besides}."
    return (
        f"no {what} {name!r} in the catalog — {fix} Others can be described under cluster.{what}s"
    )
