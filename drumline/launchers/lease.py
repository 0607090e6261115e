"""The lease of a run folder: one launcher at a time writes into it, on this host or any other that shares the folder.

`run.lock` is a line of JSON with its holder, and a counter that its holder raises every two seconds. It appears whole by a hard
link, and a dead one is taken away by a rename, so that network file systems can keep it, too (not tried on one; there is no flock). Whether
a holder lives is seen of its process where that can be seen, else of its counter: never of the files' times, since clocks differ and jump.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from drumline.core.files import create_whole, write_whole
from drumline.core.output import say
from drumline.core.process import ProcessId, this_process
from drumline.errors import EnvironmentFault
from drumline.foreign import disk_errors

NAME = "run.lock"
STOP = f"{NAME}.stop"  # beside it: the token of the lease whose holder shall stop
RENEW_SECONDS = 2.0
PATIENCE_SECONDS = (
    8.0  # a counter that stands still for so long, by the reader's own clock, is a dead holder's
)
LOOK_SECONDS = 0.5
LONGEST = 8192  # bytes; no lease is longer


class Lease:
    """Holds the run folder while it is entered, and makes it where it is not there.

    `__enter__` raises EnvironmentFault where somebody else has it, or it cannot be written to. A holder that finds its lease in other
    hands (it was suspended, or cut off from the disk) ends its process on the spot, and with it the ranks: the folder is no longer its own.
    """

    def __init__(
        self,
        run_dir: Path,
        at: tuple[str, int] | None = None,
        after: str | None = None,
        frozen: tuple[str | None, float] = (None, 0.0),
    ) -> None:
        """`at`: where the holder listens to agents of other hosts. `after`: the token of the only lease that may be followed, once its
        holder is dead; not where that has given it back. `frozen`: a text of the file, and since when (seconds of this host's monotonic
        clock) a process of this host has seen no other there; None: nobody has looked."""
        self.run_dir, self.path, self.after, self.frozen = run_dir, run_dir / NAME, after, frozen
        self.token = secrets.token_hex(8)
        owner = {
            "token": self.token,
            **asdict(this_process()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "at": at,
        }
        self._head = json.dumps(owner).encode() + b"\n"
        self._count, self._ended = 0, threading.Event()
        self._made = False

    def __enter__(self) -> Self:
        self._made = not self.run_dir.exists()
        with disk_errors(
            "cannot write the run folder",
            str(self.run_dir),
            EnvironmentFault,
            "choose another with run.dir=…",
        ):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.after is not None:
                self._wait_for_the_other()
            followed = False
            while not create_whole(self.path, self._text()):
                self._wait_for_the_other()
                followed = True
            if followed:
                self._confirm()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="drumline-lease")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)  # no longer, where the disk does not answer
        with suppress(OSError):  # what cannot be removed is a dead process's soon
            if _token(_read(self.path) or b"") == self.token:
                self.path.unlink()
            if self._made:
                self.run_dir.rmdir()  # where nothing came into it

    def _confirm(self) -> None:
        """Of several that wait for one dead holder, one may move the lease of the next aside for a moment, in which a third makes its own.
        Raises EnvironmentFault where that has happened to ours."""
        time.sleep(LOOK_SECONDS)
        seen = _read(self.path)
        if seen is not None and _token(seen) != self.token:
            raise self._in_use(seen)

    def _text(self) -> bytes:
        return self._head + b"%020d\n" % self._count

    def _wait_for_the_other(self) -> None:
        """Come back when the file that is there is gone, by its holder's hand or, if that is dead, by ours. Raises EnvironmentFault."""
        seen = self._look()
        if seen is None:
            return
        holder = _holder(seen)
        alive = holder and holder.alive()
        if alive is None:
            say(
                f"note: {self.run_dir} may be in use by {_holder_text(seen)}: looking for {PATIENCE_SECONDS:g} s"
            )
            until = (
                self.frozen[1]
                if seen.decode(errors="replace") == self.frozen[0]
                else time.monotonic()
            ) + PATIENCE_SECONDS
            while not alive and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                now = self._look()
                if now is None:
                    return
                alive = now != seen
        if alive:
            raise self._in_use(seen)
        self._take_away(seen)

    def _in_use(self, seen: bytes) -> EnvironmentFault:
        fix = "wait for that run's end or stop it, or choose another folder with run.dir=…"
        return EnvironmentFault(
            f"the run folder is in use by {_holder_text(seen)}", where=str(self.run_dir), fix=fix
        )

    def _look(self) -> bytes | None:
        """What is in the file. Raises EnvironmentFault where that is not the lease that this one may follow."""
        seen = _read(self.path)
        if self.after not in (None, _token(seen or b"")):
            raise EnvironmentFault(
                "the run has ended, or another host has taken it over", where=str(self.run_dir)
            )
        return seen

    def _take_away(self, dead: bytes) -> None:
        """Remove the file with these contents. One that somebody has put there since comes back."""
        aside = self.path.with_name(f"{NAME}.{self.token}")
        with suppress(FileNotFoundError):  # somebody else took it away
            self.path.rename(aside)
            if aside.read_bytes() != dead:
                with suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with suppress(
                OSError, EnvironmentFault
            ):  # a full disk, a host that does not answer: tried again in two seconds
                self._renew()
                self._stop_if_requested()

    def _renew(self) -> None:
        """Raise the counter, in the file that was found to be ours: no new file, so a full disk does not end the lease."""
        self._count += 1
        try:
            with self.path.open("r+b", buffering=0) as file:
                there = file.read(LONGEST)
                if _token(there) == self.token:
                    file.seek(0)
                    file.write(self._text())
                    return
        except FileNotFoundError:
            if not self._ended.is_set():
                create_whole(self.path, self._text())  # somebody removed it
            return
        lost = f"the run folder was taken over by {_holder_text(there)} — this run ends here"
        say(f"\nerror: {self.run_dir}: {lost}")
        os._exit(1)

    def _stop_if_requested(self) -> None:
        """As by a signal to this process: its ranks, or this rank with the rest, save."""
        if _read(self.run_dir / STOP) == self.token.encode():
            (self.run_dir / STOP).unlink()
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Holder:
    """Who has a run folder. `alive`: None where only its counter, which it raises, can show that."""

    token: str
    host: str
    pid: int
    since: str
    count: bytes
    alive: bool | None


