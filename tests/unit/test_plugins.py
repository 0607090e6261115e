"""Models and launchers of installed packages, and by path: trained, listed and refused as this package's own are."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.config.launcher import LauncherSpec
from drumline.config.load import load_values, schema
from drumline.config.registry import _users_specs, kinds
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.planner.matrix import as_text
from drumline.planner.question import find_model
from drumline.train.command import request_maker
from drumline.train.setup import Request, make_plan
from tests.distributions import forget_installed
from tests.harness import ROOT, losses

PACKAGE = ROOT / "examples" / "plugins" / "debug"
MINE = """
import torch
from drumline.config.launcher import LauncherSpec

def build(width=4):
    return torch.nn.Linear(4, 1)

class Site(LauncherSpec):
    name: str = "SITE"
    def rank_variables(self, environment):
        if f"{self.name}_TASK" not in environment:
            return {}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
        return {"RANK": environment[f"{self.name}_TASK"], "WORLD_SIZE": "2", "LOCAL_RANK": "0", **where}

class Other: ...
number = 3
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    forget_installed()
    _users_specs.clear()


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, groups: dict[str, dict[str, str]]
) -> None:
    """What pip leaves of a package whose modules lie on sys.path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{point} = {place}\n" for point, place in points.items())
        for group, points in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    forget_installed()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of examples/plugins/debug."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site)
    install(
        site,
        monkeypatch,
        "drumline-debug",
        tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"],
    )


def values(
    folder: Path, model: dict[str, Any], launch: Any, code: str = "drumline_debug.model"
) -> dict[str, Any]:
    return {
        "model": model,
        "algorithm": {"kind": "python", "path": f"{code}:objective"},
        "data": {"train": [{"kind": "python", "path": f"{code}:rows"}]},
        "launch": launch,
        "strategy": "single",
        "batch": {"global_samples": 8},
        "checkpoint": {"every": 2, "export": "last"},
        "run": {"dir": str(folder / "run"), "steps": 3, "device": "cpu", "report_to": []},
    }


@pytest.mark.claim("models and launchers of packages and files train")
@pytest.mark.slow
def test_a_package_s_model_and_launcher_train_and_go_on(installed: None, tmp_path: Path) -> None:
    config = values(tmp_path, {"kind": "small_mlp", "options": {"width": 8}}, "inline")
    run = drumline.train(config)
    assert run.exit_code == 0 and len(losses(run.dir)) == 3
    assert not (run.dir / "logs").exists()  # no agent, no rank beside this process
    assert (
        run.best is not None
        and run.export is not None
        and (run.export / "model.safetensors").is_file()
    )
    again = drumline.train(
        {**config, "run": {**config["run"], "steps": 5}}, resume=True, allow=["run.steps"]
    )
    assert len(losses(again.dir)) == 5
    module = drumline.load(run.dir).module  # its code is an installed package's, and no stranger's
    assert module[0].weight.shape == (8, 4)


@pytest.mark.slow
def test_commands_know_of_them(installed: None) -> None:
    assert "models of installed packages: small_mlp (drumline-debug 1.0)" in as_text("cpu")
    assert "launchers of installed packages: inline (drumline-debug 1.0)" in as_text("cpu")
    assert {"local", "kubernetes", "slurm", "inline"} <= set(kinds(LauncherSpec))
    made = schema()
    assert {"inline", "local", "slurm"} <= {*made["properties"]["launch"]["anyOf"][0]["enum"]}
    assert "small_mlp" in made["$defs"]["ModelConfig"]["properties"]["kind"]["anyOf"][0]["enum"]
    with pytest.raises(
        DrumlineError, match="small_mlp is a function of drumline-debug"
    ):  # drumline plan, drumline init
        find_model(
            load_values(
                {"model": {"id": "small_mlp"}, "data": {"train": [{"kind": "digits"}]}}, []
            ).config.model,
            lambda *_: None,
        )


def test_a_launch_section_without_a_kind_is_of_this_machine(installed: None) -> None:
    local = schema()["$defs"]["LocalLauncher"]
    assert "kind" not in local.get("required", []) and local["properties"]["kind"]["enum"] == [
        "local"
    ]
    assert schema()["$defs"]["Inline"]["required"] == ["kind"]
    data = {"data": {"train": [{"kind": "digits"}]}}
    assert (
        load_values({**data, "launch": {"nproc": 2}}, []).config.launch
        == load_values(data, ["launch.nproc=2"]).config.launch
    )


@pytest.mark.claim("models and launchers of packages and files train")
def test_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is planned, and a launcher finds which rank this process is."""
    (tmp_path / "mine.py").write_text(
        MINE
        + (PACKAGE / "drumline_debug" / "model.py").read_text().partition("import annotations")[2]
    )
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    config = values(
        tmp_path, {"kind": "mine.py:build"}, {"kind": "mine.py:Site", "name": "HERE"}, "mine.py"
    )
    plan = make_plan(Request(load_values(config, [])), on_progress=lambda *_: None, dry_run=True)
    assert (
        plan.config.launch.kind == f"{tmp_path}/mine.py:Site"
        and plan.config.model.builder == "mine.py:build"
    )
    with pytest.raises(EnvironmentFault, match="starts no ranks"):
        plan.config.launch.start(
            plan, tmp_path, None, lambda event: None, lambda out, step: ("", None), None
        )
    assert request_maker(config, [], None, ())().world_size is None and "RANK" not in os.environ
    monkeypatch.setenv("HERE_TASK", "1")
    request_maker(config, [], None, ())
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"launch": "mine.py:Sight"}, "mine.py has no class 'Sight'; did you mean 'Site'?"),
        (
            {"launch": "mine.py:Other"},
            "is no launcher: it is not derived from drumline.config.launcher.LauncherSpec",
        ),
        ({"launch": "gone.py:Site"}, "there is no file"),
        ({"launch": {"kind": "mine.py:Site", "nam": "X"}}, "unknown key 'nam'"),
        ({"launch": "lokal"}, "no kind 'lokal' here — did you mean 'local'?"),
        (
            {"model": {"kind": "mine.py:bild"}},
            "mine.py has no function 'bild'; did you mean 'build'?",
        ),
        ({"model": {"kind": "mine.py:number"}}, "mine.py:number is a int, not a function"),
        (
            {"model": {"kind": "broken"}},
            "importing the model 'broken' of made 1.0 raised ModuleNotFoundError: No module named 'made'",
        ),
        (
            {"model": {"kind": "pyton"}},
            "'pyton' is not one of hf, python, broken; did you mean 'python'?",
        ),
        ({"model": {"kind": "mine.py:build", "id": "gpt2"}}, "takes no id, config or shape"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], line: str
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    install(tmp_path, monkeypatch, "made", {"drumline.models": {"broken": "made.model:build"}})
    config = {**values(tmp_path, {"kind": "mine.py:build"}, "local", "mine.py"), **section}
    with pytest.raises(DrumlineError) as error:
        make_plan(Request(load_values(config, [])), on_progress=lambda *_: None, dry_run=True)
    assert (
        line in error.value.line() and error.value.exit_code == 2 and "\n" not in error.value.line()
    )


@pytest.mark.parametrize(
    ("group", "name"), [("models", "hf"), ("launchers", "local"), ("trackers", "wandb")]
)
def test_our_own_names_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str
) -> None:
    install(tmp_path, monkeypatch, "clash", {f"drumline.{group}": {name: "nothing:here"}})
    with pytest.raises(DrumlineError, match="which is drumline's own name") as error:
        schema()
    assert error.value.exit_code == 2
