"""New tokens by the row of a strategy: losses are those of one process, whatever spreads the model.

A run that stops under one strategy goes on under another. What the rows are by themselves:
tests/unit/test_new_tokens.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.errors import CheckpointError
from drumline.models import load as models
from drumline.plan.plan import Plan
from drumline.planner.cost.memory import stage_of, state_of
from drumline.telemetry.events import last_measurement, read
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_plans
from tests.distributed.rows import CUT, TOLERANCE
from tests.harness import events, write_config
from tests.tiny import tiny_architecture_dir, tiny_model_dir

pytestmark = pytest.mark.timeout(900)

# Words of the rows, so that the new rows are read, and learned as targets.
NEW: Any = {"drum": "", "rank": "one two", "<think>": ""}
# All weights of a model whose head is tied; adapters over one whose head is not, and over one whose
# head is; QLoRA; a mixture of experts, all weights and adapters.
LORA = {
    "model": {"new_tokens": [*NEW]},
    "adapter": {"kind": "lora", "r": 4, "targets": "attention"},
}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"model": {"new_tokens": NEW}},
    "lora": LORA,
    "lora tied": LORA,
    "4bit": {**LORA, "adapter": {**LORA["adapter"], "quantize": "4bit"}},
    "experts": {"model": {"new_tokens": NEW}},
    "experts lora": LORA,
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
    "tp 2": (2, "tp"),
    "cp 2": (2, "cp"),
    "pp 2": (2, "pp"),
    "zero3 2": (2, CUT),
    "ep 2": (2, {"kind": "ddp", "ep": 2}),
}
OFTEN = {("all", "fsdp2 2"), ("all", "tp 2"), ("lora", "fsdp2 2")}
REFUSED = {("lora", "tp 2"), ("lora tied", "tp 2")}
# Kinds with spreads of their own. Each other kind has every spread of a dense model.
SPREADS_OF = {
    "4bit": ("ddp 2", "fsdp2 2"),
    "experts": ("ep 2",),
    "experts lora": ("ep 2",),
}
DENSE = tuple(name for name in SPREADS if name not in ("single", "ep 2"))
PAIRS = [
    pytest.param(
        kind, name, id=f"{kind}-{name}", marks=[] if (kind, name) in OFTEN else pytest.mark.full
    )
    for kind in KINDS
    for name in SPREADS_OF.get(kind, DENSE)
    if (kind, name) not in REFUSED
]
MOVES = [("all", "tp 2", "single"), ("lora", "fsdp2 2", "single")]


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    place = root / folder
    place.mkdir()
    ranks, strategy = SPREADS[spread]
    request = Request(
        load(config_of(root, place, kind, strategy), [f"data.cache_dir={root / 'cache'}"]),
        world_size=ranks,
    )
    return claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)[0]


def config_of(root: Path, place: Path, kind: str, strategy: Any) -> Path:
    sections = {**KINDS[kind], "model": {"id": str(root / kind), **KINDS[kind]["model"]}}
    return write_config(
        place,
        root / kind,
        rows=60,
        strategy=strategy,
        data={"packing": False},
        batch={"global_samples": 8, "micro_batch": 2},
        checkpoint={"every": 2, "asynchronous": False, "export": "none"},
        eval={"at_start": False},
        run={"steps": 3},
        # As in test_adapters: the gradients of fresh adapters are near nothing.
        optimizer={"lr": 3e-3, "eps": 1e-4},
        **sections,
    )


def untie(folder: Path) -> None:
    """Give the model's head a weight of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    model.save_pretrained(folder)


def slug(*names: str) -> str:
    return "-to-".join(names).replace(" ", "_")


