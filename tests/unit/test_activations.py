"""What blocks keep for backward: offloaded, computed again over some blocks, in chunks, and by a
budget. The same numbers, and bytes as planned. Across strategies: rows of tests/distributed; peaks
of real steps: tests/distributed/test_memory.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM

from drumline.algorithms.base import policy_objective
from drumline.config.config import LoRAConfig
from drumline.config.model import ModelConfig
from drumline.engine.build import build_engine
from drumline.engine.offload import ActivationOffload
from drumline.engine.transforms import apply_mlp_chunks
from drumline.errors import PlanError
from drumline.models.blocks import set_blocks
from drumline.models.shapes import find
from drumline.plan.estimate import Memory
from drumline.plan.facts import Weight, has_chunkable_mlp
from drumline.plan.plan import Layout, Plan
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.planner.cost.activations import TowerSetup, block_of, formula, tower_bytes
from drumline.planner.cost.memory import memory, offloaded_bytes
from drumline.planner.cost.times import estimate
from drumline.planner.search.advice import with_row_length
from drumline.planner.search.answer import Question
from drumline.planner.search.budget import CHECKPOINTING, fit_to_budget
from drumline.planner.search.search import evaluate, search
from drumline.planner.sizes import FoundModel, sizes_of
from drumline.planner.trace import trace_activations, trace_one_depth
from tests.distributed.promises import facts_of
from tests.harness import same_tensors, write_config
from tests.plans import resolve_plan, with_section
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.unit.shapes import SHAPES, question
from tests.unit.test_plan_memory import CLUSTER, FACTS, layout

LAYERS = 6
ROWS = 2
LENGTH = 96
HIDDEN = 64
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
OFFLOAD: dict[str, Any] = {"activation_offload": True}
EQUAL: dict[str, dict[str, Any]] = {
    "offload": OFFLOAD,
    "offload, full": {**OFFLOAD, **FULL},
    "full, 2 of 6": {**FULL, "checkpointed_blocks": 2},
    "selective, 4 of 6": {"activation_checkpointing": "selective", "checkpointed_blocks": 4},
    "chunks": {"mlp_chunk": 40},
    "chunks, offload, full": {"mlp_chunk": 40, **OFFLOAD, **FULL},
}


class Stepped(NamedTuple):
    """What one micro-batch came to."""

    plan: Plan
    engine: Any
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("activations")
    model = tiny_model_dir(root / "model", layers=LAYERS, hidden=HIDDEN)

    @cache
    def step(name: str) -> Stepped:
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        path = write_config(
            folder,
            model,
            batch={"global_samples": ROWS, "micro_batch": ROWS},
            data={"packing": False, "max_length": LENGTH},
            memory=EQUAL.get(name, {}),
        )
        plan = resolve_plan(path, world_size=1)
        engine: Any = build_engine(plan, "cpu")
        algorithm = plan.config.algorithm
        batches = [algorithm.traced_batch(plan, ROWS, LENGTH, 3)]
        sums = engine.forward_backward(batches, policy_objective(algorithm.build()), 1.0)
        gradients = {name: p.grad for name, p in engine.model.named_parameters()}
        return Stepped(plan, engine, sums["loss"], gradients)

    return step


@pytest.mark.slow
@pytest.mark.claim(
    "what blocks keep, offloaded, in chunks, or made again over some blocks, "
    "gives the same numbers, and moves the bytes that are planned"
)
@pytest.mark.parametrize("name", EQUAL)
def test_same_loss_and_gradients(made: Any, name: str) -> None:
    """To the last bit; chunks have products of other shapes."""
    found = made(name)
    plain = made("plain")
    if "chunks" not in name:
        assert torch.equal(found.loss, plain.loss)

        same_tensors(found.gradients, plain.gradients)
        return

    assert torch.allclose(found.loss, plain.loss, rtol=1e-6)

    for key, gradient in plain.gradients.items():
        assert torch.allclose(found.gradients[key], gradient, rtol=1e-4, atol=1e-6), key


@pytest.mark.claim(
    "what blocks keep, offloaded, in chunks, or made again over some blocks, "
    "gives the same numbers, and moves the bytes that are planned"
)
@pytest.mark.parametrize(
    ("name", "within"), [("offload, full", 0.0), ("offload", 0.03), ("chunks, offload, full", 0.0)]
)
def test_bytes_that_are_moved(made: Any, name: str, within: float) -> None:
    """As planned, of all blocks but two; and no more than two blocks' are on the device at once,
    and none in the end."""
    plan, engine, _, _ = made(name)
    block = engine.model.model.layers[0]
    around = block._gradient_checkpointing_func if "full" in name else block.forward
    moves = around.func.__self__

    assert isinstance(moves, ActivationOffload)

    on_gpu = plan.model_copy(update={"device": "cuda"})
    facts = facts_of(plan)
    planned = offloaded_bytes(on_gpu, facts, as_pinned=False)

    assert planned > 0
    assert moves.moved_bytes == pytest.approx(planned, rel=within)
    assert moves.most_device_bytes <= 2 * moves.moved_bytes / (LAYERS - 2)
    assert moves.device_bytes == 0
    assert not moves.runs_on_device

    kept = formula(on_gpu, facts)
    plain = formula(with_section(on_gpu, "memory", activation_offload=False), facts)

    assert kept.saved_block == 0
    assert kept.saved_ends == plain.saved_ends + 2 * plain.saved_block


# Budgets, long rows, refusals.


def layout_with(**options: Any) -> Layout:
    """Return a layout of one device with these options of memory."""
    return layout("single", 1, precision="bf16", micro=4, memory=options)


def reserved_by(layout: Layout) -> float:
    return memory(layout, FACTS, CLUSTER).reserved


def seconds_of(layout: Layout) -> float:
    return estimate(layout, FACTS, CLUSTER).seconds.total


WHOLE = reserved_by(layout_with())
LEAST = reserved_by(layout_with(**FULL))


def budgeted(part: float) -> Layout:
    """A layout whose budget is so far between what it needs with checkpointing and what without."""
    return layout_with(budget_gb=(1 + LEAST + part * (WHOLE - LEAST)) / 1e9)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.0])
def test_a_budget_takes_as_little_as_it_needs(part: float) -> None:
    asked = budgeted(part)

    assert asked.config.memory.budget_gb is not None

    budget = asked.config.memory.budget_gb * 1e9
    found = fit_to_budget(asked, FACTS, CLUSTER, CHECKPOINTING)

    assert reserved_by(found) <= budget

    number = found.config.memory.checkpointed_blocks
    if part == 1.0:
        assert number is None
        assert found.activation_checkpointing == "none"
    else:
        fewer = (number or FACTS.layers) - 1
        less = with_section(found, "memory", checkpointed_blocks=fewer)
        assert reserved_by(less) > budget

    own = fit_to_budget(asked, FACTS, CLUSTER, ["full"])

    assert own.activation_checkpointing == "full"
    assert seconds_of(found) <= seconds_of(own)


def test_a_budget_that_is_too_small_says_what_it_takes() -> None:
    message = r"a step takes .* GB at least, with activation_checkpointing=full"
    with pytest.raises(PlanError, match=message) as error:
        fit_to_budget(budgeted(-0.1), FACTS, CLUSTER, CHECKPOINTING)

    least = float(str(error.value).split("takes ")[1].split()[0])

    assert LEAST <= least * 1e9 <= 1.01 * LEAST


LONG_MEMORY = {**FULL, **OFFLOAD, "mlp_chunk": 8192}
_, HIDDEN_8B, HEADS_8B, KV_HEADS_8B, INNER_8B, WORDS_8B, _ = SHAPES["8b"]
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": HIDDEN_8B,
    "num_attention_heads": HEADS_8B,
    "vocab_size": WORDS_8B,
    "num_key_value_heads": KV_HEADS_8B,
    "intermediate_size": INNER_8B,
    "max_position_embeddings": 131_072,
    "pad_token_id": 0,
}
LONG = {
    "precision": "bf16",
    "strategy": "single",
    "batch": {"global_samples": 1, "micro_batch": 1},
}


def test_8b_lora_on_rows_of_131072_fits_an_h100() -> None:
    data = {"train": [{"kind": "file", "path": "x"}], "max_length": 4096, "packing": False}
    cluster = {"device": "h100-80g", "per_node": 1}

    def single_plans(options: dict[str, Any]) -> list[Any]:
        asked = question("8b", cluster, "lora", **LONG, data=data, memory=options)
        ranked = search(with_row_length(asked, 131_072)).ranked
        return [each for each in ranked if each.name == "single"]

    best = single_plans(LONG_MEMORY)[0]

    assert best.estimate.verdict == "fits"
    # What a user has set is not searched.
    assert not single_plans({**FULL, "activation_offload": False, "mlp_chunk": None})


def test_8b_on_rows_of_131072_fits_eight_h100() -> None:
    """Full training by Ulysses under FSDP2: each card has an eighth of a row."""
    data = {"train": [{"kind": "file", "path": "x"}], "max_length": 4096, "packing": False}
    cluster = {"device": "h100-80g", "per_node": 8}
    cut = {**LONG, "strategy": {"kind": "fsdp2", "cp": 8}}

    def plans(options: dict[str, Any]) -> list[Any]:
        asked = question("8b", cluster, **cut, data=data, memory=options)
        return list(search(with_row_length(asked, 131_072)).ranked)

    best = plans(LONG_MEMORY)[0]

    assert best.layout.mesh.cp == 8
    assert best.estimate.verdict == "fits"


class Compared(NamedTuple):
    """The memory of a layout as planned, and with activations that a trace of rank 0 counted."""

    planned: Memory
    by_trace: Memory


def compare_with_trace(asked: Question) -> Compared:
    """Return both for the config of a question about an 8B."""
    layout = evaluate(asked, asked.config, "8b").layout
    shape = LLAMA_8B | {"num_hidden_layers": asked.facts.layers}
    model = layout.config.model.model_copy(update={"id": None, "init": "random", "config": shape})
    config = layout.config.model_copy(update={"model": model})
    traced = trace_activations(config, None, layout, asked.facts)
    assert traced is not None
    return Compared(
        memory(layout, asked.facts, asked.cluster),
        memory(layout, asked.facts, asked.cluster, traced),
    )


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_stream_that_tensor_parallelism_leaves_whole_is_counted(
    checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms work on all of it, which is more than a rank's feed-forward part has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = question(
        "8b",
        {"device": "h100-80g", "per_node": 8},
        precision="bf16",
        strategy={"kind": "fsdp2", "tp": 4, "sequence_parallel": False},
        batch={"global_samples": 8, "micro_batch": 1},
        memory={"activation_checkpointing": checkpointing},
    )
    planned, by_trace = compare_with_trace(asked)
    for phase in ("blocks", "end"):
        assert planned.phases[phase] == pytest.approx(by_trace.phases[phase], rel=0.01), phase


@pytest.mark.full
def test_activations_of_eight_cards_are_those_of_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ulysses under FSDP2, in chunks and offloaded: within 3% of rank 0, traced without memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = {"train": [{"kind": "file", "path": "x"}], "max_length": 4096, "packing": False}
    cluster = {"device": "h100-80g", "per_node": 8}
    cut = {**LONG, "strategy": {"kind": "fsdp2", "cp": 8}}
    short = question("8b", cluster, **cut, data=data, memory=LONG_MEMORY)
    asked = with_row_length(short, 131_072)
    planned, by_trace = compare_with_trace(asked)
    assert by_trace.phase == planned.phase == "backward"
    assert planned.activations == pytest.approx(by_trace.activations, rel=0.03)


@pytest.mark.full
def test_what_is_traced_is_what_was_estimated(tmp_path: Path) -> None:
    """The same with eight of the layers, traced without memory: at most 3% above. Measured: 27.11
    GB against 27.47."""
    length = 131_072
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    shape = LLAMA_8B | {"num_hidden_layers": 8}
    path = write_config(
        tmp_path,
        tokenizer,
        rows=8,
        **LONG,
        memory=LONG_MEMORY,
        adapter="lora",
        model={"id": None, "init": "random", "tokenizer": str(tokenizer), "config": shape},
        data={"packing": False, "max_length": length},
    )
    plan = resolve_plan(path, world_size=1)
    on_gpu = plan.model_copy(update={"device": "cuda"})
    said = memory(on_gpu, facts_of(plan), CLUSTER)
    estimated = said.peak - said.parameters - said.optimizer
    traced = trace_one_depth(plan, 1, length)

    assert 0.95 * estimated <= traced.peak <= 1.03 * estimated


class Refused(NamedTuple):
    memory: dict[str, Any]
    strategy: str = "single"
    ranks: int = 1
    more: dict[str, Any] = {}


COMPILED = {"compile": {"enabled": True}}
SELECTIVE = {**OFFLOAD, "activation_checkpointing": "selective"}
REFUSED = {
    "activation_offload × selective checkpointing": Refused(SELECTIVE),
    "activation_offload × tp, pp, ep, zero, ring": Refused(OFFLOAD, "zero2", 2),
    "activation_offload × compile": Refused(OFFLOAD, more=COMPILED),
    "checkpointed_blocks × no checkpointing": Refused({"checkpointed_blocks": 1}),
    "checkpointed_blocks × tp, pp, ep, zero, ring": Refused(
        {"checkpointed_blocks": 1, **FULL}, "tp", 2
    ),
    "mlp_chunk × tp, pp, ep, zero, ring": Refused({"mlp_chunk": 64}, "tp", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str) -> None:
    case = REFUSED[name]
    made = layout(case.strategy, case.ranks, memory=case.memory, **case.more)
    with pytest.raises(PlanError) as error:
        check_rules(Case(made.config, made.mesh, "cpu", "fp32", FACTS))

    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mixture_is_not_cut_into_chunks() -> None:
    gate = Weight("mlp.gate.weight", (4, 64))
    experts = Weight("mlp.experts.gate_up_proj", (4, 64, 64))

    assert has_chunkable_mlp(FACTS)
    assert not has_chunkable_mlp(replace(FACTS, block_weights=((gate, experts),)))


class _Twice(torch.autograd.Function):
    """x · w, whose backward reads what was saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        ctx.save_for_backward(y, w)
        return y * w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ctx.saved_tensors[0]
        w = ctx.saved_tensors[1]
        return grads[0] * w, (grads[0] * y).sum((0, 1))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A graph that is gone before the backward; others come to lie where its tensors were.
        (x * self.w).square()
        return _Twice.apply(x, self.w).tanh() + (x * self.w).sin()


