"""Start the launcher of several hosts with another module as its ranks.

`python -m plugins.hosts.tests.launcher PLAN_JSON MODULE`
"""

import sys
from pathlib import Path

from drumline.errors import DrumlineError
from drumline.launch.local import launch
from drumline.plan.plan import Plan
from drumline_hosts.ray.spec import RayLauncher
from drumline_hosts.ssh.spec import SSHLauncher
from drumline_hosts.ssh.start import counts


def main(path: Path, worker: str) -> int:
    plan = Plan.load(path)
    options = plan.config.launch
    assert isinstance(options, SSHLauncher | RayLauncher)
    with options.early(plan.config, path) as hosts:
        if isinstance(options, SSHLauncher):
            hosts.counts = counts(options)
        else:
            hosts.counts = dict(zip(hosts.remotes, options.host_ranks(), strict=True))
        return launch(plan, path, None, lambda event: None, worker=worker, ranks=hosts)


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]), sys.argv[2])
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
