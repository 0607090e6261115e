"""The questions of `drumline plan` about other layouts, other clusters and what to rent.

These are --why-not, --what-if and --for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from drumline.cli.plan import parse_count
from drumline.errors import UserError
from drumline.planner import command
from drumline.planner.question import build_request
from drumline.planner.report.cheapest import HostOffer, parse_duration, parse_offers
from drumline.planner.report.explanation import explain
from drumline.planner.search import cheapest as cheapest_hosts
from drumline.planner.search import hypothetical
from drumline.planner.search.answer import Question
from drumline.planner.search.cheapest import Rented, cheapest, rent
from drumline.planner.search.gains import gains
from drumline.planner.search.hypothetical import change_cluster, parse_what_if, what_if
from drumline.planner.search.rival import find_rival, parse_wanted, time_terms, why_worse
from drumline.planner.search.search import search
from tests.unit.conftest import Run
from tests.unit.shapes import question

BATCH = {"global_samples": 64}
# Layers are few, so that a search takes little.
SHAPE = "model.shape={layers: 4, hidden: 1024, heads: 16, kv_heads: 16, intermediate: 2816, vocabulary: 32000}"
SMALL = ["plan", SHAPE, "--length", "1024", "--batch", "64"]


def show(value: float) -> str:
    return f"{value:.2f}"


# -------------------------------------------------------------------------------------------------- --why-not


@pytest.fixture(scope="module")
def eight() -> Question:
    return question("1b", "8xa100-80g", batch=BATCH)


def test_a_worse_layout_is_explained_term_by_term(eight: Question) -> None:
    answer = search(eight)
    rival = find_rival(answer, parse_wanted("tp=8"))
    assert rival.other is not None
    assert rival.other.layout.mesh.tp == 8
    assert rival.reason == ""
    assert not rival.is_first

    terms = time_terms(rival)
    for name, candidate in (("first", rival.first), ("other", rival.other)):
        total = sum(getattr(term, name) for term in terms)
        assert total == pytest.approx(1e6 / candidate.estimate.tokens_per_s)

    worst = max(terms, key=lambda term: term.difference)
    assert worst.name == "communication"
    slower = rival.first.estimate.tokens_per_s / rival.other.estimate.tokens_per_s
    assert slower > 1
    words = why_worse(rival, show)
    assert words.startswith(f"it takes {slower:.2f} × as long: for a million tokens communication ")
    assert "its speed counts 0.75 ×, since hardly a measured run has confirmed it" in words


def test_a_layout_that_does_not_fit_is_explained_by_its_memory() -> None:
    asked = question("8b", "8xa100-80g", batch=BATCH)
    rival = find_rival(search(asked), parse_wanted("replicate=8"))
    assert rival.other is not None
    assert rival.other.estimate.memory.reserved > 85e9
    assert why_worse(rival, show) == f"it does not fit: {rival.reason}."
    assert " GB > " in rival.reason


def test_the_first_plan_has_what_it_has(eight: Question) -> None:
    answer = search(eight)
    kind = answer.ranked[0].layout.strategy.kind
    rival = find_rival(answer, parse_wanted(f"strategy={kind}"))
    assert rival.is_first
    assert why_worse(rival, show) == "row 1 has it."

    checkpointed = find_rival(answer, parse_wanted("checkpointing=full"))
    assert checkpointed.other is not None
    assert checkpointed.other.layout.activation_checkpointing == "full"
    first = answer.ranked[0].layout.batch.micro_batch
    smaller = find_rival(answer, parse_wanted("micro_batch=1"))
    assert smaller.other is not None
    assert smaller.other.layout.batch.micro_batch == 1 < first


def test_what_no_layout_has_is_refused_with_what_there_is(eight: Question) -> None:
    with pytest.raises(UserError, match="no layout of 8 devices has tp=3") as refused:
        find_rival(search(eight), parse_wanted("tp=3"))
    assert refused.value.fix == "there are tp=1, 2, 4, 8"
    for text in ("tp", "tp=", "tp=0", "tp=x", "nodes=2", "checkpointing=some", "compile=1"):
        with pytest.raises(UserError, match="is no question"):
            parse_wanted(text)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("adapter.kind=lora", "compare two plans: add 'adapter.kind=lora' to the second"),
        ("compile=maybe", "write compile=true or compile=false"),
    ],
)
def test_what_is_no_question_about_a_layout_says_what_to_write(text: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_wanted(text)
    assert fix in str(refused.value.fix)


def test_a_choice_of_the_user_is_named_as_one(eight: Question) -> None:
    answer = search(eight)
    words = why_worse(find_rival(answer, parse_wanted("precision.master=bf16")), show)
    assert " GB less; no plan sets precision.master by itself" in words

    with pytest.raises(UserError) as refused:
        find_rival(answer, parse_wanted("strategy=zero9"))
    assert "fsdp2" in str(refused.value.fix)
    assert "×" not in str(refused.value.fix)


def test_no_number_of_the_table_is_cut(run: Run) -> None:
    code, out, err = run(*SMALL, "--cluster", "4xa100-80g", "--why-not", "tp=4", columns=80)
    assert code == 0, err
    assert "…" not in out
    assert "asked for:" in out


def test_why_not_prints_both_plans(run: Run) -> None:
    words = [*SMALL, "--cluster", "4xa100-80g", "--why-not", "tp=4"]
    code, out, err = run(*words, columns=100)
    assert code == 0, err
    assert "tp=4 (" in out
    for part in ("row 1:", "seconds for a million tokens", "communication", "in all", "compute"):
        assert part in out, part

    long_key = "memory.activation_checkpointing=full"
    code, out, err = run(*words[:-1], long_key, columns=80)
    assert code == 0, err
    assert "asked for:" in out
    assert "…" not in out, "numbers are whole"
    assert max(map(len, out.splitlines())) <= 80

    code, out, _ = run(*words, "--json")
    found = json.loads(out)["why_not"]
    assert found["wanted"] == "tp=4"
    assert found["other"]["mesh"]["tp"] == 4
    first, other = found["terms"]["seconds_per_million_tokens"]["communication"]
    assert other > first
    parts = found["terms"]["gb_at_peak"].values()
    needs = found["other"]["memory"]["reserved"]
    assert sum(pair[1] for pair in parts) == pytest.approx(needs / 1e9)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (
            "memory.checkpointed_blocks=2",
            lambda layout: layout.config.memory.checkpointed_blocks == 2,
        ),
        ("precision.master=bf16", lambda layout: layout.is_pure_bf16),
        ("strategy.sequence_parallel=false", lambda layout: not layout.strategy.sequence_parallel),
        ("compile.enabled=false", lambda layout: not layout.config.compile.enabled),
    ],
)
def test_any_key_that_changes_neither_model_nor_data_may_be_wanted(
    eight: Question, text: str, has: Callable[[Any], bool]
) -> None:
    rival = find_rival(search(eight), parse_wanted(text))

    assert rival.other is not None
    assert has(rival.other.layout)
    assert why_worse(rival, show)


def test_what_a_config_or_a_strategy_lacks_is_one_line(eight: Question) -> None:
    answer = search(eight)

    with pytest.raises(UserError, match=r"no strategy takes strategy\.shards=3"):
        find_rival(answer, parse_wanted("strategy.shards=3"))
    with pytest.raises(UserError, match="checkpointed"):
        find_rival(answer, parse_wanted("memory.checkpointed=3"))


def test_each_choice_of_a_plan_is_undone_alone(eight: Question) -> None:
    asked = eight.with_values("batch", micro_batch=4)
    first = search(asked).ranked[0]
    found = {gain.choice: gain for gain in gains(asked, first)}

    one_row = found["micro-batch 4"].candidate
    assert one_row is not None
    assert one_row.layout.batch.micro_batch == 1
    assert one_row.layout.batch.global_samples == first.layout.batch.global_samples
    assert one_row.layout.strategy == first.layout.strategy
    assert one_row.estimate.memory.peak < first.estimate.memory.peak
    assert any(choice.startswith("checkpointing") for choice in found)

    text = explain(search(asked), "1")
    assert "What it has besides a plain run" in text
    assert "× as fast as micro-batch 1" in text


# -------------------------------------------------------------------------------------------------- --what-if


def test_what_if_changes_what_it_names() -> None:
    cluster = question("0.1b", "8xh100-80g").cluster
    (changes,) = parse_what_if(
        "memory_gb=288 bandwidth_gb_s=8000 bf16_tflops=4000 intra=1800 price=6"
    )
    changed = change_cluster(cluster, changes)
    assert changed.device.memory_bytes == 288 * 10**9
    assert changed.device.bandwidth == 8e12
    assert changed.device.flops["bf16"] == pytest.approx(4e15)
    before = cluster.device.flops
    ratio = changed.device.flops["fp32"] / before["fp32"]
    assert ratio == pytest.approx(4e15 / before["bf16"])
    assert changed.intra.bandwidth == 1.8e12
    assert changed.intra.efficiency == cluster.intra.efficiency
    assert changed.price_per_device_hour == 6
    assert cluster.device.memory_bytes != changed.device.memory_bytes

    (changes,) = parse_what_if("device=h200 inter=8x800Gb nodes=4")
    changed = change_cluster(cluster, changes)
    assert changed.device.name == "h200"
    assert changed.world_size == 32
    assert changed.inter.bandwidth == 8e11

    rows = parse_what_if("nodes=2,4 price=3,5")
    assert rows[1] == {"nodes": 2, "price": 5.0}
    assert len(rows) == 4


def test_other_prices_take_no_other_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question("0.1b", "2xa100-80g", batch=BATCH)
    searched = []

    def count(changed: Question) -> Any:
        searched.append(changed.cluster.nodes)
        return search(changed)

    monkeypatch.setattr(hypothetical, "search", count)
    answers = what_if(asked, parse_what_if("nodes=1,2 price=3,5"))
    assert searched == [1, 2]
    prices = [answer.question.cluster.price_per_device_hour for answer in answers]
    assert prices == [3, 5, 3, 5]
    assert answers[0].ranked == answers[1].ranked


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("memory=288", "is no question"),
        ("price", "is no question"),
        ("price=1 price=2", "price is given twice"),
        ("nodes=2, 4", "'4' is no question"),
        ("nodes=1.5", "nodes=1.5 given, a whole number"),
        ("price=-1", "price=-1 given, a number from 0"),
        ("", "is no question"),
        ("memory_gb=0", "a number greater than 0"),
        ("bf16_tflops=nan", "a number greater than 0"),
        ("intra=nvlonk", "or a link such as nvlink4"),
        ("device=h2000", "no device 'h2000'"),
        ("per_node=500", "devices of a host are more than"),
        ("nodes=1,2,3,4,5,6,7,8,9 price=1,2,3,4,5,6,7,8", "72 combinations"),
    ],
)
def test_a_mistake_in_what_if(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        parse_what_if(text)


def test_what_if_of_a_card_prints_the_cluster_as_it_is_beside_it(run: Run) -> None:
    words = [*SMALL, "--cluster", "2x4090", "--price", "1", "--tokens", "1B"]
    words += ["--what-if", "bf16_tflops=660 bandwidth_gb_s=4000 intra=300 price=1,4"]
    code, out, err = run(*words, columns=120)
    assert code == 0, err
    assert "as it is" in out
    assert "price=4" in out

    _, out, _ = run(*words, "--json")
    now, cheap, dear = json.loads(out)["what_if"]
    assert now["changed"] == {}
    assert cheap["changed"]["price"] == 1
    assert cheap["best"]["tokens_per_s"] > 2 * now["best"]["tokens_per_s"]
    assert dear["best"]["cost"] == pytest.approx(4 * cheap["best"]["cost"])


# ------------------------------------------------------------------------------------------------------ --for


def test_durations_counts_and_offers() -> None:
    assert parse_duration("24h") == 24
    assert parse_duration("1d12h") == 36
    assert parse_duration("90m") == 1.5
    assert parse_count("10B") == 1e10
    assert parse_count("2.5m") == 2.5e6
    assert parse_count("1e9") == 1e9
    assert parse_offers("8xh100-80g=2.5,8xa100-80g=1.6") == [
        HostOffer("8xh100-80g", 2.5),
        HostOffer("8xa100-80g", 1.6),
    ]
    for text in ("", "24", "h", "-1h", "0h"):
        with pytest.raises(UserError, match="is no duration"):
            parse_duration(text)
    for text in ("0", "B", "ten", "-1"):
        with pytest.raises(UserError, match="is no number of tokens"):
            parse_count(text)
    for text in ("8xh100-80g", "=2", "h100=x", "h100=-1", "h100=nan"):
        with pytest.raises(UserError, match="is no offer"):
            parse_offers(text)


def test_the_fewest_hosts_that_are_in_time() -> None:
    asked = question("1b", {"device": "a100-80g", "per_node": 8, "inter": "8x200Gb"}, batch=BATCH)
    asked = replace(asked, cluster=replace(asked.cluster, price_per_device_hour=2.0))
    alone = rent(asked, 1e9, 1e6)
    assert [each.nodes for each in alone] == [1]
    hours = alone[0].hours
    assert hours is not None
    assert alone[0].cost == pytest.approx(2.0 * 8 * hours)

    # Half of the slow end of one host's time.
    fast, slow = alone[0].hours_range or (0.0, 0.0)
    assert fast < hours < slow
    tried = rent(asked, 1e9, slow / 2)
    counts = [each.nodes for each in tried]
    assert counts == sorted(counts)
    enough = [each for each in tried if each.in_time == "yes"]
    late = [each.nodes for each in tried if each.in_time != "yes"]
    chosen = cheapest(tried)
    assert chosen is not None
    assert min(each.nodes for each in enough) == max(late) + 1
    assert chosen.cost == min(each.cost for each in enough if each.cost is not None)
    assert chosen.hours_range is not None
    assert chosen.hours_range[1] <= slow / 2


def test_few_numbers_of_hosts_take_a_whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host could not be in time by its FLOPs alone, so it is not planned for.

    Whole searches are those of the first number, of the answer, and where no other family divides.
    """
    batch = {"global_samples": 1024}
    asked = question("8b", {"device": "a100-80g", "per_node": 8, "inter": "8x200Gb"}, batch=batch)
    whole = []

    def count(changed: Question, among: Any = None, *, first_only: bool = False) -> Any:
        if among is None:
            whole.append(changed.cluster.nodes)
        return search(changed, among, first_only=first_only)

    monkeypatch.setattr(cheapest_hosts, "search", count)
    tried = rent(asked, 1e11, 100.0)
    counts = [each.nodes for each in tried]
    assert len(whole) <= len(counts) / 2
    # 6 FLOPs for each token and weight, at 312e12 a second of each device.
    fewest = 6 * asked.facts.parameters * 1e11 / (8 * 312e12) / 3600 / 100.0
    assert 0.8 * fewest < counts[0] < 2 * fewest

    chosen = cheapest(tried)
    assert chosen is not None
    assert chosen.nodes in whole
    fewer = replace(asked, cluster=replace(asked.cluster, nodes=chosen.nodes - 1))
    best = next(iter(search(fewer).ranked), None)
    assert Rented(fewer, best, 1e11, 100.0).in_time != "yes"


