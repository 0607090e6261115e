"""Models laid out without weights: under every way of cutting them each rank gets its own part of
the very weights of one process, from files or drawn; FSDP2's options reach FSDP2; a resumed run
reads no weights but the checkpoint's."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.dist.mesh import data_mesh, device_mesh
from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
from drumline.engine.tensor_parallel import apply_tp
from drumline.errors import PlanError
from drumline.models.build import build_model, lay_out
from drumline.models.head import ForwardWithObjective
from drumline.models.shards import Values
from tests.checkpoint_ranks import run
from tests.distributed.ranks import run_plans
from tests.distributed.setups import SAVED_TWICE, copy_checkpoint, plan_in
from tests.harness import Sections, column, same_tensors
from tests.strategies import FSDP2Strategy
from tests.tiny import tiny_model_dir

MESHES = [Mesh(shard=4), Mesh(replicate=2, shard=2), Mesh(replicate=2, tp=2), Mesh(shard=2, tp=2)]
INITS: list[Any] = ["pretrained", "random"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """319 tokens, which no number of ranks divides; embedding and head are tied."""
    return tiny_model_dir(tmp_path_factory.mktemp("fsdp2") / "model", vocab_size=319)


def laid_out(folder: Path, init: Any) -> tuple[Any, Values]:
    config = ModelConfig(id=str(folder), init=init)
    model, source = lay_out(str(folder), config, seed=5)
    return model, Values(source, "cpu", 5)


def one_process(folder: Path, init: Any) -> Any:
    config = ModelConfig(id=str(folder), init=init)
    return build_model(str(folder), config, seed=5)


def parameters_of(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())


def tensors_of(model: Any) -> dict[str, Any]:
    return parameters_of(model) | dict(model.named_buffers())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def local_size(tensor: torch.Tensor) -> int:
    """How many numbers of a tensor are on this rank."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.numel()


def compare(folder: Path, mesh: Mesh, init: Any) -> list[str]:
    """Lay out, cut, fill; what differs from the model of one process, and what is not as it should
    be."""
    model, values = laid_out(folder, init)
    places = device_mesh(mesh, "cpu")
    if mesh.tp > 1:
        apply_tp(model, places["tp"])
    if mesh.shard > 1:
        apply_fsdp2(ForwardWithObjective(model), model, FSDP2Strategy(), data_mesh(places), None)
    values.fill(model)
    plain = one_process(folder, init)
    expected = tensors_of(plain)
    got = tensors_of(model)
    wrong = []
    if got.keys() != expected.keys():
        wrong.append("names")
    for name, tensor in got.items():
        if not torch.equal(whole(tensor), expected[name]):
            wrong.append(name)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        wrong.append("tied")
    held = sum(map(local_size, model.parameters()))
    share = sum(map(local_size, plain.parameters())) / (mesh.shard * mesh.tp)
    if held >= 1.1 * share:
        wrong.append(f"{held} numbers held, its share is {share:.0f}")
    return wrong


def compare_all(folder: Path) -> dict[str, list[str]]:
    found = {}
    for mesh in MESHES:
        for init in INITS:
            found[f"{mesh} {init}"] = compare(folder, mesh, init)
    return found


def test_each_rank_gets_its_part_of_the_same_weights(model_dir: Path) -> None:
    for differences in run(4, compare_all, model_dir, timeout=110):
        assert len(differences) == len(MESHES) * len(INITS)
        assert not any(differences.values()), differences


class ViewsInPlace(nn.Module):
    """Blocks whose outputs are views, which the model changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
            hidden *= 2
        return hidden.view(-1)


class ViewOfItsInput(nn.Module):
    """A unit whose output is a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1)


def change_a_view_of_an_input() -> str:
    """Change such an output in place, beside its input; torch's error."""
    unit = ViewOfItsInput()
    mesh = data_mesh(device_mesh(Mesh(shard=2), "cpu"))
    apply_fsdp2(unit, unit, FSDP2Strategy(wrap=[]), mesh, None)
    hidden = torch.ones(2, 2, 2, requires_grad=True) * 1
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as raised:
        warnings.simplefilter("ignore")  # torch warns of such a view
        out = unit(hidden)
        out *= 2
    return str(raised.value)


