"""Secrets: kept out of what is written down (events, logs, trackers, error reports), and withheld from the config.

A Config holds `${env:NAME}`, and so does all that is made of it: the plan, checkpoints, trackers. Whoever uses the value looks it up in
its own environment at that moment (`reveal`). A secret that the YAML spells out is moved to this process's environment, which ranks and
their children inherit, and `${env:DRUMLINE_SECRET_…}` takes its place (`withhold`).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from drumline.errors import ConfigError

if TYPE_CHECKING:
    from drumline.core.yaml_lines import Place

REDACTED = "[redacted]"
OURS = "DRUMLINE_SECRET_"  # variables that hold, as JSON, what stood in a YAML (`withhold`)
_SPECIAL = "(?:pad|eos|bos|unk|sep|cls)"  # tokens of a vocabulary
_PASSWORDS = "(?:SECRET|PASSWORD|PASSWD|PASSPHRASE)"
_KINDS = (
    rf"(?:{_PASSWORDS}S?|(?:[_-]|API|ACCESS|ACCOUNT)KEY(?:[_-]?ID|S)?|CREDENTIALS?|DATABASE_URL|(?<![A-Z])DSN"
    r"|(?:MYSQL|PG|DB|DATABASE|ADMIN|USER)_PWD|(?<=;)PWD)"  # PWD alone is the shell's folder
)
# The names of environment variables and keys whose values stay secret: HF_TOKEN, api_key, AWS_ACCESS_KEY_ID; not pad_token, tokens.
SECRET = re.compile(rf"(?:{_KINDS}|(?<!{_SPECIAL}_)TOKEN)$", re.IGNORECASE)
PASSWORD = re.compile(rf"{_PASSWORDS}S?$", re.IGNORECASE)  # a number may be one, too
# scheme://user:password@, and scheme://token@. What may be long is tried from its beginning alone: a text of n letters takes n steps.
URL_PASSWORD = re.compile(
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://(?:[^\s/@:]*:(?=[^\s/]+@)|(?=[^\s/@:]{20,}@)))[^\s/]+(?=@)",
    re.IGNORECASE,
)
# `--api-key abc`, HF_TOKEN=abc, "password": "a b", a signed address. A bare `key: x` or `token: x` is prose more often than a secret.
_ASSIGNED = re.compile(
    rf"((?:(?<![\w-])--[\w-]*(?:{_KINDS}|TOKEN|KEY)[ =]+"
    rf"""|(?<![\w-])(?:[\w-]*[_-](?<!{_SPECIAL}_)TOKEN|[\w-]*{_KINDS})["']?\s*[=:]\s*)(?:\\*["'])?"""
    r"""|Bearer\s+(?=\S{8})|Authorization["']?\s*[=:]\s*["']?Basic\s+|[?&](?:sig|X-(?:Amz|Goog)-Signature)=)"""
    r"""(?:(?<=")[^"\n]+|(?<=')[^'\n]+|[^\s"',;]+)""",
    re.IGNORECASE,
)
_HINTS = re.compile(
    "token|key|secret|passw|passphrase|credential|database_url|dsn|pwd|bearer|basic|sig=|signature=|://",
    re.IGNORECASE,
)
SHORTEST = 8  # characters; a shorter value of some *_KEY would blank out ordinary words
MOST_HELD = 2**12  # pieces, and letters of one, that wait for a line's end
SHORTEST_KEPT = 4  # of values that are known to be secret: as words of their own
REFERENCE = re.compile(r"\$\{env:([^{}]*)\}")
# Where they may stand: those who use these values reveal them.
PLACES = re.compile(
    r"algorithm\.rewards\.\d+\.options\..+|algorithm\.generator\.url|strategy\.(secret|(options|config)\..+)",
    re.DOTALL,
)
ALLOWED = "rewards' options, generator.url, strategy.secret and a DeepSpeed config may hold one"
# Where secrets lie in a cluster, and not what they are.
NAMES = (
    "launch.secrets",
    "launch.image_pull_secrets",
)
_kept: set[str] = set()  # variables whose values are secret, whatever their names
Secrets = list[tuple[str, bool]]


def redact(text: str, values: Secrets | None = None) -> str:
    """The text without NAME=value pairs, passwords in URLs, and the values of this environment's secrets (`values`, if read already)."""
    for value, known in _values() if values is None else values:
        if len(value) >= SHORTEST:
            text = text.replace(value, REDACTED)
        elif known and len(value) >= SHORTEST_KEPT and value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", REDACTED, text)
    if not _HINTS.search(text):  # most texts, and long ones fast
        return text
    return URL_PASSWORD.sub(rf"\1{REDACTED}", _ASSIGNED.sub(rf"\1{REDACTED}", text))


def _values() -> Secrets:
    """Secret values, and whether they are known to be (in the YAML, or looked up for it)."""
    found: Secrets = []
    for name, value in os.environ.items():
        if name.startswith(OURS):
            found += ((str(leaf), True) for leaf in _leaves(_of_json(value)))
        elif name in _kept or _named_so(name):
            found.append((value, name in _kept))
    return found


def _of_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a variable of the user's own that has such a name
        return text


