"""Shapes of well-known public models, for plans without the hub.

Each row is from the model's config.json on the hub. Tests compare the numbers of parameters with
the published ones. `planner.sizes` reads known_sizes.txt, the planner's numbers for these models.
Any other model is planned from its folder, from the hub, or by `model.shape`.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from drumline.config.model import ModelConfig, ModelShape
from drumline.errors import ModelError
from drumline.models.classes import ENCODER_DECODERS
from drumline.models.known import Known, language_model_with_tower, read_rows, with_sizes
from drumline.models.known_encoders import WITH_SIZE_BASE, encoder_models
from drumline.models.known_hybrids import hybrid_models
from drumline.models.known_vision import vision_models


def _gemma3(name: str, *sizes: int, head_dim: int) -> Known:
    """Return a Gemma 3 with a SigLIP tower for images of 896 pixels.

    `sizes`: of the language model, in the order of SIZES.
    """
    text = with_sizes(
        sizes,
        model_type="gemma3_text",
        head_dim=head_dim,
        vocab_size=262208,
        max_position_embeddings=131072,
    )
    vision = with_sizes(
        (1152, 4304, 27, 16),
        model_type="siglip_vision_model",
        patch_size=14,
        image_size=896,
        vision_use_head=False,
    )
    return Known(f"google/{name}-pt", language_model_with_tower("gemma3", text, vision))


# The towers of Qwen3-VL and Qwen3.5, by their depth: width, width of the feed-forward part, heads.
_QWEN_TOWERS = {12: (768, 3072, 12), 24: (1024, 4096, 16), 27: (1152, 4304, 16)}


def _qwen_tower(depth: int, out_hidden_size: int, **more: Any) -> dict[str, Any]:
    """Return the values of a Qwen's vision tower. `out_hidden_size`: width of the language model."""
    width, intermediate, heads = _QWEN_TOWERS[depth]
    return {
        **more,
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "out_hidden_size": out_hidden_size,
        "patch_size": 16,
    }


def _qwen3_vl(name: str, *sizes: int, small: bool) -> Known:
    """Return a Qwen3-VL.

    `sizes`: of the language model, in the order of SIZES. `small`: it has the smaller tower, and a
    head tied to the embedding.
    """
    text = with_sizes(
        sizes,
        model_type="qwen3_vl_text",
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=262144,
    )
    vision = _qwen_tower(24 if small else 27, sizes[0], model_type="qwen3_vl")
    vision["deepstack_visual_indexes"] = [5, 11, 17] if small else [8, 16, 24]
    values = language_model_with_tower("qwen3_vl", text, vision, tie_word_embeddings=small)
    return Known(name, values)


def _qwen3_vl_moe(name: str, *sizes: int) -> Known:
    """Return a Qwen3-VL whose language model is a mixture of 128 experts, of which 8 take a token.

    `sizes`: of the language model, in the order of SIZES, and the width of an expert.
    """
    *dense, expert = sizes
    text = with_sizes(
        dense,
        model_type="qwen3_vl_moe_text",
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=262144,
    )
    text |= {"moe_intermediate_size": expert, "num_experts": 128, "num_experts_per_tok": 8}
    vision = _qwen_tower(27, dense[0], model_type="qwen3_vl_moe")
    vision["deepstack_visual_indexes"] = [8, 16, 24]
    values = language_model_with_tower("qwen3_vl_moe", text, vision, tie_word_embeddings=False)
    return Known(name, values)


def _qwen35(name: str, text: dict[str, Any], value_heads: int, tower: int, tied: bool) -> Known:
    """Return a Qwen3.5, with Gated DeltaNet in three of four layers and attention in the fourth.

    `text`: values of the language model, without those that all sizes share. `value_heads`: of
    the DeltaNet. `tower`: a key of _QWEN_TOWERS. `tied`: the head is the embedding.
    """
    kind = "qwen3_5"
    if "num_experts" in text:
        kind = "qwen3_5_moe"
    common = {
        "model_type": f"{kind}_text",
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    }
    vision = _qwen_tower(tower, text["hidden_size"])
    values = language_model_with_tower(kind, common | text, vision, tie_word_embeddings=tied)
    return Known(f"Qwen/{name}", values)


