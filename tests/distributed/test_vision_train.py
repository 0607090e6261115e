"""`drumline train` of a tiny Qwen3-VL on PNGs, on two ranks, and the folder that it leaves; what
cannot be is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.load import load
from drumline.errors import DrumlineError
from drumline.train.setup import Request, make_plan
from tests.harness import (
    column,
    events,
    read_json,
    run_drumline,
    vision_rows,
    weights,
    write_config,
    write_rows,
)
from tests.tiny import tiny_vision_dir


def config(folder: Path, **sections: Any) -> Path:
    path = write_config(folder, tiny_vision_dir(folder / "model"), **sections)
    write_rows(folder / "train.jsonl", vision_rows(folder, 24))
    write_rows(folder / "eval.jsonl", vision_rows(folder, 4, seed=1))
    return path


@pytest.mark.full  # the numbers are test_vision's, the folder test_commands'
def test_it_trains_and_leaves_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    path = config(
        tmp_path,
        launch={"nproc": 2},
        strategy="ddp",
        data={"packing": False},
        run={"steps": 2},
        model={"freeze": ["model.visual.patch_embed"]},
        checkpoint={"export": "last"},
    )
    prepared = run_drumline("prepare", path)
    assert "24 images" in prepared.out
    finished = run_drumline("train", path)
    assert "Tokenising" not in finished.err
    run = tmp_path / "run"
    assert column(run, "step") == [1, 2]
    plan = read_json(run / "plan.json")
    data = plan["data"]
    assert data["images"] == 24
    assert data["samples_with_images"] == 16
    assert data["image_tokens"] > 24
    assert any(line.startswith("images 24 in 16 of 24 samples") for line in plan["why"])
    (exported,) = events(run, "export")
    assert exported["max_logit_difference"] <= 1e-5
    folder = run / "export"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    learned = weights(run)
    before = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        if name.startswith("model.visual.patch_embed"):
            assert torch.equal(parameter, before[name]), name
        else:
            assert torch.equal(parameter, learned[f"model.{name}"]), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    image = processor([Image.new("RGB", (16, 8), "red")], return_tensors="pt")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one?"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 2)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    kinds = (ids == model.config.image_token_id).int()
    said = model.generate(
        input_ids=ids, mm_token_type_ids=kinds, **image, max_new_tokens=3, do_sample=False
    )
    assert said.shape[1] > ids.shape[1]


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
REWARDS = "rewards: [{kind: length, free: 2, limit: 6}]"
TARGETS = ATTENTION | {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.full
def test_a_lora_run_exports_what_peft_lays_over(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        adapter={"kind": "lora", "r": 2},
        run={"steps": 2},
        checkpoint={"export": "last", "export_adapter": True},
    )
    run_drumline("train", path)
    run = tmp_path / "run"
    saved = read_json(run / "export" / "adapter_config.json")
    assert set(saved["target_modules"]) == TARGETS
    (exported,) = events(run, "export")
    assert exported["max_logit_difference"] <= 1e-5
    names = " ".join(weights(run))
    assert "visual" not in names
    assert "language_model" in names


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["strategy=pp", "launch.nproc=2"], "images × pp"),
        (["strategy={kind: cp, method: ring}", "launch.nproc=2"], "ring × CPU"),
        (["strategy=tp", "launch.nproc=2"], "tp × no plan"),
        (["strategy=dp"], "images × dp"),
        (
            [f"algorithm={{kind: ppo, {REWARDS}}}", "data.max_length=256"],
            "images × the algorithm",
        ),
        (
            [
                f"algorithm={{kind: grpo, {REWARDS}, generator: {{kind: continuous}}}}",
                "data.max_length=256",
            ],
            "images × generator=continuous",
        ),
        (["model.freeze=[model.visul]"], "did you mean model.visual?"),
        (["model.freeze=[model, lm_head]"], "nothing stays trainable"),
        (["model.freeze=[model.visual]", "adapter=lora"], "frozen parts × an adapter"),
        (["data.train=[{kind: file, path: bad.jsonl}]"], "bad.jsonl:1: image"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, overrides: list[str], line: str) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "<image>"},
            {"role": "assistant", "content": "x"},
        ],
        "images": ["gone.png"],
    }
    write_rows(tmp_path / "bad.jsonl", [row])
    path = config(tmp_path)
    with pytest.raises(DrumlineError) as caught:
        make_plan(Request(load(path, overrides)), on_progress=lambda *_: None)
    assert caught.value.exit_code == 2
    said = caught.value.line()
    assert line in said
    assert "\n" not in said
