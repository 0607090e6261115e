"""How many tokens each expert gets: equal to a plain count, however a batch is cut; and shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.data.batches import TokenBatch, collate
from drumline.dist.reduce import SumReducer
from drumline.engine.transforms import (
    apply_activation_checkpointing,
    skip_side_effects_of_recomputation,
)
from drumline.models.blocks import blocks
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective
from drumline.models.router_load import (
    RouterLoad,
    load_metrics,
    note_tensor_parallelism,
    router_load_of,
    watch_router_load,
)
from drumline.report.details import experts
from drumline.report.facts import RunFacts
from drumline.report.progress import _load_line
from drumline.report.sections import ChartRegistry
from drumline.telemetry.events import Event
from drumline.telemetry.trackers import metrics
from drumline.telemetry.watched import ExpertLoad
from drumline.train.router_load import ExpertLoads
from drumline.train.state import PendingStep
from tests.tiny import ARCHITECTURES
from tests.unit.report_runs import start, write_run
from tests.unit.test_report_progress import step, told
from tests.unit.test_router import OBJECTIVE, ModelConfig, documents

DOCUMENTS = documents([3, 9, 5, 7])
TOKENS = 3 + 9 + 5 + 7
CHOSEN = 2
KINDS = ["mixtral", "deepseek_v3"]


def mixture(kind: str, **changes: Any) -> Any:
    """Return a model of two layers, whose experts are counted."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2}
    config = {"model_type": kind, **ARCHITECTURES[kind], **sizes, **changes}
    model = build_model(None, ModelConfig(id=None, config=config), seed=0)
    watch_router_load(model)
    return model


def run(model: Any, batches: list[TokenBatch], backward: bool = False) -> dict[str, list[int]]:
    """Return the tokens of each expert in a step over all batches."""
    load = router_load_of(model)
    assert load is not None
    load.begin_step()
    module = ForwardWithObjective(model)
    for batch in batches:
        loss_sum, _ = module(batch, OBJECTIVE)
        if backward:
            loss_sum.backward()
    return load.split_by_layer(load.local_counts("cpu").tolist())


def counted_by_hand(model: Any, documents_of_rows: list[Any]) -> dict[str, list[int]]:
    """Run each document alone, and count what the routers choose, one choice after another."""
    counts: dict[str, list[int]] = {}
    hooks = []
    for name, module in model.named_modules():
        if "Router" not in type(module).__name__:
            continue
        layer = name.rsplit(".", 1)[0] + ".experts"
        of_layer = counts.setdefault(layer, [0] * module.weight.shape[0])

        def count(_module: nn.Module, _given: Any, out: Any, of_layer: Any = of_layer) -> None:
            for expert in out[-1].flatten().tolist():
                of_layer[expert] += 1

        hooks.append(module.register_forward_hook(count))
    for tokens, _ in documents_of_rows:
        ids_BT = torch.from_numpy(tokens.astype("int64"))[None]
        with torch.no_grad():
            model(input_ids=ids_BT, use_cache=False)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.claim("the load of experts is that of the global batch, however it is cut")
@pytest.mark.parametrize("kind", KINDS)
def test_packing_padding_and_cutting_change_no_count(kind: str) -> None:
    model = mixture(kind)
    expected = counted_by_hand(model, DOCUMENTS)
    assert all(sum(counts) == TOKENS * CHOSEN for counts in expected.values())
    alone = [collate([[document]], 0, None) for document in DOCUMENTS]
    packed = collate([DOCUMENTS], 0, None)
    padded = collate([DOCUMENTS[:2], None, DOCUMENTS[2:]], 0, 32)
    for batches in ([packed], [padded], alone):
        assert run(model, batches) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_or_without_gradients_counts_no_second_time(kind: str) -> None:
    model = mixture(kind)
    batch = collate([DOCUMENTS], 0, None)
    expected = run(model, [batch, batch])
    apply_activation_checkpointing(model, "full")
    assert run(model, [batch, batch], backward=True) == expected

    load = router_load_of(model)
    assert load is not None
    load.begin_step()
    with torch.no_grad():
        ForwardWithObjective(model)(batch, OBJECTIVE)
    assert load.local_counts("cpu").sum() == 0


