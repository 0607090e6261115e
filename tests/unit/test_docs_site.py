"""`make docs`: the site has all pages of both languages, opens without a network, and its links
lead to files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.harness import ENV, ROOT

pytestmark = pytest.mark.skipif(
    find_spec("zensical") is None, reason="needs `pip install zensical`"
)
SOURCES = sorted((ROOT / "docs").rglob("*.md"))
# What a browser loads by itself: attributes of these tags (a link to another page is <a>), and what
# styles name.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed|use)\b[^>]*?"
    r"\b(?:src|href|srcset|data)=[\"']?([^\"'\s>]+)"
)
STYLED = re.compile(r"(?:url\(|@import)\s*[\"']?([^\"')]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that other builds of the checkout are left alone."""
    copy = tmp_path_factory.mktemp("site") / "copy"
    copy.mkdir()
    for name in ("examples", "benchmarks", "tests"):
        (copy / name).symlink_to(ROOT / name)

    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, copy / name)

    shutil.copyfile(ROOT / "zensical.toml", copy / "zensical.toml")
    command = [sys.executable, str(copy / "scripts" / "docs_site.py")]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr

    return copy / "build" / "site"


def page_of(site: Path, source: Path) -> Path:
    """Return the page that is made of a file of docs/."""
    return (site / source.relative_to(ROOT / "docs")).with_suffix(".html")


def pages_of(site: Path) -> list[Path]:
    """Return the pages, without copies of the sources, and without 404.html, whose links are those
    of a server's root."""
    pages = []
    for page in sorted(site.rglob("*.html")):
        if page.name != "404.html" and not page.is_relative_to(site / "source"):
            pages.append(page)

    return pages


@pytest.mark.slow
def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    menu = (ROOT / "zensical.toml").read_text()
    for source in SOURCES:
        name = source.relative_to(ROOT / "docs").as_posix()
        assert page_of(site, source).exists(), name
        assert f'"{name}"' in menu, f"{name} is not in zensical.toml"


def test_a_page_has_labels_in_its_language(site: Path) -> None:
    for source in SOURCES:
        language, label = "en", "Search"
        if source.stem.endswith(".zh"):
            language, label = "zh", "查找"

        text = page_of(site, source).read_text()

        assert f'<html lang="{language}"' in text, source.name

        button = rf'class="md-search__button">\s*{label}\s*<'

        assert re.search(button, text), source.name


@pytest.mark.claim("the site of docs/ loads nothing from elsewhere")
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        pattern = LOADED if path.suffix == ".html" else STYLED
        loaded = pattern.findall(path.read_text())

        assert loaded or path.parent.name != "site", path

        for address in loaded:
            assert not re.match(r"(https?:)?//", address), path.name

    # The theme's script fetches what draws a mermaid diagram from a CDN, where a page has one.
    for page in pages_of(site):
        assert 'class="mermaid"' not in page.read_text()

    assert list(site.rglob("*.js"))


def test_links_lead_to_files(site: Path) -> None:
    for page in pages_of(site):
        for link in re.findall(r'<a\b[^>]*?href="([^"#]+)', page.read_text()):
            target = unquote(link.partition("?")[0])
            if re.match(r"(https?:|mailto:)", target):
                continue

            path = page.parent / target

            assert path.is_file() or (path / "index.html").is_file(), f"{page}: {link}"
