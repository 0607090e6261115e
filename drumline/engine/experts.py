"""Expert parallelism: each rank holds some whole experts of a mixture.

The experts of a layer are one module with weights of shape [experts, …], which is cut along that
dimension. There are two cases:

- The ranks see different tokens (`ep`, or `tp` with sequence parallelism). An all-to-all sends
  each choice of a token to the rank of its expert, and another one returns what the expert has
  computed (GShard, Lepikhin et al. 2021).
- The ranks see the same tokens (`tp`). Each computes the choices of its own experts, and the
  results are summed.

An expert's rows are computed by the forward of the module's own class in transformers: by grouped
products if these run, otherwise in a loop. Adapters over experts (models.adapted_experts) keep
their factors by expert, which are cut in the same way.

Shapes: N tokens of a rank, k experts chosen for each, S = N·k choices that the rank sends, A rows
that its experts compute, R ranks, E experts, D the size of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from drumline.models.blocks import expert_holders, expert_modules, find_base_layer
from drumline.models.containers import product_dtype
from drumline.models.packed import packings_of
from drumline.models.router import count_choices
from drumline.vendor.torch import all_to_all_single_autograd


def apply_expert_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut all experts of a model over the data ranks of `mesh` (one dimension), in place."""
    for name in expert_modules(model):
        module = model.get_submodule(name)
        apply_experts(module, mesh, shares_tokens=False, averaged_over=mesh.size())
        # The number of rows that come to a rank changes in each step, and the host has to know it.
        # So the experts are not compiled, and a compiled block has two graphs: one before its
        # experts and one behind them.
        module.forward = torch.compiler.disable(module.forward)


