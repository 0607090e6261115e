"""Activations of a layout by tracing our own engine at two numbers of layers: no memory, seconds, nothing but shapes.

`_FakeValues` gives tensors without memory (torch's FakeTensorMode), `Watch` counts what lives in each block while one micro-batch runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import drumline
from drumline.algorithms.base import policy_objective
from drumline.core.attention import choice_of
from drumline.core.config import CompileConfig, Config, LoRAConfig
from drumline.core.estimate import Activations
from drumline.core.facts import ModelFacts
from drumline.core.files import kept
from drumline.core.mesh import Mesh
from drumline.core.plan import DataPlan, Layout, Plan, Predicted
from drumline.core.process import run_module
from drumline.core.registry import make
from drumline.core.strategy import StrategySpec
from drumline.errors import DrumlineError
from drumline.foreign import class_and_line, first_line
from drumline.hardware.detect import cache_dir
from drumline.models import adapters
from drumline.models.attention import attend_by_documents
from drumline.models.blocks import block_list
from drumline.models.build import lay_out
from drumline.models.freeze import freeze
from drumline.models.load import load_config
from drumline.models.shards import Loaded, Values
from drumline.parallel import context_parallel
from drumline.parallel.data_parallel import Spread
from drumline.parallel.native import NativeEngine, prepare
from drumline.parallel.norms import distribute_alike, local
from drumline.parallel.transforms import DTYPES
from drumline.planner.cost.activations import by_kind, mixed
from drumline.strategies.build import keep_frozen_low
from drumline.telemetry.memory_tracker import LiveBytes, plain_parts
from drumline.vendor.torch import (
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    current_graph_task_id,
    local_scalar_dense,
    to_copy,
)

logger = logging.getLogger(__name__)
VERSION = 6  # part of the name of what is stored: raise it when a trace would come out otherwise than before
CHILD_SECONDS = 300
LONGEST_PATTERN = 8  # kinds of layers that repeat (five local ones, then a global one): no more than so many are traced twice
_ATEN = torch.ops.aten
Tags = dict[int, weakref.ref[torch.UntypedStorage]]


def trace(
    config: Config, model_path: str | None, layout: Layout, facts: ModelFacts
) -> Activations | None:
    """Bytes besides weights, gradients and moments while a micro-batch of `layout` runs: traced without memory at two numbers of layers,
    extended along a line, and kept on disk. On the CPU whatever the device: bf16 by the CPU's autocast, attention by its flash kernel, as
    a GPU's saves its result and one number a row. FSDP2 and ZeRO are traced as one process with weights in the type they are gathered
    in; tensor and context parallelism as rank 0 of torch's fake process group, in a child. None, and a line in the log, if it cannot."""
    if layout.config.memory.checkpointed_blocks is not None:
        some, rest = (trace(config, model_path, each, facts) for each in by_kind(layout))
        return mixed(layout, facts, some, rest) if some and rest else None
    try:
        question = question_of(config, model_path, layout, facts)
        stored = cache_dir() / "traces" / f"{_key(question)}.json"
        return kept(
            stored,
            Activations.model_validate_json,
            lambda: _activations(question, layout),
            Activations.model_dump_json,
        )
    except (Untraceable, DrumlineError) as reason:
        logger.warning("%s is not traced, its activations are by formula: %s", facts.name, reason)
        return None


def question_of(
    config: Config, model_path: str | None, layout: Layout, facts: ModelFacts
) -> dict[str, Any]:
    """All that a trace depends on, as JSON. `layers`: the two numbers of layers."""
    if facts.vision_language or (config.memory.activation_offload and layout.device == "cpu"):
        raise Untraceable(
            "it sees images of many sizes"
            if facts.vision_language
            else "what is offloaded stays in the same memory"
        )
    if layout.engine == "pipeline" and layout.mesh.tp * layout.mesh.cp > 1:
        raise Untraceable("its pipeline's stages are cut")
    plain: dict[str, Any] = {
        "strategy": make(StrategySpec, "single"),
        "compile": CompileConfig(),
        "memory": layout.config.memory,
    }
    if isinstance(config.adapter, LoRAConfig):
        plain["adapter"] = config.adapter.model_copy(update={"quantize": "none"})
    if (
        config.compile.enabled
        and choice_of(layout, facts).kernel == "masked"
        and not facts.keeps_scores
    ):
        # As it is where nothing is compiled.
        plain["model"] = config.model.model_copy(update={"attention": "sdpa"})
    plan = Plan(
        config=config.model_copy(update=plain),
        run_dir="",
        mesh=Mesh(tp=layout.mesh.tp, cp=layout.mesh.cp),
        engine="native",
        cp_method=config.strategy.context_method(),
        devices_per_rank=layout.devices_per_rank,
        device="cpu",
        backend="gloo",
        precision="fp32" if layout.precision == "fp32" else "bf16",
        activation_checkpointing=layout.activation_checkpointing,
        batch=layout.batch,
        stream_parts=layout.stream_parts,
        lr=0.0,
        data=DataPlan(train_cache="", labels=("0", "1"))
        if config.head in ("text", "image")
        else None,
        model_path=model_path,
        bidirectional=facts.bidirectional,
        first_position=facts.first_position or 0,
        predicted=Predicted(),
    )
    all_low = layout.pure or (layout.engine == "deepspeed" and plan.precision != "fp32")
    low = (
        plan.precision
        if all_low
        else config.strategy.gathered_in(plan.precision, config.images_alone)
    )
    hf_config = load_config(model_path, config.model)
    made = {
        "plan": json.loads(plan.model_dump_json()),
        "rows": layout.rows,
        "length": layout.length,
        "dtype": low,
    }
    made["model"] = hf_config.to_dict()
    return made | {
        "layers": _layers(
            getattr(hf_config.get_text_config(), "layer_types", None) or [], facts.layers
        )
    }


