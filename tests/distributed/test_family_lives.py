"""The life of a tiny model of each family: trained, gone on with in two processes, exported, loaded.

Each is trained in one process for four steps. The third and the fourth are trained again by FSDP2 in
two processes, from the checkpoint of the second. Then the end is exported: whole by itself or merged,
and the adapter of a LoRA run for PEFT. transformers and PEFT load it, and compute the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoImageProcessor

from drumline.config.load import load
from drumline.models.export import export, read_run
from drumline.train.setup import Request
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import (
    SAVED_TWICE,
    case,
    chosen_params,
    claim,
    copy_checkpoint,
    merge,
    same_steps,
    train,
)
from tests.distributed.test_vision_families import FAMILIES as IMAGES
from tests.harness import (
    Sections,
    chat_rows,
    column,
    vision_rows,
    weights,
    write_config,
    write_rows,
)
from tests.tiny import (
    ARCHITECTURES,
    let_states_last,
    random_model,
    save_model,
    tiny_architecture_dir,
    tiny_tokenizer,
)
from tests.tiny_vision import tiny_family_dir
from tests.unit.test_adapted_experts import MIXTURES
from tests.unit.test_recurrent import HYBRID_MIXTURES
from tests.unit.test_recurrent import MODELS as HYBRIDS
from tests.unit.test_seq2seq import GEMMA, STACK

pytestmark = pytest.mark.timeout(900)
SEQ2SEQ: dict[str, Sections] = {
    "bart": STACK,
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA},
}
LEARNING_RATE = 3e-3
BASE: Sections = {
    "data": {"packing": False, "max_length": 128, "eval": []},
    "batch": {"global_samples": 4, "micro_batch": 2},
    # Some gradients are near nothing. A large epsilon keeps Adam from blowing their rounding up.
    "optimizer": {"lr": LEARNING_RATE, "eps": 1e-4},
    "checkpoint": SAVED_TWICE,
    "run": {"steps": 4},
}
ADAPTED: Sections = {"adapter": {"kind": "lora", "r": 4}}
TWO_RANKS: Sections = {"strategy": {"kind": "fsdp2"}}


class Family(NamedTuple):
    """A type of model, and whether a run trains an adapter over it or the whole of it."""

    kind: str
    is_adapted: bool

    @property
    def name(self) -> str:
        return f"{self.kind}{', lora' * self.is_adapted}"


def families() -> list[Any]:
    """Return a case for each family, whole and adapted; one of each sort runs without --full."""
    kinds = [*IMAGES, *HYBRIDS, *MIXTURES, *SEQ2SEQ, "t5"]
    kept = {("lfm2", True), ("gemma3", False)}
    found = []
    for kind in dict.fromkeys(kinds):
        for is_adapted in (False, True):
            is_kept = (kind, is_adapted) in kept
            family = Family(kind, is_adapted)
            found.append(case(family, id=family.name, full=not is_kept))
    return found


def write_model(folder: Path, kind: str) -> Path:
    """Save a tiny random model with a tokenizer, as it would be published."""
    if kind in IMAGES:
        return tiny_family_dir(folder, kind)
    if kind in ARCHITECTURES:
        return tiny_architecture_dir(folder, kind)
    tokenizer = tiny_tokenizer()
    model_type, _, _ = kind.partition(",")
    configs = {**HYBRIDS, **HYBRID_MIXTURES, **MIXTURES, **SEQ2SEQ}
    values = dict(configs[kind])
    values |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    values |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    if "max_position_embeddings" in values:
        values["max_position_embeddings"] = 512
    if kind == "t5gemma":
        side = {**GEMMA, "vocab_size": len(tokenizer)}
        values |= {"encoder": side, "decoder": side}
    if kind in MIXTURES:
        values |= {"num_hidden_layers": 2}
    auto_class: Any = transformers.AutoModelForCausalLM
    if kind in SEQ2SEQ:
        auto_class = transformers.AutoModelForSeq2SeqLM
    model = random_model(auto_class, AutoConfig.for_model(model_type, **values))
    if model_type in HYBRIDS:
        let_states_last(model)
    return save_model(folder, model, tokenizer)


class Planner:
    """Plans runs of tiny models of each family."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = write_rows(root / "texts.jsonl", chat_rows(24))
        self.images = write_rows(root / "images.jsonl", vision_rows(root, 24))

    def plan(self, folder: str, family: Family, world_size: int, sections: Sections) -> Path:
        """Return the plan of a run in a new folder."""
        model = self.root / "models" / family.kind
        if not model.exists():
            write_model(model, family.kind)
        config = self.root / folder
        config.mkdir()
        adapter = ADAPTED if family.is_adapted else {}
        path = write_config(config, model, **merge(BASE, adapter, sections))
        rows = self.images if family.kind in IMAGES else self.texts
        overrides = [
            f"data.train=[{{kind: file, path: {rows}}}]",
            f"data.cache_dir={self.root / 'cache'}",
        ]
        return claim(Request(load(path, overrides), world_size=world_size))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lives")
    planner = Planner(root)
    chosen = [params["family"] for params in chosen_params(request.session, __file__)]
    alone = {}
    for family in chosen:
        if family.kind not in IMAGES or not hasattr(AutoImageProcessor, "_backends"):
            alone[family] = planner.plan(family.name, family, 1, {})
    train(alone.values())
    resumed = []
    for family, whole in alone.items():
        path = planner.plan(f"{family.name}, resumed", family, 2, TWO_RANKS)
        copy_checkpoint(whole.parent, path)
        resumed.append(path)
    train(resumed)
    return root


def same_parameters(run: Path, reference: Path) -> None:
    """The parameters at the end of two runs are equal; test_parity.py compares moments, too."""
    got = weights(run)
    for name, expected in weights(reference).items():
        if name.startswith("model."):
            distance = float((got[name] - expected).norm())
            # A bias of keys begins at zero, and its gradient is rounding.
            scale = max(float(expected.norm()), LEARNING_RATE)
            assert distance <= TOLERANCE * scale, name


@pytest.mark.claim("each family trains, resumes in other processes, and exports")
@pytest.mark.parametrize("family", families())
def test_a_model_lives(runs: Path, family: Family, tmp_path: Path) -> None:
    whole = runs / family.name / "run"
    if not whole.exists():
        pytest.skip("this transformers reads images with torchvision alone")
    resumed = runs / f"{family.name}, resumed" / "run"

    assert column(resumed, "step") == [3, 4]
    same_steps(resumed, whole, TOLERANCE, skip=2)
    same_parameters(resumed, whole)

    # `export` reads the folder back by transformers, and compares logits.
    exported = export(resumed, tmp_path / "whole", "last")
    assert exported.max_logit_difference <= 1e-5

    if family.is_adapted:
        export(resumed, tmp_path / "adapter", "last", adapter=True)
        trained, tokenizer, _ = read_run(resumed)
        base = type(trained).from_pretrained(runs / "models" / family.kind, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        ids = {"input_ids": torch.tensor([tokenizer.encode("one two three four")])}
        if family.kind in (*SEQ2SEQ, "t5"):
            ids["decoder_input_ids"] = ids["input_ids"]
        with torch.no_grad():
            expected = trained.eval()(**ids).logits
            got = adapted(**ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
