"""Kinds come from this package, from installed packages and from files of the user's own, and the config cannot tell them apart."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from drumline.config.load import Loaded, load, load_text, schema
from drumline.config.registry import (
    _users_specs,
    find,
    find_object,
    kinds,
    make,
)
from drumline.config.strategy import StrategyConfig
from drumline.errors import ConfigError
from drumline.plan.plan import Plan
from drumline.planner.strategies.base import cost_of
from tests.distributions import forget_installed

DATA = "data: {train: [{kind: file, path: rows.jsonl}]}\n"
OWN = """
from pydantic import Field
from drumline.config.strategy import StrategyConfig

class Mine(StrategyConfig):
    period: int = Field(3, gt=0, description="Steps.")

class Other: ...
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    forget_installed()
    _users_specs.clear()


def config_in(folder: Path, strategy: str, code: str = OWN) -> Loaded:
    (folder / "mine.py").write_text(code)
    (folder / "run.yaml").write_text(DATA + f"strategy: {strategy}\n")
    return load(folder / "run.yaml", [])


def test_a_file_of_the_users_own_is_found_beside_the_yaml(tmp_path: Path) -> None:
    before = list(sys.path)
    strategy = config_in(tmp_path, "{kind: 'mine.py:Mine', period: 5}").config.strategy
    assert strategy.kind == f"{tmp_path}/mine.py:Mine" and strategy.model_dump()["period"] == 5
    assert sys.path[: len(before)] == before  # nothing stands before what was there
    again = load_text(DATA + f"strategy: '{strategy.kind}'\n", []).strategy  # as a rank reads it
    assert type(again) is type(strategy) and again.model_dump()["period"] == 3


def test_a_file_is_run_once_whatever_names_it_until_it_changes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN + "VALUE = 1\n")
    mine, other = (find_object(f"mine.py:{name}", tmp_path, "here") for name in ("Mine", "Other"))
    assert (
        sys.modules[mine.__module__] is sys.modules[other.__module__]
        and sys.modules[mine.__module__].Mine is mine
    )
    (tmp_path / "mine.py").write_text(OWN + "VALUE = 2\n")
    assert (
        find_object("mine.py:VALUE", tmp_path, "here") == 2
        and find_object("mine.py:Mine", tmp_path, "here") is not mine
    )


def test_the_short_form_and_an_override_take_a_file_too(tmp_path: Path) -> None:
    assert config_in(tmp_path, "mine.py:Mine").config.strategy.model_dump()["period"] == 3
    own = load(tmp_path / "run.yaml", ["strategy={kind: 'mine.py:Mine', period: 7}"])
    assert own.config.strategy.model_dump()["period"] == 7


@pytest.mark.parametrize(
    ("strategy", "code", "words"),
    [
        ("mine.py:Mein", OWN, "mine.py has no class 'Mein'; did you mean 'Mine'?"),
        (
            "mine.py:Other",
            OWN,
            "is no strategy: it is not derived from drumline.config.strategy.StrategyConfig",
        ),
        ("mien.py:Mine", OWN, "did you mean 'mine.py'?"),
        (
            "mine.py:Mine",
            "import nothing_of_this_name",
            "raised ModuleNotFoundError in mine.py:1: No module named 'nothing_of_this_name'",
        ),
        ("no_such_package.x:Mine", OWN, "there is no module 'no_such_package'"),
        (
            "{kind: 'mine.py:Mine', perid: 5}",
            OWN,
            "strategy.perid: unknown key 'perid' — did you mean 'period'?",
        ),
        ("{kind: 'mine.py:Mine', period: 0}", OWN, "a number greater than 0 is wanted"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, strategy: str, code: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_in(tmp_path, strategy, code)
    assert words in error.value.line()


def test_code_beside_a_strangers_config_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n" + OWN
    )
    (tmp_path / "run.yaml").write_text(
        DATA + "strategy: mine.py:Mine\nmodel: {trust_remote_code: true}\n"
    )
    with pytest.raises(ConfigError, match="may be a stranger's"):
        load(tmp_path / "run.yaml", [], trusted=False)
    (tmp_path / "plan.json").write_text(
        f'{{"config": {{"strategy": {{"kind": "{tmp_path}/mine.py:Mine"}}}}}}'
    )
    with pytest.raises(ConfigError, match="may be a stranger's"):
        Plan.load(tmp_path / "plan.json", trusted=False)
    assert not (tmp_path / "ran").exists()
    load(tmp_path / "run.yaml", ["model.trust_remote_code=true"], trusted=False)
    assert (tmp_path / "ran").exists()


def package(folder: Path, name: str, code: str, group: str = "strategies") -> None:
    """Install a package with a strategy `name`."""
    (folder / f"made_{name}.py").write_text(code)
    info = folder / f"made_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drumline.{group}]\n{name} = made_{name}:Mine\n")


def test_a_plug_in_is_a_kind_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "installed", OWN)
    monkeypatch.syspath_prepend(tmp_path)
    forget_installed()
    assert load_text(DATA + "strategy: {kind: installed, period: 9}\n", []).strategy == make(
        StrategyConfig, "installed", period=9
    )
    assert list(kinds(StrategyConfig))[-1] == "installed"
    assert "installed" in schema()["properties"]["strategy"]["anyOf"][0]["enum"]
    with pytest.raises(ConfigError, match="did you mean 'installed'"):
        load_text(DATA + "strategy: instaled\n", [])


