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

from drumline.core.redact import redact
from drumline.errors import printable
from drumline.report.waiting import Waits, duration
from drumline.telemetry import events, watched

REFRESH_PER_SECOND = 4
PLAIN_STEP_LINES = 20
MEAN_STEPS = 6
SPARKS = "▁▂▃▄▅▆▇█"
WIDEST = 100
SAMPLES_SHOWN = 2


def spark(values: list[float]) -> str:
    """The last 24 values as a line of blocks, the lowest at the bottom."""
    shown = values[-24:]
    low, high = min(shown), max(shown)
    return "".join(
        SPARKS[int((v - low) / (high - low) * (len(SPARKS) - 1))] if high > low else SPARKS[0]
        for v in shown
    )


def trend(values: list[float]) -> str:
    """↓, ↑ or → (within 1%): the mean of the last MEAN_STEPS values against that of as many before; empty where there are too few."""
    width = min(MEAN_STEPS, len(values) // 2)
    if width < 2:
        return ""
    before, after = _mean(values[-2 * width : -width]), _mean(values[-width:])
    return "→" if abs(after - before) <= 0.01 * abs(before) else "↓" if after < before else "↑"


def size(bytes_: float) -> str:
    """Bytes in MiB below one GiB, in GiB from there on."""
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.1f} MiB"


