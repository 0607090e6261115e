"""Checks of a model's files before transformers reads them, so that nothing in them hangs; and new files, written beside their place."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drumline.core.files import temporary_folder
from drumline.errors import EnvironmentFault, ModelError
from drumline.foreign import first_line, read_object

# JSON that transformers reads whole. The tokenizer's Rust library checks its own files (tokenizer.json, vocab.json).
READ = ("*config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "*.index.json")
# Keys for numbers of parts that are built one by one, or named.
COUNTS = re.compile(r"(?!.*(vocab|theta|piece|bpe))(.*_)?(layers?|depths?|blocks?|stages?|experts?|labels|codebooks|towers?|groups)(_.*)?")
MOST_PARTS = 2**15  # in transformers, Doge has 16,384 experts; ImageNet-21k has 21,843 labels
# Keys of sizes at any depth: a whole number from 1 on, or null. A list has one for each layer.
SIZES = re.compile(
    r"vocab_size|hidden_size|intermediate_size|head_dim|max_position_embeddings|n_(embd|head|layer|positions|ctx)"
    r"|num_(labels|hidden_layers|attention_heads|key_value_heads)"
)


def quiet() -> None:
    """Turn transformers' progress bars and warnings off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def beside(folder: Path, what: str, where: Path, fix: str) -> Iterator[Path]:
    """A new folder beside `folder`, removed in the end unless it was renamed. Raises EnvironmentFault, with `what` and the reason, if it
    cannot be written."""
    try:
        with temporary_folder(folder.parent) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # for a full disk safetensors has its own class, which is no OSError
        raise EnvironmentFault(f"{what}: {getattr(error, 'strerror', None) or error}", where=str(where), fix=fix) from error


def check_folder(folder: Path) -> None:
    """Raises ModelError that names the file, for a pipe or device, invalid JSON, and impossible counts. Ignores anything but a local
    folder."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        modes = {entry: entry.stat().st_mode for entry in entries if entry.exists()}
    except OSError as error:
        raise ModelError(f"cannot be read: {first_line(error)}", where=str(folder)) from None
    for entry, mode in modes.items():
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ModelError("it is a device, pipe or socket, a file is wanted", where=str(entry), fix="take it out of the model's folder")
        if any(entry.match(pattern) for pattern in READ):
            is_config, wanted = entry.name == "config.json", "it is one JSON object, as save_pretrained writes it"
            content = read_object(entry, ModelError, wanted, numbers=is_config)
            if is_config:
                check_counts(content, str(entry))
            if entry.name == "tokenizer_config.json" and not isinstance(content.get("chat_template"), str | list | dict | None):
                raise ModelError("chat_template is no text", where=str(entry), fix="take the key out, or write a Jinja template")


def check_counts(values: Any, where: str) -> None:
    """Raises ModelError for an impossible size, and for a count of parts beyond all models, which would be built for ever."""
    left, fix = [("", values)], "write the number that is meant"
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            latent = "qk_rope_head_dim" in value  # attention with heads of two sizes: head_dim is not looked at, and may be 0
            left += [(str(name), inside) for name, inside in value.items() if not (latent and name == "head_dim")]
        elif isinstance(value, list):
            left += [(key, inside) for inside in value]
        elif value is not None and SIZES.fullmatch(key) and not _is_size(value):
            raise ModelError(f"{key} is {str(value)[:40]}, a whole number from 1 on is wanted", where=where, fix=fix)
        elif isinstance(value, int | float) and COUNTS.fullmatch(key) and value > MOST_PARTS:
            raise ModelError(f"{key} is {value:g}: no model has more than {MOST_PARTS}", where=where, fix=fix)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and value is not True and value >= 1 and value % 1 == 0
