"""Checkpoints at a URL, against a server that speaks S3 in a process of its own: killed at random,
cut off, full of other things."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from drumline.checkpoint import remote as remote_module
from drumline.checkpoint.disks import fetch
from drumline.checkpoint.load import check, load_tensors, newest_state
from drumline.checkpoint.manifest import MANIFEST
from drumline.checkpoint.remote import (
    Store,
    choose,
    copy_run_files_within,
    local_copy,
    read_remote_manifests,
    read_remote_state,
    require_unused,
)
from drumline.checkpoint.save import Checkpointer
from drumline.config.load import load_text
from drumline.config.resume import CHECKPOINTS
from drumline.errors import CheckpointError, ConfigError, EnvironmentFault
from tests.buckets import SECRET, Relay, environment, server
from tests.checkpoint_ranks import blank, content, differing, run
from tests.faults.savers import (
    SavingRanks,
    last_step,
    require_content,
    require_success,
    resumed,
    root_of,
)
from tests.harness import Finished, drumline, losses, run_drumline, weights, write_config

s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
BUCKET = "drums"
SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server(BUCKET) as found:
        yield found


@pytest.fixture
def url(address: str, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def checkpointer_at(url: str, root: Path, keep: int, asynchronous: bool = False) -> Checkpointer:
    """A checkpointer that copies what it saves to the URL."""
    return Checkpointer(
        root,
        keep=keep,
        keep_best=False,
        mode="min",
        asynchronous=asynchronous,
        url=url,
    )


def save(checkpointer: Checkpointer, step: int) -> None:
    """Save the content of a step, and require that nothing failed."""
    checkpointer.save(step, content(step), {"step": step}, None)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error


def save_for_ever(folder: Path, url: str, apart: bool, asynchronous: bool) -> None:
    root = root_of(folder, apart)
    step = resumed(root, url)
    checkpointer = Checkpointer(root, 2, True, "max", asynchronous, url=url)
    dist.barrier()
    while True:
        step += 1
        metric = float(step * 7 % 5)
        checkpointer.save(step, content(step), {"step": step}, metric=metric)
        require_success(checkpointer.poll())


def has_saved(store: Store, newest_step: int, is_within_upload: bool) -> bool:
    """Tell whether a later checkpoint than `newest_step` is whole at the URL, and, with
    `is_within_upload`, a still later one is on its way."""
    whole = last_step(read_remote_manifests(store))
    if whole <= newest_step:
        return False
    return not is_within_upload or last_step(store.folders(CHECKPOINTS)) > whole


def kill_savers(folder: Path, url: str, trial: int, newest_step: int, draw: random.Random) -> None:
    """SIGKILL to both ranks, within an upload or anywhere. Every second time they have a folder
    each, and every fourth time these were lost before."""
    is_apart = trial % 2 == 1
    is_within_upload = not is_apart
    if trial % 4 == 3:
        shutil.rmtree(folder, ignore_errors=True)  # only the URL is left
    is_asynchronous = bool(draw.randrange(2))
    with SavingRanks(2, save_for_ever, folder, url, is_apart, is_asynchronous) as ranks:
        ranks.await_save(has_saved, Store(url), newest_step, is_within_upload)
        longest = 0.2
        if is_within_upload:
            longest = 0.02
        time.sleep(draw.random() * longest)
        ranks.kill(ranks.processes)


def kill_trials(folder: Path, url: str, trials: int, seed: int) -> int:
    """Kill savers; how many left half a checkpoint at the URL. AssertionError if one that counts
    is not what was saved."""
    draw = random.Random(seed)
    store = Store(url)
    half = 0
    newest_step = 0
    for trial in range(trials):
        kill_savers(folder, url, trial, newest_step, draw)
        manifests = read_remote_manifests(store)
        if set(store.folders(CHECKPOINTS)) - set(manifests):
            half += 1
        for name, manifest in manifests.items():
            with local_copy(f"{url}/{CHECKPOINTS}/{name}") as copy:
                require_content(copy, manifest.step)
                assert check(copy, verify=True) == manifest, (trial, name)

        _, state = read_remote_state(url)
        assert state["step"] > newest_step, trial
        newest_step = state["step"]
    return half


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
@pytest.mark.timeout(240)
def test_no_kill_tears_a_checkpoint_at_a_url(tmp_path: Path, url: str) -> None:
    """Until a kill has fallen into an upload; without one the test proves nothing."""
    for seed in range(3):
        half = kill_trials(tmp_path / f"hosts-{seed}", f"{url}/{seed}", trials=4, seed=seed)
        if half > 0:
            return
    raise AssertionError("no kill fell into an upload")


@pytest.mark.full
@pytest.mark.timeout(580)
def test_no_kill_of_many_tears_one(tmp_path: Path, url: str) -> None:
    assert kill_trials(tmp_path / "hosts", url, trials=24, seed=1) > 5


def test_large_files_go_in_parts_and_come_back(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PART_BYTES", 5 << 20)
    checkpointer = checkpointer_at(url, tmp_path / CHECKPOINTS, keep=1)
    tensors = {"model.large": torch.randn(3_000_000)}
    (tmp_path / "plan.json").write_text("{}")
    for step in (1, 2):
        checkpointer.save(step, tensors, {"step": step}, None)
        (result,) = checkpointer.wait()
        assert result.error is None
        assert result.path == tmp_path / CHECKPOINTS / f"step-{step:08d}"

    store = checkpointer.remote.store
    assert store.folders(CHECKPOINTS) == ["step-00000002"], "one is kept there, too"

    entry = store.fs.info(f"{store.root}/{CHECKPOINTS}/step-00000002/{SHARD}")
    assert entry["ETag"].strip('"').endswith("-3"), entry  # S3's mark of an object of three parts
    assert store.read("plan.json") == b"{}"
    assert store.read(f"{CHECKPOINTS}/latest") == b"step-00000002\n"

    back = blank(tensors)
    load_tensors(fetch(url, tmp_path / "fetched"), back)

    assert differing(back, tensors) == []

    used = r"holds the checkpoints of a run \(step-00000002\).*--resume"
    with pytest.raises(EnvironmentFault, match=used):
        require_unused(url)


def test_damage_there_is_noticed_and_the_one_before_used(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = checkpointer_at(url, tmp_path / CHECKPOINTS, keep=3)
    for step in (1, 2, 3):
        save(checkpointer, step)
    store = checkpointer.remote.store
    whole = store.read(f"{CHECKPOINTS}/step-00000002/{SHARD}")
    store.put_bytes(whole, f"{CHECKPOINTS}/step-00000003/{SHARD}")  # of the same size
    store.put_bytes(b"{}", f"{CHECKPOINTS}/step-00000002/{MANIFEST}")
    shutil.rmtree(tmp_path / CHECKPOINTS)

    monkeypatch.setattr(remote_module, "PAUSES", [0.01])
    with pytest.raises(CheckpointError, match=r"step-00000003/__0_0.distcp: .*sha256 differs"):
        fetch(f"{url}/{CHECKPOINTS}/step-00000003", tmp_path / "fetched")

    _, _, manifest = choose(url)
    assert manifest.step == 3
    assert list(read_remote_manifests(store)) == ["step-00000001", "step-00000003"]


def test_only_its_owner_may_read_a_downloaded_state(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    save(checkpointer_at(url, tmp_path / CHECKPOINTS, keep=1), 1)
    state = fetch(url, tmp_path / "fetched") / "state.json"
    assert state.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_not_taken_for_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    save(checkpointer_at(url, tmp_path / CHECKPOINTS, keep=1), 1)
    monkeypatch.setattr(remote_module, "PAUSES", [math.inf])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    with pytest.raises(CheckpointError, match=r"fetched/\S+: cannot be written: no space"):
        fetch(url, tmp_path / "fetched")


def test_a_damaged_owner_is_an_error_of_the_last_copy(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    Store(url).put_bytes(b'{"token": ', "owner.json")
    with pytest.raises(OSError, match="damaged: it does not say which run writes here"):
        copy_run_files_within(url, tmp_path, 60)


def test_an_upload_that_fails_whenever_it_is_tried_is_not_tried_again(tmp_path: Path) -> None:
    checkpointer = checkpointer_at(f"file://{tmp_path}/store", tmp_path / CHECKPOINTS, keep=1)
    mistake = TypeError("a mistake in the program")
    with patch.object(checkpointer.remote, "finish", side_effect=mistake):
        checkpointer.save(1, content(1), {"step": 1}, None)
        (result,) = checkpointer.wait()
    assert result.path is None
    assert result.is_permanent


def test_a_store_that_comes_and_goes(
    tmp_path: Path, url: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PAUSES", [0.05] * 4)
    root = tmp_path / CHECKPOINTS
    relay = Relay(address)
    with environment(relay.address):
        s3fs.S3FileSystem.clear_instance_cache()
        checkpointer = checkpointer_at(url, root, keep=2)
        relay.cut(12)
        save(checkpointer, 1)
        s3fs.S3FileSystem.clear_instance_cache()

    assert relay.refused == 0

    # Another start takes it over.
    store = checkpointer_at(url, root, keep=2).remote.store
    store.put_bytes(b'{"token": "another", "host": "far", "pid": 7}', "owner.json")
    checkpointer.save(2, content(2), {"step": 2}, None)
    (result,) = checkpointer.wait()

    assert result.path is None
    assert result.error is not None
    assert "it is whole in" in result.error
    assert "taken over by pid 7 on host far" in result.error
    assert list(read_remote_manifests(store)) == ["step-00000001"]
    assert newest_state(root, url) == (str(root / "step-00000002"), {"step": 2})


def save_on_both_hosts(folder: Path, url: str) -> tuple[int, list[str]]:
    """Return the step that comes back, and the names of this host's files."""
    root = root_of(folder, apart=True)
    checkpointer = checkpointer_at(url, root, keep=2, asynchronous=True)
    save(checkpointer, 5)
    step = resumed(root, url)
    names = [path.name for path in (root / "step-00000005").iterdir()]
    return step, sorted(names)


