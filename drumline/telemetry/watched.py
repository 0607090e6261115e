"""Events of what is watched while a run goes on: what it writes, its devices; hangs, slow ranks, losses that jump, weights that differ."""

from __future__ import annotations

from typing import Any

from drumline.telemetry.events import Event, Number


class Samples(Event, kind="samples"):
    """What the weights write on fixed held-out prompts, greedily (`eval.samples`). The texts are strangers': escape them."""

    step: int  # steps done before it
    when: str  # before (step 0), during, or after the last step
    # Each has `set` (name of the evaluation set, or ""), `prompt`, `text` (special tokens left
    # out), `answer` (what the row has; null where it has none), `ended` (false: cut at the most new
    # tokens) and `tokens` (how many were written). The same prompts, in the same order, each time.
    samples: list[dict[str, Any]]
    seconds: float  # it took


class Completions(Event, kind="completions"):
    """The first few episodes of a rollout, as they were drawn. The texts are strangers': escape them."""

    step: int  # steps done after those that learn from it
    # Each has `prompt` (a text or messages), `text` (the first 4,000 characters), `reward` (null
    # where it failed), `domain`, `ended` and `tokens`.
    completions: list[dict[str, Any]]
    trained: bool = True  # whether steps learned from it; else `step` is not reached


class Devices(Event, kind="devices"):
    """The device of each rank at a logged step, at most every ten seconds, and once at the end. Null: not known."""

    step: int  # steps done before it
    # By rank: `utilisation` (percent), `celsius`, `watts`, `sm_mhz`, `memory_mhz` of its GPU, and
    # `joules` that this has taken since the process began; `cpu_joules` of all CPU packages of the
    # host since then, on its first rank alone.
    ranks: list[dict[str, Number]]
    kwh: Number  # of all these joules; null where no counter can be read


class Spike(Event, kind="spike"):
    """A loss far above those before it."""

    step: int
    policy: (
        str  # note, skip (its update was not made) or rollback (it is passed over after going back)
    )
    loss: Number
    mean: float  # of the losses before
    deviation: float  # their standard deviation
    limit: float  # a larger loss is a spike
    sample_ids: list[int]  # of its global batch


class Straggler(Event, kind="straggler"):
    """A rank holds up the others, by the medians of the last 20 steps."""

    step: int
    rank: int
    host: str
    device: str
    seconds: (
        float  # of a step: its own work, and waiting for its data, without waiting for other ranks
    )
    median: float  # seconds of the median rank
    lost_tokens_per_s: float  # what the run would gain if it were as fast as the others


def ranks_named(ranks: list[int]) -> str:
    """Return ranks in words: `rank 3`, or `ranks 1, 3`."""
    listed = ", ".join(map(str, ranks))
    if len(ranks) == 1:
        return f"rank {listed}"
    return f"ranks {listed}"


class WeightsDiffer(Event, kind="weights_differ"):
    step: int  # done before they were compared
    ranks: list[int]  # that differ from most; all where there is no majority
    # The last step after which they were the same; null where it was not compared before.
    agreed: int | None


class Hang(Event, kind="hang"):
    """Ranks that did not move on; a `fault` follows. Written by the launcher."""

    attempt: int  # count of starts before this one
    step: int  # the last one done; -1 before the first
    rank: int  # to blame; the first of `ranks`
    ranks: list[int]
    host: str | None = None  # of that rank, where there are several
    phase: str  # in which it stands: startup, data, forward, backward, collective, optimizer, save, eval, rollout, compile or report
    seconds: float  # that it has stood there
    limit: float  # seconds that this phase may take
    why: str  # in words
    waits: list[str]  # a line for each rank that waits: in what
    # That they wait in: operation, types and shapes, number, group, line of code.
    collective: str | None
    position: int  # where the samples of its step begin in the order of the run
    sample_ids: list[int] | None  # of that step, where a rank could still give them
    stack: list[str]  # the culprit's, innermost first; empty where it could not be had
