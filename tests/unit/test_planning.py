"""`drumline plan` and `drumline init` as a user types them: tables that fit the terminal, documented JSON, one line for a mistake."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from rich.console import Console

from drumline.config.load import load, load_text
from drumline.errors import PlanError
from drumline.hardware.detect import Device, Machine
from drumline.planner.cluster import cluster_of
from drumline.planner.question import Flags, build_request, load_with_flags
from drumline.planner.report import picture
from drumline.planner.report.table import CATEGORIES
from drumline.planner.search.answer import Answer, Question
from drumline.planner.search.search import search
from drumline.report.bars import line_if_slow
from tests.harness import ROOT, write_config
from tests.unit.conftest import Run

EIGHT_B = ["--model", "llama-3.1-8b", "--cluster", "4x4090", "--length", "4096"]
LORA = [*EIGHT_B, "--adapter", "lora"]
TOO_LARGE = ["--model", "llama-2-13b", "--cluster", "1xt4", "--length", "4096"]
SMALL = "model.shape={layers: 2, hidden: 256, heads: 4, vocabulary: 1024}"


def plan_as_json(run: Run, *arguments: object) -> Any:
    """Return what `drumline plan --json` prints."""
    _, out, _ = run("plan", *arguments, "--json")
    return json.loads(out)


def printed_yaml(run: Run, *arguments: object) -> Any:
    """Return the YAML at the end of what `drumline plan` prints."""
    _, out, _ = run("plan", *arguments)
    _, _, text = out.partition("writes it):\n")
    return yaml.safe_load(text)


def printed_train_command(out: str) -> list[str]:
    """Return the words of the printed command, from `train` on."""
    command = re.search(r"^  drumline (train .*)$", out, re.M)
    assert command is not None
    return shlex.split(command[1])


def ignore_progress(*_: object) -> None:
    """Stand in for the function that `build_request` reports its progress to."""


@pytest.mark.slow
def test_hours_and_cost_of_a_run(run: Run) -> None:
    answer = plan_as_json(run, *LORA, "--price", "0.5", "--tokens", "1e8")
    best = answer["ranked"][0]
    seconds = 1e8 / best["tokens_per_s"] + best["startup_seconds"]

    assert best["hours"] == pytest.approx(seconds / 3600)
    assert best["cost"] == pytest.approx(best["hours"] * 4 * 0.5)


@pytest.mark.slow
def test_what_is_printed_can_be_acted_on(run: Run, model: Path, tmp_path: Path) -> None:
    """The YAML of a plan by flags is read back to the plan's own strategy and batch, for the same cluster."""
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(printed_yaml(run, *EIGHT_B)))
    config = load(path, []).config
    first = plan_as_json(run, *EIGHT_B)["ranked"][0]

    assert config.strategy.model_dump(mode="json") == first["strategy"]
    assert config.batch.global_samples == first["global_samples"]
    assert config.batch.micro_batch == first["micro_batch"]
    assert config.cluster is not None
    assert config.cluster.device == "4090"
    assert config.cluster.per_node == 4

    again = plan_as_json(run, path)
    assert first["name"] in [candidate["name"] for candidate in again["ranked"]]


def test_a_yaml_gets_the_command_that_trains_it(run: Run, model: Path, tmp_path: Path) -> None:
    """Its dry run prints the keys that are no defaults; with --all it prints them all."""
    config = write_config(tmp_path, model, launch={"nproc": 2})
    code, out, _ = run("plan", config)

    assert code == 0
    assert "2 × cpu" in out

    command = printed_train_command(out)
    code, out, _ = run(*command, "--dry-run")

    assert code == 0
    assert out.startswith("# ")
    assert "max_grad_norm" not in out
    assert len(out.splitlines()) < 64

    _, full, _ = run(*command, "--dry-run", "--all")
    assert "max_grad_norm: 1.0" in full
    assert load_text(full, []) == load_text(out, [])


