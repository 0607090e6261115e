"""AdamW over weights, gradients and moments in bfloat16, without fp32 copies between steps."""

from __future__ import annotations

from typing import Any

import torch

from drumline.core.config import OptimizerConfig, PrecisionConfig
from drumline.dist.seeds import derive
from drumline.parallel.norms import local


class LowAdamW(torch.optim.Optimizer):
    """AdamW in fp32 on one tensor at a time, whose results are rounded to bfloat16. `nearest` loses what is less than half of a weight's
    last bit, 0.2%. `stochastic` rounds up as often as that would be right in the mean. `kahan` keeps what was lost of a weight in another
    bfloat16, and adds it in the next step (Zamirai et al. 2020); its moments are rounded stochastically, or 0.999 would be 1.

    The noise is a function of seed and step, the same on all ranks: copies stay equal.
    """

    # Slots that are a section of a checkpoint, which a run may lack: of `engine.OPTIONAL`.
    sections = ("compensation",)

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: OptimizerConfig,
        precision: PrecisionConfig,
        seed: int,
    ) -> None:
        super().__init__(
            groups,
            {"lr": options.lr, "betas": options.betas, "eps": options.eps, "weight_decay": 0.0},
        )
        self.rounding, self.seed = precision.rounding, seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group, number)

    def _step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], number: int
    ) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            kept = (
                "exp_avg",
                "exp_avg_sq",
                *(("compensation",) if self.rounding == "kahan" else ()),
            )
            state.update(
                {"step": torch.tensor(0.0)}, **{slot: torch.zeros_like(parameter) for slot in kept}
            )
        state["step"] += 1
        steps = float(state["step"])
        weight, gradient = local(parameter), local(gradient).float()
        noise = torch.Generator(weight.device).manual_seed(
            derive(self.seed, "rounding", int(steps), number)
        )
        mean = local(state["exp_avg"]).float().lerp_(gradient, 1 - first)
        square = local(state["exp_avg_sq"]).float().lerp_(gradient.square(), 1 - second)
        self._keep(local(state["exp_avg"]), mean, noise)
        self._keep(local(state["exp_avg_sq"]), square, noise)
        denominator = square.div_(1 - second**steps).sqrt_().add_(group["eps"])
        change = (
            mean.div_(denominator)
            .mul_(-group["lr"] / (1 - first**steps))
            .add_(weight, alpha=-group["lr"] * group["weight_decay"])
        )
        if self.rounding == "kahan":
            before, lost = weight.float(), local(state["compensation"])
            change.add_(lost)
            weight.copy_(before + change)
            lost.copy_(change - (weight.float() - before))
        else:
            self._keep(weight, change.add_(weight), noise)

    def _keep(self, kept: torch.Tensor, value: torch.Tensor, noise: torch.Generator) -> None:
        kept.copy_(value if self.rounding == "nearest" else rounded(value, noise))


def rounded(value: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """float32 → the same with the lower 16 bits zero, which bfloat16 holds exactly: up as often as the bits that go are part of one."""
    bits = value.view(torch.int32)
    drawn = torch.randint(
        0, 1 << 16, bits.shape, generator=noise, device=bits.device, dtype=torch.int32
    )
    return (bits + drawn).bitwise_and_(-(1 << 16)).view(torch.float32)
