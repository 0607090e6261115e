"""A real vLLM 0.32 on the CPU: hand-overs of weights and of adapters, seeds, stop texts, a dead server,
and the log-probs of a teacher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.algorithms.distill.spec import DistillConfig
from drumline.config import rollouts as c
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.models.choices import top_choices
from drumline.rl.build import RolloutFiles, build_generator, lost_servers
from drumline.rl.restarts import CheckedSampling
from drumline.rl.teacher_servers import TaughtText, TeacherServers
from drumline.rl.weight_network import HostTensors
from tests.harness import column, drumline, start_drumline
from tests.loopback import until
from tests.servers.sampling import (
    FSDP2,
    NETWORK,
    REQUESTS,
    ROUNDING,
    SECONDS_OF_A_RUN,
    TENSOR_PARALLEL,
    TOKENS_OF_A_PROBE,
    client,
    mean_gap,
    train_two_rollouts,
    write_grpo,
)
from tests.servers.server import MOST_RANK, NEEDS_VLLM, RealServer
from tests.tiny import read_model, tiny_model_dir, tiny_tokenizer
from tests.vllm_stub import StubServer

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200), NEEDS_VLLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64, since vLLM's kernels take no smaller ones than 32."""
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "llama", hidden=256)


@pytest.fixture(scope="module")
def teacher_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server without adapters, which gives the log-probs of prompts on a CPU, too."""
    log = tmp_path_factory.mktemp("teacher") / "log.txt"
    server = RealServer(model, log, has_adapters=False, has_plug_in=False)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("transport", "sections"),
    [({}, {}), ({}, FSDP2), ({}, TENSOR_PARALLEL), (NETWORK, {}), (NETWORK, FSDP2)],
    ids=["alone", "fsdp2", "tp", "network", "network-fsdp2"],
)
def test_a_server_samples_from_the_policy_after_it_got_all_weights(
    server: RealServer, tmp_path: Path, transport: dict[str, Any], sections: dict[str, Any]
) -> None:
    config = write_grpo(tmp_path, server, transport, **sections)
    train_two_rollouts(config)

    # The policy has changed by more than that in the first step, so old weights would have shown.
    completions = client(server, weights="none").generate(REQUESTS, 5)
    first_policy = read_model(server.model)

    assert mean_gap(first_policy, completions) > 2 * ROUNDING
    assert server.weight_version().endswith("-1"), "of the second hand-over"


@pytest.mark.parametrize("transport", [{}, NETWORK], ids=["folder", "network"])
def test_a_server_that_has_its_first_weights_again_gets_the_present_ones(
    server: RealServer, tmp_path: Path, transport: dict[str, Any]
) -> None:
    learned = learned_policy(server)
    config = c.VLLMGenerator(url=server.url, max_new_tokens=12, **transport)
    files = RolloutFiles(run_dir=tmp_path)
    made, refresh = build_generator(config, tiny_tokenizer(), 7, None, lambda: None, files=files)
    assert refresh is not None
    refresh(learned.named_parameters(remove_duplicate=False))
    # As after a restart that nobody has seen.
    server.restore()
    completions = CheckedSampling(made, REQUESTS, 5, restore_weights=refresh.restore).finish()

    assert mean_gap(learned, completions) < ROUNDING


def learned_policy(server: RealServer) -> Any:
    """Return a policy whose weights differ from those that the server was started with."""
    learned = read_model(server.model)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.mul_(1.1)
    return learned


def network_generator(*urls: str) -> tuple[Any, Any]:
    """Return a generator that samples on servers, and what hands them weights over the network."""
    config = c.VLLMGenerator(url=urls, max_new_tokens=12, **NETWORK)
    return build_generator(config, tiny_tokenizer(), 7, None, lambda: None)


def test_a_server_whose_weights_break_off_takes_the_next_ones(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a run that was killed while its servers read."""
    learned = learned_policy(server)
    entries = HostTensors.entries

    def broken_entries(weights: HostTensors) -> Iterator[Any]:
        for number, entry in enumerate(entries(weights)):
            if number == 7:
                raise RuntimeError("killed")
            yield entry

    made, refresh = network_generator(server.url)
    monkeypatch.setattr(HostTensors, "entries", broken_entries)

    with pytest.raises(DrumlineError, match=r"/update_weights was answered 500: .*broke off") as no:
        refresh(learned.named_parameters(remove_duplicate=False))

    assert "\n" not in no.value.line()

    monkeypatch.setattr(HostTensors, "entries", entries)
    refresh(learned.named_parameters(remove_duplicate=False))

    assert mean_gap(learned, made.generate(REQUESTS, 5)) < ROUNDING


