"""What vLLM calls in each of its processes as it starts."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Add the engine `drumline` to those that `--weight-transfer-config` may name.

    vLLM may call it several times in a process, and refuses a name that it has.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        "drumline", "drumline_vllm.engine", "DrumlineWeightTransferEngine"
    )
