"""Pipelines without processes: where a model is cut, what a schedule asks of the batch, and that stages make the whole model,
for classes that lay their trunks out in different ways."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from drumline.config.config import Config
from drumline.engine.stages import (
    Absent,
    Stage,
    find_cuts,
    rank_part,
    stages_reproduce_model,
    trace_cuts,
    weights_of_both_ends,
)
from drumline.errors import PlanError
from drumline.hardware.detect import Machine
from drumline.models.small import TrialTokens
from drumline.plan.explain import explain
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.plan.stages import Cost, balance, bubble, stage_cost

MACHINE = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
# Llama 3.2 1B: the head alone is worth more than four of the 16 layers.
LLAMA_1B = ModelFacts(
    name="llama", parameters=1_235_814_400, flops_per_token=7e9, vocab_size=128_256, max_positions=2048, layers=16, hidden=2048,
    block_parameters=(60_821_504,) * 16, embedding_parameters=262_670_336, head_parameters=262_668_288, attention_flops=12 * 2048 * 1024.0,
)  # fmt: skip


def planned(
    strategy: dict[str, Any],
    world: int,
    batch: dict[str, Any] | None = None,
    facts: ModelFacts | None = LLAMA_1B,
) -> Plan:
    config = Config.model_validate(
        {
            "model": {"id": "x"},
            "data": {"train": [{"kind": "file", "path": "x"}]},
            "strategy": strategy,
            "batch": batch or {},
        }
    )
    return resolve(
        config,
        run_dir="r",
        machine=MACHINE,
        world_size=world,
        model=KnownModel(facts, "m"),
        data=None,
    )


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    for stages in range(1, 6):
        parts = balance(lambda a, b: Cost(sum(weights[a:b]), b - a), len(weights), stages)
        assert (
            parts[0][0] == 0 and parts[-1][1] == 8 and all(a[1] == b[0] for a, b in pairwise(parts))
        )
        tried = [
            list(zip((0, *cuts), (*cuts, 8), strict=True))
            for cuts in combinations(range(1, 8), stages - 1)
        ]
        fastest = min(max(sum(weights[a:b]) for a, b in cut) for cut in tried)
        assert max(sum(weights[a:b]) for a, b in parts) == fastest


def test_of_equally_fast_cuts_the_largest_stage_is_smallest_then_the_most_even() -> None:
    # The first layer is heavy in bytes alone: any cut takes 2 at best, and [1, 2, 2] spares its stage.
    assert balance(lambda a, b: Cost(b - a, 10.0 * (a == 0) + b - a), 5, 3) == (
        (0, 1),
        (1, 3),
        (3, 5),
    )
    assert sorted(b - a for a, b in balance(lambda a, b: Cost(b - a, 0), 7, 3)) == [2, 2, 3]


def test_the_head_takes_layers_from_the_last_stage() -> None:
    plan = planned({"kind": "pp"}, 4)
    assert plan.pipeline is not None
    sizes = [stop - first for first, stop in plan.pipeline.layers]
    assert sum(sizes) == 16 and sizes[3] < min(sizes[:3]), sizes
    slowest = max(stage_cost(LLAMA_1B, *bounds).flops for bounds in plan.pipeline.layers)
    even = max(stage_cost(LLAMA_1B, 4 * i, 4 * i + 4).flops for i in range(4))
    assert slowest < 0.75 * even
    assert "stage 3 on rank 3" in explain(plan)


def test_open_batch_fills_the_pipeline() -> None:
    plan = planned({"kind": "ddp", "pp": 4}, 8, {"global_samples": 64})
    assert (
        plan.batch.accumulation >= 4
        and plan.batch.global_samples == plan.batch.micro_batch * plan.batch.accumulation * 2
    )
    assert planned({"kind": "model_parallel"}, 4, {"micro_batch": 2}).batch.accumulation == 1


@pytest.mark.parametrize(
    ("strategy", "world", "batch", "says"),
    [
        ({"kind": "pp", "schedule": "1f1b"}, 4, {"micro_batch": 1, "accumulation": 3}, ["1f1b", "has 3", "accumulation 4"]),
        ({"kind": "pp", "schedule": "interleaved"}, 4, {"micro_batch": 1, "accumulation": 9}, ["has 9", "accumulation 8 or 10"]),
        ({"kind": "pp", "stages_per_rank": 3}, 2, {}, ["3 were asked for", "interleaved"]),
        ({"kind": "pp", "schedule": "interleaved", "stages_per_rank": 5}, 4, {}, ["16 layers", "20 stages", "at most 16"]),
        ({"kind": "fsdp2", "pp": 2, "pipeline": {"schedule": "zero_bubble"}}, 4, {}, ["zero_bubble × fsdp2", "interleaved"]),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)  # fmt: skip
def test_refused_with_the_nearest_that_works(
    strategy: dict[str, Any], world: int, batch: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(strategy, world, batch)
    assert all(words in refusal.value.line() for words in says), refusal.value.line()


def test_a_model_without_one_list_of_blocks_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="single list of blocks"):
        planned({"kind": "pp"}, 2, facts=replace(LLAMA_1B, uncut="it has no single list of blocks"))


def test_bubble() -> None:
    assert bubble("gpipe", 4, 1, 12) == pytest.approx(3 / 15)
    assert bubble("interleaved", 4, 3, 4) == pytest.approx(3 / 15)
    assert bubble("model_parallel", 4, 1, 12) == 0.75


@pytest.mark.parametrize(
    ("ranks", "per_rank", "micro_batches"),
    [(2, 2, 1), (2, 4, 3), (4, 2, 2), (4, 3, 3), (4, 3, 8), (8, 2, 5), (8, 2, 24)],
)
def test_the_bubble_is_what_torchs_own_order_leaves(
    ranks: int, per_rank: int, micro_batches: int
) -> None:
    """Each rank takes its calls in that order, each as soon as its input is there; a backward takes as long as two forwards."""
    each = micro_batches // max(1, micro_batches // ranks)
    schedule = SimpleNamespace(
        n_local_stages=per_rank,
        microbatches_per_round=each,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
    )
    order = partial(ScheduleInterleaved1F1B._calculate_single_rank_operations, schedule)
    waiting = [[call for call in order(rank) if call] for rank in range(ranks)]
    done, clocks, last = dict[tuple[str, int, int], float](), [0.0] * ranks, ranks * per_rank - 1
    while any(waiting):
        for rank, calls in enumerate(waiting):
            while calls:
                kind, stage, number = (
                    calls[0].computation_type.name,
                    calls[0].stage_index,
                    calls[0].microbatch_index,
                )
                other = stage - 1 if kind == "FORWARD" else stage + 1
                needs = (kind, other, number) if 0 <= other <= last else ("FORWARD", last, number)
                if needs not in done and (kind, stage) != ("FORWARD", 0):
                    break
                clocks[rank] = max(clocks[rank], done.get(needs, 0.0)) + (
                    1 if kind == "FORWARD" else 2
                )
                done[kind, stage, number] = clocks[rank]
                calls.pop(0)
    assert bubble("interleaved", ranks, per_rank, micro_batches) == pytest.approx(
        1 - 3 * per_rank * micro_batches / max(clocks)
    )


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    # Scales its embedding, caps its logits, and gives each layer a mask by that layer's own kind of attention.
    "gemma2": SMALL | {"sliding_window": 4},
    # Adds learned positions to whatever comes in.
    "gpt2": GPT,
    # Projects a narrower embedding up, and the last hidden states down.
    "opt": {**{k: SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}, "ffn_dim": 64,
            "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    # A norm right behind the embedding; blocks return tuples.
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    # Not all layers are of one size.
    "deepseek_v3": {**SMALL, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                    "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "mamba": {k: SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")},
}  # fmt: skip
IDS_BT = torch.arange(8)[None]
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4))


def tiny(kind: str, **over: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **KINDS[kind], **over
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_make_the_whole_model_with_its_gradients(kind: str) -> None:
    model = tiny(kind).eval()
    cuts = find_cuts(model)
    held = [rank_part(model, cuts, list(RANGES[rank::2])) for rank in range(2)]
    names = [{name for name, _ in one.named_parameters()} for one in held]
    assert names[0] | names[1] == {name for name, _ in model.named_parameters()}
    assert names[0] & names[1] == set(weights_of_both_ends(model, cuts))

    ids = torch.arange(24).view(2, 12) % 64
    batch = TrialTokens(ids)
    model(
        input_ids=ids, position_ids=batch.position_ids_BT, use_cache=False
    ).logits.square().mean().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    passed: Any = None
    for index, bounds in enumerate(RANGES):
        passed = Stage(held[index % 2], cuts, bounds).eval().run(batch, passed)
    logits = passed.logits_BTV
    if logits is None:
        logits = nn.functional.linear(passed.hidden_BTD, passed.weight_VD, passed.bias_V)
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in whole), name
        if name in whole:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-5, atol=1e-7, msg=name)


def test_blocks_that_share_weights_are_refused() -> None:
    model = tiny("llama")
    model.model.layers[3].mlp = model.model.layers[1].mlp
    with pytest.raises(PlanError, match="share weights"):
        find_cuts(model)


def test_weights_used_between_blocks_are_refused() -> None:
    model = tiny("llama")
    norm, block = model.model.norm, model.model.layers[2]
    block.register_forward_hook(lambda _m, _i, out: norm(out))
    with pytest.raises(PlanError, match=r"model\.norm between its blocks"):
        trace_cuts(model, IDS_BT)


def test_a_trunk_that_looks_into_its_blocks_is_refused() -> None:
    """Something is added behind each block that depends on the embedding: later stages do not have it."""
    model = tiny("llama")
    seen: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model.model.register_forward_pre_hook(lambda *_: seen.clear())
    for block in model.model.layers:
        block.register_forward_hook(lambda _m, _i, out: out + seen[-1] if seen else out)
    cuts = trace_cuts(model, IDS_BT)
    with torch.no_grad():
        assert not stages_reproduce_model(model, cuts, ((0, 2), (2, 4)), 2, IDS_BT)


def test_a_part_holds_no_weights_of_others() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    cuts = find_cuts(model)
    middle = rank_part(model, cuts, [(1, 2)])
    assert {name.split(".")[2] for name, _ in middle.named_parameters()} == {"1"}
    assert isinstance(middle.model.layers[0], Absent) and not isinstance(
        model.model.layers[0], Absent
    )
