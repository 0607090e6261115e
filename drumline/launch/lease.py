"""Keep the lease of a run folder, so that one launcher at a time writes into it.

The rule holds for launchers of this host and of any other host that shares the folder.

- The file `run.lock` has a line of JSON about its holder, and a counter that the holder raises
  every two seconds.
- The file is made by a hard link, so it is never seen half written. The lease of a dead holder is
  removed by a rename. Both work without flock, so they should work on network file systems (this
  was not tried on one).
- Whether a holder lives is seen from its process, or else from its counter. The times of files are
  never used, since clocks differ and jump.
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

from drumline.errors import EnvironmentFault
from drumline.foreign import disk_errors
from drumline.system.files import create_whole, write_whole
from drumline.system.output import say
from drumline.system.process import ProcessId, this_process

NAME = "run.lock"
# A file beside the lease, with the token of the lease whose holder shall stop. A token, so that a
# request that comes late does not stop the next holder.
STOP = f"{NAME}.stop"
RENEW_SECONDS = 2.0
# A holder is dead if its counter stands still for so long, by the reader's own clock. This is four
# renewals: a slow disk may delay one.
PATIENCE_SECONDS = 8.0
LOOK_SECONDS = 0.5
LONGEST = 8192  # bytes; no lease is longer


class Lease:
    """Holds the run folder within a `with` block, and makes the folder if it does not exist.

    A holder that finds another token in `run.lock` has lost the folder, because it was suspended or
    cut off from the disk for a while. Its process exits immediately, and its ranks with it.

    Raises:
        EnvironmentFault: From `__enter__`, if another process holds the folder or if the folder
            cannot be written to.
    """

    def __init__(
        self,
        run_dir: Path,
        at: tuple[str, int] | None = None,
        after: str | None = None,
        last_seen: tuple[str | None, float] = (None, 0.0),
    ) -> None:
        """Prepare a lease. Nothing is written before `__enter__`.

        Args:
            run_dir: The run folder.
            at: Address and port on which the holder listens to agents of other hosts.
            after: Token of the only lease that this one may replace, once its holder is dead. A
                lease that its holder has given back is not replaced. None: replace the lease of any
                dead holder.
            last_seen: The text of the lease file that this host saw last, and the time since when
                it has not changed (seconds of the monotonic clock). The text is None if no process
                has looked yet. A holder whose lease has not changed for PATIENCE_SECONDS is dead, so a
                caller that has watched the file need not watch it again.
        """
        self.run_dir = run_dir
        self.path = run_dir / NAME
        self.after = after
        self.last_seen = last_seen
        self.token = secrets.token_hex(8)
        owner = {
            "token": self.token,
            **asdict(this_process()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "at": at,
        }
        self._head = json.dumps(owner).encode() + b"\n"
        self._count = 0
        self._ended = threading.Event()
        self._has_made_folder = False  # whether the folder did not exist before

    def __enter__(self) -> Self:
        self._has_made_folder = not self.run_dir.exists()
        with disk_errors(
            "cannot write the run folder",
            str(self.run_dir),
            EnvironmentFault,
            "choose another with run.dir=…",
        ):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.after is not None:
                self._remove_dead_lease()
            has_followed = False
            while not create_whole(self.path, self._text()):
                self._remove_dead_lease()
                has_followed = True
            if has_followed:
                self._require_own_lease()
        self._thread = threading.Thread(
            target=self._renew_until_ended, daemon=True, name="drumline-lease"
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # The thread may hang in a write: a disk that does not answer must not keep the process.
        self._thread.join(PATIENCE_SECONDS)
        # A lease that cannot be removed does no harm: its holder is soon seen to be dead.
        with suppress(OSError):
            if _token(_read(self.path) or b"") == self.token:
                self.path.unlink()
            if self._has_made_folder:
                # A run that has written nothing leaves no folder. With files in it this fails.
                self.run_dir.rmdir()

    def _require_own_lease(self) -> None:
        """Make sure that this lease is still in place, shortly after a dead one was removed.

        Processes A and B may wait for one dead holder. A removes the dead lease and makes its own.
        B, which was a moment later, moves A's lease aside in place of the dead one; before B has
        put it back, C makes a lease. Then A has lost the folder to C.

        Raises:
            EnvironmentFault: Another process has the folder.
        """
        time.sleep(LOOK_SECONDS)
        seen = _read(self.path)
        if seen is not None and _token(seen) != self.token:
            raise self._in_use_error(seen)

    def _text(self) -> bytes:
        """Return the lease as text. Its length never changes, so it can be rewritten in place."""
        return self._head + b"%020d\n" % self._count

    def _remove_dead_lease(self) -> None:
        """Remove the present lease if its holder is dead. Do nothing if there is none.

        Raises:
            EnvironmentFault: The holder lives, or the lease is not the one to follow.
        """
        seen = self._read_expected_lease()
        if seen is None:
            return
        holder = _process_of(seen)
        is_alive = holder and holder.alive()
        if is_alive is None:
            # The process cannot be seen from here, as on another host. A living holder changes the
            # counter.
            newest = self._lease_after_watching(seen)
            if newest is None:
                return
            is_alive = newest != seen
        if is_alive:
            raise self._in_use_error(seen)
        self._remove_if_unchanged(seen)

    def _lease_after_watching(self, seen: bytes) -> bytes | None:
        """Wait for the lease to differ from `seen`, for at most PATIENCE_SECONDS, and return it.

        None means that the lease is gone.
        """
        say(
            f"note: {self.run_dir} may be in use by {_holder_text(seen)}: looking for {PATIENCE_SECONDS:g} s"
        )
        until = self._unchanged_since(seen) + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            newest = self._read_expected_lease()
            if newest != seen:
                return newest
        return seen

    def _unchanged_since(self, seen: bytes) -> float:
        """Return the monotonic seconds since which this host has seen only this content."""
        text, since = self.last_seen
        if seen.decode(errors="replace") == text:
            return since
        return time.monotonic()

    def _in_use_error(self, seen: bytes) -> EnvironmentFault:
        """Return the error that names the holder of the lease `seen`."""
        what = f"the run folder is in use by {_holder_text(seen)}"
        fix = "wait for that run's end or stop it, or choose another folder with run.dir=…"
        return EnvironmentFault(what, where=str(self.run_dir), fix=fix)

    def _read_expected_lease(self) -> bytes | None:
        """Return the content of the lease file; None if there is none.

        Raises:
            EnvironmentFault: It is not the lease that this one may follow.
        """
        seen = _read(self.path)
        if self.after not in (None, _token(seen or b"")):
            raise EnvironmentFault(
                "the run has ended, or another host has taken it over", where=str(self.run_dir)
            )
        return seen

    def _remove_if_unchanged(self, dead: bytes) -> None:
        """Remove the lease file if it still has the content `dead`.

        Between the read and the removal another process may have put its own lease there. The
        rename takes whichever file is there, in one move, and only then its content is compared. A
        lease of another process is linked back to its name.
        """
        aside = self.path.with_name(f"{NAME}.{self.token}")
        with suppress(FileNotFoundError):  # another process has removed it
            self.path.rename(aside)
            if aside.read_bytes() != dead:
                # This process is B of `_require_own_lease`. If C has made a lease meanwhile, A
                # ends there, or in `_renew`.
                with suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()

    def _renew_until_ended(self) -> None:
        """Renew the lease until it is given back. This is the work of a thread."""
        while not self._ended.wait(RENEW_SECONDS):
            # A full disk or a server that does not answer is no reason to end a run: the next turn
            # tries again.
            with suppress(OSError, EnvironmentFault):
                self._renew()
                self._stop_if_requested()

    def _renew(self) -> None:
        """Raise the counter in the lease file.

        The file is changed in place: a full disk has no room for a new file, but it lets an old one
        be overwritten. The process exits immediately if another one has the lease.
        """
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
                # A user has removed the file.
                create_whole(self.path, self._text())
            return
        lost = f"the run folder was taken over by {_holder_text(there)} — this run ends here"
        say(f"\nerror: {self.run_dir}: {lost}")
        # Not sys.exit(), which would end this thread alone.
        os._exit(1)

    def _stop_if_requested(self) -> None:
        """Send SIGTERM to this process if its stop was requested: the run saves and ends."""
        if _read(self.run_dir / STOP) == self.token.encode():
            (self.run_dir / STOP).unlink()
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder."""

    token: str
    host: str
    pid: int
    since: str  # local time at which it took the folder
    content: bytes  # of the lease file, which changes with the counter
    alive: bool | None  # None if only a change of the counter can show that it lives


