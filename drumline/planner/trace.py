"""Trace the activations of a layout: run one micro-batch of our own engine, with shapes alone.

The model is cut to a few layers. A trace takes seconds and no memory: `_FakeValues` gives tensors
without memory (torch's FakeTensorMode), and `Watch` counts what lives in each block.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from drumline.algorithms.base import policy_objective
from drumline.config.config import CompileConfig, Config, LoRAConfig
from drumline.config.mesh import Mesh
from drumline.config.registry import make
from drumline.config.strategy import StrategyConfig
from drumline.engine import context_parallel
from drumline.engine.build import cast_to_compute_dtype
from drumline.engine.data_parallel import DataParallelWrapper
from drumline.engine.native import NativeEngine, prepare
from drumline.engine.norms import as_dtensor_on_mesh_device, local
from drumline.engine.transforms import DTYPES
from drumline.errors import DrumlineError
from drumline.foreign import class_and_line, first_line
from drumline.hardware.detect import cache_dir
from drumline.models import adapters
from drumline.models.attention import use_document_attention
from drumline.models.blocks import block_list, blocks
from drumline.models.build import ModelHead, lay_out
from drumline.models.classes import LM, is_seq2seq
from drumline.models.freeze import freeze
from drumline.models.load import load_config
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.shards import NothingToFill, Values
from drumline.models.small import DECODER_LAYERS
from drumline.plan.attention import choose_by_facts
from drumline.plan.estimate import Activations
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import DataPlan, Layout, Plan, Predicted
from drumline.planner.cost.activations import mix_activations, split_checkpointing
from drumline.system.files import load_or_compute
from drumline.system.process import run_module
from drumline.telemetry.memory_tracker import LiveBytes, plain_parts
from drumline.vendor.torch import (
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    current_graph_task_id,
    local_scalar_dense,
    to_copy,
    wait_tensor,
)
from drumline.version import __version__

logger = logging.getLogger(__name__)
# The version of stored traces, a part of their names. Raise it if traces get other results.
VERSION = 9
# Seconds after which a trace in a child is given up. Most take seconds.
CHILD_SECONDS = 300
# Layers after which their types repeat, such as five local ones and a global one. No more layers than
# these are traced twice.
LONGEST_PATTERN = 8
# Hexadecimal digits in the name of a stored trace.
KEY_DIGITS = 24
_ATEN = torch.ops.aten
# Storages by the address of their objects.
Tags = dict[int, weakref.ref[torch.UntypedStorage]]


def trace_activations(
    config: Config, model_path: str | None, layout: Layout, facts: ModelFacts
) -> Activations | None:
    """Trace a layout and return its activations, in bytes per token of a micro-batch.

    A micro-batch of `layout` is traced without memory at two depths (numbers of layers), and the
    difference is extended to all layers. Results are kept on disk; a failure is not stored, so the
    next call tries again. It is traced on the CPU, whatever the device: bf16 by the CPU's
    autocast, and attention by its flash kernel, which like a GPU's saves its result and one number a
    row. FSDP2 and ZeRO are traced as one process with weights in the type in which they are
    gathered; tensor and context parallelism as rank 0 of torch's fake process group, in a child.

    None, with a line in the log, if the model cannot be traced.
    """
    if layout.config.memory.checkpointed_blocks is not None:
        some_layout, rest_layout = split_checkpointing(layout)
        some = trace_activations(config, model_path, some_layout, facts)
        rest = trace_activations(config, model_path, rest_layout, facts)
        if some is None or rest is None:
            return None
        return mix_activations(layout, facts, some, rest)
    try:
        inputs = trace_inputs(config, model_path, layout, facts)
        return load_or_compute(
            cache_dir() / "traces" / f"{_key(inputs)}.json",
            Activations.model_validate_json,
            lambda: _measure_activations(inputs, layout),
            Activations.model_dump_json,
        )
    except (Untraceable, DrumlineError) as reason:
        logger.warning("%s is not traced, its activations are by formula: %s", facts.name, reason)
        return None


def trace_inputs(
    config: Config, model_path: str | None, layout: Layout, facts: ModelFacts
) -> dict[str, Any]:
    """Return all inputs of a trace as JSON, of which the name of the stored trace is a hash.

    The key `layers` has the two depths (numbers of layers) to trace.

    Raises Untraceable if the layout cannot be traced.
    """
    _require_traceable(config, layout, facts)
    plan = _plan_of_trace(config, model_path, layout, facts)
    is_low_deepspeed = layout.engine == "deepspeed" and plan.precision != "fp32"
    # The type of all weights while they compute; None under autocast.
    dtype: str | None
    if layout.is_pure_bf16 or is_low_deepspeed:
        dtype = plan.precision
    else:
        dtype = config.strategy.gathered_in(plan.precision, config.images_alone)
    hf_config = load_config(model_path, config.model)
    layer_types = getattr(hf_config.get_text_config(), "layer_types", None) or []
    if facts.encoder_decoder:
        _require_equal_stacks(hf_config)
    return {
        "plan": json.loads(plan.model_dump_json()),
        "rows": layout.rows,
        "length": layout.max_length,
        "dtype": dtype,
        "model": hf_config.to_dict(),
        "layers": _layer_counts(layer_types, facts.layers),
    }


def _require_traceable(config: Config, layout: Layout, facts: ModelFacts) -> None:
    """Raise Untraceable if a layout is of a kind that is never traced."""
    if facts.vision_language:
        raise Untraceable("it sees images of many sizes")
    if config.memory.activation_offload and layout.device == "cpu":
        raise Untraceable("what is offloaded stays in the same memory")
    if layout.engine == "pipeline" and layout.mesh.tp * layout.mesh.cp > 1:
        raise Untraceable("its pipeline's stages are cut")


def _require_equal_stacks(hf_config: Any) -> None:
    """Raise Untraceable unless the encoder and the decoder can be cut to one number of layers."""
    key = next((key for key in DECODER_LAYERS if hasattr(hf_config, key)), None)
    if key is None:
        raise Untraceable("its stacks have configs of their own")
    if getattr(hf_config, key) != hf_config.num_hidden_layers:
        raise Untraceable("its encoder and its decoder have different numbers of blocks")


def _plan_of_trace(
    config: Config, model_path: str | None, layout: Layout, facts: ModelFacts
) -> Plan:
    """Return the plan that is traced instead of the layout: one data rank on the CPU."""
    data = None
    if config.head in ("text", "image"):
        # A classifier needs labels. Two stand for however many there are.
        data = DataPlan(train_cache="", labels=("0", "1"))
    # fp16 keeps as many bytes as bf16, in which the CPU's autocast computes.
    precision: Literal["fp32", "bf16"] = "bf16"
    if layout.precision == "fp32":
        precision = "fp32"
    return Plan(
        config=_config_of_trace(config, layout, facts),
        run_dir="",
        mesh=Mesh(tp=layout.mesh.tp, cp=layout.mesh.cp),
        engine="native",
        cp_method=config.strategy.context_method(),
        devices_per_rank=layout.devices_per_rank,
        device="cpu",
        backend="gloo",
        precision=precision,
        activation_checkpointing=layout.activation_checkpointing,
        batch=layout.batch,
        stream_parts=layout.stream_parts,
        lr=0.0,
        data=data,
        model_path=model_path,
        bidirectional=facts.bidirectional,
        first_position=facts.first_position or 0,
        predicted=Predicted(),
    )


def _config_of_trace(config: Config, layout: Layout, facts: ModelFacts) -> Config:
    """Return the config that is traced: one process, nothing compiled, no quantised weights."""
    update: dict[str, Any] = {
        "strategy": make(StrategyConfig, "single"),
        "compile": CompileConfig(),
        "memory": layout.config.memory,
    }
    if isinstance(config.adapter, LoRAConfig):
        # cost.memory counts the bytes of quantised weights.
        update["adapter"] = config.adapter.model_copy(update={"quantize": "none"})
    if config.compile.enabled:
        kernel = choose_by_facts(layout, facts).kernel
        if kernel == "masked" and not facts.keeps_scores:
            # The layout compiles, so its attention takes a mask. The trace compiles nothing and would
            # choose another kernel; sdpa keeps the masked one.
            update["model"] = config.model.model_copy(update={"attention": "sdpa"})
    return config.model_copy(update=update)


def _layer_counts(kinds: list[str], layers: int) -> tuple[int, int]:
    """Return two layer counts to trace.

    The extra layers of the second count contain each layer type in the model's own proportion, so
    the difference can be scaled to any depth. `kinds`: the type of each layer; empty if there is one.
    Raises Untraceable.
    """
    period = _period(kinds)
    if period > LONGEST_PATTERN:
        raise Untraceable("its layers do not repeat")
    few = period
    if period == 1 and layers >= 4:
        # 2 and 4 layers: extended to the 32 layers of an 8B model they gave 66.70 GiB, and a trace
        # of all layers gave 66.68.
        few = 2
    if 2 * few > layers:
        raise Untraceable("it has too few layers to go on from")
    return few, 2 * few


def _period(kinds: list[str]) -> int:
    """Return the least number of layers after which the types of layers repeat."""
    for period in range(1, len(kinds)):
        # A list repeats after `period` entries if it equals itself shifted by as many.
        if kinds[period:] == kinds[:-period]:
            return period
    return max(1, len(kinds))


def _key(inputs: dict[str, Any]) -> str:
    """Return the key under which a trace with these inputs is stored, by their content.

    Paths on disk, and keys of the config that do not change the training step, are left out.
    """
    config = inputs["plan"]["config"]
    sections = ("model", "adapter", "algorithm", "precision", "memory")
    of_step = {name: config[name] for name in sections}
    of_step["packing"] = config["data"]["packing"]
    plan = {**inputs["plan"], "config": of_step, "model_path": None, "batch": None}
    versions = [
        VERSION,
        __version__,
        metadata.version("torch"),
        metadata.version("transformers"),
    ]
    content = {**inputs, "plan": plan, "versions": versions}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


class _LinearInLayers(NamedTuple):
    """Bytes as a linear function of the number of layers: `outside` + layers × `per_layer`.

    `outside`: bytes outside of the blocks, such as those of the embedding and the last norm.
    """

    per_layer: int
    outside: int


def _measure_activations(inputs: dict[str, Any], layout: Layout) -> Activations:
    """Return activations in bytes per token of the micro-batch, measured at two depths.

    `copies` and `copies_kept` are not divided by the tokens: they are bytes on the rank, as (per
    layer, outside of the layers).
    """
    if layout.mesh.tp * layout.mesh.cp > 1:
        few, more = trace_in_child(inputs)
    else:
        few, more = trace_depths(inputs)
    tokens = layout.rows * layout.max_length / layout.mesh.cp

    def fit_line(few_bytes: int, more_bytes: int) -> _LinearInLayers:
        """Return the linear function that has these bytes at the two depths."""
        per_layer = (more_bytes - few_bytes) // (more.layers - few.layers)
        return _LinearInLayers(per_layer, few_bytes - few.layers * per_layer)

    saved = more.saved_at["loss"]
    saved_line = fit_line(few.saved_at["loss"], saved)
    live_forward = 0.0
    live_backward = 0.0
    live_loss_backward = more.peaks_at.get("-loss", 0) - saved
    # An encoder and a decoder have two blocks a layer. Those of the decoder save more: the last one,
    # where the peak is, runs on top of what all have saved.
    saved_by_block = saved_line.per_layer * more.layers / more.blocks
    for index in range(more.blocks):
        # A block runs on top of what the blocks up to it have saved.
        saved_by_blocks = (index + 1) * saved_by_block
        forward_peak = more.peaks_at[f"{index}"]
        backward_peak = more.peaks_at.get(f"-{index}", 0)
        live_forward = max(live_forward, forward_peak - saved_by_blocks)
        live_backward = max(live_backward, backward_peak - saved_by_blocks)
    return Activations(
        saved_block=saved_line.per_layer / tokens,
        saved_ends=saved_line.outside / tokens,
        live_forward=live_forward / tokens,
        live_backward=live_backward / tokens,
        live_loss=max(0, more.peaks_at["loss"] - saved) / tokens,
        live_loss_backward=max(0, live_loss_backward) / tokens,
        copies=fit_line(few.cast_bytes, more.cast_bytes),
        copies_kept=fit_line(few.cast_bytes_kept, more.cast_bytes_kept),
        source="trace",
    )


def trace_depths(inputs: dict[str, Any]) -> Iterator[DepthTrace]:
    """Yield a trace at each of the two depths in `inputs`. Raises Untraceable."""
    plan = Plan.model_validate(inputs["plan"])
    for layers in inputs["layers"]:
        overrides = {**plan.config.model.config, "num_hidden_layers": layers}
        for key in DECODER_LAYERS:
            if key in inputs["model"]:
                overrides[key] = layers
        model = plan.config.model.model_copy(update={"config": overrides})
        config = plan.config.model_copy(update={"model": model})
        yield trace_one_depth(
            plan.model_copy(update={"config": config}),
            inputs["rows"],
            inputs["length"],
            inputs["dtype"],
        )


def trace_in_child(inputs: dict[str, Any]) -> list[DepthTrace]:
    """Return a trace at each of the two depths, made in a process of their own.

    This process may be a rank of a real process group. Raises Untraceable.
    """
    code, out, err = run_module(
        "drumline.planner.trace", json.dumps(inputs, default=str), CHILD_SECONDS
    )
    if code is None:
        raise Untraceable(f"no answer within {CHILD_SECONDS} s")
    out_lines = out.strip().splitlines() or [""]
    if code or not out_lines[-1].startswith("["):
        err_lines = err.strip().splitlines() or ["it ended without a reason"]
        raise Untraceable(err_lines[-1])
    return [DepthTrace(**traced) for traced in json.loads(out_lines[-1])]


def _run_child() -> None:
    """Trace as rank 0 of a process group that sends nothing.

    The inputs are read from stdin; the result is the last line of stdout.
    """
    # context_parallel compares a forward in parts with a whole one, over all ranks. The fake process
    # group cannot do this. A real run does it at its start.
    context_parallel._same_in_parts = lambda *_: True
    inputs = json.load(sys.stdin)
    world_size = Plan.model_validate(inputs["plan"]).mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        print(json.dumps([asdict(traced) for traced in trace_depths(inputs)]))
    except Untraceable as reason:
        sys.exit(str(reason))
    finally:
        dist.destroy_process_group()


class _FixedScalars(TorchDispatchMode):
    """Answers what depends on values, which fake tensors do not have.

    Each number is 1, a condition has the value `condition`, and a selection by a condition takes all
    entries.
    """

    def __init__(self, condition: bool) -> None:
        super().__init__()
        self.condition = condition

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is local_scalar_dense.default:
            # `tensor.item()`, and a tensor as a condition of Python.
            return self._number(args[0])
        if func is _ATEN.nonzero.default:
            # How many entries are not 0 is not known: all of them, which is the most.
            condition = args[0]
            shape = (condition.numel(), condition.ndim)
            return torch.empty(shape, dtype=torch.int64, device=condition.device)
        if func is _ATEN.index.Tensor and _is_one_condition(args[1]):
            selected = args[0]
            condition = args[1][0]
            # The condition covers the first dimensions, which become one.
            rest = selected.shape[condition.ndim :]
            return selected.new_empty((condition.numel(), *rest))
        return func(*args, **(kwargs or {}))

    def _number(self, tensor: torch.Tensor) -> bool | int | float:
        """Return the value of a tensor with one entry."""
        if tensor.dtype == torch.bool:
            return self.condition
        if tensor.is_floating_point():
            return 1.0
        return 1


def _is_one_condition(indices: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the indices of a selection are one condition over the first dimensions."""
    types = [index.dtype for index in indices if index is not None]
    return types == [torch.bool] and indices[0] is not None


