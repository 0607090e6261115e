"""Count the bytes that the kernels of a decoder block move, eager and compiled by Inductor.

    python -m benchmarks.compiled_bytes [--out FILE.json]

No GPU is needed. Eager kernels are counted at torch's dispatcher. Of a compiled block, Inductor's
scheduler is asked what each of its fused kernels reads and writes, before any code is generated; the
block's graphs then run as they are. Matrix products and attention are left out, since the planner
counts them by their FLOPs. planner.cost.fitted has the differences, and tests/unit/test_compiled_bytes
holds it to what is counted here.

The scheduler is that of the device on which the block lies. `--device cuda` also runs over the stand-in
of tests/fake_gpu, slowly: attention then takes grouped queries without copies of keys and values.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._inductor import compile_fx, graph, scheduler
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# Sizes of the block: those of Llama-3.1-8B in the same proportions, an eighth as wide. With so many
# tokens the bytes of its norms' weights are few.
HIDDEN = 512
INNER = HIDDEN * 7 // 2
HEADS = 32
TOKENS = 256
# Operators whose time follows from their FLOPs.
BY_FLOPS = ("mm", "addmm", "bmm", "attention", "grouped_mm")


class _Counted(BaseException):
    """Ends a compilation once its kernels are counted; no Exception, which Inductor would wrap."""


@dataclass
class Pass:
    """What one pass of a block takes. `moved`: bytes for each token and entry of the hidden width.

    `kernels`: all that are started, products and attention included.
    """

    moved: float = 0.0
    kernels: int = 0

    def note(self, bytes_: int, by_flops: bool) -> None:
        """Count a kernel, and its bytes if its time does not follow from its FLOPs."""
        self.kernels += 1
        if not by_flops:
            self.moved += bytes_ / (HIDDEN * TOKENS)


class Work(NamedTuple):
    """What is counted: a function of some inputs, which are trainable."""

    run: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]

    def with_checkpointing(self) -> Work:
        """Return the same work, of which backward computes the forward again."""

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.run, *inputs, use_reentrant=False)
            return result

        return Work(run, self.inputs)


@dataclass
class Block:
    """What both passes of a block take."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)

    @property
    def moved(self) -> float:
        """Return the bytes of both passes for each token and entry of the hidden width."""
        return self.forward.moved + self.backward.moved


class EagerKernels(TorchDispatchMode):
    """Counts the kernels that start while it is entered, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Pass()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        outputs = _storages(result)
        # A view starts no kernel: it has the storage of its input.
        is_view = not func._schema.is_mutable and outputs.keys() <= inputs.keys()
        if outputs and not is_view and not func.__name__.startswith("empty"):
            written = sum(outputs.values())
            read = sum(size for key, size in inputs.items() if _is_read(func, key, args))
            self.counted.note(read + written, _is_by_flops(str(func)))
        return result


def _storages(values: Any) -> dict[int, int]:
    """Return the storages of all tensors in a structure, with the bytes of the largest tensor in each."""
    sizes: dict[int, int] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            # A tensor that is broadcast has fewer bytes than entries.
            bytes_ = min(leaf.numel() * leaf.element_size(), storage.nbytes())
            key = storage.data_ptr()
            sizes[key] = max(sizes.get(key, 0), bytes_)
    return sizes


def _is_read(func: Any, key: int, args: tuple[Any, ...]) -> bool:
    """Return whether an operator reads a storage: `copy_` and `fill_` only write their first one."""
    only_writes = func.__name__.split(".")[0] in ("copy_", "fill_", "zero_")
    is_first = bool(args) and key in _storages(args[0])
    return not (only_writes and is_first)


def _is_by_flops(name: str) -> bool:
    """Return whether an operator is a matrix product or attention, by its name."""
    operator = name.removeprefix("aten.").split(".")[0]
    return operator in BY_FLOPS or "attention" in operator


def _counting_compiler(into: Block) -> Callable[..., Any]:
    """Return a compiler for Inductor's graphs that counts the kernels, and runs the graph itself."""

    def compile_graph(module: Any, inputs: Any, **options: Any) -> Any:
        # Inductor changes the graph that it compiles.
        unchanged = copy.deepcopy(module)
        counted = into.backward if options.get("is_backward") else into.forward

        def count(lowered: Any) -> None:
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            for node in lowered.scheduler.nodes:
                _note_node(counted, node)
            raise _Counted

        without_code = mock.patch.object(graph.GraphLowering, "codegen", count)
        # What is in the cache has no schedule.
        without_cache = inductor_config.patch(fx_graph_cache=False)
        with without_code, without_cache, contextlib.suppress(_Counted):
            compile_fx.compile_fx_inner(module, inputs, **options)
        return compile_fx.make_boxed_func(unchanged.forward)

    return compile_graph


