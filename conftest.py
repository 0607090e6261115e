"""Options of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.config import registry
from tests.harness import ENV

# Their asserts are the tests' own.
pytest.register_assert_rewrite("tests.distributed.promises", "tests.distributed.setups")

# What a test does in process may start processes, too: of rewards, which find `tests.harness:letters` by this alone. One thread, set
# before torch is imported: two workers with a thread a core each would wait for each other.
os.environ.update({name: ENV[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in ENV})


# Under `nohup` it is ignored, and so it would be by all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_kinds_end_with_their_test() -> Iterator[None]:
    """What a test's config named as `path.py:Name` is no kind in the next test of the same process."""
    known = {base: dict(kinds) for base, kinds in registry._users_specs.items()}
    yield
    registry._users_specs.clear()
    registry._users_specs.update(known)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_no_garbage() -> None:
    """Keep the collector from all objects that imports and other files have left.

    A loop collects all garbage when it begins, and searches all objects for tensors in its third
    step: without this both take seconds in each test.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-results",
        type=Path,
        default=None,
        help="write what the parity test measured to this JSON file",
    )
    parser.addoption(
        "--write-counts",
        action="store_true",
        help="write tests/fake_gpu/counts.json anew from what the rows do",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="also the tests marked `full`: what `make test-full` runs",
    )
    parser.addoption(
        "--claims",
        action="store_true",
        help="list what is claimed, each with the tests that show it, and run nothing",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    results: Path | None = session.config.getoption("--parity-results")
    if results is not None and not hasattr(session.config, "workerinput"):
        results.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while all test files are imported: next to none of it is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full` a test that is marked so is left out. With `--claims` no test is run."""
    if config.getoption("--claims"):
        for claim, nodes in sorted(claims_of(items).items()):
            print(claim, *nodes, sep="\n    ")
        items.clear()
    if config.getoption("--full"):
        return
    out = [item for item in items if item.get_closest_marker("full")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def claims_of(items: list[pytest.Item]) -> dict[str, list[str]]:
    """Return claim → the tests that show it, without their parameters."""
    found: dict[str, list[str]] = {}
    for item in items:
        node = item.nodeid.partition("[")[0]
        for marker in item.iter_markers("claim"):
            nodes = found.setdefault(marker.args[0], [])
            if node not in nodes:
                nodes.append(node)
    return found


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes have their argument's name as id: gzip writes the second into them, and workers must find the same tests."""
    return argname if isinstance(val, bytes) else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.scheduling import Files

    return Files(config, log)
