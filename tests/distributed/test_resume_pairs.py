"""Any strategy reads what any other wrote: stop under one, go on under another, end with the numbers of a run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT
from tests.harness import events, same_weights, write_config
from tests.tiny import tiny_architecture_dir, tiny_model_dir

TOLERANCE = 1e-5
# The first test waits for all runs.
pytestmark = pytest.mark.timeout(1500)

# name → (world size, strategy). Each writes for two others and reads from two; with `--full` each for each.
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
}
MIXTURE_PAIRS = [
    (f"{EXPERTS}ep 2", f"{EXPERTS}fsdp2 2 x ep 2"),
    (f"{EXPERTS}fsdp2 2 x ep 2", f"{EXPERTS}single"),
    (f"{EXPERTS}fsdp2 2", f"{EXPERTS}ep 2"),
]
# With an adapter only what learns is in a checkpoint.
LORA = "lora, "
LORA_PAIRS = [(f"{LORA}ddp 2", f"{LORA}fsdp2 2"), (f"{LORA}fsdp2 2", f"{LORA}single")]
# DeepSpeed's ranks hold slices of flat buffers, offloaded perhaps; each of these both writes for and reads from others.
ZERO: dict[str, tuple[int, Any]] = {
    "zero1 2": (2, "zero1"),
    "zero2 2": (2, {"kind": "zero2", "offload_optimizer": "cpu"}),
    "zero3 2": (2, {**CUT, "offload_parameters": "cpu"}),
    "zero3 4": (4, CUT),
}
ZERO_PAIRS = [
    ("ddp 2", "zero2 2"), ("zero2 2", "ddp 2"), ("fsdp2 2", "zero3 2"), ("zero3 2", "fsdp2 2"), ("zero2 2", "zero3 4"),
    ("zero3 4", "zero1 2"), ("zero1 2", "single"), ("zero3 2", "zero3 4"), (f"{LORA}ddp 2", f"{LORA}zero3 2"),
    (f"{LORA}zero3 2", f"{LORA}single"),
]  # fmt: skip
NAMES = list(SPREADS)
# The next one and the third: both ways between world sizes, whole and cut, are among them.
SOME = [(a, NAMES[(index + away) % len(NAMES)]) for index, a in enumerate(NAMES) for away in (1, 3)]
PAIRS = [*SOME, *LORA_PAIRS, *PIPELINE_PAIRS, *PARTS_PAIRS, *MIXTURE_PAIRS, *ZERO_PAIRS]
# Both ways between the same two, or between degrees that others cover: with --full alone.
AGAIN = [(a, b) for a, b in SOME if NAMES.index(b) != (NAMES.index(a) + 1) % len(NAMES)]
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
]
REST = [(a, b) for a in SPREADS for b in SPREADS if a != b and (a, b) not in SOME]


def spread(name: str) -> tuple[int, Any]:
    return (SPREADS | PIPELINES | PARTS | MIXTURES | ZERO)[
        name.removeprefix(LORA).removeprefix(EXPERTS)
    ]


def reference_of(name: str) -> str:
    return next((f"{kind}single" for kind in (LORA, EXPERTS) if name.startswith(kind)), "single")


def wanted(session: pytest.Session) -> list[tuple[str, str]]:
    """The pairs that the chosen tests of this file look at."""
    mine = [
        item
        for item in session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    return [(item.callspec.params["a"], item.callspec.params["b"]) for item in mine]


def plan(root: Path, name: str, folder: str) -> Path:
    """The plan of a run of four steps under one spread, with a checkpoint after two."""
    world_size, strategy = spread(name)
    place = root / folder
    place.mkdir()
    path = write_config(
        place,
        root / ("mixture" if name.startswith(EXPERTS) else "model"),
        rows=60,
        data={"packing": False},
        strategy=strategy,
        adapter={"kind": "lora", "r": 4} if name.startswith(LORA) else "none",
        # What a fresh adapter's A learns from is near nothing; a large epsilon keeps Adam from blowing its rounding up.
        optimizer={
            "lr": 3e-3,
            "weight_decay": 0.1,
            "eps": 1e-4 if name.startswith(LORA) else 1e-6 if name.startswith(EXPERTS) else 1e-8,
        },
        batch={"global_samples": 8, "micro_batch": 2},
        checkpoint={"every": 2, "asynchronous": False, "export": "none"},
        eval={"at_start": False},
    )
    request = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=world_size)
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def slug(*names: str) -> str:
    return "-to-".join(names).replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = wanted(request.session)
    names = list(dict.fromkeys(name for a, b in pairs for name in (a, reference_of(b))))
    root = tmp_path_factory.mktemp("pairs")
    # A vocabulary that divides by nothing: the last ranks hold fewer rows.
    tiny_model_dir(root / "model", vocab_size=319)
    tiny_architecture_dir(root / "mixture", "mixtral")
    for world_size in (1, 2, 4):
        run_plans(
            [plan(root, name, slug(name)) for name in names if spread(name)[0] == world_size],
            world_size,
        )
    for world_size in (1, 2, 4):
        plans = []
        for a, b in pairs:
            if spread(b)[0] == world_size:
                plans.append(plan(root, b, slug(a, b)))
                stopped = root / slug(a) / "run" / "checkpoints" / "step-00000002"
                shutil.copytree(stopped, plans[-1].parent / "checkpoints" / stopped.name)
        run_plans(plans, world_size)
    return root


@pytest.mark.claim("a checkpoint of any strategy is read under any other")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(
            a, b, id=f"{a} to {b}", marks=[pytest.mark.full] if (a, b) in (*REST, *AGAIN) else []
        )
        for a, b in (*PAIRS, *REST)
    ],
)
def test_goes_on_under_another(runs: Path, a: str, b: str) -> None:
    run, reference = runs / slug(a, b) / "run", runs / slug(reference_of(b)) / "run"
    assert [e["step"] for e in events(run, "step")] == [3, 4]
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in events(run, "step")] == pytest.approx(
            [e[key] for e in events(reference, "step")][2:], rel=TOLERANCE
        ), key
    same_weights(run, reference, TOLERANCE)
