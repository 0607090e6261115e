"""The numbers that kernels would make, computed on the CPU over the same memory.

An operator on CUDA tensors runs twice. First as CUDA, with all of torch's checks, allocations,
streams and launches; the stand-in's kernels do nothing. Then on CPU tensors that lie in the same
memory, paused in the ledger.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_gpu import attention
from tests.fake_gpu.attention import Attended, Mask
from tests.fake_gpu.ledger import LEDGER

LARGEST_TENSOR = "FAKE_GPU_LARGEST_TENSOR"  # bytes; see `limit_to`
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Collectives run for real, in the stand-in of NCCL.
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# Operators that are made of others, which come here one by one.
COMPOSITE_NAMESPACES = {"symm_mem"}
# Nothing to compute: they allocate, rename, or read on the host.
WITHOUT_NUMBERS = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::set_",
    "aten::resize_",
    "aten::_resize_output_",
    "aten::_local_scalar_dense",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::pin_memory",
    "aten::detach",
    "aten::lift_fresh",
}
# The size of the result hangs on the numbers, so the host waits for it on a GPU, and the CPU answers.
SIZED_BY_NUMBERS = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Computing(TorchDispatchMode):
    """Computes what the kernels of the stand-in leave out."""

    most_bytes: float = math.inf  # of each tensor; see `limit_to`

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, tuple(kwargs.values())))
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if any(type(tensor) not in PLAIN_TYPES for tensor in tensors):
            return NotImplemented  # a DTensor or the like: its parts come here
        if not _is_on_device(tensors, kwargs.get("device")):
            return func(*args, **kwargs)
        if func.namespace in COMPOSITE_NAMESPACES:
            with self:
                return func(*args, **kwargs)
        if _may_be_view(func):
            with self:
                return func.decompose(*args, **kwargs)
        if _has_no_numbers(func, tensors):
            return func(*args, **kwargs)
        if _is_sized_by_numbers(func, args, kwargs):
            return _answer_from_cpu(func, args, kwargs)

        if any(tensor.nbytes > self.most_bytes for tensor in tensors):
            return func(*args, **kwargs)

        random_seed = _random_seed(func, kwargs)
        result = func(*args, **kwargs)
        with LEDGER.paused():
            _compute(func, args, kwargs, result, random_seed)
        return result


MODE = Computing()


def limit_to(most_bytes: int) -> None:
    """Compute, copy and send nothing with larger tensors from here on: so they take no memory."""
    MODE.most_bytes = most_bytes
    LEDGER.limit_moves(most_bytes)


def install() -> None:
    """Compute from the moment a device is chosen on, in all threads that are started after it."""
    if LARGEST_TENSOR in os.environ:
        limit_to(int(os.environ[LARGEST_TENSOR]))
    set_device = torch.cuda.set_device
    run_thread = threading.Thread.run
    is_installed = False

    def run_thread_computing(thread: threading.Thread) -> None:
        with MODE:
            run_thread(thread)

    def set_device_and_compute(device: Any) -> None:
        nonlocal is_installed
        set_device(device)
        if not is_installed:
            is_installed = True
            MODE.__enter__()
            threading.Thread.run = run_thread_computing  # type: ignore[method-assign]

    torch.cuda.set_device = set_device_and_compute


def on_cpu(value: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a CUDA tensor; any other tensor as it is."""
    if value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0 or value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(whole, value.storage_offset(), value.shape, value.stride())


def _leaves(value: Any) -> list[Any]:
    """Return what a call's arguments or results hold, which nest in lists and tuples alone."""
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return arguments or results with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_each(change, part) for part in value])
    return value


def _call_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cpu_kwargs = {name: _each(on_cpu, value) for name, value in kwargs.items()}
    return _each(on_cpu, args), cpu_kwargs


def _is_on_device(tensors: list[Tensor], device: Any) -> bool:
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(tensor.device.type == "cuda" for tensor in tensors)


@functools.cache
def _name(func: Any) -> str:
    name: str = func._schema.name
    return name


@functools.cache
def _is_random(func: Any) -> bool:
    arguments = [argument.name for argument in func._schema.arguments]
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in arguments


@functools.cache
def _may_be_view(func: Any) -> bool:
    """Return whether an operator gives a view or a copy, by its arguments: `to`, `reshape`, `contiguous`.

    Their schemas call all of them views. Beneath autograd, as in a kernel that is written in Python,
    they come here whole; of what they are made, only a copy has numbers.
    """
    return func.is_view and func._can_decompose()  # type: ignore[no-any-return]


def _has_no_numbers(func: Any, tensors: list[Tensor]) -> bool:
    if func.namespace in COLLECTIVES or func.is_view or _name(func) in WITHOUT_NUMBERS:
        return True
    return any(tensor.device.type == "meta" for tensor in tensors)


