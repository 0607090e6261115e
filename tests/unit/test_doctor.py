"""`drumline doctor`: which line of which log is the cause, what a host lacks, and how it is
printed."""

from __future__ import annotations

import io
import json
import os
import socket
import tracemalloc
from datetime import UTC, datetime
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from drumline.doctor import command, host
from drumline.doctor.check import Check, HostReport, differences
from drumline.doctor.command import as_text, doctor, read_question
from drumline.doctor.diagnose import (
    Finding,
    diagnose,
    find_likely_cause,
    moment,
    order_findings,
    ranks_without_log,
    search,
)
from drumline.doctor.host import Question, _is_up, examine
from drumline.doctor.hosts import expected_link, judge_all_reduce
from drumline.doctor.reduce import rounds
from drumline.errors import UserError
from drumline.hardware.detect import Device, Machine
from drumline.launch.postmortem import RankEnd, report
from drumline.system.files import digest
from drumline.telemetry.events import EventLog, Fault, Nonfinite, Step
from tests.harness import write_config

PEER = (
    "RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234\n"
)
FULL_DISK = "OSError: [Errno 28] No space left on device\n"
OUT_OF_MEMORY = "RuntimeError: CUDA out of memory\n"
CPU = Machine([], 2, 2**34, "cpu", False)
H100 = Machine([Device("NVIDIA H100 80GB HBM3", 79 * 2**30)], 8, 2**36, "cuda", True)


@pytest.fixture(autouse=True)
def little_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WRITTEN", host.MIB)


def names(findings: list[Finding]) -> list[str]:
    return [finding.signature.name for finding in findings]


def found(text: str) -> list[Finding]:
    return order_findings(search(io.BytesIO(text.encode()), "x"))


def run_folder(folder: Path, **logs: str) -> Path:
    """rank_N: the log of a rank in attempt 0; again_N: in attempt 1."""
    for name, text in logs.items():
        kind, _, rank = name.partition("_")
        path = folder / "logs" / f"attempt-{int(kind == 'again')}" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return folder


def note_end(run: Path, rank: int, at: float) -> None:
    """Write when a rank of attempt 0 ended."""
    end = {"message": {"drumline": {"message": "x", "time": at}}}
    (run / f"logs/attempt-0/rank-{rank}.json").write_text(json.dumps(end))


def step(number: int, seconds: float, data_s: float) -> Step:
    times = {
        "seconds": seconds,
        "data_s": data_s,
        "compute_s": seconds - data_s,
        "comm_s": None,
        "tokens_per_s": 1.0,
        "samples_per_s": 1.0,
    }
    counts = {
        "tokens": 1,
        "samples": 1,
        "sent_bytes": None,
        "memory_bytes": [1],
        "epoch": 0.0,
        "mfu": None,
    }
    return Step(step=number, loss=1.0, lr=0.1, grad_norm=1.0, **times, **counts)


def nonfinite(step: int, policy: str, sample: int) -> Nonfinite:
    return Nonfinite(step=step, policy=policy, loss=None, grad_norm=None, sample_ids=[sample])


# After a run.


@pytest.mark.claim("a fault's cause, evidence and fix are named")
def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=PEER, rank_1=f"step 3\nTraceback\n{FULL_DISK}", rank_2=PEER)
    note_end(run, rank=0, at=10.0)
    note_end(run, rank=1, at=12.0)
    first, second = diagnose(str(run))

    assert first.signature.name == "disk-full"
    assert first.evidence.place.endswith("rank-1.log:3")
    assert first.ranks == (1,)
    assert not first.caused_by

    assert second.signature.name == "peer-closed"
    assert second.caused_by == ("disk-full",)
    assert second.ranks == (0, 2)
    assert second.line_count == 2


def test_of_two_causes_the_earlier_one_is_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=FULL_DISK, rank_1=OUT_OF_MEMORY)
    note_end(run, rank=0, at=20.0)
    note_end(run, rank=1, at=10.0)

    assert names(diagnose(str(run))) == ["cuda-oom", "disk-full"]

    first, second = found(
        "[rank1]: [2024-11-23 01:34:46,120] CUDA out of memory\n"
        "[rank0]: [2024-11-23 01:34:45,120] No space left on device\n"
    )

    assert names([first, second]) == ["disk-full", "cuda-oom"]
    assert first.ranks == (0,)


def test_an_error_that_no_signature_knows_is_the_cause_of_what_follows() -> None:
    text = f"[rank0]:{PEER}[rank1]:ValueError: the rows are odd\n"
    first, second = found(text)

    assert first.signature.name == "python-error"
    assert first.evidence.text == "[rank1]:ValueError: the rows are odd"
    assert second.caused_by == ("python-error",)
    assert find_likely_cause(text) is None