def group(name: str) -> tuple[int, str]:
    return SPREADS[name][0], name[:4] if name.startswith(("zero", "pp")) else ""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mine = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    asked: list[dict[str, Any]] = [
        item.callspec.params for item in mine if hasattr(item, "callspec")
    ]
    moves = [(p["kind"], p["a"], p["b"]) for p in asked if "a" in p]
    whole = [(p["kind"], name) for p in asked for name in (p.get("name", p.get("a")), "single")]
    whole += [("all", "single"), ("lora", "single")]  # the tests without parameters read these
    root = tmp_path_factory.mktemp("tokens")
    for kind in {kind for kind, _ in whole}:
        if kind.startswith("experts"):
            tiny_architecture_dir(root / kind, "qwen3_moe")
        else:
            tiny_model_dir(root / kind, hidden=64)
    if (root / "lora").exists():
        untie(root / "lora")
    for each in dict.fromkeys(map(group, SPREADS)):
        plans = [plan(root, slug(k, n), k, n) for k, n in dict.fromkeys(whole) if group(n) == each]
        if plans:
            run_plans(plans, each[0], counted=True)
    plans = []
    for kind, a, b in moves:
        plans.append(plan(root, slug(kind, a, b), kind, b))
        stopped = root / slug(kind, a) / "run" / "checkpoints" / "step-00000002"
        shutil.copytree(stopped, plans[-1].parent / "checkpoints" / stopped.name)
    if plans:
        run_plans(plans, 1)
    return root


def near(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in mine] == pytest.approx([e[key] for e in other], rel=TOLERANCE), key


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_numbers_are_those_of_one_process_and_bytes_as_planned(
    runs: Path, kind: str, name: str
) -> None:
    mine, other = (events(runs / slug(kind, n) / "run", "step") for n in (name, "single"))
    near(mine, other)
    assert mine[-1]["loss"] < mine[0]["loss"]
    made = Plan.load(runs / slug(kind, name) / "run" / "plan.json")
    config = models.load_config(made.model_path, made.config.model)
    assert config.vocab_size == 384
    facts = models.facts(config, made.config.data.max_length, made.config.adapter)
    memory = last_measurement(read(runs / slug(kind, name) / "run" / "events.jsonl"))
    assert memory is not None
    states = [state_of(made, facts, stage_of(made, facts, stage)) for stage in range(made.mesh.pp)]
    for part in ("parameters", "optimizer"):
        assert max(memory.by_rank[part]) == max(getattr(state, part) for state in states), part


@pytest.mark.parametrize(("kind", "a", "b"), MOVES)
def test_goes_on_under_another_strategy(runs: Path, kind: str, a: str, b: str) -> None:
    mine, other = (
        events(runs / name / "run", "step") for name in (slug(kind, a, b), slug(kind, "single"))
    )
    assert [e["step"] for e in mine] == [3]
    near(mine, other[2:])


def test_an_export_has_the_rows_and_the_tokens(runs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drumline.inference.model import open_model
    from drumline.models.export import export

    folder = runs / "exported"
    export(runs / slug("lora", "single") / "run", folder, "last")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert (
        model.config.vocab_size
        == len(model.get_input_embeddings().weight)
        == len(model.lm_head.weight)
        == 384
    )
    assert len(tokenizer) == 323
    ids = tokenizer("drum<think>")["input_ids"]
    assert ids == [320, 322] and tokenizer.decode(ids, skip_special_tokens=True) == "drum<think>"
    rows: Any = model.get_input_embeddings().weight
    assert not (rows[320] == rows[323]).all() and (rows[323] == rows[383]).all(), (
        "the token has learned, and padding has not"
    )

    export(runs / slug("lora", "single") / "run", runs / "apart", "last", adapter=True)
    apart = open_model(str(runs / "apart"), lambda *_: None)
    ids_BT = torch.tensor([[320, 5, 322, 321]])
    torch.testing.assert_close(
        apart.module(ids_BT).logits, model.eval()(ids_BT).logits, rtol=1e-4, atol=1e-4
    )


def test_other_new_tokens_are_refused_on_resume(runs: Path, tmp_path: Path) -> None:
    path = config_of(runs, tmp_path, "all", "single")
    loaded = load(path, [f"data.cache_dir={runs / 'cache'}", "model.new_tokens=[drum]"])
    request = Request(
        loaded,
        world_size=1,
        resume=Resume(str(runs / slug("all", "single") / "run" / "checkpoints" / "step-00000002")),
    )
    with pytest.raises(
        CheckpointError, match=r"the config differs in what the run depends on: model\.new_tokens"
    ):
        claim_run_dir(make_plan(request, on_progress=lambda *_: None), request)
