"""Shapes of well-known models that look at images: Qwen2.5-VL, InternVL, SmolVLM and LLaVA-OneVision."""

from __future__ import annotations

from typing import Any

from drumline.models.known import Known, language_model_with_tower, with_sizes

# Sizes of language models, in the order of `known.SIZES`.
_QWEN25 = {
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "32b": (5120, 27648, 64, 40, 8),
    "72b": (8192, 29568, 80, 64, 8),
}
_QWEN3 = {
    "1b": (1024, 3072, 28, 16, 8),
    "2b": (2048, 6144, 28, 16, 8),
    "4b": (2560, 9728, 36, 32, 8),
    "8b": (4096, 12288, 36, 32, 8),
    "14b": (5120, 17408, 40, 40, 8),
}
# Vision towers of SmolVLM: SigLIP of 400 and of 93 million parameters.
_SIGLIP_LARGE = with_sizes((1152, 4304, 27, 16), image_size=384, patch_size=14)
_SIGLIP_BASE = with_sizes((768, 3072, 12, 12), image_size=512, patch_size=16)


def vision_models() -> dict[str, Known]:
    """Return the known models of these families, by their short names."""
    models = {}
    for size in _QWEN25:
        models[f"qwen2.5-vl-{size}"] = _qwen25_vl(size)
    for size in _QWEN3:
        models[f"internvl3.5-{size}"] = _internvl(size)
    models["smolvlm2-2.2b"] = _smolvlm(
        "SmolVLM2-2.2B-Instruct", (2048, 8192, 24, 32, 32), _SIGLIP_LARGE, scale=3
    )
    models["smolvlm2-500m"] = _smolvlm(
        "SmolVLM2-500M-Video-Instruct", (960, 2560, 32, 15, 5), _SIGLIP_BASE, scale=4
    )
    models["smolvlm2-256m"] = _smolvlm(
        "SmolVLM2-256M-Video-Instruct", (576, 1536, 30, 9, 3), _SIGLIP_BASE, scale=4
    )
    models["llava-onevision-0.5b"] = _llava_onevision("0.5b", (896, 4864, 24, 14, 2), 152000, True)
    models["llava-onevision-7b"] = _llava_onevision("7b", _QWEN25["7b"], 152128, False)
    return models


def _qwen25_vl(size: str) -> Known:
    """Return a Qwen2.5-VL. `size`: a key of _QWEN25."""
    text = with_sizes(
        _QWEN25[size],
        model_type="qwen2_5_vl_text",
        vocab_size=151936 if size == "3b" else 152064,
        max_position_embeddings=128000,
    )
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420 if size in ("3b", "7b") else 3456,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
    }
    values = language_model_with_tower("qwen2_5_vl", text, vision, tie_word_embeddings=size == "3b")
    return Known(f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct", values)


def _internvl(size: str) -> Known:
    """Return an InternVL 3.5 with the smaller tower, and a Qwen3. `size`: a key of _QWEN3.

    The head of the language model is never its embedding, unlike in the small Qwen3.
    """
    text = with_sizes(
        _QWEN3[size],
        model_type="qwen3",
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    )
    # transformers' own defaults are the sizes of the tower.
    vision = {"attention_bias": True}
    values = language_model_with_tower("internvl", text, vision, tie_word_embeddings=False)
    return Known(f"OpenGVLab/InternVL3_5-{size.upper()}-HF", values)


def _smolvlm(name: str, sizes: tuple[int, ...], vision: dict[str, Any], scale: int) -> Known:
    """Return a SmolVLM2.

    `sizes`: of the language model, a SmolLM2, in the order of `known.SIZES`. `scale`: so many
    patches in each direction become one token.
    """
    text = with_sizes(
        sizes, model_type="llama", head_dim=64, vocab_size=49280, max_position_embeddings=8192
    )
    values = language_model_with_tower("smolvlm", text, vision)
    return Known(f"HuggingFaceTB/{name}", values | {"scale_factor": scale})


def _llava_onevision(size: str, sizes: tuple[int, ...], vocabulary: int, tied: bool) -> Known:
    """Return a LLaVA-OneVision, whose language model is a Qwen2.

    `sizes`: of the language model, in the order of `known.SIZES`. `tied`: its head is the embedding.
    """
    text = with_sizes(
        sizes, model_type="qwen2", vocab_size=vocabulary, max_position_embeddings=32768
    )
    # SigLIP without its last layer.
    vision = with_sizes(
        (1152, 4304, 26, 16),
        model_type="siglip_vision_model",
        patch_size=14,
        image_size=384,
        vision_use_head=False,
    )
    values = language_model_with_tower("llava_onevision", text, vision, tie_word_embeddings=tied)
    return Known(f"llava-hf/llava-onevision-qwen2-{size}-ov-hf", values)
