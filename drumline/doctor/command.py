"""`drumline doctor`: check the hosts before a run, or search the logs after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from drumline.config.launcher import LauncherSpec
from drumline.doctor.check import HostReport, table
from drumline.doctor.diagnose import STDIN, Finding, diagnose, ranks_without_log
from drumline.doctor.host import Question, examine
from drumline.doctor.hosts import all_reduce, compare_hosts, examine_hosts
from drumline.errors import UserError, printable
from drumline.foreign import expand_home
from drumline.hardware.catalog import OTHER_NETWORK
from drumline.hardware.detect import detect
from drumline.system.output import plural

# Ranks of the all-reduce on a machine without a GPU: the fewest that have something to reduce.
CPU_RANKS = 2


def doctor(place: str | None, bandwidth: bool, as_json: bool, overrides: Sequence[str] = ()) -> int:
    """Check what a run needs, or find why a run failed; return the exit code.

    The exit code is 1 if a check failed, or if the logs tell why the run failed, and otherwise 0.

    Args:
        place: Before a run: its config, or None to check this host. After a run: its folder, a log,
            or `-` for standard input.
        bandwidth: Whether to measure between pairs of ranks, too.
        as_json: Whether to print JSON instead of text.
        overrides: Values that replace those of the config, as `key=value`.

    Raises UserError if there is nothing at `place`, for overrides without a config, and for
    `bandwidth` after a run.
    """
    if place is None:
        return _check_hosts(None, (), bandwidth, as_json)
    if Path(place).suffix in (".yaml", ".yml") and not Path(place).is_dir():
        return _check_hosts(Path(place), overrides, bandwidth, as_json)
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
    return _explain_failure(place, as_json)


def _explain_failure(place: str, as_json: bool) -> int:
    """Print why a run failed, by its logs, and return the exit code."""
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
    """Return the findings as text: each cause with its evidence and fix, each consequence in one line.

    Args:
        findings: The findings, those of the newest attempt first.
        silent: The ranks that wrote no log in the newest attempt.
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
    # Logs may contain escape sequences, which the terminal would obey.
    return printable(text.rstrip())


def _finding_lines(finding: Finding) -> list[str]:
    """Return the lines of a finding: one for a consequence, four for a cause."""
    ranks = ""
    if len(finding.ranks) == 1:
        ranks = f"rank {finding.ranks[0]}: "
    elif finding.ranks:
        ranks = f"{len(finding.ranks)} ranks: "
    evidence = finding.evidence
    if finding.caused_by:
        causes = ", ".join(finding.caused_by)
        return [f"  in consequence of {causes}: {ranks}{finding.cause} ({evidence.place})"]
    signature = finding.signature
    mark = "!" if signature.warn else "✗"
    more = ""
    if finding.line_count > 1:
        more = f" (and {plural(finding.line_count - 1, 'more line')})"
    return [
        f"{mark} {ranks}{finding.cause}  [{signature.name}]",
        f"    evidence  {evidence.place}{more}",
        f"              {evidence.text}",
        f"    fix       {signature.fix}",
    ]


def _check_hosts(
    config: Path | None, overrides: Sequence[str], bandwidth: bool, as_json: bool
) -> int:
    """Check the hosts of a run, print the checks and return the exit code.

    Args:
        config: The config of the run; None to check this host alone.
        overrides: Values that replace those of the config, as `key=value`.
        bandwidth: Whether to measure between pairs of ranks, too.
        as_json: Whether to print JSON instead of a table.
    """
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
        hosts = [host, HostReport(host.name, checks, {})]
    if as_json:
        _print_json({"hosts": [host.to_json() for host in hosts]})
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
    """Return what a run needs of a host, the name of the link between its hosts, and its launcher.

    Raises ConfigError for a config that cannot be loaded.
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
    """Return the folder that `model.id` names; None for a model of the hub, or without a model."""
    if not model:
        return None
    folder = expand_home(model)
    if folder.is_dir() or folder.is_absolute():
        return str(folder)
    return None


def _files(pattern: str, base: Path) -> list[str]:
    """Return the files of a source of data; none for a URL.

    If the pattern matches no file, the result is the pattern itself, so that a check reports that
    it is missing.

    Args:
        pattern: A path, a glob or a URL, as in the config.
        base: The folder that relative paths start from.
    """
    from glob import glob

    from drumline.config.urls import is_url

    if is_url(pattern):
        return []
    full = str(base / expand_home(pattern))
    return sorted(glob(full, recursive=True)) or [full]  # noqa: PTH207 - it may be absolute
