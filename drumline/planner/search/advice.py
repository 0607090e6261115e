"""Advice: the smallest change that would fit, the longest row, the largest micro-batch, other numbers of hosts; and fallbacks. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from drumline.core.algorithm import AlgorithmSpec, ChunkedSpec
from drumline.core.batch import default_rounds
from drumline.core.config import BatchConfig, Config, LoRAConfig
from drumline.core.explain import flow
from drumline.core.facts import with_length
from drumline.core.plan import Plan
from drumline.core.stages import in_flight
from drumline.core.strategy import StrategySpec
from drumline.errors import PlanError
from drumline.planner.cluster import with_nodes
from drumline.planner.derived import with_lora
from drumline.planner.search.answer import (
    GB,
    Answer,
    Candidate,
    Question,
    gb,
    is_offloaded,
    why_not,
)
from drumline.planner.search.search import CHECKPOINTING, evaluate, fits, search, search_space

STEP = 64  # tokens; rows that are advised are a multiple of it long
SHORT = 512  # tokens; no shorter row is advised
MOST_HOSTS = 1024
LONGEST = 1 << 20  # tokens, where the model has no end of its own
MOST_ROWS = 1 << 12
MLP_CHUNK = 8192  # tokens: wide enough for a GPU's products
MOST_CHANGES = 3  # that one line names
DISK = "/nvme"  # stands for a folder that is not named yet


@dataclass(frozen=True)
class Change:
    """A change after which a run fits. `what`: as keys of the YAML; `found`: the first plan after it."""

    what: str
    found: Candidate

    def line(self) -> str:
        estimate = self.found.estimate
        return f"{self.what} ({self.found.name}: {gb(estimate.memory.reserved)} of {gb(estimate.limit)})"


@dataclass(frozen=True)
class Most:
    """The longest row, or the largest micro-batch, that a family fits. `number`: tokens, or samples."""

    number: int
    found: Candidate


@dataclass(frozen=True)
class Adapted:
    """One of full, LoRA and QLoRA: its answer, and the longest row that fits; None for images, and where none does."""

    name: str
    answer: Answer
    longest: Most | None

    @property
    def best(self) -> Candidate | None:
        """The first that fits, else the one that needs least."""
        near = (refused.best for refused in self.answer.refused if refused.best)
        return (
            self.answer.ranked[0]
            if self.answer.ranked
            else min(near, key=lambda c: c.estimate.memory.reserved, default=None)
        )


def nothing_fits(answer: Answer) -> tuple[Change, ...]:
    """The smallest change of each kind after which something fits, in this order: checkpointing, micro-batch, a disk, adapters, a shorter
    row, more devices. Empty where none would help."""
    found = (
        (what, search(changed, with_room=True))
        for what, changed in _proposals(answer.question)
        if fits(changed)
    )
    return tuple(Change(what, made.ranked[0]) for what, made in found if made.ranked)


def refusal(answer: Answer, changes: Sequence[Change]) -> PlanError:
    """The error that nothing fits: one line with the nearest candidate, and the smallest changes (nothing_fits)."""
    near = [refused.best for refused in answer.refused if refused.best is not None]
    if not near:
        first = answer.refused[0]
        return PlanError(
            f"no strategy goes with this config: {first.name}: {first.reason}", where="strategy"
        )
    nearest = min(near, key=lambda candidate: candidate.estimate.memory.reserved)
    helps = "; or ".join(change.line() for change in changes[:MOST_CHANGES])
    fix = (
        f"it would with {helps}"
        if helps
        else "no change was found that would: take a smaller model, or larger devices"
    )
    return PlanError(
        f"nothing fits; nearest is {nearest.name}: {why_not(nearest.estimate)}",
        where="strategy",
        fix=fix,
    )


def max_length(question: Question) -> tuple[Most, ...]:
    """For each family the longest row that fits, in steps of 64 tokens; samples of a step stay as they are. The longest first. Raises
    PlanError for images alone."""
    if question.config.images_alone:
        raise PlanError(
            "rows of images have no length", where="--max-seq", fix="ask for --max-batch"
        )
    end = question.facts.max_positions or LONGEST
    return _by_family(
        question,
        lambda family: _most(partial(_of_length, question), family, _shortest(question), end, STEP),
    )


def _shortest(question: Question) -> int:
    """The first multiple of STEP that leaves room for a prompt before what is sampled."""
    return STEP * (question.config.algorithm.new_tokens // STEP + 1)


def by_adapter(answer: Answer, plain: Question) -> tuple[Adapted, ...]:
    """The same run with all weights trained, by LoRA and by QLoRA (on a GPU), as far as they can be counted. `plain`: the answer's question
    without its adapter. What real steps have shown of the answer counts for all."""
    plain = replace(plain, correction=answer.question.correction)
    adapter, made = (
        answer.question.config.adapter,
        {"full": plain, **under_adapters(answer.question)},
    )
    own = (
        "full"
        if not isinstance(adapter, LoRAConfig)
        else "LoRA"
        if adapter.quantize == "none"
        else "QLoRA"
    )
    each = ((name, answer if name == own else search(other)) for name, other in made.items())
    return tuple(
        Adapted(
            name, found, None if found.question.config.images_alone else _longest(found.question)
        )
        for name, found in each
    )


def beside_adapters(answer: Answer) -> tuple[Adapted, ...]:
    """The same as `by_adapter` of an answer that trains all weights, without the longest rows, which take seconds to find."""
    adapters = [
        (name, search(question)) for name, question in under_adapters(answer.question).items()
    ]
    return tuple(Adapted(name, found, None) for name, found in [("full", answer), *adapters])


def _longest(question: Question) -> Most | None:
    """The longest row that fits, by any strategy; first those that cut most, so that few others are looked at closely."""
    end = question.facts.max_positions or LONGEST
    cut = sorted(
        search_space(question),
        key=lambda strategy: -getattr(strategy, "cp", 1) * getattr(strategy, "tp", 1),
    )
    return _most(partial(_of_length, question), cut, _shortest(question), end, STEP)


def max_batch(question: Question) -> tuple[Most, ...]:
    """For each family the largest micro-batch of a device that fits; the global batch follows it. The largest first."""

    def largest(family: Sequence[StrategySpec]) -> Most | None:
        each = (
            _most(partial(_of_batch, question, strategy), [strategy], 1, MOST_ROWS, 1)
            for strategy in family
        )
        return max(
            filter(None, each),
            key=lambda most: (most.number, most.found.estimate.tokens_per_s),
            default=None,
        )

    return _by_family(question, largest)


def what_if(question: Question, nodes: Sequence[int]) -> tuple[Answer, ...]:
    """The answers on as many hosts of the cluster, in that order."""
    return tuple(
        search(replace(question, cluster=with_nodes(question.cluster, number))) for number in nodes
    )


def _proposals(question: Question) -> Iterator[tuple[str, Question]]:
    """(change as keys of the YAML, the question after it), in the order of `nothing_fits`."""
    config, cluster = question.config, question.cluster

    if (
        "activation_checkpointing" in config.memory.model_fields_set
        and config.memory.activation_checkpointing != "full"
    ):
        yield (
            "memory.activation_checkpointing=full",
            question.with_values("memory", activation_checkpointing="full"),
        )
    if not config.memory.activation_offload and cluster.device.kind == "cuda":
        least = {
            "activation_checkpointing": "full",
            "activation_offload": True,
            "mlp_chunk": MLP_CHUNK,
        }
        yield f"memory={flow(least)}", question.with_values("memory", **least)
    if config.batch.global_samples is not None and (
        over := config.batch.global_samples % cluster.world_size
    ):
        samples = config.batch.global_samples - over + cluster.world_size
        yield (
            f"batch.global_samples={samples}",
            question.with_values("batch", global_samples=samples),
        )
    if (config.batch.micro_batch or 1) > 1 or config.batch.accumulation is not None:
        yield "batch.micro_batch=1", question.with_values("batch", micro_batch=1, accumulation=None)
    chunk = type(config.algorithm).model_fields.get("loss_chunk")
    if chunk is not None and not getattr(config.algorithm, "loss_chunk", None):
        yield (
            f"algorithm.loss_chunk={chunk.default}",
            question.with_values("algorithm", loss_chunk=chunk.default),
        )
    if question.nvme is None and question.deepspeed:
        yield "strategy={kind: auto, nvme: FOLDER}", replace(question, nvme=DISK)
    if (host := _with_host_memory(question)) is not None:
        yield host
    if config.adapter.kind == "none" and config.head == "lm":
        whats = {"LoRA": "adapter=lora", "QLoRA": "adapter={kind: lora, quantize: 4bit}"}
        yield from ((whats[name], adapted) for name, adapted in under_adapters(question).items())
    start = max(SHORT, _shortest(question))
    end = 0 if config.images_alone else config.data.max_length - 1
    if (tokens := _largest(lambda n: fits(_of_length(question, n)), start, end, STEP)) is not None:
        shorter = _of_length(question, tokens)
        batch = (
            ""
            if shorter.config.batch == config.batch
            else f" batch={flow(shorter.config.batch.model_dump(exclude_defaults=True))}"
        )
        yield f"data.max_length={tokens}{batch}", shorter
    for what, larger in _larger(question):
        if fits(larger):
            yield what, larger
            return


def _with_host_memory(question: Question) -> tuple[str, Question] | None:
    """The change that says how much memory a host has, where that was assumed: the least with which something fits. None otherwise."""
    cluster = question.cluster
    if not cluster.host_memory_assumed:
        return None
    unlimited = replace(
        question, cluster=replace(cluster, host_memory_bytes=None, host_memory_assumed=False)
    )
    found = search(unlimited, with_room=True).ranked
    if not found:
        return None
    least = math.ceil(min(candidate.estimate.host.most for candidate in found) / GB)
    known = replace(cluster, host_memory_bytes=int(least * GB), host_memory_assumed=False)
    return f"cluster.host_memory_gb={least}", replace(question, cluster=known)


def _larger(question: Question) -> Iterator[tuple[str, Question]]:
    """(What changes, the question) on more devices, the fewest first: up to eight in the one host, then twice as many hosts again and
    again."""
    cluster = question.cluster
    sizes = [
        (1, number) for number in (2, 4, 8) if cluster.nodes == 1 and number > cluster.per_node
    ]
    full = sizes[-1][1] if sizes else cluster.per_node
    doubled = (cluster.nodes << times for times in range(1, MOST_HOSTS.bit_length()))
    for nodes, per_node in [*sizes, *((nodes, full) for nodes in doubled if nodes <= MOST_HOSTS)]:
        spread = f"{nodes} × {per_node}" if nodes > 1 else f"{per_node}"
        host = cluster.host_memory_bytes
        if host is not None and cluster.host_memory_assumed:
            host = host // cluster.per_node * per_node
        larger = replace(
            cluster, nodes=nodes, per_node=per_node, host_memory_bytes=host, found=False
        )
        yield (
            f"{spread} devices in place of {cluster.world_size}",
            replace(question, cluster=larger),
        )


def without_offload(question: Question) -> Change | None:
    """The fewest more devices on which something fits that keeps nothing in host memory, and the best plan there; None without any."""
    for what, larger in _larger(question):
        on_devices = [strategy for strategy in search_space(larger) if not is_offloaded(strategy)]
        if fits(larger, on_devices):
            found = search(larger, on_devices, with_room=True).ranked
            return Change(what, found[0]) if found else None
    return None


def under_adapters(question: Question) -> dict[str, Question]:
    """The question under LoRA and QLoRA (on a GPU), by the adapter that it has, else by one over all linear layers; empty where `with_lora`
    cannot count that. Both have the same object of facts: what is cached by facts would compare equal ones weight by weight."""
    adapter = question.config.adapter
    if not isinstance(adapter, LoRAConfig):
        adapter = LoRAConfig()
        facts = with_lora(question.facts, adapter) if question.config.head == "lm" else None
        if facts is None:
            return {}
        config = question.config.model_copy(update={"adapter": adapter})
        roles = config.algorithm.auxiliary_models(
            config
        ).keys()  # without the adapter the policy is its own reference
        facts = replace(
            facts, roles={name: sizes for name, sizes in facts.roles.items() if name in roles}
        )
        question = replace(
            question,
            facts=facts,
            roles={name: role for name, role in question.roles.items() if name in roles},
        )
    kinds = (
        {"LoRA": "none", "QLoRA": "4bit"}
        if question.cluster.device.kind == "cuda"
        else {"LoRA": "none"}
    )
    question = replace(question, config=question.config.model_copy(update={"adapter": adapter}))
    return {
        name: question.with_values("adapter", quantize=quantize) for name, quantize in kinds.items()
    }


def _of_length(question: Question, tokens: int) -> Question:
    """The question with rows of this many tokens. A global batch in tokens becomes one of as many samples; all rows count as full."""
    config, old = question.config, question.config.data.max_length
    batch = config.batch
    if batch.global_tokens is not None:
        samples = max(1, batch.global_tokens // (old * config.algorithm.rows_per_sample))
        batch = batch.model_copy(update={"global_tokens": None, "global_samples": samples})
    changed = config.model_copy(
        update={"data": config.data.model_copy(update={"max_length": tokens}), "batch": batch}
    )
    return replace(
        question, config=changed, facts=with_length(question.facts, old, tokens), data=None
    )


def _of_batch(question: Question, strategy: StrategySpec, micro: int) -> Question:
    """The question with this micro-batch, and with as many of them in a step as the strategy has stages, or the algorithm's groups need."""
    rounds = 1
    with suppress(PlanError):  # which the search reports
        mesh = strategy.mesh(question.cluster.world_size)
        rounds = default_rounds(
            question.config.algorithm, micro * mesh.data_ranks, in_flight(mesh, strategy)
        )
    batch = BatchConfig(micro_batch=micro, accumulation=rounds)
    return replace(question, config=question.config.model_copy(update={"batch": batch}), data=None)


