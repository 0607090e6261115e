"""Vision-language SFT on one process: tokens, positions and loss are the model's own; images that
text-only rows lack change nothing."""

from __future__ import annotations

import base64
import io
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from drumline.config.config import Config, LoRAConfig
from drumline.config.data import DataConfig, FileSource
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.data.cache import TokenCache
from drumline.data.image_files import resolve_image_path
from drumline.data.image_rows import cut_between_images as cut_images
from drumline.data.image_rows import expand_marks, place_images
from drumline.data.images import collate_vision, has_changed_videos, images_of_segments
from drumline.data.sources import Row, read_rows
from drumline.data.targets import TokenSegment
from drumline.data.video_files import choose_frames, video_state
from drumline.engine.offload import ActivationOffload
from drumline.engine.transforms import apply_activation_checkpointing, apply_mlp_chunks
from drumline.errors import DataError, EnvironmentFault, ModelError, PlanError, UserError
from drumline.inference.evaluate import answer_held_out_prompts
from drumline.models.adapters import inject, target_names
from drumline.models.blocks import blocks
from drumline.models.build import build_model
from drumline.models.freeze import freeze, trainable_names
from drumline.models.head import can_split, trunk_and_head
from drumline.models.image_tokens import QwenVision, Vision
from drumline.models.parts import PARTS
from drumline.models.tokenizer import load_tokenizer
from tests.harness import vision_rows, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_vision_dir, write_images
from tests.vision_setups import (
    ROWS,
    Learned,
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


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "mixture of experts"])
def test_loss_is_the_models_own(folder: Path, vision: Vision, experts: int) -> None:
    """Against transformers' forward with its own positions (get_rope_index), mask and loss, row by
    row."""
    if experts:
        vision = vision_of(tiny_vision_dir(folder / "experts", experts=experts))

    cache = cache_of(folder, vision, packing=False)
    model = built(vision)
    samples = list(range(len(cache)))
    ours = learned_by(model, collate_alone(cache, samples, vision))
    model.zero_grad()
    total = 0.0
    weight = 0

    for sample in samples:
        batch = collate_alone(cache, [sample], vision)
        loss = own_loss(model, batch, int(cache.lengths[sample]), vision)
        (loss * batch.weight).backward()
        total += float(loss.detach()) * batch.weight
        weight += batch.weight

    assert ours.loss == pytest.approx(total, rel=1e-6)
    assert weight > 40

    for name, parameter in model.named_parameters():
        assert_close(ours.gradients[name], parameter.grad, name)

    assert can_split(model)
    assert trunk_and_head(model) == (model.model, model.lm_head)


def own_loss(model: Any, batch: TokenBatch, length: int, vision: Vision) -> torch.Tensor:
    """Return the mean loss of a batch of one row of `length` tokens by transformers' own
    forward."""
    tokens = batch.input_ids_BT[:, :length]
    labels = torch.full((1, length), -100)
    labels[:, 1:] = batch.targets_BT[:, : length - 1]
    kinds = (tokens == vision.token_id).int()
    assert batch.images is not None

    arguments = batch.images.arguments
    rope_3BT = batch.images.rope_3BT
    images: dict[str, Any] = {}
    if kinds.any():
        images = dict(arguments)
        positions, _ = model.model.get_rope_index(tokens, kinds, arguments["image_grid_thw"])
        assert torch.equal(rope_3BT[:, :, :length], positions)

    return model(input_ids=tokens, labels=labels, mm_token_type_ids=kinds, **images).loss


def test_packs_are_their_rows(folder: Path, vision: Vision) -> None:
    """Packed with others or alone, a row has the same loss and gradients: its documents, positions
    and images stay its own."""
    packed = cache_of(folder, vision, packing=True)
    alone = cache_of(folder, vision, packing=False)

    assert len(packed) < len(alone)
    assert packed.info["images"] == 12
    assert alone.info["images"] == 12

    model = built(vision)

    def learned_by_all(cache: TokenCache) -> Learned:
        samples = list(range(len(cache)))
        return learned_by(model, collate_vision(cache, samples, 0, 257, vision))

    of_packs = learned_by_all(packed)
    of_rows = learned_by_all(alone)

    assert of_packs.loss == pytest.approx(of_rows.loss, rel=1e-6)

    for name, gradient in of_rows.gradients.items():
        assert_close(of_packs.gradients[name], gradient, name)


