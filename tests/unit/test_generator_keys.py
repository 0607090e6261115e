"""Each key of `algorithm.generator` that the config accepts is read, in every combination of kind and mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from drumline.config import rollouts as c
from drumline.config.load import load_text
from drumline.errors import ConfigError
from drumline.rl import vllm
from drumline.rl.build import RolloutFiles, build_generator
from drumline.rl.hand_over import AdapterFiles
from tests.sglang_stub import SGLangStub
from tests.tiny import read_model, tiny_tokenizer
from tests.unit.test_vllm import REQUESTS, FakeLLM, no_copy
from tests.vllm_stub import StubServer

# Each key of any kind → a value that is not its default. `kind` and `url` choose the mode below.
OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "max_new_tokens": 3,
    "stop": ("e",),
    "batch": 2,
    "timeout_seconds": 100.0,
    "weights": "none",
    "folder": "/elsewhere",
    "transport": "network",
    "memory": 0.5,
}
MODE = {"kind", "url"}
KINDS: dict[str, type[c._Generator]] = {
    "hf": c.HFGenerator,
    "continuous": c.ContinuousGenerator,
    "vllm": c.VLLMGenerator,
    "sglang": c.SGLangGenerator,
}
URL = "http://a"
# Mode → (kind, the options that choose it).
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "hf": ("hf", {}),
    "hf, greedy": ("hf", {"top_k": 1}),
    "continuous": ("continuous", {}),
    "vllm in each rank": ("vllm", {}),
    "vllm servers": ("vllm", {"url": URL}),
    "vllm servers with the adapter": ("vllm", {"url": URL, "weights": "adapter"}),
    "vllm servers with their own weights": ("vllm", {"url": URL, "weights": "none"}),
    "vllm servers over the network": ("vllm", {"url": URL, "transport": "network"}),
    "sglang": ("sglang", {"url": URL}),
    "sglang with its own weights": ("sglang", {"url": URL, "weights": "none"}),
}
# Mode → the keys of its kind that would not be read.
REFUSED: dict[str, set[str]] = {
    "hf": set(),
    "hf, greedy": {"top_p"},
    "continuous": set(),
    "vllm in each rank": {"timeout_seconds", "weights", "folder", "transport"},
    "vllm servers": {"memory"},
    "vllm servers with the adapter": {"memory"},
    "vllm servers with their own weights": {"memory", "folder", "transport"},
    "vllm servers over the network": {"memory", "folder", "weights"},
    # It is not known which log-probs SGLang returns with them.
    "sglang": {"top_p", "top_k", "transport"},
    "sglang with its own weights": {"top_p", "top_k", "folder", "transport"},
}


def accepted_keys(mode: str) -> set[str]:
    """Return the keys whose other value the config accepts in a mode."""
    kind, options = MODES[mode]
    accepted = set()
    for name in set(KINDS[kind].model_fields) - MODE:
        try:
            KINDS[kind](**{**options, name: OTHER_VALUES[name]})
        except ValidationError as refusal:
            (error,) = refusal.errors()
            assert "\n" not in error["msg"]
        else:
            accepted.add(name)
    return accepted


@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_nobody_would_read_is_refused(mode: str) -> None:
    kind, _ = MODES[mode]

    assert accepted_keys(mode) == set(KINDS[kind].model_fields) - MODE - REFUSED[mode]


def record_reads(config: Any) -> tuple[Any, set[str]]:
    """Return a copy of a config, and the set to which it adds each of its keys that is read."""
    read: set[str] = set()
    keys = set(type(config).model_fields)

    class Recorded(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in keys:
                read.add(name)
            return super().__getattribute__(name)

    copied = Recorded.model_construct(**config.model_dump())
    read.clear()
    return copied, read


@pytest.fixture
def servers(model: Path) -> Iterator[dict[str, StubServer]]:
    with StubServer(read_model(model)) as vllm_server, SGLangStub(read_model(model)) as sglang:
        yield {"vllm": vllm_server, "sglang": sglang}


@pytest.mark.slow
@pytest.mark.claim("each key of a generator that the config accepts is read")
@pytest.mark.parametrize("mode", MODES)
def test_each_key_that_is_accepted_is_read(
    mode: str,
    servers: dict[str, StubServer],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, options = MODES[mode]
    if "url" in options:
        options = {**options, "url": servers[kind].url}
    stand_in = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace, __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(vllm, "_engine", vllm._engine.__wrapped__)
    # `monkeypatch` puts back what the engine sets.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    config, read = record_reads(KINDS[kind](**{**options, "max_new_tokens": 2}))
    # The weights of the hand-over matter to other tests.
    adapter = AdapterFiles(lambda folder: None, lambda name: name)
    files = RolloutFiles(model_path=str(model), run_dir=tmp_path, adapter=adapter)
    policy = None
    if "url" not in options:
        policy = read_model(model)
    generator, _ = build_generator(config, tiny_tokenizer(), 7, policy, no_copy, files=files)
    generator.generate(REQUESTS[:1], 0)

    assert accepted_keys(mode) <= read


@pytest.mark.parametrize(
    ("algorithm", "default"),
    [
        ("{kind: grpo, generator: {kind: vllm, url: 'http://a', batch: 0}}", 64),
        ("{kind: grpo, generator: {kind: vllm, url: 'http://a', batch: true}}", 64),
        ("{kind: grpo, generator: {kind: hf, batch: 0}}", 32),
        ("{kind: gkd, teacher: a, top_k: -1}", 0),
        ("{kind: distill, teacher: a, top_k: -1}", 32),
    ],
)
def test_the_default_that_an_error_names_is_that_of_the_kind(algorithm: str, default: int) -> None:
    with pytest.raises(ConfigError) as refused:
        load_text(f"algorithm: {algorithm}\ndata: {{train: x.jsonl}}", [])
    assert refused.value.fix == f"the default is {default}"
