"""Score models and value heads: where their weights come from, what they say, what the plan counts, and what is exported of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drumline.checkpoint.save import Checkpointer
from drumline.config.config import Config, LoRAConfig
from drumline.config.model import Head, ModelConfig
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.models.build import ModelHead, build_model, lay_out
from drumline.models.classes import set_classes
from drumline.models.export import export
from drumline.models.head import can_split, compute_outputs, trunk_and_head
from drumline.models.load import facts, load_config
from drumline.models.shards import canonical_tensors
from drumline.models.small import TrialTokens
from tests.plans import small_plan
from tests.tiny import tiny_model_dir

IDS_BT = torch.arange(3, 15).view(2, 6)
ALGORITHM = {"score": {"kind": "reward"}, "valued": {"kind": "ppo", "value": "head"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("scores") / "model")


def built(folder: Path, head: Head, seed: int = 0) -> Any:
    return build_model(str(folder), ModelConfig(id=str(folder)), seed, head=head).eval()


def run_of(root: Path, folder: Path, model: Any, head: Head, **sections: Any) -> Path:
    """A run whose one checkpoint holds `model`."""
    values = {
        "model": {"id": str(folder)},
        "data": {"train": [{"kind": "file", "path": "x"}], "packing": False},
        "algorithm": ALGORITHM[head],
        **sections,
    }
    run = root / "run"
    config = Config.model_validate(values)
    plan = small_plan(config, run, lr=1e-3, steps=1, model_path=str(folder))

    assert plan.config.head == head

    run.mkdir()
    plan.save(run / "plan.json")
    checkpointer = Checkpointer(
        run / "checkpoints", keep=1, keep_best=False, mode="min", asynchronous=False
    )
    checkpointer.save(1, canonical_tensors(model), {"step": 1}, None)
    (result,) = checkpointer.wait()

    assert result.error is None

    return run


def moved(model: Any) -> Any:
    """The model, whatever learns of it a little elsewhere."""
    torch.manual_seed(1)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)

    return model


def values_of(model: Any, ids_BT: torch.Tensor = IDS_BT) -> torch.Tensor:
    parts = None
    if can_split(model):
        parts = trunk_and_head(model)

    with torch.no_grad():
        return compute_outputs(model, TrialTokens(ids_BT), parts).values()


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_score_is_what_transformers_pools_at_the_last_token(folder: Path) -> None:
    model = built(folder, "score")
    values_BT = values_of(model)

    assert values_BT.shape == IDS_BT.shape
    assert values_BT.dtype == torch.float32

    for length in range(1, 7):
        with torch.no_grad():
            expected = model(input_ids=IDS_BT[:, :length]).logits[:, 0]
        assert_close(values_BT[:, length - 1], expected)


def test_a_language_model_gives_the_trunk_and_the_seed_the_score(folder: Path) -> None:
    """The score is drawn by the model's own rule: normal, of its initializer_range."""
    model = built(folder, "score")
    weights = model.state_dict()
    for name, tensor in built(folder, "lm").state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(weights.pop(name), tensor)

    assert set(weights) == {"score.weight"}

    score = model.score.weight.detach()
    assert torch.equal(score, built(folder, "score").score.weight)
    assert not torch.equal(score, built(folder, "score", seed=1).score.weight)
    assert float(score.std()) == pytest.approx(model.config.initializer_range, rel=0.5)


def test_a_fresh_value_is_zero_and_the_logits_are_untouched(folder: Path) -> None:
    language = built(folder, "lm")
    model = built(folder, "valued")

    assert not values_of(model).any()

    with torch.no_grad():
        logits = model(input_ids=IDS_BT).logits
        assert torch.equal(logits, language(input_ids=IDS_BT).logits)

        model.value_head.weight.normal_()
        hidden_BTD = model.model(input_ids=IDS_BT).last_hidden_state
        assert_close(values_of(model), model.value_head(hidden_BTD).squeeze(2))


def test_values_in_low_precision_are_computed_in_fp32(folder: Path) -> None:
    model = built(folder, "score")
    with torch.autocast("cpu", torch.bfloat16):
        values_BT = values_of(model)

    hidden_BTD = compute_outputs(model, TrialTokens(IDS_BT), trunk_and_head(model)).hidden_BTD
    assert values_BT.dtype == torch.float32
    assert hidden_BTD is not None

    torch.testing.assert_close(values_BT, values_of(model), rtol=5e-2, atol=5e-2)


