"""Sampling on a GPU draws the numbers that it draws on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.config import rollouts as c
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import HFGenerator, Request, gumbel, request_seed
from tests.tiny import tiny_model_dir, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none"
)


def test_noise_is_the_same_on_both() -> None:
    seeds, positions = (
        torch.tensor([request_seed(0, 1, (row, 2)) for row in range(32)]),
        torch.arange(32),
    )
    there = gumbel(seeds.cuda(), positions.cuda(), 50_000).cpu()
    here = gumbel(seeds, positions, 50_000)
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-7)
    assert float((there != here).double().mean()) < 1e-4
    assert torch.equal(there.argmax(-1), here.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_generators_run_and_their_log_probs_are_the_models(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(tmp_path), dtype=dtype
    )
    model.to("cuda")
    tokenizer = tiny_tokenizer()
    requests = [
        Request(tokenizer.encode("one two three" * (1 + index % 3)), (index, 0))
        for index in range(8)
    ]
    made = {
        "hf": HFGenerator(c.HFGenerator(batch=3, max_new_tokens=16), model, tokenizer, 0).generate(
            requests, 0
        ),
        "continuous": ContinuousGenerator(
            c.ContinuousGenerator(batch=3, max_new_tokens=16), model, tokenizer, 0
        ).generate(requests, 0),
    }
    for completions in made.values():
        for request, completion in zip(requests, completions, strict=True):
            ids = torch.tensor([request.tokens + completion.tokens], device="cuda")
            with torch.no_grad():
                log_probs = (
                    model(ids).logits[0, len(request.tokens) - 1 : -1].float().log_softmax(-1)
                )
            expected = log_probs.gather(1, ids[0, len(request.tokens) :, None]).squeeze(1).tolist()
            assert completion.log_probs == pytest.approx(
                expected, abs=1e-4 if dtype == torch.float32 else 0.1
            )
    if dtype == torch.float32:
        assert [completion.tokens for completion in made["hf"]] == [
            completion.tokens for completion in made["continuous"]
        ]