def test_an_image_in_the_padding_changes_nothing(folder: Path, vision: Vision) -> None:
    """A micro-batch of text: the tower takes part, with gradients of zero, and the others are those
    of text alone."""
    cache = cache_of(folder, vision, packing=False)
    model = built(vision)
    text = [sample for sample in range(len(cache)) if not cache.meta(sample)]
    batch = collate_alone(cache, [*text, -1], vision)

    assert batch.images is not None
    assert batch.images.arguments["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert int((batch.input_ids_BT == vision.token_id).sum()) == 1

    loss, gradients = learned_by(model, batch)
    model.zero_grad()
    out = model(input_ids=batch.input_ids_BT[:, :-1])
    plain = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), batch.targets_BT[:, :-1].flatten(), reduction="sum"
    )
    plain.backward()

    assert loss == pytest.approx(float(plain.detach()), rel=1e-6)

    for name, parameter in model.named_parameters():
        if name.startswith("model.visual."):
            assert not gradients[name].any()
        else:
            assert_close(gradients[name], parameter.grad, name, rtol=1e-5, atol=1e-6)


def _checkpoint_and_offload(model: Any) -> ActivationOffload:
    apply_activation_checkpointing(model, "full")
    return ActivationOffload(model, "cpu")


MEMORY: dict[str, Callable[[Any], Any]] = {
    "offload": partial(ActivationOffload, device="cpu"),
    "offload, full": _checkpoint_and_offload,
    "full, 1 of 3": partial(apply_activation_checkpointing, kind="full", block_count=1),
    "chunks": partial(apply_mlp_chunks, tokens=32),
}


@pytest.mark.parametrize("name", MEMORY)
def test_what_blocks_keep_changes_no_number(folder: Path, vision: Vision, name: str) -> None:
    """The blocks of the tower run before those of the text; their options are about the text."""
    cache = cache_of(folder, vision, packing=False)
    batch = collate_alone(cache, list(range(len(cache))), vision)
    plain = learned_by(built(vision), batch)
    model = built(vision)
    moves = MEMORY[name](model)
    found = learned_by(model, batch)

    if name == "chunks":
        # Products of other shapes.
        assert found.loss == pytest.approx(plain.loss, rel=1e-6)
        for key, gradient in plain.gradients.items():
            assert_close(found.gradients[key], gradient, key)
        return

    assert found.loss == plain.loss
    for key, gradient in plain.gradients.items():
        assert torch.equal(found.gradients[key], gradient), key

    if name.startswith("offload"):
        assert moves.moved_bytes > 0
        assert moves.device_bytes == 0
    else:
        are_checkpointed = [block.gradient_checkpointing for block in blocks(model)]

        assert are_checkpointed == [True, True, True, False, False]


def test_patches_are_cut_as_the_model_reads_them(folder: Path, vision: Vision) -> None:
    """Patch by patch from the pixels: blocks of merge x merge patches, each colour × 2 equal frames
    × height × width, scaled to ±1."""
    from PIL import Image

    path = folder / "wide.png"
    colours = np.random.default_rng(0).integers(0, 256, 24 * 16 * 3, np.uint8)
    Image.frombytes("RGB", (24, 16), colours.tobytes()).save(path)
    grid = vision.grid(str(path), "row")

    assert grid == (1, 4, 6)
    assert vision.tokens(grid) == 6

    pixels = (np.asarray(Image.open(path), np.float64) / 255 - 0.5) / 0.5
    wanted = []

    for top, left, down, right in product((0, 2), (0, 2, 4), (0, 1), (0, 1)):
        y = 4 * (top + down)
        x = 4 * (left + right)
        colours_first = pixels[y : y + 4, x : x + 4].transpose(2, 0, 1)
        frames = np.stack([colours_first, colours_first], axis=1)
        wanted.append(frames.ravel())

    np.testing.assert_allclose(vision.patches(str(path), grid), wanted, atol=1e-6)
    Image.new("RGB", (8, 8)).save(path)
    message = r"wide\.png: it has another size than when it was prepared"

    with pytest.raises(DataError, match=message):
        vision.patches(str(path), grid)


