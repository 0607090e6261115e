"""`drumline train` on text of vision-language models as they are published: it learns, resumes, and
leaves a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from drumline.bench.verify import difference
from drumline.checkpoint.manifest import folder_name
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.models.build import build_model
from tests.harness import (
    Finished,
    column,
    drumline,
    events,
    losses,
    read_json,
    run_drumline,
    same_weights,
    vision_rows,
    write_config,
    write_rows,
)
from tests.tiny_published import tiny_published_dir
from tests.tiny_vision import tiny_family_dir

# Their images are read here, so that the whole model is trained.
SEEN = ("qwen3_5", "qwen3_5_moe")
# Only their language model is.
TEXT_PARTS = ("llama4", "mistral3", "gemma4")
# Their language model has no class of its own: the tower stays, and is frozen.
WHOLE = ("cohere2_vision",)
# The rest runs with --full: each way to train has a kind that stays.
STAY = ("qwen3_5", "llama4", "mistral3", "gemma4", "cohere2_vision")
ADAPTED_STAY = ("qwen3_5", "mistral3")
IDS_BT = torch.arange(24)[None] * 7 % 300


def kinds(stay: tuple[str, ...]) -> list[Any]:
    """Return all kinds, of which those that are not in `stay` run with --full."""
    found = []
    for kind in (*SEEN, *TEXT_PARTS, *WHOLE):
        marks = [] if kind in stay else [pytest.mark.full]
        found.append(pytest.param(kind, marks=marks))
    return found


def note(kind: str) -> str:
    """Return what the start says of a kind of model whose images are not read."""
    if kind in WHOLE:
        return f"{kind} is trained on text; images are not read, and its tower stays frozen"
    return f"the language model within {kind} is trained, on text; images are not read"


def model_dir(folder: Path, kind: str) -> Path:
    if kind in SEEN:
        return tiny_family_dir(folder / "model", kind)
    return tiny_published_dir(folder / "model", kind)


def config(folder: Path, kind: str, **sections: Any) -> Path:
    changes: dict[str, Any] = {
        "data": {"packing": False, "order": "sequential"},
        "run": {"steps": 4},
        "checkpoint": {"export": "last", "every": 2},
        **sections,
    }
    return write_config(folder, model_dir(folder, kind), **changes)


class Trained(NamedTuple):
    """A run of a kind of model, and what the command printed."""

    kind: str
    folder: Path
    finished: Finished

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture(scope="module", params=kinds(STAY))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    return Trained(request.param, folder, run_drumline("train", config(folder, request.param)))


@pytest.fixture(scope="module", params=kinds(ADAPTED_STAY))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(f"lora-{request.param}")
    path = config(
        folder,
        request.param,
        adapter={"kind": "lora", "r": 4},
        checkpoint={"export": "last", "export_adapter": True, "every": 2},
    )
    return Trained(request.param, folder, run_drumline("train", path))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS_BT).logits
    return result


def published(trained: Trained) -> Any:
    """Return transformers' own model of the published folder."""
    return AutoModelForImageTextToText.from_pretrained(
        trained.folder / "model", dtype=torch.float32
    ).eval()


def exported(trained: Trained) -> Any:
    """Return the model that transformers reads from the export."""
    loader: Any = AutoModelForCausalLM
    if trained.kind in (*SEEN, *WHOLE):
        loader = AutoModelForImageTextToText
    return loader.from_pretrained(trained.run / "export", dtype=torch.float32).eval()


def test_the_first_loss_is_that_of_transformers_own_model(whole: Trained) -> None:
    plan = read_json(whole.run / "plan.json")
    cache = TokenCache.open(plan["data"]["train_cache"])
    model = published(whole)
    loss_sum = 0.0
    weight = 0
    for sample in range(4):
        ((stored_tokens, learn),) = cache.segments(sample)
        tokens = torch.from_numpy(stored_tokens.astype("int64"))
        labels = tokens.clone()
        labels[torch.from_numpy(learn.astype("int64")) == 0] = -100
        count = int((labels[1:] != -100).sum())
        with torch.no_grad():
            out = model(input_ids=tokens[None], labels=labels[None])
        loss_sum += float(out.loss) * count
        weight += count

    assert losses(whole.run)[1] == pytest.approx(loss_sum / weight, rel=1e-5)
    assert len(set(column(whole.run, "loss"))) == 4


def test_the_start_says_what_is_trained(whole: Trained) -> None:
    said = whole.finished.out + whole.finished.err

    assert (note(whole.kind) in said) == (whole.kind not in SEEN)