def _qwen35_moe(name: str, *sizes: int, experts: int, per_token: int, value_heads: int) -> Known:
    """Return a Qwen3.5 whose feed-forward parts are mixtures with a shared expert.

    `sizes`: width, layers, heads, heads of keys and values, width of an expert.
    """
    hidden, layers, heads, kv_heads, expert = sizes
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": expert,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
    }
    return _qwen35(name, text, value_heads, tower=27, tied=False)


def _gemma4(name: str, *sizes: int, global_kv_heads: int, experts: int = 0) -> Known:
    """Return a Gemma 4 with a tower for images.

    `sizes`: of the language model, in the order of SIZES. `global_kv_heads`: heads of keys and
    values of each sixth layer, which sees the whole row. `experts`: experts of a mixture beside
    each feed-forward part, of width 704, of which 8 take a token.
    """
    text = with_sizes(
        sizes,
        max_position_embeddings=262144,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=global_kv_heads,
    )
    if experts:
        text |= {"enable_moe_block": True, "num_experts": experts}
        text |= {"top_k_experts": 8, "moe_intermediate_size": 704}
    vision = with_sizes((1152, 4304, 27, 16, 16), head_dim=72, patch_size=16, standardize=True)
    return _gemma4_with_towers(name, text, vision, audio=None)


def _gemma4_small(
    name: str, *sizes: int, each: int, shared: int, is_double_wide: bool = False
) -> Known:
    """Return a small Gemma 4 with towers for images and sound.

    `sizes`: of the language model, in the order of SIZES. `each`: one layer of this many sees the
    whole row. `shared`: so many of the last layers take keys and values from layers before them.
    `is_double_wide`: their feed-forward parts are twice as wide.
    """
    layers = sizes[2]
    layer_types = ["sliding_attention"] * layers
    for index in range(each - 1, layers, each):
        layer_types[index] = "full_attention"
    text = with_sizes(
        sizes,
        max_position_embeddings=131072,
        sliding_window=512,
        layer_types=layer_types,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=is_double_wide,
    )
    # transformers' own defaults are the sizes of both towers.
    return _gemma4_with_towers(name, text, vision={}, audio={"model_type": "gemma4_audio"})


def _gemma4_with_towers(
    name: str, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any] | None
) -> Known:
    """Return a Gemma 4.

    `text`, `vision`, `audio`: values of its parts, without those that all sizes share.
    """
    common = {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "vocab_size": 262144,
        "final_logit_softcapping": 30.0,
    }
    values = language_model_with_tower(
        "gemma4", common | text, {"model_type": "gemma4_vision"} | vision
    )
    return Known(f"google/{name}", values | {"audio_config": audio})


def _mistral3(name: str, text_type: str, *sizes: int, positions: int, tied: bool = False) -> Known:
    """Return a Mistral 3 or a Ministral 3 with a Pixtral tower.

    `text_type`: model_type of the language model. `sizes`: its, in the order of SIZES.
    """
    text = with_sizes(
        sizes,
        model_type=text_type,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=positions,
        sliding_window=None,
    )
    vision = with_sizes(
        (1024, 4096, 24, 16),
        model_type="pixtral",
        patch_size=14,
        image_size=1540,
    )
    values = language_model_with_tower("mistral3", text, vision, tie_word_embeddings=tied)
    return Known(f"mistralai/{name}", values)


def _nemotron3(name: str, pattern: str, **more: int) -> Known:
    """Return a Nemotron 3, whose blocks are Mamba (M), mixtures (E) and attention (*).

    `more`: values of its config, besides those that all sizes share.
    """
    values: dict[str, Any] = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    }
    return Known(f"nvidia/{name}", values | more)