def test_positions_of_two_images() -> None:
    """M-RoPE by hand: text counts on, an image's tokens share a time, the text behind goes on after
    the longer side."""
    eyes = QwenVision("", ModelConfig(), token_id=9, mark_id=9, merge=2)
    tokens = np.array([1, 9, 9, 9, 9, 9, 9, 2, 9, 3], np.uint16)
    found = eyes.rotary_positions(tokens, [(1, 4, 6), (1, 2, 2)])

    assert found is not None

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
    eyes = QwenVision("", ModelConfig(), token_id=9, mark_id=9, merge=2)
    short = TokenSegment(np.array([1, 9, 2, 9, 3], np.int32), np.ones(5, np.uint8), True)
    full = expand_marks(short, [("a", (1, 4, 4)), ("b", (1, 2, 2))], eyes)

    assert full.segment.learn.tolist() == [1, 0, 0, 0, 0, 1, 0, 1]

    found = cut_images(full, size, left)

    assert found.segment.tokens.tolist() == tokens
    assert found.segment.hides_reasoning
    assert [path for path, _ in found.images] == images

    for start, stop in found.spans:
        assert (found.segment.tokens[start:stop] == 9).all()


def test_images_of_the_segments_of_a_sample() -> None:
    """A pack's images go to its documents in order, and those behind a cut to nobody."""
    eyes = QwenVision("", ModelConfig(), token_id=9, mark_id=9, merge=2)
    meta = {"images": ["a", "b", "c"], "grid": [[1, 4, 4], [1, 2, 2], [1, 2, 4]]}
    first = np.array([1, 9, 9, 9, 9, 2, 9], np.uint16)
    second = np.array([1, 2], np.uint16)
    third = np.array([9, 9, 3], np.uint16)
    found = images_of_segments([first, second, third], meta, eyes)

    assert [each["images"] for each in found] == [["a", "b"], [], ["c"]]
    assert found[0]["grid"] == [[1, 4, 4], [1, 2, 2]]
    assert images_of_segments([first[:6]], meta, eyes)[0]["images"] == ["a"]


def placed(folder: Path, **values: Any) -> tuple[list[Any], list[str]]:
    """Return the contents of a row's turns, and the names of its images."""
    row = next(read_rows_of(folder, values))
    found, paths, _ = place_images(row, folder)
    contents = []

    for key in ("messages", "prompt", "completion"):
        for turn in found.values.get(key, ()):
            contents.append(turn["content"])

    return contents, [Path(path).name for path in paths]


def user(content: Any) -> list[dict[str, Any]]:
    """Return a conversation of one turn."""
    return [{"role": "user", "content": content}]


def read_rows_of(folder: Path, values: dict[str, Any]) -> Any:
    write_rows(folder / "one.jsonl", [values])
    source = DataConfig.model_validate({"train": [{"kind": "file", "path": "one.jsonl"}]}).train[0]
    return read_rows(source, folder)


IMAGE = {"type": "image"}


def test_ways_to_say_where_an_image_stands(tmp_path: Path) -> None:
    text = {"type": "text", "text": "hm"}
    image = {**IMAGE, "image": "a.png", "text": None}

    assert placed(tmp_path, messages=user([image, text])) == ([[IMAGE, text]], ["a.png"])

    two = placed(tmp_path, messages=user([text, IMAGE, IMAGE]), images=["a.png", "b.png"])

    assert two == ([[text, IMAGE, IMAGE]], ["a.png", "b.png"])

    marked = placed(tmp_path, prompt="<image>hm", completion="ah", images=["a.png"])

    assert marked == ([[IMAGE, text], "ah"], ["a.png"])
    assert placed(tmp_path, messages=user([text, text])) == (["hmhm"], [])
    assert placed(tmp_path, messages=user("hm"), image="") == (["hm"], [])

    in_other_rows = placed(tmp_path, prompt="hm", completion="ah", images=None, image="a.png")

    assert in_other_rows == ([[IMAGE, text], "ah"], ["a.png"])

    tag = "a tag: <image>"

    assert placed(tmp_path, messages=user(tag)) == ([tag], [])


