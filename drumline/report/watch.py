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

from drumline.core.redact import plain
from drumline.core.signals import LauncherSignals
from drumline.errors import EnvironmentFault
from drumline.report.curves import MOST_POINTS, binned
from drumline.report.facts import RunFacts, mapping, named, number, place_of, speed_unit
from drumline.report.markup import Html, join, tag
from drumline.report.page import asset, document
from drumline.report.progress import Progress
from drumline.telemetry.events import Event, tail

Stages = Callable[[Path], list[dict[str, Any]]]
LOOPBACK, PORT = "127.0.0.1", 8765
TICK_SECONDS = 1.0
MOST_BROWSERS = 32
MOST_LINES = 200  # of what happened, at once
TIMEOUT_SECONDS = 30.0  # of a browser that takes nothing


class Live:
    """One run as it goes on, for one browser. `add` is called by the thread that reads its events, `message` by that of the browser."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.text = io.StringIO()
        self.progress = Progress(Console(file=self.text, width=160, no_color=True, highlight=False))
        self.points: dict[str, list[tuple[int, float]]] = {}
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self.seconds: dict[int, float] = {}  # of each step, the last word
        self.before: int | None = None  # steps that were done in another folder
        self.began = self.last = self.idle = (
            0.0  # unix seconds; seconds between a stop and the next start
        )
        self.fresh: dict[str, Any] = {}
        self.state: dict[str, Any] = {"status": "planned", "restarts": 0}

    def add(self, event: Event) -> None:
        values = plain(event.values())
        with self.lock:
            for name, value in named(values).items():
                if value is not None:
                    self.points.setdefault(name, []).append((values["step"], value))
            self._note(values)
            self.progress.on_event(event)
            self.lines.extend(
                f"{time.strftime('%H:%M:%S', time.localtime(self.last))}  {line}"
                for line in self.text.getvalue().splitlines()
            )
            self.text.seek(0)
            self.text.truncate()

    def _note(self, event: dict[str, Any]) -> None:
        kind, state, before = event["kind"], self.state, self.last
        self.last = min(max(number(event["t"]) or 0.0, 0.0), 1e11)
        self.began = self.began or self.last
        if kind == "run_start":
            # The time until somebody resumes a run is no loss; the time until a restart is.
            if before and state["status"] != "starting again":
                self.idle += max(0.0, self.last - before)
            state |= {
                "status": "starting",
                "steps": event.get("steps"),
                "plan": event.get("plan_line"),
            }
        elif kind == "planned":
            memory = mapping(event.get("memory"))
            state |= {
                "limit": number(event.get("limit")),
                "planned": number(memory.get("reserved")),
            }
        elif kind == "restore":
            self.before = event["step"] if self.before is None else self.before
        elif kind == "step":
            self.before = self.before or 0
            self.seconds[event["step"]] = number(event.get("seconds")) or 0.0
            state |= {
                "status": "running",
                "step": event["step"],
                "memory": event.get("memory_bytes"),
            }
            state |= {key: number(event.get(key)) for key in ("loss", "lr", "tokens_per_s")}
            state["speed_unit"] = speed_unit(event)
        elif kind == "fault":
            state |= {
                "status": "failed"
                if str(event.get("action")).startswith("stop")
                else "starting again"
            }
            state["restarts"] += event.get("action") in ("restart", "replan")
            self.text.write(
                f"rank {event.get('rank')}: {event.get('error')} → {event.get('action')}\n"
            )
        elif kind == "run_end":
            state["status"] = event.get("status")
        elif kind in ("samples", "completions"):
            self.fresh[kind] = {"step": event.get("step"), "shown": event.get(kind)}

    def _goodput(self) -> float | None:
        """As RunFacts has it, so far."""
        if not self.seconds:
            return None
        worth = (
            sum(self.seconds.values())
            / len(self.seconds)
            * (max(self.seconds) - (self.before or 0))
        )
        spent = self.last - self.began - self.idle
        return min(1.0, worth / spent) if spent > 0 else None

    def message(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What came since the last one."""
        with self.lock:
            points = {
                name: binned(each, MOST_POINTS)
                for name, each in sorted(self.points.items(), key=lambda item: place_of(item[0]))
            }
            recent = [*self.seconds.values()][-20:]
            left = (number(self.state.get("steps")) or 0) - (number(self.state.get("step")) or 0)
            eta = left * sum(recent) / len(recent) if recent and left > 0 else None
            state = {**self.state, "goodput": self._goodput(), "eta": eta, "ranks": ranks}
            made = {"state": state, "points": points, "lines": [*self.lines], **self.fresh}
            self.points, self.fresh = {}, {}
            self.lines.clear()
        return made