def _is_sized_by_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = _name(func)
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name not in INDEXING:
        return name in SIZED_BY_NUMBERS
    masks = [isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]]
    if name == "aten::index" or not any(masks):
        return any(masks)
    # torch writes one number to where masks are set without looking for the places.
    is_masked_fill = args[2].numel() == 1 and all(masks)
    return not is_masked_fill


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device that a call's tensors are on."""
    tensors = _tensors((args, tuple(kwargs.values())))
    return next(tensor.device for tensor in tensors if tensor.device.type == "cuda")


def _answer_from_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    LEDGER.report_wait(f"size of {_name(func)}")
    LEDGER.count_launch(_name(func))
    with LEDGER.paused():
        cpu_args, cpu_kwargs = _call_on_cpu(args, kwargs)
        result = func(*cpu_args, **cpu_kwargs)
        if _name(func).endswith("_"):
            return args[0]
        device = _device_of(args, kwargs)
        return _each(lambda tensor: tensor.to(device), result)


def _random_seed(func: Any, kwargs: dict[str, Any]) -> int | None:
    """Return a seed made of the state of the device's generator; None: nothing is drawn."""
    if not _is_random(func):
        return None
    generator = kwargs.get("generator")
    if generator is None or generator.device.type != "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = bytes(generator.get_state().tolist())
    seed = int.from_bytes(state[:8], "little")
    offset = int.from_bytes(state[8:16], "little")
    return (seed * 1_000_003 + offset) % 2**62


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from `seed`, and leave the CPU's own generator as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _compute(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    random_seed: int | None,
) -> None:
    """Compute `func` on the CPU and write what it gives into `result`, the tensors of the device."""
    cpu_args, cpu_kwargs = _call_on_cpu(args, kwargs)
    own = OWN_FORMULAS.get(_name(func))
    if own is not None:
        own(result, _named(func, cpu_args, cpu_kwargs))
        return
    if "device" in cpu_kwargs:
        is_to_host = isinstance(result, Tensor) and result.device.type != "cuda"
        cpu_kwargs["device"] = result.device if is_to_host else torch.device("cpu")
    cpu_kwargs.pop("pin_memory", None)
    if random_seed is not None and "generator" in cpu_kwargs:
        cpu_kwargs["generator"] = torch.Generator().manual_seed(random_seed)
    with _seeded(random_seed):
        computed = _mixed_product(func, cpu_args, cpu_kwargs)
        if computed is None:
            computed = func(*cpu_args, **cpu_kwargs)
    given = {id(tensor) for tensor in _tensors((args, tuple(kwargs.values())))}
    for target, source in zip(_leaves(result), _leaves(computed), strict=True):
        if isinstance(target, Tensor) and id(target) not in given:
            _write(target, source)


def _write(target: Tensor, source: Tensor) -> None:
    if target.numel() == 0:
        return
    view = on_cpu(target)
    if view.shape != source.shape:
        source = source.reshape(view.shape)
    view.copy_(source)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema, defaults included."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value
    return values


