"""Share a secret among a user's ranks by munge, which clusters with Slurm have.

One rank seals it and the others open it. It is in no file and on no command line.
munge(1), unmunge(1): https://github.com/dun/munge/wiki/Man-Pages
"""

from __future__ import annotations

import os
import re

from drumline.system.process import run_command

# A variable that the user sets for all ranks if there is no munge.
SECRET = "DRUMLINE_SECRET"
SECONDS = 20.0
# Exit codes with which unmunge prints a credential whose signature is right (munge.h): success,
# expired, from the future, and opened before on this host.
SHOWN = (0, 15, 16, 17)


def seal(text: str) -> str | None:
    """Return a credential of a text that only this user's processes can open.

    They may run on any host with the same munge key. None if there is no munge here.
    """
    code, credential = _run("munge", f"--restrict-uid={os.getuid()}", stdin=text)
    return credential.strip() if code == 0 else None


def unseal(credential: str) -> str | None:
    """Return the text of a credential that this user has sealed.

    None if there is no munge, if another user sealed it, or if it is no credential.
    """
    code, shown = _run("unmunge", "--numeric", "--keys=UID", stdin=credential)
    match = re.fullmatch(r"UID:\s*(\d+)\s+(\S+)\s*", shown)
    if code not in SHOWN or match is None:
        return None
    if int(match[1]) != os.getuid():
        return None
    return match[2]


def _run(*command: str, stdin: str) -> tuple[int | None, str]:
    """Return exit code and standard output of a command; no code if there is no such command."""
    try:
        code, out, _ = run_command(command, stdin, SECONDS)
    except OSError:
        return None, ""
    return code, out
