"""`drumline serve`: serve a run's export over HTTP with OpenAI's interface.

The server is vLLM if it is installed, else transformers' own.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from drumline.errors import EnvironmentFault, ModelError
from drumline.inference.model import encoder_error
from drumline.launch.environment import listen
from drumline.models.export import find_or_export, plan_of
from drumline.report.bars import bars
from drumline.system.process import Process, start_command, tied_arguments, wait_for_exit
from drumline.system.signals import CtrlC

# Seconds that the server has to end after SIGTERM.
END_SECONDS = 10.0
# A variable that keeps huggingface_hub from searching for newer versions.
NO_ADVICE = "HF_HUB_DISABLE_UPDATE_CHECK"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(run: Path, host: str, port: int, trust: bool) -> int:
    """Serve the export of a run until Ctrl-C. A run without an export is exported first.

    Returns 0 after Ctrl-C, else the server's exit code. Raises EnvironmentFault for a port that is
    held and for a server that is not installed, ModelError for a model that writes no text.

    `run`: the run folder. `trust`: run code that comes with the model.
    """
    plan = plan_of(run, trust)
    if plan.config.head == "seq2seq":
        raise encoder_error(str(run))
    if not plan.config.algorithm.writes:
        what = f"a model of algorithm {plan.config.algorithm.kind} gives numbers, not text"
        raise ModelError(what, where=str(run))
    # A port that is held is found before the export.
    listen(port, host, "--port").close()
    has_vllm = _is_installed("vllm")
    if not has_vllm and not all(map(_is_installed, ("fastapi", "uvicorn", "openai"))):
        fix = "pip install vllm, or: fastapi uvicorn openai accelerate"
        raise EnvironmentFault("no server is installed", where="drumline serve", fix=fix)
    with bars(Console(stderr=True)) as on_progress:
        folder = str(find_or_export(run, False, on_progress, trust).absolute())
    options = ["--host", host, "--port", str(port)]
    if trust:
        options.append("--trust-remote-code")
    if has_vllm:
        server_name = "vLLM"
        module = "vllm.entrypoints.cli.main"
        options += ["--served-model-name", folder]
    else:
        server_name = "transformers"
        module = "transformers.cli.transformers"
        _make_hub_cache()
    print(
        f"{server_name} at http://{host}:{port}/v1; Ctrl-C ends it. The model's name there is\n{folder}",
        flush=True,
    )
    if host not in LOOPBACK:
        print(f"note: whoever reaches {host} may use it", file=sys.stderr)
    command = [sys.executable, *tied_arguments(module, "serve", folder, *options)]
    return _wait_for(start_command(command, server_environment(os.environ)))


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _make_hub_cache() -> None:
    """Make the folder of the hub's cache if it is missing.

    transformers' server lists the models in it, and fails without it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)


def server_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server: ours, with NO_ADVICE.

    `transformers serve` searches for a newer transformers and advises to install it, which may be
    newer than Drumline works with. That is turned off, unless the user has set the variable.
    """
    return {NO_ADVICE: "1", **ours}


def _wait_for(server: Process) -> int:
    """Return the server's exit code once it ends; on Ctrl-C end it and return 0."""
    try:
        with CtrlC():
            return server.wait()
    except KeyboardInterrupt:
        server.terminate()
        if wait_for_exit(server, END_SECONDS) is None:
            # The server is the first process of a session.
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        return 0
