"""The launcher of several hosts with another module as its ranks: `python -m plugins.hosts.tests.launcher PLAN_JSON MODULE`."""

import sys
from pathlib import Path

from drumline.errors import DrumlineError
from drumline.launch.local import launch
from drumline.plan.plan import Plan
from drumline_hosts.ray.spec import RayLauncher
from drumline_hosts.ssh.spec import SSHLauncher
from drumline_hosts.ssh.start import counts

if __name__ == "__main__":
    path = Path(sys.argv[1])
    plan = Plan.load(path)
    options = plan.config.launch
    assert isinstance(options, SSHLauncher | RayLauncher)
    try:
        with options.early(plan.config, path) as hosts:
            hosts.counts = (
                counts(options)
                if isinstance(options, SSHLauncher)
                else dict(zip(hosts.remotes, options.host_ranks(), strict=True))
            )
            sys.exit(launch(plan, path, None, lambda event: None, worker=sys.argv[2], ranks=hosts))
    except DrumlineError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        sys.exit(error.exit_code)
