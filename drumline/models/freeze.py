"""Frozen parts of a model (`model.freeze`, the base of an adapter, auxiliary models), and their dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from drumline.core.registry import nearest
from drumline.errors import ModelError

WHERE = "model.freeze"


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters with one of `names`, or below a module with one: no gradients, no moments, no place in checkpoints. Batch norms
    there normalise by the statistics that they have, and take no others. Raises ModelError for a name that the model does not have, and if
    nothing stays trainable."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        below = [
            parameter
            for each, parameter in parameters.items()
            if each == name or each.startswith(f"{name}.")
        ]
        if not below:
            known = [module for module, _ in model.named_modules() if module]
            guess = nearest(name, known)
            fix = (
                f"did you mean {guess}?"
                if guess
                else f"there are {', '.join(module for module in known if module.count('.') <= 1)}"
            )
            raise ModelError(
                f"{type(model).__name__} has nothing called {name!r}", where=WHERE, fix=fix
            )
        for parameter in below:
            parameter.requires_grad_(False)
        for each, module in model.named_modules():
            if (
                f"{each}.".startswith(f"{name}.")
                and getattr(module, "running_mean", None) is not None
            ):
                # Of the module and no class: what makes a norm one of several ranks' samples gives it another class.
                module.eval().train = partial(_stay, module)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError("nothing stays trainable", where=WHERE, fix="leave a part out")


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """`module.train` of one that stays in eval mode."""
    return module


def learning(model: nn.Module) -> list[str]:
    """Names of the parameters that learn."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def keep_low(
    parts: Iterable[nn.Module], dtype: torch.dtype, vectors: bool = False, trainable: bool = False
) -> None:
    """Keep the frozen weights (with `trainable` all) of these modules in `dtype`, the dtype of their products anyhow: half the memory of
    fp32. Vectors (norms, biases: one entry in thousands) stay fp32 unless `vectors`: on a CPU the kernels of norms require fp32 weights for
    fp32 inputs. Packed weights stay packed. The parameters may be on the meta device; each stays the same object, so ties hold."""
    for parameter in (parameter for part in parts for parameter in part.parameters()):
        if (
            (trainable or not parameter.requires_grad)
            and parameter.is_floating_point()
            and (vectors or parameter.ndim >= 2)
        ):
            parameter.data = parameter.data.to(dtype)


def give_fp32(model: nn.Module) -> None:
    """Make embeddings in a lower dtype return fp32: under autocast the residual stream keeps the dtype in which it begins. With trainable
    rows of tokens, which compute by themselves, these do."""
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding) and module.weight.dtype != torch.float32
        ) or "token_adapter" in module._modules:
            module.register_forward_hook(lambda _module, _inputs, hidden: hidden.float())


def require_none_late(model: nn.Module, learned: set[str]) -> None:
    """Raises ModelError for weights beyond those that `learned` when the model was spread, where only these are brought together."""
    if late := {*learning(model)} - learned:
        what, fix = (
            f"{min(late)} was frozen when the model was spread, and learns now",
            "unfreeze it in build, or use ddp or fsdp2",
        )
        raise ModelError(what, where="strategy", fix=fix)
