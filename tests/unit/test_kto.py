"""The plug-in KTO: losses, figures and gradients of eight fixed answers equal those of TRL's KTOTrainer to 1e-5, however they are cut.

The numbers are those of `tests/reference/kto_trl.json`; TRL's own tokeniser calls, collators, pairing and models made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.algorithms.base import LossOut
from drumline.algorithms.dpo.spec import DPOConfig
from drumline.core.algorithm import AlgorithmSpec
from drumline.core.data import DataConfig
from drumline.data.sources import Row
from drumline.errors import DataError
from drumline.models.head import ForwardWithObjective
from tests.kto import PLUGIN, KTOConfig
from tests.reference.pairs import gradients, model, tokenizer, unpaired
from tests.unit.test_pairs_trl import close

TRL: dict[str, Any] = json.loads((Path(__file__).parents[1] / "reference" / "kto_trl.json").read_text())
ROWS = unpaired()
CLOSE = {"rel": 1e-5, "abs": 1e-5}


def batches(cuts: list[list[int]]) -> list[Any]:
    """-1: a filler. The sample before the first is the last."""
    from drumline_kto.objective import Answers, collate_answers

    data = DataConfig.model_validate({"train": [{"kind": "file", "path": "unused"}], "max_length": 128})
    made = [Answers(tokenizer(), False, data).encode(Row(f"row {index}", row)) for index, row in enumerate(ROWS)]
    segments = [[(side.tokens, side.learn) for side in each.segments] for each in made]
    cache = SimpleNamespace(segments=segments.__getitem__, meta=lambda sample: made[sample].meta)
    return [collate_answers(cache, ids, [(i - 1) % len(ROWS) if i >= 0 else -1 for i in ids], 0, None, 128) for ids in cuts]


def read(learner: Any, batch: Any, what: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def kept(outputs: Any, b: Any) -> LossOut:
        found.append(what(outputs, b))
        return LossOut(found[0].sum())

    with torch.no_grad():
        ForwardWithObjective(learner)(batch, kept)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[list(range(8))], [[3, 0, -1], [7, 6, 1], [2, 5, 4]]], ids=["whole", "cut"])
@pytest.mark.parametrize("name", TRL["cases"])
def test_losses_figures_and_gradients_are_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForCausalLM

    from drumline.data.batches import First

    case = TRL["cases"][name]
    algorithm = KTOConfig(**case["options"], loss_chunk=16).build()
    policy, reference = (model(LlamaForCausalLM, seed) for seed in case["seeds"])
    micro_batches = [
        replace(b, reference_B=read(reference, b, algorithm.score), first_reference_B=read(reference, b.others, algorithm.score))
        for b in batches(cuts)
    ]
    numbers = [read(policy, algorithm.first_batch(b), algorithm.first_pass)[(b.good_B + b.bad_B) > 0] for b in micro_batches]
    first, sums = First(torch.cat(numbers)), dict[str, float]()
    for batch in micro_batches:
        loss_sum, told = ForwardWithObjective(policy)(replace(batch, first=first), algorithm.objective)
        (loss_sum / len(ROWS)).backward()
        for key, value in {"loss": loss_sum.detach(), **told}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    figures = algorithm.metrics(sums)
    assert figures.pop("loss") == pytest.approx(case["loss"], **CLOSE)
    assert figures == pytest.approx(case["figures"], **CLOSE)
    close(gradients(policy), case["gradients"])


@pytest.mark.parametrize("spec", [KTOConfig.model_validate({}), DPOConfig(), DPOConfig(loss="aot")], ids=lambda spec: spec.kind)
def test_a_first_pass_is_planned(spec: AlgorithmSpec) -> None:
    assert (spec.build().first_pass is not None) == bool(spec.extra_forwards)


def test_the_plugin_is_small() -> None:
    files = [path for path in PLUGIN.rglob("*") if path.is_file() and path.suffix in (".py", ".toml")]
    assert len(files) <= 3 and sum(len(path.read_text().splitlines()) for path in files if path.suffix == ".py") <= 150


def test_a_label_is_true_or_false() -> None:
    from drumline_kto.objective import Answers

    data = DataConfig.model_validate({"train": [{"kind": "file", "path": "unused"}], "max_length": 128})
    with pytest.raises(DataError, match="`label` is 'good', true or false is wanted"):
        Answers(tokenizer(), False, data).encode(Row("row 1", {**ROWS[0], "label": "good"}))
