"""Runs of Qwen3-VL at its real sizes, described as a user would: a config, rows, images, and no weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from drumline.models.shapes import find
from tests.harness import Sections
from tests.tiny import CHATML_WITH_IMAGES, VISION_SPECIAL, tiny_tokenizer

LENGTH = 1024
# Qwen3-VL makes one token of 32 × 32 pixels. Two of these images are half of a row's tokens, which is
# the share that the planner assumes.
SIDE = 512
IMAGES_PER_ROW = 2
# Names in the config → tokens.
TOKEN_KEYS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def write_vision_run(folder: Path, model: str, sections: Sections) -> Path:
    """Write the config of a run of two steps in bf16, with all that it reads, and return its path.

    Two micro-batches a step, of two rows each. `model`: a name of models.shapes, with all its layers
    and widths; its weights are random. `sections`: of the config, laid over those here.
    """
    folder.mkdir(parents=True)
    values = _model_values(folder / "tokenizer", model)
    _write_rows(folder)
    config: dict[str, Any] = {
        "model": {"id": None, "config": values, "tokenizer": str(folder / "tokenizer")},
        "algorithm": "sft",
        "data": {
            "train": [{"kind": "file", "path": "rows.jsonl"}],
            "max_length": LENGTH,
            "packing": False,
            "workers": 1,
            "cache_dir": str(folder / "cache"),
        },
        "precision": "bf16",
        "batch": {"global_samples": 4, "micro_batch": 2},
        "optimizer": {"lr": 1e-4},
        "schedule": "constant",
        # No weight has a value, so neither has a loss.
        "health": {"on_nan": "skip"},
        "eval": {"at_start": False},
        "checkpoint": {"export": "none"},
        "run": {"dir": str(folder / "run"), "report_to": [], "device": "cuda", "steps": 2},
    }
    for name, section in sections.items():
        if isinstance(section, dict) and isinstance(config.get(name), dict):
            config[name] |= section
        else:
            config[name] = section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _model_values(tokenizer_folder: Path, model: str) -> dict[str, Any]:
    """Save a tokenizer and an image processor, and return the model's config with their ids.

    The vocabulary keeps its size: only the first rows of the embedding are read.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    shape = find(model)
    assert shape is not None
    tokenizer = tiny_tokenizer(chat_template=CHATML_WITH_IMAGES)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_SPECIAL})
    tokenizer.save_pretrained(tokenizer_folder)
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2).save_pretrained(tokenizer_folder)
    values = copy.deepcopy(shape.values)
    for key, token in TOKEN_KEYS.items():
        values[key] = tokenizer.convert_tokens_to_ids(token)
    return values


def _write_rows(folder: Path) -> None:
    """Write rows that fill LENGTH tokens, with an image that all of them show."""
    from PIL import Image

    Image.new("RGB", (SIDE, SIDE), "red").save(folder / "red.png")
    question = {"role": "user", "content": "<image>" * IMAGES_PER_ROW + "What do you see?"}
    answer = {"role": "assistant", "content": "drum " * (4 * LENGTH)}
    row = {"messages": [question, answer], "images": ["red.png"] * IMAGES_PER_ROW}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 32)
