"""Several servers that sample: which one gets a request, and what a run does when one is lost and when it is back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drumline.config import rollouts as c
from drumline.config.load import load_text
from drumline.data.batches import Episodes
from drumline.errors import DrumlineError, EnvironmentFault, TrainingStopped
from drumline.rl.build import lost_servers, probe_generators
from drumline.rl.generate import Request
from drumline.rl.restarts import CheckedSampling
from drumline.rl.sampler_check import SamplerCheck, probe_prompts
from drumline.rl.servers import Server, ServerPool
from drumline.rl.vllm import RemoteVLLM
from drumline.system.redact import reveal
from tests.distributed.ranks import free_port
from tests.harness import column, drumline
from tests.served_runs import write_served_run
from tests.tiny import read_model, tiny_model_dir, tiny_tokenizer
from tests.unit.report_runs import story
from tests.unit.test_report_progress import START, told
from tests.unit.test_sampler_check import completion_log_probs
from tests.unit.test_vllm import (
    REQUESTS,
    assert_same,
    change_weights,
    make_generator,
    sample_here,
)
from tests.vllm_stub import HAND_OVER, StubServer


@pytest.fixture
def servers(model: Path) -> Iterator[list[StubServer]]:
    with StubServer(read_model(model)) as first, StubServer(read_model(model)) as second:
        yield [first, second]


def config_of(servers: list[StubServer], **options: Any) -> c.VLLMGenerator:
    urls = [server.url for server in servers]
    return c.VLLMGenerator(**{"url": urls, "max_new_tokens": 12, **options})


def client(servers: list[StubServer], **options: Any) -> RemoteVLLM:
    return RemoteVLLM(config_of(servers, **options), tiny_tokenizer(), 7)


def paths(server: StubServer) -> list[str]:
    return [path for path, _ in server.asked]


def test_the_server_with_the_fewest_requests_gets_the_next() -> None:
    first, second, third = (
        Server(RemoteVLLM.kind, f"http://{name}", 1.0, "url") for name in ("a", "b", "c")
    )
    pool = ServerPool([first, second, third])

    assert [pool.take() for _ in range(4)] == [first, second, third, first]

    pool.release(second)

    assert pool.take() is second
    assert pool.take() is second
    assert pool.take(preferred=first) is first

    error = DrumlineError("gone")

    assert pool.lose(third, error) is True
    assert [pool.take() for _ in range(2)] == [second, first]
    assert pool.take(preferred=third) is second, "one that is lost is not asked"
    assert pool.lose(first, error) is True
    assert pool.lose(second, error) is False, "the last one stays"
    assert pool.take() is second
    assert pool.lost == {"http://c": "gone", "http://a": "gone"}


@pytest.mark.slow
def test_both_servers_work_at_the_same_time(servers: list[StubServer], model: Path) -> None:
    made = client(servers, batch=2)

    for server in servers:
        # None is answered before each server has two.
        server.gate = threading.Barrier(2, timeout=60)

    assert_same(made.generate(REQUESTS[:4], 3), sample_here(read_model(model), 3)[:4])

    for server in servers:
        assert server.most_at_once == 2


@pytest.mark.slow
def test_a_server_gets_no_more_at_once_when_another_is_lost(servers: list[StubServer]) -> None:
    first, second = servers
    made = client(servers, batch=1)
    first.is_dead = True
    made.generate(REQUESTS, 3)

    assert list(lost_servers(made)) == [first.url]

    second.most_at_once = 0
    made.generate(REQUESTS, 4)

    assert second.most_at_once == 1

    first.is_dead = False
    (probe, _) = probe_generators(client(servers, batch=1), 4).values()
    probe.generate(REQUESTS, 5)

    assert first.most_at_once == 1


@pytest.mark.slow
@pytest.mark.claim("a server that dies in a rollout changes no completion")
@pytest.mark.parametrize("batch", [1, 4])
def test_requests_of_a_server_that_dies_are_sent_to_the_others(
    servers: list[StubServer], model: Path, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = client(servers, batch=batch)
    first, second = servers
    # At its first request: a fast second server may leave it no other one.
    first.dies_after = 0

    assert_same(made.generate(REQUESTS, 3), sample_here(read_model(model), 3))

    assert list(lost_servers(made)) == [first.url]
    assert "a server is lost, the others go on" in caplog.text
    assert first.url in caplog.text

    before = len(first.asked)

    assert_same(made.generate(REQUESTS, 4), sample_here(read_model(model), 4))
    assert len(first.asked) == before

    second.is_dead = True

    with pytest.raises(DrumlineError, match=rf"{second.url}/v1/completions: .*start it with"):
        made.generate(REQUESTS, 5)


def answer_of(tokens: list[int], log_prob: float) -> dict[str, Any]:
    """An answer of /v1/completions."""
    names = [f"token_id:{token}" for token in tokens]
    log_probs = {"tokens": names, "token_logprobs": [log_prob] * len(tokens)}
    return {"choices": [{"logprobs": log_probs, "finish_reason": "length"}]}


TOO_LONG = answer_of([5] * 13, -1.0)
NO_NUMBERS = answer_of([5, 6], float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", [500, "hang", {"choices": []}, TOO_LONG, NO_NUMBERS], ids=lambda each: str(each)[:20]
)
def test_a_server_that_hangs_or_answers_nonsense_is_lost_too(
    servers: list[StubServer], model: Path, failure: Any
) -> None:
    made = client(servers)
    made.pool.servers[0].timeout_seconds = 0.5
    servers[0].break_with = {"/v1/completions": failure}

    assert_same(made.generate(REQUESTS, 3), sample_here(read_model(model), 3))
    assert list(lost_servers(made)) == [servers[0].url]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (TOO_LONG, "gave 13 tokens, and at most 12 were requested"),
        (NO_NUMBERS, "gave log-probs that are no finite numbers"),
        (answer_of([5, 320], -1.0), "gave token 320, and the policy has 320 tokens — serve the"),
        (answer_of([-1], -1.0), "gave token -1, and the policy has 320 tokens"),
    ],
)
def test_a_completion_that_the_policy_cannot_have_is_refused_in_one_line(
    servers: list[StubServer], answer: Any, line: str
) -> None:
    config = c.VLLMGenerator(url=servers[0].url, max_new_tokens=12, weights="none")
    made, _ = make_generator(config, vocabulary=320)
    servers[0].break_with = {"/v1/completions": answer}

    with pytest.raises(DrumlineError) as refused:
        made.generate(REQUESTS, 3)

    assert line in refused.value.line()
    assert "\n" not in refused.value.line()


@pytest.mark.slow
def test_a_run_reads_no_tokens_of_another_model(tmp_path: Path) -> None:
    """A server that keeps its weights has never been compared with the policy."""
    model = tiny_model_dir(tmp_path / "model")
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)

    with StubServer(read_model(model)) as server:
        config = write_served_run(tmp_path, other, server.url, {"weights": "none"})
        finished = drumline("train", config)

    (line,) = finished.error_lines
    assert "and the policy has" in line
    assert "IndexError" not in finished.out + finished.err


def test_a_request_that_a_server_refuses_is_no_loss(servers: list[StubServer]) -> None:
    made = client(servers)
    servers[0].break_with = {"/v1/completions": 400}

    with pytest.raises(DrumlineError, match="answered 400"):
        made.generate(REQUESTS, 3)

    assert lost_servers(made) == {}


@pytest.mark.slow
def test_a_server_that_is_back_gets_the_weights_and_then_requests(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    first, second = servers
    learned = read_model(model)
    made, refresh = make_generator(config_of(servers, batch=2), run_dir=tmp_path)

    def roll_out(turn: int) -> None:
        change_weights(learned, turn)
        refresh(learned.named_parameters(remove_duplicate=False))
        assert_same(made.generate(REQUESTS, turn), sample_here(learned, turn))

    roll_out(0)

    assert "/v1/completions" in paths(first)
    assert "/v1/completions" in paths(second)

    first.is_dead = True
    roll_out(1)
    roll_out(2)

    assert list(lost_servers(made)) == [first.url]

    first.restart()
    first.asked.clear()
    roll_out(3)

    assert lost_servers(made) == {}
    assert paths(first)[:4] == [*HAND_OVER, "/v1/completions"]

    # It was restarted without the option that lets it load weights: it stays out.
    second.is_dead = True
    roll_out(4)
    second.restart()
    second.break_with = {"/collective_rpc": 404}
    roll_out(5)

    assert "answered 404" in lost_servers(made)[second.url]

    first.break_with = {"/collective_rpc": 500}

    with pytest.raises(DrumlineError, match=rf"{first.url}/collective_rpc was answered 500"):
        roll_out(6)


@pytest.mark.slow
def test_servers_that_keep_their_weights_get_requests_as_soon_as_they_are_back(
    servers: list[StubServer], model: Path
) -> None:
    made, refresh = make_generator(config_of(servers, weights="none"))

    assert refresh is None

    servers[0].is_dead = True
    made.generate(REQUESTS, 1)

    assert list(lost_servers(made)) == [servers[0].url]

    servers[0].restart()

    assert_same(made.generate(REQUESTS, 2), sample_here(read_model(model), 2))
    assert lost_servers(made) == {}


class LearnedServers(NamedTuple):
    """Servers that have learned weights."""

    generator: Any
    # A model with these weights.
    learned: Any
    # See `Refresh.restore`.
    restore_weights: Callable[[], list[str]]

    def sample(
        self, requests: list[Request], step: int = 3, in_background: bool = False
    ) -> CheckedSampling:
        return CheckedSampling(self.generator, requests, step, in_background, self.restore_weights)


def hand_over_to(
    servers: list[StubServer], model: Path, folder: Path, **options: Any
) -> LearnedServers:
    """Return a generator whose servers have learned weights, and a model with these weights."""
    learned = read_model(model)
    change_weights(learned, 0)
    made, refresh = make_generator(config_of(servers, **options), run_dir=folder)
    refresh(learned.named_parameters(remove_duplicate=False))
    return LearnedServers(made, learned, refresh.restore)


@pytest.mark.slow
@pytest.mark.claim("a server that is restarted unseen samples from the policy again")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("restarts", [{0}, {2}, {0, 7}], ids=["before", "during", "twice"])
@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_server_sampled_after_an_unseen_restart_is_sampled_again(
    servers: list[StubServer],
    model: Path,
    tmp_path: Path,
    number: int,
    restarts: set[int],
    in_background: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = hand_over_to(servers[:number], model, tmp_path)
    first = servers[0]
    first.restarts_after = restarts

    sampling = made.sample(REQUESTS, in_background=in_background)

    assert_same(sampling.finish(), sample_here(made.learned, 3))
    assert sampling.finish() is sampling.finish()
    assert lost_servers(made.generator) == {}
    assert f"{first.url} has other weights than it was handed" in caplog.text
    assert first.loads > 1

    # Nothing is handed over to one that has the weights.
    loads = first.loads

    assert made.restore_weights() == []
    assert first.loads == loads


def test_a_server_with_the_weights_of_another_run_gets_ours_again(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    made = hand_over_to(servers, model, tmp_path / "one")
    hand_over_to(servers[1:], model, tmp_path / "other")

    assert made.restore_weights() == [servers[1].url]
    assert made.restore_weights() == []


def test_a_restarted_server_that_loads_no_weights_is_lost(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    made = hand_over_to(servers, model, tmp_path)
    servers[0].restart()
    servers[0].break_with = {"/collective_rpc": 404}

    assert_same(made.sample(REQUESTS).finish(), sample_here(made.learned, 3))
    assert "answered 404" in lost_servers(made.generator)[servers[0].url]

    servers[1].restart()
    servers[1].break_with = {"/collective_rpc": 404}

    with pytest.raises(DrumlineError, match=rf"{servers[1].url}/collective_rpc was answered 404"):
        made.sample(REQUESTS).finish()


def test_a_server_that_loses_its_weights_again_and_again_is_one_line(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    made = hand_over_to(servers[:1], model, tmp_path)
    servers[0].restarts_after = range(100)

    with pytest.raises(DrumlineError, match="3 times in a row — give this run servers of its own"):
        made.sample(REQUESTS[:1]).finish()


def test_a_server_that_tells_no_version_is_named_once(
    servers: list[StubServer], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers[0].tells_version = False
    servers[0].break_with = {"/update_weight_version": 422}
    made = hand_over_to(servers, model, tmp_path)

    assert caplog.text.count("does not tell which weights it has") == 1
    assert servers[0].url in caplog.text

    servers[0].restart()
    servers[1].restart()

    assert made.restore_weights() == [servers[1].url]


def test_all_servers_must_be_there_at_the_start(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    missing = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(EnvironmentFault, match=rf"url: GET {missing}/health: "):
        client(servers, url=[servers[0].url, missing])

    _, refresh = make_generator(config_of(servers), run_dir=tmp_path)
    servers[1].break_with = {"/collective_rpc": 404}

    with pytest.raises(DrumlineError, match="VLLM_SERVER_DEV_MODE=1"):
        refresh(read_model(model).named_parameters())


def test_a_server_under_two_names_is_refused(
    servers: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be handed everything twice; a second adapter of the same name is an error to vLLM."""
    url = servers[0].url
    monkeypatch.setenv("SAMPLER", url.replace("http://", "http://me:hunter22@"))

    for same in (f"{url}/", "${env:SAMPLER}"):
        config = c.VLLMGenerator(url=(url, same))

        with pytest.raises(EnvironmentFault, match=f"{url} stands twice there") as refused:
            RemoteVLLM(config, tiny_tokenizer(), 7)

        assert "hunter22" not in refused.value.line()