def test_hosts_without_a_shared_folder_keep_parts_and_put_them_together(
    tmp_path: Path, url: str
) -> None:
    for step, names in run(2, save_on_both_hosts, tmp_path, url):
        assert step == 5
        assert names == [".metadata", SHARD, "__1_0.distcp", "manifest.json", "state.json"]
    shutil.rmtree(tmp_path / "host-1")
    assert run(2, resume, tmp_path, url) == [5, 5], "the URL has what is lost"


def resume(folder: Path, url: str) -> int:
    return resumed(root_of(folder, apart=True), url)


# As users do.


@pytest.mark.parametrize(
    "override, mistake",
    [
        ("checkpoint.url=s3://me:hunter2hunter2@drums/run", "is a secret"),
        (
            "checkpoint.url=s3://token-token-token@drums/run",
            "credentials come from the environment",
        ),
        ("checkpoint.url=s3://", "names no bucket"),
        ("checkpoint.url=runs/one", "no URL"),
        ("checkpoint.url=memory://x", "lost with each process"),
        ("checkpoint.url=https://host/x", "cannot be written to"),
        ("run.dir=s3://drums/run", "set checkpoint.url to it"),
    ],
)
def test_urls_that_cannot_be(override: str, mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake) as caught:
        load_text("data: {train: [{kind: file, path: x.jsonl}]}", [override])
    assert "hunter2" not in caught.value.line().replace(override, "")


