"""`make docs`: docs/ as a site in build/site that opens without a network. What pages name outside of docs/ lies in build/site/source."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"
UPWARD_LINK = re.compile(r'href="(\.\./[^"#]+)')


def build() -> int:
    """Build the site. Returns zensical's exit code; it reports links to pages and sections that are not there."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        return code
    for page in sorted(SITE.rglob("*.html")):
        page.write_text(_with_copied_sources(page.read_text(), page.parent.relative_to(SITE)))
    return code


def _with_copied_sources(text: str, folder: Path) -> str:
    """Return the text of a page in `folder` with its links out of docs/ led to copies."""
    return UPWARD_LINK.sub(lambda found: f'href="{_link(found[1], folder)}', text)


def _link(link: str, folder: Path) -> str:
    """Return a link of a page in `folder`. If it leaves docs/, copy its target into the site and return the copy's link."""
    target = Path(os.path.normpath(DOCS / folder / link))
    if target.is_relative_to(DOCS):
        return link
    copied = _copy_into_site(str(target.relative_to(ROOT)))
    return os.path.relpath(copied, folder)


def _copy_into_site(name: str) -> str:
    """Copy a file or folder of the repository and return its path in the site; a page lists a folder's files. Raises FileNotFoundError."""
    source, target = ROOT / name, SITE / "source" / name
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        return f"source/{name}"
    shutil.copytree(
        source,
        target,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    items = "".join(
        f'<li><a href="{html.escape(each)}">{html.escape(each)}</a></li>'
        for each in names
        if each != "index.html"
    )
    (target / "index.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>{name}</title><ul>{items}</ul>"
    )
    return f"source/{name}/index.html"


if __name__ == "__main__":
    raise SystemExit(build())
