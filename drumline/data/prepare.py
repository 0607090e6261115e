"""Finds the token caches of a config, has the missing ones made, and says what all of them hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.config.data import Source
from drumline.config.mixing import epoch_counts
from drumline.config.rollouts import require_room
from drumline.data.blocks import has_first_block, make_first_block, read_ledger
from drumline.data.cache import TokenCache, cache_root, describe_left_out, read_info, verify
from drumline.data.encode import OWN_COLUMNS, ROW_PROMPT
from drumline.data.fingerprint import cache_key, hash_files, identify
from drumline.data.images import has_changed_videos, lacks_images
from drumline.data.make import CacheBuild, Progress, make
from drumline.data.sources import domains
from drumline.errors import ConfigError, DataError
from drumline.models.image_tokens import Vision
from drumline.plan.plan import DataIdentity, DataPlan, SourcePlan
from drumline.plan.rules import compared_images


def prepare(
    config: Config,
    tokenizer_path: str,
    base_dir: Path,
    on_progress: Progress | None = None,
    vision: Vision | None = None,
    check: bool = False,
) -> DataPlan:
    """Return what the caches of `config.data` hold.

    Caches that do not exist, whose images were lost or whose videos have changed are made first.
    Raises DataError for input that cannot be used, PlanError for images with a setting that
    compares texts alone, and EnvironmentFault for a disk that cannot be written.

    Args:
        config: the config of the run.
        tokenizer_path: the folder of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
        on_progress: called with a phase ("hash" of the input, "tokenise" or "pack"), the rows done,
            and all rows if their number is known.
        vision: of a vision-language model.
        check: verify the caches that exist, and make damaged ones again.
    """
    # Before anything is read: near duplicates and contamination are found by text, not by images.
    refusal = next(compared_images(config, vision is not None), None)
    if refusal is not None:
        raise refusal.error()
    progress = on_progress or _ignore_progress
    # A cache is named by a hash of all its input, so naming the folders reads every file.
    progress("hash", 0, None)
    builds = _list_builds(config, tokenizer_path, base_dir, vision)
    for build in builds:
        for folder in build.folders:
            is_damaged = check and _is_damaged(folder)
            if is_damaged or _is_outdated(folder):
                shutil.rmtree(folder)
    if all(map(_is_done, builds)):
        return _plan(builds)
    # A file may change while it is read. `files` hashes the input first, and the caches are named
    # afterwards: if both hashes are equal at the end, the rows are those of the names.
    files = _InputFiles(config, base_dir)
    builds = _list_builds(config, tokenizer_path, base_dir, vision)
    for build in builds:
        if _is_done(build):
            continue
        if build.is_stream:
            # Not checked for changed files: later blocks read the same files during the run.
            make_first_block(build, tokenizer_path, base_dir)
        else:
            make(build, tokenizer_path, base_dir, progress, files.require_unchanged)
    return _plan(builds)


class _InputFiles:
    """The hashes of the input files before the caches were named.

    A file that changes after its cache was named would put other rows into that cache, and each
    later run with the old file would train on them.
    """

    def __init__(self, config: Config, base_dir: Path) -> None:
        self.base_dir = base_dir
        self.sources = list(config.data.train)
        for sources in config.data.eval_sets.values():
            self.sources += sources
        self.before = hash_files(self.sources, base_dir)

    def require_unchanged(self) -> None:
        """Raise DataError if a file has changed since this object was made."""
        if hash_files(self.sources, self.base_dir) != self.before:
            raise DataError(
                "a file of rows has changed while it was read",
                where="data",
                fix="start again once nothing writes to it",
            )


def _ignore_progress(phase: str, done: int, total: int | None) -> None:
    """Do nothing: the caller of `prepare` does not follow the progress."""


def find_prepared(
    config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None = None
) -> DataPlan | None:
    """Return what the caches hold if all of them exist and are whole; None otherwise.

    It makes nothing. The result is that of `prepare`.
    """
    builds = _list_builds(config, tokenizer_path, base_dir, vision)
    for build in builds:
        if any(_is_outdated(folder) for folder in build.folders):
            return None
    if all(map(_is_done, builds)):
        return _plan(builds)
    return None


def _is_damaged(folder: Path) -> bool:
    """Return whether the files of a cache differ from what was written.

    A folder without a cache is not damaged.
    """
    info = read_info(folder)
    if info is None:
        return False
    try:
        verify(folder, info["sha256"])
    except DataError:
        return True
    return False


def _is_outdated(folder: Path) -> bool:
    """Return whether there is a cache in a folder whose images are gone, or whose videos changed."""
    if read_info(folder) is None:
        return False
    cache = TokenCache.open(folder)
    return lacks_images(cache) or has_changed_videos(cache)


def _is_done(build: CacheBuild) -> bool:
    """Return whether all caches of a build exist.

    Of a stream only block 0 is made before the run; training makes the others.
    """
    if build.is_stream:
        return has_first_block(build.folder)
    return build.is_done


def _list_builds(
    config: Config, tokenizer_path: str, base_dir: Path, vision: Vision | None
) -> list[CacheBuild]:
    """Return the build of the training rows, and behind it that of each evaluation set.

    Raises ConfigError for settings that exclude each other.
    """
    data = config.data
    root = cache_root(data)
    if data.eval and data.holdout:
        raise ConfigError(
            "data.holdout and data.eval are two ways to say the same",
            where="data.holdout",
            fix="keep one of them",
        )
    require_room(config.algorithm.new_tokens, data.max_length)

    def folder_of(sources: list[Source], split: str) -> Path:
        return root / cache_key(config, sources, split, tokenizer_path, base_dir, vision)

    train_folder = folder_of(data.train, "train")
    holdout_folder = None
    if data.holdout:
        holdout_folder = folder_of(data.train, "holdout")
    builds = [CacheBuild(config, data.train, train_folder, holdout_folder, vision)]
    for name, sources in data.eval_sets.items():
        builds.append(CacheBuild(config, sources, folder_of(sources, "eval"), None, vision, name))
    return builds


def _plan(builds: list[CacheBuild]) -> DataPlan:
    """Return what the caches of all builds hold. The first build is that of the training rows."""
    build = builds[0]
    config = build.config
    # A stream has no one cache; its first block stands for it.
    if build.is_stream:
        train = None
        train_name = "train, first block"
        info = read_ledger(build.folder)["first"]
    else:
        train = TokenCache.open(build.folder)
        train_name = "train"
        info = train.info
    held_out = _open_held_out(builds)
    if train is not None:
        config.algorithm.check_rows(train)
    sources = _plan_sources(config, info)
    labels: tuple[str, ...] = ()
    if train is None:
        identity = _identity_of_stream(build, info)
    else:
        labels = config.algorithm.classes(train, [*held_out.values()])
        identity = identify(train)
    epoch_samples = 0
    if config.data.is_mixed:
        epoch_samples = sum(source.per_epoch for source in sources)
    eval_sources: list[SourcePlan] = []
    lines_left_out = describe_left_out(train_name, info)
    if config.data.eval:
        for name, cache in held_out.items():
            eval_sources += [SourcePlan(**entry) for entry in cache.info["by_source"]]
            lines_left_out += describe_left_out(f"eval.{name}".rstrip("."), cache.info)
    return DataPlan(
        train_cache=str(build.folder),
        eval_caches={name: str(cache.folder) for name, cache in held_out.items()},
        train_samples=info["samples"],
        train_tokens=info["tokens"],
        train_learned=info["learned"],
        eval_samples=sum(map(len, held_out.values())),
        images=info.get("images", 0),
        image_tokens=info.get("image_tokens", 0),
        samples_with_images=info.get("samples_with_images", 0),
        labels=labels,
        identity=identity,
        formats=_distinct_formats([info, *(cache.info for cache in held_out.values())]),
        stream=build.is_stream,
        sources=sources,
        epoch_samples=epoch_samples,
        eval_sources=tuple(eval_sources),
        left_out=tuple(lines_left_out),
    )


def _open_held_out(builds: list[CacheBuild]) -> dict[str, TokenCache]:
    """Open the caches that a run is evaluated on, by the names of their sets."""
    if builds[0].holdout_folder is not None:
        return {"": TokenCache.open(builds[0].holdout_folder)}
    caches = {}
    for build in builds:
        if build.eval_set is not None:
            caches[build.eval_set] = TokenCache.open(build.folder)
    return caches


def _identity_of_stream(build: CacheBuild, info: dict[str, Any]) -> DataIdentity:
    """Return the identity of a stream's data. `info`: of its first block."""
    key = build.folder.name
    # `DataIdentity.row_set` is a sum of the hashes of all rows, which is not known here. The first
    # 12 hex digits of the key take its place.
    row_set = int(key[:12], 16)
    return DataIdentity(cache=str(build.folder), content=key, rows=info["rows"], row_set=row_set)


