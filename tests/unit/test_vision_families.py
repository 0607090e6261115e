"""Vision-language models of all families: tokens, pixels, losses and gradients are transformers'."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from drumline.config.config import Config, LoRAConfig
from drumline.config.data import DataConfig, FileSource
from drumline.data.fingerprint import cache_key
from drumline.data.image_rows import VisionRowEncoder
from drumline.data.images import collate_vision
from drumline.data.sources import Row, read_rows
from drumline.errors import DataError, ModelError, PlanError
from drumline.models.adapters import find_targets
from drumline.models.attention import use_document_attention
from drumline.models.freeze import freeze
from drumline.models.head import can_split, trial_batch
from drumline.models.image_tokens import FAMILIES, GemmaVision, OneVision, Vision
from drumline.models.load import load_config
from drumline.models.parts import PARTS, names_in_part, unread_names
from drumline.models.recurrent_trial import separate_recurrent_layers
from drumline.models.tokenizer import load_tokenizer
from tests.harness import vision_rows, write_rows
from tests.tiny_vision import MARKS, SIDE, tiny_family_dir
from tests.unit.test_attention import layout
from tests.vision_setups import (
    assert_close,
    built,
    cache_of,
    collate_alone,
    find_vision,
    learned_by,
    vision_of,
)

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)
# Qwen3-VL is in test_vision.
TESTED = (
    "gemma3",
    "internvl",
    "smolvlm",
    "idefics3",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
# Columns and rows of pixels of an image that several families cut into tiles.
WIDE = (40, 20)


@pytest.fixture(scope="module", params=TESTED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family, and rows of all kinds with their images."""
    root = tmp_path_factory.mktemp(request.param)
    tiny_family_dir(root / "model", request.param)
    write_rows(root / "rows.jsonl", vision_rows(root, 6))
    return root


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    return vision_of(folder / "model")


def family(vision: Vision) -> str:
    """Return the type of a model."""
    return str(load_config(vision.path, vision.model).model_type)


