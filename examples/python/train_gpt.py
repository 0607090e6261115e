"""A GPT in plain torch on the bytes of Python's own modules, with a loss of its own: cross-entropy and a z-loss (Chowdhery et al. 2022).

python examples/python/train_gpt.py launch.nproc=2 strategy=zero3
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import drumline

Z_LOSS = 1e-4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = self.qkv(self.norm_1(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed_BHTK = scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTK.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, length: int = 128, width: int = 96, depth: int = 4, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.apply(self._begin)
        self.head.weight = self.tokens.weight  # tied

    @staticmethod
    def _begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Bytes(torch.utils.data.Dataset[torch.Tensor]):
    """Stretches of `length` + 1 bytes of Python's modules, one behind the other."""

    def __init__(self, modules: list[str], length: int = 128) -> None:
        folder = Path(torch.__file__).parent / "nn" / "modules"
        text = b"".join((folder / f"{name}.py").read_bytes() for name in modules)
        self.bytes_N = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes_N) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.bytes_N[index * self.length : (index + 1) * self.length + 1].long()


def objective(model: nn.Module, batch_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits_BTV = model(batch_BT[:, :-1]).float()
    log_z_BT = logits_BTV.logsumexp(-1)
    z_loss = Z_LOSS * log_z_BT.square().sum()
    loss = cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten(), reduction="sum")
    return loss + z_loss, {"z_loss": z_loss}


def tokens(batch_BT: torch.Tensor) -> int:
    """What the loss is divided by."""
    return batch_BT[:, 1:].numel()


if __name__ == "__main__":
    source = {"kind": "python", "path": f"{__file__}:Bytes"}
    config = {
        "model": {"kind": "python", "path": f"{__file__}:GPT", "units": ["Block"]},
        "algorithm": {"kind": "python", "path": f"{__file__}:objective", "weight": f"{__file__}:tokens"},
        "data": {
            "train": [{**source, "options": {"modules": ["conv", "rnn", "transformer", "activation"]}}],
            "eval": [{**source, "options": {"modules": ["linear"]}}],
        },
        "batch": {"global_samples": 16, "micro_batch": 8},
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1},
        "schedule": {"warmup_ratio": 0.05},
        "run": {"steps": 200},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(f"held-out loss {run.metrics['eval/loss']:.3f} nats a byte; the weights are in {run.export}")
