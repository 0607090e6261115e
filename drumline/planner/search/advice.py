"""Advice on a run that does not fit, and on how far one that fits can grow.

It is the smallest change after which a run fits, the longest row, the largest micro-batch, other
numbers of hosts, and fallbacks for a run that ran out of memory. All functions are pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from drumline.config.algorithm import AlgorithmSpec, ChunkedSpec
from drumline.config.config import BatchConfig, Config, LoRAConfig
from drumline.config.strategy import StrategyConfig
from drumline.errors import PlanError
from drumline.plan.batch import default_accumulation
from drumline.plan.explain import flow_style
from drumline.plan.facts import with_length
from drumline.plan.plan import Plan
from drumline.plan.stages import least_accumulation
from drumline.planner.derived import with_lora
from drumline.planner.search.answer import (
    GB,
    Answer,
    Candidate,
    Question,
    excess,
    gb,
    is_offloaded,
    why_not,
)
from drumline.planner.search.budget import CHECKPOINTING
from drumline.planner.search.pure_bf16 import OVERRIDE, with_pure_bf16
from drumline.planner.search.savings import MLP_CHUNK
from drumline.planner.search.search import evaluate, fits, search, search_space
from drumline.planner.strategies.base import cost_of

# The length of an advised row in tokens is a multiple of this.
LENGTH_MULTIPLE = 64
# Tokens of the shortest row that is advised.
SHORT = 512
# The most hosts that are advised, and the numbers of devices that one host is advised to have.
MOST_HOSTS = 1024
HOST_SIZES = (2, 4, 8)
# Tokens of the longest row that is tried if the model sets no limit.
LONGEST = 1 << 20
# Rows of the largest micro-batch that is tried.
MOST_ROWS = 1 << 12
# The most changes that an error names.
MOST_CHANGES = 3
# Stands for a folder that the user has to name.
DISK = "/nvme"


@dataclass(frozen=True)
class Change:
    """A change after which a run fits.

    `what`: the change as keys of the YAML. `candidate`: the first plan after it.
    """

    what: str
    candidate: Candidate

    def line(self) -> str:
        """Return the change with the plan and its memory."""
        estimate = self.candidate.estimate
        needs = gb(estimate.memory.reserved)
        return f"{self.what} ({self.candidate.name}: {needs} of {gb(estimate.limit)})"


@dataclass(frozen=True)
class LargestFit:
    """The longest row, or the largest micro-batch, with which a family fits, and its plan.

    `number`: tokens of the row, or samples of the micro-batch. `candidate`: the best plan with it.
    """

    number: int
    candidate: Candidate


@dataclass(frozen=True)
class ModeResult:
    """The answer for one training mode: full (all weights, no adapter), LoRA or QLoRA.

    `name`: full, LoRA or QLoRA. `longest`: the longest row that fits; None for images, and if no
    row fits.
    """

    name: str
    answer: Answer
    longest: LargestFit | None

    @property
    def best(self) -> Candidate | None:
        """Return the first candidate that fits, or else the one that comes nearest to it."""
        if self.answer.ranked:
            return self.answer.ranked[0]
        return _leanest(refused.best for refused in self.answer.refused)


def _leanest(candidates: Iterable[Candidate | None]) -> Candidate | None:
    """Return the candidate that comes nearest to fitting; None if there is none."""
    known = [candidate for candidate in candidates if candidate is not None]
    return min(known, key=lambda each: excess(each.estimate), default=None)


def smallest_changes(answer: Answer) -> tuple[Change, ...]:
    """Return the smallest change of each kind after which something fits; empty if none would help.

    The order is: checkpointing, micro-batch, a disk, weights and moments in bf16, adapters, a shorter
    row, more devices.
    """
    changes = []
    for what, changed in _proposals(answer.question):
        # This ends with the first strategy that fits, so most changes are not searched in full.
        if not fits(changed):
            continue
        ranked = search(changed, exclude_tight=True, first_only=True).ranked
        if ranked:
            changes.append(Change(what, ranked[0]))
    return tuple(changes)


def nothing_fits_error(answer: Answer, changes: Sequence[Change]) -> PlanError:
    """Return the error that nothing fits: the nearest candidate, and the smallest changes."""
    nearest = _leanest(refused.best for refused in answer.refused)
    if nearest is None:
        first = answer.refused[0]
        return PlanError(
            f"no strategy goes with this config: {first.name}: {first.reason}", where="strategy"
        )
    fix = "no change was found that would: take a smaller model, or larger devices"
    if changes:
        lines = "; or ".join(change.line() for change in changes[:MOST_CHANGES])
        fix = f"it would with {lines}"
    return PlanError(
        f"nothing fits; nearest is {nearest.name}: {why_not(nearest.estimate)}",
        where="strategy",
        fix=fix,
    )


def max_length(question: Question) -> tuple[LargestFit, ...]:
    """Return for each family the longest row that fits, the longest first.

    Lengths are multiples of LENGTH_MULTIPLE. The samples of a step stay as they are. Raises
    PlanError for images alone.
    """
    if question.config.images_alone:
        raise PlanError(
            "rows of images have no length", where="--max-seq", fix="ask for --max-batch"
        )

    def longest(family: Sequence[StrategyConfig]) -> LargestFit | None:
        return _find_longest(question, family)

    return _find_by_family(question, longest)


def _find_longest(question: Question, family: Sequence[StrategyConfig]) -> LargestFit | None:
    """Return the longest row with which one of some strategies fits."""
    end = question.facts.max_positions or LONGEST
    return _find_largest_of_family(
        partial(with_row_length, question), family, _shortest_row(question), end, LENGTH_MULTIPLE
    )


def _shortest_row(question: Question) -> int:
    """Return the shortest row, in tokens, that leaves room for a prompt before sampled tokens.

    It is a multiple of LENGTH_MULTIPLE.
    """
    return LENGTH_MULTIPLE * (question.config.algorithm.new_tokens // LENGTH_MULTIPLE + 1)


def compare_modes(answer: Answer, plain: Question) -> tuple[ModeResult, ...]:
    """Return the results of full training, LoRA and QLoRA for the same run, with the longest rows.

    LoRA and QLoRA are left out if their sizes cannot be derived (`adapter_questions`). All estimates
    are corrected as those of `answer`. `plain`: the question of `answer` without its adapter.
    """
    plain = replace(plain, correction=answer.question.correction)
    questions = {"full": plain, **adapter_questions(answer.question)}
    own = _adapter_name(answer.question)
    modes = []
    for name, question in questions.items():
        found = answer if name == own else search(question, first_only=True)
        longest = None
        if not found.question.config.images_alone:
            longest = _find_longest_of_all(found.question)
        modes.append(ModeResult(name, found, longest))
    return tuple(modes)


def _adapter_name(question: Question) -> str:
    """Return which of full, LoRA and QLoRA a question is about."""
    adapter = question.config.adapter
    if not isinstance(adapter, LoRAConfig):
        return "full"
    return "LoRA" if adapter.quantize == "none" else "QLoRA"


def compare_modes_quickly(answer: Answer) -> tuple[ModeResult, ...]:
    """Return what `compare_modes` does, without the longest rows, which take seconds to find.

    `answer`: of a question that trains all weights.
    """
    modes = [ModeResult("full", answer, None)]
    for name, question in adapter_questions(answer.question).items():
        modes.append(ModeResult(name, search(question, first_only=True), None))
    return tuple(modes)


def _find_longest_of_all(question: Question) -> LargestFit | None:
    """Return the longest row that fits with any strategy.

    Strategies that cut a row into most parts come first. Once they have a long row that fits, most
    other strategies are ruled out by a single search each.
    """

    def parts(strategy: StrategyConfig) -> int:
        """Return into how many parts a strategy cuts what a row needs."""
        cp = getattr(strategy, "cp", 1)
        tp = getattr(strategy, "tp", 1)
        return int(cp * tp)

    strategies = sorted(search_space(question), key=parts, reverse=True)
    return _find_longest(question, strategies)


def max_batch(question: Question) -> tuple[LargestFit, ...]:
    """Return for each family the largest micro-batch of a device that fits, the largest first.

    The global batch follows the micro-batch.
    """

    def largest(family: Sequence[StrategyConfig]) -> LargestFit | None:
        found = []
        for strategy in family:
            largest_fit = _find_largest_of_family(
                partial(_with_micro_batch, question, strategy), [strategy], 1, MOST_ROWS, 1
            )
            if largest_fit is not None:
                found.append(largest_fit)
        return max(found, key=_size_and_speed, default=None)

    return _find_by_family(question, largest)


def _size_and_speed(largest_fit: LargestFit) -> tuple[int, float]:
    """Return the order of micro-batches: by size, then by speed."""
    return largest_fit.number, largest_fit.candidate.estimate.tokens_per_s


class Proposal(NamedTuple):
    """A change as keys of the YAML, and the question after it."""

    what: str
    question: Question


def _proposals(question: Question) -> Iterator[Proposal]:
    """Yield changes in the order of `smallest_changes`."""
    yield from _with_less_memory_a_row(question)
    yield from _with_smaller_batch(question)
    if question.nvme is None and question.has_deepspeed:
        yield Proposal("strategy={kind: auto, nvme: FOLDER}", replace(question, nvme=DISK))
    host = _with_host_memory(question)
    if host is not None:
        yield host
    if "master" not in question.config.precision.model_fields_set:
        yield Proposal(OVERRIDE, with_pure_bf16(question))
    if question.config.adapter.kind == "none" and question.config.head == "lm":
        keys = {"LoRA": "adapter=lora", "QLoRA": "adapter={kind: lora, quantize: 4bit}"}
        for name, adapted in adapter_questions(question).items():
            yield Proposal(keys[name], adapted)
    shorter = _with_shorter_rows(question)
    if shorter is not None:
        yield shorter
    for larger in _with_more_devices(question):
        if fits(larger.question):
            yield larger
            return


def _with_less_memory_a_row(question: Question) -> Iterator[Proposal]:
    """Yield changes after which a row needs less memory."""
    memory = question.config.memory
    is_set = "activation_checkpointing" in memory.model_fields_set
    if is_set and memory.activation_checkpointing != "full":
        yield Proposal(
            "memory.activation_checkpointing=full",
            question.with_values("memory", activation_checkpointing="full"),
        )
    if not memory.activation_offload and question.cluster.device.kind == "cuda":
        least = {
            "activation_checkpointing": "full",
            "activation_offload": True,
            "mlp_chunk": MLP_CHUNK,
        }
        yield Proposal(f"memory={flow_style(least)}", question.with_values("memory", **least))


def _with_smaller_batch(question: Question) -> Iterator[Proposal]:
    """Yield changes of the batch, and chunks of the loss."""
    batch = question.config.batch
    algorithm = question.config.algorithm
    if batch.global_samples is not None:
        world_size = question.cluster.world_size
        surplus = batch.global_samples % world_size
        if surplus:
            # The next multiple of the world size.
            samples = batch.global_samples - surplus + world_size
            yield Proposal(
                f"batch.global_samples={samples}",
                question.with_values("batch", global_samples=samples),
            )
    if (batch.micro_batch or 1) > 1 or batch.accumulation is not None:
        yield Proposal(
            "batch.micro_batch=1",
            question.with_values("batch", micro_batch=1, accumulation=None),
        )
    chunk = type(algorithm).model_fields.get("loss_chunk")
    if chunk is not None and not getattr(algorithm, "loss_chunk", None):
        yield Proposal(
            f"algorithm.loss_chunk={chunk.default}",
            question.with_values("algorithm", loss_chunk=chunk.default),
        )


def _with_shorter_rows(question: Question) -> Proposal | None:
    """Return the change to the longest row that fits; None if no shorter row fits."""
    config = question.config
    if config.images_alone:
        return None

    def fits_with(tokens: int) -> bool:
        return fits(with_row_length(question, tokens))

    start = max(SHORT, _shortest_row(question))
    tokens = _find_largest(fits_with, range(start, config.data.max_length, LENGTH_MULTIPLE))
    if tokens is None:
        return None
    shorter = with_row_length(question, tokens)
    what = f"data.max_length={tokens}"
    batch = shorter.config.batch
    if batch != config.batch:
        what += f" batch={flow_style(batch.model_dump(exclude_defaults=True))}"
    return Proposal(what, shorter)


def _with_host_memory(question: Question) -> Proposal | None:
    """Return the change that sets a host's memory, to the least with which something fits.

    None if that memory is known already, or if nothing fits with any.
    """
    cluster = question.cluster
    if not cluster.host_memory_assumed:
        return None
    unlimited = replace(cluster, host_memory_bytes=None, host_memory_assumed=False)
    found = search(replace(question, cluster=unlimited), exclude_tight=True).ranked
    if not found:
        return None
    least = math.ceil(min(candidate.estimate.host.most for candidate in found) / GB)
    known = replace(cluster, host_memory_bytes=int(least * GB), host_memory_assumed=False)
    return Proposal(f"cluster.host_memory_gb={least}", replace(question, cluster=known))


def _with_more_devices(question: Question) -> Iterator[Proposal]:
    """Yield the question on more devices, the fewest first.

    They are up to eight in one host, then twice as many hosts again and again.
    """
    cluster = question.cluster
    sizes = []
    per_host = cluster.per_node
    if cluster.nodes == 1:
        for size in HOST_SIZES:
            if size > cluster.per_node:
                sizes.append((1, size))
                per_host = size
    nodes = 2 * cluster.nodes
    while nodes <= MOST_HOSTS:
        sizes.append((nodes, per_host))
        nodes *= 2
    for nodes, per_node in sizes:
        host_memory = cluster.host_memory_bytes
        if host_memory is not None and cluster.host_memory_assumed:
            host_memory = host_memory // cluster.per_node * per_node
        larger = replace(
            cluster,
            nodes=nodes,
            per_node=per_node,
            host_memory_bytes=host_memory,
            is_this_machine=False,
        )
        devices = f"{nodes} × {per_node}" if nodes > 1 else f"{per_node}"
        yield Proposal(
            f"{devices} devices in place of {cluster.world_size}",
            replace(question, cluster=larger),
        )


def without_offload(question: Question) -> Change | None:
    """Return the fewest more devices on which something fits without offloading, and its best plan.

    None if no number of devices is enough.
    """
    for what, larger in _with_more_devices(question):
        on_devices = [strategy for strategy in search_space(larger) if not is_offloaded(strategy)]
        if fits(larger, on_devices):
            found = search(larger, on_devices, exclude_tight=True, first_only=True).ranked
            return Change(what, found[0]) if found else None
    return None


def adapter_questions(question: Question) -> dict[str, Question]:
    """Return the same question with a LoRA adapter and, on a GPU, with QLoRA, by mode.

    The adapter is the question's own, or else one over all linear layers. The result is empty if
    `with_lora` cannot count it. Both questions share one object of facts: caches compare equal facts
    weight by weight if they are different objects.
    """
    if not isinstance(question.config.adapter, LoRAConfig):
        adapted = _with_default_adapter(question)
        if adapted is None:
            return {}
        question = adapted
    questions = {"LoRA": question.with_values("adapter", quantize="none")}
    if question.cluster.device.kind == "cuda":
        questions["QLoRA"] = question.with_values("adapter", quantize="4bit")
    return questions


def _with_default_adapter(question: Question) -> Question | None:
    """Return the question with an adapter over all linear layers; None if it cannot be counted."""
    if question.config.head != "lm":
        return None
    adapter = LoRAConfig()
    facts = with_lora(question.facts, adapter)
    if facts is None:
        return None
    config = question.config.model_copy(update={"adapter": adapter})
    # Without its adapter the policy is its own reference, so there are fewer auxiliary models.
    names = config.algorithm.auxiliary_models(config).keys()
    sizes = {name: role for name, role in facts.roles.items() if name in names}
    roles = {name: role for name, role in question.roles.items() if name in names}
    return replace(question, config=config, facts=replace(facts, roles=sizes), roles=roles)


def with_row_length(question: Question, tokens: int) -> Question:
    """Return the question with rows of this many tokens, all of them full.

    A global batch in tokens is changed to the number of samples that it has with the present rows.
    """
    config = question.config
    old = config.data.max_length
    batch = config.batch
    if batch.global_tokens is not None:
        samples = max(1, batch.global_tokens // (old * config.algorithm.rows_per_sample))
        batch = batch.model_copy(update={"global_tokens": None, "global_samples": samples})
    data = config.data.model_copy(update={"max_length": tokens})
    changed = config.model_copy(update={"data": data, "batch": batch})
    facts = with_length(question.facts, old, tokens)
    return replace(question, config=changed, facts=facts, data=None)


def _with_micro_batch(question: Question, strategy: StrategyConfig, micro: int) -> Question:
    """Return the question with this micro-batch.

    A step accumulates as many micro-batches as the strategy has stages, or as the groups of the
    algorithm need.
    """
    accumulation = 1
    # The search raises the same PlanError and reports it.
    with suppress(PlanError):
        mesh = strategy.mesh(question.cluster.world_size)
        samples = micro * mesh.data_ranks
        stages = least_accumulation(mesh, strategy)
        accumulation = default_accumulation(question.config.algorithm, samples, stages)
    batch = BatchConfig(micro_batch=micro, accumulation=accumulation)
    return replace(question, config=question.config.model_copy(update={"batch": batch}), data=None)


def _find_by_family(
    question: Question, find_largest: Callable[[Sequence[StrategyConfig]], LargestFit | None]
) -> tuple[LargestFit, ...]:
    """Return the result of `find_largest` for each family that has one, the largest number first."""
    families = dict[str, list[StrategyConfig]]()
    for strategy in search_space(question):
        name = strategy.names(question.cluster.world_size).family
        families.setdefault(name, []).append(strategy)
    found = []
    for family in families.values():
        result = find_largest(family)
        if result is not None:
            found.append(result)
    return tuple(sorted(found, key=lambda each: (-each.number, each.candidate.complexity)))


def _find_largest_of_family(
    make: Callable[[int], Question],
    family: Sequence[StrategyConfig],
    first: int,
    last: int,
    step: int,
) -> LargestFit | None:
    """Return the largest number with which a family fits; None if it fits with none.

    The numbers are first, first + step, … up to last. `make`: returns the question with a number.
    """
    make = cache(make)
    best: StrategyConfig | None = None
    number = first - step
    for strategy in family:
        # Only larger numbers than the best so far count, so most strategies are searched once.
        larger_numbers = range(number + step, last + 1, step)
        largest = _find_largest_of_strategy(make, strategy, larger_numbers)
        if largest is not None:
            number = largest
            best = strategy
    if best is None:
        return None
    ranked = search(make(number), [best], exclude_tight=True).ranked
    if not ranked:
        return None
    return LargestFit(number, ranked[0])


def _find_largest_of_strategy(
    make: Callable[[int], Question], strategy: StrategyConfig, numbers: range
) -> int | None:
    """Return the largest number with which a strategy fits; None if it fits with none."""

    def is_good(number: int) -> bool:
        return fits(make(number), [strategy])

    return _find_largest(is_good, numbers)


def _find_largest(is_good: Callable[[int], bool], numbers: range) -> int | None:
    """Return the largest good number; None if none is good.

    All numbers that are smaller than a good one must be good.
    """
    if not numbers or not is_good(numbers[0]):
        return None
    good_ones = bisect_left(numbers, True, key=lambda number: not is_good(number))
    if good_ones == 0:
        return None
    return numbers[good_ones - 1]


class Fallbacks(NamedTuple):
    """Plans to go on with after a run ran out of memory.

    `fitting`: the plans that fit, the nearest to the run first.
    `leanest`: the plan that needs least memory. It may not fit.
    """

    fitting: list[Candidate]
    leanest: Candidate | None


class _Fallback(NamedTuple):
    """A plan with the number of its changes."""

    changes: int
    candidate: Candidate

    def order(self) -> tuple[int, float, int]:
        """Return what fallbacks are sorted by: few changes, few seconds, then much memory."""
        estimate = self.candidate.estimate
        return self.changes, estimate.seconds.total, -estimate.memory.peak


def find_fallbacks(
    question: Question, plan: Plan, limit: int, below: int, baseline: Config
) -> Fallbacks:
    """Return plans that take the same steps as `plan` with less memory, since it ran out of memory.

    `train.replan` calls it. A plan fits if it needs at most `limit` bytes of a device and peaks
    below `below`. Its name is its difference from `baseline`, the user's config.

    All keep the global batch, the ranks and the numbers up to rounding. They may have smaller
    micro-batches with more accumulation, activation checkpointing, chunks of the cross-entropy,
    states sharded over the ranks, and states on the host.
    """
    found: list[_Fallback] = []
    for changes, config in _variants(plan, question.facts.batch_norms > 0):
        try:
            candidate = evaluate(question, config, describe_config_difference(baseline, config))
        except PlanError:
            continue
        found.append(_Fallback(changes, candidate))
    fitting = []
    for fallback in found:
        estimate = fallback.candidate.estimate
        fits_device = estimate.memory.peak < below and estimate.memory.reserved <= limit
        if fits_device and estimate.host_fits:
            fitting.append(fallback)
    fitting.sort(key=_Fallback.order)
    leanest = _leanest(fallback.candidate for fallback in found)
    return Fallbacks([fallback.candidate for fallback in fitting], leanest)


def describe_config_difference(old: Config, new: Config) -> str:
    """Return the values of `new` that differ from `old`, as keys of the YAML.

    Such as `batch: {micro_batch: 1, accumulation: 8}`.
    """
    sections = []
    for section in ("strategy", "batch", "eval", "memory", "algorithm"):
        before = getattr(old, section).model_dump(mode="json")
        after = getattr(new, section).model_dump(mode="json")
        fields = type(getattr(new, section)).model_fields
        keys: dict[str, Any] = {}
        for key, value in after.items():
            if before.get(key) == value:
                continue
            # A key that only the new kind has is a difference if its value is not the default.
            is_known = key in before or key == "kind"
            if is_known or value != fields[key].get_default(
                call_default_factory=True, validated_data=after
            ):
                keys[key] = value
        if not keys:
            continue
        if section == "strategy" and "kind" in after:
            keys = {"kind": after["kind"], **keys}
        sections.append(f"{section}: {flow_style(keys)}")
    return ", ".join(sections)


class _Variant(NamedTuple):
    """A config with the number of its changes."""

    changes: int
    config: Config


def _variants(plan: Plan, keep_micro_batch: bool) -> Iterator[_Variant]:
    """Yield configs that take the same steps with less memory.

    `keep_micro_batch`: the results depend on the micro-batch (batch norm), so it must not change.
    """
    config = plan.config
    batch = plan.batch
    per_rank = batch.micro_batch * batch.accumulation
    micro_batches = [batch.micro_batch]
    if not keep_micro_batch:
        smaller = range(batch.micro_batch - 1, 0, -1)
        micro_batches += [micro for micro in smaller if per_rank % micro == 0]
    at_least_as_much = CHECKPOINTING[CHECKPOINTING.index(plan.activation_checkpointing) :]
    algorithms = _with_chunks(config.algorithm)
    has_copies = plan.mesh.data_ranks * plan.mesh.cp > 1
    strategies = [
        (0, config.strategy),
        *cost_of(config.strategy).fallbacks(has_copies, plan.device),
    ]
    choices = product(micro_batches, at_least_as_much, algorithms, strategies)
    for micro, checkpointing, algorithm, (strategy_changes, strategy) in choices:
        is_smaller = micro < batch.micro_batch
        recomputes_more = (
            checkpointing != plan.activation_checkpointing
            or config.memory.checkpointed_blocks is not None
        )
        is_chunked = algorithm is not config.algorithm
        changes = is_smaller + recomputes_more + is_chunked + strategy_changes
        if not changes:
            continue
        evaluation = config.eval
        if evaluation.micro_batch and is_smaller:
            smaller_eval = min(evaluation.micro_batch, micro)
            evaluation = evaluation.model_copy(update={"micro_batch": smaller_eval})
        update = {
            "batch": BatchConfig(
                global_samples=batch.global_samples,
                micro_batch=micro,
                accumulation=per_rank // micro,
            ),
            "memory": config.memory.model_copy(
                update={"activation_checkpointing": checkpointing, "checkpointed_blocks": None}
            ),
            "algorithm": algorithm,
            "strategy": strategy,
            "eval": evaluation,
        }
        yield _Variant(changes, config.model_copy(update=update))


def _with_chunks(algorithm: AlgorithmSpec) -> list[AlgorithmSpec]:
    """Return an algorithm, and the same with a chunked loss if it can have one and has none."""
    if not isinstance(algorithm, ChunkedSpec) or algorithm.loss_chunk:
        return [algorithm]
    if algorithm.rollout is not None:
        return [algorithm]
    usual = type(algorithm).model_fields["loss_chunk"].default
    return [algorithm, algorithm.model_copy(update={"loss_chunk": usual})]
