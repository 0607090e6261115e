"""Published measurements as data, and what the planner says of the same runs.

What a row does not publish and the planner has to know is `open`: each value that it may have had is predicted. Of these the planner's own
choice counts, the fastest that is not "no"; what was measured has no say in it. A row that lacks something without which there is no
prediction (its batch or its length), or that asks for what Drumline has not, says so in `without`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from drumline.errors import PlanError
from drumline.hardware.catalog import ATTENTION_REACHED_SLOW, DEVICES, REACHED_H100
from drumline.planner.search.answer import Candidate, Question

GiB = 2**30
# MosaicML's MPT by size, as a model of Llama's kind with as many parameters; that rows of 2,048 tokens were trained follows from the
# published MFU: rate × (6 × parameters + 12 × layers × hidden × length) = MFU × peak, to 0.3%.
MPT = {
    name: dict(zip(("layers", "hidden", "heads", "intermediate"), sizes, strict=True)) | {"vocabulary": 50368, "tied": True}
    for name, sizes in {"7B": (32, 4096, 32, 10923), "13B": (40, 5120, 40, 13653), "30B": (48, 7168, 64, 19115),
                        "70B": (80, 8192, 64, 21845), "3B": (32, 2560, 20, 6827), "1B": (24, 2048, 16, 5461),
                        "760M": (24, 1536, 12, 4096), "350M": (24, 1024, 16, 2731), "125M": (12, 768, 12, 2048)}.items()
}  # fmt: skip
# Qwen's first models, whose queries, keys and values have biases as Qwen2's have: hidden, intermediate, layers, heads.
QWEN = {
    name: dict(zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), sizes, strict=True))
    | {"model_type": "qwen2", "num_key_value_heads": sizes[3], "vocab_size": 151936, "tie_word_embeddings": False}
    for name, sizes in {"1.8B": (2048, 5504, 24, 16), "7B": (4096, 11008, 32, 32), "14B": (5120, 13696, 40, 40),
                        "72B": (8192, 24576, 80, 64)}.items()
}  # fmt: skip
SOURCES = {
    "torchtitan": "torchtitan's performance notes (Llama 3.1 of December 2024, asynchronous TP of June 2025); its recipe of Llama 3 70B has"
    " rows of 8,192 tokens",
    "llm-foundry": "MosaicML llm-foundry's throughput tables (fused kernels: a compiled model is the nearest)",
    "gist": "a public gist of DeepSpeed runs, LLaMA-7B on 8×A800-80, torch 2.2. Its GB are taken for 2^30, as DeepSpeed prints them: in"
    " 10^9 its ZeRO-2 run would hold less than weights, gradients and moments",
    "qwen": "Qwen's README, A100-80, micro-batch 1, accumulation 8, AC; GB as the driver shows them",
    "litgpt": "litgpt's config hub, one A10G of 24 GB, rows of 512, no AC, weights in bf16, dropout before adapters; peak allocated",
    "sequence": "a table of ZeRO with sequence parallelism, 8×A100-80",
    "single": "a report of one run",
    "automodel": "NeMo Automodel's performance summary, LoRA on one H100; whether it compiles is not said, nor its checkpointing",
    "deepspeed": "DeepSpeed's reports of DeepCompile, June and August 2026: checkpointing is not said",
    "ms-swift": "ms-swift's figures of Megatron, with the scripts that it has beside them (examples/megatron: fp8/benchmark.sh and"
    " moe/qwen3_moe.sh): global batch 16, micro-batch 1, packed rows of 8,192 tokens, sequence parallelism",
    "titan-hf": "torchtitan, March 2026, Hugging Face model",
}
# Groups of rows that say how a mixture of experts or parallelism besides data parallelism was predicted.
PARALLEL, MIXTURE = "tp, cp or pp", "mixture"


@dataclass(frozen=True, eq=False)
class Published:
    """`measured`: memory in bytes, as allocated (`active`), as reserved by the allocator (`reserved`) or as shown by the driver (`driver`);
    tokens_per_s (of a device; a range as its middle), mfu, seconds (of a step). `oom`: it ran out of memory;
    `device`: what its device has that is not the catalog's."""

    name: str
    measured: dict[str, float]
    sections: dict[str, Any] = field(default_factory=dict)
    open: dict[str, list[Any]] = field(default_factory=dict)
    without: str = ""
    source: str = ""
    group: str = "full"
    oom: bool = False
    device: dict[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[str, ...]:
        """Its group, and rows of 8,192 tokens and more."""
        return (
            self.group,
            *(
                ["long rows"]
                if self.sections and self.sections["data"]["max_length"] >= 8192
                else []
            ),
        )


def _run(
    model: Any,
    cluster: dict[str, Any],
    length: int,
    batch: dict[str, int] | int | None,
    **more: Any,
) -> dict[str, Any]:
    """`batch` a number: of a micro-batch, without accumulation: the global batch follows the devices."""
    known: dict[str, Any] = (
        {"id": model}
        if isinstance(model, str)
        else {"config" if "model_type" in model else "shape": model}
    )
    if "config" in known:
        known |= {"id": None}
    given = {} if batch is None else {"micro_batch": batch} if isinstance(batch, int) else batch
    return {
        "model": known,
        "cluster": cluster,
        "data": {"max_length": length},
        "batch": given,
        "precision": "bf16",
        **more,
    }


PLAIN = {"kind": "pretrain", "loss_chunk": 0}
TITAN: dict[str, Any] = {"strategy": "fsdp2", "algorithm": PLAIN}
# Its loss is one fused kernel (`loss_fn` of llmfoundry/models/mpt/modeling_mpt.py is fused_crossentropy by default): it reads logits in 16
# bits and writes their gradient over them. torch's cross-entropy of all logits holds six times as much; the loss in chunks comes nearest.
FOUNDRY: dict[str, Any] = {
    "strategy": "fsdp2",
    "algorithm": {"kind": "pretrain"},
    "compile": {"enabled": True},
}
AC = "memory.activation_checkpointing"
FULL, SELECTIVE = ({"memory": {"activation_checkpointing": kind}} for kind in ("full", "selective"))
PURE = {"precision": {"kind": "bf16", "master": "bf16"}}
# Gradients travel and add up in bf16, as DeepSpeed has them where nobody sets another type (Drumline sets fp32); buffers by `auto`.
STOCK: dict[str, Any] = {
    "communication_data_type": "bf16",
    "data_types": {"grad_accum_dtype": "bf16"},
}
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "auto",
)
# fp16 and ZeRO-2 on one GPU, with these buckets (finetune_qlora_single_gpu.sh and ds_config_zero2.json of QwenLM/Qwen).
QWEN_QLORA: dict[str, Any] = {"kind": "zero2", "options": {
    "communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp16"},
    "zero_optimization": {"allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000, "overlap_comm": True},
}}  # fmt: skip
H100, A800 = {"device": "h100-80g", "per_node": 8}, {"device": "a800-80g", "per_node": 8}
# torchtitan's H100 have 96 GB of HBM2e at 2.4 TB/s, and may take 500 W of the 700 W that an H100 is made for (its pages of figures). Power
# is taken to grow with the square of the clock: it lies between the clock alone and, where the voltage follows, its third power.
OF_FULL_CLOCK = (500 / 700) ** (1 / 2)
HBM2E: dict[str, float] = {
    "memory_bytes": int(95.0 * GiB),
    "bandwidth": 2.4e12,
    "efficiency": OF_FULL_CLOCK * REACHED_H100,
    "attention": OF_FULL_CLOCK * ATTENTION_REACHED_SLOW,
}
# llm-foundry's attention was FlashAttention in Triton (its script's default when the rows were added). FlashAttention 2, to which the
# catalog's rates belong, is 1.3 to 2.5 times as fast (Dao 2023, section 4): the geometric mean.
TRITON_SECONDS = (1.3 * 2.5) ** (1 / 2)


