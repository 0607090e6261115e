"""A loop by hand, as torchtitan's: FSDP2 in bf16, fused AdamW, clip_grad_norm_ and a cross-entropy.

`python -m tests.fake_gpu.plain_loop MODEL OUT KIND...`, once a rank: trains a Llama on tokens by
chance, anew for each kind, and writes what its ledger saw to `OUT/KIND/ledger-RANK.json`. The kinds:

- `whole`: rows without documents, all logits at once;
- `chunks`: the same, with the logits of `CHUNK` tokens in memory at once. As Drumline's, its loss
  computes the gradients in the forward, so that no logits are computed twice;
- `packed`: two documents a row, which torch's variable-length attention keeps apart;
- `lora`: PEFT's adapters over a frozen model, rows without documents, all logits at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from tests.fake_gpu.ledger import LEDGER
from tests.fake_gpu.ledger_file import ledger_path

STEPS = 4
SAMPLES = 2  # of a rank
LENGTH = 96  # tokens of a sample
DOCUMENT = LENGTH // 2  # tokens of each document of a packed row
CHUNK = 24  # tokens: eight chunks
RANK_OF_ADAPTERS = 4


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of a head over hidden states, with its gradients, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        number = len(targets_N)
        grad_hidden = torch.empty_like(hidden_ND)
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        loss_sum = torch.zeros((), device=hidden_ND.device)
        weight = weight_VD.detach().requires_grad_()

        for start in range(0, number, CHUNK):
            rows = slice(start, start + CHUNK)
            hidden = hidden_ND[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = nn.functional.linear(hidden, weight).float()
                loss = nn.functional.cross_entropy(logits, targets_N[rows], reduction="sum")
            of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
            grad_hidden[rows] = of_hidden
            grad_weight += of_weight
            loss_sum += loss.detach()

        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.number = number
        ctx.weight_dtype = weight_VD.dtype
        return loss_sum / number

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad_loss / ctx.number
        grad_weight = grad_weight * factor
        return grad_hidden * factor, grad_weight.to(ctx.weight_dtype), None


class WithLoss(nn.Module):
    """A causal language model and its mean loss over a batch."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.model = model
        self.kind = kind

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        inputs_BT = tokens_BT[:, :-1]
        targets_N = tokens_BT[:, 1:].flatten()
        if self.kind == "chunks":
            trunk = self.model.model(input_ids=inputs_BT, use_cache=False)
            hidden_ND = trunk.last_hidden_state.flatten(0, 1)
            loss: Tensor = ChunkedLoss.apply(hidden_ND, self.model.lm_head.weight, targets_N)
            return loss

        out = self.model(input_ids=inputs_BT, position_ids=positions_BT, use_cache=False)
        return nn.functional.cross_entropy(out.logits.float().flatten(0, 1), targets_N)


def tokens_first(heads_BHTD: Tensor) -> Tensor:
    return heads_BHTD.transpose(1, 2).flatten(0, 1)


def attend_by_documents(model: Any, device: torch.device) -> None:
    """Let a model attend within the documents of packed rows alone."""
    tokens = SAMPLES * LENGTH
    bounds_N = torch.arange(0, tokens + 1, DOCUMENT, dtype=torch.int32, device=device)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        rows, _, length, size = query.shape
        output = varlen_attn(
            tokens_first(query),
            tokens_first(key),
            tokens_first(value),
            bounds_N,
            bounds_N,
            DOCUMENT,
            DOCUMENT,
            window_size=(-1, 0),
            scale=options["scaling"],
            enable_gqa=True,
        )
        return output.reshape(rows, length, -1, size), None

    AttentionInterface.register("by_hand", attention)
    AttentionMaskInterface.register("by_hand", lambda *_, **__: None)
    model.set_attn_implementation("by_hand")


def with_adapters(model: Any) -> Any:
    """Return a frozen model with PEFT's adapters on the linear layers of its blocks."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK_OF_ADAPTERS, target_modules="all-linear"))


def main(model_folder: str, out: str, *kinds: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for kind in kinds:
        LEDGER.clear()
        train(model_folder, kind, device, mesh)
        folder = Path(out) / kind
        folder.mkdir(parents=True, exist_ok=True)
        LEDGER.write(ledger_path(folder, rank), torch.cuda.max_memory_allocated())
    dist.destroy_process_group()


def train(model_folder: str, kind: str, device: torch.device, mesh: DeviceMesh) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    positions = None
    if kind == "packed":
        attend_by_documents(model, device)
        positions = torch.arange(DOCUMENT).repeat(SAMPLES, LENGTH // DOCUMENT).pin_memory()
    blocks = model.model.layers
    if kind == "lora":
        model = with_adapters(model)
    module = WithLoss(model, kind)
    module.to(device)
    module.train()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)

    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())

    for step in range(STEPS):
        drawn = torch.randint(3, 300, (SAMPLES, LENGTH + 1), generator=generator)
        batch = drawn.pin_memory()

        LEDGER.begin_step(step)
        tokens_BT = batch.cuda(non_blocking=True)
        positions_BT = None
        if positions is not None:
            positions_BT = positions.cuda(non_blocking=True)
        loss = module(tokens_BT, positions_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    LEDGER.begin_step(STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
