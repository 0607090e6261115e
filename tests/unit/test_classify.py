"""Classification on one process: labels, figures against scikit-learn, what batches hold, and one clear line for bad input."""

from __future__ import annotations

import base64
import copy
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.algorithms.classify.objective import Classify
from drumline.algorithms.classify.spec import ClassifyConfig
from drumline.config.load import load
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.data.encode import label_of
from drumline.data.prepare import prepare
from drumline.data.sources import Row
from drumline.errors import DrumlineError, ModelError, PlanError
from drumline.inference.evaluate import plan_evaluation as sampling_of_evaluation
from drumline.models.build import build_model
from drumline.models.freeze import freeze
from drumline.models.scores import grey_image
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vision import load_processor, side_of
from drumline.plan.plan import Plan
from drumline.train.entry import run
from drumline.train.setup import Request, make_plan
from tests.harness import events, labelled_rows, write_config, write_rows
from tests.tiny import tiny_model_dir

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 320,
    "pad_token_id": 0,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def planned(
    folder: Path,
    tiny: Path,
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None = None,
    /,
    **sections: Any,
) -> Plan:
    write_rows(folder / "rows.jsonl", train)
    write_rows(folder / "others.jsonl", held_out or train)
    sources = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "eval": [{"kind": "file", "path": "others.jsonl"}],
    }
    settings = {"algorithm": {"kind": "classify"}, "data": sources, "run": {"device": "cpu"}}
    path = write_config(folder, tiny, **{**settings, **sections})
    text = path.read_text().replace("  loss_chunk: 32\n", "")
    path.write_text(text)
    return make_plan(Request(load(path, []), world_size=1), on_progress=lambda *_: None)


def images(folder: Path) -> dict[str, Any]:
    from PIL import Image

    Image.new("RGB", (9, 7), (255, 0, 0)).save(folder / "red.png")
    (folder / "broken.png").write_bytes(b"not a picture")
    return {
        "algorithm": {"kind": "classify", "modality": "image", "image_size": 16},
        "model": {"id": None, "config": RESNET},
    }


def test_figures_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    draw = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(200, 12, generator=draw),
        torch.randint(0, 11, (200,), generator=draw),
    )
    logits[:, 11] -= 100  # a class that is neither labelled nor chosen
    labels[::7] = -100
    algorithm, sums = Classify(ClassifyConfig(label_smoothing=0.1)), dict[str, float]()
    for part in range(0, 200, 30):
        batch = SimpleNamespace(labels_B=labels[part : part + 30])
        out = algorithm.eval_objective(
            SimpleNamespace(class_logits=lambda p=part: logits[p : p + 30]), batch
        )
        for name, value in {"loss": out.loss_sum, **out.sums}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    figures = algorithm.metrics(sums)
    there = labels != -100
    truth, chosen = labels[there], logits[there].argmax(1)
    assert figures["accuracy"] == pytest.approx(metrics.accuracy_score(truth, chosen))
    assert figures["macro_f1"] == pytest.approx(
        metrics.f1_score(truth, chosen, average="macro", zero_division=0.0)
    )
    assert figures["top5_accuracy"] == pytest.approx(
        metrics.top_k_accuracy_score(truth, logits[there], k=5, labels=range(12))
    )
    assert figures["loss"] == pytest.approx(
        metrics.log_loss(truth, logits[there].double().softmax(1), labels=range(12)), rel=1e-5
    )


def test_smoothing_is_the_formula() -> None:
    logits, labels = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 0.0]]), torch.tensor([1, -100])
    algorithm = Classify(ClassifyConfig(label_smoothing=0.3))
    out = algorithm.objective(
        SimpleNamespace(class_logits=lambda: logits), SimpleNamespace(labels_B=labels)
    )
    log_probs = logits[0].double().log_softmax(0)
    assert float(out.loss_sum) == pytest.approx(float(-0.7 * log_probs[1] - 0.3 * log_probs.mean()))
    assert {name: int(value) for name, value in out.sums.items()} == {"samples": 1, "correct": 1}


@pytest.mark.parametrize("bidirectional", [False, True], ids=["llama", "bert"])
def test_batches_of_text(tmp_path: Path, model: Path, bidirectional: bool) -> None:
    sections: dict[str, Any] = (
        {"model": {"id": None, "tokenizer": str(model), "config": BERT}} if bidirectional else {}
    )
    plan = planned(tmp_path, model, labelled_rows(12), **sections)
    assert (
        plan.data is not None
        and plan.data.labels == ("music", "number", "work")
        and plan.bidirectional is bidirectional
    )
    batch = plan.config.algorithm.collator(plan, None)(TokenCache.open(plan.data.train_cache))(
        [0, 1, -1]
    )
    assert batch.labels_B[2] == -100 and batch.weight == 2 and (batch.labels_B[:2] >= 0).all()
    assert (batch.attention_mask_BT is not None) is bidirectional
    if bidirectional:
        assert batch.attention_mask_BT.sum(1).tolist() == [*(batch.last_B[:2] + 1).tolist(), 1]


