"""What vLLM calls in each of its processes as it starts."""

from __future__ import annotations

NAME = "drumline"


def register() -> None:
    """Add the engine `drumline` to those that `--weight-transfer-config` may name.

    vLLM may call it several times in a process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "drumline_vllm.engine", "DrumlineWeightTransferEngine"
        )
