"""A real vLLM on the CPU that reads a folder and answers once, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE
from tests.servers.server import FOLDER, SETTINGS

ENGINE = Path(__file__).parent / "offline_engine.py"
SECONDS = 500
NEW_TOKENS = 8
# vLLM compiles nothing, which takes longer than these models.
OPTIONS = {"dtype": "float32", "max_model_len": 96, "enforce_eager": True, "max_num_seqs": 8}


def ask_vllm(
    kind: str, model: Path, folder: Path, options: dict[str, Any] | None = None, **question: Any
) -> Any:
    """Return what vLLM answers about the model of a folder.

    `kind`: a function of `offline_engine`; `folder`: for the files of the process; `options`: of
    vLLM's engine; `question`: what the function reads. The test fails if vLLM does.
    """
    asked = {
        "kind": kind,
        "model": str(model),
        "options": {**OPTIONS, **(options or {})},
        "new_tokens": NEW_TOKENS,
        **question,
    }
    folder.mkdir(parents=True, exist_ok=True)
    question_file = folder / "question.json"
    answer_file = folder / "answer.json"
    log_file = folder / "log.txt"
    question_file.write_text(json.dumps(asked))
    # Functions are sent to the worker.
    variables = {**os.environ, **SETTINGS, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        variables.pop(name, None)
    arguments = [FOLDER / "bin/python", ENGINE, question_file, answer_file]
    with log_file.open("wb") as log:
        code = subprocess.run(
            [str(argument) for argument in arguments],
            env=variables,
            stdout=log,
            stderr=log,
            timeout=SECONDS * PATIENCE,
        ).returncode
    if code != 0:
        pytest.fail(f"vLLM does not read {model}:\n{log_file.read_text()[-6000:]}")
    return json.loads(answer_file.read_text())
