"""LoRA on servers: they have the base model and get the adapter alone, a new one before each rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drumline.config import rollouts as c
from drumline.config.config import LoRAConfig
from drumline.engine.build import build_engine
from drumline.errors import DrumlineError, PlanError
from drumline.models import adapters
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.rl.build import lost_servers
from drumline.rl.hand_over import AdapterFiles
from drumline.rl.restarts import CheckedSampling
from drumline.train.sampling import TextGeneration
from tests.harness import column, drumline
from tests.plans import small_config, small_plan
from tests.served_runs import TWO_RANKS, write_served_run
from tests.tiny import read_model, tiny_model_dir, tiny_tokenizer
from tests.unit.test_vllm import REQUESTS, assert_same, make_generator, sample_here
from tests.vllm_stub import StubServer

LORA = LoRAConfig(r=4, alpha=16, targets="all-linear")


@pytest.fixture
def server(model: Path) -> Iterator[StubServer]:
    with StubServer(read_model(model)) as stub:
        yield stub


def adapted(model: Path, options: LoRAConfig) -> Any:
    policy = read_model(model)
    adapters.inject(policy, options, 7)
    return policy


def learn(policy: Any, seed: int) -> None:
    """Change the adapter alone, as training does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if adapters.is_adapter(name):
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)


def generator_of(policy: Any, urls: list[str], folder: Path, **options: Any) -> tuple[Any, Any]:
    config = c.VLLMGenerator(**{"url": urls, "max_new_tokens": 12, "weights": "adapter", **options})
    files = AdapterFiles(policy.peft_config["default"].save_pretrained, adapters.name_in_files)
    return make_generator(config, run_dir=folder, adapter=files)


def adapter_of(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in policy.named_parameters():
        if adapters.is_adapter(name):
            yield name, parameter


@pytest.mark.slow
@pytest.mark.claim("a vLLM server samples from the policy after it got a LoRA adapter alone")
@pytest.mark.parametrize("options", [LORA, LORA.model_copy(update={"rslora": True})], ids=str)
def test_servers_get_the_adapter_alone(
    server: StubServer, model: Path, tmp_path: Path, options: LoRAConfig
) -> None:
    policy = adapted(model, options)
    made, refresh = generator_of(policy, [server.url], tmp_path)
    names = []

    for turn in range(3):
        # The first is an adapter that has learned nothing, which adds zero.
        refresh(adapter_of(policy))
        assert_same(made.generate(REQUESTS, turn), sample_here(policy, turn))
        names += server.adapters
        learn(policy, turn)

    assert len(set(names)) == 3, "one at a time, each with a name of its own"
    assert server.loads == 0

    paths = [path for path, _ in server.asked if path != "/v1/completions"]
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    assert paths == [load, unload, load, unload, load]

    (folder,) = (tmp_path / "rollout-weights").iterdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")

    assert config["peft_type"] == "LORA"
    assert len(weights) == len(list(adapter_of(policy)))
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_a_server_that_takes_no_adapters_is_one_line(
    server: StubServer, model: Path, tmp_path: Path
) -> None:
    policy = adapted(model, LORA)
    _, refresh = generator_of(policy, [server.url], tmp_path)
    server.takes_adapters = False
    fix = r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a --max-lora-rank"

    with pytest.raises(DrumlineError, match=rf"load_lora_adapter was answered 404.*{fix}"):
        refresh(adapter_of(policy))

    server.takes_adapters = True
    server.max_rank = 2

    with pytest.raises(DrumlineError, match=rf"greater than max_lora_rank 2.*{fix}"):
        refresh(adapter_of(policy))


@pytest.mark.slow
def test_a_server_that_was_restarted_gets_the_present_adapter(model: Path, tmp_path: Path) -> None:
    policy = adapted(model, LORA)

    with StubServer(read_model(model)) as first, StubServer(read_model(model)) as second:
        made, refresh = generator_of(policy, [first.url, second.url], tmp_path)

        def roll_out(turn: int) -> None:
            learn(policy, turn)
            refresh(adapter_of(policy))
            assert_same(made.generate(REQUESTS, turn), sample_here(policy, turn))

        roll_out(0)
        # It is back so soon that nobody has seen it dead. It does not know the adapter by its name.
        first.restart()
        assert_same(made.generate(REQUESTS, 1), sample_here(policy, 1))

        assert "does not exist" in lost_servers(made)[first.url]

        roll_out(2)

        assert lost_servers(made) == {}
        assert list(first.adapters) == list(second.adapters)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [{0}, {2}, {0, 7}], ids=["before", "during", "twice"])