class Watch(LiveBytes):
    """Counts the bytes that live while one micro-batch of a model runs on FakeTensors.

    A place is `before_blocks`, a block's number, `after_blocks`, or `loss`; in backward it has a
    minus before it (`-0`, `-loss`).

    `peaks_at`: bytes at the peak in each place. `saved_at`: bytes when each place of forward begins.
    Both are of activations: what lived before, gradients of weights, and casts of weights to a lower
    precision (`cast_bytes`) are not counted.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__(fake=True)
        self.blocks = blocks
        self.place = "before_blocks"
        self.cast_bytes_at_loss = 0
        self.saved_at: dict[str, int] = {}
        self.peaks_at: dict[str, int] = {}
        self._gradients = Tags()
        # The newest result of a product that gives a weight's gradient.
        self._newest_gradient = Tags()
        self._casts = Tags()
        self._weights = set[int]()
        for parameter in model.parameters():
            self._weights |= self._storages(parameter.data)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._tag_gradient)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter_block, index), with_kwargs=True)
        blocks[-1].register_forward_hook(self._leave_blocks)

    def watch_objective(self, objective: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return an objective that enters the place `loss` first."""

        def watched(outputs: Any, batch: Any) -> Any:
            self.enter("loss")
            self.cast_bytes_at_loss = self.cast_bytes
            return objective(outputs, batch)

        return watched

    def enter(self, place: str) -> None:
        """Count what follows in `place`."""
        self.place = place
        if not place.startswith("-"):
            self.saved_at[place] = self.activations

    @property
    def cast_bytes(self) -> int:
        """Return the bytes of the casts of weights to a lower precision."""
        return self._bytes(self._casts)

    @property
    def activations(self) -> int:
        """Return the bytes of activations."""
        return self.current - self.base - self._bytes(self._gradients) - self.cast_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is wait_tensor.default:
            # A real one waits for a collective and returns its argument; a fake one makes a copy.
            return args[0]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_cast = func in (to_copy.default, _ATEN.to.dtype) and isinstance(result, torch.Tensor)
        # Autocast casts weights. The strategy counts these casts; they are no activations.
        if is_cast and self._storages(args[0]) & self._weights:
            self._tag(result, self._casts)
        if func is _ATEN.mm.default and current_graph_task_id() != -1:
            self._note_product(args, result)
        return result

    def _note_product(self, factors: Sequence[torch.Tensor], product: torch.Tensor) -> None:
        """Note the product of two matrices in backward as a gradient, if it is one of a weight.

        No factor is a weight then. Chunks use a weight several times, and autograd adds the gradients
        of all uses before it accumulates them. So earlier ones that still exist are gradients; the
        newest is one when it has been accumulated, or when the next is made.
        """
        weights = self._weights | self._casts.keys()
        for factor in factors:
            if self._storages(factor) & weights:
                return
        for key, reference in self._newest_gradient.items():
            if self._references.get(key) is reference:
                self._gradients[key] = reference
        self._newest_gradient = Tags()
        self._tag(product, self._newest_gradient)

    def _tag_gradient(self, parameter: torch.Tensor) -> None:
        """Note the gradient of a parameter as one."""
        assert parameter.grad is not None
        self._tag(parameter.grad, self._gradients)

    def _tag(self, tensor: torch.Tensor, table: Tags) -> None:
        """Note the storages of a tensor in a table, except those of weights."""
        for key in self._storages(tensor) - self._weights:
            if key in self._references:
                table[key] = self._references[key]

    def _storages(self, tensor: torch.Tensor) -> set[int]:
        """Return the addresses of the objects of a tensor's storages."""
        return {id(part.untyped_storage()) for part in plain_parts(tensor)}

    def _bytes(self, table: Tags) -> int:
        """Return the bytes of the storages of a table that still exist."""
        total = 0
        for key, reference in table.items():
            # Another storage may have come to the same address.
            if self._references.get(key) is reference:
                total += self._sizes.get(key, 0)
        return total

    def _note(self) -> None:
        """Note the peak in the place that runs."""
        super()._note()
        self.peaks_at[self.place] = max(self.peaks_at.get(self.place, 0), self.activations)

    def _enter_block(
        self, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Enter a block in forward; in backward its input's gradient goes into the block before."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        before = "-before_blocks"
        if index > 0:
            before = f"-{index - 1}"
        self._pass_on(hidden, f"{index}", before)

    def _leave_blocks(self, _module: Any, _args: Any, output: Any) -> None:
        """Leave the last block in forward, which backward enters first."""
        hidden = output[0] if isinstance(output, tuple) else output
        self._pass_on(hidden, "after_blocks", f"-{len(self.blocks) - 1}")

    def _pass_on(self, hidden: Any, place: str, place_of_gradient: str) -> None:
        """Enter the place of a hidden state, and later the place of its gradient."""
        if current_graph_task_id() != -1:
            # Backward computes the block again.
            return
        self.enter(place)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.enter(place_of_gradient))


