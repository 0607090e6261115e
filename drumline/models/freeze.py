"""Freezes parts of a model, and casts frozen weights.

Frozen parts are those that `model.freeze` names, the base of an adapter, and auxiliary models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from drumline.config.registry import nearest
from drumline.errors import ModelError
from drumline.models.parts import is_part, names_in_part, unread_names

WHERE = "model.freeze"


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters with one of `names`, or below a module with one.

    A name may also be a part of a vision-language model, see `models.parts`.
    Frozen parameters have no gradients, no moments, and no place in checkpoints. Frozen batch norms
    normalise by the statistics that they have, and do not update them. Modules that a model has but
    does not read (`models.parts.unread_names`) are frozen, too.
    Raises ModelError for a name that the model does not have, and if nothing stays trainable.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in unread_names(model):
        model.get_submodule(name).requires_grad_(False)
    for name in _names_for_parts(model, names):
        frozen = []
        for parameter_name, parameter in parameters.items():
            if _is_at_or_below(parameter_name, name):
                frozen.append(parameter)
        if not frozen:
            raise _unknown_name(model, name)
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module_name, module in model.named_modules():
            has_statistics = getattr(module, "running_mean", None) is not None
            if has_statistics and _is_at_or_below(module_name, name):
                # The method of this module is replaced and not its class: synchronised batch norm
                # gives the module another class.
                module.eval().train = partial(_keep_eval_mode, module)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError("nothing stays trainable", where=WHERE, fix="leave a part out")


def _names_for_parts(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return names with each part of a vision-language model replaced by its parameters."""
    parameter_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    replaced: list[str] = []
    for name in names:
        if is_part(model, name):
            names_of_part = names_in_part(model, name, parameter_names, WHERE)
            if not names_of_part:
                what = f"the part {name!r} of {type(model).__name__} has no parameters"
                raise ModelError(what, where=WHERE, fix="take it out")
            replaced += names_of_part
        else:
            replaced.append(name)
    return replaced


def _is_at_or_below(name: str, outer_name: str) -> bool:
    """Return whether a module or parameter has the name `outer_name`, or lies in that module."""
    return name == outer_name or name.startswith(f"{outer_name}.")


def _unknown_name(model: nn.Module, name: str) -> ModelError:
    """Return the error for a name that no parameter has, nor any module around one."""
    known = [module_name for module_name, _ in model.named_modules() if module_name]
    guess = nearest(name, known)
    if guess:
        fix = f"did you mean {guess}?"
    else:
        outer_names = [module_name for module_name in known if module_name.count(".") <= 1]
        fix = f"there are {', '.join(outer_names)}"
    what = f"{type(model).__name__} has nothing called {name!r}"
    return ModelError(what, where=WHERE, fix=fix)


def _keep_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Return the module unchanged: the `train` method of a module that stays in eval mode."""
    return module


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def cast_weights(
    modules: Iterable[nn.Module],
    dtype: torch.dtype,
    include_vectors: bool = False,
    include_trainable: bool = False,
) -> None:
    """Cast the frozen matrices of some modules to `dtype`, the type of their products.

    16 bits take half the memory of fp32. `include_trainable`: weights that are not frozen are cast,
    too. `include_vectors`: so are norms and biases. These have few entries, so that little memory
    would be saved, and a CPU's kernels of norms require fp32 weights for fp32 inputs. Packed
    weights stay packed. The parameters may be on the meta device, and each stays the same object,
    so ties hold.
    """
    for module in modules:
        for parameter in module.parameters():
            is_chosen = include_trainable or not parameter.requires_grad
            has_chosen_shape = include_vectors or parameter.ndim >= 2
            if is_chosen and has_chosen_shape and parameter.is_floating_point():
                # `data` keeps the parameter the same object, which tied layers share.
                parameter.data = parameter.data.to(dtype)


def return_fp32_embeddings(model: nn.Module) -> None:
    """Make embeddings whose weight is in a lower type return fp32.

    Under autocast the residual stream keeps the type in which it begins. An embedding with
    trainable rows of tokens, which computes in a forward of its own, returns fp32 too.
    """
    # By a hook, so that the weight itself stays low.
    for module in model.modules():
        is_low = isinstance(module, nn.Embedding) and module.weight.dtype != torch.float32
        if is_low or "token_adapter" in module._modules:
            module.register_forward_hook(lambda _module, _inputs, hidden: hidden.float())


def require_none_unfrozen(model: nn.Module, initially_trainable: set[str]) -> None:
    """Raise ModelError for weights that are trainable now but were frozen at the start.

    `initially_trainable`: names of the weights that were trainable when the strategy wrapped the
    model. Only their gradients are averaged over ranks.
    """
    late = set(trainable_names(model)) - initially_trainable
    if late:
        what = f"{min(late)} was frozen when the strategy wrapped the model, and is trainable now"
        fix = "unfreeze it in build, or use ddp or fsdp2"
        raise ModelError(what, where="strategy", fix=fix)