def _llama4(name: str, experts: int, each: int, positions: int) -> Known:
    """Return a Llama 4. `each`: one layer of this many is a mixture of experts."""
    text = with_sizes(
        (5120, 8192, 48, 40, 8),
        model_type="llama4_text",
        head_dim=128,
        vocab_size=202048,
        max_position_embeddings=positions,
    )
    text |= {
        "intermediate_size_mlp": 16384,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": each,
    }
    text |= {"use_qk_norm": each == 1}
    vision = with_sizes(
        (1408, 5632, 34, 16), model_type="llama4_vision_model", image_size=336, patch_size=14
    )
    vision |= {"vision_output_dim": 4096, "projector_input_dim": 4096, "projector_output_dim": 4096}
    return Known(f"meta-llama/{name}", language_model_with_tower("llama4", text, vision))


# In the order of SIZES.
_MISTRAL_SMALL = (5120, 32768, 40, 32, 8)
_GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}

# A new line needs a line in known_sizes.txt, too, which has the sizes that the planner would count:
# `python scripts/known_sizes.py` writes them all.
_TABLE = """
[llama]
llama-2-7b    meta-llama/Llama-2-7b-hf    4096 11008 32  32 32 32000  4096
llama-2-13b   meta-llama/Llama-2-13b-hf   5120 13824 40  40 40 32000  4096
llama-2-70b   meta-llama/Llama-2-70b-hf   8192 28672 80  64  8 32000  4096
llama-3-8b    meta-llama/Meta-Llama-3-8B  4096 14336 32  32  8 128256 8192
llama-3-70b   meta-llama/Meta-Llama-3-70B 8192 28672 80  64  8 128256 8192
llama-3.1-8b  meta-llama/Llama-3.1-8B     4096 14336 32  32  8 128256 131072
llama-3.1-70b meta-llama/Llama-3.1-70B    8192 28672 80  64  8 128256 131072
llama-3.1-405b meta-llama/Llama-3.1-405B  16384 53248 126 128 8 128256 131072
llama-3.3-70b meta-llama/Llama-3.3-70B-Instruct 8192 28672 80 64 8 128256 131072
tinyllama-1.1b TinyLlama/TinyLlama-1.1B-Chat-v1.0 2048 5632 22 32 4 32000 2048
[llama tie_word_embeddings=true]
llama-3.2-1b  meta-llama/Llama-3.2-1B       2048 8192 16 32 8 128256 131072 head_dim=64
llama-3.2-3b  meta-llama/Llama-3.2-3B       3072 8192 28 24 8 128256 131072 head_dim=128
smollm2-135m  HuggingFaceTB/SmolLM2-135M    576  1536 30 9  3 49152  8192
smollm2-360m  HuggingFaceTB/SmolLM2-360M    960  2560 32 15 5 49152  8192
smollm2-1.7b  HuggingFaceTB/SmolLM2-1.7B    2048 8192 24 32 32 49152 8192
[qwen2 tie_word_embeddings=true]
qwen2.5-0.5b Qwen/Qwen2.5-0.5B 896  4864 24 14 2 151936 32768
qwen2.5-1.5b Qwen/Qwen2.5-1.5B 1536 8960 28 12 2 151936 131072
qwen2.5-3b   Qwen/Qwen2.5-3B   2048 11008 36 16 2 151936 32768
[qwen2 tie_word_embeddings=false]
qwen2.5-7b   Qwen/Qwen2.5-7B  3584 18944 28 28 4 152064 131072
qwen2.5-14b  Qwen/Qwen2.5-14B 5120 13824 48 40 8 152064 131072
qwen2.5-32b  Qwen/Qwen2.5-32B 5120 27648 64 40 8 152064 131072
qwen2.5-72b  Qwen/Qwen2.5-72B 8192 29568 80 64 8 152064 131072
[qwen3 head_dim=128 tie_word_embeddings=true]
qwen3-0.6b Qwen/Qwen3-0.6B 1024 3072 28 16 8 151936 40960
qwen3-embedding-0.6b Qwen/Qwen3-Embedding-0.6B 1024 3072 28 16 8 151669 32768
qwen3-1.7b Qwen/Qwen3-1.7B 2048 6144 28 16 8 151936 40960
qwen3-4b   Qwen/Qwen3-4B   2560 9728 36 32 8 151936 40960
qwen3-4b-2507 Qwen/Qwen3-4B-Instruct-2507 2560 9728 36 32 8 151936 262144
[qwen3 head_dim=128 tie_word_embeddings=false]
qwen3-8b   Qwen/Qwen3-8B   4096 12288 36 32 8 151936 40960
qwen3-14b  Qwen/Qwen3-14B  5120 17408 40 40 8 151936 40960
qwen3-32b  Qwen/Qwen3-32B  5120 25600 64 64 8 151936 40960
[mistral sliding_window=null]
mistral-7b        mistralai/Mistral-7B-v0.3             4096 14336 32 32 8 32768  32768
mistral-7b-v0.2   mistralai/Mistral-7B-Instruct-v0.2    4096 14336 32 32 8 32000  32768
mistral-7b-v0.1   mistralai/Mistral-7B-v0.1             4096 14336 32 32 8 32000  32768 sliding_window=4096
mistral-nemo-12b  mistralai/Mistral-Nemo-Base-2407      5120 14336 40 32 8 131072 131072 head_dim=128
mistral-small-24b mistralai/Mistral-Small-24B-Base-2501 5120 32768 40 32 8 131072 32768  head_dim=128
[mixtral num_local_experts=8 num_experts_per_tok=2]
mixtral-8x7b  mistralai/Mixtral-8x7B-v0.1  4096 14336 32 32 8 32000 32768
mixtral-8x22b mistralai/Mixtral-8x22B-v0.1 6144 16384 56 48 8 32000 65536
[qwen3_moe head_dim=128 num_experts=128 num_experts_per_tok=8 tie_word_embeddings=false]
qwen3-30b-a3b   Qwen/Qwen3-30B-A3B   2048 6144  48 32 4 151936 40960 moe_intermediate_size=768
qwen3-235b-a22b Qwen/Qwen3-235B-A22B 4096 12288 94 64 4 151936 40960 moe_intermediate_size=1536
qwen3-30b-a3b-2507   Qwen/Qwen3-30B-A3B-Instruct-2507   2048 6144  48 32 4 151936 262144 moe_intermediate_size=768
qwen3-235b-a22b-2507 Qwen/Qwen3-235B-A22B-Instruct-2507 4096 12288 94 64 4 151936 262144 moe_intermediate_size=1536
[gemma]
gemma-2b google/gemma-2b 2048 16384 18 8  1  256000 8192 head_dim=256
gemma-7b google/gemma-7b 3072 24576 28 16 16 256000 8192 head_dim=256
[gemma2]
gemma-2-2b  google/gemma-2-2b  2304 9216  26 8  4  256000 8192 head_dim=256
gemma-2-9b  google/gemma-2-9b  3584 14336 42 16 8  256000 8192 head_dim=256
gemma-2-27b google/gemma-2-27b 4608 36864 46 32 16 256000 8192 head_dim=128
[gemma3_text]
gemma-3-1b google/gemma-3-1b-pt 1152 6912 26 4 1 262144 32768 head_dim=256
[phi]
phi-2 microsoft/phi-2 2560 10240 32 32 32 51200 2048
[phi3]
phi-3-mini   microsoft/Phi-3-mini-4k-instruct 3072 8192  32 32 32 32064  4096
phi-3.5-mini microsoft/Phi-3.5-mini-instruct  3072 8192  32 32 32 32064  4096
phi-4        microsoft/phi-4                  5120 17920 40 40 10 100352 16384
[phi3 tie_word_embeddings=true]
phi-4-mini   microsoft/Phi-4-mini-instruct    3072 8192  32 24 8  200064 131072
[olmo2]
olmo-2-7b  allenai/OLMo-2-1124-7B  4096 11008 32 32 32 100352 4096
olmo-2-13b allenai/OLMo-2-1124-13B 5120 13824 40 40 40 100352 4096
[olmo3]
olmo-3-7b  allenai/Olmo-3-1025-7B  4096 11008 32 32 32 100278 65536
olmo-3-32b allenai/Olmo-3-1125-32B 5120 27648 64 40 8  100278 65536
olmo-3.1-32b allenai/Olmo-3.1-32B-Instruct 5120 27648 64 40 8 100278 65536
[smollm3 tie_word_embeddings=true]
smollm3-3b HuggingFaceTB/SmolLM3-3B 2048 11008 36 16 4 128256 65536
[glm4_moe head_dim=128 attention_bias=true num_experts_per_tok=8]
glm-4.5-air zai-org/GLM-4.5-Air 4096 10944 46 96 8 151552 131072 moe_intermediate_size=1408 n_routed_experts=128
[glm4_moe head_dim=128 attention_bias=true num_experts_per_tok=8 n_routed_experts=160 first_k_dense_replace=3 use_qk_norm=true]
glm-4.5 zai-org/GLM-4.5 5120 12288 92 96 8 151552 131072 moe_intermediate_size=1536
glm-4.6 zai-org/GLM-4.6 5120 12288 92 96 8 151552 202752 moe_intermediate_size=1536
glm-4.7 zai-org/GLM-4.7 5120 12288 92 96 8 151552 202752 moe_intermediate_size=1536
[minimax_m2 head_dim=128 num_local_experts=256 num_experts_per_tok=8]
minimax-m2.5 MiniMaxAI/MiniMax-M2.5 3072 1536 62 48 8 200064 196608
minimax-m2   MiniMaxAI/MiniMax-M2   3072 1536 62 48 8 200064 196608
minimax-m2.7 MiniMaxAI/MiniMax-M2.7 3072 1536 62 48 8 200064 204800
[gpt_oss head_dim=64 num_experts_per_tok=4 sliding_window=128]
gpt-oss-20b  openai/gpt-oss-20b  2880 2880 24 64 8 201088 131072 num_local_experts=32
gpt-oss-120b openai/gpt-oss-120b 2880 2880 36 64 8 201088 131072 num_local_experts=128
"""
# All queries share one head of keys and values. transformers ties the head to the embedding; the file
# on the hub has it once more.
_FALCON_7B = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
}
# transformers' own defaults are its sizes; positions as its config has them. Without the layer that
# predicts two tokens.
_DEEPSEEK_V3 = {"model_type": "deepseek_v3", "max_position_embeddings": 163840}
# Its config is of type kimi_k2, whose code is DeepSeek's.
_KIMI_K2 = with_sizes(
    (7168, 18432, 61, 64, 64),
    model_type="deepseek_v3",
    vocab_size=163840,
    n_routed_experts=384,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
_NEMOTRON_NANO = {
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "mamba_num_heads": 64,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
}
_NEMOTRON_SUPER = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "mamba_num_heads": 128,
    "intermediate_size": 2688,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
}


