"""`drumline bench`: what is counted of a run, and the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from drumline.bench.pages import claim, markdown
from drumline.bench.scaling import (
    WARM_UP_STEPS,
    BenchCase,
    Options,
    Prediction,
    Round,
    Row,
    Spread,
    _show,
    _smallest_of_strategy,
    _summarise,
    bench,
)
from drumline.config.load import Request
from drumline.errors import UserError
from drumline.system.signals import EXIT_TEMPFAIL
from drumline.telemetry.events import EventLog, Measured, Step
from tests.harness import read_json, write_config
from tests.tiny import tiny_model_dir


def step(number: int, **values: Any) -> Step:
    return Step(**{**dict.fromkeys(Step.names(), 1.0), "step": number, **values})


def rows() -> list[Row]:
    one = Row(
        BenchCase("ddp", 1),
        [Round(10, 100, 1.0, None, 2**20), Round(8, 80, 1.2, None, 2**20)],
        "ddp",
        Spread(9.0, 4.5, 18.0),
    )
    two = Row(
        BenchCase("ddp", 2),
        [Round(18, 180, 0.5, 0.25, 2**21), Round(16, 160, 0.6, 0.35, 2**21)],
        "ddp",
    )
    refused = Row(BenchCase("<b>tp", 2), reason="<script>alert(1)</script> | refused")
    return [one, two, refused, zero2_row(1, 10, 100), zero2_row(2, 7.56, 101)]


def zero2_row(ranks: int, *rates: float) -> Row:
    rounds = [Round(rate, 100, 1.0, 0.2, 10**6) for rate in rates]
    return Row(BenchCase("zero2", ranks), rounds, "zero2")


def test_a_case_has_a_folder_of_its_own() -> None:
    assert BenchCase("fsdp2 tp=2", 4, 2).name == "fsdp2-tp2-2x4"
    assert BenchCase("", 1).name == "config-1"

    names = set()
    for kind in ("/tmp/x/mine.py:Name", "../mine.py:Name", "..", "ü", "é"):
        name = BenchCase(kind, 2).name
        names.add(name)
        assert "/" not in name
        assert name.strip(".")
        assert name.isascii()

    assert len(names) == 5


def test_the_first_steps_do_not_count() -> None:
    events: list[Any] = []

    def add_step(**values: Any) -> None:
        events.append(step(len(events) + 1, **values))

    for _ in range(WARM_UP_STEPS):
        add_step(samples_per_s=1.0, seconds=9.0, comm_s=9.0)

    assert _summarise(events) is None

    for rate, communication in ((10.0, 0.2), (12.0, 0.1), (50.0, 0.0)):
        add_step(samples_per_s=rate, tokens_per_s=rate * 10, comm_s=communication)

    memory: dict[str, Any] = dict.fromkeys(Measured.names(), ())
    memory["metrics"] = {"memory": {"peak": 5, "reserved": 7}}
    seen = _summarise([*events, Measured(**memory)])
    assert seen == Round(12.0, 120.0, 1.0, pytest.approx(0.1), 7)

    add_step(samples_per_s=12.0, comm_s=None)
    assert _summarise(events).communication is None, "not measured is not nothing"


SHOWN = [
    "1.9 (1.8–2)",
    "95%",
    "30%",
    "4.5–18",
    "Predicted, not measured",
    "100 (80–130)",
    "Load before each round: 0.5, 1.5",
]


def test_speed_up_is_of_the_same_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = rows()
    assert _smallest_of_strategy(made, made[1]) is made[0]
    assert made[1].speed_up(made[0]) == (1.9, 1.8, 2.0)

    host = "2x8xh100-80g"
    wide = Spread(8555, 5484, 8555)
    predictions = [
        Prediction(host, 16, "fsdp2", Spread(100.0, 80.0, 130.0), 4096.0, 2**30),
        Prediction("9xnothing", reason="no such"),
        Prediction(host, 16, "fsdp2 2 × tp 8", wide, 1_792_550, 2**29),
    ]
    options = Options((1, 2))
    console = Console(width=80)
    _show(Path("mine.yaml"), made, predictions, options, tmp_path, [0.5, 1.5], console)
    out = capsys.readouterr().out
    for line in out.splitlines():
        assert len(line) <= 80 or str(tmp_path) in line, out

    # In one piece.
    assert "(0.756–1.01)" in out
    assert "(5,484–8,555)" in out
    assert "bench.md, bench.html, bench.png, bench.json" in out

    page = (tmp_path / "bench.html").read_text()
    text = (tmp_path / "bench.md").read_text()
    for shown in SHOWN:
        assert shown in text, shown
        assert shown in page, shown

    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page

    (first, _) = read_json(tmp_path / "bench.json")["rows"][1]["rounds"]
    assert first["samples_per_s"] == 18
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_under_weak_scaling_the_batch_grows_and_after_a_signal_nothing_more_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    ran: list[tuple[int, int]] = []

    def launch(request: Request, display: bool, change: Any) -> tuple[Path, int]:
        values = request.loaded.config
        ranks = int(values.launch.model_dump()["nproc"])
        samples = values.batch.global_samples
        assert samples is not None
        assert not display

        ran.append((ranks, samples))
        folder = Path(values.run.dir)
        log = EventLog(folder / "events.jsonl")
        for number in range(1, WARM_UP_STEPS + 3):
            log.emit(step(number, samples_per_s=10.0 * ranks))

        if len(ran) == 3:
            return folder, EXIT_TEMPFAIL
        return folder, 0

    monkeypatch.setattr("drumline.train.command.launch_ranks", launch)
    out = tmp_path / "out"
    options = Options((1, 2), rounds=2, weak=True, predict=("2x8xh100-80g",), to=out)

    assert bench(config, [], options) == EXIT_TEMPFAIL
    assert ran == [(1, 4), (2, 8), (1, 4)]

    made = read_json(out / "bench.json")
    assert [len(row["rounds"]) for row in made["rows"]] == [1, 1]
    assert made["predicted"] == []
    assert made["options"]["weak"]

    page = (out / "bench.md").read_text()
    assert "weak scaling, the batch grows with n" in page
    assert "| 2 | 20 | 1 | 2 | 100% |" in page
    assert "over rounds (1)" in page


def test_cells_stay_cells() -> None:
    assert markdown([["a", "b"], ["x|y", "two\nlines"]]).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| x\\|y | two lines |",
    ]


class Mistake(NamedTuple):
    overrides: list[str]
    options: Options
    message: str


MISTAKES = {
    "nodes of this host": Mistake(
        [], Options((1,), nodes=(2,)), r"launch\.kind local starts ranks on this host alone"
    ),
    "too many nodes": Mistake(
        ['launch={kind: ssh, hosts: [a, "b:8"]}'],
        Options((1,), nodes=(1, 3)),
        r"3 given, launch\.hosts has 2",
    ),
    "a key": Mistake(["run.stepz=1"], Options((1,)), "unknown key 'stepz'"),
    "no strategy": Mistake([], Options((1,), ("ddp tp",)), "is no strategy"),
    "a strategy with a typing error": Mistake(
        [], Options((1,), ("fdsp2",)), "did you mean 'fsdp2'"
    ),
}


def test_what_is_wrong_is_a_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "model")
    for overrides, options, message in MISTAKES.values():
        with pytest.raises(UserError, match=message):
            bench(config, overrides, options)

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x").write_text("mine")
    with pytest.raises(UserError, match="not a bench"):
        claim(mine, "bench.json", "bench")
