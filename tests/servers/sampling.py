"""What tests of a real server that samples share: requests, a client, runs that sample on it, and how
far it is from a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drumline.config import rollouts as c
from drumline.rl.generate import Completion, Request
from drumline.rl.sampler_check import NEW_TOKENS, PROMPTS, expected_rounding_gap
from drumline.rl.vllm import RemoteVLLM
from tests.harness import column, drumline, write_config
from tests.servers.server import RealServer
from tests.tiny import tiny_tokenizer

SECONDS_OF_A_RUN = 180
TEXTS = ["The", "What is two plus three?", "one two three", "Every rank keeps in step", "Rome"]
REQUESTS = [Request(tiny_tokenizer().encode(text), (i, 0)) for i, text in enumerate(TEXTS)]
TOKENS_OF_A_PROBE = PROMPTS * NEW_TOKENS
# The most that rounding explains between two log-probs of a token, in nats.
ROUNDING = expected_rounding_gap("fp32")


TWO_RANKS = {"nproc": 2}
FSDP2 = {"strategy": "fsdp2", "launch": TWO_RANKS}
TENSOR_PARALLEL = {"strategy": {"kind": "fsdp2", "tp": 2}, "launch": TWO_RANKS}
NETWORK = {"transport": "network"}


def client(server: RealServer, **options: Any) -> RemoteVLLM:
    """Return a client that asks the server for completions.

    `options`: of the section `algorithm.generator`.
    """
    config = c.VLLMGenerator(**{"url": server.url, "max_new_tokens": 12, **options})
    return RemoteVLLM(config, tiny_tokenizer(), 7)


@torch.no_grad()
def mean_gap(model: Any, completions: list[Completion]) -> float:
    """Return the mean of |log p_server − log p_model| over the tokens of completions, in nats.

    Args:
        model: A model of transformers.
        completions: What the server answered to REQUESTS.
    """
    differences = []
    for request, completion in zip(REQUESTS, completions, strict=True):
        tokens = torch.tensor([request.tokens + completion.tokens])
        log_probs = model(tokens).logits[0].float().log_softmax(-1)
        first = len(request.tokens)
        for place, token in enumerate(completion.tokens):
            expected = float(log_probs[first + place - 1, token])
            differences.append(abs(completion.log_probs[place] - expected))
    return sum(differences) / len(differences)


def write_grpo(
    folder: Path,
    server: RealServer,
    generator: dict[str, Any],
    algorithm: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write the config of two rollouts of GRPO that sample on the server.

    Args:
        folder: The folder of the run.
        server: The server, which has the policy's model.
        generator: Further keys of the generator.
        algorithm: Further keys of the algorithm.
        more: Sections of the config that replace those of this function.
    """
    sampler = {"kind": "vllm", "url": server.url, "max_new_tokens": 12, **generator}
    # About half of the completions have one, so that there is something to learn.
    reward = {"kind": "regex", "pattern": "e", "full": False}
    grpo = {"kind": "grpo", "group_size": 4, "generator": sampler, "rewards": [reward]}
    sections: dict[str, Any] = {
        "algorithm": {**grpo, **(algorithm or {})},
        "batch": {"global_samples": 8, "micro_batch": 4},
        "run": {"steps": 2},
        "data": {"eval": [], "max_length": 448},
        "schedule": {"kind": "constant", "warmup_steps": 0},
    }
    return write_config(folder, server.model, **{**sections, **more})


def train_two_rollouts(config: Path) -> None:
    """Train, and check that the server was the policy after each hand-over.

    The run itself stops if it is not, but at a limit that may be four times as large.
    """
    finished = drumline("train", config, timeout=SECONDS_OF_A_RUN)

    assert finished.code == 0, finished.out + finished.err

    gaps = column(config.parent / "run", "sampler_gap", "rollout")

    assert len(gaps) == 2
    assert max(gaps) < ROUNDING
