"""The copy that rollouts are sampled from takes over all weights, tied ones and adapters too, and
says which do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import rollouts as c
from drumline.config.config import LoRAConfig
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.rl.build import build_generator
from drumline.rl.generate import InferenceCopy, Request
from tests.tiny import read_model, tiny_tokenizer


def load(folder: Path, dtype: torch.dtype = torch.float32, adapter: bool = False) -> Any:
    model = read_model(folder, dtype).train()
    if adapter:
        adapters.inject(model, LoRAConfig(r=2), seed=0)

    return model


def shaken(model: Any) -> Any:
    """As training leaves it: other weights than those it was built with."""
    draw = torch.Generator().manual_seed(1)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)

    return model


def no_copy() -> Any:
    pytest.fail("a live model needs no copy")


def tokens_of(sampler: Any, requests: list[Request]) -> list[list[int]]:
    return [completion.tokens for completion in sampler.generate(requests, 0)]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", [pytest.param(False, marks=pytest.mark.full), True], ids=["whole", "lora"]
)
@pytest.mark.parametrize("kind", [c.HFGenerator, c.ContinuousGenerator])
def test_a_copy_samples_what_the_live_model_samples(model: Path, adapter: bool, kind: Any) -> None:
    learned = shaken(load(model, adapter=adapter))
    tokenizer = tiny_tokenizer()
    config = kind(max_new_tokens=12)
    requests = []

    for index, text in enumerate(["one two", "The capital of France is"]):
        requests.append(Request(tokenizer.encode(text), (index, 0)))

    def load_copy() -> Any:
        return load(model, adapter=adapter)

    live, none = build_generator(config, tokenizer, 1, learned, no_copy)
    apart, refresh = build_generator(config, tokenizer, 1, None, load_copy)

    assert none is None
    assert refresh is not None

    before = tokens_of(apart, requests)
    refresh(learned.named_parameters())  # what is tied comes once
    after = tokens_of(apart, requests)

    assert after == tokens_of(live, requests)
    assert after != before
    assert learned.training


def test_a_copy_in_bf16_rounds_and_stays_where_it_is(model: Path) -> None:
    learned = shaken(load(model))
    copy = InferenceCopy(lambda: load(model, torch.bfloat16))
    places = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    copy.refresh(learned.named_parameters())
    weights = learned.state_dict()

    for name, tensor in copy.model.state_dict().items():
        assert torch.equal(tensor, weights[name].bfloat16())
        assert tensor.data_ptr() == places[name]

    for parameter in copy.model.parameters():
        assert not parameter.requires_grad

    assert not copy.model.training


def test_weights_that_do_not_fit_are_named_after_all_have_come(model: Path) -> None:
    copy = InferenceCopy(lambda: load(model))
    came: list[str] = []

    def weights(change: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        found = dict(load(model).named_parameters())
        for name, tensor in {**found, **change}.items():
            came.append(name)
            yield name, tensor

    with pytest.raises(ModelError, match=r"weight is \(3,\), and \(32,\) in the copy \(2 such\)"):
        copy.refresh(weights({"model.norm.weight": torch.zeros(3)}))

    assert came[-1] == "model.norm.weight"
    assert len(came) == 20

    with pytest.raises(ModelError, match=r"the copy has no v_head \(1,\)"):
        copy.refresh(weights({"v_head": torch.zeros(1)}))

    others = [pair for pair in weights({}) if pair[0] != "model.norm.weight"]

    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        copy.refresh(iter(others))


def test_under_autocast_continuous_batching_takes_a_copy(model: Path) -> None:
    def load_copy() -> Any:
        return load(model, torch.bfloat16)

    tokenizer = tiny_tokenizer()
    continuous = c.ContinuousGenerator()
    _, refresh = build_generator(continuous, tokenizer, 1, load(model), load_copy, torch.bfloat16)

    assert refresh is not None

    live = load(model)
    config = c.HFGenerator(max_new_tokens=4)
    made, none = build_generator(config, tokenizer, 1, live, no_copy, torch.bfloat16)

    assert none is None

    (completion,) = made.generate([Request([5, 6, 7], (0, 0))], 0)
    ids = torch.tensor([[5, 6, 7, *completion.tokens]])

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_probs = live(ids).logits[0, 2:-1].float().log_softmax(-1)

    expected = log_probs.gather(1, ids[0, 3:, None]).squeeze(1).tolist()

    assert completion.log_probs == pytest.approx(expected, abs=0.02)
