"""A tokenizer and a model small enough to be built in each test: no download, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def tiny_tokenizer(
    vocab_size: int = 320, chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on five lines: any text has tokens, and none is unknown.

    Ids 0..2 are `<|endoftext|>` (padding), `<|im_start|>` and `<|im_end|>` (end of sequence); 256 bytes and the merges follow.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_MIXTURE = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
# Other architectures, as small: two mixtures that learn the loss of their routers, and two with biases in attention.
ARCHITECTURES = {
    "mixtral": {**_COMMON, **_MIXTURE, "num_local_experts": 4},
    "qwen3_moe": {
        **_COMMON,
        **_MIXTURE,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **_COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 32,
    },
    "granitemoehybrid": {
        **_COMMON,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "qwen3_5_text": {
        **_COMMON,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen2": _COMMON,
    "apertus": _COMMON,  # its activation's numbers are saved without a dimension
    "granitemoe": {
        **_COMMON,
        **_MIXTURE,
        "num_local_experts": 4,
    },  # only its experts have a tensor-parallel plan
    # The biases of its routers are in no loss.
    "ernie4_5_moe": {
        **_COMMON,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "gpt2": {
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 512,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def tiny_architecture_dir(path: Path, kind: str, layers: int = 4, **changes: Any) -> Path:
    """`tiny_model_dir` of one of ARCHITECTURES. `changes`: of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    tokenizer = tiny_tokenizer()
    auto_class: Any = AutoModelForCausalLM
    if kind == "t5":
        auto_class = AutoModelForSeq2SeqLM
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    key = {"gpt2": "n_layer", "t5": "num_layers"}.get(kind, "num_hidden_layers")
    depth = {key: layers}
    values = {**ARCHITECTURES[kind], **ids, **depth, **changes}
    model = random_model(auto_class, AutoConfig.for_model(kind, **values))
    if kind == "qwen3_5_text":
        let_states_last(model)
    return save_model(path, model, tokenizer)


def random_model(auto_class: Any, config: Any, seed: int = 0) -> Any:
    """Return a model with random weights, without a change of torch's own random numbers."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return auto_class.from_config(config)


def save_model(path: Path, model: Any, tokenizer: Any) -> Path:
    """Save a model and its tokenizer to folder `path`; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def let_states_last(model: Any) -> None:
    """Let the states of recurrent layers fade by a tenth with each token.

    Those of a fresh gated DeltaNet fade within a token, and the gradients of how fast they fade are
    rounding (test_recurrent).
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2.0)


def tiny_model_dir(
    path: Path,
    vocab_size: int = 320,
    layers: int = 2,
    seed: int = 0,
    hidden: int = 32,
    positions: int = 512,
    kv_heads: int = 2,
    tied: bool = True,
) -> Path:
    """Save a random Llama (fp32, about 30 thousand parameters) and its tokenizer to folder `path`; returns `path`.

    `tied`: whether its head is its embedding.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return save_model(path, model, tokenizer)


# The architecture of `tiny_calling_dir`.
CALLING = "llama that calls"
# Tools are named, and called as Hermes does.
CHATML_WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_calling_dir(path: Path, layers: int = 2) -> Path:
    """Save the model of `tiny_model_dir` with 48 more tokens, each of which is a whole call of the tool `spell`; returns `path`.

    So a random model calls in about every second turn of 6 tokens, and half of the calls fail.
    """
    import torch

    tiny_model_dir(path, layers=layers)
    tokenizer = tiny_tokenizer(chat_template=CHATML_WITH_TOOLS)
    calls = []
    for number in range(48):
        letter = "aeiouuuu"[number % 8]
        spaces = " " * number
        calls.append(
            f'<tool_call>{{"name": "spell", "arguments": {{"letter": "{letter}"{spaces}}}}}</tool_call>'
        )
    tokenizer.add_tokens(calls)
    model = read_model(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return save_model(path, model, tokenizer)


def read_model(folder: Path, dtype: Any = None) -> Any:
    """Read the causal LM of a folder by transformers' own classes; fp32 if `dtype` says no other."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)


def tiny_reward_model_dir(path: Path, layers: int = 2, seed: int = 0) -> Path:
    """Save the model of `tiny_model_dir` with a random head of one score a sequence; returns `path`."""
    import torch
    from transformers import LlamaForSequenceClassification

    tiny_model_dir(path, layers=layers, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification.from_pretrained(path, num_labels=1)
    model.save_pretrained(path)
    return path


VISION_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# As Qwen3-VL writes images in a conversation.
CHATML_WITH_IMAGES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_vision_dir(
    path: Path, seed: int = 0, layers: int = 2, experts: int = 0, head_dim: int = 8
) -> Path:
    """Save a random Qwen3-VL (fp32, about 90 thousand parameters, deepstack) with tokenizer and image processor to `path`; returns `path`.
    `experts`: of its mixture, two of which take a token; 0 is the dense model. `head_dim`: of the language model, a multiple of 8.

    Patches of 4 x 4 pixels, four to an image token; images of 8 x 8 to 24 x 24 pixels stay as they are.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tiny_tokenizer(chat_template=CHATML_WITH_IMAGES)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_SPECIAL})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in VISION_SPECIAL}
    mixture = (
        {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        if experts
        else {}
    )
    config = AutoConfig.for_model(
        "qwen3_vl_moe" if experts else "qwen3_vl",
        text_config={
            **mixture,
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": 512,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = random_model(AutoModelForImageTextToText, config, seed)
    save_model(path, model, tokenizer)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        min_pixels=8 * 8,
        max_pixels=24 * 24,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(path)
    return path


def write_images(folder: Path, number: int, seed: int = 0) -> list[str]:
    """PNGs of random colours and uneven sizes in `folder`/images; their paths relative to `folder`."""
    import random

    from PIL import Image

    draw = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    names = []
    for index in range(number):
        size = draw.choice([8, 16, 24]), draw.choice([8, 16, 24])
        names.append(f"images/{seed}-{index}.png")
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(folder / names[-1])
    return names


def tiny_task(rows: Path, name: str = "drum_tiny") -> str:
    """A task of lm-eval, as YAML: two choices for each `question` of a JSONL file, of which `label` is right."""
    return f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {rows}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["drum", "line"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
