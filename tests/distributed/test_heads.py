"""What objectives ask of a model's heads is the same under every strategy: log-probs with any
gradient, entropies, scores, values.

An objective of all that the heads answer takes two steps on each strategy and on one process: sums,
gradient norms, weights, what `infer` reads, and the weights that were drawn, are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.train.setup import Request, claim_run_dir, make_plan
from tests.distributed.ranks import run_module
from tests.distributed.rows import CUT, FOURS, Case, Row
from tests.distributed.setups import EIGHT_BY_FOUR, by_engine, chosen_params, slug
from tests.distributed.setups import case as case_of
from tests.harness import Sections, same_tensors, write_config
from tests.tiny import tiny_model_dir

Said = dict[str, Any]
Told = Callable[[Row, Case], list[Said]]
pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-5
LAYERS = 4
ONE = Row("one process", 1, {"batch": {"global_samples": 8, "micro_batch": 8}})
ROWS = [
    Row("ddp 2", 2, {"strategy": "ddp"}),
    Row("fsdp2 2", 2, {"strategy": "fsdp2"}),
    Row("tp 2", 2, {"strategy": "tp"}),
    Row("cp 2", 2, {"strategy": "cp"}),
    Row("pp 2", 2, {"strategy": "pp", **FOURS}),
    Row("pp 2, zero bubble", 2, {"strategy": {"kind": "pp", "schedule": "zero_bubble"}, **FOURS}),
    Row("zero2 2", 2, {"strategy": "zero2"}),
    Row("zero3 2", 2, {"strategy": CUT}),
]
VALUED: Sections = {"algorithm": {"kind": "ppo", "value": "head"}}
SCORE: Sections = {"algorithm": {"kind": "reward"}}
SCALED: Sections = {"model": {"init": "random"}}
LORA: Sections = {"adapter": {"kind": "lora", "r": 4}}
CASES = [
    Case("log-probs and a value head", VALUED),
    Case("scores", SCORE),
    Case(
        "scores beside an adapter", {**SCORE, **LORA}, rows=("tp 2", "pp 2, zero bubble", "zero3 2")
    ),
    Case(
        "log-probs and a value head on scaled logits",
        {**VALUED, **SCALED},
        rows=("tp 2", "cp 2", "pp 2, zero bubble", "zero3 2"),
    ),
]
# With --full alone: each kind of engine has a row without it, and data parallelism has the reward
# models and PPO of parity. Cases of some rows are seen under ZeRO 3.
AGAIN = ("fsdp2 2", "zero2 2", "pp 2", "cp 2", "ddp 2")
PAIRS = [(row, case) for case in CASES for row in ROWS if not case.rows or row.name in case.rows]


def run_name(row: Row, case: Case) -> str:
    return slug(f"{case.name} {row.name}")


def scaled(path: Path, like: Path) -> Path:
    """A random Granite of four layers with the tokenizer of `like`: it divides its logits by 2, so
    its head cannot be used apart."""
    from transformers import AutoTokenizer, GraniteConfig, GraniteForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(like)
    config = GraniteConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        logits_scaling=2.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    GraniteForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank said: of the chosen pairs, one process group for each world size and engine."""
    root = tmp_path_factory.mktemp("heads")
    llama = tiny_model_dir(root / "model", layers=LAYERS)
    granite = scaled(root / "scaled", llama)
    pairs: dict[tuple[Row, Case], None] = {}
    for params in chosen_params(request.session, __file__):
        case = params["case"]
        pairs[ONE, case] = None
        pairs[params.get("row", ONE), case] = None
    plans = []
    for row, case in pairs:
        model = llama
        if "model" in case.sections:
            model = granite
        plans.append(plan_of(root, model, row, case))
    for world_size, paths in by_engine(plans):
        run_module("tests.distributed.heads_worker", paths, world_size)

    def said(row: Row, case: Case) -> list[Said]:
        run = root / run_name(row, case) / "run"
        ranks = range(row.world_size)
        return [torch.load(run / f"{rank}.pt", weights_only=True) for rank in ranks]

    return said


def plan_of(root: Path, model: Path, row: Row, case: Case) -> Path:
    from drumline.config.config import Config

    folder = root / run_name(row, case)
    folder.mkdir()
    base = {"batch": EIGHT_BY_FOUR, "data": {"packing": False}, "optimizer": {"eps": 1e-3}}
    sections = {**base, **case.sections, **row.sections}
    algorithm = sections.pop("algorithm")
    path = write_config(folder, model, rows=48, **sections)
    loaded = load(path, [f"data.cache_dir={root / 'cache'}"])
    request = Request(loaded, world_size=row.world_size)
    # The rows of `sft`, whatever learns from them: heads are what is tried here.
    plan = make_plan(request, on_progress=lambda *_: None)
    values = plan.config.model_dump() | {"algorithm": algorithm}
    config = Config.model_validate(values)
    return claim_run_dir(plan.model_copy(update={"config": config}), request)[0]


def marked(row: Row, case: Case) -> Any:
    again = row.name in AGAIN or (case.rows and row.name != "zero3 2")
    return case_of(row, case, id=f"{row.name}-{case.name}", full=bool(again))


def near(found: torch.Tensor, expected: torch.Tensor, within: float = TOLERANCE) -> bool:
    """Whether two tensors differ by less than this part of the expected one's norm."""
    return float((found - expected).norm()) <= within * float(expected.norm())


@pytest.mark.claim("models beside the policy answer as in one process")
@pytest.mark.parametrize(("row", "case"), [marked(*pair) for pair in PAIRS])
def test_as_one_process(told: Told, row: Row, case: Case) -> None:
    (one,) = told(ONE, case)
    said: dict[str, list[float]] = {}
    for rank in told(row, case):
        assert rank["first"].keys() == one["first"].keys()
        same_tensors(rank["first"], one["first"])
        for got, expected in zip(rank["steps"], one["steps"], strict=True):
            assert got == pytest.approx(expected, rel=TOLERANCE)
        for name, tensor in one["weights"].items():
            assert near(rank["weights"][name], tensor), name
        for tokens, row_said in rank["read"].items():
            assert said.setdefault(tokens, row_said) == row_said
    assert said.keys() == one["read"].keys()
    found = torch.tensor([said[tokens] for tokens in one["read"]])
    wanted = torch.tensor(list(one["read"].values()))
    # Of every layer and the head, the weights that make a score may each differ by the tolerance.
    assert near(found, wanted, (LAYERS + 1) * TOLERANCE)


HEADS = {"ppo": {"value_head.weight", "value_head.bias"}, "reward": {"score.weight"}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_head_learns(told: Told, case: Case) -> None:
    (one,) = told(ONE, case)
    moved = set()
    for name, tensor in one["weights"].items():
        if not torch.equal(tensor, one["first"][name]):
            moved.add(name)
    heads = {name for name in one["weights"] if name.startswith(("score", "value_head"))}
    assert heads == HEADS[case.sections["algorithm"]["kind"]]
    assert heads <= moved
    if "adapter" in case.sections:
        for name in moved - heads:
            assert "lora_" in name
