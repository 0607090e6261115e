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
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import EnvironmentFault, UserError
from drumline.launch.lease import Lease
from drumline.launch.rank_phases import rank_phases
from drumline.report.facts import RunFacts
from drumline.report.watch import MOST_BROWSERS, Live, Server, serve_new_run, serve_page, watch
from drumline.system import heartbeat
from drumline.telemetry.events import EventLog, Fault, read
from tests.unit.report_runs import HOSTILE, start, step, write_run

pytestmark = pytest.mark.slow


def nothing(run_dir: Path) -> list:
    return []


def get(url: str, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    place = url.removeprefix("http://").split("/")[0]
    connection = http.client.HTTPConnection(
        place.replace(socket.gethostname(), "127.0.0.1"), timeout=20
    )
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def message(stream: http.client.HTTPResponse) -> dict:
    line = stream.readline()
    while not line.startswith(b"data: "):
        line = stream.readline()
    return json.loads(line.removeprefix(b"data: "))


def until(stream: http.client.HTTPResponse, holds: Callable[[dict], object]) -> dict:
    for _ in range(20):
        if holds(made := message(stream)["runs"][0]):
            return made
    raise AssertionError("it did not come")


@pytest.mark.claim(
    "a browser sees what a run writes, needs the token beyond this machine, and leaves nothing behind"
)
def test_what_a_run_writes_comes_and_a_browser_that_goes_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[start(9), *(step(number) for number in (1, 2, 3))])
    threads = threading.active_count()
    with serve_page(
        [run],
        "127.0.0.1",
        0,
        lambda folder: [{"rank": 0, "phase": "forward", "step": 3, "seconds": 0.1}],
    ) as url:
        assert "connect-src 'self'" in html.unescape(get(url).read().decode())
        stream = get(url, "/events")
        first = until(stream, lambda made: "loss" in made["points"])
        assert (
            first["points"]["loss"]["x"] == [1, 2, 3]
            and first["state"]["ranks"][0]["phase"] == "forward"
        )
        assert (
            first["state"]["status"] == "running"
            and first["state"]["steps"] == 9
            and first["lines"]
        )
        log = EventLog(run / "events.jsonl")
        for event in (
            step(4),
            Fault(
                attempt=0,
                rank=1,
                signal=None,
                exitcode=1,
                error="lost",
                log="l",
                step=4,
                action="restart",
            ),
            step(4),
        ):
            log.emit(event)
        then = until(stream, lambda made: made["points"])
        assert (
            then["points"]["loss"]["x"] == [4, 4]
            and then["state"]["restarts"] == 1
            and any("rank 1: lost" in line for line in then["lines"])
        )
        stream.close()
        until_gone = time.monotonic() + 20
        while threading.active_count() > threads + 1 and time.monotonic() < until_gone:
            time.sleep(0.1)
        assert threading.active_count() == threads + 1  # the server's own
    assert threading.active_count() == threads


