"""Hand weights to servers through a folder that rank 0 and all servers can read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drumline.errors import DrumlineError, EnvironmentFault
from drumline.rl.generate import WHERE, Weights, rank_and_world_size
from drumline.rl.hand_over import AdapterFiles, HandOver
from drumline.rl.servers import ServedGenerator, Server

# The most bytes of a file of weights. Rank 0 holds the weights of one file in host memory.
SHARD_BYTES = 2 * 2**30
# The names that PEFT gives an adapter's files.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
METADATA = {"format": "pt"}


class WeightFolder(HandOver[Path]):
    """Hands weights to servers as safetensors files, which rank 0 writes.

    The files have all weights of the model, or those of its adapter as PEFT writes them.
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
        super().__init__(generator)
        self.folder = folder
        self.dtype = dtype
        self.adapter = adapter

    def _keep(self, weights: Weights) -> tuple[Path, DrumlineError | None]:
        """Write the weights into a folder, see HandOver."""
        folder = self._free_folder()
        failure: DrumlineError | None = None
        if rank_and_world_size()[0] == 0:
            failure = self._write(weights, folder)
        else:
            # Each step of the iterator is collective, and rank 0 alone needs the tensors.
            for _ in weights:
                continue
        return folder, failure

    def _release(self, weights: Path) -> None:
        """Remove a folder, see HandOver."""
        shutil.rmtree(weights, ignore_errors=True)

    def _give(self, server: Server, weights: Path) -> None:
        """Have a server read a folder, see HandOver."""
        self.generator.load_weights(server, weights, self.version)

    def _free_folder(self) -> Path:
        """Return a folder that servers neither read nor will read, and that is not about to be removed.

        Weights that are handed over at once use two folders alternately.
        """
        number = 0
        while self.folder / f"{number}" in (self.replaced, self.present, *self.held):
            number += 1
        return self.folder / f"{number}"

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
        save_file(files.name_weights(weights), folder / ADAPTER_FILE, metadata=METADATA)
        files.save_config(str(folder))


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
