"""The table of the reference's log-probabilities: what it hangs on, and what a reader takes for one; which model is asked."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.config.config import Config
from drumline.config.load import load
from drumline.errors import ModelError, PlanError
from drumline.plan.plan import Plan
from drumline.train.references import read_table, table_key, write_table
from drumline.train.setup import Request, make_plan
from tests.harness import drumline, events, pair_rows, write_config, write_rows
from tests.tiny import tiny_model_dir, tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def plan_of(folder: Path, model: Path, *overrides: str, **algorithm: Any) -> Plan:
    path = write_config(folder, model, algorithm={"kind": "dpo", **algorithm}, rows=12)
    return make_plan(Request(load(path, list(overrides))), on_progress=lambda *_: None)


def test_a_table_hangs_on_weights_pairs_and_precision(tmp_path: Path, model: Path) -> None:
    plan = plan_of(tmp_path, model)
    assert plan.data is not None and plan.data.eval_caches

    def of(other: Plan) -> str:
        assert other.data is not None
        return table_key(other, other.data.train_cache)

    first = of(plan)
    assert (
        first
        == of(plan_of(tmp_path, model, "optimizer.lr=1", "run.seed=3"))
        == of(plan_of(tmp_path, model, beta=0.7))
    )
    others = {
        table_key(plan, plan.data.eval_caches[""]),
        of(plan_of(tmp_path, model, "precision=bf16")),
        of(plan_of(tmp_path, model, "data.max_length=64")),
        of(plan_of(tmp_path, model, "model.init=random")),
        of(plan_of(tmp_path, model, "model.init=random", "run.seed=3")),
        of(
            plan_of(
                tmp_path,
                model,
                reference_model={"id": str(tiny_model_dir(tmp_path / "other", seed=1))},
            )
        ),
    }
    weights = next(model.glob("*.safetensors"))
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    others.add(of(plan_of(tmp_path, model)))
    assert len(others) == 7 and first not in others


def test_a_table_is_whole_or_none(tmp_path: Path) -> None:
    path, table = tmp_path / "reference" / "train-abc.npy", np.arange(6.0).reshape(3, 2)
    assert read_table(path, (3, 2)) is None
    write_table(path, table)
    write_table(path.with_name("train-old.npy"), table)
    for name in (
        "eval-abc.npy",
        "eval-easy-abc.npy",
        "eval-easy-1-old.npy",
    ):  # of sets with names of their own
        write_table(path.with_name(name), table)
    write_table(path.with_name("eval-easy-1-abc.npy"), table)
    write_table(path, table)
    names = ["eval-abc.npy", "eval-easy-1-abc.npy", "eval-easy-abc.npy", "train-abc.npy"]
    assert sorted(p.name for p in path.parent.iterdir()) == names  # others of the same data go
    read = read_table(path, (3, 2))
    assert read is not None and torch.equal(read, torch.from_numpy(table))
    assert read_table(path, (4, 2)) is None
    path.write_bytes(path.read_bytes()[:-8])
    assert read_table(path, (3, 2)) is None
    write_table(path, np.full((3, 2), np.nan))
    assert read_table(path, (3, 2)) is None


def test_auto_is_the_adapter_where_there_is_one() -> None:
    def kind(**sections: Any) -> str:
        algorithm = {"kind": "dpo", **sections.pop("algorithm", {})}
        data = {"train": [{"kind": "file", "path": "unused"}]}
        config = Config.model_validate({"data": data, "algorithm": algorithm, **sections})
        return config.algorithm.reference_of(config)

    assert kind() == "precomputed" and kind(adapter="lora") == "adapter"
    assert kind(adapter="lora", algorithm={"reference": "live"}) == "live"
    assert kind(adapter="lora", algorithm={"reference_model": {"id": "other"}}) == "precomputed"


@pytest.mark.parametrize("adapter", [{"init": "pissa"}, {"modules_to_save": ["lm_head"]}])
def test_what_training_starts_from_is_its_own_reference(
    tmp_path: Path, model: Path, adapter: dict[str, Any]
) -> None:
    """Also where the model without its adapter is another."""
    lora = {"kind": "lora", "r": 4, **adapter}
    path = write_config(
        tmp_path,
        model,
        algorithm={"kind": "dpo"},
        adapter=lora,
        rows=12,
        run={"steps": 1},
        eval={"at_start": True},
        strategy="single",
    )
    finished = drumline("train", path)
    assert finished.code == 0, finished.err
    first = next(event for event in events(tmp_path / "run", "eval") if event["step"] == 0)
    assert abs(first["margin"]) < 1e-4 and first["loss"] == pytest.approx(math.log(2), abs=1e-4), (
        first
    )


def test_an_adapter_that_is_not_there_cannot_be_switched_off(tmp_path: Path, model: Path) -> None:
    with pytest.raises(
        PlanError,
        match=r"algorithm\.reference: .*: there is no adapter to switch off — use adapter=lora",
    ):
        plan_of(tmp_path, model, reference="adapter")
    with pytest.raises(
        PlanError,
        match=r"algorithm\.reference: .*: the policy without its adapter is what training starts from",
    ):
        plan_of(
            tmp_path, model, "adapter=lora", reference="adapter", reference_model={"id": str(model)}
        )


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path, model: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)
    with pytest.raises(
        ModelError,
        match=r"algorithm\.reference_model: its tokenizer is not the policy's: token '.*' has number 3\d\d in the policy's and none",
    ):
        plan_of(tmp_path, model, reference_model={"id": str(other)})
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(
        ModelError,
        match=r"algorithm\.reference_model: .*320 tokens but the embedding only 300 rows",
    ):
        plan_of(tmp_path, model, reference_model={"id": str(other)})


def test_pairs_that_are_none_end_the_command_with_one_line(tmp_path: Path, model: Path) -> None:
    path = write_config(tmp_path, model, algorithm={"kind": "reward"}, rows=4)
    rows = pair_rows(4)
    rows[2]["rejected"] = rows[2]["chosen"]
    for bad, line in (
        (
            rows,
            "error: train.jsonl:3: `chosen` and `rejected` are the same answer — take the row out",
        ),
        (
            [{"prompt": "a", "chosen": "b"}],
            "error: train.jsonl:1: row 1 has no prompt and chosen and rejected, or chosen and rejected; its columns are: prompt, chosen",
        ),
        (
            [{"prompt": "a", "chosen": "", "rejected": "b"}],
            "error: train.jsonl:1: `chosen` is empty: it has no answer — take the row out",
        ),
    ):
        write_rows(tmp_path / "train.jsonl", bad)
        finished = drumline("train", path)
        assert finished.code == 2 and "Traceback" not in finished.err
        assert finished.error_lines[0].startswith(line), finished.err