@pytest.mark.claim(
    "a browser sees what a run writes, needs the token beyond this machine, and leaves nothing behind"
)
def test_who_gets_in(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serve_page([run], "127.0.0.1", 0, nothing) as url:
        port = url.split(":")[2].strip("/")
        assert (
            "token" not in url
            and get(url).status == 200
            and get(url, Host=f"localhost:{port}").status == 200
        )
        assert (
            get(url, Host="evil.example").status == 421
            and get(url, "/events", Host=f"a.evil.example:{port}").status == 421
        )
        assert get(url, "/../../etc/passwd").status == 404
    with serve_page([run], "0.0.0.0", 0, nothing) as url:
        token = url.split("token=")[1]
        assert len(token) >= 40 and token not in get(url, f"/?token={token}").read().decode()
        for path in ("/", "/events", f"/?token={token[:-1]}", "/?token=", "/events?token=%C3%A9"):
            assert get(url, path).status == 401, path
        answer = get(url, f"/?token={token}")
        cookie = answer.headers["Set-Cookie"].split(";")[0]
        assert (
            answer.status == 303
            and answer.headers["Location"] == "/"
            and "HttpOnly" in answer.headers["Set-Cookie"]
        )
        assert (
            get(url, Cookie=cookie).status == 200
            and get(url, Cookie=cookie[:-1]).status == 401
            and get(url, Cookie="\x00;=").status == 401
        )
        for odd in ("a b", "weird=[x]", 'x={"a":1}', "theme:x=1; bad@key=1", "_ga=GA1.1.1", "=;;"):
            assert (
                get(url, Cookie=f"{odd}; {cookie}").status == 200
                and get(url, Cookie=f"{cookie}; {odd}").status == 200
            ), odd
        assert get(url, f"/?token={token}", Host="evil.example").status == 421
    with serve_page([run], "0.0.0.0", 0, nothing) as other:
        assert other.split("token=")[1] != token


def test_goodput_is_worked_out_once_a_message(tmp_path: Path) -> None:
    class Counting(Live):
        asked = 0

        def _goodput(self) -> float | None:
            self.asked += 1
            return super()._goodput()

    run = Counting(write_run(tmp_path / "run"))
    assert run.message([])["state"]["goodput"] is None
    for event in read(run.folder / "events.jsonl"):
        run.add(event)
    assert (
        run.message([])["state"]["goodput"] == pytest.approx(RunFacts(run.folder).goodput)
        and run.asked == 2
    )


def test_a_held_port_and_what_is_no_run_are_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serve_page([run], "127.0.0.1", 0, nothing) as url:
        port = int(url.split(":")[2].strip("/"))
        with pytest.raises(EnvironmentFault, match=r"held by another process .* --port 0"):
            watch([run], "127.0.0.1", port, nothing)
    with pytest.raises(EnvironmentFault, match="cannot listen"):
        watch([run], "203.0.113.7", 0, nothing)
    with pytest.raises(UserError, match=r"no run folder"):
        watch([tmp_path], "127.0.0.1", 0, nothing)
    with serve_new_run(run, nothing) as one, serve_new_run(run, nothing) as other:
        assert one != other


def test_no_more_browsers_than_there_are_places(tmp_path: Path) -> None:
    server = Server([write_run(tmp_path / "run")], "127.0.0.1", 0, nothing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for _ in range(MOST_BROWSERS):
        server.browsers.acquire()
    assert get(f"http://127.0.0.1:{server.server_port}/", "/events").status == 503
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_what_each_rank_does_is_read_from_the_launcher_s_memory(tmp_path: Path) -> None:
    assert rank_phases(tmp_path) == []
    older = heartbeat.new_board(2)  # of an attempt before
    assert older is not None
    shutil.rmtree(older.folder)
    time.sleep(0.05)
    board = heartbeat.new_board(2)
    assert board is not None
    for place, phase in enumerate(("forward", "collective")):
        board.ints[place * heartbeat.SLOT + heartbeat.PID] = os.getpid()
        board.ints[place * heartbeat.SLOT + heartbeat.PHASE] = heartbeat.NUMBER[phase]
        board.ints[place * heartbeat.SLOT + heartbeat.STEP] = 7
        board.floats[place * heartbeat.SLOT + heartbeat.SINCE] = time.monotonic() - 5
    for file in board.folder.iterdir():
        file.unlink()  # as the launcher does, as soon as all have it open
    board.folder.rmdir()
    with Lease(tmp_path):
        found = rank_phases(tmp_path)
    assert [(each["rank"], each["phase"], each["step"]) for each in found] == [
        (0, "forward", 7),
        (1, "collective", 7),
    ]
    assert all(4 < each["seconds"] < 100 for each in found)


def test_browser(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no /usr/bin/chromium: apt-get install chromium")
    run = write_run(tmp_path / "run")
    with serve_page([run], "0.0.0.0", 0, nothing) as url:
        with (
            sync_api.sync_playwright() as playwright,
            playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            ) as browser,
        ):
            tab = browser.new_page(viewport={"width": 390, "height": 800})
            seen: list[str] = []
            tab.on(
                "console",
                lambda message: (
                    seen.append(message.text) if message.type in ("error", "warning") else None
                ),
            )
            tab.on("pageerror", lambda error: seen.append(str(error)))
            tab.goto(url.replace(socket.gethostname(), "127.0.0.1"))
            tab.wait_for_selector(".chart .main-svg", timeout=60_000)
            # Events come in portions.
            tab.locator(".status", has_text="finished").wait_for(timeout=20_000)
            assert "token" not in tab.url and tab.inner_text(".status") == "finished"
            line = tab.locator(".chart path.js-line").first
            before = line.get_attribute("d")
            EventLog(run / "events.jsonl").emit(step(21, loss=0.25))
            tab.locator(".tile", has_text="21 of 20").wait_for(timeout=20_000)
            assert (
                tab.evaluate("data.charts[0].series[0].y.at(-1)") == 0.25
                and line.get_attribute("d") != before
            )
            assert (
                HOSTILE[:9] in tab.inner_text(".happened")
                and not seen
                and tab.evaluate("window.hurt") is None
            )
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            browser.close()
