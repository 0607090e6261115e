"""The vLLM client against a real small HTTP server over a real tiny model: what it asks, what it makes of it, and every way of failing.

The server is ours (tests/vllm_stub.py): it speaks the API that vLLM documents. vLLM itself was not there to be run.
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
from drumline.config.config import Config
from drumline.errors import DrumlineError, EnvironmentFault, PlanError
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.rl import vllm
from drumline.rl.build import RolloutFiles, generator, greedy_generator
from drumline.rl.generate import HFGenerator, Request, request_seed
from drumline.rl.vllm import VLLMServer, WeightFolder
from tests.distributed.ranks import free_port
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.vllm_stub import StubServer

TEXTS = ["The", "What is two plus three?", "one two three", "Every rank keeps in step", "Rome"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def server(folder: Path) -> Iterator[StubServer]:
    with StubServer(load(folder)) as stub:
        yield stub


def requests() -> list[Request]:
    return [Request(tiny_tokenizer().encode(text), (i, 0)) for i, text in enumerate(TEXTS)]


def client(server: StubServer, **options: Any) -> VLLMServer:
    return VLLMServer(
        c.VLLMGenerator(**{"url": server.url, "max_new_tokens": 12, **options}), tiny_tokenizer(), 7
    )


def same(made: list[Any], expected: list[Any]) -> bool:
    """The stub samples with our sampler and our seeds, so the client must come to what generate on the same weights makes."""
    return [(m.tokens, m.ended) for m in made] == [(e.tokens, e.ended) for e in expected] and all(
        m.log_probs == pytest.approx(e.log_probs, abs=1e-5)
        for m, e in zip(made, expected, strict=True)
    )


@pytest.mark.parametrize(
    "options", [{}, {"stop": ("e",)}, {"temperature": 0.6}, {"top_p": 0.8, "top_k": 30}], ids=str
)
@pytest.mark.slow
def test_completions_are_what_the_seeds_say_in_the_order_of_the_requests(
    server: StubServer, folder: Path, options: dict[str, Any]
) -> None:
    server.processed = "temperature" in options
    made = client(server, batch=3, **options).generate(requests(), 5)
    expected = HFGenerator(
        c.HFGenerator(max_new_tokens=12, **options), load(folder), tiny_tokenizer(), 7
    ).generate(requests(), 5)
    assert same(made, expected) and (any(m.ended for m in made) or "stop" not in options)
    bodies = server.bodies("/v1/completions")
    asked = [body for body in bodies if "allowed_token_ids" not in body]
    assert all(body["max_tokens"] == 1 for body in bodies if "allowed_token_ids" in body)
    assert sorted(a["seed"] for a in asked) == sorted(request_seed(7, 5, r.key) for r in requests())
    assert {(a["model"], a["n"], a["repetition_penalty"], a["min_p"]) for a in asked} == {
        ("tiny", 1, 1.0, 0.0)
    }
    assert server.most_at_once <= 3


def test_requests_are_under_way_side_by_side(server: StubServer) -> None:
    made = client(server, batch=2)
    made.generate(requests()[:1], 0)
    server.gate = threading.Barrier(2, timeout=60)  # none is answered before another is asked
    assert len(made.generate(requests()[:4], 0)) == 4 and server.most_at_once == 2


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
        client(server, **options).generate(requests(), 0)


@pytest.mark.parametrize("processed", [False, True])
def test_a_certain_model_does_not_hide_which_log_probs_a_server_gives(
    server: StubServer, processed: bool
) -> None:
    """Its raw log-probs are 0 for nearly every token that it samples, as processed ones of a single token are."""
    server.processed = processed
    server.model.get_output_embeddings().weight.data.mul_(1e4)
    given, other = {"top_p": 0.9}, {"temperature": 0.6}
    if processed:
        given, other = other, given
    assert client(server, **given).generate(requests(), 0)
    with pytest.raises(DrumlineError, match="--logprobs-mode"):
        client(server, **other).generate(requests(), 0)


@pytest.mark.parametrize("processed", [False, True])
def test_where_nothing_is_cut_and_for_greedy_choices_either_kind_will_do(
    server: StubServer, processed: bool
) -> None:
    server.processed = processed
    sampling = client(server)
    assert sampling.generate(requests(), 0) and greedy_generator(sampling).generate(requests(), 0)


def test_what_cannot_be_asked_of_vllm_is_refused_by_the_config() -> None:
    for options, said in [
        ({"url": "http://a", "temperature": 0.6, "top_p": 0.9}, "leave temperature at 1"),
        ({"url": "localhost:8000"}, "begins with http"),
        ({"weights": "none"}, "set url"),
        ({"url": "http://a", "weights": "none", "folder": "x"}, "folder is of weights"),
    ]:
        with pytest.raises(ValidationError, match=said):
            c.VLLMGenerator(**options)


def test_a_server_that_is_not_there_or_is_no_vllm_is_one_line(server: StubServer) -> None:
    missing = c.VLLMGenerator(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        EnvironmentFault,
        match=r"algorithm\.generator\.url: GET http://127.*Connection refused — start it with `vllm serve",
    ):
        VLLMServer(missing, tiny_tokenizer(), 0)
    with pytest.raises(EnvironmentFault, match=r"^[^@]*this is no URL") as caught:
        client(server, url="http://user:secret@host:port")
    assert "secret" not in str(caught.value)
    with pytest.raises(EnvironmentFault, match="404: Not Found"):
        client(server, url=f"{server.url}/v2")
    for answer, said in [
        ("<html>", "no JSON"),
        ({"data": []}, "does not name a model"),
        (503, "answered 503: EngineCore encountered"),
    ]:
        server.break_with = {"/v1/models": answer}
        with pytest.raises(EnvironmentFault, match=said):
            client(server)


@pytest.mark.slow
def test_a_server_that_fails_in_a_rollout_is_one_line(server: StubServer) -> None:
    made = client(server, batch=2)
    made.generate(requests()[:1], 0)
    for how, said in [
        (500, "answered 500: EngineCore encountered an issue"),
        ("hang", r"took longer than 0\.5 s — raise timeout_seconds"),
        ("cut", "v1/completions: .*(closed|reset|disconnected)"),
        (
            {"choices": [{"text": "no log-probs", "logprobs": None, "finish_reason": "stop"}]},
            "no tokens with log-probs",
        ),
        (
            {
                "choices": [
                    {
                        "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0]},
                        "finish_reason": "abort",
                    }
                ]
            },
            "no tokens",
        ),
    ]:
        server.break_with = {"/v1/completions": how}
        made.server.timeout_seconds = 0.5 if how == "hang" else 60
        with pytest.raises(DrumlineError, match=said) as caught:
            made.generate(requests(), 0)
        assert not isinstance(caught.value, EnvironmentFault), "the run failed, not the user"
    server.break_with = {}
    assert len(made.generate(requests(), 0)) == 5 and made.generate([], 0) == []
    with pytest.raises(PlanError, match="more than the model's 512 positions"):
        made.generate([Request([5] * 508, (0, 0))], 0)


def test_the_key_comes_from_the_environment(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    with pytest.raises(EnvironmentFault, match="answered 401: Unauthorized"):
        client(server)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert client(server).model == "tiny"
    address = server.url.replace("://", "://user:other@")
    assert client(server, url=address).model == "tiny", "the key comes before user:password"


def test_proxies_of_the_environment_are_not_used(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert client(server).model == "tiny"


@pytest.mark.slow
def test_new_weights_reach_the_server_through_a_folder(
    server: StubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "SHARD_BYTES", 30_000)
    config, learned = c.VLLMGenerator(url=server.url, max_new_tokens=12), load(folder)
    made, refresh = generator(
        config,
        tiny_tokenizer(),
        7,
        None,
        lambda: pytest.fail("no copy"),
        files=RolloutFiles(run_dir=tmp_path),
    )
    assert refresh is not None
    for turn in range(3):
        with torch.no_grad():
            for parameter in learned.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(turn)),
                    alpha=0.05,
                )
        refresh(learned.named_parameters(remove_duplicate=False))
        expected = HFGenerator(
            c.HFGenerator(max_new_tokens=12), learned, tiny_tokenizer(), 7
        ).generate(requests(), turn)
        assert same(made.generate(requests(), turn), expected)
        assert len(list((tmp_path / "rollout-weights").iterdir())) == 1, "the last ones are gone"
    files = list((tmp_path / "rollout-weights").glob("*/*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 50_000
    assert [path for path, _ in server.asked if path != "/v1/completions"] == [
        "/collective_rpc",
        "/reset_prefix_cache",
    ] * 3


def test_weights_that_cannot_be_handed_over_are_one_line(
    server: StubServer, folder: Path, tmp_path: Path
) -> None:
    made, learned = client(server), load(folder)

    def hand_over(to: Path, *more: tuple[str, torch.Tensor]) -> None:
        WeightFolder(made.server, to, torch.float32).refresh(
            iter([*learned.named_parameters(), *more])
        )

    (tmp_path / "file").write_text("")
    with pytest.raises(
        EnvironmentFault, match=r"file.*weights cannot be written: .*Not a directory"
    ):
        hand_over(tmp_path / "file" / "weights")
    with pytest.raises(DrumlineError, match=r"unexpected|AssertionError.*the server must see"):
        hand_over(tmp_path / "more", ("head.of.another", torch.zeros(2)))
    server.break_with = {"/collective_rpc": 404}
    with pytest.raises(
        DrumlineError,
        match=r"404.*start the server with VLLM_SERVER_DEV_MODE=1, or set weights: none",
    ):
        hand_over(tmp_path / "production")


def test_a_server_may_keep_its_own_weights(server: StubServer) -> None:
    config = c.VLLMGenerator(url=server.url, weights="none")
    assert generator(config, tiny_tokenizer(), 7, None, lambda: pytest.fail("no copy"))[1] is None


def test_what_vllm_cannot_take_is_refused_before_any_process() -> None:
    def check(generator: dict[str, Any], **sections: Any) -> None:
        algorithm = {"kind": "grpo", "group_size": 4, "generator": {"kind": "vllm", **generator}}
        values = {
            "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]},
            "algorithm": algorithm,
            "strategy": "ddp",
            **sections,
        }
        config = Config.model_validate(values)
        check_rules(Case(config, config.strategy.mesh(2), "cuda", "bf16", None))

    server, shape = {"url": "http://a"}, {"layers": 1, "hidden": 8, "heads": 2, "vocabulary": 16}
    check(server)
    check({**server, "weights": "none"}, adapter="lora")
    check(server, model={"shape": shape})
    with pytest.raises(
        PlanError, match=r"vLLM is handed whole weights.*generator=hf, or adapter=none"
    ):
        check(server, adapter="lora")
    with pytest.raises(PlanError, match=r"its engine starts from a model's files.*set model.id"):
        check({}, model={"shape": shape})


class FakeLLM:
    """What is used of vllm.LLM, which needs a GPU: notes what it is given."""

    made: list[FakeLLM] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
        FakeLLM.made.append(self)

    def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        tokens = [(prompt["prompt_token_ids"][-1], 2) for prompt in prompts]
        made = [
            SimpleNamespace(
                token_ids=pair,
                logprobs=[{token: SimpleNamespace(logprob=-token / 8)} for token in pair],
                finish_reason="stop",
            )
            for pair in tokens
        ]
        self.calls.append(("generate", parameters))
        return [SimpleNamespace(outputs=[one]) for one in made]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, [name for name, _ in kwargs["weights_iterator"]]))

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache", None))


def test_an_engine_in_the_rank_is_asked_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what we hand to vLLM and read from it: vLLM itself cannot run here."""
    config = c.VLLMGenerator(temperature=0.7, max_new_tokens=4, stop=("x",))
    with pytest.raises(
        EnvironmentFault, match=r"the package vllm is missing — pip install vllm, or set url"
    ):
        generator(config, tiny_tokenizer(), 7, None, lambda: None, files=RolloutFiles(str(folder)))
    stand_in = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace, __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    monkeypatch.setattr(vllm, "_engine", vllm._engine.__wrapped__)
    made, refresh = generator(
        config, tiny_tokenizer(), 7, None, lambda: None, torch.bfloat16, RolloutFiles(str(folder))
    )
    llm = FakeLLM.made[-1]
    assert (
        llm.options["dtype"] == "bfloat16" and llm.options["logprobs_mode"] == "processed_logprobs"
    )
    assert "load_format" not in llm.options
    from transformers import AutoConfig

    generator(
        config,
        tiny_tokenizer(),
        7,
        None,
        lambda: None,
        torch.bfloat16,
        RolloutFiles(str(folder), rows=384),
    )
    grown = FakeLLM.made[-1].options
    assert (
        grown["load_format"] == "dummy"
        and grown["hf_overrides"](AutoConfig.from_pretrained(folder)).vocab_size == 384
    )
    completion = made.generate([Request([9, 8], (3, 1))], 2)[0]
    assert (completion.tokens, completion.log_probs, completion.ended) == (
        [8, 2],
        [-1.0, -0.25],
        True,
    )
    (parameters,) = llm.calls[0][1]
    assert (parameters.seed, parameters.stop, parameters.stop_token_ids) == (
        request_seed(7, 2, (3, 1)),
        ["x"],
        [2],
    )
    assert refresh is not None
    refresh(iter([("a", torch.zeros(1)), ("b", torch.zeros(1))]))
    assert llm.calls[1:] == [("reload_weights", ["a", "b"]), ("reset_prefix_cache", None)]
    with pytest.raises(PlanError, match="positions"):
        made.generate([Request([5] * 61, (0, 0))], 0)
