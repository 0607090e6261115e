"""Hold the planner's bytes of a device against torch's own allocator, in layouts of up to 70B parameters.

    make fake-gpu; python benchmarks/standin_memory.py [--cases WORD] [--again] [--smoke] [--out FILE.json]

Each layout is trained for two steps on the stand-in of a GPU (tests/fake_gpu): a CUDA build of torch
without a GPU, whose allocator hands out addresses that nobody touches. Layers, widths, batches and
kernels' arguments are real; no weight has a value. Of a layout of many devices one rank runs, in
torch's fake process group; of a pipeline its first and its last rank. What cuBLAS, attention kernels,
NCCL and CUDA's context take is not in it.

Compared are the most bytes of tensors (`allocated`) with the planner's formula and with its trace,
and the bytes that the allocator has reserved with expandable segments (`reserved`) with the plan's.

Rows that the file has already are kept, unless `--again`. `--table FILE` prints a file as Markdown.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.planner_runs import TINY, ready
from drumline.errors import DrumlineError

Sections = dict[str, Any]

TARGET = 0.05
SECONDS_OF_A_RANK = 1200
# Layouts that are measured in one process, one after the other.
CASES_TOGETHER = 4
# Bytes that the stand-in hands out: more than any GPU has, so that layouts that do not fit are measured.
DEVICE_BYTES = 2**40
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FULL: Sections = {"memory": {"activation_checkpointing": "full"}}
SELECTIVE: Sections = {"memory": {"activation_checkpointing": "selective"}}
SOME_BLOCKS: Sections = {"memory": {"activation_checkpointing": "full", "checkpointed_blocks": 16}}
FULL_OFFLOADED: Sections = {
    "memory": {"activation_checkpointing": "full", "activation_offload": True}
}
PLAIN: Sections = {"algorithm": {"loss_chunk": 0}}
LORA: Sections = {"adapter": {"kind": "lora", "r": 16}}
QLORA: Sections = {"adapter": {"kind": "lora", "r": 16, "quantize": "4bit"}}
FP32: Sections = {"precision": "fp32"}
PURE_BF16: Sections = {"precision": {"kind": "bf16", "master": "bf16"}}
# A ring and Falcon take rows with one document.
ROWS_ALONE: Sections = {"data": {"packing": False}}


@dataclass(frozen=True)
class Case:
    """A layout. `model`: a name of models.shapes, or "tiny".

    `data_ranks`: the devices with different rows. `model_ranks`: those of tensor, pipeline and context
    parallelism, for each of them. `accumulation`: micro-batches of a step on each data rank. `ranks`:
    those that are measured, of which the fullest counts.
    """

    name: str
    model: str
    length: int
    micro_batch: int
    sections: Sections = field(default_factory=dict)
    strategy: Any = "single"
    data_ranks: int = 1
    model_ranks: int = 1
    accumulation: int = 2
    ranks: tuple[int, ...] = (0,)
    sees_images: bool = False

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.model_ranks


def _case(
    model: str, name: str, length: int, micro_batch: int, *parts: Sections, **layout: Any
) -> Case:
    """Return a case whose sections are `parts` laid over each other. `layout`: more fields of it."""
    sections: Sections = {}
    for part in parts:
        sections |= part
    return Case(f"{model}, {name}", model, length, micro_batch, sections, **layout)


def cases() -> list[Case]:
    """Return all layouts, those of one kind together."""
    return [
        *_single_devices(),
        *_adapters(),
        *_data_parallelism(),
        *_tensor_parallelism(),
        *_pipelines(),
        *_context_and_experts(),
        *_images(),
    ]


def _single_devices() -> Iterator[Case]:
    yield _case("smollm2-135m", "single", 1024, 8)
    yield _case("smollm2-135m", "single, fp32", 1024, 4, FP32)
    yield _case("smollm2-135m", "single, loss without chunks", 1024, 8, PLAIN)
    yield _case("qwen2.5-0.5b", "single, selective", 2048, 4, SELECTIVE)
    yield _case("llama-3.2-1b", "single", 2048, 4)
    yield _case("llama-3.2-1b", "single, bf16 weights", 2048, 4, PURE_BF16)
    yield _case("llama-3.2-3b", "single, full", 2048, 4, FULL)
    yield _case("llama-3.2-3b", "single, full in 16 blocks", 2048, 2, SOME_BLOCKS)
    yield _case("llama-3.2-3b", "single, full, offloaded", 8192, 1, FULL_OFFLOADED)
    yield _case("qwen3-4b", "single, full, loss without chunks", 2048, 2, FULL, PLAIN)


def _adapters() -> Iterator[Case]:
    yield _case("llama-3.1-8b", "LoRA", 2048, 2, LORA)
    yield _case("llama-3.1-8b", "LoRA, full", 4096, 2, LORA, FULL)
    yield _case("llama-3.1-8b", "QLoRA, full", 4096, 2, QLORA, FULL)
    yield _case("llama-3.1-70b", "QLoRA, full", 2048, 1, QLORA, FULL)
    yield _case(
        "qwen2.5-32b", "LoRA, fsdp2 8, full", 4096, 1, LORA, FULL, strategy="fsdp2", data_ranks=8
    )


def _data_parallelism() -> Iterator[Case]:
    yield _case("llama-3.2-1b", "ddp 2", 2048, 2, strategy="ddp", data_ranks=2)
    sharded = {"kind": "ddp", "shard_optimizer": True}
    yield _case(
        "llama-3.2-3b",
        "ddp 8, sharded moments, full",
        2048,
        2,
        FULL,
        strategy=sharded,
        data_ranks=8,
    )
    yield _case("llama-3.2-1b", "zero1 8", 2048, 2, strategy="zero1", data_ranks=8)
    yield _case("llama-3.2-3b", "zero2 8, full", 2048, 2, FULL, strategy="zero2", data_ranks=8)
    yield _case("llama-3.1-8b", "zero3 8, full", 2048, 2, FULL, strategy="zero3", data_ranks=8)
    yield _case(
        "falcon-7b", "zero2 8, full", 2048, 1, FULL, ROWS_ALONE, strategy="zero2", data_ranks=8
    )
    yield _case("llama-3.1-8b", "fsdp2 8", 2048, 1, strategy="fsdp2", data_ranks=8)
    yield _case("llama-3.1-8b", "fsdp2 8, full", 4096, 2, FULL, strategy="fsdp2", data_ranks=8)
    yield _case("llama-3.2-1b", "fsdp2 8, fp32", 2048, 1, FP32, strategy="fsdp2", data_ranks=8)
    copies = {"kind": "fsdp2", "replicate": 2}
    yield _case(
        "llama-3.1-8b", "fsdp2 2 × 8, selective", 2048, 1, SELECTIVE, strategy=copies, data_ranks=16
    )
    on_host = {"kind": "fsdp2", "offload": "cpu"}
    yield _case(
        "llama-3.1-8b", "fsdp2 8 on the host, full", 4096, 1, FULL, strategy=on_host, data_ranks=8
    )
    yield _case("llama-3.1-70b", "fsdp2 32, full", 4096, 1, FULL, strategy="fsdp2", data_ranks=32)


def _tensor_parallelism() -> Iterator[Case]:
    whole_stream = {"kind": "tp", "sequence_parallel": False}
    yield _case("llama-3.2-3b", "tp 2, full", 2048, 2, FULL, strategy="tp", model_ranks=2)
    yield _case("llama-3.1-8b", "tp 8", 4096, 1, strategy="tp", model_ranks=8)
    yield _case("llama-3.1-8b", "tp 8, whole stream", 4096, 1, strategy=whole_stream, model_ranks=8)
    yield _case(
        "llama-3.1-8b",
        "tp 8, whole stream, full",
        4096,
        2,
        FULL,
        strategy=whole_stream,
        model_ranks=8,
    )
    yield _case(
        "qwen2.5-7b",
        "tp 4, selective, loss without chunks",
        4096,
        1,
        SELECTIVE,
        PLAIN,
        strategy="tp",
        model_ranks=4,
    )
    yield _case("llama-3.1-8b", "LoRA, tp 4", 4096, 1, LORA, strategy="tp", model_ranks=4)
    yield _case(
        "qwen2.5-32b",
        "fsdp2 2 × tp 4, selective",
        4096,
        1,
        SELECTIVE,
        strategy={"kind": "fsdp2", "tp": 4},
        data_ranks=2,
        model_ranks=4,
    )
    yield _case(
        "llama-3.1-70b",
        "fsdp2 4 × tp 8, full",
        4096,
        1,
        FULL,
        strategy={"kind": "fsdp2", "tp": 8},
        data_ranks=4,
        model_ranks=8,
    )


def _pipelines() -> Iterator[Case]:
    # Of several stages a rank, the fullest rank is often one in the middle.
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        yield _case(
            "llama-3.1-8b",
            f"pp 4, {schedule}",
            2048,
            1,
            strategy={"kind": "pp", "schedule": schedule},
            model_ranks=4,
            accumulation=8,
            ranks=(0, 1, 3),
        )
    yield _case(
        "llama-3.1-8b",
        "pp 4, gpipe, full",
        2048,
        1,
        FULL,
        strategy={"kind": "pp", "schedule": "gpipe"},
        model_ranks=4,
        accumulation=8,
        ranks=(0, 3),
    )
    yield _case(
        "qwen2.5-14b",
        "fsdp2 2 × pp 4, full",
        4096,
        1,
        FULL,
        strategy={"kind": "fsdp2", "pp": 4},
        data_ranks=2,
        model_ranks=4,
        accumulation=8,
        ranks=(0, 3),
    )
    yield _case(
        "llama-3.1-70b",
        "tp 8 × pp 4, full",
        4096,
        1,
        FULL,
        strategy={"kind": "ddp", "tp": 8, "pp": 4},
        model_ranks=32,
        accumulation=8,
        ranks=(0, 31),
    )


def _context_and_experts() -> Iterator[Case]:
    yield _case(
        "llama-3.1-8b",
        "fsdp2 2 × cp 4, full",
        32768,
        1,
        FULL,
        strategy={"kind": "fsdp2", "cp": 4},
        data_ranks=2,
        model_ranks=4,
    )
    yield _case(
        "llama-3.2-3b",
        "cp 4, ring, full",
        16384,
        1,
        FULL,
        ROWS_ALONE,
        strategy={"kind": "cp", "method": "ring"},
        model_ranks=4,
    )
    yield _case(
        "qwen3-30b-a3b",
        "fsdp2 × ep 8, full",
        2048,
        1,
        FULL,
        strategy={"kind": "fsdp2", "ep": 8},
        data_ranks=8,
    )
    yield _case("mixtral-8x7b", "fsdp2 8, full", 2048, 1, FULL, strategy="fsdp2", data_ranks=8)


def _images() -> Iterator[Case]:
    # The length is that of tests.fake_gpu.vision_runs.
    yield _case("qwen3-vl-2b", "single, images", 1024, 2, sees_images=True)
    yield _case("qwen3-vl-8b", "LoRA, full, images", 1024, 2, LORA, FULL, sees_images=True)


class Planned(NamedTuple):
    """The bytes that a layout is predicted to need; `traced` is None where it cannot be traced.

    `planned_reserved`: by the allocator, without what CUDA and NCCL take.
    """

    formula: int
    traced: int | None
    planned_reserved: int
    phase: str


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--cases", nargs="*", default=[""], help="only layouts with one of these in their names"
    )
    parser.add_argument(
        "--formula-only", action="store_true", help="trace nothing, which takes most of the time"
    )
    parser.add_argument("--again", action="store_true", help="measure rows of the file anew")
    parser.add_argument("--table", type=Path, help="print the table of a results file, and end")
    options = common.parse(parser)
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    from tests.fake_gpu.environment import PYTHON

    if not PYTHON.exists():
        print("error: no stand-in of a GPU here; `make fake-gpu` sets it up", file=sys.stderr)
        raise SystemExit(2)
    chosen = [case for case in cases() if any(word in case.name for word in options.cases)]
    if options.smoke:
        chosen = [Case("tiny, single", "tiny", 64, 1)]
    places = {case.name: place for place, case in enumerate(cases())}
    rows: dict[str, dict[str, Any]] = {}
    if options.out and options.out.exists():
        rows = {row["name"]: row for row in json.loads(options.out.read_text())["rows"]}
    if not options.again:
        measured = [name for name, row in rows.items() if "failed" not in row]
        chosen = [case for case in chosen if case.name not in measured]
    for start in range(0, len(chosen), CASES_TOGETHER):
        together = chosen[start : start + CASES_TOGETHER]
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(together, Path(folder), not options.formula_only):
                rows[row["name"]] = row
                print(line(row), flush=True)
        in_order = sorted(rows.values(), key=lambda row: places.get(row["name"], 0))
        common.write({"target": TARGET, "rows": in_order}, options.out)
    print(json.dumps(summary(list(rows.values()))))


def measure(
    together: Sequence[Case], folder: Path, is_traced: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield a row for each layout: what was planned and what the allocator says, or why it failed."""
    plans: dict[str, Path] = {}
    for number, case in enumerate(together):
        row = {"name": case.name, "devices": case.world_size}
        try:
            plans[case.name] = prepare(case, folder / str(number))
        except (DrumlineError, AssertionError) as reason:
            yield {**row, "failed": str(reason)[-2000:]}
    jobs = []
    for case in together:
        if case.name in plans:
            jobs += [f"{plans[case.name]}:{rank}" for rank in case.ranks]
    output = run_ranks_alone(jobs)
    for case in together:
        if case.name in plans:
            plan = plans[case.name]
            row = {
                "name": case.name,
                "devices": case.world_size,
                **predict(plan, case, is_traced)._asdict(),
            }
            yield {**row, **fullest_rank(plan, case.ranks, output)}


