"""What the user's own code gives and raises: sums, weights, rows, trackers, kinds beside the YAML; and a config that names what is gone."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist

from drumline.algorithms.python.objective import FIELDS, RESERVED, PythonObjective
from drumline.algorithms.python.spec import PythonConfig
from drumline.config.data import FileSource, PythonSource
from drumline.config.load import Loaded, load, load_text, saved_config
from drumline.config.registry import _users_specs, find_object
from drumline.data.fingerprint import what_changed
from drumline.data.samples import (
    SampleBatch,
    SampleCollator,
    Samples,
    collate_rows,
    identify_samples,
    read_samples,
)
from drumline.dist.reduce import SumReducer
from drumline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DrumlineError,
    EnvironmentFault,
    UserError,
)
from drumline.plan.explain import explain, plan_line
from drumline.plan.plan import Plan
from drumline.telemetry.events import Eval, Event, Step
from drumline.telemetry.trackers import IDS_FILE, open_sinks
from drumline.train.command import prepare
from drumline.train.data_loaders import open_samples
from drumline.train.setup import Request, make_plan
from drumline.train.state import SQUARES
from tests.checkpoint_ranks import run
from tests.tiny import tiny_model_dir

ONE = torch.ones(())


def given(out: Any, weight: float = 2.0) -> Any:
    return PythonObjective(lambda model, batch: out, "mine.py:objective").objective(
        None, SampleBatch(None, weight)
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weight", "a sum of the name 'weight', which Drumline uses itself"),
        ("squared_norms", "a sum of the name 'squared_norms', which Drumline uses itself"),
        ("loss", "a sum of the name 'loss', which Drumline uses itself"),
        (3, "a sum whose name is no string: 3"),
    ],
)
def test_names_that_no_sum_may_have(name: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        given((ONE, {name: ONE}))


def test_sums_that_are_called_like_a_field_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert {"t", "kind", *Step.names(), *Eval.names()} == FIELDS and set(RESERVED) == {
        "loss",
        "weight",
        SQUARES,
    }
    given((ONE, {"tokens": ONE, "kind": ONE, "margin": ONE}))
    assert caplog.messages == [
        "mine.py:objective gives sums that no event shows, as its own numbers have these names: kind, tokens",
    ]


def test_sums_have_the_same_names_for_each_batch() -> None:
    outs = iter([{"b": ONE, "a": ONE * 2}, {"a": ONE, "b": ONE}, {"a": ONE}])
    objective = PythonObjective(lambda model, batch: (ONE, next(outs)), "mine.py:objective")
    batch = SampleBatch(None, 0.25)
    assert (
        [*objective.objective(None, batch).sums]
        == [*objective.objective(None, batch).sums]
        == ["a", "b", "weight"]
    )
    with pytest.raises(
        ConfigError, match="gave the sums a, and before a, b — give the same sums for each batch"
    ):
        objective.objective(None, batch)
    assert objective.metrics({"loss": 1.0, "a": 0.5, "weight": 0.25}) == {"loss": 4.0, "a": 2.0}, (
        "a weight below 1 counts as it is"
    )
    assert objective.step_metrics({"loss": 1.0, "max_a": 5.0, "weight": 2.0}) == {"max_a": 5.0}, (
        "the largest is no mean"
    )


def sums_of(rank: int) -> str:
    try:
        SumReducer(rank, 2, "cpu").start(
            {"a": ONE.double()} | ({"b": ONE.double()} if rank else {})
        )
    except UserError as error:
        return error.line()
    return ""


def test_fillers_have_no_largest() -> None:
    sums = given((ONE, {"max_a": torch.ones((), dtype=torch.int64), "b": ONE}), weight=0.0).sums
    assert {name: float(value) for name, value in sums.items()} == {
        "max_a": -float("inf"),
        "b": 0.0,
        "weight": 0.0,
    }


def other_sums() -> str:
    return sums_of(dist.get_rank())


@pytest.mark.slow
def test_sums_whose_names_differ_between_ranks() -> None:
    one, other = run(2, other_sums)
    assert (
        "rank 0 adds up a, and rank 1 a, b" in one and "rank 1 adds up a, b, and rank 0 a" in other
    )


@pytest.mark.parametrize("weight", [float("nan"), -1.0, None, "four", torch.ones(2)])
def test_weights_that_are_none(weight: Any) -> None:
    with pytest.raises(
        DataError, match=r"algorithm\.weight: gave .* — return a number of 0 or more"
    ):
        SampleCollator(Samples([[1, 2]]), list, lambda content: weight)([0, 1])
    assert (
        SampleCollator(Samples([[1, 2]]), list, lambda content: float(torch.tensor(0.25)))(
            [0]
        ).weight
        == 0.25
    )


OWN_FUNCTIONS = """
def collate(rows):
    raise {error}("of my own")

