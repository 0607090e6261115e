"""A GGUF file as a Hugging Face folder: fp32 safetensors with config and tokenizer, by transformers' own dequantisation."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from drumline.core.files import give_name
from drumline.errors import ModelError
from drumline.models.files import beside, quiet


def convert(source: Path, target: Path, on_progress: Callable[[str, int, int | None], None]) -> None:
    """Write the model in the GGUF file `source` to the folder `target`, which appears whole or not at all.

    Any number of processes may do so at once; the first one's folder stays. Raises ModelError (gguf is not installed, or cannot read
    the file) and EnvironmentFault (the cache cannot be written, or its disk is full).
    """
    phase = f"converting {source.name} once"
    on_progress(phase, 0, 3)
    loaded, tokenizer = _read(source)
    on_progress(phase, 1, 3)
    fix = "free space, or set XDG_CACHE_HOME to another disk"
    with beside(target, "the converted model cannot be written", target.parent, fix) as temporary:
        _plain(loaded).save_pretrained(temporary)
        on_progress(phase, 2, 3)
        tokenizer.save_pretrained(temporary)
        give_name(temporary, target, (target / "config.json").exists)
    on_progress(phase, 3, 3)


def _read(source: Path) -> tuple[Any, Any]:
    """Model (fp32) and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401 - transformers reads the file with it
    except ImportError:
        raise ModelError("the package gguf is missing", where=str(source), fix="pip install gguf accelerate") from None
    quiet()
    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        # transformers' reader draws a bar of its own there, which nothing turns off.
        with contextlib.redirect_stderr(io.StringIO()), _read_once():
            model = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float32, **options)
            return model, AutoTokenizer.from_pretrained(str(source.parent), **options)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        what = f"transformers cannot read this GGUF file: {error}"
        raise ModelError(what, where=str(source), fix="name a model that it can read") from error


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """While this holds, gguf parses a file once and names an architecture's tensors once.

    transformers asks for both anew at each turn (the file three times; the names once for each of a model's modules), and most of
    gguf's parsing goes into making memmaps of single strings, which plain views spare. Same values, a fifth of the time:
    SmolLM2-135M (Q4_1) on 2 cores took 22.9 s before and 4.9 s with this, byte for byte the same files.
    """
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data: Any = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(gguf, GGUFReader=functools.cache(PlainReader), get_tensor_name_map=names):
        yield


def _plain(loaded: Any) -> Any:
    """The same model as one that can be saved: what came from GGUF counts as quantised and refuses, so its class is built anew
    and takes the weights over, without a copy."""
    import torch

    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain: Any = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain
