"""Tiny random vision-language models whose images are not read, as they are published: with a tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import random_model, save_model, tiny_tokenizer
from tests.tiny_vision import TEXT, TOWER

# Its tower reads patches of 4 × 4 pixels, four to a token.
LLAMA4_TOWER: dict[str, Any] = {
    **TOWER,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "pixel_shuffle_ratio": 0.5,
}
# Tokens of images and other media → the keys that a config has for them.
MARKS = {
    "<image>": ("image_token_id", "image_token_index"),
    "<video>": ("video_token_id",),
    "<audio>": ("audio_token_id",),
    "<image_start>": ("image_start_token_id", "boi_token_id", "boa_token_id"),
    "<image_end>": ("image_end_token_id", "eoi_token_id", "eoa_token_id"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama4": {
        "text_config": {
            **TEXT,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "tie_word_embeddings": False,
        },
        "vision_config": LLAMA4_TOWER,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "ministral3"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
        "spatial_merge_size": 2,
    },
    "gemma4": {
        "text_config": {
            **TEXT,
            "global_head_dim": 8,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {**TOWER, "head_dim": 16, "num_key_value_heads": 2},
        "audio_config": None,
    },
    "kimi_k25": {
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "tie_word_embeddings": False,
        },
        "vision_config": {**TOWER, "merge_kernel_size": [2, 2]},
        "tie_word_embeddings": False,
    },
    "mllama": {
        "text_config": {
            **TEXT,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {
            **TOWER,
            "num_global_layers": 1,
            "attention_heads": 2,
            "num_hidden_layers": 2,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [1],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    },
    # The class of its language model alone scales its logits.
    "cohere2_vision": {
        "text_config": {**TEXT, "model_type": "cohere2", "logit_scale": 0.25},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
    },
}


def tiny_published_dir(path: Path, model_type: str, seed: int = 0) -> Path:
    """Save a random model in fp32 to `path`, with its tower and a tokenizer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tiny_tokenizer()
    # No text has these: the whole model reads them as something else.
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    values = CONFIGS[model_type]
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**values["text_config"], **ends, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(model_type, **{**values, "text_config": text})
    for token, keys in MARKS.items():
        for key in keys:
            if hasattr(config, key):
                setattr(config, key, tokenizer.convert_tokens_to_ids(token))
    model = random_model(AutoModelForImageTextToText, config, seed)
    return save_model(path, model, tokenizer)