def _distinct_formats(infos: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the lines that tell in which formats rows were read, each once."""
    lines: dict[str, None] = {}
    for info in infos:
        lines.update(dict.fromkeys(info["formats"]))
    return tuple(lines)


def prompt_domains(data: DataPlan | None, sources: list[Source]) -> set[str]:
    """Return the domains of the prompts to train on.

    They are those that `sources` name if nothing is prepared yet (`data` is None).
    """
    if data is None:
        return set.union(*map(domains, sources))
    train = TokenCache.open(data.train_cache)
    return {meta["domain"] for meta in _metas(train)}


def prompt_columns(data: DataPlan) -> set[str]:
    """Return the columns that every prompt has for the rewards."""
    columns: set[str] | None = None
    for folder in (data.train_cache, *data.eval_caches.values()):
        for meta in _metas(TokenCache.open(folder)):
            if columns is None:
                columns = set(meta)
            else:
                columns.intersection_update(meta)
    assert columns is not None, "a cache has samples"
    return columns - {OWN_COLUMNS, ROW_PROMPT}


def _metas(cache: TokenCache) -> Iterator[dict[str, Any]]:
    """Yield the meta of each sample of a cache, see `TokenCache.meta`."""
    for sample in range(len(cache)):
        yield cache.meta(sample)


def _plan_sources(config: Config, info: dict[str, Any]) -> tuple[SourcePlan, ...]:
    """Return each source's rows and samples in a cache, and its samples in an epoch.

    `info`: of the cache, which has the training rows. Raises DataError if an epoch has nothing of a
    source.
    """
    found = [SourcePlan(**entry) for entry in info["by_source"]]
    # Without a mix a pack may hold rows of several sources. Then the samples of a source are None.
    sizes = [source.samples or 0 for source in found]
    if config.data.is_mixed:
        counts = epoch_counts(config.data.train, sizes, config.data.temperature)
    else:
        counts = sizes
    planned = []
    for source, count in zip(found, counts, strict=True):
        planned.append(source.model_copy(update={"per_epoch": count}))
    return tuple(planned)
