"""Any strategy reads what any other wrote: stop under one, go on under another, end with the
numbers of a run that never stopped."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rows import CUT
from tests.distributed.setups import (
    SHORT,
    case,
    chosen_params,
    copy_checkpoint,
    plan_in,
    same_steps,
    slug,
    train,
)
from tests.harness import column, same_weights
from tests.tiny import tiny_architecture_dir, tiny_model_dir

TOLERANCE = 1e-5
# The first test waits for all runs.
pytestmark = pytest.mark.timeout(1500)

# name → (world size, strategy). Each writes for two others and reads from two; with `--full` each
# for each.
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
    "fsdp2 2 grad-op offload": (
        2,
        {"kind": "fsdp2", "reshard_after_forward": False, "offload": "cpu"},
    ),
    "fsdp2 hybrid 2 x 2": (4, {"kind": "fsdp2", "replicate": 2}),
    "tp 2": (2, "tp"),
    "cp 2": (2, "cp"),
    "fsdp2 2 x tp 2": (4, {"kind": "fsdp2", "tp": 2}),
}
# A pipeline's stages name a part each: with some of the others, and with each other.
PIPELINES: dict[str, tuple[int, Any]] = {
    "pp 2": (2, "pp"),
    "ddp 2 x pp 2": (4, {"kind": "ddp", "pp": 2}),
}
PIPELINE_PAIRS = [
    ("pp 2", "single"),
    ("ddp 2", "pp 2"),
    ("pp 2", "fsdp2 2"),
    ("tp 2", "pp 2"),
    ("pp 2", "ddp 2 x pp 2"),
    ("ddp 2 x pp 2", "pp 2"),
    ("ddp 2 x pp 2", "fsdp2 2 x tp 2"),
    ("fsdp2 hybrid 2 x 2", "ddp 2 x pp 2"),
]
# The stream cut by tokens, and the step shared out over copies of parts.
PARTS: dict[str, tuple[int, Any]] = {
    "tp 2, whole stream": (2, {"kind": "tp", "sequence_parallel": False}),
    "ddp 2 x tp 2, sharded optimizer": (4, {"kind": "ddp", "tp": 2, "shard_optimizer": True}),
    "ddp 2 x pp 2, sharded optimizer": (4, {"kind": "ddp", "pp": 2, "shard_optimizer": True}),
}
PARTS_PAIRS = [
    ("tp 2, whole stream", "tp 2"),
    ("ddp 2 x tp 2, sharded optimizer", "single"),
    ("fsdp2 2", "ddp 2 x pp 2, sharded optimizer"),
    ("ddp 2 x pp 2, sharded optimizer", "tp 2, whole stream"),
]
# A mixture, whose experts lie on some ranks each.
EXPERTS = "experts, "
MIXTURES: dict[str, tuple[int, Any]] = {
    "ep 2": (2, {"kind": "ddp", "ep": 2}),
    "fsdp2 2 x ep 2": (4, {"kind": "fsdp2", "ep": 2}),
    "fsdp2, ep 2 x cp 2": (4, {"kind": "fsdp2", "ep": 2, "cp": 2}),
    "ep 2 x tp 2": (4, {"kind": "ddp", "ep": 2, "tp": 2}),
}
MIXTURE_PAIRS = [
    (f"{EXPERTS}ep 2", f"{EXPERTS}fsdp2 2 x ep 2"),
    (f"{EXPERTS}fsdp2 2 x ep 2", f"{EXPERTS}single"),
    (f"{EXPERTS}fsdp2 2", f"{EXPERTS}ep 2"),
    (f"{EXPERTS}fsdp2, ep 2 x cp 2", f"{EXPERTS}ep 2 x tp 2"),
    (f"{EXPERTS}ep 2 x tp 2", f"{EXPERTS}single"),
]
# With an adapter only what learns is in a checkpoint.
LORA = "lora, "
LORA_PAIRS = [(f"{LORA}ddp 2", f"{LORA}fsdp2 2"), (f"{LORA}fsdp2 2", f"{LORA}single")]
# DeepSpeed's ranks hold slices of flat buffers, offloaded perhaps; each of these both writes for
# and reads from others.
ZERO: dict[str, tuple[int, Any]] = {
    "zero1 2": (2, "zero1"),
    "zero2 2": (2, {"kind": "zero2", "offload_optimizer": "cpu"}),
    "zero3 2": (2, {**CUT, "offload_parameters": "cpu"}),
    "zero3 4": (4, CUT),
}
ZERO_PAIRS = [
    ("ddp 2", "zero2 2"),
    ("zero2 2", "ddp 2"),
    ("fsdp2 2", "zero3 2"),
    ("zero3 2", "fsdp2 2"),
    ("zero2 2", "zero3 4"),
    ("zero3 4", "zero1 2"),
    ("zero1 2", "single"),
    ("zero3 2", "zero3 4"),
    (f"{LORA}ddp 2", f"{LORA}zero3 2"),
    (f"{LORA}zero3 2", f"{LORA}single"),
]
NAMES = list(SPREADS)
SOME: list[tuple[str, str]] = []
AGAIN: list[tuple[str, str]] = []
# The next one and the third: both ways between world sizes, whole and cut, are among them.
for index, writer in enumerate(NAMES):
    following, third = (NAMES[(index + away) % len(NAMES)] for away in (1, 3))
    SOME += [(writer, following), (writer, third)]
    AGAIN.append((writer, third))
PAIRS = [*SOME, *LORA_PAIRS, *PIPELINE_PAIRS, *PARTS_PAIRS, *MIXTURE_PAIRS, *ZERO_PAIRS]
# Both ways between the same two, or between degrees that others cover: with --full alone.
AGAIN += [
    ("ddp 2 x pp 2", "fsdp2 2 x tp 2"),
    ("pp 2", "ddp 2 x pp 2"),
    ("zero3 2", "zero3 4"),
    ("zero1 2", "single"),
    ("zero2 2", "ddp 2"),
]
AGAIN += [*PARTS_PAIRS[1:3], *MIXTURE_PAIRS[1:]]
AGAIN += [
    ("tp 2", "pp 2"),
    ("zero3 4", "zero1 2"),
    ("fsdp2 hybrid 2 x 2", "ddp 2 x pp 2"),
    (f"{LORA}fsdp2 2", f"{LORA}single"),
]
AGAIN += [
    ("fsdp2 2 grad-op offload", "fsdp2 hybrid 2 x 2"),
    ("cp 2", "fsdp2 2 x tp 2"),
    ("pp 2", "fsdp2 2"),
    ("ddp 2 x pp 2", "pp 2"),
]
AGAIN += [("tp 2, whole stream", "tp 2"), ("fsdp2 2", "zero3 2"), *LORA_PAIRS, ZERO_PAIRS[-1]]
AGAIN += [
    ("pp 2", "single"),
    ("ddp 2", "zero2 2"),
    ("zero2 2", "zero3 4"),
    ("ddp 2 x pp 2, sharded optimizer", "tp 2, whole stream"),
    ("fsdp2 2", "fsdp2 2 grad-op offload"),
    ("fsdp2 2 x tp 2", "single"),
    ("tp 2", "cp 2"),
]
AGAIN += [
    ("single", "ddp 2"),
    ("fsdp2 hybrid 2 x 2", "tp 2"),
    MIXTURE_PAIRS[0],
    (f"{LORA}ddp 2", f"{LORA}zero3 2"),
]
AGAIN += [(a, b) for a, b in permutations(SPREADS, 2) if (a, b) not in SOME]
ALL_SPREADS = SPREADS | PIPELINES | PARTS | MIXTURES | ZERO


def kind_of(name: str) -> str:
    """The model and what of it learns: the beginning of a spread's name."""
    for kind in (LORA, EXPERTS):
        if name.startswith(kind):
            return kind
    return ""


