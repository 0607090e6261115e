"""`compile: auto`: what the planner chooses and says, on GPUs and on a CPU; how a YAML writes it; and the time that compiling saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drumline.config.config import CompileConfig
from drumline.config.load import load_text
from drumline.errors import ConfigError
from drumline.hardware.cluster import Cluster
from drumline.planner.public import Plans, plan
from drumline.planner.search import compiling
from drumline.planner.search.answer import Question
from drumline.planner.search.auto import choose_compile
from drumline.planner.search.compiling import describe_compile
from drumline.planner.search.search import evaluate
from tests.unit.conftest import Run

DATA = "data: {train: [{kind: file, path: a.jsonl}]}\n"
LORA_8B: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "h100-80g",
    "length": 4096,
    "adapter": "lora",
}


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("", None),
        ("compile: auto", None),
        ("compile: {enabled: auto}", None),
        ("compile: true", True),
        ("compile: {enabled: true}", True),
        ("compile: {enabled: false, mode: max-autotune}", False),
    ],
)
def test_how_a_yaml_writes_it(text: str, enabled: bool | None) -> None:
    assert load_text(DATA + text, [], "c.yaml").compile.enabled is enabled


def test_another_word_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="maybe"):
        load_text(DATA + "compile: {enabled: maybe}", [], "c.yaml")


@pytest.fixture(scope="module")
def long_run() -> Plans:
    return plan(overrides=["batch.global_samples=32", "run.steps=1000"], **LORA_8B)


@pytest.mark.slow
def test_a_long_run_compiles_and_a_short_one_does_not(long_run: Plans) -> None:
    first = long_run.ranked[0]
    assert first.candidate.config.compile.enabled and first.config["compile"] == {"enabled": True}
    assert first.tokens_per_s == max(
        ranked.tokens_per_s for ranked in long_run.ranked if ranked.name == "single"
    )
    startup = first.candidate.estimate.startup
    assert startup > 0
    assert first.hours() == pytest.approx((1000 * first.seconds + startup) / 3600)
    short = plan(overrides=["batch.global_samples=32", "run.steps=3"], **LORA_8B).ranked[0]
    assert not short.candidate.config.compile.enabled and "compile" not in short.config


def test_both_numbers_are_told(long_run: Plans) -> None:
    question, layout = long_run.answer.question, long_run.ranked[0].candidate.layout

    def told(steps: int | None) -> str:
        return describe_compile(layout, question.facts, question.cluster, steps)

    assert told(1000).startswith("compile auto: on (experimental")
    assert "about 60 s before the first step" in told(1000) and "s over 1,000 steps" in told(1000)
    assert "it pays from step" in told(None)


@pytest.mark.slow
def test_plan_tells_them(run: Run) -> None:
    flags = [
        "--model",
        "llama-3.1-8b",
        "--cluster",
        "h100-80g",
        "--length",
        "2048",
        "--adapter",
        "lora",
    ]
    code, out, _ = run("plan", *flags, "run.steps=1000")
    told = " ".join(out.split())
    assert code == 0 and "compile auto: o" in told and "before the first step" in told
    _, out, _ = run("plan", *flags, "run.steps=1000", "compile=false")
    assert "compile auto" not in out


def on_h100(*overrides: str) -> Question:
    return plan(
        overrides=["batch.global_samples=32", "run.steps=1000", *overrides], **LORA_8B
    ).answer.question


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "enabled", "told"),
    [
        (["strategy=single"], True, "compile auto: on"),
        (["strategy=single", "run.steps=2"], False, "compile auto: off"),
        (
            ["strategy=single", "data.eval=[{kind: file, path: b}]", "eval.samples=2"],
            False,
            "blocks also sample",
        ),
        (["strategy=single", "adapter={kind: lora, quantize: 4bit}"], False, "unpacking"),
        (["strategy=single", "compile=false"], False, ""),
    ],
)
def test_a_named_strategy(overrides: list[str], enabled: bool, told: str) -> None:
    config, line = choose_compile(on_h100(*overrides))
    assert config.compile.enabled is enabled and told in line and bool(line) == bool(told)


@pytest.mark.slow
def test_a_mixture_compiles_what_is_around_its_experts_with_ep_alone() -> None:
    """In the usual layout of Qwen3-30B-A3B on a host: bf16 weights and moments, experts on all GPUs,
    recomputation."""

    def told(strategy: str) -> tuple[bool | None, str]:
        found = plan(
            model="qwen3-30b-a3b",
            cluster="8xh100-80g",
            length=4096,
            overrides=[
                f"strategy={strategy}",
                "precision={kind: bf16, master: bf16}",
                "memory.activation_checkpointing=full",
                "batch={global_samples: 64, micro_batch: 2}",
                "run.steps=1000",
            ],
        )
        config, line = choose_compile(found.answer.question)
        return config.compile.enabled, line

    enabled, line = told("{kind: fsdp2, ep: 8}")
    assert enabled and line.startswith("compile auto: on")
    enabled, line = told("fsdp2")
    assert not enabled and "without ep experts are compiled" in line


def test_on_a_cpu_it_is_off_and_nothing_is_told(long_run: Plans) -> None:
    found = plan(
        model="llama-3.2-1b",
        cluster="cpu",
        length=256,
        overrides=["run.steps=1000000", "strategy=single"],
    )
    question = found.answer.question
    assert choose_compile(question) == (question.config, "")
    made = evaluate(question, question.config, "")
    assert made.config.compile == CompileConfig(enabled=False)
    assert describe_compile(made.layout, question.facts, question.cluster, 10) == ""


def gain(*overrides: str, model: str, cluster: str, bandwidth: float | None) -> float:
    """Speed of a compiled step over that of an eager one."""
    question = plan(overrides=[*overrides], model=model, cluster=cluster).answer.question
    if bandwidth is not None:
        device = replace(question.cluster.device, bandwidth=bandwidth, memory_bytes=95 * 2**30)
        cluster_: Cluster = replace(question.cluster, device=device)
        question = replace(question, cluster=cluster_)
    eager, compiled = (
        evaluate(
            question, question.config.model_copy(update={"compile": CompileConfig(enabled=on)}), ""
        ).estimate
        for on in (False, True)
    )
    return eager.seconds.total / compiled.seconds.total


@pytest.mark.parametrize(
    ("model", "length", "micro", "checkpointing", "measured"),
    [
        ("llama-2-7b", 2048, 8, "full", 1.185),
        ("llama-2-7b", 2048, 8, "selective", 1.23),
        ("llama-3.1-8b", 8192, 2, "selective", 6667 / 5762),
    ],
)
def test_what_compiling_gains_on_h100(
    model: str, length: int, micro: int, checkpointing: str, measured: float
) -> None:
    """torchtitan's runs on H100 with 2.4 TB/s. What is fused was counted of a block, and not fitted to them."""
    overrides = [
        "strategy=fsdp2",
        f"data.max_length={length}",
        f"batch.micro_batch={micro}",
        f"memory.activation_checkpointing={checkpointing}",
        "algorithm={kind: pretrain, loss_chunk: 0}",
        "precision=bf16",
    ]
    predicted = gain(*overrides, model=model, cluster="8xh100-80g", bandwidth=2.4e12)
    assert abs(predicted - measured) < 0.05


def test_one_gpu_without_a_batch_has_larger_micro_batches_looked_at() -> None:
    first = plan(overrides=["run.steps=1000"], **LORA_8B).ranked[0]
    assert first.config["batch"] == {"global_samples": 2, "micro_batch": 2}
    set_by_user = plan(overrides=["run.steps=1000", "batch.global_samples=1"], **LORA_8B).ranked[0]
    assert set_by_user.config["batch"]["micro_batch"] == 1


def test_a_machine_without_triton_or_a_compiler_stays_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = on_h100("strategy=single")
    here = replace(question, cluster=replace(question.cluster, is_this_machine=True))
    monkeypatch.setattr(compiling, "is_installed", lambda package: False)
    assert "triton is missing here" in choose_compile(here)[1]
    monkeypatch.setattr(compiling, "is_installed", lambda package: True)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert "C compiler" in choose_compile(here)[1]
    assert choose_compile(question)[0].compile.enabled  # another machine is taken to have both
