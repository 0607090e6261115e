"""Names a prepared dataset by a hash of everything that it is made from.

The hash covers the content of the sources, the tokenizer and the settings that change a token or
choose a row. Another run with the same hash uses the same cache. This module also says how two
caches differ, for a run that resumes with other data.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.config.config import Config
from drumline.config.data import (
    DigitsSource,
    FileSource,
    HubSource,
    SavedSource,
    Source,
    SqlSource,
    TasksSource,
)
from drumline.config.model import TEMPLATES
from drumline.config.registry import run_user_code
from drumline.data.cache import VERSION, TokenCache, read_info
from drumline.data.file_locations import hash_file, locate
from drumline.data.formats import judges_answers
from drumline.data.sources import call_hub, domains
from drumline.data.sql import hash_rows
from drumline.data.tasks import no_reasoning_gym
from drumline.errors import DataError, ModelError
from drumline.foreign import expand_home, first_line
from drumline.hardware.detect import cache_dir
from drumline.models.files import tokenizer_folder, tokenizer_revision
from drumline.models.image_tokens import Vision
from drumline.models.templates import read_template
from drumline.plan.plan import DataIdentity
from drumline.system.files import json_digest

# Settings of a source that are not hashed, because they change none of its tokens.
_NOT_HASHED = {"set", "weight", "repeats", "cap"}
# Settings of `data` that change the tokens of a row.
_TOKEN_SETTINGS = ("max_length", "truncation", "packing", "learn_on", "reasoning")
# Settings of `data` that decide which rows become samples.
_ROW_SETTINGS = ("where", "duplicates", "decontaminate")
_BUILT_IN = (FileSource, HubSource, TasksSource, SqlSource, DigitsSource, SavedSource)
KEY_DIGITS = 32  # hex digits of a sha256 that name a cache
# Files of a tokenizer, in any of the formats that transformers loads.
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|vocab|chat_template).*|(special_tokens_map|added_tokens)\.json|merges\.txt|.*\.(model|tiktoken)"
)


def cache_key(
    config: Config,
    sources: list[Source],
    split: str,
    tokenizer_path: str,
    base_dir: Path,
    vision: Vision | None = None,
) -> str:
    """Return the first 32 hex digits of sha256 over the content of the sources and the settings.

    For images the hash also covers the folders of the rows, which image paths are relative to, and
    for a vision-language model its processor. The images themselves are not read: their pixels are in
    no cache, and a changed size is found when an image is loaded. A changed video is found by the
    metas of samples (`images.has_changed_videos`).

    Args:
        config: the config of the run.
        sources: the sources of the rows.
        split: train, holdout or eval.
        tokenizer_path: the folder or hub id of the tokenizer.
        base_dir: the folder that paths of the config are relative to.
        vision: the images of a vision-language model.

    Raises DataError for a source that cannot be read, ModelError for a tokenizer that cannot be.
    """
    data = config.data
    is_for_training = split != "eval"
    algorithm = config.algorithm
    if not is_for_training:
        algorithm = algorithm.evaluation_spec
    # A new item here would rename every cache, and all would be made again. So the item of a new
    # setting must be left out while the setting is not used.
    parts: dict[str, Any] = {
        "version": VERSION,
        "sources": _identify_sources(config, sources, base_dir, is_for_training),
        "tokenizer": None,
        "algorithm": _identify_algorithm(config),
        "settings": {name: getattr(data, name) for name in _TOKEN_SETTINGS},
        "kept_free": config.algorithm.new_tokens,
        "role": split,
        "holdout": 0,
        **algorithm.cache_parts(),
    }
    if not config.images_alone:
        parts["tokenizer"] = _identify_tokenizer(config, tokenizer_path, base_dir)
    if is_for_training:
        parts["holdout"] = data.holdout
        parts["chosen"] = _identify_choices(config, sources, base_dir)
    if is_for_training and data.holdout and judges_answers(config.algorithm.forms):
        # Older versions held out rows of such an algorithm one by one.
        parts["holdout"] = ["whole prompts", data.holdout]
    if config.algorithm.rollout is not None:
        # Prompts carry the name of their domain, which may be that of their file.
        parts["domains"] = [sorted(domains(source)) for source in sources]
    if vision is not None or config.images_alone:
        parts["folders"] = _image_folders(sources, base_dir)
    if vision is not None:
        parts["vision"] = {**vision.identity(), "frames": data.video_max_frames}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def _identify_sources(
    config: Config, sources: list[Source], base_dir: Path, is_for_training: bool
) -> list[dict[str, Any]]:
    """Return the settings and the content of each source.

    For training rows these include data.where, unless a source has a condition of its own.
    """
    is_stream = is_for_training and config.data.stream is not None
    where = None
    if is_for_training:
        where = config.data.where
    parts = []
    for source in sources:
        conditioned = source.model_copy(update={"where": source.where or where})
        parts.append(_identify_source(conditioned, base_dir, is_stream))
    return parts


def _identify_algorithm(config: Config) -> str:
    """Return the algorithm's kind. A kind in a user's file counts with its code, which may change."""
    kind = config.algorithm.kind
    # `path/of/file.py:name` for such a kind.
    code, _, name = kind.rpartition(":")
    if code.endswith(".py"):
        return f"{hash_file(Path(code))}:{name}"
    return kind


def _identify_choices(config: Config, sources: list[Source], base_dir: Path) -> dict[str, Any]:
    """Return what decides which rows of the training data become samples."""
    data = config.data
    parts = {name: getattr(data, name) for name in _ROW_SETTINGS}
    parts["mixed"] = data.is_mixed
    # Evaluation rows decide which training rows are left out.
    parts["eval"] = []
    if data.decontaminate:
        parts["eval"] = [_identify_source(source, base_dir) for source in data.eval]
    parts["by"] = data.curriculum and data.curriculum.by
    parts["stream"] = None
    if data.stream is not None:
        # Blocks of a stream have rows of several sources, by their weights.
        weights = [source.weight for source in sources]
        parts["stream"] = [data.stream.rows, *weights]
    return parts


def _image_folders(sources: list[Source], base_dir: Path) -> list[str]:
    """Return the folders that paths of images in the rows may be relative to."""
    folders = [str(base_dir.absolute())]
    for source in sources:
        if isinstance(source, FileSource):
            for file in locate(source, base_dir):
                folders.append(str(file.folder.absolute()))
    return folders


def _identify_source(source: Source, base_dir: Path, is_stream: bool = False) -> dict[str, Any]:
    """Return the settings of a source and its content, without the paths of its files.

    With `is_stream` the user's own rows may be without end, and only their code counts.
    """
    # A plugin's source is identified by all its settings, a built-in one without its path.
    is_custom = not isinstance(source, _BUILT_IN)
    if is_custom:
        settings = source.model_dump(exclude=_NOT_HASHED)
    else:
        settings = source.model_dump(exclude={"path", *_NOT_HASHED})
    settings["content"] = _identify_content(source, base_dir, is_stream)
    return settings


def _identify_content(source: Source, base_dir: Path, is_stream: bool) -> Any:
    """Return what identifies the rows of a source.

    If the content is on this machine it is a hash of all of it, otherwise what the remote store
    says of its version.

    Args:
        source: the source.
        base_dir: the folder that paths of the config are relative to.
        is_stream: see `_identify_source`.

    Raises DataError and EnvironmentFault.
    """
    if isinstance(source, FileSource):
        # The kind decides how the same bytes are read.
        return [(file.kind, file.content_hash()) for file in locate(source, base_dir)]
    if isinstance(source, HubSource):
        # `datasets` caches the dataset under this folder, which tells apart revisions and data files.
        builder = call_hub(source, "load_dataset_builder")
        return Path(builder.cache_dir).parts[-3:]
    if isinstance(source, TasksSource):
        # The settings have the seed; the rest is the package's code.
        try:
            return metadata.version("reasoning-gym")
        except metadata.PackageNotFoundError as error:
            raise no_reasoning_gym() from error
    if isinstance(source, SqlSource):
        return hash_rows(source, base_dir)
    if isinstance(source, DigitsSource):
        # Rows name the image files, which lie there.
        return str(cache_dir())
    if isinstance(source, SavedSource):
        return _hash_saved_dataset(base_dir / expand_home(source.path))
    read = source.content
    if is_stream and source.limit is None:
        read = source.code
    return run_user_code(partial(read, base_dir), source.label, "data source", doing="reading")


def hash_files(sources: list[Source], base_dir: Path) -> list[Any]:
    """Return what identifies the content of all sources that are files. Raises DataError."""
    contents = []
    for source in sources:
        if isinstance(source, FileSource | SavedSource):
            contents.append(_identify_content(source, base_dir, is_stream=False))
    return contents


def _hash_saved_dataset(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the hash of each file of a saved dataset. Raises DataError."""
    if not folder.is_dir():
        raise DataError(
            f"no such folder: {folder}",
            where="data source",
            fix="paths are relative to the folder of the YAML",
        )
    hashes = []
    for path in sorted(folder.rglob("*")):
        # `datasets` writes such files beside the dataset when it maps or filters it.
        is_cache = path.name.startswith("cache-")
        if path.is_file() and not is_cache:
            hashes.append((str(path.relative_to(folder)), hash_file(path)))
    return hashes


