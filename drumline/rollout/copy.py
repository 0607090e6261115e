"""A whole model to sample from, beside one that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.errors import ModelError

Weights = Iterator[tuple[str, torch.Tensor]]


class InferenceCopy:
    """A plain Hugging Face model in the compute type, filled anew before each rollout, one parameter after the other.

    It stays allocated between rollouts: to free it would give its memory (a weight in the compute type for each of the model's) to
    the optimizer's step, which has its own already, and cost an allocation a rollout.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        """`build`: makes the model whole on this rank's device; with an adapter, PEFT's layers are in it and it has PEFT's names."""
        self.model = build()
        self.model.requires_grad_(False)
        self.model.eval()
        self.tensors: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)

    @torch.no_grad()
    def refresh(self, weights: Weights) -> None:
        """Take over all weights (`Engine.whole_weights`). Collective where that is. Weights that the model ties may come once.

        Raises ModelError, after the last of them, for a name or shape that is not the copy's, and for a weight that did not come.
        """
        wrong, came = [], set()
        for name, tensor in weights:  # to the end also where one does not fit: the other ranks go on
            mine = self.tensors.get(name)
            if mine is None or mine.shape != tensor.shape:
                wrong.append(f"{name} {tuple(tensor.shape)} against {'nothing' if mine is None else tuple(mine.shape)}")
                continue
            mine.copy_(tensor)
            came.add(mine.data_ptr() if mine.numel() else id(mine))
        wrong += [f"{name} did not come" for name, t in self.tensors.items() if t.numel() and t.data_ptr() not in came]
        if wrong:
            what = f"the weights do not fit the copy that rollouts are sampled from: {wrong[0]} ({len(wrong)} such)"
            raise ModelError(what, where="model")
