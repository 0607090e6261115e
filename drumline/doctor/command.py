"""`drumline doctor`: before a run the checks of its hosts and an all-reduce of their ranks; after one what its logs say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from drumline.core.launcher import LauncherSpec
from drumline.doctor.check import Host, table
from drumline.doctor.diagnose import STDIN, Finding, diagnose, rank_without_log
from drumline.doctor.host import Question, examine
from drumline.doctor.hosts import all_reduce, compared, examined
from drumline.errors import UserError, printable
from drumline.foreign import expanded
from drumline.hardware.catalog import OTHER_NETWORK
from drumline.hardware.detect import detect

CPU_RANKS = 2


def doctor(place: str | None, bandwidth: bool, as_json: bool) -> int:
    """Returns the exit code: 1 where a check failed, or where the logs say why the run did. Raises UserError for a place that is not
    there."""
    if place is None or (Path(place).suffix in (".yaml", ".yml") and not Path(place).is_dir()):
        return _before(Path(place) if place else None, bandwidth, as_json)
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


# ------------------------------------------------------------------------------------------------------------------ after a run


def _after(place: str, as_json: bool) -> int:
    findings = diagnose(place)
    silent = rank_without_log(Path(place)) if Path(place).is_dir() else []
    if as_json:
        print(
            _json(
                {
                    "findings": [finding.values() for finding in findings],
                    "ranks_without_log": silent,
                }
            )
        )
    else:
        print(as_text(findings, silent))
    return int(any(not finding.signature.warn for finding in findings))


def _json(values: object) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False)


def as_text(findings: Sequence[Finding], silent: Sequence[int] = ()) -> str:
    """Causes with their evidence and mend; consequences in one line each, and attempts before the newest below it."""
    lines, attempt = [], None
    for finding in findings:
        if attempt is not None and finding.evidence.attempt != attempt:
            lines += [f"before, in attempt {finding.evidence.attempt}:", ""]
        attempt = finding.evidence.attempt
        ranks = (
            f"rank {finding.ranks[0]}: "
            if len(finding.ranks) == 1
            else f"{len(finding.ranks)} ranks: "
            if finding.ranks
            else ""
        )
        if finding.follows:
            lines += [
                f"  in consequence of {', '.join(finding.follows)}: {ranks}{finding.cause} ({finding.evidence.place})",
                "",
            ]
            continue
        more = f" (and {finding.lines - 1} more lines)" if finding.lines > 1 else ""
        lines += [
            f"{'!' if finding.signature.warn else '✗'} {ranks}{finding.cause}  [{finding.signature.name}]"
        ]
        lines += [
            f"    evidence  {finding.evidence.place}{more}",
            f"              {finding.evidence.text}",
        ]
        lines += [f"    mend      {finding.signature.mend}", ""]
    if silent:
        lines += [
            f"! no log of rank {', '.join(map(str, silent))} in the newest attempt: it never started",
            "",
        ]
    return printable("\n".join(lines or ["✓ no signature of a fault was found"]).rstrip())


# ----------------------------------------------------------------------------------------------------------------- before a run


def _before(config: Path | None, bandwidth: bool, as_json: bool) -> int:
    question, inter, launcher = asked_by(config) if config else (Question(), OTHER_NETWORK, None)
    machine, reached = detect(), launcher.reach() if launcher else {}
    if reached:
        hosts = examined(reached, question)
        hosts.append(compared(reached, hosts, machine, inter, question.interface, bandwidth))
    else:
        host = examine(question)
        names = [host.name] * (len(machine.devices) or CPU_RANKS)
        hosts = [host, Host(host.name, all_reduce(names, machine, bandwidth, inter, host.port), {})]
    if as_json:
        print(_json({"hosts": [each.values() for each in hosts]}))
    else:
        Console().print(table(hosts))
    return int(any(check.verdict == "fail" for each in hosts for check in each.checks))


def asked_by(config: Path) -> tuple[Question, str, LauncherSpec]:
    """What a run of this config needs of a host, the link between hosts, and its launcher. Raises ConfigError."""
    from drumline.core.data import FileSource, SavedSource
    from drumline.core.explain import default_run_dir
    from drumline.core.load import load

    loaded = load(config, [])
    run, model, base = loaded.config, loaded.config.model.id, loaded.base_dir
    sources = [*run.data.train, *run.data.eval] if run.data else []
    paths = [
        path
        for source in sources
        if isinstance(source, FileSource | SavedSource)
        for path in _files(source.path, base)
    ]
    folder = expanded(model) if model else None
    question = Question(
        run_dir=str(run.run.dir or default_run_dir(loaded.path)),
        cache_dir=run.data.cache_dir if run.data else None,
        model=str(folder) if folder and (folder.is_dir() or folder.is_absolute()) else None,
        data=tuple(paths),
        port=run.launch.port,
        interface=getattr(run.launch, "interface", None),
    )
    inter = run.cluster.inter if run.cluster else None
    return question, inter or OTHER_NETWORK, run.launch


def _files(pattern: str, base: Path) -> list[str]:
    """The files that a path or glob names; the path itself where there are none, which a check then says. None of a URL."""
    from glob import glob

    from drumline.core.urls import is_url

    if is_url(pattern):
        return []
    full = str(base / expanded(pattern))
    return sorted(glob(full, recursive=True)) or [full]  # noqa: PTH207 - it may be absolute