class Untraceable(Exception):
    """A model cannot be traced, for this reason. The formula is used instead."""


@dataclass(frozen=True)
class DepthTrace:
    """The trace of one micro-batch of a model that is cut to `layers` layers, in bytes.

    `blocks`: how many blocks it has: one a layer, or two of an encoder and a decoder.

    `saved_at`, `peaks_at`: of activations by place (see `Watch`).
    `cast_bytes`: of autocast's casts of weights when the objective begins; `cast_bytes_kept`: of
    those that are left after forward.
    `peak`: at the peak of forward and backward, besides what lived before.
    """

    layers: int
    blocks: int
    saved_at: dict[str, int] = field(default_factory=dict)
    peaks_at: dict[str, int] = field(default_factory=dict)
    cast_bytes: int = 0
    cast_bytes_kept: int = 0
    peak: int = 0


class _Engine(NativeEngine):
    """A native engine without an optimizer, whose steps are not traced."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: DataParallelWrapper,
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        # Past NativeEngine's own __init__, which makes the optimizer.
        super(NativeEngine, self).__init__(plan, model, spread, around)
        self.optimizer = None
        self.model.train()


def trace_one_depth(plan: Plan, rows: int, length: int, dtype: str | None = None) -> DepthTrace:
    """Trace a micro-batch of `rows` × `length` tokens at the depth that the plan's config sets.

    `plan`: of one data rank, on the CPU. `dtype` (bf16): all weights are in this type, as FSDP2
    gathers them and DeepSpeed keeps them, and there is no autocast. Raises Untraceable.
    """
    config = plan.config
    model = _build_without_weights(plan, dtype)
    modules = _blocks_in_turn(model)
    if not next(model.parameters()).is_meta:
        raise Untraceable("it cannot be laid out without weights")
    layers = len(modules)
    if is_seq2seq(model):
        layers //= 2
    torch_dtype = None
    if dtype:
        torch_dtype = DTYPES[dtype]
    # `prepare` first tries a small copy of the model with real values (models.head.can_split). Then
    # it calls `_FakeValues.fill`, which turns FakeTensorMode on; no tensor has values after that.
    with contextlib.ExitStack() as stack:
        values = _FakeValues(
            NothingToFill(),
            "cpu",
            0,
            stack=stack,
            packs=config.packs,
            dtype=torch_dtype,
        )
        engine = prepare(plan, model, values, _Engine)
        if dtype:
            engine.autocast_dtype = None
        channels = int(getattr(model.config, "num_channels", 3))
        batch = config.algorithm.traced_batch(plan, rows, length, channels)
        watch = Watch(engine.model, modules)
        objective = watch.watch_objective(policy_objective(config.algorithm.build()))
        try:
            with watch, engine.micro_batch(last=True):
                with engine._autocast():
                    loss_sum, _ = engine.wrapper.train_module(batch, objective)
                cast_bytes_kept = watch.cast_bytes
                watch.enter("-loss")
                loss_sum.backward()
        except Exception as error:
            # A model's own code may raise anything if it meets tensors without values.
            raise Untraceable(f"{class_and_line(error)}: {first_line(error)}") from error
    return DepthTrace(
        layers=layers,
        blocks=len(modules),
        saved_at=watch.saved_at,
        peaks_at=watch.peaks_at,
        cast_bytes=watch.cast_bytes_at_loss,
        cast_bytes_kept=cast_bytes_kept,
        peak=watch.peak - watch.base,
    )


def _blocks_in_turn(model: Any) -> list[nn.Module]:
    """Return the blocks of a model in the order in which they run.

    Raises Untraceable if they are in no list.
    """
    if is_seq2seq(model):
        return [*blocks(model.get_encoder()), *blocks(model.get_decoder())]
    found = block_list(model)
    if found is None:
        raise Untraceable("its blocks are not in one list")
    _, block_modules = found
    return list(block_modules)


def _build_without_weights(plan: Plan, dtype: str | None) -> Any:
    """Return the model of a plan on the meta device, with its adapters.

    `dtype`: as for `trace_one_depth`.
    """
    config = plan.config
    model, _ = lay_out(
        plan.model_path,
        config.model.model_copy(update={"init": "random"}),
        0,
        head=ModelHead(config.head, plan.labels),
    )
    if config.head != "image":
        use_document_attention(model, plan, on_host=True)
    if config.head in LM and config.packs:
        separate_recurrent_layers(model, "cpu")
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, 0)
    if not dtype:
        cast_to_compute_dtype(plan, model)
    return model


@dataclass(frozen=True)
class _FakeValues(Values):
    """Values without memory: until `stack` is left, what is computed has shapes alone.

    `packs`: rows hold several documents. `dtype`: of parameters; None: as they are.
    """

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    packs: bool = False
    dtype: torch.dtype | None = None

    def fill(
        self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None
    ) -> None:
        """Replace each tensor on the meta device by a fake one; from then on no tensor has values.

        `owners`: the modules whose tensors are filled; None: all.
        """
        from drumline.vendor.transformers import masking_utils

        # If packs hold several documents, attention gets a mask; otherwise transformers finds that
        # none is needed, as in a run. It would make a mask if it knew of the tracing.
        self.stack.callback(setattr, masking_utils, "is_tracing", masking_utils.is_tracing)
        masking_utils.is_tracing = lambda *_, **__: False
        self.stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self.stack.enter_context(_FixedScalars(not self.packs))
        # Tied tensors stay tied.
        fakes: dict[int, torch.Tensor] = {}
        for owner in model.modules() if owners is None else owners:
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _fake_like(tensor, self.dtype)
                    table[name] = fakes[id(tensor)]  # type: ignore[assignment]


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a fake tensor like another one; a parameter in `dtype`, if that is given."""
    part = local(tensor.detach())
    if not isinstance(tensor, nn.Parameter):
        return as_dtensor_on_mesh_device(torch.empty(part.shape, dtype=part.dtype), tensor)
    fake = torch.empty(part.shape, dtype=dtype or part.dtype)
    return nn.Parameter(as_dtensor_on_mesh_device(fake, tensor), requires_grad=tensor.requires_grad)


if __name__ == "__main__":
    _run_child()
