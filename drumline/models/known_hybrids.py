"""Shapes of well-known models with recurrent layers: Qwen3-Next, LFM2, Granite 4 and Falcon-H1."""

from __future__ import annotations

from drumline.models.known import Known, with_sizes

# The layers of LFM2 with attention; the others are convolutions.
_LFM2_ATTENTION = [2, 5, 8, 10, 12, 14]
_LFM2_ATTENTION_OF_30 = [2, 5, 9, 12, 15, 18, 21, 24]
# The layers of Granite 4 with attention; the others are Mamba's.
_GRANITE_ATTENTION = (5, 15, 25, 35)


def hybrid_models() -> dict[str, Known]:
    """Return the known models of these families, by their short names."""
    models = {
        # transformers' own defaults are its sizes. Without the layer that predicts two tokens.
        "qwen3-next-80b-a3b": Known(
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            {"model_type": "qwen3_next", "max_position_embeddings": 262144},
        ),
        "lfm2-350m": _lfm2("350M", 1024, 6656, 16),
        "lfm2-700m": _lfm2("700M", 1536, 10240, 24),
        "lfm2-1.2b": _lfm2("1.2B", 2048, 12288, 32),
        "lfm2-2.6b": Known(
            "LiquidAI/LFM2-2.6B",
            with_sizes(
                (2048, 10752, 30, 32, 8),
                model_type="lfm2",
                full_attn_idxs=_LFM2_ATTENTION_OF_30,
                block_auto_adjust_ff_dim=False,
                vocab_size=65536,
                max_position_embeddings=128000,
            ),
        ),
        "granite-4.0-h-micro": _granite("micro", 2048, 8192, 32, shared=8192),
        "granite-4.0-h-tiny": _granite("tiny", 1536, 512, 12, shared=1024, experts=64, per_token=6),
        "granite-4.0-h-small": _granite(
            "small", 4096, 768, 32, shared=1536, experts=72, per_token=10
        ),
    }
    return models | _falcon_models()


def _lfm2(size: str, hidden: int, intermediate: int, heads: int) -> Known:
    """Return an LFM2 of 16 layers.

    `intermediate`: the width that transformers takes two thirds of, up to a multiple of 256.
    """
    values = with_sizes(
        (hidden, intermediate, 16, heads, 8),
        model_type="lfm2",
        full_attn_idxs=_LFM2_ATTENTION,
        vocab_size=65536,
        max_position_embeddings=128000,
    )
    return Known(f"LiquidAI/LFM2-{size}", values)


def _granite(
    size: str,
    hidden: int,
    intermediate: int,
    heads: int,
    *,
    shared: int,
    experts: int = 0,
    per_token: int = 0,
) -> Known:
    """Return a Granite 4 with Mamba in nine of ten layers.

    `intermediate`: width of an expert. `shared`: width of the part that all tokens pass.
    """
    layers = 40
    layer_types = ["linear_attention"] * layers
    for index in _GRANITE_ATTENTION:
        layer_types[index] = "full_attention"
    values = with_sizes(
        (hidden, intermediate, layers, heads, max(4, heads // 4)),
        model_type="granitemoehybrid",
        layer_types=layer_types,
        shared_intermediate_size=shared,
        num_local_experts=experts,
        num_experts_per_tok=per_token,
        mamba_n_heads=hidden // 32,
        mamba_d_head=64,
        mamba_d_state=128,
        vocab_size=100352,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    return Known(f"ibm-granite/granite-4.0-h-{size}", values)


def _falcon_models() -> dict[str, Known]:
    """Return the known Falcon-H1 models, with attention and Mamba side by side in each layer."""
    return {
        "falcon-h1-0.5b": _falcon(
            "0.5B",
            *(1024, 2048, 36, 8, 2),
            head_dim=64,
            mamba=(1536, 24, 64, 128),
            vocab_size=32784,
            max_position_embeddings=16384,
        ),
        "falcon-h1-1.5b": _falcon(
            "1.5B", *(2048, 4608, 24, 8, 2), mamba=(3072, 48, 64, 256), mamba_rms_norm=True
        ),
        "falcon-h1-1.5b-deep": _falcon(
            "1.5B-Deep", *(1280, 3072, 66, 6, 2), mamba=(1536, 24, 64, 256)
        ),
        "falcon-h1-3b": _falcon("3B", *(2560, 6144, 32, 10, 2), mamba=(4096, 32, 128, 256)),
        "falcon-h1-7b": _falcon(
            "7B",
            *(3072, 12288, 44, 12, 2),
            mamba=(3072, 24, 128, 256),
            mamba_rms_norm=True,
            vocab_size=130049,
            max_position_embeddings=262144,
        ),
        "falcon-h1-34b": _falcon(
            "34B",
            *(5120, 21504, 72, 20, 4),
            mamba=(4096, 32, 128, 256),
            mamba_n_groups=2,
            vocab_size=261120,
            max_position_embeddings=262144,
        ),
    }


def _falcon(name: str, *sizes: int, mamba: tuple[int, int, int, int], **more: int) -> Known:
    """Return a Falcon-H1.

    `sizes`: in the order of `known.SIZES`. `mamba`: width, heads, size of a head and size of the
    state. `more`: values that differ from those of most sizes.
    """
    width, heads, head_dim, state = mamba
    values = with_sizes(
        sizes,
        model_type="falcon_h1",
        head_dim=128,
        mamba_d_ssm=width,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_d_state=state,
        mamba_n_groups=1,
        vocab_size=65537,
        max_position_embeddings=131072,
    )
    return Known(f"tiiuae/Falcon-H1-{name}-Instruct", values | more)