def _titan() -> Iterator[Published]:
    compiled = {"compile": {"enabled": True}}
    for kind, part, active, reserved, rate, gain in (
        ("full", FULL, 22.73, 31.02, 6200, 1.185),
        ("selective", SELECTIVE, 49.54, 59.41, 6700, 1.23),
    ):
        name, sections = f"Llama-2-7B, 8×H100, FSDP2, {kind} AC", {**TITAN, **part}
        measured = {"active": active * GiB, "reserved": reserved * GiB, "tokens_per_s": float(rate)}
        yield Published(name, measured, _run("llama-2-7b", H100, 2048, 8, **sections), device=HBM2E)
        # Of compiled runs their gain was reported.
        yield Published(
            f"{name}, compiled",
            {"tokens_per_s": gain * rate},
            _run("llama-2-7b", H100, 2048, 8, **sections, **compiled),
            device=HBM2E,
        )
    for nodes, more, reserved, rate in (
        (1, {}, 82.4, 5762),
        (1, compiled, 77.0, 6667),
        (16, {}, 67.0, 5605),
    ):
        yield Published(
            f"Llama-3.1-8B, {8 * nodes}×H100, FSDP2, selective AC" + ", compiled" * bool(more),
            {"reserved": reserved * GiB, "tokens_per_s": float(rate)},
            _run(
                "llama-3.1-8b",
                {**H100, "nodes": nodes, "inter": "8x400Gb"},
                8192,
                2,
                **TITAN,
                **SELECTIVE,
                **more,
            ),
            device=HBM2E,
        )
    yield from _titan_of_2025(compiled)