def test_a_run_that_is_in_time_at_the_slow_end_goes_first() -> None:
    asked = question("0.1b", "8xa100-80g", batch=BATCH)
    first = search(asked).ranked[0]
    hours = first.hours(1e9) or 0.0
    slow = hours * first.estimate.seconds_range[1]

    def rented(price: float, deadline: float) -> Rented:
        cluster = replace(asked.cluster, price_per_device_hour=price)
        return Rented(replace(asked, cluster=cluster), first, 1e9, deadline)

    sure = rented(3.0, slow)
    likely = rented(1.0, (hours + slow) / 2)
    late = rented(0.5, hours / 2)
    assert [each.in_time for each in (sure, likely, late)] == ["yes", "likely", "no"]
    assert cheapest([likely, sure, late]) is sure
    assert cheapest([likely, late]) is likely
    assert cheapest([late]) is None
    assert cheapest([sure, rented(2.0, slow)]) == rented(2.0, slow)

    more = replace(sure, question=replace(asked, cluster=replace(asked.cluster, nodes=2)))
    more_cluster = replace(more.question.cluster, price_per_device_hour=1.49)
    more = replace(more, question=replace(more.question, cluster=more_cluster))
    assert more.worth < sure.worth
    assert cheapest([more, sure]) is sure, "it costs as much, and has fewer devices"


