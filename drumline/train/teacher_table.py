"""Tables of a teacher's choices at learned tokens: on disk beside a token cache, or of one rollout in memory.

A *choice* is one of the K likeliest next tokens at a learned token.

Letters of shapes: N samples; M learned tokens of a sample, R of this rank's samples, T of all; K choices;
L = K + 1 log-probabilities, the last one of all other tokens together; J = K + L numbers, packed in one row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from drumline.data.cache import TokenCache, bounds
from drumline.dist.copies import copy_to_device
from drumline.dist.reduce import rows_of_all
from drumline.errors import EnvironmentFault, ModelError
from drumline.foreign import disk_errors
from drumline.models.choices import Choices
from drumline.plan.plan import Plan
from drumline.system.files import rename_unless_there, temporary_folder
from drumline.train.references import hash_of, hash_with_weights
from drumline.train.vocabulary import vocabulary_entries

# The packed choices of a sample at all its learned tokens, with the sample's number.
Answer = tuple[int, npt.NDArray[np.float32]]
# A part of the tables' names. Raise it if the same models and rows give other numbers.
VERSION = 1


@dataclass(frozen=True)
class ChoiceTable:
    """A teacher's choices at each of T learned tokens, sample after sample.

    The arrays are memory maps of files beside a cache, or in memory for the episodes of a rollout.

    `ids`: int32[T, K]. `log_probs`: fp32[T, L]. `first_tokens`: int64[N + 1], where the tokens of each
    sample begin, and the end of all.
    """

    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    first_tokens: npt.NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, cache: TokenCache, top_k: int) -> ChoiceTable | None:
        """Return the table in a folder; None if it is missing, damaged, or of other sizes."""
        try:
            ids = np.load(folder / "ids.npy", mmap_mode="r", allow_pickle=False)
            log_probs = np.load(folder / "log_probs.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        first_tokens = bounds(cache.target_counts)
        tokens = int(first_tokens[-1])
        has_types = ids.dtype == np.int32 and log_probs.dtype == np.float32
        if not has_types or ids.ndim != 2:
            return None
        choices = ids.shape[1]
        has_sizes = len(ids) == tokens and 0 < choices <= top_k
        if not has_sizes or log_probs.shape != (tokens, choices + 1):
            return None
        return cls(ids, log_probs, first_tokens)

    def choices_of(self, samples: Sequence[int], device: str) -> Choices:
        """Return the choices at the learned tokens of samples, in their order; -1 has none."""
        ids = [self.ids[:0]]
        log_probs = [self.log_probs[:0]]
        for sample in samples:
            if sample >= 0:
                start, stop = self.first_tokens[sample : sample + 2].tolist()
                ids.append(self.ids[start:stop])
                log_probs.append(self.log_probs[start:stop])
        ids_MK = torch.from_numpy(np.concatenate(ids).astype(np.int64))
        log_probs_ML = torch.from_numpy(np.concatenate(log_probs))
        return Choices(copy_to_device(device, ids_MK), copy_to_device(device, log_probs_ML))


class TableArrays(NamedTuple):
    """The two arrays of a table that is being written, see `ChoiceTable`."""

    ids: Any
    log_probs: Any

    @classmethod
    def create(cls, folder: Path, tokens: int, choices: int) -> TableArrays:
        """Create the files of a table in a folder. Raises EnvironmentFault if the disk is too full."""
        ids = _new_array(folder / "ids.npy", np.int32, (tokens, choices))
        log_probs = _new_array(folder / "log_probs.npy", np.float32, (tokens, choices + 1))
        return cls(ids, log_probs)


def write_table(answers: Iterator[Answer], cache: TokenCache, path: Path, top_k: int) -> None:
    """Write the answers for all samples of a cache as a table. It appears whole.

    Raises EnvironmentFault if the disk is too full, or the folder cannot be written.
    """
    first_tokens = bounds(cache.target_counts)
    tokens = int(first_tokens[-1])
    arrays: TableArrays | None = None
    with _table_folder(path) as folder:
        for sample, packed in answers:
            choices = packed.shape[1] // 2
            if arrays is None:
                arrays = TableArrays.create(folder, tokens, choices)
            start, stop = first_tokens[sample : sample + 2].tolist()
            arrays.ids[start:stop] = packed[:, :choices]
            arrays.log_probs[start:stop] = packed[:, choices:]
        if arrays is None:
            # Without a sample there is no answer that tells the number of choices.
            arrays = TableArrays.create(folder, tokens, choices=1)
        with _errors_of_disk(path.parent):
            arrays.ids.flush()
            arrays.log_probs.flush()
            rename_unless_there(
                folder,
                path,
                lambda: ChoiceTable.open(path, cache, top_k) is not None,
            )


def answers_of_all(
    own_samples: Sequence[int], rows_RJ: torch.Tensor, cache: TokenCache
) -> Iterator[Answer]:
    """Yield the packed choices of the samples of all ranks, on every rank. Collective.

    Raises ModelError on all ranks for what is no number.

    Args:
        own_samples: The samples of this rank.
        rows_RJ: Their packed choices at all learned tokens, end to end: fp32[R, J].
        cache: The cache that has the samples.
    """
    numbers = torch.tensor(own_samples, dtype=torch.int64, device=rows_RJ.device)
    samples_of_ranks = rows_of_all(numbers)
    rows_of_ranks = rows_of_all(rows_RJ)
    for samples, gathered_RJ in zip(samples_of_ranks, rows_of_ranks, strict=True):
        packed = gathered_RJ.cpu().numpy()
        _require_finite(packed)
        start = 0
        for sample in samples.tolist():
            stop = start + int(cache.target_counts[sample])
            yield sample, packed[start:stop]
            start = stop


def _require_finite(packed_MJ: npt.NDArray[np.float32]) -> None:
    """Raise ModelError for a teacher's NaN or infinity, which a table would keep for later runs."""
    if not np.isfinite(packed_MJ).all():
        raise ModelError(
            "some of its log-probabilities are NaN or infinite",
            where="algorithm.teacher",
            fix="use precision=bf16 or fp32, or another teacher",
        )