def test_the_command_says_what_was_said_beside_the_yaml(
    run: Run, model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, model)
    overrides = ["strategy=ddp", "data.max_length=48", "launch.nproc=2"]
    _, out, _ = run("plan", config, "--adapter", "lora", *overrides)
    _, *words = printed_train_command(out)

    assert words[:4] == [str(config), "adapter=lora", "data.max_length=48", "launch.nproc=2"]
    assert [word for word in words if word.startswith("strategy")] == ["strategy=ddp"]


@pytest.mark.slow
def test_the_yaml_keeps_what_no_plan_decides(run: Run) -> None:
    said = printed_yaml(run, *LORA, "compile.enabled=true", "memory.on_oom=replan")
    assert said["compile"] == {"enabled": True}
    assert said["memory"]["on_oom"] == "replan"


def test_the_first_word_may_be_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with slashes in it, and one too long for a file's name; a file of such a name is a YAML all the same."""
    keys = ", ".join(f"key_{number}: 1" for number in range(60))

    for said in ("model.id=Qwen/Qwen3-4B", f"model.config={{{keys}}}"):
        config = load_with_flags(Path(said), ["model.init=random"], Flags()).config
        assert config.model.init == "random"

    monkeypatch.chdir(tmp_path)
    path = Path("lr=1.yaml")
    path.write_text("data: {train: [{kind: file, path: rows.jsonl}], max_length: 77}")

    assert load_with_flags(path, [], Flags()).config.data.max_length == 77


def test_a_run_on_the_processor_of_a_host_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([Device("NVIDIA A100-SXM4-80GB", 85 * 10**9)], 8, 2**36, "cuda", True)
    monkeypatch.setattr("drumline.planner.question.detect", lambda: machine)

    def ask_for_processor(said: str) -> Question:
        config = load_with_flags(None, ["run.device=cpu", said], Flags(model="gpt2"))
        return build_request(config, ignore_progress).question

    for said in ("cluster={price_per_device_hour: 1}", "cluster=2xcpu", "run.seed=1"):
        assert ask_for_processor(said).cluster.device.kind == "cpu"

    message = "is cpu, and the cluster to plan for is of 4090 — take one of the two out"
    with pytest.raises(PlanError, match=message):
        ask_for_processor("cluster=4x4090")


def test_prepared_data_give_their_lengths(run: Run, model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, data={"packing": False}, run={"steps": None})
    before = plan_as_json(run, config)

    assert before["task"]["data"] is None
    assert before["ranked"][0]["hours"] is None

    code, _, _ = run("prepare", config)
    assert code == 0

    after = plan_as_json(run, config)
    data = after["task"]["data"]

    assert data["train_samples"] == 40

    best = after["ranked"][0]
    assert best["steps"] == 10
    assert best["tokens_per_step"] == pytest.approx(4 * data["train_tokens"] / 40)
    assert best["tokens_per_step"] < 4 * 96


def test_flags_are_laid_over_a_yaml_and_overrides_over_flags(model: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, model)
    flags = Flags(cluster="2x8xh100-80g", length=64, adapter="qlora", batch=32, price=2.0)
    config = load_with_flags(path, ["data.max_length=48"], flags).config

    assert config.data.max_length == 48
    assert config.batch.global_samples == 32
    assert config.adapter.kind == "lora"
    assert config.cluster is not None
    assert config.cluster.nodes == 2
    assert config.cluster.price_per_device_hour == 2.0


@pytest.mark.slow
def test_a_model_of_images_alone_is_planned_as_one(run: Run) -> None:
    flags = ["--model", "resnet-50", "--cluster", "4x4090"]
    code, out, err = run("plan", *flags)

    assert code == 0, err
    assert "modality: image" in out

    _, _, err = run("plan", *flags, "--algorithm", "sft")
    assert "no causal language model" in err


# ------------------------------------------------------------------------------------------------------ other questions