def prepare(case: Case, folder: Path) -> Path:
    """Return the plan.json of a layout that may start."""
    from drumline.models.shapes import find
    from tests.fake_gpu.running import claim_plan, machine
    from tests.fake_gpu.vision_runs import write_vision_run

    samples = case.accumulation * case.micro_batch * case.data_ranks
    batch = {"micro_batch": case.micro_batch, "global_samples": samples}
    sections: Sections = {
        "strategy": case.strategy,
        "precision": "bf16",
        "health": {"on_nan": "skip"},
        **case.sections,
    }
    host = machine(case.world_size)
    if case.sees_images:
        path = write_vision_run(folder / "files", case.model, {**sections, "batch": batch})
        return claim_plan(path, case.world_size, host)
    known = find(case.model)
    values = {"model_type": "llama", **TINY}
    if known is not None:
        values = dict(known.values)
    return ready(
        folder / "run",
        values,
        case.length,
        case.world_size,
        {**sections, "batch": batch, "run": {"device": "cuda", "steps": 3}},
        # Two rows fill a sample, so packs have several documents.
        words=2 * case.length,
        machine=host,
        saves=False,
    )


def predict(plan_path: Path, case: Case, is_traced: bool) -> Planned:
    """Return what the planner says of a layout, by its formula and, if `is_traced`, by its trace."""
    from drumline.plan.plan import Plan
    from drumline.planner.cluster import cluster_here
    from drumline.planner.cost.memory import memory
    from drumline.planner.question import FoundModel, build_question
    from drumline.planner.trace import trace_activations
    from tests.fake_gpu.running import machine

    plan = Plan.load(plan_path)
    host = machine(case.world_size)
    cluster, _ = cluster_here(plan.config, host, "cuda", case.world_size)
    policy = FoundModel(plan.config.model, plan.model_path)
    facts = build_question(plan.config, policy, {}, plan.data, cluster).facts
    formula = memory(plan, facts, cluster)
    activations = None
    if is_traced:
        activations = trace_activations(plan.config, plan.model_path, plan, facts)
    traced = None
    if activations is not None:
        traced = memory(plan, facts, cluster, activations).peak
    return Planned(formula.peak, traced, formula.reserved - formula.overhead, formula.phase)


