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
from typing import Any

import pytest
import yaml
from rich.console import Console

from drumline.config.load import load, load_text
from drumline.errors import PlanError
from drumline.hardware.detect import Device, Machine
from drumline.planner.cluster import cluster_of
from drumline.planner.question import Flags, ask, load_with_flags
from drumline.planner.report.table import CATEGORIES
from drumline.planner.search.answer import Answer
from drumline.planner.search.search import search
from drumline.report.bars import line_if_slow
from tests.harness import ROOT, write_config
from tests.unit.conftest import Run

EIGHT_B = ["--model", "llama-3.1-8b", "--cluster", "4x4090", "--length", "4096"]
LORA = [*EIGHT_B, "--adapter", "lora"]
TOO_LARGE = ["--model", "llama-2-13b", "--cluster", "1xt4", "--length", "4096"]
SMALL = "model.shape={layers: 2, hidden: 256, heads: 4, vocabulary: 1024}"


@pytest.mark.slow
def test_hours_and_cost_of_a_run(run: Run) -> None:
    _, out, _ = run("plan", *LORA, "--price", "0.5", "--tokens", "1e8", "--json")
    best = json.loads(out)["ranked"][0]
    assert best["hours"] == pytest.approx(
        (1e8 / best["tokens_per_s"] + best["startup_seconds"]) / 3600
    )
    assert best["cost"] == pytest.approx(best["hours"] * 4 * 0.5)


@pytest.mark.slow
def test_what_is_printed_can_be_acted_on(run: Run, model: Path, tmp_path: Path) -> None:
    """The YAML of a plan by flags is read back to the plan's own strategy and batch, for the same cluster."""
    _, out, _ = run("plan", *EIGHT_B)
    said = yaml.safe_load(out.partition("writes it):\n")[2])
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(said))
    config = load(path, []).config
    first = json.loads(run("plan", *EIGHT_B, "--json")[1])["ranked"][0]
    assert config.strategy.model_dump(mode="json") == first["strategy"]
    assert (config.batch.global_samples, config.batch.micro_batch) == (
        first["global_samples"],
        first["micro_batch"],
    )
    assert config.cluster is not None and (config.cluster.device, config.cluster.per_node) == (
        "4090",
        4,
    )
    again = json.loads(run("plan", path, "--json")[1])
    assert first["name"] in [c["name"] for c in again["ranked"]]


def test_a_yaml_gets_the_command_that_trains_it(run: Run, model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, launch={"nproc": 2})
    code, out, _ = run("plan", config)
    assert code == 0 and "2 × cpu" in out
    command = re.search(r"^  drumline (train .*)$", out, re.M)
    assert command is not None
    code, out, _ = run(*shlex.split(command[1]), "--dry-run")
    assert (
        code == 0
        and out.startswith("# ")
        and "max_grad_norm" not in out
        and len(out.splitlines()) < 64
    )
    _, full, _ = run(*shlex.split(command[1]), "--dry-run", "--all")
    assert "max_grad_norm: 1.0" in full and load_text(full, []) == load_text(out, []), (
        "what is left out are defaults"
    )


def test_the_command_says_what_was_said_beside_the_yaml(
    run: Run, model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, model)
    _, out, _ = run(
        "plan", config, "--adapter", "lora", "strategy=ddp", "data.max_length=48", "launch.nproc=2"
    )
    command = re.search(r"^  drumline train (.*)$", out, re.M)
    assert command is not None
    words = shlex.split(command[1])
    assert words[:4] == [str(config), "adapter=lora", "data.max_length=48", "launch.nproc=2"]
    assert [word for word in words if word.startswith("strategy")] == ["strategy=ddp"]


@pytest.mark.slow
def test_the_yaml_keeps_what_no_plan_decides(run: Run) -> None:
    _, out, _ = run("plan", *LORA, "compile.enabled=true", "memory.on_oom=replan")
    said = yaml.safe_load(out.partition("writes it):\n")[2])
    assert said["compile"] == {"enabled": True} and said["memory"]["on_oom"] == "replan"


