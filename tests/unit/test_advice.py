"""What else could be asked of the planner: what would make a run fit, the longest row, the largest micro-batch, more hosts; guides."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

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
    what_if,
    with_row_length,
)
from drumline.planner.search.answer import Question
from drumline.planner.search.auto import choose, chosen_by, disagreements, heuristic_first
from drumline.planner.search.search import fits, search, search_space
from tests import strategies as s
from tests.unit.shapes import asks, facts, laid, question

BATCH = {"global_samples": 64}


# ---------------------------------------------------------------------------------------------------------- the same model otherwise


@pytest.mark.parametrize("adapter", ["lora", "4bit", "8bit"])
@pytest.mark.parametrize("model", ["0.1b", "8b"])
@pytest.mark.slow
def test_an_adapter_without_building_it(model: str, adapter: str) -> None:
    built, lora = facts(model, adapter=adapter), laid(adapter)
    assert isinstance(lora, LoRAConfig)
    assert (made := with_lora(facts(model), lora)) is not None
    names = (
        "parameters",
        "trainable",
        "frozen",
        "block_parameters",
        "attention_flops",
        "end_weights",
        "head_parameters",
    )
    assert {name: getattr(made, name) for name in names} == {
        name: getattr(built, name) for name in names
    }
    assert [set(block) for block in made.block_weights] == [
        set(block) for block in built.block_weights
    ]
    assert made.flops_per_token == pytest.approx(built.flops_per_token, rel=1e-12)
    assert with_lora(built, lora) is None, "it has one"


@pytest.mark.parametrize("length", [64, 8192])
def test_another_length_without_building_it(length: int) -> None:
    made, built = with_length(facts("8b"), 4096, length), facts("8b", length)
    assert (
        made.flops_per_token == pytest.approx(built.flops_per_token, rel=1e-12)
        and made.attention_flops == built.attention_flops
    )


# ------------------------------------------------------------------------------------------------------------ the smallest change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        (asks("70b", "1x4090"), {"devices in place of 1"}),
        (asks("8b", {"device": "4090", "per_node": 1, "host_memory_gb": 100}), {"adapter=lora", "devices in place of 1"}),
        (asks("1b", "1xh100-80g", memory={"activation_checkpointing": "none"}, batch={"global_samples": 64, "micro_batch": 32}),
         {"memory.activation_checkpointing=full", "batch.micro_batch=1", "data.max_length="}),
        (asks("8b", "4x4090", batch={"global_samples": 7}), {"batch.global_samples=8"}),
    ],
)  # fmt: skip
def test_the_smallest_changes_that_would_fit(
    asked: Callable[[], Question], kinds: set[str]
) -> None:
    answer = search(asked())
    changes = smallest_changes(answer)
    assert not answer.ranked
    assert all(any(kind in change.what for change in changes) for kind in kinds), [
        change.what for change in changes
    ]
    for change in changes:
        assert (
            change.candidate.estimate.verdict != "no"
            and change.candidate.name in change.line()
            and " GB of " in change.line()
        )


@pytest.mark.slow
def test_auto_says_what_would_fit() -> None:
    with pytest.raises(PlanError) as error:
        choose(question("70b", "1x4090"))
    line = error.value.line()
    # Of the device or of the host: which of them is short depends on the plan that is nearest.
    assert "nothing fits; nearest is" in line and "quantize: 4bit" in line
    assert re.search(r" GB (of host memory to save )?> [\d.]+ GB", line)


# ------------------------------------------------------------------------------------------------------- the most that fits, what if


def test_the_largest_by_doubling_and_halving() -> None:
    for last in (1, 7, 64, 65):
        for limit in range(0, 70):
            found = _find_largest(lambda n, limit=limit: n <= limit, range(1, last + 1, 3))  # type: ignore[misc]
            assert found == max((n for n in range(1, last + 1, 3) if n <= limit), default=None)


@pytest.mark.slow
def test_the_longest_row_of_each_family() -> None:
    asked = question("8b", "4xa100-80g")
    found = max_length(asked)
    assert {"fsdp2", "fsdp2 offload"} <= {most.candidate.family for most in found} and [
        m.number for m in found
    ] == sorted((m.number for m in found), reverse=True)
    for most in found[:3]:
        family = [
            way for way in search_space(asked) if way.names(4).family == most.candidate.family
        ]
        assert (
            most.candidate.layout.length == most.number
            and most.number % LENGTH_MULTIPLE == 0
            and most.candidate.estimate.verdict == "fits"
        )
        assert most.number > 131_072 - LENGTH_MULTIPLE or not fits(
            with_row_length(asked, most.number + LENGTH_MULTIPLE), family
        )


def test_the_largest_micro_batch_of_each_family() -> None:
    found = {most.candidate.family: most for most in max_batch(question("1b", "2xa100-80g"))}
    assert found["fsdp2"].number >= found["ddp"].number >= 1, "what is sharded leaves room"
    assert all(most.candidate.layout.batch.micro_batch == most.number for most in found.values())
    staged = next(
        most.candidate
        for most in max_batch(question("0.1b", "2xa100-80g", strategy="pp"))
        if most.candidate.family == "pp"
    )
    assert staged.layout.strategy.kind == "pp" and staged.layout.batch.accumulation == 2, (
        "a micro-batch for each stage"
    )


@pytest.mark.slow
@pytest.mark.full
def test_more_hosts_side_by_side() -> None:
    answers = what_if(
        question(
            "8b",
            {"device": "h100-80g", "per_node": 8, "inter": "8x400Gb"},
            batch={"global_samples": 512},
        ),
        [1, 2, 4],
    )
    assert [answer.question.cluster.world_size for answer in answers] == [8, 16, 32]
    speeds = [answer.ranked[0].estimate.tokens_per_s for answer in answers]
    assert speeds == sorted(speeds) and speeds[-1] > 1.5 * speeds[0]


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


@pytest.mark.parametrize(("guide", "model", "cluster", "kind"), GUIDED)
def test_what_the_guides_say(guide: str, model: str, cluster: str, kind: str) -> None:
    asked = question(model, cluster, strategy={"kind": "auto", "by": "rules", "guide": guide})
    assert chosen_by(asked, guide)[0].kind == kind
    config, why = choose(asked)
    assert config.strategy.kind == kind and why is not None and f"by the heuristic `{guide}`" in why
    assert config.batch == asked.config.batch and config.memory == asked.config.memory


def test_the_tree_ends_in_offload() -> None:
    strategy, _ = chosen_by(question("8b", "2x4090"), "tree")
    assert isinstance(strategy, s.FSDP2Strategy) and strategy.offload == "cpu"


def test_where_guides_and_planner_disagree() -> None:
    found = {d.heuristic: d for d in disagreements(search(question("8b", "4x4090")))}
    assert (
        found["parameters"].says.startswith("zero3 (more than 7B parameters")
        and "GB > 25.3 GB" in found["parameters"].reason
    )
    assert found["devices"].says.startswith("fsdp2 (") and "tree" not in found
    assert disagreements(search(question("0.1b", "1xa100-80g"))) == ()
    answer = search(question("8b", "8xa100-80g"))
    slow = [
        replace(
            c, estimate=c.estimate.model_copy(update={"tokens_per_s": c.estimate.tokens_per_s / 2})
        )
        for c in answer.ranked
    ]
    guides = [
        [d.heuristic for d in disagreements(which)]
        for which in (answer, replace(answer, ranked=tuple(slow)))
    ]
    assert guides[0] == guides[1] == ["parameters"], "what is measured corrects both sides"
    _, why = choose(question("8b", "4x4090", strategy={"kind": "auto", "by": "rules"}))
    assert why is not None and "the planner would not" in why


def test_the_guide_that_was_asked_for_comes_first() -> None:
    asked = question("8b", "8xa100-80g", strategy={"kind": "auto", "by": "rules"})
    answer = search(asked)
    first, words = heuristic_first(answer)
    assert answer.ranked[0].name != "zero3" == first.ranked[0].name and len(
        {c.name for c in first.ranked}
    ) == len(first.ranked)
    assert (
        words.startswith("First: zero3 by the heuristic `parameters`")
        and choose(asked)[0].strategy.kind == "zero3"
    )
    small = search(question("8b", "4x4090", strategy={"kind": "auto", "by": "rules"}))
    same, words = heuristic_first(small)
    assert same.ranked == small.ranked and "GB > 25.3 GB" in words
    plain = search(question("0.1b", "1xa100-80g"))
    assert heuristic_first(plain) == (plain, "")


def test_a_reason_that_guides_share_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    answer = search(question("8b", "2xa100-80g", "lora", health={"check_weights_every": 9}))
    show_heuristics(answer, Console(width=1000))
    said = capsys.readouterr().out
    assert said.count("no rank holds the weights of another") == 1
    assert "parameters: zero3" in said and "devices: fsdp2" in said, (
        "the third guide says ddp, as the numbers do"
    )


# --------------------------------------------------------------------------------------------------------------------------- auto


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch",
    [{}, BATCH, {"global_samples": 64, "micro_batch": 1}, {"micro_batch": 2, "accumulation": 2}],
)
def test_auto_writes_what_it_chose(batch: dict[str, int]) -> None:
    asked = question("8b", "8xh100-80g", batch=batch)
    config, why = choose(asked)
    first, *others = search(asked).ranked
    assert config.strategy == first.layout.strategy and why is not None
    assert why.startswith(
        f"strategy auto: {first.name}, micro-batch {first.layout.batch.micro_batch} × accumulation"
    )
    second = next(other for other in others if other.family != first.family)
    assert f"second {second.name}" in why
    (again,) = search(
        replace(asked, config=config),
        [way for way in search_space(asked) if way.names(8).name == first.name],
    ).ranked
    assert again.layout.batch == first.layout.batch, "what is not written comes out so anyway"
    assert again.layout.activation_checkpointing == first.layout.activation_checkpointing
    assert Config.model_validate(config.model_dump()).strategy == config.strategy


def test_where_nothing_can_run_the_config_stays() -> None:
    """Resolving it then says which rule or number it is, where it is in the YAML, and how to fix it."""
    config, why = choose(question("1b", "8xh100-80g", checkpoint={"export_adapter": True}))
    assert (config.strategy.kind, why) == ("auto", None)
