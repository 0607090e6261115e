"""Real runs for tests: rows and YAML on disk, `drumline` as a process, and ranks over gloo in one
process group for many plans."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.forks import Forked

ROOT = Path(__file__).parent.parent


def source_path(tree: Path) -> str:
    """Return a PYTHONPATH for the packages of a checkout: Drumline and its plug-ins."""
    plug_ins = sorted(tree.glob("plugins/*/src"))
    return os.pathsep.join(map(str, [tree, *plug_ins]))


def environment(given: Mapping[str, str], gpu: bool) -> dict[str, str]:
    """For processes that tests start: this checkout before what PYTHONPATH holds already; one
    thread a process, unless there is a GPU, whose machine has cores for its host code."""
    places = [source_path(ROOT)]
    if given.get("PYTHONPATH"):
        places.append(given["PYTHONPATH"])
    path = os.pathsep.join(places)
    made = {**given, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "NO_COLOR": "1"}
    if not gpu:
        made["OMP_NUM_THREADS"] = "1"
    return made


ENV = environment(os.environ, shutil.which("nvidia-smi") is not None)
# By how much commands may take longer than usual: the stand-in of a GPU computes on a CPU.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))

# Sections of a config, or keys of one.
Sections = dict[str, Any]

WORDS = [
    "drum",
    "line",
    "rank",
    "step",
    "beat",
    "march",
    "keep",
    "time",
    "one",
    "two",
    "three",
    "left",
    "right",
    "sum",
    "mean",
    "mesh",
]


def chat_rows(number: int, seed: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    """Prompt and completion rows of uneven length, the same for the same seed."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    return [{"prompt": f"{text()}?", "completion": f"{text()}."} for _ in range(number)]


def vision_rows(folder: Path, number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations about PNGs that are written to `folder`/images: of three rows one has an image,
    one two, one none."""
    from tests.tiny import write_images

    names = write_images(folder, number, seed)
    rows = []
    for index, row in enumerate(chat_rows(number, seed, longest=6)):
        content: Any = row["prompt"]
        images = None
        if index % 3 == 0:
            content = [
                {"type": "image", "image": names[index]},
                {"type": "text", "text": row["prompt"]},
            ]
        elif index % 3 == 1:
            content = f"<image> and <image> {row['prompt']}"
            images = names[index - 1 : index + 1]
        said: dict[str, Any] = {
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        if images is not None:
            said["images"] = images
        rows.append(said)
    return rows


def pair_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of uneven length: the better answer repeats the prompt's words."""
    draw = random.Random(f"pairs {seed}")
    rows = []
    for prompt, other in zip(chat_rows(number, seed), chat_rows(number, seed + 100), strict=True):
        words = prompt["prompt"].rstrip("?")
        rows.append(
            {
                "prompt": prompt["prompt"],
                "chosen": f"{words}.",
                "rejected": f"{other['completion']} {draw.choice(WORDS)}",
            }
        )
    return rows


def judged_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of uneven length, of which two of three are good: those that repeat the prompt's
    words."""
    rows = []
    for index, row in enumerate(pair_rows(number, seed)):
        is_good = index % 3 > 0
        answer = row["chosen"] if is_good else row["rejected"]
        rows.append({"prompt": row["prompt"], "completion": answer, "label": is_good})
    return rows


def labelled_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of uneven length; their class is that of the words they are made of, so it can be
    learned."""
    draw = random.Random(f"labels {seed}")
    labels = ("music", "work", "number")
    third = len(WORDS) // 3
    rows = []
    for _ in range(number):
        kind = draw.randrange(3)
        words = WORDS[kind * third : (kind + 1) * third]
        text = " ".join(draw.choices(words, k=draw.randint(1, 12)))
        rows.append({"text": text, "label": labels[kind]})
    return rows


def retrieval_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Queries of uneven length; what answers one has its words in another order. Of three rows one
    has two negatives, one has one, and one has none."""
    draw = random.Random(f"retrieval {seed}")
    rows = []
    for index in range(number):
        words = draw.choices(WORDS, k=draw.randint(2, 8))
        row = {"query": f"{' '.join(words)}?", "positive": " ".join(reversed(words))}
        negatives = [" ".join(draw.choices(WORDS, k=6)) for _ in range(index % 3)]
        if negatives:
            row["negative"] = negatives
        rows.append(row)
    return rows


def prompt_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with a letter that `letters` pays for."""
    draw = random.Random(f"prompts {seed}")
    rows = []
    for row in chat_rows(number, seed, longest=6):
        rows.append({"prompt": row["prompt"], "letter": draw.choice("aeiou")})
    return rows


def answered_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """The prompts of `prompt_rows`, with completions that have nothing to do with them."""
    rows = prompt_rows(number, seed)
    for row, other in zip(rows, chat_rows(number, seed + 100), strict=True):
        row["completion"] = other["completion"]
    return rows


def letters(prompt: str, completion: str, letter: str, **_: Any) -> float:
    """A reward function: the share of `letter` among the completion's letters."""
    return completion.count(letter) / max(1, len(completion))


def letter_ranks(prompt: str, completions: list[str], letter: str, **_: Any) -> list[float]:
    """A reward of a group: the share of a group that has fewer of `letter` than a completion."""
    counts = [completion.count(letter) for completion in completions]
    return [sum(other < count for other in counts) / len(counts) for count in counts]


ROWS = {
    **dict.fromkeys(("reward", "dpo", "orpo", "simpo"), pair_rows),
    **dict.fromkeys(("kto", "npo"), judged_rows),
    "embed": retrieval_rows,
    "rerank": retrieval_rows,
    "ppo": prompt_rows,
    "grpo": prompt_rows,
    "online_dpo": prompt_rows,
    "gkd": answered_rows,
}
LETTERS = {"kind": "function", "path": "tests.harness:letters"}
LETTER_RANKS = {"kind": "function", "path": "tests.harness:letter_ranks", "of": "group"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(
    folder: Path, model: Path, /, *, rows: int = 40, held_out: int = 6, **sections: Any
) -> Path:
    """A small SFT config in `folder` with its data; `sections` are laid over the defaults of these
    tests, key by key. For another algorithm the data have its form."""
    kind = sections.get("algorithm", {}).get("kind", "sft")
    make = ROWS.get(kind, chat_rows)
    write_rows(folder / "train.jsonl", make(rows))
    write_rows(folder / "eval.jsonl", make(held_out, seed=1))
    config: dict[str, Any] = {
        "model": {"id": str(model)},
        "algorithm": {"kind": "sft", "loss_chunk": 32},
        "data": {
            "train": [{"kind": "file", "path": "train.jsonl"}],
            "eval": [{"kind": "file", "path": "eval.jsonl"}],
            "max_length": 96,
            "workers": 1,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_samples": 4, "micro_batch": 2},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup_steps": 1},
        "run": {"dir": str(folder / "run"), "report_to": [], "device": "cpu", "steps": 4},
        "checkpoint": {"every": 2, "export": "none"},
        "report": {"html": False},
    }
    if kind not in ("sft", "pretrain"):
        del config["algorithm"]
    for name, values in sections.items():
        before = config.get(name)
        if isinstance(values, dict) and isinstance(before, dict):
            config[name] = {**before, **values}
        else:
            config[name] = values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass
class Finished:
    """What a process left behind."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def drumline(*arguments: object, timeout: float = 150, cwd: Path | None = None) -> Finished:
    """Run the command line to its end in a process that need not import torch anew, nor need its
    ranks; it is killed when the time is up."""
    process = start_drumline(*arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=timeout * PATIENCE)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(
            f"drumline {arguments} ran over {timeout * PATIENCE} s:\n{late.output}"
        ) from None
    return Finished(process.returncode, out, err)


def run_drumline(*arguments: object, timeout: float = 150, cwd: Path | None = None) -> Finished:
    """Run the command line to its end as `drumline` does, and require that it succeeds."""
    finished = drumline(*arguments, timeout=timeout, cwd=cwd)
    assert finished.code == 0, finished.out + finished.err
    return finished


def start_drumline(*arguments: object, cwd: Path | None = None) -> Forked:
    """The same, left running."""
    return Forked("drumline", *arguments, env=ENV, cwd=cwd)


def start_interpreter(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The command line as a user starts it, left running. `env`: variables besides those of every
    test."""
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, **(env or {})},
        cwd=cwd,
        start_new_session=True,
    )


