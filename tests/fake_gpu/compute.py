"""The numbers that kernels would make, computed on the CPU over the same memory.

An operator on CUDA tensors runs twice. First as CUDA, with all of torch's checks, allocations,
streams and launches; the stand-in's kernels do nothing. Then on CPU tensors that lie in the same
memory, paused in the ledger.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_gpu.attention import UNBOUNDED, Attended, Attention, Mask
from tests.fake_gpu.ledger import LEDGER

Values = dict[str, Any]  # of arguments by their names
LARGEST_TENSOR = "FAKE_GPU_LARGEST_TENSOR"  # bytes; see `limit_to`
PLAIN_TYPES = {Tensor, torch.nn.Parameter}
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
    "aten::masked_scatter_backward",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
}
# Without cuDNN torch computes them sample by sample: thousands of launches for the patches of an image.
CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Product that may have a result of another type → the names of its factors.
FACTORS = {
    "aten::mm": ("self", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
}


class Call:
    """One call of an operator: `func` with `args` and `kwargs`."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Values) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.name = _name(func)
        self.tensors = _tensors([*args, *kwargs.values()])

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def on_cpu(self) -> Call:
        """Return the call on CPU tensors over the same memory."""
        kwargs = {name: _each(on_cpu, value) for name, value in self.kwargs.items()}
        return Call(self.func, _each(on_cpu, self.args), kwargs)

    def values(self) -> Values:
        """Return the arguments by their names in the schema, defaults included."""
        arguments = self.func._schema.arguments
        values = {argument.name: argument.default_value for argument in arguments}
        for argument, value in zip(arguments, self.args, strict=False):
            values[argument.name] = value
        return {**values, **self.kwargs}

    def is_on_device(self) -> bool:
        device = self.kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return True
        return any(tensor.is_cuda for tensor in self.tensors)

    def has_numbers(self) -> bool:
        """Return whether a kernel would compute something."""
        if self.func.namespace in COLLECTIVES or self.func.is_view or self.name in WITHOUT_NUMBERS:
            return False
        return not any(tensor.is_meta for tensor in self.tensors)

    def is_sized_by_numbers(self) -> bool:
        if self.name == "aten::repeat_interleave":
            return self.kwargs.get("output_size") is None
        if self.name not in INDEXING:
            return self.name in SIZED_BY_NUMBERS
        masks = [_is_mask(index) for index in self.args[1]]
        if self.name == "aten::index" or not any(masks):
            return any(masks)
        # torch writes one number to where masks are set without looking for the places.
        is_masked_fill = self.args[2].numel() == 1 and all(masks)
        return not is_masked_fill

    def random_seed(self) -> int | None:
        """Return a seed made of the state of the device's generator; None: nothing is drawn."""
        if not _is_random(self.func):
            return None
        generator = self.kwargs.get("generator")
        if generator is None or generator.device.type != "cuda":
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = bytes(generator.get_state().tolist())
        seed = int.from_bytes(state[:8], "little")
        offset = int.from_bytes(state[8:16], "little")
        return (seed * 1_000_003 + offset) % 2**62


class Computing(TorchDispatchMode):
    """Computes what the kernels of the stand-in leave out."""

    most_bytes: float = math.inf  # of each tensor; see `limit_to`

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Values | None = None,
    ) -> Any:
        call = Call(func, args, kwargs or {})
        kinds = {type(tensor) for tensor in call.tensors}
        if FakeTensor in kinds:
            return call.run()
        if not kinds <= PLAIN_TYPES:
            return NotImplemented  # a DTensor or the like: its parts come here
        if not call.is_on_device():
            return call.run()
        if func.namespace in COMPOSITE_NAMESPACES:
            with self:
                return call.run()
        if _may_be_view(func):
            with self:
                return func.decompose(*call.args, **call.kwargs)
        if not call.has_numbers():
            return call.run()
        if call.is_sized_by_numbers():
            return _answer_from_cpu(call)

        if any(tensor.nbytes > self.most_bytes for tensor in call.tensors):
            if call.name in CONVOLUTIONS:
                return _only_allocate(call)
            return call.run()

        random_seed = call.random_seed()
        result = call.run()
        with LEDGER.paused():
            _compute(call, result, random_seed)
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


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


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


