"""Hand weights to servers over the network: each server reads them by HTTP from rank 0.

The plug-in drumline-vllm (plugins/vllm) reads them where vLLM runs. An answer is a row of entries. Each is a
line of JSON, which names a tensor or a file and the number of its bytes, and then these bytes. The last
line is {"end": true}: without it the answer was broken off. HTTP depends on no version of torch, gloo or NCCL, which
differ between the trainer and its servers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple, Self

import httpx2
import torch
from safetensors.torch import save

from drumline.errors import DrumlineError
from drumline.rl.generate import Weights, rank_and_world_size
from drumline.rl.hand_over import AdapterFiles, HandOver, Loading
from drumline.rl.servers import Server
from drumline.rl.vllm import RemoteVLLM
from drumline.rl.weight_folder import ADAPTER_CONFIG, ADAPTER_FILE, METADATA
from drumline.system.network import addresses, source_address

logger = logging.getLogger(__name__)

# Small entries are sent together, in pieces of this many bytes.
BUFFER_BYTES = 2**20
# The header of a request that names the folder in which a server puts the files that it reads.
FOLDER_HEADER = "Drumline-Folder"
SECRET_BYTES = 16


class Entry(NamedTuple):
    """A part of an answer: a tensor or a file."""

    # What the line of JSON says, besides the number of bytes.
    about: dict[str, Any]
    content: memoryview


class HostWeights(ABC):
    """The weights of one version in rank 0's host memory."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yield what servers read."""


class HostTensors(HostWeights):
    """All weights of a model, as tensors. Servers may read the first ones before the last ones are there."""

    def __init__(self) -> None:
        # The name of a weight → its copy, in the order in which they came.
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._is_complete = False
        self._has_failed = False
        self._changed = Condition()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a weight."""
        with self._changed:
            self.tensors[name] = tensor
            self._names.append(name)
            self._changed.notify_all()

    def end(self, *, has_failed: bool) -> None:
        """Note that no weight will be added. `has_failed`: some are missing, so that nobody may take the others."""
        with self._changed:
            self._is_complete = True
            self._has_failed = has_failed
            self._changed.notify_all()

    def entries(self) -> Iterator[Entry]:
        """Yield all tensors in their order, each as soon as it is there.

        Raises RuntimeError if some will never be there.
        """
        for number in count():
            name = self._wait_for_name(number)
            if name is None:
                return
            tensor = self.tensors[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            yield Entry({"tensor": name, "dtype": dtype, "shape": list(tensor.shape)}, content)

    def _wait_for_name(self, number: int) -> str | None:
        """Return the name of the weight with a number once it is there; None if there are not so many.

        Raises RuntimeError if some will never be there.
        """

        def is_known() -> bool:
            return self._is_complete or number < len(self._names)

        with self._changed:
            self._changed.wait_for(is_known)
            if self._has_failed:
                raise RuntimeError("the weights are not complete")
            if number == len(self._names):
                return None
            return self._names[number]


class HostFiles(HostWeights):
    """An adapter, as PEFT's files."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def entries(self) -> Iterator[Entry]:
        """Yield all files."""
        for name, content in self.contents.items():
            yield Entry({"file": name}, memoryview(content))


