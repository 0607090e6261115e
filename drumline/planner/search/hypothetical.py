"""Clusters that are not there yet: other hosts, devices, links and prices. Pure.

`drumline plan --what-if` asks about them. The planner needs only the numbers of a datasheet, so a
device that does not exist is planned for like any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.config.cluster import MOST_NODES, MOST_OWN
from drumline.errors import UserError
from drumline.hardware import catalog
from drumline.hardware.cluster import Calibration, Cluster, Link
from drumline.planner.cluster import usual_inter, with_nodes
from drumline.planner.search.answer import Answer, Question
from drumline.planner.search.search import search

# What one row of the question changes: values by the keys of CHANGES.
Changes = Mapping[str, int | float | str]
FORM = (
    "write nodes=2,4,8 for other numbers of hosts, or what is to be different of them:"
    " device=h200 or memory_gb=288 bandwidth_gb_s=8000 bf16_tflops=5000 intra=1800 inter=8x800Gb price=6"
)
# The largest number of a datasheet, or price, that is taken.
MOST_RATE = 1e9
# The most combinations of values that are planned.
MOST_ROWS = 64
# The precision whose rate `bf16_tflops` sets, and the one that stands for it on devices without it.
RATED = ("bf16", "fp32")


def parse_what_if(text: str) -> list[Changes]:
    """Return the changes in the value of `--what-if`, one for each row of the answer.

    `nodes=2,4 price=3` is two rows: a key may have several values, and all combinations are asked.
    Raises UserError for another form, and for too many rows.
    """
    values: dict[str, list[int | float | str]] = {}
    for word in text.split():
        key, _, given = word.partition("=")
        # A comma at the end makes an empty part.
        parts = [part for part in given.split(",") if part]
        if key in values:
            raise UserError(
                f"{key} is given twice",
                where="--what-if",
                fix=f"put commas between the values of a key, such as {key}=A,B",
            )
        if key not in CHANGES or not parts:
            raise _mistake(word)
        values[key] = [_parse(key, part) for part in parts]
    if not values:
        raise _mistake(text)
    rows: list[Changes] = []
    for combination in itertools.product(*values.values()):
        rows.append(dict(zip(values, combination, strict=True)))
    if len(rows) > MOST_ROWS:
        raise UserError(
            f"{len(rows)} combinations are more than a table shows",
            where="--what-if",
            fix=f"at most {MOST_ROWS}",
        )
    return rows


def changes_hosts_alone(rows: Sequence[Changes]) -> bool:
    """Return whether a question is about numbers of hosts and nothing else."""
    return all(set(changes) == {"nodes"} for changes in rows)


def describe_changes(changes: Changes) -> str:
    """Return changes as they are written: `memory_gb=288 price=6`."""
    parts = []
    for key, value in changes.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(f"{key}={shown}")
    return " ".join(parts)


def what_if(question: Question, rows: Sequence[Changes]) -> tuple[Answer, ...]:
    """Return the answers on the cluster after each of these changes, in their order.

    Clusters that differ in their price alone are searched once: plans do not depend on it.
    """
    answers: list[Answer] = []
    searched: list[tuple[Cluster, Answer]] = []
    for changes in rows:
        cluster = change_cluster(question.cluster, changes)
        without_price = replace(cluster, price_per_device_hour=None)
        answer = _find_searched(searched, without_price)
        if answer is None:
            answer = search(replace(question, cluster=cluster))
            searched.append((without_price, answer))
        own_question = replace(answer.question, cluster=cluster)
        answers.append(replace(answer, question=own_question))
    return tuple(answers)


def _find_searched(searched: Sequence[tuple[Cluster, Answer]], cluster: Cluster) -> Answer | None:
    """Return the answer on an equal cluster; None if it was not searched yet."""
    for other, answer in searched:
        if other == cluster:
            return answer
    return None


def change_cluster(cluster: Cluster, changes: Changes) -> Cluster:
    """Return the cluster after the changes.

    They are made in the order of CHANGES, so `device` comes before what differs from it. Nothing that
    was measured on this machine counts for a device or a link that changes.
    """
    for key, change in CHANGES.items():
        if key in changes:
            cluster = change(cluster, changes[key])
    return cluster


def _mistake(text: str) -> UserError:
    """Return the error for a value of another form."""
    return UserError(f"{text!r} is no question", where="--what-if", fix=FORM)


def _parse(key: str, part: str) -> int | float | str:
    """Return a value of a key. Raises UserError if the key has no such value."""
    if key in ("nodes", "per_node"):
        if not part.isdecimal() or int(part) == 0:
            raise UserError(
                f"{key}={part} given, a whole number from 1 on is wanted",
                where="--what-if",
                fix=FORM,
            )
        most = MOST_NODES if key == "nodes" else MOST_OWN
        if int(part) > most:
            unit = "hosts" if key == "nodes" else "devices of a host"
            raise UserError(
                f"{int(part)} {unit} are more than anybody has",
                where="--what-if",
                fix=f"at most {most}",
            )
        return int(part)
    if key == "device":
        if catalog.find_device(part) is None:
            similar = " or ".join(catalog.similar_names(part, list(catalog.DEVICES)))
            fix = f"did you mean {similar}?" if similar else "see drumline plan --devices"
            raise UserError(
                f"no device {part!r} in the catalog",
                where="--what-if",
                fix=f"{fix} Describe others by memory_gb, bandwidth_gb_s and bf16_tflops",
            )
        return part
    return _parse_rate(key, part)


def _parse_rate(key: str, part: str) -> float | str:
    """Return a positive number, or the name of a link. A price may also be 0."""
    try:
        number = float(part)
    except ValueError:
        if key in ("intra", "inter", "host_link") and catalog.find_link(part) is not None:
            return part
        number = math.nan
    least = 0.0 if key == "price" else 1e-6
    # Written this way round, so that nan is refused, too.
    if not least <= number <= MOST_RATE:
        wanted = f"a number greater than 0, at most {MOST_RATE:g},"
        if key == "price":
            wanted = f"a number from 0 to {MOST_RATE:g}"
        if key in ("intra", "inter", "host_link"):
            wanted = f"{wanted} in GB/s, or a link such as nvlink4 or 8x400Gb,"
        raise UserError(f"{key}={part} given, {wanted} is wanted", where="--what-if", fix=FORM)
    return number


def _with_device(cluster: Cluster, name: Any) -> Cluster:
    """Return the cluster with another device of the catalog, and the links and hosts usual for it."""
    spec = catalog.find_device(name)
    assert spec is not None
    intra = catalog.LINKS[spec.intra]
    memory_of_device, _ = catalog.usual_host_memory(spec)
    return replace(
        cluster,
        device=spec,
        intra=intra,
        inter=usual_inter(intra.name, cluster.per_node),
        host_link=catalog.LINKS[spec.host_link],
        host_memory_bytes=cluster.per_node * memory_of_device,
        host_memory_assumed=True,
        is_this_machine=False,
        calibration=Calibration(),
    )


def _with_memory(cluster: Cluster, gigabytes: Any) -> Cluster:
    """Return the cluster with another memory of each device, in 10^9 bytes."""
    device = replace(cluster.device, memory_bytes=int(gigabytes * catalog.GIGA))
    return replace(cluster, device=device, is_this_machine=False)


def _with_bandwidth(cluster: Cluster, gigabytes_a_second: Any) -> Cluster:
    """Return the cluster with another bandwidth of the devices' memory."""
    device = replace(cluster.device, bandwidth=gigabytes_a_second * catalog.GIGA)
    calibration = replace(cluster.calibration, memory=None, operators={})
    return replace(cluster, device=device, calibration=calibration, is_this_machine=False)