def keys_of_json(value: Any, place: str = "") -> set[str]:
    """Return all keys of an answer, without those of objects that another page documents."""
    keys: set[str] = set()
    if isinstance(value, list):
        for inner in value:
            keys |= keys_of_json(inner, place)
    elif isinstance(value, dict) and place not in ("strategy", "config", "flops", "roles", "data"):
        for key, inner in value.items():
            keys.add(key)
            keys |= keys_of_json(inner, key)

    return keys


@pytest.mark.slow
def test_every_key_of_the_json_is_documented(run: Run) -> None:
    text = (ROOT / "docs" / "reference" / "plan.md").read_text()
    known = set(re.findall(r"`([a-z_0-9]+)`", text))
    made = plan_as_json(run, *LORA)
    for question in (["--max-seq"], ["--max-batch"], ["--what-if", "nodes=1,2"]):
        made |= plan_as_json(run, *EIGHT_B, *question)

    made |= plan_as_json(run, "--devices")
    devices = {device["device"] for device in made["devices"]}

    assert devices >= {"h100-80g", "4090"}
    assert made["version"] == 1
    assert keys_of_json(made) - known == set()


@pytest.mark.slow
def test_explain_says_where_numbers_come_from(run: Run) -> None:
    answer = plan_as_json(run, *EIGHT_B)
    first = answer["ranked"][0]
    code, out, _ = run("plan", *EIGHT_B, "--explain", first["name"])

    assert code == 0
    assert run("plan", *EIGHT_B, "--explain", "1")[1] == out
    assert plan_as_json(run, *EIGHT_B, "--explain", "1") == first

    headings = ("What runs", "Memory of the fullest device", "Seconds of a step")
    for part in (*headings, "tokens/s of all devices", "MFU"):
        assert part in out

    shown = {"parameters", "gradients", "optimizer", "activations", "peak"}
    for name in shown & first["memory"].keys():
        amount = f"{first['memory'][name] / 1e9:.2f}"
        assert amount in out, name

    _, out, _ = run("plan", *EIGHT_B, "--explain", "zero2")
    reasons = {refused["name"]: refused["reason"] for refused in answer["refused"]}
    for part in (reasons["zero2"], "8.03B", "deepspeed"):
        assert part in out


def gigabytes(pattern: str, text: str) -> float:
    """Return the number that the group of `pattern` matches in `text`."""
    found = re.search(pattern, text)
    assert found is not None
    return float(found[1])


@pytest.mark.slow
def test_explain_counts_gradients_that_are_there_and_models_that_are_held(run: Run) -> None:
    flags = ["--model", "gpt2-xl", "--cluster", "8xa100-40g", "--length", "1024", "compile=false"]
    _, out, _ = run("plan", *flags, "--explain", "zero1")
    at_peak = gigabytes(r"; (\S+) of them are there at the peak", out)

    assert at_peak < gigabytes(r"\n  gradients +(\S+)", out)

    total = at_peak
    for name in ("parameters", "optimizer", "activations", "logits", "buffers"):
        total += gigabytes(rf"\n  {name} +(\S+)", out)

    peak = gigabytes(r"\n  peak +(\S+)", out)
    assert total == pytest.approx(peak, abs=0.05)

    _, out, _ = run("plan", *flags, "--all")
    assert "grads: all, some of which come after it" in out

    flags = ["--model", "llama-3.1-8b", "--cluster", "8xh100-80g", "strategy=fsdp2"]
    ppo = "algorithm={kind: ppo, value: head, rewards: [{kind: length, free: 32, limit: 64}]}"
    _, out, _ = run("plan", *flags, ppo, "--explain", "1")

    assert "0.38 bytes for each of 16.06B parameters" in out
    assert "reference 8.03B" in out


@pytest.mark.slow
def test_the_most_that_fits(run: Run) -> None:
    found = plan_as_json(run, *EIGHT_B, "--max-seq")["max_length"]
    assert found

    lengths = [each["number"] for each in found]
    assert lengths == sorted(lengths, reverse=True)

    for each in found:
        assert each["number"] % 64 == 0
        assert each["candidate"]["verdict"] == "fits"

    _, out, _ = run("plan", *EIGHT_B, "--max-seq", columns=80)
    assert f"data.max_length={lengths[0]}" in out
    assert "…" not in out

    largest = plan_as_json(run, *EIGHT_B, "--max-batch")["max_batch"][0]
    assert largest["candidate"]["micro_batch"] == largest["number"]


