"""What a model cannot do is refused before a process starts, by facts that are read from its class and its config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drumline.config.load import load_values
from drumline.errors import ConfigError, DataError, DrumlineError, PlanError
from drumline.models.load import facts
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.train.setup import Request, make_plan
from tests.tiny import tiny_tokenizer
from tests.unit.test_plan import config

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("kind", "options", "strategy", "says"),
    [
        (
            "gpt_oss",
            {"head_dim": 8, "num_key_value_heads": 2},
            {"kind": "cp"},
            "does not go through transformers' attention interface",
        ),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            {"kind": "ddp", "cp": 2},
            "",
        ),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
            {"kind": "cp"},
            "layers of kind linear_attention are not known to run on parts or on whole rows",
        ),
        ("llama", {}, {"kind": "cp"}, ""),
        ("llama", {}, {"kind": "pp"}, ""),
        (
            "biogpt",
            {},
            {"kind": "pp"},
            "pp × the model: BioGptForCausalLM has no single list of blocks",
        ),
        (
            "gemma3_text",
            {"sliding_window": 4},
            {"kind": "cp", "method": "ring"},
            "ring × windows: ring attention in torch takes no mask",
        ),
        (
            "starcoder2",
            {"sliding_window": 4},
            {"kind": "cp", "method": "ring"},
            "ring × windows: ring attention in torch takes no mask",
        ),
        ("starcoder2", {"sliding_window": None}, {"kind": "cp", "method": "ring"}, "ring × CPU"),
    ],
)
def test_what_the_class_and_the_config_say(
    kind: str, options: dict[str, Any], strategy: dict[str, Any], says: str
) -> None:
    sizes = facts(AutoConfig.for_model(kind, **SMALL, **options), 64)
    made = config(strategy=strategy)
    case = Case(made, made.strategy.mesh(2), "cpu", "fp32", sizes)
    if not says:
        check_rules(case)
        return
    with pytest.raises(PlanError, match=says):
        check_rules(case)


def test_pairs_are_not_cut_over_the_threads_of_dp() -> None:
    """Its rows are the chosen answers, then the rejected ones: equal runs of them hold one side of each pair."""
    for algorithm, refused in (("dpo", True), ("sft", False)):
        made = config(strategy="dp", algorithm=algorithm)
        check_rules(Case(made, made.strategy.mesh(1), "cpu", "fp32", None))
        if refused:
            with pytest.raises(PlanError, match="would land on two GPUs"):
                check_rules(Case(made, made.strategy.mesh(1), "cuda", "fp32", None))
        else:
            check_rules(Case(made, made.strategy.mesh(1), "cuda", "fp32", None))


def prompts(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> Request:
    """A run on prompts of domains `one` (these rows) and `two` (the same)."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {
            "id": None,
            "tokenizer": str(tmp_path / "tokenizer"),
            "config": {"model_type": "llama", **SMALL, "vocab_size": 320},
        },
        "algorithm": {
            "kind": "grpo",
            "group_size": 2,
            "generator": {"kind": "hf", "max_new_tokens": 8},
            "rewards": [{"kind": "regex", "pattern": "a"}],
        },
        "data": {
            "train": [
                {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "domain": name}
                for name in ("one", "two")
            ],
            "max_length": 48,
            "cache_dir": str(tmp_path / "cache"),
        },
        "run": {"device": "cpu", "dir": str(tmp_path / "run"), "steps": 1, "report_to": []},
        "batch": {"global_samples": 4},
        "strategy": "ddp",
        "launch": {"nproc": 1},
    }
    return Request(load_values(values, list(overrides)))


def groups(pattern: str) -> dict[str, Any]:
    return {"optimizer": {"groups": [{"match": [pattern], "lr_ratio": 16}]}}


