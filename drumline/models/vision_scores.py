"""The class of reward models that read images: a trunk of transformers with a linear layer `score`.

transformers has such a class for few vision-language models. The others get one that is made in the
same way and has the name that transformers would give it, such as Qwen3VLForSequenceClassification.
So other programs that read the exported folder know what it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

ENDING = "ForSequenceClassification"


class ScoreLoader:
    """Builds and reads such models, by the methods of an Auto class of transformers."""

    def __init__(self, model_class: Any) -> None:
        self.model_class = model_class

    def from_config(self, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        """Return a model of a config. `trust_remote_code`: the class is transformers' own."""
        return self.model_class._from_config(config, **options)

    def from_pretrained(self, path: str, **options: Any) -> Any:
        """Return a model that is read from a folder or hub id."""
        return self.model_class.from_pretrained(path, **options)


def score_loader(config: Any) -> Any:
    """Return the loader of reward models with transformers' config of a vision-language model."""
    import transformers

    from drumline.vendor.transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return transformers.AutoModelForSequenceClassification
    config_class: Any = type(config)
    return ScoreLoader(_score_class(config_class))


@cache
def _score_class(config_class: Any) -> type:
    """Return the class of score models for a class of configs; always the same one."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    from drumline.vendor.transformers import (
        GenericForSequenceClassification,
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    trunk_class: Any = MODEL_MAPPING[config_class]
    language_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    # The base of all classes of this type of model, which has their initialisation and options.
    base, *_ = [each for each in trunk_class.__mro__ if each.__name__.endswith("PreTrainedModel")]
    name = base.__name__.removesuffix("PreTrainedModel") + ENDING
    # Some files have other names of tensors, and transformers knows them by the name of the class.
    renamings = get_checkpoint_conversion_mapping(language_class.__name__)
    if renamings is not None:
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
    # In the module of the others: a class of another module would count as a user's own code.
    members = {"__module__": base.__module__, "__doc__": "A trunk and a score."}
    return type(name, (GenericForSequenceClassification, base), members)
