"""`drumline doctor`: which line of which log is the cause, what a host lacks, and how it is printed."""

from __future__ import annotations

import io
import json
import os
import socket
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from drumline.doctor import command, host
from drumline.doctor.check import Check, Host, differences
from drumline.doctor.command import as_text, doctor, read_question
from drumline.doctor.diagnose import (
    Finding,
    advice,
    diagnose,
    moment,
    order_findings,
    ranks_without_log,
    search,
)
from drumline.doctor.host import Question, _is_up, examine
from drumline.doctor.hosts import expected, judge_all_reduce
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
CPU = Machine([], 2, 2**34, "cpu", False)


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


def ended(log: Path, at: float) -> None:
    log.with_suffix(".json").write_text(
        json.dumps({"message": {"drumline": {"message": "x", "time": at}}})
    )


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


# ------------------------------------------------------------------------------------------------------------------ after a run


@pytest.mark.claim("a fault's cause, evidence and fix are named")
def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=PEER, rank_1=f"step 3\nTraceback\n{FULL_DISK}", rank_2=PEER)
    ended(run / "logs/attempt-0/rank-0.log", 10.0)
    ended(run / "logs/attempt-0/rank-1.log", 12.0)
    first, second = diagnose(str(run))
    assert names([first, second]) == ["disk-full", "peer-closed"]
    assert (
        first.evidence.place.endswith("rank-1.log:3") and first.ranks == (1,) and not first.follows
    )
    assert second.follows == ("disk-full",) and second.ranks == (0, 2) and second.lines == 2


def test_of_two_causes_the_earlier_one_is_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=FULL_DISK, rank_1="RuntimeError: CUDA out of memory\n")
    ended(run / "logs/attempt-0/rank-0.log", 20.0)
    ended(run / "logs/attempt-0/rank-1.log", 10.0)
    assert names(diagnose(str(run))) == ["cuda-oom", "disk-full"]
    both = "[rank1]: [2024-11-23 01:34:46,120] CUDA out of memory\n[rank0]: [2024-11-23 01:34:45,120] No space left on device\n"
    assert names(found(both)) == ["disk-full", "cuda-oom"] and found(both)[0].ranks == (0,)


def test_an_error_that_no_signature_knows_is_the_cause_of_what_follows() -> None:
    text = f"[rank0]:{PEER}[rank1]:ValueError: the rows are odd\n"
    first, second = found(text)
    assert (first.signature.name, first.evidence.text) == (
        "python-error",
        "[rank1]:ValueError: the rows are odd",
    )
    assert second.follows == ("python-error",) and advice(text) is None


def test_the_newest_attempt_is_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path, rank_0=FULL_DISK, again_0="OSError: [Errno 116] Stale file handle\n")
    findings = diagnose(str(run))
    assert names(findings) == ["stale-handle", "disk-full"] and [
        each.evidence.attempt for each in findings
    ] == [1, 0]
    assert "before, in attempt 0:" in as_text(findings)


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
    assert (
        names([first, second]) == ["killed", "peer-closed"]
        and first.ranks == (1,)
        and first.evidence.place.endswith("events.jsonl:1")
    )