def test_the_newest_attempt_is_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=FULL_DISK, again_0="OSError: [Errno 116] Stale file handle\n")
    newest, before = diagnose(str(run))

    assert names([newest, before]) == ["stale-handle", "disk-full"]
    assert newest.evidence.attempt == 1
    assert before.evidence.attempt == 0
    assert "before, in attempt 0:" in as_text([newest, before])


def test_a_killed_rank_is_known_by_the_event(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=PEER, rank_1="")
    killed = Fault(
        attempt=0,
        rank=1,
        signal="SIGKILL",
        exitcode=-9,
        error="killed by SIGKILL",
        log="x",
        step=3,
        action="stop",
    )
    EventLog(run / "events.jsonl").emit(killed)
    first, second = diagnose(str(run))

    assert names([first, second]) == ["killed", "peer-closed"]
    assert first.ranks == (1,)
    assert first.evidence.place.endswith("events.jsonl:1")


def test_what_events_tell(tmp_path: Path) -> None:
    run = str(tmp_path)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(1, 25):
        log.emit(nonfinite(number, "rescale", 1))
        log.emit(step(number, 0.5, 0.01))

    assert not diagnose(run), "a few overflows are usual"

    log.emit(nonfinite(25, "rescale", 1))
    for number in range(25, 45):
        log.emit(step(number, 0.5, 0.4))

    first, second = diagnose(run)
    overflow, slow = first, second
    if first.signature.name == "slow-loader":
        overflow, slow = second, first

    assert names([overflow, slow]) == ["fp16-overflow", "slow-loader"]
    assert overflow.line_count == 25
    assert slow.evidence.text.startswith("the last 20 steps waited for data: 0.40 s of 0.50 s")
    assert slow.signature.warn
    assert doctor(run, False, False) == 0

    log.emit(nonfinite(45, "stop", 7))

    assert names(diagnose(run))[0] == "nan"


STEP = json.dumps({"t": 9.0, **step(1, 0.5, 0.01).values(), "kind": "step"})


@pytest.mark.parametrize(
    ("name", "content", "place", "says"),
    [
        (
            "events.jsonl",
            f"{STEP}\n{STEP[:30]}",
            "events.jsonl:2",
            "1 lines cannot be read, the first is 2",
        ),
        (
            "events.jsonl",
            f"\0\0\0\n[1]\n\n{STEP}\n{{}}\n{'[' * 9999}\n",
            "events.jsonl:1",
            "4 lines cannot be read, the first is 1",
        ),
        ("events.jsonl", b"\xff\xfe" * 99, "events.jsonl:1", "1 lines cannot be read"),
        ("plan.json", '{"config": ', "plan.json:1", "not JSON"),
        ("plan.json", "[]", "plan.json:1", "holds no keys and values"),
    ],
)
def test_records_that_are_damaged(
    name: str, content: str | bytes, place: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "events.jsonl").write_text(f"{STEP}\n")
    if isinstance(content, str):
        content = content.encode()

    (tmp_path / name).write_bytes(content)
    (finding,) = diagnose(str(tmp_path))

    assert finding.signature.name == "record-damaged"
    assert finding.evidence.place.endswith(place)
    assert says in finding.evidence.text
    assert doctor(str(tmp_path), False, False) == 0, "a run can go on all the same"


@pytest.mark.parametrize(
    "values",
    [
        ({}, ["slow-loader"]),
        ({"data_s": None}, []),
        ({"data_s": "x"}, ["record-damaged"]),
        ({"data_s": float("nan")}, []),
        ({"seconds": []}, ["record-damaged"]),
        ({"t": 1e999}, ["record-damaged"]),
    ],
)
def test_events_of_another_version_are_no_traceback(
    values: tuple[dict[str, object], list[str]], tmp_path: Path
) -> None:
    """What differs in each event, and the names of what is found."""
    changed, expected = values
    lines = []
    for number in range(30):
        event = {"t": 9.0, "kind": "step", "step": number, "data_s": 9.0, "seconds": 9.0, **changed}
        lines.append(json.dumps(event) + "\n")

    (tmp_path / "events.jsonl").write_text("".join(lines))

    assert names(diagnose(str(tmp_path))) == expected


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "hang",
            '{"t": 1.0, "kind": "hang", "attempt": 0, "step": 20, "rank": 1, "ranks": [1], '
            '"phase": "data"}',
        ),
        (
            "hang",
            "error: rank 1 failed after step 20: hangs in data at step 21, for 5 s (limit 5 s): "
            "it has not come to the all_reduce",
        ),
        (
            "weights-differ",
            '{"t": 1.0, "kind": "weights_differ", "step": 840, "ranks": [3], "agreed": 820}',
        ),
        ("loss-spike", '{"t": 1.0, "kind": "spike", "step": 9, "policy": "note", "loss": 90.0}'),
        ("straggler", '{"t": 1.0, "kind": "straggler", "step": 40, "rank": 5, "host": "b"}'),
    ],
)
def test_what_is_seen_while_a_run_goes_on(name: str, line: str) -> None:
    (finding,) = found(f"{line}\n")
    assert finding.signature.name == name
    assert finding.signature.warn == (name in ("loss-spike", "straggler"))


