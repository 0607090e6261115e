"""New tokens: rows of embedding and head, what they begin as, and what an adapter trains of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.config import LoRAConfig
from drumline.config.load import load_text
from drumline.config.model import ModelConfig
from drumline.errors import ConfigError, ModelError
from drumline.models import adapters
from drumline.models.build import build_model, lay_out
from drumline.models.load import facts, load_config
from drumline.models.shards import NeedsFullModel, Values
from drumline.models.tokenizer import load_tokenizer
from drumline.planner.new_tokens import vocabulary_notes, with_trainable_token_embeddings
from drumline.planner.question import find_model
from drumline.planner.sizes import FoundModel, sizes_of
from tests.tiny import tiny_tokenizer

TOKENS = 320
THINK = "<think>"
TOOL = "<tool>"
LAYERS = ("model.embed_tokens", "lm_head")
DATA = {"train": [{"kind": "digits"}]}


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def save_model(folder: Path, rows: int = TOKENS, **values: Any) -> Any:
    """A random Llama with `rows` rows, and a tokenizer of TOKENS tokens, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=rows,
        eos_token_id=2,
        bos_token_id=None,
        **SIZES,
        **values,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)

    model.save_pretrained(folder)
    tiny_tokenizer(TOKENS).save_pretrained(folder)
    return model


