"""Expert parallelism: each rank holds some whole experts of a mixture.

The experts of a layer are one module with weights of shape [experts, …], which is cut along that
dimension. What a rank does with the choices of its tokens depends on who else has these tokens:

- The ranks have different tokens (`ep`, or `tp` with sequence parallelism). An all-to-all sends
  each choice of a token to the rank of its expert, and another one returns what the expert has
  computed (GShard, Lepikhin et al. 2021).
- The ranks have the same tokens (`tp`). Each computes the choices of its own experts, and the
  results are summed.

With `ep` and `tp` together the experts are cut over the ranks of both, E / (ep · tp) each, so that
no expert lies on two ranks of a model and nobody computes a choice twice. With sequence parallelism
all these ranks have different tokens: one exchange among them all. Without it a tp rank sends the
choices of the experts that lie on the ranks with its own index in tp, to the data ranks of these,
and the results are summed over tp. If tp did not cut the experts, no sum would be needed, but each
tp rank would hold the same experts and compute the same choices.

With context parallelism (`cp`) a rank has a part of each row, and its exchange is about these
tokens alone. The ranks of a cp group have the same experts, as data ranks outside of ep do.

An expert's rows are computed by the forward of the module's own class in transformers: by grouped
products if these run, otherwise in a loop. Adapters over experts (models.adapted_experts) keep
their factors by expert, which are cut in the same way.

Shapes: N tokens of a rank, k experts chosen for each, S choices that the rank sends (N·k, unless
ranks have the same tokens), A rows that its experts compute, R ranks, E experts, D the size of
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from drumline.dist.mesh import EXPERT_DIMENSIONS, mesh_of_experts
from drumline.models.blocks import expert_holders, expert_modules, find_base_layer
from drumline.models.containers import product_dtype
from drumline.models.packed import packings_of
from drumline.models.router import count_choices
from drumline.vendor.torch import all_to_all_single_autograd


class ExpertRanks(NamedTuple):
    """How the experts of each layer lie on ranks, and which of these have the same tokens.

    `mesh`: of one dimension, over which experts are cut. Rank i of it holds the experts from
    i · E / size on. `exchanged_over`: the ranks with different tokens, among which choices are
    exchanged; None if there are none. `shared_over`: the ranks with the same tokens, which are
    neighbours in `mesh`; None if there are none. `data_ranks`: how many of the ranks are data
    ranks, over which gradients are averaged.
    """

    mesh: DeviceMesh
    exchanged_over: DeviceMesh | None
    shared_over: DeviceMesh | None
    data_ranks: int


def expert_ranks(world_mesh: DeviceMesh, cuts_tokens: bool) -> ExpertRanks:
    """Return how experts are cut over the ranks of ep, and over those of tp within them. Collective.

    `cuts_tokens`: whether each rank of tp has a part of the tokens (sequence parallelism).
    """
    mesh = mesh_of_experts(world_mesh)
    data_ranks = world_mesh["ep"].size()
    if cuts_tokens or world_mesh["tp"].size() == 1:
        return ExpertRanks(mesh, mesh, None, data_ranks)
    return ExpertRanks(mesh, world_mesh["ep"], world_mesh["tp"], data_ranks)


def expert_ranks_of_tp(mesh: DeviceMesh, cuts_tokens: bool) -> ExpertRanks:
    """Return how experts are cut over the ranks of tp alone. `cuts_tokens`: as of `expert_ranks`."""
    if cuts_tokens:
        return ExpertRanks(mesh, mesh, None, data_ranks=1)
    return ExpertRanks(mesh, None, mesh, data_ranks=1)


def apply_expert_parallelism(model: nn.Module, ranks: ExpertRanks) -> None:
    """Cut all experts of a model over data ranks, and over those of tp if `ranks` has these too."""
    for name in expert_modules(model):
        module = model.get_submodule(name)
        apply_experts(module, ranks)
        # The number of rows that come to a rank changes in each step, and the host has to know it.
        # So the experts are not compiled, and a compiled block has two graphs: one before its
        # experts and one behind them.
        module.forward = torch.compiler.disable(module.forward)


def apply_experts(module: Any, ranks: ExpertRanks) -> None:
    """Cut the experts of a module evenly over ranks, in place.

    `module`: one of `expert_modules`, with the adapters around the experts if there are any.

    An expert's gradient is a sum over all ranks that send tokens to it. Over data ranks gradients
    are averaged, so it is divided by their number.
    """
    averaged_over = ranks.data_ranks
    base = find_base_layer(module)
    experts_per_rank = base.num_experts // ranks.mesh.size()
    holders = expert_holders(module)
    for holder in holders:
        _cut_tensors(holder, ranks.mesh)
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
            # Without rows one row of zeros is computed, since the weights must be in the graph. So
            # must the rows, though there are none: they come from an exchange, whose backward is
            # one as well, and the other ranks wait in it for this one.
            zeros_1D = rows_AD.new_zeros(1, rows_AD.shape[1])
            inputs_AD = torch.cat([rows_AD, zeros_1D])
            expert_A1 = expert_A.new_zeros(1, 1)
        out: Tensor = compute(inputs_AD, expert_A1, inputs_AD.new_ones(expert_A1.shape))
        return out[:rows]

    local_experts = _LocalExperts(run, ranks, experts_per_rank)

    def forward(hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts' outputs, float[N, D].

        `chosen_Nk`: the indices of the experts that the router has chosen. `weights_Nk`: their
        weights.
        """
        if ranks.shared_over is None:
            out_ND = local_experts.exchange_tokens(hidden_ND, chosen_Nk, weights_Nk)
        else:
            out_ND = local_experts.run_on_shared_tokens(hidden_ND, chosen_Nk, weights_Nk)
        return out_ND.to(hidden_ND.dtype)

    module.forward = forward