def run_ranks_alone(jobs: Sequence[str]) -> str:
    """Run ranks one after the other, each by itself, and return what they print.

    `jobs`: as tests.fake_gpu.single_rank takes them.
    """
    from tests.fake_gpu.running import run_python
    from tests.fake_gpu.startup import COMPUTE_UP_TO

    settings = {COMPUTE_UP_TO: 262144, "FAKE_GPU_FILL": 0, "FAKE_GPU_BYTES": DEVICE_BYTES}
    arguments = ["-W", "ignore", "-m", "tests.fake_gpu.single_rank", *jobs]
    seconds = SECONDS_OF_A_RANK * len(jobs)
    return run_python(arguments, 1, seconds, **settings, **ALLOCATOR).out


def fullest_rank(plan: Path, ranks: Sequence[int], output: str) -> dict[str, Any]:
    """Return what the rank with the most bytes has left, or the end of the output if one failed."""
    from tests.fake_gpu.single_rank import result_path

    results = []
    for rank in ranks:
        path = result_path(plan, rank)
        if not path.exists():
            return {"failed": output[-6000:]}
        results.append({"rank": rank, **json.loads(path.read_text())})
    return max(results, key=lambda result: result["allocated"])


def error(row: dict[str, Any], planned: str, measured: str = "allocated") -> float | None:
    """Return how far a prediction is off, relative to what was measured; None if there is none."""
    if "failed" in row or row.get(planned) is None:
        return None
    return row[planned] / row[measured] - 1


