"""What a config says of its model: the Auto class of transformers, its head, and what it reads."""

from __future__ import annotations

import re
from typing import Any

from drumline.config.model import Head
from drumline.errors import ModelError
from drumline.models.vision_scores import score_loader

# Keys of dropout probabilities.
DROPOUT_KEYS = re.compile(
    r"(.*_)?dropout(_prob|_rate)?|(attn|emb|embd|resid|summary_first)_(pdrop|dropout)"
)
# Keys of other random changes in training: layers that are left out, and noise of routers.
NOISE_KEYS = re.compile(r"(.*_)?layerdrop|(.*_)?jitter_noise|drop_path_rate")
CLASSES = "single_label_classification"
# transformers allows a single logit only under this name.
ONE_LOGIT = "regression"
# Head → (Auto class, name of such models). A new head also needs its layer in `scores.add_head`.
AUTO: dict[Head, tuple[str, str]] = {
    # Logits of the next token.
    "lm": ("AutoModelForCausalLM", "causal language model"),
    # These, and a value of each token: the policy of PPO.
    "valued": ("AutoModelForCausalLM", "causal language model"),
    # One score of each token: reward and value models.
    "score": ("AutoModelForSequenceClassification", "classifier of texts"),
    # Logits of the classes of a text, or of an image.
    "text": ("AutoModelForSequenceClassification", "classifier of texts"),
    # Nothing: hidden states are the output.
    "embedding": ("AutoModel", "encoder of texts"),
    "image": ("AutoModelForImageClassification", "classifier of images"),
    # Logits of the next token of a decoder that reads an encoder.
    "seq2seq": ("AutoModelForSeq2SeqLM", "encoder-decoder model"),
}
# Heads of language models, with or without a value beside the logits.
LM: tuple[Head, ...] = ("lm", "valued")
# Heads under which a vision-language model reads images.
SEEING: tuple[Head, ...] = (*LM, "score")
# Heads whose model writes text.
WRITING: tuple[Head, ...] = (*LM, "seq2seq")
# Types of models of text with an encoder and a decoder. Planning asks this without transformers.
ENCODER_DECODERS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "fsmt",
        "led",
        "longt5",
        "m2m_100",
        "marian",
        "mbart",
        "mt5",
        "mvp",
        "nllb-moe",
        "pegasus",
        "pegasus_x",
        "plbart",
        "prophetnet",
        "switch_transformers",
        "t5",
        "t5gemma",
        "umt5",
    }
)
# Types of vision-language models whose images are read; `image_tokens.FAMILIES` says how.
IMAGE_READING_TYPES = frozenset(
    {
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "llava_onevision",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)


def auto_class(config: Any, head: Head = "lm") -> Any:
    """Return the Auto class of transformers for a config and a head.

    A language model or a reward model may be a vision-language model.
    """
    import transformers

    if head in LM and is_vision_language(config):
        return transformers.AutoModelForImageTextToText
    if head == "score" and is_vision_language(config):
        return score_loader(config)
    class_name, _ = AUTO[head]
    return getattr(transformers, class_name)


def is_vision_language(config: Any) -> bool:
    """Return whether transformers builds a model of images and text from this config."""
    from drumline.vendor.transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return False
    return getattr(config, "vision_config", None) is not None


def is_text_alone(config: Any) -> bool:
    """Return whether a vision-language model's images are not read here."""
    return is_vision_language(config) and config.model_type not in IMAGE_READING_TYPES


def is_encoder_decoder(config: Any) -> bool:
    """Return whether transformers builds a model of texts with an encoder and a decoder from this.

    Such as T5, BART and T5Gemma.
    """
    if getattr(config, "model_type", None) not in ENCODER_DECODERS:
        return False
    return bool(getattr(config, "is_encoder_decoder", False))


def require_text_trunk(config: Any) -> None:
    """Raise ModelError for a model of whose hidden states no embedding of a text is made.

    Its config describes images beside text, or a decoder that reads an encoder.
    """
    if getattr(config, "vision_config", None) is not None:
        reason = "reads images beside text"
    elif is_encoder_decoder(config):
        reason = "has an encoder and a decoder"
    else:
        return
    what = f"{config.model_type} {reason}, and embeddings are trained of one stack that reads text"
    fix = "name an encoder such as BERT, or a language model of text"
    raise ModelError(what, where="model", fix=fix)


def decoder_start(config: Any) -> int | None:
    """Return the id of the token that the decoder beside an encoder begins with; None: not known."""
    start: int | None = getattr(config, "decoder_start_token_id", None)
    if start is None:
        # T5Gemma begins with the first token of its decoder's texts.
        start = getattr(getattr(config, "decoder", config), "bos_token_id", None)
    return start


def is_seq2seq(model: Any) -> bool:
    """Return whether a model's decoder reads an encoder, and its logits are of the next token."""
    from drumline.vendor.transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    if not is_encoder_decoder(model.config):
        return False
    # FSDP2 puts its name before that of the class.
    class_name = type(model).__name__.removeprefix("FSDP")
    return bool(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model.config.model_type] == class_name)


