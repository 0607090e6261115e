"""Benches and servers for real: cases that run and do not; a client of a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port
from tests.harness import drumline, start_interpreter, survivors, write_config
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow]


def test_a_bench_measures_what_runs_and_says_why_the_rest_does_not(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"))
    strategies, clusters = "ddp,fsdp2 tp=2", "2x8xh100-80g,9xnone"
    options = (
        "--nproc",
        "1,2",
        "--strategies",
        strategies,
        "--steps",
        4,
        "--rounds",
        2,
        "--predict",
        clusters,
        "--to",
        tmp_path / "out",
    )
    finished = drumline("bench", config, *options, timeout=400)
    assert finished.code == 0, finished.err
    made = json.loads((tmp_path / "out" / "bench.json").read_text())
    ran = {
        (row["case"]["strategy"], row["case"]["nproc"]): len(row["rounds"]) for row in made["rows"]
    }
    assert ran == {("ddp", 1): 2, ("ddp", 2): 2, ("fsdp2 tp=2", 1): 0, ("fsdp2 tp=2", 2): 2}
    assert made["rows"][2]["reason"] and made["rows"][1]["rounds"][0]["communication"] is not None
    assert 1 <= made["predicted"][0]["devices"] <= 16 and made["predicted"][1]["reason"]
    assert not list((tmp_path / "out").glob("*/checkpoints/step-*")), "nothing is saved"


def test_a_client_talks_to_a_served_run_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the extra serve is not installed")
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), eval={"at_start": False})
    assert drumline("train", config).code == 0
    run, port = tmp_path / "run", free_port()
    server = start_interpreter(
        "serve", run, "--port", port, env={"HF_HOME": str(tmp_path / "home")}
    )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
        until, answer = time.monotonic() + 120, None
        while answer is None and time.monotonic() < until and server.poll() is None:
            with contextlib.suppress(openai.APIConnectionError):
                message = {"role": "user", "content": "one two?"}
                answer = client.chat.completions.create(
                    model=str(run / "export"), messages=[message], max_tokens=4
                )
            time.sleep(0.5)
        assert answer is not None and answer.choices[0].message.content is not None
        assert list(client.models.list()) == [], (
            "the server lists a hub's cache, and there is none here"
        )
        held = drumline("serve", run, "--port", port)
        assert (
            held.code == 2 and f"port {port} is held by" in held.err and len(held.error_lines) == 1
        )
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 0
        out, _ = server.communicate()
        assert f"http://127.0.0.1:{port}/v1" in out and not survivors(str(run / "export"))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