def _note_node(counted: Pass, node: Any) -> None:
    """Count a node of Inductor's schedule, which is one kernel."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        inner = node.node
        name = str(getattr(inner, "op_overload", None) or getattr(inner, "python_kernel_name", ""))
        name = name.replace("extern_kernels.", "").replace("torch.ops.", "")
        # One of the outputs of the kernel before it.
        if type(inner).__name__ == "MultiOutput":
            return
        counted.note(node.get_read_write_buffers_sizes(), _is_by_flops(name))
        return
    counted.note(node.get_read_write_buffers_sizes(), by_flops=False)


def llama_block(device: str) -> Work:
    """Return the work of a Llama's block in bf16 with grouped queries."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    # No field of its class, which passes it on.
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 4,
        **attention,
    )
    block = LlamaDecoderLayer(config, 0).to(device, torch.bfloat16)
    states = _random(HIDDEN, device)
    positions = torch.arange(TOKENS)[None].to(device)
    cos, sin = LlamaRotaryEmbedding(config).to(device)(states, positions)

    def run(states: torch.Tensor) -> torch.Tensor:
        out = block(states, position_embeddings=(cos, sin), attention_mask=None)
        result: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
        return result

    return Work(run, (states,))


def gated_product(device: str) -> Work:
    """Return the work of SiLU(gate) × up, which a mixture leaves eager under expert parallelism."""

    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up

    return Work(run, (_random(INNER, device), _random(INNER, device)))


def _random(width: int, device: str) -> torch.Tensor:
    """Return trainable random states, bf16[1, TOKENS, width]."""
    return torch.randn(1, TOKENS, width, dtype=torch.bfloat16).to(device).requires_grad_()


@contextlib.contextmanager
def _eager(into: Pass) -> Iterator[None]:
    """Count the eager kernels of a `with` block into a pass."""
    kernels = EagerKernels()
    with kernels:
        yield
    into.moved += kernels.counted.moved
    into.kernels += kernels.counted.kernels


def count_eager(work: Work) -> Block:
    """Return what the eager kernels of some work take."""
    counted = Block()
    with _eager(counted.forward):
        out = work.run(*work.inputs)
    gradient = torch.ones_like(out)
    with _eager(counted.backward):
        out.backward(gradient)
    return counted


def count_compiled(work: Work) -> Block:
    """Return what the kernels take that Inductor makes of some work."""
    counted = Block()
    compiler = _counting_compiler(counted)

    def backend(module: Any, example_inputs: Any) -> Any:
        return compile_fx.compile_fx(module, example_inputs, inner_compile=compiler)

    torch._dynamo.reset()
    out = torch.compile(work.run, backend=backend, fullgraph=True)(*work.inputs)
    out.backward(torch.ones_like(out))
    return counted


def count_all(device: str = "cpu") -> dict[str, dict[str, Block]]:
    """Return the counts of each work, eager and compiled."""
    works = {
        "block": llama_block(device),
        "checkpointed block": llama_block(device).with_checkpointing(),
        "gated product": gated_product(device),
    }
    found = {}
    for name, work in works.items():
        found[name] = {"eager": count_eager(work), "compiled": count_compiled(work)}
    return found


def main() -> None:
    """Print the counts, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--device", default="cpu", help="where the block lies: cpu or cuda")
    options = parser.parse_args()
    found = count_all(options.device)
    print("bytes for each token and entry of the hidden width, and kernels")
    for name, by_kind in found.items():
        for kind, block in by_kind.items():
            forward, backward = block.forward, block.backward
            print(
                f"{name:19} {kind:8} forward {forward.moved:6.1f} ({forward.kernels:3} kernels)"
                f"  backward {backward.moved:6.1f} ({backward.kernels:3})  sum {block.moved:6.1f}"
            )
    if options.out is not None:
        content = {name: {k: asdict(v) for k, v in kinds.items()} for name, kinds in found.items()}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