def weight(batch):
    return batch["none"]

def rows():
    class Rows(list):
        def __getitem__(self, index):
            raise {error}("of a row")
    return Rows([1, 2])
"""


def collated(folder: Path, error: str, rows: Any, **keys: str) -> DrumlineError:
    """What a batch of own functions raises."""
    (folder / "own_batches.py").write_text(OWN_FUNCTIONS.format(error=error))
    spec = PythonConfig(path="own_batches.py:collate", **keys)
    plan: Any = SimpleNamespace(base_dir=str(folder))
    with pytest.raises(DrumlineError) as caught:
        spec.collator(plan, None)(Samples([rows]))([0, 1])
    return caught.value


def test_what_functions_of_batches_raise_names_key_function_and_line(tmp_path: Path) -> None:
    failed = collated(tmp_path, "ValueError", [1, 2], collate="own_batches.py:collate")
    assert (
        failed.line()
        == "algorithm.collate: own_batches.py:collate raised ValueError in own_batches.py:3: of my own"
    )
    assert failed.exit_code == 2
    weighed = collated(tmp_path, "ValueError", [{"a": 1}, {"a": 2}], weight="own_batches.py:weight")
    assert (
        weighed.line()
        == "algorithm.weight: own_batches.py:weight raised KeyError in own_batches.py:6: 'none'"
    )
    no_file = collated(tmp_path, "OSError", [1, 2], collate="own_batches.py:collate")
    assert no_file.exit_code == 1, "a restart may pass it"


def test_a_row_that_raises_in_training_is_named(tmp_path: Path) -> None:
    (tmp_path / "own_rows.py").write_text(OWN_FUNCTIONS.format(error="ValueError"))
    rows = find_object("own_rows.py:rows", tmp_path, "data source", "function")()
    failed = collated(tmp_path, "ValueError", rows)
    assert (
        failed.line() == "data.train: row 0 cannot be read: ValueError in own_rows.py:11: of a row"
    )


def test_a_metric_takes_no_field_s_place() -> None:
    values = Eval(
        step=3, samples=2, seconds=1.0, metrics={"kind": "x", "samples": 7.0, "loss": 1.5}
    ).values()
    assert (values["kind"], values["samples"], values["loss"]) == ("eval", 2, 1.5) and isinstance(
        Event.from_values(values), Eval
    )


CODE = """
from drumline.config.data import SourceSpec
from drumline.config.strategies.single import SingleStrategy
from drumline.telemetry.trackers import Tracker
import torch, uuid

def build():
    return torch.nn.Linear(2, 1)

def objective(model, batch):
    return model(batch).sum()

def rows():
    yield {"text": "a"}
    yield row["text"]

def fine():
    return [torch.ones(2)] * 4

def nothing(run):
    pass

def works(run):
    return Tracker(uuid.UUID(int=7), lambda group, values, step: None, lambda: None)

class Bare(SourceSpec):
    kind: str = "bare"

class Mine(SingleStrategy):
    kind: str = "mine"
