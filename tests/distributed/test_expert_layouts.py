"""Experts cut over data ranks that share rows or matrices with others (ep with cp and tp): loss,
every gradient, their norm and the experts' load as in one process.

Four real processes take all layouts in turn; the reference is the same model, whole, in the same
process, which runs the batches of both data ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumline.config.config import LoRAConfig
from drumline.config.mesh import Mesh
from drumline.config.strategies.fsdp2 import FSDP2Strategy
from drumline.data.batches import TokenBatch, collate
from drumline.dist.mesh import (
    data_mesh,
    device_mesh,
    expert_gradient_group,
    expert_mesh,
    gradient_group,
)
from drumline.engine.context_parallel import apply_context_parallel
from drumline.engine.data_parallel import BucketedAllReduce, DataParallelWrapper, Sharded
from drumline.engine.experts import apply_expert_parallelism, expert_ranks
from drumline.engine.norms import global_norm, local
from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
from drumline.engine.tensor_parallel import apply_tp
from drumline.models.adapters import inject
from drumline.models.head import ForwardWithObjective
from drumline.models.router_load import BIAS, router_load_of
from tests.checkpoint_ranks import run
from tests.unit.test_router import OBJECTIVE
from tests.unit.test_router_load import DOCUMENTS, TOKENS, mixture

# Gradients of the averages over two ranks of data, and over two of a sequence with cp.
WITHIN = 1e-5
# Of the batches of both data ranks.
WEIGHT = 2 * TOKENS


class Layout(NamedTuple):
    """`cuts_tokens`: sequence parallelism. `is_sharded`: by FSDP2; otherwise ranks hold copies."""

    mesh: Mesh
    cuts_tokens: bool = False
    is_sharded: bool = False


LAYOUTS = {
    "ep 2 x cp 2": Layout(Mesh(ep=2, cp=2)),
    "fsdp2, ep 2 x cp 2": Layout(Mesh(ep=2, cp=2), is_sharded=True),
    "ep 2 x tp 2": Layout(Mesh(ep=2, tp=2), cuts_tokens=True),
    "ep 2 x tp 2, whole stream": Layout(Mesh(ep=2, tp=2)),
    "fsdp2, ep 2 x tp 2": Layout(Mesh(ep=2, tp=2), cuts_tokens=True, is_sharded=True),
}
IDLE = "deepseek_v3, idle"
KINDS = ("mixtral", "qwen3_moe, lora", "deepseek_v3", IDLE)
PAIRS = []
for kind in KINDS:
    for name, layout in LAYOUTS.items():
        # It is not proven there that its tokens can be cut.
        if not kind.startswith("deepseek_v3") or not layout.cuts_tokens:
            PAIRS.append(f"{kind}: {name}")


def built(kind: str, layout: Layout) -> Any:
    architecture, _, change = kind.partition(", ")
    options: dict[str, Any] = {}
    if layout.cuts_tokens:
        # The router loss needs all tokens of a document on one rank.
        options["output_router_logits"] = False
    model = mixture(architecture, **options)
    if kind == IDLE:
        # No token chooses the first two experts: the ranks that hold them get no rows.
        for name, bias in model.named_buffers():
            if name.endswith(BIAS):
                bias[:2] = -10
    if change == "lora":
        inject(model, LoRAConfig(kind="lora", r=4, targets="all-linear"), seed=5)
        draw = torch.Generator().manual_seed(4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.data.copy_(noise / 4)
    return model


def batch_of(data_rank: int) -> TokenBatch:
    """The same documents in another order, packed."""
    documents = DOCUMENTS[data_rank:] + DOCUMENTS[:data_rank]
    return collate([documents], 0, TOKENS)


def wrapped(model: Any, layout: Layout) -> tuple[DataParallelWrapper, Any]:
    """Return a cut model in its wrapper, and the context of a forward and a backward."""
    whole = device_mesh(layout.mesh, "cpu")
    ranks = expert_ranks(whole, layout.cuts_tokens)
    if layout.mesh.tp > 1:
        apply_tp(model, whole["tp"], layout.cuts_tokens, experts=ranks)
    else:
        apply_expert_parallelism(model, ranks)
    module = ForwardWithObjective(model)
    around: Any = contextlib.nullcontext
    if layout.mesh.cp > 1:
        apply_context_parallel(module, model, whole["cp"], "ulysses", packing=True)
        assert module.sequence is not None
        around = module.sequence.around
    if layout.is_sharded:
        options = FSDP2Strategy(ep=2)
        root = apply_fsdp2(module, model, options, data_mesh(whole), None, expert_mesh(whole))
        return Sharded(root, sync_each_micro_batch=True), around
    experts = expert_gradient_group(whole)
    return BucketedAllReduce(module, gradient_group(whole), experts=experts), around


class Step(NamedTuple):
    """`load`: the tokens of each expert, of all layers end to end."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    load: list[float]


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


