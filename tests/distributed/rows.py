"""What parity is asked of: one row a strategy, one case a kind of work. A new strategy is a new row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.harness import LETTERS

TOLERANCE = 1e-5
STEPS = 3  # the last of them is counted


@dataclass(frozen=True, eq=False)
class Row:
    """One way to spread the work."""

    name: str
    world_size: int
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Of the model: as few as the strategy can be seen at."""
        moves = self.sections.get("memory", {}).get("activation_offload")  # of all blocks but two
        return 4 if engine_of(self) == "pp" or moves or self is REFERENCES[4] else 2


@dataclass(frozen=True, eq=False)
class Case:
    """One kind of work; `sections` hold for every row. `rows`: the names of those that it is asked of; empty: all."""

    name: str
    sections: dict[str, Any]
    rows: tuple[str, ...] = ()
    architecture: str = "llama"  # or one of tests.tiny.ARCHITECTURES
    kin: str = ""  # the case whose work this does with another loss, whose formula has unit tests


def engine_of(row: Row) -> str:
    """What spreads the model: the first that applies of a pipeline, parts of a sequence, parts of a tensor, then the kind."""
    strategy = row.sections.get("strategy", "single")
    options = strategy if isinstance(strategy, dict) else {"kind": strategy}
    kind = "pp" if options["kind"] == "model_parallel" else options["kind"]
    cut = next((key for key in ("pp", "cp", "tp") if key == kind or options.get(key, 1) > 1), kind)
    return "zero" if cut.startswith("zero") else "one" if cut in ("single", "dp") else cut


def group_of(row: Row) -> str:
    """Rows that one worker trains, in one process group: those of a world size whose ranks may have one engine after the other."""
    kinds = {"zero": "zero", "pp": "stages", "cp": "model", "tp": "model"}
    return f"{row.world_size} {kinds.get(engine_of(row), 'data')}"


def covering(pairs: list[tuple[Row, Case]]) -> set[tuple[str, str]]:
    """Names of pairs in which each algorithm meets every engine that it is asked of (one, where its cases have a `kin`), and each row but
    AGAIN and each case without a `kin` stands once: greedily, the pair that gives most first. `pytest --full` runs the rest."""
    gives = {(row.name, case.name): needs(row, case) for row, case in pairs}
    chosen = set(NAMED)
    lacking = set().union(*gives.values()).difference(*map(gives.get, chosen))
    while lacking:
        chosen.add(best := max(gives, key=lambda pair: len(gives[pair] & lacking)))
        lacking -= gives[best]
    return chosen


def needs(row: Row, case: Case) -> set[Any]:
    """What a pair gives to the array."""
    kind, engine = str(case.sections.get("algorithm", {}).get("kind")), engine_of(row)
    stands = set() if row.name in AGAIN else {row.name}
    if case.kin:
        return stands | ({(kind, engine)} if engine == ENGINE_OF_KIN else set())
    return stands | {(kind, engine), case.name}


# Each part of these stands in another row.
AGAIN = ("ddp 4", "ddp 2, static graph", "ddp 2, finds unused", "fsdp2 2, grad-op", "fsdp2 2, activation checkpointing",
         "fsdp2 2, wraps blocks and their halves", "tp 2, activation checkpointing", "ddp 2 x tp 2", "fsdp2 2 x tp 2",
         "ddp 2 x tp 2, sharded optimizer", "cp 2, activation checkpointing", "ddp 2 x cp 2",
         "pp 2, zero bubble, activation checkpointing", "pp 4", "ddp 2 x pp 2", "fsdp2 2 x pp 2, activation checkpointing",
         "tp 2 x pp 2", "zero2 1", "zero3 2, activation checkpointing", "zero3 4")  # fmt: skip
