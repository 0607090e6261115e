"""transformers' names: what its documentation does not show."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import FunctionType
from typing import Any

from drumline.vendor import names

PLACES = {
    "Conv1D": "transformers.pytorch_utils:Conv1D",
    "ContinuousBatchingLogitsProcessorList": (
        "transformers.generation.continuous_batching.cb_logits_processors:ContinuousBatchingLogitsProcessorList"
    ),
    "DynamicLayer": "transformers.cache_utils:DynamicLayer",
    "DynamicSlidingWindowLayer": "transformers.cache_utils:DynamicSlidingWindowLayer",
    "GenericForSequenceClassification": (
        "transformers.modeling_layers:GenericForSequenceClassification"
    ),
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": (
        "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    ),
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING": (
        "transformers.models.auto.modeling_auto:MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
    ),
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "transformers.models.auto.modeling_auto:MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": (
        "transformers.models.auto.modeling_auto:MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    ),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "transformers.models.auto.modeling_auto:MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "WeightRenaming": "transformers.core_model_loading:WeightRenaming",
    "and_masks": "transformers.masking_utils:and_masks",
    "cached_file": "transformers.utils.hub:cached_file",
    "find_packed_sequence_indices": "transformers.masking_utils:find_packed_sequence_indices",
    "get_checkpoint_conversion_mapping": "transformers.conversion_mapping:get_checkpoint_conversion_mapping",
    "get_model_conversion_mapping": "transformers.conversion_mapping:get_model_conversion_mapping",
    "glm_smart_resize": "transformers.models.glm4v.image_processing_pil_glm4v:smart_resize",
    "grouped_linear": "transformers.integrations.moe:_grouped_linear",
    "image_size_to_num_patches": (
        "transformers.models.llava_onevision.modeling_llava_onevision:image_size_to_num_patches"
    ),
    "initialization": "transformers.initialization",
    "masking_utils": "transformers.masking_utils",
    "packed_sequence_mask_function": "transformers.masking_utils:packed_sequence_mask_function",
    "register_checkpoint_conversion_mapping": (
        "transformers.conversion_mapping:register_checkpoint_conversion_mapping"
    ),
    "sdpa_attention_forward": "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    "smart_resize": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:smart_resize",
}
MEMBERS = {
    "transformers:PreTrainedConfig": ("_attn_implementation",),
    "transformers:GenerationMixin": ("_has_unfinished_sequences",),
    "transformers.modeling_layers:GradientCheckpointingLayer": ("_gradient_checkpointing_func",),
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts": ("_apply_gate",),
    "transformers:PreTrainedModel": (
        "_from_config",
        "_is_hf_initialized",
        "_no_split_modules",
        "_supports_attention_backend",
        "_supports_sdpa",
        "_tied_weights_keys",
        "_tp_plan",
    ),
}
_is_end_known_to_host: ContextVar[bool] = ContextVar("is_end_known_to_host", default=False)
__getattr__ = names("transformers", "5.17.0", "5.23.0", PLACES)
_find = __getattr__


def packed_mask(
    mask_function: Callable[..., Any], positions_BT: Any, documents_BT: Any
) -> Callable[..., Any]:
    """Which tokens may meet where rows hold several documents: those of one document for which `mask_function` holds.

    Newer versions call it with places in the document (5.23), older ones with places in the row (5.17), as their models do.
    """
    together = getattr(_find("masking_utils"), "packed_sequence_compatibility_function", None)
    if together is not None:
        return together(mask_function, positions_BT, documents_BT)
    return _find("and_masks")(mask_function, _find("packed_sequence_mask_function")(documents_BT))


def kernel_packages(model_class: type) -> dict[str, bool]:
    """Return distribution → whether its kernels are in use, for all that the functions of a model's module can use.

    Without the package such a function is transformers' own torch code. Older versions have no such functions.
    """
    hub_kernels = import_module("transformers.integrations.hub_kernels")
    distributions: dict[str, str] = getattr(hub_kernels, "_PACKAGE_TO_DISTRIBUTION", {})
    packages = {}
    for _, given in _functions_with_kernels(model_class):
        package = given["package"]
        name = distributions.get(package, package).replace("_", "-")
        packages[name] = bool(given["is_new_implementation"])
    return packages


@contextmanager
def torch_functions(model_class: type) -> Iterator[None]:
    """Let the functions of a model's module be transformers' torch code, also where kernels for GPUs are installed."""
    module = sys.modules[model_class.__module__]
    replaced = {}
    for name, given in _functions_with_kernels(model_class):
        if given["is_new_implementation"]:
            replaced[name] = getattr(module, name)
            setattr(module, name, given["torch_function"])
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(module, name, function)


def _functions_with_kernels(model_class: type) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and variables of each function that `use_kernel_func_from_hub_with_fallback` has decorated in a model's module."""
    found = []
    for name, function in vars(sys.modules[model_class.__module__]).items():
        if isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            variables = inspect.getclosurevars(function).nonlocals
            if "is_new_implementation" in variables and "package" in variables:
                found.append((name, variables))
    return found


def import_without_torchao() -> None:
    """Import transformers' quantizers and leave torchao for whoever needs it: its import takes seconds and initialises CUDA, after
    which no fork of the process can use a GPU."""
    utils: Any = import_module("transformers.utils")
    is_torchao_available = utils.is_torchao_available
    utils.is_torchao_available = lambda *_: False
    try:
        quantizer: Any = import_module("transformers.quantizers.quantizer_torchao")
    finally:
        utils.is_torchao_available = is_torchao_available
    quantizer.is_torchao_available = is_torchao_available
    # Its only name of torchao's.
    quantizer.flatten_tensor_state_dict = _flatten_tensor_state_dict


def _flatten_tensor_state_dict(state: Any) -> Any:
    return import_module(
        "torchao.prototype.safetensors.safetensors_support"
    ).flatten_tensor_state_dict(state)


@contextmanager
def ask_the_host(model: Any, goes_on: Callable[..., bool]) -> Iterator[None]:
    """Let a model's `generate` ask `goes_on` before each token, in the place of a tensor on the device, for which the host would wait."""
    _replace_stop_check(import_module("transformers.generation.utils"))
    token = _is_end_known_to_host.set(True)
    model._has_unfinished_sequences = goes_on
    try:
        yield
    finally:
        del model._has_unfinished_sequences
        _is_end_known_to_host.reset(token)


def _replace_stop_check(utils: Any) -> None:
    """Let newer versions read their tensor (`StopCheck`) only where the host does not know the end; older ones have no such class."""
    theirs: Any = getattr(utils, "StopCheck", None)
    if theirs is None or getattr(theirs, "is_of_drumline", False):
        return

    class StopCheck(theirs):
        is_of_drumline = True

        def __call__(self, *given: Any, **options: Any) -> bool:
            if _is_end_known_to_host.get():
                return False
            is_end: bool = super().__call__(*given, **options)
            return is_end

    utils.StopCheck = StopCheck