def events(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = []
    # A text may hold characters that `splitlines` takes for line breaks.
    with (run_dir / "events.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            if kind is None or event["kind"] == kind:
                found.append(event)
    return found


def column(run_dir: Path, key: str, kind: str = "step") -> list[Any]:
    """Return one figure of each event of a kind, in order."""
    return [event[key] for event in events(run_dir, kind)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def losses(run_dir: Path) -> dict[int, float]:
    """Step → loss, the last word on each step."""
    return {e["step"]: e["loss"] for e in events(run_dir, "step")}


def weights(run_dir: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint, read back whole."""
    from drumline.checkpoint.load import newest

    found = newest(run_dir / "checkpoints", verify=True)
    assert found.path is not None, found.skipped
    return weights_at(found.path)


def weights_at(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, read back whole."""
    import torch

    from drumline.checkpoint.load import check, load_tensors

    tensors = {}
    for name, stored in check(checkpoint, verify=False).tensors.items():
        dtype = getattr(torch, stored.dtype)
        tensors[name] = torch.zeros(stored.shape, dtype=dtype)
    load_tensors(checkpoint, tensors)
    return tensors


def same_weights(run: Path, reference: Path, tolerance: float) -> None:
    """Every tensor of two runs' newest checkpoints, weights and moments, equal to `tolerance` of
    its norm."""
    import torch

    got = weights(run)
    expected = weights(reference)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = torch.linalg.vector_norm(tensor.double()).clamp_min(1e-12)
        distance = torch.linalg.vector_norm((got[name] - tensor).double())
        difference = float(distance / scale)
        assert difference <= tolerance, f"{name}: {difference:.2e}"


def same_tensors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Every tensor of `expected` is in `found`, bit for bit."""
    import torch

    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def survivors(marker: str) -> list[int]:
    """Processes whose command line holds `marker`: a run folder names all of a run's."""
    import psutil

    me = os.getpid()
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        pid = process.info["pid"]
        line = process.info["cmdline"] or ()
        if pid != me and any(marker in part for part in line):
            found.append(pid)
    return found


def vision_pair_rows(folder: Path, number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of answers to the questions of `vision_rows`, whose images they share."""
    rows = []
    others = chat_rows(number, seed + 100, longest=6)
    for said, other in zip(vision_rows(folder, number, seed), others, strict=True):
        question, answer = said["messages"]
        pair = {"prompt": [question], "chosen": answer["content"], "rejected": other["completion"]}
        if "images" in said:
            pair["images"] = said["images"]
        rows.append(pair)
    return rows
