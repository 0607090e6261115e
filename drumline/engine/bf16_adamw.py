"""AdamW over weights, gradients and moments in bfloat16, without fp32 copies between steps."""

from __future__ import annotations

from typing import Any

import torch

from drumline.config.config import OptimizerConfig, PrecisionConfig
from drumline.dist.seeds import derive
from drumline.engine.norms import local
from drumline.engine.place_noise import BITS, NoiseByPlace

# bfloat16 is float32 without its lower bits.
BITS_CUT = 16
assert BITS == BITS_CUT
# Which draw of a parameter's noise rounds what.
MEAN = 0
SQUARE = 1
WEIGHT = 2


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW in fp32 on one tensor at a time, whose results are rounded to bfloat16.

    There are three ways to round (`precision.rounding`):

    - `nearest` loses every change below half of a weight's last bit, 0.2% of the weight.
    - `stochastic` rounds up or down at random, with probabilities that make the mean right.
    - `kahan` keeps what rounding took from a weight in another bfloat16, and adds it in the next
      step (Zamirai et al. 2020). Its moments are rounded stochastically: in bfloat16 a factor of
      0.999 would be 1.

    The random numbers follow from the seed, the step, the parameter's name, and the place of an entry
    in the whole parameter. So copies stay equal, and shards, parts and stages round as one process
    does.
    """

    # Slots that have a section of a checkpoint to themselves (see `engine.OPTIONAL_SECTIONS`).
    sections = ("compensation",)

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: OptimizerConfig,
        precision: PrecisionConfig,
        seed: int,
        names: dict[torch.Tensor, str],
    ) -> None:
        """`names`: the canonical name of each parameter in `groups`."""
        super().__init__(
            groups,
            {"lr": options.lr, "betas": options.betas, "eps": options.eps, "weight_decay": 0.0},
        )
        self.rounding = precision.rounding
        self.seed = seed
        self.names = names

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step, a parameter after the other."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        lr: float = group["lr"]
        beta_of_mean, beta_of_square = group["betas"]
        state = self.state[parameter]
        if not state:
            self._make_state(state, parameter)
        state["step"] += 1
        # The count is on the host.
        steps = float(state["step"])
        weight = local(parameter)
        gradient = local(gradient).float()
        # Only what decides the noise is in the key, so a resumed run draws the same one.
        key = derive(self.seed, "rounding", int(steps), self.names[parameter])
        noise = NoiseByPlace.from_tensor(parameter, key)

        stored_mean = local(state["exp_avg"])
        stored_square = local(state["exp_avg_sq"])
        mean = stored_mean.float().lerp_(gradient, 1 - beta_of_mean)
        square = stored_square.float().lerp_(gradient.square(), 1 - beta_of_square)
        self._store(stored_mean, mean, noise, MEAN)
        self._store(stored_square, square, noise, SQUARE)

        # The step itself uses the moments in fp32, as they were before rounding.
        square.div_(1 - beta_of_square**steps)
        denominator = square.sqrt_().add_(group["eps"])
        rate = -lr / (1 - beta_of_mean**steps)
        change = mean.div_(denominator).mul_(rate)
        change.add_(weight, alpha=-lr * group["weight_decay"])
        if self.rounding == "kahan":
            before = weight.float()
            lost = local(state["compensation"])
            change.add_(lost)
            weight.copy_(before + change)
            # What rounding the weight to bfloat16 has taken from the change.
            kept_change = weight.float() - before
            lost.copy_(change - kept_change)
        else:
            self._store(weight, change.add_(weight), noise, WEIGHT)

    def _make_state(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        """Fill the state of a parameter with zeros."""
        slots = ["exp_avg", "exp_avg_sq"]
        if self.rounding == "kahan":
            slots.append("compensation")
        state["step"] = torch.tensor(0.0)
        for slot in slots:
            state[slot] = torch.zeros_like(parameter)

    def _store(
        self, target: torch.Tensor, value: torch.Tensor, noise: NoiseByPlace, turn: int
    ) -> None:
        """Round an fp32 value into `target`, a bfloat16 tensor.

        `noise`, `turn`: what is drawn for stochastic rounding.
        """
        if self.rounding != "nearest":
            value = round_stochastically(value, noise.draw(turn))
        target.copy_(value)


def round_stochastically(value: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return float32 values, rounded up or down at random to values that bfloat16 holds exactly.

    The lower 16 bits of the result are zero. The magnitude is rounded up with probability
    (the lower 16 bits) / 2^16, so the mean of the result is the value.

    `drawn`: a random integer of 16 bits for each value, int32.
    """
    least_kept = 1 << BITS_CUT  # the last bit that stays
    # Adding up to 2^16 - 1 carries into the last bit that stays with just that probability. So it
    # does for negative values: the sign is a bit of its own, and the magnitude grows.
    carried = value.view(torch.int32) + drawn
    rounded = carried.bitwise_and_(-least_kept).view(torch.float32)
    # A GPU's NaN has all bits of a magnitude set. One more carries into the sign and leaves 0, so a
    # lost weight would look like a number.
    return rounded.masked_fill_(value.isnan(), torch.nan)
