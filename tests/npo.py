"""The plug-in of examples/plugins/npo where it is not installed: `kind: tests.npo:NPOConfig`."""

from __future__ import annotations

import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "examples" / "plugins" / "npo"
if str(PLUGIN) not in sys.path:
    sys.path.append(str(PLUGIN))

from drumline_npo.spec import NPOConfig  # noqa: E402

__all__ = ["PLUGIN", "NPOConfig"]
