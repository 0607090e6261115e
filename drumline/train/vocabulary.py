"""The size of the trained model's vocabulary."""

from __future__ import annotations

from drumline.models.load import load_config
from drumline.models.vocabulary import stored_rows
from drumline.plan.plan import Plan


def vocabulary_entries(plan: Plan) -> int:
    """Return the number of rows of the trained model's head."""
    config = load_config(plan.model_path, plan.config.model)
    rows = stored_rows(config)
    assert rows is not None, "a language model has a vocabulary"
    return rows
