"""Tiny random vision-language models of each family, with a tokenizer and an image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import (
    VISION_SPECIAL,
    let_states_last,
    random_model,
    save_model,
    tiny_tokenizer,
    tiny_vision_dir,
)

# Each tower sees tiles of 16 × 16 pixels in patches of 4 × 4, and has 4 tokens for one.
SIDE = 16
GEMMA = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
INTERN = ["<img>", "</img>", "<IMG_CONTEXT>"]
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SMOL = ["<fake_token_around_image>", "<global-img>", "<image>", *PLACES]
ONE = ["<image>", "<video>"]
GLM = [f"<|{place}_of_{kind}|>" for kind in ("image", "video") for place in ("begin", "end")]
GLM += ["<|image|>", "<|video|>"]
SPECIAL = {
    "gemma3": GEMMA,
    "internvl": INTERN,
    "smolvlm": SMOL,
    "idefics3": SMOL,
    "llava_onevision": ONE,
    "glm4v": GLM,
    "glm4v_moe": GLM,
}
# What a chat template writes for an image.
MARKS = {
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "llava_onevision": "<image>",
    "glm4v": "<|image|>",
    "glm4v_moe": "<|image|>",
}
# Sizes of which LLaVA-OneVision chooses one for an image.
PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}
# Without the head that pools an image, which no language model reads.
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# Half of each head is turned.
HALF_ROPE = {**M_ROPE, "partial_rotary_factor": 0.5}
# Gated DeltaNet in one of two layers, and a mixture with a shared expert.
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**HALF_ROPE, "mrope_interleaved": True},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def template(mark: str) -> str:
    """Return a chat template that writes `mark` for an image, and trims texts as Gemma's does."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ '{mark}' }}}}"
        "{% else %}{{ part['text'] | trim }}{% endif %}"
        "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def family_config(model_type: str, ids: dict[str, int], text: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config. `ids`: special tokens; `text`: the section of the language."""
    if model_type == "gemma3":
        return {
            "text_config": {**text, "sliding_window": 8, "query_pre_attn_scalar": 8},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "image_token_id": ids["<image_soft_token>"],
        }
    if model_type == "internvl":
        return {
            "text_config": {**text, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [SIDE, SIDE], "patch_size": [4, 4]},
            "downsample_ratio": 0.5,
            "image_token_id": ids["<IMG_CONTEXT>"],
        }
    if model_type in ("smolvlm", "idefics3"):
        return {
            "text_config": {**text, "model_type": "llama"},
            "vision_config": TOWER,
            "scale_factor": 2,
            "image_token_id": ids["<image>"],
        }
    if model_type == "llava_onevision":
        return {
            "text_config": {**text, "model_type": "qwen2"},
            "vision_config": SIGLIP,
            "image_grid_pinpoints": PINPOINTS,
            # So that the features of four tiles are scaled down.
            "vision_aspect_ratio": "anyres_max_2",
            "image_token_index": ids["<image>"],
            "video_token_index": ids["<video>"],
        }
    if model_type in ("glm4v", "glm4v_moe"):
        return glm_config(model_type, ids, text)
    tower: dict[str, Any] = {"depth": 2, "patch_size": 4, "temporal_patch_size": 2}
    if model_type == "qwen2_vl":
        tower |= {"embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    elif model_type in ("qwen3_5", "qwen3_5_moe"):
        text = {**text, **DELTA}
        if model_type == "qwen3_5_moe":
            text |= EXPERTS
        tower |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
        }
    else:
        tower |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        }
    return {
        "text_config": {"rope_parameters": M_ROPE, **text},
        "vision_config": tower,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def glm_config(model_type: str, ids: dict[str, int], text: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a GLM's config. Its mixture has a dense first layer."""
    section = {**text, "head_dim": 16, "rope_parameters": HALF_ROPE}
    if model_type == "glm4v_moe":
        section |= GLM_EXPERTS
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "image_size": SIDE,
        "patch_size": 4,
        "out_hidden_size": 32,
        # Products of smaller weights would be next to nothing beside the stream.
        "initializer_range": 0.2,
    }
    return {
        "text_config": section,
        "vision_config": tower,
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
    }


def family_processor(model_type: str) -> Any:
    """Return the image processor of a tiny model."""
    import transformers as hf
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    square = {"height": SIDE, "width": SIDE}
    if model_type == "gemma3":
        return hf.Gemma3ImageProcessorPil(size=square)
    if model_type == "internvl":
        return hf.GotOcr2ImageProcessorPil(size=square, max_patches=4)
    if model_type == "llava_onevision":
        return hf.LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=PINPOINTS)
    if model_type in ("smolvlm", "idefics3"):
        classes = {"smolvlm": hf.SmolVLMImageProcessorPil, "idefics3": hf.Idefics3ImageProcessorPil}
        edges = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
        return classes[model_type](**edges)
    if model_type in ("glm4v", "glm4v_moe"):
        # Areas of two frames.
        areas = {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 24 * 24}
        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": areas}
        return Glm4vImageProcessorPil(**sizes)
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=24 * 24
    )


def tiny_family_dir(path: Path, model_type: str, seed: int = 0) -> Path:
    """Save a random model of a family in fp32 to `path`, with all that belongs to it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    special = SPECIAL.get(model_type, VISION_SPECIAL)
    mark = MARKS.get(model_type, "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = tiny_tokenizer(chat_template=template(mark))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, **family_config(model_type, ids, text))
    config.pad_token_id = tokenizer.pad_token_id
    model = random_model(AutoModelForImageTextToText, config, seed)
    let_states_last(model)
    save_model(path, model, tokenizer)
    family_processor(model_type).save_pretrained(path)
    return path


def tiny_vision_judge_dir(path: Path, layers: int = 2) -> Path:
    """Save a Qwen3-VL with a random head of one score a sequence to `path`, to train or to judge."""
    from drumline.config.model import ModelConfig
    from drumline.models.build import build_model

    folder = str(tiny_vision_dir(path, layers=layers))
    judge = build_model(folder, ModelConfig(id=folder), seed=1, head="score")
    judge.save_pretrained(path)
    return path