def _layers(kinds: list[str], layers: int) -> tuple[int, int]:
    """Two numbers of layers whose difference has the kinds of layers in the model's own proportion."""
    period = next(
        (
            p
            for p in range(1, len(kinds) + 1)
            if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))
        ),
        1,
    )
    if period > LONGEST_PATTERN:
        raise Untraceable("its layers do not repeat")
    few = 2 if period == 1 and layers >= 4 else period
    if 2 * few > layers:
        raise Untraceable("it has too few layers to go on from")
    return few, 2 * few


def _key(question: dict[str, Any]) -> str:
    """The key of a question by its content, without paths on disk and without what does not change the training step."""
    config = question["plan"]["config"]
    matters = {
        name: config[name] for name in ("model", "adapter", "algorithm", "precision", "memory")
    }
    plan = {
        **question["plan"],
        "config": {**matters, "packing": config["data"]["packing"]},
        "model_path": None,
        "batch": None,
    }
    versions = [
        VERSION,
        drumline.__version__,
        *(metadata.version(name) for name in ("torch", "transformers")),
    ]
    text = json.dumps({**question, "plan": plan, "versions": versions}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _activations(question: dict[str, Any], layout: Layout) -> Activations:
    few, more = in_child(question) if layout.mesh.tp * layout.mesh.cp > 1 else traces(question)
    tokens = layout.rows * layout.length / layout.mesh.cp

    def line(few_bytes: int, more_bytes: int) -> tuple[int, int]:
        """(of a block, of the ends) of what grows with the layers."""
        block = (more_bytes - few_bytes) // (more.layers - few.layers)
        return block, few_bytes - few.layers * block

    saved = more.saved_at["loss"]
    block, ends = line(few.saved_at["loss"], saved)
    # A block stands on what those up to it have saved.
    ahead = [more.peaks_at[str(i)] - (i + 1) * block for i in range(more.layers)]
    behind = [more.peaks_at.get(f"-{i}", 0) - (i + 1) * block for i in range(more.layers)]
    return Activations(
        saved_block=block / tokens,
        saved_ends=ends / tokens,
        live_forward=max(0, *ahead) / tokens,
        live_backward=max(0, *behind) / tokens,
        live_loss=max(0, more.peaks_at["loss"] - saved) / tokens,
        live_loss_backward=max(0, more.peaks_at.get("-loss", 0) - saved) / tokens,
        copies=line(few.copies, more.copies),
        copies_kept=line(few.copies_kept, more.copies_kept),
        source="trace",
    )


def traces(question: dict[str, Any]) -> Iterator[Traced]:
    """The traces at each of the question's numbers of layers."""
    plan = Plan.model_validate(question["plan"])
    for layers in question["layers"]:
        fewer = plan.config.model.model_copy(
            update={"config": {**plan.config.model.config, "num_hidden_layers": layers}}
        )
        config = plan.config.model_copy(update={"model": fewer})
        yield run(
            plan.model_copy(update={"config": config}),
            question["rows"],
            question["length"],
            question["dtype"],
        )


def in_child(question: dict[str, Any]) -> list[Traced]:
    """The traces, made in a process of their own: this one may be a rank of a real process group."""
    code, out, err = run_module(
        "drumline.planner.trace", json.dumps(question, default=str), CHILD_SECONDS
    )
    if code is None:
        raise Untraceable(f"no answer within {CHILD_SECONDS} s")
    last = (out.strip().splitlines() or [""])[-1]
    if code or not last.startswith("["):
        raise Untraceable((err.strip().splitlines() or ["it ended without a reason"])[-1])
    return [Traced(**traced) for traced in json.loads(last)]


def _child() -> None:
    """Trace as rank 0 of a process group that sends nothing: the question on stdin, the answer the last line of stdout."""
    # A proof needs ranks that answer; a run makes it.
    context_parallel._same_in_parts = lambda *_: True
    question = json.load(sys.stdin)
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=0,
        world_size=Plan.model_validate(question["plan"]).mesh.world_size,
    )
    try:
        print(json.dumps([asdict(traced) for traced in traces(question)]))
    except Untraceable as reason:
        sys.exit(str(reason))
    finally:
        dist.destroy_process_group()