@lru_cache(maxsize=4096)
def _named_so(name: str) -> bool:
    return SECRET.search(name) is not None


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in dictionaries and lists, at any depth."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def plain(value: Any, secret: bool = False, values: Secrets | None = None) -> Any:
    """A value in JSON's own types, redacted, keys too; `secret`: texts altogether. NaN becomes null and inf a string; what JSON does not
    know is written as its text. `values`: the environment's secrets, read once for all that is in the value."""
    if values is None:
        values = _values()
    if isinstance(value, str):
        return REDACTED if secret else redact(value, values)
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for key, inner in value.items():
            # Numbers stay whatever they are called: a figure may well be named loss_per_token.
            name, given = (
                redact(str(key), values),
                plain(inner, secret or _named_so(str(key)), values),
            )
            # Counts by reason: two reasons that differ in a secret alone are one.
            made[name] = (
                made[name] + given
                if name in made and isinstance(given, int) and isinstance(made[name], int)
                else given
            )
        return made
    if isinstance(value, list | tuple | set):
        return [plain(v, secret, values) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    # `item` gives the numbers of numpy and torch as Python's.
    return plain(value.item() if hasattr(value, "item") else str(value), secret, values)


class _Redacting:
    """A text stream that writes no secret; everything else is the stream's own. Whole lines go there, or what a flush finds: `print`
    gives the name of a secret and its value one after the other. No lock: a process that is forked meanwhile would keep it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, deque[str]()

    def write(self, text: str) -> int:
        self._held.append(text)
        if "\n" in text or len(text) > MOST_HELD or len(self._held) > MOST_HELD:
            self._give(whole="\n" in text)
        return len(text)

    def flush(self) -> None:
        self._give(whole=False)
        self._stream.flush()

    def _give(self, whole: bool) -> None:
        pieces = []
        with suppress(IndexError):  # also where another thread takes the last one
            while True:
                pieces.append(self._held.popleft())
        head, end, tail = "".join(pieces).rpartition("\n")
        if whole and tail:
            self._held.appendleft(tail)
        self._stream.write(redact(head + end if whole else head + end + tail))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_streams() -> Iterator[None]:
    """Inside, what Python prints to standard output and standard error, which are log files, is redacted."""
    out, err = cast("Any", _Redacting(sys.stdout)), cast("Any", _Redacting(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            with suppress(OSError):  # a full disk: what ended the work counts
                out.flush()
                err.flush()


def withhold(value: Any, where: Callable[[Place], str], place: Place = ()) -> Any:
    """A copy of the config's values in which `${env:…}` stands for each secret. `where`: how an error line names a place. Raises
    ConfigError for a secret, and for an `${env:…}`, where nobody would look it up."""
    dotted = ".".join(place)
    if dotted in NAMES:
        return value
    if place and _secret(place[-1], value):
        if PLACES.fullmatch(dotted):
            name = OURS + re.sub(r"\W", "_", dotted).upper()
            os.environ[name] = json.dumps(value)
            return f"${{env:{name}}}"
        if not place[-1].lower().endswith("token"):  # of a model's config: special tokens
            raise ConfigError(
                "it would be written into the run folder",
                where=f"{where(place)} is a secret",
                fix=f"take it out; {ALLOWED}",
            )
    if isinstance(value, dict):
        return {key: withhold(inner, where, (*place, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [withhold(inner, where, (*place, str(index))) for index, inner in enumerate(value)]
    if isinstance(value, str) and REFERENCE.search(value) and not PLACES.fullmatch(dotted):
        what = f"no ${{env:…}} can stand here: {ALLOWED}"
        raise ConfigError(
            what, where=where(place), fix="write the value, or lay it over as an override"
        )
    return value


def withheld() -> dict[str, str]:
    """The variables of this process that stand for secrets of a YAML."""
    return {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def _secret(key: str, value: Any) -> bool:
    if isinstance(value, str) and REFERENCE.search(value):
        return False
    if isinstance(value, str) and URL_PASSWORD.search(value):
        return True
    if PASSWORD.search(key):
        return value is not None and not isinstance(value, bool)
    # Numbers are left alone: a figure may be named loss_per_token.
    texts = (leaf for leaf in _leaves(value) if isinstance(leaf, str))
    return SECRET.search(key) is not None and any(
        text and not REFERENCE.search(text) for text in texts
    )


def reveal(value: Any, where: str) -> Any:
    """The value with the environment's in the place of each `${env:NAME}`, at any depth; from then on they are redacted in this process.

    Raises ConfigError for a variable that is not set."""
    if isinstance(value, dict):
        return {key: reveal(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and whole[1].startswith(OURS):
        return json.loads(_variable(whole[1], where))
    return REFERENCE.sub(lambda match: _variable(match[1], where), value)


def _variable(name: str, where: str) -> str:
    if value := os.environ.get(name):
        _kept.add(name)
        return value
    # Behind `api_key: ` the line's redaction would look for a secret.
    section, _, key = where.rpartition(".")
    if name.startswith(OURS):
        fix = "go on with the YAML that has it, or write ${env:NAME} there and set that variable"
        raise ConfigError(
            f"the secret {key!r} is not kept in the run folder", where=section, fix=fix
        )
    what = f"the environment variable {name!r}, which {key!r} names, is not set"
    raise ConfigError(what, where=section, fix=f"export {name}=… on every host, and start again")
