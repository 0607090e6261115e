"""PEFT's names."""

from drumline.vendor import names

PLACES = {
    "BaseTunerLayer": "peft.tuners.tuners_utils:BaseTunerLayer",
    "ParamWrapper": "peft.tuners.lora.layer:ParamWrapper",
    "weight_conversion": "peft.utils.transformers_weight_conversion",
}
MEMBERS = {"peft.tuners.tuners_utils:BaseTunerLayer": ("_disable_adapters",)}
__getattr__ = names("peft", "0.21.0", "0.21.2", PLACES)
