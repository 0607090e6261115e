"""What else could be asked of the planner: what would make a run fit, the longest row, the largest micro-batch, more hosts; guides."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import ge

import pytest
from rich.console import Console

from drumline.config.config import Config, LoRAConfig
from drumline.errors import PlanError
from drumline.plan.facts import with_length
from drumline.planner.derived import with_lora
from drumline.planner.report.table import show_heuristics
from drumline.planner.search.advice import (
    LENGTH_MULTIPLE,
    _find_largest,
    max_batch,
    max_length,
    smallest_changes,
    with_row_length,
)
from drumline.planner.search.answer import Answer, Candidate, Question
from drumline.planner.search.auto import choose, chosen_by, disagreements, heuristic_first
from drumline.planner.search.hypothetical import what_if
from drumline.planner.search.search import fits, search, search_space
from tests import strategies as s
from tests.unit.shapes import asks, facts, laid, question

BATCH = {"global_samples": 64}
BY_RULES = {"kind": "auto", "by": "rules"}


# ---------------------------------------------------------------------------------------------------------- the same model otherwise


@pytest.mark.parametrize("adapter", ["lora", "4bit", "8bit"])
@pytest.mark.parametrize("model", ["0.1b", "8b"])
@pytest.mark.slow
def test_an_adapter_without_building_it(model: str, adapter: str) -> None:
    built = facts(model, adapter=adapter)
    lora = laid(adapter)
    assert isinstance(lora, LoRAConfig)

    derived = with_lora(facts(model), lora)
    assert derived is not None
    for name in (
        "parameters",
        "trainable",
        "frozen",
        "block_parameters",
        "attention_flops",
        "end_weights",
        "head_parameters",
    ):
        assert getattr(derived, name) == getattr(built, name), name

    assert list(map(set, derived.block_weights)) == list(map(set, built.block_weights))
    assert derived.flops_per_token == pytest.approx(built.flops_per_token, rel=1e-12)
    assert with_lora(built, lora) is None, "it has one"


@pytest.mark.parametrize("length", [64, 8192])
def test_another_length_without_building_it(length: int) -> None:
    built = facts("8b", length)
    derived = with_length(facts("8b"), 4096, length)
    assert derived.flops_per_token == pytest.approx(built.flops_per_token, rel=1e-12)
    assert derived.attention_flops == built.attention_flops


# ------------------------------------------------------------------------------------------------------------ the smallest change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        pytest.param(
            asks("70b", "1x4090"),
            {"devices in place of 1"},
            marks=pytest.mark.full,
        ),
        (
            asks("8b", {"device": "4090", "per_node": 1, "host_memory_gb": 100}),
            {"adapter=lora", "devices in place of 1"},
        ),
        (
            asks(
                "1b",
                "1xh100-80g",
                memory={"activation_checkpointing": "none"},
                batch={"global_samples": 64, "micro_batch": 32},
            ),
            {
                "memory.activation_checkpointing=full",
                "batch.micro_batch=1",
                "data.max_length=",
            },
        ),
        (
            asks("8b", "4x4090", batch={"global_samples": 7}),
            {"batch.global_samples=8"},
        ),
    ],
)
def test_the_smallest_changes_that_would_fit(
    asked: Callable[[], Question], kinds: set[str]
) -> None:
    answer = search(asked())
    assert not answer.ranked

    changes = smallest_changes(answer)
    proposals = [change.what for change in changes]
    for kind in kinds:
        assert any(kind in proposal for proposal in proposals), proposals

    for change in changes:
        line = change.line()
        assert change.candidate.estimate.verdict != "no"
        assert change.candidate.name in line
        assert " GB of " in line


@pytest.mark.slow
def test_auto_says_what_would_fit() -> None:
    with pytest.raises(PlanError) as error:
        choose(question("70b", "1x4090"))

    line = error.value.line()
    assert "nothing fits; nearest is" in line
    assert "quantize: 4bit" in line
    # Of the device or of the host: which of them is short depends on the plan that is nearest.
    assert re.search(r" GB (of host memory to save )?> [\d.]+ GB", line)


# ------------------------------------------------------------------------------------------------------- the most that fits, what if


def test_the_largest_by_doubling_and_halving() -> None:
    for last in (1, 7, 64, 65):
        numbers = range(1, last + 1, 3)
        for limit in range(0, 70):
            found = _find_largest(partial(ge, limit), numbers)
            expected = max((n for n in numbers if n <= limit), default=None)
            assert found == expected


@pytest.mark.slow
def test_the_longest_row_of_each_family() -> None:
    asked = question("8b", "4xa100-80g")
    found = max_length(asked)

    families = {most.candidate.family for most in found}
    assert {"fsdp2", "fsdp2 offload"} <= families

    lengths = [most.number for most in found]
    assert lengths == sorted(lengths, reverse=True)

    for most in found[:3]:
        candidate = most.candidate
        assert candidate.layout.max_length == most.number
        assert candidate.estimate.verdict == "fits"
        assert most.number % LENGTH_MULTIPLE == 0

        longer = most.number + LENGTH_MULTIPLE
        if longer <= 131_072:
            ways = [way for way in search_space(asked) if way.names(4).family == candidate.family]
            assert not fits(with_row_length(asked, longer), ways)


def test_the_largest_micro_batch_of_each_family() -> None:
    found = {most.candidate.family: most for most in max_batch(question("1b", "2xa100-80g"))}
    assert found["fsdp2"].number >= found["ddp"].number, "what is sharded leaves room"
    assert found["ddp"].number >= 1
    for most in found.values():
        assert most.candidate.layout.batch.micro_batch == most.number

    staged = max_batch(question("0.1b", "2xa100-80g", strategy="pp"))
    first, *_ = [most.candidate.layout for most in staged if most.candidate.family == "pp"]
    assert first.strategy.kind == "pp"
    assert first.batch.accumulation == 2, "a micro-batch for each stage"


@pytest.mark.slow
@pytest.mark.full
def test_more_hosts_side_by_side() -> None:
    hosts = {"device": "h100-80g", "per_node": 8, "inter": "8x400Gb"}
    asked = question("8b", hosts, batch={"global_samples": 512})
    answers = what_if(asked, [{"nodes": 1}, {"nodes": 2}, {"nodes": 4}])
    assert [answer.question.cluster.world_size for answer in answers] == [8, 16, 32]

    speeds = [answer.ranked[0].estimate.tokens_per_s for answer in answers]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.5 * speeds[0]


# ------------------------------------------------------------------------------------------------------------------------- guides

# parameters → by `parameters`; (parameters, devices) → by `devices`. As the guides have them.
GUIDED: list[tuple[str, str, str, str]] = [
    ("parameters", "0.1b", "4xa100-80g", "ddp"),
    ("parameters", "1b", "4xa100-80g", "zero2"),
    ("parameters", "8b", "4xa100-80g", "zero3"),
    ("parameters", "0.1b", "1xa100-80g", "single"),
    ("devices", "3b", "4xa100-80g", "ddp"),
    ("devices", "3b", "8xa100-80g", "fsdp2"),
    ("devices", "70b", "4xa100-80g", "fsdp2"),
    ("tree", "1b", "4xa100-80g", "ddp"),
    ("tree", "8b", "8xa100-80g", "fsdp2"),
    ("tree", "8b", "2x4090", "fsdp2"),
]


def choose_and_explain(asked: Question) -> tuple[Config, str]:
    """Return the config that is chosen for a question, and why."""
    config, why = choose(asked)
    assert why is not None
    return config, why


@pytest.mark.parametrize(("guide", "model", "cluster", "kind"), GUIDED)
def test_what_the_guides_say(guide: str, model: str, cluster: str, kind: str) -> None:
    asked = question(model, cluster, strategy={**BY_RULES, "guide": guide})
    strategy, _ = chosen_by(asked, guide)
    assert strategy.kind == kind

    config, why = choose_and_explain(asked)
    assert config.strategy.kind == kind
    assert f"by the heuristic `{guide}`" in why
    assert config.batch == asked.config.batch
    assert config.memory == asked.config.memory


def test_the_tree_ends_in_offload() -> None:
    strategy, _ = chosen_by(question("8b", "2x4090"), "tree")
    assert isinstance(strategy, s.FSDP2Strategy)
    assert strategy.offload == "cpu"


def with_half_the_speed(candidate: Candidate) -> Candidate:
    speed = candidate.estimate.tokens_per_s / 2
    estimate = candidate.estimate.model_copy(update={"tokens_per_s": speed})
    return replace(candidate, estimate=estimate)


def guides_against(answer: Answer) -> list[str]:
    """Return the guides that the planner disagrees with."""
    return [disagreement.heuristic for disagreement in disagreements(answer)]


def test_where_guides_and_planner_disagree() -> None:
    small = search(question("8b", "4x4090"))
    found = {disagreement.heuristic: disagreement for disagreement in disagreements(small)}
    assert found["parameters"].says.startswith("zero3 (more than 7B parameters")
    assert "GB > 25.3 GB" in found["parameters"].reason
    assert found["devices"].says.startswith("fsdp2 (")
    assert "tree" not in found

    assert disagreements(search(question("0.1b", "1xa100-80g"))) == ()

    answer = search(question("8b", "8xa100-80g"))
    assert guides_against(answer) == ["parameters"]

    slow = tuple(map(with_half_the_speed, answer.ranked))
    corrected = replace(answer, ranked=slow)
    assert guides_against(corrected) == ["parameters"], "what is measured corrects both sides"

    _, why = choose_and_explain(question("8b", "4x4090", strategy=BY_RULES))
    assert "the planner would not" in why


def test_the_guide_that_was_asked_for_comes_first() -> None:
    asked = question("8b", "8xa100-80g", strategy=BY_RULES)
    answer = search(asked)
    assert answer.ranked[0].name != "zero3"

    first, words = heuristic_first(answer)
    assert words.startswith("First: zero3 by the heuristic `parameters`")

    names = [candidate.name for candidate in first.ranked]
    assert names[0] == "zero3"
    assert len(set(names)) == len(names)

    config, _ = choose(asked)
    assert config.strategy.kind == "zero3"

    small = search(question("8b", "4x4090", strategy=BY_RULES))
    same, words = heuristic_first(small)
    assert same.ranked == small.ranked
    assert "GB > 25.3 GB" in words

    plain = search(question("0.1b", "1xa100-80g"))
    assert heuristic_first(plain) == (plain, "")


def test_a_reason_that_guides_share_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The third guide says ddp, as the numbers do."""
    answer = search(question("8b", "2xa100-80g", "lora", health={"check_weights_every": 9}))
    show_heuristics(answer, Console(width=1000))

    printed = capsys.readouterr().out
    assert printed.count("no two ranks hold the same weights") == 1
    assert "parameters: zero3" in printed
    assert "devices: fsdp2" in printed


