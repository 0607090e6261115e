"""Weights that servers read over the network, by the code of the plug-in drumline-vllm."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from drumline.config import rollouts as c
from drumline.errors import DrumlineError
from drumline.rl import weight_network
from drumline.rl.build import lost_servers
from drumline.rl.restarts import CheckedSampling
from drumline.rl.weight_folder import ADAPTER_CONFIG, ADAPTER_FILE
from drumline.rl.weight_network import HostTensors, WeightOffer, address_for
from drumline_vllm.reading import ReadingError, read_tensors
from tests.harness import column, drumline
from tests.loopback import until
from tests.served_runs import TWO_RANKS, write_served_run
from tests.tiny import read_model, tiny_model_dir
from tests.unit.test_server_adapters import LORA, adapted, adapter_of, generator_of, learn
from tests.unit.test_vllm import (
    REQUESTS,
    assert_same,
    change_weights,
    make_generator,
    sample_here,
)
from tests.vllm_stub import NETWORK_HAND_OVER, StubServer

NETWORK = {"transport": "network"}


@pytest.fixture
def servers(model: Path) -> Iterator[list[StubServer]]:
    with StubServer(read_model(model)) as first, StubServer(read_model(model)) as second:
        yield [first, second]


def make(servers: list[StubServer], **options: Any) -> tuple[Any, Any]:
    urls = [server.url for server in servers]
    config = c.VLLMGenerator(**{"url": urls, "max_new_tokens": 12, **NETWORK, **options})
    return make_generator(config)


def paths(server: StubServer) -> list[str]:
    return [path for path, _ in server.asked]


def weights_of(model: Any) -> Any:
    return model.named_parameters(remove_duplicate=False)


TENSORS = {
    "matrix": torch.randn(300, 400),
    "low": torch.randn(7).bfloat16(),
    "number": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}


def has_address(address: str) -> bool:
    """Return whether a server can listen on an address of version 6 of the Internet Protocol."""
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def host_tensors(
    tensors: dict[str, torch.Tensor], kind: type[HostTensors] = HostTensors
) -> HostTensors:
    made = kind()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    made.end(has_failed=False)
    return made


def offer_of(tensors: dict[str, torch.Tensor], seconds: float = 20) -> WeightOffer:
    return WeightOffer(host_tensors(tensors), "127.0.0.1", seconds)


def test_what_is_read_is_what_was_offered() -> None:
    with offer_of(TENSORS) as offer:
        read = dict(read_tensors(offer.url, 20))

    assert list(read) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0)


@pytest.mark.skipif(not has_address("::1"), reason="this host has no address ::1")
def test_weights_are_read_by_version_6_of_the_protocol() -> None:
    with WeightOffer(host_tensors(TENSORS), "::1", 20) as offer:
        assert len(list(read_tensors(offer.url, 20))) == len(TENSORS)


def test_only_who_knows_the_secret_reads_weights() -> None:
    with offer_of(TENSORS) as offer:
        guessed = offer.url.rsplit("/", 1)[0] + "/guess"
        with pytest.raises(ReadingError, match="answered 404"):
            list(read_tensors(guessed, 20))


def test_a_trainer_that_is_gone_or_hangs_is_one_line() -> None:
    with offer_of(TENSORS) as offer:
        url = offer.url

    with pytest.raises(ReadingError, match=r"trainer at 127.0.0.1:\d+ sent no weights: .*refused"):
        list(read_tensors(url, 20))

    # It takes the connection and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(ReadingError, match="sent no weights: timed out"):
            list(read_tensors(url, 0.2))


class BreaksOff(HostTensors):
    """Weights whose reading fails in the middle."""

    def entries(self) -> Iterator[Any]:
        for number, entry in enumerate(super().entries()):
            if number == 1:
                raise RuntimeError("out of memory")
            yield entry


def test_weights_that_break_off_are_not_taken_for_whole() -> None:
    with WeightOffer(host_tensors(TENSORS, BreaksOff), "127.0.0.1", 20) as offer:
        with pytest.raises(ReadingError, match="broke off"):
            list(read_tensors(offer.url, 20))


def test_a_reader_that_hung_gets_nothing_after_the_hand_over() -> None:
    # More than what the kernel keeps of a connection.
    large = {"large": torch.zeros(50_000_000, dtype=torch.uint8)}
    with offer_of(large) as offer:
        parts = urlsplit(offer.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        answer.readline()

    assert len(answer.read()) < large["large"].nbytes
    connection.close()


@pytest.mark.slow
@pytest.mark.claim(
    "a vLLM server samples from the policy after it read its weights over the network"
)
def test_new_weights_reach_all_servers_over_the_network(
    servers: list[StubServer], model: Path
) -> None:
    learned = read_model(model)
    made, refresh = make(servers, batch=1)

    for turn in range(3):
        change_weights(learned, turn)
        refresh(weights_of(learned))
        assert_same(made.generate(REQUESTS, turn), sample_here(learned, turn))

    for server in servers:
        asked = [path for path, _ in server.asked if path != "/v1/completions"]
        assert asked == NETWORK_HAND_OVER * 3
        assert server.weight_version.endswith("-2")


def test_the_memory_of_the_weights_before_is_used_again(
    servers: list[StubServer], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    class Noted(HostTensors):
        def end(self, *, has_failed: bool) -> None:
            super().end(has_failed=has_failed)
            places.append(next(iter(self.tensors.values())).data_ptr())

    monkeypatch.setattr(weight_network, "HostTensors", Noted)
    learned = read_model(model)
    _, refresh = make(servers[:1])
    refresh(weights_of(learned))
    refresh(weights_of(learned))
    waiting = refresh.hold(weights_of(learned))

    assert places[0] == places[1]
    assert places[2] != places[1], "the present ones may have to be handed over again"

    waiting().finish()


def test_servers_read_while_weights_are_gathered(servers: list[StubServer], model: Path) -> None:
    """And do not take them if gathering fails."""
    learned = read_model(model)
    change_weights(learned, 0)
    made, refresh = make(servers)
    weights = list(weights_of(learned))

    def slow_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(weights):
            if number == len(weights) - 1:
                until(lambda: all("/update_weights" in paths(each) for each in servers), 60)
            yield weight

    refresh(slow_weights())
    assert_same(made.generate(REQUESTS, 3), sample_here(learned, 3))

    def broken_weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield weights[0]
        raise RuntimeError("out of memory")

    loads = servers[0].loads

    with pytest.raises(RuntimeError, match="out of memory"):
        refresh(broken_weights())

    assert servers[0].loads == loads


@pytest.mark.slow
def test_weights_wait_in_memory_while_a_server_samples_by_others(
    servers: list[StubServer], model: Path
) -> None:
    learned = read_model(model)
    made, refresh = make(servers[:1])
    expected = []
    waiting = []

    for turn in range(3):
        change_weights(learned, turn)
        expected.append(sample_here(learned, turn))
        waiting.append(refresh.hold(weights_of(learned)))

    # As for an evaluation, which uses the present weights while others wait.
    change_weights(learned, 3)
    refresh(weights_of(learned))
    assert_same(made.generate(REQUESTS, 3), sample_here(learned, 3))

    for turn, hand_over in enumerate(waiting):
        hand_over().finish()
        assert_same(made.generate(REQUESTS, turn), expected[turn])


@pytest.mark.slow
@pytest.mark.claim("a server that dies while it reads weights is lost, and the others go on")
def test_a_server_that_dies_while_it_reads_is_lost_until_it_is_back(
    servers: list[StubServer], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = servers
    learned = read_model(model)
    made, refresh = make(servers)

    def roll_out(turn: int) -> None:
        change_weights(learned, turn)
        refresh(weights_of(learned))
        assert_same(made.generate(REQUESTS, turn), sample_here(learned, turn))

    roll_out(0)
    first.dies_while_reading = True
    roll_out(1)

    assert list(lost_servers(made)) == [first.url]
    assert "a server is lost, the others go on" in caplog.text

    first.restart()
    roll_out(2)

    assert lost_servers(made) == {}

    # One that hangs is lost after its time, too.
    made.pool.servers[1].timeout_seconds = 0.5
    second.break_with = {"/update_weights": "hang"}
    roll_out(3)

    assert "took longer than 0.5 s" in lost_servers(made)[second.url]


@pytest.mark.slow
def test_a_server_that_restarted_unseen_reads_the_present_weights_again(
    servers: list[StubServer], model: Path
) -> None:
    learned = read_model(model)
    change_weights(learned, 0)
    made, refresh = make(servers)
    refresh(weights_of(learned))
    servers[0].restart()
    sampling = CheckedSampling(made, REQUESTS, 3, False, refresh.restore)

    assert_same(sampling.finish(), sample_here(learned, 3))
    assert servers[0].loads == 2
    assert servers[1].loads == 1


def test_an_update_that_a_killed_run_has_left_open_is_ended(
    servers: list[StubServer], model: Path
) -> None:
    learned = read_model(model)
    change_weights(learned, 0)
    servers[0].is_updating = True
    made, refresh = make(servers[:1])
    refresh(weights_of(learned))

    assert_same(made.generate(REQUESTS, 3), sample_here(learned, 3))


def test_a_server_without_the_plug_in_is_one_line(servers: list[StubServer], model: Path) -> None:
    learned = read_model(model)
    servers[0].has_plug_in = False
    _, refresh = make(servers[:1])
    fix = r"— `pip install drumline-vllm` where vLLM 0.32.*--weight-transfer-config '{\"backend\": \"drumline\"}'"

    with pytest.raises(DrumlineError, match=rf"was answered 500: .*not configured.*{fix}"):
        refresh(weights_of(learned))

    servers[0].break_with = {"/init_weight_transfer_engine": 404}

    with pytest.raises(DrumlineError, match=rf"was answered 404: .*{fix}") as refused:
        refresh(weights_of(learned))

    assert "\n" not in refused.value.line()


def test_a_host_that_cannot_be_reached_is_one_line(
    servers: list[StubServer], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, refresh = make(servers[:1])
    monkeypatch.setattr(weight_network, "source_address", lambda address: None)

    with pytest.raises(DrumlineError, match=r"no route to 127.0.0.1 — set transport: folder"):
        refresh(weights_of(read_model(model)))


def test_the_address_is_the_one_that_leads_to_the_server(servers: list[StubServer]) -> None:
    made, _ = make(servers[:1])

    assert address_for(made.pool.servers[0]) == "127.0.0.1"


@pytest.mark.slow
def test_servers_read_the_adapter_alone(
    servers: list[StubServer], model: Path, tmp_path: Path
) -> None:
    policy = adapted(model, LORA)
    urls = [server.url for server in servers]
    made, refresh = generator_of(policy, urls, tmp_path, **NETWORK)

    for turn in range(3):
        refresh(adapter_of(policy))
        assert_same(made.generate(REQUESTS, turn), sample_here(policy, turn))
        learn(policy, turn)

    for server in servers:
        assert server.loads == 0
        assert len(server.adapters) == 1
        (folder,) = server.memory.iterdir()
        assert folder.name == f"drumline-adapter-127.0.0.1-{server.server_address[1]}"
        assert sorted(file.name for file in folder.iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE]

    assert not list(tmp_path.iterdir()), "nothing is written here"

    servers[0].max_rank = 2

    with pytest.raises(DrumlineError, match=r"greater than max_lora_rank 2.*--max-lora-rank of ad"):
        make_one = generator_of(policy, urls[:1], tmp_path, **NETWORK)[1]
        make_one(adapter_of(policy))


def test_keys_that_contradict_the_network_are_one_line() -> None:
    options = {"url": "http://a", **NETWORK}

    for name in ("nccl", "gloo", "http"):
        with pytest.raises(ValueError, match=f"by the name {name}: write network, which sends"):
            c.VLLMGenerator.model_validate({"url": "http://127.0.0.1:8000", "transport": name})
    with pytest.raises(ValueError, match="writes no files: take folder or transport out"):
        c.VLLMGenerator(**options, folder="/shared")

    with pytest.raises(ValueError, match="these keep their own: take it out, or set weights"):
        c.VLLMGenerator(**options, weights="none")

    with pytest.raises(ValueError, match="needs a plug-in that only vLLM has: take it out"):
        c.SGLangGenerator(**options)

    with pytest.raises(ValueError, match="transport is of servers: set url, or take it out"):
        c.VLLMGenerator(**NETWORK)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_sharded_run_has_the_same_numbers_by_folder_and_by_network(
    tmp_path: Path, ahead: int
) -> None:
    model = tiny_model_dir(tmp_path / "model")
    losses = {}

    for transport in ("folder", "network"):
        folder = tmp_path / transport
        folder.mkdir()
        with StubServer(read_model(model)) as server:
            config = write_served_run(
                folder, model, server.url, {"transport": transport}, strategy="fsdp2", **TWO_RANKS
            )
            finished = drumline("train", config, f"algorithm.ahead={ahead}")
            assert finished.code == 0, finished.out + finished.err
            assert server.loads >= 3
        losses[transport] = column(folder / "run", "loss")

    assert losses["network"] == losses["folder"]
    assert not (tmp_path / "network" / "run" / "rollout-weights").exists()
