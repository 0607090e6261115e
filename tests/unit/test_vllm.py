"""The vLLM client against a real small HTTP server over a real tiny model: what it asks, what it
makes of it, and every way of failing.

The server is ours (tests/vllm_stub.py): it speaks the API that vLLM documents. tests/servers runs
vLLM itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from drumline.config import rollouts as c
from drumline.errors import DrumlineError, EnvironmentFault, PlanError
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.rl import vllm, weight_folder
from drumline.rl.build import RolloutFiles, build_generator, greedy_generator
from drumline.rl.generate import Completion, HFGenerator, Request, request_seed
from drumline.rl.vllm import RemoteVLLM
from drumline.rl.weight_folder import WeightFolder
from tests.distributed.ranks import free_port
from tests.plans import small_config
from tests.tiny import read_model, tiny_tokenizer
from tests.vllm_stub import HAND_OVER, StubServer

TEXTS = ["The", "What is two plus three?", "one two three", "Every rank keeps in step", "Rome"]
REQUESTS = [Request(tiny_tokenizer().encode(text), (i, 0)) for i, text in enumerate(TEXTS)]


@pytest.fixture
def server(model: Path) -> Iterator[StubServer]:
    with StubServer(read_model(model)) as stub:
        yield stub


def client(server: StubServer, **options: Any) -> RemoteVLLM:
    config = c.VLLMGenerator(**{"url": server.url, "max_new_tokens": 12, **options})
    return RemoteVLLM(config, tiny_tokenizer(), 7)


def model_name(made: RemoteVLLM) -> str:
    return made.pool.servers[0].model


def no_copy() -> Any:
    pytest.fail("no copy")


def make_generator(config: c.VLLMGenerator, *more: Any, **files: Any) -> tuple[Any, Any]:
    return build_generator(
        config, tiny_tokenizer(), 7, None, no_copy, *more, files=RolloutFiles(**files)
    )


def sample_here(model: Any, step: int, **options: Any) -> list[Completion]:
    """Return what generate makes of the requests on these weights."""
    config = c.HFGenerator(max_new_tokens=12, **options)
    return HFGenerator(config, model, tiny_tokenizer(), 7).generate(REQUESTS, step)


def assert_same(made: list[Completion], expected: list[Completion]) -> None:
    """The stub samples with our sampler and our seeds, so the client must come to what generate on
    the same weights makes."""
    for got, wanted in zip(made, expected, strict=True):
        assert got.tokens == wanted.tokens
        assert got.ended == wanted.ended
        assert got.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ("e",)},
        # More of them than a server takes.
        {"stop": ("z", "y", "x", "w", "e", "a")},
        {"temperature": 0.6},
        {"top_p": 0.8, "top_k": 30},
    ],
    ids=str,
)
@pytest.mark.slow
def test_completions_are_what_the_seeds_say_in_the_order_of_the_requests(
    server: StubServer, model: Path, options: dict[str, Any]
) -> None:
    server.processed = "temperature" in options
    made = client(server, batch=3, **options).generate(REQUESTS, 5)
    assert_same(made, sample_here(read_model(model), 5, **options))

    if "stop" in options:
        assert any(completion.ended for completion in made)

    seeds = []

    for body in server.bodies("/v1/completions"):
        if "allowed_token_ids" in body:
            assert body["max_tokens"] == 1
            continue

        seeds.append(body["seed"])

        assert body["model"] == "tiny"
        assert body["n"] == 1
        assert body["repetition_penalty"] == 1.0
        assert body["min_p"] == 0.0

    assert sorted(seeds) == sorted(request_seed(7, 5, request.key) for request in REQUESTS)
    assert server.most_at_once <= 3


@pytest.mark.slow
def test_a_stop_text_may_be_a_special_token(server: StubServer, model: Path) -> None:
    requests = [Request(REQUESTS[0].tokens, (0, sample)) for sample in range(60)]
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": ("<|im_start|>",)}
    here = HFGenerator(c.HFGenerator(**options), read_model(model), tiny_tokenizer(), 7)
    expected = here.generate(requests, 5)
    start = tiny_tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert any(completion.tokens[-1] == start for completion in expected)
    assert_same(client(server, **options).generate(requests, 5), expected)


def test_requests_are_under_way_side_by_side(server: StubServer) -> None:
    made = client(server, batch=2)
    made.generate(REQUESTS[:1], 0)
    server.gate = threading.Barrier(2, timeout=60)  # none is answered before another is asked

    assert len(made.generate(REQUESTS[:4], 0)) == 4
    assert server.most_at_once == 2


@pytest.mark.parametrize(
    ("options", "processed", "fix"),
    [
        ({"temperature": 0.6}, False, "processed_logprobs"),
        ({"top_p": 0.9}, True, "raw_logprobs"),
        ({"top_k": 5}, True, "raw_logprobs"),
    ],
)
def test_log_probs_of_another_distribution_are_refused(
    server: StubServer, options: dict[str, Any], processed: bool, fix: str
) -> None:
    server.processed = processed
    with pytest.raises(DrumlineError, match=f"--logprobs-mode {fix}"):
        client(server, **options).generate(REQUESTS, 0)


@pytest.mark.parametrize("processed", [False, True])
def test_a_certain_model_does_not_hide_which_log_probs_a_server_gives(
    server: StubServer, processed: bool
) -> None:
    """Its raw log-probs are 0 for nearly every token that it samples, as processed ones of a single
    token are."""
    server.processed = processed
    server.model.get_output_embeddings().weight.data.mul_(1e4)
    given = {"top_p": 0.9}
    other = {"temperature": 0.6}
    if processed:
        given, other = other, given

    assert client(server, **given).generate(REQUESTS, 0)

    with pytest.raises(DrumlineError, match="--logprobs-mode"):
        client(server, **other).generate(REQUESTS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("processed", [False, True])
def test_where_nothing_is_cut_and_for_greedy_choices_either_kind_will_do(
    server: StubServer, processed: bool
) -> None:
    server.processed = processed
    sampling = client(server)

    assert sampling.generate(REQUESTS, 0)
    assert greedy_generator(sampling).generate(REQUESTS, 0)


UNASKABLE: dict[str, dict[str, Any]] = {
    "leave temperature at 1": {"url": "http://a", "temperature": 0.6, "top_p": 0.9},
    "begins with http": {"url": "localhost:8000"},
    "weights is of servers: set url": {"weights": "none"},
    "folder is of servers: set url": {"folder": "x"},
    "timeout_seconds is of servers: set url": {"timeout_seconds": 5},
    "memory is of an engine in each rank": {"url": "http://a", "memory": 0.5},
    "takes the likeliest token whatever top_p is": {"top_k": 1, "top_p": 0.5},
    "folder is where weights are written": {"url": "http://a", "weights": "none", "folder": "x"},
    "stands twice in url": {"url": ["http://a", "http://b", "http://a"]},
    "at least 1 item": {"url": []},
}


def test_what_cannot_be_asked_of_vllm_is_refused_by_the_config() -> None:
    for message, options in UNASKABLE.items():
        with pytest.raises(ValidationError, match=message):
            c.VLLMGenerator(**options)


# The message → what the server answers when it is asked for its models.
NO_VLLM: dict[str, Any] = {
    "no JSON": "<html>",
    "does not name a model": {"data": []},
    "not name a model": {"data": [3]},
    "name a model": {"data": [{"id": "tiny", "max_model_len": "long"}]},
    "answered 503: EngineCore encountered": 503,
}


def test_a_server_that_is_not_there_or_is_no_vllm_is_one_line(server: StubServer) -> None:
    missing = c.VLLMGenerator(url=f"http://127.0.0.1:{free_port()}")
    refused = r"GET http://127.*Connection refused — start it with `vllm serve"

    with pytest.raises(EnvironmentFault, match=rf"algorithm\.generator\.url: {refused}"):
        RemoteVLLM(missing, tiny_tokenizer(), 0)

    with pytest.raises(EnvironmentFault, match=r"^[^@]*this is no URL") as caught:
        client(server, url="http://user:secret@host:port")

    assert "secret" not in str(caught.value)

    with pytest.raises(EnvironmentFault, match="404: Not Found"):
        client(server, url=f"{server.url}/v2")

    for message, answer in NO_VLLM.items():
        server.break_with = {"/v1/models": answer}
        with pytest.raises(EnvironmentFault, match=message):
            client(server)


WITHOUT_LOG_PROBS = {"text": "no log-probs", "logprobs": None, "finish_reason": "stop"}
ABORTED = {
    "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0]},
    "finish_reason": "abort",
}


def answer_with(log_prob: float) -> dict[str, Any]:
    """Return an answer of one token with this log-prob."""
    told = {"tokens": ["token_id:5"], "token_logprobs": [log_prob]}
    return {"choices": [{"logprobs": told, "finish_reason": "stop"}]}


# The message → how the server fails when it is asked for completions.
FAILURES: dict[str, Any] = {
    "answered 500: EngineCore encountered an issue": 500,
    r"took longer than 0\.5 s — raise timeout_seconds": "hang",
    "v1/completions: .*(closed|reset|disconnected)": "cut",
    "no tokens with log-probs": {"choices": [WITHOUT_LOG_PROBS]},
    "no tokens": {"choices": [ABORTED]},
    "is no JSON": "[" * 100_000,
    "gave 5 as a log-prob, which is above 0": answer_with(5.0),
    "no tokens .*1000000": answer_with(10**400),
}


@pytest.mark.slow
def test_a_server_that_fails_in_a_rollout_is_one_line(server: StubServer) -> None:
    made = client(server, batch=2)
    made.generate(REQUESTS[:1], 0)

    for message, failure in FAILURES.items():
        server.break_with = {"/v1/completions": failure}
        made.pool.servers[0].timeout_seconds = 0.5 if failure == "hang" else 60

        with pytest.raises(DrumlineError, match=message) as caught:
            made.generate(REQUESTS, 0)

        assert not isinstance(caught.value, EnvironmentFault), "the run failed, not the user"

    server.break_with = {}

    assert len(made.generate(REQUESTS, 0)) == 5
    assert made.generate([], 0) == []

    with pytest.raises(PlanError, match="more than the model's 512 positions"):
        made.generate([Request([5] * 508, (0, 0))], 0)


def test_the_key_comes_from_the_environment(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"

    with pytest.raises(EnvironmentFault, match="answered 401: Unauthorized"):
        client(server)

    monkeypatch.setenv("VLLM_API_KEY", "secret")

    assert model_name(client(server)) == "tiny"

    address = server.url.replace("://", "://user:other@")

    assert model_name(client(server, url=address)) == "tiny", "the key comes before user:password"


def test_proxies_of_the_environment_are_not_used(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")

    assert model_name(client(server)) == "tiny"


def change_weights(model: Any, seed: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.Generator().manual_seed(seed)
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)


@pytest.mark.slow
def test_new_weights_reach_the_server_through_a_folder(
    server: StubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_folder, "SHARD_BYTES", 30_000)
    config = c.VLLMGenerator(url=server.url, max_new_tokens=12)
    learned = read_model(model)
    made, refresh = make_generator(config, run_dir=tmp_path)
    folder = tmp_path / "rollout-weights"

    for turn in range(3):
        change_weights(learned, turn)
        refresh(learned.named_parameters(remove_duplicate=False))
        assert_same(made.generate(REQUESTS, turn), sample_here(learned, turn))

        assert len(list(folder.iterdir())) == 1, "the last ones are gone"

    files = list(folder.glob("*/*.safetensors"))

    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 50_000

    asked = [path for path, _ in server.asked if path != "/v1/completions"]

    assert asked == HAND_OVER * 3


@pytest.mark.slow
def test_weights_wait_as_files_while_a_server_samples_by_others(
    server: StubServer, model: Path, tmp_path: Path
) -> None:
    config = c.VLLMGenerator(url=server.url, max_new_tokens=12)
    learned = read_model(model)
    made, refresh = make_generator(config, run_dir=tmp_path)
    folder = tmp_path / "rollout-weights"
    expected = []
    waiting = []

    for turn in range(3):
        change_weights(learned, turn)
        expected.append(sample_here(learned, turn))
        waiting.append(refresh.hold(learned.named_parameters(remove_duplicate=False)))

    # As for an evaluation, which uses the present weights while others wait.
    change_weights(learned, 3)
    refresh(learned.named_parameters(remove_duplicate=False))

    assert len(list(folder.iterdir())) == 4
    assert_same(made.generate(REQUESTS, 3), sample_here(learned, 3))

    for turn, hand_over in enumerate(waiting):
        hand_over().finish()
        assert_same(made.generate(REQUESTS, turn), expected[turn])

    assert len(list(folder.iterdir())) == 1, "those that were used are gone"


def test_weights_that_cannot_be_handed_over_are_one_line(
    server: StubServer, model: Path, tmp_path: Path
) -> None:
    made = client(server)
    weights = list(read_model(model).named_parameters())

    def hand_over(to: Path, *more: tuple[str, torch.Tensor]) -> None:
        WeightFolder(made, to, torch.float32).refresh(iter([*weights, *more]))

    (tmp_path / "file").write_text("")
    message = r"file.*weights cannot be written: .*Not a directory"

    with pytest.raises(EnvironmentFault, match=message):
        hand_over(tmp_path / "file" / "weights")

    with pytest.raises(DrumlineError, match=r"unexpected|AssertionError.*the server must see"):
        hand_over(tmp_path / "more", ("head.of.another", torch.zeros(2)))

    server.break_with = {"/collective_rpc": 404}
    message = r"404.*start the server with VLLM_SERVER_DEV_MODE=1, or set weights: none"

    with pytest.raises(DrumlineError, match=message):
        hand_over(tmp_path / "production")


def test_a_server_may_keep_its_own_weights(server: StubServer) -> None:
    _, refresh = make_generator(c.VLLMGenerator(url=server.url, weights="none"))
    assert refresh is None


def test_what_vllm_cannot_take_is_refused_before_any_process() -> None:
    def check(generator: dict[str, Any], **sections: Any) -> None:
        algorithm = {"kind": "grpo", "group_size": 4, "generator": {"kind": "vllm", **generator}}
        config = small_config(algorithm=algorithm, strategy="ddp", **sections)
        check_rules(Case(config, config.strategy.mesh(2), "cuda", "bf16", None))

    server = {"url": "http://a"}
    model = {"shape": {"layers": 1, "hidden": 8, "heads": 2, "vocabulary": 16}}
    check(server)
    check({**server, "weights": "none"}, adapter="lora")
    check(server, model=model)

    message = r"it takes whole weights.*set algorithm\.generator\.weights=adapter, or use gen"

    with pytest.raises(PlanError, match=message):
        check(server, adapter="lora")

    with pytest.raises(PlanError, match=r"it takes whole weights.*— use generator=hf, or adapter="):
        check({}, adapter="lora")

    with pytest.raises(PlanError, match=r"its engine starts from a model's files.*set model.id"):
        check({}, model=model)


class FakeLLM:
    """What is used of vllm.LLM, which needs a GPU: notes what it is given."""

    made: list[FakeLLM] = []

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[tuple[str, Any]] = []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
        FakeLLM.made.append(self)

    def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append(("generate", parameters))
        return [engine_output([prompt["prompt_token_ids"][-1], 2]) for prompt in prompts]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, [name for name, _ in kwargs["weights_iterator"]]))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache", None))


def engine_output(tokens: list[int]) -> Any:
    """Return an output of vLLM with these tokens, whose log-probs follow from them."""
    log_probs = [{token: SimpleNamespace(logprob=-token / 8)} for token in tokens]
    output = SimpleNamespace(token_ids=tuple(tokens), logprobs=log_probs, finish_reason="stop")
    return SimpleNamespace(outputs=[output])


def test_an_engine_in_the_rank_is_asked_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what we hand to vLLM and read from it: vLLM itself cannot run here."""
    from transformers import AutoConfig

    config = c.VLLMGenerator(temperature=0.7, max_new_tokens=4, stop=("x",))
    files = {"model_path": str(model)}
    message = r"the package vllm is missing — pip install vllm, or set url"

    with pytest.raises(EnvironmentFault, match=message):
        make_generator(config, **files)

    stand_in = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace, __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    monkeypatch.setattr(vllm, "_engine", vllm._engine.__wrapped__)
    made, refresh = make_generator(config, torch.bfloat16, **files)
    llm = FakeLLM.made[-1]

    assert llm.options["dtype"] == "bfloat16"
    assert llm.options["logprobs_mode"] == "processed_logprobs"
    assert "load_format" not in llm.options

    make_generator(config, torch.bfloat16, **files, rows=384)
    grown = FakeLLM.made[-1].options

    assert grown["load_format"] == "dummy"
    assert grown["hf_overrides"](AutoConfig.from_pretrained(model)).vocab_size == 384

    (completion,) = made.generate([Request([9, 8], (3, 1))], 2)

    assert completion.tokens == [8, 2]
    assert completion.log_probs == [-1.0, -0.25]
    assert completion.ended is True

    (parameters,) = llm.calls[0][1]

    assert parameters.seed == request_seed(7, 2, (3, 1))
    assert parameters.stop == ["x"]
    assert parameters.stop_token_ids == [2]

    refresh(iter([("a", torch.zeros(1)), ("b", torch.zeros(1))]))

    assert llm.calls[1:] == [("reload_weights", ["a", "b"]), ("reset_prefix_cache", None)]

    with pytest.raises(PlanError, match="positions"):
        made.generate([Request([5] * 61, (0, 0))], 0)
