"""The wheel and the source archive have all of the package, and what they install trains where
there is no repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness import ENV, ROOT, events, write_config
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.full, pytest.mark.slow]
# Without this checkout: what is installed is meant.
CLEAN = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}


def run(*command: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**CLEAN, **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, made of a copy of the tree. As `python -m build` makes them, but by the
    setuptools that is here."""
    source = tmp_path_factory.mktemp("source") / "drumline"
    out = tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    shutil.copytree(
        ROOT / "drumline", source / "drumline", ignore=shutil.ignore_patterns("__pycache__")
    )
    for kind in ("sdist", "wheel"):
        run(
            sys.executable,
            "-c",
            f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})",
            cwd=source,
        )
    return out


def test_both_have_every_file(built: Path) -> None:
    here = set()
    for path in (ROOT / "drumline").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            here.add(str(path.relative_to(ROOT)))
    assert "drumline/doctor/signatures.yaml" in here
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert inside == here
    assert here <= packed


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_what_is_installed_trains_in_an_empty_folder(
    built: Path, kind: str, tmp_path: Path
) -> None:
    """A new environment, with what this one has besides drumline: torch alone would take minutes to
    install again."""
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", ask, cwd=tmp_path).strip())
    # Python 3.11 brings one that is too old.
    run(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", cwd=tmp_path)
    # A path in a .pth file: .pth files there, of editable installs, are not read. What is known of
    # distributions under development is their metadata, so their modules must be there, too.
    others = [sysconfig.get_path("purelib"), *map(str, ROOT.glob("plugins/*/src"))]
    (site / "others.pth").write_text("".join(f"{path}\n" for path in others))
    (package,) = built.glob(kind)
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--ignore-installed",
        package,
        cwd=tmp_path,
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    where = run(python, "-c", "import drumline; print(drumline.__file__)", cwd=folder).strip()
    assert Path(where).is_relative_to(tmp_path / "env")
    config = write_config(
        folder, tiny_model_dir(folder / "model"), checkpoint={"every": 2, "export": "last"}
    )
    drumline = tmp_path / "env" / "bin" / "drumline"
    path = f"{drumline.parent}:{os.environ['PATH']}"
    run(drumline, "train", config, "--nproc", "2", cwd=folder, PATH=path)
    assert len(events(folder / "run", "step")) == 4
    (folder / "log.txt").write_text("OSError: [Errno 28] No space left on device\n")
    told = subprocess.run(
        [drumline, "doctor", folder / "log.txt"],
        env=CLEAN,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "disk-full" in told.stdout, "the package has its signatures"