@pytest.mark.slow
@pytest.mark.full
def test_what_if(run: Run) -> None:
    question = [*EIGHT_B, "--what-if", "nodes=1,2,4"]
    rows = plan_as_json(run, *question)["what_if"]

    assert [(row["nodes"], row["devices"]) for row in rows] == [(1, 4), (2, 8), (4, 16)]

    slowest = rows[0]["best"]["tokens_per_s"]
    fastest = rows[-1]["best"]["tokens_per_s"]
    _, out, _ = run("plan", *question, columns=80)

    assert f"{fastest:,.0f}" in out
    assert f"{fastest / slowest:.2f}" in out
    assert "…" not in out


@pytest.mark.slow
def test_a_search_that_takes_long_shows_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    with line_if_slow(Console(file=out), "not slow", 1000.0):
        pass

    with line_if_slow(Console(file=out), "slow", 0.0):
        until = time.monotonic() + 60
        while not out.getvalue() and time.monotonic() < until:
            time.sleep(0.001)

    assert out.getvalue() == "Slow …\n"

    phases: list[str] = []

    @contextmanager
    def noted(console: Console, phase: str) -> Iterator[None]:
        phases.append(phase)
        yield

    monkeypatch.setattr("drumline.planner.command.line_if_slow", noted)
    for flags in ([], ["--max-seq"], ["--what-if", "nodes=1"]):
        code, _, _ = run("plan", SMALL, "--cluster", "1x4090", *flags)
        assert code == 0

    longest_rows = "looking for the longest rows of the best plans"

    assert phases == ["comparing plans", longest_rows, "comparing plans", "comparing plans"]

    phases.clear()
    monkeypatch.setattr("drumline.planner.init.line_if_slow", noted)
    flags = ["--model", "qwen3-0.6b", "--cluster", "1x4090", "--length", "512", "--yes"]
    code, _, _ = run("init", tmp_path / "new.yaml", *flags)

    assert code == 0
    assert phases == ["comparing plans"]


