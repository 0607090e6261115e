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
from drumline.plan.plan import DataPlan, Plan
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
    settings = {
        "algorithm": {"kind": "classify"},
        "data": {
            "train": [{"kind": "file", "path": "rows.jsonl"}],
            "eval": [{"kind": "file", "path": "others.jsonl"}],
        },
        "run": {"device": "cpu"},
        **sections,
    }
    path = write_config(folder, tiny, **settings)
    text = path.read_text().replace("  loss_chunk: 32\n", "")
    path.write_text(text)
    return make_plan(Request(load(path, []), world_size=1), on_progress=lambda *_: None)


def data_of(plan: Plan) -> DataPlan:
    assert plan.data is not None
    return plan.data


def batch_of(plan: Plan, samples: list[int]) -> Any:
    """Return the batch of some training samples; -1 is a filler."""
    cache = TokenCache.open(data_of(plan).train_cache)
    collate = plan.config.algorithm.collator(plan, None)(cache)
    return collate(samples)


def save_classifier(model: Path, folder: Path, labels: tuple[str, ...] | None) -> None:
    """Save a model with its tokenizer: one that tells these classes apart, or a language model."""
    config = ModelConfig(id=str(model))
    if labels is None:
        made = build_model(str(model), config, 0)
    else:
        made = build_model(str(model), config, 0, head="text", labels=labels)

    made.save_pretrained(folder)
    load_tokenizer(str(model), config).save_pretrained(folder)


def images(folder: Path) -> dict[str, Any]:
    from PIL import Image

    Image.new("RGB", (9, 7), (255, 0, 0)).save(folder / "red.png")
    (folder / "broken.png").write_bytes(b"not a picture")
    return {
        "algorithm": {"kind": "classify", "modality": "image", "image_size": 16},
        "model": {"id": None, "config": RESNET},
    }


class Logits:
    """A model's answer that is given."""

    def __init__(self, logits_BC: torch.Tensor) -> None:
        self.logits_BC = logits_BC

    def class_logits(self) -> torch.Tensor:
        return self.logits_BC


def test_figures_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 12, generator=draw)
    labels = torch.randint(0, 11, (200,), generator=draw)
    # A class that is neither labelled nor chosen.
    logits[:, 11] -= 100
    labels[::7] = -100

    algorithm = Classify(ClassifyConfig(label_smoothing=0.1))
    sums: dict[str, float] = {}
    for part_logits, part_labels in zip(logits.split(30), labels.split(30), strict=True):
        out = algorithm.eval_objective(Logits(part_logits), SimpleNamespace(labels_B=part_labels))
        for name, value in {"loss": out.loss_sum, **out.sums}.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    figures = algorithm.metrics(sums)

    is_labelled = labels != -100
    truth = labels[is_labelled]
    logits = logits[is_labelled]
    chosen = logits.argmax(1)
    probabilities = logits.double().softmax(1)
    accuracy = metrics.accuracy_score(truth, chosen)
    macro_f1 = metrics.f1_score(truth, chosen, average="macro", zero_division=0.0)
    top5_accuracy = metrics.top_k_accuracy_score(truth, logits, k=5, labels=range(12))
    loss = metrics.log_loss(truth, probabilities, labels=range(12))
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert figures["macro_f1"] == pytest.approx(macro_f1)
    assert figures["top5_accuracy"] == pytest.approx(top5_accuracy)
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)


def test_smoothing_is_the_formula() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 0.0]])
    batch = SimpleNamespace(labels_B=torch.tensor([1, -100]))
    algorithm = Classify(ClassifyConfig(label_smoothing=0.3))
    out = algorithm.objective(Logits(logits), batch)

    log_probs = logits[0].double().log_softmax(0)
    expected = -0.7 * log_probs[1] - 0.3 * log_probs.mean()
    assert float(out.loss_sum) == pytest.approx(float(expected))
    assert out.sums.keys() == {"samples", "correct"}
    assert int(out.sums["samples"]) == 1
    assert int(out.sums["correct"]) == 1


