"""Cut any causal language model of Hugging Face into pipeline stages, without knowing its class.

A stage is the model itself, in which the parts of other stages are replaced. Every stage is given
the token ids and positions, from which the model's own forward makes masks and rotary embeddings.
Each block of another stage is replaced by a `StandIn`, which returns its input. Two of these do
more: the one right before the stage's own blocks returns the hidden states that the previous stage
has sent, and the one right after them keeps the hidden states for the next stage. Weights keep the
names that they have in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from drumline.models.adapters import copy_without_factors, is_tuned
from drumline.models.attention import model_inputs
from drumline.models.blocks import block_list, find_base_layer, reason_not_to_cut
from drumline.models.head import Outputs, can_split, compute_outputs, trunk_and_head
from drumline.models.router_load import count_expert_tokens
from drumline.models.scores import VALUE
from drumline.models.small import TrialTokens, is_close, try_small
from drumline.plan.rules import NO_PIPELINE
from drumline.plan.stages import Range

Compute = Callable[[torch.Tensor], torch.Tensor]
# Blocks of the small copy: a first, a last, and two between.
TRIAL_BLOCKS = 4
# Ranks that the stages of the small copy are dealt to.
TRIAL_RANKS = 2


@dataclass(frozen=True)
class SplitPoints:
    """How a model can be split into stages: before any of its blocks.

    `blocks`: name of the list of blocks. `block_count`: how many there are. `before`, `after`:
    names of the modules with weights that run before the first block and after the last.
    `tuple_length`: how many values a block returns in a tuple; 0 if it returns a tensor alone.
    `width`: D of the hidden states. `has_separable_head`: see `models.head.can_split`.
    """

    blocks: str
    block_count: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tuple_length: int
    width: int
    has_separable_head: bool = False


def find_split_points(model: Any) -> SplitPoints:
    """Return how a model can be split into stages, found by a small copy of it.

    The copy runs on eight tokens. `model` may lie on the meta device. In the trial each block is a
    stage by itself, and the stages are dealt to two ranks in turn. Raises PlanError if there is no
    single list of blocks, if weights outside of it are used between the blocks, if blocks share
    weights, or if stages give other outputs than the whole model.
    """
    reason = reason_not_to_cut(model)
    if reason:
        raise NO_PIPELINE.error(reason)
    split_points, is_reproduced = try_small(
        model, "cpu", _try_one_block_a_stage, layers=TRIAL_BLOCKS
    )
    if not is_reproduced:
        raise NO_PIPELINE.error(f"stages of {type(model).__name__} do not make the whole model")
    found = block_list(model)
    assert found is not None, "its copy has them"
    _, blocks = found
    after = split_points.after
    # The small copy is a plain class of transformers, without a value head.
    if hasattr(model, VALUE):
        after = (*after, VALUE)
    return replace(
        split_points,
        block_count=len(blocks),
        after=after,
        has_separable_head=can_split(model),
    )


def _try_one_block_a_stage(small: Any, ids_BT: torch.Tensor) -> tuple[SplitPoints, bool]:
    """Return the split points of a small copy, and whether its stages reproduce it."""
    split_points = trace_split_points(small, ids_BT)
    ranges = tuple((index, index + 1) for index in range(split_points.block_count))
    return split_points, stages_reproduce_model(small, split_points, ranges, TRIAL_RANKS, ids_BT)


class _Event(NamedTuple):
    """A moment in a run of a model.

    `kind`: what happens, one of the constants below. `module`: name of a module outside of the
    blocks, empty for an event of the blocks.
    """

    kind: str
    module: str = ""


FIRST_BLOCK_BEGINS = _Event("first block begins")
LAST_BLOCK_ENDS = _Event("last block ends")
BEGINS = "begins"
ENDS = "ends"


def trace_split_points(model: Any, ids_BT: torch.Tensor) -> SplitPoints:
    """Return the split points of a model with weights, found by one run on `ids_BT`.

    Raises PlanError if blocks do not run once each, or if weights are used between them.
    """
    class_name = type(model).__name__
    found = block_list(model)
    assert found is not None, "find_split_points has looked"
    path, blocks = found
    outside = _modules_outside(model, blocks)
    events, block_output = _recorded_run(model, blocks, outside, ids_BT)
    if events.count(FIRST_BLOCK_BEGINS) != 1 or events.count(LAST_BLOCK_ENDS) != 1:
        raise NO_PIPELINE.error(f"{class_name} runs its blocks more than once")

    # A module runs before the blocks if it has ended when they begin, and after them if it ends
    # only when they are done. Any other module is used between the blocks.
    first = events.index(FIRST_BLOCK_BEGINS)
    last = events.index(LAST_BLOCK_ENDS)
    before: list[str] = []
    after: list[str] = []
    for name in outside:
        has_ended_before = _Event(ENDS, name) in events[:first]
        begins_later = _Event(BEGINS, name) in events[first:]
        if has_ended_before and not begins_later:
            before.append(name)
        if _Event(ENDS, name) not in events[:last]:
            after.append(name)
    between = sorted(set(outside) - set(before) - set(after))
    if not between:
        # A module that contains the blocks ends after them too, but begins before they end.
        between = [name for name in after if _Event(BEGINS, name) in events[:last]]
    if between:
        raise NO_PIPELINE.error(f"{class_name} uses {between[0]} between its blocks")

    # If a block returns a tuple, the hidden states are its first part.
    tuple_length = 0
    hidden_BTD = block_output
    if isinstance(block_output, tuple):
        tuple_length = len(block_output)
        hidden_BTD = block_output[0]
    width = hidden_BTD.shape[-1]
    return SplitPoints(path, len(blocks), tuple(before), tuple(after), tuple_length, width)


def _modules_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that have parameters of their own, by name."""
    inside: set[int] = set()
    for block in blocks:
        inside.update(id(module) for module in block.modules())
    outside: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if module._parameters and id(module) not in inside:
            outside[name] = module
    return outside