def values_by_layer(config: Any, key: str) -> list[Any]:
    """Return the values of a config's key by layer; only one value if all layers have the same.

    transformers refuses to read a key from the whole config if layers differ in it.
    """
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    if key in by_layer:
        return [getattr(layer, key, None) for layer in config.per_layer_config]
    return [getattr(config, key, None)]


def set_classes(config: Any, head: Head, labels: tuple[str, ...]) -> Any:
    """Set the number and names of the head's logits in a config, and return it.

    A score is one logit without a name. `labels`: the classes; empty: as many as the config has.
    With the head `embedding` there are no logits, and dropout and other noise is switched off: each
    text is embedded twice, and the gradient of the loss is that of the first embedding.
    """
    # By this key of transformers `ends_in_classes` recognises a built model.
    config.problem_type = None
    if head in ("text", "image"):
        config.problem_type = CLASSES
        if len(labels) == 1:
            config.problem_type = ONE_LOGIT
    if head == "embedding":
        for part in (config, config.get_text_config()):
            _switch_off_noise(part)
    if head == "score":
        config.num_labels = 1
    elif head not in LM and labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    return config


def _switch_off_noise(config: Any) -> None:
    """Set what makes forwards of training differ in a config to 0: dropout, and what is like it."""
    for key in _noise_of(config):
        setattr(config, key, 0.0)


def restore_noise(config: Any, original: Any) -> None:
    """Give a config the dropout and other noise of another one of the same model.

    `set_classes` switches it off to train embeddings. An exported config has it again.
    """
    pairs = ((config, original), (config.get_text_config(), original.get_text_config()))
    for part, part_of_original in pairs:
        for key, value in _noise_of(part_of_original).items():
            setattr(part, key, value)


def _noise_of(config: Any) -> dict[str, float]:
    """Return the keys of a config that make forwards of training differ, with their values."""
    noise = {}
    for key, value in config.to_dict().items():
        is_random = DROPOUT_KEYS.fullmatch(key) or NOISE_KEYS.fullmatch(key)
        if is_random and isinstance(value, int | float):
            noise[key] = value
    return noise


def order_classes(config: Any, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes in the model's order, so that its logits keep their meaning.

    That is the order of a model that was trained on exactly these classes. Else returns `labels` as
    they are.
    """
    own = _class_names(config)
    # As sets, since the data's classes come in an order of their own.
    if set(own) == set(labels):
        return own
    return labels


def require_classes(config: Any, labels: tuple[str, ...], where: str) -> None:
    """Raise ModelError for a classifier of other classes than `labels`.

    The names that transformers makes up (LABEL_0) fit any classes.
    """
    own = _class_names(config)
    made_up = tuple(f"LABEL_{index}" for index in range(len(own)))
    if own in (labels, made_up):
        return
    what = f"tells apart {_first_names(own)}, and the rows have {_first_names(labels)}"
    raise ModelError(what, where=where, fix="name a model of these classes, or rows of those")


def _first_names(names: tuple[str, ...]) -> str:
    """Return up to five names, separated by commas."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += ", …"
    return text


def _class_names(config: Any) -> tuple[str, ...]:
    """Return the names of a config's classes, in the order of its logits."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def ends_in_classes(model: Any) -> bool:
    """Return whether a model is a classifier of texts or images (see `set_classes`)."""
    return getattr(model.config, "problem_type", None) in (CLASSES, ONE_LOGIT)


def ends_in_hidden_states(model: Any) -> bool:
    """Return whether a model of transformers is a trunk alone, whose output is hidden states."""
    # transformers' name of a model's trunk, which a trunk itself lacks.
    is_trunk: bool = model.base_model is model
    return is_trunk and model.get_output_embeddings() is None


def reads_images(model: Any) -> bool:
    """Return whether a model reads only images.

    The main input of a vision-language model is text.
    """
    return getattr(model, "main_input_name", "input_ids") == "pixel_values"


def is_encoder(model: Any) -> bool:
    """Return whether the config of a language model makes it a bidirectional encoder, as for BERT.

    Other bidirectional models are found by a trial (`head.require_next_token`).
    """
    # Configs of decoders may have this key, too. Only modules of models that obey it have an
    # attribute `is_decoder`.
    if getattr(model.config, "is_decoder", None) is not False:
        return False
    return any(getattr(module, "is_decoder", None) is False for module in model.modules())


def bidirectional_error(model: Any) -> ModelError:
    """Return the error for next-token training of a model that attends to later tokens."""
    what = (
        f"{type(model).__name__} reads in both directions:"
        " each token would see the next one, which it is to predict"
    )
    fix = "use algorithm: classify, or name a causal language model"
    if is_encoder(model):
        fix = (
            "set model.config.is_decoder: true,"
            f" under which its tokens see those before them alone, or {fix}"
        )
    return ModelError(what, where="model", fix=fix)