def test_each_server_is_checked_for_its_log_probs(servers: list[StubServer]) -> None:
    servers[1].processed = True

    with pytest.raises(DrumlineError, match=rf"{servers[1].url} does not give"):
        client(servers, top_p=0.9).generate(REQUESTS, 0)


@pytest.mark.slow
def test_each_server_is_compared_with_the_policy(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    learned = read_model(model)
    tokenizer = tiny_tokenizer()
    config = config_of(servers)

    def read(episodes: Episodes) -> Any:
        return completion_log_probs(learned, episodes, False)

    made, refresh = make_generator(config, run_dir=tmp_path)
    prompts = probe_prompts(tokenizer, {0, 1, 2}, 1, 96, config)
    check = SamplerCheck(config, read, prompts, "fp32", is_new=True)

    def hand_over(turn: int) -> None:
        change_weights(learned, turn)
        refresh(learned.named_parameters(remove_duplicate=False))
        check.compare(made)

    hand_over(0)
    hand_over(1)
    servers[0].is_dead = True
    hand_over(2)
    servers[1].ignored = {"lm_head.weight"}

    stale = rf"what samples at {servers[1].url} is not the policy"

    with pytest.raises(TrainingStopped, match=stale):
        hand_over(3)

    servers[0].restart()

    with pytest.raises(TrainingStopped, match=stale):
        hand_over(4)


def test_addresses_in_a_list_may_have_passwords() -> None:
    text = (
        "data: {train: x.jsonl}\n"
        "algorithm: {kind: grpo, generator: {kind: vllm, url: ['http://a:1', 'http://me:hunter2@b:1']}}\n"
    )
    generator: Any = load_text(text, []).algorithm.generator  # type: ignore[attr-defined]

    assert generator.urls[0] == "http://a:1"
    assert "hunter2" not in generator.urls[1]
    assert reveal(generator.urls[1], "url") == "http://me:hunter2@b:1"


def test_a_lost_server_is_named_while_a_run_goes_on() -> None:
    event = next(event for event in story(20) if event.kind == "rollout")
    rollout = {**vars(event), "kind": "rollout", "lost_servers": {"http://b:1": "reset"}}
    del rollout["metrics"]

    assert "lost: http://b:1" in told(START, rollout)[1]

    rollout["lost_servers"] = {}

    assert "lost" not in told(START, rollout)[1]


TURNS_AHEAD: dict[str, Any] = {
    "ahead": 1,
    "environment": {
        "kind": "class",
        "path": "tests.episodes:Vowels",
        "turns": 3,
        "max_tokens": 40,
        "timeout_seconds": 60,
    },
    "rewards": [{"kind": "environment"}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "generator"),
    [({}, {}), (TURNS_AHEAD, {"stop": ["a", "e", "i"]})],
    ids=["completions", "turns ahead"],
)
def test_a_run_goes_on_with_the_same_numbers_when_a_server_dies(
    tmp_path: Path, algorithm: dict[str, Any], generator: dict[str, Any]
) -> None:
    model = tiny_model_dir(tmp_path / "model")

    def train(name: str, servers: list[StubServer]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        urls = [server.url for server in servers]
        config = write_served_run(folder, model, urls, generator, algorithm)
        finished = drumline("train", config)
        assert finished.code == 0, finished.out + finished.err
        # Each step learns from a rollout of its own, and measures how far its sampler is.
        assert finished.out.count("log-ratio to the sampler") == 3
        return folder / "run"

    with StubServer(read_model(model)) as one:
        alone = train("one", [one])

    with StubServer(read_model(model)) as one, StubServer(read_model(model)) as other:
        # The probe has 8 prompts for each server, and a rollout 8 episodes.
        other.dies_after = 10
        both = train("two", [one, other])

    assert column(both, "loss") == pytest.approx(column(alone, "loss"), abs=1e-6)
    assert list(column(both, "lost_servers", "rollout")[-1]) == [other.url]
    assert column(alone, "lost_servers", "rollout") == [{}, {}, {}]


@pytest.mark.slow
@pytest.mark.claim(
    "the last line of a run whose only server died names the server and its last words"
)
def test_a_run_whose_only_server_dies_says_so_in_its_last_line(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model")

    with StubServer(read_model(model)) as server:
        # The probe has 8 prompts, and a rollout 8 episodes.
        server.dies_after = 8 + 8 + 8 + 2
        config = write_served_run(tmp_path, model, server.url, launch={"max_restarts": 1})
        finished = drumline("train", config)

    assert finished.code == 2, finished.out + finished.err

    (last,) = finished.error_lines

    assert last.startswith(f"error: algorithm.generator.url: GET {server.url}/health: ")
    assert "start it with `vllm serve MODEL`" in last
    assert (
        f"before it, rank 0 failed after step 1: algorithm.generator.url: POST {server.url}" in last
    )
    assert last.endswith("go on with --resume")
    assert "Traceback" not in last
