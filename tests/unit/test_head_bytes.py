"""The planner's bytes of a head whose logits all exist at once, against the tensors that torch holds.

Every tensor that an operator of the loss or of its backward makes is counted until it is freed.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumline.config.load import Loaded, load_text
from drumline.models.losses import LinearHead, linear_log_probs, linear_summed_loss
from drumline.plan.estimate import Estimate
from drumline.planner.cost.activations import head_bytes
from drumline.planner.question import build_request
from drumline.planner.search.search import evaluate


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are made within the context, and their peak."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in existing}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class Peaks(NamedTuple):
    """The most bytes in the loss and in its backward."""

    loss: int
    backward: int


class CappedHead(LinearHead):
    """A head whose logits are capped as Gemma 2 caps them."""

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = super().logits(hidden_ND) / 30.0
        logits_NV = torch.tanh(logits_NV)
        return logits_NV * 30.0


def peaks_of(
    kind: str,
    tokens: int,
    vocabulary: int,
    hidden: int,
    outputs: set[str],
    head_class: type[LinearHead] = LinearHead,
) -> Peaks:
    """Return the peaks of an objective over all logits, in the way that `kind` computes."""
    dtype = torch.bfloat16 if kind == "low" else torch.float32
    hidden_ND = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    targets_N = torch.randint(vocabulary, (tokens,))
    head = head_class(weight_VD)
    autocast: Any = contextlib.nullcontext()
    if kind == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with LiveBytes([hidden_ND, weight_VD, targets_N]) as live:
        with autocast:
            if outputs == {"cross_entropy"}:
                loss = linear_summed_loss(hidden_ND, head, targets_N, 0)
            else:
                with_entropy = "entropy" in outputs
                chosen_N, entropy_N = linear_log_probs(
                    hidden_ND, head, targets_N, 0, entropy=with_entropy
                )
                loss = chosen_N.sum()
                if entropy_N is not None:
                    loss = loss + entropy_N.sum()
        in_loss = live.peak
        live.peak = 0
        loss.backward()
    return Peaks(in_loss, live.peak)


@pytest.mark.parametrize("kind", ["fp32", "autocast", "low"])
@pytest.mark.parametrize(
    "outputs", [["cross_entropy"], ["log_probs"], ["log_probs", "entropy"]], ids="-".join
)
def test_all_logits_are_counted_as_torch_holds_them(kind: Any, outputs: Any) -> None:
    """Logits are all that counts here: there are many tokens, and the width is small."""
    counted = head_bytes(kind, 1000, 8, 0, 512, True, frozenset(outputs))
    measured = peaks_of(kind, 512, 1000, 8, set(outputs))
    assert counted.loss == pytest.approx(measured.loss, rel=0.02)
    assert counted.gradients == pytest.approx(measured.backward, rel=0.02)


@pytest.mark.parametrize("kind", ["fp32", "autocast", "low"])
@pytest.mark.parametrize("outputs", [["cross_entropy"], ["log_probs"]], ids="-".join)
def test_the_tanh_of_capped_logits_is_counted(kind: Any, outputs: Any) -> None:
    counted = head_bytes(kind, 1000, 8, 0, 512, True, frozenset(outputs), True)
    measured = peaks_of(kind, 512, 1000, 8, set(outputs), CappedHead)
    assert counted.loss == pytest.approx(measured.loss, rel=0.02)
    assert counted.gradients == pytest.approx(measured.backward, rel=0.02)


@pytest.mark.parametrize(("kind", "entry"), [("fp32", 4), ("autocast", 6), ("low", 2)])
def test_the_gradient_of_a_head_comes_after_the_logits(kind: Any, entry: int) -> None:
    """The head's weight is all that counts here. Under autocast its gradient is made twice."""
    counted = head_bytes(kind, 1000, 512, 0, 8, True)
    measured = peaks_of(kind, 8, 1000, 512, {"cross_entropy"})
    assert counted.gradients == pytest.approx(measured.backward, rel=0.02)
    assert counted.gradients == pytest.approx(entry * 1000 * 512, rel=0.05)


def test_logits_of_eight_rows() -> None:
    """12 bytes for each logit in backward and 10 in the loss: nothing else is there beside them."""
    tokens = 8 * 2048
    counted = head_bytes("low", 50368, 4096, 0, tokens, True)
    assert counted.loss == 10 * tokens * 50368
    assert counted.gradients == 12 * tokens * 50368
    assert counted.backward == counted.gradient_after_head == 2 * 50368 * 4096


class Row(NamedTuple):
    """A run of llm-foundry's table (scripts/train/benchmarking/README.md of mosaicml/llm-foundry)."""

    card: str
    width: int
    layers: int
    heads: int
    length: int
    rows: int
    checkpointing: str


# Those that come nearest to the limit of their card. All of them ran.
RAN = {
    "13b": Row("h100-80g", 5120, 40, 40, 16384, 3, "full"),
    "7b": Row("h100-80g", 4096, 32, 32, 4096, 16, "full"),
    "1b": Row("a100-40g", 2048, 24, 16, 2048, 8, "none"),
    "760m": Row("a100-80g", 1536, 24, 12, 2048, 24, "none"),
    "350m": Row("a100-40g", 1024, 24, 16, 2048, 16, "none"),
    "125m": Row("a100-40g", 768, 12, 12, 2048, 26, "none"),
}


def estimate_of(row: Row, algorithm: dict[str, Any]) -> Estimate:
    shape = {
        "layers": row.layers,
        "hidden": row.width,
        "heads": row.heads,
        "intermediate": round(8 * row.width / 3),
        "vocabulary": 50368,
        "tied": True,
    }
    sections = {
        "model": {"shape": shape},
        "cluster": {"device": row.card, "per_node": 8},
        "data": {"max_length": row.length, "train": [{"kind": "file", "path": "rows.jsonl"}]},
        "batch": {"micro_batch": row.rows, "accumulation": 1},
        "precision": "bf16",
        "strategy": "fsdp2",
        "algorithm": {"kind": "pretrain", **algorithm},
        "compile": {"enabled": True},
        "memory": {"activation_checkpointing": row.checkpointing},
    }
    loaded = Loaded(load_text(json.dumps(sections), [], "row"), Path("row"), Path())
    question = build_request(loaded, lambda *_: None).question
    return evaluate(question, question.config, "row").estimate


@pytest.mark.parametrize("name", RAN)
def test_runs_that_ran_are_not_refused(name: str) -> None:
    """Their loss was one fused kernel, to which the default comes nearest.

    torch's loss of all logits holds 12 bytes of each.
    """
    row = RAN[name]
    chunked = estimate_of(row, {})
    assert chunked.verdict in ("fits", "tight")

    plain = estimate_of(row, {"loss_chunk": 0})
    assert plain.memory.logits == 12 * row.rows * row.length * 50368
    assert plain.memory.reserved > chunked.memory.reserved
