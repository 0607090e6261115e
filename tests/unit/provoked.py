"""Faults made on purpose, each by the library that reports it: signature → what it says. For the doctor's tests."""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from drumline.errors import DataError

SOON = timedelta(seconds=0.5)


def own_line() -> str:
    """What a rank prints of an error that the project names in one line."""
    error = DataError("row 177 cannot be read", where="data.train", fix="take the row out")
    return f"error: {error.line()}\n"


def said(function: Callable[[], Any], raises: bool = True) -> str:
    """The last lines of the traceback that `function` ends in."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return "".join(traceback.format_exception_only(error))
    assert not raises, "nothing was raised"
    return ""


def warned(function: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return "\n".join(f"x.py:1: {each.category.__name__}: {each.message}" for each in seen)


def python(code: str, **how: Any) -> str:
    """What a fresh interpreter prints to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, **how
    )
    return done.stderr


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def pair(first: Callable[[Any], Any], other: Callable[[Any], Any], store: Any = None) -> str:
    """What rank 0 of two says; both are threads of this process."""
    store, message, met = store or dist.HashStore(), [""], threading.Barrier(2, timeout=20)

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("x", store), rank, 2, timedelta(seconds=10))
        met.wait()
        if rank == 0:
            message[0] = said(lambda: first(group), raises=False)
        else:
            other(group)
        met.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return message[0]


def gloo_interface() -> str:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    try:
        return said(lambda: alone().__enter__())
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME")
        os.environ.update({"GLOO_SOCKET_IFNAME": before} if before else {})


def stale_keys() -> str:
    """Ranks of a group that has gone have left their addresses in the store."""
    store = dist.HashStore()
    pair(lambda group: None, lambda group: None, store)
    return said(lambda: dist.ProcessGroupGloo(dist.PrefixStore("x", store), 0, 2, SOON))


def no_name() -> str:
    """torch's C++ writes to the file descriptor."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            last = said(
                lambda: dist.TCPStore("no.such.host.invalid", 9, is_master=False, timeout=SOON)
            )
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode() + last


def port_in_use() -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return said(
        lambda: dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)
    )


def store_timeout() -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return said(lambda: store.wait(["x"], SOON))


class Two(nn.Module):
    """Of two layers one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def ddp_unused() -> str:
    with alone():
        model = DistributedDataParallel(Two())

        def steps() -> None:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()

        return said(steps)


def ddp_twice() -> str:
    with alone():
        model, x = Two(), torch.ones(1, 2)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        return said(lambda: (wrapped(x) + model.unused(x)).sum().backward())


def recompute() -> str:
    calls = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x[: len(calls)] ** 2).sum()

    return said(
        lambda: checkpoint(
            changing, torch.ones(4, requires_grad=True), use_reentrant=False
        ).backward()
    )


def inplace() -> str:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    return said(lambda: y.sum().backward())


def nan() -> str:
    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            x = torch.zeros(1, requires_grad=True)
            (torch.sqrt(x) * 0).backward()

    return said(step)


def fp16_unscale() -> str:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = (
        torch.amp.GradScaler("cpu"),
        SimpleNamespace(param_groups=[{"params": [weight]}]),
    )
    scaler.scale((weight * 1).sum()).backward()
    return said(lambda: scaler.unscale_(optimizer))


class Deadly(list[int]):
    """A data set whose first sample kills the worker."""

    def __getitem__(self, index: Any) -> Any:
        os.kill(os.getpid(), 9)


def loader(dataset: Any, workers: int) -> Any:
    return DataLoader(dataset, num_workers=workers, multiprocessing_context="fork")


def of_file(content: bytes, function: Callable[[Path], Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        return said(lambda: function(path))


def torn() -> str:
    whole = io.BytesIO()
    torch.save({"x": torch.ones(1000)}, whole)
    return of_file(whole.getvalue()[:2000], torch.load)


def safetensors_header() -> str:
    from safetensors.torch import load_file

    return of_file(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", load_file
    )


LFS = b"version https://git-lfs.github.com/spec/v1\n"


def hub_access() -> str:
    from huggingface_hub import hf_hub_download

    class Gate(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(401)
            self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as cache:
            where = f"http://127.0.0.1:{server.server_port}"
            return said(
                lambda: hf_hub_download("a/gated", "config.json", endpoint=where, cache_dir=cache)
            )
    finally:
        server.shutdown()
        server.server_close()


def hub_unreachable() -> str:
    from huggingface_hub import hf_hub_download

    with tempfile.TemporaryDirectory() as cache:
        return said(
            lambda: hf_hub_download(
                "a/model", "config.json", local_files_only=True, cache_dir=cache
            )
        )


def remote_code() -> str:
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        values = {
            "model_type": "nosuch",
            "auto_map": {"AutoConfig": "configuration_nosuch.NosuchConfig"},
        }
        Path(folder, "config.json").write_text(json.dumps(values))
        Path(folder, "configuration_nosuch.py").write_text("class NosuchConfig: ...\n")
        return said(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))


def pad_token() -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    return said(lambda: tokenizer(["a", "b"], padding=True))


def local_rank() -> str:
    parser, text = argparse.ArgumentParser(prog="train.py"), io.StringIO()
    with redirect_stderr(text):
        said(lambda: parser.parse_args(["--local-rank=0"]))
    return text.getvalue()


SPAWNS = "import multiprocessing as m\nm.set_start_method('spawn', force=True)\nm.Process(target=print).start()\n"


def spawn_main() -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SPAWNS)
        return subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
        ).stderr


FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\nkept = [open('/dev/null') for _ in range(32)]"
DIES = "import faulthandler, os, signal\nfaulthandler.enable()\nos.kill(os.getpid(), signal.{})"
NOBODY = "import os\nif os.getuid() == 0: os.setuid(65534)\nopen('/etc/shadow')"
WEIGHT = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}

PROVOKED: dict[str, Callable[[], str]] = {
    "open-files": lambda: python(FILES),
    "host-alloc": lambda: said(lambda: torch.empty(2**60)),
    "killed": lambda: (
        subprocess.run(
            ["bash", "-c", "bash -c 'kill -9 $$'; true"],
            capture_output=True,
            text=True,
            check=False,
        ).stderr
    ),
    "no-gpu": lambda: said(lambda: torch.zeros(1, device="cuda")),
    "embedding-index": lambda: said(
        lambda: functional.embedding(torch.tensor([7]), torch.ones(2, 2))
    ),
    "gloo-interface": gloo_interface,
    "gloo-timeout": lambda: pair(
        lambda group: group.allreduce(torch.ones(1), timeout=SOON).wait(), lambda group: None
    ),
    "gloo-connect": stale_keys,
    "barrier-missing": lambda: pair(
        lambda group: group.monitored_barrier(SOON), lambda group: None
    ),
    "port-in-use": port_in_use,
    "rendezvous-name": no_name,
    "store-connect": lambda: said(
        lambda: dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=SOON)
    ),
    "store-timeout": store_timeout,
    "rank-variables": lambda: said(lambda: dist.init_process_group("gloo", init_method="env://")),
    "no-group": lambda: said(lambda: dist.all_reduce(torch.ones(1))),
    "nan": nan,
    "fp16-unscale": fp16_unscale,
    "dtype-mismatch": lambda: said(lambda: nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.float16))),
    "ddp-unused": ddp_unused,
    "ddp-twice": ddp_twice,
    "zero3-gather": lambda: said(
        lambda: nn.Linear(2, 2).load_state_dict({"weight": torch.ones(0), "bias": torch.ones(2)})
    ),
    "load-shapes": lambda: said(lambda: nn.Linear(2, 2).load_state_dict(WEIGHT)),
    "no-gradient": lambda: said(lambda: torch.ones(1).sum().backward()),
    "checkpoint-inputs": lambda: warned(
        lambda: checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=True)
    ),
    "recompute": recompute,
    "inplace": inplace,
    "two-devices": lambda: said(lambda: torch.ones(2) + torch.ones(2, device="meta")),
    "pad-token": pad_token,
    "stack-sizes": lambda: said(lambda: default_collate([torch.ones(2), torch.ones(3)])),
    "missing-package": lambda: said(lambda: __import__("no_such_package")),
    "library-mismatch": lambda: said(lambda: ctypes.CDLL("libcudart.so.9.9")),
    "local-rank": local_rank,
    "crashed": lambda: python(DIES.format("SIGSEGV")),
    "aborted": lambda: python(DIES.format("SIGABRT")),
    "spawn-main": spawn_main,
    "loader-killed": lambda: said(lambda: next(iter(loader(Deadly([1]), 1)))),
    "loader-workers": lambda: warned(lambda: loader([1], 512)),
    "data-broken": lambda: said(lambda: json.loads("{")),
    "disk-full": lambda: python("f = open('/dev/full', 'w')\nf.write('x')\nf.flush()"),
    "permission": lambda: python(NOBODY),
    "safetensors-header": safetensors_header,
    "lfs-pointer": lambda: said(lambda: pickle.loads(LFS)),  # noqa: S301 - it is refused
    "torn-file": torn,
    "weights-only": lambda: of_file(pickle.dumps(Path("x")), torch.load),
    "hub-access": hub_access,
    "hub-unreachable": hub_unreachable,
    "remote-code": remote_code,
    "own-line": own_line,
    "python-error": lambda: said(lambda: int("x")),
}
# What takes half a second and more: time-outs, and what imports transformers or torch's compiler.
FULL = {
    "ddp-unused",
    "ddp-twice",
    "barrier-missing",
    "gloo-connect",
    "gloo-timeout",
    "rendezvous-name",
}
FULL |= {"store-connect", "store-timeout", "pad-token", "remote-code"}