def test_transformers_reads_the_export(whole: Trained) -> None:
    model = exported(whole)
    config = read_json(whole.run / "export" / "config.json")
    with safe_open(whole.run / "export" / "model.safetensors", "pt") as file:
        names = set(file.keys())

    has_tower = whole.kind not in TEXT_PARTS
    assert ("vision_config" in config) == has_tower
    assert any("vision" in name or "visual" in name for name in names) == has_tower
    assert not torch.equal(logits(model), logits(published(whole)))

    (event,) = events(whole.run, "export")

    assert event["max_logit_difference"] <= 1e-5


def test_a_resumed_run_is_the_whole_one(whole: Trained, tmp_path: Path) -> None:
    middle = whole.run / "checkpoints" / folder_name(2)
    path = whole.folder / "config.yaml"
    run_drumline("train", path, f"run.dir={tmp_path / 'run'}", "--resume", middle)

    assert column(tmp_path / "run", "step") == [3, 4]
    assert column(tmp_path / "run", "loss") == column(whole.run, "loss")[2:]
    same_weights(tmp_path / "run", whole.run, 0)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("mistral3", "fsdp2"), ("cohere2_vision", "ddp"), ("cohere2_vision", "fsdp2")],
)
def test_two_ranks_learn_the_same(tmp_path: Path, kind: str, strategy: str) -> None:
    path = config(
        tmp_path,
        kind,
        run={"steps": 2},
        # Some gradients are near nothing. A large epsilon keeps Adam from blowing their rounding up.
        optimizer={"lr": 3e-3, "eps": 1e-5},
        checkpoint={"export": "none", "every": 2},
    )
    run_drumline("train", path)
    two = (f"run.dir={tmp_path / 'two'}", f"strategy={strategy}", "--nproc", 2)
    run_drumline("train", path, *two)

    assert difference(tmp_path / "two", tmp_path / "run").largest <= 1e-5


def test_the_language_model_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """If its type is asked for: then all works that works for models of text."""
    asked = {"model_type": "qwen3_5_text"}
    path = config(tmp_path, "qwen3_5", algorithm={"kind": "pretrain"}, run={"steps": 2})
    model = {"id": str(tmp_path / "model"), "config": asked}
    said = run_drumline("train", path, f"model={json.dumps(model)}")
    trained = Trained("qwen3_5_text", tmp_path, said)

    assert note("qwen3_5") in said.out + said.err
    assert type(exported(trained)).__name__ == "Qwen3_5ForCausalLM"
    assert "vision_config" not in read_json(tmp_path / "run" / "export" / "config.json")


def test_a_model_of_which_text_trains_a_part_alone(tmp_path: Path) -> None:
    """Layers of Llama 3.2 Vision read images and nothing else."""
    refused = drumline("train", config(tmp_path, "mllama"))

    assert refused.code != 0
    (line,) = refused.error_lines
    assert "vision-language models of type mllama are not known here" in line


def test_peft_lays_the_adapter_over_the_class_that_was_trained(
    adapted: Trained, tmp_path: Path
) -> None:
    from peft import PeftModel

    path = str(adapted.folder / "model")
    base = build_model(path, ModelConfig(id=path), seed=0)
    with_adapter = PeftModel.from_pretrained(base, adapted.run / "export")

    run_drumline("export", adapted.run, "--to", tmp_path / "merged")
    loader: Any = AutoModelForCausalLM
    if adapted.kind not in TEXT_PARTS:
        loader = AutoModelForImageTextToText
    merged = loader.from_pretrained(tmp_path / "merged", dtype=torch.float32)

    torch.testing.assert_close(logits(with_adapter), logits(merged), rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits(merged), logits(published(adapted)))


@pytest.mark.parametrize("kind", kinds(STAY))
def test_the_planner_agrees(tmp_path: Path, kind: str) -> None:
    path = config(tmp_path, kind)
    planned = run_drumline("plan", path)

    assert (note(kind) in planned.out + planned.err) == (kind not in SEEN)


@pytest.mark.parametrize("kind", (*TEXT_PARTS, *WHOLE))
def test_rows_with_images_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = config(tmp_path, kind)
    write_rows(tmp_path / "train.jsonl", vision_rows(tmp_path, 4))
    refused = drumline("train", path)

    assert refused.code != 0
    (line,) = refused.error_lines
    assert "this row holds images, and text alone is read here" in line
    assert "text" in line
