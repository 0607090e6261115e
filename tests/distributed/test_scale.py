"""Benches and servers for real: cases that run and do not; a client of a server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from itertools import chain
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port
from tests.harness import (
    drumline,
    read_json,
    run_drumline,
    start_interpreter,
    survivors,
    write_config,
)
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow]


def test_a_bench_measures_what_runs_and_says_why_the_rest_does_not(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    out = tmp_path / "out"
    given = {
        "--nproc": "1,2",
        "--strategies": "ddp,fsdp2 tp=2",
        "--steps": 4,
        "--rounds": 2,
        "--predict": "2x8xh100-80g,9xnone",
        "--to": out,
    }
    run_drumline("bench", config, *chain(*given.items()), timeout=400)
    made = read_json(out / "bench.json")
    ran = {}
    for row in made["rows"]:
        case = row["case"]
        ran[case["strategy"], case["nproc"]] = len(row["rounds"])
    assert ran == {("ddp", 1): 2, ("ddp", 2): 2, ("fsdp2 tp=2", 1): 0, ("fsdp2 tp=2", 2): 2}
    _, measured, refused, *_ = made["rows"]
    assert refused["reason"]
    assert measured["rounds"][0]["communication"] is not None
    first, second, *_ = made["predicted"]
    assert 1 <= first["devices"] <= 16
    assert second["reason"]
    assert not list(out.glob("*/checkpoints/step-*")), "nothing is saved"


def test_a_client_talks_to_a_served_run_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the extra serve is not installed")
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), eval={"at_start": False})
    run_drumline("train", config)
    export = tmp_path / "run" / "export"
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    env = {"HF_HOME": str(tmp_path / "home")}
    server = start_interpreter("serve", tmp_path / "run", "--port", port, env=env)
    try:
        client = openai.OpenAI(base_url=url, api_key="none", timeout=60)
        messages = [{"role": "user", "content": "one two?"}]
        until = time.monotonic() + 120
        answer = None
        while answer is None and time.monotonic() < until and server.poll() is None:
            with contextlib.suppress(openai.APIConnectionError):
                answer = client.chat.completions.create(
                    model=str(export), messages=messages, max_tokens=4
                )
            time.sleep(0.5)
        assert answer is not None
        assert answer.choices[0].message.content is not None
        # The server lists a hub's cache, and there is none here.
        assert list(client.models.list()) == []
        held = drumline("serve", tmp_path / "run", "--port", port)
        assert held.code == 2
        assert f"port {port} is held by" in held.err
        assert len(held.error_lines) == 1
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 0
        out, _ = server.communicate()
        assert url in out
        assert not survivors(str(export))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
