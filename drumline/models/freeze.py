"""Parts of a model that do not learn (`model.freeze`): the vision tower of a model that sees, the first blocks, the embedding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drumline.config.suggest import nearest
from drumline.errors import ModelError

WHERE = "model.freeze"


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Parameters called one of `names`, or lying below a module called so, get no gradients, no moments and no place in checkpoints.

    Raises ModelError for a name that the model does not have, and where nothing is left to learn.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        below = [parameter for each, parameter in parameters.items() if each == name or each.startswith(f"{name}.")]
        if not below:
            known = [module for module, _ in model.named_modules() if module]
            guess = nearest(name, known)
            top = ", ".join(module for module in known if module.count(".") <= 1)
            fix = f"did you mean {guess}?" if guess else f"there are {top}"
            raise ModelError(f"{type(model).__name__} has nothing called {name!r}", where=WHERE, fix=fix)
        for parameter in below:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError("nothing is left to learn", where=WHERE, fix="leave a part out")