def _text_models() -> dict[str, Known]:
    """Return the known models of text, by their short names."""
    models = read_rows(_TABLE)
    for name, (width, layers, heads) in _GPT2.items():
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
        models[name] = Known(f"openai-community/{name}", {"model_type": "gpt2", **sizes})
    models["falcon-7b"] = Known("tiiuae/falcon-7b", _FALCON_7B)
    # Brown et al. 2020, table 2.1: its weights are nowhere to be had.
    models["gpt3-175b"] = Known(
        "gpt3-175b",
        {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048},
    )
    versions = {
        "deepseek-v3": "V3-Base",
        "deepseek-v3-0324": "V3-0324",
        "deepseek-v3.1": "V3.1-Base",
        "deepseek-r1": "R1",
        "deepseek-r1-0528": "R1-0528",
    }
    for name, version in versions.items():
        models[name] = Known(f"deepseek-ai/DeepSeek-{version}", _DEEPSEEK_V3)
    models["deepseek-v3.2"] = Known(
        "deepseek-ai/DeepSeek-V3.2", {**_DEEPSEEK_V3, "model_type": "deepseek_v32"}
    )
    models["kimi-k2"] = Known(
        "moonshotai/Kimi-K2-Base", {**_KIMI_K2, "max_position_embeddings": 131072}
    )
    models["kimi-k2-0905"] = Known(
        "moonshotai/Kimi-K2-Instruct-0905", {**_KIMI_K2, "max_position_embeddings": 262144}
    )
    models["nemotron-3-nano-30b-a3b"] = _nemotron3(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        **_NEMOTRON_NANO,
    )
    models["nemotron-3-super-120b-a12b"] = _nemotron3(
        "NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        **_NEMOTRON_SUPER,
    )
    return models


