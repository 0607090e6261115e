"""A teacher's distributions at the learned tokens, which are added to each batch.

There are two ways to get them:

- `precomputed`: a table over all learned tokens of a token cache is computed once before training,
  and kept in the folder of the cache, where other runs find it.
- `live`: a frozen model answers batch by batch. For the whole vocabulary (`top_k` 0) the batch gets
  its hidden states, and the loss computes its logits from them, a few tokens at a time.

The teacher is a frozen model, the trained model with its adapter switched off, or a model on servers
(`train.served_teacher`).

Letters of shapes: M learned tokens of a micro-batch; K choices of each token, L = K + 1 log-probabilities,
J = K + L numbers, packed in one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.config.algorithm import TeachingSpec
from drumline.data.cache import TokenCache
from drumline.data.order import GlobalBatch
from drumline.dist.reduce import gather_from_ranks, sum_over_ranks
from drumline.dist.start import RankInfo
from drumline.engine.build import build_engine
from drumline.engine.engine import Engine
from drumline.errors import Preempted
from drumline.models.choices import Choices
from drumline.models.losses import LinearHead
from drumline.models.teaching import Teacher, TeacherStates
from drumline.plan.plan import DataPlan, Plan
from drumline.system.signals import StopFlag
from drumline.telemetry import events
from drumline.train.data_loaders import DataLoaders
from drumline.train.references import add_to_all_batches, cache_folders
from drumline.train.teacher_table import (
    Answer,
    ChoiceTable,
    answers_of_all,
    table_key,
    write_table,
)
from drumline.train.vocabulary import vocabulary_entries

# Takes micro-batches, and returns what the teacher says of each.
Ask = Callable[[list[Any]], list[Teacher]]
# Yields the answers for all samples of a cache, on every rank. Collective.
AnswersOfCache = Callable[[TokenCache], Iterator[Answer]]


@dataclass
class FrozenTeacher:
    """A teacher's engine, and how it answers for micro-batches.

    `entries`: entries of the trained model's vocabulary. A teacher may have more, which are padding.
    """

    engine: Engine
    teaching: TeachingSpec
    entries: int
    keeps_head: bool
    # Whether the engine's adapter is switched on while it answers.
    adapter: bool = True
    head: LinearHead | None = field(default=None, init=False)

    def ask(self, micro_batches: list[Any]) -> list[Teacher]:
        """Return what the teacher says of each micro-batch. Collective."""
        if self.teaching.top_k:
            packed = self.packed_answers(micro_batches)
            return [_unpack(packed_MJ) for packed_MJ in packed]
        hidden = self.engine.infer(micro_batches, self._states, self.adapter)
        # Without a head, on the ranks of a pipeline that compute no loss.
        head = self.head or LinearHead(torch.empty(0))
        return [TeacherStates(hidden_ME, head) for hidden_ME in hidden]

    def packed_answers(self, micro_batches: list[Any]) -> list[torch.Tensor]:
        """Return `packed_choices` of each micro-batch. Collective."""
        return self.engine.infer(micro_batches, self.packed_choices, self.adapter)

    def packed_choices(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the choices at the learned tokens in one tensor, fp32[M, J]."""
        teaching = self.teaching
        choices = outputs.top_choices(
            batch.targets_BT,
            teaching.top_k,
            self.entries,
            teaching.loss_chunk,
            teaching.temperature,
        )
        # fp32 holds whole numbers up to 16 million, and no vocabulary is as large.
        return torch.cat((choices.ids_MK.float(), choices.log_probs_ML.float()), 1)

    def _states(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the hidden states at the learned tokens, [M, E], and keep the head."""
        states: TeacherStates = outputs.states(batch.targets_BT)
        if self.head is None:
            self.head = states.head
            if not self.keeps_head:
                # What is gathered for this forward is freed after it. Frozen weights do not change.
                self.head = states.head.each(torch.clone)
        return states.hidden_ME


def build_teacher(plan: Plan, policy: Engine, device: str) -> FrozenTeacher:
    """Return the teacher of a run, spread as the trained model is. Collective.

    `policy`: the engine of the trained model, which without its adapter may be the teacher itself.
    """
    teaching = plan.config.algorithm.teaching
    assert teaching is not None, "the algorithm has a teacher"
    engine = policy
    if not teaching.is_own_teacher:
        engine = build_engine(plan, device, role="teacher")
    return FrozenTeacher(
        engine,
        teaching,
        vocabulary_entries(plan),
        keeps_head=plan.config.strategy.whole_weights,
        adapter=not teaching.is_own_teacher,
    )


def _unpack(packed_MJ: torch.Tensor) -> Choices:
    """Return the choices of `packed_choices`; J = K + L = 2 K + 1."""
    choices = packed_MJ.shape[1] // 2
    ids_MK, log_probs_ML = packed_MJ.split([choices, choices + 1], 1)
    # A copy, so that the packed numbers are freed.
    return Choices(ids_MK.long(), log_probs_ML.clone())


@dataclass(frozen=True)
class TeacherLoaders:
    """Adds the teacher's distributions to the data loaders of one run on one rank."""

    plan: Plan
    ranks: RankInfo
    device: str
    # The engine of the trained model.
    engine: Engine
    loaders: DataLoaders
    emit: events.Emit
    stop_flag: StopFlag
    # How the teacher is asked about the samples of each cache folder. The first call fills it. After
    # a rollback another one finds it filled: a live teacher would be a second model.
    ask_by_folder: dict[str, Ask]

    @property
    def teaching(self) -> TeachingSpec:
        """The algorithm's settings of the teacher."""
        teaching = self.plan.config.algorithm.teaching
        assert teaching is not None, "the algorithm has a teacher"
        return teaching

    def add_to_data_loaders(self) -> DataLoaders:
        """Return the data loaders with the teacher's distributions in every batch.

        Collective. If the teacher is live, taking a batch is collective, too.
        """
        data = self.plan.data
        assert data is not None, "workers get plans of prepared data"
        if not self.ask_by_folder:
            self.ask_by_folder.update(self._find_ask_by_folder(data))
        return add_to_all_batches(self.loaders, data, self._add_to_batches)

    def _add_to_batches(self, batches: Iterable[GlobalBatch], folder: str) -> Iterator[GlobalBatch]:
        """Yield batches of a cache folder, taught."""
        return with_teacher(batches, self.ask_by_folder[folder])

    def _find_ask_by_folder(self, data: DataPlan) -> dict[str, Ask]:
        """Return how the teacher is asked about the samples of each cache folder. Collective."""
        folders = cache_folders(data)
        if self.teaching.asks_teacher_live:
            teacher = build_teacher(self.plan, self.engine, self.device)
            return dict.fromkeys(folders.values(), teacher.ask)
        tables = self._load_or_build_tables(folders)
        asks: dict[str, Ask] = {}
        for folder, table in tables.items():
            asks[folder] = partial(_look_up, table, self.device)
        return asks

    def _load_or_build_tables(self, caches: dict[str, str]) -> dict[str, ChoiceTable]:
        """Return the table of each cache folder, by the folder. Collective.

        `caches`: the folder of each part of the data.
        """
        tables: dict[str, ChoiceTable] = {}
        answers_of: AnswersOfCache | None = None
        for part, folder in caches.items():
            began = time.time()
            cache = TokenCache.open(Path(folder))
            path = Path(folder) / "teachers" / table_key(self.plan, folder)
            table = ChoiceTable.open(path, cache, self.teaching.top_k)
            # Each host has a cache of its own, unless they share it.
            is_found = all(gather_from_ranks(table is not None))
            if not is_found:
                if answers_of is None:
                    answers_of = self._build_answers_of_cache()
                self._build_table(answers_of, cache, path)
                table = ChoiceTable.open(path, cache, self.teaching.top_k)
            assert table is not None, "the table was written a moment ago"
            tables[folder] = table
            event = events.Teacher(
                data=part,
                tokens=len(table.ids),
                found=is_found,
                path=str(path),
                seconds=time.time() - began,
            )
            self.emit(event)
        return tables

    def _build_answers_of_cache(self) -> AnswersOfCache:
        """Return how the teacher is asked about all samples of a cache. Collective."""
        served = self.teaching.served_teacher
        if served is not None:
            # Imported here, as importing the client takes a second.
            from drumline.train.served_teacher import answers_of_cache, connect

            servers = connect(self.plan, served)
            return partial(
                answers_of_cache,
                servers,
                device=self.device,
                raise_if_stopping=self._raise_if_stopping,
            )
        teacher = build_teacher(self.plan, self.engine, self.device)
        return partial(self._answers, teacher)

    def _build_table(self, answers_of: AnswersOfCache, cache: TokenCache, path: Path) -> None:
        """Compute the table of a cache, and write it to `path` on each host. Collective.

        Raises Preempted after a stop signal.
        """
        if self.ranks.local_rank != 0:
            for _ in answers_of(cache):
                pass
        else:
            write_table(answers_of(cache), cache, path, self.teaching.top_k)
        # All ranks read the files that the first of each host has written.
        gather_from_ranks(None)

    def _answers(self, teacher: FrozenTeacher, cache: TokenCache) -> Iterator[Answer]:
        """Yield the packed choices of each sample of a cache, on every rank. Collective.

        Raises Preempted after a stop signal, and ModelError on all ranks for what is no number.
        """
        is_counted = self.plan.mesh.is_counted(self.ranks.rank)
        for batch in self.loaders.batches_of_folder(str(cache.folder)):
            self._raise_if_stopping()
            packed = teacher.packed_answers(batch.micro_batches)
            samples = _samples_with_numbers(batch.micro_batches)
            rows_RJ = torch.cat(packed)
            if not is_counted:
                # Another rank has the same samples.
                samples = []
                rows_RJ = rows_RJ[:0]
            yield from answers_of_all(samples, rows_RJ, cache)

    def _raise_if_stopping(self) -> None:
        """Raise Preempted on all ranks if a stop signal has come. Collective."""
        (stop,) = sum_over_ranks([float(self.stop_flag.requested)], self.device)
        if stop:
            what = "stopped before the first step, while the teacher was asked"
            raise Preempted(what, where=self.plan.run_dir, fix="go on with --resume")


def _samples_with_numbers(micro_batches: Sequence[Any]) -> list[int]:
    """Return the samples of micro-batches in their order, without fillers."""
    samples: list[int] = []
    for micro_batch in micro_batches:
        samples += [sample for sample in micro_batch.samples if sample >= 0]
    return samples


def _look_up(table: ChoiceTable, device: str, micro_batches: list[Any]) -> list[Teacher]:
    """Return the choices of micro-batches from a table."""
    return [table.choices_of(micro_batch.samples, device) for micro_batch in micro_batches]


def with_teacher(batches: Iterable[GlobalBatch], ask: Ask) -> Iterator[GlobalBatch]:
    """Yield batches with the teacher's distributions in every micro-batch, as `teacher`."""
    for batch in batches:
        yield replace(batch, micro_batches=add_teacher(batch.micro_batches, ask))


def add_teacher(micro_batches: list[Any], ask: Ask) -> list[Any]:
    """Return micro-batches with the teacher's distributions, as `teacher`. Collective if it is live."""
    taught = []
    for micro_batch, teacher in zip(micro_batches, ask(micro_batches), strict=True):
        taught.append(replace(micro_batch, teacher=teacher))
    return taught