@pytest.mark.parametrize("in_background", [False, True])
def test_the_only_server_is_restarted_unseen_and_gets_the_adapter_again(
    server: StubServer, model: Path, tmp_path: Path, restarts: set[int], in_background: bool
) -> None:
    policy = adapted(model, LORA)
    learn(policy, 0)
    made, refresh = generator_of(policy, [server.url], tmp_path)
    refresh(adapter_of(policy))
    server.restarts_after = restarts

    sampling = CheckedSampling(made, REQUESTS, 1, in_background, refresh.restore)

    assert_same(sampling.finish(), sample_here(policy, 1))
    assert lost_servers(made) == {}
    assert len(server.bodies("/v1/load_lora_adapter")) > 1


def test_a_server_that_denies_an_adapter_it_lists_is_one_line(
    server: StubServer, model: Path, tmp_path: Path
) -> None:
    policy = adapted(model, LORA)
    made, refresh = generator_of(policy, [server.url], tmp_path)
    refresh(adapter_of(policy))
    server.break_with = {"/v1/completions": 404}

    with pytest.raises(DrumlineError, match=r"v1/completions was answered 404"):
        CheckedSampling(made, REQUESTS, 1, restore_weights=refresh.restore).finish()

    assert len(server.bodies("/v1/load_lora_adapter")) == 1


UNLOADABLE: dict[str, dict[str, Any]] = {
    "DoRA": {"dora": True},
    "PiSSA": {"init": "pissa"},
    "QLoRA": {"quantize": "4bit"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable tokens": {"trainable_tokens": [3]},
    "several adapters": {"more": {"other": {"r": 2}}},
}


def test_adapters_that_vllm_does_not_load_are_refused_before_any_process() -> None:
    def check(adapter: Any, url: str | None = "http://a", **sections: Any) -> None:
        generator = {"kind": "vllm", "url": url, "weights": "adapter"}
        algorithm = {"kind": "grpo", "group_size": 4, "generator": generator}
        config = small_config(algorithm=algorithm, strategy="ddp", adapter=adapter, **sections)
        check_rules(Case(config, config.strategy.mesh(2), "cuda", "bf16", None))

    check("lora")

    for name, options in UNLOADABLE.items():
        with pytest.raises(PlanError, match=rf"generator\.weights: weights=adapter × {name}: .* —"):
            check({"kind": "lora", **options})

    with pytest.raises(PlanError, match=r"no adapter to hand over — use adapter=lora, or algo"):
        check("none")

    with pytest.raises(ValueError, match="weights is of servers: set url, or take it out"):
        check("lora", url=None)

    with pytest.raises(PlanError, match="the servers have no base model that the adapter fits"):
        check("lora", model={"id": "m", "init": "random"})


@pytest.mark.slow
def test_the_run_hands_over_what_its_engine_has(server: StubServer, tmp_path: Path) -> None:
    """From the engine to the server's completions, with nothing of the base model on the way."""
    folder = tiny_model_dir(tmp_path / "model")
    generator = {"kind": "vllm", "url": server.url, "weights": "adapter", "max_new_tokens": 12}
    algorithm = {"kind": "grpo", "group_size": 4, "generator": generator}
    config = small_config(
        model={"id": str(folder)},
        adapter={"kind": "lora", "r": 4, "targets": "attention"},
        algorithm=algorithm,
        run={"seed": 7},
    )
    plan = small_plan(config, tmp_path / "run", model_path=str(folder))
    engine: Any = build_engine(plan, "cpu")
    learn(engine.model, 3)
    sampler: Any = config.algorithm
    generate = TextGeneration(plan, sampler.generator, engine, tiny_tokenizer(), "cpu")
    made = generate(REQUESTS, 2, False)

    lora: Any = config.adapter
    policy = adapted(folder, lora)
    learn(policy, 3)

    assert_same(made, sample_here(policy, 2))

    (written,) = (tmp_path / "run" / "rollout-weights").iterdir()
    names = load_file(written / "adapter_model.safetensors")

    assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}

    # Between two turns of a conversation the only server is restarted, and does not know the adapter.
    server.restart()

    assert_same(generate.sample_again(REQUESTS, 3, False), sample_here(policy, 3))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", {"kind": "fsdp2", "tp": 2}], ids=str)
def test_the_adapter_of_a_sharded_policy_reaches_the_server(tmp_path: Path, strategy: Any) -> None:
    model = tiny_model_dir(tmp_path / "model")

    with StubServer(read_model(model)) as server:
        config = write_served_run(
            tmp_path,
            model,
            server.url,
            {"weights": "adapter"},
            adapter={"kind": "lora", "r": 4, "targets": "attention"},
            strategy=strategy,
            **TWO_RANKS,
        )
        finished = drumline("train", config)

    assert finished.code == 0, finished.out + finished.err
    # A stale adapter would have ended the run: the policy has learned.
    assert max(column(tmp_path / "run", "sampler_gap", "rollout")) < 1e-3
