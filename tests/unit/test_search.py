"""The search: what it takes and what it refuses for well-known shapes and clusters, and what it holds of what the user says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from drumline.config.load import load_text
from drumline.config.strategy import Degrees, Names
from drumline.plan.estimate import HostMemory
from drumline.plan.plan import RolePlan
from drumline.planner.cost.fitted import SPEED_ERROR
from drumline.planner.search.answer import (
    TIE,
    Answer,
    Candidate,
    Question,
    best_first,
    risk_adjusted_speed,
)
from drumline.planner.search.auto import describe_faster_tight_plan
from drumline.planner.search.budget import CHECKPOINTING
from drumline.planner.search.family import FEW
from drumline.planner.search.search import (
    fits,
    search,
    search_space,
    search_strategy,
)
from tests import strategies as s
from tests.distributed.setups import cases
from tests.unit.shapes import asks, facts, question

BATCH = {"global_samples": 64}


def families(answer: Answer) -> dict[str, list[Candidate]]:
    found: dict[str, list[Candidate]] = {}
    for candidate in answer.ranked:
        found.setdefault(candidate.family, []).append(candidate)
    return found


def searched(asked: Question) -> list[Names]:
    return [strategy.names(asked.cluster.world_size) for strategy in search_space(asked)]


def searched_families(asked: Question) -> set[str]:
    return {names.family for names in searched(asked)}


def refused(answer: Answer) -> dict[str, str]:
    return {r.name: r.reason for r in answer.refused}


class Expected(NamedTuple):
    """What a search finds: families one of which comes first, some that cannot fit, and some that do."""

    asked: Callable[[], Question]
    first: set[str]
    too_large: set[str]
    fitting: set[str]


# Bytes of weights, gradients and AdamW's moments alone are 16 a parameter: 0.1B 1.8 GB, 8B 128 GB,
# 70B 1129 GB; frozen ones are 2.
HOSTS = {"device": "h100-80g", "per_node": 8, "nodes": 8, "inter": "8x400Gb"}
TABLE = {
    "0.1B on one device: nothing to spread": Expected(
        asked=asks("0.1b", "1x4090"),
        first={"single"},
        too_large=set(),
        fitting={"single", "fsdp2 offload"},
    ),
    "1B on 8 H100: a copy on each": Expected(
        asked=asks("1b", "8xh100-80g", batch=BATCH),
        first={"ddp", "fsdp2"},
        too_large=set(),
        fitting={"ddp", "fsdp2", "zero1", "zero3"},
    ),
    "8B on 4 × 24 GB: 128 GB of state are more than 4 devices have": Expected(
        asked=asks("8b", "4x4090"),
        first={"fsdp2 offload", "zero3 offload"},
        too_large={
            "single",
            "ddp",
            "fsdp2",
            "fsdp2 grad-op",
            "zero1",
            "zero2",
            "zero3",
            "ddp × tp",
            "tp",
            "pp",
        },
        fitting=set(),
    ),
    "8B with LoRA there: 16 GB frozen, sharded 4 or whole": Expected(
        asked=asks("8b", "4x4090", "lora"),
        first={"ddp", "zero1", "zero2", "fsdp2", "fsdp2 grad-op", "zero3"},
        too_large=set(),
        fitting={"fsdp2"},
    ),
    "8B with QLoRA: a copy on each, or codes sharded": Expected(
        asked=asks("8b", "2xa100-80g", "4bit"),
        first={"ddp", "fsdp2", "zero3"},
        too_large=set(),
        fitting={"ddp"},
    ),
    "70B with QLoRA on 2 × 24 GB: 35 GB of codes on the host": Expected(
        asked=asks("70b", "2x4090", "4bit"),
        first={"fsdp2 offload", "zero3 offload"},
        too_large={"single", "ddp", "fsdp2"},
        fitting=set(),
    ),
    "70B on 64 H100: state fits where all of them share it": Expected(
        asked=asks("70b", HOSTS, batch={"global_samples": 128}),
        first={
            "fsdp2",
            "fsdp2 grad-op",
            "fsdp2 hybrid",
            "zero3",
            "fsdp2 × tp",
            "fsdp2 × pp",
            "fsdp2 × cp",
            "ddp × pp × tp",
            "fsdp2 × pp × tp",
            "fsdp2 × cp × tp",
        },
        too_large={"single", "ddp", "zero1", "zero2", "ddp × cp", "ddp × tp"},
        fitting={"fsdp2", "fsdp2 × tp"},
    ),
}


# With --full: other models on these devices, and other adapters.
AGAIN = (
    "1B on 8 H100: a copy on each",
    "8B with LoRA there: 16 GB frozen, sharded 4 or whole",
    "70B with QLoRA on 2 × 24 GB: 35 GB of codes on the host",
)


@pytest.mark.parametrize("name", cases(TABLE, AGAIN))
@pytest.mark.slow
def test_what_is_taken_and_what_is_refused(name: str) -> None:
    expected = TABLE[name]
    answer = search(expected.asked())

    assert answer.ranked, refused(answer)
    assert answer.ranked[0].family in expected.first, (answer.ranked[:2], refused(answer))
    assert expected.too_large <= refused(answer).keys()
    assert expected.fitting <= families(answer).keys()

    for one in answer.refused:
        if one.name in expected.too_large:
            assert one.best, one.reason
            estimate = one.best.estimate
            assert estimate.memory.reserved > estimate.limit, one.reason
            assert " GB > " in one.reason


def expert_degrees(asked: Question) -> set[tuple[str, int, int]]:
    """Return (kind, ep, pp) of what is searched with experts on several ranks."""
    degrees = set()
    for way in search_space(asked):
        if isinstance(way, Degrees) and way.ep > 1:
            degrees.add((way.kind, way.ep, way.pp))

    return degrees


def test_experts_are_laid_on_ranks_of_a_host() -> None:
    """A mixture of 8 experts on two hosts of 4: groups of 2 and 4, alone and in a pipeline; a model without experts has none."""
    cluster = {"device": "h100-80g", "per_node": 4, "nodes": 2, "inter": "400Gb"}
    asked = question("1b", cluster)
    degrees = expert_degrees(replace(asked, facts=replace(asked.facts, experts=8)))

    assert degrees >= {("ddp", 2, 1), ("fsdp2", 4, 1), ("fsdp2", 4, 2), ("ddp", 2, 4)}
    assert {ep for _, ep, _ in degrees} == {2, 4}
    assert not expert_degrees(asked)


def test_experts_lie_beside_parts_of_rows_and_of_matrices_within_a_host() -> None:
    """6 experts on hosts of 4: on the ranks of ep 2 × tp 2 they do not divide, with cp they do."""
    cluster = {"device": "h100-80g", "per_node": 4, "nodes": 2, "inter": "400Gb"}
    asked = question("1b", cluster)

    def beside(experts: int) -> set[tuple[str, int, int, int]]:
        """Return (kind, ep, cp, tp) of what is searched with experts on several ranks."""
        mixture = replace(asked, facts=replace(asked.facts, experts=experts))
        found = set()
        for way in search_space(mixture):
            if isinstance(way, Degrees) and way.ep > 1:
                found.add((way.kind, way.ep, way.cp, way.tp))
        return found

    of_eight = beside(8)
    assert of_eight >= {("fsdp2", 2, 2, 1), ("fsdp2", 2, 1, 2), ("ddp", 2, 2, 1), ("ddp", 2, 1, 2)}
    assert max(ep * cp * tp for _, ep, cp, tp in of_eight) == 4
    of_six = beside(6)
    assert ("fsdp2", 2, 2, 1) in of_six
    assert {tp for _, _, _, tp in of_six} == {1}


@pytest.mark.slow
def test_the_order_is_that_of_expected_speed_up_to_the_planners_error() -> None:
    answer = search(question("1b", "8xh100-80g", batch=BATCH))
    for candidate in answer.ranked:
        assert candidate.estimate.verdict in ("fits", "tight")

    for better, worse in combinations(answer.ranked, 2):
        least = (1 - SPEED_ERROR) * (1 - TIE) * risk_adjusted_speed(worse)
        assert risk_adjusted_speed(better) >= least

    for candidates in families(answer).values():
        assert len(candidates) <= FEW

    names = [candidate.name for candidate in answer.ranked]
    names += refused(answer)

    assert len(names) == len(set(names))
    assert not families(answer).keys() & refused(answer).keys()


@cache
def fitting() -> Candidate:
    """A candidate that fits, which tests change."""
    return search(question("1b", "8xh100-80g", batch=BATCH)).ranked[0]


def changed(
    name: str, *, speed: float = 1.0, needs: float = 0.5, host: float = 0.1, complexity: int = 0
) -> Candidate:
    """`fitting` with another speed (times its own), device memory and host memory (parts of the limits)."""
    candidate = fitting()
    estimate = candidate.estimate
    host_limit = 10**12
    update = {
        "tokens_per_s": speed * estimate.tokens_per_s,
        "memory": estimate.memory.model_copy(update={"reserved": int(needs * estimate.limit)}),
        "host": HostMemory(load=int(host * host_limit), train=0, save=0),
        "host_limit": host_limit,
        "memory_range": (0.9, 1.38),
    }
    return replace(
        candidate, name=name, complexity=complexity, estimate=estimate.model_copy(update=update)
    )


def first_of(*candidates: Candidate) -> str:
    return next(best_first(candidates)).name


@pytest.mark.slow
def test_a_tight_plan_is_first_where_its_speed_is_worth_its_risk() -> None:
    """Of 80% of the memory the risk is 13% (log(1 / 0.8) over log(1.38) / 1.645 is 1.14 deviations): 1 / (1 - 0.13) is 1.15."""
    roomy = changed("roomy")

    assert changed("tight", needs=0.8).estimate.risk == pytest.approx(0.127, abs=0.001)
    assert first_of(roomy, changed("tight", needs=0.8, speed=400)) == "tight"
    assert first_of(roomy, changed("tight", needs=0.8, speed=1.03)) == "roomy"
    assert first_of(roomy, changed("tight", needs=0.8, speed=1.14)) == "roomy"
    assert first_of(roomy, changed("tight", needs=0.8, speed=1.20)) == "tight"


def test_the_risk_goes_from_one_in_twenty_to_one_half() -> None:
    at_upper_end = changed("x", needs=1.0001 / 1.38).estimate
    assert at_upper_end.verdict == "tight"

    for needs, risk in ((1.0001 / 1.38, 0.05), (1.0, 0.5)):
        assert changed("x", needs=needs).estimate.risk == pytest.approx(risk, abs=0.001)

    assert changed("x", needs=0.7).estimate.risk == 0.0
    assert changed("x", needs=1.01).estimate.risk == 1.0


def test_of_those_as_fast_one_that_wastes_host_memory_is_passed_over() -> None:
    """Within the planner's error of speed, 25% of a host's memory counts, unless it takes more of the device."""
    zero = changed("zero2", speed=1.07, needs=0.6, host=0.7)

    assert first_of(zero, changed("fsdp2", needs=0.4, host=0.12)) == "fsdp2"
    assert first_of(zero, changed("fsdp2", needs=0.4, host=0.5)) == "zero2"
    assert first_of(zero, changed("fsdp2", needs=0.65, host=0.12)) == "zero2"

    faster = changed("zero2", speed=1.16, needs=0.6, host=0.7)
    assert first_of(faster, changed("fsdp2", needs=0.4, host=0.12)) == "zero2"


def test_tensor_parallelism_is_first_where_it_gains_more_than_its_error() -> None:
    layout = fitting().layout
    mesh = layout.mesh.model_copy(update={"tp": 2})
    split = replace(fitting(), name="tp", layout=layout.model_copy(update={"mesh": mesh}))

    for speed, first in ((1.20, "ddp"), (1.40, "tp")):
        estimate = changed("tp", speed=speed).estimate
        assert first_of(changed("ddp"), replace(split, estimate=estimate)) == first


def test_of_those_as_fast_and_as_simple_the_smallest_is_first() -> None:
    """A hair's breadth of speed, which no prediction is as good as, does not buy half as much memory again."""
    plain = fitting()
    estimate = plain.estimate

    def with_size(name: str, gb: int, times: float) -> Candidate:
        memory = estimate.memory.model_copy(update={"reserved": gb * 10**9})
        update = {"memory": memory, "tokens_per_s": times * estimate.tokens_per_s}
        return replace(plain, name=name, estimate=estimate.model_copy(update=update))

    candidates = [with_size("large", 46, 1.0004), with_size("small", 30, 1.0)]
    assert [candidate.name for candidate in best_first(candidates)] == ["small", "large"]


