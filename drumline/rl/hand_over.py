"""Hand the policy's weights to the servers that sample, through a folder that rank 0 and all servers can read."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drumline.dist.reduce import gather_from_ranks
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.rl.generate import WHERE, Weights, rank_and_world_size
from drumline.rl.servers import HEALTH_SECONDS, ServedGenerator, Server, ServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The most bytes of a file of weights. Rank 0 holds the weights of one file in host memory.
SHARD_BYTES = 2 * 2**30
# The name that PEFT gives an adapter's weights.
ADAPTER_FILE = "adapter_model.safetensors"
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class AdapterFiles:
    """How an adapter is written as PEFT's files."""

    # Writes adapter_config.json into a folder.
    save_config: Callable[[str], Any]
    # Returns the name that the files give a weight.
    name_in_files: Callable[[str], str]


class WeightFolder:
    """Hands weights to servers: rank 0 writes safetensors files, and asks each server to load them.

    The files have all weights of the model, or those of its adapter as PEFT writes them.

    A lost server that answers again first gets the weights, then requests. `restore_weights` finds servers
    that restarted without any request failing, by the version of their weights, and loads the weights
    again.
    """

    def __init__(
        self,
        generator: ServedGenerator,
        folder: Path,
        dtype: torch.dtype,
        adapter: AdapterFiles | None = None,
    ) -> None:
        """Prepare to hand over weights; nothing is written yet.

        Args:
            generator: Samples on the servers.
            folder: The folder that rank 0 and the servers can read.
            dtype: The type of floating-point weights in the files. An adapter is written in fp32.
            adapter: How the adapter is written if the servers get it alone; else None.
        """
        self.generator = generator
        self.adapter = adapter
        self.pool = generator.pool
        self.folder = folder
        self.dtype = dtype
        # Number of hand-overs so far.
        self.hand_overs = 0
        # The folder of the weights that were handed over last; None before the first hand-over.
        self.present_folder: Path | None = None
        # The version of these weights, by which a server is recognised that does not have them.
        self.version = ""
        # Folders of weights that are not handed over yet.
        self.held: list[Path] = []

    def refresh(self, weights: Weights) -> None:
        """Hand over the weights. Collective; it returns once the servers have them, on all ranks.

        Raises on all ranks if the folder cannot be written or no server takes the weights: the error
        itself on rank 0, DrumlineError on the others. In the first hand-over each server must take them.
        """
        hand_over = self.hold(weights)
        hand_over()

    def hold(self, weights: Weights) -> Callable[[], None]:
        """Write the weights, and return the function that hands them over. Both are collective.

        The function may be called later, also after other weights were handed over. It raises what
        `refresh` does.
        """
        folder = self._free_folder()
        self.held.append(folder)
        failure: DrumlineError | None = None
        if rank_and_world_size()[0] == 0:
            failure = self._write(weights, folder)
        else:
            # Each step of the iterator is collective, and rank 0 alone needs the tensors.
            for _ in weights:
                continue
        return partial(self._hand_over, folder, failure)

    def _free_folder(self) -> Path:
        """Return a folder that servers neither read nor will read.

        Weights that are handed over at once use two folders alternately.
        """
        number = 0
        while self.folder / f"{number}" in (self.present_folder, *self.held):
            number += 1
        return self.folder / f"{number}"

    def _hand_over(self, folder: Path, failure: DrumlineError | None) -> None:
        """Have the servers load a folder. `failure`: why it could not be written, on rank 0."""
        self._share_lost_servers()
        previous_folder = self.present_folder
        self.present_folder = folder
        self.version = f"{self.generator.version_prefix}-{self.hand_overs}"
        if rank_and_world_size()[0] == 0 and failure is None:
            failure = self._load_on_servers(self.pool.servers)
            if failure is None and previous_folder is not None:
                # Nothing reads the previous weights any more.
                shutil.rmtree(previous_folder, ignore_errors=True)
        self.held.remove(folder)
        self.hand_overs += 1
        states = [server.state() for server in self.pool.servers]
        self.pool.set_states(_share_from_rank_0(states, failure))

    def restore_weights(self) -> list[str]:
        """Hand the present weights over again to servers that do not have them, and return their urls.

        Such a server was restarted since the last hand-over, or another run has given it weights. What it
        sampled since is not of the policy. A server that does not tell a version is not asked. Collective.

        Raises DrumlineError on all ranks if no server has the weights afterwards.
        """
        servers = self.pool.servers
        failure: DrumlineError | None = None
        outdated: list[int] = []
        if rank_and_world_size()[0] == 0:
            for number, server in enumerate(servers):
                if not self._has_present_weights(server):
                    outdated.append(number)
                    self._note_restart(server)
            failure = self._load_on_servers([servers[number] for number in outdated])
        states = [(number, servers[number].state()) for number in outdated]
        restarted = []
        for number, state in _share_from_rank_0(states, failure):
            self.pool.set_state_after_restart(servers[number], state)
            restarted.append(servers[number].url)
        return restarted

    def _has_present_weights(self, server: Server) -> bool:
        """Return whether a server has the weights that it was handed last, as far as that is known.

        A lost server counts as one that has them, since it gets no requests.
        """
        if server.is_lost or not server.tells_version:
            return True
        try:
            return self.generator.read_version(server) == self.version
        except ServerError:
            # It may have been restarted before it was lost. `_load` finds out what is wrong with it.
            return False

    def _note_restart(self, server: Server) -> None:
        """Log that a server was restarted, and mark it as lost so that `_load` identifies it again."""
        logger.warning(
            "%s: %s has other weights than it was handed, as after a restart: it gets them again",
            WHERE,
            server.url,
        )
        server.mark_lost()

    def _share_lost_servers(self) -> None:
        """Mark each server as lost that any rank has lost: it may have restarted. Collective."""
        servers = self.pool.servers
        for lost_by_rank in gather_from_ranks([server.is_lost for server in servers]):
            for server, is_lost in zip(servers, lost_by_rank, strict=True):
                if is_lost:
                    server.mark_lost()

    def _write(self, weights: Weights, folder: Path) -> DrumlineError | None:
        """Write the weights. Returns why that failed; None if it did not."""
        failure: DrumlineError | None = None
        # The iterator is collective, so rank 0 goes through all weights even if a file cannot be written.
        if self.adapter is None:
            shards = _shards(weights, self.dtype, SHARD_BYTES)
        else:
            # PEFT reads an adapter from a single file, which is small.
            shards = _shards(weights, torch.float32, math.inf)
        for number, shard in enumerate(shards):
            if failure is None:
                failure = self._save(shard, folder, number)
        return failure

    def _load_on_servers(self, servers: list[Server]) -> DrumlineError | None:
        """Have servers load the weights at the same time, and mark those that fail as lost.

        Returns an error that must end the run: no server has the weights, or one refused them. None if
        the run can go on.
        """
        if not servers:
            return None
        with ThreadPoolExecutor(len(servers)) as threads:
            errors = list(threads.map(self._load, servers))
        for server, error in zip(servers, errors, strict=True):
            if error is None:
                continue
            # The server or the config is wrong, which a restart of the server does not change.
            is_set_up_wrongly = self.hand_overs == 0 or error.is_refusal
            if is_set_up_wrongly and not server.is_lost:
                return error
            # For a server that was lost already, only the reason changes.
            if not self.pool.lose(server, error):
                return error
        return None

    def _load(self, server: Server) -> ServerError | None:
        """Have one server load the weights. A lost server loads them if it is back.

        Returns why that failed; None if it did not.
        """
        assert self.present_folder is not None, "weights were handed over before"
        try:
            if server.is_lost:
                self.generator.identify(server, HEALTH_SECONDS)
            self.generator.load_weights(server, self.present_folder, self.version)
            server.tells_version = self.generator.read_version(server) == self.version
        except ServerError as error:
            return error
        server.is_lost = False
        if not server.tells_version and self.hand_overs == 0:
            logger.warning(
                "%s: %s does not tell which weights it has (vLLM 0.32 does),"
                " so a restart between two hand-overs would not be noticed",
                WHERE,
                server.url,
            )
        return None

    def _save(
        self, shard: dict[str, torch.Tensor], folder: Path, number: int
    ) -> EnvironmentFault | None:
        """Write a file of weights. Returns why that failed; None if it did not."""
        try:
            # An earlier run, or an attempt that failed, may have left files there.
            if number == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            if self.adapter is None:
                path = folder / f"model-{number + 1:05d}.safetensors"
                save_file(shard, path, metadata=METADATA)
            else:
                self._save_adapter(self.adapter, shard, folder)
        except (OSError, SafetensorError) as error:
            return EnvironmentFault(
                f"weights cannot be written: {error}",
                where=str(self.folder),
                fix=f"set {WHERE}.folder to a folder with room",
            )
        return None

    def _save_adapter(
        self, files: AdapterFiles, weights: dict[str, torch.Tensor], folder: Path
    ) -> None:
        """Write an adapter as PEFT's files. Raises OSError or SafetensorError."""
        named = {}
        for name, weight in weights.items():
            named[files.name_in_files(name)] = weight
        save_file(named, folder / ADAPTER_FILE, metadata=METADATA)
        files.save_config(str(folder))


def _share_from_rank_0(value: T, failure: DrumlineError | None) -> T:
    """Return rank 0's value on all ranks. Collective.

    `failure`: why rank 0 has failed; None if it has not, and on other ranks. Raises it on rank 0, and
    DrumlineError on the others.
    """
    value_of_rank_0, has_failed = gather_from_ranks((value, failure is not None))[0]
    if failure is not None:
        raise failure
    if has_failed:
        raise DrumlineError(
            "rank 0 could not hand over the weights; its log has the reason", where=WHERE
        )
    return value_of_rank_0


def _shards(
    weights: Weights, dtype: torch.dtype, most_bytes: float
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in host memory, as one dictionary of name → tensor for each file.

    Args:
        weights: The weights; tensors that are not floating-point keep their type.
        dtype: The type of floating-point weights.
        most_bytes: The most bytes of a dictionary. A larger tensor has one of its own.
    """
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        host_dtype = dtype if tensor.is_floating_point() else None
        on_host = tensor.detach().to("cpu", host_dtype, copy=True).contiguous()
        if shard and size + on_host.nbytes > most_bytes:
            yield shard
            shard = {}
            size = 0
        shard[name] = on_host
        size += on_host.nbytes
    yield shard
