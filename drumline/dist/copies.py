"""Copies between the host and a GPU, for which the host does not wait."""

from __future__ import annotations

import torch


def copy_to_device(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device. The host does not wait for a copy to a GPU."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncHostCopy:
    """A copy of a tensor from a GPU to the host, which the host reads later.

    A tensor on another device is not copied: `read` returns the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start to copy `tensor`. Work that the GPU is given afterwards does not delay the copy."""
        self.on_host = tensor
        self.arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.on_host.copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> torch.Tensor:
        """Wait until the copy is on the host, and return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host