ENGINE_OF_KIN = "ddp"
# By tests/mutations.py.
NAMED = {
    ("ddp 2, accumulation 4", "clipped hard"),
    ("fsdp2 2, accumulation 4", "lora"),
}
# ZeRO 3 that keeps no small parameter whole: by default all of a tiny model are small.
CUT = {"kind": "zero3", "options": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
# What rows are held against, by the layers of the model.
REFERENCES = {
    layers: Row(
        f"one process, {layers} layers", 1, {"batch": {"global_samples": 8, "micro_batch": 8}}
    )
    for layers in (2, 4)
}
# Four micro-batches on one data rank.
FOURS: dict[str, Any] = {"batch": {"global_samples": 8, "micro_batch": 2}}
ROWS = [
    Row("one process, accumulation 4", 1, {"batch": {"global_samples": 8, "micro_batch": 2}}),
    Row("ddp 2", 2, {"strategy": "ddp", "batch": {"global_samples": 8, "micro_batch": 4}}),
    Row(
        "ddp 2, accumulation 4",
        2,
        {"strategy": "ddp", "batch": {"global_samples": 8, "micro_batch": 1}},
    ),
    Row(
        "ddp 2, buckets of 10 KiB",
        2,
        {"strategy": {"kind": "ddp", "bucket_cap_mb": 0.01, "gradient_as_bucket_view": False}},
    ),
    Row(
        "ddp 2, static graph",
        2,
        {"strategy": {"kind": "ddp", "static_graph": True, "find_unused_parameters": False}},
    ),
    Row(
        "ddp 2, finds unused",
        2,
        {"strategy": {"kind": "ddp", "find_unused_parameters": True, "broadcast_buffers": False}},
    ),
    Row(
        "ddp 2, activation checkpointing",
        2,
        {"strategy": "ddp", "memory": {"activation_checkpointing": "full"}},
    ),
    Row("fsdp2 1", 1, {"strategy": "fsdp2", "batch": {"global_samples": 8, "micro_batch": 8}}),
    Row("fsdp2 2", 2, {"strategy": "fsdp2"}),
    Row(
        "fsdp2 2, accumulation 4",
        2,
        {"strategy": "fsdp2", "batch": {"global_samples": 8, "micro_batch": 1}},
    ),
    Row(
        "fsdp2 2, reduced once a step",
        2,
        {
            "strategy": {"kind": "fsdp2", "sync_each_micro_batch": False},
            "batch": {"micro_batch": 1},
        },
    ),
    Row(
        "fsdp2 2, grad-op",
        2,
        {"strategy": {"kind": "fsdp2", "reshard_after_forward": False, "prefetch": 0}},
    ),
    Row(
        "fsdp2 2, activation checkpointing",
        2,
        {"strategy": "fsdp2", "memory": {"activation_checkpointing": "full"}},
    ),
    Row(
        "fsdp2 2, activations offloaded",
        2,
        {"strategy": "fsdp2", "memory": {"activation_offload": True}},
    ),
    Row(
        "ddp 2, one block checkpointed, in chunks",
        2,
        {
            "strategy": "ddp",
            "memory": {
                "activation_checkpointing": "full",
                "checkpointed_blocks": 1,
                "mlp_chunk": 96,
            },
        },
    ),
    Row(
        "fsdp2 2, offload",
        2,
        {"strategy": {"kind": "fsdp2", "offload": "cpu"}, "batch": {"micro_batch": 2}},
    ),
    Row(
        "fsdp2 2, wraps blocks and their halves",
        2,
        {
            "strategy": {
                "kind": "fsdp2",
                "wrap": ["LlamaDecoderLayer", "LlamaMLP"],
                "prefetch": 3,
                "backward_prefetch": 2,
            }
        },
    ),
    Row("fsdp2 4", 4, {"strategy": "fsdp2", "batch": {"global_samples": 8, "micro_batch": 2}}),
    Row(
        "fsdp2 hybrid 2 x 2",
        4,
        {
            "strategy": {"kind": "fsdp2", "replicate": 2},
            "batch": {"global_samples": 8, "micro_batch": 2},
        },
    ),
    Row("tp 2", 2, {"strategy": "tp"}),
    Row(
        "tp 2, accumulation 4",
        2,
        {"strategy": "tp", "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row(
        "tp 2, activation checkpointing",
        2,
        {"strategy": "tp", "memory": {"activation_checkpointing": "full"}},
    ),
    Row("tp 2, whole stream", 2, {"strategy": {"kind": "tp", "sequence_parallel": False}}),
    Row(
        "fsdp2 2 x tp 2, activation checkpointing",
        4,
        {
            "strategy": {"kind": "fsdp2", "tp": 2},
            "batch": {"micro_batch": 2},
            "memory": {"activation_checkpointing": "full"},
        },
    ),
    Row(
        "tp 2 x pp 2, interleaved",
        4,
        {
            "strategy": {"kind": "ddp", "tp": 2, "pp": 2, "pipeline": {"schedule": "interleaved"}},
            **FOURS,
        },
    ),
    Row(
        "ddp 2 x tp 2",
        4,
        {"strategy": {"kind": "ddp", "tp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row(
        "fsdp2 2 x tp 2",
        4,
        {"strategy": {"kind": "fsdp2", "tp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row("dp", 1, {"strategy": "dp"}),
    Row("cp 2", 2, {"strategy": "cp"}),
    Row(
        "cp 2, accumulation 4",
        2,
        {"strategy": "cp", "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row(
        "cp 2, activation checkpointing",
        2,
        {"strategy": "cp", "memory": {"activation_checkpointing": "full"}},
    ),
    Row("fsdp2 x cp 2", 2, {"strategy": {"kind": "fsdp2", "cp": 2}}),
    Row(
        "ddp 2 x cp 2",
        4,
        {"strategy": {"kind": "ddp", "cp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row("cp 2 x tp 2", 4, {"strategy": {"kind": "ddp", "cp": 2, "tp": 2}}),
    Row(
        "fsdp2 2 x cp 2",
        4,
        {"strategy": {"kind": "fsdp2", "cp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row("pp 2, gpipe", 2, {"strategy": {"kind": "pp", "schedule": "gpipe"}, **FOURS}),
    Row(
        "pp 2, 1f1b, accumulation 8",
        2,
        {"strategy": "pp", "batch": {"global_samples": 8, "micro_batch": 1}},
    ),
    Row("pp 2, interleaved", 2, {"strategy": {"kind": "pp", "schedule": "interleaved"}, **FOURS}),
    Row("pp 2, zero bubble", 2, {"strategy": {"kind": "pp", "schedule": "zero_bubble"}, **FOURS}),
    Row(
        "pp 2, zero bubble, activation checkpointing",
        2,
        {
            "strategy": {"kind": "pp", "schedule": "zero_bubble"},
            "memory": {"activation_checkpointing": "full"},
            **FOURS,
        },
    ),
    Row(
        "pp 2, activation checkpointing",
        2,
        {"strategy": "pp", "memory": {"activation_checkpointing": "full"}, **FOURS},
    ),
    Row("model_parallel 2", 2, {"strategy": "model_parallel", **FOURS}),
    Row("pp 4", 4, {"strategy": "pp", **FOURS}),
    Row(
        "ddp 2 x pp 2",
        4,
        {"strategy": {"kind": "ddp", "pp": 2}, "batch": {"global_samples": 8, "micro_batch": 2}},
    ),
    Row(
        "fsdp2 2 x pp 2, interleaved",
        4,
        {
            "strategy": {"kind": "fsdp2", "pp": 2, "pipeline": {"schedule": "interleaved"}},
            "batch": {"micro_batch": 2},
        },
    ),
    Row(
        "fsdp2 2 x pp 2, activation checkpointing",
        4,
        {
            "strategy": {"kind": "fsdp2", "pp": 2},
            "batch": {"micro_batch": 1},
            "memory": {"activation_checkpointing": "full"},
        },
    ),
    Row("tp 2 x pp 2", 4, {"strategy": {"kind": "ddp", "tp": 2, "pp": 2}, **FOURS}),
    Row(
        "ddp 2, sharded optimizer",
        2,
        {"strategy": {"kind": "ddp", "shard_optimizer": True}, "batch": {"micro_batch": 2}},
    ),
    Row(
        "ddp 2 x tp 2, sharded optimizer",
        4,
        {"strategy": {"kind": "ddp", "tp": 2, "shard_optimizer": True}},
    ),
    Row(
        "ddp 2 x pp 2, sharded optimizer",
        4,
        {
            "strategy": {"kind": "ddp", "pp": 2, "shard_optimizer": True},
            "batch": {"micro_batch": 2},
        },
    ),
    Row("ep 2", 2, {"strategy": {"kind": "ddp", "ep": 2}, "batch": {"micro_batch": 2}}),
    Row("ddp 2 x ep 2", 4, {"strategy": {"kind": "ddp", "ep": 2}, "batch": {"micro_batch": 2}}),
    Row("fsdp2 2 x ep 2", 4, {"strategy": {"kind": "fsdp2", "ep": 2}, "batch": {"micro_batch": 2}}),
    Row(
        "fsdp2, ep 2 x pp 2",
        4,
        {"strategy": {"kind": "fsdp2", "ep": 2, "pp": 2}, "batch": {"micro_batch": 2}},
    ),
    Row("ddp 4", 4, {"strategy": "ddp", "batch": {"global_samples": 8, "micro_batch": 2}}),
    Row("zero1 2", 2, {"strategy": "zero1"}),
    Row("zero2 2", 2, {"strategy": "zero2"}),
    Row(
        "zero2 2, accumulation 4",
        2,
        {"strategy": "zero2", "batch": {"global_samples": 8, "micro_batch": 1}},
    ),
    Row("zero3 2", 2, {"strategy": "zero3"}),
    Row(
        "zero3 2, nothing kept whole, accumulation 4",
        2,
        {"strategy": CUT, "batch": {"global_samples": 8, "micro_batch": 1}},
    ),
    Row(
        "zero3 2, activation checkpointing",
        2,
        {"strategy": CUT, "memory": {"activation_checkpointing": "full"}},
    ),
    Row(
        "zero2 2, offloaded",
        2,
        {"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}, "batch": {"micro_batch": 2}},
    ),
    Row(
        "zero3 2, offloaded",
        2,
        {"strategy": {**CUT, "offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    ),
    Row("zero2 1", 1, {"strategy": "zero2", "batch": {"global_samples": 8, "micro_batch": 4}}),
    Row("zero3 4", 4, {"strategy": CUT, "batch": {"global_samples": 8, "micro_batch": 2}}),
]
# In low precision the numbers are near, not equal: held against the reference in fp32, with accumulation and clipping, losses and norms.
LOW = [
    Row(
        f"{strategy} 2, {precision}",
        2,
        {
            "strategy": strategy,
            "precision": precision,
            "batch": {"global_samples": 8, "micro_batch": 2},
        },
    )
    for strategy in ("ddp", "fsdp2", "tp", "pp")
    for precision in ("bf16", "fp16")
]
LOW.append(
    Row(
        "tp 2, whole stream, bf16",
        2,
        {"strategy": {"kind": "tp", "sequence_parallel": False}, "precision": "bf16"},
    )
)
LOW.append(
    Row(
        "fsdp2 2 x pp 2, bf16",
        4,
        {"strategy": {"kind": "fsdp2", "pp": 2}, "precision": "bf16", "batch": {"micro_batch": 2}},
    )
)
LOW += [
    Row("fsdp2 2, gathered in bf16", 2, {"strategy": {"kind": "fsdp2", "param_dtype": "bf16"}}),
    Row("fsdp2 2, reduced in bf16", 2, {"strategy": {"kind": "fsdp2", "reduce_dtype": "bf16"}}),
    Row(
        "fsdp2 2, gathered in fp32, bf16",
        2,
        {"strategy": {"kind": "fsdp2", "param_dtype": "fp32"}, "precision": "bf16"},
    ),
]
LOW += [
    Row(
        f"{strategy['kind']} 2, bf16",
        2,
        {"strategy": strategy, "precision": "bf16", "batch": {"micro_batch": 2}},
    )
    for strategy in ({"kind": "zero1"}, {"kind": "zero2"}, CUT)
]
# With --full.
LOW_AGAIN = (
    *(f"{strategy} 2, fp16" for strategy in ("fsdp2", "tp", "pp")),
    "fsdp2 2 x pp 2, bf16",
    "zero1 2, bf16",
)
LOW_TOLERANCE = {"loss": 2e-3, "grad_norm": 2e-2}
# One row of each kind of engine and mesh: what is not asked of all rows.
SPREADS = (
    "one process, accumulation 4",
    "dp",
    "ddp 2, accumulation 4",
    "fsdp2 2",
    "fsdp2 hybrid 2 x 2",
    "tp 2",
    "fsdp2 2 x tp 2",
    "cp 2",
    "fsdp2 x cp 2",
    "pp 2, gpipe",
    "pp 2, interleaved",
    "pp 2, zero bubble",
    "model_parallel 2",
    "tp 2 x pp 2",
    "zero1 2",
    "zero2 2",
    "zero3 2, nothing kept whole, accumulation 4",
)
CASES = [
    Case("packed", {"data": {"packing": True, "max_length": 96}, "rows": 120}),
    # Rows of uneven lengths. A larger epsilon: entries whose gradient is nothing but rounding would get a step of full length, another on
    # each strategy and each CPU (tensor parallelism: weights 1.2e-5 apart with 1e-8, 2.5e-7 with 1e-6).
    Case(
        "clipped hard",
        {
            "data": {"packing": False},
            "rows": 48,
            "optimizer": {"max_grad_norm": 0.05, "weight_decay": 0.1, "eps": 1e-6},
        },
    ),
    Case(
        "uneven lengths",
        {"data": {"packing": False}, "rows": 48, "optimizer": {"eps": 1e-6}},
        rows=(*SPREADS, "tp 2, whole stream"),
    ),
    Case(
        "plain cross-entropy",
        {
            "data": {"packing": True},
            "rows": 120,
            "algorithm": {"kind": "pretrain", "loss_chunk": 0},
        },
        rows=SPREADS,
    ),
    Case(
        "compiled",
        {"data": {"packing": True}, "rows": 120, "compile": {"enabled": True}},
        rows=("fsdp2 2",),
    ),
    Case(
        "selective checkpointing",
        {
            "data": {"packing": True},
            "rows": 120,
            "memory": {"activation_checkpointing": "selective"},
        },
        rows=(
            "ddp 2",
            "fsdp2 2",
            "tp 2",
            "cp 2",
            "zero2 2",
            "pp 2, gpipe",
            "fsdp2 2 x pp 2, interleaved",
        ),
    ),
    Case(
        "lora",
        {"data": {"packing": True}, "rows": 120, "adapter": {"kind": "lora", "r": 4}},
        rows=(
            "one process, accumulation 4",
            "ddp 2",
            "ddp 2, activation checkpointing",
            "fsdp2 2, accumulation 4",
            "fsdp2 2, activation checkpointing",
            "tp 2",
            "tp 2, whole stream",
            "ddp 2 x tp 2, sharded optimizer",
            "fsdp2 2 x tp 2",
            "pp 2, zero bubble, activation checkpointing",
            "fsdp2 2 x pp 2, interleaved",
            "tp 2 x pp 2",
            "cp 2",
            "zero2 2, accumulation 4",
            "zero3 2, nothing kept whole, accumulation 4",
            "zero3 2, activation checkpointing",
        ),
    ),
    Case(
        "head of its own",
        {
            "data": {"packing": True},
            "rows": 120,
            "model": {"init": "random", "config": {"tie_word_embeddings": False}},
        },
        rows=(
            "pp 2, interleaved",
            "pp 2, zero bubble",
            "pp 4",
            "fsdp2 2 x pp 2, interleaved",
            "tp 2 x pp 2",
        ),
    ),
]
LOWER = ["model.embed_tokens", "model.layers.0", "model.layers.1"]
CASES += [
    Case(
        f"nothing to learn in the {half} half",
        {
            "data": {"packing": True},
            "rows": 120,
            "model": {"freeze": frozen, "init": "random", "config": {"tie_word_embeddings": False}},
        },
        rows=rows,
    )
    for half, frozen, rows in (
        ("lower", LOWER, ("pp 2, gpipe", "pp 2, zero bubble", "fsdp2 2 x pp 2, interleaved")),
        (
            "upper",
            ["model.layers.2", "model.layers.3", "model.norm", "lm_head"],
            ("pp 2, interleaved",),
        ),
    )
]
TWO_STEPS: dict[str, Any] = {"run": {"steps": 2}, "rows": 24, "optimizer": {"eps": 1e-6}}
# Both sides of a pair share a prompt and an end, and advantages add up to nothing, so gradients all but cancel: fp32 keeps five digits
# of what is left (in fp64 all cuts agree to 1e-14), and steps must not be made of the entries that are rounding alone.
NO_SIGNS: dict[str, Any] = {**TWO_STEPS, "optimizer": {"eps": 1e-4}}
# Sampling is in the loop: what is sampled hangs on seed, step, prompt and index alone, so all rows learn from the same episodes.
ROLLOUT: dict[str, Any] = {
    "rewards": [LETTERS],
    "generator": {"kind": "hf", "max_new_tokens": 6, "batch": 16},
    "loss_chunk": 32,
}
CASES += [
    Case(
        "reward model", {"algorithm": {"kind": "reward", "center": 0.01}, **NO_SIGNS}, rows=SPREADS
    ),
    Case(
        "dpo",
        {"algorithm": {"kind": "dpo", "loss_chunk": 32, "sft_weight": 0.1}, **TWO_STEPS},
        rows=SPREADS,
    ),
    Case(
        "dpo, live reference",
        {
            "algorithm": {"kind": "dpo", "loss_chunk": 32, "reference": "live", "loss": "ipo"},
            **TWO_STEPS,
        },
        rows=SPREADS,
    ),
    Case(
        "dpo, lora",
        {
            "algorithm": {"kind": "dpo", "loss_chunk": 32, "reference": "adapter"},
            "adapter": {"kind": "lora", "r": 4},
            **NO_SIGNS,
        },
        rows=(
            "ddp 2, accumulation 4",
            "fsdp2 2",
            "tp 2",
            "pp 2, interleaved",
            "zero3 2, nothing kept whole, accumulation 4",
        ),
    ),
    Case(
        "grpo",
        {
            "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coefficient": 0.05}, **ROLLOUT},
            **NO_SIGNS,
            "run": {"steps": 2, "seed": 2},
        },
        rows=SPREADS,
    ),
    Case("ppo", {"algorithm": {"kind": "ppo", "epochs": 2, **ROLLOUT}, **NO_SIGNS}, rows=SPREADS),
    Case(
        "ppo, value apart",
        {
            "algorithm": {
                "kind": "ppo",
                "epochs": 2,
                "value": "separate",
                "value_lr": 1e-3,
                **ROLLOUT,
            },
            **NO_SIGNS,
        },
        rows=(
            "one process, accumulation 4",
            "ddp 2, accumulation 4",
            "fsdp2 2",
            "tp 2",
            "cp 2",
            "pp 2, gpipe",
            "zero2 2",
            "zero3 2",
        ),
    ),
]
# A loss that is summed pair by pair spreads as DPO's does; those that sort the global batch take a pass over it first.
KINDS = ("ddp 2, accumulation 4",)
SORTS = (
    "one process, accumulation 4",
    "ddp 2, accumulation 4",
    "fsdp2 2",
    "tp 2",
    "cp 2",
    "pp 2, gpipe",
    "zero2 2, accumulation 4",
)
OF_PAIRS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "sigmoid_norm")
CASES += [
    Case(
        "orpo",
        {"algorithm": {"kind": "orpo", "loss_chunk": 32}, **TWO_STEPS},
        rows=(*SORTS, "zero3 2, nothing kept whole, accumulation 4"),
        kin="dpo",
    ),
    Case("kto", {"algorithm": {"kind": "kto", "loss_chunk": 32}, **TWO_STEPS}, rows=SPREADS),
    Case(
        "kto, apo",
        {"algorithm": {"kind": "kto", "loss_chunk": 32, "loss": "apo_zero_unpaired"}, **TWO_STEPS},
        rows=KINDS,
        kin="kto",
    ),
    Case(
        "kto, lora",
        {
            "algorithm": {"kind": "kto", "loss_chunk": 32},
            "adapter": {"kind": "lora", "r": 4},
            **NO_SIGNS,
        },
        rows=("ddp 2, accumulation 4", "pp 2, interleaved"),
    ),
    Case(
        "simpo",
        {"algorithm": {"kind": "simpo", "loss_chunk": 32, "label_smoothing": 0.1}, **TWO_STEPS},
        rows=SORTS,
        kin="dpo",
    ),
    Case(
        "dpo, aot",
        {
            "algorithm": {
                "kind": "dpo",
                "loss_chunk": 32,
                "loss_weights": {"aot": 1.0, "aot_unpaired": 0.5},
            },
            **TWO_STEPS,
        },
        rows=SORTS,
    ),
    *(
        Case(
            f"dpo, {loss}",
            {"algorithm": {"kind": "dpo", "loss_chunk": 32, "loss": loss}, **TWO_STEPS},
            rows=KINDS,
            kin="dpo",
        )
        for loss in OF_PAIRS
    ),
    *(
        Case(
            f"dpo, {loss}",
            {"algorithm": {"kind": "dpo", "loss": loss, "label_smoothing": 0.1}, **TWO_STEPS},
            rows=KINDS,
            kin="dpo",
        )
        for loss in ("robust", "exo_pair")
    ),
    *(
        Case(
            f"dpo, {divergence}",
            {"algorithm": {"kind": "dpo", "f_divergence": divergence}, **TWO_STEPS},
            rows=KINDS,
            kin="dpo",
        )
        for divergence in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    *(
        Case(
            f"grpo, {name}",
            {
                "algorithm": {
                    "kind": "grpo",
                    "group_size": 4,
                    "minibatches": 2,
                    **ROLLOUT,
                    **options,
                },
                **NO_SIGNS,
                "run": {"steps": 2, "seed": 2},
            },
            rows=KINDS,
            kin="grpo",
        )
        for name, options in {
            "gspo": {"ratio": "sequence", "normalize": "sequence"},
            "cispo": {"surrogate": "cispo", "clip_high": 1.0},
            "two-sided clip and entropy": {"delta": 1.5, "entropy_weight": 0.01},
            # Some completions end, at a vowel, and the others are cut.
            "truncated completions masked": {
                "mask_truncated": True,
                "generator": {**ROLLOUT["generator"], "stop": list("aeiou")},
            },
            "rloo": {"estimator": "rloo"},
        }.items()
    ),
    Case(
        "grpo, ahead",
        {
            "algorithm": {"kind": "grpo", "group_size": 4, "ahead": 1, **ROLLOUT},
            **NO_SIGNS,
            "run": {"steps": 2, "seed": 2},  # a step a rollout
        },
        rows=KINDS,
    ),
]
ENGINES = (
    "ddp 2, accumulation 4",
    "fsdp2 2, accumulation 4",
    "zero2 2, accumulation 4",
    "zero3 2, nothing kept whole, accumulation 4",
)
PACKED: dict[str, Any] = {
    "data": {"packing": True, "max_length": 96},
    "rows": 120,
    "optimizer": {"eps": 1e-6},
}
CASES += [
    Case(
        "mixtral, router loss",
        PACKED,
        (*ENGINES, "cp 2", "ddp 2, activation checkpointing", "tp 2", "ep 2", "ddp 2 x ep 2"),
        "mixtral",
    ),
    Case(
        "qwen3_moe, router loss",
        {**PACKED, "data": {"packing": False}, "rows": 48},
        ("ddp 2", *ENGINES, "fsdp2 2 x ep 2"),
        "qwen3_moe",
    ),
    Case("deepseek_v3", PACKED, ("ep 2", "fsdp2, ep 2 x pp 2", "tp 2"), "deepseek_v3"),
    Case(
        "gpt_oss",
        {**PACKED, "data": {"packing": False}, "rows": 48},
        ("ep 2", "fsdp2 2 x ep 2"),
        "gpt_oss",
    ),
    # Biases of keys: their true gradient is 0, but small where positions are rotary, so Adam would enlarge its rounding there.
    Case("gpt2", {**PACKED, "optimizer": {}}, ("ddp 2", "fsdp2 2", "zero2 2"), "gpt2"),
    Case("qwen2", PACKED, ("ddp 2", "fsdp2 2", "zero2 2"), "qwen2"),
]
LOW_CASE = next(case for case in CASES if case.name == "clipped hard")
PAIRS = [
    (row, case)
    for case in CASES
    for row in ROWS
    if (row.name in case.rows if case.rows else "ep 2" not in row.name)
]
COVERING = covering(PAIRS)
assert all(name in {row.name for row in ROWS} for case in CASES for name in case.rows), (
    "a case names a row that is not there"
)
