"""Bytes that the planner says a step sends, held against those that real runs counted at their
collectives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from drumline.plan.plan import Plan
from drumline.planner.cost.traffic import flows
from tests.distributed import setups
from tests.distributed.promises import facts_of
from tests.distributed.rows import CHECKPOINTED, CUT, LOW, ROWS, Row
from tests.distributed.setups import EIGHT_BY_FOUR, case, chosen_params, merge, plan_run, train
from tests.harness import WORDS, Sections, column, write_config, write_rows
from tests.tiny import tiny_architecture_dir, tiny_model_dir

LENGTH = 96
# Documents that are cut at LENGTH tokens, so that every row is full. Two steps pass before one is
# counted.
BASE: Sections = {
    "algorithm": {"kind": "pretrain", "loss_chunk": 0},
    "data": {"packing": True, "max_length": LENGTH, "eval": []},
    "rows": 160,
    "batch": EIGHT_BY_FOUR,
    "run": {"steps": 3, "log_every": 1},
    "checkpoint": {"every": None, "asynchronous": False, "keep_best": False},
    "eval": {"at_start": False, "every": None},
}


# Widths that two and four ranks do not divide.
MODEL: Sections = {"vocab_size": 317, "layers": 4, "hidden": 40}
DOCUMENT = random.Random(0).choices(WORDS, k=3000)
# Rows whose parts are uneven here. Those that send the same of any model are held against the
# planner in test_parity.
UNEVEN = (
    "fsdp2 2, accumulation 4",
    "fsdp2 hybrid 2 x 2",
    "tp 2, activation checkpointing",
    "fsdp2 2 x tp 2",
    "tp 2",
    "tp 2, whole stream",
    "fsdp2 2 x tp 2, activation checkpointing",
    "tp 2 x pp 2, interleaved",
    "cp 2 x tp 2",
    "fsdp2 2 x pp 2, interleaved",
    "tp 2 x pp 2",
    "ddp 2, sharded optimizer",
    "ddp 2 x tp 2, sharded optimizer",
    "ddp 2 x pp 2, sharded optimizer",
    "zero2 2, accumulation 4",
    "zero3 4",
    "fsdp2 2, bf16",
    "tp 2, bf16",
    "tp 2, whole stream, bf16",
    "zero1 2, bf16",
    "zero2 2, bf16",
)
PARTS = {"stage3_param_persistence_threshold": 100}
LORA = (
    "fsdp2 2, activation checkpointing",
    "tp 2",
    "tp 2, activation checkpointing",
    "tp 2, whole stream",
)
COMPRESSED: dict[str, Sections] = {
    "int8": {},
    "topk": {"ratio": 0.1},
    "powersgd": {"rank": 4},
}
FAR = {
    **CUT,
    "options": {
        "zero_optimization": {
            **PARTS,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 40000,
        }
    },
}
OWN_HEAD = {"init": "random", "config": {"tie_word_embeddings": False}}
PURE = {"kind": "bf16", "master": "bf16"}
SELECTIVE: Sections = {"memory": {"activation_checkpointing": "selective"}}


def rows_of_others() -> list[Row]:
    """Rows of test_parity, some of them with adapters, and plain ones that compress."""
    found = [row for row in ROWS + LOW if row.name in UNEVEN]
    adapter = {"kind": "lora", "r": 4}
    for row in ROWS:
        if row.name in LORA:
            sections = {**row.sections, "adapter": adapter}
            found.append(Row(f"lora, {row.name}", row.world_size, sections))
    for kind, options in COMPRESSED.items():
        strategy = {"kind": "ddp", "compression": {"kind": kind, **options}}
        found.append(Row(f"ddp, {kind}", 2, {"strategy": strategy}))
    return found


EXACT = [
    *rows_of_others(),
    Row("zero1, accumulation 4", 2, {"strategy": "zero1", "batch": {"micro_batch": 1}}),
    Row("zero3, what is far apart gathered twice", 2, {"strategy": FAR, "model": OWN_HEAD}),
    Row("local_sgd, a step together", 2, {"strategy": {"kind": "local_sgd", "period": 3}}),
    Row("diloco, a step apart", 2, {"strategy": {"kind": "diloco", "period": 4}}),
    Row("cp, bf16", 2, {"strategy": "cp", "precision": "bf16"}),
    Row(
        "fsdp2, cp, gathered in fp32, bf16",
        2,
        {"strategy": {"kind": "fsdp2", "cp": 2, "param_dtype": "fp32"}, "precision": "bf16"},
    ),
    Row("tp, selective", 2, {"strategy": "tp", **SELECTIVE}),
    Row(
        "tp, whole stream, selective",
        2,
        {"strategy": {"kind": "tp", "sequence_parallel": False}, **SELECTIVE},
    ),
    Row("cp, selective", 2, {"strategy": "cp", **SELECTIVE}),
    Row("tp, pure bf16", 2, {"strategy": "tp", "precision": PURE}),
    Row(
        "tp, whole stream, pure bf16",
        2,
        {"strategy": {"kind": "tp", "sequence_parallel": False}, "precision": PURE},
    ),
    Row("cp, pure bf16", 2, {"strategy": "cp", "precision": PURE}),
    Row("fsdp2 x tp, bf16", 4, {"strategy": {"kind": "fsdp2", "tp": 2}, "precision": "bf16"}),
    Row("pp, pure bf16", 2, {"strategy": "pp", "precision": PURE, "batch": {"micro_batch": 2}}),
]
# test_parity counts most strategies on an even model. One of each kind that is uneven here; the
# others with --full alone.
KEPT = ("tp 2", "ddp, int8")
assert len(EXACT) == len(UNEVEN) + len(LORA) + len(COMPRESSED) + 14, (
    "a row is named that is not there"
)


def slug(row: Row) -> str:
    return setups.slug(row.name)


def plan_of(root: Path, row: Row) -> Path:
    folder = root / slug(row)
    folder.mkdir()
    path = write_config(folder, root / "model", **merge(BASE, row.sections))
    write_rows(folder / "train.jsonl", [{"text": " ".join(DOCUMENT)}])
    return plan_run(path, row.world_size, root / "cache")


def predicted(plan: Plan) -> float:
    # Of the counted step; the last row of the data is shorter.
    layout = plan.model_copy(update={"data": None})
    return flows(layout, facts_of(plan), step=2).traffic().total


def run_rows(root: Path, rows: list[Row]) -> None:
    plans = [plan_of(root, row) for row in rows]
    train(plans, counted=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows that are asked for, trained: one process group for each world size and engine."""
    root = tmp_path_factory.mktemp("traffic")
    tiny_model_dir(root / "model", **MODEL)
    # Tests without parameters train what they need by themselves.
    params = chosen_params(request.session, __file__)
    run_rows(root, [asked["row"] for asked in params if "row" in asked])
    return root


