"""`run.profile` writes traces and the dearest operators, and changes no number of the run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import drumline, events, losses, write_config
from tests.tiny import tiny_model_dir


@pytest.mark.claim("a profile changes no number")
def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    model, steps = tiny_model_dir(tmp_path / "model"), 6
    runs = dict[str, Path]()
    for name, profile in {"plain": None, "traced": {"at": 3, "steps": 2, "ranks": [0, 1]}}.items():
        folder = tmp_path / name
        folder.mkdir()
        sections: dict[str, Any] = {
            "run": {"steps": steps, "profile": profile},
            "checkpoint": {"export": "none"},
            "strategy": "ddp",
        }
        done = drumline(
            "train", write_config(folder, model, **sections, eval={"at_start": False}), "--nproc", 2
        )
        assert done.code == 0, done.err
        runs[name] = folder / "run"
    assert losses(runs["plain"]) == losses(runs["traced"])
    (found,) = events(runs["traced"], "profile")
    assert (found["rank"], found["step"], found["steps"]) == (0, 3, 2) and "GPU" in found[
        "snapshot"
    ]
    assert not events(runs["plain"], "profile") and not (runs["plain"] / "profile").exists()
    seconds = [each["seconds"] for each in found["operators"]]
    assert (
        seconds == sorted(seconds, reverse=True)
        and sum(each["share"] for each in found["operators"]) <= 1.001
    )
    for rank in (0, 1):
        trace = json.loads(
            gzip.decompress(
                (runs["traced"] / "profile" / f"rank-{rank}.trace.json.gz").read_bytes()
            )
        )
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])
    assert (
        "profile of rank 0, steps 3 to 4" in done.out + done.err
        and found["operators"][0]["name"][:44] in done.out + done.err
    )
