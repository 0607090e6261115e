"""Log-probabilities of DPO's answers under the reference model, which are added to each batch.

There are three ways to get them:

- `precomputed`: a table over all pairs of a token cache is computed once before training, and
  kept in RUN/reference.
- `live`: a frozen model scores batch by batch.
- `adapter`: the policy itself scores batch by batch, with its adapter switched off.

Letters of shapes: N pairs of a cache; P pairs of a micro-batch; R rows of a pair (the chosen and
the rejected answer); B rows of a micro-batch, R · P: first the chosen answers of all pairs, then
the rejected ones. `reference_B`: the reference's log-probability of each row.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.algorithms.base import Referenced
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import add_up, sum_over_ranks
from drumline.dist.start import RankInfo
from drumline.engine.build import build_engine
from drumline.engine.engine import Engine
from drumline.errors import Preempted
from drumline.plan.plan import DataPlan, Plan
from drumline.system.files import whole_file
from drumline.system.signals import StopFlag
from drumline.telemetry import events
from drumline.train.data_loaders import Batches, DataLoaders

# Takes micro-batches, and returns the scores of each one, fp64[B].
ScoreBatches = Callable[[list[Any]], list[torch.Tensor]]
# A part of the tables' names. To be raised if the same models and pairs give other numbers.
VERSION = 2
KEY_DIGITS = 16


@dataclass(frozen=True)
class Reference:
    """The reference of one run on one rank."""

    plan: Plan
    ranks: RankInfo
    device: str
    engine: Engine
    algorithm: Referenced
    loaders: DataLoaders
    # Whether the engine's policy is untrained, so that it may be its own reference.
    is_untrained: bool
    emit: events.Emit
    stop_flag: StopFlag
    # How the pairs of each cache folder are scored. The first call fills it. After a rollback
    # another one finds it filled: a live reference would be a second model.
    scores_by_folder: dict[str, ScoreBatches]

    def add_to_data_loaders(self) -> DataLoaders:
        """Return the data loaders with the reference's log-probabilities in every batch.

        Collective. If a model scores batch by batch, taking a batch is collective, too.
        """
        data = self.plan.data
        assert data is not None, "workers get plans of prepared data"
        if not self.scores_by_folder:
            self.scores_by_folder.update(self._find_scores_by_folder(data))
        return add_to_all_batches(self.loaders, data, self._add_to_batches)

    def _add_to_batches(self, batches: Iterable[GlobalBatch], folder: str) -> Iterator[GlobalBatch]:
        """Yield batches of a cache folder with their scores."""
        return with_reference(batches, self.scores_by_folder[folder], self.algorithm.first_batch)

    def _find_scores_by_folder(self, data: DataPlan) -> dict[str, ScoreBatches]:
        """Return how the pairs of each cache folder are scored.

        That is by the policy without its adapter, by a frozen model, or by a look-up in the
        precomputed table of the folder. Collective: a model may be built, or a table computed.
        """
        folders = cache_folders(data)
        kind = self.plan.config.algorithm.reference_of(self.plan.config)
        if kind == "adapter":
            return dict.fromkeys(folders.values(), self._score_without_adapter)
        if kind == "live":
            frozen = build_engine(self.plan, self.device, role="reference")
            score = partial(frozen.infer, extract=self.algorithm.score)
            return dict.fromkeys(folders.values(), score)
        scores: dict[str, ScoreBatches] = {}
        for folder, table in self._load_or_build_tables(folders).items():
            scores[folder] = partial(_look_up, table)
        return scores

    def _score_without_adapter(self, batches: list[Any]) -> list[torch.Tensor]:
        """Score by the policy without its adapter, which is the model before training."""
        return self.engine.infer(batches, self.algorithm.score, adapter=False)

    def _load_or_build_tables(self, caches: dict[str, str]) -> dict[str, torch.Tensor]:
        """Return the table of each cache folder, by the folder. Collective.

        A table has the scores of the R rows of each of N samples, fp64[N, R]. The rows of a pair
        are the chosen and the rejected answer. `caches`: the folder of each part of the data.
        """
        rows = self.plan.batch.rows_per_sample
        tables: dict[str, torch.Tensor] = {}
        reference: Engine | None = None
        for part, folder in caches.items():
            began = time.time()
            name = f"{part}-{table_key(self.plan, folder)}.npy"
            path = Path(self.plan.run_dir) / "reference" / name
            pairs = len(TokenCache.open(Path(folder)))
            table = self._read_on_all_ranks(path, pairs, rows)
            is_found = table is not None
            if table is None:
                if reference is None:
                    reference = self._reference_engine()
                table = self._build_table(reference, folder, pairs, rows)
                if self.ranks.rank == 0:
                    write_table(path, table.cpu().numpy())
            tables[folder] = table
            event = events.Reference(
                data=part,
                pairs=pairs,
                found=is_found,
                path=str(path),
                seconds=time.time() - began,
            )
            self.emit(event)
        return tables

    def _read_on_all_ranks(self, path: Path, pairs: int, rows: int) -> torch.Tensor | None:
        """Return the table that rank 0 finds at `path`, on all ranks; None if it finds none.

        Collective.
        """
        table: torch.Tensor | None = None
        if self.ranks.rank == 0:
            # Only rank 0 reads, because it wrote the table: hosts need not share the run folder.
            table = read_table(path, (pairs, rows))
        (is_found,) = sum_over_ranks([float(table is not None)], self.device)
        if not is_found:
            return None
        if table is None:
            # The sum over the ranks is rank 0's table.
            table = torch.zeros(pairs, rows, dtype=torch.float64)
        return add_up(table.to(self.device))

    def _reference_engine(self) -> Engine:
        """Return an engine that scores as the reference model does.

        The policy can do that before its first step, or if switching its adapter off leaves the
        base model. Otherwise, or if the reference is another model, a frozen model is built.
        """
        config = self.plan.config
        is_another_model = getattr(config.algorithm, "reference_model", None) is not None
        if not is_another_model and (self.is_untrained or config.adapter.is_reference_if_disabled):
            return self.engine
        return build_engine(self.plan, self.device, role="reference")

    def _build_table(self, engine: Engine, folder: str, pairs: int, rows: int) -> torch.Tensor:
        """Return the table of a cache, scored by a model: fp64[pairs, rows]. Collective.

        Raises Preempted after a stop signal.
        """
        table = torch.zeros(pairs, rows, dtype=torch.float64, device=self.device)
        for batch in self.loaders.batches_of_folder(folder):
            (stop,) = sum_over_ranks([float(self.stop_flag.requested)], self.device)
            if stop:
                what = "stopped before the first step, while the reference was scored"
                raise Preempted(what, where=self.plan.run_dir, fix="go on with --resume")
            # Some adapters change their base layers as they are made. These cannot be switched off:
            # the model that training starts from is the one with the adapter.
            scores_of_micro_batches = engine.infer(
                batch.micro_batches,
                self.algorithm.score,
                adapter=not self.plan.config.adapter.is_reference_if_disabled,
            )
            scored = zip(batch.micro_batches, scores_of_micro_batches, strict=True)
            for micro_batch, scores_B in scored:
                # First the chosen answers of all pairs, then the rejected ones.
                scores_PR = scores_B.view(rows, -1).T
                is_real_P = micro_batch.real_P > 0
                table[micro_batch.samples_P[is_real_P]] = scores_PR[is_real_P]
        if not self.plan.mesh.is_counted(self.ranks.rank):
            # Another rank has the same pairs, and their scores are to be added once.
            table.zero_()
        return add_up(table)


def _look_up(table: torch.Tensor, batches: list[Any]) -> list[torch.Tensor]:
    """Return the scores of micro-batches from a table.

    Fillers (sample −1) get those of the last pair; they weigh nothing.
    """
    scores = []
    for micro_batch in batches:
        scores_PR = table[micro_batch.samples_P]
        # In the order of a model's scores: all chosen answers, then all rejected ones.
        scores.append(scores_PR.T.flatten())
    return scores


def with_reference(
    batches: Iterable[GlobalBatch], score: ScoreBatches, first_batch: Callable[[Any], Any]
) -> Iterator[GlobalBatch]:
    """Yield batches with the reference's log-probabilities in every micro-batch, as `reference_B`.

    If the first pass of the algorithm is about other rows, theirs are added as `first_reference_B`.
    """
    for batch in batches:
        micro_batches = batch.micro_batches
        first_batches = [first_batch(each) for each in micro_batches]
        filled = []
        for micro_batch, scores in zip(micro_batches, score(micro_batches), strict=True):
            filled.append(replace(micro_batch, reference_B=scores))
        both = zip(first_batches, micro_batches, strict=True)
        if any(first is not micro_batch for first, micro_batch in both):
            first_scores = score(first_batches)
            filled = [
                replace(micro_batch, first_reference_B=scores)
                for micro_batch, scores in zip(filled, first_scores, strict=True)
            ]
        yield replace(batch, micro_batches=filled)


def add_to_all_batches(
    loaders: DataLoaders,
    data: DataPlan,
    add: Callable[[Iterable[GlobalBatch], str], Iterator[GlobalBatch]],
) -> DataLoaders:
    """Return data loaders whose training and evaluation batches have passed through `add`.

    `add`: takes batches and their cache folder, and yields them with what is added.
    """

    def added_to_set(batches: Batches, folder: str) -> Batches:
        return lambda: add(batches(), folder)

    held_out = {}
    for name, batches in loaders.held_out.items():
        held_out[name] = added_to_set(batches, data.eval_caches[name])
    training = add(loaders.training, data.train_cache)
    return replace(loaders, training=training, held_out=held_out)


def cache_folders(data: DataPlan) -> dict[str, str]:
    """Return the cache folder of each part of the data: `train`, and `eval` or `eval-NAME`."""
    folders = {"train": data.train_cache}
    for name, folder in data.eval_caches.items():
        # The one set of a config that names none has the name "".
        folders[f"eval-{name}".rstrip("-")] = folder
    return folders


def table_key(plan: Plan, folder: str) -> str:
    """Return a hash, 16 hex digits, of all that a table depends on.

    That is the pairs' tokens (by the cache's own name), the reference's weights, and the precision.
    """
    role = plan.roles["reference"]
    parts = {
        "version": VERSION,
        "pairs": Path(folder).name,
        "model": role.model.model_dump(mode="json"),
        "quantize": getattr(plan.config.adapter, "quantize", None),
    }
    return hash_with_weights(plan, role.model, role.model_path, plan.frozen_precision, parts)


def hash_with_weights(
    plan: Plan, model: ModelConfig, model_path: str | None, precision: str, parts: dict[str, Any]
) -> str:
    """Return a hash, 16 hex digits, of `parts`, a model's weights and its precision.

    `model_path`: where the model is. `precision`: what it computes in.
    """
    seed: int | None = None
    if model.init == "random" or model.id is None:
        # Its weights are drawn.
        seed = plan.config.run.seed
    of_weights = {"files": weight_files(model_path), "seed": seed, "precision": precision}
    return hash_of(parts | of_weights)


def hash_of(parts: dict[str, Any]) -> str:
    """Return a hash, 16 hex digits, of values that JSON can hold."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def weight_files(model_path: str | None) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of change (ns) of a local model's files.

    There are none for a model of the hub, which its name and revision identify.
    """
    folder = Path(model_path or "")
    if model_path is None or not folder.is_dir():
        return []
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            stat = path.stat()
            files.append((path.name, stat.st_size, stat.st_mtime_ns))
    return files


def read_table(path: Path, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the table at `path`; None if it is missing, damaged or of another shape.

    `shape`: pairs, and rows of each pair.
    """
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    has_form = table.dtype == np.float64 and table.shape == shape
    if not has_form or not np.isfinite(table).all():
        return None
    return torch.from_numpy(table)


def write_table(path: Path, table: np.ndarray[Any, Any]) -> None:
    """Write a table, and delete those of the same part for other models or pairs.

    The file appears under its name only when all of it is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, durable=True) as file:
        np.save(file, table)
    part = path.name.rpartition("-")[0]
    for old in path.parent.glob("*.npy"):
        if old != path and old.name.rpartition("-")[0] == part:
            old.unlink()