def with_memory(asked: Question, gib: int) -> Question:
    """The question for devices of so many GiB."""
    device = replace(asked.cluster.device, memory_bytes=gib * 2**30)
    return replace(asked, cluster=replace(asked.cluster, device=device))


def test_what_is_tight_and_faster_is_a_row_with_its_risk() -> None:
    """The first plan fits with room; one with little room is faster, and goes on with less where memory runs out."""
    answer = search(with_memory(question("1b", "1xa100-40g", batch=BATCH), 36))
    tight = answer.tight

    assert tight is not None
    assert tight in answer.ranked
    assert tight.name == "single, no checkpointing"
    assert tight.estimate.verdict == "tight"
    assert tight.config.memory.on_oom == "replan"

    first = answer.ranked[0]
    assert first.estimate.verdict == "fits"
    assert first.config.memory.on_oom == "stop"
    assert tight.estimate.tokens_per_s * (1 - SPEED_ERROR) > first.estimate.tokens_per_s

    row = describe_faster_tight_plan(answer)
    assert tight.name in row
    assert f"with a chance of {tight.estimate.risk:.0%}" in row

    said = question("1b", "1xa100-40g", batch=BATCH, memory={"on_oom": "stop"})
    stops = search(with_memory(said, 36))

    assert stops.tight is not None
    assert stops.tight.config.memory.on_oom == "stop"
    assert "and then ends" in describe_faster_tight_plan(stops)

    alone = search(question("1b", "1xh200", batch={"global_samples": 8}))
    assert alone.tight is None
    assert describe_faster_tight_plan(alone) == ""


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"global_samples": 48}, marks=pytest.mark.full),
        {"global_tokens": 4096 * 48},
        pytest.param({"global_samples": 48, "micro_batch": 2}, marks=pytest.mark.full),
        {"accumulation": 6},
    ],
)
@pytest.mark.slow
def test_the_global_batch_is_the_same_in_all(batch: dict[str, int]) -> None:
    answer = search(question("1b", "8xa100-80g", batch=batch))
    assert answer.ranked

    for candidate in answer.ranked:
        plan = candidate.layout.batch
        assert plan.global_samples == 48
        assert plan.micro_batch * plan.accumulation * candidate.layout.mesh.data_ranks == 48
        assert plan.micro_batch == batch.get("micro_batch", plan.micro_batch)

        said = candidate.config.batch
        if not said.accumulation:
            assert said.micro_batch == plan.micro_batch
            assert (said.global_samples, said.global_tokens) != (None, None)


