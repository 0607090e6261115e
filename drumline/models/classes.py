"""Which of transformers' Auto classes builds the model of a config."""

from __future__ import annotations

from typing import Any

from drumline.core.model import Head
from drumline.errors import ModelError

CLASSES = "single_label_classification"
# Head → (Auto class, name of such models).
AUTO: dict[Head, tuple[str, str]] = {
    "lm": ("AutoModelForCausalLM", "causal language model"),
    "valued": ("AutoModelForCausalLM", "causal language model"),
    "score": ("AutoModelForSequenceClassification", "classifier of texts"),
    "text": ("AutoModelForSequenceClassification", "classifier of texts"),
    "image": ("AutoModelForImageClassification", "classifier of images"),
}
LM: tuple[Head, ...] = ("lm", "valued")


def auto_class(config: Any, head: Head = "lm") -> Any:
    """The Auto class, for `from_config` and `from_pretrained`. A language model may be a vision-language model."""
    import transformers

    if head in LM and is_vision_language(config):
        return transformers.AutoModelForImageTextToText
    return getattr(transformers, AUTO[head][0])


def is_vision_language(config: Any) -> bool:
    """Whether transformers builds a model of images and text from this config."""
    from drumline.vendor.transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return (
        config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and getattr(config, "vision_config", None) is not None
    )


def of_layers(config: Any, key: str) -> list[Any]:
    """A config's value of a key; where its layers differ in it, which transformers does not let one read of the whole, each layer's."""
    if key in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, key, None) for layer in config.per_layer_config]
    return [getattr(config, key, None)]


def with_classes(config: Any, head: Head, labels: tuple[str, ...]) -> Any:
    """The config, with the number and names of the head's logits set; a score is one logit without a name."""
    # By this key of transformers `ends_in_classes` recognises a built model.
    config.problem_type = CLASSES if head in ("text", "image") else None
    if head == "score":
        config.num_labels = 1
    elif head not in LM and labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    return config


def in_own_order(config: Any, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The classes in the order of a model that was trained on just these: its logits keep their meaning. Else `labels` as they are."""
    own = _named(config)
    return own if set(own) == set(labels) else labels


def require_classes(config: Any, labels: tuple[str, ...], where: str) -> None:
    """Raises ModelError for a classifier of other classes than `labels`; the names that transformers makes up (LABEL_0) fit any."""
    own = _named(config)
    if own != labels and not all(name == f"LABEL_{index}" for index, name in enumerate(own)):
        few = [", ".join(names[:5]) + ", …" * (len(names) > 5) for names in (own, labels)]
        fix = "name a model of these classes, or rows of those"
        raise ModelError(f"tells apart {few[0]}, and the rows have {few[1]}", where=where, fix=fix)


def _named(config: Any) -> tuple[str, ...]:
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names))


def ends_in_classes(model: Any) -> bool:
    return getattr(model.config, "problem_type", None) == CLASSES


def reads_images(model: Any) -> bool:
    """Whether a model reads images alone: the main input of a vision-language model is text."""
    return getattr(model, "main_input_name", "input_ids") == "pixel_values"


def is_encoder(model: Any) -> bool:
    """Whether the config of a language model makes it a bidirectional encoder, as for BERT. Others are found by trying."""
    return getattr(model.config, "is_decoder", None) is False and any(
        getattr(m, "is_decoder", None) is False for m in model.modules()
    )


def bidirectional(model: Any) -> ModelError:
    """The error for next-token training of a model that attends to later tokens."""
    decoder = (
        "set model.config.is_decoder: true, under which its tokens see those before them alone, or "
        if is_encoder(model)
        else ""
    )
    what = f"{type(model).__name__} reads in both directions: each token would see the next one, which it is to predict"
    return ModelError(
        what,
        where="model",
        fix=f"{decoder}use algorithm: classify, or name a causal language model",
    )