def test_what_events_tell(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(1, 25):
        log.emit(
            Nonfinite(step=number, policy="rescale", loss=None, grad_norm=None, sample_ids=[1])
        )
        log.emit(step(number, 0.5, 0.01))
    assert not diagnose(str(tmp_path)), "a few overflows are usual"
    log.emit(Nonfinite(step=25, policy="rescale", loss=None, grad_norm=None, sample_ids=[1]))
    for number in range(25, 45):
        log.emit(step(number, 0.5, 0.4))
    overflow, slow = sorted(diagnose(str(tmp_path)), key=lambda each: each.signature.name)
    assert names([overflow, slow]) == ["fp16-overflow", "slow-loader"] and overflow.lines == 25
    assert slow.evidence.text.startswith("the last 20 steps waited for data: 0.40 s of 0.50 s")
    assert slow.signature.warn and doctor(str(tmp_path), False, False) == 0
    log.emit(Nonfinite(step=45, policy="stop", loss=None, grad_norm=None, sample_ids=[7]))
    assert names(diagnose(str(tmp_path)))[0] == "nan"


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
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (finding,) = diagnose(str(tmp_path))
    assert (
        finding.signature.name == "record-damaged"
        and finding.evidence.place.endswith(place)
        and says in finding.evidence.text
    )
    assert doctor(str(tmp_path), False, False) == 0, "a run can go on all the same"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"data_s": None},
        {"data_s": "x"},
        {"data_s": float("nan")},
        {"seconds": []},
        {"t": 1e999},
    ],
)
def test_events_of_another_version_are_no_traceback(
    values: dict[str, object], tmp_path: Path
) -> None:
    lines = [
        json.dumps(
            {"t": 9.0, "kind": "step", "step": number, "data_s": 9.0, "seconds": 9.0} | values
        )
        for number in range(30)
    ]
    damaged = any(each in ("x", [], 1e999) for each in values.values())
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert names(diagnose(str(tmp_path))) == (
        ["slow-loader"] if not values else ["record-damaged"] if damaged else []
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "hang",
            '{"t": 1.0, "kind": "hang", "attempt": 0, "step": 20, "rank": 1, "ranks": [1], "phase": "data"}',
        ),
        (
            "hang",
            "error: rank 1 failed after step 20: hangs in data at step 21, for 5 s (limit 5 s): it has not come to the all_reduce",
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
    assert finding.signature.name == name and finding.signature.warn == (
        name in ("loss-spike", "straggler")
    )


def test_times_of_many_programs() -> None:
    assert moment('{"t": 12.5, "kind": "fault"}') == 12.5
    comma, point = moment("[2024-11-23 01:34:45,120] [INFO]"), moment("2024-11-23T01:34:45.120 x")
    assert comma == point and comma is not None
    first, second = (
        moment("[rank1]:[E626 06:24:44.903881913 P.cpp:616]"),
        moment("W0626 06:24:45.286000 84933 api.py:719]"),
    )
    assert first is not None and second is not None and 0 < second - first < 1
    zones = [
        moment(f"2026-11-26{at} x")
        for at in (
            "T20:10:11.5Z",
            "T20:10:11.500000001+00:00",
            " 15:10:11,5-05:00",
            " 22:10:11.5+0200",
        )
    ]
    assert zones == [datetime(2026, 11, 26, 20, 10, 11, 500000, UTC).timestamp()] * 4
    assert moment("step 3") is None and moment("[E1399 06:24:44.9 x]") is None


def test_colours_torn_bytes_and_long_lines_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    text = (
        b"\xff\x00\x1b[31mRuntimeError: CUDA out of memory\x1b[0m hf_abcdefghijk "
        + b"x" * 5000
        + b"\nno end: Disk quota exceeded"
    )
    one, two = order_findings(search(io.BytesIO(text), "x"))
    assert names([one, two]) == ["cuda-oom", "quota"] and two.evidence.line == 2
    assert len(one.evidence.text) <= 301 and "hf_abcdefghijk" not in one.evidence.text


def test_a_sample_that_speaks_of_a_fault_is_none() -> None:
    assert found('Q: why do I get "CUDA out of memory"? A: a smaller batch helps.\n') == []
    retried = "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))' thrown while requesting GET https://hub/x\n"
    assert found(retried) == []
    before = "Retrying (Retry(total=2)) after connection broken by 'ProtocolError(104, 'Connection reset by peer')': /api/models/x\n"
    warned = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).\n"
    assert found(warned) == []
    assert found(before) == [] and names(found(before + PEER)) == ["peer-closed"]


