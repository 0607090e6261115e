"""Ask a vLLM without a server: run by the Python of vLLM's environment, which has no other package of
the project. `python offline_engine.py QUESTION ANSWER` reads a JSON file and writes another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    question = json.loads(Path(sys.argv[1]).read_text())

    from vllm import LLM

    engine = LLM(model=question["model"], **question["options"])
    asked: dict[str, Any] = {
        "completions": complete,
        "embeddings": embed,
        "expert_factors": save_expert_factors,
    }
    answer = asked[question["kind"]](engine, question)
    Path(sys.argv[2]).write_text(json.dumps(answer))


def read_prompts(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Return vLLM's prompts, with the images of those that have any."""
    prompts = []
    for prompt in question["prompts"]:
        made = {"prompt_token_ids": prompt["tokens"]}
        if prompt["images"]:
            from PIL import Image

            images = [Image.open(path).convert("RGB") for path in prompt["images"]]
            made["multi_modal_data"] = {"image": images}
        prompts.append(made)
    return prompts


def complete(engine: Any, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the likeliest completions, with the log-probs of all tokens after the first."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=question["new_tokens"],
        ignore_eos=True,
        prompt_logprobs=0,
        logprobs=0,
    )
    answers = []
    for output in engine.generate(read_prompts(question), params):
        completion = output.outputs[0]
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        choices = [*output.prompt_logprobs, *completion.logprobs]
        log_probs = []
        for token, chosen in zip(tokens[1:], choices[1:], strict=True):
            log_probs.append(chosen[token].logprob)
        answers.append({"tokens": tokens, "log_probs": log_probs})
    return answers


def embed(engine: Any, question: dict[str, Any]) -> list[list[float]]:
    """Return an embedding for each prompt."""
    outputs = engine.embed(read_prompts(question))
    return [[float(number) for number in output.outputs.embedding] for output in outputs]


def save_expert_factors(engine: Any, question: dict[str, Any]) -> list[str]:
    """Load an adapter, and save what it adds to the experts of each layer to a file.

    Return the names of the layers that it reaches.
    """
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", 1, question["adapter"], is_3d_lora_weight=True)
    assert engine.llm_engine.add_lora(request)
    (names,) = engine.collective_rpc(_save_products, args=(question["products"],))
    return list(names)


def _save_products(worker: Any, path: str) -> list[str]:
    """Save the product of the factors of each expert, as vLLM's worker has loaded them."""
    from safetensors.torch import save_file

    products = {}
    names = []
    for name, module in worker.model_runner.model.named_modules():
        if type(module).__name__ != "FusedMoEWithLoRA":
            continue
        names.append(name)
        (slot,) = module.adapter_enabled.nonzero()[:, 0].tolist()
        pairs = {
            "gate": (module.w13_lora_b_stacked[0], module.w13_lora_a_stacked[0]),
            "up": (module.w13_lora_b_stacked[1], module.w13_lora_a_stacked[1]),
            "down": (module.w2_lora_b_stacked[0], module.w2_lora_a_stacked[0]),
        }
        for part, (second, first) in pairs.items():
            products[f"{name}.{part}"] = (second[slot] @ first[slot]).contiguous()
    save_file(products, path)
    return names


if __name__ == "__main__":
    main()
