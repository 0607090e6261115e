"""Whatever stands in a YAML, in JSON, in a template or on the command line: one line, no traceback, no hang.

Each case runs in this process under an alarm. The cases are the same on every machine (`derandomize`). For more, of other seeds:

    DRUMLINE_FUZZ=20000 python -m pytest tests/unit/test_fuzz.py -n0 --timeout 0
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from drumline import cli
from drumline.config.load import load, load_text, to_yaml
from drumline.config.schema import Config
from drumline.errors import ConfigError, DataError
from drumline.foreign import parse_json
from drumline.models import rendering
from tests.tiny import CHATML

MORE = int(os.environ.get("DRUMLINE_FUZZ", "0"))
SECONDS = 30  # of one case: a waiting limit, not a measurement


def cases(number: int) -> Any:
    return settings(
        max_examples=MORE or number,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


class Hang(BaseException):
    """A case that does not come to its end."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(*arguments: str) -> str:
    """Run a command; what it says on stderr. Fails on a traceback, a hang, a net, and more than one line."""
    said, out = io.StringIO(), io.StringIO()
    code: object = 0
    with alarm(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
    text = said.getvalue()
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert "unforeseen" not in text and "Traceback" not in text, text
    usage = "Usage:" in text
    assert code in (0, 2) and (code == 0 or len(errors) == 1 or usage), (code, text)
    assert all(len(line) < 6000 for line in errors)
    return text


RUN: dict[str, Any] = {"data": {"train": [{"kind": "file", "path": "rows.jsonl"}]}, "run": {"steps": 1, "dir": "run"}}

numbers = st.sampled_from(
    [0, -1, 1, 2, 7, 10**9, 2**63 - 1, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e300, 1e-300, float("inf"), float("nan"), 1.0]
)
words = st.sampled_from(
    [
        "",
        " ",
        "x",
        "none",
        "auto",
        "null",
        "true",
        "x" * 5000,
        "a/" * 3000,
        "\u0000",
        "\u202e",
        "😀",
        "../..",
        "/dev/zero",
        "/",
        "~",
        "*",
        "{",
        "package:",
        "hub:x",
    ]
)
texts = words | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = numbers | texts | st.booleans() | st.none()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)


def places(model: Any = Config, prefix: str = "", depth: int = 0) -> list[str]:
    from drumline.config.suggest import _sections

    found = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        if depth < 3:
            found += [place for section in _sections(field.annotation) for place in places(section, f"{prefix}{name}.", depth + 1)]
    return sorted(set(found))


@cases(400)
@given(place=st.sampled_from(places()), value=values)
def test_any_value_at_any_place_of_the_yaml(place: str, value: Any) -> None:
    made = json.loads(json.dumps(RUN))
    inside = made
    *sections, last = place.split(".")
    for section in sections:
        inside = inside.setdefault(section, {}) if isinstance(inside.get(section, {}), dict) else inside
    inside[last] = value
    with alarm():
        try:
            config = load_text(yaml.safe_dump(made, allow_unicode=True), [], "c.yaml")
        except ConfigError as error:
            assert error.line().isprintable() and len(error.line()) < 6000
        else:
            assert load_text(to_yaml(config), [], "again.yaml") == config


@cases(200)
@given(text=st.text(max_size=60) | st.text("[]{}:,-&*!|>'\"#%@` \n\t0a~?", max_size=60) | st.binary(max_size=40))
def test_any_bytes_as_a_config(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "t.yaml").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with alarm(), pytest.raises(ConfigError) as error:
        load(tmp_path / "t.yaml", [])
    assert error.value.line().isprintable()


@cases(200)
@given(text=st.text(max_size=40) | st.text('[]{}:,"\\ud80019e-+.', max_size=60) | values.map(json.dumps))
def test_any_json(text: str) -> None:
    with alarm():
        try:
            json.dumps(parse_json(text, "x", DataError, numbers=True)).encode()
        except DataError as error:
            assert error.line().isprintable()


COMMANDS = ("train", "convert", "prepare", "strategies", "--dry-run", "--resume", "c.yaml", "strategy=ddp", "a=", "=")


@cases(100)
@given(
    arguments=st.lists(
        st.sampled_from(COMMANDS) | texts,
        min_size=1,
        max_size=5,
    )
)
def test_any_command_line(arguments: list[str]) -> None:
    one_line(*arguments)


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{% for i in range(99999) %}", "{{ m.content }}",
    "{{ messages }}", "{{ 'a' * 10**9 }}", "{% set x = 'a' %}", "{% set x = x ~ x %}",
    "{% if m.role %}", "{% endif %}", "{{ 9**9**9 }}", "{{ x|center(10**9) }}",
    "{{ raise_exception('no') }}", "{{ 1/0 }}", "{% macro f() %}{{ f() }}{% endmacro %}", "{{ f() }}",
    "{% generation %}", "{% endgeneration %}", "text", "{{",
    "}}", "{%", "{{ ''.__class__ }}",
]  # fmt: skip


@cases(100)
@given(template=st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=20) | st.just(CHATML))
def test_any_template(template: str) -> None:
    rendering.limit()
    with alarm(), contextlib.suppress(Exception), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "MOST_STEPS", 5_000)
        text = render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)[0][0]
        assert isinstance(text, str)
