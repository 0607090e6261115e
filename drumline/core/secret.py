"""Values of the config that must not be written down: `${env:NAME}`, and secrets that stand in the YAML as they are.

A Config holds `${env:NAME}`, and so does all that is made of it: the plan, checkpoints, trackers. Whoever uses the value looks it up in
its own environment at that moment (`reveal`). A secret that the YAML spells out is moved to this process's environment, which ranks and
their children inherit, and `${env:DRUMLINE_SECRET_…}` takes its place (`withhold`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from drumline.core.redact import OURS, PASSWORD, SECRET, URL_PASSWORD, keep
from drumline.core.yaml_lines import Place
from drumline.errors import ConfigError

NAMED = re.compile(r"\$\{env:([^{}]*)\}")
# Where they may stand: those who use these values reveal them.
PLACES = re.compile(r"algorithm\.rewards\.\d+\.options\..+|algorithm\.generator\.url|strategy\.(options|config)\..+", re.DOTALL)
ALLOWED = "rewards' options, generator.url and a DeepSpeed config may hold one"


def withhold(value: Any, where: Callable[[Place], str], place: Place = ()) -> Any:
    """A copy of the config's values in which `${env:…}` stands for each secret. `where`: how an error line names a place.

    Raises ConfigError for a secret, and for an `${env:…}`, where nobody would look it up.
    """
    dotted = ".".join(place)
    if place and _secret(place[-1], value):
        if PLACES.fullmatch(dotted):
            name = OURS + re.sub(r"\W", "_", dotted).upper()
            os.environ[name] = json.dumps(value)
            return f"${{env:{name}}}"
        if not place[-1].lower().endswith("token"):  # of a model's config: special tokens
            raise ConfigError("it would be written into the run folder", where=f"{where(place)} is a secret", fix=f"take it out; {ALLOWED}")
    if isinstance(value, dict):
        return {key: withhold(inner, where, (*place, str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [withhold(inner, where, (*place, str(index))) for index, inner in enumerate(value)]
    if isinstance(value, str) and NAMED.search(value) and not PLACES.fullmatch(dotted):
        what = f"no ${{env:…}} can stand here: {ALLOWED}"
        raise ConfigError(what, where=where(place), fix="write the value, or lay it over as an override")
    return value


def withheld() -> dict[str, str]:
    """The variables of this process that stand for secrets of a YAML."""
    return {name: value for name, value in os.environ.items() if name.startswith(OURS)}


def _secret(key: str, value: Any) -> bool:
    if isinstance(value, str) and NAMED.search(value):
        return False
    if isinstance(value, str) and URL_PASSWORD.search(value):
        return True
    if PASSWORD.search(key):
        return value is not None and not isinstance(value, bool)
    return bool(SECRET.search(key)) and _has_text(value)


def _has_text(value: Any) -> bool:
    """Numbers are left alone: a figure may be named loss_per_token."""
    if isinstance(value, dict | list):
        return any(map(_has_text, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value != "" and not NAMED.search(value)


def reveal(value: Any, where: str) -> Any:
    """The value with the environment's in the place of each `${env:NAME}`, at any depth; from then on they are redacted in this process.

    Raises ConfigError for a variable that is not set."""
    if isinstance(value, dict):
        return {key: reveal(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = NAMED.fullmatch(value)
    if whole and whole[1].startswith(OURS):
        return json.loads(_variable(whole[1], where))
    return NAMED.sub(lambda match: _variable(match[1], where), value)


def _variable(name: str, where: str) -> str:
    if value := os.environ.get(name):
        keep(name)
        return value
    section, _, key = where.rpartition(".")  # behind `api_key: ` the line's redaction would look for a secret
    if name.startswith(OURS):
        fix = "go on with the YAML that has it, or write ${env:NAME} there and set that variable"
        raise ConfigError(f"the secret {key!r} is not kept in the run folder", where=section, fix=fix)
    what = f"the environment variable {name!r}, which {key!r} names, is not set"
    raise ConfigError(what, where=section, fix=f"export {name}=… on every host, and start again")
