"""Models and datasets of ModelScope (experimental), a hub that hosts in China can reach."""

from __future__ import annotations

from typing import Literal

from drumline.errors import DrumlineError
from drumline.foreign import first_line

PREFIX = "modelscope:"
# The fix that an error names if the hub of Hugging Face does not answer.
MIRRORS = "set HF_ENDPOINT to a mirror (https://hf-mirror.com), or write modelscope:OWNER/NAME"


def download(
    name: str,
    revision: str | None,
    kind: Literal["model", "dataset"],
    error: type[DrumlineError],
    where: str,
) -> str:
    """Return the folder of a model or dataset on this machine, which is downloaded if needed.

    `name`: modelscope:OWNER/NAME. `error`: the class of errors. `where`: the key that they name.
    Raises `error`.
    """
    try:
        from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download
    except ImportError:
        raise error(
            "the package modelscope is not installed", where=where, fix="pip install modelscope"
        ) from None
    fetch = snapshot_download if kind == "model" else dataset_snapshot_download
    try:
        return str(fetch(name.removeprefix(PREFIX), revision=revision))
    except Exception as failure:
        # It raises the classes of several libraries.
        fix = "check the spelling (OWNER/NAME) and the connection; a private one needs `modelscope login`"
        raise error(
            f"ModelScope gives no such {kind}: {first_line(failure)}", where=where, fix=fix
        ) from failure
