"""`drumline init` as a user types it: five questions, a plan, a YAML that trains, and no other model than was asked for."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.test_own_algorithm import write_files
from tests.distributions import forget_installed
from tests.harness import ENV, write_config
from tests.unit.conftest import Run
from tests.unit.test_planning import EIGHT_B, TOO_LARGE


def init_lines(text: str) -> dict[str, Any]:
    assert text.startswith("# yaml-language-server: $schema=./drumline.schema.json\n")
    return yaml.safe_load(text)


def test_init_by_flags(run: Run, model: Path, tmp_path: Path) -> None:
    write_config(tmp_path, model)  # for its data
    path = tmp_path / "new.yaml"
    flags = [
        "--model",
        model,
        "--data",
        tmp_path / "train.jsonl",
        "--length",
        96,
        "--adapter",
        "lora",
        "--yes",
    ]
    code, out, _ = run("init", path, *flags)
    assert code == 0 and "drumline train" in out
    said = init_lines(path.read_text())
    assert (
        said["data"]["train"] == [{"kind": "file", "path": str(tmp_path / "train.jsonl")}]
        and said["adapter"] == "lora"
    )
    assert path.read_text().count("\n# ") >= 6, "it is commented"
    schema = json.loads((tmp_path / "drumline.schema.json").read_text())
    assert schema["title"] == "Drumline config"
    code, out, _ = run("train", path, "--dry-run")
    assert code == 0 and "sft" in out
    code, _, err = run("init", path, *flags)
    assert code == 2 and "not overwritten" in err


@pytest.mark.slow
def test_init_replaces_no_schema_but_its_own(run: Run, model: Path, tmp_path: Path) -> None:
    schema = tmp_path / "drumline.schema.json"
    said = {
        "mine": True,
        "[1]": True,
        '{"title": "Mine"}': True,
        '{"title": "Drumline config"}': False,
    }
    for number, (text, kept) in enumerate(said.items()):
        schema.write_text(text)
        code, out, err = run(
            "init",
            tmp_path / f"{number}.yaml",
            "--model",
            model,
            "--data",
            "x.jsonl",
            "--length",
            96,
            "--yes",
        )
        assert code == 0 and (schema.read_text() == text) == kept == (
            "is not Drumline's, and stays" in out
        ), err


def test_init_looks_at_the_data(run: Run, model: Path, tmp_path: Path) -> None:
    """Rows held out, a length that they fit in, an interval of checkpoints that the run lives to see; and what it writes trains."""
    write_config(tmp_path, model, rows=60)
    path = tmp_path / "new.yaml"
    code, out, err = run(
        "init", path, "--model", model, "--data", tmp_path / "train.jsonl", "--batch", 4, "--yes"
    )
    assert code == 0 and "data: 60 rows, " in out and "tokens on average" in out, err
    said = init_lines(path.read_text())
    longest = int(re.search(r"([\d,]+) at most", out)[1])  # type: ignore[index]
    assert said["data"]["max_length"] == 64 * -(-longest // 64) and said["data"]["holdout"] == 3
    assert 1 <= said["checkpoint"]["every"] == said["eval"]["every"] <= 15
    assert run("train", path, "--dry-run")[0] == 0
    (tmp_path / "bad.jsonl").write_text('{"call": "?", "echo": "!"}\n')
    code, _, err = run(
        "init", tmp_path / "other.yaml", "--model", model, "--data", tmp_path / "bad.jsonl", "--yes"
    )
    assert (
        code == 2
        and "its columns are: call, echo" in err
        and not (tmp_path / "other.yaml").exists()
    )
    code, out, _ = run(
        "init",
        tmp_path / "later.yaml",
        "--model",
        model,
        "--data",
        tmp_path / "none.jsonl",
        "--yes",
        "--length",
        96,
    )
    assert (
        code == 0
        and "not here yet" in out
        and init_lines((tmp_path / "later.yaml").read_text())["data"]["holdout"] > 0
    )


@pytest.mark.slow
def test_init_says_what_is_to_be_installed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "peft" else there(name, *more),
    )
    code, out, err = run(
        "init",
        tmp_path / "q.yaml",
        *EIGHT_B[:2],
        "--cluster",
        "1x4090",
        "--adapter",
        "qlora",
        "--length",
        512,
        "--yes",
    )
    assert code == 0 and "to install: pip install peft" in out, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "id_"),
    [
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-2-7b-chat", None),
        ("gpt3-175b", None),
    ],
)
def test_init_writes_the_model_that_was_asked_for(
    run: Run, tmp_path: Path, name: str, id_: str | None
) -> None:
    path = tmp_path / "m.yaml"
    code, _, err = run(
        "init",
        path,
        "--model",
        name,
        "--cluster",
        "8xh100-80g",
        "--adapter",
        "lora",
        "--length",
        512,
        "--yes",
    )
    if id_ is None:
        assert (
            code == 2
            and f"where the weights of '{name}' are is not known" in err
            and not path.exists()
        )
    else:
        assert code == 0 and init_lines(path.read_text())["model"]["id"] == id_, err


@pytest.mark.slow
def test_init_for_another_machine(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "far.yaml"
    assert run("init", path, *EIGHT_B, "--adapter", "lora", "--yes")[0] == 0
    said = init_lines(path.read_text())
    assert said["cluster"]["device"] == "4090" and said["model"]["id"] == "meta-llama/Llama-3.1-8B"
    assert said["batch"]["global_samples"] % 4 == 0 and said["strategy"]
    assert run("plan", path)[0] == 0


@pytest.mark.slow
@pytest.mark.full
def test_init_offers_adapters_where_training_all_weights_is_slow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--yes and Enter take LoRA, after a table of the choices; an explicit `full` is kept, and a line says what is faster."""
    flags = [
        "--model",
        "llama-3.1-8b",
        "--algorithm",
        "sft",
        "--data",
        "x.jsonl",
        "--cluster",
        "4x4090",
        "--length",
        2048,
    ]
    code, _, err = run("init", tmp_path / "yes.yaml", *flags, "--yes")
    assert code == 0 and init_lines((tmp_path / "yes.yaml").read_text())["adapter"] == "lora", err
    assert "Training all weights is slow: LoRA is " in err and re.search(r"^QLoRA ", err, re.M)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    code, _, err = run("init", tmp_path / "enter.yaml", *flags)
    assert (
        code == 0
        and "[lora 2048]" in err
        and init_lines((tmp_path / "enter.yaml").read_text())["adapter"] == "lora"
    )
    code, out, _ = run("init", tmp_path / "full.yaml", *flags, "--adapter", "full", "--yes")
    assert code == 0 and "adapter" not in init_lines((tmp_path / "full.yaml").read_text())
    assert "Row 1 is slow: LoRA is " in out and "--adapter lora: " in out


