"""Low-rank adapters (LoRA, Hu et al. 2021) by PEFT, injected into a model in place: its class and its blocks stay the same. An adapted
layer `q_proj` becomes PEFT's layer of that name with `base_layer` (frozen), `lora_A.default` and `lora_B.default`: y = base(x) + alpha / r
· B(A(dropout(x))). B starts at zero, so a fresh adapter changes nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from drumline.core.config import Adapter, LoRAConfig
from drumline.core.model import ModelConfig
from drumline.core.registry import nearest
from drumline.dist.seeds import derive, drawing
from drumline.errors import EnvironmentFault, ModelError
from drumline.models.blocks import blocks
from drumline.models.scores import extra_heads

NAME = "default"
A, B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
WHERE = "adapter.targets"


def require_trainable(adapter: LoRAConfig, model: ModelConfig) -> None:
    """Raises EnvironmentFault for a missing package, without importing it; ModelError for packed weights where none are loaded."""
    if adapter.quantize != "none" and model.id is None:
        raise ModelError("only weights that are loaded can be packed", where="adapter.quantize", fix="set model.id, or quantize=none")
    for package in ["peft", *(["bitsandbytes"] if adapter.quantize != "none" else [])]:
        if importlib.util.find_spec(package) is None:
            raise EnvironmentFault(f"the package {package} is missing", where="adapter", fix=f"pip install {package}")


def target_names(model: Any, adapter: LoRAConfig) -> list[str]:
    """Full names of the layers that get an adapter, in the model's order. Raises ModelError if `targets` matches none."""
    from drumline.vendor.transformers import Conv1D

    # Linear layers (also GPT-2's Conv1D) of the blocks; of the whole model but its head if it declares no blocks.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inner = {id(module) for block in blocks(model) or [model] for module in block.modules()} - {id(head)}
    linear = {name: module for name, module in model.named_modules() if id(module) in inner and isinstance(module, nn.Linear | Conv1D)}
    if not isinstance(adapter.targets, list) and getattr(model.config, "vision_config", None) is not None:
        # As usual for these models the vision tower gets no adapters, unless its layers are named.
        language = {id(module) for module in model.get_decoder().modules()}
        linear = {name: layer for name, layer in linear.items() if id(layer) in language}
    if not linear:
        raise ModelError(f"{type(model).__name__} has no linear layers in its blocks", where=WHERE, fix="use adapter=none for this model")
    if adapter.targets == "all-linear":
        return list(linear)
    own = sorted({name.rpartition(".")[2] for name in linear})
    offer = f"there are {', '.join(own)}"
    if adapter.targets == "attention":
        within = [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower()]
        chosen = [name for name in linear if any(name.startswith(f"{outer}.") for outer in within)]
        if not chosen:
            raise ModelError(f"{type(model).__name__} has no linear layers in an attention", where=WHERE, fix=offer)
        return chosen
    for ending in adapter.targets:
        if not any(_ends(name, ending) for name in linear):
            guess = nearest(ending, own)
            what = f"no linear layer in the blocks of {type(model).__name__} is named {ending!r}"
            raise ModelError(what, where=WHERE, fix=f"did you mean {guess}?" if guess else offer)
    return [name for name in linear if any(_ends(name, ending) for ending in adapter.targets)]