def test_a_plug_in_that_does_not_import_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "broken", "1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    forget_installed()
    with pytest.raises(ConfigError) as error:
        load_text(DATA + "strategy: broken\n", [])
    assert "the strategy 'broken' of made-broken 1.0 raised ZeroDivisionError" in error.value.line()
    assert find(StrategyConfig, "ddp") is not None  # the others go on


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("{kind: ssh, hosts: [a]}", "ssh needs pip install drumline-hosts"),
        ("ray", "ray needs pip install drumline-hosts"),
        ("{kind: ray, nodes: 2}", "ray needs pip install drumline-hosts"),
        ("{kind: kubernetes, image: a}", "kubernetes needs pip install drumline-kubernetes"),
    ],
)
def test_a_kind_of_a_distribution_that_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, launch: str, message: str
) -> None:
    monkeypatch.setattr("drumline.config.registry.entry_points", lambda group: {})
    with pytest.raises(ConfigError) as error:
        load_text(DATA + f"launch: {launch}\n", [])
    assert error.value.line() == f"launch.kind: {message}"
    assert error.value.exit_code == 2


def test_a_part_of_a_strategy_that_is_not_there_is_named() -> None:
    class Partless(StrategyConfig):
        cost_class: ClassVar[str | type] = "drumline.planner.strategies.ddp:DDPCots"

    with pytest.raises(ConfigError) as error:
        cost_of(Partless())
    assert error.value.line().startswith(
        "strategy.kind: drumline.planner.strategies.ddp has no class 'DDPCots'"
    )


EXTENSION = """
from pydantic import Field
from drumline.config.strategies.local_sgd import LocalSGDStrategy

class Mine(LocalSGDStrategy):
    warm: int = Field(3, gt=0, description="Steps.")
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Install a package that extends local_sgd."""
    package(folder, "local_sgd", code, "extended_strategies")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "made_local_sgd", raising=False)
    forget_installed()


def test_a_package_adds_keys_to_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kinds(StrategyConfig)
    install(monkeypatch, tmp_path, EXTENSION)
    text = DATA + "strategy: {kind: local_sgd, period: 9, warm: 2}\n"
    strategy = load_text(text, []).strategy
    assert strategy.model_dump() == {"kind": "local_sgd", "period": 9, "start_step": 0, "warm": 2}
    assert isinstance(strategy, plain["local_sgd"])
    assert pickle.loads(pickle.dumps(strategy)) == strategy  # noqa: S301
    assert list(kinds(StrategyConfig)) == list(plain)
    assert "warm" in json.dumps(schema())


def test_what_adds_keys_is_derived_from_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, OWN)
    with pytest.raises(ConfigError) as error:
        load_text(DATA + "strategy: local_sgd\n", [])
    base = "drumline.config.strategies.local_sgd.LocalSGDStrategy"
    assert f"local_sgd is no strategy: it is not derived from {base}" in error.value.line()
    assert find(StrategyConfig, "ddp") is not None


ADDED = {
    "fragments": "2",
    "bits": "8",
    "delay": "1",
    "keep": "0.1",
    "peers": "[a:1]",
    "secret": "drum",
}


@pytest.mark.parametrize(("key", "value"), ADDED.items())
def test_a_key_of_a_distribution_that_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setattr("drumline.config.registry.entry_points", lambda group: {})
    with pytest.raises(ConfigError) as error:
        load_text(DATA + f"strategy: {{kind: diloco, {key}: {value}}}\n", [])
    assert error.value.line() == f"strategy.{key}: {key} needs pip install drumline-diloco"
    assert error.value.exit_code == 2


def test_plans_with_the_defaults_of_a_missing_distribution_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As plans from before 0.6.0 have them."""
    monkeypatch.setattr("drumline.config.registry.entry_points", lambda group: {})
    defaults = "fragments: 1, bits: 32, delay: 0, keep: 0.5, peers: [], secret: null"
    strategy = load_text(DATA + f"strategy: {{kind: diloco, period: 7, {defaults}}}\n", []).strategy
    assert strategy == make(StrategyConfig, "diloco", period=7)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("strategy: {}", "strategy.kind"),
        ("algorithm: {}", "algorithm.kind"),
        ("launch: {}", "launch.kind"),
        ("data: {{train: [{}]}}", "data.train.kind"),
        ("data: {{train: [rows.jsonl], eval: [{}]}}", "data.eval.kind"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "message"),
    [("no_such.py:Name", "there is no file"), ("mine.py:Other", "it is not derived from")],
)
def test_an_error_names_the_key_of_the_yaml(
    tmp_path: Path, section: str, key: str, kind: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    text = section.format(f"{{kind: '{kind}'}}")
    if not text.startswith("data"):
        text = DATA + text
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path / "run.yaml", [])
    assert error.value.where == key
