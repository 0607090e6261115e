"""Each signature of the doctor: provoked for real, or by lines that were recorded where it happened; and none in healthy logs."""

from __future__ import annotations

import io
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline.doctor.diagnose import Finding, order_findings, search
from drumline.doctor.signatures import ANY, signatures
from tests.unit.provoked import FULL, PROVOKED

Records = dict[str, dict[str, str]]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "doctor"


def read_records(name: str) -> Records:
    return yaml.safe_load((FIXTURES / name).read_text())


TABLE = {signature.name: signature for signature in signatures()}
RECORDED = read_records("recorded.yaml")
HEALTHY = read_records("healthy.yaml")
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
    "nan-skipped",
    "rank-failed",
}


def diagnose(text: str) -> list[Finding]:
    log = io.BytesIO(text.encode())
    return order_findings(search(log, "x.log"))


def test_a_line_that_repeats_itself_takes_no_time() -> None:
    for begin in (
        "srun: error: ",
        "nodes are available: ",
        "SO_ERROR: ",
        "ZeRO-3 ",
        "connecting to address ",
    ):
        # Within the suite's time limit: squared, it would take minutes.
        assert not diagnose(begin * 20_000)


def test_the_table_is_whole() -> None:
    assert len(TABLE) == len(signatures())
    assert len(TABLE) >= 40

    kinds = {signature.kind for signature in TABLE.values()}
    for name, signature in TABLE.items():
        assert signature.match
        assert signature.cause
        assert signature.fix
        assert signature.after <= {*TABLE, *kinds, ANY}, name

        groups: set[str] = set()
        for pattern in signature.match:
            groups.update(pattern.groupindex)

        filled_in = re.findall(r"\{(\w+)\}", signature.cause)
        assert set(filled_in) <= groups, name


def test_no_signature_follows_from_itself_by_a_circle() -> None:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, signature in TABLE.items():
        earlier = [other.name for other in TABLE.values() if signature.is_caused_by(other)]
        sorter.add(name, *earlier)

    order = sorter.static_order()
    assert list(order), "CycleError is raised for a circle"


def name_of_record(record: str) -> str:
    """Return the signature of a record, whose name may have a note in brackets."""
    name, _, _ = record.partition(" (")
    return name


def test_each_signature_has_a_test() -> None:
    recorded = set(map(name_of_record, RECORDED))
    assert recorded | set(PROVOKED) | ELSEWHERE == set(TABLE)


def assert_has_source(record: dict[str, str]) -> None:
    """Check that a record has a source, and few enough lines to be quoted."""
    assert record["source"].startswith("https://")
    assert len(record["lines"].splitlines()) <= 3


def assert_is_named(finding: Finding, name: str) -> None:
    """Check that a finding is the cause of all others, and of which signature it is."""
    assert finding.signature.name == name
    assert not finding.caused_by
    assert "not named here" not in finding.cause


@pytest.mark.claim("a fault's cause, evidence and fix are named")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str) -> None:
    record = RECORDED[name]
    assert_has_source(record)

    first, *_ = diagnose(record["lines"])
    assert_is_named(first, name_of_record(name))

    evidence = first.evidence
    line = record["lines"].splitlines()[evidence.line_number - 1]
    assert evidence.text.rstrip("…") == line.strip()[:300]


def provoked_faults() -> list[Any]:
    """Return the names of the faults that tests provoke; some of them only in the full suite."""
    names: list[Any] = []
    for name in PROVOKED:
        marks = [pytest.mark.full] if name in FULL else []
        names.append(pytest.param(name, marks=marks))

    return names


@pytest.mark.claim("a fault's cause, evidence and fix are named")
@pytest.mark.parametrize("name", provoked_faults())
def test_provoked(name: str) -> None:
    if name == "no-gpu":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("a GPU is here")

    first, *_ = diagnose(PROVOKED[name]())
    assert_is_named(first, name)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_sounds_like_a_fault_and_is_none(name: str) -> None:
    record = HEALTHY[name]
    assert_has_source(record)
    assert diagnose(record["lines"]) == []
