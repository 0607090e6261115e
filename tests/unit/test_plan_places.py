"""Devices and links as the YAML names them reach the planner: a Mac's GPU, and a link of one's own."""

from __future__ import annotations

from pathlib import Path

from drumline.config.load import load
from drumline.planner.question import build_request
from drumline.planner.search.search import search
from tests.harness import write_config
from tests.tiny import tiny_model_dir


def test_a_mac_s_gpu_is_planned(tmp_path: Path) -> None:
    loaded = load(
        write_config(tmp_path, tiny_model_dir(tmp_path / "model"), strategy="auto"),
        ["run.device=mps", "cluster=1xcpu"],
    )
    assert search(build_request(loaded, lambda *_: None).question).ranked


def test_a_host_link_may_be_one_s_own(tmp_path: Path) -> None:
    own = {"memory_gb": 48, "bandwidth_gb_s": 900, "fp32_tflops": 40, "host_link": "fast"}
    cluster = {"links": {"fast": {"gb_s": 50}}, "devices": {"x": own}, "device": "x"}
    loaded = load(
        write_config(tmp_path, tiny_model_dir(tmp_path / "model"), cluster=cluster),
        ["run.device=auto"],
    )
    assert build_request(loaded, lambda *_: None).question.cluster.device.host_link == "fast"