def _by_family(
    question: Question, most: Callable[[Sequence[StrategySpec]], Most | None]
) -> tuple[Most, ...]:
    families = dict[str, list[StrategySpec]]()
    for strategy in search_space(question):
        families.setdefault(strategy.names(question.cluster.world_size).family, []).append(strategy)
    found: Iterable[Most] = filter(None, map(most, families.values()))
    return tuple(sorted(found, key=lambda each: (-each.number, each.found.simple)))


def _most(
    make: Callable[[int], Question],
    family: Sequence[StrategySpec],
    first: int,
    last: int,
    step: int,
) -> Most | None:
    """The largest number with which a family fits; None where no number does. A strategy that does not fit more than those before it is
    asked once."""
    make, best, number = cache(make), tuple[StrategySpec, ...](), first - step
    for strategy in family:
        more = _largest(lambda n, one=strategy: fits(make(n), [one]), number + step, last, step)  # type: ignore[misc]
        number, best = (number, best) if more is None else (more, (strategy,))
    found = search(make(number), best, with_room=True).ranked if best else ()
    return Most(number, found[0]) if found else None


def _largest(good: Callable[[int], bool], first: int, last: int, step: int) -> int | None:
    """The largest of first, first + step, … up to last that is good, where what is smaller than a good one is good; None without one."""
    numbers = range(first, last + 1, step)
    if not numbers or not good(first):
        return None
    good_ones = bisect_left(numbers, True, key=lambda number: not good(number))
    return numbers[good_ones - 1] if good_ones else None