def inject(model: Any, adapter: LoRAConfig, seed: int) -> None:
    """Inject adapters into `target_names`, and freeze all else but heads that no language model has (scores, values, classes), which stay
    fully trainable. The values depend on `seed` alone, not on the number of ranks. A model on the meta device gets adapters there, to be
    filled with `first_values`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:  # `require_trainable` checks this for a run, but not for a plan alone
        raise EnvironmentFault("the package peft is missing", where="adapter", fix="pip install peft") from error

    names = target_names(model, adapter)
    alpha: Any = int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha  # other readers of the file require an integer
    options = LoraConfig(
        r=adapter.r,
        lora_alpha=alpha,
        lora_dropout=adapter.dropout,
        target_modules=_short(model, names),
        fan_in_fan_out=all(type(model.get_submodule(name)).__name__ == "Conv1D" for name in names),
        task_type="CAUSAL_LM",
    )
    meta = next(model.parameters()).is_meta
    with drawing(None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # blocks with layers of both kinds: PEFT mends it by layer
        inject_adapter_in_model(options, model, adapter_name=NAME, low_cpu_mem_usage=meta)
    heads = extra_heads(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name in heads)
        if is_adapter(name) and not meta:
            parameter.data.copy_(first_values(name, parameter.shape, seed))


def quantization(adapter: Adapter, precision: str) -> Any:
    """transformers' config for packed frozen linear layers (all but the head) in QLoRA (Dettmers et al. 2023); None: they are not packed.
    4bit: NormalFloat in blocks of 64 whose scales are quantised too, multiplied in the type of `precision`; 8bit: LLM.int8()."""
    if not isinstance(adapter, LoRAConfig) or adapter.quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    if adapter.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.endswith((A, B))


def first_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """The initial value of an adapter's parameter, unsharded, fp32 on the CPU: A as a linear layer (uniform, ±1/√in), B zero. Each name has
    its own random numbers: a rank with a part of the model draws the same as one with all of it."""
    values = torch.zeros(shape)
    if name.endswith(A):
        generator = torch.Generator().manual_seed(derive(seed, "adapter", name))
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


@contextlib.contextmanager
def switched(model: nn.Module, on: bool) -> Iterator[None]:
    """Within, adapters are on; with `on` False they add nothing, and the model is the base model. PEFT's own switch would also change which
    parameters are trainable, which FSDP2, DDP and DeepSpeed do not notice."""
    if on or not hasattr(model, "peft_config"):
        yield
        return
    from drumline.vendor.peft import BaseTunerLayer

    before = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer, _ in before:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in before:
            layer._disable_adapters = disabled


def merge(model: Any) -> None:
    """Add each adapter to its base layer, and put that layer back in its place. Raises ModelError for one that is not finite."""
    from drumline.vendor.peft import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            try:
                module.merge(safe_merge=True)
            except ValueError as error:
                raise ModelError(f"the adapter of {name} cannot be merged: {error}", where=WHERE) from None
            outer, _, own = name.rpartition(".")
            setattr(model.get_submodule(outer), own, module.get_base_layer())
    del model.peft_config


def require_trained(model: nn.Module) -> None:
    """Raises ModelError for a model without adapters, or with adapters that all add zero."""
    factors = [parameter for name, parameter in model.named_parameters() if name.endswith(B)]
    if not factors:
        raise ModelError("the model has no adapter", where="adapter", fix="name a run that was trained with adapter=lora")
    if not any(bool(factor.any()) for factor in factors):
        raise ModelError("the adapter is empty: every lora_B is zero", where="adapter", fix="train for a step first")


def save_adapter(model: Any, folder: Path, base: str, revision: str | None) -> None:
    """Write PEFT's own files (adapter_config.json, adapter_model.safetensors, fp32) to `folder`; PeftModel.from_pretrained reads them.
    `base`: the folder or hub id of the frozen model."""
    from peft import get_peft_model_state_dict

    require_trained(model)
    # PEFT's names are those within a PeftModel, which has the model as base_model.model.
    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    options, heads = model.peft_config[NAME], extra_heads(model)
    if heads:  # PEFT keeps whole modules under the names that they have in the model
        state |= {name: tensor for name, tensor in model.state_dict().items() if name in heads}
        options.task_type, options.modules_to_save = "SEQ_CLS", sorted({name.rpartition(".")[0] for name in heads})
    tensors = {f"base_model.model.{name}": value.detach().contiguous() for name, value in state.items()}
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert len(tensors) == trained, f"{len(tensors)} of {trained} trained tensors would be saved"
    options.base_model_name_or_path, options.revision, options.inference_mode = base, revision, True
    options.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _short(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names if they mean the same layers, as users write them and other readers expect them; else the full names."""
    own = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in model.named_modules() if any(_ends(name, ending) for ending in own)}
    return own if meant == set(names) else names
