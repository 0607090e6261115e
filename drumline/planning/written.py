"""What to write and type to train by a candidate."""

from __future__ import annotations

import shlex
from pathlib import Path

from drumline.config.schema import Config
from drumline.config.yaml_lines import write_yaml
from drumline.plan.search import Candidate
from drumline.planning.figures import overrides, whole


def to_use(asked: Config, candidate: Candidate, config: Path | None) -> str:
    """The command that trains by it (a YAML was given), or the YAML to write (none was)."""
    if config is not None:
        return f"To train by {candidate.name}:\n  {shlex.join(['drumline', 'train', str(config), *overrides(asked, candidate)])}"
    lines = write_yaml(whole(asked, candidate)).splitlines()
    return "\n".join([f"To train by {candidate.name}, in a YAML (`drumline init` writes it):", *(f"  {line}" for line in lines)])
