"""New tokens by the row of a strategy: losses are those of one process, whatever spreads the model.

A run that stops under one strategy goes on under another. What the rows are by themselves:
tests/unit/test_new_tokens.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.errors import CheckpointError
from drumline.models import load as models
from drumline.plan.plan import Plan
from drumline.train.setup import Request
from tests.distributed.promises import held_as_planned
from tests.distributed.rows import CUT, TOLERANCE
from tests.distributed.setups import (
    SHORT,
    case,
    chosen_params,
    claim,
    goes_on_from,
    plan_run,
    run_of,
    same_steps,
    train_kinds,
)
from tests.harness import Sections, column, write_config
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
KINDS: dict[str, Sections] = {
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
OFTEN = {("all", "tp 2"), ("lora", "fsdp2 2")}
REFUSED = {("lora", "tp 2"), ("lora tied", "tp 2")}
# Kinds with spreads of their own. Each other kind has every spread of a dense model.
SPREADS_OF = {
    "4bit": ("ddp 2", "fsdp2 2"),
    "experts": ("ep 2",),
    "experts lora": ("ep 2",),
}
DENSE = tuple(name for name in SPREADS if name not in ("single", "ep 2"))


def pairs() -> list[Any]:
    found = []
    for kind in KINDS:
        for name in SPREADS_OF.get(kind, DENSE):
            if (kind, name) not in REFUSED:
                full = (kind, name) not in OFTEN
                found.append(case(kind, name, id=f"{kind}-{name}", full=full))
    return found


MOVES = [("all", "tp 2", "single"), ("lora", "fsdp2 2", "single")]


# The tests without parameters read these.
ALWAYS = [{"kind": "all", "name": "single"}, {"kind": "lora", "name": "single"}]


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    place = root / folder
    place.mkdir()
    ranks, strategy = SPREADS[spread]
    return plan_run(config_of(root, place, kind, strategy), ranks, root / "cache")


def config_of(root: Path, place: Path, kind: str, strategy: Any) -> Path:
    model = {"id": str(root / kind), **KINDS[kind]["model"]}
    sections = {**KINDS[kind], "model": model}
    return write_config(
        place,
        root / kind,
        strategy=strategy,
        run={"steps": 3},
        # As in test_adapters: the gradients of fresh adapters are near nothing.
        optimizer={"lr": 3e-3, "eps": 1e-4},
        **SHORT,
        **sections,
    )


def untie(folder: Path) -> None:
    """Give the model's head a weight of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    own = model.lm_head.weight.detach().flip(0).clone()
    model.lm_head.weight = torch.nn.Parameter(own)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    params = chosen_params(request.session, __file__) + ALWAYS
    for kind in {asked["kind"] for asked in params}:
        if kind.startswith("experts"):
            tiny_architecture_dir(root / kind, "qwen3_moe")
        else:
            tiny_model_dir(root / kind, hidden=64)
    untie(root / "lora")
    train_kinds(root, params, plan)
    return root


@pytest.mark.parametrize(("kind", "name"), pairs())
def test_numbers_are_those_of_one_process_and_bytes_as_planned(
    runs: Path, kind: str, name: str
) -> None:
    run = run_of(runs, kind, name)
    same_steps(run, run_of(runs, kind, "single"), TOLERANCE)
    losses = column(run, "loss")
    assert losses[-1] < losses[0]
    plan = Plan.load(run / "plan.json")
    config = models.load_config(plan.model_path, plan.config.model)
    assert config.vocab_size == 384
    held_as_planned(run, ("parameters", "optimizer"))


@pytest.mark.parametrize(("kind", "a", "b"), MOVES)
def test_goes_on_under_another_strategy(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, TOLERANCE)


def test_an_export_has_the_rows_and_the_tokens(runs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drumline.inference.model import open_model
    from drumline.models.export import export

    folder = runs / "exported"
    export(run_of(runs, "lora", "single"), folder, "last")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: Any = model.get_input_embeddings().weight
    assert model.config.vocab_size == 384
    assert len(rows) == 384
    assert len(model.lm_head.weight) == 384
    assert len(tokenizer) == 323
    ids = tokenizer("drum<think>")["input_ids"]
    assert ids == [320, 322]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "drum<think>"
    assert not torch.equal(rows[320], rows[323]), "the token has learned"
    assert torch.equal(rows[323], rows[383]), "padding has not"

    export(run_of(runs, "lora", "single"), runs / "apart", "last", adapter=True)
    apart = open_model(str(runs / "apart"), lambda *_: None)
    ids_BT = torch.tensor([[320, 5, 322, 321]])
    expected = model.eval()(ids_BT).logits
    logits = apart.module(ids_BT).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_other_new_tokens_are_refused_on_resume(runs: Path, tmp_path: Path) -> None:
    path = config_of(runs, tmp_path, "all", "single")
    loaded = load(path, [f"data.cache_dir={runs / 'cache'}", "model.new_tokens=[drum]"])
    saved = run_of(runs, "all", "single") / "checkpoints" / "step-00000002"
    request = Request(loaded, world_size=1, resume=Resume(str(saved)))
    refusal = r"the config differs in what the run depends on: model\.new_tokens"
    with pytest.raises(CheckpointError, match=refusal):
        claim(request)
