"""What the YAML may say, and the one line that a mistake gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from drumline import cli
from drumline.config.config import Config
from drumline.config.load import (
    changed_values,
    load,
    load_text,
    override,
    refused_changes,
    schema,
    to_yaml,
)
from drumline.config.mistakes import SYNONYMS, field_at, kinds_at
from drumline.config.model import ModelConfig
from drumline.errors import ConfigError
from drumline.system.yaml_lines import read_yaml
from tests.strategies import DDPStrategy

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\n"

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))

# (YAML, overrides, what the line must say)
MISTAKES: list[tuple[str, list[str], list[str]]] = [
    # keys that are not known
    (
        DATA + "optimizer:\n  lerning_rate: 1e-5\n",
        [],
        ["c.yaml:3: optimizer.lerning_rate", "unknown key 'lerning_rate'", "did you mean 'lr'?"],
    ),
    (DATA + "optimizer:\n  learning_rate: 1e-5\n", [], ["c.yaml:3", "did you mean 'lr'?"]),
    (
        DATA + "strategy: {kind: ddp, bucket: 3}\n",
        [],
        ["c.yaml:2", "did you mean 'bucket_cap_mb'?"],
    ),
    (
        DATA + "strategy: {kind: auto, bucket_cap_mb: 3}\n",
        [],
        ["unknown key 'bucket_cap_mb' of kind auto", "kind ddp has it"],
    ),
    (
        DATA + "strategy: {kind: ddp, offload: cpu}\n",
        [],
        ["strategy.offload: ddp has no offload: each rank's part stays", "use fsdp2 with offload"],
    ),
    (
        "data: {train: [{kind: file, path: x, name: y}]}",
        [],
        ["data.train.0.name", "kind hub has it"],
    ),
    (DATA + "lr: 3\n", [], ["c.yaml:2: lr", "did you mean 'optimizer.lr'?"]),
    (DATA + "LR: 3\n", [], ["did you mean 'optimizer.lr'?"]),
    (DATA + "seed: 3\n", [], ["did you mean 'run.seed' or "]),
    (DATA + "per_device_train_batch_size: 3\n", [], ["did you mean 'batch.micro_batch'?"]),
    (
        DATA + "rollout: {ahead: 1, fleet: ['http://gpu-7:8000']}\n",
        [],
        ["c.yaml:2: rollout", "did you mean 'algorithm.generator'?"],
    ),
    (
        DATA + "algorithm: {kind: grpo, fleet: ['http://gpu-7:8000']}\n",
        [],
        ["algorithm.fleet", "did you mean 'algorithm.generator.url'?"],
    ),
    (
        DATA + "algorithm: {kind: grpo, generator: {kind: vllm, fleet: ['http://gpu-7:8000']}}\n",
        [],
        ["algorithm.generator.fleet", "did you mean 'url'?"],
    ),
    (
        DATA + "algorithm: {kind: grpo, tools: ['tools.py:multiply']}\n",
        [],
        ["algorithm.tools", "did you mean 'algorithm.environment.functions'?"],
    ),
    (
        DATA + "algorithm: {kind: gkd, teacher: some/model, lmbda: 0.5}\n",
        [],
        ["did you mean 'on_policy_share'?"],
    ),
    (DATA + "run: {max_steps: 3}\n", [], ["run.max_steps", "did you mean 'steps'?"]),
    (DATA + "run: {bf16: true}\n", [], ["did you mean 'precision' at the top, beside 'run'?"]),
    (DATA + "schedule: {type: cosine}\n", [], ["did you mean 'kind'?"]),
    (
        DATA + "model: {optimizer: 3}\n",
        [],
        ["did you mean 'optimizer' at the top, beside 'model'?"],
    ),
    (DATA + "adapter: {kind: lora, rank: 8}\n", [], ["adapter.rank", "did you mean 'r'?"]),
    (DATA + "strategy: {kind: ddp, rank: 8}\n", [], ["did you mean 'strategy.compression.rank'?"]),
    (
        DATA + "cluster: {links: {fast: {gb: 3}}}\n",
        [],
        ["cluster.links.fast.gb: unknown key 'gb'", "did you mean 'gb_s'?", "(and 1 more mistake)"],
    ),
    (
        DATA + "cluster: {devices: {x: {memory: 3, bandwidth_gb_s: 3, fp32_tflops: 2}}}\n",
        [],
        ["cluster.devices.x.memory", "did you mean 'memory_gb'?", "(and 1 more mistake)"],
    ),
    (DATA + "zzz: 3\n", [], ["unknown key 'zzz'", "known here: adapter, algorithm"]),
    (DATA + "run: {foo: 1, bar: 2}\n", [], ["and 1 more mistake)"]),
    (DATA + "1: 2\n", [], ["c.yaml:2: 1", "the key 1 is no text"]),
    # values of another type, or out of range
    (
        DATA + "optimizer: {lr: abc}\n",
        [],
        ["c.yaml:2: optimizer.lr", "'abc' given, a number is wanted", "the default is 2e-05"],
    ),
    (DATA + "optimizer: {lr: true}\n", [], ["true given, a number is wanted"]),
    (DATA + "optimizer: {lr: .inf}\n", [], ["inf given, a finite number is wanted"]),
    (
        DATA + "model: {config: {x: [1, .nan]}}\n",
        [],
        ["c.yaml:2: model.config.x.1", "a finite number"],
    ),
    (
        DATA + "optimizer: {betas: [0.9]}\n",
        [],
        ["optimizer.betas", "more are wanted", "[0.9, 0.999]"],
    ),
    (DATA + "run: {steps: 0}\n", [], ["run.steps", "0 given, a number greater than 0 is wanted"]),
    (DATA + "run: {steps: 1.5}\n", [], ["1.5 given, a whole number is wanted"]),
    (
        DATA + "run: {report_to: wandb}\n",
        [],
        ["'wandb' given, a list is wanted", "put [ ] around it"],
    ),
    (DATA + "run: {report_to: [wandbb]}\n", [], ["run.report_to.0", "did you mean 'wandb'?"]),
    (DATA + "checkpoint: {keep_best: maybe}\n", [], ["'maybe' given, true or false is wanted"]),
    (
        DATA + "model: {revision: 1234567}\n",
        [],
        ["1234567 given, text is wanted", "put it in quotes"],
    ),
    (
        DATA + "launch: {kind: slurm, time: 8h}\n",
        [],
        ["launch.time: '8h' is not written as it must be — Time limit: minutes, 8:00:00"],
    ),
    (
        DATA + "launch: {kind: kubernetes, image: ''}\n",
        [],
        ["launch.image: '' has 0 characters, at least 1 is wanted"],
    ),
    (
        DATA + "launch: {kind: ssh, hosts: [a:x]}\n",
        [],
        ["'a:x' is no host: write a name, user@name, or name:8 for its number of devices"],
    ),
    (
        DATA + "launch: {kind: ssh, hosts: [a], port: 65535}\n",
        [],
        ["launch.port: 65535 given, 65534 or less is wanted"],
    ),
    (DATA + "model: 3\n", [], ["3 given, keys and values are wanted", "trust_remote_code"]),
    (
        DATA + "algorithm: {kind: grpo, rewards: {kind: math}}",
        [],
        ["algorithm.rewards: {kind: …} given, a list is wanted", "begin each item"],
    ),
    ("data: {train: []}", [], ["at least 1 is wanted"]),
    (
        "data: {train: [{kind: tasks, tasks: {chain_sum: 3}}]}",
        [],
        ["c.yaml:1: data.train.0.tasks.chain_sum: 3 given"],
    ),
    # kinds
    (
        DATA + "strategy: ddpp\n",
        [],
        ["no kind 'ddpp'", "did you mean 'ddp'?", "auto, single, dp, ddp"],
    ),
    (DATA + "strategy: 3\n", [], ["3 given", "auto, single, dp, ddp"]),
    (DATA + "schedule: cosin\n", [], ["schedule.kind", "did you mean 'cosine'?"]),
    ("data: {train: [{kind: fil, path: x}]}", [], ["data.train.0", "did you mean 'file'?"]),
    ("data: {train: [{limit: 3}]}", [], ["`kind`", "left out", "file, hub, saved, sql, tasks"]),
    ("data: {train: [{name: y}]}", [], ["left out", "add kind: hub"]),
    ("data: {train: [3]}", [], ["3 given", "file, hub, saved, sql, tasks"]),
    # values that do not go together, or are missing
    (
        "data: {train: [{kind: hub, id: x, streaming: true}]}",
        [],
        ["data.train.0: streaming requires `limit`"],
    ),
    ("data: {train: [{kind: file}]}", [], ["'path' is missing", ".jsonl"]),
    (
        DATA + "batch: {global_samples: 99999999999}\n",
        [],
        ["c.yaml:2: batch.global_samples: 99999999999 given, 1000000000 or less"],
    ),
    (
        DATA + "batch: {global_samples: 2, global_tokens: 4}\n",
        [],
        ["c.yaml:2: batch: give", "not both"],
    ),
    ("model: {}\n", [], ["'data' is missing", "data: rows.jsonl"]),
    # text that is no YAML of keys and values
    (DATA + "batch: {}\nbatch: {}\n", [], ["c.yaml:3", "stands twice, on lines 2 and 3"]),
    ("data:\n\ttrain: 3", [], ["c.yaml:2", "a tab where spaces", "indent with spaces"]),
    ("data: {train: [", [], ["c.yaml:1", "not readable as YAML"]),
    ("data: a: b", [], ["c.yaml:1", "mapping values are not allowed here"]),
    ("a: 1\nb: \x01", [], ["c.yaml:2", "may not stand in it"]),
    ("[" * 5000, [], ["nested too deeply"]),
    ("a: &a [*a]", [], ["c.yaml:1", "an alias that holds itself"]),
    (BOMB, [], ["aliases that unfold to more than"]),
    ("? [1, 2]\n: 3", [], ["c.yaml:1", "a key that is a list"]),
    ("a: 1\n---\nb: 2", [], ["c.yaml:2", "another document"]),
    (
        "model: !!python/object/apply:os.system [ls]",
        [],
        ["c.yaml:1", "python/object/apply:os.system"],
    ),
    ("- 1", [], ["c.yaml:1", "a list, not keys"]),
    ("3", [], ["c.yaml:1", "only 3, not keys"]),
    ("", [], ["the file is empty"]),
    ("# only a comment", [], ["the file is empty"]),
    # overrides
    (DATA, ["optimizer.lr=abc"], ["override optimizer.lr=abc", "a number is wanted"]),
    (DATA, ["optimizer.lr="], ["override optimizer.lr=", "nothing given"]),
    (DATA, ["optimizer.lrr=1"], ["override optimizer.lrr=1", "did you mean 'lr'?"]),
    (DATA, ["optimiser.lr=1"], ["override optimiser.lr=1", "did you mean 'optimizer'?"]),
    (DATA, ["lr=1e-3"], ["override lr=1e-3", "did you mean 'optimizer.lr'?"]),
    (DATA, ["optimizer.foo"], ["'optimizer.foo' is no override", "key=value"]),
    (DATA, ["=3"], ["'=3' is no override"]),
    (DATA, ["optimizer..lr=3"], ["is no override"]),
    (
        DATA,
        ["model.revision=a: b: c"],
        ["override model.revision=a: b: c", "not readable as YAML", "quotes"],
    ),
    (DATA, ["strategy.bucket_cap_mb=3"], ["override strategy.bucket_cap_mb=3", "add kind: ddp"]),
    (DATA, ["data.train.3.limit=2"], ["the list has 1 item, no '3'"]),
    (
        "data: {path: x.jsonl}\nmodel: foo\nrun: {steps: 2}\n",
        [],
        ["data.path", "it is a source's, which stands under `train`", "(and 1 more mistake)"],
    ),
    (DATA, ["data.train.0.path.foo=x"], ["data.train.0.path has no keys", "'x.jsonl'"]),
    (DATA, ["data.eval.0.path=x"], ["data.eval is no list yet", "data.eval=[…]"]),
    (
        DATA,
        ["data.train.0.columns=3"],
        ["keys and values are wanted", "known keys: chosen, completion"],
    ),
    (
        DATA,
        ["data.train.0=null"],
        ["keys and values are wanted", "write {kind: …}, with a kind of file, hub"],
    ),
    # null where it may be meant to turn something off, and where a section cannot be empty
    (
        DATA,
        ["algorithm={kind: ppo, kl: null}"],
        ["null has no clear meaning here", "{coefficient: 0}"],
    ),
    (DATA, ["run.report_to=null"], ["null has no clear meaning here", "[] for no tracker"]),
    (DATA, ["adapter={kind: nil}"], ["no kind 'nil' here", "choose one of none, lora"]),
    (DATA, ["run.steps=0", "run.steps=-1"], ["override run.steps=-1"]),
]


@pytest.mark.claim("a user's mistake is one line")
@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    MISTAKES,
    ids=[f"{i}: {says[-1][:40]}" for i, (_, _, says) in enumerate(MISTAKES)],
)
@pytest.mark.slow
def test_a_mistake_is_one_line(text: str, overrides: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(text, overrides, "c.yaml")
    line = error.value.line()
    assert "\n" not in line and error.value.exit_code == 2
    assert all(part in line for part in says) and ("more mistake" in line) == (
        "more mistake" in says[-1]
    ), line


def test_five_mistakes_are_shown_and_the_others_counted() -> None:
    with pytest.raises(ConfigError) as error:
        load_text(DATA + "run: {stepz: 1, bar: 2}\nbatch: {micro_batch: x}\n", [], "c.yaml")
    first, *others = error.value.line(), *error.value.__notes__
    assert (
        "run.stepz" in first
        and "did you mean 'steps'?" in first
        and "(and 2 more mistakes)" in first
    )
    assert [
        "c.yaml:2: run.bar" in others[0],
        "c.yaml:3: batch.micro_batch" in others[1],
        len(others),
    ] == [True, True, 2]
    many = "".join(f"key{number}: 1\n" for number in range(3000))
    with pytest.raises(ConfigError, match="2999 more mistakes") as error:
        load_text(DATA + many, [], "c.yaml")
    assert [note.partition(":")[0] for note in error.value.__notes__] == [
        *["c.yaml"] * 4,
        "and 2,995 more",
    ]


def test_mistakes_of_a_file_are_shown_below_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(DATA + "run: {foo: 1, bar: 2}\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path / "c.yaml")])
    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and first.startswith("error: ") and "run.foo" in first
    assert second.startswith("       ") and "run.bar" in second


def test_counting_mistakes_is_linear() -> None:
    def count_calls(number: int) -> int:
        """Calls of Python functions, and of steps of generators, for a file of so many unknown keys."""
        text, calls = DATA + "".join(f"key{each}: 1\n" for each in range(number)), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            with pytest.raises(ConfigError):
                load_text(text, [])
        finally:
            sys.setprofile(None)
        return calls

    load_text(DATA, [])  # what is imported and cached once
    assert count_calls(1200) < 6 * count_calls(300), (
        "four times the mistakes: linear is four times, quadratic is sixteen"
    )


def test_null_is_the_default_wherever_a_section_can_be_empty() -> None:
    plain = load_text(DATA, [])
    sections = [name for name in Config.model_fields if name != "data"]
    empty = [
        "data.eval",
        "data.train.0.columns",
        "model.freeze",
        "optimizer.groups",
        "eval.tasks",
        "run.callbacks",
        "run.tracker",
    ]
    for key in (*sections, *empty):
        assert load_text(DATA, [f"{key}=null"]) == plain, key
    assert load_text(DATA + "adapter:\nmemory:\n  # activation_checkpointing: full\n", []) == plain
    grpo = ["algorithm=grpo", "batch.global_samples=8"]
    assert load_text(DATA, [*grpo, "algorithm.kl=null", "eval=null"]) == load_text(DATA, grpo), (
        "and it is still its own metric"
    )
    accepts = jsonschema.Draft202012Validator(schema()).is_valid
    assert all(accepts({"data": "a.jsonl", section: None}) for section in sections)
    assert accepts({"data": {"train": "a.jsonl", "eval": None}}) and not accepts({"data": None})
    assert not accepts({"data": "a.jsonl", "algorithm": {"kind": "ppo", "kl": None}})


def test_names_of_other_tools_lead_to_keys_that_are_there() -> None:
    wrong = [
        (name, dotted)
        for name, dotted in SYNONYMS.items()
        if dotted != "kind" and field_at(tuple(dotted.split("."))) is None
    ]
    assert not wrong


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml", [])
    with pytest.raises(
        ConfigError, match="is a folder, and one file is wanted — give the path of a YAML"
    ):
        load(tmp_path, [])
    for name in ("ds.json", "train.yaml", "rows.txt"):
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError,
        match=r"is a folder.* — name the file in it that is meant: ds\.json, train\.yaml$",
    ):
        load(tmp_path, [])
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not UTF-8"):
        load(tmp_path / "latin.yaml", [])


def test_floats_as_people_write_them() -> None:
    for text in ("1e-5", "1E-5", "1.0e-5", ".00001", "0.00001", "'1e-5'"):
        assert load_text(DATA + f"optimizer: {{lr: {text}}}", []).optimizer.lr == 1e-5
    assert load_text(DATA + "model: {revision: 1e5a}", []).model.revision == "1e5a"
    assert load_text(DATA + "model: {revision: 2026-01-31}", []).model.revision == "2026-01-31"


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
    assert (
        config.data.train[0].limit,
        config.model.tokenizer,
        config.run.report_to,
        config.optimizer.betas,
    ) == (10, None, (), (0.9, 0.95))


def test_every_default_is_printed_and_reads_back() -> None:
    config = load_text(DATA, [])
    text = to_yaml(config)
    assert load_text(text, []) == config
    assert all(f"{name}:" in text for name in Config.model_fields)
    assert "max_grad_norm: 1.0" in text and "kind: auto" in text


def test_text_that_looks_like_something_else_reads_back() -> None:
    texts = (
        "1e5",
        "12e4567",
        "1_000",
        "0x1f",
        "2026-01-31",
        "12:30",
        "no",
        "null",
        "",
        "1.5",
        "-",
        "a: b",
        "# x",
        "007",
    )
    for text in (*texts, "a\n b\n", "a\x85b"):
        config = load_text(DATA, []).model_copy(update={"model": ModelConfig(revision=text)})
        assert load_text(to_yaml(config), []).model.revision == text


def test_anchors_share_nothing_once_read() -> None:
    text = "data:\n  train: &rows [{kind: file, path: x.jsonl}]\n  eval: *rows\nrun: {steps: 3}\n"
    config = load_text(text, ["data.train.0.limit=2"])
    assert (config.data.train[0].limit, config.data.eval[0].limit) == (2, None)


def test_differences_tell_what_matters() -> None:
    old = load_text(DATA, [])
    new = load_text(
        DATA,
        [
            "optimizer.lr=1",
            "strategy=ddp",
            "checkpoint.every=5",
            "run.seed=3",
            "data.workers=2",
            "data.max_length=64",
            "launch.nproc=2",
        ],
    )
    keys, line = refused_changes(old, new, ())
    assert keys == ["data.max_length", "optimizer.lr", "run.seed"] and line.endswith(
        "run.seed 0 → 3"
    )
    assert refused_changes(old, new, ("optimizer", "run.seed")).keys == ["data.max_length"]
    assert refused_changes(old, new, ("all",)) == refused_changes(old, old, ()) == ([], "")


def test_templates_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(DATA + "model: {chat_template: t.jinja}\n")
    assert load(tmp_path / "c.yaml", []).config.model.chat_template == str(tmp_path / "t.jinja")
    assert load(
        tmp_path / "c.yaml", ["model.chat_template=~/t.jinja"]
    ).config.model.chat_template == str(Path.home() / "t.jinja")


def test_schema_describes_every_key_and_allows_short_forms() -> None:
    made = schema()
    assert set(made["properties"]) == set(Config.model_fields)
    assert {"enum": sorted(kinds_at(("strategy",)))} in made["properties"]["strategy"]["anyOf"]
    assert json.loads(json.dumps(made)) == made
    assert made["title"] == "Drumline config" and made["$schema"].endswith("2020-12/schema")
    assert (
        made["$defs"]["FileSource"]["required"] == ["kind", "path"]
        and "required" not in made["$defs"]["OptimizerConfig"]
    )
    undescribed = [
        f"{name}.{key}"
        for name, section in made["$defs"].items()
        for key, value in section["properties"].items()
        if "description" not in value and key != "kind"
    ]
    assert not undescribed


def test_light_rooms_do_not_import_torch() -> None:
    rooms = (
        "cli",
        "config.load",
        "plan.resolve",
        "telemetry.events",
        "report.progress",
        "hardware.detect",
        "launch.local",
    )
    code = f"import sys, {', '.join(f'drumline.{room}' for room in rooms)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_override_goes_into_a_short_form(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("model: foo\ndata: x.jsonl\nstrategy: ddp\n")
    config = load(
        tmp_path / "short.yaml",
        ["model.revision=v2", "data.max_length=64", "strategy.static_graph=true"],
    ).config
    (source,) = config.data.train
    assert (config.model.id, config.model.revision, config.data.max_length) == (
        "foo",
        "v2",
        64,
    ) and source.model_dump()["path"] == "x.jsonl"


@pytest.mark.parametrize(
    ("overrides", "role", "expected"),
    [
        (
            ["data.eval={easy: sub/rows}"],
            "eval",
            [{"kind": "file", "path": "sub/rows", "set": "easy"}],
        ),
        (
            ["data.eval=sub/rows", "data.eval.0.limit=2"],
            "eval",
            [{"kind": "file", "path": "sub/rows", "limit": 2}],
        ),
        (
            ["data={train: a.jsonl, eval: {x: sub/rows}}"],
            "eval",
            [{"kind": "file", "path": "sub/rows", "set": "x"}],
        ),
        (
            ["data.eval={id: a.jsonl, ood: b.jsonl}"],
            "eval",
            [
                {"kind": "file", "path": "a.jsonl", "set": "id"},
                {"kind": "file", "path": "b.jsonl", "set": "ood"},
            ],
        ),
        (
            ["data=b.jsonl", "data.train.0.limit=3"],
            "train",
            [{"kind": "file", "path": "b.jsonl", "limit": 3}],
        ),
        (
            ["data.train=sub/rows", "data.train.0.weight=2"],
            "train",
            [{"kind": "file", "path": "sub/rows", "weight": 2}],
        ),
        (
            ["data.train=no/such", "data.train.0.limit=3"],
            "train",
            [{"kind": "hub", "id": "no/such", "limit": 3}],
        ),
        (
            ["data.train=[{path: no/such, limit: 3}]"],
            "train",
            [{"kind": "hub", "id": "no/such", "limit": 3}],
        ),
    ],
)
def test_sources_of_an_override_are_those_of_a_yaml(
    tmp_path: Path, overrides: list[str], role: str, expected: list[dict[str, Any]]
) -> None:
    """A folder beside the YAML is one, by whichever road its name comes, and the next override finds its keys."""
    (tmp_path / "sub" / "rows").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text(DATA)
    sources = getattr(load(tmp_path / "c.yaml", overrides).config.data, role)
    assert [
        {**source.model_dump(), **said} for source, said in zip(sources, expected, strict=True)
    ] == [s.model_dump() for s in sources]


DIGITS = "1" * 330
TOO_LARGE = "not readable as YAML: a whole number of more than 64 bits"
DIGITS_SHOWN = f"{'1' * 20}…{'1' * 8} (330 characters)"


@pytest.mark.parametrize(
    ("text", "override", "line"),
    [
        ("", f"run.seed={DIGITS}", f"override run.seed={DIGITS_SHOWN}: {TOO_LARGE} — the largest is {2**63 - 1}"),
        (f"run: {{seed: {2**64}}}", "", f"c.yaml:2: run.seed: {TOO_LARGE} — the largest is {2**63 - 1}"),
        ("", f"eval.every={DIGITS}", "the largest is 1000000000000"),
        ("", f"optimizer.betas=[0.9, {DIGITS}]", "it must be below 1"),
        ("", f"launch.port={DIGITS}", "it must be below 65536"),
        ("", f"model.id={DIGITS}", "put the value in quotes"),
        (f"{DIGITS}a: 3", "", f"c.yaml:2: {'1' * 20}…{'1' * 7}a (331 characters): unknown key"),
    ],
)  # fmt: skip
def test_a_long_value_is_shortened_and_a_large_number_has_its_limit(
    text: str, override: str, line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(f"{DATA}{text}", [override] if override else [], "c.yaml")
    assert line in error.value.line() and DIGITS not in error.value.line()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            "eval.every=2.5",
            "override eval.every=2.5: 2.5 given, a whole number is wanted — the default is null",
        ),
        ("eval.metric=3", "override eval.metric=3: 3 given, text is wanted — put it in quotes"),
    ],
)
def test_a_default_that_depends_on_a_mistake_is_none_itself(change: str, line: str) -> None:
    """`eval.mode` follows from `eval.metric`."""
    with pytest.raises(ConfigError) as error:
        load_text(DATA, [change])
    assert error.value.line() == line and not getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("path", [".", "/", "", ".."])
def test_a_folder_is_no_config(path: str) -> None:
    with pytest.raises(ConfigError, match="is a folder, and one file is wanted"):
        load(Path(path), [])


@pytest.mark.parametrize(
    "path", ["runs/a b #2", "runs/a: b", "/x/@y", "a", "runs/plain-1.0", "1e5", 'q"uote/x', "null"]
)
def test_a_path_in_an_override_is_read_as_it_is(path: str) -> None:
    assert read_yaml(override("run.dir", path).partition("=")[2], "value")[0] == path


@pytest.mark.parametrize(
    "options", ["ppo, kl: {coefficient: 0}", "grpo, estimator: rloo, scale: group"]
)
def test_changed_values_read_again_are_the_same_config(options: str) -> None:
    """Also if a key makes another one's default."""
    rewards = "rewards: [{kind: length, free: 1, limit: 2}]"
    text = (
        f"model: {{id: m}}\nalgorithm: {{kind: {options}, {rewards}}}\ndata: {{train: [x.jsonl]}}\n"
    )
    config = load_text(text, [], "x.yaml")
    again = type(config).model_validate(changed_values(config))
    assert again.model_dump() == config.model_dump()