def _qwen35_models() -> dict[str, Known]:
    """Return the known Qwen3.5 models, and those of later versions with their shapes."""
    models = {}
    # Width, width of the feed-forward part, layers, heads, heads of keys and values; then heads of
    # values of the DeltaNet, and the tower.
    dense = {
        "0.8B": ((1024, 3584, 24, 8, 2), 16, 12),
        "2B": ((2048, 6144, 24, 8, 2), 16, 24),
        "4B": ((2560, 9216, 32, 16, 4), 32, 24),
        "9B": ((4096, 12288, 32, 16, 4), 32, 27),
        "27B": ((5120, 17408, 64, 24, 4), 48, 27),
    }
    for size, (sizes, value_heads, tower) in dense.items():
        is_tied = size in ("0.8B", "2B", "4B")
        name = f"Qwen3.5-{size}"
        models[name.lower()] = _qwen35(name, with_sizes(sizes), value_heads, tower, is_tied)
    models["qwen3.5-35b-a3b"] = _qwen35_moe(
        "Qwen3.5-35B-A3B", 2048, 40, 16, 2, 512, experts=256, per_token=8, value_heads=32
    )
    models["qwen3.5-122b-a10b"] = _qwen35_moe(
        "Qwen3.5-122B-A10B", 3072, 48, 32, 2, 1024, experts=256, per_token=8, value_heads=64
    )
    models["qwen3.5-397b-a17b"] = _qwen35_moe(
        "Qwen3.5-397B-A17B", 4096, 60, 32, 2, 1024, experts=512, per_token=10, value_heads=64
    )
    for name, same in (
        ("Qwen3.6-27B", "qwen3.5-27b"),
        ("Qwen3.6-35B-A3B", "qwen3.5-35b-a3b"),
        ("Qwen3.8-27B", "qwen3.5-27b"),
    ):
        models[name.lower()] = Known(f"Qwen/{name}", models[same].values)
    return models


