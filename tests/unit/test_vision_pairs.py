"""Pairs and judged answers with images in their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoImageProcessor

from drumline.config.config import Config
from drumline.data.batches import IGNORE, TokenBatch
from drumline.data.cache import TokenCache
from drumline.data.images import collate_vision_pairs
from drumline.data.judged import collate_judged, collate_mismatched
from drumline.data.prepare import prepare
from drumline.data.sources import Row
from drumline.errors import DataError
from drumline.models.image_tokens import Vision
from drumline.models.tokenizer import load_tokenizer
from tests.harness import vision_pair_rows, write_rows
from tests.tiny import tiny_model_dir, tiny_vision_dir, write_images
from tests.vision_setups import ROWS, built, vision_of

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and pairs of which some have images."""
    root = tmp_path_factory.mktemp("pairs")
    tiny_vision_dir(root / "model")
    write_rows(root / "rows.jsonl", vision_pair_rows(root, 6))
    return root


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    return vision_of(folder / "model")


def config_of(folder: Path, kind: str, **data: Any) -> Config:
    values = {"train": [ROWS], "workers": 1, "cache_dir": str(folder / "cache"), **data}
    model = {"id": str(folder / "model")}
    return Config.model_validate({"model": model, "algorithm": kind, "data": values})


def cache_of(folder: Path, vision: Vision, kind: str, **data: Any) -> TokenCache:
    config = config_of(folder, kind, **data)
    return TokenCache.open(prepare(config, vision.path, folder, vision=vision).train_cache)


def log_probs(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Return the log-probability of each row's targets, [B]."""
    logits = model(**batch.inputs()).logits
    losses_BT = functional.cross_entropy(
        logits.transpose(1, 2), batch.targets_BT, ignore_index=IGNORE, reduction="none"
    )
    return -losses_BT.sum(1)


def own_log_prob(model: Any, segment: Any, meta: Any, vision: Vision) -> float:
    """Return the log-probability of an answer behind its prompt, by transformers' own forward."""
    tokens = torch.from_numpy(segment[0].astype("int64"))[None]
    learn = torch.from_numpy(segment[1].astype("bool"))[1:]
    kinds = (tokens == vision.token_id).int()
    images = {}
    if meta:
        pixels = [vision.patches(*each) for each in zip(meta["images"], meta["grid"], strict=True)]
        images = vision.arguments(pixels, meta["grid"], tokens)
    logits = model(input_ids=tokens, mm_token_type_ids=kinds, **images).logits[0, :-1]
    chosen = functional.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])
    return float(chosen[learn].sum())


def test_both_sides_have_the_images_of_the_pair(folder: Path, vision: Vision) -> None:
    """Each side's log-probability is that of the side alone, by transformers' own forward."""
    cache = cache_of(folder, vision, "dpo")
    samples = list(range(len(cache)))
    batch = collate_vision_pairs(cache, [*samples, -1], 0, None, vision)
    model = built(vision).eval()
    with torch.no_grad():
        found = log_probs(model, batch).tolist()
        wanted = []
        for side in range(2):
            for sample in samples:
                segment = cache.segments(sample)[side]
                wanted.append(own_log_prob(model, segment, cache.meta(sample), vision))
            wanted.append(0.0)

    assert found == pytest.approx(wanted, rel=1e-5)
    assert sum(bool(cache.meta(sample)) for sample in samples) == 4
    assert batch.shared is None

    judged = cache_of(folder, vision, "kto")

    assert len(judged) == 2 * len(cache)

    with torch.no_grad():
        of_kto = log_probs(model, collate_judged(judged, range(len(judged)), 0, None, vision))

    assert sorted(of_kto.tolist()) == pytest.approx(sorted(each for each in wanted if each))


def test_a_mismatched_answer_has_the_images_of_its_prompt(folder: Path, vision: Vision) -> None:
    cache = cache_of(folder, vision, "kto")
    samples = list(range(len(cache)))
    predecessors = [-1, *samples[:-1]]
    batch = collate_mismatched(cache, samples, predecessors, 0, None, 256, vision)
    mismatched = batch.mismatched

    assert mismatched is not None
    assert mismatched.images is not None

    images = sum(len(cache.meta(sample).get("images", ())) for sample in samples)
    of_first = len(cache.meta(0).get("images", ()))

    assert len(mismatched.images.arguments["image_grid_thw"]) == images - of_first


def test_a_micro_batch_of_text_has_an_image_in_the_padding(folder: Path, vision: Vision) -> None:
    cache = cache_of(folder, vision, "dpo")
    text = [sample for sample in range(len(cache)) if not cache.meta(sample)]
    batch = collate_vision_pairs(cache, text, 0, None, vision)

    assert batch.images is not None
    assert batch.images.arguments["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert int((batch.input_ids_BT == vision.token_id).sum()) == 1


def test_prompts_with_other_images_are_other_prompts(tmp_path: Path, vision: Vision) -> None:
    rows = []
    for image in write_images(tmp_path, 2):
        row = {"prompt": "what?", "completion": "RED", "label": True, "image": image}
        rows += [row, {**row, "completion": "BLUE", "label": False}]
    # Of one size, so that their tokens are the same.
    for index in range(2):
        from PIL import Image

        Image.new("RGB", (16, 16), ["red", "blue"][index]).save(tmp_path / f"images/0-{index}.png")
    write_rows(tmp_path / "rows.jsonl", rows)
    cache = cache_of(tmp_path, vision, "kto")
    prompts = [cache.meta(sample)["prompt"] for sample in range(4)]

    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_image_tokens_of_a_pair_count_on_both_sides(folder: Path, vision: Vision) -> None:
    cache = cache_of(folder, vision, "dpo")
    tokens = 0
    for sample in range(len(cache)):
        for ids, _ in cache.segments(sample):
            tokens += int((ids == vision.token_id).sum())

    assert cache.info["image_tokens"] == tokens
    assert cache.info["images"] < tokens


# The error that a row gets → the row, whose texts are not rendered by the chat template.
MISTAKES: dict[str, dict[str, Any]] = {
    "0 images, but the chat template writes 1 places": {
        "chosen": "one <|image_pad|> two",
        "rejected": "one <|image_pad|> three",
    },
    "`chosen` holds images, and here only a prompt may have some": {
        "prompt": "one",
        "chosen": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}],
        "rejected": "two",
    },
}


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_answers_hold_no_images(tmp_path: Path, vision: Vision, kind: str, message: str) -> None:
    row = MISTAKES[message]
    if kind == "kto":
        message = message.replace("chosen", "completion")
    write_rows(tmp_path / "rows.jsonl", [row])

    with pytest.raises(DataError, match=message):
        cache_of(tmp_path, vision, kind)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_pair_that_would_lose_an_image_is_left_out(
    folder: Path, vision: Vision, kind: str
) -> None:
    longest = cache_of(folder, vision, kind).lengths.max()
    short = cache_of(folder, vision, kind, max_length=40, truncation="left")

    assert longest > 40

    for sample in range(len(short)):
        meta = short.meta(sample)
        wanted = sum(vision.tokens(tuple(grid)) for grid in meta.get("grid", ()))
        for tokens, _ in short.segments(sample):
            assert int((tokens == vision.token_id).sum()) == wanted


def test_a_model_of_text_takes_no_pairs_with_images(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model")
    config = config_of(tmp_path, "dpo")
    encoder = config.algorithm.encoder(load_tokenizer(str(path), config.model), config.data)
    row = Row("here:1", {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]})

    with pytest.raises(DataError, match="this row holds images, and text alone is read here"):
        encoder.encode(row)