def test_the_first_word_may_be_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with slashes in it, and one too long for a file's name; a file of such a name is a YAML all the same."""
    for said in (
        "model.id=Qwen/Qwen3-4B",
        "model.config={" + ", ".join(f"key_{i}: 1" for i in range(60)) + "}",
    ):
        assert (
            load_with_flags(Path(said), ["model.init=random"], Flags()).config.model.init
            == "random"
        )
    monkeypatch.chdir(tmp_path)
    Path("lr=1.yaml").write_text("data: {train: [{kind: file, path: rows.jsonl}], max_length: 77}")
    assert load_with_flags(Path("lr=1.yaml"), [], Flags()).config.data.max_length == 77


def test_a_run_on_the_processor_of_a_host_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([Device("NVIDIA A100-SXM4-80GB", 85 * 10**9)], 8, 2**36, "cuda", True)
    monkeypatch.setattr("drumline.planner.question.detect", lambda: machine)
    for said in ("cluster={price_per_device_hour: 1}", "cluster=2xcpu", "run.seed=1"):
        config = load_with_flags(None, ["run.device=cpu", said], Flags(model="gpt2"))
        assert ask(config, lambda *_: None).question.cluster.device.kind == "cpu"
    with pytest.raises(
        PlanError, match="is cpu, and the cluster to plan for is of 4090 — take one of the two out"
    ):
        ask(
            load_with_flags(None, ["run.device=cpu", "cluster=4x4090"], Flags(model="gpt2")),
            lambda *_: None,
        )


def test_prepared_data_give_their_lengths(run: Run, model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, data={"packing": False}, run={"steps": None})
    before = json.loads(run("plan", config, "--json")[1])
    assert before["task"]["data"] is None and before["ranked"][0]["hours"] is None
    assert run("prepare", config)[0] == 0
    after = json.loads(run("plan", config, "--json")[1])
    data, best = after["task"]["data"], after["ranked"][0]
    assert data["train_samples"] == 40 and best["steps"] == 10
    assert (
        best["tokens_per_step"] == pytest.approx(4 * data["train_tokens"] / 40)
        and best["tokens_per_step"] < 4 * 96
    )


def test_flags_are_laid_over_a_yaml_and_overrides_over_flags(model: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, model)
    config = load_with_flags(
        path,
        ["data.max_length=48"],
        Flags(cluster="2x8xh100-80g", length=64, adapter="qlora", batch=32, price=2.0),
    ).config
    assert (
        config.data.max_length == 48
        and config.batch.global_samples == 32
        and config.adapter.kind == "lora"
    )
    assert config.cluster is not None and (
        config.cluster.nodes,
        config.cluster.price_per_device_hour,
    ) == (2, 2.0)


@pytest.mark.slow
def test_a_model_of_images_alone_is_planned_as_one(run: Run) -> None:
    code, out, err = run("plan", "--model", "resnet-50", "--cluster", "4x4090")
    assert code == 0 and "modality: image" in out, err
    assert (
        "no causal language model"
        in run("plan", "--model", "resnet-50", "--cluster", "4x4090", "--algorithm", "sft")[2]
    )


# ------------------------------------------------------------------------------------------------------ other questions