def test_a_batch_of_any_size_is_searched_in_no_time() -> None:
    """10^9 - 1 samples: the micro-batches that divide them are not looked for among all numbers."""
    answer = search(question("0.1b", "8xh100-80g", batch={"global_samples": 10**9 - 1}))
    assert answer.ranked
    assert answer.ranked[0].layout.batch.global_samples == 10**9 - 1


def offloads(answer: Answer) -> set[str]:
    """Return the offloads of the ranked FSDP2 strategies."""
    found: set[str] = set()
    for candidate in answer.ranked:
        if isinstance(candidate.layout.strategy, s.FSDP2Strategy):
            found.add(candidate.layout.strategy.offload)

    return found


@pytest.mark.slow
def test_what_the_user_says_is_held() -> None:
    """What is said of a kind holds for that kind; the others are there to compare with."""
    said = question(
        "1b",
        "8xa100-80g",
        batch=BATCH,
        memory={"activation_checkpointing": "full"},
        strategy={"kind": "fsdp2", "offload": "cpu"},
    )
    answer = search(said)
    for candidate in answer.ranked:
        assert candidate.layout.activation_checkpointing == "full"

    assert offloads(answer) == {"cpu"}
    assert {"ddp", "zero2"} <= families(answer).keys()

    auto = said.config.model_copy(update={"strategy": s.AutoStrategy()})
    assert "none" in offloads(search(replace(said, config=auto)))