CURRICULUM = "algorithm.curriculum={{kind: weights, weights: {}}}".format


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([CURRICULUM("{one: 1, two: 3}")], ""),
        (
            [CURRICULUM("{one: 1}")],
            "algorithm.curriculum.weights: the shares must name each domain once — the data has one, two",
        ),
        (
            [CURRICULUM("{one: 1, three: 3}")],
            "algorithm.curriculum.weights: the shares must name each domain once",
        ),
        (
            ["algorithm.generator.max_new_tokens=48"],
            "data.max_length: data.max_length 48 leaves no room for a prompt before",
        ),
        (
            ["algorithm.environment={kind: class, path: 'tests.episodes:Vowels', max_tokens: 16}"],
            "",
        ),
        (
            ["algorithm.environment={kind: class, path: 'none.py:A', max_tokens: 16}"],
            "algorithm.environment.path: there is no file",
        ),
        (
            ["algorithm.environment={kind: tools, functions: ['a.py:f'], max_tokens: 16}"],
            "model.chat_template: the chat template shows no tools",
        ),
    ],
)
def test_rollouts_that_cannot_be(tmp_path: Path, overrides: list[str], line: str) -> None:
    """A dry run says it without prepared data, and `train` with it; a rank is not started by either."""
    request = prompts(tmp_path, [{"prompt": "sing"}], *overrides)
    for dry_run in (True, False):
        if not line:
            make_plan(request, on_progress=lambda *_: None, dry_run=dry_run)
            continue
        with pytest.raises(DrumlineError) as refused:
            make_plan(request, on_progress=lambda *_: None, dry_run=dry_run)
        assert refused.value.line().startswith(line) and refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        ("{at: 1, ranks: [0, 1]}", "run.profile.ranks: there is no rank 1: the run has 1"),
        ("{at: 2}", "run.profile.at: the trace begins at step 2, and the run has 1 step"),
    ],
)
def test_a_profile_that_nobody_would_write(tmp_path: Path, profile: str, line: str) -> None:
    with pytest.raises(PlanError, match=re.escape(line)):
        make_plan(
            prompts(tmp_path, [{"prompt": "sing"}], f"run.profile={profile}"),
            on_progress=lambda *_: None,
        )


def test_kinds_that_several_algorithms_have_are_named_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.generator.* choose one of hf, continuous, vllm, sglang$"
    ):
        prompts(tmp_path, [], "algorithm.generator={max_new_tokens: 8}")


