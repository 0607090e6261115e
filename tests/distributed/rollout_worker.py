"""A rank of test_rollout_gather: samples its share of the requests and writes down all completions that it then has."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path


def main(model_dir: str, out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from drumline.config.algorithms import HFGenerator as Config
    from drumline.dist.start import start, stop
    from drumline.rollout.generate import HFGenerator
    from drumline.rollout.sampling import Request
    from drumline.rollout.split import generate_together
    from tests.tiny import tiny_tokenizer

    ranks = start("cpu", "gloo", 60.0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(0, 320, 12))
    generator = HFGenerator(Config(batch=3, max_new_tokens=12), model, tiny_tokenizer(), seed=3)
    text = tiny_tokenizer().encode("Every rank keeps in step with the drum: one, two, three, four.")
    many = [Request(text[: 2 + 3 * (index % 4)], (index // 2, index % 2)) for index in range(7)]
    found = {
        name: [astuple(c) for c in generate_together(generator, requests, step=2)]
        for name, requests in {"many": many, "one": many[:1], "none": []}.items()
    }
    Path(f"{out}-{ranks.rank}.json").write_text(json.dumps(found))
    stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
