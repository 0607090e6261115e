"""Two optimizers that update one parameter at a time, to save memory on the device.

`OptimizerInBackward` updates each parameter during backward, `OptimizerOnHost` in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from drumline.dist.copies import AsyncHostCopy
from drumline.engine.joined import JoinedOptimizer
from drumline.engine.norms import Squares, add_squares, as_dtensor_on_same_device, local
from drumline.engine.optimizer import take_step

# Returns an optimizer of some parameters by name, with its state made.
Build = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


class OptimizerInBackward(JoinedOptimizer):
    """Updates each parameter during backward, as soon as its gradient is there, and deletes that.

    So backward holds one gradient at a time. With FSDP2 a gradient is there once it is reduced.
    `squares`: sums of the squared gradients of this step, for the norm; `zero_grad` resets them.
    """

    def __init__(self, named: dict[str, nn.Parameter], build: Build) -> None:
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                self.optimizers[parameter] = build({name: parameter})
        super().__init__(*self.optimizers.values())
        self.squares: Squares = {}
        for learned in self.optimizers:
            learned.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
        """Step a parameter, add the squares of its gradient to the norm, and delete the gradient.

        Nothing is clipped, because the norm is known only when backward has ended.
        """
        assert parameter.grad is not None
        add_squares(self.squares, [parameter.grad])
        take_step(self.optimizers[parameter])
        parameter.grad = None

    def step(self) -> None:
        """Do nothing: every parameter was already updated during backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the norm for the next step. The gradients are deleted already."""
        self.squares = {}


class _HostCopy(NamedTuple):
    """The copy of a parameter in host memory, with its gradient there, and its optimizer."""

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer


class _PendingUpdate(NamedTuple):
    """A parameter whose gradient is on its way to the host.

    `arrived`: when the gradient is there; None if it is there already.
    """

    parameter: nn.Parameter
    copy: _HostCopy
    arrived: torch.cuda.Event | None


class OptimizerOnHost(JoinedOptimizer):
    """Keeps moments and a copy of the weights in host memory, and steps there (Ren et al. 2021).

    A step starts the copies of all gradients to the host. It updates each parameter when its
    gradient has arrived, and copies it back while the next one is updated. If `found_inf`, a scalar
    on the device, is 1, no parameter is updated.
    """

    def __init__(self, named: dict[str, nn.Parameter], build: Build) -> None:
        self.host_copies: dict[nn.Parameter, _HostCopy] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                copy = nn.Parameter(_copy_to_host(parameter))
                self.host_copies[parameter] = _HostCopy(copy, build({name: copy}))
                copy.grad = _copy_to_host(parameter)
        super().__init__(*(copy.optimizer for copy in self.host_copies.values()))

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all optimizers by the model's parameter, not by its copy on the host."""
        states: dict[torch.Tensor, Any] = {}
        for parameter, copy in self.host_copies.items():
            states[parameter] = copy.optimizer.state[copy.parameter]
        return states

    @property
    def copies(self) -> list[torch.Tensor]:
        """Weights and gradients on the host."""
        tensors: list[torch.Tensor] = []
        for copy in self.host_copies.values():
            tensors.append(copy.parameter)
            if copy.parameter.grad is not None:
                tensors.append(copy.parameter.grad)
        return tensors

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights to the host again, after a checkpoint was loaded into them."""
        for parameter, copy in self.host_copies.items():
            local(copy.parameter).copy_(local(parameter))

    @torch.no_grad()
    def step(self) -> None:
        """Copy all gradients to the host, update the copies there, and copy the weights back.

        If `found_inf` is 1, nothing is updated.
        """
        skips: AsyncHostCopy | None = None
        if self.found_inf is not None:
            skips = AsyncHostCopy(self.found_inf)
        pending: list[_PendingUpdate] = []
        for parameter, copy in self.host_copies.items():
            if parameter.grad is not None:
                assert copy.parameter.grad is not None
                host_gradient = local(copy.parameter.grad)
                host_gradient.copy_(local(parameter.grad), non_blocking=True)
                arrived: torch.cuda.Event | None = None
                if parameter.is_cuda:
                    arrived = torch.cuda.current_stream().record_event()
                pending.append(_PendingUpdate(parameter, copy, arrived))
        # The host waits for the flag only now: the device is copying gradients meanwhile.
        if skips is not None and skips.read():
            return
        for update in pending:
            if update.arrived is not None:
                update.arrived.synchronize()
            take_step(update.copy.optimizer)
            local(update.parameter).copy_(local(update.copy.parameter), non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients on the device.

        Those on the host are overwritten by the next step.
        """
        for parameter in self.host_copies:
            parameter.grad = None


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, page-locked if the tensor is on a GPU.

    Of a DTensor this rank's part is copied, into a DTensor of the same layout.
    """
    part = local(tensor.detach())
    copy = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    return as_dtensor_on_same_device(copy.copy_(part), tensor)
