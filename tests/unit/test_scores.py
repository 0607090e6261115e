"""Score models and value heads: where their weights come from, what they say, what the plan counts, and what is exported of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drumline.checkpoint.save import Checkpointer
from drumline.config.config import Config, LoRAConfig
from drumline.config.mesh import Mesh
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
from drumline.plan.plan import BatchPlan, Plan, Predicted
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
    }
    plan = Plan(
        config=Config.model_validate({**values, "algorithm": ALGORITHM[head], **sections}), run_dir=str(root / "run"), mesh=Mesh(),
        engine="native", device="cpu", backend="gloo", precision="fp32",
        batch=BatchPlan(global_samples=1, micro_batch=1, accumulation=1, eval_micro_batch=1),
        lr=1e-3, steps=1, data=None, model_path=str(folder), predicted=Predicted(),
    )  # fmt: skip
    assert plan.config.head == head
    (root / "run").mkdir()
    plan.save(root / "run" / "plan.json")
    checkpointer = Checkpointer(
        root / "run" / "checkpoints", keep=1, keep_best=False, mode="min", asynchronous=False
    )
    checkpointer.save(1, canonical_tensors(model), {"step": 1}, None)
    (result,) = checkpointer.wait()
    assert result.error is None
    return root / "run"


def moved(model: Any) -> Any:
    """The model, whatever learns of it a little elsewhere."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def values_of(model: Any, ids_BT: torch.Tensor = IDS_BT) -> torch.Tensor:
    with torch.no_grad():
        return compute_outputs(
            model, TrialTokens(ids_BT), trunk_and_head(model) if can_split(model) else None
        ).values()


def test_a_score_is_what_transformers_pools_at_the_last_token(folder: Path) -> None:
    model = built(folder, "score")
    values_BT = values_of(model)
    assert values_BT.shape == IDS_BT.shape and values_BT.dtype == torch.float32
    with torch.no_grad():
        for length in range(1, 7):
            expected = model(input_ids=IDS_BT[:, :length]).logits[:, 0]
            torch.testing.assert_close(values_BT[:, length - 1], expected, rtol=1e-5, atol=1e-6)


def test_a_language_model_gives_the_trunk_and_the_seed_the_score(folder: Path) -> None:
    language, model, again, other = (
        built(folder, "lm"),
        built(folder, "score"),
        built(folder, "score"),
        built(folder, "score", seed=1),
    )
    weights = model.state_dict()
    for name, tensor in language.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(weights.pop(name), tensor)
    assert set(weights) == {"score.weight"}
    assert torch.equal(model.score.weight, again.score.weight) and not torch.equal(
        model.score.weight, other.score.weight
    )
    # By the model's own rule: normal, of its initializer_range.
    assert float(model.score.weight.detach().std()) == pytest.approx(
        model.config.initializer_range, rel=0.5
    )


def test_a_fresh_value_is_zero_and_the_logits_are_untouched(folder: Path) -> None:
    language, model = built(folder, "lm"), built(folder, "valued")
    assert not values_of(model).any()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS_BT).logits, language(input_ids=IDS_BT).logits)
        model.value_head.weight.normal_()
        hidden_BTD = model.model(input_ids=IDS_BT).last_hidden_state
        torch.testing.assert_close(
            values_of(model), model.value_head(hidden_BTD).squeeze(2), rtol=1e-5, atol=1e-6
        )


def test_values_in_low_precision_are_computed_in_fp32(folder: Path) -> None:
    model = built(folder, "score")
    with torch.autocast("cpu", torch.bfloat16):
        values_BT = values_of(model)
    hidden_BTD = compute_outputs(model, TrialTokens(IDS_BT), trunk_and_head(model)).hidden_BTD
    assert values_BT.dtype == torch.float32 and hidden_BTD is not None
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
    with pytest.raises(
        ModelError, match="BertForSequenceClassification has no score of each token"
    ):
        lay_out(
            None, ModelConfig(id=None, init="random", config=config), 0, head=ModelHead("score")
        )