def test_a_server_that_is_killed_while_it_reads_weights_is_lost(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learned = learned_policy(server)
    entries = HostTensors.entries
    is_read = threading.Event()
    is_killed = threading.Event()

    def slow_entries(weights: HostTensors) -> Iterator[Any]:
        for number, entry in enumerate(entries(weights)):
            yield entry
            if number == 7:
                is_read.set()
                is_killed.wait(60)

    def kill() -> None:
        is_read.wait(60)
        server.kill()
        is_killed.set()

    # The other server is a stand-in.
    with StubServer(read_model(server.model)) as other:
        made, refresh = network_generator(server.url, other.url)
        refresh(learned.named_parameters(remove_duplicate=False))
        monkeypatch.setattr(HostTensors, "entries", slow_entries)
        killing = threading.Thread(target=kill)
        killing.start()
        refresh(learned.named_parameters(remove_duplicate=False))
        killing.join()

        (url,) = lost_servers(made)
        assert url == server.url
        assert "a server is lost, the others go on" in caplog.text
        assert mean_gap(learned, made.generate(REQUESTS, 5)) < ROUNDING

        # It comes back with its first weights, and gets the present ones.
        server.start()
        other.is_dead = True
        refresh(learned.named_parameters(remove_duplicate=False))

        assert list(lost_servers(made)) == [other.url]
        assert mean_gap(learned, made.generate(REQUESTS, 5)) < ROUNDING


def test_a_server_without_the_plug_in_is_one_line(teacher_server: RealServer) -> None:
    learned = read_model(teacher_server.model)
    _, refresh = network_generator(teacher_server.url)

    with pytest.raises(DrumlineError, match=r"not configured.*pip install drumline-vllm") as no:
        refresh(learned.named_parameters(remove_duplicate=False))

    assert "\n" not in no.value.line()


LORA = {"kind": "lora", "r": 8, "alpha": 32}
ATTENTION = {**LORA, "targets": "attention"}
ALL_LINEAR = {**LORA, "targets": "all-linear", "rslora": True}


@pytest.mark.parametrize(
    ("adapter", "transport", "sections"),
    [
        (ATTENTION, {}, {}),
        (ALL_LINEAR, {}, {}),
        (ALL_LINEAR, {}, FSDP2),
        (ATTENTION, {}, TENSOR_PARALLEL),
        (ALL_LINEAR, NETWORK, {}),
        (ATTENTION, NETWORK, FSDP2),
    ],
    ids=["attention", "all-linear", "fsdp2", "tp", "network", "network-fsdp2"],
)
def test_a_server_samples_from_the_policy_after_it_got_the_adapter_alone(
    server: RealServer,
    tmp_path: Path,
    adapter: dict[str, Any],
    transport: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    generator = {"weights": "adapter", **transport}
    config = write_grpo(tmp_path, server, generator, adapter=adapter, **sections)
    train_two_rollouts(config)

    (name,) = server.adapters()

    assert name.startswith("drumline-") and name.endswith("-1"), "the second one has replaced it"

    # The server's base model is as it was, and the adapter changes what it computes.
    base = read_model(server.model)
    asked = client(server, weights="none")
    completions = asked.generate(REQUESTS, 5)

    assert mean_gap(base, completions) < ROUNDING

    asked.pool.servers[0].model = name
    adapted = asked.generate(REQUESTS, 5)

    assert mean_gap(base, adapted) > 2 * ROUNDING


def test_an_adapter_of_too_high_a_rank_is_one_line(server: RealServer, tmp_path: Path) -> None:
    adapter = {**ATTENTION, "r": 2 * MOST_RANK}
    config = write_grpo(tmp_path, server, {"weights": "adapter"}, adapter=adapter)
    finished = drumline("train", config, timeout=SECONDS_OF_A_RUN)

    assert finished.code != 0
    assert len(finished.error_lines) == 1, finished.err
    assert f"LoRA rank {2 * MOST_RANK} is greater than" in finished.error_lines[0]
    assert "a --max-lora-rank of adapter.r or more" in finished.error_lines[0]

    # The server goes on.
    assert client(server).generate(REQUESTS, 5)


def test_the_same_seed_gives_the_same_completions(server: RealServer) -> None:
    first = client(server).generate(REQUESTS, 5)
    again = client(server, batch=2).generate(REQUESTS, 5)
    later = client(server).generate(REQUESTS, 6)

    for completion, other in zip(again, first, strict=True):
        assert completion.tokens == other.tokens
        assert completion.log_probs == pytest.approx(other.log_probs, abs=ROUNDING)

    for completion, other in zip(later, first, strict=True):
        assert completion.tokens != other.tokens

    assert mean_gap(read_model(server.model), first) < ROUNDING


def test_completions_end_with_a_stop_text(server: RealServer) -> None:
    tokenizer = tiny_tokenizer()
    unstopped = client(server, max_new_tokens=32).generate(REQUESTS, 5)
    text = tokenizer.decode(unstopped[0].tokens)
    letters = [letter for letter in text[4:] if letter.isalpha()]
    letter = letters[0]
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
    before = server.generated_tokens()
    run = start_drumline("train", write_grpo(tmp_path, server, {"max_new_tokens": 384}))

    def is_in_the_rollout() -> bool:
        more = server.generated_tokens() - before
        return more > TOKENS_OF_A_PROBE + 32 or run.poll() is not None

    until(is_in_the_rollout, SECONDS_OF_A_RUN)
    server.kill()
    _, err = run.communicate(timeout=SECONDS_OF_A_RUN)
    errors = [line for line in err.splitlines() if line.startswith("error:")]

    # The launcher tries once more, and then there is no server to begin with.
    first_failure, second_failure = column(tmp_path / "run", "why", "run_end")

    assert f"POST {server.url}/v1/completions" in first_failure
    assert f"GET {server.url}/health" in second_failure

    assert run.returncode == 2
    assert len(errors) == 1, err
    assert second_failure in errors[0]
    assert "start it with `vllm serve MODEL`" in errors[0]
    assert f"POST {server.url}/v1/completions" in errors[0], "why there was a second attempt"
    assert "Traceback" not in err


@torch.no_grad()
def expected_choices(model: Any, texts: list[TaughtText], top_k: int) -> Any:
    """Return what a model of transformers says at all positions of texts, as packed choices."""
    rows = []

    for text in texts:
        logits_TV = model(torch.tensor([text.tokens])).logits[0]
        choices = top_choices(logits_TV[:-1], top_k, model.config.vocab_size)
        ids_MK = choices.ids_MK.float()
        rows.append(torch.cat((ids_MK, choices.log_probs_ML), 1))

    return torch.cat(rows).numpy()


def test_a_server_gives_a_teacher_s_log_probs(teacher_server: RealServer) -> None:
    """They are those of the model, and what a server does not give is found before the run."""
    top_k = 8
    teacher = {
        "kind": "server",
        "url": teacher_server.url,
        "model": "base",
    }
    teaching = DistillConfig.model_validate({"teacher": teacher, "top_k": top_k})
    served = teaching.served_teacher

    assert served is not None

    model = read_model(teacher_server.model)
    tokenizer = tiny_tokenizer()
    vocabulary = model.config.vocab_size
    texts = []

    for request in REQUESTS:
        positions = list(range(1, len(request.tokens)))
        if positions:
            texts.append(TaughtText(request.tokens, positions))

    servers = TeacherServers(served, top_k, tokenizer, vocabulary)
    packed = servers.ask(texts)
    wanted = expected_choices(model, texts, top_k)

    log_probs = packed[:, top_k:]
    wanted_log_probs = wanted[:, top_k:]

    assert log_probs == pytest.approx(wanted_log_probs, abs=ROUNDING)

    # Two tokens that are nearly as likely may be the other way round.
    is_same = packed[:, :top_k] == wanted[:, :top_k]

    assert is_same.mean() > 0.95

    # More than vLLM's default of --max-logprobs.
    with pytest.raises(EnvironmentFault, match="--max-logprobs 32, or lower"):
        TeacherServers(served, 32, tokenizer, vocabulary)
