"""What the named chat templates write of a conversation, and which tokens of it are learned."""

from __future__ import annotations

from typing import Any

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "Three."},
]


def im(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


# Template → what it writes of TALK: texts that are read and texts that are learned, in turn. The
# tokenizer's EOS is <|im_end|>.
WRITTEN = {
    "chatml": [
        *(
            im("system", "Be kind.") + im("user", "two?") + "<|im_start|>assistant\n",
            "Two.<|im_end|>",
        ),
        *("\n" + im("user", "three?") + "<|im_start|>assistant\n", "Three.<|im_end|>", "\n"),
    ],
    "llama-3": [
        "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\ntwo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Two.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nthree?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Three.<|eot_id|>",
    ],
    "mistral": [
        "[INST] Be kind.\n\ntwo?[/INST]",
        " Two.<|im_end|>",
        "[INST] three?[/INST]",
        " Three.<|im_end|>",
    ],
    "gemma": [
        *(
            "<start_of_turn>user\nBe kind.\n\ntwo?<end_of_turn>\n<start_of_turn>model\n",
            "Two.<end_of_turn>",
        ),
        *(
            "\n<start_of_turn>user\nthree?<end_of_turn>\n<start_of_turn>model\n",
            "Three.<end_of_turn>",
            "\n",
        ),
    ],
    "phi": [
        *("<|system|>\nBe kind.<|end|>\n<|user|>\ntwo?<|end|>\n<|assistant|>\n", "Two.<|end|>"),
        *("\n<|user|>\nthree?<|end|>\n<|assistant|>\n", "Three.<|end|>", "\n"),
    ],
    "zephyr": [
        *(
            "<|system|>\nBe kind.<|im_end|>\n<|user|>\ntwo?<|im_end|>\n<|assistant|>\n",
            "Two.<|im_end|>",
        ),
        *("\n<|user|>\nthree?<|im_end|>\n<|assistant|>\n", "Three.<|im_end|>", "\n"),
    ],
    "alpaca": [
        *("Be kind.\n\n### Instruction:\ntwo?\n\n### Response:\n", "Two.<|im_end|>"),
        *("\n\n### Instruction:\nthree?\n\n### Response:\n", "Three.<|im_end|>", "\n\n"),
    ],
    "deepseek": [
        "Be kind.<｜User｜>two?<｜Assistant｜>",
        "Two.<|im_end|>",
        "<｜User｜>three?<｜Assistant｜>",
        "Three.<|im_end|>",
    ],
}
WRITTEN["qwen"] = WRITTEN["chatml"]


def require(of: Any, example: Any, pieces: list[str]) -> None:
    """The tokens are those of all pieces together, and learned are those of every second piece."""
    text = "".join(pieces)
    encoded = of(text, add_special_tokens=False, return_offsets_mapping=True)
    is_learned: list[int] = []  # of each character
    for number, piece in enumerate(pieces):
        is_learned += [number % 2] * len(piece)
    is_learned.append(0)  # behind the end
    tokens = example.tokens.tolist()
    assert tokens == encoded["input_ids"], of.decode(tokens)
    wanted = [is_learned[first] for first, _ in encoded["offset_mapping"]]
    said = of.decode(example.tokens[example.learn == 1].tolist())
    assert example.learn.tolist() == wanted, said