def rows_for(run: Run, *words: str) -> tuple[int, Any]:
    code, out, _ = run(*SMALL, *words, "--json")
    return code, json.loads(out)["for"]


def test_for_prints_the_cheapest_offer(run: Run) -> None:
    offers = ["--offers", "4xa100-80g=1.5,4x4090=0.4", "--tokens", "1B"]
    code, found = rows_for(run, "--for", "10d", *offers)
    assert code == 0
    clusters = {row["cluster"]: row for row in found["tried"]}
    assert set(clusters) == {"1x4xa100-80g", "1x4x4090"}
    costs = [row["cost"] for row in found["tried"]]
    chosen = found["tried"][found["cheapest"]]
    assert chosen["cost"] == min(costs)
    assert chosen["cost"] == pytest.approx(
        chosen["price_per_device_hour"] * 4 * chosen["best"]["hours"]
    )
    assert found["hours"] == 240

    code, out, err = run(*SMALL, "--for", "10d", *offers)
    assert code == 0, err
    assert f"Cheapest: {chosen['cluster']}, {chosen['best']['name']}: " in out


def test_offers_share_one_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is found and counted once; overrides of the cluster hold for each offer."""
    built = []

    def count(loaded: Any, on_progress: Any) -> Any:
        built.append(loaded)
        return build_request(loaded, on_progress)

    monkeypatch.setattr(command, "build_request", count)
    offers = ["--offers", "4xa100-80g=1.5,4x4090=0.4", "--tokens", "1B"]
    code, found = rows_for(run, "--for", "10d", *offers, "cluster.mtbf_hours=1000")
    assert code == 0
    assert len(built) == 1
    prices = {row["price_per_device_hour"] for row in found["tried"]}
    assert prices == {1.5, 0.4}

    code, _, err = run(*SMALL, "--for", "10d", "--offers", "4xa100-80g=1.5,4x4091=0.4")
    assert code == 2
    assert "4x4091" in err


def test_for_says_what_is_missing(run: Run) -> None:
    code, _, err = run(*SMALL, "--cluster", "4x4090", "--for", "24h")
    assert code == 2
    assert "the length of the run is not known" in err
    code, _, err = run(*SMALL, "--offers", "4x4090=1")
    assert code == 2
    assert "--for 24h" in err
    code, _, err = run(*SMALL, "--cluster", "4x4090", "--for", "24h", "--offers", "4x4090=1")
    assert code == 2
    assert "leave out --cluster and --price" in err
    code, _, err = run(*SMALL, "--for", "24h", "--why-not", "tp=2")
    assert code == 2
    assert "one at a time" in err