# --------------------------------------------------------------------------------------------------------------------------- auto


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch",
    [
        {},
        pytest.param(BATCH, marks=pytest.mark.full),
        pytest.param({"global_samples": 64, "micro_batch": 1}, marks=pytest.mark.full),
        {"micro_batch": 2, "accumulation": 2},
    ],
)
def test_auto_writes_what_it_chose(batch: dict[str, int]) -> None:
    asked = question("8b", "8xh100-80g", batch=batch)
    config, why = choose_and_explain(asked)
    first, *others = search(asked).ranked
    chosen = first.layout
    assert config.strategy == chosen.strategy

    micro_batch = chosen.batch.micro_batch
    says = f"strategy auto: {first.name}, micro-batch {micro_batch} × accumulation"
    assert why.startswith(says)

    second = next(other for other in others if other.family != first.family)
    assert f"second {second.name}" in why

    ways = [way for way in search_space(asked) if way.names(8).name == first.name]
    (again,) = search(replace(asked, config=config), ways).ranked
    layout = again.layout
    assert layout.batch == chosen.batch, "what is not written comes out so anyway"
    assert layout.activation_checkpointing == chosen.activation_checkpointing

    read_again = Config.model_validate(config.model_dump())
    assert read_again.strategy == config.strategy


def test_where_nothing_can_run_the_config_stays() -> None:
    """Resolving it then says which rule or number it is, where it is in the YAML, and how to fix it."""
    asked = question("1b", "8xh100-80g", checkpoint={"export_adapter": True})
    config, why = choose(asked)
    assert config.strategy.kind == "auto"
    assert why is None
