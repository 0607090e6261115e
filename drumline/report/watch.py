"""`drumline watch`: a page that follows runs by server-sent events. It reads run folders, and asks nothing of a run. A browser's request
is a thread, which ends with it; what the page shows is watch.js's."""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rich.console import Console

from drumline.errors import EnvironmentFault
from drumline.report.curves import MOST_POINTS, binned
from drumline.report.facts import (
    RESTARTS,
    Points,
    RunFacts,
    as_mapping,
    as_number,
    curve_order,
    named,
    speed_unit,
)
from drumline.report.page import asset, document
from drumline.report.progress import Progress
from drumline.system.redact import plain
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import Event, tail

Stages = Callable[[Path], list[dict[str, Any]]]  # run folder → what each of its ranks does now
LOOPBACK = "127.0.0.1"
PORT = 8765
TICK_SECONDS = 1.0
FIRST_TICK_SECONDS = TICK_SECONDS / 3  # a new browser shows something sooner
MOST_BROWSERS = 32
MOST_LINES = 200  # of what happened, at once
RECENT_STEPS = 20  # whose mean time makes the ETA
TIMEOUT_SECONDS = 30.0  # of a browser that takes nothing
TOKEN_BYTES = 32
ADDRESS_IN_USE = 98  # errno.EADDRINUSE of Linux
LATEST_TIME = 1e11  # unix seconds, in the year 5138; a later one is a damaged value