def gradients_of_views() -> tuple[list[float], list[str]]:
    """The largest difference between gradients with and without FSDP2, by weight, and torch's
    warnings."""
    torch.manual_seed(0)
    plain = ViewsInPlace()
    sharded = ViewsInPlace()
    sharded.load_state_dict(plain.state_dict())
    mesh = data_mesh(device_mesh(Mesh(shard=2), "cpu"))
    options = FSDP2Strategy(wrap=["Linear"])
    apply_fsdp2(sharded, sharded, options, mesh, None)
    inputs = torch.randn(2, 3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (plain, sharded):
            out = model(inputs)
            out *= 3
            out.square().sum().backward()
    differences = []
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        difference = (whole(b.grad) - a.grad).abs().max()
        differences.append(float(difference / a.grad.abs().max()))
    return differences, [str(warning.message) for warning in caught]


def test_outputs_that_are_views_may_be_changed_in_place() -> None:
    for error in run(2, change_a_view_of_an_input):
        assert "is a view and is being modified inplace" in error, "never a wrong gradient"
    for differences, caught in run(2, gradients_of_views):
        assert len(differences) == 6
        assert max(differences) <= 1e-5
        assert "view" not in "\n".join(caught)


@pytest.mark.parametrize("init", INITS)
def test_a_stage_of_a_pipeline_gets_its_layers(model_dir: Path, init: Any) -> None:
    """The last one: its head is tied to an embedding that another stage holds."""
    model, values = laid_out(model_dir, init)
    model.model.embed_tokens = None
    model.model.layers = nn.ModuleDict({"1": model.model.layers[1]})
    values.fill(model)
    plain = parameters_of(one_process(model_dir, init))
    got = parameters_of(model)
    assert torch.equal(got.pop("lm_head.weight"), plain["model.embed_tokens.weight"])
    mine = [name for name in plain if name.startswith(("model.layers.1.", "model.norm."))]
    assert got.keys() == set(mine)
    same_tensors(plain, got)


OPTIONS: list[Sections] = [
    {},
    {
        "prefetch": 0,
        "backward_prefetch": 2,
        "offload": "cpu",
        "reduce_dtype": "bf16",
        "reshard_after_forward": False,
    },
    {"wrap": ["LlamaAttention", "LlamaMLP"], "prefetch": 3},
]


# What a unit of FSDP2 was told.
Unit = dict[str, Any]


def told(folder: Path) -> list[list[Unit]]:
    """For each of OPTIONS what each unit of FSDP2 was told, in the model's order."""
    found = []
    for options in OPTIONS:
        units = _units(folder, FSDP2Strategy(**options))
        found.append([_of_unit(unit) for unit in units])
    return found


def _units(folder: Path, options: FSDP2Strategy) -> list[Any]:
    model, _ = laid_out(folder, "pretrained")
    mesh = data_mesh(device_mesh(Mesh(shard=2), "cpu"))
    apply_fsdp2(ForwardWithObjective(model), model, options, mesh, torch.bfloat16)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _of_unit(unit: Any) -> Unit:
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    return {
        "prefetch": len(state._states_to_forward_prefetch),
        "backward_prefetch": len(state._states_to_backward_prefetch),
        "reshard_after_forward": group._reshard_after_forward,
        "offload": {p.offload_to_cpu for p in group.fsdp_params},
        "dtypes": (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype),
    }


def test_options_reach_fsdp2(model_dir: Path) -> None:
    plain, other, halves = run(2, told, model_dir, timeout=110)[0]
    shared: Unit = {
        "reshard_after_forward": True,
        "offload": {False},
        "dtypes": (torch.bfloat16, torch.float32),
    }
    assert plain == [
        {"prefetch": 1, "backward_prefetch": 0, **shared},
        {"prefetch": 0, "backward_prefetch": 1, **shared},
    ]
    assert prefetches(other) == [(0, 0), (0, 1)]
    assert other[0]["reshard_after_forward"] is False
    assert other[0]["offload"] == {True}
    assert other[0]["dtypes"] == (torch.bfloat16, torch.bfloat16)
    assert prefetches(halves) == [(3, 0), (2, 1), (1, 2), (0, 3)]


def prefetches(units: list[Unit]) -> list[tuple[int, int]]:
    """How many units each one fetches ahead, in forward and in backward."""
    return [(unit["prefetch"], unit["backward_prefetch"]) for unit in units]


def plan_of(root: Path, name: str, model: Path, strategy: Any) -> Path:
    return plan_in(root, name, 2, model, strategy=strategy, checkpoint=SAVED_TWICE)


def test_an_unknown_class_to_wrap_is_refused_with_those_there_are(
    model_dir: Path, tmp_path: Path
) -> None:
    strategy = {"kind": "fsdp2", "wrap": ["LamaMLP"]}
    refusal = r"strategy.wrap.*no module of class LamaMLP.*there are .*LlamaMLP"
    with pytest.raises(PlanError, match=refusal):
        plan_of(tmp_path, "run", model_dir, strategy)


def test_a_resumed_run_needs_no_weights_but_the_checkpoints(
    model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    first = plan_of(tmp_path, "first", model, "fsdp2")
    second = plan_of(tmp_path, "second", model, "fsdp2")
    run_plans([first], 2)
    copy_checkpoint(first.parent, second)
    (model / "model.safetensors").unlink()
    run_plans([second], 2)
    expected = column(first.parent, "loss")[2:]
    assert column(second.parent, "loss") == pytest.approx(expected, rel=1e-6)