def find_fallbacks(
    question: Question, plan: Plan, limit: int, below: int, baseline: Config
) -> tuple[list[Candidate], Candidate | None]:
    """Plans that take the same steps with less memory, for a run that ran out of it: (those that fit into `limit` bytes of a device and
    peak below `below`, the nearest to `plan` first; the leanest of all, which may not fit). Near: few changes, then few seconds. The name
    of each is its difference from `baseline`, the user's config.

    All keep the global batch, the ranks and the numbers (up to rounding): smaller micro-batches with more accumulation, activation
    checkpointing, chunks of the cross-entropy, states sharded over the ranks there are, states kept on the host."""
    found: list[tuple[int, Candidate]] = []
    for changes, config in _variants(plan, question.facts.batch_norms > 0):
        try:
            candidate = evaluate(question, config, changed(baseline, config))
        except PlanError:
            continue
        found.append((changes, candidate))
    leanest = min((c for _, c in found), key=lambda c: c.estimate.memory.reserved, default=None)
    fitting = [
        (n, c)
        for n, c in found
        if c.estimate.memory.peak < below
        and c.estimate.memory.reserved <= limit
        and c.estimate.host_fits
    ]
    fitting.sort(key=lambda f: (f[0], f[1].estimate.seconds.total, -f[1].estimate.memory.peak))
    return [candidate for _, candidate in fitting], leanest