def _recorded_run(
    model: Any, blocks: nn.ModuleList, outside: dict[str, nn.Module], ids_BT: torch.Tensor
) -> tuple[list[_Event], Any]:
    """Run a model, and return what happened in which order, and what its last block returned.

    `outside`: modules outside of the blocks by name, whose begin and end are events. The output is
    None if the last block did not run.
    """
    events: list[_Event] = []
    block_outputs: list[Any] = []

    def recorder(event: _Event) -> Callable[..., None]:
        def record(*_: Any) -> None:
            events.append(event)

        return record

    def keep_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        block_outputs.append(output)

    hooks = [
        blocks[0].register_forward_pre_hook(recorder(FIRST_BLOCK_BEGINS)),
        blocks[-1].register_forward_hook(recorder(LAST_BLOCK_ENDS)),
        blocks[-1].register_forward_hook(keep_output),
    ]
    for name, module in outside.items():
        hooks.append(module.register_forward_pre_hook(recorder(_Event(BEGINS, name))))
        hooks.append(module.register_forward_hook(recorder(_Event(ENDS, name))))
    try:
        model(input_ids=ids_BT, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    block_output: Any = None
    if block_outputs:
        block_output = block_outputs[0]
    return events, block_output


class StandIn(nn.Module):
    """Replaces a module that another stage holds, and returns its first input or `run` of that."""

    def __init__(
        self, block: nn.Module | None = None, tuple_length: int = 0, run: Compute | None = None
    ) -> None:
        """`block`: the block to replace. Its plain attributes are copied, since trunks read them
        (`attention_type`). `tuple_length`: see SplitPoints. `run`: computes the output from the
        first input; None: the output is the first input.
        """
        super().__init__()
        self.tuple_length = tuple_length
        self.run = run
        if block is not None:
            self._copy_attributes(block)

    def _copy_attributes(self, block: nn.Module) -> None:
        """Take over the public attributes of a block, except those that this module has itself."""
        taken = {"forward", *vars(self)}
        for name, value in vars(block).items():
            if not name.startswith("_") and name not in taken:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first input, or what `run` makes of it, in the form that a block returns.

        The hidden states are the first input, by position or by the name that transformers use.
        """
        if args:
            output = args[0]
        else:
            output = kwargs["hidden_states"]
        if self.run is not None:
            output = self.run(output)
        if self.tuple_length:
            return (output, *[None] * (self.tuple_length - 1))
        return output


def zeros_in_place_of(layer: nn.Embedding | nn.Linear, dtype: torch.dtype) -> Compute:
    """Return a function that makes zeros in the shape that an embedding or projection returns.

    A later stage replaces the zeros by what the previous stage has sent.
    """

    def zeros(given: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, nn.Embedding):
            shape = (*given.shape, layer.embedding_dim)
        else:
            shape = (*given.shape[:-1], layer.out_features)
        return torch.zeros(shape, dtype=dtype, device=given.device)

    return zeros


def weights_of_first_and_last_stage(model: Any, split_points: SplitPoints) -> list[str]:
    """Return the names of the weights that the first and the last stage both hold (a tied head).

    Their gradients on the two stages have to be added up.
    """
    shared = _parameter_ids(model, split_points.before) & _parameter_ids(model, split_points.after)
    return [name for name, parameter in model.named_parameters() if id(parameter) in shared]


def _parameter_ids(model: Any, names: Iterable[str]) -> set[int]:
    """Return the ids of all parameters of some submodules."""
    ids: set[int] = set()
    for name in names:
        ids.update(id(parameter) for parameter in model.get_submodule(name).parameters())
    return ids


def rank_part(
    model: Any,
    split_points: SplitPoints,
    ranges: Iterable[Range],
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return the part of a model that a rank holds; the model itself is left as it is.

    A rank holds the blocks of `ranges`. If the first block is among them, it also holds what runs
    before it, and if the last block is, what runs after it. Weights that the first and the last
    stage share (a tied head) are held by both. `dtype`: the type in which hidden states are sent.
    """
    held_blocks: set[int] = set()
    for first, stop in ranges:
        held_blocks.update(range(first, stop))
    held_modules: list[str] = []
    absent_modules: list[str] = []
    if 0 in held_blocks:
        held_modules += split_points.before
    else:
        absent_modules += split_points.before
    if split_points.block_count - 1 in held_blocks:
        held_modules += split_points.after
    else:
        absent_modules += split_points.after

    held_weights = _parameter_ids(model, held_modules)
    replacements: dict[str, nn.Module] = {}
    for name in absent_modules:
        module = model.get_submodule(name)
        replacement = _replacement(module, held_weights, name in split_points.before, dtype)
        if replacement is not None:
            replacements[name] = replacement
    for index, block in enumerate(model.get_submodule(split_points.blocks)):
        if index not in held_blocks:
            replacements[f"{split_points.blocks}.{index}"] = StandIn(
                block, split_points.tuple_length
            )
    return _with_replaced(model, replacements)


def _replacement(
    module: nn.Module, held_weights: Collection[int], is_before: bool, dtype: torch.dtype
) -> nn.Module | None:
    """Return what replaces a module before or after the blocks; None if the module stays.

    `held_weights`: ids of the parameters that the rank holds. `is_before`: whether the module runs
    before the blocks.
    """
    # If an adapter is laid over the layer, the layer below it decides: LoRA's factors and added rows
    # of tokens belong to that layer.
    base = find_base_layer(module)
    own_weights = {id(parameter) for parameter in base.parameters(recurse=False)}
    if not own_weights:
        return None
    if not own_weights.isdisjoint(held_weights):
        # A tied weight (of embedding and head), which the rank also holds in the other one. The
        # factors of an adapter over this one are not tied, and belong to the rank that runs it.
        if is_tuned(module):
            return copy_without_factors(module)
        return None
    if is_before and isinstance(base, nn.Embedding | nn.Linear):
        return StandIn(run=zeros_in_place_of(base, dtype))
    return StandIn()


def _with_replaced(model: Any, replacements: dict[str, nn.Module]) -> Any:
    """Return a copy of a model with some submodules replaced, by name.

    It shares all other modules with the model, except those that contain a replaced one. Names are
    paths such as `model.layers.3`.
    """
    # Without `__init__`: the copy has the same attributes, and a dictionary of children of its own.
    fresh = copy.copy(model)
    fresh._modules = dict(model._modules)
    # Child → replacements within it, by their names there.
    within_children: dict[str, dict[str, nn.Module]] = {}
    for name, module in replacements.items():
        child, _, rest = name.partition(".")
        if rest:
            within_children.setdefault(child, {})[rest] = module
        else:
            fresh._modules[child] = module
    for child, within in within_children.items():
        fresh._modules[child] = _with_replaced(model._modules[child], within)
    return fresh


class Stage(nn.Module):
    """Blocks [first, stop) of a model, with what comes before the first or after the last."""

    def __init__(
        self,
        model: Any,
        split_points: SplitPoints,
        bounds: Range,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`model`: the whole model, or a rank's part of it. `bounds`: (first, stop). `dtype`: the
        type that hidden states travel in.
        """
        super().__init__()
        first, stop = bounds
        self.is_first = first == 0
        self.is_last = stop == split_points.block_count
        self.has_separable_head = split_points.has_separable_head
        self.dtype = dtype
        blocks = model.get_submodule(split_points.blocks)
        # The blocks next to the stage's own, which pass hidden states in and out.
        neighbours: dict[str, nn.Module] = {}
        if not self.is_first:
            before = StandIn(blocks[first - 1], split_points.tuple_length, self._take_received)
            neighbours[f"{split_points.blocks}.{first - 1}"] = before
        if not self.is_last:
            after = StandIn(blocks[stop], split_points.tuple_length, self._keep_to_send)
            neighbours[f"{split_points.blocks}.{stop}"] = after
        own_part = rank_part(model, split_points, [bounds], dtype)
        self.model = _with_replaced(own_part, neighbours)
        # Hidden states of the running micro-batch: on their way in, and on their way out.
        self.received: torch.Tensor | None = None
        self.to_send: torch.Tensor | None = None

    def run(self, batch: Any, hidden_BTD: torch.Tensor | None) -> torch.Tensor | Outputs:
        """Return the hidden states for the next stage, [B, T, D]; the last stage returns Outputs.

        `hidden_BTD`: what the previous stage has sent; None for the first stage.
        """
        self.received = hidden_BTD
        if self.is_last:
            parts: Any = None
            if self.has_separable_head:
                parts = trunk_and_head(self.model)
            return compute_outputs(self.model, batch, parts)
        # The trunk alone: a head would make logits that nobody reads.
        trunk = self.model.get_decoder() or self.model.base_model
        with model_inputs(self.model, batch) as inputs, count_expert_tokens(self.model, batch):
            trunk(**inputs, use_cache=False)
        to_send = self.to_send
        self.to_send = None
        assert to_send is not None, "a trunk runs the block after the stage's own"
        return to_send.to(self.dtype).contiguous()

    def _take_received(self, _: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the previous stage, in place of its last block."""
        received = self.received
        self.received = None
        assert received is not None, "a stage runs on what the one before it sent"
        return received

    def _keep_to_send(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Keep the hidden states for the next stage, in place of its first block."""
        self.to_send = hidden_BTD
        return hidden_BTD


def stages_reproduce_model(
    model: Any,
    split_points: SplitPoints,
    ranges: tuple[Range, ...],
    ranks: int,
    ids_BT: torch.Tensor,
) -> bool:
    """Return whether stages, run one after another, give the outputs of the whole model.

    `ranges`: the blocks of each stage. The stages are dealt to `ranks` in turn, and each is made of
    its rank's part, as in a run.
    `ids_BT`: one row of tokens.
    Raises PlanError if the stages do not run.
    """
    parts = [rank_part(model, split_points, ranges[rank::ranks]) for rank in range(ranks)]
    stages: list[Stage] = []
    for index, bounds in enumerate(ranges):
        part_of_rank = parts[index % ranks]
        stages.append(Stage(part_of_rank, split_points, bounds))
    # Two different rows: broadcasting would hide a wrong shape behind one.
    ids_BT = torch.cat([ids_BT, ids_BT.flip(1)])
    batch = TrialTokens(ids_BT)
    whole = compute_outputs(model, batch, None)
    passed: Any = None
    try:
        for stage in stages:
            stage.eval()
            passed = stage.run(batch, passed)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise NO_PIPELINE.error(
            f"{type(model).__name__} does not run in stages: {error}"
        ) from error
    if whole.logits_BC is not None:
        return is_close(passed.class_logits(), whole.logits_BC)
    if whole.logits_BTV is None:
        return is_close(passed.values(), whole.values())
    logits_BTV = passed.logits_BTV
    if logits_BTV is None:
        # A model that can be split leaves the product with the head to the loss.
        logits_BTV = nn.functional.linear(passed.hidden_BTD, passed.weight_VD, passed.bias_V)
    return is_close(logits_BTV, whole.logits_BTV)
