"""Templates of pages and scripts: what is escaped, what is not, and what a missing value is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import TemplateNotFound, UndefinedError

from drumline.report.markup import MOST_TEXT, html_environment
from drumline.system.templates import environment, render_text
from tests.harness import ROOT

HOSTILE = "<b onclick='x'>\"&"
ESCAPED = "&lt;b onclick=&#39;x&#39;&gt;&#34;&amp;"
CHAT = ROOT / "drumline/models/chat"
TEMPLATES = sorted(
    path for path in (ROOT / "drumline").rglob("*.jinja") if not path.is_relative_to(CHAT)
)


def html(source: str, **values: object) -> str:
    return html_environment().from_string(source).render(values)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_each_template_can_be_read(path: Path) -> None:
    assert environment().get_template(str(path.relative_to(ROOT / "drumline"))).name


def test_values_are_formatted_redacted_and_escaped() -> None:
    assert html('<p title="{{ x }}">{{ x }}</p>', x=HOSTILE) == (
        f'<p title="{ESCAPED}">{ESCAPED}</p>'
    )
    assert html("{{ x }}", x="api_key=hunter2hunter2") == "api_key=[redacted]"
    assert html("{{ x }} {{ y }} {{ z }}", x=12345, y=1234.5678, z=True) == "12,345 1,234.6 True"
    assert html("{{ x }}", x=None) == '<span class="none">–</span>'
    assert html("{{ x }}", x={"a": HOSTILE}).count("&lt;") == 1
    long = html("{{ x }}", x="a" * (MOST_TEXT + 5))
    assert long.endswith(" … (5 more characters)")


def test_what_a_macro_returns_is_escaped_once() -> None:
    source = "{% macro bold(text) %}<b>{{ text }}</b>{% endmacro %}{{ bold(x) }}"
    assert html(source, x=HOSTILE) == f"<b>{ESCAPED}</b>"


@pytest.mark.parametrize("source", ["{{ x }}", "{% if x %}{% endif %}", "{{ y.z }}"])
def test_a_value_that_is_missing_is_an_error(source: str) -> None:
    with pytest.raises(UndefinedError):
        html(source, y="text")
    with pytest.raises(TemplateNotFound):
        render_text("no/such/template.jinja")


def test_a_text_is_left_as_it_is() -> None:
    made = environment().from_string("# {{ x }}\n{% if x %}\n  {{ y }}\n{% endif %}\n")
    assert made.render(x=HOSTILE, y=12345) == f"# {HOSTILE}\n  12345\n"


def test_jinja_is_imported_when_a_page_is_made() -> None:
    code = "import sys, drumline.report.page, drumline.launch.slurm.script; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "drumline.report.page" in told.stdout and "jinja2" not in told.stdout