def _identify_tokenizer(config: Config, tokenizer_path: str, base_dir: Path) -> dict[str, Any]:
    """Return the hashes of the tokenizer's files and of the chat template. Raises ModelError."""
    folder = _find_tokenizer_files(config, tokenizer_folder(tokenizer_path))
    # The folder may be that of a model: its weights are not read.
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    hashes = {}
    for name in names:
        if _TOKENIZER_FILES.fullmatch(name):
            hashes[name] = hash_file(folder / name)
    identity: dict[str, Any] = {"files": hashes, "chat_template": None}
    template = config.model.chat_template
    if template is not None:
        # The name of a template of ours, or a file.
        if template not in TEMPLATES:
            template = str(base_dir / expand_home(template))
        text = read_template(template)
        identity["chat_template"] = hashlib.sha256(text.encode()).hexdigest()
    if config.model.new_tokens:
        identity["new_tokens"] = [new.token for new in config.model.new_tokens]
    return identity


def _find_tokenizer_files(config: Config, path: str) -> Path:
    """Return the folder of a tokenizer; for a hub id, of its downloaded snapshot. Raises ModelError."""
    if Path(path).is_dir():
        return Path(path)
    from drumline.vendor.transformers import cached_file

    revision = tokenizer_revision(config.model)
    try:
        file = cached_file(path, "tokenizer_config.json", revision=revision)
    except OSError as error:
        raise ModelError(f"no tokenizer: {first_line(error)}", where=path) from error
    assert file is not None
    return Path(file).parent