@pytest.mark.parametrize("backwards", [1, 2])
def test_what_is_offloaded_is_there_as_long_as_a_graph_has_it(backwards: int) -> None:
    def go_backward(model: nn.Module) -> list[torch.Tensor]:
        for seed in range(2):
            inputs = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(seed))
            loss = model(inputs).sum()
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)

        return [block.w.grad for block in model.children()]

    def build() -> nn.Module:
        model = nn.Sequential(*(_Block() for _ in range(5)))
        set_blocks(model, ("_Block",))
        return model

    model = build()
    moves = ActivationOffload(model, "cpu")
    offloaded = go_backward(model)

    assert moves.moved_bytes > 0
    assert moves.device_bytes == 0

    for mine, other in zip(offloaded, go_backward(build()), strict=True):
        assert torch.equal(mine, other)


def test_a_feed_forward_part_that_takes_more_than_hidden_states_is_cut_with_it() -> None:
    """Bloom's adds the residual."""
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)

    def step(tokens: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = BloomForCausalLM(config).eval()
        if tokens is not None:
            apply_mlp_chunks(model, tokens)

        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for mine, other in zip(step(8), step(None), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3-vl-8b"])
def test_blocks_of_a_tower_are_no_blocks_of_text(name: str) -> None:
    """Qwen3.5 has more blocks in its tower than of either kind in its text."""
    known = find(name)
    assert known is not None
    found = FoundModel(ModelConfig(id=None, config=known.values), None)
    sizes = sizes_of(found, 4096, "lm")
    adapted = sizes_of(found, 4096, "lm", adapter=LoRAConfig(r=16))

    assert sizes.tower_blocks == 27
    assert block_of(sizes).hidden == 4096
    setup = TowerSetup("none", entry_bytes=2, stream_entry_bytes=2)
    assert tower_bytes(sizes, setup) > 0
    # The tower is frozen under an adapter, and keeps nothing.
    assert tower_bytes(adapted, setup) == 0