def _models_of_images_and_text() -> dict[str, Known]:
    """Return the known models of text that look at images, by their short names."""
    return {
        "gemma-3-4b": _gemma3("gemma-3-4b", 2560, 10240, 34, 8, 4, head_dim=256),
        "gemma-3-12b": _gemma3("gemma-3-12b", 3840, 15360, 48, 16, 8, head_dim=256),
        "gemma-3-27b": _gemma3("gemma-3-27b", 5376, 21504, 62, 32, 16, head_dim=128),
        "gemma-4-e2b": _gemma4_small(
            "gemma-4-E2B", 1536, 6144, 35, 8, 1, each=5, shared=20, is_double_wide=True
        ),
        "gemma-4-e4b": _gemma4_small("gemma-4-E4B", 2560, 10240, 42, 8, 2, each=6, shared=18),
        "gemma-4-26b-a4b": _gemma4(
            "gemma-4-26B-A4B", 2816, 2112, 30, 16, 8, global_kv_heads=2, experts=128
        ),
        "gemma-4-31b": _gemma4("gemma-4-31B", 5376, 21504, 60, 32, 16, global_kv_heads=4),
        "qwen3-vl-2b": _qwen3_vl("Qwen/Qwen3-VL-2B-Instruct", 2048, 6144, 28, 16, 8, small=True),
        "qwen3-vl-4b": _qwen3_vl("Qwen/Qwen3-VL-4B-Instruct", 2560, 9728, 36, 32, 8, small=True),
        "qwen3-vl-8b": _qwen3_vl("Qwen/Qwen3-VL-8B-Instruct", 4096, 12288, 36, 32, 8, small=False),
        "qwen3-vl-32b": _qwen3_vl(
            "Qwen/Qwen3-VL-32B-Instruct", 5120, 25600, 64, 64, 8, small=False
        ),
        "qwen3-vl-30b-a3b": _qwen3_vl_moe(
            "Qwen/Qwen3-VL-30B-A3B-Instruct", 2048, 6144, 48, 32, 4, 768
        ),
        "qwen3-vl-235b-a22b": _qwen3_vl_moe(
            "Qwen/Qwen3-VL-235B-A22B-Instruct", 4096, 12288, 94, 64, 4, 1536
        ),
        **_qwen35_models(),
        "mistral-small-3.1-24b": _mistral3(
            "Mistral-Small-3.1-24B-Base-2503", "mistral", *_MISTRAL_SMALL, positions=131072
        ),
        "mistral-small-3.2-24b": _mistral3(
            "Mistral-Small-3.2-24B-Instruct-2506", "mistral", *_MISTRAL_SMALL, positions=131072
        ),
        "ministral-3-3b": _mistral3(
            "Ministral-3-3B-Base-2512",
            "ministral3",
            *(3072, 9216, 26, 32, 8),
            positions=262144,
            tied=True,
        ),
        "ministral-3-8b": _mistral3(
            "Ministral-3-8B-Base-2512",
            "ministral3",
            *(4096, 14336, 34, 32, 8),
            positions=262144,
        ),
        "ministral-3-14b": _mistral3(
            "Ministral-3-14B-Base-2512",
            "ministral3",
            *(5120, 16384, 40, 32, 8),
            positions=262144,
        ),
        "llama-4-scout": _llama4("Llama-4-Scout-17B-16E", 16, 1, 10485760),
        "llama-4-maverick": _llama4("Llama-4-Maverick-17B-128E", 128, 2, 1048576),
    }


