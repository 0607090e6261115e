"""`drumline serve`: a run's export behind an HTTP server with OpenAI's interface: vLLM where it is installed, else transformers' own."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from drumline.core.process import Process, exit_code, start_command, tied
from drumline.core.signals import CtrlC
from drumline.errors import EnvironmentFault, ModelError
from drumline.launchers.environment import listen
from drumline.models.export import exported, plan_of
from drumline.report.bars import bars

END_SECONDS = 10.0
NO_ADVICE = "HF_HUB_DISABLE_UPDATE_CHECK"  # of huggingface_hub, which looks for newer versions
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(run: Path, host: str, port: int, trust: bool) -> int:
    """Export RUN where that is not done, and serve it until Ctrl-C. Returns 0 then, else the server's exit code. Raises EnvironmentFault
    for a port that is held and for a server that is not installed, ModelError for a model that writes no text."""
    plan = plan_of(run, trust)
    if not plan.config.algorithm.writes:
        raise ModelError(
            f"a model of algorithm {plan.config.algorithm.kind} gives numbers, not text",
            where=str(run),
        )
    listen(port, host, "--port").close()
    vllm = importlib.util.find_spec("vllm") is not None
    if not vllm and None in map(importlib.util.find_spec, ("fastapi", "uvicorn", "openai")):
        raise EnvironmentFault(
            "no server is installed",
            where="drumline serve",
            fix="pip install vllm, or: fastapi uvicorn openai accelerate",
        )
    with bars(Console(stderr=True)) as on_progress:
        folder = str(exported(run, False, on_progress, trust).absolute())
    if not vllm:  # which lists the models of that folder, and takes one that is not there for a mistake of its own
        from huggingface_hub.constants import HF_HUB_CACHE

        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    module = "vllm.entrypoints.cli.main" if vllm else "transformers.cli.transformers"
    options = [
        "--host",
        host,
        "--port",
        str(port),
        *["--trust-remote-code"] * trust,
        *["--served-model-name", folder] * vllm,
    ]
    by = "vLLM" if vllm else "transformers"
    print(
        f"{by} at http://{host}:{port}/v1; Ctrl-C ends it. The model's name there is\n{folder}",
        flush=True,
    )
    if host not in LOOPBACK:
        print(f"note: whoever reaches {host} may use it", file=sys.stderr)
    return _until_ctrl_c(
        start_command(
            [sys.executable, *tied(module, "serve", folder, *options)],
            server_environment(os.environ),
        )
    )


def server_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server. `transformers serve` looks for a newer transformers and advises to install it, which may be newer
    than Drumline works with: that is turned off, unless the user has set it."""
    return {NO_ADVICE: "1", **ours}


def _until_ctrl_c(server: Process) -> int:
    try:
        with CtrlC():
            return server.wait()
    except KeyboardInterrupt:
        server.terminate()
        if exit_code(server, END_SECONDS) is None:
            os.killpg(server.pid, signal.SIGKILL)  # it is the first of a session
            server.wait()
        return 0
