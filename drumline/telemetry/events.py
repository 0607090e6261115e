"""events.jsonl: one JSON object a line, appended and flushed at once. It is the truth of a run; displays and trackers only repeat it."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.core.redact import plain
from drumline.errors import EnvironmentFault
from drumline.foreign import read_bytes

MOST_EVENTS = 2**33  # bytes: some ten million steps
PERIOD_SECONDS = 0.2  # between two looks at what somebody else has written
COUNTED = ("step", "eval", "save", "restore", "rollout", "preempt", "run_end")
# Of `measured`: what telemetry.truth.Measurement describes at more length.
MEASURED = {
    "step": "steps done",
    "final": "true: at the end of the run; false: as soon as a step was counted and some were timed",
    "by": "what saw the peak: `allocator` (a GPU, the whole run) or `tracker` (a CPU, one step); null where the run was too short",
    "memory": "bytes on the fullest rank: {parameters, gradients, optimizer, peak, reserved}; what is not known is left out; of a pipeline,"
    " the most on any rank of the stage with the highest peak",
    "by_rank": "the same of each rank: category → list",
    "host": "bytes: largest resident sets of a host's ranks added up, of the fullest host: {load, train, save}; train: until"
    " the first save, save: from then on",
    "ranks_per_host": "of the fullest host",
    "seconds": "of a step, median: {total, data, communication, optimizer, counted}; `total` without waiting for data; `counted`: of the"
    " one step under the tracker",
    "timed": "steps that were timed: all but the first two and the counted one",
    "traffic": "bytes that a rank sends in a step, mean over ranks and over the kinds of steps; null where it was not counted",
    "grows": "whether what is sent grows with the tokens of a micro-batch",
    "width": "tokens of the widest micro-batch where the peak was seen, as a part of those planned for",
}
# kind → its fields besides `t` (unix seconds) and `kind`, and what they mean. Each such event has them all; an eval has its metrics, too.
KINDS: dict[str, dict[str, str]] = {
    "run_start": {
        "world_size": "processes",
        "steps": "optimizer steps of the whole run",
        "parameters": "of the model; null where unknown",
        "strategy": "how the model is spread",
        "device": "cpu or cuda",
        "run_dir": "the run folder",
        "resumed_from": "what --resume said; null for a fresh start",
        "plan_line": "the plan in words",
        "left_out": "lines: how many rows of the data were cut, dropped or skipped",
    },
    "planned": {
        "memory": "bytes predicted by category, on the fullest rank, as plan.figures.Memory has them; `phase`: where its peak lies",
        "host": "bytes predicted of one host, all its ranks: {load, train, save}",
        "seconds": "predicted of a step, by category, and their `total`",
        "traffic": "bytes predicted that a rank sends in a step, by kind of collective, and their `total`",
        "verdict": "fits, tight or no",
        "limit": "bytes of a device's memory",
        "calibrated": "true: seconds are by rates that were measured here",
    },
    "measured": {
        **MEASURED,
        "off": "category → measured / predicted − 1, of memory, `host PHASE`, traffic, seconds; empty without a prediction",
        "warned": "categories that are off by more than 15%, of those that count (notes say which do not)",
        "warnings": "a line for each of them: predicted, measured, by how much",
        "notes": "lines: what could not be measured or compared, and why",
    },
    "step": {
        "step": "optimizer steps done, from 1; a step that is done again after a restart has a second event, and the last one counts",
        "loss": "mean over the learned tokens of the global batch; null is NaN",
        "lr": "learning rate of this step",
        "grad_norm": "global L2 norm before clipping",
        "tokens": "real tokens of the global batch, padding not counted",
        "samples": "samples (packs, where packing is on) of the global batch",
        "tokens_per_s": "over all ranks",
        "samples_per_s": "over all ranks",
        "mfu": "model FLOPs a second over the devices' peak; null where the peak is unknown",
        "seconds": "of the step, waiting for data included",
        "data_s": "seconds waiting for data, mean over ranks",
        "compute_s": "what is left of the seconds, mean over ranks",
        "comm_s": "seconds waiting for other ranks, mean over ranks; null where that is not measured and counts as computing",
        "sent_bytes": "that a rank sends to others in such a step, mean over ranks: counted at the collectives of one step of each kind,"
        " by the ring algorithm's shares (all-reduce of S bytes over n ranks: 2 (n - 1) / n × S); null until one was counted",
        "memory_bytes": "of each rank: the allocator's peak on a GPU, the resident set on a CPU",
        "epoch": "passes over the training samples so far; an algorithm adds figures of its own, a mixture of experts whose router loss is"
        " trained `router_loss` (a part of `loss`, without its coefficient) and `expert_load`: each expert's share of all choices",
    },
    "eval": {
        "step": "steps done before it",
        "samples": "held-out samples, or prompts",
        "seconds": "it took",
    },
    "rollout": {
        "step": "steps done after those that learned from it",
        "prompts": "in it",
        "drawn": "prompts that were rolled out for it; more than `prompts` where dynamic sampling passed over some",
        "episodes": "in it",
        "reward": "mean over its episodes; also as reward/DOMAIN; null where all rewards failed",
        "reward_std": "standard deviation over its episodes",
        "groups_differ": "part of the groups whose rewards are not all alike",
        "rewards": "reward → mean of its values, without its weight, as last sampled",
        "shares": "domain → part of the episodes",
        "failures": "reward → reason → episodes that it cost, as last sampled",
        "length": "mean tokens of a completion",
        "length_max": "tokens of the longest",
        "ended": "part of the completions that came to their end, and were not cut at max_new_tokens",
        "generate_s": "seconds that sampling took on rank 0, waiting for others included",
        "reward_s": "seconds of scoring",
        "infer_s": "seconds for log-probs, values and the reference's",
        "train_s": "seconds of the steps that learned from it",
    },
    "save": {
        "step": "of the state saved",
        "path": "the checkpoint; null where it failed",
        "seconds": "until it was whole on disk",
        "bytes": "written by all ranks",
        "blocked_seconds": "that training stood still for it",
        "error": "why it failed, or what was lost besides; null",
    },
    "reference": {
        "data": "train or eval",
        "pairs": "whose answers' log-probabilities under the reference model are known now",
        "found": "true: they were computed before, and read",
        "path": "the table of them",
        "seconds": "it took",
    },
    "restore": {
        "step": "that the run goes on after",
        "path": "the checkpoint; null where there was none yet",
        "seconds": "it took",
        "skipped": "damaged checkpoints passed over: [{path, reason}]",
    },
    "nonfinite": {
        "step": "whose update was not made",
        "policy": "stop, skip or rescale (fp16)",
        "loss": "null is NaN",
        "grad_norm": "null is NaN",
        "sample_ids": "of its global batch",
    },
    "fault": {
        "attempt": "count of starts before this one",
        "rank": "that failed first",
        "signal": "that killed it; null",
        "exitcode": "of that rank",
        "error": "in one line",
        "log": "file with what the rank printed",
        "step": "the last one done",
        "action": "restart, replan, or stop and why",
    },
    "replan": {
        "from": "what is left behind, as keys of the YAML",
        "to": "what the run goes on with, as keys of the YAML",
        "why": "which memory ran out, and what was wrong of the plan",
        "predicted_bytes": "of a device: {from, to}, peak of tensors",
        "plan": "file of the plan that was left; plan.json is the new one",
        "step": "the last one done",
    },
    "preempt": {"step": "saved", "signal": "that asked for it"},
    "export": {
        "path": "the Hugging Face folder",
        "seconds": "it took",
        "max_logit_difference": "between the trained model and the folder read back",
    },
    "run_end": {
        "status": "finished, preempted, stopped or failed",
        "exit_code": "see errors.py",
        "step": "the last one done",
        "goodput": "seconds of this process by what they went to: {elapsed, productive, startup, save, restore, recompute, eval, other}",
    },
}


class EventLog:
    """Appends events to a file. A run that was killed in the middle of a line goes on after it on a new one.

    A full disk costs no event and stops no run: what could not be written waits in memory for the next one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            torn = size > 0 and file.read(1) != b"\n"
        self._file = path.open("ab", buffering=0)
        self._waiting = b"\n" if torn else b""

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one event and return it as it was written: redacted, with NaN as null and inf as a string."""
        assert kind in KINDS, f"unknown kind of event {kind!r}"
        missing = set(KINDS[kind]) - set(fields)
        assert not missing, f"event {kind} lacks {missing}"
        event: dict[str, Any] = plain({"t": time.time(), "kind": kind, **fields})
        self._waiting += json.dumps(event, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        self._write()
        return event

    def _write(self) -> None:
        while self._waiting:
            try:
                written = self._file.write(self._waiting)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                return
            self._waiting = self._waiting[written or 0 :]


def read(path: Path) -> list[dict[str, Any]]:
    """All whole events of a file, in order; a line torn by a kill is passed over."""
    events = []
    fix = "move it away: a run writes its events there"
    for line in read_bytes(path, EnvironmentFault, fix, MOST_EVENTS).decode("utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _usable(event):
            events.append(event)
    return events


def _usable(event: dict[str, Any]) -> bool:
    """Whether what readers count with is there: a kind, a time and, where readers count with it, a step."""
    if not isinstance(event.get("kind"), str) or not isinstance(event.get("t", 0), int | float):
        return False
    return type(event.get("step")) is int or ("step" not in event and event["kind"] not in COUNTED)


def series(events: list[dict[str, Any]], field: str, kind: str = "step") -> dict[int, Any]:
    """Step → value, the last word on each step: one that was done again after a restart counts once."""
    return {e["step"]: e[field] for e in events if e["kind"] == kind and field in e}


class Tail:
    """Follows a file while somebody else writes it: hands each whole line that is appended from now on to `on_event`; what is left is
    handed over at the end."""

    def __init__(self, path: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.on_event = path, on_event
        self._offset = path.stat().st_size if path.exists() else 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)

    def __enter__(self) -> Tail:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._read()

    def _follow(self) -> None:
        while not self._done.wait(PERIOD_SECONDS):
            self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the next line is whole again
            self.on_event(event)