KNOWN: dict[str, Known] = {
    **_text_models(),
    **_models_of_images_and_text(),
    **vision_models(),
    **hybrid_models(),
    **encoder_models(),
    "resnet-50": Known(
        "microsoft/resnet-50", {"model_type": "resnet"}, "{kind: classify, modality: image}"
    ),
}
# Of the model_types above, those of models that classify images and generate no text.
OF_IMAGES = ("resnet",)
# Words in a name that say how the model was tuned or in what type it is stored, which changes no
# shape. Versions and dates (-v0.1, -2507) are none of these: such models differ in rows, positions
# or more.
_TUNING = re.compile(
    r"-(instruct|thinking|think|reasoning|base|chat|it|pt|hf|text|inst|sft|dpo|bf16|ul2|prefixlm)"
    r"(?=-|$)"
)

# Families whose tuned models have the base model's id and -Instruct.
_INSTRUCT = ("llama-3-", "llama-3.1-", "llama-3.2-", "llama-4-", "qwen2.5-", "smollm2-")


def names_to_count() -> list[str]:
    """Return the names of the known models that known_sizes.txt has, one for each shape.

    It has the sizes of language models. Other models are counted as they are asked for.
    """
    names: list[str] = []
    shapes: list[dict[str, Any]] = []
    for name, known in KNOWN.items():
        if known.algorithm is not None or known.values["model_type"] in ENCODER_DECODERS:
            continue
        if known.values in shapes:
            continue
        names.append(name)
        shapes.append(known.values)
    return names


