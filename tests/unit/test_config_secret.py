"""Secrets in a config: looked up where they are used, held by nothing that is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from drumline.config.load import load, load_text, to_yaml
from drumline.errors import ConfigError
from drumline.system.files import write_whole
from drumline.system.redact import OURS, redact, reveal, withheld, withhold

DATA = "data: {train: [{kind: file, path: x.jsonl}]}\n"
GRPO = DATA + "algorithm: {kind: grpo, rewards: [{kind: function, path: 'm.py:f', options: %s}]}\n"
KEY = OURS + "ALGORITHM_REWARDS_0_OPTIONS_API_KEY"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = dict(os.environ)
    monkeypatch.setattr("drumline.system.redact._kept", set())
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def options(text: str) -> dict[str, Any]:
    return load_text(GRPO % text, []).algorithm.rewards[0].options  # type: ignore[attr-defined]


def test_a_secret_of_the_yaml_is_withheld_and_revealed() -> None:
    given = {
        "api_key": "hunter2hunter2",
        "nested": {"db": "postgres://me:hunter2@db/x"},
        "password": 1234,
        "limit": 3,
        "pad_token": "<p>",
    }
    config = load_text(GRPO % "{}", [f"algorithm.rewards.0.options={given}"])
    written = to_yaml(config)
    assert "hunter2" not in written and "1234" not in written and "hunter2" not in repr(config)
    held = config.algorithm.rewards[0].options  # type: ignore[attr-defined]
    assert (
        held["api_key"] == f"${{env:{KEY}}}" and held["limit"] == 3 and held["pad_token"] == "<p>"
    )
    assert reveal(held, "options") == given and withheld()[KEY] == '"hunter2hunter2"'
    assert (
        redact("no access with hunter2hunter2 or 1234, 12345")
        == "no access with [redacted] or [redacted], 12345"
    )


def test_a_named_variable_is_looked_up_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held = options("{api_key: '${env:MINE}', header: 'Bearer ${env:MINE}'}")
    assert held == {"api_key": "${env:MINE}", "header": "Bearer ${env:MINE}"}
    with pytest.raises(
        ConfigError, match=r"o: the environment variable 'MINE', which 'api_key' names, is not set"
    ):
        reveal(held, "o")
    monkeypatch.setenv("MINE", "open-sesame")
    assert reveal(held, "o") == {"api_key": "open-sesame", "header": "Bearer open-sesame"}
    assert redact("it was open-sesame") == "it was [redacted]"


def test_a_user_may_set_the_variable_of_a_withheld_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run folder's config names it. Its value is then no JSON."""
    monkeypatch.setenv(KEY, "open-sesame")
    assert reveal({"api_key": f"${{env:{KEY}}}"}, "o") == {"api_key": "open-sesame"}


def test_a_run_folders_config_lacks_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    written = to_yaml(load_text(GRPO % "{api_key: hunter2hunter2}", []))
    monkeypatch.delenv(KEY)
    again = load_text(written, [])
    with pytest.raises(
        ConfigError,
        match=r"options: the secret 'api_key' is not kept in the run folder — go on with the YAML that has it",
    ):
        reveal(again.algorithm.rewards[0].options, "options")  # type: ignore[attr-defined]


def test_urls_and_deepspeeds_own_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"comet": {"enabled": true, "api_key": "hunter2hunter2"}}')
    (tmp_path / "c.yaml").write_text(
        DATA + "strategy: {kind: zero2, config: ds.json, options: {wandb: {token: abcdefgh}}}\n"
    )
    written = to_yaml(load(tmp_path / "c.yaml", []).config)
    assert "hunter2" not in written and "abcdefgh" not in written
    vllm = (
        DATA
        + "algorithm: {kind: grpo, generator: {kind: vllm, url: 'http://me:hunter2@host:8000'}}\n"
    )
    url = load_text(vllm, []).algorithm.generator.url  # type: ignore[attr-defined]
    assert (
        url == f"${{env:{OURS}ALGORITHM_GENERATOR_URL}}"
        and reveal(url, "url") == "http://me:hunter2@host:8000"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            DATA + "model:\n  id: 'https://me:pw@host/m'\n",
            "c.yaml:3: model.id is a secret: it would be written into the run folder",
        ),
        (
            DATA + "model: {config: {api_key: x}}\n",
            "c.yaml:2: model.config.api_key is a secret: it would",
        ),
        (
            "data: {train: [{kind: file, path: '${env:ROWS}/x.jsonl'}]}\n",
            "c.yaml:1: data.train.0.path: no ${env:…} can stand here",
        ),
        (DATA + "run: {dir: '${env:OUT}'}\n", "c.yaml:2: run.dir: no ${env:…} can stand here"),
    ],
)
def test_elsewhere_they_are_refused(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text, [], "c.yaml")
    assert caught.value.line().startswith(line)


def test_ordinary_values_are_left_alone() -> None:
    values = {
        "model": {"config": {"image_token": "<i>"}},
        "optimizer": {"lr": 1e-4},
        "a": [None, True, "http://host:1/x"],
        3: "x",
    }
    assert withhold(values, lambda place: ".".join(place)) == values


def test_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old and longer")
    path.chmod(0o644)
    write_whole(path, "new", private=True)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
