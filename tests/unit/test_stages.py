"""Pipelines without processes: where a model is cut, what a schedule asks of the batch, and that stages make the whole model,
for classes that lay their trunks out in different ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from drumline.config.config import Config
from drumline.engine.stages import (
    Stage,
    StandIn,
    find_split_points,
    rank_part,
    stages_reproduce_model,
    trace_split_points,
    weights_of_first_and_last_stage,
)
from drumline.errors import PlanError
from drumline.hardware.detect import Machine
from drumline.models.small import TrialTokens
from drumline.plan.explain import explain
from drumline.plan.facts import ModelFacts, Weight
from drumline.plan.plan import Plan
from drumline.plan.resolve import KnownModel, resolve
from drumline.plan.stages import Cost, balance, bubble, stage_cost

MACHINE = Machine(devices=[], cores=2, memory_bytes=2**34, device="cpu", bf16=False)
# Llama 3.2 1B: the head alone is worth more than four of the 16 layers.
LLAMA_1B = ModelFacts(
    name="llama",
    parameters=1_235_814_400,
    flops_per_token=7e9,
    vocab_size=128_256,
    max_positions=2048,
    layers=16,
    hidden=2048,
    block_parameters=(60_821_504,) * 16,
    embedding_parameters=262_670_336,
    head_parameters=262_668_288,
    attention_flops=12 * 2048 * 1024.0,
)


def planned(
    strategy: dict[str, Any],
    world: int,
    batch: dict[str, Any] | None = None,
    facts: ModelFacts | None = LLAMA_1B,
) -> Plan:
    values = {
        "model": {"id": "x"},
        "data": {"train": [{"kind": "file", "path": "x"}]},
        "strategy": strategy,
        "batch": batch or {},
    }
    return resolve(
        Config.model_validate(values),
        run_dir="r",
        machine=MACHINE,
        world_size=world,
        model=KnownModel(facts, "m"),
        data=None,
    )


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]

    def slowest(bounds: Sequence[int]) -> float:
        return max(sum(weights[first:stop]) for first, stop in pairwise(bounds))

    for stages in range(1, 6):
        parts = balance(lambda a, b: Cost(sum(weights[a:b]), b - a), len(weights), stages)
        assert parts[-1][1] == 8

        bounds = [0]
        for first, stop in parts:
            assert first == bounds[-1]
            bounds.append(stop)

        tried = []
        for cuts in combinations(range(1, 8), stages - 1):
            tried.append(slowest([0, *cuts, 8]))

        assert slowest(bounds) == min(tried)


def test_of_equally_fast_cuts_the_largest_stage_is_smallest_then_the_most_even() -> None:
    """In the first case the first layer is heavy in bytes alone: any cut takes 2 at best, and [1, 2, 2] spares its stage."""
    parts = balance(lambda a, b: Cost(b - a, 10.0 * (a == 0) + b - a), 5, 3)

    assert parts == ((0, 1), (1, 3), (3, 5))

    parts = balance(lambda a, b: Cost(b - a, 0), 7, 3)
    assert sorted(stop - first for first, stop in parts) == [2, 2, 3]


def test_a_mixture_computes_with_the_experts_that_its_router_chooses() -> None:
    """A dense block of 60 entries and a mixture that chooses 2 of 8 experts of 30 are as fast."""
    dense = (Weight("mlp.weight", (60,)),)
    mixture = (Weight("mlp.experts.weight", (8, 30), style="experts"),)
    facts = replace(
        LLAMA_1B,
        block_weights=(dense, mixture),
        block_parameters=(60, 240),
        head_parameters=0,
        experts=8,
        experts_per_token=2,
    )
    first, second = stage_cost(facts, 0, 1), stage_cost(facts, 1, 2)
    assert first.flops == second.flops
    assert second.parameters == 240


def slowest_flops(layers: Sequence[tuple[int, int]]) -> float:
    """Return the operations of the stage that has the most, of a Llama cut into these layers."""
    return max(stage_cost(LLAMA_1B, *bounds).flops for bounds in layers)


def test_the_head_takes_layers_from_the_last_stage() -> None:
    plan = planned({"kind": "pp"}, 4)
    assert plan.pipeline is not None

    layers = plan.pipeline.layers
    *others, last = [stop - first for first, stop in layers]

    assert sum(others) + last == 16
    assert last < min(others)

    assert slowest_flops(layers) < 0.75 * slowest_flops([(0, 4), (4, 8), (8, 12), (12, 16)])
    assert "stage 3 on rank 3" in explain(plan)


def test_open_batch_fills_the_pipeline() -> None:
    batch = planned({"kind": "ddp", "pp": 4}, 8, {"global_samples": 64}).batch
    assert batch.accumulation >= 4
    assert batch.global_samples == batch.micro_batch * batch.accumulation * 2

    sequential = planned({"kind": "model_parallel"}, 4, {"micro_batch": 2})
    assert sequential.batch.accumulation == 1


class Refused(NamedTuple):
    """A plan that cannot be, and words of the error message."""

    strategy: dict[str, Any]
    world: int
    batch: dict[str, Any]
    says: list[str]


REFUSED = [
    Refused(
        strategy={"kind": "pp", "schedule": "1f1b"},
        world=4,
        batch={"micro_batch": 1, "accumulation": 3},
        says=["1f1b", "has 3", "accumulation 4"],
    ),
    Refused(
        strategy={"kind": "pp", "schedule": "interleaved"},
        world=4,
        batch={"micro_batch": 1, "accumulation": 9},
        says=["has 9", "accumulation 8 or 10"],
    ),
    Refused(
        strategy={"kind": "pp", "stages_per_rank": 3},
        world=2,
        batch={},
        says=["3 were asked for", "interleaved"],
    ),
    Refused(
        strategy={"kind": "pp", "schedule": "interleaved", "stages_per_rank": 5},
        world=4,
        batch={},
        says=["16 layers", "20 stages", "at most 16"],
    ),
    Refused(
        strategy={"kind": "fsdp2", "pp": 2, "pipeline": {"schedule": "zero_bubble"}},
        world=4,
        batch={},
        says=["zero_bubble × fsdp2", "interleaved"],
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.strategy["kind"])
def test_refused_with_the_nearest_that_works(case: Refused) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(case.strategy, case.world, case.batch)

    line = refusal.value.line()
    for words in case.says:
        assert words in line


def test_a_model_without_one_list_of_blocks_is_refused_by_name() -> None:
    facts = replace(LLAMA_1B, uncut="it has no single list of blocks")
    with pytest.raises(PlanError, match="single list of blocks"):
        planned({"kind": "pp"}, 2, facts=facts)


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
    calls = interleaved_calls(ranks, per_rank, micro_batches)
    last = ranks * per_rank - 1
    done: dict[tuple[str, int, int], float] = {}

    def input_time(call: StageCall) -> float | None:
        """Return when the call's input is there, or None if that is not known yet."""
        if call.kind == "FORWARD":
            if call.stage == 0:
                return 0.0
            return done.get(("FORWARD", call.stage - 1, call.micro_batch))

        if call.stage == last:
            return done.get(("FORWARD", last, call.micro_batch))

        return done.get((call.kind, call.stage + 1, call.micro_batch))

    clocks = [0.0] * ranks
    while any(calls):
        for rank, waiting in enumerate(calls):
            while waiting:
                call = waiting[0]
                ready = input_time(call)
                if ready is None:
                    break

                duration = 1 if call.kind == "FORWARD" else 2
                clocks[rank] = max(clocks[rank], ready) + duration
                done[call] = clocks[rank]
                waiting.popleft()

    busy = 3 * per_rank * micro_batches
    expected = pytest.approx(1 - busy / max(clocks))

    assert bubble("interleaved", ranks, per_rank, micro_batches) == expected


