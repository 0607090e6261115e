"""Vision-language mixtures whose experts lie on several ranks: the numbers of one process, also where
some ranks have text alone in every step; runs that go on under another spread; and their exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoModelForImageTextToText

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.train.setup import Request
from tests.distributed.promises import held_as_planned
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    SAVED_TWICE,
    case,
    chosen_params,
    claim,
    goes_on_from,
    merge,
    run_of,
    same_evaluations,
    same_steps,
    train_kinds,
)
from tests.distributed.test_vision_families import GRPO, interleaved
from tests.harness import (
    Sections,
    column,
    events,
    read_json,
    run_drumline,
    vision_pair_rows,
    vision_rows,
    weights,
    write_config,
    write_rows,
)
from tests.tiny import tiny_vision_dir
from tests.tiny_vision import tiny_family_dir

pytestmark = pytest.mark.timeout(900)
BASE: Sections = {
    # In order, an image row and a text row.
    "data": {"packing": False, "order": "sequential", "max_length": 256},
    "batch": {"global_samples": 4, "micro_batch": 1},
    "optimizer": {"lr": 3e-3, "eps": 1e-5},
    "checkpoint": SAVED_TWICE,
    "eval": {"at_start": False},
    "run": {"steps": 3},
}
PACKED: Sections = {"data": {"packing": True, "max_length": 128}}
LORA: Sections = {"kind": "lora", "r": 4}
PURE: Sections = {"kind": "bf16", "master": "bf16"}


class Kind(NamedTuple):
    """`within`: relative, of losses and gradient norms against one process."""

    sections: Sections
    within: float = TOLERANCE
    model: str = "qwen3_vl_moe"


# Two rows a step: of two data ranks one has text alone, always.
APART = "text apart"
ROUTER = "router loss"
# Qwen3.5: a shared expert beside the others, and layers without attention.
DELTA = "Gated DeltaNet"
# GLM-4.5V: a dense layer before those with experts, and routers with a bias.
GLM = "router bias"
KINDS = {
    APART: Kind({"batch": {"global_samples": 2, "micro_batch": 1}}),
    "micro-batches of text": Kind({}),
    "packed": Kind(PACKED),
    "recomputed": Kind({**PACKED, "memory": {"activation_checkpointing": "full"}}),
    "compiled": Kind({"compile": {"enabled": True}}),
    ROUTER: Kind({}, model=ROUTER),
    "tower frozen": Kind({**PACKED, "model": {"freeze": ["vision"]}}),
    "lora": Kind({"adapter": LORA, "optimizer": {"lr": 1e-2}}),
    "tower adapted": Kind({"adapter": {**LORA, "targets": ["vision", "language"]}}),
    "4bit": Kind({"adapter": {**LORA, "quantize": "4bit"}}),
    "dpo": Kind({"algorithm": {"kind": "dpo"}}),
    "grpo": Kind({"algorithm": GRPO["algorithm"]}),
    DELTA: Kind({}, model="qwen3_5_moe"),
    f"{DELTA}, packed": Kind(PACKED, model="qwen3_5_moe"),
    f"{DELTA}, lora": Kind({"adapter": LORA, "optimizer": {"lr": 1e-2}}, model="qwen3_5_moe"),
    GLM: Kind({"model": {"router_bias_rate": 1e-3}}, model="glm4v_moe"),
    f"{GLM}, lora": Kind({"adapter": LORA, "optimizer": {"lr": 1e-2}}, model="glm4v_moe"),
    # Weights, gradients and moments in bf16, and a sum over experts in another order.
    "bf16": Kind({"precision": PURE}, 3e-2),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ep 2": (2, {"kind": "ddp", "ep": 2}),
    "fsdp2, ep 2": (2, {"kind": "fsdp2", "ep": 2}),
    "ep 4": (4, {"kind": "ddp", "ep": 4}),
    "ddp 2 x ep 2": (4, {"kind": "ddp", "ep": 2}),
    "fsdp2 2 x ep 2": (4, {"kind": "fsdp2", "ep": 2}),
    "fsdp2, ep 2 x cp 2": (4, {"kind": "fsdp2", "ep": 2, "cp": 2}),
    "fsdp2, ep 2 x tp 2": (4, {"kind": "fsdp2", "ep": 2, "tp": 2}),
}
# The rest runs with --full.
OFTEN = [
    (APART, "ep 2"),
    ("packed", "fsdp2, ep 2"),
    ("lora", "ddp 2 x ep 2"),
    (DELTA, "fsdp2 2 x ep 2"),
    (GLM, "ep 2"),
    ("bf16", "fsdp2, ep 2"),
]
# Stopped under the first spread after two steps, gone on with under the second.
RESUMED = [
    case("packed", "fsdp2, ep 2", "single", id="packed", full=False),
    case("lora", "single", "ep 2", id="lora", full=True),
    case("tower adapted", "ep 2", "fsdp2 2 x ep 2", id="tower adapted", full=True),
    case("4bit", "ddp 2 x ep 2", "ep 4", id="4bit", full=True),
    case(f"{DELTA}, packed", "fsdp2 2 x ep 2", "ep 2", id=DELTA, full=True),
    case("bf16", "ep 2", "fsdp2 2 x ep 2", id="bf16", full=True),
]
TWO_DATA_RANKS = ("ep 2", "fsdp2, ep 2", "fsdp2, ep 2 x cp 2", "fsdp2, ep 2 x tp 2")


def is_asked(kind: str, spread: str) -> bool:
    if spread == "single":
        return False
    if kind == APART and spread not in TWO_DATA_RANKS:
        return False
    return not (kind == "4bit" and "tp" in spread)


def pairs() -> list[Any]:
    found = []
    for kind in KINDS:
        for name in SPREADS:
            if is_asked(kind, name):
                is_full = (kind, name) not in OFTEN
                found.append(case(kind, name, id=f"{kind}-{name}", full=is_full))
    return found


def model_dir(path: Path, name: str) -> Path:
    """Save a tiny mixture. ROUTER is a Qwen3-VL that trains its router loss."""
    if name in ("qwen3_5_moe", "glm4v_moe"):
        return tiny_family_dir(path, name)
    tiny_vision_dir(path, experts=4)
    if name == ROUTER:
        file = path / "config.json"
        values = read_json(file)
        values["text_config"]["output_router_logits"] = True
        file.write_text(json.dumps(values), "utf-8")
    return path


def write_data(root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows to train on and to evaluate with: an image row, a text row, and so on."""
    apart = interleaved(rows)
    write_rows(root / f"{name}.jsonl", apart)
    write_rows(root / f"{name}-eval.jsonl", apart[:5])


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    ranks, strategy = SPREADS[spread]
    place = root / folder
    place.mkdir()
    sections = merge(BASE, KINDS[kind].sections, {"strategy": strategy})
    rows = "pairs" if kind == "dpo" else "texts"
    overrides = [
        f"data.train=[{{kind: file, path: {root / rows}.jsonl}}]",
        f"data.eval=[{{kind: file, path: {root / rows}-eval.jsonl}}]",
        f"data.cache_dir={root / 'cache'}",
    ]
    path = write_config(place, root / KINDS[kind].model, **sections)
    return claim(Request(load(path, overrides), world_size=ranks))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for model in {kind.model for kind in KINDS.values()}:
        model_dir(root / model, model)
    write_data(root, "texts", vision_rows(root, 48))
    write_data(root, "pairs", vision_pair_rows(root, 48))
    chosen = [each for each in chosen_params(request.session, __file__) if "kind" in each]
    train_kinds(root, chosen, plan)
    return root