class Graphs:
    """A backend that counts the graphs that it is given, and leaves them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.slow
def test_a_compiled_checkpointed_block_counts_in_one_graph() -> None:
    # transformers records router logits by hooks that cannot be traced.
    model = mixture("mixtral", output_router_logits=False)
    batch = collate([DOCUMENTS], 0, None)
    expected = run(model, [batch, batch])
    apply_activation_checkpointing(model, "full")
    skip_side_effects_of_recomputation()
    graphs = Graphs()
    torch.compiler.reset()
    for block in blocks(model):
        block.compile(backend=graphs, fullgraph=True)
    assert run(model, [batch, batch], backward=True) == expected
    assert graphs.count == 1, "equal blocks share one graph"


def test_parts_of_the_tokens_add_up_to_all() -> None:
    """Sequence parallelism and context parallelism: each rank counts its own tokens."""
    batch = collate([DOCUMENTS[:2], DOCUMENTS[2:]], 0, 16)
    load = RouterLoad({"experts": 4})
    whole_N = load._token_weights(batch, None, None)
    assert whole_N.sum() == TOKENS

    model = SimpleNamespace(_drumline_router_load=load)
    parts = []
    for index in range(3):
        note_tensor_parallelism(model, index, 3, cuts_tokens=True)
        parts.append(load._token_weights(batch, None, None).view(2, -1))
    assert torch.equal(torch.cat(parts, 1).flatten(), whole_N)

    load.token_part = None
    first_half: Any = SimpleNamespace(cut=lambda whole_BT: whole_BT[:, :8])
    assert torch.equal(
        load._token_weights(batch, None, first_half), whole_N.view(2, -1)[:, :8].flatten()
    )

    # Ranks that all see the same tokens: the first one counts them.
    load.counts = torch.tensor([1, 2, 3, 4])
    for index, counted in ((0, 10), (1, 0)):
        note_tensor_parallelism(model, index, 2, cuts_tokens=False)
        assert load.local_counts("cpu").sum() == counted


def test_a_shared_prompt_counts_for_each_row_that_has_it() -> None:
    batch = collate([DOCUMENTS[:1], DOCUMENTS[:1]], 0, 4)
    # Two tokens of prompt and one of completion, twice, and padding.
    place_BT = torch.tensor([[0, 1, 2, 0], [0, 1, 3, 0]])
    ids_BT = torch.zeros(1, 4, dtype=torch.int64)
    shared = SimpleNamespace(token_indices_BT=place_BT, input_ids_BT=ids_BT)
    weights_N = RouterLoad({"experts": 4})._token_weights(batch, shared, None)
    assert weights_N.tolist() == [2, 2, 1, 1]


def test_a_choice_of_no_expert_is_not_counted() -> None:
    load = RouterLoad({"experts": 2})
    load.weights_N = torch.tensor([1, 1, 0])
    layer = load.in_forward[0]
    layer.count(torch.tensor([[0, 1], [2, 1], [0, 0]]))
    assert layer.counts_E is not None
    assert layer.counts_E.tolist() == [1, 2]


def test_the_metrics_of_a_step() -> None:
    by_layer = {"a": [2, 6], "b": [4, 4], "empty": [0, 0]}
    assert load_metrics(by_layer) == {
        "expert_load_max": 1.5,
        "expert_load_max_by_layer": [1.5, 1.0],
        "expert_load": [6 / 16, 10 / 16],
    }
    assert "expert_load" not in load_metrics({"a": [2, 6], "b": [1, 1, 1]})
    assert load_metrics({"a": [0, 0]}) == {}


def test_counts_travel_with_the_sums() -> None:
    reducer = SumReducer(0, 1, "cpu")
    sums = {"loss": torch.tensor(3.0).double(), "max_a": torch.tensor(5.0).double()}
    pending = reducer.start(sums, 7.0, counts=torch.tensor([1.0, 2.0]).double())
    assert pending.counts_on_device().tolist() == [1, 2]
    pending.fetch(torch.tensor(9.0))
    assert pending.read() == ({"loss": 3.0, "max_a": 5.0}, [[7.0], [9.0]])
    assert pending.read_counts() == [1, 2]

    without = reducer.start(sums, 7.0)
    assert without.read()[1] == [[7.0]]
    assert without.read_counts() == []


def test_tables_of_a_long_run_are_few() -> None:
    said: list[Event] = []
    load = RouterLoad({"experts": 2})
    load.counts = torch.tensor([3, 1])
    report = ExpertLoads(load, "cpu", said.append, last_step=1000)
    reducer = SumReducer(0, 1, "cpu")
    assert report.counts(is_logged=False) is None
    for number in range(1, 1001):
        gathered = reducer.start({}, counts=report.counts(is_logged=True))
        assert report.report(PendingStep(gathered, number))["expert_load_max"] == 1.5
    steps = [event.step for event in said if isinstance(event, ExpertLoad)]
    assert steps[:3] == [1, 2, 3]
    assert steps[-1] == 1000
    assert len(steps) < 80
    assert ExpertLoads(None, "cpu", said.append, 1).counts(is_logged=True) is None


def test_the_load_is_on_the_page_the_display_and_in_trackers(tmp_path: Path) -> None:
    tokens = {"model.layers.1.mlp.experts": [2, 6], "model.layers.2.mlp.experts": [1, 1, 1]}
    without_tokens = {"model.layers.3.mlp.experts": [0, 0]}
    event = ExpertLoad(step=4, tokens={**tokens, **without_tokens})
    registry = ChartRegistry()
    slots = experts(RunFacts(write_run(tmp_path / "run", events=[start(), event])), registry)
    assert slots is not None
    assert "step 4" in slots[0].title
    assert registry.specs[0]["rows"] == ["layer 1", "layer 2"]
    assert registry.specs[0]["values"] == [[0.5, 1.5, None], [1.0, 1.0, 1.0]]
    nothing = RunFacts(write_run(tmp_path / "dense", events=[start()]))
    assert experts(nothing, registry) is None

    figures = {
        "expert_load": [0.25, 0.75],
        "expert_load_max_by_layer": [1.5],
        "expert_load_max": 1.5,
    }
    assert metrics(Event.from_values({"kind": "moved", **figures})) == {
        "expert_load/least": 0.25,
        "expert_load/most": 0.75,
        "expert_load_max": 1.5,
        "expert_load_max/layer_0": 1.5,
    }
    _, text = told({**step(1), **figures})
    assert "load 1.5" in text


def test_the_live_display_has_a_block_for_each_layer() -> None:
    loads = [1.0, 1.5, 4.5, 8.0]

    assert _load_line(loads) == "fullest of each layer ▁▁▄█  1 to 8 × the mean"
    # Two layers share a block, which is that of the fuller one.
    many = _load_line([1.0, 2.0] * 16 + [3.0, 1.0])
    assert many == f"fullest of each layer {'▁' * 16}█  1 to 3 × the mean"