def _titan_of_2025(compiled: dict[str, Any]) -> Iterator[Published]:
    """With tensor and context parallelism, and in fp8."""
    nodes = {**H100, "nodes": 32, "inter": "8x400Gb"}
    name, more = "Llama-3-70B, 256×H100, FSDP 32 × TP 8", {**FULL, **compiled}
    sections = _run("llama-3.1-70b", nodes, 8192, 16, **{**TITAN, "strategy": {"kind": "fsdp2", "tp": 8}, **more})  # fmt: skip
    yield Published(
        f"{name}, compiled", {"tokens_per_s": 597.0}, sections, group=PARALLEL, device=HBM2E
    )
    for kind, rate, without in (
        ("asynchronous TP", 652, "Drumline has no asynchronous tensor parallelism"),
        ("fp8", 810, "Drumline has no fp8 under tensor parallelism"),
        ("fp8, asynchronous TP", 942, "Drumline has neither of the two"),
    ):
        yield Published(f"{name}, {kind}", {"tokens_per_s": float(rate)}, without=without, group=PARALLEL)  # fmt: skip
    fp8 = {"precision": {"kind": "fp8", "scaling": "tensorwise"}}
    measured = {"reserved": 84 * GiB, "tokens_per_s": 3890.0}
    sections = _run("llama-3.1-8b", H100, 32768, 1, **TITAN, **more) | fp8
    # Whether weights are gathered in fp8 is not said.
    gathers = {"precision.gather": ["bf16", "fp8"]}
    yield Published("Llama-3.1-8B, 8×H100, fp8, 32,768", measured, sections, gathers, device=HBM2E)
    # Its context parallelism is torch's ring, which takes no mask for packed documents. Drumline has no fp8 under it. In bf16 the
    # run would take a few percent longer: at this length the layers that fp8 speeds up are a tenth of it.
    measured = {"reserved": 84 * GiB, "tokens_per_s": 548.0}
    strategy = {"kind": "fsdp2", "cp": 8, "cp_method": "ring"}
    sections = _run("llama-3.1-8b", H100, 262_144, 1, **{**TITAN, "strategy": strategy, **more})
    sections["data"] = sections["data"] | {"packing": False}
    sections["model"] = sections["model"] | {"config": {"max_position_embeddings": 262_144}}
    yield Published("Llama-3.1-8B, 8×H100, CP 8, 262,144", measured, sections, group=PARALLEL, device=HBM2E)  # fmt: skip


class FoundryRow(NamedTuple):
    """A row of llm-foundry's table (benchmarks/llm_foundry.csv), in its words: `mixed` is the kind of mixed precision, under pure
    gradients are reduced in bf16."""

    model: str
    length: int
    device: str
    devices: int
    micro_batch: int
    accumulation: int
    precision: str
    mixed: str
    sharding: str
    checkpointing: str
    tokens_per_s: float


def foundry_table() -> list[FoundryRow]:
    """Return all 216 rows of llm-foundry's table."""
    with (Path(__file__).parent / "llm_foundry.csv").open() as file:
        return [
            FoundryRow(
                line["model"].upper(), int(line["length"]), line["device"], int(line["devices"]), int(line["micro_batch"]),
                int(line["accumulation"]), line["precision"], line["mixed"], line["sharding"], line["checkpointing"],
                float(line["tokens_per_s"]),
            )
            for line in csv.DictReader(file)
        ]  # fmt: skip


