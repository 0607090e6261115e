"""A real vLLM 0.32 on the CPU: hand-overs of weights and of adapters, seeds, stop texts, a dead server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config import rollouts as c
from drumline.rl.generate import Completion, Request
from drumline.rl.sampler_check import expected_rounding_gap
from drumline.rl.vllm import RemoteVLLM
from tests.harness import column, drumline, start_drumline, write_config
from tests.loopback import until
from tests.servers.server import NEEDS_VLLM, RealServer
from tests.tiny import read_model, tiny_model_dir, tiny_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200), NEEDS_VLLM]
SECONDS_OF_A_RUN = 180
TEXTS = ["The", "What is two plus three?", "one two three", "Every rank keeps in step", "Rome"]
REQUESTS = [Request(tiny_tokenizer().encode(text), (i, 0)) for i, text in enumerate(TEXTS)]
# The most that rounding explains between two log-probs of a token, in nats.
ROUNDING = expected_rounding_gap("fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64, since vLLM's kernels take no smaller ones than 32."""
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "llama", hidden=256)


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(model, tmp_path_factory.mktemp("vllm") / "log.txt")
    yield server
    server.stop()


@pytest.fixture
def server(process: RealServer) -> RealServer:
    """The one server of this file, with the weights that it was first started with."""
    if not process.start():
        process.restore()
    return process


def client(server: RealServer, **options: Any) -> RemoteVLLM:
    config = c.VLLMGenerator(**{"url": server.url, "max_new_tokens": 12, **options})
    return RemoteVLLM(config, tiny_tokenizer(), 7)


@torch.no_grad()
def mean_gap(model: Any, completions: list[Completion]) -> float:
    """Return the mean of |log p_server − log p_model| over the tokens of REQUESTS' completions."""
    differences = []
    for request, completion in zip(REQUESTS, completions, strict=True):
        tokens = torch.tensor([request.tokens + completion.tokens])
        log_probs = model(tokens).logits[0].float().log_softmax(-1)
        first = len(request.tokens)
        for place, token in enumerate(completion.tokens):
            expected = float(log_probs[first + place - 1, token])
            differences.append(abs(completion.log_probs[place] - expected))
    return sum(differences) / len(differences)


def write_grpo(folder: Path, server: RealServer, generator: dict[str, Any], **more: Any) -> Path:
    """Write the config of two rollouts of GRPO that sample on the server."""
    sampler = {"kind": "vllm", "url": server.url, "max_new_tokens": 12, **generator}
    reward = {"kind": "regex", "pattern": "[aeiou]", "full": False}
    grpo = {"kind": "grpo", "group_size": 4, "generator": sampler, "rewards": [reward]}
    sections: dict[str, Any] = {
        "algorithm": grpo,
        "batch": {"global_samples": 8, "micro_batch": 4},
        "run": {"steps": 2},
        "data": {"eval": []},
    }
    return write_config(folder, server.model, **{**sections, **more})


@pytest.mark.claim("a vLLM server samples from the policy after it got all weights")
def test_a_server_samples_from_the_policy_after_it_got_all_weights(
    server: RealServer, tmp_path: Path
) -> None:
    finished = drumline("train", write_grpo(tmp_path, server, {}), timeout=SECONDS_OF_A_RUN)

    assert finished.code == 0, finished.out + finished.err

    gaps = column(tmp_path / "run", "sampler_gap", "rollout")

    assert len(gaps) == 2
    assert max(gaps) < ROUNDING

    # The policy has changed by more than that in the first step, so old weights would have shown.
    completions = client(server, weights="none").generate(REQUESTS, 5)

    assert mean_gap(read_model(server.model), completions) > 2 * ROUNDING


LORA = {"kind": "lora", "r": 8, "alpha": 32}


@pytest.mark.claim("a vLLM server samples from the policy after it got a LoRA adapter alone")
@pytest.mark.parametrize(
    "adapter",
    [{**LORA, "targets": "attention"}, {**LORA, "targets": "all-linear", "rslora": True}],
    ids=["attention", "all-linear-rslora"],
)
def test_a_server_samples_from_the_policy_after_it_got_the_adapter_alone(
    server: RealServer, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    config = write_grpo(tmp_path, server, {"weights": "adapter"}, adapter=adapter)
    finished = drumline("train", config, timeout=SECONDS_OF_A_RUN)

    assert finished.code == 0, finished.out + finished.err

    gaps = column(tmp_path / "run", "sampler_gap", "rollout")

    assert len(gaps) == 2
    assert max(gaps) < ROUNDING

    (name,) = server.adapters()

    assert name.startswith("drumline-") and name.endswith("-1"), "the second one has replaced it"

    # The server's base model is as it was, and the adapter changes what it computes.
    base = read_model(server.model)
    asked = client(server, weights="none")

    assert mean_gap(base, asked.generate(REQUESTS, 5)) < ROUNDING

    asked.pool.servers[0].model = name

    assert mean_gap(base, asked.generate(REQUESTS, 5)) > 2 * ROUNDING


def test_the_same_seed_gives_the_same_completions(server: RealServer) -> None:
    first = client(server).generate(REQUESTS, 5)
    again = client(server, batch=2).generate(REQUESTS, 5)
    later = client(server).generate(REQUESTS, 6)

    assert [completion.tokens for completion in again] == [each.tokens for each in first]

    for completion, other in zip(again, first, strict=True):
        assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-4)

    assert [completion.tokens for completion in later] != [each.tokens for each in first]
    assert mean_gap(read_model(server.model), first) < ROUNDING


def test_completions_end_with_a_stop_text(server: RealServer) -> None:
    tokenizer = tiny_tokenizer()
    unstopped = client(server, max_new_tokens=32).generate(REQUESTS, 5)
    letter = next(each for each in tokenizer.decode(unstopped[0].tokens)[4:] if each.isalpha())
    completions = client(server, max_new_tokens=32, stop=(letter,)).generate(REQUESTS, 5)

    for completion, whole in zip(completions, unstopped, strict=True):
        text = tokenizer.decode(completion.tokens)
        assert completion.tokens == whole.tokens[: len(completion.tokens)]

        if letter in text:
            assert completion.ended
            assert letter not in tokenizer.decode(completion.tokens[:-1])
        else:
            assert completion.tokens == whole.tokens

    assert completions[0].ended


def test_a_server_that_is_killed_in_a_rollout_is_one_line(
    server: RealServer, tmp_path: Path
) -> None:
    run = start_drumline("train", write_grpo(tmp_path, server, {"max_new_tokens": 384}))
    until(lambda: server.under_way() > 0 or run.poll() is not None, SECONDS_OF_A_RUN)
    server.kill()
    _, err = run.communicate(timeout=SECONDS_OF_A_RUN)
    errors = [line for line in err.splitlines() if line.startswith("error:")]

    assert run.returncode not in (0, None)
    assert len(errors) == 1, err
    assert f"{server.url}/v1/completions" in errors[0]
    assert "start it with `vllm serve MODEL`" in errors[0]
    assert "Traceback" not in err
