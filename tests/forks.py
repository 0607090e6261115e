"""Processes that need not import torch: one that has forks them, so that what takes each seconds is paid once for many test files.

`python -m tests.forks` reads one JSON object a line. {"start": {"module": NAME, "arguments": [...], "cwd": ..., "env": {...}, "out": PATH,
"err": PATH}} is answered with a process id: the process runs the module as `python -m` would, in a session of its own, and can be seen
and killed as such. {"ended": PID} is answered with its exit code, a signal's negative, null while it runs. Nothing but imports happens
in it before a fork. Ranks that such a process launches are forked from it in the same way. Tests that start interpreters, as a user
does, say so.

Where there is a GPU, each process is an interpreter of its own: what is imported asks CUDA for its devices, and torch lets no fork
ask again.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import psutil

from drumline.hardware.detect import likely_gpus

# Where launchers start their ranks.
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
MODULES = (HANDLER, "torch.distributed.run", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
           "transformers.models.llama.modeling_llama", "drumline.cli", "drumline.train.command", "drumline.train.entry",
           "drumline.train.build", "drumline.train.setup", "drumline.launch.agent", "drumline.engine.strategies.zero.engine",
           "deepspeed.runtime.zero.muon.muon_optimizer")  # fmt: skip
# Lets a process write the stacks of its threads to standard error.
STACKS = signal.SIGRTMAX - 3
ROOM = "x" * 8192  # for a child's arguments, and for its variables, where other processes read them


class Forks:
    """The asking side; the forking process starts with the first question and ends with this one."""

    process: subprocess.Popen[str] | None = None

    def start(self, asked: dict[str, Any]) -> int:
        """Return the process id of a fork."""
        pid: int = self.ask({"start": asked})
        return pid

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a fork, None while it runs."""
        code: int | None = self.ask({"ended": pid})
        return code

    def ask(self, question: dict[str, Any]) -> Any:
        process = self.process
        if process is None or process.poll() is not None:
            from tests.harness import ENV, ROOT

            command, env = [sys.executable, "-m", "tests.forks", ROOM], {**ENV, "ROOM": ROOM}
            process = self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )
            atexit.register(self.end)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        # It imports before its first answer.
        if not select.select([process.stdout], [], [], 120)[0]:
            self.end()
            raise AssertionError("what forks gives no answer")
        answer = process.stdout.readline()
        assert answer, "what forks is gone"
        return json.loads(answer)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


