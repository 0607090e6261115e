"""The rows: what is trained over the stand-in and held against the CPU.

`numbers` are sections of the YAML that change what is learned; the CPU trains with them in one
process, in fp32. `sections` are those of the GPU run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.distributed.rows import CUT
from tests.harness import LETTERS

STEPS = 4  # the last of them is logged
SAVED_STEP = 2
# Steps are counted from 0. This one is not logged, and every buffer of a step is there by now.
QUIET_STEP = 2

FP32 = 1e-5
# As tests/distributed/rows.py holds low precision near fp32.
LOW = 3e-3

Sections = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Row:
    """One run. `tolerance`: of its losses, relative to the CPU's."""

    name: str
    world_size: int
    sections: Sections = field(default_factory=dict)
    numbers: Sections = field(default_factory=dict)
    tolerance: float = FP32
    layers: int = 2
    architecture: str = "llama"  # or SCORED, or one of tests.tiny.ARCHITECTURES
    # The CPU trains with the same strategy on as many processes: what it learns hangs on them.
    is_held_against_ranks: bool = False
    continues: str = ""  # the name of the row whose checkpoint of the middle it goes on from


# A head that is not in the model's files would be drawn on the device, and be another one there.
SCORED = "llama with a head of scores"
PACKED: Sections = {"data": {"packing": True, "max_length": 96}, "rows": 120}
RING: Sections = {"data": {"packing": False, "max_length": 128}}
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
ROLLOUT: Sections = {
    "rewards": [LETTERS],
    "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
    "loss_chunk": 32,
}


def in_precision(name: str, precision: str, row: Row) -> Row:
    """Return `row` by another name, in a precision and with the tolerance of that precision."""
    is_low = precision != "fp32"
    tolerance = max(LOW, row.tolerance) if is_low else row.tolerance
    sections = {**row.sections, "precision": precision}
    return replace(row, name=name, sections=sections, tolerance=tolerance)


def spread(name: str, world_size: int, strategy: Any, **more: Any) -> Row:
    return Row(name, world_size, {"strategy": strategy}, **more)


STRATEGIES = [
    spread("one device", 1, "single"),
    spread("dp", 1, "dp"),
    spread("ddp 2", 2, "ddp"),
    spread("ddp 2, sharded optimizer", 2, {"kind": "ddp", "shard_optimizer": True}),
    spread("ddp 4", 4, "ddp"),
    spread("fsdp2 2", 2, "fsdp2"),
    spread("fsdp2 4", 4, "fsdp2"),
    spread("fsdp2 hybrid 2 x 2", 4, {"kind": "fsdp2", "replicate": 2}),
    spread("zero1 2", 2, "zero1"),
    spread("zero2 2", 2, "zero2"),
    spread("zero3 2", 2, CUT),
    spread("tp 2", 2, "tp"),
    spread("tp 2, whole stream", 2, {"kind": "tp", "sequence_parallel": False}),
    spread("ddp 2 x tp 2", 4, {"kind": "ddp", "tp": 2}),
    spread("fsdp2 2 x tp 2", 4, {"kind": "fsdp2", "tp": 2}),
    spread("cp 2", 2, "cp"),
    spread("cp 2, ring", 2, {"kind": "cp", "method": "ring"}, numbers=RING),
    spread("fsdp2 2 x cp 2", 4, {"kind": "fsdp2", "cp": 2}),
    spread("pp 2", 2, "pp", layers=4),
    spread("pp 2, interleaved", 2, {"kind": "pp", "schedule": "interleaved"}, layers=4),
    spread("pp 2, zero bubble", 2, {"kind": "pp", "schedule": "zero_bubble"}, layers=4),
    spread("pp 4", 4, "pp", layers=4),
    spread("ddp 2 x pp 2", 4, {"kind": "ddp", "pp": 2}, layers=4),
    spread("fsdp2 2 x pp 2", 4, {"kind": "fsdp2", "pp": 2}, layers=4),
    spread("tp 2 x pp 2", 4, {"kind": "ddp", "tp": 2, "pp": 2}, layers=4),
    spread("model_parallel 2", 2, "model_parallel", layers=4),
    spread("ep 2", 2, {"kind": "ddp", "ep": 2}, architecture="mixtral"),
    spread("local_sgd 2", 2, {"kind": "local_sgd", "period": 2}, is_held_against_ranks=True),
    spread("diloco 2", 2, {"kind": "diloco", "period": 2}, is_held_against_ranks=True),
]
BY_NAME = {row.name: row for row in STRATEGIES}
SAVED: Sections = {"checkpoint": {"every": SAVED_STEP}}
ROWS = [
    in_precision(f"{row.name}, {precision}", precision, row)
    for row in STRATEGIES
    for precision in ("fp32", "bf16")
]
for row in ROWS:
    # To save is to average the copies of local SGD, so its rows save where the CPU's do: at the end.
    if row.sections["precision"] == "fp32" and not row.is_held_against_ranks:
        row.sections.update(SAVED)
