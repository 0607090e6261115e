"""Download of a model before its ranks start, with progress.

Ranks would each download it without a word.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from drumline.config.model import ModelConfig
from drumline.models.files import OnProgress, call_loader

# Configs, weights, and files of tokenizers and chat templates.
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Files that transformers does not read.
LEFT_OUT = ("*/*", "consolidated*")
MIB = 2**20


def download(path: str | None, model: ModelConfig, on_progress: OnProgress) -> None:
    """Download the files of a hub id to the hub's cache.

    There is nothing to do for a folder, and for a model whose weights are drawn. Raises ModelError.
    """
    if path is None or Path(path).is_dir() or model.init != "pretrained":
        return
    from huggingface_hub import snapshot_download

    bar = _bar(f"download {path}, MiB", on_progress)
    options: dict[str, Any] = {
        "allow_patterns": [*FILES],
        "ignore_patterns": [*LEFT_OUT],
        "revision": model.revision,
        "tqdm_class": bar,
    }
    call_loader(path, model, lambda: snapshot_download(path, **options))


def _bar(phase: str, on_progress: OnProgress) -> Any:
    """Return a class for the hub's progress bars, which reports those that count bytes.

    `phase`: what is reported with the numbers, in MiB.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    most = 0

    class Bar(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            # The bar draws itself to nowhere.
            super().__init__(*given, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown = super().update(n)
            # One bar counts what is downloaded and one what is written: the larger number is
            # reported.
            if self.unit == "B" and self.n > most:
                most = self.n
                on_progress(phase, int(most) // MIB, int(self.total or 0) // MIB or None)
            return shown

    return Bar
