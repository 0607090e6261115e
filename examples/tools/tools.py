"""Two tools for `algorithm.environment: {kind: tools}`: a calculator, and Python in a process of its own.

Each is a function with types and a docstring; the model reads the schema that is made of them.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import operator
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MOST_CHARACTERS = 200
LARGEST_EXPONENT = 100
# Limits of a program.
SECONDS = 5
MEMORY_BYTES = 512 * 2**20
OUTPUT_BYTES = 2**16
# Of linux/sched.h and linux/prctl.h.
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWPID = 0x20000000
PR_SET_PDEATHSIG = 1
# What an exit code has above the number of a signal, as shells have it.
KILLED = 128
LIBC = ctypes.CDLL(None, use_errno=True)


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as (3 + 4) * 12.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    # 12.0 is how 36 / 3 ends.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def evaluate(node: ast.AST) -> int | float:
    """Return the value of a part of an expression. Raises ValueError for anything but arithmetic."""
    if isinstance(node, ast.Constant):
        value = node.value
        # True and False are integers, too.
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = evaluate(node.left)
        right = evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > LARGEST_EXPONENT:
            raise ValueError(f"an exponent is at most {LARGEST_EXPONENT}")
        return OPERATORS[type(node.op)](left, right)
    raise ValueError("only numbers and + - * / // % ** are allowed")


def run_python(code: str) -> str:
    """Run a Python program, and return what it prints. There is no network, and it has 5 seconds.

    Args:
        code: The program. Print what you want to know.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        with printed.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", code],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=isolate,
            )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"error: it took more than {SECONDS} seconds"
        finally:
            end_session(process)
        text = printed.read_text(errors="replace").strip()
    number = process.returncode - KILLED
    if number in signal.valid_signals():
        return f"{text}\nerror: killed by {signal.Signals(number).name}".strip()
    return text or "(nothing was printed)"


def isolate() -> None:
    """Take network, memory and time from this process, and return in the one that becomes the program.

    That is a grandchild of this process. Between the two is the first process of a namespace: as it ends,
    Linux kills all that the program has started. The program can still read the files that its user can
    read, and each of its processes has the limit of memory for itself.
    """
    # It ends with the process that called the tool, whatever ends that.
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "the network cannot be taken away")
    fork_and_wait()
    fork_and_wait()
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: SECONDS,
        resource.RLIMIT_FSIZE: OUTPUT_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def fork_and_wait() -> None:
    """Fork, and return in the child. This process waits for it, and ends as it ends."""
    child = os.fork()
    if child == 0:
        # A child does not inherit this.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    # `Popen` waits until the program alone has its pipe.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(KILLED - code if code < 0 else code)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a program and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# At the import, so that a system without user namespaces is found before a run begins.
if sys.platform == "linux":
    subprocess.run([sys.executable, "-I", "-c", ""], preexec_fn=isolate, check=True)
else:
    raise OSError("run_python needs Linux: it takes the network away by namespaces")