def test_a_video_is_its_frames(tmp_path: Path) -> None:
    """A list, a folder, several videos; in order, at equal distances, among images and texts."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(1, 13):
        (folder / f"frame{number}.png").touch()
    (folder / "notes.txt").touch()
    text = {"type": "text", "text": "hm"}
    frames = ["a.png", "b.png"]
    by_part = placed(tmp_path, messages=user([{"type": "video", "video": frames}, text]))

    assert by_part == ([[IMAGE, IMAGE, text]], frames)

    marked = placed(
        tmp_path, messages=user("<video>hm<image><video>"), videos=[frames, ["c.png"]], images="d"
    )

    assert marked == ([[IMAGE, IMAGE, text, IMAGE, IMAGE]], ["a.png", "b.png", "d", "c.png"])

    _, names = placed(tmp_path, prompt="hm", completion="ah", video="clip")

    assert names == [f"frame{number}.png" for number in (1, 3, 4, 6, 7, 9, 10, 12)]
    assert choose_frames(5, 3) == [0, 2, 4]
    assert choose_frames(5, 1) == [0]
    assert placed(tmp_path, messages=user("a tag: <video>")) == (["a tag: <video>"], [])
    assert placed(tmp_path, messages=user("hm"), video=[]) == (["hm"], [])

    # Images without a place come before the first question, whatever it is made of.
    turns = [*user([{"type": "video", "video": frames}, text]), *user("more")]
    beside = placed(tmp_path, messages=turns, images=["c.png"])

    assert beside == ([[IMAGE, IMAGE, IMAGE, text], "more"], ["c.png", *frames])


def test_a_video_file_is_decoded_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"no video")
    row = {"messages": user("<video>"), "videos": ["clip.mp4"]}
    monkeypatch.setitem(sys.modules, "av", None)

    with pytest.raises(EnvironmentFault, match=r"clip\.mp4: its frames are decoded by .* av"):
        placed(tmp_path, **row)

    monkeypatch.undo()
    av = pytest.importorskip("av")

    with pytest.raises(DataError, match=r"clip\.mp4: cannot be read"):
        placed(tmp_path, **row)

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = 16
        stream.height = 16
        for number in range(10):
            pixels = np.full((16, 16, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    (parts,), names = placed(tmp_path, **row)

    assert parts == [IMAGE] * 8
    assert len({(tmp_path / "images" / name).read_bytes() for name in names}) == 8


@pytest.mark.parametrize("packing", [False, True])
def test_a_video_that_changes_is_prepared_again(
    vision: Vision, tmp_path: Path, packing: bool
) -> None:
    write_images(tmp_path, 3)
    row = {"prompt": "<video>what?", "completion": "a clip", "videos": ["images"]}
    write_rows(tmp_path / "rows.jsonl", [row, {"prompt": "a", "completion": "b"}])
    before = cache_of(tmp_path, vision, packing=packing)
    frames = images_of_cache(before)

    assert len(frames) == 3
    assert not has_changed_videos(before)
    assert cache_of(tmp_path, vision, packing=packing).folder == before.folder

    Path(frames[0]).unlink()

    assert has_changed_videos(before)

    after = cache_of(tmp_path, vision, packing=packing)

    assert not has_changed_videos(after)
    assert images_of_cache(after) == frames[1:]


def images_of_cache(cache: TokenCache) -> list[str]:
    found: list[str] = []

    for sample in range(len(cache)):
        found += cache.meta(sample).get("images", ())

    return found


def test_the_state_of_a_video_file(tmp_path: Path) -> None:
    """Its frames were written when it was read, so they do not change with it."""
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"one")
    state = video_state(file)
    file.write_bytes(b"other")

    assert video_state(file) != state

    file.unlink()

    assert video_state(file) == ""


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png_bytes(folder: Path) -> bytes:
    """Return the bytes of a random image."""
    (name,) = write_images(folder, 1, seed=7)
    return (folder / name).read_bytes()


def test_images_that_rows_hold(tmp_path: Path, folder: Path) -> None:
    """As tables of the hub have them: bytes or a data URL, under `image` or `images`, with a place
    in the text or before the question."""
    from datasets import Dataset
    from PIL import Image

    data = png_bytes(folder)
    url = data_url(data)
    held = {"bytes": data, "path": None}
    text = {"type": "text", "text": "what?"}
    in_table = {"type": "text", "text": "what?", "index": None}
    place = {"type": "image", "text": None, "index": 0}
    answer = {"type": "text", "text": "RED", "index": None}
    turns = [*user([in_table, place]), {"role": "assistant", "content": [answer]}]
    chat = {"user": "what?", "assistant": "RED", "source": "s"}
    conversation = [
        {"from": "human", "value": "<image>what?"},
        {"from": "gpt", "value": "RED"},
    ]
    linked = {"type": "image_url", "image_url": {"url": url}}
    image_behind: list[dict[str, Any]] = [
        {"messages": turns, "images": [held]},
        {"messages": user([text, linked])},
    ]
    image_before: list[dict[str, Any]] = [
        {"image": held, "question": "what?", "answer": "RED"},
        {"images": [held], "texts": [chat]},
        {"image": url, "conversations": conversation},
    ]

    def first_content(row: dict[str, Any]) -> Any:
        Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
        (found,) = read_rows(FileSource(path="rows.parquet"), tmp_path)
        shown, (path,), _ = place_images(found, tmp_path)

        assert Path(path).read_bytes() == data

        turns = shown.values.get("messages") or shown.values["prompt"]
        return turns[0]["content"]

    for row in image_behind:
        assert first_content(row) == [text, IMAGE]

    for row in image_before:
        assert first_content(row) == [IMAGE, text]

    assert len(list((tmp_path / "images").iterdir())) == 1, "the same bytes are one file"

    image = Image.open(io.BytesIO(data))
    loaded = Image.open(resolve_image_path(image, "hub/x row 1", tmp_path))

    assert loaded.tobytes() == image.tobytes()


def test_lost_images_that_rows_held_are_written_again(
    tmp_path: Path, folder: Path, vision: Vision
) -> None:
    data = png_bytes(folder)
    row = {"prompt": "what?", "completion": "RED"}
    write_rows(tmp_path / "rows.jsonl", [{**row, "image": data_url(data)}, row])

    for _ in range(2):
        cache = cache_of(tmp_path, vision, packing=False)

        assert len(cache) == 2

        (path,) = (tmp_path / "cache" / "images").iterdir()

        assert path.read_bytes() == data

        path.unlink()


def test_copies_have_the_same_images_and_not_the_same_names(
    tmp_path: Path, folder: Path, vision: Vision
) -> None:
    url = data_url(png_bytes(folder))

    for name in ("a", "b"):
        root = tmp_path / name
        root.mkdir()
        rows = []

        for image in [*write_images(root, 2, seed=3), url]:
            rows.append({"prompt": "what?", "completion": "RED", "image": image})

        write_rows(root / "rows.jsonl", rows)

    train = [{"kind": "file", "path": f"{name}/rows.jsonl"} for name in "aab"]
    cache = cache_of(tmp_path, vision, packing=False, train=train, duplicates="exact")

    assert len(cache) == 5

    for key, value in (("duplicates", "near"), ("decontaminate", True)):
        with pytest.raises(PlanError, match=f"data.{key} × images: it compares texts alone"):
            cache_of(tmp_path, vision, train=train, eval=train, **{key: value})


# The error message that a row gets.
MISTAKES: dict[str, dict[str, Any]] = {
    "a URL, not a path": {"messages": user([{**IMAGE, "image": "https://x.org/a.png"}])},
    "given as dict, neither as a path": {
        "messages": user([{"type": "image_url", "image_url": {"a": 1}}]),
    },
    "is no data URL of base64": {
        "prompt": "x",
        "completion": "x",
        "image": "data:image/png;base64,!",
    },
    "1 more images than places": {"messages": user("<image>"), "images": ["a.png", "b.png"]},
    "more places for images than images": {"messages": user([IMAGE])},
    r"content\[0\] is text under type, body, neither": {
        "messages": user([{"type": "text", "body": "a"}]),
    },
    r"content\[0\] is sound, neither text nor an image": {"messages": user([{"type": "sound"}])},
    "more places for videos than videos": {"messages": user([{"type": "video"}])},
    "2 more videos than places": {
        "messages": user([{"type": "text", "text": "a"}, {"type": "video", "video": ["a.png"]}]),
        "videos": ["a", "b"],
    },
    "a.mp4: no such file or folder": {
        "prompt": "<video>x",
        "completion": "x",
        "videos": ["a.mp4"],
    },
    "a video is a URL, not a path: https://x.org/a.mp4": {
        "messages": user("<video>"),
        "videos": ["https://x.org/a.mp4?key=secret"],
    },
    "a video has no frames": {"messages": user("<video>"), "videos": [[]]},
    "a video is given as int": {"messages": user("<video>"), "videos": [1]},
    "gone.png: no such file": {"prompt": "<image>", "completion": "x", "images": ["gone.png"]},
    "bad.png: cannot be read": {"prompt": "<image>", "completion": "x", "images": ["bad.png"]},
    "given as an empty text": {"prompt": "x", "completion": "x", "images": [""]},
    "what column 'image' holds would be left out": {"text": "a picture", "image": "a.png"},
    "what column 'images' holds would be left out": {"text": "a <image>", "images": ["a.png"]},
    "what column 'videos' holds would be left out": {"text": "a", "videos": ["a.mp4"]},
    "what column 'audio' holds would be left out": {
        "messages": user("x"),
        "audio": {"path": "a.mp3"},
    },
    "0 images, but the chat template writes 1 places": {
        "prompt": "<|image_pad|>",
        "completion": "x",
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_name_the_row(folder: Path, vision: Vision, message: str) -> None:
    (good,) = write_images(folder, 1, seed=9)
    (folder / "bad.png").write_bytes((folder / good).read_bytes()[:60])
    config = Config.model_validate({"data": {"train": [ROWS]}})
    tokenizer = load_tokenizer(vision.path, vision.model)
    encoder = config.algorithm.encoder(tokenizer, config.data, vision)
    rows = read_rows_of(folder, MISTAKES[message])

    with pytest.raises(DataError, match=message) as caught:
        encoder.encode(next(rows))

    assert "one.jsonl:1" in str(caught.value)
    assert "\n" not in str(caught.value)
    # The query of a URL may have a key.
    assert "secret" not in str(caught.value)


def test_a_model_of_text_takes_no_images(tmp_path: Path, folder: Path) -> None:
    model = ModelConfig(id=str(tiny_model_dir(tmp_path / "model")))

    assert find_vision(model) is None

    config = Config.model_validate({"data": {"train": [ROWS]}})
    encoder = config.algorithm.encoder(load_tokenizer(model.id, model), config.data)
    row = Row("here:1", {"messages": user([IMAGE])})

    with pytest.raises(DataError, match=re.escape("this row holds images")):
        encoder.encode(row)

    row = Row("here:1", {"messages": user("<video>what?")}, {"videos": ["a.mp4"]})

    with pytest.raises(DataError, match="this row has videos at <video>"):
        encoder.encode(row)


def test_documents_hold_no_images_nor_their_tokens(folder: Path, vision: Vision) -> None:
    config = Config.model_validate({"algorithm": "pretrain", "data": {"train": [ROWS]}})
    tokenizer = load_tokenizer(vision.path, vision.model)
    encoder = config.algorithm.encoder(tokenizer, config.data, vision)

    assert encoder.encode(Row("here:1", {"text": "one two"})) is not None

    with pytest.raises(DataError, match="0 images, but the chat template writes 1 places"):
        encoder.encode(Row("here:1", {"text": "one <|image_pad|>two"}))

    for values, extra in (
        ({"messages": user([IMAGE])}, {}),
        ({"messages": user("<video>")}, {"videos": ["a"]}),
    ):
        with pytest.raises(DataError, match="documents are read without any"):
            encoder.encode(Row("here:1", values, extra))

    with pytest.raises(DataError, match="what column 'image' holds would be left out"):
        encoder.encode(Row("here:1", {"text": "one"}, {"image": "a.png"}))


def test_a_part_without_parameters_is_not_frozen_silently(vision: Vision) -> None:
    model = built(vision)
    model.model.visual = torch.nn.Identity()

    with pytest.raises(ModelError, match=r"the part 'vision' of .* has no parameters"):
        freeze(model, ["vision"])


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
        answer_held_out_prompts(config, [], None, 3)


def parts_of(names: Any) -> set[str]:
    """Return the parts of a tiny Qwen3-VL that parameters with these names lie in."""
    parts = set()

    for name in names:
        if "merger" in name:
            parts.add("projector")
        elif ".visual." in name:
            parts.add("vision")
        else:
            parts.add("language")

    return parts


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_frozen_and_adapted_by_name(vision: Vision, part: str) -> None:
    frozen = built(vision)
    freeze(frozen, [part])
    held = [name for name, each in frozen.named_parameters() if not each.requires_grad]

    assert parts_of(held) == {part}
    assert parts_of(trainable_names(frozen)) == set(PARTS) - {part}

    adapted = built(vision)
    inject(adapted, LoRAConfig(r=2, targets=[part]), seed=0)

    assert parts_of(trainable_names(adapted)) == {part}

    both = target_names(built(vision), LoRAConfig(targets=["language", "vision"]))

    assert parts_of(both) == {"language", "vision"}


def test_a_model_of_text_has_no_parts(tmp_path: Path) -> None:
    path = str(tiny_model_dir(tmp_path / "model"))
    model = build_model(path, ModelConfig(id=path), seed=0)

    with pytest.raises(ModelError, match="has no vision tower, and so no part called 'vision'"):
        freeze(model, ["vision"])