def reference_of(name: str) -> str:
    return f"{kind_of(name)}single"


# What a fresh adapter's A learns from is near nothing; a large epsilon keeps Adam from blowing its
# rounding up.
EPSILON = {LORA: 1e-4, EXPERTS: 1e-6, "": 1e-8}
ADAPTERS: dict[str, Any] = {LORA: {"kind": "lora", "r": 4}}
MODELS = {EXPERTS: "mixture"}


def plan(root: Path, name: str, folder: str) -> Path:
    """The plan of a run of four steps under one spread, with a checkpoint after two."""
    kind = kind_of(name)
    world_size, strategy = ALL_SPREADS[name.removeprefix(kind)]
    return plan_in(
        root,
        folder,
        world_size,
        root / MODELS.get(kind, "model"),
        strategy=strategy,
        adapter=ADAPTERS.get(kind, "none"),
        optimizer={"lr": 3e-3, "weight_decay": 0.1, "eps": EPSILON[kind]},
        **SHORT,
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    # A vocabulary that divides by nothing: the last ranks hold fewer rows.
    tiny_model_dir(root / "model", vocab_size=319)
    tiny_architecture_dir(root / "mixture", "mixtral")
    params = chosen_params(request.session, __file__)
    whole: dict[str, Path] = {}
    for pair in params:
        for name in (pair["a"], reference_of(pair["b"])):
            if name not in whole:
                whole[name] = plan(root, name, slug(name))
    train(whole.values())
    moved = []
    for pair in params:
        a, b = pair["a"], pair["b"]
        path = plan(root, b, slug(a, b))
        copy_checkpoint(whole[a].parent, path)
        moved.append(path)
    train(moved)
    return root


def marked() -> list[Any]:
    every = dict.fromkeys([*PAIRS, *permutations(SPREADS, 2)])
    return [case(a, b, id=f"{a} to {b}", full=(a, b) in AGAIN) for a, b in every]


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@pytest.mark.parametrize(("a", "b"), marked())
def test_goes_on_under_another(runs: Path, a: str, b: str) -> None:
    run = runs / slug(a, b) / "run"
    reference = runs / slug(reference_of(b)) / "run"
    assert column(run, "step") == [3, 4]
    same_steps(run, reference, TOLERANCE, skip=2)
    same_weights(run, reference, TOLERANCE)
