"""The reference model's log-probabilities of the answers of DPO's pairs, put into each batch before its step.

`precomputed`: a table over all pairs of a token cache, made once by the strategy of the run and kept in RUN/reference; `live`: a frozen
copy scores batch by batch; `adapter`: the policy itself does, its adapter switched off.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.algorithms.base import Referenced
from drumline.core.files import whole_file
from drumline.core.plan import DataPlan, Plan
from drumline.core.signals import StopFlag
from drumline.data.cache import TokenCache
from drumline.data.stream import GlobalBatch
from drumline.dist.reduce import add_up, sum_over_ranks
from drumline.dist.start import Ranks
from drumline.errors import Preempted
from drumline.parallel.engine import Engine
from drumline.strategies.build import build_engine
from drumline.telemetry import events
from drumline.train.streams import Batches, Streams

ScoreBatches = Callable[[list[Any]], list[torch.Tensor]]  # micro-batches → fp64[B] of each
VERSION = 2  # raise it when the same models and pairs give other numbers


@dataclass(frozen=True)
class Reference:
    """The reference of one run on one rank. `fresh`: `engine`'s policy has not been trained yet, so it may be its own reference."""

    plan: Plan
    ranks: Ranks
    device: str
    engine: Engine
    algorithm: Referenced
    streams: Streams
    fresh: bool
    emit: events.Emit
    stop_flag: StopFlag

    def prepared(self) -> Streams:
        """The streams, with the reference's log-probabilities in every batch. Collective, and so is drawing where a model scores."""
        data = self.plan.data
        assert data is not None, "workers get plans of prepared data"
        score = self._scores(data)
        training = with_reference(
            self.streams.training, score(data.train_cache), self.algorithm.first_batch
        )

        def scored(name: str, batches: Batches) -> Batches:
            of_set = score(data.eval_caches[name])
            return lambda: with_reference(batches(), of_set, self.algorithm.first_batch)

        return replace(
            self.streams,
            training=training,
            held_out={name: scored(name, b) for name, b in self.streams.held_out.items()},
        )

    def _scores(self, data: DataPlan) -> Callable[[str], ScoreBatches]:
        """What scores the pairs of a cache folder."""
        kind = self.plan.config.algorithm.reference_of(self.plan.config)
        if kind == "adapter":
            return lambda _: (
                lambda batches: self.engine.infer(batches, self.algorithm.score, adapter=False)
            )
        if kind == "live":
            frozen = build_engine(self.plan, self.device, role="reference")
            return lambda _: lambda batches: frozen.infer(batches, self.algorithm.score)
        tables = self._tables(
            {
                "train": data.train_cache,
                **{f"eval-{name}".rstrip("-"): at for name, at in data.eval_caches.items()},
            }
        )
        # Of fillers (sample −1) those of the last pair, which weigh nothing.
        return lambda folder: (
            lambda batches: [tables[folder][batch.samples_P].T.flatten() for batch in batches]
        )

    def _tables(self, caches: dict[str, str]) -> dict[str, torch.Tensor]:
        """fp64[N, R] of each cache: what the R rows of its N samples score (of pairs: chosen, rejected). Collective."""
        rows = self.plan.batch.rows_per_sample
        tables: dict[str, torch.Tensor] = {}
        scorer: Engine | None = None
        for role, folder in caches.items():
            began = time.time()
            path = Path(self.plan.run_dir) / "reference" / f"{role}-{key(self.plan, folder)}.npy"
            pairs = len(TokenCache.open(Path(folder)))
            table = read_table(path, (pairs, rows)) if self.ranks.rank == 0 else None
            (found,) = sum_over_ranks([float(table is not None)], self.device)
            if found:
                tables[folder] = add_up(
                    (torch.zeros(pairs, rows, dtype=torch.float64) if table is None else table).to(
                        self.device
                    )
                )
            else:
                scorer = scorer or self._scorer()
                tables[folder] = self._score(scorer, folder, pairs, rows)
                if self.ranks.rank == 0:
                    write_table(path, tables[folder].cpu().numpy())
            self.emit(
                events.Reference(
                    data=role,
                    pairs=pairs,
                    found=bool(found),
                    path=str(path),
                    seconds=time.time() - began,
                )
            )
        return tables

    def _scorer(self) -> Engine:
        """An untrained model: the policy before its first step, or without an adapter that leaves the base model as it was; otherwise a
        frozen one built for it."""
        config = self.plan.config
        other = getattr(config.algorithm, "reference_model", None) is not None
        if not other and (self.fresh or config.adapter.switches):
            return self.engine
        return build_engine(self.plan, self.device, role="reference")

    def _score(self, engine: Engine, folder: str, pairs: int, rows: int) -> torch.Tensor:
        table = torch.zeros(pairs, rows, dtype=torch.float64, device=self.device)
        for batch in self.streams.once(folder):
            (stop,) = sum_over_ranks([float(self.stop_flag.requested)], self.device)
            if stop:
                what = "stopped before the first step, while the reference was scored"
                raise Preempted(what, where=self.plan.run_dir, fix="go on with --resume")
            # An adapter that has taken something out of its base layers is part of the model that training starts from.
            scores = engine.infer(
                batch.micro_batches,
                self.algorithm.score,
                adapter=not self.plan.config.adapter.switches,
            )
            for pair, answer in zip(batch.micro_batches, scores, strict=True):
                real = pair.real_P > 0
                table[pair.samples_P[real]] = answer.view(rows, -1).T[real]
        if not self.plan.mesh.counts(self.ranks.rank):
            table.zero_()  # another rank has the same pairs
        return add_up(table)


