"""What a model says about cutting it, and what is refused before any process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drumline.config.config import Config
from drumline.config.load import refused_changes
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.errors import PlanError
from drumline.hardware.detect import Machine
from drumline.models.load import facts, load_config
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, first_reason_against_sequence_parallelism, resolve
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.planner.cost.traffic import widths

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
LLAMA = {"model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}


MIXTRAL = {
    "model_type": "mixtral",
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    **SIZES,
}


def check(
    values: dict[str, Any], tp: int = 1, ep: int = 1, strategy: Any = None, **sections: Any
) -> None:
    head: Any = "text" if values["model_type"] == "bert" else "lm"
    model = facts(load_config(None, ModelConfig(config=values)), length=8, head=head)
    data = {"train": [{"kind": "file", "path": "x.jsonl"}]}
    config = Config.model_validate(
        {
            "model": {"config": values},
            "data": data,
            "strategy": strategy or {"kind": "tp"},
            **sections,
        }
    )
    check_rules(Case(config, Mesh(tp=tp, ep=ep), "cpu", "fp32", model))


def test_a_model_with_a_plan_is_cut() -> None:
    check(LLAMA, tp=2)
    # Projections that are gathered before the heads are told apart: any number of ranks.
    check({"model_type": "olmo2", "intermediate_size": 32, "num_key_value_heads": 2, **SIZES}, tp=3)
    check(MIXTRAL, tp=2)
    check({"model_type": "bert", "intermediate_size": 32, **SIZES}, tp=2)
    check(MIXTRAL, ep=4, strategy={"kind": "ddp", "ep": 4})
    check(MIXTRAL, tp=2, ep=2, strategy={"kind": "ddp", "ep": 2, "tp": 2})


@pytest.mark.parametrize(
    ("values", "tp", "says"),
    [
        (
            {"model_type": "opt", "ffn_dim": 32, "vocab_size": 64, "num_hidden_layers": 1},
            2,
            "tp × no plan",
        ),
        ({**LLAMA}, 3, "tp × heads"),
        (
            {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
            2,
            "tp × heads",
        ),
        ({**LLAMA, "vocab_size": 2, "num_key_value_heads": 6}, 6, "tp × small vocabulary"),
        ({**MIXTRAL, "num_local_experts": 5}, 2, "tp × experts"),
    ],
    ids=["no plan", "heads of keys", "heads", "vocabulary", "experts"],
)
def test_refused_before_any_process_starts(values: dict[str, Any], tp: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check(values, tp)
    check(values, 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"model_type": "doge", "intermediate_size": 32, **SIZES},
            "DogeAttention does not run on a rank's part",
        ),
        (
            {
                "model_type": "llama4_text",
                "intermediate_size": 32,
                "num_key_value_heads": 2,
                "num_local_experts": 2,
                **SIZES,
            },
            "Llama4TextExperts does not run on a rank's part of the model: experts are given tokens without choices",
        ),
    ],
)
def test_a_class_that_does_not_run_on_a_part_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=f"tp × the model's code: {says}"):
        check(values, tp=2)
    check(values, tp=1)


def test_a_whole_tensor_beside_parts_of_heads_is_refused() -> None:
    """Keys of DeepSeek-V3 have a part that all heads share, whose gradient is the sum over all heads."""
    plan = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    config = load_config(
        None, ModelConfig(config={"model_type": "deepseek_v3", "num_hidden_layers": 1})
    )
    config.base_model_tp_plan = {
        f"layers.*.self_attn.{name}": style for name, style in plan.items()
    }
    assert (
        facts(config, length=8).tp_failure
        == "its code mixes whole tensors with parts, and would lack gradients"
    )


STREAM = {"kind": "tp", "sequence_parallel": True}


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        (LLAMA, {"strategy": STREAM}, "sequence_parallel × tp 1"),
        (
            {**MIXTRAL, "output_router_logits": True},
            {"tp": 2, "strategy": STREAM},
            "sequence_parallel × the router loss",
        ),
        (
            {"model_type": "gpt2", "n_layer": 1, "vocab_size": 64},
            {"tp": 2, "strategy": STREAM},
            "sequence_parallel × dropout",
        ),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 1},
            {"tp": 2, "strategy": STREAM},
            "sequence_parallel × the model",
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "intermediate_size": 32,
                "num_key_value_heads": 2,
                **SIZES,
            },
            {"tp": 2, "strategy": STREAM},
            "Qwen3_5GatedDeltaNet of its blocks gives whole sequences",
        ),
        (LLAMA, {"ep": 2}, "ep × the model: it has no experts"),
        (MIXTRAL, {"ep": 3}, "ep × experts: 4 experts do not divide by ep 3"),
        (
            MIXTRAL,
            {"ep": 4, "tp": 2},
            "ep × experts: 4 experts do not divide by ep 4 × tp 2, whose ranks hold some of them",
        ),
        (
            MIXTRAL,
            {
                "ep": 2,
                "compile": {"enabled": True},
                "memory": {"activation_checkpointing": "selective"},
            },
            "ep × compile × selective checkpointing",
        ),
        (
            LLAMA,
            {"strategy": {"kind": "ddp", "shard_optimizer": True, "compression": "int8"}},
            "shard_optimizer × compression",
        ),
        (
            LLAMA,
            {
                "strategy": {"kind": "ddp", "shard_optimizer": True},
                "optimizer": {"kind": "schedule_free"},
                "schedule": "constant",
            },
            "shard_optimizer × schedule_free",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(
    values: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check(values, **options)


def test_pure_bf16_goes_with_a_sharded_step() -> None:
    """Rounding depends on the place of an entry, not on who steps it."""
    strategy = {"kind": "ddp", "shard_optimizer": True}
    precision = {"kind": "bf16", "master": "bf16"}
    model = facts(load_config(None, ModelConfig(config=LLAMA)), length=8)
    config = Config.model_validate(
        {
            "model": {"config": LLAMA},
            "data": {"train": [{"kind": "file", "path": "x.jsonl"}]},
            "strategy": strategy,
            "precision": precision,
        }
    )
    check_rules(Case(config, config.strategy.mesh(2), "cpu", "bf16", model))


def test_the_usual_layout_of_a_mixture_is_taken() -> None:
    """bf16 weights and moments, experts on all GPUs of a host, recomputation, compiled."""
    values = {**MIXTRAL, "num_local_experts": 8}
    sizes = facts(load_config(None, ModelConfig(config=values)), length=8)
    config = Config.model_validate(
        {
            "model": {"config": values},
            "data": {"train": [{"kind": "file", "path": "x.jsonl"}]},
            "strategy": {"kind": "fsdp2", "ep": 8},
            "precision": {"kind": "bf16", "master": "bf16"},
            "memory": {"activation_checkpointing": "full"},
            "compile": {"enabled": True},
        }
    )
    mesh = config.strategy.mesh(8)
    assert mesh.ep == 8
    check_rules(Case(config, mesh, "cuda", "bf16", sizes))


MACHINE = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 24, "n_head": 6, "vocab_size": 64}
WHOLE_INPUTS = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def sizes_of(values: dict[str, Any]) -> ModelFacts:
    return facts(load_config(None, ModelConfig(config=values)), length=8)


def planned(
    values: dict[str, Any], strategy: Any, sizes: ModelFacts | None, **sections: Any
) -> Plan:
    data = {"train": [{"kind": "file", "path": "x.jsonl"}], "max_length": 8}
    config = Config.model_validate(
        {"model": {"config": values}, "data": data, "strategy": strategy, **sections}
    )
    return resolve(
        config, run_dir="", machine=MACHINE, world_size=4, model=KnownModel(sizes), data=None
    )


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "tp", "degree": 2},
        {"kind": "ddp", "tp": 2},
        {"kind": "fsdp2", "tp": 2},
        {"kind": "ddp", "tp": 2, "cp": 2},
        {"kind": "ddp", "tp": 2, "pp": 2},
    ],
)
def test_the_stream_is_cut_with_tensor_parallelism(strategy: dict[str, Any]) -> None:
    values = {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    plan = planned(values, strategy, sizes_of(values))
    assert plan.stream_parts == 2
    assert any(line.startswith("sequence_parallel on") for line in plan.why)
    whole = planned(values, {**strategy, "sequence_parallel": False}, sizes_of(values))
    assert whole.stream_parts == 1
    assert not any("sequence_parallel" in line for line in whole.why)
    assert (
        refused_changes(plan.config, whole.config, ()).keys == []
    )  # a run may go on under the other


def test_the_stream_stays_whole_on_fewer_ranks() -> None:
    """A run of `tp` on all ranks that goes on with one is no run with a key that cannot be."""
    plan = planned(LLAMA, {"kind": "tp", "degree": 1}, sizes_of(LLAMA))
    assert plan.stream_parts == 1
    assert not any("sequence_parallel" in line for line in plan.why)


@pytest.mark.parametrize(
    ("values", "sections", "says"),
    [
        ({**MIXTRAL, "output_router_logits": True}, {}, "all tokens of a document"),
        (GPT2, {}, "drop the same positions"),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 1, "vocab_size": 64},
            {},
            "Linear of its blocks",
        ),
        (WHOLE_INPUTS, {"adapter": "lora"}, "whole inputs would return all tokens"),
    ],
)
def test_the_stream_stays_whole_for_a_reason(
    values: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    plan = planned(values, {"kind": "tp", "degree": 2}, sizes_of(values), **sections)
    assert plan.stream_parts == 1
    (line,) = (line for line in plan.why if "sequence_parallel" in line)
    assert line.startswith("sequence_parallel off: ") and says in line


def test_the_stream_of_a_type_that_is_not_proven_stays_whole() -> None:
    sizes = replace(sizes_of(LLAMA), name="another")
    plan = planned(LLAMA, {"kind": "tp", "degree": 2}, sizes)
    assert plan.stream_parts == 1
    (line,) = (line for line in plan.why if "sequence_parallel" in line)
    assert line == "sequence_parallel off: it is not proven for models of type another"


def test_the_stream_of_one_model_keeps_those_of_all_whole() -> None:
    sizes = replace(sizes_of(LLAMA), roles={"reward": sizes_of(GPT2)})
    plan = planned(LLAMA, {"kind": "tp", "degree": 2}, replace(sizes, roles={}))
    assert plan.stream_parts == 2
    assert first_reason_against_sequence_parallelism(plan.config, sizes).startswith("reward: ")
    assert "not known" in first_reason_against_sequence_parallelism(plan.config, None)
    with_images = replace(sizes_of(LLAMA), vision_language=True)
    assert "images" in first_reason_against_sequence_parallelism(plan.config, with_images)


def test_the_stream_stays_whole_beside_ring_attention() -> None:
    ulysses = {"kind": "ddp", "tp": 2, "cp": 2}
    config = planned(
        {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4}, ulysses, None
    ).config
    assert not first_reason_against_sequence_parallelism(config, sizes_of(LLAMA))
    ring = config.strategy.model_copy(update={"cp_method": "ring"})
    config = config.model_copy(update={"strategy": ring})
    assert "ring" in first_reason_against_sequence_parallelism(config, sizes_of(LLAMA))


def test_a_plan_of_an_older_version_has_what_its_config_says() -> None:
    for is_cut, parts in ((True, 2), (False, 1)):
        strategy = {"kind": "tp", "degree": 2, "sequence_parallel": is_cut}
        written = planned(LLAMA, strategy, sizes_of(LLAMA)).model_dump(mode="json")
        del written["stream_parts"]
        assert Plan.from_values(written).stream_parts == parts


def test_layers_send_by_their_inputs_and_outputs_however_their_matrix_lies() -> None:
    """Conv1D of GPT-2 keeps its matrix transposed: c_attn is 24 → 72, c_fc 24 → 96, their partners lead back to 24."""
    sent = widths(sizes_of(GPT2), staged=False)
    assert (sent.inputs, sent.outputs) == (24 + 24, 24 + 24)
    assert (sent.gathered_outputs, sent.full_inputs) == (72, 24)
