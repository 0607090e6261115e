"""`drumline doctor`: check the hosts before a run, or search the logs after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from drumline.config.launcher import LauncherSpec
from drumline.doctor.check import Host, table
from drumline.doctor.diagnose import STDIN, Finding, diagnose, ranks_without_log
from drumline.doctor.host import Question, examine
from drumline.doctor.hosts import all_reduce, compare_hosts, examine_hosts
from drumline.errors import UserError, printable
from drumline.foreign import expanded
from drumline.hardware.catalog import OTHER_NETWORK
from drumline.hardware.detect import detect
from drumline.system.output import plural

# Ranks of the all-reduce on a machine without a GPU: the fewest that have something to reduce.
CPU_RANKS = 2


def doctor(place: str | None, bandwidth: bool, as_json: bool, overrides: Sequence[str] = ()) -> int:
    """Check what a run needs, or find why a run failed; return the exit code.

    The code is 1 if a check failed, or if the logs tell why the run failed.

    Args:
        place: Before a run, its config, or None to check this host; after it, the run folder, a
            log, or - for standard input.
        bandwidth: Also measure between pairs of ranks.
        as_json: Print JSON instead of text.
        overrides: Values of the config that replace its own, as `key=value`.

    Raises UserError if there is nothing at `place`, and for overrides without a config.
    """
    if place is None:
        return _before(None, (), bandwidth, as_json)
    if Path(place).suffix in (".yaml", ".yml") and not Path(place).is_dir():
        return _before(Path(place), overrides, bandwidth, as_json)
    if overrides:
        raise UserError(
            "only a config has values to replace",
            where=f"drumline doctor {place} {overrides[0]}",
            fix="name one place: a config, a run or a log",
        )
    if bandwidth:
        raise UserError(
            "--bandwidth measures before a run",
            where=f"drumline doctor {place}",
            fix="name no run, or its config",
        )
    if place != STDIN and not Path(place).exists():
        raise UserError(
            "no such run, log or config",
            where=place,
            fix="name one that is there, or - for standard input",
        )
    return _after(place, as_json)


def _after(place: str, as_json: bool) -> int:
    """Print what the logs of a run say; return the exit code."""
    findings = diagnose(place)
    silent: list[int] = []
    if Path(place).is_dir():
        silent = ranks_without_log(Path(place))
    if as_json:
        values = [finding.values() for finding in findings]
        _print_json({"findings": values, "ranks_without_log": silent})
    else:
        print(as_text(findings, silent))
    has_fault = any(not finding.signature.warn for finding in findings)
    return int(has_fault)


def _print_json(values: object) -> None:
    """Print values as JSON."""
    print(json.dumps(values, indent=1, ensure_ascii=False))


def as_text(findings: Sequence[Finding], silent: Sequence[int] = ()) -> str:
    """Return the findings as text: causes with their evidence, and a line for each consequence.

    Args:
        findings: The findings, those of the newest attempt first.
        silent: Ranks without a log.
    """
    lines = []
    attempt = None
    for finding in findings:
        if attempt is not None and finding.evidence.attempt != attempt:
            lines += [f"before, in attempt {finding.evidence.attempt}:", ""]
        attempt = finding.evidence.attempt
        lines += [*_finding_lines(finding), ""]
    if silent:
        ranks = ", ".join(map(str, silent))
        lines.append(f"! no log of rank {ranks} in the newest attempt: it never started")
    if not lines:
        lines.append("✓ no signature of a fault was found")
    text = "\n".join(lines)
    # Logs may hold sequences that would command the terminal.
    return printable(text.rstrip())


def _finding_lines(finding: Finding) -> list[str]:
    """Return the lines of a finding: one for a consequence, four for a cause."""
    ranks = ""
    if len(finding.ranks) == 1:
        ranks = f"rank {finding.ranks[0]}: "
    elif finding.ranks:
        ranks = f"{len(finding.ranks)} ranks: "
    evidence = finding.evidence
    if finding.follows:
        causes = ", ".join(finding.follows)
        return [f"  in consequence of {causes}: {ranks}{finding.cause} ({evidence.place})"]
    signature = finding.signature
    mark = "!" if signature.warn else "✗"
    more = ""
    if finding.lines > 1:
        more = f" (and {plural(finding.lines - 1, 'more line')})"
    return [
        f"{mark} {ranks}{finding.cause}  [{signature.name}]",
        f"    evidence  {evidence.place}{more}",
        f"              {evidence.text}",
        f"    fix       {signature.fix}",
    ]


def _before(config: Path | None, overrides: Sequence[str], bandwidth: bool, as_json: bool) -> int:
    """Check the hosts of a run, or this one, and print the checks; return the exit code."""
    question = Question()
    inter = OTHER_NETWORK
    launcher = None
    if config:
        question, inter, launcher = read_question(config, overrides)
    machine = detect()
    reached = launcher.reach() if launcher else {}
    if reached:
        hosts = examine_hosts(reached, question)
        hosts.append(compare_hosts(reached, hosts, machine, inter, question.interface, bandwidth))
    else:
        host = examine(question)
        ranks = len(machine.devices) or CPU_RANKS
        host_of_rank = [host.name] * ranks
        checks = all_reduce(host_of_rank, machine, bandwidth, inter, host.port)
        hosts = [host, Host(host.name, checks, {})]
    if as_json:
        _print_json({"hosts": [host.values() for host in hosts]})
    else:
        Console().print(table(hosts))
    has_failed = False
    for host in hosts:
        if any(check.verdict == "fail" for check in host.checks):
            has_failed = True
    return int(has_failed)


def read_question(
    config: Path, overrides: Sequence[str] = ()
) -> tuple[Question, str, LauncherSpec]:
    """Return what a run of a config needs of a host, the link between its hosts, and its launcher.

    Raises ConfigError.
    """
    from drumline.config.data import FileSource, SavedSource
    from drumline.config.load import load
    from drumline.plan.explain import default_run_dir

    loaded = load(config, list(overrides))
    run = loaded.config
    cache_dir = None
    paths: list[str] = []
    if run.data:
        cache_dir = run.data.cache_dir
        for source in (*run.data.train, *run.data.eval):
            if isinstance(source, FileSource | SavedSource):
                paths += _files(source.path, loaded.base_dir)
    question = Question(
        run_dir=str(run.run.dir or default_run_dir(loaded.path)),
        cache_dir=cache_dir,
        model=_model_folder(run.model.id),
        data=tuple(paths),
        port=run.launch.port,
        interface=getattr(run.launch, "interface", None),
    )
    inter = OTHER_NETWORK
    if run.cluster and run.cluster.inter:
        inter = run.cluster.inter
    return question, inter, run.launch


def _model_folder(model: str | None) -> str | None:
    """Return the folder that `model.id` names; None if it names a model of the hub, or none."""
    if not model:
        return None
    folder = expanded(model)
    if folder.is_dir() or folder.is_absolute():
        return str(folder)
    return None


def _files(pattern: str, base: Path) -> list[str]:
    """Return the files that a path or glob names; empty for a URL.

    If there are none, it is the path itself, so that a check says that it is missing.

    Args:
        pattern: As in the config.
        base: The folder that relative paths start from.
    """
    from glob import glob

    from drumline.config.urls import is_url

    if is_url(pattern):
        return []
    full = str(base / expanded(pattern))
    return sorted(glob(full, recursive=True)) or [full]  # noqa: PTH207 - it may be absolute
