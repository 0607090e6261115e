"""The rows: what is trained over the stand-in and held against the CPU.

`numbers` are sections of the YAML that change what is learned; the CPU trains with them in one
process, in fp32. `sections` are those of the GPU run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.distributed.rows import CUT, engine_of
from tests.harness import LETTERS, Sections

STEPS = 4  # the last of them is logged
SAVED_STEP = 2
# Steps are counted from 0. This one is not logged, and every buffer of a step is there by now.
QUIET_STEP = 2
# PPO takes two steps with each rollout. To draw the next batch belongs to a step, so this one has a
# rollout in it, and QUIET_STEP has none.
STEP_WITH_ROLLOUT = 1

FP32 = 1e-5
# As tests/distributed/rows.py holds low precision near fp32.
LOW = 3e-3


@dataclass(frozen=True, eq=False)
class Row:
    """One run. `tolerance`: of its losses, relative to the CPU's."""

    name: str
    world_size: int
    sections: Sections = field(default_factory=dict)
    numbers: Sections = field(default_factory=dict)
    tolerance: float = FP32
    layers: int = 2
    # Or one of the names below, or a type that test_family_lives.py builds.
    architecture: str = "llama"
    # The CPU trains with the same strategy on as many processes: what it learns hangs on them.
    is_held_against_ranks: bool = False
    # The model learns from a teacher, which is in no section: only the test knows its folder.
    has_teacher: bool = False
    continues: str = ""  # the name of the row whose checkpoint of the middle it goes on from
    counted_step: int = QUIET_STEP
    devices_of_rank: int = 1

    @property
    def devices(self) -> int:
        return self.world_size * self.devices_of_rank

    @property
    def counted_ranks(self) -> dict[str, int]:
        """Return the ranks that are counted besides rank 0, by the names of their counts.

        The last rank of a pipeline has the head and the loss.
        """
        if engine_of(self) == "pp":
            return {"last_rank": self.world_size - 1}
        return {}

    @property
    def reference_world_size(self) -> int:
        return self.world_size if self.is_held_against_ranks else 1

    @property
    def reference_sections(self) -> Sections:
        """Return the sections of the YAML with which the CPU trains."""
        if self.is_held_against_ranks:
            return {**self.numbers, "strategy": self.sections["strategy"]}
        return self.numbers


# As many heads of keys and values as of queries: tensor parallelism on 4 devices cuts them.
FOUR_HEADS = "llama with four heads of keys and values"
# Two on each of 4 devices. With one, torch.histc reads its bounds from kernels that it starts itself,
# and those compute nothing over the stand-in.
EIGHT_EXPERTS = "mixtral with eight experts"
EIGHT_SMALL_EXPERTS = "qwen3_moe with eight experts"
# Its rows have conversations with images and without.
VISION = "qwen3_vl"
# A head that is not in the model's files would be drawn on the device, and be another one there.
SCORED = "llama with a head of scores"
VISION_SCORED = "qwen3_vl with a head of scores"
READ_IMAGES = (VISION, VISION_SCORED, "gemma3", "internvl")
PACKED: Sections = {"data": {"packing": True, "max_length": 96}, "rows": 120}
RING: Sections = {"data": {"packing": False, "max_length": 128}}
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
# The loss of routers needs all tokens of a document on one rank.
NO_ROUTER_LOSS: Sections = {"model": {"config": {"output_router_logits": False}}}
ROLLOUT: Sections = {
    "rewards": [LETTERS],
    "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
    "loss_chunk": 32,
}


