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
from drumline.dist.start import RankInfo
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
    """Flip a bit in the middle of a file."""
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
    loaded = load(config, over).config
    plan = prepare(loaded, str(model), config.parent, check=check)
    return TokenCache.open(plan.train_cache)


def test_every_flipped_bit_is_found_by_the_rank_that_has_the_block(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.data.cache.CHECKSUM_BYTES", 1000)
    config = write_config(tmp_path, model)
    cache = prepared(config, model)
    sha256 = cache.info["sha256"]
    files = sorted(cache.info["files"])

    assert set(files) == set(sha256)
    assert len(sha256["tokens.bin"]) > 1

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
        (line,) = found
        assert f"{name}: damaged" in line
        assert "drumline prepare" in line
        flip(cache.folder / name)


def test_prepare_makes_a_damaged_cache_again(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    folder = prepared(config, model).folder
    tokens = folder / "tokens.bin"
    good = tokens.read_bytes()
    flip(tokens)
    prepared(config, model)

    assert tokens.read_bytes() != good, "sizes alone do not tell"

    prepared(config, model, check=True)
    assert tokens.read_bytes() == good

    info = folder / "info.json"
    other = info.read_text().replace('"max_length": 96', '"max_length": 95')
    info.write_text(other)
    with pytest.raises(DataError, match="not a prepared dataset"):
        TokenCache.open(folder)


@pytest.mark.claim("a run goes on with its own data alone, and its caches are whole")
@pytest.mark.parametrize("kind", ["train_cache", "eval_caches"])
def test_a_run_does_not_start_on_a_damaged_cache(
    tmp_path: Path,
    model: Path,
    kind: str,
) -> None:
    plan, _ = planned(write_config(tmp_path, model))
    assert plan.data is not None

    folders = {"train_cache": plan.data.train_cache, "eval_caches": plan.data.eval_caches[""]}
    flip(Path(folders[kind]) / "learn.bin")
    arguments = (RankInfo(), None, lambda *_, **__: None, None, [], Goodput(0.0))
    with pytest.raises(DataError, match=r"learn.bin: damaged"):
        build(plan, *arguments)  # type: ignore[arg-type]

    trusting = load(tmp_path / "config.yaml", ["data.verify=false"]).config
    build(plan.model_copy(update={"config": trusting}), *arguments)  # type: ignore[arg-type]


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
    # Without the old cache there are its number of rows and what they come to.
    gone = old.model_copy(update={"cache": str(tmp_path / "gone")})

    def change_to(
        rows: Any,
        since: DataIdentity = old,
        **data: Any,
    ) -> str | None:
        return what_changed(since, identify(prepared(config, model, rows, **data)))

    for words, rows in CHANGES.items():
        assert change_to(rows) == words

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "train.jsonl").rename(elsewhere / "train.jsonl")

    assert change_to(ROWS, workers=2) is None

    learned = change_to(ROWS, learn_on="all")
    assert learned is not None
    assert "their tokens or other columns differ" in learned

    reversed_rows = "the same 40 rows, in another order or with other tokens"
    fewer_rows = "40 rows before, 39 now, and not the same ones"
    assert change_to(ROWS[::-1], since=gone) == reversed_rows
    assert change_to(ROWS[1:], since=gone) == fewer_rows


def planned(
    config: Path,
    resume: str | None = None,
    allow: tuple[str, ...] = (),
    *over: str,
) -> tuple[Plan, Request]:
    loaded = load(config, list(over))
    request = Request(loaded, resume=Resume.parse(resume), allow=allow)
    plan = make_plan(request, on_progress=lambda *_: None)
    return plan, request


def resumed(
    config: Path,
    resume: str,
    *allow: str,
) -> Any:
    """Return what a run that goes on would start from."""
    plan, request = planned(config, resume, allow)
    _, start = claim_run_dir(plan, request)
    return start


def checkpointed(plan: Plan, data: DataIdentity | None) -> None:
    """Save step 1 into the run folder, with what was trained on or, as old ones, without it."""
    state: dict[str, Any] = {"config": plan.config.model_dump(mode="json"), "trainer": {}}
    # Commit 474a450 wrote none.
    if data is not None:
        state["data"] = data.model_dump()

    folder = Path(plan.run_dir) / "checkpoints"
    saver = Checkpointer(
        folder,
        2,
        True,
        "min",
        asynchronous=False,
    )
    saver.save(1, {"model.w": torch.zeros(2)}, state, None)
    saved = saver.wait()

    assert saved[0].error is None


@pytest.mark.slow
@pytest.mark.claim("a run goes on with its own data alone, and its caches are whole")
def test_a_run_goes_on_with_its_own_data_alone(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, model)
    plan, request = planned(config)
    claim_run_dir(plan, request)

    assert plan.data is not None
    assert plan.data.identity is not None

    checkpointed(plan, plan.data.identity)
    write_rows(tmp_path / "eval.jsonl", chat_rows(3, seed=5))
    assert resumed(config, "newest") == Resume(), "the held-out set may change"
    assert not capsys.readouterr().err

    write_rows(tmp_path / "train.jsonl", ROWS[::-1])
    newest = Path(plan.run_dir) / "checkpoints" / "step-00000001"
    changed = "the training data changed since this checkpoint: the same 40 rows in another order"
    for resume in ("newest", plan.run_dir, str(newest)):
        with pytest.raises(CheckpointError, match=f"{changed} — .*--allow data"):
            resumed(config, resume)
        with pytest.raises(CheckpointError, match="the training data changed"):
            resumed(config, resume, "optimizer.lr")

    # A kill came while it was saved again.
    newest.rename(newest.with_name(".trash-step-00000001-0123abcd"))
    with pytest.raises(CheckpointError, match="the training data changed"):
        resumed(config, "newest")

    for allowed in ("data", "all"):
        assert resumed(config, "newest", allowed) == Resume()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("note: the training data changed since")
        assert "another order" in line


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("named", ["empty", "nowhere", "a.yaml/x"])
def test_resume_from_no_checkpoint_is_refused_before_any_work(
    tmp_path: Path,
    named: str,
    dry_run: bool,
) -> None:
    config = write_config(tmp_path, tmp_path / "a model that is not there yet")
    (tmp_path / "empty").mkdir()
    request = Request(load(config, []), resume=Resume(str(tmp_path / named)))

    def fail(*work: Any) -> None:
        pytest.fail(f"worked: {work}")

    refusal = "not a committed checkpoint|there is no such file or folder"
    with pytest.raises(CheckpointError, match=refusal):
        make_plan(request, on_progress=fail, dry_run=dry_run)


def test_an_old_checkpoint_says_that_it_does_not_know(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, model)
    plan, request = planned(config)
    claim_run_dir(plan, request)
    checkpointed(plan, None)

    assert resumed(config, "newest") == Resume()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ")
    assert "does not say what data it was trained on" in line


LONG_PROMPT = {"prompt": "word " * 80, "completion": "yes"}
LONG_ANSWER = {"prompt": "one", "completion": "word " * 80}
UNANSWERED = {"messages": [{"role": "user", "content": "nobody answers"}]}


def test_what_was_left_out_is_said(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model)
    rows = [*ROWS[:30]]
    rows += [LONG_PROMPT] * 3
    rows += [UNANSWERED] * 2
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "eval.jsonl", [*ROWS[:4], LONG_ANSWER])

    def left_out(policy: str) -> Any:
        loaded = load(config, [f"data.truncation={policy}", "data.max_length=150"])
        return prepare(loaded.config, str(model), tmp_path).left_out

    cut = left_out("left")
    skipped = "2 of 35 rows skipped: nothing to learn"

    assert cut[0].startswith(f"data.train: 3 of 35 rows cut at 150 tokens; {skipped}"), cut
    assert cut[1] == "data.eval: 1 of 5 rows cut at 150 tokens"

    dropped = left_out("drop")
    assert dropped[0] == f"data.train: 3 of 35 rows dropped: longer than 150 tokens; {skipped}"
    assert dropped[1] == "data.eval: 1 of 5 rows dropped: longer than 150 tokens"
