"""Every mistake a user can make gets one clear line, exit code 2, and nothing is started or lost."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from drumline.cli import main
from tests.harness import drumline, events, run_drumline, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_tokenizer


class Say(Protocol):
    """Run the command line in this process and return the one line in which it fails."""

    def __call__(self, *arguments: object) -> str: ...


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run the command line in this process; it must end with code 2 and one line, which is
    returned."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        err = capsys.readouterr().err
        assert ended.value.code == 2, err
        assert "Traceback" not in err, err
        lines = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1, err
        return lines[0]

    return run


def require_parts(line: str, *parts: str) -> None:
    """Require that the line says all of this."""
    for part in parts:
        assert part in line, line


class Case(NamedTuple):
    """A mistake: sections of the config, what the line must say, and overrides."""

    sections: dict[str, Any]
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()


CASES = {
    "missing data file": Case(
        {"data": {"train": [{"kind": "file", "path": "none.jsonl"}]}},
        says=("none.jsonl", "no such file"),
    ),
    "sequence longer than the positions": Case(
        {"data": {"max_length": 600}},
        says=("600", "512 positions", "data.max_length"),
    ),
    "global batch not divisible": Case(
        {"batch": {"global_samples": 5, "micro_batch": 2}},
        says=("5", "4 or 6"),
    ),
    "global batch not divisible by ranks": Case(
        {"batch": {"global_samples": 3, "micro_batch": None}},
        says=("3 / 2 = 1.50", "2 or 4"),
        overrides=("launch.nproc=2", "strategy=ddp"),
    ),
    "no such model folder": Case(
        {"model": {"id": "/no/such/folder"}},
        says=("/no/such/folder", "no such folder"),
    ),
    "model id not there while offline": Case(
        {"model": {"id": "nobody/no-such-model"}},
        says=("nobody/no-such-model", "hub"),
    ),
    "package not installed": Case(
        {"model": {"id": "package:no-such-package"}},
        says=("no-such-package", "pip install"),
    ),
    "single with two processes": Case(
        {"strategy": "single"},
        says=("single runs one process",),
        overrides=("launch.nproc=2",),
    ),
    "wrong type": Case(
        {"optimizer": {"lr": "fast"}},
        says=("optimizer.lr", "'fast' given"),
    ),
    "unknown model type": Case(
        {
            "model": {
                "id": None,
                "tokenizer": "x",
                "config": {"model_type": "lama"},
                "init": "random",
            }
        },
        says=("model_type 'lama'",),
    ),
}


@pytest.mark.claim("a user's mistake is one line")
@pytest.mark.parametrize("name", CASES)
def test_config_mistakes(name: str, model: Path, tmp_path: Path, said: Say) -> None:
    case = CASES[name]
    config = write_config(tmp_path, model, **case.sections)
    line = said("train", config, *case.overrides)
    require_parts(line, *case.says)
    assert not (tmp_path / "run" / "events.jsonl").exists()


class RowsCase(NamedTuple):
    """Rows with a mistake: the file, what the line must say, and the section `data`."""

    text: str
    says: tuple[str, ...]
    data: dict[str, Any] = {}


MAPPED = {
    "kind": "file",
    "path": "train.jsonl",
    "columns": {"prompt": "question", "completion": "answer"},
}
ROWS = {
    "empty": RowsCase("", says=("train.jsonl", "no rows")),
    "row without the column": RowsCase(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n',
        says=("train.jsonl:2", "completion"),
    ),
    "mapped column not there": RowsCase(
        '{"question": "a", "reply": "b"}\n',
        says=("train.jsonl:1", "answer", "reply"),
        data={"train": [MAPPED]},
    ),
    "malformed": RowsCase(
        '{"prompt": "a", "completion": "b"}\n{"prompt": oops}\n',
        says=("train.jsonl:2",),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, model: Path, tmp_path: Path, said: Say) -> None:
    case = ROWS[name]
    config = write_config(tmp_path, model, data=case.data)
    (tmp_path / "train.jsonl").write_text(case.text)
    require_parts(said("train", config), *case.says)


def test_no_chat_template(tmp_path: Path, said: Say) -> None:
    model = tiny_model_dir(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    tiny_tokenizer(chat_template=None).save_pretrained(model)
    config = write_config(tmp_path, model)
    asked = {"role": "user", "content": "a"}
    answered = {"role": "assistant", "content": "b"}
    write_rows(tmp_path / "train.jsonl", [{"messages": [asked, answered]}])
    require_parts(said("train", config), "chat template", "model.chat_template")


def test_more_processes_than_samples(model: Path, tmp_path: Path, said: Say) -> None:
    config = write_config(
        tmp_path,
        model,
        rows=3,
        data={"packing": False},
        batch={"global_samples": 4, "micro_batch": 1},
        launch={"nproc": 4},
        strategy="ddp",
    )
    line = said("train", config)
    require_parts(line, "4 data ranks but only 3 training samples", "--nproc 3")


def test_folder_of_another_run(model: Path, tmp_path: Path, said: Say) -> None:
    config = write_config(tmp_path, model)
    notes = tmp_path / "run" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    require_parts(said("train", config), "not empty", "--resume")
    assert notes.read_text() == "mine"


def test_folder_that_cannot_be_written(model: Path, tmp_path: Path, said: Say) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path, model)
    line = said("train", config, f"run.dir={tmp_path / 'file' / 'run'}")
    assert "cannot write the run folder" in line


def test_code_of_the_model_is_not_run(tmp_path: Path, said: Say) -> None:
    folder = tiny_model_dir(tmp_path / "custom")
    described = folder / "config.json"
    config = json.loads(described.read_text())
    config["model_type"] = "my_own"
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    described.write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")

    line = said("train", write_config(tmp_path, folder))

    assert "trust_remote_code" in line
    assert not ran.exists()


def test_port_taken(model: Path, tmp_path: Path, said: Say) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = write_config(tmp_path, model, launch={"nproc": 2, "port": port})
        line = said("train", config)
    require_parts(line, f"port {port}", f"pid {os.getpid()}")
    assert not (tmp_path / "run").exists(), "the next try finds the folder free"


def test_resume_from_what_is_no_checkpoint(model: Path, tmp_path: Path, said: Say) -> None:
    config = write_config(tmp_path, model)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not a committed checkpoint" in said("train", config, "--resume", empty)
    line = said("train", config, "--resume", tmp_path / "nowhere")
    assert "nowhere: there is no such file or folder" in line
    (empty / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickle" in said("train", config, "--resume", empty)


def test_resume_with_another_config(model: Path, tmp_path: Path, said: Say) -> None:
    config = write_config(tmp_path, model)
    run_drumline("train", config)
    changes = ("optimizer.lr=0.5", "run.seed=3", "run.steps=6", "checkpoint.every=1")
    line = said("train", config, "--resume", *changes)
    require_parts(line, "optimizer.lr 0.01 → 0.5", "run.seed 0 → 3", "--allow")
    assert "checkpoint.every" not in line

    finished = run_drumline("train", config, "--resume", "run.steps=6", "--allow", "run.steps")
    assert "Resuming after step 4" in finished.out
    (jump,) = [line for line in finished.err.splitlines() if "learning rate" in line]
    ended = "the cosine schedule ended at step 4 and ends at 6 now"
    require_parts(jump, "at step 4 and is", ended)

    # The newest checkpoint can be named in full, too, and a run folder stands for its newest.
    elsewhere = f"run.dir={tmp_path / 'other'}"
    line = said("train", config, "--resume", tmp_path / "run", "optimizer.lr=0.5", elsewhere)
    assert "optimizer.lr" in line


def test_too_little_space(
    model: Path, tmp_path: Path, said: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine's answer is replaced, not its disk: a disk with so few bytes left could not hold the
    # token cache either.
    monkeypatch.setattr("drumline.train.setup.free_bytes", lambda path: 1000)
    line = said("train", write_config(tmp_path, model))
    require_parts(line, "1000 B are free", "needs about")


BROKEN_ROW = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x):
        return super().forward(x)

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum()

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            raise ValueError("no picture")
        return {"x": torch.ones(2), "y": torch.ones(1)}

def rows():
    return Rows()
"""


def test_a_row_that_one_rank_cannot_read_is_named_afterwards_too(tmp_path: Path) -> None:
    """Rank 0 sees a lost connection: the event, the page and the doctor name the row all the
    same."""
    (tmp_path / "own.py").write_text(BROKEN_ROW)
    config = {
        "model": {"kind": "python", "path": "own.py:Net"},
        "algorithm": {"kind": "python", "path": "own.py:loss"},
        "data": {"train": [{"kind": "python", "path": "own.py:rows"}], "order": "sequential"},
        "batch": {"global_samples": 4},
        "run": {"dir": "run"},
        "launch": {"nproc": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    done = drumline("train", path, cwd=tmp_path)
    line = "data.train: row 41 cannot be read"
    assert done.code == 2, done.err
    assert f"error: {line}" in done.err, done.err
    ended = events(tmp_path / "run", "fault") or events(tmp_path / "run", "run_end")
    assert line in json.dumps(ended[-1])
    causes = drumline("doctor", tmp_path / "run")
    assert line in causes.out.splitlines()[0], causes.out
