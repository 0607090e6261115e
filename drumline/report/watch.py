"""`drumline watch`: a page that follows runs by server-sent events.

It reads run folders, and asks nothing of a run. Each request of a browser has a thread, which ends
with it. watch.js draws what the page shows.
"""

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
from drumline.report.curves import MOST_POINTS, thin_out
from drumline.report.facts import (
    RESTARTS,
    Points,
    RunFacts,
    as_mapping,
    as_number,
    curve_order,
    curve_values,
    speed_unit,
)
from drumline.report.page import asset, document
from drumline.report.progress import Progress
from drumline.system.redact import redacted_json
from drumline.system.signals import LauncherSignals
from drumline.telemetry.events import Event, tail

# A function that returns what each rank of a run does now (`launch.rank_phases`).
RankPhases = Callable[[Path], list[dict[str, Any]]]
LOOPBACK = "127.0.0.1"
PORT = 8765
# Seconds between two messages to a browser.
TICK_SECONDS = 1.0
# The same for the first message, so that a new browser shows something sooner.
FIRST_TICK_SECONDS = TICK_SECONDS / 3
# Number of browsers at a time. Each keeps a thread busy.
MOST_BROWSERS = 32
# Most lines of the display that wait for a browser.
MOST_LINES = 200
# Steps whose mean time makes the ETA.
RECENT_STEPS = 20
# Seconds after which a browser that takes nothing is given up.
TIMEOUT_SECONDS = 30.0
TOKEN_BYTES = 32
# errno.EADDRINUSE of Linux.
ADDRESS_IN_USE = 98
# Unix seconds, in the year 5138. A later time is a damaged value.
LATEST_TIME = 1e11


