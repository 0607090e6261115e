"""Hybrid models (recurrent layers beside attention), spread over processes: the numbers of one process.

Those with experts have adapters over experts and attention, packed experts, and experts cut over
data ranks. PEFT loads what they export. Runs go on under another spread. The unit tests of recurrent
layers hold that no document of a pack reads another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel

from drumline.bench.verify import difference
from drumline.models.export import export, read_run
from tests.distributed.promises import held_as_planned
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.setups import (
    SAVED_TWICE,
    case,
    chosen_params,
    goes_on_from,
    merge,
    plan_in,
    run_of,
    same_evaluations,
    train_kinds,
)
from tests.distributed.test_family_lives import write_model
from tests.harness import Sections, column, weights
from tests.tiny import read_model
from tests.unit.test_recurrent import HYBRID_MIXTURES

# The first test waits for all runs.
pytestmark = pytest.mark.timeout(3000)
BASE: Sections = {
    "rows": 60,
    "data": {"packing": True, "max_length": 96},
    "batch": {"global_samples": 4, "micro_batch": 2},
    # A fresh adapter's gradients are near nothing. A large epsilon keeps Adam from blowing their
    # rounding up.
    "optimizer": {"lr": 3e-3, "eps": 1e-4},
    "checkpoint": SAVED_TWICE,
    "eval": {"at_start": False},
    "run": {"steps": 3},
}
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
PACKED: Sections = {"adapter": {"kind": "lora", "r": 4, "quantize": "4bit"}}
MIXTURES = (*HYBRID_MIXTURES, "qwen3_next")
# Those that train whole. The others train an adapter.
WHOLE = (
    "granitemoehybrid, experts",
    "nemotron_h, experts",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "nemotron_h",
)


class Kind(NamedTuple):
    """A model, and what of it a run trains."""

    model: str
    sections: Sections


KINDS: dict[str, Kind] = {}
for model in WHOLE:
    KINDS[f"{model}, whole"] = Kind(model, {})
for model in MIXTURES:
    KINDS[f"{model}, lora"] = Kind(model, LORA)
    KINDS[f"{model}, 4bit"] = Kind(model, PACKED)
IN_MICRO_BATCHES: Sections = {"batch": {"micro_batch": 1}}
SPREADS: dict[str, tuple[int, Sections]] = {
    "single": (1, {}),
    "ep 2": (2, {"strategy": {"kind": "ddp", "ep": 2}}),
    "fsdp2, ep 2": (2, {"strategy": {"kind": "fsdp2", "ep": 2}, **IN_MICRO_BATCHES}),
    "pp 2": (2, {"strategy": "pp", **IN_MICRO_BATCHES}),
    "zero3 2": (2, {"strategy": CUT}),
    "cp 2": (2, {"strategy": "cp"}),
}
IN_STAGES_AND_PARTS = ("pp 2", "zero3 2", "cp 2")
# What experts that lie on several ranks are asked of.
OF_EXPERTS = {"whole": "fsdp2, ep 2", "lora": "ep 2", "4bit": "ep 2"}
# The rest runs with --full.
KEPT = {("granitemoehybrid, experts, lora", "ep 2")}
# Stopped under the first spread after two steps, gone on with under the second.
MOVES = [("granitemoehybrid, experts, lora", "ep 2", "single")]


def spreads_of(kind: str) -> list[str]:
    model = KINDS[kind].model
    trained = kind.removeprefix(f"{model}, ")
    spreads: list[str] = []
    if model in MIXTURES:
        spreads.append(OF_EXPERTS[trained])
    if trained == "whole" and model not in HYBRID_MIXTURES:
        spreads += IN_STAGES_AND_PARTS
    return spreads


def pairs() -> list[Any]:
    found = []
    for kind in KINDS:
        for name in spreads_of(kind):
            is_full = (kind, name) not in KEPT
            found.append(case(kind, name, id=f"{kind}-{name}", full=is_full))
    return found


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    ranks, strategy = SPREADS[spread]
    model = root / "models" / KINDS[kind].model
    if not model.exists():
        write_model(model, KINDS[kind].model)
    sections = merge(BASE, KINDS[kind].sections, strategy)
    return plan_in(root, folder, ranks, model, **sections)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hybrids")
    train_kinds(root, chosen_params(request.session, __file__), plan)
    return root


@pytest.mark.claim("hybrid models train with experts, stages and parts of rows as in one process")
@pytest.mark.parametrize(("kind", "name"), pairs())
def test_same_numbers_as_one_process(runs: Path, kind: str, name: str) -> None:
    mine = run_of(runs, kind, name)
    reference = run_of(runs, kind, "single")
    apart = difference(mine, reference)
    assert apart.largest <= TOLERANCE, apart
    same_evaluations(mine, reference, TOLERANCE)
    losses = column(mine, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    held_as_planned(mine, ("parameters", "optimizer"))


def moves() -> list[Any]:
    return [case(*move, id=f"{move[0]}-{move[1]} to {move[2]}", full=True) for move in MOVES]


@pytest.mark.parametrize(("kind", "a", "b"), moves())
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, TOLERANCE)


def exported_pairs() -> list[Any]:
    found = []
    for model in MIXTURES:
        kind = f"{model}, lora"
        found.append(case(kind, "ep 2", id=model, full=(kind, "ep 2") not in KEPT))
    return found


@pytest.mark.claim("PEFT loads the adapters of hybrid mixtures")
@pytest.mark.parametrize(("kind", "name"), exported_pairs())
def test_peft_loads_the_export(runs: Path, tmp_path: Path, kind: str, name: str) -> None:
    run = run_of(runs, kind, name)
    export(run, tmp_path / "adapter", "last", adapter=True)
    factors = [key for key in weights(run) if "lora_B" in key and key.startswith("model.")]
    assert any("experts" in key for key in factors)
    assert any("q_proj" in key for key in factors)
    trained, tokenizer, _ = read_run(run)
    base = read_model(runs / "models" / KINDS[kind].model)
    ids = {"input_ids": torch.tensor([tokenizer.encode("one two three four")])}
    with torch.no_grad():
        before = base.eval()(**ids).logits
        expected = trained.eval()(**ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        got = adapted(**ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, before, atol=1e-4)