def _answer_from_cpu(call: Call) -> Any:
    LEDGER.report_wait(f"size of {call.name}")
    LEDGER.count_launch(call.name)
    with LEDGER.paused():
        result = call.on_cpu().run()
        if call.name.endswith("_"):
            return call.args[0]
        device = next(tensor.device for tensor in call.tensors if tensor.is_cuda)
        return _each(lambda tensor: tensor.to(device), result)


def _only_allocate(call: Call) -> Any:
    """Return the results of a call without numbers, as if one kernel had made them."""
    LEDGER.count_launch(call.name)
    device = next(tensor.device for tensor in call.tensors if tensor.is_cuda)
    args = _each(lambda tensor: tensor.to("meta"), call.args)
    shapes = Call(call.func, args, call.kwargs).run()
    return _each(lambda tensor: torch.empty_like(tensor, device=device), shapes)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from `seed`, and leave the CPU's own generator as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _compute(call: Call, result: Any, random_seed: int | None) -> None:
    """Compute a call on the CPU and write what it gives into `result`, the tensors of the device."""
    on_host = call.on_cpu()
    own = OWN_FORMULAS.get(call.name)
    if own is not None:
        own(result, on_host.values())
        return

    options = on_host.kwargs
    if "device" in options:
        is_to_host = isinstance(result, Tensor) and not result.is_cuda
        options["device"] = result.device if is_to_host else torch.device("cpu")
    options.pop("pin_memory", None)
    if random_seed is not None and "generator" in options:
        options["generator"] = torch.Generator().manual_seed(random_seed)

    with _seeded(random_seed):
        if _is_mixed_product(call.func):
            computed = _mixed_product(on_host)
        else:
            computed = on_host.run()

    given = {id(tensor) for tensor in call.tensors}
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


@functools.cache
def _is_mixed_product(func: Any) -> bool:
    """Return whether the result has another type than the factors, which the CPU does not know."""
    return _name(func) in FACTORS and func._overloadname in ("dtype", "dtype_out")


def _mixed_product(on_host: Call) -> Tensor:
    values = on_host.values()
    first, second = FACTORS[on_host.name]
    product = values[first].float() @ values[second].float()
    if "beta" in values:
        product = values["beta"] * values["self"].float() + values["alpha"] * product
    if "out" in values:
        return values["out"].copy_(product)  # type: ignore[no-any-return]
    return product.to(values["out_dtype"])


def _scaled_product(result: Any, values: Values) -> None:
    """Products of fp8 factors, of which the CPU knows none."""
    left = values["self"].float() * values["scale_a"]
    right = values["mat2"].float() * values["scale_b"]
    product = left @ right
    if values["bias"] is not None:
        product = product + values["bias"].float()
    _write(result, product)


def _mask(values: Values) -> Mask:
    """Return the mask that a call of attention asks for."""
    left, right = values.get("window_size") or (UNBOUNDED, UNBOUNDED)
    if values["is_causal"]:
        right = 0
    return Mask(left, right)


def _attention(values: Values) -> Attention:
    query, key, value = values["query"], values["key"], values["value"]
    bias = values.get("attn_bias")
    return Attention(query, key, value, _mask(values), values["scale"], bias)


def _attention_forward(result: Any, values: Values) -> None:
    attended = _attention(values).forward()
    _write(result[0], attended.output_BHTD)
    if result[1].numel():  # the efficient kernel pads it to a multiple of 32
        queries = attended.log_sum_exp_BHT.shape[-1]
        on_cpu(result[1])[..., :queries].copy_(attended.log_sum_exp_BHT)


def _flash_backward(result: Any, values: Values) -> None:
    _attention_backward(result, values, values["grad_out"])


def _efficient_backward(result: Any, values: Values) -> None:
    _attention_backward(result, values, values["grad_out_"])