def apply_experts(
    module: Any, mesh: DeviceMesh, shares_tokens: bool, averaged_over: int = 1
) -> None:
    """Cut the experts of a module evenly over the ranks of `mesh` (one dimension), in place.

    Args:
        module: One of `expert_modules`, with the adapters around the experts if there are any.
        mesh: The ranks.
        shares_tokens: Whether all ranks have the same tokens.
        averaged_over: What gradients are divided by. The gradient of an expert is a sum over all
            ranks that send tokens to it. Gradients of data ranks are averaged, so if these ranks
            are data ranks, the sum has to be divided by their number.
    """
    base = find_base_layer(module)
    experts_per_rank = base.num_experts // mesh.size()
    holders = expert_holders(module)
    for holder in holders:
        for name, whole in list(holder._parameters.items()):
            placed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            holder.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
        for packing in packings_of(holder).values():
            packing.cut_experts(mesh.get_local_rank(), mesh.size())
    base.num_experts = experts_per_rank

    def local_part(weight: Any) -> Tensor:
        """Return this rank's experts of a weight, whose gradient is divided for the average."""
        part: Tensor = weight.to_local()
        if part.requires_grad and averaged_over > 1:
            part.register_hook(lambda gradient: gradient / averaged_over)
        return part

    compute = _with_replaced_holders(module.forward, holders, local_part)

    def run(rows_AD: Tensor, expert_A: Tensor) -> Tensor:
        """Return the output of each row's expert, float[A, D].

        `expert_A`: index of each row's expert among those of this rank.
        """
        rows = len(rows_AD)
        inputs_AD = rows_AD
        expert_A1 = expert_A[:, None]
        if rows == 0:
            # Compute one row of zeros: the weights must be in the graph to get a gradient.
            inputs_AD = rows_AD.new_zeros(1, rows_AD.shape[1])
            expert_A1 = expert_A.new_zeros(1, 1)
        out: Tensor = compute(inputs_AD, expert_A1, inputs_AD.new_ones(expert_A1.shape))
        return out[:rows]

    local_experts = _LocalExperts(run, mesh, experts_per_rank)

    def forward(hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts' outputs, float[N, D].

        `chosen_Nk`: the indices of the experts that the router has chosen. `weights_Nk`: their
        weights.
        """
        if shares_tokens:
            out_ND = local_experts.run_on_shared_tokens(hidden_ND, chosen_Nk, weights_Nk)
        else:
            load_E = count_choices(chosen_Nk, experts_per_rank * mesh.size())
            out_ND = local_experts.exchange_tokens(hidden_ND, chosen_Nk, weights_Nk, load_E)
        return out_ND.to(hidden_ND.dtype)

    module.forward = forward


def cast_experts_under_autocast(model: nn.Module) -> None:
    """Let experts multiply in the type of autocast, as linear layers do, in place.

    Autocast does not know torch's grouped products, which would multiply fp32 weights in fp32, one
    expert after another. Packed experts unpack in the type of autocast by themselves.

    Call this before experts are cut, so that each rank casts only its own experts.
    """
    for name in expert_modules(model):
        module: Any = model.get_submodule(name)
        holders = [holder for holder in expert_holders(module) if not packings_of(holder)]
        module.forward = _with_replaced_holders(module.forward, holders, _cast_for_products)


def _cast_for_products(weight: Tensor) -> Tensor:
    """Return a weight in the type in which a linear layer would multiply it."""
    return weight.to(product_dtype(weight))


def is_expert_shard(parameter: Any) -> bool:
    """Return whether a parameter holds some of a layer's experts: it is cut over the axis `ep`."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "ep" in names


def cut_expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that have been cut, with the adapters around them.

    Before experts are cut, `expert_modules` finds them.
    """
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        own = find_base_layer(module)._parameters.values()
        if any(is_expert_shard(parameter) for parameter in own):
            layers.append(module)
            inside.update(module.modules())
    return layers


class _LocalExperts(NamedTuple):
    """The experts of one rank.

    `run`: (rows float[A, D], indices of their experts on this rank int64[A]) → outputs float[A, D].
    `per_rank`: how many experts each rank has.
    """

    run: Callable[[Tensor, Tensor], Tensor]
    mesh: DeviceMesh
    per_rank: int

    def exchange_tokens(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor, load_E: Tensor
    ) -> Tensor:
        """Send each choice to the rank of its expert, and return the weighted sums, float[N, D].

        Choices are sorted by expert, and so by rank. The numbers of rows alone tell each rank which
        row belongs to which of its experts.

        Args:
            hidden_ND: The tokens of this rank.
            chosen_Nk: The experts that the router has chosen for each token.
            weights_Nk: Their weights.
            load_E: How many choices of this rank fall on each expert.
        """
        group = self.mesh.get_group()
        ranks = self.mesh.size()
        experts_per_token = chosen_Nk.shape[1]
        order_S = chosen_Nk.flatten().argsort(stable=True)
        sent_RE = load_E.view(ranks, self.per_rank)
        arriving_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(arriving_RE, sent_RE, group=group)
        # Here the host waits for the device. It has to know how many rows come, to make room for
        # them, and because NCCL takes the sizes of an all-to-all from the host. Without the wait,
        # room for the most rows that can come would be needed: up to `ranks` times as many rows
        # would be sent and multiplied.
        #
        # With fp32 weights the host also waits in torch's grouped products, twice in a forward and
        # four times in a backward: they multiply expert by expert, and the host reads the bounds.
        rows_each_way = torch.stack([sent_RE.sum(1), arriving_RE.sum(1)])
        sends, arrives = rows_each_way.tolist()
        sent_SD = hidden_ND[order_S // experts_per_token]
        rows_AD = all_to_all_single_autograd(sent_SD, arrives, sends, group)
        # Rows arrive rank by rank, and from each rank sorted by expert.
        local_experts = torch.arange(self.per_rank, device=order_S.device).repeat(ranks)
        expert_A = local_experts.repeat_interleave(arriving_RE.flatten(), output_size=sum(arrives))
        computed_AD = self.run(rows_AD, expert_A)
        returned_SD = all_to_all_single_autograd(computed_AD, sends, arrives, group)
        # For each choice its row among those sorted by expert: the inverse of the sort.
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
        # The host waits for how many choices fall on this rank, which decides how many rows its
        # experts compute.
        is_local_Nk = chosen_Nk // self.per_rank == self.mesh.get_local_rank()
        token_A, choice_A = is_local_Nk.nonzero(as_tuple=True)
        expert_A = chosen_Nk[token_A, choice_A] % self.per_rank
        computed_AD = self.run(hidden_ND[token_A], expert_A)
        weighted_AD = computed_AD * weights_Nk[token_A, choice_A, None]
        part_ND = torch.zeros_like(hidden_ND)
        part_ND = part_ND.index_add(0, token_A, weighted_AD.to(hidden_ND.dtype))
        placed = DTensor.from_local(part_ND, self.mesh, [Partial()], run_check=False)
        summed = placed.redistribute(placements=[Replicate()])
        return summed.to_local()

    def _with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks have alike, with its gradient summed over the ranks."""
        placed = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        return placed.to_local(grad_placements=[Partial()])


def _with_replaced_holders(
    forward: Callable[..., Any], holders: Iterable[nn.Module], change: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """Return a forward that replaces the weights of several modules while it runs `forward`."""
    for holder in holders:
        forward = forward_with_replaced_weights(holder, forward, change)
    return forward


def forward_with_replaced_weights(
    module: nn.Module, forward: Callable[..., Any], change: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """Return a forward that replaces the module's weights while it runs `forward`.

    `change(weight)` returns the replacement of a weight that the module itself has, not its
    children. It is called in each forward, because FSDP2 puts gathered weights into the module
    while a forward runs.
    """

    def run(*inputs: Any, **options: Any) -> Any:
        """Run `forward` with the changed weights, and put the original ones back afterwards."""
        weights = {name: w for name, w in module._parameters.items() if w is not None}
        changed = {name: change(weight) for name, weight in weights.items()}
        module._parameters.update(changed)  # type: ignore[arg-type]
        try:
            return forward(*inputs, **options)
        finally:
            module._parameters.update(weights)

    return run
