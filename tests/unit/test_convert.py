"""Files of LLaMA-Factory and Axolotl, and commands of TRL: each key becomes something or has a line, and the result is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline import cli
from drumline.compat.convert import convert
from drumline.compat.llama_factory import READ
from drumline.core.load import load
from drumline.data.turns import ROLES
from drumline.errors import ConfigError
from tests.harness import ROOT
from tests.tiny import tiny_model_dir

FILES = ROOT / "tests" / "fixtures" / "convert"
SECRET = "hf_aVerySecretToken123"


def made(old: Path | list[str]) -> tuple[dict[str, Any], str]:
    """The new config, and all lines in one text."""
    text, notes = convert(old)
    short = [note.replace(str(old), old.name) for note in notes] if isinstance(old, Path) else notes
    assert all(f"# {note}\n" in text for note in short if "says nothing of data" not in note)
    return yaml.safe_load(text) or {}, "\n".join(notes)


def at(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        values = values[int(key)] if isinstance(values, list) else values[key] if isinstance(values, dict) and key in values else None
    return values


MEANINGS: dict[str, dict[str, Any]] = {
    "lf_sft.yaml": {
        "algorithm": "sft", "adapter.r": 12, "adapter.alpha": 24, "adapter.quantize": "4bit", "adapter.targets": ["q_proj", "v_proj"],
        "optimizer.groups.0.lr_ratio": 8.0, "data.max_length": 768, "data.train.1.limit": 3, "data.train.2.columns": {"messages": "dialog"},
        "data.train.3.columns": {"prompt": "q", "completion": "a"}, "data.holdout": 0.2, "eval.every": 25, "model.attention": "sdpa",
    },
    "lf_dpo.yaml": {"algorithm": {"kind": "simpo", "beta": 0.2, "gamma": 0.7}, "strategy": "zero3", "adapter": None},
    "lf_rm.yaml": {"algorithm": "reward", "data.packing": False},
    "lf_pt.yaml": {"algorithm": "pretrain", "data.packing": True, "data.train.0.columns": {"text": "body"}},
    "lf_ppo.yaml": {"algorithm.rewards.0.model.id": "someone/judge", "algorithm.generator.max_new_tokens": 64, "algorithm.epochs": 2},
    "axolotl_qlora.yaml": {
        "adapter.quantize": "4bit", "adapter.targets": "all-linear", "optimizer.kind": "adamw_8bit", "data.truncation": "drop",
        "data.train.2": {"kind": "hub", "id": "someone/rows", "name": "small", "split": "train[:10%]"}, "run.report_to": ["wandb"],
        "run.tracker": {"project": "songs", "name": "first"},
        "schedule.warmup_steps": 5, "batch.micro_batch": 2, "data.packing": True, "data.holdout": 3, "precision.kind": "auto",
    },
    "axolotl_dpo.yaml": {"algorithm": {"kind": "dpo", "beta": 0.2}, "strategy.kind": "fsdp2", "run.steps": 20, "precision": "bf16"},
    "axolotl_pretrain.yaml": {"algorithm": "pretrain", "optimizer.kind": "muon", "strategy": "zero2", "data.train.0.columns.text": "body"},
    "trl_dpo.yaml": {"algorithm.loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2}, "adapter.r": 8, "data.train.0.id": "someone/pairs"},
    "trl_sft.sh": {"adapter.r": 32, "adapter.targets": ["q_proj", "v_proj"], "run.dir": "runs/my chats", "eval.every": 100},
    "trl_grpo.sh": {
        "algorithm.group_size": 4, "algorithm.generator.url": "http://127.0.0.1:8000", "algorithm.scale": "none", "run.steps": 50,
        "algorithm.kl.coefficient": 0.04, "algorithm.normalize": "constant", "algorithm.rewards.0.path": "my_rewards:close",
    },
}  # fmt: skip


def test_each_file_is_held() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_file()} == {*MEANINGS, "lf_kto.yaml"}


@pytest.mark.parametrize("name", MEANINGS)
def test_means_the_same(name: str) -> None:
    values, notes = made(FILES / name)
    assert {dotted: at(values, dotted) for dotted in MEANINGS[name]} == MEANINGS[name]
    assert SECRET not in notes + str(values) and "aPassword123" not in notes


# What would be without it, too.
NEUTRAL = {
    "do_train: True", "quantization_method: bnb", "reward_model_type: full", "stage: sft", "finetuning_type: lora", "eval_strategy: steps",
    "use_peft: True", "load_in_8bit: False", "bf16: auto", "lora_model_dir: None", "wandb_entity: None", "resume_from_checkpoint: None",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MEANINGS if name.endswith(".yaml")])
def test_no_key_is_dropped_silently(name: str, tmp_path: Path) -> None:
    """Without any one key the result is another one, or its line is missing."""
    old = yaml.safe_load((FILES / name).read_text())
    (tmp_path / "data").symlink_to(FILES / "data")

    def converted(values: dict[str, Any]) -> Any:
        (tmp_path / "old.yaml").write_text(yaml.safe_dump(values))
        try:
            new, notes = made(tmp_path / "old.yaml")
        except ConfigError as error:
            return error.line()
        return new, sorted(line.partition(": ")[2] for line in notes.splitlines())

    whole = converted(old)
    kept = [key for key in old if f"{key}: {old[key]}" not in NEUTRAL]
    assert not [key for key in kept if converted({k: v for k, v in old.items() if k != key}) == whole]


@pytest.mark.parametrize("name", [name for name in MEANINGS if name.startswith(("lf", "axolotl_dpo", "axolotl_p"))])
def test_plan_takes_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, new = tiny_model_dir(tmp_path / "model"), tmp_path / "new.yaml"
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(FILES / name), "-o", str(new)])
    assert not ended.value.code and load(new, []).config.model.id == "someone/base-model"
    tiny = [f"model.id={model}", "run.device=cpu", *["adapter.targets=all-linear", "data.max_length=256"] * ("sft" in name)]
    rewards = [f"algorithm.rewards=[{{kind: model, model: {{id: {model}}}}}]"] if "ppo" in name else []
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(new), *tiny, *rewards])
    assert not ended.value.code, capsys.readouterr().err
    capsys.readouterr()


def test_a_command_and_its_file() -> None:
    values, notes = made(["trl", "dpo", "--config", str(FILES / "trl_dpo.yaml"), "--beta", "0.3", "--output_dir=a b", "|", "tee", "log"])
    assert values["algorithm"]["beta"] == 0.3 and values["run"]["dir"] == "a b" and values["precision"] == "bf16"
    values, notes = made(["trl", "rloo", "--model_name_or_path", "a/b", "--dataset_name", "c/d", "--hub_token", SECRET, "--odd", "1"])
    assert values["algorithm"]["estimator"] == "rloo" and values["algorithm"]["kl"]["coefficient"] == 0.05
    assert SECRET not in notes and "--odd: 1: unknown key of `trl rloo`" in notes and "no reward function is named" in notes
    values, notes = made(["python", "sft.py", "--model_name_or_path", "a/b", "--dataset_name", "c/d", "--max_length", "$LENGTH"][:6])
    assert values["optimizer"]["lr"] == 2e-5 and "TRL's default is all" in notes


AXOLOTL = "base_model: a/b\ndatasets: [{path: c/d, type: alpaca}]\nsequence_len: 64\nlearning_rate: 1e-4\n"
MISTAKES = [
    ("", "the file is empty"),
    ("- a", "holds a list"),
    ("a: {b: 1}", "is no config of accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl"),
    ("stage: stf\nmodel_name_or_path: a/b\n", "old.yaml:1: stage: no 'stf' here — did you mean 'sft'?"),
    ("stage: sft\ndataset: songs\n", "there is no data/dataset_info.json, which says what 'songs' is"),
    ("stage: sft\ndataset_dir: DATA\ndataset: song\n", "has no dataset 'song' — did you mean 'songs'?"),
    ("stage: sft\ndataset_dir: DATA\ndataset: script\n", "has neither file_name nor hf_hub_url"),
    ("stage: kto\ndataset_dir: DATA\ndataset: judged\n", "kto is a package of its own"),
    (AXOLOTL + "rl: dpp\n", "old.yaml:5: rl: no 'dpp' here — did you mean 'dpo'?"),
    (AXOLOTL + "micro_batch_size: two\n", "old.yaml:5: micro_batch_size: 'two' given, a whole number is wanted"),
    (AXOLOTL.replace("path", "paht"), "dataset 1 has no path"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES, ids=lambda v: v[:20])
def test_a_mistake_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(text.replace("DATA", str(FILES / "data")))
    with pytest.raises(ConfigError) as raised:
        convert(tmp_path / "old.yaml")
    assert says in raised.value.line() and "\n" not in raised.value.line()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"columns": {"messages": "conversations", "system": "sys"}}, "columns.system: 'sys': left out: it is system or"),
        ({"columns": {"chosen": "better", "rejected": "rejected"}}, "columns.chosen: 'better': left out: it is chosen here"),
        ({"columns": {"kto_tag": "good"}}, "columns.kto_tag: 'good': left out: it is label or kto_tag here"),
        ({"tags": {"role_tag": "by", "content_tag": "value"}}, "tags.role_tag: 'by': left out: it is from or role here"),
        ({"tags": {"user_tag": "gpt", "assistant_tag": "gpt"}}, "tags.user_tag: 'gpt': left out: it is human or user here"),
        (
            {"columns": {"messages": "talk", "system": "system"}, "tags": {"role_tag": "role", "content_tag": "content"}},
            "columns.system: 'system': left out: nothing is read beside messages under talk — rename those to conversations",
        ),
        (
            {"columns": {"messages": "talk"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "human"}},
            "tags.user_tag: 'human': left out: it is user here",
        ),
        ({"columns": {"system": "system_prompt"}, "tags": {"role_tag": "from", "user_tag": "human", "observation_tag": "tool"}}, ""),
    ],
)
def test_names_that_rows_of_sharegpt_do_not_have_here(entry: dict[str, Any], says: str, tmp_path: Path) -> None:
    sets = {"talks": {"file_name": "talks.jsonl", "formatting": "sharegpt", **entry}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(sets))
    (tmp_path / "old.yaml").write_text("model_name_or_path: a/b\nstage: sft\ndataset: talks\n")
    notes = [line for line in made(tmp_path / "old.yaml")[1].splitlines() if "dataset_info" in line]
    assert bool(notes) == bool(says) and says in "".join(notes)
    assert all(ROLES[name] == OURS[key] for key in OURS for name in READ[key])


OURS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool", "function_tag": "assistant"}


def test_training_is_strict_where_convert_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(AXOLOTL + "neftune_noise_alpha: 5\n")
    assert "neftune_noise_alpha: 5: left out" in made(tmp_path / "old.yaml")[1]
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        load(tmp_path / "old.yaml", [])