def test_a_line_across_two_pieces_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.doctor.diagnose.PIECE", 64)
    text = (
        "fine\n" * 30
        + "a line that is longer than a piece: "
        + "y" * 80
        + " CUDA out of memory\n"
        + "fine\n" * 30
        + FULL_DISK
    )
    assert [(each.signature.name, each.evidence.line) for each in found(text)] == [
        ("cuda-oom", 31),
        ("disk-full", 62),
    ]


@pytest.mark.slow
def test_a_log_full_of_matches_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of one error are counted, not kept: neither their text nor a record of each line."""
    monkeypatch.setattr("drumline.doctor.diagnose.PIECE", 2**14)
    # 3.9 MB, two matches in most pieces.
    log = io.BytesIO((FULL_DISK + "fine\n" * 500).encode() * 1500)
    tracemalloc.start()
    [one] = order_findings(search(log, "x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one.lines == 1500 and one.evidence.line == 1
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
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
    )
    assert names(diagnose(str(single))) == ["slurm-time"]
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"all is well\nCUDA out of memory\n"))
    )
    assert doctor("-", False, True) == 1
    (printed,) = json.loads(capsys.readouterr().out)["findings"]
    assert (
        printed["name"] == "cuda-oom"
        and printed["place"] == "<stdin>:2"
        and printed["fix"]
        and printed["consequence_of"] == []
    )


def test_a_rank_that_wrote_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, rank_0="fine\n", rank_2="fine\n")
    assert ranks_without_log(run) == []
    (run / "plan.json").write_text(
        json.dumps({"mesh": {"pp": 1, "replicate": 3, "shard": 1, "cp": 1, "tp": 1}})
    )
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


def test_the_report_of_a_failed_run_ends_with_the_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n")
    end = RankEnd(
        1, 1, {"message": "RuntimeError: DataLoader worker", "time": 1.0, "exit_code": 1}, log
    )
    said = report(end, [end]).splitlines()
    assert (
        said[-1].startswith("fix: num_workers=0")
        and said[-2] == "likely cause: a loader worker died"
    )
    log.write_text("ValueError: odd\n")
    assert "fix:" not in report(end, [end])


# ----------------------------------------------------------------------------------------------------------------- before a run


def verdicts(found: Host) -> dict[str, str]:
    return {check.name: check.verdict for check in found.checks}


def test_this_host(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    seen = examine(
        Question(
            run_dir=str(tmp_path / "new/run"),
            cache_dir=str(tmp_path),
            data=(str(tmp_path / "x.jsonl"),),
        )
    )
    assert seen.name == socket.gethostname() and {"drumline", "torch", "data"} <= seen.facts.keys()
    wanted = {
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
    }
    assert wanted | {"cache", "host memory", "data"} <= verdicts(
        seen
    ).keys() and "model" not in verdicts(seen)
    assert not (tmp_path / "new").exists() and [path.name for path in tmp_path.iterdir()] == [
        "x.jsonl"
    ]
    assert all(check.found and (check.fix or check.verdict == "ok") for check in seen.checks)
    assert Host.of(json.loads(json.dumps(seen.values()))) == seen


def test_what_a_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        seen = examine(
            Question(
                "/proc/x",
                str(tmp_path),
                str(tmp_path / "model"),
                (),
                port,
                ("no.such.host.invalid",),
                "nosuch0",
            )
        )
    assert {
        name: verdict for name, verdict in verdicts(seen).items() if verdict == "fail"
    }.keys() >= {*("run folder", "model", "port", "peer name", "interfaces")}
    assert all(check.fix for check in seen.checks if check.verdict != "ok")
    monkeypatch.setattr(host, "LOOKS", (host.limits, lambda *_: 1 / 0))
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    limits = verdicts(examine(Question()))
    assert limits["open files"] == "warn" and len(limits) == 3, "a check that raises is a finding"


def test_infiniband_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        port = tmp_path / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(host, "INFINIBAND", tmp_path)
    (check,) = host.infiniband(Question(), CPU, {})
    assert (
        check.verdict == "warn"
        and check.fix.startswith("mlx5_0:2")
        and "ACTIVE 400 Gb/sec" in check.found
    )


def test_gpus_as_the_driver_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([Device("NVIDIA H100 80GB HBM3", 79 * 2**30)], 8, 2**36, "cuda", True)
    monkeypatch.setattr(
        host,
        "output_of",
        lambda command, seconds: {"ecc": "2\n", "dri": "550.54\n"}[
            command[1].partition("=")[2][:3]
        ],
    )
    found = {check.name: check for check in host.gpus(Question(), machine, {})}
    assert (
        found["GPUs"].found == "1 × NVIDIA H100 80GB HBM3 79 GiB"
        and found["ECC errors"].verdict == "fail"
    )


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
    one, other = (
        Host("a", (), {"torch": "2.13", "model": "1f"}),
        Host("b", (), {"torch": "2.11", "model": "1f"}),
    )
    (check,) = differences([one, other])
    assert check == Check(
        "torch", "differs: 2.13 on a, 2.11 on b", "fail", "the same torch on all hosts"
    )
    (same,) = differences([one, one])
    assert same.verdict == "ok" and same.found.endswith("on 2 hosts")
    assert differences([one]) == differences([]) == ()


def test_pairs_are_measured_in_rounds() -> None:
    assert rounds(["a", "a", "a"]) == [[(0, 1)], [(0, 2)], [(1, 2)]]
    of_four = rounds(["a", "b", "c", "d"])
    assert len(of_four) == 3 and sorted(pair for pairs in of_four for pair in pairs) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
    ]
    mixed = [pair for pairs in rounds(["a", "a", "b", "b"]) for pair in pairs]
    assert sorted(mixed) == [(0, 1), (0, 2), (2, 3)], "within hosts, and between their first ranks"


RESULT = {"latency": 1e-4, "bandwidth": 1e9, "clocks": 0.002, "pairs": [[0, 1, 1e9]]}


def test_what_ranks_report_is_judged() -> None:
    good = [(0, json.dumps(RESULT), ""), (0, "", "")]
    reduce, near = judge_all_reduce(good, ["a", "a"], CPU, "100Gb")
    assert reduce.verdict == near.verdict == "ok" and "loopback" in near.found
    _, clocks, far = judge_all_reduce(
        [(0, json.dumps({**RESULT, "clocks": 9.0}), ""), good[1]], ["a", "b"], CPU, "100Gb"
    )
    assert clocks.verdict == far.verdict == "warn" and far.name == "a ↔ b" and "100Gb" in far.found
    (failed,) = judge_all_reduce(
        [(1, "", "RuntimeError: Unable to find address for: eth7\n"), (1, "", PEER)],
        ["a", "a"],
        CPU,
        "100Gb",
    )
    assert failed.verdict == "fail" and "GLOO_SOCKET_IFNAME" in failed.fix
    (hung,) = judge_all_reduce([(None, "", ""), (None, "", "")], ["a", "a"], CPU, "100Gb")
    assert "rank 0, 1 did not end" in hung.found
    assert (
        expected(
            Machine([Device("NVIDIA H100 80GB HBM3", 79 * 2**30)], 8, 2**36, "cuda", True),
            True,
            "100Gb",
        ).name
        == "nvlink4"
    )


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
    assert question.model == str(model) and question.port == 29512 and inter == "25Gb"
    assert [Path(path).name for path in question.data] == [
        "train.jsonl",
        "eval.jsonl",
    ] and question.run_dir == str(tmp_path / "run")

    def no_ranks(names: list[str], machine: Machine, *given: Any) -> tuple[Check, ...]:
        return (Check("all-reduce", f"{len(names)} ranks"),)

    monkeypatch.setattr(command, "all_reduce", no_ranks)
    assert doctor(str(config), False, True) == 0
    printed = json.loads(capsys.readouterr().out)["hosts"]
    assert {"model", "data", "all-reduce"} <= {
        check["name"] for each in printed for check in each["checks"]
    }
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
