"""What a real vLLM 0.32 on the CPU computes with exports of models trained here: the log-probs and
embeddings of transformers, for mixtures, hybrids, images and embedding models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from drumline.rl.sampler_check import expected_rounding_gap
from tests.harness import (
    Sections,
    run_drumline,
    vision_rows,
    write_config,
    write_rows,
)
from tests.servers.offline import NEW_TOKENS, ask_vllm
from tests.servers.server import MOST_RANK, NEEDS_VLLM
from tests.tiny import (
    let_states_last,
    read_model,
    tiny_model_dir,
    tiny_tokenizer,
    tiny_vision_dir,
)

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1500), NEEDS_VLLM]
# The most that rounding explains between two log-probs of a token, in nats.
ROUNDING = {name: expected_rounding_gap(name) for name in ("fp32", "bf16")}
VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# vLLM 0.32 fails at gated DeltaNet over one token alone, so each text has more.
TEXTS = [
    "What is two plus three?",
    "one two three",
    "Every rank keeps in step with the drum: one, two",
    "Rome",
]
# vLLM's kernels for a CPU take no heads below 32, and experts by multiples of 32.
WIDE: Sections = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
EXPERTS: Sections = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPES: dict[str, Sections] = {
    "qwen3_moe": {**WIDE, **EXPERTS, "num_experts": 4},
    # vLLM does not tie its head.
    "gpt_oss": {
        **WIDE,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {
        **WIDE,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 256,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "qwen3_5_text": {
        **WIDE,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}
LORA: Sections = {"adapter": {"kind": "lora", "r": 8, "alpha": 32, "targets": "all-linear"}}
# vLLM's gated DeltaNet for a CPU computes in bf16 alone.
FAMILIES = [
    ("qwen3_moe", "fp32", LORA),
    ("gpt_oss", "fp32", LORA),
    ("falcon_h1", "fp32", {}),
    ("qwen3_5_text", "bf16", {}),
]


@dataclass
class Trained:
    """The folders of a model before training, of its run and of its export."""

    model: Path
    run: Path
    export: Path


def model_dir(folder: Path, kind: str) -> Path:
    """Save a random model of a family, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SHAPES[kind], **ids})
        model = AutoModelForCausalLM.from_config(config)
    if kind == "qwen3_5_text":
        let_states_last(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, dtype: str = "fp32", **sections: Any) -> Trained:
    """Train four steps by the command line, and export the result."""
    config = write_config(folder, model, **sections)
    return train_and_export(folder, model, config, dtype)


def train_and_export(folder: Path, model: Path, config: Path, dtype: str) -> Trained:
    """Run a config of `folder`, and export its best checkpoint."""
    trained = Trained(model, folder / "run", folder / "export")
    run_drumline("train", config)
    run_drumline("export", trained.run, "--to", trained.export, "--dtype", dtype)
    return trained


def prompts() -> list[Sections]:
    """Return the texts as vLLM is asked about them: no text has an image."""
    tokenizer = tiny_tokenizer()
    return [{"tokens": tokenizer.encode(text), "images": []} for text in TEXTS]


@torch.no_grad()
def mean_gap(model: Any, answers: list[Sections], **inputs: Any) -> float:
    """Return the mean of |log p_vLLM − log p_model| over all tokens after the first, in nats."""
    differences = []
    for answer in answers:
        ids = torch.tensor([answer["tokens"]])
        log_probs = model(input_ids=ids, **inputs).logits[0].float().log_softmax(-1)
        expected = log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        differences.append((torch.tensor(answer["log_probs"]) - expected).abs())
    return float(torch.cat(differences).mean())


@pytest.mark.parametrize(
    ("kind", "dtype", "sections"), FAMILIES, ids=[each[0] for each in FAMILIES]
)
def test_vllm_computes_what_was_trained(
    tmp_path: Path, kind: str, dtype: str, sections: Sections
) -> None:
    """Adapters are merged, those over experts too."""
    trained = train(tmp_path, model_dir(tmp_path / "model", kind), dtype, **sections)
    options = {"dtype": VLLM_DTYPES[dtype]}
    answers = ask_vllm("completions", trained.export, tmp_path / "vllm", options, prompts=prompts())

    assert len(answers) == len(TEXTS)
    assert mean_gap(read_model(trained.export), answers) < ROUNDING[dtype]

    # The weights before training would have shown.
    assert mean_gap(read_model(trained.model), answers) > 2 * ROUNDING[dtype]


def expert_changes(trained: Trained) -> dict[str, Tensor]:
    """Return by how much training changed each matrix of the experts, under vLLM's names."""
    before = read_model(trained.model).state_dict()
    after = read_model(trained.export).state_dict()
    changes = {}
    for name, weight in after.items():
        layer, _, parameter = name.rpartition(".")
        change = weight - before[name]
        if parameter == "gate_up_proj":
            changes[f"{layer}.gate"], changes[f"{layer}.up"] = change.chunk(2, 1)
        elif parameter == "down_proj" and layer.endswith("experts"):
            changes[f"{layer}.down"] = change
    return changes