def test_weights_are_not_negative(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.curriculum.*-1 given, 0 or more is wanted"):
        prompts(tmp_path, [], CURRICULUM("{one: 1, two: -1}"))


def test_a_prompt_that_leaves_no_room_for_its_completion(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:2: the prompt has .* tokens, and data\.max_length less max_new_tokens 8 leaves 40",
    ):
        make_plan(
            prompts(tmp_path, [{"prompt": "sing"}, {"prompt": "drum " * 60}]),
            on_progress=lambda *_: None,
        )


@pytest.mark.claim("what a model cannot do is refused in a dry run")
@pytest.mark.parametrize(
    ("kind", "options", "sections", "line"),
    [
        ("llama", {}, {"strategy": "cp"}, ""),
        (
            "gpt_oss",
            {"head_dim": 8, "num_key_value_heads": 2},
            {"strategy": "cp"},
            "strategy: cp × the model: context parallelism cannot",
        ),
        (
            "llama",
            {},
            {"adapter": {"kind": "lora", "targets": ["nowhere"]}},
            "adapter.targets: no layer of LlamaForCausalLM",
        ),
        ("llama", {}, {"adapter": {"kind": "lora"}, **groups("*.lora_B.*")}, ""),
        (
            "llama",
            {},
            groups("*.lora_B.*"),
            "optimizer.groups: '*.lora_B.*' matches no parameter that learns",
        ),
        (
            "bloom",
            {"intermediate_size": None},
            {},
            "data.packing: packing × the model: BloomForCausalLM does not keep the documents",
        ),
        ("bloom", {"intermediate_size": None}, {"data": {"packing": False}}, ""),
        (
            "biogpt",
            {},
            {"strategy": "pp"},
            "strategy: pp × the model: BioGptForCausalLM has no single list of blocks to cut into stages",
        ),
        (
            "llama",
            {"attn": "between"},
            {"strategy": "pp"},
            "strategy: pp × the model: LlamaForCausalLM uses model.norm between its blocks",
        ),
    ],
)
def test_a_dry_run_says_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
    sections: dict[str, Any],
    line: str,
) -> None:
    """No rank has to start: what its own run alone shows is tried on a small copy."""
    if options == {"attn": "between"}:
        options, run = {}, LlamaDecoderLayer.forward

        def between(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.outside[0](run(self, *args, **kwargs))

        def made(model: Any, config: Any, build: Any = LlamaForCausalLM.__init__) -> None:
            build(model, config)
            for layer in model.model.layers:
                object.__setattr__(layer, "outside", [model.model.norm])

        monkeypatch.setattr(LlamaDecoderLayer, "forward", between)
        monkeypatch.setattr(LlamaForCausalLM, "__init__", made)
    sizes = {
        key: size
        for key, size in {**SMALL, "vocab_size": 320, **options}.items()
        if size is not None
    }
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("")
    values = {
        "model": {
            "id": None,
            "tokenizer": str(tmp_path / "tokenizer"),
            "config": {"model_type": kind, **sizes},
        },
        "run": {"device": "cpu", "dir": str(tmp_path / "run"), "report_to": []},
        "launch": {"nproc": 2},
        "strategy": "ddp",
        **sections,
        "data": {
            "train": [{"kind": "file", "path": str(tmp_path / "rows.jsonl")}],
            "max_length": 32,
            **sections.get("data", {}),
        },
    }
    request = Request(load_values(values, []))
    if not line:
        assert make_plan(request, on_progress=lambda *_: None, dry_run=True).mesh.world_size == 2
        return
    with pytest.raises(DrumlineError) as refused:
        make_plan(request, on_progress=lambda *_: None, dry_run=True)
    assert refused.value.line().startswith(line) and refused.value.exit_code == 2


MODULES = """
from torch import nn

def rows():
    return [([0.0] * 4, 0)] * 8

def objective(model, batch): ...

def number():
    return 3

def fails():
    raise RuntimeError("no such layer")

class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.BatchNorm1d(4)])

def one():
    return nn.Linear(4, 4)
"""
RECOMPUTED = {"memory": {"activation_checkpointing": "full"}}


@pytest.mark.claim("what a model cannot do is refused in a dry run")
@pytest.mark.parametrize(
    ("builder", "sections", "line"),
    [
        ("number", {}, "build: build gave int, not a torch.nn.Module"),
        (
            "fails",
            {},
            "model.path: calling {file}:fails raised RuntimeError in mine.py:13: no such layer",
        ),
        (
            "Norms",
            RECOMPUTED,
            "memory.activation_checkpointing: activation checkpointing × the model: it runs a block twice, and a batch",
        ),
        (
            "one",
            RECOMPUTED,
            "memory.activation_checkpointing: activation checkpointing × the model: Linear has no activation",
        ),
        ("Norms", {"batch": {"global_samples": 4, "micro_batch": 1}}, ""),
        ("one", {"strategy": "pp"}, "strategy: a pipeline requires the stages of Linear"),
    ],
)
def test_a_module_is_laid_out_before_a_rank_is_started(
    tmp_path: Path, builder: str, sections: dict[str, Any], line: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODULES)
    values = {
        "model": {"kind": "python", "path": f"{file}:{builder}"},
        "algorithm": {"kind": "python", "path": f"{file}:objective"},
        "data": {"train": [{"kind": "python", "path": f"{file}:rows"}]},
        "run": {"device": "cpu", "dir": str(tmp_path / "run"), "report_to": []},
        "batch": {"global_samples": 4},
        "launch": {"nproc": 2},
        "strategy": "ddp",
        **sections,
    }
    request = Request(load_values(values, []))
    if not line:
        plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
        assert any("accumulation is not quite the larger batch" in reason for reason in plan.why)
        return
    with pytest.raises(DrumlineError) as refused:
        make_plan(request, on_progress=lambda *_: None, dry_run=True)
    assert refused.value.line().startswith(line.format(file=file)) and refused.value.exit_code == 2
