"""Models besides the policy: which ones a config asks for, and how each is planned.

And which are refused, and two that learn as one.
"""

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
from drumline.plan.plan import Plan, RolePlan
from drumline.plan.resolve import KnownModel, resolve
from drumline.planner.cluster import cluster_here
from drumline.planner.question import build_question, find_model
from drumline.train.setup import find_roles
from tests.fake_engine import FakeEngine
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.unit.test_native import batches

CPU = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
LORA = {"adapter": "lora"}
NO_KL = {"coefficient": 0.0}
OTHER = {"id": "other"}
REWARDS = [
    {"kind": "model", "model": OTHER},
    {"kind": "length", "free": 1, "limit": 2},
    {"kind": "model", "model": {"id": "third"}},
]


def config(algorithm: Any, **sections: Any) -> Config:
    source = {"kind": "file", "path": "x"}
    base = {
        "model": {"id": "policy"},
        "data": {"train": [source], "packing": False, "max_length": 64},
        "algorithm": algorithm,
    }
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("algorithm", "sections", "expected"),
    [
        ("sft", {}, {}),
        ("dpo", {}, {"reference": ("policy", "lm")}),
        ("dpo", LORA, {}),
        (
            {"kind": "dpo", "reference_model": OTHER},
            LORA,
            {"reference": ("other", "lm")},
        ),
        ("ppo", {}, {"reference": ("policy", "lm")}),
        ("ppo", LORA, {}),
        ({"kind": "ppo", "kl": NO_KL}, {}, {}),
        (
            {"kind": "ppo", "value": "separate", "kl": NO_KL},
            LORA,
            {"value": ("policy", "score")},
        ),
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
    algorithm: Any,
    sections: dict[str, Any],
    expected: dict[str, tuple[str, str]],
) -> None:
    asked = config(algorithm, **sections)
    found = asked.algorithm.auxiliary_models(asked)
    assert found.keys() == expected.keys()
    for name, role in found.items():
        assert (role.model.id, role.head) == expected[name]
        assert role.trainable is (name == "value")


def roles_of(asked: Config) -> dict[str, RolePlan]:
    """Return the plans of a config's auxiliary models."""
    policy = find_model(asked.model, lambda *_: None)
    return find_roles(asked, policy, lambda *_: None)


def planned(tmp_path: Path, strategy: Any, key: str, **algorithm: Any) -> Plan:
    """Return a plan for two processes, in which `key` of the algorithm names a deeper model."""
    policy = tiny_model_dir(tmp_path / "policy")
    other = tiny_model_dir(tmp_path / "other", layers=6)
    asked = config(
        {**algorithm, key: {"id": str(other)}},
        model={"id": str(policy)},
        strategy=strategy,
    )
    return plan_of(asked)


def plan_of(asked: Config) -> Plan:
    """Return the plan of a config for two processes."""
    found = find_model(asked.model, lambda *_: None)
    roles = roles_of(asked)
    cluster, _ = cluster_here(asked, CPU, "cpu", 2)
    facts = build_question(asked, found, roles, None, cluster).facts
    return resolve(
        asked,
        run_dir="r",
        machine=CPU,
        world_size=2,
        model=KnownModel(facts, asked.model.id, roles),
        data=None,
    )


def test_the_policys_adapter_is_not_asked_of_a_role(tmp_path: Path) -> None:
    """The policy is its own reference without its adapter, and exports the adapter alone."""
    policy = tiny_model_dir(tmp_path / "policy")
    asked = config(
        {"kind": "ppo", "value": "separate"},
        model={"id": str(policy)},
        checkpoint={"export_adapter": True},
        **LORA,
    )
    assert plan_of(asked).roles.keys() == {"value"}


def stops(plan: Plan) -> list[int]:
    """Return the layer before which each stage of a pipeline stops."""
    assert plan.pipeline is not None
    return [stop for _, stop in plan.pipeline.layers]


def test_a_role_of_another_size_is_cut_by_its_own_layers(tmp_path: Path) -> None:
    plan = planned(tmp_path, "pp", "reference_model", kind="dpo")
    role = plan.single_role("reference")

    assert stops(plan) == [1, 2]
    assert stops(role) == [3, 6]
    assert role.model_path == str(tmp_path / "other")
    assert role.config.model.id == role.model_path


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("zero1", "none"),
        ("zero2", "none"),
        ("zero3", "fsdp2"),
    ],
)
def test_what_is_frozen_under_deepspeed_runs_natively(
    tmp_path: Path,
    strategy: str,
    kind: str,
) -> None:
    plan = planned(tmp_path, strategy, "reference_model", kind="dpo")
    role = plan.single_role("reference")
    assert plan.engine == "deepspeed"
    assert role.engine == "native"
    assert role.data_parallel == kind
    assert role.deepspeed is None