def test_numbers_are_classes_in_order(tmp_path: Path, model: Path) -> None:
    rows = [{"text": "a", "label": number} for number in (10, 2, 0)]
    plan = planned(tmp_path, model, rows)
    assert plan.data is not None and plan.data.labels == ("0", "2", "10")
    named = planned(
        tmp_path,
        model,
        rows[1:],
        algorithm={"kind": "classify", "labels": ["no", "yes", "perhaps"]},
    )
    assert named.data is not None and named.data.labels == ("no", "yes", "perhaps")
    assert [label_of(Row("x:1", {"label": label}), ["no", "yes"]) for label in (0, "1", "no")] == [
        "no",
        "yes",
        "no",
    ]
    huge = planned(
        tmp_path, model, [{"text": "a", "label": label} for label in ("b", "9" * 5000, "10")]
    )
    assert huge.data is not None and huge.data.labels == ("10", "9" * 5000, "b")


def test_a_classifier_of_the_same_classes_keeps_their_order(tmp_path: Path, model: Path) -> None:
    """Its head has learned which logit is which; names sorted anew would take one class for another."""
    folder, labels = tmp_path / "classifier", ("work", "music", "number")
    build_model(
        str(model), ModelConfig(id=str(model)), 0, head="text", labels=labels
    ).save_pretrained(folder)
    load_tokenizer(str(model), ModelConfig(id=str(model))).save_pretrained(folder)
    for algorithm in (
        {"kind": "classify"},
        {"kind": "classify", "labels": ["music", "number", "work"]},
    ):
        plan = planned(tmp_path, folder, labelled_rows(12), algorithm=algorithm)
        assert plan.data is not None and plan.data.labels == labels
    drawn = planned(tmp_path, folder, labelled_rows(12), model={"init": "random"})
    assert drawn.data is not None and drawn.data.labels == tuple(sorted(labels))


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("music", "work"), "tells apart music, work, and the rows have music, number, work"),
        (None, "no weights for score"),
    ],
)
def test_a_model_of_other_classes_is_not_scored(
    tmp_path: Path, model: Path, labels: tuple[str, ...] | None, says: str
) -> None:
    folder = tmp_path / "classifier"
    if labels is None:  # a language model has no classes
        build_model(str(model), ModelConfig(id=str(model)), 0).save_pretrained(folder)
    else:
        build_model(
            str(model), ModelConfig(id=str(model)), 0, head="text", labels=labels
        ).save_pretrained(folder)
    load_tokenizer(str(model), ModelConfig(id=str(model))).save_pretrained(folder)
    planned(tmp_path, model, labelled_rows(12))
    with pytest.raises(ModelError, match=says):
        sampling_of_evaluation(tmp_path / "config.yaml", [], folder)


