"""What a few steps of the best candidates change: factors, corrected estimates, the ranking; and when there is nothing to try."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import Request, load
from drumline.data.sources import read_rows
from drumline.errors import EnvironmentFault
from drumline.planner.cost.fitted import PROBED
from drumline.planner.question import build_request
from drumline.planner.report.check import describe_factors
from drumline.planner.search.advice import compare_modes
from drumline.planner.search.answer import (
    Answer,
    Candidate,
    Refused,
    correct_answer,
    require_here,
)
from drumline.planner.search.correction import (
    Factors,
    Probe,
    correct_estimate,
    factors_of,
    mean_factors,
)
from drumline.planner.search.search import search
from drumline.train.probe import STEPS, candidates_to_try, random_rows, short_config
from drumline.train.setup import make_plan
from tests.harness import drumline, write_config
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.unit import test_truth
from tests.unit.test_truth import GIB

# In bytes what test_truth has in GiB.
ESTIMATE = test_truth.ESTIMATE.model_copy(
    update={"memory": test_truth.ESTIMATE.memory.model_copy(
        update={name: value // GIB for name, value in test_truth.ESTIMATE.memory if isinstance(value, int)}
    )}
)  # fmt: skip
TRIED = ESTIMATE.model_copy(update={"memory_range": PROBED[0], "seconds_range": PROBED[1]})
MEASURED = test_truth.MEASURED.model_copy(
    update={"memory": {name: value // GIB for name, value in test_truth.MEASURED.memory.items()}}
)
MORE = MEASURED.model_copy(
    update={
        "memory": {"parameters": 100, "gradients": 100, "optimizer": 300, "peak": 1700},
        "seconds": {"total": 3.0},
        "traffic": 50.0,
    }
)


def test_factors_say_what_was_wrong() -> None:
    assert factors_of(ESTIMATE, MEASURED) == Factors()
    found = factors_of(ESTIMATE, MORE)
    assert found == Factors(optimizer=1.5, live=2.0, seconds=2.0, traffic=0.5)
    assert describe_factors(found) == "optimizer 1.5, live 2, seconds 2, traffic 0.5"
    assert describe_factors(Factors()).startswith("1")
    allocator = MORE.model_copy(
        update={"by": "allocator", "memory": {**MORE.memory, "reserved": 2244}}
    )
    assert factors_of(ESTIMATE, allocator).reserved == pytest.approx(2244 / 1100 / 1.7)


def test_an_estimate_times_its_own_factors_is_what_was_measured() -> None:
    better = correct_estimate(ESTIMATE, factors_of(ESTIMATE, MORE))
    assert (better.memory.optimizer, better.memory.peak, better.memory.activations) == (
        300,
        1700,
        800,
    )
    assert better.memory.reserved == 50 + round(1100 * 1.7)
    assert (
        better.seconds.total - better.seconds.rollout == pytest.approx(3.0)
        and better.seconds.rollout == 3.0
    )
    assert better.tokens_per_s == pytest.approx(4.5 / 6.0)
    assert better.traffic.total == 50.0
    assert correct_estimate(ESTIMATE, Factors()) == TRIED


def test_the_mean_is_of_ratios() -> None:
    assert mean_factors([Factors(seconds=4.0), Factors(seconds=0.25)]) == Factors()
    assert mean_factors([]) == Factors()


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    root = tmp_path_factory.mktemp("probe")
    path = write_config(root, tiny_model_dir(root / "model"))
    return search(build_request(load(path, ["launch.nproc=2"]), lambda *_: None).question)


def small(answer: Answer, **estimates: Any) -> Answer:
    """Two candidates by these estimates, and a third that does not fit."""
    first, second, third = (
        replace(c, name=name) for c, name in zip(answer.ranked, ("a", "b", "c"), strict=False)
    )
    made: dict[str, Candidate] = {
        c.name: replace(c, estimate=estimates.get(c.name, ESTIMATE)) for c in (first, second, third)
    }
    return replace(
        answer,
        ranked=(made["a"], made["b"]),
        refused=(Refused("family", "too large", made["c"]), Refused("tp", "no heads")),
    )


def test_ranked_again(answer: Answer) -> None:
    asked = small(
        answer,
        a=ESTIMATE.model_copy(update={"tokens_per_s": 2.0, "limit": 1800}),
        c=ESTIMATE.model_copy(update={"limit": 1200}),
    )
    leaner = MEASURED.model_copy(
        update={"memory": {"parameters": 100, "gradients": 100, "optimizer": 200, "peak": 475}}
    )
    probes = Probe.of("a", ESTIMATE, MORE), Probe.of("b", ESTIMATE, leaner)
    found = correct_answer(asked, probes)
    assert found.probes == probes
    # a needs 1700 of 1800, and 1.1 times as much is reserved; c, which did not fit, goes by the mean of 2 and 1/8 of what lies on top.
    assert [c.name for c in found.ranked] == ["b", "c"]
    assert [r.name for r in found.refused] == ["tp", "a"]
    assert found.ranked[1].estimate.memory.activations == 200 and found.ranked[
        1
    ].estimate.seconds.compute == pytest.approx(2**0.5)


def test_what_failed_is_refused_and_nothing_else_changes(answer: Answer) -> None:
    asked = small(answer)
    found = correct_answer(
        asked, (Probe(name="a", predicted=ESTIMATE, failed="its first steps failed"),)
    )
    assert next(c.name for c in found.ranked) == "b"
    assert any(r.name == "a" and "failed" in r.reason for r in found.refused)
    assert {c.name: c.estimate for c in found.ranked}["b"] == TRIED


def test_the_two_that_are_tried_are_of_two_families(answer: Answer) -> None:
    first = answer.ranked[0]
    assert (
        candidates_to_try(answer)[0] is first
        and candidates_to_try(answer)[1].family != first.family
    )
    assert candidates_to_try(replace(answer, ranked=(first, replace(first, name="again")))) == [
        first,
        replace(first, name="again"),
    ]
    assert (
        candidates_to_try(replace(answer, ranked=(first,))) == [first]
        and candidates_to_try(replace(answer, ranked=())) == []
    )


def test_another_cluster_cannot_be_tried(answer: Answer) -> None:
    require_here(answer.question.cluster)
    with pytest.raises(EnvironmentFault, match="not this machine"):
        require_here(replace(answer.question.cluster, is_this_machine=False))


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("pretrain", {"text"}),
        ("sft", {"prompt", "completion"}),
        ("dpo", {"prompt", "chosen", "rejected"}),
        ("kto", {"prompt", "chosen", "rejected"}),
    ],
)
def test_random_rows_have_the_form_that_is_learned(
    answer: Answer, tmp_path: Path, kind: str, columns: set[str]
) -> None:
    config = answer.question.config.model_validate(
        {**answer.question.config.model_dump(), "algorithm": {"kind": kind}}
    )
    rows = [
        json.loads(line)
        for line in random_rows(config, answer.ranked[0], tmp_path / "rows.jsonl")
        .read_text()
        .splitlines()
    ]
    assert (
        len(rows) == STEPS * answer.ranked[0].layout.batch.global_samples
        and rows[0].keys() == columns
    )
    assert rows == [
        json.loads(line)
        for line in random_rows(config, answer.ranked[0], tmp_path / "rows.jsonl")
        .read_text()
        .splitlines()
    ]
    # A probe trains on them: nearly every token of a full row is learned.
    layout = answer.ranked[0].layout.model_copy(update={"config": config})
    tried = short_config(
        replace(answer.ranked[0], layout=layout), tmp_path, tmp_path / "rows.jsonl"
    )
    row = next(read_rows(tried.data.train[0], tmp_path, config.algorithm.forms))
    encoded = config.algorithm.encoder(tiny_tokenizer(), tried.data).encode(row)
    assert all(segment.target_count > 0.8 * tried.data.max_length for segment in encoded.segments)


def test_prompts_cannot_be_made_up(answer: Answer, tmp_path: Path) -> None:
    config = answer.question.config.model_validate(
        {**answer.question.config.model_dump(), "algorithm": {"kind": "classify"}}
    )
    with pytest.raises(EnvironmentFault, match="drumline prepare"):
        random_rows(config, answer.ranked[0], tmp_path / "rows")


def test_a_probe_leaves_nothing_behind(answer: Answer, tmp_path: Path) -> None:
    config = short_config(answer.ranked[0], tmp_path, None)
    assert (
        config.run.steps,
        config.run.report_to,
        config.checkpoint.export,
        config.eval.at_start,
    ) == (STEPS, (), "none", False)
    assert config.data == answer.ranked[0].config.data


def test_what_real_steps_show_counts_for_every_adapter(answer: Answer) -> None:
    """For the best of full and LoRA, and for the longest row."""
    slow = correct_answer(
        answer,
        (Probe(name=answer.ranked[0].name, predicted=ESTIMATE, factors=Factors(seconds=4.0)),),
    )
    large = correct_answer(
        answer,
        (Probe(name=answer.ranked[0].name, predicted=ESTIMATE, factors=Factors(parameters=1e7)),),
    )
    before, after = compare_modes(answer, answer.question), compare_modes(slow, answer.question)
    assert [each.name for each in after] == ["full", "LoRA"]
    for one, other in zip(before, after, strict=True):
        assert one.best and other.best and other.best.estimate.seconds_range == PROBED[1]
        assert other.best.estimate.seconds.total == pytest.approx(
            4 * one.best.estimate.seconds.total
        )
    assert all(each.longest for each in before) and not any(
        each.longest for each in compare_modes(large, answer.question)
    )


ODD = {
    "where": "length(content) > 0",
    "duplicates": "exact",
    "decontaminate": True,
    "temperature": 2,
    "curriculum": "difficulty",
    "order": "sequential",
    "truncation": "error",
}


@pytest.mark.parametrize("own", [ODD, {"stream": True}], ids=["mixed", "streamed"])
def test_a_probe_takes_no_key_amiss(tmp_path: Path, own: dict[str, Any]) -> None:
    """Random words have no columns and no other sources; a trace has no place in five steps, and callbacks are not for them."""
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data=own,
        run={"profile": {"at": 10}, "callbacks": ["mine.py:Mine"]},
    )
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self):\n        raise AssertionError\n"
    )
    loaded = load(path, ["data.train.0.limit=20"])
    candidate = search(build_request(loaded, lambda *_: None).question).ranked[0]
    for rows in (random_rows(loaded.config, candidate, tmp_path / "rows.jsonl"), None):
        config = short_config(candidate, tmp_path / "probe", rows)
        assert not config.run.callbacks and config.run.profile is None
        if rows is not None:
            plan = make_plan(Request(replace(loaded, config=config)), on_progress=lambda *_: None)
            assert (
                plan.steps == STEPS and plan.data is not None and plan.data.train_samples >= STEPS
            )


@pytest.mark.slow
@pytest.mark.full
def test_the_best_two_are_tried_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setitem(drumline.__globals__["ENV"], "TMPDIR", str(tmp_path / "scratch"))
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data={"max_length": 32},
        batch={"global_samples": 2, "micro_batch": 1},
    )
    ended = drumline("plan", path, "launch.nproc=2", "--probe", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert len(told["probes"]) == 2 and not any(probe["failed"] for probe in told["probes"])
    by_name = {candidate["name"]: candidate for candidate in told["ranked"]}
    for probe in told["probes"]:
        assert by_name[probe["name"]]["seconds"]["total"] == pytest.approx(
            probe["measured"]["seconds"]["total"]
        )
        assert (
            by_name[probe["name"]]["memory"]["optimizer"]
            == probe["measured"]["memory"]["optimizer"]
        )
    assert (
        list((tmp_path / "scratch").glob("drumline-probe-*")) == []
        and not (tmp_path / "run").exists()
    )