def holder(run_dir: Path) -> Holder | None:
    """Return the holder of a run folder, alive or dead; None if there is no lease."""
    seen = _read(run_dir / NAME)
    process = seen and _process_of(seen)
    if not seen or not process:
        return None
    fields = _fields(seen)
    token = str(fields.get("token"))
    since = str(fields.get("since"))[:30]
    return Holder(token, process.host[:100], process.pid, since, seen, process.alive())


def holders(run_dirs: Sequence[Path]) -> dict[Path, Holder]:
    """Return the holder of each run folder that has one, with `alive` True or False.

    This takes RENEW_SECONDS twice if a holder is on another host, since its counter must be seen to
    change.
    """
    found = {}
    for folder in run_dirs:
        first = holder(folder)
        if first is not None:
            found[folder] = first
    if any(first.alive is None for first in found.values()):
        time.sleep(2 * RENEW_SECONDS)
    for folder, first in found.items():
        if first.alive is None:
            second = holder(folder)
            has_moved = second is not None and second.content != first.content
            found[folder] = replace(first, alive=has_moved)
    return found


def request_stop(run_dir: Path, token: str) -> None:
    """Ask the holder of a run folder, on any host, to stop as it does at SIGTERM.

    Args:
        run_dir: The run folder.
        token: Token of the lease whose holder shall stop. A later holder ignores the request.

    Raises:
        EnvironmentFault: The request cannot be written.
    """
    with disk_errors(
        "cannot be written", str(run_dir / STOP), EnvironmentFault, "stop it as its owner"
    ):
        write_whole(run_dir / STOP, token)


