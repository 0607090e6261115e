"""A residual network (He et al. 2016) in plain torch, on scikit-learn's digits, with batch norms synchronised over the ranks.

python examples/python/train_resnet.py launch.nproc=2
"""

import sys
from pathlib import Path

import drumline

if __name__ == "__main__":
    here = Path(__file__).parent
    source = {"kind": "python", "path": f"{here}/vit.py:digits"}
    config = {
        "model": {"kind": "python", "path": f"{here}/resnet.py:ResNet", "sync_batchnorm": True},
        "algorithm": {"kind": "python", "path": f"{here}/train_vit.py:objective"},
        "data": {
            "train": [source],
            "eval": [{**source, "options": {"held_out": True}}],
        },
        "batch": {"global_samples": 32, "accumulation": 1},
        "optimizer": {"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4},
        "run": {"epochs": 5},
    }
    run = drumline.train(config, sys.argv[1:], display=True)
    print(
        f"{run.metrics['eval/accuracy']:.1%} of the held-out digits are right; the weights are in {run.export}"
    )