@pytest.mark.slow
def test_every_key_of_the_json_is_documented(run: Run) -> None:
    text = (ROOT / "docs" / "reference" / "plan.md").read_text()
    known = set(re.findall(r"`([a-z_0-9]+)`", text))

    def keys(value: Any, place: str = "") -> set[str]:
        if isinstance(value, list):
            return set().union(*(keys(inner, place) for inner in value))
        if not isinstance(value, dict) or place in ("strategy", "config", "flops", "roles", "data"):
            return set()
        return set(value).union(*(keys(inner, key) for key, inner in value.items()))

    made = json.loads(run("plan", *LORA, "--json")[1])
    made |= json.loads(run("plan", *EIGHT_B, "--max-seq", "--json")[1])
    made |= json.loads(run("plan", *EIGHT_B, "--max-batch", "--json")[1])
    made |= json.loads(run("plan", *EIGHT_B, "--what-if", "nodes=1,2", "--json")[1])
    made |= json.loads(run("plan", "--devices", "--json")[1])
    assert {"h100-80g", "4090"} <= {device["device"] for device in made["devices"]}
    assert made["version"] == 1 and keys(made) - known == set()


@pytest.mark.slow
def test_explain_says_where_numbers_come_from(run: Run) -> None:
    answer = json.loads(run("plan", *EIGHT_B, "--json")[1])
    first, zero2 = answer["ranked"][0], next(r for r in answer["refused"] if r["name"] == "zero2")
    code, out, _ = run("plan", *EIGHT_B, "--explain", first["name"])
    assert code == 0 and out == run("plan", *EIGHT_B, "--explain", "1")[1]
    for part in (
        "What runs",
        "Memory of the fullest device",
        "Seconds of a step",
        "tokens/s of all devices",
        "MFU",
    ):
        assert part in out
    for name, bytes_ in first["memory"].items():
        if name in ("parameters", "gradients", "optimizer", "activations", "peak"):
            assert f"{bytes_ / 1e9:.2f}" in out, name
    _, out, _ = run("plan", *EIGHT_B, "--explain", "zero2")
    assert json.loads(run("plan", *EIGHT_B, "--explain", "1", "--json")[1]) == first
    assert zero2["reason"] in out and "8.03B" in out and "deepspeed" in out


@pytest.mark.slow
def test_explain_counts_gradients_that_are_there_and_models_that_are_held(run: Run) -> None:
    flags = ["--model", "gpt2-xl", "--cluster", "8xa100-40g", "--length", "1024", "compile=false"]
    _, out, _ = run("plan", *flags, "--explain", "zero1")
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "peak")
    amount = {name: float(re.search(rf"\n  {name} +(\S+)", out)[1]) for name in names}  # type: ignore[index]
    there = float(re.search(r"; (\S+) of them are there at the peak", out)[1])  # type: ignore[index]
    parts = sum(amount[name] for name in names if name not in ("gradients", "peak"))
    assert there < amount["gradients"] and parts + there == pytest.approx(amount["peak"], abs=0.05)
    assert "grads: all, some of which come after it" in run("plan", *flags, "--all")[1]
    ppo = [
        "algorithm={kind: ppo, value: head, rewards: [{kind: length, free: 32, limit: 64}]}",
        "strategy=fsdp2",
    ]
    _, out, _ = run(
        "plan", "--model", "llama-3.1-8b", "--cluster", "8xh100-80g", *ppo, "--explain", "1"
    )
    assert "0.38 bytes for each of 16.06B parameters" in out and "reference 8.03B" in out


@pytest.mark.slow
def test_the_most_that_fits(run: Run) -> None:
    found = json.loads(run("plan", *EIGHT_B, "--max-seq", "--json")[1])["max_length"]
    assert found and found == sorted(found, key=lambda each: -each["number"])
    assert all(
        each["number"] % 64 == 0 and each["candidate"]["verdict"] == "fits" for each in found
    )
    _, out, _ = run("plan", *EIGHT_B, "--max-seq", columns=80)
    assert f"data.max_length={found[0]['number']}" in out and "…" not in out
    batch = json.loads(run("plan", *EIGHT_B, "--max-batch", "--json")[1])["max_batch"]
    assert batch[0]["candidate"]["micro_batch"] == batch[0]["number"]


