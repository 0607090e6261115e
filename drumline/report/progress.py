"""The progress display of a run: live on a terminal, elsewhere one plain line an event.

It only repeats what events say. Nothing here asks the ranks, so the same display can follow a run
that another process has started.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumline.errors import printable
from drumline.report.waiting import PhaseDurations, duration
from drumline.system.output import Verbosity, plural
from drumline.system.redact import redact
from drumline.telemetry import events, watched

REFRESH_PER_SECOND = 4
# Number of lines about steps that a whole run prints to a file or a pipe.
PLAIN_STEP_LINES = 20
# Number of steps of a mean. The losses of single steps jump, since a step has few samples.
MEAN_STEPS = 6
# Number of steps whose mean time makes the ETA.
RECENT_STEPS = 20
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_VALUES = 24
# Relative change of a mean up to which it counts as flat.
SAME = 0.01
# Most characters of a line of the live display.
WIDEST = 100
# How many texts for held-out prompts are shown, and how many characters of the end of each prompt
# and of the start of each text.
SAMPLES_SHOWN = 2
PROMPT_CHARACTERS = 40
TEXT_CHARACTERS = 100
# How many samples are shown of a step that went wrong.
SAMPLE_IDS_SHOWN = 8
# The metric of a mixture that is shown: for each layer the tokens of its fullest expert over the mean.
LOADS = "expert_load_max_by_layer"
# The most blocks in the line of layers. Of more layers, neighbours share a block.
LAYERS_SHOWN = 32
# Characters of an operator's name in the table of a profile.
OPERATOR_WIDTH = 44
# Least characters of a score's name in the summary.
NAME_WIDTH = 15
# Ranks whose memory is shown one by one. Of more ranks the display has the least and the most.
MOST_RANKS = 4
GIB = 2**30
MIB = 2**20


def spark(values: list[float]) -> str:
    """Return the last 24 values as a line of blocks, the lowest value as the lowest block."""
    return bars(values[-SPARK_VALUES:])


def bars(shown: list[float]) -> str:
    """Return values as a line of blocks, one for each, the lowest value as the lowest block."""
    low = min(shown)
    spread = max(shown) - low
    if not spread > 0:
        # All values are equal: there is no height to divide by.
        return SPARKS[0] * len(shown)
    highest = len(SPARKS) - 1
    blocks = ""
    for value in shown:
        height = (value - low) / spread
        blocks += SPARKS[int(height * highest)]
    return blocks


def _load_line(loads: list[float]) -> str:
    """Return a line on how evenly the routers of a mixture use experts, with a block for each layer.

    `loads`: for each layer the tokens of its fullest expert over the mean of its experts.
    """
    group = math.ceil(len(loads) / LAYERS_SHOWN)
    by_block = [max(loads[first : first + group]) for first in range(0, len(loads), group)]
    least = _format_number(min(loads), ".3g")
    most = _format_number(max(loads), ".3g")
    return f"fullest of each layer {bars(by_block)}  {least} to {most} × the mean"


def trend(values: list[float]) -> str:
    """Return an arrow for the direction of a curve: ↓, ↑, or → for a change within 1%.

    The mean of the last values is compared with the mean of as many values before them, of up to
    MEAN_STEPS each. Returns an empty text if there are fewer than four values.
    """
    width = min(MEAN_STEPS, len(values) // 2)
    if width < 2:
        return ""
    before = fmean(values[-2 * width : -width])
    after = fmean(values[-width:])
    if abs(after - before) <= SAME * abs(before):
        return "→"
    if after < before:
        return "↓"
    return "↑"


def size(bytes_: float) -> str:
    """Return a number of bytes as text, in MiB below one GiB and in GiB from there on."""
    if bytes_ >= GIB:
        return f"{bytes_ / GIB:.2f} GiB"
    return f"{bytes_ / MIB:.1f} MiB"


def lines_of_failed_rewards(failures: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Give a line for each reward that failed.

    `failures`: name of a reward → reason → number of episodes, as events have it.
    """
    for name, reasons in failures.items():
        counted = []
        for reason, episodes in reasons.items():
            counted.append(f"{episodes} × {reason}")
        lost = ", ".join(counted)
        yield f"reward {name} failed, and its episodes are left out: {lost}"