def _with_rate(cluster: Cluster, tflops: Any) -> Cluster:
    """Return the cluster with another rate in bf16, and other precisions by the same ratio."""
    flops = cluster.device.flops
    rated = next(precision for precision in RATED if precision in flops)
    ratio = tflops * catalog.TERA / flops[rated]
    scaled = {precision: ratio * rate for precision, rate in flops.items()}
    calibration = replace(cluster.calibration, matmul={}, products={})
    device = replace(cluster.device, flops=scaled)
    return replace(cluster, device=device, calibration=calibration, is_this_machine=False)


def _changed_link(link: Link, given: Any) -> Link:
    """Return a link of the catalog, or this one with another rate in GB/s."""
    if isinstance(given, str):
        found = catalog.find_link(given)
        assert found is not None
        return found
    return Link(
        f"{given:g} GB/s",
        given * catalog.GIGA,
        link.latency,
        efficiency=link.efficiency,
        source="--what-if",
    )


def _with_intra(cluster: Cluster, given: Any) -> Cluster:
    """Return the cluster with another link between the devices of a host."""
    calibration = replace(cluster.calibration, collectives={})
    link = _changed_link(cluster.intra, given)
    return replace(cluster, intra=link, calibration=calibration, is_this_machine=False)


def _with_inter(cluster: Cluster, given: Any) -> Cluster:
    """Return the cluster with another network of each host."""
    return replace(cluster, inter=_changed_link(cluster.inter, given), is_this_machine=False)


def _with_host_link(cluster: Cluster, given: Any) -> Cluster:
    """Return the cluster with another link between a device and its host."""
    calibration = replace(cluster.calibration, host={})
    link = _changed_link(cluster.host_link, given)
    return replace(cluster, host_link=link, calibration=calibration, is_this_machine=False)


def _with_price(cluster: Cluster, price: Any) -> Cluster:
    """Return the cluster with another price of a device for an hour."""
    return replace(cluster, price_per_device_hour=price)


def _with_per_node(cluster: Cluster, devices: Any) -> Cluster:
    """Return the cluster with another number of devices of a host, whose memory grows with them."""
    memory = cluster.host_memory_bytes
    if memory is not None:
        memory = memory * devices // cluster.per_node
    return replace(
        cluster,
        per_node=devices,
        host_memory_bytes=memory,
        is_this_machine=cluster.is_this_machine and devices == cluster.per_node,
    )


# What `--what-if` can change, in the order in which it is changed.
CHANGES: dict[str, Callable[[Cluster, Any], Cluster]] = {
    "device": _with_device,
    "per_node": _with_per_node,
    "nodes": with_nodes,
    "memory_gb": _with_memory,
    "bandwidth_gb_s": _with_bandwidth,
    "bf16_tflops": _with_rate,
    "intra": _with_intra,
    "inter": _with_inter,
    "host_link": _with_host_link,
    "price": _with_price,
}
