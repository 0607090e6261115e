"""A tokenizer and a model small enough to be built in each test: no download, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# ChatML, as SmolLM2 and Qwen2 write it: header, content, end of turn, newline.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_LINES = [
    "system user assistant",
    "The capital of France is Paris. The capital of Italy is Rome.",
    "What is two plus three? Two plus three is five.",
    "Every rank keeps in step with the drum: one, two, three, four.",
    "A gradient is summed over the ranks before the optimizer takes a step.",
]


def tiny_tokenizer(vocab_size: int = 320, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on five lines: any text has tokens, and none is unknown.

    Ids 0..2 are `<|endoftext|>` (padding), `<|im_start|>` and `<|im_end|>` (end of sequence); 256 bytes and the merges follow.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512)
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model_dir(path: Path, vocab_size: int = 320, layers: int = 2, seed: int = 0, hidden: int = 32, positions: int = 512) -> Path:
    """Save a random Llama (fp32, tied embeddings, about 30 thousand parameters) and its tokenizer to folder `path`; returns `path`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
