"""torch's names."""

from drumline.vendor import names

PLACES = {
    "BatchNorm": "torch.nn.modules.batchnorm:_BatchNorm",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "MEM_FORMAT_ENCODING": "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "abort_process_group": "torch.distributed.distributed_c10d:_abort_process_group",
    "all_to_all_single_autograd": "torch.distributed._functional_collectives:all_to_all_single_autograd",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "current_graph_task_id": "torch:_C._current_graph_task_id",
    "device_constructors": "torch.utils._device:_device_constructors",
    "dump_flight_recorder": "torch:_C._distributed_c10d._dump_fr_trace",
    "foreach_add_": "torch:_foreach_add_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "foreach_sub": "torch:_foreach_sub",
    "foreach_sub_": "torch:_foreach_sub_",
    "foreach_zero_": "torch:_foreach_zero_",
    "get_build_directory": "torch.utils.cpp_extension:_get_build_directory",
    "get_layout": "torch.serialization:_get_layout",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    "local_scalar_dense": "torch:ops.aten._local_scalar_dense",
    "on_compile_end": "torch._dynamo:on_compile_end",
    "on_compile_start": "torch._dynamo:on_compile_start",
    "orthogonalise": "torch.optim._muon:_zeropower_via_newtonschulz",
    "prepare_rowwise_input": "torch.distributed.tensor.parallel:RowwiseParallel._prepare_input_fn",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "to_copy": "torch:ops.aten._to_copy",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
}
__getattr__ = names("torch", "2.11.0", "2.13.0", PLACES)