def test_what_learns_under_deepspeed_keeps_its_own_files(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    offload = {"kind": "nvme", "path": str(nvme)}
    strategy = {
        "kind": "zero3",
        "offload_optimizer": offload,
        "offload_parameters": offload,
    }

    plan = planned(
        tmp_path,
        strategy,
        "value_model",
        kind="ppo",
        value="separate",
        value_lr=1e-4,
    )

    role = plan.single_role("value")
    assert role.engine == "deepspeed"
    for layout, folder in ((plan, nvme), (role, nvme / "value")):
        assert layout.deepspeed is not None
        section = layout.deepspeed["zero_optimization"]["offload_optimizer"]
        assert section["nvme_path"] == str(folder)

    ratio = 1e-4 / plan.config.optimizer.lr
    assert plan.roles["value"].lr_ratio == pytest.approx(ratio)


def test_a_reference_that_reads_other_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    policy = tiny_model_dir(tmp_path / "policy")
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)
    algorithm = {"kind": "dpo", "reference_model": {"id": str(other)}}
    asked = config(algorithm, model={"id": str(policy)})

    with pytest.raises(ModelError, match="its tokenizer is not the policy's") as raised:
        roles_of(asked)
    assert raised.value.where == "algorithm.reference_model"
    assert "\n" not in raised.value.line()

    # Without a tokenizer of its own, its embedding has to have a row for each token.
    for file in other.glob("*token*"):
        file.unlink()
    message = f"tokenizer has {len(tiny_tokenizer())} tokens but the embedding only"
    with pytest.raises(ModelError, match=message):
        roles_of(asked)


def test_a_frozen_copy_says_the_same_from_fewer_bytes(tmp_path: Path) -> None:
    """In low precision its weights are rounded once, and not at each use.

    Of DPO's margins and of KL nothing comes from rounding. Under DeepSpeed the same is asked in
    processes of its own (tests/distributed/test_roles.py): its groups outlive a process group.
    """
    folder = str(tiny_model_dir(tmp_path / "model"))
    asked = config(
        {"kind": "dpo"},
        model={"id": folder},
        strategy="single",
        precision="bf16",
    )
    plan = resolve(
        asked,
        run_dir="r",
        machine=CPU,
        world_size=1,
        model=KnownModel(path=folder, roles=roles_of(asked)),
        data=None,
    )
    policy = build_engine(plan, "cpu")
    reference: Any = build_engine(plan, "cpu", role="reference")

    def read(outputs: Any, batch: Any) -> torch.Tensor:
        log_probs_BT, _ = outputs.log_probs(batch.targets_BT, 16)
        return log_probs_BT

    answers = policy.infer(batches(), read)
    copied_answers = reference.infer(batches(), read)
    for one, other in zip(answers, copied_answers, strict=True):
        assert torch.equal(one, other)
        assert one.any()

    fp32_bytes = 0
    own_bytes = 0
    for parameter in reference.model.parameters():
        fp32_bytes += 4 * parameter.numel()
        own_bytes += parameter.nbytes
    assert own_bytes < 0.8 * fp32_bytes


class Tokens:
    def __init__(self, *tokens: int) -> None:
        self.targets_BT = torch.tensor([tokens])


def test_two_models_learn_as_one() -> None:
    policy = FakeEngine()
    value = FakeEngine()
    both = CompositeEngine({"policy": policy, "value": value}, {"value": 0.5})
    objectives = {"policy": None, "value": None}

    sums = both.forward_backward([Tokens(1, 3)], objectives, 2.0)
    alone = policy.evaluate([Tokens(1, 3)], None)
    assert sums["loss"] == 2 * alone["loss"]

    norm = both.grad_norm()
    assert float(norm) == pytest.approx(2 * 2**0.5)

    both.step(0.1, norm, torch.isfinite(norm))
    assert float(policy.weight) == pytest.approx(0.2)
    assert float(value.weight) == pytest.approx(0.1)

    held_out = both.evaluate([Tokens(1)], None)
    alone = policy.evaluate([Tokens(1)], None)
    assert held_out["loss"] == alone["loss"]

    tensors = both.tensors()
    assert tensors.keys() == {"model.weight", "value/model.weight"}
    assert tensors["value/model.weight"] is value.weight

    state = {**both.state(), "step": 1, "roles": {"value": {"calls": 7}}}
    fresh_policy = FakeEngine()
    fresh_value = FakeEngine()
    fresh = CompositeEngine({"policy": fresh_policy, "value": fresh_value}, {})
    fresh.load_state(state, tensors)
    assert fresh_policy.calls == 1
    assert fresh_value.calls == 7