class _FixedScalars(TorchDispatchMode):
    """Answers that depend on values: every number is 1, a condition holds if `yes`, and a selection by a condition takes all entries."""

    def __init__(self, yes: bool) -> None:
        super().__init__()
        self.yes = yes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is local_scalar_dense.default:
            return (
                self.yes
                if args[0].dtype == torch.bool
                else 1.0
                if args[0].is_floating_point()
                else 1
            )
        if func is _ATEN.nonzero.default:
            return torch.empty(
                (args[0].numel(), args[0].ndim), dtype=torch.int64, device=args[0].device
            )
        if (
            func is _ATEN.index.Tensor
            and [i.dtype for i in args[1] if i is not None] == [torch.bool]
            and args[1][0] is not None
        ):
            return args[0].new_empty((args[1][0].numel(), *args[0].shape[args[1][0].ndim :]))
        return func(*args, **(kwargs or {}))


class Watch(LiveBytes):
    """Follows one micro-batch of a model on FakeTensors.

    A place is `ahead` (of the blocks), a block's number, `behind` them, or `loss`; in backward the same with a minus (`-0`, `-loss`).
    `peaks_at`: bytes at the peak in each place; `saved_at`: bytes where each place of forward begins. Both are of activations: what
    lived before, gradients of weights, and copies of weights in a lower precision (`copies`) are counted apart.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__(fake=True)
        self.blocks = blocks
        self.place, self.copies_at_loss = "ahead", 0
        self.saved_at: dict[str, int] = {}
        self.peaks_at: dict[str, int] = {}
        self._gradients, self._copies, self._weights = Tags(), Tags(), set[int]()
        for parameter in model.parameters():
            self._weights |= self._keys(parameter.data)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: self._tag(p.grad, self._gradients)
                )
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._begins, index), with_kwargs=True)
        blocks[-1].register_forward_hook(self._ends)

    def objective(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def watched(outputs: Any, batch: Any) -> Any:
            self.at("loss")
            self.copies_at_loss = self.copies
            return inner(outputs, batch)

        return watched

    def at(self, place: str) -> None:
        self.place = place
        if not place.startswith("-"):
            self.saved_at[place] = self.activations

    @property
    def copies(self) -> int:
        return self._bytes(self._copies)

    @property
    def activations(self) -> int:
        return self.current - self.base - self._bytes(self._gradients) - self.copies

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if (
            func in (to_copy.default, _ATEN.to.dtype)
            and isinstance(result, torch.Tensor)
            and self._keys(args[0]) & self._weights
        ):
            self._tag(result, self._copies)
        return result

    def _tag(self, tensor: torch.Tensor, table: Tags) -> None:
        for key in self._keys(tensor) - self._weights:
            if key in self._references:
                table[key] = self._references[key]

    def _keys(self, tensor: torch.Tensor) -> set[int]:
        return {id(part.untyped_storage()) for part in plain_parts(tensor)}

    def _bytes(self, table: Tags) -> int:
        """The bytes of the storages that still exist (another may have come to the same address)."""
        return sum(
            self._sizes.get(key, 0)
            for key, reference in table.items()
            if self._references.get(key) is reference
        )

    def _note(self) -> None:
        super()._note()
        self.peaks_at[self.place] = max(self.peaks_at.get(self.place, 0), self.activations)

    def _begins(
        self, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._passes(
            str(index),
            args[0] if args else kwargs.get("hidden_states"),
            f"-{index - 1}" if index else "-ahead",
        )

    def _ends(self, _module: Any, _args: Any, output: Any) -> None:
        self._passes(
            "behind", output[0] if isinstance(output, tuple) else output, f"-{len(self.blocks) - 1}"
        )

    def _passes(self, place: str, hidden: Any, back: str) -> None:
        """`hidden` goes into a place; its gradient goes into `back`."""
        if current_graph_task_id() != -1:
            return  # computed again
        self.at(place)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.at(back))


class Untraceable(Exception):
    """Why a model cannot be traced; the formula is used instead."""


@dataclass(frozen=True)
class Traced:
    """Bytes of one micro-batch of a model of `layers` blocks. `saved_at`, `peaks_at`: of activations, by place, as `Watch` has them;
    `copies`: of weights when the objective begins, `copies_kept` when forward is through. `peak`: all that lives on top of what did
    before, in forward or backward."""

    layers: int
    saved_at: dict[str, int] = field(default_factory=dict)
    peaks_at: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    copies_kept: int = 0
    peak: int = 0


class _Engine(NativeEngine):
    """A native engine without an optimizer: nothing steps."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        spread: Spread,
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        super(NativeEngine, self).__init__(plan, model, spread, around)
        self.optimizer = None
        self.model.train()


