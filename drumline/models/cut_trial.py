"""Tries one tensor-parallel rank's part of a model, without memory and without other ranks.

The layers that a plan cuts get the sizes that one rank has. The trial shows whether the model's own
code runs with these, and which weights that are not cut it applies to tensors that are. The
gradient of such a weight has to be summed over the ranks.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drumline.dist.seeds import use_seed
from drumline.errors import PlanError
from drumline.foreign import first_line
from drumline.models.blocks import blocks, embedding_and_head, expert_modules, tensor_plan
from drumline.models.classes import values_by_layer
from drumline.models.small import config_with_few_layers
from drumline.plan.facts import COLUMN_PARALLEL, ROW_PARALLEL, TP_STYLES

# Tokens of the trial's row.
TOKENS = 8
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CutTrial:
    """The result of a trial.

    `failure`: why the model's code does not work on a rank's part; empty if it does, or if that is
    not known.
    `with_partial_gradients`: names of the modules whose own weights are whole on each rank and act
    on sharded activations. On each rank the gradient of such a weight is partial.
    """

    failure: str = ""
    with_partial_gradients: tuple[str, ...] = ()


@dataclass
class _Graph:
    """Nodes of the autograd graph of a trial.

    `sharded`: nodes of the outputs of column-parallel layers, of which a rank has a slice.
    `replicated`: nodes of tensors that each rank has in full.
    `row_parallel_inputs`: nodes of the inputs of row-parallel layers, of which a rank has a slice.
    """

    sharded: set[Any] = field(default_factory=set)
    replicated: set[Any] = field(default_factory=set)
    row_parallel_inputs: set[Any] = field(default_factory=set)


def try_cut(model: Any) -> CutTrial:
    """Return what a model's code does with one rank's part.

    `model`: it may be on any device, and a stage of a pipeline.
    """
    plan = tensor_plan(model)
    ranks = _smallest_cut(model)
    if ranks is None or not plan or not TP_STYLES.issuperset(plan.values()):
        return CutTrial()
    # First the model as it is: if it does not run on the meta device, the trial tells nothing.
    try:
        trial = _copy_on_meta(model)
        # Products of experts need values, which the meta device lacks. Each rank computes whole
        # experts.
        for name in expert_modules(trial):
            trial.get_submodule(name).forward = _pass_tokens_on
        _run(trial)
    except Exception as error:  # noqa: BLE001 - any code may be in a model, and need values
        logger.debug("%s does not run on the meta device: %s", type(model).__name__, error)
        return CutTrial()
    graph = _Graph()
    try:
        # The plan of the whole model: a stage of a pipeline has some of its modules.
        _cut_layers(trial, tensor_plan(trial), ranks, graph)
        _run(trial)
    except Exception as error:  # noqa: BLE001 - it did run before it was cut
        where = _innermost_module(error)
        failure = f"{where} does not run on a rank's part of the model: {first_line(error)}"
        return CutTrial(failure=failure)
    return _result_of(trial, graph)


def modules_with_partial_gradients(model: Any) -> list[str]:
    """Return the names of the modules with whole weights that act on sharded activations.

    On each rank the gradient of such a weight is partial: it has to be summed over the
    tensor-parallel ranks. Raises PlanError if the model's code does not run on a rank's part.
    """
    trial = try_cut(model)
    if trial.failure:
        raise PlanError(trial.failure, where="strategy.tp", fix="use strategy=fsdp2")
    # The trial had fewer layers: the weights of all layers of a kind behave alike.
    kinds = {_mask_numbers(name) for name in trial.with_partial_gradients}
    return [name for name, _ in model.named_modules() if _mask_numbers(name) in kinds]


def _mask_numbers(name: str) -> str:
    """Return a module's name with a star for the number of its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _smallest_cut(model: Any) -> int | None:
    """Return the least number of ranks that divides the model's heads; None if there is none."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    text_config = model.config.get_text_config()
    heads = values_by_layer(text_config, "num_attention_heads")
    kv_heads = values_by_layer(text_config, "num_key_value_heads")
    numbers = [int(number) for number in [*heads, *kv_heads] if number]
    common = math.gcd(*numbers)
    for ranks in range(2, common + 1):
        if common % ranks == 0:
            return ranks
    return None


def _innermost_module(error: BaseException) -> str:
    """Return the class of the module in whose code an error was raised."""
    name = "the model"
    # The traceback begins with the outermost call: the last module is the innermost one.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            name = type(module).__name__
    return name


def _copy_on_meta(model: Any) -> Any:
    """Return a copy of a model with few layers on the meta device.

    The copy of a stage of a pipeline has all of the model's layers.
    """
    layers = model.config.get_text_config().num_hidden_layers
    is_stage = len(blocks(model)) < layers
    if is_stage:
        # The blocks of a stage do not tell how many layers have every kind.
        config = copy.deepcopy(model.config)
    else:
        config = config_with_few_layers(model)
    # Attention of Drumline's own needs the lengths of documents.
    config._attn_implementation = "eager"
    # The router's loss takes masks of another shape.
    text_config = config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        text_config.output_router_logits = False
    with use_seed(0), torch.device("meta"):
        built = type(model)(config)
    return built.eval()


def _run(trial: Any) -> None:
    """Run a forward over a row of tokens."""
    ids_BT = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    # Without a mask, transformers reads values to make one.
    mask_B1TT = torch.zeros(1, 1, TOKENS, TOKENS, device="meta", dtype=trial.dtype)
    with torch.enable_grad():
        trial(input_ids=ids_BT, attention_mask=mask_B1TT, use_cache=False)


def _cut_layers(trial: Any, plan: dict[str, str], ranks: int, graph: _Graph) -> None:
    """Change the forward of each layer that the plan cuts to that of rank 0."""
    embedding, _ = embedding_and_head(trial)
    embedding.forward = _forward_with_full_output(embedding.forward, graph)
    for name, style in plan.items():
        # These layers run whole on each rank, on whatever they get.
        if style in ("replicate", "replicated_with_grad_allreduce"):
            continue
        layer = trial.get_submodule(name)
        if style == "experts":
            layer.forward = _experts_forward(graph)
        elif style == "colwise":
            layer.forward = _column_parallel_forward(layer.forward, ranks, graph)
        elif style == "rowwise":
            layer.forward = _row_parallel_forward(name, layer, ranks, graph)
        else:
            assert style in COLUMN_PARALLEL or style in ROW_PARALLEL
            layer.forward = _forward_with_full_output(layer.forward, graph)


def _forward_with_full_output(
    forward: Callable[..., Tensor], graph: _Graph
) -> Callable[..., Tensor]:
    """Return the forward of a layer whose full output is on each rank."""

    def run(*inputs: Any) -> Tensor:
        out = forward(*inputs)
        graph.replicated.add(out.grad_fn)
        return out

    return run


def _column_parallel_forward(
    forward: Callable[..., Tensor], ranks: int, graph: _Graph
) -> Callable[..., Tensor]:
    """Return the forward of a column-parallel layer on rank 0.

    It returns the first slice of the output features.
    """

    def run(x: Tensor) -> Tensor:
        full_output = forward(x)
        features = math.ceil(full_output.shape[-1] / ranks)
        first_slice = full_output[..., :features]
        graph.sharded.add(first_slice.grad_fn)
        return first_slice

    return run


def _row_parallel_forward(
    name: str, layer: Any, ranks: int, graph: _Graph
) -> Callable[..., Tensor]:
    """Return the forward of a row-parallel layer on rank 0.

    It takes the first slice of the input features. Raises ValueError for any other width.
    """
    forward = layer.forward
    if isinstance(layer, nn.Linear):
        features = layer.in_features
    else:
        # GPT-2's layers have inputs first.
        features = int(layer.weight.shape[0])
    expected = math.ceil(features / ranks)

    def run(x: Tensor) -> Tensor:
        if x.shape[-1] != expected:
            raise ValueError(f"{name} is given {x.shape[-1]} features and not {expected}")
        graph.row_parallel_inputs.add(x.grad_fn)
        # Zeros in the places of the other ranks' features: the layer itself is whole here.
        out: Tensor = forward(nn.functional.pad(x, (0, features - expected)))
        graph.replicated.add(out.grad_fn)
        return out

    return run


def _pass_tokens_on(hidden: Tensor, *_choices: Any) -> Tensor:
    """Return the tokens as a new tensor, in place of the experts' output of the same shape."""
    # A product, since the tensor itself would have no node of its own in the graph.
    return hidden * 1