class WeightNetwork(HandOver[HostWeights]):
    """Hands weights to vLLM servers over the network.

    Rank 0 keeps the weights in host memory until others are handed over, for servers that restart.
    """

    def __init__(
        self, generator: RemoteVLLM, dtype: torch.dtype, adapter: AdapterFiles | None = None
    ) -> None:
        """Prepare to hand over weights; nothing is kept yet.

        Args:
            generator: Samples on the servers.
            dtype: The type of floating-point weights as they are sent. An adapter is sent in fp32.
            adapter: How the adapter is written if the servers get it alone; else None.
        """
        super().__init__(generator)
        self.vllm = generator
        self.dtype = dtype
        self.adapter = adapter

    def begin(self, weights: Weights) -> Loading:
        """Begin to hand over the weights, see HandOver. Servers read the first ones while others are copied."""
        if self.adapter is not None:
            return super().begin(weights)
        spare: dict[str, torch.Tensor] = {}
        # Nothing is sampled by the present weights any more. Without this the model would be held twice.
        if isinstance(self.present, HostTensors):
            spare = self.present.tensors
            self.present = None
        tensors = HostTensors()
        loading = self._begin(tensors, None)
        try:
            self._fill(tensors, weights, spare)
        except BaseException:
            # Servers that read already must learn that the rest will not come.
            loading.wait()
            raise
        return loading

    def _begin(self, weights: HostWeights, failure: DrumlineError | None) -> Loading:
        """Have the servers begin to read weights, see HandOver."""
        # Nothing is sampled by those before any more, so their memory is free while servers read.
        self.present = None
        return super()._begin(weights, failure)

    def _keep(self, weights: Weights) -> tuple[HostWeights, DrumlineError | None]:
        """Copy the weights to rank 0's host memory, see HandOver."""
        tensors = HostTensors()
        self._fill(tensors, weights, {})
        if self.adapter is None or not tensors.tensors:
            return tensors, None
        return HostFiles(adapter_contents(self.adapter, tensors.tensors)), None

    def _fill(self, tensors: HostTensors, weights: Weights, spare: dict[str, torch.Tensor]) -> None:
        """Copy weights to host memory on rank 0. Collective.

        `spare`: tensors whose memory may be used; they are taken out.
        """
        is_rank_0 = rank_and_world_size()[0] == 0
        is_whole = False
        try:
            # Each step of the iterator is collective, and rank 0 alone needs the tensors.
            for name, tensor in weights:
                if is_rank_0:
                    tensors.add(name, self._copy(tensor, spare.pop(name, None)))
            is_whole = True
        finally:
            tensors.end(has_failed=not is_whole)

    def _copy(self, tensor: torch.Tensor, spare: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of a tensor in host memory: that of `spare`, if it fits."""
        dtype = tensor.dtype
        if self.adapter is not None:
            dtype = torch.float32
        elif tensor.is_floating_point():
            dtype = self.dtype
        if spare is None or spare.shape != tensor.shape or spare.dtype != dtype:
            spare = torch.empty(tensor.shape, dtype=dtype)
        return spare.copy_(tensor.detach())

    def _release(self, weights: HostWeights) -> None:
        """Do nothing: memory is freed when nothing refers to the weights, see HandOver."""

    def _give(self, server: Server, weights: HostWeights) -> None:
        """Have a server read the weights, see HandOver."""
        try:
            offer = WeightOffer(weights, address_for(server), server.timeout_seconds)
        except OSError as error:
            what = f"weights cannot be offered to {server.url}: {error}"
            raise server.fault(what, "set transport: folder") from None
        with offer:
            self.vllm.fetch_weights(server, offer.url, self.version)
            if self.adapter is not None:
                folder = offer.folder
                if folder is None:
                    raise server.fault(f"{server.url} did not read the adapter")
                self.vllm.load_adapter(server, folder, self.version)


def adapter_contents(files: AdapterFiles, weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the name of each of PEFT's files → its content.

    `weights`: of the adapter, under the names of the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        files.save_config(folder)
        config = (Path(folder) / ADAPTER_CONFIG).read_bytes()
    return {
        ADAPTER_CONFIG: config,
        ADAPTER_FILE: save(files.name_weights(weights), METADATA),
    }


def address_for(server: Server) -> str:
    """Return the address of this host that a server can reach: the one that reaches the server.

    Raises OSError if there is none.
    """
    host = httpx2.URL(server.url).host
    for address in addresses(host):
        own_address = source_address(address)
        if own_address is not None:
            return own_address
    raise OSError(f"this host has no route to {host}")


class WeightOffer(ThreadingHTTPServer):
    """A small HTTP server that one server reads weights from, for the time of a hand-over.

    Only who knows `url` can read them, which has a secret part. They are not encrypted.

    Attributes:
        url: Where the weights are.
        folder: Where the server has put the files of an adapter; None: it has not asked yet.
    """

    daemon_threads = True

    def __init__(self, weights: HostWeights, address: str, seconds: float) -> None:
        """Listen on a free port.

        Args:
            weights: What is offered.
            address: The address of this host to listen on.
            seconds: The longest that a reader may not read anything.

        Raises OSError if this host does not have the address.
        """
        host = address
        if ":" in address:
            self.address_family = socket.AF_INET6
            host = f"[{address}]"
        super().__init__((address, 0), OfferHandler)
        self.weights = weights
        self.seconds = seconds
        self.path = f"/{secrets.token_urlsafe(SECRET_BYTES)}"
        self.url = f"http://{host}:{self.server_address[1]}{self.path}"
        self.folder: Path | None = None
        self._connections: set[socket.socket] = set()
        self._thread = Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        # A reader that hung and goes on must not get what this memory holds by then.
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread of its own."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a request that is answered."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note that a reader is gone. Its server's answer to the trainer has the reason."""
        logger.debug("%s reads no more: %s", client_address, sys.exc_info()[1])


class OfferHandler(BaseHTTPRequestHandler):
    """Answers a request for weights."""

    server: WeightOffer
    wbufsize = BUFFER_BYTES

    def setup(self) -> None:
        """Set the longest that a write may wait."""
        super().setup()
        self.connection.settimeout(self.server.seconds)

    def do_GET(self) -> None:
        """Send the weights to who knows their path."""
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            self.send_error(404)
            return
        folder = self.headers.get(FOLDER_HEADER)
        if folder is not None:
            self.server.folder = Path(folder)
        self.send_response(200)
        self.end_headers()
        for about, content in self.server.weights.entries():
            self._write_line({**about, "bytes": content.nbytes})
            self.wfile.write(content)
        self._write_line({"end": True})

    def _write_line(self, line: dict[str, Any]) -> None:
        """Write a line of JSON."""
        self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Write no lines to stderr."""
