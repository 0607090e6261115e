"""A rank of test_rollout_gather: samples its share of the requests and writes down all completions
that it then has; with urls of servers, by these servers."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tests.distributed.ranks import share_groups


def load_model(model_dir: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def vllm(model_dir: str, out: Path, urls: list[str]) -> dict[str, Any]:
    import torch

    from drumline.config import rollouts as c
    from drumline.errors import DrumlineError
    from drumline.rl.build import RolloutFiles, build_generator, lost_servers
    from drumline.rl.generate import HFGenerator, Request
    from drumline.rl.restarts import CheckedSampling
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = load_model(model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    config = c.VLLMGenerator(url=urls, max_new_tokens=8)
    files = RolloutFiles(run_dir=out.parent)
    made, refresh = build_generator(config, tokenizer, 3, None, lambda: None, files=files)
    assert refresh is not None
    refresh(model.named_parameters(remove_duplicate=False))
    requests = [Request([5, 6, 7 + index], (index, 0)) for index in range(5)]
    local = HFGenerator(c.HFGenerator(max_new_tokens=8), model, tokenizer, 3)
    sampled = CheckedSampling(made, requests, 2, restore_weights=refresh.restore).finish()
    found: dict[str, Any] = {
        "made": [completion.tokens for completion in sampled],
        "expected": [completion.tokens for completion in local.generate(requests, 2)],
    }
    # What each rank knows of the servers after the next hand-over.
    refresh(model.named_parameters(remove_duplicate=False))
    found["lost"] = list(lost_servers(made))
    in_the_way = out.parent / "in-the-way"
    in_the_way.write_text("")
    blocked = config.model_copy(update={"folder": str(in_the_way), "url": urls[0]})
    _, refresh = build_generator(blocked, tokenizer, 3, None, lambda: None)
    assert refresh is not None
    try:
        refresh(model.named_parameters())
    except DrumlineError as error:
        found["failure"] = str(error)
    return found


def sample(model_dir: str) -> dict[str, Any]:
    from drumline.config.rollouts import HFGenerator as Config
    from drumline.rl.generate import HFGenerator, Request, generate_together
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = load_model(model_dir)
    model.generation_config.eos_token_id = list(range(0, 320, 12))
    generator = HFGenerator(Config(batch=3, max_new_tokens=12), model, tokenizer, seed=3)
    text = tokenizer.encode("Every rank keeps in step with the drum: one, two, three, four.")
    many = []
    for index in range(7):
        prompt = text[: 2 + 3 * (index % 4)]
        many.append(Request(prompt, (index // 2, index % 2)))
    found = {}
    for name, requests in {"many": many, "one": many[:1], "none": []}.items():
        completions = generate_together(generator, requests, step=2)
        found[name] = [astuple(completion) for completion in completions]
    return found


def main(model_dir: str, out: str, *urls: str) -> None:
    from drumline.dist.start import start, stop

    share_groups()
    ranks = start("cpu", "gloo", 60.0)
    if urls:
        found = vllm(model_dir, Path(out), list(urls))
    else:
        found = sample(model_dir)
    Path(f"{out}-{ranks.rank}.json").write_text(json.dumps(found))
    stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