def failed(failures: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """A line for each reward that failed. `failures`: as events have them."""
    for name, reasons in failures.items():
        lost = ", ".join(f"{count} × {reason}" for reason, count in reasons.items())
        yield f"reward {name} failed, and its episodes are left out: {lost}"


class Progress:
    """A consumer of events; use it as a context manager. `on_event` may be called from another thread."""

    def __init__(
        self, console: Console, past: Iterable[events.Event] = (), waits: Waits | None = None
    ) -> None:
        """`past`: events of the run before this process, so that a resumed run knows its first evaluation."""
        self.console, self.waits = console, waits or Waits()
        self.start: events.RunStart | None = None
        self.step: events.Step | None = None
        self.save: events.Save | None = None
        self.export: events.Export | None = None
        self.profile: events.Profiled | None = None
        self.end: events.RunEnd | None = None
        self.fault: events.Fault | None = None
        self.measured = False
        self.evals = [event for event in past if isinstance(event, events.Eval)]
        self.rewards = [event.reward for event in past if isinstance(event, events.Rollout)]
        self.losses: dict[int, float] = {}  # by step, finite ones only
        self.recent: deque[float] = deque(maxlen=20)
        self.sent: list[float] = []  # bytes, of the steps where they are known
        self.restarts = self.restored = 0
        self.began = 0.0  # unix seconds of the first start
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
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
            for line in self.summary():
                self._print(line)

    def on_event(self, event: events.Event) -> None:
        """Show an event; those without a handler are not for the display."""
        handler = getattr(self, f"_on_{event.kind}", None)
        try:
            if event.whole:
                self.waits.note(event)
                if handler is not None:
                    handler(event)
                return
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ):  # of what lies inside of its lists and dictionaries
            handler = handler or self._print
        if handler is not None:
            self._print(
                f"{event.kind}: not shown, for it is damaged or of another version", "yellow"
            )

    def _print(self, line: str, style: str = "") -> None:
        # Files and pipes get one line an event; a terminal breaks long ones between words.
        self.console.print(_text(line, style=style), soft_wrap=self.live is None)

    def _print_all(self, warnings: Iterable[str]) -> None:
        for line in warnings:
            self._print(line, "yellow")

    # ------------------------------------------------------------------------------------------------------ one an event

    def _on_run_start(self, event: events.RunStart) -> None:
        if not self.start:
            self._print(f"plan: {event.plan_line}")
            for line in event.unadapted or []:  # None in runs of older versions
                self._print(f"note: {line}")
            self.began = event.t
        self.start = event

    def _on_step(self, event: events.Step) -> None:
        loss = event.loss
        if isinstance(loss, float | int):
            self.losses[event.step] = loss
        self.recent.append(event.seconds)
        if event.sent_bytes:
            self.sent.append(event.sent_bytes)
        self.step, self.fault = event, None
        steps = self._steps() or 0
        every = max(1, steps // PLAIN_STEP_LINES)
        if self.live is None and (event.step % every == 0 or event.step in (1, steps)):
            shown = list(self.losses.values())[-MEAN_STEPS:]
            mean = f" (mean {_mean(shown):.3f})" if shown else ""
            self._print(
                f"step {event.step}/{steps or '?'}  loss {_number(loss, '.4f')}{mean}  lr {event.lr:.3g}"
                f"  |g| {_number(event.grad_norm)}  {_speed(event)}  ETA {self._eta()}  memory {self._memory()}"
                + (f"  sent {size(event.sent_bytes)}" if event.sent_bytes else "")
            )

    def _on_eval(self, event: events.Eval) -> None:
        self.evals.append(event)
        self._print(
            f"held out, step {event.step}: {_metrics(event)}  ({event.samples} samples)", "cyan"
        )
        self._print_all(failed(event.reward_failures or {}))

    def _on_samples(self, event: watched.Samples) -> None:
        for sample in event.samples[:SAMPLES_SHOWN]:
            prompt, text = (" ".join(str(sample[part]).split()) for part in ("prompt", "text"))
            self._print(f"sample, step {event.step}: …{prompt[-40:]} → {text[:100]}", "dim")

    def _on_rollout(self, event: events.Rollout) -> None:
        self.rewards += [event.reward] * (event.reward is not None)
        domains = []
        for key, value in event.metrics.items():
            if key.startswith("reward/"):
                domains.append(f"{key.removeprefix('reward/')} {_score(key, value)}")
        alike = ""
        has_groups = event.reward is not None and events.has_groups(event.prompts, event.episodes)
        if has_groups and isinstance(event.groups_differ, float | int):
            alike = f" · groups without a difference {1 - event.groups_differ:.0%}"
        spent = f"generate {event.generate_s:.1f}, reward {event.reward_s:.1f}, infer {event.infer_s:.1f}, train {event.train_s:.1f}"
        gap = f" · sampler off by {event.sampler_gap:.2g}" if event.sampler_gap is not None else ""
        unreached = " (not reached)" if event.trained is False else ""
        self._print(
            f"rollout, to step {event.step}{unreached}: {_rewarded(event)}"
            + (f" ({' · '.join(domains)})" if len(domains) > 1 else "")
            + alike
            + f" · length {event.length:.1f} · ended {event.ended:.0%}{gap} · seconds {spent}"
        )
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
        if not event.found:
            self._print(
                f"reference: {event.pairs} pairs of {event.data} scored in {event.seconds:.1f} s"
            )

    def _on_measured(self, event: events.Measured) -> None:
        memory, seconds = event.metrics.get("memory"), event.metrics.get("seconds", {})
        if self.measured or not memory:
            return
        self.measured = True
        off = f"off by more than 15%: {', '.join(event.warned)}" if event.warned else "as planned"
        step = f" · step {seconds['total']:.3g} s" if "total" in seconds else ""
        check = f"drumline plan --check {shlex.quote(self._run_dir())}"
        self._print(
            f"measured: peak {size(memory['peak'])} a rank{step} · {off} ({check})",
            "yellow" if event.warned else "",
        )

    def _on_profile(self, event: events.Profiled) -> None:
        self.profile = event
        for line in self._operators(event):
            self._print(line)

    def _operators(self, event: events.Profiled) -> list[str]:
        steps = (
            f"step {event.step}"
            if event.steps == 1
            else f"steps {event.step} to {event.step + event.steps - 1}"
        )
        lines = [
            f"profile of rank {event.rank}, {steps}: {event.trace} · snapshot of memory: {event.snapshot}"
        ]
        lines += [f"  {'operator':<44} {'calls':>7} {'seconds':>9} {'share':>6}"]
        return lines + [
            f"  {each['name'][:44]:<44} {each['calls']:>7,} {each['seconds']:>9.3g} {each['share']:>6.1%}"
            for each in event.operators
        ]

    def _on_save(self, event: events.Save) -> None:
        if event.error:
            rest = "" if event.path else " — the run goes on"
            self._print(f"checkpoint of step {event.step}: {event.error}{rest}", "yellow")
        elif self.live is None:
            self._print(
                f"checkpoint of step {event.step}: {size(event.bytes)} in {event.seconds:.1f} s"
            )
        if event.path:
            self.save = event

    def _on_started(self, event: events.Started) -> None:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in event.seconds.items())
        self._print(f"first step after {sum(event.seconds.values()):.1f} s: {parts}", "dim")

    def _on_restore(self, event: events.Restore) -> None:
        for skipped in event.skipped:
            self._print(f"passed over a damaged checkpoint: {skipped['reason']}", "yellow")
        where = f"from {event.path}" if event.path else "no checkpoint yet"
        self._print(f"going on at step {event.step}, {where}")
        self.restored = event.step
        self.losses = {step: loss for step, loss in self.losses.items() if step <= event.step}
        self.recent.clear()

    def _on_nonfinite(self, event: events.Nonfinite) -> None:
        self._print(
            f"step {event.step}: loss {_number(event.loss)}, gradient norm {_number(event.grad_norm)} — {event.policy}"
            f" (samples {', '.join(map(str, event.sample_ids[:8]))}{'…' * (len(event.sample_ids) > 8)})",
            "yellow",
        )

    def _on_spike(self, event: watched.Spike) -> None:
        self._print(
            f"step {event.step}: loss {_number(event.loss)} jumps above {event.limit:.4g} (mean before {event.mean:.4g}) — {event.policy}"
            f" (samples {', '.join(map(str, event.sample_ids[:8]))}{'…' * (len(event.sample_ids) > 8)})",
            "yellow",
        )

    def _on_weights_differ(self, event: watched.WeightsDiffer) -> None:
        since = "" if event.agreed is None else f"; they agreed after step {event.agreed}"
        self._print(
            f"step {event.step}: the weights of {watched.ranks_named(event.ranks)} differ{since}",
            "bold red",
        )

    def _on_straggler(self, event: watched.Straggler) -> None:
        self._print(
            f"rank {event.rank} ({event.device} of {event.host}) holds up the others: {event.seconds:.3g} s a step of its own, the median"
            f" rank {event.median:.3g} s; that costs {event.lost_tokens_per_s:,.0f} tokens/s",
            "yellow",
        )

    def _on_fault(self, event: events.Fault) -> None:
        # The launcher has reported it at length; the display shows that the run waits for new ranks.
        self.fault = event
        self.restarts += event.action in ("restart", "replan")

    def _on_preempt(self, event: events.Preempt) -> None:
        self._print(f"{event.signal}: saved at step {event.step}")

    def _on_export(self, event: events.Export) -> None:
        self.export = event

    def _on_run_end(self, event: events.RunEnd) -> None:
        self.end = event

    # ------------------------------------------------------------------------------------------------------ the pictures

    def summary(self) -> list[str]:
        """Before and after, where the result lies, and what to try next."""
        assert self.end is not None
        run_dir = self._run_dir()
        spent, run = self.end.goodput, shlex.quote(run_dir)
        productive = (
            f", {spent['productive'] / spent['elapsed']:.0%} of it in training steps"
            if spent.get("productive")
            else ""
        )
        # A rank knows the seconds of its own start alone.
        restarts = (
            f"after {self.restarts} restart{'s' * (self.restarts > 1)}; since the last one "
            if self.restarts
            else "in "
        )
        lines = [
            "",
            f"finished {self.end.step} steps {restarts}{duration(spent.get('elapsed', 0))}{productive}",
        ]
        losses = list(self.losses.values())
        if len(losses) >= 2 * MEAN_STEPS:
            first, last = _mean(losses[:MEAN_STEPS]), _mean(losses[-MEAN_STEPS:])
            lines.append(
                f"  training loss {first:.4f} → {last:.4f}  (means of the first and last {MEAN_STEPS} steps)"
            )
        if len(self.rewards) > 1:
            lines.append(
                f"  reward  {_number(self.rewards[0], '.4f')} → {_number(self.rewards[-1], '.4f')}  (the first and the last rollout)"
            )
        if len(self.evals) > 1:
            before, after = self.evals[0], self.evals[-1]
            both = [
                (name, before.metrics[name], value)
                for name, value in after.metrics.items()
                if name in before.metrics
            ]
            width = max([15, *(len(name) for name, _, _ in both)])
            lines += [
                f"  held-out {name:<{width}} {_score(name, one, '.4f')} → {_score(name, other, '.4f')}"
                for name, one, other in both
            ]
        if self.end.why:
            lines.append(f"  ended early: {self.end.why}")
        if isinstance(self.end.kwh, float):
            lines.append(
                f"  energy  {self.end.kwh:.3g} kWh of {'this start' if self.restarts else 'the run'}"
            )
        if self.sent:
            lines.append(
                f"  sent    {size(_mean(self.sent))} a rank and step, mean of {len(self.sent)} steps"
            )
        if self.profile:
            lines += self._operators(self.profile)
        if self.export and self.export.error:
            lines.append("  model   not exported: the note says why, and how to get it")
        elif self.export:
            lines.append(
                f"  model   {self.export.path}  (load it with transformers' from_pretrained)"
            )
        lines += [f"  events  {run_dir}/events.jsonl", "next:"]
        if Path(run_dir, "tensorboard").is_dir():
            lines.append(f"  tensorboard --logdir {run}/tensorboard")
        if self.start is not None and self.start.writes:
            lines.append(f"  drumline chat {run}        # talk to the model")
        if self.export is None:
            lines.append(f"  drumline export {run} --to my-model --dtype bf16")
        if Path("examples/own_data.yaml").exists():
            lines.append("  drumline train examples/own_data.yaml        # your own rows")
        return lines

    def render(self) -> RenderableType:
        """The live display: bar, loss, speed, memory, last checkpoint, and what the run waits for."""
        width = min(self.console.width, WIDEST)
        if not self.start:
            return Text("starting the ranks …", style="dim")
        step, steps = self.step.step if self.step else self.restored, self.start.steps or 1
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
        parts: list[RenderableType] = [bar]
        if self.step:
            parts.append(self._table(self.step))
        if waiting := self._waiting(step, steps):
            parts.append(waiting)
        title = _text(
            f"drumline · {self.start.run_dir}", style="bold", overflow="ellipsis", no_wrap=True
        )
        return Panel(
            Group(*parts), title=title, title_align="left", border_style="dim", width=width
        )

    def _table(self, now: events.Step) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        if losses := list(self.losses.values()):
            mean = (
                f"mean of {MEAN_STEPS} {_mean(losses[-MEAN_STEPS:]):.4f}"
                if len(losses) >= MEAN_STEPS
                else ""
            )
            table.add_row(
                "loss",
                Text(
                    "  ".join(
                        filter(None, [f"{losses[-1]:.4f} {trend(losses)}", mean, spark(losses)])
                    ),
                    style="green",
                ),
            )
        if self.evals:
            table.add_row(
                "held out", _text(f"{_metrics(self.evals[-1])} (step {self.evals[-1].step})")
            )
        mfu = f" · MFU {now.mfu:.1%}" if now.mfu else ""
        samples = (
            f" · {now.samples_per_s:.2f} samples/s"
            if events.has_tokens(now.tokens, now.samples)
            else ""
        )
        table.add_row("speed", f"{_speed(now)}{samples}{mfu}")
        computed = "compute" if now.comm_s is not None else "compute and waiting for others"
        waited = f" · waiting for others {now.comm_s:.2f} s" if now.comm_s is not None else ""
        table.add_row("time", f"data {now.data_s:.2f} s · {computed} {now.compute_s:.2f} s{waited}")
        if self.sent:
            table.add_row("sent", f"{size(_mean(self.sent))} a rank and step")
        table.add_row("rate", _text(f"lr {now.lr:.3g} · gradient norm {_number(now.grad_norm)}"))
        table.add_row("memory", self._memory())
        if self.save:
            ago, blocked = duration(time.time() - self.save.t), self.save.blocked_seconds
            table.add_row(
                "saved",
                f"step {self.save.step}, {ago} ago, {size(self.save.bytes)}, training waited {blocked:.2f} s",
            )
        return table

    def _waiting(self, step: int, steps: int) -> Text | None:
        """A line on what the run does between steps; None while steps go on."""
        if self.fault:
            then = "starting again …" if self.fault.action == "restart" else self.fault.action
            return _text(
                f"rank {self.fault.rank}: {self.fault.error} after step {self.fault.step} — {then}",
                style="bold red",
            )
        late = self.step is not None and time.time() - self.step.t > 1 + 3 * _mean(
            [*self.recent] or [0.0]
        )
        if (
            (not self.step or step == steps or late)
            and not self.end
            and (line := self.waits.line()) is not None
        ):
            return Text(line, style="dim")
        if not self.step:
            return Text("loading the model; the first step comes next", style="dim")
        if step == steps and not self.end:
            return Text("last evaluation, checkpoint and export …", style="dim")
        return None

    def _eta(self) -> str:
        steps, times = self._steps(), list(self.recent)
        return (
            duration((steps - self.step.step) * _mean(times))
            if steps and times and self.step
            else "–"
        )

    def _steps(self) -> int | None:
        return self.start.steps if self.start else None

    def _run_dir(self) -> str:
        return self.start.run_dir if self.start else "RUN"

    def _memory(self) -> str:
        ranks = (self.step and self.step.memory_bytes) or [0]
        if len(ranks) > 4:
            return f"{size(min(ranks))} to {size(max(ranks))} on {len(ranks)} ranks"
        return " · ".join(size(bytes_) for bytes_ in ranks) + (" a rank" if len(ranks) > 1 else "")