class Progress:
    """The display of one run, which gets the run's events by `on_event`.

    Use it as a context manager: the live display ends, and the summary is printed, when the context
    is left. `on_event` may be called from another thread.
    """

    def __init__(
        self,
        console: Console,
        past: Iterable[events.Event] = (),
        phase_durations: PhaseDurations | None = None,
        *,
        verbosity: Verbosity = Verbosity.VERBOSE,
        start_banner: Iterable[str] = (),
    ) -> None:
        """Show nothing yet; the events of the run come to `on_event`.

        Args:
            console: The terminal or file to print to.
            past: Events of the run before this process, so that a resumed run knows its first
                evaluation.
            phase_durations: What the ranks do between steps, and how long that takes.
            verbosity: How much is printed.
            start_banner: The lines about the plan that are printed first. Without them the run's
                first event gives one line.
        """
        self.console = console
        self.is_quiet = verbosity is Verbosity.QUIET
        self.is_verbose = verbosity is Verbosity.VERBOSE
        self.start_banner = list(start_banner)
        # The page about the run that was written at its end.
        self.page: Path | None = None
        self.phase_durations = phase_durations or PhaseDurations()
        # The newest event of each kind.
        self.start: events.RunStart | None = None
        self.step: events.Step | None = None
        self.save: events.Save | None = None
        self.export: events.Export | None = None
        self.profile: events.Profiled | None = None
        self.end: events.RunEnd | None = None
        # None again when steps go on.
        self.fault: events.Fault | None = None
        # Whether measured memory was compared with the plan. It is printed once.
        self.is_measured = False
        self.evals: list[events.Eval] = []
        # The mean rewards of rollouts as events have them: inf is a text there.
        self.rewards: list[Any] = []
        for event in past:
            if isinstance(event, events.Eval):
                self.evals.append(event)
            elif isinstance(event, events.Rollout):
                self.rewards.append(event.reward)
        # Finite losses by step, so that a step that is done again replaces its first loss.
        self.losses: dict[int, float] = {}
        # Seconds of the newest steps.
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        # Bytes that a rank sent in a step, of the steps for which this is known.
        self.sent: list[float] = []
        self.restarts = 0
        # Step of the checkpoint from which the run goes on; 0 for a fresh run.
        self.restored_step = 0
        # Unix seconds of the first start.
        self.began = 0.0
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        """Print the start banner, and start the live display on a terminal that can move its cursor."""
        for line in self.start_banner:
            self._print(line)
        if self.start_banner:
            self._print("")
        has_panel = self.console.is_terminal and not self.console.is_dumb_terminal
        if has_panel and not self.is_quiet:
            self.live = Live(
                console=self.console,
                refresh_per_second=REFRESH_PER_SECOND,
                get_renderable=self.render,
            )
            self.live.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        """End the live display and print the summary, or at least the path of the page."""
        # The live display first: while it is on, it would be drawn below each printed line.
        if self.live is not None:
            self.live.__exit__(*arguments)
        self.phase_durations.save_history()
        if self.end and self.end.status == "finished":
            self._print_finished(self.end)
        elif self.page is not None:
            self._print(f"The page about the run is {self.page}.")

    def _print_finished(self, end: events.RunEnd) -> None:
        """Print the summary of a finished run; one line if the display is quiet."""
        if not self.is_quiet:
            for line in self.summary():
                self._print(line)
            return
        finished = self._finished_line(end)
        run_dir = self._run_dir()
        line = f"{finished} It is in {run_dir}."
        self.console.print(_text(line), soft_wrap=True)

    def on_event(self, event: events.Event) -> None:
        """Show an event by the method `_on_KIND`. Kinds without such a method are not displayed.

        A damaged event, or one of another version, gives one line and never an error.
        """
        handler = getattr(self, f"_on_{event.kind}", None)
        if not event.is_complete:
            if handler is not None:
                self._print_damaged(event)
            return
        # Values inside of an event's lists and dictionaries are not checked when it is read, so any
        # of them may be of another type than a handler expects.
        try:
            self.phase_durations.note(event)
            if handler is not None:
                handler(event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            self._print_damaged(event)

    def _print_damaged(self, event: events.Event) -> None:
        """Print that an event cannot be shown."""
        line = f"{event.kind}: not shown, for it is damaged or of another version"
        self._print(line, "yellow")

    def _print(self, line: str, style: str = "") -> None:
        """Print a line, unless the display is quiet.

        Files and pipes get one line an event; a terminal breaks long lines between words.
        """
        if self.is_quiet:
            return
        has_whole_lines = self.live is None
        self.console.print(_text(line, style=style), soft_wrap=has_whole_lines)

    def _print_all(self, warnings: Iterable[str]) -> None:
        """Print warnings, a line each."""
        for line in warnings:
            self._print(line, "yellow")

    # Handlers, one for each kind of event that the display shows.

    def _on_run_start(self, event: events.RunStart) -> None:
        """Print the plan in a line, unless the start banner has it. A restart prints nothing."""
        if not self.start:
            if self.is_verbose or not self.start_banner:
                self._print(f"plan: {event.plan_line}")
            # None in runs of older versions.
            unadapted = event.unadapted or []
            for line in unadapted:
                self._print(f"note: {line}")
            self.began = event.t
        # Last, since the live display may be drawn by another thread, and needs `began` with it.
        self.start = event

    def _on_step(self, event: events.Step) -> None:
        """Keep the numbers of a step. Files and pipes get a line of some steps."""
        self.step = event
        self.fault = None
        self.recent.append(event.seconds)
        # NaN is null in an event, and inf is a text.
        if isinstance(event.loss, float | int):
            self.losses[event.step] = event.loss
        if event.sent_bytes:
            self.sent.append(event.sent_bytes)
        if self.live is None and self._is_shown(event.step):
            line = self._step_line(event)
            self._print(line)

    def _is_shown(self, step: int) -> bool:
        """Return whether files and pipes get a line of this step.

        They get the first step, the last one, and about PLAIN_STEP_LINES in between.
        """
        steps = self._steps() or 0
        if step in (1, steps):
            return True
        every = max(1, steps // PLAIN_STEP_LINES)
        return step % every == 0

    def _step_line(self, event: events.Step) -> str:
        """Return the line of a step for files and pipes."""
        if not self.is_verbose:
            return self._short_step_line(event)
        steps = self._steps() or "?"
        loss = _format_number(event.loss, ".4f")
        norm = _format_number(event.grad_norm)
        newest = self._newest_losses()
        if newest:
            mean = fmean(newest)
            loss += f" (mean {mean:.3f})"
        columns = [
            f"step {event.step}/{steps}",
            f"loss {loss}",
            f"lr {event.lr:.3g}",
            f"|g| {norm}",
            _format_speed(event),
            f"ETA {self._eta()}",
            f"memory {self._format_memory()}",
        ]
        loads = event.metrics.get(LOADS)
        if loads:
            load = _format_number(max(loads), ".3g")
            columns.append(f"load {load}")
        if event.sent_bytes:
            sent = size(event.sent_bytes)
            columns.append(f"sent {sent}")
        return "  ".join(columns)

    def _newest_losses(self) -> list[float]:
        """Return the losses of the last steps, as many as a mean has."""
        losses = list(self.losses.values())
        return losses[-MEAN_STEPS:]

    def _short_step_line(self, event: events.Step) -> str:
        """Return the line of a step in 80 columns, which align from step to step."""
        steps = self._steps() or "?"
        position = f"{event.step}/{steps}"
        # As wide as the position of the last step: two numbers and the slash.
        width = 2 * len(str(steps)) + 1
        loss = _format_number(event.loss, ".4f")
        norm = _format_number(event.grad_norm, ".3g")
        speed = f"{event.samples_per_s:.4g} samples/s"
        if events.has_tokens(event.tokens, event.samples):
            speed = f"{event.tokens_per_s:,.0f} tok/s"
        columns = [
            f"step {position:<{width}}",
            f"loss {loss:>8}",
            f"norm {norm:>5}",
            f"lr {event.lr:<8.3g}",
            f"{speed:>13}",
            f"{self._eta()} left",
        ]
        return "  ".join(columns)

    def _on_eval(self, event: events.Eval) -> None:
        """Print the scores of an evaluation, and what its rewards failed at."""
        self.evals.append(event)
        metrics = _format_metrics(event)
        samples = plural(event.samples, "sample")
        self._print(f"Held out at step {event.step}: {metrics} ({samples})", "cyan")
        # None if no reward failed, or if the evaluation has no rewards.
        failures = event.reward_failures or {}
        self._print_all(lines_of_failed_rewards(failures))

    def _on_samples(self, event: watched.Samples) -> None:
        """Print the end of each of the first prompts and the start of what the model wrote."""
        first_samples = event.samples[:SAMPLES_SHOWN]
        for sample in first_samples:
            prompt = _one_line(sample["prompt"])
            text = _one_line(sample["text"])
            prompt_end = prompt[-PROMPT_CHARACTERS:]
            text_start = text[:TEXT_CHARACTERS]
            self._print(f"sample, step {event.step}: …{prompt_end} → {text_start}", "dim")

    def _sampler_metrics(self, event: events.Rollout) -> Mapping[str, Any]:
        """Return metrics that may have the log-ratio of a rollout's sampler to the policy.

        They are the rollout's own. If a single step learned from it, they are those of that step, which
        measures the log-ratio itself and whose event comes first.
        """
        if "sampler_log_ratio" in event.metrics:
            return event.metrics
        if self.step is not None and self.step.step == event.step:
            return self.step.metrics
        return {}

    def _on_rollout(self, event: events.Rollout) -> None:
        """Print the line of a rollout, and why episodes of it have no reward."""
        if event.reward is not None:
            self.rewards.append(event.reward)
        self._print(_rollout_line(event, self._sampler_metrics(event)))
        self._print_all(lines_of_failed_rewards(event.failures))
        for name, value in event.rewards.items():
            # A reward that failed is null, too, and has its line already.
            applied_to_none = value is None and name not in event.failures
            if applied_to_none:
                line = f"reward {name} applied to no episode: it returned None for each"
                self._print(line, "yellow")
        if event.left_out:
            line = f"no reward applies to {event.left_out} of {event.episodes} episodes,"
            line += " which are left out"
            self._print(line)

    def _on_reference(self, event: events.Reference) -> None:
        """Print how long the reference model took, unless its numbers were read from disk."""
        if event.found or not self.is_verbose:
            return
        pairs = f"{event.pairs} pairs of {event.data}"
        self._print(f"reference: {pairs} scored in {event.seconds:.1f} s")

    def _on_teacher(self, event: events.Teacher) -> None:
        """Print how long the teacher took, unless its numbers were read from disk."""
        if event.found or not self.is_verbose:
            return
        tokens = f"{event.tokens:,} tokens of {event.data}"
        self._print(f"teacher: asked about {tokens} in {event.seconds:.1f} s")

    def _on_measured(self, event: events.Measured) -> None:
        """Print once how the measured memory and seconds compare with the plan."""
        memory = event.metrics.get("memory")
        seconds = event.metrics.get("seconds", {})
        if self.is_measured or not memory:
            return
        self.is_measured = True
        if not event.warned and not self.is_verbose:
            return
        peak = size(memory["peak"])
        parts = [f"peak {peak} a rank"]
        if "total" in seconds:
            total = seconds["total"]
            parts.append(f"step {total:.3g} s")
        style = ""
        if event.warned:
            categories = ", ".join(event.warned)
            parts.append(f"off by more than 15%: {categories}")
            style = "yellow"
        else:
            parts.append("as planned")
        measured = " · ".join(parts)
        run_dir = shlex.quote(self._run_dir())
        self._print(f"measured: {measured} (drumline plan --check {run_dir})", style)

    def _on_profile(self, event: events.Profiled) -> None:
        """Keep a profile for the summary; a verbose display prints it at once, too."""
        self.profile = event
        if not self.is_verbose:
            return
        for line in _operator_lines(event):
            self._print(line)

    def _on_save(self, event: events.Save) -> None:
        """Print what went wrong with a checkpoint.

        A verbose display also prints those that went well.
        """
        if event.path:
            self.save = event
        if event.error:
            line = f"checkpoint of step {event.step}: {event.error}"
            if not event.path:
                line += " — the run goes on"
            self._print(line, "yellow")
        elif self.live is None and self.is_verbose:
            written = size(event.bytes)
            self._print(f"checkpoint of step {event.step}: {written} in {event.seconds:.1f} s")

    def _on_started(self, event: events.Started) -> None:
        """Print what the time until the first step was spent on, if the display is verbose."""
        if not self.is_verbose:
            return
        parts = []
        for name, seconds in event.seconds.items():
            parts.append(f"{name} {seconds:.1f}")
        total = sum(event.seconds.values())
        listed = ", ".join(parts)
        self._print(f"first step after {total:.1f} s: {listed}", "dim")

    def _on_restore(self, event: events.Restore) -> None:
        """Print the checkpoint from which the run goes on, and forget the steps after it."""
        for skipped in event.skipped:
            reason = skipped["reason"]
            self._print(f"Passed over a damaged checkpoint: {reason}", "yellow")
        if event.path:
            self._print(f"Resuming after step {event.step} from {event.path}")
        else:
            self._print("There is no checkpoint yet: starting at the first step")
        self.restored_step = event.step
        # The run may go on by another plan, whose steps take another time.
        self.recent.clear()
        # Steps after the checkpoint are done again. Until then their old losses would count as the
        # newest ones.
        for step in list(self.losses):
            if step > event.step:
                del self.losses[step]

    def _on_nonfinite(self, event: events.Nonfinite) -> None:
        """Print a step whose loss or gradient is not finite, and its first samples."""
        loss = _format_number(event.loss)
        norm = _format_number(event.grad_norm)
        samples = _format_sample_ids(event.sample_ids)
        line = f"step {event.step}: loss {loss}, gradient norm {norm}"
        line += f" — {event.policy} ({samples})"
        self._print(line, "yellow")

    def _on_spike(self, event: watched.Spike) -> None:
        """Print a loss that is far above those before it, and its first samples."""
        loss = _format_number(event.loss)
        limit = f"{event.limit:.4g}"
        mean = f"{event.mean:.4g}"
        samples = _format_sample_ids(event.sample_ids)
        line = f"step {event.step}: loss {loss} jumps above {limit} (mean before {mean})"
        line += f" — {event.policy} ({samples})"
        self._print(line, "yellow")

    def _on_weights_differ(self, event: watched.WeightsDiffer) -> None:
        """Print which ranks have other weights than the rest."""
        ranks = watched.ranks_named(event.ranks)
        line = f"step {event.step}: the weights of {ranks} differ"
        if event.agreed is not None:
            line += f"; they agreed after step {event.agreed}"
        self._print(line, "bold red")

    def _on_straggler(self, event: watched.Straggler) -> None:
        """Print a rank that is slower than the others, and what that costs."""
        line = f"rank {event.rank} ({event.device} of {event.host}) holds up the others:"
        line += f" {event.seconds:.3g} s a step of its own,"
        line += f" the median rank {event.median:.3g} s;"
        line += f" that costs {event.lost_tokens_per_s:,.0f} tokens/s"
        self._print(line, "yellow")

    def _on_fault(self, event: events.Fault) -> None:
        """Count restarts, and show in the live display that the run waits for new ranks."""
        # Nothing is printed, since the launcher has reported the fault at length.
        self.fault = event
        if event.action in ("restart", "replan"):
            self.restarts += 1

    def _on_preempt(self, event: events.Preempt) -> None:
        """Print that a signal ended the run, and up to which step it is saved."""
        self._print(f"{event.signal}: saved after step {event.step}")

    def _on_export(self, event: events.Export) -> None:
        """Keep the export for the summary."""
        self.export = event

    def _on_run_end(self, event: events.RunEnd) -> None:
        """Keep the end, which `__exit__` shows: the launcher may still write the page after it."""
        self.end = event

    # The end of a run.

    def summary(self) -> list[str]:
        """Return the lines that are printed below a finished run.

        They compare the first losses and scores with the last ones, say where the result is, and
        name commands to try next. Call it only after a `run_end` event.
        """
        assert self.end is not None
        return [
            "",
            self._finished_line(self.end),
            *self._lines_of_learning(),
            *self._lines_of_cost(self.end),
            *self._lines_of_results(),
            "Next:",
            *self._next_commands(),
        ]

    def _lines_of_cost(self, end: events.RunEnd) -> list[str]:
        """Return why a run ended early, and what it took: energy, bytes sent, and operators."""
        lines = []
        if end.why:
            lines.append(f"  ended early: {end.why}")
        if isinstance(end.kwh, float):
            # The meters of a rank begin with its process.
            counted_time = "the run"
            if self.restarts:
                counted_time = "this start"
            lines.append(f"  energy  {end.kwh:.3g} kWh of {counted_time}")
        if self.sent:
            mean = size(fmean(self.sent))
            steps = plural(len(self.sent), "step")
            lines.append(f"  sent    {mean} per rank and step, mean of {steps}")
        if self.profile:
            lines += _operator_lines(self.profile)
        return lines

    def _lines_of_results(self) -> list[str]:
        """Return where the model, the page and the events are."""
        lines = []
        if self.export and self.export.error:
            lines.append("  model   not exported: the note says why, and how to get it")
        elif self.export:
            line = f"  model   {self.export.path}"
            if self.is_verbose:
                line += "  (load it with transformers' from_pretrained)"
            lines.append(line)
        if self.step:
            memory = self._format_memory()
            lines.append(f"  memory  {memory} at the peak")
        if self.page is not None:
            lines.append(f"  page    {self.page}")
        run_dir = self._run_dir()
        lines.append(f"  events  {run_dir}/events.jsonl")
        return lines

    def _finished_line(self, end: events.RunEnd) -> str:
        """Return how many steps were finished, in what time."""
        since = "in"
        if self.restarts:
            # A rank knows the seconds of its own start alone.
            restarts = plural(self.restarts, "restart")
            since = f"after {restarts}; since the last one"
        seconds = end.goodput
        steps = plural(end.step, "step")
        elapsed = duration(seconds.get("elapsed", 0))
        line = f"Finished {steps} {since} {elapsed}"
        productive = seconds.get("productive")
        if productive:
            share = productive / seconds["elapsed"]
            line += f", {share:.0%} of it in training steps"
        return f"{line}."

    def _lines_of_learning(self) -> list[str]:
        """Return training loss, reward and scores of evaluations, each before and after.

        What has only one value has no line, since there is nothing to compare it with.
        """
        lines = []
        losses = list(self.losses.values())
        # With fewer losses the two means would share steps.
        if len(losses) >= 2 * MEAN_STEPS:
            first_mean = fmean(losses[:MEAN_STEPS])
            last_mean = fmean(losses[-MEAN_STEPS:])
            change = f"{first_mean:.4f} → {last_mean:.4f}"
            name = "loss".ljust(NAME_WIDTH)
            lines.append(f"  training {name} {change}  (means of {MEAN_STEPS} steps)")
        if len(self.rewards) > 1:
            first = _format_number(self.rewards[0], ".4f")
            last = _format_number(self.rewards[-1], ".4f")
            lines.append(f"  reward  {first} → {last}  (the first and the last rollout)")
        if len(self.evals) > 1:
            lines += self._lines_of_evaluations()
        return lines

    def _lines_of_evaluations(self) -> list[str]:
        """Return a line for each score that both the first and the last evaluation have."""
        before = self.evals[0].metrics
        after = self.evals[-1].metrics
        names = [name for name in after if name in before]
        # All names are padded to the longest, so that the scores stand below each other.
        width = max([NAME_WIDTH, *map(len, names)])
        lines = []
        for name in names:
            first = _format_score(name, before[name], ".4f")
            last = _format_score(name, after[name], ".4f")
            padded_name = name.ljust(width)
            lines.append(f"  held-out {padded_name} {first} → {last}")
        return lines

    def _next_commands(self) -> list[str]:
        """Return the commands that one may want after a run."""
        run_dir = self._run_dir()
        run = shlex.quote(run_dir)
        lines = []
        if Path(run_dir, "tensorboard").is_dir():
            lines.append(f"  tensorboard --logdir {run}/tensorboard")
        can_chat = self.start is not None and self.start.writes
        if can_chat:
            lines.append(f"  drumline chat {run}  # talk to the model")
        if self.export is None:
            lines.append(f"  drumline export {run} --to my-model --dtype bf16")
        # In a checkout of Drumline's repository.
        if Path("examples/own_data.yaml").exists():
            lines.append("  drumline train examples/own_data.yaml  # your own rows")
        return lines

    # The live display.

    def render(self) -> RenderableType:
        """Return the live display, which rich draws REFRESH_PER_SECOND times a second.

        It is a panel with the bar of steps, the newest numbers, and a line on what the run waits
        for. Before the first event it is one line.
        """
        if not self.start:
            return Text("Starting the ranks …", style="dim")
        step = self.restored_step
        if self.step:
            step = self.step.step
        # A run may end with its data, and not after a number of steps.
        steps = self.start.steps or 1
        parts: list[RenderableType] = [self._bar(step, steps)]
        if self.step:
            parts.append(self._table(self.step))
        waiting = self._describe_wait(step, steps)
        if waiting:
            parts.append(waiting)
        title = _text(
            f"drumline · {self.start.run_dir}",
            style="bold",
            overflow="ellipsis",
            no_wrap=True,
        )
        # The terminal echoes Ctrl-C as ^C behind the last line. It must not reach the next one, or
        # the display would not find its first line again.
        width = min(self.console.width - len("^C"), WIDEST)
        return Panel(
            Group(*parts),
            title=title,
            title_align="left",
            border_style="dim",
            width=width,
        )

    def _bar(self, step: int, steps: int) -> Table:
        """Return the bar of steps with the time so far and the ETA."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        so_far = duration(time.time() - self.began)
        times = f"{so_far} · ETA {self._eta()}"
        bar.add_row(
            Text(f"step {step}/{steps}", style="bold"),
            ProgressBar(total=steps, completed=step),
            Text(times, style="cyan"),
        )
        return bar

    def _table(self, now: events.Step) -> Table:
        """Return the numbers of the newest step, evaluation and checkpoint."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        if self.losses:
            loss_line = self._loss_line()
            table.add_row("loss", Text(loss_line, style="green"))
        if self.evals:
            newest = self.evals[-1]
            metrics = _format_metrics(newest)
            # Names of metrics come from the user's config, so they go through `_text`.
            table.add_row("held out", _text(f"{metrics} (step {newest.step})"))
        table.add_row("speed", _speed_line(now))
        table.add_row("time", _time_line(now))
        if self.sent:
            mean = size(fmean(self.sent))
            table.add_row("sent", f"{mean} per rank and step")
        norm = _format_number(now.grad_norm)
        table.add_row("rate", _text(f"lr {now.lr:.3g} · gradient norm {norm}"))
        loads = now.metrics.get(LOADS)
        if loads:
            table.add_row("experts", _text(_load_line(loads)))
        table.add_row("memory", self._format_memory())
        if self.save:
            table.add_row("saved", _saved_line(self.save))
        return table

    def _loss_line(self) -> str:
        """Return the newest loss, its trend, the mean of the last steps and their spark line."""
        losses = list(self.losses.values())
        newest = losses[-1]
        arrow = trend(losses)
        parts = [f"{newest:.4f} {arrow}"]
        if len(losses) >= MEAN_STEPS:
            last_losses = losses[-MEAN_STEPS:]
            mean = fmean(last_losses)
            parts.append(f"mean of {MEAN_STEPS} {mean:.4f}")
        parts.append(spark(losses))
        return "  ".join(parts)

    def _describe_wait(self, step: int, steps: int) -> Text | None:
        """Return a line on what the run does between steps; None while steps go on.

        `step`: the newest step. `steps`: of the whole run.
        """
        if self.fault:
            fault_line = _fault_line(self.fault)
            return _text(fault_line, style="bold red")
        if self.end:
            return None
        is_last = step == steps
        # While steps come at their usual pace there is nothing to wait for.
        may_wait = not self.step or is_last or self._is_late(self.step)
        if may_wait:
            line = self.phase_durations.line()
            if line is not None:
                return Text(line, style="dim")
        if not self.step:
            return Text("Loading the model; the first step comes next", style="dim")
        if is_last:
            return Text("Last evaluation, checkpoint and export …", style="dim")
        return None

    def _is_late(self, step: events.Step) -> bool:
        """Return whether the last step is longer ago than three usual ones and a second."""
        usual = 0.0
        if self.recent:
            usual = fmean(list(self.recent))
        seconds_ago = time.time() - step.t
        return seconds_ago > 1 + 3 * usual

    def _eta(self) -> str:
        """Return the time until the last step, or – if it is not known."""
        steps = self._steps()
        if not steps or not self.recent or not self.step:
            return "–"
        steps_left = steps - self.step.step
        usual = fmean(list(self.recent))
        return duration(steps_left * usual)

    def _steps(self) -> int | None:
        """Return the steps of the whole run; None if they are not known."""
        if self.start is None:
            return None
        return self.start.steps

    def _run_dir(self) -> str:
        """Return the folder of the run, or a placeholder for it."""
        if self.start is None:
            return "RUN"
        return self.start.run_dir

    def _format_memory(self) -> str:
        """Return the memory of each rank at the newest step, or the least and the most of many."""
        bytes_of_ranks = [0]
        if self.step and self.step.memory_bytes:
            bytes_of_ranks = self.step.memory_bytes
        ranks = len(bytes_of_ranks)
        if ranks > MOST_RANKS:
            least = size(min(bytes_of_ranks))
            most = size(max(bytes_of_ranks))
            return f"{least} to {most} on {ranks} ranks"
        sizes = " · ".join(map(size, bytes_of_ranks))
        if ranks > 1:
            return f"{sizes} a rank"
        return sizes


def _text(line: str, **style: Any) -> Text:
    """Return one line that is safe to print.

    Secrets are redacted, and control characters, which a terminal takes for commands, are replaced.
    As a rich Text it is not read as markup. `style`: arguments of Text.
    """
    one_line = line.replace("\n", " ")
    safe = printable(redact(one_line))
    return Text(safe, **style)


def _one_line(value: Any) -> str:
    """Return a value as text with single spaces between its words."""
    return " ".join(str(value).split())


def _format_metrics(event: events.Eval) -> str:
    """Return all metrics of an evaluation with their names."""
    parts = []
    for name, value in event.metrics.items():
        score = _format_score(name, value)
        parts.append(f"{name} {score}")
    return " · ".join(parts)


def _rollout_line(event: events.Rollout, sampler_metrics: Mapping[str, Any]) -> str:
    """Return the line of a rollout: rewards, lengths, and what its seconds were spent on.

    `sampler_metrics`: metrics that may have the log-ratio of the sampler to the policy.
    """
    parts = []
    # Without rewards nothing is said of them.
    if event.rewards:
        rewarded = _format_reward(event)
        domains = _rewards_of_domains(event)
        # The reward of the only domain is the reward of the rollout.
        if len(domains) > 1:
            listed = " · ".join(domains)
            rewarded += f" ({listed})"
        parts.append(rewarded)
    # A group whose rewards are equal teaches nothing, so their share is worth a look. Without a
    # reward, or with one completion a prompt, there is no such share.
    has_groups = event.reward is not None and events.has_groups(event.prompts, event.episodes)
    if has_groups and isinstance(event.groups_differ, float | int):
        alike = 1 - event.groups_differ
        parts.append(f"groups without a difference {alike:.0%}")
    if event.episodes:
        parts.append(f"length {_format_number(event.length, '.1f')}")
        parts.append(f"ended {_format_number(event.ended, '.0%')}")
    parts += _conversation_parts(event)
    if event.from_rows:
        parts.append(f"completions of rows {event.from_rows}")
    parts += _sampler_parts(event, sampler_metrics)
    if event.lost_servers:
        lost = ", ".join(event.lost_servers)
        parts.append(f"lost: {lost}")
    parts.append(_rollout_seconds(event))
    numbers = " · ".join(parts)
    head = f"rollout for steps up to {event.step}"
    # Older versions do not write it; only False means that no step learned from the rollout.
    if event.trained is False:
        head += " (not trained on)"
    return f"{head}: {numbers}"


def _sampler_parts(event: events.Rollout, sampler_metrics: Mapping[str, Any]) -> list[str]:
    """Return how far the weights that sampled a rollout are from the policy; empty if it sampled itself."""
    parts = []
    if event.sampler_gap is not None:
        parts.append(f"sampler off by {event.sampler_gap:.2g} nats")
    if event.staleness:
        # A mean, which is whole unless completions are sampled in segments.
        steps = round(event.staleness, 1)
        unit = "step" if steps == 1 else "steps"
        parts.append(f"sampled {steps:g} {unit} earlier")
    # If the policy itself samples, rounding is all that is left.
    has_other_sampler = event.sampler_gap is not None or event.staleness is not None
    if has_other_sampler and "sampler_log_ratio" in sampler_metrics:
        log_ratio = _format_number(sampler_metrics["sampler_log_ratio"], ".2g")
        largest = _format_number(sampler_metrics.get("sampler_log_ratio_max"), ".2g")
        parts.append(f"log-ratio to the sampler {log_ratio}, at most {largest}")
    return parts


def _conversation_parts(event: events.Rollout) -> list[str]:
    """Return the mean turns and calls of tools of episodes with an environment; empty without one."""
    turns = event.metrics.get("turns")
    if turns is None:
        return []
    parts = [f"turns {turns:.1f}"]
    calls = event.metrics.get("tool_calls")
    errors = event.metrics.get("tool_errors")
    if calls:
        parts.append(f"tool calls {calls:.1f} ({errors:.1f} failed)")
    return parts


def _rewards_of_domains(event: events.Rollout) -> list[str]:
    """Return the mean reward of each domain with its name."""
    domains = []
    for key, value in event.metrics.items():
        if key.startswith("reward/"):
            domain = key.removeprefix("reward/")
            score = _format_score(key, value)
            domains.append(f"{domain} {score}")
    return domains


def _rollout_seconds(event: events.Rollout) -> str:
    """Return what the seconds of a rollout were spent on."""
    parts = [f"generate {event.generate_s:.1f}"]
    # Without rewards nothing is said of them.
    if event.rewards:
        parts.append(f"reward {event.reward_s:.1f}")
    parts.append(f"infer {event.infer_s:.1f}")
    parts.append(f"train {event.train_s:.1f}")
    return "seconds " + ", ".join(parts)


def _format_reward(event: events.Rollout) -> str:
    """Return the mean reward of a rollout and its spread, or why it has none."""
    if event.reward is not None:
        mean = _format_number(event.reward)
        deviation = _format_number(event.reward_std, ".3g")
        return f"reward {mean} ± {deviation}"
    episodes = event.episodes
    failed_episodes = episodes - event.left_out
    if failed_episodes == 0:
        return f"no reward (none applies to the {episodes} episodes)"
    if event.left_out == 0:
        return f"no reward (all {episodes} episodes failed)"
    return f"no reward ({failed_episodes} of {episodes} episodes failed, and none applies to the others)"


def _operator_lines(event: events.Profiled) -> list[str]:
    """Return the files of a profile, and a table of the operators that took longest, as lines."""
    steps = f"step {event.step}"
    if event.steps != 1:
        last = event.step + event.steps - 1
        steps = f"steps {event.step} to {last}"
    head = f"profile of rank {event.rank}, {steps}: {event.trace}"
    lines = [
        f"{head} · snapshot of memory: {event.snapshot}",
        _operator_row("operator", "calls", "seconds", "share"),
    ]
    for operator in event.operators:
        name = operator["name"]
        calls = operator["calls"]
        seconds = operator["seconds"]
        share = operator["share"]
        row = _operator_row(name, f"{calls:,}", f"{seconds:.3g}", f"{share:.1%}")
        lines.append(row)
    return lines


def _operator_row(name: str, calls: str, seconds: str, share: str) -> str:
    """Return a row of the table of operators, whose columns align."""
    padded_name = name[:OPERATOR_WIDTH].ljust(OPERATOR_WIDTH)
    return f"  {padded_name} {calls:>7} {seconds:>9} {share:>6}"


def _format_sample_ids(ids: list[int]) -> str:
    """Return the first samples of a batch as text."""
    shown = ", ".join(map(str, ids[:SAMPLE_IDS_SHOWN]))
    if len(ids) > SAMPLE_IDS_SHOWN:
        shown += "…"
    return f"samples {shown}"


def _format_score(name: str, value: Any, form: str = ".4g") -> str:
    """Return a metric as text.

    A mean reward is null if no episode has a reward, and is shown as `none`. Any other null is NaN.
    `form`: the format of a number.
    """
    is_reward = "reward" in name.split("/")
    if value is None and is_reward:
        return "none"
    return _format_number(value, form)


def _format_number(value: Any, form: str = ".4g") -> str:
    """Return a number of an event as text: null is NaN there, and inf a string."""
    if value is None:
        return "NaN"
    if isinstance(value, float | int):
        return format(value, form)
    return str(value)


def _format_speed(step: events.Step) -> str:
    """Return the speed in tokens, or in samples if these have no tokens."""
    if events.has_tokens(step.tokens, step.samples):
        return f"{step.tokens_per_s:,.0f} tokens/s"
    return f"{step.samples_per_s:.4g} samples/s"


def _speed_line(step: events.Step) -> str:
    """Return the speed in tokens, in samples, and as the share of the devices' peak (MFU)."""
    parts = [_format_speed(step)]
    # Without tokens `_speed` is the samples already.
    if events.has_tokens(step.tokens, step.samples):
        parts.append(f"{step.samples_per_s:.2f} samples/s")
    # Null if the peak of the device is not known.
    if step.mfu:
        parts.append(f"MFU {step.mfu:.1%}")
    return " · ".join(parts)


def _time_line(step: events.Step) -> str:
    """Return what the seconds of a step were spent on.

    Under some strategies a rank waits within its computation, so the two are one number.
    """
    data = f"data {step.data_s:.2f} s"
    compute = f"{step.compute_s:.2f} s"
    if step.comm_s is None:
        return f"{data} · compute and waiting for others {compute}"
    waiting = f"{step.comm_s:.2f} s"
    return f"{data} · compute {compute} · waiting for others {waiting}"


def _saved_line(save: events.Save) -> str:
    """Return which checkpoint is the newest, and what it took."""
    age = duration(time.time() - save.t)
    bytes_ = size(save.bytes)
    # Training stands still for only a part of the time that a checkpoint takes.
    waited = f"{save.blocked_seconds:.2f} s"
    return f"step {save.step}, {age} ago, {bytes_}, training waited {waited}"


def _fault_line(fault: events.Fault) -> str:
    """Return which rank failed, and what happens then."""
    then = fault.action
    if then == "restart":
        then = "starting again …"
    return f"rank {fault.rank}: {fault.error} after step {fault.step} — {then}"
