"""What the user sees while a run goes on: a live display on a terminal, one plain line an event elsewhere. It only repeats events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_PER_SECOND = 4
PLAIN_STEP_LINES = 20
MEAN_STEPS = 6
SPARKS = "▁▂▃▄▅▆▇█"


def spark(values: list[float], width: int = 24) -> str:
    """The last values as a line of blocks, the lowest at the bottom."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    return "".join(SPARKS[int((v - low) / (high - low) * (len(SPARKS) - 1))] if high > low else SPARKS[0] for v in shown)


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size(bytes_: float) -> str:
    """Bytes in MiB below one GiB, in GiB from there on."""
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.1f} MiB"


class Progress:
    """A consumer of event dicts; use it as a context manager. `on_event` may be called from another thread."""

    def __init__(self, console: Console, past: Iterable[dict[str, Any]] = ()) -> None:
        """`past`: events of the run before this process, so that a resumed run still knows its first evaluation."""
        self.console = console
        self.start: dict[str, Any] = {}
        self.step: dict[str, Any] = {}
        self.save: dict[str, Any] = {}
        self.export: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.evals = [event for event in past if event["kind"] == "eval"]
        self.losses: list[float] = []
        self.recent: deque[float] = deque(maxlen=20)
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self.render)
            self.live.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*arguments)
        if self.end.get("status") == "finished":
            for line in self.summary():
                self._say(line)

    def on_event(self, event: dict[str, Any]) -> None:
        """Take an event in; unknown kinds are left to others."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    # ------------------------------------------------------------------------------------------------------ one an event

    def _on_run_start(self, event: dict[str, Any]) -> None:
        if not self.start:
            self._say(f"plan: {event['plan_line']}")
        self.start = event

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event
        self.losses.append(event["loss"] if isinstance(event["loss"], float | int) else float("nan"))
        self.recent.append(event["seconds"])
        steps = self.start.get("steps") or 0
        every = max(1, steps // PLAIN_STEP_LINES)
        if self.live is None and (event["step"] % every == 0 or event["step"] in (1, steps)):
            self._say(
                f"step {event['step']}/{steps or '?'}  loss {self.losses[-1]:.4f} (mean {self._mean(-MEAN_STEPS, None):.3f})"
                f"  lr {event['lr']:.3g}  |g| {_number(event['grad_norm'])}  {event['tokens_per_s']:.0f} tok/s"
                f"  ETA {self._eta()}  memory {self._memory()}"
            )

    def _on_eval(self, event: dict[str, Any]) -> None:
        self.evals.append(event)
        self._say(f"held out, step {event['step']}: {_figures(event)}  ({event['samples']} samples)")

    def _on_save(self, event: dict[str, Any]) -> None:
        self.save = event
        if event["error"]:
            self._say(f"checkpoint of step {event['step']}: {event['error']}" + ("" if event["path"] else " — the run goes on"))
        elif self.live is None:
            self._say(f"checkpoint of step {event['step']}: {size(event['bytes'])} in {event['seconds']:.1f} s")

    def _on_restore(self, event: dict[str, Any]) -> None:
        for skipped in event["skipped"]:
            self._say(f"passed over a damaged checkpoint: {skipped['reason']}")
        where = f"from {event['path']}" if event["path"] else "no checkpoint yet"
        self._say(f"going on at step {event['step']}, {where}")

    def _on_nonfinite(self, event: dict[str, Any]) -> None:
        self._say(
            f"step {event['step']}: loss {_number(event['loss'])}, gradient norm {_number(event['grad_norm'])} — {event['policy']}"
            f" (samples {', '.join(map(str, event['sample_ids'][:8]))}{'…' * (len(event['sample_ids']) > 8)})"
        )

    def _on_preempt(self, event: dict[str, Any]) -> None:
        self._say(f"{event['signal']}: saved at step {event['step']}")

    def _on_export(self, event: dict[str, Any]) -> None:
        self.export = event

    def _on_run_end(self, event: dict[str, Any]) -> None:
        self.end = event

    # ------------------------------------------------------------------------------------------------------ the pictures

    def summary(self) -> list[str]:
        """Before and after, where the result lies, and what to try next."""
        run_dir = self.start.get("run_dir", "RUN")
        lines = ["", f"finished {self.end['step']} steps in {duration(self.end['goodput'].get('elapsed', 0))}"]
        if len(self.losses) >= 2 * MEAN_STEPS:
            lines.append(
                f"  training loss {self._mean(None, MEAN_STEPS):.4f} → {self._mean(-MEAN_STEPS, None):.4f}"
                f"  (means of the first and last {MEAN_STEPS} steps)"
            )
        if len(self.evals) > 1:
            before, after = self.evals[0], self.evals[-1]
            lines += [f"  held-out {name:<15} {before[name]:.4f} → {after[name]:.4f}" for name in _names(after) if name in before]
        if self.export:
            lines.append(f"  model   {self.export['path']}  (load it with transformers' from_pretrained)")
        lines += [f"  events  {run_dir}/events.jsonl", "next:"]
        if Path(run_dir, "tensorboard").is_dir():
            lines.append(f"  tensorboard --logdir {run_dir}/tensorboard")
        lines += [
            f"  drumline export {run_dir} --to my-model --dtype bf16",
            "  drumline train examples/own_data.yaml        # your own rows",
        ]
        return lines

    def render(self) -> RenderableType:
        """The live part: bar, loss, speed, memory, last checkpoint."""
        if not self.start:
            return Text("starting the ranks …", style="dim")
        step, steps = self.step.get("step", 0), self.start.get("steps") or 1
        bar = Table.grid(padding=(0, 1), expand=False)
        bar.add_row(
            Text(f"step {step}/{steps}", style="bold"),
            ProgressBar(total=steps, completed=step, width=32),
            Text(f"ETA {self._eta()}", style="cyan"),
        )
        if not self.step:
            return Group(bar, Text("loading the model; the first step comes next", style="dim"))
        figures = Table.grid(padding=(0, 2))
        figures.add_row(
            "loss",
            Text(f"{self.losses[-1]:.4f}  mean of {MEAN_STEPS} {self._mean(-MEAN_STEPS, None):.4f}  {spark(self.losses)}", style="green"),
        )
        speed = f"{self.step['tokens_per_s']:,.0f} tokens/s · {self.step['samples_per_s']:.2f} samples/s"
        if self.step.get("mfu"):
            speed += f" · MFU {self.step['mfu']:.1%}"
        figures.add_row("speed", speed)
        figures.add_row(
            "time",
            f"data {self.step['data_s']:.2f} s · compute {self.step['compute_s']:.2f} s · waiting for others {self.step['comm_s']:.2f} s",
        )
        figures.add_row("rate", f"lr {self.step['lr']:.3g} · gradient norm {_number(self.step['grad_norm'])}")
        figures.add_row("memory", self._memory())
        if self.evals:
            figures.add_row("held out", f"{_figures(self.evals[-1])} (step {self.evals[-1]['step']})")
        if self.save.get("path"):
            ago = duration(time.time() - self.save["t"])
            figures.add_row(
                "saved",
                f"step {self.save['step']}, {ago} ago, {size(self.save['bytes'])}, training waited {self.save['blocked_seconds']:.2f} s",
            )
        return Group(bar, figures)

    def _eta(self) -> str:
        steps = self.start.get("steps")
        if not steps or not self.recent:
            return "–"
        return duration((steps - self.step["step"]) * sum(self.recent) / len(self.recent))

    def _mean(self, start: int | None, stop: int | None) -> float:
        """Mean loss of some steps: single ones jump with what their few samples happen to be."""
        shown = self.losses[start:stop]
        return sum(shown) / len(shown)

    def _memory(self) -> str:
        ranks = self.step.get("memory_bytes") or [0]
        if len(ranks) > 4:
            return f"{size(min(ranks))} to {size(max(ranks))} on {len(ranks)} ranks"
        return " · ".join(size(bytes_) for bytes_ in ranks) + (" a rank" if len(ranks) > 1 else "")


def _names(event: dict[str, Any]) -> list[str]:
    return [name for name in event if name not in ("t", "kind", "step", "samples", "seconds")]


def _figures(event: dict[str, Any]) -> str:
    return " · ".join(f"{name} {_number(event[name])}" for name in _names(event))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)
