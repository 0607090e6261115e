"""Recognise and check URLs of object stores, such as s3://bucket/runs/one, without fsspec."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from drumline.config.section import PathText
from drumline.foreign import path_mistake

# Folder within a run folder for the copy of a checkpoint at another run's URL, until it is read.
FETCHED = "fetched"
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)


def is_url(text: object) -> bool:
    """Return whether a value is a text that begins like a URL, with `NAME://`."""
    return isinstance(text, str) and _URL.match(text) is not None


def url_mistake(text: str) -> str | None:
    """Return why checkpoints cannot be kept at a URL; None if they can.

    The reason repeats nothing of a URL that may hold a password.
    """
    match = _URL.fullmatch(text)
    if match is None:
        return "no URL: write s3://bucket/path, gs://bucket/path or another that fsspec knows; a folder goes into run.dir"
    secret = secret_mistake(text)
    if secret:
        return secret
    if match[1].lower() == "memory":
        return "memory:// is lost with each process: use s3://, gs:// or file://"
    if match[1].lower() in ("http", "https"):
        return f"{match[1]}:// cannot be written to: use s3://, gs:// or another store that fsspec writes to"
    if not match[2].strip("/"):
        return "it names no bucket or folder"
    return path_mistake(text)


def secret_mistake(text: str) -> str | None:
    """Return why a text is refused as a URL that may hold a secret; None if it is not refused.

    The reason does not repeat the URL. A URL may hold a secret if it has a user before an `@`, or
    options after a `?`.
    """
    match = _URL.fullmatch(text)
    if match is None:
        return None
    host = match[2].split("/")[0]
    if "@" not in host and "?" not in match[2]:
        return None
    return (
        "it holds a user, a password or options: credentials come from the environment and the usual"
        " files of s3fs, and a glob is written with * instead of ?"
    )


def _checked_url(text: str) -> str:
    mistake = url_mistake(text)
    if mistake:
        raise ValueError(mistake)
    return text.rstrip("/")


def _checked_local_path(path: str) -> str:
    if is_url(path):
        raise ValueError(
            "it is a URL, and lease, logs and events need a local folder: set checkpoint.url to it, and leave run.dir local"
        )
    return path


UrlText = Annotated[str, AfterValidator(_checked_url)]
LocalPath = Annotated[PathText, AfterValidator(_checked_local_path)]