# Saved under one strategy, and gone on with under another.
ROWS += [
    replace(BY_NAME[after], name=f"{before} to {after}", continues=f"{before}, fp32")
    for before, after in (
        ("fsdp2 2", "one device"),
        ("one device", "fsdp2 2"),
        ("ddp 2", "tp 2"),
        ("tp 2", "fsdp2 4"),
        ("fsdp2 4", "cp 2"),
        ("pp 2", "fsdp2 2 x pp 2"),
        ("tp 2 x pp 2", "pp 2, interleaved"),
        ("ddp 2, sharded optimizer", "ddp 2"),
        ("ddp 2", "zero2 2"),
        ("zero2 2", "zero3 2"),
        ("zero3 2", "fsdp2 2"),
    )
]


def work(
    name: str, strategy: str, precision: str, numbers: Sections, tolerance: float = FP32
) -> Row:
    """Return a row of a strategy that does other work."""
    base = BY_NAME[strategy]
    row = Row(name, base.world_size, base.sections, numbers, tolerance, base.layers)
    return in_precision(f"{strategy}, {name}, {precision}", precision, row)


def memory(name: str, strategy: str, options: Sections, layers: int = 2) -> Row:
    """Return a row with a memory option; in fp32, where its numbers are those without it."""
    base = BY_NAME[strategy]
    return Row(f"{strategy}, {name}", base.world_size, {**base.sections, **options}, layers=layers)