def run(plan: Plan, rows: int, length: int, dtype: str | None = None) -> Traced:
    """Trace a micro-batch of `rows` × `length`. `plan`: of one data rank, on the CPU. `dtype` (bf16): weights lie in that type, as FSDP2
    gathers them and DeepSpeed keeps them, and there is no autocast. Raises Untraceable."""
    config = plan.config
    model, _ = lay_out(
        plan.model_path,
        config.model.model_copy(update={"init": "random"}),
        0,
        head=config.head,
        labels=plan.labels,
    )
    if config.head != "image":
        attend_by_documents(model, plan, on_host=True)
    freeze(model, config.model.freeze)
    if config.adapter.kind == "lora":
        adapters.inject(model, config.adapter, 0)
    if not dtype:
        keep_frozen_low(plan, model)
    if (found := block_list(model)) is None:
        raise Untraceable("its blocks are not in one list")
    if not next(model.parameters()).is_meta:
        raise Untraceable("it cannot be laid out without weights")
    # The objective's trials of a small copy run for real; from `fill` on nothing does.
    with contextlib.ExitStack() as stack:
        values = _FakeValues(
            Loaded(),
            "cpu",
            0,
            stack=stack,
            packs=config.packs,
            dtype=DTYPES[dtype] if dtype else None,
        )
        engine = prepare(plan, model, values, _Engine)
        engine.autocast_dtype = None if dtype else engine.autocast_dtype
        batch = config.algorithm.traced_batch(
            plan, rows, length, int(getattr(model.config, "num_channels", 3))
        )
        watch, objective = (
            Watch(engine.model, list(found[1])),
            policy_objective(config.algorithm.build()),
        )
        try:
            with watch, engine.micro_batch(last=True):
                with engine._autocast():
                    loss_sum, _ = engine.spread.module(batch, watch.objective(objective))
                copies_kept = watch.copies
                watch.at("-loss")
                loss_sum.backward()
        except Exception as error:
            raise Untraceable(f"{class_and_line(error)}: {first_line(error)}") from error
    return Traced(
        len(found[1]),
        watch.saved_at,
        watch.peaks_at,
        watch.copies_at_loss,
        copies_kept,
        watch.peak - watch.base,
    )


@dataclass(frozen=True)
class _FakeValues(Values):
    """Values without memory: until `stack` is left, what is computed has shapes alone. `packs`: rows hold several documents."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    packs: bool = False
    dtype: torch.dtype | None = None  # of parameters; None: as they are

    def fill(
        self, model: nn.Module, offloaded: bool = False, owners: Collection[nn.Module] | None = None
    ) -> None:
        from drumline.vendor.transformers import masking_utils

        # Where packs hold several documents, attention gets a mask; otherwise transformers finds none needed, as it does in a run. If it
        # knew of the tracing, it would make one.
        self.stack.callback(setattr, masking_utils, "is_tracing", masking_utils.is_tracing)
        masking_utils.is_tracing = lambda *_, **__: False
        self.stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self.stack.enter_context(_FixedScalars(not self.packs))
        made: dict[int, torch.Tensor] = {}  # tied ones stay tied
        tables = [
            table
            for owner in (model.modules() if owners is None else owners)
            for table in (owner._parameters, owner._buffers)
        ]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _empty(tensor, self.dtype)
                    table[name] = made[id(tensor)]  # type: ignore[assignment]


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A fake one like it; a parameter in `dtype`."""
    part = local(tensor.detach())
    fake = torch.empty(
        part.shape, dtype=(dtype if isinstance(tensor, nn.Parameter) else None) or part.dtype
    )
    fake = distribute_alike(fake, tensor)
    return (
        nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else fake
    )


if __name__ == "__main__":
    _child()