def marked(row: Row) -> Any:
    return case(row, id=row.name, full=row.name not in KEPT)


@pytest.mark.parametrize("row", list(map(marked, EXACT)))
def test_the_planner_says_what_a_step_sends(runs: Path, row: Row) -> None:
    assert_predicted(runs, row)


def assert_predicted(root: Path, row: Row) -> None:
    run = root / slug(row) / "run"
    plan = Plan.load(run / "plan.json")
    sent = column(run, "sent_bytes")[-1]
    assert sent == pytest.approx(predicted(plan), rel=1e-6, abs=1)


WITHOUT_DROPOUT = {"config": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
WHOLE_STREAM = {"kind": "tp", "sequence_parallel": False}
TRANSPOSED = [
    Row("tp of gpt2", 2, {"strategy": WHOLE_STREAM, "model": WITHOUT_DROPOUT}),
    Row(
        "tp of gpt2, activation checkpointing",
        2,
        {
            "strategy": WHOLE_STREAM,
            "model": WITHOUT_DROPOUT,
            "memory": {"activation_checkpointing": "full"},
        },
    ),
]


@pytest.mark.full
def test_layers_may_keep_their_matrices_transposed(tmp_path: Path) -> None:
    """As Conv1D of GPT-2 does."""
    tiny_architecture_dir(tmp_path / "model", "gpt2")
    run_rows(tmp_path, TRANSPOSED)
    for row in TRANSPOSED:
        assert_predicted(tmp_path, row)


RECURRENT = [
    Row("cp", 2, {"strategy": "cp"}),
    Row("cp, activation checkpointing", 2, {"strategy": "cp", **CHECKPOINTED}),
]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_recurrent_layers_gather_whole_rows(kind: str, tmp_path: Path) -> None:
    tiny_architecture_dir(tmp_path / "model", kind)
    run_rows(tmp_path, RECURRENT)
    for row in RECURRENT:
        assert_predicted(tmp_path, row)


# Heads of queries and keys are larger than those of values, and than `head_dim` of the config.
LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 12}
CP = {"strategy": "cp"}
RECOMPUTED = {"memory": {"activation_checkpointing": "full"}}
OF_LATENT_ATTENTION = [
    Row("cp of deepseek_v3", 2, CP),
    Row("cp of deepseek_v3, bf16", 2, {**CP, "precision": "bf16"}),
    Row("cp of deepseek_v3, pure bf16", 2, {**CP, "precision": PURE}),
    Row("cp of deepseek_v3, activation checkpointing", 2, {**CP, **RECOMPUTED}),
    Row("fsdp2 x cp of deepseek_v3", 4, {"strategy": {"kind": "fsdp2", "cp": 2}}),
    Row("ep x cp of deepseek_v3", 4, {"strategy": {"kind": "ddp", "ep": 2, "cp": 2}}),
    Row("cp x tp of deepseek_v3", 4, {"strategy": {"kind": "ddp", "cp": 2, "tp": 2}}),
]


@pytest.mark.full
def test_heads_may_have_two_sizes(tmp_path: Path) -> None:
    """Multi-head latent attention, whose heads cross the ranks of cp."""
    tiny_architecture_dir(tmp_path / "model", "deepseek_v3", **LATENT)
    run_rows(tmp_path, OF_LATENT_ATTENTION)
    for row in OF_LATENT_ATTENTION:
        assert_predicted(tmp_path, row)


PACKED = {"adapter": {"kind": "lora", "r": 4, "quantize": "4bit"}}
OF_PACKED_WEIGHTS = [
    Row("tp, 4bit", 2, {"strategy": "tp", **PACKED}),
    Row("fsdp2 x tp, 4bit", 4, {"strategy": {"kind": "fsdp2", "tp": 2}, **PACKED}),
    Row(
        "fsdp2 x tp, 4bit, bf16",
        4,
        {"strategy": {"kind": "fsdp2", "tp": 2}, "precision": "bf16", **PACKED},
    ),
]


@pytest.mark.full
def test_packed_weights_are_sent_as_codes(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model", hidden=64)
    run_rows(tmp_path, OF_PACKED_WEIGHTS)
    for row in OF_PACKED_WEIGHTS:
        assert_predicted(tmp_path, row)