# Packs go through attention by variable lengths, which is of 16 bits.
ROWS += [
    work("packed", strategy, "bf16", PACKED)
    for strategy in ("one device", "ddp 2", "fsdp2 2", "zero2 2", "tp 2", "pp 2", "fsdp2 2 x tp 2")
]
ROWS += [
    work("lora", strategy, "bf16", {**PACKED, **LORA})
    for strategy in ("one device", "ddp 2", "fsdp2 2", "tp 2", "pp 2", "zero3 2")
]
ROWS += [
    work(
        f"qlora {bits}", strategy, "bf16", {"adapter": {**LORA["adapter"], "quantize": bits}}, 3e-2
    )
    for strategy, bits in (("one device", "4bit"), ("one device", "8bit"), ("fsdp2 2", "4bit"))
]
ROWS += [
    work("fp16", strategy, "fp16", {})
    for strategy in ("one device", "ddp 2", "fsdp2 2", "tp 2", "pp 2", "zero2 2")
]
CHECKPOINTED = {"activation_checkpointing": "full"}
ROWS += [
    memory("full checkpointing", "one device", {"memory": CHECKPOINTED}),
    memory("full checkpointing", "fsdp2 2", {"memory": CHECKPOINTED}),
    memory(
        "selective checkpointing",
        "fsdp2 2",
        {"memory": {"activation_checkpointing": "selective"}},
    ),
    memory(
        "one block checkpointed, in chunks",
        "ddp 2",
        {"memory": {**CHECKPOINTED, "checkpointed_blocks": 1, "mlp_chunk": 96}},
    ),
    memory("activations offloaded", "one device", {"memory": {"activation_offload": True}}, 4),
    memory("activations offloaded", "fsdp2 2", {"memory": {"activation_offload": True}}, 4),
    memory("everything offloaded", "fsdp2 2", {"strategy": {"kind": "fsdp2", "offload": "cpu"}}),
    memory("optimizer offloaded", "one device", {"optimizer": {"offload": True}}),
    memory("optimizer offloaded", "fsdp2 2", {"optimizer": {"offload": True}}),
    memory(
        "optimizer offloaded",
        "zero2 2",
        {"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}},
    ),
]


def optimizer(name: str, strategy: str, options: Sections, tolerance: float, **more: Any) -> Row:
    base = BY_NAME[strategy]
    numbers = {"optimizer": options, **more}
    return Row(f"{strategy}, {name}", base.world_size, base.sections, numbers, tolerance)


# The tolerances are those of tests/distributed/test_optimizers.py. Not adamw_8bit and adamw_4bit:
# torchao compiles their steps, and compiled code does not run over the stand-in.
IN_BACKWARD: Sections = {"in_backward": True, "max_grad_norm": None}
ROWS += [
    optimizer("sgd", "one device", {"kind": "sgd", "lr": 0.1}, FP32),
    optimizer("lion", "fsdp2 2", {"kind": "lion", "lr": 3e-4, "betas": [0.9, 0.99]}, FP32),
    optimizer("adafactor", "fsdp2 2", {"kind": "adafactor", "lr": 1e-2}, FP32),
    optimizer("muon", "one device", {"kind": "muon", "momentum": 0.95}, 2e-3),
    optimizer("muon", "fsdp2 2", {"kind": "muon", "momentum": 0.95}, 2e-3),
    optimizer("schedule_free", "ddp 2", {"kind": "schedule_free"}, FP32, schedule="constant"),
    optimizer(
        "in backward",
        "fsdp2 2",
        IN_BACKWARD,
        FP32,
        batch={"accumulation": 1, "micro_batch": None},
    ),
]
PURE = {"kind": "bf16", "master": "bf16"}
ROWS += [
    Row("one device, pure bf16, stochastic", 1, {"precision": PURE}, tolerance=2e-2),
    Row(
        "fsdp2 2, pure bf16, kahan",
        2,
        {"strategy": "fsdp2", "precision": {**PURE, "rounding": "kahan"}},
        tolerance=2e-2,
    ),
]
# Gradients of pairs and of advantages all but cancel: as in tests/distributed/rows.py.
NO_SIGNS: Sections = {"optimizer": {"eps": 1e-4}, "rows": 48}
ROWS += [
    replace(
        work(name, strategy, "fp32", {"algorithm": algorithm, **NO_SIGNS}, 1e-4),
        architecture=SCORED if name == "reward model" else "llama",
    )
    for name, algorithm in {
        "dpo": {"kind": "dpo", "loss_chunk": 32},
        "reward model": {"kind": "reward", "center": 0.01},
        "kto": {"kind": "kto", "loss_chunk": 32},
        "grpo": {"kind": "grpo", "group_size": 4, **ROLLOUT},
        "ppo": {"kind": "ppo", "epochs": 2, **ROLLOUT},
    }.items()
    for strategy in ("one device", "fsdp2 2")
]
# Rows whose steps copy from pageable memory, and why. Strict, so that a line goes out with its defect.
PAGEABLE = {
    row.name: "DeepSpeed makes the tensor of the gradients' norm on the host"
    for row in ROWS
    if row.name.startswith("zero")
}
PAGEABLE |= {
    row.name: "transformers' generate copies the id of padding, once a batch of prompts"
    for row in ROWS
    if row.name.endswith("grpo, fp32")
}
assert len({row.name for row in ROWS}) == len(ROWS), "two rows have one name"
