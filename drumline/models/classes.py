"""Which of transformers' Auto classes builds the model that a config describes: the one table."""

from __future__ import annotations

from typing import Any

from drumline.config.model import Head

# Head → (Auto class, what it is of).
AUTO: dict[Head, tuple[str, str]] = {
    "lm": ("AutoModelForCausalLM", "causal language model"),
    "score": ("AutoModelForSequenceClassification", "classifier of texts"),
    "text": ("AutoModelForSequenceClassification", "classifier of texts"),
    "image": ("AutoModelForImageClassification", "classifier of images"),
}


def auto_class(config: Any, head: Head = "lm") -> Any:
    """The Auto class, for `from_config` and `from_pretrained`. A language model may see images too."""
    import transformers

    from drumline.models.vision import is_vision_language

    if head == "lm" and is_vision_language(config):
        return transformers.AutoModelForImageTextToText
    return getattr(transformers, AUTO[head][0])


def with_classes(config: Any, head: Head, labels: tuple[str, ...]) -> Any:
    """The config, told how many logits the head has and what they are called; a score is one without a name."""
    if head == "score":
        config.num_labels = 1
    elif head != "lm" and labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        config.problem_type = "single_label_classification"
    return config
