"""How far rounding moves a model's logits, as measured on the model; and the checks that use it, at their edges, with trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.config import LoRAConfig
from drumline.config.model import ModelConfig
from drumline.errors import DrumlineError
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.export import export
from drumline.models.rounding import largest_difference, product_bits_of, rounding_limit
from drumline.models.small import is_close
from tests.tiny import tiny_model_dir
from tests.unit.test_adapters import KINDS, run_of

IDS = torch.arange(16)[None]
OLD_LIMIT = 1e-4  # of the largest logit: what a merge was held against before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("rounding") / "model")


def trained(folder: Path, options: LoRAConfig, steps: int = 4) -> Any:
    """A model whose adapters were trained for a few steps to copy the first half of a row."""
    model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    adapters.inject(model, options, seed=0)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(0, 300, (2, 4), generator=generator).repeat(1, 2)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_of_trained_adapters_stays_within_the_limit(folder: Path, kind: str) -> None:
    model = trained(folder, KINDS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    bits = product_bits_of(model)
    limit = rounding_limit(lambda: logits(model), expected, model.parameters(), bits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "the old values, to the last bit"
    )
    adapters.merge(model)
    assert largest_difference(logits(model), expected) <= limit < 1e-3 * float(expected.abs().max())


def cancelling(folder: Path) -> Any:
    """A model with trained adapters that take most of their base away: each product is a small difference of large sums."""
    model = trained(folder, LoRAConfig(r=4, alpha=4))
    with torch.no_grad():
        for _, layer in adapters._peft_layers(model):
            layer.lora_B.default.weight.mul_(1e5)
            product = layer.lora_B.default.weight @ layer.lora_A.default.weight
            layer.base_layer.weight.sub_(product)
    return model


@pytest.mark.slow
def test_what_rounding_explains_is_exported(folder: Path, tmp_path: Path) -> None:
    """By the old limit this right merge failed the run that had trained it."""
    model = cancelling(folder)
    expected = logits(model)
    base = tmp_path / "base"
    plain = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    plain.load_state_dict(
        {n.replace(".base_layer", ""): v for n, v in model.state_dict().items() if "lora_" not in n}
    )
    tiny_model_dir(base)
    plain.save_pretrained(base)
    run = run_of(tmp_path, base, model, adapter={"kind": "lora", "r": 4, "alpha": 4})
    assert export(run, tmp_path / "out", "last").max_logit_difference == 0.0
    merged = build_model(
        str(tmp_path / "out"), ModelConfig(id=str(tmp_path / "out")), seed=0
    ).eval()
    assert largest_difference(logits(merged), expected) > OLD_LIMIT * max(
        1.0, float(expected.abs().max())
    )


def test_each_layer_is_held_against_the_rounding_of_its_own_weight(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a unit in the last place passes, two units of one row do not; nor does a layer whose adapter was left out."""
    merge_layer = adapters._merge_layer

    def merge_and_scale(factor: float) -> None:
        def merge(name: str, layer: Any) -> None:
            merge_layer(name, layer)
            layer.base_layer.weight.data[3] *= factor

        monkeypatch.setattr(adapters, "_merge_layer", merge)

    eps = torch.finfo(torch.float32).eps
    merge_and_scale(1 + eps / 8)
    adapters.merge(trained(folder, LoRAConfig(r=4)))
    merge_and_scale(1 + 4 * eps)
    with pytest.raises(
        DrumlineError, match=r"the merged weight of .*q_proj is not the trained one.*--adapter"
    ):
        adapters.merge(trained(folder, LoRAConfig(r=4)))
    monkeypatch.setattr(adapters, "_merge_layer", lambda name, layer: None)
    with pytest.raises(DrumlineError, match="is not the trained one"):
        adapters.merge(trained(folder, LoRAConfig(r=4)))


def test_a_merge_into_a_weight_that_two_layers_share_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is right by itself; the second one is merged into what the first has left."""
    model = trained(folder, LoRAConfig(r=4))
    run = run_of(tmp_path, folder, model)

    def inject(built: Any, options: LoRAConfig, seed: int) -> None:
        first, second = built.model.layers[0].mlp, built.model.layers[1].mlp
        second.up_proj.weight = first.up_proj.weight
        real(built, options, seed)

    real = adapters.inject
    monkeypatch.setattr(adapters, "inject", inject)
    with pytest.raises(
        DrumlineError,
        match=r"the merged model is not the trained one: logits differ by .*--adapter",
    ):
        export(run, tmp_path / "out", "last")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_narrower_type_is_refused_for_its_range_alone(folder: Path, tmp_path: Path) -> None:
    """What its bits do to the logits is no fault; weights that fp16 makes infinite, or zero, are."""
    whole = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    whole.model.layers[0].mlp.up_proj.weight.data *= 1e7
    whole.model.layers[0].mlp.down_proj.weight.data *= 1e-7
    run = run_of(tmp_path, folder, whole, adapter={"kind": "none"})
    assert export(run, tmp_path / "bf16", "last", dtype="bf16").rounding > 0
    with pytest.raises(DrumlineError, match="fp16 does not hold its weights"):
        export(run, tmp_path / "fp16", "last", dtype="fp16")


def test_a_convolution_sums_over_all_but_its_first_dimension() -> None:
    """Experts have three dimensions as well, and sum over one of them."""
    layers = torch.nn.ModuleList([torch.nn.Conv1d(80, 384, 3), torch.nn.Linear(240, 8)])
    experts = torch.nn.Parameter(torch.zeros(4, 16, 240))
    bits = product_bits_of(layers)
    assert bits(layers[0].weight) == bits(layers[1].weight) == bits(experts) == 5
    assert bits(layers[0].bias) == 1


def test_trials_allow_for_the_order_of_a_long_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(16, 40_000, generator=generator) for _ in range(2))
    exact = (inputs.double() @ weight.double().T).float()
    one_by_one = torch.zeros(16, 16)
    for column in range(weight.shape[1]):
        one_by_one += torch.outer(inputs[:, column], weight[:, column])
    assert not torch.equal(one_by_one, exact) and is_close(one_by_one, exact)
    assert not is_close(exact * (1 + 1e-4), exact)