def test_vllm_gives_an_adapter_s_factors_to_the_right_experts(tmp_path: Path) -> None:
    """It cannot compute with them on a CPU, whose kernels for experts take no adapters."""
    trained = train(tmp_path, model_dir(tmp_path / "model", "qwen3_moe"), **LORA)
    adapter = tmp_path / "adapter"
    run_drumline("export", trained.run, "--to", adapter, "--adapter")
    options = {
        "enable_lora": True,
        "max_lora_rank": MOST_RANK,
        "enable_mixed_moe_lora_format": True,
    }
    products = tmp_path / "products.safetensors"
    layers = ask_vllm(
        "expert_factors",
        trained.model,
        tmp_path / "vllm",
        options,
        adapter=str(adapter),
        products=str(products),
    )
    loaded = load_file(products)
    expected = expert_changes(trained)

    assert len(layers) == SHAPES["qwen3_moe"]["num_hidden_layers"]
    assert loaded.keys() == expected.keys()

    for name, change in expected.items():
        assert change.abs().max() > 1e-3, name
        # A difference of two weights that are rounded in fp32.
        torch.testing.assert_close(loaded[name], change, rtol=1e-5, atol=1e-6)


VIDEOS: Sections = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 8 * 8 * 2, "longest_edge": 24 * 24 * 4},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def test_vllm_sees_the_images_of_a_vision_language_model(tmp_path: Path) -> None:
    model = tiny_vision_dir(tmp_path / "model", head_dim=32)
    # Published models have it, and vLLM reads it also where there are no videos.
    (model / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    config = write_config(tmp_path, model, data={"eval": [], "packing": False, "max_length": 256})
    write_rows(tmp_path / "train.jsonl", vision_rows(tmp_path, 12))
    trained = train_and_export(tmp_path, model, config, "fp32")

    paths = sorted((tmp_path / "images").iterdir())[:1]
    tokenizer = tiny_tokenizer()
    read = AutoConfig.from_pretrained(trained.export)
    image_id = read.image_token_id
    question = tokenizer.encode("What is in the image?")
    image = [read.vision_start_token_id, image_id, read.vision_end_token_id]
    asked = [{"tokens": [*image, *question], "images": [str(path) for path in paths]}]
    answers = ask_vllm("completions", trained.export, tmp_path / "vllm", prompts=asked)
    tokens = torch.tensor([answers[0]["tokens"]])
    processor = AutoImageProcessor.from_pretrained(trained.export)
    pixels = processor([Image.open(path) for path in paths], return_tensors="pt")
    inputs = {**pixels, "mm_token_type_ids": (tokens == image_id).int()}

    assert (tokens == image_id).sum() == pixels["image_grid_thw"].prod() // 4
    assert tokens.shape[1] == len(question) + 2 + (tokens == image_id).sum() + NEW_TOKENS

    seeing = AutoModelForImageTextToText.from_pretrained(trained.export)

    assert mean_gap(seeing, answers, **inputs) < ROUNDING["fp32"]

    # Another image would have shown.
    black = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}

    assert mean_gap(seeing, answers, **black) > 2 * ROUNDING["fp32"]


@torch.no_grad()
def embeddings_of(folder: Path, asked: list[Sections]) -> Tensor:
    """Return the normalised hidden states of the last tokens, float[N, D]."""
    model = AutoModel.from_pretrained(folder)
    rows = []
    for prompt in asked:
        states = model(input_ids=torch.tensor([prompt["tokens"]])).last_hidden_state
        rows.append(functional.normalize(states[0, -1], dim=0))
    return torch.stack(rows)


def test_vllm_makes_the_embeddings_that_were_trained(tmp_path: Path) -> None:
    """The files for sentence-transformers tell it how to pool."""
    model = tiny_model_dir(tmp_path / "model", hidden=128)
    algorithm = {"kind": "embed", "pooling": "last", "negatives": 1}
    trained = train(tmp_path, model, algorithm=algorithm, data={"packing": False})
    asked = prompts()
    answers = ask_vllm(
        "embeddings", trained.export, tmp_path / "vllm", {"runner": "pooling"}, prompts=asked
    )
    expected = embeddings_of(trained.export, asked)

    # Of unit vectors, so an error of rounding is at most that of a few thousand sums.
    torch.testing.assert_close(torch.tensor(answers), expected, rtol=0, atol=1e-5)

    assert (torch.tensor(answers) - embeddings_of(trained.model, asked)).abs().max() > 1e-3
