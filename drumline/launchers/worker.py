"""The first lines of a rank: tie its life to the launcher's, then become its module.

    python -m drumline.launchers.worker PARENT_PID MODULE ARGUMENTS...

Only the standard library here: torch takes seconds to import, and a launcher that is killed meanwhile may leave no rank behind.
"""

from __future__ import annotations

import runpy
import sys

from drumline.core.process import die_with_parent


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