def errors_of(row: dict[str, Any]) -> dict[str, float | None]:
    """Return the errors of the formula, of the trace, and of the reserved bytes."""
    return {
        "formula": error(row, "formula"),
        "traced": error(row, "traced"),
        "reserved": error(row, "planned_reserved", "reserved"),
    }


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:48} failed: {row['failed'].strip().splitlines()[-1]}"
    words = [f"{row['name']:48} {row['allocated'] / 1e9:7.2f} GB"]
    for name, off in errors_of(row).items():
        words.append(f"{name} {percent(off)}")
    return "  ".join(words)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many rows of each kind are within the target, and their median error."""
    found: dict[str, Any] = {"rows": len(rows), "failed": sum("failed" in row for row in rows)}
    for name in ("formula", "traced", "reserved"):
        offs = [off for row in rows if (off := errors_of(row)[name]) is not None]
        if offs:
            sizes = [abs(off) for off in offs]
            found[name] = {
                "rows": len(offs),
                "within": sum(size <= TARGET for size in sizes),
                "median": statistics.median(sizes),
                "most": max(offs, key=abs),
            }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| layout | measured, GB | formula | trace | reserved, GB | planned |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "failed" in row:
            continue
        off = errors_of(row)
        cells = [
            row["name"],
            f"{row['allocated'] / 1e9:.1f}",
            percent(off["formula"]),
            percent(off["traced"]),
            f"{row['reserved'] / 1e9:.1f}",
            percent(off["reserved"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