def identify(cache: TokenCache) -> DataIdentity:
    """Return the identity of a token cache, by which a resumed run sees whether its data changed."""
    # Without the hashes of rows: if rows differ and their tokens do not, the training is the same.
    files = dict(cache.info["sha256"])
    files.pop("rows.npy", None)
    return DataIdentity(
        cache=str(cache.folder),
        content=json_digest(files),
        rows=cache.info["rows"],
        row_set=cache.info["row_set"],
    )


def what_changed(old: DataIdentity, new: DataIdentity) -> str | None:
    """Return what changed between two identities, for a message; None if nothing did.

    Counts added and removed rows if the old cache is still there.
    """
    if old.content == new.content:
        if old.code == new.code:
            return None
        return (
            "what gives the rows (a function or a file) has changed, and the compared rows have not"
        )
    before = _read_row_hashes(old)
    after = _read_row_hashes(new)
    if before is None or after is None:
        # `row_set` is the sum of the rows' hashes, which is the same in any order.
        if old.row_set == new.row_set:
            return f"the same {new.rows:,} rows, in another order or with other tokens"
        return f"{old.rows:,} rows before, {new.rows:,} now, and not the same ones"
    return _row_changes(before, after)


def _row_changes(before: npt.NDArray[np.uint64], after: npt.NDArray[np.uint64]) -> str:
    """Return how two lists of hashes of rows differ: what was added, removed or reordered.

    `before`, `after`: uint64[rows] each, in the order of the sources.
    """
    # Each different row gets a number, so that its copies can be counted.
    both = np.concatenate((before, after))
    rows, numbers = np.unique(both, return_inverse=True)
    old_numbers = numbers[: len(before)]
    new_numbers = numbers[len(before) :]
    old_counts = np.bincount(old_numbers, minlength=len(rows))
    new_counts = np.bincount(new_numbers, minlength=len(rows))
    change = new_counts - old_counts
    added = int(change[change > 0].sum())
    removed = int(-change[change < 0].sum())
    changes = []
    if added:
        changes.append(f"{added:,} rows added")
    if removed:
        changes.append(f"{removed:,} rows removed")
    # Rows with the same number of copies in both lists. If their order is the same, none was moved.
    old_rest = old_numbers[change[old_numbers] == 0]
    new_rest = new_numbers[change[new_numbers] == 0]
    if not np.array_equal(old_rest, new_rest):
        if changes:
            changes.append("the others in another order")
        else:
            changes.append(f"the same {len(after):,} rows in another order")
    if not changes:
        return (
            "the same rows in the same order, but their tokens or other columns differ (tokenizer, "
            "chat template)"
        )
    return ", ".join(changes)


def _read_row_hashes(identity: DataIdentity) -> npt.NDArray[np.uint64] | None:
    """Return the hashes of the rows, in order; None if that cache is gone."""
    folder = Path(identity.cache)
    info = read_info(folder)
    # Another cache may be in this folder by now.
    if info is None or info["row_set"] != identity.row_set:
        return None
    try:
        rows = np.load(folder / "rows.npy", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return np.asarray(rows)
