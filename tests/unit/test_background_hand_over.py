"""Weights that servers load in the background, while the ranks prepare a rollout or learn from one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.config import rollouts as c
from drumline.data.batches import Episodes
from drumline.errors import DrumlineError
from drumline.rl.ahead import BackgroundSampling
from drumline.rl.generate import Completion, Request
from drumline.rl.reading import EpisodeReader
from drumline.rl.restarts import CheckedSampling
from tests.loopback import until
from tests.tiny import read_model
from tests.unit.test_vllm import REQUESTS, assert_same, change_weights, make_generator, sample_here
from tests.vllm_stub import StubServer


class Arriving:
    """Weights that arrive when they are let."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_finished = False

    def finish(self) -> None:
        self.log.append("arrived")


class Answers:
    """A generator that answers at once."""

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        return [Completion([step], [0.0], True) for _ in requests]


def add_rollout(
    queue: BackgroundSampling, log: list[str], transfer: Arriving, *, compares: bool, step: int = 0
) -> Any:
    """Add a rollout whose hand-over, comparison and sampling are noted in `log`."""

    def start_sampling() -> CheckedSampling:
        log.append("sampling")
        return CheckedSampling(Answers(), [Request([5], (0, 0))], step, in_background=True)

    def hand_over() -> Arriving:
        log.append("sent")
        return transfer

    def compare() -> float:
        log.append("compared")
        return 0.25

    return queue.add(start_sampling, hand_over, compare if compares else None)


def test_sampling_starts_when_the_weights_have_arrived_and_are_compared() -> None:
    log: list[str] = []
    queue = BackgroundSampling()
    transfer = Arriving(log)
    scheduled = add_rollout(queue, log, transfer, compares=True)
    queue.begin_next()
    queue.start_next_if_free()

    assert log == ["sent"], "nothing waits for them"
    assert queue.is_loading
    assert not queue.is_free()
    assert scheduled.sampler_gap is None

    transfer.is_finished = True
    queue.start_next_if_free()

    assert log == ["sent", "arrived", "compared", "sampling"]
    assert not queue.is_loading
    assert scheduled.sampler_gap == 0.25
    assert scheduled.finish()[0].tokens == [0]
    assert queue.is_free()


@pytest.mark.parametrize("compares", [True, False])
def test_only_weights_that_are_compared_must_arrive_before_the_policy_learns(
    compares: bool,
) -> None:
    log: list[str] = []
    queue = BackgroundSampling()
    scheduled = add_rollout(queue, log, Arriving(log), compares=compares)
    queue.begin_next()
    queue.finish_comparison()

    assert queue.is_loading is not compares
    # An evaluation hands over other weights, so it waits until these have sampled their rollout.
    queue.finish()

    assert log == ["sent", "arrived", *["compared"] * compares, "sampling"]
    assert scheduled.sampling is not None
    assert scheduled.sampling.is_checked


def test_a_rollout_that_is_asked_for_waits_for_its_weights_and_those_before() -> None:
    log: list[str] = []
    queue = BackgroundSampling()
    first = add_rollout(queue, log, Arriving(log), compares=False, step=1)
    second = add_rollout(queue, log, Arriving(log), compares=False, step=2)
    queue.start_next_if_free()

    assert second.finish()[0].tokens == [2]
    assert first.finish()[0].tokens == [1]
    assert log == ["sent", "arrived", "sampling"] * 2


class WaitingServer(StubServer):
    """A server that loads weights when it is let."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begun, self.may_load = Event(), Event()

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.begun.set()
        assert self.may_load.wait(60)
        super().load_state(state)


def weights_of(model: Any) -> Any:
    return model.named_parameters(remove_duplicate=False)


def make(server: StubServer, transport: str, folder: Path) -> tuple[Any, Any]:
    options: dict[str, Any] = {"url": server.url, "max_new_tokens": 12, "transport": transport}
    return make_generator(c.VLLMGenerator(**options), run_dir=folder)


@pytest.mark.parametrize("transport", ["folder", "network"])
def test_the_policy_may_change_while_servers_load_what_it_was(
    model: Path, tmp_path: Path, transport: str
) -> None:
    learned = read_model(model)
    with WaitingServer(read_model(model)) as server:
        made, refresh = make(server, transport, tmp_path)
        server.may_load.set()
        refresh(weights_of(learned))
        server.may_load.clear()
        server.begun.clear()
        change_weights(learned, 1)
        expected = sample_here(learned, 1)
        loading = refresh.begin(weights_of(learned))

        assert server.begun.wait(60)
        assert not loading.is_finished

        # The next ones are set aside meanwhile, where they are in the way of neither.
        change_weights(learned, 2)
        expected_later = sample_here(learned, 2)
        later = refresh.hold(weights_of(learned))
        change_weights(learned, 3)
        server.may_load.set()
        until(lambda: loading.is_finished)
        loading.finish()
        loading.finish()
        assert_same(made.generate(REQUESTS, 1), expected)
        later().finish()
        assert_same(made.generate(REQUESTS, 2), expected_later)


@pytest.mark.parametrize("transport", ["folder", "network"])
def test_a_server_that_does_not_load_is_named_where_the_weights_are_awaited(
    model: Path, tmp_path: Path, transport: str
) -> None:
    learned = read_model(model)
    with StubServer(read_model(model)) as server:
        _, refresh = make(server, transport, tmp_path)
        refresh(weights_of(learned))
        server.is_dead = True
        loading = refresh.begin(weights_of(learned))
        until(lambda: loading.is_finished)
        with pytest.raises(DrumlineError) as caught:
            loading.finish()

        assert server.url in caught.value.what


class Attended:
    """What goes on while episodes are read; it counts how often it is attended to."""

    def __init__(self, is_loading: Callable[[], bool]) -> None:
        self._is_loading = is_loading
        self.times = 0

    @property
    def is_loading(self) -> bool:
        return self._is_loading()

    def start_next_if_free(self) -> None:
        self.times += 1


def read_by(is_loading: Callable[[], bool]) -> tuple[list[int], torch.Tensor]:
    """Read seven episodes. Returns the micro-batches of each call of the engine, and what was read."""
    calls: list[int] = []

    def infer(batches: Any, read: Any, adapter: bool) -> list[torch.Tensor]:
        outputs = [read(None, batch) for batch in batches]
        calls.append(len(outputs))
        return outputs

    background = Attended(is_loading)
    mesh = SimpleNamespace(data_ranks=1, pp=1)
    plan: Any = SimpleNamespace(mesh=mesh, batch=SimpleNamespace(eval_micro_batch=2))
    reader = EpisodeReader(plan, 0, True, "cpu", 0, None, background=background)
    prompts = [np.full(2, 3, np.int64)] * 7
    completions = [np.arange(1, 2 + number, dtype=np.int64) for number in range(7)]
    episodes = Episodes.start(prompts, completions)
    engine: Any = SimpleNamespace(infer=infer)
    values = reader.read(engine, episodes, lambda _, batch: batch.targets_BT[None].float())

    assert background.times == len(calls)
    return calls, values


def test_what_is_read_in_parts_while_weights_are_on_their_way_is_the_same() -> None:
    calls, whole = read_by(lambda: False)

    assert calls == [4]

    calls, in_parts = read_by(lambda: True)

    assert calls == [1, 1, 1, 1]
    assert torch.equal(in_parts, whole)
    assert whole.sum() > 0

    left = iter([True, True, False, False])
    calls, changing = read_by(lambda: next(left))

    assert calls == [1, 1, 2], "they have arrived"
    assert torch.equal(changing, whole)
