"""Files of LLaMA-Factory and Axolotl, and commands of TRL: each key becomes something or has a line, and the result is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drumline import cli
from drumline.config.load import load
from drumline.data import formats
from drumline.data.turns import ROLES
from drumline.errors import ConfigError
from drumline_convert.axolotl import TALKS
from drumline_convert.command import write_converted as to_stdout
from drumline_convert.convert import convert
from drumline_convert.llama_factory import READ
from tests.tiny import tiny_model_dir

FILES = Path(__file__).parent / "files"
SECRET = "hf_aVerySecretToken123"


def made(old: Path | list[str]) -> tuple[dict[str, Any], str]:
    """The new config, and all lines in one text."""
    text, notes = convert(old)
    for note in notes:
        short = note
        if isinstance(old, Path):
            short = note.replace(str(old), old.name)
        assert f"# {short}\n" in text or "says nothing of data" in note
    return yaml.safe_load(text) or {}, "\n".join(notes)


def at(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        if isinstance(values, list):
            values = values[int(key)]
        elif isinstance(values, dict):
            values = values.get(key)
        else:
            return None
    return values


def assert_has(values: Any, wanted: dict[str, Any]) -> None:
    """Assert that a config has a value for each dotted key."""
    for dotted, value in wanted.items():
        assert at(values, dotted) == value, dotted


MEANINGS: dict[str, dict[str, Any]] = {
    "lf_sft.yaml": {
        "algorithm": "sft",
        "adapter.r": 12,
        "adapter.alpha": 24,
        "adapter.quantize": "4bit",
        "adapter.targets": ["q_proj", "v_proj"],
        "optimizer.groups.0.lr_ratio": 8.0,
        "data.max_length": 768,
        "data.train.1.limit": 3,
        "data.train.2.columns": {"messages": "dialog"},
        "data.train.3.columns": {"prompt": "q", "completion": "a"},
        "data.holdout": 0.2,
        "eval.every": 25,
        "model.attention": "sdpa",
    },
    "lf_dpo.yaml": {
        "algorithm": {"kind": "simpo", "beta": 0.2, "gamma": 0.7},
        "strategy": "zero3",
        "adapter": None,
    },
    "lf_kto.yaml": {
        "algorithm": {"kind": "kto", "beta": 0.3, "undesirable_weight": 2.0},
        "data.train.0.columns": None,
    },
    "lf_rm.yaml": {"algorithm": "reward", "data.packing": False},
    "lf_pt.yaml": {
        "algorithm": "pretrain",
        "data.packing": True,
        "data.train.0.columns": {"text": "body"},
    },
    "lf_ppo.yaml": {
        "algorithm.rewards.0.model.id": "someone/judge",
        "algorithm.generator.max_new_tokens": 64,
        "algorithm.epochs": 2,
    },
    "axolotl_qlora.yaml": {
        "adapter.quantize": "4bit",
        "adapter.targets": "all-linear",
        "optimizer.kind": "adamw_8bit",
        "data.truncation": "drop",
        "data.train.2": {
            "kind": "hub",
            "id": "someone/rows",
            "name": "small",
            "split": "train[:10%]",
        },
        "run.report_to": ["wandb"],
        "run.tracker": {"project": "songs", "name": "first"},
        "schedule.warmup_steps": 5,
        "batch.micro_batch": 2,
        "data.packing": True,
        "data.holdout": 3,
        "precision.kind": "auto",
    },
    "axolotl_dpo.yaml": {
        "algorithm": {"kind": "dpo", "beta": 0.2},
        "strategy.kind": "fsdp2",
        "run.steps": 20,
        "precision": "bf16",
    },
    "axolotl_pretrain.yaml": {
        "algorithm": "pretrain",
        "optimizer.kind": "muon",
        "strategy": "zero2",
        "data.train.0.columns.text": "body",
    },
    "trl_dpo.yaml": {
        "algorithm.loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2},
        "adapter.r": 8,
        "data.train.0.id": "someone/pairs",
    },
    "trl_sft.sh": {
        "adapter.r": 32,
        "adapter.targets": ["q_proj", "v_proj"],
        "run.dir": "runs/my chats",
        "eval.every": 100,
    },
    "trl_grpo.sh": {
        "algorithm.group_size": 4,
        "algorithm.generator.url": "http://127.0.0.1:8000",
        "algorithm.scale": "none",
        "run.steps": 50,
        "algorithm.kl.coefficient": 0.04,
        "algorithm.normalize": "constant",
        "algorithm.rewards.0.path": "my_rewards:close",
    },
}


def test_each_file_is_held() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_file()} == set(MEANINGS)


@pytest.mark.parametrize("name", MEANINGS)
def test_means_the_same(name: str) -> None:
    values, notes = made(FILES / name)
    assert_has(values, MEANINGS[name])
    assert SECRET not in notes + str(values) and "aPassword123" not in notes


# What would be without it, too.
NEUTRAL = {
    "do_train: True",
    "quantization_method: bnb",
    "reward_model_type: full",
    "stage: sft",
    "finetuning_type: lora",
    "eval_strategy: steps",
    "use_peft: True",
    "load_in_8bit: False",
    "bf16: auto",
    "lora_model_dir: None",
    "wandb_entity: None",
    "resume_from_checkpoint: None",
}


@pytest.mark.claim(
    "converted files of other tools give the same config, and none of their keys is dropped silently"
)
@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("*.yaml")))
@pytest.mark.slow
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
    for key, value in old.items():
        if f"{key}: {value}" in NEUTRAL:
            continue
        rest = dict(old)
        del rest[key]
        assert converted(rest) != whole, key


PLANNED = (
    "axolotl_dpo.yaml",
    "axolotl_pretrain.yaml",
    "lf_dpo.yaml",
    "lf_kto.yaml",
    "lf_ppo.yaml",
    "lf_pt.yaml",
    "lf_rm.yaml",
    "lf_sft.yaml",
)


@pytest.mark.parametrize("name", PLANNED)
def test_plan_takes_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_dir(tmp_path / "model")
    new = tmp_path / "new.yaml"
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(FILES / name), "-o", str(new)])
    assert not ended.value.code
    assert load(new, []).config.model.id == "someone/base-model"
    overrides = [f"model.id={model}", "run.device=cpu"]
    if "sft" in name:
        overrides += ["adapter.targets=all-linear", "data.max_length=256"]
    if "ppo" in name:
        overrides.append(f"algorithm.rewards=[{{kind: model, model: {{id: {model}}}}}]")
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(new), *overrides])
    assert not ended.value.code, capsys.readouterr().err
    capsys.readouterr()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notes_are_shown_once(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    to_stdout(FILES / "lf_sft.yaml", None)
    out, err = capsys.readouterr()
    note = "the report (RUN/report.html) has the plot"
    assert out.count(note) == 1 and err.count(note) == (not is_terminal), (
        "a file that stdout goes to has them, and so has the terminal"
    )


def test_a_command_and_its_file() -> None:
    file = str(FILES / "trl_dpo.yaml")
    call = ["trl", "dpo", "--config", file, "--beta", "0.3", "--output_dir=a b", "|", "tee", "log"]
    values, _ = made(call)
    assert_has(values, {"algorithm.beta": 0.3, "run.dir": "a b", "precision": "bf16"})


NAMES = ("--model_name_or_path", "a/b", "--dataset_name", "c/d")


def test_a_command_with_a_secret_and_an_unknown_option() -> None:
    values, notes = made(["trl", "rloo", *NAMES, "--hub_token", SECRET, "--odd", "1"])
    assert_has(values, {"algorithm.estimator": "rloo", "algorithm.kl.coefficient": 0.05})
    assert SECRET not in notes
    assert "--odd: 1: unknown key of `trl rloo`" in notes
    assert "no reward function is named" in notes


def test_a_script_of_trl() -> None:
    values, notes = made(["python", "sft.py", *NAMES])
    assert values["optimizer"]["lr"] == 2e-5
    assert "data.learn_on: all does as TRL" in notes


# A file, what its config then has, and what a line says: first of Axolotl.
AX = "base_model: a/b\nsequence_len: 64\nlearning_rate: 1e-4\n"
TALK = (
    AX
    + "rl: dpo\ndatasets: [{path: p.jsonl, type: chat_template.KIND, field_messages: NAME, MORE}]\n"
)
TALK_SFT = TALK.replace("rl: dpo\n", "").replace(
    "MORE", "message_property_mappings: {role: ROLE, content: value}"
)
DOCUMENTS = AX + "datasets: [{path: d.jsonl, type: completion, field: body}]\n"
LF = "model_name_or_path: a/b\ndataset: c/d\ndataset_dir: ONLINE\n"
HF = "train_file: x.jsonl\n"
LORA = AX + "datasets: [{path: c/d, type: sharegpt}]\nadapter: lora\n"
SIMPO = {"kind": "simpo", "beta": 0.1, "gamma": 0.5}
SAMPLED = {"kind": "hf", "max_new_tokens": 1024, "temperature": 0.95, "top_p": 0.7, "top_k": 50}
MEANT: list[tuple[str, dict[str, Any], str]] = [
    (
        TALK.replace("KIND", "default")
        .replace("NAME", "conversation")
        .replace("MORE", "field_chosen: better, field_rejected: worse"),
        {
            "data.train.0.columns": {
                "prompt": "conversation",
                "chosen": "better",
                "rejected": "worse",
            }
        },
        "",
    ),
    (
        TALK.replace("KIND", "default").replace("NAME", "conversation").replace(", MORE", ""),
        {"data.train.0.columns": None},
        "",
    ),
    (
        TALK.replace("KIND", "default").replace("NAME", "talk").replace(", MORE", ""),
        {"data.train.0.columns": {"prompt": "talk", "chosen": "chosen", "rejected": "rejected"}},
        "",
    ),
    (
        TALK.replace("KIND", "argilla_chat").replace(
            "field_messages: NAME, MORE", "field_chosen: better"
        ),
        {"data.train.0.columns": {"chosen": "better", "rejected": "rejected"}},
        "",
    ),
    (
        TALK_SFT.replace("NAME", "dialog").replace("ROLE", "from"),
        {"data.train.0.columns": None},
        "",
    ),
    (
        TALK_SFT.replace("NAME", "dialog").replace("ROLE", "speaker"),
        {},
        "mappings.role: 'speaker': left out: it is role or from here",
    ),
    (
        TALK_SFT.replace("NAME", "talk").replace("ROLE", "from"),
        {"data.train.0.columns": {"messages": "talk"}},
        "mappings.role: 'from': left out: it is role here",
    ),
    (
        DOCUMENTS,
        {
            "algorithm": "pretrain",
            "data.packing": True,
            "data.truncation": "right",
            "data.train.0.columns.text": "body",
        },
        "datasets: a list: all are documents: algorithm pretrain",
    ),
    (
        DOCUMENTS.replace("}]", "}, {path: c/d, type: sharegpt}]"),
        {"algorithm": "sft", "data.truncation": "drop"},
        "datasets.0.type: 'completion': beside chats a long document is not cut",
    ),
    (
        AX + "pretraining_dataset: [{path: d.jsonl}]\n",
        {"algorithm": "pretrain", "data.truncation": "right", "data.packing": False},
        "",
    ),
    (
        LORA,
        {"schedule": {"kind": "cosine", "warmup_ratio": 0.03, "warmup_from_zero": True}},
        "so Axolotl's own default; Axolotl takes 100 steps at most",
    ),
    (LORA + "max_steps: 1000\n", {"schedule.warmup_steps": 30}, "warmup_steps: 30: not set there"),
    (LORA + "warmup_steps: 0\n", {"schedule": "cosine"}, ""),
    (LORA + "lora_target_modules: all-linear\n", {"adapter.targets": "all-linear"}, ""),
    (
        LORA + "lora_target_linear: true\nlora_target_modules: [q_proj]\n",
        {"adapter.targets": "all-linear"},
        "modules: a list: without effect",
    ),
    (
        LORA + "lora_target_modules: [q_proj]\nlora_target_linear: true\n",
        {"adapter.targets": "all-linear"},
        "modules: a list: without effect",
    ),
    (
        LORA + "lora_target_modules: [q_proj]\nlora_target_parameters: [mlp.experts.down_proj]\n",
        {"adapter.targets": ["q_proj", "mlp.experts.down_proj"]},
        "",
    ),
    (
        LORA + "lora_target_parameters: [mlp.experts.down_proj]\n",
        {"adapter.targets": ["mlp.experts.down_proj"]},
        "",
    ),
    (
        LORA + "lora_target_modules: 'model.layers.[0-3].(q|k)_proj'\n",
        {"adapter": "lora"},
        "left out: layers are named, not by a pattern",
    ),
    (LORA + "dp_replicate_size: 2\n", {"strategy": "ddp"}, ""),
    (
        LORA + "dp_replicate_size: 2\ndp_shard_size: 4\n",
        {"strategy": {"kind": "fsdp2", "replicate": 2}},
        "dp_shard_size: 4: shards go over all",
    ),
    (
        LORA.replace("sharegpt", "alpaca"),
        {"model.chat_template": "alpaca"},
        "all have Alpaca's prompt",
    ),
    (
        LORA.replace("sharegpt", "alpaca") + "chat_template: chatml\n",
        {"model": {"id": "a/b"}},
        "'alpaca': the prompt is made by the chat template",
    ),
    (LORA + "rl: simpo\n", {"algorithm": {**SIMPO, "sft_weight": 1.0}}, "algorithm.gamma 0.5"),
    (
        LORA + "rl: dpo\ntrl: {beta: 0.3, max_completion_length: 9}\n",
        {"algorithm.beta": 0.3},
        "max_completion_length: 9: data.max_length holds",
    ),
    (
        LORA + "rl: kto\nkto_desirable_weight: 1.2\nrl_beta: 0.3\n",
        {"algorithm": {"kind": "kto", "desirable_weight": 1.2, "beta": 0.3}},
        "",
    ),
    (
        LORA + "rl: grpo\n",
        {"algorithm.group_size": 8, "algorithm.generator.max_new_tokens": 512},
        "",
    ),
    # of LLaMA-Factory
    (
        LF + "stage: pt\n",
        {"data.packing": True, "adapter.r": 8, "adapter.alpha": 16},
        "data.packing true",
    ),
    (LF + "stage: pt\npacking: false\n", {"data.packing": False}, ""),
    (LF + "stage: dpo\npref_loss: simpo\n", {"algorithm": SIMPO}, "algorithm.beta 0.1"),
    (
        LF + "stage: ppo\nreward_model: r/m\n",
        {"algorithm.generator": SAMPLED, "data.max_length": 3072},
        "2048 tokens of a prompt",
    ),
    (
        LF + "stage: ppo\nreward_model: r/m\ncutoff_len: 100\nmax_new_tokens: 20\n",
        {"data.max_length": 120},
        "100 tokens of a prompt",
    ),
    (LF + "stage: sft\nuse_swanlab: true\nreport_to: none\n", {"run.report_to": ["swanlab"]}, ""),
    (
        LF + "stage: sft\nval_size: 0.1\nmetric_for_best_model: eval_accuracy\n",
        {"eval.metric": "token_accuracy", "eval.mode": "max"},
        "",
    ),
    (
        LF + "stage: sft\nddp_timeout: 180000000\n",
        {"launch.timeout_seconds": 1e7},
        "ddp_timeout: 180000000: launch.timeout_seconds is at most 10,000,000 (four months), and is set to that",
    ),
    (
        LF + "stage: sft\nplot_loss: true\n",
        {},
        "plot_loss: true: the report (RUN/report.html) has the plot",
    ),
    # of transformers
    (
        HF + "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 2}\n",
        {"schedule": "linear"},
        "no num_cycles here",
    ),
    (
        HF + "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 9}\n",
        {"schedule": "wsd"},
        "set schedule.decay_ratio",
    ),
    (HF + "logging_steps: 0.05\n", {"run.log_every": None}, "logging_steps: 0.05: left out"),
    (HF + "save_steps: 0.05\n", {"checkpoint": None}, "save_steps: 0.05: left out"),
    (
        HF + "metric_for_best_model: f1\ngreater_is_better: true\n",
        {"eval": None},
        "sft measures no 'f1'",
    ),
    (
        "dataset_name: c/d\ndataset_streaming: true\n",
        {"data.train": [{"kind": "hub", "id": "c/d"}]},
        "a stream needs max_train_samples",
    ),
    (
        "dataset_name: c/d\nuse_peft: true\n",
        {"adapter.targets": ["q_proj", "v_proj"]},
        "so PEFT's own defaults: adapter.targets",
    ),
]


@pytest.mark.parametrize(("text", "wanted", "says"), MEANT, ids=range(len(MEANT)))
def test_what_the_tool_would_do(
    text: str, wanted: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "old.yaml").write_text(text)
    values, notes = made(tmp_path / "old.yaml")
    assert_has(values, wanted)
    assert says in notes


PAIRS = "--model_name_or_path a/b --dataset_name c/d"
COMMANDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "orpo --max_completion_length 256",
        {"algorithm": "orpo"},
        "256: data.max_length holds the prompt and its completion",
    ),
    ("dpo --temperature 0.5", {"algorithm": "dpo"}, "without effect: only trainers that sample"),
    (
        "kto --loss_type apo_zero_unpaired --precompute_ref_log_probs true --undesirable_weight 2",
        {
            "algorithm": {
                "kind": "kto",
                "loss": "apo_zero_unpaired",
                "reference": "precomputed",
                "undesirable_weight": 2.0,
            }
        },
        "",
    ),
    (
        "kto --beta 0.2 --precompute_ref_log_probs true",
        {"algorithm": {"kind": "kto", "beta": 0.2, "reference": "auto"}},
        "KL of kto is of",
    ),
    (
        "grpo --max_prompt_length 100 --max_completion_length 50",
        {"data.max_length": 150},
        "100 tokens of a prompt",
    ),
    (
        "grpo --max_prompt_length 100 --max_length 90",
        {"data.max_length": 90},
        "--max_prompt_length: 100: without effect",
    ),
    ("grpo --epsilon_high 0.28", {"algorithm.clip_high": 0.28}, ""),
    (
        "grpo --loss_type cispo --epsilon_high 5",
        {"algorithm.surrogate": "cispo", "algorithm.clip_high": 4.0},
        "the largest ratio",
    ),
    ("grpo --loss_type cispo", {"algorithm.surrogate": "cispo"}, "without epsilon_high"),
    (
        "grpo --loss_type cispo --epsilon_high 0.2",
        {"algorithm.surrogate": "cispo"},
        "left out: TRL cuts each ratio of cispo below 1",
    ),
    (
        "ppo",
        {
            "algorithm.generator.temperature": 0.7,
            "algorithm.generator.max_new_tokens": 53,
            "data.max_length": 1077,
        },
        "temperature 0.7",
    ),
    (
        "dpo --loss_type simpo --beta 2",
        {"algorithm": {**SIMPO, "beta": 2.0, "sft_weight": 1.0}},
        "algorithm.sft_weight 1.0",
    ),
    (
        "dpo --metric_for_best_model eval_rewards/accuracies",
        {"eval": {"metric": "accuracy", "mode": "max"}},
        "",
    ),
    (
        "sft --assistant_only_loss false --completion_only_loss true",
        {"data.learn_on": "assistant"},
        "",
    ),
    (
        "sft --eval_strategy steps --eval_steps 50",
        {"data.eval": [{"kind": "hub", "id": "c/d", "split": "test"}]},
        "on the split `test`",
    ),
    ("sft --eval_strategy no", {"data.eval": None}, ""),
    (
        "sft --use_peft",
        {"adapter.targets": ["q_proj", "v_proj"], "adapter.r": 16},
        "PEFT's own defaults",
    ),
]


@pytest.mark.parametrize(("command", "wanted", "says"), COMMANDS, ids=range(len(COMMANDS)))
def test_what_trl_would_do(command: str, wanted: dict[str, Any], says: str) -> None:
    trainer, *options = command.split()
    values, notes = made(["trl", trainer, *PAIRS.split(), *options])
    assert_has(values, wanted)
    assert says in notes


def test_talks_are_found_by_the_names_that_formats_have() -> None:
    assert TALKS == formats.CONVERSATION_COLUMNS


AXOLOTL = "base_model: a/b\ndatasets: [{path: c/d, type: alpaca}]\nsequence_len: 64\nlearning_rate: 1e-4\n"
MISTAKES = [
    ("", "the file is empty"),
    ("- a", "holds a list"),
    (
        "a: {b: 1}",
        "is no config of accelerate, DeepSpeed, transformers, TRL, LLaMA-Factory or Axolotl",
    ),
    (
        "stage: stf\nmodel_name_or_path: a/b\n",
        "old.yaml:1: stage: no 'stf' here — did you mean 'sft'?",
    ),
    (
        "stage: sft\ndataset: songs\n",
        "there is no data/dataset_info.json, which says what 'songs' is",
    ),
    (
        "stage: sft\ndataset_dir: DATA\ndataset: song\n",
        "has no dataset 'song' — did you mean 'songs'?",
    ),
    ("stage: sft\ndataset_dir: DATA\ndataset: script\n", "has neither file_name nor hf_hub_url"),
    (AXOLOTL + "rl: dpp\n", "old.yaml:5: rl: no 'dpp' here — did you mean 'dpo'?"),
    (
        AXOLOTL + "micro_batch_size: two\n",
        "old.yaml:5: micro_batch_size: 'two' given, a whole number is wanted",
    ),
    (AXOLOTL.replace("path", "paht"), "dataset 1 has no path"),
    (LF + "stage: sft\nval_size: .inf\n", "val_size: inf given, a number is wanted"),
    (LF + "stage: sft\nval_size: .nan\n", "val_size: nan given, a number is wanted"),
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
        (
            {"columns": {"messages": "conversations", "system": "sys"}},
            "columns.system: 'sys': left out: it is system or",
        ),
        (
            {"columns": {"chosen": "better", "rejected": "rejected"}},
            "columns.chosen: 'better': left out: it is chosen here",
        ),
        (
            {"columns": {"kto_tag": "good"}},
            "columns.kto_tag: 'good': left out: it is label or kto_tag here",
        ),
        (
            {"tags": {"role_tag": "by", "content_tag": "value"}},
            "tags.role_tag: 'by': left out: it is from or role here",
        ),
        (
            {"tags": {"user_tag": "gpt", "assistant_tag": "gpt"}},
            "tags.user_tag: 'gpt': left out: it is human or user here",
        ),
        (
            {
                "columns": {"messages": "talk", "system": "system"},
                "tags": {"role_tag": "role", "content_tag": "content"},
            },
            "columns.system: 'system': left out: nothing is read beside messages under talk — rename those to conversations",
        ),
        (
            {
                "columns": {"messages": "talk"},
                "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "human"},
            },
            "tags.user_tag: 'human': left out: it is user here",
        ),
        (
            {
                "columns": {"system": "system_prompt"},
                "tags": {"role_tag": "from", "user_tag": "human", "observation_tag": "tool"},
            },
            "",
        ),
    ],
)
def test_names_that_rows_of_sharegpt_do_not_have_here(
    entry: dict[str, Any], says: str, tmp_path: Path
) -> None:
    sets = {"talks": {"file_name": "talks.jsonl", "formatting": "sharegpt", **entry}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(sets))
    (tmp_path / "old.yaml").write_text("model_name_or_path: a/b\nstage: sft\ndataset: talks\n")
    _, notes = made(tmp_path / "old.yaml")
    assert ("dataset_info" in notes) == bool(says)
    assert says in notes


def test_roles_that_are_read_are_those_of_rows() -> None:
    for key, role in OURS.items():
        for name in READ[key]:
            assert ROLES[name] == role


OURS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}


@pytest.mark.parametrize(
    ("entry", "most", "limit", "says"),
    [
        ({"hf_hub_url": "a/b", "num_samples": 50}, 10, 10, ""),
        ({"hf_hub_url": "a/b", "num_samples": 5}, 10, 5, ""),
        (
            {"hf_hub_url": "a/b", "folder": "python"},
            None,
            None,
            "folder: 'python': left out: all files of the dataset are read",
        ),
    ],
)
def test_how_much_of_a_dataset(
    entry: dict[str, Any], most: int | None, limit: int | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"songs": entry}))
    (tmp_path / "old.yaml").write_text(
        f"model_name_or_path: a/b\nstage: sft\ndataset: songs\nmax_samples: {most or 'null'}\n"
    )
    values, notes = made(tmp_path / "old.yaml")
    assert at(values, "data.train.0.limit") == limit and says in notes


def test_training_is_strict_where_convert_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(AXOLOTL + "neftune_noise_alpha: 5\n")
    assert "neftune_noise_alpha: 5: left out" in made(tmp_path / "old.yaml")[1]
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        load(tmp_path / "old.yaml", [])