def in_precision(precision: str, row: Row) -> Row:
    """Return `row` in a precision, of which it has the name, and at least the tolerance."""
    tolerance = row.tolerance
    if precision != "fp32":
        tolerance = max(LOW, tolerance)
    sections = {**row.sections, "precision": precision}
    name = f"{row.name}, {precision}"
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
# A ring cuts each sequence into eight chunks of at least 32 tokens here.
RING_OF_FOUR: Sections = {"data": {"packing": False, "max_length": 256}}
# `dp`: one process drives both devices.
ON_MORE_DEVICES = [
    spread("dp 2", 1, "dp", devices_of_rank=2),
    spread("zero1 4", 4, "zero1"),
    spread("zero2 4", 4, "zero2"),
    spread("zero3 4", 4, CUT),
    spread("tp 4", 4, "tp", architecture=FOUR_HEADS),
    spread("cp 4", 4, "cp"),
    spread("cp 4, ring", 4, {"kind": "cp", "method": "ring"}, numbers=RING_OF_FOUR),
    spread("model_parallel 4", 4, "model_parallel", layers=4),
    spread("ep 4", 4, {"kind": "ddp", "ep": 4}, architecture=EIGHT_EXPERTS),
    spread(
        "fsdp2, ep 2 x tp 2",
        4,
        {"kind": "fsdp2", "ep": 2, "tp": 2},
        architecture=EIGHT_SMALL_EXPERTS,
        numbers=NO_ROUTER_LOSS,
    ),
    spread("ep 2 x cp 2", 4, {"kind": "ddp", "ep": 2, "cp": 2}, architecture="qwen3_moe"),
    spread("local_sgd 4", 4, {"kind": "local_sgd", "period": 2}, is_held_against_ranks=True),
    spread("diloco 4", 4, {"kind": "diloco", "period": 2}, is_held_against_ranks=True),
]
BASES = {row.name: row for row in STRATEGIES}
ROWS: list[Row] = []
for base in STRATEGIES:
    full = in_precision("fp32", base)
    # To save is to average the copies of local SGD, so its rows save where the CPU's do: at the end.
    if not base.is_held_against_ranks:
        full.sections["checkpoint"] = {"every": SAVED_STEP}
    ROWS += [full, in_precision("bf16", base)]
for base in ON_MORE_DEVICES:
    ROWS += [in_precision("fp32", base), in_precision("bf16", base)]

# Saved under one strategy, and gone on with under another.
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
):
    ROWS.append(replace(BASES[after], name=f"{before} to {after}", continues=f"{before}, fp32"))


def variant(strategy: str, name: str, **fields: Any) -> Row:
    """Return the row of a strategy with another name and other fields."""
    return replace(BASES[strategy], name=f"{strategy}, {name}", **fields)


def work(name: str, precision: str, numbers: Sections, *strategies: str, **fields: Any) -> None:
    """Add rows of strategies that do other work."""
    for strategy in strategies:
        row = variant(strategy, name, numbers=numbers, **fields)
        ROWS.append(in_precision(precision, row))


def memory(strategy: str, name: str, options: Sections, layers: int = 2) -> None:
    """Add a row with a memory option; in fp32, where its numbers are those without it."""
    sections = {**BASES[strategy].sections, **options}
    ROWS.append(variant(strategy, name, sections=sections, layers=layers))


def optimizer(
    strategy: str, options: Sections, tolerance: float = FP32, name: str = "", **more: Any
) -> None:
    """Add a row of an optimizer, whose kind is its name."""
    numbers = {"optimizer": options, **more}
    name = name or options["kind"]
    ROWS.append(variant(strategy, name, numbers=numbers, tolerance=tolerance))


# Packs go through attention by variable lengths, which is of 16 bits.
USUAL = ("one device", "ddp 2", "fsdp2 2", "tp 2", "pp 2")
work("packed", "bf16", PACKED, "one device", "ddp 2", "fsdp2 2", "zero2 2")
work("packed", "bf16", PACKED, "tp 2", "pp 2", "fsdp2 2 x tp 2")
work("lora", "bf16", {**PACKED, **LORA}, *USUAL, "zero3 2")
PACKED_IN_BITS = (
    ("one device", "4bit"),
    ("one device", "8bit"),
    ("fsdp2 2", "4bit"),
    ("tp 2", "4bit"),
    ("tp 2", "8bit"),
)
for strategy, bits in PACKED_IN_BITS:
    quantized = {"adapter": {**LORA["adapter"], "quantize": bits}}
    work(f"qlora {bits}", "bf16", quantized, strategy, tolerance=3e-2)
work("fp16", "fp16", {}, *USUAL, "zero2 2")

FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
CHUNKS = {**FULL, "checkpointed_blocks": 1, "mlp_chunk": 96}
OFFLOADED = {"memory": {"activation_offload": True}}
OPTIMIZER_OFFLOADED = {"optimizer": {"offload": True}}
ZERO_OFFLOADED = {"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}}
memory("one device", "full checkpointing", {"memory": FULL})
memory("fsdp2 2", "full checkpointing", {"memory": FULL})
memory("fsdp2 2", "selective checkpointing", {"memory": SELECTIVE})
memory("ddp 2", "one block checkpointed, in chunks", {"memory": CHUNKS})
memory("one device", "activations offloaded", OFFLOADED, layers=4)
memory("fsdp2 2", "activations offloaded", OFFLOADED, layers=4)
memory("fsdp2 2", "everything offloaded", {"strategy": {"kind": "fsdp2", "offload": "cpu"}})
memory("one device", "optimizer offloaded", OPTIMIZER_OFFLOADED)
memory("fsdp2 2", "optimizer offloaded", OPTIMIZER_OFFLOADED)
memory("zero2 2", "optimizer offloaded", ZERO_OFFLOADED)

# The tolerances are those of tests/distributed/test_optimizers.py. Not adamw_8bit and adamw_4bit:
# torchao compiles their steps, and compiled code does not run over the stand-in.
IN_BACKWARD: Sections = {"in_backward": True, "max_grad_norm": None}
MUON = {"kind": "muon", "momentum": 0.95}
optimizer("one device", {"kind": "sgd", "lr": 0.1})
optimizer("fsdp2 2", {"kind": "lion", "lr": 3e-4, "betas": [0.9, 0.99]})
optimizer("fsdp2 2", {"kind": "adafactor", "lr": 1e-2})
optimizer("one device", MUON, 2e-3)
optimizer("fsdp2 2", MUON, 2e-3)
optimizer("ddp 2", {"kind": "schedule_free"}, schedule="constant")
WHOLE_BATCH: Sections = {"accumulation": 1, "micro_batch": None}
optimizer("fsdp2 2", IN_BACKWARD, name="in backward", batch=WHOLE_BATCH)
PURE = {"kind": "bf16", "master": "bf16"}
KAHAN = {"strategy": "fsdp2", "precision": {**PURE, "rounding": "kahan"}}
ROWS += [
    Row("one device, pure bf16, stochastic", 1, {"precision": PURE}, tolerance=2e-2),
    Row("fsdp2 2, pure bf16, kahan", 2, KAHAN, tolerance=2e-2),
    Row(
        "ep 2, pure bf16, stochastic",
        2,
        {"strategy": {"kind": "ddp", "ep": 2}, "precision": PURE},
        tolerance=2e-2,
        architecture="qwen3_moe",
    ),
]

ALGORITHMS: dict[str, Sections] = {
    "dpo": {"kind": "dpo", "loss_chunk": 32},
    "reward model": {"kind": "reward", "center": 0.01},
    "kto": {"kind": "kto", "loss_chunk": 32},
    "grpo": {"kind": "grpo", "group_size": 4, **ROLLOUT},
    "ppo": {"kind": "ppo", "epochs": 2, **ROLLOUT},
    "online dpo": {"kind": "online_dpo", "group_size": 4, **ROLLOUT},
    "distill": {"kind": "distill", "loss_chunk": 32, "top_k": 8},
    "distill, live": {"kind": "distill", "loss_chunk": 32, "top_k": 0, "log_probs": "live"},
    "gkd": {"kind": "gkd", **ROLLOUT},
    "embed": {"kind": "embed", "negatives": 1, "matryoshka": [16]},
    "rerank": {"kind": "rerank", "negatives": 2},
}
for name, algorithm in ALGORITHMS.items():
    architecture = SCORED if name in ("reward model", "rerank") else "llama"
    # Gradients of pairs and of advantages all but cancel: as in tests/distributed/rows.py.
    numbers = {"algorithm": algorithm, "optimizer": {"eps": 1e-4}, "rows": 48}
    fields: dict[str, Any] = {"tolerance": 1e-4, "architecture": architecture}
    if name == "ppo":
        fields["counted_step"] = STEP_WITH_ROLLOUT
    fields["has_teacher"] = algorithm["kind"] in ("distill", "gkd")
    work(name, "fp32", numbers, "one device", "fsdp2 2", **fields)

# The convolution that makes features of patches is a loop over patches, as torch has it without
# cuDNN: most of the copies are its.
IMAGES: Sections = {"data": {"packing": False, "max_length": 256}, "rows": 48}
work("images", "fp32", IMAGES, "one device", "fsdp2 2", architecture=VISION)
work("images", "bf16", IMAGES, "one device", "fsdp2 2", architecture=VISION)
PAIRS_WITH_IMAGES: Sections = {
    **IMAGES,
    "algorithm": ALGORITHMS["dpo"],
    "optimizer": {"eps": 1e-4},
}
work("dpo, images", "fp32", PAIRS_WITH_IMAGES, "one device", tolerance=1e-4, architecture=VISION)
SCORES_OF_IMAGES = {**PAIRS_WITH_IMAGES, "algorithm": ALGORITHMS["reward model"]}
JUDGED_IMAGES = {**PAIRS_WITH_IMAGES, "algorithm": ALGORITHMS["kto"]}
PROMPTS_WITH_IMAGES: Sections = {
    **PAIRS_WITH_IMAGES,
    "algorithm": {
        **ALGORITHMS["grpo"],
        "rewards": [{"kind": "regex", "pattern": "[aeiou]", "full": False}],
        # Without it the loss of a rollout's first step is zero: completions are of one length.
        "kl": {"coefficient": 0.1},
    },
}
OTHER_WORK_ON_IMAGES: dict[str, Any] = {"tolerance": 1e-4, "architecture": VISION}
work("kto, images", "fp32", JUDGED_IMAGES, "one device", "fsdp2 2", **OTHER_WORK_ON_IMAGES)
work("grpo, images", "fp32", PROMPTS_WITH_IMAGES, "fsdp2 2", **OTHER_WORK_ON_IMAGES)
work(
    "reward model, images",
    "fp32",
    SCORES_OF_IMAGES,
    "one device",
    tolerance=1e-4,
    architecture=VISION_SCORED,
)
LORA_OF_ALL = {**IMAGES, "adapter": {**LORA["adapter"], "targets": ["vision", "language"]}}
work("images, lora", "fp32", LORA_OF_ALL, "one device", architecture=VISION)
for family in ("gemma3", "internvl"):
    work(f"{family}, images", "fp32", IMAGES, "one device", architecture=family)

DEEPSEEK: dict[str, Any] = {"architecture": "deepseek_v3"}
work("lora on experts", "bf16", LORA, "one device", "fsdp2 2", "ep 2", **DEEPSEEK)
# Recurrent layers run document by document.
HYBRID: dict[str, Any] = {"architecture": "granitemoehybrid", "layers": 4}
work("hybrid, packed", "bf16", PACKED, "one device", "fsdp2 2", **HYBRID)
for kind in ("lfm2", "falcon_h1", "nemotron_h"):
    work(f"{kind}, packed", "bf16", PACKED, "one device", architecture=kind)
# Gated DeltaNet. Where rows are cut over ranks, its layers run on whole rows.
DELTA: dict[str, Any] = {"architecture": "qwen3_5_text", "layers": 4}
work("gated deltanet, packed", "bf16", PACKED, "one device", "fsdp2 2", "cp 2", **DELTA)
work("gated deltanet", "fp32", {"data": {"packing": False}}, "cp 2", **DELTA)
# Experts with packed weights, without weights in fp32, and with routers whose biases follow the load.
QWEN3_MOE: dict[str, Any] = {"architecture": "qwen3_moe"}
QLORA = {"adapter": {**LORA["adapter"], "quantize": "4bit"}}
EXPERTS_IN_BITS: dict[str, Any] = {"tolerance": 3e-2, **QWEN3_MOE}
work("experts, qlora 4bit", "bf16", QLORA, "ep 2", "fsdp2 2", "zero3 2", **EXPERTS_IN_BITS)
work("router bias", "fp32", {"model": {"router_bias_rate": 0.02}}, "one device", "ep 2", **DEEPSEEK)
work("encoder-decoder", "fp32", {}, "one device", "fsdp2 2", architecture="t5")
BY_NAME = {row.name: row for row in ROWS}
assert len(BY_NAME) == len(ROWS), "two rows have one name"
# A row that goes on from a checkpoint has the steps of the row without a stop.
COUNTED = [row for row in ROWS if not row.continues]
# Rows whose steps copy from pageable memory, and why. Strict, so that a line goes out with its defect.
NORM = "DeepSpeed makes a tensor of the gradients' norm on the host"
PAGEABLE: dict[str, str] = {}
for name in BY_NAME:
    if name == "zero2 2, optimizer offloaded":
        PAGEABLE[name] = (
            f"{NORM}; what it keeps there is pageable without `offload_optimizer.pin_memory`"
        )
    elif name.startswith("zero3"):
        PAGEABLE[name] = f"{NORM}, and leaves the rotary embedding's frequencies in host memory"
    elif name.startswith("zero"):
        PAGEABLE[name] = NORM
    elif name.endswith(("grpo, fp32", "ppo, fp32", "online dpo, fp32", "gkd, fp32")):
        PAGEABLE[name] = "transformers' generate copies the id of padding, once a batch of prompts"
    elif BY_NAME[name].architecture in (VISION, VISION_SCORED):
        PAGEABLE[name] = (
            "transformers copies how many patches are merged, once a micro-batch with images"
        )