def run_in_secret(*arguments: object) -> Finished:
    """Run a command that succeeds and does not print the store's secret."""
    finished = run_drumline(*arguments)
    assert SECRET not in finished.out + finished.err
    return finished


def require_no_secret(folder: Path, store: Store) -> None:
    """Require that the store's secret is in none of the run's files, here and at the URL."""
    secret = SECRET.encode()
    for name in store.fs.find(store.root):
        assert secret not in store.fs.cat_file(name), name
    for path in folder.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path


@pytest.mark.full  # the parts of it stand above
@pytest.mark.timeout(500)
def test_a_run_whose_folder_is_lost_goes_on_from_its_url(
    model: Path, run_dir: Path, tmp_path: Path, url: str
) -> None:
    config = write_config(tmp_path, model, run={"steps": 2})
    at_url = f"checkpoint.url={url}"
    run_in_secret("train", config, at_url)
    again = drumline("train", config, at_url, f"run.dir={tmp_path / 'other'}")

    assert again.code == 2, again.err
    assert "holds the checkpoints of a run (step-00000002)" in again.error_lines[0], again.err

    shutil.rmtree(run_dir)
    longer = ("run.steps=4", "--allow", "run.steps")
    run_in_secret("train", config, at_url, "--resume", *longer)

    assert sorted(losses(run_dir)) == [3, 4]

    copy = tmp_path / "copy"
    place = f"{url}/checkpoints/step-00000002"
    run_in_secret("train", config, f"run.dir={copy}", "--resume", place, *longer)

    assert losses(copy) == losses(run_dir)
    assert not (copy / "fetched").exists()
    assert differing(weights(copy), weights(run_dir)) == []

    run_in_secret("export", url, "--to", tmp_path / "exported", "--which", "4")
    assert (tmp_path / "exported" / "model.safetensors").is_file()

    scored = f"run.dir={tmp_path / 'scored'}"
    shown = run_in_secret("eval", config, "--checkpoint", url, scored)

    assert "step-00000004" in shown.out

    store = Store(url)
    assert b'"run_end"' in store.read("events.jsonl")

    require_no_secret(tmp_path, store)


def test_a_store_that_never_answers_does_not_hold_up_a_run_that_has_ended(tmp_path: Path) -> None:
    s3fs.S3FileSystem.clear_instance_cache()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with environment(f"http://127.0.0.1:{port}"):
            with pytest.raises(TimeoutError, match=r"no answer within 0\.5 seconds"):
                copy_run_files_within(f"s3://{BUCKET}/one", tmp_path, 0.5)
    # Whoever opens the store next must not get the client of the silent one.
    s3fs.S3FileSystem.clear_instance_cache()
