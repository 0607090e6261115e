"""The progress display of a run: live on a terminal, elsewhere one plain line an event. It only repeats events."""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumline.errors import printable
from drumline.report.waiting import Waits, duration
from drumline.system.output import Verbosity, plural
from drumline.system.redact import redact
from drumline.telemetry import events, watched

REFRESH_PER_SECOND = 4
PLAIN_STEP_LINES = 20  # of steps that a run prints without a terminal
MEAN_STEPS = 6  # steps of a mean: single ones jump with their few samples
RECENT_STEPS = 20  # whose mean time makes the ETA
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_VALUES = 24
SAME = 0.01  # relative change of a mean below which it counts as flat
WIDEST = 100  # characters of the live display
SAMPLES_SHOWN = 2
SAMPLE_IDS_SHOWN = 8
NAME_WIDTH = 15  # characters of a score's name in the summary, at least
MOST_RANKS = 4  # whose memory is shown apart
GIB = 2**30
MIB = 2**20


def spark(values: list[float]) -> str:
    """Return the last 24 values as a line of blocks, the lowest at the bottom."""
    shown = values[-SPARK_VALUES:]
    low = min(shown)
    spread = max(shown) - low
    has_range = spread > 0
    if not has_range:
        return SPARKS[0] * len(shown)
    highest = len(SPARKS) - 1
    blocks = ""
    for value in shown:
        height = (value - low) / spread
        blocks += SPARKS[int(height * highest)]
    return blocks


def trend(values: list[float]) -> str:
    """Return ↓, ↑ or → (within 1%): the mean of the last values against that of as many before.

    Means of up to MEAN_STEPS values are compared. Empty if there are fewer than four values.
    """
    width = min(MEAN_STEPS, len(values) // 2)
    if width < 2:
        return ""
    before = _mean(values[-2 * width : -width])
    after = _mean(values[-width:])
    if abs(after - before) <= SAME * abs(before):
        return "→"
    return "↓" if after < before else "↑"


def size(bytes_: float) -> str:
    """Return bytes in MiB below one GiB, in GiB from there on."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def failed(failures: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Give a line for each reward that failed. `failures`: reward → reason → episodes, as in events."""
    for name, reasons in failures.items():
        counted = []
        for reason, episodes in reasons.items():
            counted.append(f"{episodes} × {reason}")
        lost = ", ".join(counted)
        yield f"reward {name} failed, and its episodes are left out: {lost}"


class Progress:
    """A consumer of events; use it as a context manager. `on_event` may be called from another thread."""

    def __init__(
        self,
        console: Console,
        past: Iterable[events.Event] = (),
        waits: Waits | None = None,
        *,
        verbosity: Verbosity = Verbosity.VERBOSE,
        opening: Iterable[str] = (),
    ) -> None:
        """Show nothing yet; the events of the run come to `on_event`.

        Args:
            console: The terminal or file to print to.
            past: Events of the run before this process, so that a resumed run knows its first
                evaluation.
            waits: What the ranks do between steps.
            verbosity: How much is printed.
            opening: The lines about the plan that are printed first. Without them the run's first
                event gives one line.
        """
        self.console = console
        self.is_quiet = verbosity is Verbosity.QUIET
        self.is_verbose = verbosity is Verbosity.VERBOSE
        self.opening = list(opening)
        # The page about the run that was written at its end.
        self.page: Path | None = None
        self.waits = waits or Waits()
        # The newest event of each kind.
        self.start: events.RunStart | None = None
        self.step: events.Step | None = None
        self.save: events.Save | None = None
        self.export: events.Export | None = None
        self.profile: events.Profiled | None = None
        self.end: events.RunEnd | None = None
        self.fault: events.Fault | None = None  # None again when steps go on
        self.is_measured = False  # memory was compared with the plan
        self.evals: list[events.Eval] = []
        self.rewards: list[Any] = []  # of rollouts; null is NaN, inf is a text
        for event in past:
            if isinstance(event, events.Eval):
                self.evals.append(event)
            elif isinstance(event, events.Rollout):
                self.rewards.append(event.reward)
        self.losses: dict[int, float] = {}  # by step, finite ones only
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds of steps
        self.sent: list[float] = []  # bytes, of the steps where they are known
        self.restarts = 0
        self.restored = 0  # the step that the run goes on after
        self.began = 0.0  # unix seconds of the first start
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        for line in self.opening:
            self._print(line)
        if self.opening:
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
        if self.live is not None:
            self.live.__exit__(*arguments)
        self.waits.keep()
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
        """Show an event; those without a handler are not for the display."""
        handler = getattr(self, f"_on_{event.kind}", None)
        is_damaged = not event.whole
        if not is_damaged:
            # Values inside of an event's lists and dictionaries are not checked when it is read.
            try:
                self.waits.note(event)
                if handler is not None:
                    handler(event)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                is_damaged = True
                handler = handler or self._print
        if is_damaged and handler is not None:
            self._print(
                f"{event.kind}: not shown, for it is damaged or of another version", "yellow"
            )

    def _print(self, line: str, style: str = "") -> None:
        """Print a line, unless the display is quiet.

        Files and pipes get one line an event; a terminal breaks long ones between words.
        """
        if self.is_quiet:
            return
        self.console.print(_text(line, style=style), soft_wrap=self.live is None)

    def _print_all(self, warnings: Iterable[str]) -> None:
        """Print warnings, a line each."""
        for line in warnings:
            self._print(line, "yellow")

    # Handlers, one for each kind of event that the display shows.

    def _on_run_start(self, event: events.RunStart) -> None:
        if not self.start:
            if self.is_verbose or not self.opening:
                self._print(f"plan: {event.plan_line}")
            for line in event.unadapted or []:  # None in runs of older versions
                self._print(f"note: {line}")
            self.began = event.t
        self.start = event

    def _on_step(self, event: events.Step) -> None:
        self.step = event
        self.fault = None
        self.recent.append(event.seconds)
        if isinstance(event.loss, float | int):
            self.losses[event.step] = event.loss
        if event.sent_bytes:
            self.sent.append(event.sent_bytes)
        if self.live is None and self._is_shown(event.step):
            line = self._step_line(event)
            self._print(line)

    def _is_shown(self, step: int) -> bool:
        """Return whether files and pipes get a line of this step."""
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
        loss = _number(event.loss, ".4f")
        norm = _number(event.grad_norm)
        newest = self._newest_losses()
        if newest:
            loss += f" (mean {_mean(newest):.3f})"
        columns = [
            f"step {event.step}/{steps}",
            f"loss {loss}",
            f"lr {event.lr:.3g}",
            f"|g| {norm}",
            _speed(event),
            f"ETA {self._eta()}",
            f"memory {self._memory()}",
        ]
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
        width = 2 * len(str(steps)) + 1
        loss = _number(event.loss, ".4f")
        norm = _number(event.grad_norm, ".3g")
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
        self.evals.append(event)
        metrics = _metrics(event)
        samples = plural(event.samples, "sample")
        self._print(f"Held out at step {event.step}: {metrics} ({samples})", "cyan")
        self._print_all(failed(event.reward_failures or {}))

    def _on_samples(self, event: watched.Samples) -> None:
        for sample in event.samples[:SAMPLES_SHOWN]:
            prompt_end = _one_line(sample["prompt"])[-40:]
            text_start = _one_line(sample["text"])[:100]
            self._print(f"sample, step {event.step}: …{prompt_end} → {text_start}", "dim")

    def _on_rollout(self, event: events.Rollout) -> None:
        if event.reward is not None:
            self.rewards.append(event.reward)
        self._print(_rollout_line(event))
        self._print_all(failed(event.failures))
        for name, value in event.rewards.items():
            if value is None and name not in event.failures:
                self._print(
                    f"reward {name} applied to no episode: it returned None for each", "yellow"
                )
        if event.left_out:
            self._print(
                f"no reward applies to {event.left_out} of {event.episodes} episodes, which are left out"
            )

    def _on_reference(self, event: events.Reference) -> None:
        if not event.found and self.is_verbose:
            self._print(
                f"reference: {event.pairs} pairs of {event.data} scored in {event.seconds:.1f} s"
            )

    def _on_measured(self, event: events.Measured) -> None:
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
            parts[0] += f" · step {total:.3g} s"
        accuracy = "as planned"
        style = ""
        if event.warned:
            categories = ", ".join(event.warned)
            accuracy = f"off by more than 15%: {categories}"
            style = "yellow"
        parts.append(accuracy)
        measured = " · ".join(parts)
        run_dir = shlex.quote(self._run_dir())
        self._print(f"measured: {measured} (drumline plan --check {run_dir})", style)

    def _on_profile(self, event: events.Profiled) -> None:
        self.profile = event
        if not self.is_verbose:
            return
        for line in _operators(event):
            self._print(line)

    def _on_save(self, event: events.Save) -> None:
        if event.path:
            self.save = event
        if event.error:
            rest = "" if event.path else " — the run goes on"
            self._print(f"checkpoint of step {event.step}: {event.error}{rest}", "yellow")
        elif self.live is None and self.is_verbose:
            written = size(event.bytes)
            self._print(f"checkpoint of step {event.step}: {written} in {event.seconds:.1f} s")

    def _on_started(self, event: events.Started) -> None:
        if not self.is_verbose:
            return
        parts = []
        for name, seconds in event.seconds.items():
            parts.append(f"{name} {seconds:.1f}")
        total = sum(event.seconds.values())
        listed = ", ".join(parts)
        self._print(f"first step after {total:.1f} s: {listed}", "dim")

    def _on_restore(self, event: events.Restore) -> None:
        for skipped in event.skipped:
            reason = skipped["reason"]
            self._print(f"Passed over a damaged checkpoint: {reason}", "yellow")
        if event.path:
            self._print(f"Resuming after step {event.step} from {event.path}")
        else:
            self._print("There is no checkpoint yet: starting at the first step")
        self.restored = event.step
        self.recent.clear()
        for step in list(self.losses):
            if step > event.step:
                del self.losses[step]

    def _on_nonfinite(self, event: events.Nonfinite) -> None:
        loss = _number(event.loss)
        norm = _number(event.grad_norm)
        samples = _sample_ids(event.sample_ids)
        self._print(
            f"step {event.step}: loss {loss}, gradient norm {norm} — {event.policy} ({samples})",
            "yellow",
        )

    def _on_spike(self, event: watched.Spike) -> None:
        loss = _number(event.loss)
        limit = f"{event.limit:.4g}"
        mean = f"{event.mean:.4g}"
        samples = _sample_ids(event.sample_ids)
        self._print(
            f"step {event.step}: loss {loss} jumps above {limit} (mean before {mean}) — {event.policy} ({samples})",
            "yellow",
        )

    def _on_weights_differ(self, event: watched.WeightsDiffer) -> None:
        ranks = watched.ranks_named(event.ranks)
        line = f"step {event.step}: the weights of {ranks} differ"
        if event.agreed is not None:
            line += f"; they agreed after step {event.agreed}"
        self._print(line, "bold red")

    def _on_straggler(self, event: watched.Straggler) -> None:
        line = f"rank {event.rank} ({event.device} of {event.host}) holds up the others:"
        line += f" {event.seconds:.3g} s a step of its own,"
        line += f" the median rank {event.median:.3g} s;"
        line += f" that costs {event.lost_tokens_per_s:,.0f} tokens/s"
        self._print(line, "yellow")

    def _on_fault(self, event: events.Fault) -> None:
        # The launcher has reported it at length; the display shows that the run waits for new ranks.
        self.fault = event
        if event.action in ("restart", "replan"):
            self.restarts += 1

    def _on_preempt(self, event: events.Preempt) -> None:
        self._print(f"{event.signal}: saved after step {event.step}")

    def _on_export(self, event: events.Export) -> None:
        self.export = event

    def _on_run_end(self, event: events.RunEnd) -> None:
        self.end = event

    # The end of a run.

    def summary(self) -> list[str]:
        """Return the lines of a finished run: before and after, where the result lies, and what to try next."""
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
            of_what = "the run"
            if self.restarts:
                of_what = "this start"
            lines.append(f"  energy  {end.kwh:.3g} kWh of {of_what}")
        if self.sent:
            mean = size(_mean(self.sent))
            steps = plural(len(self.sent), "step")
            lines.append(f"  sent    {mean} a rank and step, mean of {steps}")
        if self.profile:
            lines += _operators(self.profile)
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
            memory = self._memory()
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
            since = f"after {plural(self.restarts, 'restart')}; since the last one"
        spent = end.goodput
        elapsed = spent.get("elapsed", 0)
        line = f"Finished {plural(end.step, 'step')} {since} {duration(elapsed)}"
        productive = spent.get("productive")
        if productive:
            share = productive / spent["elapsed"]
            line += f", {share:.0%} of it in training steps"
        return f"{line}."

    def _lines_of_learning(self) -> list[str]:
        """Return training loss, reward and scores of evaluations, each before and after."""
        lines = []
        losses = list(self.losses.values())
        if len(losses) >= 2 * MEAN_STEPS:
            first = f"{_mean(losses[:MEAN_STEPS]):.4f}"
            last = f"{_mean(losses[-MEAN_STEPS:]):.4f}"
            name = f"{'loss':<{NAME_WIDTH}}"
            lines.append(f"  training {name} {first} → {last}  (means of {MEAN_STEPS} steps)")
        if len(self.rewards) > 1:
            first = _number(self.rewards[0], ".4f")
            last = _number(self.rewards[-1], ".4f")
            lines.append(f"  reward  {first} → {last}  (the first and the last rollout)")
        if len(self.evals) > 1:
            lines += self._lines_of_evaluations()
        return lines

    def _lines_of_evaluations(self) -> list[str]:
        """Return the scores that the first and the last evaluation have, below each other."""
        before = self.evals[0].metrics
        after = self.evals[-1].metrics
        names = [name for name in after if name in before]
        width = max([NAME_WIDTH, *map(len, names)])
        lines = []
        for name in names:
            first = _score(name, before[name], ".4f")
            last = _score(name, after[name], ".4f")
            lines.append(f"  held-out {name:<{width}} {first} → {last}")
        return lines

    def _next_commands(self) -> list[str]:
        """Return the commands that one may want after a run."""
        run_dir = self._run_dir()
        run = shlex.quote(run_dir)
        lines = []
        if Path(run_dir, "tensorboard").is_dir():
            lines.append(f"  tensorboard --logdir {run}/tensorboard")
        if self.start is not None and self.start.writes:
            lines.append(f"  drumline chat {run}  # talk to the model")
        if self.export is None:
            lines.append(f"  drumline export {run} --to my-model --dtype bf16")
        if Path("examples/own_data.yaml").exists():
            lines.append("  drumline train examples/own_data.yaml  # your own rows")
        return lines

    # The live display.

    def render(self) -> RenderableType:
        """Return the live display: bar, loss, speed, memory, last checkpoint, and what the run waits for."""
        if not self.start:
            return Text("Starting the ranks …", style="dim")
        step = self.step.step if self.step else self.restored
        steps = self.start.steps or 1
        parts: list[RenderableType] = [self._bar(step, steps)]
        if self.step:
            parts.append(self._table(self.step))
        waiting = self._waiting(step, steps)
        if waiting:
            parts.append(waiting)
        title = _text(
            f"drumline · {self.start.run_dir}", style="bold", overflow="ellipsis", no_wrap=True
        )
        # The terminal echoes Ctrl-C as ^C behind the last line. It must not reach the next one, or
        # the display would not find its first line again.
        width = min(self.console.width - len("^C"), WIDEST)
        return Panel(
            Group(*parts), title=title, title_align="left", border_style="dim", width=width
        )

    def _bar(self, step: int, steps: int) -> Table:
        """Return the bar of steps with the time so far and the ETA."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        times = f"{duration(time.time() - self.began)} · ETA {self._eta()}"
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
            table.add_row("loss", Text(self._loss_line(), style="green"))
        if self.evals:
            newest = self.evals[-1]
            metrics = _metrics(newest)
            table.add_row("held out", _text(f"{metrics} (step {newest.step})"))
        table.add_row("speed", _speed_line(now))
        table.add_row("time", _time_line(now))
        if self.sent:
            mean = size(_mean(self.sent))
            table.add_row("sent", f"{mean} a rank and step")
        norm = _number(now.grad_norm)
        table.add_row("rate", _text(f"lr {now.lr:.3g} · gradient norm {norm}"))
        table.add_row("memory", self._memory())
        if self.save:
            table.add_row("saved", _saved_line(self.save))
        return table

    def _loss_line(self) -> str:
        """Return the newest loss, its trend, the mean of the last steps and their spark line."""
        losses = list(self.losses.values())
        arrow = trend(losses)
        parts = [f"{losses[-1]:.4f} {arrow}"]
        if len(losses) >= MEAN_STEPS:
            mean = _mean(losses[-MEAN_STEPS:])
            parts.append(f"mean of {MEAN_STEPS} {mean:.4f}")
        parts.append(spark(losses))
        return "  ".join(parts)

    def _waiting(self, step: int, steps: int) -> Text | None:
        """Return a line on what the run does between steps; None while steps go on."""
        if self.fault:
            return _text(_fault_line(self.fault), style="bold red")
        is_last = step == steps
        may_wait = not self.step or is_last or self._is_late(self.step)
        if may_wait and not self.end:
            line = self.waits.line()
            if line is not None:
                return Text(line, style="dim")
        if not self.step and not self.end:
            return Text("Loading the model; the first step comes next", style="dim")
        if is_last and not self.end:
            return Text("Last evaluation, checkpoint and export …", style="dim")
        return None

    def _is_late(self, step: events.Step) -> bool:
        """Return whether the last step is longer ago than three usual ones and a second."""
        usual = 0.0
        if self.recent:
            usual = _mean(list(self.recent))
        return time.time() - step.t > 1 + 3 * usual

    def _eta(self) -> str:
        """Return the time until the last step, or – if it is not known."""
        steps = self._steps()
        if not steps or not self.recent or not self.step:
            return "–"
        steps_left = steps - self.step.step
        usual = _mean(list(self.recent))
        return duration(steps_left * usual)

    def _steps(self) -> int | None:
        """Return the steps of the whole run; None if they are not known."""
        return self.start.steps if self.start else None

    def _run_dir(self) -> str:
        """Return the folder of the run, or a placeholder for it."""
        return self.start.run_dir if self.start else "RUN"

    def _memory(self) -> str:
        """Return the memory of each rank at the newest step, or the least and the most of many."""
        ranks = [0]
        if self.step and self.step.memory_bytes:
            ranks = self.step.memory_bytes
        if len(ranks) > MOST_RANKS:
            least = size(min(ranks))
            most = size(max(ranks))
            return f"{least} to {most} on {len(ranks)} ranks"
        sizes = " · ".join(map(size, ranks))
        if len(ranks) > 1:
            return f"{sizes} a rank"
        return sizes


def _mean(values: list[float]) -> float:
    """Return the mean of values."""
    return math.fsum(values) / len(values)


def _text(line: str, **style: Any) -> Text:
    """Return one line without secrets, what a terminal takes for a command, and rich's markup."""
    return Text(printable(redact(line.replace("\n", " "))), **style)


def _one_line(value: Any) -> str:
    """Return a value as text with single spaces between its words."""
    return " ".join(str(value).split())


def _metrics(event: events.Eval) -> str:
    """Return all metrics of an evaluation with their names."""
    parts = []
    for name, value in event.metrics.items():
        score = _score(name, value)
        parts.append(f"{name} {score}")
    return " · ".join(parts)


def _rollout_line(event: events.Rollout) -> str:
    """Return the line of a rollout: rewards, lengths, and what its seconds were spent on."""
    rewarded = _rewarded(event)
    domains = _rewards_of_domains(event)
    if len(domains) > 1:
        listed = " · ".join(domains)
        rewarded += f" ({listed})"
    parts = [rewarded]
    has_groups = event.reward is not None and events.has_groups(event.prompts, event.episodes)
    if has_groups and isinstance(event.groups_differ, float | int):
        alike = 1 - event.groups_differ
        parts.append(f"groups without a difference {alike:.0%}")
    parts.append(f"length {event.length:.1f}")
    parts.append(f"ended {event.ended:.0%}")
    if event.sampler_gap is not None:
        parts.append(f"sampler off by {event.sampler_gap:.2g}")
    parts.append(_rollout_seconds(event))
    numbers = " · ".join(parts)
    unreached = " (not reached)" if event.trained is False else ""
    return f"rollout, to step {event.step}{unreached}: {numbers}"


def _rewards_of_domains(event: events.Rollout) -> list[str]:
    """Return the mean reward of each domain with its name."""
    domains = []
    for key, value in event.metrics.items():
        if key.startswith("reward/"):
            domain = key.removeprefix("reward/")
            score = _score(key, value)
            domains.append(f"{domain} {score}")
    return domains


def _rollout_seconds(event: events.Rollout) -> str:
    """Return what the seconds of a rollout were spent on."""
    parts = [
        f"generate {event.generate_s:.1f}",
        f"reward {event.reward_s:.1f}",
        f"infer {event.infer_s:.1f}",
        f"train {event.train_s:.1f}",
    ]
    return "seconds " + ", ".join(parts)


def _rewarded(event: events.Rollout) -> str:
    """Return the mean reward of a rollout and its spread, or why it has none."""
    if event.reward is not None:
        mean = _number(event.reward)
        deviation = _number(event.reward_std, ".3g")
        return f"reward {mean} ± {deviation}"
    episodes = event.episodes
    failed_episodes = episodes - event.left_out
    if failed_episodes == 0:
        return f"no reward (none applies to the {episodes} episodes)"
    if event.left_out == 0:
        return f"no reward (all {episodes} episodes failed)"
    return f"no reward ({failed_episodes} of {episodes} episodes failed, and none applies to the others)"


def _operators(event: events.Profiled) -> list[str]:
    """Return where a profile was written, and a table of the operators that took longest."""
    steps = f"step {event.step}"
    if event.steps != 1:
        last = event.step + event.steps - 1
        steps = f"steps {event.step} to {last}"
    head = f"profile of rank {event.rank}, {steps}: {event.trace}"
    lines = [
        f"{head} · snapshot of memory: {event.snapshot}",
        f"  {'operator':<44} {'calls':>7} {'seconds':>9} {'share':>6}",
    ]
    for operator in event.operators:
        name = operator["name"][:44]
        calls = operator["calls"]
        seconds = operator["seconds"]
        share = operator["share"]
        lines.append(f"  {name:<44} {calls:>7,} {seconds:>9.3g} {share:>6.1%}")
    return lines


def _sample_ids(ids: list[int]) -> str:
    """Return the first samples of a batch as text."""
    shown = ", ".join(map(str, ids[:SAMPLE_IDS_SHOWN]))
    if len(ids) > SAMPLE_IDS_SHOWN:
        shown += "…"
    return f"samples {shown}"


def _score(name: str, value: Any, form: str = ".4g") -> str:
    """A metric as text. A mean reward is null where no episode has a reward; any other null is NaN."""
    if value is None and "reward" in name.split("/"):
        return "none"
    return _number(value, form)


def _number(value: Any, form: str = ".4g") -> str:
    """Return a number of an event as text: null is NaN there, and inf a string."""
    if value is None:
        return "NaN"
    if isinstance(value, float | int):
        return format(value, form)
    return str(value)


def _speed(step: events.Step) -> str:
    """Return the speed in tokens, or in samples if these have no tokens."""
    if events.has_tokens(step.tokens, step.samples):
        return f"{step.tokens_per_s:,.0f} tokens/s"
    return f"{step.samples_per_s:.4g} samples/s"


def _speed_line(step: events.Step) -> str:
    """Return the speed in all its units."""
    parts = [_speed(step)]
    if events.has_tokens(step.tokens, step.samples):
        parts.append(f"{step.samples_per_s:.2f} samples/s")
    if step.mfu:
        parts.append(f"MFU {step.mfu:.1%}")
    return " · ".join(parts)


def _time_line(step: events.Step) -> str:
    """Return what the seconds of a step were spent on."""
    data = f"data {step.data_s:.2f} s"
    compute = f"{step.compute_s:.2f} s"
    if step.comm_s is None:
        return f"{data} · compute and waiting for others {compute}"
    return f"{data} · compute {compute} · waiting for others {step.comm_s:.2f} s"


def _saved_line(save: events.Save) -> str:
    """Return which checkpoint is the newest, and what it took."""
    ago = duration(time.time() - save.t)
    bytes_ = size(save.bytes)
    waited = f"{save.blocked_seconds:.2f} s"
    return f"step {save.step}, {ago} ago, {bytes_}, training waited {waited}"


def _fault_line(fault: events.Fault) -> str:
    """Return which rank failed, and what happens then."""
    then = fault.action
    if then == "restart":
        then = "starting again …"
    return f"rank {fault.rank}: {fault.error} after step {fault.step} — {then}"
