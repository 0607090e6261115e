"""Reward models that read images: scores, loss and gradients are those of transformers' own trunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoImageProcessor, AutoModel

from drumline.algorithms.reward.objective import RewardModel
from drumline.algorithms.reward.spec import RewardModelConfig
from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.data.images import collate_vision_pairs
from drumline.data.prepare import prepare
from drumline.errors import PlanError
from drumline.models.build import build_model
from drumline.models.classes import auto_class, set_classes
from drumline.models.head import ForwardWithObjective, can_split
from drumline.models.image_tokens import FAMILIES, Vision
from drumline.models.load import facts, load_config
from drumline.models.parts import names_in_part
from drumline.models.vision import vision_of as vision_of_run
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from tests.harness import read_json, vision_pair_rows, write_rows
from tests.tiny import tiny_vision_dir
from tests.tiny_vision import tiny_family_dir
from tests.vision_setups import ROWS, assert_close, vision_of

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)
# Qwen3-VL's mixture is built as its dense model is.
TESTED = [name for name in FAMILIES if name != "qwen3_vl_moe"]
OBJECTIVE = RewardModel(RewardModelConfig()).objective


@pytest.fixture(scope="module", params=TESTED)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    """A language model of a family; the folder around it has pairs with and without images."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3_vl":
        tiny_vision_dir(root / "model")
    else:
        tiny_family_dir(root / "model", request.param)
    write_rows(root / "rows.jsonl", vision_pair_rows(root, 3))
    return vision_of(root / "model")


@pytest.fixture(scope="module")
def model(vision: Vision) -> Any:
    """A reward model with that trunk. Its score is large, so that rewards differ."""
    built = build_model(vision.path, vision.model, seed=0, head="score")
    with torch.no_grad():
        built.score.weight.mul_(50)
    return built.train()


def pairs_of(vision: Vision) -> TokenCache:
    folder = Path(vision.path).parent
    values = {
        "model": {"id": vision.path},
        "algorithm": "reward",
        "data": {"train": [ROWS], "workers": 1, "cache_dir": str(folder / "cache")},
    }
    config = Config.model_validate(values)
    # A reward model reads images as a language model does.
    found = vision_of_run(config, vision.path, load_config(vision.path, vision.model))

    assert found is not None
    assert found.identity() == vision.identity()

    prepared = prepare(config, vision.path, folder, vision=found)
    return TokenCache.open(prepared.train_cache)


def own_rewards(
    trunk: Any, weight: torch.Tensor, cache: TokenCache, sample: int, vision: Vision
) -> torch.Tensor:
    """Return the rewards of both sides of a pair by transformers' trunk, each side alone."""
    meta = cache.meta(sample)
    grids = [tuple(grid) for grid in meta.get("grid", ())]
    pixels = [vision.patches(*each) for each in zip(meta.get("images", ()), grids, strict=True)]
    rewards = []
    for tokens, _ in cache.segments(sample):
        ids_BT = torch.from_numpy(tokens.astype("int64"))[None]
        images = {}
        if pixels:
            images = vision.arguments(pixels, grids, ids_BT) | vision.generation_arguments(ids_BT)
        hidden_BTD = trunk(input_ids=ids_BT, **images).last_hidden_state
        rewards.append(hidden_BTD[0, -1] @ weight)
    return torch.stack(rewards)


def test_loss_and_gradients_are_those_of_the_trunk(vision: Vision, model: Any) -> None:
    cache = pairs_of(vision)
    samples = list(range(len(cache)))

    assert sum(bool(cache.meta(sample)) for sample in samples) == 2

    batch = collate_vision_pairs(cache, [*samples, -1], 0, None, vision)
    model.zero_grad()
    loss, sums = ForwardWithObjective(model)(batch, OBJECTIVE)
    loss.backward()
    trunk = AutoModel.from_pretrained(vision.path).eval()
    weight = model.score.weight.detach()[0].clone().requires_grad_()
    total = 0.0
    for sample in samples:
        chosen, rejected = own_rewards(trunk, weight, cache, sample, vision)
        own_loss = -functional.logsigmoid(chosen - rejected)
        own_loss.backward()
        total += float(own_loss.detach())

    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(sums["pairs"]) == len(samples)
    assert_close(model.score.weight.grad[0], weight.grad, "score")

    ours = dict(model.model.named_parameters())
    learned = 0
    for name, parameter in trunk.named_parameters():
        if parameter.grad is not None:
            learned += 1
            # The score is large, and the gradients are sums over many patches: in fp64 they agree to
            # 1e-13 of the largest, in fp32 to 8e-5.
            largest = float(parameter.grad.abs().max())
            assert_close(ours[name].grad, parameter.grad, name, atol=2e-4 * max(1.0, largest))

    assert learned > 20
    assert can_split(model)


def test_the_tower_runs_without_images(vision: Vision, model: Any) -> None:
    """Its gradients are zero: no rank waits for another, and no number changes."""
    cache = pairs_of(vision)
    texts = [sample for sample in range(len(cache)) if not cache.meta(sample)]
    batch = collate_vision_pairs(cache, texts, 0, None, vision)
    model.zero_grad()
    loss, _ = ForwardWithObjective(model)(batch, OBJECTIVE)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    tower = names_in_part(model, "vision", gradients, "test")

    assert len(tower) > 8
    assert not any(gradients[name].any() for name in tower)


def test_a_folder_of_it_is_read_back(vision: Vision, model: Any, tmp_path: Path) -> None:
    """All of it, so that nothing is drawn: under the name that transformers gives such classes."""
    model.save_pretrained(tmp_path)
    name = read_json(tmp_path / "config.json")["architectures"][0]

    assert name == type(model).__name__
    assert name.endswith("ForSequenceClassification")

    again = build_model(str(tmp_path), ModelConfig(id=str(tmp_path)), seed=9, head="score")
    read = auto_class(model.config, "score").from_pretrained(str(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(read.state_dict()[name], tensor), name


def test_a_reward_model_of_text_cannot_judge_images(vision: Vision) -> None:
    values = {
        "model": {"id": vision.path},
        "data": {"train": [ROWS]},
        "algorithm": {
            "kind": "grpo",
            "generator": {"kind": "hf", "max_new_tokens": 4},
            "rewards": [{"kind": "model", "model": vision.path}],
        },
    }
    config = Config.model_validate(values)
    scored = set_classes(load_config(vision.path, vision.model), "score", ())
    judge = facts(scored, 64, head="score")
    sizes = facts(load_config(vision.path, vision.model), 64)
    policy = replace(sizes, roles={"reward": judge})

    assert judge.vision_language

    check_rules(Case(config, Mesh(), "cpu", "fp32", policy))
    text = replace(judge, vision_language=False)

    with pytest.raises(PlanError, match="images × a reward model of text"):
        check_rules(Case(config, Mesh(), "cpu", "fp32", replace(policy, roles={"reward": text})))
