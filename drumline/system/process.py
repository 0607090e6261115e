"""Names of processes, and processes that die with the one that started them ("tied" ones).

A name is distinct from those of all other processes on all hosts, past and present. This command
runs a module or script that dies with its parent:

    python -m drumline.system.process PARENT_PID MODULE|SCRIPT.py ARGUMENTS...

This module imports the standard library alone. torch takes seconds to import, and a launcher that
is killed meanwhile may leave no rank behind.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import hashlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

# Options of prctl, from linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Seconds between two checks of whether other processes still run.
LOOK_SECONDS = 0.2
# Seconds to wait for the last line of a helper that has ended. Its own children may keep its
# standard error open.
LAST_SECONDS = 1.0
# A variable of ranks: the first line of their standard input is the secret of their store.
SECRET_ON_STDIN = "DRUMLINE_STDIN"
PIPE = subprocess.PIPE
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class ProcessId:
    """One process, distinct from all others on all hosts, past and present.

    `boot`: which start of the host's kernel. `space`: the namespace that `pid` counts in, since
    containers have their own. Both are empty if the host does not show them.
    `start`: when the process started; 0 if that is not known, because it has ended. On Linux it is
    in ticks of the kernel since the boot, which no change of the clock moves; elsewhere in
    microseconds of the clock.
    """

    host: str
    boot: str
    space: str
    pid: int
    start: int

    def alive(self) -> bool | None:
        """Return whether it runs; a stopped process does. None if this process cannot know.

        It cannot know that of another host, another container or another boot.
        """
        if not self.boot or not self.space or (self.host, self.boot, self.space) != host_identity():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            # Another user's process, or no process id at all: its state decides.
            pass
        found = _state(self.pid)
        if found is None:
            return None
        start, state = found
        return start == self.start and state not in "ZX"

    @property
    def name(self) -> str:
        """Return a name of letters, digits and hyphens, for files; `process_named` reads it."""
        where = repr((self.host, self.boot, self.space))
        return f"{self.pid}-{self.start}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def process_named(name: str) -> ProcessId | None:
    """Return the process whose `ProcessId.name` begins the text `name`.

    It may have ended. None for a process of another host, container or boot, and for any other
    text.
    """
    match = re.match(r"(\d{1,10})-(\d{1,20})-", name)
    if match is None:
        return None
    found = ProcessId(*host_identity(), int(match[1]), int(match[2]))
    return found if name.startswith(found.name) else None


def this_process() -> ProcessId:
    return process(os.getpid())


def process(pid: int) -> ProcessId:
    """Return the process that has the id `pid` on this host now.

    If there is none, its `start` is 0.
    """
    found = _state(pid)
    start = 0 if found is None else found[0]
    return ProcessId(*host_identity(), pid, start)


@cache
def host_identity() -> tuple[str, str, str]:
    """Return this host's name, boot and namespace of process ids."""
    host = socket.gethostname()
    if sys.platform != "linux":
        return host, "-", "-"
    try:
        # If /proc is that of another namespace, its numbers are not ours.
        own = Path("/proc/self").readlink().name == str(os.getpid())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return host, boot, str(Path("/proc/self/ns/pid").readlink()) if own else ""
    except OSError:
        return host, "", ""


def _state(pid: int) -> tuple[int, str] | None:
    """Return when a process started (see `ProcessId`), and the letter of its state.

    None if there is no such process, or its state cannot be read.
    """
    if sys.platform != "linux":
        import psutil

        try:
            seen = psutil.Process(pid)
            start = int(seen.create_time() * 1e6)
            state = "Z" if seen.status() == psutil.STATUS_ZOMBIE else "R"
            return start, state
        except (psutil.Error, ValueError, OverflowError):
            return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]), fields[0]
    except (OSError, ValueError, IndexError):
        return None


def is_suspended(pid: int) -> bool:
    """Return whether a process has been stopped by a signal (SIGSTOP, Ctrl-Z) or a debugger."""
    found = _state(pid)
    return found is not None and found[1] in "Tt"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process killed when its parent dies, however it dies.

    `parent`: the process id of the parent. `number`: the signal to be sent.

    On Linux the kernel sends it, as soon as the parent's thread that started this process has
    ended; so the launcher starts ranks from the thread that then waits for them. On other systems,
    such as macOS, a thread checks every LOOK_SECONDS.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    else:
        die_with([process(parent)], number)
    if os.getppid() != parent:
        # It died before the call.
        os.kill(os.getpid(), number)


