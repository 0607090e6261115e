"""Read weights by HTTP from rank 0 of a run of Drumline.

`drumline.rl.weight_network` describes the answer.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

# The header that tells the trainer in which folder the files of an adapter are put.
FOLDER_HEADER = "Drumline-Folder"
# The folder of Linux whose files are in memory.
MEMORY = Path("/dev/shm")
# The most bytes of a line.
MOST_LINE = 2**20


class ReadingError(RuntimeError):
    """Weights did not arrive whole."""


def memory_folder() -> Path:
    """Return a folder in memory, or the one for temporary files if there is none."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        return MEMORY
    return Path(tempfile.gettempdir())


def read_tensors(source: str, seconds: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each weight and the weight, on the CPU.

    Args:
        source: The URL of the weights.
        seconds: The longest that the trainer may send nothing.

    Raises ReadingError if they do not arrive whole.
    """
    for about, content in _read_entries(source, seconds, {}):
        dtype = getattr(torch, about["dtype"])
        yield about["tensor"], content.view(dtype).view(about["shape"])


def write_files(source: str, seconds: float, folder: Path) -> None:
    """Write the files of an adapter into a folder, which is created.

    Several workers of a host may write the same files at the same time. The arguments are those of `read_tensors`.

    Raises ReadingError if they do not arrive whole, and OSError if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for about, content in _read_entries(source, seconds, {FOLDER_HEADER: str(folder)}):
        # A name without a folder, whatever the trainer sends.
        path = folder / Path(about["file"]).name
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_bytes(content.numpy().data)
        written.replace(path)


def _read_entries(
    source: str, seconds: float, headers: dict[str, str]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield what each line says, and the bytes behind it, as uint8."""
    url = urlsplit(source)
    # No proxy of the environment is used: the trainer is in the same cluster.
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=seconds)
    trainer = f"the trainer at {url.hostname}:{url.port}"
    try:
        connection.request("GET", url.path, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ReadingError(f"{trainer} answered {answer.status}")
        while True:
            about = _read_line(answer, trainer)
            if about.get("end"):
                return
            yield about, _read_bytes(answer, about["bytes"], trainer)
    except (OSError, http.client.HTTPException) as error:
        raise ReadingError(f"{trainer} sent no weights: {error or type(error).__name__}") from None
    finally:
        connection.close()


def _read_line(answer: http.client.HTTPResponse, trainer: str) -> dict[str, Any]:
    """Return the next line of JSON."""
    line = answer.readline(MOST_LINE)
    if not line.endswith(b"\n"):
        raise ReadingError(f"{trainer} broke off")
    about: dict[str, Any] = json.loads(line)
    return about


def _read_bytes(answer: http.client.HTTPResponse, count: int, trainer: str) -> torch.Tensor:
    """Return the next bytes, uint8[count]."""
    content = torch.empty(count, dtype=torch.uint8)
    rest = content.numpy().data
    while rest:
        arrived = answer.readinto(rest)
        if not arrived:
            raise ReadingError(f"{trainer} broke off")
        rest = rest[arrived:]
    return content
