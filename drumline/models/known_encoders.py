"""Shapes of well-known models with an encoder: T5, BART, T5Gemma, and encoders of texts to compare."""

from __future__ import annotations

from drumline.models.known import Known, with_sizes

# Types of models whose names have "base" as a size, as in bart-base.
WITH_SIZE_BASE = ("bart", "bert", "t5", "xlm-roberta")
# Sizes of encoders, in the order of `known.SIZES`.
_BERT = {
    "small": (384, 1536, 12, 12),
    "base": (768, 3072, 12, 12),
    "large": (1024, 4096, 24, 16),
}
# Width, size of a head, width of the feed-forward part, layers of each stack, and heads.
_T5 = {
    "small": (512, 64, 2048, 6, 8),
    "base": (768, 64, 3072, 12, 12),
    "large": (1024, 64, 4096, 24, 16),
    "3b": (1024, 128, 16384, 24, 32),
    "11b": (1024, 128, 65536, 24, 128),
}
_GEMMA2_9B = with_sizes((3584, 14336, 42, 16, 8))


def encoder_models() -> dict[str, Known]:
    """Return the known models of these families, by their short names."""
    return {**_encoder_decoders(), **_text_encoders()}


def _encoder_decoders() -> dict[str, Known]:
    """Return the known models with an encoder and a decoder."""
    models = {}
    for size, (width, head, intermediate, layers, heads) in _T5.items():
        values = {
            "model_type": "t5",
            "d_model": width,
            "d_kv": head,
            "d_ff": intermediate,
            "num_layers": layers,
            "num_heads": heads,
            "decoder_start_token_id": 0,
        }
        models[f"t5-{size}"] = Known(f"google-t5/t5-{size}", values)
    # Without sizes a stack is that of Gemma 2 2B.
    stacks: dict[str, tuple[dict[str, int], dict[str, int]]] = {
        "2b-2b": ({}, {}),
        "9b-2b": (_GEMMA2_9B, {}),
        "9b-9b": (_GEMMA2_9B, _GEMMA2_9B),
    }
    for size, (encoder, decoder) in stacks.items():
        values = {"model_type": "t5gemma", "encoder": encoder, "decoder": decoder}
        models[f"t5gemma-{size}"] = Known(f"google/t5gemma-{size}-ul2", values)
    models["bart-base"] = Known("facebook/bart-base", _bart(768, 3072, 6, 12))
    models["bart-large"] = Known("facebook/bart-large", _bart(1024, 4096, 12, 16))
    return models


def _bart(width: int, intermediate: int, layers: int, heads: int) -> dict[str, object]:
    """Return the values of a BART; `layers` and `heads` are those of each stack."""
    return {
        "model_type": "bart",
        "d_model": width,
        "encoder_ffn_dim": intermediate,
        "decoder_ffn_dim": intermediate,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }


def _text_encoders() -> dict[str, Known]:
    """Return the known encoders: of embeddings, and rerankers, which score a pair of texts."""
    models = {}
    for size in _BERT:
        bert = _encoder("bert", size)
        models[f"e5-{size}-v2"] = Known(f"intfloat/e5-{size}-v2", bert, "embed")
        models[f"bge-{size}-en-v1.5"] = Known(f"BAAI/bge-{size}-en-v1.5", bert, "embed")
    minilm = _encoder("bert", "small") | {"num_hidden_layers": 6}
    models["all-minilm-l6-v2"] = Known("sentence-transformers/all-MiniLM-L6-v2", minilm, "embed")
    for size in ("base", "large"):
        values = _encoder("xlm-roberta", size)
        models[f"multilingual-e5-{size}"] = Known(
            f"intfloat/multilingual-e5-{size}", values, "embed"
        )
        models[f"bge-reranker-{size}"] = Known(f"BAAI/bge-reranker-{size}", values, "rerank")
    m3 = _encoder("xlm-roberta", "large") | {"max_position_embeddings": 8194}
    models["bge-m3"] = Known("BAAI/bge-m3", m3, "embed")
    models["bge-reranker-v2-m3"] = Known("BAAI/bge-reranker-v2-m3", m3, "rerank")
    return models


def _encoder(model_type: str, size: str) -> dict[str, object]:
    """Return the values of a BERT or an XLM-RoBERTa. `size`: a key of _BERT."""
    values = with_sizes(_BERT[size], model_type=model_type)
    if model_type == "xlm-roberta":
        values |= {"vocab_size": 250002, "type_vocab_size": 1, "max_position_embeddings": 514}
    return values