def die_with(processes: Sequence[ProcessId], number: int = signal.SIGKILL) -> None:
    """Have this process killed, or sent `number`, soon after one of `processes` has gone.

    They need not be its parents, and threads of theirs may end.
    """

    def look() -> None:
        while all(other.alive() is not False for other in processes):
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), number)

    if processes:
        threading.Thread(target=look, daemon=True, name="drumline-die-with").start()


def adopt_orphans() -> None:
    """Become the parent of orphans among this process's descendants, if the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def tied_arguments(module: str, *arguments: str) -> list[str]:
    """Return Python's arguments for a process that runs a module and dies with this one.

    `module`: the name of a module, or a script, NAME.py.
    """
    return [
        "-u",
        "-X",
        "faulthandler",
        "-m",
        "drumline.system.process",
        str(os.getpid()),
        module,
        *arguments,
    ]


class EarlyRank(ForkProcess):
    """A fork of this process that waits until `begin` sends the command that it runs.

    It shares what this process has imported, dies with it, and has the methods of Popen that
    torch's agent calls. This process must have one thread of Python, and none of OpenMP, because a
    fork has only the thread that forks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getpid()
        # Of the pipe through which the command comes.
        self._read_end, self._write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with ignore_fork_warning():
            self.start()
        os.close(self._read_end)

    def begin(self, command: Sequence[str], env: Mapping[str, str], out: str, err: str) -> bool:
        """Let it run a command, and return whether it was still there to begin.

        `command`: an interpreter, and what `tied_arguments` returned. `out`, `err`: files to write
        its output and its errors to.
        """
        # The fork is an interpreter that is tied already, so it needs the module and its arguments
        # alone. The interpreter in `command` stands in for the empty module here.
        prefix_length = len(tied_arguments(""))
        message = {
            "arguments": command[prefix_length:],
            "env": dict(env),
            "streams": [os.devnull, out, err],
        }
        try:
            with os.fdopen(self._write_end, "w") as pipe:
                pipe.write(json.dumps(message) + "\n")
        except BrokenPipeError:
            # The fork had the only other end of the pipe.
            return False
        return True

    def run(self) -> None:
        """Run the command that `begin` sends; this method runs in the fork.

        Before it, signals, streams, variables and arguments are set up as those of a new process.
        """
        die_with_parent(self.parent)
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
        sys.unraisablehook = sys.__unraisablehook__
        with os.fdopen(self._read_end) as pipe:
            # One line, not all: a later fork has the other end too, so the pipe stays open.
            message = json.loads(pipe.readline() or sys.exit())
        for stream, path in enumerate(message["streams"]):
            file = os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_APPEND)
            # They are equal if this process was started without the stream.
            if file != stream:
                os.dup2(file, stream)
                os.close(file)
            os.set_inheritable(stream, True)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, buffering=1) for number, mode in enumerate("rww")
        )
        faulthandler.enable()
        os.environ.clear()
        os.environ.update(message["env"])
        sys.argv = message["arguments"]
        try:
            _run_main()
        except KeyboardInterrupt:
            _die_of_interrupt()
        finally:
            atexit._run_exitfuncs()
            _flush()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)


def _die_of_interrupt() -> None:
    """End this process as Ctrl-C ends an interpreter: with the traceback, and by the signal.

    The launcher sees by that signal that the rank had not begun. multiprocessing would exit with 1.
    """
    traceback.print_exc()
    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _flush() -> None:
    """Write out what is printed, and drop what a log on a full disk has no room for.

    Otherwise multiprocessing would end with the exit code 1.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            # It stays open until the process ends.
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _run_main() -> None:
    """Run the module or script that is the first of sys.argv, as the main program."""
    if sys.argv[0].endswith(".py"):
        # As `python SCRIPT.py` does it.
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


@contextmanager
def ignore_fork_warning() -> Iterator[None]:
    """Ignore Python's warning of a fork with threads, inside the block.

    Python 3.12 warns of the threads of OpenBLAS, which handles forks itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def holds_in_fork(holds: Callable[[], bool]) -> bool:
    """Return whether `holds` returns True in a fork of this process.

    `holds` must not raise: the fork would go on as a second copy of this program.
    """
    with ignore_fork_warning():
        child = os.fork()
    if child == 0:
        os._exit(int(not holds()))
    return os.waitpid(child, 0)[1] == 0


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off inside the block, which imports.

    Imports make many objects and drop few. The collector looks at all of them again and again, a
    fifth of the time that imports take.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def run_module(
    module: str, stdin: str = "", seconds: float | None = None, pass_fds: Sequence[int] = ()
) -> tuple[int | None, str, str]:
    """Run a module as `run_command` runs a command, and return the same."""
    return run_command([sys.executable, "-m", module], stdin, seconds, pass_fds=pass_fds)


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """Return what a command prints.

    None if there is no such command, if it fails, or if it takes longer than `seconds`.
    """
    try:
        code, out, _ = run_command(command, seconds=seconds)
    except OSError:
        return None
    if code != 0:
        return None
    return out


