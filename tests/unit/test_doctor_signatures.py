"""Each signature of the doctor: provoked for real, or by lines that were recorded where it happened; and none in healthy logs."""

from __future__ import annotations

import io
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from drumline.doctor.diagnose import Finding, order_findings, search
from drumline.doctor.signatures import ANY, signatures
from tests.unit.provoked import FULL, PROVOKED

TABLE = {signature.name: signature for signature in signatures()}
RECORDED: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parents[1] / "fixtures/doctor/recorded.yaml").read_text()
)
HEALTHY: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parents[1] / "fixtures/doctor/healthy.yaml").read_text()
)
# Told by events of a run, and by a kernel that mounts: tests of their own.
ELSEWHERE = {
    "slow-loader",
    "fp16-overflow",
    "hang",
    "weights-differ",
    "loss-spike",
    "straggler",
    "read-only",
    "record-damaged",
}
ELSEWHERE |= {"nan-skipped", "rank-failed"}


def found(text: str) -> list[Finding]:
    return order_findings(search(io.BytesIO(text.encode()), "x.log"))


def test_a_line_that_repeats_itself_takes_no_time() -> None:
    for begin in (
        "srun: error: ",
        "nodes are available: ",
        "SO_ERROR: ",
        "ZeRO-3 ",
        "connecting to address ",
    ):
        # Within the suite's time limit: squared, it would take minutes.
        assert not found(begin * 20_000)


def test_the_table_is_whole() -> None:
    assert len(TABLE) == len(signatures()) >= 40
    kinds = {signature.kind for signature in TABLE.values()}
    for signature in TABLE.values():
        assert signature.match and signature.cause and signature.fix
        assert signature.after <= {*TABLE, *kinds, ANY}, signature.name
        groups = {name for pattern in signature.match for name in pattern.groupindex}
        assert set(re.findall(r"\{(\w+)\}", signature.cause)) <= groups, signature.name


def test_no_signature_follows_from_itself_by_a_circle() -> None:
    follows = {
        one.name: {other.name for other in TABLE.values() if one.follows(other)}
        for one in TABLE.values()
    }
    assert list(TopologicalSorter(follows).static_order())  # raises CycleError


def test_each_signature_has_a_test() -> None:
    covered = {name.partition(" (")[0] for name in RECORDED} | set(PROVOKED) | ELSEWHERE
    assert covered == set(TABLE)


@pytest.mark.claim("a fault's cause, evidence and fix are named")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str) -> None:
    record = RECORDED[name]
    lines = record["lines"].splitlines()
    assert record["source"].startswith("https://") and 1 <= len(lines) <= 3
    findings = found(record["lines"])
    first, shown = findings[0], lines[findings[0].evidence.line - 1].strip()
    assert (
        first.signature.name == name.partition(" (")[0]
        and not first.follows
        and "not named here" not in first.cause
    )
    assert first.evidence.text.rstrip("…") == shown[:300]


@pytest.mark.claim("a fault's cause, evidence and fix are named")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in PROVOKED],
)
def test_provoked(name: str) -> None:
    if name == "no-gpu":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("a GPU is here")
    findings = found(PROVOKED[name]())
    assert [each.signature.name for each in findings[:1]] == [name]
    assert not findings[0].follows and "not named here" not in findings[0].cause


@pytest.mark.parametrize("name", HEALTHY)
def test_what_sounds_like_a_fault_and_is_none(name: str) -> None:
    assert (
        HEALTHY[name]["source"].startswith("https://")
        and len(HEALTHY[name]["lines"].splitlines()) <= 3
    )
    assert found(HEALTHY[name]["lines"]) == []
