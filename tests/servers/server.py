"""A real `vllm serve` on the CPU, in an environment of its own (tests/servers/install.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from drumline_vllm.reading import memory_folder
from tests.distributed.ranks import free_port
from tests.harness import ROOT

FOLDER = Path(os.environ.get("DRUMLINE_VLLM", ROOT / ".venv-vllm"))
COMMAND = FOLDER / "bin/vllm"
NEEDS_VLLM = pytest.mark.skipif(
    not COMMAND.exists(), reason=f"{COMMAND} is not there: `make servers` installs it"
)
SECONDS_TO_START = 750
SECONDS_TO_END = 30
# The most tokens of a sequence.
POSITIONS = 512
# The highest rank of an adapter.
MOST_RANK = 16
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Other processes use these cores, too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def lay_out_plug_in(folder: Path) -> list[str]:
    """Return places for Python's path by which vLLM finds the plug-in drumline-vllm as installed.

    `folder`: gets what pip writes of an installed package.
    """
    source = ROOT / "plugins/vllm"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    name = project["name"]
    version = project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)
    lines = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{point} = {place}" for point, place in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(source / "src"), str(folder)]


class RealServer:
    """A process of vLLM that serves the model in a folder, each time under the same url.

    `has_adapters`: it can load LoRA adapters. It then fails on a CPU if it is asked for the log-probs of
    a prompt (vLLM 0.32).
    `has_plug_in`: it can read weights over the network.
    """

    def __init__(
        self, model: Path, log: Path, *, has_adapters: bool = True, has_plug_in: bool = True
    ) -> None:
        self.model = model
        self.log = log
        self.has_adapters = has_adapters
        self.has_plug_in = has_plug_in
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start the server and wait until it answers; return False if it runs already."""
        if self.process is not None and self.process.poll() is None:
            return False
        if not self.url:
            self.url = f"http://127.0.0.1:{free_port()}"
        port = httpx2.URL(self.url).port
        options = {
            "--served-model-name": "base",
            "--dtype": "float32",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(POSITIONS),
        }
        # vLLM 0.32 on a CPU dies if it reads the prompt of a request with a seed in parts.
        arguments = [str(COMMAND), "serve", str(self.model), "--enforce-eager"]
        arguments.append("--no-enable-chunked-prefill")
        if self.has_adapters:
            arguments.append("--enable-lora")
            options["--max-lora-rank"] = str(MOST_RANK)
        if self.has_plug_in:
            options["--weight-transfer-config"] = '{"backend": "drumline"}'
        for name, value in options.items():
            arguments += [name, value]
        variables = {**os.environ, **SETTINGS}
        # It has packages of its own, which it need not compile at each start.
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            variables.pop(name, None)
        if self.has_plug_in:
            places = lay_out_plug_in(self.log.parent / "plug-in")
            variables["PYTHONPATH"] = os.pathsep.join(places)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                arguments, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_healthy()
        return True

    def _wait_until_healthy(self) -> None:
        end = time.monotonic() + SECONDS_TO_START
        while not self.is_healthy():
            assert self.process is not None
            has_ended = self.process.poll() is not None
            if has_ended or time.monotonic() > end:
                self.kill()
                pytest.fail(f"vLLM does not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)

    def is_healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", timeout=5).is_success
        except httpx2.HTTPError:
            return False

    def generated_tokens(self) -> float:
        """Return the number of tokens that the server has sampled since it was started."""
        metrics = httpx2.get(f"{self.url}/metrics", timeout=30).text
        for line in metrics.splitlines():
            if line.startswith("vllm:generation_tokens_total"):
                return float(line.split()[-1])
        pytest.fail(f"no number of tokens in:\n{metrics[:2000]}")

    def restore(self) -> None:
        """Load the weights of the model's own files again, and drop all adapters.

        A head that is tied to the embedding gets it under its own name, because vLLM does not tie it
        again as it reloads.
        """
        weights = load_file(self.model / "model.safetensors")
        if "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        folder = self.log.parent / "weights"
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", arguments)
        self._post("/reset_prefix_cache", {})
        # What a server calls its weights that was just started.
        self._post("/update_weight_version", {"new_version": "default"})
        for name in self.adapters():
            self._post("/v1/unload_lora_adapter", {"lora_name": name})

    def weight_version(self) -> str:
        """Return the version of its weights, as the last hand-over has named it."""
        answer = httpx2.get(f"{self.url}/weight_info", timeout=30).json()
        return str(answer["weight_version"])

    def adapters(self) -> list[str]:
        """Return the names of the adapters that it has."""
        models = httpx2.get(f"{self.url}/v1/models", timeout=30).json()["data"]
        return [model["id"] for model in models if model["id"] != "base"]

    def _post(self, path: str, body: dict[str, object]) -> None:
        answer = httpx2.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.is_success, answer.text

    def hang(self) -> None:
        """Stop all processes of the server, which then takes connections and answers nothing."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let a server go on that hangs."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server as Ctrl-C does, or kill it if it does not end."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_END)
        self.kill()
        # vLLM kills its workers as it ends, which cannot remove an adapter's files.
        port = httpx2.URL(self.url).port
        for folder in memory_folder().glob(f"drumline-adapter-*-{port}"):
            shutil.rmtree(folder)

    def kill(self) -> None:
        """Kill the server and the processes that it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
