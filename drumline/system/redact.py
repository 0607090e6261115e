"""Keep secrets out of all that is written down, and out of the config.

Events, logs, trackers and error reports are redacted before they are written (`redact`,
`redacted_json`).

A Config has `${env:NAME}` in the place of a secret, and so has everything that is made from it: the
plan, checkpoints, trackers. Code that uses the value looks it up in its own environment at that
moment (`reveal`). A secret that the YAML spells out is moved to this process's environment, which
ranks and their children inherit, and `${env:DRUMLINE_SECRET_…}` takes its place (`withhold`).
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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from drumline.errors import ConfigError

if TYPE_CHECKING:
    from drumline.system.yaml_lines import Place

REDACTED = "[redacted]"
# Prefix of variables that hold, as JSON, what stood in a YAML (`withhold`).
OURS = "DRUMLINE_SECRET_"
# What stands before _TOKEN in the name of a vocabulary's special token, such as pad_token.
_SPECIAL = "(?:pad|eos|bos|unk|sep|cls)"
_PASSWORDS = "(?:SECRET|PASSWORD|PASSWD|PASSPHRASE)"
_KINDS = (
    rf"(?:{_PASSWORDS}S?|(?:[_-]|API|ACCESS|ACCOUNT)KEY(?:[_-]?ID|S)?|CREDENTIALS?|DATABASE_URL|(?<![A-Z])DSN"
    # PWD alone is the shell's current folder.
    r"|(?:MYSQL|PG|DB|DATABASE|ADMIN|USER)_PWD|(?<=;)PWD)"
)
# Names of environment variables and keys whose values are secret: HF_TOKEN, api_key and
# AWS_ACCESS_KEY_ID, but not pad_token or tokens.
SECRET = re.compile(rf"(?:{_KINDS}|(?<!{_SPECIAL}_)TOKEN)$", re.IGNORECASE)
# Names of keys of a config of which even a number is secret (`withhold`).
PASSWORD = re.compile(rf"{_PASSWORDS}S?$", re.IGNORECASE)
# scheme://user:password@, and scheme://token@. A match may only begin where a word begins, so that
# the search through a text of n letters takes n steps.
URL_PASSWORD = re.compile(
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://(?:[^\s/@:]*:(?=[^\s/]+@)|(?=[^\s/@:]{20,}@)))[^\s/]+(?=@)",
    re.IGNORECASE,
)
# `--api-key abc`, HF_TOKEN=abc, "password": "a b", a signed address. A bare `key: x` or `token: x`
# is prose more often than a secret.
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
# A value of at least this many characters is redacted wherever it is found. Shorter values of some
# *_KEY would blank out ordinary words.
SHORTEST = 8
# A shorter value that is known to be secret is redacted as a whole word, if it has at least this
# many characters.
SHORTEST_KEPT = 4
# The most pieces of a line, and the most characters of a piece, that are held until the line ends.
MOST_HELD = 2**12
REFERENCE = re.compile(r"\$\{env:([^{}]*)\}")
# Places of a config that may have secrets and references, because the code that uses them calls
# `reveal`.
PLACES = re.compile(
    r"algorithm\.rewards\.\d+\.options\..+|algorithm\.(generator|teacher)\.url(\.\d+)?|strategy\.(secret|(options|config)\..+)",
    re.DOTALL,
)
ALLOWED = "rewards' options, generator.url, teacher.url, strategy.secret and a DeepSpeed config may hold one"
# Keys whose values are names of a cluster's secrets, and so not secret themselves.
NAMES = (
    "launch.secrets",
    "launch.image_pull_secrets",
)
# Names of variables that `reveal` has looked up. Their values are secret, whatever the names.
_kept: set[str] = set()


class Secret(NamedTuple):
    """A value to redact. `is_known`: it stood in the YAML, or was looked up for it."""

    value: str
    is_known: bool


Secrets = list[Secret]


def redact(text: str, values: Secrets | None = None) -> str:
    """Return a text with `[redacted]` in place of secrets.

    Secrets are the values of NAME=value pairs with a telling name, passwords in URLs, and the
    values of this environment's secret variables.

    `values`: the latter, if they were read already.
    """
    if values is None:
        values = _values()
    for value, is_known in values:
        if len(value) >= SHORTEST:
            text = text.replace(value, REDACTED)
        elif is_known and len(value) >= SHORTEST_KEPT and value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", REDACTED, text)
    # Most texts have no hint, and long ones are searched fast.
    if not _HINTS.search(text):
        return text
    text = _ASSIGNED.sub(rf"\1{REDACTED}", text)
    return URL_PASSWORD.sub(rf"\1{REDACTED}", text)


def _values() -> Secrets:
    """Return the secret values of this environment, the longest first.

    One secret may be a part of another, whose rest would stay if the part were replaced first.
    """
    secrets: Secrets = []
    for name, value in os.environ.items():
        if name.startswith(OURS):
            for leaf in _leaves(_parse_json(value)):
                secrets.append(Secret(str(leaf), True))
        elif name in _kept:
            secrets.append(Secret(value, True))
        elif _is_secret_name(name):
            secrets.append(Secret(value, False))
    return sorted(secrets, key=lambda secret: len(secret.value), reverse=True)


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text, else the text itself.

    Of variables with the prefix OURS, `withhold` sets JSON, and a user may set any text.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    """Return whether values of variables and keys of this name are secret."""
    return SECRET.search(name) is not None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in dictionaries and lists, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for inner in value:
        yield from _leaves(inner)


def redacted_json(value: Any, secret: bool = False, values: Secrets | None = None) -> Any:
    """Return a value in JSON's own types, with `[redacted]` in place of secrets, in keys too.

    NaN becomes null, inf a string, and what JSON does not know its text. Numbers stay, whatever
    their keys are called: a metric may be named loss_per_token.

    `value`: tensors and arrays in it must have one entry. `secret`: each text in it is a secret, as
    a value of a key such as api_key. `values`: the environment's secrets, if they were read already.
    """
    if values is None:
        values = _values()
    if isinstance(value, str):
        return REDACTED if secret else redact(value, values)
    if isinstance(value, dict):
        return _redacted_dict(value, secret, values)
    if isinstance(value, list | tuple | set):
        return [redacted_json(inner, secret, values) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    # A number of numpy or torch: `item` returns it as Python's own.
    if hasattr(value, "item"):
        return redacted_json(value.item(), secret, values)
    return redacted_json(str(value), secret, values)


def _redacted_dict(value: dict[Any, Any], secret: bool, values: Secrets) -> dict[str, Any]:
    """Return a dictionary as `redacted_json` returns values."""
    result: dict[str, Any] = {}
    for key, inner in value.items():
        name = redact(str(key), values)
        redacted_inner = redacted_json(inner, secret or _is_secret_name(str(key)), values)
        known = result.get(name)
        if isinstance(redacted_inner, int) and isinstance(known, int):
            # Counts by reason: two reasons that differ only in a secret are one.
            redacted_inner = known + redacted_inner
        result[name] = redacted_inner
    return result


class _Redacting:
    """A text stream that redacts what is written to it, and passes it to another stream.

    It holds text until a line is whole or a flush comes, because `print` writes the name of a
    secret and its value one after the other. It has no lock: a process that is forked meanwhile
    would never release it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._held = deque[str]()

    def write(self, text: str) -> int:
        self._held.append(text)
        has_line = "\n" in text
        if has_line or len(text) > MOST_HELD or len(self._held) > MOST_HELD:
            self._write_held(only_whole_lines=has_line)
        return len(text)

    def flush(self) -> None:
        self._write_held(only_whole_lines=False)
        self._stream.flush()

    def _write_held(self, only_whole_lines: bool) -> None:
        """Write the pieces that are held.

        With `only_whole_lines` the text after the last line break stays held.
        """
        pieces = []
        # IndexError ends the loop, also if another thread took the last piece.
        with suppress(IndexError):
            while True:
                pieces.append(self._held.popleft())
        text = "".join(pieces)
        if only_whole_lines:
            end = text.rfind("\n") + 1
            if end < len(text):
                self._held.appendleft(text[end:])
            text = text[:end]
        self._stream.write(redact(text))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_streams() -> Iterator[None]:
    """Redact what Python prints inside the block; standard output and error are log files."""
    out = cast("Any", _Redacting(sys.stdout))
    err = cast("Any", _Redacting(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            # On a full disk: the error that ended the block counts.
            with suppress(OSError):
                out.flush()
                err.flush()


def withhold(value: Any, where: Callable[[Place], str], place: Place = ()) -> Any:
    """Return a copy of the config's values in which `${env:…}` stands for each secret.

    The secrets themselves move to variables of this process's environment.

    `value`: of the config, at `place`. `where`: returns how an error names a place. Raises
    ConfigError for a secret or an `${env:…}` at a place that no code reveals.
    """
    dotted = ".".join(place)
    if dotted in NAMES:
        return value
    may_hold_secret = PLACES.fullmatch(dotted) is not None
    if place and _is_secret(place[-1], value):
        if may_hold_secret:
            name = OURS + re.sub(r"\W", "_", dotted).upper()
            os.environ[name] = json.dumps(value)
            return f"${{env:{name}}}"
        # A model's config has special tokens: `…_token`.
        if not place[-1].lower().endswith("token"):
            raise ConfigError(
                "it would be written into the run folder",
                where=f"{where(place)} is a secret",
                fix=f"take it out; {ALLOWED}",
            )
    if isinstance(value, dict):
        return {key: withhold(inner, where, (*place, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [withhold(inner, where, (*place, str(index))) for index, inner in enumerate(value)]
    if isinstance(value, str) and REFERENCE.search(value) and not may_hold_secret:
        raise ConfigError(
            f"no ${{env:…}} can stand here: {ALLOWED}",
            where=where(place),
            fix="write the value, or lay it over as an override",
        )
    return value


def withheld() -> dict[str, str]:
    """Return the environment variables to which `withhold` has moved secrets."""
    return {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def _is_secret(key: str, value: Any) -> bool:
    """Return whether a key of the config has a secret as its value."""
    if isinstance(value, str) and REFERENCE.search(value):
        return False
    if isinstance(value, str) and URL_PASSWORD.search(value):
        return True
    if PASSWORD.search(key):
        return value is not None and not isinstance(value, bool)
    if not SECRET.search(key):
        return False
    # Numbers are left alone: a metric may be named loss_per_token.
    texts = [leaf for leaf in _leaves(value) if isinstance(leaf, str)]
    return any(text and not REFERENCE.search(text) for text in texts)


def reveal(value: Any, where: str) -> Any:
    """Return a value with the variables' values in place of each `${env:NAME}`, at any depth.

    From then on these are redacted in what this process writes. `where`: the value's key, for
    errors. Raises ConfigError for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: reveal(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and whole[1].startswith(OURS):
        return _parse_json(_variable(whole[1], where))
    return REFERENCE.sub(lambda match: _variable(match[1], where), value)


def _variable(name: str, where: str) -> str:
    """Return the value of a variable, which is redacted from now on.

    Raises ConfigError if it is not set.
    """
    value = os.environ.get(name)
    if value:
        _kept.add(name)
        return value
    # Behind `api_key: ` the line's redaction would look for a secret, so the key is not in `where`.
    section, _, key = where.rpartition(".")
    if name.startswith(OURS):
        fix = "go on with the YAML that has it, or write ${env:NAME} there and set that variable"
        raise ConfigError(
            f"the secret {key!r} is not kept in the run folder", where=section, fix=fix
        )
    what = f"the environment variable {name!r}, which {key!r} names, is not set"
    raise ConfigError(what, where=section, fix=f"export {name}=… on every host, and start again")
