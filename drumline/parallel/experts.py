"""Whole experts on each rank, a part of a mixture's: the modules that hold all of a layer's experts in tensors of [experts, …].

Ranks that see other tokens (`ep`; `tp` with the stream cut by tokens) exchange them: each choice of a token goes to the rank of its expert
by an all-to-all, and what the expert made of it comes back (GShard, Lepikhin et al. 2021). Ranks that see the same tokens (`tp`) each
compute their own experts' choices, and add up. An expert's rows are computed by transformers' own code for the class: grouped products
where they run, else a loop. N tokens, k choices of each, E experts, D their width.
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
        apply_experts(
            model.get_submodule(name), mesh, shares_tokens=False, averaged_over=mesh.size()
        )


def apply_experts(
    module: Any, mesh: DeviceMesh, shares_tokens: bool, averaged_over: int = 1
) -> None:
    """Each rank of `mesh` (one dimension) holds as many of the module's experts. `shares_tokens`: all ranks have the same. `averaged_over`:
    what gradients are divided by: those of data ranks are averaged, and an expert's is the sum over the ranks that send to it."""
    inner, experts = module.forward, module.num_experts // mesh.size()
    for name, whole in list(module._parameters.items()):
        placed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
    module.num_experts = experts

    def part(weight: Any) -> Tensor:
        mine: Tensor = weight.to_local()
        if mine.requires_grad and averaged_over > 1:
            mine.register_hook(lambda gradient: gradient / averaged_over)
        return mine

    compute = with_weights(module, inner, part)

    def run(rows_SD: Tensor, expert_S: Tensor) -> Tensor:
        """float[S, D]: what this rank's experts, by their numbers here, make of a row each."""
        # Weights take part in any case.
        made = rows_SD if len(rows_SD) else rows_SD.new_zeros(1, rows_SD.shape[1])
        chosen_S1 = expert_S[:, None] if len(rows_SD) else expert_S.new_zeros(1, 1)
        out: Tensor = compute(made, chosen_S1, made.new_ones(chosen_S1.shape))
        return out[: len(rows_SD)]

    cut = _Experts(run, mesh, experts)

    def forward(hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        module.load_E = load_of(chosen_Nk, experts * mesh.size())
        how = cut.of_shared if shares_tokens else cut.exchanged
        return how(hidden_ND, chosen_Nk, weights_Nk, module.load_E).to(hidden_ND.dtype)

    module.forward = forward


def of_experts(parameter: Any) -> bool:
    """Whether a parameter is cut over the ranks of `ep`."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def load_of(chosen_Nk: Tensor, experts: int) -> Tensor:
    """int64[E]: choices of each expert."""
    flat = chosen_Nk.flatten()
    return torch.zeros(experts, dtype=flat.dtype, device=flat.device).index_add_(
        0, flat, torch.ones_like(flat)
    )


class _Experts(NamedTuple):
    """Of one rank: `number` experts, of `mesh.size()` times as many. `run`: (float[S, D], their experts here int64[S]) → float[S, D]."""

    run: Callable[[Tensor, Tensor], Tensor]
    mesh: DeviceMesh
    number: int

    def exchanged(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor, load_E: Tensor
    ) -> Tensor:
        """Choices in the order of their experts are in that of the ranks: no rank needs to be told which row is whose."""
        group, ranks, choices = self.mesh.get_group(), self.mesh.size(), chosen_Nk.shape[1]
        order = chosen_Nk.flatten().argsort(stable=True)
        sent_RE = load_E.view(ranks, self.number)
        arriving_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(arriving_RE, sent_RE, group=group)
        # The layer's one wait: the host has to know how many rows come, to make room for them, and since NCCL takes the sizes of an
        # all-to-all from it. Room for the most that may come would spare the wait, and send and multiply up to `ranks` times the rows.
        # Where weights are not bf16 (under autocast they are fp32), torch's grouped products wait as well: each multiplies expert by
        # expert then, by bounds that the host reads, two in a forward and four in a backward.
        sends, arrives = torch.stack([sent_RE.sum(1), arriving_RE.sum(1)]).tolist()
        rows_SD = all_to_all_single_autograd(hidden_ND[order // choices], arrives, sends, group)
        expert_S = torch.arange(self.number, device=order.device).repeat(ranks)
        expert_S = expert_S.repeat_interleave(arriving_RE.flatten(), output_size=sum(arrives))
        made = all_to_all_single_autograd(self.run(rows_SD, expert_S), sends, arrives, group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return (made[back].unflatten(0, chosen_Nk.shape) * weights_Nk[..., None]).sum(1)

    def of_shared(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor, _load: Tensor
    ) -> Tensor:
        """The sums over ranks are the whole; what each gives back to tokens and weights is added up."""
        hidden_ND, weights_Nk = (
            DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            for x in (hidden_ND, weights_Nk)
        )
        # The host waits for the number of this rank's choices, which decides how many rows its experts compute.
        token_S, choice_S = (chosen_Nk // self.number == self.mesh.get_local_rank()).nonzero(
            as_tuple=True
        )
        made_SD = (
            self.run(hidden_ND[token_S], chosen_Nk[token_S, choice_S] % self.number)
            * weights_Nk[token_S, choice_S, None]
        )
        part_ND = torch.zeros_like(hidden_ND).index_add(0, token_S, made_SD.to(hidden_ND.dtype))
        return (
            DTensor.from_local(part_ND, self.mesh, [Partial()], run_check=False)
            .redistribute(placements=[Replicate()])
            .to_local()
        )


def with_weights(
    module: nn.Module, forward: Callable[..., Any], change: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """`forward` as it is with `change(weight)` in the place of each of the module's own weights.

    They are taken from the module at each call: FSDP2 puts others there for as long as a forward runs.
    """

    def run(*inputs: Any, **options: Any) -> Any:
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        module._parameters.update({name: change(weight) for name, weight in own.items()})  # type: ignore[misc]
        try:
            return forward(*inputs, **options)
        finally:
            module._parameters.update(own)

    return run