def _mean(values: list[float]) -> float:
    """The mean: single steps jump with their few samples, a mean shows the trend."""
    return math.fsum(values) / len(values)


def _text(line: str, **how: Any) -> Text:
    """One line without secrets, what a terminal takes for a command, and rich's markup."""
    return Text(printable(redact(line.replace("\n", " "))), **how)


def _metrics(event: events.Eval) -> str:
    return " · ".join(f"{name} {_score(name, value)}" for name, value in event.metrics.items())


def _rewarded(event: events.Rollout) -> str:
    """The mean reward of a rollout and its spread, or why it has none."""
    if event.reward is not None:
        return f"reward {_number(event.reward)} ± {_number(event.reward_std, '.3g')}"
    failed_episodes = event.episodes - event.left_out
    if failed_episodes == 0:
        return f"no reward (none applies to the {event.episodes} episodes)"
    if event.left_out == 0:
        return f"no reward (all {event.episodes} episodes failed)"
    return f"no reward ({failed_episodes} of {event.episodes} episodes failed, and none applies to the others)"


def _score(name: str, value: Any, form: str = ".4g") -> str:
    """A metric as text. A mean reward is null where no episode has a reward; any other null is NaN."""
    if value is None and "reward" in name.split("/"):
        return "none"
    return _number(value, form)


def _number(value: Any, form: str = ".4g") -> str:
    """A number of an event as text: null is NaN there, and inf a string."""
    return (
        "NaN"
        if value is None
        else format(value, form)
        if isinstance(value, float | int)
        else str(value)
    )


def _speed(step: events.Step) -> str:
    if events.has_tokens(step.tokens, step.samples):
        return f"{step.tokens_per_s:,.0f} tokens/s"
    return f"{step.samples_per_s:.4g} samples/s"