def holder(run_dir: Path) -> Holder | None:
    """Who has a run folder by its lease, alive or dead; None where nobody has."""
    seen = _read(run_dir / NAME)
    process = seen and _holder(seen)
    if not seen or not process:
        return None
    fields = _fields(seen)
    token, since = str(fields.get("token")), str(fields.get("since"))[:30]
    return Holder(token, process.host[:100], process.pid, since, seen, process.alive())


def holders(run_dirs: Sequence[Path]) -> dict[Path, Holder]:
    """Those of run folders, by folder, each known to be alive or dead: that takes some seconds where one is on another host."""
    found = {folder: one for folder in run_dirs if (one := holder(folder)) is not None}
    if any(one.alive is None for one in found.values()):
        time.sleep(2 * RENEW_SECONDS)
    for folder, one in found.items():
        if one.alive is None:
            now = holder(folder)
            found[folder] = replace(one, alive=now is not None and now.count != one.count)
    return found


def request_stop(run_dir: Path, token: str) -> None:
    """Have the holder of a run folder stop as by SIGTERM, on whichever host it is. Raises EnvironmentFault."""
    with disk_errors(
        "cannot be written", str(run_dir / STOP), EnvironmentFault, "stop it as its owner"
    ):
        write_whole(run_dir / STOP, token)


@contextmanager
def guarded(run_dir: Path) -> Iterator[None]:
    """Within, this rank ends when the run folder comes into other hands: its launcher may be suspended, and cannot end it."""
    own, ended = None, threading.Event()
    with suppress(OSError, EnvironmentFault):
        own = token_of(run_dir)

    def look() -> None:
        while not ended.wait(RENEW_SECONDS):
            with suppress(OSError, EnvironmentFault):
                if token_of(run_dir) not in (own, None) and not ended.is_set():
                    say(
                        f"error: another launcher has taken {run_dir} over: this rank ends, its own may be suspended"
                    )
                    os._exit(1)

    if own is not None:  # else nobody looks after the folder, as in a trial
        threading.Thread(target=look, daemon=True, name="drumline-guard").start()
    try:
        yield
    finally:
        ended.set()


def has_lease(token: str, run_dir: Path, seconds: float) -> bool:
    """Whether the lease with this token is in `run_dir`, or appears there within `seconds`."""
    until = time.monotonic() + seconds
    while True:
        with suppress(OSError, EnvironmentFault):  # such as a folder that is not there
            if _token(_read(run_dir / NAME) or b"") == token:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_SECONDS)


def token_of(run_dir: Path) -> str | None:
    """The token of the lease that is in a run folder."""
    return _token(_read(run_dir / NAME) or b"")


def text_of(run_dir: Path) -> str:
    """What is in the file; empty where there is none. Raises OSError, and EnvironmentFault for what is no file."""
    return (_read(run_dir / NAME) or b"").decode(errors="replace")


def place_of(run_dir: Path) -> tuple[str, int] | None:
    """Where the holder of a run folder listens to agents of other hosts, if it does."""
    match _fields(_read(run_dir / NAME) or b"").get("at"):
        case [str(address), int(port)]:
            return address, port
    return None


def _read(path: Path) -> bytes | None:
    """The file's bytes, None where there is none. Raises EnvironmentFault for what is no file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise EnvironmentFault(
                "is no lock of Drumline",
                where=str(path),
                fix="remove it, if no run is using the folder",
            )
        with path.open("rb") as file:
            return file.read(LONGEST)
    except FileNotFoundError:
        return None


def _fields(text: bytes) -> dict[str, Any]:
    """The fields of a lease; empty for anything else."""
    try:
        fields = json.loads(text.split(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _token(text: bytes) -> str | None:
    token = _fields(text).get("token")
    return token if isinstance(token, str) else None


def _holder(text: bytes) -> ProcessId | None:
    fields = _fields(text)
    kinds = {"host": str, "boot": str, "space": str, "pid": int, "start": int}
    if (
        any(type(fields.get(name)) is not kind for name, kind in kinds.items())
        or not 0 < fields["pid"] < 2**31
    ):
        return None
    return ProcessId(**{name: fields[name] for name in kinds})


def _holder_text(text: bytes) -> str:
    holder = _holder(text)
    if holder is None:
        return f"somebody (what {NAME} says cannot be read)"
    return f"pid {holder.pid} on host {holder.host[:100]}, since {str(_fields(text).get('since'))[:30]}"