"""


def loaded(folder: Path, **sections: Any) -> Loaded:
    (folder / "own_code_of_a_test.py").write_text(CODE)
    values = {
        "model": {"kind": "python", "path": "own_code_of_a_test.py:build"},
        "algorithm": {"kind": "python", "path": "own_code_of_a_test.py:objective"},
        "data": {"train": [{"kind": "python", "path": "own_code_of_a_test.py:rows"}]},
        "run": {"steps": 1, "report_to": [], "dir": str(folder / "run"), "device": "cpu"},
        "batch": {"global_samples": 2},
    }
    values |= sections
    (folder / "mine.yaml").write_text(json.dumps(values))
    return load(folder / "mine.yaml", [])


@pytest.mark.parametrize(
    "sections", [{}, {"algorithm": "pretrain", "model": {"id": "MODEL"}}], ids=["samples", "text"]
)
def test_rows_that_raise(tmp_path: Path, sections: dict[str, Any]) -> None:
    if sections:
        rows = [{"kind": "python", "path": "own_code_of_a_test.py:rows"}]
        sections = {
            **sections,
            "model": {"id": str(tiny_model_dir(tmp_path / "model"))},
            "data": {"train": rows, "max_length": 64},
        }
    request = Request(loaded(tmp_path, **sections), 1)
    with pytest.raises(
        DrumlineError,
        match=r"reading own_code_of_a_test.py:rows raised NameError in own_code_of_a_test.py:15",
    ):
        make_plan(request, on_progress=lambda *_: None)


def rows_of_each_kind(folder: Path) -> list[dict[str, Any]]:
    """A source of each built-in kind that needs no network: three have the same two rows."""
    rows = [{"x": [0.5, 1], "y": 1, "name": "a"}, {"x": [2, 3], "y": 0, "name": "b"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    with closing(sqlite3.connect(folder / "rows.db")) as connection:
        connection.execute("CREATE TABLE rows (y INTEGER, name TEXT)")
        connection.executemany(
            "INSERT INTO rows VALUES (?, ?)", [(row["y"], row["name"]) for row in rows]
        )
        connection.commit()
    return [
        {"kind": "file", "path": "rows.jsonl"},
        {"kind": "saved", "path": "saved"},
        {"kind": "sql", "path": "rows.db", "query": "rows"},
        {"kind": "digits", "limit": 2},
    ]


def test_rows_of_each_kind_are_samples(tmp_path: Path) -> None:
    for source in rows_of_each_kind(tmp_path):
        request = Request(loaded(tmp_path, data={"train": [source]}), 1)
        plan = make_plan(request, on_progress=lambda *_: None)
        assert plan.data is not None and plan.data.train_samples == 2
        samples = open_samples(plan, plan.data.train_cache)
        batch = plan.config.algorithm.collator(plan, None)(samples)([0, 1]).content
        assert batch.keys() == samples[0].keys()
        if "x" in batch:
            assert torch.equal(batch["x"], torch.tensor([[0.5, 1], [2, 3]], dtype=torch.float64))
        if "y" in batch:
            assert torch.equal(batch["y"], torch.tensor([1, 0])) and batch["name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("length", "line"),
    [
        ("-1", r"asking for the length of d\.py:rows raised ValueError"),
        ("1 / 0", r"asking for the length of d\.py:rows raised ZeroDivisionError"),
        ("10**17", r"its length is 100,000,000,000,000,000, more samples than can be numbered"),
    ],
)
def test_a_dataset_whose_length_is_none(tmp_path: Path, length: str, line: str) -> None:
    code = f"""
class Rows:
    def __len__(self): return {length}
    def __getitem__(self, i): return i