def with_reference(
    batches: Iterable[GlobalBatch], score: ScoreBatches, first_batch: Callable[[Any], Any]
) -> Iterator[GlobalBatch]:
    """`batches` with the reference's log-probabilities in every micro-batch: `reference_B`, and `first_reference_B` where the first pass is
    about other rows."""
    for batch in batches:
        own, firsts = batch.micro_batches, [first_batch(each) for each in batch.micro_batches]
        filled = [
            replace(each, reference_B=scores) for each, scores in zip(own, score(own), strict=True)
        ]
        if any(first is not each for first, each in zip(firsts, own, strict=True)):
            filled = [
                replace(each, first_reference_B=scores)
                for each, scores in zip(filled, score(firsts), strict=True)
            ]
        yield replace(batch, micro_batches=filled)


def key(plan: Plan, folder: str) -> str:
    """16 hex digits over all that a table depends on: the pairs' tokens (the cache's own name), the reference's weights, and precision."""
    config = plan.config
    role = plan.roles["reference"]
    parts = {
        "version": VERSION,
        "pairs": Path(folder).name,
        "model": role.model.model_dump(mode="json"),
        "files": weight_files(role.model_path),
        "seed": config.run.seed if role.model.init == "random" or role.model.id is None else None,
        "quantize": getattr(config.adapter, "quantize", None),
        "precision": plan.precision,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def weight_files(model_path: str | None) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change (ns) of a local model's files; a hub id has its name and revision."""
    folder = Path(model_path or "")
    if model_path is None or not folder.is_dir():
        return []
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def read_table(path: Path, shape: tuple[int, int]) -> torch.Tensor | None:
    """The table at `path`; None where there is none, or it is not a whole one of (samples, rows of each)."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = table.dtype == np.float64 and table.shape == shape and bool(np.isfinite(table).all())
    return torch.from_numpy(table) if whole else None


def write_table(path: Path, table: np.ndarray[Any, Any]) -> None:
    """The table appears whole under its name; those that other models or pairs left go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, durable=True) as file:
        np.save(file, table)
    of = path.name.rpartition("-")[0]
    for old in path.parent.glob("*.npy"):
        if old != path and old.name.rpartition("-")[0] == of:
            old.unlink()