@pytest.mark.parametrize("bidirectional", [False, True], ids=["llama", "bert"])
def test_batches_of_text(tmp_path: Path, model: Path, bidirectional: bool) -> None:
    sections: dict[str, Any] = {}
    if bidirectional:
        sections["model"] = {"id": None, "tokenizer": str(model), "config": BERT}

    plan = planned(tmp_path, model, labelled_rows(12), **sections)
    assert data_of(plan).labels == ("music", "number", "work")
    assert plan.bidirectional is bidirectional

    batch = batch_of(plan, [0, 1, -1])
    assert batch.weight == 2
    assert (batch.labels_B[:2] >= 0).all()
    assert batch.labels_B[2] == -100
    assert (batch.attention_mask_BT is not None) is bidirectional

    if bidirectional:
        lengths = (batch.last_B[:2] + 1).tolist()
        assert batch.attention_mask_BT.sum(1).tolist() == [*lengths, 1]


def labels_of(plan: Plan) -> tuple[str, ...] | None:
    return data_of(plan).labels


def test_numbers_are_classes_in_order(tmp_path: Path, model: Path) -> None:
    rows = [{"text": "a", "label": number} for number in (10, 2, 0)]
    plan = planned(tmp_path, model, rows)
    assert labels_of(plan) == ("0", "2", "10")

    names = ["no", "yes", "perhaps"]
    algorithm = {"kind": "classify", "labels": names}
    named = planned(tmp_path, model, rows[1:], algorithm=algorithm)
    assert labels_of(named) == ("no", "yes", "perhaps")

    for rows_label, label in ((0, "no"), ("1", "yes"), ("no", "no")):
        assert label_of(Row("x:1", {"label": rows_label}), ["no", "yes"]) == label

    huge_number = "9" * 5000
    rows = [{"text": "a", "label": label} for label in ("b", huge_number, "10")]
    huge = planned(tmp_path, model, rows)
    assert labels_of(huge) == ("10", huge_number, "b")


def test_a_classifier_of_the_same_classes_keeps_their_order(tmp_path: Path, model: Path) -> None:
    """Its head has learned which logit is which; names sorted anew would take one class for another."""
    folder = tmp_path / "classifier"
    labels = ("work", "music", "number")
    save_classifier(model, folder, labels)

    unnamed = {"kind": "classify"}
    named = {"kind": "classify", "labels": ["music", "number", "work"]}
    for algorithm in (unnamed, named):
        plan = planned(tmp_path, folder, labelled_rows(12), algorithm=algorithm)
        assert labels_of(plan) == labels

    drawn = planned(tmp_path, folder, labelled_rows(12), model={"init": "random"})
    assert labels_of(drawn) == ("music", "number", "work")


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
    save_classifier(model, folder, labels)
    planned(tmp_path, model, labelled_rows(12))
    with pytest.raises(ModelError, match=says):
        sampling_of_evaluation(tmp_path / "config.yaml", [], folder)


