"""Liger's kernels under Triton's interpreter, against torch: rotary embeddings and the cross-entropy of a head. RMS norms and gated parts
fail in the interpreter of triton 3.9 (shared/facts.md); their values stand in tests/gpu/test_kernels.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
CODE = """
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from drumline.models.kernels import linear_cross_entropy
from drumline.models.losses import LinearHead, linear_cross_entropy as plain
from liger_kernel.transformers.rope import liger_rotary_pos_emb

torch.manual_seed(0)
q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
angles = torch.randn(2, 8, 8)
cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
for mine, other in zip(liger_rotary_pos_emb(q.clone(), k.clone(), cos, sin), apply_rotary_pos_emb(q, k, cos, sin)):
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)

targets = torch.randint(0, 50, (24,))
targets[::5] = -100
found = []
for function in (lambda *a: linear_cross_entropy(*a), lambda h, w, b, t: plain(h, LinearHead(w, b), t, chunk=7)):
    torch.manual_seed(1)
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    loss, correct = function(hidden, weight, None, targets)
    (loss * 0.3).backward()
    found.append((loss, correct & (targets >= 0), hidden.grad, weight.grad))
for mine, other in zip(*found):
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_the_values_of_torch() -> None:
    pytest.importorskip("liger_kernel", reason="pip install --no-deps liger-kernel triton (286 MB)")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
