"""The files of an export that tell sentence-transformers how to embed texts with the model.

Their names and keys are those that every version of sentence-transformers reads.
"""

from __future__ import annotations

from typing import Any

# The path of a module of sentence-transformers, such as Pooling.
MODULE = "sentence_transformers.models.{}"


def sentence_transformers_files(
    pooling: str, normalize: bool, prompts: dict[str, str], hidden: int, max_length: int
) -> dict[str, Any]:
    """Return the contents of JSON files by their paths in the folder of a model.

    Args:
        pooling: mean, last or cls.
        normalize: whether texts are compared by cosine similarity, or by the dot product.
        prompts: text before each query and each document.
        hidden: numbers of an embedding.
        max_length: the most tokens of a text.
    """
    names = ["Transformer", "Pooling"]
    if normalize:
        names.append("Normalize")
    modules = []
    for index, name in enumerate(names):
        path = ""
        if index > 0:
            path = f"{index}_{name}"
        modules.append(
            {"idx": index, "name": str(index), "path": path, "type": MODULE.format(name)}
        )
    similarity = "dot"
    if normalize:
        similarity = "cosine"
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "last",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False,
            "include_prompt": True,
        },
        "config_sentence_transformers.json": {
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": similarity,
        },
    }
