"""The explanation of one candidate: each number of its estimate, and what makes it up."""

from __future__ import annotations

from drumline.core.attention import choice_of
from drumline.core.cost import entry_bytes, low_moments
from drumline.core.explain import checkpointing, count
from drumline.core.plan import Layout
from drumline.core.registry import nearest
from drumline.errors import UserError
from drumline.planner.report.output import needs_gb
from drumline.planner.report.table import CATEGORIES, SECONDS, gradients_at_peak
from drumline.planner.search.answer import GB, Answer, Candidate, Question, number, ranged
from drumline.planner.search.stream import describe_stream

Line = tuple[str, str, str]  # what, how much, where it comes from
MASTER = (
    4  # bytes of the fp32 copy that DeepSpeed keeps of each weight where it computes in 16 bits
)
PHASES = {
    "forward": "through the blocks, the last one running",
    "loss": "the loss, from the head's logits",
    "head": "backward through the head",
    "blocks": "backward through the blocks, the last one running",
    "end": "backward's end: all gradients are there",
    "clip": "the norm of all gradients",
    "step": "the optimizer's update",
    "average": "gradients averaged behind backward, where neither DDP nor FSDP2 does it",
    "rollout": "sampling from the policy",
}
HOST = {
    "load": "while weights are read",
    "train": "while it trains",
    "save": "while it writes a checkpoint",
    "export": "while the whole model is exported at the end",
}


def pick(answer: Answer, name: str) -> tuple[Candidate, str | None]:
    """The candidate of a name or of a row's number, and why it was refused. Raises UserError for an unknown one, and for a family without
    an estimate."""
    if name.isdecimal() and 1 <= int(name) <= len(answer.ranked):
        return answer.ranked[int(name) - 1], None
    for candidate in answer.ranked:
        if candidate.name == name:
            return candidate, None
    for refused in answer.refused:
        if name in (refused.name, refused.best.name if refused.best else None):
            if refused.best is None:
                fix = "there are no numbers of what a rule refuses"
                raise UserError(
                    f"{refused.name} is out: {refused.reason}", where="--explain", fix=fix
                )
            return refused.best, refused.reason
    names = [*(c.name for c in answer.ranked), *(r.name for r in answer.refused)]
    guess = nearest(name, names)
    fix = (
        f"did you mean {guess!r}?"
        if guess
        else f"there are {', '.join(names[:8])} and more"
        if names
        else "nothing was found"
    )
    raise UserError(f"no candidate {name!r}", where="--explain", fix=fix)


def explain(answer: Answer, name: str, tokens: float | None = None) -> str:
    """The explanation of a candidate. Raises UserError as `pick` does."""
    found, refused = pick(answer, name)
    question, estimate = answer.question, found.estimate
    share = estimate.memory.reserved / estimate.limit
    verdict = f"{found.name}: {estimate.verdict}" + (f", refused: {refused}" if refused else "")
    scale = "it fits where the upper end does, and is tight where that does not"
    if estimate.verdict == "tight":
        scale += f"; the chance that it runs out of memory is {estimate.risk:.0%}"
    limit, traffic, cluster = estimate.host_limit, estimate.traffic, question.cluster
    of = "" if limit is None else f"of {limit / GB:.0f}"
    if estimate.host_assumed:
        of += ", which is assumed"
    volumes = [
        (kind.replace("_", "-"), f"{bytes_ / GB:.3g}", "")
        for kind, bytes_ in traffic.model_dump().items()
        if bytes_
    ]
    if volumes:
        across = f", {cluster.inter.name} between hosts" if cluster.nodes > 1 else ""
        volumes.append(
            ("in all", f"{traffic.total / GB:.3g}", f"over {cluster.intra.name}{across}")
        )
    phases = [
        (
            phase,
            f"{bytes_ / GB:.2f}",
            PHASES.get(phase, "") + (" ← the peak" if bytes_ == estimate.memory.peak else ""),
        )
        for phase, bytes_ in estimate.memory.phases.items()
        if phase != "rollout"
        or found.layout.config.algorithm.rollout is not None
        or found.layout.config.eval.generates
    ]
    parts = [
        ("What runs", _runs(found, question)),
        (
            f"Memory of the fullest device, GB, at its peak in {estimate.memory.phase}",
            _memory(question, found),
        ),
        ("The same, phase by phase, GB", phases),
        (
            "Memory of a host, GB",
            [
                (part, f"{getattr(estimate.host, part) / GB:.1f}", f"{text} {of}")
                for part, text in HOST.items()
            ],
        ),
        ("Seconds of a step", _seconds(question, found)),
        ("GB that a device sends in a step", volumes),
        ("The run", _run(question, found, tokens)),
    ]
    lines = [
        f"{verdict}; needs {needs_gb(estimate)} of {estimate.limit / GB:.1f} GB, {share:.0%}: {scale}"
    ]
    for title, rows in parts:
        if rows:
            left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
            lines += [
                "",
                title,
                *(
                    f"  {what:<{left}}  {amount:>{right}}  {source}".rstrip()
                    for what, amount, source in rows
                ),
            ]
    return "\n".join(lines)