class Interpreters:
    """Starts each process as an interpreter of its own; it has the methods of Forks."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, asked: dict[str, Any]) -> int:
        """Return the process id of an interpreter."""
        command = [sys.executable, "-m", asked["module"], *asked["arguments"]]
        with ExitStack() as files:
            out = files.enter_context(Path(asked["out"]).open("ab"))
            err = files.enter_context(Path(asked["err"]).open("ab"))
            process = subprocess.Popen(
                command,
                cwd=asked["cwd"],
                env=asked["env"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.processes[process.pid] = process
        return process.pid

    def ended(self, pid: int) -> int | None:
        """Return the exit code of an interpreter, None while it runs."""
        return self.processes[pid].poll()


FORKS = Forks()
INTERPRETERS = Interpreters()


def choose_starter() -> Forks | Interpreters:
    """Return what starts processes on this machine."""
    return INTERPRETERS if likely_gpus() else FORKS


class TimedOut(subprocess.TimeoutExpired):
    """A process that ran too long, with what it and its ranks had written."""

    def __str__(self) -> str:
        return f"{super().__str__()}:\n{self.output}"


class Forked(subprocess.Popen[str]):
    """`python -m MODULE ARGUMENTS`, as a fork where there is no GPU; its output goes to files."""

    def __init__(
        self, module: str, *arguments: object, env: Mapping[str, str], cwd: str | Path | None = None
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.streams = [Path(self.folder.name) / name for name in ("out", "err")]
        for path in self.streams:
            path.touch()
        out, err = map(str, self.streams)
        self.args = [module, *map(str, arguments)]
        asked = {
            "module": module,
            "arguments": self.args[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env),
            "out": out,
            "err": err,
        }
        self.starter = choose_starter()
        self.pid: int = self.starter.start(asked)
        self.returncode: Any = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # nothing for Popen itself to wait for

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.starter.ended(self.pid)
        code: int | None = self.returncode
        return code

    def wait(self, timeout: float | None = None) -> int:
        if (code := self.poll()) is None:
            # A question every few milliseconds would take time from the ranks.
            watched = os.pidfd_open(self.pid)
            try:
                ended = select.select([watched], [], [], timeout)[0]
            finally:
                os.close(watched)
            code = self.poll() if ended else None
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        """Return its output. When the time is up it is ended, and TimedOut says where each process was."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            stacks = self.end_with_stacks()
            output = "\n".join([*self.read_streams(), *stacks])
            raise TimedOut(self.args, timeout or 0, output) from None
        out, err = self.read_streams()
        return out, err

    def read_streams(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self.streams]

    def end_with_stacks(self) -> list[str]:
        """End it, after it and all that it has started have written the stacks of their threads to standard error.

        Returns the end of what its ranks wrote; its own is in its streams.
        """
        written = []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    one.send_signal(STACKS)
                    written.append(Path(f"/proc/{one.pid}/fd/2").readlink())
        time.sleep(2)
        self.end()
        logs = {path for path in written if path.is_file()} - set(self.streams)
        return [path.read_text(errors="replace")[-10_000:] for path in sorted(logs)]

    def told(self, timeout: float) -> tuple[int, str]:
        """Its exit code and all that it said; it is killed when the time is up."""
        try:
            said = "".join(self.communicate(timeout=timeout))
            return self.wait(), said
        finally:
            self.end()

    def end(self) -> None:
        """All of its session, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()


class RankFork(subprocess.Popen[str]):
    """A rank of a forked launcher: in place of fork and exec, a fork that goes on as the module after `-m` of its command."""

    def _execute_child(self, *given: Any) -> None:
        command, env, pipes = list(map(str, given[0])), given[6] or dict(os.environ), given[10:16]
        read, _, _, out, _, err = pipes
        pid = os.fork()
        if pid == 0:
            module = command.index("-m") + 1
            streams = (read if read != -1 else 0, out if out != -1 else 1, err if err != -1 else 2)
            become(command[module], command[module + 1 :], env, streams)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def become(
    module: str,
    arguments: list[str],
    env: dict[str, str],
    streams: tuple[int, int, int],
    cwd: str | None = None,
) -> NoReturn:
    """The child: its own session, streams, variables, signals and arguments, then the module to its end."""
    code = 1
    try:
        os.setsid()
        for number, target in enumerate(streams):
            os.dup2(target, number)
        os.closerange(3, 1024)
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(sent) != signal.SIG_IGN:
                signal.signal(
                    sent, signal.default_int_handler if sent == signal.SIGINT else signal.SIG_DFL
                )
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.enable()
        faulthandler.register(STACKS, all_threads=True)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # as the variables say
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # a launcher's temporary folders are not its ranks'
        show(
            [sys.executable, "-m", module, *arguments],
            [f"{name}={value}" for name, value in env.items()],
        )
        if cwd is not None:
            os.chdir(cwd)
            sys.path[0] = cwd
        sys.argv = [module, *arguments]
        handler = importlib.import_module(HANDLER)
        handler.Popen = RankFork  # type: ignore[attr-defined]
        importlib.import_module(
            "drumline.system.process"
        ).Helper._execute_child = RankFork._execute_child
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 — as an interpreter does: told, then code 1
        traceback.print_exc()
    finally:
        # As an interpreter ends; the frames above are not the child's.
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def show(arguments: list[str], variables: list[str]) -> None:
    """What /proc tells others of this process: not those of the one that forked it. Both end where the room ends."""
    # Man 5 proc: arg_start to env_end.
    fields = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    for words, start, end in zip((arguments, variables), fields[::2], fields[1::2], strict=True):
        said = b"\0".join(map(os.fsencode, words))[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, said, len(said))


def fork(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        out, err = (os.open(asked[key], os.O_WRONLY | os.O_APPEND) for key in ("out", "err"))
        nothing = os.open(os.devnull, os.O_RDONLY)
        become(asked["module"], asked["arguments"], asked["env"], (nothing, out, err), asked["cwd"])
    return pid


def ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        found = fork(asked["start"]) if "start" in asked else ended(asked["ended"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
