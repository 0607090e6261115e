"""Vision-language SFT on one process: tokens, positions and loss are the model's own; images that text-only rows lack change nothing."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.config import Config
from drumline.config.data import DataConfig, FileSource
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.data.image_files import image_path
from drumline.data.images import (
    VisionBatch,
    collate_vision,
    expand_placeholders,
    place_images,
    rope_positions,
)
from drumline.data.images import cut_between_images as cut_images
from drumline.data.prepare import prepare
from drumline.data.sources import Row, read_rows
from drumline.data.targets import Example
from drumline.errors import DataError, ModelError, PlanError, UserError
from drumline.inference.evaluate import answers
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective, can_split, trunk_and_head
from drumline.models.load import load_config
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vision import Vision
from drumline.models.vision import vision_of as vision_of_run
from tests.harness import vision_rows, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_vision_dir, write_images

LOSS = NextToken(0, answers=True)


pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows of all kinds with their images."""
    root = tmp_path_factory.mktemp("vision")
    tiny_vision_dir(root / "model", layers=3)
    write_rows(root / "rows.jsonl", vision_rows(root, 12))
    return root


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    return vision_of(folder / "model")


def find_vision(model: ModelConfig) -> Vision | None:
    config = Config.model_validate(
        {"model": {"id": model.id}, "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]}}
    )
    return vision_of_run(config, model.id, load_config(model.id, model))


def vision_of(path: Path) -> Vision:
    model = ModelConfig(id=str(path))
    found = find_vision(model)
    assert found is not None
    return found


def cache_of(folder: Path, vision: Vision, **data: Any) -> TokenCache:
    values = {
        "train": [{"kind": "file", "path": "rows.jsonl"}],
        "workers": 1,
        "max_length": 256,
        "cache_dir": str(folder / "cache"),
    } | data
    config = Config.model_validate({"model": {"id": vision.path}, "data": values})
    return TokenCache.open(prepare(config, vision.path, folder, vision=vision).train_cache)


def built(folder: Path) -> Any:
    return build_model(str(folder / "model"), ModelConfig(id=str(folder / "model")), seed=0).train()


def learned_by(model: Any, batch: VisionBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss sum of a batch, and the gradients."""
    model.zero_grad()
    loss, _ = ForwardWithObjective(model)(batch, LOSS.objective)
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture of experts"])
def test_loss_is_the_models_own(folder: Path, vision: Vision, experts: int) -> None:
    """Against transformers' forward with its own positions (get_rope_index), mask and loss, row by row."""
    if experts:
        vision = vision_of(tiny_vision_dir(folder / "experts", experts=experts))
    cache, model = (
        cache_of(folder, vision, packing=False),
        build_model(vision.path, vision.model, seed=0).train(),
    )
    pad = 0
    ids = list(range(len(cache)))
    ours, gradients = learned_by(model, collate_vision(cache, ids, pad, None, vision))
    model.zero_grad()
    total, weight = 0.0, 0
    for sample in ids:
        batch = collate_vision(cache, [sample], pad, None, vision)
        real = int(cache.lengths[sample])
        tokens, labels = batch.input_ids_BT[:, :real], torch.full((1, real), -100)
        labels[:, 1:] = batch.targets_BT[:, : real - 1]
        kinds = (tokens == vision.token_id).int()
        images = (
            {"pixel_values": batch.pixels_PD, "image_grid_thw": batch.grid_N3}
            if kinds.any()
            else {}
        )
        if images:
            positions, _ = model.model.get_rope_index(tokens, kinds, batch.grid_N3)
            assert torch.equal(batch.rope_3BT[:, :, :real], positions)
        out = model(input_ids=tokens, labels=labels, mm_token_type_ids=kinds, **images)
        (out.loss * batch.weight).backward()
        total, weight = total + float(out.loss.detach()) * batch.weight, weight + batch.weight
    assert ours == pytest.approx(total, rel=1e-6) and weight > 40
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert can_split(model) and trunk_and_head(model) == (model.model, model.lm_head)


def test_packs_are_their_rows(folder: Path, vision: Vision) -> None:
    """Packed with others or alone, a row has the same loss and gradients: its documents, positions and images stay its own."""
    packed, alone, model = (
        cache_of(folder, vision, packing=True),
        cache_of(folder, vision, packing=False),
        built(folder),
    )
    assert len(packed) < len(alone) and packed.info["images"] == alone.info["images"] == 12
    results = [
        learned_by(model, collate_vision(c, list(range(len(c))), 0, 257, vision))
        for c in (packed, alone)
    ]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_an_image_in_the_padding_changes_nothing(folder: Path, vision: Vision) -> None:
    """A micro-batch of text: the tower takes part, with gradients of zero, and the others are those of text alone."""
    cache, model = cache_of(folder, vision, packing=False), built(folder)
    text = [sample for sample in range(len(cache)) if not cache.meta(sample)]
    batch = collate_vision(cache, [*text, -1], 0, None, vision)
    assert (
        batch.grid_N3.tolist() == [[1, 2, 2]]
        and int((batch.input_ids_BT == vision.token_id).sum()) == 1
    )
    loss, gradients = learned_by(model, batch)
    tower = {name for name in gradients if name.startswith("model.visual.")}
    assert tower == {
        name for name, _ in model.named_parameters() if name.startswith("model.visual.")
    }
    assert not any(bool(gradients[name].any()) for name in tower)
    model.zero_grad()
    out = model(input_ids=batch.input_ids_BT[:, :-1])
    plain = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), batch.targets_BT[:, :-1].flatten(), reduction="sum"
    )
    plain.backward()
    assert loss == pytest.approx(float(plain.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name not in tower:
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name
            )


def test_patches_are_cut_as_the_model_reads_them(folder: Path, vision: Vision) -> None:
    """Patch by patch from the pixels: blocks of merge x merge patches, each colour × 2 equal frames × height × width, scaled to ±1."""
    from PIL import Image

    path = folder / "wide.png"
    Image.frombytes(
        "RGB", (24, 16), np.random.default_rng(0).integers(0, 256, 24 * 16 * 3, np.uint8).tobytes()
    ).save(path)
    grid = vision.grid(str(path), "row")
    assert grid == (1, 4, 6) and vision.tokens(grid) == 6
    pixels = (np.asarray(Image.open(path), np.float64) / 255 - 0.5) / 0.5
    wanted = [
        np.repeat(
            pixels[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].transpose(2, 0, 1)[:, None], 2, axis=1
        ).ravel()
        for top in range(0, 4, 2)
        for left in range(0, 6, 2)
        for y in (top, top + 1)
        for x in (left, left + 1)
    ]
    np.testing.assert_allclose(vision.patches(str(path), grid), wanted, atol=1e-6)
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(
        DataError, match=r"wide\.png: it has another size than when it was prepared"
    ):
        vision.patches(str(path), grid)


def test_positions_of_two_images() -> None:
    """M-RoPE by hand: text counts on, an image's tokens share a time, the text behind goes on after the longer side."""
    eyes = Vision("", ModelConfig(), token_id=9, merge=2)
    tokens = np.array([1, 9, 9, 9, 9, 9, 9, 2, 9, 3], np.uint16)
    found = rope_positions(tokens, [(1, 4, 6), (1, 2, 2)], eyes)
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize(
    ("size", "left", "tokens", "images"),
    [
        (6, False, [1, 9, 9, 9, 9, 2], ["a"]),
        (4, False, [1], []),
        (3, True, [2, 9, 3], ["b"]),
        (4, True, [2, 9, 3], ["b"]),
        (7, True, [9, 9, 9, 9, 2, 9, 3], ["a", "b"]),
    ],
)
def test_no_image_is_cut_in_two(
    size: int, left: bool, tokens: list[int], images: list[str]
) -> None:
    eyes = Vision("", ModelConfig(), token_id=9, merge=2)
    short = Example(np.array([1, 9, 2, 9, 3], np.int32), np.ones(5, np.uint8))
    full = expand_placeholders(short, [("a", (1, 4, 4)), ("b", (1, 2, 2))], eyes)
    assert full.example.learn.tolist() == [1, 0, 0, 0, 0, 1, 0, 1]
    found = cut_images(full, size, left)
    assert found.example.tokens.tolist() == tokens and [path for path, _ in found.images] == images
    assert all((found.example.tokens[slice(*span)] == 9).all() for span in found.spans)


def placed(folder: Path, **values: Any) -> tuple[list[Any], list[str]]:
    row = next(read_rows_of(folder, values))
    found, paths = place_images(row, folder)
    content = [
        m["content"]
        for key in ("messages", "prompt", "completion")
        for m in found.values.get(key, ())
    ]
    return content, [Path(path).name for path in paths]


def read_rows_of(folder: Path, values: dict[str, Any]) -> Any:
    write_rows(folder / "one.jsonl", [values])
    source = DataConfig.model_validate({"train": [{"kind": "file", "path": "one.jsonl"}]}).train[0]
    return read_rows(source, folder)


IMAGE = {"type": "image"}


def test_ways_to_say_where_an_image_stands(tmp_path: Path) -> None:
    text = {"type": "text", "text": "hm"}
    in_content = [{**IMAGE, "image": "a.png", "text": None}, text]
    assert placed(tmp_path, messages=[{"role": "user", "content": in_content}]) == (
        [[IMAGE, text]],
        ["a.png"],
    )
    two = placed(
        tmp_path,
        messages=[{"role": "user", "content": [text, IMAGE, IMAGE]}],
        images=["a.png", "b.png"],
    )
    assert two == ([[text, IMAGE, IMAGE]], ["a.png", "b.png"])
    marked = placed(tmp_path, prompt="<image>hm", completion="ah", images=["a.png"])
    assert marked == ([[IMAGE, text], "ah"], ["a.png"])
    assert placed(tmp_path, messages=[{"role": "user", "content": [text, text]}]) == (["hmhm"], [])
    assert placed(tmp_path, messages=[{"role": "user", "content": "hm"}], image="") == (["hm"], [])
    assert placed(tmp_path, messages=[{"role": "user", "content": "a tag: <image>"}]) == (
        ["a tag: <image>"],
        [],
    )


def test_images_that_rows_hold(tmp_path: Path, folder: Path) -> None:
    """As tables of the hub have them: bytes or a data URL, under `image` or `images`, with a place in the text or before the question."""
    from datasets import Dataset
    from PIL import Image

    data = (folder / write_images(folder, 1, seed=7)[0]).read_bytes()
    url, held = (
        f"data:image/png;base64,{base64.b64encode(data).decode()}",
        {"bytes": data, "path": None},
    )
    text, padded = {"type": "text", "text": "what?"}, {"text": None, "type": "image", "index": 0}
    user = {"role": "user", "content": [{"text": "what?", "type": "text", "index": None}, padded]}
    answer = {"role": "assistant", "content": [{"text": "RED", "type": "text", "index": None}]}
    for row, content in (
        ({"messages": [user, answer], "images": [held]}, [text, IMAGE]),
        ({"image": held, "question": "what?", "answer": "RED"}, [IMAGE, text]),
        (
            {"images": [held], "texts": [{"user": "what?", "assistant": "RED", "source": "s"}]},
            [IMAGE, text],
        ),
        (
            {
                "image": url,
                "conversations": [
                    {"from": "human", "value": "<image>what?"},
                    {"from": "gpt", "value": "RED"},
                ],
            },
            [IMAGE, text],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [text, {"type": "image_url", "image_url": {"url": url}}],
                    }
                ]
            },
            [text, IMAGE],
        ),
    ):
        Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
        (found,) = read_rows(FileSource(path="rows.parquet"), tmp_path)
        shown, (path,) = place_images(found, tmp_path)
        turns = shown.values.get("messages") or shown.values["prompt"]
        assert turns[0]["content"] == content and Path(path).read_bytes() == data
    assert len(list((tmp_path / "images").iterdir())) == 1, "the same bytes are one file"
    loaded = Path(image_path(Image.open(io.BytesIO(data)), "hub/x row 1", tmp_path))
    assert Image.open(loaded).tobytes() == Image.open(io.BytesIO(data)).tobytes()