def processed(vision: Vision, images: list[Any]) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for the images of a row, by its image processor alone."""
    options: dict[str, Any] = {"return_tensors": "pt"}
    listed: Any = images
    if family(vision) == "internvl":
        options["crop_to_patches"] = True
    if family(vision) in ("smolvlm", "idefics3", "llava_onevision"):
        listed = [images]
    result = dict(vision.processor(listed, **options))
    result.pop("num_patches", None)
    result.pop("num_crops", None)
    return result


def text_of_image(vision: Vision, image: Any) -> str:
    """Return what transformers' processor of images and text writes for an image."""
    kind = family(vision)
    if kind == "gemma3":
        return f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    if kind == "internvl":
        own = SimpleNamespace(
            start_image_token="<img>",
            end_image_token="</img>",
            image_token="<IMG_CONTEXT>",
            image_seq_length=4,
        )
        tiles = len(processed(vision, [image])["pixel_values"])
        return InternVLProcessor.replace_image_token(own, {"num_patches": [tiles]}, 0)
    if kind in ("smolvlm", "idefics3"):
        result = vision.processor([[image]], return_tensors="np", return_row_col_info=True)
        return get_image_prompt_string(
            result["rows"][0][0],
            result["cols"][0][0],
            4,
            fake_token_around_image="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
    if kind == "llava_onevision":
        own = SimpleNamespace(
            image_token="<image>",
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_2",
            image_processor=vision.processor,
        )
        for name in ("_get_number_of_features", "_get_unpadded_features"):
            setattr(own, name, partial(getattr(LlavaOnevisionProcessor, name), own))
        inputs = processed(vision, [image])
        return LlavaOnevisionProcessor.replace_image_token(own, inputs, 0)
    _, height, width = processed(vision, [image])["image_grid_thw"][0].tolist()
    return "<|image_pad|>" * (height * width // 4)


@pytest.mark.parametrize("size", [WIDE, (SIDE, SIDE), (20, 40), (8, 8)])
def test_tokens_are_those_of_transformers_processor(
    tmp_path: Path, vision: Vision, size: tuple[int, int]
) -> None:
    picture = Image.new("RGB", size, "red")
    picture.save(tmp_path / "a.png")
    question = {"role": "user", "content": "one <image>two"}
    answer = {"role": "assistant", "content": "three"}
    row = {"messages": [question, answer], "images": ["a.png"]}
    write_rows(tmp_path / "rows.jsonl", [row])
    (read,) = read_rows(FileSource(path="rows.jsonl"), tmp_path)
    tokenizer = load_tokenizer(vision.path, vision.model)
    data = DataConfig(train=[FileSource(path="rows.jsonl")])
    encoded = VisionRowEncoder(tokenizer, data, vision).encode(read)

    assert encoded is not None

    content = [{"type": "text", "text": "one "}, {"type": "image"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}, answer]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    mark = MARKS.get(family(vision), "<|image_pad|>")
    text = text.replace(mark, text_of_image(vision, picture))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    assert encoded.segments[0].tokens.tolist() == ids
    assert encoded.segments[0].target_count > 1


def test_loss_is_the_models_own(folder: Path, vision: Vision) -> None:
    """Against transformers' forward with its own masks, positions and pixels, row by row."""
    cache = cache_of(folder, vision, packing=False)
    model = built(vision)
    samples = list(range(len(cache)))
    ours = learned_by(model, collate_alone(cache, samples, vision))
    model.zero_grad()
    total = 0.0

    for sample in samples:
        batch = collate_alone(cache, [sample], vision)
        length = int(cache.lengths[sample])
        tokens = batch.input_ids_BT[:, :length]
        labels = torch.full((1, length), -100)
        labels[:, 1:] = batch.targets_BT[:, : length - 1]
        paths = cache.meta(sample).get("images", [])
        images = {}
        is_image = tokens == vision.token_id

        if paths:
            images = processed(vision, [Image.open(path) for path in paths])

        if isinstance(vision, GemmaVision):
            images["token_type_ids"] = is_image.long()
        elif "image_grid_thw" in images:
            images["mm_token_type_ids"] = is_image.int()

        loss = model(input_ids=tokens, labels=labels, **images).loss
        (loss * batch.weight).backward()
        total += float(loss.detach()) * batch.weight

    assert ours.loss == pytest.approx(total, rel=1e-6)

    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(ours.gradients[name], parameter.grad, name)

    assert can_split(model)


def test_packs_are_their_rows(folder: Path, vision: Vision) -> None:
    if isinstance(vision, GemmaVision):
        with pytest.raises(PlanError, match="packing × the model: transformers counts"):
            find_vision(vision.model, packing=True)
        return

    packed = cache_of(folder, vision, packing=True)
    alone = cache_of(folder, vision, packing=False)

    assert len(packed) < len(alone)

    model = built(vision)
    if family(vision).startswith("qwen3_5"):
        # As in training: its recurrent layers run on each document by itself.
        use_document_attention(model, layout())
        separate_recurrent_layers(model, "cpu")
    batch = collate_vision(packed, list(range(len(packed))), 0, 257, vision)
    of_packs = learned_by(model, batch)
    of_rows = learned_by(model, collate_alone(alone, list(range(len(alone))), vision))

    assert of_packs.loss == pytest.approx(of_rows.loss, rel=1e-6)

    for name, gradient in of_rows.gradients.items():
        assert_close(of_packs.gradients[name], gradient, name)


def test_an_image_in_the_padding_changes_nothing(folder: Path, vision: Vision) -> None:
    cache = cache_of(folder, vision, packing=False)
    model = built(vision)
    text = [sample for sample in range(len(cache)) if not cache.meta(sample)]
    batch = collate_alone(cache, text, vision)
    loss, gradients = learned_by(model, batch)
    model.zero_grad()
    tokens = batch.input_ids_BT[:, : -vision.blank_size]
    logits = model(input_ids=tokens).logits
    targets = batch.targets_BT[:, : -vision.blank_size]
    plain = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )

    assert loss == pytest.approx(float(plain.detach()), rel=1e-6)

    names = [name for name, _ in model.named_parameters()]
    tower = names_in_part(model, "vision", names, "test")

    assert len(tower) > 8

    for name in tower:
        if name in gradients:
            assert not gradients[name].any()


def test_trial_batches_run_the_whole_model(vision: Vision) -> None:
    model = built(vision)
    out = model(**trial_batch(model, "cpu").inputs())
    out.logits.sum().backward()
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]

    for part in PARTS:
        assert names_in_part(model, part, names, "test"), part


