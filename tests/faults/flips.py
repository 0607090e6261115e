"""A callback that does to a rank what a fault of its memory would: a bit of one weight is another
one. Once a run."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch


class Flips:
    """On rank 1, after step 7, in the folder of the variable FLIPS."""

    every_rank = True

    def on_step(self, event: dict[str, Any]) -> None:
        done = Path(os.environ["FLIPS"]) / "flipped"
        if os.environ["RANK"] != "1" or event["step"] != 7 or done.exists():
            return
        done.touch()
        weights = []
        for found in gc.get_objects():
            if isinstance(found, torch.nn.Parameter) and found.requires_grad:
                weights.append(found)
        numbers = weights[-1].detach().view(-1)
        numbers.view(torch.int32)[0] ^= 1