def start_module(module: str, *arguments: str, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a module in a process and a session of its own. Raises OSError.

    What it prints goes to standard error: standard output may be a table or a YAML that somebody
    reads. `pass_fds`: file descriptors that it inherits.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Sets of texts have the same order in each process, so that code of the user's does the same.
    env = {"PYTHONHASHSEED": "0", **os.environ}
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def start_command(
    command: Sequence[str], env: Mapping[str, str], log: IO[str] | None = None
) -> Process:
    """Start a command in a process and a session of its own, with empty stdin. Raises OSError.

    What it prints goes to `log`; without one, to the output of this process.
    """
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def run_command(
    command: Sequence[str],
    stdin: str = "",
    seconds: float | None = None,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
) -> tuple[int | None, str, str]:
    """Run a command, and return its exit code and what it wrote to stdout and stderr.

    A command that takes longer than `seconds` is killed, and (None, "", "") is returned: what it
    wrote is lost. Raises OSError if it cannot be started.

    `stdin`: text for its standard input. `cwd`: the folder that it runs in. `pass_fds`: file
    descriptors that it inherits.
    """
    how: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "check": False,
    }
    try:
        done = subprocess.run(
            command, input=stdin, timeout=seconds, cwd=cwd, pass_fds=pass_fds, **how
        )
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


class Helper(subprocess.Popen[str]):
    """A process in a session of its own that reads lines and writes lines to standard error.

    A thread calls `on_line` with each line that it writes.
    """

    def __init__(
        self, command: Sequence[str], folder: str | None, on_line: Callable[[str], None]
    ) -> None:
        super().__init__(
            command,
            stdin=PIPE,
            stdout=subprocess.DEVNULL,
            stderr=PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            start_new_session=True,
        )
        self._on_line, self._last = on_line, ""
        self._reader = threading.Thread(target=self._read, daemon=True, name="drumline-helper")
        self._reader.start()

    def _read(self) -> None:
        assert self.stderr is not None
        for line in self.stderr:
            if line.strip():
                self._last = line.strip()
                self._on_line(self._last)

    def tell(self, line: str) -> None:
        """Write a line to its standard input, which stays open. Does nothing if it has ended."""
        assert self.stdin is not None
        with suppress(BrokenPipeError):
            self.stdin.write(f"{line}\n")
            self.stdin.flush()

    def last(self) -> str:
        """Return the last line that it wrote. Call it once the process has ended."""
        self._reader.join(LAST_SECONDS)
        return self._last

    def end(self) -> None:
        """Kill it if it has not ended."""
        if self.poll() is None:
            self.kill()
        self.wait()


def wait_for_exit(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Wait up to `seconds` for a process to end. Return its exit code; None if it still runs."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def worker_pool(count: int) -> ProcessPoolExecutor:
    """Return a pool of spawned processes that die with this one.

    They are tied to this process before they import what their work needs.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    class Pool(ProcessPoolExecutor):
        """A pool that ends even if its processes have died.

        Until Python 3.11.5 it waits for ever on what it was sending to them (CPython's gh-94777).
        """

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            pool: Any = self
            manager, queue = pool._executor_manager_thread, pool._call_queue
            super().shutdown(False, cancel_futures=cancel_futures)
            while wait and manager is not None and manager.is_alive():
                manager.join(0.1)
                if pool._broken and not queue._reader.closed:
                    # Nobody reads any more. The thread that sends then gets an error and ends.
                    queue._reader.close()

    kind = ProcessPoolExecutor if sys.version_info >= (3, 11, 5) else Pool
    return kind(
        count,
        multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )


def fork() -> int:
    """Fork this process. The child dies with this process, and of SIGTERM."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
    return child


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    _run_main()
