"""Render the Jinja2 templates that lie beside the package's modules.

A template is named by its path in the package. A value that it uses and was not given raises an
error, and is never an empty text.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(**options: Any) -> Environment:
    """Return an environment of the package's templates; `options` are those of Jinja2.

    Lines that have only a statement of Jinja2 leave no empty line behind.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("drumline", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
        **options,
    )


@cache
def _text_environment() -> Environment:
    """Return the environment of templates that are not HTML, such as scripts."""
    return environment(autoescape=False)


def render_text(template: str, **values: Any) -> str:
    """Return a template with values as they are: what a shell reads must be quoted already."""
    return _text_environment().get_template(template).render(values)
