"""Processes that need not import torch: one that has forks them, so that what takes each seconds is paid once for many test files.

`python -m tests.forks` reads one JSON object a line: {"module": NAME, "arguments": [...], "cwd": ..., "seconds": N, "processes": [{"env":
{...}, "out": PATH, "err": PATH}, ...]}; each process runs the module as `python -m` would, in a session of its own. It answers with their
exit codes, a signal's negative; null for those that were killed because the time was up. Nothing but imports happens in it before a fork.
Ranks that such a process launches are forked from it, in place of a new interpreter: their modules, arguments, variables, streams, sessions
and signals are as they would be there. Launchers that tests start by themselves start interpreters, as a user's do.
"""

from __future__ import annotations

import atexit
import contextlib
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
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

# Where launchers start their ranks.
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
MODULES = (HANDLER, "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
           "drumline.cli", "drumline.train.command", "drumline.train.entry", "drumline.train.build", "drumline.train.setup")  # fmt: skip


class Forks:
    """The asking side; the forking process starts with the first question and ends with this one."""

    process: subprocess.Popen[str] | None = None

    def run(
        self, module: str, arguments: list[str], processes: list[dict[str, Any]], seconds: float, cwd: str | None = None
    ) -> list[int | None]:
        """Exit codes of `processes`; None for those that ran over `seconds`."""
        process = self.process
        if process is None or process.poll() is not None:
            from tests.harness import ENV, ROOT

            command = [sys.executable, "-m", "tests.forks"]
            process = self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT, start_new_session=True
            )
            atexit.register(self.end)
        assert process.stdin is not None and process.stdout is not None
        asked = {"module": module, "arguments": arguments, "cwd": cwd or str(Path.cwd()), "seconds": seconds, "processes": processes}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        # It imports before its first answer.
        if not select.select([process.stdout], [], [], seconds + 120)[0]:
            self.end()
            raise AssertionError(f"{module} and what forks it gave no answer")
        answer = process.stdout.readline()
        assert answer, "what forks is gone"
        codes: list[int | None] = json.loads(answer)
        return codes

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


FORKS = Forks()


class RankFork(subprocess.Popen[bytes]):
    """A rank of a forked launcher: in place of fork and exec, a fork that goes on as the module after `-m` of its command."""

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        command, env, (_, _, _, out, _, err) = list(map(str, given[0])), given[6], given[10:16]
        pid = os.fork()
        if pid == 0:
            module = command.index("-m") + 1
            become(command[module], command[module + 1 :], env, (0, out, err))
        self.pid, self._child_created = pid, True


def become(module: str, arguments: list[str], env: dict[str, str], streams: tuple[int, int, int], cwd: str | None = None) -> NoReturn:
    """The child: its own session, streams, variables, signals and arguments, then the module to its end."""
    code = 1
    try:
        os.setsid()
        for number, target in enumerate(streams):
            os.dup2(target, number)
        os.closerange(3, 1024)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
        faulthandler.enable()
        os.environ.clear()
        os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
            sys.path[0] = cwd
        sys.argv = [module, *arguments]
        handler = importlib.import_module(HANDLER)
        handler.Popen = RankFork  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", "'drumline.* found in sys.modules", RuntimeWarning)
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


def fork_all(asked: dict[str, Any]) -> list[int | None]:
    """The processes that are asked for, to their end or that of their time."""
    pids = []
    for mine in asked["processes"]:
        pid = os.fork()
        if pid == 0:
            out, err = (os.open(mine[key], os.O_WRONLY | os.O_APPEND) for key in ("out", "err"))
            nothing = os.open(os.devnull, os.O_RDONLY)
            become(asked["module"], asked["arguments"], mine["env"], (nothing, out, err), asked["cwd"])
        pids.append(pid)
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + asked["seconds"]
    while len(codes) < len(pids):
        over = time.monotonic() > deadline
        for pid in [pid for pid in pids if pid not in codes]:
            if over:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if over else os.WNOHANG)
            if ended:
                codes[pid] = None if over else os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(fork_all(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
