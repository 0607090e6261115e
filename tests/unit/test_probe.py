"""What a few steps of the best candidates change: factors, corrected estimates and the ranking.

And when there is nothing to try.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config.config import Config
from drumline.config.load import Request, load
from drumline.data.sources import read_rows
from drumline.errors import EnvironmentFault
from drumline.plan.estimate import Memory
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

# In bytes what test_truth has in GiB.
MEMORY = Memory(
    parameters=100,
    gradients=100,
    optimizer=200,
    activations=400,
    logits=200,
    buffers=0,
    overhead=50,
    peak=1000,
    reserved=1150,
    phase="backward",
)


def measured_memory(
    optimizer: int,
    peak: int,
) -> dict[str, int]:
    return {
        "parameters": 100,
        "gradients": 100,
        "optimizer": optimizer,
        "peak": peak,
    }


ESTIMATE = test_truth.ESTIMATE.model_copy(update={"memory": MEMORY})
TRIED = ESTIMATE.model_copy(update={"memory_range": PROBED[0], "seconds_range": PROBED[1]})
MEASURED = test_truth.MEASURED.model_copy(update={"memory": measured_memory(200, 1000)})
MORE = MEASURED.model_copy(
    update={
        "memory": measured_memory(300, 1700),
        "seconds": {"total": 3.0},
        "traffic": 50.0,
    }
)
LEANER = MEASURED.model_copy(update={"memory": measured_memory(200, 475)})


def test_factors_say_what_was_wrong() -> None:
    assert factors_of(ESTIMATE, MEASURED) == Factors()

    found = factors_of(ESTIMATE, MORE)
    assert found == Factors(optimizer=1.5, live=2.0, seconds=2.0, traffic=0.5)
    assert describe_factors(found) == "optimizer 1.5, live 2, seconds 2, traffic 0.5"
    assert describe_factors(Factors()).startswith("1")

    memory = {**MORE.memory, "reserved": 2244}
    on_gpu = MORE.model_copy(update={"by": "allocator", "memory": memory})
    factors = factors_of(ESTIMATE, on_gpu)
    assert factors.reserved == pytest.approx(2244 / 1100 / 1.7)


def test_an_estimate_times_its_own_factors_is_what_was_measured() -> None:
    better = correct_estimate(ESTIMATE, factors_of(ESTIMATE, MORE))
    assert better.memory.optimizer == 300
    assert better.memory.peak == 1700
    assert better.memory.activations == 800
    assert better.memory.reserved == 50 + round(1100 * 1.7)

    seconds = better.seconds
    assert seconds.rollout == 3.0
    assert seconds.total - seconds.rollout == pytest.approx(3.0)
    assert better.tokens_per_s == pytest.approx(4.5 / 6.0)
    assert better.traffic.total == 50.0

    assert correct_estimate(ESTIMATE, Factors()) == TRIED


def test_the_mean_is_of_ratios() -> None:
    opposite = [Factors(seconds=4.0), Factors(seconds=0.25)]
    assert mean_factors(opposite) == Factors()
    assert mean_factors([]) == Factors()


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    root = tmp_path_factory.mktemp("probe")
    path = write_config(root, tiny_model_dir(root / "model"))
    loaded = load(path, ["launch.nproc=2"])
    return search(build_request(loaded, lambda *_: None).question)


@pytest.fixture
def best(answer: Answer) -> Candidate:
    return answer.ranked[0]


def small(answer: Answer, **estimates: Any) -> Answer:
    """Return an answer of two candidates by these estimates, and of a third that does not fit."""
    made = []
    for candidate, name in zip(answer.ranked[:3], "abc", strict=True):
        estimate = estimates.get(name, ESTIMATE)
        made.append(replace(candidate, name=name, estimate=estimate))

    a, b, c = made
    too_large = Refused("family", "too large", c)
    no_heads = Refused("tp", "no heads")
    return replace(answer, ranked=(a, b), refused=(too_large, no_heads))


def test_ranked_again(answer: Answer) -> None:
    """a needs 1700 of 1800, and 1.1 times as much is reserved.

    c, which did not fit, goes by the mean of 2 and 1/8 of what lies on top.
    """
    fast = ESTIMATE.model_copy(update={"tokens_per_s": 2.0, "limit": 1800})
    tight = ESTIMATE.model_copy(update={"limit": 1200})
    probes = (
        Probe.from_measurement("a", ESTIMATE, MORE),
        Probe.from_measurement("b", ESTIMATE, LEANER),
    )

    found = correct_answer(small(answer, a=fast, c=tight), probes)

    assert found.probes == probes
    b, c = found.ranked
    assert b.name == "b"
    assert c.name == "c"
    assert [refused.name for refused in found.refused] == ["tp", "a"]
    assert c.estimate.memory.activations == 200
    assert c.estimate.seconds.compute == pytest.approx(2**0.5)


def test_what_failed_is_refused_and_nothing_else_changes(answer: Answer) -> None:
    probe = Probe(name="a", predicted=ESTIMATE, failed="its first steps failed")

    found = correct_answer(small(answer), (probe,))

    assert found.ranked[0].name == "b"
    assert found.ranked[0].estimate == TRIED
    reasons = {refused.name: refused.reason for refused in found.refused}
    assert "failed" in reasons["a"]


def test_the_two_that_are_tried_are_of_two_families(answer: Answer, best: Candidate) -> None:
    first, second = candidates_to_try(answer)
    assert first is best
    assert second.family != best.family

    again = replace(best, name="again")
    for ranked in ((best, again), (best,), ()):
        tried = candidates_to_try(replace(answer, ranked=ranked))
        assert tried == list(ranked)


def test_another_cluster_cannot_be_tried(answer: Answer) -> None:
    cluster = answer.question.cluster
    require_here(cluster)
    with pytest.raises(EnvironmentFault, match="not this machine"):
        require_here(replace(cluster, is_this_machine=False))


def config_with(answer: Answer, algorithm: str) -> Config:
    config = answer.question.config
    values = {**config.model_dump(), "algorithm": {"kind": algorithm}}
    return config.model_validate(values)


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
    answer: Answer,
    best: Candidate,
    tmp_path: Path,
    kind: str,
    columns: set[str],
) -> None:
    config = config_with(answer, kind)
    path = tmp_path / "rows.jsonl"
    text = random_rows(config, best, path).read_text()
    rows = text.splitlines()
    assert len(rows) == STEPS * best.layout.batch.global_samples
    assert json.loads(rows[0]).keys() == columns
    assert random_rows(config, best, path).read_text() == text

    # A probe trains on them: nearly every token of a full row is learned.
    layout = best.layout.model_copy(update={"config": config})
    tried = short_config(replace(best, layout=layout), tmp_path, path)
    row = next(read_rows(tried.data.train[0], tmp_path, config.algorithm.forms))
    encoder = config.algorithm.encoder(tiny_tokenizer(), tried.data)
    for segment in encoder.encode(row).segments:
        assert segment.target_count > 0.8 * tried.data.max_length


def test_prompts_cannot_be_made_up(answer: Answer, best: Candidate, tmp_path: Path) -> None:
    config = config_with(answer, "classify")
    with pytest.raises(EnvironmentFault, match="drumline prepare"):
        random_rows(config, best, tmp_path / "rows")


def test_a_probe_leaves_nothing_behind(best: Candidate, tmp_path: Path) -> None:
    config = short_config(best, tmp_path, None)
    assert config.run.steps == STEPS
    assert config.run.report_to == ()
    assert config.checkpoint.export == "none"
    assert config.eval.at_start is False
    assert config.data == best.config.data


def test_what_real_steps_show_counts_for_every_adapter(answer: Answer, best: Candidate) -> None:
    """For the best of full and LoRA, and for the longest row."""

    def corrected(**factors: float) -> Answer:
        probe = Probe(name=best.name, predicted=ESTIMATE, factors=Factors(**factors))
        return correct_answer(answer, (probe,))

    question = answer.question
    before = compare_modes(answer, question)
    after = compare_modes(corrected(seconds=4.0), question)
    assert [each.name for each in after] == ["full", "LoRA"]
    for one, other in zip(before, after, strict=True):
        assert one.best is not None
        assert other.best is not None
        slow = other.best.estimate
        expected = 4 * one.best.estimate.seconds.total
        assert slow.seconds_range == PROBED[1]
        assert slow.seconds.total == pytest.approx(expected)
        assert one.longest

    for each in compare_modes(corrected(parameters=1e7), question):
        assert not each.longest


ODD = {
    "where": "length(content) > 0",
    "duplicates": "exact",
    "decontaminate": True,
    "temperature": 2,
    "curriculum": "difficulty",
    "order": "sequential",
    "truncation": "error",
}
CALLBACK = """
class Mine:
    def __init__(self):
        raise AssertionError
