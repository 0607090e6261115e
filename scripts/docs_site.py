"""`make docs`: docs/ as a site in build/site that opens without a network. What pages name outside of docs/ lies in build/site/source."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
OUTSIDE = re.compile(r'href="\.\./([^"#]+)')


def build() -> int:
    """Build the site. Returns zensical's exit code; it reports links to pages and sections that are not there."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    for page in sorted(SITE.glob("*.html")) if code == 0 else []:
        page.write_text(
            OUTSIDE.sub(lambda found: f'href="{_copied(found[1].rstrip("/"))}', page.read_text())
        )
    return code


def _copied(name: str) -> str:
    """Where a file of the repository lies in the site; of a folder all files do, and a page lists them. Raises FileNotFoundError."""
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