class BrowserFeed:
    """What one browser has not been sent yet of one run.

    The thread that reads the run's events calls `add`. The thread of the browser calls `message`,
    which returns what has come since the last message. A lock protects both.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        # Text that the display of progress has written and that is not in `lines` yet.
        self.text = io.StringIO()
        console = Console(file=self.text, width=160, no_color=True, highlight=False)
        self.progress = Progress(console)
        # Name of a curve → points, and lines, that were not sent yet.
        self.points: dict[str, Points] = {}
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        # Kind of event → texts that were not sent yet.
        self.unsent_texts: dict[str, Any] = {}
        # Seconds of each step; the last event of a step counts.
        self.seconds: dict[int, float] = {}
        # Step of the checkpoint that the run was started from, as `RunFacts.initial_step`; None
        # until it is known.
        self.initial_step: int | None = None
        # Unix seconds of the first event and of the newest one.
        self.first_event_time = 0.0
        self.last_event_time = 0.0
        # Seconds of downtime before somebody resumed the run, which goodput does not count.
        # Downtime before an automatic restart counts.
        self.excluded_downtime = 0.0
        # Values that the browser gets with each message.
        self.state: dict[str, Any] = {"status": "planned", "restarts": 0}

    def add(self, event: Event) -> None:
        """Add an event of the run to what the browser gets next."""
        # Redacted, and without NaN, which is no JSON.
        values = redacted_json(event.values())
        with self.lock:
            for name, value in curve_values(values).items():
                if value is not None:
                    points = self.points.setdefault(name, [])
                    points.append((values["step"], value))
            self._update_state(values)
            self.progress.on_event(event)
            self._keep_lines()

    def _keep_lines(self) -> None:
        """Move what the display has written to the lines for the browser, with the time."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.last_event_time))
        written = self.text.getvalue()
        for line in written.splitlines():
            self.lines.append(f"{clock}  {line}")
        self.text.seek(0)
        self.text.truncate()

    def _update_state(self, event: dict[str, Any]) -> None:
        """Update the state by an event's values."""
        previous_event_time = self.last_event_time
        seconds = as_number(event["t"]) or 0.0
        # Within the times that `localtime` can convert.
        self.last_event_time = min(max(seconds, 0.0), LATEST_TIME)
        if not self.first_event_time:
            self.first_event_time = self.last_event_time
        kind = event["kind"]
        if kind == "run_start":
            self._note_start(event, previous_event_time)
        elif kind == "planned":
            self._note_plan(event)
        elif kind == "restore":
            # Only before the first step: a later one is of this folder's own checkpoints.
            if self.initial_step is None:
                self.initial_step = event["step"]
        elif kind == "step":
            self._note_step(event)
        elif kind == "fault":
            self._note_fault(event)
        elif kind == "run_end":
            self.state["status"] = event.get("status")
        elif kind in ("samples", "completions"):
            self.unsent_texts[kind] = {"step": event.get("step"), "shown": event.get(kind)}

    def _note_plan(self, event: dict[str, Any]) -> None:
        """Update the state by the plan: a device's memory, and how much of it is needed."""
        memory = as_mapping(event.get("memory"))
        self.state["limit"] = as_number(event.get("limit"))
        self.state["planned"] = as_number(memory.get("reserved"))

    def _note_start(self, event: dict[str, Any], previous_event_time: float) -> None:
        """Update the state by a run_start.

        `previous_event_time`: unix seconds of the event before it; 0 if there is none.
        """
        state = self.state
        is_automatic_restart = state["status"] == "starting again"
        if previous_event_time and not is_automatic_restart:
            downtime = self.last_event_time - previous_event_time
            self.excluded_downtime += max(0.0, downtime)
        state["status"] = "starting"
        state["steps"] = event.get("steps")
        state["plan"] = event.get("plan_line")

    def _note_step(self, event: dict[str, Any]) -> None:
        """Update the state by a step."""
        state = self.state
        step = event["step"]
        if self.initial_step is None:
            # No restore came before it, so the run began here.
            self.initial_step = 0
        # A step that is done again becomes the newest one: `_eta` goes by the last steps.
        self.seconds.pop(step, None)
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
        # The action of a launcher that gives up is "stop: WHY".
        is_stopped = str(action).startswith("stop")
        self.state["status"] = "failed" if is_stopped else "starting again"
        if action in RESTARTS:
            self.state["restarts"] += 1
        # The display has no line for a fault: a launcher prints it in the terminal.
        self.text.write(f"rank {rank}: {error} → {action}\n")

    def _goodput(self) -> float | None:
        """Return the goodput so far, as `RunFacts.goodput` defines it.

        None before the first step.
        """
        spent = self.last_event_time - self.first_event_time - self.excluded_downtime
        if not self.seconds or spent <= 0:
            return None
        mean = sum(self.seconds.values()) / len(self.seconds)
        last_step = max(self.seconds)
        initial_step = self.initial_step or 0
        steps_here = last_step - initial_step
        return min(1.0, mean * steps_here / spent)

    def _eta(self) -> float | None:
        """Return the seconds until the last step; None if they are not known, or if it is done."""
        steps = as_number(self.state.get("steps")) or 0
        steps_done = as_number(self.state.get("step")) or 0
        steps_left = steps - steps_done
        seconds = list(self.seconds.values())
        recent = seconds[-RECENT_STEPS:]
        if not recent or steps_left <= 0:
            return None
        return steps_left * sum(recent) / len(recent)

    def message(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what the browser gets next, and forget the points, lines and texts in it.

        `ranks`: what each rank does now.
        """
        with self.lock:
            points = {}
            for name in sorted(self.points, key=curve_order):
                points[name] = thin_out(self.points[name], MOST_POINTS)
            state = dict(self.state)
            state["goodput"] = self._goodput()
            state["eta"] = self._eta()
            state["ranks"] = ranks
            message = {
                "state": state,
                "points": points,
                "lines": list(self.lines),
                **self.unsent_texts,
            }
            self.points = {}
            self.unsent_texts = {}
            self.lines.clear()
        return message


class Handler(BaseHTTPRequestHandler):
    """Answers one request of a browser.

    `/` is the page, and `/events` the stream of what the runs write. There is no other path and no
    other method.
    """

    server: Server
    # What the header `Server` of an answer says: not the version of Python.
    server_version = "drumline"
    sys_version = ""
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer a request: first by who asks, then by the path."""
        server = self.server
        url = urlsplit(self.path)
        # Before anything else, since the page of a stranger may have sent it (see `is_ours`).
        if not server.is_ours(self.headers.get("Host", "")):
            self._answer(421, "this address is not the one that drumline watch printed\n")
            return
        if server.token:
            if server.is_token(_token_of_query(url.query)):
                self._answer_with_cookie()
                return
            if not server.is_token(self._cookie()):
                advice = "open the whole address that drumline watch printed, with its token"
                self._answer(401, f"{advice}\n")
                return
        if url.path == "/":
            self._answer(200, server.page, kind="text/html")
        elif url.path == "/events":
            self._stream()
        else:
            self._answer(404, "there is / and /events\n")

    def _answer_with_cookie(self) -> None:
        """Send the browser to the page, with a cookie that has the token.

        The cookie takes the token out of the address, where others may read it.
        """
        server = self.server
        cookie = f"{server.cookie}={server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(303, "", ("Location", "/"), ("Set-Cookie", cookie))

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
        """Send a whole answer: status, headers and text. `kind`: the type of its content."""
        content = text.encode(errors="replace")
        length = str(len(content))
        self._head(code, kind, ("Content-Length", length), *headers)
        self.wfile.write(content)

    def _head(self, code: int, kind: str, *headers: tuple[str, str]) -> None:
        """Send the status and the headers of an answer."""
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        # Nothing of a run is kept by the browser, sent on to another site, or shown inside of one.
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
                runs = [BrowserFeed(folder) for folder in server.folders]
                for run in runs:
                    # From the start of the file: a new browser gets all that has happened.
                    following = tail(run.folder / "events.jsonl", run.add, 0)
                    stack.enter_context(following)
                is_first = True
                wait_seconds = FIRST_TICK_SECONDS
                while not server.done.wait(wait_seconds):
                    # Written even if nothing is new: a browser that has gone is noticed by that.
                    self._send_message(runs, is_first)
                    is_first = False
                    wait_seconds = TICK_SECONDS
        finally:
            server.browsers.release()

    def _send_message(self, runs: list[BrowserFeed], is_first: bool) -> None:
        """Send what came of each run since the last message, as one server-sent event.

        `is_first`: the browser has nothing yet, and drops what it may have of an earlier stream.
        """
        messages = []
        for run in runs:
            ranks = self.server.rank_phases(run.folder)
            messages.append(run.message(ranks))
        values = redacted_json({"first": is_first, "runs": messages})
        text = json.dumps(values, allow_nan=False)
        self.wfile.write(f"data: {text}\n\n".encode(errors="replace"))

    def log_message(self, *arguments: Any) -> None:
        """Log nothing, since a line would have the token."""


def _token_of_query(query: str) -> str:
    """Return the value of `token` in the query of an address; empty if there is none."""
    values = parse_qs(query).get("token", [""])
    return values[0]


class Server(ThreadingHTTPServer):
    """The HTTP server of the page.

    Its `token` is required of each browser; it is empty if the server listens to this machine
    alone.
    """

    # A stream that is still open does not keep the process from ending.
    daemon_threads = True

    def __init__(self, folders: list[Path], host: str, port: int, rank_phases: RankPhases) -> None:
        """Listen, without answering yet. Raises OSError if the port is held.

        Args:
            folders: The runs, in the order of the page.
            host: The address of this machine to listen at; a name is resolved.
            port: The port to listen at; 0 takes a free one.
            rank_phases: Returns what each rank of a run does now.
        """
        # The base class reads it when it binds the socket.
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.folders = folders
        self.rank_phases = rank_phases
        self.host = host
        super().__init__((host, port), Handler)
        # Cookies do not tell ports apart, so two servers of one host need different names.
        self.cookie = f"drumline-{self.server_port}"
        self.done = threading.Event()
        self.browsers = threading.Semaphore(MOST_BROWSERS)
        # The address that `host` was resolved to.
        address = ipaddress.ip_address(str(self.server_address[0]))
        self.token = "" if address.is_loopback else secrets.token_urlsafe(TOKEN_BYTES)
        self.page = page(folders)

    def is_ours(self, host: str) -> bool:
        """Return whether a request came by an address of this machine.

        A name that somebody else has pointed to this machine is refused (DNS rebinding). `host`:
        the header of that name, which has the name or address that the browser opened.
        """
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", LOOPBACK, "::1", self.host.lower()):
            return True
        if not self.token:
            # It listens to this machine alone: any other name was pointed here by somebody.
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())
        # An address in digits is no name, so nobody can have pointed it here.
        return True

    def is_token(self, given: str) -> bool:
        """Return whether a browser has sent the right token.

        It takes the same time for all wrong ones, so that the token cannot be found letter by
        letter.
        """
        given_bytes = given.encode(errors="replace")
        return hmac.compare_digest(given_bytes, self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing.

        A browser that has gone is no error, and the next request is answered anyway.
        """

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
def serve_page(folders: list[Path], host: str, port: int, rank_phases: RankPhases) -> Iterator[str]:
    """Serve the page by a thread, as long as the context is open, and give its address.

    Raises EnvironmentFault if it cannot listen at `host` and `port`.
    """
    try:
        server = Server(folders, host, port, rank_phases)
    # A name that cannot be encoded for the name server raises UnicodeError.
    except (OSError, UnicodeError, ValueError) as error:
        raise _cannot_listen(error, host, port) from None
    thread = threading.Thread(
        target=server.serve_forever,
        kwargs={"poll_interval": 0.2},
        name="watch",
        daemon=True,
    )
    thread.start()
    try:
        yield server.url
    finally:
        # First the streams, which wait for `done` between two messages.
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
    # "Permission denied" is of a port that only root may take. Any other reason is the address.
    if "port" in reason or "denied" in reason:
        fix = "--port 0 takes a free one"
    else:
        fix = "name an address of this machine"
    return EnvironmentFault(f"cannot listen: {reason}", where=f"{host}:{port}", fix=fix)


@contextmanager
def serve_new_run(run_dir: Path, rank_phases: RankPhases) -> Iterator[str]:
    """Serve the page of a run that begins, to this machine alone, and give its address.

    If the usual port is held, by the page of another run for example, any free one is taken.
    """
    with ExitStack() as stack:
        try:
            url = stack.enter_context(serve_page([run_dir], LOOPBACK, PORT, rank_phases))
        except EnvironmentFault:
            url = stack.enter_context(serve_page([run_dir], LOOPBACK, 0, rank_phases))
        yield url


def watch(folders: list[Path], host: str, port: int | None, rank_phases: RankPhases) -> None:
    """Serve the page of some runs until Ctrl-C.

    `port`: None takes the usual one. Raises UserError for a folder that is no run, EnvironmentFault
    if it cannot listen.
    """
    for folder in folders:
        # For the UserError that it raises.
        RunFacts(folder)
    if port is None:
        port = PORT
    with LauncherSignals() as signals, serve_page(folders, host, port, rank_phases) as url:
        print(f"watch: {url}", flush=True)
        print("Ctrl-C ends the page; the runs go on", flush=True)
        while not signals.number:
            time.sleep(0.1)


def page(folders: list[Path]) -> str:
    """Return the HTML of the page before anything has come. watch.js fills it."""
    names = [folder.resolve().name for folder in folders]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    data = {"charts": [], "names": names}
    script = asset("draw.js") + asset("watch.js")
    return document(
        "watch.html.jinja",
        title,
        data,
        script,
        # The stream is of the page's own server.
        connect="'self'",
        names=names,
    )
