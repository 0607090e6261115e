"""The first lines of a rank: tie its life to the launcher's, then become its module.

    python -m drumline.launchers.worker PARENT_PID MODULE|SCRIPT.py ARGUMENTS...

Only the standard library here: torch takes seconds to import, and a launcher that is killed meanwhile may leave no rank behind.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from drumline.core.process import die_with_parent


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))  # as python SCRIPT.py has it
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
