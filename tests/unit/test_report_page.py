"""`drumline report`: what stands on the page, whatever lies in the folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import EnvironmentFault, UserError
from drumline.plan.plan import Plan
from drumline.report import page
from drumline.report.curves import MOST_POINTS, charts, thin_out
from drumline.report.details import rollouts, samples
from drumline.report.facts import RunFacts, differences, short_names
from drumline.report.markup import Keyed, html_environment, table
from drumline.report.picture import draw
from drumline.report.sections import ChartRegistry, configuration
from drumline.telemetry import watched
from drumline.telemetry.events import Eval, Fault, Rollout, RunEnd
from tests.harness import ROOT
from tests.unit.report_runs import HOSTILE, start, step, story, write_run

pytestmark = pytest.mark.slow


def figures(text: str) -> list[dict]:
    values = re.search(r'id="values">(.*?)</script>', text)[1]
    return json.loads(values)["charts"]


def run_of(folder: Path, *events: Any) -> RunFacts:
    """Return the facts of a run with these events after its start."""
    return RunFacts(write_run(folder, events=[start(), *events]))


def page_of(run: Path) -> str:
    return page.page([RunFacts(run)])


@pytest.mark.claim(
    "a page of a run shows what is in it, runs nothing of it, and asks nothing of a network"
)
def test_what_a_run_says_is_on_its_page_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame-open-sesame")
    run = write_run(tmp_path / f"<b>{'run'}")
    with (run / "events.jsonl").open("a") as file:
        spike = {"t": 1.0, "kind": "spike", "step": 3, "policy": "sesame-open-sesame"}
        file.write(json.dumps(spike) + "\n")

    text = page_of(run)
    own = text
    for asset in ("plotly.min.js", "page.js"):
        own = own.replace(page.asset(asset), "")

    for foreign in ("<script>window", "<img", "<b>run"):
        assert foreign not in own

    assert own.count("</script>") == 3

    for secret in ("hunter2", "sesame-open"):
        assert secret not in text

    for part in (
        "finished",
        "20 of 20",
        "killed &lt;/script",
        "900 (45.0%)",
        "1.00 MiB",
        "1 of 2 attempts",
        "drumline train",
        "2.13.0",
        "2 + 2?",
        "reward 0.75",
    ):
        assert part in own, part

    titles = {figure["title"] for figure in figures(text)}
    curves = {"loss", "held out: loss", "reward: a", "sampler gap", "learning rate"}
    assert titles >= curves
    assert titles >= {"Seconds by phase and rank", "Memory of the fullest rank"}

    loss = figures(text)[0]
    assert loss["series"][0]["x"] == list(range(1, 21))
    assert loss["marks"] == [{"x": 10, "text": "restart"}]


def test_thinned_out_curves_keep_means_and_ends(tmp_path: Path) -> None:
    points = [(number, float(number % 7)) for number in range(1, 10_001)]
    made = thin_out(points, MOST_POINTS)
    assert len(made["x"]) == MOST_POINTS
    assert made["x"][-1] == 10_000
    assert made["total_points"] == 10_000

    # Of 1 to 10, modulo 7.
    first_mean = statistics.fmean([1, 2, 3, 4, 5, 6, 0, 1, 2, 3])
    assert made["y"][0] == pytest.approx(first_mean, rel=1e-5)
    assert made["low"][0] == 0.0
    assert made["high"][0] == 6.0

    run = run_of(tmp_path / "long", *map(step, range(1, 2501)))
    chart = charts([run], ["long"])[0]
    assert chart["note"].startswith("2,500 points drawn as 834 means of 3")


def test_seeds_are_one_band_and_differences_are_marked(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1, 2):
        runs.append(RunFacts(write_run(tmp_path / f"s{seed}", seed=seed, shift=seed)))

    runs.append(RunFacts(write_run(tmp_path / "other", lr=2e-3)))

    chart = charts(runs, short_names(runs))[0]
    mean = chart["series"][0]
    assert mean["seed_count"] == 3
    assert [each["color"] for each in chart["series"]] == [0, 0, 0, 0, 1]
    # 3, 4, 5: a deviation of 1.
    assert mean["y"][0] == pytest.approx(4.0)
    assert mean["high"][0] == pytest.approx(5.0)
    assert "3 seeds" in chart["note"]
    assert differences(runs) == ["optimizer.lr", "run.seed"]
    assert page.page(runs).count(">differs</mark>") == 2


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        ([], "never finished a step"),
        (
            [
                '{"t": 1, "kind": "run_start"}',
                "not json",
                '{"kind": "step"}',
                '{"t": 5, "kind": "st',
            ],
            "3 of 4 lines",
        ),
        (
            ['{"t": 1e999, "kind": "step", "step": 1}', '{"t": NaN, "kind": "step", "step": 1}'],
            "2 of 2 lines",
        ),
    ],
)
def test_a_damaged_or_empty_run_has_a_page_that_says_so(
    tmp_path: Path, lines: list[str], remark: str
) -> None:
    run = write_run(tmp_path / "run", events=[])
    (run / "events.jsonl").write_text("\n".join(lines))
    assert remark in page_of(run)

    (run / "plan.json").write_text('{"config": [')
    assert "plan.json is left out" in page_of(run)


def test_values_of_any_type_at_any_place_make_a_page(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    odd = [None, True, -1, 1e308, "x", [], {}, [None, {"a": []}], {"step": {}}]
    events = list(map(json.loads, (whole / "events.jsonl").read_text().splitlines()))
    event_of_kind = {event["kind"]: event for event in events}
    for place, value in enumerate(odd):
        run = shutil.copytree(whole, tmp_path / f"odd{place}")
        with (run / "events.jsonl").open("a") as file:
            for event in event_of_kind.values():
                kept = {key: event[key] for key in ("t", "kind", "step") if key in event}
                file.write(json.dumps(dict.fromkeys(event, value) | kept) + "\n")

        plan = json.loads((run / "plan.json").read_text())
        (run / "plan.json").write_text(json.dumps(dict.fromkeys(plan, value)))
        text = page_of(run)
        assert "finished" in text or "status" in text


def test_an_older_run_and_many_runs(tmp_path: Path) -> None:
    runs = [RunFacts(ROOT / "tests/fixtures/run_474a450/run")]
    first = write_run(tmp_path / "r0")
    runs.append(RunFacts(first))
    for place in range(1, 60):
        runs.append(RunFacts(shutil.copytree(first, tmp_path / f"r{place}")))

    text = page.page(runs)
    assert "of the first 12 of 61 runs" in text
    assert text.count("<tr>") > 61


def test_what_is_no_run_or_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        page.report([tmp_path], None)

    with pytest.raises(EnvironmentFault, match="cannot be written"):
        page.report([write_run(tmp_path / "run")], tmp_path / "no" / "such" / "folder.html")

    for out in (Path("/dev/null"), tmp_path, tmp_path / "curves.png"):
        with pytest.raises(UserError, match="no place for a page"):
            page.report([tmp_path / "run"], out)


def test_any_name_is_in_the_picture(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    runs = []
    for name in ("数学 😀".encode(), b"\xff"):
        folder = write_run(tmp_path / "x").rename(tmp_path / os.fsdecode(name))
        runs.append(RunFacts(folder))

    picture = tmp_path / "curves.png"
    assert draw(runs, picture)
    assert picture.stat().st_size > 10_000

    for warning in recwarn:
        assert "Glyph" not in str(warning.message)


def test_at_the_end_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    html = run / "report.html"
    plan = Plan.load(ROOT / "tests/fixtures/run_474a450/run/plan.json")
    plan = plan.model_copy(update={"run_dir": str(run)})

    no_page = plan.config.report.model_copy(update={"html": False})
    config = plan.config.model_copy(update={"report": no_page})
    page.write_final_page(plan.model_copy(update={"config": config}))
    assert not html.exists()

    page.write_final_page(plan)
    assert "finished" in html.read_text()
    assert (run / "report.png").stat().st_size > 10_000

    html.unlink()
    html.mkdir()
    page.write_final_page(plan)
    err = capsys.readouterr().err
    assert "note: " in err
    assert "report.html" in err


@pytest.mark.claim(
    "a page of a run shows what is in it, runs nothing of it, and asks nothing of a network"
)
def test_browser(tmp_path: Path) -> None:
    """Three widths, both themes, clicks; no error, nothing asked of a network, nothing of a stranger's run."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no /usr/bin/chromium: apt-get install chromium")

    one = page.report([write_run(tmp_path / "one")], None)
    runs = [tmp_path / "one", write_run(tmp_path / "two", seed=1, shift=0.5)]
    two = page.report(runs, tmp_path / "two.html")
    assert HOSTILE not in one.read_text()

    with (
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        ) as browser,
    ):
        use_page(browser, one, 390, "dark")
        use_page(browser, two, 820, "light")
        use_page(browser, one, 1440, "dark")


