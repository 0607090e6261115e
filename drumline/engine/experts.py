"""Expert parallelism: each rank holds some whole experts of a mixture.

The experts of a layer are one module with weights of shape [experts, …], which is cut along that
dimension. There are two cases:

- The ranks see different tokens (`ep`, or `tp` with the stream cut by tokens). An all-to-all sends
  each choice of a token to the rank of its expert, and another one returns what the expert has
  computed (GShard, Lepikhin et al. 2021).
- The ranks see the same tokens (`tp`). Each computes the choices of its own experts, and the
  results are summed.

An expert's rows are computed by the forward of the module's own class in transformers: by grouped
products if these run, otherwise in a loop.

Shapes: N tokens, k choices of each, S rows (choices) on a rank, R ranks, E experts, D the width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from drumline.models.blocks import expert_modules
from drumline.vendor.torch import all_to_all_single_autograd


def apply_expert_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut all experts of a model over the data ranks of `mesh` (one dimension), in place."""
    for name in expert_modules(model):
        module = model.get_submodule(name)
        apply_experts(module, mesh, shares_tokens=False, averaged_over=mesh.size())


def apply_experts(
    module: Any, mesh: DeviceMesh, shares_tokens: bool, averaged_over: int = 1
) -> None:
    """Cut the experts of a module evenly over the ranks of `mesh` (one dimension), in place.

    `shares_tokens`: whether all ranks have the same tokens. `averaged_over`: what gradients are
    divided by. An expert's gradient is a sum over all ranks that send tokens to it; if these are
    data ranks, whose gradients are averaged, the sum has to be divided.
    """
    inner = module.forward
    experts = module.num_experts // mesh.size()
    for name, whole in list(module._parameters.items()):
        placed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
    module.num_experts = experts

    def own_part(weight: Any) -> Tensor:
        """Return this rank's experts of a weight, whose gradient is divided for the average."""
        part: Tensor = weight.to_local()
        if part.requires_grad and averaged_over > 1:
            part.register_hook(lambda gradient: gradient / averaged_over)
        return part

    compute = replace_weights(module, inner, own_part)

    def run(rows_SD: Tensor, expert_S: Tensor) -> Tensor:
        """Return what this rank's experts make of a row each, float[S, D].

        `expert_S`: number of each row's expert on this rank.
        """
        rows = len(rows_SD)
        inputs_SD = rows_SD
        expert_S1 = expert_S[:, None]
        if rows == 0:
            # Without rows one row of zeros is computed, since the weights must be in the graph.
            inputs_SD = rows_SD.new_zeros(1, rows_SD.shape[1])
            expert_S1 = expert_S.new_zeros(1, 1)
        out: Tensor = compute(inputs_SD, expert_S1, inputs_SD.new_ones(expert_S1.shape))
        return out[:rows]

    own_experts = _OwnExperts(run, mesh, experts)

    def forward(hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts' outputs, float[N, D].

        `chosen_Nk`: the numbers of the experts that the router has chosen. `weights_Nk`: their
        weights.
        """
        load_E = count_choices(chosen_Nk, experts * mesh.size())
        # The router's metrics read it.
        module.load_E = load_E
        if shares_tokens:
            out_ND = own_experts.run_on_shared_tokens(hidden_ND, chosen_Nk, weights_Nk)
        else:
            out_ND = own_experts.exchange_tokens(hidden_ND, chosen_Nk, weights_Nk, load_E)
        return out_ND.to(hidden_ND.dtype)

    module.forward = forward


def is_expert_shard(parameter: Any) -> bool:
    """Return whether a parameter holds some of a layer's experts: it is cut over the axis `ep`."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "ep" in names


def count_choices(chosen_Nk: Tensor, experts: int) -> Tensor:
    """Return how many choices fall on each expert, int64[E]."""
    chosen_S = chosen_Nk.flatten()
    load_E = torch.zeros(experts, dtype=chosen_S.dtype, device=chosen_S.device)
    return load_E.index_add_(0, chosen_S, torch.ones_like(chosen_S))


class _OwnExperts(NamedTuple):
    """The experts of one rank.

    `run`: (rows float[S, D], numbers of their experts on this rank int64[S]) → float[S, D].
    `number`: how many experts each rank has.
    """

    run: Callable[[Tensor, Tensor], Tensor]
    mesh: DeviceMesh
    number: int

    def exchange_tokens(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor, load_E: Tensor
    ) -> Tensor:
        """Send each choice to the rank of its expert, and return the weighted sums, float[N, D].

        Choices sorted by expert are also sorted by rank, so no rank needs to be told which row is
        whose.
        """
        group = self.mesh.get_group()
        ranks = self.mesh.size()
        choices = chosen_Nk.shape[1]
        order_S = chosen_Nk.flatten().argsort(stable=True)
        sent_RE = load_E.view(ranks, self.number)
        arriving_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(arriving_RE, sent_RE, group=group)
        # Here the host waits for the device. It has to know how many rows come, to make room for
        # them, and because NCCL takes the sizes of an all-to-all from the host. Always making room
        # for the most rows that may come would spare the wait, but send and multiply up to `ranks`
        # times the rows.
        #
        # If weights are not bf16 (under autocast they are fp32), torch's grouped products wait as
        # well, two in a forward and four in a backward: they then multiply expert by expert, and
        # the host reads the bounds.
        rows_each_way = torch.stack([sent_RE.sum(1), arriving_RE.sum(1)])
        sends, arrives = rows_each_way.tolist()
        rows_SD = all_to_all_single_autograd(hidden_ND[order_S // choices], arrives, sends, group)
        # From each rank in turn come the rows of the first expert, then those of the second, and so
        # on.
        expert_S = torch.arange(self.number, device=order_S.device).repeat(ranks)
        expert_S = expert_S.repeat_interleave(arriving_RE.flatten(), output_size=sum(arrives))
        computed_SD = self.run(rows_SD, expert_S)
        returned_SD = all_to_all_single_autograd(computed_SD, sends, arrives, group)
        # Choice → its row in the order by experts: the inverse of the sort.
        row_S = torch.empty_like(order_S)
        row_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        by_choice_NkD = returned_SD[row_S].unflatten(0, chosen_Nk.shape)
        return (by_choice_NkD * weights_Nk[..., None]).sum(1)

    def run_on_shared_tokens(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor
    ) -> Tensor:
        """Run this rank's experts on their choices, and return the ranks' sums, float[N, D].

        The gradients of tokens and weights are summed over the ranks, too.
        """
        hidden_ND = self._with_summed_gradient(hidden_ND)
        weights_Nk = self._with_summed_gradient(weights_Nk)
        # The host waits for the number of this rank's choices, which decides how many rows its
        # experts compute.
        is_own_Nk = chosen_Nk // self.number == self.mesh.get_local_rank()
        token_S, choice_S = is_own_Nk.nonzero(as_tuple=True)
        expert_S = chosen_Nk[token_S, choice_S] % self.number
        computed_SD = self.run(hidden_ND[token_S], expert_S)
        weighted_SD = computed_SD * weights_Nk[token_S, choice_S, None]
        part_ND = torch.zeros_like(hidden_ND)
        part_ND = part_ND.index_add(0, token_S, weighted_SD.to(hidden_ND.dtype))
        placed = DTensor.from_local(part_ND, self.mesh, [Partial()], run_check=False)
        summed = placed.redistribute(placements=[Replicate()])
        return summed.to_local()

    def _with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is the same on all ranks, with its gradient summed over them."""
        placed = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        return placed.to_local(grad_placements=[Partial()])


def replace_weights(
    module: nn.Module, forward: Callable[..., Any], change: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """Return a forward that runs `forward` with each of the module's own weights replaced.

    `change(weight)` returns what replaces a weight. It is called in each forward, because FSDP2
    puts other weights into the module while a forward runs.
    """

    def run(*inputs: Any, **options: Any) -> Any:
        """Run `forward` with the changed weights, and put the module's own back afterwards."""
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        changed = {name: change(weight) for name, weight in own.items()}
        module._parameters.update(changed)  # type: ignore[arg-type]
        try:
            return forward(*inputs, **options)
        finally:
            module._parameters.update(own)

    return run