def test_lost_images_that_rows_held_are_written_again(
    tmp_path: Path, folder: Path, vision: Vision
) -> None:
    data = (folder / write_images(folder, 1, seed=7)[0]).read_bytes()
    row = {"prompt": "what?", "completion": "RED"}
    write_rows(
        tmp_path / "rows.jsonl",
        [{**row, "image": f"data:image/png;base64,{base64.b64encode(data).decode()}"}, row],
    )
    for _ in range(2):
        cache = cache_of(tmp_path, vision, packing=False)
        (path,) = (tmp_path / "cache" / "images").iterdir()
        assert len(cache) == 2 and path.read_bytes() == data
        path.unlink()


def test_copies_have_the_same_images_and_not_the_same_names(
    tmp_path: Path, folder: Path, vision: Vision
) -> None:
    data = base64.b64encode((folder / write_images(folder, 1, seed=7)[0]).read_bytes()).decode()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        images = [*write_images(tmp_path / name, 2, seed=3), f"data:image/png;base64,{data}"]
        write_rows(
            tmp_path / name / "rows.jsonl",
            [{"prompt": "what?", "completion": "RED", "image": image} for image in images],
        )
    train = [{"kind": "file", "path": f"{name}/rows.jsonl"} for name in "aab"]
    assert len(cache_of(tmp_path, vision, packing=False, train=train, duplicates="exact")) == 5
    for key, value in (("duplicates", "near"), ("decontaminate", True)):
        with pytest.raises(PlanError, match=f"data.{key} × images: it compares texts alone"):
            cache_of(tmp_path, vision, train=train, eval=train, **{key: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": [{**IMAGE, "image": "https://x.org/a.png"}]}
                ]
            },
            "a URL, not a path",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"a": 1}}]}
                ]
            },
            "given as dict, neither as a path",
        ),
        (
            {"prompt": "x", "completion": "x", "image": "data:image/png;base64,!"},
            "is no data URL of base64",
        ),
        (
            {"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png", "b.png"]},
            "1 more images than places",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "more places for images than images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "body": "a"}]}]},
            r"content\[0\] is text under type, body, neither",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            r"content\[0\] is video, neither text nor an image",
        ),
        (
            {"prompt": "<image>", "completion": "x", "images": ["gone.png"]},
            "gone.png: no such file",
        ),
        (
            {"prompt": "<image>", "completion": "x", "images": ["bad.png"]},
            "bad.png: cannot be read",
        ),
        ({"prompt": "x", "completion": "x", "images": [""]}, "given as an empty text"),
        ({"text": "a picture", "image": "a.png"}, "what column 'image' holds would be left out"),
        (
            {"text": "a <image>", "images": ["a.png"]},
            "what column 'images' holds would be left out",
        ),
        (
            {"prompt": "<video>x", "completion": "x", "videos": ["a.mp4"]},
            "what column 'videos' holds would be left out",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "audio": {"path": "a.mp3"}},
            "what column 'audio' holds would be left out",
        ),
        (
            {"prompt": "<|image_pad|>", "completion": "x"},
            "0 images, but the chat template writes 1 places",
        ),
    ],
)
def test_mistakes_name_the_row(
    folder: Path, vision: Vision, values: dict[str, Any], message: str
) -> None:
    good = write_images(folder, 1, seed=9)[0]
    (folder / "bad.png").write_bytes((folder / good).read_bytes()[:60])
    encoder = Config.model_validate(
        {"data": {"train": [{"kind": "file", "path": "x"}]}}
    ).algorithm.encoder(*of(folder, vision))
    with pytest.raises(DataError, match=message) as caught:
        encoder.encode(next(read_rows_of(folder, values)))
    assert "one.jsonl:1" in str(caught.value) and "\n" not in str(caught.value)


