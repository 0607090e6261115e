"""`drumline bench`: what is counted of a run, and the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from drumline.system.signals import NOTHING_LOST
from drumline.telemetry.events import EventLog, Measured, Step
from tests.harness import write_config
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
    three = Row(
        BenchCase("zero2", 1), [Round(rate, 100, 1.0, 0.2, 10**6) for rate in (10, 100)], "zero2"
    )
    four = Row(
        BenchCase("zero2", 2), [Round(rate, 100, 1.0, 0.2, 10**6) for rate in (7.56, 101)], "zero2"
    )
    return [
        one,
        two,
        Row(BenchCase("<b>tp", 2), reason="<script>alert(1)</script> | refused"),
        three,
        four,
    ]


def test_a_case_has_a_folder_of_its_own() -> None:
    assert (
        BenchCase("fsdp2 tp=2", 4, 2).name == "fsdp2-tp2-2x4"
        and BenchCase("", 1).name == "config-1"
    )
    names = [
        BenchCase(kind, 2).name
        for kind in ("/tmp/x/mine.py:Name", "../mine.py:Name", "..", "ü", "é")
    ]
    assert len({*names}) == 5 and all(
        "/" not in name and name.strip(".") and name.isascii() for name in names
    )


def test_the_first_steps_do_not_count() -> None:
    events: list[Any] = [
        step(number, samples_per_s=1.0, seconds=9.0, comm_s=9.0)
        for number in range(1, WARM_UP_STEPS + 1)
    ]
    assert _summarise(events) is None
    rates = zip((10.0, 12.0, 50.0), (0.2, 0.1, 0.0), strict=True)
    events += [
        step(WARM_UP_STEPS + n, samples_per_s=rate, tokens_per_s=rate * 10, seconds=1.0, comm_s=w)
        for n, (rate, w) in enumerate(rates, 1)
    ]
    memory: dict[str, Any] = dict.fromkeys(Measured.names(), ()) | {
        "metrics": {"memory": {"peak": 5, "reserved": 7}}
    }
    seen = _summarise([*events, Measured(**memory)])
    assert seen == Round(12.0, 120.0, 1.0, pytest.approx(0.1), 7)
    events.append(step(WARM_UP_STEPS + 4, samples_per_s=12.0, comm_s=None))
    assert _summarise(events).communication is None, "not measured is not nothing"


def test_speed_up_is_of_the_same_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = rows()
    assert _smallest_of_strategy(made, made[1]) is made[0] and made[1].speed_up(made[0]) == (
        1.9,
        1.8,
        2.0,
    )
    predictions = [
        Prediction("2x8xh100-80g", 16, "fsdp2", Spread(100.0, 80.0, 130.0), 4096.0, 2**30),
        Prediction("9xnothing", reason="no such"),
    ]
    predictions.append(
        Prediction("2x8xh100-80g", 16, "fsdp2 2 × tp 8", Spread(8555, 5484, 8555), 1_792_550, 2**29)
    )
    _show(
        Path("mine.yaml"),
        made,
        predictions,
        Options((1, 2)),
        tmp_path,
        [0.5, 1.5],
        Console(width=80),
    )
    out, page = capsys.readouterr().out, (tmp_path / "bench.html").read_text()
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line), out
    assert all(
        figure in out
        for figure in (
            "(0.756–1.01)",
            "(5,484–8,555)",
            "bench.md, bench.html, bench.png, bench.json",
        )
    ), "in one piece"
    text = (tmp_path / "bench.md").read_text()
    for shown in (
        "1.9 (1.8–2)",
        "95%",
        "30%",
        "4.5–18",
        "Predicted, not measured",
        "100 (80–130)",
        "Load before each round: 0.5, 1.5",
    ):
        assert shown in text and shown in page, shown
    assert "<script>alert" not in page and "&lt;script&gt;" in page and "http" not in page
    assert (
        json.loads((tmp_path / "bench.json").read_text())["rows"][1]["rounds"][0]["samples_per_s"]
        == 18
    )
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_under_weak_scaling_the_batch_grows_and_after_a_signal_nothing_more_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ran = (
        write_config(tmp_path, tiny_model_dir(tmp_path / "model")),
        list[tuple[int, int]](),
    )

    def launch(request: Request, display: bool, change: Any) -> tuple[Path, int]:
        values, ranks = (
            request.loaded.config,
            int(request.loaded.config.launch.model_dump()["nproc"]),
        )
        assert values.batch.global_samples is not None and not display
        ran.append((ranks, values.batch.global_samples))
        log = EventLog(Path(values.run.dir) / "events.jsonl")
        for number in range(1, WARM_UP_STEPS + 3):
            log.emit(step(number, samples_per_s=10.0 * ranks))
        return Path(values.run.dir), NOTHING_LOST if len(ran) == 3 else 0

    monkeypatch.setattr("drumline.train.command.launch_ranks", launch)
    options = Options((1, 2), rounds=2, weak=True, predict=("2x8xh100-80g",), to=tmp_path / "out")
    assert bench(config, [], options) == NOTHING_LOST and ran == [(1, 4), (2, 8), (1, 4)]
    made, page = (
        json.loads((tmp_path / "out" / "bench.json").read_text()),
        (tmp_path / "out" / "bench.md").read_text(),
    )
    assert (
        [len(row["rounds"]) for row in made["rows"]] == [1, 1]
        and made["predicted"] == []
        and made["options"]["weak"]
    )
    assert (
        "weak scaling, the batch grows with n" in page
        and "| 2 | 20 | 1 | 2 | 100% |" in page
        and "over rounds (1)" in page
    )


def test_cells_stay_cells() -> None:
    assert markdown([["a", "b"], ["x|y", "two\nlines"]]).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| x\\|y | two lines |",
    ]


def test_what_is_wrong_is_a_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "model")
    with pytest.raises(UserError, match=r"launch\.kind local starts ranks on this host alone"):
        bench(config, [], Options((1,), nodes=(2,)))
    with pytest.raises(UserError, match=r"3 given, launch\.hosts has 2"):
        bench(config, ['launch={kind: ssh, hosts: [a, "b:8"]}'], Options((1,), nodes=(1, 3)))
    with pytest.raises(UserError, match="unknown key 'stepz'"):
        bench(config, ["run.stepz=1"], Options((1,)))
    with pytest.raises(UserError, match="is no strategy"):
        bench(config, [], Options((1,), ("ddp tp",)))
    with pytest.raises(UserError, match="did you mean 'fsdp2'"):
        bench(config, [], Options((1,), ("fdsp2",)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    with pytest.raises(UserError, match="not a bench"):
        claim(tmp_path / "mine", "bench.json", "bench")
