"""The plug-in of examples/plugins/kto where it is not installed: `kind: tests.kto:KTOConfig`."""

from __future__ import annotations

import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "examples" / "plugins" / "kto"
if str(PLUGIN) not in sys.path:
    sys.path.append(str(PLUGIN))

from drumline_kto.spec import KTOConfig  # noqa: E402

__all__ = ["PLUGIN", "KTOConfig"]
