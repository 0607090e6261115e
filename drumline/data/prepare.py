"""The token caches of a config: which there are, what they hold, and making those that are missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from drumline.core.config import Config
from drumline.core.data import Source
from drumline.core.mixing import epoch_counts
from drumline.core.plan import DataIdentity, DataPlan, SourcePlan
from drumline.core.rollouts import require_room
from drumline.core.rules import compared_images
from drumline.data.blocks import begin, is_begun, read_ledger
from drumline.data.cache import TokenCache, left_out, read_info, verify
from drumline.data.encode import OWN
from drumline.data.files import root_of
from drumline.data.fingerprint import cache_key, identify
from drumline.data.images import lacks_images
from drumline.data.make import Progress, Task, make
from drumline.data.sources import domains
from drumline.errors import ConfigError, DataError
from drumline.models.vision import Vision


def prepare(
    config: Config,
    tokenizer_path: str,
    base_dir: Path,
    on_progress: Progress | None = None,
    vision: Vision | None = None,
    check: bool = False,
) -> DataPlan:
    """What the caches of `config.data` hold, which are made if they do not exist, or their images were lost. `on_progress(phase, rows done,
    all rows if known)`: the phases are "hash" (of the input), "tokenise", "pack". `vision`: of a vision-language model. `check`: verify the
    caches that exist, and make damaged ones again. Raises DataError for input that cannot be used, PlanError for what cannot be compared,
    EnvironmentFault for a disk that cannot be written."""
    for refusal in compared_images(config, vision is not None):
        raise refusal.error()
    progress = on_progress or (lambda phase, done, total: None)
    progress("hash", 0, None)
    tasks = _tasks(config, tokenizer_path, base_dir, vision)
    for task in tasks:
        for folder in task.folders:
            if (check and _is_damaged(folder)) or _lacks_images(folder):
                shutil.rmtree(folder)
        if not _done(task):
            (
                begin(task, tokenizer_path, base_dir)
                if task.streams
                else make(task, tokenizer_path, base_dir, progress)
            )
    return _plan(tasks)


def cached(
    config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None = None
) -> DataPlan | None:
    """The same if all of the caches exist, else None."""
    tasks = _tasks(config, tokenizer_path, base_dir, vision)
    lost = any(_lacks_images(folder) for task in tasks for folder in task.folders)
    return _plan(tasks) if all(map(_done, tasks)) and not lost else None


def _is_damaged(folder: Path) -> bool:
    try:
        verify(folder, (read_info(folder) or {"sha256": {}})["sha256"])
    except DataError:
        return True
    return False


def _lacks_images(folder: Path) -> bool:
    return read_info(folder) is not None and lacks_images(TokenCache.open(folder))


def _done(task: Task) -> bool:
    return is_begun(task.folder) if task.streams else task.done


def _tasks(
    config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None
) -> list[Task]:
    data = config.data
    root = root_of(data)
    if data.eval and data.holdout:
        raise ConfigError(
            "data.holdout and data.eval are two ways to say the same",
            where="data.holdout",
            fix="keep one of them",
        )
    require_room(config.algorithm.new_tokens, data.max_length)

    def folder(sources: list[Source], role: str) -> Path:
        return root / cache_key(config, sources, role, tokenizer_path, base_dir, vision)

    tasks = [
        Task(
            config,
            data.train,
            folder(data.train, "train"),
            folder(data.train, "holdout") if data.holdout else None,
            vision,
        )
    ]
    for name, sources in data.eval_sets.items():
        tasks.append(Task(config, sources, folder(sources, "eval"), None, vision, name))
    return tasks


def _plan(tasks: list[Task]) -> DataPlan:
    config, vision, streams = tasks[0].config, tasks[0].vision, tasks[0].streams
    train = None if streams else TokenCache.open(tasks[0].folder)
    info = read_ledger(tasks[0].folder)["first"] if train is None else train.info
    folders = {task.eval_set: task.folder for task in tasks if task.eval_set is not None}
    if tasks[0].holdout_folder is not None:
        folders = {"": tasks[0].holdout_folder}
    held_out = {name: TokenCache.open(folder) for name, folder in folders.items()}
    left = [
        line
        for name, cache in held_out.items()
        for line in left_out(f"eval.{name}".rstrip("."), cache.info)
    ]
    if train is not None:
        config.algorithm.check_rows(train)
    sources, key = _sources(config, info), tasks[0].folder.name
    of_stream = DataIdentity(
        cache=str(tasks[0].folder), content=key, rows=info["rows"], row_set=int(key[:12], 16)
    )
    return DataPlan(
        train_cache=str(tasks[0].folder),
        eval_caches={name: str(cache.folder) for name, cache in held_out.items()},
        train_samples=info["samples"],
        train_tokens=info["tokens"],
        train_learned=info["learned"],
        eval_samples=sum(map(len, held_out.values())),
        images=info.get("images", 0),
        image_tokens=info.get("patches", 0) // vision.merge**2 if vision else 0,
        samples_with_images=info.get("samples_with_images", 0),
        labels=() if train is None else config.algorithm.classes(train, [*held_out.values()]),
        identity=of_stream if train is None else identify(train),
        formats=tuple(
            dict.fromkeys(
                line
                for each in (info, *(cache.info for cache in held_out.values()))
                for line in each["formats"]
            )
        ),
        stream=streams,
        sources=sources,
        epoch_samples=sum(source.per_epoch for source in sources) if config.data.mixed else 0,
        eval_sources=tuple(
            SourcePlan(**each)
            for cache in held_out.values()
            for each in cache.info["by_source"]
            if config.data.eval
        ),
        left_out=(
            *left_out("train, first block" if streams else "train", info),
            *(left if config.data.eval else ()),
        ),
    )


def prompt_domains(data: DataPlan | None, sources: list[Source]) -> set[str]:
    """The domains of the prompts to train on; those that `sources` name where nothing is prepared yet."""
    if data is None:
        return set.union(*map(domains, sources))
    train = TokenCache.open(data.train_cache)
    return {train.meta(sample)["domain"] for sample in range(len(train))}


def prompt_columns(data: DataPlan) -> set[str]:
    """The columns that every prompt has for the rewards."""
    caches = [TokenCache.open(folder) for folder in (data.train_cache, *data.eval_caches.values())]
    return set.intersection(
        *(set(cache.meta(sample)) for cache in caches for sample in range(len(cache)))
    ) - {OWN}


def _sources(config: Config, info: dict[str, Any]) -> tuple[SourcePlan, ...]:
    """What the cache of training rows has of each source, and what an epoch has of it. Raises DataError where that is nothing."""
    found = [SourcePlan(**each) for each in info["by_source"]]
    if not config.data.mixed:
        return tuple(each.model_copy(update={"per_epoch": each.samples or 0}) for each in found)
    counts = epoch_counts(
        config.data.train, [each.samples or 0 for each in found], config.data.temperature
    )
    return tuple(
        each.model_copy(update={"per_epoch": count})
        for each, count in zip(found, counts, strict=True)
    )