def test_a_head_that_reads_the_whole_text_is_no_score() -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 64,
    }
    model = ModelConfig(id=None, init="random", config=config)
    message = "BertForSequenceClassification has no score of each token"
    with pytest.raises(ModelError, match=message):
        lay_out(None, model, 0, head=ModelHead("score"))


def test_a_frozen_model_without_a_trained_head_is_refused(folder: Path, tmp_path: Path) -> None:
    frozen = ModelHead("score", may_be_drawn=False)
    message = r"no weights for score\.weight, and a frozen model keeps them"
    with pytest.raises(ModelError, match=message):
        lay_out(str(folder), ModelConfig(id=str(folder)), 0, head=frozen)

    built(folder, "score").save_pretrained(tmp_path)
    lay_out(str(tmp_path), ModelConfig(id=str(tmp_path)), 0, head=frozen)


@pytest.mark.parametrize("head", ["score", "valued"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_plan_counts_what_is_built(folder: Path, head: Head, lora: bool) -> None:
    """The head of a value is tied to the embedding, and the policy's own head is counted too."""
    model = built(folder, head)
    adapter = None
    if lora:
        adapter = LoRAConfig(r=4)
        adapters.inject(model, adapter, 0)

    config = load_config(str(folder), ModelConfig())
    language = facts(config, 64, adapter)
    told = facts(set_classes(load_config(str(folder), ModelConfig()), head, ()), 64, adapter, head)

    assert told.parameters == sum(p.numel() for p in model.parameters())
    assert told.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)

    width = model.config.hidden_size
    embedding = model.get_input_embeddings().weight.numel()

    # The embedding's parameters are counted with those of the last norm.
    assert told.embedding_parameters == embedding + width

    # A tied head is a product, and a score model has none.
    if head == "score":
        own = width
        assert told.head_parameters == own
        behind = own - embedding
    else:
        own = width + 1
        assert told.head_parameters == own + embedding
        behind = own

    times = 4 if lora and head == "score" else 6
    difference = told.flops_per_token - language.flops_per_token

    assert difference == pytest.approx(6 * own + times * (behind - own))


@pytest.mark.slow
def test_a_reward_model_is_exported_for_transformers(folder: Path, tmp_path: Path) -> None:
    """Read as a role it is complete: nothing of it is drawn."""
    from transformers import AutoModelForSequenceClassification

    out = tmp_path / "out"
    model = moved(built(folder, "score"))
    result = export(run_of(tmp_path, folder, model, "score"), out, "last")

    assert result.max_logit_difference == 0.0

    again = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert again.config.num_labels == 1
    assert again.config.pad_token_id == 0
    assert again.config.id2label.keys() == {0}

    padded_BT = torch.nn.functional.pad(IDS_BT, (0, 2), value=again.config.pad_token_id)
    with torch.no_grad():
        logits = again(input_ids=padded_BT).logits

    assert_close(logits[:, 0], values_of(model)[:, -1])
    assert torch.equal(built(out, "score", seed=5).score.weight, model.score.weight)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["merged", "adapter"])
def test_a_score_beside_an_adapter_is_exported(folder: Path, tmp_path: Path, apart: bool) -> None:
    out = tmp_path / "out"
    lora = LoRAConfig(r=4)
    model = built(folder, "score")
    adapters.inject(model, lora, 0)
    learns = {name for name, p in moved(model).named_parameters() if p.requires_grad}

    assert {name for name in learns if "lora_" not in name} == {"score.weight"}

    run = run_of(tmp_path, folder, model, "score", adapter=lora.model_dump())
    export(run, out, "last", adapter=apart)
    if apart:
        tensors = load_file(out / "adapter_model.safetensors")
        assert torch.equal(tensors["base_model.model.score.weight"], model.score.weight)
    else:
        values_BT = values_of(built(out, "score"))
        torch.testing.assert_close(values_BT, values_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_policy_is_exported_without_its_value_head(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = moved(built(folder, "valued"))
    export(run_of(tmp_path, folder, model, "valued"), out, "last")
    names = {name for name in model.state_dict() if not name.startswith("value_head")}

    assert set(built(out, "lm").state_dict()) == names

    value = load_file(out / "value_head.safetensors")
    assert value.keys() == {"value_head.weight", "value_head.bias"}
    assert value["value_head.weight"].shape == (1, 32)
    assert value["value_head.bias"].shape == (1,)
    assert torch.equal(value["value_head.weight"], model.value_head.weight)