@pytest.mark.slow
@pytest.mark.full
def test_what_if(run: Run) -> None:
    rows = json.loads(run("plan", *EIGHT_B, "--what-if", "nodes=1,2,4", "--json")[1])["what_if"]
    assert [(row["nodes"], row["devices"]) for row in rows] == [(1, 4), (2, 8), (4, 16)]
    speeds = [row["best"]["tokens_per_s"] for row in rows]
    _, out, _ = run("plan", *EIGHT_B, "--what-if", "nodes=1,2,4", columns=80)
    assert f"{speeds[-1]:,.0f}" in out and f"{speeds[-1] / speeds[0]:.2f}" in out and "…" not in out


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
        assert run("plan", SMALL, "--cluster", "1x4090", *flags)[0] == 0
    assert phases == [
        "comparing plans",
        "looking for the longest rows of the best plans",
        "comparing plans",
        "comparing plans",
    ]
    monkeypatch.setattr("drumline.planner.init.line_if_slow", noted)
    flags = ["--cluster", "1x4090", "--length", "512", "--yes"]
    assert run("init", tmp_path / "new.yaml", "--model", "qwen3-0.6b", *flags)[0] == 0
    assert phases[4:] == ["comparing plans"]


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
    assert code == 0 and "Comparing plans\n" in err


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
    assert code == 2 and what in error
    assert (
        "2x8xh100-80g for two hosts of eight" in error
        and "per_node" not in error
        and "cluster.devices" not in error
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cluster", "2x4x4090"], True),
        (["--cluster", "2x4x4090", "cluster.inter=400Gb"], False),
        (["--cluster", "4x4090"], False),
        (["--cluster", "4x4090", "--what-if", "nodes=1,2"], True),
        (["--cluster", "2x4x4090", "--what-if", "nodes=2,4"], True),
    ],
    ids=["hosts", "said", "one host", "what if", "what if of hosts"],
)
@pytest.mark.slow
def test_a_network_that_was_assumed_is_told_once(run: Run, flags: list[str], told: bool) -> None:
    code, _, err = run("plan", SMALL, *flags)
    assert (
        code == 0 and err.count("cluster.inter is not set: 100Gb between hosts is assumed") == told
    )


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
    described = load_text(
        f"data: {{train: [{{kind: file, path: a}}]}}\ncluster: {cluster}\n", [], "c.yaml"
    ).cluster
    planned = cluster_of(described, Machine([], 2, 2**33, "cpu", False), 1)
    notes = [note for note in planned.notes if "cluster.inter" in note]
    assert planned.inter.name == (network or "100Gb")
    assert len(notes) == bool(network) and all(f"{network} between hosts" in note for note in notes)
    assert all(
        ("as hosts of eight such devices have" in note) == (network != "100Gb") for note in notes
    )


def test_the_catalog(run: Run) -> None:
    code, out, _ = run("plan", "--devices", columns=80)
    assert code == 0 and "datasheet" in out
    for name in ("a100-40g", "h100-80g", "b200", "4090", "mi300x", "nvlink4", "pcie5"):
        assert name in out


# ------------------------------------------------------------------------------------------------------------ the figure