def find(name: str) -> Known | None:
    """Return a known model by its short name or its hub id, tuned or not; None if it is not known.

    A tuned one is, for example, `meta-llama/Llama-3.1-8B-Instruct`. Another version is another
    model: `mistralai/Mistral-7B-v0.1` has fewer rows than v0.3.
    """
    short = _short(name)
    untuned = _TUNING.sub("", short)
    for word in (short, untuned):
        for form in (word, word.removeprefix("meta-")):
            if form in KNOWN:
                return KNOWN[form]
    for known in KNOWN.values():
        known_short = _short(known.id)
        if known.values["model_type"] in WITH_SIZE_BASE:
            if known_short == short:
                return known
        elif _TUNING.sub("", known_short) == untuned:
            return known
    return None


def hub_id(name: str) -> str:
    """Return the hub id of a short name; any other name unchanged.

    The short name of a tuned model gives the tuned model's id.
    """
    known = find(name)
    if known is None or "/" in name:
        return name
    short = _short(name)
    if short.removeprefix("meta-") in KNOWN or short == _short(known.id):
        return known.id
    tuning = short.removeprefix(_TUNING.sub("", short))
    if tuning == "-instruct" and short.removeprefix("meta-").startswith(_INSTRUCT):
        return f"{known.id}-Instruct"
    if tuning == "-it" and short.startswith("gemma"):
        return f"{known.id.removesuffix('-pt')}-it"
    return name


def _short(name: str) -> str:
    """Return a model's name without its owner, in lower case and with hyphens."""
    return name.rpartition("/")[2].lower().replace("_", "-")


def list_similar_names(name: str) -> list[str]:
    """Return up to three known names that are similar to an unknown one."""
    return difflib.get_close_matches(name.rpartition("/")[2].lower(), KNOWN, n=3, cutoff=0.5)


def full_config(shape: ModelShape) -> dict[str, Any]:
    """Return the config values of a Llama of this shape."""
    # Two thirds of four times the width, as in Llama, up to the next multiple of 256.
    usual_intermediate = 256 * -(-8 * shape.hidden // 768)
    return {
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "intermediate_size": shape.intermediate or usual_intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }


def with_config(known: Known, model: ModelConfig) -> ModelConfig:
    """Return the model's options with the config values of a known model instead of its id.

    If they name the type of its language model, they are those of the language model.
    """
    values = known.values
    text = values.get("text_config", {})
    model_type = model.config.get("model_type")
    if model_type is not None and model_type == text.get("model_type"):
        values = text
    config = {**values, **model.config}
    return model.model_copy(update={"id": None, "revision": None, "config": config})


def unknown_shape(name: str, reason: str) -> ModelError:
    """Return the error for a model whose shape is not known."""
    fix = (
        "write it out: model.shape={layers: 32, hidden: 4096, heads: 32, kv_heads: 8,"
        " intermediate: 14336, vocabulary: 128256}"
    )
    guesses = list_similar_names(name)
    if guesses:
        fix = f"did you mean {' or '.join(guesses)}? Or {fix}"
    what = f"no shape is known of this model: {reason}"
    return ModelError(what, where=f"model {name}", fix=fix)


def check_length(positions: int | None, max_length: int) -> None:
    """Raise ModelError if `max_length` exceeds the model's positions.

    `positions` None: the model has no limit.
    """
    # XLNet has no limit either, and writes -1.
    if positions is not None and 0 < positions < max_length:
        what = f"sequences of {max_length} tokens are longer than the model's {positions} positions"
        raise ModelError(what, where="data.max_length", fix=f"at most {positions}")