def weights_without_gradients(model: Any) -> set[str]:
    """Return the names of the weights that a backward of a batch with images does not reach."""
    model(**trial_batch(model, "cpu").inputs()).logits.sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


def frozen_names(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_weights_that_the_model_does_not_read_are_frozen(vision: Vision) -> None:
    """DDP would wait for their gradients."""
    unread = weights_without_gradients(built(vision))
    model = built(vision)

    freeze(model, [])

    assert frozen_names(model) == unread


@pytest.mark.parametrize("layer", [-1, -2, 1, [-2, 0]], ids=str)
def test_the_layer_of_features_decides_what_is_read(tmp_path: Path, layer: int | list[int]) -> None:
    tiny_family_dir(tmp_path / "model", "llava_onevision")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.vision_feature_layer = layer
    config.vision_config.vision_use_head = True
    unread = weights_without_gradients(AutoModelForImageTextToText.from_config(config))
    model = AutoModelForImageTextToText.from_config(config)

    freeze(model, [])

    assert frozen_names(model) == unread
    assert any("post_layernorm" in name for name in unread)


def test_layers_that_the_model_does_not_read_get_no_adapter(tmp_path: Path) -> None:
    """Nor are they trained whole: DDP would wait for their gradients."""
    tiny_family_dir(tmp_path / "model", "llava_onevision")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.vision_feature_layer = -2
    model = AutoModelForImageTextToText.from_config(config)
    unread = tuple(f"{name}." for name in unread_names(model))
    assert any("encoder.layers.1." in name for name in unread)

    options = LoRAConfig(targets=["vision"], modules_to_save=["layer_norm1"])
    names, trained = find_targets(model, options)

    assert any("encoder.layers.0." in name for name in names["default"])
    assert any("encoder.layers.0.layer_norm1" in name for name in trained)
    for name in (*names["default"], *trained):
        assert not name.startswith(unread), name


def test_the_most_pixels_of_an_image(vision: Vision) -> None:
    config = vision.model
    picture = Image.new("RGB", WIDE)
    before = vision.tokens(vision.measure(picture, 1))

    if isinstance(vision, GemmaVision | OneVision):
        with pytest.raises(ModelError, match=r"this model (scales each image|cuts images)"):
            find_vision(config, image_max_pixels=SIDE**2).measure(picture, 1)
    else:
        limited = find_vision(config, image_max_pixels=SIDE**2)

        assert limited is not None
        assert limited.tokens(limited.measure(picture, 1)) < before


def test_a_text_holds_no_token_of_an_image(folder: Path, vision: Vision) -> None:
    """Also if the mark of an image is another token: it would have no feature."""
    tokenizer = load_tokenizer(vision.path, vision.model)
    data = DataConfig(train=[FileSource(path="rows.jsonl")])
    token = tokenizer.convert_ids_to_tokens(vision.token_id)
    row = Row("here:1", {"prompt": f"what is {token}?", "completion": "RED"})

    with pytest.raises(DataError, match=r"a text of this row holds|writes 1 places"):
        VisionRowEncoder(tokenizer, data, vision).encode(row)


def test_the_cache_is_of_the_models_own_numbers(folder: Path, vision: Vision) -> None:
    """What decides on tokens, and is not in the processor, names the cache."""
    settings = [{"kind": "file", "path": "rows.jsonl"}]
    values = {"model": {"id": vision.path}, "data": {"train": settings, "packing": False}}
    config = Config.model_validate(values)
    key = partial(cache_key, config, config.data.train, "train", vision.path, folder)
    before = key(vision)

    assert before == key(vision_of(folder / "model"))

    if isinstance(vision, GemmaVision):
        assert key(replace(vision, end_id=vision.end_id + 1)) != before
    elif isinstance(vision, OneVision):
        other = load_config(vision.path, vision.model)
        other.vision_aspect_ratio = "anyres_max_9"

        assert key(replace(vision, config=other)) != before


def test_every_family_is_tested() -> None:
    assert {*TESTED, "qwen3_vl", "qwen3_vl_moe"} == set(FAMILIES)
