"""Seconds and memory of preparing rows: `drumline prepare` against `datasets.map` with the same tokenizer, chat template and length, each
in a process of its own that streams one file of short conversations, with as many tokenising processes. Peak memory is that of the process
that reads and writes, without file pages (RssAnon), and the largest of its children; the second start finds the cache. `datasets.map`
Core seconds are those of all its processes. `datasets.map`
tokenises alone; "with masks" it also says which tokens are learned, as Drumline does, from the length of the prompt's own tokens.

    python benchmarks/prepare_rows.py --rows 100000 1000000 --out benchmarks/results/prepare_rows-cpu.json
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import parse, parser, status_bytes, write

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "omicron",
    "sigma",
    "omega",
]
LENGTH = 512


def make_rows(path: Path, rows: int) -> None:
    """Prompts of 2 to 8 words, answers of 2 to 16; every row differs from the others."""
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            prompt, answer = (
                " ".join(draw.choices(WORDS, k=draw.randint(2, most))) for most in (8, 16)
            )
            file.write(json.dumps({"prompt": f"{prompt} {number}?", "completion": answer}) + "\n")


class Peak:
    """The most memory that this process held besides pages of files, and the most of any child, in bytes: looked at every 20 ms."""

    def __init__(self) -> None:
        self.own = self.child = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        import psutil

        me = psutil.Process()
        while not self.over.wait(0.02):
            self.own = max(self.own, status_bytes("RssAnon", me.pid))
            self.child = max(
                [
                    self.child,
                    *(status_bytes("RssAnon", child.pid) for child in me.children(recursive=True)),
                ]
            )

    def read(self) -> dict[str, int]:
        self.over.set()
        self.thread.join()
        return {"own_bytes": self.own, "largest_child_bytes": self.child}


def tool(name: str, base: Path, rows: Path, workers: int, extra: dict[str, Any]) -> dict[str, Any]:
    """One tool in this process: seconds and memory, without its imports."""
    from drumline.config.config import Config
    from drumline.data.prepare import find_prepared, prepare
    from drumline.models.tokenizer import load_tokenizer

    data = {
        "train": [{"kind": "file", "path": str(rows)}],
        "max_length": LENGTH,
        "workers": workers,
        "cache_dir": str(base / "cache"),
    }
    config = Config.model_validate({"algorithm": "sft", "model": {}, "data": data | extra})
    tokenizer = load_tokenizer(str(base / "tokenizer"), config.model)
    if name == "warm":
        start = time.perf_counter()
        plan = find_prepared(config, str(base / "tokenizer"), base)
        assert plan is not None, "the cache is there"
        return {"seconds": time.perf_counter() - start, "samples": plan.train_samples}
    peak, start = Peak(), time.perf_counter()
    before = os.times()
    if name == "drumline":
        tokens = prepare(config, str(base / "tokenizer"), base).train_tokens
    else:
        import datasets

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            pairs = zip(batch["prompt"], batch["completion"], strict=True)
            chats = [
                [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
                for one, other in pairs
            ]
            texts = tokenizer.apply_chat_template(chats, tokenize=False)
            encoded = dict(
                tokenizer(texts, add_special_tokens=False, truncation=True, max_length=LENGTH)
            )
            if name == "with masks":
                heads = tokenizer.apply_chat_template(
                    [chat[:1] for chat in chats], tokenize=False, add_generation_prompt=True
                )
                sizes = [
                    len(ids) for ids in tokenizer(heads, add_special_tokens=False)["input_ids"]
                ]
                both = zip(sizes, encoded["input_ids"], strict=True)
                encoded["learn"] = [[0] * size + [1] * (len(ids) - size) for size, ids in both]
            return encoded

        loaded = datasets.load_dataset(
            "json", data_files=str(rows), split="train", cache_dir=str(base / "hf")
        )
        made = loaded.map(
            encode,
            batched=True,
            num_proc=workers if workers > 1 else None,
            remove_columns=["prompt", "completion"],
        )
        tokens = sum(len(ids) for batch in made.iter(1000) for ids in batch["input_ids"])
    seconds, cores = time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4])
    return {"seconds": seconds, "core_seconds": cores, "tokens": tokens, **peak.read()}


def run(
    name: str, base: Path, rows: Path, workers: int, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    arguments = [name, str(base), str(rows), str(workers), json.dumps(extra or {})]
    env = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [sys.executable, __file__, "--tool", *arguments],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--tool"]:
        print(
            json.dumps(
                tool(
                    sys.argv[2],
                    Path(sys.argv[3]),
                    Path(sys.argv[4]),
                    int(sys.argv[5]),
                    json.loads(sys.argv[6]),
                )
            )
        )
        return
    given = parser(__doc__)
    given.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    given.add_argument("--workers", type=int, default=2, help="tokenising processes of each tool")
    given.add_argument(
        "--alone", action="store_true", help="without datasets.map, filters and duplicates"
    )
    options = parse(given, rows=[3000], workers=1)
    from tests.tiny import tiny_tokenizer

    figures: dict[str, Any] = {}
    for count in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            tiny_tokenizer().save_pretrained(base / "tokenizer")
            make_rows(rows := base / "rows.jsonl", count)
            found = {
                "file_bytes": rows.stat().st_size,
                "drumline": run("drumline", base, rows, options.workers),
            }
            found["warm"] = run("warm", base, rows, options.workers)
            if not options.alone:
                found["filtered, deduplicated"] = run(
                    "drumline",
                    base,
                    rows,
                    options.workers,
                    {"where": "length(prompt) > 12", "duplicates": "exact"},
                )
                found |= {
                    f"datasets.map{more}": run(
                        more.strip(", ") or "alone", base, rows, options.workers
                    )
                    for more in ("", ", with masks")
                }
        figures[f"{count:,} rows"] = found
        for name, each in found.items():
            if isinstance(each, dict):
                sizes = [
                    f", {key} {each[key] / 2**20:,.0f} MiB"
                    for key in ("own_bytes", "largest_child_bytes")
                    if key in each
                ]
                print(
                    f"{count:>10,} rows  {name:<24} {each['seconds']:8.2f} s, {each.get('core_seconds', 0):8.2f} core s{''.join(sizes)}",
                    flush=True,
                )
    write({"prepare_rows": figures}, options.out)


if __name__ == "__main__":
    main()