class Handler(BaseHTTPRequestHandler):
    """`/`: the page; `/events`: the stream. No other path, no other method."""

    server: Server
    server_version, sys_version = "drumline", ""
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        server, url = self.server, urlsplit(self.path)
        if not server.is_ours(self.headers.get("Host", "")):
            self._answer(421, "this address is not the one that drumline watch printed\n")
        elif server.token and server.is_token(parse_qs(url.query).get("token", [""])[0]):
            # Out of the address, where others may read it.
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
        """By hand: http.cookies drops all of them for an odd one, and other servers of this host have theirs here, too."""
        pairs = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.server.cookie), "")

    def _answer(
        self, code: int, text: str, *headers: tuple[str, str], kind: str = "text/plain"
    ) -> None:
        content = text.encode(errors="replace")
        self._head(code, kind, ("Content-Length", str(len(content))), *headers)
        self.wfile.write(content)

    def _head(self, code: int, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        own = (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        )
        for name, value in (
            *own,
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
            *headers,
        ):
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
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
                first = True
                while not server.done.wait(TICK_SECONDS / 3 if first else TICK_SECONDS):
                    # Written each time: that is how one learns that a browser has gone.
                    made = [run.message(server.stages(run.folder)) for run in runs]
                    text = json.dumps(plain({"first": first, "runs": made}), allow_nan=False)
                    self.wfile.write(f"data: {text}\n\n".encode(errors="replace"))
                    first = False
        finally:
            server.browsers.release()

    def log_message(self, *arguments: Any) -> None:
        """Nothing: a line would have the token."""


class Server(ThreadingHTTPServer):
    """`token`: required of each browser; empty where none is. Raises OSError where the port is held."""

    daemon_threads = True

    def __init__(self, folders: list[Path], host: str, port: int, stages: Stages) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.folders, self.stages, self.host = folders, stages, host
        super().__init__((host, port), Handler)
        self.cookie, self.done, self.browsers = (
            f"drumline-{self.server_port}",
            threading.Event(),
            threading.Semaphore(MOST_BROWSERS),
        )
        self.token = (
            ""
            if ipaddress.ip_address(str(self.server_address[0])).is_loopback
            else secrets.token_urlsafe(32)
        )
        self.page = page(folders)

    def is_ours(self, host: str) -> bool:
        """Whether a request came by an address of this machine, and not by a name that somebody has pointed to it (DNS rebinding)."""
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", "127.0.0.1", "::1", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return bool(self.token) and name in (
                socket.gethostname().lower(),
                socket.getfqdn().lower(),
            )
        return bool(self.token)

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone is no error; whatever else it was, the next request is answered."""

    @property
    def url(self) -> str:
        """What a person opens."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host
        return (
            f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"
            + f"?token={self.token}" * bool(self.token)
        )


@contextmanager
def serving(folders: list[Path], host: str, port: int, stages: Stages) -> Iterator[str]:
    """Within, a thread serves the page; gives its address. Raises EnvironmentFault where it cannot listen there."""
    try:
        server = Server(folders, host, port, stages)
    except (OSError, UnicodeError, ValueError) as error:
        reason = (
            "the port is held by another process"
            if getattr(error, "errno", None) == 98
            else getattr(error, "strerror", None) or str(error)
        )
        fix = (
            "--port 0 takes a free one"
            if "port" in reason or "denied" in reason
            else "name an address of this machine"
        )
        raise EnvironmentFault(
            f"cannot listen: {reason}", where=f"{host}:{port}", fix=fix
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="watch", daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.done.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def beside(run_dir: Path, stages: Stages) -> Iterator[str]:
    """`serving` of a run that begins, on this machine alone; where the usual port is held, on another."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(serving([run_dir], LOOPBACK, PORT, stages))
        except EnvironmentFault:
            url = stack.enter_context(serving([run_dir], LOOPBACK, 0, stages))
        yield url


def watch(folders: list[Path], host: str, port: int | None, stages: Stages) -> None:
    """Serve until Ctrl-C. Raises UserError for what is no run, EnvironmentFault where it cannot listen."""
    for folder in folders:
        RunFacts(folder)
    with (
        LauncherSignals() as signals,
        serving(folders, host, PORT if port is None else port, stages) as url,
    ):
        print(f"watch: {url}", flush=True)
        print("Ctrl-C ends the page; the runs go on", flush=True)
        while not signals.number:
            time.sleep(0.1)


def page(folders: list[Path]) -> str:
    """The page before anything has come."""
    names = [folder.resolve().name for folder in folders]
    runs = join(_run(place, name) for place, name in enumerate(names))
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    theme = (
        tag("button", "Dark", id="theme", type="button"),
        tag("button", "Log scale", id="log", type="button", aria_pressed="false"),
    )
    head = tag(
        "header",
        tag("h1", title),
        tag("div", tag("span", "connecting …", id="connection"), *reversed(theme), class_="tools"),
    )
    curves = tag("section", tag("h2", "Curves"), tag("div", id="curves", class_="grid"))
    body = join((head, tag("main", runs, curves), tag("noscript", "This page needs JavaScript.")))
    return document(
        f"{title} · Drumline",
        body,
        {"charts": [], "names": names},
        asset("draw.js") + asset("watch.js"),
        connect="'self'",
    )


def _run(place: int, name: str) -> Html:
    """What watch.js fills."""
    parts = [
        tag("h2", name, " ", tag("span", class_="status")),
        tag("p", class_="plan"),
        tag("progress", max=1, value=0),
    ]
    parts += [tag("div", class_="tiles"), tag("div", class_="ranks")]
    folds = (("What happened", "happened"), ("Samples", "samples"), ("Rollouts", "completions"))
    parts += [
        tag(
            "details",
            tag("summary", title),
            tag("div", class_=kind),
            open=kind == "happened",
            hidden=True,
        )
        for title, kind in folds
    ]
    return tag("section", *parts, class_="live", data_run=place)
