"""Optimizers that go parameter by parameter: in backward, as gradients come; or on the host, beside copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.dist.copies import LateCopy
from drumline.parallel.muon import Joined
from drumline.parallel.norms import Squares, add_squares, cut_alike, local
from drumline.parallel.optimizer import take_step

# The optimizer of some parameters, with its state.
Build = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


class InBackward(Joined):
    """Each parameter is updated when its gradient is there (of FSDP2's shards, when it is reduced), which is gone then: backward holds one
    at a time. `squares`: what the gradient norm is made of, until `step`."""

    def __init__(self, named: dict[str, nn.Parameter], build: Build) -> None:
        self.own = {
            parameter: build({name: parameter})
            for name, parameter in named.items()
            if parameter.requires_grad
        }
        super().__init__(*self.own.values())
        self.squares: Squares = {}
        for parameter in self.own:
            parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        add_squares(self.squares, [parameter.grad])
        take_step(self.own[parameter])  # type: ignore[index]
        parameter.grad = None

    def step(self) -> None:
        """Each parameter has taken its own."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.squares = {}


class OnHost(Joined):
    """Moments and a copy of the weights in host memory, where steps are taken (Ren et al. 2021). Gradients are copied there, all in a row;
    each parameter is updated when its own has come, and goes back while the next one is updated.

    The host waits for each gradient, since it computes with them. Where `found_inf`, a scalar of the device, is 1, it takes no step."""

    def __init__(self, named: dict[str, nn.Parameter], build: Build) -> None:
        self.own: dict[nn.Parameter, tuple[nn.Parameter, torch.optim.Optimizer]] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                host = nn.Parameter(_on_host(parameter))
                self.own[parameter] = host, build({name: host})
                host.grad = _on_host(parameter)
        super().__init__(*(optimizer for _, optimizer in self.own.values()))

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {
            parameter: optimizer.state[host] for parameter, (host, optimizer) in self.own.items()
        }

    @property
    def copies(self) -> list[torch.Tensor]:
        """Weights and gradients on the host."""
        return [
            tensor
            for host, _ in self.own.values()
            for tensor in (host, host.grad)
            if tensor is not None
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weights, which a checkpoint has filled."""
        for parameter, (host, _) in self.own.items():
            local(host).copy_(local(parameter))

    @torch.no_grad()
    def step(self) -> None:
        passed_over = None if self.found_inf is None else LateCopy(self.found_inf)
        arrived = []
        for parameter, (host, optimizer) in self.own.items():
            if parameter.grad is not None:
                assert host.grad is not None
                local(host.grad).copy_(local(parameter.grad), non_blocking=True)
                arrived.append(
                    (
                        parameter,
                        host,
                        optimizer,
                        torch.cuda.current_stream().record_event() if parameter.is_cuda else None,
                    )
                )
        # Read once the gradients are on their way: the device has work while the host finds out.
        if passed_over is not None and passed_over.read():
            return
        for parameter, host, optimizer, event in arrived:
            if event is not None:
                event.synchronize()
            take_step(optimizer)
            local(parameter).copy_(local(host), non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.own:
            parameter.grad = None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where there is a GPU; of a DTensor this rank's part, as one cut alike."""
    part = local(tensor.detach())
    return cut_alike(
        torch.empty_like(part, device="cpu", pin_memory=part.is_cuda).copy_(part), tensor
    )