def foundry_subset(table: list[FoundryRow]) -> list[FoundryRow]:
    """Return the rows to learn from: of each size × length × device × precision the one with the fewest devices, the first of those; and
    the largest run of each, the 70B on 512 H100 and the 30B on 128 A100-40."""
    chosen: dict[Any, FoundryRow] = {}
    for row in sorted(table, key=lambda row: row.devices):
        chosen.setdefault((row.model, row.length, row.device, row.precision), row)
    large = [
        row
        for row in table
        if (row.model, row.device, row.devices)
        in (("70B", "h100-80g", 512), ("30B", "a100-40g", 128))
    ]
    return [*chosen.values(), *large]


def foundry_run(row: FoundryRow) -> Published:
    """Return a row of the table as a run."""
    link = "8x400Gb" if row.device == "h100-80g" else "8x200Gb"
    cluster: dict[str, Any] = {"device": row.device, "per_node": 8}
    if row.devices > 8:
        cluster |= {"nodes": row.devices // 8, "inter": link}
    strategy: dict[str, Any] = {"kind": "fsdp2", "reshard_after_forward": row.sharding == "full"}
    if row.mixed == "pure":
        strategy["reduce_dtype"] = "bf16"
    batch = {"micro_batch": row.micro_batch, "accumulation": row.accumulation}
    more = {**FOUNDRY, "strategy": strategy, "memory": {"activation_checkpointing": row.checkpointing}}  # fmt: skip
    sections = _run(MPT[row.model], cluster, row.length, batch, **more)
    choices: dict[str, list[Any]] = {}
    if row.precision == "fp8":
        sections["precision"] = {"kind": "fp8"}
        choices = {"precision.scaling": ["rowwise", "tensorwise"]}
    name = f"{row.model}, {row.devices}×{row.device}, {row.length:,}, micro-batch {row.micro_batch}, {row.precision}"
    attention = DEVICES[row.device].attention
    assert attention is not None
    return Published(
        name,
        {"tokens_per_s": row.tokens_per_s},
        sections,
        choices,
        source="llm-foundry",
        device={"attention": attention / TRITON_SECONDS},
    )


def _foundry() -> Iterator[Published]:
    yield from map(foundry_run, foundry_subset(foundry_table()))


def _gist() -> Iterator[Published]:
    two, three = ({"kind": kind, "options": STOCK} for kind in ("zero2", "zero3"))
    host, both = (
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    )
    for strategy, name, ac, micro, samples, gb, rate in (
        (two, "ZeRO-2", False, 1, 64, 44.8, 5.33), (two, "ZeRO-2", True, 1, 64, 23.5, 4.19),
        (two | host, "ZeRO-2 offload", True, 1, 64, 16.9, 1.81), (two, "ZeRO-2", True, 4, 64, 38.6, 4.69),
        (three, "ZeRO-3", False, 2, 64, 75.7, 4.95), (three, "ZeRO-3", True, 2, 64, 20.4, 4.45),
        (three | host, "ZeRO-3 offload optimizer", True, 2, 64, 9.4, 2.05), (three | both, "ZeRO-3 offload", True, 4, 64, 7.9, 2.06),
        (three, "ZeRO-3", True, 8, 64, 39.1, 4.73), (three, "ZeRO-3", True, 8, 128, 63.9, 4.32),
    ):  # fmt: skip
        batch = {"micro_batch": micro, "global_samples": samples}
        sections = _run(
            "llama-2-7b",
            A800,
            4096,
            batch,
            strategy=strategy,
            algorithm=PLAIN,
            **(FULL if ac else {}),
        )
        measured = {"active": gb * GiB, "seconds": samples / rate}
        full = (
            f"LLaMA-7B, 8×A800, {name}, {'AC' if ac else 'no AC'}, micro {micro}, global {samples}"
        )
        yield Published(full, measured, sections, group="offload" if "offload" in name else "full")


def _qwen() -> Iterator[Published]:
    lora = {"kind": "lora", "r": 64, "dropout": 0.05}
    qlora = lora | {"quantize": "4bit"}
    for name, gpus, strategy, adapter, figures in (
        ("1.8B", 1, "single", lora, {512: (7.4, 1.0), 2048: (11.0, 1.7), 8192: (21.8, 6.8)}),
        ("7B", 1, "single", lora, {512: (20.4, 1.5), 2048: (23.8, 5.2), 8192: (36.6, 21.3)}),
        ("14B", 1, "single", lora, {512: (35.1, 2.4), 2048: (37.4, 8.4), 8192: (55.2, 36.0)}),
        ("7B", 1, "single", qlora, {512: (11.5, 3.0), 2048: (13.9, 7.0), 8192: (23.5, 22.3)}),
        ("14B", 1, "single", qlora, {512: (18.4, 6.3), 8192: (27.9, 38.3)}),
        ("72B", 1, "single", qlora, {512: (61.4, 31.5), 2048: (64.1, 59.5), 8192: (75.6, 179.8)}),
        ("7B", 2, "zero3", None, {512: (148.0, 4.0), 1024: (162.0, 4.5)}),
        ("1.8B", 1, "zero3", None, {512: (43.5, 2.2), 8192: (48.3, 5.6)}),
        ("72B", 4, "zero3", lora, {512: (217.7, 20.5), 2048: (228.8, 45.7), 8192: (289.2, 161.5)}),
    ):
        kind = "full" if adapter is None else "QLoRA" if "quantize" in adapter else "LoRA"
        for length, (gb, seconds) in figures.items():
            zero = {"kind": "zero3", "options": {**STOCK, "zero_optimization": AUTO}}
            sections = _run(
                QWEN[name], {"device": "a100-80g", "per_node": gpus}, length, {"micro_batch": 1, "accumulation": 8},
                strategy=zero if strategy == "zero3" else strategy, algorithm=PLAIN, **FULL, **({"adapter": adapter} if adapter else {}),
            )  # fmt: skip
            if kind == "QLoRA":  # as its script for one GPU has it
                sections |= {"strategy": QWEN_QLORA, "precision": "fp16"}
            many = f", {gpus} GPUs, ZeRO-3" if gpus > 1 else ""
            yield Published(
                f"Qwen-{name}, {kind}{many}, {length}",
                {"driver": gb * 1e9 / gpus, "seconds": seconds},
                sections,
                group=kind,
            )


def _litgpt() -> Iterator[Published]:
    one = {"device": "a10", "per_node": 1}
    every = {"kind": "lora", "r": 8, "dropout": 0.05}
    some = every | {"r": 32, "targets": ["q_proj", "v_proj"]}
    packed = {"quantize": "4bit"}
    for model, adapter, micro, gb in (
        ("llama-2-7b", some, 2, 19.77), ("llama-3-8b", some, 1, 19.73), ("mistral-7b", some, 2, 20.66), ("llama-3.2-1b", some, 1, 4.49),
        ("llama-3.2-3b", some, 1, 9.67), ("gemma-2b", every, 2, 12.62), ("phi-2", every, 4, 13.98),
        ("tinyllama-1.1b", every | {"r": 32}, 8, 13.50), ("llama-2-7b", some | packed, 2, 13.68), ("mistral-7b", some | packed, 2, 14.29),
        ("llama-3-8b", some | packed, 2, 17.41), ("llama-3.2-1b", some | packed, 2, 5.53), ("llama-3.2-3b", some | packed, 2, 10.30),
        ("tinyllama-1.1b", every | {"r": 32} | packed, 8, 16.24), ("tinyllama-1.1b", None, 4, 14.10),
    ):  # fmt: skip
        kind = "full" if adapter is None else "QLoRA" if "quantize" in adapter else "LoRA"
        if kind == "QLoRA":
            without = "bitsandbytes' layers keep their inputs and return the type of what they are given, 23 to 28% more; ours keep nothing"
            yield Published(
                f"{model}, {kind}, A10G, micro {micro}",
                {"active": gb * 1e9},
                without=without,
                group=kind,
            )
            continue
        sections = _run(
            model,
            one,
            512,
            {"micro_batch": micro, "accumulation": 4},
            strategy="single",
            algorithm=PLAIN,
        )
        # litgpt holds the head apart from the embedding, and has GELU in one kernel.
        config = (
            {"hidden_act": "gelu_pytorch_tanh"}
            if model == "phi-2"
            else {"tie_word_embeddings": False}
        )
        sections |= (
            PURE
            | ({"adapter": adapter} if adapter else {})
            | {"model": sections["model"] | {"config": config}}
        )
        yield Published(
            f"{model}, {kind}, A10G, micro {micro}", {"active": gb * 1e9}, sections, group=kind
        )
    for model, gb in (("llama-3.2-1b", 8.70), ("llama-3.2-3b", 16.51)):
        without = "weights, gradients and moments in bf16 are more than was measured: its moments lay elsewhere"
        yield Published(f"{model}, full, A10G, micro 4", {"active": gb * 1e9}, without=without)
    for model, devices, more in (
        ("gemma-7b", 1, PURE | {"strategy": "single", "adapter": every}),
        ("llama-2-7b", 4, PURE | {"strategy": "fsdp2"}),
        ("llama-3-8b", 4, PURE | {"strategy": "fsdp2"}),
    ):  # their micro-batches are not published: one row is the least
        sections = (
            _run(
                model,
                one | {"per_node": devices},
                512,
                {"micro_batch": 1, "accumulation": 4},
                algorithm=PLAIN,
            )
            | more
        )
        yield Published(
            f"{model}, {devices}×A10G, out of memory",
            {},
            sections,
            group="LoRA" if devices == 1 else "full",
            oom=True,
        )


def _others() -> Iterator[Published]:
    without = "its length is not published, and Drumline has no ZeRO with sequence parallelism"
    for name, gb, ms in (("ZeRO-3, full AC", 52.8, 13_000), ("ZeRO-2, full AC", 43.8, 13_194), ("ZeRO-3", 75.2, 10_329),
                         ("ZeRO-2", 62.3, 10_050)):  # fmt: skip
        measured = {"reserved": gb * 1e9, "seconds": ms / 1000}
        yield Published(f"7B, 8×A100-80, data 2 × sequence 4, {name}", measured, without=without)


def _single() -> Iterator[Published]:
    yield Published(
        "Qwen2.5-3B, 8×A100-40, ZeRO-2",
        {"reserved": 34.5 * GiB},
        without="its length and micro-batch are not published",
    )


def _automodel() -> Iterator[Published]:
    one, lora = {"device": "h100-80g", "per_node": 1}, {"kind": "lora"}
    choices: dict[str, list[Any]] = {
        "compile.enabled": [False, True],
        AC: ["none", "selective", "full"],
    }
    for name, rate in (("llama-3-8b", 12_472.87), ("qwen2.5-7b", 14_110.05)):
        batch = {"micro_batch": 2, "accumulation": 16}
        sections = _run(name, one, 4096, batch, strategy="single", algorithm=PLAIN, adapter=lora)
        yield Published(
            f"{name}, LoRA, H100, micro 2", {"tokens_per_s": rate}, sections, choices, group="LoRA"
        )


def _deepspeed() -> Iterator[Published]:
    # Gradients add up in the type of the weights where nobody sets another one.
    more = {"algorithm": PLAIN, "compile": {"enabled": True}}
    sections = _run("qwen3-8b", H100, 4096, 1, strategy={"kind": "zero1", "options": STOCK}, **more)
    measured = {"active": 39.4 * GiB, "seconds": 0.859}
    kinds: dict[str, list[Any]] = {AC: ["none", "selective", "full"]}
    yield Published("Qwen3-8B, 8×H100, ZeRO-1 with DeepCompile", measured, sections, kinds)
    without = "Drumline does not compile under ZeRO-3"
    yield Published(
        "Qwen3-14B, 8×H200, ZeRO-3 with DeepCompile", {"seconds": 1.855}, without=without
    )
    without = (
        "whether it computes blocks again is not published, on which it depends whether it runs"
    )
    yield Published("Qwen3-14B, 8×H200, ZeRO-3, out of memory", {}, without=without, oom=True)


def _swift() -> Iterator[Published]:
    # Megatron's optimizer states are cut over data parallel ranks, and neither weights nor fp32 gradients are: of what Drumline has under
    # tensor parallelism, FSDP2 that keeps gathered weights takes as long. It holds less, so memory is not compared (60 GiB of the mixture,
    # 39 GiB predicted). Selective recomputation computes what lies inside of attention again, of which its kernel keeps nothing anyway.
    batch, kept = {"micro_batch": 1, "global_samples": 16}, {"reshard_after_forward": False}
    algorithm = {"kind": "pretrain"}
    h20 = {"device": "h20", "per_node": 8}
    sections = _run("qwen3-14b", h20, 8192, batch, strategy={"kind": "fsdp2", "tp": 4, **kept}, algorithm=algorithm)  # fmt: skip
    sections |= {"memory": {"activation_checkpointing": "none"}, "compile": {"enabled": True}}
    yield Published("Qwen3-14B, 8×H20, TP 4", {"seconds": 13.0}, sections, group=PARALLEL)
    without = "Drumline has no fp8 under tensor parallelism"
    yield Published("Qwen3-14B, 8×H20, TP 4, fp8", {"seconds": 8.0}, without=without, group=PARALLEL)  # fmt: skip
    # Its script has been published with TP 2 and with PP 2; of the two, the first stood beside the figure.
    a800 = {"device": "a800-80g", "per_node": 8, "nodes": 2, "inter": "8x200Gb"}
    strategy = {"kind": "fsdp2", "tp": 2, "ep": 8, **kept}
    sections = _run("qwen3-30b-a3b", a800, 8192, batch, strategy=strategy, algorithm=algorithm, **FULL)  # fmt: skip
    yield Published("Qwen3-30B-A3B, 16×A800, TP 2 × EP 8", {"seconds": 9.6}, sections, group=MIXTURE)  # fmt: skip
    without = (
        "each of its 6,144 experts is a module with layers of its own (transformers 4), gathered apart;"
        " here the experts of a block are one weight"
    )
    yield Published("Qwen3-30B-A3B, 16×A800, ZeRO-3", {"seconds": 91.2}, without=without, group=MIXTURE)  # fmt: skip


def _titan_hf() -> Iterator[Published]:
    without = "its length, micro-batch and checkpointing are not published"
    yield Published("Qwen3-30B-A3B, 8×H100, FSDP2", {"tokens_per_s": 2817.0}, without=without, group=MIXTURE)  # fmt: skip


def _rows() -> Iterator[Published]:
    makers = (
        _titan, _foundry, _gist, _qwen, _litgpt, _others, _single, _automodel, _deepspeed, _swift, _titan_hf,
    )  # fmt: skip
    for source, made in zip(SOURCES, makers, strict=True):
        yield from (replace(row, source=source) for row in made())


ROWS = list(_rows())


@cache
def candidates(row: Published) -> tuple[tuple[dict[str, Any], Question, Candidate], ...]:
    """For each way to fill in what is open: its values, the question, and the layout with its estimate."""
    import yaml

    from drumline.config.load import Loaded, load_text
    from drumline.planner.question import build_request
    from drumline.planner.search.search import evaluate

    found = []
    for values in itertools.product(*row.open.values()) if not row.without else ():
        way = dict(zip(row.open, values, strict=True))
        text = yaml.safe_dump(
            {
                **row.sections,
                "data": {**row.sections["data"], "train": [{"kind": "file", "path": "rows.jsonl"}]},
            }
        )
        loaded = Loaded(
            load_text(text, [f"{key}={value}" for key, value in way.items()], "row"),
            Path("row"),
            Path(),
        )
        question = build_request(loaded, lambda *_: None).question
        device: Any = replace(question.cluster.device, **row.device)  # type: ignore[arg-type]
        question = replace(question, cluster=replace(question.cluster, device=device))
        with suppress(PlanError) if row.open else nullcontext():
            found.append((way, question, evaluate(question, question.config, "row")))
    return tuple(found)


def predicted(row: Published) -> list[dict[str, Any]]:
    """For each way to fill in what is open: its values, the planner's estimates under the names of `measured`, the relative errors."""
    found = []
    for way, question, candidate in candidates(row):
        said = {
            name: value
            for name, value in estimates(question, candidate).items()
            if name in row.measured
        }
        found.append(
            {
                "open": way,
                "predicted": said,
                "error": {name: value / row.measured[name] - 1 for name, value in said.items()},
            }
        )
    return found


def estimates(question: Question, candidate: Candidate) -> dict[str, float]:
    """By the names of `measured`, with the constants of now; and bytes that are `needed`, of those that are there (`limit`)."""
    from drumline.planner.cost.times import estimate

    made = estimate(candidate.layout, question.facts, question.cluster)
    needed = made.memory.reserved
    found = {
        "active": made.memory.peak,
        "reserved": needed - made.memory.overhead,
        "driver": needed,
        "seconds": made.seconds.total,
    }
    found |= {
        "tokens": made.tokens_per_s * made.seconds.total,
        "tokens_per_s": made.tokens_per_s / question.cluster.world_size,
    }
    return found | {
        "mfu": made.mfu or 0.0,
        "needed": needed,
        "high": made.needs[1],
        "limit": made.limit,
    }
