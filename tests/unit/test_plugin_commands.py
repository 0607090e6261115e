"""Commands of installed packages: listed, run, and reported alone if their package cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline import cli
from drumline.cli import plugins
from scripts.reference.distributions import missing_distribution
from tests.distributions import forget_installed
from tests.unit.test_plugins import install

CODE = """
from typing import Annotated
import typer
from drumline.cli.plugins import PluginCommand

def greet(
    name: str,
    times: Annotated[int, typer.Option(help="How often.")] = 1,
) -> None:
    '''Greet somebody.'''
    import greeting_words
    for _ in range(times):
        print(greeting_words.HELLO, name)

def odd(thing: list[list[int]]) -> None: ...

greet_command = PluginCommand(greet, heading="Data")
odd_command = PluginCommand(odd)
number = 3
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, with one command that works and four that do not."""
    (tmp_path / "greeting.py").write_text(CODE)
    (tmp_path / "greeting_words.py").write_text("HELLO = 'Hello'\n")
    (tmp_path / "broken_commands.py").write_text("import sys\n1 / 0\n")
    places = {
        "greet": "greeting:greet_command",
        "broken": "broken_commands:command",
        "gone": "no_such_module:command",
        "number": "greeting:number",
        "odd": "greeting:odd_command",
    }
    install(tmp_path, monkeypatch, "greetings", {"drumline.commands": places})
    yield tmp_path
    forget_installed()
    for name in ("greeting", "greeting_words", "broken_commands"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is refused, and return the line without `error: `."""
    assert run(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err.removeprefix("error: ").strip()


@pytest.mark.claim("commands of installed packages are commands of drumline")
def test_a_command_of_a_package_runs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "Ada", "--times", "2") == 0
    assert capsys.readouterr().out == "Hello Ada\nHello Ada\n"
    line = refusal(capsys, "greet", "Ada", "--time", "2")
    assert line == "drumline greet: there is no option --time — did you mean --times?"
    line = refusal(capsys, "greet", "Ada", "Bob")
    assert line.startswith("drumline greet: 'Bob' is one argument too many")
    assert "did you mean 'greet'?" in refusal(capsys, "gret")


def test_help_lists_it_under_its_heading_and_imports_nothing_more(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    data = shown.partition("─ Data ─")[2].partition("─ Look ─")[0]
    assert "convert" in data and "greet" in data and "Greet somebody." in data
    others = shown.partition(f"─ {plugins.OTHER} ─")[2]
    for name in ("broken", "gone", "number", "odd"):
        assert f"{name} " in others
    assert "greetings 1.0 is not usable" in " ".join(others.split())
    assert "greeting_words" not in sys.modules


def test_own_commands_import_no_package(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    assert "greeting" not in sys.modules and "broken_commands" not in sys.modules


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "broken",
            "drumline broken: importing this command of greetings 1.0 raised ZeroDivisionError"
            " in broken_commands.py:2: division by zero",
        ),
        (
            "gone",
            "drumline gone: importing this command of greetings 1.0 raised ModuleNotFoundError:"
            " No module named 'no_such_module'",
        ),
        (
            "number",
            "drumline number: greetings 1.0 gives a value of type int as this command"
            " — make it a drumline.cli.plugins.PluginCommand",
        ),
        (
            "odd",
            "drumline odd: reading the arguments of this command of greetings 1.0 raised AssertionError",
        ),
    ],
)
def test_a_broken_package_is_one_line_of_its_own_command(
    site: Path, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    assert refusal(capsys, name).startswith(line)
    assert refusal(capsys, name, "config.yaml", "--help", "--any=1").startswith(line)
    assert run("greet", "Ada") == 0


def test_a_name_of_drumline_itself_is_refused_and_no_other_command_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, "clash", {"drumline.commands": {"plan": "nothing:here"}})
    assert refusal(capsys, "plan") == (
        "drumline plan: clash 1.0 offers a command of this name, which is drumline's own"
        " — uninstall it"
    )
    assert run("schema", "--help") == 0
    assert run("--help") == 0
    forget_installed()


def test_a_command_of_a_distribution_that_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(plugins.DISTRIBUTIONS, "commands", {"rehearse": "drumline-rehearse"})
    line = "drumline rehearse needs pip install drumline-rehearse"
    assert refusal(capsys, "rehearse", "config.yaml", "--help") == line
    assert refusal(capsys, "rehearse") == line
    assert "did you mean 'rehearse'?" in refusal(capsys, "rehears")


def test_the_reference_refuses_a_distribution_that_is_not_installed(tmp_path: Path) -> None:
    project = tmp_path / "plugins" / "march"
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "drumline-march"\n')
    assert missing_distribution(project.parent) == (
        "drumline-march (plugins/march) is not installed — run `make setup-dev`, then this again"
    )
    points = '[project.entry-points."drumline.commands"]\nmarch = "drumline_march:command"\n'
    text = f'[project]\nname = "drumline-hosts"\n{points}'
    (project / "pyproject.toml").write_text(text)
    assert missing_distribution(project.parent) == (
        "drumline-hosts is installed without 'march' of drumline.commands"
        " — run `make setup-dev`, then this again"
    )
    assert missing_distribution() is None
