"""Sizes of known shapes come with the package, those of their families follow, those of other models are kept on disk: then a plan imports
neither torch nor transformers. What is damaged is counted anew."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import transformers

from drumline.config.config import LoRAConfig
from drumline.config.load import load
from drumline.config.model import ModelConfig
from drumline.models import shapes
from drumline.models.load import facts, load_config
from drumline.plan.facts import ModelFacts
from drumline.planner.sizes import FoundModel, sizes_of
from drumline.train.setup import Request, make_plan
from tests.harness import ROOT, write_config
from tests.tiny import tiny_model_dir

# `mlp_bias`: no known shape has one, so these are counted.
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "mlp_bias": True,
}
ALONE = """
import sys
from drumline.cli import main
try:
    main(["plan", "--cluster", "4x4090", "--length", *sys.argv[1:]])
finally:
    print("imported:", sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "drumline" / "facts"


def counted(found: FoundModel, length: int = 96, **how: object) -> ModelFacts:
    return facts(load_config(found.path, found.model), length, **how)  # type: ignore[arg-type]


@pytest.mark.claim(
    "a plan of a known shape, and a second plan of any model, imports neither torch nor transformers"
)
@pytest.mark.slow
def test_a_second_plan_imports_neither_torch_nor_transformers(kept: Path, run) -> None:  # type: ignore[no-untyped-def]
    shape, biased = (
        "model.shape={layers: 2, hidden: 256, heads: 4, vocabulary: 512}",
        "model.config={mlp_bias: true}",
    )
    assert run("plan", shape, biased, "--cluster", "4x4090", "--length", "512")[0] == 0
    (file,) = kept.iterdir()
    for model in (
        [shape, biased],
        [shape],
        [shape, "adapter=lora"],
        ["--model", "smollm2-135m", "--adapter", "qlora"],
    ):
        command = [sys.executable, "-c", ALONE, "1024", *model]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "imported: []" in done.stdout and "tokens/s" in done.stdout, done.stderr
    assert [*kept.iterdir()] == [file], "what comes with the package is not written again"


def test_what_is_kept_is_what_was_counted(kept: Path) -> None:
    found = FoundModel(ModelConfig(config=SMALL), None)
    for adapter in (None, LoRAConfig(r=4)):
        made = sizes_of(found, 96, "lm", adapter=adapter)
        again = sizes_of(found, 96, "lm", adapter=adapter)
        assert made is not again and made == again == counted(found, adapter=adapter)
        assert again.block_weights[0] is again.block_weights[2]
        assert sizes_of(found, 160, "lm", adapter=adapter) == counted(found, 160, adapter=adapter)
    assert len(list(kept.iterdir())) == 2


def test_other_content_is_counted_anew_and_damage_too(kept: Path, model: Path) -> None:
    found, config = FoundModel(ModelConfig(id=str(model)), str(model)), model / "config.json"
    config.write_text(config.read_text().replace('"mlp_bias": false', '"mlp_bias": true'))
    first = sizes_of(found, 96, "lm")
    (file,) = kept.iterdir()
    whole = file.read_text()
    for damaged in ("", whole[: len(whole) // 2], whole.replace("96", "97", 1), "[]", "\x00" * 100):
        file.write_text(damaged)
        assert sizes_of(found, 96, "lm") == first and file.read_text() == whole
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    assert (
        sizes_of(FoundModel(found.model, found.path), 96, "lm").vocab_size != first.vocab_size
        and len(list(kept.iterdir())) == 2
    )


def test_nothing_of_the_sizes_is_lost(kept: Path) -> None:
    """A field that JSON would change would come back as another one."""
    found = FoundModel(
        ModelConfig(config={"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4}),
        None,
    )
    made, again = sizes_of(found, 64, "lm"), sizes_of(found, 64, "lm")
    assert (
        all(type(getattr(made, f.name)) is type(getattr(again, f.name)) for f in fields(ModelFacts))
        and made == again
    )


def test_known_shapes_of_images_alone() -> None:
    def of_images(kind: str) -> bool:
        config = transformers.CONFIG_MAPPING[kind]
        generates = config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        return config in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not generates

    kinds = {known.values["model_type"] for known in shapes.KNOWN.values()}
    assert {kind for kind in kinds if of_images(kind)} == set(shapes.OF_IMAGES)


def test_a_second_plan_of_a_reward_model_in_a_pipeline_is_the_first(
    kept: Path, tmp_path: Path
) -> None:
    """What is tried before a rank starts has one score, whether or not the sizes were counted in this process."""
    model = tiny_model_dir(tmp_path / "tiny", layers=4)
    path = write_config(tmp_path, model, algorithm={"kind": "reward"}, strategy="pp")
    first, second = (
        make_plan(Request(load(path, []), world_size=2), on_progress=lambda *_: None)
        for _ in range(2)
    )
    assert any(kept.iterdir()) and first.predicted == second.predicted
