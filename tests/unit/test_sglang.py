"""The SGLang client against a stand-in (tests/sglang_stub.py): what it asks, what it makes of it, and how it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drumline.config import rollouts as c
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault, PlanError
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.rl.build import greedy_generator, lost_servers
from drumline.rl.generate import request_seed
from drumline.rl.restarts import CheckedSampling
from drumline.rl.servers import require_addresses
from drumline.rl.sglang import RemoteSGLang
from tests.plans import small_config
from tests.sglang_stub import SGLangStub
from tests.tiny import read_model, tiny_tokenizer
from tests.unit.test_vllm import (
    REQUESTS,
    assert_same,
    change_weights,
    make_generator,
    sample_here,
)


@pytest.fixture
def server(model: Path) -> Iterator[SGLangStub]:
    with SGLangStub(read_model(model)) as stub:
        yield stub


def client(*servers: SGLangStub, **options: Any) -> RemoteSGLang:
    urls = [server.url for server in servers]
    config = c.SGLangGenerator(**{"url": urls, "max_new_tokens": 12, **options})
    return RemoteSGLang(config, tiny_tokenizer(), 7)


@pytest.mark.slow
@pytest.mark.claim("completions of SGLang's native API are read by token ids (against a stand-in)")
@pytest.mark.parametrize("options", [{}, {"stop": ("e",)}, {"temperature": 0.6}], ids=str)
def test_completions_are_what_the_seeds_say(
    server: SGLangStub, model: Path, options: dict[str, Any]
) -> None:
    made = client(server, **options).generate(REQUESTS, 5)

    assert_same(made, sample_here(read_model(model), 5, **options))

    seeds = [body["sampling_params"]["sampling_seed"] for body in server.bodies("/generate")]

    assert sorted(seeds) == sorted(request_seed(7, 5, request.key) for request in REQUESTS)


@pytest.mark.slow
def test_it_decodes_greedily(server: SGLangStub, model: Path) -> None:
    greedy = greedy_generator(client(server)).generate(REQUESTS, 5)
    expected = sample_here(read_model(model), 5, top_k=1)

    assert [made.tokens for made in greedy] == [made.tokens for made in expected]


@pytest.mark.slow
def test_new_weights_and_lost_servers_are_as_with_vllm(model: Path, tmp_path: Path) -> None:
    learned = read_model(model)

    with SGLangStub(read_model(model)) as first, SGLangStub(read_model(model)) as second:
        config = c.SGLangGenerator(url=(first.url, second.url), max_new_tokens=12)
        made, refresh = make_generator(config, run_dir=tmp_path)

        def roll_out(turn: int) -> None:
            change_weights(learned, turn)
            refresh(learned.named_parameters(remove_duplicate=False))
            assert_same(made.generate(REQUESTS, turn), sample_here(learned, turn))

        roll_out(0)

        assert [path for path, _ in first.asked][:3] == [
            "/update_weights_from_disk",
            "/flush_cache",
            "/generate",
        ]

        first.dies_after = first.completed + 1
        roll_out(1)

        assert list(lost_servers(made)) == [first.url]

        first.restart()
        roll_out(2)

        assert lost_servers(made) == {}

        # So quickly that no request fails.
        second.restart()
        sampled = CheckedSampling(made, REQUESTS, 3, restore_weights=refresh.restore).finish()

        assert_same(sampled, sample_here(learned, 3))
        assert second.weight_version == first.weight_version


def test_failures_are_one_line(server: SGLangStub, model: Path, tmp_path: Path) -> None:
    made = client(server)
    weights = read_model(model).named_parameters

    for answer in ({"text": "no log-probs"}, {"meta_info": {"output_token_logprobs": []}}, [1]):
        server.break_with = {"/generate": answer}

        with pytest.raises(DrumlineError, match="gave no tokens with log-probs"):
            made.generate(REQUESTS, 0)

    config = c.SGLangGenerator(url=server.url)
    _, refresh = make_generator(config, run_dir=tmp_path)
    server.break_with = {"/update_weights_from_disk": {"success": False, "message": "no room"}}

    with pytest.raises(
        DrumlineError, match=r"did not load the weights: .*no room.*the server must"
    ):
        refresh(weights())

    server.break_with = {"/health": 503}

    with pytest.raises(EnvironmentFault, match="answered 503"):
        client(server)


def test_what_is_not_tested_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="url"):
        c.SGLangGenerator.model_validate({"kind": "sglang"})

    for options in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(ValidationError, match="not tested which log-probs SGLang returns"):
            c.SGLangGenerator(url="http://a", **options)

    generator = {"kind": "sglang", "url": "http://a"}
    algorithm = {"kind": "grpo", "group_size": 4, "generator": generator}
    config = small_config(algorithm=algorithm, strategy="ddp", adapter="lora")

    with pytest.raises(PlanError, match="sglang × an adapter: it takes whole weights"):
        check_rules(Case(config, config.strategy.mesh(2), "cuda", "bf16", None))

    monkeypatch.delenv("SGLANG_ADDRESS", raising=False)

    with pytest.raises(ConfigError, match="SGLANG_ADDRESS"):
        require_addresses(c.SGLangGenerator(url=("http://a", "${env:SGLANG_ADDRESS}")))


def test_the_key_comes_from_the_environment(
    server: SGLangStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"

    with pytest.raises(EnvironmentFault, match="answered 401"):
        client(server)

    monkeypatch.setenv("SGLANG_API_KEY", "secret")

    assert client(server).pool.servers[0].model == "tiny"
