"""A loop by hand, as torchtitan's: FSDP2 in bf16, fused AdamW, clip_grad_norm_ and a cross-entropy.

`python -m tests.fake_gpu.plain_loop MODEL OUT`, once a rank: trains a Llama on tokens by chance and
writes what its ledger saw to `OUT/ledger-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from tests.fake_gpu.ledger import LEDGER

STEPS = 4
SAMPLES, LENGTH = 2, 96  # of a rank


def main(model_folder: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.to(f"cuda:{rank}")
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        tokens = torch.randint(3, 300, (SAMPLES, LENGTH + 1), generator=generator)
        batch = tokens.pin_memory()
        LEDGER.begin_step(step)
        tokens = batch.cuda(non_blocking=True)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    LEDGER.begin_step(STEPS)
    path = Path(out) / f"ledger-{rank}.json"
    path.write_text(json.dumps({**LEDGER.seen(), "peak": torch.cuda.max_memory_allocated()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
