"""Which of transformers' Auto classes builds the model that a config describes: the one table."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """The Auto class, for `from_config` and `from_pretrained`: of a language model, or of one that sees images too."""
    import transformers

    from drumline.models.vision import is_vision_language

    return transformers.AutoModelForImageTextToText if is_vision_language(config) else transformers.AutoModelForCausalLM
