"""Sampling on a GPU draws the numbers that it draws on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import rollouts as c
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import HFGenerator, Request, gumbel, request_seed
from tests.gpu.stand_in import NEEDS_CUDA
from tests.tiny import tiny_model_dir, tiny_tokenizer

pytestmark = NEEDS_CUDA


def test_noise_is_the_same_on_both() -> None:
    seeds = torch.tensor([request_seed(0, 1, (row, 2)) for row in range(32)])
    positions = torch.arange(32)

    there = gumbel(seeds.cuda(), positions.cuda(), 50_000).cpu()
    here = gumbel(seeds, positions, 50_000)

    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-7)
    differs = there != here
    assert float(differs.double().mean()) < 1e-4
    assert torch.equal(there.argmax(-1), here.argmax(-1))


def log_probs(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Return the log-probability of each token of a completion, from one forward over all."""
    ids_1T = torch.tensor([prompt + completion], device="cuda")
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0]
    log_probs_TV = logits_TV[len(prompt) - 1 : -1].float().log_softmax(-1)
    sampled_T1 = ids_1T[0, len(prompt) :, None]
    chosen: list[float] = log_probs_TV.gather(1, sampled_T1).squeeze(1).tolist()
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_generators_run_and_their_log_probs_are_the_models(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model_dir(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to("cuda")
    tokenizer = tiny_tokenizer()
    requests = []
    for index in range(8):
        prompt = "one two three" * (1 + index % 3)
        requests.append(Request(tokenizer.encode(prompt), (index, 0)))
    limits = {"batch": 3, "max_new_tokens": 16}
    generators = (
        HFGenerator(c.HFGenerator(**limits), model, tokenizer, 0),
        ContinuousGenerator(c.ContinuousGenerator(**limits), model, tokenizer, 0),
    )

    sampled = []
    for generator in generators:
        completions = generator.generate(requests, 0)
        for request, completion in zip(requests, completions, strict=True):
            expected = log_probs(model, request.tokens, completion.tokens)
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            assert completion.log_probs == pytest.approx(expected, abs=tolerance)
        sampled.append([completion.tokens for completion in completions])
    if dtype == torch.float32:
        assert sampled[0] == sampled[1]
