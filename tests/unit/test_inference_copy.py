"""The copy that rollouts are sampled from takes over all weights, tied ones and adapters too, and says which do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import rollouts as c
from drumline.config.config import LoRAConfig
from drumline.errors import ModelError
from drumline.models import adapters
from drumline.rl.build import generator
from drumline.rl.generate import InferenceCopy, Request
from tests.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def load(folder: Path, dtype: torch.dtype = torch.float32, adapter: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    if adapter:
        adapters.inject(model, LoRAConfig(r=2), seed=0)
    return model


def shaken(model: Any) -> Any:
    """As training leaves it: other weights than those it was built with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", [pytest.param(False, marks=pytest.mark.full), True], ids=["whole", "lora"]
)
@pytest.mark.parametrize("kind", [c.HFGenerator, c.ContinuousGenerator])
def test_a_copy_samples_what_the_live_model_samples(folder: Path, adapter: bool, kind: Any) -> None:
    learned, tokenizer = shaken(load(folder, adapter=adapter)), tiny_tokenizer()
    requests = [
        Request(tokenizer.encode(text), (i, 0))
        for i, text in enumerate(["one two", "The capital of France is"])
    ]
    live, none = generator(
        kind(max_new_tokens=12),
        tokenizer,
        1,
        learned,
        lambda: pytest.fail("a live model needs no copy"),
    )
    apart, refresh = generator(
        kind(max_new_tokens=12), tokenizer, 1, None, lambda: load(folder, adapter=adapter)
    )
    assert none is None and refresh is not None
    before = [completion.tokens for completion in apart.generate(requests, 0)]
    refresh(learned.named_parameters())  # what is tied comes once
    made = apart.generate(requests, 0)
    assert (
        [completion.tokens for completion in made]
        == [completion.tokens for completion in live.generate(requests, 0)]
        != before
    )
    assert learned.training


def test_a_copy_in_bf16_rounds_and_stays_where_it_is(folder: Path) -> None:
    learned, copy = shaken(load(folder)), InferenceCopy(lambda: load(folder, torch.bfloat16))
    places = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    copy.refresh(learned.named_parameters())
    for name, tensor in copy.model.state_dict().items():
        assert (
            torch.equal(tensor, learned.state_dict()[name].bfloat16())
            and tensor.data_ptr() == places[name]
        )
    assert (
        not any(parameter.requires_grad for parameter in copy.model.parameters())
        and not copy.model.training
    )


def test_weights_that_do_not_fit_are_named_after_all_have_come(folder: Path) -> None:
    copy, came = InferenceCopy(lambda: load(folder)), []

    def weights(change: dict[str, torch.Tensor], without: str = "") -> Any:
        for name, tensor in load(folder).named_parameters():
            came.append(name)
            if name != without:
                yield name, change.get(name, tensor)
        yield from ((name, tensor) for name, tensor in change.items() if name not in came)

    with pytest.raises(ModelError, match=r"model\.norm\.weight \(3,\) against \(32,\) \(2 such\)"):
        copy.refresh(weights({"model.norm.weight": torch.zeros(3)}))
    assert came[-1] == "model.norm.weight" and len(came) == 20
    with pytest.raises(ModelError, match=r"v_head \(1,\) against nothing"):
        copy.refresh(weights({"v_head": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight did not come"):
        copy.refresh(weights({}, without="model.norm.weight"))


def test_under_autocast_continuous_batching_takes_a_copy(folder: Path) -> None:
    _, refresh = generator(
        c.ContinuousGenerator(),
        tiny_tokenizer(),
        1,
        load(folder),
        lambda: load(folder, torch.bfloat16),
        torch.bfloat16,
    )
    assert refresh is not None
    live = load(folder)
    made, none = generator(
        c.HFGenerator(max_new_tokens=4),
        tiny_tokenizer(),
        1,
        live,
        lambda: pytest.fail("no copy"),
        torch.bfloat16,
    )
    completion = made.generate([Request([5, 6, 7], (0, 0))], 0)[0]
    ids = torch.tensor([[5, 6, 7, *completion.tokens]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_probs = live(ids).logits[0, 2:-1].float().log_softmax(-1)
    assert none is None
    assert completion.log_probs == pytest.approx(
        log_probs.gather(1, ids[0, 3:, None]).squeeze(1).tolist(), abs=0.02
    )