class Live:
    """One run as it goes on, for one browser. `add` is called by the thread that reads its events, `message` by that of the browser."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.text = io.StringIO()  # lines of the display, until they are in `lines`
        self.progress = Progress(Console(file=self.text, width=160, no_color=True, highlight=False))
        self.points: dict[str, Points] = {}  # by curve, those that the browser lacks
        self.lines: deque[str] = deque(maxlen=MOST_LINES)  # those that the browser lacks
        self.seconds: dict[int, float] = {}  # of each step; the last event of a step counts
        self.before: int | None = None  # steps that were done in another folder
        self.began = 0.0  # unix seconds of the first event
        self.last = 0.0  # unix seconds of the newest event
        self.idle = 0.0  # seconds between a stop and the next start
        self.fresh: dict[str, Any] = {}  # texts that the browser lacks, by kind of event
        self.state: dict[str, Any] = {"status": "planned", "restarts": 0}

    def add(self, event: Event) -> None:
        """Take up an event of the run."""
        values = plain(event.values())
        with self.lock:
            for name, value in named(values).items():
                if value is not None:
                    points = self.points.setdefault(name, [])
                    points.append((values["step"], value))
            self._note(values)
            self.progress.on_event(event)
            self._keep_lines()

    def _keep_lines(self) -> None:
        """Move what the display has written to the lines for the browser, with the time."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.last))
        for line in self.text.getvalue().splitlines():
            self.lines.append(f"{clock}  {line}")
        self.text.seek(0)
        self.text.truncate()

    def _note(self, event: dict[str, Any]) -> None:
        """Update the state by an event's values."""
        before = self.last
        seconds = as_number(event["t"]) or 0.0
        self.last = min(max(seconds, 0.0), LATEST_TIME)
        self.began = self.began or self.last
        kind = event["kind"]
        if kind == "run_start":
            self._note_start(event, before)
        elif kind == "planned":
            memory = as_mapping(event.get("memory"))
            self.state["limit"] = as_number(event.get("limit"))
            self.state["planned"] = as_number(memory.get("reserved"))
        elif kind == "restore":
            if self.before is None:
                self.before = event["step"]
        elif kind == "step":
            self._note_step(event)
        elif kind == "fault":
            self._note_fault(event)
        elif kind == "run_end":
            self.state["status"] = event.get("status")
        elif kind in ("samples", "completions"):
            self.fresh[kind] = {"step": event.get("step"), "shown": event.get(kind)}

    def _note_start(self, event: dict[str, Any], before: float) -> None:
        """Update the state by a run_start. `before`: unix seconds of the event before it, or 0."""
        state = self.state
        # The time until somebody resumes a run is no loss; the time until a restart is.
        if before and state["status"] != "starting again":
            self.idle += max(0.0, self.last - before)
        state["status"] = "starting"
        state["steps"] = event.get("steps")
        state["plan"] = event.get("plan_line")

    def _note_step(self, event: dict[str, Any]) -> None:
        """Update the state by a step."""
        state = self.state
        step = event["step"]
        self.before = self.before or 0
        self.seconds[step] = as_number(event.get("seconds")) or 0.0
        state["status"] = "running"
        state["step"] = step
        state["memory"] = event.get("memory_bytes")
        for key in ("loss", "lr", "tokens_per_s"):
            state[key] = as_number(event.get(key))
        state["speed_unit"] = speed_unit(event)

    def _note_fault(self, event: dict[str, Any]) -> None:
        """Update the state by a fault, and write a line of it."""
        rank = event.get("rank")
        error = event.get("error")
        action = event.get("action")
        is_stopped = str(action).startswith("stop")
        self.state["status"] = "failed" if is_stopped else "starting again"
        if action in RESTARTS:
            self.state["restarts"] += 1
        self.text.write(f"rank {rank}: {error} → {action}\n")

    def _goodput(self) -> float | None:
        """Return the goodput so far, as `RunFacts.goodput` defines it."""
        spent = self.last - self.began - self.idle
        if not self.seconds or spent <= 0:
            return None
        mean = sum(self.seconds.values()) / len(self.seconds)
        steps_here = max(self.seconds) - (self.before or 0)
        return min(1.0, mean * steps_here / spent)

    def _eta(self) -> float | None:
        """Return the seconds until the last step; None if they are not known, or if it is done."""
        steps = as_number(self.state.get("steps")) or 0
        steps_left = steps - (as_number(self.state.get("step")) or 0)
        recent = list(self.seconds.values())[-RECENT_STEPS:]
        if not recent or steps_left <= 0:
            return None
        return steps_left * sum(recent) / len(recent)

    def message(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what came since the last message. `ranks`: what each rank does now."""
        with self.lock:
            points = {}
            for name in sorted(self.points, key=curve_order):
                points[name] = binned(self.points[name], MOST_POINTS)
            state = dict(self.state)
            state["goodput"] = self._goodput()
            state["eta"] = self._eta()
            state["ranks"] = ranks
            message = {"state": state, "points": points, "lines": list(self.lines), **self.fresh}
            self.points = {}
            self.fresh = {}
            self.lines.clear()
        return message


class Handler(BaseHTTPRequestHandler):
    """`/`: the page; `/events`: the stream. No other path, no other method."""

    server: Server
    server_version, sys_version = "drumline", ""
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer a request: first by who asks, then by the path."""
        server = self.server
        url = urlsplit(self.path)
        if not server.is_ours(self.headers.get("Host", "")):
            self._answer(421, "this address is not the one that drumline watch printed\n")
        elif server.token and server.is_token(parse_qs(url.query).get("token", [""])[0]):
            # The cookie takes the token out of the address, where others may read it.
            cookie = f"{server.cookie}={server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "", ("Location", "/"), ("Set-Cookie", cookie))
        elif server.token and not server.is_token(self._cookie()):
            self._answer(
                401, "open the whole address that drumline watch printed, with its token\n"
            )
        elif url.path == "/":
            self._answer(200, server.page, kind="text/html")
        elif url.path == "/events":
            self._stream()
        else:
            self._answer(404, "there is / and /events\n")

    def _cookie(self) -> str:
        """Return the token of this server's cookie; empty if the browser has none.

        Other servers of this host have their cookies in the same header. http.cookies is not used,
        since it drops all cookies if one of them is odd.
        """
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.server.cookie:
                return value
        return ""

    def _answer(
        self, code: int, text: str, *headers: tuple[str, str], kind: str = "text/plain"
    ) -> None:
        """Send a whole answer. `kind`: the type of its content."""
        content = text.encode(errors="replace")
        self._head(code, kind, ("Content-Length", str(len(content))), *headers)
        self.wfile.write(content)

    def _head(self, code: int, kind: str, *headers: tuple[str, str]) -> None:
        """Send the status and the headers of an answer."""
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Send what the runs write, a message a tick, until the browser or the server goes."""
        server = self.server
        if not server.browsers.acquire(blocking=False):
            self._answer(503, f"{MOST_BROWSERS} browsers watch already\n")
            return
        try:
            self._head(200, "text/event-stream")
            with ExitStack() as stack:
                runs = [Live(folder) for folder in server.folders]
                for run in runs:
                    stack.enter_context(tail(run.folder / "events.jsonl", run.add, 0))
                is_first = True
                wait_seconds = FIRST_TICK_SECONDS
                while not server.done.wait(wait_seconds):
                    # Written even if nothing is new: a browser that has gone is noticed by that.
                    messages = [run.message(server.stages(run.folder)) for run in runs]
                    values = plain({"first": is_first, "runs": messages})
                    text = json.dumps(values, allow_nan=False)
                    self.wfile.write(f"data: {text}\n\n".encode(errors="replace"))
                    is_first = False
                    wait_seconds = TICK_SECONDS
        finally:
            server.browsers.release()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing, since a line would have the token."""


class Server(ThreadingHTTPServer):
    """The HTTP server of the page.

    It listens at `host` and `port`. Its `token` is required of each browser; it is empty if the
    server listens to this machine alone. Raises OSError if the port is held.
    """

    daemon_threads = True

    def __init__(self, folders: list[Path], host: str, port: int, stages: Stages) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.folders = folders
        self.stages = stages
        self.host = host
        super().__init__((host, port), Handler)
        self.cookie = f"drumline-{self.server_port}"
        self.done = threading.Event()
        self.browsers = threading.Semaphore(MOST_BROWSERS)
        address = ipaddress.ip_address(str(self.server_address[0]))
        self.token = "" if address.is_loopback else secrets.token_urlsafe(TOKEN_BYTES)
        self.page = page(folders)

    def is_ours(self, host: str) -> bool:
        """Return whether a request came by an address of this machine.

        A name that somebody else has pointed to this machine is refused (DNS rebinding).
        """
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", LOOPBACK, "::1", self.host.lower()):
            return True
        if not self.token:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())
        return True

    def is_token(self, given: str) -> bool:
        """Return whether a browser has sent the right token."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing. A browser that has gone is no error, and the next request is answered anyway."""

    @property
    def url(self) -> str:
        """Return the address that a person opens, with the token."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        if ":" in host:  # IPv6
            host = f"[{host}]"
        address = f"http://{host}:{self.server_port}/"
        if self.token:
            address += f"?token={self.token}"
        return address


@contextmanager
def serving(folders: list[Path], host: str, port: int, stages: Stages) -> Iterator[str]:
    """Serve the page by a thread and give its address. Raises EnvironmentFault if it cannot listen there."""
    try:
        server = Server(folders, host, port, stages)
    except (OSError, UnicodeError, ValueError) as error:
        raise _cannot_listen(error, host, port) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="watch", daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.done.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _cannot_listen(error: Exception, host: str, port: int) -> EnvironmentFault:
    """Return the error for the user, with what to do."""
    if getattr(error, "errno", None) == ADDRESS_IN_USE:
        reason = "the port is held by another process"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    if "port" in reason or "denied" in reason:
        fix = "--port 0 takes a free one"
    else:
        fix = "name an address of this machine"
    return EnvironmentFault(f"cannot listen: {reason}", where=f"{host}:{port}", fix=fix)


@contextmanager
def beside(run_dir: Path, stages: Stages) -> Iterator[str]:
    """Serve the page of a run that begins, to this machine alone; at another port if the usual one is held."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(serving([run_dir], LOOPBACK, PORT, stages))
        except EnvironmentFault:
            url = stack.enter_context(serving([run_dir], LOOPBACK, 0, stages))
        yield url


def watch(folders: list[Path], host: str, port: int | None, stages: Stages) -> None:
    """Serve until Ctrl-C. Raises UserError for a folder that is no run, EnvironmentFault if it cannot listen."""
    for folder in folders:
        RunFacts(folder)  # raises UserError
    if port is None:
        port = PORT
    with LauncherSignals() as signals, serving(folders, host, port, stages) as url:
        print(f"watch: {url}", flush=True)
        print("Ctrl-C ends the page; the runs go on", flush=True)
        while not signals.number:
            time.sleep(0.1)


def page(folders: list[Path]) -> str:
    """Return the page before anything has come."""
    names = [folder.resolve().name for folder in folders]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    return document(
        "watch.html.jinja",
        title,
        {"charts": [], "names": names},
        asset("draw.js") + asset("watch.js"),
        connect="'self'",
        names=names,
    )
