"""URLs of object stores, such as s3://bucket/runs/one: what is one, and which are refused. No fsspec here."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from drumline.config.section import PathText
from drumline.foreign import path_mistake

FETCHED = (
    "fetched"  # in a run folder: the copy of a checkpoint at another run's URL, until it is read
)
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)


def is_url(text: object) -> bool:
    return isinstance(text, str) and _URL.match(text) is not None


def url_mistake(text: str) -> str | None:
    """The reason why checkpoints cannot be kept at a URL; None if they can. It repeats nothing of a URL that may hold a password."""
    match = _URL.fullmatch(text)
    if match is None:
        return "no URL: write s3://bucket/path, gs://bucket/path or another that fsspec knows; a folder goes into run.dir"
    if secret := secret_mistake(text):
        return secret
    if match[1].lower() == "memory":
        return "memory:// is lost with each process: use s3://, gs:// or file://"
    if match[1].lower() in ("http", "https"):
        return f"{match[1]}:// cannot be written to: use s3://, gs:// or another store that fsspec writes to"
    if not match[2].strip("/"):
        return "it names no bucket or folder"
    return path_mistake(text)


def secret_mistake(text: str) -> str | None:
    """The reason why a URL may hold a secret, which it does not repeat; None for one that cannot, and for a path."""
    match = _URL.fullmatch(text)
    if match is None or not ("@" in match[2].split("/")[0] or "?" in match[2]):
        return None
    return "it holds a user, a password or options: credentials come from the environment and the usual files of s3fs"


def _kept(text: str) -> str:
    if mistake := url_mistake(text):
        raise ValueError(mistake)
    return text.rstrip("/")


def _local(path: str) -> str:
    if is_url(path):
        raise ValueError(
            "it is a URL, and lease, logs and events need a local folder: set checkpoint.url to it, and leave run.dir local"
        )
    return path


UrlText = Annotated[str, AfterValidator(_kept)]
LocalPath = Annotated[PathText, AfterValidator(_local)]