def step_of_one_process(kind: str, layout: Layout) -> Step:
    model = built(kind, layout)
    module = ForwardWithObjective(model)
    load = router_load_of(model)
    assert load is not None
    load.begin_step()
    loss = 0.0
    for data_rank in range(layout.mesh.data_ranks):
        loss_sum, _ = module(batch_of(data_rank), OBJECTIVE)
        (loss_sum / WEIGHT).backward()
        loss += float(loss_sum.detach())
    gradients = gradients_of(model)
    norm = global_norm(list(gradients.values()), "cpu")
    return Step(loss, gradients, float(norm), load.local_counts("cpu").tolist())


def step_of_ranks(kind: str, layout: Layout) -> Step:
    model = built(kind, layout)
    wrapper, around = wrapped(model, layout)
    load = router_load_of(model)
    assert load is not None
    load.begin_step()
    mesh = layout.mesh
    rank = dist.get_rank()
    with around(), wrapper.micro_batch(last=True):
        loss_sum, _ = wrapper.train_module(batch_of(mesh.data_rank(rank)), OBJECTIVE)
        (loss_sum * mesh.data_ranks * mesh.cp / WEIGHT).backward()
    loss = torch.tensor(float(loss_sum.detach()) * mesh.is_counted(rank))
    dist.all_reduce(loss)
    counts = load.local_counts("cpu")
    dist.all_reduce(counts)
    gradients = gradients_of(model)
    norm = global_norm(list(gradients.values()), "cpu")
    return Step(float(loss), gradients, float(norm), counts.tolist())


def compare(kind: str, layout: Layout) -> dict[str, Any]:
    """What differs: {} where all is as in one process."""
    expected = step_of_one_process(kind, layout)
    found = step_of_ranks(kind, layout)
    wrong: dict[str, Any] = {}
    if found.gradients.keys() != expected.gradients.keys():
        wrong["names"] = sorted(found.gradients.keys() ^ expected.gradients.keys())
    if found.loss != pytest.approx(expected.loss, rel=WITHIN):
        wrong["loss"] = (found.loss, expected.loss)
    if found.norm != pytest.approx(expected.norm, rel=WITHIN):
        wrong["norm"] = (found.norm, expected.norm)
    if found.load != expected.load:
        wrong["load"] = (found.load, expected.load)
    # A wrong sum would be off by the half. What is next to nothing beside the others is made of
    # rounding.
    least = 1e-2 * max(gradient.norm() for gradient in expected.gradients.values())
    for name, gradient in found.gradients.items():
        whole = gradient
        if isinstance(gradient, DTensor):
            whole = gradient.full_tensor()
        reference = expected.gradients[name]
        apart = (whole - reference).norm() / torch.maximum(reference.norm(), least)
        if not apart <= 5 * WITHIN:
            wrong[name] = float(apart)
        is_of_experts = ".experts." in name
        held = local(gradient).numel()
        if is_of_experts and held * layout.mesh.ep * layout.mesh.tp > reference.numel():
            wrong[f"{name} held"] = held
    return wrong


def compare_all(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """Return what differs on this rank, by pair."""
    found = {}
    for pair in pairs:
        kind, _, layout = pair.partition(": ")
        found[pair] = compare(kind, LAYOUTS[layout])
    return found


@pytest.mark.claim("experts lie on data ranks beside context and tensor parallelism")
def test_same_gradients_and_load_as_in_one_process() -> None:
    nothing: dict[str, Any] = {}
    for found in run(4, compare_all, PAIRS, timeout=600):
        assert found == dict.fromkeys(PAIRS, nothing)