def record_trouble(tab: Any) -> list[str]:
    """Return a list that gets the tab's errors, warnings and requests to a network."""
    seen: list[str] = []

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            seen.append(message.text)

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            seen.append(request.url)

    tab.on("console", on_console)
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("request", on_request)
    return seen


def use_page(browser: Any, path: Path, width: int, theme: str) -> None:
    """Open a page at a width of the window, and click through it."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    seen = record_trouble(tab)
    count_rows = tab.locator("#config tbody tr:visible").count

    tab.goto(f"file://{path}")
    tab.wait_for_selector(".chart .main-svg", timeout=60_000)
    assert tab.evaluate("document.documentElement.dataset.theme") == theme

    fits = tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert fits, f"wider than {width}"

    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") != theme

    tab.click("#log")
    before = count_rows()
    tab.click(".only[data-only='']")
    assert count_rows() > before

    tab.fill("[data-search=config]", "optimizer.lr")
    assert count_rows() >= 1

    if width == 820:
        tab.select_option("#pick", "1")
        assert tab.locator(".run[data-run='0']:visible").count() == 0
    else:
        tab.fill(".least", "0.5")
        assert tab.locator(".episodes .card:visible").count() == 2
        tab.fill(".least", "")
        tab.select_option(".mark", "cut")
        assert tab.locator(".episodes .card:visible").count() == 1

    assert not seen
    assert tab.evaluate("window.hurt") is None

    tab.close()


def test_the_summary_says_why_a_run_failed(tmp_path: Path) -> None:
    fault = Fault(
        attempt=0, rank=1, host="node7", signal="SIGKILL", exitcode=-9, error="killed by SIGKILL", log="logs/rank-1.log", step=4,
        action="stop: 3 restarts without progress", cause="memory ran out — use fewer loader workers",
    )  # fmt: skip
    made = page.page([run_of(tmp_path / "x", step(4), fault)])
    summary = made[made.index("<h2>Summary") : made.index("<h2>Curves")]
    for part in (
        "killed by SIGKILL",
        "node7",
        "3 restarts without progress",
        "use fewer loader workers",
    ):
        assert part in summary

    stopped = RunEnd(status="stopped", exit_code=3, step=4, why="loss is NaN", goodput={})
    stopped_run = run_of(tmp_path / "y", step(4), stopped)
    assert stopped_run.failure == {"reason": "loss is NaN"}

    finished = RunEnd(status="finished", exit_code=0, step=20, goodput={})
    finished_run = run_of(tmp_path / "z", step(4), finished)
    assert finished_run.failure == {}


def test_samples_are_matched_by_their_prompts(tmp_path: Path) -> None:
    def shown(word: str, *prompts: str) -> list[dict[str, Any]]:
        made = []
        for prompt in prompts:
            text = f"{word} {prompt}"
            made.append({"set": None, "prompt": prompt, "text": text, "answer": None})

        return made

    before = shown("old", "EASY", "HARD")
    after = shown("new", "EASY", "NEW", "HARD")
    first = watched.Samples(step=0, when="before", samples=before, seconds=0.1)
    last = watched.Samples(step=4, when="after", samples=after, seconds=0.1)

    run = run_of(tmp_path / "x", first, step(1), last)
    cards = str(samples(run, ChartRegistry())).split("new ")
    assert "old EASY" in cards[0]
    assert "old" not in cards[1]
    assert "old HARD" in cards[2]


def story_with(**values: Any) -> list[Any]:
    """Return the events of a run whose rollouts have these values."""
    events = story(4)
    for place, event in enumerate(events):
        if isinstance(event, Rollout):
            events[place] = dataclasses.replace(event, **values)

    return events


@pytest.mark.parametrize(("kind", "told"), [("grpo", True), ("ppo", False)])
def test_groups_that_never_differ_are_a_matter_of_grpo(
    tmp_path: Path, kind: str, told: bool
) -> None:
    run = RunFacts(write_run(tmp_path / "x", events=story_with(groups_differ=0.0)))
    run.config["algorithm.kind"] = kind
    assert ("nothing was learned" in page.page([run])) == told


def test_rollouts_without_any_reward_are_counted(tmp_path: Path) -> None:
    events = story_with(reward=None, reward_std=None, groups_differ=None, trained=False)
    text = page_of(write_run(tmp_path / "x", events=events))
    assert "no episode got a reward in 1 of 1 rollouts" in text
    assert "never differed" not in text


def test_an_episode_with_an_environment_is_shown_turn_by_turn(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    long_call = {"function": {"name": "add", "arguments": '{"a": 1'}}
    first = {"role": "assistant", "content": "", "tool_calls": [call], "unread_calls": ["no JSON"]}
    second = {"role": "assistant", "content": HOSTILE, "tool_calls": [long_call]}
    turns = [
        {"role": "user", "content": "1 + 2?"},
        {**first, "reward": 0.25, "tool_errors": 1},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "unknown", "content": "error: no JSON"},
        {**second, "reward": None, "tool_errors": 0},
    ]
    episode = {
        "prompt": "p",
        "text": "t",
        "reward": None,
        "domain": "a",
        "ended": False,
        "tokens": 3,
        "messages": turns,
        "failure": "timed out",
    }
    events = [start(2), watched.Completions(step=1, completions=[episode])]
    run = RunFacts(write_run(tmp_path / "x", events=events))
    shown = rollouts(run, ChartRegistry())
    assert shown is not None
    (card,) = shown.episodes
    assert card.texts[1:] == [
        ("user", "1 + 2?", ""),
        (
            "assistant, turn 1 · reward 0.25",
            'calls add {"a": 1}\ncalls in a way that cannot be read: no JSON',
            "model",
        ),
        ("tool add", "3", ""),
        ("tool unknown", "error: no JSON", "error"),
        ("assistant, turn 2", f'{HOSTILE}\ncalls add {{"a": 1', "model"),
        ("the environment failed", "timed out", "error"),
    ]
    assert card.marks == ("environment", "tool", "unrewarded", "cut")
    assert shown.filters["tool"] == "a call of a tool failed (1)"


def test_an_episode_of_an_older_run_has_no_turns_that_are_counted(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    episode = {"reward": 1.0, "domain": "a", "ended": True, "tokens": 3, "messages": messages}
    events = [start(2), watched.Completions(step=1, completions=[episode])]
    shown = rollouts(RunFacts(write_run(tmp_path / "x", events=events)), ChartRegistry())
    assert shown is not None
    (card,) = shown.episodes
    assert card.texts[1:] == [("user", "?", ""), ("assistant", "!", "")]
    assert (card.marks, shown.filters) == ((), {})


def test_sets_of_evaluation_share_a_chart(tmp_path: Path) -> None:
    scores = {"loss": 1.0, "easy/loss": 0.5, "hard/loss": 1.5, "mmlu/acc": 0.2}
    evaluation = Eval(step=1, samples=6, seconds=0.1, metrics=scores)
    run = run_of(tmp_path / "x", step(1), evaluation)

    found = {}
    for chart in charts([run], ["x"]):
        found[chart["title"]] = [each["name"] for each in chart["series"]]

    assert found["held out: loss"] == ["all sets", "easy", "hard"]
    assert found["held out: mmlu/acc"] == ["x"]
    assert "held out: easy/loss" not in found


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.parametrize(
    "column",
    [
        [Keyed("59 s", 59), Keyed("2:03", 123), Keyed("30:00", 1800), Keyed("1:02:03", 3723)],
        [
            Keyed("12.00 KiB", 12 * 2**10),
            Keyed("900.00 MiB", 900 * 2**20),
            Keyed("1.20 GiB", 1.2 * 2**30),
        ],
        [
            Keyed("loss 5.3 → 0.4", 0.4),
            Keyed("loss 5.2 → 1.3", 1.3),
            Keyed("loss 5.1 → 2.9", 2.9),
            None,
            "loss 5 → no number",
        ],
        ["-1", 0, "1e-05", "0.5", 12, "1,234", "10,234", "[1e-5, 2]", "cosine", "linear"],
        ["run-2", "run-10"],
    ],
)
def test_a_table_is_sorted_by_numbers(column: list[object]) -> None:
    source = '{% from "report/templates/macros.html.jinja" import table %}{{ table(made) }}'
    made = table(["x"], [[each] for each in column])
    html = html_environment().from_string(source).render(made=made)

    cells = []
    for attributes, shown in re.findall(r"<td(.*?)>(.*?)</td>", html):
        text = re.sub("<.*?>", "", shown)
        key = re.search(r'data-key="(.*?)"', attributes)
        dataset = {"key": key[1]} if key else {}
        cells.append({"dataset": dataset, "textContent": text})

    source = page.asset("page.js")
    code = source[source.index("function numberOf") : source.index("function makeSortable")]
    code += f"const cells = {json.dumps(cells)};"
    code += "const text = (cell) => cell.textContent;"
    code += "const shown = (those) => JSON.stringify(those.sort(compareCells).map(text));"
    code += "console.log(shown([...cells].reverse())); console.log(shown([...cells]))"
    out = subprocess.run(["node", "-e", code], capture_output=True, check=True)
    backwards, forwards = map(json.loads, out.stdout.splitlines())
    texts = [cell["textContent"] for cell in cells]
    assert backwards == texts
    assert forwards == texts


def test_defaults_are_not_said_of_a_config_that_cannot_be_read_here(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shown = configuration([RunFacts(run)], ["run"])
    assert shown.choices[0].label.startswith("not default (")

    plan = json.loads((run / "plan.json").read_text())
    plan["config"]["launch"] = {"kind": "of a package that is not installed"}
    (run / "plan.json").write_text(json.dumps(plan))
    shown = configuration([RunFacts(run)], ["run"])
    (choice,) = shown.choices
    assert choice.label == f"all ({len(shown.rows)})"

    for row in shown.rows:
        assert not row.title
