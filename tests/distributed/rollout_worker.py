"""A rank of test_rollout_gather: samples its share of the requests and writes down all completions that it then has; with the url of a
server, by the server."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path

from tests.distributed.ranks import share_groups


def vllm(model_dir: str, out: str, url: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from drumline.config import rollouts as c
    from drumline.dist.start import start, stop
    from drumline.errors import DrumlineError
    from drumline.rl.build import RolloutFiles, generator
    from drumline.rl.generate import HFGenerator, Request, generate_together
    from tests.tiny import tiny_tokenizer

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    config = c.VLLMGenerator(url=url, max_new_tokens=8)
    made, refresh = generator(
        config,
        tiny_tokenizer(),
        3,
        None,
        lambda: None,
        files=RolloutFiles(run_dir=Path(out).parent),
    )
    assert refresh is not None
    refresh(model.named_parameters(remove_duplicate=False))
    requests = [Request([5, 6, 7 + index], (index, 0)) for index in range(5)]
    found: dict[str, object] = {
        "made": [c.tokens for c in generate_together(made, requests, step=2)]
    }
    local = HFGenerator(c.HFGenerator(max_new_tokens=8), model, tiny_tokenizer(), 3)
    found["expected"] = [c.tokens for c in local.generate(requests, 2)]
    in_the_way = Path(out).parent / "in-the-way"
    in_the_way.write_text("")
    _, refresh = generator(
        config.model_copy(update={"folder": str(in_the_way)}),
        tiny_tokenizer(),
        3,
        None,
        lambda: None,
    )
    assert refresh is not None
    try:
        refresh(model.named_parameters())
    except DrumlineError as error:
        found["failure"] = str(error)
    Path(f"{out}-{ranks.rank}.json").write_text(json.dumps(found))
    stop()


def main(model_dir: str, out: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from drumline.config.rollouts import HFGenerator as Config
    from drumline.dist.start import start, stop
    from drumline.rl.generate import HFGenerator, Request, generate_together
    from tests.tiny import tiny_tokenizer

    share_groups()
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
    (vllm if len(sys.argv) == 4 else main)(*sys.argv[1:])
