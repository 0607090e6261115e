"""What the package says of itself."""

from __future__ import annotations

import re
import tomllib
from importlib import util
from pathlib import Path

import drumline

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and drumline.__version__ == newest[1]


def test_every_extra_has_code() -> None:
    """The first package of each extra is imported, or looked for, somewhere."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = "\n".join(path.read_text() for path in (ROOT / "drumline").rglob("*.py"))
    for extra, packages in extras.items():
        if extra in ("dev", "bench"):
            continue
        assert packages, extra
        first = {"pillow": "PIL", "mlflow-skinny": "mlflow", "nvidia-ml-py": "pynvml"}.get(
            name := re.split(r"[<>=\[]", packages[0])[0], name
        ).replace("-", "_")
        assert re.search(rf"\b{first}\b", code), f"nothing uses {first} of the extra {extra}"


def test_files_that_are_no_modules_are_in_the_wheel() -> None:
    """tests/configs/test_package.py builds it; this says it sooner."""
    taken = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["drumline"]
    package = ROOT / "drumline"
    files = {
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert files and not files - {path for pattern in taken for path in package.glob(pattern)}


def test_hints_name_packages() -> None:
    """`drumline[…]` can be installed only once it is published."""
    for folder in ("drumline", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md"):
                assert "drumline[" not in path.read_text(), path


def test_comments_cite_files_that_are_here() -> None:
    for folder in ("drumline", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for cited in re.findall(r"\b[\w./]+/[\w-]+\.md\b(?!\.)", path.read_text()):
                if "://" not in cited and "github.com" not in cited and "{" not in cited:
                    places = (ROOT, path.parent, ROOT / "docs")
                    assert any((place / cited).exists() for place in places), (
                        f"{path.name}: {cited}"
                    )
    assert util.find_spec("drumline")