def test_times_of_many_programs() -> None:
    assert moment('{"t": 12.5, "kind": "fault"}') == 12.5

    comma = moment("[2024-11-23 01:34:45,120] [INFO]")

    assert comma is not None
    assert moment("2024-11-23T01:34:45.120 x") == comma

    first = moment("[rank1]:[E626 06:24:44.903881913 P.cpp:616]")
    second = moment("W0626 06:24:45.286000 84933 api.py:719]")

    assert first is not None
    assert second is not None
    assert 0 < second - first < 1

    expected = datetime(2026, 11, 26, 20, 10, 11, 500000, UTC).timestamp()

    assert moment("2026-11-26T20:10:11.5Z x") == expected
    assert moment("2026-11-26T20:10:11.500000001+00:00 x") == expected
    assert moment("2026-11-26 15:10:11,5-05:00 x") == expected
    assert moment("2026-11-26 22:10:11.5+0200 x") == expected

    assert moment("step 3") is None
    assert moment("[E1399 06:24:44.9 x]") is None


def test_colours_torn_bytes_and_long_lines_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    red = b"\xff\x00\x1b[31mRuntimeError: CUDA out of memory\x1b[0m hf_abcdefghijk "
    text = red + b"x" * 5000 + b"\nno end: Disk quota exceeded"
    one, two = order_findings(search(io.BytesIO(text), "x"))

    assert names([one, two]) == ["cuda-oom", "quota"]
    assert two.evidence.line_number == 2
    assert len(one.evidence.text) <= 301
    assert "hf_abcdefghijk" not in one.evidence.text


RETRIED = (
    "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))' "
    "thrown while requesting GET https://hub/x\n"
)
RETRYING = (
    "Retrying (Retry(total=2)) after connection broken by "
    "'ProtocolError(104, 'Connection reset by peer')': /api/models/x\n"
)
WARNED = (
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 "
    "(errno: 111 - Connection refused).\n"
)


def test_a_sample_that_speaks_of_a_fault_is_none() -> None:
    assert found('Q: why do I get "CUDA out of memory"? A: a smaller batch helps.\n') == []
    assert found(RETRIED) == []
    assert found(WARNED) == []
    assert found(RETRYING) == []
    assert names(found(RETRYING + PEER)) == ["peer-closed"]


def test_a_line_across_two_pieces_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.doctor.diagnose.PIECE", 64)
    fine = "fine\n" * 30
    long = "a line that is longer than a piece: " + "y" * 80
    first, second = found(f"{fine}{long} CUDA out of memory\n{fine}{FULL_DISK}")

    assert names([first, second]) == ["cuda-oom", "disk-full"]
    assert first.evidence.line_number == 31
    assert second.evidence.line_number == 62