def _errors_of_disk(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises EnvironmentFault if a folder cannot be written."""
    return disk_errors("cannot be written", str(folder), EnvironmentFault, "set data.cache_dir")


@contextlib.contextmanager
def _table_folder(path: Path) -> Iterator[Path]:
    """Yield the temporary folder in which the table at `path` is made.

    Raises EnvironmentFault if there can be none: the cache may be another user's.
    """
    with contextlib.ExitStack() as stack:
        with _errors_of_disk(path.parent):
            folder = stack.enter_context(temporary_folder(path.parent))
        yield folder


def _new_array(path: Path, dtype: Any, shape: tuple[int, int]) -> Any:
    """Return the memory map of a new .npy file. Raises EnvironmentFault if the disk is too full."""
    with _errors_of_disk(path.parent):
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):
            # The file has holes so far. A write into one of a full disk would kill the process.
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def table_key(plan: Plan, folder: str) -> str:
    """Return a hash, 16 hex digits, of all that a table depends on.

    These are the tokens of the rows (the cache's name is a hash of rows and tokenizer), the teacher's
    weights, what is asked of it, and the precision. A teacher on servers is known by its name alone.
    """
    teaching = plan.config.algorithm.teaching
    assert teaching is not None, "the algorithm has a teacher"
    parts: dict[str, Any] = {
        "version": VERSION,
        "rows": Path(folder).name,
        "top_k": teaching.top_k,
        "temperature": teaching.temperature,
        "entries": vocabulary_entries(plan),
    }
    if teaching.served_teacher is not None:
        # Its weights cannot be seen: its name stands for them.
        return hash_of(parts | {"served": teaching.served_teacher.model})
    if teaching.is_own_teacher:
        model = plan.config.model
        quantize = getattr(plan.config.adapter, "quantize", None)
        parts |= {"base": model.model_dump(mode="json"), "quantize": quantize}
        return hash_with_weights(plan, model, plan.model_path, plan.precision, parts)
    role = plan.roles["teacher"]
    parts["teacher"] = role.model.model_dump(mode="json")
    return hash_with_weights(plan, role.model, role.model_path, plan.frozen_precision, parts)