def of(folder: Path, vision: Vision) -> tuple[Any, DataConfig, Vision]:
    data = DataConfig.model_validate({"train": [{"kind": "file", "path": "x"}]})
    return load_tokenizer(str(folder / "model"), vision.model), data, vision


def test_a_model_of_text_takes_no_images(tmp_path: Path, folder: Path) -> None:
    model = ModelConfig(id=str(tiny_model_dir(tmp_path / "model")))
    assert find_vision(model) is None
    config = Config.model_validate({"data": {"train": [{"kind": "file", "path": "x"}]}})
    encoder = config.algorithm.encoder(load_tokenizer(model.id, model), config.data)
    row = Row("here:1", {"messages": [{"role": "user", "content": [IMAGE]}]})
    with pytest.raises(DataError, match=re.escape("this row holds images")):
        encoder.encode(row)


def test_a_folder_without_an_image_processor(tmp_path: Path) -> None:
    path = tiny_vision_dir(tmp_path / "model")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError) as caught:
        vision_of(path)
    assert "\n" not in str(caught.value)


def test_prompts_with_images_are_not_answered_without_them(tmp_path: Path, folder: Path) -> None:
    config = write_config(tmp_path, folder / "model", data={"max_length": 256})
    write_rows(tmp_path / "eval.jsonl", vision_rows(tmp_path, 3))
    with pytest.raises(UserError, match="prompts with images are not answered here"):
        answers(config, [], None, 3)