def _runs(found: Candidate, question: Question) -> list[Line]:
    layout, mesh, facts = found.layout, found.layout.mesh, question.facts
    ranks = " × ".join(f"{name} {size}" for name, size in mesh.model_dump().items())
    tokens = f"{layout.tokens_per_step:,.0f} a step: rows are {layout.tokens_per_row:,.0f} tokens on average, {layout.length:,} at most"
    rows = [
        ("mesh", f"{ranks} = {mesh.world_size} ranks"),
        ("engine", f"{layout.engine}, {layout.precision} on {layout.device}"),
        ("batch", layout.batch.rule(mesh.data_ranks)),
        ("tokens", tokens),
        ("checkpointing", checkpointing(layout)),
        ("compile", "each block" if layout.config.compile.enabled else "nothing"),
        *([] if layout.config.images_alone else [("attention", choice_of(layout, facts).line)]),
    ]
    if mesh.tp > 1:
        stream = describe_stream(layout, facts, question.cluster)
        rows.append(("sequence parallel", stream))
    if layout.pipeline is not None:
        blocks = ", ".join(f"{a}–{b - 1}" for a, b in layout.pipeline.layers)
        rows.append(("stages", f"{layout.pipeline.schedule}; blocks {blocks}"))
    return [(what, "", text) for what, text in rows]


def _memory(question: Question, found: Candidate) -> list[Line]:
    memory, facts, layout = found.estimate.memory, question.facts, found.layout
    copy = MASTER if layout.engine == "deepspeed" and layout.precision != "fp32" else 0
    moments, each_of = (
        low_moments(layout) or 4 * layout.config.optimizer.slots + copy,
        entry_bytes(layout),
    )
    tokens = layout.rows * layout.length
    rows = f"{layout.rows} row{'s' * (layout.rows != 1)} × {layout.length:,} tokens"
    each = memory.activations / max(1, tokens * facts.layers * facts.hidden)
    of_all = facts.parameters + sum(f.parameters for f in facts.roles.values())
    there = gradients_at_peak(memory)
    yet = (
        f"; {there / GB:.2f} of them are there at the peak"
        if memory.gradients - there >= 0.005 * GB
        else ""
    )
    chunk = getattr(layout.config.algorithm, "loss_chunk", None)
    sources = {
        "parameters": _shared(
            memory.parameters, of_all, 2 if copy else each_of, "parameters", layout
        ),
        "gradients": _shared(memory.gradients, facts.trainable, each_of, "trainable", layout) + yet,
        "optimizer": _shared(memory.optimizer, facts.trainable, moments, "trainable", layout),
        "activations": f"{rows} × {facts.layers} layers × width {facts.hidden:,} × {each:.1f} bytes",
        "logits": f"{tokens:,} tokens × {facts.vocab_size:,} words"
        if memory.logits
        else f"made {chunk} tokens at a time, never kept",
        "buffers": "gathered weights, buckets, copies of a step",
        "overhead": "what torch does not own: context, kernels, communicators",
    }
    made = [(part, f"{getattr(memory, part) / GB:.2f}", sources[part]) for part in CATEGORIES]
    allocated = memory.reserved - memory.overhead
    factor = "as torch counts it"
    if allocated > memory.peak:
        factor = f"{(allocated - memory.peak) / GB:.2f} for what the allocator cannot use again, + overhead"
    if facts.roles:
        made.append(
            (
                "roles",
                "",
                "counted in: "
                + ", ".join(f"{name} {count(f.parameters)}" for name, f in facts.roles.items()),
            )
        )
    return [
        *made,
        ("peak", f"{memory.peak / GB:.2f}", "of tensors"),
        ("needs", f"{memory.reserved / GB:.2f}", factor),
    ]


