"""What `pip install drumline` brings is enough to train: no extra is imported on the way."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.harness import ENV, ROOT, events, write_config
from tests.tiny import tiny_model_dir

HIDE = """
from importlib.machinery import PathFinder

def find_spec(name, path=None, target=None, really=PathFinder.find_spec):
    return None if name.partition(".")[0] in {names!r} else really(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""


def needed(requirements: list[str], found: set[str]) -> set[str]:
    """The distributions that these bring, with all that they need themselves."""
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            found.add(name)
            needed(metadata.requires(name) or [], found)
    return found


@pytest.mark.claim("an installation without any extra trains, exports and writes its page")
@pytest.mark.slow
def test_trains_without_any_extra(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kept = needed(project["dependencies"], set())
    extras = {
        Requirement(text).name.lower().replace("_", "-")
        for group in project["optional-dependencies"].values()
        for text in group
    }
    places = metadata.packages_distributions()
    names = {
        module
        for module, sources in places.items()
        if {name.lower().replace("_", "-") for name in sources} & (extras - kept)
    }
    assert {"peft", "deepspeed", "accelerate", "matplotlib"} <= names and not names & {
        "torch",
        "numpy",
        "rich",
    }
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=names))
    config = write_config(
        tmp_path,
        tiny_model_dir(tmp_path / "model"),
        run={"steps": 2},
        checkpoint={"export": "last"},
        report={"html": True},
    )
    command = [sys.executable, "-m", "drumline", "train", str(config), "--nproc", "2"]
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{ENV['PYTHONPATH']}"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([event for event in events(tmp_path / "run") if event["kind"] == "step"]) == 2
    assert (tmp_path / "run" / "export" / "config.json").is_file() and (
        tmp_path / "run" / "report.html"
    ).is_file()
