"""The hash of everything that a prepared dataset is made from, which is the name of its cache; and how two caches differ."""

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

from drumline.core.config import Config
from drumline.core.data import (
    DigitsSource,
    FileSource,
    HubSource,
    SavedSource,
    Source,
    SqlSource,
    TasksSource,
)
from drumline.core.model import TEMPLATES
from drumline.core.plan import DataIdentity
from drumline.core.registry import imported
from drumline.data.cache import VERSION, TokenCache, digest_of, read_info
from drumline.data.files import no_reasoning_gym
from drumline.data.formats import judges_answers
from drumline.data.places import hash_file, locate
from drumline.data.sources import call_hub, domains
from drumline.data.sql import content
from drumline.errors import DataError, ModelError
from drumline.foreign import expanded, first_line
from drumline.hardware.detect import cache_dir
from drumline.models.files import tokenizer_folder, tokenizer_revision
from drumline.models.templates import read_template
from drumline.models.vision import Vision

_APART = {"set", "weight", "repeats", "cap"}  # change no token of a source
# Files of a tokenizer, in any of the formats that transformers loads.
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|vocab|chat_template).*|(special_tokens_map|added_tokens)\.json|merges\.txt|.*\.(model|tiktoken)"
)


def cache_key(
    config: Config,
    sources: list[Source],
    role: str,
    tokenizer_path: str,
    base_dir: Path,
    vision: Vision | None = None,
) -> str:
    """The first 32 hex digits of sha256 over content and settings. `role`: train, holdout or eval. For images also over the folders of the
    rows, which image paths are relative to, and for a vision-language model over its processor. The images themselves are not read: their
    pixels are in no cache, and a changed size is found when an image is loaded."""
    data = config.data
    # A kind in a user's file counts with its code, which may change.
    code, _, name = config.algorithm.kind.rpartition(":")
    streams, where = (
        role != "eval" and data.stream is not None,
        None if role == "eval" else data.where,
    )
    found = [source.model_copy(update={"where": source.where or where}) for source in sources]
    parts: dict[str, Any] = {
        "version": VERSION,
        "sources": [_source(source, base_dir, streams) for source in found],
        "tokenizer": None if config.images_alone else _tokenizer(config, tokenizer_path, base_dir),
        "algorithm": f"{hash_file(Path(code))}:{name}"
        if code.endswith(".py")
        else config.algorithm.kind,
        "settings": {
            name: getattr(data, name)
            for name in ("max_length", "truncation", "packing", "learn_on", "reasoning")
        },
        "kept_free": config.algorithm.new_tokens,
        "role": role,
        "holdout": 0 if role == "eval" else data.holdout,
        **config.algorithm.cache_parts(),
    }
    if judges_answers(config.algorithm.forms) and role != "eval" and data.holdout:
        parts["holdout"] = ["whole prompts", data.holdout]
    if (
        config.algorithm.rollout is not None
    ):  # prompts carry the name of their domain, which may be that of their file
        parts["domains"] = [sorted(domains(source)) for source in sources]
    if role != "eval":
        names = ("where", "mixed", "duplicates", "decontaminate")
        held_out = [_source(source, base_dir) for source in data.eval if data.decontaminate]
        stream = data.stream and [data.stream.rows, *(source.weight for source in sources)]
        parts["chosen"] = {
            **{name: getattr(data, name) for name in names},
            "eval": held_out,
            "by": data.curriculum and data.curriculum.by,
            "stream": stream,
        }
    if vision is not None or config.images_alone:
        files = [
            file
            for source in sources
            if isinstance(source, FileSource)
            for file in locate(source, base_dir)
        ]
        parts["folders"] = [
            str(base_dir.absolute()),
            *(str(file.folder.absolute()) for file in files),
        ]
    if vision is not None:
        parts["vision"] = {"token": vision.token_id, "processor": vision.processor.to_dict()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _source(source: Source, base_dir: Path, streams: bool = False) -> dict[str, Any]:
    """The settings of a source and its content, without the paths of its files. `streams`: the user's own rows may be without end."""
    settings = source.model_dump(exclude={"path", *_APART})
    if isinstance(source, FileSource):
        return {
            **settings,
            "content": [(file.kind, file.content()) for file in locate(source, base_dir)],
        }
    if isinstance(source, HubSource):
        # The folder that `datasets` caches the dataset under: it tells apart revisions and data files.
        return {
            **settings,
            "content": Path(call_hub(source, "load_dataset_builder").cache_dir).parts[-3:],
        }
    if isinstance(source, TasksSource):
        try:
            return {**settings, "content": metadata.version("reasoning-gym")}
        except metadata.PackageNotFoundError as error:
            raise no_reasoning_gym() from error
    if isinstance(source, SqlSource):
        return {**settings, "content": content(source, base_dir)}
    if isinstance(source, DigitsSource):
        return {**settings, "content": str(cache_dir())}
    if not isinstance(source, SavedSource):
        read = source.code if streams and source.limit is None else source.content
        text = imported(partial(read, base_dir), source.label, "data source", doing="reading")
        return {**source.model_dump(exclude=_APART), "content": text}
    folder = base_dir / expanded(source.path)
    if not folder.is_dir():
        raise DataError(
            f"no such folder: {folder}",
            where="data source",
            fix="paths are relative to the folder of the YAML",
        )
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("cache-")
    )
    return {
        **settings,
        "content": [(str(path.relative_to(folder)), hash_file(path)) for path in files],
    }