def texts_that_meet(figure: Any) -> list[tuple[str, str]]:
    """Pairs of texts of a figure whose boxes overlap by more than a pixel or two."""
    from matplotlib.text import Text

    figure.canvas.draw()
    beyond = set()  # labels of ticks outside of what is seen
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        beyond |= {
            label
            for tick in ticks
            for label in (tick.label1, tick.label2)
            if not low <= tick.get_loc() <= high
        }
    shown = [
        t
        for t in figure.findobj(Text)
        if t.get_text().strip() and t.get_visible() and t not in beyond
    ]
    # Of a name without the line to its point.
    boxes = [(t.get_text(), Text.get_window_extent(t).shrunk(0.96, 0.8)) for t in shown]
    return [
        (a, b)
        for i, (a, first) in enumerate(boxes)
        for b, second in boxes[i + 1 :]
        if first.overlaps(second)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*LORA, "data.max_length=2048"], id="4090s", marks=pytest.mark.full),
        pytest.param([*EIGHT_B[:2], "--cluster", "8xh100-80g"], id="h100s", marks=pytest.mark.full),
        pytest.param([*EIGHT_B[:2], "--cluster", "2x4xh100-80g"], id="hosts"),
    ],
)
def test_the_figure_is_readable(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs `pip install matplotlib`")
    from drumline.planner.report import picture

    answer = searched(flags)
    shown = picture.select_candidates(answer)
    assert shown.fit and shown.refused
    figure = picture.make_figure(answer, shown)
    assert texts_that_meet(figure) == []
    said = {
        text.get_text() for axes in figure.axes for text in [*axes.get_yticklabels(), *axes.texts]
    }
    assert {c.name for c in (*shown.fit, *shown.refused)} <= said
    for candidate in (*shown.fit, *shown.refused):
        drawn = sum(picture.peak_gb(candidate, part) for part in (*CATEGORIES, picture.RESERVE))
        assert drawn == pytest.approx(candidate.estimate.memory.reserved / 1e9, rel=0.02), (
            candidate.name
        )
    slowest, drawn_to = (
        min(c.estimate.tokens_per_s for c in shown.fit),
        figure.axes[1].get_ylim()[1],
    )
    assert 1e6 / drawn_to > slowest / (2 * picture.MOST_TIMES_SLOWER), (
        "what does not fit and is far slower presses nothing together"
    )
    front = picture.pareto(shown.fit)
    assert all(
        a.estimate.memory.reserved < b.estimate.memory.reserved
        for a, b in itertools.pairwise(front)
    )
    for name in ("plan.png", "plan.svg", "plan.html"):
        picture.draw(answer, tmp_path / name)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        tmp_path / "plan.svg"
    ).read_text()
    html = (tmp_path / "plan.html").read_text()
    assert "<svg" in html and "<script" not in html and not re.search(r"(src|href)=.http", html)
    assert all(c.name in html for c in answer.ranked) and all(
        r.reason.split(" — ")[0].replace(">", "&gt;") in html for r in answer.refused
    )


def searched(flags: list[str]) -> Answer:
    names, overrides = (
        {"--model": "model", "--cluster": "cluster", "--length": "length", "--adapter": "adapter"},
        list(flags),
    )
    said: dict[str, Any] = {}
    while overrides and overrides[0] in names:
        key, value = overrides.pop(0), overrides.pop(0)
        said[names[key]] = int(value) if key == "--length" else value
    return search(ask(load_with_flags(None, overrides, Flags(**said)), lambda *_: None).question)


