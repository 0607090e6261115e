"""Events about a run's health: sample texts, devices, hangs, stragglers, spikes of the loss."""

from __future__ import annotations

from typing import Any

from drumline.telemetry.events import Event, Number


class Samples(Event, kind="samples"):
    """Texts that the model writes greedily for fixed held-out prompts (`eval.samples`).

    The texts are not trusted, so they must be escaped.
    """

    step: int  # number of steps before it
    when: str  # before (step 0), during, or after the last step
    # Each has `set` (name of the evaluation set, or ""), `prompt`, `text` (special tokens left
    # out), `answer` (what the row has; null where it has none), `ended` (false: cut at the most new
    # tokens) and `tokens` (how many were written). The same prompts, in the same order, each time.
    samples: list[dict[str, Any]]
    seconds: float  # that writing them took


class Completions(Event, kind="completions"):
    """The first few episodes of a rollout, as sampled.

    The texts are not trusted, so they must be escaped.
    """

    step: int  # number of optimizer steps once all that train on this rollout are done
    # Each has `prompt` (a text or messages), `text` (the first 4,000 characters), `reward` (null
    # where it failed), `domain`, `ended`, `tokens`, `version` (the steps after which the weights
    # that sampled its first token were exported; null if a server keeps its own) and `versions` (of all
    # weights that sampled it, one after another, each with `version` and the number of `tokens`). With an environment also `messages` (all
    # turns, their first 4,000 characters together, calls of tools included; long arguments of a call
    # are the beginning of their JSON) and `failure` (why the environment failed, or null). The
    # messages of the model have `reward` (the environment's for this turn, or null) and
    # `tool_errors` (how many of its calls failed).
    completions: list[dict[str, Any]]
    trained: bool = True  # whether steps trained on it; if not, `step` is not reached


class Devices(Event, kind="devices"):
    """Readings of each rank's device, at logged steps and at the end; null if not known.

    There is at most one such event in ten seconds.
    """

    step: int  # steps done before it
    # By rank: `utilisation` (percent), `celsius`, `watts`, `sm_mhz`, `memory_mhz` of its GPU, and
    # `joules` that this has taken since the process began; `cpu_joules` of all CPU packages of the
    # host since then, on its first rank alone.
    ranks: list[dict[str, Number]]
    kwh: Number  # of all these joules; null where no counter can be read


class Spike(Event, kind="spike"):
    """A loss far above the losses before it."""

    step: int
    # What was done: note, skip (no update) or rollback (back to a checkpoint, and without the
    # step).
    policy: str
    loss: Number
    mean: float  # of the losses before
    deviation: float  # standard deviation of the losses before
    limit: float  # a larger loss is a spike
    sample_ids: list[int]  # of its global batch


class Straggler(Event, kind="straggler"):
    """A rank holds up the others, by the medians of the last 20 steps."""

    step: int
    rank: int
    host: str
    device: str
    # Of a step: the rank's own work and its waits for data, but not its waits for other ranks.
    seconds: float
    median: float  # seconds of the median rank
    lost_tokens_per_s: float  # that the run would gain if the rank were as fast as the others


def ranks_named(ranks: list[int]) -> str:
    """Return ranks in words: `rank 3`, or `ranks 1, 3`."""
    listed = ", ".join(map(str, ranks))
    if len(ranks) == 1:
        return f"rank {listed}"
    return f"ranks {listed}"


class ExpertLoad(Event, kind="expert_load"):
    """How many tokens each expert of a mixture got in a step.

    It is written at the first logged step, at the last one, and whenever a tenth more steps are
    done than at the one before.
    """

    step: int  # number of the step
    # Name of a layer's experts → the tokens of each, over the global batch. Padding does not count.
    tokens: dict[str, list[int]]


class WeightsDiffer(Event, kind="weights_differ"):
    """Weights that should be equal on all ranks differ."""

    step: int  # number of steps before they were compared
    ranks: list[int]  # that differ from most ranks; all ranks if there is no majority
    # The last step after which the weights were equal; null if they were not compared before.
    agreed: int | None


class Hang(Event, kind="hang"):
    """Ranks that did not move on. The launcher writes this event, and a `fault` after it."""

    attempt: int  # number of starts before this one
    step: int  # the last finished step; -1 before the first
    rank: int  # the rank to blame, the first of `ranks`
    ranks: list[int]  # all ranks to blame
    host: str | None = None  # host of `rank`, if the run has several
    # Phase that the rank is in: startup, data, forward, backward, collective, optimizer, save,
    # eval, rollout, compile or report.
    phase: str
    seconds: float  # that the rank has been in the phase
    limit: float  # seconds that the phase may take
    why: str  # in words
    waits: list[str]  # a line for each waiting rank, with the collective that it waits in
    # The collective that the others wait in: operation, types and shapes, number, group, code line.
    collective: str | None
    position: int  # index, in the run's sample order, of the first sample of the step
    sample_ids: list[int] | None  # samples of that step, if a rank could still tell them
    stack: list[str]  # of the rank to blame, innermost first; empty if it could not be read
