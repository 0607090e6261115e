"""Checkpoints at a URL, against a server that speaks S3 in a process of its own: killed at random, cut off, full of other things."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drumline.checkpoint import remote as remote_module
from drumline.checkpoint.disks import Disks, Gatherer, fetch
from drumline.checkpoint.load import check, load, newest_state, read_state
from drumline.checkpoint.manifest import MANIFEST, step_of
from drumline.checkpoint.ranks import Ranks
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
from drumline.config.config import Config
from drumline.config.resume import CHECKPOINTS
from drumline.errors import CheckpointError, ConfigError, EnvironmentFault
from tests.buckets import SECRET, Relay, environment, server
from tests.checkpoint_ranks import blank, content, differing, end, run, start
from tests.harness import Finished, drumline, losses, weights, write_config
from tests.tiny import tiny_model_dir

pytest.importorskip("s3fs", reason="the extra s3 is not installed")
BUCKET = "drums"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server(BUCKET) as found:
        yield found


@pytest.fixture
def url(address: str, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def root_of(folder: Path, apart: bool) -> Path:
    """The folder of this rank's host, of which there are as many as ranks where they are `apart`."""
    return folder / f"host-{Ranks.all().rank if apart else 0}" / CHECKPOINTS


def resumed(root: Path, url: str | None) -> int:
    """The step of the newest checkpoint, whose content is compared on this rank; 0 without one."""
    ranks = Ranks.all(error_type=CheckpointError)
    found = Gatherer(root, True, Store(url) if url else None, Disks.find(root, ranks)).newest()
    if found.path is None:
        return 0
    step = read_state(found.path)["step"]
    tensors = blank(content(step))
    load(found.path, tensors)
    assert differing(tensors, content(step)) == [], found.path
    return int(step)


def save_for_ever(folder: Path, url: str, apart: bool, asynchronous: bool) -> None:
    root = root_of(folder, apart)
    step = resumed(root, url)
    checkpointer = Checkpointer(root, 2, True, "max", asynchronous, url=url)
    dist.barrier()
    while True:
        step += 1
        checkpointer.save(step, content(step), {"step": step}, metric=float(step * 7 % 5))
        errors = [result.error for result in checkpointer.poll() if result.error]
        assert not errors, errors


def kill_trials(folder: Path, url: str, trials: int, seed: int) -> int:
    """Kill savers; how many left half a checkpoint at the URL. AssertionError where one that counts is not what was saved."""
    draw, store, half, newest_step = random.Random(seed), Store(url), 0, 0
    for trial in range(trials):
        apart = trial % 2 == 1
        if trial % 4 == 3:
            shutil.rmtree(folder, ignore_errors=True)  # only the URL is left
        started = start(2, save_for_ever, folder, url, apart, bool(draw.randrange(2)))
        try:
            deadline, done = time.monotonic() + 60, newest_step
            while done == newest_step or (
                trial % 2 == 0
                and not any((step_of(name) or 0) > done for name in store.folders(CHECKPOINTS))
            ):
                assert time.monotonic() < deadline and all(
                    process.is_alive() for process, _ in started
                ), "no save came"
                time.sleep(0.01)
                done = max(
                    [
                        newest_step,
                        *(manifest.step for manifest in read_remote_manifests(store).values()),
                    ]
                )
            # Within an upload, or anywhere.
            time.sleep(draw.random() * (0.02 if trial % 2 == 0 else 0.2))
            for process, _ in started:
                os.kill(process.pid or 0, signal.SIGKILL)
        finally:
            end([process for process, _ in started])
        found = read_remote_manifests(store)
        half += any(name not in found for name in store.folders(CHECKPOINTS))
        for name, manifest in found.items():
            with local_copy(f"{url}/{CHECKPOINTS}/{name}") as copy:
                tensors = blank(content(manifest.step))
                load(copy, tensors)
                assert (
                    check(copy, verify=True) == manifest
                    and differing(tensors, content(manifest.step)) == []
                ), (trial, name)
        _, state = read_remote_state(url)
        assert state["step"] > newest_step, trial
        newest_step = state["step"]
    return half