def optimizer_on_host(asked: Question) -> list[s.Zero3Strategy]:
    """Return the ZeRO 3 strategies of a search that have their optimizer alone on the host."""
    found = []
    for strategy in search_space(asked):
        if isinstance(strategy, s.Zero3Strategy) and strategy.offloads() == ("cpu", "none"):
            found.append(strategy)
    return found


def best_of_zero3(asked: Question) -> tuple[bool, Candidate]:
    """Return the best ZeRO 3 with its optimizer on the host, and whether that is page-locked."""
    (strategy,) = optimizer_on_host(asked)
    found = search_strategy(asked, strategy)
    assert isinstance(found, Candidate) and isinstance(found.layout.strategy, s.Zero3Strategy)
    return found.layout.strategy.offload_optimizer.pin_memory, found


def test_offloaded_states_are_page_locked_where_the_host_has_the_memory() -> None:
    """torch rounds page-locked memory up to a power of two; what the user says is held."""
    memory = {"activation_checkpointing": "full"}
    asked = question("8b", "8xa100-80g", batch=BATCH, memory=memory)
    is_pinned, pinned = best_of_zero3(asked)
    assert is_pinned

    strategy = {"kind": "zero3", "offload_optimizer": "cpu"}
    said = question("8b", "8xa100-80g", batch=BATCH, memory=memory, strategy=strategy)
    is_pinned, pageable = best_of_zero3(said)
    assert not is_pinned
    assert pinned.estimate.tokens_per_s > 1.02 * pageable.estimate.tokens_per_s

    # fp32 gradients of a rank's 8.03B / 8 parameters lie there twice: as a whole, and by groups of 1B.
    share = -(-facts("8b").parameters // 8)
    whole, group, rest = 4 * share, 4 * 10**9, 4 * (share - 10**9)
    rounded = 2**32 - whole + 2**32 - group + 2 ** (rest - 1).bit_length() - rest
    more = pinned.estimate.host.train - pageable.estimate.host.train
    assert more == pytest.approx(8 * rounded, rel=1e-3)

    limit = (pinned.estimate.host.running + pageable.estimate.host.running) // 2
    small = replace(asked, cluster=replace(asked.cluster, host_memory_bytes=limit))
    is_pinned, fallback = best_of_zero3(small)
    assert not is_pinned and fallback.estimate.verdict == "fits"
    small_and_pinned = {"kind": "zero3", "offload_optimizer": {"kind": "cpu", "pin_memory": True}}
    config = question("8b", "8xa100-80g", batch=BATCH, memory=memory, strategy=small_and_pinned)
    (strategy_said,) = optimizer_on_host(config)
    refusal = search_strategy(replace(config, cluster=small.cluster), strategy_said)
    assert not isinstance(refusal, Candidate), "the user's own is not changed"


def test_stages_that_the_user_says_are_held() -> None:
    strategy = {"kind": "fsdp2", "pipeline": {"stages_per_rank": 4}}
    pipes = set()
    for way in search_space(question("1b", "4xa100-80g", strategy=strategy)):
        if isinstance(way, s.FSDP2Strategy) and way.pp > 1:
            pipes.add((way.pipeline.schedule, way.pipeline.stages_per_rank))

    assert pipes >= {("interleaved", 4), ("gpipe", 4)}


@pytest.mark.slow
def test_strategies_that_are_tried_by_name_only() -> None:
    by_name = ("dp", "local_sgd", "diloco", "model_parallel")
    assert not searched_families(question("1b", "8xa100-80g")) & set(by_name)

    for kind in by_name:
        answer = search(question("0.1b", "4xa100-80g", batch=BATCH, strategy=kind))
        assert any(name.startswith(kind) for name in families(answer)), refused(answer)

    strategy = {"kind": "ddp", "pp": 4, "pipeline": {"schedule": "zero_bubble"}}
    slow = search(question("0.1b", "4xa100-80g", batch=BATCH, strategy=strategy))

    assert "pp 4 zero_bubble" in [candidate.name for candidate in slow.ranked]


class Ruled(NamedTuple):
    """A question, and words of the refusal of a family."""

    asked: Callable[[], Question]
    family: str
    words: str


def without_deepspeed() -> Question:
    return replace(question("1b", "2xh100-80g"), has_deepspeed=False)


def with_all_processes() -> Question:
    return replace(question("1b", "2xh100-80g"), needs_all_processes=True)


ODD_ROWS = {"train": [{"kind": "file", "path": "x"}], "max_length": 4095}
RULED = [
    Ruled(
        asked=asks("9 heads", "8xh100-80g", batch=BATCH),
        family="cp",
        words="9 attention heads do not divide by cp 8",
    ),
    Ruled(
        asked=asks("9 heads", "2xh100-80g", batch=BATCH),
        family="tp",
        words="must divide by tp",
    ),
    Ruled(
        asked=without_deepspeed,
        family="zero2",
        words="deepspeed is not installed",
    ),
    Ruled(
        asked=with_all_processes,
        family="single",
        words="it is one process, and there are 2",
    ),
    Ruled(
        asked=asks("1b", "8xh100-80g", batch={"global_samples": 12}),
        family="ddp",
        words="12 samples does not divide by 8 data ranks",
    ),
    Ruled(
        asked=asks("1b", "2xh100-80g", batch=BATCH, data=ODD_ROWS),
        family="cp",
        words="4095 tokens do not divide into 2 parts",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", RULED, ids=lambda case: case.words)
def test_a_family_is_refused_in_the_words_of_its_rule(case: Ruled) -> None:
    answer = search(case.asked())
    assert case.words in refused(answer)[case.family]


@pytest.mark.slow
def test_every_family_has_an_answer() -> None:
    """Tensor parallelism stays within a host."""
    asked = question("1b", {"device": "a100-80g", "per_node": 8, "nodes": 2}, batch=BATCH)
    answer = search(asked)

    assert searched_families(asked) == families(answer).keys() | refused(answer).keys()

    names = [names.name for names in searched(asked)]
    assert len(names) == len(set(names))
    assert "fsdp2 hybrid 2" in names
    assert "fsdp2 × pp 2 interleaved × tp 4" in names

    for way in search_space(asked):
        if isinstance(way, s.DDPStrategy):
            assert way.tp <= 8


@pytest.mark.parametrize(
    ("strategy", "name", "family"),
    [
        (
            s.FSDP2Strategy(reshard_after_forward=False, tp=2, pp=4),
            "fsdp2 grad-op × pp 4 × tp 2",
            "fsdp2 × pp × tp",
        ),
        (s.FSDP2Strategy(pp=4), "fsdp2 grad-op × pp 4", "fsdp2 × pp"),
        (s.FSDP2Strategy(pp=4, reshard_after_forward=True), "fsdp2 × pp 4", "fsdp2 × pp"),
        (s.FSDP2Strategy(replicate=2), "fsdp2 hybrid 2", "fsdp2 hybrid"),
        (s.DDPStrategy(tp=8), "tp 8", "tp"),
        (s.DDPStrategy(tp=4), "ddp × tp 4", "ddp × tp"),
        (s.TPStrategy(), "tp 8", "tp"),
        (s.PPStrategy(degree=2, schedule="gpipe"), "ddp × pp 2 gpipe", "ddp × pp"),
        (
            s.Zero3Strategy(offload_optimizer=s.Offload(kind="cpu")),
            "zero3 offload optimizer",
            "zero3 offload optimizer",
        ),
        (
            s.Zero3Strategy(offload_optimizer=s.Offload(kind="nvme", path="/d")),
            "zero3 nvme optimizer",
            "zero3 nvme optimizer",
        ),
    ],
)
def test_names(strategy: s.StrategyConfig, name: str, family: str) -> None:
    names = strategy.names(8)
    assert names.name == name
    assert names.family == family


def test_nvme_where_a_folder_is_named() -> None:
    strategy = {"kind": "auto", "nvme": "/disk"}
    without = searched_families(question("8b", "1xa100-80g"))
    named = searched_families(question("8b", "1xa100-80g", strategy=strategy))
    assert named - without == {"zero3 nvme", "zero3 nvme optimizer"}


def test_checkpointing_and_micro_batch_are_searched_where_they_are_open() -> None:
    """A row that fits only when little is kept of it is found, and with it the micro-batch that fits."""
    asked = question("8b", "8xa100-80g", batch=BATCH)
    found = search_strategy(asked, s.FSDP2Strategy())

    assert isinstance(found, Candidate)
    assert found.layout.activation_checkpointing in CHECKPOINTING

    batch = {"global_samples": 64, "micro_batch": 8}
    for kept, should_fit in (("none", False), ("full", True)):
        memory = {"activation_checkpointing": kept}
        said = question("8b", "8xa100-80g", batch=batch, memory=memory)
        found = search_strategy(said, s.FSDP2Strategy())
        assert isinstance(found, Candidate) == should_fit

    assert fits(asked)
    assert not fits(question("70b", "1x4090"), [s.SingleStrategy()])


def test_what_fits_without_accumulation_alone_is_found() -> None:
    """Gradients that are added up over micro-batches take 4 bytes a parameter more under DDP than a larger micro-batch of a small model."""
    device = {
        "memory_gb": 27.5,
        "bandwidth_gb_s": 1000.0,
        "bf16_tflops": 300.0,
        "fp32_tflops": 100.0,
    }
    cluster = {"device": "own", "per_node": 2, "devices": {"own": device}}
    data = {"train": [{"kind": "file", "path": "x"}], "max_length": 128}
    batch = {"global_samples": 4}
    small = question("1b", cluster, batch={**batch, "micro_batch": 1}, data=data)

    assert not isinstance(search_strategy(small, s.DDPStrategy()), Candidate)

    found = search_strategy(question("1b", cluster, batch=batch, data=data), s.DDPStrategy())
    assert isinstance(found, Candidate)
    assert found.layout.batch.micro_batch == 2
    assert found.layout.batch.accumulation == 1


def test_a_batch_cut_otherwise_is_no_other_batch() -> None:
    """Auto may choose another micro-batch when a run goes on."""
    from drumline.config.load import refused_changes

    data = "data: {train: [{kind: file, path: x}]}\n"
    old = load_text(data + "batch: {global_samples: 8, micro_batch: 2}\n", [])
    new = load_text(data + "batch: {global_samples: 8, micro_batch: 4}\n", [])

    assert old != new
    assert refused_changes(old, new, ()).keys == []

    without_samples = load_text(data + "batch: {micro_batch: 2}\n", [])
    changes = refused_changes(without_samples, new, ())
    assert changes.keys == ["batch.global_samples", "batch.micro_batch"]


PPO = {"kind": "ppo", "rewards": [{"kind": "function", "path": "rewards.py:good"}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [{"kind": "dpo", "reference": "live"}, PPO, "reward"],
    ids=["dpo", "ppo", "reward"],
)
def test_other_models_are_spread_alike(algorithm: Any) -> None:
    """With the models that an algorithm needs besides the policy."""
    batch = {"global_samples": 64, "micro_batch": 1}
    asked = question("1b", "4xa100-80g", batch=batch, algorithm=algorithm)
    roles = {}
    for name, wanted in asked.config.algorithm.auxiliary_models(asked.config).items():
        roles[name] = RolePlan(
            model=wanted.model,
            model_path=None,
            head=wanted.head,
            trainable=wanted.trainable,
            lr_ratio=wanted.lr_ratio,
        )

    of_roles = replace(asked.facts, roles=dict.fromkeys(roles, facts("1b")))
    answer = search(replace(asked, roles=roles, facts=of_roles))
    pipes = next(c for c in answer.ranked if c.layout.pipeline and c.layout.mesh.tp == 1)

    assert set(pipes.layout.roles) == set(roles)

    for role in pipes.layout.roles.values():
        assert role.layers

    whole = ddp_parameters(answer)
    alone = ddp_parameters(search(asked))
    if roles:
        assert whole > alone
    else:
        assert whole == alone


def ddp_parameters(answer: Answer) -> float:
    """Return the bytes of parameters on each rank under DDP."""
    ddp = next(candidate for candidate in answer.ranked if candidate.name == "ddp")
    return ddp.estimate.memory.parameters


def test_blocks_that_no_pipeline_cuts_are_checkpointed() -> None:
    """As those of vision-language models."""
    asked = question("8b", "8xh100-80g", batch=BATCH)
    uncut = replace(asked, facts=replace(asked.facts, block_parameters=()))
    chosen = {candidate.layout.activation_checkpointing for candidate in search(uncut).ranked}
    assert chosen - {"none"}
    without = replace(uncut, facts=replace(uncut.facts, recomputes=False))
    kinds = {candidate.layout.activation_checkpointing for candidate in search(without).ranked}
    assert kinds <= {"none"}
