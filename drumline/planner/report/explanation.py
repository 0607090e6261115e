"""The report of `drumline plan --explain`: each number of a candidate's estimate, and its parts.

The report has sections, such as memory and seconds. A section has lines of three columns: what is
counted, its amount, and where the amount comes from.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from drumline.config.registry import nearest
from drumline.errors import UserError
from drumline.plan.attention import choose_by_facts
from drumline.plan.explain import count, describe_recomputation
from drumline.planner.cost.terms import FP32_BYTES, LOW_BYTES, entry_bytes, low_moment_bytes
from drumline.planner.report.output import needs_gb
from drumline.planner.report.table import CATEGORIES, SECONDS, UNKNOWN, gradients_at_peak
from drumline.planner.search.answer import GB, Answer, Candidate, Question, number, show_range
from drumline.planner.search.gains import gains
from drumline.planner.search.rival import LEAST_SENT
from drumline.planner.search.stream import describe_stream
from drumline.system.output import plural

# The fewest GB of gradients of which the text says that they are not there at the peak: half of the
# last digit that it prints.
LEAST_SHOWN_GB = 0.005
# Bytes are explained as parameters / ranks if they come within this share of such a fraction. They
# are not exactly one if parts of weights are padded.
PADDING_SHARE = 0.02
PETA = 1e15
TERA = 1e12
# A text is not wrapped to fewer characters.
NARROWEST = 20
# The most names of candidates that an error lists.
MOST_NAMES = 8
# Phases of a step (cost.memory) in plain words.
PHASES = {
    "teacher": "the teacher's weights, before the first step",
    "first_pass": "the embeddings of the global batch, compared with each other",
    "forward": "forward in the model's last block",
    "loss": "the loss, from the head's logits",
    "head": "backward through the head",
    "blocks": "backward of the model's last block, or of the one before it",
    "end": "backward's end: all gradients are there",
    "clip": "the norm of all gradients",
    "step": "the optimizer's update",
    "average": "gradients averaged behind backward, where neither DDP nor FSDP2 does it",
    "rollout": "sampling from the policy",
}
# Phases of a run (the fields of HostMemory) in plain words.
HOST_PHASES = {
    "load": "while weights are read",
    "train": "while it trains",
    "save": "while it writes a checkpoint",
    "export": "while the whole model is exported at the end",
}


class Line(NamedTuple):
    """A line of a section: a part of the estimate, its amount as text, and where it comes from."""

    what: str
    amount: str
    source: str


class Picked(NamedTuple):
    """A candidate to explain.

    `refused`: why it was refused; None if it was not.
    """

    candidate: Candidate
    refused: str | None


def pick(answer: Answer, name: str) -> Picked:
    """Return the candidate with this name or row number.

    Raises UserError if there is no such name, and for a family that a rule refuses: no candidate of
    it was estimated.
    """
    if name.isdecimal():
        row = int(name)
        if 1 <= row <= len(answer.ranked):
            return Picked(answer.ranked[row - 1], None)
    for candidate in answer.ranked:
        if candidate.name == name:
            return Picked(candidate, None)
    for refused in answer.refused:
        best = refused.best
        if best is not None and name in (refused.name, best.name):
            return Picked(best, refused.reason)
        if best is None and name == refused.name:
            raise UserError(
                f"{refused.name} is out: {refused.reason}",
                where="--explain",
                fix="there are no numbers of what a rule refuses",
            )
    fix = _propose_candidate(answer, name)
    raise UserError(f"no candidate {name!r}", where="--explain", fix=fix)


def _propose_candidate(answer: Answer, name: str) -> str:
    """Return the advice for a name that no candidate has."""
    names = [candidate.name for candidate in answer.ranked]
    names += [refused.name for refused in answer.refused]
    guess = nearest(name, names)
    if guess:
        return f"did you mean {guess!r}?"
    if names:
        return f"there are {', '.join(names[:MOST_NAMES])} and more"
    return "nothing was found"


def explain(
    answer: Answer, name: str, tokens: float | None = None, width: int | None = None
) -> str:
    """Return the explanation of the candidate with this name or row number.

    `tokens`: of the whole run; None: those of its steps. `width`: the characters of a line, to which
    the text is wrapped; None: it is not. Raises UserError as `pick` does.
    """
    candidate, refused = pick(answer, name)
    question = answer.question
    memory = candidate.estimate.memory
    memory_title = f"Memory of the fullest device, GB, at its peak in {memory.phase}"
    sections = {
        "What runs": _explain_run_settings(question, candidate),
        "What it has besides a plain run": _explain_gains(question, candidate),
        memory_title: _explain_memory(question, candidate),
        "The same, phase by phase, GB": _explain_phases(candidate),
        _host_title(candidate): _explain_host(candidate),
        "Seconds of a step": _explain_seconds(question, candidate),
        "GB that a device sends in a step": _explain_traffic(question, candidate),
        "The run": _explain_run(question, candidate, tokens),
    }
    text = [_wrap(_describe_verdict(candidate, refused), width)]
    for title, lines in sections.items():
        # One device sends nothing, so its traffic has no lines.
        if lines:
            text += ["", title]
            text += _align(lines, width)
    return "\n".join(text)


def _wrap(text: str, width: int | None, indent: int = 0) -> str:
    """Return a text on lines of so many characters, the second and later ones indented."""
    if width is None or width <= indent + NARROWEST:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _describe_verdict(candidate: Candidate, refused: str | None) -> str:
    """Return the first line: the verdict on a candidate, and what the verdict means.

    `refused`: why the candidate is refused; None if it is not.
    """
    estimate = candidate.estimate
    verdict = f"{candidate.name}: {estimate.verdict}"
    if refused:
        verdict += f", refused: {refused}"
    # More than 1 if the candidate does not fit.
    share = estimate.memory.reserved / estimate.limit
    meaning = (
        "it fits if even the upper end of the range is below the limit, and is tight if only the"
        " estimate is"
    )
    if estimate.verdict == "tight":
        meaning += f"; the chance that it runs out of memory is {estimate.risk:.0%}"
    needs = f"needs {needs_gb(estimate)} of {estimate.limit / GB:.1f} GB"
    return f"{verdict}; {needs}, {share:.0%}: {meaning}"


def _align(lines: list[Line], width: int | None) -> list[str]:
    """Return lines as text, in three columns of which the second is aligned at the right.

    `width`: the characters of a line, to which the third column is wrapped; None: it is not.
    """
    what_width = max(len(line.what) for line in lines)
    amount_width = max(len(line.amount) for line in lines)
    aligned = []
    for line in lines:
        start = f"  {line.what.ljust(what_width)}"
        if amount_width:
            start += f"  {line.amount.rjust(amount_width)}"
        indent = len(start) + 2
        # The columns before are not text to wrap.
        wrapped = _wrap(" " * indent + line.source, width, indent)
        aligned.append(f"{start}  {wrapped[indent:]}".rstrip())
    return aligned


def _explain_run_settings(question: Question, candidate: Candidate) -> list[Line]:
    """Return what runs: the mesh, the engine, the batch, and what is recomputed and compiled."""
    layout = candidate.layout
    mesh = layout.mesh
    dimensions = []
    for name, size in mesh.model_dump().items():
        if size > 1:
            dimensions.append(f"{name} {size}")
    ranks = plural(mesh.world_size, "rank")
    if dimensions:
        ranks = f"{' × '.join(dimensions)} = {ranks}"
    rows = f"rows are {layout.tokens_per_row:,.0f} tokens on average, {layout.max_length:,} at most"
    compiled = "nothing"
    if layout.config.compile.enabled:
        compiled = "each block"
    settings = {
        "mesh": ranks,
        "engine": f"{layout.engine}, {layout.precision} on {layout.device}",
        "batch": layout.batch.describe_product(mesh.data_ranks),
        "tokens": f"{layout.tokens_per_step:,.0f} a step: {rows}",
        "checkpointing": describe_recomputation(layout),
        "compile": compiled,
    }
    if not layout.config.images_alone:
        settings["attention"] = choose_by_facts(layout, question.facts).line
    if mesh.tp > 1:
        stream = describe_stream(layout, question.facts, question.cluster)
        settings["sequence parallel"] = stream
    pipeline = layout.pipeline
    if pipeline is not None:
        # A stage has the blocks from `start` up to `end`, without `end`.
        blocks = ", ".join(f"{start}–{end - 1}" for start, end in pipeline.layers)
        settings["stages"] = f"{pipeline.schedule}; blocks {blocks}"
    return [Line(what, "", text) for what, text in settings.items()]


def _explain_gains(question: Question, candidate: Candidate) -> list[Line]:
    """Return a line for each choice that a plain run lacks: what it gains by itself."""
    lines = []
    for gain in gains(question, candidate):
        if gain.candidate is None:
            lines.append(Line(gain.choice, "", f"{gain.plain} is refused: {gain.reason}"))
            continue
        faster = candidate.run_tokens_per_s / gain.candidate.run_tokens_per_s
        more = candidate.estimate.memory.reserved - gain.candidate.estimate.memory.reserved
        text = f"{number(faster)} × as fast as {gain.plain}, {number(abs(more) / GB)} GB"
        text += " more" if more >= 0 else " less"
        if gain.candidate.estimate.verdict == "no":
            text += "; without it the run does not fit"
        lines.append(Line(gain.choice, "", text))
    return lines


def _explain_memory(question: Question, candidate: Candidate) -> list[Line]:
    """Return the memory of the fullest device at its peak, by category."""
    memory = candidate.estimate.memory
    facts = question.facts
    lines = []
    sources = _state_sources(question, candidate) | _activation_sources(question, candidate)
    for category in CATEGORIES:
        bytes_ = getattr(memory, category)
        lines.append(Line(category, _gb(bytes_), sources[category]))
    if facts.roles:
        roles = [f"{name} {count(role.parameters)}" for name, role in facts.roles.items()]
        lines.append(Line("roles", "", f"counted in: {', '.join(roles)}"))
    lines.append(Line("peak", _gb(memory.peak), "of tensors"))
    allocated = memory.reserved - memory.overhead
    source = "as torch counts it"
    if allocated > memory.peak:
        unusable = _gb(allocated - memory.peak)
        source = f"{unusable} for what the allocator cannot use again, + overhead"
    lines.append(Line("needs", _gb(memory.reserved), source))
    return lines


def _gb(bytes_: float) -> str:
    """Return bytes as GB with two digits."""
    return f"{bytes_ / GB:.2f}"


def _state_sources(question: Question, candidate: Candidate) -> dict[str, str]:
    """Return the third column for parameters, gradients and optimizer states, by category."""
    memory = candidate.estimate.memory
    facts = question.facts
    layout = candidate.layout
    world_size = layout.mesh.world_size
    # Bytes of an entry of a weight, of its gradient, and of all its optimizer states.
    weight_bytes = entry_bytes(layout)
    gradient_bytes = weight_bytes
    moment_bytes = FP32_BYTES * layout.config.optimizer.states_per_parameter
    if layout.engine == "deepspeed" and layout.precision != "fp32":
        # DeepSpeed computes in 16 bits, and keeps an fp32 copy of each weight.
        weight_bytes = LOW_BYTES
        moment_bytes += FP32_BYTES
    # Pure bf16 keeps moments in bf16, and no fp32 copy.
    moment_bytes = low_moment_bytes(layout) or moment_bytes

    parameters = facts.parameters + sum(role.parameters for role in facts.roles.values())
    trainable = facts.trainable
    weights = _describe_share(memory.parameters, parameters, weight_bytes, "parameters", world_size)
    gradients = _describe_share(
        memory.gradients, trainable, gradient_bytes, "trainable", world_size
    )
    at_peak = gradients_at_peak(memory)
    if memory.gradients - at_peak >= LEAST_SHOWN_GB * GB:
        gradients += f"; {_gb(at_peak)} of them are there at the peak"
    moments = _describe_share(memory.optimizer, trainable, moment_bytes, "trainable", world_size)
    return {"parameters": weights, "gradients": gradients, "optimizer": moments}


def _activation_sources(question: Question, candidate: Candidate) -> dict[str, str]:
    """Return the third column for activations, logits, buffers and overhead, by category.

    Activations are given as bytes for each entry of the hidden states, to compare them with
    published counts such as 34 (Korthikanti et al. 2022).
    """
    memory = candidate.estimate.memory
    facts = question.facts
    layout = candidate.layout
    tokens = layout.rows * layout.max_length
    rows = f"{plural(layout.rows, 'row')} × {layout.max_length:,} tokens"
    # A model of images has no hidden width.
    entries = max(1, tokens * facts.layers * facts.hidden)
    bytes_an_entry = memory.activations / entries
    size = f"{facts.layers} layers × width {facts.hidden:,} × {bytes_an_entry:.1f} bytes"
    if memory.logits:
        logits = f"{tokens:,} tokens × {facts.vocab_size:,} words"
    else:
        # The peak is in a phase without logits.
        chunk = getattr(layout.config.algorithm, "loss_chunk", None)
        logits = f"made {chunk} tokens at a time, never kept"
    return {
        "activations": f"{rows} × {size}",
        "logits": logits,
        "buffers": "gathered weights, buckets, copies of a step",
        "overhead": "what torch does not own: context, kernels, communicators",
    }


def _describe_share(
    bytes_: int, parameters: int, parameter_bytes: int, kind: str, world_size: int
) -> str:
    """Return how the bytes on a device follow from the parameters: `4 bytes × 8.0B parameters / 8 ranks`.

    If no number of ranks explains them, return the mean bytes of a parameter.

    `parameter_bytes`: of one parameter, before it is cut. `kind`: what the parameters are called.
    """
    if not bytes_ or not parameters:
        return "none on the device"
    named = f"{count(parameters)} {kind}"
    # The number of ranks that would have to share the parameters. It is whole if they do.
    quotient = parameter_bytes * parameters / bytes_
    ranks = round(quotient)
    is_at_least_one = quotient > 1 - PADDING_SHARE
    is_whole = is_at_least_one and abs(quotient - ranks) < PADDING_SHARE * quotient
    if not is_whole or world_size % ranks != 0:
        return f"{bytes_ / parameters:.2f} bytes for each of {named}"
    text = f"{parameter_bytes} bytes × {named}"
    if ranks > 1:
        text += f" / {ranks} ranks"
    return text


def _explain_phases(candidate: Candidate) -> list[Line]:
    """Return the peak of each phase of a step, the largest one marked."""
    memory = candidate.estimate.memory
    config = candidate.layout.config
    does_sample = config.algorithm.rollout is not None or config.eval.generates
    lines = []
    for phase, bytes_ in memory.phases.items():
        if phase == "rollout" and not does_sample:
            continue
        source = PHASES.get(phase, "")
        if bytes_ == memory.peak:
            source += " ← the peak"
        lines.append(Line(phase, _gb(bytes_), source))
    return lines


def _host_title(candidate: Candidate) -> str:
    """Return the title of the memory of a host, with what a host has."""
    estimate = candidate.estimate
    title = "Memory of a host, GB"
    if estimate.host_limit is not None:
        title += f", of {estimate.host_limit / GB:,.0f}"
    if estimate.host_assumed:
        title += " (assumed)"
    return title


def _explain_host(candidate: Candidate) -> list[Line]:
    """Return the memory of a host in each phase of the run."""
    estimate = candidate.estimate
    lines = []
    for part, text in HOST_PHASES.items():
        bytes_ = getattr(estimate.host, part)
        lines.append(Line(part, f"{bytes_ / GB:.1f}", text))
    return lines


def _explain_seconds(question: Question, candidate: Candidate) -> list[Line]:
    """Return the seconds of a step by what they are spent on, and the speed."""
    estimate = candidate.estimate
    seconds = estimate.seconds
    sources = {
        "compute": _describe_compute(question, candidate),
        "communication": "exposed: nothing is computed meanwhile",
        "bubble": "devices of the pipeline that wait",
        "optimizer": "clipping and the update",
        "offload": "copies to the host and back, and the update there",
        "rollout": "completions and rewards",
    }
    if candidate.layout.config.algorithm.rollout is None:
        del sources["rollout"]
    lines = []
    for part in SECONDS:
        if part in sources:
            amount = number(getattr(seconds, part))
            lines.append(Line(part, amount, sources[part]))
    if estimate.startup:
        amount = number(estimate.startup)
        lines.append(Line("compiling", amount, "once, before the first step"))
    # Speed is highest if a step takes the fewest seconds.
    fastest, slowest = estimate.seconds_range
    speed_range = (1 / slowest, 1 / fastest)
    speed = show_range(estimate.tokens_per_s, speed_range, _whole_number)
    total = show_range(seconds.total, estimate.seconds_range)
    lines.append(Line("step", total, f"{speed} tokens/s of all devices"))
    return lines


def _whole_number(value: float) -> str:
    """Return a number without decimal places, with commas between thousands."""
    return f"{value:,.0f}"


def _describe_compute(question: Question, candidate: Candidate) -> str:
    """Return the FLOPs of a step, and the rate at which each device computes them."""
    cluster = question.cluster
    flops = candidate.layout.tokens_per_step * question.facts.flops_per_token
    devices = candidate.devices
    rate = flops / devices / candidate.estimate.seconds.compute
    text = f"{flops / PETA:.3g} PFLOP on {devices} devices: {rate / TERA:.3g} TFLOP/s each"
    peak = cluster.device.flops.get(candidate.layout.precision)
    if peak:
        text += f", {rate / peak:.0%} of the datasheet"
        if cluster.calibration.matmul:
            text += " (rate measured here)"
    return text


def _explain_traffic(question: Question, candidate: Candidate) -> list[Line]:
    """Return the GB that a device sends in a step, by kind of collective."""
    traffic = candidate.estimate.traffic
    cluster = question.cluster
    volumes: Mapping[str, float] = traffic.model_dump()
    lines = []
    for kind, bytes_ in volumes.items():
        if bytes_ > LEAST_SENT * traffic.total:
            name = kind.replace("_", "-")
            lines.append(Line(name, f"{bytes_ / GB:.3g}", ""))
    if lines:
        links = cluster.intra.name
        if cluster.nodes > 1:
            links += f", {cluster.inter.name} between hosts"
        total = f"{traffic.total / GB:.3g}"
        lines.append(Line("in all", total, f"over {links}"))
    return lines


def _explain_run(question: Question, candidate: Candidate, tokens: float | None) -> list[Line]:
    """Return the MFU, and the hours and the cost of the run if its length is known.

    `tokens`: of the whole run; None: those of its steps.
    """
    estimate = candidate.estimate
    mfu = UNKNOWN
    if estimate.mfu is not None:
        mfu = f"{estimate.mfu:.1%}"
    about_mfu = "model FLOP/s of the datasheet's; computing again for checkpointing does not count"
    lines = [Line("MFU", mfu, about_mfu)]
    hours = candidate.hours(tokens)
    if hours is not None:
        length = f"{candidate.layout.steps:,} steps"
        if tokens:
            length = f"{count(tokens)} tokens"
        amount = show_range(hours, estimate.seconds_range)
        lines.append(Line("hours", amount, length))
    price = question.cluster.price_per_device_hour
    cost = candidate.cost(price, tokens)
    if cost is not None:
        paid = f"{candidate.devices} devices at {price:g} an hour"
        amount = show_range(cost, estimate.seconds_range)
        lines.append(Line("cost", amount, paid))
    return lines