@pytest.mark.claim(
    "no kill tears a checkpoint at a URL or in memory, and a host lost with its disk costs nothing"
)
@pytest.mark.timeout(240)
def test_no_kill_tears_a_checkpoint_at_a_url(tmp_path: Path, url: str) -> None:
    trials = (
        kill_trials(tmp_path / f"hosts-{seed}", f"{url}/{seed}", trials=4, seed=seed)
        for seed in range(3)
    )
    assert any(trials), "no kill fell into an upload: the test proves nothing"


@pytest.mark.full
@pytest.mark.timeout(580)
def test_no_kill_of_many_tears_one(tmp_path: Path, url: str) -> None:
    assert kill_trials(tmp_path / "hosts", url, trials=24, seed=1) > 5


def test_large_files_go_in_parts_and_come_back(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PART_BYTES", 5 << 20)
    checkpointer = Checkpointer(tmp_path / CHECKPOINTS, 1, False, "min", False, url=url)
    tensors = {"model.large": torch.randn(3_000_000)}
    (tmp_path / "plan.json").write_text("{}")
    for step in (1, 2):
        checkpointer.save(step, tensors, {"step": step}, None)
        (result,) = checkpointer.wait()
        assert result.error is None and result.path == tmp_path / CHECKPOINTS / f"step-{step:08d}"
    store = checkpointer.remote.store
    assert store.folders(CHECKPOINTS) == ["step-00000002"], "one is kept there, too"
    entry = store.fs.info(f"{store.root}/{CHECKPOINTS}/step-00000002/__0_0.distcp")
    assert entry["ETag"].strip('"').endswith("-3"), entry  # S3's mark of an object of three parts
    assert (
        store.read("plan.json") == b"{}"
        and store.read(f"{CHECKPOINTS}/latest") == b"step-00000002\n"
    )
    folder = fetch(url, tmp_path / "fetched")
    back = blank(tensors)
    load(folder, back)
    assert differing(back, tensors) == []
    with pytest.raises(
        EnvironmentFault, match=r"holds the checkpoints of a run \(step-00000002\).*--resume"
    ):
        require_unused(url)


def test_damage_there_is_noticed_and_the_one_before_used(tmp_path: Path, url: str) -> None:
    checkpointer = Checkpointer(tmp_path / CHECKPOINTS, 3, False, "min", False, url=url)
    for step in (1, 2, 3):
        checkpointer.save(step, content(step), {"step": step}, None)
        assert checkpointer.wait()[0].error is None
    store = checkpointer.remote.store
    whole = store.read(f"{CHECKPOINTS}/step-00000002/__0_0.distcp")
    store.put_bytes(whole, f"{CHECKPOINTS}/step-00000003/__0_0.distcp")  # of the same size
    store.put_bytes(b"{}", f"{CHECKPOINTS}/step-00000002/{MANIFEST}")
    shutil.rmtree(tmp_path / CHECKPOINTS)
    remote_module.PAUSES, before = [0.01], remote_module.PAUSES
    try:
        with pytest.raises(CheckpointError, match=r"step-00000003/__0_0.distcp: .*sha256 differs"):
            fetch(f"{url}/{CHECKPOINTS}/step-00000003", tmp_path / "fetched")
    finally:
        remote_module.PAUSES = before
    assert choose(url)[2].step == 3 and list(read_remote_manifests(store)) == [
        "step-00000001",
        "step-00000003",
    ]


def test_a_store_that_comes_and_goes(
    tmp_path: Path, url: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PAUSES", [0.05] * 4)
    relay, clients = Relay(address), pytest.importorskip("s3fs").S3FileSystem
    with environment(relay.address):
        clients.clear_instance_cache()
        checkpointer = Checkpointer(tmp_path / CHECKPOINTS, 2, False, "min", False, url=url)
        relay.cut(12)
        checkpointer.save(1, content(1), {"step": 1}, None)
        (result,) = checkpointer.wait()
        clients.clear_instance_cache()
    assert result.error is None and relay.refused == 0
    # Another start takes it over.
    elsewhere = Checkpointer(tmp_path / CHECKPOINTS, 2, False, "min", False, url=url)
    elsewhere.remote.store.put_bytes(b'{"token": "another", "host": "far", "pid": 7}', "owner.json")
    checkpointer.save(2, content(2), {"step": 2}, None)
    (result,) = checkpointer.wait()
    assert (
        result.path is None
        and "it is whole in" in (result.error or "")
        and "taken over by pid 7 on host far" in (result.error or "")
    )
    assert [*read_remote_manifests(elsewhere.remote.store)] == ["step-00000001"]
    assert newest_state(tmp_path / CHECKPOINTS, url) == (
        str(tmp_path / CHECKPOINTS / "step-00000002"),
        {"step": 2},
    )


def both_hosts(folder: Path, url: str) -> tuple[int, list[str]]:
    checkpointer = Checkpointer(root_of(folder, True), 2, False, "min", True, url=url)
    checkpointer.save(5, content(5), {"step": 5}, None)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error
    step = resumed(checkpointer.root, url)
    return step, sorted(path.name for path in (checkpointer.root / "step-00000005").iterdir())


def test_hosts_without_a_shared_folder_keep_parts_and_put_them_together(
    tmp_path: Path, url: str
) -> None:
    for step, names in run(2, both_hosts, tmp_path, url):
        assert step == 5
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "state.json"]
    shutil.rmtree(tmp_path / "host-1")
    assert run(2, lose_one, tmp_path, url) == [5, 5], "the URL has what is lost"


def lose_one(folder: Path, url: str) -> int:
    return resumed(root_of(folder, True), url)


# ---------------------------------------------------------------------------------------------------------- as users do


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
    from drumline.config.load import load_text

    with pytest.raises(ConfigError, match=mistake) as caught:
        load_text("data: {train: [{kind: file, path: x.jsonl}]}", [override])
    assert "hunter2" not in caught.value.line().replace(override, "") and isinstance(Config, type)


def ok(finished: Finished) -> Finished:
    assert finished.code == 0, finished.err
    assert SECRET not in finished.out + finished.err
    return finished


@pytest.mark.full  # the parts of it stand above
@pytest.mark.timeout(500)
def test_a_run_whose_folder_is_lost_goes_on_from_its_url(tmp_path: Path, url: str) -> None:
    config = write_config(tmp_path, tiny_model_dir(tmp_path / "model"), run={"steps": 2})
    ok(drumline("train", config, f"checkpoint.url={url}"))
    again = drumline("train", config, f"checkpoint.url={url}", f"run.dir={tmp_path / 'other'}")
    assert (
        again.code == 2 and "holds the checkpoints of a run (step-00000002)" in again.error_lines[0]
    ), again.err
    shutil.rmtree(tmp_path / "run")
    longer = ("run.steps=4", "--allow", "run.steps")
    ok(drumline("train", config, f"checkpoint.url={url}", "--resume", *longer))
    assert sorted(losses(tmp_path / "run")) == [3, 4]
    ok(
        drumline(
            "train",
            config,
            f"run.dir={tmp_path / 'copy'}",
            "--resume",
            f"{url}/checkpoints/step-00000002",
            *longer,
        )
    )
    assert (
        losses(tmp_path / "copy") == losses(tmp_path / "run")
        and not (tmp_path / "copy" / "fetched").exists()
    )
    assert differing(weights(tmp_path / "copy"), weights(tmp_path / "run")) == []
    ok(drumline("export", url, "--to", tmp_path / "exported", "--which", "4"))
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    shown = ok(drumline("eval", config, "--checkpoint", url, f"run.dir={tmp_path / 'scored'}"))
    assert "step-00000004" in shown.out
    store = Store(url)
    assert b'"run_end"' in store.read("events.jsonl")
    there: list[bytes] = [store.fs.cat_file(path) for path in store.fs.find(store.root)]
    files: list[Any] = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in each for each in (*there, *files))


def test_a_store_that_never_answers_does_not_hold_up_a_run_that_has_ended(tmp_path: Path) -> None:
    clients = pytest.importorskip("s3fs").S3FileSystem
    clients.clear_instance_cache()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with (
            environment(f"http://127.0.0.1:{port}"),
            pytest.raises(TimeoutError, match=r"no answer within 0\.5 seconds"),
        ):
            copy_run_files_within(f"s3://{BUCKET}/one", tmp_path, 0.5)
    # Whoever opens the store next must not get the client of the silent one.
    clients.clear_instance_cache()
