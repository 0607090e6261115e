"""A user's script: trains by `drumline.train` what its argument says as JSON, and prints what came
of it as one line of JSON."""

from __future__ import annotations

import json
import sys

import drumline


def main() -> None:
    asked = json.loads(sys.argv[1])
    said = []
    try:
        for one in asked:
            run = drumline.train(*one["arguments"], **one.get("options", {}))
            code = run.exit_code
            told = {
                "dir": str(run.dir),
                "code": code,
                "metrics": run.metrics,
                "best": str(run.best),
            }
            said.append(told)
    except drumline.errors.DrumlineError as error:
        print(json.dumps({"error": type(error).__name__, "line": error.line()}))
        return
    print(json.dumps(said))


if __name__ == "__main__":
    main()
