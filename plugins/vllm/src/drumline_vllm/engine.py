"""The engine of weight transfer that vLLM has for each of its workers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from drumline_vllm.reading import memory_folder, read_tensors, write_files

# The version of what both sides send. The trainer names its own.
PROTOCOL = 1


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer sends before each hand-over."""

    protocol: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the trainer sends to hand over weights."""

    # Where they are: http://ADDRESS:PORT/SECRET
    source: str
    # The longest that the trainer may send nothing.
    seconds: float
    # The name of the folder for the files of an adapter; None: all weights are sent, as tensors.
    adapter: str | None = None


class DrumlineWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reads all weights into the model, or an adapter into a folder in memory.

    All weights are loaded layer by layer, as vLLM loads them from a folder.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    # The folder of the adapter; None: none was read.
    _folder: Path | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check that the trainer sends what this engine reads. Raises ValueError if it does not."""
        if init_info.protocol != PROTOCOL:
            raise ValueError(
                f"drumline-vllm reads protocol {PROTOCOL}, and the trainer sends {init_info.protocol}:"
                " install the version of drumline that trains"
            )

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` begins and ends an update, so that no failure leaves half of one."""

    def finish_weight_update(self) -> None:
        """Do nothing, see `start_weight_update`."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read weights from the trainer.

        Raises ReadingError if they do not arrive whole. The model then has weights of both versions, until
        all are sent again.
        """
        if update_info.adapter is not None:
            self._read_adapter(update_info, update_info.adapter)
            return
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(read_tensors(update_info.source, update_info.seconds))
        finally:
            # Also after a failure: a second update cannot begin where layers wait for weights.
            finalize_layerwise_reload(self.model, self.model_config)

    def _read_adapter(self, update_info: UpdateInfo, name: str) -> None:
        """Read the files of an adapter into a folder of this name, in place of those of the one before."""
        # A name without a folder, whatever the trainer sends.
        self._folder = memory_folder() / Path(name).name
        write_files(update_info.source, update_info.seconds, self._folder)

    def shutdown(self) -> None:
        """Remove the folder of the adapter."""
        if self._folder is not None:
            # Another worker of this host may have removed it.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
