"""What the command line is given: a mistake is one line with exit code 2, whoever finds it, and an empty list is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from drumline import cli
from drumline.cli.diagnose import _numbers
from drumline.cli.usage import read_list
from drumline.errors import UserError
from drumline.inference.serve import NO_ADVICE, server_environment

Case = tuple[list[str], list[str]]
CASES: list[Case] = [
    (["train"], ["drumline train: CONFIG.yaml is missing", "`drumline train --help`"]),
    (["export", "."], ["drumline export: --to is missing"]),
    (["train", "c.yaml", "--nproc", "x"], ["--nproc: ", "x' ", "--help"]),
    (["train", "c.yaml", "--nproc"], ["drumline train: option '--nproc' requires an argument"]),
    (
        ["train", "c.yaml", "--nproc", str(10**30)],
        ["--nproc: a whole number of more than 64 bits given"],
    ),
    (["train", "--nope"], ["drumline train: there is no option --nope"]),
    (["train", "c.yaml", "--dryrun"], ["there is no option --dryrun", "did you mean --dry-run?"]),
    (["train", "c.yaml", "--all"], ["--all: it is of --dry-run"]),
    (
        ["train", "c.yaml", "-v", "-q"],
        ["--quiet: it contradicts --verbose"],
    ),
    (["trian"], ["drumline: there is no command 'trian'", "did you mean 'train'?"]),
    (["stop", ".", "b"], ["drumline stop: 'b' is one argument too many"]),
    (["plan", "--price", "nan"], ["--price: nan given, a finite number is wanted"]),
    (["plan", "--tokens", "1e999"], ["--tokens: inf given, a finite number is wanted"]),
    (
        ["verify", "c.yaml", "--tolerance", "inf"],
        ["--tolerance: inf given, a finite number is wanted"],
    ),
    (
        ["verify", "c.yaml", "--strategies", ","],
        ["--strategies: an empty list given", "leave --strategies out"],
    ),
    (
        ["verify", "c.yaml", "--strategies", "ddp,,fsdp2"],
        ["--strategies: 'ddp,,fsdp2' has an empty part"],
    ),
    (["bench", "c.yaml", "--strategies", ""], ["--strategies: an empty list given"]),
    (["bench", "c.yaml", "--nodes", ""], ["--nodes: an empty list given"]),
    (["bench", "c.yaml", "--nproc", "1,x"], ["--nproc: 'x' given, whole numbers"]),
    (["bench", "c.yaml", "--predict", " , "], ["--predict: an empty list given"]),
    (["train", "c.yaml", "--allow", ""], ["--allow: an empty list given"]),
    (["eval", "c.yaml", "--lm-eval", ","], ["--lm-eval: an empty list given"]),
    (["export", "", "--to", "x"], ["an empty path given"]),
    (["chat", "../nope"], ["../nope: there is no such file or folder"]),
    (["chat", "./run"], ["./run: there is no such file or folder", "did you mean runs?"]),
    (["export", "run", "--to", "x"], ["run: there is no such file or folder"]),
    (["serve", "run"], ["run: there is no such file or folder"]),
    (["push", "run", "--to", "a/b"], ["run: there is no such file or folder"]),
    (["eval", "c.yaml", "--checkpoint", "run"], ["run: there is no such file or folder"]),
    (["compare", "run", "runs"], ["run: there is no such file or folder"]),
]


@pytest.mark.parametrize(
    ("arguments", "says"),
    CASES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_in_the_usage_is_one_line(
    arguments: list[str],
    says: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert ended.value.code == 2 and not out
    assert line.startswith("error: ") and all(part in line for part in says), line


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["train", "--help"], 0), (["--version"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert ended.value.code == code and (out or err) and "error" not in err


def test_a_list_is_read_in_one_way() -> None:
    assert read_list(None, "--x", "a") == ()
    assert read_list([" b, a,b "], "--x", "a") == ("b", "a")
    assert read_list(["a,b", "c", "a"], "--x", "a") == ("a", "b", "c"), "given twice, it adds up"
    with pytest.raises(UserError, match="empty part"):
        read_list(["a,"], "--x", "a")


def test_the_server_gives_no_advice_to_leave_the_versions_that_work() -> None:
    assert hasattr(constants, NO_ADVICE), "huggingface_hub still knows it"
    assert server_environment({"PATH": "x"}) == {NO_ADVICE: "1", "PATH": "x"}
    assert server_environment({NO_ADVICE: "0"})[NO_ADVICE] == "0"


@pytest.mark.parametrize("text", ["", "0", "1,", "a", "1.5", "-1", "99999", "1;2", "١", "1" * 5000])
def test_numbers_of_processes(text: str) -> None:
    assert _numbers(["4,1", "2,1"], "--nproc") == (1, 2, 4)
    with pytest.raises(UserError, match=r"whole numbers|an empty list|an empty part"):
        _numbers([text], "--nproc")