def described(folder: Path, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": str(folder), **keys})


def built(folder: Path, **keys: Any) -> Any:
    return build_model(str(folder), described(folder, **keys), seed=0)


def token_ids(folder: Path, text: str) -> list[int]:
    """Return a text's ids without new tokens."""
    tokenizer = load_tokenizer(str(folder), described(folder))
    return tokenizer(text)["input_ids"]


def notes_of(folder: Path, **keys: Any) -> list[str]:
    """Return what a plan says about the rows of new tokens."""
    config = load_text(json.dumps({"data": DATA}), [])
    return vocabulary_notes(config, FoundModel(described(folder, **keys), str(folder)))


def assert_at_mean(rows: torch.Tensor, known: torch.Tensor) -> None:
    """Check that each of the new rows is the mean of the known ones."""
    torch.testing.assert_close(rows, known.mean(0).expand(rows.shape))


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_begin_at_the_mean_and_the_others_stay(tmp_path: Path, tied: bool) -> None:
    before = save_model(tmp_path, tie_word_embeddings=tied)
    model = built(tmp_path, new_tokens=[THINK, TOOL])
    assert model.config.vocab_size == 384
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied

    for layer in LAYERS:
        old = before.get_submodule(layer).weight
        new = model.get_submodule(layer).weight
        assert new.shape == (TOKENS + 64, 32)
        assert torch.equal(new[:TOKENS], old)
        assert_at_mean(new[TOKENS:], old)


def test_a_row_begins_at_the_mean_of_a_text(tmp_path: Path) -> None:
    before = save_model(tmp_path, tie_word_embeddings=False)
    text = "The capital of France"
    model = built(tmp_path, new_tokens={THINK: "", TOOL: text}, vocabulary_multiple=1)
    ids = token_ids(tmp_path, text)
    for layer in LAYERS:
        old = before.get_submodule(layer).weight
        new = model.get_submodule(layer).weight
        assert new.shape == (TOKENS + 2, 32)
        assert_at_mean(new[TOKENS], old)
        assert_at_mean(new[TOKENS + 1], old[ids])


def test_rows_that_no_token_used_are_taken_first(tmp_path: Path) -> None:
    before = save_model(tmp_path, rows=TOKENS + 3)
    model = built(tmp_path, new_tokens=[THINK, TOOL])
    old = before.model.embed_tokens.weight
    new = model.model.embed_tokens.weight
    assert new.shape == old.shape
    assert torch.equal(new[:TOKENS], old[:TOKENS])
    assert_at_mean(new[TOKENS : TOKENS + 2], old[:TOKENS])
    assert torch.equal(new[TOKENS + 2 :], old[TOKENS + 2 :])

    notes = notes_of(tmp_path, new_tokens=[THINK])
    assert notes == ["new tokens: 1 of them take rows of the embedding that no token used"]


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    before = PhiForCausalLM(PhiConfig(vocab_size=TOKENS, **SIZES))
    before.lm_head.bias.data.uniform_()
    before.save_pretrained(tmp_path)
    tiny_tokenizer(TOKENS).save_pretrained(tmp_path)
    model = built(tmp_path, new_tokens=[THINK])
    new = model.lm_head.bias[TOKENS:]
    torch.testing.assert_close(new, before.lm_head.bias.mean().expand(64))

    says = r"has a bias.*modules_to_save=\[model.embed_tokens, lm_head\]"
    with pytest.raises(ModelError, match=says):
        adapters.inject(model, LoRAConfig(trainable_tokens=(TOKENS,)), 0)


def test_a_model_that_is_built_whole_has_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads it, and makes it larger."""
    save_model(tmp_path, rows=TOKENS + 1, tie_word_embeddings=False)
    keys: dict[str, Any] = {"new_tokens": {THINK: "Paris", TOOL: ""}}
    in_parts = built(tmp_path, **keys).state_dict()

    def refuse(*_: Any, **__: Any) -> None:
        raise NeedsFullModel("a test says so")

    monkeypatch.setattr("drumline.models.build.find_weights_in_files", refuse)
    whole = built(tmp_path, **keys)
    assert whole.config.vocab_size == 384

    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, in_parts[name], msg=name)


def test_a_larger_tokenizer_makes_the_embedding_grow(tmp_path: Path) -> None:
    before = save_model(tmp_path / "model")
    larger = tiny_tokenizer(TOKENS)
    larger.add_tokens(["<a>", "<b>"], special_tokens=True)
    larger.save_pretrained(tmp_path / "larger")
    model = built(tmp_path / "model", tokenizer=str(tmp_path / "larger"), vocabulary_multiple=10)
    new = model.model.embed_tokens.weight[TOKENS:]
    assert new.shape == (10, 32)
    assert_at_mean(new, before.model.embed_tokens.weight)


def test_random_weights_are_drawn_with_all_rows(tmp_path: Path) -> None:
    save_model(tmp_path)
    model = built(tmp_path, init="random", new_tokens=[THINK])
    new = model.model.embed_tokens.weight[TOKENS:]
    assert new.shape == (64, 32)
    assert float(new.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_a_vision_language_model_grows(tmp_path: Path) -> None:
    from tests.tiny import tiny_vision_dir

    folder = tiny_vision_dir(tmp_path / "vision")
    old = built(folder).get_input_embeddings().weight
    known = len(load_tokenizer(str(folder), described(folder)))
    names = [f"<new {number}>" for number in range(len(old) - known + 1)]
    model = built(folder, new_tokens=names, vocabulary_multiple=8)
    new = model.get_input_embeddings().weight
    assert len(new) == math.ceil((len(old) + 1) / 8) * 8
    assert model.config.get_text_config().vocab_size == len(new)
    assert_at_mean(new[known:], old[:known])


def test_new_tokens_are_one_token_each_and_decoding_keeps_them(tmp_path: Path) -> None:
    save_model(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), described(tmp_path, new_tokens=[THINK, TOOL]))
    ids = tokenizer("<think>one<tool>")["input_ids"]
    assert ids[0] == TOKENS
    assert ids[-1] == TOKENS + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>one<tool>"


def test_a_token_that_the_tokenizer_has_keeps_its_row(tmp_path: Path) -> None:
    before = save_model(tmp_path)
    model = built(tmp_path, new_tokens=["<|im_end|>"])
    assert torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)

    notes = notes_of(tmp_path, new_tokens=["<|im_end|>"])
    assert notes == [
        "new tokens: the tokenizer has '<|im_end|>' already, and its row begins as it is"
    ]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"new_tokens": ["<a>", "<a>"]}, "'<a>' stands twice in new_tokens"),
        ({"new_tokens": [""]}, "new_tokens"),
        ({"new_tokens": {"<a>": "some text"}, "init": "random"}, "init random draws all rows"),
        ({"new_tokens": ["<a>"], "kind": "python", "path": "a.py:b"}, "takes no new_tokens"),
    ],
)
def test_what_is_refused(model: dict[str, Any], says: str) -> None:
    text = json.dumps({"model": model, "data": DATA})
    with pytest.raises(ConfigError, match=says):
        load_text(text, [])


def resolved(folder: Path, **adapter: Any) -> Any:
    """The adapter of a config with two new tokens."""
    values = {
        "model": {"id": str(folder), "new_tokens": [THINK, TOOL]},
        "adapter": {"kind": "lora", "r": 2, **adapter},
        "data": DATA,
    }
    config = load_text(json.dumps(values), [])
    return with_trainable_token_embeddings(config, FoundModel(config.model, str(folder))).adapter


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_trains_the_new_rows_alone(tmp_path: Path, tied: bool) -> None:
    from peft import PeftModel

    folder = tmp_path / "model"
    save_model(folder, tie_word_embeddings=tied)
    adapter = resolved(folder, trainable_tokens=[7])
    assert adapter.trainable_tokens == (7, TOKENS, TOKENS + 1)

    adapter = adapter.model_copy(update={"trainable_tokens": (TOKENS, TOKENS + 1)})
    keys = described(folder, new_tokens=[THINK, TOOL])
    model, source = lay_out(str(folder), keys, 0)
    adapters.inject(model, adapter, 0)
    Values(source, "cpu", 0).fill(model)

    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter

    rows = {name for name in trained if "lora_" not in name}
    expected_rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta.default"}
    if not tied:
        expected_rows.add("lm_head.token_adapter.trainable_tokens_delta.default")

    assert rows == expected_rows

    for name in rows:
        assert trained[name].shape == (2, 32)

    counted = facts(load_config(str(folder), keys), 64, adapter)
    assert counted.parameters == sum(map(torch.numel, model.parameters()))
    assert counted.trainable == sum(map(torch.numel, trained.values()))

    ids_BT = torch.tensor([[5, TOKENS, 9, TOKENS + 1, 3]])
    before = model(input_ids=ids_BT).logits.detach()
    model(input_ids=ids_BT, labels=ids_BT).loss.backward()
    torch.optim.SGD(trained.values(), lr=1.0).step()
    expected = model(input_ids=ids_BT).logits.detach()
    assert not torch.allclose(before, expected, atol=1e-3)

    adapters.save_adapter(model, tmp_path, str(folder), None)
    base = build_model(str(folder), keys, 0)
    again = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(again(input_ids=ids_BT).logits, expected, rtol=1e-5, atol=1e-5)

    embedding = model.get_input_embeddings().token_adapter.base_layer.weight.clone()
    adapters.merge(model)
    torch.testing.assert_close(model(input_ids=ids_BT).logits, expected, rtol=1e-5, atol=1e-5)

    has_changed = (model.get_input_embeddings().weight != embedding).any(1)
    assert has_changed.nonzero().flatten().tolist() == [TOKENS, TOKENS + 1]


def test_modules_that_are_trained_whole_need_no_rows_of_their_own(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    tied = tmp_path / "tied"
    save_model(apart, tie_word_embeddings=False)
    save_model(tied, tie_word_embeddings=True)

    both = resolved(apart, modules_to_save=["embed_tokens", "lm_head"])
    assert both.trainable_tokens == ()

    shared = resolved(tied, modules_to_save=["embed_tokens"])
    assert shared.trainable_tokens == ()

    adapter = resolved(apart, modules_to_save=["lm_head"])
    assert adapter.trainable_tokens == (TOKENS, TOKENS + 1)

    model = built(apart, new_tokens=[THINK, TOOL])
    adapters.inject(model, adapter, 0)
    head = model.get_output_embeddings()
    assert head.weight.requires_grad, "trained whole, without rows laid over it"


def test_an_adapted_head_beside_an_embedding_with_rows(tmp_path: Path) -> None:
    """The head learns by its factors, whichever adapter these belong to."""
    save_model(tmp_path, tie_word_embeddings=False)
    more = {"x": {"targets": ["lm_head"]}}
    adapter = resolved(tmp_path, targets=["q_proj"], more=more)
    assert adapter.trainable_tokens == (TOKENS, TOKENS + 1)

    model = built(tmp_path, new_tokens=[THINK, TOOL])
    adapters.inject(model, adapter, 0)
    assert adapters.is_tuned(model.lm_head)
    assert hasattr(model.get_input_embeddings(), "token_adapter")

    adapters.merge(model)


def test_a_head_that_cannot_learn_the_new_tokens_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=False)
    by_one_adapter = {"targets": ["q_proj", "embed_tokens"]}
    by_another = {"targets": ["q_proj"], "more": {"x": {"targets": ["embed_tokens"]}}}
    for options in (by_one_adapter, by_another):
        with pytest.raises(ModelError, match=r"name lm_head in adapter\.targets, too"):
            resolved(tmp_path, **options)

    adapter = resolved(tmp_path, targets=["embed_tokens", "lm_head"])
    assert adapter.trainable_tokens == ()


def test_sizes_count_the_rows(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=False)
    plain = sizes_of(FoundModel(described(tmp_path), str(tmp_path)), 64, "lm")
    with_a_token = described(tmp_path, new_tokens=[THINK])
    grown = sizes_of(FoundModel(with_a_token, str(tmp_path)), 64, "lm")
    assert plain.vocab_size == TOKENS
    assert grown.vocab_size == 384
    assert grown.parameters - plain.parameters == 2 * 64 * 32


def test_tokens_of_a_larger_tokenizer_begin_at_their_texts(tmp_path: Path) -> None:
    """The tokenizer has them, and the files have no rows for them."""
    folder = tmp_path / "model"
    before = save_model(folder)
    larger = tiny_tokenizer(TOKENS)
    larger.add_tokens([THINK])
    larger.save_pretrained(tmp_path / "larger")
    keys = {"tokenizer": str(tmp_path / "larger"), "vocabulary_multiple": 1}

    model = built(folder, new_tokens={THINK: "Paris", "one": "", "two": ""}, **keys)
    new = model.model.embed_tokens.weight[TOKENS]
    assert_at_mean(new, before.model.embed_tokens.weight[token_ids(folder, "Paris")])

    notes = notes_of(folder, new_tokens=[THINK, "<|im_start|>", "<|im_end|>"], **keys)
    assert notes == [
        "new tokens: the embedding grows by 1 rows to 321",
        "new tokens: the tokenizer has '<|im_start|>', '<|im_end|>' already, and their rows begin as they are",
    ]

    with pytest.raises(ModelError, match=f"has the token '{THINK}', which the model has no row"):
        built(folder, new_tokens={TOOL: f"Paris {THINK}"}, **keys)


def find_known_shape(**keys: Any) -> FoundModel:
    return find_model(ModelConfig.model_validate(keys), lambda *_: None)


def test_a_known_shape_grows_from_the_size_that_its_class_has() -> None:
    """The values of GPT-2 name none."""
    found = find_known_shape(id="gpt2", new_tokens=[THINK], vocabulary_multiple=1)
    assert found.path is None, "a test knows no GPT-2 on this machine"
    assert sizes_of(found, 64, "lm").vocab_size == 50_258


def test_sizes_of_a_known_shape_count_the_rows() -> None:
    """Of a model whose tokenizer is not here each new token has a row of its own."""
    plain = sizes_of(find_known_shape(id="llama-3.1-8b"), 64, "lm")
    with_tokens = find_known_shape(
        id="llama-3.1-8b", new_tokens=[THINK, TOOL], vocabulary_multiple=2
    )
    grown = sizes_of(with_tokens, 64, "lm")
    assert grown.vocab_size == plain.vocab_size + 2
    assert grown.parameters - plain.parameters == 2 * 2 * plain.hidden
