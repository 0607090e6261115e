"""Vision-language models of each family, and pairs with images, spread over processes: the numbers
of one process, also where a rank has text alone in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor

from drumline.bench.verify import difference
from drumline.config.load import load
from drumline.train.setup import Request
from tests.distributed.rows import TOLERANCE
from tests.distributed.setups import UNSAVED, chosen_params, claim, merge, train
from tests.harness import (
    Sections,
    column,
    events,
    vision_pair_rows,
    vision_rows,
    write_config,
    write_rows,
)
from tests.tiny import tiny_vision_dir
from tests.tiny_vision import tiny_family_dir, tiny_vision_judge_dir

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        hasattr(AutoImageProcessor, "_backends"),
        reason="this transformers reads images with torchvision alone",
    ),
]
BASE: Sections = {
    # In order, an image row and a text row a step: of two ranks one sees text alone, always.
    "data": {"packing": False, "order": "sequential", "max_length": 256},
    "batch": {"global_samples": 2, "micro_batch": 1},
    # Some gradients are near nothing. A large epsilon keeps Adam from blowing their rounding up.
    "optimizer": {"lr": 3e-3, "eps": 1e-5},
    "checkpoint": UNSAVED,
    "run": {"steps": 3},
}
FAMILIES = (
    "gemma3",
    "internvl",
    "smolvlm",
    "idefics3",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "glm4v",
)
# A fourth position, beside those in time, height and width, separates the documents of a pack.
PACKED = ("qwen2_5_vl, packed", "qwen3_5, packed", "glm4v, packed")
PAIRS = ("dpo", "orpo", "simpo", "kto", "reward")
# Two prompts a step: one with an image, one without.
GRPO: Sections = {
    "algorithm": {
        "kind": "grpo",
        "group_size": 2,
        "generator": {"kind": "hf", "max_new_tokens": 6},
        "rewards": [
            {"kind": "regex", "pattern": "[aeiou]", "full": False},
            {"kind": "length", "free": 2, "limit": 6, "weight": 0.5},
        ],
        "kl": {"coefficient": 0.1},
    },
    "batch": {"global_samples": 4, "micro_batch": 1},
}
# Rewards come from a reward model that reads the images.
JUDGED = "grpo, reward model"
CASES: dict[str, Sections] = {
    **{family: {} for family in FAMILIES},
    **{name: {"data": {"packing": True, "max_length": 128}} for name in PACKED},
    **{kind: {"algorithm": {"kind": kind}} for kind in PAIRS},
    "grpo": GRPO,
    JUDGED: GRPO,
    "tower frozen": {
        "model": {"freeze": ["vision"]},
        # Held-out prompts with images are answered.
        "eval": {"samples": 3, "max_new_tokens": 4, "at_start": False},
        "data": {"holdout": 3},
    },
    "tower adapted": {"adapter": {"kind": "lora", "r": 4, "targets": ["vision", "language"]}},
}
# Context parallelism is of the model alone: it is asked of families, and not of each kind of pairs.
PARTED = (*FAMILIES, "dpo", "tower adapted")
STRATEGIES = ("ddp", "fsdp2", "cp")
# The rest runs with --full: each family, each kind of pairs and each strategy has another that stays.
STAY = (
    ("gemma3", "fsdp2"),
    ("internvl", "ddp"),
    ("smolvlm", "fsdp2"),
    ("llava_onevision", "fsdp2"),
    ("qwen2_5_vl", "ddp"),
    ("qwen2_5_vl, packed", "ddp"),
    ("qwen3_5", "fsdp2"),
    ("glm4v", "ddp"),
    ("dpo", "fsdp2"),
    ("kto", "ddp"),
    ("reward", "fsdp2"),
    ("grpo", "fsdp2"),
    ("tower adapted", "fsdp2"),
    ("qwen2_5_vl", "cp"),
)


def pairs() -> list[Any]:
    found = []
    for case in CASES:
        for strategy in STRATEGIES:
            if strategy == "cp" and case not in PARTED:
                continue
            marks = [] if (case, strategy) in STAY else [pytest.mark.full]
            found.append(pytest.param(case, strategy, marks=marks))
    return found


def interleaved(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row with an image, one without, and so on."""
    some = [row for row in rows if "images" not in row]
    found = []
    for pair in zip(some[::2], some[1::2], strict=True):
        found += pair
    return found


class Planner:
    """Plans runs of tiny models on rows with and without images."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, Path] = {}
        self.texts = write_rows(root / "texts.jsonl", interleaved(vision_rows(root, 12)))
        self.pairs = write_rows(root / "pairs.jsonl", interleaved(vision_pair_rows(root, 12)))

    def model(self, family: str) -> Path:
        if family not in self.models:
            folder = self.root / "models" / family
            if family in FAMILIES:
                self.models[family] = tiny_family_dir(folder, family)
            else:
                self.models[family] = tiny_vision_dir(folder)
        return self.models[family]

    def judge(self) -> Path:
        """Return the folder of a reward model that reads images."""
        folder = self.root / "models/judge"
        if not folder.exists():
            tiny_vision_judge_dir(folder)
        return folder

    def plan(self, name: str, case: str, world_size: int, sections: Sections) -> Path:
        folder = self.root / name
        folder.mkdir()
        rows = self.pairs if case in PAIRS else self.texts
        family, _, _ = case.partition(",")
        model = self.model(family if family in FAMILIES else "qwen3_vl")
        path = write_config(folder, model, **merge(BASE, CASES[case], sections))
        overrides = [
            f"data.train=[{{kind: file, path: {rows}}}]",
            "data.eval=[]",
            f"data.cache_dir={self.root / 'cache'}",
        ]
        if case == JUDGED:
            overrides.append(f"algorithm.rewards=[{{kind: model, model: {self.judge()}}}]")
        return claim(Request(load(path, overrides), world_size=world_size))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    planner = Planner(root)
    chosen = [(each["case"], each["strategy"]) for each in chosen_params(request.session, __file__)]
    alone = dict.fromkeys(case for case, _ in chosen)
    train([planner.plan(case, case, 1, {}) for case in alone])
    spread = []
    for case, strategy in chosen:
        spread.append(planner.plan(f"{strategy} {case}", case, 2, {"strategy": {"kind": strategy}}))
    train(spread)
    return root


@pytest.mark.parametrize(("case", "strategy"), pairs())
def test_same_numbers_as_one_process(runs: Path, case: str, strategy: str) -> None:
    mine = runs / f"{strategy} {case}" / "run"
    reference = runs / case / "run"

    assert difference(mine, reference).largest <= TOLERANCE
    assert len(events(mine, "step")) == 3
    # It learns: otherwise all would be equal.
    assert len(set(column(reference, "loss"))) == 3
    assert _answers(mine) == _answers(reference)


def _answers(run: Path) -> list[str]:
    """Return the answers to held-out prompts, in order."""
    texts = []
    for event in events(run, "samples"):
        texts += [each["text"] for each in event["samples"]]
    return texts