def test_a_frozen_model_without_a_trained_head_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no weights for score\.weight, and a frozen model keeps them"
    ):
        lay_out(str(folder), ModelConfig(id=str(folder)), 0, head=ModelHead("score", draws=False))
    built(folder, "score").save_pretrained(tmp_path)
    lay_out(str(tmp_path), ModelConfig(id=str(tmp_path)), 0, head=ModelHead("score", draws=False))


@pytest.mark.parametrize("head", ["score", "valued"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_plan_counts_what_is_built(folder: Path, head: Head, lora: bool) -> None:
    model, adapter = built(folder, head), LoRAConfig(r=4) if lora else None
    if adapter:
        adapters.inject(model, adapter, 0)
    told = facts(set_classes(load_config(str(folder), ModelConfig()), head, ()), 64, adapter, head)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (told.parameters, told.trainable) == (
        sum(p.numel() for p in model.parameters()),
        learned,
    )
    width, embedding = model.config.hidden_size, model.get_input_embeddings().weight.numel()
    own = width if head == "score" else width + 1
    assert told.head_parameters == own + (embedding if head == "valued" else 0), (
        "tied to the embedding, the policy's own is counted too"
    )
    assert told.embedding_parameters == embedding + width, "and the last norm"
    language = facts(load_config(str(folder), ModelConfig()), 64, adapter)
    # A tied head is a product, and a score model has none.
    behind = own - (embedding if head == "score" else 0)
    times = 4 if lora and head == "score" else 6
    assert told.flops_per_token - language.flops_per_token == pytest.approx(
        6 * own + times * (behind - own)
    )


@pytest.mark.slow
def test_a_reward_model_is_exported_for_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = moved(built(folder, "score"))
    result = export(run_of(tmp_path, folder, model, "score"), tmp_path / "out", "last")
    assert result.max_logit_difference == 0.0
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert (
        again.config.num_labels == 1
        and again.config.pad_token_id == 0
        and again.config.id2label.keys() == {0}
    )
    padded_BT = torch.nn.functional.pad(IDS_BT, (0, 2), value=again.config.pad_token_id)
    with torch.no_grad():
        torch.testing.assert_close(
            again(input_ids=padded_BT).logits[:, 0], values_of(model)[:, -1], rtol=1e-5, atol=1e-6
        )
    # And read as a role: nothing of it is drawn.
    assert torch.equal(built(tmp_path / "out", "score", seed=5).score.weight, model.score.weight)


@pytest.mark.parametrize("apart", [False, True], ids=["merged", "adapter"])
def test_a_score_beside_an_adapter_is_exported(folder: Path, tmp_path: Path, apart: bool) -> None:
    model, lora = built(folder, "score"), LoRAConfig(r=4)
    adapters.inject(model, lora, 0)
    learns = {name for name, p in moved(model).named_parameters() if p.requires_grad}
    assert {name for name in learns if "lora_" not in name} == {"score.weight"}
    run = run_of(tmp_path, folder, model, "score", adapter=lora.model_dump())
    export(run, tmp_path / "out", "last", adapter=apart)
    if apart:
        tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert torch.equal(tensors["base_model.model.score.weight"], model.score.weight)
        return
    torch.testing.assert_close(
        values_of(built(tmp_path / "out", "score")), values_of(model), rtol=1e-4, atol=1e-5
    )


def test_a_policy_is_exported_without_its_value_head(folder: Path, tmp_path: Path) -> None:
    model = moved(built(folder, "valued"))
    export(run_of(tmp_path, folder, model, "valued"), tmp_path / "out", "last")
    again = built(tmp_path / "out", "lm")
    assert set(again.state_dict()) == {
        name for name in model.state_dict() if not name.startswith("value_head")
    }
    value = load_file(tmp_path / "out" / "value_head.safetensors")
    assert {name: tuple(t.shape) for name, t in value.items()} == {
        "value_head.weight": (1, 32),
        "value_head.bias": (1,),
    }
    assert torch.equal(value["value_head.weight"], model.value_head.weight)
