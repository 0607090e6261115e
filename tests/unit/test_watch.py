"""`drumline watch`: what comes to a browser, who gets in, and what is left behind."""

from __future__ import annotations

import html
import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import EnvironmentFault, UserError
from drumline.launch.lease import Lease
from drumline.launch.rank_phases import rank_phases
from drumline.report.facts import RunFacts
from drumline.report.watch import (
    MOST_BROWSERS,
    BrowserFeed,
    Server,
    serve_new_run,
    serve_page,
    watch,
)
from drumline.system.heartbeat import PHASE, PHASE_NUMBERS, PID, RANK_WORDS, SINCE, STEP, new_board
from drumline.telemetry.events import EventLog, Fault, read
from tests.unit.report_runs import HOSTILE, start, step, write_run

pytestmark = pytest.mark.slow


def no_ranks(run_dir: Path) -> list:
    return []


def ranks_in_forward(run_dir: Path) -> list:
    return [{"rank": 0, "phase": "forward", "step": 3, "seconds": 0.1}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def serve(run: Path, host: str = "127.0.0.1") -> AbstractContextManager[str]:
    return serve_page([run], host, 0, no_ranks)


def port_of(url: str) -> int:
    return int(url.split(":")[2].strip("/"))


def get(url: str, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    place = url.removeprefix("http://").split("/")[0]
    host = place.replace(socket.gethostname(), "127.0.0.1")
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def assert_status(expected: int, url: str, path: str = "/", **headers: str) -> None:
    """Check the status of an answer."""
    answer = get(url, path, **headers)
    assert answer.status == expected, (path, headers)


def read_text(url: str, path: str = "/") -> str:
    return get(url, path).read().decode()


def message(stream: http.client.HTTPResponse) -> dict:
    line = stream.readline()
    while not line.startswith(b"data: "):
        line = stream.readline()
    return json.loads(line.removeprefix(b"data: "))


def wait_for(stream: http.client.HTTPResponse, holds: Callable[[dict], object]) -> dict:
    """Return the first message about the run that `holds` accepts."""
    for _ in range(20):
        made = message(stream)["runs"][0]
        if holds(made):
            return made
    raise AssertionError("it did not come")


@pytest.mark.claim(
    "a browser sees what a run writes, needs the token beyond this machine, and leaves nothing behind"
)
def test_what_a_run_writes_comes_and_a_browser_that_goes_leaves_nothing(tmp_path: Path) -> None:
    steps = [step(number) for number in (1, 2, 3)]
    run = write_run(tmp_path / "run", events=[start(9), *steps])
    threads = threading.active_count()
    with serve_page([run], "127.0.0.1", 0, ranks_in_forward) as url:
        assert "connect-src 'self'" in html.unescape(read_text(url))

        stream = get(url, "/events")
        first = wait_for(stream, lambda made: "loss" in made["points"])
        state = first["state"]
        assert first["points"]["loss"]["x"] == [1, 2, 3]
        assert first["lines"]
        assert state["ranks"][0]["phase"] == "forward"
        assert state["status"] == "running"
        assert state["steps"] == 9

        fault = Fault(
            attempt=0,
            rank=1,
            signal=None,
            exitcode=1,
            error="lost",
            log="l",
            step=4,
            action="restart",
        )
        log = EventLog(run / "events.jsonl")
        log.emit(step(4))
        log.emit(fault)
        log.emit(step(4))

        then = wait_for(stream, lambda made: made["points"])
        assert then["points"]["loss"]["x"] == [4, 4]
        assert then["state"]["restarts"] == 1
        assert any("rank 1: lost" in line for line in then["lines"])

        stream.close()
        deadline = time.monotonic() + 20
        while threading.active_count() > threads + 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert threading.active_count() == threads + 1, "the server's own"

    assert threading.active_count() == threads


@pytest.mark.claim(
    "a browser sees what a run writes, needs the token beyond this machine, and leaves nothing behind"
)
def test_who_gets_in(run: Path) -> None:
    with serve(run) as url:
        port = port_of(url)
        assert "token" not in url
        assert_status(200, url)
        assert_status(200, url, Host=f"localhost:{port}")
        assert_status(421, url, Host="evil.example")
        assert_status(421, url, "/events", Host=f"a.evil.example:{port}")
        assert_status(404, url, "/../../etc/passwd")

    with serve(run, "0.0.0.0") as url:
        token = url.split("token=")[1]
        right = f"/?token={token}"
        assert len(token) >= 40
        assert token not in read_text(url, right)
        for path in ("/", "/events", f"/?token={token[:-1]}", "/?token=", "/events?token=%C3%A9"):
            assert_status(401, url, path)

        answer = get(url, right)
        assert answer.status == 303
        assert answer.headers["Location"] == "/"
        assert "HttpOnly" in answer.headers["Set-Cookie"]

        cookie = answer.headers["Set-Cookie"].split(";")[0]
        assert_status(200, url, Cookie=cookie)
        assert_status(401, url, Cookie=cookie[:-1])
        assert_status(401, url, Cookie="\x00;=")
        for odd in ("a b", "weird=[x]", 'x={"a":1}', "theme:x=1; bad@key=1", "_ga=GA1.1.1", "=;;"):
            assert_status(200, url, Cookie=f"{odd}; {cookie}")
            assert_status(200, url, Cookie=f"{cookie}; {odd}")

        assert_status(421, url, right, Host="evil.example")

    with serve(run, "0.0.0.0") as other:
        assert other.split("token=")[1] != token


class CountedGoodput(BrowserFeed):
    """Counts how often goodput is worked out."""

    count = 0

    def _goodput(self) -> float | None:
        self.count += 1
        return super()._goodput()


def test_goodput_is_worked_out_once_a_message(run: Path) -> None:
    live = CountedGoodput(run)
    assert live.message([])["state"]["goodput"] is None

    for event in read(run / "events.jsonl"):
        live.add(event)

    goodput = live.message([])["state"]["goodput"]
    assert goodput == pytest.approx(RunFacts(run).goodput)
    assert live.count == 2


def test_a_held_port_and_what_is_no_run_are_one_line(tmp_path: Path, run: Path) -> None:
    with serve(run) as url:
        with pytest.raises(EnvironmentFault, match=r"held by another process .* --port 0"):
            watch([run], "127.0.0.1", port_of(url), no_ranks)

    with pytest.raises(EnvironmentFault, match="cannot listen"):
        watch([run], "203.0.113.7", 0, no_ranks)

    with pytest.raises(UserError, match=r"no run folder"):
        watch([tmp_path], "127.0.0.1", 0, no_ranks)

    with serve_new_run(run, no_ranks) as one, serve_new_run(run, no_ranks) as other:
        assert one != other


def test_no_more_browsers_than_there_are_places(run: Path) -> None:
    server = Server([run], "127.0.0.1", 0, no_ranks)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for _ in range(MOST_BROWSERS):
        server.browsers.acquire()

    url = f"http://127.0.0.1:{server.server_port}/"
    assert_status(503, url, "/events")

    server.shutdown()
    server.server_close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_what_each_rank_does_is_read_from_the_launcher_s_memory(tmp_path: Path) -> None:
    assert rank_phases(tmp_path) == []

    # Of an attempt before.
    older = new_board(2)
    assert older is not None
    shutil.rmtree(older.folder)
    time.sleep(0.05)

    board = new_board(2)
    assert board is not None
    for rank, phase in enumerate(("forward", "collective")):
        place = rank * RANK_WORDS
        board.ints[place + PID] = os.getpid()
        board.ints[place + PHASE] = PHASE_NUMBERS[phase]
        board.ints[place + STEP] = 7
        board.floats[place + SINCE] = time.monotonic() - 5

    # As the launcher does, as soon as all have it open.
    shutil.rmtree(board.folder)

    with Lease(tmp_path):
        first, second = rank_phases(tmp_path)

    assert (first["rank"], first["phase"]) == (0, "forward")
    assert (second["rank"], second["phase"]) == (1, "collective")
    for found in (first, second):
        assert found["step"] == 7
        assert 4 < found["seconds"] < 100


CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")

    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": str(CHROMIUM), "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as chromium:
            yield chromium


@pytest.mark.full
def test_browser(browser: Any, run: Path) -> None:
    complaints: list[str] = []

    def record_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def record_error(error: Any) -> None:
        complaints.append(str(error))

    size = {"width": 390, "height": 800}
    with serve(run, "0.0.0.0") as url, browser.new_page(viewport=size) as tab:
        tab.on("console", record_console)
        tab.on("pageerror", record_error)
        tab.goto(url.replace(socket.gethostname(), "127.0.0.1"))
        tab.wait_for_selector(".chart .main-svg", timeout=60_000)
        # Events come in portions.
        tab.locator(".status", has_text="finished").wait_for(timeout=20_000)
        assert "token" not in tab.url
        assert tab.inner_text(".status") == "finished"

        line = tab.locator(".chart path.js-line").first
        before = line.get_attribute("d")
        EventLog(run / "events.jsonl").emit(step(21, loss=0.25))
        tab.locator(".tile", has_text="21 of 20").wait_for(timeout=20_000)
        assert tab.evaluate("data.charts[0].series[0].y.at(-1)") == 0.25
        assert line.get_attribute("d") != before

        assert HOSTILE[:9] in tab.inner_text(".happened")
        assert not complaints
        assert tab.evaluate("window.hurt") is None
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