@pytest.mark.full
def test_init_writes_nothing_where_nothing_fits(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    code, _, err = run("init", path, *TOO_LARGE, "--adapter", "full", "--yes")
    assert code == 2 and "nothing fits" in err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_init_asks_five_questions_on_stdin(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{model}\n\ntrain.jsonl\nhere\nlora 96\n"))
    code, _, err = run("init", "asked.yaml")
    assert (
        code == 0
        and [number in err for number in ("1/5", "2/5", "3/5", "4/5", "5/5")] == [True] * 5
    )
    said = init_lines(Path("asked.yaml").read_text())
    assert (said["algorithm"], said["data"]["max_length"], said["adapter"]) == ("sft", 96, "lora")
    assert said["data"]["train"][0]["path"] == "train.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    flags = ["--model", model, "--data", "train.jsonl", "--length", 64]
    code, _, err = run("init", "flags.yaml", *flags)
    assert code == 2 and "[here]" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n\n"))
    code, _, err = run("init", "flags.yaml", *flags)
    assert (
        code == 0
        and "[full 64]" in err
        and init_lines(Path("flags.yaml").read_text())["data"]["max_length"] == 64
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{model}\n\n\n\nlora 0\n"))
    code, _, err = run("init", "other.yaml")
    assert code == 2 and "rows of 0 tokens" in err and not Path("other.yaml").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{model}\n"))
    code, _, err = run("init", "other.yaml")
    assert code == 2 and "--yes" in err and not Path("other.yaml").exists()


class Terminal(io.StringIO):
    """Standard input as somebody types it."""

    def isatty(self) -> bool:
        return True


def test_init_asks_again_after_a_wrong_answer(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"call": "?", "echo": "!"}\n')
    # No weights, no algorithm, no rows of it, nothing that fits: each is asked again, and only it.
    lines = [
        "gpt3-175b",
        model,
        "sfx",
        "sft",
        "bad.jsonl",
        "train.jsonl",
        "4xh10",
        "here",
        "full 96",
    ]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(map(str, lines)) + "\n"))
    code, _, err = run("init", "typed.yaml")
    assert code == 0 and "never published" in err and "its columns are: call, echo" in err, err
    assert [err.count(number) for number in ("1/5", "2/5", "3/5", "4/5", "5/5")] == [2, 2, 2, 2, 1]
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    code, _, err = run("init", "flags.yaml", "--model", "gpt3-175b")
    assert code == 2 and "never published" in err and "/5" not in err, (
        "a wrong flag ends it before any question"
    )


@pytest.mark.slow
@pytest.mark.full
def test_init_asks_again_for_the_devices_where_nothing_fits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("\n\n1xt4\nfull 4096\n8xh100-80g\nlora 512\n"))
    code, _, err = run("init", tmp_path / "fits.yaml", "--model", "meta-llama/Llama-2-13b-hf")
    assert code == 0 and "nothing fits" in err, err
    assert [err.count(number) for number in ("2/5", "3/5", "4/5", "5/5")] == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.full
def test_init_asks_again_in_a_terminal(model: Path, tmp_path: Path) -> None:
    write_config(tmp_path, model)
    path = tmp_path / "typed.yaml"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "drumline", "init", str(path)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENV,
        text=True,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        os.write(
            ours, f"no-such-model\n{model}\nsfx\nsft\ntrain.jsonl\n4xh10\nhere\nfull 96\n".encode()
        )
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0, err
    assert [err.count(number) for number in ("1/5", "2/5", "3/5", "4/5", "5/5")] == [2, 2, 1, 2, 1]
    assert init_lines(path.read_text())["data"]["max_length"] == 96


def test_init_knows_an_installed_algorithm(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    info = tmp_path / "made_focal-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-focal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drumline.algorithms]\nfocal = focal:Focal\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget_installed()
    try:
        path = tmp_path / "new.yaml"
        code, _, err = run(
            "init",
            path,
            "--model",
            model,
            "--algorithm",
            "focal",
            "--data",
            "none.jsonl",
            "--length",
            96,
            "--yes",
        )
        assert code == 0, err
        text, lines = path.read_text(), init_lines(path.read_text())
        assert re.search(r"(, |or )focal\b", " ".join(text.replace("#", " ").split()))
        assert (lines["algorithm"], lines["optimizer"]["lr"]) == ("focal", 7e-6)
        assert (
            "focal"
            in json.loads((path.parent / "drumline.schema.json").read_text())["properties"][
                "algorithm"
            ]["anyOf"][0]["enum"]
        )
    finally:
        forget_installed()
