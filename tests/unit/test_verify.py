"""`drumline verify` on a real small model: strategies agree, a wrong one is found out, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.bench.verify import difference
from tests.harness import drumline, survivors, write_config
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_strategies_agree_and_a_refusal_is_told(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=4)
    config = write_config(tmp_path, model, rows=40, optimizer={"lr": 1e-3})
    kept = tmp_path / "kept"
    done = drumline(
        "verify", config, "--strategies", "ddp,fsdp2,ddp tp=3", "--steps", 2, "--keep", kept
    )
    assert done.code == 0, done.err
    assert "2 of 3 strategies train what one process trains" in done.out
    assert "ddp tp=3 refused" in done.out and "do not divide" in done.out
    assert difference(kept / "ddp", kept / "reference").largest <= 1e-5
    # The same check must find out a run that is not the same.
    events = kept / "ddp" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["loss"] *= 1.001
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert difference(kept / "ddp", kept / "reference").loss == pytest.approx(1e-3, rel=1e-3)
    again = drumline("verify", config, "--strategies", "ddp", "--tolerance", 0, "--steps", 2)
    assert again.code == 1 and "not what one process trains: ddp (most in" in again.out
    assert not survivors(str(tmp_path))


@pytest.mark.full
def test_what_rounding_does_to_a_training_is_no_difference(tmp_path: Path) -> None:
    """At this rate two cuts of one batch lie more than 1e-5 apart after eight steps on one process."""
    model = tiny_model_dir(tmp_path / "model", layers=4)
    config = write_config(tmp_path, model, rows=40, optimizer={"lr": 5e-2})
    options = ("--strategies", "ddp", "--steps", 8)
    done = drumline("verify", config, *options)
    assert done.code == 0 and "rounding alone moves one process by" in done.out, done.out
    strict = drumline("verify", config, *options, "--tolerance", 1e-5)
    assert strict.code == 1 and "not what one process trains: ddp" in strict.out, strict.out


def test_bad_words_are_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "nothing")
    for strategies, says in (("fsdp2 tp", "is no strategy"), ("ddp", "nothing")):
        done = drumline("verify", config, "--strategies", strategies)
        assert done.code == 2 and len(done.error_lines) == 1 and says in done.error_lines[0]