def test_images_need_no_tokenizer(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    rows = [
        {"image": image, "label": label}
        for label, image in (("a", {"bytes": None, "path": "red.png"}), ("b", "red.png"))
    ]
    plan = planned(tmp_path, model, rows, **images(tmp_path))
    assert plan.data is not None
    batch = plan.config.algorithm.collator(plan, None)(TokenCache.open(plan.data.train_cache))(
        [0, -1]
    )
    red = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    assert batch.pixels_BCHW.shape == (2, 3, 16, 16) and torch.allclose(
        batch.pixels_BCHW[0], red[:, None, None].expand(3, 16, 16)
    )
    assert not batch.pixels_BCHW[1].any() and batch.weight == 1


def test_copies_of_images_fall_and_near_copies_are_refused(tmp_path: Path, model: Path) -> None:
    sections = {
        **images(tmp_path),
        "data": {
            "train": "rows.jsonl",
            "eval": [],
            "cache_dir": str(tmp_path / "cache"),
            "duplicates": "exact",
        },
    }
    (tmp_path / "green.png").write_bytes((tmp_path / "red.png").read_bytes())
    rows = [
        {"image": image, "label": label}
        for label, image in (("a", "red.png"), ("a", "red.png"), ("b", "green.png"))
    ]
    data = planned(tmp_path, model, rows, **sections).data
    assert data is not None and data.train_samples == 2
    with pytest.raises(PlanError, match=r"data\.duplicates × images"):
        prepare(load(tmp_path / "config.yaml", ["data.duplicates=near"]).config, "", tmp_path)


def test_images_that_rows_hold_lie_beside_the_cache_and_are_written_again(
    tmp_path: Path, model: Path
) -> None:
    sections, red = images(tmp_path), (tmp_path / "red.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(red).decode()}"
    rows = [{"image": image, "label": label} for label, image in (("a", url), ("b", "red.png"))]
    plan = planned(tmp_path, model, rows, **sections)
    (stored,) = (tmp_path / "cache" / "images").iterdir()
    for missing in (stored, tmp_path / "cache" / "images"):
        missing.unlink() if missing.is_file() else shutil.rmtree(missing)
        asked = Request(load(tmp_path / "config.yaml", []), world_size=1)
        assert make_plan(asked, on_progress=lambda *_: None, dry_run=True).data is None, (
            "it is not there any more"
        )
        again = planned(tmp_path, model, rows, **sections)
        assert stored.read_bytes() == red and again.data == plan.data


def test_frozen_batch_norms_take_no_statistics() -> None:
    """Nor do copies of them: they normalise as in evaluation, and those that learn as in training."""
    model = build_model(
        None, ModelConfig(id=None, config=RESNET), 0, head="image", labels=("a", "b")
    )
    freeze(model, ["resnet.embedder"])
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - made here
        before = {name: buffer.clone() for name, buffer in each.named_buffers()}
        wanted = each.eval().resnet.embedder(pixels)
        each.train()(pixels)
        assert torch.equal(each.resnet.embedder(pixels), wanted)
        changed = {
            name for name, buffer in each.named_buffers() if not torch.equal(buffer, before[name])
        }
        assert changed == {
            name for name in before if not name.startswith("resnet.embedder.")
        } and len(changed) < len(before)


ROWS = labelled_rows(6)
BAD: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], str]] = {
    "one label": (
        [{"text": "a", "label": "x"}] * 3,
        [],
        {},
        "all 3 training rows have one class, 'x'",
    ),
    "label not in list": (
        ROWS,
        [],
        {"algorithm": {"kind": "classify", "labels": ["music", "work"]}},
        "'number' is none of algorithm.labels",
    ),
    "unseen when held out": (
        ROWS,
        [{"text": "a", "label": "new"}],
        {},
        "others.jsonl:1: label 'new' is on no training row",
    ),
    "no label": ([{"text": "a"}], [], {}, "has no text and label"),
    "top-5 of three": (
        ROWS,
        [],
        {"eval": {"metric": "top5_accuracy"}},
        "'top5_accuracy' is not measured with 3 classes — one of loss, accuracy, macro_f1",
    ),
    "an empty label": (
        [*ROWS, {"text": "a", "label": ""}],
        [],
        {},
        "rows.jsonl:7: the label is empty",
    ),
    "a class twice": (
        ROWS,
        [],
        {"algorithm": {"kind": "classify", "labels": ["a", "b", "a"]}},
        "name two classes or more, each once",
    ),
    "no classes": (
        ROWS,
        [],
        {"algorithm": {"kind": "classify", "labels": []}},
        "name two classes or more, each once",
    ),
    "label is a list": (
        [{"text": "a", "label": ["x"]}],
        [],
        {},
        "not a label",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_one_line(tmp_path: Path, model: Path, name: str) -> None:
    train, held_out, sections, says = BAD[name]
    with pytest.raises(DrumlineError) as error:
        planned(tmp_path, model, train, held_out, **sections)
    assert says in error.value.line() and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "says"), [("broken.png", "cannot be read"), ("none.png", "no such file")]
)
def test_bad_images_are_one_line(tmp_path: Path, model: Path, file: str, says: str) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    rows = [{"image": "red.png", "label": "a"}, {"image": file, "label": "b"}]
    with pytest.raises(DrumlineError) as error:
        planned(tmp_path, model, rows, **images(tmp_path))
    line = error.value.line()
    assert says in line and "rows.jsonl:2" in line and file in line and error.value.exit_code == 2


def test_an_image_processor_that_makes_no_square_is_refused() -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    assert side_of(load_processor(None, ModelConfig(), SimpleNamespace(), 8), 3) == 8
    oblong = type(load_processor(None, ModelConfig(), SimpleNamespace(), 8))(
        size={"height": 8, "width": 12}
    )
    with pytest.raises(
        ModelError, match="makes 12 × 8 pixels of 64 × 48, and images of a batch are squares"
    ):
        side_of(oblong, 3)


@pytest.mark.slow
def test_a_model_of_eight_pixels_is_trained_and_exported(tmp_path: Path, model: Path) -> None:
    """It takes no other size, and its config names none."""
    pytest.importorskip("PIL", reason="needs pillow")
    config = {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sections = images(tmp_path) | {
        "model": {"id": None, "config": config | {"intermediate_size": 16}}
    }
    sections["algorithm"]["image_size"] = 8
    rows = [{"image": "red.png", "label": label} for label in ("a", "b")]
    run_dir = str(tmp_path / "run")
    plan = planned(tmp_path, model, rows, run={"dir": run_dir, "report_to": [], "device": "cpu", "steps": 2},
                   eval={"at_start": False}, checkpoint={"every": 2, "asynchronous": False, "export": "last"}, **sections)  # fmt: skip
    (tmp_path / "run").mkdir()
    plan.save(tmp_path / "run" / "plan.json")
    run(plan, None)
    assert [e["step"] for e in events(tmp_path / "run", "step")] == [1, 2]
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_a_grey_image_is_of_the_size_that_is_trained_on() -> None:
    config = SimpleNamespace(image_size=32, num_channels=1)
    assert grey_image(config, "cpu", 8).shape == (1, 1, 8, 8)
    assert grey_image(config, "cpu").shape == (1, 1, 32, 32)
    assert grey_image(SimpleNamespace(), "cpu", 8).shape == (1, 3, 8, 8)