def _cut_tensors(holder: Any, mesh: DeviceMesh) -> None:
    """Leave this rank's experts of the tensors that a module itself holds."""
    for name, whole in list(holder._parameters.items()):
        placed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        holder.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
    for packing in packings_of(holder).values():
        packing.cut(0, mesh.get_local_rank(), mesh.size())


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
    """Return whether a parameter holds some of a layer's experts, cut over data ranks (ep).

    With tp they are cut over its ranks as well. False if tp alone cuts them.
    """
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return not EXPERT_DIMENSIONS.isdisjoint(names)


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
    ranks: ExpertRanks
    per_rank: int

    @property
    def experts(self) -> int:
        """How many experts the layer has."""
        return self.per_rank * self.ranks.mesh.size()

    def exchange_tokens(self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Send each choice to the rank of its expert, and return the weighted sums, float[N, D]."""
        experts_per_token = chosen_Nk.shape[1]
        load_E = count_choices(chosen_Nk, self.experts)
        order_S = chosen_Nk.flatten().argsort(stable=True)
        sent_SD = hidden_ND[order_S // experts_per_token]
        returned_SD = self._run_where_experts_are(sent_SD, load_E.view(-1, self.per_rank))
        # Choice → its row in the order by experts: the inverse of the sort.
        row_S = torch.empty_like(order_S)
        row_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        by_choice_NkD = returned_SD[row_S].unflatten(0, chosen_Nk.shape)
        return (by_choice_NkD * weights_Nk[..., None]).sum(1)

    def _run_where_experts_are(self, sent_SD: Tensor, sent_RE: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, and return the outputs in the same order.

        `sent_SD`: sorted by expert, and so by rank. The numbers of rows alone tell each rank which
        row belongs to which of its experts. `sent_RE`: how many go to each expert of each rank.
        """
        assert self.ranks.exchanged_over is not None
        group = self.ranks.exchanged_over.get_group()
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
        rows_AD = all_to_all_single_autograd(sent_SD, arrives, sends, group)
        # Rows arrive rank by rank, and from each rank sorted by expert.
        local_experts = torch.arange(self.per_rank, device=sent_RE.device).repeat(len(sends))
        expert_A = local_experts.repeat_interleave(arriving_RE.flatten(), output_size=sum(arrives))
        computed_AD = self.run(rows_AD, expert_A)
        returned_SD: Tensor = all_to_all_single_autograd(computed_AD, sends, arrives, group)
        return returned_SD

    def run_on_shared_tokens(
        self, hidden_ND: Tensor, chosen_Nk: Tensor, weights_Nk: Tensor
    ) -> Tensor:
        """Return the weighted sums, float[N, D], where other ranks have the same tokens.

        Each of these ranks sees to some of the choices, and what they find is summed over them. So
        are the gradients of tokens and weights.
        """
        sharing = self.ranks.shared_over
        assert sharing is not None
        hidden_ND = self._with_summed_gradient(hidden_ND)
        weights_Nk = self._with_summed_gradient(weights_Nk)
        # The host waits for how many choices fall to this rank, which decides how many rows it
        # sends, or its experts compute.
        is_own_Nk = chosen_Nk // self.per_rank % sharing.size() == sharing.get_local_rank()
        token_S, choice_S = is_own_Nk.nonzero(as_tuple=True)
        expert_S = chosen_Nk[token_S, choice_S]
        if self.ranks.exchanged_over is None:
            computed_SD = self.run(hidden_ND[token_S], expert_S % self.per_rank)
        else:
            order_S = expert_S.argsort(stable=True)
            token_S = token_S[order_S]
            choice_S = choice_S[order_S]
            load_E = count_choices(expert_S, self.experts)
            # Only experts with this rank's index among those that share tokens have choices.
            load_by_ranks = load_E.view(-1, sharing.size(), self.per_rank)
            sent_RE = load_by_ranks[:, sharing.get_local_rank()].contiguous()
            computed_SD = self._run_where_experts_are(hidden_ND[token_S], sent_RE)
        weighted_SD = computed_SD * weights_Nk[token_S, choice_S, None]
        part_ND = torch.zeros_like(hidden_ND)
        part_ND = part_ND.index_add(0, token_S, weighted_SD.to(hidden_ND.dtype))
        placed = DTensor.from_local(part_ND, sharing, [Partial()], run_check=False)
        summed = placed.redistribute(placements=[Replicate()])
        return summed.to_local()

    def _with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Return a tensor that ranks share, with its gradient summed over them."""
        sharing = self.ranks.shared_over
        assert sharing is not None
        placed = DTensor.from_local(tensor, sharing, [Replicate()], run_check=False)
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
