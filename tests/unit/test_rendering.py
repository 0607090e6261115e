"""Templates that loop or explode end in one line; those that people write come out as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from drumline.models import rendering

CHAT = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]]
MILLION = "{% set x = 'a' * 10**6 %}"
WELL = {
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}": "<user>hello<assistant>hi",
    "{{ '%s-%05d'|format('a', 3) ~ '{}'.format(1) + ', '.join(['a', 'b']) }}": "a-000031a, b",
    "{{ messages|map(attribute='role')|join(', ') }} {{ [1]|tojson }} {{ 'aa'.replace('a', 'b') }}": "user, assistant [1] bb",
    "{{ 2**10 }} {{ 3 * 'ab' }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [1, 2]|sum }}": "1024 ababab 1 3",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": "hellohi",
}
ILL = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop in a condition": "{% for a in range(99999) if (range(99999)|list|length) < 0 %}{% endfor %}",
    "a long range": "{{ range(10**9)|list }}",
    "a tower": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a number times a text": "{{ 10**10 * 'a' }}",
    "a list times a number": "{{ [1] * 10**10 }}",
    "doubled by ~": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by +": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists of lists": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "a wide number": "{{ '%01000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (10**9, 1) }}",
    "a wide format": "{{ '{:>1000000000}'.format(1) }}",
    "replace": MILLION + "{{ x.replace('a', x) }}",
    "the filter replace": MILLION + "{{ x|replace('', x) }}",
    "join": MILLION + "{{ x.join(range(99999)) }}",
    "a lazy join": MILLION + "{{ range(99999)|map('replace', '1', x)|join }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "round": "{{ 1.5|round(10**9, 'floor') }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "wordwrap": MILLION + "{{ x|wordwrap(1) }}",
    "indents": "{{ [1]|tojson(indent=10**10) }}",
    "a date": "{{ strftime_now('%1000000000d') }}",
    "what stands in a loop": "{% for a in range(99999) %}" + "x" * 10**5 + "{% endfor %}",
    "a block that is kept": "{% set x %}{% for i in range(99999) %}{{ 'a' * 10**5 }}{% endfor %}{% endset %}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested loops": "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "a very long one": "x" * 2**21,
}


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MOST_STEPS", 20_000)
    rendering.limit_templates()


def render(template: str) -> str:
    text: Any = render_jinja_template(CHAT, chat_template=template)[0][0]
    return str(text)


@pytest.mark.parametrize("template", WELL)
def test_what_people_write_comes_out_as_before(template: str) -> None:
    assert render(template) == WELL[template]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ILL)
def test_a_template_that_does_not_end_is_refused(name: str) -> None:
    with pytest.raises(Exception) as error:
        render(ILL[name])
    assert not isinstance(error.value, MemoryError)


def test_a_thread_counts_for_itself() -> None:
    said: list[object] = []

    def work() -> None:
        try:
            said.append(render(ILL["loops"]))
        except rendering.TooMuch as error:
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        assert render(next(iter(WELL))) == "<user>hello<assistant>hi"
    thread.join(60)
    assert not thread.is_alive() and isinstance(said[0], rendering.TooMuch)
