"""A GPT in plain torch on the bytes of Python's own modules, with a loss of its own: cross-entropy and a z-loss (Chowdhery et al. 2022).

python examples/python/train_gpt.py launch.nproc=2 strategy=zero3
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import drumline

Z_LOSS = 1e-4


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


def objective(
    model: nn.Module, batch_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
        "model": {
            "kind": "python",
            "path": f"{Path(__file__).with_name('gpt.py')}:GPT",
            "options": {"vocabulary": 256, "length": 128},
        },
        "algorithm": {
            "kind": "python",
            "path": f"{__file__}:objective",
            "weight": f"{__file__}:tokens",
        },
        "data": {
            "train": [
                {**source, "options": {"modules": ["conv", "rnn", "transformer", "activation"]}}
            ],
            "eval": [{**source, "options": {"modules": ["linear"]}}],
        },
        "batch": {"global_samples": 16, "micro_batch": 8},
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1},
        "schedule": {"warmup_ratio": 0.05},
        "run": {"steps": 200},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(
        f"held-out loss {run.metrics['eval/loss']:.3f} nats a byte; the weights are in {run.export}"
    )
