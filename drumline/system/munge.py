"""A secret for the ranks of one user in a cluster that has munge, as those of Slurm have: sealed by one, opened by the others. It stands in
no file and on no command line. munge(1), unmunge(1): https://github.com/dun/munge/wiki/Man-Pages"""

from __future__ import annotations

import os
import re

from drumline.system.process import run_command

SECRET = "DRUMLINE_SECRET"  # a variable that a user gives to all ranks, where there is no munge
SECONDS = 20.0
# It is late, early, or opened for the second time on this host: munge shows it all the same, and
# its signature is right (munge.h).
SHOWN = (0, 15, 16, 17)


def seal(text: str) -> str | None:
    """A credential that only processes of this user can open, on hosts with the same key; None where there is no munge."""
    code, credential = _run("munge", f"--restrict-uid={os.getuid()}", question=text)
    return credential.strip() if code == 0 else None


def unseal(credential: str) -> str | None:
    """What was sealed by this user; None for anything else, and where there is no munge."""
    code, shown = _run("unmunge", "--numeric", "--keys=UID", question=credential)
    match = re.fullmatch(r"UID:\s*(\d+)\s+(\S+)\s*", shown)
    return match[2] if code in SHOWN and match and int(match[1]) == os.getuid() else None


def _run(*command: str, question: str) -> tuple[int | None, str]:
    try:
        code, out, _ = run_command(command, question, SECONDS)
    except OSError:
        return None, ""
    return code, out
