"""torch's names."""

from drumline.errors import EnvironmentFault
from drumline.vendor import names

PLACES = {
    "BatchNorm": "torch.nn.modules.batchnorm:_BatchNorm",
    "DefaultAllGather": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
    "DefaultReduceScatter": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "MEM_FORMAT_ENCODING": "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "abort_process_group": "torch.distributed.distributed_c10d:_abort_process_group",
    "autograd_key": "torch._C:DispatchKey.AutogradFunctionality",
    "all_to_all_single_autograd": "torch.distributed._functional_collectives:all_to_all_single_autograd",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "compiled_c10d": "torch:_C._distributed_c10d",
    "current_graph_task_id": "torch:_C._current_graph_task_id",
    "device_constructors": "torch.utils._device:_device_constructors",
    "dynamo_config": "torch._dynamo:config",
    "exclude_dispatch_key": "torch._C:_SetExcludeDispatchKeyGuard",
    "dump_memory_snapshot": "torch.cuda.memory:_dump_snapshot",
    "foreach_add_": "torch:_foreach_add_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "foreach_sub": "torch:_foreach_sub",
    "foreach_sub_": "torch:_foreach_sub_",
    "foreach_zero_": "torch:_foreach_zero_",
    "groups_of_process": "torch.distributed.distributed_c10d:_world",
    "get_build_directory": "torch.utils.cpp_extension:_get_build_directory",
    "get_layout": "torch.serialization:_get_layout",
    "is_in_bad_fork": "torch.cuda:_is_in_bad_fork",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    "local_scalar_dense": "torch:ops.aten._local_scalar_dense",
    "on_compile_end": "torch._dynamo:on_compile_end",
    "on_compile_start": "torch._dynamo:on_compile_start",
    "orthogonalise": "torch.optim._muon:_zeropower_via_newtonschulz",
    "pin_memory": "torch.cuda._pin_memory_utils:pin_memory",
    "queue_callback": "torch.autograd:Variable._execution_engine.queue_callback",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "set_group_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    "to_copy": "torch:ops.aten._to_copy",
    "tree_flatten": "torch.utils._pytree:tree_flatten",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
    "tree_unflatten": "torch.utils._pytree:tree_unflatten",
    "unpin_memory": "torch.cuda._pin_memory_utils:unpin_memory",
    "wait_tensor": "torch:ops._c10d_functional.wait_tensor",
}
MEMBERS = {
    "torch:Tensor": ("_base", "_is_view"),
    "torch:UntypedStorage": ("_cdata",),
    "torch:_ops.OpOverload": ("_schema",),
    "torch.distributed:Reducer": ("_rebuild_buckets",),
    "torch.distributed.device_mesh:DeviceMesh": ("_flatten",),
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent": (
        *("_assign_worker_ranks", "_monitor_workers", "_pcontext", "_shutdown", "_start_workers"),
    ),
    "torch.distributed.pipelining:PipelineStage": (
        "_create_grad_recv_info",
        "_setup_forward_recv_info",
    ),
    "torch.distributed.tensor:DTensor": ("_spec",),
    "torch.nn:Module": (
        "_apply",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ),
    "torch.nn:Parameter": ("_backward_hooks",),
    "torch.nn.modules.batchnorm:_BatchNorm": ("_check_input_dim",),
}
__getattr__ = names("torch", "2.11.0", "2.13.0", PLACES)


def dump_flight_recorders() -> list[bytes]:
    """Return the collectives that each recorder of this process holds, pickled: of gloo, and of NCCL where torch is built with it.

    Raises EnvironmentFault for a torch without either.
    """
    module = __getattr__("compiled_c10d")
    dumps = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(module, name, None)
        if dump is not None:
            dumps.append(dump())
    if not dumps:
        raise EnvironmentFault("this torch records no collectives")
    return dumps
