"""Configs, tokenizers and models by Hugging Face's own classes; what is missing or does not fit becomes one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from drumline.config.schema import ModelConfig
from drumline.errors import ModelError
from drumline.plan.facts import ModelFacts

T = TypeVar("T")


def quiet() -> None:
    """No progress bars of transformers' own: Drumline draws the one that there is."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_config(path: str | None, model: ModelConfig) -> Any:
    """The Hugging Face config with `model.config` laid over it; `path` None: written out whole (needs model_type)."""
    from transformers import AutoConfig

    if path is not None:
        config = _from_hub(path, model, lambda: AutoConfig.from_pretrained(path, **_options(path, model)))
        return _lay_over(config, model.config)
    values = dict(model.config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise ModelError("neither an id nor a config with model_type", where="model", fix="set model.id, or model.config.model_type")
    try:
        return AutoConfig.for_model(kind, **values)
    except ValueError:
        raise ModelError(f"transformers knows no model_type {kind!r}", where="model.config.model_type", fix="use one such as llama, qwen3 or gpt2") from None


def _lay_over(config: Any, values: dict[str, Any]) -> Any:
    """Set values on a config. A head size that followed from width and heads follows again, unless it is set itself."""
    width, heads, size = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    followed = bool(width and heads and size == width // heads)
    for key, value in values.items():
        setattr(config, key, value)
    if followed and "head_dim" not in values:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load_tokenizer(path: str | None, model: ModelConfig) -> Any:
    """The tokenizer of the model, or of `model.tokenizer`; with `model.chat_template` put over its own."""
    from transformers import AutoTokenizer

    source = model.tokenizer or path
    if source is None:
        raise ModelError("a model written out by its config has no tokenizer", where="model.tokenizer", fix="name a folder or hub id that has one")
    tokenizer = _from_hub(source, model, lambda: AutoTokenizer.from_pretrained(source, **_options(source, model)))
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(model.chat_template))
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills short rows. It carries no loss and nothing attends to it, so where there is none the end-of-text token serves."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def build_model(path: str | None, model: ModelConfig, seed: int, device: str = "cpu", dtype: Any = None) -> Any:
    """A causal LM in fp32 (or `dtype`) on `device`: weights of `path`, or random ones drawn from `seed` where init is random."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    dtype = dtype or torch.float32
    attention = "sdpa" if model.attention == "auto" else model.attention
    config = load_config(path, model)
    if path is not None and model.init == "pretrained":
        options = _options(path, model) | {"dtype": dtype, "attn_implementation": attention, "config": config}
        built = _from_hub(path, model, lambda: AutoModelForCausalLM.from_pretrained(path, **options))
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            built = _attention_or_eager(
                lambda kind: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kind, trust_remote_code=model.trust_remote_code),
                attention, model,
            )  # fmt: skip
    built.config.use_cache = False
    return built.to(device)


def _attention_or_eager(make: Callable[[str], T], attention: str, model: ModelConfig) -> T:
    """`auto` is sdpa, or eager for the few classes that have no other."""
    try:
        return make(attention)
    except (ValueError, ImportError) as error:
        if model.attention == "auto" and "scaled_dot_product_attention" in str(error):
            return make("eager")
        raise ModelError(_first_line(error), where="model.attention", fix="use attention: auto") from None


def facts(config: Any, length: int) -> ModelFacts:
    """Sizes of the model that a config describes, built on the meta device: no memory, no weights. `length`: tokens of a training row.

    FLOPs of a token, forward and backward: 6 for each parameter that takes part in a matrix product (Kaplan et al. 2020; the embedding
    is a look-up, a tied one counts once as the head), and 12·layers·width·length of attention (PaLM, Chowdhery et al. 2022,
    appendix B; width is heads × head size). PaLM counts all pairs of positions of a row, causal or not, one document or several.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    parameters = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    heads = int(text.num_attention_heads)
    width = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    positions = getattr(text, "max_position_embeddings", None)
    products = parameters - (0 if tied else embedding.numel())
    return ModelFacts(
        name=str(text.model_type),
        parameters=parameters,
        flops_per_token=float(6 * products + 12 * layers * width * length),
        vocab_size=int(text.vocab_size),
        max_positions=int(positions) if positions else None,
        layers=layers,
        hidden=hidden,
    )


def check_fits(config: Any, tokenizer: Any, max_length: int) -> None:
    """Raises ModelError where the tokenizer has more ids than the embedding has rows, or rows are longer than the model has positions."""
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the embedding only {text.vocab_size} rows",
            where="model.tokenizer",
            fix="use the model's own tokenizer, or a model with a larger vocabulary",
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"sequences of {max_length} tokens are longer than the model's {positions} positions", where="data.max_length", fix=f"at most {positions}"
        )


def _options(path: str, model: ModelConfig) -> dict[str, Any]:
    local = Path(path).is_dir()
    return {"trust_remote_code": model.trust_remote_code, "local_files_only": local} | ({} if local else {"revision": model.revision})


def _from_hub(path: str, model: ModelConfig, make: Callable[[], T]) -> T:
    """Run one of transformers' loaders; its many ways of failing become one line each."""
    try:
        return make()
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise ModelError(
                "this model brings code of its own and model.trust_remote_code is off", where=path, fix="read that code, then set model.trust_remote_code: true"
            ) from None
        if Path(path).is_dir():
            if "attn_implementation" in text or "scaled_dot_product_attention" in text:
                raise ModelError(_first_line(error), where="model.attention", fix="use attention: eager") from None
            raise ModelError(f"not a loadable model folder: {_first_line(error)}", where=path, fix="it needs config.json, weights and a tokenizer") from None
        raise ModelError(f"cannot be had: {_first_line(error)}", where=path, fix="check the id and the network, or give a local folder") from None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template cannot be read: {_first_line(error)}", where=str(path), fix="model.chat_template is the path of a Jinja file") from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