"""


@pytest.mark.parametrize("own", [ODD, {"stream": True}], ids=["mixed", "streamed"])
def test_a_probe_takes_no_key_amiss(tmp_path: Path, own: dict[str, Any]) -> None:
    """Random words have no columns and no other sources.

    A trace has no place in five steps, and callbacks are not for them.
    """
    (tmp_path / "mine.py").write_text(CALLBACK)
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data=own,
        run={"profile": {"at": 10}, "callbacks": ["mine.py:Mine"]},
    )
    loaded = load(path, ["data.train.0.limit=20"])
    candidate = search(build_request(loaded, lambda *_: None).question).ranked[0]
    rows = random_rows(loaded.config, candidate, tmp_path / "rows.jsonl")

    with_rows = short_config(candidate, tmp_path / "probe", rows)
    without_rows = short_config(candidate, tmp_path / "probe", None)

    for config in (with_rows, without_rows):
        assert not config.run.callbacks
        assert config.run.profile is None

    request = Request(replace(loaded, config=with_rows))
    plan = make_plan(request, on_progress=lambda *_: None)
    assert plan.steps == STEPS
    assert plan.data is not None
    assert plan.data.train_samples >= STEPS


@pytest.mark.slow
@pytest.mark.full
def test_the_best_two_are_tried_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(drumline.__globals__["ENV"], "TMPDIR", str(scratch))
    path = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        data={"max_length": 32},
        batch={"global_samples": 2, "micro_batch": 1},
    )

    ended = drumline("plan", path, "launch.nproc=2", "--probe", "--json")

    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    by_name = {candidate["name"]: candidate for candidate in told["ranked"]}
    assert len(told["probes"]) == 2
    for probe in told["probes"]:
        assert not probe["failed"]
        estimate = by_name[probe["name"]]
        measured = probe["measured"]
        total = measured["seconds"]["total"]
        assert estimate["seconds"]["total"] == pytest.approx(total)
        assert estimate["memory"]["optimizer"] == measured["memory"]["optimizer"]

    assert list(scratch.glob("drumline-probe-*")) == []
    assert not (tmp_path / "run").exists()