@contextmanager
def guard_run_folder(run_dir: Path) -> Iterator[None]:
    """Within the block, exit this rank if another launcher takes the run folder over.

    The rank's own launcher may be suspended, and then it cannot end its ranks.
    """
    own_token = None
    ended = threading.Event()
    with suppress(OSError, EnvironmentFault):
        own_token = token_of(run_dir)

    def exit_if_taken_over() -> None:
        while not ended.wait(RENEW_SECONDS):
            with suppress(OSError, EnvironmentFault):
                if token_of(run_dir) not in (own_token, None) and not ended.is_set():
                    say(
                        f"error: another launcher has taken {run_dir} over: this rank ends; its own launcher may be suspended"
                    )
                    os._exit(1)

    # Without a token no launcher holds the folder, as in a trial.
    if own_token is not None:
        guard = threading.Thread(target=exit_if_taken_over, daemon=True, name="drumline-guard")
        guard.start()
    try:
        yield
    finally:
        ended.set()


def has_lease(token: str, run_dir: Path, seconds: float) -> bool:
    """Return whether `run_dir` has the lease with this token, or gets it within some seconds."""
    until = time.monotonic() + seconds
    while True:
        with suppress(OSError, EnvironmentFault):  # such as a missing folder
            if _token(_read(run_dir / NAME) or b"") == token:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_SECONDS)


def token_of(run_dir: Path) -> str | None:
    """Return the token of the lease in a run folder; None if there is none."""
    return _token(_read(run_dir / NAME) or b"")


def text_of(run_dir: Path) -> str:
    """Return the text of the lease in a run folder; empty if there is none.

    Raises:
        OSError: It cannot be read.
        EnvironmentFault: `run.lock` is not a regular file.
    """
    return (_read(run_dir / NAME) or b"").decode(errors="replace")


def place_of(run_dir: Path) -> tuple[str, int] | None:
    """Return the address and port on which the holder of a run folder listens to other hosts.

    None if the holder does not listen, or if there is no lease.
    """
    match _fields(_read(run_dir / NAME) or b"").get("at"):
        case [str(address), int(port)]:
            return address, port
    return None


def _read(path: Path) -> bytes | None:
    """Return the first LONGEST bytes of a file; None if it does not exist.

    Raises:
        EnvironmentFault: It is not a regular file.
    """
    try:
        # Asked before it is opened: opening a pipe would wait for a writer.
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
    """Return the fields of a lease; empty for any other text."""
    try:
        fields = json.loads(text.split(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    if isinstance(fields, dict):
        return fields
    return {}


def _token(text: bytes) -> str | None:
    """Return the token of a lease; None for any other text."""
    token = _fields(text).get("token")
    if isinstance(token, str):
        return token
    return None


def _process_of(text: bytes) -> ProcessId | None:
    """Return the process that a lease names; None if it names none."""
    fields = _fields(text)
    # The file may be damaged or made by anybody, so nothing in it is used unchecked.
    kinds = {"host": str, "boot": str, "space": str, "pid": int, "start": int}
    for name, kind in kinds.items():
        if type(fields.get(name)) is not kind:
            return None
    if not 0 < fields["pid"] < 2**31:
        return None
    return ProcessId(**{name: fields[name] for name in kinds})


def _holder_text(text: bytes) -> str:
    """Return the holder of a lease as words of a message."""
    holder = _process_of(text)
    if holder is None:
        return f"somebody (what {NAME} says cannot be read)"
    since = str(_fields(text).get("since"))[:30]
    return f"pid {holder.pid} on host {holder.host[:100]}, since {since}"
