"""Kinds of adapters by the row of a strategy: the numbers of one process, bytes as planned, and a
run that stops under one strategy and goes on under another. What they are by themselves, and
what is exported: tests/unit/test_adapters.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.plan.plan import Plan
from tests.distributed.promises import held_as_planned, sent_as_planned
from tests.distributed.rows import CUT
from tests.distributed.setups import (
    SHORT,
    case,
    chosen_params,
    goes_on_from,
    plan_in,
    run_of,
    same_steps,
    train_kinds,
)
from tests.harness import Sections, column
from tests.tiny import tiny_architecture_dir, tiny_model_dir

pytestmark = pytest.mark.timeout(1500)


class Kind(NamedTuple):
    """`within`: relative, of losses and gradient norms of three steps against one process.

    `architecture`: one of tests.tiny.ARCHITECTURES; empty: a Llama.
    """

    adapter: Sections
    within: float = 1e-5
    sections: Sections = {}
    architecture: str = ""


ENDS = ["q_proj", "lm_head", "embed_tokens"]
UNTIED = {"init": "random", "config": {"tie_word_embeddings": False}}
MORE = {"feed": {"r": 2, "targets": ["up_proj", "down_proj"], "rslora": True}}
KINDS = {
    "dora": Kind({"dora": True, "rslora": True}),
    # Factors of size 1 in place of 0: rounding is larger against the same gradients.
    "pissa": Kind({"init": "pissa"}, 1e-4),
    "saved and tokens": Kind(
        {"modules_to_save": ["model.norm"], "trainable_tokens": [5, 70, 71], "targets": "attention"}
    ),
    "two": Kind({"more": MORE, "targets": "attention"}),
    # Tied in the tiny model: of a pipeline both stages hold the weight, and each its own factors.
    "ends": Kind({"targets": ENDS}),
    "untied ends": Kind({"targets": ENDS}, sections={"model": UNTIED}),
    "ends, bf16": Kind({"targets": ENDS}, 3e-2, {"precision": "bf16"}),
    # Scales of a whole matrix, whatever part of it a rank has: the same weights.
    "4bit": Kind({"quantize": "4bit"}),
    "8bit": Kind({"quantize": "8bit"}),
    "4bit, dora, pissa": Kind({"quantize": "4bit", "dora": True, "init": "pissa"}, 1e-4),
    "4bit, bf16": Kind({"quantize": "4bit"}, 3e-2, {"precision": "bf16"}),
    "4bit, pure bf16": Kind(
        {"quantize": "4bit"}, 3e-2, {"precision": {"kind": "bf16", "master": "bf16"}}
    ),
    "experts": Kind({}, architecture="deepseek_v3"),
    "experts, 4bit": Kind({"quantize": "4bit"}, architecture="deepseek_v3"),
    "experts, 8bit": Kind({"quantize": "8bit", "targets": "attention"}, architecture="deepseek_v3"),
    "dora, pissa, bf16": Kind({"dora": True, "init": "pissa_fast"}, 3e-2, {"precision": "bf16"}),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
    "fsdp2 2, offload": (2, {"kind": "fsdp2", "offload": "cpu"}),
    "zero3 2": (2, CUT),
    "zero2 2": (2, "zero2"),
    "cp 2": (2, "cp"),
    "pp 2": (2, "pp"),
    "tp 2": (2, "tp"),
}
# Of these a tensor-parallel rank has no part.
WHOLE = ("dora", "tokens")
NOT_PURE = ("zero3 2", "zero2 2", "cp 2", "pp 2", "tp 2")
OFTEN = ("fsdp2 2", "zero3 2")
# With --full.
REST = (
    "untied ends",
    "ends, bf16",
    "dora, pissa, bf16",
    "4bit, bf16",
    "4bit, pure bf16",
    "8bit",
    "pissa",
    "dora",
    "4bit",
    "two",
    "ends",
    "experts, 8bit",
)


def is_refused(kind: str, spread: str) -> bool:
    if kind == "4bit, pure bf16":
        return spread in NOT_PURE
    return spread == "tp 2" and any(word in kind for word in WHOLE)


def pairs() -> list[Any]:
    found = []
    for kind in KINDS:
        for name in SPREADS:
            if name != "single" and not is_refused(kind, name):
                often = name in OFTEN and kind not in REST
                found.append(case(kind, name, id=f"{kind}-{name}", full=not often))
    return found


WAYS = [
    ("fsdp2 2", "single"),
    ("single", "zero3 2"),
    ("zero3 2", "ddp 2"),
    ("ddp 2", "fsdp2 2"),
    ("tp 2", "single"),
]


def moves() -> list[Any]:
    found = []
    for kind in KINDS:
        for a, b in WAYS:
            if not is_refused(kind, a) and not is_refused(kind, b):
                often = (a, b) == ("fsdp2 2", "single") and kind not in REST
                found.append(case(kind, a, b, id=f"{kind}-{a} to {b}", full=not often))
    return found


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two. The third is counted."""
    ranks, strategy = SPREADS[spread]
    return plan_in(
        root,
        folder,
        ranks,
        root / (KINDS[kind].architecture or "model"),
        strategy=strategy,
        adapter={"kind": "lora", "r": 4, **KINDS[kind].adapter},
        run={"steps": 3},
        # A fresh adapter's gradients are near nothing; a large epsilon keeps Adam from blowing
        # their rounding up.
        optimizer={"lr": 3e-3, "eps": 1e-4},
        **SHORT,
        **KINDS[kind].sections,
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tiny_model_dir(root / "model", hidden=64)
    for architecture in {kind.architecture for kind in KINDS.values() if kind.architecture}:
        tiny_architecture_dir(root / architecture, architecture)
    train_kinds(root, chosen_params(request.session, __file__), plan)
    return root


@pytest.mark.claim(
    "kinds of adapters train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "name"), pairs())
def test_numbers_are_near_and_bytes_as_planned(runs: Path, kind: str, name: str) -> None:
    run = run_of(runs, kind, name)
    same_steps(run, run_of(runs, kind, "single"), KINDS[kind].within)
    losses = column(run, "loss")
    assert losses[-1] < losses[0]
    held_as_planned(run, ("parameters", "optimizer"))
    plan = Plan.load(run / "plan.json")
    mesh = plan.mesh
    if plan.data_parallel in ("ddp", "fsdp2") and mesh.pp == mesh.tp == mesh.cp == 1:
        sent_as_planned(run)


@pytest.mark.claim(
    "kinds of adapters train near one process under each strategy, hold the bytes that are planned, and go on under another"
)
@pytest.mark.parametrize(("kind", "a", "b"), moves())
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, KINDS[kind].within)