def _tokenizer(config: Config, tokenizer_path: str, base_dir: Path) -> dict[str, Any]:
    """The hashes of the tokenizer's files; for a hub id, of its downloaded snapshot."""
    tokenizer_path = tokenizer_folder(tokenizer_path)
    folder = Path(tokenizer_path)
    if not folder.is_dir():
        from drumline.vendor.transformers import cached_file

        try:
            found = cached_file(
                tokenizer_path, "tokenizer_config.json", revision=tokenizer_revision(config.model)
            )
        except OSError as error:
            raise ModelError(f"no tokenizer: {first_line(error)}", where=tokenizer_path) from error
        assert found is not None
        folder = Path(found).parent
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    files = {name: hash_file(folder / name) for name in names if _TOKENIZER_FILES.fullmatch(name)}
    name = config.model.chat_template
    if name is not None and name not in TEMPLATES:
        name = str(base_dir / expanded(name))
    template = None if name is None else hashlib.sha256(read_template(name).encode()).hexdigest()
    identity: dict[str, Any] = {"files": files, "chat_template": template}
    if config.model.new_tokens:
        identity["new_tokens"] = [new.token for new in config.model.new_tokens]
    return identity


def identify(cache: TokenCache) -> DataIdentity:
    """The identity of a token cache."""
    # Rows that differ with equal tokens change nothing that is trained on.
    files = {name: digests for name, digests in cache.info["sha256"].items() if name != "rows.npy"}
    return DataIdentity(
        cache=str(cache.folder),
        content=digest_of(files),
        rows=cache.info["rows"],
        row_set=cache.info["row_set"],
    )


def what_changed(old: DataIdentity, new: DataIdentity) -> str | None:
    """What changed, for a message; None if nothing did. Counts added and removed rows if the old cache is still there."""
    if old.content == new.content:
        if old.code == new.code:
            return None
        return (
            "what gives the rows (a function or a file) has changed, and the compared rows have not"
        )
    before, after = _rows(old), _rows(new)
    if before is None or after is None:
        if old.row_set == new.row_set:
            return f"the same {new.rows:,} rows, in another order or with other tokens"
        return f"{old.rows:,} rows before, {new.rows:,} now, and not the same ones"
    kinds, which = np.unique(np.concatenate((before, after)), return_inverse=True)
    was, now = which[: len(before)], which[len(before) :]
    change = np.bincount(now, minlength=len(kinds)) - np.bincount(was, minlength=len(kinds))
    added, removed = int(change[change > 0].sum()), int(-change[change < 0].sum())
    changes = [
        f"{count:,} rows {what}"
        for count, what in ((added, "added"), (removed, "removed"))
        if count
    ]
    if not np.array_equal(was[change[was] == 0], now[change[now] == 0]):
        changes.append(
            "the others in another order"
            if changes
            else f"the same {len(after):,} rows in another order"
        )
    return (
        ", ".join(changes)
        or "the same rows in the same order, but their tokens or other columns differ (tokenizer, chat template)"
    )


def _rows(identity: DataIdentity) -> npt.NDArray[np.uint64] | None:
    """The hashes of the rows, in order; None if that cache is gone."""
    info = read_info(Path(identity.cache))
    if info is None or info["row_set"] != identity.row_set:
        return None
    try:
        return np.asarray(np.load(Path(identity.cache) / "rows.npy", allow_pickle=False))
    except (OSError, ValueError):
        return None
