"""The language model within a vision-language model: its config, and its weights in published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from drumline.config.model import ModelConfig
from drumline.errors import ModelError
from drumline.inference.model import _read_pretrained
from drumline.models.build import ModelHead, build_model, lay_out
from drumline.models.classes import IMAGE_READING_TYPES
from drumline.models.image_tokens import FAMILIES
from drumline.models.load import build_without_memory, config_around_text, load_config
from drumline.models.shapes import KNOWN, with_config
from drumline.models.shards import FromFiles, NothingToFill
from drumline.models.text_alone import require_same_language_model
from drumline.models.text_part import TextNames, build_on_meta_device, text_config_of
from tests.tiny_published import CONFIGS, tiny_published_dir

IDS_BT = torch.arange(24)[None] * 7 % 300
# The language model of Kimi is a mixture, whose experts transformers joins as it reads them.
KINDS = ("llama4", "mistral3", "gemma4", "kimi_k25")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_published_dir(tmp_path_factory.mktemp(request.param) / "model", request.param)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS_BT).logits
    return result


def published(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def test_the_weights_are_those_of_the_whole_model(folder: Path) -> None:
    source = ModelConfig(id=str(folder))
    model = build_model(str(folder), source, seed=0)

    assert model.config is not published(folder).config
    assert getattr(model.config, "vision_config", None) is None
    assert torch.equal(logits(model), logits(published(folder)))
    assert torch.equal(logits(_read_pretrained(str(folder), source)), logits(model))


def test_they_are_read_shard_by_shard_unless_transformers_converts_them(folder: Path) -> None:
    _, source = lay_out(str(folder), ModelConfig(id=str(folder)), seed=0)

    if "kimi" in str(folder):
        assert isinstance(source, NothingToFill)
    else:
        assert isinstance(source, FromFiles)


def test_new_tokens_grow_it(folder: Path) -> None:
    source = ModelConfig(id=str(folder), new_tokens=tuple(f"<new{n}>" for n in range(300)))
    model = build_model(str(folder), source, seed=0)
    rows = model.get_input_embeddings().weight.shape[0]

    assert rows > published(folder).config.get_text_config().vocab_size
    old = logits(published(folder))
    torch.testing.assert_close(logits(model)[..., : old.shape[-1]], old, rtol=1e-5, atol=1e-6)


def test_values_of_the_config_are_of_the_language_model(folder: Path) -> None:
    source = ModelConfig(id=str(folder), config={"max_position_embeddings": 64})

    assert load_config(str(folder), source).max_position_embeddings == 64

    with pytest.raises(ModelError, match="has no key 'vision_confg'"):
        load_config(str(folder), ModelConfig(id=str(folder), config={"vision_confg": {}}))

    if "llama4" in str(folder):
        # Its config has lists of layers of its own.
        return
    deeper = ModelConfig(id=str(folder), config={"num_hidden_layers": 4})
    with pytest.raises(ModelError, match="asks for a larger model"):
        build_model(str(folder), deeper, seed=0)


def test_a_score_is_drawn_beside_the_weights(tmp_path: Path) -> None:
    folder = tiny_published_dir(tmp_path / "model", "mistral3")
    source = ModelConfig(id=str(folder))
    model = build_model(str(folder), source, seed=0, head="score")
    whole = published(folder)

    assert type(model).__name__ == "Ministral3ForSequenceClassification"
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight,
        whole.model.language_model.layers[1].mlp.up_proj.weight,
    )
    assert model.score.weight.any()

    with pytest.raises(ModelError, match="a frozen model keeps them as they are drawn"):
        lay_out(str(folder), source, 0, head=ModelHead("score", may_be_drawn=False))


@pytest.mark.parametrize(
    ("kind", "of_whole", "of_text", "tied"),
    [
        ("mistral3", True, False, True),
        ("mistral3", False, True, False),
        # The class of the whole model has no head of its own.
        ("llama4", True, False, False),
        ("llama4", False, True, True),
    ],
)
def test_the_head_is_tied_as_in_the_whole_model(
    kind: str, of_whole: bool, of_text: bool, tied: bool
) -> None:
    values = CONFIGS[kind]
    text = {**values["text_config"], "tie_word_embeddings": of_text}
    config = AutoConfig.for_model(
        kind, **{**values, "text_config": text, "tie_word_embeddings": of_whole}
    )
    whole = build_on_meta_device(config)
    head = whole.get_output_embeddings().weight

    assert (whole.get_input_embeddings().weight is head) == tied
    assert text_config_of(config).tie_word_embeddings == tied


def test_models_that_have_no_such_part() -> None:
    for kind in ("qwen3_vl", "gemma3", "llama", "resnet"):
        assert text_config_of(AutoConfig.for_model(kind)) is None

    assert FAMILIES.keys() == IMAGE_READING_TYPES
    assert IMAGE_READING_TYPES.isdisjoint(KINDS)
    # Of a decoder that reads an encoder no language model is left.
    assert text_config_of(AutoConfig.for_model("florence2")) is None


def test_the_type_of_the_language_model_asks_for_it() -> None:
    config = AutoConfig.for_model("qwen3_5")

    assert text_config_of(config, "qwen3_5") is None
    assert text_config_of(config, "qwen3_5_text").model_type == "qwen3_5_text"

    asked = ModelConfig(id="Qwen/Qwen3.5-9B", config={"model_type": "qwen3_5_text"})
    known = load_config(None, with_config(KNOWN["qwen3.5-9b"], asked))

    assert known.num_hidden_layers == 32
    assert getattr(known, "vision_config", None) is None
    assert asked.as_published


def test_names_in_and_out_of_the_language_model() -> None:
    values = CONFIGS["gemma4"]
    config = AutoConfig.for_model("gemma4", **values)
    whole = build_on_meta_device(config)
    text = AutoConfig.for_model("gemma4_text", **values["text_config"])
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        names = TextNames(whole, AutoModelForCausalLM.from_config(text))

    assert names.name_in_text_model("model.language_model.norm.weight") == "model.norm.weight"
    assert names.name_in_text_model("lm_head.weight") == "lm_head.weight"
    assert names.name_in_text_model("model.vision_tower.patch_embedder.input_proj.weight") is None


@pytest.mark.parametrize(("scaled", "kind"), [(False, "mistral3"), (True, "cohere2_vision")])
def test_a_class_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, scaled: bool, kind: str
) -> None:
    monkeypatch.setattr("drumline.models.text_part.TYPES_WITH_OTHER_LOGITS", ())
    values = CONFIGS[kind]
    text = {**values["text_config"], "vocab_size": 320}
    source = ModelConfig(id=None, config={"model_type": kind, **values, "text_config": text})
    whole = config_around_text(None, source)
    model = build_without_memory(load_config(None, source))

    if not scaled:
        require_same_language_model(whole, model)
        return
    with pytest.raises(ModelError, match="computes other logits than the whole model"):
        require_same_language_model(whole, model)