@pytest.mark.claim("vision-language mixtures train with expert parallelism as in one process")
@pytest.mark.parametrize(("kind", "name"), pairs())
def test_same_numbers_as_one_process(runs: Path, kind: str, name: str) -> None:
    mine = run_of(runs, kind, name)
    reference = run_of(runs, kind, "single")
    within = KINDS[kind].within
    same_steps(mine, reference, within)
    if within == TOLERANCE:
        apart = difference(mine, reference)
        assert apart.largest <= TOLERANCE, apart
    # It learns: otherwise all would be equal.
    assert len(set(column(reference, "loss"))) == 3
    if kind == ROUTER:
        assert column(mine, "router_loss") == pytest.approx(column(reference, "router_loss"))
    if kind == "grpo":
        same_evaluations(mine, reference, within, "reward")
    else:
        same_evaluations(mine, reference, within)
        held_as_planned(mine, ("parameters", "optimizer"))


@pytest.mark.parametrize(("kind", "a", "b"), RESUMED)
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, KINDS[kind].within)


@pytest.mark.full  # the numbers are those of the tests above
@pytest.mark.parametrize("model", ["qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_transformers_reads_the_export(tmp_path: Path, model: str, adapter: str) -> None:
    """`drumline train` compares the logits of the export with those of the trained model."""
    folder = model_dir(tmp_path / "model", model)
    write_data(tmp_path, "train", vision_rows(tmp_path, 24))
    options = LORA if adapter == "lora" else {"kind": "none"}
    path = write_config(
        tmp_path,
        folder,
        launch={"nproc": 2},
        strategy={"kind": "fsdp2", "ep": 2},
        data={"packing": False, "eval": []},
        run={"steps": 2},
        adapter=options,
        checkpoint={"export": "last"},
    )
    run_drumline("train", path)
    run = tmp_path / "run"
    (exported,) = events(run, "export")
    assert exported["max_logit_difference"] <= 1e-5
    read = AutoModelForImageTextToText.from_pretrained(run / "export")
    before = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    has_changed = {
        name for name, value in read.state_dict().items() if not value.equal(before[name])
    }
    assert any(".experts." in name for name in has_changed)
    if adapter == "none":
        learned = weights(run)
        for name, parameter in read.named_parameters():
            assert parameter.equal(learned[f"model.{name}"]), name