def _shared(bytes_: int, number_: int, unit: int, of: str, layout: Layout) -> str:
    """Bytes as `unit` × parameters / ranks where that is exact, else as bytes for each parameter."""
    if not bytes_ or not number_:
        return "none on the device"
    parts = unit * number_ / bytes_
    if (
        parts > 0.98
        and abs(parts - round(parts)) < 0.02 * parts
        and layout.mesh.world_size % round(parts) == 0
    ):
        return f"{unit} bytes × {count(number_)} {of}" + (
            f" / {round(parts)} ranks" if round(parts) > 1 else ""
        )
    return f"{bytes_ / number_:.2f} bytes for each of {count(number_)} {of}"


def _seconds(question: Question, found: Candidate) -> list[Line]:
    estimate, layout, cluster, facts = (
        found.estimate,
        found.layout,
        question.cluster,
        question.facts,
    )
    spent, number_ = estimate.seconds, found.devices
    flops = layout.tokens_per_step * facts.flops_per_token
    reached = flops / number_ / spent.compute
    peak = cluster.device.flops.get(layout.precision)
    measured = " (rate measured here)" if cluster.calibration.matmul else ""
    texts = {
        "compute": f"{flops / 1e15:.3g} PFLOP on {number_} devices: {reached / 1e12:.3g} TFLOP/s each"
        + (f", {reached / peak:.0%} of the datasheet{measured}" if peak else ""),
        "communication": "exposed: nothing is computed meanwhile",
        "bubble": "devices of the pipeline that wait",
        "optimizer": "clipping and the update",
        "offload": "copies to the host and back, and the update there",
        "rollout": "completions and rewards",
    }
    if layout.config.algorithm.rollout is None:
        del texts["rollout"]
    rows = [(part, number(getattr(spent, part)), texts[part]) for part in SECONDS if part in texts]
    rate = ranged(
        estimate.tokens_per_s,
        (1 / estimate.seconds_range[1], 1 / estimate.seconds_range[0]),
        lambda value: f"{value:,.0f}",
    )
    if estimate.startup:
        rows.append(("compiling", number(estimate.startup), "once, before the first step"))
    return [
        *rows,
        ("step", ranged(spent.total, estimate.seconds_range), f"{rate} tokens/s of all devices"),
    ]


def _run(question: Question, found: Candidate, tokens: float | None) -> list[Line]:
    estimate, steps = found.estimate, found.layout.steps
    mfu = "–" if estimate.mfu is None else f"{estimate.mfu:.1%}"
    rows = [
        (
            "MFU",
            mfu,
            "model FLOP/s of the datasheet's; computing again for checkpointing does not count",
        )
    ]
    time, price = found.hours(tokens), found.cost(question.cluster.price_per_device_hour, tokens)
    if time is not None:
        rows.append(
            (
                "hours",
                ranged(time, estimate.seconds_range),
                f"{count(tokens)} tokens" if tokens else f"{steps:,} steps",
            )
        )
    if price is not None:
        rows.append(
            (
                "cost",
                ranged(price, estimate.seconds_range),
                f"{found.devices} devices at {question.cluster.price_per_device_hour:g} an hour",
            )
        )
    return rows
