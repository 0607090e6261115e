"""`make docs`: the site has all pages of both languages, opens without a network, and its links lead to files."""

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
# What a browser loads by itself: attributes of these tags (a link to another page is <a>), and what styles name.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed|use)\b[^>]*?\b(?:src|href|srcset|data)=[\"']?([^\"'\s>]+)"
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


@pytest.mark.slow
def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    menu = (ROOT / "zensical.toml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.name).with_suffix(".html").exists() and f'"{page.name}"' in menu, (
            f"{page.name} is not in zensical.toml"
        )


def test_a_page_has_labels_in_its_language(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        language, label = ("zh", "查找") if page.stem.endswith(".zh") else ("en", "Search")
        text = (site / page.name).with_suffix(".html").read_text()
        assert f'<html lang="{language}"' in text and re.search(
            rf'class="md-search__button">\s*{label}\s*<', text
        ), page.name


@pytest.mark.claim("the site of docs/ loads nothing from elsewhere")
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        text = path.read_text()
        loaded = LOADED.findall(text) if path.suffix == ".html" else STYLED.findall(text)
        assert loaded or path.parent.name != "site", path
        assert not [each for each in loaded if re.match(r"(https?:)?//", each)], path.name
    # The theme's script fetches what draws a mermaid diagram from a CDN, where a page has one.
    pages = [page.read_text() for page in site.glob("*.html")]
    assert not any('class="mermaid"' in page for page in pages) and list(site.rglob("*.js"))


def test_links_lead_to_files(site: Path) -> None:
    for page in sorted(
        set(site.glob("*.html")) - {site / "404.html"}
    ):  # its links are those of a server's root
        for link in re.findall(r'<a\b[^>]*?href="([^"#]+)', page.read_text()):
            target = unquote(link.partition("?")[0])
            assert (
                re.match(r"(https?:|mailto:)", target)
                or (site / target).is_file()
                or (site / target / "index.html").is_file()
            ), f"{page.name}: {link}"
