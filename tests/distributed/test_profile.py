"""`run.profile` writes traces and the dearest operators, and changes no number of the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.harness import events, losses, run_drumline, write_config
from tests.tiny import tiny_model_dir


@pytest.mark.claim("a profile changes no number")
def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")
    runs: dict[str, Path] = {}
    for name, profile in {"plain": None, "traced": {"at": 3, "steps": 2, "ranks": [0, 1]}}.items():
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(
            folder,
            model,
            run={"steps": 6, "profile": profile},
            checkpoint={"export": "none"},
            strategy="ddp",
            eval={"at_start": False},
        )
        done = run_drumline("train", config, "--nproc", 2)
        runs[name] = folder / "run"
    plain = runs["plain"]
    traced = runs["traced"]
    assert losses(plain) == losses(traced)
    assert not events(plain, "profile")
    assert not (plain / "profile").exists()
    (found,) = events(traced, "profile")
    assert (found["rank"], found["step"], found["steps"]) == (0, 3, 2)
    assert "GPU" in found["snapshot"]
    operators = found["operators"]
    seconds = [operator["seconds"] for operator in operators]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(operator["share"] for operator in operators) <= 1.001
    for rank in (0, 1):
        packed = (traced / "profile" / f"rank-{rank}.trace.json.gz").read_bytes()
        trace = json.loads(gzip.decompress(packed))
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])
    said = done.out + done.err
    assert "profile of rank 0, steps 3 to 4" in said
    assert operators[0]["name"][:44] in said