def _mixed_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return a product whose result has another type than its factors: the CPU knows none of them.
    None: it is not such a product."""
    name, overload = _name(func), func._overloadname
    if name == "aten::_scaled_mm":
        values = _named(func, args, kwargs)
        left = values["self"].float() * values["scale_a"]
        right = values["mat2"].float() * values["scale_b"]
        product = left @ right
        return product if values["bias"] is None else product + values["bias"].float()
    if overload not in ("dtype", "dtype_out"):
        return None
    values = _named(func, args, kwargs)
    if name in ("aten::mm", "aten::bmm"):
        product = values["self"].float() @ values["mat2"].float()
    elif name in ("aten::addmm", "aten::baddbmm"):
        factors = ("mat1", "mat2") if name == "aten::addmm" else ("batch1", "batch2")
        left, right = (values[factor].float() for factor in factors)
        product = values["beta"] * values["self"].float() + values["alpha"] * (left @ right)
    else:
        return None
    if overload == "dtype_out":
        values["out"].copy_(product)
        return values["out"]  # type: ignore[no-any-return]
    return product.to(values["out_dtype"])


def _flash_forward(result: Any, values: dict[str, Any]) -> None:
    mask = Mask.of(values["is_causal"])
    query, key, value = values["query"], values["key"], values["value"]
    output, log_sum_exp = attention.forward(query, key, value, mask, values["scale"])
    _write(result[0], output)
    _write(result[1], log_sum_exp)


def _gradients(grad_out: Any, values: dict[str, Any], bias: Any = None) -> Any:
    """Return the gradients of queries, keys, values and bias of one call of attention."""
    query, key, value = values["query"], values["key"], values["value"]
    attended = Attended(values["out"], values["logsumexp"])
    mask = Mask.of(values["is_causal"])
    return attention.backward(grad_out, query, key, value, attended, mask, values["scale"], bias)


def _flash_backward(result: Any, values: dict[str, Any]) -> None:
    gradients = _gradients(values["grad_out"], values)
    for target, gradient in zip(result, gradients, strict=False):
        _write(target, gradient)


def _efficient_forward(result: Any, values: dict[str, Any]) -> None:
    mask = Mask.of(values["is_causal"])
    query, key, value = values["query"], values["key"], values["value"]
    bias = values["attn_bias"]
    output, log_sum_exp = attention.forward(query, key, value, mask, values["scale"], bias)
    _write(result[0], output)
    if result[1].numel():  # padded to a multiple of 32
        on_cpu(result[1])[..., : log_sum_exp.shape[-1]].copy_(log_sum_exp)


def _efficient_backward(result: Any, values: dict[str, Any]) -> None:
    gradients = _gradients(values["grad_out_"], values, values["attn_bias"])
    for target, gradient in zip(result, gradients, strict=True):
        if target is not None:
            _write(target, gradient)


def _document_bounds(values: dict[str, Any], names: tuple[str, str]) -> list[tuple[slice, slice]]:
    """Return the tokens of each document that has any, among the queries and among the keys."""
    queries = values[names[0]].tolist()
    keys = values[names[1]].tolist()
    bounds = []
    for index in range(len(queries) - 1):
        query_tokens = slice(queries[index], queries[index + 1])
        key_tokens = slice(keys[index], keys[index + 1])
        if query_tokens.stop > query_tokens.start:
            bounds.append((query_tokens, key_tokens))
    return bounds


def _heads_first(tokens_THD: Tensor) -> Tensor:
    return tokens_THD.transpose(0, 1)[None]


def _tokens_first(heads_1HTD: Tensor) -> Tensor:
    return heads_1HTD[0].transpose(0, 1)


def _varlen_forward(result: Any, values: dict[str, Any]) -> None:
    left, right = values["window_size"] or (None, None)
    mask = Mask.of(values["is_causal"], left, right)
    output_THD = on_cpu(result[0])
    log_sum_exp_HT = on_cpu(result[1])
    for queries, keys in _document_bounds(values, ("cu_seq_q", "cu_seq_k")):
        query = _heads_first(values["query"][queries])
        key = _heads_first(values["key"][keys])
        value = _heads_first(values["value"][keys])
        output, log_sum_exp = attention.forward(query, key, value, mask, values["scale"])
        output_THD[queries] = _tokens_first(output).to(output_THD.dtype)
        log_sum_exp_HT[..., queries] = log_sum_exp[0]


def _varlen_backward(result: Any, values: dict[str, Any]) -> None:
    left, right = values["window_size"] or (None, None)
    mask = Mask.of(values["is_causal"], left, right)
    grad_query, grad_key, grad_value = (on_cpu(target) for target in result[:3])
    for target in (grad_query, grad_key, grad_value):
        target.zero_()
    for queries, keys in _document_bounds(values, ("cu_seq_q", "cu_seq_k")):
        attended = Attended(_heads_first(values["out"][queries]), values["lse"][None, ..., queries])
        gradients = attention.backward(
            _heads_first(values["grad_out"][queries]),
            _heads_first(values["query"][queries]),
            _heads_first(values["key"][keys]),
            _heads_first(values["value"][keys]),
            attended,
            mask,
            values["scale"],
        )
        grad_query[queries] = _tokens_first(gradients.query).to(grad_query.dtype)
        grad_key[keys] = _tokens_first(gradients.key).to(grad_key.dtype)
        grad_value[keys] = _tokens_first(gradients.value).to(grad_value.dtype)


def _histogram(result: Any, values: dict[str, Any]) -> None:
    """The CPU counts no whole numbers, which routers of experts ask for."""
    numbers = values["self"].float()
    counts = torch.histc(numbers, values["bins"], values["min"], values["max"])
    _write(result, counts)


def _log_sigmoid_backward(result: Any, values: dict[str, Any]) -> None:
    """The CPU's formula reads a buffer of its forward, which a GPU leaves empty."""
    _write(result, values["grad_output"] * torch.sigmoid(-values["self"]))


OWN_FORMULAS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "aten::histc": _histogram,
    "aten::log_sigmoid_backward": _log_sigmoid_backward,
    "aten::_scaled_dot_product_flash_attention": _flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "torch_attn::_varlen_attn": _varlen_forward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}