def test_a_figure_needs_matplotlib(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("plan", SMALL, "--cluster", "4x4090", "--figure", tmp_path / "x.png")
    assert code == 2 and "pip install matplotlib" in err and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ bad input

BAD: dict[str, tuple[list[str], list[str]]] = {
    "nothing said": ([], ["drumline plan --model llama-3.1-8b --cluster 4x4090"]),
    "unknown device": (["--model", "gpt2", "--cluster", "4x4091"], ["--cluster 4x4091", "4090"]),
    "impossible cluster": (["--model", "gpt2", "--cluster", "300x4090"], ["--cluster 300x4090", "no host holds 300 GPUs"]),
    "more in a host than there are": (["--model", "gpt2", "--cluster", "64xa100-80g"], ["no host holds 64 GPUs", "2x8xh100-80g"]),
    "more hosts than there are": (["--model", "gpt2", "--cluster", "99999999x8xa100-80g"], ["--cluster 99999999x8xa100-80g", "32768"]),
    "empty cluster": (["--model", "gpt2", "--cluster", ""], ["--cluster", "is empty", "8xh100-80g"]),
    "endless run": (["--model", "gpt2", "--tokens", "inf"], ["--tokens", "a finite number is wanted"]),
    "no devices": (["--model", "gpt2", "--cluster", "0x4090"], ["--cluster 0x4090"]),
    "link that a device lacks": (
        ["--model", "gpt2", "cluster={device: 4090, per_node: 4, intra: nvlink4}"], ["4090 has no nvlink4", "pcie4"],
    ),
    "unknown model": (["--model", "lama-3.1-8b"], ["lama-3.1-8b", "did you mean llama-3.1-8b", "model.shape={layers: 32"]),
    "no such folder": (["--model", "/no/such"], ["/no/such", "no such file or folder"]),
    "shape that does not divide": (
        ["model.shape={layers: 2, hidden: 30, heads: 4, vocabulary: 64}"], ["model.shape", "no multiple of heads"],
    ),
    "shape and id": (["--model", "gpt2", SMALL], ["not both"]),
    "too long for the model": (["--model", "gpt2", "--length", "4096"], ["4096", "1024 positions"]),
    "unknown adapter": (["--model", "gpt2", "--adapter", "lroa"], ["--adapter", "lora"]),
    "unknown algorithm": (["--model", "gpt2", "--algorithm", "sfx"], ["--algorithm sfx", "did you mean 'sft'"]),
    "unknown candidate": ([*EIGHT_B, "--explain", "fsdp3"], ["--explain", "'fsdp3'", "did you mean 'fsdp2"]),
    "unknown question": (["--model", "gpt2", "--what-if", "devices=2"], ["--what-if", "nodes=2,4,8"]),
    "a number of another script": (["--model", "gpt2", "--what-if", "nodes=²"], ["--what-if", "nodes=2,4,8"]),
    "what if, with all there are": (["--model", "gpt2", "--what-if", "nodes=1,99999999999"], ["--what-if", "99999999999 hosts", "at most"]),
    "two questions": (["--model", "gpt2", "--max-seq", "--max-batch"], ["one at a time"]),
    "a question and a picture": (["--model", "gpt2", "--what-if", "nodes=2", "--trace"], ["--what-if and --trace", "one at a time"]),
    "picture of no kind": ([*EIGHT_B, "--figure", "x.bmp"], ["--figure x.bmp", ".png"]),
    "a digit that is no number": (["--model", "gpt2", "--what-if", "nodes=²"], ["--what-if", "nodes=2,4,8"]),
    "a row that is no number": ([*EIGHT_B, "--explain", "²"], ["--explain", "no candidate"]),
    "no name of the hub": (["--model", "my dir/lama"], ["my dir/lama", "no such folder"]),
    "endless memory": (
        ["--model", "gpt2", "cluster={device: x, devices: {x: {memory_gb: .inf, bandwidth_gb_s: 8, fp32_tflops: 3}}}"],
        ["memory_gb", "finite number"],
    ),
    "a file that cannot be named": (
        ["--model", "gpt2", "cluster={device: cpu, calibration: " + 300 * "x" + "}"], ["336 characters is too long", "shorten it"],
    ),
    "no such YAML": (["none.yaml"], ["none.yaml", "no such file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line(run: Run, case: str) -> None:
    arguments, says = BAD[case]
    code, _, err = run("plan", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in err, err
    for words in says:
        assert words in lines[0], lines[0]


@pytest.mark.slow
def test_nothing_fits_says_what_would(run: Run) -> None:
    code, out, err = run("plan", *TOO_LARGE, "--json")
    answer = json.loads(out)
    assert code == 2 and not answer["ranked"] and answer["changes"]
    assert err.startswith("error: ") or "\nerror: " in err
    for words in ("nothing fits", "15.6 GB", "it would with", answer["changes"][0]["what"]):
        assert words in err
    assert all(change["candidate"]["verdict"] != "no" for change in answer["changes"])


def test_qlora_of_a_shape_is_planned(run: Run) -> None:
    code, out, err = run("plan", SMALL, "--adapter", "qlora", "--cluster", "1x4090", "--length", 64)
    assert code == 0 and "single" in out, err