def _experts_forward(graph: _Graph) -> Callable[..., Tensor]:
    """Return the forward of experts, which take tokens, their choices, and weights of these.

    See `engine.experts`. It multiplies the tokens by the weights in place of the experts' products,
    so that the graph has the same inputs.
    """

    def run(*inputs: Tensor) -> Tensor:
        if len(inputs) != 3:
            raise ValueError("experts are given tokens without choices")
        hidden_ND, _, weights_Nk = inputs
        out = hidden_ND * weights_Nk.sum(-1, keepdim=True).to(hidden_ND.dtype)
        graph.replicated.add(out.grad_fn)
        return out

    return run


def _result_of(trial: Any, graph: _Graph) -> CutTrial:
    """Return the result of a trial that ran.

    The trial fails if a replicated activation meets a sharded one, since its gradient would be
    incomplete.
    """
    names = {id(weight): name for name, weight in trial.named_parameters()}
    modules: list[str] = []
    for node in _nodes_between(graph):
        if node in graph.replicated:
            failure = "its code mixes whole tensors with parts, and would lack gradients"
            return CutTrial(failure=failure)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            modules.append(name.rpartition(".")[0])
    return CutTrial(with_partial_gradients=tuple(dict.fromkeys(modules)))


def _nodes_between(graph: _Graph) -> Iterator[Any]:
    """Yield the autograd nodes between row-parallel inputs and column-parallel outputs.

    The walk goes back from the inputs to the outputs that feed them. A replicated node on the way
    is yielded too, and what feeds it is not.
    """
    waiting = [node for node in graph.row_parallel_inputs if node is not None]
    seen = {*graph.sharded}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node not in graph.replicated:
            waiting += [source for source, _ in node.next_functions if source is not None]
