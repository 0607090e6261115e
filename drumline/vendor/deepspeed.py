"""DeepSpeed's names."""

from drumline.vendor import names

PLACES = {
    "CPU_Accelerator": "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator",
    "combine_grad_norm_groups": "deepspeed.runtime.utils:combine_grad_norm_groups",
    "get_global_norm_of_tensors": "deepspeed.runtime.utils:get_global_norm_of_tensors",
    "release_groups": "deepspeed.utils.groups:_release_process_group_references",
}
MEMBERS = {
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
    ),
}
__getattr__ = names("deepspeed", "0.19.8", "0.19.8", PLACES)