def _attention_backward(result: Any, values: Values, grad: Tensor) -> None:
    attended = Attended(values["out"], values["logsumexp"])
    gradients = _attention(values).backward(grad, attended)
    for target, gradient in zip(result, gradients, strict=False):  # not all give one of the bias
        if target is not None:
            _write(target, gradient)


class Document(NamedTuple):
    """The tokens of a document among the queries and among the keys, and what the former attend to."""

    queries: slice
    keys: slice
    attention: Attention


def _documents(values: Values) -> Iterator[Document]:
    """Yield the documents that have queries."""
    bounds_of_queries = itertools.pairwise(values["cu_seq_q"].tolist())
    bounds_of_keys = itertools.pairwise(values["cu_seq_k"].tolist())
    for of_queries, of_keys in zip(bounds_of_queries, bounds_of_keys, strict=True):
        queries = slice(*of_queries)
        keys = slice(*of_keys)
        if queries.start == queries.stop:
            continue

        query = _heads_first(values["query"][queries])
        key = _heads_first(values["key"][keys])
        value = _heads_first(values["value"][keys])
        attention = Attention(query, key, value, _mask(values), values["scale"])
        yield Document(queries, keys, attention)


def _heads_first(tokens_THD: Tensor) -> Tensor:
    return tokens_THD.transpose(0, 1)[None]


def _write_tokens(target_THD: Tensor, tokens: slice, source_1HTD: Tensor) -> None:
    source_THD = source_1HTD[0].transpose(0, 1)
    target_THD[tokens] = source_THD.to(target_THD.dtype)


def _varlen_forward(result: Any, values: Values) -> None:
    output_THD = on_cpu(result[0])
    log_sum_exp_HT = on_cpu(result[1])
    for queries, _, attention in _documents(values):
        attended = attention.forward()
        _write_tokens(output_THD, queries, attended.output_BHTD)
        log_sum_exp_HT[..., queries] = attended.log_sum_exp_BHT[0]


def _varlen_backward(result: Any, values: Values) -> None:
    grad_query, grad_key, grad_value = (on_cpu(target).zero_() for target in result[:3])
    for queries, keys, attention in _documents(values):
        output = _heads_first(values["out"][queries])
        attended = Attended(output, values["lse"][None, ..., queries])
        grad = _heads_first(values["grad_out"][queries])
        gradients = attention.backward(grad, attended)
        _write_tokens(grad_query, queries, gradients.query)
        _write_tokens(grad_key, keys, gradients.key)
        _write_tokens(grad_value, keys, gradients.value)


def _histogram(result: Any, values: Values) -> None:
    """The CPU counts no whole numbers, which routers of experts ask for."""
    numbers = values["self"].float()
    counts = torch.histc(numbers, values["bins"], values["min"], values["max"])
    _write(result, counts)


def _log_sigmoid_backward(result: Any, values: Values) -> None:
    """The CPU's formula reads a buffer of its forward, which a GPU leaves empty."""
    _write(result, values["grad_output"] * torch.sigmoid(-values["self"]))


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _layer_norm(result: Any, values: Values) -> None:
    """The CPU rounds the mean and the deviation to the type of the input; a GPU keeps them in fp32."""
    precise = _each(_at_least_fp32, list(values.values()))
    for target, source in zip(result, torch.native_layer_norm(*precise), strict=True):
        _write(target, source)


def _layer_norm_backward(result: Any, values: Values) -> None:
    """The CPU takes no mean of another type than the input's, which a GPU makes of 16 bits."""
    precise = _each(_at_least_fp32, list(values.values()))
    gradients = torch.ops.aten.native_layer_norm_backward(*precise)
    for target, source in zip(result, gradients, strict=True):
        if target is not None:
            _write(target, source)


OWN_FORMULAS: dict[str, Callable[[Any, Values], None]] = {
    "aten::histc": _histogram,
    "aten::_scaled_mm": _scaled_product,
    "aten::log_sigmoid_backward": _log_sigmoid_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_scaled_dot_product_flash_attention": _attention_forward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _attention_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "torch_attn::_varlen_attn": _varlen_forward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}