def test_images_need_no_tokenizer(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    rows = [
        {"image": {"bytes": None, "path": "red.png"}, "label": "a"},
        {"image": "red.png", "label": "b"},
    ]
    plan = planned(tmp_path, model, rows, **images(tmp_path))
    batch = batch_of(plan, [0, -1])
    assert batch.weight == 1
    assert batch.pixels_BCHW.shape == (2, 3, 16, 16)

    mean_C = torch.tensor([0.485, 0.456, 0.406])
    deviation_C = torch.tensor([0.229, 0.224, 0.225])
    red_C = (torch.tensor([1.0, 0.0, 0.0]) - mean_C) / deviation_C
    image_CHW, filler_CHW = batch.pixels_BCHW
    assert torch.allclose(image_CHW, red_C[:, None, None].expand(3, 16, 16))
    assert not filler_CHW.any()


def test_copies_of_images_fall_and_near_copies_are_refused(tmp_path: Path, model: Path) -> None:
    sections = images(tmp_path)
    sections["data"] = {
        "train": "rows.jsonl",
        "eval": [],
        "cache_dir": str(tmp_path / "cache"),
        "duplicates": "exact",
    }
    shutil.copy(tmp_path / "red.png", tmp_path / "green.png")
    rows = [
        {"image": "red.png", "label": "a"},
        {"image": "red.png", "label": "a"},
        {"image": "green.png", "label": "b"},
    ]
    plan = planned(tmp_path, model, rows, **sections)
    assert data_of(plan).train_samples == 2

    near = load(tmp_path / "config.yaml", ["data.duplicates=near"]).config
    with pytest.raises(PlanError, match=r"data\.duplicates × images"):
        prepare(near, "", tmp_path)


def test_images_that_rows_hold_lie_beside_the_cache_and_are_written_again(
    tmp_path: Path, model: Path
) -> None:
    sections = images(tmp_path)
    red = (tmp_path / "red.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(red).decode()}"
    rows = [{"image": url, "label": "a"}, {"image": "red.png", "label": "b"}]
    plan = planned(tmp_path, model, rows, **sections)
    folder = tmp_path / "cache" / "images"
    (stored,) = folder.iterdir()

    for remove in (stored.unlink, lambda: shutil.rmtree(folder)):
        remove()
        asked = Request(load(tmp_path / "config.yaml", []), world_size=1)
        dry = make_plan(asked, on_progress=lambda *_: None, dry_run=True)
        assert dry.data is None, "it is not there any more"

        again = planned(tmp_path, model, rows, **sections)
        assert stored.read_bytes() == red
        assert again.data == plan.data


def test_frozen_batch_norms_take_no_statistics() -> None:
    """Nor do copies of them: they normalise as in evaluation, and those that learn as in training."""
    config = ModelConfig(id=None, config=RESNET)
    model = build_model(None, config, 0, head="image", labels=("a", "b"))
    freeze(model, ["resnet.embedder"])
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301 - made here

    for each in (model, copy.deepcopy(model), pickled):
        before = copy.deepcopy(dict(each.named_buffers()))
        expected = each.eval().resnet.embedder(pixels)
        each.train()(pixels)
        assert torch.equal(each.resnet.embedder(pixels), expected)

        frozen = 0
        for name, buffer in each.named_buffers():
            is_frozen = name.startswith("resnet.embedder.")
            assert torch.equal(buffer, before[name]) is is_frozen

            frozen += is_frozen

        assert frozen > 0


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
    assert says in error.value.line()
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "says"), [("broken.png", "cannot be read"), ("none.png", "no such file")]
)
def test_bad_images_are_one_line(tmp_path: Path, model: Path, file: str, says: str) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    rows = [{"image": "red.png", "label": "a"}, {"image": file, "label": "b"}]
    with pytest.raises(DrumlineError) as error:
        planned(tmp_path, model, rows, **images(tmp_path))

    line = error.value.line()
    for part in (says, "rows.jsonl:2", file):
        assert part in line

    assert error.value.exit_code == 2


def test_an_image_processor_that_makes_no_square_is_refused() -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    square = load_processor(None, ModelConfig(), SimpleNamespace(), 8)
    assert side_of(square, 3) == 8

    oblong = type(square)(size={"height": 8, "width": 12})
    says = "makes 12 × 8 pixels of 64 × 48, and images of a batch are squares"
    with pytest.raises(ModelError, match=says):
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
        "intermediate_size": 16,
    }
    run_dir = tmp_path / "run"
    sections = {
        **images(tmp_path),
        "model": {"id": None, "config": config},
        "run": {"dir": str(run_dir), "report_to": [], "device": "cpu", "steps": 2},
        "eval": {"at_start": False},
        "checkpoint": {"every": 2, "asynchronous": False, "export": "last"},
    }
    sections["algorithm"]["image_size"] = 8
    rows = [{"image": "red.png", "label": "a"}, {"image": "red.png", "label": "b"}]

    plan = planned(tmp_path, model, rows, **sections)
    run_dir.mkdir()
    plan.save(run_dir / "plan.json")
    run(plan, None)

    first, second = events(run_dir, "step")
    assert first["step"] == 1
    assert second["step"] == 2
    assert (run_dir / "export" / "model.safetensors").exists()


def test_a_grey_image_is_of_the_size_that_is_trained_on() -> None:
    config = SimpleNamespace(image_size=32, num_channels=1)
    assert grey_image(config, "cpu", 8).shape == (1, 1, 8, 8)
    assert grey_image(config, "cpu").shape == (1, 1, 32, 32)
    assert grey_image(SimpleNamespace(), "cpu", 8).shape == (1, 3, 8, 8)
