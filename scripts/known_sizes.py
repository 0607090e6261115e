"""Count the sizes of all known shapes anew, into drumline/models/known_sizes.txt. tests/unit/test_shapes.py fails where they have changed.

python scripts/known_sizes.py
"""

from __future__ import annotations

from importlib.metadata import version

from drumline.config.model import ModelConfig
from drumline.models.classes import set_classes
from drumline.models.load import facts, load_config
from drumline.models.shapes import KNOWN, names_to_count, with_config
from drumline.planner.sizes import SHIPPED, dump

LENGTH = 1024  # tokens: a power of two, by which sizes at other lengths follow without rounding


def counted(name: str, length: int = LENGTH) -> str:
    config = load_config(None, with_config(KNOWN[name], ModelConfig()))
    return dump(length, facts(set_classes(config, "lm", ()), length))


if __name__ == "__main__":
    lines = [version("transformers")]
    for name in names_to_count():
        lines.append(f"{name} {counted(name)}")
    SHIPPED.write_text("\n".join(lines) + "\n")
