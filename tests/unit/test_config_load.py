"""What the YAML may say, and the one line that a mistake gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.config.load import differences, load, load_text, schema, to_yaml
from drumline.config.schema import Config, DDPStrategy
from drumline.errors import ConfigError

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\n"

# (YAML, overrides, what the line must say)
MISTAKES: list[tuple[str, list[str], list[str]]] = [
    (DATA + "optimizer:\n  lerning_rate: 1e-5\n", [], ["c.yaml:3", "unknown key 'lerning_rate'", "'lr'"]),
    (DATA + "optimizer:\n  learning_rate: 1e-5\n", [], ["c.yaml:3", "'lr'"]),
    (DATA + "strategy: {kind: ddp, bucket: 3}\n", [], ["c.yaml:2", "'bucket_cap_mb'"]),
    (DATA + "lr: 3\n", [], ["c.yaml:2", "did you mean optimizer.lr?"]),
    (DATA + "zzz: 3\n", [], ["unknown key 'zzz'", "known here: algorithm"]),
    (DATA + "run: {foo: 1, bar: 2}\n", [], ["1 more mistake"]),
    (DATA + "optimizer: {lr: abc}\n", [], ["c.yaml:2", "optimizer.lr", "'abc' given (str)", "number"]),
    (DATA + "run: {steps: 0}\n", [], ["run.steps", "0 given (int)", "greater than 0"]),
    (DATA + "model: foo\n", [], ["keys and values are wanted", "trust_remote_code"]),
    (DATA + "strategy: dpp\n", [], ["no kind 'dpp'", "did you mean 'ddp'?", "auto, single, ddp"]),
    (DATA + "schedule: cosin\n", [], ["schedule.kind", "'cosine'"]),
    ("data: {train: [{kind: fil, path: x}]}", [], ["data.train.0", "did you mean 'file'?"]),
    ("data: {train: [{path: x}]}", [], ["`kind`", "left out"]),
    ("data: {train: [{kind: hub, id: x, streaming: true}]}", [], ["streaming needs `limit`"]),
    (DATA + "batch: {global_samples: 2, global_tokens: 4}\n", [], ["not both"]),
    (DATA + "batch: {}\nbatch: {}\n", [], ["c.yaml:3", "stands twice, on lines 2 and 3"]),
    ("model: {}\n", [], ["'data' is missing"]),
    ("data:\n\ttrain: 3", [], ["c.yaml:2", "a tab where spaces"]),
    ("data: {train: [", [], ["not readable as YAML"]),
    ("- 1", [], ["c.yaml:1", "a list, not keys"]),
    ("", [], ["the file is empty"]),
    (DATA, ["optimizer.lr=abc"], ["override optimizer.lr=abc", "number"]),
    (DATA, ["optimizer.lrr=1"], ["override optimizer.lrr=1", "did you mean 'lr'?"]),
    (DATA, ["optimizer.foo"], ["'optimizer.foo' is no override", "key=value"]),
    (DATA, ["data.train.3.limit=2"], ["the list has 1 items"]),
]


@pytest.mark.parametrize(("text", "overrides", "says"), MISTAKES, ids=lambda v: None if not isinstance(v, str) else v.strip()[-40:])
def test_a_mistake_is_one_line(text: str, overrides: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text, overrides, "c.yaml")
    line = error.value.line()
    assert "\n" not in line and error.value.exit_code == 2
    assert all(part in line for part in says), line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml", [])
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, [])
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not UTF-8"):
        load(tmp_path / "latin.yaml", [])


def test_floats_as_people_write_them() -> None:
    for text in ("1e-5", "1E-5", "1.0e-5", ".00001", "0.00001", "'1e-5'"):
        assert load_text(DATA + f"optimizer: {{lr: {text}}}", []).optimizer.lr == 1e-5
    assert load_text(DATA + "model: {revision: 1e5a}", []).model.revision == "1e5a"


def test_overrides_reach_every_place() -> None:
    config = load_text(
        DATA,
        [
            "strategy=ddp",
            "strategy.bucket_cap_mb=3",
            "data.train.0.limit=10",
            "model.tokenizer=null",
            "run.report_to=[]",
            "optimizer.betas=[0.9, 0.95]",
        ],
    )
    assert isinstance(config.strategy, DDPStrategy) and config.strategy.bucket_cap_mb == 3
    assert (config.data.train[0].limit, config.model.tokenizer, config.run.report_to, config.optimizer.betas) == (10, None, (), (0.9, 0.95))


def test_every_default_is_printed_and_reads_back() -> None:
    config = load_text(DATA, [])
    text = to_yaml(config)
    assert load_text(text, []) == config
    assert all(f"{name}:" in text for name in Config.model_fields)
    assert "max_grad_norm: 1.0" in text and "kind: auto" in text


def test_differences_tell_what_matters() -> None:
    old = load_text(DATA, [])
    new = load_text(
        DATA,
        ["optimizer.lr=1", "strategy=ddp", "checkpoint.every=5", "run.seed=3", "data.workers=2", "data.max_length=64", "launch.nproc=2"],
    )
    found = {d.key: d.matters for d in differences(old, new)}
    assert {key for key, matters in found.items() if matters} == {"optimizer.lr", "run.seed", "data.max_length"}
    assert {"strategy.kind", "checkpoint.every", "data.workers", "launch.nproc"} <= found.keys()
    assert differences(old, old) == []


def test_templates_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(DATA + "model: {chat_template: t.jinja}\n")
    assert load(tmp_path / "c.yaml", []).config.model.chat_template == str(tmp_path / "t.jinja")


def test_schema_describes_every_key_and_allows_short_forms() -> None:
    made = schema()
    assert set(made["properties"]) == set(Config.model_fields)
    assert {"enum": ["auto", "ddp", "single"]} in made["properties"]["strategy"]["anyOf"]
    assert json.loads(json.dumps(made)) == made
    undescribed = [
        f"{name}.{key}"
        for name, section in made["$defs"].items()
        for key, value in section["properties"].items()
        if "description" not in value and key != "kind"
    ]
    assert not undescribed


def test_light_rooms_do_not_import_torch() -> None:
    rooms = ("cli", "config.load", "plan.resolve", "report.events", "report.progress", "cluster.detect", "launch.local")
    code = f"import sys, {', '.join(f'drumline.{room}' for room in rooms)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