def changed(old: Config, new: Config) -> str:
    """The difference, as keys of the YAML: `batch: {micro_batch: 1, accumulation: 8}, memory: {activation_checkpointing: full}`."""
    sections = []
    for section in ("strategy", "batch", "eval", "memory", "algorithm"):
        before, after = (
            getattr(old, section).model_dump(mode="json"),
            getattr(new, section).model_dump(mode="json"),
        )
        usual = getattr(new, section).__class__.model_fields
        keys = {
            k: v
            for k, v in after.items()
            if before.get(k) != v
            and (
                k in before
                or k == "kind"
                or v != usual[k].get_default(call_default_factory=True, validated_data=after)
            )
        }
        if keys:
            kind = {"kind": after["kind"]} if "kind" in after and section == "strategy" else {}
            sections.append(f"{section}: {flow({**kind, **keys})}")
    return ", ".join(sections)


def _variants(plan: Plan, by_micro_batch: bool) -> Iterator[tuple[int, Config]]:
    """(number of changes, config). `by_micro_batch`: the results depend on the micro-batch (batch norm), so it stays."""
    config, batch = plan.config, plan.batch
    per_rank = batch.micro_batch * batch.accumulation
    micros = [
        m
        for m in range(batch.micro_batch, 0, -1)
        if per_rank % m == 0 and (m == batch.micro_batch or not by_micro_batch)
    ]
    heavier = CHECKPOINTING[CHECKPOINTING.index(plan.activation_checkpointing) :]
    algorithm = config.algorithm
    chunks: list[AlgorithmSpec] = [algorithm]
    if (
        isinstance(algorithm, ChunkedSpec)
        and not algorithm.loss_chunk
        and algorithm.rollout is None
    ):
        usual = type(algorithm).model_fields["loss_chunk"].default
        chunks.append(algorithm.model_copy(update={"loss_chunk": usual}))
    spreads = [
        (0, config.strategy),
        *config.strategy.fallbacks(plan.mesh.data_ranks * plan.mesh.cp > 1, plan.device),
    ]
    for micro, kept, loss, (cost, strategy) in product(micros, heavier, chunks, spreads):
        fewer = micro < batch.micro_batch
        heavier_kind = (
            kept != plan.activation_checkpointing or config.memory.checkpointed_blocks is not None
        )
        changes = fewer + heavier_kind + (loss is not algorithm) + cost
        if not changes:
            continue
        smaller = BatchConfig(
            global_samples=batch.global_samples, micro_batch=micro, accumulation=per_rank // micro
        )
        held_out = config.eval.micro_batch
        update = {
            "batch": smaller,
            "memory": config.memory.model_copy(
                update={"activation_checkpointing": kept, "checkpointed_blocks": None}
            ),
            "algorithm": loss,
            "strategy": strategy,
            "eval": config.eval.model_copy(update={"micro_batch": min(held_out, micro)})
            if held_out and fewer
            else config.eval,
        }
        yield changes, config.model_copy(update=update)