def test_training_with_strategy_auto_says_that_a_search_goes_on(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def at_once(tell: Callable[[], None]) -> Iterator[None]:
        tell()
        yield

    monkeypatch.setattr("drumline.train.setup.notify_if_slow", at_once)
    path = write_config(tmp_path, model, strategy="auto")
    code, _, err = run("train", path, "--dry-run")

    assert code == 0
    assert "Comparing plans\n" in err


@pytest.mark.parametrize(
    ("cluster", "what"),
    [
        ("64xh100", "no host holds 64 GPUs — write 8xh100-80g, or"),
        ("8xnope", "no device 'nope' in the catalog — write 8xh100-80g, or"),
        ("h100x8", "did you mean h100-80g or h200? write 8xh100-80g, or"),
        ("0xh100", "0 given, a number greater than 0 is wanted — write 8xh100-80g, or"),
        ("", "is empty — write 8xh100-80g, or"),
        ("{nope: 1}", "unknown key 'nope' — write 8xh100-80g, or"),
    ],
)
def test_a_mistake_in_the_cluster_flag_has_the_form_of_the_flag(
    run: Run, cluster: str, what: str
) -> None:
    code, _, error = run("plan", "--model", "llama-3.1-8b", "--cluster", cluster)
    assert code == 2
    assert what in error
    assert "2x8xh100-80g for two hosts of eight" in error
    assert "per_node" not in error
    assert "cluster.devices" not in error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param("--cluster 2x4x4090", True, id="hosts", marks=pytest.mark.full),
        pytest.param("--cluster 2x4x4090 cluster.inter=400Gb", False, id="said"),
        pytest.param("--cluster 4x4090", False, id="one host", marks=pytest.mark.full),
        pytest.param("--cluster 4x4090 --what-if nodes=1,2", True, id="what if"),
        pytest.param(
            "--cluster 2x4x4090 --what-if nodes=2,4",
            True,
            id="what if of hosts",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.slow
def test_a_network_that_was_assumed_is_told_once(run: Run, flags: str, told: bool) -> None:
    code, _, err = run("plan", SMALL, *flags.split())
    assert code == 0
    assert err.count("cluster.inter is not set: 100Gb between hosts is assumed") == told


@pytest.mark.parametrize(
    ("cluster", "network"),
    [
        ("{device: h100, per_node: 8, nodes: 2}", "8x400Gb"),
        ("{device: a100, per_node: 8, nodes: 2}", "8x200Gb"),
        ("{device: h100, per_node: 4, nodes: 2}", "100Gb"),
        ("{device: h100-pcie, per_node: 8, nodes: 2}", "100Gb"),
        ("{device: 4090, per_node: 8, nodes: 2}", "100Gb"),
        ("{device: h100, per_node: 8, nodes: 2, inter: 100Gb}", ""),
    ],
)
def test_hosts_of_eight_data_centre_gpus_have_the_network_that_they_are_sold_with(
    cluster: str, network: str
) -> None:
    """A note says which network was assumed; `network` is empty if the YAML names one."""
    text = f"data: {{train: [{{kind: file, path: a}}]}}\ncluster: {cluster}\n"
    described = load_text(text, [], "c.yaml").cluster
    planned = cluster_of(described, Machine([], 2, 2**33, "cpu", False), 1)

    assert planned.inter.name == (network or "100Gb")

    notes = [note for note in planned.notes if "cluster.inter" in note]
    assert len(notes) == bool(network)

    for note in notes:
        assert f"{network} between hosts" in note
        assert ("as hosts of eight such devices have" in note) == (network != "100Gb")


def test_the_catalog(run: Run) -> None:
    code, out, _ = run("plan", "--devices", columns=80)
    assert code == 0
    assert "datasheet" in out

    for name in ("a100-40g", "h100-80g", "b200", "4090", "mi300x", "nvlink4", "pcie5"):
        assert name in out


# ------------------------------------------------------------------------------------------------------------ the figure


def labels_out_of_view(figure: Any) -> set[Any]:
    """Return the labels of ticks beyond the ends of their axes."""
    labels = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    labels.update([tick.label1, tick.label2])

    return labels


def texts_that_meet(figure: Any) -> list[tuple[str, str]]:
    """Return pairs of texts of a figure whose boxes overlap by more than a pixel or two."""
    from matplotlib.text import Text

    figure.canvas.draw()
    out_of_view = labels_out_of_view(figure)
    boxes = []
    for text in figure.findobj(Text):
        words = text.get_text()
        if words.strip() and text.get_visible() and text not in out_of_view:
            # Text's own method: the box of a name without the line to its point.
            extent = Text.get_window_extent(text)
            boxes.append((words, extent.shrunk(0.96, 0.8)))

    pairs = []
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        if first.overlaps(second):
            pairs.append((one, other))

    return pairs


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*LORA, "data.max_length=2048"], id="4090s"),
        pytest.param([*EIGHT_B[:2], "--cluster", "8xh100-80g"], id="h100s"),
        pytest.param([*EIGHT_B[:2], "--cluster", "2x4xh100-80g"], id="hosts"),
    ],
)
def test_the_figure_is_readable(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs `pip install matplotlib`")
    answer = search_plans(flags)
    shown = picture.select_candidates(answer)

    assert shown.fit
    assert shown.refused

    figure = picture.make_figure(answer, shown)
    assert texts_that_meet(figure) == []

    said = set()
    for axes in figure.axes:
        for text in [*axes.get_yticklabels(), *axes.texts]:
            said.add(text.get_text())

    for candidate in (*shown.fit, *shown.refused):
        assert candidate.name in said
        drawn = sum(picture.peak_gb(candidate, part) for part in (*CATEGORIES, picture.RESERVE))
        reserved = candidate.estimate.memory.reserved / 1e9
        assert drawn == pytest.approx(reserved, rel=0.02), candidate.name

    slowest = min(candidate.estimate.tokens_per_s for candidate in shown.fit)
    _, drawn_to = figure.axes[1].get_ylim()

    # What does not fit and is far slower presses nothing together.
    assert 1e6 / drawn_to > slowest / (2 * picture.MOST_TIMES_SLOWER)

    for one, other in itertools.pairwise(picture.pareto(shown.fit)):
        assert one.estimate.memory.reserved < other.estimate.memory.reserved

    check_files_of_figure(answer, tmp_path)


def check_files_of_figure(answer: Answer, folder: Path) -> None:
    """Draw a figure in all formats: the page has all names and reasons and loads nothing."""
    png, svg, page = (folder / f"plan.{suffix}" for suffix in ("png", "svg", "html"))
    for path in (png, svg, page):
        picture.draw(answer, path)

    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()

    html = page.read_text()
    assert "<svg" in html
    assert "<script" not in html
    assert not re.search(r"(src|href)=.http", html)

    for candidate in answer.ranked:
        assert candidate.name in html

    for refused in answer.refused:
        reason, _, _ = refused.reason.partition(" — ")
        assert reason.replace(">", "&gt;") in html


def search_plans(flags: list[str]) -> Answer:
    """Return the answer of the search that `drumline plan` does for these flags and overrides."""
    said: dict[str, Any] = {}
    overrides = list(flags)
    while overrides and overrides[0].startswith("--"):
        name = overrides.pop(0).removeprefix("--")
        value = overrides.pop(0)
        said[name] = int(value) if name == "length" else value

    config = load_with_flags(None, overrides, Flags(**said))
    return search(build_request(config, ignore_progress).question)


def test_a_figure_needs_matplotlib(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("plan", SMALL, "--cluster", "4x4090", "--figure", tmp_path / "x.png")

    assert code == 2
    assert "pip install matplotlib" in err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ bad input


class Mistake(NamedTuple):
    """What a user types after `drumline plan`, and words of the error message."""

    typed: str
    says: list[str]


BAD = {
    "nothing said": Mistake(
        typed="",
        says=["drumline plan --model llama-3.1-8b --cluster 4x4090"],
    ),
    "unknown device": Mistake(
        typed="--model gpt2 --cluster 4x4091",
        says=["--cluster 4x4091", "4090"],
    ),
    "impossible cluster": Mistake(
        typed="--model gpt2 --cluster 300x4090",
        says=["--cluster 300x4090", "no host holds 300 GPUs"],
    ),
    "more in a host than there are": Mistake(
        typed="--model gpt2 --cluster 64xa100-80g",
        says=["no host holds 64 GPUs", "2x8xh100-80g"],
    ),
    "more hosts than there are": Mistake(
        typed="--model gpt2 --cluster 99999999x8xa100-80g",
        says=["--cluster 99999999x8xa100-80g", "32768"],
    ),
    "empty cluster": Mistake(
        typed="--model gpt2 --cluster ''",
        says=["--cluster", "is empty", "8xh100-80g"],
    ),
    "endless run": Mistake(
        typed="--model gpt2 --tokens inf",
        says=["--tokens", "a finite number is wanted"],
    ),
    "no devices": Mistake(
        typed="--model gpt2 --cluster 0x4090",
        says=["--cluster 0x4090"],
    ),
    "link that a device lacks": Mistake(
        typed="--model gpt2 'cluster={device: 4090, per_node: 4, intra: nvlink4}'",
        says=["4090 has no nvlink4", "pcie4"],
    ),
    "unknown model": Mistake(
        typed="--model lama-3.1-8b",
        says=["lama-3.1-8b", "did you mean llama-3.1-8b", "model.shape={layers: 32"],
    ),
    "no such folder": Mistake(
        typed="--model /no/such",
        says=["/no/such", "no such file or folder"],
    ),
    "shape that does not divide": Mistake(
        typed="'model.shape={layers: 2, hidden: 30, heads: 4, vocabulary: 64}'",
        says=["model.shape", "no multiple of heads"],
    ),
    "shape and id": Mistake(
        typed=f"--model gpt2 '{SMALL}'",
        says=["not both"],
    ),
    "too long for the model": Mistake(
        typed="--model gpt2 --length 4096",
        says=["4096", "1024 positions"],
    ),
    "unknown adapter": Mistake(
        typed="--model gpt2 --adapter lroa",
        says=["--adapter", "lora"],
    ),
    "unknown algorithm": Mistake(
        typed="--model gpt2 --algorithm sfx",
        says=["--algorithm sfx", "did you mean 'sft'"],
    ),
    "unknown candidate": Mistake(
        typed="--model llama-3.1-8b --cluster 4x4090 --length 4096 --explain fsdp3",
        says=["--explain", "'fsdp3'", "did you mean 'fsdp2"],
    ),
    "unknown question": Mistake(
        typed="--model gpt2 --what-if devices=2",
        says=["--what-if", "nodes=2,4,8"],
    ),
    "a number of another script": Mistake(
        typed="--model gpt2 --what-if nodes=²",
        says=["--what-if", "nodes=2,4,8"],
    ),
    "what if, with all there are": Mistake(
        typed="--model gpt2 --what-if nodes=1,99999999999",
        says=["--what-if", "99999999999 hosts", "at most"],
    ),
    "two questions": Mistake(
        typed="--model gpt2 --max-seq --max-batch",
        says=["one at a time"],
    ),
    "a question and a picture": Mistake(
        typed="--model gpt2 --what-if nodes=2 --trace",
        says=["--what-if and --trace", "one at a time"],
    ),
    "picture of no kind": Mistake(
        typed="--model llama-3.1-8b --cluster 4x4090 --length 4096 --figure x.bmp",
        says=["--figure x.bmp", ".png"],
    ),
    "a row that is no number": Mistake(
        typed="--model llama-3.1-8b --cluster 4x4090 --length 4096 --explain ²",
        says=["--explain", "no candidate"],
    ),
    "no name of the hub": Mistake(
        typed="--model 'my dir/lama'",
        says=["my dir/lama", "no such folder"],
    ),
    "endless memory": Mistake(
        typed=(
            "--model gpt2 'cluster={device: x, devices: "
            "{x: {memory_gb: .inf, bandwidth_gb_s: 8, fp32_tflops: 3}}}'"
        ),
        says=["memory_gb", "finite number"],
    ),
    "a file that cannot be named": Mistake(
        typed=f"--model gpt2 'cluster={{device: cpu, calibration: {300 * 'x'}}}'",
        says=["336 characters is too long", "shorten it"],
    ),
    "no such YAML": Mistake(
        typed="none.yaml",
        says=["none.yaml", "no such file"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line(run: Run, case: str) -> None:
    mistake = BAD[case]
    code, _, err = run("plan", *shlex.split(mistake.typed))

    assert code == 2, err
    assert "Traceback" not in err

    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    for words in mistake.says:
        assert words in line


@pytest.mark.slow
def test_nothing_fits_says_what_would(run: Run) -> None:
    code, out, err = run("plan", *TOO_LARGE, "--json")
    assert code == 2

    answer = json.loads(out)
    assert not answer["ranked"]

    changes = answer["changes"]
    assert changes

    for change in changes:
        assert change["candidate"]["verdict"] != "no"

    assert re.search(r"^error: ", err, re.M)

    for words in ("nothing fits", "15.6 GB", "it would with", changes[0]["what"]):
        assert words in err


@pytest.mark.slow
def test_qlora_of_a_shape_is_planned(run: Run) -> None:
    code, out, err = run("plan", SMALL, "--adapter", "qlora", "--cluster", "1x4090", "--length", 64)
    assert code == 0, err
    assert "single" in out
