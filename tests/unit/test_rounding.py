"""How far rounding moves a model's logits, as measured on the model.

And the checks that use it, at their edges, with trained weights.
"""

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
LORA = LoRAConfig(r=4)
OLD_LIMIT = 1e-4  # of the largest logit: what a merge was held against before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("rounding") / "model")


def base_model(folder: Path) -> Any:
    return build_model(
        str(folder),
        ModelConfig(id=str(folder)),
        seed=0,
    )


def trained(folder: Path, options: LoRAConfig = LORA) -> Any:
    """Return a model whose adapters were trained for four steps to copy the first half of a row."""
    model = base_model(folder)
    adapters.inject(model, options, seed=0)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        half = torch.randint(0, 300, (2, 4), generator=generator)
        ids = half.repeat(1, 2)
        optimizer.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
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

    limit = rounding_limit(
        lambda: logits(model),
        expected,
        model.parameters(),
        bits,
    )

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the old values, to the last bit"

    adapters.merge(model)
    assert largest_difference(logits(model), expected) <= limit
    assert limit < 1e-3 * float(expected.abs().max())


def cancelling(folder: Path) -> Any:
    """Return a model with trained adapters that take most of their base away.

    Each product is a small difference of large sums.
    """
    model = trained(folder, LoRAConfig(r=4, alpha=4))
    with torch.no_grad():
        for _, layer in adapters._peft_layers(model):
            down = layer.lora_A.default.weight
            up = layer.lora_B.default.weight
            up.mul_(1e5)
            layer.base_layer.weight.sub_(up @ down)

    return model


@pytest.mark.slow
def test_what_rounding_explains_is_exported(folder: Path, tmp_path: Path) -> None:
    """By the old limit this right merge failed the run that had trained it."""
    model = cancelling(folder)
    expected = logits(model)
    weights = {}
    for name, value in model.state_dict().items():
        if "lora_" not in name:
            weights[name.replace(".base_layer", "")] = value

    plain = base_model(folder)
    plain.load_state_dict(weights)
    base = tiny_model_dir(tmp_path / "base")
    plain.save_pretrained(base)
    adapter = {"kind": "lora", "r": 4, "alpha": 4}
    run = run_of(tmp_path, base, model, adapter=adapter)

    out = tmp_path / "out"
    exported = export(run, out, "last")

    assert exported.max_logit_difference == 0.0
    merged = base_model(out).eval()
    difference = largest_difference(logits(merged), expected)
    largest = float(expected.abs().max())
    assert difference > OLD_LIMIT * max(1.0, largest)


def test_each_layer_is_held_against_the_rounding_of_its_own_weight(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a unit in the last place passes, two units of one row do not.

    Nor does a layer whose adapter was left out.
    """
    merge_layer = adapters._merge_layer
    eps = torch.finfo(torch.float32).eps
    factor = 1 + eps / 8

    def merge_and_scale(name: str, layer: Any) -> None:
        merge_layer(name, layer)
        layer.base_layer.weight.data[3] *= factor

    monkeypatch.setattr(adapters, "_merge_layer", merge_and_scale)
    adapters.merge(trained(folder))

    factor = 1 + 4 * eps
    message = r"the merged weight of .*q_proj is not the trained one.*--adapter"
    with pytest.raises(DrumlineError, match=message):
        adapters.merge(trained(folder))

    monkeypatch.setattr(adapters, "_merge_layer", lambda name, layer: None)
    with pytest.raises(DrumlineError, match="is not the trained one"):
        adapters.merge(trained(folder))


def test_a_merge_into_a_weight_that_two_layers_share_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is right by itself; the second one is merged into what the first has left."""
    run = run_of(tmp_path, folder, trained(folder))
    inject = adapters.inject

    def share_and_inject(built: Any, options: LoRAConfig, seed: int) -> None:
        first, second = built.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        inject(built, options, seed)

    monkeypatch.setattr(adapters, "inject", share_and_inject)
    out = tmp_path / "out"
    message = r"the merged model is not the trained one: logits differ by .*--adapter"
    with pytest.raises(DrumlineError, match=message):
        export(run, out, "last")

    assert not out.exists()


@pytest.mark.slow
def test_a_narrower_type_is_refused_for_its_range_alone(folder: Path, tmp_path: Path) -> None:
    """What its bits do to the logits is no fault; weights that fp16 makes infinite, or zero, are."""
    whole = base_model(folder)
    mlp = whole.model.layers[0].mlp
    mlp.up_proj.weight.data *= 1e7
    mlp.down_proj.weight.data *= 1e-7
    run = run_of(tmp_path, folder, whole, adapter={"kind": "none"})

    exported = export(run, tmp_path / "bf16", "last", dtype="bf16")
    assert exported.rounding > 0

    with pytest.raises(DrumlineError, match="fp16 does not hold its weights"):
        export(run, tmp_path / "fp16", "last", dtype="fp16")


def test_a_convolution_sums_over_all_but_its_first_dimension() -> None:
    """Experts have three dimensions as well, and sum over one of them."""
    convolution = torch.nn.Conv1d(80, 384, 3)
    linear = torch.nn.Linear(240, 8)
    experts = torch.nn.Parameter(torch.zeros(4, 16, 240))

    bits = product_bits_of(torch.nn.ModuleList([convolution, linear]))

    assert bits(convolution.weight) == 5
    assert bits(linear.weight) == 5
    assert bits(experts) == 5
    assert bits(convolution.bias) == 1


def test_trials_allow_for_the_order_of_a_long_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 40_000, generator=generator)
    inputs = torch.randn(16, 40_000, generator=generator)
    exact = (inputs.double() @ weight.double().T).float()

    one_by_one = torch.zeros(16, 16)
    for input_column, weight_column in zip(inputs.T, weight.T, strict=True):
        one_by_one += torch.outer(input_column, weight_column)

    assert not torch.equal(one_by_one, exact)
    assert is_close(one_by_one, exact)
    assert not is_close(exact * (1 + 1e-4), exact)
