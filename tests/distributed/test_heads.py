"""What objectives ask of a model's heads is the same under every strategy: log-probs with any gradient, entropies, scores, values.

An objective of all that the heads answer takes two steps on each strategy and on one process: sums, gradient norms, weights, what
`infer` reads, and the weights that were drawn, are compared.
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
from tests.harness import write_config
from tests.tiny import tiny_model_dir

Told = Callable[[Row, Case], list[dict[str, Any]]]
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
VALUED: dict[str, Any] = {"algorithm": {"kind": "ppo", "value": "head"}}
SCORE: dict[str, Any] = {"algorithm": {"kind": "reward"}}
SCALED: dict[str, Any] = {"model": {"init": "random"}}
LORA: dict[str, Any] = {"adapter": {"kind": "lora", "r": 4}}
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
# With --full alone: each kind of engine has a row without it. Cases of some rows are seen under ZeRO 3.
AGAIN = ("fsdp2 2", "zero2 2", "pp 2", "cp 2")
PAIRS = [(row, case) for case in CASES for row in ROWS if not case.rows or row.name in case.rows]


def slug(row: Row, case: Case) -> str:
    return f"{case.name} {row.name}".replace(" ", "_").replace(",", "")


def scaled(path: Path, like: Path) -> Path:
    """A random Granite of four layers with the tokenizer of `like`: it divides its logits by 2, so its head cannot be used apart."""
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
    params = [
        getattr(getattr(item, "callspec", None), "params", None) for item in request.session.items
    ]
    cases = [p["case"] for p in params if p and p.get("case") in CASES]
    chosen = [(p["row"], p["case"]) for p in params if p and p.get("case") in CASES and "row" in p]
    groups: dict[tuple[int, str], list[Path]] = {}
    for row, case in dict.fromkeys([*((ONE, case) for case in cases), *chosen]):
        (root / slug(row, case)).mkdir()
        base = {
            "batch": {"global_samples": 8, "micro_batch": 4},
            "data": {"packing": False},
            "optimizer": {"eps": 1e-3},
        }
        sections = (
            base
            | {key: value for key, value in case.sections.items() if key != "algorithm"}
            | row.sections
        )
        path = write_config(
            root / slug(row, case),
            granite if "model" in case.sections else llama,
            rows=48,
            **sections,
        )
        asked = Request(load(path, [f"data.cache_dir={root / 'cache'}"]), world_size=row.world_size)
        # The rows of `sft`, whatever learns from them: heads are what is tried here.
        plan = with_algorithm(make_plan(asked, on_progress=lambda *_: None), case)
        groups.setdefault((row.world_size, plan.engine), []).append(claim_run_dir(plan, asked)[0])
    for (world_size, _), plans in groups.items():
        run_module("tests.distributed.heads_worker", plans, world_size)
    return lambda row, case: [
        torch.load(root / slug(row, case) / "run" / f"{rank}.pt", weights_only=True)
        for rank in range(row.world_size)
    ]


def with_algorithm(plan: Any, case: Case) -> Any:
    from drumline.config.config import Config

    config = Config.model_validate(
        plan.config.model_dump() | {"algorithm": case.sections["algorithm"]}
    )
    return plan.model_copy(update={"config": config})


def marked(row: Row, case: Case) -> Any:
    again = row.name in AGAIN or (case.rows and row.name != "zero3 2")
    return pytest.param(
        row, case, id=f"{row.name}-{case.name}", marks=pytest.mark.full if again else []
    )


@pytest.mark.claim("models beside the policy answer as in one process")
@pytest.mark.parametrize(("row", "case"), [marked(*pair) for pair in PAIRS])
def test_as_one_process(told: Told, row: Row, case: Case) -> None:
    (one,), ranks = told(ONE, case), told(row, case)
    said: dict[str, list[float]] = {}
    for rank in ranks:
        assert rank["first"].keys() == one["first"].keys()
        assert all(
            torch.equal(tensor, one["first"][name]) for name, tensor in rank["first"].items()
        )
        for got, expected in zip(rank["steps"], one["steps"], strict=True):
            assert got == pytest.approx(expected, rel=TOLERANCE)
        for name, tensor in one["weights"].items():
            assert float((rank["weights"][name] - tensor).norm()) <= TOLERANCE * float(
                tensor.norm()
            ), name
        for tokens, row_said in rank["read"].items():
            assert said.setdefault(tokens, row_said) == row_said
    assert said.keys() == one["read"].keys()
    got, wanted = (
        torch.tensor([answers[tokens] for tokens in one["read"]]) for answers in (said, one["read"])
    )
    # Of every layer and the head, the weights that make a score may each differ by the tolerance.
    tolerance = (LAYERS + 1) * TOLERANCE
    assert float((got - wanted).norm()) <= tolerance * float(wanted.norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_head_learns(told: Told, case: Case) -> None:
    (one,) = told(ONE, case)
    moved = {
        name
        for name, tensor in one["weights"].items()
        if not torch.equal(tensor, one["first"][name])
    }
    heads = {name for name in one["weights"] if name.startswith(("score", "value_head"))}
    expected = {"ppo": {"value_head.weight", "value_head.bias"}, "reward": {"score.weight"}}
    assert heads == expected[case.sections["algorithm"]["kind"]] and heads <= moved
    if "adapter" in case.sections:
        assert all("lora_" in name for name in moved - heads)
