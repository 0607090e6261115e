"""Data that are not what they were: bytes of the token cache, rows of the source, and a run that goes on with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.save import Checkpointer
from drumline.config.load import load
from drumline.config.resume import Resume
from drumline.data.cache import TokenCache, verify
from drumline.data.fingerprint import identify, what_changed
from drumline.data.prepare import prepare
from drumline.dist.start import Ranks
from drumline.errors import CheckpointError, DataError
from drumline.plan.plan import DataIdentity, Plan
from drumline.train.build import build
from drumline.train.setup import Request, claim_run_dir, make_plan
from drumline.train.state import Goodput
from tests.harness import chat_rows, write_config, write_rows
from tests.tiny import tiny_model_dir

ROWS = chat_rows(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def prepared(
    config: Path,
    model: Path,
    rows: list[dict[str, Any]] | None = None,
    check: bool = False,
    **data: Any,
) -> TokenCache:
    """The cache of the training rows after `rows` took the place of those that were there."""
    if rows is not None:
        write_rows(config.parent / "train.jsonl", rows)
    over = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    return TokenCache.open(
        prepare(load(config, over).config, str(model), config.parent, check=check).train_cache
    )


def test_every_flipped_bit_is_found_by_the_rank_that_has_the_block(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.cache.CHECKSUM_BYTES", 1000)
    cache = prepared(write_config(tmp_path, model), model)
    sha256, files = cache.info["sha256"], sorted(cache.info["files"])
    assert set(files) == set(sha256) and len(sha256["tokens.bin"]) > 1
    for ranks in (1, 3):
        for rank in range(ranks):
            verify(cache.folder, sha256, rank, ranks)
    for name in files:
        flip(cache.folder / name)
        found = []
        for rank in range(3):
            try:
                verify(cache.folder, sha256, rank, 3)
            except DataError as error:
                found.append(error.line())
        assert len(found) == 1 and f"{name}: damaged" in found[0] and "drumline prepare" in found[0]
        flip(cache.folder / name)


def test_prepare_makes_a_damaged_cache_again(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    folder = prepared(config, model).folder
    good = (folder / "tokens.bin").read_bytes()
    flip(folder / "tokens.bin")
    prepared(config, model)
    assert (folder / "tokens.bin").read_bytes() != good, "sizes alone do not tell"
    prepared(config, model, check=True)
    assert (folder / "tokens.bin").read_bytes() == good
    info = folder / "info.json"
    info.write_text(info.read_text().replace('"max_length": 96', '"max_length": 95'))
    with pytest.raises(DataError, match="not a prepared dataset"):
        TokenCache.open(folder)


@pytest.mark.claim("a run goes on with its own data alone, and its caches are whole")
@pytest.mark.parametrize("kind", ["train_cache", "eval_caches"])
def test_a_run_does_not_start_on_a_damaged_cache(tmp_path: Path, model: Path, kind: str) -> None:
    plan, _ = planned(write_config(tmp_path, model))
    folder = getattr(plan.data, kind)
    flip(Path(folder if isinstance(folder, str) else folder[""]) / "learn.bin")
    arguments = (Ranks(), None, lambda *_, **__: None, None, [], Goodput(0.0))
    with pytest.raises(DataError, match=r"learn.bin: damaged"):
        build(plan, *arguments)  # type: ignore[arg-type]
    build(
        plan.model_copy(
            update={"config": load(tmp_path / "config.yaml", ["data.verify=false"]).config}
        ),
        *arguments,
    )  # type: ignore[arg-type]


CHANGES = {
    "2 rows added": [*ROWS, *chat_rows(2, seed=9)],
    "1 rows removed": ROWS[1:],
    "3 rows added, 2 rows removed": [*chat_rows(3, seed=9), *ROWS[2:]],
    "the same 40 rows in another order": ROWS[::-1],
    "1 rows added, the others in another order": [*chat_rows(1, seed=9), *ROWS[::-1]],
}


def test_what_changed_is_said_in_rows(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    old = identify(prepared(config, model))
    for words, rows in CHANGES.items():
        assert what_changed(old, identify(prepared(config, model, rows))) == words
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "train.jsonl")
    assert what_changed(old, identify(prepared(config, model, ROWS, workers=2))) is None
    assert "their tokens or other columns differ" in (
        what_changed(old, identify(prepared(config, model, ROWS, learn_on="all"))) or ""
    )
    # Without the old cache there are its number of rows and what they come to.
    gone = old.model_copy(update={"cache": str(tmp_path / "gone")})
    assert (
        what_changed(gone, identify(prepared(config, model, ROWS[::-1])))
        == "the same 40 rows, in another order or with other tokens"
    )
    assert (
        what_changed(gone, identify(prepared(config, model, ROWS[1:])))
        == "40 rows before, 39 now, and not the same ones"
    )


def planned(
    config: Path, resume: str | None = None, allow: tuple[str, ...] = (), *over: str
) -> tuple[Plan, Request]:
    request = Request(load(config, list(over)), resume=Resume.parse(resume), allow=allow)
    return make_plan(request, on_progress=lambda *_: None), request


def checkpointed(plan: Plan, data: DataIdentity | None) -> None:
    state = {
        "config": plan.config.model_dump(mode="json"),
        "trainer": {},
        "data": data and data.model_dump(),
    }
    if data is None:
        del state["data"]  # as commit 474a450 wrote it
    saver = Checkpointer(Path(plan.run_dir) / "checkpoints", 2, True, "min", asynchronous=False)
    saver.save(1, {"model.w": torch.zeros(2)}, state, None)
    assert saver.wait()[0].error is None


@pytest.mark.claim("a run goes on with its own data alone, and its caches are whole")
def test_a_run_goes_on_with_its_own_data_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model)
    plan, request = planned(config)
    claim_run_dir(plan, request)
    assert plan.data is not None and plan.data.identity is not None
    checkpointed(plan, plan.data.identity)
    write_rows(tmp_path / "eval.jsonl", chat_rows(3, seed=5))
    assert claim_run_dir(*planned(config, "newest"))[1] == Resume(), "the held-out set may change"
    assert not capsys.readouterr().err
    write_rows(tmp_path / "train.jsonl", ROWS[::-1])
    newest = str(Path(plan.run_dir) / "checkpoints" / "step-00000001")
    for resume in ("newest", plan.run_dir, newest):
        with pytest.raises(
            CheckpointError,
            match=r"the training data changed since this checkpoint: the same 40 rows in another order — .*--allow data",
        ):
            claim_run_dir(*planned(config, resume))
        with pytest.raises(CheckpointError, match="the training data changed"):
            claim_run_dir(*planned(config, resume, ("optimizer.lr",)))
    # A kill came while it was saved again.
    Path(newest).rename(Path(newest).with_name(".trash-step-00000001-0123abcd"))
    with pytest.raises(CheckpointError, match="the training data changed"):
        claim_run_dir(*planned(config, "newest"))
    for allowed in ("data", "all"):
        assert claim_run_dir(*planned(config, "newest", (allowed,)))[1] == Resume()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("note: the training data changed since") and "another order" in line


def test_resume_from_no_checkpoint_is_refused_before_any_work(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "a model that is not there yet")
    (tmp_path / "empty").mkdir()
    for dry_run in (True, False):
        for named in ("empty", "nowhere", "a.yaml/x"):
            request = Request(load(config, []), resume=Resume(str(tmp_path / named)))
            with pytest.raises(
                CheckpointError, match=r"not a committed checkpoint|there is no such file or folder"
            ):
                make_plan(
                    request,
                    on_progress=lambda *work: pytest.fail(f"worked: {work}"),
                    dry_run=dry_run,
                )


def test_an_old_checkpoint_says_that_it_does_not_know(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model)
    plan, request = planned(config)
    claim_run_dir(plan, request)
    checkpointed(plan, None)
    assert claim_run_dir(*planned(config, "newest"))[1] == Resume()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ") and "does not say what data it was trained on" in line


def test_what_was_left_out_is_said(tmp_path: Path, model: Path) -> None:
    rows = [*ROWS[:30], *({"prompt": "word " * 80, "completion": "yes"} for _ in range(3))]
    rows += [{"messages": [{"role": "user", "content": "nobody answers"}]} for _ in range(2)]
    config = write_config(tmp_path, model)
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "eval.jsonl", [*ROWS[:4], {"prompt": "one", "completion": "word " * 80}])
    said = {}
    for policy in ("left", "drop"):
        loaded = load(config, [f"data.truncation={policy}", "data.max_length=150"])
        said[policy] = prepare(loaded.config, str(model), tmp_path).left_out
    assert said["left"][0].startswith(
        "data.train: 3 of 35 rows cut at 150 tokens; 2 of 35 rows skipped: nothing to learn"
    ), said
    assert said["left"][1] == "data.eval: 1 of 5 rows cut at 150 tokens"
    assert (
        said["drop"][0]
        == "data.train: 3 of 35 rows dropped: longer than 150 tokens; 2 of 35 rows skipped: nothing to learn"
    )
    assert said["drop"][1] == "data.eval: 1 of 5 rows dropped: longer than 150 tokens"