def rows(): return Rows()
"""
    (tmp_path / "d.py").write_text(code)
    with pytest.raises(UserError, match=line):
        read_samples([PythonSource(path="d.py:rows")], tmp_path)


def test_a_changed_file_is_other_data(tmp_path: Path) -> None:
    """Rows that are not among those that are compared count through the file."""
    file, source = tmp_path / "rows.jsonl", [FileSource(path="rows.jsonl")]
    file.write_text('{"y": 1}\n' * 100)
    old = identify_samples(source, tmp_path, read_samples(source, tmp_path))
    file.write_text('{"y": 1}\n' * 5 + '{"y": 2}\n' + '{"y": 1}\n' * 94)
    new = identify_samples(source, tmp_path, read_samples(source, tmp_path))
    assert "what gives the rows (a function or a file) has changed" in str(what_changed(old, new))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"x": [1, 2]}, {"x": [1]}], "the lists of column 'x' differ in their lengths"),
        ([{"x": 1}, {"x": None}], "column 'x' is null in some rows"),
        ([{"x": 1}, {"x": 1, "z": 2}], "not all rows have the column 'z'"),
        ([{"x": 10**30}, {"x": 1}], "column 'x' has whole numbers that int64 cannot hold"),
        ([{"x": 2**63}, {"x": -1}], "column 'x' has whole numbers that int64 cannot hold"),
        ([{"x": [2**63]}, {"x": [2**63]}], "column 'x' has whole numbers that int64 cannot hold"),
        ([{"x": [1]}, {"x": 2}], "column 'x' has numbers in some places and lists in others"),
        ([{"x": []}, {"x": 2}], "column 'x' has numbers in some places and lists in others"),
        (
            [{"x": [1, [2]]}, {"x": [1, [2]]}],
            "column 'x' has numbers in some places and lists in others",
        ),
        ([{"x": {"k": None}}, {"x": {"k": 1}}], "column 'x' makes no batch: "),
    ],
)
def test_rows_that_make_no_batch(rows: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(
        DataError, match=r"name a function of yours as algorithm\.collate"
    ) as raised:
        collate_rows(rows)
    assert line in raised.value.line()


def test_texts_stay_a_list_and_the_largest_number_stays_whole() -> None:
    rows = [{"x": ["a", "b"], "n": 2**63 - 1, "e": []}, {"x": ["c"], "n": -(2**63), "e": []}]
    batch = collate_rows(rows)
    assert batch["x"] == [["a", "b"], ["c"]]
    assert batch["n"].tolist() == [2**63 - 1, -(2**63)]
    assert batch["e"].shape == (2, 0)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            {"kind": "file", "path": "rows.jsonl", "columns": {"text": "x"}},
            r"train\[0\].columns is for models of text",
        ),
        ({"kind": "sql", "url_env": "DATABASE", "query": "SELECT x FROM t"}, "add ORDER BY"),
        ({"kind": "own_code_of_a_test.py:Bare"}, "Bare gives no rows — override `rows"),
    ],
)
def test_sources_that_give_no_samples(tmp_path: Path, source: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make_plan(
            Request(loaded(tmp_path, data={"train": [source]}), 1), on_progress=lambda *_: None
        )


def test_a_dry_run_counts_no_tokens_where_there_are_none(tmp_path: Path) -> None:
    request = Request(loaded(tmp_path, data={"train": rows_of_each_kind(tmp_path)[:1]}), 1)
    plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
    lines = [line for line in explain(plan).splitlines() if line.startswith(("model ", "data "))]
    assert lines == [
        "model          a module of your own ← own_code_of_a_test.py:build",
        "data           2 training samples, 0 held out",
    ]
    assert plan_line(plan).split(" · ")[0] == "own_code_of_a_test.py:build"


def test_prepare_says_that_there_is_nothing_to_prepare(tmp_path: Path) -> None:
    loaded(tmp_path)
    with pytest.raises(UserError, match="there is nothing to prepare"):
        prepare(tmp_path / "mine.yaml", [])


def test_trackers_that_are_none(tmp_path: Path) -> None:
    loaded(tmp_path)
    with pytest.raises(
        EnvironmentFault, match=r"does not start: .*it gives NoneType, a Tracker is wanted"
    ):
        open_sinks(["own_code_of_a_test.py:nothing"], tmp_path, {}, "name", tmp_path)
    open_sinks(["own_code_of_a_test.py:works"], tmp_path, {}, "name", tmp_path)
    assert (tmp_path / IDS_FILE).read_text().endswith('7"}')


def test_a_config_whose_plug_in_is_gone(tmp_path: Path) -> None:
    now = loaded(tmp_path).config
    old = now.model_dump(mode="json")
    assert saved_config(old, now, (), "there") == now
    old["strategy"] = {"kind": "gossip"}
    old["run"]["report_to"] = ["sqlite"]
    assert saved_config(old, now, (), "there") == now, "what may change is of now"
    old["algorithm"] = {"kind": f"{tmp_path}/moved.py:Mine"}
    with pytest.raises(
        CheckpointError, match=r"there: its config cannot be read: .*moved\.py.* --allow SECTION"
    ):
        saved_config(old, now, (), "there")
    assert saved_config(old, now, ("algorithm",), "there") == now


def test_a_key_of_an_inner_section_is_accepted_as_it_is_now() -> None:
    now = load_text("data: a.jsonl", ["algorithm=grpo", "batch.global_samples=8"])
    old = now.model_dump(mode="json")
    old["algorithm"]["kl"]["estimator"] = "gone"
    assert saved_config(old, now, ("algorithm.kl.estimator",), "there") == now


def test_a_kind_beside_the_yaml_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is started anew reads plan.json alone, in the folder that the command was given in."""
    rows = {"train": [{"kind": "python", "path": "own_code_of_a_test.py:fine"}]}
    request = Request(loaded(tmp_path, strategy="own_code_of_a_test:Mine", data=rows), 1)
    plan = make_plan(request, on_progress=lambda *_: None, dry_run=True)
    plan.save(tmp_path / "plan.json")
    _users_specs.clear()
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_code_of_a_test")
    assert Plan.load(tmp_path / "plan.json").config.strategy.kind == "own_code_of_a_test:Mine"
    _users_specs.clear()
    broken = json.loads((tmp_path / "plan.json").read_text())
    broken["config"]["strategy"] = {"kind": "gossip"}
    (tmp_path / "plan.json").write_text(json.dumps(broken))
    with pytest.raises(
        CheckpointError, match=r"is not one of this version: config.strategy.*gossip"
    ):
        Plan.load(tmp_path / "plan.json")