@pytest.mark.full
@pytest.mark.slow
def test_a_log_full_of_matches_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of one error are counted, not kept: neither their text nor a record of each
    line."""
    monkeypatch.setattr("drumline.doctor.diagnose.PIECE", 2**14)
    # 3.9 MB, two matches in most pieces.
    log = io.BytesIO((FULL_DISK + "fine\n" * 500).encode() * 1500)
    tracemalloc.start()
    [one] = order_findings(search(log, "x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert one.line_count == 1500
    assert one.evidence.line_number == 1
    assert peak < 2**18


def test_other_programs_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "attempt_0" / "3" / "stderr.log"  # torchrun --log-dir
    log.parent.mkdir(parents=True)
    log.write_text(FULL_DISK)
    (finding,) = diagnose(str(tmp_path))

    assert finding.ranks == (3,)

    single = tmp_path / "slurm-12.out"
    single.write_text(
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2024-04-20T09:09:37 "
        "DUE TO TIME LIMIT ***\n"
    )

    assert names(diagnose(str(single))) == ["slurm-time"]

    given = io.BytesIO(b"all is well\nCUDA out of memory\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))

    assert doctor("-", False, True) == 1

    (printed,) = json.loads(capsys.readouterr().out)["findings"]

    assert printed["name"] == "cuda-oom"
    assert printed["place"] == "<stdin>:2"
    assert printed["fix"]
    assert printed["consequence_of"] == []


def test_a_rank_that_wrote_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, rank_0="fine\n", rank_2="fine\n")

    assert ranks_without_log(run) == []

    mesh = {"pp": 1, "replicate": 3, "shard": 1, "cp": 1, "tp": 1}
    (run / "plan.json").write_text(json.dumps({"mesh": mesh}))

    assert ranks_without_log(run) == [1]
    assert doctor(str(run), False, False) == 0
    assert "no log of rank 1" in capsys.readouterr().out


def test_nothing_found_and_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text("step 1 loss 2.0\n")

    assert doctor(str(tmp_path), False, False) == 0
    assert "no signature" in capsys.readouterr().out

    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        with pytest.raises(UserError):
            doctor(str(tmp_path / place), False, False)

    with pytest.raises(UserError, match="bandwidth"):
        doctor(str(tmp_path), True, False)

    with pytest.raises(UserError, match="only a config has values to replace"):
        doctor(str(tmp_path), False, False, ["run.steps=1"])


def test_the_report_of_a_failed_run_ends_with_the_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n")
    error = {"message": "RuntimeError: DataLoader worker", "time": 1.0, "exit_code": 1}
    end = RankEnd(1, 1, error, log)
    *_, cause, fix = report(end, [end]).splitlines()

    assert cause == "likely cause: a loader worker died"
    assert fix.startswith("fix: num_workers=0")

    log.write_text("ValueError: odd\n")

    assert "fix:" not in report(end, [end])


# Before a run.


def verdicts(found: HostReport) -> dict[str, str]:
    return {check.name: check.verdict for check in found.checks}


CHECKED = {
    "versions",
    "GPUs",
    "InfiniBand",
    "host name",
    "port",
    "interfaces",
    "/dev/shm",
    "open files",
    "locked memory",
    "run folder",
    "cache",
    "host memory",
    "data",
}


def test_this_host(tmp_path: Path) -> None:
    rows = tmp_path / "x.jsonl"
    rows.write_text("{}\n")
    run_dir = str(tmp_path / "new/run")
    seen = examine(Question(run_dir=run_dir, cache_dir=str(tmp_path), data=(str(rows),)))

    assert seen.name == socket.gethostname()
    assert seen.facts.keys() >= {"drumline", "torch", "data"}
    assert verdicts(seen).keys() >= CHECKED
    assert "model" not in verdicts(seen)
    assert list(tmp_path.iterdir()) == [rows]

    for check in seen.checks:
        assert check.found
        assert check.fix or check.verdict == "ok"

    assert HostReport.from_json(json.loads(json.dumps(seen.to_json()))) == seen


def test_what_a_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        hosts = ("no.such.host.invalid",)
        model = str(tmp_path / "model")
        seen = examine(Question("/proc/x", str(tmp_path), model, (), port, hosts, "nosuch0"))

    found = verdicts(seen)
    for name in ("run folder", "model", "port", "peer name", "interfaces"):
        assert found[name] == "fail", name

    for check in seen.checks:
        assert check.fix or check.verdict == "ok"

    monkeypatch.setattr(host, "CHECK_FUNCTIONS", (host.check_limits, lambda *_: 1 / 0))
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    limits = verdicts(examine(Question()))

    assert limits["open files"] == "warn"
    assert len(limits) == 3, "a check that raises is a finding"


def test_infiniband_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        port = tmp_path / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")

    monkeypatch.setattr(host, "INFINIBAND", tmp_path)
    (check,) = host.check_infiniband(Question(), CPU, {})

    assert check.verdict == "warn"
    assert check.fix.startswith("mlx5_0:2")
    assert "ACTIVE 400 Gb/sec" in check.found


def test_gpus_as_the_driver_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"ecc": "2\n", "dri": "550.54\n"}

    def output_of(command: list[str], seconds: float) -> str:
        asked = command[1].partition("=")[2]
        return answers[asked[:3]]

    monkeypatch.setattr(host, "output_of", output_of)
    found = {check.name: check for check in host.check_gpus(Question(), H100, {})}

    assert found["GPUs"].found == "1 × NVIDIA H100 80GB HBM3 79 GiB"
    assert found["ECC errors"].verdict == "fail"

    answers["ecc"] = "[N/A]\n0\n3\n"
    found = {check.name: check for check in host.check_gpus(Question(), H100, {})}
    assert found["ECC errors"].fix.startswith("reset GPU 2 or reboot")


def test_digests_tell_copies_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "w").write_bytes(b"x" * 2**22)

    assert digest(tmp_path / "a") == digest(tmp_path / "b")

    with (tmp_path / "b/sub/w").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"y")

    assert digest(tmp_path / "a") != digest(tmp_path / "b")


def test_hosts_are_compared() -> None:
    one = HostReport("a", (), {"torch": "2.13", "model": "1f"})
    other = HostReport("b", (), {"torch": "2.11", "model": "1f"})
    what = "differs: 2.13 on a, 2.11 on b"
    expected = Check("torch", what, "fail", "the same torch on all hosts")

    assert differences([one, other]) == (expected,)

    (same,) = differences([one, one])

    assert same.verdict == "ok"
    assert same.found.endswith("on 2 hosts")
    assert differences([one]) == ()
    assert differences([]) == ()


def test_pairs_are_measured_in_rounds() -> None:
    """Within hosts, and between their first ranks."""
    assert rounds(["a", "a", "a"]) == [[(0, 1)], [(0, 2)], [(1, 2)]]

    of_four = rounds(["a", "b", "c", "d"])

    assert len(of_four) == 3
    assert sorted(chain(*of_four)) == list(combinations(range(4), 2))

    mixed = rounds(["a", "a", "b", "b"])

    assert sorted(chain(*mixed)) == [(0, 1), (0, 2), (2, 3)]


RESULT = {"latency": 1e-4, "bandwidth": 1e9, "clocks": 0.002, "pairs": [[0, 1, 1e9]]}
END = (0, "", "")


def judge(*ends: tuple[int | None, str, str], hosts: str = "aa") -> tuple[Check, ...]:
    """Judge the exit code, stdout and stderr of two ranks on hosts of these letters."""
    return judge_all_reduce(list(ends), list(hosts), CPU, "100Gb")


def test_what_ranks_report_is_judged() -> None:
    reduce, near = judge((0, json.dumps(RESULT), ""), END)

    assert reduce.verdict == "ok"
    assert near.verdict == "ok"
    assert "loopback" in near.found

    late = json.dumps({**RESULT, "clocks": 9.0})
    _, clocks, far = judge((0, late, ""), END, hosts="ab")

    assert clocks.verdict == "warn"
    assert far.verdict == "warn"
    assert far.name == "a ↔ b"
    assert "100Gb" in far.found

    no_address = "RuntimeError: Unable to find address for: eth7\n"
    (failed,) = judge((1, "", no_address), (1, "", PEER))

    assert failed.verdict == "fail"
    assert "GLOO_SOCKET_IFNAME" in failed.fix

    (hung,) = judge((None, "", ""), (None, "", ""))

    assert "rank 0, 1 did not end" in hung.found
    assert expected_link(H100, True, "100Gb").name == "nvlink4"
    in_slot = Machine([Device("NVIDIA A100 80GB PCIe", 79 * 2**30)], 8, 2**36, "cuda", True)
    assert expected_link(in_slot, True, "100Gb").name == "pcie4"


def test_a_config_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = write_config(
        tmp_path, model, launch={"port": 29512}, cluster={"device": "cpu", "inter": "25Gb"}
    )
    question, inter, _ = read_question(config)

    assert question.model == str(model)
    assert question.port == 29512
    assert inter == "25Gb"
    assert [Path(path).name for path in question.data] == ["train.jsonl", "eval.jsonl"]
    assert question.run_dir == str(tmp_path / "run")

    elsewhere, _, _ = read_question(config, ["run.dir=/scratch/mine"])
    assert elsewhere.run_dir == "/scratch/mine"

    def no_ranks(names: list[str], machine: Machine, *given: Any) -> tuple[Check, ...]:
        return (Check("all-reduce", f"{len(names)} ranks"),)

    monkeypatch.setattr(command, "all_reduce", no_ranks)

    assert doctor(str(config), False, True) == 0

    printed = json.loads(capsys.readouterr().out)["hosts"]
    checked = set()
    for each in printed:
        checked |= {check["name"] for check in each["checks"]}

    assert checked >= {"model", "data", "all-reduce"}

    (tmp_path / "train.jsonl").unlink()

    assert doctor(str(config), False, False) == 1
    assert "fix: copy it to this host" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("set_here", "is_up"),
    [
        ("eth", True),
        ("ib,eth", True),
        ("ib", False),
        ("=eth0", True),
        ("=eth", False),
        ("=ib0,eth0", True),
        ("^docker", True),
    ],
)
def test_a_list_of_interfaces_is_read_as_nccl_reads_it(set_here: str, is_up: bool) -> None:
    assert _is_up(set_here, ["lo", "eth0"]) is is_up
