"""Models besides the policy: which ones a config asks for, how each is planned, which are refused; and two that learn as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.config import Config
from drumline.engine.build import build_engine
from drumline.engine.engine import CompositeEngine
from drumline.errors import ModelError
from drumline.hardware.detect import Machine
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.planner.cluster import cluster_here
from drumline.planner.question import build_question, find_model
from drumline.train.setup import find_roles
from tests.fake_engine import FakeEngine
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.unit.test_native import batches

CPU = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
LORA = {"adapter": "lora"}
OTHER = {"id": "other"}
REWARDS = [
    {"kind": "model", "model": OTHER},
    {"kind": "length", "free": 1, "limit": 2},
    {"kind": "model", "model": {"id": "third"}},
]


def config(algorithm: Any, **sections: Any) -> Config:
    base = {
        "model": {"id": "policy"},
        "data": {"train": [{"kind": "file", "path": "x"}], "packing": False, "max_length": 64},
    }
    return Config.model_validate({**base, "algorithm": algorithm, **sections})


@pytest.mark.parametrize(
    ("algorithm", "sections", "expected"),
    [
        ("sft", {}, {}),
        ("dpo", {}, {"reference": ("policy", "lm")}),
        ("dpo", LORA, {}),
        ({"kind": "dpo", "reference_model": OTHER}, LORA, {"reference": ("other", "lm")}),
        ("ppo", {}, {"reference": ("policy", "lm")}),
        ("ppo", LORA, {}),
        ({"kind": "ppo", "kl": 0.0}, {}, {}),
        ({"kind": "ppo", "value": "separate", "kl": 0.0}, LORA, {"value": ("policy", "score")}),
        ("grpo", {}, {}),
        (
            {"kind": "grpo", "kl": {"coefficient": 0.1, "reference_model": OTHER}},
            LORA,
            {"reference": ("other", "lm")},
        ),
        (
            {"kind": "grpo", "rewards": REWARDS},
            {},
            {"reward": ("other", "score"), "reward2": ("third", "score")},
        ),
    ],
)
def test_which_models_a_config_asks_for(
    algorithm: Any, sections: dict[str, Any], expected: dict[str, tuple[str, str]]
) -> None:
    if isinstance(algorithm, dict) and algorithm.get("kl") == 0.0:
        algorithm = {**algorithm, "kl": {"coefficient": 0.0}}
    asked = config(algorithm, **sections)
    found = asked.algorithm.auxiliary_models(asked)
    assert {name: (role.model.id, role.head) for name, role in found.items()} == expected
    assert [name for name, role in found.items() if role.trainable] == [
        name for name in found if name == "value"
    ]


def planned(tmp_path: Path, strategy: Any, algorithm: Any, world_size: int = 2) -> Plan:
    policy, other = (
        tiny_model_dir(tmp_path / "policy"),
        tiny_model_dir(tmp_path / "other", layers=6),
    )
    algorithm = {
        **algorithm,
        "reference_model" if algorithm["kind"] == "dpo" else "value_model": {"id": str(other)},
    }
    said = config(algorithm, model={"id": str(policy)}, strategy=strategy)
    found = find_model(said.model, lambda *_: None)
    roles = find_roles(said, found, lambda *_: None)
    own = build_question(
        said, found, roles, None, cluster_here(said, CPU, "cpu", world_size)[0]
    ).facts
    told: dict[str, Any] = {
        "run_dir": "r",
        "machine": CPU,
        "model": KnownModel(own, str(policy), roles),
        "data": None,
    }
    return resolve(said, world_size=world_size, **told)


def test_a_role_of_another_size_is_cut_by_its_own_layers(tmp_path: Path) -> None:
    plan = planned(tmp_path, "pp", {"kind": "dpo"})
    assert plan.pipeline is not None and [stop for _, stop in plan.pipeline.layers] == [1, 2]
    role = plan.of_role("reference")
    assert role.pipeline is not None and [stop for _, stop in role.pipeline.layers] == [3, 6]
    assert role.model_path == str(tmp_path / "other") and role.config.model.id == role.model_path


@pytest.mark.parametrize(
    ("strategy", "kind"), [("zero1", "none"), ("zero2", "none"), ("zero3", "fsdp2")]
)
def test_what_is_frozen_under_deepspeed_runs_natively(
    tmp_path: Path, strategy: str, kind: str
) -> None:
    plan = planned(tmp_path, strategy, {"kind": "dpo"})
    role = plan.of_role("reference")
    assert (plan.engine, role.engine, role.data_parallel, role.deepspeed) == (
        "deepspeed",
        "native",
        kind,
        None,
    )


def test_what_learns_under_deepspeed_keeps_its_own_files(tmp_path: Path) -> None:
    offload = {"kind": "nvme", "path": str(tmp_path / "nvme")}
    strategy = {"kind": "zero3", "offload_optimizer": offload, "offload_parameters": offload}
    plan = planned(tmp_path, strategy, {"kind": "ppo", "value": "separate", "value_lr": 1e-4})
    role = plan.of_role("value")
    assert role.engine == "deepspeed" and plan.deepspeed and role.deepspeed
    paths = [
        p["zero_optimization"]["offload_optimizer"]["nvme_path"]
        for p in (plan.deepspeed, role.deepspeed)
    ]
    assert paths == [str(tmp_path / "nvme"), str(tmp_path / "nvme" / "value")]
    assert plan.roles["value"].lr_ratio == pytest.approx(1e-4 / plan.config.optimizer.lr)


def test_a_reference_that_reads_other_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    policy, other = (
        tiny_model_dir(tmp_path / "policy"),
        tiny_model_dir(tmp_path / "other", vocab_size=300),
    )
    said = config({"kind": "dpo", "reference_model": {"id": str(other)}}, model={"id": str(policy)})
    with pytest.raises(ModelError, match="its tokenizer is not the policy's") as raised:
        find_roles(said, find_model(said.model, lambda *_: None), lambda *_: None)
    assert raised.value.where == "algorithm.reference_model" and "\n" not in raised.value.line()
    for file in other.glob(
        "*token*"
    ):  # none of its own: then its embedding has to have a row for each token
        file.unlink()
    with pytest.raises(
        ModelError, match=f"tokenizer has {len(tiny_tokenizer())} tokens but the embedding only"
    ):
        find_roles(said, find_model(said.model, lambda *_: None), lambda *_: None)


def test_a_frozen_copy_says_the_same_from_fewer_bytes(tmp_path: Path) -> None:
    """In low precision its weights are rounded once, and not at each use: of DPO's margins and of KL nothing comes from rounding.

    Under DeepSpeed the same is asked in processes of its own (tests/distributed/test_roles.py): its groups outlive a process group."""
    model = tiny_model_dir(tmp_path / "model")
    said = config({"kind": "dpo"}, model={"id": str(model)}, strategy="single", precision="bf16")
    roles = find_roles(said, find_model(said.model, lambda *_: None), lambda *_: None)
    told: dict[str, Any] = {
        "run_dir": "r",
        "machine": CPU,
        "model": KnownModel(path=str(model), roles=roles),
        "data": None,
        "world_size": 1,
    }
    plan = resolve(said, **told)
    policy, reference = build_engine(plan, "cpu"), build_engine(plan, "cpu", role="reference")

    def read(outputs: Any, batch: Any) -> torch.Tensor:
        said: torch.Tensor = outputs.log_probs(batch.targets_BT, 16)[0]
        return said

    one, other = (engine.infer(batches(), read) for engine in (policy, reference))
    assert all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(one, other, strict=True))
    whole = 4 * sum(p.numel() for p in reference.model.parameters())  # type: ignore[attr-defined]
    assert sum(p.nbytes for p in reference.model.parameters()) < 0.8 * whole  # type: ignore[attr-defined]


class Tokens:
    def __init__(self, *tokens: int) -> None:
        self.targets_BT = torch.tensor([tokens])


def test_two_models_learn_as_one() -> None:
    engines = {"policy": FakeEngine(), "value": FakeEngine()}
    both = CompositeEngine(dict(engines), {"value": 0.5})
    sums = both.forward_backward([Tokens(1, 3)], dict.fromkeys(engines), 2.0)
    assert sums["loss"] == 2 * engines["policy"].evaluate([Tokens(1, 3)], None)["loss"]
    norm = both.grad_norm()
    assert float(norm) == pytest.approx(2 * 2**0.5)
    both.step(0.1, norm, torch.isfinite(norm))
    assert [float(engine.weight) for engine in engines.values()] == pytest.approx([0.2, 0.1])
    assert (
        both.evaluate([Tokens(1)], None)["loss"]
        == engines["policy"].evaluate([Tokens(1)], None)["loss"]
    )
    tensors = both.tensors()
    assert (
        tensors.keys() == {"model.weight", "value/model.weight"}
        and tensors["value/model.weight"] is engines["value"].weight
    )
    told = {**both.state(), "step": 1}
    fresh = {"policy": FakeEngine(), "value": FakeEngine()}
    CompositeEngine(dict(fresh), {}).load_state({**told, "roles": {"value": {"calls": 7}}}, tensors)
    assert [engine.calls for engine in fresh.values()] == [1, 7]
