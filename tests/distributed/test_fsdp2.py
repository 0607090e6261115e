"""Models laid out without weights: under every way of cutting them each rank gets its own part of the very weights of one process,
from files or drawn; FSDP2's options reach FSDP2; a resumed run reads no weights but the checkpoint's."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drumline.config.load import load
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.dist.mesh import data_mesh, device_mesh
from drumline.engine.strategies.fsdp2.transform import apply_fsdp2
from drumline.engine.tensor_parallel import apply_tp
from drumline.errors import PlanError
from drumline.models.build import build_model, lay_out
from drumline.models.head import ForwardWithObjective
from drumline.models.shards import Values
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.checkpoint_ranks import run
from tests.distributed.ranks import run_plans
from tests.harness import events, write_config
from tests.strategies import FSDP2Strategy
from tests.tiny import tiny_model_dir

MESHES = [Mesh(shard=4), Mesh(replicate=2, shard=2), Mesh(replicate=2, tp=2), Mesh(shard=2, tp=2)]
INITS: list[Any] = ["pretrained", "random"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """319 tokens, which no number of ranks divides; embedding and head are tied."""
    return tiny_model_dir(tmp_path_factory.mktemp("fsdp2") / "model", vocab_size=319)


def laid_out(folder: Path, init: Any) -> tuple[Any, Values]:
    model, source = lay_out(str(folder), ModelConfig(id=str(folder), init=init), seed=5)
    return model, Values(source, "cpu", 5)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(folder: Path, mesh: Mesh, init: Any) -> list[str]:
    """Lay out, cut, fill; what differs from the model of one process, and what is not as it should be."""
    model, values = laid_out(folder, init)
    places = device_mesh(mesh, "cpu")
    if mesh.tp > 1:
        apply_tp(model, places["tp"])
    if mesh.shard > 1:
        apply_fsdp2(ForwardWithObjective(model), model, FSDP2Strategy(), data_mesh(places), None)
    values.fill(model)
    plain = build_model(str(folder), ModelConfig(id=str(folder), init=init), seed=5)
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    got = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong = [] if got.keys() == expected.keys() else ["names"]
    wrong += [
        name for name, tensor in got.items() if not torch.equal(whole(tensor), expected[name])
    ]
    wrong += [] if model.lm_head.weight is model.model.embed_tokens.weight else ["tied"]
    held = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()
    )
    share = sum(p.numel() for p in plain.parameters()) / (mesh.shard * mesh.tp)
    return wrong + (
        [] if held < 1.1 * share else [f"{held} numbers held, its share is {share:.0f}"]
    )


def compare_all(folder: Path) -> dict[str, list[str]]:
    return {f"{mesh} {init}": compare(folder, mesh, init) for mesh in MESHES for init in INITS}


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
    """The largest difference between gradients with and without FSDP2, by weight, and torch's warnings."""
    torch.manual_seed(0)
    plain, sharded = ViewsInPlace(), ViewsInPlace()
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
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    differences = [
        float((whole(b.grad) - a.grad).abs().max() / a.grad.abs().max()) for a, b in pairs
    ]
    return differences, [str(warning.message) for warning in caught]


def test_outputs_that_are_views_may_be_changed_in_place() -> None:
    for error in run(2, change_a_view_of_an_input):
        assert "is a view and is being modified inplace" in error, "never a wrong gradient"
    for differences, caught in run(2, gradients_of_views):
        assert len(differences) == 6 and max(differences) <= 1e-5
        assert not [line for line in caught if "view" in line], caught


@pytest.mark.parametrize("init", INITS)
def test_a_stage_of_a_pipeline_gets_its_layers(model_dir: Path, init: Any) -> None:
    """The last one: its head is tied to an embedding that another stage holds."""
    model, values = laid_out(model_dir, init)
    model.model.embed_tokens = None
    model.model.layers = nn.ModuleDict({"1": model.model.layers[1]})
    values.fill(model)
    plain = dict(
        build_model(
            str(model_dir), ModelConfig(id=str(model_dir), init=init), seed=5
        ).named_parameters()
    )
    got = dict(model.named_parameters())
    assert torch.equal(got.pop("lm_head.weight"), plain["model.embed_tokens.weight"])
    assert got.keys() == {n for n in plain if n.startswith(("model.layers.1.", "model.norm."))}
    assert all(torch.equal(tensor, plain[name]) for name, tensor in got.items())


OPTIONS: list[dict[str, Any]] = [
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


def told(folder: Path) -> list[list[dict[str, Any]]]:
    """For each of OPTIONS what each unit of FSDP2 was told, in the model's order."""
    return [
        [_of_unit(unit) for unit in _units(folder, FSDP2Strategy(**options))] for options in OPTIONS
    ]


def _units(folder: Path, options: FSDP2Strategy) -> list[Any]:
    model, _ = laid_out(folder, "pretrained")
    apply_fsdp2(
        ForwardWithObjective(model),
        model,
        options,
        data_mesh(device_mesh(Mesh(shard=2), "cpu")),
        torch.bfloat16,
    )
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _of_unit(unit: Any) -> dict[str, Any]:
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
    shared: dict[str, Any] = {
        "reshard_after_forward": True,
        "offload": {False},
        "dtypes": (torch.bfloat16, torch.float32),
    }
    assert plain == [
        {"prefetch": 1, "backward_prefetch": 0, **shared},
        {"prefetch": 0, "backward_prefetch": 1, **shared},
    ]
    assert [(u["prefetch"], u["backward_prefetch"]) for u in other] == [(0, 0), (0, 1)]
    assert {key: other[0][key] for key in shared} == {
        "reshard_after_forward": False,
        "offload": {True},
        "dtypes": (torch.bfloat16, torch.bfloat16),
    }
    assert [(u["prefetch"], u["backward_prefetch"]) for u in halves] == [
        (3, 0),
        (2, 1),
        (1, 2),
        (0, 3),
    ]


def plan_of(root: Path, name: str, model: Path, strategy: Any) -> Path:
    folder = root / name
    folder.mkdir()
    path = write_config(
        folder,
        model,
        strategy=strategy,
        checkpoint={"every": 2, "asynchronous": False, "export": "none"},
    )
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=2)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def test_an_unknown_class_to_wrap_is_refused_with_those_there_are(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        PlanError, match=r"strategy.wrap.*no module of class LamaMLP.*there are .*LlamaMLP"
    ):
        plan_of(tmp_path, "run", model_dir, {"kind": "fsdp2", "wrap": ["LamaMLP"]})


def test_a_resumed_run_needs_no_weights_but_the_checkpoints(
    model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    first, second = (plan_of(tmp_path, name, model, "fsdp2") for name in ("first", "second"))
    run_plans([first], 2)
    stopped = first.parent / "checkpoints" / "step-00000002"
    shutil.copytree(stopped, second.parent / "checkpoints" / stopped.name)
    (model / "model.safetensors").unlink()
    run_plans([second], 2)
    expected = [e["loss"] for e in events(first.parent, "step")][2:]
    assert [e["loss"] for e in events(second.parent, "step")] == pytest.approx(expected, rel=1e-6)
