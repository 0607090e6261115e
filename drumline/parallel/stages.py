"""Cutting any causal LM of Hugging Face into stages, without knowing its class.

A stage is the model itself with what it lacks replaced, so its own forward makes masks and rotary embeddings from the ids and
positions that every stage is given. In the place of a block of another stage is an `Absent` one, which hands its input on. The one
right before the stage's own blocks gives the hidden states that came from the stage before, in place of whatever the trunk made up to
there; the one right after them notes what goes to the next. Names of weights stay as they are in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drumline.core.rules import NO_STAGES
from drumline.core.stages import Range
from drumline.models.adapters import is_tuned, without_factors
from drumline.models.attention import attending
from drumline.models.blocks import block_list, uncut, whole_layer
from drumline.models.head import Outputs, can_split, outputs, split
from drumline.models.scores import VALUE
from drumline.models.small import Tokens, close, try_small

Run = Callable[[torch.Tensor], torch.Tensor]
TRIAL_BLOCKS = 4  # blocks of the copy: a first, a last, and two between


@dataclass(frozen=True)
class Cuts:
    """Where a model can be cut. `before` and `after`: names of the modules with weights that run ahead of the first block and behind
    the last. `returns`: how many values a block returns in a tuple, 0 for a tensor alone. `width`: D of the hidden states.
    `splits`: see models.head.can_split."""

    blocks: str
    number: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    returns: int
    width: int
    splits: bool = False


def find_cuts(model: Any) -> Cuts:
    """Where a model can be cut, from what runs when in a small copy on eight tokens. `model` may lie on the meta device.

    Raises PlanError where there is not one list of blocks, where weights outside of it are used between the blocks or blocks share
    them, and where stages would not make the whole: each block of the copy by itself is a stage, on one of two ranks in turn.
    """
    if why := uncut(model):
        raise NO_STAGES.error(why)

    def trial(small: Any, ids_BT: torch.Tensor) -> tuple[Cuts, bool]:
        cuts = look(small, ids_BT)
        return cuts, stages_make_the_whole(
            small, cuts, tuple((i, i + 1) for i in range(cuts.number)), 2, ids_BT
        )

    cuts, whole = try_small(model, "cpu", trial, layers=TRIAL_BLOCKS)
    if not whole:
        raise NO_STAGES.error(f"stages of {type(model).__name__} do not make the whole model")
    blocks = block_list(model)
    assert blocks is not None, "its copy has them"
    # The copy, of a class of transformers, has none.
    after = (
        *cuts.after,
        *([VALUE] if hasattr(model, VALUE) else []),
    )
    return replace(cuts, number=len(blocks[1]), after=after, splits=can_split(model))


def look(model: Any, ids_BT: torch.Tensor) -> Cuts:
    """The cuts of a model with weights, by a run on `ids_BT`. Raises PlanError."""
    name = type(model).__name__
    found = block_list(model)
    assert found is not None, "find_cuts has looked"
    path, blocks = found
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {n: m for n, m in model.named_modules() if id(m) not in inside and m._parameters}
    ran: list[tuple[str, str]] = []
    made: list[Any] = []

    def note(*event: str) -> Any:
        return lambda *_: ran.append(event)  # type: ignore[arg-type]

    hooks = [
        blocks[0].register_forward_pre_hook(note("first", "")),
        blocks[-1].register_forward_hook(note("last", "")),
    ]
    hooks.append(blocks[-1].register_forward_hook(lambda _module, _inputs, out: made.append(out)))
    for n, module in outside.items():
        hooks += [
            module.register_forward_pre_hook(note("begin", n)),
            module.register_forward_hook(note("end", n)),
        ]
    try:
        model(input_ids=ids_BT, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if ran.count(("first", "")) != 1 or ran.count(("last", "")) != 1:
        raise NO_STAGES.error(f"{name} runs its blocks more than once")
    first, last = ran.index(("first", "")), ran.index(("last", ""))
    before = tuple(
        n for n in outside if ("end", n) in ran[:first] and ("begin", n) not in ran[first:]
    )
    after = tuple(n for n in outside if ("end", n) not in ran[:last])
    between = sorted(set(outside) - set(before) - set(after)) or [
        n for n in after if ("begin", n) in ran[:last]
    ]
    if between:
        raise NO_STAGES.error(f"{name} uses {between[0]} between its blocks")
    out = made[0]
    returns = len(out) if isinstance(out, tuple) else 0
    return Cuts(path, len(blocks), before, after, returns, (out[0] if returns else out).shape[-1])


class Absent(nn.Module):
    """In the place of a module of another stage: it gives `run(first input)`, or its first input itself. `block`: whose plain attributes
    it has, since trunks read them (`attention_type`). `returns`: see Cuts."""

    def __init__(
        self, block: nn.Module | None = None, returns: int = 0, run: Run | None = None
    ) -> None:
        super().__init__()
        self.returns, self.run = returns, run
        for name, value in vars(block).items() if block is not None else ():
            if not name.startswith("_") and name not in ("forward", *vars(self)):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        out = given if self.run is None else self.run(given)
        return (out, *[None] * (self.returns - 1)) if self.returns else out


def zeros_of(absent: nn.Embedding | nn.Linear, dtype: torch.dtype) -> Run:
    """A function of zeros in the shape that an embedding (or its projection) gives; on a later stage they are replaced in turn."""
    stop, width = (
        (None, absent.embedding_dim)
        if isinstance(absent, nn.Embedding)
        else (-1, absent.out_features)
    )
    return lambda given: torch.zeros(*given.shape[:stop], width, dtype=dtype, device=given.device)


def tied(model: Any, cuts: Cuts) -> list[str]:
    """Names of the weights that both ends hold."""
    first, last = (
        {id(p) for name in names for p in model.get_submodule(name).parameters()}
        for names in (cuts.before, cuts.after)
    )
    return [name for name, parameter in model.named_parameters() if id(parameter) in first & last]


def part(model: Any, cuts: Cuts, ranges: list[Range], dtype: torch.dtype = torch.float32) -> Any:
    """The part of a model that a rank holds: blocks of `ranges`, what comes before the first block where that is among them, what
    comes after the last likewise. Weights that both ends share (a tied head) are held by both. The model given is left as it is.
    `dtype`: what hidden states travel in."""
    own = {block for first, stop in ranges for block in range(first, stop)}
    ends = dict.fromkeys(cuts.before, 0 in own) | dict.fromkeys(cuts.after, cuts.number - 1 in own)
    needed = {
        id(p) for name, here in ends.items() if here for p in model.get_submodule(name).parameters()
    }
    lacks: dict[str, nn.Module] = {}
    for name, here in ends.items():
        module = model.get_submodule(name)
        # Of an adapted layer the base: factors, and rows of tokens, belong to the layer that they
        # are laid over.
        base = whole_layer(module)
        weights = {id(p) for p in base.parameters(recurse=False)}
        if not weights or here:
            continue
        if needed & weights:
            if is_tuned(module):
                lacks[name] = without_factors(module)
        else:
            makes = name in cuts.before and isinstance(base, nn.Embedding | nn.Linear)
            lacks[name] = Absent(run=zeros_of(base, dtype) if makes else None)
    blocks = model.get_submodule(cuts.blocks)
    lacks |= {
        f"{cuts.blocks}.{i}": Absent(block, cuts.returns)
        for i, block in enumerate(blocks)
        if i not in own
    }
    return _with(model, lacks)


def _with(model: Any, replaced: dict[str, nn.Module]) -> Any:
    """A copy of a model that shares all modules except those `replaced` and those that contain them."""
    fresh = copy.copy(model)
    fresh._modules = dict(model._modules)
    below: dict[str, dict[str, nn.Module]] = {}
    for name, module in replaced.items():
        child, _, rest = name.partition(".")
        if rest:
            below.setdefault(child, {})[rest] = module
        else:
            fresh._modules[child] = module
    for child, inner in below.items():
        fresh._modules[child] = _with(model._modules[child], inner)
    return fresh


class Stage(nn.Module):
    """Blocks [first, stop) of a model, with what comes before the first or after the last. `model`: the whole, or a rank's part."""

    def __init__(
        self, model: Any, cuts: Cuts, bounds: Range, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        first, stop = bounds
        self.is_first, self.is_last = first == 0, stop == cuts.number
        self.splits, self.dtype = cuts.splits, dtype
        blocks = model.get_submodule(cuts.blocks)
        edges: dict[str, nn.Module] = {}
        if not self.is_first:
            edges[f"{cuts.blocks}.{first - 1}"] = Absent(
                blocks[first - 1], cuts.returns, self._enter
            )
        if not self.is_last:
            edges[f"{cuts.blocks}.{stop}"] = Absent(blocks[stop], cuts.returns, self._leave)
        self.model = _with(part(model, cuts, [bounds], dtype), edges)
        self.received: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None

    def run(self, batch: Any, hidden_BTD: torch.Tensor | None) -> torch.Tensor | Outputs:
        """What the next stage is sent, [B, T, D]; of the last stage the outputs. `hidden_BTD`: None for the first stage."""
        self.received = hidden_BTD
        if self.is_last:
            return outputs(self.model, batch, split(self.model) if self.splits else None)
        trunk = self.model.get_decoder() or self.model.base_model
        with attending(self.model, batch) as inputs:
            trunk(**inputs, use_cache=False)
        sent, self.sent = self.sent, None
        assert sent is not None, "a trunk runs the block behind the stage's own"
        return sent.to(self.dtype).contiguous()

    def _enter(self, _: torch.Tensor) -> torch.Tensor:
        received, self.received = self.received, None
        assert received is not None, "a stage runs on what the one before it sent"
        return received

    def _leave(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        self.sent = hidden_BTD
        return hidden_BTD


def stages_make_the_whole(
    model: Any, cuts: Cuts, ranges: tuple[Range, ...], ranks: int, ids_BT: torch.Tensor
) -> bool:
    """Whether stages, each of its rank's part, give the model's own logits one after another. Raises PlanError where they do not run."""
    parts = [part(model, cuts, list(ranges[rank::ranks])) for rank in range(ranks)]
    stages = [Stage(parts[index % ranks], cuts, bounds) for index, bounds in enumerate(ranges)]
    # Two different rows: broadcasting would hide a wrong shape behind one.
    ids_BT = torch.cat([ids_BT, ids_BT.flip(1)])
    batch = Tokens(ids_BT)
    whole = outputs(model, batch, None)
    passed: Any = None
    try:
        for stage in stages:
            passed = stage.eval().run(batch, passed)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise NO_STAGES.error(f"{type(model).__name__} does not run in stages: {error}") from error
    if whole.logits_BC is not None:
        return close(passed.class_logits(), whole.logits_BC)
    if whole.logits_BTV is None:
        return close(passed.values(), whole.values())
    logits = passed.logits_BTV
    if logits is None:
        logits = nn.functional.linear(passed.hidden_BTD, passed.weight_VD, passed.bias_V)
    return close(logits, whole.logits_BTV)
