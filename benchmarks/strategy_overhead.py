"""What Drumline adds to a step, strategy by strategy: against the loop one would write by hand with torch or DeepSpeed.

    python benchmarks/strategy_overhead.py [--strategies ddp,fsdp2,tp,pp,zero2,zero3] [--steps 24] [--rounds 3] [--smoke] [--out FILE]

Time: both sides live in the same two processes, with the same weights and batches, and take steps in turn (which of them goes first
changes each time), so that noise of the machine meets both. Drumline's side is a whole step of its loop: batch at hand,
agreement over ranks, forward, backward, norm, clip, update, event line. Its loss is the plain cross-entropy (loss_chunk 0), as by
hand. The figure is the median over pairs of Drumline's seconds divided by the other's; the slower rank counts.

Memory: one process group a side; the largest peak of a rank's resident set over what it was before the model was built.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.common import ROOT

RANKS = 2
SHAPE = {"layers": 8, "hidden": 256, "length": 128, "samples": 8, "micro_batch": 2}
WARM_UP = 4


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--strategies", default="ddp,fsdp2,tp,pp,zero2,zero3")
    parser.add_argument(
        "--steps", type=int, default=24, help="pairs of steps a round, after the warm-up"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = common.parse(parser, strategies="ddp", steps=2, rounds=1)
    if options.rank_of:
        rank_main(**json.loads(options.rank_of))
        return
    strategies: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.strategies.split(","):
            strategies[name] = measure(name, options, _prepare(Path(folder), name))
            print(name, json.dumps(strategies[name]), flush=True)
    common.write({"shape": SHAPE, "strategies": strategies}, options.out)


def _prepare(root: Path, name: str) -> Path:
    """A config with a random model and rows that fill a pack each."""
    import yaml

    from tests.tiny import tiny_model_dir

    folder = root / name
    folder.mkdir()
    tiny_model_dir(folder / "model", layers=SHAPE["layers"], hidden=SHAPE["hidden"])
    draw = random.Random(0)
    rows = [
        json.dumps({"text": " ".join(draw.choices(["left", "right", "drum", "sum"], k=400))})
        for _ in range(600)
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    data = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "max_length": SHAPE["length"],
        "workers": 1,
        "cache_dir": str(folder / "cache"),
    }
    # The loop by hand leaves the residual stream whole.
    strategy = {"kind": "tp", "sequence_parallel": False} if name == "tp" else name
    config = {
        "model": {"id": str(folder / "model")},
        "algorithm": {"kind": "pretrain", "loss_chunk": 0},
        "data": data,
        "strategy": strategy,
        "batch": {"global_samples": SHAPE["samples"], "micro_batch": SHAPE["micro_batch"]},
        "optimizer": {"lr": 1e-4},
        "schedule": "constant",
        "eval": {"at_start": False},
        "checkpoint": {"export": "none"},
        "run": {"dir": str(folder / "run"), "report_to": [], "device": "cpu", "steps": 10_000},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(name: str, options: argparse.Namespace, config: Path) -> dict[str, Any]:
    from drumline.config.load import load
    from drumline.train.setup import Request, claim_run_dir, make_plan

    request = Request(load(config, []), world_size=RANKS)
    plan, _ = claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {"drumline": [], "by_hand": []}
    for _ in range(options.rounds):
        pairs = _ranks(
            {
                "plan": str(plan),
                "name": name,
                "sides": ["drumline", "by_hand"],
                "steps": options.steps,
            }
        )
        for by_rank in zip(*(p["seconds"] for p in pairs), strict=True):
            ours, theirs = (max(pair[i] for pair in by_rank) for i in (0, 1))
            ratios.append(ours / theirs)
            seconds["drumline"].append(ours)
            seconds["by_hand"].append(theirs)
    memory = {}
    for side in ("drumline", "by_hand"):
        ends = _ranks({"plan": str(plan), "name": name, "sides": [side], "steps": 4})
        memory[side] = max(end["peak_bytes"] for end in ends)
    return {
        "time_ratio": round(statistics.median(ratios), 4),
        "time_ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "seconds": {side: round(statistics.median(values), 4) for side, values in seconds.items()},
        "peak_mib": {side: round(peak / 2**20, 1) for side, peak in memory.items()},
        "memory_ratio": round(memory["drumline"] / memory["by_hand"], 4),
        "pairs": len(ratios),
    }


def _ranks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job on RANKS processes; what each printed last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(RANKS):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
        }
        command = [sys.executable, __file__, "--rank-of", json.dumps(job)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
    ends = []
    for process in processes:
        out, _ = process.communicate(timeout=1200)
        if process.returncode:
            raise SystemExit(f"a rank of {job['name']} failed")
        ends.append(json.loads(out.splitlines()[-1]))
    return ends


# ---------------------------------------------------------------------------------------------------------------- a rank


def rank_main(plan: str, name: str, sides: list[str], steps: int) -> None:
    import psutil
    import torch
    import torch.distributed as dist

    from drumline.dist.start import start, stop
    from drumline.plan.plan import Plan

    global RANKS
    RANKS = int(os.environ["WORLD_SIZE"])  # benchmarks/scaling.py has other numbers of them
    torch.set_num_threads(1)
    ranks = start("cpu", "gloo", 600.0)
    if (
        not dist.is_initialized()
    ):  # one process has none of Drumline's, and the loops by hand take one
        dist.init_process_group("gloo")
    resolved = Plan.load(Path(plan))
    import drumline.train.build  # noqa: F401 - what is imported on either side is not the model's memory

    before = psutil.Process().memory_info().rss
    takes: dict[str, Callable[[Any], None]] = {}
    if "drumline" in sides:
        loop = drumline_loop(resolved, ranks)
        batches = iter(loop.batches)
        takes["drumline"] = lambda batch: loop._train_step(batch, 0.0)
    else:
        from drumline.train.build import build_data_loaders

        batches = iter(
            build_data_loaders(resolved, resolved.mesh.data_rank(ranks.rank), 0, "cpu").training
        )
    if "by_hand" in sides:
        takes["by_hand"] = BY_HAND[name](resolved, ranks)
    seconds = []
    for index in range(WARM_UP + steps):
        batch = next(batches)
        pair = dict.fromkeys(takes, 0.0)
        for side in list(takes)[:: 1 if index % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            takes[side](batch)
            pair[side] = time.perf_counter() - began
        if index >= WARM_UP:
            seconds.append(list(pair.values()))
    batches.close()
    stop()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
            }
        ),
        flush=True,
    )


def drumline_loop(plan: Any, ranks: Any) -> Any:
    from drumline.system.signals import StopFlag
    from drumline.telemetry.events import EventLog
    from drumline.train.build import build
    from drumline.train.entry import Reporter
    from drumline.train.state import Goodput

    emit = (
        EventLog(Path(plan.run_dir) / "events.jsonl").emit if ranks.rank == 0 else Reporter().emit
    )
    return build(plan, ranks, None, emit, StopFlag(), [], Goodput(time.time()))


def _model(plan: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32).train()


def _loss(logits_BTV: Any, targets_BT: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum", ignore_index=-100
    )


def _tokens(batch: Any, data_ranks: int) -> float:
    import torch
    import torch.distributed as dist

    count = torch.tensor(float(sum(int((b.targets_BT != -100).sum()) for b in batch.micro_batches)))
    if data_ranks > 1:
        dist.all_reduce(count)
    return float(count)


def _torch_step(
    model: Any, wrapped: Any, data_ranks: int, last_only: Callable[[bool], Any]
) -> Callable[[Any], None]:
    import torch

    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-4, weight_decay=0.0, fused=True)

    def step(batch: Any) -> None:
        scale = data_ranks / _tokens(batch, data_ranks)
        for index, b in enumerate(batch.micro_batches):
            with last_only(index == len(batch.micro_batches) - 1):
                logits = wrapped(
                    input_ids=b.input_ids_BT, position_ids=b.position_ids_BT, use_cache=False
                ).logits
                (_loss(logits, b.targets_BT) * scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ddp(plan: Any, ranks: Any) -> Callable[[Any], None]:
    import contextlib

    from torch.nn.parallel import DistributedDataParallel

    model = _model(plan)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_step(
        model, wrapped, RANKS, lambda last: contextlib.nullcontext() if last else wrapped.no_sync()
    )


def fsdp2(plan: Any, ranks: Any) -> Callable[[Any], None]:
    import contextlib

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(plan), init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return _torch_step(model, model, RANKS, lambda last: contextlib.nullcontext())


def tp(plan: Any, ranks: Any) -> Callable[[Any], None]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = _model(plan), init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        cut = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {
            f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")
        }
        parallelize_module(
            layer,
            mesh,
            cut | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()},
        )
    head = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, head)
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    cut_up = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW(
        [{"params": whole}, {"params": cut_up}], lr=1e-4, weight_decay=0.0, fused=True
    )

    def step(batch: Any) -> None:
        tokens = _tokens(batch, 1)
        for b in batch.micro_batches:
            logits = model(
                input_ids=b.input_ids_BT, position_ids=b.position_ids_BT, use_cache=False
            ).logits
            (_loss(logits, b.targets_BT) / tokens).backward()
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            for group in (whole, cut_up)
        ]
        total = torch.stack(
            [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        ).norm()
        for group in (whole, cut_up):
            torch.nn.utils.clip_grads_with_norm_(group, 1.0, total, foreach=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def pp(plan: Any, ranks: Any) -> Callable[[Any], None]:
    """Two stages cut in the middle, 1F1B, the tied embedding's gradient summed over both."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, rank = _model(plan), ranks.rank
    half = len(model.model.layers) // 2

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = model.model
            self.trunk.layers = (
                model.model.layers[:half] if rank == 0 else model.model.layers[half:]
            )
            if rank == 0:
                self.trunk.norm = nn.Identity()

        def forward(self, x: Any, position_ids: Any) -> Any:
            given = {"input_ids": x} if rank == 0 else {"inputs_embeds": x}
            hidden = self.trunk(
                **given, position_ids=position_ids, use_cache=False
            ).last_hidden_state
            return hidden if rank == 0 else model.lm_head(hidden)

    module = Stage()
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    tied = model.model.embed_tokens.weight
    schedules: dict[int, Any] = {}
    tokens = [1.0]

    def step(batch: Any) -> None:
        tokens[0] = _tokens(batch, 1)
        ids, positions, targets = (
            torch.cat([getattr(b, field) for b in batch.micro_batches])
            for field in ("input_ids_BT", "position_ids_BT", "targets_BT")
        )
        number = len(batch.micro_batches)
        if number not in schedules:
            schedules[number] = Schedule1F1B(
                stage, number, loss_fn=lambda out, t: _loss(out, t) / tokens[0], scale_grads=False
            )
        if rank == 0:
            schedules[number].step(ids, position_ids=positions)
        else:
            schedules[number].step(target=targets, losses=[], position_ids=positions)
        dist.all_reduce(tied.grad)
        counted = [
            p.grad for p in parameters if p.grad is not None and (p is not tied or rank == 0)
        ]
        squares = torch.stack([grad.square().sum() for grad in counted]).sum()
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def zero(stage: int) -> Callable[[Any, Any], Callable[[Any], None]]:
    def make(plan: Any, ranks: Any) -> Callable[[Any], None]:
        import logging

        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = _model(plan)
        config = {
            "train_micro_batch_size_per_gpu": SHAPE["micro_batch"],
            "gradient_accumulation_steps": plan.batch.accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-4, "weight_decay": 0.0, "torch_adam": True},
            },
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

        def step(batch: Any) -> None:
            scale = RANKS * len(batch.micro_batches) / _tokens(batch, RANKS)
            for b in batch.micro_batches:
                logits = engine(
                    input_ids=b.input_ids_BT, position_ids=b.position_ids_BT, use_cache=False
                ).logits
                engine.backward(_loss(logits, b.targets_BT) * scale)
                engine.step()

        return step

    return make


BY_HAND: dict[str, Callable[[Any, Any], Callable[[Any], None]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tp": tp,
    "pp": pp,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
}


if __name__ == "__main__":
    main()