class StageCall(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def interleaved_calls(ranks: int, per_rank: int, micro_batches: int) -> list[deque[StageCall]]:
    """Return the calls of each rank, in the order of torch's schedule."""
    schedule = SimpleNamespace(
        n_local_stages=per_rank,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
    )
    actions_of_rank = partial(ScheduleInterleaved1F1B._calculate_single_rank_operations, schedule)
    calls = []
    for rank in range(ranks):
        queue: deque[StageCall] = deque()
        for action in actions_of_rank(rank):
            if action:
                kind = action.computation_type.name
                queue.append(StageCall(kind, action.stage_index, action.microbatch_index))

        calls.append(queue)

    return calls


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    # Scales its embedding, caps its logits, and gives each layer a mask by that layer's own kind of attention.
    "gemma2": {**SMALL, "sliding_window": 4},
    # Adds learned positions to whatever comes in.
    "gpt2": GPT,
    # Projects a narrower embedding up, and the last hidden states down.
    "opt": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 64,
    },
    # A norm right behind the embedding; blocks return tuples.
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    # Not all layers are of one size.
    "deepseek_v3": {
        **SMALL,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4},
}
IDS_BT = torch.arange(8)[None]
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4))


def tiny(kind: str, **over: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **ids, **KINDS[kind], **over)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_make_the_whole_model_with_its_gradients(kind: str) -> None:
    model = tiny(kind).eval()
    cuts = find_split_points(model)
    held = [rank_part(model, cuts, list(RANGES[rank::2])) for rank in range(2)]
    first = parameter_names(held[0])
    second = parameter_names(held[1])

    assert first | second == parameter_names(model)
    assert first & second == set(weights_of_first_and_last_stage(model, cuts))

    ids = torch.arange(24).view(2, 12) % 64
    batch = TrialTokens(ids)
    out = model(input_ids=ids, position_ids=batch.position_ids_BT, use_cache=False)
    out.logits.square().mean().backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    passed: Any = None

    for index, bounds in enumerate(RANGES):
        stage = Stage(held[index % 2], cuts, bounds).eval()
        passed = stage.run(batch, passed)

    logits = passed.logits_BTV
    if logits is None:
        logits = nn.functional.linear(passed.hidden_BTD, passed.weight_VD, passed.bias_V)

    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if whole[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-5, atol=1e-7, msg=name)


def parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_blocks_that_share_weights_are_refused() -> None:
    model = tiny("llama")
    model.model.layers[3].mlp = model.model.layers[1].mlp
    with pytest.raises(PlanError, match="share weights"):
        find_split_points(model)


def test_weights_used_between_blocks_are_refused() -> None:
    model = tiny("llama")
    norm, block = model.model.norm, model.model.layers[2]
    block.register_forward_hook(lambda _m, _i, out: norm(out))
    with pytest.raises(PlanError, match=r"model\.norm between its blocks"):
        trace_split_points(model, IDS_BT)


def test_a_trunk_that_looks_into_its_blocks_is_refused() -> None:
    """Something is added behind each block that depends on the embedding: later stages do not have it."""
    model = tiny("llama")
    seen: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model.model.register_forward_pre_hook(lambda *_: seen.clear())
    for block in model.model.layers:
        block.register_forward_hook(lambda _m, _i, out: out + seen[-1] if seen else out)

    cuts = trace_split_points(model, IDS_BT)
    with torch.no_grad():
        assert not stages_reproduce_model(model, cuts, ((0, 2), (2, 4)), 2, IDS_BT)


def test_a_part_holds_no_weights_of_others() -> None:
    model = tiny("llama", tie_word_embeddings=False)
    cuts = find_split_points(model)
    middle = rank_part(model, cuts, [(1, 2)])
    layers = {name.split(".")[2] for name in parameter_names(middle)}

    assert layers == {"1"}
    assert isinstance(middle.model.layers[0], StandIn)
    assert not isinstance(model.model.layers[0], StandIn)
